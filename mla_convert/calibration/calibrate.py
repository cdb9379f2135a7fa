"""Calibration: one streaming pass of text through the source collects each layer's moments.

All moments are sums in fp64, so passes over different texts can be merged by addition. The attention matrix
exists for one window of one layer, and only at QUERIES_PER_WINDOW sampled query positions.

Where keys and values are not linear in h, h below is x = [all keys, normalised and not rotated; all values]
(projections.py): a layer is linear in x up to the softmax, and that is all the moments need. Sinks take part in the
softmax and leave its derivative d out / d score_s = a_s (v_s - out) as it is; a soft cap multiplies it by
1 - tanh^2(score / softcap).
"""

import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Float
from safetensors.torch import load_file, save_file
from torch import Tensor

from mla_convert.calibration.stream import LayerStream
from mla_convert.conversion.factor import roots
from mla_convert.errors import MlaConvertError
from mla_convert.formats.layer import keys_values, source_heads
from mla_convert.modeling.core import attention_weights, causal_mask, expanded_attention
from mla_convert.source.families import SourceSpec
from mla_convert.source.projections import canonical_rows

QUERIES_PER_WINDOW = 256  # positions at which attention is examined
JACOBIANS_PER_WINDOW = 8  # of those, positions at which the key error is followed through the softmax


@dataclass(frozen=True, eq=False)
class LayerMoments:
    """Sums over one layer's calibration tokens, sampled queries or Jacobians (symbols: factor.py).

    input: second moment of [h; 1], so its last row holds the sum of h and the token count.
    pair_energy: sum over queries t and keys s of w |chi|^2 |kappa|^2 per RoPE pair, w = a^2 |W_O (v - o)|^2 what a
    squared score error costs there. turned_energy: the same sum of w |chi|^2 |kappa|^2 exp(-i theta (t - s)).
    key_pairs: sum of w |chi|^2 kappa kappa^H across KV heads. The last two are complex; last dimension: re, im.
    value: sum of hbar hbar^T per KV head. key: sum of J^T J per KV head.
    query_at_key: sum of tr(J^T J) q q^T per head. key_trace: sum of tr(J^T J) per head.
    counts: sampled queries, sampled Jacobians.
    log_energy: sum over tokens of log |x|^2, x the residual stream after the layer. (A geometric mean is not
    swamped by the few tokens of massive activation.)
    """

    input: Float[Tensor, "latent_inputs_and_one latent_inputs_and_one"]
    pair_energy: Float[Tensor, "num_heads pairs"]
    turned_energy: Float[Tensor, "num_heads pairs 2"]
    key_pairs: Float[Tensor, "pairs num_key_value_heads num_key_value_heads 2"]
    value: Float[Tensor, "num_key_value_heads latent_inputs latent_inputs"]
    key: Float[Tensor, "num_key_value_heads latent_inputs latent_inputs"]
    query_at_key: Float[Tensor, "num_heads source_head_dim source_head_dim"]
    key_trace: Float[Tensor, " num_heads"]
    counts: Float[Tensor, " 2"]
    log_energy: Float[Tensor, ""]

    def merge(self, other: "LayerMoments") -> "LayerMoments":
        """Moments of both texts together."""
        return LayerMoments(**{f.name: getattr(self, f.name) + getattr(other, f.name) for f in fields(self)})

    @property
    def tokens(self) -> int:
        """Calibration tokens seen."""
        return int(self.input[-1, -1].item())

    def to(self, dtype: torch.dtype) -> "LayerMoments":
        """All sums in `dtype`."""
        return LayerMoments(**{f.name: getattr(self, f.name).to(dtype) for f in fields(self)})

    def save(self, path: Path) -> None:
        """Write to a safetensors file."""
        save_file({f.name: getattr(self, f.name).cpu().contiguous() for f in fields(self)}, path)

    @staticmethod
    def load(path: Path, device: torch.device) -> "LayerMoments":
        """Read what `save` wrote."""
        return LayerMoments(**load_file(path, device=str(device)))


class MomentObserver:
    """Computes one layer's attention window by window and adds up its moments."""

    def __init__(
        self,
        attention: Any,
        spec: SourceSpec,
        window: int,
        generator: torch.Generator,
        advance: Callable[[int], None] = lambda windows: None,
    ):
        heads, groups, width = spec.num_attention_heads, spec.num_key_value_heads, spec.source_head_dim
        index = attention.layer_idx
        self.attention, self.facts, self.keys_values = attention, spec.layers[index], spec.keys_values
        self.rows = canonical_rows(spec, index)
        self.sinks = attention.sinks if self.facts.sinks else None
        W_O = attention.o_proj.weight.unflatten(1, (heads, width)).transpose(0, 1)
        self.metric = W_O.transpose(1, 2) @ W_O  # |W_O x|^2 = x^T metric x
        self.root = torch.stack([roots(m.double())[0] for m in self.metric]).to(W_O.dtype)
        self.advance = advance
        self.groups, self.generator, self.device = groups, generator, W_O.device
        phase = torch.arange(window, dtype=torch.float64)[:, None] * self.facts.inv_freq
        self.phase = torch.polar(torch.ones_like(phase), phase).to(self.device)
        inputs = spec.latent_inputs
        self.moments = LayerMoments(
            input=self._zeros(inputs + 1, inputs + 1),
            pair_energy=self._zeros(heads, self.facts.pairs),
            turned_energy=self._zeros(heads, self.facts.pairs, 2),
            key_pairs=self._zeros(self.facts.pairs, groups, groups, 2),
            value=self._zeros(groups, inputs, inputs),
            key=self._zeros(groups, inputs, inputs),
            query_at_key=self._zeros(heads, width, width),
            key_trace=self._zeros(heads),
            counts=self._zeros(2),
            log_energy=self._zeros(),
        )

    def _zeros(self, *shape: int) -> Tensor:
        return torch.zeros(shape, dtype=torch.float64, device=self.device)

    def __call__(
        self, hidden: Tensor, query: Tensor, key: Tensor, value: Tensor, scale: float, mask: Tensor | None = None
    ) -> Tensor:
        """Attention outputs [num_heads, tokens, head_dim] of one causal window; its moments are added.

        mask: bool [tokens, tokens], true where a query attends; None: at no later token.
        """
        per_group, rotated = query.shape[0] // self.groups, key
        key, value = key.repeat_interleave(per_group, 0), value.repeat_interleave(per_group, 0)
        tokens, softcap = hidden.shape[0], self.facts.softcap
        seen = causal_mask(tokens, tokens, hidden.device) if mask is None else mask[None, None]
        out = expanded_attention(query[None], key[None], value[None], scale, seen, softcap, self.sinks)[0]
        at = sample_positions(tokens, QUERIES_PER_WINDOW, self.generator).to(self.device)
        scores = query[:, at] @ key.transpose(1, 2) * scale
        slope = None if softcap is None else 1 - torch.tanh(scores / softcap).square()
        visible = torch.arange(tokens, device=self.device) <= at[:, None] if mask is None else mask[at]
        mass = attention_weights(scores[None], visible, softcap, self.sinks)[0]
        steep = mass if slope is None else mass * slope
        if self.facts.pairs:
            rows = self.rows[: 2 * self.facts.pairs]
            cost = score_cost(steep, value, out[:, at], self.metric)
            self._add_pairs(at, cost, query[:, at][..., rows], rotated[..., rows])
        self._add(hidden, at, mass, steep, value, out[:, at])
        self.advance(1)
        return out

    def _inputs(self, hidden: Tensor, at: Tensor) -> tuple[Tensor, Tensor]:
        """x [tokens, latent_inputs] of all tokens, and the queries at `at` before rotation, canonical rows."""
        if not self.keys_values:
            return hidden, source_heads(self.attention, hidden[None, at])[0][0][..., self.rows].transpose(0, 1)
        query, key, value = source_heads(self.attention, hidden[None])
        return keys_values(key, value)[0], query[0, at][..., self.rows].transpose(0, 1)

    def _add(self, hidden: Tensor, at: Tensor, mass: Tensor, steep: Tensor, value: Tensor, out: Tensor) -> None:
        """Add a window: attention `mass` [heads, queries, tokens], `out` [heads, queries, width] at `at`.

        steep: mass times the slope of the soft cap.
        """
        m = self.moments
        hidden, q = self._inputs(hidden, at)
        with_one = torch.nn.functional.pad(hidden, (0, 1), value=1.0)
        m.input.add_((with_one.T @ with_one).double())

        averaged = (mass @ hidden).unflatten(0, (self.groups, -1)).flatten(1, 2)
        m.value.add_((averaged.transpose(1, 2) @ averaged).double())

        some = torch.randperm(len(at), generator=self.generator)[:JACOBIANS_PER_WINDOW].to(self.device)
        for head in range(mass.shape[0]):
            # J = sum_s a_s root (v_s - o) h_s^T for each of `some` queries: [queries, width, hidden]
            weighted = steep[head, some, :, None] * ((value[head] - out[head, some, None]) @ self.root[head])
            jacobian = (weighted.transpose(1, 2).flatten(0, 1) @ hidden).unflatten(0, (len(some), -1))
            size = jacobian.square().sum((1, 2))
            rows = jacobian.flatten(0, 1)
            m.key[head * self.groups // mass.shape[0]].add_((rows.T @ rows).double())
            m.query_at_key[head].add_(((q[head, some] * size[:, None]).T @ q[head, some]).double())
            m.key_trace[head] += size.sum().double()
        m.counts.add_(torch.tensor([len(at), len(some)], dtype=torch.float64, device=self.device))

    def _add_pairs(self, at: Tensor, cost: Tensor, query: Tensor, key: Tensor) -> None:
        """Add what losing a pair's rotation costs; `query` at `at` and `key` (one per KV head) are rotated.

        |chi| and |kappa| do not see the rotation, and in kappa kappa^H across KV heads it cancels.
        """
        m, chi, kappa = self.moments, to_pairs(query), to_pairs(key)  # [heads, tokens, pairs]
        phase = self.phase[: key.shape[1]].to(kappa.dtype)
        read, held = chi.abs().square(), kappa.abs().square()
        held = held.repeat_interleave(len(read) // self.groups, 0)
        m.pair_energy.add_((read * (cost @ held)).sum(1).double())
        # exp(-i theta (t - s)) is a product of a factor of t and one of s
        turned = (cost.to(phase.dtype) @ (held * phase)) * phase[at].conj() * read
        m.turned_energy.add_(torch.view_as_real(turned.sum(1)).double())
        weight = (cost.transpose(1, 2) @ read).sum(0)  # [tokens, pairs]: w |chi|^2 over all queries
        m.key_pairs.add_(
            torch.view_as_real(torch.einsum("tp,jtp,ktp->pjk", weight.to(kappa.dtype), kappa, kappa.conj()))
        )


def to_pairs(vectors: Tensor) -> Tensor:
    """Half-split RoPE vectors [..., width] as complex pairs [..., width / 2]."""
    return torch.complex(*vectors.chunk(2, dim=-1))


def score_cost(mass: Tensor, value: Tensor, out: Tensor, metric: Tensor) -> Tensor:
    """a^2 |W_O (v - o)|^2 [heads, queries, tokens], the cost of a squared score error; metric = W_O^T W_O."""
    projected = out @ metric
    own = ((value @ metric) * value).sum(-1)[:, None]
    mean = (projected * out).sum(-1)[..., None]
    return mass.square() * (own - 2 * projected @ value.transpose(1, 2) + mean).clamp_min(0)


def sample_positions(tokens: int, count: int, generator: torch.Generator) -> Tensor:
    """At most `count` query positions, one drawn from each of `count` equal stretches of the window."""
    if tokens <= count:
        return torch.arange(tokens)
    edges = torch.linspace(0, tokens, count + 1).long()
    width = edges[1:] - edges[:-1]
    return edges[:-1] + (torch.rand(count, generator=generator) * width).long()


def calibrate(
    stream: LayerStream,
    ids: Tensor,
    seed: int,
    advance: Callable[[int], None] = lambda windows: None,
    kept: frozenset[int] = frozenset(),
) -> Iterator[LayerMoments | None]:
    """Run windows `ids` [windows, tokens] through the source; yields each layer's moments, one layer in memory.

    A layer is computed when its moments are asked for; those `kept` as they are have none. `advance` is called with 1
    per window and layer.
    """
    states = stream.embed(ids)
    generator = torch.Generator().manual_seed(seed)
    for index in range(stream.spec.num_hidden_layers):
        layer = stream.load(index)
        if index in kept:
            states = stream.run(layer, states)
            advance(len(ids))
            yield None
            continue
        observer = MomentObserver(layer.self_attn, stream.spec, ids.shape[1], generator, advance)
        states = stream.run(layer, states, observer)
        observer.moments.log_energy.add_(states.double().square().sum(-1).log().sum())
        yield observer.moments


class KeptMoments:
    """The moments of all layers in files of `folder`, in float32, for conversions that look at them several times."""

    def __init__(self, folder: Path, spec: SourceSpec, device: torch.device):
        self.folder, self.device = folder, device
        square = 8 * spec.num_key_value_heads * spec.latent_inputs**2  # the two stacks of latent_inputs^2, float32
        needed, free = spec.num_hidden_layers * square, shutil.disk_usage(folder).free
        if needed > free:
            raise MlaConvertError(
                f"comparing several sizes keeps {needed / 1e9:.1f} GB of moments in {folder}, which has "
                f"{free / 1e9:.1f} GB free; set TMPDIR to a larger disk, or name one size with --kv-lora-rank, "
                "--qk-rope-head-dim and --rope-stride"
            )

    def keep(self, layer: int, moments: LayerMoments) -> None:
        """Write one layer's."""
        moments.to(torch.float32).save(self._file(layer))

    def load(self, layer: int) -> LayerMoments:
        """Read one layer's, as fp64."""
        return LayerMoments.load(self._file(layer), self.device).to(torch.float64)

    def _file(self, layer: int) -> Path:
        return self.folder / f"{layer:04d}.safetensors"
