#!/bin/sh
# Install the Debian packages that a target needs and that are missing; print the line to run when
# the caller is not root. Usage: tools/setup.sh [TARGET], or --compilers: those of ./dev matrix that exist here
set -eu

build='build-essential cmake pkg-config libzmq3-dev libmicrohttpd-dev libgnutls28-dev libcurl4-openssl-dev libexpat1-dev libsystemd-dev libxxhash-dev libcmocka-dev libzstd-dev libssl-dev liburing-dev libjs-chart.js libc-ares-dev libnghttp2-dev libprotobuf-c-dev protobuf-c-compiler'
test='clang libclang-rt-dev python3 python3-zmq python3-msgpack curl openssl procps zsh iproute2 redis-tools etcd-server python3-swift xfsprogs btrfs-progs quota util-linux e2fsprogs mount locales python3-pycparser python3-venv python3-numpy python3-h11 mypy libsodium-dev libpgm-dev zlib1g-dev libunistring-dev libucx-dev libnats-dev nats-server chromium python3-yaml nsd'
check='clang-format clang-tidy cppcheck shellcheck git python3'
bench='wrk fio libucx-dev libnats-dev nats-server'
fault='user-mode-linux xfsprogs btrfs-progs e2fsprogs mount python3'

deb='debhelper dpkg-dev fakeroot libucx-dev libnats-dev'
wheel='python3 python3-pycparser libsodium-dev libpgm-dev zlib1g-dev libunistring-dev'
cross='gcc-aarch64-linux-gnu g++-aarch64-linux-gnu qemu-user-static'

# The compilers of Debian 11 to 13 and the newest, as far as this release's packages have them.
compilers() {
    for compiler in gcc-11 gcc-12 gcc-13 gcc-14 clang-13 clang-14 clang-15 clang-16 clang-19 clang-22; do
        if apt-cache pkgnames "$compiler" 2>/dev/null | grep -qx "$compiler"; then echo "$compiler"; fi
    done
}
if [ "${1:-}" = --compilers ]; then
    compilers | tr '\n' ' '
    exit 0
fi

case "${1:-build}" in
    test) wanted="$build $test" ;;
    test-all | test-rest) wanted="$build $test $deb debootstrap" ;;
    deb) wanted="$build $deb" ;;
    wheel) wanted="$build $wheel" ;;
    wheel-arm) wanted="$build $wheel $cross" ;;
    check | format) wanted="$build $check" ;;
    fuzz) wanted="$build clang libclang-rt-dev" ;;
    bench) wanted="$build $bench" ;;
    fault) wanted="$build $fault" ;;
    coverage) wanted="$build gcovr" ;;
    matrix)
        [ "$(id -u)" != 0 ] || [ -n "$(compilers)" ] || apt-get update >/dev/null
        wanted="$build python3 $(compilers | sed 'p; s/^gcc/g++/; /^clang/d' | sort -u | tr '\n' ' ')"
        ;;
    all) wanted="$build $test $check $bench" ;;
    clean) exit 0 ;;
    *) wanted=$build ;;
esac

command -v dpkg-query >/dev/null || {
    echo "kvasir: not a Debian system; needed (Debian names): $wanted" >&2
    exit 0
}
missing=
for package in $wanted; do
    status=$(dpkg-query -W -f '${Status}' "$package" 2>/dev/null || true)
    [ "$status" = 'install ok installed' ] || missing="$missing $package"
done
if [ -n "$missing" ] && [ "$(id -u)" != 0 ]; then
    echo "kvasir: packages are missing. Run this, then try again:" >&2
    echo "  sudo sh -c 'apt-get update && apt-get install --no-install-recommends$missing'" >&2
    exit 1
fi
if [ -n "$missing" ]; then
    echo "kvasir: installing$missing"
    log=$(mktemp)
    # shellcheck disable=SC2086 # the list is meant to split
    if ! { apt-get update && DEBIAN_FRONTEND=noninteractive apt-get install -y --no-install-recommends $missing; } >"$log" 2>&1; then
        tail -n 20 "$log" >&2
        exit 1
    fi
    rm -f "$log"
fi

# Client of the tests of external processing: grpcio, and Envoy's messages, for the Python that runs the tests. Without
# them the tests say that they are skipped.
case "${1:-}" in test | test-all | test-rest) ;; *) exit 0 ;; esac
client=$(dirname "$0")/../build/grpc-client
"$client/bin/python" -c 'import grpc, envoy.service.ext_proc.v3.external_processor_pb2' 2>/dev/null && exit 0
echo "kvasir: installing grpcio and xds-protos into build/grpc-client"
rm -rf "$client"
/usr/bin/python3 -m venv "$client" && "$client/bin/pip" install --no-input --quiet --disable-pip-version-check grpcio==1.85.3 xds-protos==1.85.0 ||
    echo "kvasir: they can't be installed: the tests of external processing will be skipped" >&2
