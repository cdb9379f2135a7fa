"""How many numbers a model caches per token, layer by layer, read from its config."""

from collections.abc import Mapping
from typing import Any


def source_layer_numbers(config: Mapping[str, Any]) -> int:
    """2 x num_key_value_heads x head_dim: what a layer without a latent caches per token."""
    heads = config["num_attention_heads"]
    head_dim = config.get("head_dim") or config["hidden_size"] // heads
    return int(2 * (config.get("num_key_value_heads") or heads) * head_dim)


def layer_numbers(config: Mapping[str, Any]) -> list[int]:
    """Numbers cached per token by every layer: the latent and the rotating keys, or keys and values of all heads."""
    layers = int(config["num_hidden_layers"])
    if config.get("mla"):
        entries = config["mla"]["layers"]
        kept = source_layer_numbers(config)
        return [kept if entry is None else int(entry["kv_lora_rank"] + 2 * len(entry["slots"])) for entry in entries]
    if config.get("kv_lora_rank"):
        return [int(config["kv_lora_rank"] + config["qk_rope_head_dim"])] * layers
    return [source_layer_numbers(config)] * layers
