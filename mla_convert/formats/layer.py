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

Layers that only the native format can hold (mla_convert/modeling) may have biases, soft caps, sinks and windows, and a
`front`: then h_t on the right is the normalised query of head i for W_UQ,i and W_QR,i, and all keys and values of the
token for W_DKV and W_KR.
"""

import copy
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from mla_convert.modeling.core import causal_mask, expanded_attention, turn


@dataclass(frozen=True, eq=False)
class MLALayer:
    """The projections of one multi-head latent attention layer; all tensors share dtype and device.

    softmax_scale multiplies the scores; inv_freq (fp64, radians per token) and attention_scaling (amplitude
    of cos and sin) describe the rotation of the qk_rope_head_dim / 2 slots. b_UQ, b_QR, b_KR: biases of the queries
    and the rotating keys; b_O: of the output, with what the values' biases add to it. softcap, sinks: see
    modeling/core.py. window: tokens a query sees, itself included. front: the source's attention module, for layers
    whose latent is fed with keys and values. columns: where the slots stand in the model's (cos, sin).
    """

    W_UQ: Float[Tensor, "num_heads qk_nope_head_dim query_inputs"]
    W_QR: Float[Tensor, "num_heads qk_rope_head_dim query_inputs"]
    W_DKV: Float[Tensor, "kv_lora_rank latent_inputs"]
    W_KR: Float[Tensor, "qk_rope_head_dim latent_inputs"]
    W_UK: Float[Tensor, "num_heads qk_nope_head_dim kv_lora_rank"]
    W_UV: Float[Tensor, "num_heads v_head_dim kv_lora_rank"]
    W_O: Float[Tensor, "num_heads hidden_size v_head_dim"]
    inv_freq: Float[Tensor, " slots"]
    softmax_scale: float
    attention_scaling: float = 1.0
    b_UQ: Float[Tensor, "num_heads qk_nope_head_dim"] | None = None
    b_QR: Float[Tensor, "num_heads qk_rope_head_dim"] | None = None
    b_KR: Float[Tensor, " qk_rope_head_dim"] | None = None
    b_O: Float[Tensor, " hidden_size"] | None = None
    softcap: float | None = None
    sinks: Float[Tensor, " num_heads"] | None = None
    window: int | None = None
    front: nn.Module | None = None
    columns: tuple[int, ...] = ()

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
            if f.name.startswith(("W_", "b_", "sinks")) and getattr(self, f.name) is not None
        }
        front = None if self.front is None else copy.deepcopy(self.front).to(device=device, dtype=dtype)
        return replace(self, **moved, front=front, inv_freq=self.inv_freq.to(device=device))


@dataclass(frozen=True, eq=False)
class ConvertedLayer:
    """What is written of a layer. attention: None where it is kept as it was. others: what else changed, by its name
    in the source.
    """

    attention: MLALayer | None
    others: Mapping[str, Tensor] = field(default_factory=dict)


Table = tuple[Float[Tensor, "batch tokens slots"], Float[Tensor, "batch tokens slots"]]


def rotation_table(
    position_ids: Int[Tensor, "batch tokens"], inv_freq: Float[Tensor, " slots"], amplitude: float, dtype: torch.dtype
) -> Table:
    """amplitude * cos and sin of position inv_freq_s. Angles are taken in fp64, then rounded to `dtype`."""
    angle = position_ids.to(torch.float64)[..., None] * inv_freq.to(torch.float64)
    return (amplitude * angle.cos()).to(dtype), (amplitude * angle.sin()).to(dtype)


def rotate(
    x: Float[Tensor, "*batch tokens width"],
    position_ids: Int[Tensor, "batch tokens"],
    inv_freq: Float[Tensor, " slots"],
    amplitude: float = 1.0,
) -> Float[Tensor, "*batch tokens width"]:
    """`turn` by the angles of `position_ids`."""
    return turn(x, rotation_table(position_ids, inv_freq, amplitude, x.dtype))


def source_heads(attention: Any, hidden: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Queries, keys and values [batch, tokens, heads, head_dim] of a family's attention module, not yet rotated.

    Biases are added, queries and keys normalised. Rows are in the order of the source.
    """
    width: int = attention.head_dim
    if hasattr(attention, "qkv_proj"):
        keys = attention.num_key_value_heads * width
        fused = attention.qkv_proj(hidden)
        parts = list(fused.split([fused.shape[-1] - 2 * keys, keys, keys], dim=-1))
    else:
        parts = [attention.q_proj(hidden), attention.k_proj(hidden), attention.v_proj(hidden)]
    for index, name in enumerate(("q_norm", "k_norm")):
        norm = getattr(attention, name, None)
        if norm is not None:
            over_all = norm.weight.numel() == parts[index].shape[-1]
            rows = parts[index] if over_all else parts[index].unflatten(-1, (-1, width))
            parts[index] = norm(rows).reshape(parts[index].shape)
    query, key, value = (part.unflatten(-1, (-1, width)) for part in parts)
    return query, key, value


def keys_values(key: Tensor, value: Tensor) -> Tensor:
    """What feeds the latent of a layer with a front: twice [..., heads, head_dim] -> [..., 2 heads head_dim]."""
    return torch.cat((key.flatten(-2), value.flatten(-2)), dim=-1)


def latent_inputs(layer: MLALayer, hidden: Tensor) -> Tensor:
    """What W_DKV is applied to, [tokens, latent_inputs], from `hidden` [tokens, hidden_size], in its type."""
    if layer.front is None:
        return hidden
    _, key, value = source_heads(layer.front, hidden[None].to(layer.W_DKV.dtype))
    return keys_values(key, value)[0].to(hidden.dtype)


def windowed_mask(tokens: int, window: int | None, device: torch.device) -> Tensor | None:
    """Bool [tokens, tokens], true where a query attends: no later token, and the last `window` ones only."""
    causal = causal_mask(tokens, tokens, device)
    if window is None or window >= tokens or causal is None:
        return causal
    return (causal & ~causal.tril(-window))[None, None]


def attend_expanded(
    layer: MLALayer,
    hidden: Float[Tensor, "batch tokens hidden_size"],
    position_ids: Int[Tensor, "batch tokens"],
    table: Table | None = None,
) -> Float[Tensor, "batch tokens hidden_size"]:
    """Causal attention with keys and values of every head written out (the path of the formulas above).

    `table` is `rotation_table` of position_ids where it is already at hand. Works under autocast.
    """
    nope = layer.W_UQ.shape[1]
    if table is None:
        table = rotation_table(position_ids, layer.inv_freq, layer.attention_scaling, hidden.dtype)
    q_nope, q_pe, c, k_pe = _projected(layer, hidden)
    up = torch.cat((layer.W_UK, layer.W_UV), dim=1)
    heads, v = up.shape[0], layer.W_UV.shape[1]
    kv = (c @ up.flatten(0, 1).T).unflatten(-1, (heads, nope + v)).transpose(1, 2)
    q_pe = turn(q_pe, table).to(kv.dtype)
    k_pe = turn(k_pe, table).to(kv.dtype)[:, None].expand(-1, heads, -1, -1)
    query = torch.cat((q_nope, q_pe), dim=-1)
    key = torch.cat((kv[..., :nope], k_pe), dim=-1)
    mask = windowed_mask(hidden.shape[1], layer.window, hidden.device)
    out = expanded_attention(query, key, kv[..., nope:], layer.softmax_scale, mask, layer.softcap, layer.sinks)
    out = out.transpose(1, 2).flatten(2) @ layer.W_O.transpose(0, 1).flatten(1).T
    return out if layer.b_O is None else out + layer.b_O


def _projected(layer: MLALayer, hidden: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """q_nope, q_pe [batch, heads, tokens, .], c and k_pe [batch, tokens, .], before the rotation."""
    heads, nope = layer.W_UQ.shape[:2]
    rope, rank = layer.qk_rope_head_dim, layer.kv_lora_rank
    if layer.front is not None:
        query, key, value = source_heads(layer.front, hidden)
        rows = torch.cat((layer.W_UQ, layer.W_QR), dim=1)
        q_nope, q_pe = (query.transpose(1, 2) @ rows.transpose(1, 2)).split([nope, rope], dim=-1)
        c, k_pe = (keys_values(key, value) @ torch.cat((layer.W_DKV, layer.W_KR)).T).split([rank, rope], dim=-1)
        return q_nope, q_pe, c, k_pe
    down = torch.cat((layer.W_UQ.flatten(0, 1), layer.W_QR.flatten(0, 1), layer.W_DKV, layer.W_KR))
    flat = (hidden @ down.T).split([heads * nope, heads * rope, rank, rope], dim=-1)
    q_nope, q_pe = (flat[i].unflatten(-1, (heads, width)).transpose(1, 2) for i, width in ((0, nope), (1, rope)))
    c, k_pe = flat[2:]
    if layer.b_UQ is not None and layer.b_QR is not None and layer.b_KR is not None:
        q_nope, q_pe, k_pe = q_nope + layer.b_UQ[:, None], q_pe + layer.b_QR[:, None], k_pe + layer.b_KR
    return q_nope, q_pe, c, k_pe
