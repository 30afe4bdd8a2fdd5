#!/usr/bin/env bash
# Run every benchmark and show what it measured: lines of JSON go to build/bench/figures.jsonl (or $1), tables to the terminal.
set -uo pipefail
cd "$(dirname "$0")/.." || exit 1
out=${1:-build/bench/figures.jsonl}
status=0

# Print the line that says where and when the figures are of.
machine() {
    python3 - <<'PYTHON'
import datetime, json, os, platform, re, subprocess

def first(command):
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    return done.stdout.splitlines()[0] if done.stdout else "unknown"

def field(path, pattern):
    found = re.search(pattern, open(path, encoding="utf-8").read(), re.M)
    return found.group(1).strip() if found else "unknown"

print(json.dumps({
    "bench": "machine", "date": datetime.date.today().isoformat(), "commit": first(["git", "rev-parse", "--short=8", "HEAD"]),
    "processor": field("/proc/cpuinfo", r"^model name\s*:\s*(.*)$"), "cores": os.cpu_count(),
    "memory_gib": round(int(field("/proc/meminfo", r"^MemTotal:\s*(\d+)")) / 2**20),
    "system": f"{platform.freedesktop_os_release().get('PRETTY_NAME', 'Linux')}, Linux {platform.release().split('-')[0]}",
    "compiler": first(["cc", "--version"]), "load": f"{os.getloadavg()[0]:.0f}"}))
PYTHON
}

machine >"$out" || exit 1
for bench in build/bench/*_bench; do
    name=$(basename "$bench")
    [ "$name" = bound_bench ] && continue # bounds of the machine, for those who doubt a target
    echo "== $name" >&2
    "$bench" </dev/null | grep '^{' >>"$out"
    rc=${PIPESTATUS[0]}
    [ "$rc" -eq 0 ] || [ "$rc" -eq 77 ] || status=1 # 77: skipped, a part to measure is missing
done
python3 tools/bench-table.py "$out" || status=1
echo "lines of JSON: $out" >&2
exit $status
