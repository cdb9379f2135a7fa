"""The factor step: closed forms where there are any, a loss that never rises, matrices that are singular."""

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from mla_convert.conversion.factor import (
    SWEEPS,
    Block,
    factor,
    fit_ups,
    loss_of,
    orthonormal_rows,
    refit_down,
    ridged,
    roots,
    truncated_svd,
    weight_svd,
)

HIDDEN = 29
WIDTHS = (7, 7, 11)  # 25 rows in all, fewer than HIDDEN, so that full rank is 25


def random(*shape: int, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(1000 * seed + sum(shape))
    return torch.randn(shape, generator=generator, dtype=torch.float64)


def positive(size: int, seed: int = 0) -> Tensor:
    """A moment matrix whose eigenvalues span a factor of about 1000."""
    basis = torch.linalg.qr(random(size, size, seed=seed)).Q
    return (basis * torch.logspace(0, -3, size, dtype=torch.float64)) @ basis.T


def alike(seed: int = 0, widths: tuple[int, ...] = WIDTHS, hidden: int = HIDDEN) -> tuple[list[Block], Tensor]:
    """Blocks that all see the same inputs, and the second moment of those."""
    C = positive(hidden, seed + 50)
    return [Block(random(w, hidden, seed=seed + i), positive(w, seed + i), C) for i, w in enumerate(widths)], C


def different(seed: int = 0, widths: tuple[int, ...] = WIDTHS, hidden: int = HIDDEN) -> tuple[list[Block], Tensor]:
    """Blocks with inputs of their own, and the mean of their second moments."""
    blocks = [replace(b, C=positive(hidden, seed + 60 + i)) for i, b in enumerate(alike(seed, widths, hidden)[0])]
    return blocks, sum((b.C for b in blocks), torch.zeros(hidden, hidden, dtype=torch.float64)) / len(blocks)


def brute_loss(blocks: list[Block], E: Tensor, ups: list[Tensor]) -> float:
    """sum_b |M^1/2 (W - D E) C^1/2|^2 with matrix roots from an SVD."""
    total = 0.0
    for block, up in zip(blocks, ups, strict=True):
        left, right = ((u * s.sqrt()) @ u.T for u, s, _ in (torch.linalg.svd(block.M), torch.linalg.svd(block.C)))
        total += (left @ (block.W - up @ E) @ right).square().sum().item()
    return total


def tail(blocks: list[Block], C: Tensor, rank: int) -> float:
    """Sum of squared singular values of M^1/2 W C^1/2 beyond `rank`, as eigenvalues of its Gram matrix."""
    rows = torch.cat([torch.linalg.cholesky(b.M).T @ b.W for b in blocks])
    return torch.linalg.eigvalsh(rows @ C @ rows.T)[:-rank].sum().item()


@pytest.mark.parametrize("rank", [1, 6, 17, 24])
def test_with_equal_moments_the_loss_is_the_truncated_tail(rank: int) -> None:
    blocks, C = alike()
    found = factor(blocks, rank, C, sweeps=0)
    want = tail(blocks, C, rank)
    assert found.W_DKV.shape == (rank, HIDDEN)
    assert [up.shape for up in found.ups] == [(w, rank) for w in WIDTHS]
    # Measured 1.4e-11 or less.
    assert found.losses == [pytest.approx(want, rel=1e-9)]
    assert brute_loss(blocks, found.W_DKV, found.ups) == pytest.approx(want, rel=1e-9)
    # Control: the SVD of the bare weights is not optimal in this metric (measured 1.27 to 42 times the loss).
    plain = weight_svd(blocks, rank).W_DKV
    assert loss_of(blocks, plain, fit_ups(blocks, plain)) > 1.1 * want


def test_singular_values_are_those_of_the_weighted_stack() -> None:
    blocks, C = alike(3)
    singular = truncated_svd(blocks, 5, C)[1]
    torch.testing.assert_close(singular[5:].square().sum().item(), tail(blocks, C, 5), rtol=1e-12, atol=0)


def test_weight_svd_is_exact_at_full_rank_and_best_below() -> None:
    blocks, _ = alike(4)
    full = weight_svd(blocks, 25)
    for block, up in zip(blocks, full.ups, strict=True):
        assert (up @ full.W_DKV - block.W).abs().max() <= 1e-13  # measured 6.2e-15
    cut = weight_svd(blocks, 24)
    error = sum((b.W - up @ cut.W_DKV).square().sum().item() for b, up in zip(blocks, cut.ups, strict=True))
    assert cut.losses == [pytest.approx(error)] and error > 0.1
    torch.testing.assert_close(cut.W_DKV @ cut.W_DKV.T, torch.eye(24, dtype=torch.float64))


def test_full_rank_is_exact_with_different_moments() -> None:
    blocks, C = different(5)
    found = factor(blocks, 25, C)
    for block, up in zip(blocks, found.ups, strict=True):
        # Measured 1.7e-7: the ridge of 1e-9 times a condition number of 1000.
        assert (up @ found.W_DKV - block.W).abs().max() <= 2e-6
    one_less = factor(blocks, 24, C).losses[-1]
    assert one_less > 1e-6 and found.losses[0] <= 1e-9 * one_less  # measured 1.3e-5, 4e-16


def test_sweeps_lower_the_loss_where_moments_differ() -> None:
    blocks, C = different()
    found = factor(blocks, 9, C)
    falls = [after / before for before, after in zip(found.losses, found.losses[1:], strict=False)]
    assert len(falls) == SWEEPS and all(fall < 1 for fall in falls)
    assert found.losses[-1] < 0.9 * found.losses[0]  # measured 0.48
    assert brute_loss(blocks, found.W_DKV, found.ups) == pytest.approx(found.losses[-1], rel=1e-9)
    assert brute_loss(blocks, found.W_DKV.roll(1, 1), found.ups) > 100 * found.losses[-1]  # measured 349


def test_a_latent_wider_than_the_values_does_not_hold_them_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    """Values so large that the truncated SVD takes all their 11 rows, and few directions that keys need."""
    (one, other, values), C = alike(1)
    keys = positive(HIDDEN, 71).matrix_power(3)
    blocks = [replace(one, C=keys), replace(other, C=keys), Block(100 * values.W, values.M, positive(HIDDEN, 91))]
    found = factor(blocks, 15, C)
    monkeypatch.setattr("mla_convert.conversion.factor.NOTHING", 0.0)
    trapped = factor(blocks, 15, C)
    assert found.losses[0] == trapped.losses[0]
    assert min(found.losses) < 0.8 * min(trapped.losses)  # measured 0.62
    assert brute_loss(blocks, found.W_DKV, found.ups) == pytest.approx(min(found.losses), rel=1e-9)


def test_sweeps_change_nothing_where_the_truncated_svd_is_optimal() -> None:
    blocks, C = alike(2)
    found = factor(blocks, 9, C)
    assert min(found.losses) >= (1 - 1e-12) * tail(blocks, C, 9)  # measured 1e-15 above it
    assert brute_loss(blocks, found.W_DKV, found.ups) == pytest.approx(min(found.losses), rel=1e-9)


@settings(max_examples=25)
@given(
    rank=st.integers(1, 30),
    widths=st.lists(st.integers(1, 9), min_size=1, max_size=4),
    hidden=st.integers(3, 31),
    seed=st.integers(0, 99),
)
def test_for_any_sizes_the_best_sweep_is_returned_and_more_rank_never_hurts(
    rank: int, widths: list[int], hidden: int, seed: int
) -> None:
    rank = min(rank, hidden, sum(widths))
    blocks, C = different(seed, tuple(widths), hidden)
    found = factor(blocks, rank, C)
    assert found.W_DKV.shape == (rank, hidden)
    assert [tuple(up.shape) for up in found.ups] == [(w, rank) for w in widths]
    scale = loss_of(blocks, torch.zeros_like(found.W_DKV), [torch.zeros_like(up) for up in found.ups])
    best = loss_of(blocks, found.W_DKV, found.ups)
    assert best == pytest.approx(min(found.losses), rel=1e-9, abs=1e-12 * scale)
    # Each sweep but the last lowers the loss; the last may raise it, and is then thrown away.
    assert sorted(found.losses[:-1], reverse=True) == found.losses[:-1]
    assert found.losses[0] <= scale
    # Ranks nest in the truncated SVD; the ridge may cost up to 1e-9 of the scale.
    if rank > 1:
        assert found.losses[0] <= factor(blocks, rank - 1, C, sweeps=0).losses[0] + 1e-8 * scale


@pytest.mark.parametrize("rank", [1, 9, 20])
@pytest.mark.parametrize("damage", ["dead inputs", "zero inputs", "dead outputs", "zero output", "twins", "zero W"])
def test_singular_moments_give_finite_factors_that_still_fit(damage: str, rank: int) -> None:
    """Directions that text or model never use: whole zero moments, too, as a head with W_O = 0 has."""
    blocks, C = different(8)
    dead = torch.ones(HIDDEN, dtype=torch.float64)
    dead[::3] = 0
    if damage == "dead inputs":
        blocks = [replace(b, C=b.C * dead * dead[:, None]) for b in blocks]
        C = C * dead * dead[:, None]
    elif damage == "zero inputs":
        blocks[1] = replace(blocks[1], C=torch.zeros_like(C))
    elif damage == "dead outputs":
        blocks = [replace(b, M=torch.outer(b.M[0], b.M[0])) for b in blocks]  # of rank one
    elif damage == "zero output":
        blocks[0] = replace(blocks[0], M=torch.zeros_like(blocks[0].M))
    elif damage == "twins":
        blocks = [replace(b, W=b.W[:1].expand_as(b.W).contiguous()) for b in blocks]
    elif damage == "zero W":
        blocks[2] = replace(blocks[2], W=torch.zeros_like(blocks[2].W))
    found = factor(blocks, rank, C)
    assert all(up.isfinite().all() for up in found.ups) and found.W_DKV.isfinite().all()
    assert found.W_DKV.shape == (rank, HIDDEN)
    nothing = loss_of(blocks, found.W_DKV, [torch.zeros_like(up) for up in found.ups])
    assert -1e-9 * nothing <= found.losses[-1] < nothing
    # Up-projections stay of the size of the weights: nothing was divided by a vanishing eigenvalue.
    assert max(up.abs().max().item() for up in found.ups) <= 50  # measured at most 8.3


def test_no_input_at_all_is_no_division_by_zero() -> None:
    blocks, _ = different(9)
    zero = torch.zeros(HIDDEN, HIDDEN, dtype=torch.float64)
    found = factor([replace(b, C=zero) for b in blocks], 6, zero)
    assert found.losses[0] == 0 and found.W_DKV.isfinite().all()


@pytest.mark.parametrize("shared", [True, False])
def test_refit_down_solves_its_normal_equations(shared: bool) -> None:
    """sum_b D^T M D E C = sum_b D^T M W C; the moments of some blocks may be one and the same tensor."""
    blocks, C = different(6)
    if shared:
        blocks = [replace(blocks[0]), replace(blocks[1], C=blocks[0].C), blocks[2]]
    start = orthonormal_rows(truncated_svd(blocks, 9, C)[0])
    ups = fit_ups(blocks, start)

    def residual(E: Tensor) -> float:
        target = sum((up.T @ b.M @ b.W @ b.C for b, up in zip(blocks, ups, strict=True)), torch.zeros_like(E))
        image = sum((up.T @ b.M @ up @ E @ b.C for b, up in zip(blocks, ups, strict=True)), torch.zeros_like(E))
        return ((image - target).norm() / target.norm()).item()

    E = refit_down(blocks, start, ups, steps=400)
    assert residual(E) <= 1e-12  # measured 7e-16
    assert residual(start) > 5e-3  # measured 0.011 and 0.017
    losses = [loss_of(blocks, refit_down(blocks, start, ups, steps), ups) for steps in (0, 1, 3, 10, 30)]
    assert losses == sorted(losses, reverse=True)  # conjugate gradients lower the loss with every step
    assert losses[0] == loss_of(blocks, start, ups)
    # The solution is a minimum: steps in any direction raise the loss.
    for seed in range(3):
        away = E + 1e-3 * random(*E.shape, seed=seed)
        assert loss_of(blocks, away, ups) > loss_of(blocks, E, ups)


def test_refit_down_from_the_solution_stays_there() -> None:
    blocks, C = alike(7)
    E = orthonormal_rows(truncated_svd(blocks, 25, C)[0])
    ups = [b.W @ E.T for b in blocks]
    torch.testing.assert_close(refit_down(blocks, E, ups, 10), E, rtol=0, atol=1e-11)  # measured 5e-14


def test_fit_ups_is_least_squares_whatever_the_output_metric() -> None:
    blocks, _ = different(10)
    E = random(9, HIDDEN, seed=3)
    for block, up in zip(blocks, fit_ups(blocks, E), strict=True):
        root = torch.linalg.cholesky(block.C)
        want = torch.linalg.lstsq((E @ root).T, (block.W @ root).T).solution.T
        torch.testing.assert_close(up, want, rtol=0, atol=3e-7)  # measured 2.3e-8, the ridge
        assert (up - torch.linalg.lstsq(E.T, block.W.T).solution.T).abs().max() > 0.1  # measured 0.78


def test_roots_invert_each_other_and_floor_what_is_singular() -> None:
    matrix = positive(13)
    root, inverse = roots(matrix)
    torch.testing.assert_close(root @ root, matrix, rtol=0, atol=1e-14)  # measured 1e-15
    torch.testing.assert_close(root @ inverse, torch.eye(13).double(), rtol=0, atol=1e-13)  # measured 4e-15
    flat = torch.ones(4, 4, dtype=torch.float64)  # rank one, eigenvalue 4
    root, inverse = roots(flat)
    torch.testing.assert_close(root @ root, flat, rtol=0, atol=1e-8)
    assert inverse.abs().max() <= 1 / (4 * 1e-10) ** 0.5
    negative = flat - 1e-14 * torch.eye(4)  # rounding can make an eigenvalue negative
    assert all(part.isfinite().all() for part in roots(negative))
    for part in roots(torch.zeros(3, 3, dtype=torch.float64)):
        torch.testing.assert_close(part, torch.eye(3, dtype=torch.float64))


def test_ridge_is_relative_and_a_zero_matrix_becomes_the_identity() -> None:
    matrix = positive(5)
    for scale in (1e-12, 1.0, 1e12):
        added = (ridged(scale * matrix) - scale * matrix).diagonal() / (scale * matrix.diagonal().mean())
        torch.testing.assert_close(added, torch.full((5,), 1e-9, dtype=torch.float64), rtol=1e-5, atol=0)
    torch.testing.assert_close(ridged(torch.zeros(3, 3).double()), torch.eye(3, dtype=torch.float64))
