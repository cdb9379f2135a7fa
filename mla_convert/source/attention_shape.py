"""What config.json (and the weight headers, where there are any) say about a model's attention.

Wider than what `convert` takes: any model that transformers' AutoConfig reads can be planned for. No weights are read.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mla_convert.errors import BadCheckpoint, UnsupportedSource
from mla_convert.source.locate import locate

WINDOWED = ("sliding_attention", "chunked_attention")
# Families whose classes have these without a config key for it; the headers, where there are any, are asked first.
QKV_BIAS = ("qwen2", "qwen2_moe", "qwen2_vl_text", "qwen2_5_vl_text")
QK_NORM = ("qwen3", "qwen3_moe", "gemma3_text", "olmo2", "olmo3", "qwen3_next")
EXPERT_KEYS = ("n_routed_experts", "num_local_experts", "num_experts")
ITEMSIZE = {"float32": 4, "float16": 2, "bfloat16": 2, "float64": 8}


@dataclass(frozen=True)
class AttentionShape:
    """Sizes are counts of features, as the config names them; `source_head_dim` is the width of one key head.

    windows: per attention layer its window in tokens, None for full attention; other layers cache no keys and values
    and are counted in `other_layers`. kv_lora_rank, qk_rope_head_dim: of a source that has a latent already.
    features: what the stock format may not hold (QK-norm, biases, ...), as the config or the headers show.
    weight_bytes, parameters: None where no headers were read.
    """

    model_type: str
    hidden_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    source_head_dim: int
    v_head_dim: int
    max_position_embeddings: int
    rms_norm_eps: float
    windows: tuple[int | None, ...]
    other_layers: int
    kv_lora_rank: int | None
    qk_rope_head_dim: int | None
    rope_types: tuple[str, ...]
    features: tuple[str, ...]
    tied: bool
    dtype: str
    parameters: int | None
    weight_bytes: int | None

    @property
    def numbers(self) -> int:
        """Numbers the model caches per token and layer: kv_lora_rank + qk_rope_head_dim where it has a latent, else
        num_key_value_heads x (source_head_dim + v_head_dim).
        """
        if self.kv_lora_rank is not None:
            return self.kv_lora_rank + (self.qk_rope_head_dim or 0)
        return self.num_key_value_heads * (self.source_head_dim + self.v_head_dim)

    @property
    def unrotated_width(self) -> int:
        """qk_nope_head_dim of a latent form: a source with a latent has it; any other keeps a whole key head."""
        return self.source_head_dim - (self.qk_rope_head_dim or 0)

    @property
    def kind(self) -> str:
        """MHA, GQA, MQA or MLA."""
        if self.kv_lora_rank is not None:
            return "MLA"
        if self.num_key_value_heads == self.num_attention_heads:
            return "MHA"
        return "MQA" if self.num_key_value_heads == 1 else "GQA"

    def cached_tokens(self, context: int) -> int:
        """Token slots all layers together hold for one sequence of `context` tokens: a window caps its layer."""
        return sum(context if window is None else min(context, window) for window in self.windows)


def read_shape(model: str) -> AttentionShape:
    """The shape of `model` (folder, .gguf file or hub id). Raises BadCheckpoint, UnsupportedSource."""
    config = read_config(model)
    read = _Reader(config, model)
    heads, hidden = read.count("num_attention_heads"), read.count("hidden_size")
    kv_heads = read.count("num_key_value_heads", heads)
    latent = config.get("kv_lora_rank")
    if latent is None and heads % kv_heads:
        raise UnsupportedSource(
            f"{model}: num_attention_heads={heads} is no multiple of num_key_value_heads={kv_heads}; "
            "correct config.json"
        )
    if not config.get("head_dim") and hidden % heads:
        raise UnsupportedSource(
            f"{model}: hidden_size={hidden} is no multiple of num_attention_heads={heads} and head_dim is absent; "
            "add head_dim to config.json"
        )
    head_dim = read.count("head_dim", hidden // heads)
    if latent is not None:  # DeepSeek's head_dim is only the rotating part
        head_dim = read.count("qk_nope_head_dim") + read.count("qk_rope_head_dim")
    windows, other = _windows(config, read.count("num_hidden_layers"), model)
    headers = _headers(model)
    return AttentionShape(
        model_type=str(config.get("model_type")),
        hidden_size=hidden,
        num_hidden_layers=read.count("num_hidden_layers"),
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        source_head_dim=head_dim,
        v_head_dim=read.count("v_head_dim", head_dim) if latent is not None else head_dim,
        max_position_embeddings=read.count("max_position_embeddings", 2048),
        rms_norm_eps=float(config.get("rms_norm_eps") or 1e-6),
        windows=windows,
        other_layers=other,
        kv_lora_rank=None if latent is None else read.count("kv_lora_rank"),
        qk_rope_head_dim=None if latent is None else read.count("qk_rope_head_dim"),
        rope_types=_rope_types(config),
        features=_features(config, headers),
        tied=bool(config.get("tie_word_embeddings", False)),
        dtype=_dtype(config, headers),
        parameters=None if headers is None else sum(math.prod(h.shape) for h in headers.values()),
        weight_bytes=None if headers is None else sum(math.prod(h.shape) * h.dtype.itemsize for h in headers.values()),
    )


def read_config(model: str) -> dict[str, Any]:
    """The text model's config with its class defaults filled in. Raises BadCheckpoint when there is none."""
    from transformers import AutoConfig

    name, extra = locate(model)
    try:
        config = AutoConfig.from_pretrained(name, trust_remote_code=False, **extra)
        text = config.get_text_config()
    except Exception as error:  # transformers and the hub client raise a dozen unrelated classes here
        raise BadCheckpoint(
            f"{model}: no folder of a model, and no model of the hub that could be reached; transformers cannot read a "
            f"config.json there: {' '.join(str(error).split())[:200]}; check the name"
        ) from error
    content: dict[str, Any] = text.to_dict()
    for key in ("num_attention_heads", "num_key_value_heads", "hidden_size", "num_hidden_layers", "head_dim"):
        value = getattr(text, key, None)  # families that name them otherwise map the common names
        if content.get(key) is None and value is not None:
            content[key] = value
    if content.get("dtype") is None:
        content["dtype"] = str(config.dtype).removeprefix("torch.") if config.dtype is not None else None
    return content


def count_parameters(model: str) -> int:
    """Parameters of the model's class, built without memory; tied ones count once. Slower than reading headers."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    name, extra = locate(model)
    config = AutoConfig.from_pretrained(name, trust_remote_code=False, **extra).get_text_config()
    try:
        with torch.device("meta"):
            built = AutoModelForCausalLM.from_config(config, trust_remote_code=False)
    except Exception as error:  # as above
        raise UnsupportedSource(f"{model}: transformers has no causal language model for it: {error}") from error
    return sum(parameter.numel() for parameter in built.parameters())


@dataclass(frozen=True)
class _Reader:
    config: Mapping[str, Any]
    model: str

    def count(self, key: str, default: int | None = None) -> int:
        value = self.config.get(key)
        value = default if value is None else value
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise UnsupportedSource(
                f"{self.model}: {key}={value!r} in config.json ({self.config.get('model_type')}) must be a whole "
                "number of 1 or more; a model without attention of this kind has no cache to plan"
            )
        return value


def _windows(config: Mapping[str, Any], layers: int, model: str) -> tuple[tuple[int | None, ...], int]:
    window = config.get("sliding_window") or config.get("attention_chunk_size")
    kinds = config.get("layer_types")
    if kinds is None:
        used = window if config.get("use_sliding_window", True) else None
        return (used,) * layers, 0
    if any(kind in WINDOWED for kind in kinds) and not window:
        raise UnsupportedSource(
            f"{model}: layer_types name windows, but sliding_window={window!r}; correct config.json"
        )
    kept = tuple(window if kind in WINDOWED else None for kind in kinds if kind in (*WINDOWED, "full_attention"))
    if not kept:
        raise UnsupportedSource(
            f"{model}: no layer of layer_types is attention ({sorted(set(kinds))}); nothing to plan"
        )
    return kept, len(kinds) - len(kept)


def _ropes(config: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """The RoPE settings: one, or one per kind of layer where they differ."""
    rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
    parts = [part for part in rope.values() if isinstance(part, dict)] or [rope]
    return [part for number, part in enumerate(parts) if part not in parts[:number]]


def _rope_types(config: Mapping[str, Any]) -> tuple[str, ...]:
    return tuple(sorted({str(part.get("rope_type") or part.get("type") or "default") for part in _ropes(config)}))


def _features(config: Mapping[str, Any], headers: Mapping[str, Any] | None) -> tuple[str, ...]:
    kind = config.get("model_type")
    names = headers or {}
    bias = {part for part in "qkvo" if any(name.endswith(f"self_attn.{part}_proj.bias") for name in names)}
    if headers is None and config.get("attention_bias"):
        bias = set("qkvo")
    if headers is None and kind in QKV_BIAS:
        bias |= set("qkv")
    norm = any("q_norm" in n or "q_layernorm" in n for n in names) if headers is not None else kind in QK_NORM
    experts = next((config[key] for key in EXPERT_KEYS if config.get(key)), 0)
    partial = config.get("partial_rotary_factor") or (config.get("rope_parameters") or {}).get("partial_rotary_factor")
    found = {
        "QK-norm": norm,
        f"biases on {', '.join(sorted(bias))}": bool(bias),
        "sliding windows": any(window is not None for window in _windows(config, 1, "")[0]),
        "attention soft cap": config.get("attn_logit_softcapping"),
        "logit soft cap": config.get("final_logit_softcapping"),
        "RoPE that differs between layers": len(_ropes(config)) > 1,
        "partial rotary": partial not in (None, 1, 1.0),
        "mixture of experts": int(experts) > 1,
        "own softmax scale": config.get("query_pre_attn_scalar") or config.get("attention_multiplier"),
    }
    return tuple(name for name, there in found.items() if there)


def _dtype(config: Mapping[str, Any], headers: Mapping[str, Any] | None) -> str:
    if headers:
        name = next((n for n in headers if n.endswith("q_proj.weight")), next(iter(headers)))
        return str(headers[name].dtype).removeprefix("torch.")
    named = str(config.get("dtype") or "bfloat16").removeprefix("torch.")
    return named if named in ITEMSIZE else "bfloat16"


def _headers(model: str) -> Mapping[str, Any] | None:
    from mla_convert.source.safetensors_source import INDEX_FILE, SINGLE_FILE, SafetensorsWeights  # they load torch

    folder = Path(model).expanduser()
    if not any((folder / file).is_file() for file in (SINGLE_FILE, INDEX_FILE)):
        return None
    return SafetensorsWeights(folder).headers
