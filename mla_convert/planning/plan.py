"""plan: what a conversion would save and need, from config.json and weight headers; no weights are read."""

from __future__ import annotations

import dataclasses
import platform
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import mla_convert
from mla_convert.interface import report
from mla_convert.interface.plan_recipe import PlanRecipe, memory_bytes, tokens, tp_sizes
from mla_convert.planning.cache_plan import Costs, Kind, Rank, Serving, costs, kinds, planned_size, ranks, serving
from mla_convert.planning.engines import Verdict, checklist, stock_obstacles
from mla_convert.source.attention_shape import ITEMSIZE, AttentionShape, count_parameters, read_shape

if TYPE_CHECKING:
    from mla_convert.planning.rate_distortion import Curve


@dataclass(frozen=True)
class PlanResult:
    """Everything `plan` says. context: tokens. size: kv_lora_rank, qk_rope_head_dim. memory: usable bytes of a GPU and
    bytes of the weights, None where no GPU was named. before, after: of one layer. serving None: no GPU, or
    nothing fits. curve: where a target was named.
    """

    model: str
    shape: AttentionShape
    size: tuple[int, int]
    context: int
    batch: int
    cache_dtype: str
    kinds: tuple[Kind, ...]
    before: Costs
    after: Costs
    ranks: tuple[Rank, ...]
    memory: tuple[int, int] | None
    serving: Serving | None
    obstacles: tuple[str, ...]
    checklist: tuple[Verdict, ...]
    curve: Curve | None

    def to_json(self) -> dict[str, Any]:
        """Plain JSON values, with the versions."""
        versions = {"mla_convert": mla_convert.__version__, "python": platform.python_version()}
        return {**dataclasses.asdict(self), "versions": versions}


def plan(recipe: PlanRecipe) -> PlanResult:
    """Plan the conversion of recipe.model; writes recipe.json and recipe.plot where they are named.

    Raises BadCheckpoint or UnsupportedSource when the config cannot be read, BadOption for an impossible size or path.
    """
    report.check_targets(recipe.json, recipe.plot)
    report.check_targets(None, recipe.curve)
    shape = read_shape(recipe.model)
    curve = _curve(recipe) if recipe.wants_curve else None
    asked = recipe.kv_lora_rank, recipe.qk_rope_head_dim
    if curve is not None and curve.chosen is not None and asked == (None, None):
        asked = curve.chosen.kv_lora_rank, curve.chosen.qk_rope_head_dim
    size = planned_size(shape, *asked)
    context, tp = tokens(recipe.context), tp_sizes(recipe.tp)
    memory = None
    if recipe.gpu_memory is not None:
        memory = int(memory_bytes(recipe.gpu_memory) * recipe.memory_fraction), weight_bytes(recipe.model, shape)
    rows = ranks(shape, size, recipe.cache_dtype, context, tp, memory)
    before, after = costs(shape, size, recipe.cache_dtype, context)
    result = PlanResult(
        model=recipe.model,
        shape=shape,
        size=size,
        context=context,
        batch=recipe.batch,
        cache_dtype=recipe.cache_dtype,
        kinds=tuple(kinds(shape, size, recipe.cache_dtype, recipe.batch, context)),
        before=before,
        after=after,
        ranks=tuple(rows),
        memory=memory,
        serving=None if memory is None else serving(shape, rows, memory),
        obstacles=tuple(stock_obstacles(shape)),
        checklist=tuple(checklist(shape, size, recipe.cache_dtype, tp)),
        curve=curve,
    )
    if recipe.json is not None:
        report.write_json(result.to_json(), recipe.json)
    if recipe.plot is not None:
        from mla_convert.planning.plan_report import plot_plan

        plot_plan(result, Path(recipe.plot))
    return result


def _curve(recipe: PlanRecipe) -> Curve:
    # here, because it loads torch and the models' code
    from mla_convert.planning.curve_report import plot_curve
    from mla_convert.planning.rate_distortion import rate_distortion

    curve = rate_distortion(recipe)
    if recipe.curve is not None:
        plot_curve(curve, recipe.model, Path(recipe.curve))
    return curve


def weight_bytes(model: str, shape: AttentionShape) -> int:
    """Bytes of the weights: from the headers, else the parameters of the class in the config's type."""
    if shape.weight_bytes is not None:
        return shape.weight_bytes
    return count_parameters(model) * ITEMSIZE[shape.dtype]
