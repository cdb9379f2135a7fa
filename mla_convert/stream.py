"""Runs windows of tokens through a checkpoint, one layer's weights and the states in memory.

The layers are transformers' own decoder layers, so norms, MLPs and residuals are computed by the reference;
only the attention is observed (calibration) or replaced by its latent form (held-out checks, healing).
"""

from collections.abc import Callable
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from transformers import AttentionInterface, AutoConfig, AutoModelForCausalLM

from mla_convert.checkpoint import Checkpoint
from mla_convert.families import SourceSpec, global_tensors, layer_tensors
from mla_convert.layer import MLALayer, attend_expanded

Hidden = Float[Tensor, "windows tokens hidden_size"]
# One window: (attention input [tokens, hidden_size], rotated queries [num_heads, tokens, head_dim], rotated
# keys and values [num_key_value_heads, tokens, head_dim], softmax scale) -> outputs of the heads [num_heads,
# tokens, head_dim].
Observer = Callable[[Tensor, Tensor, Tensor, Tensor, float], Tensor]

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
    outputs = [observer(*window, scaling) for window in zip(hidden, query, key, value, strict=True)]
    return torch.stack(outputs).transpose(1, 2), None


AttentionInterface.register(OBSERVED, _observed_attention)


class LatentAttention(nn.Module):
    """Stands in for a decoder layer's attention: the expanded latent form, positions 0, 1, 2, ..."""

    def __init__(self, layer: MLALayer):
        super().__init__()
        self.layer = layer

    def forward(self, hidden_states: Hidden, **_: Any) -> tuple[Hidden, None]:
        """Attention output of every window, and no weights."""
        positions = torch.arange(hidden_states.shape[1], device=hidden_states.device)[None]
        return attend_expanded(self.layer, hidden_states, positions), None


class LayerStream:
    """The source in float32, one layer on `device`; hidden states stay on the CPU and are moved by batch."""

    def __init__(self, checkpoint: Checkpoint, spec: SourceSpec, device: torch.device, batch: int = 4):
        self.checkpoint, self.spec, self.device, self.batch = checkpoint, spec, device, batch
        self.compute = torch.float32  # type of matrix products; the residual stream is float32 in any case
        config = dict(spec.config)
        self.config = AutoConfig.for_model(config.pop("model_type"), **config)
        with torch.device("meta"):
            self.skeleton = AutoModelForCausalLM.from_config(
                self.config, attn_implementation="sdpa", dtype=torch.float32
            )
        self.rotary = type(self.skeleton.model.rotary_emb)(self.config).to(device)

    def _weight(self, name: str) -> Tensor:
        return self.checkpoint.tensor(name).to(device=self.device, dtype=torch.float32)

    def embed(self, ids: Int[Tensor, "windows tokens"]) -> Hidden:
        """Hidden states at the input of layer 0, on the CPU."""
        table = self.checkpoint.tensor(global_tensors(self.spec)["embed"])
        return nn.functional.embedding(ids, table).float()

    def load(self, index: int) -> nn.Module:
        """Decoder layer `index` with the source's weights; the previous one is given up by the caller."""
        with torch.device("meta"):
            layer: nn.Module = type(self.skeleton.model.layers[0])(self.skeleton.config, index)
        prefix = self.layer_prefix(index)
        state = {name.removeprefix(prefix): self._weight(name) for name in layer_tensors(self.spec, index).values()}
        layer.load_state_dict(state, assign=True)
        return layer.requires_grad_(False).eval()

    @staticmethod
    def layer_prefix(index: int) -> str:
        """What the names of a layer's tensors begin with."""
        return f"model.layers.{index}."

    @torch.no_grad()
    def run(self, layer: nn.Module, states: Hidden, observer: Observer | None = None) -> Hidden:
        """The states after `layer`; an observer, if given, computes its attention, window by window."""
        handle = None
        if observer is not None:
            attention: Any = layer.self_attn
            attention.mla_observer = observer
            handle = attention.register_forward_pre_hook(_keep_input, with_kwargs=True)
        self.skeleton.config._attn_implementation = OBSERVED if observer is not None else "sdpa"
        positions = torch.arange(states.shape[1], device=self.device)[None]
        after = torch.empty_like(states)
        for part, out in zip(states.split(self.batch), after.split(self.batch), strict=True):
            x = part.to(self.device)
            rotation = self.rotary(x, position_ids=positions)
            with torch.autocast(self.device.type, dtype=self.compute, enabled=self.compute != torch.float32):
                out.copy_(layer(x, attention_mask=None, position_ids=positions, position_embeddings=rotation))
        if handle is not None:
            handle.remove()
        return after

    @torch.no_grad()
    def nll(self, states: Hidden, ids: Int[Tensor, "windows tokens"]) -> float:
        """Mean negative log-likelihood, nats per predicted token, from the states after the last layer."""
        names = global_tensors(self.spec)
        norm = type(self.skeleton.model.norm)(self.spec.hidden_size, eps=self.spec.rms_norm_eps)
        norm.weight = nn.Parameter(self._weight(names["final_norm"]), requires_grad=False)
        head = self._weight(names.get("lm_head", names["embed"]))
        total = 0.0
        for state, tokens in zip(states, ids, strict=True):
            logits = norm(state.to(self.device))[:-1] @ head.T
            loss = nn.functional.cross_entropy(logits, tokens[1:].to(self.device), reduction="sum")
            total += loss.double().item()
        return total / (ids.shape[0] * (ids.shape[1] - 1))


def _keep_input(module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    module.mla_input = kwargs.get("hidden_states", args[0] if args else None)
