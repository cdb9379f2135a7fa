"""One attention layer in latent form, and its expanded evaluation.

Symbols (DeepSeek-V2, arXiv:2405.04434, section 2.1; rows are outputs, so a token's vector h is mapped by ``h
@ W.T``):

    c_t    = W_DKV h_t                      latent, kv_lora_rank numbers, cached, never rotated
    k_pe_t = rotate(W_KR h_t, t)            qk_rope_head_dim numbers, cached, shared by all heads
    k_t,i  = [W_UK,i c_t ; k_pe_t]          key of head i
    v_t,i  = W_UV,i c_t                     value of head i
    q_t,i  = [W_UQ,i h_t ; rotate(W_QR,i h_t, t)]
    out_t  = sum_i W_O,i sum_s softmax_s(scale q_t,i . k_s,i) v_s,i

Rotating rows are interleaved: rows 2s and 2s+1 are the real and imaginary part of slot s, as DeepSeek stores
them.
"""

from dataclasses import dataclass, fields, replace

import torch
from jaxtyping import Float, Int
from torch import Tensor


@dataclass(frozen=True, eq=False)
class MLALayer:
    """The projections of one multi-head latent attention layer; all tensors share dtype and device.

    softmax_scale multiplies the scores; inv_freq (fp64, radians per token) and attention_scaling (amplitude
    of cos and sin) describe the rotation of the qk_rope_head_dim / 2 slots.
    """

    W_UQ: Float[Tensor, "num_heads qk_nope_head_dim hidden_size"]
    W_QR: Float[Tensor, "num_heads qk_rope_head_dim hidden_size"]
    W_DKV: Float[Tensor, "kv_lora_rank hidden_size"]
    W_KR: Float[Tensor, "qk_rope_head_dim hidden_size"]
    W_UK: Float[Tensor, "num_heads qk_nope_head_dim kv_lora_rank"]
    W_UV: Float[Tensor, "num_heads v_head_dim kv_lora_rank"]
    W_O: Float[Tensor, "num_heads hidden_size v_head_dim"]
    inv_freq: Float[Tensor, " slots"]
    softmax_scale: float
    attention_scaling: float = 1.0

    @property
    def kv_lora_rank(self) -> int:
        """Numbers of the latent per token."""
        return self.W_DKV.shape[0]

    @property
    def qk_rope_head_dim(self) -> int:
        """Numbers of the shared rotating key per token."""
        return self.W_KR.shape[0]

    def to(self, dtype: torch.dtype, device: torch.device | str | None = None) -> "MLALayer":
        """The layer with every projection cast (and moved); frequencies stay fp64."""
        moved = {
            f.name: getattr(self, f.name).to(device=device, dtype=dtype)
            for f in fields(self)
            if f.name.startswith("W_")
        }
        return replace(self, **moved, inv_freq=self.inv_freq.to(device=device))


def rotate(
    x: Float[Tensor, "*batch tokens width"],
    position_ids: Int[Tensor, "batch tokens"],
    inv_freq: Float[Tensor, " slots"],
    amplitude: float = 1.0,
) -> Float[Tensor, "*batch tokens width"]:
    """Multiply slot s (numbers 2s, 2s+1 as one complex number) by amplitude * exp(i position inv_freq_s).

    x is [batch, tokens, 2 slots] or [batch, heads, tokens, 2 slots]. Angles are taken in fp64 whatever x is,
    then rounded to x's type. Source: RoFormer, arXiv:2104.09864, eq. 34.
    """
    angle = position_ids.to(torch.float64)[..., None] * inv_freq.to(torch.float64)
    cos, sin = (amplitude * angle.cos()).to(x.dtype), (amplitude * angle.sin()).to(x.dtype)
    if x.dim() == 4:
        cos, sin = cos[:, None], sin[:, None]
    re, im = x[..., 0::2], x[..., 1::2]
    return torch.stack((re * cos - im * sin, re * sin + im * cos), dim=-1).flatten(-2)


def causal_scores_mask(queries: int, keys: int, device: torch.device) -> Tensor:
    """Additive mask [queries, keys]; the last query sees every key."""
    blocked = torch.ones(queries, keys, dtype=torch.bool, device=device).triu(1 + keys - queries)
    return torch.zeros(queries, keys, device=device).masked_fill(blocked, float("-inf"))


def attend_expanded(
    layer: MLALayer,
    hidden: Float[Tensor, "batch tokens hidden_size"],
    position_ids: Int[Tensor, "batch tokens"],
) -> Float[Tensor, "batch tokens hidden_size"]:
    """Causal attention with keys and values of every head written out (the path of the formulas above)."""
    c = hidden @ layer.W_DKV.T
    k_pe = rotate(hidden @ layer.W_KR.T, position_ids, layer.inv_freq, layer.attention_scaling)
    q_nope = torch.einsum("bte,hde->bhtd", hidden, layer.W_UQ)
    q_pe = rotate(
        torch.einsum("bte,hde->bhtd", hidden, layer.W_QR),
        position_ids,
        layer.inv_freq,
        layer.attention_scaling,
    )
    k_nope = torch.einsum("btr,hdr->bhtd", c, layer.W_UK)
    v = torch.einsum("btr,hdr->bhtd", c, layer.W_UV)
    query = torch.cat((q_nope, q_pe), dim=-1)
    key = torch.cat((k_nope, k_pe[:, None].expand(-1, k_nope.shape[1], -1, -1)), dim=-1)
    out = torch.nn.functional.scaled_dot_product_attention(query, key, v, is_causal=True, scale=layer.softmax_scale)
    return torch.einsum("bhtd,hed->bte", out, layer.W_O)
