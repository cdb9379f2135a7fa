"""How a bench is shown: a table on stdout, and a picture of speed and memory against context."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from mla_convert.interface import pictures

if TYPE_CHECKING:
    from mla_convert.benchmark.bench import BenchResult, Cell

_COLUMNS = (
    "context", "batch", "variant", "tokens/s", "step ms", "attention ms", "core ms", "limit ms", "of limit",
    "bound by", "prefill tokens/s", "cache MiB", "peak GiB", "largest batch",
)  # fmt: skip


def print_bench(result: BenchResult, console: Console | None = None) -> None:
    """The cells as a table, and the limits under it."""
    table = Table(box=SIMPLE_HEAD, header_style="")
    for column in _COLUMNS:
        table.add_column(column, justify="left" if column in ("variant", "bound by") else "right")
    last = None
    for cell in result.cells:
        if last is not None and last != (cell.context, cell.batch):
            table.add_section()
        last = (cell.context, cell.batch)
        table.add_row(*_row(cell))
    out = console or Console(width=None if Console().is_terminal else 200)
    out.print(table)
    copies = " and ".join(f"{limit.copy / 1e9:,.1f}" for limit in result.limits)
    products = " and ".join(f"{limit.product / 1e9:,.0f}" for limit in result.limits)
    out.print(
        f"{result.device}, {result.dtype}; medians of interleaved repetitions, all layers, per step of the batch.\n"
        "attention: the modules with projections and cache; core: from the cache to the output projection.\n"
        f"limit: the larger of bytes / copy bandwidth and operations / matrix rate, measured before and after: "
        f"{copies} GB/s, {products} GFLOP/s.\n"
        f"largest batch: sequences of that context in {result.memory / 2**30:,.1f} GiB beside the weights.",
        highlight=False,
    )


def _row(cell: Cell) -> list[str]:
    def number(value: float | None, scale: float = 1.0, digits: int = 2) -> str:
        return "" if value is None else f"{value * scale:,.{digits}f}"

    prefill = None if cell.prefill is None else cell.context / cell.prefill
    return [
        f"{cell.context:,}",
        str(cell.batch),
        escape(cell.variant),
        number(cell.tokens_per_second, digits=1) if cell.fits else "does not fit",
        number(cell.step, 1e3),
        number(cell.attention, 1e3),
        number(cell.core, 1e3),
        number(cell.limit, 1e3),
        "" if cell.share_of_limit is None else f"{cell.share_of_limit:.0%}",
        cell.bound_by or "",
        number(prefill, digits=0),
        number(cell.cache_bytes, 2**-20, 1),
        number(cell.peak_bytes, 2**-30),
        "" if cell.largest_batch is None else f"{cell.largest_batch:,}",
    ]


def plot_bench(result: BenchResult, path: str | Path) -> None:
    """Decoded tokens per second and cache memory against context, one line per variant and batch, into `path`."""
    figure, (speed, memory) = pictures.new(11, 5, columns=2)
    variants = list(dict.fromkeys(cell.variant for cell in result.cells))
    batches = list(dict.fromkeys(cell.batch for cell in result.cells))
    markers = "osD^vP*X"
    for color, variant in enumerate(variants):
        for number, batch in enumerate(batches):
            cells = [c for c in result.cells if (c.variant, c.batch, c.fits) == (variant, batch, True)]
            label = pictures.plain(f"{variant}, batch {batch}" if len(batches) > 1 else variant)
            style = {"color": f"C{color}", "marker": markers[number % len(markers)], "label": label}
            contexts = [c.context for c in cells]
            speed.plot(contexts, [c.tokens_per_second for c in cells], **style)
            memory.plot(contexts, [(c.cache_bytes or 0) / 2**20 for c in cells], **style)
    for axes, title in ((speed, "decoded tokens per second"), (memory, "cache held, MiB")):
        axes.set_xscale("log", base=2)
        axes.set_yscale("log")
        axes.set_xlabel("cached tokens per sequence")
        axes.set_title(f"{title} ({result.device}, {result.dtype})", fontsize=11)
        axes.xaxis.set_major_formatter(lambda value, _: f"{value:,.0f}")
        axes.yaxis.set_major_formatter(lambda value, _: f"{value:,g}")
        axes.grid(alpha=0.25, which="both")
    handles, labels = speed.get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", frameon=False, fontsize=9, ncols=2)
    pictures.save(figure, path)
