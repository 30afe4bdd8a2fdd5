#!/usr/bin/env bash
# The Debian packages in a root that holds nothing else: install them, serve, save and restore, compile
# against the headers, purge, and find no file left. Needs root, debootstrap and a package mirror; run by
# ./dev test-rest, not by CTest, because it builds the tree once more.
set -euo pipefail
cd "$(dirname "$0")/../.."
skip() { echo "skipped: $1"; exit 77; } # tools/test.sh repeats this line
[ "$(id -u)" = 0 ] || skip 'making a root needs root'
for tool in debootstrap dh dpkg-buildpackage unshare; do command -v "$tool" >/dev/null || skip "$tool is missing"; done
unshare --mount --pid --fork true 2>/dev/null || skip 'no namespaces here'

tools/deb.sh
work=$(mktemp -d)
trap 'rm -rf --one-file-system "$work"' EXIT
root=$work/root
release=$(sed -n "s/^VERSION_CODENAME=//p" /etc/os-release)
mirror=$(grep -hs '^URIs:' /etc/apt/sources.list.d/*.sources | awk '{ print $2; exit }')
[ -n "$mirror" ] || mirror=$(awk '/^deb / { for (i = 2; i <= NF; i++) if ($i ~ /:\/\//) { print $i; exit } }' /etc/apt/sources.list)
debootstrap --variant=minbase --include=ca-certificates "$release" "$root" "$mirror" >"$work/root.log" 2>&1 ||
    skip "debootstrap makes no root: $(tail -n 1 "$work/root.log")"
cp -a /etc/apt/apt.conf.d/. "$root/etc/apt/apt.conf.d/" # proxies
echo 'Acquire::Retries "5";' >"$root/etc/apt/apt.conf.d/80-retries" # a mirror may fail once
cp -L --remove-destination /etc/ssl/certs/ca-certificates.crt "$root/etc/ssl/certs/"
cp -aL /etc/resolv.conf /etc/hosts "$root/etc/" 2>/dev/null || true
cp build/deb/*.deb examples/llama_prefix.c "$root/srv/"

cat >"$root/srv/try.sh" <<'TEXT'
set -eux
export DEBIAN_FRONTEND=noninteractive
apt-get update -qq
apt-get install -y -qq --no-install-recommends curl gcc libc6-dev pkg-config >/srv/tools.log
find / -xdev \( -path /proc -o -path /sys -o -path /dev -o -path /tmp -o -path /srv -o -path /var/lib -o -path /var/cache -o -path /var/log \) -prune \
    -o -print | sort >/srv/before
dpkg-query -W -f '${Package}\n' >/srv/packages
apt-get install -y -qq --no-install-recommends $(ls /srv/*.deb | grep -v dbgsym) >/srv/install.log

kv-indexer --version
kv-indexer --host 127.0.0.1 --port 0 2>/srv/indexer.log &
until url=$(grep -o 'http://127.0.0.1:[0-9]*' /srv/indexer.log); do kill -0 $!; sleep 0.1; done
curl -fsS "$url/health"
curl -fsS "$url/workers"
kill $!
wait $!
test -s /lib/systemd/system/kv-indexer.service -o -s /usr/lib/systemd/system/kv-indexer.service
test -s /lib/systemd/system/kv-selector.service -o -s /usr/lib/systemd/system/kv-selector.service
test -s /lib/systemd/system/kv-advisor.service -o -s /usr/lib/systemd/system/kv-advisor.service
test -s /etc/default/kv-indexer

head -c 3000000 /dev/urandom >/srv/state
kvasir store save /srv/store state /srv/state
kvasir store restore /srv/store state /srv/again
cmp /srv/state /srv/again
kvasir store verify /srv/store

cat >/srv/user.c <<'C'
#include <kv_index.h>
#include <kv_store.h>
#include <kvbm_manager.h>
#include <kvx_ext.h>
#include <stdio.h>
int main(void)
{
    struct kvi_index *index = NULL;
    kvx_version_t version;
    int rc = kvi_create(NULL, &index);
    kvi_destroy(index);
    return rc != 0 || kvx_get_version(&version) != KVX_STATUS_OK;
}
C
gcc /srv/user.c -o /srv/user $(pkg-config --cflags --libs kvindex kvx kvbm kvstore kvevent)
/srv/user
# The same against the archives, with all that they need.
gcc /srv/user.c -o /srv/user_static $(pkg-config --static --cflags --libs kvindex kvx kvbm kvstore kvevent | sed 's/-lkv[a-z]*/-l:lib&.a/g; s/lib-l/lib/g')
! ldd /srv/user_static | grep libkv
/srv/user_static
test -s /usr/share/doc/kvasir/docs/engines.md -o -s /usr/share/doc/kvasir/docs/engines.md.gz
test -s /usr/share/doc/kvasir/SECURITY.md -o -s /usr/share/doc/kvasir/SECURITY.md.gz
examples=/usr/share/doc/libkvasir-dev/examples
gcc -O2 -shared -fPIC -fvisibility=hidden -o /srv/libkv_store_template.so $examples/plugin_template/kv_store_template.c
KV_STORE_LIBRARY_PATH=/srv kvasir store conformance template:///srv/plugin
test -s /etc/logrotate.d/kvasir
gcc /srv/llama_prefix.c -o /srv/llama_prefix $(pkg-config --cflags --libs kvasir_llama kvstore)
/srv/llama_prefix /srv/store
LD_PRELOAD=libkvasir_llama_preload.so KV_LLAMA_STORE=/srv/store KV_LLAMA_FINGERPRINT=none true 2>/srv/preload.log # ld.so only warns
test ! -s /srv/preload.log

dpkg-query -W -f '${Package}\n' | sort >/srv/now
sort /srv/packages | comm -13 - /srv/now | xargs apt-get purge -y -qq >/srv/purge.log
find / -xdev \( -path /proc -o -path /sys -o -path /dev -o -path /tmp -o -path /srv -o -path /var/lib -o -path /var/cache -o -path /var/log \) -prune \
    -o -print | sort >/srv/after
# libibverbs1, which UCX needs, makes a group: its purge leaves the backup and adduser's lock.
comm -13 /srv/before /srv/after | grep -v -e '^/etc/ld.so.cache' -e '^/etc/gshadow-$' -e '^/run/adduser$' >/srv/left || true
test ! -s /srv/left || { cat /srv/left; exit 1; }
echo 'packages: installed, used and removed'
TEXT
# shellcheck disable=SC2016 # the inner shell's variables
unshare --mount --pid --fork --kill-child sh -eu -c '
    mount --make-rprivate /
    mount -t proc proc "$1/proc"
    mount --rbind /dev "$1/dev"
    mount -t tmpfs tmpfs "$1/tmp"
    exec chroot "$1" /usr/bin/env -i HOME=/root PATH=/usr/sbin:/usr/bin:/sbin:/bin LANG=C.UTF-8 \
        http_proxy="${http_proxy:-}" https_proxy="${https_proxy:-}" sh /srv/try.sh' sh "$root" </dev/null >"$work/try.log" 2>&1 ||
    { tail -n 40 "$work/try.log"; exit 1; }
tail -n 1 "$work/try.log"
