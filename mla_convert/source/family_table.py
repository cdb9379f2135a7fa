"""The family table: per model_type, what the conversion accounts for. Data only; `families.py` applies it.

A family's own classes compute all but the attention of a native conversion, so a config key is accounted for when it is
a field of the family's config class; it is fixed where only some values mean what the conversion assumes, and harmless
where it has no influence on the logits of inference. Every other key is refused.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
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
# Buffers that old checkpoints store; the values follow from the config.
IGNORED_TENSORS = (r"model\.layers\.\d+\.self_attn\.rotary_emb\.inv_freq", r"model\.rotary_emb\.inv_freq")
# Why a tensor is in no table, by the first pattern found in its name.
TENSOR_REASONS: Mapping[str, str] = {
    r"[qk]_(layer)?norm": "the model class of this family has no QK-norm and would ignore it",
    r"lora_|adapter": "it belongs to an adapter; merge the adapter into the weights first",
    r"rope_freqs": "Llama 3 frequency scaling in a GGUF file, which transformers ignores; convert the "
    "safetensors checkpoint of this model",
    r"scale|qweight|qzeros|absmax|quant": "it belongs to a quantised checkpoint; dequantise it first",
    r"expert|block_sparse_moe|mlp\.gate\.|router": "the model class of this family has no experts",
    r"\.bias$": "by config.json this layer has no biases and the model class would ignore it; correct config.json",
    r"sinks": "the model class of this family has no attention sinks and would ignore them",
    r"score\.|classifier|qa_outputs": "only causal language models are converted",
}


@dataclass(frozen=True)
class Fixed:
    """A config key that must hold one of `allowed`; what any other value would mean is `reason`."""

    allowed: tuple[Any, ...]
    reason: str


@dataclass(frozen=True)
class Family:
    """How one model_type is read.

    architecture: the one class that is converted. fixed: config fields of which only some values are converted.
    stock: config fields that a stock DeepSeek-V3 class can hold only at these values, or why it never can.
    legacy: keys that the config class reads though they are no fields of it.

    Features of the attention, each checked against the class by tests/test_native_families.py:
    qk_norm: a norm over each "head", over "all" of them, or none. fused_qkv: one projection for all three.
    partial_rotary: only the first part_rotary_factor of a head may rotate. interleaved: rows 2l and 2l + 1 rotate
    together, not l and l + half. tables: how (cos, sin) are laid out: the pairs twice ("halves"), each pair twice
    ("interleaved") or once ("single"). nope: attribute of the attention that is false in layers that do not rotate.
    softcap: attribute with the soft cap of the scores. sinks: whether heads have attention sinks. post_norm: whether
    the attention's output is normalised before it is added. keep: kinds of layers that are kept as they are unless
    --keep-layers says otherwise. renamed: a part of tensor names in the class, and what checkpoints call it. experts:
    the class's tensor of all experts, and the checkpoint's one tensor per expert whose rows it stacks; stacked_experts:
    the checkpoint stacks them itself.
    """

    architecture: str
    fixed: Mapping[str, Fixed] = field(default_factory=dict)
    stock: Mapping[str, Fixed] | str = ""
    legacy: frozenset[str] = frozenset()
    qk_norm: str | None = None
    fused_qkv: bool = False
    partial_rotary: bool = False
    interleaved: bool = False
    tables: str = "halves"
    nope: str | None = None
    softcap: str | None = None
    sinks: bool = False
    post_norm: bool = False
    keep: str | None = None
    renamed: tuple[str, str] | None = None
    experts: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    stacked_experts: bool = False
    layer_tensors: Mapping[str, str] = field(default_factory=lambda: LAYER_TENSORS)
    global_tensors: Mapping[str, str] = field(default_factory=lambda: GLOBAL_TENSORS)

    @property
    def has_experts(self) -> bool:
        """Whether its MLPs are mixtures of experts."""
        return self.stacked_experts or bool(self.experts)

    def softcap_of(self, attention: Any) -> float | None:
        """The soft cap of the scores of an attention module of this family."""
        return getattr(attention, self.softcap) if self.softcap else None


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
_BIAS = "the model class of this family has no biases; set it to false"
_QK_NORM = "the model class of this family has no QK-norm"
_ENCODER = "only decoder-only causal language models are converted"
STOCK_WINDOW = "the stock format has no sliding windows"
_TWO_WAYS = "attention that looks ahead is not converted"

# Of every family. Keys that are no fields of a family's config class change nothing in its class, but checkpoints that
# hold them with other values were made for another class.
FIXED: Mapping[str, Fixed] = {
    "quantization_config": Fixed((None,), "quantised weights are not read; dequantise the checkpoint first"),
    "auto_map": Fixed((None,), "remote code is never run; use a checkpoint of a class built into transformers"),
    "is_decoder": Fixed((True, False, None), _ENCODER),
    "is_encoder_decoder": Fixed((False, None), _ENCODER),
    "add_cross_attention": Fixed((False, None), _ENCODER),
    "pruned_heads": Fixed(({}, None), "pruned heads are not supported"),
    "use_bidirectional_attention": Fixed((False, None), _TWO_WAYS),
}
NOT_OF_THE_CLASS: Mapping[str, Fixed] = {
    "attention_bias": Fixed((False, None), _BIAS),
    "mlp_bias": Fixed((False, None), _BIAS),
    "qkv_bias": Fixed((False, None), _BIAS),
    "sliding_window": Fixed((None,), _WINDOW),
    "use_sliding_window": Fixed((False, None), _WINDOW),
    "max_window_layers": Fixed((None,), _WINDOW),
    "partial_rotary_factor": Fixed((1, None), "the model class of this family rotates whole heads"),
    "rope_interleaved": Fixed((False, None), "the model class of this family does not rotate interleaved rows"),
    "use_qk_norm": Fixed((False, None), _QK_NORM),
    "qk_norm": Fixed((False, None), _QK_NORM),
    "qk_layernorm": Fixed((False, None), _QK_NORM),
}
_DENSE_STOCK: Mapping[str, Fixed] = {
    "hidden_act": Fixed(("silu",), "the engines that serve MLA compute silu only"),
    "mlp_bias": Fixed((False, None), "the stock format has no biases in the MLP"),
}
_QWEN_EXPERTS: Mapping[str, tuple[str, ...]] = {
    "mlp.experts.gate_up_proj": (
        "mlp.experts.{expert}.gate_proj.weight",
        "mlp.experts.{expert}.up_proj.weight",
    ),
    "mlp.experts.down_proj": ("mlp.experts.{expert}.down_proj.weight",),
}
# Of what transformers' DeepSeek classes compute; tests/test_stock_experts.py shows both.
_RENORMALISED = (
    "its router normalises the softmax over the chosen experts; DeepSeek-V3's weighs by sigmoids, and that of "
    "transformers' DeepSeek-V2 normalises nothing"
)
_GATED = "its shared expert has a gate, DeepSeek's have none, and only DeepSeek-V2's router weighs by a softmax"
_NORM = "its QK-norm is not linear in the latent"

FAMILIES: Mapping[str, Family] = {
    "llama": Family("LlamaForCausalLM", stock=_DENSE_STOCK),
    "mistral": Family("MistralForCausalLM", stock={**_DENSE_STOCK, "sliding_window": Fixed((None,), STOCK_WINDOW)}),
    "ministral": Family("MinistralForCausalLM", stock="its layers have sliding windows"),
    "qwen2": Family(
        "Qwen2ForCausalLM", stock={**_DENSE_STOCK, "use_sliding_window": Fixed((False, None), STOCK_WINDOW)}
    ),
    "qwen3": Family("Qwen3ForCausalLM", stock=_NORM, qk_norm="head"),
    "gemma2": Family(
        "Gemma2ForCausalLM",
        stock="its scores are capped",
        softcap="attn_logit_softcapping",
        post_norm=True,
        keep="sliding",
    ),
    "gemma3_text": Family(
        "Gemma3ForCausalLM",
        stock=_NORM,
        fixed={"attn_logit_softcapping": Fixed((None,), "its class ignores it, so set it to null")},
        legacy=frozenset({"sliding_window_pattern", "_sliding_window_pattern", "rope_local_base_freq"}),
        qk_norm="head",
        post_norm=True,
        keep="sliding",
    ),
    "phi3": Family(
        "Phi3ForCausalLM",
        stock="its checkpoints fuse queries, keys and values",
        legacy=frozenset({"partial_rotary_factor", "head_dim"}),
        fused_qkv=True,
        partial_rotary=True,
    ),
    "olmo2": Family("Olmo2ForCausalLM", stock=_NORM, qk_norm="all", post_norm=True),
    "olmo3": Family("Olmo3ForCausalLM", stock=_NORM, qk_norm="all", post_norm=True),
    "granite": Family("GraniteForCausalLM", stock="its embeddings, residuals and logits have multipliers"),
    "glm": Family(
        "GlmForCausalLM",
        stock="only a part of every head rotates",
        legacy=frozenset({"partial_rotary_factor"}),
        partial_rotary=True,
        interleaved=True,
    ),
    "glm4": Family(
        "Glm4ForCausalLM",
        stock="only a part of every head rotates",
        legacy=frozenset({"partial_rotary_factor"}),
        partial_rotary=True,
        interleaved=True,
        post_norm=True,
    ),
    "smollm3": Family("SmolLM3ForCausalLM", stock="some of its layers do not rotate", nope="use_rope"),
    "starcoder2": Family("Starcoder2ForCausalLM", stock="its norms and MLP are not those of DeepSeek-V3"),
    "cohere2": Family(
        "Cohere2ForCausalLM",
        stock="its attention and MLP run in parallel",
        legacy=frozenset({"sliding_window_pattern", "_sliding_window_pattern"}),
        interleaved=True,
        tables="interleaved",
        nope="sliding_window",
    ),
    "mixtral": Family(
        "MixtralForCausalLM",
        stock=_RENORMALISED,
        renamed=(".mlp.", ".block_sparse_moe."),
        experts={
            "mlp.experts.gate_up_proj": (
                "block_sparse_moe.experts.{expert}.w1.weight",
                "block_sparse_moe.experts.{expert}.w3.weight",
            ),
            "mlp.experts.down_proj": ("block_sparse_moe.experts.{expert}.w2.weight",),
        },
    ),
    "qwen2_moe": Family("Qwen2MoeForCausalLM", stock=_GATED, experts=_QWEN_EXPERTS),
    "qwen3_moe": Family("Qwen3MoeForCausalLM", stock=_NORM, qk_norm="head", experts=_QWEN_EXPERTS),
    "gpt_oss": Family(
        "GptOssForCausalLM",
        stock="its heads have attention sinks",
        legacy=frozenset({"experts_per_token", "initial_context_length"}),
        tables="single",
        sinks=True,
        stacked_experts=True,
    ),
}
