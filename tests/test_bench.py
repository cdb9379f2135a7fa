"""Bench times what it says it times: shapes, limits, bytes, memory, medians, and the model is left as it was."""

import importlib
import json
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny import tiny_model
from tiny_deepseek import prompts, tiny_deepseek
from torch import nn
from transformers import LlamaConfig

import mla_convert
from mla_convert.benchmark.bench import BenchResult, Cell, Limits, bench
from mla_convert.benchmark.bench_models import converted_config, shape_config, sizes_of
from mla_convert.benchmark.bench_report import print_bench
from mla_convert.benchmark.bench_step import Decoder, Seconds, _Clock
from mla_convert.errors import BadCheckpoint, BadOption, UnsupportedSource
from mla_convert.interface.bench_recipe import BenchRecipe, counts, size_in_bytes
from mla_convert.modeling.attention import MLAttention
from mla_convert.source.loading import load_model

bench_module = importlib.import_module("mla_convert.benchmark.bench")
RANKS = {"kv_lora_rank": 512, "qk_rope_head_dim": 64}
SHAPE = {"num_attention_heads": 6, "num_key_value_heads": 2, "hidden_size": 48, "head_dim": 10, "num_hidden_layers": 2}


@pytest.fixture
def shape(tmp_path: Path) -> str:
    """A folder with the config of a Llama-like model and no weights."""
    LlamaConfig(**SHAPE, intermediate_size=64, vocab_size=101, max_position_embeddings=256).save_pretrained(tmp_path)
    return str(tmp_path)


MEASURE = bench_module.measure_limits


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench_module, "measure_limits", lambda *_: Limits(copy=2e10, product=5e10))


def small(shape: str, **options: Any) -> BenchResult:
    defaults = {"context": "16,33", "batch": "1,3", "kv_lora_rank": 14, "qk_rope_head_dim": 6, "prefill": 16}
    return bench(BenchRecipe(shape=shape, repeats=2, new_tokens=3, **defaults | options))


def test_every_variant_is_timed_at_every_context_and_batch(shape: str, tmp_path: Path) -> None:
    result = small(shape, json=str(tmp_path / "out.json"), plot=str(tmp_path / "out.png"))
    assert len(result.cells) == 2 * 2 * 3
    for cell in result.cells:
        assert cell.fits and cell.steps_timed == 2 * 3
        assert cell.step and cell.attention and cell.core and cell.limit
        assert cell.step > cell.attention > cell.core > 0
        numbers = 2 * 2 * 10 if cell.variant.endswith("(random)") else 14 + 6
        assert cell.cache_formula == 2 * cell.batch * cell.context * numbers * 4
        # the growing buffer's spare rows, which are many at 16 tokens: 16 and a 32nd
        assert cell.cache_bytes is not None and cell.cache_bytes >= cell.cache_formula
        assert cell.cache_bytes <= cell.cache_formula * (cell.context * 33 / 32 + 16 + 3) / cell.context
        assert (cell.prefill is not None) == (cell.batch == 1 and cell.context <= 16)
    written = json.loads((tmp_path / "out.json").read_text())
    assert [c["tokens_per_second"] for c in written["cells"]] == [c.tokens_per_second for c in result.cells]
    assert written["environment"]["versions"]["torch"] and (tmp_path / "out.png").stat().st_size > 10_000


@pytest.mark.parametrize("kept", ["int8", "fp8"])
def test_a_quantised_cache_is_one_more_variant(shape: str, kept: str) -> None:
    result = small(shape, context="33", batch="2", cache_dtype=kept)
    assert [c.variant.split("), ")[-1] for c in result.cells][1:] == ["expanded", "absorbed", f"absorbed, {kept}"]
    *_, plain, quantised = result.cells
    assert quantised.cache_formula == 2 * 2 * 33 * (14 + 2 * 6 + 4) and plain.cache_formula == 2 * 2 * 33 * 20 * 4
    assert quantised.core and quantised.attention and quantised.attention > quantised.core


def test_the_largest_batch_is_what_fits_beside_the_weights(shape: str) -> None:
    """One sequence needs its cache and one layer's once more; expanded keys and values come on top."""
    result = small(shape, context="16", batch="1", memory="2M")
    weights = {c.variant: c for c in result.cells}
    assert result.memory == 2 << 20
    source, expanded, absorbed = (c.largest_batch for c in weights.values())
    assert source and expanded and absorbed and absorbed > source > expanded
    config = shape_config(BenchRecipe(shape=shape, **RANKS))
    from transformers import AutoModelForCausalLM

    bytes_of_weights = sum(p.nbytes for p in AutoModelForCausalLM.from_config(config).parameters())
    assert source == ((2 << 20) - bytes_of_weights) // (3 * 16 * 40 * 4)


def test_a_cell_without_room_is_said_not_to_fit(shape: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench_module, "_free_memory", lambda _: 60_000.0)
    result = small(shape, context="33", batch="3")
    fits = {cell.variant.split(", ")[-1]: cell.fits for cell in result.cells}
    assert list(fits.values()) == [False, False, True]  # 63,000, over 60,000 with scratch, 35,000 bytes
    dead = result.cells[0]
    assert dead.step is None and dead.tokens_per_second is None and dead.share_of_limit is None


def test_checkpoints_are_timed_and_left_as_they_were(tmp_path: Path) -> None:
    source = tiny_model(tmp_path / "source")
    converted = tmp_path / "converted"
    tiny_deepseek().save_pretrained(converted)
    result = bench(BenchRecipe(models=(str(source), str(converted)), context="8", repeats=1, new_tokens=2))
    assert [cell.variant for cell in result.cells] == ["source", "converted, expanded", "converted, absorbed"]


def test_a_decoder_computes_the_same_expanded_and_absorbed() -> None:
    """Same cache contents, same logits: the variants differ in speed only."""
    model, logits = tiny_deepseek(), []
    for variant in ("expanded", "absorbed"):
        decoder = Decoder(variant, model, variant)
        decoder.fill(21, 2, seed=4)
        decoder.steps(2)
        assert decoder.cache.get_seq_length() == 21  # as long as before
        decoder._enter()
        with torch.no_grad():
            logits.append(model(prompts(2, 1)["input_ids"], past_key_values=decoder.cache).logits)
    assert ((logits[0] - logits[1]).abs().max() / logits[0].abs().max()).item() <= 1e-5  # measured 5e-7


def test_the_clock_tells_the_parts_apart() -> None:
    """A pause before the cache counts for the module, one behind it for the core, one outside for the step only."""

    class Attention(nn.Module):
        def __init__(self, cache: Any) -> None:
            super().__init__()
            self.cache, self.o_proj = cache, nn.Linear(2, 2)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            time.sleep(0.02)
            self.cache.update()
            time.sleep(0.04)
            return self.o_proj(x)

    class Cache:
        layers: list[Any] = []  # noqa: RUF012

        def update(self) -> None:
            pass

    cache = Cache()
    model = nn.ModuleDict({"self_attn": Attention(cache)})
    clock = _Clock(model, cache, torch.device("cpu"))

    def call() -> None:
        model["self_attn"](torch.ones(2))
        time.sleep(0.03)

    seen = clock.step(call)
    clock.remove()
    assert isinstance(seen, Seconds)
    assert seen.core >= 0.04 and seen.attention >= seen.core + 0.02 and seen.step >= seen.attention + 0.03
    before = len(clock._marks["in"])
    call()
    assert len(clock._marks["in"]) == before and "update" not in vars(cache)  # nothing is left behind


def test_limits_take_the_larger_of_bytes_and_operations() -> None:
    """512 + 64 with 32 heads, 16,384 tokens, bf16, worked out by hand."""
    recipe = BenchRecipe(shape="llama3-8b", layers=1, vocab_size=8, **RANKS)
    config = converted_config(shape_config(recipe), recipe)
    with torch.device("meta"):
        from transformers import AutoModelForCausalLM

        sizes = sizes_of(AutoModelForCausalLM.from_config(config))
    assert (sizes.numbers, sizes.multiplications, sizes.projected) == (576, 32 * 1088, 32 * 512 * 256)
    numbers, operations = 16384 * 576 + 32 * 512 * 256, 2 * (16384 * 32 * 1088 + 32 * 512 * 256)
    slow_memory = Limits(copy=1e9, product=1e15).seconds(sizes, 1, 16384, 2, 16384 * 576 * 2)
    assert slow_memory == (pytest.approx(2 * numbers / 1e9), "memory")
    slow_arithmetic = Limits(copy=1e15, product=1e9).seconds(sizes, 1, 16384, 2, 16384 * 576 * 2)
    assert slow_arithmetic == (pytest.approx(operations / 1e9), "arithmetic")


def test_limits_are_measured() -> None:
    limits = MEASURE(torch.float32, torch.device("cpu"))
    assert 1e8 < limits.copy < 1e13 and 1e8 < limits.product < 1e16


def test_the_table_says_what_did_not_fit(capsys: pytest.CaptureFixture[str]) -> None:
    cells = (
        Cell("a", 1024, 2, True, step=0.5, attention=0.2, core=0.1, limit=0.05, bound_by="memory", prefill=None,
             cache_bytes=1 << 20, cache_formula=1 << 20, peak_bytes=1 << 30, largest_batch=7, steps_timed=3),
        Cell("b", 1024, 2, False, largest_batch=1),
    )  # fmt: skip
    limit = Limits(2e10, 5e10)
    print_bench(BenchResult(cells, (limit, limit), 1 << 31, "float32", "cpu", {}))
    out = capsys.readouterr().out
    assert "4.0" in out and "50%" in out and "does not fit" in out and "20.0 and 20.0 GB/s" in out


def test_counts_and_sizes_are_read() -> None:
    assert counts("context", "1k, 8K,32k,5,5") == (1024, 8192, 32768, 5)
    assert [size_in_bytes(text) for text in ("80GiB", "80g", "1.5 MB", "7")] == [80 << 30, 80 << 30, 3 << 19, 7]


REFUSALS: dict[str, tuple[dict[str, Any], str]] = {
    "nothing": ({}, "nothing to time: name a MODEL, or give --shape"),
    "context": ({"context": "1k,x"}, "context='1k,x': 'x' is no whole number"),
    "batch": ({"batch": "0"}, "batch='0': '0' is no whole number of 1 or more"),
    "memory": ({"memory": "much"}, "memory='much' is no size; write e.g. 80GiB"),
    "rope": ({"shape": "x", "kv_lora_rank": 8, "qk_rope_head_dim": 7}, "qk_rope_head_dim=7 is odd"),
    "no ranks": ({"shape": "x"}, "shape=x, kv_lora_rank=None.*give all three"),
    "ranks of a checkpoint": (RANKS, "shape=None, kv_lora_rank=512.*checkpoints have their own"),
}


@pytest.mark.parametrize("name", REFUSALS)
def test_a_recipe_refuses_what_cannot_be_timed(name: str) -> None:
    options, message = REFUSALS[name]
    models = () if name == "nothing" else ("A",)
    with pytest.raises(BadOption, match=message):
        BenchRecipe(models=models, **options)


def test_a_shape_that_is_none_is_refused(tmp_path: Path) -> None:
    with pytest.raises(BadOption, match="shape='llama9' is neither llama3-8b nor a folder with a config.json"):
        mla_convert.bench(shape="llama9", **RANKS)
    tiny_deepseek().config.save_pretrained(tmp_path)
    with pytest.raises(BadOption, match="already a latent model"):
        mla_convert.bench(shape=str(tmp_path), **RANKS)
    with pytest.raises(BadOption, match="its folder does not exist"):
        mla_convert.bench(shape="llama3-8b", **RANKS, json=str(tmp_path / "no" / "x.json"))
    with pytest.raises(BadOption, match="must end in one of .png"):
        mla_convert.bench(shape="llama3-8b", **RANKS, plot=str(tmp_path / "x.txt"))

    class NoHeads(nn.Module):
        config = type("C", (), {"num_attention_heads": 2, "num_hidden_layers": 1})()

    with pytest.raises(UnsupportedSource, match="NoHeads: its config has no num_key_value_heads"):
        sizes_of(NoHeads())


@pytest.mark.parametrize("family", ["qwen3", "glm4"])
def test_a_native_conversion_is_timed_expanded_and_absorbed(tmp_path: Path, family: str) -> None:
    source, out = str(tiny_model(tmp_path / "source", family)), str(tmp_path / "out")
    mla_convert.convert(source=source, out=out, kv_lora_rank=8, qk_rope_head_dim=4, method="svd", format="native")
    cells = mla_convert.bench(
        models=(source, out), context="40", new_tokens=2, repeats=1, prefill=0, cache_dtype="int8"
    ).cells
    assert [cell.variant for cell in cells] == ["source", "out, expanded", "out, absorbed"]  # it reads no int8 cache
    layers = json.loads((Path(out) / "config.json").read_text())["num_hidden_layers"]
    for cell in cells[1:]:
        assert cell.cache_bytes is not None and cell.cache_formula == 4 * layers * 12 * 40
        assert cell.core is not None and cell.core > 0


def test_the_paths_of_a_native_model_are_really_taken(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source, out = str(tiny_model(tmp_path / "source", "qwen3")), str(tmp_path / "out")
    mla_convert.convert(source=source, out=out, kv_lora_rank=8, qk_rope_head_dim=4, method="svd", format="native")
    taken = list[str]()
    for way in ("_expanded", "_absorbed"):
        inner = getattr(MLAttention, way)
        monkeypatch.setattr(MLAttention, way, lambda *a, inner=inner, way=way: (taken.append(way), inner(*a))[1])
    model = load_model(out, torch.float32, torch.device("cpu"))
    for variant in ("expanded", "absorbed"):
        taken.clear()
        decoder = Decoder("m", model, variant)
        decoder.fill(9, 1, 0)
        decoder.steps(1)
        assert set(taken) == {f"_{variant}"}


@pytest.mark.parametrize(
    ("family", "options", "match"),
    [
        ("mixtral", {}, "a sliding window cache a bounded number of tokens; bench takes models whose layers all"),
        ("qwen3", {"keep_layers": "1"}, "its layers cache different numbers .kept layers"),
    ],
)
def test_layers_that_differ_are_refused(tmp_path: Path, family: str, options: dict[str, str], match: str) -> None:
    folder = str(tiny_model(tmp_path / "source", family))
    if options:
        sizes = {"kv_lora_rank": 8, "qk_rope_head_dim": 4, "method": "svd", "format": "native"}
        mla_convert.convert(source=folder, out=str(tmp_path / "out"), **sizes, **options)
        folder = str(tmp_path / "out")
    with pytest.raises(UnsupportedSource, match=match):
        mla_convert.bench(models=(folder,), context="40", new_tokens=2, repeats=1, prefill=0)


def test_a_model_that_is_not_there_is_named_before_any_is_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    loaded = list[str]()
    monkeypatch.setattr("mla_convert.benchmark.bench_models.load_model", lambda name, *rest: loaded.append(name))
    here = str(Path(__file__).parent / "configs" / "qwen3-8b")
    with pytest.raises(BadCheckpoint, match="absent: no folder of a model"):
        mla_convert.bench(models=(here, "absent"))
    assert loaded == []
