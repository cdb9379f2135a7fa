"""The code of the native format as files beside the weights, for users who accept `trust_remote_code=True`.

transformers copies a flat set of modules that import each other relatively. That set is made here from the package's
own modules: each is renamed, and its imports of other modules of the package become relative. Nothing else is changed,
and only torch and transformers are needed to run it.
"""

import importlib.util
import re
from typing import Any

from mla_convert.errors import BadOption
from mla_convert.modeling.configs import PREFIX, config_class
from mla_convert.source.family_table import FAMILIES

CONFIGS, CLASSES = "mla_convert.modeling.configs", "mla_convert.modeling.classes"
# The kernels need compilers and packages that a reader of the folder may not have.
STAND_INS = {"mla_convert.attention.dispatch": "mla_convert.attention.torch_backend"}
IMPORT = re.compile(r"^(\s*from )(mla_convert[\w.]*)(?= import )", re.MULTILINE)
HEADER = "# Part of mla_convert ({module}), SPDX-License-Identifier: Apache-2.0; imports made relative.\n"


def file_stem(module: str) -> str:
    """The name of a module of the package in the flat set: mla_convert.modeling.core -> mla_modeling_core."""
    return PREFIX + module.removeprefix("mla_convert.").replace(".", "_")


def auto_map(family: str) -> dict[str, str]:
    """config.json's `auto_map` for a native folder of `family` that holds `code_files`."""
    return {
        "AutoConfig": f"{file_stem(CONFIGS)}.{config_class(family).__name__}",
        "AutoModelForCausalLM": f"{file_stem(CLASSES)}.MLA{FAMILIES[family].architecture}",
    }


def code_files() -> dict[str, str]:
    """File name -> text of every module that the native classes need."""
    files, waiting = dict[str, str](), [CONFIGS, CLASSES]
    while waiting:
        module = waiting.pop()
        name = f"{file_stem(module)}.py"
        if name not in files:
            text, needed = _made_relative(_source(module))
            files[name] = HEADER.format(module=module) + text
            waiting += needed
    return files


def check_self_contained(native: bool) -> None:
    """Raises BadOption for the stock format."""
    if not native:
        raise BadOption(
            "self_contained: the stock format is a class of transformers and needs no code beside its weights; leave "
            "--self-contained out, or write the native format with --format native"
        )


def code_faults(config: dict[str, Any], family: str, held: dict[str, str]) -> list[str]:
    """What is wrong with the Python files `held` (name -> text) of a native folder and its config's auto_map."""
    wanted = code_files() if config.get("auto_map") is not None else {}
    wrong = [f"{name} is no file that mla_convert writes" for name in sorted(held.keys() - wanted.keys())]
    wrong += [f"{name} missing" for name in sorted(wanted.keys() - held.keys())]
    wrong += [
        f"{name} differs from what this version of mla_convert writes"
        for name in sorted(held.keys() & wanted.keys())
        if held[name] != wanted[name]
    ]
    if wanted and config["auto_map"] != auto_map(family):
        wrong.append(f"auto_map {config['auto_map']!r}, needed {auto_map(family)!r}")
    return wrong


def _source(module: str) -> str:
    spec = importlib.util.find_spec(module)
    assert spec is not None and spec.loader is not None
    text: str = spec.loader.get_source(module)  # type: ignore[attr-defined]
    return text


def _made_relative(text: str) -> tuple[str, list[str]]:
    """The text with relative imports, and the modules of the package that it imports."""
    needed = list[str]()

    def relative(found: re.Match[str]) -> str:
        module = STAND_INS.get(found[2], found[2])
        needed.append(module)
        return f"{found[1]}.{file_stem(module)}"

    return IMPORT.sub(relative, text), needed
