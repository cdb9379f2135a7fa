"""Cache sizes as published for multi-head latent attention, by the formulas the tool uses; our own published curves."""

import json
from pathlib import Path
from typing import Any

import pytest

from mla_convert.evaluation.suite_report import markdown_table, merged, read_result
from mla_convert.planning.nats import Lost, in_nats
from mla_convert.source.cache_size import layer_numbers

RESULTS = Path(__file__).parent.parent / "eval" / "results"
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


@pytest.mark.parametrize("method", ["weighted", "pca"])
def test_the_published_curve_is_predicted_from_four_of_its_sizes(method: str) -> None:
    """SmolLM2, ten measured sizes: off by 10 % (weighted) and 13 % (pca) at most.

    Control: in proportion to the prediction, by 77 % and 93 %.
    """
    curve = json.loads((RESULTS / f"smollm2_135m_curve_{method}.json").read_text())["curve"]
    points = [(Lost(p["rope"], p["predicted"] - p["rope"]), p["measured"]) for p in curve["points"]]
    assert [p["numbers"] for p in curve["points"]] == list(range(64, 384, 32))
    four = [points[place] for place in (0, 3, 6, 9)]
    off = [abs(in_nats(lost, four) / nats - 1) for lost, nats in points]
    assert max(off) < 0.25, off
    share = points[9][1] / points[9][0].total
    assert max(abs(share * lost.total / nats - 1) for lost, nats in points) > 0.4


def test_the_readme_has_the_suite_as_the_report_writes_it() -> None:
    names = tuple(str(RESULTS / f"suite_standard{more}.json") for more in ("", "_96"))
    results = [read_result(name) for name in names]
    readme = (RESULTS.parent.parent / "README.md").read_text(encoding="utf-8")
    assert markdown_table(merged(results, names)) in readme
    results[1]["models"][-1]["parts"]["text prose"]["excess"] += 0.01
    assert markdown_table(merged(results, names)) not in readme
