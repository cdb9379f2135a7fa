"""The form in which finetune trains a stock model: it computes the same, in unit sizes, with adapters or without."""

from pathlib import Path

import pytest
import torch
from tuning import PROJECTIONS, Made, made_in

import mla_convert
from mla_convert.formats.stock import residual_scale
from mla_convert.source.loading import load_model
from mla_convert.training.distill import LossWeights
from mla_convert.training.teacher import LiveTeacher
from mla_convert.training.train_form import (
    choose_trained,
    close_latent,
    latents,
    merge_adapters,
    open_latent,
    unit_latent,
)
from mla_convert.training.train_model import Student

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Made:
    return made_in(tmp_path_factory.mktemp("finetune"))


def test_opened_and_closed_latent_computes_the_same(made: Made) -> None:
    ids = torch.randint(0, 256, (2, 40), generator=torch.Generator().manual_seed(0))
    model = load_model(made[1], torch.float32, CPU)

    def logits() -> torch.Tensor:
        with torch.no_grad():
            return model(input_ids=ids, use_cache=False).logits

    before = logits()
    stored = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    open_latent(model)
    opened = logits()
    unit_latent(model, ids)
    unit = logits()
    seen: list[torch.Tensor] = []
    hook = latents(model)[0].attention.kv_a_layernorm.register_forward_hook(lambda m, a, o: seen.append(o))
    logits()
    hook.remove()
    latent = seen[0].flatten(0, -2)
    torch.testing.assert_close(latent.T @ latent / len(latent), torch.eye(8), rtol=0, atol=2e-4)  # measured 3e-6
    close_latent(model, torch.float32)
    closed = logits()
    size = float(before.abs().max())
    for found in (opened, unit, closed):
        assert float((found - before).abs().max()) < 5e-6 * size  # measured 6e-7
    assert {name: tensor.shape for name, tensor in model.state_dict().items()} == {
        name: tensor.shape for name, tensor in stored.items()
    }
    with torch.no_grad():  # control: without its gain the latent is a millionth
        latents(model)[0].attention.kv_a_layernorm.weight.fill_(1.0)
    assert float((logits() - before).abs().max()) > 0.01 * size


def test_rounding_of_the_norm_weight_is_put_into_the_matrix(made: Made) -> None:
    model = load_model(made[1], torch.float32, CPU)
    ids = torch.arange(40)[None]
    with torch.no_grad():
        before = model(input_ids=ids, use_cache=False).logits
        open_latent(model)
        close_latent(model, torch.bfloat16)
        norm = latents(model)[0].attention.kv_a_layernorm.weight
        assert torch.equal(norm, norm.to(torch.bfloat16).float())
        after = model(input_ids=ids, use_cache=False).logits
        for latent in latents(model):  # control: the constant as it is without rounding
            latent.attention.kv_a_layernorm.weight.mul_(norm.mul(1e3).log2().round().exp2() / norm / 1e3)
        control = model(input_ids=ids, use_cache=False).logits
    size = float(before.abs().max())
    assert float((after - before).abs().max()) < 5e-6 * size  # measured 4e-7
    assert float((control - before).abs().max()) > 2e-5 * size


def test_merged_adapters_compute_what_adapters_compute(made: Made) -> None:
    ids = torch.arange(40)[None]
    model = load_model(made[1], torch.float32, CPU)
    names = set(model.state_dict())
    open_latent(model)
    choose_trained(model, "lora", lora_rank=3, seed=0)
    trained = {name for name, p in model.named_parameters() if p.requires_grad}
    assert len(trained) == 2 * 2 * len(PROJECTIONS) and all("lora_" in name for name in trained)
    with torch.no_grad():
        plain = model(input_ids=ids, use_cache=False).logits
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                parameter.copy_(0.1 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(1)))
        adapted = model(input_ids=ids, use_cache=False).logits
        merge_adapters(model)
        close_latent(model, torch.float32)
        merged = model(input_ids=ids, use_cache=False).logits
    assert set(model.state_dict()) == names
    assert type(latents(model)[0].attention.kv_b_proj) is torch.nn.Linear
    size = float(adapted.abs().max())
    assert float((merged - adapted).abs().max()) < 1e-5 * size  # measured 4e-7
    assert float((adapted - plain).abs().max()) > 0.05 * size


def test_hidden_states_are_compared_at_the_sources_scale(made: Made, tmp_path: Path) -> None:
    mla_convert.convert(source=made[0], out=str(tmp_path / "exact"), lossless=True)
    model = load_model(tmp_path / "exact", torch.float32, CPU)
    open_latent(model)
    teacher = LiveTeacher(load_model(made[0], torch.float32, CPU), torch.float32, states=True)
    ids = torch.arange(40)[None]
    scale = residual_scale(1e-5)
    assert scale == pytest.approx(10**-0.5)
    both = [
        Student(model, teacher.head, LossWeights(1.0, 1.0, 1.0), s)(ids, teacher(ids))["loss"] for s in (scale, 1.0)
    ]
    assert abs(float(both[0])) < 1e-6  # measured 1e-8
    assert float(both[1]) > 0.1


def test_latent_and_slots_get_unit_size_and_the_function_stays(made: Made) -> None:
    ids = torch.randint(0, 256, (3, 40), generator=torch.Generator().manual_seed(4))
    model = load_model(made[1], torch.float32, CPU)
    open_latent(model)
    attention = latents(model)[1].attention
    rope = attention.qk_rope_head_dim
    with torch.no_grad():  # one slot of another size, as a metric with weights may leave it
        attention.kv_a_proj_with_mqa.weight[-2:] *= 1e-4
        attention.q_proj.weight.unflatten(0, (-1, attention.qk_head_dim))[:, -2:] *= 1e4
        plain = model(input_ids=ids, use_cache=False).logits
        seen: list[torch.Tensor] = []
        attention.kv_a_proj_with_mqa.register_forward_hook(lambda module, args, out: seen.append(out.flatten(0, 1)))
        model(input_ids=ids)
        unit_latent(model, ids)
        seen.clear()
        after = model(input_ids=ids, use_cache=False).logits
    assert float((after - plain).abs().max()) < 1e-4 * float(plain.abs().max())  # fp32; measured 4e-7
    moment = seen[0].T @ seen[0] / len(seen[0])
    # Measured 2.4e-7 and, of the slots, 1.2e-7; before, one slot stood at 9e-9.
    torch.testing.assert_close(moment[:-rope, :-rope], torch.eye(len(moment) - rope), rtol=0, atol=1e-2)
    slots = moment.diagonal()[-rope:].unflatten(0, (-1, 2)).mean(1)
    torch.testing.assert_close(slots, torch.ones(rope // 2), rtol=1e-3, atol=0)
