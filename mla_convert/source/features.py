"""What transformers' own classes say of a source's attention, layer by layer, without any of its weights.

The model is built on the meta device; its body then runs once with its layers replaced by recorders, which shows what
rotary tables and masks the family's code hands to each layer. Nothing of it is computed a second way here.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface, AutoConfig, AutoModelForCausalLM
from transformers.masking_utils import sdpa_mask

from mla_convert.errors import UnsupportedSource
from mla_convert.modeling.core import causal_mask, expanded_attention
from mla_convert.source.family_table import FAMILIES, Family

EXACT = "mla_convert_exact"  # attention with soft caps and sinks, for every family, no fused kernel needed
LAYER_TYPES = ("full_attention", "sliding_attention")


@dataclass(frozen=True, eq=False)
class LayerFacts:
    """The attention of one source layer beside its projections.

    inv_freq: fp64 [pairs], radians per token, empty where the layer does not rotate. attention_scaling: amplitude of
    cos and sin. columns: where pair l stands in (cos, sin). softmax_scale: factor of the scores. softcap, window
    (tokens a query sees, itself included): None where there is none. sinks: whether heads have sink logits.
    """

    inv_freq: Tensor
    attention_scaling: float
    columns: tuple[int, ...]
    softmax_scale: float
    softcap: float | None
    window: int | None
    sinks: bool

    @property
    def pairs(self) -> int:
        """Pairs of a head that rotate."""
        return len(self.columns)


def _exact_attention(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float,
    dropout: float = 0.0,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    **_: Any,
) -> tuple[Tensor, None]:
    """The attention of any family here, as transformers' AttentionInterface wants it."""
    groups = query.shape[1] // key.shape[1]
    key, value = key.repeat_interleave(groups, 1), value.repeat_interleave(groups, 1)
    mask = causal_mask(query.shape[2], key.shape[2], key.device) if attention_mask is None else attention_mask
    out = expanded_attention(query, key, value, scaling, mask, softcap, s_aux, dropout)
    return out.transpose(1, 2).contiguous(), None


AttentionInterface.register(EXACT, _exact_attention)
AttentionMaskInterface.register(EXACT, sdpa_mask)


class _Recorder(nn.Module):
    """Stands for a decoder layer: keeps what it is called with, changes nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: dict[str, Any] = {}

    def forward(self, hidden_states: Tensor, **kwargs: Any) -> Tensor:
        """The hidden states as they came."""
        self.seen = {**kwargs, "hidden_states": hidden_states}
        return hidden_states


def build_config(raw: dict[str, Any]) -> Any:
    """The config object of config.json. Raises UnsupportedSource with what its class says against it."""
    values = {key: value for key, value in raw.items() if key != "model_type"}
    if "num_key_value_heads" in values and values["num_key_value_heads"] is None:  # some classes insist on a number
        values["num_key_value_heads"] = values["num_attention_heads"]
    try:
        return AutoConfig.for_model(raw["model_type"], **values)
    except Exception as error:  # strict dataclasses and rope checks raise classes of their own
        lines = " ".join(str(error).split())
        raise UnsupportedSource(
            f"config.json: {raw['model_type']} cannot be built from it: {lines}; correct it."
        ) from error


def build_skeleton(config: Any) -> Any:
    """The causal language model of `config` on the meta device, float32, attention EXACT.

    Raises UnsupportedSource where its class cannot be built, or has layers of kinds that are not converted.
    """
    layer_windows(config)
    try:
        with torch.device("meta"):
            return AutoModelForCausalLM.from_config(config, attn_implementation=EXACT, dtype=torch.float32)
    except Exception as error:  # whatever the classes raise of settings that contradict each other
        raise UnsupportedSource(
            f"config.json: no model can be built from it ({type(error).__name__}: {error}); correct it."
        ) from error


def layer_calls(skeleton: Any, inputs: Tensor, embed: nn.Module | None = None) -> list[dict[str, Any]]:
    """The keyword arguments and `hidden_states` with which the body calls each of its layers, without weights.

    inputs: embeddings [batch, tokens, hidden_size], or token ids [batch, tokens] for `embed`, the embedding module with
    its weights.
    """
    body, device = skeleton.model, inputs.device
    layers, norm, table, rotary = body.layers, body.norm, body.embed_tokens, body.rotary_emb
    recorders = [_Recorder() for _ in layers]
    try:
        body.layers, body.norm, body.embed_tokens = nn.ModuleList(recorders), nn.Identity(), embed
        body.rotary_emb = type(rotary)(skeleton.config).to(device)
        named = {"inputs_embeds": inputs} if embed is None else {"input_ids": inputs}
        with torch.no_grad():
            body(**named, use_cache=False)
    finally:
        body.layers, body.norm, body.embed_tokens, body.rotary_emb = layers, norm, table, rotary
    return [recorder.seen for recorder in recorders]


def layer_facts(skeleton: Any, family: str) -> tuple[LayerFacts, ...]:
    """What is known of each layer. Raises UnsupportedSource for layer types and rotations that are not converted."""
    row, config = FAMILIES[family], skeleton.config
    windows = layer_windows(config)
    hidden = torch.zeros(1, 2, config.hidden_size)
    try:
        calls = layer_calls(skeleton, hidden)
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise UnsupportedSource(
            f"config.json: rope_parameters={config.rope_parameters!r} give no rotation in {type(config).__name__} "
            f"({type(error).__name__}: {error}); correct them."
        ) from error
    facts = []
    for layer, call, window in zip(skeleton.model.layers, calls, windows, strict=True):
        attention = layer.self_attn
        columns, inv_freq, amplitude = _rotation(row, attention, call["position_embeddings"])
        turned = 2 * len(columns)
        if turned > attention.head_dim or (columns and turned < attention.head_dim and not row.partial_rotary):
            raise UnsupportedSource(
                f"config.json: {turned} dimensions rotate of heads that are {attention.head_dim} wide, which "
                f"{type(config).__name__} does not do; correct partial_rotary_factor or head_dim."
            )
        facts.append(
            LayerFacts(
                inv_freq=inv_freq,
                attention_scaling=amplitude,
                columns=columns,
                softmax_scale=float(attention.scaling),
                softcap=row.softcap_of(attention),
                window=window,
                sinks=row.sinks,
            )
        )
    return tuple(facts)


def layer_windows(config: Any) -> list[int | None]:
    """Tokens a query sees, per layer; None: all. Raises UnsupportedSource for other kinds of layers."""
    layers, types = config.num_hidden_layers, getattr(config, "layer_types", None)
    window = getattr(config, "sliding_window", None)
    if types is None:
        return [window] * layers
    if len(types) != layers or any(kind not in LAYER_TYPES for kind in types):
        raise UnsupportedSource(
            f"config.json: layer_types={types!r} must name {layers} layers, each one of {', '.join(LAYER_TYPES)}; "
            "other kinds of layers are not converted."
        )
    if "sliding_attention" in types and not window:
        raise UnsupportedSource(
            f"config.json: layer_types name sliding layers, but sliding_window={window!r}; set it, or make all layers "
            "full_attention."
        )
    return [window if kind == "sliding_attention" else None for kind in types]


def _rotation(row: Family, attention: Any, tables: tuple[Tensor, Tensor]) -> tuple[tuple[int, ...], Tensor, float]:
    """Columns, frequencies and amplitude from the tables of positions 0 and 1, [1, 2, columns] each."""
    if row.nope is not None and not getattr(attention, row.nope):
        return (), torch.zeros(0, dtype=torch.float64), 1.0
    cos, sin = (table[0].double() for table in tables)
    width = cos.shape[-1]
    columns = {
        "halves": range(width // 2),
        "interleaved": range(0, width, 2),
        "single": range(width),
    }[row.tables]
    at = list(columns)
    # The fastest pair turns by one radian per token, so the angle at position 1 is not ambiguous.
    return tuple(at), torch.atan2(sin[1, at], cos[1, at]), float(cos[0, 0])
