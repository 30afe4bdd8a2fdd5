#!/usr/bin/env bash
# The commands around the build: a second configuration changes no compiler flag (else everything is compiled
# again), unknown targets do nothing, and packages that are missing are named in a line that works.
set -euo pipefail
source=${KV_SOURCE_DIR:?}
[ -z "${KV_SANITIZE:-}" ] || { echo 'skipped: the release build has run it'; exit 77; }
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT

for time in first second; do
    cmake -S "$source" -B "$work/build" -DCMAKE_BUILD_TYPE=Release -DKVX_CUDA=OFF >"$work/cmake.log" 2>&1 || { cat "$work/cmake.log"; exit 1; }
    find "$work/build" -name flags.make | sort | xargs cat >"$work/$time"
done
grep -q FORTIFY "$work/first" || { echo 'no compiler flags found'; exit 1; }
cmp "$work/first" "$work/second" || { diff "$work/first" "$work/second" | head -n 20; exit 1; }

code=0
"$source/dev" bogus >"$work/bogus" 2>&1 || code=$?
if [ "$code" != 2 ] || ! grep -q "no target 'bogus'" "$work/bogus"; then echo "./dev bogus: status $code"; cat "$work/bogus"; exit 1; fi
[ "$(wc -l <"$work/bogus")" = 1 ] || { echo './dev bogus does more than to refuse:'; cat "$work/bogus"; exit 1; }
"$source/tools/setup.sh" clean >"$work/clean" 2>&1
[ ! -s "$work/clean" ] || { echo './dev clean asks for packages:'; cat "$work/clean"; exit 1; }

# Of the packages for power cuts some are nowhere installed by chance: a user who is not root gets the line to run.
if [ "$(id -u)" = 0 ]; then as_user=(setpriv --reuid=65534 --regid=65534 --clear-groups); else as_user=(); fi
cp "$source/tools/setup.sh" "$work/" && chmod 755 "$work" "$work/setup.sh"
if "${as_user[@]}" "$work/setup.sh" fault >"$work/fault" 2>&1; then
    [ ! -s "$work/fault" ] || grep -q 'not a Debian system' "$work/fault"
else
    grep -q "^  sudo sh -c 'apt-get update && apt-get install " "$work/fault" || { cat "$work/fault"; exit 1; }
fi
echo 'dev: ok'
