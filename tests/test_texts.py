import json
import logging
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import tiny_text
import torch
from tiny import tiny_tokenizer

from mla_convert.calibration.texts import (
    BOS_EVERY_WINDOW,
    BOS_NEVER,
    bos_policy,
    read_documents,
    text_hash,
    token_stream,
    token_windows,
    with_conversations,
)
from mla_convert.errors import BadOption


def test_the_three_file_kinds_hold_the_same_documents(tmp_path: Path) -> None:
    docs = ["one two\nthree", "vier fünf"]
    (tmp_path / "a.txt").write_text(docs[0], encoding="utf-8")
    lines = "".join(json.dumps({"text": doc, "id": 7}) + "\n" for doc in [*docs, " \n"])
    (tmp_path / "b.jsonl").write_text(lines + "\n", encoding="utf-8")
    pq.write_table(pa.table({"n": [1, 2, 3], "text": [*docs, None]}), tmp_path / "c.parquet")
    assert read_documents([str(tmp_path / "a.txt")]) == docs[:1]
    assert read_documents([str(tmp_path / "b.jsonl")]) == docs
    assert read_documents([str(tmp_path / "c.parquet")]) == docs
    assert read_documents([str(tmp_path / "c.parquet"), str(tmp_path / "a.txt")]) == [*docs, docs[0]]


def test_a_data_set_name_is_streamed(monkeypatch: pytest.MonkeyPatch) -> None:
    import datasets

    calls = []

    def load_dataset(name: str, config: str | None, split: str, streaming: bool) -> list[dict[str, str]]:
        calls.append((name, config, split, streaming))
        return [{"text": "x" * 40} for _ in range(9)]

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    monkeypatch.setattr("mla_convert.calibration.texts.DATASET_CHARS", 100)
    assert len(read_documents(["owner/set:small:test"])) == 3  # 3 x 40 characters pass the limit of 100
    read_documents(["owner/set"])
    assert calls == [("owner/set", "small", "test", True), ("owner/set", None, "train", True)]


def test_the_built_in_text_is_split_into_disjoint_parts() -> None:
    calib, held_out = read_documents([], "calib"), read_documents([], "eval")
    assert not set(calib) & set(held_out)
    assert len(calib) > 2 * len(held_out) > 20
    assert read_documents([], "calib") == calib
    assert text_hash(calib) != text_hash(held_out)


def test_the_hash_sees_the_borders_of_documents() -> None:
    assert text_hash(["ab", "c"]) != text_hash(["a", "bc"])
    assert text_hash(["ab", "c"]) == text_hash(iter(["ab", "c"]))


@pytest.mark.parametrize(
    ("name", "content", "match"),
    [
        ("x.txt", b"  \n ", r'text ".*x\.txt" is empty'),
        ("x.txt", b"\xff\xfe", r"not UTF-8 \(byte 0\)"),
        ("x.csv", b"a", r'suffix "\.csv"; known are \.txt, \.jsonl, \.parquet'),
        ("x.jsonl", b"", r"is empty"),
        ("x.jsonl", b'{"text": "a"}\n{"text"', r"line 2 is not JSON"),
        ("x.jsonl", b'{"body": "a"}', r"""line 1 has no field "text" .*\['body'\]"""),
        ("x.jsonl", b'{"text": 3}', r'no field "text" holding a string'),
        ("x.parquet", b"PAR", r"not a parquet file"),
    ],
)
def test_unusable_files_are_named(tmp_path: Path, name: str, content: bytes, match: str) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(BadOption, match=match):
        read_documents([str(tmp_path / name)])


def test_a_missing_file_a_missing_column_and_a_missing_set_are_named(tmp_path: Path) -> None:
    with pytest.raises(BadOption, match=r'"nowhere\.txt" is not a file'):
        read_documents(["nowhere.txt"])
    pq.write_table(pa.table({"body": ["a"]}), tmp_path / "c.parquet")
    with pytest.raises(BadOption, match=r"""columns \['body'\]; a column "text" is needed"""):
        read_documents([str(tmp_path / "c.parquet")])
    with pytest.raises(BadOption, match=r'"no/such-set" is neither a file nor a data set'):
        read_documents(["no/such-set"])
    with pytest.raises(BadOption, match=r'part="dev"'):
        read_documents([], "dev")


def test_windows_tile_the_joined_text_without_bos() -> None:
    tok = tiny_text.tokenizer()
    docs = [tiny_text.text(13, 0), tiny_text.text(13, 1)]
    stream = token_stream(tok, docs)
    windows = token_windows(tok, docs, window=5, count=None)
    assert bos_policy(tok) == BOS_NEVER
    assert torch.equal(windows.flatten(), stream[: len(stream) // 5 * 5])
    assert torch.equal(token_windows(tok, docs, 5, 2), windows[:2])
    overlapping = token_windows(tok, docs, 5, None, stride=2)
    assert torch.equal(overlapping[3], stream[6:11])


def test_bos_stands_before_every_window_when_the_tokenizer_adds_it() -> None:
    tok = tiny_text.tokenizer(adds_bos=True)
    docs = [tiny_text.text(23)]
    stream = token_stream(tok, docs)
    windows = token_windows(tok, docs, window=5, count=None)
    assert bos_policy(tok) == BOS_EVERY_WINDOW
    assert windows[:, 0].tolist() == [tiny_text.BOS] * 5  # 23 tokens in windows of 4
    assert torch.equal(windows[:, 1:].flatten(), stream[:20])
    assert tiny_text.BOS not in windows[:, 1:]
    assert torch.equal(token_windows(tok, docs, 5, None, stride=3)[2, 1:], stream[6:10])


def test_fewer_windows_than_asked_for_are_used_with_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        windows = token_windows(tiny_text.tokenizer(), [tiny_text.text(23)], window=5, count=9)
    assert len(windows) == 4
    assert "9 windows of 5 tokens asked for, the text holds 4" in caplog.text


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"window": 64, "count": 1}, r"has 23 tokens, one window needs 64"),
        ({"window": 1, "count": 1}, r"window=1 leaves no token"),
        ({"window": 8, "count": 0}, r"windows=0 asks for no text"),
        ({"window": 8, "count": 1, "stride": 9}, r"stride=9 is outside 1\.\.8"),
        ({"window": 8, "count": 1, "stride": 0}, r"stride=0 is outside 1\.\.8"),
    ],
)
def test_impossible_windows_are_refused(options: dict[str, int], match: str) -> None:
    with pytest.raises(BadOption, match=match):
        token_windows(tiny_text.tokenizer(), [tiny_text.text(23)], **options)


def test_one_window_in_eight_is_a_conversation(tmp_path: Path) -> None:
    tokenizer = tiny_tokenizer()
    ids = token_windows(tokenizer, [f"paragraph {i} of some text\n\n" * 3 for i in range(60)], 64, 17)
    told = with_conversations(tokenizer, ids)
    changed = [i for i in range(17) if not torch.equal(told[i], ids[i])]
    assert changed == [7, 15] and told.shape == ids.shape
    start = tokenizer.convert_tokens_to_ids("<|im_start|>")
    assert told[7, 0] == start and (told[7] == start).sum() > 1 and not (ids == start).any()
    tokenizer.chat_template = None
    assert with_conversations(tokenizer, ids) is ids


def test_a_template_that_cannot_be_filled_is_no_failure(caplog: pytest.LogCaptureFixture) -> None:
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = "{{ raise_exception('only tools') }}"
    ids = token_windows(tokenizer, ["words " * 200], 64, 8)
    assert with_conversations(tokenizer, ids) is ids
    assert "cannot be filled (only tools)" in caplog.text
