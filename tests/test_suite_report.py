"""Reports of suites: the README's table, the page, several files as one; worked out from a written-down result."""

import copy
import math
import re
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

import mla_convert
from mla_convert.errors import BadOption
from mla_convert.evaluation.suite_html import html_page
from mla_convert.evaluation.suite_report import markdown_table, merged, over_texts, print_suite, worst_text
from mla_convert.interface import pictures
from mla_convert.interface.report import write_json


def text_part(nll: float, excess: float, kl: float, tokens: int = 100) -> dict[str, Any]:
    return {
        "nll": nll, "excess": excess, "kl": kl, "top1": 1 - kl, "tokens": tokens, "windows": 2,
        "perplexity": 2.718281828**nll,
        "bytes": 400, "bits_per_byte": nll / 4, "excess_interval": [excess - 0.01, excess + 0.01], "kl_p99": 3 * kl,
        "worst": {"tokens": 1, "excess": 10 * excess, "kl": kl},
        "by_position": [
            {"from": 1, "to": 1, "tokens": 2, "nll": nll, "excess": excess, "kl": kl},
            {"from": 2, "to": 3, "tokens": 4, "nll": nll, "excess": 2 * excess, "kl": kl},
        ],
        "per_window": {"tokens": [50, 50], "nll": [nll, nll], "excess": [excess, excess]},
    }  # fmt: skip


def model(label: str, cache: int, excess: tuple[float, float], reference: bool = False) -> dict[str, Any]:
    return {
        "label": label, "model": label, "dtype": "float32", "is_reference": reference, "sha256": label * 9,
        "parts": {
            "text prose": text_part(2.0 + excess[0], excess[0], abs(excess[0])),
            "text code": text_part(1.0 + excess[1], excess[1], abs(excess[1]), tokens=300),
            "memory": {"cache_formula": cache, "cache_measured": cache, "held": 9 * cache, "held_tokens": 9,
                       "parameters": 10**6, "peak": 2**30, "peak_of": "process"},
            "decode": {"tokens": 9.0, "forward": 2.0, "cached": 2.0, "cached_difference": 1e-6, "absorbed": None,
                       "absorbed_difference": None, "tokens_per_second": 50.0, "text": "prose"},
            "retrieval passkey": {"keys": 1, "right": 0.5, "probes": 2, "left_out": [],
                                  "rows": [{"length": 9, "depth": 0.5, "probes": 2, "right": 0.5, "nll": 1.0}]},
            "greedy": {"prefix": 0.25, "identical": 0.0, "prompts": 2, "example": "<b>& so on"},
            "lm_eval quiz": {"task": "quiz", "numbers": {"acc": 0.75, "acc_stderr": 0.1}},
        },
    }  # fmt: skip


def result(*others: dict[str, Any]) -> dict[str, Any]:
    suite = {
        "name": "small", "window": 8, "retrieval": {"passkey": {}}, "greedy": {}, "decode": {}, "lm_eval": None,
        "bootstrap": {"confidence": 0.95},
    }  # fmt: skip
    return {
        "suite": suite | {"greedy": {"prompts": 2}},
        "models": [model("source", 1000, (0.0, 0.0), reference=True), *others],
        "texts": [{"name": name, "sha256": name * 20, "stride": 8} for name in ("prose", "code")],
        "bos": "no BOS", "device": "cpu", "batch_size": 4, "commit": "abc",
        "environment": {"versions": {"torch": "2", "transformers": "5"},
                        "machine": {"gpu": None, "cpu": "x", "cores": 2, "system": "Linux"}},
    }  # fmt: skip


SMALL = model("half", 500, (0.1, 0.2))


def test_the_table_of_a_readme() -> None:
    table = markdown_table(result(SMALL)).splitlines()
    assert table[0] == "| model | cache B | prose | code | KL | top-1 | worst 1 % | passkey | greedy | lm_eval quiz |"
    assert table[2] == "| source | 1,000 | ppl 7.39 | ppl 2.72 |  |  |  | 50% |  | acc 0.75 |"
    cells = "500 | +0.100 (+0.090 to +0.110) | **+0.200 (+0.190 to +0.210)** | 0.1750 | 82.5% | +2.00 | 50% | 25%"
    assert table[3] == f"| half | {cells} | acc 0.75 |"
    assert "400 tokens scored in windows of 8, no BOS" in table[5] and "commit abc" in table[5]


def test_a_single_window_has_no_interval() -> None:
    lone = copy.deepcopy(SMALL)
    lone["parts"]["text prose"]["excess_interval"] = None
    assert "| half | 500 | +0.100 | **+0.200 (" in markdown_table(result(lone))
    assert html_page(result(lone)).count("<svg") == 4


def test_the_worst_text_is_marked_only_where_something_was_lost() -> None:
    names = ["prose", "code"]
    assert worst_text(SMALL, names) == "code" and worst_text(SMALL, ["code"]) is None
    assert worst_text(model("better", 9, (-0.1, -0.2)), names) is None
    assert worst_text(result()["models"][0], names) is None
    assert over_texts(SMALL, names, "excess") == pytest.approx((0.1 * 100 + 0.2 * 300) / 400)


def test_the_page_stands_alone_and_says_everything() -> None:
    page = html_page(result(SMALL))
    assert not re.search(r'<script|<link|<img|@import|(src|href)="(?!#)', page)
    assert page.count("<svg") == 4  # size, models, positions, decoding
    assert (
        "half</b> caches 50% of the reference&#x27;s bytes" in page or "half</b> caches 50% of the reference's" in page
    )
    assert "worse by 0.175 nats per token over all texts, most on code (+0.200)" in page
    assert "&lt;b&gt;&amp; so on" in page and "<b>& so on" not in page
    assert page.count('class="worst"') == 1
    for title in ("Every text", "Through the cache", "Hidden numbers", "Continuations", "Memory", "What the words mean",
                  "Tasks of lm-evaluation-harness", "How to repeat it"):  # fmt: skip
        assert f"<h2>{title}</h2>" in page
    assert html_page(result(SMALL)) == page  # the same results, the same file


def test_a_page_of_the_reference_alone_has_no_pictures() -> None:
    assert "<svg" not in html_page(result()) and "Every text" in html_page(result())


def test_results_of_several_runs_become_one(tmp_path: Path) -> None:
    other = result(SMALL, model("third", 300, (0.3, 0.4)))
    both = merged([result(SMALL), other], ("a", "b"))
    assert [each["label"] for each in both["models"]] == ["source", "half", "third"]
    changed = copy.deepcopy(other)
    changed["texts"][0]["sha256"] = "other"
    with pytest.raises(BadOption, match="b and a were measured on different texts"):
        merged([result(SMALL), changed], ("a", "b"))
    changed = copy.deepcopy(other)
    changed["models"][0]["sha256"] = "other"
    with pytest.raises(BadOption, match="b and a compare with different references"):
        merged([result(SMALL), changed], ("a", "b"))
    for name, content in (("a", result(SMALL)), ("b", other)):
        write_json(content, tmp_path / f"{name}.json")
    files = {kind: str(tmp_path / f"r.{kind}") for kind in ("html", "markdown")}
    found = mla_convert.write_report(results=(str(tmp_path / "a.json"), str(tmp_path / "b.json")), **files)
    assert len(found["models"]) == 3
    assert "| third |" in (tmp_path / "r.markdown").read_text() and "third" in (tmp_path / "r.html").read_text()


def test_other_files_are_no_results(tmp_path: Path) -> None:
    with pytest.raises(BadOption, match="cannot read results none.json"):
        mla_convert.write_report(results=("none.json",))
    (tmp_path / "x.json").write_text("{}")
    with pytest.raises(BadOption, match="holds no results of a suite"):
        mla_convert.write_report(results=(str(tmp_path / "x.json"),))


def test_a_report_never_replaces_what_it_reads(tmp_path: Path) -> None:
    file = tmp_path / "a.json"
    write_json(result(SMALL), file)
    before = file.read_bytes()
    for options in ({"html": str(file)}, {"markdown": f"{tmp_path}/./a.json"}):
        with pytest.raises(BadOption, match=r"a.json would replace .*a.json; choose another file"):
            mla_convert.write_report(results=(str(file),), **options)
    with pytest.raises(BadOption, match="would replace the page"):
        mla_convert.write_report(results=(str(file),), html=str(tmp_path / "x"), markdown=str(tmp_path / "x"))
    assert file.read_bytes() == before


def test_damaged_results_are_no_results(tmp_path: Path) -> None:
    without = result(SMALL)
    without["models"] = without["models"][1:]
    for number, content in enumerate(({"suite": {}, "models": []}, without)):
        write_json(content, tmp_path / f"{number}.json")
        with pytest.raises(BadOption, match=f"{number}.json holds no results of a suite"):
            mla_convert.write_report(results=(str(tmp_path / f"{number}.json"),))


def test_suites_that_measure_other_things_are_reported_apart() -> None:
    other = copy.deepcopy(result(SMALL))
    other["suite"]["greedy"] = None
    with pytest.raises(BadOption, match="b and a differ in the suite's greedy; report them apart"):
        merged([result(SMALL), other], ("a", "b"))
    renamed = copy.deepcopy(result(model("third", 250, (0.2, 0.2))))
    renamed["models"][0]["label"] = "the same source"
    assert [m["label"] for m in merged([result(SMALL), renamed], ("a", "b"))["models"]] == ["source", "half", "third"]


def test_a_model_that_predicts_nothing_is_reported(tmp_path: Path) -> None:
    # write_json writes NaN as text; read back it must be a number, or no table can be made of it.
    broken = copy.deepcopy(SMALL)
    broken["parts"]["text prose"] |= {"excess": math.nan, "kl": math.nan, "excess_interval": [math.nan, math.inf]}
    write_json(result(broken), tmp_path / "a.json")
    found = mla_convert.write_report(
        results=(str(tmp_path / "a.json"),), html=str(tmp_path / "a.html"), markdown=str(tmp_path / "a.md")
    )
    assert math.isnan(found["models"][1]["parts"]["text prose"]["kl"])
    assert "| half | 500 | **+nan (+nan to +inf)** |" in (tmp_path / "a.md").read_text()


@pytest.mark.parametrize("name", ["$x_{$ a", "_hidden", "run[/v2]", "a|b", "<b>"])
def test_any_name_can_be_shown(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    odd = result(model(name, 500, (0.1, 0.2)), model("other", 250, (0.2, 0.2)))
    shown = html_page(odd)
    print_suite(odd, Console(width=300))
    assert name in capsys.readouterr().out
    assert name.replace("|", "\\|") in markdown_table(odd)
    if name == "_hidden":  # pictures leave such labels out of their legends
        assert pictures.plain(name) == " _hidden" and shown.count("<svg") == 4


def test_the_terminal_says_which_text_is_worst() -> None:
    console = Console(record=True, width=100)
    print_suite(result(SMALL), console)
    printed = " ".join(console.export_text().split())
    assert "worst: +0.200 (+0.190 to +0.210)" in printed and "ppl 7.39" in printed and "82.5%" in printed
