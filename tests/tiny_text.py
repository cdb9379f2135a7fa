"""A word-level tokenizer, a text over its words, and tiny random models that read them."""

import random
from pathlib import Path

import torch
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Split
from tokenizers.processors import TemplateProcessing
from transformers import (
    DeepseekV3Config,
    DeepseekV3ForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedTokenizerFast,
)

WORDS = 90
BOS, UNKNOWN = 1, 0


def text(words: int, seed: int = 0) -> str:
    """`words` words, no word at all likelier than another."""
    rng = random.Random(seed)
    return " ".join(f"w{rng.randrange(WORDS)}" for _ in range(words))


def tokenizer(adds_bos: bool = False) -> PreTrainedTokenizerFast:
    """One token per word; id 0 is an ordinary token (unknown words), as in many real vocabularies."""
    vocab = {"<unk>": UNKNOWN, "<s>": BOS, "\n\n": 2} | {f"w{i}": i + 3 for i in range(WORDS)}
    core = Tokenizer(WordLevel(vocab, unk_token="<unk>"))
    core.pre_tokenizer = Split(" ", "removed")
    if adds_bos:
        core.post_processor = TemplateProcessing(single="<s> $A", special_tokens=[("<s>", BOS)])
    return PreTrainedTokenizerFast(tokenizer_object=core, bos_token="<s>", unk_token="<unk>")


def llama(seed: int = 0, **changes: object) -> LlamaForCausalLM:
    """Two layers, 4 query heads on 2 KV heads of width 12, hidden 40; weights large enough to matter."""
    torch.manual_seed(seed)
    config = {
        "vocab_size": WORDS + 3, "hidden_size": 40, "intermediate_size": 56, "num_hidden_layers": 2,
        "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 12, "max_position_embeddings": 512,
        "tie_word_embeddings": False, "initializer_range": 0.25,
    }  # fmt: skip
    return LlamaForCausalLM(LlamaConfig(**config | changes)).eval()


def deepseek(seed: int = 0, **changes: object) -> DeepseekV3ForCausalLM:
    """Two dense layers, 4 heads, kv_lora_rank 20, rope 6, nope 10, v 14, hidden 40: all dimensions differ."""
    torch.manual_seed(seed)
    config = {
        "vocab_size": WORDS + 3, "hidden_size": 40, "intermediate_size": 56, "num_hidden_layers": 2,
        "num_attention_heads": 4, "num_key_value_heads": 4, "kv_lora_rank": 20, "q_lora_rank": None,
        "qk_rope_head_dim": 6, "qk_nope_head_dim": 10, "v_head_dim": 14, "first_k_dense_replace": 2,
        "n_routed_experts": 2, "max_position_embeddings": 512, "tie_word_embeddings": False,
        "initializer_range": 0.25,
    }  # fmt: skip
    return DeepseekV3ForCausalLM(DeepseekV3Config(**config | changes)).eval()


def save(model: torch.nn.Module, folder: Path, adds_bos: bool = False) -> str:
    """Model and tokenizer in `folder`; returns it as a string, as the command line gives it."""
    model.save_pretrained(folder)
    tokenizer(adds_bos).save_pretrained(folder)
    return str(folder)
