"""The RoPE step: what is kept rotates as in the source, and what is lost costs what the formula says."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tiny import LLAMA3_ROPE, tiny_model
from torch import Tensor
from transformers import DeepseekV3Config, LlamaConfig
from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3RotaryEmbedding
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding, apply_rotary_pos_emb

from mla_convert.conversion.rope import (
    RopePlan,
    RopeSplit,
    check_frequencies,
    ladder_plan,
    ladder_strides,
    lossless_plan,
    mean_rotation,
    split_rope,
    to_complex,
    to_half_split,
)
from mla_convert.errors import BadOption, UnsupportedSource
from mla_convert.formats.layer import rotate
from mla_convert.source.checkpoint import Checkpoint
from mla_convert.source.families import SourceSpec, read_spec
from mla_convert.source.frequencies import inverse_frequencies

HEADS, GROUPS, WIDTH, HIDDEN = 6, 3, 10, 23
PAIRS = WIDTH // 2
EXACT = 1e-13  # fp64, of the largest score; measured at most 1.1e-15
LINEAR_ROPE = {"rope_type": "linear", "rope_theta": 5000.0, "factor": 4.0}
DEFAULT_ROPE = {"rope_type": "default", "rope_theta": 5000.0}
ROPES = [DEFAULT_ROPE, LINEAR_ROPE, LLAMA3_ROPE]


@pytest.fixture(scope="module")
def spec(tmp_path_factory: pytest.TempPathFactory) -> SourceSpec:
    sizes = {"num_attention_heads": HEADS, "num_key_value_heads": GROUPS, "head_dim": WIDTH}
    return read_spec(Checkpoint.open(tiny_model(tmp_path_factory.mktemp("rope"), **sizes)))


def with_rope(spec: SourceSpec, rope: dict[str, Any], **changes: Any) -> SourceSpec:
    width = changes.get("source_head_dim", spec.source_head_dim)
    return replace(spec, rope_parameters=rope, inv_freq=inverse_frequencies(rope, width), **changes)


def random(*shape: int, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed + sum(shape))
    return torch.randn(shape, generator=generator, dtype=torch.float64)


def second_moment(seed: int = 0) -> Tensor:
    root = random(HIDDEN, HIDDEN, seed=seed)
    return root @ root.T / HIDDEN


def projections(seed: int = 0) -> tuple[Tensor, Tensor]:
    return random(HEADS, WIDTH, HIDDEN, seed=seed), random(GROUPS, WIDTH, HIDDEN, seed=seed + 1)


def pairs_of(W_K: Tensor, covariance: Tensor) -> Tensor:
    """S_l: second moment across KV heads of each frequency's keys, for inputs of that second moment."""
    key = to_complex(W_K).transpose(0, 1)
    return key @ covariance.cdouble() @ key.mH


def split(W_Q: Tensor, W_K: Tensor, plan: RopePlan, **changes: Any) -> RopeSplit:
    """With every query alike and every lost rotation becoming the identity, unless changed."""
    options: dict[str, Any] = {
        "key_pairs": pairs_of(W_K, second_moment()),
        "rotation": torch.ones(HEADS, PAIRS, dtype=torch.complex128),
        "lost": torch.full((GROUPS, PAIRS), HEADS / GROUPS, dtype=torch.float64),
    }
    return split_rope(W_Q, W_K, plan, **(options | changes))


def source_scores(W_Q: Tensor, W_K: Tensor, h: Tensor, at: Tensor, inv_freq: Tensor) -> Tensor:
    """[heads, tokens, tokens] by transformers' own rotation of half-split rows."""
    q = torch.einsum("te,hde->htd", h, W_Q)[None]
    k = torch.einsum("te,hde->htd", h, W_K).repeat_interleave(HEADS // GROUPS, 0)[None]
    angle = at[None, :, None].double() * inv_freq
    angle = torch.cat((angle, angle), dim=-1)
    q, k = apply_rotary_pos_emb(q, k, angle.cos(), angle.sin())
    return (q @ k.transpose(-1, -2))[0]


def latent_scores(parts: RopeSplit, h: Tensor, at: Tensor, inv_freq: Tensor) -> Tensor:
    """[heads, tokens, tokens] of the rotating slots plus the part that rotates no more."""
    q_pe = rotate(torch.einsum("te,hde->htd", h, parts.W_QR)[None], at[None], inv_freq)[0]
    k_pe = rotate((h @ parts.W_KR.T)[None], at[None], inv_freq)[0]
    q = torch.einsum("te,hde->htd", h, parts.W_UQ)
    k = torch.einsum("te,hde->htd", h, parts.W_K_nope).repeat_interleave(HEADS // GROUPS, 0)
    return q_pe @ k_pe.T + q @ k.transpose(-1, -2)


def error(got: Tensor, want: Tensor) -> float:
    return ((got - want).abs().max() / want.abs().max()).item()


AT = torch.tensor([0, 1, 2, 7, 100, 511])
H = random(len(AT), HIDDEN, seed=9)


def test_with_every_pair_kept_the_scores_are_the_source_s(spec: SourceSpec) -> None:
    W_Q, W_K = projections()
    plan = lossless_plan(spec)
    frequencies = spec.inv_freq[list(plan.source_index)]
    parts = split(W_Q, W_K, plan)
    want = source_scores(W_Q, W_K, H, AT, spec.inv_freq)
    assert parts.cost == 0 and parts.W_K_nope.abs().max() == 0
    assert error(latent_scores(parts, H, AT, frequencies), want) <= EXACT
    # Controls, measured: query not conjugated 1.7; frequencies of other slots 2.1.
    mirrored = parts.W_QR.unflatten(1, (-1, 2)) * torch.tensor([1.0, -1.0], dtype=torch.float64)[:, None]
    wrong = replace(parts, W_QR=mirrored.flatten(1, 2))
    assert error(latent_scores(wrong, H, AT, frequencies), want) > 0.1
    assert error(latent_scores(parts, H, AT, frequencies.flip(0)), want) > 0.1


@pytest.mark.parametrize(("width", "stride"), [(2, 1), (4, 1), (10, 1), (4, 2), (6, 2), (4, 4)])
def test_a_lost_rotation_becomes_the_identity_and_nothing_else_changes(
    spec: SourceSpec, width: int, stride: int
) -> None:
    """At distance 0 nothing was lost, and a slot's frequency turns exactly the direction in the slot."""
    W_Q, W_K = projections(3)
    plan = ladder_plan(spec, width, stride)
    parts = split(W_Q, W_K, plan)
    same_place = torch.zeros_like(AT)
    want = source_scores(W_Q, W_K, H, same_place, spec.inv_freq)
    slots = spec.inv_freq[list(plan.source_index)]
    assert error(latent_scores(parts, H, same_place, slots), want) <= EXACT
    # The source with the lost key part standing still: take it off rotating, add it at rest.
    moving = source_scores(W_Q, W_K, H, AT, spec.inv_freq)
    lost_moving = source_scores(W_Q, parts.W_K_nope, H, AT, spec.inv_freq)
    lost_resting = source_scores(W_Q, parts.W_K_nope, H, same_place, spec.inv_freq)
    got = latent_scores(parts, H, AT, slots)
    assert error(got, moving - lost_moving + lost_resting) <= EXACT
    assert error(got, moving) > 0.1  # measured 0.93 to 1.1: the lost rotation matters


def test_the_mean_rotation_is_folded_into_the_query(spec: SourceSpec) -> None:
    """q~ . k = Re conj(conj(c) chi) kappa = Re c conj(chi) kappa per pair, as a loop over complex numbers."""
    W_Q, W_K = projections(4)
    rotation = torch.complex(random(HEADS, PAIRS), random(HEADS, PAIRS, seed=1)) / 2
    parts = split(W_Q, W_K, ladder_plan(spec, 4, 1), rotation=rotation)
    q, k = random(HIDDEN, seed=5), random(HIDDEN, seed=6)
    chi, kappa = to_complex(W_Q) @ q.cdouble(), to_complex(parts.W_K_nope) @ k.cdouble()
    for head in range(HEADS):
        group = head // (HEADS // GROUPS)
        terms = [
            complex(rotation[head, i]) * complex(chi[head, i]).conjugate() * complex(kappa[group, i])
            for i in range(PAIRS)
        ]
        got = (parts.W_UQ[head] @ q) @ (parts.W_K_nope[group] @ k)
        scale = sum(abs(term) for term in terms)
        assert abs(got.item() - sum(terms).real) <= EXACT * scale
        conjugated = [t * (complex(c).conjugate() / complex(c)) for t, c in zip(terms, rotation[head], strict=True)]
        assert abs(got.item() - sum(conjugated).real) > 1e-3 * scale  # measured 0.11 or more


def test_cost_is_the_energy_of_what_stopped_rotating(spec: SourceSpec) -> None:
    """sum over KV heads and pairs of cost of a unit x E|lost key pair|^2, the mean taken in a loop."""
    W_Q, W_K = projections(7)
    tokens = random(400, HIDDEN, seed=8)
    cost_of_unit = 0.1 + random(GROUPS, PAIRS, seed=2).abs()
    key_pairs = pairs_of(W_K, tokens.T @ tokens / 400)
    parts = split(W_Q, W_K, ladder_plan(spec, 6, 2), key_pairs=key_pairs, lost=cost_of_unit)
    lost = torch.einsum("jle,te->jlt", to_complex(parts.W_K_nope), tokens.cdouble()).abs().square().mean(-1)
    want = 0.0
    for group in range(GROUPS):
        for pair in range(PAIRS):
            want += (cost_of_unit[group, pair] * lost[group, pair]).item()
    assert parts.cost == pytest.approx(want, rel=1e-12)  # measured 1e-16
    unweighted = split(W_Q, W_K, ladder_plan(spec, 6, 2), key_pairs=key_pairs)
    assert unweighted.cost != pytest.approx(want, rel=0.1)  # measured 2.2 times as much


def real_cost(W_K: Tensor, covariance: Tensor, kept: RopePlan) -> float:
    """What is lost when the slot's mix of KV heads must be real, as in a PCA over heads."""
    key, cost = to_complex(W_K), 0.0
    for pair in range(PAIRS):
        moment = (key[:, pair] @ covariance.cdouble() @ key[:, pair].mH).real
        values = torch.linalg.eigvalsh(moment)
        cost += values.sum().item() - (values[-1].item() if pair in kept.source_index else 0.0)
    return cost * HEADS / GROUPS


def test_a_complex_mix_of_heads_keeps_what_a_real_one_loses(spec: SourceSpec) -> None:
    """KV heads that are rotations of one another need one slot, if it may be complex."""
    W_Q, W_K = projections(2)
    turns = torch.polar(torch.ones(GROUPS, dtype=torch.float64), torch.tensor([0.0, 2.0, 4.2]).double())
    W_K = to_half_split(turns[:, None, None] * to_complex(W_K[:1]))
    plan = ladder_plan(spec, WIDTH, 1)
    parts = split(W_Q, W_K, plan)
    whole = split(W_Q, W_K, ladder_plan(spec, 2, 1)).cost
    assert parts.cost <= 1e-12 * whole  # measured 1e-16
    assert real_cost(W_K, second_moment(), plan) > 0.3 * whole  # measured 0.63
    want = source_scores(W_Q, W_K, H, AT, spec.inv_freq)
    assert error(latent_scores(parts, H, AT, spec.inv_freq), want) <= EXACT


@given(st.integers(0, 10_000))
def test_a_complex_mix_is_never_worse_than_a_real_one(seed: int) -> None:
    W_Q, W_K = projections(seed)
    plan = RopePlan(tuple(range(PAIRS)), DEFAULT_ROPE, 1)
    covariance = second_moment(seed)
    assert split(W_Q, W_K, plan, key_pairs=pairs_of(W_K, covariance)).cost < real_cost(W_K, covariance, plan)


def test_a_frequency_whose_rotation_costs_nothing_still_gets_its_strongest_direction(
    spec: SourceSpec,
) -> None:
    W_Q, W_K = projections(5)
    plan = ladder_plan(spec, WIDTH, 1)
    free = split(W_Q, W_K, plan, lost=torch.full((GROUPS, PAIRS), 1e-9 * HEADS / GROUPS, dtype=torch.float64))
    plain = split(W_Q, W_K, plan)
    assert free.cost == pytest.approx(1e-9 * plain.cost)
    torch.testing.assert_close(free.W_K_nope, plain.W_K_nope, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("cost_of_unit", [1e-12, 1.0, 1e9])
def test_slots_are_of_the_sources_size_whatever_they_cost(spec: SourceSpec, cost_of_unit: float) -> None:
    """Keys and queries of slots keep numbers like the source's: a gradient by either is of like size then."""
    W_Q, W_K = projections(6)
    lost = cost_of_unit * (0.1 + random(GROUPS, PAIRS, seed=2).abs())
    parts = split(W_Q, W_K, ladder_plan(spec, WIDTH, 1), lost=lost)
    slots = torch.complex(parts.W_KR[0::2], parts.W_KR[1::2]).norm(dim=1)
    torch.testing.assert_close(slots, to_complex(W_K).norm(dim=2).square().mean(0).sqrt(), rtol=1e-12, atol=0)
    ratio = parts.W_QR.square().mean().sqrt() / W_Q.square().mean().sqrt()
    assert 0.1 < ratio < 10  # measured 0.62 at each; without the scaling 4.9e5 at 1e-12 and 1.6e-5 at 1e9


def test_mean_rotation_of_a_dead_head_is_zero_not_nan() -> None:
    assert mean_rotation(torch.zeros(2, 4, 2).double(), torch.zeros(2, 4).double()).abs().max() == 0


def llama_rotary(rope: dict[str, Any], width: int, positions: int = 512) -> LlamaRotaryEmbedding:
    sizes = {
        "hidden_size": 48,
        "num_attention_heads": 6,
        "head_dim": width,
        "max_position_embeddings": positions,
    }
    return LlamaRotaryEmbedding(LlamaConfig(**sizes, rope_parameters=dict(rope)))


def deepseek_rotary(plan: RopePlan, positions: int = 512) -> DeepseekV3RotaryEmbedding:
    config = DeepseekV3Config(
        hidden_size=48,
        num_attention_heads=6,
        qk_rope_head_dim=plan.qk_rope_head_dim,
        rope_parameters=dict(plan.rope_parameters),
        max_position_embeddings=positions,
    )
    return DeepseekV3RotaryEmbedding(config)


LADDER = 3e-7  # relative, both in fp32; measured at most 1.1e-7; control (rope_theta kept): 0.96
# Measured 1.3e-7, llama3 4.1e-7 (its fp32 blend); control, factors that ignore how the class rounds: 2.9e-7.
LONGROPE = {"default": 2e-7, "linear": 2e-7, "llama3": 6e-7}


@pytest.mark.parametrize("rope", ROPES, ids=lambda rope: rope["rope_type"])
@pytest.mark.parametrize(("width", "stride"), [(64, 1), (32, 1), (32, 2), (18, 2), (16, 4), (2, 1)])
def test_the_stock_class_turns_the_ladder_as_the_source_does(
    spec: SourceSpec, rope: dict[str, Any], width: int, stride: int
) -> None:
    source = with_rope(spec, rope, source_head_dim=64)
    plan = ladder_plan(source, width, stride)
    assert plan.source_index == tuple(range(0, stride * width // 2, stride))
    want = llama_rotary(rope, 64).inv_freq[list(plan.source_index)]
    module = deepseek_rotary(plan)
    assert module.attention_scaling == 1
    torch.testing.assert_close(module.inv_freq, want, rtol=LADDER, atol=0)
    if width > 2 and stride * width != 64:
        careless = deepseek_rotary(replace(plan, rope_parameters=rope)).inv_freq
        assert ((careless - want) / want).abs().max() > 0.1


@pytest.mark.parametrize("rope", ROPES, ids=lambda rope: rope["rope_type"])
@pytest.mark.parametrize("groups", [1, 3])
def test_the_stock_class_turns_every_slot_of_the_lossless_plan_as_the_source_does(
    spec: SourceSpec, rope: dict[str, Any], groups: int
) -> None:
    """cos and sin too, on both sides of max_position_embeddings, where longrope changes its factor list."""
    source = with_rope(spec, rope, source_head_dim=64, num_key_value_heads=groups, max_position_embeddings=128)
    plan = lossless_plan(source)
    assert plan.keeps_everything and plan.qk_rope_head_dim == groups * 64
    assert plan.rope_parameters["rope_type"] == (rope["rope_type"] if groups == 1 else "longrope")
    want, got = llama_rotary(rope, 64, 128), deepseek_rotary(plan, 128)
    slots = want.inv_freq.repeat(groups)
    torch.testing.assert_close(got.inv_freq, slots, rtol=LONGROPE[rope["rope_type"]], atol=0)
    other = want.inv_freq.repeat_interleave(groups)
    assert groups == 1 or ((other - slots) / slots).abs().max() > 0.1
    assert got.attention_scaling == 1
    x = torch.zeros(1)
    for last in (100, 300):
        at = torch.arange(last)[None]
        for mine, theirs in zip(got(x, at), want(x, at), strict=True):
            half = theirs[..., :32].repeat(1, 1, 2 * groups)
            # Angles of up to 300 rad, at most 6e-8 off at the fastest; measured at most 2.9e-5.
            torch.testing.assert_close(mine, half, rtol=0, atol=6e-5)


def test_a_rotation_the_stock_class_cannot_make_is_refused() -> None:
    theirs, ours = torch.tensor([1.0, 0.1]).double(), torch.tensor([1.0, 0.1 * (1 + 3e-6)]).double()
    check_frequencies(ours, ours * (1 + 5e-7), DEFAULT_ROPE)
    with pytest.raises(UnsupportedSource, match=r"'default'.*other frequencies.*3\.0e-06, allowed 1e-06.*--lossless"):
        check_frequencies(ours, theirs, DEFAULT_ROPE)
    with pytest.raises(UnsupportedSource, match="other frequencies"):
        check_frequencies(ours * float("nan"), theirs, DEFAULT_ROPE)


def test_frequencies_that_no_ladder_has_are_refused(spec: SourceSpec) -> None:
    bent = replace(spec, inv_freq=spec.inv_freq * torch.tensor([1, 1, 1.01, 1, 1]).double())
    with pytest.raises(UnsupportedSource, match=r"relative difference 9\.9e-03"):
        ladder_plan(bent, 6, 1)
    assert ladder_plan(bent, 4, 1).source_index == (0, 1)  # the bent one is not among the slots


def test_slots_that_do_not_fit_are_refused(spec: SourceSpec) -> None:
    with pytest.raises(
        BadOption,
        match=r"qk_rope_head_dim=8 needs 4 frequencies, and rope_stride=2 leaves 3 of the source's 5",
    ):
        ladder_plan(spec, 8, 2)
    with pytest.raises(BadOption, match=r"rope_stride=3 leaves 2.*use --qk-rope-head-dim 4 or less"):
        ladder_plan(spec, 6, 3)
    with pytest.raises(BadOption, match="needs 6 frequencies, and rope_stride=1 leaves 5"):
        ladder_plan(spec, 12, 1)
    assert ladder_plan(spec, 2, 9).source_index == (0,)  # one slot fits at any stride


@given(st.integers(1, 20), st.integers(1, 20))
def test_ladder_strides_are_those_that_fit(pairs: int, slots: int) -> None:
    strides = ladder_strides(2 * pairs, 2 * slots)
    fitting = [s for s in range(1, 2 * pairs) if max(range(0, s * slots, s)) < pairs]
    # One slot sits on frequency 0 whatever the stride, so only one stride is worth a try.
    assert strides == (fitting[:1] if slots == 1 else fitting)
