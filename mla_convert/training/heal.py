"""heal: read a written conversion back, fit its layers to the source again, and write the result as a new folder."""

import logging
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory

import torch

from mla_convert.calibration.stream import LayerStream
from mla_convert.calibration.texts import check_ids, read_documents, text_hash, token_windows, with_conversations
from mla_convert.conversion.rope import ladder_plan, native_plan
from mla_convert.conversion.sizes import Size
from mla_convert.errors import BadOption
from mla_convert.formats.layer import ConvertedLayer
from mla_convert.formats.native import NativeFolder, is_native
from mla_convert.formats.stock import read_stock_layer, residual_scale
from mla_convert.interface.measure import Stage, stage
from mla_convert.interface.recipe import HealRecipe
from mla_convert.interface.report import progress
from mla_convert.output.emit import expected_bytes, expected_native_bytes, publish, write_native, write_tensors
from mla_convert.output.record import check_source, read_record
from mla_convert.output.write import FolderWriter
from mla_convert.source.checkpoint import Checkpoint
from mla_convert.source.families import layer_tensors, read_spec
from mla_convert.source.family_table import FAMILIES
from mla_convert.source.loading import load_tokenizer, resolve_device
from mla_convert.training.healing import HealReport, heal_layers

logger = logging.getLogger(__name__)

# Of the record of what is healed; a healed folder may be healed again.
KEPT = ("recipe", "converted_by", "calibration", "layers", "heal", "environment")


@dataclass(frozen=True)
class HealResult:
    """What was written where; held-out error of every layer before and after, relative to the residual stream."""

    out: str
    healing: tuple[HealReport, ...]
    tokens: int
    stages: tuple[Stage, ...]


def heal(recipe: HealRecipe) -> HealResult:
    """Heal recipe.converted into the folder recipe.out. Raises MlaConvertError, leaving nothing behind.

    The conversion must come from recipe.source: the hashes in its conversion.json are compared.
    """
    settings = recipe.settings()
    checkpoint, written = Checkpoint.open(recipe.source), Checkpoint.open(recipe.converted)
    record = read_record(
        recipe.converted, ("lossless", "kv_lora_rank", "qk_rope_head_dim", "rope_stride"), recipe.source
    )
    spec, config = read_spec(checkpoint), written.config
    if record["lossless"]:
        raise BadOption(f"{recipe.converted} is an exact re-encoding, so there is nothing to heal")
    if "finetune" in record:
        raise BadOption(
            f"{recipe.converted} was fine-tuned; healing would aim every layer at the source again, and write what is "
            "no part of the latent as the source has it; heal first, then finetune"
        )
    check_source(recipe.converted, record, checkpoint)
    native = is_native(config)
    plan = native_plan if native else ladder_plan
    size = Size(record["kv_lora_rank"], plan(spec, record["qk_rope_head_dim"], record["rope_stride"]))
    dtype = getattr(torch, config["dtype"])
    device = resolve_device(recipe.device)
    needed = expected_native_bytes(checkpoint, spec, [size], dtype) if native else expected_bytes(spec, [size], dtype)
    writer = FolderWriter(recipe.out, needed, recipe.overwrite)
    documents = read_documents(recipe.data, part="calib")
    tokenizer = load_tokenizer(recipe.source)
    ids = with_conversations(tokenizer, token_windows(tokenizer, documents, recipe.window, recipe.windows))
    check_ids(ids, spec.vocab_size, recipe.source)
    if len(ids) <= recipe.held_out:
        raise BadOption(
            f"the text gives {len(ids)} windows of {recipe.window} tokens and {recipe.held_out} are held out; "
            "give more text with --data, or a smaller --held-out"
        )
    if len(ids) < recipe.windows:
        logger.info("the text gives %d windows of %d tokens, not the %d asked", len(ids), recipe.window, recipe.windows)
    scale = residual_scale(spec.rms_norm_eps)
    folder = NativeFolder(recipe.converted) if native else None
    experts = FAMILIES[spec.family].has_experts  # which healing never changes

    def start(index: int) -> ConvertedLayer:
        """Layer `index` as it is written: an earlier healing may have changed its MLP."""
        if folder is not None:
            if index not in folder.converted:
                return ConvertedLayer(None)
            prefix = stream.layer_prefix(index)
            names = [] if experts else [n for n in written.headers if n.startswith(prefix) and "self_attn." not in n]
            others = {name: written.tensor(name).float() for name in names}
            return ConvertedLayer(folder.layer(index).to(torch.float64, device), others)
        layer = read_stock_layer(recipe.converted, index).to(torch.float64, device)
        # outputs of the source's scale, as it was assembled
        b_O = None if layer.b_O is None else layer.b_O / scale
        factors = {"gate": 1.0, "up": 1.0, "down": scale}
        prefix, source = stream.layer_prefix(index), layer_tensors(spec, index)
        others = {
            source[role]: written.tensor(f"{prefix}mlp.{role}_proj.weight").float() / factor
            for role, factor in factors.items()
        }
        return ConvertedLayer(replace(layer, W_O=layer.W_O / scale, b_O=b_O), others)

    done, reports = list[Stage](), list[HealReport]()
    stream = LayerStream(checkpoint, spec, device)
    with TemporaryDirectory(prefix="mla_convert_") as scratch, writer, stage("heal", done):
        with progress("healing", "steps", spec.num_hidden_layers * (1 + recipe.steps)) as advance:

            def layers() -> Iterator[ConvertedLayer]:
                for layer, report in heal_layers(stream, ids, start, settings, Path(scratch), advance):
                    reports.append(report)
                    yield layer

            native_layers = None
            if native:
                native_layers = write_native(checkpoint, spec, layers(), writer, dtype, advance)
            else:
                write_tensors(checkpoint, spec, layers(), writer, dtype, advance)
        new = {
            "recipe": recipe.to_dict(),
            "converted_by": {key: record[key] for key in KEPT if key in record},
            "heal": {
                "settings": asdict(settings),
                "sha256": text_hash(documents),
                "tokens": recipe.steps * recipe.window,
                "layers": [asdict(report) for report in reports],
            },
        }
        publish(checkpoint, spec, size, dtype, new, writer, native_layers, config.get("auto_map") is not None)
    return HealResult(recipe.out, tuple(reports), recipe.steps * recipe.window, tuple(done))
