"""Retrieval: numbers hidden in text, one of them asked for; and greedy continuations.

The passkey task of "Landmark Attention" (arXiv:2305.16300) with text of the suite as filler; with several keys it is
the multi-key needle of RULER (arXiv:2404.06654).
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from mla_convert.calibration.texts import BOS_EVERY_WINDOW, bos_policy
from mla_convert.evaluation.scoring import head, hidden_states, padded_windows, score
from mla_convert.evaluation.suite import RetrievalSpec
from mla_convert.source.loading import cache_name

NAMES = ("amber", "basil", "cedar", "delta", "ember", "fjord", "grove", "heron")
DIGITS = 5


@dataclass(frozen=True, eq=False)
class Probe:
    """One question. ids: int64 [tokens], the prompt and the answer; answer: how many of the last tokens answer."""

    length: int
    depth: float
    ids: torch.Tensor
    answer: int


def probes(
    tokenizer: PreTrainedTokenizerBase, filler: torch.Tensor, spec: RetrievalSpec, seed: int = 0
) -> tuple[list[Probe], list[int]]:
    """All questions, and the lengths that are too short for one.

    filler: int64 [tokens] of plain text. A probe has exactly `length` tokens, its key sentence begins at depth x the
    room of the filler; the other keys lie at random places. Numbers are drawn from `seed`.
    """
    rng = random.Random(seed)
    found: list[Probe] = []
    short: list[int] = []
    bos = [int(tokenizer.bos_token_id or 0)] if bos_policy(tokenizer) == BOS_EVERY_WINDOW else []
    for length in spec.lengths:
        for depth in spec.depths:
            for _ in range(spec.trials):
                probe = _probe(tokenizer, filler, spec.keys, length, depth, bos, rng)
                if probe is None and length not in short:
                    short.append(length)
                if probe is not None:
                    found.append(probe)
    return found, short


def _probe(
    tokenizer: PreTrainedTokenizerBase,
    filler: torch.Tensor,
    keys: int,
    length: int,
    depth: float,
    bos: list[int],
    rng: random.Random,
) -> Probe | None:
    def encode(text: str) -> list[int]:
        return list(tokenizer(text, add_special_tokens=False)["input_ids"])

    names = [NAMES[i % len(NAMES)] + (str(i // len(NAMES)) if i >= len(NAMES) else "") for i in range(keys)]
    numbers = ["".join(rng.choice("0123456789") for _ in range(DIGITS)) for _ in names]
    sentences = [
        encode(f"\n\nThe pass key of {n} is {d}. Remember it.\n\n") for n, d in zip(names, numbers, strict=True)
    ]
    question = encode(f"\n\nWhat is the pass key of {names[0]}? The pass key of {names[0]} is")
    answer = encode(f" {numbers[0]}")
    room = length - len(bos) - sum(map(len, sentences)) - len(question) - len(answer)
    if room < 1 or len(filler) < room:
        return None
    start = rng.randrange(len(filler) - room + 1)
    text = filler[start : start + room].tolist()
    places = [round(depth * room)] + [rng.randrange(room + 1) for _ in names[1:]]
    for place, sentence in sorted(zip(places, sentences, strict=True), key=lambda pair: -pair[0]):
        text[place:place] = sentence
    return Probe(length, depth, torch.tensor(bos + text + question + answer), len(answer))


def retrieve(
    model: PreTrainedModel,
    found: list[Probe],
    batch_size: int,
    advance: Callable[[int], None] = lambda tokens: None,
) -> list[dict[str, float]]:
    """Per length and depth: the share of probes answered right, and nats per answer token.

    Right: every answer token is the most likely one after those before it, so greedy decoding gives the answer.
    """
    rows = []
    for length, depth in dict.fromkeys((probe.length, probe.depth) for probe in found):
        group = [probe for probe in found if (probe.length, probe.depth) == (length, depth)]
        windows = padded_windows([probe.ids for probe in group])
        for row, probe in enumerate(group):  # only the answer is scored
            windows.scored[row, : len(probe.ids) - probe.answer - 1] = False
        hidden = hidden_states(model, windows, batch_size, advance)
        nll = score(head(model), hidden, windows.targets).nll
        with torch.inference_mode():
            linear = head(model)
            guesses = linear(hidden.to(linear.weight.device, linear.weight.dtype)).argmax(-1).cpu()
        counts = [probe.answer for probe in group]
        right = [bool(part.all()) for part in torch.split(guesses == windows.targets, counts)]
        rows.append(
            {
                "length": length,
                "depth": depth,
                "probes": len(group),
                "right": sum(right) / len(right),
                "nll": float(nll.mean()),
            }
        )
    return rows


@torch.inference_mode()
def greedy(
    model: PreTrainedModel,
    prompts: torch.Tensor,
    new_tokens: int,
    advance: Callable[[int], None] = lambda tokens: None,
) -> torch.Tensor:
    """The most likely continuations of prompts [prompts, tokens] through the cache, int64 [prompts, new_tokens].

    The end-of-text token counts as any other, and generation_config is not read.
    """
    name = cache_name(model)
    ids, cache, found = prompts.to(model.device), None, []
    for _ in range(new_tokens):
        out: Any = model(input_ids=ids, use_cache=True, logits_to_keep=1, **{name: cache})
        cache, ids = getattr(out, name), out.logits[:, -1].argmax(-1, keepdim=True)
        found.append(ids.cpu())
        advance(len(prompts))
    return torch.cat(found, dim=1)


def agreement_of(reference: torch.Tensor, own: torch.Tensor) -> dict[str, float]:
    """Share of the continuation before the first difference, and share of continuations that are the same."""
    same = (reference == own).long()
    prefix = same.cumprod(1).sum(1)
    return {
        "prefix": float(prefix.double().mean()) / reference.shape[1],
        "identical": float((prefix == reference.shape[1]).double().mean()),
    }
