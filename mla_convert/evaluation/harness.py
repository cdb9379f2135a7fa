"""Runs a suite over models: the parts that are not on disk yet, one model in memory at a time."""

from __future__ import annotations

import contextlib
import logging
import subprocess
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from mla_convert.calibration.texts import bos_policy
from mla_convert.errors import BadOption
from mla_convert.evaluation.lm_harness import check_installed
from mla_convert.evaluation.part_store import PartStore
from mla_convert.evaluation.suite import Suite, read_suite
from mla_convert.evaluation.suite_parts import Bench, Entry, Part, parts_of
from mla_convert.evaluation.suite_texts import read_texts, same_tokens
from mla_convert.interface import report
from mla_convert.interface.recipe import EvalRecipe
from mla_convert.source.attention_shape import read_config
from mla_convert.source.loading import check_models, load_model, load_tokenizer, resolve_device, resolve_dtype

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class ModelResult:
    """Parts of one model by name: "text NAME", "memory", "decode", "retrieval NAME", "greedy", "lm_eval TASK"."""

    label: str
    model: str
    dtype: str
    is_reference: bool
    sha256: str
    parts: dict[str, dict[str, Any]]


@dataclass(frozen=True)
class SuiteResult:
    """All models on the same tokens, and everything needed to repeat them. measured, reused: numbers of parts."""

    suite: dict[str, Any]
    models: tuple[ModelResult, ...]
    texts: tuple[dict[str, Any], ...]
    bos: str
    device: str
    batch_size: int
    measured: int
    reused: int

    def to_json(self) -> dict[str, Any]:
        """Plain JSON values, with commit, versions and machine."""
        from dataclasses import asdict

        return {**asdict(self), "commit": commit(), "environment": report.environment()}


def run_suite(recipe: EvalRecipe) -> SuiteResult:
    """Measure what recipe.suite asks for; writes recipe.json, .html and .markdown where they are named.

    Parts are kept in recipe.parts as they finish, so an interrupted run goes on where it was. Raises BadOption for an
    impossible suite, text or path and for tokenizers that differ, BadCheckpoint when a model cannot be loaded.
    """
    if recipe.suite is None:
        raise BadOption("no suite is named; give suite=FILE, such as eval/suites/standard.yaml")
    report.check_targets(recipe.json, None)
    report.check_targets(recipe.html, None)
    report.check_targets(recipe.markdown, None)
    suite = read_suite(recipe.suite, recipe.text)
    if suite.lm_eval is not None:
        check_installed()
    device = resolve_device(recipe.device)
    resolve_dtype(recipe.dtype)
    first = recipe.reference or recipe.models[0]
    check_models((first, *recipe.models))
    store = PartStore(recipe.parts)
    entries = _entries(recipe, suite, store, first)
    tokenizer = load_tokenizer(first)
    texts = read_texts(suite, tokenizer)
    same_tokens(recipe.models, first, suite, texts)
    longest = int(read_config(first).get("max_position_embeddings") or 2**31)
    if suite.window > longest:
        logger.warning("%s: windows of %d tokens, but max_position_embeddings is %d", first, suite.window, longest)
    bench = Bench(suite, texts, tokenizer, store, entries[0], recipe.batch_size, device, longest)
    models, measured, reused = _run(bench, entries)
    result = SuiteResult(
        suite=suite.to_dict(),
        models=tuple(models),
        texts=tuple({"name": t.name, "sha256": t.sha256, "stride": t.stride} for t in texts),
        bos=bos_policy(tokenizer),
        device=str(device),
        batch_size=recipe.batch_size,
        measured=measured,
        reused=reused,
    )
    _write(recipe, result)
    return result


def _entries(recipe: EvalRecipe, suite: Suite, store: PartStore, first: str) -> list[Entry]:
    """The reference first; a model named twice is measured once; names that are alike keep their folders."""
    paths = list(dict.fromkeys([first, *recipe.models]))
    names = [Path(path).name or path for path in paths]
    labels = [path if names.count(name) > 1 else name for path, name in zip(paths, names, strict=True)]
    entries = [
        Entry(label, path, recipe.dtype, path == first, store.identity(path))
        for label, path in zip(labels, paths, strict=True)
    ]
    if suite.bfloat16 and recipe.dtype != "bfloat16":
        entries.insert(1, Entry(f"{labels[0]} in bfloat16", first, "bfloat16", False, entries[0].identity))
    return entries


def _run(bench: Bench, entries: list[Entry]) -> tuple[list[ModelResult], int, int]:
    wanted = {entry.label: parts_of(bench, entry) for entry in entries}
    missing = {
        label: [part for part in parts if bench.store.load(part.inputs, part.with_tensors) is None]
        for label, parts in wanted.items()
    }
    measured = sum(map(len, missing.values()))
    total = sum(part.tokens for parts in missing.values() for part in parts)
    done = 0
    with report.progress("evaluating", "tokens", total) as advance:
        try:
            for entry in entries:
                for _ in _measured(bench, entry, missing[entry.label], advance):
                    done += 1
        except KeyboardInterrupt:
            logger.warning(
                "interrupted: %d of %d parts are finished and kept in %s; the same command goes on from there",
                done, measured, bench.store.folder,
            )  # fmt: skip
            raise
    models = []
    for entry in entries:
        found = {part.name: bench.store.load(part.inputs) or {} for part in wanted[entry.label]}
        models.append(ModelResult(entry.label, entry.model, entry.dtype, entry.is_reference, entry.identity, found))
    return models, measured, sum(map(len, wanted.values())) - measured


def _measured(bench: Bench, entry: Entry, parts: list[Part], advance: Callable[[int], None]) -> Iterator[str]:
    """Measure and keep `parts` of one model; yields the name of each as it is finished."""
    if not parts:
        return
    logger.info("%s: %d parts", entry.label, len(parts))
    model = load_model(entry.model, resolve_dtype(entry.dtype), bench.device)
    for part in parts:
        logger.debug("%s: %s", entry.label, part.name)
        found, tensors = part.run(model, advance)
        bench.store.save(part.inputs, found, tensors)
        yield part.name
    del model
    if bench.device.type == "cuda":
        torch.cuda.empty_cache()


def commit() -> str | None:
    """Commit of the checkout this package runs from, with "+" where files differ from it; None outside of git."""
    folder = Path(__file__).parent
    with contextlib.suppress(OSError, subprocess.SubprocessError):
        command = ["git", "-C", str(folder), "describe", "--always", "--abbrev=40", "--exclude=*", "--dirty=+"]
        subprocess.run(
            [*command[:3], "ls-files", "--error-unmatch", Path(__file__).name], check=True, capture_output=True
        )
        return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip() or None
    return None


def _write(recipe: EvalRecipe, result: SuiteResult) -> None:
    content = result.to_json()
    if recipe.json is not None:
        report.write_json(content, recipe.json)
    if recipe.html is None and recipe.markdown is None:
        return
    from mla_convert.evaluation.suite_html import html_page
    from mla_convert.evaluation.suite_report import markdown_table

    if recipe.html is not None:
        Path(recipe.html).expanduser().write_text(html_page(content), encoding="utf-8")
    if recipe.markdown is not None:
        Path(recipe.markdown).expanduser().write_text(markdown_table(content), encoding="utf-8")
