"""What a rate-distortion curve is made of: its sizes, the ways to place the slots, and the windows of text."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from mla_convert.calibration.texts import check_ids, read_documents, token_windows, with_conversations
from mla_convert.conversion.rope import RopePlan, ladder_plan, ladder_strides
from mla_convert.conversion.sizes import seeing_widths, source_numbers
from mla_convert.errors import BadOption
from mla_convert.interface.plan_recipe import PlanRecipe
from mla_convert.planning.cache_plan import BYTES
from mla_convert.source.families import SourceSpec
from mla_convert.source.loading import load_tokenizer

STEPS = 12  # sizes of the curve: this many equal parts of the source's numbers, the first two and the last left out
ROPE_STEPS = 4  # qk_rope_head_dim is tried in steps of source_head_dim over this
HELD_OUT_SHARE = 4  # one held-out window per this many calibration windows


def totals_of(recipe: PlanRecipe, spec: SourceSpec) -> list[int]:
    """Sizes of the curve, small to large; with --target-bytes also exactly that one."""
    whole = source_numbers(spec)
    totals = {whole * step // STEPS for step in range(2, STEPS)}
    if recipe.target_bytes is not None:
        wanted = recipe.target_bytes // (BYTES[recipe.cache_dtype] * spec.num_hidden_layers)
        if not 3 <= wanted < whole:
            per_number = BYTES[recipe.cache_dtype] * spec.num_hidden_layers
            raise BadOption(
                f"target_bytes={recipe.target_bytes} is {wanted} numbers per token and layer in {recipe.cache_dtype}; "
                f"name {3 * per_number:,} to {(whole - 1) * per_number:,} (the source caches {whole} numbers)"
            )
        totals.add(wanted)
    return sorted(total for total in totals if total >= 3)


def rope_plans(spec: SourceSpec, window: int) -> list[RopePlan]:
    """The ways to place rotating slots that are tried: a few widths, the fastest pairs or pairs spread out."""
    d = spec.source_head_dim
    step = max(2, d // ROPE_STEPS // 2 * 2)
    plans = []
    for rope in sorted({*range(step, d + 1, step), *seeing_widths(spec, window)}):
        strides = ladder_strides(d, rope)
        plans += [ladder_plan(spec, rope, stride) for stride in sorted({strides[0], strides[-1]})]
    return plans


def windows_of(recipe: PlanRecipe, spec: SourceSpec, documents: list[str]) -> tuple[Tensor, Tensor]:
    """Windows [windows, tokens] that predictions are made from, and those that measure."""
    tokenizer: Any = load_tokenizer(recipe.model)

    def windows(texts: list[str], wanted: int, least: int = 1) -> Tensor:
        ids = token_windows(tokenizer, texts, recipe.window, wanted)
        check_ids(ids, spec.vocab_size, recipe.model)
        if len(ids) < least:
            raise BadOption(
                f"the text gives {len(ids)} window of {recipe.window} tokens, and one more must be held out; give more "
                "text with --calib-data, others with --eval-data, or a smaller --window"
            )
        return ids

    measuring = max(1, recipe.calib_windows // HELD_OUT_SHARE)
    if recipe.eval_data:
        others = read_documents(recipe.eval_data)
        return with_conversations(tokenizer, windows(documents, recipe.calib_windows)), windows(others, measuring)
    ids = with_conversations(tokenizer, windows(documents, recipe.calib_windows + measuring, 2))
    held_out = ids[: max(1, len(ids) // (HELD_OUT_SHARE + 1))]
    return ids[len(held_out) :], held_out
