"""Stock loading of whole models: AutoModelForCausalLM and AutoTokenizer, no remote code, no pickles.

The converter itself reads tensors from files (checkpoint.py); whole models are built only to calibrate,
verify and evaluate.
"""

from __future__ import annotations

import inspect
import logging
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING

from mla_convert.errors import BadCheckpoint, BadOption
from mla_convert.source.attention_shape import read_config
from mla_convert.source.locate import locate

logger = logging.getLogger(__name__)

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float64": torch.float64}


@dataclass(frozen=True)
class LoadReport:
    """What from_pretrained did not find, did not use, or could not fit (tensor names)."""

    missing: tuple[str, ...]
    unexpected: tuple[str, ...]
    mismatched: tuple[str, ...]


def resolve_device(device: str) -> torch.device:
    """cuda if there is one, else cpu, for "auto"; else the named device. Raises BadOption if it cannot be
    used here.
    """
    if device == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        found = torch.device(device)
    except RuntimeError as error:
        raise BadOption(f'device="{device}" is no torch device; use "auto", "cpu" or "cuda"') from error
    if found.type == "cuda" and not torch.cuda.is_available():
        raise BadOption(f'device="{device}", but torch sees no GPU here; use --device auto or cpu')
    return found


def resolve_dtype(dtype: str) -> torch.dtype:
    """Name -> torch.dtype of a computation. Raises BadOption for other names than float32, bfloat16,
    float64.
    """
    if dtype not in DTYPES:
        raise BadOption(f'dtype="{dtype}" is not one of {", ".join(DTYPES)}')
    return DTYPES[dtype]


def check_models(sources: Iterable[str]) -> None:
    """Raises BadCheckpoint for the first of `sources` that names no model; reads configs only, before any long work."""
    for source in sources:
        if "gguf_file" not in locate(source)[1]:  # of a GGUF the file itself was seen
            read_config(source)


def load_model(source: str | Path, dtype: torch.dtype, device: torch.device) -> PreTrainedModel:
    """The model of `source` (folder, hub id or .gguf) in `dtype` on `device`, eval mode, sdpa attention.

    Raises BadCheckpoint when it cannot be read, or when a tensor is missing or of another shape (transformers
    would go on with random weights).
    """
    model, report = load_model_and_report(source, dtype, device)
    if report.missing or report.mismatched:
        raise BadCheckpoint(
            f"{source}: tensors missing {list(report.missing[:5])}, "
            f"of another shape {list(report.mismatched[:5])}; the model would run with random weights; "
            "convert or download it again"
        )
    if report.unexpected:
        logger.warning("%s: %d tensors are not used by %s, first %s", source, len(report.unexpected),
                       type(model).__name__, report.unexpected[0])  # fmt: skip
    return model


def load_model_and_report(
    source: str | Path, dtype: torch.dtype, device: torch.device
) -> tuple[PreTrainedModel, LoadReport]:
    """Like `load_model`, but a misfit of tensors is reported instead of raised."""
    name, kwargs = locate(source)
    if "gguf_file" not in kwargs:
        kwargs["use_safetensors"] = True  # never a pickle
    try:
        loaded: Any = AutoModelForCausalLM.from_pretrained(
            name,
            dtype=dtype,
            attn_implementation=attention_implementation(name, kwargs),
            trust_remote_code=False,
            output_loading_info=True,
            **kwargs,
        )
    except Exception as error:  # transformers raises a dozen unrelated classes here
        raise BadCheckpoint(f"{source}: transformers cannot load it as a causal language model: {error}") from error
    model: PreTrainedModel = loaded[0]
    info: dict[str, Any] = loaded[1]
    if "gguf_file" in kwargs and getattr(model.config, "quantization_config", None) is not None:
        del model.config.quantization_config  # the weights are dequantised already
    report = LoadReport(
        missing=tuple(sorted(info["missing_keys"])),
        unexpected=tuple(sorted(info["unexpected_keys"])),
        mismatched=tuple(sorted(str(entry[0]) for entry in info["mismatched_keys"])),
    )
    torch.nn.Module.to(model, device)
    model.train(False)
    return model.requires_grad_(False), report


def cache_name(model: PreTrainedModel) -> str:
    """What the forward and the output of `model` call the cache; transformers 5.24 renamed it."""
    return "cache" if "cache" in inspect.signature(model.forward).parameters else "past_key_values"


def attention_implementation(name: str, kwargs: dict[str, Any]) -> str:
    """sdpa, or eager for families whose attention it cannot compute (soft caps, sinks)."""
    config = AutoConfig.from_pretrained(name, trust_remote_code=False, gguf_file=kwargs.get("gguf_file"))
    model = MODEL_FOR_CAUSAL_LM_MAPPING.get(type(config), None)
    return "sdpa" if getattr(model, "_supports_sdpa", True) else "eager"


def load_tokenizer(source: str | Path) -> PreTrainedTokenizerBase:
    """The tokenizer of `source` (folder, hub id or .gguf). Raises BadCheckpoint when there is none."""
    name, kwargs = locate(source)
    try:
        tokenizer = AutoTokenizer.from_pretrained(name, trust_remote_code=False, **kwargs)
    except Exception as error:  # as above
        raise BadCheckpoint(f"{source}: no tokenizer can be loaded from it: {error}") from error
    assert isinstance(tokenizer, PreTrainedTokenizerBase)
    return tokenizer
