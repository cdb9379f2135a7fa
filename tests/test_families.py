"""What is read of a source's config and tensors, and what is refused by name."""

from __future__ import annotations

import json
import logging
import re
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file
from tiny import (
    DIMENSIONS,
    FAMILIES,
    WEIGHTS,
    edit_config,
    edit_tensors,
    legacy_rope,
    tiny_model,
    write_gguf,
)
from transformers import AutoConfig, AutoModelForCausalLM

from mla_convert.conversion.convert import output_is_native
from mla_convert.errors import UnsupportedSource
from mla_convert.interface.recipe import ConvertRecipe
from mla_convert.source import families
from mla_convert.source.checkpoint import Checkpoint, TensorHeader
from mla_convert.source.families import global_tensors, layer_tensors, read_spec


def refuse(folder: Path, match: str) -> None:
    """The refusal comes within a second."""
    start = time.perf_counter()
    with pytest.raises(UnsupportedSource, match=match):
        read_spec(Checkpoint.open(folder))
    assert time.perf_counter() - start < 1


class HeadersOnly:
    """Weights of a model on the meta device: any access to data is a failure."""

    files: list[Path]

    def __init__(self, model: torch.nn.Module) -> None:
        self.files = []
        self.headers = {
            name: TensorHeader(tensor.dtype, tuple(tensor.shape), Path("none"))
            for name, tensor in model.state_dict().items()
        }

    def read(self, name: str) -> torch.Tensor:
        raise AssertionError(f"{name} was read")


def meta_checkpoint(family: str, **config: Any) -> Checkpoint:
    config_class, model_class, extra = FAMILIES[family]
    built = config_class(**(DIMENSIONS | extra | config))
    with torch.device("meta"):
        model = model_class(built)
    return Checkpoint(Path("none"), built.to_dict(), None, HeadersOnly(model))


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("legacy", [False, True])
def test_spec_holds_the_config(tmp_path: Path, family: str, legacy: bool) -> None:
    folder = tiny_model(tmp_path / "m", family, dtype=torch.bfloat16)
    spec = read_spec(Checkpoint.open(legacy_rope(folder) if legacy else folder))
    fields = (spec.hidden_size, spec.intermediate_size, spec.num_hidden_layers, spec.num_attention_heads)
    assert fields == (48, 56, 4, 6)
    assert (spec.num_key_value_heads, spec.source_head_dim, spec.vocab_size) == (2, 10, 263)
    assert (spec.family, spec.hidden_act, spec.tie_word_embeddings) == (family, "silu", False)
    assert (spec.max_position_embeddings, spec.rms_norm_eps, spec.dtype) == (512, 1e-5, torch.bfloat16)
    assert spec.rope_parameters == {"rope_type": "default", "rope_theta": 5000.0}
    assert (spec.softmax_scale, spec.attention_scaling) == (10**-0.5, 1.0)
    assert spec.config == json.loads((folder / "config.json").read_text())


@pytest.mark.parametrize("family", FAMILIES)
def test_absent_keys_have_the_values_of_the_model_class(tmp_path: Path, family: str) -> None:
    folder = tiny_model(tmp_path / "m", family, max_position_embeddings=77, rms_norm_eps=0.5)
    absent = ("max_position_embeddings", "rms_norm_eps", "tie_word_embeddings", "hidden_act", "rope_parameters")
    spec = read_spec(Checkpoint.open(edit_config(folder, absent)))
    theirs = AutoConfig.for_model(family)
    for key in absent[:4]:
        assert getattr(spec, key) == getattr(theirs, key), key
    assert spec.rope_parameters["rope_theta"] == theirs.default_theta


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("tied", [False, True])
def test_names_cover_the_state_dict_exactly(tmp_path: Path, family: str, tied: bool) -> None:
    ckpt = Checkpoint.open(tiny_model(tmp_path / "m", family, tie_word_embeddings=tied))
    spec = read_spec(ckpt)
    assert spec.tie_word_embeddings is tied
    names = list(global_tensors(spec).values())
    for layer in range(spec.num_hidden_layers):
        roles = layer_tensors(spec, layer)
        assert list(roles) == ["q", "k", "v", "o", "gate", "up", "down", "input_norm", "post_norm"]
        names += roles.values()
    assert len(names) == len(set(names))
    assert set(names) == set(ckpt.headers)
    assert ckpt.consumed() == []
    with pytest.raises(IndexError, match="layer 4 of 4"):
        layer_tensors(spec, 4)


@given(
    family=st.sampled_from(sorted(FAMILIES)),
    group=st.integers(1, 7),
    kv_heads=st.sampled_from([1, 2, 3, 8]),
    half=st.integers(1, 9),
    width=st.integers(1, 3),
    layers=st.integers(1, 3),
    explicit=st.booleans(),
)
def test_any_shape_is_read_from_headers_alone(
    family: str, group: int, kv_heads: int, half: int, width: int, layers: int, explicit: bool
) -> None:
    heads = group * kv_heads
    hidden = 2 * width * heads
    sizes: dict[str, Any] = {
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "hidden_size": hidden,
    }
    ckpt = meta_checkpoint(family, **sizes, num_hidden_layers=layers, head_dim=2 * half if explicit else None)
    if not explicit:
        ckpt.config["head_dim"] = None
    if group == 1:
        ckpt.config["num_key_value_heads"] = None
    spec = read_spec(ckpt)
    assert spec.source_head_dim == (2 * half if explicit else hidden // heads)
    assert (spec.num_attention_heads, spec.num_key_value_heads) == (heads, kv_heads)
    assert spec.inv_freq.shape == (spec.source_head_dim // 2,)


@given(
    key=st.text(st.characters(codec="ascii", categories=["Ll"]), min_size=1, max_size=12).map("x_{}".format),
    value=st.one_of(st.integers(), st.floats(allow_nan=False), st.booleans(), st.text(max_size=5), st.lists(st.none())),
)
def test_every_unknown_key_is_refused_by_name_unless_null(key: str, value: Any) -> None:
    ckpt = meta_checkpoint("llama")
    ckpt.config[key] = None
    read_spec(ckpt)
    ckpt.config[key] = value
    with pytest.raises(UnsupportedSource) as caught:
        read_spec(ckpt)
    assert f"{key}={value!r} is not known for model_type 'llama'" in str(caught.value)
    assert "remove it from config.json" in str(caught.value)


CONFIG_REFUSALS = [
    ({"model_type": "gpt2"}, r"model_type='gpt2' is not supported; supported: llama, mistral, ministral, qwen2, qwen3"),
    ({"model_type": "qwen3"}, r"architectures=\['LlamaForCausalLM'\], .*only Qwen3ForCausalLM is converted"),
    ({"model_type": None}, r"model_type=None is not supported"),
    (
        {"architectures": ["LlamaForSequenceClassification"]},
        r"architectures=\['LlamaForSeq.*only LlamaForCausalLM",
    ),
    ({"sliding_window": 128}, r"sliding_window=128, not None: sliding-window attention .* set it to null"),
    ({"sliding_window": 128, "use_sliding_window": True}, r"sliding_window=128"),
    ({"use_sliding_window": True}, r"use_sliding_window=True, not False or None: sliding-window"),
    ({"layer_types": ["sliding_attention"] * 4}, r"layer_types=\['sliding.*must all be 'full_attention'"),
    ({"attention_bias": True}, r"lacks 16 of the 55 tensors of config\.json, first .*q_proj\.bias"),
    ({"mlp_bias": True}, r"lacks 12 of the 51 tensors of config\.json, first .*gate_proj\.bias"),
    ({"use_qk_norm": True}, r"use_qk_norm=True, .*the model class of this family has no QK-norm"),
    ({"partial_rotary_factor": 0.5}, r"partial_rotary_factor=0\.5, not 1 or None: .*rotates whole heads"),
    (
        {"quantization_config": {"bits": 4}},
        r"quantization_config=\{'bits': 4\}, .*dequantise the checkpoint first",
    ),
    ({"auto_map": {"AutoModel": "m.M"}}, r"auto_map=.*remote code is never run"),
    ({"logits_scaling": 8.0}, r"logits_scaling=8\.0 is not known for model_type 'llama'"),
    ({"hidden_size": "48"}, r"hidden_size='48' must be a positive integer"),
    ({"hidden_size": None}, r"hidden_size=None must be a positive integer"),
    ({"num_hidden_layers": 0}, r"num_hidden_layers=0 must be a positive integer"),
    ({"num_key_value_heads": 4}, r"num_attention_heads=6 is no multiple of num_key_value_heads=4"),
    ({"head_dim": 9}, r"head_dim=9 is odd, so RoPE cannot pair it"),
    (
        {"head_dim": None, "hidden_size": 50},
        r"hidden_size=50 is no multiple of num_attention_heads=6 .*add head_dim",
    ),
    ({"rms_norm_eps": 0}, r"rms_norm_eps=0 must be a positive number"),
    ({"rms_norm_eps": None}, r"rms_norm_eps=None must be a positive number"),
    ({"rope_scaling": "linear"}, r"rope_scaling='linear' must be an object or null"),
    (
        {"rope_theta": 9.0},
        r"rope_parameters say .*5000\.0.* but rope_theta and rope_scaling say .*9\.0.*keep one",
    ),
    (
        {"rope_theta": 5000.0, "rope_scaling": {"type": "linear", "factor": 2.0}},
        r"rope_parameters say .*'default'.* but rope_theta and rope_scaling say .*'linear'.*keep one",
    ),
]


@pytest.mark.parametrize(("changes", "match"), CONFIG_REFUSALS)
def test_config_features_are_refused_by_name(tmp_path: Path, changes: dict[str, Any], match: str) -> None:
    refuse(edit_config(tiny_model(tmp_path / "m", tokenizer=False), **changes), match)


STOCK_OBSTACLES: list[tuple[str, dict[str, Any], str]] = [
    ("llama", {"hidden_act": "gelu"}, r"hidden_act='gelu', not 'silu': the engines"),
    ("llama", {"mlp_bias": True}, r"mlp_bias=True, not False or None: the stock format has no biases in the MLP"),
    ("mistral", {"sliding_window": 64}, r"sliding_window=64, not None: the stock format has no sliding windows"),
    ("llama", {"rope_parameters": {"rope_type": "yarn", "rope_theta": 5e3, "factor": 4.0}}, r"rope_type='yarn'"),
    ("llama", {"rope_parameters": {"rope_type": "dynamic", "rope_theta": 5e3, "factor": 4.0}}, r"rope_type='dynamic'"),
    ("qwen3", {}, "QK-norm is not linear in the latent"),
    ("mixtral", {}, "its router normalises the softmax over the chosen experts; DeepSeek-V3's weighs by sigmoids"),
    ("qwen2_moe", {}, "its shared expert has a gate, DeepSeek's have none"),
    ("qwen3_moe", {}, "QK-norm is not linear in the latent"),
]


@pytest.mark.parametrize(("family", "changes", "match"), STOCK_OBSTACLES)
def test_what_stock_cannot_hold_goes_native_and_is_refused_as_stock(
    tmp_path: Path, family: str, changes: dict[str, Any], match: str, caplog: pytest.LogCaptureFixture
) -> None:
    folder = tiny_model(tmp_path / "m", family, **changes)
    spec = read_spec(Checkpoint.open(folder))
    sizes = {"source": str(folder), "out": str(tmp_path / "out"), "lossless": True}
    with pytest.raises(UnsupportedSource, match=rf"the stock format cannot hold it: .*{match}.*; use --format native"):
        output_is_native(ConvertRecipe(**sizes, format="stock"), spec)
    with caplog.at_level(logging.INFO, "mla_convert.conversion.convert"):
        assert output_is_native(ConvertRecipe(**sizes), spec)
    assert re.search(match, caplog.text)
    plain = read_spec(Checkpoint.open(tiny_model(tmp_path / "plain", "llama")))
    assert not output_is_native(ConvertRecipe(**sizes), plain)
    assert output_is_native(ConvertRecipe(**sizes, format="native"), plain)


def test_what_stock_holds_at_a_cost_goes_native_unless_it_is_asked_for(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    spec = read_spec(Checkpoint.open(tiny_model(tmp_path / "m", "qwen2", tokenizer=False)))
    sizes = {"source": "SOURCE", "out": "OUT", "lossless": True}
    with caplog.at_level(logging.INFO, "mla_convert.conversion.convert"):
        assert output_is_native(ConvertRecipe(**sizes), spec)
        assert re.search(
            r"native format: its attention has biases.*; --format stock writes it all the same", caplog.text
        )
        assert not output_is_native(ConvertRecipe(**sizes, format="stock"), spec)
    assert "other engines do not: vLLM (GPU): skipped" in caplog.text


def test_the_window_of_a_mistral_is_the_class_s_where_the_key_is_absent(tmp_path: Path) -> None:
    folder = tiny_model(tmp_path / "m", "mistral", tokenizer=False)
    assert [facts.window for facts in read_spec(Checkpoint.open(folder)).layers] == [None] * 4
    spec = read_spec(Checkpoint.open(edit_config(folder, drop=("sliding_window",))))
    assert [facts.window for facts in spec.layers] == [4096] * 4
    assert "sliding_window=4096 (the model class's value, as the key is absent)" in str(spec.stock_obstacle)


@pytest.mark.parametrize(
    ("name", "match"),
    [
        (
            "model.layers.1.self_attn.q_norm.weight",
            r"q_norm\.weight \[3\] is in no table .* has no QK-norm and would ignore it",
        ),
        (
            "model.layers.1.self_attn.k_proj.bias",
            r"k_proj\.bias \[3\] is in no table .* by config\.json this layer has no biases",
        ),
        ("model.layers.1.self_attn.sinks", r"no attention sinks and would ignore them"),
        ("model.layers.1.mlp.experts.0.w1.weight", r"has no experts"),
        ("model.layers.1.self_attn.q_proj.weight_scale", r"dequantise it first"),
        ("model.layers.1.self_attn.q_proj.lora_A.weight", r"merge the adapter"),
        (
            "model.layers.4.input_layernorm.weight",
            r"input_layernorm\.weight \[3\] is in no table .* with 4 layers",
        ),
        ("model.extra", r"tensor model\.extra \[3\] is in no table of the family with 4 layers: remove it"),
    ],
)
def test_tensors_in_no_table_are_refused_by_name(tmp_path: Path, name: str, match: str) -> None:
    folder = tiny_model(tmp_path / "m", tokenizer=False)
    refuse(edit_tensors(folder, **{name.replace(".", "__"): torch.ones(3)}), match)


def test_missing_wrongly_shaped_and_oddly_stored_tensors_are_refused(tmp_path: Path) -> None:
    folder = tiny_model(tmp_path / "m", tokenizer=False)
    key, name = "model__layers__3__self_attn__k_proj__weight", r"model\.layers\.3\.self_attn\.k_proj\.weight"
    edit_tensors(folder, **{key: torch.ones(24, 48)})
    refuse(
        folder,
        rf"{name} has shape \[24, 48\], config\.json implies \[20, 48\]; correct",
    )
    edit_tensors(folder, **{key: torch.ones(20, 48, dtype=torch.float64)})
    refuse(folder, rf"{name} is stored as torch\.float64; supported: float32, bfloat16, float16")
    edit_tensors(folder, **{key: torch.ones(20, 48).to(torch.float8_e4m3fn)})
    refuse(folder, rf"{name} is stored as torch\.float8_e4m3fn")
    edit_tensors(folder, **{key: None})
    refuse(folder, rf"lacks 1 of the 39 tensors of config\.json, first {name}; correct")


def test_an_untied_model_without_lm_head_is_refused(tmp_path: Path) -> None:
    folder = tiny_model(tmp_path / "m", tokenizer=False, tie_word_embeddings=True)
    refuse(edit_config(folder, tie_word_embeddings=False), r"lacks 1 of the 39 tensors .* first lm_head\.weight")


def test_stored_rotary_buffers_are_ticked_off(tmp_path: Path) -> None:
    folder = tiny_model(tmp_path / "m", tokenizer=False)
    name = "model.layers.0.self_attn.rotary_emb.inv_freq"
    ckpt = Checkpoint.open(edit_tensors(folder, **{name.replace(".", "__"): torch.ones(5)}))
    read_spec(ckpt)
    assert ckpt.consumed() == [name]


def test_a_stored_lm_head_counts_as_tied_only_if_it_equals_the_embedding(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = tiny_model(tmp_path / "m", tokenizer=False, tie_word_embeddings=True)
    embed = load_file(folder / WEIGHTS)["model.embed_tokens.weight"]
    edit_tensors(folder, lm_head__weight=embed.clone())
    ckpt = Checkpoint.open(folder)
    spec = read_spec(ckpt)
    assert spec.tie_word_embeddings
    assert "lm_head" not in global_tensors(spec)
    assert ckpt.consumed() == ["lm_head.weight"]
    with caplog.at_level(logging.WARNING, families.__name__):
        ckpt = Checkpoint.open(edit_tensors(folder, lm_head__weight=embed + 1))
        spec = read_spec(ckpt)
    assert not spec.tie_word_embeddings
    assert global_tensors(spec)["lm_head"] in ckpt.leftover()
    assert "treated as untied" in caplog.text
    model = AutoModelForCausalLM.from_pretrained(folder)  # the model class agrees
    assert torch.equal(model.lm_head.weight, embed + 1)
    assert torch.equal(model.model.embed_tokens.weight, embed)


def test_gguf_sources_have_the_spec_of_their_original(tmp_path: Path) -> None:
    folder = tiny_model(tmp_path / "m", tie_word_embeddings=True)
    spec = read_spec(Checkpoint.open(write_gguf(folder, tmp_path / "m.gguf")))
    original = read_spec(Checkpoint.open(folder))
    for field in (
        "hidden_size",
        "num_key_value_heads",
        "source_head_dim",
        "vocab_size",
        "tie_word_embeddings",
    ):
        assert getattr(spec, field) == getattr(original, field)
    assert spec.rope_parameters == original.rope_parameters
    assert spec.rms_norm_eps == pytest.approx(1e-5, rel=1e-7)  # GGUF stores it in fp32


def test_gguf_frequency_tensors_and_gaps_are_refused(tmp_path: Path) -> None:
    folder = tiny_model(tmp_path / "m")
    path = write_gguf(folder, tmp_path / "freqs.gguf", rope_freqs__weight=torch.ones(5))
    refuse(path, r"tensor rope_freqs\.weight \[5\] is in no table .* Llama 3 frequency scaling .*safetensors")
    path = write_gguf(folder, tmp_path / "gap.gguf", blk__2__ffn_up__weight=None)
    refuse(path, r"lacks 1 of the 39 tensors .* first model\.layers\.2\.mlp\.up_proj\.weight")
