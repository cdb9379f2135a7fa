"""Atomic output: tensors go shard by shard into a staging folder, which becomes the target in one rename.

config.json is written last, so a folder left by a killed run loads nowhere; leftovers of dead runs are
removed by the next one.
"""

import errno
import glob
import json
import os
import shutil
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Self

from safetensors.torch import save_file
from torch import Tensor

from mla_convert.errors import BadOption, MlaConvertError, TargetExists
from mla_convert.output.portable import code_files

MAX_SHARD_BYTES = 4 * 1024**3
RECORD = "conversion.json"
TEMPLATES = "additional_chat_templates"  # transformers' name


class FolderWriter:
    """Collects tensors and files of one checkpoint and publishes them as `out` by `commit`.

    Use as a context manager: leaving it without `commit`, by error or interrupt, removes the staging folder.
    Raises TargetExists for a target that must not be replaced, BadOption for one that cannot be made,
    MlaConvertError when the disk is (or runs) full.
    """

    def __init__(
        self,
        out: str | Path,
        expected_bytes: int,
        overwrite: bool = False,
        max_shard_bytes: int = MAX_SHARD_BYTES,
    ):
        self.out = Path(out).expanduser().resolve()  # staging must be on the disk that a linked folder is on
        self.overwrite = overwrite
        self.max_shard_bytes = max_shard_bytes
        check_target(self.out, overwrite)
        check_space(self.out, expected_bytes)
        self.staging = self.out.parent / f".{self.out.name}.partial-{os.getpid()}"
        self._shards: list[dict[str, int]] = []
        self._open: dict[str, Tensor] = {}
        self._open_bytes = 0

    def __enter__(self) -> Self:
        self.out.parent.mkdir(parents=True, exist_ok=True)
        remove_stale(self.out, "partial")
        self.staging.mkdir()
        return self

    def __exit__(self, *exc: object) -> None:
        shutil.rmtree(self.staging, ignore_errors=True)

    def add(self, name: str, tensor: Tensor) -> None:
        """Take one tensor, cloned, so shared or non-contiguous storage is safe; writes full shards."""
        data = tensor.detach().cpu().contiguous().clone()
        if not bool(data.isfinite().all()):
            bad = int((~data.isfinite()).sum())
            raise MlaConvertError(
                f"{name} came out with {bad} of {data.numel()} values not finite in {data.dtype}; nothing was written; "
                "please report this with the model's name, and try --method pca"
            )
        size = data.numel() * data.element_size()
        if self._open and self._open_bytes + size > self.max_shard_bytes:
            self._flush()
        self._open[name] = data
        self._open_bytes += size

    def _flush(self) -> None:
        with full_disk_is_named(self.staging):
            shard = self.staging / f"shard-{len(self._shards):05d}"
            save_file(self._open, shard, metadata={"format": "pt"})
            shard.chmod(readable_mode())  # safetensors makes it 0600, which a server under another user cannot read
        self._shards.append({name: t.numel() * t.element_size() for name, t in self._open.items()})
        self._open, self._open_bytes = {}, 0

    def commit(self, files: dict[str, str], copies: Iterable[Path], config: dict[str, Any]) -> None:
        """Write the index, `files` (name to text), `copies`, last config.json; rename the folder to `out`.

        A config with `auto_map` gets the code that it names (portable.py).
        """
        if config.get("auto_map") is not None:
            files = files | code_files()
        if self._open:
            self._flush()
        with full_disk_is_named(self.staging):
            self._name_shards()
            for source in copies:
                target = self.staging / place_of(source)
                target.parent.mkdir(exist_ok=True)
                shutil.copyfile(source, target)
            for name, text in files.items():
                (self.staging / name).write_text(text, encoding="utf-8")
            (self.staging / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
        self._publish()

    def _name_shards(self) -> None:
        if len(self._shards) == 1:
            (self.staging / "shard-00000").rename(self.staging / "model.safetensors")
            return
        weight_map: dict[str, str] = {}
        for i, sizes in enumerate(self._shards):
            shard = f"model-{i + 1:05d}-of-{len(self._shards):05d}.safetensors"
            (self.staging / f"shard-{i:05d}").rename(self.staging / shard)
            weight_map.update(dict.fromkeys(sizes, shard))
        total = sum(size for sizes in self._shards for size in sizes.values())
        index = {"metadata": {"total_size": total}, "weight_map": weight_map}
        (self.staging / "model.safetensors.index.json").write_text(json.dumps(index, indent=2) + "\n")

    def _publish(self) -> None:
        check_target(self.out, self.overwrite)  # somebody may have written there meanwhile
        replaced = self.out.parent / f".{self.out.name}.replaced-{os.getpid()}"
        if self.out.exists():
            self.out.rename(replaced)
        try:
            self.staging.rename(self.out)
        except BaseException:
            if replaced.exists() and not self.out.exists():
                replaced.rename(self.out)
            raise
        shutil.rmtree(replaced, ignore_errors=True)
        remove_stale(self.out, "replaced")


def place_of(sidecar: Path) -> Path:
    """Where a copied file belongs in a checkpoint folder: templates by name have a folder of their own."""
    return Path(TEMPLATES, sidecar.name) if sidecar.parent.name == TEMPLATES else Path(sidecar.name)


def readable_mode() -> int:
    """The mode a plain new file gets here."""
    umask = os.umask(0)
    os.umask(umask)
    return 0o666 & ~umask


def check_target(out: Path, overwrite: bool) -> None:
    """Refuse a target that cannot be made, or that holds anything but an earlier conversion to overwrite."""
    parent = nearest_parent(out)
    if not parent.is_dir():
        raise BadOption(f"OUT is {out}, but {parent} is a file, not a folder; choose another OUT")
    if not os.access(parent, os.W_OK | os.X_OK):
        raise BadOption(f"OUT is {out}, but {parent} is not writable; choose another OUT")
    if not out.exists():
        return
    if not out.is_dir():
        raise TargetExists(f"{out} is a file, not a folder; choose another OUT")
    if not any(out.iterdir()):
        return
    if not overwrite:
        raise TargetExists(f"{out} is not empty ({len(list(out.iterdir()))} entries); use --overwrite or another OUT")
    if not (out / RECORD).is_file():
        raise TargetExists(
            f"--overwrite replaces only folders written by mla-convert, and {out} holds no {RECORD}; "
            "delete it yourself or choose another OUT"
        )


def nearest_parent(out: Path) -> Path:
    """The innermost folder above `out` that exists."""
    return next(p for p in (out.parent, *out.parents) if p.exists())  # "/" is its own parent


def check_space(out: Path, expected_bytes: int) -> None:
    """Refuse to begin when the disk of `out` has less free than the checkpoint needs."""
    parent = nearest_parent(out)
    free = shutil.disk_usage(parent).free
    if free < expected_bytes:
        raise MlaConvertError(
            f"no space left: the checkpoint needs {expected_bytes / 1e9:.2f} GB and {parent} has "
            f"{free / 1e9:.2f} GB free; free some space or choose an OUT on another disk"
        )


@contextmanager
def full_disk_is_named(folder: Path) -> Iterator[None]:
    """Turn ENOSPC, from Python or from the safetensors writer, into a clear error."""
    try:
        yield
    except Exception as error:
        # safetensors wraps the system error in its own class and keeps only the text.
        if getattr(error, "errno", None) == errno.ENOSPC or "No space left" in str(error):
            raise MlaConvertError(
                f"no space left on the disk of {folder.parent}; nothing was written; choose an OUT on another disk"
            ) from error
        raise


def remove_stale(out: Path, kind: str) -> None:
    """Delete the hidden folders `kind` (partial or replaced) of the same target whose process is gone."""
    for folder in out.parent.glob(f".{glob.escape(out.name)}.{kind}-*"):
        pid = folder.name.rpartition("-")[2]
        if pid.isdecimal() and not _alive(int(pid)):
            shutil.rmtree(folder, ignore_errors=True)


def _alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return pid != os.getpid()
