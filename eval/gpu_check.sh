#!/usr/bin/env bash
# Kernels, speed and memory on one GPU, from this tree, in at most 8 minutes. No download, no checkpoint: random weights.
# Usage: eval/gpu_check.sh [FOLDER]   writes kernels.json and bench.json there (default: gpu-check-out).
# PYTHON names an interpreter with torch for CUDA, triton, transformers, typer, rich, jaxtyping and PyYAML (default: python3).
set -uo pipefail
cd "$(dirname "$0")/.."
out=$(mkdir -p "${1:-gpu-check-out}" && cd "${1:-gpu-check-out}" && pwd) || exit 2
python=${PYTHON:-python3}
export PYTHONPATH="$PWD${PYTHONPATH:+:$PYTHONPATH}" PYTHONUNBUFFERED=1 HF_HUB_OFFLINE=1 TOKENIZERS_PARALLELISM=false
"$python" -c 'import torch, triton, transformers; assert torch.cuda.is_available(), "no GPU"; print(torch.__version__, triton.__version__, transformers.__version__, torch.cuda.get_device_name())' || exit 2

status=0
# 1 and 2: correctness against fp64, then microseconds, GB/s and TFLOP/s of the kernel beside torch's own attention.
timeout 270 "$python" eval/gpu_check.py --out "$out/kernels.json" --seconds 250 || status=1
# 3: a random model of Llama-3-8B's shape before and after conversion, with a plain and an fp8 cache.
timeout 200 "$python" -m mla_convert.cli bench --shape llama3-8b --kv-lora-rank 512 --qk-rope-head-dim 64 \
  --dtype bfloat16 --device cuda --context 4k,32k --batch 1,32 --cache-dtype fp8 \
  --new-tokens 8 --repeats 3 --prefill 4096 --json "$out/bench.json" || status=1
exit $status
