"""Heal: layer by layer, fit the converted attention to the source's, given the inputs it will really see.

For each layer in order the inputs come from the already converted prefix and the targets are the source's attention
outputs, so errors of earlier layers are compensated. All projections but W_O are trained by Adam on

    loss = mean over tokens of |attention(h') - target|^2 / |x|^2,      x: the source's residual stream there.

Only attention is trained, one layer at a time: memory is one layer and four sets of hidden states (source, converted,
inputs, targets), which go to files when they are large. A layer that does not improve on held-out windows stays as it
was. What was tried and did worse: Adam (60 steps on SmolLM2 at 70 + 58 leave the first five layers 0.30, 0.82, 0.77,
0.86 and 0.92 of their error, Muon 0.13, 0.63, 0.56, 0.80 and 0.84), inputs whitened by C^-1/2 (a few noisy directions
then take steps as large as the strong ones), and one second moment of Adam's per matrix or row.
"""

import logging
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from mla_convert.factor import roots, slot_sizes
from mla_convert.family_table import FAMILIES
from mla_convert.layer import MLALayer, attend_expanded, latent_inputs, rotation_table
from mla_convert.muon import Muon
from mla_convert.recipe import HealSettings
from mla_convert.stream import LatentAttention, LayerStream

logger = logging.getLogger(__name__)

TRAINED = ("W_UQ", "W_QR", "W_DKV", "W_KR", "W_UK", "W_UV")
SMALLER = 0.2  # share of the step size that is tried where it harms
CHECKS = 4  # times the held-out loss is looked at; the best weights win
IN_MEMORY = 1 << 30  # bytes of one set of hidden states above which it lives in a file


@dataclass(frozen=True, eq=False)
class LayerTask:
    """What one layer is fitted to; windows first. weight is 1 / |x|^2 per token."""

    inputs: Float[Tensor, "windows tokens hidden_size"]
    targets: Float[Tensor, "windows tokens hidden_size"]
    weight: Float[Tensor, "windows tokens"]


@dataclass(frozen=True)
class HealReport:
    """Held-out loss of a layer before and after."""

    before: float
    after: float


def heal_layer(
    layer: MLALayer,
    task: LayerTask,
    settings: HealSettings,
    compute: torch.dtype,
    advance: Callable[[int], None] = lambda steps: None,
) -> tuple[MLALayer, HealReport]:
    """Fit `layer` (fp64) to `task`, products in `compute`; returns the better of before and after.

    Where the asked step size harms, a smaller one is tried: Gemma 3 270M's second global layer gains nothing at 0.02.
    """
    healed, report = _fit(layer, task, settings, compute, advance)
    if healed is layer:
        healed, report = _fit(layer, task, replace(settings, lr=SMALLER * settings.lr), compute)
    return healed, report


def _fit(
    layer: MLALayer,
    task: LayerTask,
    settings: HealSettings,
    compute: torch.dtype,
    advance: Callable[[int], None] = lambda steps: None,
) -> tuple[MLALayer, HealReport]:
    """`heal_layer` with one step size; `layer` itself where it only harms."""
    start = with_unit_latent(layer, task.inputs)
    # One matrix each for Muon: a row per head and dimension.
    params: dict[str, Tensor] = {name: getattr(start, name).float().flatten(0, -2).requires_grad_() for name in TRAINED}
    plain = start.to(torch.float32)
    device = layer.W_DKV.device
    positions = torch.arange(task.inputs.shape[1], device=device)[None]
    table = rotation_table(positions, layer.inv_freq, layer.attention_scaling, torch.float32)
    training = len(task.inputs) - settings.held_out

    def shaped(name: str) -> Tensor:
        return params[name].view(getattr(start, name).shape)

    def loss_of(window: int) -> Tensor:
        trained = replace(plain, **{name: shaped(name) for name in TRAINED})  # type: ignore[arg-type]
        hidden = task.inputs[window, None].to(device)
        with torch.autocast(device.type, dtype=compute, enabled=compute != torch.float32):
            out = attend_expanded(trained, hidden, positions, table)
        error = out.float() - task.targets[window, None].to(device)
        return (error.square().sum(-1) * task.weight[window, None].to(device)).mean()

    def judge() -> float:
        with torch.no_grad():
            return sum(loss_of(training + i).item() for i in range(settings.held_out)) / settings.held_out

    rates = {name: settings.lr * params[name].detach().square().mean().sqrt().item() for name in TRAINED}
    groups = [{"params": [params[name]], "name": name} for name in TRAINED if params[name].numel()]
    optimiser = Muon(groups, compute=compute)
    generator = torch.Generator().manual_seed(settings.seed)
    before = best = judge()
    kept: dict[str, Tensor] = {}
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
                best, kept = now, {name: shaped(name).detach().double() for name in TRAINED}
    healed = replace(start, **kept) if kept else layer  # type: ignore[arg-type]
    return healed, HealReport(before, best)


def schedule(step: int, steps: int) -> float:
    """Learning rate factor: linear warm-up over a tenth of the steps, then half a cosine down to 0."""
    return min(1.0, (step + 1) / max(1, steps // 10)) * 0.5 * (1 + math.cos(math.pi * step / steps))


def with_unit_latent(layer: MLALayer, inputs: Tensor) -> MLALayer:
    """The same layer with a latent of unit covariance and slots of unit size, so that one step size fits all of it."""
    width = layer.W_DKV.shape[1]
    moment = torch.zeros(width, width, dtype=torch.float64, device=layer.W_DKV.device)
    for window in inputs:
        rows = latent_inputs(layer, window.to(moment.device))
        moment += (rows.T @ rows).double()
    moment /= inputs.shape[:2].numel()
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
    start: Callable[[int], MLALayer | None],
    settings: HealSettings,
    folder: Path,
    advance: Callable[[int], None] = lambda steps: None,
) -> Iterator[tuple[MLALayer | None, HealReport]]:
    """Healed layers in order; `start(i)` is layer i as it was converted (fp64; None: kept as it is).

    Large states are kept in `folder`.
    """
    states = stream.embed(ids)
    source, converted = _stored(folder, "source", states), _stored(folder, "converted", states)
    inputs, targets = _stored(folder, "inputs", states), _stored(folder, "targets", states)
    weight = torch.empty(ids.shape)
    compute = compute_dtype(stream.device)
    stream.compute = compute
    for index in range(stream.spec.num_hidden_layers):
        layer, mla = stream.load(index), start(index)
        if mla is None:
            for states in (source, converted):
                states.copy_(stream.run(layer, states))
            advance(settings.steps)
            yield None, HealReport(0.0, 0.0)
            continue
        _prepare(stream, layer, source, converted, LayerTask(inputs, targets, weight))
        healed, report = heal_layer(mla, LayerTask(inputs, targets, weight), settings, compute, advance)
        logger.info("layer %d: held-out error %.2e -> %.2e of the residual stream", index, report.before, report.after)
        layer.self_attn = LatentAttention(healed.to(torch.float32))
        converted.copy_(stream.run(layer, converted))
        yield healed, report


def _prepare(stream: LayerStream, layer: nn.Module, source: Tensor, converted: Tensor, task: LayerTask) -> None:
    """Advance `source` through `layer` in place; fill in the task: the converted prefix's inputs, the targets."""
    seen: list[Tensor] = []
    norm, normalised = getattr(layer, "input_layernorm", nn.Identity()), FAMILIES[stream.spec.family].post_norm
    hook = layer.self_attn.register_forward_hook(lambda module, args, out: seen.append(out[0]))  # type: ignore[union-attr]
    for i in range(len(source)):
        here = slice(i, i + 1)
        after = stream.run(layer, source[here])
        out = seen.pop()
        task.targets[here] = out.cpu()
        # Where a norm follows, what matters is the error relative to the output itself.
        beside = task.targets[here] if normalised else source[here] + task.targets[here]
        task.weight[here] = 1 / beside.square().sum(-1).clamp_min(1e-30)
        source[here] = after
        with torch.no_grad():
            task.inputs[here] = norm(converted[here].to(stream.device)).cpu()
    hook.remove()


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
