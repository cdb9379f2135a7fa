"""Every attention-related config field of every family, flipped: exact or refused, never silently different.

The flip is made in config.json alone, under the same weights, as a user would meet it.
"""

import dataclasses
import functools
import json
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from native import FULL, convert_fp64, distance, fp64_model, logits
from tiny import edit_config, tiny_model
from transformers import AutoConfig

from mla_convert.errors import MlaConvertError
from mla_convert.source.family_table import FAMILIES

IDS = torch.randint(0, 250, (1, 40), generator=torch.Generator().manual_seed(5))
BOUND = 1e-12  # of the largest logit; test_native.py says what is measured
RELATED = re.compile(
    r"att|rope|rotary|sliding|window|layer_types|head|scalar|multiplier|softcap|bias|eps|position|scal|pattern|norm"
)
# Not fields of every class; what they would mean in another class must not be ignored.
FOREIGN: dict[str, Any] = {
    "sliding_window": 8,
    "use_sliding_window": True,
    "attention_bias": True,
    "qk_norm": True,
    "use_qk_norm": True,
    "rope_interleaved": True,
    "partial_rotary_factor": 0.5,
    "attention_multiplier": 0.3,
    "query_pre_attn_scalar": 3,
    "attn_logit_softcapping": 2.0,
    "attention_sinks": True,
    "attention_chunk_size": 8,
    "num_kv_shared_layers": 2,
    "layer_types": ["full_attention", "chunked_attention"] * 2,
    "rope_scaling": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16},
    "rope_theta": 77.0,
    "rope_local_base_freq": 77.0,
    "sliding_window_pattern": 2,
    "is_decoder": False,
    "add_cross_attention": True,
}
ROPES: list[dict[str, Any]] = [
    {"rope_type": "default", "rope_theta": 77.0},
    {"rope_type": "linear", "rope_theta": 5000.0, "factor": 3.0},
    {"rope_type": "dynamic", "rope_theta": 5000.0, "factor": 3.0, "original_max_position_embeddings": 16},
    {"rope_type": "yarn", "rope_theta": 5000.0, "factor": 3.0, "original_max_position_embeddings": 16},
    {
        "rope_type": "yarn",
        "rope_theta": 5000.0,
        "factor": 3.0,
        "attention_factor": 1.7,
        "original_max_position_embeddings": 16,
    },
    {"rope_type": "default", "rope_theta": 5000.0, "partial_rotary_factor": 0.4},
]


def flips(value: Any) -> list[Any]:
    """Other values of the same kind."""
    if isinstance(value, bool):
        return [not value]
    if isinstance(value, int):
        return [value + 2, max(1, value // 2), None]
    if isinstance(value, float):
        return [1.5 * value + 0.1, None]
    if isinstance(value, list):
        return [value[::-1], value[1:] + value[:1], value[:-1], None]
    return [7, True, 0.3] if value is None else []


def cases(family: str, config: dict[str, Any]) -> list[tuple[str, Any]]:
    names = {field.name for field in dataclasses.fields(type(AutoConfig.for_model(family)))} | config.keys()
    related = sorted(
        name for name in names if RELATED.search(name) and name not in ("rope_parameters", "architectures")
    )
    found = [(name, value) for name in related for value in flips(config.get(name))]
    found += [("rope_parameters", rope) for rope in ROPES]
    found += [(name, value) for name, value in FOREIGN.items() if config.get(name) != value]
    return found


def flipped(
    tmp_path: Path, family: str, convert: Callable[[Path, Path], Path]
) -> Iterator[tuple[str, Any, Path, Path | MlaConvertError]]:
    """For every case (name, value) of `family`: the source that has it, and its conversion or the refusal."""
    folder = tiny_model(tmp_path / "source", family, tokenizer=False)
    original = json.loads((folder / "config.json").read_text())
    for number, (name, value) in enumerate(cases(family, original)):
        (folder / "config.json").write_text(json.dumps(original))
        edit_config(folder, **{name: value})
        found: Path | MlaConvertError
        try:
            found = convert(folder, tmp_path / str(number))
        except MlaConvertError as error:
            found = error
        yield name, value, folder, found


@pytest.mark.parametrize("family", FAMILIES)
def test_a_flipped_field_is_exact_or_refused(tmp_path: Path, family: str) -> None:
    exact, refused = set(), set()
    for name, value, folder, out in flipped(tmp_path, family, functools.partial(convert_fp64, **FULL)):
        if isinstance(out, MlaConvertError):
            refused.add(name)
            assert re.search(r"config\.json|tensor|layer", str(out)), (name, value, out)
            continue
        wanted = logits(fp64_model(folder), IDS)
        assert distance(logits(fp64_model(out), IDS), wanted) <= BOUND, (name, value)
        exact.add(name)
    assert "rope_parameters" in exact
    assert {"qk_norm", "attention_chunk_size", "num_kv_shared_layers"} <= refused
