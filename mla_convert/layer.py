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
from torch import Tensor, nn


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


Table = tuple[Float[Tensor, "batch tokens slots"], Float[Tensor, "batch tokens slots"]]


def rotation_table(
    position_ids: Int[Tensor, "batch tokens"], inv_freq: Float[Tensor, " slots"], amplitude: float, dtype: torch.dtype
) -> Table:
    """amplitude * cos and sin of position inv_freq_s. Angles are taken in fp64, then rounded to `dtype`."""
    angle = position_ids.to(torch.float64)[..., None] * inv_freq.to(torch.float64)
    return (amplitude * angle.cos()).to(dtype), (amplitude * angle.sin()).to(dtype)


def turn(x: Float[Tensor, "*batch tokens width"], table: Table) -> Float[Tensor, "*batch tokens width"]:
    """Multiply slot s (numbers 2s, 2s+1 as one complex number) by exp(i angle_s): RoFormer, arXiv:2104.09864, eq. 34.

    x is [batch, tokens, 2 slots] or [batch, heads, tokens, 2 slots].
    """
    cos, sin = (part[:, None] for part in table) if x.dim() == 4 else table
    re, im = x[..., 0::2], x[..., 1::2]
    return torch.stack((re * cos - im * sin, re * sin + im * cos), dim=-1).flatten(-2)


def rotate(
    x: Float[Tensor, "*batch tokens width"],
    position_ids: Int[Tensor, "batch tokens"],
    inv_freq: Float[Tensor, " slots"],
    amplitude: float = 1.0,
) -> Float[Tensor, "*batch tokens width"]:
    """`turn` by the angles of `position_ids`."""
    return turn(x, rotation_table(position_ids, inv_freq, amplitude, x.dtype))


def causal_scores_mask(queries: int, keys: int, device: torch.device) -> Tensor:
    """Additive mask [queries, keys]; the last query sees every key."""
    blocked = torch.ones(queries, keys, dtype=torch.bool, device=device).triu(1 + keys - queries)
    return torch.zeros(queries, keys, device=device).masked_fill(blocked, float("-inf"))


def attend_expanded(
    layer: MLALayer,
    hidden: Float[Tensor, "batch tokens hidden_size"],
    position_ids: Int[Tensor, "batch tokens"],
    table: Table | None = None,
) -> Float[Tensor, "batch tokens hidden_size"]:
    """Causal attention with keys and values of every head written out (the path of the formulas above).

    `table` is `rotation_table` of position_ids where it is already at hand. Works under autocast.
    """
    heads, nope = layer.W_UQ.shape[:2]
    rope, rank, v = layer.qk_rope_head_dim, layer.kv_lora_rank, layer.W_UV.shape[1]
    if table is None:
        table = rotation_table(position_ids, layer.inv_freq, layer.attention_scaling, hidden.dtype)
    down = torch.cat((layer.W_UQ.flatten(0, 1), layer.W_QR.flatten(0, 1), layer.W_DKV, layer.W_KR))
    q_nope, q_pe, c, k_pe = (hidden @ down.T).split([heads * nope, heads * rope, rank, rope], dim=-1)
    up = torch.cat((layer.W_UK, layer.W_UV), dim=1).flatten(0, 1)
    kv = (c @ up.T).unflatten(-1, (heads, nope + v)).transpose(1, 2)
    q_pe = turn(q_pe.unflatten(-1, (heads, rope)).transpose(1, 2), table).to(kv.dtype)
    k_pe = turn(k_pe, table).to(kv.dtype)[:, None].expand(-1, heads, -1, -1)
    query = torch.cat((q_nope.unflatten(-1, (heads, nope)).transpose(1, 2), q_pe), dim=-1)
    key = torch.cat((kv[..., :nope], k_pe), dim=-1)
    # Equal widths let torch take its fused kernel on a CPU (2 times faster); the padding is cut off again.
    width = max(nope + rope, v)
    query, key, value = (nn.functional.pad(t, (0, width - t.shape[-1])) for t in (query, key, kv[..., nope:]))
    out = nn.functional.scaled_dot_product_attention(query, key, value, is_causal=True, scale=layer.softmax_scale)
    return out[..., :v].transpose(1, 2).flatten(2) @ layer.W_O.transpose(0, 1).flatten(1).T
