"""Which layers stay as they are: --keep-layers, and what a family keeps by default."""

import re

from mla_convert.errors import BadOption
from mla_convert.source.families import SourceSpec
from mla_convert.source.family_table import FAMILIES

RANGE = re.compile(r"(\d+)(?:-(\d+))?")


def kept_layers(keep: str, spec: SourceSpec) -> frozenset[int]:
    """Indices of the layers that are not converted.

    keep: "auto" (what the family table says: Gemma's local layers), "none", "sliding" (every layer with a window, as
    its cache is bounded), or indices from 0 such as "0,5-7". Raises BadOption for layers that do not exist, and where
    no layer is left to convert.
    """
    layers = spec.num_hidden_layers
    wish = (FAMILIES[spec.family].keep or "none") if keep == "auto" else keep
    if wish == "none":
        return frozenset()
    if wish == "sliding":
        kept = frozenset(i for i, facts in enumerate(spec.layers) if facts.window is not None)
        if not kept and keep != "auto":
            raise BadOption("keep_layers=sliding: no layer of this source has a sliding window; leave it out")
    else:
        kept = _indices(keep, layers)
    if len(kept) == layers:
        raise BadOption(
            f"keep_layers={keep}: all {layers} layers are kept, so nothing is converted; use --keep-layers none to "
            "convert layers with windows too, or name fewer"
        )
    return kept


def _indices(text: str, layers: int) -> frozenset[int]:
    found: set[int] = set()
    for part in text.split(","):
        match = RANGE.fullmatch(part.strip())
        first, last = (int(match[1]), int(match[2] or match[1])) if match else (1, 0)
        if not first <= last < layers:
            raise BadOption(
                f"keep_layers={text!r}: {part.strip()!r} names no layers of 0 to {layers - 1}; write auto, none, "
                "sliding, or for example 0,5-7"
            )
        found |= set(range(first, last + 1))
    return frozenset(found)
