"""Runs of suites: kept when interrupted, told apart by inputs; wrong suites and options are named; the command."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import tiny_text
from suites import SUITE, models_in, run
from tiny import tiny_model, tiny_tokenizer
from transformers import PreTrainedTokenizerFast
from typer.testing import CliRunner

import mla_convert
from mla_convert import cli
from mla_convert.errors import BadOption
from mla_convert.evaluation import suite_parts
from mla_convert.evaluation.suite import BootstrapSpec, DecodeSpec, read_suite, stdlib_documents
from mla_convert.evaluation.suite_html import html_page
from mla_convert.evaluation.suite_texts import read_texts

SUITES = Path(__file__).parent.parent / "eval" / "suites"


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    return models_in(tmp_path_factory.mktemp("suite"))


# Kept parts


def test_a_rerun_measures_nothing_and_says_the_same(models: dict[str, str], tmp_path: Path) -> None:
    first = run(models, tmp_path, "source", "mla4")
    assert (first.measured, first.reused) == (21, 0)  # 3 models of 3 texts, memory, decode, retrieval, greedy
    again = run(models, tmp_path, "source", "mla4")
    assert (again.measured, again.reused) == (0, 21) and again.models == first.models
    more = run(models, tmp_path, "source", "mla4", "mla20")
    assert (more.measured, more.reused) == (7, 21)


def test_everything_that_matters_is_part_of_the_key(models: dict[str, str], tmp_path: Path) -> None:
    suite = tmp_path / "s.yaml"
    suite.write_text("name: s\nwindow: 32\nwindows: 2\ntexts: {technical: {python: topics}}\n")
    model = tiny_model(tmp_path / "model")
    own = {"m": str(model)}

    def measured(**options: Any) -> int:
        found: int = run(own, tmp_path / "parts", "m", suite=str(suite), **options).measured
        return found

    assert measured() == 2 and measured() == 0
    assert measured(dtype="float64") == 2 and measured(batch_size=1) == 2
    suite.write_text("name: s\nwindow: 32\nwindows: 3\ntexts: {technical: {python: topics}}\n")
    assert measured() == 1  # the text; memory depends on the window only
    tiny_model(model, seed=5)
    assert measured() == 2 and measured() == 0


def test_an_interrupted_run_goes_on(
    models: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def interrupt(*_: Any) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(suite_parts, "decode_figures", interrupt)
        with pytest.raises(KeyboardInterrupt):
            run(models, tmp_path, "source")
    assert "4 of 14 parts are finished and kept in" in caplog.text  # three texts and memory
    result = run(models, tmp_path, "source")
    assert (result.measured, result.reused) == (10, 4)


def test_a_damaged_part_is_measured_again(models: dict[str, str], tmp_path: Path) -> None:
    run(models, tmp_path, "source")
    (file,) = [path for path in tmp_path.glob("memory-*.json") if "float32" in path.read_text()]
    file.write_text("{")
    assert run(models, tmp_path, "source").measured == 1
    for file in tmp_path.glob("text-code-*.safetensors"):
        file.unlink()  # the reference's states, which others need
    assert run(models, tmp_path, "source").measured == 1


# What is refused


@pytest.mark.parametrize(
    ("text", "match"),
    [
        ("name: s\nwindow: 8\nwindows: 1\n", "names no text: add one under texts, or with --text NAME=FILE"),
        ("name: s\nwindow: 8\nwindows: 1\ntexts: {a: {pyton: topics}}\n", "unknown key 'pyton' in .*texts.a; did you"),
        ("name: s\nwindow: 8\nwindows: 1\ntexts: {a: {}}\n", "texts.a needs exactly one of python"),
        ("name: s\nwindow: 8\nwindows: 1\ntexts: {a: {python: docs}}\n", "texts.a.python='docs': use one of topics"),
        ("name: s\nwindows: 1\ntexts: {a: {python: topics}}\n", "lacks window"),
        ("name: s\nwindow: 8.5\nwindows: 1\ntexts: {a: {python: topics}}\n", "window=8.5 must be a whole number"),
        ("name: s\nwindow: 8\nstride: 9\nwindows: 1\ntexts: {a: {python: topics}}\n", "stride=9 exceeds window=8"),
        (SUITE + "decodes: {}\n", "unknown key 'decodes' in .*did you mean 'decode'"),
        (SUITE.replace("1.0]", "1.5]"), "retrieval.passkey: depth 1.5 is outside 0..1"),
        (SUITE.replace("prompt_tokens: 16", "prompt_tokens: 65"), "greedy.prompt_tokens=65 exceeds window=64"),
        (SUITE.replace("tokens: 12", "tokens: 99"), "decode.tokens=99 must be 2 to window=64"),
        (SUITE.replace("confidence: 0.9", "confidence: 95"), "confidence=95 must be a number between 0 and 1"),
        (SUITE.replace("lengths: [170, 300]", "lengths: [long]"), "lengths: 'long' is not what belongs there"),
        (SUITE.replace("bfloat16: true", "bfloat16: maybe"), "bfloat16='maybe' must be true or false"),
        (SUITE.replace("lengths: [170, 300]", "lengths: [-64]"), "lengths: -64 is not what belongs there"),
        ("name: s\nwindow: 8\nwindows: 1\ntexts: {a: {python: topics}}\ngreedy: {}\n", "greedy lacks prompts"),
        ("- a\n", "holds list, not option names"),
    ],
)
def test_a_wrong_suite_is_named(tmp_path: Path, text: str, match: str) -> None:
    (tmp_path / "s.yaml").write_text(text)
    with pytest.raises(BadOption, match=match):
        read_suite(str(tmp_path / "s.yaml"))


def test_empty_parts_mean_their_defaults_and_empty_keys_nothing(tmp_path: Path) -> None:
    least = "name: s\nwindow: 256\nwindows: 1\ntexts: {a: {python: topics}}\n"
    (tmp_path / "s.yaml").write_text(least + "decode: {}\nbootstrap: {}\ngreedy:\nstride:\n")
    suite = read_suite(str(tmp_path / "s.yaml"))
    assert suite.decode == DecodeSpec() and suite.bootstrap == BootstrapSpec() and suite.greedy is None
    # the name of the file is no key: "shots" alone may be 0
    (tmp_path / "shots.yaml").write_text(least.replace("windows: 1", "windows: 0"))
    with pytest.raises(BadOption, match="windows=0 must be a whole number of 1 or more"):
        read_suite(str(tmp_path / "shots.yaml"))


def test_a_text_may_have_any_name(models: dict[str, str], tmp_path: Path) -> None:
    suite = tmp_path / "s.yaml"
    suite.write_text('name: s\nwindow: 32\nwindows: 2\ntexts: {"a/b": {python: topics}, "../$x_{": {python: stdlib}}\n')
    result = run(models, tmp_path / "parts", "source", "mla4", suite=str(suite))
    assert {"text a/b", "text ../$x_{"} <= result.models[1].parts.keys()
    assert html_page(result.to_json()).count("<svg") >= 1


def test_the_shipped_suites_are_whole(tmp_path: Path) -> None:
    assert {path.stem for path in SUITES.glob("*.yaml")} == {"quick", "standard"}
    for path in SUITES.glob("*.yaml"):
        assert read_suite(str(path)).name == path.stem
    book = tmp_path / "book.txt"
    book.write_text("a" * 99)
    suite = read_suite(str(SUITES / "quick.yaml"), (f"prose={book}",))
    assert suite.texts["prose"].data == str(book) and list(suite.texts)[-1] == "prose"
    with pytest.raises(BadOption, match="text='prose' is not NAME=FILE"):
        read_suite(str(SUITES / "quick.yaml"), ("prose",))


def test_the_texts_of_the_shipped_suites_exist_everywhere() -> None:
    documents = stdlib_documents()
    assert sum(map(len, documents)) > 24 * 1024 * 5 and documents == stdlib_documents()
    assert "import" in documents[0] + documents[1]


def test_a_chat_text_needs_a_template(caplog: pytest.LogCaptureFixture, tmp_path: Path) -> None:
    (tmp_path / "s.yaml").write_text(SUITE)
    suite = read_suite(str(tmp_path / "s.yaml"))
    tokenizer: PreTrainedTokenizerFast = tiny_tokenizer()
    told = read_texts(suite, tokenizer)[2]
    assert told.name == "chat" and "<|im_start|>user" in tokenizer.decode(told.windows.ids[0])
    (tmp_path / "s.yaml").write_text(SUITE.replace("windows: 5", "windows: 5\nstride: 16", 1))
    overlapping = read_texts(read_suite(str(tmp_path / "s.yaml")), tokenizer)
    assert [text.stride for text in overlapping] == [16, 16, 64]  # conversations stand alone
    assert int(overlapping[0].windows.scored.sum()) == 63 + 4 * 16
    tokenizer.chat_template = None
    assert [text.name for text in read_texts(suite, tokenizer)] == ["technical", "code"]
    assert "chat is left out: the tokenizer has no chat template" in caplog.text


def test_models_of_other_tokenizers_are_refused(models: dict[str, str], tmp_path: Path) -> None:
    other = tiny_text.save(tiny_text.llama(0), tmp_path / "other")
    with pytest.raises(BadOption, match=r"the tokenizers of .*other and .*source cut the same text differently"):
        run({**models, "other": other}, tmp_path / "parts", "source", "other")


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"suite": "s.yaml", "window": 8}, "window=8: with --suite the suite decides"),
        ({"suite": "s.yaml", "plot": "x.png"}, "plot='x.png': with --suite the suite decides"),
        ({"html": "x.html"}, "html='x.html': --html belongs to a suite; add --suite FILE"),
        ({"text": ("a=b",)}, "--text belongs to a suite"),
    ],
)
def test_options_of_the_other_kind_are_refused(options: dict[str, Any], match: str) -> None:
    with pytest.raises(BadOption, match=match):
        mla_convert.EvalRecipe(("m",), **options)


def test_each_call_names_the_other(models: dict[str, str]) -> None:
    with pytest.raises(BadOption, match="call mla_convert.run_suite"):
        mla_convert.evaluate(models=(models["source"],), suite="s.yaml")
    with pytest.raises(BadOption, match="no suite is named"):
        mla_convert.run_suite(models=(models["source"],))


def test_the_command_prints_and_writes(models: dict[str, str], tmp_path: Path) -> None:
    files = [part for kind in ("json", "html", "markdown") for part in (f"--{kind}", str(tmp_path / f"r.{kind}"))]
    names = [models["source"], models["mla20"]]
    arguments = ["eval", "--suite", models["suite.yaml"], *names, "--parts", str(tmp_path / "parts"), *files]
    found = CliRunner().invoke(cli.app, arguments)
    assert found.exit_code == 0, found.output
    printed = " ".join(found.stdout.split())
    assert "suite small" in printed and "21 parts measured, 0 taken from an earlier run" in printed
    written = json.loads((tmp_path / "r.json").read_text())
    assert written["environment"]["versions"]["torch"] and "commit" in written
    again = CliRunner().invoke(cli.app, ["report", str(tmp_path / "r.json"), "--html", str(tmp_path / "again.html")])
    assert again.exit_code == 0, again.output
    assert (tmp_path / "again.html").read_text() == (tmp_path / "r.html").read_text()


@pytest.mark.slow
def test_the_gpu_quality_check_runs_without_a_gpu_too(tmp_path: Path) -> None:
    """The script in bfloat16 on the CPU; on a GPU only DEVICE differs."""
    (tmp_path / "mla-convert").write_text(f'#!/bin/sh\nexec {sys.executable} -m mla_convert.cli -q "$@"\n')
    (tmp_path / "mla-convert").chmod(0o755)
    paths = {"PATH": f"{tmp_path}:{os.environ['PATH']}", "PYTHONPATH": str(SUITES.parent.parent), "DEVICE": "cpu"}
    paths["CONVERT_ARGS"] = "--calib-windows 4 --window 64"
    source = tiny_model(tmp_path / "source", projection_std=0.05)  # attention so even that verify's bound is met
    script = [str(SUITES.parent / "gpu_quality.sh"), str(source), str(tmp_path / "out"), "30", "10"]
    subprocess.run(["bash", *script], check=True, env=os.environ | paths, capture_output=True)
    written = json.loads((tmp_path / "out" / "suite.json").read_text())
    assert [model["dtype"] for model in written["models"]] == ["bfloat16", "bfloat16"]
    assert written["models"][1]["parts"]["memory"]["cache_measured"] == 4 * 2 * (30 + 10)
    assert (tmp_path / "out" / "suite.html").stat().st_size > 10_000
