"""Tasks of lm-evaluation-harness on a model already loaded, through its Python API. Optional: pip install lm_eval."""

from __future__ import annotations

from importlib import util
from typing import Any

from transformers import PreTrainedModel, PreTrainedTokenizerBase

from mla_convert.errors import BadOption
from mla_convert.evaluation.suite import HarnessSpec


def check_installed() -> None:
    """Raise BadOption where lm_eval cannot be imported."""
    if util.find_spec("lm_eval") is None:
        raise BadOption(
            "the suite names lm_eval tasks and lm_eval is not installed; pip install lm_eval, or leave them out"
        )


def harness_figures(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, task: str, spec: HarnessSpec, batch_size: int
) -> dict[str, Any]:
    """Every number the harness reports for `task`, by its own names, such as "acc" and "acc_stderr"."""
    import lm_eval
    from lm_eval.models.huggingface import HFLM
    from lm_eval.tasks import TaskManager

    class OneBos(HFLM):
        """The harness puts a BOS before a rolling text, and a tokenizer that adds its own would make it two."""

        add_bos_token: bool | None

        def loglikelihood_rolling(self, *args: Any, **kwargs: Any) -> Any:
            """As in the base class, the tokenizer's own BOS left out."""
            kept, self.add_bos_token = self.add_bos_token, False
            try:
                return super().loglikelihood_rolling(*args, **kwargs)
            finally:
                self.add_bos_token = kept

    adapter = OneBos(pretrained=model, tokenizer=tokenizer, batch_size=batch_size)
    try:
        found: Any = lm_eval.simple_evaluate(
            model=adapter,
            tasks=[task],
            num_fewshot=spec.shots,
            limit=spec.limit,
            task_manager=TaskManager(include_path=spec.include),
            bootstrap_iters=0,
        )
    except (KeyError, ValueError, OSError) as error:
        raise BadOption(f"lm_eval cannot run the task {task!r}: {error}") from error
    numbers = {
        name.removesuffix(",none"): value
        for name, value in found["results"][task].items()
        if isinstance(value, int | float) and not isinstance(value, bool)
    }
    return {"task": task, "numbers": numbers}
