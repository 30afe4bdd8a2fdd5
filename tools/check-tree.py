#!/usr/bin/env python3
"""Rules for the tree itself: licence lines, file and function lengths, no paths of one machine."""
import pathlib
import re
import subprocess
import sys

MAX_FILE, MAX_FUNCTION = 1000, 100
root = pathlib.Path(__file__).resolve().parent.parent
files = subprocess.run(["git", "ls-files"], cwd=root, capture_output=True, text=True, check=True).stdout.split()
bad = []
for name in files:
    path = root / name
    if path.is_symlink() and path.readlink().is_absolute():
        bad.append(f"{name}: a link to a path of one machine")
    if path.suffix not in (".c", ".h", ".cu", ".py", ".sh") or not path.exists():
        continue
    lines = path.read_text().splitlines()
    if path.suffix in (".c", ".h", ".cu"):
        if "SPDX-License-Identifier: Apache-2.0" not in "\n".join(lines[:2]):
            bad.append(f"{name}:1: no SPDX line")
        if len(lines) > MAX_FILE:
            bad.append(f"{name}: {len(lines)} lines (limit {MAX_FILE})")
        start = None
        for number, line in enumerate(lines, 1):
            if line.startswith("{"):
                start = number
            elif line.startswith("}") and start:
                if name.startswith("src/") and number - start > MAX_FUNCTION:
                    bad.append(f"{name}:{start}: function of {number - start} lines (limit {MAX_FUNCTION})")
                start = None
    for number, line in enumerate(lines, 1):
        if re.search(r"/work/|/root/\.", line) and name != "tools/check-tree.py":
            bad.append(f"{name}:{number}: names a path of one machine")
print("\n".join(bad))
sys.exit(1 if bad else 0)
