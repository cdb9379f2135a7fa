"""One thread and no network for every test; set before torch and transformers are imported."""

import os
from pathlib import Path

for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"):
    os.environ[name] = "1"
os.environ.update(HF_HUB_OFFLINE="1", TRANSFORMERS_OFFLINE="1", HF_DATASETS_OFFLINE="1", TOKENIZERS_PARALLELISM="false")

import pytest  # noqa: E402
import torch  # noqa: E402
from hypothesis import settings  # noqa: E402

torch.set_num_threads(1)
# Shared machines are slow at times, so no deadline; the same examples everywhere, so that a failure repeats.
settings.register_profile("fixed", deadline=None, derandomize=True, max_examples=40)
settings.load_profile("fixed")


@pytest.fixture(scope="session")
def smollm_shaped(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small model that the demo's and README's ranks, 128 + 64, fit: 3 KV heads of 64, as SmolLM2 has."""
    from tiny import tiny_model

    return tiny_model(
        tmp_path_factory.mktemp("shaped") / "source",
        projection_std=0.1,
        hidden_size=162,
        num_attention_heads=3,
        num_key_value_heads=3,
        head_dim=64,
        num_hidden_layers=2,
        max_position_embeddings=2048,
    )
