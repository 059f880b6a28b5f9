# NOT BUILT: there was no Docker daemon, nor a registry with the base image. Each RUN line was run as it stands in a clean root of
# Debian 12, which has the same packages of the same names, on a CPU; FROM and a GPU were not tried.
#
#     docker build -t odc-triton .
#     docker run --gpus all --volume "$PWD:/workspace" odc-triton odc-triton doctor
#
# torch's wheels bring CUDA's libraries of their own, and Triton's its assembler: the base gives what the driver needs.
ARG CUDA=13.0.1
FROM nvidia/cuda:${CUDA}-base-ubuntu24.04

# Triton compiles a kernel's launcher when it is first called: hence a compiler and Python's headers.
RUN apt-get update && apt-get install --yes --no-install-recommends gcc libc6-dev python3-dev python3-venv

ENV PATH=/opt/odc-triton/bin:$PATH PIP_NO_CACHE_DIR=1
RUN python3 -m venv /opt/odc-triton

WORKDIR /odc-triton
COPY . .
# The versions that were tested. Other extras, as in ".[demo,peft]", are a change of this line.
ENV PIP_CONSTRAINT=/odc-triton/constraints.txt
RUN pip install ".[plot]"
RUN odc-triton --version

WORKDIR /workspace
