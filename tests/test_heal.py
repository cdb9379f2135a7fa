"""Healing lowers the error of every layer on held-out text, never raises it, and leaves good layers alone."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from tiny import tiny_model

import mla_convert
from mla_convert import healing
from mla_convert.errors import BadOption
from mla_convert.healing import LayerTask, heal_layer, with_unit_latent
from mla_convert.layer import MLALayer, attend_expanded
from mla_convert.recipe import ConvertRecipe, HealSettings

TEXT = " ".join(f"the {i}th line says {i * i % 97} and then {i * 31 % 101}." for i in range(900))


def random_layer(dtype: torch.dtype = torch.float64) -> MLALayer:
    gen = torch.Generator().manual_seed(0)

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=gen, dtype=torch.float64).to(dtype) / shape[-1] ** 0.5

    return MLALayer(
        W_UQ=draw(3, 8, 20), W_QR=draw(3, 6, 20), W_DKV=draw(11, 20), W_KR=draw(6, 20), W_UK=draw(3, 8, 11),
        W_UV=draw(3, 10, 11), W_O=draw(3, 20, 10), inv_freq=100.0 ** -(torch.arange(3, dtype=torch.float64) / 3),
        softmax_scale=0.3,
    )  # fmt: skip


def task_for(layer: MLALayer, windows: int = 10, tokens: int = 24) -> LayerTask:
    inputs = torch.randn(windows, tokens, 20, generator=torch.Generator().manual_seed(1))
    targets = attend_expanded(layer.to(torch.float32), inputs, torch.arange(tokens)[None])
    return LayerTask(inputs, targets, torch.ones(windows, tokens))


def test_unit_latent_changes_coordinates_only() -> None:
    layer, task = random_layer(), task_for(random_layer())
    white = with_unit_latent(layer, task.inputs)
    latent = task.inputs.double() @ white.W_DKV.T
    moment = torch.einsum("wtr,wts->rs", latent, latent) / task.inputs.shape[:2].numel()
    assert (moment - torch.eye(11)).abs().max() <= 1e-5  # inputs are summed in float32; measured 4e-7
    positions = torch.arange(24)[None]
    a, b = (attend_expanded(one, task.inputs[:1].double(), positions) for one in (layer, white))
    assert (a - b).abs().max() <= 1e-12  # measured 2e-15


def test_a_damaged_layer_is_repaired_and_a_perfect_one_left_as_it_was() -> None:
    layer = random_layer()
    gen = torch.Generator().manual_seed(2)
    damaged = replace(layer, W_UV=layer.W_UV + 0.1 * torch.randn(layer.W_UV.shape, generator=gen, dtype=torch.float64))
    settings = HealSettings(steps=150, windows=10, held_out=3, lr=2e-2)
    _, report = heal_layer(damaged, task_for(layer), settings, torch.float32)
    assert report.after < 0.3 * report.before  # measured 0.074
    same, unchanged = heal_layer(layer, task_for(layer), replace(settings, lr=1.0), torch.float32)
    assert same is layer and unchanged.after == unchanged.before  # a step size that can only harm


def test_where_the_step_size_harms_a_smaller_one_is_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    layer = random_layer()
    damaged = replace(layer, W_UV=layer.W_UV * 1.1)
    settings, shown = HealSettings(steps=40, windows=10, held_out=3, lr=0.2), list[int]()
    _, report = heal_layer(damaged, task_for(layer), settings, torch.float32, shown.append)
    assert report.after < 0.5 * report.before and sum(shown) == 40  # measured 0.20
    monkeypatch.setattr(healing, "SMALLER", 1.0)
    same, report = heal_layer(damaged, task_for(layer), settings, torch.float32)
    assert same is damaged and report.after == report.before  # control


def test_bad_inputs_never_win() -> None:
    layer = random_layer()
    task = task_for(layer)
    task.targets[0, 0, 0] = float("nan")  # a training window; the loss turns NaN and every judgement fails
    assert heal_layer(layer, task, HealSettings(8, 10, 3), torch.float32)[1].after < 1e-10


def test_healing_lowers_every_layer_of_a_converted_model(tmp_path: Path) -> None:
    source = tiny_model(tmp_path / "source", "llama", dtype=torch.float32, projection_std=0.1)
    (tmp_path / "text.txt").write_text(TEXT)
    common = {
        "source": str(source), "kv_lora_rank": 14, "qk_rope_head_dim": 6, "window": 64, "calib_windows": 24,
        "calib_data": (str(tmp_path / "text.txt"),), "rope_stride": 1,
    }  # fmt: skip
    healed = mla_convert.convert(out=str(tmp_path / "healed"), heal="steps=60,windows=24", **common)
    assert len(healed.healing) == 4 and all(r.after < r.before for r in healed.healing)
    record = json.loads((tmp_path / "healed" / "conversion.json").read_text())
    assert record["heal"]["tokens"] == 60 * 64 and len(record["heal"]["layers"]) == 4
    plain = mla_convert.convert(out=str(tmp_path / "plain"), **common)
    assert plain.healing == ()
    scores = mla_convert.evaluate(
        models=(str(tmp_path / "plain"), str(tmp_path / "healed")), reference=str(source),
        eval_data=(str(tmp_path / "text.txt"),), window=64, windows=8,
    ).scores  # fmt: skip
    kl = {Path(score.model).name: score.kl for score in scores}
    assert kl["healed"] < 0.8 * kl["plain"]  # measured 0.59
    failed = [c.name for c in mla_convert.verify(source=str(source), converted=str(tmp_path / "healed")).checks
              if c.passed is False]  # fmt: skip
    assert failed == []


def test_heal_command_on_a_written_folder(tmp_path: Path) -> None:
    source = tiny_model(tmp_path / "source", "llama", dtype=torch.float32, projection_std=0.1)
    (tmp_path / "text.txt").write_text(TEXT)
    mla_convert.convert(
        source=str(source), out=str(tmp_path / "plain"), kv_lora_rank=14, qk_rope_head_dim=6, method="svd"
    )
    result = mla_convert.heal(
        source=str(source), converted=str(tmp_path / "plain"), out=str(tmp_path / "healed"), steps=40, windows=20,
        window=64, data=(str(tmp_path / "text.txt"),),
    )  # fmt: skip
    assert all(r.after < r.before for r in result.healing)
    record = json.loads((tmp_path / "healed" / "conversion.json").read_text())
    assert record["converted_by"]["recipe"]["method"] == "svd" and record["heal"]["settings"]["steps"] == 40
    again = mla_convert.heal(
        source=str(source), converted=str(tmp_path / "healed"), out=str(tmp_path / "again"), steps=5, windows=20,
        window=64, data=(str(tmp_path / "text.txt"),),
    )  # fmt: skip
    assert len(again.healing) == 4
    kept = json.loads((tmp_path / "again" / "conversion.json").read_text())["converted_by"]
    assert kept["heal"]["settings"]["steps"] == 40 and kept["converted_by"]["recipe"]["method"] == "svd"
    for folder in ("healed", "again"):
        checks = mla_convert.verify(source=str(source), converted=str(tmp_path / folder)).checks
        assert [c.name for c in checks if c.passed is False] == []


@pytest.mark.parametrize(
    ("damage", "match"),
    [("", "is not JSON"), ("[]", "holds a list"), ("{}", "lacks source"), (None, "no conversion.json")],
)
def test_a_damaged_record_is_named(tmp_path: Path, damage: str | None, match: str) -> None:
    source = tiny_model(tmp_path / "source", "llama", dtype=torch.float32)
    out = tmp_path / "out"
    mla_convert.convert(source=str(source), out=str(out), kv_lora_rank=14, qk_rope_head_dim=6, method="svd")
    (out / "conversion.json").unlink()
    if damage is not None:
        (out / "conversion.json").write_text(damage)
    with pytest.raises(mla_convert.MlaConvertError, match=match):
        mla_convert.heal(source=str(source), converted=str(out), out=str(tmp_path / "h"))
    with pytest.raises(mla_convert.MlaConvertError, match=match):
        mla_convert.verify(source=str(source), converted=str(out))
    with pytest.raises(mla_convert.MlaConvertError, match=match):
        mla_convert.finetune(source=str(source), converted=str(out), out=str(tmp_path / "f"))


def test_swapped_arguments_are_told(tmp_path: Path) -> None:
    source, out = str(tiny_model(tmp_path / "source", "llama", dtype=torch.float32)), str(tmp_path / "out")
    mla_convert.convert(source=source, out=out, kv_lora_rank=14, qk_rope_head_dim=6, method="svd")
    with pytest.raises(mla_convert.MlaConvertError, match="name SOURCE first, then CONVERTED"):
        mla_convert.verify(source=out, converted=source)


def test_the_seed_orders_the_windows() -> None:
    layer = random_layer()
    gen = torch.Generator().manual_seed(2)
    damaged = replace(layer, W_UV=layer.W_UV + 0.1 * torch.randn(layer.W_UV.shape, generator=gen, dtype=torch.float64))
    results = [
        heal_layer(damaged, task_for(layer), HealSettings(20, 10, 3, 2e-2, seed), torch.float32)[1].after
        for seed in (0, 0, 1)
    ]
    assert results[0] == results[1] != results[2]


@pytest.mark.parametrize(
    ("text", "match"),
    [
        ("stepz=3", "'stepz' is not one of steps"),
        ("steps=many", "steps='many' is no int"),
        ("windows=5", "names no steps"),
        ("steps=5,windows=4", "more than held_out"),
        ("steps=5,lr=-1", "lr above 0"),
        ("steps=5,lr=nan", "lr above 0"),
        ("steps=5,lr=inf", "lr above 0"),
    ],
)
def test_bad_settings_are_named(text: str, match: str) -> None:
    with pytest.raises(BadOption, match=match):
        ConvertRecipe(source="a", out="b", kv_lora_rank=8, qk_rope_head_dim=4, heal=text)


def test_lossless_has_nothing_to_heal() -> None:
    with pytest.raises(BadOption, match="nothing to heal"):
        ConvertRecipe(source="a", out="b", lossless=True, heal="steps=3")


def test_source_of_another_conversion_is_refused(tmp_path: Path) -> None:
    text = tmp_path / "text.txt"
    text.write_text(TEXT)
    one, two = (
        tiny_model(tmp_path / name, "llama", dtype=torch.float32, seed=seed) for name, seed in (("a", 1), ("b", 2))
    )
    mla_convert.convert(source=str(one), out=str(tmp_path / "plain"), kv_lora_rank=14, qk_rope_head_dim=6, method="svd")
    with pytest.raises(mla_convert.MlaConvertError, match="was converted from other weights"):
        mla_convert.heal(source=str(two), converted=str(tmp_path / "plain"), out=str(tmp_path / "h"), data=(str(text),))
    assert not (tmp_path / "h").exists()
