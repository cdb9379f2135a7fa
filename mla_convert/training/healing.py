"""Heal: layer by layer, fit the converted layer to the source's, given the inputs it will really see.

For each layer in order the inputs come from the already converted prefix and the targets are the source's states behind
the layer, so errors of earlier layers are made up for. The attention's projections, and with `train=layers` the other
matrices of the layer too, are trained by Muon on

    loss = mean over tokens of |layer(x') - layer_source(x)|^2 / |layer_source(x)|^2

with x the residual stream of the source and x' that of the converted prefix. Memory is one layer and two sets of hidden
states, which go to files when they are large. A layer that does not improve on held-out windows stays as it was.

What was tried and did worse, nats over the source of SmolLM2 whose first eight layers are at 38 + 58, 60 steps: targets
at the attention's output and W_O fixed 0.274, W_O trained 0.265, the prefix's error added to the target 0.260; as here
0.192; a step size of 0.02 instead of 0.01 for the MLPs 0.199; the loss at the attention's output added 0.204; half the
loss weighted by the Fisher information of the states 0.195. Earlier, share of the error left in the first five layers:
Adam 0.30, 0.82, 0.77, 0.86, 0.92, Muon 0.13, 0.63, 0.56, 0.80, 0.84; inputs whitened by C^-1/2 (a few noisy directions
then take steps as large as the strong ones); one second moment of Adam's per matrix or row.
"""

import logging
import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from mla_convert.calibration.stream import LatentAttention, LayerStream
from mla_convert.conversion.factor import roots, slot_sizes
from mla_convert.formats.layer import ConvertedLayer, MLALayer, latent_inputs
from mla_convert.interface.recipe import HealSettings
from mla_convert.source.experts import stored_parts
from mla_convert.source.family_table import FAMILIES, Family
from mla_convert.training.muon import Muon

logger = logging.getLogger(__name__)

TRAINED = ("W_UQ", "W_QR", "W_DKV", "W_KR", "W_UK", "W_UV", "W_O")
REST = 0.5  # share of the step size that the matrices outside the attention take
SMALLER = 0.2  # share of the step size that is tried where it harms
CHECKS = 4  # times the held-out loss is looked at; the best weights win
IN_MEMORY = 1 << 30  # bytes of one set of hidden states above which it lives in a file

Forward = Callable[[nn.Module, Tensor], Tensor]  # a decoder layer and states -> the states behind it


@dataclass(frozen=True, eq=False)
class LayerTask:
    """The residual stream of the converted prefix in front of a layer, and the source's behind it, which is the aim."""

    inputs: Float[Tensor, "windows tokens hidden_size"]
    targets: Float[Tensor, "windows tokens hidden_size"]


@dataclass(frozen=True)
class HealReport:
    """Held-out loss of a layer before and after."""

    before: float
    after: float


def heal_layer(
    block: nn.Module,
    start: MLALayer,
    task: LayerTask,
    settings: HealSettings,
    forward: Forward,
    compute: torch.dtype,
    others: Iterable[str] = (),
    advance: Callable[[int], None] = lambda steps: None,
) -> tuple[MLALayer, HealReport]:
    """Fit `block`, a decoder layer, with `start` (fp64) for its attention, to `task`: the better of before and after.

    `others` are the parameters trained beside the attention; block holds what is returned. Steps are orthogonalised in
    `compute`. Where the asked step size harms, a smaller one is tried: Gemma 3 270M's second global layer gains nothing
    at 0.02.
    """
    healed, report = _fit(block, start, task, settings, forward, compute, others, advance)
    if healed is start:
        settings = replace(settings, lr=SMALLER * settings.lr)
        healed, report = _fit(block, start, task, settings, forward, compute, others)
    return healed, report


def _fit(
    block: nn.Module,
    start: MLALayer,
    task: LayerTask,
    settings: HealSettings,
    forward: Forward,
    compute: torch.dtype,
    others: Iterable[str],
    advance: Callable[[int], None] = lambda steps: None,
) -> tuple[MLALayer, HealReport]:
    """`heal_layer` with one step size; `start` itself where it only harms."""
    device = start.W_DKV.device
    norm = getattr(block, "input_layernorm", nn.Identity())
    unit = with_unit_latent(start, (norm(window.to(device)) for window in task.inputs))
    plain = unit.to(torch.float32)
    rest = {name: block.get_parameter(name) for name in others}
    params: dict[str, Tensor] = {name: _matrix(plain, name).clone() for name in TRAINED} | rest
    params = {name: parameter.requires_grad_() for name, parameter in params.items() if parameter.numel()}
    attention = block.self_attn = LatentAttention(plain)
    training = len(task.inputs) - settings.held_out

    def loss_of(window: int) -> Tensor:
        attention.layer = _with(plain, params)
        out = forward(block, task.inputs[window, None].to(device))
        target = task.targets[window, None].to(device)
        return ((out - target).square().sum(-1) / target.square().sum(-1).clamp_min(1e-30)).mean()

    def judge() -> float:
        with torch.no_grad():
            return sum(loss_of(training + i).item() for i in range(settings.held_out)) / settings.held_out

    share = {name: settings.lr * (REST if name in rest else 1.0) for name in params}
    rates = {name: share[name] * params[name].detach().square().mean().sqrt().item() for name in params}
    optimiser = Muon([{"params": [params[name]], "name": name} for name in params], compute=compute)
    generator = torch.Generator().manual_seed(settings.seed)
    before = best = judge()
    first = kept = {name: parameter.detach().clone() for name, parameter in params.items()}
    order: list[int] = []
    for step in range(settings.steps):
        order = order or torch.randperm(training, generator=generator).tolist()
        for group in optimiser.param_groups:
            group["lr"] = rates[group["name"]] * schedule(step, settings.steps)
        optimiser.zero_grad(set_to_none=True)
        loss_of(order.pop()).backward()
        optimiser.step()
        advance(1)
        if (step + 1) % max(1, settings.steps // CHECKS) == 0 or step + 1 == settings.steps:
            now = judge()
            if now < best:  # a NaN is not
                best, kept = now, {name: parameter.detach().clone() for name, parameter in params.items()}
    for name, parameter in rest.items():
        parameter.requires_grad_(False).copy_(kept[name])
    healed = start if kept is first else _with(unit, kept)
    attention.layer = healed.to(torch.float32)
    return healed, HealReport(before, best)


def _matrix(layer: MLALayer, name: str) -> Tensor:
    """A projection as one matrix for Muon: heads side by side, rows its outputs."""
    tensor: Tensor = getattr(layer, name)
    return tensor.transpose(0, 1).flatten(1) if name == "W_O" else tensor.flatten(0, -2)


def _with(layer: MLALayer, matrices: Mapping[str, Tensor]) -> MLALayer:
    """`layer` with the projections that are in `matrices`, made by `_matrix`, in its own dtype."""
    new: dict[str, Any] = {}
    for name in TRAINED:
        if name in matrices:
            old, matrix = getattr(layer, name), matrices[name].to(layer.W_DKV.dtype)
            new[name] = matrix.unflatten(1, (len(old), -1)).transpose(0, 1) if name == "W_O" else matrix.view(old.shape)
    return replace(layer, **new)


def schedule(step: int, steps: int) -> float:
    """Learning rate factor: linear warm-up over a tenth of the steps, then half a cosine down to 0."""
    return min(1.0, (step + 1) / max(1, steps // 10)) * 0.5 * (1 + math.cos(math.pi * step / steps))


@torch.no_grad()
def with_unit_latent(layer: MLALayer, inputs: Iterable[Float[Tensor, "tokens hidden_size"]]) -> MLALayer:
    """The same layer with a latent of unit covariance and slots of unit size, so that one step size fits all of it.

    `inputs` are those of the attention, window by window, on its device.
    """
    width, tokens = layer.W_DKV.shape[1], 0
    moment = torch.zeros(width, width, dtype=torch.float64, device=layer.W_DKV.device)
    for window in inputs:
        rows = latent_inputs(layer, window)
        moment += (rows.T @ rows).double()
        tokens += len(window)
    moment /= tokens
    root, inverse = roots(layer.W_DKV @ moment @ layer.W_DKV.T, 1e-6)
    size = slot_sizes(((layer.W_KR @ moment) * layer.W_KR).sum(1))[:, None]
    return replace(
        layer,
        W_DKV=inverse @ layer.W_DKV,
        W_UK=layer.W_UK @ root,
        W_UV=layer.W_UV @ root,
        W_KR=layer.W_KR / size,
        W_QR=layer.W_QR * size,
        b_KR=None if layer.b_KR is None else layer.b_KR / size[:, 0],
        b_QR=None if layer.b_QR is None else layer.b_QR * size[:, 0],
    )


def heal_layers(
    stream: LayerStream,
    ids: Int[Tensor, "windows tokens"],
    start: Callable[[int], ConvertedLayer],
    settings: HealSettings,
    folder: Path,
    advance: Callable[[int], None] = lambda steps: None,
) -> Iterator[tuple[ConvertedLayer, HealReport]]:
    """Healed layers in order; `start(i)` is layer i as it was converted (fp64). Large states are kept in `folder`."""
    states = stream.embed(ids)
    source, converted = _stored(folder, "source", states), _stored(folder, "converted", states)
    stream.compute = compute_dtype(stream.device)
    for index in range(stream.spec.num_hidden_layers):
        block, begun = stream.load(index), start(index)
        source.copy_(stream.run(block, source))
        healed, report = begun, HealReport(0.0, 0.0)
        if begun.attention is None:
            advance(settings.steps)
        else:
            names = _beside(block, FAMILIES[stream.spec.family], stream.layer_prefix(index))
            for name, stored in names.items():
                if stored in begun.others:
                    block.get_parameter(name).copy_(begun.others[stored])
            trained = names if settings.train == "layers" else {}
            task = LayerTask(converted, source)
            attention, report = heal_layer(
                block, begun.attention, task, settings, stream.forward, stream.compute, trained, advance
            )
            if attention is not begun.attention:
                others = {stored: block.get_parameter(name) for name, stored in trained.items()}
                healed = ConvertedLayer(attention, {**begun.others, **others})
            logger.info("layer %d: held-out error %.2e -> %.2e of its output", index, report.before, report.after)
        converted.copy_(stream.run(block, converted))
        yield healed, report


def _beside(block: nn.Module, family: Family, prefix: str) -> dict[str, str]:
    """The matrices of a decoder layer outside its attention, name in the class -> name in the checkpoint; none where
    there are experts.
    """
    if family.has_experts:
        return {}
    found = {name: tuple(p.shape) for name, p in block.named_parameters() if p.ndim > 1 and "self_attn." not in name}
    return {name: stored_parts(family, prefix + name, shape)[0][0] for name, shape in found.items()}


def _stored(folder: Path, name: str, like: Tensor) -> Tensor:
    """A copy of `like`, in memory or, when large, in a file of `folder`."""
    if like.nbytes <= IN_MEMORY:
        return like.clone()
    path = str(folder / f"{name}.states")
    return torch.from_file(path, shared=True, size=like.numel(), dtype=like.dtype).view(like.shape).copy_(like)


def compute_dtype(device: torch.device) -> torch.dtype:
    """bfloat16 where its products are fast (5 times float32 on a CPU with AVX512-BF16), else float32."""
    fast = torch.cuda.is_bf16_supported() if device.type == "cuda" else torch.cpu._is_avx512_bf16_supported()
    return torch.bfloat16 if fast else torch.float32
