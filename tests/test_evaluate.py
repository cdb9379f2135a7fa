import importlib
import json
import logging
import math
from pathlib import Path
from typing import Any

import pytest
import tiny_text
import torch
from tiny import fill, tiny_class
from torch.nn.functional import cross_entropy, kl_div, log_softmax
from transformers.cache_utils import DynamicCache

import mla_convert
from mla_convert.calibration.texts import token_windows
from mla_convert.errors import BadCheckpoint, BadOption, UnsupportedSource
from mla_convert.evaluation.evaluate import cache_bytes, cache_bytes_per_token
from mla_convert.evaluation.scoring import full_windows, head, hidden_states, padded_windows, score
from mla_convert.interface import report


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    folder = tmp_path_factory.mktemp("models")
    (folder / "text.txt").write_text(tiny_text.text(700), encoding="utf-8")
    return {
        "text": str(folder / "text.txt"),
        "llama": tiny_text.save(tiny_text.llama(0), folder / "llama"),
        "copy": tiny_text.save(tiny_text.llama(0), folder / "copy"),
        "mla": tiny_text.save(tiny_text.deepseek(1), folder / "mla"),
        "bos": tiny_text.save(tiny_text.llama(0), folder / "bos", adds_bos=True),
    }


def run(files: dict[str, str], *names: str, **options: Any) -> Any:
    options = {
        "windows": 16,
        "window": 32,
        "eval_data": (files["text"],),
        "reference": files["llama"],
    } | options
    return mla_convert.evaluate(models=tuple(files[name] for name in names), **options)


def test_the_figures_are_those_of_the_stock_logits(files: dict[str, str]) -> None:
    """Against cross_entropy and kl_div of the full logits in fp64; measured difference 0."""
    result = run(files, "mla", dtype="float64", batch_size=5)
    base, mla = result.scores
    ids = torch.tensor(tiny_text.tokenizer()(tiny_text.text(700))["input_ids"])[: 16 * 32].view(16, 32)
    with torch.no_grad():
        p = log_softmax(tiny_text.llama(0).double()(ids).logits[:, :-1].flatten(0, 1), -1)
        q = log_softmax(tiny_text.deepseek(1).double()(ids).logits[:, :-1].flatten(0, 1), -1)
    targets = ids[:, 1:].flatten()
    per_token = kl_div(q, p, log_target=True, reduction="none").sum(1)
    assert base.nll == pytest.approx(float(cross_entropy(p, targets)), abs=1e-9)
    assert mla.nll == pytest.approx(float(cross_entropy(q, targets)), abs=1e-9)
    assert mla.kl == pytest.approx(float(per_token.mean()), abs=1e-9)
    assert mla.kl_p99 == pytest.approx(float(per_token.quantile(0.99, interpolation="higher")), abs=1e-9)
    assert mla.top1_agreement == pytest.approx(float((p.argmax(1) == q.argmax(1)).double().mean()), abs=1e-9)
    assert mla.perplexity == pytest.approx(math.exp(mla.nll))
    assert mla.excess == pytest.approx(mla.nll - base.nll, abs=1e-12)
    assert result.tokens_scored == 16 * 31
    assert mla.kl > 0.1 and mla.top1_agreement < 0.9  # two different models: the comparison is not vacuous


def test_identical_models_differ_by_exactly_nothing(files: dict[str, str]) -> None:
    result = run(files, "llama", "copy")
    assert [score.model for score in result.scores] == [files["llama"], files["copy"]]
    for each in result.scores:
        assert (each.excess, each.excess_error, each.kl, each.kl_p99, each.top1_agreement) == (0, 0, 0, 0, 1)


def test_the_batch_size_changes_nothing(files: dict[str, str]) -> None:
    """fp32, 16 windows; measured spread of nll and KL over batch sizes 0."""
    runs = [run(files, "mla", batch_size=size) for size in (1, 4, 16)]
    for field in ("nll", "kl", "excess"):
        values = [getattr(result.scores[1], field) for result in runs]
        assert max(values) - min(values) <= 1e-6, field
    assert len({result.tokens_scored for result in runs}) == 1


@pytest.mark.parametrize("build", [tiny_text.llama, tiny_text.deepseek])
@pytest.mark.parametrize("side", ["left", "right"])
def test_padding_is_never_scored(build: Any, side: str) -> None:
    """Padded with an ordinary token, against one by one; measured 3e-6 per token, 2e-8 in the mean."""
    model = build(3)
    ids = torch.randint(0, tiny_text.WORDS, (7, 40), generator=torch.Generator().manual_seed(0))
    sequences = [row[: 40 - 5 * i] for i, row in enumerate(ids)]
    padded = padded_windows(sequences, pad_id=0, side=side)
    assert len(padded.targets) == sum(len(sequence) - 1 for sequence in sequences)
    single = [full_windows(sequence[None]) for sequence in sequences]
    alone = torch.cat([score(head(model), hidden_states(model, one, 1), one.targets).nll for one in single])
    for batch_size in (1, 4, 16):
        together = score(head(model), hidden_states(model, padded, batch_size), padded.targets).nll
        assert torch.equal(padded.targets, torch.cat([one.targets for one in single]))
        assert (together - alone).abs().max() <= 1e-5
        assert abs(together.mean() - alone.mean()) <= 1e-6
    blind = padded_windows(sequences, pad_id=0, side=side)
    blind.mask[:] = True  # negative control: padding read as text (on the right no real token can see it)
    wrong = score(head(model), hidden_states(model, blind, 4), padded.targets).nll
    assert ((wrong - alone).abs().max() > 0.1) == (side == "left")


@pytest.mark.parametrize("bos", [False, True])
@pytest.mark.parametrize("stride", [1, 7, 31, 32])
def test_sliding_windows_score_every_token_once(bos: bool, stride: int) -> None:
    tok = tiny_text.tokenizer(adds_bos=bos)
    ids = token_windows(tok, [tiny_text.text(200)], 32, None, stride)
    body = 31 if bos else 32
    windows = full_windows(ids, min(stride, body))
    position = torch.arange(len(ids))[:, None] * min(stride, body) + torch.arange(32) - (1 if bos else 0)
    scored = position[:, 1:][windows.scored].tolist()
    assert len(scored) == len(set(scored))
    last = int(position[-1, -1])
    without_context = range(0, last + 1, 32) if stride == 32 and not bos else [] if bos else [0]
    assert set(scored) == set(range(last + 1)) - set(without_context)


def test_a_smaller_stride_gives_more_context_and_is_reported(files: dict[str, str]) -> None:
    result = run(files, "llama", stride=8, windows=5)
    assert (result.stride, result.windows, result.tokens_scored) == (8, 5, 31 + 4 * 8)


def test_bos_is_stated_and_predicts_the_first_token(files: dict[str, str]) -> None:
    result = run(files, "bos", reference=None, windows=4)
    assert result.bos == "BOS at the start of every window"
    assert (result.tokens_scored, result.stride) == (4 * 31, 31)
    assert result.scores[0].kl is None and result.scores[0].excess is None
    with pytest.raises(BadOption, match="cut the same text differently"):
        run(files, "bos")


def test_fewer_windows_are_counted_not_assumed(files: dict[str, str], caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        result = run(files, "llama", windows=50)
    assert (result.windows, result.tokens_scored) == (21, 21 * 31)
    assert "the text holds 21" in caplog.text


def test_cache_bytes_are_counted_in_the_tensors_held() -> None:
    assert cache_bytes_per_token(tiny_text.llama()) == (2 * 2 * 2 * 12 * 4,) * 2
    assert cache_bytes_per_token(tiny_text.deepseek()) == (2 * (20 + 6) * 4,) * 2
    assert cache_bytes_per_token(tiny_text.deepseek().bfloat16()) == (2 * (20 + 6) * 2,) * 2
    assert cache_bytes(tiny_text.deepseek(), 10) == 10 * 2 * (20 + 6) * 4


def test_the_measured_cache_is_not_the_formula(monkeypatch: pytest.MonkeyPatch) -> None:
    """A runtime that keeps full keys and values beside a latent config must show."""
    model = tiny_text.deepseek()
    update = DynamicCache.update

    def expanding(self: Any, keys: Any, values: Any, layer: int, **kwargs: Any) -> Any:
        repeated = keys.repeat(1, 4, 1, 1), values.repeat(1, 4, 1, 1)
        return tuple(each[:, :1] for each in update(self, *repeated, layer, **kwargs))

    monkeypatch.setattr(DynamicCache, "update", expanding)
    formula, measured = cache_bytes_per_token(model)
    assert measured == 4 * formula


@pytest.mark.parametrize(
    ("family", "key", "value"),
    [("gemma2", "final_logit_softcapping", 0.7), ("granite", "logits_scaling", 3.0), ("cohere2", "logit_scale", 0.3)],
)
def test_what_a_class_does_after_its_head_is_scored(family: str, key: str, value: float) -> None:
    model = tiny_class(family, {key: value}).eval()
    fill(model, 0, 0.3)
    ids = torch.randint(0, 250, (2, 24), generator=torch.Generator().manual_seed(1))
    windows = full_windows(ids)
    found = score(head(model), hidden_states(model, windows, 2), windows.targets).nll.mean().item()
    with torch.no_grad():
        wanted = model(input_ids=ids, labels=ids).loss.item()
    assert found == pytest.approx(wanted, rel=1e-5)  # measured 1.1e-7
    # control: without it
    plain = score(model.lm_head, hidden_states(model, windows, 2), windows.targets).nll.mean().item()
    assert abs(plain / wanted - 1) > 1e-2  # measured at least 0.48


def test_a_head_that_is_no_linear_map_is_refused() -> None:
    model = tiny_class("gemma2", {})
    model.lm_head = torch.nn.Identity()
    with pytest.raises(UnsupportedSource, match="its head is Identity, not a linear map; it cannot be scored"):
        head(model)


def test_unusable_options_are_named_before_any_model_is_loaded(
    files: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(BadOption, match=r"nowhere/x\.json: its folder does not exist"):
        run(files, "llama", json=str(tmp_path / "nowhere" / "x.json"))
    loaded = list[str]()
    module = importlib.import_module("mla_convert.evaluation.evaluate")
    monkeypatch.setattr(module, "load_model", lambda name, *rest: loaded.append(name))
    with pytest.raises(BadCheckpoint, match=r"absent: no folder of a model, and no model of the hub that could be"):
        mla_convert.evaluate(models=(files["llama"], "absent"), eval_data=(files["text"],))
    with pytest.raises(BadCheckpoint, match="absent: no folder of a model"):
        mla_convert.run_suite(
            models=(files["llama"], "absent"),
            suite=str(Path(__file__).parents[1] / "eval" / "suites" / "quick.yaml"),
            reference=files["llama"],
        )
    assert loaded == []
    small = tiny_text.llama(vocab_size=50)
    windows = full_windows(torch.full((1, 8), 60))
    with pytest.raises(BadOption, match=r"token id 60 is outside the 50"):
        hidden_states(small, windows, 1)


def test_json_table_and_picture_hold_the_result(
    files: dict[str, str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    result = run(files, "mla", json=str(tmp_path / "x.json"), plot=str(tmp_path / "x.png"))
    written = json.loads((tmp_path / "x.json").read_text(encoding="utf-8"))
    assert written["scores"][1]["nll"] == result.scores[1].nll
    assert written["tokens_scored"] == 16 * 31
    assert {"torch", "transformers", "mla_convert"} <= set(written["environment"]["versions"])
    assert written["environment"]["machine"]["cores"] >= 1
    assert (tmp_path / "x.png").read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"
    report.print_evaluation(result)
    printed = " ".join(capsys.readouterr().out.split())
    assert "496 tokens scored" in printed and "16 windows of 32 tokens, stride 32, no BOS" in printed
