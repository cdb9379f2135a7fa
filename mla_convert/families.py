"""From a source's config and tensor names to a SourceSpec, or a refusal that names what is in the way."""

from __future__ import annotations

import logging
import math
import re
from dataclasses import dataclass
from typing import Any

import torch

from mla_convert.checkpoint import Checkpoint
from mla_convert.errors import UnsupportedSource
from mla_convert.family_table import (
    FAMILIES,
    IGNORED_TENSORS,
    REQUIRED_KEYS,
    ROPE_KEYS,
    SHAPES,
    TENSOR_REASONS,
    Family,
)
from mla_convert.frequencies import inverse_frequencies, read_rope_parameters

logger = logging.getLogger(__name__)

STORAGE_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


@dataclass(frozen=True, eq=False)
class SourceSpec:
    """What the conversion knows of the source, every field from config or headers.

    Sizes are counts of features; `source_head_dim` is the width of one head, not hidden_size / heads where
    the config gives head_dim. softmax_scale: source_head_dim^-0.5. rope_parameters: rope_type, rope_theta and
    the numbers of the type, from either spelling. inv_freq: fp64 [source_head_dim/2], radians per token.
    attention_scaling: amplitude on cos and sin. dtype: storage dtype of layer 0's q_proj.
    tie_word_embeddings: whether lm_head is the embedding in fact, not only by the config.
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


def layer_tensors(spec: SourceSpec, layer: int) -> dict[str, str]:
    """Return role -> tensor name of one layer: q, k, v, o, gate, up, down, input_norm, post_norm.

    Raises IndexError if there is no such layer.
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
    config = ckpt.config
    family = _family(config)
    _check_keys(config, family)
    sizes = _sizes(config, family)
    eps = config.get("rms_norm_eps", family.defaults["rms_norm_eps"])
    if not isinstance(eps, int | float) or isinstance(eps, bool) or not 0 < eps < math.inf:
        raise UnsupportedSource(f"config.json: rms_norm_eps={eps!r} must be a positive number; correct it.")
    rope = read_rope_parameters(config, sizes["max_position_embeddings"])
    tied = bool(config.get("tie_word_embeddings", family.defaults["tie_word_embeddings"]))
    _check_tensors(ckpt, family, sizes, tied)
    query = family.layer_tensors["q"].format(layer=0)
    return SourceSpec(
        family=config["model_type"],
        **sizes,
        rms_norm_eps=float(eps),
        hidden_act=config.get("hidden_act", family.fixed["hidden_act"].default),
        tie_word_embeddings=tied and _is_tied(ckpt, family),
        softmax_scale=sizes["source_head_dim"] ** -0.5,
        rope_parameters=rope,
        inv_freq=inverse_frequencies(rope, sizes["source_head_dim"]),
        attention_scaling=1.0,  # of every type in ROPE_TYPES
        dtype=ckpt.headers[query].dtype,
        config=dict(config),
    )


def _family(config: dict[str, Any]) -> Family:
    model_type = config.get("model_type")
    if model_type not in FAMILIES:
        raise UnsupportedSource(
            f"config.json: model_type={model_type!r} is not supported; supported: {', '.join(FAMILIES)}. "
            "Convert a model of one of these families."
        )
    return FAMILIES[str(model_type)]


def _check_keys(config: dict[str, Any], family: Family) -> None:
    """Refuse every config key whose value is not accounted for."""
    for key, rule in family.fixed.items():
        value = config.get(key, rule.default)
        if value not in rule.allowed:
            absent = "" if key in config else " (the model class's value, as the key is absent)"
            allowed = " or ".join(repr(choice) for choice in rule.allowed)
            raise UnsupportedSource(f"config.json: {key}={value!r}{absent}, not {allowed}: {rule.reason}.")
    layer_types = config.get("layer_types")
    if layer_types is not None and any(kind != "full_attention" for kind in layer_types):
        raise UnsupportedSource(
            f"config.json: layer_types={layer_types!r} must all be 'full_attention'; "
            "windows and other layer types are not supported yet."
        )
    known = {"model_type", "layer_types", *REQUIRED_KEYS, *ROPE_KEYS, *family.defaults, *family.fixed}
    for key, value in config.items():
        if key not in known | family.harmless and value is not None:
            raise UnsupportedSource(
                f"config.json: {key}={value!r} is not known for model_type {config['model_type']!r} and may "
                "change what the model computes; if its class ignores it, remove it from config.json."
            )


def _positive(config: dict[str, Any], key: str, default: int | None = None) -> int:
    value = config.get(key)
    value = default if value is None else value
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise UnsupportedSource(f"config.json: {key}={value!r} must be a positive integer; correct it.")
    return value


def _sizes(config: dict[str, Any], family: Family) -> dict[str, int]:
    """Return the integer fields of SourceSpec."""
    sizes = {key: _positive(config, key) for key in REQUIRED_KEYS}
    hidden, heads = sizes["hidden_size"], sizes["num_attention_heads"]
    kv_default = family.defaults["num_key_value_heads"] if "num_key_value_heads" not in config else None
    kv_heads = _positive(config, "num_key_value_heads", kv_default or heads)
    if heads % kv_heads:
        raise UnsupportedSource(
            f"config.json: num_attention_heads={heads} is no multiple of num_key_value_heads={kv_heads}; correct one."
        )
    if config.get("head_dim") is None and hidden % heads:
        raise UnsupportedSource(
            f"config.json: hidden_size={hidden} is no multiple of num_attention_heads={heads} and head_dim "
            "is absent; add head_dim."
        )
    head_dim = _positive(config, "head_dim", hidden // heads)
    if head_dim % 2:
        raise UnsupportedSource(f"config.json: head_dim={head_dim} is odd, so RoPE cannot pair it; correct it.")
    positions = _positive(config, "max_position_embeddings", family.defaults["max_position_embeddings"])
    return sizes | {
        "num_key_value_heads": kv_heads,
        "source_head_dim": head_dim,
        "max_position_embeddings": positions,
    }


def _check_tensors(ckpt: Checkpoint, family: Family, sizes: dict[str, int], tied: bool) -> None:
    """Compare tensor names, shapes and dtypes with the table; tick off stored buffers."""
    dims = sizes | {
        "queries": sizes["num_attention_heads"] * sizes["source_head_dim"],
        "keys": sizes["num_key_value_heads"] * sizes["source_head_dim"],
    }
    roles = {name: role for role, name in family.global_tensors.items()}
    for layer in range(sizes["num_hidden_layers"]):
        roles |= {template.format(layer=layer): role for role, template in family.layer_tensors.items()}
    for name, header in ckpt.headers.items():
        if name not in roles:
            if any(re.fullmatch(pattern, name) for pattern in IGNORED_TENSORS):
                ckpt.ignore(name)
                continue
            reason = next((why for pattern, why in TENSOR_REASONS.items() if re.search(pattern, name)), None)
            raise UnsupportedSource(
                f"{header.file}: tensor {name} {list(header.shape)} is in no table of the family with "
                f"{sizes['num_hidden_layers']} layers: "
                f"{reason or 'remove it from the checkpoint if the model class ignores it'}."
            )
        if header.dtype not in STORAGE_DTYPES:
            raise UnsupportedSource(
                f"{header.file}: {name} is stored as {header.dtype}; supported: float32, bfloat16, float16. "
                "Save the model as one of these."
            )
        expected = tuple(dims[dim] for dim in SHAPES[roles[name]])
        if header.shape != expected:
            raise UnsupportedSource(
                f"{header.file}: {name} has shape {list(header.shape)}, config.json implies {list(expected)} "
                f"({', '.join(SHAPES[roles[name]])}); correct config.json or download the weights again."
            )
    optional = {family.global_tensors["lm_head"]} if tied else set()
    missing = [name for name in roles if name not in ckpt.headers and name not in optional]
    if missing:
        raise UnsupportedSource(
            f"{ckpt.path} lacks {len(missing)} of the {len(roles)} tensors of config.json, first "
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
