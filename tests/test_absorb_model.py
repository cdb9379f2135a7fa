"""An absorbed transformers model computes what the stock one computes, in every way it can be asked."""

import copy
import math
from typing import Any

import pytest
import torch
from tiny_deepseek import YARN, prompts, tiny_deepseek
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import DynamicCache, LlamaConfig, LlamaForCausalLM, StaticCache

import mla_convert
from mla_convert.decoding.absorb_model import AbsorbedAttention, restore
from mla_convert.decoding.absorb_plan import AbsorptionPlan
from mla_convert.decoding.latent_cache import LatentLayer
from mla_convert.decoding.quantised_cache import QuantisedLatentCache

# Largest difference over the largest value, of attention outputs in fp64. Measured over the shapes below: 1.8e-15.
FP64 = 1e-12
# Of logits in fp32. Measured: 2.3e-6.
FP32 = 1e-5

SHAPES: dict[str, dict[str, Any]] = {
    "rank 7, rope 2": {"kv_lora_rank": 7, "qk_rope_head_dim": 2},
    "rank 18, query rank": {"q_lora_rank": 14},
    "merged": {"qk_nope_head_dim": 40, "v_head_dim": 36, "hidden_size": 50},
    "merged, query rank": {"qk_nope_head_dim": 40, "v_head_dim": 36, "hidden_size": 50, "q_lora_rank": 22},
    "bias": {"attention_bias": True, "q_lora_rank": 14},
    "yarn": {"rope_parameters": YARN},
    "half-split rope": {"rope_interleave": False},
    "14 heads, rope 64": {"num_attention_heads": 14, "hidden_size": 42, "qk_rope_head_dim": 64, "kv_lora_rank": 64},
    "40 heads, rank 512": {"num_attention_heads": 40, "kv_lora_rank": 512, "qk_rope_head_dim": 64, "hidden_size": 80},
    "no nope": {"qk_nope_head_dim": 0, "qk_rope_head_dim": 8},
}
# DeepSeek-V2 has interleaved rotation only, and its complex numbers want an even kv_lora_rank.
CASES = [(3, name) for name in SHAPES] + [
    (2, name) for name in SHAPES if name not in ("half-split rope", "no nope", "rank 7, rope 2")
]


@pytest.fixture
def always_absorbed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Prefill takes the absorbed path too."""
    monkeypatch.setattr(AbsorptionPlan, "absorbs", lambda *_: True)


class Outputs:
    """Outputs of the attention modules, in the order of their calls; the models' norms would round them to fp32."""

    def __init__(self, model: nn.Module) -> None:
        self.seen: list[Tensor] = []
        for layer in model.model.layers:  # type: ignore[union-attr,operator]
            layer.self_attn.register_forward_hook(lambda _, __, out: self.seen.append(out[0]))


@torch.no_grad()
def in_pieces(model: nn.Module, inputs: dict[str, Tensor], pieces: list[int], cache: Any) -> Tensor:
    """Logits of the tokens, fed in pieces through `cache`."""
    start, logits = 0, []
    for piece in pieces:
        stop = start + piece
        out = model(
            input_ids=inputs["input_ids"][:, start:stop], attention_mask=inputs["attention_mask"][:, :stop],
            position_ids=(inputs["attention_mask"].cumsum(-1) - 1).clamp_min(0)[:, start:stop],
            past_key_values=cache, use_cache=True,
        )  # fmt: skip
        logits.append(out.logits)
        start = stop
    return torch.cat(logits, dim=1)


def relative(a: Tensor, b: Tensor) -> float:
    return ((a - b).abs().max() / b.abs().max()).item()


@pytest.mark.usefixtures("always_absorbed")
@pytest.mark.parametrize(("version", "shape"), CASES)
@pytest.mark.parametrize("pieces", [[23], [7, 7, 7, 2], [19, 1, 1, 1, 1]], ids=str)
def test_attention_outputs_equal_the_stock_ones_in_fp64(version: int, shape: str, pieces: list[int]) -> None:
    model = tiny_deepseek(version, torch.float64, **SHAPES[shape])
    inputs = prompts(3, 23, padded=4)
    outputs = Outputs(model)
    in_pieces(model, inputs, pieces, DynamicCache())
    stock, outputs.seen[:] = list(outputs.seen), []
    mla_convert.absorb(model)
    in_pieces(model, inputs, pieces, DynamicCache())
    real = inputs["attention_mask"].bool()
    starts = [sum(pieces[: i // 2]) for i in range(len(stock))]
    for start, ours, theirs in zip(starts, outputs.seen, stock, strict=True):
        seen = real[:, start : start + ours.shape[1]]
        assert relative(ours[seen], theirs[seen]) <= FP64
    wrong = outputs.seen[-1].roll(1, 0)  # negative control: the items of the batch differ
    assert relative(wrong, stock[-1]) > 1e-2


@pytest.mark.parametrize(("version", "shape"), CASES)
@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
def test_logits_equal_the_stock_ones_in_fp32(version: int, shape: str, implementation: str) -> None:
    model = tiny_deepseek(version, attn_implementation=implementation, **SHAPES[shape])
    inputs = prompts(4, 30, padded=3)
    stock = in_pieces(model, inputs, [20, 1, 7, 1, 1], DynamicCache())
    ours = in_pieces(mla_convert.absorb(model), inputs, [20, 1, 7, 1, 1], DynamicCache())
    real = inputs["attention_mask"].bool()
    assert relative(ours[real], stock[real]) <= FP32


GENERATIONS: dict[str, dict[str, Any]] = {
    "dynamic": {},
    "static": {"cache_implementation": "static"},
    "chunked prefill": {"prefill_chunk_size": 7},
    "no cache": {"use_cache": False, "max_new_tokens": 24},
    "beams": {"num_beams": 3, "max_new_tokens": 40},
    "sampled": {"do_sample": True, "top_k": 5, "max_new_tokens": 40},
    "returned sequences": {"do_sample": True, "num_return_sequences": 2, "max_new_tokens": 24},
}


@pytest.mark.parametrize("batch", [1, 4])
@pytest.mark.parametrize("how", GENERATIONS)
def test_generated_text_is_the_same(how: str, batch: int) -> None:
    model = tiny_deepseek()
    inputs = prompts(batch, 17, padded=3)
    options: dict[str, Any] = {"max_new_tokens": 256, "do_sample": False} | GENERATIONS[how]
    torch.manual_seed(5)
    stock = model.generate(**inputs, **options)
    torch.manual_seed(5)
    ours = mla_convert.absorb(model).generate(**inputs, **options)
    assert stock.shape[1] == 17 + options["max_new_tokens"]
    assert torch.equal(ours, stock)
    assert len(stock[0].unique()) > 10  # not one token over and over


@pytest.mark.parametrize("assistant", ["model", "prompt lookup"])
def test_assisted_generation_is_the_same(assistant: str) -> None:
    """The draft is right at times and wrong at times, so the cache is cropped."""
    model, draft = tiny_deepseek(), tiny_deepseek()
    with torch.no_grad():
        draft.lm_head.weight += 0.1 * torch.randn(draft.lm_head.weight.shape)
    inputs = prompts(1, 17)
    options: dict[str, Any] = {"assistant_model": draft} if assistant == "model" else {"prompt_lookup_num_tokens": 4}
    stock = model.generate(**inputs, max_new_tokens=256, do_sample=False)
    mla_convert.absorb(model), mla_convert.absorb(draft)
    ours = model.generate(**inputs, max_new_tokens=256, do_sample=False, **options)
    assert torch.equal(ours, stock)


def test_changed_weights_change_the_text() -> None:
    """Negative control of the equalities above."""
    model, inputs = tiny_deepseek(), prompts(1, 17)
    stock = model.generate(**inputs, max_new_tokens=64, do_sample=False)
    with torch.no_grad():
        for layer in model.model.layers:
            layer.self_attn.kv_b_proj.weight.mul_(1.02)
    ours = mla_convert.absorb(model).generate(**inputs, max_new_tokens=64, do_sample=False)
    assert not torch.equal(ours, stock)


@pytest.mark.parametrize("merged", [False, True])
def test_compiled_whole_with_a_static_cache(merged: bool) -> None:
    model, inputs = tiny_deepseek(**(SHAPES["merged"] if merged else {})), prompts(2, 12, padded=3)
    caches = [StaticCache(config=model.config, max_cache_len=40) for _ in range(2)]
    stock = in_pieces(model, inputs, [8, 1, 1, 2], caches[0])
    mla_convert.absorb(model)
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True, dynamic=False)
    ours = in_pieces(compiled, inputs, [8, 1, 1, 2], caches[1])
    real = inputs["attention_mask"].bool()
    assert relative(ours[real], stock[real]) <= FP32


class Shapes(TorchDispatchMode):
    """Shapes of all tensors any operation returns."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: set[tuple[int, ...]] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for tensor in result if isinstance(result, tuple | list) else (result,):
            if isinstance(tensor, Tensor):
                self.seen.add(tuple(tensor.shape))
        return result


def full_width(shapes: set[tuple[int, ...]], tokens: int, widths: set[int]) -> list[tuple[int, ...]]:
    """Shapes with all cached tokens and a per-head key or value width among their dimensions."""
    return [shape for shape in shapes if tokens in shape and widths & set(shape)]


@pytest.mark.parametrize("kind", ["dynamic", "static"])
def test_decoding_makes_no_key_or_value_of_full_width(kind: str) -> None:
    model, inputs = tiny_deepseek(qk_nope_head_dim=13, v_head_dim=11, kv_lora_rank=20), prompts(3, 53, padded=4)
    widths = {13, 11, 13 + 6, 13 + 11, 5 * 13, 5 * 11, 5 * 19, 5 * 24}

    def decode() -> set[tuple[int, ...]]:
        cache = DynamicCache() if kind == "dynamic" else StaticCache(config=model.config, max_cache_len=53)
        in_pieces(model, {name: t[:, :52] for name, t in inputs.items()}, [52], cache)
        with Shapes() as shapes, torch.no_grad():
            model(inputs["input_ids"][:, 52:], attention_mask=inputs["attention_mask"], past_key_values=cache)
        return shapes.seen

    assert full_width(decode(), 53, widths)  # negative control: the stock path has them
    mla_convert.absorb(model)
    assert not full_width(decode(), 53, widths)


@pytest.mark.parametrize("cache_dtype", ["auto", "int8"])
def test_generating_behind_32k_tokens_makes_no_key_or_value_of_full_width(cache_dtype: str) -> None:
    model, length, rank, rope = tiny_deepseek(qk_nope_head_dim=13, v_head_dim=11, kv_lora_rank=20), 32_768, 20, 6
    model.config.max_position_embeddings = model.generation_config.max_length = 2 * length
    gen = torch.Generator().manual_seed(0)
    widths, heads = {13, 11, 13 + 6, 13 + 11, 5 * 13, 5 * 11, 5 * 19, 5 * 24}, 5

    def generate(cache: Any) -> set[tuple[int, ...]]:
        for index in range(model.config.num_hidden_layers):
            latents, rotating = (torch.randn(1, 1, length, width, generator=gen) for width in (rank, rope))
            cache.update(latents, rotating, index)
        prompt = torch.zeros(1, length + 1, dtype=torch.long)
        with Shapes() as shapes:
            model.generate(prompt, past_key_values=cache, max_new_tokens=4, do_sample=False)
        assert cache.get_seq_length() == length + 4
        return shapes.seen

    def wide(seen: set[tuple[int, ...]]) -> list[tuple[int, ...]]:
        return [shape for n in range(length, length + 5) for shape in full_width(seen, n, widths)]

    assert wide(generate(DynamicCache()))  # negative control: the stock path has them
    mla_convert.absorb(model)
    seen = generate(DynamicCache() if cache_dtype == "auto" else QuantisedLatentCache(model.config, cache_dtype))
    assert not wide(seen)
    # Nothing is larger than the scores of all heads, or than the latents with their room to grow.
    # Measured: 0.79.
    assert max(math.prod(shape) for shape in seen) <= 1.1 * max(heads, rank + rope) * length


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_cache_bytes_equal_the_formula(dtype: torch.dtype) -> None:
    model, cache = mla_convert.absorb(tiny_deepseek(dtype=dtype)), DynamicCache()
    model.generate(**prompts(2, 17), past_key_values=cache, max_new_tokens=400, do_sample=False)
    tokens, formula = 416, 0  # the last token is never fed back
    for layer in cache.layers:
        assert isinstance(layer, LatentLayer) and layer.buffer is not None
        formula = 2 * tokens * (18 + 6) * dtype.itemsize
        assert layer.keys.nbytes + layer.values.nbytes == formula
        held = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in (layer.keys, layer.values)}
        assert sum(held.values()) <= 1.05 * formula  # measured: 1.03 at most, one buffer for both
    assert cache.get_seq_length() == tokens


@pytest.mark.parametrize("shape", ["merged", "merged, query rank"])
def test_merged_matrices_follow_the_weights(shape: str) -> None:
    """After an optimiser step and after load_state_dict the output is that of the new weights."""
    model, inputs = tiny_deepseek(**SHAPES[shape]), prompts(2, 9)
    mla_convert.absorb(model)
    attention = model.model.layers[0].self_attn
    assert attention.merged_q is not None and attention.merged_out is not None
    model.train()
    assert attention.merged_q is None
    model(**inputs, labels=inputs["input_ids"]).loss.backward()
    torch.optim.SGD(model.parameters(), lr=0.1).step()
    model.eval()
    moved = in_pieces(model, inputs, [8, 1], DynamicCache())
    stock = in_pieces(restore(copy.deepcopy(model)), inputs, [8, 1], DynamicCache())
    assert relative(moved, stock) <= FP32
    fresh = tiny_deepseek(seed=3, **SHAPES[shape])
    model.load_state_dict(fresh.state_dict())
    loaded = in_pieces(model, inputs, [8, 1], DynamicCache())
    assert relative(loaded, in_pieces(fresh, inputs, [8, 1], DynamicCache())) <= FP32
    assert relative(loaded, moved) > 0.1


def test_gradients_of_the_stock_path_remain() -> None:
    model = mla_convert.absorb(tiny_deepseek()).train()
    model(**prompts(2, 9), labels=prompts(2, 9)["input_ids"]).loss.backward()
    assert all(p.grad is not None and p.grad.abs().sum() > 0 for p in model.parameters())


@pytest.mark.parametrize("shape", ["merged", "rank 18, query rank"])
def test_gradients_of_an_evaluated_model_reach_every_weight(shape: str) -> None:
    """One token at a time, which is absorbed where nothing is merged."""
    grads = []
    for absorbed in (False, True):
        model, inputs, cache = tiny_deepseek(dtype=torch.float64, **SHAPES[shape]), prompts(1, 6), DynamicCache()
        if absorbed:
            mla_convert.absorb(model)
        for at in range(6):
            logits = model(inputs["input_ids"][:, at : at + 1], past_key_values=cache).logits
        logits.square().sum().backward()
        grads.append([p.grad for p in model.parameters()])
    for ours, theirs in zip(*grads, strict=True):
        assert ours is not None and relative(ours, theirs) <= 1e-5  # measured 2e-7: norms and their gradients are fp32


def test_restored_model_is_the_stock_one_and_saves_the_same_files(tmp_path: Any) -> None:
    model, inputs = tiny_deepseek(**SHAPES["merged"]), prompts(2, 9)
    before, names = model(**inputs).logits, set(model.state_dict())
    kind = type(model.model.layers[0].self_attn)
    mla_convert.absorb(mla_convert.absorb(model))  # twice is once
    assert set(model.state_dict()) == names
    model.save_pretrained(tmp_path)
    again = type(model).from_pretrained(tmp_path)
    assert torch.equal(again(**inputs).logits, before)
    restore(model)
    assert type(model.model.layers[0].self_attn) is kind
    assert torch.equal(model(**inputs).logits, before)


def test_attention_weights_are_still_given() -> None:
    model = mla_convert.absorb(tiny_deepseek(attn_implementation="eager"))
    out = model(**prompts(2, 9), output_attentions=True)
    assert [a.shape for a in out.attentions] == [(2, 5, 9, 9)] * 2


class Wrapped(nn.Module):
    """A projection that has no weight of its own, as quantised and adapted ones have none."""

    def __init__(self, inner: nn.Linear) -> None:
        super().__init__()
        self.inner, self.out_features = inner, inner.out_features

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x)


def test_projections_that_are_no_plain_linear_layer() -> None:
    model, inputs = tiny_deepseek(**SHAPES["merged"]), prompts(2, 9)
    for layer in model.model.layers:
        layer.self_attn.kv_b_proj = Wrapped(layer.self_attn.kv_b_proj)
    stock = in_pieces(model, inputs, [7, 1, 1], DynamicCache())
    mla_convert.absorb(model)
    assert model.model.layers[0].self_attn.merged_q is None  # left alone: there is no plain matrix to merge
    assert relative(in_pieces(model, inputs, [7, 1, 1], DynamicCache()), stock) <= FP32


def test_hooks_of_accelerate_reach_the_absorbed_forward() -> None:
    from accelerate.hooks import ModelHook, add_hook_to_module

    model, inputs = tiny_deepseek(), prompts(2, 9)
    attention = model.model.layers[1].self_attn
    add_hook_to_module(attention, ModelHook())
    mla_convert.absorb(model)
    assert attention._old_forward.__func__ is AbsorbedAttention.forward
    assert torch.isfinite(model(**inputs).logits).all()


def test_the_choice_can_be_printed() -> None:
    merged = mla_convert.absorb(tiny_deepseek(**SHAPES["merged"]))
    assert "2 layers: 5 heads, latent 18 + 6: query merged (one matrix 4,500" in mla_convert.describe(merged)
    apart = mla_convert.absorb(tiny_deepseek(kv_lora_rank=64))
    assert "query in two steps" in mla_convert.describe(apart) and "output in two steps" in mla_convert.describe(apart)


def test_chunks_take_the_cheaper_path() -> None:
    """The Llama-3-8B shape: a short chunk behind a long past is absorbed, a first prefill is expanded."""
    plan = AbsorptionPlan(32, 128, 64, 128, 512, 4096, 4096, itemsize=2, balance=10.0)
    assert plan.absorbs(1, 32768) and plan.absorbs(16, 32768) and not plan.absorbs(4096, 4096)
    longest = plan.longest_absorbed_chunk(32768)
    assert plan.absorbs(longest, 32768) and not plan.absorbs(longest + 1, 32768)
    narrow = AbsorptionPlan(9, 64, 64, 64, 16, 576, 576, itemsize=4, balance=10.0)
    assert narrow.absorbs(4096, 4096)  # latents narrower than a head: absorbed is always less


def test_refusals_name_the_thing_and_the_remedy() -> None:
    llama = LlamaForCausalLM(
        LlamaConfig(vocab_size=11, hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=2)
    )
    with pytest.raises(mla_convert.UnsupportedSource, match="LlamaForCausalLM has no attention to absorb.*convert"):
        mla_convert.absorb(llama)
    with pytest.raises(mla_convert.BadOption, match="loaded model or an MLALayer, got str.*from_pretrained"):
        mla_convert.absorb("folder")
    with pytest.raises(mla_convert.BadOption, match="unknown backend 'cuda'.*torch, triton"):
        mla_convert.absorb(tiny_deepseek(), backend="cuda")
    model = tiny_deepseek()
    model.model.layers[1].self_attn.to("meta")
    with pytest.raises(mla_convert.BadOption, match="layers.1.self_attn has weights on the meta device"):
        mla_convert.absorb(model)
    assert not isinstance(model.model.layers[0].self_attn, AbsorbedAttention)  # refused before anything changed
