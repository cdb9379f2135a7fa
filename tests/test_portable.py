"""`convert --self-contained`: the folder's own code gives the installed classes' logits, without the package."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from tiny import tiny_model
from transformers import AutoModelForCausalLM, AutoTokenizer

import mla_convert
from mla_convert.output.portable import auto_map, code_files, file_stem
from mla_convert.source.family_table import FAMILIES
from mla_convert.verification.check_native import code_is_ours

IDS = torch.randint(0, 250, (2, 40), generator=torch.Generator().manual_seed(5))
SIZE = {"kv_lora_rank": 12, "qk_rope_head_dim": 4, "method": "svd", "keep_layers": "none", "format": "native"}
# Run where neither this package nor what only this package needs can be imported.
LOADER = """
import sys
class Blocked:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in ("mla_convert", "jaxtyping", "typer"):
            raise ModuleNotFoundError(f"{name} is blocked")
sys.meta_path.insert(0, Blocked())
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoTokenizer
def load(folder):
    return AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=True, attn_implementation="eager").eval()
root, *families = sys.argv[1:]
ids = load_file(f"{root}/ids.safetensors")["ids"]
for family in families:
    folder, again = f"{root}/{family}", f"{root}/{family}-again"
    model = load(folder).requires_grad_(False)
    found = {"logits": model(input_ids=ids).logits.contiguous()}
    found["text"] = model.generate(ids, max_new_tokens=5, do_sample=False)
    tokenizer = AutoTokenizer.from_pretrained(folder, trust_remote_code=True)
    found["cut"] = tokenizer("a b", return_tensors="pt")["input_ids"]
    model.save_pretrained(again)
    found["again"] = load(again)(input_ids=ids).logits.detach().contiguous()
    save_file(found, f"{root}/{family}-found.safetensors")
assert "mla_convert" not in sys.modules
"""


def run_elsewhere(root: Path, families: list[str]) -> None:
    save_file({"ids": IDS}, root / "ids.safetensors")
    (root / "loader.py").write_text(LOADER)
    modules = {"HF_MODULES_CACHE": str(root / "modules"), "HF_HUB_OFFLINE": "1", "PATH": "", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, str(root / "loader.py"), str(root), *families]
    subprocess.run(command, check=True, env=modules, cwd=root)


@pytest.fixture(scope="module")
def elsewhere(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A self-contained conversion of every family, and what a Python without the package made of it."""
    root = tmp_path_factory.mktemp("portable")
    for family in FAMILIES:
        source = tiny_model(root / f"{family}-source", family)
        mla_convert.convert(source=str(source), out=str(root / family), self_contained=True, **SIZE)
    run_elsewhere(root, list(FAMILIES))
    return root


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
def test_the_folder_loads_without_the_package(elsewhere: Path, family: str) -> None:
    found = load_file(elsewhere / f"{family}-found.safetensors")
    installed = AutoModelForCausalLM.from_pretrained(elsewhere / family, attn_implementation="eager").eval()
    assert type(installed).__module__ == "mla_convert.modeling.classes"
    with torch.no_grad():
        wanted = installed(input_ids=IDS).logits
    assert torch.equal(found["logits"], wanted) and torch.equal(found["again"], wanted)
    assert torch.equal(found["text"], installed.generate(IDS, max_new_tokens=5, do_sample=False))
    assert found["cut"][0].tolist() == AutoTokenizer.from_pretrained(elsewhere / family)("a b")["input_ids"]


def test_without_the_flag_there_is_no_code(tmp_path: Path) -> None:
    source, out = tiny_model(tmp_path / "source", "qwen3"), tmp_path / "qwen3"
    mla_convert.convert(source=str(source), out=str(out), **SIZE)
    assert not list(out.glob("*.py"))
    assert "auto_map" not in json.loads((out / "config.json").read_text())
    assert "trust_remote_code" not in (out / "README.md").read_text()
    with pytest.raises(subprocess.CalledProcessError):  # the control: this folder needs the package
        run_elsewhere(tmp_path, ["qwen3"])


def test_it_is_refused_where_no_code_is_needed(tmp_path: Path) -> None:
    source = tiny_model(tmp_path / "source", "llama")
    options: dict[str, Any] = {"self_contained": True, "lossless": True}
    with pytest.raises(mla_convert.BadOption, match="stock format .* needs no code .* --format native"):
        mla_convert.convert(source=str(source), out=str(tmp_path / "out"), **options)
    assert not (tmp_path / "out").exists()


def test_the_files_name_only_each_other() -> None:
    files = code_files()
    for text in files.values():
        assert not [line for line in text.splitlines() if line.lstrip().startswith(("import mla_", "from mla_convert"))]
        compile(text, "file", "exec")
    assert {f"{file_stem(module)}.py" for module in ("mla_convert.modeling.attention", "mla_convert.errors")} < set(
        files
    )
    assert not any("triton" in name or "dispatch" in name for name in files)


@pytest.mark.parametrize("family", FAMILIES)
def test_the_auto_map_names_the_classes(family: str) -> None:
    from mla_convert.modeling import classes, configs

    names = {key: value.partition(".")[2] for key, value in auto_map(family).items()}
    made = classes.native_classes(family)
    assert (getattr(configs, names["AutoConfig"]), getattr(classes, names["AutoModelForCausalLM"])) == made
    with pytest.raises(AttributeError, match="has no attribute 'MLANothing'"):
        _ = (configs if family == "llama" else classes).MLANothing


def test_verify_and_heal_keep_the_code(tmp_path: Path) -> None:
    source, out, healed = tiny_model(tmp_path / "source", "qwen3"), tmp_path / "out", tmp_path / "healed"
    large = SIZE | {"kv_lora_rank": 26, "qk_rope_head_dim": 10}
    mla_convert.convert(source=str(source), out=str(out), self_contained=True, **large)
    checks = mla_convert.verify(source=str(source), converted=str(out), window=64)
    assert checks.passed, [check for check in checks.checks if check.passed is False]
    text = tmp_path / "text.txt"
    text.write_text("".join(chr(97 + i * i % 26) for i in range(600)))
    options: dict[str, Any] = {"data": [str(text)], "windows": 6, "held_out": 2, "steps": 2, "window": 64}
    mla_convert.heal(source=str(source), converted=str(out), out=str(healed), **options)
    config = json.loads((healed / "config.json").read_text())
    assert code_is_ours(healed, config).passed and len(list(healed.glob("*.py"))) == len(code_files())


@pytest.mark.parametrize("damage", ["edited", "foreign", "missing", "auto_map", "pickle"])
def test_foreign_code_is_seen(tmp_path: Path, damage: str) -> None:
    for name, text in code_files().items():
        (tmp_path / name).write_text(text)
    config: dict[str, Any] = {"model_type": "mla_qwen3", "auto_map": auto_map("qwen3")}
    assert code_is_ours(tmp_path, config).passed
    changed = tmp_path / next(iter(code_files()))
    if damage == "edited":
        changed.write_text(changed.read_text() + "\nimport os\n")
    elif damage == "missing":
        changed.unlink()
    elif damage == "auto_map":
        config["auto_map"] = auto_map("qwen2")
    else:
        (tmp_path / ("extra.py" if damage == "foreign" else "model.bin")).write_text("")
    said = {"edited": "differs from", "missing": "missing", "foreign": "no file that mla_convert writes"}
    check = code_is_ours(tmp_path, config)
    assert not check.passed and said.get(damage, damage) in check.detail
