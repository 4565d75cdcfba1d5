# syntax=docker/dockerfile:1.7.1
# Snakemake with Stagecoach: what plans, submits, prepares data and reports. Its build context is a folder with the wheel
# (docs/install.md). The cluster's own sbatch, squeue and MUNGE socket are mounted where it submits.
ARG BASE_IMAGE=docker.io/library/python:3.12.12-slim-bookworm
FROM ${BASE_IMAGE}
SHELL ["/bin/bash", "-euxo", "pipefail", "-c"]

# Empty, or [trl] to train and sample in the image as well.
ARG EXTRAS=
COPY *.whl /opt/wheel/
RUN <<'EOF'
python -m pip install --no-cache-dir "$(echo /opt/wheel/*.whl)${EXTRAS}"
stagecoach --help
snakemake --version
EOF

# Snakemake caches there, whoever the user is.
ENV XDG_CACHE_HOME=/tmp
WORKDIR /project
CMD ["stagecoach", "--help"]
