"""The model with its loss: what the optimiser sees."""

from typing import Any

from torch import Tensor, nn
from transformers import PreTrainedModel

from mla_convert.evaluation.scoring import Head, decoder, head
from mla_convert.training.distill import LossWeights, TopLogits, chunked_loss, hidden_loss


class Student(nn.Module):
    """The model with its loss inside `forward`, where data-parallel wrappers (DDP, FSDP) want it.

    `teacher_head` is the source's; residual_scale: factor of the model's residual stream to the source's.
    """

    def __init__(self, model: PreTrainedModel, teacher_head: Head, weights: LossWeights, residual_scale: float = 1.0):
        super().__init__()
        self.model = model
        self.weights = weights
        self.residual_scale = residual_scale
        self._teacher_head = teacher_head  # no module, so it is no buffer: never saved, sharded or cast
        # what FSDP gathers at a time where its config names no class
        self._no_split_modules = [type(decoder(model).layers[0]).__name__]  # type: ignore[index]

        self._keys_to_ignore_on_save: list[str] = []  # names that a checkpoint lacks; the Trainer reads it

    def tie_weights(self) -> None:
        """The Trainer calls this after loading a checkpoint without some names; nothing was untied."""

    def forward(self, input_ids: Tensor, teacher: dict[str, Tensor], judge: bool = False) -> dict[str, Tensor]:
        """Scalars loss, kl and ce (nats per predicted token) of windows [batch, tokens].

        `teacher` holds either hidden [batch, tokens, hidden_size] (and states [layers, batch, tokens, hidden_size]
        where hidden states are matched) or values, index, normaliser (TopLogits per window). judge: plain KL at
        temperature 1.
        """
        weights = LossWeights() if judge else self.weights
        out = decoder(self.model)(input_ids=input_ids, use_cache=False, output_hidden_states=weights.hidden > 0)
        hidden = out.last_hidden_state[:, :-1].flatten(0, 1)
        targets, own = input_ids[:, 1:].flatten(), head(self.model)
        sums = chunked_loss(hidden, own.weight, targets, self._reference(teacher), weights, finish=own.finish)
        loss = sums[0]
        if weights.hidden > 0:
            states = list(out.hidden_states[1:])
            scales = [self.residual_scale] * (len(states) - 1) + [1.0]  # the last one is behind the final norm
            loss = loss + weights.hidden * hidden_loss(states, list(teacher["states"]), scales)
        return {"loss": loss, "kl": sums[1].detach(), "ce": sums[2].detach()}

    def _reference(self, teacher: dict[str, Tensor]) -> Any:
        if "values" in teacher:
            top = TopLogits(*(teacher[key][:, :-1].flatten(0, 1) for key in ("values", "index", "normaliser")))
            return top.rows
        states, source = teacher["hidden"][:, :-1].flatten(0, 1), self._teacher_head
        return lambda part: source(states[part].to(source.weight.dtype))
