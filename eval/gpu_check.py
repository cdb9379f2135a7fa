"""Triton kernels on a GPU: right (against fp64), then fast (against the machine's limits and torch's own attention).

`--dry` runs every line on a CPU with tiny sizes under TRITON_INTERPRET=1; its times mean nothing.
"""

import argparse
import json
import statistics
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from mla_convert.attention import torch_backend
from mla_convert.attention.problem import Problem
from mla_convert.attention.triton_backend import Pages, Tiles, attend, attend_paged, tiles_for
from mla_convert.benchmark.bench import Limits, measure_limits

# Norm of the difference over the norm of the result, against fp64. bf16 and fp16 round the weights and the output.
BOUNDS = {torch.float32: 1e-5, torch.bfloat16: 1e-2, torch.float16: 2e-3}
GOALS = {32: 0.8, 128: 0.6}  # share of the limit, by number of heads


def main() -> None:
    """Run both parts and write one JSON file; exit code 1 if a kernel is wrong."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--seconds", type=float, default=250, help="stop starting new work after this long")
    parser.add_argument("--dry", action="store_true")
    given = parser.parse_args()
    end = time.monotonic() + given.seconds
    device = torch.device("cpu" if given.dry else "cuda")
    torch.manual_seed(0)
    checks = list(correctness(device, given.dry))
    wrong = [check for check in checks if not check["ok"]]
    print(f"correctness: {len(checks) - len(wrong)} of {len(checks)} ok", *wrong, sep="\n  ")
    found: dict[str, Any] = {"device": "cpu" if given.dry else torch.cuda.get_device_name(), "correctness": checks}
    limits = measure_limits(torch.float32 if given.dry else torch.bfloat16, device)
    found["limits"] = {"copy_gb_s": limits.copy / 1e9, "bf16_tflop_s": limits.product / 1e12}
    print(f"limits: {found['limits']}")
    found["kernels"], found["tiles"] = [], []
    for rows, work in (("kernels", timings(device, limits, given.dry)), ("tiles", sweep(device, given.dry))):
        for row in work:
            found[rows].append(row)
            print(json.dumps(row))
            if time.monotonic() > end:
                print(f"time is up: {rows} not finished")
                break
        given.out.write_text(json.dumps(found, indent=1))
    raise SystemExit(1 if wrong else 0)


def draw(batch: int, heads: int, queries: int, tokens: int, rank: int, rope: int, dtype: torch.dtype,
         device: torch.device) -> dict[str, Any]:  # fmt: skip
    """Arguments of a Problem; the cache is the start of a buffer whose other rows are NaN."""
    buffer = torch.full((batch, tokens + 64, rank + rope), float("nan"), dtype=dtype, device=device)
    buffer[:, :tokens].normal_()
    queries_of = [torch.randn(batch, heads, queries, width, device=device).to(dtype) for width in (rank, rope)]
    return {
        "q_latent": queries_of[0], "q_pe": queries_of[1], "kv_c": buffer[:, :tokens, :rank],
        "k_pe": buffer[:, :tokens, rank:], "scale": (rank + rope) ** -0.5,
    }  # fmt: skip


def exact(given: dict[str, Any]) -> Tensor:
    """The torch backend in fp64."""
    return torch_backend.attend(
        Problem(**{k: v.double() if isinstance(v, Tensor) and v.dtype != torch.bool else v for k, v in given.items()})
    )


def correctness(device: torch.device, dry: bool) -> Iterator[dict[str, Any]]:
    """Widths, lengths, types, masks, softcap, sinks, pages, and stored latents, each against fp64."""

    def check(name: str, out: Tensor, reference: Tensor, bound: float) -> dict[str, Any]:
        error = ((out.double() - reference).norm() / reference.norm()).item()
        return {"check": name, "error": error, "bound": bound, "ok": error <= bound}  # NaN is not ok

    tokens = 70 if dry else 3001
    shapes = [(32, 1, 512, 64), (128, 1, 512, 64), (40, 1, 256, 64), (9, 1, 128, 64), (5, 3, 7, 2), (14, 2, 130, 0)]
    for heads, queries, rank, rope in shapes:
        for dtype, bound in BOUNDS.items():
            given = draw(2, heads, queries, tokens, rank, rope, dtype, device)
            yield check(f"{heads} x {queries}, {rank} + {rope}, {dtype}", attend(Problem(**given)), exact(given), bound)
    dtype = torch.bfloat16
    given = draw(3, 32, 4, tokens, 512, 64, dtype, device)
    masks = {
        "causal": torch.ones(4, tokens, dtype=torch.bool, device=device).tril(tokens - 4),
        "added": torch.randn(3, 1, 4, tokens, device=device),
        "padding": torch.arange(tokens, device=device) >= torch.arange(3, device=device)[:, None, None, None] * 20,
    }
    for name, mask in masks.items():
        masked = given | {"mask": mask, "softcap": 5.0, "sinks": torch.linspace(-1, 1, 32, device=device)}
        yield check(f"{name} mask, softcap, sinks", attend(Problem(**masked)), exact(masked), BOUNDS[dtype])
    yield from (check(*each) for each in _stored(given, BOUNDS[dtype]))
    yield check("pages", *_paged(given, tokens, device), BOUNDS[dtype])
    wrong = exact(given | {"scale": given["scale"] * 1.5})
    negative = check("negative control: another scale", attend(Problem(**given)), wrong, BOUNDS[dtype])
    yield negative | {"ok": not negative["ok"]}


def _stored(given: dict[str, Any], bound: float) -> Iterator[tuple[str, Tensor, Tensor, float]]:
    for name, dtype, largest in (("int8", torch.int8, 127), ("fp8", torch.float8_e4m3fn, 448)):
        latents = given["kv_c"].float()
        scales = latents.abs().amax(-1) / largest
        scaled = latents / scales[..., None]
        kept = (scaled.round() if name == "int8" else scaled).to(dtype)
        meant = given | {"kv_c": kept.double() * scales[..., None].double()}
        yield f"{name} latents", attend(Problem(**given | {"kv_c": kept, "scales": scales})), exact(meant), bound


def _paged(given: dict[str, Any], tokens: int, device: torch.device) -> tuple[Tensor, Tensor]:
    page = 16
    batch, _, rank = given["kv_c"].shape
    lengths = [tokens, tokens // 2, 1]
    blocks = -(-tokens // page)
    order = torch.randperm(batch * blocks, device=device).view(batch, blocks).to(torch.int32)
    rows = torch.cat((given["kv_c"], given["k_pe"]), -1)
    pages = torch.full((batch * blocks, page, rows.shape[-1]), float("nan"), dtype=rows.dtype, device=device)
    for item, length in enumerate(lengths):
        for index in range(-(-length // page)):
            piece = rows[item, index * page : min((index + 1) * page, length)]
            pages[int(order[item, index]), : len(piece)] = piece
        order[item, -(-length // page) :] = 10**6  # pages that do not exist
    held = torch.tensor(lengths, dtype=torch.int32, device=device)
    out = attend_paged(
        given["q_latent"], given["q_pe"], Pages(pages[..., :rank], pages[..., rank:], order, held), given["scale"]
    )
    mask = torch.arange(tokens, device=device) < held[:, None, None, None]
    return out, exact(given | {"mask": mask})


def median_seconds(call: Callable[[], Any], device: torch.device, repeats: int = 15) -> float:
    """Median of single timed calls after two to warm up; the cache of the GPU is swept in between."""
    call(), call()
    if device.type != "cuda":
        start = time.perf_counter()
        call()
        return time.perf_counter() - start
    sweep_out = torch.empty(256 << 20, dtype=torch.int8, device=device)
    times = []
    for _ in range(repeats):
        sweep_out.zero_()
        start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        call()
        stop.record()
        stop.synchronize()
        times.append(start.elapsed_time(stop) / 1e3)
    return statistics.median(times)


def timings(device: torch.device, limits: Limits, dry: bool) -> Iterator[dict[str, Any]]:
    """Decode attention of one layer; GQA (8 KV heads of 128) and transformers' expansion for 32 heads beside it."""
    for heads in (32, 128):
        for rank in (512, 256):
            for tokens in (40, 80) if dry else (4096, 32768, 131072):
                for batch in (1, 2) if dry else (1, 32, 128):
                    yield _timing(heads, rank, 64, tokens, batch, device, limits, dry)


def _timing(
    heads: int, rank: int, rope: int, tokens: int, batch: int, device: torch.device, limits: Limits, dry: bool
) -> dict[str, Any]:
    dtype = torch.float32 if dry else torch.bfloat16
    given = draw(batch, heads, 1, tokens, rank, rope, dtype, device)
    problem = Problem(**given)
    seconds = median_seconds(lambda: attend(problem), device)
    read = batch * tokens * (rank + rope) * dtype.itemsize
    operations = 2 * batch * tokens * heads * (2 * rank + rope)
    least = max(read / limits.copy, operations / limits.product)
    row: dict[str, Any] = {
        "heads": heads, "latent": f"{rank} + {rope}", "tokens": tokens, "batch": batch, "microseconds": seconds * 1e6,
        "gb_s": read / seconds / 1e9, "tflop_s": operations / seconds / 1e12, "share_of_limit": least / seconds,
        "bound_by": "memory" if least == read / limits.copy else "arithmetic", "goal": GOALS[heads],
    }  # fmt: skip
    del given, problem
    if heads == 32:
        row |= _beside(row, rank, rope, tokens, batch, dtype, device, seconds)
    return row


def _beside(
    row: dict[str, Any], rank: int, rope: int, tokens: int, batch: int, dtype: torch.dtype, device: torch.device,
    seconds: float,
) -> dict[str, Any]:  # fmt: skip
    """The same model's GQA by torch, and the expanded latent attention, where they fit."""
    found: dict[str, Any] = {}
    free = 1e9 if device.type == "cpu" else float(torch.cuda.mem_get_info(device)[0])
    if 2 * batch * tokens * 1024 * dtype.itemsize < 0.8 * free:
        query = torch.randn(batch, 32, 1, 128, device=device, dtype=dtype)
        key, value = (torch.randn(batch, 8, tokens, 128, device=device, dtype=dtype) for _ in range(2))
        sdpa = torch.nn.functional.scaled_dot_product_attention
        gqa = median_seconds(lambda: sdpa(query, key, value, enable_gqa=True), device)
        ratio = 2048 / (rank + rope)
        found |= {"gqa_microseconds": gqa * 1e6, "faster_than_gqa": gqa / seconds, "byte_ratio": ratio,
                  "of_byte_ratio": gqa / seconds / ratio}  # fmt: skip
        del query, key, value
    if 4 * batch * tokens * 32 * (128 + rope + 128) * dtype.itemsize < 0.6 * free and tokens * batch <= 1 << 20:
        latents = torch.randn(batch, tokens, rank, device=device, dtype=dtype)
        turned = torch.randn(batch, 1, tokens, rope, device=device, dtype=dtype)
        up = torch.randn(32 * 256, rank, device=device, dtype=dtype)
        query = torch.randn(batch, 32, 1, 128 + rope, device=device, dtype=dtype)

        def expanded() -> Tensor:
            both = (latents @ up.T).view(batch, tokens, 32, 256).transpose(1, 2)
            key = torch.cat((both[..., :128], turned.expand(-1, 32, -1, -1)), -1)
            return torch.nn.functional.scaled_dot_product_attention(query, key, both[..., 128:])

        slow = median_seconds(expanded, device, repeats=3)
        found |= {"expanded_microseconds": slow * 1e6, "faster_than_expanded": slow / seconds}
    return found


def sweep(device: torch.device, dry: bool) -> Iterator[dict[str, Any]]:
    """Other tiles for 512 + 64, batch 32, 32k tokens: what `tiles_for` should choose."""
    tokens, batch, dtype = (40, 1, torch.float32) if dry else (32768, 32, torch.bfloat16)
    for heads in (32, 128):
        problem = Problem(**draw(batch, heads, 1, tokens, 512, 64, dtype, device))
        chosen = tiles_for(batch, heads, tokens, 512, problem.q_latent)
        cuts = [
            (16, 32, 4, 2),
            (32, 32, 4, 2),
            (32, 32, 8, 3),
            (32, 64, 8, 2),
            (64, 32, 8, 2),
            (64, 64, 8, 2),
            (64, 32, 8, 3),
        ]
        for cut in [(chosen.rows, chosen.tokens, chosen.warps, chosen.stages), *cuts][: 2 if dry else None]:
            rows, step, warps, stages = cut
            slices = max(1, chosen.slices * rows // chosen.rows)
            tiles = Tiles(rows=rows, tokens=step, slices=slices, warps=warps, stages=stages)
            row: dict[str, Any] = {"heads": heads, "tiles": str(tiles)}
            try:
                row["microseconds"] = 1e6 * median_seconds(lambda p=problem, t=tiles: attend(p, t), device, repeats=7)
            except Exception as error:  # shared memory or registers do not suffice on this GPU
                row["refused"] = f"{type(error).__name__}: {str(error)[:100]}"
            yield row


if __name__ == "__main__":
    main()
