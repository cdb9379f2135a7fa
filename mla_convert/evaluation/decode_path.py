"""Perplexity through the decode path: token by token through a cache, as text is generated, which a scored window never
reads; through the model's own cache, in the absorbed form, and with a quantised cache.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel

from mla_convert.decoding.absorb_model import absorb_model, absorbable, restore
from mla_convert.decoding.quantised_cache import QuantisedLatentCache
from mla_convert.errors import BadOption
from mla_convert.evaluation.suite import ABSORBED_WAYS
from mla_convert.source.loading import cache_name
from mla_convert.verification.check_models import forward_logits

Advance = Callable[[int], None]


@torch.no_grad()
def decode_nll(
    model: Any,
    input_ids: Int[Tensor, "batch tokens"],
    cache: Any = None,
    prompt: int = 1,
    advance: Advance = lambda tokens: None,
) -> Float[Tensor, "batch scored"]:
    """Nats of each token behind the first `prompt`, which are fed at once; all others go one by one through `cache`.

    The mean's exponential is the perplexity of the decode path. `cache` is an empty transformers cache, by default
    the model's own; a `QuantisedLatentCache` shows what its rounding costs. Raises BadOption where no token is left.
    """
    tokens = input_ids.shape[1]
    if not 1 <= prompt < tokens:
        raise BadOption(f"prompt={prompt} of {tokens} tokens: at least one token in front and one behind is needed")
    cache = DynamicCache(config=model.config) if cache is None else cache
    input_ids = input_ids.to(model.device)
    feed = {cache_name(model): cache}
    found, start = [], 0
    for stop in range(prompt, tokens):
        logits = model(input_ids[:, start:stop], use_cache=True, **feed).logits[:, -1]
        found.append(torch.nn.functional.cross_entropy(logits.double(), input_ids[:, stop], reduction="none"))
        advance(input_ids.shape[0] * (stop - start))
        start = stop
    return torch.stack(found, dim=1)


def decode_figures(
    model: PreTrainedModel, ids: Int[Tensor, "windows tokens"], advance: Advance = lambda tokens: None
) -> dict[str, float | None]:
    """Nats per token of `ids`: in one forward, token by token through the model's own cache, and the `ABSORBED_WAYS`
    (None for a model that `absorb` does not take); the largest differences per token of the exact ways to the forward;
    tokens per second of one sequence through the cache.
    """
    with torch.no_grad():
        whole = torch.stack([_nll(forward_logits(model, row), row) for row in ids])

    def decoded(cache_dtype: str | None = None) -> Tensor:
        def empty() -> Any:
            return None if cache_dtype is None else QuantisedLatentCache(model.config, cache_dtype)

        return torch.cat([decode_nll(model, row[None], empty(), advance=advance) for row in ids]).cpu()

    start = time.perf_counter()
    ways: dict[str, Tensor | None] = {"cached": decoded()}
    seconds = time.perf_counter() - start
    ways |= dict.fromkeys(ABSORBED_WAYS)
    if absorbable(model):
        absorb_model(model)
        try:
            ways |= {way: decoded(cache_dtype) for way, cache_dtype in ABSORBED_WAYS.items()}
        finally:
            restore(model)
    result: dict[str, float | None] = {name: None if nll is None else float(nll.mean()) for name, nll in ways.items()}
    for name in ("cached", "absorbed"):
        nll = ways[name]
        result[f"{name}_difference"] = None if nll is None else float((nll - whole).abs().max())
    return {
        **result,
        "tokens": float(whole.numel()),
        "forward": float(whole.mean()),
        "tokens_per_second": whole.numel() / seconds,
    }


def _nll(logits: Tensor, ids: Tensor) -> Tensor:
    logp = torch.log_softmax(logits[:-1].double(), -1)
    return -logp.gather(1, ids[1:, None].to(logp.device))[:, 0].cpu()
