"""Attention over a latent cache: one key and one value, shared by all heads, behind one function.

    score[h,t,s] = scale (q_latent[h,t] . kv_c[s] + q_pe[h,t] . k_pe[s])
    context[h,t] = sum_s softmax_s(score[h,t]) kv_c[s]

`latent_attention` chooses a backend (torch, triton, flashmla) for the device and shape. kv_c is key and value at
once, so every backend reads the cache once for all heads.
"""

from mla_convert.attention.dispatch import backend_for, latent_attention, latent_attention_op

__all__ = ["backend_for", "latent_attention", "latent_attention_op"]
