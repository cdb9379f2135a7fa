"""The family table: per model_type, which config keys and tensor names the conversion accounts for.

Data only; `families.py` applies it. A config key is read (it enters the SourceSpec), fixed (only the listed
values mean what the conversion assumes), or harmless (no influence on the logits of inference). Every other
key is refused.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

LAYER_TENSORS: Mapping[str, str] = {
    "q": "model.layers.{layer}.self_attn.q_proj.weight",
    "k": "model.layers.{layer}.self_attn.k_proj.weight",
    "v": "model.layers.{layer}.self_attn.v_proj.weight",
    "o": "model.layers.{layer}.self_attn.o_proj.weight",
    "gate": "model.layers.{layer}.mlp.gate_proj.weight",
    "up": "model.layers.{layer}.mlp.up_proj.weight",
    "down": "model.layers.{layer}.mlp.down_proj.weight",
    "input_norm": "model.layers.{layer}.input_layernorm.weight",
    "post_norm": "model.layers.{layer}.post_attention_layernorm.weight",
}
GLOBAL_TENSORS: Mapping[str, str] = {
    "embed": "model.embed_tokens.weight",
    "final_norm": "model.norm.weight",
    "lm_head": "lm_head.weight",
}
# Shapes [out, in] in terms of the sizes that `families.expected_shapes` computes.
SHAPES: Mapping[str, tuple[str, ...]] = {
    "q": ("queries", "hidden_size"),
    "k": ("keys", "hidden_size"),
    "v": ("keys", "hidden_size"),
    "o": ("hidden_size", "queries"),
    "gate": ("intermediate_size", "hidden_size"),
    "up": ("intermediate_size", "hidden_size"),
    "down": ("hidden_size", "intermediate_size"),
    "input_norm": ("hidden_size",),
    "post_norm": ("hidden_size",),
    "embed": ("vocab_size", "hidden_size"),
    "final_norm": ("hidden_size",),
    "lm_head": ("vocab_size", "hidden_size"),
}
# Buffers that old checkpoints store; the values follow from the config.
IGNORED_TENSORS = (r"model\.layers\.\d+\.self_attn\.rotary_emb\.inv_freq", r"model\.rotary_emb\.inv_freq")
# Why a tensor is in no table, by the first pattern found in its name.
TENSOR_REASONS: Mapping[str, str] = {
    r"[qk]_(layer)?norm": "QK-norm is not linear in the latent, stock MLA cannot hold it",
    r"lora_|adapter": "it belongs to an adapter; merge the adapter into the weights first",
    r"rope_freqs": "Llama 3 frequency scaling in a GGUF file, which transformers ignores; convert the "
    "safetensors checkpoint of this model",
    r"scale|qweight|qzeros|absmax|quant": "it belongs to a quantised checkpoint; dequantise it first",
    r"expert|block_sparse_moe|mlp\.gate\.|router": "mixture-of-experts layers are not supported yet",
    r"\.bias$": "biases are not supported yet",
    r"sinks": "attention sinks are not supported yet",
    r"score\.|classifier|qa_outputs": "only causal language models are converted",
}


@dataclass(frozen=True)
class Fixed:
    """A config key that must hold one of `allowed`; `default` is the class's value when the key is absent."""

    allowed: tuple[Any, ...]
    reason: str
    default: Any = None


@dataclass(frozen=True)
class Family:
    """How one model_type is read. `defaults`: the model class's values of read keys that may be absent."""

    defaults: Mapping[str, Any]
    fixed: Mapping[str, Fixed]
    harmless: frozenset[str]
    layer_tensors: Mapping[str, str]
    global_tensors: Mapping[str, str]


REQUIRED_KEYS = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "vocab_size")
ROPE_KEYS = ("rope_theta", "rope_scaling", "rope_parameters")

HARMLESS = frozenset(
    {
        "_attn_implementation_autoset",
        "_commit_hash",
        "_model_name_or_path",
        "_name_or_path",
        "attention_dropout",  # training only
        "attn_implementation",
        "bos_token_id",
        "chunk_size_feed_forward",
        "do_sample",
        "dtype",
        "eos_token_id",
        "id2label",
        "initializer_range",
        "is_llama_config",
        "label2id",
        "max_length",
        "max_new_tokens",
        "output_attentions",
        "output_hidden_states",
        "pad_token_id",
        "pretraining_tp",  # splits the same products into slices
        "problem_type",
        "return_dict",
        "temperature",
        "tokenizer_class",
        "top_k",
        "top_p",
        "torch_dtype",
        "transformers.js_config",
        "transformers_version",
        "unk_token_id",
        "unsloth_fixed",
        "unsloth_version",
        "use_cache",
    }
)

_WINDOW = "sliding-window attention is not supported; if every context is shorter than the window, set it to null"
_BIAS = "biases are not supported yet; set it to false only if the checkpoint has no bias tensors"
_QK_NORM = "QK-norm is not linear in the latent, stock MLA cannot hold it"
_ENCODER = "only decoder-only causal language models are converted"


def _fixed(architecture: str, window: int | None) -> dict[str, Fixed]:
    return {
        "architectures": Fixed(
            ([architecture], None), f"only {architecture} is converted; give the causal language model"
        ),
        "hidden_act": Fixed(("silu",), "the engines that serve MLA compute silu only", default="silu"),
        "attention_bias": Fixed((False, None), _BIAS, default=False),
        "mlp_bias": Fixed((False, None), _BIAS, default=False),
        "sliding_window": Fixed((None,), _WINDOW, default=window),
        "use_sliding_window": Fixed((False, None), _WINDOW, default=False),
        "partial_rotary_factor": Fixed((1, None), "heads that rotate in part are not supported yet"),
        "rope_interleaved": Fixed((False, None), "interleaved rows are not supported; permute q_proj and k_proj"),
        "use_qk_norm": Fixed((False, None), _QK_NORM),
        "qk_norm": Fixed((False, None), _QK_NORM),
        "qk_layernorm": Fixed((False, None), _QK_NORM),
        "quantization_config": Fixed((None,), "quantised weights are not read; dequantise the checkpoint first"),
        "auto_map": Fixed((None,), "remote code is never run; use a checkpoint of a class built into transformers"),
        "is_decoder": Fixed((True, False, None), _ENCODER),
        "is_encoder_decoder": Fixed((False, None), _ENCODER, default=False),
        "add_cross_attention": Fixed((False, None), _ENCODER),
        "pruned_heads": Fixed(({}, None), "pruned heads are not supported"),
    }


# The defaults are those of transformers' LlamaConfig and MistralConfig; a test compares them.
FAMILIES: Mapping[str, Family] = {
    "llama": Family(
        defaults={
            "num_key_value_heads": None,  # as many as query heads
            "head_dim": None,  # hidden_size // num_attention_heads
            "max_position_embeddings": 2048,
            "rms_norm_eps": 1e-6,
            "tie_word_embeddings": False,
        },
        fixed=_fixed("LlamaForCausalLM", window=None),
        harmless=HARMLESS,
        layer_tensors=LAYER_TENSORS,
        global_tensors=GLOBAL_TENSORS,
    ),
    "mistral": Family(
        defaults={
            "num_key_value_heads": 8,
            "head_dim": None,
            "max_position_embeddings": 131072,
            "rms_norm_eps": 1e-6,
            "tie_word_embeddings": False,
        },
        fixed=_fixed("MistralForCausalLM", window=4096),
        harmless=HARMLESS,
        layer_tensors=LAYER_TENSORS,
        global_tensors=GLOBAL_TENSORS,
    ),
}
