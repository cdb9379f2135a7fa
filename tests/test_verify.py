import json
import math
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import tiny_text
import torch
from safetensors.torch import load_file, save_file
from transformers.cache_utils import DynamicCache

import mla_convert
from mla_convert.errors import BadCheckpoint, BadOption
from mla_convert.interface import report
from mla_convert.source.checkpoint import Checkpoint
from mla_convert.source.loading import load_model
from mla_convert.verification import check_models

ALPHA = 2.0**-22
FILE = "model.safetensors"


def neutral(model: Any) -> Any:
    """The latent norm made linear by eps domination, as the writer does it."""
    with torch.no_grad():
        for layer in model.model.layers:
            layer.self_attn.kv_a_proj_with_mqa.weight[:20] *= ALPHA
            layer.self_attn.kv_a_layernorm.weight.fill_(math.sqrt(1e-6) / ALPHA)
    return model


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A latent model as its own lossless conversion: every check has to pass, whatever `convert` does."""
    folder = tmp_path_factory.mktemp("pair")
    source, converted = folder / "source", folder / "converted"
    tiny_text.save(neutral(tiny_text.deepseek(5)), source)
    shutil.copytree(source, converted)
    ckpt = Checkpoint.open(source)
    record = {
        "source": {"hashes": ckpt.hashes(), "consumed": sorted(ckpt.headers), "leftover": []},
        "kv_lora_rank": 20,
        "qk_rope_head_dim": 6,
        "lossless": True,
    }
    (converted / "conversion.json").write_text(json.dumps(record))
    return source, converted


@pytest.fixture
def copy(pair: tuple[Path, Path], tmp_path: Path) -> tuple[str, Path]:
    shutil.copytree(pair[0], tmp_path / "source")
    shutil.copytree(pair[1], tmp_path / "converted")
    return str(tmp_path / "source"), tmp_path / "converted"


def failed(source: str, converted: Path) -> set[str]:
    result = mla_convert.verify(source=source, converted=str(converted), window=120)
    assert result.passed == (not [check for check in result.checks if check.passed is False])
    return {check.name for check in result.checks if check.passed is False}


def edit_config(folder: Path, **changes: Any) -> None:
    content = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(content | changes))


def edit_record(folder: Path, change: Callable[[dict[str, Any]], Any]) -> None:
    record = json.loads((folder / "conversion.json").read_text())
    change(record)
    (folder / "conversion.json").write_text(json.dumps(record))


def edit_tensors(folder: Path, change: Callable[[dict[str, torch.Tensor]], Any]) -> None:
    tensors = load_file(folder / FILE)
    change(tensors)
    save_file(tensors, folder / FILE, metadata={"format": "pt"})


def logit_lines(*positions: int) -> set[str]:
    return {"logits, all positions"} | {f"logits, position {position}" for position in positions}


def test_a_right_folder_passes_every_check(pair: tuple[Path, Path], capsys: pytest.CaptureFixture[str]) -> None:
    """Measured: logits 0, cached decode 2e-6, padding 0, stock layer 6e-7, absorbed 1e-15."""
    result = mla_convert.verify(source=str(pair[0]), converted=str(pair[1]))
    assert result.passed, [check for check in result.checks if check.passed is False]
    values = {check.name: check.value for check in result.checks}
    assert values["logits, all positions"] == 0
    assert values["cache holds the latent only"] == 1
    assert values["cached decode == full forward, one by one"] <= 5e-6
    assert values["padded batch == single, left"] <= 5e-6
    assert values["stock layer == its equations"] <= 5e-6
    assert values["expanded == absorbed"] <= 1e-14
    assert values["source's own bf16 rounding"] > 1e-3
    assert {f"logits, position {p}" for p in (0, 1, 7, 100, 299)} <= set(values)
    report.print_verification(result)
    printed = capsys.readouterr().out
    assert "passed" in printed and "FAIL" not in printed


@pytest.mark.parametrize(
    ("changes", "line"),
    [
        ({"num_key_value_heads": 2}, "config is stock DeepSeek-V3"),
        ({"rope_interleave": False}, "config is stock DeepSeek-V3"),
        ({"tie_word_embeddings": True}, "config is stock DeepSeek-V3"),
        ({"first_k_dense_replace": 1}, "config is stock DeepSeek-V3"),
        ({"dtype": "float16"}, "config is stock DeepSeek-V3"),
        ({"rms_norm_eps": 1e-5}, "config is stock DeepSeek-V3"),
        ({"n_routed_experts": None}, "config is stock DeepSeek-V3"),
        ({"architectures": ["LlamaForCausalLM"]}, "config is stock DeepSeek-V3"),
        ({"kv_lora_rank": 22}, "tensor names and shapes"),
        ({"partial_rotary_factor": 0.5}, "no source-only config key"),
        ({"auto_map": {"AutoConfig": "x.Y"}}, "no source-only config key"),
        ({"head_dim": 12}, "no source-only config key"),
        ({"eos_token_id": 7}, "bos, eos, pad ids kept"),
        ({"bos_token_id": None}, "bos, eos, pad ids kept"),
    ],
)
def test_a_wrong_config_fails(copy: tuple[str, Path], changes: dict[str, Any], line: str) -> None:
    edit_config(copy[1], **changes)
    assert line in failed(*copy)


def test_a_sliding_window_left_in_the_config_also_breaks_the_cache(copy: tuple[str, Path]) -> None:
    edit_config(copy[1], sliding_window=16, use_sliding_window=False)
    found = failed(*copy)
    assert "no source-only config key" in found
    assert "cached decode == full forward, one by one" in found


def test_another_rope_theta_fails_everywhere_but_at_position_0(copy: tuple[str, Path]) -> None:
    edit_config(copy[1], rope_parameters={"rope_type": "default", "rope_theta": 9000.0})
    assert failed(*copy) == logit_lines(1, 7, 100, 119)


def test_rope_rows_that_are_not_interleaved_fail_from_position_1(copy: tuple[str, Path]) -> None:
    def half_split(tensors: dict[str, torch.Tensor]) -> None:
        order = torch.arange(6).view(3, 2).T.flatten()
        for i in range(2):
            kv_a = tensors[f"model.layers.{i}.self_attn.kv_a_proj_with_mqa.weight"]
            kv_a[20:] = kv_a[20:][order].clone()
            q = tensors[f"model.layers.{i}.self_attn.q_proj.weight"].view(4, 16, 40)
            q[:, 10:] = q[:, 10:][:, order].clone()

    edit_tensors(copy[1], half_split)
    assert failed(*copy) == logit_lines(1, 7, 100, 119)


def test_a_latent_norm_that_is_not_neutral_fails_its_layer(copy: tuple[str, Path]) -> None:
    def rescale(
        tensors: dict[str, torch.Tensor],
    ) -> None:  # alpha 2^-9: the product is right, the norm is not
        kv_a = tensors["model.layers.1.self_attn.kv_a_proj_with_mqa.weight"]
        kv_a[:20] *= 2.0**-9 / ALPHA
        tensors["model.layers.1.self_attn.kv_a_layernorm.weight"].mul_(ALPHA / 2.0**-9)

    edit_tensors(copy[1], rescale)
    assert "stock layer == its equations" in failed(*copy)


def test_tensors_of_another_model_are_garbage(copy: tuple[str, Path]) -> None:
    edit_record(copy[1], lambda record: record.update(lossless=False))
    edit_tensors(copy[1], lambda tensors: tensors.update(tiny_text.deepseek(9).state_dict()))
    assert "better than a uniform guess" in failed(*copy)


def test_a_lossy_conversion_is_not_held_to_the_lossless_bound(copy: tuple[str, Path]) -> None:
    def perturb(tensors: dict[str, torch.Tensor]) -> None:
        tensors["model.layers.0.self_attn.o_proj.weight"].mul_(1.01)

    edit_tensors(copy[1], perturb)
    assert logit_lines(0, 1, 7, 100, 119) <= failed(*copy)
    edit_record(copy[1], lambda record: record.update(lossless=False))
    assert failed(*copy) == set()


@pytest.mark.parametrize(
    ("change", "line"),
    [
        (lambda tensors: tensors.pop("lm_head.weight"), "tensor names and shapes"),
        (lambda tensors: tensors.update(extra=torch.ones(2)), "tensor names and shapes"),
        (lambda tensors: tensors.update({"model.norm.weight": torch.ones(40).half()}), "no fp16 tensor"),
        (
            lambda tensors: tensors.update({"model.norm.weight": torch.full((40,), 1e38)}),
            "better than a uniform guess",
        ),
    ],
)
def test_wrong_tensors_fail(copy: tuple[str, Path], change: Callable[[Any], Any], line: str) -> None:
    edit_tensors(copy[1], change)
    assert line in failed(*copy)


def test_remote_code_in_the_folder_fails(copy: tuple[str, Path]) -> None:
    (copy[1] / "modeling_x.py").write_text("")
    assert failed(*copy) == {"no code, no pickle"}


def test_a_source_that_changed_or_was_not_consumed_fails(copy: tuple[str, Path]) -> None:
    edit_record(copy[1], lambda record: record["source"]["consumed"].remove("model.norm.weight"))
    assert failed(*copy) == {"source tensors consumed"}
    edit_record(copy[1], lambda record: record["source"]["consumed"].extend(["model.norm.weight", "ghost"]))
    assert failed(*copy) == {"source tensors consumed"}
    edit_record(copy[1], lambda record: record["source"]["consumed"].remove("ghost"))
    edit_tensors(Path(copy[0]), lambda tensors: tensors["model.norm.weight"].mul_(1 + 1e-6))
    assert failed(*copy) == {"source files unchanged"}


def test_stop_tokens_and_tokenizer_are_compared(copy: tuple[str, Path]) -> None:
    old = json.loads((copy[1] / "generation_config.json").read_text())
    (Path(copy[0]) / "generation_config.json").write_text(json.dumps(old | {"eos_token_id": [1, 2]}))
    assert failed(*copy) == {"generation_config kept"}
    tok = tiny_text.tokenizer()
    tok.chat_template = "{{ messages }}"
    tok.save_pretrained(copy[1])
    assert failed(*copy) == {"generation_config kept", "tokenizer and chat template kept"}


def test_a_cache_of_full_keys_fails(copy: tuple[str, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    update = DynamicCache.update

    def expanding(self: Any, keys: Any, values: Any, layer: int, **kwargs: Any) -> Any:
        repeated = keys.repeat(1, 4, 1, 1), values.repeat(1, 4, 1, 1)
        return tuple(each[:, :1] for each in update(self, *repeated, layer, **kwargs))

    monkeypatch.setattr(DynamicCache, "update", expanding)
    assert failed(*copy) == {"cache holds the latent only"}


def test_a_model_that_reads_its_padding_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny_text.deepseek()
    ids = torch.arange(3, 63)
    assert all(check.passed for check in check_models.padding_is_inert(model, ids))
    inputs = check_models.padded_inputs

    def blind(ids: Any, mask: Any, device: Any) -> dict[str, Any]:
        return inputs(ids, torch.ones_like(mask), device)

    monkeypatch.setattr(check_models, "padded_inputs", blind)
    assert [check.passed for check in check_models.padding_is_inert(model, ids)] == [False, True]


def test_results_are_written_as_json_and_unusable_input_is_named(
    pair: tuple[Path, Path], copy: tuple[str, Path], tmp_path: Path
) -> None:
    out = tmp_path / "checks.json"
    mla_convert.verify(source=str(pair[0]), converted=str(pair[1]), window=40, json=str(out))
    written = json.loads(out.read_text())
    assert written["passed"] is True and len(written["checks"]) > 20 and "environment" in written
    with pytest.raises(BadOption, match="its folder does not exist"):
        mla_convert.verify(source=copy[0], converted=str(copy[1]), json=str(tmp_path / "no" / "x.json"))
    (copy[1] / "conversion.json").write_text("[]")
    with pytest.raises(BadCheckpoint, match="holds a list, not an object"):
        mla_convert.verify(source=copy[0], converted=str(copy[1]))
    (copy[1] / "conversion.json").unlink()
    with pytest.raises(BadCheckpoint, match=r"no conversion\.json"):
        mla_convert.verify(source=copy[0], converted=str(copy[1]))


def test_rounding_is_told_from_an_error_by_doubling_the_precision(
    pair: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """At a bound no fp32 decode meets, the fp64 one does (measured 1e-15); a cache that loses a token never does."""
    model = load_model(pair[1], torch.float32, torch.device("cpu"))
    ids = torch.randint(0, model.config.vocab_size, (60,), generator=torch.Generator().manual_seed(0))
    full = check_models.forward_logits(model, ids)
    monkeypatch.setattr(check_models, "CACHE_BOUND", 1e-9)
    checks = {check.name.split(", ")[1]: check for check in check_models.cache_is_exact(model, ids, full)}
    assert checks["one by one"].passed and "in fp64, as fp32 rounding grew to" in checks["one by one"].detail
    assert model.dtype == torch.float32

    whole = check_models.cached_logits
    monkeypatch.setattr(check_models, "cached_logits", lambda model, ids, *rest: whole(model, ids.roll(1), *rest))
    assert not any(check.passed for check in check_models.cache_is_exact(model, ids, full))
