"""Triton kernels of decoding over latents: attention in slices of the cache, and the sum of the slices.

Symbols: a row is one query of one head, rows = num_heads * queries; M rows, N tokens and R (P) columns of latent
(rotating key) are a tile. A tile of latents is loaded once and used as key and, with its scales, as value. Columns
are padded to a power of two with zeros that are masked, not read. The online softmax is that of FlashAttention-2
(arXiv:2307.08691), the slices those of Flash-Decoding.
"""

# mypy: disable-error-code="no-untyped-def"
from typing import Any

import triton
import triton.language as tl


@triton.jit
def slices_kernel(
    q_ptr, p_ptr, c_ptr, k_ptr, scale_ptr, mask_ptr, table_ptr, lengths_ptr, out_ptr, lse_ptr,
    q_stride_b, q_stride_h, q_stride_t, p_stride_b, p_stride_h, p_stride_t,
    c_stride_b, c_stride_t, k_stride_b, k_stride_t, scale_stride_b, scale_stride_t,
    mask_stride_b, mask_stride_h, mask_stride_t, mask_stride_s, table_stride_b,
    rows, queries, tokens, slice_tokens, rank, rope, scale, softcap,
    M: tl.constexpr, N: tl.constexpr, R: tl.constexpr, P: tl.constexpr, PAGE: tl.constexpr,
    MASK: tl.constexpr, SOFTCAP: tl.constexpr, SCALED: tl.constexpr, EXACT: tl.constexpr, WIDEN: tl.constexpr,
):  # fmt: skip
    """Context and log-sum-exp of M rows over one slice of tokens of one sequence.

    PAGE 0: sequence b starts at b * stride; else token s of it lies in page table[b, s // PAGE], row s % PAGE, and
    c_stride_b, k_stride_b are those of pages. MASK 1 is bool, 2 is added; SCALED: latents times scale[b, s]. EXACT:
    fp32 products without TF32. WIDEN: bf16 products in fp32, which is the same (Triton's interpreter multiplies
    the bit patterns of bf16).
    """
    batch = tl.program_id(2).to(tl.int64)
    part = tl.program_id(1)
    row = tl.program_id(0) * M + tl.arange(0, M)
    head, query = row // queries, row % queries
    column, turned = tl.arange(0, R), tl.arange(0, P)
    live = row < rows
    q_at = q_ptr + batch * q_stride_b + head[:, None] * q_stride_h + query[:, None] * q_stride_t + column[None, :]
    p_at = p_ptr + batch * p_stride_b + head[:, None] * p_stride_h + query[:, None] * p_stride_t + turned[None, :]
    q = tl.load(q_at, mask=live[:, None] & (column[None, :] < rank), other=0.0)
    q_pe = tl.load(p_at, mask=live[:, None] & (turned[None, :] < rope), other=0.0)
    if WIDEN:
        q, q_pe = q.to(tl.float32), q_pe.to(tl.float32)
    length = tl.load(lengths_ptr + batch) if PAGE > 0 else tokens
    first = part * slice_tokens
    last = tl.minimum(first + slice_tokens, length)
    top = tl.full([M], float("-inf"), tl.float32)
    total = tl.zeros([M], tl.float32)
    acc = tl.zeros([M, R], tl.float32)
    for start in range(first, last, N):
        token = start + tl.arange(0, N)
        there = token < last
        if PAGE > 0:
            page = tl.load(table_ptr + batch * table_stride_b + token // PAGE, mask=there, other=0).to(tl.int64)
            c_row, k_row = (
                page * c_stride_b + (token % PAGE) * c_stride_t,
                page * k_stride_b + (token % PAGE) * k_stride_t,
            )
        else:
            c_row, k_row = batch * c_stride_b + token * c_stride_t, batch * k_stride_b + token * k_stride_t
        c = tl.load(c_ptr + c_row[:, None] + column[None, :], mask=there[:, None] & (column[None, :] < rank), other=0.0)
        k = tl.load(k_ptr + k_row[:, None] + turned[None, :], mask=there[:, None] & (turned[None, :] < rope), other=0.0)
        if WIDEN:
            c, k = c.to(tl.float32), k.to(tl.float32)
        else:
            c, k = c.to(q_ptr.dtype.element_ty), k.to(q_ptr.dtype.element_ty)
        precision: tl.constexpr = "ieee" if EXACT else "tf32"
        score = tl.dot(q, tl.trans(c), input_precision=precision)
        if SCALED:
            factor = tl.load(scale_ptr + batch * scale_stride_b + token * scale_stride_t, mask=there, other=0.0)
            score = score * factor[None, :]
        score = (score + tl.dot(q_pe, tl.trans(k), input_precision=precision)) * scale
        if SOFTCAP:
            score = softcap * (2 * tl.sigmoid(2 * score / softcap) - 1)  # softcap tanh(score / softcap)
        seen = there[None, :] & live[:, None]
        if MASK > 0:
            mask_at = mask_ptr + batch * mask_stride_b + head[:, None] * mask_stride_h
            mask_at = mask_at + query[:, None] * mask_stride_t + token[None, :] * mask_stride_s
            if MASK == 1:
                seen = seen & (tl.load(mask_at, mask=seen, other=0) != 0)
            else:
                score = score + tl.load(mask_at, mask=seen, other=0.0).to(tl.float32)
        score = tl.where(seen, score, float("-inf"))
        higher = tl.maximum(top, tl.max(score, 1))
        level = tl.where(higher == float("-inf"), 0.0, higher)
        weight = tl.exp(score - level[:, None])
        shrink = tl.exp(top - level)
        total = total * shrink + tl.sum(weight, 1)
        if SCALED:
            weight = weight * factor[None, :]
        acc = acc * shrink[:, None] + tl.dot(
            weight.to(q_ptr.dtype.element_ty).to(c.dtype), c, input_precision=precision
        )
        top = higher
    some = total > 0
    parts = tl.num_programs(1)
    place = (batch * parts + part) * rows + row
    out_at = out_ptr + place[:, None] * rank + column[None, :]
    context = acc / tl.where(some, total, 1.0)[:, None]
    tl.store(out_at, context, mask=live[:, None] & (column[None, :] < rank))
    lse = tl.where(some, top + tl.log(tl.where(some, total, 1.0)), float("-inf"))
    tl.store(lse_ptr + place, lse, mask=live)


@triton.jit
def sum_kernel(
    parts_ptr, lse_ptr, sinks_ptr, out_ptr, rows, queries, parts, rank,
    R: tl.constexpr, S: tl.constexpr, SINKS: tl.constexpr,
):  # fmt: skip
    """Context of one row: the slices' contexts weighted by exp(lse); a row that saw nothing gives 0."""
    row, batch = tl.program_id(0), tl.program_id(1).to(tl.int64)
    column, part = tl.arange(0, R), tl.arange(0, S)
    lse = tl.load(lse_ptr + (batch * parts + part) * rows + row, mask=part < parts, other=float("-inf"))
    top = tl.max(lse, 0)
    if SINKS:
        sink = tl.load(sinks_ptr + row // queries).to(tl.float32)
        top = tl.maximum(top, sink)
    level = tl.where(top == float("-inf"), 0.0, top)
    total = tl.sum(tl.exp(lse - level), 0)
    if SINKS:
        total = total + tl.exp(sink - level)
    total = tl.where(total > 0, total, 1.0)
    acc = tl.zeros([R], tl.float32)
    for index in range(parts):
        place = (batch * parts + index) * rows + row
        weight = tl.exp(tl.load(lse_ptr + place) - level) / total
        acc += weight * tl.load(parts_ptr + place * rank + column, mask=column < rank, other=0.0)
    tl.store(out_ptr + (batch * rows + row) * rank + column, acc, mask=column < rank)


slices: Any = slices_kernel
total: Any = sum_kernel
