"""Whole models in fp64, without the float32 detours of the stock classes (norms and rotations), as oracles to 1e-12."""

from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, DeepseekV3Config, DeepseekV3ForCausalLM

from mla_convert.conversion.rope import RopePlan
from mla_convert.formats.layer import MLALayer
from mla_convert.formats.stock import residual_scale, stock_config, to_stock, written_frequencies
from mla_convert.source.families import SourceSpec
from mla_convert.source.projections import SourceAttention

# mean((alpha c)^2) / (2 eps) = 1e-22 / 2e-6: the linearised norm is exact in fp64.
FP64_LATENT_RMS = 1e-11


def in_fp64(model: nn.Module, inv_freq: Tensor) -> Any:
    """The same instance with RMSNorm and rotation computed in fp64."""

    def norm_forward(module: Any, x: Tensor) -> Tensor:
        return module.weight * x * torch.rsqrt(x.square().mean(-1, keepdim=True) + module.variance_epsilon)

    def rotation(x: Tensor, position_ids: Tensor, **_: Any) -> tuple[Tensor, Tensor]:
        angle = position_ids[..., None].double() * inv_freq
        angle = torch.cat((angle, angle), dim=-1)
        return angle.cos(), angle.sin()

    model = model.double().eval()
    for module in model.modules():
        if type(module).__name__.endswith("RMSNorm"):
            module.forward = norm_forward.__get__(module)
    model.model.rotary_emb.forward = rotation
    return model


def source_fp64(folder: Any, spec: SourceSpec) -> Any:
    """The source's own class in fp64."""
    return in_fp64(
        AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64, attn_implementation="sdpa"),
        spec.inv_freq,
    )


def attention_of(model: Any, index: int, spec: SourceSpec) -> SourceAttention:
    """The projections of one layer of a loaded source."""
    attention, d = model.model.layers[index].self_attn, spec.source_head_dim
    return SourceAttention(
        W_Q=attention.q_proj.weight.detach().unflatten(0, (spec.num_attention_heads, d)),
        W_K=attention.k_proj.weight.detach().unflatten(0, (spec.num_key_value_heads, d)),
        W_V=attention.v_proj.weight.detach().unflatten(0, (spec.num_key_value_heads, d)),
        W_O=attention.o_proj.weight.detach().unflatten(1, (spec.num_attention_heads, d)).transpose(0, 1),
    )


def stock_fp64(
    source: Any,
    spec: SourceSpec,
    layers: list[MLALayer],
    plan: RopePlan,
    scaled_rms: float = FP64_LATENT_RMS,
    **changes: Any,
) -> Any:
    """The converted model as the stock class in fp64; `changes` go into its config (for negative controls)."""
    nope = layers[0].W_UQ.shape[1]
    config = stock_config(spec, layers[0].kv_lora_rank, nope, plan, torch.float64) | changes
    model = DeepseekV3ForCausalLM(DeepseekV3Config(**config, attn_implementation="sdpa"))
    scale = residual_scale(spec.rms_norm_eps)
    state = {name: tensor.double() for name, tensor in source.state_dict().items() if ".self_attn." not in name}
    for name in state:
        if name == "model.embed_tokens.weight" or name.endswith("down_proj.weight"):
            state[name] = state[name] * scale
    for index, layer in enumerate(layers):
        norm = source.model.layers[index].input_layernorm.weight.detach()
        for name, tensor in to_stock(layer, norm, scale, scaled_rms).items():
            state[f"model.layers.{index}.self_attn.{name}"] = tensor
    state["lm_head.weight"] = source.lm_head.weight.detach()
    model = model.double()
    model.load_state_dict(state)
    return in_fp64(model, written_frequencies(config))


def logits(model: Any, ids: Tensor) -> Tensor:
    """[windows, tokens, vocab] of a full forward."""
    with torch.no_grad():
        return model(input_ids=ids, use_cache=False).logits
