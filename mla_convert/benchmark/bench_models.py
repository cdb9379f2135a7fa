"""What `bench` times: loaded checkpoints and random models of a shape, and the counts that bound them."""

import json
import logging
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, DeepseekV3Config, DynamicCache, LlamaConfig, PreTrainedConfig

from mla_convert.errors import BadOption, UnsupportedSource
from mla_convert.interface.bench_recipe import BenchRecipe
from mla_convert.source.loading import check_models, load_model

logger = logging.getLogger(__name__)

# config.json values of published shapes.
SHAPES: dict[str, dict[str, Any]] = {
    "llama3-8b": {
        "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32, "num_attention_heads": 32,
        "num_key_value_heads": 8, "vocab_size": 128256, "rms_norm_eps": 1e-5, "max_position_embeddings": 131072,
        "rope_parameters": {"rope_type": "default", "rope_theta": 500000.0},
    },
}  # fmt: skip


@dataclass(frozen=True)
class Sizes:
    """Per layer: what one sequence caches and computes. `latent` models share one key and value among the heads."""

    rank: int  # of the latent; 0: keys and values are cached
    rope: int  # rotating numbers beside the latent
    layers: int
    num_heads: int
    numbers: int  # cached per token and layer
    multiplications: int  # per query, cached token and layer, all heads
    projected: int  # per query and layer between cache and heads: W_UK and W_UV of a latent model, else 0
    expanded: int  # numbers per token of a layer's keys and values once expanded, else 0
    weight_bytes: int  # of the whole model

    @property
    def latent(self) -> bool:
        """Whether the latent is what is cached."""
        return self.rank > 0

    def cache_bytes(self, tokens: int, itemsize: int) -> int:
        """Bytes of one sequence's cache over all layers."""
        return self.layers * tokens * self.numbers * itemsize


def sizes_of(model: torch.nn.Module) -> Sizes:
    """Count from the config. Raises UnsupportedSource for a config that says neither heads nor latents, and where not
    all layers cache the same of every token.
    """
    config: Any = model.config
    cached = DynamicCache(config=config).layers if isinstance(config, PreTrainedConfig) else []
    if any(getattr(layer, "is_sliding", False) for layer in cached):
        raise UnsupportedSource(
            f"{type(model).__name__}: layers with a sliding window cache a bounded number of tokens; bench takes "
            "models whose layers all cache every token"
        )
    weights = sum(p.nbytes for p in model.parameters())
    heads, layers = config.num_attention_heads, config.num_hidden_layers
    found = _latent_widths(model, config)
    if found is not None:
        rank, rope, nope, value = found
        return Sizes(
            rank, rope, layers, heads, rank + rope, heads * (2 * rank + rope), heads * rank * (nope + value),
            heads * (nope + rope + value), weights,
        )  # fmt: skip
    kv_heads = getattr(config, "num_key_value_heads", None)
    if kv_heads is None:
        raise UnsupportedSource(
            f"{type(model).__name__}: its config has no num_key_value_heads; bench takes Llama-like and DeepSeek models"
        )
    width = _head_dim(config)
    return Sizes(0, 0, layers, heads, 2 * kv_heads * width, 2 * heads * width, 0, 0, weights)


def _head_dim(config: Any) -> int:
    return int(getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads)


def _latent_widths(model: torch.nn.Module, config: Any) -> tuple[int, int, int, int] | None:
    """kv_lora_rank, qk_rope_head_dim, qk_nope_head_dim and v_head_dim of a stock or native config, else None."""
    if getattr(config, "mla", None):
        entries = config.mla["layers"]
        widths = {entry and (entry["kv_lora_rank"], 2 * len(entry["slots"])) for entry in entries}
        if len(widths) > 1:
            raise UnsupportedSource(
                f"{type(model).__name__}: its layers cache different numbers (kept layers, or ranks per layer); bench "
                "takes models whose layers are alike"
            )
        rank, rope = widths.pop()
        return rank, rope, entries[0]["qk_nope_head_dim"], _head_dim(config)
    if getattr(config, "kv_lora_rank", None):
        return config.kv_lora_rank, config.qk_rope_head_dim, config.qk_nope_head_dim, config.v_head_dim
    return None


def named_models(recipe: BenchRecipe, dtype: torch.dtype, device: torch.device) -> list[tuple[str, torch.nn.Module]]:
    """(name, model) of every MODEL and of the shape, source before converted."""
    check_models(recipe.models)
    found: list[tuple[str, torch.nn.Module]]
    found = [(Path(name).name or name, load_model(name, dtype, device)) for name in recipe.models]
    if recipe.shape is not None:
        config = shape_config(recipe)
        label = recipe.shape if recipe.shape in SHAPES else Path(recipe.shape).name
        torch.manual_seed(recipe.seed)
        found.append((f"{label} (random)", _random_model(config, dtype, device)))
        found.append((f"{label} (random, {recipe.kv_lora_rank} + {recipe.qk_rope_head_dim})",
                      _random_model(converted_config(config, recipe), dtype, device)))  # fmt: skip
    return found


def shape_config(recipe: BenchRecipe) -> LlamaConfig:
    """The config of `recipe.shape` with its layers and vocabulary replaced. Raises BadOption for an unknown one."""
    assert recipe.shape is not None
    if recipe.shape in SHAPES:
        config = LlamaConfig(**SHAPES[recipe.shape])
    else:
        path = Path(recipe.shape).expanduser() / "config.json"
        if not path.is_file():
            raise BadOption(f"shape={recipe.shape!r} is neither {' nor '.join(SHAPES)} nor a folder with a config.json")
        if "kv_lora_rank" in json.loads(path.read_text(encoding="utf-8")):
            raise BadOption(
                f"shape={recipe.shape}: already a latent model; name it as MODEL, or give its source's config"
            )
        config = AutoConfig.from_pretrained(path.parent)
    config.num_hidden_layers = recipe.layers or config.num_hidden_layers
    config.vocab_size = recipe.vocab_size or config.vocab_size
    for name in ("bos_token_id", "eos_token_id", "pad_token_id"):  # nothing is generated from these weights
        setattr(config, name, None)
    return config


def converted_config(source: LlamaConfig, recipe: BenchRecipe) -> DeepseekV3Config:
    """The stock config that converting `source` to the recipe's ranks would give."""
    assert recipe.kv_lora_rank is not None and recipe.qk_rope_head_dim is not None
    heads, rope = source.num_attention_heads, source.rope_parameters or {}
    width = _head_dim(source)
    return DeepseekV3Config(
        hidden_size=source.hidden_size, intermediate_size=source.intermediate_size, vocab_size=source.vocab_size,
        num_hidden_layers=source.num_hidden_layers, num_attention_heads=heads, num_key_value_heads=heads,
        q_lora_rank=None, kv_lora_rank=recipe.kv_lora_rank, qk_rope_head_dim=recipe.qk_rope_head_dim,
        qk_nope_head_dim=width, v_head_dim=width, first_k_dense_replace=source.num_hidden_layers,
        rms_norm_eps=1e-6, max_position_embeddings=source.max_position_embeddings,
        rope_parameters={"rope_type": "default", "rope_theta": rope["rope_theta"]},
        bos_token_id=None, eos_token_id=None, pad_token_id=None, tie_word_embeddings=False,
    )  # fmt: skip


def _random_model(config: Any, dtype: torch.dtype, device: torch.device) -> torch.nn.Module:
    with device:
        model: torch.nn.Module = AutoModelForCausalLM.from_config(config, dtype=dtype, attn_implementation="sdpa")
    logger.info("%s: %.2f G parameters", type(model).__name__, sum(p.numel() for p in model.parameters()) / 1e9)
    return model.eval().requires_grad_(False)
