"""With every pair kept and full rank the conversion changes nothing: converted == source in fp64, on logits.

The converted model is transformers' own DeepseekV3ForCausalLM, its norms and rotations taken in fp64.
"""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from fp64 import attention_of, logits, source_fp64, stock_fp64
from tiny import LLAMA3_ROPE, tiny_model

from mla_convert.conversion.assemble import assemble
from mla_convert.conversion.rope import ladder_plan, lossless_plan
from mla_convert.conversion.sizes import Size, full_rank
from mla_convert.source.checkpoint import Checkpoint
from mla_convert.source.families import SourceSpec, read_spec

BOUND = 1e-12  # relative to max |logit|; measured at most 3.5e-14 over the shapes below, controls at least 5.8e-4
IDS = torch.randint(0, 250, (2, 90), generator=torch.Generator().manual_seed(5))

SHAPES: list[tuple[str, dict[str, Any]]] = [
    ("llama", {"num_key_value_heads": 1, "num_attention_heads": 3}),
    ("llama", {"num_key_value_heads": 2}),
    ("mistral", {"num_key_value_heads": 3, "num_attention_heads": 9, "tie_word_embeddings": True}),
    ("llama", {"num_key_value_heads": 8, "num_attention_heads": 8, "head_dim": 4}),
    ("mistral", {"num_key_value_heads": 2, "num_attention_heads": 14, "head_dim": 6, "rms_norm_eps": 1e-6}),
    ("llama", {"rope_parameters": LLAMA3_ROPE, "tie_word_embeddings": True}),
    ("llama", {"rope_parameters": {"rope_type": "linear", "rope_theta": 5000.0, "factor": 4.0}}),
]


def load(tmp_path: Path, family: str, config: dict[str, Any]) -> tuple[Any, SourceSpec]:
    folder = tiny_model(tmp_path / "source", family, dtype=torch.float32, **config)
    spec = read_spec(Checkpoint.open(folder))
    return source_fp64(folder, spec), spec


def lossless(source: Any, spec: SourceSpec) -> tuple[list[Any], Any]:
    plan = lossless_plan(spec)
    size = Size(spec.num_key_value_heads * spec.source_head_dim, plan)
    layers = [
        assemble(attention_of(source, i, spec), None, spec, size, "weighted")[0] for i in range(spec.num_hidden_layers)
    ]
    return layers, plan


def difference(source: Any, converted: Any) -> float:
    want = logits(source, IDS)
    return ((logits(converted, IDS) - want).abs().max() / want.abs().max()).item()


@pytest.mark.parametrize(("family", "config"), SHAPES)
def test_lossless_is_the_source(tmp_path: Path, family: str, config: dict[str, Any]) -> None:
    source, spec = load(tmp_path, family, config)
    layers, plan = lossless(source, spec)
    assert layers[0].kv_lora_rank + plan.qk_rope_head_dim == 2 * spec.num_key_value_heads * spec.source_head_dim
    assert difference(source, stock_fp64(source, spec, layers, plan)) <= BOUND


def test_one_kv_head_is_the_source_on_the_ladder_too(tmp_path: Path) -> None:
    """With one KV head the ladder of stride 1 keeps every pair, and plain RoPE is enough."""
    source, spec = load(tmp_path, "llama", {"num_key_value_heads": 1, "num_attention_heads": 3})
    plan = ladder_plan(spec, spec.source_head_dim, 1)
    size = Size(full_rank(spec, spec.source_head_dim), plan)
    layers = [assemble(attention_of(source, i, spec), None, spec, size, "svd")[0] for i in range(4)]
    assert plan.rope_parameters == spec.rope_parameters
    assert difference(source, stock_fp64(source, spec, layers, plan)) <= BOUND


@pytest.mark.parametrize(
    ("damage", "at_least"),
    [
        ("half_split_rows", 1e-2),
        ("norm_not_neutralised", 1e-2),
        ("one_number_less", 1e-3),
        ("source_eps", 1e-6),
    ],
)
def test_negative_controls_fail(tmp_path: Path, damage: str, at_least: float) -> None:
    source, spec = load(tmp_path, "llama", {"num_key_value_heads": 2})
    layers, plan = lossless(source, spec)
    options: dict[str, Any] = {}
    if damage == "half_split_rows":
        options["rope_interleave"] = False
    elif damage == "norm_not_neutralised":
        options["scaled_rms"] = 1.0
    elif damage == "source_eps":
        options["rms_norm_eps"] = spec.rms_norm_eps  # residual stream rescaled for 1e-6, another eps written
    elif damage == "one_number_less":
        layers = [
            replace(layer, W_DKV=layer.W_DKV[1:], W_UK=layer.W_UK[..., 1:], W_UV=layer.W_UV[..., 1:])
            for layer in layers
        ]
    assert difference(source, stock_fp64(source, spec, layers, plan, **options)) > at_least
