"""Runs windows of tokens through a checkpoint, one layer's weights and the states in memory.

The layers are transformers' own decoder layers, so norms, MLPs, experts and residuals are computed by the reference,
and embedding, rotary tables, masks and logits by the family's own model code run around them; only the attention is
observed (calibration) or replaced by its latent form (held-out checks, healing).
"""

import copy
from collections.abc import Callable
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from transformers import AttentionInterface
from transformers.modeling_outputs import MoeModelOutputWithPast

from mla_convert.formats.layer import MLALayer, attend_expanded
from mla_convert.source.checkpoint import Checkpoint
from mla_convert.source.experts import read_for_class
from mla_convert.source.families import SourceSpec, global_tensors
from mla_convert.source.family_table import FAMILIES
from mla_convert.source.features import EXACT, build_config, build_skeleton, layer_calls
from mla_convert.source.projections import attention_prefix

Hidden = Float[Tensor, "windows tokens hidden_size"]
# One window: (attention input [tokens, hidden_size], rotated queries [num_heads, tokens, head_dim], rotated
# keys and values [num_key_value_heads, tokens, head_dim], softmax scale, bool mask [tokens, tokens] or None: causal)
# -> outputs of the heads [num_heads, tokens, head_dim].
Observer = Callable[[Tensor, Tensor, Tensor, Tensor, float, Tensor | None], Tensor]

OBSERVED = "mla_convert_observed"


def _observed_attention(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Any,
    scaling: float,
    **_: Any,
) -> tuple[Tensor, None]:
    observer, hidden = module.mla_observer, module.mla_input
    mask = None if attention_mask is None else attention_mask[0, 0]
    outputs = [observer(*window, scaling, mask) for window in zip(hidden, query, key, value, strict=True)]
    return torch.stack(outputs).transpose(1, 2), None


AttentionInterface.register(OBSERVED, _observed_attention)


class LatentAttention(nn.Module):
    """Stands in for a decoder layer's attention: the expanded latent form, positions 0, 1, 2, ..."""

    def __init__(self, layer: MLALayer):
        super().__init__()
        self.layer = layer

    def forward(self, hidden_states: Hidden, position_embeddings: Any = None, **_: Any) -> tuple[Hidden, None]:
        """Attention output of every window, and no weights; rotates by the model's own tables where it may."""
        positions = torch.arange(hidden_states.shape[1], device=hidden_states.device)[None]
        table = None
        if self.layer.columns and position_embeddings is not None:
            table = tuple(part[..., list(self.layer.columns)] for part in position_embeddings)
        return attend_expanded(self.layer, hidden_states, positions, table), None


class _Body(nn.Module):
    """Stands for the body of a causal language model whose layers were run elsewhere."""

    def __init__(self, norm: nn.Module, states: Tensor):
        super().__init__()
        self.norm, self.states = norm, states

    def forward(self, **_: Any) -> MoeModelOutputWithPast:
        """The states after the final norm."""
        return MoeModelOutputWithPast(last_hidden_state=self.norm(self.states))


class LayerStream:
    """The source in float32, one layer on `device`; hidden states stay on the CPU and are moved by batch."""

    def __init__(self, checkpoint: Checkpoint, spec: SourceSpec, device: torch.device, batch: int = 4):
        self.checkpoint, self.spec, self.device, self.batch = checkpoint, spec, device, batch
        self.compute = torch.float32  # type of matrix products; the residual stream is float32 in any case
        self.config = build_config(spec.config)
        self.skeleton = build_skeleton(self.config)
        row = FAMILIES[spec.family]
        self.plain = EXACT if row.softcap or row.sinks else "sdpa"
        self._calls: tuple[int, list[dict[str, Any]]] = (0, [])  # of the last window length

    def _weight(self, name: str) -> Tensor:
        return self.checkpoint.tensor(name).to(device=self.device, dtype=torch.float32)

    def _filled(self, module: nn.Module, prefix: str, dtype: torch.dtype = torch.float32) -> nn.Module:
        """A copy of a module of the skeleton with the checkpoint's tensors."""
        config = self.skeleton.config
        filled = copy.deepcopy(module, {id(config): config})  # whose attention implementation `run` sets
        row, state = FAMILIES[self.spec.family], dict[str, Tensor]()
        for name, like in filled.state_dict().items():
            tensor = read_for_class(self.checkpoint, row, prefix + name, tuple(like.shape))
            if tensor is not None:
                state[name] = tensor.to(device=self.device, dtype=torch.float32).to(dtype)
        filled.load_state_dict(state, assign=True)
        return filled.requires_grad_(False).eval()

    @torch.no_grad()
    def embed(self, ids: Int[Tensor, "windows tokens"]) -> Hidden:
        """Hidden states at the input of layer 0, on the CPU."""
        table = copy.deepcopy(self.skeleton.model.embed_tokens)
        weight = self.checkpoint.tensor(global_tensors(self.spec)["embed"]).float()
        table.load_state_dict({"weight": weight}, assign=True)
        if hasattr(table, "scalar_embed_scale"):  # its buffer is on the meta device
            table.embed_scale = torch.tensor(table.scalar_embed_scale)
        parts = [layer_calls(self.skeleton, part, table)[0]["hidden_states"] for part in ids.split(self.batch)]
        return torch.cat(parts).float()

    def load(self, index: int) -> nn.Module:
        """Decoder layer `index` with the source's weights; the previous one is given up by the caller."""
        layer: Any = self._filled(self.skeleton.model.layers[index], self.layer_prefix(index))
        layer.mla_index = index
        return layer  # type: ignore[no-any-return]

    def front(self, index: int) -> nn.Module | None:
        """The attention module of layer `index` in fp64, where the latent is fed with its keys and values."""
        if not self.spec.keys_values:
            return None
        return self._filled(self.skeleton.model.layers[index].self_attn, attention_prefix(index), torch.float64)

    @staticmethod
    def layer_prefix(index: int) -> str:
        """What the names of a layer's tensors begin with."""
        return f"model.layers.{index}."

    def _call(self, layer: nn.Module, tokens: int) -> dict[str, Any]:
        """What the family's model hands to this layer for windows of so many tokens, beside the states."""
        if self._calls[0] != tokens:
            probe = torch.zeros(1, tokens, self.spec.hidden_size, device=self.device)
            self._calls = (tokens, layer_calls(self.skeleton, probe))
        index: int = layer.mla_index  # type: ignore[assignment]
        return {key: value for key, value in self._calls[1][index].items() if key != "hidden_states"}

    def forward(self, layer: nn.Module, states: Hidden, attention: str = EXACT) -> Hidden:
        """The states after `layer`, on the device, products in `compute`; `attention`: transformers' implementation."""
        call = self._call(layer, states.shape[1])
        self.skeleton.config._attn_implementation = attention
        with torch.autocast(self.device.type, dtype=self.compute, enabled=self.compute != torch.float32):
            after: Tensor = layer(states, **call)
        self.skeleton.config._attn_implementation = EXACT
        return after

    @torch.no_grad()
    def run(self, layer: nn.Module, states: Hidden, observer: Observer | None = None) -> Hidden:
        """The states after `layer`; an observer, if given, computes its attention, window by window."""
        handle = None
        if observer is not None:
            attention: Any = layer.self_attn
            attention.mla_observer = observer
            handle = attention.register_forward_pre_hook(_keep_input, with_kwargs=True)
        after = torch.empty_like(states)
        for part, out in zip(states.split(self.batch), after.split(self.batch), strict=True):
            out.copy_(self.forward(layer, part.to(self.device), self.plain if observer is None else OBSERVED))
        if handle is not None:
            handle.remove()
        return after

    @torch.no_grad()
    def nll(self, states: Hidden, ids: Int[Tensor, "windows tokens"]) -> float:
        """Mean negative log-likelihood, nats per predicted token, from the states after the last layer."""
        names = global_tensors(self.spec)
        norm = self._filled(self.skeleton.model.norm, "model.norm.")
        model = copy.deepcopy(self.skeleton)
        model.lm_head = nn.Linear(1, 1, bias=False)
        model.lm_head.weight = nn.Parameter(self._weight(names.get("lm_head", names["embed"])), requires_grad=False)
        total = 0.0
        for state, tokens in zip(states, ids, strict=True):
            model.model = _Body(norm, state[None].to(self.device))
            logits = model(input_ids=tokens[None].to(self.device), use_cache=False).logits[0, :-1].float()
            loss = nn.functional.cross_entropy(logits, tokens[1:].to(self.device), reduction="sum")
            total += loss.double().item()
        return total / (ids.shape[0] * (ids.shape[1] - 1))


def _keep_input(module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    module.mla_input = kwargs.get("hidden_states", args[0] if args else None)
