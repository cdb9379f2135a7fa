"""The stock layout: an MLALayer as the tensors of a DeepseekV3ForCausalLM layer, and back.

Every engine applies an RMSNorm to the latent and none can switch it off. *eps domination* makes it linear:
the latent rows of kv_a_proj_with_mqa are multiplied by an alpha so small that mean((alpha c)^2)
<< eps, hence RMSNorm(alpha c) = w alpha c / sqrt(mean((alpha c)^2) + eps) = c for w = sqrt(eps) / alpha, with
relative error mean((alpha c)^2) / (2 eps). Transformers fixes that eps to 1e-6 while others read
rms_norm_eps, so rms_norm_eps is written as 1e-6 and the residual stream is rescaled where the source's
differs: RMSNorm(S x; S^2 eps) = RMSNorm(x; eps).

Biases have slots in kv_a_proj_with_mqa, o_proj and q_a_proj, but none in the projection that makes the queries. What
values' biases add to the output goes to o_proj's, what keys' biases add outside the rotating rows the softmax ignores,
and queries go through a query latent that carries a constant, u = [h; 1], its norm neutralised like the other:
q = W_UQ h + b_UQ = [W_UQ, b_UQ] u, with q_a_proj the identity on h and the constant in its bias.
"""

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from mla_convert.conversion.rope import RopePlan
from mla_convert.formats.layer import MLALayer
from mla_convert.source.checkpoint import Checkpoint
from mla_convert.source.families import SourceSpec
from mla_convert.source.frequencies import inverse_frequencies, longrope_frequencies

LATENT_NORM_EPS = 1e-6  # hard-coded in transformers' DeepSeek classes
# Largest root mean square the scaled latent may reach for any input: relative error of the norm <= 1e-14 /
# 2e-6 = 5e-9, below fp32 rounding (6e-8), while 1e-7 is far above the smallest normal bfloat16 or float32
# number (1e-38).
SCALED_LATENT_RMS = 1e-7
QUERY_LATENT_MULTIPLE = 64  # GPU kernels are slow for odd widths


def residual_scale(rms_norm_eps: float) -> float:
    """S such that residual stream S x with eps 1e-6 equals the source's x with rms_norm_eps."""
    # Sources that say 1e-6 in float32 (GGUF) must not be rescaled by a rounding error.
    if math.isclose(rms_norm_eps, LATENT_NORM_EPS, rel_tol=1e-6):
        return 1.0
    return math.sqrt(LATENT_NORM_EPS / rms_norm_eps)


def latent_rms_bound(W_DKV: Tensor, norm_weight: Tensor) -> float:
    """Upper bound of rms(W_DKV h) over every h = RMSNorm(x) * norm_weight (no calibration text is trusted).

    |RMSNorm(x)|_2 <= sqrt(hidden_size), so |c|_2 <= sigma_max(W_DKV diag(norm_weight)) sqrt(hidden_size).
    """
    rank, hidden = W_DKV.shape
    top = torch.linalg.matrix_norm(W_DKV.double() * norm_weight.double(), ord=2)
    return float(top) * math.sqrt(hidden / rank)


def latent_alpha(W_DKV: Tensor, norm_weight: Tensor, scaled_rms: float = SCALED_LATENT_RMS) -> float:
    """alpha that keeps the latent's rms below `scaled_rms` for any input; sqrt(eps) for a zero latent.

    It is sqrt(eps) times a power of two, so that the norm's weight sqrt(eps) / alpha is exact in any storage type: in
    bfloat16 its rounding would scale the whole latent, by up to 0.2 %.
    """
    bound = latent_rms_bound(W_DKV, norm_weight)
    root = math.sqrt(LATENT_NORM_EPS)
    return root * 2.0 ** math.floor(math.log2(scaled_rms / (root * bound))) if bound > 0 else root


def interleave_heads(a: Tensor, b: Tensor) -> Tensor:
    """[heads, x, n], [heads, y, n] -> [heads (x + y), n], as DeepSeek packs q_proj and kv_b_proj per head."""
    return torch.cat((a, b), dim=1).flatten(0, 1)


def query_latent_rank(hidden_size: int) -> int:
    """q_lora_rank of a model with biases: [h; 1] and zeros, since a smaller one would truncate the queries."""
    return -(-(hidden_size + 1) // QUERY_LATENT_MULTIPLE) * QUERY_LATENT_MULTIPLE


def _query_with_bias(query: Tensor, bias: Tensor, norm_weight: Tensor, scaled_rms: float) -> dict[str, Tensor]:
    """q = `query` h + `bias` ([rows, hidden_size], [rows]) by q_b_proj, q_a_layernorm and q_a_proj.

    alpha and the norm's weight are powers of two, exact in any storage type; what is left of sqrt(eps) / (alpha w) is
    in q_b_proj, whose numbers round independently. rms(u) is bounded for every h = RMSNorm(x) * norm_weight.
    """
    rows, hidden = query.shape
    rank = query_latent_rank(hidden)
    bound = math.sqrt((hidden * float(norm_weight.double().square().max()) + 1) / rank)
    root = math.sqrt(LATENT_NORM_EPS)
    alpha = 2.0 ** math.floor(math.log2(scaled_rms / bound))
    gain = 2.0 ** -round(math.log2(alpha / root))
    up = query.new_zeros(rows, rank)
    up[:, :hidden], up[:, hidden] = query, bias
    constant = query.new_zeros(rank)
    constant[hidden] = alpha
    return {
        "q_a_proj.weight": alpha * torch.eye(rank, hidden, dtype=query.dtype, device=query.device),
        "q_a_proj.bias": constant,
        "q_a_layernorm.weight": query.new_full((rank,), gain),
        "q_b_proj.weight": up * (root / (alpha * gain)),
    }


def to_stock(
    layer: MLALayer, norm_weight: Tensor, scale: float, scaled_rms: float = SCALED_LATENT_RMS
) -> dict[str, Tensor]:
    """The self_attn tensors of a DeepseekV3 layer by their names below `self_attn.`, in `layer`'s dtype.

    norm_weight [hidden_size] is the weight of the layer's input norm (for the bound on the latent), scale the
    factor on the residual stream. DeepSeek's softmax scale is (qk_nope_head_dim + qk_rope_head_dim)^-0.5; the
    ratio to the source's is folded into the query. A layer with biases gets all of its slots, zeros included.
    """
    nope, rope = layer.W_UQ.shape[1], layer.qk_rope_head_dim
    query_gain = layer.softmax_scale * math.sqrt(nope + rope)
    alpha = latent_alpha(layer.W_DKV, norm_weight, scaled_rms)
    query = interleave_heads(layer.W_UQ, layer.W_QR) * query_gain
    tensors = {
        "kv_a_proj_with_mqa.weight": torch.cat((layer.W_DKV * alpha, layer.W_KR)),
        "kv_a_layernorm.weight": layer.W_DKV.new_full((layer.kv_lora_rank,), math.sqrt(LATENT_NORM_EPS) / alpha),
        "kv_b_proj.weight": interleave_heads(layer.W_UK, layer.W_UV),
        "o_proj.weight": layer.W_O.transpose(0, 1).flatten(1) * scale,
    }
    if layer.b_UQ is None or layer.b_QR is None or layer.b_KR is None:
        assert layer.b_O is None  # no family that stock holds has a bias on the output alone
        tensors["q_proj.weight"] = query
    else:
        bias = torch.cat((layer.b_UQ, layer.b_QR), dim=1).flatten() * query_gain
        b_O = layer.W_O.new_zeros(layer.W_O.shape[1]) if layer.b_O is None else layer.b_O
        tensors |= _query_with_bias(query, bias, norm_weight, scaled_rms)
        tensors["kv_a_proj_with_mqa.bias"] = torch.cat((layer.b_KR.new_zeros(layer.kv_lora_rank), layer.b_KR))
        tensors["o_proj.bias"] = b_O * scale
    return {name: tensor.contiguous() for name, tensor in tensors.items()}


def stock_names(config: Mapping[str, Any]) -> list[str]:
    """Names below `self_attn.` of a layer's tensors, as `from_stock` wants them, for a written config.json."""
    query = ["q_proj"] if config["q_lora_rank"] is None else ["q_a_proj", "q_a_layernorm", "q_b_proj"]
    names = [*query, "kv_a_proj_with_mqa", "kv_a_layernorm", "kv_b_proj", "o_proj"]
    biased = ["q_a_proj", "kv_a_proj_with_mqa", "o_proj"] if config["attention_bias"] else []
    return [f"{name}.weight" for name in names] + [f"{name}.bias" for name in biased if name in names]


def from_stock(tensors: dict[str, Tensor], config: dict[str, Any], inv_freq: Tensor) -> MLALayer:
    """The MLALayer in the self_attn tensors of a dense DeepSeek layer, the latent norm taken as linear.

    Valid where eps domination holds (checked by `verify`, which compares with the class itself). The residual
    scale stays in W_O: outputs are those of the written model.
    """
    heads, rank = config["num_attention_heads"], config["kv_lora_rank"]
    nope, rope, v_width = config["qk_nope_head_dim"], config["qk_rope_head_dim"], config["v_head_dim"]
    root, bias = math.sqrt(LATENT_NORM_EPS), None
    if config["q_lora_rank"] is None:
        q = tensors["q_proj.weight"].unflatten(0, (heads, nope + rope))
    else:
        q_b = tensors["q_b_proj.weight"] * (tensors["q_a_layernorm.weight"] / root)
        q = (q_b @ tensors["q_a_proj.weight"]).unflatten(0, (heads, nope + rope))
        bias = (q_b @ tensors["q_a_proj.bias"]).unflatten(0, (heads, nope + rope))
    kv_a = tensors["kv_a_proj_with_mqa.weight"]
    kv_b = tensors["kv_b_proj.weight"].unflatten(0, (heads, nope + v_width))
    norm_gain = tensors["kv_a_layernorm.weight"] / root
    return MLALayer(
        W_UQ=q[:, :nope],
        W_QR=q[:, nope:],
        W_DKV=kv_a[:rank] * norm_gain[:, None],
        W_KR=kv_a[rank:],
        W_UK=kv_b[:, :nope],
        W_UV=kv_b[:, nope:],
        W_O=tensors["o_proj.weight"].unflatten(1, (heads, v_width)).transpose(0, 1),
        inv_freq=inv_freq,
        softmax_scale=(nope + rope) ** -0.5,
        b_UQ=None if bias is None else bias[:, :nope],
        b_QR=None if bias is None else bias[:, nope:],
        b_KR=None if bias is None else tensors["kv_a_proj_with_mqa.bias"][rank:],
        b_O=tensors.get("o_proj.bias"),
    )


def stock_config(
    spec: SourceSpec, kv_lora_rank: int, qk_nope_head_dim: int, plan: RopePlan, dtype: torch.dtype
) -> dict[str, Any]:
    """config.json of the converted model; nothing is left to DeepSeek's defaults.

    Token ids come from the source. first_k_dense_replace equals the number of layers, so no expert is ever
    built; the expert fields are integers because transformers and other engines insist on them.
    """
    source = spec.config
    config = {
        "architectures": ["DeepseekV3ForCausalLM"],
        "model_type": "deepseek_v3",
        "vocab_size": spec.vocab_size,
        "hidden_size": spec.hidden_size,
        "intermediate_size": spec.intermediate_size,
        "num_hidden_layers": spec.num_hidden_layers,
        "num_attention_heads": spec.num_attention_heads,
        # What the classes expand to, not the source's group count.
        "num_key_value_heads": spec.num_attention_heads,
        "q_lora_rank": query_latent_rank(spec.hidden_size) if spec.biased else None,
        "kv_lora_rank": kv_lora_rank,
        "qk_nope_head_dim": qk_nope_head_dim,
        "qk_rope_head_dim": 2 * len(plan.source_index),
        "v_head_dim": spec.source_head_dim,
        "hidden_act": spec.hidden_act,
        "max_position_embeddings": spec.max_position_embeddings,
        "rms_norm_eps": LATENT_NORM_EPS,
        "rope_interleave": True,
        "rope_parameters": plan.rope_parameters,
        "attention_bias": spec.biased,
        "attention_dropout": 0.0,
        "tie_word_embeddings": False,
        "use_cache": True,
        "initializer_range": source.get("initializer_range", 0.02),
        "dtype": str(dtype).removeprefix("torch."),
        "first_k_dense_replace": spec.num_hidden_layers,
        "moe_intermediate_size": spec.intermediate_size,
        "moe_layer_freq": 1,
        "n_routed_experts": 1,
        "n_shared_experts": 1,
        "num_experts_per_tok": 1,
        "n_group": 1,
        "topk_group": 1,
        "norm_topk_prob": False,
        "routed_scaling_factor": 1.0,
        "scoring_func": "sigmoid",
        "topk_method": "noaux_tc",
    }
    for key in ("bos_token_id", "eos_token_id", "pad_token_id"):
        config[key] = source.get(key)
    return config


def read_stock_layer(folder: str | Path, layer: int, dtype: torch.dtype = torch.float64) -> MLALayer:
    """Read one layer of a written folder back (the latent norm and alpha undone), in `dtype` on the CPU."""
    checkpoint = Checkpoint.open(folder)
    prefix = f"model.layers.{layer}.self_attn."
    tensors = {name: checkpoint.tensor(prefix + name).to(dtype) for name in stock_names(checkpoint.config)}
    return from_stock(tensors, checkpoint.config, written_frequencies(checkpoint.config))


def written_frequencies(config: dict[str, Any]) -> Tensor:
    """fp64 [qk_rope_head_dim / 2] radians per token of a written config.json (longrope: from its factors)."""
    rope, width = config["rope_parameters"], config["qk_rope_head_dim"]
    if rope["rope_type"] != "longrope":
        return inverse_frequencies(rope, width)
    return longrope_frequencies(torch.tensor(rope["short_factor"], dtype=torch.float64), rope["rope_theta"])
