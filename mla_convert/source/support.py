"""Which feature of which family ends up in which format, as a table for the README, from the family table."""

import dataclasses

from transformers import AutoConfig

from mla_convert.source.family_table import FAMILIES, Family

FEATURES = (
    "plain",
    "biases",
    "QK-norm",
    "linear, llama3 RoPE",
    "yarn, dynamic, longrope",
    "partial RoPE",
    "NoPE layers",
    "windows",
    "soft cap",
    "sinks",
    "experts",
)
BIASES = ("attention_bias", "qkv_bias", "use_bias")
ALWAYS_BIASED = ("qwen2",)  # by its class, without a config field


def support(name: str) -> dict[str, str]:
    """Feature -> format that a model of family `name` with it is written in by --format auto: stock or native.

    "native (stock)": --format stock can hold it too, at a cost. "refused": the family's class has no such feature, so
    a checkpoint or config that claims it is refused by name.
    """
    family: Family = FAMILIES[name]
    fields = {field.name for field in dataclasses.fields(type(AutoConfig.for_model(name)))}
    stock = not isinstance(family.stock, str)
    biased = "native (stock)" if stock else "native"
    plain = "stock" if stock else "native"
    if name in ALWAYS_BIASED:
        plain = biased
    has = {
        "biases": name in ALWAYS_BIASED or any(key in fields for key in BIASES),
        "QK-norm": family.qk_norm is not None,
        "yarn, dynamic, longrope": True,
        "partial RoPE": family.partial_rotary,
        "NoPE layers": family.nope is not None,
        "windows": "sliding_window" in fields,
        "soft cap": family.softcap is not None,
        "sinks": family.sinks,
        "experts": family.has_experts,
    }
    found = {feature: "native" if present else "refused" for feature, present in has.items()}
    if has["biases"]:
        found["biases"] = biased
    return {feature: {"plain": plain, "linear, llama3 RoPE": plain, **found}[feature] for feature in FEATURES}


def support_table() -> str:
    """The table in Markdown."""
    lines = [f"| model_type | {' | '.join(FEATURES)} |", f"|---|{'---|' * len(FEATURES)}"]
    for name in FAMILIES:
        cells = support(name)
        lines.append(f"| `{name}` | {' | '.join(cells[feature] for feature in FEATURES)} |")
    return "\n".join(lines) + "\n"
