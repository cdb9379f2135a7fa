"""The Triton kernels, run by Triton's interpreter on a CPU, against the formula in fp64; skipped without triton.

The interpreter is switched on when triton is first imported, so the tests run in a process of their own.
"""

import importlib.util
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from test_latent_attention import MASKS, arguments, formula, relative
from torch import Tensor

from mla_convert.attention import latent_attention
from mla_convert.attention.problem import Problem
from mla_convert.errors import BadOption

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
interpreted = pytest.mark.skipif(not INTERPRETED, reason="run by test_all_of_this_file_in_the_interpreter")
# Over the largest value of the result. Measured: fp32 4e-7, bf16 8e-3, fp16 1e-3.
BOUNDS = {torch.float32: 2e-6, torch.bfloat16: 2e-2, torch.float16: 3e-3}


@pytest.mark.skipif(INTERPRETED, reason="already there")
def test_all_of_this_file_in_the_interpreter() -> None:
    if importlib.util.find_spec("triton") is None:
        pytest.skip("triton is not installed")
    environment = os.environ | {"TRITON_INTERPRET": "1"}
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "no:xdist", __file__]
    done = subprocess.run(command, env=environment, cwd=Path(__file__).parent, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-2000:]
    assert " passed" in done.stdout and "1 skipped" in done.stdout


def tiles(**changes: int) -> Any:
    from mla_convert.attention.triton_backend import Tiles

    return Tiles(**({"rows": 16, "tokens": 16, "slices": 1, "warps": 4, "stages": 1} | changes))


def run(given: dict[str, Any], **changes: int) -> Tensor:
    from mla_convert.attention.triton_backend import attend

    return attend(Problem(**given), tiles(**changes))


def poisoned(given: dict[str, Any], spare: int = 29) -> dict[str, Any]:
    """The same cache at the start of a larger buffer whose unused rows, and columns between rows, are NaN."""
    batch, tokens, rank = given["kv_c"].shape
    rope = given["k_pe"].shape[-1]
    buffer = torch.full((batch, tokens + spare, rank + rope + 3), float("nan"), dtype=given["kv_c"].dtype)
    buffer[:, :tokens, :rank], buffer[:, :tokens, rank : rank + rope] = given["kv_c"], given["k_pe"]
    return given | {"kv_c": buffer[:, :tokens, :rank], "k_pe": buffer[:, :tokens, rank : rank + rope]}


EXTRAS: dict[str, dict[str, Any]] = {
    "plain": {},
    "softcap": {"softcap": 1.5},
    "sinks": {"sinks": torch.linspace(-1, 3, 5)},
}


@interpreted
@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("extra", EXTRAS)
def test_equals_the_formula(mask: str, extra: str) -> None:
    given = arguments(dtype=torch.float32) | EXTRAS[extra] | {"mask": MASKS[mask](2, 5, 3, 37)}
    out = run(poisoned(given), slices=2)
    assert relative(out, formula(**given)) <= BOUNDS[torch.float32]
    if mask == "blind query":
        assert (out[:, :, 0] == 0).all()


@interpreted
@pytest.mark.parametrize("dtype", BOUNDS)
def test_every_type(dtype: torch.dtype) -> None:
    given = arguments(dtype=dtype) | EXTRAS["sinks"] | EXTRAS["softcap"] | {"mask": MASKS["padding"](2, 5, 3, 37)}
    out = run(poisoned(given), slices=2)
    assert out.dtype == dtype and relative(out, formula(**given)) <= BOUNDS[dtype]
    assert relative(out, formula(**given | {"scale": 0.4})) > BOUNDS[dtype]  # negative control


@interpreted
@pytest.mark.parametrize(("rank", "rope"), [(1, 2), (7, 0), (64, 18), (130, 64), (512, 64)])
@pytest.mark.parametrize(("heads", "queries"), [(5, 1), (40, 1), (9, 4)])
def test_every_width_and_head_count(rank: int, rope: int, heads: int, queries: int) -> None:
    given = arguments(heads=heads, queries=queries, tokens=33, rank=rank, rope=rope, dtype=torch.float32)
    given["scale"] = (rank + rope) ** -0.5
    assert relative(run(poisoned(given), slices=2), formula(**given)) <= BOUNDS[torch.float32]


@interpreted
@pytest.mark.parametrize("tokens", [1, 16, 17, 100])
@pytest.mark.parametrize(("slices", "rows"), [(1, 16), (2, 32), (7, 16)])
def test_every_length_and_cut(tokens: int, slices: int, rows: int) -> None:
    given = arguments(heads=7, queries=3, tokens=tokens, dtype=torch.float32)
    out = run(poisoned(given), slices=slices, rows=rows)
    assert relative(out, formula(**given)) <= BOUNDS[torch.float32]


@interpreted
def test_chosen_tiles_and_the_public_function() -> None:
    given = arguments(heads=6, queries=1, tokens=700, rank=20, dtype=torch.float32)
    assert relative(latent_attention(**given, backend="triton"), formula(**given)) <= BOUNDS[torch.float32]


@interpreted
@pytest.mark.parametrize("page", [1, 4, 16])
def test_pages_in_any_order_with_poison_everywhere_else(page: int) -> None:
    from mla_convert.attention.triton_backend import Pages, attend_paged

    lengths = [37, 12, 1]
    given = arguments(batch=3, dtype=torch.float32)
    blocks = [-(-length // page) for length in lengths]
    order = torch.randperm(sum(blocks) + 4, generator=torch.Generator().manual_seed(2))
    pages = torch.full((len(order), page, 25), float("nan"))
    table = torch.full((3, max(blocks) + 1), 10**6, dtype=torch.int32)  # a page that does not exist
    taken = 0
    for item, (length, count) in enumerate(zip(lengths, blocks, strict=True)):
        for index in range(count):
            rows = slice(index * page, min((index + 1) * page, length))
            number = int(order[taken])
            pages[number, : rows.stop - rows.start] = torch.cat((given["kv_c"], given["k_pe"]), -1)[item, rows]
            table[item, index], taken = number, taken + 1
    paged = Pages(pages[..., :19], pages[..., 19:], table, torch.tensor(lengths, dtype=torch.int32))
    out = attend_paged(given["q_latent"], given["q_pe"], paged, given["scale"], tiles(slices=2))
    mask = torch.arange(37) < torch.tensor(lengths)[:, None, None, None]
    assert relative(out, formula(**given, mask=mask)) <= BOUNDS[torch.float32]
    with pytest.raises(BadOption, match=r"block_table \[3, .*\] and lengths \[3\] must have one row for each of the 2"):
        attend_paged(given["q_latent"][:2], given["q_pe"][:2], paged, given["scale"])


@interpreted
@pytest.mark.parametrize("stored", [torch.int8, torch.float8_e4m3fn])
@pytest.mark.parametrize("dtype", BOUNDS)
def test_scaled_latents(stored: torch.dtype, dtype: torch.dtype) -> None:
    """The kernel dequantises what it loads: equal to the formula on the dequantised latents."""
    given = arguments(dtype=dtype)
    scales = given["kv_c"].float().abs().amax(-1) / (127 if stored == torch.int8 else 448)
    scaled = given["kv_c"].float() / scales[..., None]
    kept = scaled.round().to(stored) if stored == torch.int8 else scaled.to(stored)
    out = run(given | {"kv_c": kept, "scales": scales}, slices=2)
    meant = given | {"kv_c": kept.double() * scales[..., None].double()}
    assert relative(out, formula(**meant)) <= BOUNDS[dtype]
    assert relative(out, formula(**given)) > 1e-4  # negative control: quantising is no identity


@interpreted
def test_refusals_say_why(caplog: pytest.LogCaptureFixture) -> None:
    from mla_convert.attention.triton_backend import refusal

    assert refusal(Problem(**arguments(dtype=torch.float32))) == ""
    assert "float64 is none of float32" in refusal(Problem(**arguments()))
    given = arguments(dtype=torch.float32)
    given["q_pe"].requires_grad_()
    assert "no gradient" in refusal(Problem(**given))
    assert "1025 numbers exceeds 1024" in refusal(Problem(**arguments(rank=1025, dtype=torch.float32)))
