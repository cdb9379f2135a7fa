"""Verify: reload source and result the stock way and say, check by check, whether the written files are
right.
"""

from __future__ import annotations

import logging
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedTokenizerBase

from mla_convert.calibration.texts import read_documents, token_windows
from mla_convert.errors import BadCheckpoint, BadOption
from mla_convert.evaluation.evaluate import cache_bytes
from mla_convert.formats.native import is_native
from mla_convert.interface import report
from mla_convert.interface.recipe import VerifyRecipe
from mla_convert.output.record import read_record
from mla_convert.source.checkpoint import Checkpoint
from mla_convert.source.loading import load_model, load_model_and_report, load_tokenizer, resolve_device
from mla_convert.verification import check_files, check_models, check_native
from mla_convert.verification.check_files import Check

logger = logging.getLogger(__name__)

MUST_RUN = (
    "config is stock DeepSeek-V3",
    "config is the source's with latent attention",
    "tensor names and shapes",
)  # without these no class can run the model
FEW_TOKENS = 32  # a tokenizer that maps English to fewer distinct ids than this is not one for English


@dataclass(frozen=True)
class VerifyResult:
    """All checks of one verification, in the order they ran."""

    source: str
    converted: str
    checks: tuple[Check, ...]

    @property
    def passed(self) -> bool:
        """Whether no check failed (information lines do not count)."""
        return all(check.passed is not False for check in self.checks)

    def to_json(self) -> dict[str, Any]:
        """Plain JSON values, with versions and machine."""
        return {"passed": self.passed, **asdict(self), "environment": report.environment()}


@dataclass(frozen=True, eq=False)
class SourceFacts:
    """What is kept of the source once its model is dropped: logits [tokens, vocab] in fp32 and bf16, cache
    bytes.
    """

    logits: torch.Tensor
    bf16_logits: torch.Tensor
    cache_bytes: int


def verify(recipe: VerifyRecipe) -> VerifyResult:
    """Run every check of `recipe.converted` against `recipe.source`, one model in memory at a time.

    Where the files already contradict the stock class, the model is not run and the result holds the file
    checks. Raises BadCheckpoint when one of the two cannot be read or CONVERTED has no conversion.json,
    BadOption for an unusable option.
    """
    device = resolve_device(recipe.device)
    if recipe.json is not None and not Path(recipe.json).expanduser().absolute().parent.is_dir():
        raise BadOption(f"{recipe.json}: its folder does not exist; create it first")
    record = read_record(recipe.converted, source=recipe.source)
    source, converted = Checkpoint.open(recipe.source), Checkpoint.open(recipe.converted)
    checks = check_files.source_accounted(source, record)
    if is_native(converted.config):
        checks += check_native.config_is_native(source.config, converted.config, record)
    else:
        checks += check_files.config_is_stock(source.config, converted.config, record)
    checks += check_files.tensors_are_stock(converted)
    if is_native(converted.config):
        checks.append(check_native.code_is_ours(recipe.converted, converted.config))
    else:
        checks.append(check_files.no_code(recipe.converted))
    checks.append(check_files.generation_kept(source, converted))
    tokenizer = _tokenizer(recipe.source)
    if tokenizer is not None:
        checks.append(check_files.tokenizer_kept(tokenizer, _tokenizer(recipe.converted)))
    ids = sample_ids(tokenizer, recipe.window, int(converted.config["vocab_size"]))
    broken = [check.name for check in checks if check.name in MUST_RUN and not check.passed]
    if broken:
        checks.append(Check("model run", False, detail=f"not run: {', '.join(broken)} failed"))
    else:
        facts = source_facts(recipe.source, ids, device)
        try:
            checks += run_converted(recipe.converted, ids, facts, record, device)
        except Exception as error:  # whatever a stock class raises on these files is a failed check
            logger.warning("%s does not run", recipe.converted, exc_info=True)
            checks.append(Check("model run", False, detail=f"{type(error).__name__}: {error}"))
    result = VerifyResult(recipe.source, recipe.converted, tuple(checks))
    if recipe.json is not None:
        report.write_json(result.to_json(), recipe.json)
    return result


def run_converted(
    folder: str, ids: torch.Tensor, facts: SourceFacts, record: dict[str, Any], device: torch.device
) -> list[Check]:
    """Load the converted model in fp32 and run every check that needs it."""
    model, loaded = load_model_and_report(folder, torch.float32, device)
    checks = [check_files.loads_cleanly(loaded.missing, loaded.unexpected, loaded.mismatched)]
    logits = check_models.forward_logits(model, ids)
    if logits.shape != facts.logits.shape:
        detail = f"logits {list(logits.shape)}, source {list(facts.logits.shape)}"
        return [*checks, Check("same vocabulary", False, None, None, detail)]
    lossless = bool(record.get("lossless", False))
    rounded = torch.bfloat16 in {header.dtype for header in Checkpoint.open(folder).headers.values()}
    checks += check_models.agrees(facts.logits, logits.cpu(), facts.bf16_logits, lossless, rounded)
    with report.progress("decoding", "tokens", 3 * len(ids)) as advance:
        checks += check_models.cache_is_exact(model, ids, logits, advance)
    checks += check_models.padding_is_inert(model, ids)
    config = model.config
    checks.append(check_models.cache_is_small(model, facts.cache_bytes, len(ids)))
    exact = check_native.native_layers_are_exact if is_native(config.to_dict()) else check_models.layers_are_exact
    with report.progress("comparing layers", "layers", config.num_hidden_layers) as advance:
        checks += exact(model, folder, ids, advance)
    return checks


def source_facts(source: str, ids: torch.Tensor, device: torch.device) -> SourceFacts:
    """Run the source once in fp32 and once in bf16; each model is dropped before the next is loaded."""
    model = load_model(source, torch.float32, device)
    logits = check_models.forward_logits(model, ids).cpu()
    held = cache_bytes(model, len(ids))
    del model
    model = load_model(source, torch.bfloat16, device)
    return SourceFacts(logits, check_models.forward_logits(model, ids).cpu(), held)


def sample_ids(tokenizer: PreTrainedTokenizerBase | None, window: int, vocab_size: int) -> torch.Tensor:
    """The tokens compared, int64 [window]: English text where the tokenizer reads it, else ids drawn with
    seed 0.
    """
    if tokenizer is not None:
        ids = token_windows(tokenizer, read_documents((), part="eval"), window, 1)[0]
        if len(ids.unique()) >= min(FEW_TOKENS, window // 4) and int(ids.max()) < vocab_size:
            return ids
    logger.warning("no tokenizer that reads English: random token ids are compared")
    return torch.randint(0, vocab_size, (window,), generator=torch.Generator().manual_seed(0))


def _tokenizer(source: str) -> PreTrainedTokenizerBase | None:
    try:
        return load_tokenizer(source)
    except BadCheckpoint as error:
        logger.warning("%s", error)
        return None
