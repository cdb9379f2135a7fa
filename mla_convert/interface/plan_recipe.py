"""The recipe of `mla-convert plan`: its dataclass is the YAML file, the command line and the Python call."""

import math
import re
from dataclasses import dataclass

from mla_convert.errors import BadOption
from mla_convert.interface.options import Recipe, option
from mla_convert.interface.recipe import _CALIB_HELP

_MEMORY = re.compile(r"(?P<number>\d+(\.\d+)?)\s*(?P<unit>[KMGT]i?B)", re.IGNORECASE)
_TOKENS = re.compile(r"(?P<number>\d+)(?P<unit>[kKmM]?)")
_POWER = {"K": 1, "M": 2, "G": 3, "T": 4}


@dataclass(frozen=True)
class PlanRecipe(Recipe):
    """Options of `mla-convert plan`."""

    model: str = option("Model to plan for: folder, .gguf file or hub id; its config.json is enough.", argument="MODEL")
    kv_lora_rank: int | None = option(
        "Latent size to plan, numbers per token and layer; with --qk-rope-head-dim. Without both: the largest size "
        "servers accept that is smaller than the model's own cache.",
        None,
        at_least=1,
    )
    qk_rope_head_dim: int | None = option("Rotating key size to plan, numbers per token and layer.", None, at_least=2)
    context: str = option("Tokens per sequence when serving, such as 32k (32,768) or 1000.", "32k")
    batch: int = option("Sequences per batch in the table of sizes.", 16, at_least=1)
    cache_dtype: str = option("Type of the cache.", "bfloat16", choices=("bfloat16", "float16", "float32", "fp8"))
    tp: str = option("Tensor-parallel sizes to compare, joined by commas.", "1,2,4,8")
    gpu_memory: str | None = option("Memory of one GPU, such as 80GB (10^9 bytes) or 80GiB; says what fits.", None)
    memory_fraction: float = option("Share of that memory a server may use, above 0 and at most 1.", 0.9)
    target_loss: float | None = option(
        "Find the smallest cache that loses at most so many nats per token, by prediction: reads the weights and runs "
        "calibration text through them.",
        None,
    )
    target_bytes: int | None = option(
        "Find the best split of so many cache bytes per token, all layers; reads the weights and text like "
        "--target-loss.",
        None,
        at_least=1,
    )
    calib_data: tuple[str, ...] = option(_CALIB_HELP + "the calibration part.", ())
    calib_windows: int = option(
        "Windows the prediction is made from; a quarter as many more measure it.", 16, at_least=2
    )
    eval_data: tuple[str, ...] = option(
        "Texts to measure on, named like --calib-data; without it windows of --calib-data are held out.", ()
    )
    window: int = option("Their length, tokens.", 512, at_least=2)
    measured: int = option("Sizes measured on held-out windows to turn predictions into nats.", 4, at_least=2)
    method: str = option("As for convert.", "weighted", choices=("weighted", "pca", "svd"))
    device: str = option("Where to compute: auto (a GPU if there is one), cpu, cuda or cuda:N.", "auto")
    seed: int = option("Seed of every random choice.", 0, at_least=0)
    curve: str | None = option("Also draw the predicted loss against cache size into this file.", None)
    json: str | None = option("Also write everything to this JSON file.", None)
    plot: str | None = option("Also draw the cache of one sequence against its length into this file.", None)

    @property
    def wants_curve(self) -> bool:
        """Whether a size is to be found, which takes the weights and text."""
        return self.target_loss is not None or self.target_bytes is not None

    def validate(self) -> None:
        """Check the size, the units and the numbers. Raises BadOption."""
        if (self.kv_lora_rank is None) != (self.qk_rope_head_dim is None):
            raise BadOption(
                f"kv_lora_rank={self.kv_lora_rank} and qk_rope_head_dim={self.qk_rope_head_dim}: give both or neither"
            )
        if self.qk_rope_head_dim is not None and self.qk_rope_head_dim % 2:
            raise BadOption(f"qk_rope_head_dim={self.qk_rope_head_dim} is odd, but dimensions rotate in pairs")
        if not 0 < self.memory_fraction <= 1:
            raise BadOption(f"memory_fraction={self.memory_fraction} must be above 0 and at most 1, such as 0.9")
        if self.target_loss is not None and not 0 < self.target_loss < math.inf:
            raise BadOption(f"target_loss={self.target_loss} must be above 0 nats per token, such as 0.05")
        if self.target_loss is not None and self.target_bytes is not None:
            raise BadOption(
                f"target_loss={self.target_loss} and target_bytes={self.target_bytes}: each decides the size; give one"
            )
        if self.curve is not None and not self.wants_curve:
            raise BadOption(f"curve={self.curve} needs a target: give --target-loss or --target-bytes")
        for name, texts in (("calib_data", self.calib_data), ("eval_data", self.eval_data)):
            if texts and not self.wants_curve:
                raise BadOption(f"{name}={', '.join(texts)} is for a curve: give --target-loss or --target-bytes")
        tokens(self.context)
        tp_sizes(self.tp)
        if self.gpu_memory is not None:
            memory_bytes(self.gpu_memory)


def memory_bytes(text: str) -> int:
    """Bytes of "80GB" (powers of 1000) or "80GiB" (powers of 1024). Raises BadOption."""
    found = _MEMORY.fullmatch(text.strip())
    if not found:
        raise BadOption(f"gpu_memory={text!r} is no amount of memory; write for example 80GB or 80GiB")
    base = 1024 if "i" in found["unit"].lower() else 1000
    size = int(float(found["number"]) * base ** _POWER[found["unit"][0].upper()])
    if size < 1:
        raise BadOption(f"gpu_memory={text!r} is no memory at all; write for example 80GB or 80GiB")
    return size


def tokens(text: str) -> int:
    """Tokens of "32k" (x 1024), "1M" (x 1024^2) or "1000". Raises BadOption."""
    found = _TOKENS.fullmatch(text.strip())
    if not found or int(found["number"]) < 1:
        raise BadOption(f"context={text!r} is no number of tokens; write for example 32k (32,768) or 1000")
    return int(found["number"]) * {"": 1, "k": 1024, "m": 1024**2}[found["unit"].lower()]


def tp_sizes(text: str) -> tuple[int, ...]:
    """The sizes of "1,2,4,8". Raises BadOption."""
    parts = [part.strip() for part in text.split(",")]
    if not all(part.isdecimal() and int(part) >= 1 for part in parts):
        raise BadOption(f"tp={text!r} is no list of whole numbers of 1 or more; write for example 1,2,4,8")
    return tuple(int(part) for part in parts)
