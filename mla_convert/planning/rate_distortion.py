"""Predicted loss against cache size, before any conversion: which size loses how much, and how to split it.

One calibration pass gives every layer's moments. For each way to place the rotating slots one decomposition per layer
tells the loss of the truncated SVD at every latent rank (`assemble.predict`); the best slots are taken at every size,
and one sweep of the fit tells what the conversion itself will lose there. The sum over layers orders sizes but is no
loss in nats, so a few sizes are measured on held-out windows, layer by layer in memory, and they tell the law by which
predictions become nats (nats.py).
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
from torch import Tensor

from mla_convert.calibration.calibrate import KeptMoments, LayerMoments, calibrate
from mla_convert.calibration.stream import LayerStream
from mla_convert.calibration.texts import read_documents, text_hash
from mla_convert.conversion.assemble import LayerReport, assemble, predict
from mla_convert.conversion.choose import converted_nll
from mla_convert.conversion.sizes import Size, doubts, full_rank, source_numbers
from mla_convert.errors import BadOption
from mla_convert.formats.layer import MLALayer
from mla_convert.interface.plan_recipe import PlanRecipe
from mla_convert.interface.report import progress
from mla_convert.planning.cache_plan import BYTES
from mla_convert.planning.curve_inputs import rope_plans, totals_of, windows_of
from mla_convert.planning.nats import Lost, in_nats, left_out
from mla_convert.source.checkpoint import Checkpoint
from mla_convert.source.families import SourceSpec, read_spec
from mla_convert.source.loading import resolve_device
from mla_convert.source.projections import SourceAttention, source_attention

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class CurvePoint:
    """One size at its best split. numbers: cached per token and layer. predicted: sum of `layers`, squared errors
    relative to the residual stream; rope: the part of it that lost rotations cause. nats: predicted excess per token.
    measured: on held-out windows, where it was.
    """

    numbers: int
    kv_lora_rank: int
    qk_rope_head_dim: int
    rope_stride: int | None
    bytes_per_token: int
    predicted: float
    rope: float
    layers: tuple[float, ...]
    nats: float
    measured: float | None


@dataclass(frozen=True)
class Curve:
    """Sizes from small to large. off: how far each measured size between others lies from what those say of it,
    relative; chosen: the size that meets the target, None where none does. eval_data: what was measured on, where that
    is another text than the predictions were made from.
    """

    points: tuple[CurvePoint, ...]
    off: tuple[float, ...]
    source_numbers: int
    source_nll: float
    calibration_tokens: int
    held_out_tokens: int
    text_sha256: str
    eval_data: tuple[str, ...]
    method: str
    target: str
    chosen: CurvePoint | None


@dataclass(frozen=True, eq=False)
class _Work:
    recipe: PlanRecipe
    checkpoint: Checkpoint
    spec: SourceSpec
    stream: LayerStream
    kept: KeptMoments

    def moments(self, layer: int) -> LayerMoments | None:
        return None if self.recipe.method == "svd" else self.kept.load(layer)

    def source(self, layer: int) -> SourceAttention:
        front = self.stream.front(layer)
        return source_attention(self.checkpoint, self.spec, layer, self.stream.device, front)

    def assembled(self, layer: int, size: Size, sweeps: int) -> tuple[MLALayer, LayerReport]:
        return assemble(self.source(layer), self.moments(layer), self.spec, size, self.recipe.method, sweeps)


def rate_distortion(recipe: PlanRecipe) -> Curve:
    """The curve of recipe.model and the size that meets the target.

    Raises BadOption for an impossible target or text, UnsupportedSource for a model `convert` does not take.
    """
    checkpoint = Checkpoint.open(recipe.model)
    spec = read_spec(checkpoint)
    device = resolve_device(recipe.device)
    totals = totals_of(recipe, spec)
    documents = read_documents(recipe.calib_data, part="calib")
    calibration, held_out = windows_of(recipe, spec, documents)
    stream = LayerStream(checkpoint, spec, device)
    with TemporaryDirectory(prefix="mla_convert_") as scratch:
        work = _Work(recipe, checkpoint, spec, stream, KeptMoments(Path(scratch), spec, device))
        if recipe.method != "svd":
            with progress("calibrating", "windows x layers", len(calibration) * spec.num_hidden_layers) as advance:
                for layer, moments in enumerate(calibrate(stream, calibration, recipe.seed, advance)):
                    assert moments is not None  # no layer is kept as it is
                    work.kept.keep(layer, moments)
        best = _best_splits(work, totals)
        source_nll, measured, seen = _measure(work, held_out, [size for size, _ in best])
        best = _fitted(work, best, seen)
    lost = [Lost(sum(r.rope for r in reports), sum(r.end for r in reports)) for _, reports in best]
    pairs = [(lost[i], excess) for i, excess in measured.items()]
    points = tuple(
        CurvePoint(
            numbers=total,
            kv_lora_rank=size.kv_lora_rank,
            qk_rope_head_dim=size.plan.qk_rope_head_dim,
            rope_stride=size.plan.stride,
            bytes_per_token=total * BYTES[recipe.cache_dtype] * spec.num_hidden_layers,
            predicted=lost[index].total,
            rope=lost[index].rope,
            layers=tuple(report.total for report in reports),
            nats=in_nats(lost[index], pairs),
            measured=measured.get(index),
        )
        for index, (total, (size, reports)) in enumerate(zip(totals, best, strict=True))
    )
    return Curve(
        points=points,
        off=tuple(left_out(pairs)),
        source_numbers=source_numbers(spec),
        source_nll=source_nll,
        calibration_tokens=calibration.numel(),
        held_out_tokens=held_out.numel(),
        text_sha256=text_hash(documents),
        eval_data=recipe.eval_data,
        method=recipe.method,
        target=_target(recipe),
        chosen=_chosen(recipe, points),
    )


def _best_splits(work: _Work, totals: list[int]) -> list[tuple[Size, list[LayerReport]]]:
    """For every total the split with the least prediction, and that prediction layer by layer.

    Splits that `doubts` names are predicted too low: only where nothing else fits.
    """
    spec, plans = work.spec, rope_plans(work.spec, work.recipe.window)
    fitting = [
        [
            t - plan.qk_rope_head_dim
            for t in totals
            if 1 <= t - plan.qk_rope_head_dim <= full_rank(spec, plan.qk_rope_head_dim)
        ]
        for plan in plans
    ]
    losses: list[list[dict[int, LayerReport]]] = [[] for _ in plans]  # [plan][layer][rank]
    with progress("predicting", "layers", spec.num_hidden_layers * len(plans)) as advance:
        for layer in range(spec.num_hidden_layers):
            source, moments = work.source(layer), work.moments(layer)
            for place, (plan, ranks) in enumerate(zip(plans, fitting, strict=True)):
                losses[place].append(predict(source, moments, spec, plan, ranks, work.recipe.method) if ranks else {})
                advance(1)
    best = []
    for total in totals:
        choices = [
            (
                doubts(spec, Size(total - plan.qk_rope_head_dim, plan), work.recipe.window),
                sum(by_rank[total - plan.qk_rope_head_dim].total for by_rank in losses[place]),
                place,
            )
            for place, plan in enumerate(plans)
            if total - plan.qk_rope_head_dim in fitting[place]
        ]
        if not choices:
            least = min(plan.qk_rope_head_dim for plan in plans) + 1
            raise BadOption(f"{total} numbers per token and layer leave no latent; use {least} or more")
        place = min(choices)[2]
        rank = total - plans[place].qk_rope_head_dim
        best.append((Size(rank, plans[place]), [by_rank[rank] for by_rank in losses[place]]))
    return best


def _fitted(
    work: _Work, best: list[tuple[Size, list[LayerReport]]], seen: dict[int, list[LayerReport]]
) -> list[tuple[Size, list[LayerReport]]]:
    """The same splits with what the layers lose after one sweep of the fit, as they are measured (`seen`, by place).

    The truncated SVD alone predicts badly: SmolLM2 at 352, 192 and 128 of 384 numbers loses 4.0, 0.9 and 2.1 nats per
    unit of its loss, and 4.0, 2.9 and 4.1 per unit of the fit's.
    """
    if work.recipe.method != "weighted":
        return best
    layers = work.spec.num_hidden_layers
    found = dict(seen)
    with progress("fitting", "layers", layers * (len(best) - len(seen))) as advance:
        for place in set(range(len(best))) - set(seen):
            found[place] = []
            for layer in range(layers):
                found[place].append(work.assembled(layer, best[place][0], 1)[1])
                advance(1)
    return [(size, found[place]) for place, (size, _) in enumerate(best)]


@torch.no_grad()
def _measure(
    work: _Work, held_out: Tensor, sizes: list[Size]
) -> tuple[float, dict[int, float], dict[int, list[LayerReport]]]:
    """Nats per token of the source, and by place in `sizes`, spread over them, the excess on `held_out` and what each
    layer is predicted to lose as it was measured.
    """
    count = min(work.recipe.measured, len(sizes))
    places = sorted({round(i * (len(sizes) - 1) / (count - 1)) for i in range(count)})
    layers = work.spec.num_hidden_layers
    measured, seen = dict[int, float](), dict[int, list[LayerReport]]()
    with progress("measuring", "layers", layers * (len(places) + 1)) as advance:
        states = work.stream.embed(held_out)
        for layer in range(layers):
            states = work.stream.run(work.stream.load(layer), states)
            advance(1)
        source_nll = work.stream.nll(states, held_out)
        for place in places:
            lost = seen[place] = list[LayerReport]()

            def assembled(
                layer: int, size: Size, sweeps: int, lost: list[LayerReport] = lost
            ) -> tuple[MLALayer, LayerReport]:
                converted, report = work.assembled(layer, size, sweeps)
                lost.append(report)
                return converted, report

            measured[place] = converted_nll(work.stream, held_out, sizes[place], assembled, advance) - source_nll
            logger.info("%s: %+.4f nats per token on held-out windows", sizes[place], measured[place])
    return source_nll, measured, seen


def _target(recipe: PlanRecipe) -> str:
    if recipe.target_loss is not None:
        return f"{recipe.target_loss:g} nats per token"
    return f"{recipe.target_bytes:,} B per token"


def _chosen(recipe: PlanRecipe, points: Sequence[CurvePoint]) -> CurvePoint | None:
    if recipe.target_bytes is not None:
        return max(
            (p for p in points if p.bytes_per_token <= recipe.target_bytes), key=lambda p: p.numbers, default=None
        )
    assert recipe.target_loss is not None
    return next((point for point in points if point.nats <= recipe.target_loss), None)
