"""The tables of a suite's results: on the terminal, for a README, and several result files as one."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from mla_convert.errors import BadOption
from mla_convert.interface.recipe import ReportRecipe
from mla_convert.interface.report import check_targets, read_json

Result = Mapping[str, Any]


def write_report(recipe: ReportRecipe) -> dict[str, Any]:
    """Read recipe.results as one result and write recipe.html and recipe.markdown. Raises BadOption for other files."""
    check_targets(recipe.html, None)
    check_targets(recipe.markdown, None)
    _check_apart(recipe)
    result = merged([read_result(path) for path in recipe.results], recipe.results)
    if recipe.html is not None:
        from mla_convert.evaluation.suite_html import html_page

        Path(recipe.html).expanduser().write_text(html_page(result), encoding="utf-8")
    if recipe.markdown is not None:
        Path(recipe.markdown).expanduser().write_text(markdown_table(result), encoding="utf-8")
    return result


def _check_apart(recipe: ReportRecipe) -> None:
    taken = {Path(name).expanduser().resolve(): name for name in recipe.results}
    for flag, target in (("html", recipe.html), ("markdown", recipe.markdown)):
        place = None if target is None else Path(target).expanduser().resolve()
        if place in taken:
            raise BadOption(f"{flag}={target} would replace {taken[place]}; choose another file")
        if place is not None:
            taken[place] = f"the page that goes to {target}"


def read_result(path: str) -> dict[str, Any]:
    """What `eval --suite` wrote to `path`. Raises BadOption for other files."""
    try:
        content = read_json(path)
    except (OSError, ValueError) as error:
        raise BadOption(f"cannot read results {path}: {error}") from error
    whole = isinstance(content, dict) and content.keys() >= {"suite", "models", "texts", "bos", "environment"}
    if not whole or not any(model.get("is_reference") for model in content["models"]):
        raise BadOption(f"{path} holds no results of a suite; name a file that `mla-convert eval --suite` wrote")
    return content  # type: ignore[no-any-return]


def merged(results: list[dict[str, Any]], names: tuple[str, ...]) -> dict[str, Any]:
    """One result with the models of all, the first file's first. Raises BadOption unless all measured the same."""
    first = dict(results[0])
    if len(results) > 1:  # what was reused says nothing of several runs
        first = {key: value for key, value in first.items() if key not in ("measured", "reused")}
    models = {(m["label"], m["sha256"], m["dtype"]): m for m in reversed(results[0]["models"])}
    models = dict(reversed(models.items()))
    for name, other in zip(names[1:], results[1:], strict=True):
        for key in ("texts", "bos"):
            if other[key] != first[key]:
                raise BadOption(f"{name} and {names[0]} were measured on different texts ({key}); report them apart")
        for key in ("decode", "retrieval", "greedy", "lm_eval"):
            if other["suite"][key] != first["suite"][key]:
                raise BadOption(f"{name} and {names[0]} differ in the suite's {key}; report them apart")
        references = [next(m["sha256"] for m in each["models"] if m["is_reference"]) for each in (first, other)]
        if references[0] != references[1]:
            raise BadOption(f"{name} and {names[0]} compare with different references; report them apart")
        for model in (model for model in other["models"] if not model["is_reference"]):
            models.setdefault((model["label"], model["sha256"], model["dtype"]), model)
    return {**first, "models": list(models.values())}


def text_names(result: Result) -> list[str]:
    """The texts scored, in the suite's order."""
    return [text["name"] for text in result["texts"]]


def reference_of(result: Result) -> dict[str, Any]:
    """The model all others are compared with."""
    found: dict[str, Any] = next(model for model in result["models"] if model["is_reference"])
    return found


def worst_text(model: Mapping[str, Any], names: list[str]) -> str | None:
    """The text that lost most; None for the reference, or where nothing was lost."""
    excess = {name: model["parts"][f"text {name}"]["excess"] for name in names}
    lost = max(excess, key=excess.__getitem__)
    return None if model["is_reference"] or len(names) < 2 or excess[lost] <= 0 else lost


def over_texts(model: Mapping[str, Any], names: list[str], key: str) -> float:
    """Mean of a per-token figure over all texts, every token counted once."""
    parts = [model["parts"][f"text {name}"] for name in names]
    return float(sum(part[key] * part["tokens"] for part in parts) / sum(part["tokens"] for part in parts))


def columns_of(result: Result) -> list[str]:
    """Headings of the table."""
    retrieval = list(result["suite"]["retrieval"])
    harness = [name for name in reference_of(result)["parts"] if name.startswith("lm_eval ")]
    greedy = ["greedy"] if result["suite"]["greedy"] else []
    return ["cache B", *text_names(result), "KL", "top-1", "worst 1 %", *retrieval, *greedy, *harness]


def cells_of(result: Result, model: Mapping[str, Any], strong: tuple[str, str]) -> list[str]:
    """The cells of one model; the worst text stands between the two strings `strong`."""
    names, parts, reference = text_names(result), model["parts"], model["is_reference"]
    lost = worst_text(model, names)
    cells = [f"{parts['memory']['cache_measured']:,}"]
    for name in names:
        part = parts[f"text {name}"]
        spread = part["excess_interval"]
        text = f"ppl {part['perplexity']:.2f}" if reference else f"{part['excess']:+.3f}"
        if spread is not None and not reference:
            text += f" ({spread[0]:+.3f} to {spread[1]:+.3f})"
        cells.append(f"{strong[0]}{text}{strong[1]}" if name == lost else text)
    tail = max(parts[f"text {name}"]["worst"]["excess"] for name in names)
    cells += (
        ["", "", ""]
        if reference
        else [f"{over_texts(model, names, 'kl'):.4f}", f"{over_texts(model, names, 'top1'):.1%}", f"{tail:+.2f}"]
    )
    for name in result["suite"]["retrieval"]:
        right = parts[f"retrieval {name}"]["right"]
        cells.append("-" if right is None else f"{right:.0%}")
    if result["suite"]["greedy"]:
        cells.append("" if reference else f"{parts['greedy']['prefix']:.0%}")
    cells += [_harness(parts[name]) for name in parts if name.startswith("lm_eval ")]
    return cells


def _harness(part: Mapping[str, Any]) -> str:
    numbers = part["numbers"]
    for name in ("acc_norm", "acc", "exact_match", "word_perplexity", "bits_per_byte"):
        if name in numbers:
            return f"{name} {numbers[name]:.4g}"
    return next((f"{name} {value:.4g}" for name, value in numbers.items()), "-")


def legend(result: Result) -> str:
    """What the columns mean, one paragraph of plain text."""
    suite = result["suite"]
    confidence = suite["bootstrap"]["confidence"]
    tokens = sum(reference_of(result)["parts"][f"text {name}"]["tokens"] for name in text_names(result))
    said = (
        f"Suite {suite['name']}: {tokens:,} tokens scored in windows of {suite['window']}, {result['bos']}. "
        "cache B: bytes per token of the tensors held, all layers. Texts: perplexity per token of the reference, then "
        f"nats per token above it with a {confidence:.0%} bootstrap interval over windows; the worst text is marked. "
        "KL: to the reference, nats per token. top-1: same most likely token. worst 1 %: mean excess of the tokens "
        "that lost most, on the worst text."
    )
    if suite["retrieval"]:
        said += f" {', '.join(suite['retrieval'])}: hidden numbers found."
    if suite["greedy"]:
        said += " greedy: share of the reference's greedy continuation before the first difference."
    return said


def markdown_table(result: Result) -> str:
    """The table of a README, with its legend; the worst text is bold."""
    headings = ["model", *columns_of(result)]
    rows = [[model["label"], *cells_of(result, model, ("**", "**"))] for model in result["models"]]
    lines = [" | ".join(cell.replace("|", "\\|") for cell in row) for row in (headings, *rows)]
    lines = [f"| {line} |" for line in lines]
    lines.insert(1, "|---|" + "---:|" * (len(headings) - 1))
    versions = result["environment"]["versions"]
    made = f"commit {result['commit'] or 'unknown'}, torch {versions['torch']}, transformers {versions['transformers']}"
    return "\n".join([*lines, "", f"{legend(result)} Measured with {made}, on {result['device']}.", ""])


def print_suite(result: Result, console: Console | None = None) -> None:
    """One block per model on stdout, the figures of the table under each other; the worst text is marked."""
    console = console or Console()
    table = Table(
        title=f"suite {escape(result['suite']['name'])}", title_justify="left", box=SIMPLE_HEAD, padding=(0, 1, 0, 0)
    )
    table.add_column("")
    for model in result["models"]:
        table.add_column(escape(model["label"]), justify="right", overflow="fold")
    rows = [cells_of(result, model, ("worst: ", "")) for model in result["models"]]
    for number, name in enumerate(columns_of(result)):
        table.add_row(escape(name), *(row[number] for row in rows))
    console.print(table)
    console.print(legend(result), style="dim", highlight=False, markup=False)
    if "measured" in result:
        console.print(
            f"{result['measured']} parts measured, {result['reused']} taken from an earlier run.", style="dim"
        )
