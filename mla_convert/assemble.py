"""One source layer to one latent layer: RoPE step, factor step, and the metrics that tell methods apart."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from mla_convert.calibrate import LayerMoments
from mla_convert.factor import SWEEPS, Block, Factors, factor, losses_by_rank, weight_svd
from mla_convert.families import SourceSpec
from mla_convert.layer import MLALayer
from mla_convert.rope import RopePlan, RopeSplit, mean_rotation, split_rope
from mla_convert.sizes import Size, full_rank

# Towards the identity, of the mean eigenvalue. SmolLM2, 128 + 64, calibrated on Python's topics, excess nats on other
# topics and on other text: 0.302 and 0.527 at 1e-5, 0.292 and 0.498 at 1e-3, 0.288 and 0.452 at 1e-2.
SHRINKAGE = 1e-2


@dataclass(frozen=True, eq=False)
class SourceAttention:
    """The fp64 projections of one source layer, rows per head."""

    W_Q: Float[Tensor, "num_heads source_head_dim hidden_size"]
    W_K: Float[Tensor, "num_key_value_heads source_head_dim hidden_size"]
    W_V: Float[Tensor, "num_key_value_heads source_head_dim hidden_size"]
    W_O: Float[Tensor, "num_heads hidden_size source_head_dim"]


@dataclass(frozen=True)
class LayerReport:
    """Predicted squared output errors of one layer, per token, relative to its residual stream's energy.

    rope: pairs that stopped rotating; start: the truncated SVD; end: after alternating least squares.
    """

    rope: float
    start: float
    end: float

    @property
    def total(self) -> float:
        """Everything the layer loses by prediction."""
        return self.rope + self.end


def assemble(
    source: SourceAttention,
    moments: LayerMoments | None,
    spec: SourceSpec,
    size: Size,
    method: str,
    sweeps: int = SWEEPS,
) -> tuple[MLALayer, LayerReport]:
    """Convert one layer; fp64, arguments untouched.

    moments is None for method svd and where nothing is truncated.
    """
    split = _split(source, moments, spec, size.plan, method)
    blocks, covariance = _blocks(source, split, moments, spec, method)
    if moments is None or size.kv_lora_rank == full_rank(spec, size.plan.qk_rope_head_dim):
        found = weight_svd(blocks, size.kv_lora_rank)
    else:
        found = factor(blocks, size.kv_lora_rank, covariance, sweeps if method == "weighted" else 0)
    layer = _layer(source, split, found, spec, size.plan)
    energy = 1.0 if moments is None else math.exp(moments.log_energy.item() / moments.tokens)
    return layer, LayerReport(
        rope=split.cost * spec.softmax_scale**2 / energy,
        start=found.losses[0] / energy,
        end=min(found.losses) / energy,
    )


def predict(
    source: SourceAttention,
    moments: LayerMoments | None,
    spec: SourceSpec,
    plan: RopePlan,
    ranks: Sequence[int],
    method: str,
) -> dict[int, float]:
    """What the layer would lose at each of `ranks` (of the latent) beside the slots of `plan`: the `total` of the
    LayerReport that `assemble` gives without sweeps. One decomposition serves all ranks; nothing is converted.
    """
    split = _split(source, moments, spec, plan, method)
    blocks, covariance = _blocks(source, split, moments, spec, method)
    lost = losses_by_rank(blocks, ranks, None if moments is None else covariance)
    energy = 1.0 if moments is None else math.exp(moments.log_energy.item() / moments.tokens)
    rope = split.cost * spec.softmax_scale**2 / energy
    return {rank: rope + loss / energy for rank, loss in lost.items()}


def _split(
    source: SourceAttention, moments: LayerMoments | None, spec: SourceSpec, plan: RopePlan, method: str
) -> RopeSplit:
    heads, pairs, hidden = spec.num_attention_heads, spec.source_head_dim // 2, spec.hidden_size
    device = source.W_Q.device
    # What TransMLA does, and all that weights alone can tell: a lost rotation becomes the identity, all
    # queries alike.
    rotation = torch.ones(heads, pairs, dtype=torch.complex128, device=device)
    energy = torch.ones(heads, pairs, dtype=torch.float64, device=device)
    covariance = torch.eye(hidden, dtype=torch.float64, device=device)
    if moments is not None:
        covariance = moments.input[:-1, :-1] / moments.tokens
    if moments is not None and method == "weighted":
        rotation = mean_rotation(moments.distance, spec.inv_freq.to(device))
        square = moments.query.diagonal(dim1=1, dim2=2) / moments.counts[0]
        energy = square[:, :pairs] + square[:, pairs:]
    if method == "weighted":
        return split_rope(source.W_Q, source.W_K, plan, covariance, rotation, energy, 1 - rotation.abs() ** 2)
    return split_rope(source.W_Q, source.W_K, plan, covariance, rotation, energy, torch.ones_like(energy))


def _blocks(
    source: SourceAttention, split: RopeSplit, moments: LayerMoments | None, spec: SourceSpec, method: str
) -> tuple[list[Block], Tensor]:
    """Key blocks then value blocks, one per KV head; the second moment that the truncated SVD starts from."""
    eye = torch.eye(spec.source_head_dim, dtype=torch.float64, device=source.W_Q.device)
    rows = [*split.W_K_nope, *source.W_V]
    groups = spec.num_key_value_heads
    if moments is None:
        identity = torch.eye(spec.hidden_size, dtype=torch.float64, device=source.W_Q.device)
        return [Block(row, eye, identity) for row in rows], identity
    covariance = moments.input[:-1, :-1] / moments.tokens
    if method != "weighted":
        # Norm balance: keys and values count alike whatever their scale (TransMLA, section 4.3).
        key_energy = sum((((w @ covariance) * w).sum() for w in split.W_K_nope), torch.zeros(()))
        value_energy = sum((((w @ covariance) * w).sum() for w in source.W_V), torch.zeros(()))
        energies = [key_energy] * groups + [value_energy] * groups
        balance = [eye / energy.clamp_min(1e-300) for energy in energies]
        return [Block(row, m, covariance) for row, m in zip(rows, balance, strict=True)], covariance
    blocks = [*_key_blocks(split, moments, spec), *_value_blocks(source, moments, spec)]
    return [Block(b.W, b.M, shrunk(b.C)) for b in blocks], covariance


def shrunk(moment: Tensor) -> Tensor:
    """moment plus SHRINKAGE of its mean eigenvalue in every direction.

    Inputs the calibration text never showed then count a little, so up-projections stay tame there: without
    it a tiny model whose text has few distinct tokens gets a singular value of 582 beside a next largest of
    3.4.
    """
    eye = torch.eye(len(moment), dtype=moment.dtype, device=moment.device)
    return moment + SHRINKAGE * moment.diagonal().mean() * eye


def _key_blocks(split: RopeSplit, moments: LayerMoments, spec: SourceSpec) -> list[Block]:
    """M = E[q~ q~^T] weighted by tr(J^T J), C = E[J^T J], of all query heads of a KV head together."""
    turn = folded_rotation(mean_rotation(moments.distance, spec.inv_freq.to(moments.distance.device)))
    per_group = (spec.num_key_value_heads, -1)
    query = (turn @ moments.query_at_key @ turn.transpose(1, 2)).unflatten(0, per_group).sum(1)
    trace = moments.key_trace.unflatten(0, per_group).sum(1).clamp_min(torch.finfo(torch.float64).tiny)
    scale = spec.softmax_scale**2 / moments.counts[1]
    return [Block(row, scale * query[j] / trace[j], moments.key[j]) for j, row in enumerate(split.W_K_nope)]


def _value_blocks(source: SourceAttention, moments: LayerMoments, spec: SourceSpec) -> list[Block]:
    """M = W_O^T W_O summed over the query heads of a KV head, C = E[hbar hbar^T] of those heads."""
    per_group = (spec.num_key_value_heads, -1)
    metric = (source.W_O.transpose(1, 2) @ source.W_O).unflatten(0, per_group).sum(1)
    averaged = moments.value / (moments.counts[0] * (spec.num_attention_heads // spec.num_key_value_heads))
    return [Block(row, metric[j], averaged[j]) for j, row in enumerate(source.W_V)]


def folded_rotation(rotation: Tensor) -> Float[Tensor, "num_heads source_head_dim source_head_dim"]:
    """conj(c) as a real matrix on half-split rows: q~ = conj(c) chi."""
    re, im = torch.diag_embed(rotation.real), torch.diag_embed(rotation.imag)
    return torch.cat((torch.cat((re, im), dim=2), torch.cat((-im, re), dim=2)), dim=1)


def _layer(source: SourceAttention, split: RopeSplit, found: Factors, spec: SourceSpec, plan: RopePlan) -> MLALayer:
    groups = spec.num_key_value_heads
    per_group = spec.num_attention_heads // groups
    nope = 0 if plan.keeps_everything else spec.source_head_dim
    return MLALayer(
        W_UQ=split.W_UQ[:, :nope],
        W_QR=split.W_QR,
        W_DKV=found.W_DKV,
        W_KR=split.W_KR,
        W_UK=torch.stack(found.ups[:groups])[:, :nope].repeat_interleave(per_group, 0),
        W_UV=torch.stack(found.ups[groups:]).repeat_interleave(per_group, 0),
        W_O=source.W_O,
        inv_freq=spec.inv_freq[list(plan.source_index)].to(source.W_Q.device),
        softmax_scale=spec.softmax_scale,
        attention_scaling=spec.attention_scaling,
    )
