"""The RoPE step: which key directions keep rotating (the *slots*), and what losing the rotation costs.

RoPE pairs of a source head are complex numbers. With chi_{h,l} the query of head h and kappa_{j,l} the key of
KV head j at frequency theta_l, the score at distance D is Re sum_l conj(chi_{h,l}) kappa_{j,l} exp(-i theta_l
D). A complex mix across KV heads at one frequency commutes with the rotation, so per frequency any number of
directions of a num_key_value_heads-dimensional complex space may be kept in slots. The rest moves to the
latent and loses its rotation, which is replaced by its mean c_{h,l} = E exp(-i theta_l D), folded into the query.
What is lost is the fraction 1 - |c|^2 of that component's score energy. The mean is weighted by what a score error at
that key costs and by the energies of both chi and kappa: keys that matter at large distances, such as the attention
sink at position 0, are not like their nearer neighbours.
"""

from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Complex, Float
from torch import Tensor

from mla_convert.errors import BadOption, UnsupportedSource
from mla_convert.source.families import SourceSpec
from mla_convert.source.frequencies import inverse_frequencies, longrope_frequencies

# Relative; config files hold theta' with 16 digits, classes compute in fp32 (6e-8).
FREQUENCY_TOLERANCE = 1e-6
TINY = 1e-300  # keeps quotients by dead rows, pairs and heads finite
DEAD = 1e-12  # lost energies below this fraction of the layer's largest count as this much


@dataclass(frozen=True, eq=False)
class RopePlan:
    """The slots of the whole model: for each its source frequency's index, and how the config says so."""

    source_index: tuple[int, ...]
    rope_parameters: dict[str, Any]
    stride: int | None  # None: every pair of every KV head has a slot (lossless)

    @property
    def qk_rope_head_dim(self) -> int:
        """Two numbers per slot."""
        return 2 * len(self.source_index)

    @property
    def keeps_everything(self) -> bool:
        """Whether every key pair rotates in a slot, so that no key part is left for the latent."""
        return self.stride is None


@dataclass(frozen=True, eq=False)
class RopeSplit:
    """One layer's query and key projections, divided into rotating slots and what rotates no more."""

    W_UQ: Float[Tensor, "num_heads source_head_dim hidden_size"]  # mean rotation folded in
    W_QR: Float[Tensor, "num_heads qk_rope_head_dim hidden_size"]
    W_KR: Float[Tensor, "qk_rope_head_dim hidden_size"]
    W_K_nope: Float[Tensor, "num_key_value_heads source_head_dim hidden_size"]
    cost: float  # what the pairs that rotate no more cost, in the units of lost times key_pairs


def stride_fits(source_head_dim: int, qk_rope_head_dim: int, stride: int) -> bool:
    """Whether qk_rope_head_dim / 2 slots fit on the source's frequencies 0, stride, 2 stride, ..."""
    return stride * (qk_rope_head_dim // 2 - 1) < source_head_dim // 2


def ladder_strides(source_head_dim: int, qk_rope_head_dim: int) -> list[int]:
    """Strides that fit and differ: a single slot sits on frequency 0 whatever the stride."""
    longest = source_head_dim // 2 if qk_rope_head_dim > 2 else 1
    return [s for s in range(1, longest + 1) if stride_fits(source_head_dim, qk_rope_head_dim, s)]


def ladder_plan(spec: SourceSpec, qk_rope_head_dim: int, stride: int) -> RopePlan:
    """Slots on every stride-th source frequency: a plain rope_theta theta' = theta^(stride p / d).

    Scalings that act on each frequency alone (linear, llama3) commute with taking a subset. The vector the
    target class will compute is compared with the source's. Raises BadOption where the slots do not fit,
    UnsupportedSource where the frequencies differ.
    """
    pairs, slots = spec.source_head_dim // 2, qk_rope_head_dim // 2
    if not stride_fits(spec.source_head_dim, qk_rope_head_dim, stride):
        raise BadOption(
            f"qk_rope_head_dim={qk_rope_head_dim} needs {slots} frequencies, and rope_stride={stride} leaves "
            f"{-(-pairs // stride)} of the source's {pairs}; use --qk-rope-head-dim "
            f"{2 * -(-pairs // stride)} or less, or a smaller --rope-stride"
        )
    index = tuple(range(0, stride * slots, stride))
    theta = float(spec.rope_parameters["rope_theta"])
    parameters = dict(spec.rope_parameters)
    parameters["rope_theta"] = theta ** (stride * qk_rope_head_dim / spec.source_head_dim)
    check_frequencies(inverse_frequencies(parameters, qk_rope_head_dim), spec.inv_freq[list(index)], parameters)
    return RopePlan(index, parameters, stride)


def lossless_plan(spec: SourceSpec) -> RopePlan:
    """One slot per KV head and frequency, written as longrope with short_factor == long_factor, amplitude 1.

    With one KV head the list is the source's own and its rope_parameters are kept.
    """
    pairs = spec.source_head_dim // 2
    index = tuple(range(pairs)) * spec.num_key_value_heads
    if spec.num_key_value_heads == 1:
        return RopePlan(index, dict(spec.rope_parameters), None)
    theta = float(spec.rope_parameters["rope_theta"])
    factors = longrope_frequencies(spec.inv_freq[list(index)], theta).tolist()
    parameters = {
        "rope_type": "longrope",
        "rope_theta": theta,
        "factor": 1.0,
        "attention_factor": 1.0,
        "short_factor": factors,
        "long_factor": factors,
        "original_max_position_embeddings": spec.max_position_embeddings,
    }
    return RopePlan(index, parameters, None)


def native_plan(spec: SourceSpec, qk_rope_head_dim: int, stride: int) -> RopePlan:
    """Slots on every stride-th source frequency; the native format rotates them by the source's own tables.

    Raises BadOption where the slots do not fit.
    """
    slots = qk_rope_head_dim // 2
    if not stride_fits(2 * spec.pairs, qk_rope_head_dim, stride):
        raise BadOption(
            f"qk_rope_head_dim={qk_rope_head_dim} needs {slots} frequencies, and rope_stride={stride} leaves "
            f"{-(-spec.pairs // stride)} of the source's {spec.pairs}; use --qk-rope-head-dim "
            f"{2 * -(-spec.pairs // stride)} or less, or a smaller --rope-stride"
        )
    return RopePlan(tuple(range(0, stride * slots, stride)), {}, stride)


def native_lossless_plan(spec: SourceSpec) -> RopePlan:
    """One slot per KV head and frequency, in layers that rotate."""
    return RopePlan(tuple(range(spec.pairs)) * spec.num_key_value_heads, {}, None)


def check_frequencies(written: Tensor, wanted: Tensor, parameters: dict[str, Any]) -> None:
    """Compare the target's rotation with the source's, number by number. Raises UnsupportedSource."""
    error = ((written - wanted).abs() / wanted.abs()).max().item()
    if not error <= FREQUENCY_TOLERANCE:
        raise UnsupportedSource(
            f"rope_type {parameters['rope_type']!r}: the stock class would rotate by other frequencies than "
            f"the source (relative difference {error:.1e}, allowed {FREQUENCY_TOLERANCE:.0e}); use --lossless"
        )


def to_complex(rows: Float[Tensor, "heads head_dim hidden"]) -> Complex[Tensor, "heads pairs hidden"]:
    """Half-split RoPE rows (l, l + d/2), as Llama stores them, as complex rows."""
    re, im = rows.chunk(2, dim=1)
    return torch.complex(re, im)


def to_half_split(pairs: Complex[Tensor, "heads pairs hidden"]) -> Float[Tensor, "heads head_dim hidden"]:
    """Inverse of `to_complex`."""
    return torch.cat((pairs.real, pairs.imag), dim=1)


def to_interleaved(pairs: Complex[Tensor, "*heads slots hidden"]) -> Float[Tensor, "*heads width hidden"]:
    """Complex rows as DeepSeek stores rotating rows: 2s real, 2s + 1 imaginary."""
    return torch.stack((pairs.real, pairs.imag), dim=-2).flatten(-3, -2)


def mean_rotation(
    turned_energy: Float[Tensor, "num_heads pairs 2"], pair_energy: Float[Tensor, "num_heads pairs"]
) -> Complex[Tensor, "num_heads pairs"]:
    """c_{h,l} = E exp(-i theta_l D), weighted by what a score error costs and by the pair's energy; |c| <= 1."""
    return torch.view_as_complex(turned_energy.contiguous()) / pair_energy.clamp_min(TINY)


def split_rope(
    W_Q: Float[Tensor, "num_heads source_head_dim hidden_size"],
    W_K: Float[Tensor, "num_key_value_heads source_head_dim hidden_size"],
    plan: RopePlan,
    key_pairs: Complex[Tensor, "pairs num_key_value_heads num_key_value_heads"],
    rotation: Complex[Tensor, "num_heads pairs"],
    lost: Float[Tensor, "num_key_value_heads pairs"],
) -> RopeSplit:
    """Choose each slot's direction and divide the projections; all fp64, arguments untouched.

    key_pairs is S_l, the second moment of each frequency's keys across KV heads; rotation is c (ones: a lost rotation
    becomes the identity); lost is N, what losing the rotation of one unit of key energy costs. At frequency l the slots
    take the leading Hermitian eigenvectors of N^1/2 S_l N^1/2.
    """
    query, key = to_complex(W_Q), to_complex(W_K)
    groups, per_group = W_K.shape[0], W_Q.shape[0] // W_K.shape[0]
    # A dead layer or KV head (nothing reads its score) has no lost energy; its slots are as good as any others, but the
    # balancing below divides by the root of it.
    lost = lost.clamp_min(DEAD * lost.max().item()) if lost.max() > 0 else torch.ones_like(lost)
    slots_of: dict[int, list[int]] = {}
    for slot, pair in enumerate(plan.source_index):
        slots_of.setdefault(pair, []).append(slot)

    W_KR = key.new_zeros(len(plan.source_index), key.shape[2])
    W_QR = query.new_zeros(W_Q.shape[0], len(plan.source_index), query.shape[2])
    rest, cost = key.clone(), 0.0
    for pair in range(key.shape[1]):
        slots = slots_of.get(pair, [])
        if len(slots) == groups:
            # Everything at this frequency is kept: one slot per KV head, no basis needed.
            into, back = (torch.eye(groups, dtype=key.dtype, device=key.device),) * 2
        else:
            weight = lost[:, pair].sqrt()
            energy, basis = torch.linalg.eigh(weight[:, None] * key_pairs[pair] * weight)
            kept = basis[:, groups - len(slots) :]
            cost += energy[: groups - len(slots)].clamp_min(0).sum().item()
            into, back = kept.mH * weight, kept / weight[:, None]  # kappa = back into kappa + rest
            # A slot's key row gets the size of the source's at this frequency, so that the query's keeps its size too:
            # any scale computes the same, but with weights of 1e-6 optimisers and storage types would suffer.
            size = (into @ key[:, pair]).norm(dim=1) / key[:, pair].norm(dim=1).square().mean().sqrt().clamp_min(TINY)
            size = torch.where(size > 0, size, 1.0)
            into, back = into / size[:, None], back * size
        W_KR[slots] = into @ key[:, pair]
        W_QR[:, slots] = query[:, pair, None] * back.conj().repeat_interleave(per_group, 0)[:, :, None]
        rest[:, pair] -= back @ (into @ key[:, pair])
    return RopeSplit(
        W_UQ=to_half_split(query * rotation.conj()[:, :, None]),
        W_QR=to_interleaved(W_QR),
        W_KR=to_interleaved(W_KR),
        W_K_nope=to_half_split(rest),
        cost=cost,
    )
