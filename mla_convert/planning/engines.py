"""The serving checklist: per engine and question a verdict with its reason, from the facts in engines.yaml."""

from __future__ import annotations

from dataclasses import dataclass
from importlib import resources
from typing import Any

import yaml

from mla_convert.planning.cache_plan import BYTES
from mla_convert.source.attention_shape import AttentionShape

YES, NO, PADDED, UNKNOWN = "yes", "no", "padded", "not known"
TRANSACTION = 128  # bytes a GPU reads at a time
# What the stock DeepSeek-V3 format cannot say, and why; names begin as in AttentionShape.features.
NOT_STOCK = {
    "QK-norm": "is not linear in the latent",
    "sliding windows": "the DeepSeek classes attend to everything",
    "attention soft cap": "the DeepSeek classes have none",
    "logit soft cap": "the DeepSeek classes have none",
    "RoPE that differs": "the DeepSeek classes have one rotation for all layers",
    "biases": "--format stock puts those of queries into a query latent with a bias, which few engines load",
}


@dataclass(frozen=True)
class Verdict:
    """One line: of which engine and version, `known` ran or read; verdict yes, no, padded or not known, and why."""

    engine: str
    version: str
    known: str
    question: str
    verdict: str
    detail: str


def facts() -> list[dict[str, Any]]:
    """The rows of engines.yaml."""
    text = resources.files("mla_convert.planning").joinpath("engines.yaml").read_text(encoding="utf-8")
    rows: list[dict[str, Any]] = yaml.safe_load(text)
    return rows


def checklist(shape: AttentionShape, size: tuple[int, int], cache_dtype: str, tp: tuple[int, ...]) -> list[Verdict]:
    """Every question for every engine, for a conversion to `size` = (kv_lora_rank, qk_rope_head_dim)."""
    lines = []
    for row in facts():
        answers = {
            "MLA kernel for this shape": _kernel(row, size),
            "prefill widths": _prefill(row, shape, size),
            "paged blocks aligned": _blocks(row, size, cache_dtype),
            "RoPE as the source": _rope(row, shape),
            "fp8 latent": (row["fp8"]["verdict"], row["fp8"]["why"]),
            "biases": _biases(row, shape),
            "latent norm": _norm(row, shape),
            "tensor parallel": _parallel(row, shape, tp),
        }
        for question, (verdict, detail) in answers.items():
            lines.append(Verdict(row["name"], str(row["version"]), row["known"], question, verdict, detail))
    return lines


def stock_obstacles(shape: AttentionShape) -> list[str]:
    """What of the source the stock format cannot hold, one sentence each; empty: everything."""
    found = [
        f"{feature}: {why}" for feature in shape.features for name, why in NOT_STOCK.items() if feature.startswith(name)
    ]
    if "partial rotary" in shape.features:
        found.append("partial rotary: not written yet")
    return found


def biases_lost() -> dict[str, str]:
    """Engine -> what it does with the biases of a stock checkpoint, for those that load none."""
    return {row["name"]: row["biases"]["without"] for row in facts() if not row["biases"]["loaded"]}


def padded_rank(row: dict[str, Any], size: tuple[int, int]) -> int | None:
    """The least kv_lora_rank >= size's that the engine accepts with this qk_rope_head_dim; None: none."""
    rank, rope = size
    if "latent_sizes" in row:
        accepted = [r for r, p in row["latent_sizes"] if p == rope]
    elif "latents" in row:
        accepted = [total - rope for total in row["latents"]]
    else:
        return rank
    return min((r for r in accepted if r >= rank), default=None)


def _kernel(row: dict[str, Any], size: tuple[int, int]) -> tuple[str, str]:
    rank, rope = size
    note = f"; {row['latents_note']}" if "latents_note" in row else ""
    found = padded_rank(row, size)
    sizes = [f"{r} + {p}" for r, p in row.get("latent_sizes", [])]
    accepted = f"sums {', '.join(map(str, row['latents']))}" if "latents" in row else ", ".join(sizes)
    if found is None:
        return NO, f"{rank} + {rope} fits in none of {accepted}{note}"
    if found > rank:
        more = (found + rope) / (rank + rope) - 1
        return PADDED, f"{accepted}: zero rows to {found} + {rope} make the cache {more:.0%} larger{note}"
    return YES, (f"{rank} + {rope}" if accepted else "any size") + note


def _prefill(row: dict[str, Any], shape: AttentionShape, size: tuple[int, int]) -> tuple[str, str]:
    nope, rope, value = shape.unrotated_width, size[1], shape.v_head_dim
    if "prefill" not in row:
        return YES, f"qk {nope} + {rope}, v {value}"
    if [nope, rope, value] in row["prefill"]:
        return YES, f"qk {nope} + {rope}, v {value}, {row['prefill_note']}"
    fits = [(n, p, v) for n, p, v in row["prefill"] if n >= nope and p == rope and v >= value]
    if not fits:
        return NO, f"qk {nope} + {rope}, v {value} fits in none of {row['prefill']} {row['prefill_note']}"
    n, p, v = min(fits)
    return PADDED, f"zero rows to qk {n} + {p}, v {v} {row['prefill_note']}; the cache stays as it is"


def _blocks(row: dict[str, Any], size: tuple[int, int], cache_dtype: str) -> tuple[str, str]:
    if not row["blocks"]:
        return YES, "the cache is not paged"
    per_token = sum(size) * BYTES[cache_dtype]
    bad = [block for block in row["blocks"] if block * per_token % TRANSACTION]
    text = f"{per_token:,} B per token and layer"
    if per_token % TRANSACTION == 0:
        return YES, f"{text}, a multiple of {TRANSACTION}"
    if not bad:
        return YES, f"{text}; blocks of {', '.join(map(str, row['blocks']))} are multiples of {TRANSACTION}"
    return NO, f"{text}; blocks of {', '.join(map(str, bad))} tokens end inside a {TRANSACTION}-byte transaction"


def _rope(row: dict[str, Any], shape: AttentionShape) -> tuple[str, str]:
    for kind in shape.rope_types:
        said = row["rope"].get(kind)
        if said is None:
            return UNKNOWN, f"{kind}: not known for this engine"
        if said != YES:
            return NO, f"{kind}: {said}"
    note = "; ".join(row["rope"][f"{kind}_note"] for kind in shape.rope_types if f"{kind}_note" in row["rope"])
    return YES, f"{', '.join(shape.rope_types)}, on the rotating slice" + (f"; {note}" if note else "")


def _biases(row: dict[str, Any], shape: AttentionShape) -> tuple[str, str]:
    there = next((feature for feature in shape.features if feature.startswith("biases")), None)
    if there is None:
        return YES, "the model has none"
    if row["biases"]["loaded"]:
        return UNKNOWN, f"{there}; slots: {', '.join(row['biases']['loaded'])}; {row['biases']['without']}"
    return NO, f"{there}: {row['biases']['without']}"


def _norm(row: dict[str, Any], shape: AttentionShape) -> tuple[str, str]:
    scaled = (
        "" if abs(shape.rms_norm_eps - 1e-6) < 1e-12 else f" (the source's {shape.rms_norm_eps:g} is scaled into it)"
    )
    return YES, f"made linear by small rows; eps {row['norm_eps']}, written as 1e-6{scaled}; not in float16"


def _parallel(row: dict[str, Any], shape: AttentionShape, tp: tuple[int, ...]) -> tuple[str, str]:
    if not row["parallel"]:
        return UNKNOWN, "not known for this engine"
    legal = [size for size in tp if shape.num_attention_heads % size == 0]
    illegal = [size for size in tp if size not in legal]
    text = f"tp {', '.join(map(str, legal))}; the latent is whole on every rank"
    if illegal:
        return NO, f"{text}; not {', '.join(map(str, illegal))} ({shape.num_attention_heads} heads)"
    return YES, text
