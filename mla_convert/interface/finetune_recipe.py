"""The recipe of `mla-convert finetune`: its dataclass is the YAML file, the command line and the Python call."""

import re
from dataclasses import dataclass

from mla_convert.errors import BadOption
from mla_convert.interface.options import Recipe, option
from mla_convert.interface.recipe import _check_apart

_WEIGHT = re.compile(r"(?P<name>.+):(?P<weight>\d+\.\d+)")


@dataclass(frozen=True)
class FinetuneRecipe(Recipe):
    """Options of `mla-convert finetune`."""

    source: str = option("Source checkpoint, the teacher: folder, .gguf file or hub id.", argument="SOURCE")
    converted: str = option("Folder that `convert` wrote from it, the start.", argument="CONVERTED")
    out: str = option("Folder to write the fine-tuned checkpoint to; checkpoints go to OUT.training meanwhile.")
    data: tuple[str, ...] = option(
        ".txt, .jsonl (field text) or .parquet (column text) file, or a `datasets` name (or name:config:split); "
        "repeatable. A decimal at the end is a weight: code.txt:2.0 is seen twice as often. "
        "Without it: Python's own pydoc_data.topics, the calibration part.",
        (),
    )
    eval_data: tuple[str, ...] = option(
        "Texts that judge, named like --data; without it the last windows of every text of --data are held out.", ()
    )
    train: str = option(
        "What is trained: attention (the latent projections and W_O of converted layers, and q, k, v where those feed "
        "the latent), layers (every matrix of every layer, MLPs and experts too), all (norms, embeddings and head "
        "too) or lora (adapters on the projections of attention, merged at the end).",
        "attention",
        choices=("attention", "layers", "all", "lora"),
    )
    tokens: int = option("Tokens seen, repetitions counted.", 1_000_000, at_least=2)
    window: int = option("Window length, tokens; texts are packed, nothing is padded.", 1024, at_least=2)
    batch_size: int = option("Windows per optimiser step, over all processes.", 4, at_least=1)
    micro_batch: int = option("Windows per forward pass of one process; the rest is accumulated.", 1, at_least=1)
    optimizer: str = option(
        "adamw, or muon: orthogonalised momentum, for --train attention or layers; its steps take longer and win more "
        "where MLPs are trained. Not under FSDP.",
        "adamw",
        choices=("adamw", "muon"),
    )
    learning_rate: float = option(
        "Peak step size, relative to the rms of each matrix (of lora adapters: absolute). With muon try 0.002.", 5e-4
    )
    kd_weight: float = option(
        "Loss = kd_weight * T^2 KL(source || model) at temperature T + (1 - kd_weight) * cross-entropy, 0 to 1.", 1.0
    )
    temperature: float = option("Temperature T of that KL, above 0.", 1.0)
    hidden_weight: float = option(
        "Weight of the squared error of every layer's output, relative to the source's own square.", 0.0
    )
    cache_logits: int = option(
        "Write the source's K largest logits of every token to disk first and free the source; the rest of its "
        "probability is one class. 0: run the source on the fly.",
        0,
        at_least=0,
    )
    lora_rank: int = option("Rank of the adapters of --train lora.", 16, at_least=1)
    held_out: int = option("Windows that judge.", 8, at_least=1)
    eval_every: int = option("Optimiser steps between held-out measurements and checkpoints.", 25, at_least=1)
    gradient_checkpointing: bool = option("Recompute activations in the backward pass: less memory, slower.", False)
    dtype: str = option(
        "Type of the products: auto (bfloat16 where it is fast), float32 or bfloat16; weights are float32.",
        "auto",
        choices=("auto", "float32", "bfloat16"),
    )
    device: str = option("Where to compute: auto (a GPU if there is one), cpu or cuda.", "auto")
    tensorboard: str | None = option("Also log to this folder for tensorboard (package tensorboard).", None)
    overwrite: bool = option("Replace OUT if it exists and is not empty.", False)
    seed: int = option("Seed of the order of the windows and of the adapters.", 0, at_least=0)

    def validate(self) -> None:
        """Check ranges, and that OUT cannot destroy what is read. Raises BadOption."""
        _check_apart(self.source, self.out)
        _check_apart(self.converted, self.out)
        if not self.learning_rate > 0:
            raise BadOption(f"learning_rate={self.learning_rate} must be above 0, e.g. 0.001")
        if self.optimizer == "muon" and self.train not in ("attention", "layers"):
            raise BadOption(
                f"optimizer=muon moves matrices, and train={self.train} has other parameters too; use --train "
                "attention or layers, or --optimizer adamw"
            )
        if not 0 <= self.kd_weight <= 1:
            raise BadOption(f"kd_weight={self.kd_weight} must be from 0 to 1; 1 is KL alone, 0 cross-entropy alone")
        if not self.temperature > 0:
            raise BadOption(f"temperature={self.temperature} must be above 0; 1 is the source's own distribution")
        if not self.hidden_weight >= 0:
            raise BadOption(f"hidden_weight={self.hidden_weight} must be 0 or more")
        if self.hidden_weight and self.cache_logits:
            raise BadOption(
                f"hidden_weight={self.hidden_weight} needs the source's hidden states, which cache_logits="
                f"{self.cache_logits} does not keep; leave one out"
            )
        if self.batch_size % self.micro_batch:
            raise BadOption(f"batch_size={self.batch_size} is no multiple of micro_batch={self.micro_batch}")
        if self.tokens < self.batch_size * self.window:
            raise BadOption(
                f"tokens={self.tokens} is less than one step of batch_size x window = "
                f"{self.batch_size * self.window}; give more tokens or make the step smaller"
            )
        for name in self.data:
            weighted(name)

    @property
    def steps(self) -> int:
        """Optimiser steps."""
        return self.tokens // (self.batch_size * self.window)


def weighted(name: str) -> tuple[str, float]:
    """("code.txt", 2.0) for "code.txt:2.0"; weight 1 where none is given. Raises BadOption for weight 0."""
    match = _WEIGHT.fullmatch(name)
    if match is None:
        return name, 1.0
    weight = float(match["weight"])
    if weight <= 0:
        raise BadOption(f"data {name!r} has weight {weight}; leave the text out or give a weight above 0")
    return match["name"], weight
