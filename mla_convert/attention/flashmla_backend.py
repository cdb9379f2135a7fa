"""Latent attention by DeepSeek's FlashMLA (package flash_mla), where it is installed and the shape is its own.

Its kernel wants a paged bf16 or fp16 cache of rows [512 latent, 64 rotating], pages of 64 tokens, and no mask. A
buffer of such rows whose length in memory is a multiple of 64 is paged as it lies; any other cache is left to Triton.
"""

from __future__ import annotations

import torch
from torch import Tensor

from mla_convert.attention.problem import Problem, joined

_RANK, _ROPE, _PAGE = 512, 64, 64


def refusal(problem: Problem) -> str:
    """Why FlashMLA cannot run `problem` here; empty if it can."""
    rank, rope = problem.kv_c.shape[-1], problem.k_pe.shape[-1]
    if (rank, rope) != (_RANK, _ROPE):
        return f"its kernel is for {_RANK} + {_ROPE}, this cache is {rank} + {rope}"
    if problem.q_latent.dtype not in (torch.bfloat16, torch.float16):
        return f"{problem.q_latent.dtype} is neither bfloat16 nor float16"
    if problem.kv_c.dtype != problem.q_latent.dtype:
        return f"the cache is stored as {problem.kv_c.dtype}"
    if problem.mask is not None or problem.softcap is not None or problem.sinks is not None:
        return "it takes no mask, softcap or sinks"
    if problem.needs_grad:
        return "its kernel has no gradient"
    if not problem.kv_c.is_cuda or torch.cuda.get_device_capability(problem.kv_c.device)[0] < 9:
        return "it needs a GPU of compute capability 9.0 or more"
    if _pages(problem) is None:
        return f"the cache is no buffer of rows [{_RANK}, {_ROPE}] in whole pages of {_PAGE} tokens"
    return ""


def attend(problem: Problem) -> Tensor:
    """The context [batch, heads, queries, 512]."""
    from flash_mla import flash_mla_with_kvcache, get_mla_metadata

    pages = _pages(problem)
    assert pages is not None
    batch, heads, queries, _ = problem.q_latent.shape
    tokens, device = problem.kv_c.shape[1], problem.kv_c.device
    per_item = pages.shape[0] // batch
    table = torch.arange(batch * per_item, dtype=torch.int32, device=device).view(batch, per_item)
    lengths = torch.full((batch,), tokens, dtype=torch.int32, device=device)
    metadata, splits = get_mla_metadata(lengths, queries * heads, 1)
    query = torch.cat((problem.q_latent, problem.q_pe), dim=-1).transpose(1, 2).contiguous()
    context, _ = flash_mla_with_kvcache(
        query, pages, table, lengths, _RANK, metadata, splits, softmax_scale=problem.scale, causal=False
    )
    return context.transpose(1, 2)  # type: ignore[no-any-return]


def _pages(problem: Problem) -> Tensor | None:
    """[pages, 64, 1, 576] over the buffer that holds the cache, or None where it is no such buffer."""
    rows = joined(problem.kv_c, problem.k_pe)
    if rows is None or rows.stride(1) != _RANK + _ROPE:
        return None
    batch, tokens, width = rows.shape
    capacity = rows.stride(0) // width if batch > 1 else -(-tokens // _PAGE) * _PAGE
    behind = rows.untyped_storage().nbytes() // rows.element_size() - rows.storage_offset()
    if capacity % _PAGE or rows.stride(0) % width or batch * capacity * width > behind:
        return None
    return rows.as_strided((batch * capacity // _PAGE, _PAGE, 1, width), (_PAGE * width, width, width, 1))
