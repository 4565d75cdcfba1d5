# syntax=docker/dockerfile:1.7.1
# The Super release of NeMo-RL v0.5.0 (x86_64 only) with the virtual environments of its two SWE stages, which the release
# lacks. Needs network (PyPI, GitHub) and no GPU.
# To pin the base by content: --build-arg BASE_IMAGE=nvcr.io/nvidia/nemo-rl:v0.5.0.nemotron_3_super@sha256:...
ARG BASE_IMAGE=nvcr.io/nvidia/nemo-rl:v0.5.0.nemotron_3_super
FROM ${BASE_IMAGE}

# The first PyTorch index of the release's pyproject.toml.
ARG TORCH_BACKEND=cu129

WORKDIR /opt/nemo-rl
SHELL ["/bin/bash", "-euxo", "pipefail", "-c"]
RUN <<'EOF'
grep --fixed-strings --line-regexp --quiet "name = \"pytorch-${TORCH_BACKEND}\"" pyproject.toml \
    || { echo "pyproject.toml has no index pytorch-${TORCH_BACKEND}" >&2; exit 1; }
UV_TORCH_BACKEND="${TORCH_BACKEND}" UV_LINK_MODE=hardlink \
    uv run python examples/nemo_gym/prefetch_venvs.py \
    examples/configs/super/stage2_swe1.yaml examples/configs/super/stage2_swe2.yaml
test -n "$(find "${NEMO_GYM_VENV_DIR:-/opt/gym_venvs}" -path '*swe_agents*/bin/python' -print -quit)"
EOF
