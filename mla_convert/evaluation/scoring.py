"""Scoring: hidden states of one model over windows of tokens, and the comparison of two models' predictions.

No logits of a whole text are ever held: the hidden states of the scored positions are kept (hidden_size
numbers per token) and the logits are formed from them a few rows at a time.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import nn
from transformers import PreTrainedModel

from mla_convert.errors import BadOption, UnsupportedSource

logger = logging.getLogger(__name__)

# One block of fp32 logits; comparing two models holds about eight of them at a time. glibc maps allocations above
# 32 MiB one by one and gives them back; smaller blocks fragmented its heap (11 GiB where 1.5 GiB do).
LOGIT_BYTES = 64 * 2**20


@dataclass(frozen=True, eq=False)
class Windows:
    """Token windows and what of them is scored.

    ids: int64 [windows, window]. mask: bool [windows, window], False where a position is padding.
    scored: bool [windows, window - 1]; scored[w, t] says that the prediction of token t + 1 of window w
    counts.
    """

    ids: torch.Tensor
    mask: torch.Tensor
    scored: torch.Tensor

    @property
    def targets(self) -> torch.Tensor:
        """The tokens predicted, int64 [tokens scored], window by window."""
        return self.ids[:, 1:][self.scored]


@dataclass(frozen=True, eq=False)
class TokenScores:
    """Per scored token, fp64 [tokens scored]: nll (nats) and, beside a reference, its nll, the KL and
    top-1.
    """

    nll: torch.Tensor
    reference_nll: torch.Tensor | None = None
    kl: torch.Tensor | None = None
    top1_agrees: torch.Tensor | None = None


def full_windows(ids: torch.Tensor, stride: int | None = None) -> Windows:
    """Windows [windows, window] without padding that start `stride` text tokens apart (None: no overlap).

    Every window but the first scores its last `stride` tokens only, so no token is scored twice; each keeps
    at least window - stride tokens of context. The first token of a window without overlap has no context and
    is not scored.
    """
    mask = torch.ones_like(ids, dtype=torch.bool)
    scored = torch.ones_like(ids[:, 1:], dtype=torch.bool)
    if stride is not None:
        scored[1:, : max(ids.shape[1] - stride - 1, 0)] = False
    return Windows(ids, mask, scored)


def padded_windows(sequences: Sequence[torch.Tensor], pad_id: int = 0, side: str = "right") -> Windows:
    """Sequences of different lengths, each int64 [tokens], padded on `side` to the longest. Padding is not
    scored.

    The mask follows from the lengths, never from the padding id, which may be an ordinary token (0 often is).
    """
    if side not in ("left", "right"):
        raise BadOption(f'side="{side}" is neither "left" nor "right"')
    longest = max(len(sequence) for sequence in sequences)
    ids = torch.full((len(sequences), longest), pad_id, dtype=torch.int64)
    mask = torch.zeros_like(ids, dtype=torch.bool)
    for row, sequence in enumerate(sequences):
        where = slice(0, len(sequence)) if side == "right" else slice(longest - len(sequence), longest)
        ids[row, where] = sequence
        mask[row, where] = True
    return Windows(ids, mask, mask[:, 1:] & mask[:, :-1])


def padded_inputs(ids: torch.Tensor, mask: torch.Tensor, device: torch.device) -> dict[str, torch.Tensor]:
    """Keyword arguments of a stock forward; mask and positions are left out where nothing is padded."""
    inputs = {"input_ids": ids.to(device)}
    if not bool(mask.all()):
        inputs["attention_mask"] = mask.to(device, torch.int64)
        # positions count real tokens, so that left padding does not move the rotation
        inputs["position_ids"] = (mask.cumsum(1) - 1).clamp(min=0).to(device)
    return inputs


@torch.inference_mode()
def hidden_states(
    model: PreTrainedModel,
    windows: Windows,
    batch_size: int,
    advance: Callable[[int], None] = lambda tokens: None,
) -> torch.Tensor:
    """Output of the final norm at the scored positions, [tokens scored, hidden_size] in the model's dtype, on
    CPU.

    Runs the stock decoder on `batch_size` windows at a time; `advance` is called with the tokens of each
    batch. Raises BadOption for a token outside the vocabulary.
    """
    body = decoder(model)
    vocab = head(model).weight.shape[0]
    if int(windows.ids.max()) >= vocab:
        raise BadOption(
            f"token id {int(windows.ids.max())} is outside the {vocab} of {model.name_or_path}; "
            "evaluate models of one tokenizer together"
        )
    kept: list[torch.Tensor] = []
    parts = [torch.split(each, batch_size) for each in (windows.ids, windows.mask, windows.scored)]
    for ids, mask, scored in zip(*parts, strict=True):
        out = body(**padded_inputs(ids, mask, model.device), use_cache=False).last_hidden_state
        kept.append(out[:, :-1][scored.to(out.device)].cpu())
        advance(int(mask.sum()))
    return torch.cat(kept)


def decoder(model: PreTrainedModel) -> nn.Module:
    """The model without its language-model head."""
    body = getattr(model, model.base_model_prefix)
    assert isinstance(body, nn.Module)
    return body


@dataclass(frozen=True, eq=False)
class Head:
    """From final hidden states to logits: softcap tanh(scale (W h + b) / softcap), without tanh where softcap is None.

    weight [vocab, hidden_size] and bias [vocab] are the model's own parameters.
    """

    weight: torch.Tensor
    bias: torch.Tensor | None = None
    scale: float = 1.0
    softcap: float | None = None

    def to(self, dtype: torch.dtype) -> Head:
        """The same map in `dtype`, cut off from training."""
        bias = None if self.bias is None else self.bias.detach().to(dtype)
        return replace(self, weight=self.weight.detach().to(dtype), bias=bias)

    def __call__(self, hidden: torch.Tensor) -> torch.Tensor:
        """Logits [..., vocab] of hidden states [..., hidden_size]."""
        return self.finish(nn.functional.linear(hidden, self.weight, self.bias))

    def finish(self, products: torch.Tensor) -> torch.Tensor:
        """Logits from W h + b."""
        logits = products if self.scale == 1 else products * self.scale
        return logits if self.softcap is None else torch.tanh(logits / self.softcap) * self.softcap


def head(model: PreTrainedModel) -> Head:
    """The language-model head and what the class does after it. Raises UnsupportedSource where it is no linear map."""
    lm_head, config = getattr(model, "lm_head", None), model.config
    if not isinstance(lm_head, nn.Linear):
        raise UnsupportedSource(
            f"{type(model).__name__}: its head is {type(lm_head).__name__}, not a linear map; it cannot be scored"
        )
    # Granite divides, Cohere multiplies, Gemma 2 caps.
    scale = float(getattr(config, "logit_scale", None) or 1) / float(getattr(config, "logits_scaling", None) or 1)
    return Head(lm_head.weight, lm_head.bias, scale, getattr(config, "final_logit_softcapping", None))


@torch.inference_mode()
def score(
    lm_head: Head | nn.Linear,
    hidden: torch.Tensor,
    targets: torch.Tensor,
    reference: tuple[Head | nn.Linear, torch.Tensor] | None = None,
) -> TokenScores:
    """Negative log-likelihood of `targets` [tokens] given `hidden` [tokens, hidden_size]; nats, fp64 sums.

    With `reference` = (its head, its hidden states) also KL(reference || model) per token, written as
    sum_v p log(p/q) - p + q, which equals KL for normalised p and q, has no negative term, and does not see
    the rounding of the two normalisers; and whether both models rank the same token first.
    """
    columns: list[list[torch.Tensor]] = [[], [], [], []]
    rows = max(1, LOGIT_BYTES // (4 * lm_head.weight.shape[0]))
    for start in range(0, len(targets), rows):
        part = slice(start, start + rows)
        target = targets[part].to(lm_head.weight.device)
        logp = _log_probs(lm_head, hidden[part])
        columns[0].append(-logp.gather(1, target[:, None])[:, 0].double())
        if reference is None:
            continue
        logr = _log_probs(reference[0], reference[1][part]).to(logp.device)
        if logr.shape != logp.shape:
            raise BadOption(f"vocabulary of {logp.shape[1]}, reference {logr.shape[1]}; KL needs one vocabulary")
        columns[1].append(-logr.gather(1, target[:, None])[:, 0].double())
        columns[3].append((logp.argmax(1) == logr.argmax(1)).double())
        p, q = logr.exp(), logp.exp()
        columns[2].append((p * (logr - logp) - p + q).sum(1, dtype=torch.float64))
    nll, *beside = (torch.cat(column).cpu() if column else None for column in columns)
    assert nll is not None
    return TokenScores(nll, *beside)


def _log_probs(lm_head: Head | nn.Linear, hidden: torch.Tensor) -> torch.Tensor:
    # at least fp32: bf16 logits are formed in bf16, as a server does, and normalised in fp32
    logits = lm_head(hidden.to(lm_head.weight.device, lm_head.weight.dtype))
    return torch.log_softmax(logits if logits.dtype == torch.float64 else logits.float(), dim=-1)
