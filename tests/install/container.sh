#!/usr/bin/env bash
# The container image, built by buildah from the file that ships, on a base image made here by debootstrap, because a
# registry can't be counted on: the image's own command answers /health as the image's user. Needs root, buildah,
# debootstrap and a package mirror; run by KV_TEST_CONTAINER=1 tools/test.sh, not by CTest, because it builds the tree
# once more.
set -euo pipefail
cd "$(dirname "$0")/../.."
skip() { echo "skipped: $1"; exit 77; } # tools/test.sh repeats this line
[ "$(id -u)" = 0 ] || skip 'making a base image needs root'
for tool in buildah debootstrap curl; do command -v "$tool" >/dev/null || skip "$tool is missing"; done
unshare --mount --pid --fork true 2>/dev/null || skip 'no namespaces here'

file=deploy/container/Containerfile
work=$(mktemp -d)
oci=(buildah --root "$work/storage" --runroot "$work/run" --storage-driver vfs)
server=
finish() {
    [ -z "$server" ] || kill "$server" 2>/dev/null || true
    [ -z "$server" ] || wait "$server" 2>/dev/null || true
    "${oci[@]}" rm --all >/dev/null 2>&1 || true
    rm -rf --one-file-system "$work"
}
trap finish EXIT

base=$(sed -n 's/^FROM \([a-z]*:[a-z-]*\).*/\1/p' "$file" | sort -u)
[ "$(wc -l <<<"$base")" = 1 ] || { echo "$file has several base images: $base"; exit 1; }
release=${base#*:}; release=${release%-slim}
mirror=$(grep -hs '^URIs:' /etc/apt/sources.list.d/*.sources | awk '{ print $2; exit }')
[ -n "$mirror" ] || mirror=$(awk '/^deb / { for (i = 2; i <= NF; i++) if ($i ~ /:\/\//) { print $i; exit } }' /etc/apt/sources.list)
empty=$("${oci[@]}" from scratch)
root=$("${oci[@]}" mount "$empty")
debootstrap --variant=minbase --include=ca-certificates "$release" "$root" "$mirror" >"$work/root.log" 2>&1 ||
    skip "debootstrap makes no root: $(tail -n 1 "$work/root.log")"
cp -a /etc/apt/apt.conf.d/. "$root/etc/apt/apt.conf.d/" # proxies
echo 'Acquire::Retries "5";' >"$root/etc/apt/apt.conf.d/80-retries" # a mirror may fail once
cp -L --remove-destination /etc/ssl/certs/ca-certificates.crt "$root/etc/ssl/certs/"
"${oci[@]}" umount "$empty" >/dev/null
"${oci[@]}" commit --quiet --rm "$empty" "docker.io/library/$base" >/dev/null

"${oci[@]}" build --isolation chroot --pull-never --file "$file" --tag kv-indexer . >"$work/build.log" 2>&1 ||
    { tail -n 40 "$work/build.log"; exit 1; }

box=$("${oci[@]}" from --pull-never localhost/kv-indexer)
describe() { "${oci[@]}" inspect --format "{{.OCIv1.Config.$1}}" "$box"; }
read -ra entry <<<"$(describe Entrypoint | tr -d '[]')"
user=$(describe User)
port=$(/usr/bin/python3 -c 'import socket; s = socket.socket(); s.bind(("127.0.0.1", 0)); print(s.getsockname()[1])')
# chroot isolation shares the network of this machine, so the port is given.
"${oci[@]}" run --isolation chroot -e KV_INDEXER_HOST=127.0.0.1 -e KV_INDEXER_PORT="$port" -e KV_INDEXER_BLOCK_SIZE=16 "$box" -- \
    "${entry[@]}" >"$work/server.log" 2>&1 &
server=$!
until curl -fsS "http://127.0.0.1:$port/health" >"$work/health" 2>/dev/null; do
    kill -0 "$server" 2>/dev/null || { cat "$work/server.log"; exit 1; }
    sleep 0.2
done
curl -fsS "http://127.0.0.1:$port/workers" >"$work/workers"
runs_as=$("${oci[@]}" run --isolation chroot "$box" -- id -u)
# Kubernetes can tell only of a number that it isn't root.
if [ "$runs_as" = 0 ] || [ "$user" != "$runs_as:$runs_as" ]; then echo "the image runs as $runs_as, its user is $user"; exit 1; fi
"${oci[@]}" run --isolation chroot "$box" -- test -s /etc/ssl/certs/ca-certificates.crt || { echo 'the image has no certificates'; exit 1; }
echo "container: built on $base, ${entry[0]} answers as $runs_as"
