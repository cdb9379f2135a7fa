"""From a source's config and tensor names to a SourceSpec, or a refusal that names what is in the way."""

from __future__ import annotations

import dataclasses
import logging
import math
import re
from dataclasses import dataclass
from typing import Any

import torch
from transformers import AutoConfig, PretrainedConfig

from mla_convert.errors import UnsupportedSource
from mla_convert.source.checkpoint import Checkpoint
from mla_convert.source.experts import stored_tensors
from mla_convert.source.family_table import (
    FAMILIES,
    FIXED,
    HARMLESS,
    IGNORED_TENSORS,
    NOT_OF_THE_CLASS,
    REQUIRED_KEYS,
    ROPE_KEYS,
    STOCK_WINDOW,
    TENSOR_REASONS,
    Family,
    Fixed,
)
from mla_convert.source.features import LayerFacts, build_config, build_skeleton, layer_facts
from mla_convert.source.frequencies import inverse_frequencies, read_rope

logger = logging.getLogger(__name__)

_BIAS_COST = "its attention has biases, which most engines do not load there, and which take a query latent"
STORAGE_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


@dataclass(frozen=True, eq=False)
class SourceSpec:
    """What the conversion knows of the source, every field from config or headers.

    Sizes are counts of features; `source_head_dim` is the width of one head, not hidden_size / heads where
    the config gives head_dim. softmax_scale, inv_freq (fp64 [pairs], radians per token) and attention_scaling
    (amplitude on cos and sin) are those of the first layer that rotates; `layers` has every layer's.
    rope_parameters: rope_type, rope_theta and the numbers of the type, from either spelling, where the stock format
    can say them. dtype: storage dtype of layer 0's q_proj. tie_word_embeddings: whether lm_head is the embedding
    in fact, not only by the config. stock_obstacle: why the stock format cannot hold the source; None where it can.
    stock_cost: why `--format auto` prefers the native format although stock can hold the source; None: it does not.
    biased: whether projections of the attention carry biases.
    keys_values: whether the latent is fed with keys and values, as they are not linear in the attention's input.
    """

    family: str
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    source_head_dim: int
    vocab_size: int
    max_position_embeddings: int
    rms_norm_eps: float
    hidden_act: str
    tie_word_embeddings: bool
    softmax_scale: float
    rope_parameters: dict[str, Any]
    inv_freq: torch.Tensor
    attention_scaling: float
    dtype: torch.dtype
    config: dict[str, Any]
    layers: tuple[LayerFacts, ...]
    stock_obstacle: str | None
    stock_cost: str | None
    biased: bool
    keys_values: bool

    @property
    def latent_inputs(self) -> int:
        """Width of what the latent is computed from: the attention's input, or all keys and values of a token."""
        return 2 * self.num_key_value_heads * self.source_head_dim if self.keys_values else self.hidden_size

    @property
    def pairs(self) -> int:
        """Rotating pairs of a head, in layers that rotate."""
        return max(facts.pairs for facts in self.layers)


def layer_tensors(spec: SourceSpec, layer: int) -> dict[str, str]:
    """Return role -> tensor name of one layer: q, k, v, o, gate, up, down, input_norm, post_norm.

    Of families that the stock format can hold. Raises IndexError if there is no such layer.
    """
    if not 0 <= layer < spec.num_hidden_layers:
        raise IndexError(f"layer {layer} of {spec.num_hidden_layers}")
    templates = FAMILIES[spec.family].layer_tensors
    return {role: template.format(layer=layer) for role, template in templates.items()}


def global_tensors(spec: SourceSpec) -> dict[str, str]:
    """Return role -> tensor name outside the layers: embed, final_norm, and lm_head unless it is tied."""
    names = dict(FAMILIES[spec.family].global_tensors)
    if spec.tie_word_embeddings:
        del names["lm_head"]
    return names


def read_spec(ckpt: Checkpoint) -> SourceSpec:
    """Return the SourceSpec of `ckpt`, ticking off its redundant tensors (stored buffers, a tied lm_head).

    Reads headers only, except for a tied checkpoint that also stores lm_head: the two are compared.
    Raises UnsupportedSource naming the model_type, config key or tensor that is not accounted for, its value,
    and the remedy. A key that is null is a feature that is off, and is accepted.
    """
    raw = ckpt.config
    family = _family(raw)
    fields = type(AutoConfig.for_model(raw["model_type"]))
    _check_keys(raw, family, fields)
    sizes = _sizes(raw, fields)
    rope, rope_obstacle = read_rope(raw, sizes["max_position_embeddings"], fields, family.partial_rotary)
    eps = raw.get("rms_norm_eps", getattr(fields, "rms_norm_eps", 1.0))
    if not isinstance(eps, int | float) or isinstance(eps, bool) or not 0 < eps < math.inf:
        raise UnsupportedSource(f"config.json: rms_norm_eps={eps!r} must be a positive number; correct it.")
    config = build_config(raw)
    skeleton = build_skeleton(config)
    expected = stored_tensors(family, skeleton.state_dict(), ckpt.headers)
    tied = bool(config.tie_word_embeddings)
    _check_tensors(ckpt, family, expected, sizes["num_hidden_layers"], tied)
    layers = layer_facts(skeleton, raw["model_type"])
    if rope_obstacle is None:
        exact = inverse_frequencies(rope, sizes["source_head_dim"])
        layers = tuple(dataclasses.replace(facts, inv_freq=exact) if facts.pairs else facts for facts in layers)
    rotating = next((facts for facts in layers if facts.pairs), layers[0])
    attention = skeleton.model.layers[0].self_attn
    bias = any(name.endswith((".k_proj.bias", ".v_proj.bias")) for name in expected)
    biased = any(re.search(r"\.self_attn\.\w*proj\.bias$", name) for name in expected)
    return SourceSpec(
        family=raw["model_type"],
        **sizes | {"source_head_dim": attention.head_dim},
        rms_norm_eps=float(eps),
        hidden_act=getattr(config, "hidden_act", None) or config.hidden_activation,
        tie_word_embeddings=tied and _is_tied(ckpt, family),
        softmax_scale=rotating.softmax_scale,
        rope_parameters=rope,
        inv_freq=rotating.inv_freq,
        attention_scaling=rotating.attention_scaling,
        dtype=next(h.dtype for name, h in ckpt.headers.items() if "layers.0.self_attn." in name and "proj" in name),
        config=dict(raw),
        layers=layers,
        stock_obstacle=_stock_obstacle(raw, config, family, layers) or rope_obstacle,
        stock_cost=_BIAS_COST if biased else None,
        biased=biased,
        keys_values=family.qk_norm is not None or (bias and any(f.softcap or f.sinks for f in layers)),
    )


def _family(config: dict[str, Any]) -> Family:
    model_type = config.get("model_type")
    if model_type not in FAMILIES:
        raise UnsupportedSource(
            f"config.json: model_type={model_type!r} is not supported; supported: {', '.join(FAMILIES)}. "
            "Convert a model of one of these families."
        )
    return FAMILIES[str(model_type)]


def _check_keys(raw: dict[str, Any], family: Family, config_class: type[PretrainedConfig]) -> None:
    """Refuse every config key whose value is not accounted for."""
    fields = {field.name for field in dataclasses.fields(config_class)}
    fields |= {*config_class.attribute_map, *config_class.attribute_map.values()}
    strangers = {key: rule for key, rule in NOT_OF_THE_CLASS.items() if key not in fields | family.legacy}
    named = Fixed(([family.architecture], None), f"only {family.architecture} is converted; give the language model")
    for key, rule in {"architectures": named, **FIXED, **strangers, **family.fixed}.items():
        if (fault := _fault(raw, config_class, key, rule)) is not None:
            raise UnsupportedSource(fault)
    known = {"model_type", "layer_types", *REQUIRED_KEYS, *ROPE_KEYS, *FIXED, *strangers, *family.fixed, "head_dim"}
    for key, value in raw.items():
        if key not in known | fields | family.legacy | HARMLESS and value is not None:
            raise UnsupportedSource(
                f"config.json: {key}={value!r} is not known for model_type {raw['model_type']!r} and may "
                "change what the model computes; if its class ignores it, remove it from config.json."
            )
    layer_types = raw.get("layer_types")
    if "layer_types" not in fields and any(kind != "full_attention" for kind in layer_types or ()):
        raise UnsupportedSource(
            f"config.json: layer_types={layer_types!r} must all be 'full_attention': the model class of this family "
            "ignores them."
        )


def _fault(raw: dict[str, Any], config: Any, key: str, rule: Fixed) -> str | None:
    """What is wrong with `key`; where it is absent the value of the config (class) counts."""
    value = raw[key] if key in raw else getattr(config, key, None)
    if value in rule.allowed:
        return None
    absent = "" if key in raw else " (the model class's value, as the key is absent)"
    allowed = " or ".join(repr(choice) for choice in rule.allowed)
    return f"config.json: {key}={value!r}{absent}, not {allowed}: {rule.reason}."


def _stock_obstacle(raw: dict[str, Any], config: Any, family: Family, layers: tuple[LayerFacts, ...]) -> str | None:
    """The first thing that a stock DeepSeek-V3 class cannot hold."""
    if isinstance(family.stock, str):
        return family.stock
    faults = [_fault(raw, config, key, rule) for key, rule in family.stock.items()]
    window = STOCK_WINDOW if any(facts.window for facts in layers) else None
    return next((fault for fault in faults if fault is not None), window)


def _positive(config: dict[str, Any], key: str, default: int | None = None) -> int:
    value = config.get(key)
    value = default if value is None else value
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise UnsupportedSource(f"config.json: {key}={value!r} must be a positive integer; correct it.")
    return value


def _sizes(config: dict[str, Any], defaults: Any) -> dict[str, int]:
    """Return the integer fields of SourceSpec; `defaults` is the config class."""
    sizes = {key: _positive(config, key) for key in REQUIRED_KEYS}
    hidden, heads = sizes["hidden_size"], sizes["num_attention_heads"]
    kv_default = defaults.num_key_value_heads if "num_key_value_heads" not in config else None
    kv_heads = _positive(config, "num_key_value_heads", kv_default or heads)
    if heads % kv_heads:
        raise UnsupportedSource(
            f"config.json: num_attention_heads={heads} is no multiple of num_key_value_heads={kv_heads}; correct one."
        )
    head_default = getattr(defaults, "head_dim", None) if "head_dim" not in config else None
    if config.get("head_dim") is None and head_default is None and hidden % heads:
        raise UnsupportedSource(
            f"config.json: hidden_size={hidden} is no multiple of num_attention_heads={heads} and head_dim "
            "is absent; add head_dim."
        )
    head_dim = _positive(config, "head_dim", head_default or hidden // heads)
    if head_dim % 2:
        raise UnsupportedSource(f"config.json: head_dim={head_dim} is odd, so RoPE cannot pair it; correct it.")
    positions = _positive(config, "max_position_embeddings", defaults.max_position_embeddings)
    return sizes | {
        "num_key_value_heads": kv_heads,
        "source_head_dim": head_dim,
        "max_position_embeddings": positions,
    }


def _check_tensors(
    ckpt: Checkpoint, family: Family, expected: dict[str, tuple[int, ...]], layers: int, tied: bool
) -> None:
    """Compare tensor names, shapes and dtypes with those of the family's class; tick off stored buffers."""
    for name, header in ckpt.headers.items():
        if name not in expected:
            if any(re.fullmatch(pattern, name) for pattern in IGNORED_TENSORS):
                ckpt.ignore(name)
                continue
            reason = next((why for pattern, why in TENSOR_REASONS.items() if re.search(pattern, name)), None)
            raise UnsupportedSource(
                f"{header.file}: tensor {name} {list(header.shape)} is in no table of the family with "
                f"{layers} layers: "
                f"{reason or 'remove it from the checkpoint if the model class ignores it'}."
            )
        if header.dtype not in STORAGE_DTYPES:
            raise UnsupportedSource(
                f"{header.file}: {name} is stored as {header.dtype}; supported: float32, bfloat16, float16. "
                "Save the model as one of these."
            )
        if header.shape != expected[name]:
            raise UnsupportedSource(
                f"{header.file}: {name} has shape {list(header.shape)}, config.json implies {list(expected[name])}; "
                "correct config.json or download the weights again."
            )
    optional = {family.global_tensors["lm_head"]} if tied else set()
    missing = [name for name in expected if name not in ckpt.headers and name not in optional]
    if missing:
        raise UnsupportedSource(
            f"{ckpt.path} lacks {len(missing)} of the {len(expected)} tensors of config.json, first "
            f"{missing[0]}; correct config.json or download the weights again."
        )


def _is_tied(ckpt: Checkpoint, family: Family) -> bool:
    """Say whether lm_head is tied as the config says; transformers does not tie a stored one that differs."""
    head, embed = family.global_tensors["lm_head"], family.global_tensors["embed"]
    if head not in ckpt.headers:
        return True
    if torch.equal(ckpt.peek(head), ckpt.peek(embed)):
        ckpt.ignore(head)
        return True
    logger.warning("config.json ties %s to %s, but the stored ones differ: treated as untied", head, embed)
    return False
