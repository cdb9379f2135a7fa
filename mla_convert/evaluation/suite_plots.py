"""The pictures of a suite's page, as SVG text."""

from __future__ import annotations

import io
from collections.abc import Mapping
from typing import Any

from mla_convert.evaluation.suite_report import reference_of, text_names
from mla_convert.interface import pictures

Result = Mapping[str, Any]


def plots(result: Result) -> list[tuple[str, str, str]]:
    """(title, sentence, SVG) of every picture that the results allow."""
    import matplotlib

    matplotlib.rcParams["svg.fonttype"] = "none"  # the page's own font; text can be selected
    matplotlib.rcParams["svg.hashsalt"] = "mla_convert"  # the same results, the same file
    others = [model for model in result["models"] if not model["is_reference"]]
    if not others:
        return []
    found = [
        (
            "Loss against cache size",
            "Each point is a model on a text: further left caches less, lower predicts better. Bars are the "
            "interval over windows. The hollow diamond is the reference.",
            _size(result),
        ),
        (
            "Model by model",
            "The same losses side by side, one group per text: a conversion beside its fine-tuned or healed form.",
            _bars(result, others),
        ),
        (
            "Does the loss grow with the context?",
            "Excess by the position of the token in its window, over all texts. A line that rises to the right would "
            "mean that the converted model forgets what is far away.",
            _positions(result, others),
        ),
    ]
    speeds = [model["parts"]["decode"]["tokens_per_second"] for model in result["models"] if "decode" in model["parts"]]
    if len(speeds) == len(result["models"]):
        found.append(
            (
                "Decoding",
                "Tokens per second, one sequence, one token at a time in transformers through its own cache; a figure "
                "of this machine at that hour, not of a server.",
                _speed(result),
            )
        )
    return found


def _figure(height: float = 4.2) -> tuple[Any, Any]:
    return pictures.new(8.6, height)


def _svg(figure: Any) -> str:
    stream = io.StringIO()
    pictures.save(figure, stream, format="svg", metadata={"Date": None, "Creator": None})
    text = stream.getvalue()
    return text[text.index("<svg") :]


def _size(result: Result) -> str:
    figure, axes = _figure()
    full = reference_of(result)["parts"]["memory"]["cache_measured"]
    same = [model for model in result["models"] if model["dtype"] == reference_of(result)["dtype"]]
    models = sorted(same, key=lambda model: model["parts"]["memory"]["cache_measured"])
    names = text_names(result)
    for number, name in enumerate(names):
        points = [(m, m["parts"][f"text {name}"]) for m in models if not m["is_reference"]]
        # texts side by side, so that their bars can be told apart
        shift = 0.006 * (number - (len(names) - 1) / 2)
        where = [m["parts"]["memory"]["cache_measured"] / full + shift for m, _ in points]
        excess = [part["excess"] for _, part in points]
        spreads = [part["excess_interval"] or (part["excess"],) * 2 for _, part in points]
        low = [max(e - spread[0], 0) for e, spread in zip(excess, spreads, strict=True)]
        high = [max(spread[1] - e, 0) for e, spread in zip(excess, spreads, strict=True)]
        axes.errorbar(
            where, excess, yerr=[low, high], fmt="o", capsize=3, color=f"C{number}", label=pictures.plain(name)
        )
    axes.plot([1], [0], "D", markersize=11, color="black", markerfacecolor="none", label="reference")
    axes.axhline(0, color="black", linewidth=0.8, linestyle="--", alpha=0.5)
    axes.set_xlim(0, max(1.1, axes.get_xlim()[1]))
    axes.xaxis.set_major_formatter(lambda value, _: f"{value:.0%}")
    axes.set_xlabel("KV cache, share of the reference's bytes per token")
    axes.set_ylabel("excess, nats per token")
    axes.legend(frameon=False)
    return _svg(figure)


def _bars(result: Result, others: list[Mapping[str, Any]]) -> str:
    figure, axes = _figure()
    names, width = text_names(result), 0.8 / len(others)
    for number, model in enumerate(others):
        places = [at + (number - (len(others) - 1) / 2) * width for at in range(len(names))]
        excess = [model["parts"][f"text {name}"]["excess"] for name in names]
        bars = axes.bar(places, excess, 0.92 * width, color=f"C{number}", label=pictures.plain(model["label"]))
        turned = 90 if len(others) > 4 else 0  # or the figures of narrow bars would lie over each other
        axes.bar_label(bars, [f"{value:+.3f}" for value in excess], padding=2, fontsize=8, rotation=turned)
    axes.set_xticks(range(len(names)), [pictures.plain(name) for name in names])
    axes.axhline(0, color="black", linewidth=0.8)
    axes.margins(y=0.15)
    axes.set_ylabel("excess, nats per token")
    axes.legend(frameon=False, fontsize=9, loc="upper left", bbox_to_anchor=(1, 1))
    return _svg(figure)


def _positions(result: Result, others: list[Mapping[str, Any]]) -> str:
    figure, axes = _figure()
    for number, model in enumerate(others):
        stretches: dict[tuple[int, int], list[tuple[float, int]]] = {}
        for name in text_names(result):
            for row in model["parts"][f"text {name}"]["by_position"]:
                stretches.setdefault((row["from"], row["to"]), []).append((row["excess"], row["tokens"]))
        where = [(first * last) ** 0.5 for first, last in stretches]
        means = [sum(e * n for e, n in rows) / sum(n for _, n in rows) for rows in stretches.values()]
        axes.plot(where, means, "o-", color=f"C{number}", label=pictures.plain(model["label"]))
    axes.set_xscale("log", base=2)
    axes.xaxis.set_major_formatter(lambda value, _: f"{value:,.0f}")
    axes.axhline(0, color="black", linewidth=0.8, linestyle="--", alpha=0.5)
    axes.set_xlabel("position in the window, tokens")
    axes.set_ylabel("excess, nats per token")
    axes.legend(frameon=False, fontsize=9)
    return _svg(figure)


def _speed(result: Result) -> str:
    figure, axes = _figure(1.2 + 0.45 * len(result["models"]))
    labels = [pictures.plain(model["label"]) for model in result["models"]]
    speeds = [model["parts"]["decode"]["tokens_per_second"] for model in result["models"]]
    bars = axes.barh(range(len(labels)), speeds, color="C0")
    axes.bar_label(bars, [f"{speed:.1f}" for speed in speeds], padding=3, fontsize=9)
    axes.set_yticks(range(len(labels)), labels)
    axes.invert_yaxis()
    axes.set_xlabel("tokens per second")
    return _svg(figure)
