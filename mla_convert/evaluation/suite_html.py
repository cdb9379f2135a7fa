"""One self-contained HTML page of a suite's results: what was asked, the answer, pictures, and how to repeat it."""

from __future__ import annotations

from collections.abc import Mapping
from html import escape
from typing import Any

from mla_convert.evaluation.suite import ABSORBED_WAYS
from mla_convert.evaluation.suite_plots import plots
from mla_convert.evaluation.suite_report import (
    cells_of,
    columns_of,
    legend,
    over_texts,
    reference_of,
    text_names,
    worst_text,
)

Result = Mapping[str, Any]

STYLE = """
:root { color-scheme: light dark; --ink: #1c1e21; --paper: #fff; --soft: #6b7076; --line: #dcdfe3; --mark: #fff3d6; }
@media (prefers-color-scheme: dark) {
  :root { --ink: #e6e7e9; --paper: #16181b; --soft: #9aa0a6; --line: #34383d; --mark: #4a3c12; }
  figure svg { background: #fff; border-radius: 6px; }
}
body { font: 16px/1.55 system-ui, sans-serif; color: var(--ink); background: var(--paper);
       max-width: 68rem; margin: 2.5rem auto; padding: 0 1.25rem; }
h1 { font-size: 1.6rem; margin-bottom: .2rem; } h2 { font-size: 1.2rem; margin-top: 2.6rem; }
p, li { max-width: 46rem; } .soft, caption { color: var(--soft); font-size: .92rem; }
.answer { border-left: 4px solid #3a7bd5; padding: .3rem 1rem; margin: 1.4rem 0; list-style: none; }
.answer li { margin: .3rem 0; }
.scroll { overflow-x: auto; } table { border-collapse: collapse; font-size: .92rem; }
th, td { padding: .35rem .7rem; text-align: right; border-bottom: 1px solid var(--line); white-space: nowrap; }
th { vertical-align: bottom; } th:first-child, td:first-child, .left { text-align: left; }
td small { display: block; color: var(--soft); } td.worst { background: var(--mark); }
figure { margin: 1.2rem 0; } figure svg { max-width: 100%; height: auto; } code { font-size: .9em; }
dt { font-weight: 600; margin-top: .7rem; } dd { margin-left: 1.2rem; max-width: 44rem; }
"""

WORDS = ("model", "example", "found by depth", "figure")  # columns that hold words
GLOSSARY = {
    "perplexity": "How many equally likely next tokens the model hesitates between, on average. Lower is better.",
    "excess, nats per token": "How much worse the next token is predicted than by the reference, as a difference of "
    "log probabilities. 0.10 means that perplexity is 10.5 % higher. The range beside it is a bootstrap interval: the "
    "windows are drawn again and again, both models always on the same ones.",
    "KL": "How far the whole predicted distribution lies from the reference's, nats per token. 0 only for equal "
    "models. It sees changes that perplexity averages away.",
    "top-1": "Share of positions at which both models rank the same token first.",
    "worst 1 %": "Mean excess of the hundredth of the tokens that lost most: a damage that means hide.",
    "bits per byte": "Bits needed per byte of the text. Unlike perplexity it compares across tokenizers.",
    "decode path": "The same tokens fed one by one through the cache, as a server does, instead of all at once; and, "
    "for models with a latent, with up-projections absorbed into queries and outputs. These give the same "
    "loss; int8 and fp8 round the cached latents to one byte per number.",
    "passkey, multikey": "A five-digit number is hidden in other text and asked for at the end; with several keys, one "
    "of them. Right means that greedy decoding gives all its digits.",
    "greedy": "Share of the reference's greedy continuation that a model repeats before its first other token.",
    "cache": "Bytes per token of the tensors that the key-value cache really holds, all layers.",
}


def html_page(result: Result) -> str:
    """The page as text; it loads nothing from anywhere."""
    suite, reference = result["suite"], reference_of(result)
    body = [
        f"<h1>What the smaller cache costs: suite {escape(suite['name'])}</h1>",
        f'<p class="soft">Every model against <b>{escape(reference["label"])}</b>, on the same tokens.</p>',
        _answer(result),
        "<h2>Summary</h2>",
        _summary(result),
        f'<p class="soft">{escape(legend(result))}</p>',
    ]
    for title, text, picture in plots(result):
        body += [f"<h2>{escape(title)}</h2>", f"<p>{escape(text)}</p>", f"<figure>{picture}</figure>"]
    body += [_texts(result), _decode(result), _retrieval(result), _greedy(result), _memory(result), _harness(result)]
    terms = "".join(f"<dt>{escape(name)}</dt><dd>{escape(said)}</dd>" for name, said in GLOSSARY.items())
    body += ["<h2>What the words mean</h2>", f"<dl>{terms}</dl>", _repeat(result)]
    title = f"mla_convert: suite {escape(suite['name'])}"
    return (
        f'<!DOCTYPE html>\n<html lang="en">\n<head><meta charset="utf-8"><title>{title}</title>\n'
        f'<meta name="viewport" content="width=device-width, initial-scale=1"><style>{STYLE}</style></head>\n'
        f"<body>\n{chr(10).join(part for part in body if part)}\n</body>\n</html>\n"
    )


def _answer(result: Result) -> str:
    """One sentence per model: what it saves and what it loses."""
    names, reference = text_names(result), reference_of(result)
    full = reference["parts"]["memory"]["cache_measured"]
    said = []
    for model in result["models"]:
        if model["is_reference"] or model["dtype"] != reference["dtype"]:
            continue
        share = model["parts"]["memory"]["cache_measured"] / full
        lost, excess = worst_text(model, names), over_texts(model, names, "excess")
        where = f", most on {escape(lost)} ({model['parts'][f'text {lost}']['excess']:+.3f})" if lost else ""
        said.append(
            f"<li><b>{escape(model['label'])}</b> caches {share:.0%} of the reference's bytes and predicts "
            f"{'worse' if excess >= 0 else 'better'} by {abs(excess):.3f} nats per token over all texts{where}; its "
            f"first choice is the reference's for {over_texts(model, names, 'top1'):.0%} of the tokens.</li>"
        )
    return f'<ul class="answer">{"".join(said)}</ul>' if said else ""


def _summary(result: Result) -> str:
    rows = []
    for model in result["models"]:
        cells = []
        for cell in cells_of(result, model, ("\0", "")):
            mark = ' class="worst"' if cell.startswith("\0") else ""
            value, _, spread = cell.lstrip("\0").partition(" (")
            small = f"<small>{escape(spread.rstrip(')'))}</small>" if spread else ""
            cells.append(f"<td{mark}>{escape(value)}{small}</td>")
        rows.append(f"<tr><td>{escape(model['label'])}</td>{''.join(cells)}</tr>")
    return _framed(["model", *columns_of(result)], rows)


def _framed(headings: list[str], rows: list[str], left: tuple[str, ...] = ()) -> str:
    head = "".join(f"<th{_side(name, left)}>{escape(name)}</th>" for name in headings)
    return f'<div class="scroll"><table><tr>{head}</tr>{"".join(rows)}</table></div>'


def _table(title: str, said: str, headings: list[str], rows: list[list[str]]) -> str:
    if not rows:
        return ""
    lines, before = [], ""
    for row in rows:
        shown = ["" if len(row) > 2 and row[0] == before else row[0], *row[1:]]  # a group is named once
        cells = [f"<td{_side(name, WORDS)}>{escape(cell)}</td>" for name, cell in zip(headings, shown, strict=True)]
        lines.append(f"<tr>{''.join(cells)}</tr>")
        before = row[0]
    return f"<h2>{escape(title)}</h2><p>{escape(said)}</p>{_framed(headings, lines, WORDS)}"


def _side(heading: str, left: tuple[str, ...]) -> str:
    return ' class="left"' if heading in left else ""


def _number(value: float | None, spec: str) -> str:
    return "-" if value is None else format(value, spec)


def _texts(result: Result) -> str:
    rows = []
    for name in text_names(result):
        for model in result["models"]:
            part = model["parts"][f"text {name}"]
            rows.append(
                [
                    name,
                    model["label"],
                    f"{part['tokens']:,}",
                    f"{part['perplexity']:.3f}",
                    _number(part["bits_per_byte"], ".4f"),
                    f"{part['excess']:+.4f}",
                    f"{part['kl']:.4f}",
                    f"{part['kl_p99']:.3f}",
                    f"{part['top1']:.1%}",
                    f"{part['worst']['excess']:+.2f}",
                ]
            )
    heads = ["text", "model", "tokens", "perplexity", "bits per byte", "excess", "KL", "KL, 99 %", "top-1", "worst 1 %"]
    return _table("Every text", "All figures of every model on every text. Losses are nats per token.", heads, rows)


def _decode(result: Result) -> str:
    rows = []
    for model in result["models"]:
        part = model["parts"].get("decode")
        if part is not None:
            worst = max(part["cached_difference"], part["absorbed_difference"] or 0)
            rows.append(
                [
                    model["label"],
                    f"{part['forward']:.5f}",
                    f"{part['cached']:.5f}",
                    *(_number(part.get(way), ".5f") for way in ABSORBED_WAYS),
                    f"{worst:.1e}",
                    f"{part['tokens_per_second']:.1f}",
                ]
            )
    said = "Loss, nats per token, of the same tokens at once, one by one through the cache, in the absorbed form, and "
    said += "absorbed with the cached latents in one byte per number. The largest difference is of the exact ways. "
    said += "Tokens per second: of the second, one sequence, in transformers."
    heads = ["model", "at once", "cached", *ABSORBED_WAYS, "largest difference", "tokens per second"]
    return _table("Through the cache", said, heads, rows)


def _retrieval(result: Result) -> str:
    rows = []
    for name in result["suite"]["retrieval"]:
        for model in result["models"]:
            part = model["parts"][f"retrieval {name}"]
            for length in dict.fromkeys(row["length"] for row in part["rows"]):
                here = [row for row in part["rows"] if row["length"] == length]
                count = sum(row["probes"] for row in here)
                right = sum(row["right"] * row["probes"] for row in here) / count
                loss = sum(row["nll"] * row["probes"] for row in here) / count
                by_depth = ", ".join(f"{row['depth']:.0%}: {row['right']:.0%}" for row in here)
                rows.append([name, model["label"], f"{length:,}", f"{right:.0%}", f"{loss:.3f}", by_depth])
    said = "Numbers found, by length of the text and by how deep in it they are hidden; loss in nats per answer token."
    return _table("Hidden numbers", said, ["task", "model", "tokens", "found", "loss", "found by depth"], rows)


def _greedy(result: Result) -> str:
    rows = []
    for model in result["models"]:
        part = model["parts"].get("greedy")
        if part is not None:
            shown = " ".join(part["example"].split())[:90]
            rows.append([model["label"], f"{part['prefix']:.0%}", f"{part['identical']:.0%}", shown])
    said = "The same prompts continued greedily; the first continuation of each model as an example."
    return _table("Continuations", said, ["model", "same until", "wholly the same", "example"], rows)


def _memory(result: Result) -> str:
    rows = []
    for model in result["models"]:
        part = model["parts"]["memory"]
        rows.append(
            [
                model["label"],
                f"{part['cache_measured']:,}",
                f"{part['cache_formula']:,}",
                f"{part['held'] / 2**20:.2f} MiB",
                f"{part['parameters'] / 1e6:,.1f} M",
                f"{part['peak'] / 2**30:.2f} GiB ({part['peak_of']})",
            ]
        )
    tokens = result["models"][0]["parts"]["memory"]["held_tokens"]
    said = f"Bytes per token held and by the formula, the cache after {tokens:,} tokens, parameters, and peak memory."
    return _table("Memory", said, ["model", "B per token", "formula", "held", "parameters", "peak"], rows)


def _harness(result: Result) -> str:
    rows = [
        [part["task"], model["label"], name, f"{value:.4g}"]
        for model in result["models"]
        for key, part in model["parts"].items()
        if key.startswith("lm_eval ")
        for name, value in part["numbers"].items()
    ]
    said = "As lm-evaluation-harness reports them."
    return _table("Tasks of lm-evaluation-harness", said, ["task", "model", "figure", "value"], rows)


def _repeat(result: Result) -> str:
    environment = result["environment"]
    versions = ", ".join(f"{name} {version}" for name, version in environment["versions"].items())
    machine = environment["machine"]
    where = f"{machine['gpu'] or machine['cpu']}, {machine['cores']} cores, {machine['system']}"
    texts = "".join(
        f"<li>{escape(text['name'])}: sha256 <code>{text['sha256'][:16]}</code>, stride {text['stride']}</li>"
        for text in result["texts"]
    )
    models = "".join(
        f"<li>{escape(model['label'])}: {model['dtype']}, files sha256 <code>{model['sha256'][:16]}</code></li>"
        for model in result["models"]
    )
    return (
        f"<h2>How to repeat it</h2><p>Commit <code>{escape(str(result['commit'] or 'unknown'))}</code>; "
        f"{escape(versions)}; {escape(where)}; computed on {escape(result['device'])}, batches of "
        f"{result['batch_size']}.</p>"
        f"<ul>{texts}{models}</ul>"
    )
