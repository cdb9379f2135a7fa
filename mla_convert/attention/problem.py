"""What an attention call over a latent cache is made of, checked once for all backends."""

from dataclasses import dataclass

import torch
from torch import Tensor

from mla_convert.errors import BadOption


@dataclass(frozen=True, eq=False)
class Problem:
    """The arguments of `latent_attention`, checked; see there for shapes (this file needs torch alone).

    kv_c may be stored in another type than q_latent (int8, fp8); token s of sequence b then means
    scales[b, s] kv_c[b, s], or kv_c itself without scales.
    """

    q_latent: Tensor
    q_pe: Tensor
    kv_c: Tensor
    k_pe: Tensor
    scale: float
    mask: Tensor | None = None
    softcap: float | None = None
    sinks: Tensor | None = None
    scales: Tensor | None = None

    def __post_init__(self) -> None:
        batch, heads, queries, rank = self.q_latent.shape
        rope, tokens = self.q_pe.shape[-1], self.kv_c.shape[1]
        expected = {
            "q_pe": (self.q_pe, (batch, heads, queries, rope)),
            "kv_c": (self.kv_c, (batch, tokens, rank)),
            "k_pe": (self.k_pe, (batch, tokens, rope)),
        }
        for name, (tensor, shape) in expected.items():
            if tuple(tensor.shape) != shape:
                raise BadOption(
                    f"{name} has shape {list(tensor.shape)}, but q_latent {list(self.q_latent.shape)} with "
                    f"{tokens} cached tokens needs {list(shape)}"
                )
        if self.mask is not None and not _broadcasts(self.mask.shape, (batch, heads, queries, tokens)):
            raise BadOption(
                f"mask has shape {list(self.mask.shape)}, which does not broadcast to "
                f"[batch, heads, queries, tokens] = {[batch, heads, queries, tokens]}"
            )
        if self.sinks is not None and tuple(self.sinks.shape) != (heads,):
            raise BadOption(f"sinks has shape {list(self.sinks.shape)}; give one number per head, [{heads}]")
        if self.scales is not None and tuple(self.scales.shape) != (batch, tokens):
            raise BadOption(f"scales has shape {list(self.scales.shape)}; give one per token, {[batch, tokens]}")
        if self.softcap is not None and self.softcap <= 0:
            raise BadOption(f"softcap={self.softcap} must be above 0, or None for no cap")

    @property
    def accumulate(self) -> torch.dtype:
        """Type of sums: fp64 stays, everything else is fp32."""
        return torch.float64 if self.q_latent.dtype == torch.float64 else torch.float32

    def latents(self, start: int, stop: int) -> Tensor:
        """Tokens start..stop of kv_c, [batch, stop - start, kv_lora_rank], in the type of q_latent, scaled."""
        block = self.kv_c[:, start:stop]
        if self.scales is not None:
            block = block.to(self.accumulate) * self.scales[:, start:stop, None].to(self.accumulate)
        return block.to(self.q_latent.dtype)

    @property
    def needs_grad(self) -> bool:
        """Whether the result must carry gradients."""
        tensors = (self.q_latent, self.q_pe, self.kv_c, self.k_pe, self.sinks, self.mask)
        return torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in tensors)


def _broadcasts(shape: torch.Size, target: tuple[int, ...]) -> bool:
    return len(shape) <= 4 and all(a in (1, b) for a, b in zip(reversed(shape), reversed(target), strict=False))


def joined(left: Tensor, right: Tensor) -> Tensor | None:
    """[batch, tokens, r + p] over the same memory if `right` lies directly behind `left` in every row, else None."""
    if left.stride() != right.stride() or left.dtype != right.dtype or left.stride(-1) != 1:
        return None
    behind = left.data_ptr() + left.shape[-1] * left.element_size()
    if behind != right.data_ptr() or left.untyped_storage().data_ptr() != right.untyped_storage().data_ptr():
        return None
    width = left.shape[-1] + right.shape[-1]
    return left.as_strided((*left.shape[:-1], width), left.stride())
