"""Why mixtures of experts stay native: no DeepSeek class of transformers routes as they do, shown on outputs in fp64.

If one of these differences is gone in a later transformers, the stock format has become possible for that family.
"""

from typing import Any

import pytest
import torch
from native import InDouble, distance
from torch import nn
from transformers import DeepseekV2Config, DeepseekV3Config, MixtralConfig, Qwen2MoeConfig
from transformers.models.deepseek_v2.modeling_deepseek_v2 import DeepseekV2Moe
from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3MoE
from transformers.models.mixtral.modeling_mixtral import MixtralSparseMoeBlock
from transformers.models.qwen2_moe.modeling_qwen2_moe import Qwen2MoeSparseMoeBlock

from mla_convert.source.family_table import FAMILIES

EXACT, OTHER = 1e-12, 0.05  # of the largest output; measured at most 2.0e-16, at least 0.26
HIDDEN, WIDTH, EXPERTS = 24, 20, 6
INPUTS = torch.randn(1, 50, HIDDEN, dtype=torch.float64, generator=torch.Generator().manual_seed(3))


def block(family: str, chosen: int, **changes: Any) -> Any:
    """The source's block of experts with seeded weights."""
    common = {"hidden_size": HIDDEN, "num_experts_per_tok": chosen, "_experts_implementation": "eager"}
    config: Any
    if family == "mixtral":
        config = MixtralConfig(intermediate_size=WIDTH, num_local_experts=EXPERTS, **common, **changes)
        made: Any = MixtralSparseMoeBlock(config)
    else:
        widths = {"moe_intermediate_size": WIDTH, "shared_expert_intermediate_size": WIDTH, "num_experts": EXPERTS}
        config = Qwen2MoeConfig(**widths, **common, **changes)
        made = Qwen2MoeSparseMoeBlock(config)
    config._experts_implementation = "eager"
    generator = torch.Generator().manual_seed(4)
    for parameter in made.parameters():
        nn.init.normal_(parameter, std=0.4, generator=generator)
    return made.double().requires_grad_(False)


def deepseek(version: int, source: Any, chosen: int, normalise: bool) -> Any:
    """A DeepSeek block with the source's router and experts; its shared expert is the source's, or zero."""
    common = {"hidden_size": HIDDEN, "moe_intermediate_size": WIDTH, "n_routed_experts": EXPERTS, "n_shared_experts": 1}
    common |= {
        "num_attention_heads": 2,
        "num_experts_per_tok": chosen,
        "n_group": 1,
        "topk_group": 1,
        "norm_topk_prob": normalise,
    }
    config: Any = (DeepseekV3Config if version == 3 else DeepseekV2Config)(routed_scaling_factor=1.0, **common)
    config._experts_implementation = "eager"
    made: Any = (DeepseekV3MoE if version == 3 else DeepseekV2Moe)(config).double().requires_grad_(False)
    made.gate.weight.copy_(source.gate.weight)
    made.experts.load_state_dict(source.experts.state_dict())
    for parameter in made.shared_experts.parameters():
        parameter.zero_()
    if hasattr(source, "shared_expert"):
        made.shared_experts.load_state_dict(source.shared_expert.state_dict())
    return made


def outputs(module: Any) -> torch.Tensor:
    with InDouble():
        found: torch.Tensor = module(INPUTS)
    assert found.dtype == torch.float64
    return found


@pytest.mark.parametrize("normalise", [True, False])
@pytest.mark.parametrize("version", [2, 3])
def test_no_deepseek_router_weighs_as_mixtral(version: int, normalise: bool) -> None:
    source = block("mixtral", 2)
    other = deepseek(version, source, 2, normalise)
    with InDouble():
        mine, theirs = source.gate(INPUTS), other.gate(INPUTS)
    assert torch.equal(mine[2].sort(1).values, theirs[2].sort(1).values)  # the same experts
    assert distance(outputs(other), outputs(source)) > OTHER


def test_where_every_expert_is_chosen_deepseek_v2_is_mixtral() -> None:
    """The control: only the weights of the chosen differ."""
    source = block("mixtral", EXPERTS)
    assert distance(outputs(deepseek(2, source, EXPERTS, False)), outputs(source)) <= EXACT
    assert distance(outputs(deepseek(3, source, EXPERTS, True)), outputs(source)) > OTHER


def test_only_the_gate_of_the_shared_expert_parts_qwen2_moe_from_deepseek_v2() -> None:
    source = block("qwen2_moe", 2, norm_topk_prob=False)
    other = deepseek(2, source, 2, False)
    assert distance(outputs(other), outputs(source)) > OTHER
    for module in (source.shared_expert, other.shared_experts):
        module.down_proj.weight.zero_()
    assert distance(outputs(other), outputs(source)) <= EXACT
    normalised = block("qwen2_moe", 2, norm_topk_prob=True)
    assert distance(outputs(deepseek(2, normalised, 2, True)), outputs(normalised)) > OTHER


def test_the_table_says_so() -> None:
    assert "normalises the softmax over the chosen experts" in str(FAMILIES["mixtral"].stock)
    assert "its shared expert has a gate" in str(FAMILIES["qwen2_moe"].stock)
    assert "QK-norm" in str(FAMILIES["qwen3_moe"].stock)
