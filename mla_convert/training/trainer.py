"""The training loop: transformers' Trainer with the distillation loss, held-out judging, and what survives a kill."""

from __future__ import annotations

import json
import logging
import math
import os
import shutil
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor, nn
from transformers import Trainer, TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from mla_convert.errors import MlaConvertError
from mla_convert.interface.report import quiet
from mla_convert.training.muon import Muon
from mla_convert.training.train_data import TrainingText, WindowDataset
from mla_convert.training.train_form import biases
from mla_convert.training.train_model import Student

logger = logging.getLogger(__name__)

BEST = "best.safetensors"
BETAS = (0.9, 0.98)
CHECKPOINT_FILES = ("trainer_state.json", "scheduler.pt")  # the Trainer writes the state last


class DistillTrainer(Trainer):
    """`teacher(ids, index)` gives what Student.forward takes; `judges` the same for each held-out window."""

    def __init__(
        self,
        student: Student,
        args: TrainingArguments,
        text: TrainingText,
        teacher: Callable[[Tensor, Tensor], dict[str, Tensor]],
        judges: list[dict[str, Tensor]],
        relative: bool,
        optimizer: str = "adamw",
    ):
        self.student, self.teacher, self.judges, self.text = student, teacher, judges, text
        self.method = optimizer
        trained = {name: p for name, p in student.named_parameters() if p.requires_grad}
        # A step relative to the size of what it changes; measured before anything is sharded.
        self.rates = {
            name: (p.detach().square().mean().sqrt().item() or 1.0) if relative else 1.0 for name, p in trained.items()
        }
        # Checkpoints hold what changes: a tenth of the model by default, and never a tied embedding under two names.
        self.changing = trained.keys() | {f"model.{name}" for name in biases(student.model)}  # which are carried along
        student._keys_to_ignore_on_save = sorted(student.state_dict().keys() - self.changing)
        super().__init__(
            model=student,
            args=args,
            train_dataset=WindowDataset(text),
            eval_dataset=[{"input_ids": ids} for ids in text.held_out],
            data_collator=_stack,
        )
        self.model_accepts_loss_kwargs = False  # windows have one length, so a mean of means is the mean

    def create_optimizer(self, model: nn.Module | None = None) -> torch.optim.Optimizer:
        """AdamW or Muon without decay, one group per matrix."""
        if self.optimizer is None:
            groups = [
                {"params": [p], "lr": self.args.learning_rate * self.rates[_plain(name)]}
                for name, p in (model or self.student).named_parameters()
                if p.requires_grad
            ]
            if self.method == "muon":
                compute = torch.bfloat16 if self.args.bf16 else torch.float32
                self.optimizer = Muon(groups, self.args.learning_rate, compute=compute)
            else:
                self.optimizer = torch.optim.AdamW(groups, lr=self.args.learning_rate, betas=BETAS, weight_decay=0.0)
        return self.optimizer

    def _save(self, output_dir: str | None = None, state_dict: Any = None) -> None:
        whole = self.student.state_dict() if state_dict is None else state_dict
        super()._save(output_dir, {name: tensor for name, tensor in whole.items() if name in self.changing})

    def _get_train_sampler(self, train_dataset: Any = None) -> torch.utils.data.Sampler[int]:
        return torch.utils.data.SequentialSampler(self.text.order)  # the order is drawn in train_data

    def compute_loss(
        self, model: nn.Module, inputs: dict[str, Tensor], return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any:
        """Loss of one micro-batch."""
        ids = inputs["input_ids"]
        out = model(input_ids=ids, teacher=self.teacher(ids, inputs["index"].cpu()))
        return (out["loss"], out) if return_outputs else out["loss"]

    @torch.no_grad()
    def evaluate(self, *args: Any, **kwargs: Any) -> dict[str, float]:
        """On the held-out windows, nats per token: KL(source || model) at temperature 1, cross-entropy, and the mixture
        of both that is trained, which decides the best step.
        """
        model = self.model_wrapped
        was_training = model.training
        model.eval()
        sums = torch.zeros(2)
        for ids, teacher in zip(self.text.held_out, self.judges, strict=True):
            here = {key: value.to(self.args.device) for key, value in teacher.items()}
            with self.compute_loss_context_manager(), self.accelerator.autocast():
                out = model(input_ids=ids[None].to(self.args.device), teacher=here, judge=True)
            sums += torch.stack([out["kl"], out["ce"]]).cpu()
        model.train(was_training)
        held_kl, held_ce = (sums / len(self.judges)).tolist()
        kd = self.student.weights.kd
        held_loss = kd * held_kl + (1 - kd) * held_ce
        metrics = {"eval_kl": held_kl, "eval_ce": held_ce, "eval_loss": held_loss}
        self.log(dict(metrics))
        self.keep_if_best(held_loss)
        self.control = self.callback_handler.on_evaluate(self.args, self.state, self.control, metrics)
        return metrics

    def keep_if_best(self, held_loss: float) -> None:
        """Write the trained tensors to best.safetensors if `held_loss` is the lowest so far (NaN is not)."""
        path = Path(str(self.args.output_dir), BEST)
        better = torch.zeros(1, device=self.args.device)
        if self.is_world_process_zero():
            better.fill_(not path.exists() or held_loss < read_best(path)[1])
        if self.args.world_size > 1:  # the main process decides: gathering shards takes all of them
            torch.distributed.broadcast(better, src=0)
        if not better.item():
            return
        tensors = {}
        for name, parameter in self.student.named_parameters():
            if _plain(name) in self.changing:
                whole = parameter.full_tensor() if hasattr(parameter, "full_tensor") else parameter  # FSDP2 shards
                tensors[_plain(name)] = whole.detach().cpu().contiguous()
        if self.is_world_process_zero():
            half = path.with_suffix(".partial")
            save_file(tensors, half, metadata={"step": str(self.state.global_step), "loss": repr(held_loss)})
            os.replace(half, path)
        self.accelerator.wait_for_everyone()


def read_best(path: Path) -> tuple[int, float]:
    """Step and held-out loss of a best.safetensors."""
    with safe_open(str(path), framework="pt") as file:
        metadata = file.metadata()
    return int(metadata["step"]), float(metadata["loss"])


def _stack(items: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    return {key: torch.stack([item[key] for item in items]) for key in items[0]}


def _plain(name: str) -> str:
    # Names without what wrappers put before them.
    for prefix in ("module.", "_orig_mod."):
        name = name.removeprefix(prefix)
    return name


def last_checkpoint(work: Path) -> Path | None:
    """The newest whole checkpoint; one that a killed run left half-written is deleted (by the main process)."""
    found = sorted(work.glob("checkpoint-*"), key=lambda p: int(p.name.rpartition("-")[2]), reverse=True)
    for folder in found:
        try:
            state = json.loads((folder / "trainer_state.json").read_text(encoding="utf-8"))
            if all((folder / name).is_file() for name in CHECKPOINT_FILES) and "global_step" in state:
                return folder
        except (OSError, ValueError):
            pass
        if os.environ.get("RANK", "0") == "0":
            logger.warning("%s is incomplete and is deleted", folder)
            shutil.rmtree(folder, ignore_errors=True)
    return None


class JudgeAtEnd(TrainerCallback):
    """The last step is judged too, whatever the interval."""

    def on_step_end(self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Ask for it."""
        if state.global_step >= state.max_steps:
            control.should_evaluate = True


class StopOnSigterm(TrainerCallback):
    """SIGTERM: finish the step, save a checkpoint, stop. All processes stop at the same step."""

    def __init__(self) -> None:
        self.asked = False
        self._previous: Any = None

    def on_train_begin(self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Take the signal over (only a main thread can)."""
        if threading.current_thread() is threading.main_thread():
            self._previous = signal.signal(signal.SIGTERM, self._ask)

    def _ask(self, number: int, frame: Any) -> None:
        self.asked = True

    def on_step_end(self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Ask for a checkpoint and the end if any process was told to stop."""
        asked = torch.tensor(int(self.asked), device=args.device)
        if args.world_size > 1:
            torch.distributed.all_reduce(asked, torch.distributed.ReduceOp.MAX)
        if asked.item():
            control.should_save = control.should_training_stop = True

    def on_train_end(self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Give the signal back."""
        if self._previous is not None:
            signal.signal(signal.SIGTERM, self._previous)


class ShowProgress(TrainerCallback):
    """A bar on stderr with tokens/s, loss and held-out KL; main process only."""

    def __init__(self, tokens_per_step: int):
        self.per_step = tokens_per_step
        self.loss, self.held_out = "", ""
        self.started, self.first_step = 0.0, 0
        self.bar = Progress(
            TextColumn("fine-tuning"), BarColumn(bar_width=None), TextColumn("{task.completed}/{task.total} steps"),
            TextColumn("{task.description}"), TimeRemainingColumn(), console=Console(stderr=True), disable=quiet(),
        )  # fmt: skip
        self.task: Any = None

    def on_train_begin(self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Start the bar at the step the run resumes from."""
        self.started, self.first_step = time.monotonic(), state.global_step
        if state.is_world_process_zero:
            self.bar.start()
            self.task = self.bar.add_task("", total=state.max_steps, completed=state.global_step)

    def on_log(self, args: Any, state: TrainerState, control: TrainerControl, logs: Any = None, **kwargs: Any) -> None:
        """Show the newest loss or held-out KL. Raises MlaConvertError where it is NaN or infinite."""
        logs = logs or {}
        if not all(math.isfinite(logs.get(key, 0.0)) for key in ("loss", "eval_kl")):
            raise MlaConvertError(
                f"the loss is no longer finite at step {state.global_step}: delete {args.output_dir} and start again "
                f"with a smaller --learning-rate than {args.learning_rate}"
            )
        if "loss" in logs:
            self.loss = f"loss {logs['loss']:.4f}"
        if "eval_kl" in logs:
            self.held_out = f"held-out KL {logs['eval_kl']:.4f}, cross-entropy {logs['eval_ce']:.4f}"
            if state.is_world_process_zero:
                logger.info("step %d: %s nats per token", state.global_step, self.held_out)
        if self.task is not None:
            done = (state.global_step - self.first_step) * self.per_step
            speed = done / max(time.monotonic() - self.started, 1e-9)
            text = f"{speed:,.0f} tokens/s {self.loss} {self.held_out}"
            self.bar.update(self.task, completed=state.global_step, description=text)

    def on_train_end(self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Close the bar."""
        self.bar.stop()
