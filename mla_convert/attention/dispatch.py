"""Choice of a backend, and the operator that torch.compile sees."""

import functools
import importlib
import importlib.util
import logging
from collections.abc import Callable

import torch
from jaxtyping import Float
from torch import Tensor

from mla_convert.attention.problem import Problem
from mla_convert.errors import BadOption

logger = logging.getLogger(__name__)

BACKENDS = ("auto", "torch", "triton", "flashmla")


def latent_attention(
    q_latent: Float[Tensor, "batch num_heads queries kv_lora_rank"],
    q_pe: Float[Tensor, "batch num_heads queries qk_rope_head_dim"],
    kv_c: Float[Tensor, "batch tokens kv_lora_rank"],
    k_pe: Float[Tensor, "batch tokens qk_rope_head_dim"],
    scale: float,
    mask: Tensor | None = None,
    softcap: float | None = None,
    sinks: Float[Tensor, " num_heads"] | None = None,
    backend: str = "auto",
) -> Float[Tensor, "batch num_heads queries kv_lora_rank"]:
    """softmax(scale (q_latent kv_c^T + q_pe k_pe^T)) kv_c (DeepSeek-V2, arXiv:2405.04434, section 2.1.2).

    `mask` broadcasts to [batch, num_heads, queries, tokens]: added to the scores, or bool with True where a query
    may look; without it every query sees every token. A query that may look nowhere gets 0. `softcap` c replaces a
    score x by c tanh(x / c) before the mask; `sinks` are logits, one per head, that join the softmax with value 0.
    q_pe and k_pe may be 0 wide. `backend`: auto, torch, triton or flashmla; one that cannot do the shape falls back
    to torch with one log line. Differentiable (torch only). Raises BadOption for shapes that do not fit together.
    """
    if torch.compiler.is_compiling():
        # One opaque operator: the blocks are not unrolled into the graph, and it stays whole for every length.
        if torch.is_grad_enabled() and any(t.requires_grad for t in (q_latent, q_pe, kv_c, k_pe)):
            from mla_convert.attention.torch_backend import attend

            return attend(Problem(q_latent, q_pe, kv_c, k_pe, scale, mask, softcap, sinks))
        result: Tensor = latent_attention_op(q_latent, q_pe, kv_c, k_pe, scale, mask, softcap, sinks, backend)
        return result
    return run(Problem(q_latent, q_pe, kv_c, k_pe, scale, mask, softcap, sinks), backend)


def run(problem: Problem, backend: str) -> Tensor:
    """Attention by the backend that fits."""
    name = backend_for(problem, backend)
    attend: Callable[[Problem], Tensor] = importlib.import_module(f"mla_convert.attention.{name}_backend").attend
    return attend(problem)


@torch.library.custom_op("mla_convert::latent_attention", mutates_args=())
def latent_attention_op(
    q_latent: Tensor,
    q_pe: Tensor,
    kv_c: Tensor,
    k_pe: Tensor,
    scale: float,
    mask: Tensor | None,
    softcap: float | None,
    sinks: Tensor | None,
    backend: str,
) -> Tensor:
    """`latent_attention` as one operator for torch.compile and torch.export; not differentiable."""
    return run(Problem(q_latent, q_pe, kv_c, k_pe, scale, mask, softcap, sinks), backend).clone()


@latent_attention_op.register_fake
def _(
    q_latent: Tensor,
    q_pe: Tensor,
    kv_c: Tensor,
    k_pe: Tensor,
    scale: float,
    mask: Tensor | None,
    softcap: float | None,
    sinks: Tensor | None,
    backend: str,
) -> Tensor:
    return torch.empty_like(q_latent, memory_format=torch.contiguous_format)


def backend_for(problem: Problem, backend: str = "auto") -> str:
    """The backend that will run `problem`: torch, triton or flashmla. Raises BadOption for an unknown name."""
    if backend not in BACKENDS:
        raise BadOption(f"unknown backend {backend!r}: use one of {', '.join(BACKENDS)}")
    if backend == "torch" or (backend == "auto" and not problem.kv_c.is_cuda):
        return "torch"
    for name in ("flashmla", "triton") if backend == "auto" else (backend,):
        refusal = _installed(name) or importlib.import_module(f"mla_convert.attention.{name}_backend").refusal(problem)
        if not refusal:
            return name
        _log_once(name, refusal)
    return "torch"


@functools.cache
def _installed(name: str) -> str:
    """Why backend `name` is not there; empty if it is."""
    package = {"triton": "triton", "flashmla": "flash_mla"}[name]
    return "" if importlib.util.find_spec(package) else f"package {package} is not installed"


@functools.cache
def _log_once(name: str, refusal: str) -> None:
    logger.info("latent attention: not with %s: %s", name, refusal)
