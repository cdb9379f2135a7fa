"""The parts of a suite for one model: what each depends on, how many tokens it runs, and how it is measured."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import cache
from importlib import metadata, resources
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

import mla_convert
from mla_convert.calibration.texts import BOS_EVERY_WINDOW, bos_policy
from mla_convert.evaluation import retrieval
from mla_convert.evaluation.compare import figures
from mla_convert.evaluation.decode_path import decode_figures
from mla_convert.evaluation.evaluate import cache_bytes, cache_bytes_per_token
from mla_convert.evaluation.part_store import PartStore
from mla_convert.evaluation.scoring import Head, head, hidden_states, score
from mla_convert.evaluation.suite import ABSORBED_WAYS, HarnessSpec, Suite
from mla_convert.evaluation.suite_texts import Text
from mla_convert.interface.measure import Stage, stage
from mla_convert.source.attention_shape import read_config

Advance = Callable[[int], None]
Tensors = dict[str, torch.Tensor] | None
MEASURED_BY = (
    "evaluation.scoring",
    "evaluation.compare",
    "evaluation.retrieval",
    "evaluation.decode_path",
    "evaluation.suite_texts",
    "evaluation.suite_parts",
    "evaluation.evaluate",
    "calibration.texts",
    "decoding.absorb_model",
    "decoding.quantised_cache",
)


@dataclass(frozen=True, eq=False)
class Entry:
    """One model of an evaluation. identity: sha256 of its files."""

    label: str
    model: str
    dtype: str
    is_reference: bool
    identity: str


@dataclass(frozen=True, eq=False)
class Part:
    """One measurement of one model. inputs: everything it depends on; tokens: forward passes, for the progress bar."""

    name: str
    inputs: dict[str, Any]
    tokens: int
    with_tensors: bool
    run: Callable[[PreTrainedModel, Advance], tuple[dict[str, Any], Tensors]]


@dataclass(frozen=True, eq=False)
class Bench:
    """What all parts share. filler: int64 [tokens], plain text of the first text for retrieval."""

    suite: Suite
    texts: list[Text]
    tokenizer: PreTrainedTokenizerBase
    store: PartStore
    reference: Entry
    batch_size: int
    device: torch.device
    longest: int  # tokens the reference was made for

    @property
    def filler(self) -> torch.Tensor:
        """Ids of the first text without its BOS tokens."""
        ids = self.texts[0].windows.ids
        return (ids[:, 1:] if bos_policy(self.tokenizer) == BOS_EVERY_WINDOW else ids).flatten()


def parts_of(bench: Bench, entry: Entry) -> list[Part]:
    """Every part the suite asks for, in the order they are measured."""
    suite = bench.suite
    parts = [_text_part(bench, entry, text) for text in bench.texts]
    parts.append(_memory_part(bench, entry))
    if suite.decode is not None:
        parts.append(_decode_part(bench, entry))
    parts += [_retrieval_part(bench, entry, name) for name in suite.retrieval]
    if suite.greedy is not None:
        parts.append(_greedy_part(bench, entry))
    if suite.lm_eval is not None:
        parts += [_harness_part(bench, entry, suite.lm_eval, task) for task in suite.lm_eval.tasks]
    return parts


@cache
def _code() -> str:
    # a part measured by other code is another part
    digest = hashlib.sha256()
    for name in MEASURED_BY:
        digest.update(resources.files("mla_convert").joinpath(f"{name.replace('.', '/')}.py").read_bytes())
    return digest.hexdigest()[:16]


def _inputs(bench: Bench, entry: Entry, part: str, **more: Any) -> dict[str, Any]:
    return {
        "part": part,
        "model": entry.identity,
        "dtype": entry.dtype,
        "device": bench.device.type,
        "batch_size": bench.batch_size,
        "code": f"{mla_convert.__version__} {_code()}",
        "versions": {name: metadata.version(name) for name in ("torch", "transformers")},
        **more,
    }


def _text_part(bench: Bench, entry: Entry, text: Text) -> Part:
    suite = bench.suite
    common = {"text": text.ids_sha256, "documents": text.sha256, "bootstrap": asdict(suite.bootstrap)}
    reference = _inputs(bench, bench.reference, f"text-{text.name}", **common, reference=None)
    own = reference if entry.is_reference else _inputs(bench, entry, f"text-{text.name}", **common, reference=reference)

    def run(model: PreTrainedModel, advance: Advance) -> tuple[dict[str, Any], Tensors]:
        linear, hidden = head(model), hidden_states(model, text.windows, bench.batch_size, advance)
        beside = (linear, hidden)
        if not entry.is_reference:
            kept = bench.store.tensors(reference)
            beside = (_linear(kept, model.device), kept["hidden"])
        tokens = score(linear, hidden, text.windows.targets, beside)
        found = figures(tokens, text.windows, text.byte_lengths, suite.bootstrap.samples, suite.bootstrap.confidence)
        return found, _kept(linear, hidden) if entry.is_reference else None

    return Part(f"text {text.name}", own, int(text.windows.mask.sum()), entry.is_reference, run)


def _kept(linear: Head, hidden: torch.Tensor) -> dict[str, torch.Tensor]:
    after = torch.tensor([linear.scale, linear.softcap or math.inf], dtype=torch.float64)
    tensors = {"hidden": hidden, "weight": linear.weight.detach().cpu(), "after": after}
    return tensors if linear.bias is None else tensors | {"bias": linear.bias.detach().cpu()}


def _linear(kept: dict[str, torch.Tensor], device: torch.device) -> Head:
    scale, softcap = kept["after"].tolist() if "after" in kept else (1.0, math.inf)
    bias = kept["bias"].to(device) if "bias" in kept else None
    return Head(kept["weight"].to(device), bias, scale, softcap if math.isfinite(softcap) else None)


def _memory_part(bench: Bench, entry: Entry) -> Part:
    windows = bench.texts[0].windows

    def run(model: PreTrainedModel, advance: Advance) -> tuple[dict[str, Any], Tensors]:
        formula, measured = cache_bytes_per_token(model)
        window = windows.ids.shape[1]
        on_gpu = model.device.type == "cuda"
        if on_gpu:
            torch.cuda.reset_peak_memory_stats(model.device)
        taken: list[Stage] = []
        with stage(f"{entry.label}: memory", taken):  # forgets what earlier models needed, where the system can
            held = cache_bytes(model, window)
        advance(window)
        peak = torch.cuda.max_memory_allocated(model.device) if on_gpu else taken[0].peak_rss
        return {
            "cache_formula": formula,
            "cache_measured": measured,
            "held": held,
            "held_tokens": window,
            "parameters": sum(parameter.numel() for parameter in model.parameters()),
            "peak": peak,
            "peak_of": "GPU allocator" if on_gpu else "process",
        }, None

    return Part(
        "memory", _inputs(bench, entry, "memory", window=windows.ids.shape[1]), windows.ids.shape[1], False, run
    )


def _decode_part(bench: Bench, entry: Entry) -> Part:
    spec, text = bench.suite.decode, bench.texts[0]
    assert spec is not None
    ids = text.windows.ids[: spec.windows, : spec.tokens]

    def run(model: PreTrainedModel, advance: Advance) -> tuple[dict[str, Any], Tensors]:
        return {**decode_figures(model, ids, advance), "text": text.name}, None

    inputs = _inputs(bench, entry, "decode", text=text.ids_sha256, spec=asdict(spec))
    paths = 1 + (len(ABSORBED_WAYS) if read_config(entry.model).get("kv_lora_rank") else 0)
    return Part("decode", inputs, paths * (ids.numel() - len(ids)), False, run)


def _retrieval_part(bench: Bench, entry: Entry, name: str) -> Part:
    spec = bench.suite.retrieval[name]
    found, short = retrieval.probes(bench.tokenizer, bench.filler, spec)
    fitting = [probe for probe in found if probe.length <= bench.longest]
    left_out = sorted({probe.length for probe in found if probe.length > bench.longest} | set(short))

    def run(model: PreTrainedModel, advance: Advance) -> tuple[dict[str, Any], Tensors]:
        rows = retrieval.retrieve(model, fitting, bench.batch_size, advance)
        probes = sum(row["probes"] for row in rows)
        right = sum(row["right"] * row["probes"] for row in rows) / probes if probes else None
        return {"keys": spec.keys, "right": right, "probes": probes, "rows": rows, "left_out": left_out}, None

    inputs = _inputs(
        bench,
        entry,
        f"retrieval-{name}",
        spec=asdict(spec) | {"longest": bench.longest},
        text=bench.texts[0].ids_sha256,
    )
    return Part(f"retrieval {name}", inputs, sum(len(probe.ids) for probe in fitting), False, run)


def _greedy_part(bench: Bench, entry: Entry) -> Part:
    spec, text = bench.suite.greedy, bench.texts[0]
    assert spec is not None
    prompts = text.windows.ids[: spec.prompts, : spec.prompt_tokens]
    common = {"text": text.ids_sha256, "spec": asdict(spec)}
    reference = _inputs(bench, bench.reference, "greedy", **common, reference=None)
    own = reference if entry.is_reference else _inputs(bench, entry, "greedy", **common, reference=reference)

    def run(model: PreTrainedModel, advance: Advance) -> tuple[dict[str, Any], Tensors]:
        continued = retrieval.greedy(model, prompts, spec.new_tokens, advance)
        other = continued if entry.is_reference else bench.store.tensors(reference)["continued"]
        shown = bench.tokenizer.decode(continued[0], skip_special_tokens=True)
        found = {**retrieval.agreement_of(other, continued), "prompts": len(prompts), "example": shown}
        return found, {"continued": continued} if entry.is_reference else None

    return Part("greedy", own, len(prompts) * spec.new_tokens, entry.is_reference, run)


def _harness_part(bench: Bench, entry: Entry, spec: HarnessSpec, task: str) -> Part:
    files = sorted(Path(spec.include).rglob("*")) if spec.include else []
    digest = hashlib.sha256(b"".join(file.read_bytes() for file in files if file.is_file())).hexdigest()

    def run(model: PreTrainedModel, advance: Advance) -> tuple[dict[str, Any], Tensors]:
        from mla_convert.evaluation.lm_harness import harness_figures

        return harness_figures(model, bench.tokenizer, task, spec, bench.batch_size), None

    common = {"task": task, "limit": spec.limit, "shots": spec.shots, "files": digest}
    inputs = _inputs(bench, entry, f"lm_eval-{task.replace('/', '_')}", **common)
    return Part(f"lm_eval {task}", inputs, 0, False, run)
