"""Absorption is an identity: scores and outputs of both forms agree in fp64, without keys or values of full width."""

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from mla_convert.formats.absorbed import LatentCache, absorb, absorbed_query, attend_absorbed
from mla_convert.formats.layer import MLALayer, attend_expanded, rotate

# Relative to the largest value. Measured over the published shape and 200 random ones: scores 1.3e-15, outputs 9e-16
# (a published demonstration reports 8.9e-16 and 2.8e-17, absolute, on values of order one).
BOUND = 1e-14


def random_layer(heads: int, nope: int, rope: int, v: int, rank: int, hidden: int, seed: int = 0) -> MLALayer:
    gen = torch.Generator().manual_seed(seed)

    def draw(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=gen, dtype=torch.float64) / shape[-1] ** 0.5

    return MLALayer(
        W_UQ=draw(heads, nope, hidden), W_QR=draw(heads, rope, hidden), W_DKV=draw(rank, hidden),
        W_KR=draw(rope, hidden), W_UK=draw(heads, nope, rank), W_UV=draw(heads, v, rank),
        W_O=draw(heads, hidden, v), inv_freq=5000.0 ** (-torch.arange(rope // 2, dtype=torch.float64) / (rope // 2)),
        softmax_scale=(nope + rope) ** -0.5,
    )  # fmt: skip


def inputs(batch: int, tokens: int, hidden: int) -> tuple[Tensor, Tensor]:
    gen = torch.Generator().manual_seed(1)
    return torch.randn(batch, tokens, hidden, generator=gen, dtype=torch.float64), torch.arange(tokens)[None]


def relative(a: Tensor, b: Tensor) -> float:
    return ((a - b).abs().max() / b.abs().max()).item()


def test_scores_agree_and_do_not_when_two_heads_are_swapped() -> None:
    layer = random_layer(heads=5, nope=12, rope=6, v=10, rank=17, hidden=40)
    hidden, _ = inputs(2, 9, 40)
    c = hidden @ layer.W_DKV.T
    expanded = torch.einsum("bte,hde->bhtd", hidden, layer.W_UQ) @ torch.einsum("btr,hdr->bhdt", c, layer.W_UK)
    absorbed = absorbed_query(absorb(layer), hidden) @ c[:, None].transpose(-1, -2)
    assert relative(absorbed, expanded) <= BOUND
    assert relative(absorbed.flip(1), expanded) > 0.1


@settings(max_examples=60, deadline=None)
@given(
    heads=st.integers(1, 6), nope=st.integers(1, 20), pairs=st.integers(1, 6), v=st.integers(1, 20),
    rank=st.integers(1, 40), hidden=st.integers(1, 48), batch=st.integers(1, 3), tokens=st.integers(1, 12),
)  # fmt: skip
def test_outputs_agree_for_every_shape(
    heads: int, nope: int, pairs: int, v: int, rank: int, hidden: int, batch: int, tokens: int
) -> None:
    layer = random_layer(heads, nope, 2 * pairs, v, rank, hidden)
    x, positions = inputs(batch, tokens, hidden)
    out, cache = attend_absorbed(absorb(layer), x, positions)
    assert relative(out, attend_expanded(layer, x, positions)) <= BOUND
    assert cache.kv_c.shape == (batch, tokens, rank) and cache.k_pe.shape == (batch, tokens, 2 * pairs)


def test_merged_exactly_where_it_reads_fewer_bytes() -> None:
    """rank x hidden < inner x (rank + hidden) is the count of numbers read; both branches give the same output."""
    small, large = random_layer(3, 16, 4, 16, 8, 40), random_layer(3, 16, 4, 12, 32, 40)
    assert absorb(small).merged_q is not None and absorb(small).merged_out is not None  # 320 < 768
    assert absorb(large).merged_q is None and absorb(large).merged_out is None  # 1280 > 1152 and 864
    for layer in (small, large):
        x, positions = inputs(2, 7, 40)
        assert relative(attend_absorbed(absorb(layer), x, positions)[0], attend_expanded(layer, x, positions)) <= BOUND


@pytest.mark.parametrize("chunk", [1, 7])
def test_chunks_through_the_cache_equal_one_prefill(chunk: int) -> None:
    layer = absorb(random_layer(5, 12, 6, 10, 17, 40))
    hidden, positions = inputs(2, 23, 40)
    whole, _ = attend_absorbed(layer, hidden, positions)
    past: LatentCache | None = None
    parts = []
    for start in range(0, 23, chunk):
        piece = slice(start, start + chunk)
        out, past = attend_absorbed(layer, hidden[:, piece], positions[:, piece], past)
        parts.append(out)
    assert relative(torch.cat(parts, dim=1), whole) <= BOUND
    shifted, _ = attend_absorbed(layer, hidden[:, 7:], positions[:, 7:], None)  # negative control: the past is lost
    assert relative(shifted, whole[:, 7:]) > 1e-2


class _Widths(TorchDispatchMode):
    """Records the shape of every tensor any operation returns."""

    def __init__(self) -> None:
        super().__init__()
        self.shapes: set[tuple[int, ...]] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for tensor in result if isinstance(result, tuple | list) else (result,):
            if isinstance(tensor, Tensor):
                self.shapes.add(tuple(tensor.shape))
        return result


def test_no_key_or_value_of_full_width_exists_on_the_absorbed_path() -> None:
    """At decode, nothing has both the cached tokens (51) and a per-head width (nope 12, v 10, key 18) as dimensions."""
    layer = random_layer(heads=5, nope=12, rope=6, v=10, rank=17, hidden=40)
    hidden, positions = inputs(3, 51, 40)
    absorbed = absorb(layer)
    _, past = attend_absorbed(absorbed, hidden[:, :50], positions[:, :50])
    full = {12, 10, 18, 5 * 12, 5 * 10, 5 * 18}
    with _Widths() as absorbed_widths:
        attend_absorbed(absorbed, hidden[:, 50:], positions[:, 50:], past)
    with _Widths() as expanded_widths:  # negative control
        attend_expanded(layer, hidden, positions)
    assert not [shape for shape in absorbed_widths.shapes if 51 in shape and full & set(shape)]
    assert [shape for shape in expanded_widths.shapes if 51 in shape and full & set(shape)]


def test_content_score_ignores_distance_and_rope_score_sees_distance_only() -> None:
    """The published shape: hidden 2048, kv_lora_rank 512, 16 heads of 128; the content cache is 87.5 % smaller."""
    layer = random_layer(heads=16, nope=128, rope=64, v=128, rank=512, hidden=2048)
    assert (
        layer.W_UK.shape == (16, 128, 512) and layer.W_UV.shape == (16, 128, 512) and layer.W_DKV.shape == (512, 2048)
    )
    assert 1 - layer.kv_lora_rank / (2 * 16 * 128) == 0.875
    gen = torch.Generator().manual_seed(2)
    a, b = torch.randn(2, 1, 1, 2048, generator=gen, dtype=torch.float64)

    def scores(query_at: int, key_at: int) -> tuple[Tensor, Tensor]:
        content = absorbed_query(absorb(layer), a)[0, :, 0] @ (b @ layer.W_DKV.T)[0, 0]
        q_pe = rotate(torch.einsum("bte,hde->bhtd", a, layer.W_QR), torch.tensor([[query_at]]), layer.inv_freq)
        k_pe = rotate(b @ layer.W_KR.T, torch.tensor([[key_at]]), layer.inv_freq)
        return content, (q_pe[0, :, 0] @ k_pe[0, 0])

    content, rope = scores(7, 3)
    for shift in (0, 1, 1000, 100_000):
        moved_content, moved_rope = scores(7 + shift, 3 + shift)
        assert torch.equal(moved_content, content)
        assert relative(moved_rope, rope) <= 1e-10  # fp64 angles of 1e5 rad: measured 8e-12
    far_content, far_rope = scores(107, 3)
    assert torch.equal(far_content, content) and relative(far_rope, rope) > 0.1
