"""The growing latent buffer holds what transformers' concatenated layer holds, after any sequence of operations."""

from typing import Any

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import DynamicCache, StaticCache
from transformers.cache_utils import DynamicLayer

from mla_convert.decoding.latent_cache import LatentLayer, adopt

OPERATIONS = ("one", "few", "many", "crop", "reorder", "repeat", "select", "reset", "foreign")


def apply(layer: Any, operation: str, amount: int, gen: torch.Generator) -> None:
    batch = layer.keys.shape[0] if layer.is_initialized else 2
    new = {"one": 1, "few": 1 + amount, "many": 40 + amount}.get(operation)
    if new is not None:
        keys, values = torch.randn(batch, 1, new, 7, generator=gen), torch.randn(batch, 1, new, 4, generator=gen)
        layer.update(keys, values)
    elif operation == "crop" and layer.get_seq_length():
        layer.crop(-min(amount, layer.get_seq_length()))
    elif operation == "reorder" and layer.get_seq_length():
        layer.reorder_cache(torch.arange(batch).flip(0))
    elif operation == "repeat" and batch < 8:
        layer.batch_repeat_interleave(2)
    elif operation == "select" and layer.get_seq_length():
        layer.batch_select_indices(torch.arange(max(1, batch // 2)))
    elif operation == "reset":
        layer.reset()
    elif operation == "foreign" and layer.get_seq_length():  # other code replaces the tensors
        layer.keys, layer.values = layer.keys * 2, layer.values.clone()


@settings(max_examples=120)
@given(steps=st.lists(st.tuples(st.sampled_from(OPERATIONS), st.integers(1, 9)), max_size=12))
def test_any_operations_leave_the_same_content(steps: list[tuple[str, int]]) -> None:
    ours, theirs = LatentLayer(), DynamicLayer()
    gens = [torch.Generator().manual_seed(0) for _ in range(2)]
    for operation, amount in steps:
        for layer, gen in zip((ours, theirs), gens, strict=True):
            apply(layer, operation, amount, gen)
        assert ours.get_seq_length() == theirs.get_seq_length()
        assert ours.get_mask_sizes(3) == theirs.get_mask_sizes(3)
        if theirs.get_seq_length():
            assert torch.equal(ours.keys, theirs.keys) and torch.equal(ours.values, theirs.values)


def test_a_token_is_appended_in_place_and_the_buffer_is_seldom_copied() -> None:
    layer, copies, at = LatentLayer(), 0, None
    layer.update(torch.randn(2, 1, 1000, 7), torch.randn(2, 1, 1000, 4))
    for _ in range(1000):
        layer.update(torch.randn(2, 1, 1, 7), torch.randn(2, 1, 1, 4))
        assert layer.buffer is not None and layer.keys is not None
        copies, at = copies + (layer.buffer.data_ptr() != at), layer.buffer.data_ptr()
        assert layer.buffer.shape[1] <= layer.keys.shape[2] * 33 / 32 + 16
    assert 20 < copies < 40  # log(2) / log(33 / 32) = 23


def test_items_cropped_and_continued_do_not_touch_what_was_handed_out() -> None:
    """Views handed out before a crop keep their content until the next update writes there."""
    layer = LatentLayer()
    keys, _ = layer.update(torch.randn(1, 1, 9, 7), torch.randn(1, 1, 9, 4))
    kept = keys[:, :, :5].clone()
    layer.crop(-4)
    layer.update(torch.randn(1, 1, 2, 7), torch.randn(1, 1, 2, 4))
    assert layer.get_seq_length() == 7 and torch.equal(layer.keys[:, :, :5], kept)


def test_states_of_inference_mode_are_continued_outside_of_it() -> None:
    layer = LatentLayer()
    with torch.inference_mode():
        layer.update(torch.ones(1, 1, 9, 7), torch.ones(1, 1, 9, 4))
    layer.update(torch.ones(1, 1, 1, 7), torch.ones(1, 1, 1, 4))
    assert layer.get_seq_length() == 10 and (layer.keys == 1).all() and (layer.values == 1).all()


def test_a_cache_under_gradients_stays_as_it_is() -> None:
    """Decoding twice and going back through both: tensors written in place would raise."""
    from tiny_deepseek import prompts, tiny_deepseek

    from mla_convert import absorb

    model, cache, inputs = absorb(tiny_deepseek()), DynamicCache(), prompts(1, 9)
    first = model(inputs["input_ids"][:, :8], past_key_values=cache).logits
    second = model(inputs["input_ids"][:, 8:], past_key_values=cache).logits
    (first.sum() + second.sum()).backward()
    assert all(p.grad is not None for p in model.parameters())
    assert [type(layer) for layer in cache.layers] == [DynamicLayer, DynamicLayer]


@torch.no_grad()
def test_only_plain_empty_dynamic_layers_are_replaced() -> None:
    cache = DynamicCache()
    adopt(cache, 1)
    assert [type(layer) for layer in cache.layers] == [DynamicLayer, LatentLayer]
    filled = DynamicCache()
    filled.update(torch.randn(1, 1, 2, 7), torch.randn(1, 1, 2, 4), 0)
    adopt(filled, 0)
    assert type(filled.layers[0]) is DynamicLayer

    class Other(DynamicCache):
        pass

    other = Other()
    adopt(other, 0)
    adopt(None, 0)
    assert not other.layers


@torch.no_grad()
def test_a_static_cache_stays_what_it_is() -> None:
    from tiny_deepseek import tiny_deepseek

    cache = StaticCache(config=tiny_deepseek().config, max_cache_len=16)
    before = [type(layer) for layer in cache.layers]
    adopt(cache, 0)
    assert [type(layer) for layer in cache.layers] == before
