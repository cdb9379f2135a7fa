"""Absorb the attention of a transformers model, in place: decoding works on the cached latents themselves.

Every stock DeepseekV2/V3 attention becomes a subclass of its class: same parameters, same files on disk, same
caches. A decoded token, and a chunk for which it is cheaper, takes the absorbed path (symbols as in layer.py):

    q_abs_i = W_UK,i^T q_nope_i                                          in place of keys W_UK,i c_s
    context_i = sum_s softmax_s(scale (q_abs_i . c_s + q_pe_i . k_pe_s)) c_s
    out = W_O [W_UV,i context_i]_i                                       in place of values W_UV,i c_s

c_s is what transformers caches: the latent after its RMSNorm (kv_a_layernorm stays where it is). Training, wanted
attention weights and mask types only the stock code knows take the stock path.
"""

import inspect
import logging
import sys
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from mla_convert.attention import latent_attention
from mla_convert.attention.dispatch import BACKENDS
from mla_convert.decoding.absorb_plan import AbsorptionPlan, plan_of
from mla_convert.decoding.latent_cache import adopt
from mla_convert.decoding.quantised_cache import QuantisedLatentLayer
from mla_convert.errors import BadOption, UnsupportedSource

logger = logging.getLogger(__name__)

# model_type -> attention class of transformers.models.<model_type>.modeling_<model_type>
_CLASSES = {"deepseek_v2": "DeepseekV2Attention", "deepseek_v3": "DeepseekV3Attention"}


class AbsorbedAttention(nn.Module):
    """What an absorbed attention adds to its stock class; never built by itself."""

    absorption: AbsorptionPlan  # what was decided, and why
    attention_backend: str
    # Only where merging reads fewer numbers; dropped by `train()`, made again by `eval()`.
    merged_q: Tensor | None
    merged_out: Tensor | None
    # [heads (nope + v), rank], where kv_b_proj is no plain linear layer (quantised, adapted); else None.
    expanded_kv_b: Tensor | None
    # Of the stock class.
    config: Any
    q_proj: Any
    q_a_proj: Any
    q_a_layernorm: Any
    q_b_proj: Any
    kv_a_proj_with_mqa: Any
    kv_a_layernorm: Any
    kv_b_proj: Any
    o_proj: Any
    q_lora_rank: int | None
    kv_lora_rank: int
    qk_nope_head_dim: int
    qk_rope_head_dim: int
    qk_head_dim: int
    v_head_dim: int
    layer_idx: int
    scaling: float
    _merge_on_load: RemovableHandle
    _stock: type[nn.Module]
    _stock_parameters: tuple[str, ...]

    def forward(self, hidden_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor | None]:
        """As the stock forward: ([batch, tokens, hidden_size], None)."""
        bound = {**dict(zip(self._stock_parameters, args, strict=False)), **kwargs}
        cache = bound.get("cache", bound.get("past_key_values"))
        mask = bound.get("attention_mask")
        adopt(cache, self.layer_idx)
        if not self._absorbs(hidden_states, mask, bound):
            return super().forward(hidden_states, *args, **kwargs)  # type: ignore[no-any-return]
        query, q_pe, kv_c, k_pe = self._project(hidden_states, bound["position_embeddings"])
        context = self._attend(query, q_pe, kv_c, k_pe, cache, mask)
        return self._output(context), None

    def _attend(self, query: Tensor, q_pe: Tensor, kv_c: Tensor, k_pe: Tensor, cache: Any, mask: Any) -> Tensor:
        """Cache the new tokens; the context [batch, heads, tokens, rank] of `_project`'s queries."""
        layer = cache.layers[self.layer_idx] if cache is not None and self.layer_idx < len(cache.layers) else None
        if isinstance(layer, QuantisedLatentLayer):
            layer.append(kv_c[:, None], k_pe[:, None])
        elif cache is not None:
            kv_c, k_pe = (states[:, 0] for states in cache.update(kv_c[:, None], k_pe[:, None], self.layer_idx))
        q_latent = query if self.merged_q is not None else _per_head(query, self._up()[0])
        queries = q_latent.shape[2]
        if mask is None and queries > 1:  # transformers' meaning of no mask: causal from the first cached token on
            kv_c, k_pe = kv_c[:, :queries], k_pe[:, :queries]
            mask = torch.ones(queries, queries, dtype=torch.bool, device=kv_c.device).tril()
        if isinstance(layer, QuantisedLatentLayer):
            return layer.attend(q_latent, q_pe, self.scaling, mask, self.attention_backend)
        return latent_attention(q_latent, q_pe, kv_c, k_pe, self.scaling, mask, backend=self.attention_backend)

    def train(self, mode: bool = True) -> "AbsorbedAttention":
        """As nn.Module's; merged matrices go when training starts and are made of the new weights when it ends."""
        super().train(mode)
        self._merge()
        return self

    @torch.no_grad()
    def _merge(self) -> None:
        """Make the merged matrices of the present weights, or drop them while the module trains."""
        plan, on = self.absorption, not self.training
        self.merged_q = self._merged_query() if on and plan.merges_query else None
        self.merged_out = self._merged_output() if on and plan.merges_output else None
        self.expanded_kv_b = None
        if on and type(self.kv_b_proj) is not nn.Linear:
            # Quantised or adapted: its action on the unit vectors is the matrix.
            norm = self.kv_a_layernorm.weight
            unit = torch.eye(self.kv_lora_rank, dtype=norm.dtype, device=norm.device)
            self.expanded_kv_b = self.kv_b_proj(unit).T.contiguous()

    def _merged_query(self) -> Tensor:
        """[heads (rank + rope), inner]: per head W_UK^T W_UQ, then W_QR."""
        last = self.q_proj if self.q_lora_rank is None else self.q_b_proj
        packed = last.weight.view(-1, self.qk_head_dim, last.weight.shape[1])
        nope = self.qk_nope_head_dim
        return torch.cat((self._up()[0].mT @ packed[:, :nope], packed[:, nope:]), dim=1).flatten(0, 1)

    def _merged_output(self) -> Tensor:
        """[hidden_size, heads rank]: W_O,i W_UV,i side by side."""
        w_o: Tensor = self.o_proj.weight.unflatten(1, (-1, self.v_head_dim)).transpose(0, 1)
        return (w_o @ self._up()[1]).transpose(0, 1).flatten(1).contiguous()

    def _absorbs(self, hidden_states: Tensor, mask: Any, bound: dict[str, Any]) -> bool:
        wants_weights = bound.get("output_attentions") or getattr(self.config, "output_attentions", False)
        if self.training or wants_weights or not (mask is None or (isinstance(mask, Tensor) and mask.dim() == 4)):
            return False
        # Merged matrices carry no gradient to what they were made of.
        merged = self.merged_q is not None or self.merged_out is not None
        if merged and torch.is_grad_enabled() and any(p.requires_grad for p in self.parameters()):
            return False
        queries = hidden_states.shape[1]
        tokens = queries if mask is None else mask.shape[-1]  # no mask: a first prompt, or a single query
        return self.absorption.absorbs(queries, tokens, hidden_states.shape[0])

    def _project(self, hidden_states: Tensor, position_embeddings: Any) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Queries [batch, heads, tokens, width] (q_latent if merged, else q_nope; q_pe), kv_c, k_pe [batch, ...]."""
        batch, tokens = hidden_states.shape[:2]
        nope, rope, rank = self.qk_nope_head_dim, self.qk_rope_head_dim, self.kv_lora_rank
        inner, last = hidden_states, self.q_proj
        if self.q_lora_rank is not None:
            inner, last = self.q_a_layernorm(self.q_a_proj(hidden_states)), self.q_b_proj
        if self.merged_q is not None:
            both, width = nn.functional.linear(inner, self.merged_q), rank
        else:
            both, width = last(inner), nope
        query, q_pe = both.view(batch, tokens, -1, width + rope).transpose(1, 2).split([width, rope], dim=-1)
        kv_c, k_pe = self.kv_a_proj_with_mqa(hidden_states).split([rank, rope], dim=-1)
        kv_c = self.kv_a_layernorm(kv_c)
        q_pe, k_pe = self._rotate(q_pe, k_pe[:, None], position_embeddings)
        return query, q_pe, kv_c, k_pe[:, 0]

    def _up(self) -> tuple[Tensor, Tensor]:
        """W_UK [heads, nope, rank] and W_UV [heads, v, rank], views of kv_b_proj."""
        weight = self.kv_b_proj.weight if self.expanded_kv_b is None else self.expanded_kv_b
        packed = weight.view(-1, self.qk_nope_head_dim + self.v_head_dim, self.kv_lora_rank)
        return packed[:, : self.qk_nope_head_dim], packed[:, self.qk_nope_head_dim :]

    def _rotate(self, q_pe: Tensor, k_pe: Tensor, position_embeddings: Any) -> tuple[Tensor, Tensor]:
        """The stock rotation of the model's own module: what it caches and what absorbed queries meet agree."""
        module = sys.modules[self._stock.__module__]
        rotated: tuple[Tensor, Tensor]
        if isinstance(position_embeddings, Tensor):  # DeepSeek-V2: complex numbers
            rotated = module.apply_rotary_emb(q_pe, k_pe, position_embeddings.to(q_pe.device))
        elif getattr(self.config, "rope_interleave", True):
            rotated = module.apply_rotary_pos_emb_interleave(q_pe, k_pe, *position_embeddings)
        else:
            rotated = module.apply_rotary_pos_emb(q_pe, k_pe, *position_embeddings)
        return rotated

    def _output(self, context: Tensor) -> Tensor:
        """o_proj of the heads' values of `context` [batch, heads, tokens, rank]."""
        batch, _, tokens, _ = context.shape
        if self.merged_out is not None:
            flat = context.transpose(1, 2).reshape(batch, tokens, -1)
            return nn.functional.linear(flat, self.merged_out, self.o_proj.bias)
        values = _per_head(context, self._up()[1].mT)
        out: Tensor = self.o_proj(values.transpose(1, 2).reshape(batch, tokens, -1))
        return out


def _per_head(x: Tensor, weight: Tensor) -> Tensor:
    """[batch, heads, tokens, a] times [heads, a, b], head by head; the weights are read once for the whole batch."""
    batch, heads, tokens, _ = x.shape
    rows = x.transpose(0, 1).reshape(heads, batch * tokens, -1)
    if weight.stride(-1) != 1 and weight.dtype != torch.float32 and weight.device.type == "cpu":
        # oneDNN copies a transposed weight first (7 times slower for 32 heads of 128 x 512); transposed rows are small.
        product = torch.bmm(weight.mT, rows.mT).mT
    else:
        product = torch.bmm(rows, weight)
    return product.reshape(heads, batch, tokens, -1).transpose(0, 1)


def absorb_model(model: nn.Module, backend: str = "auto") -> nn.Module:
    """Absorb every stock DeepSeek-V2/V3 attention of `model`, in place; returns `model`.

    Parameters, files and caches stay as they are; where merging is chosen, a merged matrix is kept beside them.
    `backend` as in `latent_attention`. Raises UnsupportedSource if there is no such attention, BadOption if weights
    are not in memory or the backend is unknown.
    """
    if backend not in BACKENDS:
        raise BadOption(f"unknown backend {backend!r}: use one of {', '.join(BACKENDS)}")
    found = [(name, module) for name, module in model.named_modules() if _absorbable(module)]
    if not found:
        raise UnsupportedSource(
            f"{type(model).__name__} has no attention to absorb: that takes {' or '.join(_CLASSES.values())} of "
            "transformers; convert the checkpoint first (mla-convert convert)"
        )
    for name, module in found:
        if module.kv_a_layernorm.weight.device.type == "meta" or next(module.parameters()).device.type == "meta":
            raise BadOption(
                f"{name} has weights on the meta device (offloaded or not loaded): absorb needs them in memory; "
                "load without device_map offloading"
            )
    fresh = not any(isinstance(module, AbsorbedAttention) for _, module in found)
    for _, module in found:
        _absorb_attention(module, backend)
    for plan in dict.fromkeys(str(module.absorption) for _, module in found if fresh):
        logger.debug("absorbed %d attention layers: %s", len(found), plan)
    return model


def absorbable(model: nn.Module) -> bool:
    """Whether `absorb_model` finds an attention to absorb in `model`."""
    return any(_absorbable(module) for module in model.modules())


def restore(model: nn.Module) -> nn.Module:
    """Undo `absorb_model`, in place; returns `model`."""
    for module in model.modules():
        if isinstance(module, AbsorbedAttention):
            for name in ("merged_q", "merged_out", "expanded_kv_b"):
                del module._buffers[name]
            module._merge_on_load.remove()
            del module.absorption, module.attention_backend, module._merge_on_load
            module.__class__ = module._stock  # type: ignore[assignment]
            _point_hooks(module)
    return model


def describe(model: nn.Module) -> str:
    """One line per distinct plan of the absorbed layers: what is merged, which chunks are absorbed."""
    plans = [str(module.absorption) for module in model.modules() if isinstance(module, AbsorbedAttention)]
    return "\n".join(f"{plans.count(plan)} layers: {plan}" for plan in dict.fromkeys(plans))


def _absorbable(module: nn.Module) -> bool:
    cls: type[nn.Module] = module._stock if isinstance(module, AbsorbedAttention) else type(module)
    return cls.__name__ in _CLASSES.values() and cls.__module__.startswith("transformers.models.")


def _absorb_attention(module: Any, backend: str) -> None:
    if not isinstance(module, AbsorbedAttention):
        stock: type[nn.Module] = type(module)
        module.__class__ = _absorbed_class(stock)
        for name in ("merged_q", "merged_out", "expanded_kv_b"):
            module.register_buffer(name, None, persistent=False)
        _point_hooks(module)
        module._merge_on_load = module.register_load_state_dict_post_hook(_merge_again)
    module.absorption = plan_of(module)
    module.attention_backend = backend
    module._merge()


_absorbed_classes: dict[type[nn.Module], type[AbsorbedAttention]] = {}


def _absorbed_class(stock: type[nn.Module]) -> type[AbsorbedAttention]:
    if stock in _absorbed_classes:
        return _absorbed_classes[stock]
    parameters = tuple(inspect.signature(stock.forward).parameters)[2:]  # behind self and hidden_states
    fields = {"_stock": stock, "_stock_parameters": parameters, "__doc__": stock.__doc__}
    _absorbed_classes[stock] = type(f"Absorbed{stock.__name__}", (AbsorbedAttention, stock), fields)
    return _absorbed_classes[stock]


def _merge_again(module: Any, _: object) -> None:
    module._merge()


def _point_hooks(module: Any) -> None:
    """accelerate keeps the bound forward of the class it met; let it call the present one."""
    if "_old_forward" in vars(module):
        module._old_forward = type(module).forward.__get__(module)
