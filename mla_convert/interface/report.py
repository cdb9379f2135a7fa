"""Report: progress bars on stderr, tables on stdout, JSON files and the picture of an evaluation."""

from __future__ import annotations

import contextlib
import json
import logging
import math
import os
import platform
from collections.abc import Callable, Iterator
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, Progress, ProgressColumn, Task, TextColumn, TimeRemainingColumn
from rich.table import Table
from rich.text import Text

from mla_convert.errors import BadOption
from mla_convert.interface import pictures

if TYPE_CHECKING:
    from mla_convert.evaluation.evaluate import EvalResult, ModelScore
    from mla_convert.verification.check_files import Check
    from mla_convert.verification.verify import VerifyResult


PICTURES = (".png", ".svg", ".pdf")


class _Rate(ProgressColumn):
    """Units per second, e.g. "812 tokens/s"."""

    def __init__(self, unit: str) -> None:
        super().__init__()
        self.unit = unit

    def render(self, task: Task) -> Text:
        """The rate so far; empty before the first step."""
        speed = task.finished_speed or task.speed
        return Text(f"{speed:,.0f} {self.unit}/s" if speed else "", style="dim")


def quiet() -> bool:
    """Whether only warnings and errors are wanted (`-q`)."""
    return logging.getLogger("mla_convert").level > logging.INFO


@contextlib.contextmanager
def progress(description: str, unit: str, total: int) -> Iterator[Callable[[int], None]]:
    """A progress bar on stderr that counts `unit` up to `total`; yields the call that moves it on."""
    columns = (
        TextColumn("{task.description}"),
        BarColumn(bar_width=None),
        TextColumn("{task.completed:,.0f}/{task.total:,.0f} " + unit),
        _Rate(unit),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=Console(stderr=True), disable=quiet()) as bars:
        task = bars.add_task(description, total=total)

        def advance(steps: int) -> None:
            bars.advance(task, steps)

        yield advance


def environment() -> dict[str, Any]:
    """Versions and machine that a result was measured with."""
    import torch

    versions = {"python": platform.python_version()}
    for package in ("mla_convert", "torch", "transformers", "safetensors"):
        with contextlib.suppress(metadata.PackageNotFoundError):
            versions[package] = metadata.version(package)
    if "mla_convert" not in versions:  # run from a source tree
        import mla_convert

        versions["mla_convert"] = mla_convert.__version__
    return {
        "versions": versions,
        "machine": {
            "system": f"{platform.system()} {platform.machine()}",
            "cpu": _cpu_name(),
            "cores": os.cpu_count(),
            "torch_threads": torch.get_num_threads(),
            "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
        },
    }


def write_json(content: dict[str, Any], path: str | Path) -> None:
    """Write `content`, indented, UTF-8, one newline at the end; NaN and infinities, unknown to JSON, as
    strings.
    """
    text = json.dumps(_plain(content), indent=2, ensure_ascii=False, allow_nan=False)
    Path(path).expanduser().write_text(text + "\n", encoding="utf-8")


def plain_table(title: str, *columns: str) -> Table:
    """A table of figures under `columns`, the first of which names the row; nothing is wrapped."""
    table = Table(title=title, title_justify="left", box=SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False)
    for number, name in enumerate(columns):
        table.add_column(name, justify="right" if number else "left", no_wrap=True)
    return table


def check_targets(json_path: str | None, picture: str | None) -> None:
    """Raise BadOption, before any work, where a result could not be written to these files."""
    for target in (json_path, picture):
        if target is not None and not Path(target).expanduser().absolute().parent.is_dir():
            raise BadOption(f"{target}: its folder does not exist; create it first")
        if target is not None and Path(target).expanduser().is_dir():
            raise BadOption(f"{target} is a folder; name a file")
    if picture is not None and Path(picture).suffix not in PICTURES:
        raise BadOption(f"plot={picture}: the name must end in one of {', '.join(PICTURES)}")


def print_evaluation(result: EvalResult, console: Console | None = None) -> None:
    """The table of an evaluation, and under it how it was measured."""
    console = console or Console()
    table = Table(
        title=f"{result.tokens_scored:,} tokens scored",
        title_justify="left",
        box=SIMPLE_HEAD,
        padding=(0, 1, 0, 0),
    )
    table.add_column("model", overflow="fold", min_width=16)
    reference = next((score for score in result.scores if score.is_reference), None)
    beside = ("excess nats", "KL nats", "top-1") if reference else ()
    share = ("of ref.",) if reference else ()
    as_computed = all(score.cache_measured == score.cache_formula for score in result.scores)
    for name in ("perplexity", *beside, "cache B", *(() if as_computed else ("formula",)), *share):
        table.add_column(name, justify="right", no_wrap=True)
    for score in result.scores:
        cells = [escape(_short(score.model)), f"{score.perplexity:,.2f}"]
        if reference:
            cells += ["reference", "", ""] if score.is_reference else _beside(score)
        cells += [f"{score.cache_measured:,}"] + ([] if as_computed else [f"{score.cache_formula:,}"])
        if reference:
            cells.append(f"{score.cache_measured / reference.cache_measured:.1%}")
        table.add_row(*cells)
    console.print(table)
    console.print(
        f"{result.windows} windows of {result.window} tokens, stride {result.stride}, {result.bos}; text "
        f"{escape(', '.join(result.text))} (sha256 {result.text_sha256[:12]}); {result.dtype} on {result.device}; "
        f"peak memory {result.peak_rss / 2**30:.2f} GiB. Excess: nats per token over the reference, "
        "± its standard error over windows. Cache: bytes per token of the tensors held, all layers"
        + (", as by the formula." if as_computed else "; NOT as by the formula."),
        style="dim",
        highlight=False,
    )


def print_verification(result: VerifyResult, console: Console | None = None) -> None:
    """One line per check, and a last line that says whether all passed."""
    console = console or Console()

    def line(text: str) -> None:
        console.print(text, soft_wrap=True, highlight=False)

    line(f"verify {escape(result.converted)} against {escape(result.source)}")
    marks = {True: "[green]ok  [/]", False: "[bold red]FAIL[/]", None: "[dim]info[/]"}
    width = max(len(check.name) for check in result.checks)
    for check in result.checks:
        line(f"{marks[check.passed]}  {check.name:{width}}  {_measured(check):>17}  {escape(check.detail)}")
    failed = [check.name for check in result.checks if check.passed is False]
    if failed:
        line(f"[bold red]FAILED[/]: {len(failed)} of {len(result.checks)} checks: {', '.join(failed)}")
    else:
        line(f"[green]passed[/]: {sum(check.passed is True for check in result.checks)} checks")


def plot_evaluation(result: EvalResult, path: str | Path) -> None:
    """Perplexity against measured cache bytes per token, one labelled point per model, as a PNG (or other
    suffix).
    """
    figure, axes = pictures.new(8, 5.5)
    reference = next((score for score in result.scores if score.is_reference), None)
    for number, score in enumerate(result.scores):
        # the reference is a large hollow diamond, so that a lossless result shows inside it
        hollow, color = score.is_reference, "black" if score.is_reference else f"C{number}"
        axes.plot(
            score.cache_measured,
            score.perplexity,
            "D" if hollow else "o",
            color=color,
            markerfacecolor="none" if hollow else color,
            markersize=13 if hollow else 8,
            label=_label(score, reference),
        )
        if score.excess is not None and not score.is_reference:
            axes.annotate(
                f"{score.excess:+.3f} nats",
                (score.cache_measured, score.perplexity),
                textcoords="offset points",
                xytext=(7, 7),
                fontsize=9,
            )
    if reference:
        axes.axhline(reference.perplexity, color="black", linewidth=0.8, linestyle="--", alpha=0.6)
    axes.set_xlim(0, 1.25 * max(score.cache_measured for score in result.scores))
    lowest = min(score.perplexity for score in result.scores)
    highest = max(score.perplexity for score in result.scores)
    if highest > 10 * lowest:
        axes.set_yscale("log")
        axes.set_ylim(lowest / 1.5, highest * 2)
    else:
        room = max(highest - lowest, 0.02 * lowest)
        axes.set_ylim(lowest - 0.15 * room, highest + 0.3 * room)
    axes.xaxis.set_major_formatter(lambda value, _: f"{value:,.0f}")
    axes.yaxis.set_major_formatter(lambda value, _: f"{value:,g}")
    axes.set_xlabel("KV cache, bytes per token (measured, all layers; further left is smaller)")
    axes.set_ylabel("perplexity (lower is better)")
    axes.set_title(f"What the smaller cache costs ({result.tokens_scored:,} tokens of held-out text)", fontsize=11)
    figure.legend(loc="outside lower center", frameon=False, fontsize=9)
    pictures.save(figure, path)


def _measured(check: Check) -> str:
    # a count of faults says nothing that the mark and the detail do not say
    if check.value is None or check.bound == 0:
        return ""
    if check.bound is None:
        return f"{check.value:.3g}"
    sign = "<=" if check.value <= check.bound else ">"
    return f"{check.value:.3g} {sign} {check.bound:.3g}"


def _beside(score: ModelScore) -> list[str]:
    assert score.excess is not None and score.kl is not None and score.top1_agreement is not None
    error = "" if score.excess_error is None else f" ± {score.excess_error:.3f}"
    return [
        f"{score.excess:.4f}{error}",
        f"{score.kl:.4f}",
        f"{score.top1_agreement:.1%}",
    ]


def _label(score: ModelScore, reference: ModelScore | None) -> str:
    name = f"{pictures.plain(_short(score.model))}: perplexity {score.perplexity:,.2f}"
    if reference is None or score.is_reference:
        return f"{name}, {score.cache_measured:,} bytes per token"
    share = score.cache_measured / reference.cache_measured
    return f"{name}, {score.cache_measured:,} bytes per token ({share:.0%} of the source's)"


def read_json(path: str | Path) -> Any:
    """What `write_json` wrote: "nan", "inf" and "-inf" are numbers again."""
    return _numbers(json.loads(Path(path).expanduser().read_text(encoding="utf-8")))


def _numbers(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _numbers(each) for key, each in value.items()}
    if isinstance(value, list):
        return [_numbers(each) for each in value]
    return float(value) if value in ("nan", "inf", "-inf") else value


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _plain(each) for key, each in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(each) for each in value]
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value


def _short(model: str) -> str:
    return Path(model).name or model


def _cpu_name() -> str:
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    return platform.processor() or "unknown"
