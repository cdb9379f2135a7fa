"""One thread and no network for every test; set before torch and transformers are imported."""

import os

for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"):
    os.environ[name] = "1"
os.environ.update(
    HF_HUB_OFFLINE="1", TRANSFORMERS_OFFLINE="1", HF_DATASETS_OFFLINE="1", TOKENIZERS_PARALLELISM="false"
)

import torch  # noqa: E402
from hypothesis import settings  # noqa: E402

torch.set_num_threads(1)
# Shared machines are slow at times, so no deadline; the same examples everywhere, so that a failure repeats.
settings.register_profile("fixed", deadline=None, derandomize=True, max_examples=40)
settings.load_profile("fixed")
