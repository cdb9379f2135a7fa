import logging
from pathlib import Path

import pytest
import tiny_text
import torch
from safetensors.torch import load_file, save_file

from mla_convert.errors import BadCheckpoint, BadOption
from mla_convert.source.loading import (
    load_model,
    load_model_and_report,
    load_tokenizer,
    locate,
    resolve_device,
    resolve_dtype,
)

CPU = torch.device("cpu")
FILE = "model.safetensors"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    tiny_text.save(tiny_text.llama(), tmp_path / "m")
    return tmp_path / "m"


def test_a_folder_is_loaded_for_inference_in_the_dtype_asked_for(folder: Path) -> None:
    model = load_model(folder, torch.bfloat16, CPU)
    assert model.dtype == torch.bfloat16 and not model.training
    assert not any(parameter.requires_grad for parameter in model.parameters())
    assert model.config._attn_implementation == "sdpa"
    assert load_tokenizer(folder)("w1")["input_ids"] == [4]


def test_a_missing_tensor_is_an_error_and_not_random_weights(folder: Path) -> None:
    tensors = load_file(folder / FILE)
    del tensors["model.layers.1.mlp.up_proj.weight"]
    save_file(tensors, folder / FILE, metadata={"format": "pt"})
    with pytest.raises(BadCheckpoint, match=r"missing \['model\.layers\.1\.mlp\.up_proj\.weight'\]"):
        load_model(folder, torch.float32, CPU)
    _, report = load_model_and_report(folder, torch.float32, CPU)
    assert report.missing == ("model.layers.1.mlp.up_proj.weight",)


def test_an_unused_tensor_is_named_in_a_warning(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    tensors = load_file(folder / FILE) | {"ghost.weight": torch.ones(1)}
    save_file(tensors, folder / FILE, metadata={"format": "pt"})
    with caplog.at_level(logging.WARNING, logger="mla_convert.source.loading"):
        load_model(folder, torch.float32, CPU)
    assert "1 tensors are not used by LlamaForCausalLM, first ghost.weight" in caplog.text


def test_a_pickle_is_never_read(folder: Path) -> None:
    torch.save(load_file(folder / FILE), folder / "pytorch_model.bin")
    (folder / FILE).unlink()
    with pytest.raises(BadCheckpoint, match="cannot load it as a causal language model"):
        load_model(folder, torch.float32, CPU)


def test_remote_code_is_never_run(folder: Path) -> None:
    config = (folder / "config.json").read_text()
    config = config.replace('"model_type": "llama"', '"model_type": "x", "auto_map": {"AutoConfig": "x.X"}')
    (folder / "config.json").write_text(config)
    (folder / "x.py").write_text("raise SystemExit('ran')")
    with pytest.raises(BadCheckpoint, match="cannot load it"):
        load_model(folder, torch.float32, CPU)


def test_what_is_no_checkpoint_is_named(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(BadCheckpoint, match=r"a file, but not \.gguf"):
        locate(folder / "config.json")
    with pytest.raises(BadCheckpoint, match=r"\./no/such: no such folder or file"):
        locate("./no/such")
    assert locate("owner/name") == ("owner/name", {})
    for name in ("a.gguf", "b.gguf"):
        (tmp_path / name).write_bytes(b"")
    with pytest.raises(BadCheckpoint, match=r"2 \.gguf files; name one of them"):
        locate(tmp_path)
    (tmp_path / "b.gguf").unlink()
    assert locate(tmp_path) == locate(tmp_path / "a.gguf") == (str(tmp_path), {"gguf_file": "a.gguf"})
    with pytest.raises(BadCheckpoint, match="no tokenizer can be loaded"):
        load_tokenizer(tmp_path)


def test_unknown_devices_and_dtypes_are_named() -> None:
    assert resolve_device("cpu") == CPU
    assert resolve_device("auto").type == ("cuda" if torch.cuda.is_available() else "cpu")
    assert resolve_dtype("bfloat16") == torch.bfloat16
    with pytest.raises(BadOption, match='device="tpux" is no torch device'):
        resolve_device("tpux")
    with pytest.raises(BadOption, match='dtype="float16" is not one of'):
        resolve_dtype("float16")


def test_a_gpu_that_is_not_there_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(BadOption, match="torch sees no GPU here; use --device auto or cpu"):
        resolve_device("cuda")
