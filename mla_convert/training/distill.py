"""The loss of distillation, over a vocabulary too large to hold logits of a whole text.

Per predicted token, with p the source's and q the model's distribution at temperature T,

    loss = kd_weight T^2 KL(p_T || q_T) + (1 - kd_weight) (-log q_1(next token))        (Hinton et al. 2015, T^2)

Logits are formed a few rows at a time; each block's gradient is taken at once, so no block outlives its turn.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

from mla_convert.evaluation.scoring import LOGIT_BYTES

# Of a block of fp32 logits on a CPU where the head is not trained: larger ones leave the processor's cache, and passes
# over them take five times as long. On a GPU every block reads the head again, and where the head is trained every
# block adds to its gradient, so blocks are as large as memory allows.
BLOCK_BYTES = 16 * 2**20
TINY = 1e-6  # probability outside the kept logits below which it is rounding


@dataclass(frozen=True)
class LossWeights:
    """kd and temperature of the formula above; hidden: weight of the match of the residual stream."""

    kd: float = 1.0
    temperature: float = 1.0
    hidden: float = 0.0


@dataclass(frozen=True, eq=False)
class TopLogits:
    """The k largest logits of every token and logsumexp(all logits / T), all at one temperature T."""

    values: Float[Tensor, "tokens k"]
    index: Int[Tensor, "tokens k"]
    normaliser: Float[Tensor, "tokens"]

    def rows(self, part: slice) -> "TopLogits":
        """Those of a few tokens."""
        return TopLogits(self.values[part], self.index[part], self.normaliser[part])


def top_logits(logits: Tensor, k: int, temperature: float) -> TopLogits:
    """Cut logits [tokens, vocab] down to the k largest."""
    values, index = logits.float().topk(min(k, logits.shape[-1]), dim=-1)
    return TopLogits(values, index, (logits.float() / temperature).logsumexp(-1))


def kl(logits: Tensor, teacher: Tensor | TopLogits, temperature: float) -> Float[Tensor, "tokens"]:
    """KL(p_T || q_T) per token, nats; logits [tokens, vocab] are the model's.

    With TopLogits all other tokens count as one class: a lower bound of the KL, exact in the kept tokens.
    """
    return _kl(_log_probabilities(logits, temperature), teacher, temperature)


def _log_probabilities(logits: Tensor, temperature: float) -> Tensor:
    scaled = logits.float() if temperature == 1 else logits.float() / temperature
    return torch.log_softmax(scaled, dim=-1)


def _kl(logq: Tensor, teacher: Tensor | TopLogits, temperature: float) -> Float[Tensor, "tokens"]:
    if isinstance(teacher, Tensor):
        logp = _log_probabilities(teacher, temperature)
        return (logp.exp() * (logp - logq)).sum(-1)
    logp = teacher.values / temperature - teacher.normaliser[:, None]
    index = teacher.index.long()
    kept = (logp.exp() * (logp - logq.gather(-1, index))).sum(-1)
    rest = (1 - logp.exp().sum(-1)).clamp_min(TINY)
    # -1e30 and not -inf: where every logit is kept the sum is empty and its gradient would be NaN.
    others = logq.scatter(-1, index, -1e30).logsumexp(-1)
    return kept + torch.where(rest > TINY, rest * (rest.log() - others), 0.0)


def chunked_loss(
    hidden: Float[Tensor, "tokens hidden_size"],
    weight: Float[Tensor, "vocab hidden_size"],
    targets: Int[Tensor, "tokens"],
    teacher: Callable[[slice], Tensor | TopLogits],
    weights: LossWeights,
    rows: int | None = None,
    finish: Callable[[Tensor], Tensor] = lambda products: products,
) -> Float[Tensor, "3"]:
    """Mean loss, KL at `weights.temperature` (without T^2) and cross-entropy, nats per token.

    Only the loss can be differentiated, by `hidden` and `weight` (the model's head). teacher(part): the source's
    logits of those tokens; finish: what makes logits of the head's products; rows: tokens per block, by default as many
    as fill BLOCK_BYTES, or LOGIT_BYTES on a GPU and where `weight` is trained.
    """
    size = BLOCK_BYTES if weight.device.type == "cpu" and not weight.requires_grad else LOGIT_BYTES
    rows = rows or max(1, size // (4 * weight.shape[0]))

    def block(h: Tensor, w: Tensor, part: slice) -> tuple[Tensor, Tensor, Tensor]:
        logits = finish(torch.nn.functional.linear(h, w)).float()
        logq = _log_probabilities(logits, weights.temperature)
        with torch.no_grad():
            reference = teacher(part)
        far = _kl(logq, reference, weights.temperature).sum()
        # Passes over the vocabulary are a quarter of a step's time: no second softmax, no gradient of weight 0.
        with torch.set_grad_enabled(weights.kd < 1 and torch.is_grad_enabled()):
            plain = logq if weights.temperature == 1 else _log_probabilities(logits, 1.0)
            ce = torch.nn.functional.nll_loss(plain, targets[part], reduction="sum")
        return weights.kd * weights.temperature**2 * far + (1 - weights.kd) * ce, far, ce

    result: Tensor = _Chunked.apply(hidden, weight, block, rows)  # type: ignore[no-untyped-call]
    return result


class _Chunked(torch.autograd.Function):
    """Sum `block` over rows; gradients are computed in the forward pass, block by block, and kept instead of logits."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, block: Callable[..., Any], rows: int) -> Tensor:
        """Tensor [3]: means of loss, KL, cross-entropy."""
        device = hidden.device.type
        compute = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else hidden.dtype
        needs = ctx.needs_input_grad[:2]
        w = weight.detach().to(compute).requires_grad_(needs[1])  # cast once, not per block
        sums = torch.zeros(3, dtype=torch.float64 if hidden.dtype == torch.float64 else torch.float32, device=device)
        grads = [torch.zeros_like(t) if need else None for t, need in zip((hidden, weight), needs, strict=True)]
        for start in range(0, len(hidden), rows):
            part = slice(start, start + rows)
            h = hidden[part].detach().to(compute).requires_grad_(needs[0])
            with torch.set_grad_enabled(any(needs)):
                parts = block(h, w, part)
            sums += torch.stack([each.detach() for each in parts]).to(sums.dtype)
            if any(needs):
                wanted = [t for t, need in zip((h, w), needs, strict=True) if need]
                found = iter(torch.autograd.grad(parts[0], wanted))
                if grads[0] is not None:
                    grads[0][part] = next(found).to(hidden.dtype)
                if grads[1] is not None:
                    grads[1] += next(found).to(weight.dtype)
        ctx.save_for_backward(*(None if g is None else g / len(hidden) for g in grads))
        return sums / len(hidden)

    @staticmethod
    def backward(ctx: Any, *upstream: Tensor) -> tuple[Tensor | None, ...]:
        """The kept gradients of the loss times its upstream gradient."""
        by_hidden, by_weight = (None if g is None else g * upstream[0][0] for g in ctx.saved_tensors)
        return by_hidden, by_weight, None, None


def hidden_loss(states: list[Tensor], targets: list[Tensor], scales: list[float]) -> Tensor:
    """Mean over layers and tokens of |state / scale - target|^2 / |target|^2; states are [batch, tokens, hidden]."""
    errors = [
        ((state.float() / scale - target.float()).square().sum(-1) / target.float().square().sum(-1)).mean()
        for state, target, scale in zip(states, targets, scales, strict=True)
    ]
    return torch.stack(errors).mean()
