"""finetune under `accelerate launch`: two processes train as one does."""

import json
import os
import random
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from tiny import tiny_model

import mla_convert

ROOT = Path(__file__).parent.parent


def two_processes(config: str, folder: Path) -> Path:
    """The shipped config `config`, on two processes of the CPU."""
    content = yaml.safe_load((ROOT / "recipes" / "accelerate" / config).read_text(encoding="utf-8"))
    path = folder / config
    path.write_text(yaml.safe_dump(content | {"num_processes": 2, "use_cpu": True}), encoding="utf-8")
    return path


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "script", "family"),
    [
        ("cpu_2_processes.yaml", ("-m", "mla_convert.cli"), "llama"),
        ("fsdp2_8_gpus.yaml", (str(ROOT / "tests" / "fsdp_on_cpu.py"),), "llama"),
        ("fsdp2_8_gpus.yaml", (str(ROOT / "tests" / "fsdp_on_cpu.py"),), "qwen3"),  # native
    ],
)
def test_two_processes_train_as_one(tmp_path: Path, name: str, script: tuple[str, ...], family: str) -> None:
    source = str(tiny_model(tmp_path / "source", family, num_hidden_layers=2, projection_std=0.15))
    text, converted = tmp_path / "text.txt", str(tmp_path / "converted")
    rng = random.Random(0)
    text.write_text(" ".join(rng.choice(["the", "cache", "of", "latent", "keys"]) for _ in range(2000)))
    mla_convert.convert(
        source=source, out=converted, kv_lora_rank=8, qk_rope_head_dim=4, calib_data=(str(text),), window=64
    )
    options: dict[str, Any] = {"window": 32, "batch_size": 4, "tokens": 20 * 4 * 32, "eval_every": 10, "held_out": 4}
    options["learning_rate"] = 0.003
    alone = mla_convert.finetune(
        source=source, converted=converted, out=str(tmp_path / "one"), data=(str(text),), dtype="float32",
        device="cpu", **options,
    )  # fmt: skip
    flags = [f"--{key.replace('_', '-')}={value}" for key, value in options.items()]
    config = two_processes(name, tmp_path)
    launch = [sys.executable, "-m", "accelerate.commands.launch", "--config_file", str(config), *script]
    command = [*launch, "finetune", source, converted, "--out", str(tmp_path / "two"), "--data", str(text), *flags]
    paths = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    run = subprocess.run(
        [*command, "--dtype=float32", "--device=cpu"],
        env={**os.environ, "PYTHONPATH": paths},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert run.returncode == 0, run.stderr[-3000:]
    assert run.stdout.count("written to") == 1 == run.stderr.count("windows to train on")  # by the main process
    record = json.loads((tmp_path / "two" / "conversion.json").read_text())["finetune"]
    assert record["processes"] == 2
    curve = record["curve"]
    assert len(curve) == len(alone.curve) == 20 + 3
    for ours, theirs in zip(alone.curve, curve, strict=True):
        for key in ("loss", "eval_kl", "eval_ce"):
            assert (key in ours) == (key in theirs)
            if key in ours:
                assert theirs[key] == pytest.approx(ours[key], rel=1e-5)  # measured 1e-6
    # control: the curve is no constant
    assert alone.kl_after < 0.9 * alone.kl_before
