#!/usr/bin/env bash
# Build everything, warnings as errors, and run the unit tests with each gcc and clang that this Debian packages.
# Usage: tools/matrix.sh [COMPILER ...], e.g. gcc-11 clang-19; without: those of tools/setup.sh that are installed.
# KV_MATRIX_TESTS='^index' runs the tests whose names match instead of all unit tests.
set -uo pipefail
cd "$(dirname "$0")/.." || exit 1
jobs=$(nproc)
[ $# -gt 0 ] || read -ra compilers <<<"$(tools/setup.sh --compilers)"
[ $# -eq 0 ] || compilers=("$@")
passed=0
failed=() missing=()
chosen=(-L unit); [ -z "${KV_MATRIX_TESTS:-}" ] || chosen=(-R "$KV_MATRIX_TESTS")

for compiler in "${compilers[@]}"; do
    cxx=${compiler/gcc/g++}; cxx=${cxx/clang/clang++}
    if ! command -v "$compiler" "$cxx" >/dev/null; then missing+=("$compiler"); continue; fi
    dir=build/matrix/$compiler
    mkdir -p "$dir"
    echo "== $compiler: $("$compiler" --version | head -n 1)"
    if ! cmake -S . -B "$dir" -DCMAKE_BUILD_TYPE=Release -DKV_WERROR=ON -DKVX_CUDA=OFF -DCMAKE_C_COMPILER="$compiler" \
        -DCMAKE_CXX_COMPILER="$cxx" >"$dir/configure.log" 2>&1; then
        tail -n 20 "$dir/configure.log"; failed+=("$compiler: cmake"); continue
    fi
    tools/build.sh "$dir" "$jobs" || { failed+=("$compiler: build"); continue; }
    if ctest --test-dir "$dir" "${chosen[@]}" --no-tests=error --output-on-failure -j "$((8 * jobs))" --timeout 300 \
        >"$dir/test.log" 2>&1; then
        passed=$((passed + 1))
        grep -E '^[0-9]+% tests passed' "$dir/test.log"
    else
        tail -n 60 "$dir/test.log"; failed+=("$compiler: tests")
    fi
done

[ ${#missing[@]} -eq 0 ] || echo "not installed, left out: ${missing[*]}"
cat <<'TEXT'
Other releases have other compilers. For Debian 13 (gcc 14, clang 19), as root:
  debootstrap trixie /srv/trixie && git clone . /srv/trixie/srv/kvasir
  mount -t proc proc /srv/trixie/proc && mount --rbind /dev /srv/trixie/dev
  chroot /srv/trixie sh -c 'cd /srv/kvasir && ./dev quick WERROR=ON'
TEXT
[ ${#failed[@]} -eq 0 ] || printf 'failed: %s\n' "${failed[@]}"
echo "$passed passed, ${#failed[@]} failed"
[ ${#failed[@]} -eq 0 ] && [ "$passed" -gt 0 ]
