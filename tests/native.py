"""Native conversions in fp64, and transformers' own classes in fp64 as their oracle."""

from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from transformers import AutoModelForCausalLM

import mla_convert

FULL = {"lossless": True, "format": "native", "keep_layers": "none"}


class InDouble(TorchFunctionMode):
    """Casts to float32 inside the classes (norms, softmax, rotary tables) go to float64 instead."""

    def __torch_function__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if func is torch.Tensor.float:
            func = torch.Tensor.double
        if kwargs.get("dtype") is torch.float32:
            kwargs["dtype"] = torch.float64
        return func(*(torch.float64 if arg is torch.float32 else arg for arg in args), **kwargs)


def convert_fp64(source: Path, out: Path, **options: Any) -> Path:
    """A conversion stored in fp64, which no option offers."""
    with patch("mla_convert.conversion.convert.output_dtype", lambda *_: torch.float64):
        mla_convert.convert(source=str(source), out=str(out), **options)
    return out


def fp64_model(folder: Path) -> Any:
    """The model of `folder` in fp64, its attention computed by the class's own eager code."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64, attn_implementation="eager")
    model.set_experts_implementation("eager")  # the fused kernel computes in float32 at most
    return model.eval()


def logits(model: Any, ids: Tensor, **inputs: Any) -> Tensor:
    """[windows, tokens, vocab] of one forward in fp64."""
    with torch.no_grad(), InDouble():
        found: Tensor = model(input_ids=ids, use_cache=False, **inputs).logits
    assert found.dtype == torch.float64
    return found


def decoded(model: Any, ids: Tensor, chunk: int, cache: Any = None) -> Tensor:
    """The same logits, fed `chunk` tokens at a time through the cache."""
    parts = []
    with torch.no_grad(), InDouble():
        for part in ids.split(chunk, dim=1):
            out = model(input_ids=part, use_cache=True, cache=cache)
            cache = out.cache
            parts.append(out.logits)
    return torch.cat(parts, dim=1)


def distance(found: Tensor, wanted: Tensor) -> float:
    """Largest difference, of the largest wanted number."""
    return ((found - wanted).abs().max() / wanted.abs().max()).item()


def set_path(model: Any, path: str) -> None:
    """Make every latent attention of `model` take one path."""
    for module in model.modules():
        if type(module).__name__ == "MLAttention":
            module.path = path
