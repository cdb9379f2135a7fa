"""Cache sizes as published for multi-head latent attention, from the formulas the tool uses."""

from typing import Any

import pytest

from mla_convert.cache_size import layer_numbers

HEADS, WIDTH, FP16 = 128, 128, 2
KINDS: dict[str, tuple[dict[str, Any], int, float]] = {
    # kind: config, bytes per token and layer, MiB for 4,096 tokens
    "MHA": ({"num_attention_heads": HEADS, "num_key_value_heads": HEADS, "head_dim": WIDTH}, 65_536, 256),
    "MQA": ({"num_attention_heads": HEADS, "num_key_value_heads": 1, "head_dim": WIDTH}, 512, 2),
    "GQA": ({"num_attention_heads": HEADS, "num_key_value_heads": 8, "head_dim": WIDTH}, 4_096, 16),
    "MLA": ({"kv_lora_rank": 512, "qk_rope_head_dim": 64, "num_attention_heads": HEADS}, 1_152, 4.5),
}


@pytest.mark.parametrize("kind", KINDS)
def test_bytes_per_token_and_layer(kind: str) -> None:
    config, expected, mebibytes = KINDS[kind]
    per_token = layer_numbers({"num_hidden_layers": 1, **config})[0] * FP16
    assert per_token == expected
    assert per_token * 4096 / 2**20 == mebibytes


def test_mla_saves_98_percent_of_mha() -> None:
    mla, mha = (layer_numbers({"num_hidden_layers": 1, **KINDS[kind][0]})[0] for kind in ("MLA", "MHA"))
    saved = 1 - mla / mha
    assert round(100 * saved, 2) == 98.24
