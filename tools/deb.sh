#!/usr/bin/env bash
# Build Debian packages of the tree as it is into build/deb: kvasir, libkvasir-*, -dev and -dbgsym.
set -euo pipefail
cd "$(dirname "$0")/.."
version=$(sed -n 's/^project(kvasir VERSION \([0-9.]*\).*/\1/p' CMakeLists.txt)
out=$PWD/build/deb
source=$out/kvasir-$version
rm -rf "$out"; mkdir -p "$source"
if git rev-parse --is-inside-work-tree >/dev/null 2>&1; then
    git ls-files -z --cached --others --exclude-standard | xargs -0 cp --parents --no-dereference -t "$source" # with what isn't committed
else
    find . -mindepth 1 -maxdepth 1 ! -name build -exec cp -a -t "$source" {} +
fi
cp -a deploy/debian "$source/debian"
cp deploy/systemd/kv-indexer.service "$source/debian/kvasir.kv-indexer.service"
cp deploy/systemd/kv-selector.service "$source/debian/kvasir.kv-selector.service"
cp deploy/systemd/kv-advisor.service "$source/debian/kvasir.kv-advisor.service"
grep -q "^kvasir ($version" "$source/debian/changelog" || { echo "deb: deploy/debian/changelog is not at $version" >&2; exit 1; }
(cd "$source" && dpkg-buildpackage --build=binary --no-sign) >"$out/build.log" 2>&1 || { tail -n 40 "$out/build.log" >&2; exit 1; }
rm -rf "$source"
ls "$out"/*.deb
