"""Perplexities of a suite are those of transformers' own recipe and of lm-evaluation-harness."""

import json
import math
from pathlib import Path
from typing import Any

import pytest
import tiny_text
import torch
from suites import by_label, models_in, run
from tiny import tiny_tokenizer

from mla_convert.calibration.texts import token_stream
from mla_convert.errors import BadOption
from mla_convert.evaluation.suite import read_suite
from mla_convert.source.loading import load_model

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    return models_in(tmp_path_factory.mktemp("suite"))


def test_transformers_own_strided_recipe_agrees(models: dict[str, str], tmp_path: Path) -> None:
    """Its documentation's loop: labels -100 where a token was scored before. Measured relative difference 2e-8.

    Its mean gives every later window one token less than it scores; counted so, 2e-4 off: the negative control.
    """
    window, stride, count = 64, 24, 9
    (tmp_path / "strided.yaml").write_text(
        f"name: strided\nwindow: {window}\nstride: {stride}\nwindows: {count}\n"
        "texts: {technical: {python: topics}}\n"
    )
    own = by_label(run(models, tmp_path / "parts", "source", suite=str(tmp_path / "strided.yaml")))["source"]
    model = load_model(models["source"], torch.float32, CPU)
    suite = read_suite(str(tmp_path / "strided.yaml"))
    ids = token_stream(tiny_tokenizer(), stream_documents(suite))[: stride * (count - 1) + window]
    losses, counts, wrong, before = [], [], [], 0
    for begin in range(0, stride * count, stride):
        end = begin + window
        labels = ids[begin:end].clone()
        labels[: -(end - before)] = -100
        with torch.no_grad():
            losses.append(float(model(ids[None, begin:end], labels=labels[None]).loss))
        counts.append(int((labels[1:] != -100).sum()))
        wrong.append(int((labels != -100).sum()) - 1)
        before = end
    perplexity = math.exp(sum(x * n for x, n in zip(losses, counts, strict=True)) / sum(counts))
    part = own["text technical"]
    assert part["tokens"] == sum(counts) == window - 1 + stride * (count - 1)
    assert part["perplexity"] == pytest.approx(perplexity, rel=1e-4)
    biased = math.exp(sum(x * n for x, n in zip(losses, wrong, strict=True)) / sum(wrong))
    assert abs(biased / perplexity - 1) > 1e-4


def stream_documents(suite: Any) -> list[str]:
    from mla_convert.evaluation.suite import documents_of

    return documents_of(suite.texts["technical"])


TASK = """
task: local_text
dataset_path: json
dataset_kwargs: {{data_files: {{test: {data}}}}}
test_split: test
output_type: loglikelihood_rolling
doc_to_text: ""
doc_to_target: "{{{{text}}}}"
metric_list:
  - metric: word_perplexity
  - metric: byte_perplexity
  - metric: bits_per_byte
metadata: {{version: 1.0}}
"""


def test_lm_eval_agrees(tmp_path: Path) -> None:
    """Its rolling log-likelihood of the same text, which begins with BOS: measured relative difference 6e-8.

    With the tokenizer's own BOS beside the harness's, 6e-5 of the loss and 3e-4 of the perplexity off.
    """
    pytest.importorskip("lm_eval")
    text = tiny_text.text(180)
    (tmp_path / "text.txt").write_text(text)
    (tmp_path / "tasks").mkdir()
    (tmp_path / "data.jsonl").write_text(json.dumps({"text": text}) + "\n")
    (tmp_path / "tasks" / "local_text.yaml").write_text(TASK.format(data=tmp_path / "data.jsonl"))
    model = tiny_text.save(tiny_text.llama(0), tmp_path / "model", adds_bos=True)
    (tmp_path / "suite.yaml").write_text(
        f"name: harness\nwindow: 181\nwindows: 1\ntexts: {{words: {{data: {tmp_path / 'text.txt'}}}}}\n"
        f"lm_eval: {{tasks: [local_text], include: {tmp_path / 'tasks'}}}\n"
    )
    parts = by_label(run({"m": model}, tmp_path / "parts", "m", suite=str(tmp_path / "suite.yaml")))["model"]
    own, theirs = parts["text words"], parts["lm_eval local_text"]["numbers"]
    assert own["tokens"] == 180 and own["bytes"] == len(text.encode())
    assert theirs["bits_per_byte"] == pytest.approx(own["bits_per_byte"], rel=1e-4)
    assert theirs["byte_perplexity"] == pytest.approx(2 ** own["bits_per_byte"], rel=1e-4)
    assert theirs["word_perplexity"] == pytest.approx(own["perplexity"], rel=1e-4)  # here every token is a word


def test_lm_eval_tasks_without_lm_eval_are_refused(
    models: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "s.yaml").write_text(
        "name: s\nwindow: 8\nwindows: 1\ntexts: {a: {python: topics}}\nlm_eval: {tasks: [x]}\n"
    )
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(BadOption, match="lm_eval is not installed; pip install lm_eval"):
        run(models, tmp_path / "parts", "source", suite=str(tmp_path / "s.yaml"))
