"""The attention projections of one source layer, whatever its family calls them, in one canonical form.

Canonical rows of a head: the real parts of all rotating pairs, their imaginary parts, then what never rotates. Where
keys and values are not linear in the attention's input h (QK-norm), they themselves are the input: W_K and W_V then
select rows of x = [all keys; all values] and W_Q selects rows of the head's normalised query, so that every later step
computes with matrices as before.
"""

from dataclasses import dataclass, field

import torch
from jaxtyping import Float
from torch import Tensor, nn

from mla_convert.source.checkpoint import Checkpoint
from mla_convert.source.families import SourceSpec
from mla_convert.source.family_table import FAMILIES
from mla_convert.source.features import LayerFacts


@dataclass(frozen=True, eq=False)
class SourceAttention:
    """The fp64 projections of one source layer, rows per head in canonical order.

    b_Q, b_K: biases of queries and keys, where there are any; b_O: the output's, with what the values' biases add
    (attention sums to 1). sinks: one logit per head. front: the attention module with its weights, where x is keys and
    values. facts: see features.py; None: the spec's first layer.
    """

    W_Q: Float[Tensor, "num_heads source_head_dim query_inputs"]
    W_K: Float[Tensor, "num_key_value_heads source_head_dim latent_inputs"]
    W_V: Float[Tensor, "num_key_value_heads source_head_dim latent_inputs"]
    W_O: Float[Tensor, "num_heads hidden_size source_head_dim"]
    b_Q: Float[Tensor, "num_heads source_head_dim"] | None = None
    b_K: Float[Tensor, "num_key_value_heads source_head_dim"] | None = None
    b_O: Float[Tensor, " hidden_size"] | None = None
    sinks: Float[Tensor, " num_heads"] | None = None
    front: nn.Module | None = field(default=None)
    facts: LayerFacts | None = None


def canonical_rows(spec: SourceSpec, layer: int) -> list[int]:
    """For each canonical row of a head its row in the source."""
    rotating = 2 * spec.layers[layer].pairs
    rows = list(range(spec.source_head_dim))
    if FAMILIES[spec.family].interleaved:
        rows[:rotating] = [*range(0, rotating, 2), *range(1, rotating, 2)]
    return rows


def attention_prefix(layer: int) -> str:
    """What the names of a layer's attention tensors begin with."""
    return f"model.layers.{layer}.self_attn."


def attention_names(checkpoint: Checkpoint, layer: int) -> list[str]:
    """Names of all tensors of a layer's attention."""
    return [name for name in checkpoint.headers if name.startswith(attention_prefix(layer))]


def read_projection(checkpoint: Checkpoint, spec: SourceSpec, layer: int, role: str, part: str) -> Tensor | None:
    """The q, k, v or o projection's weight or bias (`part`) in its storage dtype; None where there is none."""
    prefix, d = attention_prefix(layer), spec.source_head_dim
    name = f"{prefix}{role}_proj.{part}"
    if FAMILIES[spec.family].fused_qkv and role != "o":
        name = f"{prefix}qkv_proj.{part}"
        if name not in checkpoint.headers:
            return None
        keys = spec.num_key_value_heads * d
        widths = {"q": spec.num_attention_heads * d, "k": keys, "v": keys}
        parts: tuple[Tensor, ...] = checkpoint.tensor(name).split(list(widths.values()))
        return parts["qkv".index(role)]
    return checkpoint.tensor(name) if name in checkpoint.headers else None


def source_attention(
    checkpoint: Checkpoint, spec: SourceSpec, layer: int, device: torch.device, front: nn.Module | None = None
) -> SourceAttention:
    """The projections of one layer in fp64 on the device; `front` where spec.keys_values (see SourceAttention)."""
    d, heads, groups = spec.source_head_dim, spec.num_attention_heads, spec.num_key_value_heads
    rows = canonical_rows(spec, layer)

    def read(role: str, part: str = "weight") -> Tensor | None:
        tensor = read_projection(checkpoint, spec, layer, role, part)
        return None if tensor is None else tensor.to(device, torch.float64)

    o, b_O = read("o"), read("o", "bias")
    assert o is not None  # the spec compared all names with the class's
    W_O = o.unflatten(1, (heads, d)).transpose(0, 1)
    sinks = None
    if spec.layers[layer].sinks:
        sinks = checkpoint.tensor(f"{attention_prefix(layer)}sinks").to(device, torch.float64)
    if front is not None:
        eye = torch.eye(d, dtype=torch.float64, device=device)[rows]
        all_rows = torch.eye(2 * groups * d, dtype=torch.float64, device=device).unflatten(0, (2 * groups, d))
        return SourceAttention(
            W_Q=eye.expand(heads, d, d),
            W_K=all_rows[:groups, rows],
            W_V=all_rows[groups:],
            W_O=W_O,
            b_O=b_O,
            sinks=sinks,
            front=front,
            facts=spec.layers[layer],
        )
    q, k, v = (read(role) for role in "qkv")
    b_q, b_k, b_v = (read(role, "bias") for role in "qkv")
    assert q is not None and k is not None and v is not None  # likewise
    if b_v is not None:
        per_head = b_v.unflatten(0, (groups, d)).repeat_interleave(heads // groups, 0)
        b_O = torch.einsum("hed,hd->e", W_O, per_head) + (0.0 if b_O is None else b_O)
    return SourceAttention(
        W_Q=q.unflatten(0, (heads, d))[:, rows],
        W_K=k.unflatten(0, (groups, d))[:, rows],
        W_V=v.unflatten(0, (groups, d)),
        W_O=W_O,
        b_Q=None if b_q is None else b_q.unflatten(0, (heads, d))[:, rows],
        b_K=None if b_k is None else b_k.unflatten(0, (groups, d))[:, rows],
        b_O=b_O,
        sinks=sinks,
        facts=spec.layers[layer],
    )
