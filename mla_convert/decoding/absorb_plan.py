"""What absorbing one layer's attention changes: which products are merged, which chunks take the absorbed path.

Both are decided by counting. A token's products are merged where one matrix holds fewer numbers than its two
factors. A chunk of queries takes the path whose larger of operations and bytes (at `balance` operations in the
time of a byte) is smaller.
"""

from dataclasses import dataclass
from typing import Any

from torch import nn

from mla_convert.formats.absorbed import merging_reads_less

# Operations in the time of one byte. A CPU core: 50 to 400 GFLOP/s at 10 to 20 GB/s; a GPU: 1,000 TFLOP/s at 4 TB/s.
_BALANCE = {"cpu": 10.0, "cuda": 250.0}


@dataclass(frozen=True)
class AbsorptionPlan:
    """Shapes of one layer and the choices that follow from them; `inner` is the width the query is projected from."""

    num_heads: int
    qk_nope_head_dim: int
    qk_rope_head_dim: int
    v_head_dim: int
    kv_lora_rank: int
    inner: int
    hidden_size: int
    itemsize: int
    balance: float
    plain: bool = True  # False: quantised or adapted projections, which are left as they are

    @property
    def merges_query(self) -> bool:
        """Whether W_UK^T W_UQ is one matrix."""
        return self.plain and merging_reads_less(self.qk_nope_head_dim, self.kv_lora_rank, self.inner)

    @property
    def merges_output(self) -> bool:
        """Whether W_O W_UV is one matrix."""
        return self.plain and merging_reads_less(self.v_head_dim, self.kv_lora_rank, self.hidden_size)

    def cost(self, queries: int, tokens: int, batch: int, absorbed: bool) -> float:
        """Operations of `queries` new tokens that see `tokens` cached ones, or its bytes in operations if larger."""
        heads, rank, rope = self.num_heads, self.kv_lora_rank, self.qk_rope_head_dim
        nope, value = self.qk_nope_head_dim, self.v_head_dim
        latents, weights = tokens * (rank + rope), heads * rank * (nope + value)
        if absorbed:
            operations = 2 * heads * queries * (rank * (nope + value) + tokens * (2 * rank + rope))
            numbers = latents + queries * heads * (2 * rank + rope)
        else:
            operations = 2 * heads * (tokens * rank * (nope + value) + queries * tokens * (nope + rope + value))
            numbers = latents + 2 * tokens * heads * (nope + rope + value)  # keys and values: written, then read
        return max(batch * operations, self.balance * self.itemsize * (batch * numbers + weights))

    def absorbs(self, queries: int, tokens: int, batch: int = 1) -> bool:
        """Whether a chunk takes the absorbed path; one query always does."""
        if queries == 1:
            return True
        return self.cost(queries, tokens, batch, absorbed=True) < self.cost(queries, tokens, batch, absorbed=False)

    def longest_absorbed_chunk(self, tokens: int) -> int:
        """The largest number of queries over `tokens` cached ones that is absorbed (at most `tokens`)."""
        low, high = 1, tokens
        while low < high:
            middle = (low + high + 1) // 2
            low, high = (middle, high) if self.absorbs(middle, tokens) else (low, middle - 1)
        return low

    def __str__(self) -> str:
        two_q = self.num_heads * self.qk_nope_head_dim * (self.kv_lora_rank + self.inner)
        one_q = self.num_heads * self.kv_lora_rank * self.inner
        two_out = self.num_heads * self.v_head_dim * (self.kv_lora_rank + self.hidden_size)
        one_out = self.num_heads * self.kv_lora_rank * self.hidden_size
        chunks = ", ".join(f"{self.longest_absorbed_chunk(tokens):,} of {tokens:,}" for tokens in (1024, 8192, 32768))
        return (
            f"{self.num_heads} heads, latent {self.kv_lora_rank} + {self.qk_rope_head_dim}: "
            f"query {'merged' if self.merges_query else 'in two steps'} (one matrix {one_q:,} numbers, two {two_q:,}), "
            f"output {'merged' if self.merges_output else 'in two steps'} (one {one_out:,}, two {two_out:,}); "
            f"absorbed up to a chunk of {chunks} tokens"
        )


def plan_of(attention: object) -> AbsorptionPlan:
    """The plan of a stock DeepSeek attention module, by its attributes and the device and dtype of its weights."""
    module: Any = attention
    weight = module.kv_a_layernorm.weight  # never quantised
    query = module.q_proj if module.q_lora_rank is None else module.q_b_proj
    plain = all(type(linear) is nn.Linear for linear in (query, module.kv_b_proj, module.o_proj))
    return AbsorptionPlan(
        num_heads=module.kv_b_proj.out_features // (module.qk_nope_head_dim + module.v_head_dim),
        qk_nope_head_dim=module.qk_nope_head_dim,
        qk_rope_head_dim=module.qk_rope_head_dim,
        v_head_dim=module.v_head_dim,
        kv_lora_rank=module.kv_lora_rank,
        inner=module.q_lora_rank or module.hidden_size,
        hidden_size=module.hidden_size,
        itemsize=weight.element_size(),
        balance=_BALANCE.get(weight.device.type, _BALANCE["cuda"]),
        plain=plain,
    )
