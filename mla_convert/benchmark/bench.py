"""Bench: what a smaller cache buys in speed and memory, beside what the machine allows.

Every variant decodes behind the same number of cached tokens (random ones: a prompt of that length would take most of
the time and change nothing). Variants take turns in each repetition, so that a slow minute hits all of them. Limits
are measured in the same run: bandwidth by copying, arithmetic by a square matrix product of the same type.
"""

from __future__ import annotations

import dataclasses
import logging
import os
import statistics
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from mla_convert.benchmark.bench_models import Sizes, named_models, sizes_of
from mla_convert.benchmark.bench_step import Decoder, Seconds, timed
from mla_convert.decoding.absorb_model import absorbable
from mla_convert.interface import report
from mla_convert.interface.bench_recipe import BenchRecipe, counts, size_in_bytes
from mla_convert.source.loading import resolve_device, resolve_dtype

logger = logging.getLogger(__name__)

# A variant's turn lasts about so long at most: fewer tokens are decoded where one takes seconds.
_TURN_SECONDS = 20.0
# Of the memory that is free, what a cell may use; larger ones are reported as not fitting.
_FREE_SHARE = 0.85


@dataclasses.dataclass(frozen=True)
class Limits:
    """What the machine does: bytes read and written per second by a copy, operations per second of a product."""

    copy: float
    product: float

    def seconds(self, sizes: Sizes, batch: int, tokens: int, itemsize: int, cached: int) -> tuple[float, str]:
        """The least time of one layer's attention over `cached` bytes, and what sets it: memory or arithmetic."""
        operations = 2 * batch * (tokens * sizes.multiplications + sizes.projected)
        memory, arithmetic = (cached + sizes.projected * itemsize) / self.copy, operations / self.product
        return max(memory, arithmetic), "memory" if memory >= arithmetic else "arithmetic"


@dataclasses.dataclass(frozen=True)
class Cell:
    """One variant at one context and batch; times are medians, per decoded token of the batch.

    `attention` is the attention modules (projections and cache included), `core` the part between cache and output
    projection, of all layers; `limit` is the least time of `core`. None where the cell did not fit, or was not timed.
    """

    variant: str
    context: int
    batch: int
    fits: bool
    step: float | None = None
    attention: float | None = None
    core: float | None = None
    limit: float | None = None
    bound_by: str | None = None
    prefill: float | None = None  # seconds of the whole context, batch 1
    cache_bytes: int | None = None  # held, all layers and sequences
    cache_formula: int | None = None
    peak_bytes: int | None = None
    largest_batch: int | None = None
    steps_timed: int = 0

    @property
    def tokens_per_second(self) -> float | None:
        """Decoded tokens per second over the batch."""
        return None if self.step is None else self.batch / self.step

    @property
    def share_of_limit(self) -> float | None:
        """Least possible over measured time of `core`."""
        return None if self.core is None or self.limit is None else self.limit / self.core


@dataclasses.dataclass(frozen=True)
class BenchResult:
    """All cells, and the machine's limits, as measured before (first) and after (second) them."""

    cells: tuple[Cell, ...]
    limits: tuple[Limits, Limits]
    memory: int  # bytes for which `largest_batch` was worked out
    dtype: str
    device: str
    recipe: dict[str, Any]

    def to_json(self) -> dict[str, Any]:
        """The result as plain JSON values, with the versions and the machine."""
        derived = ("tokens_per_second", "share_of_limit")
        cells = [dataclasses.asdict(c) | {name: getattr(c, name) for name in derived} for c in self.cells]
        return {**dataclasses.asdict(self), "cells": cells, "environment": report.environment()}


def bench(recipe: BenchRecipe) -> BenchResult:
    """Time every variant at every context and batch. Writes `recipe.json` and `recipe.plot` where they are named.

    Raises BadOption for an unusable output path or shape, BadCheckpoint when a model cannot be loaded.
    """
    device, dtype = resolve_device(recipe.device), resolve_dtype(recipe.dtype)
    contexts, batches = counts("context", recipe.context), counts("batch", recipe.batch)
    report.check_targets(recipe.json, recipe.plot)
    decoders = [
        Decoder(name, model, variant, cache_dtype)
        for name, model in named_models(recipe, dtype, device)
        for variant, cache_dtype in _variants(recipe, model)
    ]
    memory = size_in_bytes(recipe.memory) if recipe.memory else _total_memory(device)
    before = measure_limits(dtype, device)
    cells: list[Cell] = []
    with report.progress("timing", "cells", len(contexts) * len(batches) * len(decoders)) as advance, torch.no_grad():
        for context in contexts:
            for batch in batches:
                cells += _cells(recipe, decoders, context, batch, before, memory)
                advance(len(decoders))
    result = BenchResult(
        tuple(cells), (before, measure_limits(dtype, device)), memory, recipe.dtype, str(device), recipe.to_dict()
    )
    if recipe.json is not None:
        report.write_json(result.to_json(), recipe.json)
    if recipe.plot is not None:
        from mla_convert.benchmark.bench_report import plot_bench

        plot_bench(result, recipe.plot)
    return result


def _variants(recipe: BenchRecipe, model: Any) -> list[tuple[str, str]]:
    if not sizes_of(model).latent:
        return [("source", "auto")]
    quantised = [] if recipe.cache_dtype == "auto" or not absorbable(model) else [("absorbed", recipe.cache_dtype)]
    return [("expanded", "auto"), ("absorbed", "auto"), *quantised]


def measure_limits(dtype: torch.dtype, device: torch.device) -> Limits:
    """Best of several: a copy of 256 MiB (bytes read plus bytes written), a product of square matrices."""
    numbers = (256 << 20) // dtype.itemsize
    source, target = torch.ones(numbers, dtype=dtype, device=device), torch.empty(numbers, dtype=dtype, device=device)
    copied = 2 * source.nbytes / _least(lambda: target.copy_(source), device)
    del source, target
    width = 8192 if device.type == "cuda" else 2048
    left, right = (torch.randn(width, width, device=device).to(dtype) for _ in range(2))
    product = 2 * width**3 / _least(lambda: left @ right, device)
    limits = Limits(copied, product)
    logger.info("limits: copy %.1f GB/s, %s product %.0f GFLOP/s", copied / 1e9, dtype, product / 1e9)
    return limits


def _least(call: Callable[[], Any], device: torch.device) -> float:
    return min(timed(call, device) for _ in range(7))


def _cells(
    recipe: BenchRecipe, decoders: list[Decoder], context: int, batch: int, limits: Limits, memory: int
) -> list[Cell]:
    """One cell per decoder, their repetitions interleaved."""
    room = _FREE_SHARE * _free_memory(decoders[0].device)
    fitting = []
    for decoder in decoders:  # sources first, so that a cell too large for one need not be for the other
        need = decoder.need(context + recipe.new_tokens + 1, batch)
        if need <= room:
            room -= need - decoder.scratch(context, batch)  # scratch is shared: one runs at a time
            fitting.append(decoder)
        else:
            logger.info("%s: %d x %d tokens need %.1f GiB and do not fit", decoder.name, batch, context, need / 2**30)
    turns: dict[str, int] = {}
    for decoder in fitting:
        decoder.fill(context, batch, recipe.seed)
        warm = decoder.steps(1)[0].step
        turns[decoder.name] = max(1, min(recipe.new_tokens, int(_TURN_SECONDS / max(warm, 1e-9))))
    seen: dict[str, list[Seconds]] = {decoder.name: [] for decoder in decoders}
    for _ in range(recipe.repeats):
        for decoder in fitting:
            seen[decoder.name] += decoder.steps(turns[decoder.name])
    cells = []
    for decoder in decoders:
        timed_steps = seen[decoder.name]
        cell = Cell(
            decoder.name, context, batch, fits=bool(timed_steps), largest_batch=_fitting(decoder, context, memory)
        )
        if timed_steps:
            cached = decoder.formula() // decoder.sizes.layers
            limit, bound = limits.seconds(decoder.sizes, batch, context, decoder.dtype.itemsize, cached)
            cell = dataclasses.replace(
                cell,
                step=_median(timed_steps, "step"),
                attention=_median(timed_steps, "attention"),
                core=_median(timed_steps, "core"),
                limit=limit * decoder.sizes.layers,
                bound_by=bound,
                prefill=decoder.prefill(context, recipe.seed) if batch == 1 and context <= recipe.prefill else None,
                cache_bytes=decoder.held(),
                cache_formula=decoder.formula(),
                peak_bytes=decoder.peak,
                steps_timed=len(timed_steps),
            )
        cells.append(cell)
    for decoder in fitting:
        decoder.forget()
    return cells


def _median(steps: list[Seconds], part: str) -> float:
    return float(statistics.median(getattr(step, part) for step in steps))


def _fitting(decoder: Decoder, context: int, memory: int) -> int:
    """Sequences of `context` tokens that fit into `memory` beside the weights."""
    each = decoder.need(context, 1)
    return max(0, (memory - decoder.sizes.weight_bytes) // max(each, 1))


def _free_memory(device: torch.device) -> float:
    if device.type == "cuda":
        return float(torch.cuda.mem_get_info(device)[0])
    for line in _lines("/proc/meminfo"):
        if line.startswith("MemAvailable:"):
            return 1024.0 * int(line.split()[1])
    return float(_total_memory(device))


def _total_memory(device: torch.device) -> int:
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[1])
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def _lines(path: str) -> list[str]:
    return Path(path).read_text(encoding="utf-8").splitlines() if Path(path).exists() else []
