"""Caches of latents for transformers' generate: kv_c and k_pe of a token side by side in one growing buffer.

transformers' dynamic layer copies the whole cache for every token (it concatenates); this one copies it once in
as many tokens as a 32nd of it holds, so at most 3 % of the buffer waits unused. Rows lie as [kv_c, k_pe], which
lets attention take key and value from one place.
"""

from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor
from transformers.cache_utils import Cache, DynamicCache, DynamicLayer

_GROWTH = 32  # a full buffer grows by this fraction of its tokens,
_LEAST = 16  # or by so many;
_PAGE = 64  # on a GPU to whole pages, which FlashMLA wants


def room_for(tokens: int, device: torch.device) -> int:
    """Rows of a buffer that must hold `tokens` now and more later."""
    room = tokens + max(_LEAST, tokens // _GROWTH)
    return -(-room // _PAGE) * _PAGE if device.type == "cuda" else room


class LatentLayer(DynamicLayer):
    """A dynamic cache layer over one buffer [batch, capacity, kv_lora_rank + qk_rope_head_dim].

    `keys` and `values` are views of its filled part, [batch, 1, tokens, width], as transformers wants them.
    """

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)  # type: ignore[no-untyped-call]
        self.buffer: Float[Tensor, "batch capacity width"] | None = None

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Take dtype, device and widths from the first states."""
        batch, _, _, rank = key_states.shape
        self.device = key_states.device
        self.buffer = key_states.new_empty(batch, 0, rank + value_states.shape[-1])
        self._show(self.buffer, 0, rank)
        self.is_initialized = True

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Append [batch, 1, new, width] of latents and rotated keys; returns views of all that is cached."""
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        assert self.buffer is not None and self.keys is not None and self.values is not None
        tokens, new, rank = self.keys.shape[2], key_states.shape[2], key_states.shape[3]
        locked = self.buffer.is_inference() and not torch.is_inference_mode_enabled()
        if locked or not self._still_views(tokens):  # reordered, moved or repeated by transformers
            self.buffer = torch.cat((self.keys, self.values), dim=-1)[:, 0]
        if tokens + new > self.buffer.shape[1]:
            room = room_for(tokens + new, self.buffer.device)
            grown = self.buffer.new_empty(self.buffer.shape[0], room, self.buffer.shape[2])
            grown[:, :tokens] = self.buffer[:, :tokens]
            self.buffer = grown
        self.buffer[:, tokens : tokens + new, :rank] = key_states[:, 0]
        self.buffer[:, tokens : tokens + new, rank:] = value_states[:, 0]
        self._show(self.buffer, tokens + new, rank)
        return self.keys, self.values

    def reset(self) -> None:
        """Forget everything, the buffer too."""
        self.buffer = None
        super().reset()

    def _show(self, buffer: Tensor, tokens: int, rank: int) -> None:
        self.keys, self.values = buffer[:, None, :tokens, :rank], buffer[:, None, :tokens, rank:]

    def _still_views(self, tokens: int) -> bool:
        assert self.buffer is not None and self.keys is not None and self.values is not None
        fresh = (
            self.buffer[:, None, :tokens, : self.keys.shape[3]],
            self.buffer[:, None, :tokens, self.keys.shape[3] :],
        )
        return all(
            view.data_ptr() == mine.data_ptr() and view.shape == mine.shape and view.stride() == mine.stride()
            for view, mine in zip((self.keys, self.values), fresh, strict=True)
        )


def adopt(cache: Cache | None, layer_idx: int) -> None:
    """Give a still empty, plain layer of a DynamicCache the latent layout; any other cache stays as it is.

    Not where gradients are recorded or a graph is compiled: both want tensors that are never written again.
    """
    if type(cache) is not DynamicCache or cache.offloading or torch.is_grad_enabled() or torch.compiler.is_compiling():
        return
    if cache.layer_class_to_replicate is DynamicLayer:
        while len(cache.layers) <= layer_idx:
            cache.layers.append(DynamicLayer())
    if layer_idx < len(cache.layers):
        layer = cache.layers[layer_idx]
        if type(layer) is DynamicLayer and not layer.is_initialized:
            cache.layers[layer_idx] = LatentLayer()
