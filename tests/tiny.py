"""Tiny random models of every family, and ways to damage them.

All dimensions differ, so that a swapped axis crashes; head_dim is not hidden_size / heads; attention is far
from uniform; rope_theta and rms_norm_eps are not the class defaults, so that a default creeping in is seen.
"""

from __future__ import annotations

import copy
import dataclasses
import json
import pickle
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, decoders, pre_tokenizers
from tokenizers.models import BPE
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    PreTrainedTokenizerFast,
)

WEIGHTS = "model.safetensors"
INDEX = "model.safetensors.index.json"
SPECIALS = ("<pad>", "<s>", "</s>", "<|im_start|>", "<|im_end|>")
VOCAB = 263  # 256 bytes, the specials, and two that no text reaches; prime
CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
DIMENSIONS: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 48,
    "intermediate_size": 56,
    "num_hidden_layers": 4,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 10,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": False,
    "rope_parameters": {"rope_type": "default", "rope_theta": 5000.0},
    "pad_token_id": 256,
    "bos_token_id": 257,
    "eos_token_id": 258,
}
FAMILIES = {
    "llama": (LlamaConfig, LlamaForCausalLM, {}),
    "mistral": (MistralConfig, MistralForCausalLM, {"sliding_window": None}),
}
# Of families that only the native format can hold; what differs from DIMENSIONS.
NATIVE: dict[str, dict[str, Any]] = {
    "qwen2": {"num_attention_heads": 6, "hidden_size": 72},  # heads of 12: this class has no head_dim
    "qwen3": {},
    "ministral": {"sliding_window": 24, "layer_types": ["sliding_attention", "full_attention"] * 2},
    "gemma2": {"sliding_window": 24, "attn_logit_softcapping": 3.0, "query_pre_attn_scalar": 7},
    "gemma3_text": {
        "sliding_window": 24,
        "layer_types": ["sliding_attention", "sliding_attention", "full_attention", "sliding_attention"],
        "query_pre_attn_scalar": 7,
        "rope_parameters": {
            "sliding_attention": {"rope_type": "default", "rope_theta": 700.0},
            "full_attention": {"rope_type": "linear", "rope_theta": 5000.0, "factor": 8.0},
        },
    },
    "phi3": {"hidden_size": 72, "original_max_position_embeddings": 512},
    "olmo2": {"hidden_size": 72},
    "olmo3": {"hidden_size": 72, "sliding_window": 24, "rope_parameters": None},
    "granite": {
        "hidden_size": 72,
        "embedding_multiplier": 1.7,
        "logits_scaling": 3.0,
        "residual_multiplier": 0.7,
        "attention_multiplier": 0.4,
    },
    "glm": {"partial_rotary_factor": 0.6},
    "glm4": {"partial_rotary_factor": 0.6},
    "smollm3": {"hidden_size": 72, "no_rope_layers": [1, 0, 1, 1]},
    "starcoder2": {"hidden_size": 72, "sliding_window": 24},
    "cohere2": {"hidden_size": 72, "sliding_window": 24, "logit_scale": 0.3},
    "mixtral": {"sliding_window": 24, "num_local_experts": 5, "num_experts_per_tok": 2},
    "qwen2_moe": {
        "hidden_size": 72,
        "num_experts": 5,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 40,
        "shared_expert_intermediate_size": 26,
        "mlp_only_layers": [1],
    },
    "qwen3_moe": {"num_experts": 5, "num_experts_per_tok": 2, "moe_intermediate_size": 40, "mlp_only_layers": [1]},
    "gpt_oss": {
        "num_local_experts": 5,
        "num_experts_per_tok": 2,
        "sliding_window": 24,
        "layer_types": ["sliding_attention", "full_attention"] * 2,
        "rope_parameters": {
            "rope_type": "yarn",
            "rope_theta": 5000.0,
            "factor": 8.0,
            "beta_fast": 32.0,
            "beta_slow": 1.0,
            "truncate": False,
            "original_max_position_embeddings": 64,
        },
    },
}
LLAMA3_ROPE: dict[str, Any] = {
    "rope_type": "llama3",
    "rope_theta": 5000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    # Short, so that of five frequencies some are kept, some blended, some stretched.
    "original_max_position_embeddings": 64,
}


def tiny_tokenizer() -> PreTrainedTokenizerFast:
    """Byte-level, one token per byte, specials after them; adds no BOS by itself."""
    symbols = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(BPE(vocab={symbol: i for i, symbol in enumerate(symbols)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(list(SPECIALS))
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token="<pad>",
        bos_token="<s>",
        eos_token="</s>",
        clean_up_tokenization_spaces=False,
    )
    fast.chat_template = CHAT_TEMPLATE
    return fast


def fill(model: torch.nn.Module, seed: int, projection_std: float) -> None:
    """Seeded weights: projections of `projection_std`, norms around one, embeddings of unit variance."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in sorted(model.named_parameters()):
            noise = torch.randn(parameter.shape, generator=generator)
            if "norm" in name:
                parameter.copy_(1 + 0.2 * noise)
            elif "embed_tokens" in name:
                parameter.copy_(noise)
            else:
                parameter.copy_(projection_std * noise)


def tiny_model(
    folder: str | Path,
    family: str = "llama",
    *,
    seed: int = 0,
    dtype: torch.dtype = torch.float32,
    projection_std: float = 0.3,
    max_shard_size: str | int = "1GB",
    tokenizer: bool = True,
    **config_overrides: Any,
) -> Path:
    """Save a tiny model of `family` to `folder`; returns it. `max_shard_size` (e.g. "100KB") makes shards."""
    folder = Path(folder)
    model = tiny_class(family, config_overrides)
    fill(model, seed, projection_std)
    model.generation_config.eos_token_id = [258, 260]
    model.generation_config.do_sample = True
    model.generation_config.temperature = 0.7
    model.to(dtype).save_pretrained(folder, max_shard_size=max_shard_size)
    if tokenizer:
        tiny_tokenizer().save_pretrained(folder)
    return folder


def tiny_class(family: str, overrides: dict[str, Any]) -> Any:
    """A model of `family` with transformers' random weights."""
    base = copy.deepcopy(DIMENSIONS)  # config classes write into the RoPE settings they are given
    if family in FAMILIES:
        config_class, model_class, extra = FAMILIES[family]
        return model_class(config_class(**(base | extra | overrides)))
    dimensions = base | NATIVE[family] | overrides
    fields = {field.name for field in dataclasses.fields(type(AutoConfig.for_model(family)))}
    known = {key: value for key, value in dimensions.items() if key in fields or key in NATIVE[family] | overrides}
    return AutoModelForCausalLM.from_config(AutoConfig.for_model(family, **known), attn_implementation="eager")


def edit_json(path: Path, drop: tuple[str, ...] = (), **changes: Any) -> Path:
    """Change keys of a JSON file in place; returns the path."""
    content = json.loads(path.read_text())
    content = {key: value for key, value in (content | changes).items() if key not in drop}
    path.write_text(json.dumps(content, indent=2))
    return path


def edit_config(folder: Path, drop: tuple[str, ...] = (), **changes: Any) -> Path:
    """Change keys of config.json in place; returns the folder."""
    edit_json(folder / "config.json", drop, **changes)
    return folder


def legacy_rope(folder: Path) -> Path:
    """Rewrite config.json to the older spelling: rope_theta and rope_scaling at top level."""
    rope = dict(json.loads((folder / "config.json").read_text())["rope_parameters"])
    theta = rope.pop("rope_theta")
    scaling = None if rope["rope_type"] == "default" else rope
    return edit_config(folder, ("rope_parameters",), rope_theta=theta, rope_scaling=scaling)


def edit_tensors(folder: Path, **changes: torch.Tensor | None) -> Path:
    """Replace, add, or remove (None) tensors of an unsharded model; `__` stands for a dot in a name."""
    tensors = load_file(folder / WEIGHTS)
    for key, value in changes.items():
        name = key.replace("__", ".")
        if value is None:
            del tensors[name]
        else:
            tensors[name] = value.contiguous()
    save_file(tensors, folder / WEIGHTS, metadata={"format": "pt"})
    return folder


def shards(folder: Path) -> list[Path]:
    """The weight files of a sharded model."""
    return sorted(folder.glob("model-*.safetensors"))


def truncate(path: Path, lost: int = 1000) -> Path:
    """Cut `lost` bytes off the end of a file."""
    path.write_bytes(path.read_bytes()[:-lost])
    return path


def drop_shard(folder: Path) -> Path:
    """Delete the second shard; returns its path."""
    path = shards(folder)[1]
    path.unlink()
    return path


def poison(folder: Path, name: str, value: float = float("nan")) -> Path:
    """Put one NaN (or `value`) into tensor `name` of an unsharded model."""
    tensor = load_file(folder / WEIGHTS)[name].clone()
    tensor.view(-1)[3] = value
    return edit_tensors(folder, **{name.replace(".", "__"): tensor})


def redirect_index(folder: Path, shard: str) -> str:
    """Let the index place its first tensor in `shard`; returns the tensor's name."""
    weight_map = json.loads((folder / INDEX).read_text())["weight_map"]
    name = next(iter(weight_map))
    edit_json(folder / INDEX, weight_map=weight_map | {name: shard})
    return str(name)


class _Bomb:
    def __reduce__(self) -> tuple[Any, ...]:
        raise_on_load = "raise SystemExit('a pickle was loaded')"
        return exec, (raise_on_load,)


def pickle_only(folder: Path) -> Path:
    """Replace the weights by a pickle that ends the process if anyone loads it."""
    (folder / WEIGHTS).unlink()
    (folder / "pytorch_model.bin").write_bytes(pickle.dumps(_Bomb()))
    return folder


def write_gguf(folder: Path, path: Path, *, metadata: dict[str, Any] | None = None, **tensors: Any) -> Path:
    """Write the llama model in `folder` as a float32 GGUF file, as llama.cpp's converter lays it out.

    `metadata` adds keys (str, float or int values); `tensors` adds tensors, or removes them (None), with
    `__` for a dot.
    """
    import gguf

    config = json.loads((folder / "config.json").read_text())
    heads, kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_name("tiny")
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_rope_dimension_count(config["head_dim"])
    writer.add_rope_freq_base(config["rope_parameters"]["rope_theta"])
    writer.add_head_count(heads)
    writer.add_head_count_kv(kv_heads)
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_vocab_size(config["vocab_size"])
    symbols = [*sorted(pre_tokenizers.ByteLevel.alphabet()), *SPECIALS, "\u00fe\u00ff", "<u1>"]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("default")
    writer.add_token_list(symbols)
    writer.add_token_types([1] * 256 + [3] * len(SPECIALS) + [5] * 2)
    writer.add_token_merges(["\u00fe \u00ff"])  # transformers wants one; no UTF-8 text holds bytes FE FF
    writer.add_bos_token_id(257)
    writer.add_eos_token_id(258)
    writer.add_pad_token_id(256)
    for key, value in (metadata or {}).items():
        add = {str: writer.add_string, float: writer.add_float32, int: writer.add_uint32}[type(value)]
        add(key, value)
    extra = {name.replace("__", "."): value for name, value in tensors.items()}
    for name, tensor in load_file(folder / WEIGHTS).items():
        renamed = _gguf_name(name)
        if renamed.endswith(("attn_q.weight", "attn_k.weight")):
            count = heads if renamed.endswith("attn_q.weight") else kv_heads
            half = tensor.shape[0] // count // 2
            tensor = tensor.view(count, 2, half, -1).transpose(1, 2).reshape(tensor.shape)
        extra.setdefault(renamed, tensor)
    for name, tensor in extra.items():
        if tensor is not None:
            writer.add_tensor(name, tensor.float().contiguous().numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _gguf_name(name: str) -> str:
    table = {
        "model.embed_tokens": "token_embd",
        "model.norm": "output_norm",
        "lm_head": "output",
        "model.layers": "blk",
        "self_attn.q_proj": "attn_q",
        "self_attn.k_proj": "attn_k",
        "self_attn.v_proj": "attn_v",
        "self_attn.o_proj": "attn_output",
        "mlp.gate_proj": "ffn_gate",
        "mlp.up_proj": "ffn_up",
        "mlp.down_proj": "ffn_down",
        "input_layernorm": "attn_norm",
        "post_attention_layernorm": "ffn_norm",
    }
    for hf, gguf_name in table.items():
        name = name.replace(hf, gguf_name)
    return name
