"""Causal attention in bfloat16 on a CPU, query block by query block, with its gradient.

torch's fused kernel runs there at a small part of the rate of bfloat16 products: on windows of 1,024 tokens it took 45
percent of a training step of SmolLM2. Here every block of queries is three products against the keys it can see.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

BLOCK = 128  # queries at a time: 64 to 256 are equally fast, and the smaller the block, the less is masked
KEPT_BYTES = 64 * 2**20  # weights of a call up to this size are kept for the gradient, larger ones are formed again


def fits(query: Tensor) -> bool:
    """Whether autocast asks for bfloat16 on a CPU.

    Not for models that are themselves bfloat16: the fused kernel keeps their scores in float32.
    """
    if query.device.type != "cpu" or not torch.is_autocast_enabled("cpu"):
        return False
    return torch.get_autocast_dtype("cpu") == torch.bfloat16 and query.dtype in (torch.bfloat16, torch.float32)


def causal_attention(query: Tensor, key: Tensor, value: Tensor, scale: float) -> Tensor:
    """softmax(scale q k^T, keys up to the query's own) v; [batch, heads, tokens, width], result bfloat16."""
    flat = [x.to(torch.bfloat16).flatten(0, 1) for x in (query, key, value)]
    out: Tensor = _Blocks.apply(*flat, scale).unflatten(0, query.shape[:2])  # type: ignore[no-untyped-call]
    return out


def _weights(query: Tensor, key: Tensor, start: int) -> Tensor:
    # of queries start, start + 1, ...; `query` is scaled and `key` ends at the last one's own
    scores = torch.bmm(query, key.transpose(1, 2))
    hidden = torch.ones(query.shape[1], query.shape[1], dtype=torch.bool).triu(1)
    scores[:, :, start:].masked_fill_(hidden, -torch.inf)
    return torch.softmax(scores, -1)  # sums in float32


class _Blocks(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor, scale: float) -> Tensor:
        query, heads, tokens = query * scale, query.shape[0], query.shape[1]
        out = query.new_empty(heads, tokens, value.shape[-1])
        keep = any(ctx.needs_input_grad) and heads * tokens * (tokens + BLOCK) <= KEPT_BYTES  # 2 bytes, half of them
        kept = []
        for start in range(0, tokens, BLOCK):
            end = min(start + BLOCK, tokens)
            weights = _weights(query[:, start:end], key[:, :end], start)
            out[:, start:end] = torch.bmm(weights, value[:, :end])
            if keep:
                kept.append(weights)
        ctx.save_for_backward(query, key, value, *kept)
        ctx.scale = scale
        return out

    @staticmethod
    def backward(ctx: Any, *upstream: Tensor) -> tuple[Tensor | None, ...]:
        """Gradients by query, key and value; sums over blocks are in float32."""
        query, key, value, *kept = ctx.saved_tensors
        above = upstream[0].contiguous()
        by_query = torch.empty_like(query)
        by_key, by_value = (torch.zeros_like(x, dtype=torch.float32) for x in (key, value))
        for start in range(0, query.shape[1], BLOCK):
            end = min(start + BLOCK, query.shape[1])
            here, seen = slice(start, end), slice(0, end)
            weights = kept[start // BLOCK] if kept else _weights(query[:, here], key[:, seen], start)
            by_value[:, seen] += torch.bmm(weights.transpose(1, 2), above[:, here])
            by_weights = torch.bmm(above[:, here], value[:, seen].transpose(1, 2))
            by_scores = torch.ops.aten._softmax_backward_data(by_weights, weights, -1, weights.dtype)
            by_query[:, here] = torch.bmm(by_scores, key[:, seen])
            by_key[:, seen] += torch.bmm(by_scores.transpose(1, 2), query[:, here])
        return by_query * ctx.scale, by_key.to(key.dtype), by_value.to(value.dtype), None
