"""Tiny DeepSeek-V2/V3 models with every option of their attention, made in memory."""

from typing import Any

import torch
from transformers import DeepseekV2Config, DeepseekV3Config
from transformers.models.deepseek_v2.modeling_deepseek_v2 import DeepseekV2ForCausalLM
from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3ForCausalLM

VOCABULARY = 97
YARN = {
    "rope_type": "yarn", "rope_theta": 5000.0, "factor": 4.0, "original_max_position_embeddings": 128,
    "beta_fast": 32, "beta_slow": 1, "mscale": 1.0, "mscale_all_dim": 0.7,
}  # fmt: skip


def tiny_deepseek(version: int = 3, dtype: torch.dtype = torch.float32, seed: int = 0, **options: Any) -> Any:
    """An evaluated model of two dense layers with attention sharp enough that a fault shows; all widths differ."""
    config = {
        "vocab_size": VOCABULARY, "hidden_size": 40, "intermediate_size": 56, "num_hidden_layers": 2,
        "num_attention_heads": 5, "q_lora_rank": None, "kv_lora_rank": 18, "qk_nope_head_dim": 12,
        "qk_rope_head_dim": 6, "v_head_dim": 10, "first_k_dense_replace": 2, "max_position_embeddings": 512,
        "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": None, "attn_implementation": "sdpa", **options,
    }  # fmt: skip
    config["num_key_value_heads"] = config["num_attention_heads"]
    kinds: tuple[Any, Any] = (DeepseekV2Config, DeepseekV2ForCausalLM)
    if version == 3:
        kinds = (DeepseekV3Config, DeepseekV3ForCausalLM)
    gen = torch.Generator().manual_seed(seed)
    model = kinds[1](kinds[0](**config)).eval().to(dtype)
    with torch.no_grad():
        for parameter in model.parameters():
            value = torch.randn(parameter.shape, generator=gen, dtype=torch.float64)
            matrix = parameter.dim() > 1  # norms and biases: far from 1 and 0
            value = value * 1.5 / parameter.shape[-1] ** 0.5 if matrix else 1 + 0.3 * value
            parameter.copy_(value)
    return model


def prompts(batch: int, tokens: int, padded: int = 0) -> dict[str, torch.Tensor]:
    """Token ids and mask; item i is left-padded by `padded` * i tokens."""
    gen = torch.Generator().manual_seed(batch)
    ids = torch.randint(3, VOCABULARY, (batch, tokens), generator=gen)
    mask = torch.ones_like(ids)
    for item in range(batch):
        mask[item, : padded * item] = 0
        ids[item, : padded * item] = 0
    return {"input_ids": ids, "attention_mask": mask}
