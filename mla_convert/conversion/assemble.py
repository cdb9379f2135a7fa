"""One source layer to one latent layer: RoPE step, factor step, and the metrics that tell methods apart.

Biases of queries and keys ride along in the RoPE step as one more column, with the second moment of [h; 1]: slots are
chosen for keys with their biases. What is left of a key's bias outside the slots adds the same to every score of a
query, which softmax ignores. Rows of a head that never rotate pass the RoPE step by.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from jaxtyping import Float
from torch import Tensor

from mla_convert.calibration.calibrate import LayerMoments
from mla_convert.conversion.factor import SWEEPS, Block, Factors, factor, losses_by_rank, weight_svd
from mla_convert.conversion.rope import TINY, RopePlan, RopeSplit, mean_rotation, split_rope, to_complex
from mla_convert.conversion.sizes import Size, full_rank, of_layer
from mla_convert.formats.layer import MLALayer, keys_values, source_heads
from mla_convert.source.families import SourceSpec
from mla_convert.source.features import LayerFacts
from mla_convert.source.projections import SourceAttention

# Towards the identity, of the mean eigenvalue. SmolLM2, 128 + 64, calibrated on Python's topics, excess nats on other
# topics and on other text: 0.302 and 0.527 at 1e-5, 0.292 and 0.498 at 1e-3, 0.288 and 0.452 at 1e-2.
SHRINKAGE = 1e-2
# Weight of the plain second moment of the inputs beside that of the softmax's Jacobian, by trace. The Jacobian sees
# small errors only: of a key that always wins the softmax (the attention sink) it says that nothing depends on it, and
# the fit then loses it. SmolLM2, end of the calibration text, excess nats: at 128 + 64 0.227 without, 0.192 at 1 and
# 0.193 at 3; at 144 + 48 0.202 at 1 and 0.178 at 3.
PLAIN_SHARE = 3.0

WHITE_DRAWS = 4  # per input, of the moment that stands for text where there is none


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
    facts = source.facts or spec.layers[0]
    size = of_layer(spec, facts, size)
    split = _split(source, moments, facts, size.plan, method)
    blocks, covariance = _blocks(source, split, moments, spec, facts, method)
    whole = size.kv_lora_rank == full_rank(spec, size.plan.qk_rope_head_dim)
    if whole or (moments is None and source.front is None):
        found = weight_svd(blocks, size.kv_lora_rank)
    else:
        found = factor(blocks, size.kv_lora_rank, covariance, sweeps if method == "weighted" else 0)
    layer = _layer(source, split, found, spec, facts, size.plan)
    energy = 1.0 if moments is None else math.exp(moments.log_energy.item() / moments.tokens)
    return layer, LayerReport(
        rope=split.cost * facts.softmax_scale**2 / energy,
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
) -> dict[int, LayerReport]:
    """What the layer would lose at each of `ranks` (of the latent) beside the slots of `plan`: the LayerReport that
    `assemble` gives without sweeps. One decomposition serves all ranks; nothing is converted.
    """
    facts = source.facts or spec.layers[0]
    sizes = {rank: of_layer(spec, facts, Size(rank, plan)) for rank in ranks}
    plan = of_layer(spec, facts, Size(1, plan)).plan
    split = _split(source, moments, facts, plan, method)
    blocks, covariance = _blocks(source, split, moments, spec, facts, method)
    lost = losses_by_rank(
        blocks, [size.kv_lora_rank for size in sizes.values()], None if moments is None else covariance
    )
    energy = 1.0 if moments is None else math.exp(moments.log_energy.item() / moments.tokens)
    rope = split.cost * facts.softmax_scale**2 / energy
    left = {rank: lost[size.kv_lora_rank] / energy for rank, size in sizes.items()}
    return {rank: LayerReport(rope, start=each, end=each) for rank, each in left.items()}


def _split(
    source: SourceAttention, moments: LayerMoments | None, facts: LayerFacts, plan: RopePlan, method: str
) -> RopeSplit:
    heads, turned, device = len(source.W_Q), 2 * facts.pairs, source.W_Q.device
    W_Q, W_K, latent_inputs = source.W_Q, source.W_K, source.W_K.shape[2]
    if source.b_Q is not None and source.b_K is not None:
        W_Q, W_K = (torch.cat((w, b[..., None]), dim=2) for w, b in ((W_Q, source.b_Q), (W_K, source.b_K)))
    if not facts.pairs:
        return RopeSplit(W_UQ=W_Q, W_QR=W_Q[:, :0], W_KR=W_K[0, :0], W_K_nope=W_K[..., :latent_inputs], cost=0.0)
    # The amplitude of cos and sin scales both sides of every score of the rotating part.
    gain = facts.attention_scaling**2
    if moments is not None and method == "weighted":
        energy, key_pairs = moments.pair_energy / moments.counts[0], torch.view_as_complex(moments.key_pairs)
        rotation = mean_rotation(moments.turned_energy, moments.pair_energy)
        # A frequency that loses nothing still prefers its strongest direction, hence the floor.
        lost = (energy * (1 - rotation.abs() ** 2).clamp_min(1e-9)).unflatten(0, (len(W_K), -1)).sum(1)
        lost = lost / key_pairs.diagonal(dim1=1, dim2=2).real.T.clamp_min(TINY)
    else:
        # What TransMLA does, and all that weights alone can tell: a lost rotation becomes the identity, all
        # queries alike.
        rotation = torch.ones(heads, facts.pairs, dtype=torch.complex128, device=device)
        lost = torch.ones(len(W_K), facts.pairs, dtype=torch.float64, device=device)
        covariance = _white(source, W_K.shape[2])
        if moments is not None:
            covariance = moments.input / moments.tokens
            covariance = covariance if W_K.shape[2] > latent_inputs else covariance[:-1, :-1]
        key = to_complex(W_K[:, :turned]).transpose(0, 1)
        key_pairs = key @ covariance.to(key.dtype) @ key.mH
    split = split_rope(W_Q[:, :turned], W_K[:, :turned], plan, key_pairs, gain * rotation, lost)
    return replace(
        split,
        W_UQ=torch.cat((split.W_UQ, W_Q[:, turned:]), dim=1),
        W_K_nope=torch.cat((split.W_K_nope, W_K[:, turned:]), dim=1)[..., :latent_inputs],
    )


def _white(source: SourceAttention, inputs: int) -> Tensor:
    """Second moment of the latent's inputs that weights alone can tell: of h with unit covariance.

    The identity where the latent is fed with h; of keys and values that the layer makes of normal h (seeded) otherwise,
    as W_K and W_V, which then only select, tell nothing.
    """
    device = source.W_Q.device
    if source.front is None:
        return torch.eye(inputs, dtype=torch.float64, device=device)
    generator = torch.Generator().manual_seed(0)
    h = torch.randn(WHITE_DRAWS * inputs, source.W_O.shape[1], dtype=torch.float64, generator=generator).to(device)
    _, key, value = source_heads(source.front, h[None])
    x = keys_values(key, value)[0]
    return x.T @ x / len(x)


def _blocks(
    source: SourceAttention,
    split: RopeSplit,
    moments: LayerMoments | None,
    spec: SourceSpec,
    facts: LayerFacts,
    method: str,
) -> tuple[list[Block], Tensor]:
    """Key blocks then value blocks, one per KV head; the second moment that the truncated SVD starts from."""
    eye = torch.eye(spec.source_head_dim, dtype=torch.float64, device=source.W_Q.device)
    rows = [*split.W_K_nope, *source.W_V]
    groups = spec.num_key_value_heads
    if moments is None:
        white = _white(source, source.W_V.shape[2])
        return [Block(row, eye, white) for row in rows], white
    covariance = moments.input[:-1, :-1] / moments.tokens
    if method != "weighted":
        # Norm balance: keys and values count alike whatever their scale (TransMLA, section 4.3).
        key_energy = sum((((w @ covariance) * w).sum() for w in split.W_K_nope), torch.zeros(()))
        value_energy = sum((((w @ covariance) * w).sum() for w in source.W_V), torch.zeros(()))
        energies = [key_energy] * groups + [value_energy] * groups
        balance = [eye / energy.clamp_min(1e-300) for energy in energies]
        return [Block(row, m, covariance) for row, m in zip(rows, balance, strict=True)], covariance
    blocks = [*_key_blocks(split, moments, spec, facts), *_value_blocks(source, moments, spec)]
    return [Block(b.W, b.M, shrunk(b.C)) for b in blocks], covariance


def shrunk(moment: Tensor) -> Tensor:
    """moment plus SHRINKAGE of its mean eigenvalue in every direction.

    Inputs the calibration text never showed then count a little, so up-projections stay tame there: without
    it a tiny model whose text has few distinct tokens gets a singular value of 582 beside a next largest of
    3.4.
    """
    eye = torch.eye(len(moment), dtype=moment.dtype, device=moment.device)
    return moment + SHRINKAGE * moment.diagonal().mean() * eye


def _key_blocks(split: RopeSplit, moments: LayerMoments, spec: SourceSpec, facts: LayerFacts) -> list[Block]:
    """M = E[q~ q~^T] weighted by tr(J^T J), C = E[J^T J] + PLAIN_SHARE E[h h^T], of a KV head's queries together."""
    rotation = mean_rotation(moments.turned_energy, moments.pair_energy)
    turn = folded_rotation(facts.attention_scaling**2 * rotation, spec.source_head_dim)
    per_group = (spec.num_key_value_heads, -1)
    query = (turn @ moments.query_at_key @ turn.transpose(1, 2)).unflatten(0, per_group).sum(1)
    trace = moments.key_trace.unflatten(0, per_group).sum(1).clamp_min(TINY)
    scale = facts.softmax_scale**2 / moments.counts[1]
    plain = moments.input[:-1, :-1] / moments.input[:-1, :-1].trace().clamp_min(TINY)
    mixed = [key + PLAIN_SHARE * key.trace() * plain for key in moments.key]
    return [Block(row, scale * query[j] / trace[j], mixed[j]) for j, row in enumerate(split.W_K_nope)]


def _value_blocks(source: SourceAttention, moments: LayerMoments, spec: SourceSpec) -> list[Block]:
    """M = W_O^T W_O summed over the query heads of a KV head, C = E[hbar hbar^T] of those heads."""
    per_group = (spec.num_key_value_heads, -1)
    metric = (source.W_O.transpose(1, 2) @ source.W_O).unflatten(0, per_group).sum(1)
    averaged = moments.value / (moments.counts[0] * (spec.num_attention_heads // spec.num_key_value_heads))
    return [Block(row, metric[j], averaged[j]) for j, row in enumerate(source.W_V)]


def folded_rotation(
    rotation: Tensor, source_head_dim: int
) -> Float[Tensor, "num_heads source_head_dim source_head_dim"]:
    """conj(c) as a real matrix on canonical rows: q~ = conj(c) chi; the identity on what never rotates."""
    re, im = torch.diag_embed(rotation.real), torch.diag_embed(rotation.imag)
    turned = torch.cat((torch.cat((re, im), dim=2), torch.cat((-im, re), dim=2)), dim=1)
    if turned.shape[1] == source_head_dim:
        return turned
    rest = torch.eye(source_head_dim - turned.shape[1], dtype=turned.dtype, device=turned.device)
    return torch.stack([torch.block_diag(head, rest) for head in turned])


def _layer(
    source: SourceAttention, split: RopeSplit, found: Factors, spec: SourceSpec, facts: LayerFacts, plan: RopePlan
) -> MLALayer:
    groups = spec.num_key_value_heads
    per_group = spec.num_attention_heads // groups
    # Where every pair has a slot, nothing of the rotating rows is left.
    kept = slice(2 * facts.pairs if plan.keeps_everything else 0, None)
    W_UQ, W_QR, W_KR = split.W_UQ[:, kept], split.W_QR, split.W_KR
    b_UQ, b_QR, b_KR = None, None, None
    if source.b_Q is not None and source.b_K is not None:
        W_UQ, W_QR, W_KR, b_UQ, b_QR, b_KR = (
            *(w[..., :-1] for w in (W_UQ, W_QR, W_KR)),
            *(w[..., -1] for w in (W_UQ, W_QR, W_KR)),
        )
    return MLALayer(
        W_UQ=W_UQ,
        W_QR=W_QR,
        W_DKV=found.W_DKV,
        W_KR=W_KR,
        W_UK=torch.stack(found.ups[:groups])[:, kept].repeat_interleave(per_group, 0),
        W_UV=torch.stack(found.ups[groups:]).repeat_interleave(per_group, 0),
        W_O=source.W_O,
        inv_freq=facts.inv_freq[list(plan.source_index)].to(source.W_Q.device),
        softmax_scale=facts.softmax_scale,
        attention_scaling=facts.attention_scaling,
        b_UQ=b_UQ,
        b_QR=b_QR,
        b_KR=b_KR,
        b_O=source.b_O,
        softcap=facts.softcap,
        sinks=source.sinks,
        window=facts.window,
        front=source.front,
        columns=tuple(facts.columns[pair] for pair in plan.source_index),
    )
