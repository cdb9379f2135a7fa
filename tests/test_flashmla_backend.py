"""FlashMLA's backend hands its kernel the pages the cache lies in; the kernel here is a stand-in that reads them."""

import sys
from types import ModuleType
from typing import Any

import pytest
import torch
from test_latent_attention import arguments, formula, relative
from torch import Tensor

from mla_convert.attention import flashmla_backend
from mla_convert.attention.problem import Problem


@pytest.fixture
def kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    """Attention over a paged cache by the signature of flash_mla, in plain loops."""

    def attend(
        q: Tensor, k_cache: Tensor, block_table: Tensor, cache_seqlens: Tensor, head_dim_v: int, metadata: Any,
        splits: Any, softmax_scale: float, causal: bool,
    ) -> tuple[Tensor, None]:  # fmt: skip
        assert k_cache.shape[1:] == (64, 1, 576) and head_dim_v == 512 and not causal
        out = torch.empty(*q.shape[:3], head_dim_v, dtype=q.dtype)
        for item, length in enumerate(cache_seqlens.tolist()):
            rows = k_cache[block_table[item].long()].flatten(0, 2)[:length]
            weights = torch.softmax(torch.einsum("thd,sd->ths", q[item], rows) * softmax_scale, -1)
            out[item] = torch.einsum("ths,sd->thd", weights, rows[:, :512])
        return out, None

    module = ModuleType("flash_mla")
    module.flash_mla_with_kvcache = attend  # type: ignore[attr-defined]
    module.get_mla_metadata = lambda *_: (None, None)  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "flash_mla", module)


def in_buffer(given: dict[str, Any], capacity: int, width: int = 576) -> dict[str, Any]:
    batch, tokens, _ = given["kv_c"].shape
    buffer = torch.full((batch, capacity, width), float("nan"), dtype=given["kv_c"].dtype)
    buffer[:, :tokens, :512], buffer[:, :tokens, 512:576] = given["kv_c"], given["k_pe"]
    return given | {"kv_c": buffer[:, :tokens, :512], "k_pe": buffer[:, :tokens, 512:576]}


def deepseek(batch: int = 2, **changes: Any) -> dict[str, Any]:
    return arguments(batch=batch, heads=4, queries=2, tokens=100, rank=512, rope=64) | {"scale": 0.05} | changes


@pytest.mark.usefixtures("kernel")
@pytest.mark.parametrize(("batch", "capacity"), [(1, 128), (2, 128), (3, 192)])
def test_pages_are_the_cache_as_it_lies(batch: int, capacity: int) -> None:
    given = in_buffer(deepseek(batch), capacity)
    assert relative(flashmla_backend.attend(Problem(**given)), formula(**given)) <= 1e-13  # measured 4e-16


def test_a_cache_that_is_not_whole_pages_is_left_alone() -> None:
    apart = deepseek() | {"k_pe": deepseek()["k_pe"].clone()}
    for given in (in_buffer(deepseek(), 100), in_buffer(deepseek(), 128, 580), apart):
        assert flashmla_backend._pages(Problem(**given)) is None
    last = in_buffer(deepseek(1), 100)  # one sequence whose last page would end behind the buffer
    assert flashmla_backend._pages(Problem(**last)) is None


def test_refusals_say_why() -> None:
    half = {name: t.half() for name, t in deepseek().items() if isinstance(t, Tensor)} | {"scale": 0.05}
    said = flashmla_backend.refusal
    assert "this cache is 19 + 6" in said(Problem(**arguments()))
    assert "neither bfloat16 nor float16" in said(Problem(**deepseek()))
    assert "no mask" in said(Problem(**half, mask=torch.ones(1, 1, dtype=torch.bool)))
    assert "compute capability 9.0" in said(Problem(**half))
