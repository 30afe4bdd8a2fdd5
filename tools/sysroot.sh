#!/bin/sh
# Fill a folder with another architecture's libraries and a Python, from this Debian release's packages, to build and run
# programs for it. Changes nothing of this system and needs no root. Usage: tools/sysroot.sh [arm64] FOLDER
set -eu
architecture=${1:-arm64}
folder=$2
packages='libc6-dev libstdc++6 libzmq3-dev libxxhash-dev libzstd-dev zlib1g-dev libssl-dev liburing-dev libsodium-dev libpgm-dev libcmocka-dev
          libcurl4-openssl-dev libc-ares-dev libexpat1-dev libmicrohttpd-dev libgnutls28-dev libunistring-dev libsystemd-dev python3'

[ ! -e "$folder/complete" ] || exit 0
rm -rf "$folder"
work=$folder/packages
mkdir -p "$work/lists/partial" "$work/archives/partial"
: >"$work/status"
apt() {
    apt-get -o APT::Architecture="$architecture" -o APT::Architectures="$architecture" -o APT::Install-Recommends=0 \
        -o APT::Sandbox::User=root -o Debug::NoLocking=1 -o Dir::State="$work" -o Dir::State::lists="$work/lists" \
        -o Dir::State::status="$work/status" -o Dir::Cache="$work" -o Dir::Cache::archives="$work/archives" "$@" >>"$work/log" 2>&1 ||
        { tail -n 20 "$work/log" >&2; echo "sysroot: apt-get failed" >&2; exit 1; }
}
echo "kvasir: fetching packages of $architecture into $folder"
apt update
# shellcheck disable=SC2086 # the list is meant to split
apt -y --download-only install $packages
for package in "$work"/archives/*.deb; do dpkg -x "$package" "$folder"; done
find "$folder" -type l -lname '/*' | while read -r link; do # a linker would look for their targets in this system
    ln -sfn "$folder$(readlink "$link")" "$link"
done
rm -rf "$work"
touch "$folder/complete"
