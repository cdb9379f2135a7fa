"""What the tests of finetune share: a text, a short run, and what it wrote."""

import random
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from tiny import edit_json, tiny_model, tiny_tokenizer

import mla_convert
from mla_convert.source.loading import load_tokenizer
from mla_convert.training.finetune import FinetuneResult

WINDOW, STEPS = 32, 12
PROJECTIONS = ("q_proj", "kv_a_proj_with_mqa", "kv_b_proj", "o_proj")  # trained by default
WORDS = ["the", "a", "of", "model", "cache", "latent", "key", "value", "head", "token"]
KEEP = {"gemma3_text": "auto", "qwen2": "1"}  # layers kept as they are
Made = tuple[str, str, str]  # source, conversion, text


def random_text(folder: Path) -> str:
    """A file of 1,200 words."""
    rng = random.Random(0)
    text = folder / "text.txt"
    text.write_text(" ".join(rng.choice(WORDS) for _ in range(1200)))
    return str(text)


def made_in(folder: Path) -> Made:
    """A Llama whose tokenizer has no padding token, its stock conversion, a text."""
    source = tiny_model(folder / "source", num_hidden_layers=2, projection_std=0.15)
    tokenizer = tiny_tokenizer()
    tokenizer.pad_token = None
    tokenizer.save_pretrained(source)
    assert load_tokenizer(source).pad_token is None
    text = random_text(folder)
    size: dict[str, Any] = {"kv_lora_rank": 8, "qk_rope_head_dim": 4}
    data = {"calib_data": (text,), "calib_windows": 8, "window": 128}
    mla_convert.convert(source=str(source), out=str(folder / "converted"), **size, **data)
    return str(source), str(folder / "converted"), text


def native_made_in(folder: Path, family: str, tied: bool = False, **options: Any) -> Made:
    """A tiny model of `family`, its native conversion, a text. tied: head and embedding are one tensor."""
    source = tiny_model(folder / "source", family, projection_std=0.12, tie_word_embeddings=tied)
    if family == "qwen2":
        edit_json(source / "tokenizer_config.json", tokenizer_class="Qwen2Tokenizer")  # as Qwen's checkpoints say
    text = random_text(folder)
    sizes: dict[str, Any] = {"kv_lora_rank": 9, "qk_rope_head_dim": 6, "rope_stride": 1}
    mla_convert.convert(
        source=str(source), out=str(folder / "converted"), calib_data=(text,), calib_windows=8, window=64,
        **sizes | {"format": "native", "keep_layers": KEEP.get(family, "none")} | options,
    )  # fmt: skip
    return str(source), str(folder / "converted"), text


def tune(made: Made, out: Path, **options: Any) -> FinetuneResult:
    """STEPS steps of 4 windows, in fp32."""
    values = {
        "source": made[0], "converted": made[1], "out": str(out), "data": (made[2],), "window": WINDOW,
        "batch_size": 4, "micro_batch": 2, "tokens": STEPS * 4 * WINDOW, "eval_every": 4, "held_out": 4,
        "dtype": "float32", "device": "cpu", "learning_rate": 0.003,
    }  # fmt: skip
    return mla_convert.finetune(**values | options)


def weights(folder: str | Path) -> dict[str, torch.Tensor]:
    """All tensors of a folder."""
    return load_file(Path(folder) / "model.safetensors")
