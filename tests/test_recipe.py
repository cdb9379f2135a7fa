"""Recipes: what is refused, with which words, and that YAML, keywords and defaults are one thing."""

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

import mla_convert
from mla_convert.errors import BadOption, MlaConvertError
from mla_convert.interface.bench_recipe import BenchRecipe
from mla_convert.interface.finetune_recipe import FinetuneRecipe
from mla_convert.interface.options import Recipe, merge, resolve
from mla_convert.interface.plan_recipe import PlanRecipe
from mla_convert.interface.recipe import ConvertRecipe, DemoRecipe, EvalRecipe, HealRecipe, ReportRecipe, VerifyRecipe

RECIPES = Path(__file__).parent.parent / "recipes"
SIZE = {"kv_lora_rank": 128, "qk_rope_head_dim": 64}


def convert_recipe(**options: Any) -> ConvertRecipe:
    return ConvertRecipe.from_mapping({"source": "a", "out": "b", **options})


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({}, "no cache size given: give exactly one of kv_lora_rank"),
        ({"kv_lora_rank": 128}, "kv_lora_rank=128 and qk_rope_head_dim=None: give both"),
        ({"qk_rope_head_dim": 64}, "kv_lora_rank=None and qk_rope_head_dim=64: give both"),
        (
            SIZE | {"cache_ratio": 0.5},
            r"kv_lora_rank \+ qk_rope_head_dim and cache_ratio given: .*exactly one",
        ),
        (SIZE | {"lossless": True}, r"kv_lora_rank \+ qk_rope_head_dim and lossless given"),
        ({"cache_ratio": 0.5, "lossless": True}, "cache_ratio and lossless given"),
        ({"kv_lora_rank": 0, "qk_rope_head_dim": 64}, "kv_lora_rank=0 is too small: use 1 or more"),
        ({"kv_lora_rank": 8, "qk_rope_head_dim": 0}, "qk_rope_head_dim=0 is too small: use 2 or more"),
        ({"kv_lora_rank": 8, "qk_rope_head_dim": 7}, "qk_rope_head_dim=7 is odd.*use 6 or 8"),
        ({"cache_ratio": 0.0}, r"cache_ratio=0.0 must be above 0 and at most 1"),
        ({"cache_ratio": 1.01}, r"cache_ratio=1.01 must be above 0 and at most 1"),
        ({"cache_ratio": float("nan")}, "cache_ratio=nan must be above 0"),
        (
            SIZE | {"method": "wheighted"},
            "unknown method 'wheighted': use one of weighted, pca, svd; did you mean",
        ),
        (SIZE | {"dtype": "float16"}, "dtype=float16 is refused: .*eps domination.*underflow.*use bfloat16"),
        (SIZE | {"dtype": "int8"}, "unknown dtype 'int8': use one of auto, float32, bfloat16"),
        (SIZE | {"device": "gpu"}, "unknown device 'gpu': use auto, cpu, cuda or cuda:N"),
        (SIZE | {"rope_stride": 0}, "rope_stride=0 is too small"),
        (SIZE | {"rope_stride": "fast"}, "rope_stride='fast' must be auto or a whole number"),
        (SIZE | {"window": 1}, "window=1 is too small: use 2 or more"),
        (SIZE | {"calib_windows": 0}, "calib_windows=0 is too small"),
        (SIZE | {"seed": -1}, "seed=-1 is too small"),
        (SIZE | {"source": ""}, "source is empty text"),
        (SIZE | {"kv_lora_rnk": 1}, "unknown option 'kv_lora_rnk' in recipe; did you mean 'kv_lora_rank'"),
        (SIZE | {"kv-lora-rank": 1}, "unknown option 'kv-lora-rank' in recipe; did you mean 'kv_lora_rank'"),
        (SIZE | {"xyzzy": 1}, "unknown option 'xyzzy' in recipe; known options: source, out"),
        (SIZE | {"window": "1024"}, r"window must be a whole number, got '1024' \(str\)"),
        (SIZE | {"window": True}, r"window must be a whole number, got True \(bool\)"),
        (SIZE | {"window": 2.0}, r"window must be a whole number, got 2.0 \(float\)"),
        ({"lossless": "yes"}, r"lossless must be true or false, got 'yes' \(str\)"),
        ({"cache_ratio": "half"}, r"cache_ratio must be a number or null, got 'half' \(str\)"),
        (SIZE | {"calib_data": "a.txt"}, r"calib_data must be a list of texts, got 'a.txt' \(str\)"),
        (SIZE | {"calib_data": [1]}, r"calib_data must be a list of texts, got \(1,\) \(tuple\)"),
        (SIZE | {"source": None}, r"source must be text, got None \(NoneType\)"),
    ],
)
def test_a_bad_convert_option_is_refused_by_name(options: dict[str, Any], match: str) -> None:
    with pytest.raises(BadOption, match=match):
        convert_recipe(**options)


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"models": []}, "models is empty: name at least one"),
        ({"models": ["a", ""]}, "models is empty text"),
        ({"models": ["a"], "stride": 9, "window": 8}, "stride=9 exceeds window=8"),
        ({"models": ["a"], "stride": 0}, "stride=0 is too small"),
        ({"models": ["a"], "batch_size": 0}, "batch_size=0 is too small"),
        ({"models": ["a"], "dtype": "half"}, "dtype=half is refused: .*underflow"),
        ({}, "models is missing: give MODEL, or `models:` in the recipe file"),
    ],
)
def test_a_bad_eval_option_is_refused_by_name(options: dict[str, Any], match: str) -> None:
    with pytest.raises(BadOption, match=match):
        EvalRecipe.from_mapping(options)


def test_good_options_are_taken_as_they_are() -> None:
    recipe = convert_recipe(**SIZE, calib_data=["x.txt", "y.txt"], rope_stride=2, device="cuda:1")
    assert recipe.calib_data == ("x.txt", "y.txt") and recipe.rope_stride == 2
    assert convert_recipe(cache_ratio=1).cache_ratio == 1  # a whole number is a number, and 1 is the upper end
    assert hash(recipe) == hash(dataclasses.replace(recipe))


def test_a_recipe_cannot_be_built_malformed_or_changed() -> None:
    with pytest.raises(BadOption, match="no cache size given"):
        ConvertRecipe("a", "b")
    recipe = convert_recipe(**SIZE)
    with pytest.raises(BadOption, match="qk_rope_head_dim=3 is odd"):
        dataclasses.replace(recipe, qk_rope_head_dim=3)
    with pytest.raises(dataclasses.FrozenInstanceError):
        recipe.window = 8  # type: ignore[misc]


def test_out_may_not_be_or_hold_the_source(tmp_path: Path) -> None:
    source = tmp_path / "models" / "source"
    source.mkdir(parents=True)
    for out in (source, tmp_path / "models", source / ".." / "source"):
        with pytest.raises(BadOption, match="is or holds the source"):
            convert_recipe(source=str(source), out=str(out), **SIZE)
    assert convert_recipe(source=str(source), out=str(tmp_path / "models" / "out"), **SIZE)


def test_yaml_keywords_and_flags_give_the_same_recipe(tmp_path: Path) -> None:
    recipe = convert_recipe(**SIZE, method="pca", calib_data=["x.txt"], seed=3)
    file = tmp_path / "r.yaml"
    file.write_text(yaml.safe_dump(recipe.to_dict()))
    assert ConvertRecipe.load(file) == recipe
    assert resolve(ConvertRecipe, None, recipe.to_dict()) == recipe
    assert resolve(ConvertRecipe, recipe, {}) is recipe
    assert resolve(ConvertRecipe, recipe, {"seed": 4}) == dataclasses.replace(recipe, seed=4)
    with pytest.raises(BadOption, match="expected a VerifyRecipe, got ConvertRecipe"):
        resolve(VerifyRecipe, recipe, {})  # type: ignore[arg-type]


@given(
    rank=st.integers(1, 4096),
    slots=st.integers(1, 128),
    method=st.sampled_from(["weighted", "pca", "svd"]),
    text=st.lists(st.text(st.characters(codec="utf-8", exclude_categories=("Cs", "Cc"))), max_size=3),
    stride=st.one_of(st.just("auto"), st.integers(1, 64)),
)
def test_any_recipe_survives_yaml(rank: int, slots: int, method: str, text: list[str], stride: int | str) -> None:
    recipe = convert_recipe(
        kv_lora_rank=rank, qk_rope_head_dim=2 * slots, method=method, calib_data=text, rope_stride=stride
    )
    again = yaml.safe_load(yaml.safe_dump(recipe.to_dict(), allow_unicode=True))
    assert ConvertRecipe.from_mapping(again) == recipe


def test_overrides_win_and_a_new_size_replaces_the_old_one(tmp_path: Path) -> None:
    file = tmp_path / "r.yaml"
    file.write_text("source: a\nout: b\nkv_lora_rank: 128\nqk_rope_head_dim: 64\nwindow: 512\n")
    assert ConvertRecipe.load(file, window=256).window == 256
    assert ConvertRecipe.load(file, kv_lora_rank=96).kv_lora_rank == 96
    recipe = ConvertRecipe.load(file, cache_ratio=0.5)
    assert (recipe.kv_lora_rank, recipe.qk_rope_head_dim, recipe.cache_ratio) == (None, None, 0.5)
    assert merge({"cache_ratio": 0.5}, {"lossless": True}) == {"lossless": True}
    assert merge({"cache_ratio": 0.5}, {"lossless": False}) == {"cache_ratio": 0.5, "lossless": False}


@pytest.mark.parametrize(
    ("text", "match"),
    [
        ("- a\n- b\n", "holds list, not option names"),
        ("", "holds NoneType, not option names"),
        ("source: a\nsource: b\n", "cannot read recipe .*key 'source' is given twice"),
        ("1: a\n", "cannot read recipe .*key 1 is not a name"),
        ("source: [a\n", "cannot read recipe"),
        (
            "source: !!python/object/apply:os.getcwd []\n",
            "cannot read recipe .*could not determine a constructor",
        ),
        ("sauce: a\n", "unknown option 'sauce' in .*r.yaml; did you mean 'source'"),
    ],
)
def test_a_bad_recipe_file_is_refused(tmp_path: Path, text: str, match: str) -> None:
    file = tmp_path / "r.yaml"
    file.write_text(text)
    with pytest.raises(BadOption, match=match):
        ConvertRecipe.load(file)


def test_a_missing_or_binary_recipe_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(BadOption, match="cannot read recipe .*No such file"):
        ConvertRecipe.load(tmp_path / "none.yaml")
    (tmp_path / "b.yaml").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(BadOption, match="cannot read recipe"):
        ConvertRecipe.load(tmp_path / "b.yaml")


SHIPPED: dict[str, tuple[type[Recipe], dict[str, Any]]] = {
    "smollm2_135m_192": (ConvertRecipe, {"kv_lora_rank": 128, "qk_rope_head_dim": 64}),
    "smollm2_135m_96": (ConvertRecipe, {"kv_lora_rank": 38, "qk_rope_head_dim": 58}),
    "smollm2_135m_96_tuned": (FinetuneRecipe, {"converted": "smollm2-135m-mla-96", "optimizer": "muon"}),
    "smollm2_135m_96_tuned_on": (FinetuneRecipe, {"converted": "smollm2-135m-mla-96-tuned", "kd_weight": 0.5}),
    "smollm2_135m_128": (ConvertRecipe, {"kv_lora_rank": 70, "qk_rope_head_dim": 58}),
    "smollm2_135m_128_tuned": (FinetuneRecipe, {"converted": "smollm2-135m-mla-128", "optimizer": "muon"}),
    "llama3_8b_512_64": (ConvertRecipe, {"kv_lora_rank": 512, "qk_rope_head_dim": 64}),
    "smollm2_135m_cpu": (FinetuneRecipe, {"converted": "smollm2-135m-mla-192"}),
    "llama3_8b": (FinetuneRecipe, {"converted": "llama3-8b-mla-576"}),
    "qwen2.5_7b_512_64": (ConvertRecipe, {"kv_lora_rank": 512, "qk_rope_head_dim": 64}),
    "qwen2.5_7b": (FinetuneRecipe, {"converted": "qwen2.5-7b-mla-576"}),
}


@pytest.mark.parametrize("file", sorted(RECIPES.glob("*.yaml")), ids=lambda file: file.stem)
def test_the_shipped_recipes_load(file: Path) -> None:
    kind, values = SHIPPED[file.stem]
    recipe = kind.load(file)
    assert {name: getattr(recipe, name) for name in values} == values


@pytest.mark.parametrize(
    "recipe_type",
    [
        PlanRecipe,
        ConvertRecipe,
        HealRecipe,
        FinetuneRecipe,
        VerifyRecipe,
        EvalRecipe,
        BenchRecipe,
        ReportRecipe,
        DemoRecipe,
    ],
)
def test_every_field_has_help_and_sizes_have_no_default(recipe_type: Any) -> None:
    for field in dataclasses.fields(recipe_type):
        assert field.metadata["help"].endswith("."), field.name
        if field.name in ("kv_lora_rank", "qk_rope_head_dim", "cache_ratio"):
            assert field.default is None


def test_the_public_calls_stay_calls_when_their_modules_are_imported() -> None:
    import mla_convert.errors

    for name in mla_convert.__all__:
        if name[0].islower():
            assert callable(getattr(mla_convert, name)), name
    with pytest.raises(AttributeError, match="no attribute 'konvert'"):
        mla_convert.konvert  # noqa: B018
    assert issubclass(BadOption, MlaConvertError)


def test_python_calls_check_their_options_first() -> None:
    with pytest.raises(BadOption, match="unknown option 'sorce' in ConvertRecipe; did you mean 'source'"):
        mla_convert.convert(sorce="a", out="b")
    with pytest.raises(BadOption, match="converted is missing: give CONVERTED"):
        mla_convert.verify(source="a")
