"""Causal attention in blocks: equal to the formula in float64, its gradient too, and used where it should be."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from mla_convert.modeling import blocks
from mla_convert.modeling.core import causal_mask, expanded_attention

BATCH, HEADS, KEY, VALUE = 2, 3, 40, 24
SCALE = 0.2


def operands(tokens: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(tokens)
    shapes = ((BATCH, HEADS, tokens, width) for width in (KEY, KEY, VALUE, VALUE))
    return [torch.randn(*shape, generator=generator) for shape in shapes]  # query, key, value, upstream gradient


def run(attention: Callable[[Tensor, Tensor, Tensor], Tensor], tokens: int, dtype: torch.dtype) -> list[Tensor]:
    """Output and the gradients of query, key and value."""
    *parts, above = (x.to(dtype) for x in operands(tokens))
    leaves = [x.requires_grad_() for x in parts]
    out = attention(*leaves)
    out.backward(above.to(out.dtype))
    return [out.detach(), *(x.grad for x in leaves if x.grad is not None)]


def formula(query: Tensor, key: Tensor, value: Tensor, ahead: int = 0) -> Tensor:
    tokens = query.shape[-2]
    seen = torch.ones(tokens, tokens, dtype=torch.bool).tril(ahead)
    return (query @ key.transpose(-1, -2) * SCALE).masked_fill(~seen, -torch.inf).softmax(-1) @ value


def in_blocks(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    return blocks.causal_attention(query, key, value, SCALE)


def distance(found: list[Tensor], wanted: list[Tensor]) -> float:
    return max(float((f.double() - w).norm() / w.norm()) for f, w in zip(found, wanted, strict=True))


@pytest.mark.parametrize("tokens", [1, 7, 128, 129, 300])
def test_blocks_equal_the_formula_to_bfloat16(tokens: int) -> None:
    wanted = run(formula, tokens, torch.float64)
    found = run(in_blocks, tokens, torch.bfloat16)
    assert {x.dtype for x in found} == {torch.bfloat16}
    if tokens == 1:  # one key: the softmax is 1 and no gradient passes it
        assert torch.equal(found[0].double(), operands(1)[2].bfloat16().double()) and not found[1].any()
        return
    assert distance(found, wanted) < 0.02  # measured 0.0061 to 0.0067; torch's fused kernel 0.0046 to 0.0055
    wrong = run(lambda *parts: formula(*parts, ahead=1), tokens, torch.float64)
    assert distance(found, wrong) > 0.1  # a query that sees one key too many: 0.28 to 0.70


def test_weights_formed_again_give_the_same_gradient(monkeypatch: pytest.MonkeyPatch) -> None:
    kept = run(in_blocks, 300, torch.bfloat16)
    saved = list[tuple[int, ...]]()

    def note(tensor: Tensor) -> Tensor:
        saved.append(tuple(tensor.shape))
        return tensor

    monkeypatch.setattr(blocks, "KEPT_BYTES", 0)
    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        again = run(in_blocks, 300, torch.bfloat16)
    assert all(torch.equal(a, b) for a, b in zip(kept, again, strict=True))
    assert saved and max(shape[-1] for shape in saved) == KEY  # nothing as long as the text is kept


def test_autocast_takes_the_blocks_and_gives_float32_gradients(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = list[torch.dtype]()

    def counted(query: Tensor, key: Tensor, value: Tensor, scale: float) -> Tensor:
        calls.append(query.dtype)
        return blocks.causal_attention(query, key, value, scale)

    monkeypatch.setattr("mla_convert.modeling.core.causal_attention", counted)
    mask = causal_mask(150, 150, torch.device("cpu"))

    def attention(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        return expanded_attention(query, key, value, SCALE, mask)

    plain = run(attention, 150, torch.float32)
    assert not calls
    with torch.autocast("cpu", torch.bfloat16):
        found = run(attention, 150, torch.float32)
    assert calls == [torch.float32] and {x.dtype for x in found[1:]} == {torch.float32}
    assert distance(found, [x.double() for x in plain]) < 0.02  # measured 0.0064
    # a soft cap, a mask of another kind, other lengths, a model in bfloat16: not theirs
    query, key, value, _ = (x.bfloat16() for x in operands(9))
    mask = causal_mask(9, 9, query.device)
    calls.clear()
    with torch.autocast("cpu", torch.bfloat16):
        expanded_attention(query, key, value, SCALE, mask, softcap=5.0)
        expanded_attention(query, key, value, SCALE, torch.ones(1, 1, 9, 9, dtype=torch.bool).tril())
        expanded_attention(query[..., 4:, :], key, value, SCALE, causal_mask(5, 9, query.device))
        expanded_attention(query, key, value, SCALE)
    expanded_attention(query, key, value, SCALE, mask)
    assert not calls
