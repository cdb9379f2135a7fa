"""Tensor names of a family's class and of its checkpoints: the same, except for mixtures of experts.

The class holds all experts of a layer in one tensor, checkpoints hold each by itself. They are stacked only where a
layer is run; a conversion copies them one by one.
"""

from collections.abc import Iterable, Mapping

import torch
from torch import Tensor

from mla_convert.source.checkpoint import Checkpoint
from mla_convert.source.family_table import Family


def stored_parts(family: Family, name: str, shape: tuple[int, ...]) -> list[tuple[str, tuple[int, ...]]]:
    """Names and shapes of the checkpoint's tensors that make up the class's tensor `name`, expert by expert."""
    for fused, templates in family.experts.items():
        if name.endswith("." + fused):
            prefix = name.removesuffix(fused)
            rows = shape[1] // len(templates)
            return [
                (prefix + template.format(expert=expert), (rows, *shape[2:]))
                for expert in range(shape[0])
                for template in templates
            ]
    return [(name.replace(*family.renamed) if family.renamed else name, shape)]


def stored_tensors(family: Family, of_class: Mapping[str, Tensor], names: Iterable[str]) -> dict[str, tuple[int, ...]]:
    """Name -> shape of the tensors a checkpoint must hold for a class's state dict; `names` are those it holds.

    A checkpoint may hold any tensor under the class's own name too.
    """
    present, expected = set(names), dict[str, tuple[int, ...]]()
    for name, tensor in of_class.items():
        shape = tuple(tensor.shape)
        expected |= {name: shape} if name in present else dict(stored_parts(family, name, shape))
    return expected


def read_for_class(checkpoint: Checkpoint, family: Family, name: str, shape: tuple[int, ...]) -> Tensor | None:
    """The class's tensor `name` from what the checkpoint holds, in its storage dtype; None where it holds nothing."""
    if name in checkpoint.headers:
        return checkpoint.tensor(name)
    parts = [part for part, _ in stored_parts(family, name, shape)]
    if not all(part in checkpoint.headers for part in parts):
        return None
    tensors = [checkpoint.tensor(part) for part in parts]
    return tensors[0] if len(parts) == 1 and parts[0].count("experts.") == 0 else torch.cat(tensors).view(shape)


def split_for_checkpoint(family: Family, name: str, tensor: Tensor) -> dict[str, Tensor]:
    """The inverse of `read_for_class`: the class's tensor `name` as checkpoints hold it, expert by expert."""
    parts = stored_parts(family, name, tuple(tensor.shape))
    rows = [tensor] if len(parts) == 1 and parts[0][1] == tensor.shape else tensor.flatten(0, 1).split(parts[0][1][0])
    return {part: piece.contiguous() for (part, _), piece in zip(parts, rows, strict=True)}
