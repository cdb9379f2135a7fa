"""From recipe fields to typer parameters, and from parsed flags back to a recipe."""

import dataclasses
import inspect
from typing import Annotated, Any, get_args, get_origin, get_type_hints

import typer

from mla_convert.interface.options import Recipe, merge, read_yaml


def recipe_from_flags(recipe_type: type[Recipe], given: dict[str, Any]) -> Recipe:
    """The recipe of one command line: `--recipe FILE` with the flags over it. Raises BadOption.

    A flag that was not given is None or an empty list, whatever its default: the recipe file decides then.
    """
    path = given.pop("recipe")
    flags = {name: value for name, value in given.items() if value is not None and value != []}
    stride = flags.get("rope_stride")
    if isinstance(stride, str) and stride.isdecimal():
        flags["rope_stride"] = int(stride)
    if path is None:
        return recipe_type.from_mapping(flags, where="the command line")
    return recipe_type.from_mapping(merge(read_yaml(path), flags), where=path)


_METAVARS: dict[Any, str] = {int: "N", float: "X", str: "TEXT", list[str]: "TEXT"}


def parameters_of(recipe_type: type[Recipe]) -> list[inspect.Parameter]:
    """One keyword parameter per recipe field, as typer wants them, and `--recipe`."""
    hints = get_type_hints(recipe_type)
    specs = dataclasses.fields(recipe_type)  # type: ignore[arg-type]  # every subclass is a dataclass
    parameters = [_parameter(spec, _flag_type(hints[spec.name])) for spec in specs]
    recipe_flag = typer.Option("--recipe", metavar="FILE", help="YAML file with any of these options; flags win.")
    parameters.append(_keyword("recipe", Annotated[str | None, recipe_flag]))
    return parameters


def _parameter(spec: "dataclasses.Field[Any]", kind: Any) -> inspect.Parameter:
    meta, dash = spec.metadata, spec.name.replace("_", "-")
    if meta["argument"]:
        info: Any = typer.Argument(metavar=meta["argument"], help=meta["help"], show_default=False)
    else:
        name = f"--{dash}/--no-{dash}" if kind is bool else f"--{dash}"
        metavar = "|".join(meta["choices"]) if meta["choices"] else _METAVARS.get(kind)
        info = typer.Option(name, help=meta["help"] + _shown(spec.default), metavar=metavar, show_default=False)
    return _keyword(spec.name, Annotated[kind | None, info])


def _keyword(name: str, annotation: Any) -> inspect.Parameter:
    return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=annotation)


def _shown(default: Any) -> str:
    # Text, because typer's own default is None for every flag (see recipe_from_flags).
    if default is None or default is False or default in (dataclasses.MISSING, ()):
        return ""
    return f" [default: {default}]"


def _flag_type(hint: Any) -> Any:
    # The type typer parses: the first alternative of a union that is not None; text where a union holds text.
    alternatives = [kind for kind in get_args(hint) or (hint,) if kind is not type(None)]
    if get_origin(hint) is tuple:
        return list[str]
    return str if str in alternatives else alternatives[0]
