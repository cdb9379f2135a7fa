"""What is refused, end to end: each with its words, within a second, and with nothing written."""

import json
import os
import shutil
import tempfile
import time
from collections import namedtuple
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from tiny import (
    drop_shard,
    edit_config,
    edit_tensors,
    pickle_only,
    poison,
    redirect_index,
    shards,
    tiny_model,
    tiny_tokenizer,
    truncate,
)

import mla_convert
from mla_convert.errors import BadCheckpoint, BadOption, MlaConvertError, TargetExists, UnsupportedSource
from mla_convert.output import write

Refused = Callable[..., None]
SECONDS = 1.0  # of processor time, imports done; measured at most 0.13
Q0 = "model.layers.0.self_attn.q_proj.weight"


@pytest.fixture(scope="module")
def sources(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Whole models, and a text of three windows for them."""
    folder = tmp_path_factory.mktemp("sources")
    (folder / "text.txt").write_text("The quick brown fox jumps over the lazy dog, again and again. " * 4)
    return {
        "text": folder / "text.txt",
        "whole": tiny_model(folder / "whole"),
        "sharded": tiny_model(folder / "sharded", max_shard_size="60KB"),
        "mistral": tiny_model(folder / "mistral", "mistral"),
    }


@pytest.fixture
def size(sources: dict[str, Path]) -> dict[str, Any]:
    """Options that suit every source."""
    text = [str(sources["text"])]
    return {"kv_lora_rank": 14, "qk_rope_head_dim": 6, "calib_data": text, "calib_windows": 2, "window": 64}


@pytest.fixture(scope="module", autouse=True)
def imports_done(sources: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> None:
    """Modules are loaded by the first call, which is not what is timed."""
    out = tmp_path_factory.mktemp("imports") / "out"
    mla_convert.convert(source=sources["whole"], out=out, cache_ratio=0.5, calib_data=[str(sources["text"])], window=64)


@pytest.fixture
def scratch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Temporary files go here, and none may be left."""
    folder = tmp_path / "scratch"
    folder.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    yield folder
    assert list(folder.iterdir()) == []


def tree(folder: Path) -> dict[str, int]:
    """Every path below `folder` with the hash of its content."""
    return {
        str(path.relative_to(folder)): hash(path.read_bytes()) if path.is_file() else 0 for path in folder.rglob("*")
    }


@pytest.fixture
def refused(tmp_path: Path, scratch: Path, size: dict[str, Any]) -> Refused:
    """A check that convert raises `error` with words `match`, quickly, and the disk is as before."""

    def check(source: Any, error: type[Exception], match: str, out: str = "out", **options: Any) -> None:
        before = tree(tmp_path)
        started = time.process_time()
        with pytest.raises(error, match=match) as caught:
            mla_convert.convert(source=str(source), out=str(tmp_path / out), **(size | options))
        assert time.process_time() - started < SECONDS
        assert isinstance(caught.value, MlaConvertError)
        assert tree(tmp_path) == before

    return check


def bad_index(folder: Path) -> Path:
    outside = folder.parent / "outside.safetensors"
    shutil.copy(shards(folder)[0], outside)
    redirect_index(folder, "../outside.safetensors")
    return folder


# Name, model, damage, error, words.
# fmt: off
DAMAGES: list[tuple[str, str, Callable[[Path], Any], type[Exception], str]] = [
    ("unknown family", "whole", lambda f: edit_config(f, model_type="gpt_neox"), UnsupportedSource,
     r"model_type='gpt_neox' is not supported; supported: llama, mistral"),
    ("leftover tensor", "whole", lambda f: edit_tensors(f, model__layers__0__self_attn__extra=torch.ones(3)),
     UnsupportedSource, r"tensor model\.layers\.0\.self_attn\.extra \[3\] is in no table.*remove it"),
    ("layer too many", "whole", lambda f: edit_config(f, num_hidden_layers=3), UnsupportedSource,
     r"tensor model\.layers\.3\.\S+ \[.*is in no table of the family with 3 layers"),
    ("missing tensor", "whole", lambda f: edit_tensors(f, model__layers__1__mlp__up_proj__weight=None),
     UnsupportedSource, r"lacks 1 of the 39 tensors of config\.json, first model\.layers\.1\.mlp\.up_proj"),
    ("wrong shape", "whole", lambda f: edit_config(f, head_dim=8), UnsupportedSource,
     r"has shape \[.*config\.json implies"),
    ("bias", "whole", lambda f: edit_tensors(f, model__layers__0__self_attn__q_proj__bias=torch.ones(60)),
     UnsupportedSource, r"q_proj\.bias \[60\].*by config\.json this layer has no biases"),
    ("QK-norm tensor", "whole",
     lambda f: edit_tensors(f, model__layers__0__self_attn__q_norm__weight=torch.ones(10)),
     UnsupportedSource, r"q_norm\.weight \[10\].*the model class of this family has no QK-norm"),
    ("QK-norm key", "whole", lambda f: edit_config(f, use_qk_norm=True), UnsupportedSource,
     "use_qk_norm=True.*QK-norm"),
    ("unknown key", "whole", lambda f: edit_config(f, residual_multiplier=0.22), UnsupportedSource,
     r"residual_multiplier=0\.22 is not known for model_type 'llama'"),
    ("window of another class", "whole", lambda f: edit_config(f, sliding_window=4096), UnsupportedSource,
     r"sliding_window=4096.*sliding-window attention is not supported"),
    ("unknown RoPE type", "whole",
     lambda f: edit_config(f, rope_parameters={"rope_type": "spiral", "rope_theta": 5e3, "factor": 4.0}),
     UnsupportedSource, r"rope_type='spiral' is not supported; supported: default, linear, llama3, dynamic, yarn"),
    ("quantised", "whole", lambda f: edit_config(f, quantization_config={"quant_method": "gptq"}),
     UnsupportedSource, "quantization_config=.*dequantise the checkpoint first"),
    ("remote code", "whole", lambda f: edit_config(f, auto_map={"AutoConfig": "x.Y"}), UnsupportedSource,
     "auto_map=.*remote code is never run"),
    ("missing shard", "sharded", drop_shard, BadCheckpoint,
     r"lacks 1 of the \d+ shards its index names: model-00002-of-"),
    ("truncated shard", "sharded", lambda f: truncate(shards(f)[-1]), BadCheckpoint,
     r"model-.*is truncated: its tensors need \d+ bytes of data, it holds \d+"),
    ("truncated header", "whole", lambda f: os.truncate(f / "model.safetensors", 50), BadCheckpoint,
     r"model\.safetensors is truncated or no safetensors file: it holds 50 bytes"),
    ("index pointing outside", "sharded", bad_index, BadCheckpoint,
     r"places \S+ in '\.\./outside\.safetensors', outside its folder; do not trust this checkpoint"),
    ("pickle", "whole", pickle_only, BadCheckpoint,
     r"only as a pickle \(pytorch_model\.bin\), which can run code"),
    ("no weights", "whole", lambda f: (f / "model.safetensors").unlink(), BadCheckpoint,
     r"has no weights; model\.safetensors or"),
    ("no config", "whole", lambda f: (f / "config.json").unlink(), BadCheckpoint,
     r"has no config\.json; give the folder of a Hugging Face model"),
    ("no tokenizer", "whole", lambda f: [path.unlink() for path in f.glob("tokenizer*")], BadCheckpoint,
     "no tokenizer can be loaded from it"),
]
# fmt: on


@pytest.mark.parametrize(
    ("kind", "damage", "error", "match"), [case[1:] for case in DAMAGES], ids=[c[0] for c in DAMAGES]
)
def test_a_source_that_cannot_be_converted(
    tmp_path: Path,
    sources: dict[str, Path],
    kind: str,
    damage: Callable[[Path], Any],
    error: type[Exception],
    match: str,
    refused: Refused,
) -> None:
    folder = shutil.copytree(sources[kind], tmp_path / "source")
    damage(folder)
    refused(folder, error, match)


@pytest.mark.parametrize("kind", ["whole", "sharded", "mistral"])
def test_the_same_sources_undamaged_are_converted(
    tmp_path: Path, scratch: Path, sources: dict[str, Path], kind: str, size: dict[str, Any]
) -> None:
    """The control of everything above."""
    mla_convert.convert(source=sources[kind], out=tmp_path / "out", **size)
    assert (tmp_path / "out" / "config.json").is_file()


@pytest.mark.parametrize("method", ["weighted", "pca", "svd"])
@pytest.mark.parametrize(
    "name",
    [
        "model.embed_tokens.weight",
        Q0,
        "model.layers.3.mlp.down_proj.weight",
        "lm_head.weight",
    ],
)
def test_weights_that_are_no_numbers(
    tmp_path: Path, sources: dict[str, Path], name: str, method: str, refused: Refused, size: dict[str, Any]
) -> None:
    """Also where the first tensors have long been written: the last one read is lm_head."""
    folder = shutil.copytree(sources["whole"], tmp_path / "source")
    poison(folder, name)
    match = rf"model\.safetensors: {name} holds 1 NaN and 0 infinite of \d+ values; download the file again"
    refused(folder, BadCheckpoint, match, method=method)
    poison(folder, name, float("-inf"))
    refused(folder, BadCheckpoint, "0 NaN and 1 infinite", method=method)


@pytest.mark.parametrize(
    ("options", "match"),
    [
        (
            {"kv_lora_rank": 35},
            r"kv_lora_rank=35 exceeds 34, the rank of \[W_K; W_V\] left after 6.*use --kv-lora-rank 34",
        ),
        ({"kv_lora_rank": 0}, "kv_lora_rank=0 is too small: use 1 or more"),
        ({"qk_rope_head_dim": 7}, "qk_rope_head_dim=7 is odd, but dimensions rotate in pairs; use 6 or 8"),
        (
            {"qk_rope_head_dim": 12},
            "qk_rope_head_dim=12 exceeds 10, what rotates of a head.*or --lossless",
        ),
        ({"qk_rope_head_dim": 0}, "qk_rope_head_dim=0 is too small"),
        (
            {"rope_stride": 3},
            "qk_rope_head_dim=6 needs 3 frequencies, and rope_stride=3 leaves 2 of the source's 5",
        ),
        ({"rope_stride": 0}, "rope_stride=0 is too small"),
        ({"qk_rope_head_dim": None}, "give both, or cache_ratio instead"),
        ({"kv_lora_rank": None, "qk_rope_head_dim": None}, "no cache size given"),
        ({"lossless": True}, "give exactly one of"),
        ({"dtype": "float16"}, "dtype=float16 is refused: the latent norm is neutralised by eps domination"),
        ({"dtype": "int8"}, "unknown dtype 'int8': use one of auto, float32, bfloat16"),
        ({"method": "magic"}, "unknown method 'magic': use one of weighted, pca, svd"),
        ({"window": 1}, "window=1 is too small"),
        ({"calib_data": ["/nowhere/text.txt"]}, r'text "/nowhere/text\.txt" is not a file; check the path'),
        ({"device": "tpu"}, "unknown device 'tpu'"),
        ({"rank": 3}, "unknown option 'rank'"),
    ],
    ids=str,
)
def test_an_option_that_is_impossible(
    sources: dict[str, Path], options: dict[str, Any], match: str, refused: Refused
) -> None:
    refused(sources["whole"], BadOption, match, **options)


def test_a_cache_ratio_that_leaves_nothing(sources: dict[str, Path], refused: Refused) -> None:
    none = {"kv_lora_rank": None, "qk_rope_head_dim": None}
    match = r"cache_ratio=0\.05 is 2 of the source's 40 numbers per token and layer, which no split"
    refused(sources["whole"], BadOption, match, cache_ratio=0.05, **none)
    refused(sources["whole"], BadOption, "must be above 0 and at most 1", cache_ratio=1.5, **none)


@pytest.mark.parametrize("method", ["weighted", "pca"])
def test_a_text_that_is_empty_or_too_short(
    tmp_path: Path, sources: dict[str, Path], method: str, refused: Refused, size: dict[str, Any]
) -> None:
    empty, blank, short = (tmp_path / f"{name}.txt" for name in ("empty", "blank", "short"))
    empty.write_text("")
    blank.write_text(" \n\n \n")
    short.write_text("x" * 63)
    for path in (empty, blank):
        match = rf'text "{path}" is empty: 0 documents with text; name a text that fills a window'
        refused(sources["whole"], BadOption, match, calib_data=[str(path)], method=method)
    match = "the text has 63 tokens, one window needs 64; give more text or a smaller window"
    refused(sources["whole"], BadOption, match, calib_data=[str(short)], method=method)
    short.write_text("x" * 64)  # the control; a text of one window leaves none to hold out
    options = size | {"calib_data": [str(short)], "method": method}
    mla_convert.convert(source=sources["whole"], out=tmp_path / "out", **options)
    record = json.loads((tmp_path / "out" / "conversion.json").read_text())
    assert record["calibration"]["tokens"] == 64


def test_a_tokenizer_of_another_model(tmp_path: Path, refused: Refused) -> None:
    """Ids beyond the embedding are not looked up."""
    folder = tiny_model(tmp_path / "source", vocab_size=100, pad_token_id=1, bos_token_id=2, eos_token_id=3)
    match = r"the tokenizer of .*source gives token id \d+, but config\.json says vocab_size=100"
    refused(folder, BadCheckpoint, match)


def test_a_source_that_is_not_there(tmp_path: Path, refused: Refused) -> None:
    match = r"nowhere does not exist; give a folder, a \.gguf file or a hub id"
    refused(tmp_path / "nowhere", BadCheckpoint, match)
    (tmp_path / "weights.bin").write_bytes(b"x")
    refused(tmp_path / "weights.bin", BadCheckpoint, r"is a \.bin file; give its folder")


def test_a_target_that_exists(tmp_path: Path, sources: dict[str, Path], refused: Refused) -> None:
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.txt").write_text("years of work")
    source = sources["whole"]
    refused(source, TargetExists, r"mine is not empty \(1 entries\); use --overwrite", out="mine")
    refused(
        source,
        TargetExists,
        r"holds no conversion\.json; delete it yourself",
        out="mine",
        overwrite=True,
    )
    refused(source, TargetExists, "thesis.txt is a file, not a folder", out="mine/thesis.txt")
    refused(source, BadOption, r"thesis\.txt is a file, not a folder", out="mine/thesis.txt/out")


def test_a_target_that_is_the_source(tmp_path: Path, sources: dict[str, Path], refused: Refused) -> None:
    """Also with --overwrite, and for a folder that holds the source."""
    folder = shutil.copytree(sources["whole"], tmp_path / "models" / "source")
    for out in ("models/source", "models"):
        refused(folder, BadOption, "is or holds the source", out=out, overwrite=True)


def test_a_full_disk(
    tmp_path: Path, sources: dict[str, Path], monkeypatch: pytest.MonkeyPatch, refused: Refused
) -> None:
    """Seen at the start, or when it fills up under the last shard."""
    source = sources["whole"]
    save = write.save_file

    def full(tensors: Any, path: Path, **options: Any) -> None:
        save(tensors, path, **options)
        if "lm_head.weight" in tensors:
            raise SafetensorError("Error while serializing: I/O error: No space left on device (os error 28)")

    with monkeypatch.context() as patched:
        patched.setattr(write, "save_file", full)
        refused(source, MlaConvertError, "no space left on the disk of .*; nothing was written")
    usage = namedtuple("usage", "total used free")
    with monkeypatch.context() as patched:
        patched.setattr(shutil, "disk_usage", lambda path: usage(10**9, 10**9 - 1000, 1000))
        refused(
            source,
            MlaConvertError,
            r"no space left: the checkpoint needs 0\.00 GB and .* has 0\.00",
        )


def test_the_space_asked_for_is_what_is_written(
    tmp_path: Path, sources: dict[str, Path], monkeypatch: pytest.MonkeyPatch, size: dict[str, Any]
) -> None:
    asked: list[int] = []
    monkeypatch.setattr(write, "check_space", lambda out, expected: asked.append(expected))
    for i, options in enumerate(({}, {"lossless": True, "kv_lora_rank": None, "qk_rope_head_dim": None})):
        mla_convert.convert(source=sources["whole"], out=tmp_path / str(i), **(size | options))
        written = load_file(tmp_path / str(i) / "model.safetensors").values()
        assert asked[i] == sum(tensor.numel() * tensor.element_size() for tensor in written)


@pytest.mark.parametrize("when", ["calibrating", "writing"])
def test_an_interrupt_leaves_nothing(
    tmp_path: Path,
    scratch: Path,
    sources: dict[str, Path],
    monkeypatch: pytest.MonkeyPatch,
    when: str,
    size: dict[str, Any],
) -> None:
    from mla_convert.source.checkpoint import Checkpoint

    last = {"calibrating": "model.layers.2.mlp.up_proj.weight", "writing": "lm_head.weight"}[when]
    read = Checkpoint.tensor

    def interrupted(self: Checkpoint, name: str) -> torch.Tensor:
        if name == last:
            raise KeyboardInterrupt
        return read(self, name)

    monkeypatch.setattr(Checkpoint, "tensor", interrupted)
    before = tree(tmp_path)
    with pytest.raises(KeyboardInterrupt):
        mla_convert.convert(source=sources["whole"], out=tmp_path / "out", **size)
    assert tree(tmp_path) == before


def test_float16_sources_need_another_type(tmp_path: Path, refused: Refused, size: dict[str, Any]) -> None:
    folder = tiny_model(tmp_path / "source", dtype=torch.float16)
    match = r"the source is stored in float16, and the latent norm.*use bfloat16 or float32 \(--dtype\)"
    refused(folder, BadOption, match)
    for dtype in ("bfloat16", "float32"):
        mla_convert.convert(source=folder, out=tmp_path / dtype, dtype=dtype, **size)
        written = load_file(tmp_path / dtype / "model.safetensors")
        assert {tensor.dtype for tensor in written.values()} == {getattr(torch, dtype)}
        assert json.loads((tmp_path / dtype / "config.json").read_text())["dtype"] == dtype


def test_a_failed_run_over_an_earlier_conversion_leaves_that_one(
    tmp_path: Path, sources: dict[str, Path], refused: Refused, size: dict[str, Any]
) -> None:
    mla_convert.convert(source=sources["whole"], out=tmp_path / "out", **size)
    folder = shutil.copytree(sources["whole"], tmp_path / "source")
    tiny_tokenizer().save_pretrained(folder)
    poison(folder, "lm_head.weight")
    refused(folder, BadCheckpoint, "lm_head.weight holds 1 NaN", overwrite=True)
