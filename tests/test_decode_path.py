"""The decode path's perplexity is the window's, and shows a cache that rounds."""

import pytest
import torch
from tiny_deepseek import prompts, tiny_deepseek

import mla_convert
from mla_convert.evaluation.decode_path import decode_nll


@pytest.mark.parametrize("absorbed", [False, True])
@pytest.mark.parametrize("prompt", [1, 9])
def test_equals_the_scored_window(absorbed: bool, prompt: int) -> None:
    model, ids = tiny_deepseek(), prompts(2, 24)["input_ids"]
    with torch.no_grad():
        logits = model(ids).logits[:, prompt - 1 : -1]
    window = torch.nn.functional.cross_entropy(logits.mT, ids[:, prompt:], reduction="none")
    decoded = decode_nll(mla_convert.absorb(model) if absorbed else model, ids, prompt=prompt)
    assert decoded.shape == (2, 24 - prompt)
    assert (decoded - window).abs().max().item() <= 1e-4  # measured 4e-6, of values up to 14


def test_a_rounding_cache_is_seen() -> None:
    model, ids = mla_convert.absorb(tiny_deepseek()), prompts(2, 24)["input_ids"]
    plain = decode_nll(model, ids)
    rounded = decode_nll(model, ids, mla_convert.QuantisedLatentCache(model.config, "fp8"))
    assert 1e-3 < (rounded - plain).abs().max().item() < 3


def test_a_text_without_a_token_to_score_is_refused() -> None:
    with pytest.raises(mla_convert.BadOption, match="prompt=5 of 5 tokens: at least one token in front"):
        decode_nll(tiny_deepseek(), prompts(1, 5)["input_ids"], prompt=5)
