"""The writer: all or nothing, whatever ends the run, and a folder that every stock loader reads."""

import errno
import json
import os
import shutil
import signal
import subprocess
import sys
from collections import namedtuple
from pathlib import Path
from typing import Any

import pytest
import tiny_text
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from mla_convert.errors import BadCheckpoint, BadOption, MlaConvertError, TargetExists
from mla_convert.output import write
from mla_convert.output.write import RECORD, FolderWriter
from mla_convert.source.checkpoint import Checkpoint

CONFIG = {"model_type": "deepseek_v3"}
FILES = {RECORD: "{}\n", "README.md": "card\n"}


def commit(writer: FolderWriter) -> None:
    writer.commit(FILES, [], CONFIG)


def put(out: Path, value: float = 1.0, overwrite: bool = False) -> None:
    """Write a folder of three tensors, one per shard."""
    with FolderWriter(out, 0, overwrite, max_shard_bytes=80) as writer:
        for name in "abc":
            writer.add(name, torch.full((4, 5), value))
        commit(writer)


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def value_in(out: Path) -> float:
    return Checkpoint.open(out).tensor("a").mean().item()


def test_nothing_is_there_before_commit_and_all_of_it_after(tmp_path: Path) -> None:
    out = tmp_path / "deep" / "out"
    with FolderWriter(out, 0, max_shard_bytes=80) as writer:
        writer.add("a", torch.ones(4, 5))
        writer.add("b", torch.zeros(4, 5))
        assert not out.exists()
        assert names(writer.staging) == ["shard-00000"]
        commit(writer)
    assert names(tmp_path / "deep") == ["out"]
    assert names(out) == [
        "README.md",
        "config.json",
        RECORD,
        "model-00001-of-00002.safetensors",
        "model-00002-of-00002.safetensors",
        "model.safetensors.index.json",
    ]
    assert json.loads((out / "config.json").read_text()) == CONFIG


def test_one_shard_has_the_plain_name_and_no_index(tmp_path: Path) -> None:
    with FolderWriter(tmp_path / "out", 0, max_shard_bytes=160) as writer:
        writer.add("a", torch.ones(4, 5))
        writer.add("b", torch.ones(4, 5))  # fills the shard to the last byte
        commit(writer)
    assert names(tmp_path / "out") == ["README.md", "config.json", RECORD, "model.safetensors"]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_shards_load_in_transformers_and_the_index_is_right(tmp_path: Path, dtype: torch.dtype) -> None:
    model = tiny_text.deepseek().to(dtype)
    state = model.state_dict()
    limit = 9_000 * dtype.itemsize // 2  # below the largest tensor, which gets a shard of its own
    out = tmp_path / "out"
    with FolderWriter(out, 0, max_shard_bytes=limit) as writer:
        for name, tensor in state.items():
            writer.add(name, tensor)
        writer.commit(FILES, [], model.config.to_dict() | {"dtype": str(dtype).removeprefix("torch.")})
    index = json.loads((out / "model.safetensors.index.json").read_text())
    assert index["metadata"]["total_size"] == sum(t.numel() * dtype.itemsize for t in state.values())
    assert set(index["weight_map"]) == set(state)
    shards = sorted(set(index["weight_map"].values()))
    assert len(shards) > 3 and shards == sorted(path.name for path in out.glob("*.safetensors"))
    for shard in shards:
        held = load_file(out / shard)
        assert set(held) == {name for name, place in index["weight_map"].items() if place == shard}
        assert len(held) == 1 or sum(t.numel() * dtype.itemsize for t in held.values()) <= limit
    loaded = AutoModelForCausalLM.from_pretrained(out, dtype="auto")
    assert loaded.dtype == dtype
    assert all(torch.equal(tensor, state[name]) for name, tensor in loaded.state_dict().items())
    checkpoint = Checkpoint.open(out)
    assert all(torch.equal(checkpoint.tensor(name), tensor) for name, tensor in state.items())


def test_tensors_may_be_views_and_may_change_afterwards(tmp_path: Path) -> None:
    base = torch.arange(48.0).view(6, 8)
    views = {"turned": base.T, "every_second": base[:, ::2], "same": base, "again": base, "row": base[2]}
    want = {name: view.clone() for name, view in views.items()}
    with FolderWriter(tmp_path / "out", 0) as writer:
        for name, view in views.items():
            writer.add(name, view)
        writer.add("trained", torch.nn.Parameter(base[:2]))
        base.zero_()
        commit(writer)
    found = load_file(tmp_path / "out" / "model.safetensors")
    assert all(torch.equal(found[name], tensor) for name, tensor in want.items())
    assert torch.equal(found["trained"], want["same"][:2])
    size = (tmp_path / "out" / "model.safetensors").stat().st_size
    assert size >= 4 * sum(tensor.numel() for tensor in found.values())  # nothing is stored as a view


@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt, SystemExit])
@pytest.mark.parametrize("when", ["adding", "committing"])
def test_an_error_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: type[BaseException], when: str
) -> None:
    def fail(*_: Any, **__: Any) -> None:
        raise error("enough")

    with (
        pytest.raises(error, match="enough"),
        FolderWriter(tmp_path / "out", 0, max_shard_bytes=80) as writer,
    ):
        for name in "abc":
            writer.add(name, torch.ones(4, 5))
        if when == "adding":
            fail()
        monkeypatch.setattr(write.json, "dumps", fail)
        commit(writer)
    assert names(tmp_path) == []


KILLED = """
import os, pathlib, signal, sys, torch
from mla_convert.output.write import FolderWriter

out, when = pathlib.Path(sys.argv[1]), sys.argv[2]
def die(*_, **__): os.kill(os.getpid(), signal.SIGKILL)
class Deadly(dict):
    def items(self): die()
with FolderWriter(out, 0, overwrite=True, max_shard_bytes=80) as writer:
    for name in "abc":
        writer.add(name, torch.full((4, 5), 2.0))
    if when == "adding":
        die()
    if when == "renaming":
        rename = pathlib.Path.rename
        def once(self, target):
            rename(self, target)
            if "replaced" in str(target): die()
        pathlib.Path.rename = once
    files = Deadly() if when == "committing" else {"conversion.json": "{}"}
    writer.commit(files, [], {"model_type": "deepseek_v3"})
"""


@pytest.mark.parametrize("when", ["adding", "committing", "renaming"])
def test_a_killed_run_leaves_nothing_that_loads_and_the_next_one_cleans_up(tmp_path: Path, when: str) -> None:
    """Killed with the first shards written; with all but config.json; between the two renames."""
    out = tmp_path / "out"
    if when == "renaming":
        put(out)
    ended = subprocess.run([sys.executable, "-c", KILLED, str(out), when], check=False, capture_output=True)
    assert ended.returncode == -signal.SIGKILL, ended.stderr
    assert not out.exists()
    staging = next(tmp_path.glob(".out.partial-*"))
    assert any(staging.glob("shard-*" if when == "adding" else "model-*"))
    if when == "renaming":  # the new folder is complete but nobody looks there; the old one is not lost
        assert value_in(next(tmp_path.glob(".out.replaced-*"))) == 1
    else:
        with pytest.raises(BadCheckpoint, match=r"no config\.json"):
            Checkpoint.open(staging)
        with pytest.raises((OSError, ValueError)):
            AutoModelForCausalLM.from_pretrained(staging)
    put(out, 3.0)
    assert names(tmp_path) == ["out"] and value_in(out) == 3


def test_only_the_leftovers_of_dead_runs_on_the_same_target_go(tmp_path: Path) -> None:
    dead = subprocess.Popen([sys.executable, "-c", ""])
    dead.wait()
    kept = [
        f".out.partial-{os.getppid()}",
        f".other.partial-{dead.pid}",
        ".out.partial-x",
        f".outX.partial-{dead.pid}",
    ]
    for name in (*kept, f".out.partial-{dead.pid}", f".out.partial-{os.getpid()}"):
        (tmp_path / name).mkdir()
    put(tmp_path / "out")
    assert names(tmp_path) == sorted([*kept, "out"])


@pytest.mark.parametrize("name", ["a[1]b", "*", "with space"])
def test_names_with_pattern_characters(tmp_path: Path, name: str) -> None:
    bystander = tmp_path / ".a1b.partial-999999999"
    bystander.mkdir()
    stale = tmp_path / f".{name}.partial-999999999"
    stale.mkdir()
    put(tmp_path / name)
    assert bystander.exists() and not stale.exists() and value_in(tmp_path / name) == 1


def test_a_target_that_is_not_empty_is_refused(tmp_path: Path) -> None:
    out = tmp_path / "out"
    out.mkdir()
    put(out)  # an empty folder may be used
    before = {path: path.read_bytes() for path in out.iterdir()}
    with pytest.raises(TargetExists, match=r"out is not empty \(7 entries\); use --overwrite or another OUT"):
        put(out, 2.0)
    (tmp_path / "file").write_text("mine")
    with pytest.raises(TargetExists, match="file is a file, not a folder"):
        put(tmp_path / "file", overwrite=True)
    assert before == {path: path.read_bytes() for path in out.iterdir()}
    assert names(tmp_path) == ["file", "out"] and (tmp_path / "file").read_text() == "mine"


def test_overwrite_replaces_earlier_conversions_only(tmp_path: Path) -> None:
    out = tmp_path / "out"
    put(out)
    (out / "stale.txt").write_text("of the earlier run")
    put(out, 2.0, overwrite=True)
    assert value_in(out) == 2 and "stale.txt" not in names(out)
    (out / RECORD).unlink()
    with pytest.raises(TargetExists, match=rf"replaces only folders written by mla-convert.*holds no {RECORD}"):
        put(out, 3.0, overwrite=True)
    assert value_in(out) == 2 and names(tmp_path) == ["out"]


def test_what_appears_at_the_target_meanwhile_is_not_replaced(tmp_path: Path) -> None:
    out = tmp_path / "out"
    with pytest.raises(TargetExists, match="not empty"), FolderWriter(out, 0) as writer:
        writer.add("a", torch.ones(4, 5))
        out.mkdir()
        (out / "precious").write_text("")
        commit(writer)
    assert names(tmp_path) == ["out"] and names(out) == ["precious"]


def test_the_earlier_conversion_comes_back_if_publishing_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out = tmp_path / "out"
    put(out)
    rename = Path.rename

    def fails(self: Path, target: Path) -> Path:
        if "partial" in self.name and target == out:
            raise PermissionError("no")
        return rename(self, target)

    monkeypatch.setattr(Path, "rename", fails)
    with pytest.raises(PermissionError):
        put(out, 2.0, overwrite=True)
    assert value_in(out) == 1 and names(tmp_path) == ["out"]


def test_a_linked_folder_is_filled_where_it_is(tmp_path: Path) -> None:
    (tmp_path / "disk" / "real").mkdir(parents=True)
    (tmp_path / "link").symlink_to(tmp_path / "disk" / "real")
    put(tmp_path / "link")
    assert (tmp_path / "link").is_symlink() and value_in(tmp_path / "disk" / "real") == 1
    assert names(tmp_path) == ["disk", "link"] and names(tmp_path / "disk") == ["real"]


def test_a_target_that_cannot_be_made_is_refused_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(BadOption, match=r"file/a/b, but .*/file is a file, not a folder"):
        FolderWriter(tmp_path / "file" / "a" / "b", 0)
    monkeypatch.setattr(write.os, "access", lambda path, mode: False)  # root may write everywhere
    with pytest.raises(BadOption, match=r"not writable; choose another OUT"):
        FolderWriter(tmp_path / "a" / "b", 0)
    with pytest.raises(BadOption, match="not writable"):
        FolderWriter("/", 0)
    assert names(tmp_path) == ["file"]


def test_a_full_disk_is_seen_before_anything_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    usage = namedtuple("usage", "total used free")
    asked: list[Path] = []

    def nearly_full(path: Path) -> Any:
        asked.append(path)
        return usage(10**10, 0, 1_500_000_000)

    monkeypatch.setattr(shutil, "disk_usage", nearly_full)
    with pytest.raises(MlaConvertError, match=r"no space left: the checkpoint needs 1\.60 GB and .* has 1\.50 GB free"):
        FolderWriter(tmp_path / "new" / "out", 1_600_000_000)
    assert asked == [tmp_path] and names(tmp_path) == []
    FolderWriter(tmp_path / "new" / "out", 1_500_000_000)


@pytest.mark.parametrize("when", ["shard", "file"])
def test_a_disk_that_fills_up_is_named_and_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, when: str
) -> None:
    save = write.save_file

    def full(tensors: Any, path: Path, **options: Any) -> None:
        save(tensors, path, **options)
        if path.name == "shard-00001":  # safetensors' words on a full tmpfs
            raise SafetensorError("Error while serializing: I/O error: No space left on device (os error 28)")

    def full_text(self: Path, *_: Any, **__: Any) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(*((write, "save_file", full) if when == "shard" else (Path, "write_text", full_text)))
    with pytest.raises(MlaConvertError, match=rf"no space left on the disk of {tmp_path}; nothing was written"):
        put(tmp_path / "out")
    assert names(tmp_path) == []


@pytest.mark.parametrize("error", [SafetensorError("Error while serializing: io"), OSError(errno.EIO, "disk is dying")])
def test_other_errors_of_the_disk_keep_their_words(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    def broken(*_: Any, **__: Any) -> None:
        raise error

    monkeypatch.setattr(write, "save_file", broken)
    with pytest.raises(type(error), match="serializing|dying"):
        put(tmp_path / "out")
    assert names(tmp_path) == []


def test_copies_keep_the_place_where_transformers_looks_for_them(tmp_path: Path) -> None:
    (tmp_path / "in" / "additional_chat_templates").mkdir(parents=True)
    copies = [
        tmp_path / "in" / "tokenizer.json",
        tmp_path / "in" / "additional_chat_templates" / "tool_use.jinja",
    ]
    for path in copies:
        path.write_text(path.name)
    with FolderWriter(tmp_path / "out", 0) as writer:
        writer.add("a", torch.ones(4, 5))
        writer.commit(FILES, copies, CONFIG)
    assert (tmp_path / "out" / "tokenizer.json").read_text() == "tokenizer.json"
    assert (tmp_path / "out" / "additional_chat_templates" / "tool_use.jinja").read_text() == "tool_use.jinja"
    assert not (tmp_path / "out" / "tool_use.jinja").exists()
