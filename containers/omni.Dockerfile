# syntax=docker/dockerfile:1.7.1
# NeMo-RL's branch for Nemotron 3 Nano Omni at one commit. No release carries it: the branch brings a vLLM of its own as a
# submodule, whose Python code is installed over a precompiled wheel. Needs network and no GPU. x86_64 only: the wheel.
# To pin the base by content: --build-arg BASE_IMAGE=nvcr.io/nvidia/cuda-dl-base:...@sha256:...
ARG BASE_IMAGE=nvcr.io/nvidia/cuda-dl-base:25.05-cuda12.9-devel-ubuntu24.04
ARG UV_VERSION=0.9.30
FROM ghcr.io/astral-sh/uv:${UV_VERSION} AS uv

FROM ${BASE_IMAGE}
SHELL ["/bin/bash", "-euxo", "pipefail", "-c"]
RUN <<'EOF'
apt-get update
DEBIAN_FRONTEND=noninteractive apt-get install --yes --no-install-recommends ca-certificates curl git jq less rsync wget
rm -rf /var/lib/apt/lists/*
EOF

COPY --from=uv /uv /uvx /usr/local/bin/

# Where NeMo-RL looks for its environments. H100 and B200 are what its kernels are compiled for.
ENV NRL_CONTAINER=1 \
    RAY_USAGE_STATS_ENABLED=0 \
    RAY_ENABLE_UV_RUN_RUNTIME_ENV=0 \
    NEMO_RL_VENV_DIR=/opt/ray_venvs \
    UV_PROJECT_ENVIRONMENT=/opt/nemo_rl_venv \
    UV_LINK_MODE=copy \
    TORCH_CUDA_ARCH_LIST="9.0 10.0"

ARG NEMO_RL_COMMIT=98ba11c0a77e177a903cd3756570684437a08e8d
ENV NEMO_RL_COMMIT=${NEMO_RL_COMMIT}
WORKDIR /opt/nemo-rl
RUN <<'EOF'
git init --quiet
git fetch --quiet --depth 1 https://github.com/NVIDIA-NeMo/RL.git "${NEMO_RL_COMMIT}"
git checkout --quiet --detach FETCH_HEAD
git submodule update --init --recursive --depth 1
EOF

# The submodule's history is shallow, so that its version has to be told.
ARG VLLM_VERSION=0.14.0rc2.dev196+g27ca95b3c
ARG VLLM_WHEEL=https://wheels.vllm.ai/27ca95b3c9e6e32ac02508e729c01865800fd036/vllm-0.14.0rc2.dev196%2Bg27ca95b3c-cp38-abi3-manylinux_2_31_x86_64.whl
ENV VLLM_PRECOMPILED_WHEEL_LOCATION=${VLLM_WHEEL} \
    SETUPTOOLS_SCM_PRETEND_VERSION_FOR_VLLM=${VLLM_VERSION}

ARG PYTHON_VERSION=3.12.12
ARG SETUPTOOLS_VERSION=79.0.1
ARG SETUPTOOLS_SCM_VERSION=9.2.2
ARG TORCH_VERSION=2.9.1
ARG MAX_JOBS=4
RUN <<'EOF'
export MAX_JOBS SETUPTOOLS_SCM_PRETEND_VERSION="${VLLM_VERSION}"
uv venv --seed --python "${PYTHON_VERSION}" "${UV_PROJECT_ENVIRONMENT}"

# vLLM is built without isolation: what builds it is installed first, in the versions of the branch's own uv.lock.
export VIRTUAL_ENV="${UV_PROJECT_ENVIRONMENT}"
uv pip install "setuptools==${SETUPTOOLS_VERSION}" "setuptools_scm==${SETUPTOOLS_SCM_VERSION}"
uv pip install "torch==${TORCH_VERSION}" --index https://download.pytorch.org/whl/cu129

# The backends may conflict: one after the other they fill uv's cache, the last leaves the driver's own environment.
sync() { uv sync --link-mode symlink --locked --no-install-project "$@"; }
sync
sync --extra vllm
sync --extra mcore
sync --extra automodel
sync --all-groups
EOF

ENV PATH="/opt/nemo_rl_venv/bin:${PATH}"

# The environments of the workers. The program ends well even when some failed: what it says of them is read.
RUN <<'EOF'
export MAX_JOBS SETUPTOOLS_SCM_PRETEND_VERSION="${VLLM_VERSION}"
UV_LINK_MODE=symlink uv run nemo_rl/utils/prefetch_venvs.py | tee /tmp/prefetch.log
if grep --quiet '^  Failed:' /tmp/prefetch.log; then exit 1; fi
rm /tmp/prefetch.log
python tools/generate_fingerprint.py > /opt/nemo_rl_container_fingerprint
EOF
