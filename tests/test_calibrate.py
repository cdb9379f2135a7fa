"""Calibration against the model itself: its hidden states, its losses, and derivatives taken by autograd."""

import cmath
import itertools
from collections.abc import Callable
from dataclasses import fields
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from tiny import LLAMA3_ROPE, tiny_model
from torch import Tensor
from transformers import AutoModelForCausalLM

from mla_convert.calibration import calibrate as module
from mla_convert.calibration.calibrate import KeptMoments, LayerMoments, MomentObserver, calibrate, sample_positions
from mla_convert.calibration.stream import LayerStream
from mla_convert.errors import MlaConvertError
from mla_convert.source.checkpoint import Checkpoint
from mla_convert.source.families import SourceSpec, read_spec

HEADS, GROUPS, WIDTH, HIDDEN, LAYERS = 6, 2, 10, 48, 4  # of tiny.DIMENSIONS
WINDOW = 37
CPU = torch.device("cpu")
IDS = torch.randint(0, 250, (5, WINDOW), generator=torch.Generator().manual_seed(1))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model(tmp_path_factory.mktemp("calibrate") / "source", projection_std=0.2)


@pytest.fixture
def every_position(monkeypatch: pytest.MonkeyPatch) -> None:
    """Follow every query through the softmax, not 8 per window."""
    monkeypatch.setattr(module, "JACOBIANS_PER_WINDOW", WINDOW)


def opened(folder: Path) -> tuple[LayerStream, SourceSpec]:
    checkpoint = Checkpoint.open(folder)
    spec = read_spec(checkpoint)
    return LayerStream(checkpoint, spec, CPU), spec


def moments_of(folder: Path, ids: Tensor, to: Path, seed: int = 0) -> list[LayerMoments]:
    to.mkdir()
    stream, spec = opened(folder)
    kept = KeptMoments(to, spec, CPU)
    found = list(calibrate(stream, ids, seed))
    for layer, moments in enumerate(found):
        kept.keep(layer, moments)
        again = kept.load(layer)  # float32 on disk; measured 6e-8
        assert all(
            (getattr(again, f.name) - getattr(moments, f.name)).abs().max()
            <= 1e-6 * getattr(moments, f.name).abs().max()
            for f in fields(LayerMoments)
        )
    return found


def test_moments_that_do_not_fit_on_the_disk_are_refused(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("shutil.disk_usage", lambda path: SimpleNamespace(free=1000))
    with pytest.raises(MlaConvertError, match=r"0.0 GB of moments in .* set TMPDIR to a larger disk"):
        KeptMoments(tmp_path, opened(folder)[1], CPU)


def off(got: Tensor, want: Tensor) -> float:
    return ((got - want).abs().max() / want.abs().max()).item()


@torch.no_grad()
def reference(folder: Path, ids: Tensor, **options: Any) -> tuple[Any, list[Tensor], Any]:
    """The source's own class in fp32, what each attention reads [windows, tokens, hidden], and its output."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="sdpa")
    inputs: list[Tensor] = []
    for layer in model.model.layers:
        layer.self_attn.register_forward_pre_hook(
            lambda _, args, kwargs: inputs.append(kwargs["hidden_states"]), with_kwargs=True
        )
    return model, inputs, model(input_ids=ids, use_cache=False, **options)


@pytest.mark.parametrize(
    ("family", "config"),
    [
        ("llama", {}),
        ("mistral", {"tie_word_embeddings": True, "num_key_value_heads": 3}),
        ("llama", {"rope_parameters": LLAMA3_ROPE, "rms_norm_eps": 1e-6}),
    ],
)
@pytest.mark.parametrize("observed", [False, True])
def test_the_stream_computes_what_the_model_computes(
    tmp_path: Path, family: str, config: dict[str, Any], observed: bool
) -> None:
    """Also when attention goes through the observer; a batch of 4 leaves the fifth window alone."""
    folder = tiny_model(tmp_path / "source", family, **config)
    stream, spec = opened(folder)
    model, _, output = reference(folder, IDS, labels=IDS, output_hidden_states=True)
    states = stream.embed(IDS)
    generator = torch.Generator().manual_seed(0)
    for index in range(LAYERS):
        # Measured 0: the same operations in the same order. Control, the neighbouring layer: 0.75 or more.
        assert off(states, output.hidden_states[index]) <= 1e-5
        layer = stream.load(index)
        observer = MomentObserver(layer.self_attn, spec, WINDOW, generator) if observed else None
        states = stream.run(layer, states, observer)
    assert off(output.hidden_states[1], output.hidden_states[2]) > 0.1
    last = model.model.norm(states)
    assert off(last, output.hidden_states[LAYERS]) <= 1e-5
    # Measured at most 1.1e-6 of 19.9 nats; control, the targets of other windows: 0.044 or more.
    assert stream.nll(states, IDS) == pytest.approx(output.loss.item(), abs=1e-5)
    assert stream.nll(states, IDS.roll(1, 1)) != pytest.approx(output.loss.item(), abs=0.01)


def test_the_second_moment_is_that_of_the_attention_inputs(folder: Path, tmp_path: Path) -> None:
    _, inputs, output = reference(folder, IDS, output_hidden_states=True)
    previous = torch.ones(HIDDEN + 1, HIDDEN + 1)
    for layer, found in enumerate(moments_of(folder, IDS, tmp_path / "m")):
        h = inputs[layer].flatten(0, 1).double()
        want = torch.zeros(HIDDEN + 1, HIDDEN + 1, dtype=torch.float64)
        for row in h:
            with_one = torch.cat((row, torch.ones(1, dtype=torch.float64)))
            want += torch.outer(with_one, with_one)
        assert found.tokens == IDS.numel() == want[-1, -1]
        assert off(found.input, want) <= 1e-6  # measured 8.2e-8
        assert off(found.input, previous) > 1e-2  # control: the layer before; measured 0.56 or more
        previous = want
        torch.testing.assert_close(found.input[-1, :-1], h.sum(0), rtol=0, atol=1e-4)  # measured 1.5e-5 of 154
        if layer < LAYERS - 1:  # the last one is stored after the final norm
            energy = output.hidden_states[layer + 1].double().square().sum(-1).log().sum().item()
            assert found.log_energy.item() == pytest.approx(energy, rel=1e-6)  # measured 0


def heads_of(attention: Any, h: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Unrotated queries, keys and values [heads, tokens, width], KV heads repeated."""
    q, k, v = (
        p(h).unflatten(1, (-1, WIDTH)).transpose(0, 1) for p in (attention.q_proj, attention.k_proj, attention.v_proj)
    )
    return q, k.repeat_interleave(HEADS // GROUPS, 0), v.repeat_interleave(HEADS // GROUPS, 0)


def rotated(x: Tensor, inv_freq: Tensor) -> Tensor:
    """Half-split rotation as complex multiplication."""
    turn = torch.exp(1j * torch.arange(x.shape[1]).double()[:, None] * inv_freq)
    z = torch.complex(*x.chunk(2, dim=-1)) * turn
    return torch.cat((z.real, z.imag), dim=-1)


class Brute:
    """Sums over all windows by loops over heads and queries, derivatives by autograd, in fp64."""

    def __init__(self, attention: Any, spec: SourceSpec):
        self.attention, self.spec = attention.double(), spec
        self.W_O = attention.o_proj.weight.detach().unflatten(1, (HEADS, WIDTH)).transpose(0, 1)
        zeros: Callable[..., Tensor] = lambda *shape: torch.zeros(shape, dtype=torch.float64)  # noqa: E731
        self.pair_energy, self.turned_energy = zeros(HEADS, WIDTH // 2), zeros(HEADS, WIDTH // 2, 2)
        self.key_pairs = zeros(WIDTH // 2, GROUPS, GROUPS, 2)
        self.value, self.key = zeros(GROUPS, HIDDEN, HIDDEN), zeros(GROUPS, HIDDEN, HIDDEN)
        self.query_at_key, self.key_trace = zeros(HEADS, WIDTH, WIDTH), zeros(HEADS)

    def add(self, h: Tensor) -> None:
        """One window [tokens, hidden]."""
        with torch.no_grad():
            q, k, v = heads_of(self.attention, h)
            rotating = rotated(q, self.spec.inv_freq) @ rotated(k, self.spec.inv_freq).transpose(1, 2)
        for head in range(HEADS):
            group = head // (HEADS // GROUPS)
            for t in range(len(h)):
                scores = rotating[head, t, : t + 1] * self.spec.softmax_scale
                seen, value = h[: t + 1], v[head, : t + 1]

                def output(shift: Tensor, s: Tensor = scores, value: Tensor = value, head: int = head) -> Tensor:
                    return self.W_O[head] @ (torch.softmax(s + shift, 0) @ value)

                by_score = torch.autograd.functional.jacobian(output, torch.zeros_like(scores))
                cost = by_score.square().sum(0)  # |d output / d score|^2 at each key
                for s in range(t + 1):
                    self.add_pairs(head, t - s, cost[s], q[head, t], k[:: HEADS // GROUPS, s])
                mean = torch.softmax(scores, 0) @ seen
                self.value[group] += torch.outer(mean, mean)
                J = by_score @ seen  # d output / d u for scores + seen @ u
                self.key[group] += J.T @ J
                self.key_trace[head] += J.square().sum()
                self.query_at_key[head] += J.square().sum() * torch.outer(q[head, t], q[head, t])

    def add_pairs(self, head: int, distance: int, cost: Tensor, q: Tensor, keys: Tensor) -> None:
        """One query and one position's keys [groups, width], unrotated, pair by pair."""
        for pair in range(WIDTH // 2):
            chi = complex(q[pair], q[pair + WIDTH // 2])
            kappa = [complex(k[pair], k[pair + WIDTH // 2]) for k in keys]
            energy = cost.item() * abs(chi) ** 2 * abs(kappa[head // (HEADS // GROUPS)]) ** 2
            turned = energy * cmath.exp(-1j * self.spec.inv_freq[pair].item() * distance)
            self.pair_energy[head, pair] += energy
            self.turned_energy[head, pair] += torch.tensor([turned.real, turned.imag], dtype=torch.float64)
            for j, k in itertools.product(range(GROUPS), repeat=2):
                both = cost.item() * abs(chi) ** 2 * kappa[j] * kappa[k].conjugate()
                self.key_pairs[pair, j, k] += torch.tensor([both.real, both.imag], dtype=torch.float64)


def test_attention_moments_are_the_derivatives_of_the_output(folder: Path, every_position: None) -> None:
    """fp64 on both sides: a^2 |W_O (v - o)|^2 is |d out / d score|^2, and J the derivative by a key error."""
    stream, spec = opened(folder)
    attention = stream.load(1).self_attn
    brute = Brute(attention, spec)
    observer = MomentObserver(attention, spec, WINDOW, torch.Generator().manual_seed(0))
    for seed in range(2):
        h = torch.randn(WINDOW, HIDDEN, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
        q, k, v = heads_of(attention, h)
        k, v = k[:: HEADS // GROUPS], v[:: HEADS // GROUPS]
        q, k = rotated(q, spec.inv_freq), rotated(k, spec.inv_freq)
        out = observer(h, q, k, v, spec.softmax_scale)
        mask = torch.ones(WINDOW, WINDOW, dtype=torch.bool).triu(1)
        scores = q @ k.repeat_interleave(3, 0).transpose(1, 2) * spec.softmax_scale
        attended = torch.softmax(scores.masked_fill(mask, float("-inf")), -1) @ v.repeat_interleave(3, 0)
        assert off(out, attended) <= 1e-13  # measured 5e-16
        brute.add(h)
    found = observer.moments
    assert found.counts.tolist() == [2 * WINDOW, 2 * WINDOW]
    for name in ("pair_energy", "turned_energy", "key_pairs", "value", "key", "query_at_key", "key_trace"):
        want = getattr(brute, name)
        assert off(getattr(found, name), want) <= 1e-13, name  # measured at most 1.6e-15
        assert off(getattr(found, name).flip(0), want) > 1e-2, name  # control: heads reversed, 0.14 or more


def test_moments_of_two_texts_merge_into_those_of_both(folder: Path, tmp_path: Path, every_position: None) -> None:
    one, two = IDS[:4], IDS[4:]  # the stream's batch is 4
    first, second, both = (
        moments_of(folder, ids, tmp_path / name) for ids, name in ((one, "1"), (two, "2"), (IDS, "3"))
    )
    for a, b, whole in zip(first, second, both, strict=True):
        merged = a.merge(b)
        assert merged.tokens == whole.tokens == IDS.numel()
        for f in fields(LayerMoments):
            # fp32 sums within a window, in another order of its queries: measured at most 1.6e-7.
            assert off(getattr(merged, f.name), getattr(whole, f.name)) <= 2e-6, f.name
            assert off(getattr(a, f.name), getattr(whole, f.name)) > 1e-2, f.name


def test_the_same_seed_examines_the_same_positions(folder: Path, tmp_path: Path) -> None:
    first, again, other = (
        moments_of(folder, IDS, tmp_path / name, seed) for name, seed in (("1", 0), ("2", 0), ("3", 1))
    )
    for a, b, c in zip(first, again, other, strict=True):
        assert a.counts.tolist() == [5 * WINDOW, 5 * module.JACOBIANS_PER_WINDOW]
        assert all(torch.equal(getattr(a, f.name), getattr(b, f.name)) for f in fields(LayerMoments))
        assert torch.equal(a.value, c.value) and not torch.equal(a.key, c.key)


def test_positions_are_all_of_a_short_window_and_one_per_stretch_of_a_long_one() -> None:
    generator = torch.Generator().manual_seed(0)
    assert sample_positions(9, 9, generator).tolist() == list(range(9))
    drawn = torch.stack([sample_positions(103, 10, generator) for _ in range(200)])
    edges = torch.linspace(0, 103, 11).long()
    assert ((drawn >= edges[:-1]) & (drawn < edges[1:])).all()
    assert len(drawn.unique()) == 103  # every position has its chance, the last one too


def test_tiny_and_repeated_inputs_leave_finite_moments(folder: Path, tmp_path: Path) -> None:
    """A text of one token over and over: attention sees equal values, so nothing hangs on the scores."""
    for found in moments_of(folder, torch.full((2, 3), 7), tmp_path / "m"):
        assert all(getattr(found, f.name).isfinite().all() for f in fields(LayerMoments))
        assert found.tokens == 6
        assert found.pair_energy.min() >= 0 and found.key_trace.min() >= 0
