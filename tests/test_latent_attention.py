"""`latent_attention` against its formula, written out in fp64."""

import logging
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from mla_convert.attention import backend_for, dispatch, latent_attention, latent_attention_op, torch_backend
from mla_convert.attention.problem import Problem, joined
from mla_convert.errors import BadOption

# Over the largest value of the result. Measured: fp64 1.2e-15, fp32 4e-7, bf16 1.2e-2.
BOUNDS = {torch.float64: 1e-14, torch.float32: 5e-6, torch.bfloat16: 2e-2}


def formula(
    q_latent: Tensor, q_pe: Tensor, kv_c: Tensor, k_pe: Tensor, scale: float,
    mask: Tensor | None = None, softcap: float | None = None, sinks: Tensor | None = None,
) -> Tensor:  # fmt: skip
    q_latent, q_pe, kv_c, k_pe = (t.double() for t in (q_latent, q_pe, kv_c, k_pe))
    scores = scale * (torch.einsum("bhtr,bsr->bhts", q_latent, kv_c) + torch.einsum("bhtp,bsp->bhts", q_pe, k_pe))
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    if mask is not None:
        scores = scores.masked_fill(~mask, float("-inf")) if mask.dtype == torch.bool else scores + mask.double()
    weights = torch.exp(scores - scores.amax(-1, keepdim=True).clamp_min(-1e300))
    total = weights.sum(-1, keepdim=True)
    if sinks is not None:
        total = total + torch.exp(sinks.double()[:, None, None] - scores.amax(-1, keepdim=True).clamp_min(-1e300))
    return torch.einsum("bhts,bsr->bhtr", weights / total.clamp_min(1e-300), kv_c)


def arguments(
    batch: int = 2, heads: int = 5, queries: int = 3, tokens: int = 37, rank: int = 19, rope: int = 6,
    dtype: torch.dtype = torch.float64, seed: int = 0, one_buffer: bool = True,
) -> dict[str, Any]:  # fmt: skip
    gen = torch.Generator().manual_seed(seed)

    def draw(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=gen, dtype=torch.float64).to(dtype)

    cache = draw(batch, tokens, rank + rope)
    kv_c, k_pe = cache[..., :rank], cache[..., rank:]
    if not one_buffer:
        kv_c, k_pe = kv_c.contiguous(), k_pe.contiguous()
    return {
        "q_latent": draw(batch, heads, queries, rank), "q_pe": draw(batch, heads, queries, rope),
        "kv_c": kv_c, "k_pe": k_pe, "scale": 0.3,
    }  # fmt: skip


def relative(a: Tensor, b: Tensor) -> float:
    return ((a.double() - b).abs().max() / b.abs().max()).item()


@pytest.fixture(params=[2, 5, 64])
def block(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> int:
    """Tokens taken at a time, so that 37 tokens are many blocks, a ragged number of them, or one."""
    monkeypatch.setattr(torch_backend, "_block_of", lambda _: request.param)
    return int(request.param)


@pytest.mark.parametrize("threads", [2, 3, 7])
@pytest.mark.parametrize("tokens", [1, 36, 37, 300])
@pytest.mark.parametrize("plus", ["nothing", "cap", "sinks"])
def test_tokens_split_among_threads(
    monkeypatch: pytest.MonkeyPatch, block: int, threads: int, tokens: int, plus: str
) -> None:
    taken = list[int]()
    inner = torch_backend._pieces
    monkeypatch.setattr(torch_backend, "_threads", lambda: threads)
    monkeypatch.setattr(torch_backend, "_PIECE_WORK", 1)  # however small the pieces
    monkeypatch.setattr(torch_backend, "_pieces", lambda *a: [taken.append(p[2]) or p for p in inner(*a)])
    given = arguments(batch=1, queries=1, tokens=tokens, dtype=torch.float32)
    more = {"cap": {"softcap": 2.0}, "sinks": {"sinks": torch.linspace(-1, 1, 5)}}.get(plus, {})
    assert relative(torch_backend.latent_attention(**given, **more), formula(**given, **more)) < BOUNDS[torch.float32]
    assert (threads in taken) == (tokens >= threads)  # measured: 3.6e-7 off the formula
    # the control: pieces that are put together without their weights; measured 0.18 at least
    if tokens == 300:
        monkeypatch.setattr(
            torch_backend, "_softmax", lambda s, acc, blind_rows: (s.softmax(-1), s.new_zeros(s.shape[:2]))
        )
        assert relative(torch_backend.latent_attention(**given, **more), formula(**given, **more)) > 0.01


def test_masks_batches_and_many_rows_are_not_split(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch_backend, "_threads", lambda: 3)
    for options, parts in (({}, 3), ({"batch": 2}, 1), ({"queries": 20}, 1), ({"dtype": torch.bfloat16}, 1)):
        given = arguments(**{"batch": 1, "queries": 1, "dtype": torch.float32} | options)
        problem = Problem(**given)
        assert torch_backend._parts(problem, 5 * options.get("queries", 1)) == parts


MASKS = {
    "none": lambda b, h, q, t: None,
    "causal": lambda b, h, q, t: torch.ones(q, t, dtype=torch.bool).tril(t - q),
    "padding": lambda b, h, q, t: torch.arange(t) >= torch.arange(b)[:, None, None, None] * 11,
    "per head, added": lambda b, h, q, t: torch.randn(1, h, q, t, generator=torch.Generator().manual_seed(3)),
    "blind query": lambda b, h, q, t: torch.arange(q)[:, None].expand(q, t) > 0,
    "all keys alike": lambda b, h, q, t: torch.ones(b, 1, q, 1, dtype=torch.bool),
}


@pytest.mark.usefixtures("block")
@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("dtype", BOUNDS)
@pytest.mark.parametrize("extra", ["plain", "softcap", "sinks"])
@pytest.mark.parametrize("one_buffer", [True, False])
def test_equals_the_formula(mask: str, dtype: torch.dtype, extra: str, one_buffer: bool) -> None:
    given = arguments(dtype=dtype, one_buffer=one_buffer)
    given["mask"] = MASKS[mask](2, 5, 3, 37)
    given |= {"softcap": {"softcap": 1.5}, "sinks": {"sinks": torch.linspace(-1, 3, 5)}, "plain": {}}[extra]
    out = latent_attention(**given)
    assert out.dtype == dtype and out.shape == (2, 5, 3, 19)
    assert relative(out, formula(**given)) <= BOUNDS[dtype]
    if mask == "blind query":
        assert (out[:, :, 0] == 0).all()


@pytest.mark.parametrize("wrong", ["mask", "softcap", "sinks", "scale"])
def test_every_argument_matters(wrong: str) -> None:
    """Negative control of the equality: leaving one out is seen."""
    given = arguments() | {"mask": MASKS["padding"](2, 5, 3, 37), "softcap": 1.5, "sinks": torch.linspace(-1, 3, 5)}
    out = latent_attention(**given | {wrong: 1.0 if wrong == "scale" else None})
    assert relative(out, formula(**given)) > 1e-3


@settings(max_examples=60)
@given(
    batch=st.integers(1, 3), heads=st.integers(1, 7), queries=st.integers(1, 9), tokens=st.integers(1, 70),
    rank=st.integers(1, 40), rope=st.integers(0, 9), one_buffer=st.booleans(),
)  # fmt: skip
def test_equals_the_formula_for_every_shape(**shape: Any) -> None:
    given = arguments(**shape)
    assert relative(latent_attention(**given), formula(**given)) <= BOUNDS[torch.float64]


def test_queries_are_taken_in_turns_where_scores_would_be_too_many(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch_backend, "_SCORES", 2 * 5 * 256 * 2)  # two queries at a time
    given = arguments(queries=7) | {"mask": torch.ones(7, 37, dtype=torch.bool).tril(30)}
    assert relative(latent_attention(**given), formula(**given)) <= BOUNDS[torch.float64]


def test_memory_behind_the_cache_is_never_read() -> None:
    """A growing buffer holds garbage behind its filled part."""
    buffer = torch.full((2, 64, 25), float("nan"), dtype=torch.float64)
    given = arguments()
    buffer[:, :37] = torch.cat((given["kv_c"], given["k_pe"]), dim=-1)
    given |= {"kv_c": buffer[:, :37, :19], "k_pe": buffer[:, :37, 19:]}
    assert relative(latent_attention(**given), formula(**given)) <= BOUNDS[torch.float64]


def test_a_nan_in_the_cache_is_not_hidden() -> None:
    given = arguments() | {"mask": MASKS["causal"](2, 5, 3, 37)}
    given["kv_c"][0, 0, 0] = float("nan")
    out = latent_attention(**given)
    assert out[0].isnan().all() and out[1].isfinite().all()


def test_gradients_equal_those_of_the_formula() -> None:
    given = arguments() | {"mask": MASKS["causal"](2, 5, 3, 37), "softcap": 1.5}
    given["sinks"] = torch.linspace(-1, 3, 5, dtype=torch.float64)
    names = ("q_latent", "q_pe", "kv_c", "k_pe", "sinks")
    grads = []
    for function in (latent_attention, formula):
        leaves = {name: given[name].detach().clone().requires_grad_() for name in names}
        out = function(**given | leaves)
        out.square().sum().backward()
        grads.append([leaves[name].grad for name in names])
    for ours, theirs in zip(*grads, strict=True):
        assert ours.isfinite().all() and relative(ours, theirs) <= 1e-13  # measured 1e-15


def test_a_query_that_sees_nothing_has_gradients_of_zero() -> None:
    given = arguments() | {"mask": MASKS["blind query"](2, 5, 3, 37)}
    given["q_latent"].requires_grad_()
    latent_attention(**given).square().sum().backward()
    grad = given["q_latent"].grad
    assert (grad[:, :, 0] == 0).all() and (grad[:, :, 1:] != 0).all()


def test_one_buffer_is_recognised_and_two_are_not() -> None:
    cache = torch.randn(2, 9, 25)
    left, right = cache[..., :19], cache[..., 19:]
    whole = joined(left, right)
    assert whole is not None and whole.data_ptr() == cache.data_ptr() and torch.equal(whole, cache)
    assert joined(left, right.clone()) is None
    assert joined(left[..., :18], right) is None  # a gap
    assert joined(cache[..., 6:], cache[..., :6]) is None  # the wrong way round


def test_the_operator_is_well_formed_and_compiles() -> None:
    given = arguments(dtype=torch.float32) | {"mask": None, "softcap": None, "sinks": None, "backend": "torch"}
    torch.library.opcheck(latent_attention_op, tuple(given.values()))
    compiled = torch.compile(latent_attention, backend="aot_eager", fullgraph=True)
    assert torch.equal(compiled(**given), latent_attention(**given))


BAD: dict[str, tuple[dict[str, Any], str]] = {
    "q_pe": ({"q_pe": torch.zeros(2, 5, 4, 6)}, r"q_pe has shape \[2, 5, 4, 6\].*needs \[2, 5, 3, 6\]"),
    "kv_c": ({"kv_c": torch.zeros(2, 37, 20)}, r"kv_c has shape \[2, 37, 20\].*needs \[2, 37, 19\]"),
    "k_pe": ({"k_pe": torch.zeros(2, 36, 6)}, r"k_pe has shape \[2, 36, 6\].*needs \[2, 37, 6\]"),
    "mask": ({"mask": torch.zeros(36)}, r"mask has shape \[36\].*does not broadcast to .*\[2, 5, 3, 37\]"),
    "sinks": ({"sinks": torch.zeros(4)}, r"sinks has shape \[4\]; give one number per head, \[5\]"),
    "softcap": ({"softcap": 0.0}, r"softcap=0.0 must be above 0, or None"),
    "backend": ({"backend": "cuda"}, r"unknown backend 'cuda': use one of auto, torch, triton, flashmla"),
}


@pytest.mark.parametrize("name", BAD)
def test_refusals(name: str) -> None:
    change, message = BAD[name]
    with pytest.raises(BadOption, match=message):
        latent_attention(**arguments() | change)


def test_a_backend_that_is_missing_falls_back_with_one_line(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(dispatch.importlib.util, "find_spec", lambda _: None)
    dispatch._installed.cache_clear()
    dispatch._log_once.cache_clear()
    given = arguments()
    problem = Problem(**given)
    with caplog.at_level(logging.INFO, logger="mla_convert"):
        assert [backend_for(problem, "flashmla") for _ in range(3)] == ["torch"] * 3
        out = latent_attention(**given, backend="triton")
    dispatch._installed.cache_clear()
    assert [r.getMessage() for r in caplog.records] == [
        "latent attention: not with flashmla: package flash_mla is not installed",
        "latent attention: not with triton: package triton is not installed",
    ]
    assert torch.equal(out, latent_attention(**given, backend="torch"))
