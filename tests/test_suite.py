"""Suites: what is measured is right, the same for every batch size, kept when interrupted, told apart by inputs."""

import math
from pathlib import Path
from typing import Any

import pytest
import tiny_text
import torch
from suites import by_label, models_in, run
from tiny import edit_config, tiny_model, tiny_tokenizer

import mla_convert
from mla_convert.evaluation.compare import by_position, figures, interval, worst
from mla_convert.evaluation.decode_path import decode_figures
from mla_convert.evaluation.scoring import TokenScores, full_windows
from mla_convert.evaluation.suite_texts import token_bytes
from mla_convert.source.loading import load_model

SUITES = Path(__file__).parent.parent / "eval" / "suites"
CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    return models_in(tmp_path_factory.mktemp("suite"))


@pytest.fixture(scope="module")
def result(models: dict[str, str], tmp_path_factory: pytest.TempPathFactory) -> Any:
    return run(models, tmp_path_factory.mktemp("parts"), "source", "copy", "mla4", "mla20")


# What is compared


def test_identical_models_differ_by_exactly_nothing(result: Any) -> None:
    found = by_label(result)
    for label in ("source", "copy"):
        for name in ("technical", "code", "chat"):
            part = found[label][f"text {name}"]
            assert (part["excess"], part["kl"], part["top1"], part["kl_p99"]) == (0, 0, 1, 0)
            assert part["excess_interval"] == [0, 0] and part["worst"]["excess"] == part["worst"]["kl"] == 0
            assert all(row["excess"] == 0 for row in part["by_position"])
        assert found[label]["greedy"]["prefix"] == found[label]["greedy"]["identical"] == 1
    assert found["copy"]["retrieval passkey"] == found["source"]["retrieval passkey"]
    other = found["mla4"]["text technical"]  # negative control
    assert other["kl"] > 0.1 and other["top1"] < 0.9 and other["excess_interval"][0] != 0


def test_the_source_in_bfloat16_is_the_yardstick(result: Any) -> None:
    """Measured: KL 0.009 against 2.2 of the 20-rank conversion."""
    found = by_label(result)
    assert list(found) == ["source", "source in bfloat16", "copy", "mla4", "mla20"]
    rounding = found["source in bfloat16"]["text technical"]["kl"]
    assert 0 < rounding < 0.1 * found["mla20"]["text technical"]["kl"]


@pytest.mark.parametrize("size", [1, 16])
def test_the_batch_size_changes_nothing(models: dict[str, str], result: Any, tmp_path: Path, size: int) -> None:
    """fp32 against batches of 4; measured difference of every figure of a text and of retrieval: 0 to 3e-8."""
    other = by_label(run(models, tmp_path, "source", "mla20", batch_size=size))["mla20"]
    own = by_label(result)["mla20"]
    for name in ("technical", "code", "chat"):
        for key in ("nll", "excess", "kl", "top1"):
            assert other[f"text {name}"][key] == pytest.approx(own[f"text {name}"][key], abs=1e-6), (name, key)
    for left, right in zip(other["retrieval passkey"]["rows"], own["retrieval passkey"]["rows"], strict=True):
        assert left["nll"] == pytest.approx(right["nll"], abs=1e-6)


def test_a_suite_scores_what_eval_scores(models: dict[str, str], result: Any) -> None:
    """The same windows through `evaluate`: measured difference 0."""
    scores = mla_convert.evaluate(
        models=(models["mla4"],), reference=models["source"], windows=5, window=64, batch_size=4
    ).scores
    part = by_label(result)["mla4"]["text technical"]
    assert part["nll"] == pytest.approx(scores[1].nll, abs=1e-9)
    assert part["excess"] == pytest.approx(scores[1].excess, abs=1e-9)
    assert part["kl"] == pytest.approx(scores[1].kl, abs=1e-9)


# Units


def test_bytes_add_up_whatever_the_tokenizer_does() -> None:
    text = "naïve \U0001f600 wörds, and\n\ntabs\t."
    assert token_bytes(tiny_tokenizer(), text).tolist() != [1] * len(text)  # type: ignore[union-attr]
    for tokenizer in (tiny_tokenizer(), tiny_text.tokenizer()):
        lengths = token_bytes(tokenizer, text)
        assert lengths is not None and int(lengths.sum()) == len(text.encode())
        assert len(lengths) == len(tokenizer(text, add_special_tokens=False)["input_ids"])


def test_bits_per_byte_of_one_byte_per_token(result: Any) -> None:
    part = by_label(result)["source"]["text code"]  # ASCII and a byte-level tokenizer
    assert part["bytes"] == part["tokens"]
    assert part["bits_per_byte"] == pytest.approx(part["nll"] / math.log(2))
    assert by_label(result)["source"]["text chat"]["bits_per_byte"] is None  # a template's words are no bytes of a text


def test_positions_and_windows_add_up_to_the_mean(result: Any) -> None:
    part = by_label(result)["mla4"]["text technical"]
    rows = part["by_position"]
    assert [(row["from"], row["to"]) for row in rows] == [(1, 1), (2, 3), (4, 7), (8, 15), (16, 31), (32, 63)]
    assert sum(row["nll"] * row["tokens"] for row in rows) / part["tokens"] == pytest.approx(part["nll"])
    windows = part["per_window"]
    whole = sum(x * n for x, n in zip(windows["excess"], windows["tokens"], strict=True)) / part["tokens"]
    assert whole == pytest.approx(part["excess"])


def test_the_growth_with_context_is_seen() -> None:
    """A loss that is the position itself: means of the stretches are their middles."""
    windows = full_windows(torch.zeros(3, 17, dtype=torch.int64))
    nll = torch.arange(1.0, 17.0, dtype=torch.float64).repeat(3)
    means = [row["nll"] for row in by_position({"nll": nll}, windows)]
    assert means == [1, 2.5, 5.5, 11.5, 16]


def test_the_interval_is_the_bootstrap_of_windows() -> None:
    """Against the normal approximation for 400 windows: measured 1 % apart; constant values have no width."""
    values = torch.randn(400, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    weights = torch.ones_like(values)
    low, high = interval(values, weights, 4000, 0.95)
    half = 1.96 * float(values.std()) / 20
    assert low == pytest.approx(float(values.mean()) - half, abs=0.1 * half)
    assert high == pytest.approx(float(values.mean()) + half, abs=0.1 * half)
    assert interval(torch.full((9,), 0.25), torch.arange(1.0, 10.0), 100, 0.9) == pytest.approx((0.25, 0.25))
    # windows count by the tokens they score
    assert interval(torch.tensor([0.0, 1.0]), torch.tensor([1.0, 1e9]), 100, 0.5)[1] == pytest.approx(1)


def test_the_worst_tokens_are_the_worst() -> None:
    excess = torch.zeros(1000, dtype=torch.float64)
    excess[::100] = 3.0
    assert worst(excess, excess / 3) == {"tokens": 10, "excess": 3.0, "kl": 1.0}
    assert worst(torch.tensor([1.0, 2.0]), torch.tensor([0.0, 0.0]))["tokens"] == 1


def test_figures_without_a_reference_compare_nothing() -> None:
    windows = full_windows(torch.zeros(2, 5, dtype=torch.int64))
    found = figures(TokenScores(torch.ones(8, dtype=torch.float64)), windows, None, 10, 0.9)
    one = TokenScores(*(torch.zeros(4, dtype=torch.float64) for _ in range(4)))
    alone = figures(one, full_windows(torch.zeros(1, 5, dtype=torch.int64)), None, 10, 0.9)
    assert alone["excess_interval"] is None  # one window has no spread
    assert found["nll"] == 1 and "excess" not in found and found["bits_per_byte"] is None


# The decode path


def test_the_decode_path_gives_the_same_loss(result: Any) -> None:
    """Token by token through the cache and absorbed, fp32: measured 1e-5 of a loss of 8 at most."""
    for label in ("mla4", "mla20"):
        part = by_label(result)[label]["decode"]
        assert part["cached_difference"] < 1e-4 and part["absorbed_difference"] < 1e-4
        assert part["cached"] == pytest.approx(part["forward"], abs=1e-5)
        assert part["absorbed"] == pytest.approx(part["forward"], abs=1e-5)
    assert by_label(result)["source"]["decode"]["absorbed"] is None


def test_a_wrong_absorbed_form_is_seen(models: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Negative control: values of another scale. Measured 2.7."""
    model = load_model(models["mla20"], torch.float32, CPU)
    ids = torch.randint(0, 256, (1, 16), generator=torch.Generator().manual_seed(0))
    from mla_convert.decoding.absorb_model import AbsorbedAttention

    right = AbsorbedAttention._up
    monkeypatch.setattr(AbsorbedAttention, "_up", lambda self: (right(self)[0], 1.5 * right(self)[1]))
    assert decode_figures(model, ids)["absorbed_difference"] > 0.01  # type: ignore[operator]


def test_a_quantised_cache_is_scored_and_the_model_is_as_before(models: dict[str, str]) -> None:
    model = load_model(models["mla20"], torch.float32, CPU)
    ids = torch.randint(0, 256, (2, 16), generator=torch.Generator().manual_seed(0))
    before = {type(module) for module in model.modules()}
    found = decode_figures(model, ids)
    for name in ("int8", "fp8"):  # measured 0.004 and 0.038
        assert 1e-7 < abs(found[name] - found["absorbed"]) < 0.1  # type: ignore[operator]
    assert {type(module) for module in model.modules()} == before


def test_lengths_beyond_the_model_are_left_out_and_said(result: Any, models: dict[str, str], tmp_path: Path) -> None:
    part = by_label(result)["source"]["retrieval passkey"]
    assert part["left_out"] == [] and {row["length"] for row in part["rows"]} == {170, 300}
    short = edit_config(tiny_model(tmp_path / "short"), max_position_embeddings=200)
    found = by_label(run({"m": str(short)}, tmp_path / "parts", "m", suite=models["suite.yaml"]))["short"]
    assert found["retrieval passkey"]["left_out"] == [300]
    assert {row["length"] for row in found["retrieval passkey"]["rows"]} == {170}


# Memory


def test_memory_is_counted(result: Any) -> None:
    part = by_label(result)["mla4"]["memory"]
    assert part["cache_formula"] == part["cache_measured"] == 4 * 4 * (4 + 10)
    assert part["held"] == 64 * part["cache_measured"] and part["peak"] > 2**20 and part["peak_of"] == "process"
