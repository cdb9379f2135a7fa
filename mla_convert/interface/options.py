"""The machinery under the recipes: fields that carry their help and limits, YAML reading, checks, merging.

A field's help text (with its unit), choices and smallest value stand in its metadata: `cli.py` builds the
flags from there and `Recipe` checks values from there.
"""

import dataclasses
import difflib
import re
import types
from collections.abc import Mapping
from dataclasses import MISSING, field
from pathlib import Path
from typing import Any, Self, TypeVar, Union, get_args, get_origin, get_type_hints

import yaml

from mla_convert.errors import BadOption

FLOAT16_REASON = (
    "the latent norm is neutralised by eps domination, whose scaled rows (about 1e-6) underflow in float16; "
    "use bfloat16 or float32"
)
DEVICE_PATTERN = re.compile(r"auto|cpu|cuda(:\d+)?")
# The three ways to say how large the cache is; exactly one is given.
SIZE_GROUPS = (("kv_lora_rank", "qk_rope_head_dim"), ("cache_ratio",), ("lossless",))


def option(
    help: str,
    default: Any = MISSING,
    *,
    choices: tuple[str, ...] | None = None,
    at_least: int | None = None,
    argument: str | None = None,
) -> Any:
    """A dataclass field with its help, choices and smallest value; `argument`: its name when positional."""
    metadata = {"help": help, "choices": choices, "at_least": at_least, "argument": argument}
    return field(default=default, metadata=metadata)


class Recipe:
    """What all recipes share: building from a mapping or a YAML file, checks driven by the field metadata."""

    def __post_init__(self) -> None:
        hints = get_type_hints(type(self))
        for spec in dataclasses.fields(self):  # type: ignore[arg-type]  # every subclass is a dataclass
            value = getattr(self, spec.name)
            if isinstance(value, list):  # YAML and command lines bring lists; tuples keep the recipe hashable
                value = tuple(value)
                object.__setattr__(self, spec.name, value)
            elif isinstance(value, Path):
                value = str(value)
                object.__setattr__(self, spec.name, value)
            _check_type(spec.name, value, hints[spec.name])
            _check_value(spec, value)
        self.validate()

    def validate(self) -> None:
        """Check what one field alone cannot tell and no source is needed for. Raises BadOption."""

    @classmethod
    def from_mapping(cls, options: Mapping[str, Any], where: str = "recipe") -> Self:
        """Build from field names and values. Raises BadOption for unknown, missing or mistyped ones."""
        specs = {spec.name: spec for spec in dataclasses.fields(cls)}  # type: ignore[arg-type]
        for name in options:
            if name not in specs:
                raise BadOption(f"unknown option {name!r} in {where}{_suggest(name, list(specs))}")
        for name, spec in specs.items():
            if spec.default is MISSING and name not in options:
                flag = spec.metadata["argument"] or f"--{name.replace('_', '-')}"
                raise BadOption(f"{name} is missing: give {flag}, or `{name}:` in the recipe file")
        return cls(**options)

    @classmethod
    def load(cls, path: str | Path, **overrides: Any) -> Self:
        """Read a YAML recipe; `overrides` win over the file, and a size among them replaces the file's."""
        return cls.from_mapping(merge(read_yaml(path), overrides), where=str(path))

    def to_dict(self) -> dict[str, Any]:
        """Field names to plain values (tuples become lists), ready for YAML or JSON."""
        values = dataclasses.asdict(self)  # type: ignore[call-overload]
        return {name: list(v) if isinstance(v, tuple) else v for name, v in values.items()}


R = TypeVar("R", bound=Recipe)


def resolve(cls: type[R], recipe: R | None, options: Mapping[str, Any]) -> R:
    """The recipe of a Python call: `recipe`, one built from `options`, or `recipe` with `options` over it."""
    if recipe is None:
        return cls.from_mapping(options, where=cls.__name__)
    if not isinstance(recipe, cls):
        raise BadOption(f"expected a {cls.__name__}, got {type(recipe).__name__}: {recipe!r}")
    return cls.from_mapping(merge(recipe.to_dict(), options), where=cls.__name__) if options else recipe


def read_yaml(path: str | Path) -> dict[str, Any]:
    """A recipe file as a dict. Raises BadOption if unreadable, no YAML, no mapping, or naming a key twice."""
    try:
        text = Path(path).read_text(encoding="utf-8")
        loaded = yaml.load(text, Loader=_UniqueKeys)
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise BadOption(f"cannot read recipe {path}: {' '.join(str(error).split())}") from error
    if not isinstance(loaded, dict):
        raise BadOption(f"recipe {path} holds {type(loaded).__name__}, not option names with values")
    return loaded


def merge(base: Mapping[str, Any], overrides: Mapping[str, Any]) -> dict[str, Any]:
    """`overrides` over `base`; a cache size in `overrides` drops every other way of giving it from `base`."""
    merged = dict(base)
    for group in SIZE_GROUPS:
        if any(overrides.get(name) for name in group):
            for other in SIZE_GROUPS:
                if other != group:
                    for name in other:
                        merged.pop(name, None)
    return {**merged, **overrides}


class _UniqueKeys(yaml.SafeLoader):
    """SafeLoader that refuses a key given twice: YAML would silently keep the last."""

    def construct_mapping(self, node: Any, deep: bool = False) -> dict[Any, Any]:
        seen: set[Any] = set()
        for key_node, _ in node.value:
            key = self.construct_object(key_node, deep=True)
            if not isinstance(key, str):
                raise _at(f"key {key!r} is not a name", key_node)
            if key in seen:
                raise _at(f"key {key!r} is given twice", key_node)
            seen.add(key)
        return dict(super().construct_mapping(node, deep))


def _at(problem: str, node: Any) -> yaml.YAMLError:
    return yaml.constructor.ConstructorError(None, None, problem, node.start_mark)


def _suggest(name: Any, known: list[str]) -> str:
    close = difflib.get_close_matches(str(name).replace("-", "_").lower(), known, n=1, cutoff=0.5)
    return f"; did you mean {close[0]!r}?" if close else f"; known options: {', '.join(known)}"


def _check_type(name: str, value: Any, hint: Any) -> None:
    if not any(_is_a(value, kind) for kind in _alternatives(hint)):
        expected = " or ".join(_TYPE_NAMES[kind] for kind in _alternatives(hint))
        raise BadOption(f"{name} must be {expected}, got {value!r} ({type(value).__name__})")


def _alternatives(hint: Any) -> tuple[Any, ...]:
    return get_args(hint) if get_origin(hint) in (Union, types.UnionType) else (hint,)


_TYPE_NAMES: dict[Any, str] = {
    str: "text", int: "a whole number", float: "a number", bool: "true or false",
    types.NoneType: "null", tuple[str, ...]: "a list of texts",
}  # fmt: skip


def _is_a(value: Any, kind: Any) -> bool:
    if kind is int:
        return isinstance(value, int) and not isinstance(value, bool)
    if kind is float:
        return isinstance(value, int | float) and not isinstance(value, bool)
    if get_origin(kind) is tuple:
        return isinstance(value, tuple) and all(isinstance(item, str) for item in value)
    return isinstance(value, kind)


def _check_value(spec: "dataclasses.Field[Any]", value: Any) -> None:
    choices, at_least = spec.metadata["choices"], spec.metadata["at_least"]
    if spec.name == "dtype" and value in ("float16", "fp16", "half"):
        raise BadOption(f"dtype={value} is refused: {FLOAT16_REASON}")
    if choices is not None and value not in choices:
        close = difflib.get_close_matches(str(value), choices, n=1)
        hint = f"; did you mean {close[0]!r}?" if close else ""
        raise BadOption(f"unknown {spec.name} {value!r}: use one of {', '.join(choices)}{hint}")
    if at_least is not None and isinstance(value, int) and value < at_least:
        raise BadOption(f"{spec.name}={value} is too small: use {at_least} or more")
    if spec.name == "device" and not DEVICE_PATTERN.fullmatch(value):
        raise BadOption(f"unknown device {value!r}: use auto, cpu, cuda or cuda:N")
    if spec.name == "rope_stride" and isinstance(value, str) and value != "auto":
        raise BadOption(f"rope_stride={value!r} must be auto or a whole number of 1 or more")
    if spec.metadata["argument"] and (value == "" or (isinstance(value, tuple) and "" in value)):
        raise BadOption(f"{spec.name} is empty text: give a path or a hub id")
