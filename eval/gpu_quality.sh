#!/usr/bin/env bash
# A short check on a GPU: convert, verify and a quick suite in bfloat16, with peak memory from the allocator.
#   eval/gpu_quality.sh SOURCE OUT-FOLDER KV_LORA_RANK QK_ROPE_HEAD_DIM
# DEVICE=cpu runs the same without a GPU; CONVERT_ARGS are more options of convert. Results: OUT-FOLDER/suite.json and suite.html.
set -euo pipefail
source_model=$1 out=$2 rank=$3 rope=$4
device=${DEVICE:-cuda}
here=$(cd "$(dirname "$0")" && pwd)
mkdir -p "$out"
mla-convert convert "$source_model" "$out/converted" --kv-lora-rank "$rank" --qk-rope-head-dim "$rope" \
  --device "$device" --dtype bfloat16 --overwrite ${CONVERT_ARGS:-}
mla-convert verify "$source_model" "$out/converted" --device "$device"
mla-convert eval --suite "$here/suites/quick.yaml" "$source_model" "$out/converted" --device "$device" \
  --dtype bfloat16 --parts "$out/parts" --json "$out/suite.json" --html "$out/suite.html"
