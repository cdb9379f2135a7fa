"""Choose among the sizes a recipe leaves open: by predicted loss, then by loss on held-out windows."""

import logging
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from mla_convert.calibration.stream import LatentAttention, LayerStream
from mla_convert.conversion.assemble import LayerReport
from mla_convert.conversion.sizes import Size
from mla_convert.formats.layer import MLALayer
from mla_convert.interface.report import progress

logger = logging.getLogger(__name__)

# The predicted order is right to within a few places (see conversion.json of any --cache-ratio run).
FINALISTS = 3

Assembled = Callable[[int, Size, int], tuple[MLALayer | None, LayerReport]]


def choose(
    sizes: list[Size], stream: LayerStream, held_out: Tensor, assembled: Assembled
) -> tuple[Size, list[dict[str, Any]]]:
    """The size with the least loss on `held_out` [windows, tokens] among the best predicted; all considered.

    `assembled(layer, size, sweeps)` converts one layer (None: it is kept). Without held-out windows the prediction
    decides.
    """
    layers = stream.spec.num_hidden_layers
    with progress("predicting", "layers", layers * len(sizes)) as advance:
        predicted = []
        for size in sizes:
            total = 0.0
            for layer in range(layers):
                total += assembled(layer, size, 0)[1].total
                advance(1)
            predicted.append(total)
    order = sorted(range(len(sizes)), key=predicted.__getitem__)
    considered = [{"size": str(sizes[i]), "predicted": predicted[i]} for i in order]
    if not held_out.numel():
        return sizes[order[0]], considered
    finalists, measured = order[:FINALISTS], list[float]()
    with progress("measuring", "layers", layers * len(finalists)) as advance:
        for place, i in enumerate(finalists):
            nll = converted_nll(stream, held_out, sizes[i], assembled, advance)
            considered[place]["held_out_nll"] = nll
            measured.append(nll)
            logger.info("%s: predicted %.4g, held-out %.4f nats/token", sizes[i], predicted[i], nll)
    best = min(range(len(finalists)), key=measured.__getitem__)
    return sizes[finalists[best]], considered


@torch.no_grad()
def converted_nll(
    stream: LayerStream, ids: Tensor, size: Size, assembled: Assembled, advance: Callable[[int], None]
) -> float:
    """Nats per token, on windows `ids`, of the model whose attention is converted to `size`."""
    states = stream.embed(ids)
    for index in range(stream.spec.num_hidden_layers):
        layer = stream.load(index)
        converted, _ = assembled(index, size, 1)
        if converted is not None:
            layer.self_attn = LatentAttention(converted.to(torch.float32))
        states = stream.run(layer, states)
        advance(1)
    return stream.nll(states, ids)
