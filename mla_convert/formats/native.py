"""The native layout: an MLALayer as the tensors of modeling/attention.py, its config, and back.

Everything but the attention of converted layers is the source's: tensors under their own names, config.json with its
own keys, a model_type of its own ("mla_" and the family) and one more key, `mla`:

    {"format": 1, "layers": [{"kv_lora_rank": 128, "qk_nope_head_dim": 64, "slots": [0, 1, ...],
                              "latent_input": "hidden", "qkv_bias": false, "o_bias": false}, null, ...]}

null is a layer that was kept as it is.
"""

import copy
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from mla_convert.errors import BadCheckpoint
from mla_convert.formats.layer import MLALayer
from mla_convert.formats.stock import interleave_heads
from mla_convert.modeling.attention import LatentShape, MLAttention
from mla_convert.modeling.classes import native_classes
from mla_convert.modeling.configs import FORMAT, PREFIX, native_name
from mla_convert.source.checkpoint import Checkpoint
from mla_convert.source.families import SourceSpec
from mla_convert.source.family_table import FAMILIES, IGNORED_TENSORS
from mla_convert.source.features import build_config, build_skeleton, layer_facts
from mla_convert.source.projections import attention_prefix, read_projection

FRONT = ("q", "k", "v")
COPIED = ("q_norm.weight", "k_norm.weight", "sinks")


def is_native(config: Mapping[str, Any]) -> bool:
    """Whether a config.json says that it is in the native format."""
    return str(config.get("model_type")).removeprefix(PREFIX) in FAMILIES and config.get("mla") is not None


def to_native(checkpoint: Checkpoint, spec: SourceSpec, index: int, layer: MLALayer) -> dict[str, Tensor]:
    """The attention tensors of one layer by their names below `self_attn.`; what the source has as it is, is copied."""
    rows = interleave_heads(layer.W_UQ, layer.W_QR)
    tensors = {
        "kv_a_proj.weight": torch.cat((layer.W_DKV, layer.W_KR)),
        "kv_b_proj.weight": interleave_heads(layer.W_UK, layer.W_UV),
        "o_proj.weight": layer.W_O.transpose(0, 1).flatten(1),
    }
    if layer.b_O is not None:
        tensors["o_proj.bias"] = layer.b_O
    if layer.front is not None:
        tensors["q_b_proj.weight"] = rows
        for role in FRONT:
            for part in ("weight", "bias"):
                tensor = read_projection(checkpoint, spec, index, role, part)
                if tensor is not None:
                    tensors[f"{role}_proj.{part}"] = tensor
    else:
        tensors["q_proj.weight"] = rows
        if layer.b_UQ is not None and layer.b_QR is not None and layer.b_KR is not None:
            tensors["q_proj.bias"] = torch.cat((layer.b_UQ, layer.b_QR), dim=1).flatten()
            tensors["kv_a_proj.bias"] = torch.cat((layer.b_KR.new_zeros(layer.kv_lora_rank), layer.b_KR))
    for name in COPIED:
        if (full := attention_prefix(index) + name) in checkpoint.headers:
            tensors[name] = checkpoint.tensor(full)
    return {name: tensor.contiguous() for name, tensor in tensors.items()}


def native_entry(layer: MLALayer, tensors: Mapping[str, Tensor]) -> dict[str, Any]:
    """The entry of config.json's `mla.layers` for a layer and its tensors."""
    return {
        "kv_lora_rank": layer.kv_lora_rank,
        "qk_nope_head_dim": layer.W_UQ.shape[1],
        "slots": list(layer.columns),
        "latent_input": "hidden" if layer.front is None else "keys_values",
        "qkv_bias": "q_proj.bias" in tensors,
        "o_bias": "o_proj.bias" in tensors,
    }


def native_config(spec: SourceSpec, layers: list[dict[str, Any] | None], dtype: torch.dtype) -> dict[str, Any]:
    """config.json of the converted model: the source's own, and `mla`."""
    dropped = ("torch_dtype", "_name_or_path", "transformers_version")
    return {
        **{key: value for key, value in spec.config.items() if key not in dropped},
        "architectures": [native_classes(spec.family)[1].__name__],
        "model_type": native_name(spec.family),
        "dtype": str(dtype).removeprefix("torch."),
        "mla": {"format": FORMAT, "layers": layers},
    }


def untouched(checkpoint: Checkpoint, spec: SourceSpec, prefixes: tuple[str, ...]) -> Iterator[str]:
    """Names of the source's tensors that are written as they are: not below `prefixes`, no buffers, no tied head."""
    head = FAMILIES[spec.family].global_tensors["lm_head"]
    for name in checkpoint.headers:
        buffer = any(re.fullmatch(pattern, name) for pattern in IGNORED_TENSORS)
        tied = name == head and spec.tie_word_embeddings
        if not (buffer or tied or name.startswith(prefixes)):
            yield name


class NativeFolder:
    """A written native folder, whose layers can be read back one by one."""

    def __init__(self, folder: str | Path):
        self.checkpoint = Checkpoint.open(folder)
        config = self.checkpoint.config
        if not is_native(config):
            raise BadCheckpoint(f"{folder}: model_type={config.get('model_type')!r} is not the native format")
        self.family = str(config["model_type"]).removeprefix(PREFIX)
        native_classes(self.family)
        source = {key: value for key, value in config.items() if key != "mla"} | {"model_type": self.family}
        self.facts = layer_facts(build_skeleton(build_config(source)), self.family)
        self.skeleton = build_skeleton(build_config(config))

    @property
    def converted(self) -> list[int]:
        """Indices of the layers with latent attention."""
        return [i for i, entry in enumerate(self.checkpoint.config["mla"]["layers"]) if entry is not None]

    def layer(self, index: int, dtype: torch.dtype = torch.float64) -> MLALayer:
        """Layer `index` in `dtype` on the CPU."""
        facts, shape = self.facts[index], LatentShape.parse(self.checkpoint.config["mla"]["layers"][index])
        module: MLAttention = self.skeleton.model.layers[index].self_attn
        prefix = attention_prefix(index)
        t = {
            name: self.checkpoint.tensor(prefix + name).to(dtype)
            for name in module.state_dict()
            if prefix + name in self.checkpoint.headers
        }
        front, rank = shape.latent_input == "keys_values", shape.kv_lora_rank
        rows = t["q_b_proj.weight" if front else "q_proj.weight"].unflatten(0, (module.heads, -1))
        up = t["kv_b_proj.weight"].unflatten(0, (module.heads, -1))
        nope = shape.qk_nope_head_dim
        bias = t["q_proj.bias"].unflatten(0, (module.heads, -1)) if shape.qkv_bias and not front else None
        pairs = [facts.columns.index(column) for column in shape.slots]
        return MLALayer(
            W_UQ=rows[:, :nope],
            W_QR=rows[:, nope:],
            W_DKV=t["kv_a_proj.weight"][:rank],
            W_KR=t["kv_a_proj.weight"][rank:],
            W_UK=up[:, :nope],
            W_UV=up[:, nope:],
            W_O=t["o_proj.weight"].unflatten(1, (module.heads, -1)).transpose(0, 1),
            inv_freq=facts.inv_freq[pairs],
            softmax_scale=facts.softmax_scale,
            attention_scaling=facts.attention_scaling,
            b_UQ=None if bias is None else bias[:, :nope],
            b_QR=None if bias is None else bias[:, nope:],
            b_KR=None if bias is None else t["kv_a_proj.bias"][rank:],
            b_O=t.get("o_proj.bias"),
            softcap=facts.softcap,
            sinks=t.get("sinks"),
            window=facts.window,
            front=self._front(module, t) if front else None,
            columns=shape.slots,
        )

    def _front(self, module: MLAttention, tensors: Mapping[str, Tensor]) -> MLAttention:
        config = self.skeleton.config
        filled = copy.deepcopy(module, {id(config): config})
        filled.load_state_dict(dict(tensors), assign=True)
        return filled.requires_grad_(False).eval()
