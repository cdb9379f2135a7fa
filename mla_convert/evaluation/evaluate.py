"""Evaluate: perplexity, distance from a reference, and cache bytes per token, formula and measured."""

from __future__ import annotations

import dataclasses
import logging
import math
import time
from typing import Any

import torch
from transformers import PreTrainedModel

from mla_convert.calibration.texts import BOS_EVERY_WINDOW, bos_policy, read_documents, text_hash, token_windows
from mla_convert.errors import BadCheckpoint, BadOption
from mla_convert.evaluation.scoring import Head, TokenScores, Windows, full_windows, head, hidden_states, score
from mla_convert.interface import report
from mla_convert.interface.measure import peak_rss
from mla_convert.interface.recipe import EvalRecipe
from mla_convert.source.cache_size import layer_numbers
from mla_convert.source.loading import (
    cache_name,
    check_models,
    load_model,
    load_tokenizer,
    resolve_device,
    resolve_dtype,
)

logger = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True)
class ModelScore:
    """What one model scored; nats per token, bytes per token over all layers. None: no reference was
    named.
    """

    model: str
    is_reference: bool
    nll: float
    perplexity: float
    excess: float | None  # nll - reference's nll on the same tokens
    excess_error: float | None  # standard error of `excess` over windows; None below two windows
    kl: float | None  # mean KL(reference || model)
    kl_p99: float | None
    top1_agreement: float | None
    cache_formula: int
    cache_measured: int
    seconds: float


@dataclasses.dataclass(frozen=True)
class EvalResult:
    """Scores of all models on the same tokens, and everything needed to repeat them."""

    scores: tuple[ModelScore, ...]
    reference: str | None
    text: tuple[str, ...]
    text_sha256: str
    tokens_scored: int
    windows: int
    window: int
    stride: int  # text tokens from one window to the next, as used
    bos: str
    batch_size: int
    dtype: str
    device: str
    peak_rss: int  # bytes, the whole process so far

    def to_json(self) -> dict[str, Any]:
        """The result as plain JSON values, with the versions and the machine."""
        return {**dataclasses.asdict(self), "environment": report.environment()}


def evaluate(recipe: EvalRecipe) -> EvalResult:
    """Score every model, and the reference, on the same windows, one model in memory at a time.

    Of the reference its head and its hidden states at the scored positions stay in memory while the others
    run. Writes `recipe.json` and `recipe.plot` where they are named. Raises BadOption when the text or an
    output path is unusable or when the tokenizers of the models differ, BadCheckpoint when a model cannot be
    loaded.
    """
    if recipe.suite is not None:
        raise BadOption(f"suite={recipe.suite}: call mla_convert.run_suite with this recipe")
    device, dtype = resolve_device(recipe.device), resolve_dtype(recipe.dtype)
    report.check_targets(recipe.json, recipe.plot)
    order = [m for m in (recipe.reference,) if m is not None]
    order += [m for m in recipe.models if m not in order]
    check_models(order)
    documents = read_documents(recipe.eval_data, part="eval")
    windows, stride, bos = _common_windows(recipe, documents)
    by_name: dict[str, ModelScore] = {}
    reference: tuple[Head, torch.Tensor] | None = None
    with report.progress("evaluating", "tokens", len(order) * int(windows.mask.sum())) as advance:
        for name in order:
            start = time.perf_counter()
            model = load_model(name, dtype, device)
            _warn_of_length(model, name, recipe.window)
            hidden = hidden_states(model, windows, recipe.batch_size, advance)
            if name == recipe.reference:
                reference = (head(model), hidden)
            tokens = score(head(model), hidden, windows.targets, reference)
            seconds = time.perf_counter() - start
            by_name[name] = summarise(
                name, name == recipe.reference, tokens, windows, cache_bytes_per_token(model), seconds
            )
            if not math.isfinite(by_name[name].nll):
                logger.warning("%s: its logits are not finite; the weights or the type overflow", name)
            logger.info("%s: %.4f nats per token, %.1f s", name, by_name[name].nll, seconds)
            del model
    result = EvalResult(
        scores=tuple(by_name[name] for name in order),
        reference=recipe.reference,
        text=recipe.eval_data or ("pydoc_data.topics (eval part)",),
        text_sha256=text_hash(documents),
        tokens_scored=int(windows.scored.sum()),
        windows=len(windows.ids),
        window=recipe.window,
        stride=stride,
        bos=bos,
        batch_size=recipe.batch_size,
        dtype=recipe.dtype,
        device=str(device),
        peak_rss=peak_rss(),
    )
    if recipe.json is not None:
        report.write_json(result.to_json(), recipe.json)
    if recipe.plot is not None:
        report.plot_evaluation(result, recipe.plot)
    return result


def summarise(
    name: str,
    is_reference: bool,
    tokens: TokenScores,
    windows: Windows,
    cache: tuple[int, int],
    seconds: float,
) -> ModelScore:
    """Means over the tokens scored; the error of the excess from its spread over windows."""
    nll = float(tokens.nll.mean())
    excess = error = kl = p99 = top1 = None
    if tokens.reference_nll is not None and tokens.kl is not None and tokens.top1_agrees is not None:
        difference = tokens.nll - tokens.reference_nll
        excess, kl, top1 = float(difference.mean()), float(tokens.kl.mean()), float(tokens.top1_agrees.mean())
        p99 = float(tokens.kl.sort().values[math.ceil(0.99 * len(tokens.kl)) - 1])
        parts = torch.split(difference, windows.scored.sum(1).tolist())
        per_window = torch.stack([part.mean() for part in parts if len(part)])
        error = float(per_window.std() / math.sqrt(len(per_window))) if len(per_window) > 1 else None
    return ModelScore(
        model=name,
        is_reference=is_reference,
        nll=nll,
        perplexity=math.exp(min(nll, 700.0)),
        excess=excess,
        excess_error=error,
        kl=kl,
        kl_p99=p99,
        top1_agreement=top1,
        cache_formula=cache[0],
        cache_measured=cache[1],
        seconds=seconds,
    )


@torch.inference_mode()
def cache_bytes_per_token(model: PreTrainedModel, lengths: tuple[int, int] = (8, 24)) -> tuple[int, int]:
    """Cache bytes per token over all layers: (by formula, measured in the cache after forwards of two
    lengths).

    Formula: bytes x `layer_numbers`, of all layers. Measured: the difference quotient of the storage really
    held, so that what does not grow with the tokens does not count.
    """
    formula = sum(layer_numbers(model.config.to_dict())) * model.dtype.itemsize
    held = [cache_bytes(model, length) for length in lengths]
    return formula, round((held[1] - held[0]) / (lengths[1] - lengths[0]))


@torch.inference_mode()
def cache_bytes(model: PreTrainedModel, length: int) -> int:
    """Bytes of the distinct storages that the cache holds after a forward of one sequence of `length`
    tokens.
    """
    ids = torch.zeros((1, length), dtype=torch.int64, device=model.device)
    out = model(input_ids=ids, use_cache=True, logits_to_keep=1)
    cache = getattr(out, cache_name(model))
    storages: dict[int, int] = {}
    for layer in cache.layers:
        for value in vars(layer).values():
            if isinstance(value, torch.Tensor) and value.numel():
                storage = value.untyped_storage()
                storages[storage.data_ptr()] = storage.nbytes()
    return sum(storages.values())


def _common_windows(recipe: EvalRecipe, documents: list[str]) -> tuple[Windows, int, str]:
    # One tokenizer and one BOS policy for all: a model whose tokenizer cuts the text differently is refused.
    first = recipe.reference or recipe.models[0]
    tokenizer = load_tokenizer(first)
    ids = token_windows(tokenizer, documents, recipe.window, recipe.windows, recipe.stride)
    for name in recipe.models:
        if name == first:
            continue
        try:
            other = load_tokenizer(name)
        except BadCheckpoint:
            logger.warning("%s has no tokenizer; the one of %s is used", name, first)
            continue
        if bos_policy(other) != bos_policy(tokenizer) or not torch.equal(
            token_windows(other, documents, recipe.window, recipe.windows, recipe.stride), ids
        ):
            raise BadOption(
                f"the tokenizers of {name} and {first} cut the same text differently ({bos_policy(other)}, "
                f"{bos_policy(tokenizer)}); nats per token compare only under one tokenizer"
            )
    bos = bos_policy(tokenizer)
    # with BOS a window holds window - 1 text tokens, and windows without overlap are that far apart
    body = recipe.window - 1 if bos == BOS_EVERY_WINDOW else recipe.window
    stride = min(recipe.stride or body, body)
    return full_windows(ids, stride), stride, bos


def _warn_of_length(model: PreTrainedModel, name: str, window: int) -> None:
    longest = getattr(model.config, "max_position_embeddings", None)
    if longest is not None and window > longest:
        logger.warning("%s: windows of %d tokens, but max_position_embeddings is %d", name, window, longest)
