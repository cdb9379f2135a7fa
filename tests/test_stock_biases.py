"""Biases in the stock format: Qwen2 (and Llama with biases) as transformers' DeepSeek-V3 class, exactly, in fp64."""

import functools
import json
import logging
import re
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from fp64 import FP64_LATENT_RMS, in_fp64, logits, source_fp64
from native import convert_fp64
from safetensors.torch import load_file
from test_native_fuzz import flipped
from tiny import LLAMA3_ROPE, WEIGHTS, edit_json, edit_tensors, tiny_model
from torch import Tensor
from transformers import AutoModelForCausalLM

import mla_convert
from mla_convert.evaluation.decode_path import decode_figures
from mla_convert.formats.layer import attend_expanded
from mla_convert.formats.stock import (
    from_stock,
    query_latent_rank,
    read_stock_layer,
    stock_names,
    to_stock,
    written_frequencies,
)
from mla_convert.source.checkpoint import Checkpoint
from mla_convert.source.families import read_spec

BOUND = 1e-12  # of the largest logit; measured at most 2.0e-13, controls at least 5.7e-3
IDS = torch.randint(0, 250, (2, 90), generator=torch.Generator().manual_seed(5))
SOURCES: list[tuple[str, dict[str, Any]]] = [
    ("qwen2", {}),
    ("qwen2", {"num_key_value_heads": 1, "tie_word_embeddings": True, "rms_norm_eps": 1e-6}),
    ("qwen2", {"rope_parameters": LLAMA3_ROPE, "num_key_value_heads": 6}),
    ("llama", {"attention_bias": True}),
]
STOCK = {"format": "stock"}


def convert_stock(source: Path, out: Path, **options: Any) -> Path:
    """In fp64, with a latent norm that is linear to fp64's rounding."""
    exact = functools.partial(to_stock, scaled_rms=FP64_LATENT_RMS)
    with patch("mla_convert.output.emit.to_stock", exact):
        return convert_fp64(source, out, **STOCK, **options)


def stock_model(folder: Path) -> Any:
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64, attn_implementation="sdpa")
    return in_fp64(model, written_frequencies(json.loads((folder / "config.json").read_text())))


def distance(found: Tensor, wanted: Tensor) -> float:
    return ((found - wanted).abs().max() / wanted.abs().max()).item()


@pytest.fixture(scope="module", params=SOURCES, ids=str)
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Any]:
    """A source with biases everywhere and its lossless stock conversion, both in fp64."""
    family, changes = request.param
    folder = tmp_path_factory.mktemp("stock")
    source = tiny_model(folder / "source", family, **changes)
    out = convert_stock(source, folder / "out", lossless=True)
    return source_fp64(source, read_spec(Checkpoint.open(source))), stock_model(out)


def test_lossless_is_the_source(pair: tuple[Any, Any]) -> None:
    source, converted = pair
    assert type(converted).__name__ == "DeepseekV3ForCausalLM"
    assert min(source.model.layers[1].self_attn.get_parameter(f"{p}_proj.bias").abs().max() for p in "qkv") > 0.1
    assert distance(logits(converted, IDS), logits(source, IDS)) <= BOUND


def test_cached_decoding_is_the_source(pair: tuple[Any, Any]) -> None:
    source, converted = pair
    parts, cache = [], None
    with torch.no_grad():
        for part in IDS.split(7, dim=1):
            out = converted(input_ids=part, use_cache=True, cache=cache)
            cache = out.cache
            parts.append(out.logits)
    assert distance(torch.cat(parts, dim=1), logits(source, IDS)) <= BOUND


def test_far_positions_and_padding_are_the_source(pair: tuple[Any, Any]) -> None:
    source = pair[0]
    mask = torch.ones_like(IDS)
    mask[0, :31] = 0
    far = (mask.cumsum(1) - 1).clamp_min(0) + 4 * source.config.max_position_embeddings
    with torch.no_grad():
        found, wanted = (m(input_ids=IDS, attention_mask=mask, position_ids=far).logits for m in pair)
    assert distance(found[mask.bool()], wanted[mask.bool()]) <= BOUND


def test_absorbed_is_the_source(pair: tuple[Any, Any]) -> None:
    source, converted = pair
    absorbed = mla_convert.absorb(converted)
    try:
        assert distance(logits(absorbed, IDS), logits(source, IDS)) <= BOUND
    finally:
        from mla_convert.decoding.absorb_model import restore

        restore(converted)


@pytest.mark.parametrize("lost", ["q_a_proj", "kv_a_proj_with_mqa", "o_proj", "q_a_layernorm"])
def test_negative_controls_fail(pair: tuple[Any, Any], lost: str) -> None:
    """What an engine computes that skips one of the slots, or a query latent's norm that is not neutral."""
    source, converted = pair
    attention = converted.model.layers[1].self_attn
    slot = attention.q_a_layernorm.weight if lost == "q_a_layernorm" else getattr(attention, lost).bias
    kept = slot.detach().clone()
    with torch.no_grad():
        slot.mul_(1.01 if lost == "q_a_layernorm" else 0)
        try:
            assert distance(logits(converted, IDS), logits(source, IDS)) > 1e-3
        finally:
            slot.copy_(kept)


def test_a_layer_read_back_is_the_layer(tmp_path: Path) -> None:
    source = tiny_model(tmp_path / "source", "qwen2")
    out = convert_stock(source, tmp_path / "out", kv_lora_rank=20, qk_rope_head_dim=6, method="svd")
    config, layer = json.loads((out / "config.json").read_text()), read_stock_layer(out, 2)
    assert config["q_lora_rank"] == query_latent_rank(72) == 128 and config["attention_bias"] is True
    attention = stock_model(out).model.layers[2].self_attn
    again = from_stock({name: attention.get_parameter(name) for name in stock_names(config)}, config, layer.inv_freq)
    hidden = torch.randn(1, 50, 72, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    positions = torch.arange(50)[None]
    with torch.no_grad():
        wanted = attend_expanded(layer, hidden, positions)
        assert distance(attend_expanded(again, hidden, positions), wanted) < 1e-13  # measured 0
        model = stock_model(out).model
        tables = model.rotary_emb(hidden, positions)
        mask = torch.ones(50, 50, dtype=torch.bool).tril()[None, None]
        seen = attention(hidden_states=hidden, position_embeddings=tables, attention_mask=mask)[0]
    assert distance(seen, wanted) < BOUND


def test_a_truncation_is_that_of_the_native_format(tmp_path: Path) -> None:
    """Where pairs stop rotating too: keys' biases outside the slots are left out, in both formats."""
    source = tiny_model(tmp_path / "source", "qwen2")
    size: dict[str, Any] = {"kv_lora_rank": 20, "qk_rope_head_dim": 6, "rope_stride": 1, "method": "svd"}
    stock = stock_model(convert_stock(source, tmp_path / "stock", **size))
    folder, spec = (
        convert_fp64(source, tmp_path / "native", format="native", **size),
        read_spec(Checkpoint.open(source)),
    )
    native = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64, attn_implementation="sdpa")
    assert distance(logits(stock, IDS), logits(in_fp64(native, spec.inv_freq), IDS)) <= BOUND
    assert distance(logits(stock, IDS), logits(source_fp64(source, spec), IDS)) > 1e-3


def test_the_decode_path_is_scored_absorbed(tmp_path: Path) -> None:
    source = tiny_model(tmp_path / "source", "qwen2")
    model = stock_model(convert_stock(source, tmp_path / "out", kv_lora_rank=20, qk_rope_head_dim=6, method="svd"))
    found = decode_figures(model, IDS[:1])
    assert found["absorbed_difference"] <= 1e-12  # type: ignore[operator]  # measured 1.2e-13
    with torch.no_grad():
        model.model.layers[2].self_attn.q_a_layernorm.weight.data[5] *= 2
    other = decode_figures(model, IDS[:1])
    assert other["absorbed_difference"] <= 1e-12 < abs(other["absorbed"] - found["absorbed"])  # type: ignore[operator]


def test_a_truncation_verifies_heals_and_says_who_loses_the_biases(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    source, out, healed = tmp_path / "source", tmp_path / "out", tmp_path / "healed"
    tiny_model(source, "qwen2", projection_std=0.15)
    edit_json(source / "tokenizer_config.json", tokenizer_class="Qwen2Tokenizer")  # as Qwen's checkpoints say
    text = tmp_path / "text.txt"
    text.write_text("".join(chr(97 + i * i % 26) for i in range(1200)))
    common: dict[str, Any] = {"window": 64}
    with caplog.at_level(logging.WARNING, logger="mla_convert"):
        options = {"kv_lora_rank": 34, "qk_rope_head_dim": 12, "calib_windows": 6, "calib_data": [str(text)]}
        mla_convert.convert(source=str(source), out=str(out), **STOCK, **common, **options)
    assert "vLLM (GPU): skipped without a word" in caplog.text
    card, record = (out / "README.md").read_text(), json.loads((out / "conversion.json").read_text())
    assert "Not to be used with: vLLM (GPU)" in card and "llama.cpp" in card and "any engine" not in card
    assert set(record["biases_lost_by"]) == {"vLLM (GPU)", "vLLM (CPU)", "SGLang", "llama.cpp (deepseek2)"}
    options = {"data": [str(text)], "windows": 6, "held_out": 2, "steps": 3}
    mla_convert.heal(source=str(source), converted=str(out), out=str(healed), **common, **options)
    for folder in (out, healed):
        checks = mla_convert.verify(source=str(source), converted=str(folder), **common)
        assert checks.passed, [check for check in checks.checks if check.passed is False]


def test_windows_stay_native(tmp_path: Path) -> None:
    changes = {"use_sliding_window": True, "sliding_window": 24, "max_window_layers": 2}
    source = tiny_model(tmp_path / "source", "qwen2", **changes)
    with pytest.raises(mla_convert.UnsupportedSource, match="use_sliding_window=True.* has no sliding windows"):
        mla_convert.convert(source=str(source), out=str(tmp_path / "out"), lossless=True, **STOCK)


@pytest.mark.parametrize("family", ["llama", "mistral", "qwen2"])
def test_a_flipped_field_is_exact_or_refused_in_stock_too(tmp_path: Path, family: str) -> None:
    exact, refused = set(), set()
    lossless = functools.partial(convert_stock, lossless=True)
    for name, value, folder, out in flipped(tmp_path, family, lossless):
        if isinstance(out, mla_convert.MlaConvertError):
            refused.add(name)
            assert re.search(r"config\.json|tensor|layer|rope_type", str(out)), (name, value, out)
            continue
        source = source_fp64(folder, read_spec(Checkpoint.open(folder)))
        assert distance(logits(stock_model(out), IDS), logits(source, IDS)) <= BOUND, (name, value)
        exact.add(name)
    assert "rope_parameters" in exact and "rms_norm_eps" in exact
    assert {"qk_norm", "attention_chunk_size"} <= refused


def test_bfloat16_adds_no_more_than_its_own_rounding(tmp_path: Path) -> None:
    """Large biases, as Qwen2.5 has them: KL of bfloat16 to float32, of the source and of its stock form."""
    source, out = tiny_model(tmp_path / "source", "qwen2", projection_std=0.15, dtype=torch.bfloat16), tmp_path / "out"
    tensors = load_file(source / WEIGHTS)
    large = {name: 30 * tensor for name, tensor in tensors.items() if name.endswith("k_proj.bias")}
    edit_tensors(source, **{name.replace(".", "__"): tensor for name, tensor in large.items()})
    mla_convert.convert(source=str(source), out=str(out), lossless=True, **STOCK)

    def log_probabilities(folder: Path, dtype: torch.dtype, scale: float = 1.0) -> Tensor:
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, attn_implementation="sdpa").eval()
        for layer in model.model.layers if scale != 1 else ():
            layer.self_attn.q_a_layernorm.weight.data *= scale
        with torch.no_grad():
            return model(input_ids=IDS).logits.float().log_softmax(-1)

    wanted = log_probabilities(source, torch.float32)

    def lost(found: Tensor) -> float:
        return (wanted.exp() * (wanted - found)).sum(-1).mean().item()

    rounding = lost(log_probabilities(source, torch.bfloat16))
    assert lost(log_probabilities(out, torch.bfloat16)) < 2 * rounding  # measured 1.25 of it
    assert lost(log_probabilities(out, torch.bfloat16, scale=1.1)) > 2 * rounding  # the control: 19.7
