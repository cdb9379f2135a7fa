"""Layers whose attention has no effect (pruned, zeroed) are converted to finite tensors, healed or not."""

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from tiny import edit_tensors, tiny_model

import mla_convert
from mla_convert.errors import MlaConvertError
from mla_convert.output.write import FolderWriter

TEXT = " ".join(f"line {i} says {i * i % 97}." for i in range(900))
ZERO = {
    "values": ["self_attn.v_proj.weight"],
    "output": ["self_attn.o_proj.weight"],
    "keys and values": ["self_attn.k_proj.weight", "self_attn.v_proj.weight"],
    "input norm": ["input_layernorm.weight"],
}


@pytest.mark.parametrize("heal", [None, "steps=3,windows=8"])
@pytest.mark.parametrize("dead", ZERO)
def test_a_dead_layer_stays_finite(tmp_path: Path, dead: str, heal: str | None) -> None:
    source = tiny_model(tmp_path / "source", dtype=torch.float32, projection_std=0.1)
    weights = load_file(source / "model.safetensors")
    zeroed: dict[str, Any] = {}
    for name in ZERO[dead]:
        full = f"model.layers.1.{name}"
        zeroed[full.replace(".", "__")] = torch.zeros_like(weights[full])
    edit_tensors(source, **zeroed)
    (tmp_path / "text.txt").write_text(TEXT)
    mla_convert.convert(
        source=str(source), out=str(tmp_path / "out"), kv_lora_rank=14, qk_rope_head_dim=6, rope_stride=1, heal=heal,
        window=64, calib_windows=8, calib_data=(str(tmp_path / "text.txt"),),
    )  # fmt: skip
    written = load_file(tmp_path / "out" / "model.safetensors")
    largest = max(tensor.abs().max().item() for name, tensor in written.items() if "kv_a_layernorm" not in name)
    assert largest < 1e4  # measured at most 40; the balancing once gave infinities
    failed = [c.name for c in mla_convert.verify(source=str(source), converted=str(tmp_path / "out")).checks
              if c.passed is False]  # fmt: skip
    assert failed == []


def test_the_writer_refuses_what_is_not_finite(tmp_path: Path) -> None:
    with (
        pytest.raises(MlaConvertError, match="x came out with 2 of 4 values not finite"),
        FolderWriter(tmp_path / "out", 100) as writer,
    ):
        writer.add("x", torch.tensor([1.0, float("inf"), 2.0, float("nan")]))
    assert list(tmp_path.iterdir()) == []
