"""GGUF sources: the tensors transformers loads, and refusals of what it ignores."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from tiny import (
    WEIGHTS,
    tiny_model,
    truncate,
    write_gguf,
)
from transformers import AutoModelForCausalLM, AutoTokenizer

from mla_convert.errors import BadCheckpoint, MlaConvertError, UnsupportedSource
from mla_convert.source.checkpoint import Checkpoint


@pytest.fixture
def single(tmp_path: Path) -> Path:
    return tiny_model(tmp_path / "single")


def refuse(folder: Path | str, error: type[MlaConvertError], match: str) -> None:
    """The refusal comes within a second and changes no file."""
    before = sorted(Path(folder).parent.rglob("*"))
    start = time.perf_counter()
    with pytest.raises(error, match=match):
        Checkpoint.open(folder)
    assert time.perf_counter() - start < 1
    assert sorted(Path(folder).parent.rglob("*")) == before


@pytest.fixture
def gguf(single: Path, tmp_path: Path) -> Path:
    (tmp_path / "gguf").mkdir()
    return write_gguf(single, tmp_path / "gguf" / "tiny.gguf")


def test_gguf_gives_the_tensors_transformers_loads(single: Path, gguf: Path) -> None:
    expected = AutoModelForCausalLM.from_pretrained(gguf.parent, gguf_file=gguf.name, dtype=torch.float32).state_dict()
    original = load_file(single / WEIGHTS)
    for source in (gguf, gguf.parent):
        ckpt = Checkpoint.open(source)
        assert ckpt.path == gguf
        assert set(ckpt.headers) == set(expected)
        for name in expected:
            assert ckpt.headers[name].shape == tuple(expected[name].shape)
            assert torch.equal(ckpt.tensor(name), expected[name])
            assert torch.equal(expected[name], original[name])  # the half-split row order is restored
        assert ckpt.leftover() == []
        assert ckpt.config["num_key_value_heads"] == 2
        assert "quantization_config" not in ckpt.config
        assert list(ckpt.hashes()) == ["tiny.gguf"]


def test_gguf_tokenizer_is_written_out(single: Path, gguf: Path) -> None:
    ckpt = Checkpoint.open(gguf)
    files = ckpt.sidecars()
    assert "tokenizer.json" in {path.name for path in files}
    text = "Grüße, 世界\n"
    ours, theirs = (AutoTokenizer.from_pretrained(folder)(text)["input_ids"] for folder in (files[0].parent, single))
    assert ours == theirs


@pytest.mark.parametrize(
    ("metadata", "match"),
    [
        ({"llama.rope.scaling.type": "yarn"}, r"llama\.rope\.scaling\.type='yarn': only 'none' is supported"),
        ({"llama.rope.scaling.factor": 4.0}, r"llama\.rope\.scaling\.factor=4\.0: it is in no table"),
        (
            {"llama.attention.sliding_window": 4096},
            r"sliding_window=4096: it is in no table .*convert the safetensors",
        ),
        ({"llama.attention.key_length": 12}, r"key_length=12: only 10 is supported"),
        ({"llama.expert_count": 8}, r"expert_count=8: only 0 is supported"),
    ],
)
def test_gguf_features_that_transformers_ignores_are_refused(
    single: Path, tmp_path: Path, metadata: dict[str, object], match: str
) -> None:
    refuse(write_gguf(single, tmp_path / "x.gguf", metadata=metadata), UnsupportedSource, match)


def test_damaged_and_ambiguous_gguf_files_are_refused(gguf: Path) -> None:
    write = gguf.with_name("second.gguf")
    write.write_bytes(gguf.read_bytes())
    refuse(gguf.parent, BadCheckpoint, r"holds 2 GGUF files \(second\.gguf, tiny\.gguf\); give the path of one")
    truncate(write, write.stat().st_size // 2)
    refuse(write, BadCheckpoint, r"second\.gguf is truncated or no GGUF file")
    write.write_bytes(b"")
    refuse(write, BadCheckpoint, r"second\.gguf is truncated or no GGUF file")


def test_other_gguf_architectures_are_refused(tmp_path: Path) -> None:
    import gguf as library

    writer = library.GGUFWriter(tmp_path / "x.gguf", "gemma3")
    writer.add_tensor("token_embd.weight", torch.zeros(3, 4).numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    refuse(
        tmp_path / "x.gguf",
        UnsupportedSource,
        r"GGUF architecture 'gemma3' is not supported; supported: 'llama'",
    )
