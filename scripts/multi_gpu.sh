#!/usr/bin/env bash
# Conformance of every parallel layout over the GPUs of this host, against one rank. Needs no network.
# Usage: bash scripts/multi_gpu.sh [ranks] [further arguments of scripts/multi_gpu.py]
# Without GPUs: bash scripts/multi_gpu.sh 2 --device cpu
set -euo pipefail
cd "$(dirname "$0")/.."
export NCCL_NVLS_ENABLE="${NCCL_NVLS_ENABLE:-0}" # NVLink multicast stays off
ranks=()
if [[ "${1:-}" =~ ^[0-9]+$ ]]; then
    ranks=(--ranks "$1")
    shift
fi
PYTHONPATH="$PWD/src${PYTHONPATH:+:$PYTHONPATH}" exec "${PYTHON:-python3}" scripts/multi_gpu.py "${ranks[@]}" "$@"
