# An image with the pinned requirements and the installed commands, for CPUs and NVIDIA GPUs: torch brings CUDA along, the
# host its driver. docs/launchers.md says how to use it; tests/outside/test_installation.py checks it without Docker.
FROM python:3.11-slim-bookworm

# A C compiler: torch and Triton compile kernels at the first step.
RUN apt-get update \
    && apt-get install --yes --no-install-recommends gcc g++ libc6-dev \
    && rm -rf /var/lib/apt/lists/*

WORKDIR /opt/glm
COPY requirements.txt ./
RUN pip install --no-cache-dir -r requirements.txt
COPY pyproject.toml setup.py README.md LICENSE pretrain_glm.py ./
COPY configs configs
COPY data_utils data_utils
COPY megatron_lite megatron_lite
COPY scripts scripts
RUN pip install --no-cache-dir --no-deps .

RUN useradd --create-home glm
USER glm
WORKDIR /work
CMD ["glm-pretrain", "--help"]
