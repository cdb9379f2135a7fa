"""The tables and the picture of `mla-convert plan`."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from mla_convert.interface import pictures
from mla_convert.interface.report import plain_table
from mla_convert.planning.cache_plan import SEQUENCES
from mla_convert.planning.curve_report import print_curve

if TYPE_CHECKING:
    from mla_convert.planning.plan import PlanResult

MARKS = {"yes": "green", "no": "bold red", "padded": "yellow", "not known": "dim"}


def size_text(count: float) -> str:
    """Bytes as B, KiB, MiB, GiB or TiB, three digits and more."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if count < 1024:
            return f"{count:,.4g} {unit}"
        count /= 1024
    return f"{count:,.4g} TiB"


def print_plan(result: PlanResult, console: Console | None = None) -> None:
    """What was planned, on stdout: the kinds of attention, what fits on GPUs, what it costs, and the checklist."""
    console = console or Console()
    shape, (rank, rope) = result.shape, result.size

    def say(text: str) -> None:
        console.print(text, highlight=False)

    windows = sorted({w for w in shape.windows if w is not None})
    say(
        f"[bold]{escape(result.model)}[/]: {shape.model_type}, {len(shape.windows)} attention layers, "
        f"{shape.num_attention_heads} heads on {shape.num_key_value_heads} KV heads of {shape.source_head_dim}, "
        f"hidden size {shape.hidden_size}; caches {shape.numbers:,} numbers per token and layer ({shape.kind})"
    )
    if windows:
        count = sum(w is not None for w in shape.windows)
        say(f"{count} layers see a window of {', '.join(map(str, windows))} tokens; all rows keep those windows")
    console.print(_kinds(result))
    _say_kinds(result, say)
    console.print(_ranks(result))
    more = [str(row.tp) for row in result.ranks if row.latent_costs_more]
    if more and shape.kind != "MLA":
        say(
            f"[yellow]At tp {', '.join(more)} the latent costs more than this model's own cache[/]: every rank "
            f"holds all {rank + rope} numbers, while keys and values are divided."
        )
    _say_serving(result, console)
    console.print(_costs(result))
    if result.curve is not None:
        print_curve(result.curve, result.model, console)
    if result.obstacles:
        say("[bold red]The stock format cannot hold this model as it is[/]: " + escape("; ".join(result.obstacles)))
    console.print(_checklist(result))
    _say_why(result, console)
    say("ran: measured with converted models on that version; read: from its source only. --json has all reasons.")


def _kinds(result: PlanResult) -> Table:
    lengths = [f"{length // 1024}k" for length in SEQUENCES]
    title = f"KV cache, {result.cache_dtype}: per token of one layer and of all, and of one sequence"
    table = plain_table(title, "attention", "numbers", "B/layer", "B, all", *lengths)
    for kind in result.kinds:
        table.add_row(
            kind.name.replace("this model", "own").replace("planned", "plan"),
            f"{kind.numbers:,}",
            f"{kind.bytes_per_token_and_layer:,}",
            f"{kind.bytes_per_token:,}",
            *(size_text(size) for size in kind.sequences),
            style="bold" if "(planned)" in kind.name else None,
        )
    return table


def _say_kinds(result: PlanResult, say: Callable[[str], None]) -> None:
    batches = [
        f"{size_text(kind.batch)} as {kind.name.split(' (')[0]} (that of {kind.as_gqa:.4g} KV heads)"
        for kind in result.kinds
        if "(this model)" in kind.name or "(planned)" in kind.name
    ]
    say(f"A batch of {result.batch} sequences of {result.context:,} tokens: {'; '.join(batches)}.")
    for name, (rope, expresses) in {
        kind.name.split(",")[0]: (kind.rope, kind.expressiveness.split(";")[0]) for kind in result.kinds
    }.items():
        say(f"  {name}: {expresses}; rotates: {rope}")
    if result.shape.kind != "MLA":
        say(
            f"  A latent and rotating key of {result.shape.numbers:,} numbers hold all of this model's keys and values."
        )


def _ranks(result: PlanResult) -> Table:
    rank, rope = result.size
    fits = result.memory is not None
    columns = [
        "tp",
        "legal for",
        "own B",
        f"{rank} + {rope} B",
        "ratio",
        *(["own fits", "latent fits"] if fits else []),
    ]
    title = "Per token and tensor-parallel rank, all layers"
    table = plain_table(title + (f"; fits: sequences of {result.context:,} tokens" if fits else ""), *columns)
    legal = {(True, True): "both", (True, False): "own", (False, True): "latent", (False, False): "neither"}
    for row in result.ranks:
        cells = [str(row.tp), legal[row.own_legal, row.latent_legal], f"{row.own_bytes:,}", f"{row.latent_bytes:,}"]
        cells += [f"{row.latent_bytes / row.own_bytes:.0%}"]
        cells += [f"{row.own_fits:,}", f"{row.latent_fits:,}"] if fits else []
        table.add_row(*cells, style="yellow" if row.latent_costs_more else None)
    return table


def _say_serving(result: PlanResult, console: Console) -> None:
    if result.memory is None:
        console.print("Name a GPU to see what fits: --gpu-memory 80GB", highlight=False)
        return
    usable, weights = result.memory
    if result.serving is None:
        console.print(
            f"[bold red]No sequence of {result.context:,} tokens fits[/] beside {size_text(weights)} of weights in "
            f"{size_text(usable)} at tp {', '.join(str(row.tp) for row in result.ranks)}: use a larger --tp, more "
            "memory or a shorter --context.",
            highlight=False,
        )
        return
    s = result.serving
    console.print(
        f"At tp {s.tp}: {size_text(weights)} of weights, {size_text(s.budget)} per GPU left for the cache. "
        f"Suggested: max_num_seqs {s.max_num_seqs}, max_num_batched_tokens {s.max_num_batched_tokens}.",
        highlight=False,
    )


def _costs(result: PlanResult) -> Table:
    rank, rope = result.size
    table = plain_table("One layer's attention", "", "own", f"{rank} + {rope}", "change")
    before, after = result.before, result.after
    for name, field in (
        ("parameters", "parameters"),
        (f"FLOPs to decode a token at {result.context:,}", "decode_flops"),
        (f"cache bytes read to decode it at {result.context:,}", "decode_bytes"),
        (f"FLOPs per token, prefill of {result.context:,}", "prefill_flops"),
    ):
        old, new = getattr(before, field), getattr(after, field)
        table.add_row(name, f"{old:,}", f"{new:,}", f"{new / old - 1:+.0%}")
    table.add_row(
        "head widths of the prefill, qk and v",
        f"{before.key_width}, {before.value_width}",
        f"{after.key_width}, {after.value_width}",
        "",
    )
    return table


def _checklist(result: PlanResult) -> Table:
    engines = list(dict.fromkeys(line.engine for line in result.checklist))
    table = Table(title="Serving checklist", title_justify="left", box=SIMPLE_HEAD, padding=(0, 1, 0, 0))
    table.add_column("")
    for engine in engines:
        line = next(each for each in result.checklist if each.engine == engine)
        table.add_column(f"{engine}\n{line.version}\n{line.known}", overflow="fold")
    for question in dict.fromkeys(line.question for line in result.checklist):
        found = {line.engine: line.verdict for line in result.checklist if line.question == question}
        table.add_row(question, *(f"[{MARKS[found[engine]]}]{found[engine]}[/]" for engine in engines))
    return table


def _say_why(result: PlanResult, console: Console) -> None:
    """The reason of every verdict that is no plain yes; reasons that engines share are said once."""
    engines: dict[tuple[str, str, str], list[str]] = {}
    for line in result.checklist:
        if line.verdict not in ("yes", "not known"):
            engines.setdefault((line.question, line.verdict, line.detail), []).append(line.engine)
    for (question, verdict, detail), names in engines.items():
        console.print(
            f"  {', '.join(names)}: {question}: [{MARKS[verdict]}]{verdict}[/], {escape(detail)}", highlight=False
        )


def plot_plan(result: PlanResult, path: Path) -> None:
    """Bytes of one sequence's cache against its length, both logarithmic, one line per kind of attention."""
    figure, axes = pictures.new()
    lengths = [2**power for power in range(9, 18)]
    for number, kind in enumerate(result.kinds):
        bytes_ = [kind.bytes_per_token_and_layer * result.shape.cached_tokens(length) / 2**20 for length in lengths]
        named = "(planned)" in kind.name or "(this model)" in kind.name
        axes.plot(
            lengths, bytes_, label=kind.name, color=f"C{number}", linewidth=2.4 if named else 1.1,
            linestyle="-" if named else "--",
        )  # fmt: skip
    axes.set_xscale("log", base=2)
    axes.set_yscale("log", base=8)
    axes.xaxis.set_major_formatter(lambda value, _: f"{value / 1024:g}k" if value >= 1024 else f"{value:g}")
    axes.yaxis.set_major_formatter(lambda value, _: size_text(value * 2**20))
    axes.set_xlabel("tokens in the sequence")
    axes.set_ylabel(f"KV cache, all layers, {result.cache_dtype}")
    axes.set_title(f"KV cache of {pictures.plain(Path(result.model).name)}", fontsize=11)
    axes.legend(frameon=False, fontsize=9)
    pictures.save(figure, path)
