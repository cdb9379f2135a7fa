"""Latent attention in plain torch: heads are query rows over the one shared latent, taken in blocks of tokens.

A block is multiplied twice (as key and as value) while it is in cache, and the blocks are put together by their
log-sum-exp (online softmax, Milakov and Gimelshein, arXiv:1805.02867; as in FlashDecoding). Sums are fp32 (fp64
for fp64); scores of a bf16 cache are rounded to bf16 once, as transformers' eager attention rounds them.
"""

from collections.abc import Iterator

import torch
from torch import Tensor

from mla_convert.attention.problem import Problem, joined

# A block of tokens as large as a second-level cache: measured on two CPUs, half or twice of it costs below 5 %.
_BLOCK_BYTES = 4 << 20
_SMALLEST_BLOCK = 256
# One product of so few query rows is not divided well among threads; a batched one gives each its own tokens. fp32, two
# threads: 73 to 121 GFLOP/s at 9 rows, 165 to 190 at 32 (bf16 gains nothing).
_FEW_ROWS = 64
_PIECE_WORK = 1 << 20  # multiply-adds of a piece below which it is not worth its start
_SMALL_CONTEXT = 1 << 16
# Scores held at once; more query rows are taken in turns.
_SCORES = 1 << 25


def latent_attention(
    q_latent: Tensor,
    q_pe: Tensor,
    kv_c: Tensor,
    k_pe: Tensor,
    scale: float,
    mask: Tensor | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """What `mla_convert.attention.latent_attention` computes, always in torch: all that a self-contained folder has."""
    return attend(Problem(q_latent, q_pe, kv_c, k_pe, scale, mask, softcap, sinks))


def attend(problem: Problem) -> Tensor:
    """The context [batch, heads, queries, kv_lora_rank], in the dtype of q_latent."""
    if problem.needs_grad:
        return _whole(problem)
    batch, heads, queries, _ = problem.q_latent.shape
    block = _block_of(problem)
    step = max(1, _SCORES // (batch * heads * block))
    if queries <= step:
        return _blocks(problem, block, 0, queries)
    parts = [_blocks(problem, block, start, min(start + step, queries)) for start in range(0, queries, step)]
    return torch.cat(parts, dim=2)


def _block_of(problem: Problem) -> int:
    batch, tokens, rank = problem.kv_c.shape
    row = batch * (rank + problem.k_pe.shape[-1]) * problem.kv_c.element_size()
    if problem.kv_c.is_cuda:
        return max(tokens, 1)  # one pass: launches cost more than a second read of the latent
    return max(_SMALLEST_BLOCK, _BLOCK_BYTES // row)


def _blocks(problem: Problem, block: int, first: int, last: int) -> Tensor:
    """Queries first..last over all tokens, block by block."""
    batch, heads, _, rank = problem.q_latent.shape
    tokens, queries = problem.kv_c.shape[1], last - first
    rows, dtype, acc = heads * queries, problem.q_latent.dtype, problem.accumulate
    key = joined(problem.kv_c, problem.k_pe)
    q_latent, q_pe = problem.q_latent[:, :, first:last], problem.q_pe[:, :, first:last]
    query = torch.cat((q_latent, q_pe), dim=-1).reshape(batch, rows, -1)
    parts = _parts(problem, rows) if key is not None else 1
    contexts, sums = [], []
    least = parts * -(-_PIECE_WORK // (rows * query.shape[-1]))
    for start, stop, split in _pieces(tokens, block, parts, least):
        latents = problem.latents(start, stop)
        if key is not None and split > 1:
            latents = latents[0].unflatten(0, (split, -1))
            pairs = [(query.expand(split, -1, -1), key[0, start:stop].unflatten(0, (split, -1)))]
        elif key is not None:
            pairs = [(query, key[:, start:stop])]
        else:
            pairs = [(query[..., :rank], latents), (query[..., rank:], problem.k_pe[:, start:stop].to(dtype))]
        scores = _scores(pairs, problem.scale)
        if problem.softcap is not None or problem.mask is not None:
            scores = _cap_and_mask(problem, scores, slice(first, last), slice(start, stop))
        weights, lse = _softmax(scores, acc, blind_rows=problem.mask is not None)
        context = torch.bmm(weights.to(dtype), latents)
        # pieces of one sequence are blocks like any other
        sums += [lse] if split == 1 else list(lse[:, None])
        contexts += [context] if split == 1 else list(context[:, None])
    return _together(problem, contexts, sums).view(batch, heads, queries, rank).to(dtype)


def _parts(problem: Problem, rows: int) -> int:
    """Into how many pieces the tokens of a block go, one per thread."""
    few = rows <= _FEW_ROWS and problem.kv_c.shape[0] == 1 and problem.mask is None
    return _threads() if few and problem.q_latent.dtype == torch.float32 and not problem.kv_c.is_cuda else 1


def _threads() -> int:
    return 1 if torch.compiler.is_compiling() else torch.get_num_threads()


def _pieces(tokens: int, block: int, parts: int, least: int) -> Iterator[tuple[int, int, int]]:
    """(start, stop, parts) of the blocks; blocks of fewer than `least` tokens stay whole, and what does not divide by
    `parts` at the end is a block of its own.
    """
    block = max(block - block % parts, parts)
    for start in range(0, tokens, block):
        stop = min(start + block, tokens)
        whole = stop - (stop - start) % parts if stop - start >= least else start
        if whole > start:
            yield start, whole, parts
        if stop > whole:
            yield whole, stop, 1


def _scores(pairs: list[tuple[Tensor, Tensor]], scale: float) -> Tensor:
    """scale * sum of the products of queries [batch, rows, w] with keys [batch, block, w]."""
    first, *_ = pairs
    batch, rows = first[0].shape[:2]
    out = first[0].new_empty(batch, rows, first[1].shape[1])
    # A batched product of a transposed bf16 key whose items do not lie back to back copies it first (4 times slower).
    single = batch == 1 or (out.dtype != torch.float32 and out.device.type == "cpu")
    for index, (query, key) in enumerate(pairs):
        beta = int(index > 0)
        if single:
            for item in range(batch):
                torch.addmm(out[item], query[item], key[item].T, beta=beta, alpha=scale, out=out[item])
        else:
            torch.baddbmm(out, query, key.mT, beta=beta, alpha=scale, out=out)
    return out


def _softmax(scores: Tensor, acc: torch.dtype, blind_rows: bool) -> tuple[Tensor, Tensor]:
    """Weights and log-sum-exp of each row; with `blind_rows`, rows of nothing but -inf give weights 0 and -inf."""
    # p = softmax(x) and lse = max x - log max p: two cheap passes instead of a second exponential.
    top, weights = scores.amax(-1).to(acc), torch.softmax(scores, dim=-1, dtype=acc)
    if blind_rows:
        weights = weights.masked_fill((top == float("-inf"))[..., None], 0)
    # 0 only in blind rows: -inf - log 0 would be NaN
    lse = top - weights.amax(-1).clamp_min(torch.finfo(acc).tiny).log()
    return weights, lse


def _cap_and_mask(problem: Problem, scores: Tensor, queries: slice, tokens: slice) -> Tensor:
    batch, heads = problem.q_latent.shape[:2]
    scores = scores.to(problem.accumulate)
    if problem.softcap is not None:
        scores = problem.softcap * torch.tanh(scores / problem.softcap)
    if problem.mask is not None:
        mask = problem.mask
        mask = mask[(None,) * (4 - mask.dim())]
        mask = mask[:, :, queries if mask.shape[2] > 1 else slice(None), tokens if mask.shape[3] > 1 else slice(None)]
        shaped = scores.view(batch, heads, -1, scores.shape[-1])
        shaped = shaped.masked_fill(~mask, float("-inf")) if mask.dtype == torch.bool else shaped + mask
        scores = shaped.view(scores.shape)
    return scores


def _together(problem: Problem, contexts: list[Tensor], sums: list[Tensor]) -> Tensor:
    """The blocks' contexts [batch, rows, rank], weighted by exp(lse); a row that sees nothing gives 0."""
    if len(contexts) == 1 and problem.sinks is None:
        return contexts[0]
    acc = problem.accumulate
    lse = torch.stack(sums)  # [blocks, batch, rows]
    if problem.sinks is not None:  # one more score per head, whose value is zero
        queries = lse.shape[-1] // problem.sinks.shape[0]
        lse = torch.cat((lse, problem.sinks.to(acc).repeat_interleave(queries).expand(1, *lse.shape[1:])))
    top = lse.amax(0, keepdim=True)
    weights = torch.exp(lse - top.masked_fill(top == float("-inf"), 0))
    weights = weights / weights.sum(0, keepdim=True).clamp_min(torch.finfo(acc).tiny)
    if contexts[0].numel() <= _SMALL_CONTEXT:  # one operation for all: starting one costs more than its work
        return (torch.stack(contexts).to(acc) * weights[: len(contexts), ..., None]).sum(0)
    out = contexts[0].to(acc) * weights[0, ..., None]
    for context, weight in zip(contexts[1:], weights[1:], strict=False):
        out.addcmul_(context.to(acc), weight[..., None])
    return out


def _whole(problem: Problem) -> Tensor:
    """The same in three differentiable steps, all tokens at once."""
    batch, heads, queries, rank = problem.q_latent.shape
    rows, tokens, acc = heads * queries, problem.kv_c.shape[1], problem.accumulate
    latents, k_pe = problem.latents(0, tokens), problem.k_pe.to(problem.q_latent.dtype)
    scores = problem.q_latent.reshape(batch, rows, rank) @ latents.mT
    scores = (scores + problem.q_pe.reshape(batch, rows, -1) @ k_pe.mT).to(acc) * problem.scale
    if problem.softcap is not None or problem.mask is not None:
        scores = _cap_and_mask(problem, scores, slice(None), slice(None))
    if problem.sinks is not None:
        sink = problem.sinks.to(acc).repeat_interleave(queries)[None, :, None].expand(batch, -1, 1)
        scores = torch.cat((scores, sink), dim=-1)
    if problem.mask is not None:
        blind = torch.all(scores == float("-inf"), dim=-1, keepdim=True)
        scores = scores.masked_fill(blind, 0)
        weights = torch.softmax(scores, dim=-1).masked_fill(blind, 0)
    else:
        weights = torch.softmax(scores, dim=-1)
    context = weights[..., :tokens].to(problem.q_latent.dtype) @ latents
    return context.view(batch, heads, queries, rank)
