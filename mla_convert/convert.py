"""convert: checkpoint -> read -> calibrate -> rope -> factor -> write, one layer in memory."""

import json
import logging
from dataclasses import asdict, dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from torch import Tensor

from mla_convert.assemble import LayerReport, SourceAttention, assemble
from mla_convert.calibrate import LayerMoments, calibrate, moments_file
from mla_convert.card import model_card
from mla_convert.checkpoint import Checkpoint
from mla_convert.choose import choose
from mla_convert.errors import BadCheckpoint, BadOption, UnsupportedSource
from mla_convert.factor import SWEEPS
from mla_convert.families import SourceSpec, global_tensors, layer_tensors, read_spec
from mla_convert.layer import MLALayer
from mla_convert.loading import load_tokenizer, resolve_device
from mla_convert.measure import Stage, stage
from mla_convert.options import FLOAT16_REASON
from mla_convert.recipe import ConvertRecipe
from mla_convert.report import environment, progress
from mla_convert.sizes import Size, allowed_sizes, source_numbers
from mla_convert.stock import residual_scale, stock_config, to_stock
from mla_convert.stream import LayerStream
from mla_convert.texts import read_documents, text_hash, token_windows
from mla_convert.write import RECORD, FolderWriter

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
    dtype: torch.dtype
    device: torch.device

    @property
    def needs_text(self) -> bool:
        """Weight SVD and the exact re-encoding look at no text."""
        return not self.recipe.lossless and self.recipe.method != "svd"


def convert(recipe: ConvertRecipe) -> ConvertResult:
    """Convert recipe.source into the folder recipe.out. Raises MlaConvertError, leaving nothing behind."""
    checkpoint = Checkpoint.open(recipe.source)
    spec = read_spec(checkpoint)
    job = Job(
        recipe,
        checkpoint,
        spec,
        allowed_sizes(recipe, spec),
        output_dtype(recipe, spec),
        resolve_device(recipe.device),
    )
    done: list[Stage] = []
    writer = FolderWriter(recipe.out, expected_bytes(job), recipe.overwrite)
    with TemporaryDirectory(prefix="mla_convert_") as scratch:
        ids, held_out, text = _read_text(job)
        stream = LayerStream(checkpoint, spec, job.device)
        if job.needs_text:
            with stage("calibrate", done):
                calibrate(stream, ids, Path(scratch), recipe.seed)

        def moments(layer: int) -> LayerMoments | None:
            return (
                LayerMoments.load(moments_file(Path(scratch), layer), job.device) if job.needs_text else None
            )

        def assembled(layer: int, size: Size, sweeps: int) -> tuple[MLALayer, LayerReport]:
            return assemble(source_attention(job, layer), moments(layer), spec, size, recipe.method, sweeps)

        size, considered = job.sizes[0], list[dict[str, Any]]()
        if len(job.sizes) > 1:
            with stage("choose", done):
                size, considered = choose(job.sizes, stream, held_out, assembled)
        with writer, stage("convert", done):
            reports = _write_layers(job, size, writer, assembled)
            record: dict[str, Any] = {
                "recipe": recipe.to_dict(),
                "source": {
                    "hashes": checkpoint.hashes(),
                    "consumed": checkpoint.consumed(),
                    "leftover": _no_leftover(checkpoint),
                },
                "lossless": recipe.lossless,
                "kv_lora_rank": size.kv_lora_rank,
                "qk_rope_head_dim": size.plan.qk_rope_head_dim,
                "rope_stride": size.plan.stride,
                "source_numbers": source_numbers(spec),
                "sizes_considered": considered,
                "calibration": {"sha256": text, "tokens": ids.numel() if job.needs_text else 0},
                "layers": [asdict(report) for report in reports],
                "stages": [asdict(taken) for taken in done],
                "environment": environment(),
            }
            _commit(job, size, writer, record)
    return ConvertResult(
        out=recipe.out,
        kv_lora_rank=size.kv_lora_rank,
        qk_rope_head_dim=size.plan.qk_rope_head_dim,
        rope_stride=size.plan.stride,
        source_numbers=source_numbers(spec),
        layers=tuple(reports),
        calibration_tokens=record["calibration"]["tokens"],
        stages=tuple(done),
    )


def output_dtype(recipe: ConvertRecipe, spec: SourceSpec) -> torch.dtype:
    """The type written. Raises BadOption where `auto` would mean float16."""
    if recipe.dtype != "auto":
        return {"float32": torch.float32, "bfloat16": torch.bfloat16}[recipe.dtype]
    if spec.dtype == torch.float16:
        raise BadOption(f"the source is stored in float16, and {FLOAT16_REASON} (--dtype)")
    return spec.dtype


def expected_bytes(job: Job) -> int:
    """Bytes of the largest checkpoint that may be written."""
    spec, largest = job.spec, 0
    d, heads, hidden = spec.source_head_dim, spec.num_attention_heads, spec.hidden_size
    for size in job.sizes:
        rank, rope = size.kv_lora_rank, size.plan.qk_rope_head_dim
        nope = 0 if size.plan.keeps_everything else d
        attention = (
            heads * (nope + rope) * hidden
            + (rank + rope) * hidden
            + heads * (nope + d) * rank
            + heads * d * hidden
        )
        layer = attention + rank + 3 * spec.intermediate_size * hidden + 2 * hidden
        largest = max(largest, spec.num_hidden_layers * layer + 2 * spec.vocab_size * hidden + hidden)
    return largest * job.dtype.itemsize


def source_attention(job: Job, layer: int) -> SourceAttention:
    """Layer `layer`'s projections in fp64 on the device."""
    names, spec = layer_tensors(job.spec, layer), job.spec
    q, k, v, o = (
        job.checkpoint.tensor(names[role]).to(job.device, torch.float64) for role in ("q", "k", "v", "o")
    )
    d = spec.source_head_dim
    return SourceAttention(
        W_Q=q.unflatten(0, (spec.num_attention_heads, d)),
        W_K=k.unflatten(0, (spec.num_key_value_heads, d)),
        W_V=v.unflatten(0, (spec.num_key_value_heads, d)),
        W_O=o.unflatten(1, (spec.num_attention_heads, d)).transpose(0, 1),
    )


def _read_text(job: Job) -> tuple[Tensor, Tensor, str | None]:
    """Calibration windows, held-out windows (where sizes are compared) [windows, tokens], the text's hash."""
    recipe, none = job.recipe, torch.zeros(0, 0, dtype=torch.int64)
    if not job.needs_text:
        return none, none, None
    documents = read_documents(recipe.calib_data, part="calib")
    extra = -(-recipe.calib_windows // HELD_OUT_SHARE) if len(job.sizes) > 1 else 0
    ids = token_windows(load_tokenizer(recipe.source), documents, recipe.window, recipe.calib_windows + extra)
    if int(ids.max()) >= job.spec.vocab_size:
        raise BadCheckpoint(
            f"the tokenizer of {recipe.source} gives token id {int(ids.max())}, but config.json says "
            f"vocab_size={job.spec.vocab_size}; put the model's own tokenizer there"
        )
    # A text shorter than asked for is shared out in the same proportion; one window is for calibration.
    extra = min(extra, -(-len(ids) // (HELD_OUT_SHARE + 1)), len(ids) - 1)
    held_out, ids = ids[:extra], ids[extra:]
    if ids.numel() < job.spec.hidden_size:
        logger.warning(
            "%d calibration tokens are fewer than hidden_size=%d, so some directions of the input are never "
            "seen; give more text or --calib-windows", ids.numel(), job.spec.hidden_size,
        )  # fmt: skip
    return ids, held_out, text_hash(documents)


def _write_layers(job: Job, size: Size, writer: FolderWriter, assembled: Any) -> list[LayerReport]:
    """Write all tensors, layer by layer; rescales the residual stream where the source's eps is not 1e-6."""
    spec, checkpoint = job.spec, job.checkpoint
    names, scale = global_tensors(spec), residual_scale(spec.rms_norm_eps)
    reports = []

    def add(name: str, tensor: Tensor, factor: float = 1.0) -> None:
        writer.add(name, (tensor.to(torch.float64) * factor if factor != 1.0 else tensor).to(job.dtype))

    embed = checkpoint.tensor(names["embed"])
    add("model.embed_tokens.weight", embed, scale)
    with progress("converting", "layers", spec.num_hidden_layers) as advance:
        for index in range(spec.num_hidden_layers):
            layer, report = assembled(index, size, SWEEPS)
            reports.append(report)
            logger.debug(
                "layer %d: predicted relative loss %.2e (rope %.1e)", index, report.total, report.rope
            )
            source = layer_tensors(spec, index)
            prefix = f"model.layers.{index}."
            norm = checkpoint.tensor(source["input_norm"])
            for name, tensor in to_stock(layer, norm.to(job.device), scale).items():
                add(f"{prefix}self_attn.{name}", tensor)
            add(f"{prefix}input_layernorm.weight", norm)
            add(f"{prefix}post_attention_layernorm.weight", checkpoint.tensor(source["post_norm"]))
            for role in ("gate", "up", "down"):
                add(
                    f"{prefix}mlp.{role}_proj.weight",
                    checkpoint.tensor(source[role]),
                    scale if role == "down" else 1.0,
                )
            advance(1)
    add("model.norm.weight", checkpoint.tensor(names["final_norm"]))
    add("lm_head.weight", checkpoint.tensor(names["lm_head"]) if "lm_head" in names else embed)
    return reports


def _no_leftover(checkpoint: Checkpoint) -> list[str]:
    """The empty list; raises UnsupportedSource, before anything is published, if a tensor was never used."""
    leftover = checkpoint.leftover()
    if leftover:
        raise UnsupportedSource(
            f"{len(leftover)} tensors of the source were not consumed, first {leftover[0]}; this is a bug in "
            "the family table: please report it with the model's name"
        )
    return leftover


def _commit(job: Job, size: Size, writer: FolderWriter, record: dict[str, Any]) -> None:
    nope = 0 if size.plan.keeps_everything else job.spec.source_head_dim
    config = stock_config(job.spec, size.kv_lora_rank, nope, size.plan, job.dtype)
    generation = job.checkpoint.generation_config or {
        "_from_model_config": True,
        **{key: config[key] for key in ("bos_token_id", "eos_token_id", "pad_token_id")},
    }
    files = {
        RECORD: json.dumps(record, indent=2) + "\n",
        "generation_config.json": json.dumps(generation, indent=2) + "\n",
        "README.md": model_card(record, config),
    }
    writer.commit(files, job.checkpoint.sidecars(), config)
