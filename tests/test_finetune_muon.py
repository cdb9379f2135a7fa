"""finetune --optimizer muon: steps of the promised size that win, resumable, refused where Muon cannot work."""

import os
import signal
from pathlib import Path

import pytest
import torch
from tuning import Made, made_in, native_made_in, tune, weights

from mla_convert.errors import BadOption, MlaConvertError
from mla_convert.finetune_recipe import FinetuneRecipe
from mla_convert.train_model import Student

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


def test_what_muon_cannot_move_is_refused(made: Made, tmp_path: Path) -> None:
    with pytest.raises(BadOption, match="optimizer=muon moves matrices, and train=all has other parameters too"):
        FinetuneRecipe(source="a", converted="b", out="c", train="all", optimizer="muon")
    with pytest.raises(BadOption, match="train=lora"):
        FinetuneRecipe(source="a", converted="b", out="c", train="lora", optimizer="muon")
    experts = native_made_in(tmp_path, "mixtral")
    with pytest.raises(BadOption, match=r"experts\.\w+ has 3 dimensions .*use --train attention"):
        tune(experts, tmp_path / "out", train="layers", **MUON)
