"""The model in training: the latent without its norm, what of it is trained, adapters, and the way back.

RMSNorm with a tiny alpha (see stock.py) is linear, but badly scaled for an optimiser and only linear while the
latent stays small. In training it is removed (c = W_DKV h); `close_latent` puts it back for whatever W_DKV is then.
"""

import logging
import math
import re
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from mla_convert.distill import LossWeights, TopLogits, chunked_loss, hidden_loss
from mla_convert.factor import roots, slot_sizes
from mla_convert.scoring import decoder, head
from mla_convert.stock import LATENT_NORM_EPS, latent_alpha

logger = logging.getLogger(__name__)

PROJECTIONS = ("q_proj", "kv_a_proj_with_mqa", "kv_b_proj", "o_proj")
OPEN_DIRECTIONS = 1e-6  # eigenvalues of the latent's second moment below this share of the largest are floored


def layers_of(model: PreTrainedModel) -> list[Any]:
    """The decoder layers of a stock DeepSeek model."""
    return list(decoder(model).layers)  # type: ignore[arg-type]


def open_latent(model: PreTrainedModel) -> None:
    """Fold the latent norm's gain into W_DKV and remove the norm, in place."""
    for layer in layers_of(model):
        attention = layer.self_attn
        gain = attention.kv_a_layernorm.weight.detach().double() / math.sqrt(LATENT_NORM_EPS)
        with torch.no_grad():
            rows = attention.kv_a_proj_with_mqa.weight[: len(gain)]
            rows.copy_((rows.double() * gain[:, None]).to(rows.dtype))
        attention.kv_a_layernorm = nn.Identity()


def close_latent(model: PreTrainedModel, dtype: torch.dtype) -> None:
    """Put the latent norm back, in place, as `stock.to_stock` does: alpha follows from W_DKV and the input norm.

    `dtype` is the type that will be stored: the norm's weight is a constant, and what its rounding would change is
    put into W_DKV instead.
    """
    norm_class = type(layers_of(model)[0].input_layernorm)
    for layer in layers_of(model):
        attention = layer.self_attn
        rank = attention.kv_b_proj.in_features
        weight = attention.kv_a_proj_with_mqa.weight
        with torch.no_grad():
            W_DKV = weight[:rank].double()
            alpha = latent_alpha(W_DKV, layer.input_layernorm.weight.double())
            norm = torch.full((rank,), math.sqrt(LATENT_NORM_EPS) / alpha, dtype=torch.float64).to(dtype)
            gain = norm.double() / math.sqrt(LATENT_NORM_EPS)
            weight[:rank] = (W_DKV / gain.to(weight.device)[:, None]).to(weight.dtype)
            attention.kv_a_layernorm = norm_class(rank, LATENT_NORM_EPS).to(weight.device)
            attention.kv_a_layernorm.weight.copy_(norm.to(weight.device, weight.dtype))


@torch.no_grad()
def unit_latent(model: PreTrainedModel, ids: Tensor) -> None:
    """Change the coordinates of what is cached, in place: over ids [windows, tokens] the latent's second moment becomes
    one, and so does each slot's.

    The function stays; one step size then fits all of them. The latent norm must be open.
    """
    moments: dict[nn.Module, Tensor] = {}

    def add(module: nn.Module, args: tuple[Tensor, ...], out: Tensor) -> None:
        rows = out.flatten(0, -2).double()
        moments[module] = moments.get(module, 0) + rows.T @ rows / (ids.shape[0] * rows.shape[0])

    hooks = [layer.self_attn.kv_a_proj_with_mqa.register_forward_hook(add) for layer in layers_of(model)]
    for window in ids:
        decoder(model)(input_ids=window[None].to(model.device), use_cache=False)
    for hook in hooks:
        hook.remove()
    for layer in layers_of(model):
        attention = layer.self_attn
        moment, rank = moments[attention.kv_a_proj_with_mqa], attention.kv_b_proj.in_features
        root, inverse = roots(moment[:rank, :rank], OPEN_DIRECTIONS)
        down, up = attention.kv_a_proj_with_mqa.weight, attention.kv_b_proj.weight
        down[:rank] = (inverse @ down[:rank].double()).to(down.dtype)
        up.copy_((up.double() @ root).to(up.dtype))
        size = slot_sizes(moment.diagonal()[rank:])
        down[rank:] /= size[:, None].to(down.dtype)
        queries = attention.q_proj.weight.unflatten(0, (-1, attention.qk_head_dim))
        queries[:, attention.qk_nope_head_dim :] *= size[:, None].to(down.dtype)


def choose_trained(model: PreTrainedModel, train: str, lora_rank: int, seed: int) -> None:
    """Set requires_grad for `train` (attention, all, lora); lora puts adapters into the model."""
    if train == "lora":
        _add_adapters(model, lora_rank, seed)
    for name, parameter in model.named_parameters():
        attention = re.search(rf"self_attn\.({'|'.join(PROJECTIONS)})\.weight$", name) is not None
        parameter.requires_grad_({"attention": attention, "all": True, "lora": "lora_" in name}[train])


def _add_adapters(model: PreTrainedModel, rank: int, seed: int) -> None:
    from peft import LoraConfig, inject_adapter_in_model

    with torch.random.fork_rng():
        torch.manual_seed(seed)
        inject_adapter_in_model(
            LoraConfig(r=rank, lora_alpha=rank, lora_dropout=0.0, target_modules=list(PROJECTIONS)), model
        )


def merge_adapters(model: PreTrainedModel) -> None:
    """Add every adapter to its matrix and put the plain linear layers back, in place; nothing where there are none."""
    for layer in layers_of(model):
        for name in PROJECTIONS:
            module = getattr(layer.self_attn, name)
            if hasattr(module, "base_layer"):
                module.merge()
                setattr(layer.self_attn, name, module.get_base_layer())


class Student(nn.Module):
    """The model with its loss inside `forward`, where data-parallel wrappers (DDP, FSDP) want it.

    `teacher_head` [vocab, hidden_size] is the source's; residual_scale: factor of the model's residual stream to the
    source's.
    """

    def __init__(self, model: PreTrainedModel, teacher_head: Tensor, weights: LossWeights, residual_scale: float = 1.0):
        super().__init__()
        self.model = model
        self.weights = weights
        self.residual_scale = residual_scale
        self._teacher_head = [teacher_head]  # in a list, so that it is no buffer: never saved, sharded or cast

    def forward(self, input_ids: Tensor, teacher: dict[str, Tensor], judge: bool = False) -> dict[str, Tensor]:
        """Scalars loss, kl and ce (nats per predicted token) of windows [batch, tokens].

        `teacher` holds either hidden [batch, tokens, hidden_size] (and states [layers, batch, tokens, hidden_size]
        where hidden states are matched) or values, index, normaliser (TopLogits per window). judge: plain KL at
        temperature 1.
        """
        weights = LossWeights() if judge else self.weights
        out = decoder(self.model)(input_ids=input_ids, use_cache=False, output_hidden_states=weights.hidden > 0)
        hidden = out.last_hidden_state[:, :-1].flatten(0, 1)
        targets = input_ids[:, 1:].flatten()
        sums = chunked_loss(hidden, head(self.model).weight, targets, self._reference(teacher, hidden.dtype), weights)
        loss = sums[0]
        if weights.hidden > 0:
            states = list(out.hidden_states[1:])
            scales = [self.residual_scale] * (len(states) - 1) + [1.0]  # the last one is behind the final norm
            loss = loss + weights.hidden * hidden_loss(states, list(teacher["states"]), scales)
        return {"loss": loss, "kl": sums[1].detach(), "ce": sums[2].detach()}

    def _reference(self, teacher: dict[str, Tensor], dtype: torch.dtype) -> Any:
        if "values" in teacher:
            top = TopLogits(*(teacher[key][:, :-1].flatten(0, 1) for key in ("values", "index", "normaliser")))
            return top.rows
        states, weight = teacher["hidden"][:, :-1].flatten(0, 1), self._teacher_head[0]
        return lambda part: torch.nn.functional.linear(states[part].to(weight.dtype), weight)
