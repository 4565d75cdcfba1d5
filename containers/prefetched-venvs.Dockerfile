# syntax=docker/dockerfile:1.7.1
# NeMo-RL v0.7.0 with the virtual environments of every Gym environment that Super's stages use, so that no node builds
# them when a stage starts. Needs network (PyPI, GitHub) and no GPU.
# To pin the base by content: --build-arg BASE_IMAGE=nvcr.io/nvidia/nemo-rl:v0.7.0@sha256:...
ARG BASE_IMAGE=nvcr.io/nvidia/nemo-rl:v0.7.0
FROM ${BASE_IMAGE}

# The image's own CUDA and vLLM: without the override Gym's judges get a vLLM for CUDA 12, which does not load here.
# The wheel named below is the one in the release's own uv.lock; that of 0.20.0 is built for cu130 and bears no suffix.
ARG NEMO_GYM_CUDA=cu130
ARG NEMO_GYM_VLLM_VERSION=0.20.0
ARG WHEEL_ARCH=x86_64

WORKDIR /opt/nemo-rl
SHELL ["/bin/bash", "-euxo", "pipefail", "-c"]
RUN <<'EOF'
test "$(uname -m)" = "${WHEEL_ARCH}" || { echo "WHEEL_ARCH=${WHEEL_ARCH}, but this is $(uname -m)" >&2; exit 1; }
override=$(mktemp)
wheel="vllm-${NEMO_GYM_VLLM_VERSION}-cp38-abi3-manylinux_2_35_${WHEEL_ARCH}.whl"
echo "vllm @ https://github.com/vllm-project/vllm/releases/download/v${NEMO_GYM_VLLM_VERSION}/${wheel}" > "${override}"
UV_TORCH_BACKEND="${NEMO_GYM_CUDA}" UV_OVERRIDE="${override}" UV_LINK_MODE=symlink \
    uv run python examples/nemo_gym/prefetch_venvs.py examples/nemo_gym/prefetch_super_all_envs.yaml
rm "${override}"

# What was asked for is there: environments, and in none of them another vLLM.
venvs="${NEMO_GYM_VENV_DIR:-/opt/gym_venvs}"
test -n "$(find "${venvs}" -path '*/bin/python' -print -quit)"
others=$(find "${venvs}" -type d -name 'vllm-*.dist-info' ! -name "vllm-${NEMO_GYM_VLLM_VERSION}*")
test -z "${others}" || { echo "another vLLM than ${NEMO_GYM_VLLM_VERSION}: ${others}" >&2; exit 1; }
EOF
