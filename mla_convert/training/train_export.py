"""The end of a fine-tuning run: best tensors -> the format's tensors -> folder, with logits compared on the way."""

from __future__ import annotations

import json
import logging
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor
from transformers import PreTrainedModel

from mla_convert.errors import MlaConvertError
from mla_convert.interface import pictures
from mla_convert.interface.finetune_recipe import FinetuneRecipe
from mla_convert.interface.report import environment
from mla_convert.modeling.configs import PREFIX
from mla_convert.output.card import model_card
from mla_convert.output.write import RECORD, FolderWriter
from mla_convert.source.checkpoint import Checkpoint
from mla_convert.source.experts import split_for_checkpoint
from mla_convert.source.family_table import FAMILIES
from mla_convert.source.loading import load_model
from mla_convert.training.train_form import choose_trained, close_latent, may_change, merge_adapters, open_latent
from mla_convert.training.trainer import BEST
from mla_convert.verification.check_models import Agreement, agreement

logger = logging.getLogger(__name__)

# Largest change of a logit on export, relative to the largest logit; fp32 rounding of merged and rescaled matrices
# (measured: 7e-7 on tiny models). Without the norm's gain the change is of order 1.
EXPORT_BOUND = 1e-4
COMPARED_TOKENS = 512


@dataclass(frozen=True, eq=False)
class Outcome:
    """What is recorded of a finished run; before, after: the entries of `curve` of the start and of the best step."""

    recipe: FinetuneRecipe
    processes: int
    text_sha256: str
    curve: list[dict[str, float]]
    before: dict[str, float]
    after: dict[str, float]


@dataclass(frozen=True)
class Exported:
    """max_difference: of logits before and after, relative to the largest; stored_kl: KL that storage rounding adds."""

    max_difference: float
    stored_kl: float


def writer_of(recipe: FinetuneRecipe, converted: Checkpoint) -> FolderWriter:
    """The writer of recipe.out, which refuses a bad target before anything is computed."""
    total = sum(h.dtype.itemsize * torch.Size(h.shape).numel() for h in converted.headers.values())
    return FolderWriter(recipe.out, total, recipe.overwrite)


def best_model(recipe: FinetuneRecipe, work: Path, device: torch.device) -> PreTrainedModel:
    """The model in training form with the best tensors of the run in it, fp32."""
    model = load_model(recipe.converted, torch.float32, device)
    open_latent(model)
    choose_trained(model, recipe.train, recipe.lora_rank, recipe.seed)
    tensors = {name.removeprefix("model."): tensor for name, tensor in load_file(work / BEST).items()}
    unknown = model.load_state_dict(tensors, strict=False).unexpected_keys
    if unknown:
        raise MlaConvertError(f"{work / BEST} holds {unknown[0]}, which the model does not have; delete {work}")
    return model


def export(
    outcome: Outcome,
    writer: FolderWriter,
    converted: Checkpoint,
    record: dict[str, Any],
    work: Path,
    ids: Tensor,
    device: torch.device,
) -> Exported:
    """Write the folder. Raises MlaConvertError if the written form computes other logits than the trained one."""
    recipe = outcome.recipe
    model = best_model(recipe, work, device)
    storage = next(header.dtype for name, header in converted.headers.items() if name.endswith(".kv_b_proj.weight"))
    ids = ids[:, :COMPARED_TOKENS].to(device)
    before = _logits(model, ids)
    merge_adapters(model)
    close_latent(model, storage)
    difference = float((_logits(model, ids) - before).abs().max() / before.abs().max())
    if not difference <= EXPORT_BOUND:
        raise MlaConvertError(
            f"the written form changes logits by {difference:.1e} of the largest, more than {EXPORT_BOUND:.0e}; {work} "
            "keeps the training state; please report this"
        )
    with writer:
        changed = _rounded(model, converted, recipe.train, storage)
        for name in converted.headers:
            writer.add(name, changed.pop(name).to(storage) if name in changed else converted.tensor(name))
        if changed:
            raise MlaConvertError(f"{converted.path} has no place for {min(changed)}; {work} keeps the training state")
        stored = agreement(before, _logits(model, ids))
        files, copies = _files(outcome, converted, record, work, Exported(difference, stored.kl))
        writer.commit(files, copies, converted.config)
    _log_rounding(stored)
    return Exported(difference, stored.kl)


def _log_rounding(stored: Agreement) -> None:
    logger.info("storage rounding costs a KL of %.1e nats per token", stored.kl)


@torch.inference_mode()
def _logits(model: PreTrainedModel, ids: Tensor) -> Tensor:
    # fp32 even where a launcher switched autocast on
    with torch.autocast(ids.device.type, enabled=False):
        return model(input_ids=ids, use_cache=False).logits[0].cpu()  # type: ignore[no-any-return]


@torch.no_grad()
def _rounded(model: PreTrainedModel, converted: Checkpoint, train: str, storage: torch.dtype) -> dict[str, Tensor]:
    """All that may have changed, by the names of the files, rounded to `storage` in the model too: what is read back
    is then what is compared.
    """
    names, family = may_change(model, train), FAMILIES.get(str(converted.config["model_type"]).removeprefix(PREFIX))
    found: dict[str, Tensor] = {}
    for name, parameter in model.named_parameters():
        if name not in names:
            continue
        parameter.copy_(parameter.to(storage))
        if family is None or name in converted.headers:
            found[name] = parameter
        else:
            found |= split_for_checkpoint(family, name, parameter)
    return found


def _files(
    outcome: Outcome, converted: Checkpoint, record: dict[str, Any], work: Path, done: Exported
) -> tuple[dict[str, str], list[Path]]:
    recipe = outcome.recipe
    earlier = record.get("finetune", {})
    finetune = {
        "earlier": [*earlier.pop("earlier", []), earlier] if earlier else [],
        "recipe": recipe.to_dict(),
        "processes": outcome.processes,
        "tokens": recipe.steps * recipe.batch_size * recipe.window,
        "text_sha256": outcome.text_sha256,
        "start": converted.hashes(),
        "held_out_kl": {"before": outcome.before["eval_kl"], "after": outcome.after["eval_kl"]},
        "held_out_ce": {"before": outcome.before["eval_ce"], "after": outcome.after["eval_ce"]},
        "step": outcome.after["step"],
        "export": {"max_difference": done.max_difference, "storage_kl": done.stored_kl},
        "curve": outcome.curve,
        "environment": environment(),
    }
    files = {
        RECORD: json.dumps({**record, "finetune": finetune}, indent=2) + "\n",
        "finetune_curve.json": json.dumps(outcome.curve, indent=1) + "\n",
        "README.md": model_card({**record, "finetune": finetune}, converted.config),
    }
    if converted.generation_config is not None:
        files["generation_config.json"] = json.dumps(converted.generation_config, indent=2) + "\n"
    picture = work / "finetune_curve.png"
    plot_curve(outcome.curve, picture)
    return files, [*converted.sidecars(), picture]


def plot_curve(curve: list[dict[str, float]], path: Path) -> None:
    """Training loss and held-out KL against optimiser steps, as a PNG."""
    figure, axes = pictures.new(7, 4)
    for key, label, style in (("loss", "training loss", "-"), ("eval_kl", "held-out KL to the source", "o-")):
        points = [(entry["step"], entry[key]) for entry in curve if key in entry]
        axes.plot(*zip(*points, strict=True), style, label=label, linewidth=1, markersize=4)
    axes.set_xlabel("optimiser steps")
    axes.set_ylabel("nats per token")
    axes.set_ylim(bottom=0)
    axes.legend(frameon=False)
    pictures.save(figure, path)
