"""Reading checkpoints: lazily, completely, and refusing what is damaged before any work is done."""

from __future__ import annotations

import hashlib
import json
import struct
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from tiny import (
    INDEX,
    WEIGHTS,
    drop_shard,
    edit_json,
    edit_tensors,
    pickle_only,
    poison,
    redirect_index,
    shards,
    tiny_model,
    truncate,
)
from transformers import AutoModelForCausalLM

from mla_convert.errors import BadCheckpoint, MlaConvertError
from mla_convert.source.checkpoint import Checkpoint

SHARD_SIZE = "60KB"


@pytest.fixture
def single(tmp_path: Path) -> Path:
    return tiny_model(tmp_path / "single")


@pytest.fixture
def sharded(tmp_path: Path) -> Path:
    return tiny_model(tmp_path / "sharded", max_shard_size=SHARD_SIZE)


def refuse(folder: Path | str, error: type[MlaConvertError], match: str) -> None:
    """The refusal comes within a second and changes no file."""
    before = sorted(Path(folder).parent.rglob("*"))
    start = time.perf_counter()
    with pytest.raises(error, match=match):
        Checkpoint.open(folder)
    assert time.perf_counter() - start < 1
    assert sorted(Path(folder).parent.rglob("*")) == before


def test_single_and_sharded_give_the_models_own_tensors(single: Path, sharded: Path) -> None:
    assert len(shards(sharded)) > 2
    expected = AutoModelForCausalLM.from_pretrained(single).state_dict()
    for folder in (single, sharded):
        ckpt = Checkpoint.open(folder)
        assert set(ckpt.headers) == set(expected)
        for name, header in ckpt.headers.items():
            tensor = ckpt.tensor(name)
            assert torch.equal(tensor, expected[name])
            assert (tensor.dtype, tuple(tensor.shape)) == (header.dtype, header.shape)


def test_storage_dtype_is_kept(tmp_path: Path) -> None:
    for dtype in (torch.bfloat16, torch.float16):
        ckpt = Checkpoint.open(tiny_model(tmp_path / str(dtype), dtype=dtype))
        assert {header.dtype for header in ckpt.headers.values()} == {dtype}
        assert ckpt.tensor("model.norm.weight").dtype == dtype


def test_opening_reads_no_tensor_data_and_one_shard_is_mapped_at_a_time(sharded: Path) -> None:
    ckpt = Checkpoint.open(sharded)
    for path in shards(sharded):  # the data is gone after open: headers must not need it
        raw = path.read_bytes()
        header = 8 + struct.unpack("<Q", raw[:8])[0]
        path.write_bytes(raw[:header] + bytes(len(raw) - header))
    assert ckpt.headers["model.norm.weight"].shape == (48,)
    for name in sorted(ckpt.headers, key=lambda name: ckpt.headers[name].file):
        assert not ckpt.tensor(name).any()
        mapped = Path("/proc/self/maps")
        if mapped.exists():
            lines = [line for line in mapped.read_text().splitlines() if str(sharded) in line]
            assert len({line.split()[-1] for line in lines}) == 1


def test_tensors_are_ticked_off_once_asked_for(single: Path) -> None:
    ckpt = Checkpoint.open(single)
    names = sorted(ckpt.headers)
    assert ckpt.leftover() == names
    ckpt.peek(names[0])
    assert ckpt.leftover() == names
    ckpt.tensor(names[0])
    ckpt.ignore(names[1])
    assert ckpt.leftover() == names[2:]
    assert ckpt.consumed() == names[:2]
    with pytest.raises(BadCheckpoint, match=r"holds no tensor model\.nothing \(39 others\)"):
        ckpt.tensor("model.nothing")


def test_sidecars_are_the_tokenizer_and_licence_but_no_weights_code_or_pickles(single: Path) -> None:
    for name in (
        "LICENSE",
        "merges.txt",
        "tokenizer.model",
        "tokenizer_helper.py",
        "tokenizer.bin",
        "README.md",
    ):
        (single / name).write_text("x")
    names = [path.name for path in Checkpoint.open(single).sidecars()]
    assert names == [
        "LICENSE",
        "chat_template.jinja",
        "merges.txt",
        "tokenizer.json",
        "tokenizer.model",
        "tokenizer_config.json",
    ]


def test_hashes_are_sha256_of_the_weight_files(sharded: Path) -> None:
    expected = {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in shards(sharded)}
    assert Checkpoint.open(sharded).hashes() == expected


def test_generation_config_is_raw_or_none(single: Path) -> None:
    config = Checkpoint.open(single).generation_config
    assert config is not None
    assert config["eos_token_id"] == [258, 260]
    (single / "generation_config.json").unlink()
    assert Checkpoint.open(single).generation_config is None


def test_a_pickle_beside_safetensors_is_not_read(single: Path) -> None:
    (single / "pytorch_model.bin").write_bytes(b"not even a pickle")
    assert Checkpoint.open(single).tensor("model.norm.weight").shape == (48,)


def test_shards_may_be_symlinks_out_of_the_folder(sharded: Path, tmp_path: Path) -> None:
    store = tmp_path / "blobs"  # the layout of the hub's cache
    store.mkdir()
    for path in shards(sharded):
        path.symlink_to(path.rename(store / path.name))
    ckpt = Checkpoint.open(sharded)
    assert all(torch.isfinite(ckpt.tensor(name)).all() for name in ckpt.headers)


def test_a_missing_shard_is_named(sharded: Path) -> None:
    lost = drop_shard(sharded).name
    refuse(sharded, BadCheckpoint, rf"lacks 1 of the \d shards its index names: {lost}; download")


@pytest.mark.parametrize(
    "shard",
    [
        "../outside.safetensors",
        "/etc/outside.safetensors",
        "a/../../x.safetensors",
        "..\\x.safetensors",
        "C:x.safetensors",
    ],
)
def test_an_index_that_leaves_the_folder_is_refused(sharded: Path, shard: str) -> None:
    save_file({"x": torch.zeros(1)}, sharded.parent / "outside.safetensors")
    name = redirect_index(sharded, shard)
    refuse(sharded, BadCheckpoint, rf"places {name} in .*outside its folder; do not trust")


def test_an_index_that_names_a_pickle_is_refused(sharded: Path) -> None:
    redirect_index(sharded, "pytorch_model-1.bin")
    refuse(sharded, BadCheckpoint, r"pytorch_model-1\.bin', which is no \.safetensors file; save")


def test_index_and_shards_must_agree(sharded: Path) -> None:
    weight_map = json.loads((sharded / INDEX).read_text())["weight_map"]
    gone = "model.norm.weight"
    edit_json(sharded / INDEX, weight_map={name: shard for name, shard in weight_map.items() if name != gone})
    refuse(sharded, BadCheckpoint, r"holds model\.norm\.weight, which .* places in no file; .*download both")
    edit_json(sharded / INDEX, weight_map=weight_map | {"model.ghost": weight_map[gone]})
    refuse(sharded, BadCheckpoint, r"places model\.ghost in model-.*, which does not hold it \(1 such")
    edit_json(sharded / INDEX, weight_map=weight_map | {gone: shards(sharded)[0].name})
    refuse(sharded, BadCheckpoint, r"holds model\.norm\.weight, which .* places in model-00001-of")
    edit_json(sharded / INDEX, weight_map={})
    refuse(sharded, BadCheckpoint, r"no weight_map \(\{\}\)")


def test_a_stale_single_file_beside_an_index_is_refused(sharded: Path) -> None:
    save_file({"x": torch.zeros(1)}, sharded / WEIGHTS)
    refuse(sharded, BadCheckpoint, r"holds both model\.safetensors and .* delete the one")


def test_an_unnamed_shard_is_reported(sharded: Path, caplog: pytest.LogCaptureFixture) -> None:
    save_file({"x": torch.zeros(1)}, sharded / "stale.safetensors")
    assert "x" not in Checkpoint.open(sharded).headers
    assert "does not name stale.safetensors" in caplog.text


def test_truncation_is_found_without_reading_data(single: Path, sharded: Path) -> None:
    size = (single / WEIGHTS).stat().st_size
    truncate(single / WEIGHTS, 4)
    refuse(
        single,
        BadCheckpoint,
        r"model\.safetensors is truncated: its tensors need (\d+) bytes .* it holds \d+;",
    )
    truncate(single / WEIGHTS, size - 100)
    refuse(
        single,
        BadCheckpoint,
        r"is truncated or no safetensors file: it holds 96 bytes, its header claims \d+",
    )
    truncate(single / WEIGHTS, 96)
    refuse(single, BadCheckpoint, r"is truncated or no safetensors file: it holds 0 bytes")
    truncate(shards(sharded)[1], 1)
    refuse(sharded, BadCheckpoint, r"model-00002-of-.* is truncated")


def test_trailing_bytes_and_lfs_pointers_are_found(single: Path) -> None:
    path = single / WEIGHTS
    path.write_bytes(path.read_bytes() + b"12345")
    refuse(single, BadCheckpoint, r"is longer than its header says: .* download")
    path.write_text("version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 1\n")
    refuse(single, BadCheckpoint, r"Git LFS pointer, not weights; run `git lfs pull`")


def _raw(path: Path, header: object, data: bytes) -> None:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + data)


@pytest.mark.parametrize(
    ("header", "match"),
    [
        (
            {
                "a": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]},
                "b": {"dtype": "F32", "shape": [2], "data_offsets": [4, 12]},
            },
            r"data of b begins at byte 4 but that of a ends at 8, .*overlap",
        ),
        (
            {"a": {"dtype": "F32", "shape": [3], "data_offsets": [0, 8]}},
            r"a of shape \[3\] .* needs 12 bytes, .*span 8",
        ),
        (
            {"a": {"dtype": "F7", "shape": [2], "data_offsets": [0, 8]}},
            r"a has dtype F7; save it as one of F64",
        ),
        ({"a": {"dtype": "F32", "shape": [2]}}, r"header of a is malformed"),
        ({"a": 3}, r"header of a is malformed \(3\)"),
        ([1], r"header that is no JSON object"),
        (b"{nonsense", r"has an unreadable header"),
        ({"__metadata__": {"format": "pt"}}, r"longer than its header says"),
    ],
)
def test_damaged_headers_are_refused(single: Path, header: object, match: str) -> None:
    _raw(single / WEIGHTS, header, bytes(12))
    refuse(single, BadCheckpoint, match)


def test_a_file_without_tensors_is_refused(single: Path) -> None:
    _raw(single / WEIGHTS, {}, b"")
    refuse(single, BadCheckpoint, r"holds no tensors; save the checkpoint again")


def test_a_pickle_only_checkpoint_is_refused_and_never_loaded(single: Path) -> None:
    refuse(
        pickle_only(single),
        BadCheckpoint,
        r"only as a pickle \(pytorch_model\.bin\), which can run code.*safe_ser",
    )


@pytest.mark.parametrize(
    ("spoil", "match"),
    [
        (lambda folder: (folder / WEIGHTS).unlink(), r"has no weights; model\.safetensors or .* is needed"),
        (
            lambda folder: (folder / WEIGHTS).rename(folder / "other.safetensors"),
            r"has only other\.safetensors; ",
        ),
        (lambda folder: (folder / "config.json").unlink(), r"has no config\.json; give the folder"),
        (lambda folder: (folder / "config.json").write_text("{"), r"config\.json is not readable JSON"),
        (
            lambda folder: (folder / "config.json").write_text("[]"),
            r"config\.json holds a list, not a JSON object",
        ),
        (
            lambda folder: (folder / "adapter_config.json").write_text("{}"),
            r"adapter_config\.json.* merge it",
        ),
    ],
)
def test_incomplete_folders_are_refused(single: Path, spoil: Callable[[Path], object], match: str) -> None:
    spoil(single)
    refuse(single, BadCheckpoint, match)


def test_values_that_are_not_finite_are_counted_and_named(single: Path) -> None:
    name = "model.layers.2.self_attn.k_proj.weight"
    poison(single, name)
    ckpt = Checkpoint.open(single)
    with pytest.raises(BadCheckpoint, match=rf"{name} holds 1 NaN and 0 infinite of 960 values; download"):
        ckpt.tensor(name)
    poison(single, name, float("-inf"))
    with pytest.raises(BadCheckpoint, match=r"holds 0 NaN and 1 infinite of 960"):
        Checkpoint.open(single).tensor(name)
    assert name in ckpt.leftover()


def test_places_that_are_no_checkpoint_are_named(tmp_path: Path, single: Path) -> None:
    refuse(
        tmp_path / "nowhere",
        BadCheckpoint,
        r"nowhere does not exist; give a folder, a \.gguf file or a hub id",
    )
    refuse(str(tmp_path / "nowhere"), BadCheckpoint, r"nowhere does not exist")
    refuse(single / WEIGHTS, BadCheckpoint, r"is a \.safetensors file; give its folder")


def test_a_hub_id_is_downloaded_without_pickles(single: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: dict[str, list[str]] = {}

    def download(repo: str, allow_patterns: list[str], ignore_patterns: list[str]) -> str:
        asked[repo] = [*allow_patterns, *("!" + pattern for pattern in ignore_patterns)]
        if repo == "owner/gone":
            raise OSError("404")
        return str(single)

    monkeypatch.setattr("huggingface_hub.snapshot_download", download)
    ckpt = Checkpoint.open("owner/model-1.5")
    assert ckpt.path == single
    assert "*.safetensors" in asked["owner/model-1.5"]
    assert "!*.bin" in asked["owner/model-1.5"]
    assert not {"*", "*.bin", "*.py"} & set(asked["owner/model-1.5"])
    with pytest.raises(BadCheckpoint, match=r"'owner/gone' is no local folder and could not be .*404.*check the name"):
        Checkpoint.open("owner/gone")


def test_unreadable_tensors_after_opening_are_named(single: Path) -> None:
    ckpt = Checkpoint.open(edit_tensors(single, model__norm__weight=torch.ones(48)))
    (single / WEIGHTS).unlink()
    with pytest.raises(BadCheckpoint, match=r"cannot read model\.norm\.weight .*download the file again"):
        ckpt.tensor("model.norm.weight")
