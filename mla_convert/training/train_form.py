"""The latent attention of a model in training, of either format: its names, its latent opened and closed, adapters.

stock keeps the latent behind an RMSNorm with a tiny alpha (see stock.py), which is linear, but badly scaled for an
optimiser and only linear while the latent stays small. In training the norm is removed (c = W_DKV h); `close_latent`
puts it back for whatever W_DKV is then. native has no such norm. All else is the same for both.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from mla_convert.conversion.factor import roots, slot_sizes
from mla_convert.evaluation.scoring import decoder
from mla_convert.formats.stock import LATENT_NORM_EPS, latent_alpha
from mla_convert.modeling.attention import MLAttention

STOCK_DOWN, NATIVE_DOWN, UP, OUT = "kv_a_proj_with_mqa", "kv_a_proj", "kv_b_proj", "o_proj"
FRONT = ("q_proj", "k_proj", "v_proj")  # what feeds a latent that is made of keys and values
OPEN_DIRECTIONS = 1e-6  # eigenvalues of the latent's second moment below this share of the largest are floored
DROPOUTS = ("attention_dropout", "residual_dropout", "embedding_dropout", "dropout", "jitter_noise")


@dataclass(frozen=True, eq=False)
class Latent:
    """One latent attention: its module, the module's name in the model, and its layer's input norm.

    rank, nope, rope: kv_lora_rank, qk_nope_head_dim, qk_rope_head_dim. down: the projection to the latent and the
    rotating key; query: the one whose rows are, head by head, [nope; rope].
    """

    name: str
    attention: Any
    input_norm: Any
    rank: int
    nope: int
    rope: int
    down: str
    query: str

    @property
    def stock(self) -> bool:
        """Whether it is DeepSeek's class."""
        return self.down == STOCK_DOWN

    @property
    def trained(self) -> tuple[str, ...]:
        """The projections of `--train attention`: all that are the conversion's, and what feeds its latent."""
        front = FRONT if not self.stock and self.query not in FRONT else ()
        return (*front, self.query, self.down, UP, OUT)

    @property
    def adapted(self) -> tuple[str, ...]:
        """Those that take adapters: all that are called as linear layers (q_b_proj of a front has rows per head)."""
        return tuple(name for name in self.trained if self.stock or name != "q_b_proj")

    def weight(self, role: str) -> nn.Parameter:
        """The matrix `down`, `query` or UP; without adapters."""
        return getattr(self.attention, role).weight  # type: ignore[no-any-return]


def latents(model: PreTrainedModel) -> list[Latent]:
    """Every latent attention of a stock or native model, in order; layers that were kept have none."""
    found, body = [], decoder(model)
    for index, layer in enumerate(body.layers):  # type: ignore[arg-type]
        attention = layer.self_attn
        place = (f"{model.base_model_prefix}.layers.{index}.self_attn", attention, getattr(layer, "input_layernorm", 0))
        query = "q_proj" if getattr(attention, "q_b_proj", None) is None else "q_b_proj"
        if isinstance(attention, MLAttention):
            shape = attention.shape
            sizes = (shape.kv_lora_rank, shape.qk_nope_head_dim, shape.qk_rope_head_dim)
            found.append(Latent(*place, *sizes, NATIVE_DOWN, query))
        elif hasattr(attention, STOCK_DOWN):
            sizes = (attention.kv_lora_rank, attention.qk_nope_head_dim, attention.qk_rope_head_dim)
            found.append(Latent(*place, *sizes, STOCK_DOWN, query))
    return found


def open_latent(model: PreTrainedModel) -> None:
    """Bring the model into the form that is trained, in place: it computes the same, without dropout.

    stock: the latent norm's gain goes into W_DKV. native: the expanded path, whose projections can carry adapters.
    """
    for module in model.modules():
        for name in DROPOUTS:
            if isinstance(getattr(module, name, None), float):
                setattr(module, name, 0.0)  # the source has none when it teaches
        if isinstance(module, nn.Dropout):
            module.p = 0.0
    for latent in latents(model):
        if not latent.stock:
            latent.attention.path = "expanded"
            continue
        gain = latent.attention.kv_a_layernorm.weight.detach().double() / math.sqrt(LATENT_NORM_EPS)
        _scale_latent(latent, gain)
        latent.attention.kv_a_layernorm = nn.Identity()


@torch.no_grad()
def _scale_latent(latent: Latent, gain: Tensor) -> None:
    linear = getattr(latent.attention, latent.down)
    rows = linear.weight[: latent.rank]
    rows.copy_((rows.double() * gain.to(rows.device)[:, None]).to(rows.dtype))
    if linear.bias is not None:
        linear.bias[: latent.rank] *= gain.to(linear.bias.device, linear.bias.dtype)


def close_latent(model: PreTrainedModel, dtype: torch.dtype) -> None:
    """Undo `open_latent`, in place; of stock as `stock.to_stock` does: alpha follows from W_DKV and the input norm.

    `dtype` is the type that will be stored: the norm's weight is a constant, and what its rounding would change is
    put into W_DKV instead.
    """
    for latent in latents(model):
        if not latent.stock:
            latent.attention.path = "auto"
            continue
        weight, rank = latent.weight(latent.down), latent.rank
        alpha = latent_alpha(weight[:rank].detach().double(), latent.input_norm.weight.detach().double())
        norm = torch.full((rank,), math.sqrt(LATENT_NORM_EPS) / alpha, dtype=torch.float64).to(dtype)
        _scale_latent(latent, math.sqrt(LATENT_NORM_EPS) / norm.double())
        latent.attention.kv_a_layernorm = type(latent.input_norm)(rank, LATENT_NORM_EPS).to(weight.device)
        with torch.no_grad():
            latent.attention.kv_a_layernorm.weight.copy_(norm.to(weight.device, weight.dtype))


@torch.no_grad()
def unit_latent(model: PreTrainedModel, ids: Tensor) -> None:
    """Change the coordinates of what is cached, in place: over ids [windows, tokens] the latent's second moment becomes
    one, and so does each slot's.

    The function stays; one step size then fits all of them. The latent must be open.
    """
    moments: dict[nn.Module, Tensor] = {}

    def add(module: nn.Module, args: tuple[Tensor, ...], out: Tensor) -> None:
        rows = out.flatten(0, -2).double()
        moments[module] = moments.get(module, 0) + rows.T @ rows / (ids.shape[0] * rows.shape[0])

    found = latents(model)
    hooks = [getattr(latent.attention, latent.down).register_forward_hook(add) for latent in found]
    for window in ids:
        decoder(model)(input_ids=window[None].to(model.device), use_cache=False)
    for hook in hooks:
        hook.remove()
    for latent in found:
        linear, rank = getattr(latent.attention, latent.down), latent.rank
        root, inverse = roots(moments[linear][:rank, :rank], OPEN_DIRECTIONS)
        down, up = linear.weight, latent.weight(UP)
        down[:rank] = (inverse @ down[:rank].double()).to(down.dtype)
        up.copy_((up.double() @ root).to(up.dtype))
        size = slot_sizes(moments[linear].diagonal()[rank:]).to(down.dtype)
        down[rank:] /= size[:, None]
        query = getattr(latent.attention, latent.query)
        query.weight.unflatten(0, (-1, latent.nope + latent.rope))[:, latent.nope :] *= size[:, None]
        if linear.bias is not None:
            linear.bias[:rank] = (inverse @ linear.bias[:rank].double()).to(down.dtype)
            linear.bias[rank:] /= size
        if query.bias is not None and latent.query != "q_b_proj":
            query.bias.unflatten(0, (-1, latent.nope + latent.rope))[:, latent.nope :] *= size


def choose_trained(model: PreTrainedModel, train: str, lora_rank: int, seed: int) -> None:
    """Set requires_grad for `train` (attention, layers, all, lora); lora puts adapters into the model.

    The bias of the rotating key never changes: its other rows, those of the latent, mean nothing and must stay zero.
    Nor does a stock query latent, which only carries biases (stock.py): steps of a size for weights would ruin it.
    """
    if train == "lora":
        _add_adapters(model, lora_rank, seed)
    fixed = {f"{latent.name}.{latent.down}.bias" for latent in latents(model)}
    fixed |= {
        f"{latent.name}.{name}"
        for latent in latents(model)
        if latent.stock
        for name in ("q_a_proj.weight", "q_a_proj.bias", "q_a_layernorm.weight")
    }
    everything = {name for name, _ in model.named_parameters()}
    chosen = {
        "attention": _projections(model),
        "layers": _matrices_of_layers(model) - fixed,
        "all": everything - fixed,
        "lora": {name for name in everything if "lora_" in name},
    }[train]
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(name in chosen)


def _add_adapters(model: PreTrainedModel, rank: int, seed: int) -> None:
    from peft import LoraConfig, inject_adapter_in_model

    names = [f"{latent.name}.{name}" for latent in latents(model) for name in latent.adapted]
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        inject_adapter_in_model(LoraConfig(r=rank, lora_alpha=rank, lora_dropout=0.0, target_modules=names), model)


def merge_adapters(model: PreTrainedModel) -> None:
    """Add every adapter to its matrix and put the plain linear layers back, in place; nothing where there are none."""
    for latent in latents(model):
        for name in latent.adapted:
            module = getattr(latent.attention, name)
            if hasattr(module, "base_layer"):
                module.merge()
                setattr(latent.attention, name, module.get_base_layer())


def may_change(model: PreTrainedModel, train: str) -> set[str]:
    """The model's names of the tensors that training or the export may change, adapters merged."""
    if train == "all":
        return {name.replace(".base_layer.", ".") for name, _ in model.named_parameters()} | _norms(model)
    trained = _matrices_of_layers(model) if train == "layers" else _projections(model)
    return trained | biases(model) | _norms(model)


def _projections(model: PreTrainedModel) -> set[str]:
    return {f"{latent.name}.{name}.weight" for latent in latents(model) for name in latent.trained}


def _matrices_of_layers(model: PreTrainedModel) -> set[str]:
    within = f"{model.base_model_prefix}.layers."
    return {name for name, parameter in model.named_parameters() if name.startswith(within) and parameter.ndim > 1}


def _norms(model: PreTrainedModel) -> set[str]:
    return {f"{latent.name}.kv_a_layernorm.weight" for latent in latents(model) if latent.stock}


def biases(model: PreTrainedModel) -> set[str]:
    """Names of the biases that `unit_latent` changes beside the matrices."""
    return {
        f"{latent.name}.{name}.bias"
        for latent in latents(model)
        for name in (latent.query, latent.down)
        if getattr(getattr(latent.attention, name), "bias", None) is not None
    }
