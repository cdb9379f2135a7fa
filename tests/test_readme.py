"""The README is true: its commands parse, those that fit are run, every flag and target it names exists."""

import re
import shlex
from pathlib import Path
from typing import Any

import pytest
import typer
from typer.testing import CliRunner

import mla_convert
from mla_convert import cli
from mla_convert.interface import flags
from mla_convert.interface.bench_recipe import BenchRecipe
from mla_convert.interface.finetune_recipe import FinetuneRecipe
from mla_convert.interface.plan_recipe import PlanRecipe
from mla_convert.interface.recipe import ConvertRecipe, DemoRecipe, EvalRecipe, HealRecipe, ReportRecipe, VerifyRecipe

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text(encoding="utf-8")
RECIPES = {
    "plan": PlanRecipe,
    "finetune": FinetuneRecipe,
    "convert": ConvertRecipe,
    "heal": HealRecipe,
    "verify": VerifyRecipe,
    "eval": EvalRecipe,
    "bench": BenchRecipe,
    "report": ReportRecipe,
    "demo": DemoRecipe,
}


def blocks(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```$", README, flags=re.DOTALL | re.MULTILINE)


def commands(program: str) -> list[list[str]]:
    lines = [shlex.split(line, comments=True) for block in blocks("sh") for line in block.splitlines()]
    return [line[1:] for line in lines if line and line[0] == program]


def subcommand(name: str) -> Any:
    return typer.main.get_command(cli.app).commands[name]  # type: ignore[attr-defined]


@pytest.mark.parametrize("arguments", commands("mla-convert"), ids=" ".join)
def test_a_readme_command_is_a_valid_recipe(arguments: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)  # recipe files are named relative to it
    name, *rest = arguments
    given = dict(subcommand(name).make_context(name, rest).params)
    flags.recipe_from_flags(RECIPES[name], given)  # raises BadOption if not


def test_the_readme_shows_every_command() -> None:
    assert {arguments[0] for arguments in commands("mla-convert")} | {"demo"} == set(RECIPES)
    assert {"demo", "test"} <= {arguments[0] for arguments in commands("make")}


def test_every_flag_in_the_readme_exists() -> None:
    known = {flag for name in RECIPES for parameter in subcommand(name).params for flag in parameter.opts}
    named = set(re.findall(r"(?<![\w-])--[a-z][a-z-]+", README))
    assert len(named) > 8
    assert named <= known


def test_every_make_target_in_the_readme_exists() -> None:
    targets = re.findall(r"^([a-z]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), flags=re.MULTILINE)
    assert {arguments[0] for arguments in commands("make")} <= set(targets)
    assert set(re.findall(r"`make ([a-z]+)`", README)) <= set(targets)


def test_files_the_readme_links_exist() -> None:
    links = re.findall(r"\]\(([^)#:]+)\)", README)
    assert "CONTRIBUTING.md" in links
    for link in links:
        assert (ROOT / link).exists(), link


def test_the_readme_commands_run_in_order(smollm_shaped: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    ran = []
    for arguments in commands("mla-convert"):
        if "--recipe" in arguments:  # those name models on the hub
            continue
        filled = [str(smollm_shaped) if argument == "SOURCE" else argument for argument in arguments]
        filled = [str(ROOT / part) if part.startswith("eval/suites/") else part for part in filled]
        if arguments[0] == "heal":  # shorter windows only make it quicker
            filled += ["--window", "128"]
        result = CliRunner().invoke(cli.app, filled)
        assert result.exit_code == 0, f"{arguments}: {result.output}"
        assert result.stdout
        ran.append(arguments[0])
    assert ran == ["plan", "convert", "verify", "eval", "heal", "bench", "eval", "report"]
    outputs = ("scores.json", "scores.png", "speed.json", "speed.png", "suite.html", "suite.md")
    for file in ("OUT/config.json", "OUT/conversion.json", *outputs):
        assert (tmp_path / file).stat().st_size > 0


def test_the_readme_python_runs(smollm_shaped: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (code,) = blocks("python")
    exec(compile(code.replace('"SOURCE"', repr(str(smollm_shaped))), "README.md", "exec"), {})
    assert (tmp_path / "OUT" / "config.json").exists()


def test_the_package_docstring_shows_the_readme_calls() -> None:
    (code,) = blocks("python")
    calls = set(re.findall(r"mla_convert\.\w+\(", code))
    assert calls == set(re.findall(r"mla_convert\.\w+\(", mla_convert.__doc__ or ""))


def test_no_placeholder_is_left() -> None:
    assert not re.search(r"TODO|FIXME|LEAD|<!--", README)
