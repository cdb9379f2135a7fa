"""Checks of a converted folder that need no forward pass: the source is accounted for, config and tensors are
stock.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedTokenizerBase

from mla_convert.formats.stock import LATENT_NORM_EPS
from mla_convert.modeling.configs import PREFIX
from mla_convert.source.checkpoint import Checkpoint
from mla_convert.source.experts import stored_tensors
from mla_convert.source.family_table import FAMILIES

SAMPLE = "The quick brown fox, 1234 + 5678 = 6912;\n\tif x == 'é': return [λ]\n"
TOKEN_IDS = ("bos_token_id", "eos_token_id", "pad_token_id")
# Source keys that change what the stock class computes, or make it run other code.
NOT_CARRIED_OVER = (
    "sliding_window",
    "use_sliding_window",
    "partial_rotary_factor",
    "auto_map",
    "quantization_config",
)


@dataclass(frozen=True)
class Check:
    """One line of a verification. passed None: information, no judgement. value and bound in the units of
    `detail`.
    """

    name: str
    passed: bool | None
    value: float | None = None
    bound: float | None = None
    detail: str = ""


def source_accounted(source: Checkpoint, record: Mapping[str, Any]) -> list[Check]:
    """The source's weight files are those that were converted, and each tensor in them was consumed.

    `record` is conversion.json; names are compared with the headers of the source as it lies there now.
    """
    written = record.get("source", {})
    hashes, recorded = source.hashes(), written.get("hashes", {})
    changed = sorted(name for name in hashes | recorded if hashes.get(name) != recorded.get(name))
    names, consumed = set(source.headers), set(written.get("consumed", []))
    lost = sorted(names - consumed | set(written.get("leftover", [])))
    foreign = sorted(consumed - names)
    return [
        found("source files unchanged", changed, f"{len(hashes)} sha256 equal to conversion.json", "differ:"),
        found("source tensors consumed", lost + foreign, f"{len(names)} of {len(names)}", "not accounted for:"),
    ]


def config_is_stock(source: Mapping[str, Any], converted: Mapping[str, Any], record: Mapping[str, Any]) -> list[Check]:
    """config.json of the converted folder against what every DeepSeek-V3 class needs and what the source
    says.
    """
    heads, layers = converted.get("num_attention_heads"), converted.get("num_hidden_layers")
    must = {
        "architectures": ["DeepseekV3ForCausalLM"],
        "model_type": "deepseek_v3",
        "num_key_value_heads": heads,
        "first_k_dense_replace": layers,
        "rope_interleave": True,
        "tie_word_embeddings": False,
        "rms_norm_eps": LATENT_NORM_EPS,
        "kv_lora_rank": record.get("kv_lora_rank"),
        "qk_rope_head_dim": record.get("qk_rope_head_dim"),
    }
    same = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")
    must |= {key: source[key] for key in (*same, "max_position_embeddings") if key in source}
    wrong = [
        f"{key} {converted.get(key)!r}, needed {want!r}" for key, want in must.items() if converted.get(key) != want
    ]
    if not isinstance(converted.get("n_routed_experts", 0), int):
        wrong.append(f"n_routed_experts {converted['n_routed_experts']!r}, needed an integer")
    if "float16" in (converted.get("dtype"), converted.get("torch_dtype")):
        wrong.append("dtype 'float16', whose range the scaled latent leaves; needed float32 or bfloat16")
    leaked = [f"{key} {converted[key]!r}" for key in NOT_CARRIED_OVER if converted.get(key) is not None]
    rope = converted.get("rope_parameters") or {}
    if "partial_rotary_factor" in rope:
        leaked.append(f"rope_parameters.partial_rotary_factor {rope['partial_rotary_factor']!r}")
    if converted.get("head_dim", converted.get("qk_rope_head_dim")) != converted.get("qk_rope_head_dim"):
        leaked.append(f"head_dim {converted['head_dim']!r} of the source")
    tokens = [
        f"{key} {converted.get(key)!r}, source {source.get(key)!r}"
        for key in TOKEN_IDS
        if converted.get(key) != source.get(key)
    ]
    return [
        found("config is stock DeepSeek-V3", wrong, f"{len(must) + 2} fields", ""),
        found("no source-only config key", leaked, f"none of {', '.join(NOT_CARRIED_OVER)}, head_dim", "leaked:"),
        found(
            "bos, eos, pad ids kept",
            tokens,
            ", ".join(f"{key} {converted.get(key)}" for key in TOKEN_IDS),
            "",
        ),
    ]


def tensors_are_stock(converted: Checkpoint) -> list[Check]:
    """Names and shapes in the file headers are exactly those of the stock class of this config; no fp16;
    lm_head there.
    """
    stock: Any = AutoModelForCausalLM
    try:
        with torch.device("meta"):
            model = stock.from_config(AutoConfig.for_model(**converted.config))
    except Exception as error:  # whatever the config classes raise, the folder does not load
        return [Check("tensor names and shapes", False, detail=f"no class can be built from config.json: {error}")]
    family = FAMILIES.get(str(converted.config.get("model_type")).removeprefix(PREFIX))
    state = model.state_dict()
    expected = {name: tuple(tensor.shape) for name, tensor in state.items()}
    if family is not None:
        expected = stored_tensors(family, state, converted.headers)
    if model.config.tie_word_embeddings and "lm_head.weight" not in converted.headers:
        expected.pop("lm_head.weight", None)
    held = {name: tuple(header.shape) for name, header in converted.headers.items()}
    wrong = [f"{name} missing" for name in sorted(expected.keys() - held.keys())]
    wrong += [f"{name} unknown to the class" for name in sorted(held.keys() - expected.keys())]
    wrong += [
        f"{name} {list(held[name])}, needed {list(expected[name])}"
        for name in sorted(expected.keys() & held.keys())
        if held[name] != expected[name]
    ]
    dtypes = {str(header.dtype).removeprefix("torch.") for header in converted.headers.values()}
    half = [name for name, header in converted.headers.items() if header.dtype == torch.float16]
    return [
        found("tensor names and shapes", wrong, f"{len(held)} tensors, exactly the class's", ""),
        found("no fp16 tensor", half, f"stored as {', '.join(sorted(dtypes))}", ""),
    ]


def no_code(folder: str | Path) -> Check:
    """A stock folder holds no Python file and no pickle."""
    code = [path.name for path in Path(folder).glob("*.py")] + pickles(folder)
    return found("no code, no pickle", code, "safetensors and JSON only", "found:")


def pickles(folder: str | Path) -> list[str]:
    """Names of files that torch.load would read."""
    return [path.name for pattern in ("*.bin", "*.pt", "*.pth") for path in Path(folder).glob(pattern)]


def generation_kept(source: Checkpoint, converted: Checkpoint) -> Check:
    """generation_config.json says what the source's says (stop tokens above all)."""
    old, new = source.generation_config or {}, converted.generation_config or {}
    ignored = ("transformers_version", "_from_model_config")
    wrong = [
        f"{key} {new.get(key)!r}, source {value!r}"
        for key, value in old.items()
        if key not in ignored and new.get(key) != value
    ]
    return found("generation_config kept", wrong, f"{len(old)} fields" if old else "the source has none", "")


def tokenizer_kept(source: PreTrainedTokenizerBase, converted: PreTrainedTokenizerBase | None) -> Check:
    """Both tokenizers cut a sample the same way and share the chat template and the special tokens."""
    if converted is None:
        return Check("tokenizer and chat template kept", False, detail="no tokenizer can be loaded")
    wrong = []
    if source(SAMPLE)["input_ids"] != converted(SAMPLE)["input_ids"]:
        wrong.append("a sample text is cut differently")
    if getattr(source, "chat_template", None) != getattr(converted, "chat_template", None):
        wrong.append("the chat template differs")
    if source.special_tokens_map != converted.special_tokens_map:
        wrong.append(f"special tokens {converted.special_tokens_map}, source {source.special_tokens_map}")
    return found("tokenizer and chat template kept", wrong, f"{len(converted)} tokens", "")


def loads_cleanly(missing: tuple[str, ...], unexpected: tuple[str, ...], mismatched: tuple[str, ...]) -> Check:
    """transformers found every tensor it wanted and used every tensor it found."""
    wrong = [f"{name} missing" for name in missing] + [f"{name} unused" for name in unexpected]
    wrong += [f"{name} of another shape" for name in mismatched]
    return found("loads with stock AutoModelForCausalLM", wrong, "0 missing, 0 unexpected", "")


def found(name: str, faults: list[str], good: str, bad: str) -> Check:
    """A check that passes without `faults`; its value is how many there are, its detail the first three, or `good`."""
    more = f" and {len(faults) - 3} more" if len(faults) > 3 else ""
    detail = f"{bad} {'; '.join(faults[:3])}{more}".strip() if faults else good
    return Check(name, not faults, float(len(faults)), 0.0, detail)
