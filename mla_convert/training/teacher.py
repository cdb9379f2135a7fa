"""The source as teacher: run on the fly, or its largest logits read back from disk."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import PreTrainedModel

from mla_convert.evaluation.scoring import LOGIT_BYTES, Head, decoder, head
from mla_convert.training.distill import TopLogits, top_logits


class LiveTeacher:
    """Runs the source on the windows. states: also give every layer's output. Products are in `compute`."""

    def __init__(self, model: PreTrainedModel, compute: torch.dtype, states: bool = False):
        self.model, self.compute, self.states = model, compute, states

    @property
    def head(self) -> Head:
        """The source's language-model head."""
        own = head(self.model)
        return own.to(own.weight.dtype)

    @torch.no_grad()
    def __call__(self, ids: Tensor, index: Tensor | None = None) -> dict[str, Tensor]:
        """hidden [batch, tokens, hidden_size], and with `states` states [layers, batch, tokens, hidden_size]."""
        ids = ids.to(self.model.device)
        with torch.autocast(ids.device.type, self.compute, enabled=self.compute != torch.float32):
            out = decoder(self.model)(input_ids=ids, use_cache=False, output_hidden_states=self.states)
        found = {"hidden": out.last_hidden_state}
        if self.states:
            found["states"] = torch.stack(out.hidden_states[1:])
        return found


class CachedTeacher:
    """Reads what `write_cache` wrote into `folder`."""

    def __init__(self, folder: Path, device: torch.device):
        self.folder, self.device = folder, device

    def __call__(self, ids: Tensor, index: Tensor) -> dict[str, Tensor]:
        """values, index [batch, tokens, k] and normaliser [batch, tokens] of the windows numbered `index`."""
        files = [load_file(_file(self.folder, i)) for i in index.tolist()]
        return {key: torch.stack([f[key] for f in files]).to(self.device) for key in files[0]}


@torch.no_grad()
def write_cache(
    teacher: LiveTeacher,
    windows: Tensor,
    order: tuple[int, ...],
    k: int,
    temperature: float,
    folder: Path,
    advance: Callable[[int], None],
) -> None:
    """One file per window that `order` names: its TopLogits at `temperature`. Files already there are kept."""
    folder.mkdir(parents=True, exist_ok=True)
    own = teacher.head
    for index in sorted(set(order)):
        path = _file(folder, index)
        if not path.exists():
            hidden = teacher(windows[index : index + 1])["hidden"][0]
            rows = max(1, LOGIT_BYTES // (4 * own.weight.shape[0]))
            parts = [top_logits(own(part.to(own.weight.dtype)), k, temperature) for part in hidden.split(rows)]
            joined = TopLogits(*(torch.cat([getattr(p, f) for p in parts]) for f in ("values", "index", "normaliser")))
            half = path.with_suffix(".partial")
            save_file(
                {
                    "values": joined.values.cpu(),
                    "index": joined.index.int().cpu(),
                    "normaliser": joined.normaliser.cpu(),
                },
                half,
            )
            os.replace(half, path)
        advance(windows.shape[1])


def _file(folder: Path, index: int) -> Path:
    return folder / f"window-{index:08d}.safetensors"
