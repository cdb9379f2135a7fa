"""The family table says of every family's attention what its class does, and the README what the table says."""

import inspect
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny import FAMILIES as STOCK
from tiny import NATIVE, edit_config, tiny_class, tiny_model

from mla_convert.conversion.convert import output_is_native
from mla_convert.errors import UnsupportedSource
from mla_convert.interface.recipe import ConvertRecipe
from mla_convert.source.checkpoint import Checkpoint
from mla_convert.source.families import read_spec
from mla_convert.source.family_table import FAMILIES
from mla_convert.source.support import FEATURES, support, support_table

README = (Path(__file__).parent.parent / "README.md").read_text(encoding="utf-8")


def test_the_readme_holds_the_table() -> None:
    assert support_table() in README


def test_every_family_has_a_tiny_model() -> None:
    assert set(FAMILIES) == set(STOCK) | set(NATIVE)


@pytest.mark.parametrize("family", FAMILIES)
def test_the_features_are_those_of_the_class(family: str) -> None:
    row, model = FAMILIES[family], tiny_class(family, {})
    layers = [layer.self_attn for layer in model.model.layers]
    attention, config = layers[0], model.config
    code = inspect.getsource(type(attention))
    module = inspect.getsource(sys.modules[type(attention).__module__])
    norm = getattr(attention, "q_norm", None)
    width = {None: None, "head": attention.head_dim, "all": attention.head_dim * config.num_attention_heads}
    assert (None if norm is None else norm.weight.numel()) == width[row.qk_norm]
    assert hasattr(attention, "qkv_proj") == row.fused_qkv
    assert isinstance(getattr(attention, "sinks", None), torch.nn.Parameter) == row.sinks
    assert ("softcap=self." in code) == (row.softcap is not None)
    assert ("if self.use_rope" in code or "if self.sliding_window is not None" in code) == (row.nope is not None)
    assert ("x[..., 0::2]" in module or "x[..., ::2]" in module) == row.interleaved
    assert ("q_pass" in module) == row.partial_rotary
    cos, _ = tables(model)
    pairs = cos.shape[-1] // (1 if row.tables == "single" else 2)
    halves = torch.equal(cos[..., :pairs], cos[..., pairs:])
    twice = cos.shape[-1] % 2 == 0 and torch.equal(cos[..., 0::2], cos[..., 1::2])
    assert {"halves": halves, "interleaved": twice, "single": not halves and not twice}[row.tables]


def tables(model: Any) -> tuple[torch.Tensor, torch.Tensor]:
    rotary = model.model.rotary_emb
    named = {"layer_type": "full_attention"} if "layer_type" in inspect.signature(rotary.forward).parameters else {}
    found: tuple[torch.Tensor, torch.Tensor] = rotary(torch.zeros(1, 3, 4), torch.arange(3)[None], **named)
    return found


@pytest.mark.parametrize("family", FAMILIES)
def test_the_format_is_what_the_table_says(tmp_path: Path, family: str) -> None:
    cells = support(family)
    assert list(cells) == list(FEATURES)
    spec = read_spec(Checkpoint.open(tiny_model(tmp_path / "m", family, tokenizer=False)))
    cost = "stock" if spec.stock_cost is None else "native (stock)"
    assert (cost if spec.stock_obstacle is None else "native") == cells["plain"]
    assert any(facts.window for facts in spec.layers) <= (cells["windows"] == "native")
    assert spec.keys_values >= (cells["QK-norm"] == "native")


@pytest.mark.parametrize(
    ("family", "cell"),
    [("llama", "native (stock)"), ("olmo2", "native"), ("granite", "native"), ("gpt_oss", "native")],
)
def test_biases_go_native_where_the_class_has_them(tmp_path: Path, family: str, cell: str) -> None:
    biased = tiny_model(tmp_path / "biased", family, tokenizer=False, attention_bias=True)
    spec = read_spec(Checkpoint.open(biased))
    assert spec.biased and spec.stock_cost is not None and support(family)["biases"] == cell
    assert (spec.stock_obstacle is None) == (cell == "native (stock)")
    assert output_is_native(ConvertRecipe("SOURCE", "OUT", lossless=True), spec)


def test_biases_are_refused_where_the_class_has_none(tmp_path: Path) -> None:
    folder = edit_config(tiny_model(tmp_path / "m", "phi3", tokenizer=False), attention_bias=True)
    with pytest.raises(UnsupportedSource, match="attention_bias=True, .* the model class of this family has no biases"):
        read_spec(Checkpoint.open(folder))
    assert support("phi3")["biases"] == "refused"


def test_importing_the_package_loads_nothing_and_still_registers() -> None:
    """In every order of imports; torch is not loaded by mla_convert alone."""
    code = (
        "import sys, mla_convert; assert not {'torch', 'transformers'} & set(sys.modules);"
        "from transformers import AutoConfig; assert AutoConfig.for_model('mla_qwen3').mla is None;"
        "from transformers import AutoModelForCausalLM as A;"
        "made = A._model_mapping[type(AutoConfig.for_model('mla_qwen3'))];"
        "assert made.__name__ == 'MLAQwen3ForCausalLM'"
    )
    other = code.replace("import sys, mla_convert; ", "import sys, transformers, mla_convert; ").replace(
        "assert not {'torch', 'transformers'} & set(sys.modules);", ""
    )
    last = "from transformers import AutoModelForCausalLM;" + other
    for order in (code, other, last):
        subprocess.run([sys.executable, "-c", order], check=True)
