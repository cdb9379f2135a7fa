"""The arithmetic of expanded attention that needs no weights: rotation, masks, softmax.

The absorbed path, one shared key [c ; k_pe] and one shared value c for all heads, is mla_convert.attention's.
"""

import torch
from torch import Tensor, nn

from mla_convert.modeling.blocks import causal_attention, fits


def turn(x: Tensor, table: tuple[Tensor, Tensor]) -> Tensor:
    """Multiply slot s (numbers 2s, 2s+1 as one complex number) by exp(i angle_s): RoFormer, arXiv:2104.09864, eq. 34.

    x is [batch, tokens, 2 slots] or [batch, heads, tokens, 2 slots]; table (cos, sin), [batch, tokens, slots] each.
    """
    cos, sin = (part[:, None] for part in table) if x.dim() == 4 else table
    re, im = x[..., 0::2], x[..., 1::2]
    return torch.stack((re * cos - im * sin, re * sin + im * cos), dim=-1).flatten(-2)


def causal_mask(queries: int, keys: int, device: torch.device) -> Tensor | None:
    """Bool [queries, keys], true where attended; the last query sees every key. None where nothing is hidden."""
    if queries == 1:
        return None
    return torch.ones(queries, keys, dtype=torch.bool, device=device).tril(keys - queries)


def attention_weights(scores: Tensor, mask: Tensor | None, softcap: float | None, sinks: Tensor | None) -> Tensor:
    """Softmax of scaled `scores` [batch, heads, queries, keys], in float32 at least.

    softcap: scores become softcap tanh(scores / softcap) before the mask (Gemma 2, arXiv:2408.00118, section 2).
    mask: bool (true: attended) or additive. sinks: one logit per head that takes part in the softmax and has no
    value, so that weights sum to less than 1 (gpt-oss). A query that may attend to nothing gets no NaN.
    """
    kind = scores.dtype
    if softcap is not None:
        scores = torch.tanh(scores / softcap) * softcap
    scores = scores.to(torch.promote_types(kind, torch.float32))
    if mask is not None and mask.dtype == torch.bool:
        scores = scores.masked_fill(~mask, torch.finfo(scores.dtype).min)
    elif mask is not None:
        scores = scores + mask
    if sinks is None:
        return torch.softmax(scores, dim=-1).to(kind)
    column = sinks.to(scores.dtype).reshape(1, -1, 1, 1).expand(*scores.shape[:-1], 1)
    return torch.softmax(torch.cat((scores, column), dim=-1), dim=-1)[..., :-1].to(kind)


def expanded_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    scale: float,
    mask: Tensor | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    dropout: float = 0.0,
) -> Tensor:
    """Attention of heads with keys and values of their own; all [batch, heads, tokens, width], result as `value`.

    Without soft cap and sinks torch's fused kernel is used, or blocks.py where that is faster. On a CPU the fused one
    wants values as wide as the keys, so they are padded and cut off again: the unfused one was half of a training step.
    """
    if softcap is None and sinks is None:
        plain = mask is not None and mask.dim() == 2 and query.shape[-2] == key.shape[-2]  # made by `causal_mask`
        if plain and not dropout and fits(query):
            return causal_attention(query, key, value, scale)
        width = value.shape[-1]
        wide = max(query.shape[-1], width)
        query, key, value = (nn.functional.pad(x, (0, wide - x.shape[-1])) for x in (query, key, value))
        masking = {"is_causal": True} if plain else {"attn_mask": mask}
        out = nn.functional.scaled_dot_product_attention(query, key, value, dropout_p=dropout, scale=scale, **masking)
        return out[..., :width]
    weights = attention_weights(query @ key.transpose(-1, -2) * scale, mask, softcap, sinks)
    return nn.functional.dropout(weights, dropout) @ value
