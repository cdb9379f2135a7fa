"""Config classes of the native format, and how transformers' auto classes come to know it."""

import sys
from collections.abc import Callable, Mapping
from typing import Any

from mla_convert.source.family_table import FAMILIES

PREFIX = "mla_"
FORMAT = 1  # of the field `mla`


def native_name(family: str) -> str:
    """The model_type of the native format of `family`."""
    return PREFIX + family


class ClassesOnDemand(dict[Any, Any]):
    """Extra content of one of transformers' auto mappings, whose classes are made when they are looked up.

    Making them at once would import every family, in the middle of transformers' own imports.
    """

    def __init__(self, make: Callable[[Any], Any], known: Mapping[Any, Any]):
        super().__init__(known)
        self.make = make  # of a key: the class, or None for a key of others

    def __contains__(self, key: object) -> bool:
        if super().__contains__(key):
            return True
        made = self.make(key)
        if made is not None:
            self[key] = made
        return made is not None


def config_class(family: str) -> Any:
    """MLA<Family>Config: the family's config class with one more field, `mla`; made on first use."""
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    here, source = sys.modules[__name__], CONFIG_MAPPING[family]
    name = f"MLA{source.__name__}"
    if name not in vars(here):
        made: Any = type(
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
        setattr(here, name, made)  # so that instances can be pickled by name
    return getattr(here, name)


def __getattr__(name: str) -> Any:
    """The config class of that name; where the code lies beside the weights, config.json's auto_map asks for it."""
    from transformers.models.auto import configuration_auto

    names: Any = vars(configuration_auto)["CONFIG_MAPPING_NAMES"]
    for family in FAMILIES:
        if name == f"MLA{names[family]}":
            return config_class(family)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def register_configs() -> None:
    """Make AutoConfig know the native format of every family."""
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    def make(key: Any) -> Any:
        family = key.removeprefix(PREFIX) if isinstance(key, str) and key.startswith(PREFIX) else ""
        return config_class(family) if family in FAMILIES else None

    CONFIG_MAPPING._extra_content = ClassesOnDemand(make, CONFIG_MAPPING._extra_content)


def register_models() -> None:
    """Make AutoModelForCausalLM know the native format of every family."""
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING

    def make(key: Any) -> Any:
        if getattr(key, "__module__", None) != __name__:
            return None
        from mla_convert.modeling.classes import native_classes

        return native_classes(key.model_type.removeprefix(PREFIX))[1]

    MODEL_FOR_CAUSAL_LM_MAPPING._extra_content = ClassesOnDemand(make, MODEL_FOR_CAUSAL_LM_MAPPING._extra_content)


def share_tokenizers() -> None:
    """Let AutoTokenizer, which looks at the model_type, choose the class it chooses for the source."""
    from transformers.models.auto import tokenization_auto

    names: Any = tokenization_auto.TOKENIZER_MAPPING_NAMES
    wrong_on_hub: Any = getattr(tokenization_auto, "MODELS_WITH_INCORRECT_HUB_TOKENIZER_CLASS", set())
    for family in FAMILIES:
        if family in names:
            names[native_name(family)] = names[family]
        if family in wrong_on_hub:
            wrong_on_hub.add(native_name(family))
