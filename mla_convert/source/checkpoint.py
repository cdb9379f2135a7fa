"""Open a source checkpoint lazily and account for every tensor in it.

`Checkpoint.open` decides in the first second everything that config and headers can decide; data is read one
tensor at a time, checked finite, and ticked off, so that `leftover` can say what no step asked for.
"""

from __future__ import annotations

import hashlib
import logging
import re
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

import torch
from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TransferSpeedColumn

from mla_convert.errors import BadCheckpoint, UnsupportedSource
from mla_convert.source.gguf_source import GGUFWeights
from mla_convert.source.safetensors_source import (
    INDEX_FILE,
    SINGLE_FILE,
    SafetensorsWeights,
    TensorHeader,
    read_json,
)

__all__ = ["Checkpoint", "TensorHeader"]

logger = logging.getLogger(__name__)

SIDECARS = (
    "tokenizer*",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "vocab.txt",
    "merges.txt",
    "*.model",
    "*.tiktoken",
    "tekken.json",
    "*.jinja",
    "chat_template*",
    "additional_chat_templates/*.jinja",
    "LICENSE*",
    "LICENCE*",
    "NOTICE*",
    "USE_POLICY*",
)
NO_SIDECARS = (".py", ".bin", ".pt", ".pth", ".pkl", ".pickle")
HUB_PATTERNS = ("*.json", "*.safetensors", *SIDECARS)
HUB_IGNORED = ("original/*", "consolidated*", "onnx/*", "*.py", "*.bin", "*.pt", "*.pth")
PICKLES = ("pytorch_model*.bin", "*.pt", "*.pth", "*.pkl", "*.bin")
HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*(/[\w.-]+)?")
HASH_CHUNK = 1 << 22  # bytes


class _Weights(Protocol):
    headers: dict[str, TensorHeader]

    @property
    def files(self) -> list[Path]: ...

    def read(self, name: str) -> torch.Tensor: ...


def _download(repo: str) -> Path:
    from huggingface_hub import snapshot_download

    try:
        return Path(snapshot_download(repo, allow_patterns=list(HUB_PATTERNS), ignore_patterns=list(HUB_IGNORED)))
    except Exception as error:  # the client raises its own, requests' and the system's errors
        raise BadCheckpoint(
            f"{repo!r} is no local folder and could not be downloaded from the Hugging Face hub "
            f"({type(error).__name__}: {error}); check the name, the network and your access."
        ) from error


def _locate(source: str | Path) -> Path:
    """Return the local folder or .gguf file that `source` means."""
    path = Path(source).expanduser()
    if path.is_file():
        if path.suffix.lower() == ".gguf":
            return path
        raise BadCheckpoint(f"{path} is a {path.suffix or 'plain'} file; give its folder, or a .gguf file.")
    if path.is_dir():
        has_safetensors = any(path.glob("*.safetensors")) or (path / INDEX_FILE).is_file()
        ggufs = sorted(path.glob("*.gguf"))
        if has_safetensors or not ggufs:
            return path
        if len(ggufs) > 1:
            names = ", ".join(file.name for file in ggufs)
            raise BadCheckpoint(f"{path} holds {len(ggufs)} GGUF files ({names}); give the path of one.")
        return ggufs[0]
    if isinstance(source, Path) or not HUB_ID.fullmatch(str(source)):
        raise BadCheckpoint(f"{source} does not exist; give a folder, a .gguf file or a hub id (owner/name).")
    return _download(str(source))


def _check_folder(folder: Path) -> None:
    """Refuse, with the reason, a folder whose weights are not safetensors of one whole model."""
    if not (folder / "config.json").is_file():
        raise BadCheckpoint(f"{folder} has no config.json; give the folder of a Hugging Face model.")
    if (folder / "adapter_config.json").is_file():
        raise BadCheckpoint(
            f"{folder} holds adapter_config.json, so stock loaders would apply an adapter; "
            "merge it into the weights first."
        )
    if (folder / SINGLE_FILE).is_file() or (folder / INDEX_FILE).is_file():
        return
    pickles = sorted({file.name for pattern in PICKLES for file in folder.glob(pattern)})
    if pickles:
        raise BadCheckpoint(
            f"{folder} holds its weights only as a pickle ({pickles[0]}), which can run code when read; "
            "save the model with safe_serialization=True, or ask its author for safetensors."
        )
    others = sorted(file.name for file in folder.glob("*.safetensors"))
    found = f"only {', '.join(others[:5])}" if others else "no weights"
    raise BadCheckpoint(
        f"{folder} has {found}; {SINGLE_FILE} or {INDEX_FILE} with its shards is needed (a pickle is never read)."
    )


def _gguf_config(path: Path) -> dict[str, Any]:
    from transformers import AutoConfig

    try:
        config: dict[str, Any] = AutoConfig.from_pretrained(path.parent, gguf_file=path.name).to_dict()
    except (ValueError, KeyError) as error:
        raise UnsupportedSource(f"{path}: transformers cannot read this GGUF file ({error}).") from error
    config.pop("quantization_config", None)
    config["architectures"] = config.get("architectures") or None
    return config


class Checkpoint:
    """A source model on disk. `tensor` reads and ticks off; `peek` only reads.

    config: raw config.json (GGUF: the config transformers builds, without quantization_config).
    generation_config: raw generation_config.json or None. path: the local folder or .gguf file.
    headers: tensor name -> TensorHeader, from file headers only.
    """

    def __init__(
        self, path: Path, config: dict[str, Any], generation_config: dict[str, Any] | None, weights: _Weights
    ) -> None:
        self.path = path
        self.config = config
        self.generation_config = generation_config
        self._weights = weights
        self._consumed: set[str] = set()
        self._hashes: dict[str, str] | None = None
        self._tokenizer_folder: tempfile.TemporaryDirectory[str] | None = None

    @classmethod
    def open(cls, source: str | Path) -> Checkpoint:
        """Open a folder, a .gguf file (or a folder with one and no safetensors), or a hub id.

        Raises BadCheckpoint for missing, damaged, contradicting or pickled files, UnsupportedSource for a
        GGUF file with features that are not read.
        """
        path = _locate(source)
        if path.is_file():
            gguf = GGUFWeights(path)
            if gguf.architecture != "llama":
                raise UnsupportedSource(
                    f"{path}: GGUF architecture {gguf.architecture!r} is not supported; supported: 'llama'. "
                    "Convert the safetensors checkpoint of this model if its family is supported."
                )
            return cls(path, _gguf_config(path), None, gguf)
        _check_folder(path)
        generation = path / "generation_config.json"
        return cls(
            path,
            read_json(path / "config.json"),
            read_json(generation) if generation.is_file() else None,
            SafetensorsWeights(path),
        )

    @property
    def headers(self) -> Mapping[str, TensorHeader]:
        """Tensor name -> TensorHeader of everything in the weight files."""
        return self._weights.headers

    def peek(self, name: str) -> torch.Tensor:
        """Return tensor `name` in its storage dtype without ticking it off.

        Raises BadCheckpoint if there is no such tensor or it holds NaN or inf.
        """
        if name not in self.headers:
            raise BadCheckpoint(f"{self.path} holds no tensor {name} ({len(self.headers)} others); see config.json.")
        tensor = self._weights.read(name)
        # float8 has no isfinite; such checkpoints are refused by their dtype.
        if tensor.is_floating_point() and tensor.dtype.itemsize > 1 and not bool(torch.isfinite(tensor).all()):
            nans, infs = int(torch.isnan(tensor).sum()), int(torch.isinf(tensor).sum())
            raise BadCheckpoint(
                f"{self.headers[name].file}: {name} holds {nans} NaN and {infs} infinite of {tensor.numel()} "
                "values; download the file again or repair the training run."
            )
        return tensor

    def tensor(self, name: str) -> torch.Tensor:
        """Return tensor `name` in its storage dtype, checked finite; tick it off. Raises BadCheckpoint."""
        tensor = self.peek(name)
        self._consumed.add(name)
        return tensor

    def ignore(self, name: str) -> None:
        """Tick off a tensor whose data is known to be redundant (a buffer, a copy)."""
        self._consumed.add(name)

    def consumed(self) -> list[str]:
        """Names ticked off so far, sorted."""
        return sorted(self._consumed)

    def leftover(self) -> list[str]:
        """Names nobody asked for, sorted."""
        return sorted(set(self.headers) - self._consumed)

    def sidecars(self) -> list[Path]:
        """Files to copy beside the converted weights: tokenizer, chat template, licence.

        For GGUF, transformers writes the tokenizer to a temporary folder that lives as long as this object.
        """
        folder = self.path
        if self.path.is_file():
            if self._tokenizer_folder is None:
                from transformers import AutoTokenizer

                self._tokenizer_folder = tempfile.TemporaryDirectory(prefix="mla_convert_")
                tokenizer = AutoTokenizer.from_pretrained(self.path.parent, gguf_file=self.path.name)
                tokenizer.save_pretrained(self._tokenizer_folder.name)
            folder = Path(self._tokenizer_folder.name)
        found = {path for pattern in SIDECARS for path in folder.glob(pattern)}
        return sorted(path for path in found if path.is_file() and path.suffix not in NO_SIDECARS)

    def hashes(self) -> dict[str, str]:
        """File name -> sha256 (hex) of every weight file; computed once."""
        if self._hashes is None:
            label = TextColumn("sha256 {task.description}")
            columns = (label, BarColumn(), DownloadColumn(), TransferSpeedColumn())
            with Progress(*columns, console=Console(stderr=True), transient=True) as progress:
                self._hashes = {file.name: _sha256(file, progress) for file in self._weights.files}
        return self._hashes


def _sha256(file: Path, progress: Progress) -> str:
    digest = hashlib.sha256()
    task = progress.add_task(file.name, total=file.stat().st_size)
    with file.open("rb") as stream:
        while chunk := stream.read(HASH_CHUNK):
            digest.update(chunk)
            progress.advance(task, len(chunk))
    return digest.hexdigest()
