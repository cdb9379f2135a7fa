"""The native format of every family: lossless is the source in fp64, however it is run."""

from typing import Any

import pytest
import torch
from native import FULL, convert_fp64, decoded, distance, fp64_model, logits, set_path
from tiny import LLAMA3_ROPE, tiny_model
from transformers import StaticCache

BOUND = 1e-12  # of the largest logit; measured at most PLACEHOLDER
IDS = torch.randint(0, 250, (2, 90), generator=torch.Generator().manual_seed(5))

VARIANTS: list[tuple[str, dict[str, Any]]] = [
    ("llama", {}),
    ("llama", {"attention_bias": True, "mlp_bias": True, "rope_parameters": LLAMA3_ROPE}),
    ("llama", {"num_key_value_heads": 6}),
    ("llama", {"num_key_value_heads": 1, "tie_word_embeddings": True}),
    ("mistral", {"sliding_window": 24}),
    ("ministral", {}),
    ("qwen2", {}),
    ("qwen2", {"use_sliding_window": True, "sliding_window": 24, "max_window_layers": 2}),
    ("qwen3", {}),
    ("qwen3", {"attention_bias": True, "tie_word_embeddings": True}),
]
NAMES = [family + "".join(f"-{key}" for key in changes) for family, changes in VARIANTS]


@pytest.fixture(scope="module", params=VARIANTS, ids=NAMES)
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Any]:
    """A source and its lossless native conversion, both in fp64."""
    family, changes = request.param
    folder = tmp_path_factory.mktemp("native")
    source = tiny_model(folder / "source", family, **changes)
    return fp64_model(source), fp64_model(convert_fp64(source, folder / "out", **FULL))


def test_lossless_is_the_source(pair: tuple[Any, Any]) -> None:
    source, converted = pair
    assert type(converted).__name__ == f"MLA{type(source).__name__}"
    assert distance(logits(converted, IDS), logits(source, IDS)) <= BOUND


def test_both_paths_are_the_source_with_and_without_a_cache(pair: tuple[Any, Any]) -> None:
    source, converted = pair
    wanted = logits(source, IDS)
    try:
        for path in ("expanded", "absorbed", "auto"):
            set_path(converted, path)
            assert distance(logits(converted, IDS), wanted) <= BOUND
            for chunk in (7, 1):
                assert distance(decoded(converted, IDS, chunk), wanted) <= BOUND, (path, chunk)
    finally:
        set_path(converted, "auto")


def test_a_static_cache_is_the_source(pair: tuple[Any, Any]) -> None:
    source, converted = pair
    cache = StaticCache(config=converted.config, max_cache_len=100)
    assert distance(decoded(converted, IDS, 9, cache), logits(source, IDS)) <= BOUND


@pytest.mark.parametrize("side", ["left", "right"])
def test_padding_is_the_source(pair: tuple[Any, Any], side: str) -> None:
    source, converted = pair
    mask = torch.ones_like(IDS)
    mask[0, slice(0, 31) if side == "left" else slice(-31, None)] = 0
    positions = (mask.cumsum(1) - 1).clamp_min(0)
    inputs = {"attention_mask": mask, "position_ids": positions}
    seen = mask.bool()
    assert distance(logits(converted, IDS, **inputs)[seen], logits(source, IDS, **inputs)[seen]) <= BOUND


def test_far_positions_are_the_source(pair: tuple[Any, Any]) -> None:
    """Beyond four times the context length of the config."""
    source, converted = pair
    positions = torch.arange(IDS.shape[1])[None] + 4 * source.config.max_position_embeddings
    inputs = {"position_ids": positions}
    assert distance(logits(converted, IDS, **inputs), logits(source, IDS, **inputs)) <= BOUND
