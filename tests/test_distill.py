"""The distillation loss against sums written out token by token, its gradient, its memory; texts and their order."""

import math
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_text import text, tokenizer
from torch.utils._python_dispatch import TorchDispatchMode

from mla_convert.errors import BadOption
from mla_convert.evaluation.scoring import LOGIT_BYTES
from mla_convert.interface.finetune_recipe import FinetuneRecipe, weighted
from mla_convert.training.distill import BLOCK_BYTES, LossWeights, chunked_loss, hidden_loss, kl, top_logits
from mla_convert.training.train_data import read_training_text, schedule

TOKENS, VOCAB, WIDTH = 11, 13, 7


def operands(seed: int = 0) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    torch.manual_seed(seed)
    hidden = torch.randn(TOKENS, WIDTH, dtype=torch.float64)
    weight = torch.randn(VOCAB, WIDTH, dtype=torch.float64)
    return hidden, weight, torch.randint(0, VOCAB, (TOKENS,)), 2 * torch.randn(TOKENS, VOCAB, dtype=torch.float64)


def by_hand(hidden: Any, weight: Any, targets: Any, teacher: Any, kd: float, temperature: float) -> float:
    total = 0.0
    for h, target, reference in zip(hidden.tolist(), targets.tolist(), teacher.tolist(), strict=True):
        logits = [sum(a * b for a, b in zip(h, w, strict=True)) for w in weight.tolist()]

        def distribution(values: list[float], t: float) -> list[float]:
            parts = [math.exp(v / t) for v in values]
            return [part / sum(parts) for part in parts]

        p, q = distribution(reference, temperature), distribution(logits, temperature)
        far = sum(a * math.log(a / b) for a, b in zip(p, q, strict=True))
        total += kd * temperature**2 * far - (1 - kd) * math.log(distribution(logits, 1.0)[target])
    return total / len(targets)


@pytest.mark.parametrize(("kd", "temperature"), [(1.0, 1.0), (0.3, 1.7), (0.0, 1.0), (0.6, 0.5)])
@pytest.mark.parametrize("rows", [1, 4, 100])
def test_loss_is_the_formula(kd: float, temperature: float, rows: int) -> None:
    hidden, weight, targets, teacher = operands()
    weights = LossWeights(kd, temperature)
    loss = chunked_loss(hidden, weight, targets, lambda part: teacher[part], weights, rows)[0]
    # logits are fp32 inside: measured 3e-7
    assert float(loss) == pytest.approx(by_hand(hidden, weight, targets, teacher, kd, temperature), rel=3e-6)


def test_gradient_is_that_of_the_whole_loss() -> None:
    hidden, weight, targets, teacher = operands()
    hidden.requires_grad_(), weight.requires_grad_()
    weights = LossWeights(0.3, 1.7)
    (5 * chunked_loss(hidden, weight, targets, lambda part: teacher[part], weights, 4)[0]).backward()
    logits = hidden @ weight.T
    whole = 0.3 * 1.7**2 * kl(logits, teacher, 1.7).mean() + 0.7 * torch.nn.functional.cross_entropy(logits, targets)
    expected = torch.autograd.grad(5 * whole, (hidden, weight))
    for found, wanted in zip((hidden.grad, weight.grad), expected, strict=True):
        assert found is not None
        torch.testing.assert_close(found, wanted, rtol=2e-5, atol=2e-6)  # fp32 logits inside: measured 4e-7
        assert float(wanted.abs().max()) > 0.1


@pytest.mark.parametrize(("head_is_trained", "promised"), [(False, BLOCK_BYTES), (True, LOGIT_BYTES)])
def test_no_block_of_logits_is_larger_than_promised(head_is_trained: bool, promised: int) -> None:
    class Largest(TorchDispatchMode):
        seen = 0

        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            out = func(*args, **(kwargs or {}))
            if isinstance(out, torch.Tensor):
                self.seen = max(self.seen, out.numel() * out.element_size())
            return out

    hidden, weight = torch.randn(1024, 2, requires_grad=True), torch.randn(49152, 2, requires_grad=head_is_trained)
    states = torch.randn(1024, 2)
    with Largest() as largest:
        chunked_loss(
            hidden,
            weight,
            torch.zeros(1024, dtype=torch.int64),
            lambda part: states[part] @ weight.detach().T,
            LossWeights(),
        )[0].backward()
    # Six such blocks live at a time, 0.4 GiB at most; all logits at once would be 0.2 GB each.
    assert 0.9 * promised < largest.seen <= promised
    assert 6 * promised < 2**29 < 49152 * 1024 * 4 * 6


def test_top_logits_lump_the_rest_into_one_class() -> None:
    _, _, _, teacher = operands()
    torch.manual_seed(3)
    logits = torch.randn(TOKENS, VOCAB)
    everything = kl(logits, top_logits(teacher, VOCAB, 1.7), 1.7)
    torch.testing.assert_close(everything, kl(logits, teacher, 1.7), rtol=1e-4, atol=1e-5)  # rest < TINY; 6e-7
    k = 4
    few = kl(logits, top_logits(teacher, k, 1.7), 1.7)
    p, q = (teacher / 1.7).softmax(-1), (logits.double() / 1.7).softmax(-1)
    index = teacher.topk(k).indices
    p, q = (torch.cat((d.gather(1, index), 1 - d.gather(1, index).sum(1, keepdim=True)), 1) for d in (p, q))
    torch.testing.assert_close(few.double(), (p * (p / q).log()).sum(1), rtol=1e-4, atol=1e-5)  # measured 2e-6
    assert bool((few < everything).all())  # merging classes cannot raise a KL


def test_gradient_is_finite_where_every_logit_is_kept() -> None:
    _, _, _, teacher = operands()
    logits = torch.randn(TOKENS, VOCAB, requires_grad=True)
    kl(logits, top_logits(teacher, VOCAB, 1.0), 1.0).sum().backward()
    assert logits.grad is not None and bool(logits.grad.isfinite().all()) and float(logits.grad.abs().max()) > 0.01


def test_hidden_loss_by_hand() -> None:
    target = torch.tensor([[[3.0, 4.0], [1.0, 0.0]]])
    state = 2 * (target + torch.tensor([[[5.0, 0.0], [0.0, 2.0]]]))
    assert float(hidden_loss([state], [target], [2.0])) == pytest.approx((25 / 25 + 4 / 1) / 2)
    assert float(hidden_loss([2 * target, target], [target, target], [2.0, 1.0])) == 0


# texts


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("code.txt:2.0", ("code.txt", 2.0)),
        ("code.txt", ("code.txt", 1.0)),
        ("owner/set:config:train:0.5", ("owner/set:config:train", 0.5)),
        ("owner/set:2024", ("owner/set:2024", 1.0)),  # a config may be a whole number; a weight has a point
    ],
)
def test_weight_of_a_text(name: str, expected: tuple[str, float]) -> None:
    assert weighted(name) == expected


def test_schedule_shows_a_text_as_often_as_its_weight_says_and_evenly() -> None:
    order = schedule([10, 20], [2.0, 1.0], 80, seed=0)
    first = [index < 10 for index in order]
    assert sum(first) == 40 and len(order) == 80
    assert [sum(first[start : start + 20]) for start in range(0, 80, 20)] == pytest.approx([10] * 4, abs=1)
    counts = Counter(order)
    assert all(counts[index] == 4 for index in range(10)) and all(counts[index] == 2 for index in range(10, 30))
    assert order == schedule([10, 20], [2.0, 1.0], 80, seed=0) != schedule([10, 20], [2.0, 1.0], 80, seed=1)


def recipe(data: tuple[str, ...], **options: Any) -> FinetuneRecipe:
    return FinetuneRecipe(source="a", converted="b", out="c", data=data, **{"window": 8, "tokens": 320} | options)


def test_held_out_windows_are_not_trained_on(tmp_path: Path) -> None:
    for name, words in (("a.txt", 200), ("b.txt", 600)):
        (tmp_path / name).write_text(text(words, seed=words))
    data = (str(tmp_path / "a.txt"), f"{tmp_path / 'b.txt'}:2.0")
    found = read_training_text(recipe(data, held_out=8), tokenizer())
    assert found.windows.shape == (25 + 75 - 8, 8) and found.held_out.shape == (8, 8)
    trained = {tuple(window) for window in found.windows.tolist()}
    assert not trained & {tuple(window) for window in found.held_out.tolist()}
    # in proportion: two of the 25 windows of a.txt, six of the 75 of b.txt
    ids = tokenizer()((tmp_path / "a.txt").read_text(), add_special_tokens=False)["input_ids"]
    assert found.held_out[:2].flatten().tolist() == ids[23 * 8 : 25 * 8]
    assert len(found.order) == 320 // 8
    judged = read_training_text(recipe((data[0],), held_out=3, eval_data=(str(tmp_path / "b.txt"),)), tokenizer())
    assert judged.windows.shape == (25, 8) and judged.held_out.shape == (3, 8)


def test_a_text_that_is_all_held_out_is_refused(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text(text(64))
    with pytest.raises(BadOption, match="have 8 windows and 8 are held out.*give more text, or a smaller held_out"):
        read_training_text(recipe((str(tmp_path / "a.txt"),), held_out=8), tokenizer())


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"learning_rate": 0.0}, "learning_rate=0.0 must be above 0"),
        ({"learning_rate": float("nan")}, "learning_rate=nan must be above 0"),
        ({"kd_weight": 1.1}, "kd_weight=1.1 must be from 0 to 1"),
        ({"temperature": 0.0}, "temperature=0.0 must be above 0"),
        ({"hidden_weight": -1.0}, "hidden_weight=-1.0 must be 0 or more"),
        ({"hidden_weight": 1.0, "cache_logits": 8}, "hidden_weight=1.0 needs .*cache_logits=8 does not keep"),
        ({"batch_size": 3, "micro_batch": 2}, "batch_size=3 is no multiple of micro_batch=2"),
        ({"tokens": 10, "window": 8, "batch_size": 2}, "tokens=10 is less than one step .* = 16"),
        ({"train": "everything"}, "unknown train 'everything': use one of attention, layers, all, lora"),
        ({"dtype": "float16"}, "dtype=float16 is refused"),
        ({"data": ("a.txt:0.0",)}, "'a.txt:0.0' has weight 0.0; leave the text out"),
        ({"held_out": 0}, "held_out=0 is too small"),
    ],
)
def test_recipe_refusals(options: dict[str, Any], match: str) -> None:
    values = {"source": "a", "converted": "b", "out": "c"} | options
    with pytest.raises(BadOption, match=match):
        FinetuneRecipe.from_mapping(values)


def test_out_must_not_replace_what_is_read(tmp_path: Path) -> None:
    with pytest.raises(BadOption, match="is or holds the source"):
        FinetuneRecipe(source="a", converted=str(tmp_path), out=str(tmp_path))
