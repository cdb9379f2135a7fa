"""Predicted loss against size: cheap predictions equal the conversion's own, and become nats that are measured."""

import json
from pathlib import Path
from typing import Any

import pytest
import tiny_text
import torch
from tiny import tiny_model
from typer.testing import CliRunner

import mla_convert
from mla_convert import cli
from mla_convert.calibration.calibrate import calibrate
from mla_convert.calibration.stream import LayerStream
from mla_convert.conversion.assemble import assemble, predict
from mla_convert.conversion.convert import source_attention
from mla_convert.conversion.rope import ladder_plan
from mla_convert.conversion.sizes import Size, unseen_pairs
from mla_convert.errors import BadOption, UnsupportedSource
from mla_convert.planning import rate_distortion
from mla_convert.source.checkpoint import Checkpoint
from mla_convert.source.families import read_spec

CONFIGS = Path(__file__).parent / "configs"
CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def sampled(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """A model and text drawn from it, so that every change of the model costs: 96 sequences of 64 words."""
    folder = tmp_path_factory.mktemp("sampled")
    model, tokenizer = tiny_text.llama(0), tiny_text.tokenizer()
    torch.manual_seed(1)
    model.generation_config.eos_token_id = None
    ids = model.generate(
        torch.randint(3, 93, (96, 1)), max_new_tokens=63, do_sample=True, top_k=0, pad_token_id=0,
        bad_words_ids=[[0], [1], [2]],
    )  # fmt: skip
    text = " ".join(" ".join(tokenizer.convert_ids_to_tokens(row)) for row in ids.tolist())
    (folder / "text.txt").write_text(text)
    return {"model": tiny_text.save(model, folder / "model"), "text": str(folder / "text.txt")}


def curve(sampled: dict[str, str], **options: Any) -> Any:
    given = {"calib_data": (sampled["text"],), "calib_windows": 64, "window": 64} | options
    return mla_convert.plan(model=sampled["model"], **given).curve


@pytest.mark.parametrize("method", ["weighted", "pca", "svd"])
def test_predictions_are_those_of_the_conversion(tmp_path: Path, method: str) -> None:
    """One decomposition for all ranks against `assemble` without sweeps: relative difference 1e-12 measured."""
    checkpoint = Checkpoint.open(tiny_model(tmp_path / "m"))
    spec = read_spec(checkpoint)
    stream = LayerStream(checkpoint, spec, CPU)
    ids = torch.randint(0, 256, (4, 32), generator=torch.Generator().manual_seed(0))
    moments = None if method == "svd" else next(calibrate(stream, ids, 0))
    source, plan = source_attention(checkpoint, spec, 0, CPU), ladder_plan(spec, 4, 2)
    found = predict(source, moments, spec, plan, (3, 9, 20), method)
    for rank, predicted in found.items():
        report = assemble(source, moments, spec, Size(rank, plan), method, 0)[1]
        assert predicted.rope == pytest.approx(report.rope, rel=1e-9)
        assert predicted.total == pytest.approx(report.total, rel=1e-9)
    assert found[3].total > found[9].total > found[20].total


@pytest.mark.parametrize("method", ["weighted", "pca"])
def test_four_measured_sizes_predict_the_others_within_a_quarter(sampled: dict[str, str], method: str) -> None:
    """Predicted from four sizes against measured at all ten; measured: 21 % off at most (weighted), 12 % (pca)."""
    few = curve(sampled, target_loss=0.9, method=method)
    many = curve(sampled, target_loss=0.9, method=method, measured=10)
    assert sum(point.measured is not None for point in few.points) == 4
    seen = [point.measured for point in many.points]
    assert len(seen) == 10 and seen[0] > 1.5 * seen[-1] > 0  # there is something to predict
    off = [abs(a.nats / b.measured - 1) for a, b in zip(few.points, many.points, strict=True)]
    assert max(off) < 0.25
    raw = [abs(point.predicted / point.measured - 1) for point in many.points]
    assert max(raw) > 0.25  # negative control: without the measured sizes a prediction is no loss in nats


def test_the_smallest_size_that_meets_the_target_is_chosen(sampled: dict[str, str]) -> None:
    found = curve(sampled, target_loss=0.9)
    nats = [point.nats for point in found.points]
    assert nats == sorted(nats, reverse=True)
    place = found.points.index(found.chosen)
    assert nats[place] <= 0.9 < nats[place - 1]
    assert found.chosen.kv_lora_rank + found.chosen.qk_rope_head_dim == found.chosen.numbers
    assert sum(found.chosen.layers) == pytest.approx(found.chosen.predicted) and len(found.chosen.layers) == 2
    assert curve(sampled, target_loss=1e-6).chosen is None


def test_so_many_bytes_are_split_as_predicted_best(sampled: dict[str, str]) -> None:
    """2 layers of bfloat16: 105 bytes are 26 numbers, which no step of the curve has."""
    found = curve(sampled, target_bytes=105)
    assert found.chosen.numbers == 26 and found.chosen.bytes_per_token == 104
    result = mla_convert.plan(
        model=sampled["model"], calib_data=(sampled["text"],), calib_windows=8, window=64, target_bytes=105
    )
    assert result.size == (result.curve.chosen.kv_lora_rank, result.curve.chosen.qk_rope_head_dim)


def test_other_texts_measure(sampled: dict[str, str], tmp_path: Path) -> None:
    """Predictions stay those of all 16 calibration windows; 4 windows of the other text measure."""
    other = tmp_path / "other.txt"
    other.write_text(" ".join(Path(sampled["text"]).read_text().split()[-4 * 64 :]))
    found = curve(sampled, target_loss=0.9, calib_windows=16, eval_data=(str(other),))
    same = curve(sampled, target_loss=0.9, calib_windows=16, eval_data=(sampled["text"],))
    assert (found.calibration_tokens, found.held_out_tokens) == (16 * 64, 4 * 64)
    assert [point.predicted for point in found.points] == [point.predicted for point in same.points]
    assert found.source_nll != same.source_nll


def test_rotations_that_no_window_shows_keep_their_slot(
    sampled: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Windows of 32 of the model's 512 tokens. All pairs need 12 numbers and a latent of 6 beside them."""
    spec = read_spec(Checkpoint.open(sampled["model"]))

    def unseen() -> list[int]:
        points = curve(sampled, target_loss=0.9, window=32).points
        plans = [ladder_plan(spec, p.qk_rope_head_dim, p.rope_stride) for p in points if p.numbers >= 18]
        return [len(unseen_pairs(spec, plan, 32)) for plan in plans]

    assert not any(unseen())
    monkeypatch.setattr(rate_distortion, "doubts", lambda *args: (False, False))
    assert any(unseen())  # the predictions alone would lose some


def test_the_command_it_prints_converts_to_what_it_predicts(sampled: dict[str, str], tmp_path: Path) -> None:
    """The conversion fits with more sweeps than the curve: measured 0.93 of its prediction."""
    files = ["--json", str(tmp_path / "p.json"), "--curve", str(tmp_path / "c.png")]
    text = ["--calib-data", sampled["text"], "--window", "64", "--calib-windows", "64"]
    found = CliRunner().invoke(cli.app, ["plan", sampled["model"], "--target-loss", "0.9", *text, *files])
    assert found.exit_code == 0, found.output
    assert "A measured size differs from what the others say of it by up to" in " ".join(found.stdout.split())
    (line,) = [line for line in found.stdout.splitlines() if line.startswith("For 0.9 nats per token:")]
    arguments = line.split("mla-convert ")[1].replace(" OUT ", f" {tmp_path / 'out'} ").split()
    done = CliRunner().invoke(cli.app, [*arguments, *text])
    assert done.exit_code == 0, done.output
    record = json.loads((tmp_path / "out" / "conversion.json").read_text())
    chosen = json.loads((tmp_path / "p.json").read_text())["curve"]["chosen"]
    converted = sum(layer["rope"] + layer["end"] for layer in record["layers"])
    assert 0.5 * chosen["predicted"] < converted < 1.1 * chosen["predicted"]
    assert (tmp_path / "c.png").read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"target_loss": 0.0}, "target_loss=0.0 must be above 0 nats per token"),
        (
            {"target_loss": 0.1, "target_bytes": 9},
            "target_loss=0.1 and target_bytes=9: each decides the size; give one",
        ),
        ({"curve": "x.png"}, "curve=x.png needs a target"),
        ({"target_bytes": 8}, r"target_bytes=8 is 2 numbers per token and layer in bfloat16; name 12 to 188"),
        ({"target_bytes": 999}, r"target_bytes=999 is 249 numbers .*the source caches 48 numbers"),
        ({"eval_data": ("other.txt",), "calib_data": ()}, "eval_data=other.txt is for a curve: give --target-loss or"),
        ({}, r"calib_data=.*text.txt is for a curve: give --target-loss or --target-bytes"),
        ({"target_loss": 0.1, "eval_data": ("absent.txt",)}, "absent.txt"),
        ({"target_loss": 0.1, "window": 4000}, "the text gives 1 window of 4000 tokens, and one more must be held out"),
    ],
)
def test_impossible_targets_are_named(sampled: dict[str, str], options: dict[str, Any], match: str) -> None:
    with pytest.raises(BadOption, match=match):
        curve(sampled, **options)


def test_a_model_that_convert_does_not_take_has_no_curve(tmp_path: Path) -> None:
    from mla_convert.errors import BadCheckpoint

    with pytest.raises((UnsupportedSource, BadCheckpoint), match="no weights|not supported"):
        mla_convert.plan(model=str(CONFIGS / "qwen3-8b"), target_loss=0.1)
