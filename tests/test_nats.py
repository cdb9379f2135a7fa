"""From predicted errors and a few measured sizes to nats: exact on the law, through what was measured, honest apart."""

import pytest

from mla_convert.errors import BadOption
from mla_convert.planning.nats import Lost, in_nats, left_out

# Sizes as on a real model: rotations cost the same at most, the latent's errors grow as it shrinks.
LOST = [Lost(0.2, 0.4), Lost(0.01, 0.2), Lost(0.01, 0.05), Lost(0.01, 0.002)]


def law(lost: Lost) -> float:
    return 4 * lost.rope + 6 * lost.latent**1.31


def test_three_sizes_give_both_laws() -> None:
    """Every other size to the step of the exponent, 0.02: off by 0.9 % at most; the sum alone by 24 %."""
    measured = [(lost, law(lost)) for lost in LOST[:3]]
    for lost in (LOST[3], Lost(0.01, 0.1), Lost(0.05, 0.3), Lost(0.2, 0.4)):
        assert in_nats(lost, measured) == pytest.approx(law(lost), rel=0.02)
    total = [(Lost(0.0, lost.total), excess) for lost, excess in measured]  # negative control: the parts are not told
    assert in_nats(Lost(0.0, LOST[3].total), total) != pytest.approx(law(LOST[3]), rel=0.2)


def test_what_was_measured_is_met_and_bends_its_neighbourhood() -> None:
    measured = [(lost, law(lost) * factor) for lost, factor in zip(LOST, (1.0, 1.1, 0.9, 1.05), strict=True)]
    for lost, excess in measured:
        assert in_nats(lost, measured) == pytest.approx(excess, rel=1e-9)
    between = Lost(0.01, 0.1)
    assert law(between) * 0.9 < in_nats(between, measured) < law(between) * 1.1


def test_few_sizes_and_sizes_that_say_nothing() -> None:
    first, second = Lost(0.1, 0.3), Lost(0.02, 0.05)
    assert in_nats(Lost(0.2, 0.6), [(first, 1.2)]) == pytest.approx(2.4)  # one: in proportion
    two = [(first, 2 * 0.1 + 5 * 0.3), (second, 2 * 0.02 + 5 * 0.05)]
    assert in_nats(Lost(0.3, 0.1), two) == pytest.approx(2 * 0.3 + 5 * 0.1)  # two: each kind in proportion
    assert in_nats(Lost(0.2, 0.6), [(first, 1.2), (second, -0.01)]) == pytest.approx(2.4)
    assert in_nats(Lost(0.0, 0.0), two) == 0
    no_rope = [(Lost(0.0, x), 3 * x) for x in (0.1, 0.2, 0.4)]  # a model whose layers do not rotate
    assert in_nats(Lost(0.0, 0.3), no_rope) == pytest.approx(0.9)
    with pytest.raises(BadOption, match="no measured size lost anything on the held-out windows"):
        in_nats(first, [(first, -0.2)])


def test_each_size_is_judged_by_the_others() -> None:
    measured = [(lost, law(lost)) for lost in (*LOST, Lost(0.01, 0.1))]
    assert len(left_out(measured)) == 3 and max(left_out(measured)) < 0.02  # measured 0.005
    measured[2] = (measured[2][0], 2 * measured[2][1])  # negative control
    assert max(left_out(measured)) > 0.3
    assert left_out(measured[:2]) == []
