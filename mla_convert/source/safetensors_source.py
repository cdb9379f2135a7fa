"""Read safetensors checkpoints: headers first, tensors on demand, one shard mapped at a time."""

from __future__ import annotations

import json
import logging
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from mla_convert.errors import BadCheckpoint

logger = logging.getLogger(__name__)

SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"
MAX_HEADER_BYTES = 100_000_000  # limit of the safetensors format
LFS_POINTER = b"version "
DTYPES: Mapping[str, torch.dtype] = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}


@dataclass(frozen=True)
class TensorHeader:
    """What is known of a tensor before its data is read.

    `shape` is [out, in] for a linear layer, as in `nn.Linear.weight`; `file` holds the data.
    """

    dtype: torch.dtype
    shape: tuple[int, ...]
    file: Path


def read_json(path: Path) -> dict[str, Any]:
    """Return the JSON object in `path`. Raises BadCheckpoint if it is unreadable or no object."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise BadCheckpoint(f"{path} is not readable JSON ({error}); get the file again.") from error
    if not isinstance(content, dict):
        raise BadCheckpoint(f"{path} holds a {type(content).__name__}, not a JSON object; get the file again.")
    return content


def _raw_header(path: Path, size: int) -> tuple[dict[str, Any], int]:
    """Return the JSON header of a safetensors file and the number of data bytes that follow it."""
    with path.open("rb") as stream:
        prefix = stream.read(8)
        length = int.from_bytes(prefix, "little")
        if prefix == LFS_POINTER:
            raise BadCheckpoint(f"{path} is a Git LFS pointer, not weights; run `git lfs pull` there.")
        if len(prefix) < 8 or 8 + length > size or length > MAX_HEADER_BYTES:
            raise BadCheckpoint(
                f"{path} is truncated or no safetensors file: it holds {size} bytes, its header "
                f"claims {length} after the first 8; download it again."
            )
        raw = stream.read(length)
    try:
        header = json.loads(raw)
    except ValueError as error:
        raise BadCheckpoint(f"{path} has an unreadable header ({error}); download it again.") from error
    if not isinstance(header, dict):
        raise BadCheckpoint(f"{path} has a safetensors header that is no JSON object; download it again.")
    return header, size - 8 - length


def _parse_entry(path: Path, name: str, entry: Any) -> tuple[TensorHeader, int, int]:
    try:
        dtype, shape = str(entry["dtype"]), tuple(int(n) for n in entry["shape"])
        begin, end = (int(n) for n in entry["data_offsets"])
    except (KeyError, TypeError, ValueError) as error:
        raise BadCheckpoint(f"{path}: header of {name} is malformed ({entry!r}); get it again.") from error
    if dtype not in DTYPES:
        raise BadCheckpoint(f"{path}: {name} has dtype {dtype}; save it as one of {', '.join(DTYPES)}.")
    expected = math.prod(shape) * DTYPES[dtype].itemsize
    if min(shape, default=0) < 0 or end - begin != expected:
        raise BadCheckpoint(
            f"{path}: {name} of shape {list(shape)} and dtype {dtype} needs {expected} bytes, "
            f"its offsets span {end - begin}; download it again."
        )
    return TensorHeader(DTYPES[dtype], shape, path), begin, end


def read_header(path: Path) -> dict[str, TensorHeader]:
    """Return name -> TensorHeader of one safetensors file, reading no tensor data.

    Raises BadCheckpoint if the file is missing, truncated, longer than its header says, or if its tensors
    overlap or leave gaps.
    """
    if not path.is_file():
        raise BadCheckpoint(f"{path} is missing; download it again, or remove it from {INDEX_FILE}.")
    header, data_bytes = _raw_header(path, path.stat().st_size)
    header.pop("__metadata__", None)
    parsed = {name: _parse_entry(path, name, entry) for name, entry in header.items()}
    reached, previous = 0, "the header"
    for name, (_, begin, end) in sorted(parsed.items(), key=lambda item: item[1][1:]):
        if begin != reached:
            raise BadCheckpoint(
                f"{path}: data of {name} begins at byte {begin} but that of {previous} ends at {reached}, "
                "so they overlap or leave a gap; save the checkpoint again."
            )
        reached, previous = end, name
    if reached != data_bytes:
        what = "truncated" if reached > data_bytes else "longer than its header says"
        raise BadCheckpoint(
            f"{path} is {what}: its tensors need {reached} bytes of data, it holds {data_bytes}; download it again."
        )
    return {name: tensor for name, (tensor, _, _) in parsed.items()}


def _safe_shard_name(index: Path, tensor: str, shard: Any) -> str:
    """Return `shard` if it names a safetensors file inside the folder, whatever the operating system."""
    outside = (
        not isinstance(shard, str)
        or PurePosixPath(shard).is_absolute()
        or ".." in PurePosixPath(shard).parts
        or "\\" in shard
        or ":" in shard
        or "\0" in shard
    )
    if outside:
        raise BadCheckpoint(
            f"{index} places {tensor} in {shard!r}, outside its folder; do not trust this checkpoint, "
            "or correct the index to file names without '..', drive or leading '/'."
        )
    if not shard.endswith(".safetensors"):
        raise BadCheckpoint(
            f"{index} places {tensor} in {shard!r}, which is no .safetensors file; save the model with "
            "safe_serialization=True."
        )
    return str(shard)


def _sharded_headers(index: Path) -> dict[str, TensorHeader]:
    weight_map = read_json(index).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise BadCheckpoint(f"{index} has no weight_map ({weight_map!r}); save the checkpoint again.")
    shards = {name: _safe_shard_name(index, name, shard) for name, shard in weight_map.items()}
    missing = sorted(shard for shard in set(shards.values()) if not (index.parent / shard).is_file())
    if missing:
        raise BadCheckpoint(
            f"{index.parent} lacks {len(missing)} of the {len(set(shards.values()))} shards its index names: "
            f"{', '.join(missing[:5])}; download them again."
        )
    found: dict[str, TensorHeader] = {}
    for shard in sorted(set(shards.values())):
        for name, header in read_header(index.parent / shard).items():
            if shards.get(name) != shard:
                place = shards.get(name, "no file")
                raise BadCheckpoint(
                    f"{index.parent / shard} holds {name}, which {index.name} places in {place}; "
                    "index and shards are of different saves: download both again."
                )
            found[name] = header
    absent = sorted(set(shards) - set(found))
    if absent:
        raise BadCheckpoint(
            f"{index} places {absent[0]} in {shards[absent[0]]}, which does not hold it "
            f"({len(absent)} such tensors); index and shards are of different saves: download both again."
        )
    extra = sorted({path.name for path in index.parent.glob("*.safetensors")} - set(shards.values()))
    if extra:
        logger.warning("%s does not name %s; not read", index, ", ".join(extra))
    return found


class SafetensorsWeights:
    """The tensors of a folder with model.safetensors, or with shards and an index.

    `headers` maps every tensor name to its TensorHeader; all checks that headers allow are made on
    construction. Raises BadCheckpoint.
    """

    def __init__(self, folder: Path) -> None:
        single, index = folder / SINGLE_FILE, folder / INDEX_FILE
        self.headers = _sharded_headers(index) if index.is_file() else read_header(single)
        used = {header.file for header in self.headers.values()}
        if index.is_file() and single.is_file() and single not in used:
            raise BadCheckpoint(
                f"{folder} holds both {SINGLE_FILE} and an {INDEX_FILE} that does not name it; "
                "delete the one that is out of date."
            )
        if not self.headers:
            raise BadCheckpoint(f"{single} holds no tensors; save the checkpoint again.")
        self._open_file: Path | None = None
        self._open_handle: Any = None

    @property
    def files(self) -> list[Path]:
        """The weight files, sorted."""
        return sorted({header.file for header in self.headers.values()})

    def read(self, name: str) -> torch.Tensor:
        """Return tensor `name` in its storage dtype. Raises BadCheckpoint if that fails."""
        path = self.headers[name].file
        try:
            if path != self._open_file:
                # Drop the old map before the new one: never two shards mapped at once.
                self._open_handle = self._open_file = None
                self._open_handle, self._open_file = safe_open(path, framework="pt", device="cpu"), path
            tensor: torch.Tensor = self._open_handle.get_tensor(name)
        except (SafetensorError, OSError) as error:
            raise BadCheckpoint(f"{path}: cannot read {name} ({error}); download the file again.") from error
        return tensor
