"""Checks of a folder in the native format: its config is the source's with latent attention, its layers are exact."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel

from mla_convert.formats.layer import attend_expanded
from mla_convert.formats.native import NativeFolder
from mla_convert.modeling.attention import MLAttention
from mla_convert.modeling.classes import native_classes
from mla_convert.modeling.configs import PREFIX, native_name
from mla_convert.output.portable import code_faults
from mla_convert.verification.check_files import Check, found, pickles
from mla_convert.verification.check_models import ABSORB_BOUND, LAYER_BOUND, run_observed, within, worst_of

OWN = ("architectures", "model_type", "dtype", "mla", "auto_map")
DROPPED = ("torch_dtype", "_name_or_path", "transformers_version")


def config_is_native(source: Mapping[str, Any], converted: Mapping[str, Any], record: Mapping[str, Any]) -> list[Check]:
    """config.json against the source's: every key kept but those that say what the conversion changed."""
    family = str(source.get("model_type"))
    must = {key: value for key, value in source.items() if key not in OWN + DROPPED}
    must |= {"model_type": native_name(family), "architectures": [native_classes(family)[1].__name__]}
    differ = [key for key, want in must.items() if converted.get(key) != want]
    wrong = [f"{key} {converted.get(key)!r}, needed {must[key]!r}" for key in differ]
    wrong += [f"{key} {converted[key]!r} is not the source's" for key in converted.keys() - must.keys() - set(OWN)]
    latent = [entry for entry in converted.get("mla", {}).get("layers", []) if entry is not None]
    sizes = {entry["kv_lora_rank"] + 2 * len(entry["slots"]) for entry in latent}
    wanted = record.get("kv_lora_rank", 0) + record.get("qk_rope_head_dim", 0)
    if any(size > wanted for size in sizes) or not latent:
        wrong.append(f"mla caches {sorted(sizes)} numbers per layer, conversion.json says {wanted}")
    return [found("config is the source's with latent attention", wrong, f"{len(must) + 1} fields", "")]


def code_is_ours(folder: str | Path, config: Mapping[str, Any]) -> Check:
    """Python files in the folder are exactly those of `convert --self-contained`, or there are none; no pickles."""
    family = str(config["model_type"]).removeprefix(PREFIX)
    held = {path.name: path.read_text(encoding="utf-8", errors="replace") for path in Path(folder).glob("*.py")}
    wrong = code_faults(dict(config), family, held) + [f"{name} is a pickle" for name in pickles(folder)]
    return found("no foreign code, no pickle", wrong, f"{len(held)} code files, all of mla_convert", "")


def native_layers_are_exact(
    model: PreTrainedModel, folder: str | Path, ids: torch.Tensor, advance: Callable[[int], None]
) -> list[Check]:
    """Every latent layer on the text's inputs: the class == its equations == the class absorbed (fp64)."""
    written, calls = NativeFolder(folder), _calls(model, ids)
    positions = torch.arange(len(ids))[None]
    by_class: list[float] = []
    by_absorbed: list[float] = []
    for index in written.converted:
        attention, kwargs, seen = calls[index]
        hidden = kwargs["hidden_states"]
        expanded = attend_expanded(written.layer(index), hidden, positions)
        scale = float(expanded.abs().max()) or 1.0
        by_class.append(worst_of(seen - expanded) / scale)
        paths = []
        for path in ("expanded", "absorbed"):
            attention.path = path
            paths.append(attention(**kwargs)[0])
        by_absorbed.append(worst_of(paths[1] - paths[0]) / scale)
        advance(1)
    return [
        within("native layer == its equations", by_class, LAYER_BOUND, "fp32 class, fp64 equations"),
        within("expanded == absorbed", by_absorbed, ABSORB_BOUND, "fp64"),
    ]


@torch.inference_mode()
def _calls(model: PreTrainedModel, ids: torch.Tensor) -> list[tuple[MLAttention, dict[str, Any], torch.Tensor]]:
    """For each layer its attention in fp64 on the CPU, what it is called with (fp64) and what it returned."""
    calls: list[tuple[MLAttention, dict[str, Any], torch.Tensor]] = []

    def double(value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            return value.cpu().double() if value.is_floating_point() else value.cpu()
        return tuple(map(double, value)) if isinstance(value, tuple) else value

    def keep(module: Any, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> None:
        names = ("hidden_states", "position_embeddings", "attention_mask")
        exact = copy.deepcopy(module, {id(model.config): model.config}).cpu().double()
        call = dict(zip(names, args, strict=False)) | {key: kwargs[key] for key in names if key in kwargs}
        calls.append((exact, {key: double(value) for key, value in call.items()}, out[0].cpu().double()))

    run_observed(model, ids, keep)
    return calls
