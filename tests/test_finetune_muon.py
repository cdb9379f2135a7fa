"""finetune --optimizer muon: steps of the promised size that win, resumable, refused where Muon cannot work."""

import os
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from tuning import Made, made_in, native_made_in, tune, weights

from mla_convert.errors import BadOption, MlaConvertError
from mla_convert.interface.finetune_recipe import FinetuneRecipe
from mla_convert.training.muon import Muon, orthogonal
from mla_convert.training.train_model import Student

MUON = {"optimizer": "muon", "learning_rate": 0.02}


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Made:
    return made_in(tmp_path_factory.mktemp("muon"))


@pytest.mark.parametrize("train", ["attention", "layers"])
def test_muon_wins_and_continues_where_it_was_stopped(made: Made, tmp_path: Path, train: str) -> None:
    whole = tune(made, tmp_path / "whole", train=train, **MUON)
    assert whole.kl_after < 0.9 * whole.kl_before  # measured 0.80 and 0.73
    calls = 0
    forward = Student.forward

    def stop_at_the_ninth(self: Student, *args: object, **kwargs: object) -> dict[str, torch.Tensor]:
        nonlocal calls
        calls += self.training
        if calls == 9 and self.training:
            os.kill(os.getpid(), signal.SIGTERM)
        return forward(self, *args, **kwargs)  # type: ignore[arg-type]

    out = tmp_path / "out"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Student, "forward", stop_at_the_ninth)
        with pytest.raises(MlaConvertError, match="the same command continues"):
            tune(made, out, train=train, **MUON)
    assert tune(made, out, train=train, **MUON).curve == whole.curve
    written, expected = weights(out), weights(tmp_path / "whole")
    assert all(torch.equal(written[name], expected[name]) for name in expected)


def test_what_muon_cannot_move_is_refused(made: Made, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(BadOption, match="optimizer=muon moves matrices, and train=all has other parameters too"):
        FinetuneRecipe(source="a", converted="b", out="c", train="all", optimizer="muon")
    with pytest.raises(BadOption, match="train=lora"):
        FinetuneRecipe(source="a", converted="b", out="c", train="lora", optimizer="muon")
    monkeypatch.setenv("ACCELERATE_USE_FSDP", "true")  # as `accelerate launch` says it
    with pytest.raises(BadOption, match="optimizer=muon needs whole matrices and FSDP shards them; use --optimizer"):
        tune(made, tmp_path / "out", **MUON)


def test_stacked_experts_are_moved_one_by_one(tmp_path: Path) -> None:
    made = native_made_in(tmp_path, "mixtral")
    result = tune(made, tmp_path / "out", train="layers", **MUON)
    assert result.kl_after < 0.95 * result.kl_before  # measured 0.61
    before, after = weights(made[1]), weights(tmp_path / "out")
    experts = [name for name in before if "experts" in name and before[name].ndim > 1]
    assert experts and not any(torch.equal(before[name], after[name]) for name in experts)


# the optimiser itself


def steps_of(optimizer: Any, start: torch.Tensor, count: int = 3) -> torch.Tensor:
    parameter = torch.nn.Parameter(start.clone())
    moving = optimizer([parameter])
    for step in range(count):
        parameter.grad = torch.randn(start.shape, generator=torch.Generator().manual_seed(step))
        moving.step()
    return parameter.detach() - start


@pytest.mark.parametrize("shape", [(5, 17), (17, 5), (24, 24)])
def test_muon_is_that_of_torch(shape: tuple[int, int]) -> None:
    start = torch.zeros(shape)
    reference = {"lr": 0.05, "weight_decay": 0.0, "momentum": 0.9, "adjust_lr_fn": "match_rms_adamw"}
    wanted = steps_of(lambda p: torch.optim.Muon(p, **reference), start)
    found = steps_of(lambda p: Muon(p, lr=0.05, momentum=0.9), start)
    assert float((found - wanted).norm() / wanted.norm()) < 0.06  # roundings of bfloat16: measured 0.028
    exact = steps_of(lambda p: Muon(p, lr=0.05, momentum=0.9, compute=torch.float32), start)
    assert float((exact - wanted).norm() / wanted.norm()) < 0.03  # measured 0.013
    other = steps_of(lambda p: Muon(p, lr=0.05, momentum=0.5), start)  # negative control
    assert float((other - wanted).norm() / wanted.norm()) > 0.1  # measured 0.25


def test_singular_values_become_one_and_stacks_stay_apart() -> None:
    matrices = torch.randn(3, 12, 30, generator=torch.Generator().manual_seed(0)) * torch.tensor([1.0, 1e-3, 1e3])[
        :, None, None
    ]  # fmt: skip
    found = orthogonal(matrices, torch.float32)
    values = torch.linalg.svdvals(found)
    assert float(values.min()) > 0.6 and float(values.max()) < 1.3  # measured 0.68 and 1.13
    assert float(torch.linalg.svdvals(matrices[0] / matrices[0].norm()).min()) < 0.2  # they were 0.09 to 0.48
    alone = torch.stack([orthogonal(each, torch.float32) for each in matrices])
    torch.testing.assert_close(found, alone, rtol=1e-5, atol=1e-6)
