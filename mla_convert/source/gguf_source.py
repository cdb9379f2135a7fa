"""Read llama-architecture GGUF files: names and shapes at once, one tensor dequantised at a time.

The tensors equal those of `AutoModelForCausalLM.from_pretrained(folder, gguf_file=name, dtype=float32)`,
but the whole model is never held in memory, and what that loader ignores without a word (rope scaling,
rope_freqs, windows) is refused.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from gguf import GGUFReader, dequantize

from mla_convert.errors import BadCheckpoint, UnsupportedSource
from mla_convert.source.safetensors_source import TensorHeader

GLOBAL_NAMES: Mapping[str, str] = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
LAYER_NAMES: Mapping[str, str] = {
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
}
# Metadata below "llama." that the transformers config builder reads.
READ_KEYS = frozenset(
    {
        "context_length",
        "block_count",
        "feed_forward_length",
        "embedding_length",
        "rope.dimension_count",
        "rope.freq_base",
        "attention.head_count",
        "attention.head_count_kv",
        "attention.layer_norm_rms_epsilon",
        "vocab_size",
    }
)
# Metadata it ignores, with the one value (or the key it must equal) at which ignoring it is right.
FIXED_KEYS: Mapping[str, Any] = {
    "rope.scaling.type": "none",
    "attention.causal": True,
    "expert_count": 0,
    "expert_used_count": 0,
}
EQUAL_KEYS: Mapping[str, str] = {
    "attention.key_length": "rope.dimension_count",
    "attention.value_length": "rope.dimension_count",
}


def hf_name(name: str) -> str:
    """Return the Hugging Face name of a GGUF tensor; a name in no table is returned as it is."""
    if name in GLOBAL_NAMES:
        return GLOBAL_NAMES[name]
    match = re.fullmatch(r"blk\.(\d+)\.(\w+)\.weight", name)
    if match and match[2] in LAYER_NAMES:
        return f"model.layers.{match[1]}.{LAYER_NAMES[match[2]]}.weight"
    return name


class GGUFWeights:
    """The tensors of one GGUF file under their Hugging Face names, as float32.

    Raises BadCheckpoint for a damaged file, UnsupportedSource for metadata that no step accounts for.
    """

    def __init__(self, path: Path) -> None:
        try:
            self._reader = GGUFReader(path)
        except (ValueError, IndexError, OSError, KeyError, OverflowError, MemoryError) as error:
            raise BadCheckpoint(f"{path} is truncated or no GGUF file ({error}); get it again.") from error
        self.files = [path]
        self.architecture = str(self._value("general.architecture"))
        if self.architecture == "llama":
            self._check_metadata(path)
        self._tensors = {hf_name(tensor.name): tensor for tensor in self._reader.tensors}
        self.headers = {
            # GGUF lists the fastest dimension first.
            name: TensorHeader(torch.float32, tuple(int(n) for n in reversed(tensor.shape)), path)
            for name, tensor in self._tensors.items()
        }
        if not self.headers:
            raise BadCheckpoint(f"{path} holds no tensors; download it again.")

    def _value(self, key: str) -> Any:
        field = self._reader.get_field(key)
        return None if field is None else field.contents()

    def _check_metadata(self, path: Path) -> None:
        for key in self._reader.fields:
            prefix, _, name = key.partition(".")
            if prefix != self.architecture or name in READ_KEYS:
                continue
            value = self._value(key)
            if name in EQUAL_KEYS:
                known, allowed = True, self._value(f"{prefix}.{EQUAL_KEYS[name]}")
            else:
                known, allowed = name in FIXED_KEYS, FIXED_KEYS.get(name)
            if not known or value != allowed:
                only = f"only {allowed!r} is supported" if known else "it is in no table"
                raise UnsupportedSource(
                    f"{path}: GGUF metadata {key}={value!r}: {only} and transformers would ignore it; "
                    "convert the safetensors checkpoint of this model instead."
                )

    def read(self, name: str) -> torch.Tensor:
        """Return tensor `name` dequantised to float32, [out, in]."""
        tensor = self._tensors[name]
        try:
            array = np.array(dequantize(tensor.data, tensor.tensor_type), dtype=np.float32)
        except (ValueError, NotImplementedError) as error:
            raise BadCheckpoint(
                f"{self.files[0]}: cannot dequantise {name} ({error}); use a file of another type."
            ) from error
        data = torch.from_numpy(array)  # a copy: dequantize may hand out the read-only map itself
        if name.endswith("q_proj.weight"):
            data = self._half_split(data, self._value("llama.attention.head_count"))
        elif name.endswith("k_proj.weight"):
            heads = self._value("llama.attention.head_count")
            data = self._half_split(data, self._value("llama.attention.head_count_kv") or heads)
        return data

    @staticmethod
    def _half_split(weight: torch.Tensor, heads: int) -> torch.Tensor:
        """Undo llama.cpp's row order: pairs (2i, 2i+1) of each head become (i, i + d/2)."""
        pairs = weight.shape[0] // heads // 2
        return weight.view(heads, pairs, 2, -1).transpose(1, 2).reshape(weight.shape)
