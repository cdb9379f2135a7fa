"""Checks of a converted model by running it: against its source, its cache, its padding, its absorbed
form.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel

from mla_convert.evaluation.evaluate import cache_bytes
from mla_convert.evaluation.scoring import padded_inputs, padded_windows
from mla_convert.formats.absorbed import absorb, attend_absorbed
from mla_convert.formats.layer import attend_expanded
from mla_convert.formats.stock import read_stock_layer
from mla_convert.source.cache_size import layer_numbers
from mla_convert.source.features import layer_windows
from mla_convert.source.loading import cache_name
from mla_convert.verification.check_files import Check

POSITIONS = (0, 1, 7, 100)  # and the last; RoPE layouts that differ agree at 0 and part from 1 on
LOSSLESS_BOUND = 1e-4  # absolute, fp32 logits; SmolLM2-135M re-encoded exactly: 9.5e-5 at |logit| <= 40
ROUNDED_BOUND = 4.0  # KL of a lossless conversion stored in bf16 over that of the source stored in bf16: 1 expected
LOSSLESS_LOGITS = 40.0  # larger logits round more: the bound grows in proportion
CACHE_BOUND = 1e-5  # of max |logit|, fp32; SmolLM2-135M: 2.4e-6 decoding one by one, 1.2e-6 padded
CACHE_BYTES_BOUND = 1.05
LAYER_BOUND = 1e-4  # fp32 class (angles too: position x 6e-8 rad) against fp64 equations, of max |output|
ABSORB_BOUND = 1e-13  # fp64, of max |output|
CHUNK = 7


@dataclass(frozen=True)
class Agreement:
    """Distance of logits [tokens, vocab] from reference logits: absolute logits, nats, fraction of tokens."""

    max_difference: float
    mean_difference: float
    kl: float
    top1: float

    def __str__(self) -> str:
        return (
            f"max {self.max_difference:.2e}, mean {self.mean_difference:.2e}, KL {self.kl:.2e} nats, "
            f"top-1 {self.top1:.1%}"
        )


@torch.inference_mode()
def forward_logits(model: PreTrainedModel, ids: torch.Tensor) -> torch.Tensor:
    """Logits [tokens, vocab] of one sequence in one forward without a cache; fp32, or fp64 of fp64 models."""
    logits: torch.Tensor = model(input_ids=ids[None].to(model.device), use_cache=False).logits[0]
    return logits if logits.dtype == torch.float64 else logits.float()


def agreement(reference: torch.Tensor, logits: torch.Tensor) -> Agreement:
    """Of logits [tokens, vocab] with those of a reference; KL(reference || logits) in fp64."""
    difference = (logits - reference).abs()
    p, q = torch.log_softmax(reference.double(), -1), torch.log_softmax(logits.double(), -1)
    return Agreement(
        max_difference=float(difference.max()),
        mean_difference=float(difference.mean()),
        kl=float((p.exp() * (p - q)).sum(-1).mean()),
        top1=float((reference.argmax(-1) == logits.argmax(-1)).double().mean()),
    )


def agrees(
    reference: torch.Tensor,
    logits: torch.Tensor,
    source_bf16: torch.Tensor | None,
    lossless: bool,
    rounded: bool = False,
) -> list[Check]:
    """Converted logits beside the source's, overall and at single positions, and the source's own bf16
    rounding.

    A lossless conversion must agree to LOSSLESS_BOUND everywhere; stored `rounded` (bf16), its KL must stay
    within ROUNDED_BOUND times the source's own bf16 rounding. Any other is told from garbage only: its KL
    must be finite and below that of the uniform distribution, log V - H(source); `eval` says how good it is.
    """
    overall = agreement(reference, logits)
    uniform = agreement(reference, torch.zeros_like(reference)).kl
    bound: float | None = LOSSLESS_BOUND * max(1.0, float(reference.abs().max()) / LOSSLESS_LOGITS)
    bound = bound if lossless and not rounded else None
    judged = overall.max_difference <= bound if bound is not None else None
    checks = [
        Check("better than a uniform guess", overall.kl < uniform, overall.kl, uniform, "KL to the source, nats"),
        Check("logits, all positions", judged, overall.max_difference, bound, str(overall)),
    ]
    for position in [*(p for p in POSITIONS if p < len(reference) - 1), len(reference) - 1]:
        one = agreement(reference[position : position + 1], logits[position : position + 1])
        judged = one.max_difference <= bound if bound is not None else None
        checks.append(Check(f"logits, position {position}", judged, one.max_difference, bound, str(one)))
    if source_bf16 is not None:
        own = agreement(reference, source_bf16)
        checks.append(Check("source's own bf16 rounding", None, own.max_difference, None, str(own)))
        if lossless and rounded:
            most = ROUNDED_BOUND * own.kl
            detail = "KL to the source, nats; stored weights are rounded"
            checks.append(Check("lossless up to bf16 rounding", overall.kl <= most, overall.kl, most, detail))
    return checks


@torch.inference_mode()
def cached_logits(
    model: PreTrainedModel,
    ids: torch.Tensor,
    chunk: int,
    advance: Callable[[int], None] = lambda tokens: None,
) -> torch.Tensor:
    """Logits [tokens, vocab] of one sequence fed `chunk` tokens at a time through the model's own cache."""
    name = cache_name(model)
    cache: Any = None
    parts: list[torch.Tensor] = []
    for part in torch.split(ids.to(model.device), chunk):
        out = model(input_ids=part[None], use_cache=True, **{name: cache})
        cache = getattr(out, name)
        parts.append(out.logits[0])
        advance(len(part))
    return torch.cat(parts)


def cache_is_exact(
    model: PreTrainedModel,
    ids: torch.Tensor,
    full: torch.Tensor,
    advance: Callable[[int], None] = lambda tokens: None,
) -> list[Check]:
    """The same tokens as one prefill, in chunks of 7 and one by one give the logits `full` of one forward."""
    scale = float(full.abs().max())
    checks = []
    for name, chunk in (("one prefill", len(ids)), (f"chunks of {CHUNK}", CHUNK), ("one by one", 1)):
        logits = cached_logits(model, ids, chunk, advance)
        worst, note = worst_of(logits - full) / scale, ""
        if worst > CACHE_BOUND and model.dtype == torch.float32:
            # A model whose attention is near a tie amplifies rounding, which falls with precision; an error does not.
            rounded, worst = worst, _cached_difference_in_double(model, ids, chunk)
            note = f"in fp64, as fp32 rounding grew to {rounded:.1e}; "
        nll = torch.nn.functional.cross_entropy(logits[:-1].double(), ids[1:].to(logits.device))
        detail = f"{note}of max |logit| {scale:.1f}; {float(nll):.4f} nats per token over {len(ids)} tokens"
        checks.append(Check(f"cached decode == full forward, {name}", worst <= CACHE_BOUND, worst, CACHE_BOUND, detail))
    return checks


def _cached_difference_in_double(model: PreTrainedModel, ids: torch.Tensor, chunk: int) -> float:
    """What `cache_is_exact` measures, with the fp32 model in fp64 for the moment."""
    torch.nn.Module.double(model)
    try:
        full = forward_logits(model, ids)
        return worst_of(cached_logits(model, ids, chunk) - full) / float(full.abs().max())
    finally:
        torch.nn.Module.float(model)


@torch.inference_mode()
def padding_is_inert(model: PreTrainedModel, ids: torch.Tensor) -> list[Check]:
    """Three sequences of different lengths in one padded batch give the logits that each gives alone."""
    sequences = [ids[: max(2, len(ids) // part)] for part in (1, 2, 5)]
    alone = [forward_logits(model, sequence) for sequence in sequences]
    scale = max(float(logits.abs().max()) for logits in alone)
    checks = []
    for side in ("left", "right"):
        batch = padded_windows(sequences, pad_id=0, side=side)
        logits = model(**padded_inputs(batch.ids, batch.mask, model.device), use_cache=False).logits
        pairs = zip(logits, batch.mask.to(logits.device), alone, strict=True)
        worst = max(worst_of(row[mask] - single) for row, mask, single in pairs) / scale
        detail = f"lengths {', '.join(str(len(sequence)) for sequence in sequences)}; of max |logit| {scale:.1f}"
        checks.append(Check(f"padded batch == single, {side}", worst <= CACHE_BOUND, worst, CACHE_BOUND, detail))
    return checks


def cache_is_small(model: PreTrainedModel, source_bytes: int, tokens: int) -> Check:
    """Bytes really held after `tokens` tokens over those of the latents and rotating keys of all layers.

    `source_bytes`: what the source holds after as many tokens, in the same dtype. Layers with a window need to hold
    `window` tokens only, but transformers may hold them all until the next token comes.
    """
    numbers, windows = layer_numbers(model.config.to_dict()), layer_windows(model.config)
    formula = sum(numbers) * model.dtype.itemsize * tokens
    needed = (n * min(tokens, tokens if w is None else w - 1) for n, w in zip(numbers, windows, strict=True))
    least = model.dtype.itemsize * sum(needed)
    held = cache_bytes(model, tokens)
    detail = (
        f"{held // tokens:,} B per token held, formula {formula // tokens:,}; "
        f"source {source_bytes // tokens:,} ({1 - held / source_bytes:.1%} less)"
    )
    ratio = held / formula
    good = least <= held and ratio <= CACHE_BYTES_BOUND
    return Check("cache holds the latent only", good, ratio, CACHE_BYTES_BOUND, detail)


def layers_are_exact(
    model: PreTrainedModel, folder: str | Path, ids: torch.Tensor, advance: Callable[[int], None]
) -> list[Check]:
    """Every written layer on the text's inputs: stock class == expanded == absorbed equations (fp64).

    The first needs the latent norm to be linear, so it fails when the norm is not neutralised.
    """
    inputs, outputs = _attention_io(model, ids)
    positions = torch.arange(len(ids))[None]
    by_class: list[float] = []
    by_absorbed: list[float] = []
    for index, (hidden, seen) in enumerate(zip(inputs, outputs, strict=True)):
        layer = read_stock_layer(folder, index)
        expanded = attend_expanded(layer, hidden, positions)
        absorbed, _ = attend_absorbed(absorb(layer), hidden, positions)
        scale = float(expanded.abs().max()) or 1.0
        by_class.append(worst_of(seen - expanded) / scale)
        by_absorbed.append(worst_of(absorbed - expanded) / scale)
        advance(1)
    return [
        within("stock layer == its equations", by_class, LAYER_BOUND, "fp32 class, fp64 equations"),
        within("expanded == absorbed", by_absorbed, ABSORB_BOUND, "fp64"),
    ]


@torch.inference_mode()
def _attention_io(model: PreTrainedModel, ids: torch.Tensor) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    # What each attention module of the model reads and writes, fp64 [1, tokens, hidden_size] on the CPU.
    inputs: list[torch.Tensor] = []
    outputs: list[torch.Tensor] = []

    def keep(module: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> None:
        inputs.append((args[0] if args else kwargs["hidden_states"]).cpu().double())
        outputs.append(out[0].cpu().double())

    run_observed(model, ids, keep)
    return inputs, outputs


def run_observed(model: PreTrainedModel, ids: torch.Tensor, keep: Callable[..., None]) -> None:
    """Run `ids` [tokens] through the model with `keep` as a forward hook (with keywords) on each layer's attention."""
    body: Any = getattr(model, model.base_model_prefix)
    with ExitStack() as stack:
        for layer in body.layers:
            handle = layer.self_attn.register_forward_hook(keep, with_kwargs=True)
            stack.callback(handle.remove)
        model(input_ids=ids[None].to(model.device), use_cache=False, logits_to_keep=1)


def within(name: str, by_layer: list[float], bound: float, detail: str) -> Check:
    """A check of the worst of all layers."""
    worst = max(by_layer)
    layers = f"{detail}; of max |output|, worst in layer {by_layer.index(worst)} of {len(by_layer)}"
    return Check(name, worst <= bound, worst, bound, layers)


def worst_of(difference: torch.Tensor) -> float:
    """Largest absolute number; a NaN anywhere must fail every bound."""
    worst = float(difference.abs().max())
    return math.inf if math.isnan(worst) else worst
