"""Texts: files or data sets -> documents -> windows of token ids.

Calibration and evaluation read text through this module only, so both models of a comparison see the same
tokens under the same BOS policy.
"""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedTokenizerBase

from mla_convert.errors import BadCheckpoint, BadOption

logger = logging.getLogger(__name__)

EVAL_EVERY = 4  # every 4th topic of Python's own documentation is kept for evaluation
DATASET_CHARS = 64_000_000  # named data sets are streamed up to here, far above what any window count needs
# One in this many of the windows that calibrate and heal a model with a chat template is a conversation.
CHAT_EVERY = 8
BOS_EVERY_WINDOW = "BOS at the start of every window"
BOS_NEVER = "no BOS"


def read_documents(data: Sequence[str], part: str = "calib") -> list[str]:
    """Documents of the named texts, in the order given.

    `data` names files (.txt: one document; .jsonl: field "text"; .parquet: column "text") or data sets of the
    `datasets` library ("name", "name:config", "name:config:split", split "train" if not given). With no name
    at all the text is Python's own `pydoc_data.topics`, whose topics are split into the disjoint parts
    "calib" and "eval"; `part` has no effect on named texts. Blank documents are left out.

    Raises BadOption for a missing file, an unknown suffix, an unreadable record, or when no text is left.
    """
    if part not in ("calib", "eval"):
        raise BadOption(f'part="{part}" is not a part of the built-in text; use "calib" or "eval"')
    if not data:
        return _python_topics(part)
    documents: list[str] = []
    for name in data:
        found = [doc for doc in _read_one(name) if doc.strip()]
        if not found:
            raise BadOption(f'text "{name}" is empty: 0 documents with text; name a text that fills a window')
        documents += found
    return documents


def bos_policy(tokenizer: PreTrainedTokenizerBase) -> str:
    """The one BOS policy used for every window and every model: BOS_EVERY_WINDOW or BOS_NEVER.

    BOS is put at the start of every window exactly when the tokenizer puts it at the start of a text by
    itself.
    """
    bos = tokenizer.bos_token_id
    if bos is None:
        return BOS_NEVER
    ids = tokenizer("a")["input_ids"]
    plain = tokenizer("a", add_special_tokens=False)["input_ids"]
    return BOS_EVERY_WINDOW if list(ids[:1]) == [bos] and list(plain[:1]) != [bos] else BOS_NEVER


def token_stream(tokenizer: PreTrainedTokenizerBase, documents: Sequence[str]) -> torch.Tensor:
    """All documents joined by a blank line and tokenised once, no special tokens: int64 [tokens]."""
    # verbose=False: the text is cut into windows below, its length against model_max_length means nothing
    ids = tokenizer("\n\n".join(documents), add_special_tokens=False, verbose=False)["input_ids"]
    return torch.tensor(ids, dtype=torch.int64)


def token_windows(
    tokenizer: PreTrainedTokenizerBase,
    documents: Sequence[str],
    window: int,
    count: int | None,
    stride: int | None = None,
) -> torch.Tensor:
    """Windows of token ids, int64 [count, window]; windows start `stride` text tokens apart.

    `stride` None: the windows do not overlap. Where `bos_policy` asks for BOS, every window is BOS followed
    by window - 1 tokens of text. The tail that does not fill a window is left out. `count` None: all windows
    there are; fewer than `count`: all there are, with a warning.

    Raises BadOption for a window below 2, a stride outside 1..window, a count below 1, or a text shorter than
    one window.
    """
    has_bos = bos_policy(tokenizer) == BOS_EVERY_WINDOW
    body = window - 1 if has_bos else window
    if window < 2:
        raise BadOption(f"window={window} leaves no token to predict; use 2 or more")
    if count is not None and count < 1:
        raise BadOption(f"windows={count} asks for no text; use 1 or more")
    if stride is not None and not 1 <= stride <= window:
        raise BadOption(
            f"stride={stride} is outside 1..{window} (the window); use {window} for windows without overlap"
        )
    ids = token_stream(tokenizer, documents)
    if len(ids) < body:
        raise BadOption(f"the text has {len(ids)} tokens, one window needs {body}; give more text or a smaller window")
    windows = ids.unfold(0, body, min(stride or body, body))
    if count is not None and len(windows) < count:
        logger.warning("%d windows of %d tokens asked for, the text holds %d", count, window, len(windows))
    windows = windows[:count]
    if has_bos:
        bos = torch.full((len(windows), 1), int(tokenizer.bos_token_id or 0), dtype=torch.int64)
        windows = torch.cat([bos, windows], dim=1)
    return windows.contiguous()


def text_hash(documents: Iterable[str]) -> str:
    """sha256 over the documents and their borders (hex)."""
    digest = hashlib.sha256()
    for doc in documents:
        raw = doc.encode()
        digest.update(f"{len(raw)}:".encode())
        digest.update(raw)
    return digest.hexdigest()


def _python_topics(part: str) -> list[str]:
    from pydoc_data.topics import topics

    # order by hash, not by name: neighbours in the alphabet often are about the same thing
    names = sorted(topics, key=lambda name: hashlib.sha256(name.encode()).hexdigest())
    chosen = [name for i, name in enumerate(names) if (i % EVAL_EVERY == 0) == (part == "eval")]
    return [topics[name].strip() for name in chosen if topics[name].strip()]


def _read_one(name: str) -> list[str]:
    path = Path(name).expanduser()
    readers = {".txt": _read_txt, ".jsonl": _read_jsonl, ".parquet": _read_parquet}
    if path.is_file():
        reader = readers.get(path.suffix.lower())
        if reader is None:
            raise BadOption(f'text "{name}" has suffix "{path.suffix}"; known are {", ".join(readers)}')
        return reader(path)
    if path.suffix.lower() in readers or path.is_absolute():
        raise BadOption(f'text "{name}" is not a file; check the path')
    return _read_dataset(name)


def _read_txt(path: Path) -> list[str]:
    try:
        return [path.read_text(encoding="utf-8")]
    except UnicodeDecodeError as error:
        raise BadOption(f'text "{path}" is not UTF-8 (byte {error.start}); convert it to UTF-8') from error


def _read_jsonl(path: Path) -> list[str]:
    documents: list[str] = []
    try:
        lines = path.read_text(encoding="utf-8").split("\n")
    except UnicodeDecodeError as error:
        raise BadOption(f'text "{path}" is not UTF-8 (byte {error.start}); convert it to UTF-8') from error
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            record = json.loads(line)
        except json.JSONDecodeError as error:
            raise BadOption(
                f'text "{path}" line {number} is not JSON ({error}); one object per line is needed'
            ) from error
        documents.append(_text_field(record, f'text "{path}" line {number}'))
    return documents


def _read_parquet(path: Path) -> list[str]:
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        names = pq.read_schema(path).names
        if "text" not in names:
            raise BadOption(f'text "{path}" has the columns {names}; a column "text" is needed')
        return [str(value) for value in pq.read_table(path, columns=["text"])["text"].to_pylist() if value]
    except pa.ArrowInvalid as error:
        raise BadOption(f'text "{path}" is not a parquet file ({error}); write it again') from error


def _read_dataset(name: str) -> list[str]:
    from datasets import load_dataset

    parts = name.split(":")
    if len(parts) > 3 or not parts[0]:
        raise BadOption(f'text "{name}" has {len(parts)} parts; write "name", "name:config" or "name:config:split"')
    config, split = [*parts[1:], "", ""][:2]
    try:
        rows = load_dataset(parts[0], config or None, split=split or "train", streaming=True)
    except Exception as error:  # datasets raises a dozen unrelated classes here
        raise BadOption(f'text "{name}" is neither a file nor a data set that can be read: {error}') from error
    documents: list[str] = []
    chars = 0
    for row in rows:
        documents.append(_text_field(row, f'data set "{name}"'))
        chars += len(documents[-1])
        if chars > DATASET_CHARS:
            logger.warning('data set "%s": reading stopped after %d characters', name, chars)
            break
    return documents


def _text_field(record: Any, where: str) -> str:
    value = record.get("text") if isinstance(record, dict) else None
    if not isinstance(value, str):
        keys = sorted(record) if isinstance(record, dict) else type(record).__name__
        raise BadOption(f'{where} has no field "text" holding a string (it has {keys}); name the field "text"')
    return value


def check_ids(ids: torch.Tensor, vocab_size: int, source: str) -> None:
    """Raise BadCheckpoint where the tokenizer of `source` gives ids that its embedding does not have."""
    if int(ids.max()) >= vocab_size:
        raise BadCheckpoint(
            f"the tokenizer of {source} gives token id {int(ids.max())}, but config.json says "
            f"vocab_size={vocab_size}; put the model's own tokenizer there"
        )


def with_conversations(tokenizer: PreTrainedTokenizerBase, ids: torch.Tensor, every: int = CHAT_EVERY) -> torch.Tensor:
    """`ids` [windows, tokens] with every `every`-th window retold as a conversation in the tokenizer's chat template.

    Its paragraphs become the turns of user and assistant. A chat model meets its template's tokens in every prompt, the
    first one as attention sink, and plain text holds none of them: SmolLM2 converted without them on one narrow text
    answers a chat prompt with "What is a what is a". Without a template the windows are returned as they are.
    """
    if not getattr(tokenizer, "chat_template", None):
        return ids
    told = ids.clone()
    for window in told[every - 1 :: every]:
        text = tokenizer.decode(window, skip_special_tokens=True)
        assert isinstance(text, str)
        turns = [part for part in text.split("\n\n") if part.strip()]
        messages = [{"role": "assistant" if i % 2 else "user", "content": part} for i, part in enumerate(turns)]
        try:
            turned: Any = tokenizer.apply_chat_template(messages, tokenize=True, return_dict=False)
        except Exception as error:  # templates are programs of their own and raise what they like
            logger.warning("the chat template cannot be filled (%s); calibrating on plain text only", error)
            return ids
        new = torch.tensor(turned[: len(window)], dtype=window.dtype)
        window[: len(new)] = new
    return told
