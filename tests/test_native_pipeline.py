"""Native conversions through the commands: kept layers, healing, evaluation, generation, and what is refused."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from native import FULL, convert_fp64, distance, fp64_model, logits
from safetensors.torch import load_file
from tiny import tiny_model
from transformers import AutoModelForCausalLM

import mla_convert
from mla_convert.errors import BadCheckpoint, BadOption, UnsupportedSource
from mla_convert.formats.native import NativeFolder
from mla_convert.source.checkpoint import Checkpoint

IDS = torch.randint(0, 250, (2, 90), generator=torch.Generator().manual_seed(5))
SMALL: dict[str, Any] = {"kv_lora_rank": 17, "qk_rope_head_dim": 6, "calib_windows": 6, "window": 64}
NAME = "model.safetensors"


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("text") / "text.txt"
    path.write_text("".join(f"{i} squared is {i * i}, and the root of {i} is {i**0.5:.3f}. " for i in range(160)))
    return str(path)


def kl(source: Path, converted: Path) -> float:
    result = mla_convert.verify(source=str(source), converted=str(converted), window=96)
    assert result.passed, [check for check in result.checks if check.passed is False]
    return next(check.value for check in result.checks if check.name == "better than a uniform guess")


def test_gemma_s_local_layers_are_kept_by_default(tmp_path: Path, text: str) -> None:
    source = tiny_model(tmp_path / "source", "gemma3_text", projection_std=0.1)
    out = tmp_path / "out"
    result = mla_convert.convert(source=str(source), out=str(out), calib_data=[text], **SMALL)
    layers = json.loads((out / "config.json").read_text())["mla"]["layers"]
    assert [entry is None for entry in layers] == [True, True, False, True]
    assert [report.total == 0 for report in result.layers] == [True, True, False, True]
    before, after = load_file(source / NAME), load_file(out / NAME)
    for name in ("model.layers.0.self_attn.k_proj.weight", "model.layers.3.self_attn.q_norm.weight"):
        assert torch.equal(before[name], after[name])
    assert kl(source, out) > 1e-4
    assert NativeFolder(out).converted == [2]
    model = AutoModelForCausalLM.from_pretrained(out)
    kinds = [type(layer.self_attn).__name__ for layer in model.model.layers]
    assert kinds == ["Gemma3Attention", "Gemma3Attention", "MLAttention", "Gemma3Attention"]


@pytest.mark.parametrize(
    ("family", "keep", "converted"),
    [("llama", "0,2-3", [1]), ("gemma3_text", "none", [0, 1, 2, 3]), ("ministral", "sliding", [1, 3])],
)
def test_layers_can_be_kept(tmp_path: Path, family: str, keep: str, converted: list[int]) -> None:
    source = tiny_model(tmp_path / "source", family)
    out = convert_fp64(source, tmp_path / "out", lossless=True, keep_layers=keep)
    assert NativeFolder(out).converted == converted
    assert distance(logits(fp64_model(out), IDS), logits(fp64_model(source), IDS)) <= 1e-12  # as in test_native.py


@pytest.mark.parametrize(
    ("family", "options", "error", "match"),
    [
        ("llama", {"keep_layers": "0-3"}, BadOption, r"keep_layers=0-3: all 4 layers are kept.*--keep-layers none"),
        ("llama", {"keep_layers": "4"}, BadOption, r"keep_layers='4': '4' names no layers of 0 to 3; write auto, none"),
        ("llama", {"keep_layers": "2-1"}, BadOption, r"'2-1' names no layers of 0 to 3"),
        ("llama", {"keep_layers": "local"}, BadOption, r"'local' names no layers"),
        ("llama", {"keep_layers": "sliding"}, BadOption, r"no layer of this source has a sliding window"),
        (
            "llama",
            {"keep_layers": "1", "format": "stock"},
            UnsupportedSource,
            r"the stock format cannot hold it: keep_layers=1: it has no layers without a latent; use --format native",
        ),
        ("mistral", {"format": "stock"}, UnsupportedSource, r"sliding_window=4096.*use --format native"),
    ],
)
def test_what_cannot_be_kept_is_refused(
    tmp_path: Path, family: str, options: dict[str, Any], error: type[Exception], match: str
) -> None:
    source = tiny_model(tmp_path / "source", family, **({"sliding_window": 4096} if family == "mistral" else {}))
    with pytest.raises(error, match=match):
        mla_convert.convert(source=str(source), out=str(tmp_path / "out"), lossless=True, **options)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("family", ["qwen2", "qwen3", "olmo2", "gemma3_text"])
def test_healing_wins_while_converting_and_afterwards(tmp_path: Path, text: str, family: str) -> None:
    source = tiny_model(tmp_path / "source", family, projection_std=0.12)
    options = {**SMALL, "calib_data": [text], "source": str(source), "format": "native", "method": "svd"}
    options |= {"keep_layers": "1", "rope_stride": 1}  # left open, held-out windows decide, which only healing has
    mla_convert.convert(out=str(tmp_path / "plain"), **options)
    healed = mla_convert.convert(
        out=str(tmp_path / "healed"), **options, heal="steps=40,windows=20,held_out=2,lr=0.003"
    )
    assert healed.healing[1].before == healed.healing[1].after == 0  # kept
    assert sum(report.after < 0.98 * report.before for report in healed.healing) >= 2
    plain = kl(source, tmp_path / "plain")
    assert kl(source, tmp_path / "healed") < plain
    again = mla_convert.heal(
        source=str(source),
        converted=str(tmp_path / "plain"),
        out=str(tmp_path / "again"),
        data=[text],
        window=64,
        windows=20,
        held_out=2,
        steps=40,
        lr=3e-3,
    )
    assert again.healing[0].before == pytest.approx(healed.healing[0].before, rel=1e-5)
    assert kl(source, tmp_path / "again") < plain


def test_evaluation_counts_what_is_held(tmp_path: Path, text: str) -> None:
    source = tiny_model(tmp_path / "source", "qwen3", projection_std=0.12)
    out = tmp_path / "out"
    mla_convert.convert(source=str(source), out=str(out), calib_data=[text], **SMALL)
    result = mla_convert.evaluate(models=(str(out),), reference=str(source), eval_data=[text], window=64, windows=4)
    scores = {score.model: score for score in result.scores}
    assert scores[str(source)].cache_measured == scores[str(source)].cache_formula == 4 * 4 * 2 * 2 * 10
    assert scores[str(out)].cache_measured == scores[str(out)].cache_formula == 4 * 4 * (17 + 6)
    assert 0 < scores[str(out)].kl < 1


def test_generation_training_and_device_maps(tmp_path: Path) -> None:
    """Greedy text of the source with every cache; gradients with checkpointing are those without; device_map loads."""
    source = tiny_model(tmp_path / "source", "qwen3")
    out = convert_fp64(source, tmp_path / "out", **FULL)
    converted, original = fp64_model(out), fp64_model(source)
    options: dict[str, Any] = {"max_new_tokens": 20, "do_sample": False, "pad_token_id": 256, "eos_token_id": None}
    wanted = original.generate(IDS, **options)
    assert torch.equal(converted.generate(IDS, **options), wanted)
    assert torch.equal(converted.generate(IDS, cache_implementation="static", **options), wanted)
    beams = {**options, "num_beams": 3}
    assert torch.equal(converted.generate(IDS[:1], **beams), original.generate(IDS[:1], **beams))

    def gradient(model: Any) -> torch.Tensor:
        model.train()
        model.zero_grad()
        model(input_ids=IDS, labels=IDS).loss.backward()
        found: torch.Tensor = model.model.layers[1].self_attn.kv_b_proj.weight.grad
        assert found.abs().max() > 0
        return found.clone()

    plain = gradient(converted)
    converted.gradient_checkpointing_enable({"use_reentrant": False})
    assert torch.equal(gradient(converted), plain)
    mapped = AutoModelForCausalLM.from_pretrained(out, device_map={"": "cpu"}, dtype=torch.float64).eval()
    assert distance(logits(mapped, IDS), logits(original, IDS)) <= 1e-6  # rotary tables here stay in float32
    mapped.save_pretrained(tmp_path / "saved")
    first, second = load_file(out / NAME), load_file(tmp_path / "saved" / NAME)
    assert first.keys() == second.keys()
    assert all(torch.equal(first[name], second[name]) for name in first)


def test_experts_are_copied_one_by_one(tmp_path: Path) -> None:
    source = tiny_model(tmp_path / "source", "qwen3_moe")
    out = tmp_path / "out"
    mla_convert.convert(source=str(source), out=str(out), lossless=True)
    before, after = load_file(source / NAME), load_file(out / NAME)
    names = [name for name in before if "self_attn" not in name]
    assert any(".experts.4.up_proj" in name for name in names)
    assert all(torch.equal(before[name], after[name]) for name in names)
    assert {name for name in after if "self_attn" not in name} == set(names)


def test_a_float16_source_needs_a_type_that_is_written(tmp_path: Path) -> None:
    source = tiny_model(tmp_path / "source", "qwen3", dtype=torch.float16)
    with pytest.raises(BadOption, match="stored in float16, which is not written; use --dtype float32 or bfloat16"):
        mla_convert.convert(source=str(source), out=str(tmp_path / "out"), lossless=True)
    mla_convert.convert(source=str(source), out=str(tmp_path / "out"), lossless=True, dtype="bfloat16")
    assert {tensor.dtype for tensor in load_file(tmp_path / "out" / NAME).values()} == {torch.bfloat16}


def test_a_folder_of_another_format_is_refused(tmp_path: Path) -> None:
    source = tiny_model(tmp_path / "source", "llama")
    with pytest.raises(BadCheckpoint, match="model_type='llama' is not the native format"):
        NativeFolder(source)
    out = tmp_path / "out"
    mla_convert.convert(source=str(source), out=str(out), lossless=True, format="native")
    config = json.loads((out / "config.json").read_text())
    config["mla"]["layers"].pop()
    (out / "config.json").write_text(json.dumps(config))
    with pytest.raises(ValueError, match="one entry in `layers` for each of 4 layers, got .*; convert again"):
        AutoModelForCausalLM.from_pretrained(out)
    assert Checkpoint.open(out).config["model_type"] == "mla_llama"
