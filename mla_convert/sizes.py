"""Which latent ranks and rotating slots a recipe allows for a source, checked before anything is computed."""

from dataclasses import dataclass

from mla_convert.errors import BadOption
from mla_convert.families import SourceSpec
from mla_convert.recipe import ConvertRecipe
from mla_convert.rope import RopePlan, ladder_plan, ladder_strides, lossless_plan, stride_fits

SPLIT_STEPS = 8  # with --cache-ratio, qk_rope_head_dim is tried in steps of source_head_dim / 8


@dataclass(frozen=True, eq=False)
class Size:
    """One candidate: numbers of the latent, and the slots that give qk_rope_head_dim."""

    kv_lora_rank: int
    plan: RopePlan

    def __str__(self) -> str:
        stride = "" if self.plan.stride is None else f", stride {self.plan.stride}"
        return f"kv_lora_rank {self.kv_lora_rank} + qk_rope_head_dim {self.plan.qk_rope_head_dim}{stride}"


def source_numbers(spec: SourceSpec) -> int:
    """Numbers the source caches per token and layer."""
    return 2 * spec.num_key_value_heads * spec.source_head_dim


def full_rank(spec: SourceSpec, qk_rope_head_dim: int) -> int:
    """Rank of [W_K; W_V] left after `qk_rope_head_dim` rotating dimensions."""
    return min(spec.hidden_size, source_numbers(spec) - qk_rope_head_dim)


def allowed_sizes(recipe: ConvertRecipe, spec: SourceSpec) -> list[Size]:
    """Every size the recipe leaves open, at least one. Raises BadOption for what does not fit."""
    if recipe.lossless:
        plan = lossless_plan(spec)
        return [Size(full_rank(spec, plan.qk_rope_head_dim), plan)]
    if recipe.cache_ratio is not None:
        return _split_sizes(recipe, spec, recipe.cache_ratio)
    assert recipe.kv_lora_rank is not None and recipe.qk_rope_head_dim is not None  # the recipe checked it
    rank, rope = recipe.kv_lora_rank, recipe.qk_rope_head_dim
    if rope > spec.source_head_dim:
        raise BadOption(
            f"qk_rope_head_dim={rope} exceeds {spec.source_head_dim}, the source's head width, and the "
            "ladder has one slot per frequency; "
            f"use --qk-rope-head-dim {spec.source_head_dim} or less, or --lossless"
        )
    if rank > full_rank(spec, rope):
        raise BadOption(
            f"kv_lora_rank={rank} exceeds {full_rank(spec, rope)}, the rank of [W_K; W_V] left after {rope} "
            f"rotating dimensions; use --kv-lora-rank {full_rank(spec, rope)} or less"
        )
    return [Size(rank, plan) for plan in _plans(recipe, spec, rope)]


def _plans(recipe: ConvertRecipe, spec: SourceSpec, rope: int) -> list[RopePlan]:
    if recipe.rope_stride != "auto":
        return [ladder_plan(spec, rope, int(recipe.rope_stride))]
    return [ladder_plan(spec, rope, stride) for stride in ladder_strides(spec.source_head_dim, rope)]


def _split_sizes(recipe: ConvertRecipe, spec: SourceSpec, ratio: float) -> list[Size]:
    budget = int(ratio * source_numbers(spec))
    step = max(2, spec.source_head_dim // SPLIT_STEPS // 2 * 2)
    sizes = [
        Size(budget - rope, plan)
        for rope in range(step, spec.source_head_dim + 1, step)
        if 1 <= budget - rope <= full_rank(spec, rope)
        for plan in _fitting_plans(recipe, spec, rope)
    ]
    if not sizes:
        raise BadOption(
            f"cache_ratio={ratio} is {budget} of the source's {source_numbers(spec)} numbers per token and "
            f"layer, which no split into a latent and {step} to {spec.source_head_dim} rotating numbers "
            "gives; give --kv-lora-rank and --qk-rope-head-dim, or --lossless"
        )
    return sizes


def _fitting_plans(recipe: ConvertRecipe, spec: SourceSpec, rope: int) -> list[RopePlan]:
    if recipe.rope_stride != "auto" and not stride_fits(spec.source_head_dim, rope, int(recipe.rope_stride)):
        return []
    return _plans(recipe, spec, rope)
