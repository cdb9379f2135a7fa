"""Score a text the way it is generated: token by token through a cache, which a scored window never reads."""

from __future__ import annotations

from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

from mla_convert import report
from mla_convert.errors import BadOption


@torch.no_grad()
def decode_nll(
    model: Any, input_ids: Int[Tensor, "batch tokens"], cache: Any = None, prompt: int = 1
) -> Float[Tensor, "batch scored"]:
    """Nats of each token behind the first `prompt`, which are fed at once; all others go one by one through `cache`.

    The mean's exponential is the perplexity of the decode path. `cache` is an empty transformers cache, by default
    the model's own; a `QuantisedLatentCache` shows what its rounding costs. Raises BadOption where no token is left.
    """
    tokens = input_ids.shape[1]
    if not 1 <= prompt < tokens:
        raise BadOption(f"prompt={prompt} of {tokens} tokens: at least one token in front and one behind is needed")
    if cache is None:
        from transformers import DynamicCache

        cache = DynamicCache(config=model.config)
    found, start = [], 0
    with report.progress("decoding", "tokens", tokens - prompt) as advance:
        for stop in range(prompt, tokens):
            logits = model(input_ids[:, start:stop], past_key_values=cache, use_cache=True).logits[:, -1]
            target = input_ids[:, stop].to(logits.device)
            found.append(torch.nn.functional.cross_entropy(logits.float(), target, reduction="none"))
            start = stop
            advance(1)
    return torch.stack(found, dim=1)
