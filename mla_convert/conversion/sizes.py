"""Which latent ranks and rotating slots a recipe allows for a source, checked before anything is computed."""

import math
from dataclasses import dataclass

from mla_convert.conversion.rope import (
    RopePlan,
    ladder_plan,
    ladder_strides,
    lossless_plan,
    native_lossless_plan,
    native_plan,
    stride_fits,
)
from mla_convert.errors import BadOption
from mla_convert.interface.recipe import ConvertRecipe
from mla_convert.source.families import SourceSpec
from mla_convert.source.features import LayerFacts

# SmolLM2 calibrated on windows of 1,024 tokens, excess nats per token at 144 + 48, whose eight slowest pairs lose their
# rotation: 0.19 up to position 1,024 and 1.43 at 8,192, where they have turned by 0.1 to 1.4 radians. At 128 + 64,
# which keeps a slot for every frequency: 0.18 and 0.19.
UNSEEN_TURN = 0.3
SPLIT_STEPS = 8  # with --cache-ratio, qk_rope_head_dim is tried in steps of source_head_dim / 8


@dataclass(frozen=True, eq=False)
class Size:
    """One candidate: numbers of the latent, and the slots that give qk_rope_head_dim."""

    kv_lora_rank: int
    plan: RopePlan

    def __str__(self) -> str:
        stride = "" if self.plan.stride is None else f", stride {self.plan.stride}"
        return f"kv_lora_rank {self.kv_lora_rank} + qk_rope_head_dim {self.plan.qk_rope_head_dim}{stride}"


def of_layer(spec: SourceSpec, facts: LayerFacts, size: Size) -> Size:
    """What `size` means for one layer: where nothing rotates, the rotating numbers go to the latent."""
    if facts.pairs:
        return size
    plan = RopePlan((), {}, size.plan.stride)
    full = full_rank(spec, 0)
    return Size(full if plan.keeps_everything else min(full, size.kv_lora_rank + size.plan.qk_rope_head_dim), plan)


def source_numbers(spec: SourceSpec) -> int:
    """Numbers the source caches per token and layer."""
    return 2 * spec.num_key_value_heads * spec.source_head_dim


def full_rank(spec: SourceSpec, qk_rope_head_dim: int) -> int:
    """Rank of [W_K; W_V] left after `qk_rope_head_dim` rotating dimensions."""
    return min(spec.latent_inputs, source_numbers(spec) - qk_rope_head_dim)


def allowed_sizes(recipe: ConvertRecipe, spec: SourceSpec, native: bool = False) -> list[Size]:
    """Every size the recipe leaves open, at least one, for the stock or the native format.

    Raises BadOption for what does not fit.
    """
    if recipe.lossless:
        plan = native_lossless_plan(spec) if native else lossless_plan(spec)
        return [Size(full_rank(spec, plan.qk_rope_head_dim), plan)]
    if recipe.cache_ratio is not None:
        return _split_sizes(recipe, spec, recipe.cache_ratio, native)
    assert recipe.kv_lora_rank is not None and recipe.qk_rope_head_dim is not None  # the recipe checked it
    rank, rope = recipe.kv_lora_rank, recipe.qk_rope_head_dim
    rotating = 2 * spec.pairs
    if rope > rotating:
        raise BadOption(
            f"qk_rope_head_dim={rope} exceeds {rotating}, what rotates of a head of the source, and the "
            "ladder has one slot per frequency; "
            f"use --qk-rope-head-dim {rotating} or less, or --lossless"
        )
    if rank > full_rank(spec, rope):
        raise BadOption(
            f"kv_lora_rank={rank} exceeds {full_rank(spec, rope)}, the rank of [W_K; W_V] left after {rope} "
            f"rotating dimensions; use --kv-lora-rank {full_rank(spec, rope)} or less"
        )
    return _least_doubtful([Size(rank, plan) for plan in _plans(recipe, spec, rope, native)], spec, recipe.window)


def _least_doubtful(sizes: list[Size], spec: SourceSpec, window: int) -> list[Size]:
    """Those with the fewest `doubts`."""
    found = [doubts(spec, size, window) for size in sizes]
    least = min(found)
    return [size for size, each in zip(sizes, found, strict=True) if each == least]


def doubts(spec: SourceSpec, size: Size, window: int) -> tuple[bool, bool]:
    """What neither prediction nor held-out windows can judge: a latent less than half as large as the rotating key
    (6 + 58 keeps every rotation and loses 4.2 nats), and rotations lost unseen.
    """
    return 2 * size.kv_lora_rank < size.plan.qk_rope_head_dim, bool(unseen_pairs(spec, size.plan, window))


def unseen_pairs(spec: SourceSpec, plan: RopePlan, window: int) -> list[int]:
    """Pairs without a slot whose rotation windows of `window` tokens cannot show, though the model's context does.

    They turn by less than a full turn within the window, and by UNSEEN_TURN radians or more beyond it. Losing such a
    pair looks free on every window and grows with the position.
    """
    unseen = set[int]()
    for facts in spec.layers:
        reach = min(spec.max_position_embeddings, facts.window or spec.max_position_embeddings)
        for pair, frequency in enumerate(facts.inv_freq.tolist()):
            lost = pair not in plan.source_index
            if lost and frequency * window < 2 * math.pi and frequency * (reach - window) >= UNSEEN_TURN:
                unseen.add(pair)
    return sorted(unseen)


def seeing_widths(spec: SourceSpec, window: int) -> set[int]:
    """The least qk_rope_head_dim that keeps every rotation which no window would show, with the fastest pairs in slots.

    Slower pairs turn too little in the whole context to need one. Empty where every rotation is seen.
    """
    unseen = unseen_pairs(spec, RopePlan((), {}, 1), window)
    return {2 * (unseen[-1] + 1)} if unseen else set()


def _plans(recipe: ConvertRecipe, spec: SourceSpec, rope: int, native: bool) -> list[RopePlan]:
    plan = native_plan if native else ladder_plan
    if recipe.rope_stride != "auto":
        return [plan(spec, rope, int(recipe.rope_stride))]
    return [plan(spec, rope, stride) for stride in ladder_strides(2 * spec.pairs, rope)]


def _split_sizes(recipe: ConvertRecipe, spec: SourceSpec, ratio: float, native: bool) -> list[Size]:
    budget, rotating = int(ratio * source_numbers(spec)), 2 * spec.pairs
    step = max(2, rotating // SPLIT_STEPS // 2 * 2)
    sizes = [
        Size(budget - rope, plan)
        for rope in sorted({*range(step, rotating + 1, step), *seeing_widths(spec, recipe.window)})
        if 1 <= budget - rope <= full_rank(spec, rope)
        for plan in _fitting_plans(recipe, spec, rope, native)
    ]
    if not sizes:
        raise BadOption(
            f"cache_ratio={ratio} is {budget} of the source's {source_numbers(spec)} numbers per token and "
            f"layer, which no split into a latent and {step} to {rotating} rotating numbers "
            "gives; give --kv-lora-rank and --qk-rope-head-dim, or --lossless"
        )
    return _least_doubtful(sizes, spec, recipe.window)


def _fitting_plans(recipe: ConvertRecipe, spec: SourceSpec, rope: int, native: bool) -> list[RopePlan]:
    if recipe.rope_stride != "auto" and not stride_fits(2 * spec.pairs, rope, int(recipe.rope_stride)):
        return []
    return _plans(recipe, spec, rope, native)
