"""One latent attention module for every family; it takes the place of a decoder layer's `self_attn`.

Symbols as in mla_convert/formats/layer.py. Two kinds of input feed the latent and the rotating keys:

    hidden        x_t = h_t. q_t,i = W_Q,i h_t + b_Q,i is merged into the rows of head i in `q_proj`.
    keys_values   x_t = [k_t,1 ... k_t,G ; v_t,1 ... v_t,G], the source's own keys (normalised, not yet rotated) and
                  values. q_proj, k_proj, v_proj and the norms are the source's; `q_b_proj` maps the normalised query of
                  head i to its rows. Exact for whatever the source does to its keys, as c = W_DKV x is linear in x.

    [c_t ; W_KR x_t] = kv_a_proj x_t        cached: c_t (kv_lora_rank) and the rotated keys (qk_rope_head_dim)
    [k_t,i ; v_t,i]  = kv_b_proj c_t        never cached

Rotation uses the (cos, sin) that the family's own model hands to its layers, at the columns `slots`, so every RoPE
type, per-layer frequencies and amplitudes are transformers' own. A slot's rows are interleaved.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from mla_convert.attention.dispatch import latent_attention
from mla_convert.modeling.core import causal_mask, expanded_attention, turn

PATHS = ("auto", "expanded", "absorbed")


@dataclass(frozen=True)
class LatentShape:
    """Sizes of one layer, as config.json's `mla.layers` says them.

    slots: for each of the qk_rope_head_dim / 2 slots the column of cos and sin that turns it. latent_input: "hidden"
    or "keys_values". qkv_bias, o_bias: whether the projections of this layer carry biases.
    """

    kv_lora_rank: int
    qk_nope_head_dim: int
    slots: tuple[int, ...]
    latent_input: str
    qkv_bias: bool
    o_bias: bool

    @classmethod
    def parse(cls, entry: dict[str, Any]) -> "LatentShape":
        """From one entry of `mla.layers`. Raises TypeError for missing or unknown keys."""
        return cls(**{**entry, "slots": tuple(entry["slots"])})

    @property
    def qk_rope_head_dim(self) -> int:
        """Two numbers per slot."""
        return 2 * len(self.slots)


class MLAttention(nn.Module):
    """Latent attention in place of `source`, a family's attention module (its weights are not used).

    Scale, soft cap, sinks, norms and dropout are taken over from `source`. `path` chooses the evaluation: auto takes
    the one with fewer multiplications (training: expanded).
    """

    def __init__(self, source: Any, shape: LatentShape, softcap: float | None = None):
        super().__init__()
        config = source.config
        self.config, self.layer_idx, self.shape = config, source.layer_idx, shape
        self.head_dim: int = source.head_dim
        self.heads: int = source.o_proj.in_features // self.head_dim
        self.groups: int = self.heads // source.num_key_value_groups
        self.scaling: float = source.scaling
        self.softcap = softcap
        self.dropout = float(getattr(source, "attention_dropout", 0.0) or 0.0)
        self.path = "auto"
        hidden, kind = config.hidden_size, source.o_proj.weight.dtype
        nope, rope, rank = shape.qk_nope_head_dim, shape.qk_rope_head_dim, shape.kv_lora_rank

        def linear(width: int, out: int, bias: bool = False) -> nn.Linear:
            return nn.Linear(width, out, bias=bias, device=source.o_proj.weight.device, dtype=kind)

        if shape.latent_input == "hidden":
            self.q_proj = linear(hidden, self.heads * (nope + rope), shape.qkv_bias)
            self.kv_a_proj = linear(hidden, rank + rope, shape.qkv_bias)
        else:
            keys = self.groups * self.head_dim
            self.q_proj = linear(hidden, self.heads * self.head_dim, shape.qkv_bias)
            self.k_proj = linear(hidden, keys, shape.qkv_bias)
            self.v_proj = linear(hidden, keys, shape.qkv_bias)
            self.q_b_proj = linear(self.head_dim, self.heads * (nope + rope))
            self.kv_a_proj = linear(2 * keys, rank + rope)
        self.kv_b_proj = linear(rank, self.heads * (nope + self.head_dim))
        self.o_proj = linear(self.heads * self.head_dim, hidden, shape.o_bias)
        self.q_norm, self.k_norm = getattr(source, "q_norm", None), getattr(source, "k_norm", None)
        if isinstance(getattr(source, "sinks", None), nn.Parameter):
            self.sinks: nn.Parameter | None = nn.Parameter(source.sinks.detach().clone(), source.sinks.requires_grad)
        else:
            self.sinks = None

    def forward(
        self,
        hidden_states: Tensor,
        position_embeddings: Any = None,
        attention_mask: Tensor | None = None,
        cache: Any = None,
        past_key_values: Any = None,
        **_: Any,
    ) -> tuple[Tensor, None]:
        """Attention output [batch, tokens, hidden_size]; the cache gets c and the rotated keys as one head."""
        q_nope, q_pe, kv_c, k_pe = self.project(hidden_states)
        if self.shape.slots:
            cos, sin = (self._columns(table) for table in position_embeddings)
            q_pe, k_pe = turn(q_pe, (cos, sin)), turn(k_pe, (cos, sin))
        cache = past_key_values if cache is None else cache  # renamed in transformers 5.24
        if cache is not None:
            kv_c, k_pe = (part[:, 0] for part in cache.update(kv_c[:, None], k_pe[:, None], self.layer_idx))
        mask = attention_mask
        if mask is None:
            mask = causal_mask(hidden_states.shape[1], kv_c.shape[1], kv_c.device)
        elif mask.dim() == 4:
            mask = mask[..., : kv_c.shape[1]]
        if self.absorbs(q_nope.shape[2], kv_c.shape[1]):
            out = self._absorbed(q_nope, q_pe, kv_c, k_pe, mask)
        else:
            out = self._expanded(q_nope, q_pe, kv_c, k_pe, mask)
        return self.o_proj(out.transpose(1, 2).flatten(2)), None

    def project(self, hidden: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """q_nope and q_pe [batch, heads, tokens, .], c and k_pe [batch, tokens, .], none of them rotated yet."""
        nope, rope, rank = self.shape.qk_nope_head_dim, self.shape.qk_rope_head_dim, self.shape.kv_lora_rank
        if self.shape.latent_input == "hidden":
            query = self.q_proj(hidden).unflatten(-1, (self.heads, nope + rope)).transpose(1, 2)
            down = self.kv_a_proj(hidden)
        else:
            query, rows = self._source_query(hidden), self.q_b_proj.weight.unflatten(0, (self.heads, nope + rope))
            query = query @ rows.transpose(1, 2)
            down = self.kv_a_proj(self.keys_values(hidden))
        q_nope, q_pe = query.split([nope, rope], dim=-1)
        kv_c, k_pe = down.split([rank, rope], dim=-1)
        return q_nope, q_pe, kv_c, k_pe

    def _source_query(self, hidden: Tensor) -> Tensor:
        """The source's queries, normalised, [batch, heads, tokens, head_dim]."""
        query = self.q_proj(hidden)
        return self._normalised(query, self.q_norm).transpose(1, 2)

    def keys_values(self, hidden: Tensor) -> Tensor:
        """x of the module docstring: normalised keys, then values [batch, tokens, 2 groups head_dim]."""
        key = self._normalised(self.k_proj(hidden), self.k_norm).flatten(2)
        return torch.cat((key, self.v_proj(hidden)), dim=-1)

    def _normalised(self, rows: Tensor, norm: Any) -> Tensor:
        """Heads of `rows` [batch, tokens, heads, head_dim], after the norm over each head or over all of them."""
        heads: Tensor = rows.unflatten(-1, (-1, self.head_dim))
        if norm is None:
            return heads
        over_all = norm.weight.numel() == rows.shape[-1]
        normalised: Tensor = norm(rows).view_as(heads) if over_all else norm(heads)
        return normalised

    def absorbs(self, queries: int, keys: int) -> bool:
        """Whether the absorbed path is taken for so many queries and keys."""
        if self.path != "auto" or self.training:
            return self.path == "absorbed"
        rank, rope = self.shape.kv_lora_rank, self.shape.qk_rope_head_dim
        up = self.shape.qk_nope_head_dim + self.head_dim
        # per head: expanding the keys and values, then attending; or going into the latent and back, then attending
        expanded = keys * rank * up + queries * keys * (up + rope)
        return queries * rank * up + queries * keys * (2 * rank + rope) < expanded

    def _up(self) -> tuple[Tensor, Tensor]:
        """W_UK [heads, nope, rank] and W_UV [heads, head_dim, rank]."""
        up = self.kv_b_proj.weight.unflatten(0, (self.heads, -1))
        nope = self.shape.qk_nope_head_dim
        return up[:, :nope], up[:, nope:]

    def _absorbed(self, q_nope: Tensor, q_pe: Tensor, kv_c: Tensor, k_pe: Tensor, mask: Tensor | None) -> Tensor:
        W_UK, W_UV = self._up()
        context = latent_attention(q_nope @ W_UK, q_pe, kv_c, k_pe, self.scaling, mask, self.softcap, self.sinks)
        return context @ W_UV.transpose(1, 2)

    def _expanded(self, q_nope: Tensor, q_pe: Tensor, kv_c: Tensor, k_pe: Tensor, mask: Tensor | None) -> Tensor:
        nope = self.shape.qk_nope_head_dim
        up = self.kv_b_proj(kv_c).unflatten(-1, (self.heads, -1)).transpose(1, 2)
        query = torch.cat((q_nope, q_pe), dim=-1)
        key = torch.cat((up[..., :nope], k_pe[:, None].expand(-1, self.heads, -1, -1)), dim=-1)
        dropout = self.dropout if self.training else 0.0
        return expanded_attention(query, key, up[..., nope:], self.scaling, mask, self.softcap, self.sinks, dropout)

    def _columns(self, table: Tensor) -> Tensor:
        """The slots' columns of cos or sin [batch, tokens, columns]."""
        slots = self.shape.slots
        step = slots[1] - slots[0] if len(slots) > 1 else 1
        if step > 0 and slots == tuple(range(slots[0], slots[0] + step * len(slots), step)):
            return table[..., slots[0] : slots[-1] + 1 : step]
        return table[..., torch.tensor(slots, device=table.device)]

    def extra_repr(self) -> str:
        """Sizes, for print(model)."""
        shape = self.shape
        return f"{shape.kv_lora_rank} + {shape.qk_rope_head_dim} cached, {shape.latent_input}"
