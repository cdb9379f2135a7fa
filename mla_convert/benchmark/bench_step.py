"""One variant of a model in `bench`: a cache filled with random tokens, and timed decoding steps behind it."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from transformers import DynamicCache

from mla_convert.benchmark.bench_models import sizes_of
from mla_convert.decoding.absorb_model import absorb_model, restore
from mla_convert.decoding.latent_cache import LatentLayer
from mla_convert.decoding.quantised_cache import QuantisedLatentCache
from mla_convert.formats.native import is_native
from mla_convert.interface.measure import peak_rss
from mla_convert.modeling.attention import MLAttention
from mla_convert.source.loading import cache_name

_BLOCK = 1024  # random tokens that are repeated to fill a cache


@dataclass(frozen=True)
class Seconds:
    """One decoded token of a batch: all, in the attention modules, and from cache to output projection."""

    step: float
    attention: float
    core: float


class Decoder:
    """A variant: "source", "expanded" (transformers' own latent attention) or "absorbed"; cache_dtype int8 or fp8:
    absorbed with a quantised cache.
    """

    def __init__(self, name: str, model: Any, variant: str, cache_dtype: str = "auto") -> None:
        self.model, self.variant, self.cache_dtype = model, variant, cache_dtype
        said = [name, *([] if variant == "source" else [variant]), *([] if cache_dtype == "auto" else [cache_dtype])]
        self.name = ", ".join(said)
        self.sizes = sizes_of(model)
        parameter = next(model.parameters())
        self.dtype, self.device = parameter.dtype, parameter.device
        self.cache: Any = None
        self.peak = 0
        self._length = 0

    def scratch(self, context: int, batch: int) -> int:
        """Bytes beside the cache while one layer runs: expanded keys and values, or nothing that counts."""
        # keys, values and the concatenation they come from
        expanded = self.sizes.expanded if self.variant == "expanded" else 0
        return 2 * batch * context * expanded * int(self.dtype.itemsize)

    def need(self, context: int, batch: int) -> int:
        """Bytes of the cache, by its formula, and of `scratch`; a concatenated cache is there twice for a moment."""
        cache = batch * self._formula(context)
        return cache + cache // self.sizes.layers + self.scratch(context, batch)

    def fill(self, context: int, batch: int, seed: int) -> None:
        """A cache of `context` random tokens per sequence."""
        gen = torch.Generator().manual_seed(seed)
        self.cache, self._length = self._new_cache(), context
        config = self.model.config
        for index in range(self.sizes.layers):
            if self.sizes.latent:
                shapes = [(batch, 1, context, self.sizes.rank), (batch, 1, context, self.sizes.rope)]
            else:
                heads = config.num_key_value_heads
                shapes = [(batch, heads, context, self.sizes.numbers // (2 * heads))] * 2
            states = [self._random(shape, gen) for shape in shapes]
            if self.cache_dtype == "auto":
                self.cache.update(*states, index)
            else:  # without the dequantised copy that update returns
                self.cache.layers[index].append(*states)

    def _random(self, shape: tuple[int, ...], gen: torch.Generator) -> torch.Tensor:
        batch, heads, tokens, width = shape
        block = torch.randn(heads, min(_BLOCK, tokens), width, generator=gen).to(self.device, self.dtype)
        repeated = block.repeat(1, -(-tokens // block.shape[1]), 1)[:, :tokens]
        return repeated.expand(batch, -1, -1, -1)

    def _new_cache(self) -> Any:
        if self.cache_dtype != "auto":
            return QuantisedLatentCache(self.model.config, self.cache_dtype)
        cache = DynamicCache(config=self.model.config)
        if self.variant == "absorbed":
            cache.layers = [LatentLayer() for _ in cache.layers]
        return cache

    def steps(self, number: int) -> list[Seconds]:
        """Decode `number` tokens, each timed; the cache is as long as before afterwards."""
        self._enter()
        clock = _Clock(self.model, self.cache, self.device)
        feed = {cache_name(self.model): self.cache}
        tokens = torch.zeros(self._batch(), 1, dtype=torch.long, device=self.device)
        if self.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self.device)
        try:
            found = [clock.step(lambda: self.model(tokens, **feed)) for _ in range(number)]
        finally:
            clock.remove()
        cuda = self.device.type == "cuda"
        self.peak = max(self.peak, torch.cuda.max_memory_allocated(self.device) if cuda else peak_rss())
        self.cache.crop(-number)
        return found

    def prefill(self, context: int, seed: int) -> float:
        """Seconds of one prompt of `context` tokens."""
        self._enter()
        gen = torch.Generator().manual_seed(seed)
        prompt = torch.randint(self.model.config.vocab_size, (1, context), generator=gen).to(self.device)
        name = cache_name(self.model)

        def call() -> None:
            self.model(prompt, logits_to_keep=1, **{name: self._new_cache()})

        return min(timed(call, self.device) for _ in range(2))

    def held(self) -> int:
        """Bytes of the storages the cache really holds."""
        held = {}
        for layer in self.cache.layers:
            for value in [*vars(layer).values(), *getattr(layer, "rows", [])]:
                if isinstance(value, torch.Tensor) and value.numel() > 1:
                    held[value.untyped_storage().data_ptr()] = value.untyped_storage().nbytes()
        return sum(held.values())

    def formula(self) -> int:
        """Bytes the filled cache should hold."""
        return self._batch() * self._formula(self._length)

    def forget(self) -> None:
        """Drop the cache."""
        self.cache, self.peak = None, 0
        if self.device.type == "cuda":
            torch.cuda.empty_cache()

    def _formula(self, tokens: int) -> int:
        if self.cache_dtype != "auto":
            return QuantisedLatentCache(self.model.config, self.cache_dtype).formula(1, tokens)
        return self.sizes.cache_bytes(tokens, self.dtype.itemsize)

    def _batch(self) -> int:
        return int(self.cache.layers[0].keys.shape[0])

    def _enter(self) -> None:
        if is_native(self.model.config.to_dict()):
            for module in self.model.modules():
                if isinstance(module, MLAttention):
                    module.path = self.variant
        elif self.variant == "absorbed":
            absorb_model(self.model)
        elif self.variant == "expanded":
            restore(self.model)


def timed(call: Callable[[], Any], device: torch.device) -> float:
    """Seconds of one call, to the end of its work on `device`."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    start = time.perf_counter()
    call()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter() - start


class _Clock:
    """Marks the ends of the attention modules, the cache update and the start of the output projection."""

    def __init__(self, model: nn.Module, cache: Any, device: torch.device) -> None:
        self._device = device
        self._marks: dict[str, list[Any]] = {"in": [], "cached": [], "projected": [], "out": []}
        self._hooks: list[Any] = []
        self._wrapped = [layer for layer in cache.layers if hasattr(layer, "append")] or [cache]
        for each in self._wrapped:
            self._wrap(each, "append" if each is not cache else "update")
        attentions = [m for name, m in model.named_modules() if name.endswith("self_attn")]
        for attention in attentions:
            self._hooks += [
                attention.register_forward_pre_hook(lambda *_: self._mark("in")),
                attention.o_proj.register_forward_pre_hook(lambda *_: self._mark("projected")),
                attention.register_forward_hook(lambda *_: self._mark("out")),
            ]

    def _wrap(self, each: Any, method: str) -> None:
        inner = getattr(each, method)

        def timed_update(*args: Any, **kwargs: Any) -> Any:
            result = inner(*args, **kwargs)
            self._mark("cached")
            return result

        setattr(each, method, timed_update)

    def _mark(self, name: str) -> None:
        if self._device.type == "cuda":
            event = torch.cuda.Event(enable_timing=True)
            event.record()
            self._marks[name].append(event)
        else:
            self._marks[name].append(time.perf_counter())

    def step(self, call: Callable[[], Any]) -> Seconds:
        """Time one step."""
        for marks in self._marks.values():
            marks.clear()
        whole = timed(call, self._device)
        ends = self._marks["projected"] or self._marks["out"]  # a merged output projection is not called
        return Seconds(
            whole, self._between(self._marks["in"], self._marks["out"]), self._between(self._marks["cached"], ends)
        )

    def _between(self, starts: list[Any], ends: list[Any]) -> float:
        pairs = zip(starts, ends, strict=True)
        if self._device.type == "cuda":
            return sum(float(start.elapsed_time(end)) / 1e3 for start, end in pairs)
        return float(sum(end - start for start, end in pairs))

    def remove(self) -> None:
        """Take the hooks and the wrapped update away."""
        for each in self._wrapped:
            vars(each).pop("update", None)
            vars(each).pop("append", None)
        for hook in self._hooks:
            hook.remove()
