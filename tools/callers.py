#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""List public functions that nobody calls: not python, plugins, examples, benchmarks, the programs, nor another room.

callers.py [--all]: one a line, with its header, where it is defined, and how many files of its own room and of the tests
name it. Names in comments don't count. Such a function gets an example that a user would want, becomes private or goes:
the status is 1 where there is one.
"""
import collections
import pathlib
import re
import subprocess
import sys

ROOT = pathlib.Path(__file__).resolve().parent.parent
CODE = re.compile(r"\.(c|h|cc|cpp|cu|py|pyi)$")
OUTSIDE = ("python", "plugins", "examples", "bench")


def without_comments(text):
    return re.sub(r"//.*", "", re.sub(r"/\*.*?\*/", " ", text, flags=re.S))


def room(path):
    parts = path.split("/")
    return "/".join(parts[:2]) if parts[0] == "src" else parts[0]


def public_functions():
    """{function: header}."""
    found = {}
    for header in sorted((ROOT / "include").glob("*.h")):
        for match in re.finditer(r"KV_API\s+[^;{]*?\b(\w+)\s*\(", without_comments(header.read_text())):
            found.setdefault(match.group(1), header.name)
    return found


def uses_of(functions):
    """{function: files that name it}, {function: file that defines it}."""
    uses, defined = collections.defaultdict(set), {}
    for path in subprocess.check_output(["git", "ls-files"], cwd=ROOT, text=True).split():
        if path.startswith("include/") or not CODE.search(path):
            continue
        text = without_comments((ROOT / path).read_text(errors="replace"))
        for word in set(re.findall(r"\w+", text)) & functions.keys():
            uses[word].add(path)
        if path.startswith("src/"):
            for match in re.finditer(r"^\w[\w \*]*?\b(\w+)\s*\([^;{]*\)\s*\{", text, flags=re.M):
                if match.group(1) in functions:
                    defined[match.group(1)] = path
    return uses, defined


def is_called(home, path):
    return path.split("/")[0] in OUTSIDE or (path.startswith("src/") and room(path) != room(home))


def main():
    functions = public_functions()
    uses, defined = uses_of(functions)
    n = 0
    for name, header in sorted(functions.items(), key=lambda item: (item[1], item[0])):
        home = defined.get(name, "")
        others = uses[name] - {home}
        called = any(is_called(home, path) for path in others)
        n += not called
        if not called or "--all" in sys.argv:
            inside = sum(path.startswith("src/") for path in others)
            tests = sum(path.startswith(("tests/", "fuzz/")) for path in others)
            print(f"{header:20} {name:34} {home or '-':36} {inside} in its room, {tests} of tests")
    print(f"{n} of {len(functions)} public functions have no caller outside of their room")
    return n > 0


if __name__ == "__main__":
    sys.exit(main())
