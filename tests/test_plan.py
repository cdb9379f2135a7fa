"""plan: sizes worked out by hand from the published configs, what fits, and the serving checklist."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from tiny import edit_config, tiny_model, write_gguf
from typer.testing import CliRunner

import mla_convert
from mla_convert import cli
from mla_convert.errors import BadCheckpoint, BadOption, UnsupportedSource
from mla_convert.interface.plan_recipe import memory_bytes, tokens
from mla_convert.planning.engines import facts, padded_rank
from mla_convert.source.attention_shape import count_parameters

CONFIGS = Path(__file__).parent / "configs"
MIB, GIB = 2**20, 2**30


def plan(name: str, **options: Any) -> Any:
    return mla_convert.plan(model=str(CONFIGS / name), **options)


def kind(result: Any, beginning: str) -> Any:
    (found,) = [row for row in result.kinds if row.name.startswith(beginning)]
    return found


def test_the_published_table_of_a_deepseek_shaped_model() -> None:
    """65,536 / 4,096 / 512 / 1,152 bytes per token and layer in 16 bits; 256 / 16 / 2 / 4.5 MiB for 4,096 tokens."""
    result = plan("deepseek-v3", cache_dtype="float16")
    found = {
        name: (kind(result, name).bytes_per_token_and_layer, kind(result, name).sequences[0] / 61 / MIB)
        for name in ("MHA", "GQA, 8", "MQA", "MLA, 512 + 64")
    }
    assert found == {
        "MHA": (65_536, 256.0),
        "GQA, 8": (4_096, 16.0),
        "MQA": (512, 2.0),
        "MLA, 512 + 64": (1_152, 4.5),
    }
    assert kind(result, "MLA, 512 + 64").as_gqa == 2.25
    assert result.shape.kind == "MLA" and result.size == (512, 64)
    assert kind(plan("deepseek-v3", cache_dtype="fp8"), "MLA, 512").bytes_per_token_and_layer == 576


# config: numbers of the model's own; bytes per token of all layers in bf16, own and 512 + 64; parameters (published)
MODELS = {
    "llama-3-8b": (2 * 8 * 128, 32 * 4096, 32 * 1152, 8_030_261_248),
    "llama-3-70b": (2 * 8 * 128, 80 * 4096, 80 * 1152, 70_553_706_496),
    "qwen2.5-7b": (2 * 4 * 128, 28 * 2048, 28 * 1152, 7_615_616_512),
    "qwen2.5-72b": (2 * 8 * 128, 80 * 4096, 80 * 1152, 72_706_203_648),
    "qwen3-8b": (2 * 8 * 128, 36 * 4096, 36 * 1152, 8_190_735_360),
    "mistral-7b": (2 * 8 * 128, 32 * 4096, 32 * 1152, 7_248_023_552),
    "gemma-3-4b": (2 * 4 * 256, 34 * 4096, 34 * 1152, 3_880_263_168),
}


@pytest.mark.parametrize("name", MODELS)
def test_whole_models_by_hand(name: str) -> None:
    numbers, own, latent, parameters = MODELS[name]
    result = plan(name)
    assert result.shape.numbers == numbers and result.size == (512, 64)
    assert kind(result, "GQA").bytes_per_token == own
    assert kind(result, "MLA, 512 + 64").bytes_per_token == latent
    if name != "gemma-3-4b":  # it has windows: see below
        assert [size / GIB for size in kind(result, "GQA").sequences] == [own * 2**k / GIB for k in (12, 15, 17)]
    assert count_parameters(str(CONFIGS / name)) == parameters


def test_windows_cap_their_layers() -> None:
    """Gemma 3 4B: every sixth of 34 layers, 5, attends to everything, 29 to 1,024 tokens."""
    result = plan("gemma-3-4b")
    assert sum(window is None for window in result.shape.windows) == 5
    assert kind(result, "GQA").sequences == tuple(4096 * (5 * n + 29 * 1024) for n in (4096, 32768, 131072))
    assert kind(result, "MLA, 512").sequences[1] == 1152 * (5 * 32768 + 29 * 1024)
    assert any("sliding windows" in line for line in result.obstacles)
    assert plan("mistral-7b").obstacles == ()


def test_the_latent_is_whole_on_every_rank() -> None:
    """Llama 3 8B: 8 KV heads; at tp 8 one of them, 256 numbers, is less than the latent's 576."""
    rows = {row.tp: row for row in plan("llama-3-8b", tp="1,2,4,8,16,3").ranks}
    assert [rows[tp].own_bytes for tp in (1, 2, 4, 8, 16)] == [32 * 2 * n for n in (2048, 1024, 512, 256, 256)]
    assert {rows[tp].latent_bytes for tp in rows} == {32 * 2 * 576}
    assert [rows[tp].latent_costs_more for tp in (1, 2, 4, 8)] == [False, False, True, True]
    assert rows[16].own_legal and not rows[3].own_legal and not rows[3].latent_legal
    qwen = {row.tp: row for row in plan("qwen2.5-7b", tp="2,8").ranks}  # 28 heads
    assert qwen[2].latent_legal and not qwen[8].latent_legal


def test_what_fits_on_a_gpu() -> None:
    """Llama 3 8B on 80 GB: 0.9 x 0.95 x 80e9 - 16,060,522,496 = 52,339,477,504 bytes; 4 GiB or 1.125 GiB per 32k."""
    result = plan("llama-3-8b", gpu_memory="80GB", context="32k")
    assert result.memory == (72_000_000_000, 2 * 8_030_261_248)
    assert result.serving.budget == 52_339_477_504
    assert (result.ranks[0].own_fits, result.ranks[0].latent_fits) == (12, 43)
    assert (result.serving.tp, result.serving.max_num_seqs) == (1, 43)
    assert 2048 <= result.serving.max_num_batched_tokens <= 16384
    large = plan("llama-3-70b", gpu_memory="80GB")  # 141 GB of weights: two GPUs at least
    assert large.ranks[0].latent_fits == 0 and large.serving.tp == 4
    assert plan("llama-3-70b", gpu_memory="16GiB", tp="1,2").serving is None


def test_what_a_layer_costs() -> None:
    """Llama 3 8B to 512 + 64: q 4096 x 32 x 192, kv_a 4096 x 576, kv_b 512 x 32 x 256, o 4096 x 4096."""
    result = plan("llama-3-8b", context="1000")
    assert result.before.parameters == 2 * 4096**2 + 2 * 4096 * 1024
    assert result.after.parameters == 4096 * 6144 + 4096 * 576 + 512 * 8192 + 4096**2
    assert result.before.decode_bytes == 4096 * 1000 and result.after.decode_bytes == 1152 * 1000
    assert result.before.decode_flops == 2 * result.before.parameters + 32 * 4 * 128 * 1000
    assert result.after.decode_flops == 2 * result.after.parameters + 32 * 2 * (512 + 512 + 64) * 1000
    assert (result.after.key_width, result.after.value_width) == (192, 128)
    own = plan("deepseek-v3", context="1000")  # a source with a latent is counted like a result
    assert own.before == own.after and own.before.key_width == 192
    assert own.before.parameters == 7168 * 128 * 192 + 7168 * 576 + 512 * 128 * 256 + 7168 * 128 * 128


def test_parameters_of_a_layer_are_those_of_the_written_class(tmp_path: Path) -> None:
    """The formula against a conversion: all attention tensors but the latent norm."""
    source = tiny_model(tmp_path / "source")
    mla_convert.convert(source=source, out=tmp_path / "out", kv_lora_rank=16, qk_rope_head_dim=4, method="svd")
    from mla_convert.source.checkpoint import Checkpoint

    headers = Checkpoint.open(tmp_path / "out").headers
    shapes = [h.shape for n, h in headers.items() if n.startswith("model.layers.0.self_attn") and "norm" not in n]
    result = mla_convert.plan(model=source, kv_lora_rank=16, qk_rope_head_dim=4)
    assert result.after.parameters == sum(a * b for a, b in shapes)
    assert result.shape.weight_bytes == 4 * result.shape.parameters  # float32, from the headers
    assert result.shape.parameters == count_parameters(str(source))
    written = mla_convert.plan(model=tmp_path / "out")  # a converted folder is planned for as what it is
    assert (written.shape.kind, written.size, written.shape.numbers) == ("MLA", (16, 4), 20)


def verdicts(result: Any, question: str) -> dict[str, str]:
    return {line.engine: line.verdict for line in result.checklist if line.question == question}


def test_the_checklist_knows_the_shapes() -> None:
    result = plan("llama-3-8b")
    assert set(verdicts(result, "MLA kernel for this shape").values()) == {"yes"}
    assert verdicts(plan("deepseek-v3"), "prefill widths")["vLLM (GPU)"] == "yes"  # nope 128 of its 192
    assert verdicts(result, "prefill widths")["vLLM (GPU)"] == "yes"  # (128, 64, 128)
    assert verdicts(result, "fp8 latent")["vLLM (CPU)"] == "no"
    odd = plan("llama-3-8b", kv_lora_rank=300, qk_rope_head_dim=50)
    kernel = verdicts(odd, "MLA kernel for this shape")
    assert kernel["vLLM (GPU)"] == "padded" and kernel["SGLang"] == "no" and kernel["transformers"] == "yes"
    (line,) = [x for x in odd.checklist if x.engine == "vLLM (GPU)" and x.question.startswith("MLA")]
    assert "zero rows to 462 + 50 make the cache 46% larger" in line.detail  # 512 / 350
    large = plan("llama-3-8b", kv_lora_rank=1024, qk_rope_head_dim=64)
    assert verdicts(large, "MLA kernel for this shape")["vLLM (GPU)"] == "no"


def test_blocks_are_compared_with_128_byte_transactions() -> None:
    """512 + 64 in bf16 is 1,152 B = 9 x 128 per token; 300 + 50 is 700 B, of which 16 tokens are 87.5 x 128."""
    assert verdicts(plan("llama-3-8b"), "paged blocks aligned")["vLLM (GPU)"] == "yes"
    odd = plan("llama-3-8b", kv_lora_rank=300, qk_rope_head_dim=50)
    (line,) = [x for x in odd.checklist if x.engine == "vLLM (GPU)" and x.question.startswith("paged")]
    assert (line.verdict, "blocks of 16 tokens end inside") == ("no", line.detail.split("; ")[1][:30])


def test_the_checklist_knows_the_source(tmp_path: Path) -> None:
    qwen = verdicts(plan("qwen2.5-7b"), "biases")
    assert qwen["vLLM (GPU)"] == qwen["llama.cpp (deepseek2)"] == "no"
    assert verdicts(plan("mistral-7b"), "biases")["vLLM (GPU)"] == "yes"
    assert any(line.startswith("QK-norm") for line in plan("qwen3-8b").obstacles)
    folder = tiny_model(tmp_path / "scaled")
    edit_config(
        folder,
        rope_parameters={
            "rope_type": "llama3", "rope_theta": 5e5, "factor": 8.0, "low_freq_factor": 1.0,
            "high_freq_factor": 4.0, "original_max_position_embeddings": 64,
        },
    )  # fmt: skip
    scaled = verdicts(mla_convert.plan(model=folder), "RoPE as the source")
    assert scaled["transformers"] == "yes" and scaled["vLLM (GPU)"] == scaled["llama.cpp (deepseek2)"] == "no"
    assert set(verdicts(plan("llama-3-8b"), "RoPE as the source").values()) == {"yes"}


def test_every_engine_row_is_complete() -> None:
    for row in facts():
        assert row["known"] in ("ran", "read") and row["version"] and row["fp8"]["verdict"] in ("yes", "no")
        assert padded_rank(row, (512, 64)) == 512  # the size DeepSeek itself has runs everywhere


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"kv_lora_rank": 8}, "kv_lora_rank=8 and qk_rope_head_dim=None: give both or neither"),
        ({"kv_lora_rank": 8, "qk_rope_head_dim": 7}, "qk_rope_head_dim=7 is odd"),
        ({"kv_lora_rank": 8, "qk_rope_head_dim": 256}, "qk_rope_head_dim=256 exceeds 128"),
        ({"context": "long"}, "context='long' is no number of tokens; write for example 32k"),
        ({"gpu_memory": "80"}, "gpu_memory='80' is no amount of memory; write for example 80GB"),
        ({"tp": "1,two"}, "tp='1,two' is no list of whole numbers"),
        ({"memory_fraction": 1.5}, "memory_fraction=1.5 must be above 0 and at most 1"),
        ({"cache_dtype": "int8"}, "unknown cache_dtype 'int8'"),
        ({"plot": "x.gif"}, "plot=x.gif: the name must end in one of"),
    ],
)
def test_impossible_options_are_named(options: dict[str, Any], match: str) -> None:
    with pytest.raises(BadOption, match=match):
        plan("llama-3-8b", **options)


def test_units() -> None:
    assert (tokens("32k"), tokens("1000"), tokens("1M")) == (32768, 1000, 2**20)
    assert (memory_bytes("80GB"), memory_bytes("80 GiB"), memory_bytes("0.5TB")) == (80 * 10**9, 80 * GIB, 5 * 10**11)


def test_a_config_that_cannot_be_planned_is_named(tmp_path: Path) -> None:
    with pytest.raises(BadCheckpoint, match="cannot read a config.json there"):
        mla_convert.plan(model=tmp_path)
    folder = tmp_path / "odd"
    folder.mkdir()
    content = json.loads((CONFIGS / "llama-3-8b" / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(content | {"num_key_value_heads": 5}))
    with pytest.raises(UnsupportedSource, match="num_attention_heads=32 is no multiple of num_key_value_heads=5"):
        mla_convert.plan(model=folder)


def test_the_command_prints_and_writes(tmp_path: Path) -> None:
    files = ["--json", str(tmp_path / "p.json"), "--plot", str(tmp_path / "p.png")]
    result = CliRunner().invoke(cli.app, ["plan", str(CONFIGS / "llama-3-8b"), "--gpu-memory", "80GB", *files])
    assert result.exit_code == 0, result.output
    printed = " ".join(result.stdout.split())
    for words in (
        "GQA, 8 KV heads (own) 2,048 4,096 131,072 512 MiB 4 GiB 16 GiB",
        "MLA, 512 + 64 (plan) 576 1,152 36,864 144 MiB 1.125 GiB 4.5 GiB",
        "At tp 4, 8 the latent costs more than this model's own cache",
        "max_num_seqs 43",
        "vLLM (CPU): fp8 latent: no",
    ):
        assert words in printed
    written = json.loads((tmp_path / "p.json").read_text())
    assert written["kinds"][1]["bytes_per_token"] == 131_072 and written["versions"]["mla_convert"]
    assert (tmp_path / "p.png").read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"


def test_headers_are_read_but_no_weights(tmp_path: Path) -> None:
    """With the tensors' bytes gone bad the plan is the same: only headers were read."""
    folder = tiny_model(tmp_path / "m")
    before = mla_convert.plan(model=folder)
    weights = folder / "model.safetensors"
    raw = bytearray(weights.read_bytes())
    start = 8 + int.from_bytes(raw[:8], "little")
    raw[start:] = b"\xff" * (len(raw) - start)  # NaN everywhere
    weights.write_bytes(bytes(raw))
    assert mla_convert.plan(model=folder) == before


def test_a_gguf_file_is_planned_for_as_its_folder_is(tmp_path: Path) -> None:
    folder = tiny_model(tmp_path / "m")
    own = mla_convert.plan(model=folder)
    found = mla_convert.plan(model=write_gguf(folder, tmp_path / "m.gguf"))
    assert found.kinds == own.kinds and found.ranks == own.ranks


def test_planning_loads_no_model_code() -> None:
    code = (
        "import sys, mla_convert; mla_convert.plan(model=sys.argv[1]);"
        "assert 'transformers.modeling_utils' not in sys.modules and 'matplotlib' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code, str(CONFIGS / "llama-3-8b")], check=True)
