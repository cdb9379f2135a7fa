"""Config and model classes of the native format: a family's own, with latent attention in its layers.

For the family `qwen3` they are MLAQwen3Config (model_type "mla_qwen3", one more field `mla`) and MLAQwen3ForCausalLM.
They are made on first use from the family table and registered with AutoConfig and AutoModelForCausalLM, so
from_pretrained of a native folder needs `import mla_convert` and no remote code. Embeddings, norms, MLPs, experts,
masks, rotary tables and heads stay transformers' own.
"""

import sys
from typing import Any

from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, PretrainedConfig
from transformers.conversion_mapping import get_checkpoint_conversion_mapping, register_checkpoint_conversion_mapping
from transformers.models.auto import tokenization_auto
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING

from mla_convert.family_table import FAMILIES, Family
from mla_convert.modeling.attention import LatentShape, MLAttention

PREFIX = "mla_"
FORMAT = 1  # of the field `mla`


def native_name(family: str) -> str:
    """The model_type of the native format of `family`."""
    return PREFIX + family


def register() -> None:
    """Make and register the classes of every family; done once."""
    for name in FAMILIES:
        native_classes(name)


def native_classes(family: str) -> tuple[type[PretrainedConfig], type[Any]]:
    """Config class and causal language model class of the native format of `family`, registered."""
    here = sys.modules[__name__]
    source_config: Any = type(AutoConfig.for_model(family))
    source_model: Any = MODEL_FOR_CAUSAL_LM_MAPPING[source_config]
    names = (f"MLA{source_config.__name__}", f"MLA{source_model.__name__}")
    if not hasattr(here, names[1]):
        config_class = _config_class(names[0], family, source_config)
        model_class = _model_class(names[1], family, config_class, source_model)
        for name, made in zip(names, (config_class, model_class), strict=True):
            setattr(here, name, made)  # so that instances can be pickled by name
        AutoConfig.register(native_name(family), config_class)
        AutoModelForCausalLM.register(config_class, model_class)
        _share_tokenizer(family)
        conversion = get_checkpoint_conversion_mapping(family)  # of the tensors of experts
        if conversion is not None:
            register_checkpoint_conversion_mapping(native_name(family), conversion)
    return getattr(here, names[0]), getattr(here, names[1])


def _share_tokenizer(family: str) -> None:
    """Let AutoTokenizer, which looks at the model_type, choose the class it chooses for the source."""
    native = native_name(family)
    if family in tokenization_auto.TOKENIZER_MAPPING_NAMES:
        tokenization_auto.TOKENIZER_MAPPING_NAMES[native] = tokenization_auto.TOKENIZER_MAPPING_NAMES[family]
    wrong_on_hub: Any = getattr(tokenization_auto, "MODELS_WITH_INCORRECT_HUB_TOKENIZER_CLASS", None)
    if wrong_on_hub is not None and family in wrong_on_hub:
        wrong_on_hub.add(native)


def _config_class(name: str, family: str, source: Any) -> Any:
    return type(
        name,
        (source,),
        {
            "__module__": __name__,
            "__doc__": f"{source.__name__} and `mla`, the sizes of the latent attention of every layer.",
            "__annotations__": {"mla": "dict | None"},
            "mla": None,
            "model_type": native_name(family),
            "base_model_tp_plan": None,  # the source's plan names projections that mean something else here
            "base_model_pp_plan": None,
        },
    )


def _model_class(name: str, family: str, config_class: Any, source: Any) -> Any:
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
            "__annotations__": {"config": config_class},
            "__init__": __init__,
            "config_class": config_class,
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
