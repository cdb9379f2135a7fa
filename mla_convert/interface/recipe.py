"""Recipes: one frozen dataclass per command is the YAML file, the command line and the Python call at once.

Building a recipe validates it, so none that exists is malformed; what needs the source (ranks that fit,
families that are known) is checked where the source is read.
"""

import dataclasses
import math
from dataclasses import dataclass
from pathlib import Path

from mla_convert.errors import BadOption
from mla_convert.interface.options import Recipe, option

__all__ = ["ConvertRecipe", "DemoRecipe", "EvalRecipe", "VerifyRecipe"]

_CALIB_HELP = (
    ".txt, .jsonl (field text) or .parquet (column text) file, or a `datasets` name (or name:config:split);"
    " repeatable. Without it: Python's own pydoc_data.topics, "
)


# What healing trains: the projections of the attention, or the layer's other matrices (the MLP) too; never experts.
HEALED = ("layers", "attention")


@dataclass(frozen=True)
class HealSettings:
    """How to heal. steps: optimiser steps per layer, one window each (0: no healing); windows: windows of text used,
    of which `held_out` judge; lr: step size relative to the rms of each matrix; train: HEALED says what.
    """

    steps: int
    windows: int = 64
    held_out: int = 4
    lr: float = 0.02
    train: str = "layers"
    seed: int = 0  # of the order of the windows

    @classmethod
    def parse(cls, text: str) -> "HealSettings":
        """From "steps=200" or "steps=200,windows=128,train=attention". Raises BadOption naming the key or value."""
        values: dict[str, int | float | str] = {}
        for part in text.split(","):
            key, _, value = part.strip().partition("=")
            kinds = {"steps": int, "windows": int, "held_out": int, "lr": float, "train": str}
            kind = kinds.get(key)
            if kind is None:
                raise BadOption(f"heal: {key!r} is not one of {', '.join(kinds)}; write heal steps=200")
            try:
                values[key] = kind(value)
            except ValueError:
                raise BadOption(f"heal: {key}={value!r} is no {kind.__name__}; write for example steps=200") from None
        if "steps" not in values:
            raise BadOption(f"heal={text!r} names no steps; write for example steps=200")
        settings = cls(**values)  # type: ignore[arg-type]
        if settings.train not in HEALED:
            raise BadOption(f"heal: train={settings.train!r}: use one of {', '.join(HEALED)}")
        if (
            settings.steps < 0
            or settings.held_out < 1
            or settings.windows <= settings.held_out
            or not 0 < settings.lr < math.inf
        ):
            raise BadOption(
                f"heal: steps={settings.steps} must be 0 or more, lr={settings.lr} above 0, and windows="
                f"{settings.windows} more than held_out={settings.held_out}, which is 1 or more; give more windows or "
                "hold out fewer"
            )
        return settings


@dataclass(frozen=True)
class ConvertRecipe(Recipe):
    """Options of `mla-convert convert`. Exactly one size: both ranks, or cache_ratio, or lossless."""

    source: str = option("Checkpoint to convert: folder, .gguf file or hub id.", argument="SOURCE")
    out: str = option("Folder to write the converted checkpoint to.", argument="OUT")
    method: str = option(
        "How the latent is found: weighted (two-sided metric), pca (of the layer's keys and values), "
        "svd (of the weights; needs no text).",
        "weighted",
        choices=("weighted", "pca", "svd"),
    )
    kv_lora_rank: int | None = option(
        "Latent size, numbers per token and layer; with --qk-rope-head-dim.", None, at_least=1
    )
    qk_rope_head_dim: int | None = option(
        "Rotating key size, numbers per token and layer (even); with --kv-lora-rank.", None, at_least=2
    )
    cache_ratio: float | None = option(
        "Instead of the two ranks: cache size as a fraction of the source's, above 0 and at most 1; "
        "the split is chosen by predicted loss.",
        None,
    )
    rope_stride: int | str = option(
        "Step, in source frequencies, between the rotating pairs kept; auto: chosen by predicted loss.",
        "auto",
        at_least=1,
    )
    lossless: bool = option("Re-encode exactly: every pair keeps rotating and the latent has full rank.", False)
    calib_data: tuple[str, ...] = option(_CALIB_HELP + "the calibration part.", ())
    calib_windows: int = option("Calibration windows.", 32, at_least=1)
    window: int = option("Calibration window length, tokens.", 1024, at_least=2)
    heal: str | None = option(
        "Fit each layer to the source's after its conversion: steps=N (optimiser steps per layer), and optionally "
        "windows=N (of the calibration text), held_out=N, lr=X, train=attention (not the MLPs), joined by commas.",
        None,
    )
    device: str = option("Where to compute: auto (a GPU if there is one), cpu, cuda or cuda:N.", "auto")
    format: str = option(
        "stock: a DeepSeek-V3 checkpoint that any engine with MLA loads; native: the source's own architecture with "
        "its attention replaced, for transformers after `import mla_convert`; auto: stock where it can hold it.",
        "auto",
        choices=("auto", "stock", "native"),
    )
    self_contained: bool = option(
        "Native format: also write the model's code beside the weights, for those who load it with "
        "trust_remote_code=True, without this package.",
        False,
    )
    keep_layers: str = option(
        "Layers that stay as they are (native format): auto (Gemma's local layers), none, sliding (all with a window), "
        "or indices such as 0,5-7.",
        "auto",
    )
    dtype: str = option(
        "Storage type written: auto (the source's), float32 or bfloat16.",
        "auto",
        choices=("auto", "float32", "bfloat16"),
    )
    overwrite: bool = option("Replace OUT if it holds an earlier conversion.", False)
    seed: int = option("Seed of every random choice.", 0, at_least=0)

    def validate(self) -> None:
        """Check the size options, healing, and that OUT cannot destroy SOURCE. Raises BadOption."""
        self._check_size()
        _check_apart(self.source, self.out)
        if self.seed >= 2**63:
            raise BadOption(f"seed={self.seed} must be below 2^63")
        if self.heal and self.lossless:
            raise BadOption("heal and lossless: an exact re-encoding has nothing to heal; leave one out")
        if self.heal:
            HealSettings.parse(self.heal)

    def _check_size(self) -> None:
        ranks = (self.kv_lora_rank, self.qk_rope_head_dim)
        if (ranks[0] is None) != (ranks[1] is None):
            raise BadOption(
                f"kv_lora_rank={ranks[0]} and qk_rope_head_dim={ranks[1]}: give both, or cache_ratio instead"
            )
        given = [
            name
            for name, on in (
                ("kv_lora_rank + qk_rope_head_dim", ranks[0] is not None),
                ("cache_ratio", self.cache_ratio is not None),
                ("lossless", self.lossless),
            )
            if on
        ]
        if len(given) != 1:
            raise BadOption(
                f"{' and '.join(given) or 'no cache size'} given: give exactly one of "
                "kv_lora_rank + qk_rope_head_dim, cache_ratio, lossless"
            )
        if self.qk_rope_head_dim is not None and self.qk_rope_head_dim % 2:
            raise BadOption(
                f"qk_rope_head_dim={self.qk_rope_head_dim} is odd, but dimensions rotate in pairs; "
                f"use {self.qk_rope_head_dim - 1} or {self.qk_rope_head_dim + 1}"
            )
        if self.cache_ratio is not None and not 0 < self.cache_ratio <= 1:
            raise BadOption(f"cache_ratio={self.cache_ratio} must be above 0 and at most 1, e.g. 0.5")


@dataclass(frozen=True)
class HealRecipe(Recipe):
    """Options of `mla-convert heal`."""

    source: str = option("Source checkpoint: folder, .gguf file or hub id.", argument="SOURCE")
    converted: str = option("Folder that `convert` wrote from it.", argument="CONVERTED")
    out: str = option("Folder to write the healed checkpoint to.", argument="OUT")
    steps: int = option("Optimiser steps per layer, one window each.", 200, at_least=1)
    windows: int = option("Windows of text used, those held out included.", 64, at_least=2)
    held_out: int = option("Windows that judge and are not trained on.", 4, at_least=1)
    lr: float = option("Step size relative to the rms of each matrix.", HealSettings.lr)
    train: str = option(
        "What is trained: layers (MLPs too, but no experts) or attention alone.", HealSettings.train, choices=HEALED
    )
    data: tuple[str, ...] = option(_CALIB_HELP + "the calibration part.", ())
    window: int = option("Window length, tokens.", 1024, at_least=2)
    device: str = option("Where to compute: auto (a GPU if there is one), cpu, cuda or cuda:N.", "auto")
    overwrite: bool = option("Replace OUT if it holds an earlier conversion.", False)

    def validate(self) -> None:
        """Check the settings and that OUT cannot destroy its inputs. Raises BadOption."""
        self.settings()
        _check_apart(self.source, self.out)
        _check_apart(self.converted, self.out)

    def settings(self) -> HealSettings:
        """The options that say how to heal. Raises BadOption."""
        names = ("steps", "windows", "held_out", "lr", "train")
        return HealSettings.parse(",".join(f"{name}={getattr(self, name)}" for name in names))


@dataclass(frozen=True)
class VerifyRecipe(Recipe):
    """Options of `mla-convert verify`."""

    source: str = option("Source checkpoint: folder, .gguf file or hub id.", argument="SOURCE")
    converted: str = option("Folder that `convert` wrote.", argument="CONVERTED")
    window: int = option("Tokens that are compared.", 300, at_least=2)
    device: str = option("Where to compute: auto (a GPU if there is one), cpu, cuda or cuda:N.", "auto")
    json: str | None = option("Also write the checks to this JSON file.", None)


@dataclass(frozen=True)
class EvalRecipe(Recipe):
    """Options of `mla-convert eval`."""

    models: tuple[str, ...] = option("Checkpoints to score: folders, .gguf files or hub ids.", argument="MODEL")
    reference: str | None = option("Checkpoint that KL and top-1 agreement are measured against.", None)
    eval_data: tuple[str, ...] = option(_CALIB_HELP + "the part that is never calibrated on.", ())
    windows: int = option("Evaluation windows.", 56, at_least=1)
    window: int = option("Evaluation window length, tokens.", 1024, at_least=2)
    stride: int | None = option(
        "Tokens from the start of one window to the next; by default the window length (no overlap).",
        None,
        at_least=1,
    )
    batch_size: int = option("Windows per forward pass; results do not depend on it.", 4, at_least=1)
    dtype: str = option(
        "Compute type: float32, bfloat16 or float64.", "float32", choices=("float32", "bfloat16", "float64")
    )
    device: str = option("Where to compute: auto (a GPU if there is one), cpu, cuda or cuda:N.", "auto")
    json: str | None = option("Also write the figures to this JSON file.", None)
    plot: str | None = option("Also draw perplexity against cache size into this PNG file.", None)
    suite: str | None = option(
        "YAML file of a suite, such as eval/suites/standard.yaml: it names texts, windows and tasks, and every MODEL "
        "is compared with the reference, by default the first MODEL.",
        None,
    )
    text: tuple[str, ...] = option("With --suite: one more text, NAME=FILE; repeatable.", ())
    parts: str = option("With --suite: folder of finished parts; the same command goes on from there.", "eval-parts")
    html: str | None = option("With --suite: also write a page with tables and plots to this file.", None)
    markdown: str | None = option("With --suite: also write the table of a README to this file.", None)

    def validate(self) -> None:
        """Check that there is a model, that no token falls between two windows, and what a suite decides by itself.

        Raises BadOption.
        """
        if not self.models:
            raise BadOption("models is empty: name at least one checkpoint to evaluate")
        self._check_suite()
        if self.stride is not None and self.stride > self.window:
            raise BadOption(
                f"stride={self.stride} exceeds window={self.window}: tokens between windows would go unscored"
            )

    def _check_suite(self) -> None:
        only = ("text", "html", "markdown", "parts") if self.suite is None else ()
        decided = ("eval_data", "windows", "window", "stride", "plot") if self.suite is not None else ()
        for spec in dataclasses.fields(self):
            if spec.name in (*only, *decided) and getattr(self, spec.name) != spec.default:
                flag = f"--{spec.name.replace('_', '-')}"
                remedy = (
                    f"{flag} belongs to a suite; add --suite FILE"
                    if spec.name in only
                    else f"with --suite the suite decides; write it there, or leave {flag} out"
                )
                raise BadOption(f"{spec.name}={getattr(self, spec.name)!r}: {remedy}")


@dataclass(frozen=True)
class ReportRecipe(Recipe):
    """Options of `mla-convert report`."""

    results: tuple[str, ...] = option("JSON files that `eval --suite` wrote, of one suite.", argument="RESULT")
    html: str | None = option("Write a page with tables and plots to this file.", None)
    markdown: str | None = option("Write the table of a README to this file.", None)


@dataclass(frozen=True)
class DemoRecipe(Recipe):
    """Options of `mla-convert demo`."""

    out: str = option("Folder for the converted checkpoint, the figures (JSON) and the picture (PNG).", "demo-out")
    windows: int = option("Evaluation windows of 1024 tokens.", 8, at_least=1)
    heal: str | None = option("How to heal, as for convert; steps=0: not at all.", "steps=20,windows=24")
    overwrite: bool = option("Replace OUT if it exists and is not empty.", False)
    device: str = option("Where to compute: auto (a GPU if there is one), cpu, cuda or cuda:N.", "auto")

    def validate(self) -> None:
        """Check the healing settings. Raises BadOption."""
        if self.heal:
            HealSettings.parse(self.heal)


def _check_apart(source: str, out: str) -> None:
    # `--overwrite` replaces the whole folder OUT, so a source in or at OUT would be deleted.
    if not Path(source).expanduser().exists():
        return
    inside, target = Path(source).expanduser().resolve(), Path(out).expanduser().resolve()
    if inside == target or target in inside.parents:
        raise BadOption(f"out={out} is or holds the source {source}: choose a folder apart from it")
