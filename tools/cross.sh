#!/bin/sh
# Build the wheel for aarch64 on another machine, and run it and some unit tests under qemu-user. See docs/python.md.
set -eu
cd "$(dirname "$0")/.."
KV_SYSROOT=$PWD/build/sysroot-arm64
export KV_SYSROOT
build=build/aarch64
rooms='^(base|kvx|index)\.' # their tests run here; the others' need a day of an emulated processor

tools/sysroot.sh arm64 "$KV_SYSROOT"
cmake -B "$build" -DCMAKE_TOOLCHAIN_FILE="$PWD/cmake/cross-aarch64.cmake" -DCMAKE_BUILD_TYPE=Release -DKVX_CUDA=OFF >"$build.log" 2>&1 ||
    { cat "$build.log"; exit 1; }
tests=
[ -n "${KV_CROSS_TESTS-1}" ] && tests=$(cmake --build "$build" --target help | sed -n 's/^\.\.\. \(test-\(base\|kvx\|index\)-[a-z0-9_]*\)$/\1/p')
# shellcheck disable=SC2086 # a list
tools/build.sh "$build" "${JOBS:-$(nproc)}" python-package kv_cli kv_manager kv_plugin_redis kv_index kv_llama $tests
tools/wheel.py --build "$build" --out build --arch aarch64 --sysroot "$KV_SYSROOT"
[ -z "$tests" ] || ctest --test-dir "$build" -R "$rooms" -j "${JOBS:-$(nproc)}" --timeout 900 --output-on-failure
KV_TEST_CROSS=1 /usr/bin/python3 -B tests/python/test_wheel.py aarch64
