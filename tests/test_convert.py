"""convert, end to end: every kind of source and option gives a stock folder that verify passes."""

import importlib
import json
import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from fp64 import attention_of
from safetensors.torch import load_file
from tiny import CHAT_TEMPLATE, LLAMA3_ROPE, edit_config, edit_json, legacy_rope, tiny_model, write_gguf
from transformers import AutoModelForCausalLM, AutoTokenizer, DeepseekV3ForCausalLM

import mla_convert
from mla_convert.calibration.stream import LayerStream
from mla_convert.conversion.assemble import assemble
from mla_convert.conversion.choose import converted_nll
from mla_convert.conversion.convert import ConvertResult
from mla_convert.conversion.rope import ladder_plan
from mla_convert.conversion.sizes import allowed_sizes, unseen_pairs
from mla_convert.source.checkpoint import Checkpoint
from mla_convert.source.families import read_spec

module = importlib.import_module("mla_convert.conversion.convert")
LINEAR = {"rope_type": "linear", "rope_theta": 5000.0, "factor": 4.0}
LADDER = {"kv_lora_rank": 14, "qk_rope_head_dim": 6}


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Two files of a few windows each; the bytes are the tokens."""
    path = tmp_path_factory.mktemp("text") / "calibration.txt"
    lines = (f"line {i}: {i * i} squared, {chr(65 + i % 26) * (i % 7)} and so on.\n" for i in range(60))
    path.write_text("".join(lines))
    return str(path)


def gentle(folder: Path, family: str = "llama", **options: Any) -> Path:
    """Weights small enough that a truncated model still predicts."""
    return tiny_model(folder, family, projection_std=0.1, **options)


def run(source: Path, out: Path, text: str, **options: Any) -> ConvertResult:
    defaults = {"calib_data": [text], "calib_windows": 4, "window": 128}
    return mla_convert.convert(source=source, out=out, **(defaults | options))


def read(path: Path) -> dict[str, Any]:
    content: dict[str, Any] = json.loads(path.read_text())
    return content


def verified(source: Path, out: Path) -> dict[str, float | None]:
    """Values of all checks, none of which failed."""
    result = mla_convert.verify(source=str(source), converted=str(out), window=96)
    assert result.passed, [check for check in result.checks if check.passed is False]
    return {check.name: check.value for check in result.checks}


# Name, family, source, options, cached numbers per token and layer (the source: 2 x KV heads x head_dim).
CASES: list[tuple[str, str, dict[str, Any], dict[str, Any], int]] = [
    ("llama", "llama", {}, LADDER, 20),
    ("mistral, tied", "mistral", {"tie_word_embeddings": True, "max_shard_size": "50KB"}, LADDER, 20),
    ("bf16", "llama", {"dtype": torch.bfloat16}, LADDER, 20),
    ("fp16 to bf16", "llama", {"dtype": torch.float16}, LADDER | {"dtype": "bfloat16"}, 20),
    ("fp32 to bf16", "mistral", {}, LADDER | {"dtype": "bfloat16"}, 20),
    ("bf16 to fp32", "llama", {"dtype": torch.bfloat16}, LADDER | {"dtype": "float32"}, 20),
    ("llama3 rope", "llama", {"rope_parameters": LLAMA3_ROPE}, LADDER, 20),
    ("linear rope", "llama", {"rope_parameters": LINEAR}, LADDER, 20),
    ("eps 1e-6, tied", "llama", {"rms_norm_eps": 1e-6, "tie_word_embeddings": True}, LADDER, 20),
    ("pca", "llama", {}, LADDER | {"method": "pca"}, 20),
    ("svd", "mistral", {}, LADDER | {"method": "svd"}, 20),
    ("stride 2", "llama", {}, LADDER | {"rope_stride": 2}, 20),
    ("every pair of a KV head", "llama", {}, {"kv_lora_rank": 20, "qk_rope_head_dim": 10}, 30),
    ("half the cache", "llama", {}, {"cache_ratio": 0.5}, 20),
    ("half the cache, svd", "llama", {}, {"cache_ratio": 0.5, "method": "svd"}, 20),
    ("lossless", "llama", {}, {"lossless": True}, 40),
    ("lossless, tied", "mistral", {"tie_word_embeddings": True}, {"lossless": True}, 40),
    ("lossless, llama3 rope", "llama", {"rope_parameters": LLAMA3_ROPE}, {"lossless": True}, 40),
    ("lossless, one KV head", "llama", {"num_key_value_heads": 1}, {"lossless": True}, 20),
    # Six KV heads of 10 rows see inputs of 48 numbers: [W_K; W_V] has rank 48 after 60 rotating rows, not 60.
    ("lossless, MHA wider than the model", "llama", {"num_key_value_heads": 6}, {"lossless": True}, 108),
]


@pytest.mark.parametrize(("family", "model", "options", "numbers"), [c[1:] for c in CASES], ids=[c[0] for c in CASES])
def test_every_conversion_passes_verify(
    tmp_path: Path, text: str, family: str, model: dict[str, Any], options: dict[str, Any], numbers: int
) -> None:
    source, out = gentle(tmp_path / "source", family, **model), tmp_path / "out"
    result = run(source, out, text, **options)
    assert result.numbers == numbers and result.out == str(out)
    values = verified(source, out)
    if options.get("lossless"):
        # Measured at most 1.1e-6 of logits up to 4; tied 1.1e-5 of logits up to 60. Controls: those below.
        assert values["logits, all positions"] <= (5e-5 if model.get("tie_word_embeddings") else 5e-6)
    else:
        # Measured at most 0.021 nats; a uniform guess has 0.26.
        assert values["better than a uniform guess"] <= 0.05
        assert values["logits, all positions"] > 0.1

    config, record = read(out / "config.json"), read(out / "conversion.json")
    dtype = options.get("dtype", "bfloat16" if model.get("dtype") == torch.bfloat16 else "float32")
    assert config["dtype"] == dtype and config["rms_norm_eps"] == 1e-6 and not config["tie_word_embeddings"]
    assert (config["kv_lora_rank"], config["qk_rope_head_dim"]) == (
        record["kv_lora_rank"],
        record["qk_rope_head_dim"],
    )
    assert config["kv_lora_rank"] + config["qk_rope_head_dim"] == numbers
    tensors = load_file(out / "model.safetensors")
    assert {str(tensor.dtype) for tensor in tensors.values()} == {f"torch.{dtype}"}
    assert record["source_numbers"] == 20 * model.get("num_key_value_heads", 2)


def test_the_folder_is_stock_and_the_stop_tokens_are_the_source_s(tmp_path: Path, text: str) -> None:
    source, out = gentle(tmp_path / "source"), tmp_path / "out"
    edit_config(source, eos_token_id=[258, 260])
    edit_json(source / "generation_config.json", eos_token_id=[258, 260, 261], top_p=0.5)
    (source / "LICENSE").write_text("do what you like")
    (source / "additional_chat_templates").mkdir()
    (source / "additional_chat_templates" / "tool_use.jinja").write_text("{{ tools }}")
    run(source, out, text, **LADDER)
    config = read(out / "config.json")
    assert config["architectures"] == ["DeepseekV3ForCausalLM"] and config["model_type"] == "deepseek_v3"
    assert (config["bos_token_id"], config["eos_token_id"], config["pad_token_id"]) == (257, [258, 260], 256)
    assert config["max_position_embeddings"] == 512 and config["num_key_value_heads"] == 6
    assert config["first_k_dense_replace"] == config["num_hidden_layers"] == 4
    assert not {"auto_map", "head_dim", "partial_rotary_factor", "sliding_window"} & set(config)
    assert read(out / "generation_config.json") == read(source / "generation_config.json")
    assert sorted(path.name for path in out.iterdir()) == [
        "LICENSE",
        "README.md",
        "additional_chat_templates",
        "chat_template.jinja",
        "config.json",
        "conversion.json",
        "generation_config.json",
        "model.safetensors",
        "tokenizer.json",
        "tokenizer_config.json",
    ]
    tokenizer = AutoTokenizer.from_pretrained(out)
    assert tokenizer.chat_template == {"default": CHAT_TEMPLATE, "tool_use": "{{ tools }}"}
    assert tokenizer("abc")["input_ids"] == AutoTokenizer.from_pretrained(source)("abc")["input_ids"]
    model = AutoModelForCausalLM.from_pretrained(out)
    assert isinstance(model, DeepseekV3ForCausalLM)
    assert model.generation_config.eos_token_id == [258, 260, 261]
    card = (out / "README.md").read_text()
    assert "20 numbers per token and layer (kv_lora_rank 14 + qk_rope_head_dim 6)" in card and "(50 %)" in card
    assert "any engine with DeepSeek-V3 support" in card


def test_a_source_without_generation_config_gets_one_with_its_stop_tokens(tmp_path: Path, text: str) -> None:
    source, out = gentle(tmp_path / "source", eos_token_id=[258, 261]), tmp_path / "out"
    (source / "generation_config.json").unlink()
    run(source, out, text, **LADDER)
    verified(source, out)
    model = AutoModelForCausalLM.from_pretrained(out)
    assert model.generation_config.eos_token_id == [258, 261] and model.generation_config.pad_token_id == 256


@pytest.mark.parametrize("lossless", [False, True])
def test_the_record_is_complete(tmp_path: Path, text: str, lossless: bool) -> None:
    source, out = gentle(tmp_path / "source", max_shard_size="50KB"), tmp_path / "out"
    size = {"lossless": True} if lossless else LADDER
    result = run(source, out, text, seed=3, **size)
    record = read(out / "conversion.json")
    assert mla_convert.ConvertRecipe.from_mapping(record["recipe"]).seed == 3
    assert set(record["source"]["hashes"]) == {path.name for path in source.glob("*.safetensors")}
    assert all(len(digest) == 64 for digest in record["source"]["hashes"].values())
    index = read(source / "model.safetensors.index.json")
    assert record["source"]["consumed"] == sorted(index["weight_map"]) and record["source"]["leftover"] == []
    assert record["lossless"] is lossless and record["rope_stride"] == result.rope_stride
    assert len(record["layers"]) == 4 == len(result.layers)
    assert all(set(layer) == {"rope", "start", "end"} for layer in record["layers"])
    assert record["environment"]["versions"].keys() >= {"mla_convert", "torch", "transformers"}
    stages = [stage["name"] for stage in record["stages"]]
    if lossless:
        assert record["calibration"] == {"sha256": None, "tokens": 0} and stages == ["convert"]
        assert all(layer["rope"] == 0 and layer["end"] < 1e-20 for layer in record["layers"])
        assert "The re-encoding is exact" in (out / "README.md").read_text()
    else:
        assert record["calibration"]["tokens"] == result.calibration_tokens == 4 * 128
        assert len(record["calibration"]["sha256"]) == 64 and stages == ["calibrate", "choose", "convert"]
        assert all(0 < layer["end"] < layer["start"] and layer["rope"] > 0 for layer in record["layers"])
        considered = record["sizes_considered"]
        assert {each["size"] for each in considered} == {
            f"kv_lora_rank 14 + qk_rope_head_dim 6, stride {stride}" for stride in (1, 2)
        }
        assert 0 < considered[0]["predicted"] <= considered[1]["predicted"]
        best = min(considered, key=lambda each: each["held_out_nll"])
        assert best["size"].endswith(f"stride {result.rope_stride}")


def test_gguf(tmp_path: Path, text: str) -> None:
    """Converted from the file, it is the model converted from the folder."""
    folder = gentle(tmp_path / "folder")
    source = write_gguf(folder, tmp_path / "model.gguf")
    run(source, tmp_path / "out", text, method="svd", rope_stride=1, **LADDER)
    verified(source, tmp_path / "out")
    run(folder, tmp_path / "other", text, method="svd", rope_stride=1, **LADDER)
    got, want = (load_file(tmp_path / name / "model.safetensors") for name in ("out", "other"))
    for name, tensor in want.items():
        torch.testing.assert_close(got[name], tensor, rtol=1e-5, atol=1e-7)
    record = read(tmp_path / "out" / "conversion.json")
    assert list(record["source"]["hashes"]) == ["model.gguf"] and record["source"]["leftover"] == []
    config = read(tmp_path / "out" / "config.json")
    assert (config["bos_token_id"], config["eos_token_id"]) == (257, 258)
    assert AutoTokenizer.from_pretrained(tmp_path / "out")("abc")["input_ids"]


def test_both_spellings_of_rope_give_the_same_files(tmp_path: Path, text: str) -> None:
    new = gentle(tmp_path / "new", rope_parameters=LLAMA3_ROPE)
    old = legacy_rope(gentle(tmp_path / "old", rope_parameters=LLAMA3_ROPE))
    for source in (new, old):
        run(source, tmp_path / f"{source.name}_out", text, **LADDER)
    first, second = tmp_path / "new_out", tmp_path / "old_out"
    assert (first / "config.json").read_bytes() == (second / "config.json").read_bytes()
    assert (first / "model.safetensors").read_bytes() == (second / "model.safetensors").read_bytes()
    assert read(first / "config.json")["rope_parameters"]["rope_type"] == "llama3"
    assert "rope_type is llama3" in (first / "README.md").read_text()


def test_the_same_recipe_gives_the_same_bytes_and_shards_do_not_matter(tmp_path: Path, text: str) -> None:
    whole, sharded = gentle(tmp_path / "1"), gentle(tmp_path / "2", max_shard_size="50KB")
    for source, out in ((whole, "a"), (whole, "b"), (sharded, "c")):
        run(source, tmp_path / out, text, **LADDER)
    first, *others = ((tmp_path / out / "model.safetensors").read_bytes() for out in "abc")
    assert others == [first, first]
    run(whole, tmp_path / "d", text, method="pca", **LADDER)
    assert (tmp_path / "d" / "model.safetensors").read_bytes() != first


def test_more_numbers_lose_less(tmp_path: Path, text: str) -> None:
    source = gentle(tmp_path / "source")
    losses = []
    for i, (rank, rope) in enumerate(((3, 2), (14, 6), (30, 10))):
        result = run(source, tmp_path / str(i), text, kv_lora_rank=rank, qk_rope_head_dim=rope)
        kl = verified(source, tmp_path / str(i))["better than a uniform guess"]
        losses.append((sum(layer.total for layer in result.layers), kl))
    predicted, measured = zip(*losses, strict=True)
    assert list(predicted) == sorted(predicted, reverse=True)
    assert measured[0] > 2 * measured[1] > 2 * measured[2]  # measured 0.042, 0.014, 0.0006


def test_the_size_is_chosen_on_windows_that_were_not_calibrated_on(
    tmp_path: Path, text: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One ninth of the windows, also where the text is too short for all that were asked for."""
    seen: dict[str, Any] = {}
    calibrate, choose = module.calibrate, module.choose

    def watch_calibrate(stream: Any, ids: Any, *rest: Any) -> Any:
        seen["calibrated"] = {tuple(window) for window in ids.tolist()}
        return calibrate(stream, ids, *rest)

    def watch_choose(sizes: Any, stream: Any, held_out: Any, assembled: Any) -> Any:
        seen["held_out"] = {tuple(window) for window in held_out.tolist()}
        return choose(sizes, stream, held_out, assembled)

    monkeypatch.setattr(module, "calibrate", watch_calibrate)
    monkeypatch.setattr(module, "choose", watch_choose)
    source = gentle(tmp_path / "source", max_position_embeddings=128)  # the windows show all of it
    available = len(Path(text).read_text()) // 128
    ninth = -(-available // 9)
    for asked, calibrated, held_out in (
        (8, 8, 1),
        (available, available - ninth, ninth),
        (99, available - ninth, ninth),
    ):
        run(source, tmp_path / str(asked), text, calib_windows=asked, cache_ratio=0.5)
        assert not seen["calibrated"] & seen["held_out"]
        assert (len(seen["calibrated"]), len(seen["held_out"])) == (calibrated, held_out)
    considered = read(tmp_path / "8" / "conversion.json")["sizes_considered"]
    measured = [each["held_out_nll"] for each in considered if "held_out_nll" in each]
    assert len(considered) > len(measured) == 3
    chosen = read(tmp_path / "8" / "conversion.json")
    best = min(considered, key=lambda each: each.get("held_out_nll", float("inf")))
    assert best["size"].startswith(
        f"kv_lora_rank {chosen['kv_lora_rank']} + qk_rope_head_dim {chosen['qk_rope_head_dim']}"
    )


def test_the_loss_that_decides_is_that_of_the_written_model(tmp_path: Path) -> None:
    source, out = gentle(tmp_path / "source"), tmp_path / "out"
    recipe = mla_convert.ConvertRecipe(
        source=str(source), out=str(out), method="svd", rope_stride=2, kv_lora_rank=14, qk_rope_head_dim=6
    )
    mla_convert.convert(recipe)
    checkpoint, cpu = Checkpoint.open(source), torch.device("cpu")
    spec = read_spec(checkpoint)
    (size,) = allowed_sizes(recipe, spec)
    double = AutoModelForCausalLM.from_pretrained(source, dtype=torch.float64)

    def assembled(layer: int, size: Any, sweeps: int) -> Any:
        return assemble(attention_of(double, layer, spec), None, spec, size, "svd", sweeps)

    ids = torch.randint(0, 256, (3, 50), generator=torch.Generator().manual_seed(2))
    got = converted_nll(LayerStream(checkpoint, spec, cpu), ids, size, assembled, lambda layers: None)
    nll = {}
    for folder in (source, out):
        with torch.no_grad():
            nll[folder] = AutoModelForCausalLM.from_pretrained(folder)(input_ids=ids, labels=ids).loss.item()
    assert got == pytest.approx(nll[out], abs=1e-5)  # measured 2.8e-7
    assert abs(nll[source] - nll[out]) > 1e-3  # measured 0.005: it is not the source's


def test_few_tokens_are_warned_about_and_still_give_a_model(
    tmp_path: Path, text: str, caplog: pytest.LogCaptureFixture
) -> None:
    source, out = gentle(tmp_path / "source"), tmp_path / "out"
    with caplog.at_level(logging.WARNING, "mla_convert"):
        run(source, out, text, calib_windows=1, window=30, **LADDER, rope_stride=1)
    assert "30 calibration tokens are fewer than hidden_size=48" in caplog.text
    verified(source, out)
    caplog.clear()
    run(source, tmp_path / "more", text, calib_windows=1, window=60, **LADDER, rope_stride=1)
    assert "calibration tokens are fewer" not in caplog.text


def test_rotations_whose_loss_no_window_shows_are_avoided_and_warned_of(
    tmp_path: Path, text: str, caplog: pytest.LogCaptureFixture
) -> None:
    """Slow pairs turn by a fraction of a turn within a window of 64 tokens, and by several up to position 4,096."""
    rope = {"rope_type": "default", "rope_theta": 5000.0}
    source = gentle(tmp_path / "source", max_position_embeddings=4096, rope_parameters=rope)
    spec = read_spec(Checkpoint.open(source))
    assert unseen_pairs(spec, ladder_plan(spec, 6, 1), 64) == [3, 4]
    assert unseen_pairs(spec, ladder_plan(spec, 6, 2), 64) == [3]
    assert unseen_pairs(spec, ladder_plan(spec, 10, 1), 64) == unseen_pairs(spec, ladder_plan(spec, 2, 1), 4096) == []
    with caplog.at_level(logging.WARNING, "mla_convert"):
        run(source, tmp_path / "warned", text, window=64, **LADDER, rope_stride=1)
    assert "2 of 5 frequencies (3, 4) lose their rotation" in caplog.text and "positions up to 4096" in caplog.text
    caplog.clear()
    chosen = run(source, tmp_path / "chosen", text, window=64, cache_ratio=0.6)
    assert chosen.qk_rope_head_dim == 10 and "lose their rotation" not in caplog.text


def test_overwrite_replaces_the_earlier_conversion(tmp_path: Path, text: str) -> None:
    source, out = gentle(tmp_path / "source"), tmp_path / "out"
    run(source, out, text, **LADDER)
    run(source, out, text, overwrite=True, lossless=True)
    assert read(out / "conversion.json")["lossless"] and verified(source, out)["logits, all positions"] <= 5e-6
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out", "source"]
