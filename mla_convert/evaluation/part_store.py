"""Finished parts of an evaluation on disk, each beside everything it depends on: a rerun takes what it finds."""

from __future__ import annotations

import hashlib
import json
import logging
import os
import re
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from mla_convert.errors import BadOption
from mla_convert.interface.report import read_json, write_json
from mla_convert.source.checkpoint import Checkpoint

logger = logging.getLogger(__name__)

MODEL_FILES = ("*.safetensors", "*.gguf", "*.json", "*.jinja", "*.model")
HASHES = "model-hashes.json"


class PartStore:
    """A folder of parts. `inputs` are plain JSON values that decide the part wholly; the same inputs, the same part."""

    def __init__(self, folder: str | Path):
        self.folder = Path(folder).expanduser()
        if self.folder.exists() and not self.folder.is_dir():
            raise BadOption(f"parts={folder} is a file; name a folder for finished parts")
        self.folder.mkdir(parents=True, exist_ok=True)

    def _file(self, inputs: dict[str, Any], suffix: str) -> Path:
        text = json.dumps(inputs, sort_keys=True)
        name = re.sub(r"[^\w. -]", "_", inputs["part"])  # any text may be named by its user
        return self.folder / f"{name}-{hashlib.sha256(text.encode()).hexdigest()[:20]}{suffix}"

    def load(self, inputs: dict[str, Any], with_tensors: bool = False) -> dict[str, Any] | None:
        """The part, or None where it is missing, unreadable or (with_tensors) lacks its tensors."""
        path = self._file(inputs, ".json")
        if not path.is_file() or (with_tensors and not self._file(inputs, ".safetensors").is_file()):
            return None
        try:
            content = read_json(path)
        except (OSError, ValueError):
            logger.warning("%s is unreadable and is measured again", path)
            return None
        if not isinstance(content, dict) or content.get("inputs") != json.loads(json.dumps(inputs)):
            return None
        part: dict[str, Any] = content["part"]
        return part

    def save(self, inputs: dict[str, Any], part: dict[str, Any], tensors: dict[str, torch.Tensor] | None) -> None:
        """Write a part, its tensors first; a process that dies leaves the part whole or absent."""
        if tensors is not None:
            target = self._file(inputs, ".safetensors")
            save_file({name: value.contiguous() for name, value in tensors.items()}, _scratch(target))
            os.replace(_scratch(target), target)
        target = self._file(inputs, ".json")
        write_json({"inputs": inputs, "part": part}, _scratch(target))
        os.replace(_scratch(target), target)

    def tensors(self, inputs: dict[str, Any]) -> dict[str, torch.Tensor]:
        """The tensors of a part. Raises BadOption when the file is damaged."""
        path = self._file(inputs, ".safetensors")
        try:
            found: dict[str, torch.Tensor] = load_file(path)
        except (OSError, SafetensorError) as error:
            raise BadOption(f"{path} is damaged ({error}); delete it and run again") from error
        return found

    def identity(self, model: str) -> str:
        """sha256 over the files of `model`. A file is hashed again when its size or time of change differ."""
        path = Path(model).expanduser()
        if not path.exists():
            path = Checkpoint.open(model).path  # a hub id: its local copy
        files = [path] if path.is_file() else sorted({f for pattern in MODEL_FILES for f in path.glob(pattern)})
        known = self._known_hashes()
        digest = hashlib.sha256()
        for file in files:
            stat = file.stat()
            place = f"{file.resolve()}:{stat.st_size}:{stat.st_mtime_ns}"
            if place not in known:
                with file.open("rb") as stream:
                    known[place] = hashlib.file_digest(stream, "sha256").hexdigest()
            digest.update(f"{file.name}:{known[place]}\n".encode())
        write_json(known, _scratch(self.folder / HASHES))
        os.replace(_scratch(self.folder / HASHES), self.folder / HASHES)
        return digest.hexdigest()

    def _known_hashes(self) -> dict[str, Any]:
        try:
            known = json.loads((self.folder / HASHES).read_text(encoding="utf-8"))
        except (OSError, ValueError):
            return {}
        return known if isinstance(known, dict) else {}


def _scratch(target: Path) -> Path:
    return target.with_name(f".{target.name}.{os.getpid()}")
