"""The command line: flags are the recipe's fields, exit codes, one-line errors, logs on stderr."""

import dataclasses
import logging
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import tiny_text
import typer
from typer.testing import CliRunner, Result

import mla_convert
from mla_convert import cli
from mla_convert.errors import BadCheckpoint, UnsupportedSource
from mla_convert.interface import flags, report
from mla_convert.interface.bench_recipe import BenchRecipe
from mla_convert.interface.finetune_recipe import FinetuneRecipe
from mla_convert.interface.plan_recipe import PlanRecipe
from mla_convert.interface.recipe import ConvertRecipe, DemoRecipe, EvalRecipe, HealRecipe, ReportRecipe, VerifyRecipe

RECIPES = {
    "plan": PlanRecipe,
    "convert": ConvertRecipe,
    "heal": HealRecipe,
    "finetune": FinetuneRecipe,
    "verify": VerifyRecipe,
    "eval": EvalRecipe,
    "bench": BenchRecipe,
    "report": ReportRecipe,
    "demo": DemoRecipe,
}
SIZE = ["--kv-lora-rank", "128", "--qk-rope-head-dim", "64"]


def run(*arguments: str) -> Result:
    return CliRunner().invoke(cli.app, list(arguments))


@pytest.fixture
def called(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """The recipe each verb was called with, in place of the work."""
    recipes: dict[str, Any] = {}
    passing = SimpleNamespace(passed=True)
    for verb in ("convert", "finetune", "verify", "evaluate", "demo"):
        monkeypatch.setattr(mla_convert, verb, lambda recipe, verb=verb: recipes.update({verb: recipe}) or passing)
    for printer in ("print_conversion", "print_finetuning", "print_verification", "print_evaluation", "print_demo"):
        monkeypatch.setattr(cli, printer, lambda result: None)
    return recipes


def test_every_field_is_a_flag_and_nothing_else_is() -> None:
    group = typer.main.get_command(cli.app)
    assert set(group.commands) == set(RECIPES)  # type: ignore[attr-defined]
    for name, recipe_type in RECIPES.items():
        parameters = {parameter.name for parameter in group.commands[name].params}  # type: ignore[attr-defined]
        fields = {field.name for field in dataclasses.fields(recipe_type)}
        assert parameters - {"help"} == fields | {"recipe"}


def test_finetune_flags_reach_the_recipe(called: dict[str, Any]) -> None:
    data = ["--data", "a.txt:2.0", "--data", "b.txt"]
    result = run("finetune", "A", "B", "--out", "C", *data, "--train", "lora", "--kd-weight", "0.5")
    assert result.exit_code == 0, result.output
    assert called["finetune"] == FinetuneRecipe(
        "A", "B", "C", data=("a.txt:2.0", "b.txt"), train="lora", kd_weight=0.5
    )  # fmt: skip
    missing = run("finetune", "A", "B")
    assert missing.exit_code == 2 and "out is missing: give --out" in missing.stderr


def test_flags_reach_the_recipe(called: dict[str, Any]) -> None:
    data = ["--calib-data", "a.txt", "--calib-data", "b.txt"]
    result = run("convert", "SRC", "OUT", *SIZE, *data, "--rope-stride", "2", "--overwrite", "--seed", "7")
    assert result.exit_code == 0, result.output
    assert called["convert"] == ConvertRecipe(
        "SRC", "OUT", kv_lora_rank=128, qk_rope_head_dim=64, calib_data=("a.txt", "b.txt"), rope_stride=2,
        overwrite=True, seed=7,
    )  # fmt: skip
    assert run("eval", "A", "B", "--reference", "A", "--json", "s.json").exit_code == 0
    assert called["evaluate"] == EvalRecipe(("A", "B"), reference="A", json="s.json")
    assert run("verify", "A", "B", "--window", "64").exit_code == 0
    assert called["verify"] == VerifyRecipe("A", "B", window=64)
    assert run("demo", "--out", "d").exit_code == 0
    assert called["demo"] == DemoRecipe("d")


def test_flags_win_over_the_recipe_file(called: dict[str, Any], tmp_path: Path) -> None:
    file = tmp_path / "r.yaml"
    file.write_text("source: a\nout: b\nkv_lora_rank: 8\nqk_rope_head_dim: 4\noverwrite: true\ncalib_data: [x.txt]\n")
    assert run("convert", "--recipe", str(file)).exit_code == 0
    assert called["convert"] == ConvertRecipe(
        "a", "b", kv_lora_rank=8, qk_rope_head_dim=4, overwrite=True, calib_data=("x.txt",)
    )
    arguments = ("convert", "SRC", "--recipe", str(file), "--no-overwrite", "--kv-lora-rank", "16")
    assert run(*arguments).exit_code == 0
    assert called["convert"] == ConvertRecipe("SRC", "b", kv_lora_rank=16, qk_rope_head_dim=4, calib_data=("x.txt",))
    assert run("convert", "--recipe", str(file), "--cache-ratio", "0.5").exit_code == 0
    assert called["convert"].cache_ratio == 0.5 and called["convert"].kv_lora_rank is None


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["convert", "a", "b"], "no cache size given"),
        (["convert", "a", *SIZE], "out is missing: give OUT, or `out:` in the recipe file"),
        (["convert", "a", "b", *SIZE, "--dtype", "float16"], "dtype=float16 is refused"),
        (
            ["convert", "a", "b", *SIZE, "--rope-stride", "x"],
            "rope_stride='x' must be auto or a whole number",
        ),
        (["convert", "a", "b", "--recipe", "none.yaml"], "cannot read recipe none.yaml"),
        (["eval"], "models is missing: give MODEL"),
        (["eval", "a", "--stride", "2000"], "stride=2000 exceeds window=1024"),
    ],
)
def test_a_refused_option_is_one_line_and_exit_code_2(arguments: list[str], words: str) -> None:
    result = run(*arguments)
    assert result.exit_code == 2
    assert result.stdout == ""
    assert result.stderr.startswith("mla-convert: error: ") and words in result.stderr
    assert result.stderr.count("\n") == 1


@pytest.mark.parametrize("error", [UnsupportedSource("layer 3:\n  has QK-norm"), BadCheckpoint("layer 3: has QK-norm")])
def test_an_error_of_the_work_is_one_line_and_exit_code_2(
    called: dict[str, Any], monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    def refuse(recipe: Any) -> None:
        raise error

    monkeypatch.setattr(mla_convert, "convert", refuse)
    result = run("convert", "a", "b", *SIZE)
    assert (result.exit_code, result.stdout) == (2, "")
    assert result.stderr == "mla-convert: error: layer 3: has QK-norm\n"


def test_an_unknown_flag_or_a_wrong_number_is_exit_code_2() -> None:
    result = run("convert", "a", "b", "--kv-lora-rnk", "8")
    assert result.exit_code == 2 and "--kv-lora-rank" in result.stderr
    result = run("convert", "a", "b", "--kv-lora-rank", "eight")
    assert result.exit_code == 2 and "--kv-lora-rank" in result.stderr


@pytest.mark.parametrize("verb", ["verify", "demo"])
def test_a_failed_check_is_exit_code_1(called: dict[str, Any], monkeypatch: pytest.MonkeyPatch, verb: str) -> None:
    arguments = {"verify": ["verify", "a", "b"], "demo": ["demo"]}[verb]
    assert run(*arguments).exit_code == 0
    monkeypatch.setattr(mla_convert, verb, lambda recipe: SimpleNamespace(passed=False))
    assert run(*arguments).exit_code == 1


def test_help_names_units_choices_and_defaults() -> None:
    text = " ".join(run("convert", "--help").stdout.split())
    assert "weighted|pca|svd" in text and "[default: weighted]" in text
    assert "Calibration window length, tokens. [default: 1024]" in text
    assert "--seed N Seed of every random choice. [default: 0]" in text
    assert "[default: False]" not in text and "None" not in text


def test_a_zero_default_is_shown_and_a_false_one_is_not() -> None:
    assert [flags._shown(value) for value in (0, False, None, (), "auto")] == [
        " [default: 0]", "", "", "", " [default: auto]",
    ]  # fmt: skip


def test_version_and_log_levels(called: dict[str, Any]) -> None:
    assert run("--version").stdout == f"mla-convert {mla_convert.__version__}\n"
    logger = logging.getLogger("mla_convert")
    for flag, level in (("-q", logging.WARNING), ("-v", logging.DEBUG)):
        assert run(flag, "verify", "a", "b").exit_code == 0
        assert logger.level == level
    assert run("verify", "a", "b").exit_code == 0
    assert logger.level == logging.INFO


def test_the_log_goes_to_stderr(called: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    def work(recipe: Any) -> None:
        logging.getLogger("mla_convert.conversion.convert").info("layer 0: [bold]kept[/bold]")

    monkeypatch.setattr(mla_convert, "convert", work)
    result = run("convert", "a", "b", *SIZE)
    assert result.stdout == "" and "layer 0: [bold]kept[/bold]" in result.stderr


def test_help_and_import_are_quick_and_load_no_torch() -> None:
    code = "import sys, mla_convert.cli; assert not {'torch', 'transformers'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)


@pytest.mark.parametrize("level", [logging.INFO, logging.WARNING])
def test_quiet_shows_no_bars(level: int, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(logging.getLogger("mla_convert"), "level", level)
    with report.progress("healing", "steps", 2) as advance:
        advance(2)
    assert ("healing" in capsys.readouterr().err) == (level == logging.INFO)


def test_a_terminated_command_leaves_nothing_behind(tmp_path: Path) -> None:
    """SIGTERM, what schedulers send first; healing would take hours."""
    scratch, text, out = tmp_path / "tmp", tmp_path / "text.txt", tmp_path / "out"
    scratch.mkdir()
    text.write_text(tiny_text.text(2000))
    source = tiny_text.save(tiny_text.llama(), tmp_path / "m")
    command = [
        sys.executable, "-m", "mla_convert.cli", "convert", source, str(out), "--kv-lora-rank", "8",
        "--qk-rope-head-dim", "4", "--calib-data", str(text), "--window", "16", "--heal", "steps=100000000,windows=20",
    ]  # fmt: skip
    process = subprocess.Popen(command, env=os.environ | {"TMPDIR": str(scratch)}, stderr=subprocess.DEVNULL)
    try:
        deadline = time.monotonic() + 60
        while not list(scratch.glob("mla_convert_*")):
            assert process.poll() is None and time.monotonic() < deadline
            time.sleep(0.1)
        process.terminate()
        assert process.wait(60) == 128 + signal.SIGTERM
    finally:
        process.kill()
    assert not list(scratch.iterdir()) and not out.exists() and not list(tmp_path.glob("out*"))


def test_an_exit_that_comes_out_as_another_error_is_still_one(monkeypatch: pytest.MonkeyPatch) -> None:
    before = signal.getsignal(signal.SIGTERM)

    def app() -> None:
        try:
            os.kill(os.getpid(), signal.SIGTERM)
        except SystemExit as error:  # as extensions do that know RuntimeError only
            raise RuntimeError("from C++") from error

    monkeypatch.setattr(cli, "app", app)
    try:
        with pytest.raises(SystemExit) as caught:
            cli.main()
        assert caught.value.code == 128 + signal.SIGTERM
        monkeypatch.setattr(cli, "app", lambda: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            cli.main()
    finally:
        signal.signal(signal.SIGTERM, before)
