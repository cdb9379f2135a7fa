"""Latent attention in Triton: split-KV flash decoding for any latent and rotating width, dense or paged."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor

from mla_convert.attention.problem import Problem
from mla_convert.errors import BadOption

_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
_LARGEST_RANK = 1024  # an accumulator of 16 rows is then 64 KiB of registers
_LEAST_SLICE = 128  # tokens; below it, the sum of the slices costs more than it saves


@dataclass(frozen=True)
class Tiles:
    """How the work is cut: rows and tokens per tile, slices of the cache, warps and pipeline stages."""

    rows: int
    tokens: int
    slices: int
    warps: int
    stages: int


@dataclass(frozen=True, eq=False)
class Pages:
    """A paged cache: token s of sequence b lies in page block_table[b, s // page], row s % page.

    pages_c [pages, page, kv_lora_rank] and pages_pe [pages, page, qk_rope_head_dim]; lengths counts each sequence's
    tokens. Entries of the table behind a sequence's length are never read, nor are rows behind it.
    """

    pages_c: Float[Tensor, "pages page kv_lora_rank"]
    pages_pe: Float[Tensor, "pages page qk_rope_head_dim"]
    block_table: Int[Tensor, "batch blocks"]
    lengths: Int[Tensor, " batch"]


def refusal(problem: Problem) -> str:
    """Why Triton cannot run `problem` here; empty if it can."""
    if problem.needs_grad:
        return "its kernel has no gradient"
    if problem.q_latent.dtype not in _DTYPES:
        return f"{problem.q_latent.dtype} is none of float32, bfloat16, float16"
    if problem.kv_c.shape[-1] > _LARGEST_RANK or problem.k_pe.shape[-1] > _LARGEST_RANK:
        return f"a latent of {problem.kv_c.shape[-1]} numbers exceeds {_LARGEST_RANK}"
    if not problem.kv_c.is_cuda and not _interpreted():
        return "the cache is not on a GPU"
    return ""


def attend(problem: Problem, tiles: Tiles | None = None) -> Tensor:
    """The context [batch, heads, queries, kv_lora_rank] over a dense cache, which may be stored in int8 or fp8."""
    return _run(problem, problem.kv_c, problem.k_pe, problem.kv_c.shape[1], tiles=tiles)


def attend_paged(
    q_latent: Float[Tensor, "batch num_heads queries kv_lora_rank"],
    q_pe: Float[Tensor, "batch num_heads queries qk_rope_head_dim"],
    pages: Pages,
    scale: float,
    tiles: Tiles | None = None,
) -> Float[Tensor, "batch num_heads queries kv_lora_rank"]:
    """As `attend`, over a paged cache; every query sees all tokens of its sequence. Raises BadOption for misfits."""
    batch = q_latent.shape[0]
    if pages.block_table.shape[0] != batch or pages.lengths.shape != (batch,):
        raise BadOption(
            f"block_table {list(pages.block_table.shape)} and lengths {list(pages.lengths.shape)} must have one row "
            f"for each of the {batch} sequences of q_latent"
        )
    tokens = pages.block_table.shape[1] * pages.pages_c.shape[1]
    empty = q_latent.new_empty(batch, 0, q_latent.shape[-1]), q_latent.new_empty(batch, 0, q_pe.shape[-1])
    problem = Problem(q_latent, q_pe, *empty, scale)
    return _run(problem, pages.pages_c, pages.pages_pe, tokens, pages=pages, tiles=tiles)


def _run(
    problem: Problem, kv_c: Tensor, k_pe: Tensor, tokens: int, *,
    pages: Pages | None = None, tiles: Tiles | None = None,
) -> Tensor:  # fmt: skip
    from mla_convert.attention import triton_kernels  # here, because triton may be missing

    batch, heads, queries, rank = problem.q_latent.shape
    rope, rows, device = problem.q_pe.shape[-1], heads * queries, problem.q_latent.device
    q_latent, q_pe = _last_dense(problem.q_latent), _last_dense(problem.q_pe)
    kv_c, k_pe = _last_dense(kv_c), _last_dense(k_pe)
    cut = tiles or tiles_for(batch, rows, tokens, rank, q_latent)
    slice_tokens = cut.tokens * -(-tokens // (cut.slices * cut.tokens))
    parts = max(1, -(-tokens // max(slice_tokens, 1)))
    scales = problem.scales
    kind, mask, mask_strides = _mask(problem)
    partial = torch.empty(batch, parts, rows, rank, dtype=torch.float32, device=device)
    lse = torch.empty(batch, parts, rows, dtype=torch.float32, device=device)
    none = lse  # a pointer that is never read
    triton_kernels.slices[(-(-rows // cut.rows), parts, batch)](
        q_latent, q_pe, kv_c, k_pe, none if scales is None else scales, none if mask is None else mask,
        none if pages is None else pages.block_table, none if pages is None else pages.lengths, partial, lse,
        *q_latent.stride()[:3], *q_pe.stride()[:3], *kv_c.stride()[:2], *k_pe.stride()[:2],
        *((0, 0) if scales is None else scales.stride()), *mask_strides,
        0 if pages is None else pages.block_table.stride(0),
        rows, queries, tokens, slice_tokens, rank, rope, problem.scale, problem.softcap or 0.0,
        M=cut.rows, N=cut.tokens, R=_padded(rank), P=_padded(rope), PAGE=0 if pages is None else kv_c.shape[1],
        MASK=kind, SOFTCAP=problem.softcap is not None, SCALED=scales is not None,
        EXACT=q_latent.dtype == torch.float32, WIDEN=q_latent.dtype == torch.bfloat16 and _interpreted(),
        num_warps=cut.warps, num_stages=cut.stages,
    )  # fmt: skip
    out = torch.empty(batch, heads, queries, rank, dtype=q_latent.dtype, device=device)
    sinks = problem.sinks
    triton_kernels.total[(rows, batch)](
        partial, lse, none if sinks is None else sinks, out, rows, queries, parts, rank,
        R=_padded(rank), S=_padded(parts, least=2), SINKS=sinks is not None, num_warps=4,
    )  # fmt: skip
    return out


def tiles_for(batch: int, rows: int, tokens: int, rank: int, like: Tensor) -> Tiles:
    """Tiles whose accumulator stays in registers, and slices enough to keep every multiprocessor busy twice."""
    wide = _padded(rank) >= 512
    m = 16 if rows <= 16 else 32 if wide or rows <= 32 else 64
    n = 16 if like.dtype == torch.float32 and wide else 32 if wide else 64
    processors = torch.cuda.get_device_properties(like.device).multi_processor_count if like.is_cuda else 4
    programs = batch * -(-rows // m)
    slices = max(1, min(-(-2 * processors // programs), tokens // _LEAST_SLICE, 128))
    return Tiles(rows=m, tokens=n, slices=slices, warps=8 if wide and m > 16 else 4, stages=2)


def _mask(problem: Problem) -> tuple[int, Tensor | None, tuple[int, ...]]:
    """Kind (0 none, 1 bool, 2 added), the mask and its strides, 0 where it is the same for all."""
    if problem.mask is None:
        return 0, None, (0, 0, 0, 0)
    batch, heads, queries, _ = problem.q_latent.shape
    mask = problem.mask.expand(batch, heads, queries, problem.kv_c.shape[1])
    if mask.dtype == torch.bool:
        mask = mask.view(torch.int8)
    return (1 if problem.mask.dtype == torch.bool else 2), mask, mask.stride()


def _last_dense(x: Tensor) -> Tensor:
    return x if x.stride(-1) == 1 or x.shape[-1] <= 1 else x.contiguous()


def _padded(width: int, least: int = 16) -> int:
    """The next power of two; matrix units want 16 columns."""
    return max(least, 1 << max(width - 1, 0).bit_length())


def _interpreted() -> bool:
    from triton import knobs

    return bool(knobs.runtime.interpret)
