"""One byte per latent: bytes equal the formula, the absorbed path reads exactly what is stored, generate works."""

from typing import Any

import pytest
import torch
from test_latent_attention import formula, relative
from tiny_deepseek import prompts, tiny_deepseek
from transformers import DeepseekV3Config, DynamicCache, LlamaConfig

import mla_convert
from mla_convert import QuantisedLatentCache
from mla_convert.decoding.quantised_cache import QuantisedLatentLayer

KINDS = [("int8", "token"), ("fp8", "token"), ("int8", "channel"), ("fp8", "channel")]
TYPES = {"int8": torch.int8, "fp8": torch.float8_e4m3fn}
# Largest error of a latent over the largest of its token (or channel): half a step of int8, a 16th of fp8's 3 bits.
STEPS = {
    ("int8", "token"): 0.5 / 127,
    ("fp8", "token"): 1 / 16,
    ("int8", "channel"): 0.75 / 127,
    ("fp8", "channel"): 1 / 16,
}


def states(batch: int, tokens: int, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    gen = torch.Generator().manual_seed(seed)
    return torch.randn(batch, 1, tokens, 18, generator=gen), torch.randn(batch, 1, tokens, 6, generator=gen)


@pytest.mark.parametrize(("dtype", "scales"), KINDS)
def test_stored_values_are_within_a_step(dtype: str, scales: str) -> None:
    layer = QuantisedLatentLayer(TYPES[dtype], scales, torch.bfloat16)
    keys, values = states(3, 40)
    out, rotating = layer.update(keys, values)
    largest = keys.abs().amax(-1 if scales == "token" else 2, keepdim=True)
    error = ((out - keys).abs() / largest).max().item()
    assert STEPS[dtype, scales] / 2 < error <= STEPS[dtype, scales] * 1.001  # coarse as it should be, and not coarser
    assert torch.equal(rotating, values.bfloat16().float())
    assert layer.keys.dtype == TYPES[dtype] and layer.values.dtype == torch.bfloat16


@pytest.mark.parametrize(("dtype", "scales"), KINDS)
def test_attention_reads_exactly_what_is_stored(dtype: str, scales: str) -> None:
    layer = QuantisedLatentLayer(TYPES[dtype], scales, torch.bfloat16)
    keys, values = states(2, 40)
    layer.append(keys[:, :, :33].double(), values[:, :, :33].double())
    kv_c, k_pe = layer.update(keys[:, :, 33:].double(), values[:, :, 33:].double())
    gen = torch.Generator().manual_seed(5)
    q_latent, q_pe = (torch.randn(2, 5, 3, w, generator=gen, dtype=torch.float64) for w in (18, 6))
    mask = torch.arange(40) >= torch.tensor([0, 9])[:, None, None, None]
    out = layer.attend(q_latent, q_pe, 0.3, mask, "torch")
    given: dict[str, Any] = {"q_latent": q_latent, "q_pe": q_pe, "kv_c": kv_c[:, 0], "k_pe": k_pe[:, 0], "scale": 0.3}
    assert relative(out, formula(**given, mask=mask)) <= 1e-6  # measured 1e-7: scales are fp32
    exact = given | {"kv_c": keys[:, 0].double(), "k_pe": values[:, 0].double()}
    assert relative(out, formula(**exact, mask=mask)) > 1e-4  # negative control: quantising is no identity


@pytest.mark.parametrize(("dtype", "scales"), KINDS)
@pytest.mark.parametrize("batch", [1, 3])
def test_bytes_equal_the_formula(dtype: str, scales: str, batch: int) -> None:
    model = mla_convert.absorb(tiny_deepseek())
    cache = QuantisedLatentCache(model.config, dtype, scales)
    model.generate(**prompts(batch, 17, padded=3), past_key_values=cache, max_new_tokens=30, do_sample=False)
    tokens = 46  # the last token is never fed back
    by_hand = (
        2 * batch * (tokens * (18 + 2 * 6 + (4 if scales == "token" else 0)) + (4 * 18 if scales == "channel" else 0))
    )
    assert cache.get_seq_length() == tokens
    assert cache.nbytes() == cache.formula(batch, tokens) == by_hand
    for layer in cache.layers:
        assert isinstance(layer, QuantisedLatentLayer)
        assert all(kept.shape[1] <= tokens * 33 / 32 + 16 for kept in layer.rows)


def test_the_published_shape_takes_less_than_0_6_of_bf16() -> None:
    config = DeepseekV3Config(num_hidden_layers=1, kv_lora_rank=512, qk_rope_head_dim=64)
    token, channel = (QuantisedLatentCache(config, scales=scales).formula(1, 4096) for scales in ("token", "channel"))
    assert token == 4096 * 644 and channel == 4096 * 640 + 2048
    assert token < 0.6 * 4096 * 576 * 2


@pytest.mark.parametrize(("dtype", "scales"), KINDS)
def test_logits_stay_close_and_are_not_the_same(dtype: str, scales: str) -> None:
    """Measured over the largest logit: int8 1.7e-2 (token) and 3.8e-2 (channel), fp8 7e-2 and 9e-2."""
    model, inputs = mla_convert.absorb(tiny_deepseek()), prompts(2, 40)
    logits = []
    for cache in (DynamicCache(), QuantisedLatentCache(model.config, dtype, scales)):
        with torch.no_grad():
            model(inputs["input_ids"][:, :30], past_key_values=cache)
            steps = [model(inputs["input_ids"][:, at : at + 1], past_key_values=cache).logits for at in range(30, 40)]
        logits.append(torch.cat(steps, dim=1))
    error = relative(logits[1], logits[0].double())
    assert 1e-4 < error <= {"int8": 0.1, "fp8": 0.3}[dtype]


@pytest.mark.parametrize("options", [{}, {"num_beams": 3}, {"do_sample": True, "num_return_sequences": 2},
                                     {"prompt_lookup_num_tokens": 3}], ids=str)  # fmt: skip
def test_generate_in_every_way(options: dict[str, Any]) -> None:
    """Cropped, reordered and repeated caches give what the greedy or sampled run through fresh caches gives."""
    model, inputs = mla_convert.absorb(tiny_deepseek()), prompts(1, 17)
    text = []
    for _ in range(2):
        torch.manual_seed(0)
        cache = QuantisedLatentCache(model.config, "fp8")
        text.append(
            model.generate(**inputs, past_key_values=cache, max_new_tokens=40, **{"do_sample": False} | options)
        )
    assert torch.equal(*text) and text[0].shape[1] == 57
    if "prompt_lookup_num_tokens" in options:
        plain = QuantisedLatentCache(model.config, "fp8")
        assert torch.equal(text[0], model.generate(**inputs, past_key_values=plain, max_new_tokens=40, do_sample=False))


@pytest.mark.parametrize("scales", ["token", "channel"])
def test_batch_operations_move_whole_sequences(scales: str) -> None:
    layer = QuantisedLatentLayer(torch.float8_e4m3fn, scales, torch.bfloat16)
    layer.append(*states(3, 20))
    whole = [kept[:, :20].float().clone() for kept in layer.rows]
    layer.reorder_cache(torch.tensor([2, 0, 1]))  # type: ignore[arg-type]
    layer.batch_repeat_interleave(2)
    layer.batch_select_indices(torch.tensor([1, 4]))
    layer.crop(-7)
    layer.crop(50)
    assert layer.get_seq_length() == 13
    layer.crop(13)  # what older versions of transformers mean by a positive number
    for kept, before in zip(layer.rows, whole, strict=True):
        assert torch.equal(kept[:, :13].float(), before[[2, 1], :13])
    layer.reset()
    layer.append(*states(1, 4))
    assert layer.get_seq_length() == 4 and layer.keys.shape == (1, 1, 4, 18)


def test_the_stock_path_gets_dequantised_latents() -> None:
    model, inputs = tiny_deepseek(), prompts(2, 12)
    with torch.no_grad():
        stock = model(**inputs, past_key_values=QuantisedLatentCache(model.config)).logits
        ours = mla_convert.absorb(model)(**inputs, past_key_values=QuantisedLatentCache(model.config)).logits
    assert relative(ours, stock.double()) <= 0.02  # measured 1e-6; a step of int8 where rounding falls the other way


def test_a_later_token_out_of_a_channel_s_range_saturates() -> None:
    layer = QuantisedLatentLayer(torch.int8, "channel", torch.bfloat16)
    layer.append(torch.ones(1, 1, 4, 18), torch.ones(1, 1, 4, 6))
    out, _ = layer.update(torch.full((1, 1, 1, 18), 9.0), torch.ones(1, 1, 1, 6))
    assert out[0, 0, -1].max().item() == pytest.approx(1.5)


def test_refusals_name_the_choices() -> None:
    config = tiny_deepseek().config
    with pytest.raises(mla_convert.BadOption, match="dtype='int4' of a quantised cache: use one of int8, fp8"):
        QuantisedLatentCache(config, "int4")
    with pytest.raises(mla_convert.BadOption, match="scales='row' of a quantised cache: use token or channel"):
        QuantisedLatentCache(config, scales="row")
    with pytest.raises(mla_convert.BadOption, match="LlamaConfig has no kv_lora_rank"):
        QuantisedLatentCache(LlamaConfig())
