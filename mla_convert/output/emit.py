"""Emit a converted model: its layers and the untouched tensors of the source, then config, record and model card."""

import json
import math
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from mla_convert.conversion.sizes import Size, source_numbers
from mla_convert.errors import UnsupportedSource
from mla_convert.formats.layer import ConvertedLayer
from mla_convert.formats.native import native_config, native_entry, to_native, untouched
from mla_convert.formats.stock import query_latent_rank, residual_scale, stock_config, to_stock
from mla_convert.interface.report import environment
from mla_convert.output.card import model_card
from mla_convert.output.portable import auto_map
from mla_convert.output.write import RECORD, FolderWriter
from mla_convert.planning.engines import biases_lost
from mla_convert.source.checkpoint import Checkpoint
from mla_convert.source.families import SourceSpec, global_tensors, layer_tensors
from mla_convert.source.projections import attention_prefix


def expected_bytes(spec: SourceSpec, sizes: list[Size], dtype: torch.dtype) -> int:
    """Bytes of the largest checkpoint that may be written."""
    largest = 0
    d, heads, hidden = spec.source_head_dim, spec.num_attention_heads, spec.hidden_size
    for size in sizes:
        rank, rope = size.kv_lora_rank, size.plan.qk_rope_head_dim
        nope = 0 if size.plan.keeps_everything else d
        query_and_down = (heads * (nope + rope) + rank + rope) * hidden
        up_and_out = heads * (nope + d) * rank + heads * d * hidden
        if spec.biased:
            query_latent = query_latent_rank(hidden)
            query_and_down += query_latent * hidden + heads * (nope + rope) * (query_latent - hidden)
        layer = query_and_down + up_and_out + rank + 3 * spec.intermediate_size * hidden + 2 * hidden
        largest = max(largest, spec.num_hidden_layers * layer + 2 * spec.vocab_size * hidden + hidden)
    return largest * dtype.itemsize


def expected_native_bytes(checkpoint: Checkpoint, spec: SourceSpec, sizes: list[Size], dtype: torch.dtype) -> int:
    """Bytes of the largest native checkpoint that may be written: all of the source, and latent attention beside it."""
    d, heads = spec.source_head_dim, spec.num_attention_heads
    copied = sum(math.prod(header.shape) for header in checkpoint.headers.values())
    query = heads * d if spec.keys_values else heads * spec.hidden_size
    largest = max(
        (d + size.plan.qk_rope_head_dim) * query
        + (size.kv_lora_rank + size.plan.qk_rope_head_dim) * spec.latent_inputs
        + 2 * heads * d * size.kv_lora_rank
        for size in sizes
    )
    return (copied + spec.num_hidden_layers * largest) * dtype.itemsize


def write_native(
    checkpoint: Checkpoint,
    spec: SourceSpec,
    layers: Iterator[ConvertedLayer],
    writer: FolderWriter,
    dtype: torch.dtype,
    advance: Callable[[int], None],
) -> list[dict[str, Any] | None]:
    """Write all tensors of a native checkpoint, layer by layer; returns the entries of `mla.layers`."""
    entries: list[dict[str, Any] | None] = []
    prefixes: list[str] = []
    for index, converted in enumerate(layers):
        layer = converted.attention
        for name, tensor in converted.others.items():
            writer.add(name, tensor.to(dtype))
            prefixes.append(name)
        if layer is None:
            entries.append(None)
        else:
            prefix = attention_prefix(index)
            tensors = to_native(checkpoint, spec, index, layer)
            for name, tensor in tensors.items():
                writer.add(prefix + name, tensor.to(dtype))
            entries.append(native_entry(layer, tensors))
            prefixes.append(prefix)
        advance(1)
    for name in untouched(checkpoint, spec, tuple(prefixes)):
        writer.add(name, checkpoint.tensor(name).to(dtype))
    return entries


def write_tensors(
    checkpoint: Checkpoint,
    spec: SourceSpec,
    layers: Iterator[ConvertedLayer],
    writer: FolderWriter,
    dtype: torch.dtype,
    advance: Callable[[int], None],
) -> None:
    """Write all tensors, layer by layer; rescales the residual stream where the source's eps is not 1e-6."""
    names, scale = global_tensors(spec), residual_scale(spec.rms_norm_eps)

    def add(name: str, tensor: Tensor, factor: float = 1.0) -> None:
        writer.add(name, (tensor.to(torch.float64) * factor if factor != 1.0 else tensor).to(dtype))

    embed = checkpoint.tensor(names["embed"])
    add("model.embed_tokens.weight", embed, scale)
    for index, converted in enumerate(layers):
        layer, source = converted.attention, layer_tensors(spec, index)
        assert layer is not None  # only the native format keeps layers
        prefix = f"model.layers.{index}."
        norm = checkpoint.tensor(source["input_norm"])
        for name, tensor in to_stock(layer, norm.to(layer.W_DKV.device), scale).items():
            add(f"{prefix}self_attn.{name}", tensor)
        add(f"{prefix}input_layernorm.weight", norm)
        add(f"{prefix}post_attention_layernorm.weight", checkpoint.tensor(source["post_norm"]))
        for role, factor in (("gate", 1.0), ("up", 1.0), ("down", scale)):
            name = source[role]
            tensor = converted.others[name] if name in converted.others else checkpoint.tensor(name)
            add(f"{prefix}mlp.{role}_proj.weight", tensor, factor)
        advance(1)
    add("model.norm.weight", checkpoint.tensor(names["final_norm"]))
    add("lm_head.weight", checkpoint.tensor(names["lm_head"]) if "lm_head" in names else embed)


def publish(
    checkpoint: Checkpoint,
    spec: SourceSpec,
    size: Size,
    dtype: torch.dtype,
    record: dict[str, Any],
    writer: FolderWriter,
    native_layers: list[dict[str, Any] | None] | None = None,
    self_contained: bool = False,
) -> None:
    """Complete `record`, write every file that is no tensor, and rename the folder to its name.

    native_layers: what `write_native` returned, for the native format. self_contained: whether its code is written too.
    """
    record |= {
        "format": "stock" if native_layers is None else "native",
        "source": {
            "hashes": checkpoint.hashes(),
            "consumed": checkpoint.consumed(),
            "leftover": _no_leftover(checkpoint),
        },
        "kv_lora_rank": size.kv_lora_rank,
        "qk_rope_head_dim": size.plan.qk_rope_head_dim,
        "rope_stride": size.plan.stride,
        "lossless": size.plan.keeps_everything,
        "source_numbers": source_numbers(spec),
        "environment": environment(),
    }
    nope = 0 if size.plan.keeps_everything else spec.source_head_dim
    if native_layers is None and spec.biased:
        record["biases_lost_by"] = biases_lost()
    if native_layers is None:
        config = stock_config(spec, size.kv_lora_rank, nope, size.plan, dtype)
    else:
        config = native_config(spec, native_layers, dtype)
    if self_contained:
        config["auto_map"] = auto_map(spec.family)
    files = {RECORD: json.dumps(record, indent=2) + "\n", "README.md": model_card(record, config)}
    generation = checkpoint.generation_config
    if generation is None and native_layers is None:  # a native config's class has the source's own defaults
        tokens = ("bos_token_id", "eos_token_id", "pad_token_id")
        generation = {"_from_model_config": True, **{key: config[key] for key in tokens}}
    if generation is not None:
        files["generation_config.json"] = json.dumps(generation, indent=2) + "\n"
    writer.commit(files, checkpoint.sidecars(), config)


def _no_leftover(checkpoint: Checkpoint) -> list[str]:
    """The empty list; raises UnsupportedSource, before anything is published, if a tensor was never used."""
    leftover = checkpoint.leftover()
    if leftover:
        raise UnsupportedSource(
            f"{len(leftover)} tensors of the source were not consumed, first {leftover[0]}; this is a bug in "
            "the family table: please report it with the model's name"
        )
    return leftover
