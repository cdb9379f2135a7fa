"""The table and the picture of predicted loss against cache size."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console
from rich.markup import escape

from mla_convert.interface import pictures
from mla_convert.interface.report import plain_table

if TYPE_CHECKING:
    from mla_convert.planning.rate_distortion import Curve


def print_curve(curve: Curve, model: str, console: Console) -> None:
    """The curve as a table, how good the prediction is, and the command that meets the target."""
    table = plain_table(
        f"Predicted excess loss against cache size, --method {curve.method}",
        "numbers", "of source", "split", "stride", "B/token", "nats", "measured",
    )  # fmt: skip
    for point in curve.points:
        table.add_row(
            f"{point.numbers:,}",
            f"{point.numbers / curve.source_numbers:.0%}",
            f"{point.kv_lora_rank} + {point.qk_rope_head_dim}",
            str(point.rope_stride),
            f"{point.bytes_per_token:,}",
            f"{point.nats:.4f}",
            "" if point.measured is None else f"{point.measured:.4f}",
            style="bold" if point is curve.chosen else None,
        )
    console.print(table)
    text = f"of {', '.join(curve.eval_data)}" if curve.eval_data else "others of the same text"
    off = f"by up to {max(curve.off):.0%} of the measured" if curve.off else "by an unknown amount"
    console.print(
        f"nats: from the measured sizes, between them by prediction. A measured size differs from what the others say "
        f"of it {off}. Predicted from {curve.calibration_tokens:,} tokens, measured on "
        f"{curve.held_out_tokens:,} {text}; closed form, no healing.",
        highlight=False,
    )
    if curve.chosen is None:
        console.print(f"[bold red]No size of the curve meets {curve.target}[/]: use --lossless", highlight=False)
        return
    p = curve.chosen
    console.print(
        f"For {curve.target}: mla-convert convert {escape(model)} OUT --kv-lora-rank {p.kv_lora_rank} "
        f"--qk-rope-head-dim {p.qk_rope_head_dim} --rope-stride {p.rope_stride} --method {curve.method}",
        highlight=False, soft_wrap=True,
    )  # fmt: skip


def plot_curve(curve: Curve, model: str, path: Path) -> None:
    """Predicted and measured excess against the share of the source's cache, loss logarithmic."""
    figure, axes = pictures.new()
    share = [point.numbers / curve.source_numbers for point in curve.points]
    axes.plot(share, [point.nats for point in curve.points], "-", color="C0", label="predicted")
    seen = [(s, p.measured) for s, p in zip(share, curve.points, strict=True) if p.measured and p.measured > 0]
    axes.plot([s for s, _ in seen], [m for _, m in seen], "o", color="C1", label="measured on held-out windows")
    if curve.chosen is not None:
        at = curve.chosen.numbers / curve.source_numbers
        split = f"{curve.chosen.kv_lora_rank} + {curve.chosen.qk_rope_head_dim}"
        axes.axvline(at, color="black", linewidth=0.8, linestyle="--", alpha=0.6)
        axes.annotate(
            f"{split} for {curve.target}",
            (at, curve.chosen.nats),
            textcoords="offset points",
            xytext=(7, 7),
            fontsize=9,
        )
    axes.set_yscale("log")
    axes.yaxis.set_major_formatter(lambda value, _: f"{value:g}")
    axes.xaxis.set_major_formatter(lambda value, _: f"{value:.0%}")
    axes.set_xlabel("KV cache, share of the source's numbers per token and layer")
    axes.set_ylabel("excess, nats per token")
    axes.set_title(
        f"What a smaller cache of {pictures.plain(Path(model).name)} would lose ({curve.method})", fontsize=11
    )
    axes.legend(frameon=False)
    pictures.save(figure, path)
