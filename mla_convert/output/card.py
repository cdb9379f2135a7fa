"""The model card of a converted checkpoint: what it is, how it was made, and who can load it."""

from typing import Any

from mla_convert.modeling.configs import PREFIX
from mla_convert.planning.engines import biases_lost
from mla_convert.source.cache_size import layer_numbers
from mla_convert.source.family_table import FAMILIES

CARD = """---
library_name: transformers
tags: [multi-head-latent-attention, mla, mla_convert]
---

# {name}, converted to multi-head latent attention

`{name}` with its attention rewritten as DeepSeek-V3 multi-head latent attention by mla_convert {version}.
It caches {numbers} numbers per token and layer (kv_lora_rank {rank} + qk_rope_head_dim {rope}) where the
source caches {source_numbers} ({percent:.0f} %). {kind}

```python
from transformers import AutoModelForCausalLM  # no remote code; transformers >= 5.15 caches the latent
model = AutoModelForCausalLM.from_pretrained("PATH_OF_THIS_FOLDER")
```

Use bfloat16 or float32, never float16: the latent norm is neutralised by rows of kv_a_proj_with_mqa that are
too small for it (in a quantised GGUF keep attn_kv_a_mqa in F32 or BF16). RoPE rows are interleaved. {engines}
`conversion.json` holds the recipe, the source's hashes, and the predicted error of every layer.
The licence of the source applies.
"""

NATIVE_CARD = """---
library_name: transformers
tags: [multi-head-latent-attention, mla, mla_convert]
---

# {name}, converted to multi-head latent attention

`{name}` with its attention rewritten as multi-head latent attention by mla_convert {version}{rest}.
Its layers cache {numbers} numbers per token where the source's cache {source_numbers} ({percent:.0f} %). {kind}

```python
{load}
```

Engines that do not run transformers' model classes cannot load this format. `conversion.json` holds the recipe, the
source's hashes, and the predicted error of every layer. The licence of the source applies.
"""

LOAD_PACKAGE = """import mla_convert  # makes the model class {architecture} known to transformers; no remote code
from transformers import AutoModelForCausalLM
model = AutoModelForCausalLM.from_pretrained("PATH_OF_THIS_FOLDER")"""
LOAD_CODE = """

# Or without the package, which runs the code in this folder:
from transformers import AutoModelForCausalLM
model = AutoModelForCausalLM.from_pretrained("PATH_OF_THIS_FOLDER", trust_remote_code=True)"""

EXACT = "The re-encoding is exact."
HEALED = (
    "After the conversion the {what} of each converted layer was fitted to the source on {tokens:,} tokens, where that "
    "lowered the error on text held out."
)
UNTRAINED = "It has not been trained after the conversion."
TRAINED = (
    "After the conversion it was distilled on {tokens:,} tokens; the last run took the KL to the source from "
    "{before:.3f} to {after:.3f} nats per token of text held out."
)
STOCK_ROPE = "RoPE is plain, so any engine with DeepSeek-V3 support computes the same."
SCALED_ROPE = (
    "The rope_type is {kind}: transformers computes it as the source does, and so does vLLM with "
    "model_impl=transformers; vLLM's own DeepSeek class, SGLang and llama.cpp compute another rotation."
)


BIASES = (
    "The source's biases stand in q_a_proj (a query latent as wide as the input carries them), kv_a_proj_with_mqa and "
    "o_proj: transformers loads them, and so does vLLM with model_impl=transformers. Not to be used with: {lost}."
)


def _engines(config: dict[str, Any]) -> list[str]:
    """What engines make of a stock folder, a sentence each."""
    kind = config["rope_parameters"]["rope_type"]
    said = [STOCK_ROPE if kind == "default" else SCALED_ROPE.format(kind=kind)]
    if config["attention_bias"]:
        lost = "; ".join(f"{engine} ({what})" for engine, what in biases_lost().items())
        said = [*(said if kind != "default" else ["RoPE is plain."]), BIASES.format(lost=lost)]
    return said


def model_card(record: dict[str, Any], config: dict[str, Any]) -> str:
    """README.md of the folder, from conversion.json's `record` and the written `config`."""
    native = "mla" in config
    layers = layer_numbers(config)
    tuned = record.get("finetune")
    heal = record.get("heal", {"tokens": 0})
    family = FAMILIES.get(config["model_type"].removeprefix(PREFIX))
    experts = family is not None and family.has_experts
    with_mlps = heal["tokens"] > 0 and heal["settings"].get("train") == "layers" and not experts
    trained = UNTRAINED
    if tuned:
        tokens = sum(run["tokens"] for run in (*tuned.get("earlier", ()), tuned))
        trained = TRAINED.format(tokens=tokens, **tuned["held_out_kl"])
    elif heal["tokens"]:
        trained = HEALED.format(tokens=heal["tokens"], what="attention and MLP" if with_mlps else "attention")
    facts = {
        "name": record["recipe"]["source"].rstrip("/").rsplit("/", 1)[-1],
        "version": record["environment"]["versions"]["mla_convert"],
        "source_numbers": record["source_numbers"],
        "percent": 100 * sum(layers) / len(layers) / record["source_numbers"],
        "kind": EXACT if record["lossless"] else trained,
    }
    if native:
        numbers = " or ".join(f"{n}" for n in sorted(set(layers)))
        load = LOAD_PACKAGE.format(architecture=config["architectures"][0])
        if config.get("auto_map") is not None:
            load += LOAD_CODE
        rest = "" if with_mlps or tuned else "; all else is the source's"
        return NATIVE_CARD.format(**facts, numbers=numbers, load=load, rest=rest)
    return CARD.format(
        **facts,
        numbers=layers[0],
        rank=record["kv_lora_rank"],
        rope=record["qk_rope_head_dim"],
        engines=" ".join(_engines(config)),
    )
