"""Texts of a fine-tuning run: packed windows, those that judge, and the order in which the others are seen."""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from mla_convert.calibration.texts import read_documents, text_hash, token_windows
from mla_convert.errors import BadOption
from mla_convert.interface.finetune_recipe import FinetuneRecipe, weighted

logger = logging.getLogger(__name__)


@dataclass(frozen=True, eq=False)
class TrainingText:
    """windows int64 [windows, window] that are trained on, held_out int64 [held_out, window] that judge.

    order: index into `windows` of every window that is seen, in that order; sha256 of all texts.
    """

    windows: Tensor
    held_out: Tensor
    order: tuple[int, ...]
    sha256: str

    @property
    def order_sha256(self) -> str:
        """Of what is seen when, and of what judges: weights of texts and other held-out windows change it."""
        return hashlib.sha256(repr((self.order, self.held_out.tolist())).encode()).hexdigest()


class WindowDataset(torch.utils.data.Dataset[dict[str, Tensor]]):
    """The windows in the order they are seen, each with its index (for cached logits)."""

    def __init__(self, text: TrainingText):
        self.text = text

    def __len__(self) -> int:
        return len(self.text.order)

    def __getitem__(self, position: int) -> dict[str, Tensor]:
        index = self.text.order[position]
        return {"input_ids": self.text.windows[index], "index": torch.tensor(index)}


def read_training_text(recipe: FinetuneRecipe, tokenizer: PreTrainedTokenizerBase) -> TrainingText:
    """Read --data and --eval-data. Raises BadOption where they leave no window to train on."""
    named = [weighted(name) for name in recipe.data] or [("", 1.0)]
    texts = [read_documents((name,) if name else (), part="calib") for name, _ in named]
    cut = [token_windows(tokenizer, documents, recipe.window, None) for documents in texts]
    hashed = [document for documents in texts for document in documents]
    if recipe.eval_data:
        documents = read_documents(recipe.eval_data)
        hashed += documents
        held_out = token_windows(tokenizer, documents, recipe.window, recipe.held_out)
    else:
        cut, held_out = _hold_out(cut, recipe.held_out)
    order = schedule([len(c) for c in cut], [w for _, w in named], recipe.steps * recipe.batch_size, recipe.seed)
    passes = recipe.tokens / (sum(map(len, cut)) * recipe.window)
    logger.info("%d windows to train on, seen %.1f times; %d judge", sum(map(len, cut)), passes, len(held_out))
    return TrainingText(torch.cat(cut), held_out, order, text_hash(hashed))


def _hold_out(cut: Sequence[Tensor], count: int) -> tuple[list[Tensor], Tensor]:
    """Take `count` windows off the ends, from every text in proportion to its length."""
    total = sum(map(len, cut))
    if total <= count:
        raise BadOption(
            f"the texts have {total} windows and {count} are held out, so none is left to train on; give more text, "
            "or a smaller held_out or window"
        )
    ends = [sum(map(len, cut[: i + 1])) * count // total for i in range(len(cut))]
    takes = [end - start for start, end in zip([0, *ends], ends, strict=False)]
    kept = [c[: len(c) - take] for c, take in zip(cut, takes, strict=True)]
    return kept, torch.cat([c[len(c) - take :] for c, take in zip(cut, takes, strict=True)])


def schedule(lengths: Sequence[int], weights: Sequence[float], total: int, seed: int) -> tuple[int, ...]:
    """`total` indices into the concatenated texts of `lengths` windows, every text shown evenly all along.

    Each text is gone through in one random order after another; a text of weight 2 comes round twice as often as one
    of weight 1.
    """
    generator = torch.Generator().manual_seed(seed)
    shares = torch.tensor([length * weight for length, weight in zip(lengths, weights, strict=True)]).double()
    ends = (shares.cumsum(0) / shares.sum() * total).round().long().tolist()
    places: list[tuple[float, int]] = []
    offset = 0
    for length, start, end in zip(lengths, [0, *ends], ends, strict=False):
        count, passed = end - start, list[int]()
        while len(passed) < count:
            passed += torch.randperm(length, generator=generator).tolist()
        jitter = torch.rand(count, generator=generator).tolist()
        places += [((k + jitter[k]) / count, offset + passed[k]) for k in range(count)]
        offset += length
    return tuple(index for _, index in sorted(places))
