"""Config and model classes of the native format: a family's own, with latent attention in its layers.

For the family `qwen3` they are MLAQwen3Config (model_type "mla_qwen3", one more field `mla`) and MLAQwen3ForCausalLM.
They are made from the family table when AutoConfig and AutoModelForCausalLM ask for them (configs.py), so
from_pretrained of a native folder needs `import mla_convert` and no remote code. Embeddings, norms, MLPs, experts,
masks, rotary tables and heads stay transformers' own.
"""

import sys
from typing import Any

from torch import nn
from transformers import PretrainedConfig
from transformers.conversion_mapping import get_checkpoint_conversion_mapping, register_checkpoint_conversion_mapping
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING

from mla_convert.modeling.attention import LatentShape, MLAttention
from mla_convert.modeling.configs import FORMAT, config_class, native_name
from mla_convert.source.family_table import FAMILIES, Family


def native_classes(family: str) -> tuple[type[PretrainedConfig], type[Any]]:
    """Config class and causal language model class of the native format of `family`."""
    here, config = sys.modules[__name__], config_class(family)
    source: Any = MODEL_FOR_CAUSAL_LM_MAPPING[CONFIG_MAPPING[family]]
    name = f"MLA{source.__name__}"
    if name not in vars(here):
        setattr(here, name, _model_class(name, family, config, source))  # so that instances can be pickled by name
        conversion = get_checkpoint_conversion_mapping(family)  # of the tensors of experts
        if conversion is not None:
            register_checkpoint_conversion_mapping(native_name(family), conversion, overwrite=True)
    return config, getattr(here, name)


def __getattr__(name: str) -> Any:
    """The model class of that name; where the code lies beside the weights, config.json's auto_map asks for it."""
    for family, row in FAMILIES.items():
        if name == f"MLA{row.architecture}":
            return native_classes(family)[1]
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def _model_class(name: str, family: str, config: Any, source: Any) -> Any:
    row = FAMILIES[family]

    def __init__(self: Any, config: Any, *args: Any, **kwargs: Any) -> None:
        source.__init__(self, config, *args, **kwargs)
        replace_attention(self, config, row)

    return type(
        name,
        (source,),
        {
            "__module__": __name__,
            "__doc__": f"{source.__name__} with latent attention (mla_convert.modeling.attention).",
            "__annotations__": {"config": config},
            "__init__": __init__,
            "config_class": config,
            "_supports_flash_attn": False,  # they need keys and values of equal width per head, from the cache
            "_supports_flex_attn": False,
            # Transformers looks for these in the source code of a class's module.
            "_can_set_experts_implementation_cached_value": source._can_set_experts_implementation(),
            "_can_set_attn_implementation_cached_value": source._can_set_attn_implementation(),
        },
    )


def replace_attention(model: nn.Module, config: Any, row: Family) -> None:
    """Put latent attention into the layers that config.mla names. Raises ValueError where `mla` does not fit."""
    mla = config.mla
    layers: Any = getattr(model, "model").layers  # noqa: B009 - typed as a tensor otherwise
    if mla is None or mla.get("format") != FORMAT or len(mla.get("layers", ())) != len(layers):
        raise ValueError(
            f"config.json: mla must hold format {FORMAT} and one entry in `layers` for each of {len(layers)} layers, "
            f"got {mla!r:.200}; convert again with this version of mla_convert"
        )
    for layer, entry in zip(layers, mla["layers"], strict=True):
        if entry is not None:  # else the layer was kept as it is
            layer.self_attn = MLAttention(layer.self_attn, LatentShape.parse(entry), row.softcap_of(layer.self_attn))
