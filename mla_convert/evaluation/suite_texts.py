"""The texts of a suite as windows of token ids, with the bytes each token stands for."""

from __future__ import annotations

import hashlib
import logging
from dataclasses import dataclass

import torch
from transformers import PreTrainedTokenizerBase

from mla_convert.calibration.texts import (
    BOS_EVERY_WINDOW,
    bos_policy,
    text_hash,
    token_stream,
    token_windows,
    with_conversations,
)
from mla_convert.errors import BadCheckpoint, BadOption
from mla_convert.evaluation.scoring import Windows, full_windows
from mla_convert.evaluation.suite import Suite, TextSpec, documents_of
from mla_convert.source.loading import load_tokenizer

logger = logging.getLogger(__name__)

CHARS_PER_TOKEN = 16  # more than any text has on average


@dataclass(frozen=True, eq=False)
class Text:
    """One text of a suite. windows: its ids and what of them is scored. byte_lengths: int64 [tokens scored] or None.

    sha256: of the documents. ids_sha256: of ids and scored positions, so of all that a score depends on.
    """

    name: str
    windows: Windows
    byte_lengths: torch.Tensor | None
    stride: int
    sha256: str
    ids_sha256: str


def read_texts(suite: Suite, tokenizer: PreTrainedTokenizerBase) -> list[Text]:
    """All texts under `tokenizer`; a chat text of a model without a chat template is left out with a warning."""
    texts = []
    for name, spec in suite.texts.items():
        if spec.chat and not getattr(tokenizer, "chat_template", None):
            logger.warning("text %s is left out: the tokenizer has no chat template", name)
            continue
        texts.append(_read(name, spec, suite, tokenizer))
    if not texts:
        raise BadOption(f"suite {suite.name}: no text is left to score; add one with --text NAME=FILE")
    return texts


def _read(name: str, spec: TextSpec, suite: Suite, tokenizer: PreTrainedTokenizerBase) -> Text:
    stride_asked = None if spec.chat else suite.stride  # conversations do not overlap
    documents = _enough(documents_of(spec), CHARS_PER_TOKEN * suite.windows * suite.window)
    ids = token_windows(tokenizer, documents, suite.window, suite.windows, stride_asked)
    body = suite.window - 1 if bos_policy(tokenizer) == BOS_EVERY_WINDOW else suite.window
    stride = min(stride_asked or body, body)
    lengths = None
    if spec.chat:  # the template's own words have no bytes in the text
        ids = with_conversations(tokenizer, ids, every=1)
    else:
        lengths = _byte_windows(tokenizer, documents, body, stride, len(ids), suite.window)
    windows = full_windows(ids, stride)
    digest = hashlib.sha256(windows.ids.numpy().tobytes() + windows.scored.numpy().tobytes()).hexdigest()
    scored = None if lengths is None else lengths[:, 1:][windows.scored]
    return Text(name, windows, scored, stride, text_hash(documents), digest)


def _enough(documents: list[str], characters: int) -> list[str]:
    """The first documents, the last one cut, that hold `characters`: a long text is not tokenised beyond need."""
    kept: list[str] = []
    for document in documents:
        if characters <= 0:
            break
        kept.append(document[:characters])
        characters -= len(document)
    return kept


def _byte_windows(
    tokenizer: PreTrainedTokenizerBase, documents: list[str], body: int, stride: int, count: int, window: int
) -> torch.Tensor | None:
    lengths = token_bytes(tokenizer, "\n\n".join(documents))
    if lengths is None or len(lengths) != len(token_stream(tokenizer, documents)):
        return None
    found = lengths.unfold(0, body, stride)[:count]
    bos = torch.zeros(len(found), window - body, dtype=torch.int64)  # BOS stands for no text
    return torch.cat([bos, found], dim=1)


def token_bytes(tokenizer: PreTrainedTokenizerBase, text: str) -> torch.Tensor | None:
    """UTF-8 bytes of `text` from the end of the previous token to the end of each token, int64 [tokens].

    They add up to the bytes of the text whatever a tokenizer drops or splits. None: the tokenizer tells no offsets.
    """
    if not tokenizer.is_fast:
        return None
    encoded = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True, verbose=False)
    ends = torch.tensor([end for _, end in encoded["offset_mapping"]], dtype=torch.int64)
    if not len(ends):
        return ends
    sizes = torch.tensor([len(character.encode()) for character in text], dtype=torch.int64)
    upto = torch.cat([torch.zeros(1, dtype=torch.int64), sizes.cumsum(0)])[ends.cummax(0).values]
    lengths = torch.diff(upto, prepend=torch.zeros(1, dtype=torch.int64))
    lengths[-1] += int(sizes.sum()) - int(upto[-1])
    return lengths


def same_tokens(models: tuple[str, ...], reference: str, suite: Suite, texts: list[Text]) -> None:
    """Raise BadOption where a model's tokenizer cuts the suite's texts otherwise than the reference's.

    A model without a tokenizer is scored with the reference's, with a warning.
    """
    for name in models:
        if name == reference:
            continue
        try:
            tokenizer = load_tokenizer(name)
        except BadCheckpoint:
            logger.warning("%s has no tokenizer; the one of %s is used", name, reference)
            continue
        own = read_texts(suite, tokenizer)
        if [text.ids_sha256 for text in own] != [text.ids_sha256 for text in texts]:
            raise BadOption(
                f"the tokenizers of {name} and {reference} cut the same text differently "
                f"({bos_policy(tokenizer)}); nats per token compare only under one tokenizer"
            )
