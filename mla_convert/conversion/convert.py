"""convert: checkpoint -> read -> calibrate -> rope -> factor -> [heal] -> write, one layer in memory."""

import logging
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from torch import Tensor

from mla_convert.calibration.calibrate import KeptMoments, LayerMoments, calibrate
from mla_convert.calibration.stream import LayerStream
from mla_convert.calibration.texts import check_ids, read_documents, text_hash, token_windows, with_conversations
from mla_convert.conversion.assemble import LayerReport, assemble
from mla_convert.conversion.choose import choose
from mla_convert.conversion.factor import SWEEPS
from mla_convert.conversion.sizes import Size, allowed_sizes, source_numbers, unseen_pairs
from mla_convert.errors import BadOption, UnsupportedSource
from mla_convert.formats.layer import ConvertedLayer, MLALayer
from mla_convert.interface.measure import Clock, Stage, stage
from mla_convert.interface.options import FLOAT16_REASON
from mla_convert.interface.recipe import ConvertRecipe, HealSettings
from mla_convert.interface.report import progress
from mla_convert.output.emit import expected_bytes, expected_native_bytes, publish, write_native, write_tensors
from mla_convert.output.portable import check_self_contained
from mla_convert.output.write import FolderWriter
from mla_convert.planning.engines import biases_lost
from mla_convert.source.checkpoint import Checkpoint
from mla_convert.source.families import SourceSpec, read_spec
from mla_convert.source.keep import kept_layers
from mla_convert.source.loading import load_tokenizer, resolve_device
from mla_convert.source.projections import source_attention
from mla_convert.training.healing import HealReport, heal_layers

logger = logging.getLogger(__name__)

HELD_OUT_SHARE = 8  # one held-out window per this many calibration windows decides between sizes


@dataclass(frozen=True)
class ConvertResult:
    """What was written where, and what it took; numbers are cached numbers per token and layer."""

    out: str
    kv_lora_rank: int
    qk_rope_head_dim: int
    rope_stride: int | None
    source_numbers: int
    layers: tuple[LayerReport, ...]
    healing: tuple[HealReport, ...]
    calibration_tokens: int
    stages: tuple[Stage, ...]

    @property
    def numbers(self) -> int:
        """Numbers cached per token and layer by the result."""
        return self.kv_lora_rank + self.qk_rope_head_dim


@dataclass(frozen=True, eq=False)
class Job:
    """Everything that is decided before the first tensor is computed."""

    recipe: ConvertRecipe
    checkpoint: Checkpoint
    spec: SourceSpec
    sizes: list[Size]
    heal: HealSettings
    dtype: torch.dtype
    device: torch.device
    native: bool
    kept: frozenset[int]

    @property
    def needs_moments(self) -> bool:
        """Weight SVD and the exact re-encoding look at no text."""
        return not self.recipe.lossless and self.recipe.method != "svd"


@dataclass(frozen=True, eq=False)
class Texts:
    """Windows [windows, tokens] that calibrate, that decide between sizes, and that heal; the text's hash."""

    calibration: Tensor
    held_out: Tensor
    healing: Tensor
    sha256: str | None


def convert(recipe: ConvertRecipe) -> ConvertResult:
    """Convert recipe.source into the folder recipe.out. Raises MlaConvertError, leaving nothing behind."""
    checkpoint = Checkpoint.open(recipe.source)
    spec = read_spec(checkpoint)
    native = output_is_native(recipe, spec)
    if recipe.self_contained:
        check_self_contained(native)
    job = Job(
        recipe=recipe,
        checkpoint=checkpoint,
        spec=spec,
        sizes=allowed_sizes(recipe, spec, native),
        heal=replace(HealSettings.parse(recipe.heal), seed=recipe.seed) if recipe.heal else HealSettings(0),
        dtype=output_dtype(recipe, spec, native),
        device=resolve_device(recipe.device),
        native=native,
        kept=kept_layers(recipe.keep_layers, spec) if native else frozenset(),
    )
    needed = expected_native_bytes(checkpoint, spec, job.sizes, job.dtype) if native else None
    writer = FolderWriter(recipe.out, needed or expected_bytes(spec, job.sizes, job.dtype), recipe.overwrite)
    with TemporaryDirectory(prefix="mla_convert_") as scratch:
        return _run(job, writer, Path(scratch))


def _run(job: Job, writer: FolderWriter, scratch: Path) -> ConvertResult:
    recipe, spec, done = job.recipe, job.spec, list[Stage]()
    texts = _read_texts(job)
    stream = LayerStream(job.checkpoint, spec, job.device)
    size, considered, kept = job.sizes[0], list[dict[str, Any]](), None
    if len(job.sizes) > 1:
        if job.needs_moments:
            with stage("calibrate", done):
                kept = _kept_moments(job, stream, texts.calibration, scratch)
        with stage("choose", done):
            size, considered = choose(
                job.sizes,
                stream,
                texts.held_out,
                lambda *which: _assembled(job, stream, _stored(kept, job, which[0]), *which),
            )
    _warn_of_unseen(job, size)
    reports, healing = list[LayerReport](), list[HealReport]()
    calibrating, whole = Clock(), list[Stage]()
    windows = len(texts.calibration) if kept is None else 0
    with writer:
        with (
            stage("convert", whole),
            progress("converting", "steps", spec.num_hidden_layers * (windows + job.heal.steps + 1)) as advance,
        ):
            streamed = calibrate(stream, texts.calibration, recipe.seed, advance, job.kept) if windows else None

            def closed_form(layer: int) -> ConvertedLayer:
                with calibrating:
                    moments = next(streamed) if streamed else _stored(kept, job, layer)
                found, report = _assembled(job, stream, moments, layer, size, SWEEPS)
                reports.append(report)
                logger.debug("layer %d: predicted error %.2e (rope %.1e)", layer, report.total, report.rope)
                return ConvertedLayer(found)

            layers = _layers(job, stream, texts.healing, closed_form, healing, scratch, advance)
            native_layers = None
            if job.native:
                native_layers = write_native(job.checkpoint, spec, layers, writer, job.dtype, advance)
            else:
                write_tensors(job.checkpoint, spec, layers, writer, job.dtype, advance)
        done += _shared_out(whole[0], calibrating.seconds if streamed else 0.0, bool(healing))
        record: dict[str, Any] = {
            "recipe": recipe.to_dict(),
            "sizes_considered": considered,
            "calibration": {"sha256": texts.sha256, "tokens": texts.calibration.numel()},
            "layers": [asdict(report) for report in reports],
            "heal": {
                "settings": asdict(job.heal),
                "tokens": job.heal.steps * recipe.window,
                "layers": [asdict(report) for report in healing],
            },
            "stages": [asdict(taken) for taken in done],
        }
        publish(job.checkpoint, spec, size, job.dtype, record, writer, native_layers, recipe.self_contained)
    return ConvertResult(
        out=recipe.out,
        kv_lora_rank=size.kv_lora_rank,
        qk_rope_head_dim=size.plan.qk_rope_head_dim,
        rope_stride=size.plan.stride,
        source_numbers=source_numbers(spec),
        layers=tuple(reports),
        healing=tuple(healing),
        calibration_tokens=texts.calibration.numel(),
        stages=tuple(done),
    )


def _warn_of_unseen(job: Job, size: Size) -> None:
    unseen = [] if job.recipe.lossless else unseen_pairs(job.spec, size.plan, job.recipe.window)
    if unseen:
        logger.warning(
            "%d of %d frequencies (%s) lose their rotation, and windows of %d tokens cannot show what that costs at "
            "positions up to %d: the loss will grow with the position. A longer --window measures it; "
            "--qk-rope-head-dim %d keeps every frequency", len(unseen), job.spec.pairs,
            ", ".join(map(str, unseen)), job.recipe.window, job.spec.max_position_embeddings, 2 * job.spec.pairs,
        )  # fmt: skip


def _kept_moments(job: Job, stream: LayerStream, ids: Tensor, scratch: Path) -> KeptMoments:
    kept = KeptMoments(scratch, job.spec, job.device)
    with progress("calibrating", "windows x layers", len(ids) * job.spec.num_hidden_layers) as advance:
        for layer, moments in enumerate(calibrate(stream, ids, job.recipe.seed, advance, job.kept)):
            if moments is not None:
                kept.keep(layer, moments)
    return kept


def _stored(kept: KeptMoments | None, job: Job, layer: int) -> LayerMoments | None:
    return None if kept is None or layer in job.kept else kept.load(layer)


def _assembled(
    job: Job, stream: LayerStream, moments: LayerMoments | None, layer: int, size: Size, sweeps: int
) -> tuple[MLALayer | None, LayerReport]:
    if layer in job.kept:
        return None, LayerReport(0.0, 0.0, 0.0)
    source = source_attention(job.checkpoint, job.spec, layer, job.device, stream.front(layer))
    return assemble(source, moments, job.spec, size, job.recipe.method, sweeps)


def _shared_out(whole: Stage, calibrating: float, healed: bool) -> list[Stage]:
    """Calibration and the rest take turns layer by layer: two stages by seconds, with the peak of both."""
    rest = Stage("convert and heal" if healed else "convert", whole.seconds - calibrating, whole.peak_rss)
    return [Stage("calibrate", calibrating, whole.peak_rss), rest] if calibrating else [rest]


def _layers(
    job: Job,
    stream: LayerStream,
    ids: Tensor,
    closed_form: Callable[[int], ConvertedLayer],
    healing: list[HealReport],
    scratch: Path,
    advance: Callable[[int], None],
) -> Iterator[ConvertedLayer]:
    """The layers in order, healed if asked for; what healing did is appended to `healing`."""
    if not job.heal.steps:
        yield from map(closed_form, range(job.spec.num_hidden_layers))
        return
    for layer, report in heal_layers(stream, ids, closed_form, job.heal, scratch, advance):
        healing.append(report)
        yield layer


def output_is_native(recipe: ConvertRecipe, spec: SourceSpec) -> bool:
    """Whether the native format is written. Raises UnsupportedSource where stock was asked for and is impossible."""
    obstacle = spec.stock_obstacle
    if obstacle is None and recipe.keep_layers not in ("auto", "none"):
        obstacle = f"keep_layers={recipe.keep_layers}: it has no layers without a latent"
    if recipe.format == "stock" and obstacle is not None:
        raise UnsupportedSource(
            f"{recipe.source} ({spec.family}): the stock format cannot hold it: {obstacle.rstrip('.')}; "
            "use --format native"
        )
    if recipe.format == "stock" and spec.biased:
        lost = "; ".join(f"{engine}: {what}" for engine, what in biases_lost().items())
        logger.warning("transformers loads the biases of a stock checkpoint, other engines do not: %s", lost)
    if recipe.format != "auto":
        return recipe.format == "native"
    if obstacle is not None:
        logger.info("native format, as the stock format cannot hold the source: %s", obstacle)
    elif spec.stock_cost is not None:
        logger.info("native format: %s; --format stock writes it all the same", spec.stock_cost)
    return obstacle is not None or spec.stock_cost is not None


def output_dtype(recipe: ConvertRecipe, spec: SourceSpec, native: bool = False) -> torch.dtype:
    """The type written. Raises BadOption where `auto` would mean float16."""
    if recipe.dtype != "auto":
        return {"float32": torch.float32, "bfloat16": torch.bfloat16}[recipe.dtype]
    if spec.dtype == torch.float16 and native:
        raise BadOption("the source is stored in float16, which is not written; use --dtype float32 or bfloat16")
    if spec.dtype == torch.float16:
        raise BadOption(f"the source is stored in float16, and {FLOAT16_REASON} (--dtype)")
    return spec.dtype


def _read_texts(job: Job) -> Texts:
    """Tokenise what the recipe needs; healing windows begin where the calibration windows do."""
    recipe, none = job.recipe, torch.zeros(0, 0, dtype=torch.int64)
    if not job.needs_moments and not job.heal.steps:
        return Texts(none, none, none, None)
    documents = read_documents(recipe.calib_data, part="calib")
    extra = -(-recipe.calib_windows // HELD_OUT_SHARE) if len(job.sizes) > 1 else 0
    wanted = max(recipe.calib_windows + extra, job.heal.windows if job.heal.steps else 0)
    tokenizer = load_tokenizer(recipe.source)
    ids = with_conversations(tokenizer, token_windows(tokenizer, documents, recipe.window, wanted))
    check_ids(ids, job.spec.vocab_size, recipe.source)
    if ids.numel() < job.spec.hidden_size:
        logger.warning(
            "%d calibration tokens are fewer than hidden_size=%d, so some directions of the input are never "
            "seen; give more text or --calib-windows", ids.numel(), job.spec.hidden_size,
        )  # fmt: skip
    if job.heal.steps and len(ids) <= job.heal.held_out:
        raise BadOption(
            f"the text gives {len(ids)} windows of {recipe.window} tokens and healing holds {job.heal.held_out} out; "
            "give more text with --calib-data, or a smaller held_out in --heal"
        )
    # A text shorter than asked for is shared out in the same proportion; one window is for calibration.
    extra = min(extra, -(-len(ids) // (HELD_OUT_SHARE + 1)), len(ids) - 1)
    calibration = ids[extra : extra + recipe.calib_windows] if job.needs_moments else none
    return Texts(calibration, ids[:extra], ids[: job.heal.windows], text_hash(documents))
