"""finetune: distil the source into a converted checkpoint, and write the result as a folder of the same format.

Everything unfinished lives in OUT.training (checkpoints, the best tensors so far, cached logits); the same call
continues from there after a kill. It is deleted once OUT is written.
"""

from __future__ import annotations

import importlib.util
import json
import logging
import os
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from accelerate.utils import parse_flag_from_env
from torch import Tensor
from transformers import PrinterCallback, TrainingArguments

from mla_convert.calibration.texts import check_ids
from mla_convert.errors import BadOption, MlaConvertError
from mla_convert.formats.native import is_native
from mla_convert.formats.stock import residual_scale
from mla_convert.interface.finetune_recipe import FinetuneRecipe
from mla_convert.interface.report import progress, write_json
from mla_convert.output.record import check_source, read_record
from mla_convert.source.checkpoint import Checkpoint
from mla_convert.source.features import EXACT
from mla_convert.source.loading import load_model, load_tokenizer, resolve_device, resolve_dtype
from mla_convert.training.distill import LossWeights
from mla_convert.training.healing import compute_dtype
from mla_convert.training.teacher import CachedTeacher, LiveTeacher, write_cache
from mla_convert.training.train_data import TrainingText, read_training_text
from mla_convert.training.train_export import Exported, Outcome, export, writer_of
from mla_convert.training.train_form import choose_trained, open_latent, unit_latent
from mla_convert.training.train_model import Student
from mla_convert.training.trainer import (
    BEST,
    DistillTrainer,
    JudgeAtEnd,
    ShowProgress,
    StopOnSigterm,
    last_checkpoint,
    read_best,
)

logger = logging.getLogger(__name__)

WARM_UP = 20  # one step in so many is warm-up
CLIP = 1.0  # norm of the gradient, nats per unit of weight
GAUGE_WINDOWS = 4
MACHINE_OPTIONS = ("device", "tensorboard", "overwrite", "data", "eval_data")  # may change between kill and resume


@dataclass(frozen=True)
class FinetuneResult:
    """What training did: held-out KL to the source and cross-entropy (nats per token) before and after, at the step
    that won.

    curve: {"step", "loss"} and {"step", "eval_kl", "eval_ce", "eval_loss"} entries. max_difference: of logits on
    export, relative to the largest; None but in the main process.
    """

    out: str
    tokens: int
    kl_before: float
    kl_after: float
    ce_before: float
    ce_after: float
    best_step: int
    max_difference: float | None
    curve: tuple[dict[str, float], ...]


def finetune(recipe: FinetuneRecipe) -> FinetuneResult:
    """Train recipe.converted towards recipe.source and write recipe.out. Raises MlaConvertError, OUT untouched then.

    Under `accelerate launch` or torchrun every process calls this; the main one writes.
    """
    if os.environ.get("RANK", "0") != "0":
        logging.getLogger("mla_convert").setLevel(logging.WARNING)  # the main process speaks for all
    source, converted = Checkpoint.open(recipe.source), Checkpoint.open(recipe.converted)
    record = _read_record(recipe, source)
    writer = writer_of(recipe, converted)
    tokenizer = load_tokenizer(recipe.converted)
    text = read_training_text(recipe, tokenizer)
    check_ids(text.windows, converted.config["vocab_size"], recipe.converted)
    work = Path(f"{Path(recipe.out).expanduser().resolve()}.training")
    args = training_arguments(recipe, work)
    if args.process_index == 0:
        _claim(work, recipe, record, text)
    _barrier(args)
    scale = 1.0 if is_native(converted.config) else residual_scale(float(source.config["rms_norm_eps"]))
    trainer = _trainer(recipe, args, text, scale)
    checkpoint = last_checkpoint(work)
    if checkpoint is not None:
        logger.info("continuing from %s", checkpoint)
    trainer.args.eval_on_start = checkpoint is None
    trainer.train(resume_from_checkpoint=str(checkpoint) if checkpoint else None)
    if trainer.state.global_step < recipe.steps:
        raise MlaConvertError(
            f"stopped by a signal after step {trainer.state.global_step} of {recipe.steps}; the state is in {work}, "
            "and the same command continues from there"
        )
    curve, judge = _curve(trainer), text.held_out[:1]
    del trainer
    step, _ = read_best(work / BEST)
    judged = {int(entry["step"]): entry for entry in curve if "eval_kl" in entry}
    before, after = judged[min(judged)], judged[step]
    outcome = Outcome(recipe, args.world_size, text.sha256, curve, before, after)
    done: Exported | None = None
    if args.process_index == 0:
        done = export(outcome, writer, converted, record, work, judge, resolve_device(recipe.device))
    _barrier(args)
    if args.process_index == 0:
        shutil.rmtree(work, ignore_errors=True)
    seen = recipe.steps * recipe.batch_size * recipe.window
    return FinetuneResult(
        recipe.out, seen, before["eval_kl"], after["eval_kl"], before["eval_ce"], after["eval_ce"], step,
        done.max_difference if done else None, tuple(curve),
    )  # fmt: skip


def training_arguments(recipe: FinetuneRecipe, work: Path) -> TrainingArguments:
    """The recipe in transformers' words. Raises BadOption for processes that do not divide the batch, Muon in FSDP."""
    if ":" in recipe.device:
        raise BadOption(f"device={recipe.device}: training takes cpu or cuda; choose the GPU by CUDA_VISIBLE_DEVICES")
    device = resolve_device(recipe.device)
    compute = compute_dtype(device) if recipe.dtype == "auto" else resolve_dtype(recipe.dtype)
    processes = int(os.environ.get("WORLD_SIZE", "1"))
    if recipe.batch_size % (recipe.micro_batch * processes):
        raise BadOption(
            f"batch_size={recipe.batch_size} is no multiple of micro_batch x processes = {recipe.micro_batch} x "
            f"{processes}; change one of them"
        )
    if recipe.optimizer == "muon" and parse_flag_from_env("ACCELERATE_USE_FSDP"):  # set by `accelerate launch`
        raise BadOption(
            "optimizer=muon needs whole matrices and FSDP shards them; use --optimizer adamw, or a config of "
            "accelerate without FSDP"
        )
    if recipe.tensorboard and importlib.util.find_spec("tensorboard") is None:
        raise BadOption(f"tensorboard={recipe.tensorboard} needs the package tensorboard; install it or leave it out")
    if recipe.tensorboard:
        os.environ["TENSORBOARD_LOGGING_DIR"] = recipe.tensorboard
    args = TrainingArguments(
        output_dir=str(work),
        max_steps=recipe.steps,
        per_device_train_batch_size=recipe.micro_batch,
        gradient_accumulation_steps=recipe.batch_size // (recipe.micro_batch * processes),
        learning_rate=recipe.learning_rate,
        lr_scheduler_type="cosine",
        warmup_steps=max(1, recipe.steps // WARM_UP),
        max_grad_norm=CLIP,
        bf16=compute == torch.bfloat16,
        use_cpu=device.type == "cpu",
        seed=recipe.seed,
        logging_steps=1,
        logging_nan_inf_filter=False,
        eval_strategy="steps",
        eval_steps=recipe.eval_every,
        save_strategy="steps",
        save_steps=recipe.eval_every,
        save_total_limit=2,
        report_to=["tensorboard"] if recipe.tensorboard else [],
        disable_tqdm=True,
        remove_unused_columns=False,
        ddp_find_unused_parameters=False,
        dataloader_pin_memory=False,
    )
    if processes == 1:
        args._n_gpu = min(args.n_gpu, 1)  # several GPUs in one process would mean DataParallel
    return args


def _trainer(recipe: FinetuneRecipe, args: TrainingArguments, text: TrainingText, scale: float) -> DistillTrainer:
    compute = torch.bfloat16 if args.bf16 else torch.float32
    device = torch.device(args.device)
    stored = compute if device.type == "cuda" else torch.float32
    source = load_model(recipe.source, stored, device)
    source.set_attn_implementation(EXACT)  # as the student's: no kernel of its own to tell the two apart
    live = LiveTeacher(source, compute, recipe.hidden_weight > 0)
    judges = [{key: value.cpu() for key, value in live(ids[None]).items() if key == "hidden"} for ids in text.held_out]
    teacher: Any = live
    teacher_head = live.head.to(compute)  # cast once, not at every block of logits
    if recipe.cache_logits:
        cache = Path(str(args.output_dir), "logits")
        if args.process_index == 0:
            with progress("running the source", "tokens", len(set(text.order)) * recipe.window) as advance:
                write_cache(live, text.windows, text.order, recipe.cache_logits, recipe.temperature, cache, advance)
        _barrier(args)
        teacher = CachedTeacher(cache, device)
        del live
    model = prepared(recipe, device, text.windows)
    if recipe.gradient_checkpointing:
        # renamed in transformers 5.24; older releases know only the old name
        newer = getattr(model, "activation_checkpointing_enable", None)
        (newer or model.gradient_checkpointing_enable)({"use_reentrant": False})
    weights = LossWeights(recipe.kd_weight, recipe.temperature, recipe.hidden_weight)
    student = Student(model, teacher_head, weights, scale)
    trainer = DistillTrainer(student, args, text, teacher, judges, recipe.train != "lora", recipe.optimizer)
    trainer.remove_callback(PrinterCallback)  # ShowProgress says it
    trainer.add_callback(JudgeAtEnd())
    trainer.add_callback(StopOnSigterm())
    trainer.add_callback(ShowProgress(recipe.batch_size * recipe.window))
    return trainer


def prepared(recipe: FinetuneRecipe, device: torch.device, windows: Tensor) -> Any:
    """The converted model in fp32, its latent norm open, adapters in, requires_grad set."""
    model = load_model(recipe.converted, torch.float32, device)
    model.set_attn_implementation(EXACT)  # whose fused kernel takes keys wider than values
    open_latent(model)
    if recipe.train != "lora":  # adapters are added to the matrices as they were written
        unit_latent(model, windows[:GAUGE_WINDOWS])
    choose_trained(model, recipe.train, recipe.lora_rank, recipe.seed)
    return model


def _read_record(recipe: FinetuneRecipe, source: Checkpoint) -> dict[str, Any]:
    """conversion.json of CONVERTED. Raises BadCheckpoint or BadOption if it is no conversion of SOURCE to train."""
    record = read_record(recipe.converted, source=recipe.source)
    if record.get("lossless"):
        raise BadOption(f"{recipe.converted} is lossless: it has nothing to win back; convert to a smaller cache first")
    check_source(recipe.converted, record, source)
    return record


def _claim(work: Path, recipe: FinetuneRecipe, record: dict[str, Any], text: TrainingText) -> None:
    """Make OUT.training this run's own. Raises BadOption if it holds a run with other options."""
    mine = {key: value for key, value in recipe.to_dict().items() if key not in MACHINE_OPTIONS}
    mine |= {
        "text": text.sha256,
        "order": text.order_sha256,
        "weights_of": record["source"]["hashes"],
        "start": _config_stamp(recipe),
    }
    file = work / "settings.json"
    if file.is_file():
        theirs = json.loads(file.read_text(encoding="utf-8"))
        for key in mine:
            if theirs.get(key) != mine[key]:
                raise BadOption(
                    f"{work} holds an unfinished run with {key}={theirs.get(key)}, now {key}={mine[key]}; delete that "
                    "folder, or call with the same options to continue it"
                )
        return
    if work.exists() and any(work.iterdir()):
        raise BadOption(f"{work} is not empty and holds no run of mla-convert; choose another OUT")
    work.mkdir(parents=True, exist_ok=True)
    write_json(mine, file)


def _config_stamp(recipe: FinetuneRecipe) -> dict[str, str]:
    return Checkpoint.open(recipe.converted).hashes()


def _curve(trainer: DistillTrainer) -> list[dict[str, float]]:
    keys = ("step", "loss", "grad_norm", "learning_rate", "eval_kl", "eval_ce", "eval_loss")
    history = (e for e in trainer.state.log_history if "loss" in e or "eval_kl" in e)
    return [{key: entry[key] for key in keys if key in entry} for entry in history]


def _barrier(args: TrainingArguments) -> None:
    if args.world_size > 1:
        torch.distributed.barrier()
