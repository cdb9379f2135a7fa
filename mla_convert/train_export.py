"""The end of a fine-tuning run: best tensors -> stock tensors -> folder, with logits compared on the way."""

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

from mla_convert.card import model_card
from mla_convert.check_models import Agreement, agreement
from mla_convert.checkpoint import Checkpoint
from mla_convert.errors import MlaConvertError
from mla_convert.finetune_recipe import FinetuneRecipe
from mla_convert.loading import load_model
from mla_convert.report import environment
from mla_convert.train_model import choose_trained, close_latent, merge_adapters, open_latent
from mla_convert.trainer import BEST
from mla_convert.write import RECORD, FolderWriter

logger = logging.getLogger(__name__)

# Largest change of a logit on export, relative to the largest logit; fp32 rounding of merged and rescaled matrices
# (measured: 7e-7 on tiny models). Without the norm's gain the change is of order 1.
EXPORT_BOUND = 1e-4
COMPARED_TOKENS = 512


@dataclass(frozen=True, eq=False)
class Outcome:
    """What is recorded of a finished run; held-out KL in nats per token at the start and at best_step."""

    recipe: FinetuneRecipe
    processes: int
    text_sha256: str
    curve: list[dict[str, float]]
    best_step: int
    kl_before: float
    kl_after: float


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
    tensors = {
        name.removeprefix(
            "model.",
        ): tensor
        for name, tensor in load_file(work / BEST).items()
    }
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
    """Write the folder. Raises MlaConvertError if the stock form computes other logits than the trained one."""
    recipe = outcome.recipe
    model = best_model(recipe, work, device)
    storage = converted.headers["model.layers.0.self_attn.kv_b_proj.weight"].dtype
    ids = ids[:, :COMPARED_TOKENS].to(device)
    before = _logits(model, ids)
    touched = _touched(model, recipe.train)
    merge_adapters(model)
    close_latent(model, storage)
    difference = float((_logits(model, ids) - before).abs().max() / before.abs().max())
    if not difference <= EXPORT_BOUND:
        raise MlaConvertError(
            f"the stock form changes logits by {difference:.1e} of the largest, more than {EXPORT_BOUND:.0e}; {work} "
            "keeps the training state; please report this"
        )
    with writer:
        tensors = dict(model.named_parameters())
        with torch.no_grad():
            for name in converted.headers:
                if name in touched:
                    kept = tensors[name].to(storage)
                    tensors[name].copy_(kept)  # what will be read back, for the comparison below
                    writer.add(name, kept)
                else:
                    writer.add(name, converted.tensor(name))
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


def _touched(model: PreTrainedModel, train: str) -> set[str]:
    """Names of the tensors that may differ from CONVERTED's: all trained ones, and what carries the latent's gain."""
    stock = {n.replace(".base_layer.", ".") for n, _ in model.named_parameters() if "lora_" not in n}
    ends = tuple(f"self_attn.{p}.weight" for p in ("q_proj", "kv_a_proj_with_mqa", "kv_b_proj", "o_proj"))
    norms = {n.replace("kv_b_proj", "kv_a_layernorm") for n in stock if n.endswith("self_attn.kv_b_proj.weight")}
    return norms | {n for n in stock if train == "all" or n.endswith(ends)}


def _files(
    outcome: Outcome, converted: Checkpoint, record: dict[str, Any], work: Path, done: Exported
) -> tuple[dict[str, str], list[Path]]:
    recipe = outcome.recipe
    finetune = {
        "recipe": recipe.to_dict(),
        "processes": outcome.processes,
        "tokens": recipe.steps * recipe.batch_size * recipe.window,
        "text_sha256": outcome.text_sha256,
        "start": converted.hashes(),
        "held_out_kl": {"before": outcome.kl_before, "after": outcome.kl_after, "step": outcome.best_step},
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
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=(7, 4))
    for key, label, style in (("loss", "training loss", "-"), ("eval_kl", "held-out KL to the source", "o-")):
        points = [(entry["step"], entry[key]) for entry in curve if key in entry]
        axes.plot(*zip(*points, strict=True), style, label=label, linewidth=1, markersize=4)
    axes.set_xlabel("optimiser steps")
    axes.set_ylabel("nats per token")
    axes.set_ylim(bottom=0)
    axes.legend()
    axes.grid(alpha=0.3)
    figure.tight_layout()
    figure.savefig(path, dpi=120)
    plt.close(figure)
