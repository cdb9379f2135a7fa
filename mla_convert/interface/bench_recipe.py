"""The recipe of `bench`: models or a shape, context lengths, batch sizes."""

import re
from dataclasses import dataclass

from mla_convert.errors import BadOption
from mla_convert.interface.options import Recipe, option

_COUNT = re.compile(r"(\d+)(k?)", re.IGNORECASE)
_BYTES = re.compile(r"(\d+(?:\.\d+)?)\s*([kmgt]?)i?b?", re.IGNORECASE)


@dataclass(frozen=True)
class BenchRecipe(Recipe):
    """Options of `mla-convert bench`."""

    models: tuple[str, ...] = option(
        "Checkpoints to time: folders, .gguf files or hub ids; a converted one is timed expanded and absorbed.",
        (),
        argument="MODEL",
    )
    shape: str | None = option(
        "Random weights instead of, or beside, MODEL: llama3-8b, or a folder with the config.json of a Llama-like "
        "model; timed as it is and converted.",
        None,
    )
    layers: int | None = option("Layers of the random model; by default the shape's.", None, at_least=1)
    vocab_size: int | None = option("Vocabulary of the random model; by default the shape's.", None, at_least=2)
    kv_lora_rank: int | None = option(
        "Latent size of the converted random model, numbers per token and layer.", None, at_least=1
    )
    qk_rope_head_dim: int | None = option(
        "Rotating key size of the converted random model (even), numbers per token and layer.", None, at_least=2
    )
    context: str = option("Cached tokens to decode behind, joined by commas; k is 1,024.", "1k,4k,16k")
    batch: str = option("Sequences at once, joined by commas.", "1")
    new_tokens: int = option("Decoded tokens per repetition.", 16, at_least=1)
    repeats: int = option("Repetitions; the variants take turns in each, and medians are reported.", 5, at_least=1)
    prefill: int = option("Longest context whose prefill is timed too (batch 1), tokens; 0: none.", 1024, at_least=0)
    memory: str | None = option(
        "Memory for which the largest batch is worked out, e.g. 80GiB; by default the device's.", None
    )
    cache_dtype: str = option(
        "Also time the absorbed variant with latents kept in one byte: int8 or fp8 (e4m3), one scale per token.",
        "auto",
        choices=("auto", "int8", "fp8"),
    )
    dtype: str = option("Compute type: float32 or bfloat16.", "float32", choices=("float32", "bfloat16"))
    device: str = option("Where to compute: auto (a GPU if there is one), cpu, cuda or cuda:N.", "auto")
    seed: int = option("Seed of random weights and cache contents.", 0, at_least=0)
    json: str | None = option("Also write the figures to this JSON file.", None)
    plot: str | None = option("Also draw tokens/s and cache memory against context into this PNG file.", None)

    def validate(self) -> None:
        """Check that there is something to time and that lengths and sizes can be read. Raises BadOption."""
        if not self.models and self.shape is None:
            raise BadOption("nothing to time: name a MODEL, or give --shape llama3-8b for random weights")
        ranks = (self.kv_lora_rank, self.qk_rope_head_dim)
        if (self.shape is not None) != (ranks[0] is not None) or (ranks[0] is None) != (ranks[1] is None):
            raise BadOption(
                f"shape={self.shape}, kv_lora_rank={ranks[0]}, qk_rope_head_dim={ranks[1]}: a shape is converted to "
                "both ranks, checkpoints have their own; give all three, e.g. "
                "--kv-lora-rank 512 --qk-rope-head-dim 64, or none"
            )
        if ranks[1] is not None and ranks[1] % 2:
            raise BadOption(f"qk_rope_head_dim={self.qk_rope_head_dim} is odd, but dimensions rotate in pairs")
        counts("context", self.context)
        counts("batch", self.batch)
        if self.memory is not None:
            size_in_bytes(self.memory)


def counts(name: str, text: str) -> tuple[int, ...]:
    """ "1k,8k" -> (1024, 8192). Raises BadOption naming the part that is no whole number of 1 or more."""
    found = []
    for part in text.split(","):
        match = _COUNT.fullmatch(part.strip())
        if match is None or int(match[1]) == 0:
            raise BadOption(f"{name}={text!r}: {part.strip()!r} is no whole number of 1 or more; write e.g. 1k,8k,32k")
        found.append(int(match[1]) * (1024 if match[2] else 1))
    return tuple(dict.fromkeys(found))


def size_in_bytes(text: str) -> int:
    """ "80GiB", "80G" or "1.5 TB" -> bytes; all units are powers of 1,024. Raises BadOption."""
    match = _BYTES.fullmatch(text.strip())
    if match is None or float(match[1]) == 0:
        raise BadOption(f"memory={text!r} is no size; write e.g. 80GiB")
    return int(float(match[1]) * 1024 ** " kmgt".index(match[2].lower() or " "))
