"""What a cache takes: per token and layer, per sequence, per batch, per tensor-parallel rank; what fits; what it costs.

Formulas: MHA, GQA and MQA cache keys and values of every KV head, 2 x KV heads x head width; multi-head latent
attention caches kv_lora_rank + qk_rope_head_dim, once for all heads (DeepSeek-V2, arXiv:2405.04434, table 1).
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from mla_convert.errors import BadOption
from mla_convert.source.attention_shape import AttentionShape

BYTES = {"float32": 4, "bfloat16": 2, "float16": 2, "fp8": 1}
SEQUENCES = (4096, 32768, 131072)  # tokens, in the table of kinds
SERVED = ((512, 64), (448, 64), (256, 64))  # sizes with a served kernel (engines.yaml)
COMMON_KV_HEADS = 8  # what most GQA models have; shown beside sources that are no GQA
# Tokens of prefill a server takes at once; between these, what the activations leave room for.
BATCHED_TOKENS = (2048, 16384)
ACTIVATION_SHARE = 0.05  # of a GPU's usable memory


@dataclass(frozen=True)
class Kind:
    """One row of the comparison. numbers: cached per token and layer. sequences: bytes of one sequence of 4k, 32k and
    128k tokens, all layers. as_gqa: KV heads a GQA model of this head width would have for the same cache.
    """

    name: str
    numbers: int
    bytes_per_token_and_layer: int
    bytes_per_token: int
    sequences: tuple[int, ...]
    batch: int
    as_gqa: float
    rope: str
    expressiveness: str


@dataclass(frozen=True)
class Rank:
    """One tensor-parallel size. Bytes per token and rank of all layers; None: no legal size for the model."""

    tp: int
    own_legal: bool
    latent_legal: bool
    own_bytes: int
    latent_bytes: int
    own_fits: int | None  # sequences of the context asked for, in the memory asked for
    latent_fits: int | None

    @property
    def latent_costs_more(self) -> bool:
        """Whether the latent, whole on every rank, is larger than this rank's share of the keys and values."""
        return self.latent_bytes > self.own_bytes


@dataclass(frozen=True)
class Costs:
    """Per layer: attention parameters; floating-point operations and cache bytes of one decoded token at the context;
    operations per token of a prefill of the whole context, and its key and value head widths.
    """

    parameters: int
    decode_flops: int
    decode_bytes: int
    prefill_flops: int
    key_width: int
    value_width: int


@dataclass(frozen=True)
class Serving:
    """What one GPU holds at the first tensor-parallel size that is legal for both."""

    tp: int
    weight_bytes: int
    budget: int  # bytes per rank left for the cache
    max_num_seqs: int
    max_num_batched_tokens: int


def kinds(shape: AttentionShape, size: tuple[int, int], cache_dtype: str, batch: int, context: int) -> list[Kind]:
    """The rows of the comparison: as MHA, the model's own, as MQA, latents that servers accept, and `size`."""
    heads, width, itemsize = shape.num_attention_heads, shape.v_head_dim, BYTES[cache_dtype]

    def row(name: str, numbers: int, rope: str, expressive: str) -> Kind:
        return Kind(
            name=name,
            numbers=numbers,
            bytes_per_token_and_layer=numbers * itemsize,
            bytes_per_token=numbers * itemsize * len(shape.windows),
            sequences=tuple(numbers * itemsize * shape.cached_tokens(length) for length in SEQUENCES),
            batch=batch * numbers * itemsize * shape.cached_tokens(context),
            as_gqa=numbers / (2 * width),
            rope=rope,
            expressiveness=expressive,
        )

    whole = "all of every key"
    rows = [row(f"MHA, {heads} KV heads", 2 * heads * width, whole, "own keys and values per head")]
    if shape.kind in ("MHA", "MLA") and heads % COMMON_KV_HEADS == 0 and heads > COMMON_KV_HEADS:
        shared = f"{heads // COMMON_KV_HEADS} heads share keys and values"
        rows.append(row(f"GQA, {COMMON_KV_HEADS} KV heads", 2 * COMMON_KV_HEADS * width, whole, shared))
    if shape.kind == "GQA":
        shared = f"{heads // shape.num_key_value_heads} heads share keys and values"
        rows.append(row(f"GQA, {shape.num_key_value_heads} KV heads (this model)", shape.numbers, whole, shared))
    rows.append(row("MQA, 1 KV head", 2 * width, whole, "all heads share one key and value"))
    own = (shape.kv_lora_rank, shape.qk_rope_head_dim) if shape.kind == "MLA" else None
    for rank, rope in dict.fromkeys([*([own] if own else []), *SERVED, size]):
        assert rank is not None and rope is not None
        mark = " (this model)" if (rank, rope) == own else " (planned)" if (rank, rope) == size else ""
        holds = shape.kind != "MLA" and rank + rope >= shape.numbers
        text = "own keys and values per head, from one latent" + ("; holds all of the source's" if holds else "")
        rows.append(row(f"MLA, {rank} + {rope}{mark}", rank + rope, f"{rope} numbers, one key for all heads", text))
    if shape.kind in ("MHA", "MQA"):
        rows = [_marked(kind, shape.kind) for kind in rows]
    return rows


def _marked(kind: Kind, own: str) -> Kind:
    name = f"{kind.name} (this model)" if kind.name.startswith(own) else kind.name
    return Kind(**{**vars(kind), "name": name})


def planned_size(shape: AttentionShape, kv_lora_rank: int | None, qk_rope_head_dim: int | None) -> tuple[int, int]:
    """The size asked for; else the model's own latent; else the largest served one below the model's own cache; else
    half of it. Raises BadOption where more would rotate than a key head has.
    """
    if kv_lora_rank is not None and qk_rope_head_dim is not None:
        if shape.kind != "MLA" and qk_rope_head_dim > shape.source_head_dim:
            raise BadOption(
                f"qk_rope_head_dim={qk_rope_head_dim} exceeds {shape.source_head_dim}, the width of a key head of "
                f"{shape.model_type}; use --qk-rope-head-dim {shape.source_head_dim} or less"
            )
        return kv_lora_rank, qk_rope_head_dim
    if shape.kv_lora_rank is not None:
        return shape.kv_lora_rank, shape.qk_rope_head_dim or 0
    for rank, rope in SERVED:
        if rank + rope < shape.numbers and rope <= shape.source_head_dim:
            return rank, rope
    rope = max(2, shape.source_head_dim // 4 * 2)
    return max(1, shape.numbers // 2 - rope), rope


def costs(shape: AttentionShape, size: tuple[int, int], cache_dtype: str, context: int) -> tuple[Costs, Costs]:
    """Of one layer with full attention, before and after. A multiplication and an addition are two operations.

    After: the layout that `convert` writes, without a query latent, decoded absorbed: scores against the latent and the
    rotating key, kv_lora_rank + qk_rope_head_dim wide, and sums of latents. A source with a latent is counted so too.
    """
    after = _latent_costs(shape, size, cache_dtype, context)
    if shape.kv_lora_rank is not None:
        return _latent_costs(shape, (shape.kv_lora_rank, shape.qk_rope_head_dim or 0), cache_dtype, context), after
    h, heads = shape.hidden_size, shape.num_attention_heads
    d, v, groups = shape.source_head_dim, shape.v_head_dim, shape.num_key_value_heads
    parameters = h * (heads * d + groups * (d + v) + heads * v)
    before = Costs(
        parameters=parameters,
        decode_flops=2 * parameters + 2 * heads * (d + v) * context,
        decode_bytes=shape.numbers * BYTES[cache_dtype] * context,
        prefill_flops=2 * parameters + heads * (d + v) * context,  # a token sees half the context on average
        key_width=d,
        value_width=v,
    )
    return before, after


def _latent_costs(shape: AttentionShape, size: tuple[int, int], cache_dtype: str, context: int) -> Costs:
    h, heads, v, nope = shape.hidden_size, shape.num_attention_heads, shape.v_head_dim, shape.unrotated_width
    rank, rope = size
    parameters = h * heads * (nope + rope) + h * (rank + rope) + rank * heads * (nope + v) + h * heads * v
    return Costs(
        parameters=parameters,
        decode_flops=2 * parameters + 2 * heads * (2 * rank + rope) * context,
        decode_bytes=(rank + rope) * BYTES[cache_dtype] * context,
        prefill_flops=2 * parameters + heads * (nope + rope + v) * context,
        key_width=nope + rope,
        value_width=v,
    )


def ranks(
    shape: AttentionShape,
    size: tuple[int, int],
    cache_dtype: str,
    context: int,
    sizes: tuple[int, ...],
    memory: tuple[int, int] | None,
) -> list[Rank]:
    """One row per tensor-parallel size; `memory` = (usable bytes of a GPU, bytes of the weights), or None.

    Keys and values are divided by KV head and repeated beyond that; a latent is whole on every rank.
    """
    rows, itemsize = [], BYTES[cache_dtype]
    held, layers = shape.cached_tokens(context), len(shape.windows)
    for tp in sizes:
        heads, groups = shape.num_attention_heads, shape.num_key_value_heads
        own_numbers = shape.numbers
        own_legal = latent_legal = heads % tp == 0
        if shape.kind != "MLA":
            own_legal = own_legal and (groups % tp == 0 or tp % groups == 0)
            own_numbers = max(1, math.ceil(groups / tp)) * (shape.source_head_dim + shape.v_head_dim)
        own, latent = own_numbers * itemsize, sum(size) * itemsize
        budget = None if memory is None else cache_budget(memory, tp)
        rows.append(
            Rank(
                tp=tp,
                own_legal=own_legal,
                latent_legal=latent_legal,
                own_bytes=own * layers,
                latent_bytes=latent * layers,
                own_fits=None if budget is None else budget // (own * held),
                latent_fits=None if budget is None else budget // (latent * held),
            )
        )
    return rows


def cache_budget(memory: tuple[int, int], tp: int) -> int:
    """Bytes per rank for the cache: usable memory less its share of the weights and of ACTIVATION_SHARE."""
    usable, weights = memory
    return max(0, int(usable * (1 - ACTIVATION_SHARE)) - weights // tp)


def serving(shape: AttentionShape, rows: list[Rank], memory: tuple[int, int]) -> Serving | None:
    """Server settings at the first legal tensor-parallel size at which a sequence fits; None where none does.

    max_num_seqs: as many as fit at the context, so that none is put off. max_num_batched_tokens: the largest power of
    two, within BATCHED_TOKENS, whose activations fit in ACTIVATION_SHARE, at an estimate of 16 hidden-size and 3
    query-wide numbers of 2 bytes per token.
    """
    for row in rows:
        if row.latent_legal and row.latent_fits:
            width = 16 * shape.hidden_size + 3 * shape.num_attention_heads * shape.source_head_dim
            room = memory[0] * ACTIVATION_SHARE / (2 * width)
            low, high = BATCHED_TOKENS
            batched = min(high, max(low, 2 ** int(math.log2(max(room, 1)))))
            return Serving(row.tp, memory[1], cache_budget(memory, row.tp), row.latent_fits, batched)
    return None
