#!/usr/bin/env bash
# Everything that only a GPU can say about libkvx_cuda and the tiers' GPU lanes, in one command and under 8 minutes:
# builds the kvx room alone (a C and a C++ compiler, CMake and the CUDA toolkit are all it takes), compares device memory
# with the host path and its reference, captures graphs, runs threads and streams, storages and transfers, looks with
# compute-sanitizer, and measures. The result is one JSON file in the folder given, and beside it a log of what failed.
# Where the whole tree is built, too, it lets a block manager's GPU fail, moves blocks through all tiers, and compares
# with PyTorch.
#
#   tools/gpu-check.sh [FOLDER]      default bench/results
#
# KVX_GPU_BUILD: build folder (build/gpu)      KVX_GPU_ARCH: CMAKE_CUDA_ARCHITECTURES (90)
# KVX_GPU_TOKENS: size of the benchmark        KV_TEST_SCALE: percent of the matrices (100)
# KVBM_GPU_MIB: size of the transfers' (1024)  KVX_GPU_ONLY: "STEP STEP": these, besides building
# KVX_GPU_TREE: build of the whole tree (build), or a folder with its bin, lib, tests and python
# KVX_GPU_LIMIT: seconds for all of it (470)   KVX_VLLM_CUBIN: see bench/kvx_torch_bench.py
# KVX_GPU_DRY=1: on an emulated GPU, without toolkit and driver: tries the programs and this script, says nothing else
# Exit: 0 all passed, 1 something failed, 77 no GPU here.
set -uo pipefail
dry=${KVX_GPU_DRY:-0}
started=$SECONDS
limit_all=${KVX_GPU_LIMIT:-470}
results=$(realpath -m "${1:-$(dirname "$0")/../bench/results}")
cd "$(dirname "$0")/.." || exit 1
build=$(realpath -m "${KVX_GPU_BUILD:-build/gpu$([ "$dry" = 0 ] || echo -dry)}")
for folder in "${CUDA_HOME:-/usr/local/cuda}/bin" "${CUDA_PATH:-/opt/cuda}/bin" /usr/local/cuda/bin /opt/cuda/bin \
    /usr/local/cuda-*/bin; do
    command -v nvcc >/dev/null || { [ -x "$folder/nvcc" ] && PATH=$PATH:$folder; }
done
[ "$dry" != 0 ] || command -v nvcc >/dev/null || { echo "skipped: no nvcc" >&2; exit 77; }

work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
failed=0
: >"$work/steps"

# step NAME SECONDS COMMAND...: run it with a time limit, its own or what is left, and note how it ended.
step() {
    local name=$1 limit=$2 left=$((limit_all - (SECONDS - started))) begin=$SECONDS rc verdict; shift 2
    case " configure build ${KVX_GPU_ONLY:-$name} " in *" $name "*) ;; *) return 0 ;; esac
    [ -z "${KVX_GPU_DRY:-}" ] || limit=$left # no lent machine's minutes, but one that may have much else to do
    [ "$limit" -le "$left" ] || limit=$((left > 1 ? left : 1))
    timeout --kill-after=10 "$limit" "$@" >"$work/$name.log" 2>&1
    rc=$?
    case $rc in
        0) verdict=ok ;;
        77) verdict=skipped ;;
        124 | 137) verdict="out of time ($limit s)"; failed=1 ;;
        *) verdict="failed (exit $rc)"; failed=1 ;;
    esac
    printf '%-24s %-10s %3d s\n' "$name" "$verdict" $((SECONDS - begin))
    [ "$verdict" = ok ] || tail -n 25 "$work/$name.log"
    printf '{"step":"%s","verdict":"%s","seconds":%d}\n' "$name" "$verdict" $((SECONDS - begin)) >>"$work/steps"
    return $rc
}

say_skipped() {
    printf '%-24s skipped: %s\n' "$1" "$2"
    printf '{"step":"%s","verdict":"skipped: %s","seconds":0}\n' "$1" "$2" >>"$work/steps"
}

# Warnings of another compiler are no reason to stop here.
how=(-DCMAKE_BUILD_TYPE=Release -DCMAKE_CUDA_COMPILER="$(command -v nvcc)" ${KVX_GPU_ARCH:+-DCMAKE_CUDA_ARCHITECTURES="$KVX_GPU_ARCH"})
[ "$dry" = 0 ] || how=(-DCMAKE_BUILD_TYPE=Debug -DKVX_CUDA=OFF -DKVX_GPU_DRY=ON) # most of it is compiling
step configure 60 cmake -S src/kvx -B "$build" -DKV_WERROR=OFF "${how[@]}" || exit 1
step build $((dry ? 400 : 240)) cmake --build "$build" -j "$(nproc)" || exit 1
[ -e "$build"/lib/libkvx_cuda.so ] || { echo "libkvx_cuda was not built" >&2; exit 1; }
timeout --kill-after=10 30 "$build"/tests/gpu_streams >"$work/probe" 2>&1 # a broken driver may hang
if [ $? = 77 ]; then
    cat "$work/probe"
    exit 77
fi

export KV_BUILD_DIR=$build
step host_matrix 60 env KV_TEST_SCALE=25 "$build"/tests/test-kvx-matrix
step device_matrix 120 env KV_TEST_SCALE="${KV_TEST_SCALE:-100}" "$build"/tests/gpu_matrix
step shapes 60 env KV_TEST_SCALE="${KV_TEST_SCALE:-100}" "$build"/tests/gpu_shapes
step graphs 40 "$build"/tests/gpu_graph
step graphs_without_overlap 40 env KVX_CUDA_OVERLAP=0 "$build"/tests/gpu_graph
step streams 30 "$build"/tests/gpu_streams
step storages 60 env KV_TEST_SCALE="${KV_TEST_SCALE:-100}" "$build"/tests/gpu_storage
for what in events both capture matrix; do
    step transfer_$what 60 env KV_TEST_SCALE="${KV_TEST_SCALE:-100}" "$build"/tests/gpu_transfer $what
done
step tiers 90 env KVBM_GPU_MIB="${KVBM_GPU_MIB:-1024}" "$build"/bench/gpu_tier_bench tiers
step pieces 60 env KVBM_GPU_MIB="${KVBM_GPU_MIB:-1024}" "$build"/bench/gpu_tier_bench pieces
step tiers_deep 60 env KVBM_GPU_MIB="${KVBM_GPU_MIB:-512}" "$build"/bench/gpu_tier_bench_deep tiers
step pieces_kernel 60 env KVBM_GPU_MIB="${KVBM_GPU_MIB:-1024}" "$build"/bench/gpu_tier_bench_kernel pieces
tree=$(realpath -m "${KVX_GPU_TREE:-build}")
of_tree() { # NAME SECONDS PROGRAM...: a step that needs a program of the whole tree
    if [ -x "$tree/$3" ]; then
        step "$1" "$2" env LD_LIBRARY_PATH="$tree/lib${LD_LIBRARY_PATH:+:$LD_LIBRARY_PATH}" "$tree/$3" "${@:4}"
    else
        say_skipped "$1" "the whole tree isn't built"
    fi
}
if [ "$dry" = 0 ]; then
    of_tree faults 60 tests/gpu_faults
    mkdir -p "$work/tiers-disk"
    of_tree all_tiers 60 bin/kvasir bench tiers --gpu 0 --blocks 512 --disk "$work/tiers-disk" --object "$work/tiers-disk/object" --json
    step busy 60 "$build"/bench/gpu_busy_bench
    if [ -d "$tree/python/kvasir" ]; then
        step torch 90 env PYTHONPATH="$tree/python" KVASIR_LIBRARY_PATH="$tree/lib" python3 bench/kvx_torch_bench.py \
            ${KVX_VLLM_CUBIN:+--vllm-cubin "$KVX_VLLM_CUBIN"}
    else
        say_skipped torch "the whole tree isn't built"
    fi
    step bench 90 "$build"/bench/kvx_gpu_bench ${KVX_GPU_TOKENS:+"$KVX_GPU_TOKENS"}
    step bench_without_overlap 60 env KVX_CUDA_OVERLAP=0 "$build"/bench/kvx_gpu_bench 65536
else
    say_skipped bench "kernels don't run on an emulated GPU"
fi

# Each tool on as much as fits; the time of the whole check has the last word. Allocations are exact here,
# so that reading past an end is seen. The kernels use no shared memory: racecheck has little to find.
sanitizer=
[ "$dry" != 0 ] || sanitizer=$(PATH=$PATH:$(dirname "$(command -v nvcc)"):/usr/local/cuda/bin; command -v compute-sanitizer)
sanitize() { # TOOL SCALE LIMIT PROGRAM...
    local tool=$1 scale=$2 limit=$3 left=$((limit_all - 10 - (SECONDS - started))) failed_before=$failed name rc; shift 3
    name=sanitizer_${tool}_${1#gpu_}
    if [ -z "$sanitizer" ]; then
        say_skipped "$name" "no compute-sanitizer"
        return
    elif [ "$left" -lt 15 ]; then
        say_skipped "$name" "no time left"
        return
    fi
    step "$name" $((left < limit ? left : limit)) env KVX_GPU_EXACT=1 KV_TEST_SCALE="$scale" \
        "$sanitizer" --tool "$tool" --error-exitcode 1 "$build/tests/$1" "${@:2}"
    rc=$?
    # A machine that forbids the tool says so at once; that is no fault of the code, and neither is a slow tool.
    if [ -e "$work/$name.log" ] && grep -qE 'Device not supported|Unable to attach|not supported on this' "$work/$name.log"; then
        echo "                         (compute-sanitizer doesn't work on this machine)"
        failed=$failed_before
        sed -i '$s/"verdict":"[^"]*"/"verdict":"skipped: does not work on this machine"/' "$work/steps"
    elif [ $rc = 124 ] || [ $rc = 137 ]; then
        failed=$failed_before
    fi
}
for tool in memcheck initcheck racecheck synccheck; do
    sanitize $tool 1 60 gpu_shapes kernels # every kernel
done
sanitize memcheck 2 60 gpu_matrix
sanitize memcheck 3 60 gpu_transfer matrix both

mkdir -p "$results"
name=$(sed -n 's/.*"figure":"device","name":"\([^"]*\)".*/\1/p' "$work/bench.log" 2>/dev/null | head -n 1 | tr ' /' '--')
[ "$dry" = 0 ] || name=dry
out=$results/kvx-gpu-${name:-unknown}-$(date -u +%Y%m%d-%H%M%S).json
lines() { # [FILE...]: JSON lines as the elements of a list; from a pipe without files
    grep -h '^{' "$@" 2>/dev/null | paste -sd, - | sed 's/},{/},\n    {/g'
}
{
    printf '{\n  "commit": "%s",\n  "date": "%s",\n' "$(git describe --always --dirty 2>/dev/null || echo unknown)" "$(date -u +%FT%TZ)"
    printf '  "nvcc": "%s",\n' "$(nvcc --version 2>/dev/null | sed -n 's/.*release \(.*\)/\1/p')"
    printf '  "steps": [\n    %s\n  ],\n' "$(lines "$work/steps")"
    printf '  "matrix": "%s",\n' "$(grep -hs 'failed' "$work/device_matrix.log" | sed 's/ (KV_TEST.*//' | paste -sd';' - | tr -d '"')"
    printf '  "figures": [\n    %s\n  ],\n' "$(lines "$work/bench.log")"
    printf '  "tiers": [\n    %s\n  ],\n' "$(lines "$work/tiers.log")"
    printf '  "pieces": [\n    %s\n  ],\n' "$(lines "$work/pieces.log")"
    printf '  "pieces_with_kernel": [\n    %s\n  ],\n' "$(lines "$work/pieces_kernel.log")"
    printf '  "all_tiers": [\n    %s\n  ],\n' "$(lines "$work/all_tiers.log")"
    printf '  "busy": [\n    %s\n  ],\n' "$(lines "$work/busy.log")"
    printf '  "torch": [\n    %s\n  ],\n' "$(lines "$work/torch.log")"
    printf '  "tiers_with_8_chunks_in_flight": [\n    %s\n  ],\n' "$(lines "$work/tiers_deep.log")"
    printf '  "figures_without_overlap": [\n    %s\n  ]\n}\n' "$(grep -hE '"figure":"(decode|empty|device)' "$work/bench_without_overlap.log" 2>/dev/null | lines)"
} >"$out"
if [ $failed != 0 ]; then
    for log in "$work"/*.log; do
        printf '==== %s\n' "$(basename "$log" .log)"
        tail -n 200 "$log"
    done >"${out%.json}.log"
fi
echo
sed -n 's/^{"bench":"tier_gpu","figure":"\([^"]*\)","direction":"\([^"]*\)","by":"\([^"]*\)","region":\([0-9]*\).*"gb_per_s":\([0-9.]*\),"copy.*"of_copy":\([0-9.]*\).*/\1 of \4 bytes, \2 (\3): \5 GB\/s, \6 of one copy/p
        s/^{"bench":"tier_gpu","figure":"\([^"]*\)","by":"\([^"]*\)","us":\([0-9.]*\),"p99_us":\([0-9.]*\).*/\1 (\2): \3 us, p99 \4/p' "$work/tiers.log" "$work/pieces.log" 2>/dev/null
{ grep -hs '"of_copy"\|"in_graph_us"' "$work/bench.log"; grep -hs '"in_graph_us"' "$work/bench_without_overlap.log"; } |
    sed -E 's/.*"figure":"([^"]*)","layout":"([^"]*)","tokens":([0-9]*).*"gb_per_s":([0-9.]*),"copy.*"of_copy":([0-9.]*).*/\1 \2, \3 tokens: \4 GB\/s, \5 of a device copy/
            s/.*"figure":"decode_write","layout":"([^"]*)","tokens":([0-9]*),"layers":([0-9]*).*"in_graph_us":([0-9.]*),"of_empty_in_graph":([0-9.]*),"one_by_one_us":([0-9.]*),"of_empty_one_by_one":([0-9.]*),"overlap":([a-z]*).*/decode \1, \2 tokens, \3 layers: \4 us in a graph (\5 of an empty kernel), \6 us alone (\7) (overlap: \8)/
            s/.*"figure":"empty_kernel","in_graph_us":([0-9.]*),"one_by_one_us":([0-9.]*),"overlapped_in_graph_us":([0-9.]*),"overlapped_one_by_one_us":([0-9.]*).*/empty kernel: \1 us in a graph, \2 alone; overlapped \3, \4/'
sed -nE 's/.*"figure":"([^"]*)","cache":"([^"]*)","tokens":([0-9]*),"us":([0-9.]*),.*"times_ours":([0-9.]*).*/\1, \2, \3 tokens: \4 us, \5 times ours/p' "$work/torch.log" 2>/dev/null
sed -nE 's/.*"load":"([^"]*)","direction":"([^"]*)","kernel":"([^"]*)".*"slower":([0-9.]*),"gb_per_s":([0-9.]*),"gb_per_s_alone":([0-9.]*).*/\3 beside \1 \2: \4 times as long; \5 of \6 GB\/s/p' "$work/busy.log" 2>/dev/null
echo
echo "$out"
echo "$((SECONDS - started)) s, $([ $failed = 0 ] && echo 'all passed' || echo 'FAILED')"
exit $failed
