#!/usr/bin/env bash
# make install below DESTDIR; then a C and a C++ program built through pkg-config and through CMake run
# against what was installed; exported symbols are only the public ones; uninstall leaves no file.
set -euo pipefail
build=${KV_BUILD_DIR:?}
[ -z "${KV_SANITIZE:-}" ] || { echo 'skipped: sanitized libraries are not for installing'; exit 77; }
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
export DESTDIR=$work/root

# Another prefix than the configured one, as `make install PREFIX=/opt/kv` has it.
cmake --install "$build" --prefix /opt/kv >"$work/install.log"
pc=$(dirname "$(find "$DESTDIR/opt/kv" -name kvevent.pc)")
test "$(PKG_CONFIG_PATH=$pc pkg-config --variable=includedir kvevent)" = /opt/kv/include
"$DESTDIR/opt/kv/bin/kvasir" --version

# Plugins lie with the libraries, whatever the prefix: this one is found, and has no server to talk to.
plugin_found() {
    if (unset LD_LIBRARY_PATH KV_STORE_LIBRARY_PATH && "$@") >"$work/plugin.log" 2>&1; then
        echo "$1 reached a server on port 1"; exit 1
    fi
    if grep -q 'no plugin' "$work/plugin.log" || ! grep -q '127.0.0.1:1' "$work/plugin.log"; then cat "$work/plugin.log"; exit 1; fi
}
plugin_found "$DESTDIR/opt/kv/bin/kvasir" store ls redis://127.0.0.1:1/kv
plugin_found "$build/bin/kvasir" store ls redis://127.0.0.1:1/kv
cc -std=gnu11 "${KV_SOURCE_DIR:?}/examples/store_buffer.c" -o "$work/store_buffer" -I"$DESTDIR/opt/kv/include" \
    -L"$(dirname "$pc")" -lkvstore -Wl,-rpath,"$(dirname "$pc")" # a program's own path counts for libkvstore, not below it
plugin_found "$work/store_buffer" redis://127.0.0.1:1/kv

cmake --build "$build" --target uninstall >"$work/uninstall.log"
left=$(find "$DESTDIR" -type f -o -type l -o -type d -name kvasir -o -type d -name .debug)
[ -z "$left" ] || { echo "left after uninstall: $left"; exit 1; }

cmake --install "$build" >"$work/install.log"
prefix=$(sed -n 's/^CMAKE_INSTALL_PREFIX:PATH=//p' "$build/CMakeCache.txt")
root=$DESTDIR$prefix

for program in kv-indexer kvasir; do
    "$root/bin/$program" --version
done
for page in kvasir kvasir-store kvasir-store-gc kvasir-top kvasir-peer-read kvasir-events-tail kvasir-bench-peers kv-indexer; do
    find "$root" -path "*/man1/$page.1" -size +0 | grep -q .
done
find "$root" -path '*/bash-completion/completions/kvasir' | grep -q .

pc=$(dirname "$(find "$root" -name kvevent.pc)")
libdir=$(dirname "$pc")
for library in kvevent kvindex kvselect kvx kvbm kvstore kvasir_llama; do
    test -L "$libdir/lib$library.so"
    readelf -d "$libdir/lib$library.so" | grep -q "SONAME.*lib$library\.so\.0"
    foreign=$(nm -D --defined-only "$libdir/lib$library.so" | awk '{print $3}' | grep -vE '^kv([eilpsx]|sel|bm)_' || true)
    [ -z "$foreign" ] || { echo "lib$library exports: $foreign"; exit 1; }
done

cat >"$work/user.c" <<'TEXT'
#include <errno.h>
#include <kv_event.h>
#include <kv_index.h>
#include <kvbm.h>
#include <kvx_abi.h>
#include <kvx_ext.h>
#include <stdio.h>

/* A block goes round, and its events come out of the ring. */
static int block_manager(void)
{
    struct kvbm_events *events = NULL;
    struct kvbm_event_ring *ring = NULL;
    struct kvbm_registry *registry = NULL;
    struct kvbm_pool *pool = NULL;
    struct kvbm_registry_opts registry_opts = {sizeof(registry_opts), 0, NULL};
    struct kvbm_pool_opts pool_opts = {sizeof(pool_opts), "four", KV_TIER_HOST, 0, 4, 4};
    struct kvbm_mutable fresh;
    struct kvbm_complete full;
    struct kvbm_event event;
    uint32_t tokens[] = {0, 1, 2, 3};
    uint64_t key = kvbm_block_hash(0, tokens, 4);
    struct kvbm_chain chain = {sizeof(chain), 0, &key, NULL, 0, tokens, false};
    int ok;

    if (kvbm_events_create(NULL, &events) != 0 || kvbm_events_add_ring(events, KVBM_EVENTS_PER_TIER, 0, &ring) < 0)
        return 0;
    registry_opts.events = events;
    if (kvbm_registry_create(&registry_opts, &registry) != 0 || kvbm_pool_create(registry, &pool_opts, &pool) != 0)
        return 0;
    {
        KVBM_AUTO(immutable) struct kvbm_immutable block = {{NULL, 0, 0}};

        ok = kvbm_pool_allocate(pool, 1, &fresh, NULL) == 0 && kvbm_pool_complete(pool, &fresh, 1, &chain, &full) == 0 &&
             kvbm_pool_register(pool, &full, 1, &block) == 0 && kvbm_pool_destroy(pool) == -EBUSY;
    }
    ok = ok && kvbm_events_flush(events, 60000) == 0 && kvbm_event_ring_drain(ring, &event, 1, NULL) == 1 &&
         event.type == KVBM_EVENT_STORED && event.n_tokens == 4;
    ok = ok && kvbm_pool_destroy(pool) == 0 && kvbm_registry_destroy(registry) == 0;
    kvbm_events_destroy(events);
    return ok;
}

int main(void)
{
    struct kvi_index *index = NULL;
    struct kvi_matches found = {0};
    kvx_version_t version;
    struct kv_holder holder = {7, 0};
    uint32_t tokens[] = {0, 1, 2, 3};
    uint64_t local = kve_hash_block(KVE_SEED, tokens, 4, NULL, 0);
    struct kv_block block = {42, local};

    if (local != UINT64_C(9143094415614847814) || kvi_create(NULL, &index) != 0)
        return 1;
    if (kvi_store(index, holder, KV_TIER_DEVICE, NULL, &block, 1, NULL) != 0 ||
        kvi_find(index, &local, 1, &found) != 0 || found.n != 1)
        return 2;
    kvi_matches_fini(&found);
    kvi_destroy(index);
    if (kvx_get_version(&version) != KVX_STATUS_OK || version.abi_major != KVX_ABI_VERSION_MAJOR)
        return 3;
    if (!block_manager())
        return 4;
    puts("works");
    return 0;
}
TEXT
# libkvx exports the four functions of the ABI and those of kvx_ext.h, and needs libc alone.
declared=$(grep -ohE 'kvx_[a-z0-9_]+\(' "$root"/include/kvx_abi.h "$root"/include/kvx_ext.h | tr -d '(' | sort -u)
exported=$(nm -D --defined-only "$libdir/libkvx.so" | awk '{print $3}' | sort)
[ "$declared" = "$exported" ] || { diff <(echo "$declared") <(echo "$exported"); exit 1; }
# And libkvbm those of its headers, libkvasir_llama those of its one.
all_exported() { # LIBRARY PREFIX HEADER...
    local library=$1 prefix=$2; shift 2
    declared=$(sed '/^#/d;/^ *\*/d;/^\/\*/d' "$@" | tr '\n' ' ' | grep -oE 'KV_API [^;]*;' |
        grep -oE "${prefix}_[a-z0-9_]+\\(" | tr -d '(' | sort -u)
    exported=$(nm -D --defined-only "$libdir/lib$library.so" | awk '{print $3}' | sort)
    [ "$declared" = "$exported" ] || { diff <(echo "$declared") <(echo "$exported"); exit 1; }
}
all_exported kvbm 'kv(bm|p)' "$root"/include/kvbm*.h "$root/include/kv_plane.h"
all_exported kvasir_llama kvl "$root/include/kv_llama.h"
test -f "$libdir/libkvasir_llama_preload.so"
others=$(readelf -d "$libdir/libkvx.so" | sed -n 's/.*(NEEDED).*\[\(.*\)\]/\1/p' | grep -v '^libc\.so' || true)
[ -z "$others" ] || { echo "libkvx needs $others"; exit 1; }

cp "$work/user.c" "$work/user.cc"
export PKG_CONFIG_PATH=$pc PKG_CONFIG_SYSROOT_DIR=$DESTDIR LD_LIBRARY_PATH=$libdir
read -ra flags <<<"$(pkg-config --cflags --libs kvevent kvindex kvx kvbm)"
cc -std=c11 "$work/user.c" -o "$work/user-c" "${flags[@]}"
c++ -std=c++17 "$work/user.cc" -o "$work/user-cc" "${flags[@]}"
"$work/user-c" && "$work/user-cc"

# The same against the archives: no library of ours at run time, and no name of theirs that isn't public.
static_program() { # SOURCE LIBRARY...: compile it against the archives, and run it
    local source=$1; shift
    read -ra flags <<<"$(pkg-config --static --cflags --libs "$@" | sed 's/-lkv[a-z_]*/-l:lib&.a/g; s/lib-l/lib/g')"
    cc -std=gnu11 "$source" -o "$work/user-static" "${flags[@]}"
    ! readelf -d "$work/user-static" | grep -q 'NEEDED.*libkv' || { echo "$source: linked with a shared library of ours"; exit 1; }
    (unset LD_LIBRARY_PATH && cd "$work" && ./user-static) || { echo "$source: status $? with the archives of $*"; exit 1; }
}
static_program "$work/user.c" kvevent kvindex kvx kvbm
# Alone: what a library needs, no other one must bring.
examples=${KV_SOURCE_DIR:?}/examples
static_program "$examples/find_prefix.c" kvindex
static_program "$examples/select_worker.c" kvselect kvindex
static_program "$examples/kvbm_tiers.c" kvbm
static_program "$examples/kvx_write.c" kvx
static_program "$examples/llama_prefix.c" kvasir_llama
static_program "$examples/publish_block.c" kvevent
static_program "$examples/store_buffer.c" kvstore
for library in kvevent kvindex kvselect kvx kvbm kvstore kvasir_llama; do
    foreign=$(nm --defined-only --extern-only "$libdir/lib$library.a" | awk 'NF == 3 {print $3}' | grep -vE '^kv([eilpsx]|sel|bm)_' || true)
    [ -z "$foreign" ] || { echo "lib$library.a defines: $foreign"; exit 1; }
done
for pc in "$pc"/kv*.pc; do # a user of the shared library needs no other package's headers
    [ "$(PKG_CONFIG_LIBDIR=$(dirname "$pc") pkg-config --cflags "$(basename "$pc" .pc)")" ] || { echo "$pc needs other packages"; exit 1; }
done

# A program of at most 25 lines for each library.
for shortest in find_prefix kvbm_tiers kvx_write llama_prefix publish_block store_buffer; do
    lines=$(wc -l <"${KV_SOURCE_DIR:?}/examples/$shortest.c")
    [ "$lines" -le 25 ] || { echo "examples/$shortest.c has $lines lines"; exit 1; }
done

# Each example by the line that its own comment gives, and it runs.
for example in "${KV_SOURCE_DIR:?}"/examples/*.c; do
    line=$(sed -n 's,^[ /]\*.* \(cc -.*\)$,\1,p' "$example" | sed 's, *\*/$,,')
    [[ "$line" == *"${example##*/}"* ]] || { echo "$example: its line compiles another file: $line"; exit 1; }
    [ -n "$line" ] || { echo "$example does not say how it is compiled"; exit 1; }
    (cd "$(dirname "$example")" && eval "$line -o '$work/example'") # the line has a $(pkg-config)
    (cd "$work" && ./example) >"$work/example.log" 2>&1 || { cat "$work/example.log"; echo "$example failed"; exit 1; }
done

mkdir "$work/consumer"
cp "$work/user.c" "$work/consumer/"
cat >"$work/consumer/CMakeLists.txt" <<'TEXT'
cmake_minimum_required(VERSION 3.22)
project(consumer C)
find_package(kvasir 0.1 REQUIRED)
add_executable(user user.c)
target_link_libraries(user kvasir::kvevent kvasir::kvindex kvasir::kvx kvasir::kvbm)
TEXT
DESTDIR='' cmake -S "$work/consumer" -B "$work/consumer/build" -DCMAKE_PREFIX_PATH="$root" >"$work/cmake.log"
DESTDIR='' cmake --build "$work/consumer/build" >>"$work/cmake.log"
"$work/consumer/build/user"

cmake --build "$build" --target uninstall >"$work/uninstall.log"
left=$(find "$root" \( -type f -o -type l \) | head)
[ -z "$left" ] || { echo "left after uninstall: $left"; exit 1; }

# As root into /usr/local: the loader knows the libraries at once. In a mount namespace with an /etc and a
# /usr/local of its own, so that the machine stays as it is.
if [ "$(id -u)" != 0 ]; then
    echo 'skipped: installing into /usr/local needs root'
elif ! unshare --mount true 2>/dev/null; then
    echo 'skipped: no mount namespaces here to install into /usr/local in'
elif [[ "$(command -v cmake cc pkg-config)" == */usr/local/* ]]; then
    echo 'skipped: cmake or cc lies in /usr/local, which the test would hide'
else
    # shellcheck disable=SC2016 # the inner shell's variables
    env -u DESTDIR -u PKG_CONFIG_PATH -u PKG_CONFIG_SYSROOT_DIR -u LD_LIBRARY_PATH unshare --mount bash -euo pipefail -c '
        mount --make-rprivate /
        mkdir "$1/local" && mount --bind "$1/local" /usr/local
        cp -a /etc "$1/etc" && mount --bind "$1/etc" /etc
        cmake --install "$2" --prefix /usr/local
        cd "$1"
        cc -std=gnu11 "$3/examples/store_buffer.c" -o store_buffer -lkvstore
        ./store_buffer
        cmake --build "$2" --target uninstall
        [ -z "$(find /usr/local -type f)" ]' bash "$work" "$build" "$KV_SOURCE_DIR" >"$work/local.log" 2>&1 || { cat "$work/local.log"; exit 1; }
fi
echo 'install, use and uninstall: ok'
