"""A transformers model that decodes on its latents, and caches of latents, in full or one byte per number."""
