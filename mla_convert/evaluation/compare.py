"""Per-token scores of one text as figures: means, tails, position in the window, and paired confidence intervals."""

from __future__ import annotations

import math
from typing import Any

import torch

from mla_convert.evaluation.scoring import TokenScores, Windows

WORST_SHARE = 0.01  # of the tokens, those that lost most


def figures(
    tokens: TokenScores,
    windows: Windows,
    bytes_per_token: torch.Tensor | None,
    samples: int,
    confidence: float,
) -> dict[str, Any]:
    """Plain JSON values of one model on one text; nats unless the name says otherwise.

    bytes_per_token: int64 [tokens scored], UTF-8 bytes of the text each scored token stands for, or None where that is
    not known. With a reference in `tokens` also excess (nll - reference's), KL(reference || model), the share of tokens
    with the same most likely token, and an interval of the excess from `samples` resamples of the windows.
    """
    counts = windows.scored.sum(1)
    rows: dict[str, torch.Tensor] = {"nll": tokens.nll}
    if tokens.reference_nll is not None and tokens.kl is not None and tokens.top1_agrees is not None:
        rows |= {"excess": tokens.nll - tokens.reference_nll, "kl": tokens.kl, "top1": tokens.top1_agrees}
    per_window = {name: window_means(values, counts) for name, values in rows.items()}
    result: dict[str, Any] = {name: float(values.mean()) for name, values in rows.items()}
    result |= {
        "tokens": int(counts.sum()),
        "windows": len(counts),
        "perplexity": math.exp(min(result["nll"], 700.0)),
        "bytes": None if bytes_per_token is None else int(bytes_per_token.sum()),
        "bits_per_byte": None,
        "by_position": by_position(rows, windows),
        "per_window": {name: values.tolist() for name, values in per_window.items()} | {"tokens": counts.tolist()},
    }
    if result["bytes"]:
        result["bits_per_byte"] = float(tokens.nll.sum()) / math.log(2) / result["bytes"]
    if "excess" in rows:
        one = len(counts) < 2  # a single window says nothing of the spread
        spread = None if one else interval(per_window["excess"], counts.double(), samples, confidence)
        result["excess_interval"] = spread
        result["worst"] = worst(rows["excess"], rows["kl"])
        result["kl_p99"] = float(rows["kl"].sort().values[math.ceil(0.99 * len(tokens.nll)) - 1])
    return result


def window_means(values: torch.Tensor, counts: torch.Tensor) -> torch.Tensor:
    """Mean of `values` [tokens scored] in each window, fp64 [windows]; 0 where a window scores nothing."""
    parts = torch.split(values.double(), counts.tolist())
    return torch.stack([part.mean() if len(part) else part.new_zeros(()) for part in parts])


def interval(
    values: torch.Tensor, weights: torch.Tensor, samples: int, confidence: float, seed: int = 0
) -> tuple[float, float]:
    """Percentile bootstrap interval of the weighted mean of per-window `values` (Efron, 1979): windows are drawn with
    replacement, both models on the same windows. Identical models give exactly (0, 0).
    """
    generator = torch.Generator().manual_seed(seed)
    drawn = torch.randint(len(values), (samples, len(values)), generator=generator)
    means = (values * weights)[drawn].sum(1) / weights[drawn].sum(1)
    tail = (1 - confidence) / 2
    low, high = torch.quantile(means, torch.tensor([tail, 1 - tail], dtype=means.dtype)).tolist()
    return low, high


def worst(excess: torch.Tensor, kl: torch.Tensor) -> dict[str, float]:
    """Mean excess and mean KL of the 1 % of tokens (at least one) that are worst by each."""
    count = max(1, round(WORST_SHARE * len(excess)))
    return {
        "tokens": count,
        "excess": float(excess.topk(count).values.mean()),
        "kl": float(kl.topk(count).values.mean()),
    }


def by_position(rows: dict[str, torch.Tensor], windows: Windows) -> list[dict[str, float]]:
    """Means by the position in its window of the token predicted: 1, 2-3, 4-7, ..., so that growth with the context
    shows. Stretches in which nothing is scored are left out.
    """
    position = (torch.arange(windows.scored.shape[1]) + 1).expand_as(windows.scored)[windows.scored]
    found, start = [], 1
    while start <= windows.scored.shape[1]:
        inside = (position >= start) & (position < 2 * start)
        if bool(inside.any()):
            means = {name: float(values[inside].mean()) for name, values in rows.items() if name != "top1"}
            last = min(2 * start, windows.ids.shape[1]) - 1
            found.append({"from": start, "to": last, "tokens": int(inside.sum()), **means})
        start *= 2
    return found
