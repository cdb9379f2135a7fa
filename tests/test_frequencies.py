"""RoPE settings in every spelling, and the frequencies they mean."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tiny import (
    FAMILIES,
    LLAMA3_ROPE,
    legacy_rope,
    tiny_model,
)
from transformers import AutoModelForCausalLM, LlamaConfig

from mla_convert.errors import UnsupportedSource
from mla_convert.source.checkpoint import Checkpoint
from mla_convert.source.families import read_spec
from mla_convert.source.frequencies import inverse_frequencies, read_rope_parameters

ROPES: dict[str, dict[str, Any]] = {
    "default": {"rope_type": "default", "rope_theta": 5000.0},
    "linear": {"rope_type": "linear", "rope_theta": 5000.0, "factor": 3.0},
    "llama3": LLAMA3_ROPE,
}


@pytest.mark.parametrize("kind", ROPES)
@pytest.mark.parametrize("legacy", [False, True])
@pytest.mark.parametrize("family", FAMILIES)
def test_frequencies_are_those_of_the_model(tmp_path: Path, family: str, kind: str, legacy: bool) -> None:
    folder = tiny_model(tmp_path / "m", family, rope_parameters=dict(ROPES[kind]))
    spec = read_spec(Checkpoint.open(legacy_rope(folder) if legacy else folder))
    rotary = AutoModelForCausalLM.from_pretrained(folder).model.rotary_emb
    assert spec.rope_parameters == ROPES[kind]
    assert spec.inv_freq.dtype == torch.float64
    assert spec.attention_scaling == rotary.attention_scaling
    error = ((spec.inv_freq - rotary.inv_freq.double()) / spec.inv_freq).abs().max().item()
    assert error < 1e-6  # measured 1.6e-7 for each type: theirs is fp32
    # Negative control: every other type is 0.67 or more away (measured).
    for other in set(ROPES) - {kind}:
        wrong = inverse_frequencies(ROPES[other], 10)
        assert ((wrong - rotary.inv_freq.double()) / spec.inv_freq).abs().max() > 0.1


def test_llama3_keeps_blends_and_stretches() -> None:
    ratio = inverse_frequencies(LLAMA3_ROPE, 32) / inverse_frequencies(ROPES["default"], 32)
    assert (ratio == 1).any()
    assert ((ratio > 1 / 8 + 1e-9) & (ratio < 1)).any()
    assert ((ratio - 1 / 8).abs() < 1e-12).any()


@given(
    theta=st.floats(100, 1e7),
    head_dim=st.integers(1, 64).map(lambda half: 2 * half),
    factor=st.floats(1, 64),
    low=st.floats(0.5, 4),
    gap=st.floats(0.5, 8),
    original=st.integers(16, 16384),
    kind=st.sampled_from(["linear", "llama3"]),
    spelling=st.sampled_from(["rope_parameters", "rope_scaling", "type", "both"]),
)
def test_any_scaling_in_any_spelling_equals_transformers(
    theta: float,
    head_dim: int,
    factor: float,
    low: float,
    gap: float,
    original: int,
    kind: str,
    spelling: str,
) -> None:
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    numbers: dict[str, Any] = {"factor": factor}
    if kind == "llama3":
        numbers |= {"low_freq_factor": low, "high_freq_factor": low + gap}
        numbers |= {"original_max_position_embeddings": original}
    config: dict[str, Any] = {"max_position_embeddings": 32768}
    if spelling in ("rope_parameters", "both"):
        config["rope_parameters"] = {"rope_type": kind, "rope_theta": theta} | numbers
    if spelling != "rope_parameters":
        config["rope_theta"] = theta
        config["rope_scaling"] = {"type" if spelling == "type" else "rope_type": kind} | numbers
    theirs = LlamaConfig(**json.loads(json.dumps(config)), head_dim=head_dim)
    expected, _ = ROPE_INIT_FUNCTIONS[kind](theirs)
    ours = inverse_frequencies(read_rope_parameters(config, 32768), head_dim)
    # Measured 3.7e-5 over 4,000 draws: in theirs the weight of the blend is an fp32 difference.
    assert ((ours - expected.double()) / ours).abs().max() < 2e-4
    other = inverse_frequencies(read_rope_parameters({"rope_theta": 2 * theta}, 32768), head_dim)
    if head_dim > 2:  # negative control: the first frequency, theta^0, is 1 for every theta
        assert ((other - expected.double()) / ours).abs().max() > 1e-2


@pytest.mark.parametrize(
    ("rope", "match"),
    [
        (
            {"rope_type": "spiral", "factor": 4.0},
            r"rope_type='spiral' is not supported; supported: default, linear, llama3, dynamic, yarn, longrope",
        ),
        (
            {"rope_type": "linear", "type": "llama3"},
            r"RoPE types \['linear', 'llama3'\] contradict; keep one",
        ),
        ({"rope_type": "linear"}, r"factor=None must be a positive number for rope_type 'linear'"),
        ({"rope_type": "linear", "factor": -2}, r"factor=-2 must be a positive number"),
        (
            {"rope_type": "default", "factor": 2.0},
            r"factor=2\.0 is not known for rope_type 'default'; remove it",
        ),
        (
            {"rope_type": "default", "partial_rotary_factor": 0.25},
            r"partial_rotary_factor=0\.25 in the RoPE settings",
        ),
        (LLAMA3_ROPE | {"high_freq_factor": 1.0}, r"high_freq_factor=1\.0 must exceed low_freq_factor=1\.0"),
        (
            LLAMA3_ROPE | {"attention_factor": 1.2},
            r"attention_factor=1\.2 is not known for rope_type 'llama3'",
        ),
    ],
)
@pytest.mark.parametrize("spelling", ["rope_parameters", "rope_scaling"])
def test_rope_settings_are_refused_by_name(spelling: str, rope: dict[str, Any], match: str) -> None:
    scaling = {key: value for key, value in rope.items() if key != "rope_theta"}
    config = {"rope_parameters": rope} if spelling == "rope_parameters" else {"rope_scaling": scaling}
    with pytest.raises(UnsupportedSource, match=match):
        read_rope_parameters(config | {"rope_theta": 5000.0}, 512)


def test_llama3_without_an_original_length_uses_the_models() -> None:
    rope = {key: value for key, value in LLAMA3_ROPE.items() if key != "original_max_position_embeddings"}
    assert read_rope_parameters({"rope_parameters": rope}, 777)["original_max_position_embeddings"] == 777


def test_a_missing_theta_is_said(caplog: pytest.LogCaptureFixture) -> None:
    assert read_rope_parameters({"rope_scaling": None}, 512) == {
        "rope_type": "default",
        "rope_theta": 10000.0,
    }
    assert "gives no rope_theta" in caplog.text
    caplog.clear()
    read_rope_parameters({"rope_parameters": ROPES["default"]}, 512)
    assert not caplog.records
