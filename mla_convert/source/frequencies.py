"""RoPE settings of a source, from either spelling, and the frequencies they mean."""

from __future__ import annotations

import logging
import math
from typing import Any

import torch

from mla_convert.errors import UnsupportedSource

logger = logging.getLogger(__name__)

DEFAULT_THETA = 10000.0  # transformers' default_theta, for configs older than the rope_theta key
# rope_type -> the numbers it needs beside rope_theta
ROPE_TYPES: dict[str, tuple[str, ...]] = {
    "default": (),
    "linear": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"),
}

# Computed by transformers' own code in the native format.
NATIVE_ROPE_TYPES = ("dynamic", "yarn", "longrope")


def _number(rope: dict[str, Any], key: str) -> int | float:
    value = rope.get(key)
    if not isinstance(value, int | float) or isinstance(value, bool) or not 0 < value < math.inf:
        raise UnsupportedSource(
            f"config.json: RoPE setting {key}={value!r} must be a positive number for rope_type "
            f"{rope['rope_type']!r}; correct it."
        )
    return value


def _normalise(rope: dict[str, Any], theta: Any, positions: int) -> dict[str, Any]:
    """Return one spelling of RoPE settings as rope_type, rope_theta and the numbers of the type."""
    rope = {key: value for key, value in rope.items() if value is not None}
    kinds = {rope.pop(key) for key in ("type", "rope_type") if key in rope}
    if len(kinds) > 1:
        raise UnsupportedSource(f"config.json: RoPE types {sorted(map(str, kinds))} contradict; keep one.")
    rope["rope_type"] = kind = kinds.pop() if kinds else "default"
    if kind not in ROPE_TYPES:
        known = ", ".join((*ROPE_TYPES, *NATIVE_ROPE_TYPES))
        raise UnsupportedSource(
            f"config.json: rope_type={kind!r} is not supported; supported: {known}. "
            "If contexts stay within the original length, remove the scaling from config.json."
        )
    partial = rope.pop("partial_rotary_factor", 1)
    if partial != 1:
        raise UnsupportedSource(
            f"config.json: partial_rotary_factor={partial!r} in the RoPE settings, not 1: "
            "heads that rotate in part are not supported yet."
        )
    rope.setdefault("rope_theta", theta)
    if "original_max_position_embeddings" in ROPE_TYPES[kind]:
        rope.setdefault("original_max_position_embeddings", positions)
    else:
        rope.pop("original_max_position_embeddings", None)  # transformers ignores it for these types
    unknown = sorted(set(rope) - {"rope_type", "rope_theta", *ROPE_TYPES[kind]})
    if unknown:
        raise UnsupportedSource(
            f"config.json: RoPE setting {unknown[0]}={rope[unknown[0]]!r} is not known for rope_type "
            f"{kind!r}; remove it, or correct rope_type."
        )
    normal = {"rope_type": kind} | {key: _number(rope, key) for key in ("rope_theta", *ROPE_TYPES[kind])}
    if kind == "llama3" and normal["high_freq_factor"] <= normal["low_freq_factor"]:
        raise UnsupportedSource(
            f"config.json: high_freq_factor={normal['high_freq_factor']!r} must exceed "
            f"low_freq_factor={normal['low_freq_factor']!r}; correct one."
        )
    return normal


def read_rope(
    config: dict[str, Any], max_position_embeddings: int, config_class: Any, partial_rotary: bool
) -> tuple[dict[str, Any], str | None]:
    """`read_rope_parameters`, or, where only the native format can hold the rotation, {} and why.

    partial_rotary: whether the family's class rotates a part of a head only. Raises UnsupportedSource as
    `read_rope_parameters` does, and for types that transformers does not know.
    """
    given = [config[key] for key in ("rope_parameters", "rope_scaling") if isinstance(config.get(key), dict)]
    if any(isinstance(value, dict) for rope in given for value in rope.values()):
        return {}, "its RoPE settings differ by layer type"
    if not isinstance(config_class.default_theta, int | float):
        return {}, "its RoPE settings differ by layer type"
    kinds = {str(rope[key]) for rope in given for key in ("type", "rope_type") if rope.get(key) is not None}
    if len(kinds) == 1 and kinds <= set(NATIVE_ROPE_TYPES):
        if len(given) == 2 and given[0] != given[1]:
            raise UnsupportedSource(
                f"config.json: rope_parameters say {given[0]} but rope_scaling says {given[1]}; keep one."
            )
        return {}, f"rope_type={kinds.pop()!r} is not supported; supported: {', '.join(ROPE_TYPES)}"
    partial = [config.get("partial_rotary_factor"), *(rope.get("partial_rotary_factor") for rope in given)]
    if partial_rotary and any(factor not in (None, 1) for factor in partial):
        return {}, "only a part of every head rotates"
    return read_rope_parameters(config, max_position_embeddings, float(config_class.default_theta)), None


def read_rope_parameters(
    config: dict[str, Any], max_position_embeddings: int, default_theta: float = DEFAULT_THETA
) -> dict[str, Any]:
    """Return rope_type, rope_theta and the numbers of the type, from rope_parameters or the older spelling.

    The older spelling is rope_theta and rope_scaling; default_theta is the model class's. Raises UnsupportedSource
    for types other than default, linear and llama3, and if both spellings are present and differ.
    """
    old, new, theta = (config.get(key) for key in ("rope_scaling", "rope_parameters", "rope_theta"))
    for key, value in (("rope_scaling", old), ("rope_parameters", new)):
        if value is not None and not isinstance(value, dict):
            raise UnsupportedSource(f"config.json: {key}={value!r} must be an object or null; correct it.")
    if theta is None and "rope_theta" not in (new or old or {}):
        logger.warning("config.json gives no rope_theta; the model class's default %g is used", default_theta)
    fallback = default_theta if theta is None else theta
    readings = [_normalise(rope, fallback, max_position_embeddings) for rope in (new, old) if rope]
    if new and theta is not None:
        readings.append(
            readings[0] | {"rope_theta": _number({"rope_type": "default", "rope_theta": theta}, "rope_theta")}
        )
    if not readings:
        readings = [_normalise({}, fallback, max_position_embeddings)]
    if any(reading != readings[0] for reading in readings):
        other = next(reading for reading in readings if reading != readings[0])
        raise UnsupportedSource(
            f"config.json: rope_parameters say {readings[0]} but rope_theta and rope_scaling say {other}; keep one."
        )
    return readings[0]


def longrope_frequencies(factors: torch.Tensor, rope_theta: float) -> torch.Tensor:
    """Return fp64 [slots] radians per token of a longrope config's factor list [slots]; its own inverse.

    transformers rounds theta^(2s/p) to float32 before it applies a factor. Taking the rounded powers here makes the
    factors of a wanted list cancel that rounding (of up to 2e-7, a thousandth of a radian at 4096 tokens).
    """
    width = 2 * len(factors)
    powers = rope_theta ** (torch.arange(0, width, 2, dtype=torch.int64).float() / width)
    return 1 / (factors.double() * powers.double())


def inverse_frequencies(rope: dict[str, Any], source_head_dim: int) -> torch.Tensor:
    """Return fp64 [source_head_dim/2] radians per token, fastest first.

    Formulas of transformers' modeling_rope_utils (default, linear, llama3), there in fp32. llama3:
    wavelengths beyond original/low_freq_factor are stretched by factor, those below original/high_freq_factor
    kept, between them a linear blend in original/wavelength.
    """
    exponents = torch.arange(0, source_head_dim, 2, dtype=torch.float64) / source_head_dim
    plain: torch.Tensor = float(rope["rope_theta"]) ** -exponents
    if rope["rope_type"] == "default":
        return plain
    stretched: torch.Tensor = plain / rope["factor"]
    if rope["rope_type"] == "linear":
        return stretched
    turns = rope["original_max_position_embeddings"] * plain / (2 * math.pi)
    low, high = rope["low_freq_factor"], rope["high_freq_factor"]
    blend = (turns - low) / (high - low)
    between = (1 - blend) * stretched + blend * plain
    return torch.where(turns < low, stretched, torch.where(turns > high, plain, between))
