"""Perplexity through the decode path: token by token through the model's cache, and through the absorbed form."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from mla_convert.absorbed import LatentCache, absorb, attend_absorbed
from mla_convert.check_models import cached_logits, forward_logits
from mla_convert.scoring import decoder
from mla_convert.stock import from_stock, stock_names, written_frequencies

NEUTRAL = 100.0  # weights of a neutralised latent norm are sqrt(1e-6) over at most 1e-7 or so


class AbsorbedAttention(nn.Module):
    """Stands in for a DeepSeek layer's attention: the absorbed form with a latent cache of its own.

    The latent norm is taken as linear, as in the folders that `convert` writes.
    """

    def __init__(self, attention: Any, config: dict[str, Any]):
        super().__init__()
        tensors = {name: attention.get_parameter(name) for name in stock_names(config)}
        layer = from_stock(tensors, config, written_frequencies(config))
        self.absorbed = absorb(layer.to(attention.o_proj.weight.dtype, attention.o_proj.weight.device))
        self.cache: LatentCache | None = None

    def forward(self, hidden_states: Tensor, position_ids: Tensor | None = None, **_: Any) -> tuple[Tensor, None]:
        """Attention output of the new tokens, which are added to the cache, and no weights."""
        seen = 0 if self.cache is None else self.cache.kv_c.shape[1]
        new = torch.arange(seen, seen + hidden_states.shape[1], device=hidden_states.device)[None]
        out, self.cache = attend_absorbed(self.absorbed, hidden_states, new, self.cache)
        return out, None


@contextmanager
def absorbed_model(model: PreTrainedModel) -> Iterator[PreTrainedModel]:
    """`model` with every attention in absorbed form, as itself again afterwards."""
    layers: Any = decoder(model).layers
    config = model.config.to_dict()
    kept = [layer.self_attn for layer in layers]
    try:
        for layer in layers:
            layer.self_attn = AbsorbedAttention(layer.self_attn, config)
        yield model
    finally:
        for layer, attention in zip(layers, kept, strict=True):
            layer.self_attn = attention


@torch.inference_mode()
def decode_figures(
    model: PreTrainedModel, ids: Tensor, advance: Callable[[int], None] = lambda tokens: None
) -> dict[str, float | None]:
    """Nats per token of windows `ids` [windows, tokens]: in one forward, token by token through the model's own cache,
    and token by token in the absorbed form (None for a model without a latent); the largest differences per token;
    tokens per second through the cache.
    """
    whole = torch.cat([_nll(forward_logits(model, row), row) for row in ids])
    start = time.perf_counter()
    cached = torch.cat([_nll(cached_logits(model, row, 1, advance), row) for row in ids])
    seconds = time.perf_counter() - start
    result: dict[str, float | None] = {
        "tokens": float(len(whole)),
        "forward": float(whole.mean()),
        "cached": float(cached.mean()),
        "cached_difference": float((cached - whole).abs().max()),
        "tokens_per_second": ids.numel() / seconds,
        "absorbed": None,
        "absorbed_difference": None,
    }
    if has_plain_latent(model):
        absorbed = torch.cat([_nll(_absorbed_logits(model, row, advance), row) for row in ids])
        result |= {"absorbed": float(absorbed.mean()), "absorbed_difference": float((absorbed - whole).abs().max())}
    return result


def has_plain_latent(model: PreTrainedModel) -> bool:
    """Whether the attention is that of a folder `convert` wrote: a query latent only with biases, and latent norms that
    are linear, which shows in one weight far above 1 for all their numbers.
    """
    config = model.config
    query_latent = getattr(config, "q_lora_rank", None) is not None
    if not getattr(config, "kv_lora_rank", None) or query_latent != bool(getattr(config, "attention_bias", False)):
        return False
    layers: Any = decoder(model).layers
    norms = ("kv_a_layernorm", "q_a_layernorm") if query_latent else ("kv_a_layernorm",)
    weights = [getattr(layer.self_attn, norm).weight.detach() for norm in norms for layer in layers]
    return all(bool((weight == weight[0]).all()) and float(weight[0]) > NEUTRAL for weight in weights)


def _absorbed_logits(model: PreTrainedModel, ids: Tensor, advance: Callable[[int], None]) -> Tensor:
    parts = []
    with absorbed_model(model) as absorbed:
        for at, token in enumerate(ids.to(model.device)):
            position = torch.tensor([[at]], device=model.device)
            out: Any = absorbed(input_ids=token[None, None], position_ids=position, use_cache=False)
            parts.append(out.logits[0])
            advance(1)
    return torch.cat(parts)


def _nll(logits: Tensor, ids: Tensor) -> Tensor:
    logp = torch.log_softmax(logits[:-1].double(), -1)
    return -logp.gather(1, ids[1:, None].to(logp.device))[:, 0].cpu()
