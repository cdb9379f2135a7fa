"""A cache of latents in one byte per number, for generate with an absorbed model.

kv_c is kept as int8 or fp8 (e4m3), x = scale q, with one scale per token, or one per channel taken from the first
tokens that come; rotating keys stay in bf16, since their error grows with the distance they are turned by. Per token
and layer that is

    kv_lora_rank + 2 qk_rope_head_dim (+ 4, the scale, per token) bytes

and, per sequence and layer, 4 kv_lora_rank once where scales are per channel. The absorbed path reads the bytes as
they are; transformers' expanded path gets them dequantised.
"""

from __future__ import annotations

from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor
from transformers import PreTrainedConfig
from transformers.cache_utils import Cache, DynamicLayer

from mla_convert.attention.dispatch import run
from mla_convert.attention.problem import Problem
from mla_convert.decoding.latent_cache import room_for
from mla_convert.errors import BadOption

# Largest magnitude of each storage type.
_LARGEST = {torch.int8: 127.0, torch.float8_e4m3fn: 448.0}
_NAMES = {"int8": torch.int8, "fp8": torch.float8_e4m3fn}
# Channel scales come from the first tokens; later ones may be larger by this factor before they saturate.
_HEADROOM = 1.5


class QuantisedLatentLayer(DynamicLayer):
    """One layer. `keys` are the stored latents [batch, 1, tokens, kv_lora_rank], `values` the rotating keys."""

    def __init__(self, dtype: torch.dtype, scales: str, rope_dtype: torch.dtype) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.storage, self.per_channel, self.rope_dtype = dtype, scales == "channel", rope_dtype
        self.rows: list[Tensor] = []  # [batch, capacity, width]: latents, rotating keys, token scales
        self.channel_scales: Float[Tensor, "batch 1 kv_lora_rank"] | None = None
        self.tokens = 0

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Take device, widths and compute type from the first states, and channel scales from their values."""
        batch, _, _, rank = key_states.shape
        self.device, self.compute = key_states.device, key_states.dtype
        self.rows = [
            key_states.new_empty(batch, 0, rank, dtype=self.storage),
            value_states.new_empty(batch, 0, value_states.shape[3], dtype=self.rope_dtype),
        ]
        if self.per_channel:
            largest = key_states[:, 0].float().abs().amax(1, keepdim=True)
            self.channel_scales = (_HEADROOM * largest / _LARGEST[self.storage]).clamp_min(1e-12)
        else:
            self.rows.append(key_states.new_empty(batch, 0, 1, dtype=torch.float32))
        self.is_initialized = True

    def append(self, key_states: Tensor, value_states: Tensor) -> None:
        """Quantise and keep [batch, 1, new, width] of latents and rotated keys."""
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        latents, stop = key_states[:, 0].float(), self.tokens + key_states.shape[2]
        scales = self.channel_scales
        if scales is None:
            scales = (latents.abs().amax(-1, keepdim=True) / _LARGEST[self.storage]).clamp_min(1e-12)
        new = [_stored(latents / scales, self.storage), value_states[:, 0].to(self.rope_dtype), scales]
        for index, kept in enumerate(self.rows):
            if stop > kept.shape[1]:
                grown = kept.new_empty(kept.shape[0], room_for(stop, kept.device), kept.shape[2])
                grown[:, : self.tokens] = kept[:, : self.tokens]
                self.rows[index] = grown
            self.rows[index][:, self.tokens : stop] = new[index]
        self._show(stop)

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Append, and return all latents and rotating keys in the compute type: the expanded path's interface."""
        self.append(key_states, value_states)
        latents, rotating = (kept[:, : self.tokens] for kept in self.rows[:2])
        scales = self.rows[2][:, : self.tokens] if self.channel_scales is None else self.channel_scales
        return (latents.float() * scales).to(self.compute)[:, None], rotating.to(self.compute)[:, None]

    def attend(
        self,
        q_latent: Float[Tensor, "batch num_heads queries kv_lora_rank"],
        q_pe: Float[Tensor, "batch num_heads queries qk_rope_head_dim"],
        scale: float,
        mask: Tensor | None,
        backend: str,
    ) -> Float[Tensor, "batch num_heads queries kv_lora_rank"]:
        """`latent_attention` over the stored bytes."""
        latents, rotating = (kept[:, : self.tokens] for kept in self.rows[:2])
        if self.channel_scales is None:
            scales = self.rows[2][:, : self.tokens, 0]
            return run(Problem(q_latent, q_pe, latents, rotating, scale, mask, scales=scales), backend)
        channels = self.channel_scales[:, None].to(q_latent.dtype)  # sum_r q_r (s_r c_r) = sum_r (q_r s_r) c_r
        return run(Problem(q_latent * channels, q_pe, latents, rotating, scale, mask), backend) * channels

    def get_seq_length(self) -> int:
        """Tokens cached."""
        return self.tokens

    def nbytes(self) -> int:
        """Bytes of the filled part, scales included."""
        filled = sum(int(kept[:, : self.tokens].nbytes) for kept in self.rows)
        return filled + (0 if self.channel_scales is None else self.channel_scales.nbytes)

    def crop(self, tokens_to_remove: int) -> None:
        """Forget the last -tokens_to_remove tokens; a positive number is the length to keep (older transformers)."""
        if self.is_initialized:
            self._show(min(self.tokens, tokens_to_remove) if tokens_to_remove > 0 else self.tokens + tokens_to_remove)

    def reset(self) -> None:
        """Forget everything, channel scales too."""
        self.rows, self.channel_scales, self.tokens = [], None, 0
        super().reset()

    def reorder_cache(self, beam_idx: torch.LongTensor) -> None:
        """Take the sequences `beam_idx`."""
        self._take(beam_idx)

    def batch_select_indices(self, indices: Tensor) -> None:
        """Keep the sequences `indices`."""
        self._take(indices)

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Repeat each sequence."""
        if self.is_initialized:
            batch = self.rows[0].shape[0]
            self._take(torch.arange(batch, device=self.device).repeat_interleave(repeats))

    def _take(self, indices: Tensor) -> None:
        if self.is_initialized:
            indices = indices.to(self.device)
            # fp8 has no index_select everywhere; its bytes have
            self.rows = [kept.view(_bits(kept))[indices].view(kept.dtype) for kept in self.rows]
            if self.channel_scales is not None:
                self.channel_scales = self.channel_scales[indices]
            self._show(self.tokens)

    def _show(self, tokens: int) -> None:
        self.tokens = tokens
        self.keys, self.values = (kept[:, None, :tokens] for kept in self.rows[:2])


class QuantisedLatentCache(Cache):
    """Pass it to generate: `model.generate(..., past_key_values=QuantisedLatentCache(model.config))`.

    dtype: int8 or fp8 (e4m3); scales: token (default) or channel; rope_dtype: the type of rotating keys.
    Raises BadOption for other names and for a model without latents.
    """

    def __init__(
        self,
        config: PreTrainedConfig,
        dtype: str = "int8",
        scales: str = "token",
        rope_dtype: torch.dtype = torch.bfloat16,
    ) -> None:
        if dtype not in _NAMES:
            raise BadOption(f"dtype={dtype!r} of a quantised cache: use one of {', '.join(_NAMES)}")
        if scales not in ("token", "channel"):
            raise BadOption(f"scales={scales!r} of a quantised cache: use token or channel")
        rank, rope = getattr(config, "kv_lora_rank", None), getattr(config, "qk_rope_head_dim", None)
        if rank is None or rope is None:
            raise BadOption(f"{type(config).__name__} has no kv_lora_rank: only latents are quantised; convert first")
        layers = config.num_hidden_layers
        self._fixed = layers * (4 * rank if scales == "channel" else 0)
        self._per_token = layers * (rank + rope * rope_dtype.itemsize + (4 if scales == "token" else 0))
        super().__init__(layers=[QuantisedLatentLayer(_NAMES[dtype], scales, rope_dtype) for _ in range(layers)])

    def formula(self, batch: int, tokens: int) -> int:
        """Bytes of `tokens` cached tokens of `batch` sequences, over all layers."""
        return int(batch * (tokens * self._per_token + self._fixed))

    def nbytes(self) -> int:
        """Bytes that the filled part really takes."""
        return sum(layer.nbytes() for layer in self.layers if isinstance(layer, QuantisedLatentLayer))


def _stored(scaled: Tensor, dtype: torch.dtype) -> Tensor:
    limit = _LARGEST[dtype]
    return (scaled.round() if dtype == torch.int8 else scaled).clamp(-limit, limit).to(dtype)


def _bits(tensor: Tensor) -> torch.dtype:
    return torch.uint8 if tensor.dtype == torch.float8_e4m3fn else tensor.dtype
