"""Healing lowers the error of every layer on held-out text, never raises it, and leaves good layers alone."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from tiny import tiny_model
from torch import nn

import mla_convert
from mla_convert.calibration.stream import LatentAttention
from mla_convert.errors import BadOption
from mla_convert.formats.layer import MLALayer, attend_expanded
from mla_convert.interface.recipe import ConvertRecipe, HealRecipe, HealSettings
from mla_convert.training import healing
from mla_convert.training.healing import HealReport, LayerTask, heal_layer, with_unit_latent

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


class Block(nn.Module):
    """A decoder layer of 20 numbers without norms."""

    def __init__(self, attention: MLALayer) -> None:
        super().__init__()
        self.self_attn = LatentAttention(attention.to(torch.float32))
        self.mlp = nn.Linear(20, 20, bias=False).requires_grad_(False)
        self.mlp.weight.copy_(torch.randn(20, 20, generator=torch.Generator().manual_seed(3)) / 20**0.5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        middle: torch.Tensor = x + self.self_attn(x)[0]
        return middle + self.mlp(middle)


def task_for(layer: MLALayer, windows: int = 10, tokens: int = 24, drift: float = 0.0) -> LayerTask:
    """What Block(layer) makes of random states; drift: by what share the prefix made them too large."""
    states = torch.randn(windows, tokens, 20, generator=torch.Generator().manual_seed(1))
    return LayerTask((1 + drift) * states, Block(layer)(states))


def fit(
    layer: MLALayer,
    task: LayerTask,
    settings: HealSettings,
    others: tuple[str, ...] = (),
    advance: Any = lambda n: None,
) -> tuple[MLALayer, HealReport, Block]:
    """Healing of a block whose attention is `layer`."""
    block = Block(layer)
    healed, report = heal_layer(block, layer, task, settings, lambda block, x: block(x), torch.float32, others, advance)
    return healed, report, block


def test_unit_latent_changes_coordinates_only() -> None:
    layer, task = random_layer(), task_for(random_layer())
    white = with_unit_latent(layer, iter(task.inputs))
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
    _, report, _ = fit(damaged, task_for(layer), settings)
    assert report.after < 0.3 * report.before  # measured 0.038
    same, unchanged, _ = fit(layer, task_for(layer), replace(settings, lr=1.0))
    assert same is layer and unchanged.after == unchanged.before  # a step size that can only harm


def test_where_the_step_size_harms_a_smaller_one_is_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    layer = random_layer()
    damaged = replace(layer, W_UV=layer.W_UV * 1.1)
    settings, shown = HealSettings(steps=40, windows=10, held_out=3, lr=0.2), list[int]()
    _, report, _ = fit(damaged, task_for(layer), settings, advance=shown.append)
    assert report.after < 0.5 * report.before and sum(shown) == 40  # measured 0.26
    monkeypatch.setattr(healing, "SMALLER", 1.0)
    same, report, _ = fit(damaged, task_for(layer), settings)
    assert same is damaged and report.after == report.before  # control


def test_bad_inputs_never_win() -> None:
    layer = random_layer()
    task = task_for(layer)
    task.targets[0, 0, 0] = float("nan")  # a training window; the loss turns NaN and every judgement fails
    assert fit(layer, task, HealSettings(8, 10, 3))[1].after < 1e-10


def test_the_mlp_makes_up_for_the_prefix_and_is_put_back_where_it_does_not_help() -> None:
    layer, settings = random_layer(), HealSettings(steps=80, windows=10, held_out=3)
    task, before = task_for(layer, drift=0.3), Block(layer).mlp.weight
    _, attention, block = fit(layer, task, settings)
    assert torch.equal(block.mlp.weight, before)
    _, both, block = fit(layer, task, settings, ("mlp.weight",))
    assert both.after < 0.98 * attention.after < 0.98 * attention.before  # measured 0.75 and 0.26
    assert not torch.equal(block.mlp.weight, before)
    shown = block(task.inputs[7:])  # what is returned is what the block holds
    error = ((shown - task.targets[7:]).square().sum(-1) / task.targets[7:].square().sum(-1)).mean().item()
    assert error == pytest.approx(both.after, rel=1e-4)  # measured 0
    _, worse, block = fit(layer, task, replace(settings, lr=30.0), ("mlp.weight",))
    assert worse.after == worse.before and torch.equal(block.mlp.weight, before)


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


@pytest.mark.parametrize(("family", "format"), [("llama", "stock"), ("llama", "native"), ("qwen3", "native")])
def test_what_is_written_is_what_was_healed(
    tmp_path: Path, family: str, format: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Healed again, every layer starts where it ended: attention and MLPs are written, and read back, whatever was
    healed last.
    """
    monkeypatch.setattr(healing, "compute_dtype", lambda device: torch.float32)
    source = tiny_model(tmp_path / "source", family, dtype=torch.float32, projection_std=0.1)
    (tmp_path / "text.txt").write_text(TEXT)
    common: dict[str, Any] = {"source": str(source), "window": 64}
    first = mla_convert.convert(
        out=str(tmp_path / "first"), kv_lora_rank=14, qk_rope_head_dim=6, rope_stride=1, calib_windows=24,
        calib_data=(str(tmp_path / "text.txt"),), heal="steps=40,windows=24", format=format, **common
    )  # fmt: skip
    common |= {"data": (str(tmp_path / "text.txt"),), "windows": 24, "steps": 1, "lr": 1e-9}
    second = mla_convert.heal(
        converted=str(tmp_path / "first"), out=str(tmp_path / "second"), train="attention", **common
    )
    third = mla_convert.heal(converted=str(tmp_path / "second"), out=str(tmp_path / "third"), **common)
    for ended, begun, kept in zip(first.healing, second.healing, third.healing, strict=True):
        assert begun.before == pytest.approx(ended.after, rel=1e-5)  # measured 2e-7
        assert kept.before == pytest.approx(begun.after, rel=1e-5)
        assert ended.after < 0.95 * ended.before  # measured 0.67 to 0.93: another MLP would show
    before, after = (load_file(folder / "model.safetensors") for folder in (source, tmp_path / "first"))
    assert all(not torch.equal(before[name], after[name]) for name in before if ".mlp." in name)


@pytest.mark.parametrize(("family", "options"), [("llama", ",train=attention"), ("qwen3_moe", ""), ("gpt_oss", "")])
def test_healing_leaves_mlps_alone_where_asked_and_experts_always(tmp_path: Path, family: str, options: str) -> None:
    source = tiny_model(tmp_path / "source", family, dtype=torch.float32, projection_std=0.1)
    (tmp_path / "text.txt").write_text(TEXT)
    healed = mla_convert.convert(
        source=str(source), out=str(tmp_path / "out"), kv_lora_rank=14, qk_rope_head_dim=6, rope_stride=1, window=64,
        method="svd", format="native", calib_data=(str(tmp_path / "text.txt"),), heal=f"steps=20,windows=12{options}",
    )  # fmt: skip
    assert all(report.after < report.before for report in healed.healing)
    before, after = (load_file(folder / "model.safetensors") for folder in (source, tmp_path / "out"))
    names = [name for name in before if ".mlp." in name]
    assert names and all(torch.equal(before[name], after[name]) for name in names)


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
    with pytest.raises(mla_convert.MlaConvertError, match="name SOURCE first, then CONVERTED"):
        mla_convert.heal(source=out, converted=source, out=str(tmp_path / "healed"))


def test_a_home_folder_is_as_safe_as_any(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # "~" hid that OUT is the conversion itself, which --overwrite then replaced.
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "conv").mkdir()
    for converted, out in (("~/conv", "~/conv"), (str(tmp_path / "conv"), "~/conv"), ("~/conv", str(tmp_path))):
        with pytest.raises(BadOption, match="is or holds the source"):
            HealRecipe(source="a", converted=converted, out=out, overwrite=True)
    HealRecipe(source="a", converted="~/conv", out="~/other")


def test_the_seed_orders_the_windows() -> None:
    layer = random_layer()
    gen = torch.Generator().manual_seed(2)
    damaged = replace(layer, W_UV=layer.W_UV + 0.1 * torch.randn(layer.W_UV.shape, generator=gen, dtype=torch.float64))
    results = [fit(damaged, task_for(layer), HealSettings(20, 10, 3, 2e-2, seed=seed))[1].after for seed in (0, 0, 1)]
    assert results[0] == results[1] != results[2]


@pytest.mark.parametrize(
    ("text", "match"),
    [
        ("stepz=3", "'stepz' is not one of steps"),
        ("steps=many", "steps='many' is no int"),
        ("windows=5", "names no steps"),
        ("steps=5,windows=4", "windows=4 more than held_out=4.*give more windows or hold out fewer"),
        ("steps=5,lr=-1", "lr=-1.0 above 0"),
        ("steps=5,train=mlp", "train='mlp': use one of layers, attention"),
        ("steps=5,lr=nan", "lr=nan above 0"),
        ("steps=5,lr=inf", "lr=inf above 0"),
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
