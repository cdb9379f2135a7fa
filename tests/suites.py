"""What the tests of suites share: a small suite, models to compare, and one run of it."""

from pathlib import Path
from typing import Any

from tiny import tiny_model

import mla_convert

SUITE = """
name: small
window: 64
windows: 5
texts:
  technical: {python: topics}
  code: {python: stdlib}
  chat: {python: topics, chat: true}
decode: {windows: 1, tokens: 12}
retrieval:
  passkey: {keys: 1, lengths: [170, 300], depths: [0.0, 1.0], trials: 2}
greedy: {prompts: 2, prompt_tokens: 16, new_tokens: 4}
bfloat16: true
bootstrap: {samples: 200, confidence: 0.9}
"""


def models_in(folder: Path) -> dict[str, str]:
    """A source, its copy, two conversions and the suite's file, by name."""
    source = tiny_model(folder / "source")
    tiny_model(folder / "copy")
    for rank in (4, 20):
        mla_convert.convert(
            source=source, out=folder / f"mla{rank}", kv_lora_rank=rank, qk_rope_head_dim=10, window=64, calib_windows=4
        )
    (folder / "suite.yaml").write_text(SUITE)
    return {path.name: str(path) for path in folder.iterdir()}


def run(models: dict[str, str], parts: Path, *names: str, suite: str | None = None, **options: Any) -> Any:
    """Run the suite on the models of these names; finished parts are kept in `parts`."""
    file = models["suite.yaml"] if suite is None else suite
    return mla_convert.run_suite(models=tuple(models[name] for name in names), suite=file, parts=str(parts), **options)


def by_label(result: Any) -> dict[str, Any]:
    """The parts of every model of a result, by its label."""
    return {model.label: model.parts for model in result.models}
