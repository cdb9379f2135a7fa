"""Suites: which texts, windows and tasks an evaluation consists of, read from YAML and checked."""

from __future__ import annotations

import dataclasses
import hashlib
import sysconfig
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from mla_convert.errors import BadOption
from mla_convert.interface.options import _suggest, read_yaml

PYTHON_TEXTS = ("topics", "stdlib")
STDLIB_EVERY = 8  # every so many files of the standard library, by hash of their names


# How a model that `absorb` takes is also decoded: name -> dtype of a quantised cache, None: the plain one.
ABSORBED_WAYS = {"absorbed": None, "int8": "int8", "fp8": "fp8"}


@dataclass(frozen=True)
class TextSpec:
    """One text: of every Python installation (`python`: topics or stdlib) or a file or data set (`data`); chat: told
    as conversations in the model's chat template.
    """

    python: str | None = None
    data: str | None = None
    chat: bool = False


@dataclass(frozen=True)
class DecodeSpec:
    """Perplexity token by token through the cache: of `windows` windows, the first `tokens` tokens of each."""

    windows: int = 1
    tokens: int = 256


@dataclass(frozen=True)
class RetrievalSpec:
    """`keys` numbers hidden in text of `lengths` tokens, one asked for, at `depths`, `trials` times each."""

    keys: int
    lengths: tuple[int, ...]
    depths: tuple[float, ...]
    trials: int = 1


@dataclass(frozen=True)
class GreedySpec:
    """Greedy continuations of `new_tokens` tokens of `prompts` prompts of `prompt_tokens` tokens of the first text."""

    prompts: int
    prompt_tokens: int
    new_tokens: int


@dataclass(frozen=True)
class HarnessSpec:
    """Tasks of lm-evaluation-harness: names, a folder of task files, examples per task (None: all), shots
    (None: the task's own)."""

    tasks: tuple[str, ...]
    include: str | None = None
    limit: int | None = None
    shots: int | None = None


@dataclass(frozen=True)
class BootstrapSpec:
    """Confidence intervals: resamples of the windows, and what share of them the interval holds."""

    samples: int = 2000
    confidence: float = 0.95


@dataclass(frozen=True)
class Suite:
    """Everything one evaluation measures. Parts left out of the file are not measured.

    window, stride: tokens; stride None: no overlap. windows: of each text. bfloat16: also the first model in bfloat16,
    as the yardstick of what rounding alone does.
    """

    name: str
    window: int
    windows: int
    texts: Mapping[str, TextSpec]
    stride: int | None = None
    decode: DecodeSpec | None = None
    retrieval: Mapping[str, RetrievalSpec] = field(default_factory=dict)
    greedy: GreedySpec | None = None
    lm_eval: HarnessSpec | None = None
    bfloat16: bool = False
    bootstrap: BootstrapSpec = BootstrapSpec()

    def to_dict(self) -> dict[str, Any]:
        """Plain values."""
        return {**dataclasses.asdict(self), "texts": {n: dataclasses.asdict(t) for n, t in self.texts.items()}}


def read_suite(path: str, extra_texts: tuple[str, ...] = ()) -> Suite:
    """The suite in YAML file `path` with the texts of `--text NAME=FILE` added. Raises BadOption naming the key."""
    content = {name: value for name, value in read_yaml(path).items() if value is not None}
    for entry in extra_texts:
        name, equals, data = entry.partition("=")
        if not equals or not name or not data:
            raise BadOption(f"text={entry!r} is not NAME=FILE; write for example --text prose=book.txt")
        content.setdefault("texts", {})
        if isinstance(content["texts"], dict):
            content["texts"] = {**content["texts"], name: {"data": data}}
    texts = {name: _build(TextSpec, spec, f"{path}: texts.{name}") for name, spec in _table(content, "texts", path)}
    tasks = {n: _build(RetrievalSpec, spec, f"{path}: retrieval.{n}") for n, spec in _table(content, "retrieval", path)}
    parts: dict[str, type[Any]] = {
        "decode": DecodeSpec,
        "greedy": GreedySpec,
        "lm_eval": HarnessSpec,
        "bootstrap": BootstrapSpec,
    }
    built = {name: _build(kind, content[name], f"{path}: {name}") for name, kind in parts.items() if name in content}
    suite = _build(Suite, {**content, "texts": texts, "retrieval": tasks, **built}, path)
    _check(suite, path)
    return suite


T = TypeVar("T")


def _build(kind: type[T], values: Any, where: str) -> T:
    if not isinstance(values, dict):
        raise BadOption(f"{where} holds {values!r}, not names with values")
    specs = {spec.name: spec for spec in dataclasses.fields(kind)}  # type: ignore[arg-type]  # all are dataclasses
    for name in values:
        if name not in specs:
            raise BadOption(f"unknown key {name!r} in {where}{_suggest(name, list(specs))}")
    for name, spec in specs.items():
        missing = spec.default is dataclasses.MISSING and spec.default_factory is dataclasses.MISSING
        if missing and name not in values:
            raise BadOption(f"{where} lacks {name}")
    cleaned = {name: tuple(value) if isinstance(value, list) else value for name, value in values.items()}
    for name, value in cleaned.items():
        _check_kind(str(specs[name].type), value, f"{where}.{name}" if ":" in where else f"{where}: {name}")
    return kind(**cleaned)


def _check_kind(declared: str, value: Any, where: str) -> None:
    """Whole numbers are 1 or more everywhere but for `shots`; lists hold what their field says."""
    options = [part.strip() for part in declared.split("|")]
    if value is None and "None" in options:
        return
    first = options[0]
    if first == "int" and (
        not isinstance(value, int) or isinstance(value, bool) or value < (0 if where.endswith("shots") else 1)
    ):
        raise BadOption(f"{where}={value!r} must be a whole number of 1 or more")
    if first == "float" and (not isinstance(value, float) or not 0 < value < 1):
        raise BadOption(f"{where}={value!r} must be a number between 0 and 1, such as 0.95")
    if first == "bool" and not isinstance(value, bool):
        raise BadOption(f"{where}={value!r} must be true or false")
    if first == "str" and (not isinstance(value, str) or not value):
        raise BadOption(f"{where}={value!r} must be text")
    if first.startswith("tuple"):
        if not isinstance(value, tuple) or not value:
            raise BadOption(f"{where}={value!r} must be a list with at least one entry")
        kinds: dict[str, Any] = {"tuple[int": int, "tuple[float": (int, float), "tuple[str": str}
        inner = kinds[first.split(",")[0]]
        for entry in value:
            if not isinstance(entry, inner) or isinstance(entry, bool) or (inner is int and entry < 1):
                raise BadOption(f"{where}: {entry!r} is not what belongs there ({first})")


def _table(content: Mapping[str, Any], key: str, path: str) -> list[tuple[str, Any]]:
    table = content.get(key) or {}
    if not isinstance(table, dict):
        raise BadOption(f"{path}: {key} holds {table!r}, not names with values")
    return list(table.items())


def _check(suite: Suite, path: str) -> None:
    if not suite.texts:
        raise BadOption(f"{path} names no text: add one under texts, or with --text NAME=FILE")
    for name, text in suite.texts.items():
        if (text.python is None) == (text.data is None):
            raise BadOption(f"{path}: texts.{name} needs exactly one of python ({', '.join(PYTHON_TEXTS)}) and data")
        if text.python is not None and text.python not in PYTHON_TEXTS:
            raise BadOption(f"{path}: texts.{name}.python={text.python!r}: use one of {', '.join(PYTHON_TEXTS)}")
    if suite.stride is not None and suite.stride > suite.window:
        raise BadOption(f"{path}: stride={suite.stride} exceeds window={suite.window}: tokens would go unscored")
    for name, task in suite.retrieval.items():
        bad = [depth for depth in task.depths if not 0 <= depth <= 1]
        if bad:
            raise BadOption(f"{path}: retrieval.{name}: depth {bad[0]} is outside 0..1 (start and end of the text)")
    if suite.greedy is not None and suite.greedy.prompt_tokens > suite.window:
        raise BadOption(
            f"{path}: greedy.prompt_tokens={suite.greedy.prompt_tokens} exceeds window={suite.window}; prompts are "
            "beginnings of windows"
        )
    if suite.decode is not None and not 2 <= suite.decode.tokens <= suite.window:
        raise BadOption(f"{path}: decode.tokens={suite.decode.tokens} must be 2 to window={suite.window}")


def documents_of(spec: TextSpec) -> list[str]:
    """The documents of a text. Raises BadOption when a file or data set cannot be read."""
    from mla_convert.calibration.texts import read_documents

    if spec.data is not None:
        return read_documents((spec.data,))
    return read_documents((), part="eval") if spec.python == "topics" else stdlib_documents()


def stdlib_documents() -> list[str]:
    """Source files of the running Python's standard library: every eighth of its top level, by hash of the name."""
    folder = Path(sysconfig.get_path("stdlib"))
    files = sorted(folder.glob("*.py"), key=lambda path: hashlib.sha256(path.name.encode()).hexdigest())
    chosen = [path for path in files[::STDLIB_EVERY] if not path.name.startswith("_")]
    documents = [path.read_text(encoding="utf-8", errors="ignore") for path in chosen]
    if not documents:
        raise BadOption(f"no source files of the standard library in {folder}; name code with --text code=FILE")
    return documents
