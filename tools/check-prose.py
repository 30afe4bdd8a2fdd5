#!/usr/bin/env python3
"""List prose that a stranger can't parse: comments that open with a pronoun, docs lines over 100 columns.

Prints one line per place and a summary; always exits 0 unless --strict is given. `--strict PATH...` fails on
any finding below these paths: a room that has been cleaned stays clean (see CLEAN).
"""
import pathlib
import re
import subprocess
import sys

# Rooms and pages without a finding; a new finding in them fails the check.
CLEAN = ("bench", "docs", "examples", "fuzz", "include", "plugins", "src", "tests", "README.md", "CONTRIBUTING.md",
         "CHANGELOG.md")
OPENING = re.compile(
    r"^\s*(?:/\*\*?|//|\*) *(What|Who|Whoever|It|That|Those|So|They|This|These) "
    r"|(?:;|,|\{|\}) +/\* *(What|Who|Whoever|It|That|Those|So|They|This|These) ")
MAX_COLUMNS = 100
root = pathlib.Path(__file__).resolve().parent.parent


def opens_comment(lines, i):
    """True when line @i begins a comment, or a sentence list of one, rather than continuing a sentence."""
    line = lines[i].strip()
    if not line.startswith("*"):
        return True
    before = lines[i - 1].strip() if i else ""
    return before in ("/**", "/*", "*") or before.endswith((".", ":"))


def findings(name, lines):
    if name.endswith(".md"):
        fenced = False
        for number, line in enumerate(lines, 1):
            if line.lstrip().startswith("```"):
                fenced = not fenced
            if len(line) > MAX_COLUMNS and not fenced and not line.lstrip().startswith("|"):
                yield number, f"{len(line)} columns"
        return
    for i, line in enumerate(lines):
        match = OPENING.match(line) or (OPENING.search(line) if "/*" in line else None)
        if match and opens_comment(lines, i):
            yield i + 1, f"opens with “{match.group(1) or match.group(2)}”"


def main():
    tracked = subprocess.run(["git", "ls-files"], cwd=root, capture_output=True, text=True, check=True).stdout.split()
    wanted = [n for n in tracked if n.endswith((".c", ".h", ".cu", ".cuh")) or (n.endswith(".md") and (n.startswith("docs/") or "/" not in n))]
    strict = "--strict" in sys.argv[1:]
    counts, broken = {}, []
    for name in wanted:
        for number, why in findings(name, (root / name).read_text().splitlines()):
            room = "/".join(name.split("/")[:2])
            counts[room] = counts.get(room, 0) + 1
            if any(name == c or name.startswith(c + "/") for c in CLEAN):
                broken.append(f"{name}:{number}: {why}")
            elif not strict:
                print(f"{name}:{number}: {why}")
    if strict:
        print("\n".join(broken))
        return 1 if broken else 0
    print(f"{sum(counts.values())} findings: " + ", ".join(f"{k} {v}" for k, v in sorted(counts.items())))
    return 0


if __name__ == "__main__":
    sys.exit(main())
