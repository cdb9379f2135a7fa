"""finetune on tiny models: what changes and what does not, exactness of the export, kill and resume."""

import json
import os
import signal
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from tiny import edit_json, tiny_model
from tuning import PROJECTIONS, STEPS, WINDOW, Made, made_in, tune, weights

import mla_convert
from mla_convert.errors import BadCheckpoint, BadOption, MlaConvertError, TargetExists
from mla_convert.interface.finetune_recipe import FinetuneRecipe
from mla_convert.source.loading import load_tokenizer
from mla_convert.training.finetune import FinetuneResult, training_arguments
from mla_convert.training.train_data import read_training_text
from mla_convert.training.train_model import Student
from mla_convert.training.trainer import last_checkpoint

CPU = torch.device("cpu")
ATTENTION = tuple(f"self_attn.{name}.weight" for name in (*PROJECTIONS, "kv_a_layernorm"))


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Made:
    return made_in(tmp_path_factory.mktemp("finetune"))


def losses(result: FinetuneResult) -> list[float]:
    return [entry["loss"] for entry in result.curve if "loss" in entry]


@pytest.fixture(scope="module")
def tuned(made: Made, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, FinetuneResult]:
    out = tmp_path_factory.mktemp("tuned") / "out"
    return out, tune(made, out)


# whole runs


def test_only_attention_changes_and_the_result_is_a_stock_folder(
    made: Made, tuned: tuple[Path, FinetuneResult]
) -> None:
    out, result = tuned
    before, after = weights(made[1]), weights(out)
    assert before.keys() == after.keys()
    for name, tensor in before.items():
        if not name.endswith("kv_a_layernorm.weight"):  # its constant may come out the same
            assert torch.equal(tensor, after[name]) != name.endswith(ATTENTION), name
    assert result.kl_after < 0.9 * result.kl_before  # measured 0.79
    assert result.best_step == STEPS and result.tokens == STEPS * 4 * WINDOW and len(losses(result)) == STEPS
    assert result.max_difference is not None and result.max_difference < 5e-6  # measured 7e-7
    verified = mla_convert.verify(source=made[0], converted=str(out), window=60)
    assert verified.passed, [check for check in verified.checks if check.passed is False]
    record, old = (json.loads((Path(f) / "conversion.json").read_text()) for f in (out, made[1]))
    assert {key: record[key] for key in old} == old
    assert record["finetune"]["held_out_kl"] == {"before": result.kl_before, "after": result.kl_after}
    assert record["finetune"]["step"] == result.best_step and record["finetune"]["earlier"] == []
    assert record["finetune"]["recipe"]["source"] == made[0]
    assert json.loads((out / "finetune_curve.json").read_text()) == list(result.curve)
    assert (out / "finetune_curve.png").read_bytes().startswith(b"\x89PNG")
    assert "it was distilled on 1,536 tokens" in (out / "README.md").read_text()
    assert not Path(f"{out}.training").exists()


def test_written_model_has_the_held_out_kl_of_the_best_step(
    made: Made, tuned: tuple[Path, FinetuneResult], tmp_path: Path
) -> None:
    out, result = tuned
    # The last four windows were held out; scored by `eval`, which knows nothing of training.
    ids = load_tokenizer(made[0])(Path(made[2]).read_text())["input_ids"]
    windows = len(ids) // WINDOW
    held = load_tokenizer(made[0]).decode(ids[(windows - 4) * WINDOW : windows * WINDOW])
    (tmp_path / "held.txt").write_text(held)
    scores = mla_convert.evaluate(
        models=(str(out), made[1]), reference=made[0], eval_data=(str(tmp_path / "held.txt"),), windows=4, window=WINDOW
    ).scores
    by_name = {score.model: score.kl for score in scores}
    assert by_name[str(out)] == pytest.approx(result.kl_after, rel=1e-4)
    assert by_name[made[1]] == pytest.approx(result.kl_before, rel=1e-4)


@pytest.mark.parametrize("train", ["layers", "all", "lora"])
def test_other_choices_of_what_is_trained(made: Made, tmp_path: Path, train: str) -> None:
    rate = {"layers": 3e-3, "all": 3e-3, "lora": 1e-2}[train]
    result = tune(made, tmp_path / "out", train=train, learning_rate=rate)
    assert result.kl_after < 0.95 * result.kl_before
    before, after = weights(made[1]), weights(tmp_path / "out")
    assert before.keys() == after.keys()
    changed = {name for name in before if not torch.equal(before[name], after[name])}
    if train == "all":
        assert changed | {name for name in before if name.endswith(ATTENTION[4])} == set(before)
    elif train == "layers":
        matrices = {name for name in before if ".layers." in name and before[name].ndim > 1}
        assert changed | {name for name in before if name.endswith(ATTENTION[4])} == {
            name for name in before if name in matrices or name.endswith(ATTENTION[4])
        }
        assert any(".mlp." in name for name in matrices)
    else:
        assert {name for name in before if name.endswith(ATTENTION)} >= changed
        assert {name for name in before if name.endswith(ATTENTION[:4])} <= changed
    assert mla_convert.verify(source=made[0], converted=str(tmp_path / "out"), window=60).passed


def test_the_last_step_is_judged_whatever_the_interval(made: Made, tmp_path: Path) -> None:
    result = tune(made, tmp_path / "out", eval_every=5)
    assert [entry["step"] for entry in result.curve if "eval_kl" in entry] == [0, 5, 10, 12]
    assert result.best_step == 12


def test_a_run_that_only_harms_returns_the_start(made: Made, tmp_path: Path) -> None:
    result = tune(made, tmp_path / "out", learning_rate=10.0)
    assert result.best_step == 0 and result.kl_after == result.kl_before
    assert max(entry["eval_kl"] for entry in result.curve if "eval_kl" in entry) > 2 * result.kl_before


def test_the_best_step_is_that_of_the_loss_that_is_trained(made: Made, tmp_path: Path) -> None:
    # Cross-entropy alone leads away from the source: judged by the KL, the start would win and training be lost.
    result = tune(made, tmp_path / "out", kd_weight=0.0, learning_rate=3e-3)
    judged = [entry for entry in result.curve if "eval_loss" in entry]
    assert [entry["eval_loss"] for entry in judged] == [entry["eval_ce"] for entry in judged]
    assert result.best_step == min(judged, key=lambda entry: entry["eval_ce"])["step"] > 0
    assert result.ce_after < result.ce_before - 0.1  # measured 0.26
    assert result.kl_after > result.kl_before  # measured 0.118 and 0.104
    mixed = tune(made, tmp_path / "mixed", kd_weight=0.5, converted=result.out)
    for entry in (entry for entry in mixed.curve if "eval_loss" in entry):
        assert entry["eval_loss"] == pytest.approx((entry["eval_kl"] + entry["eval_ce"]) / 2, rel=1e-6)
    record = json.loads((tmp_path / "mixed" / "conversion.json").read_text())["finetune"]
    assert [run["recipe"]["kd_weight"] for run in record["earlier"]] == [0.0]
    assert "it was distilled on 3,072 tokens" in (tmp_path / "mixed" / "README.md").read_text()  # by both runs


@pytest.mark.parametrize(
    ("options", "bound"),
    [
        ({"micro_batch": 1}, 1e-5),  # measured 3e-7
        ({"micro_batch": 4}, 1e-5),  # measured 3e-7
        ({"gradient_checkpointing": True}, 1e-5),  # measured 0
        ({"cache_logits": 263}, 1e-4),  # all of the vocabulary; measured 5e-7
    ],
)
def test_how_it_is_computed_does_not_change_the_curve(
    made: Made, tuned: tuple[Path, FinetuneResult], tmp_path: Path, options: Any, bound: float
) -> None:
    assert losses(tune(made, tmp_path / "out", **options)) == pytest.approx(losses(tuned[1]), rel=bound)


@pytest.mark.parametrize(
    "options", [{"cache_logits": 8}, {"kd_weight": 0.98, "temperature": 2.0}, {"hidden_weight": 0.1}]
)
def test_other_losses_train_too(made: Made, tuned: tuple[Path, FinetuneResult], tmp_path: Path, options: Any) -> None:
    result = tune(made, tmp_path / "out", **options)
    assert result.kl_after < 0.95 * result.kl_before
    assert losses(result) != pytest.approx(losses(tuned[1]), rel=1e-2)


def test_bfloat16_storage_and_products(made: Made, tmp_path: Path) -> None:
    half = tmp_path / "half"
    mla_convert.convert(
        source=made[0], out=str(half), kv_lora_rank=8, qk_rope_head_dim=4, calib_data=(made[2],), window=128,
        dtype="bfloat16",
    )  # fmt: skip
    result = tune((made[0], str(half), made[2]), tmp_path / "out", dtype="bfloat16")
    again = tune((made[0], str(half), made[2]), tmp_path / "again", dtype="bfloat16", gradient_checkpointing=True)
    assert losses(again) == losses(result)  # attention in blocks is recomputed to the bit
    assert {tensor.dtype for tensor in weights(tmp_path / "out").values()} == {torch.bfloat16}
    assert result.kl_after < 0.95 * result.kl_before
    assert mla_convert.verify(source=made[0], converted=str(tmp_path / "out"), window=60).passed


# interruptions


def at_call(monkeypatch: pytest.MonkeyPatch, number: int, do: Any) -> None:
    """Call `do` before the `number`-th forward pass of training."""
    original, calls = Student.forward, [0]

    def forward(self: Student, *args: Any, **kwargs: Any) -> Any:
        calls[0] += self.training
        if calls[0] == number and self.training:
            do()
        return original(self, *args, **kwargs)

    monkeypatch.setattr(Student, "forward", forward)


def assert_same_run(out: Path, result: FinetuneResult, tuned: tuple[Path, FinetuneResult]) -> None:
    assert result.curve == tuned[1].curve and result.best_step == tuned[1].best_step
    for name, tensor in weights(tuned[0]).items():
        assert torch.equal(tensor, weights(out)[name]), name


def test_sigterm_saves_and_the_same_call_continues(
    made: Made, tuned: tuple[Path, FinetuneResult], tmp_path: Path
) -> None:
    assert threading.current_thread() is threading.main_thread()
    out = tmp_path / "out"
    with pytest.MonkeyPatch.context() as patch:
        at_call(patch, 2 * 5 + 1, lambda: os.kill(os.getpid(), signal.SIGTERM))  # two forward passes a step
        with pytest.raises(MlaConvertError, match=r"stopped by a signal after step 6 of 12; .*same command continues"):
            tune(made, out)
    assert not out.exists() and signal.getsignal(signal.SIGTERM) == signal.SIG_DFL
    assert_same_run(out, tune(made, out), tuned)


def test_killed_run_leaves_the_last_good_checkpoint(
    made: Made, tuned: tuple[Path, FinetuneResult], tmp_path: Path
) -> None:
    out, work = tmp_path / "out", tmp_path / "out.training"

    def fail() -> None:
        raise KeyboardInterrupt

    with pytest.MonkeyPatch.context() as patch:
        at_call(patch, 2 * 9 + 1, fail)
        with pytest.raises(KeyboardInterrupt):
            tune(made, out)
    assert not out.exists() and last_checkpoint(work) == work / "checkpoint-8"
    (work / "checkpoint-9").mkdir()  # what a kill while saving leaves
    (work / "checkpoint-9" / "model.safetensors").write_bytes(b"half")
    settings = (work / "settings.json").read_text()
    edit_json(work / "settings.json", order="of other weights")  # --data may move, and its weights are part of it
    with pytest.raises(BadOption, match="holds an unfinished run with order=of other weights, now order="):
        tune(made, out)
    (work / "settings.json").write_text(settings)
    with pytest.raises(BadOption, match=r"holds an unfinished run with learning_rate=0.003, now learning_rate=0.1"):
        tune(made, out, learning_rate=0.1)
    assert_same_run(out, tune(made, out), tuned)
    assert not work.exists()


def test_the_order_tells_weights_of_texts_apart(made: Made, tmp_path: Path) -> None:
    (tmp_path / "other.txt").write_text(" ".join(["cache token"] * 400))

    def order(*data: str) -> str:
        recipe = FinetuneRecipe(made[0], made[1], str(tmp_path / "out"), data=data, window=WINDOW, tokens=64 * WINDOW)
        return read_training_text(recipe, load_tokenizer(made[0])).order_sha256

    one, two = made[2], str(tmp_path / "other.txt")
    assert order(one, two) == order(one, two) != order(f"{one}:3.0", two) != order(one, f"{two}:3.0")


def test_a_loss_that_is_not_finite_ends_the_run(made: Made, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    original = Student.forward

    def forward(self: Student, *args: Any, **kwargs: Any) -> Any:
        out = original(self, *args, **kwargs)
        return out | {"loss": out["loss"] * float("nan")} if self.training else out

    monkeypatch.setattr(Student, "forward", forward)
    with pytest.raises(
        MlaConvertError, match=r"no longer finite at step 1: delete .* smaller --learning-rate than 0.003"
    ):
        tune(made, tmp_path / "out")
    assert not (tmp_path / "out").exists()


# refusals


def test_refusals(made: Made, tmp_path: Path) -> None:
    source, converted, text = made
    other = tiny_model(tmp_path / "other", num_hidden_layers=2, seed=1)
    with pytest.raises(BadCheckpoint, match=r"was not converted from .*other: model.safetensors has sha256"):
        tune((str(other), converted, text), tmp_path / "out")
    with pytest.raises(BadCheckpoint, match=r"no conversion.json; name a folder that `mla-convert convert` wrote"):
        tune((source, source, text), tmp_path / "out")
    mla_convert.convert(source=source, out=str(tmp_path / "exact"), lossless=True)
    with pytest.raises(BadOption, match="is lossless: it has nothing to win back"):
        tune((source, str(tmp_path / "exact"), text), tmp_path / "out")
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "file").touch()
    with pytest.raises(TargetExists, match="is not empty"):
        tune(made, tmp_path / "full")
    with pytest.raises(BadOption, match="training takes cpu or cuda; choose the GPU by CUDA_VISIBLE_DEVICES"):
        training_arguments(FinetuneRecipe(source="a", converted="b", out="c", device="cuda:1"), tmp_path)
    (tmp_path / "taken.training").mkdir()
    (tmp_path / "taken.training" / "notes").touch()
    with pytest.raises(BadOption, match="is not empty and holds no run of mla-convert"):
        tune(made, tmp_path / "taken")


def test_tensorboard_must_be_installed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(BadOption, match="tensorboard=logs needs the package tensorboard; install it"):
        training_arguments(FinetuneRecipe("a", "b", "c", device="cpu", tensorboard="logs"), tmp_path)


def test_processes_must_divide_the_batch(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("WORLD_SIZE", "3")
    with pytest.raises(BadOption, match="batch_size=4 is no multiple of micro_batch x processes = 1 x 3"):
        training_arguments(FinetuneRecipe(source="a", converted="b", out="c", device="cpu"), tmp_path)


def test_tokenizer_of_another_model_is_refused(made: Made, tmp_path: Path) -> None:
    import shutil

    wrong = tmp_path / "wrong"
    shutil.copytree(made[1], wrong)
    edit_json(wrong / "config.json", vocab_size=100)
    with pytest.raises(BadCheckpoint, match=r"gives token id \d+, but config.json says vocab_size=100"):
        tune((made[0], str(wrong), made[2]), tmp_path / "out")


# shipped files


@pytest.mark.parametrize("name", ["smollm2_135m_cpu.yaml", "llama3_8b.yaml", "qwen2.5_7b.yaml"])
def test_shipped_recipes(name: str) -> None:
    recipe = FinetuneRecipe.load(Path(__file__).parent.parent / "recipes" / name)
    assert recipe.train == "attention" and recipe.steps >= 100


@pytest.mark.parametrize(
    ("name", "processes"), [("cpu_2_processes.yaml", 2), ("one_gpu.yaml", 1), ("fsdp2_8_gpus.yaml", 8)]
)
def test_shipped_accelerate_configs(name: str, processes: int) -> None:
    from accelerate.commands.config.config_args import load_config_from_file

    path = Path(__file__).parent.parent / "recipes" / "accelerate" / name
    assert load_config_from_file(str(path)).num_processes == processes
    # Student names the layer class, of whichever family.
    assert "fsdp_transformer_layer_cls_to_wrap" not in yaml.safe_load(path.read_text()).get("fsdp_config", {})
    for recipe in ("llama3_8b.yaml", "qwen2.5_7b.yaml"):
        assert FinetuneRecipe.load(path.parent.parent / recipe).batch_size % processes == 0
