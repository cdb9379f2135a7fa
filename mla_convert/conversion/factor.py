"""The factor step: one latent for keys and values, in the metric in which truncation is least harmful.

To first order the error of a layer's output at query position t is, over heads i of KV head j,

    sum_i W_O,i [ dW_V,i hbar_i  +  sum_s a_s (v_s - o_i) (q~_i . dW_K,i h_s) ],      hbar_i = sum_s a_s h_s,

with attention a, head output o_i = sum_s a_s v_s and q~ the non-rotating query. Both terms are quadratic in
the error of one up-projection, so with E = W_DKV and D = W_UV,i or W_UK,i

    loss = sum_blocks tr( M_b (W_b - D_b E) C_b (W_b - D_b E)^T ),
    values: M = W_O,i^T W_O,i,  C = E[hbar hbar^T];    keys: M = E[q~ q~^T] (weighted),  C = E[J^T J],
    J = W_O,i sum_s a_s (v_s - o_i) h_s^T.

Errors of keys are not always small, so assemble.py adds a share of the plain E[h h^T] to E[J^T J].

The second moment of *averaged* inputs is what the values are multiplied by: errors of single tokens that
cancel in the average do no harm. If all C_b were equal this would be one truncated SVD of M^1/2 [W_K; W_V]
C^1/2, which is the start; alternating least squares then uses the true C_b. Everything is fp64.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from jaxtyping import Float
from torch import Tensor

FLOOR = 1e-10  # eigenvalues below this fraction of the largest are noise: eigh's error is about 1e-15 of it
SWEEPS = 4  # of alternating least squares; the loss falls by under 1 % per sweep after that
GROWN_FROM = 0.9  # share of the values' rank that is fitted first; 0.75 does nearly as well
NOTHING = 1e-6  # share of a block's size below which nothing of it is lost
RIDGE = 1e-9  # the same for the inverses inside alternating least squares, relative to the mean eigenvalue


@dataclass(frozen=True, eq=False)
class Block:
    """One up-projection to be fitted: rows W, output metric M, input second moment C."""

    W: Float[Tensor, "width hidden_size"]
    M: Float[Tensor, "width width"]
    C: Float[Tensor, "hidden_size hidden_size"]


@dataclass(frozen=True, eq=False)
class Factors:
    """W_DKV, one up-projection per block, and the loss after each sweep."""

    W_DKV: Float[Tensor, "kv_lora_rank hidden_size"]
    ups: list[Float[Tensor, "width kv_lora_rank"]]
    losses: list[float]


def roots(matrix: Tensor, floor: float = FLOOR) -> tuple[Tensor, Tensor]:
    """Square root and inverse square root of a symmetric positive semidefinite matrix, eigenvalues floored.

    Duplicated or dead directions (singular matrices) are therefore harmless; a zero matrix gives the
    identity.
    """
    values, vectors = torch.linalg.eigh((matrix + matrix.T) / 2)
    top = values[-1].item()
    if not top > 0:
        eye = torch.eye(len(matrix), dtype=matrix.dtype, device=matrix.device)
        return eye, eye
    root = values.clamp_min(top * floor).sqrt()
    return (vectors * root) @ vectors.T, (vectors / root) @ vectors.T


def slot_sizes(squares: Tensor) -> Tensor:
    """Root mean square of each slot, twice (its real and its imaginary row), from the rows' second moments; 1 if dead.

    A slot's two rows must be scaled alike: they are one complex number.
    """
    size = squares.unflatten(0, (-1, 2)).mean(1).sqrt().repeat_interleave(2)
    return torch.where(size > 0, size, 1.0)


def truncated_svd(blocks: Sequence[Block], rank: int, covariance: Tensor) -> tuple[Tensor, Tensor]:
    """W_DKV from the leading left singular vectors of M^1/2 W covariance^1/2, and all singular values.

    W stacks the blocks and M is block-diagonal. Rows of W_DKV are U^T M^1/2 W.
    """
    weighted = torch.cat([roots(b.M)[0] @ b.W for b in blocks])
    left, singular, _ = torch.linalg.svd(weighted @ roots(covariance)[0], full_matrices=False)
    return left[:, :rank].T @ weighted, singular


def orthonormal_rows(matrix: Tensor) -> Tensor:
    """An orthonormal basis of the row space: the same latent in the best-conditioned coordinates."""
    rows: Tensor = torch.linalg.qr(matrix.T).Q.T
    return rows.contiguous()


def fit_ups(blocks: Sequence[Block], W_DKV: Tensor) -> list[Tensor]:
    """The best D_b = W C E^T (E C E^T)^-1 for a given E = W_DKV; M_b does not matter."""
    ups = []
    for block in blocks:
        EC = W_DKV @ block.C
        ups.append(torch.linalg.solve(ridged(EC @ W_DKV.T), EC @ block.W.T).T)
    return ups


def ridged(matrix: Tensor) -> Tensor:
    """matrix plus RIDGE times its mean eigenvalue; a zero matrix becomes the identity."""
    mean = matrix.diagonal().mean().item()
    eye = torch.eye(len(matrix), dtype=matrix.dtype, device=matrix.device)
    return matrix + (RIDGE * mean if mean > 0 else 1.0) * eye


def loss_of(blocks: Sequence[Block], W_DKV: Tensor, ups: Sequence[Tensor]) -> float:
    """sum_b tr(M (W - D E) C (W - D E)^T): squared output error per query."""
    total = 0.0
    for block, up in zip(blocks, ups, strict=True):
        error = block.W - up @ W_DKV
        total += ((block.M @ error @ block.C) * error).sum().item()
    return total


def refit_down(blocks: Sequence[Block], W_DKV: Tensor, ups: Sequence[Tensor], steps: int) -> Tensor:
    """Solve sum_b D^T M D E C = sum_b D^T M W C, the best E for given D_b, by conjugate gradients."""
    by_moment: dict[int, tuple[Tensor, Tensor]] = {}
    target = torch.zeros_like(W_DKV)
    for block, up in zip(blocks, ups, strict=True):
        gram, key = up.T @ block.M @ up, id(block.C)
        by_moment[key] = (by_moment[key][0] + gram if key in by_moment else gram, block.C)
        target += up.T @ block.M @ block.W @ block.C
    pairs = list(by_moment.values())

    def apply(x: Tensor) -> Tensor:
        return sum((gram @ x @ moment for gram, moment in pairs), torch.zeros_like(x))

    if not any(gram.trace() > 0 for gram, _ in pairs):
        return W_DKV  # nothing reads these projections: any latent is the best one
    grams = sum((gram for gram, _ in pairs), torch.zeros_like(pairs[0][0]))
    share = [gram.trace() / grams.trace() for gram, _ in pairs]
    mean = sum((s * moment for s, (_, moment) in zip(share, pairs, strict=True)), torch.zeros_like(pairs[0][1]))
    left, right = torch.linalg.inv(ridged(grams)), torch.linalg.inv(ridged(mean))

    x = W_DKV.clone()
    residual = target - apply(x)
    z = left @ residual @ right
    direction, energy = z, (residual * z).sum()
    for _ in range(steps):
        if not energy > 0:
            break
        image = apply(direction)
        step = energy / (direction * image).sum()
        x, residual = x + step * direction, residual - step * image
        z = left @ residual @ right
        direction, energy = z + (residual * z).sum() / energy * direction, (residual * z).sum()
    return x


def factor(blocks: Sequence[Block], rank: int, covariance: Tensor, sweeps: int = SWEEPS, cg_steps: int = 10) -> Factors:
    """Fit one W_DKV of `rank` rows and an up-projection per block.

    Starts from `truncated_svd`, and from `_grown` too where that may be a trap; keeps the best of all sweeps, so the
    loss never rises. sweeps=0 is the truncated SVD with up-projections fitted to it.
    """
    E = orthonormal_rows(truncated_svd(blocks, rank, covariance)[0])
    ups = fit_ups(blocks, E)
    found = _fitted(blocks, E, ups, sweeps, cg_steps)
    whole = _rows_taken_whole(blocks, E, ups) if sweeps else 0
    if 1 < whole < rank:
        grown = _grown(blocks, rank, int(GROWN_FROM * whole), covariance, cg_steps)
        other = _fitted(blocks, grown, fit_ups(blocks, grown), sweeps, cg_steps)
        if min(other.losses) < min(found.losses):
            return replace(other, losses=[found.losses[0], *other.losses])
    return found


def _fitted(blocks: Sequence[Block], E: Tensor, ups: list[Tensor], sweeps: int, cg_steps: int) -> Factors:
    """The best of `sweeps` sweeps from E and the `ups` fitted to it."""
    best, losses = (E, ups), [loss_of(blocks, E, ups)]
    for _ in range(sweeps):
        E = orthonormal_rows(refit_down(blocks, E, ups, cg_steps))
        ups = fit_ups(blocks, E)
        losses.append(loss_of(blocks, E, ups))
        if losses[-1] < min(losses[:-1]):
            best = (E, ups)
        else:
            break
    return Factors(best[0], list(best[1]), losses)


def _rows_taken_whole(blocks: Sequence[Block], E: Tensor, ups: Sequence[Tensor]) -> int:
    """Rows of the blocks of which E leaves nothing out."""
    found = 0
    for block, up in zip(blocks, ups, strict=True):
        nothing, lost = torch.zeros_like(up), loss_of([block], E, [up])
        found += len(block.W) if lost < NOTHING * loss_of([block], E, [nothing]) else 0
    return found


def _grown(blocks: Sequence[Block], rank: int, fewer: int, covariance: Tensor, cg_steps: int) -> Tensor:
    """W_DKV of `fewer` rows after two sweeps, and the leading directions of what it leaves out.

    With more rows than all values have, the truncated SVD takes the values whole and sweeps give nothing back to the
    keys. SmolLM2, layer 3, 198 + 58, after four sweeps: 0.0020 from the SVD, 0.0011 grown; 192 + 64 has 0.0007.
    """
    E = orthonormal_rows(truncated_svd(blocks, fewer, covariance)[0])
    few = _fitted(blocks, E, fit_ups(blocks, E), 2, cg_steps)
    left = [replace(block, W=block.W - up @ few.W_DKV) for block, up in zip(blocks, few.ups, strict=True)]
    return orthonormal_rows(torch.cat([few.W_DKV, truncated_svd(left, rank - fewer, covariance)[0]]))


def losses_by_rank(blocks: Sequence[Block], ranks: Sequence[int], covariance: Tensor | None) -> dict[int, float]:
    """The loss of `factor` without sweeps at each rank, from one decomposition; covariance None: of `weight_svd`."""
    if covariance is None:
        squares = torch.linalg.svdvals(torch.cat([b.W for b in blocks])).square()
        return {rank: squares[rank:].sum().item() for rank in ranks}
    rows, _ = truncated_svd(blocks, max(ranks), covariance)
    losses = {}
    for rank in ranks:
        E = orthonormal_rows(rows[:rank])
        losses[rank] = loss_of(blocks, E, fit_ups(blocks, E))
    return losses


def weight_svd(blocks: Sequence[Block], rank: int) -> Factors:
    """Plain truncated SVD of the stacked weights, no metric: exact (to rounding) when nothing is cut off."""
    stacked = torch.cat([b.W for b in blocks])
    _, singular, right = torch.linalg.svd(stacked, full_matrices=False)
    E = right[:rank].contiguous()
    return Factors(E, [b.W @ E.T for b in blocks], [singular[rank:].square().sum().item()])
