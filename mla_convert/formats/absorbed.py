"""The absorbed form of a latent attention layer: keys and values of the heads are never written out.

With q_abs_i = W_UK,i^T W_UQ,i h the score is q_abs_i . c + q_pe_i . k_pe, and the value projection waits
until the latents are averaged: out = sum_i W_O,i W_UV,i (sum_s a_s c_s). Attention is then one shared key of
width kv_lora_rank + qk_rope_head_dim and one shared value of width kv_lora_rank for all heads, read once per
token (DeepSeek-V2, arXiv:2405.04434, section 2.1.2). It equals the expanded form up to rounding.
"""

from dataclasses import dataclass
from typing import Any, TypeVar, overload

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from mla_convert.errors import BadOption
from mla_convert.formats.layer import MLALayer, rotate
from mla_convert.modeling.core import attention_weights, causal_mask

Model = TypeVar("Model", bound=nn.Module)


@dataclass(frozen=True, eq=False)
class AbsorbedLayer:
    """Absorbed projections. `merged_q`/`merged_out` are set only where one matrix reads fewer bytes than two.

    merged_q is W_UK^T W_UQ, merged_out is W_O W_UV; where they are None the two factors of `layer` are
    applied in turn.
    """

    layer: MLALayer
    merged_q: Float[Tensor, "num_heads kv_lora_rank hidden_size"] | None
    merged_out: Float[Tensor, "num_heads hidden_size kv_lora_rank"] | None


@dataclass(frozen=True, eq=False)
class LatentCache:
    """What one layer caches: kv_lora_rank + qk_rope_head_dim numbers per token, for all heads together."""

    kv_c: Float[Tensor, "batch tokens kv_lora_rank"]
    k_pe: Float[Tensor, "batch tokens qk_rope_head_dim"]


def merging_reads_less(inner: int, kv_lora_rank: int, hidden_size: int) -> bool:
    """Whether a [kv_lora_rank, hidden_size] matrix is smaller than its two factors of width `inner`."""
    return kv_lora_rank * hidden_size < inner * (kv_lora_rank + hidden_size)


@overload
def absorb(target: MLALayer) -> AbsorbedLayer: ...


@overload
def absorb(target: Model, *, backend: str = "auto") -> Model: ...


def absorb(target: Any, *, backend: str = "auto") -> Any:
    """The absorbed form of one MLALayer, or of a transformers model with DeepSeek-V2/V3 attention.

    A model is changed in place and returned: it decodes on the cached latents, with the same generate, caches and
    files and the same output up to rounding; `print(mla_convert.describe(model))` says what was chosen. `backend`
    (models only) as in `mla_convert.attention.latent_attention`. A layer is kept, not copied, in the result.
    Raises UnsupportedSource for a model without such attention, BadOption for anything else.
    """
    if isinstance(target, MLALayer):
        return absorb_layer(target)
    if not isinstance(target, nn.Module):
        raise BadOption(
            f"absorb takes a loaded model or an MLALayer, got {type(target).__name__}; "
            "load a folder with transformers.AutoModelForCausalLM.from_pretrained first"
        )
    from mla_convert.decoding.absorb_model import absorb_model  # here, because it loads transformers

    return absorb_model(target, backend)


def absorb_layer(layer: MLALayer) -> AbsorbedLayer:
    """Precompute the absorbed form of `layer` (same dtype and device; the layer is kept, not copied)."""
    _, nope, hidden = layer.W_UQ.shape
    v_width, rank = layer.W_UV.shape[1], layer.kv_lora_rank
    merge_q = merging_reads_less(nope, rank, hidden)
    merge_out = merging_reads_less(v_width, rank, hidden)
    return AbsorbedLayer(
        layer=layer,
        merged_q=layer.W_UK.transpose(1, 2) @ layer.W_UQ if merge_q else None,
        merged_out=layer.W_O @ layer.W_UV if merge_out else None,
    )


def absorbed_query(
    absorbed: AbsorbedLayer, hidden: Float[Tensor, "batch tokens hidden_size"]
) -> Float[Tensor, "batch num_heads tokens kv_lora_rank"]:
    """q_abs_i = W_UK,i^T (W_UQ,i h + b_UQ,i): the query as the latent sees it."""
    bias = absorbed.layer.b_UQ
    if absorbed.merged_q is not None:
        merged = torch.einsum("bte,hre->bhtr", hidden, absorbed.merged_q)
        return merged if bias is None else merged + torch.einsum("hd,hdr->hr", bias, absorbed.layer.W_UK)[:, None]
    q_nope = torch.einsum("bte,hde->bhtd", hidden, absorbed.layer.W_UQ)
    q_nope = q_nope if bias is None else q_nope + bias[:, None]
    return torch.einsum("bhtd,hdr->bhtr", q_nope, absorbed.layer.W_UK)


def attend_absorbed(
    absorbed: AbsorbedLayer,
    hidden: Float[Tensor, "batch tokens hidden_size"],
    position_ids: Int[Tensor, "batch tokens"],
    past: LatentCache | None = None,
) -> tuple[Float[Tensor, "batch tokens hidden_size"], LatentCache]:
    """Causal attention of `hidden` over `past` and itself; returns the output and the grown cache."""
    layer = absorbed.layer
    kv_c = hidden @ layer.W_DKV.T
    k_pe = hidden @ layer.W_KR.T
    k_pe = rotate(
        k_pe if layer.b_KR is None else k_pe + layer.b_KR, position_ids, layer.inv_freq, layer.attention_scaling
    )
    if past is not None:
        kv_c, k_pe = torch.cat((past.kv_c, kv_c), dim=1), torch.cat((past.k_pe, k_pe), dim=1)
    q_pe = torch.einsum("bte,hde->bhtd", hidden, layer.W_QR)
    q_pe = q_pe if layer.b_QR is None else q_pe + layer.b_QR[:, None]
    q_pe = rotate(q_pe, position_ids, layer.inv_freq, layer.attention_scaling)

    scores = absorbed_query(absorbed, hidden) @ kv_c[:, None].transpose(-1, -2)
    scores = (scores + q_pe @ k_pe[:, None].transpose(-1, -2)) * layer.softmax_scale
    mask = causal_mask(hidden.shape[1], kv_c.shape[1], hidden.device)
    context = attention_weights(scores, mask, None, None) @ kv_c[:, None]  # [batch, heads, tokens, kv_lora_rank]

    if absorbed.merged_out is not None:
        out = torch.einsum("bhtr,her->bte", context, absorbed.merged_out)
    else:
        out = torch.einsum("bhtr,hdr->bhtd", context, layer.W_UV)
        out = torch.einsum("bhtd,hed->bte", out, layer.W_O)
    return out if layer.b_O is None else out + layer.b_O, LatentCache(kv_c, k_pe)
