#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Compare the answers of two builds: compare-answers.py BEFORE AFTER

BEFORE and AFTER are files, or folders of files of the same names, that tests wrote with
KV_TEST_RECORD=FILE (tests/models/record.h). A file that only one folder has is a difference. The build after a change has to answer as the one before:
- equal wherever both views are whole;
- partial only where the view was partial before;
- never longer than the truth, nor shorter, while the view is whole.
"""
import pathlib
import subprocess
import sys

SIZE = 4  # bytes of a record: query, claimed, truth, partial


def read(path):
    if path.suffix == ".zst":
        return subprocess.run(["zstd", "-dcq", path], stdout=subprocess.PIPE, check=True).stdout
    return path.read_bytes()


def compare(name, before, after):
    """Print each kind of difference with its first place; return the number of differences."""
    found = {}
    if len(before) != len(after):
        found["records are missing"] = [min(len(before), len(after)) // SIZE]
    if before != after:
        for i in range(0, min(len(before), len(after)), SIZE):
            x, y = before[i:i + SIZE], after[i:i + SIZE]
            if x == y:
                continue
            if x[0] != y[0] or x[2] != y[2]:
                found.setdefault("another query", []).append(i // SIZE)
                break  # what follows belongs to another history
            if y[3] and not x[3]:
                found.setdefault("partial, was whole", []).append(i // SIZE)
            elif not x[3] and x[1] != y[1]:
                found.setdefault("another answer while whole", []).append(i // SIZE)
            elif not y[3] and y[1] != y[2]:
                found.setdefault("a wrong answer while whole", []).append(i // SIZE)
    for what, places in found.items():
        print(f"{name}: {what}: {len(places)}, first in record {places[0]}")
    return sum(len(places) for places in found.values())


def main():
    if len(sys.argv) != 3:
        sys.exit(__doc__)
    before, after = map(pathlib.Path, sys.argv[1:])
    pairs = [(before, after)]
    if before.is_dir():
        listed = {p.name for folder in (before, after) for p in folder.iterdir()}
        pairs = [(before / name, after / name) for name in sorted(listed)]
    n = n_partial = n_whole_again = n_different = 0
    for x, y in pairs:
        if not (x.exists() and y.exists()):
            print(f"{x.name}: missing {'before' if y.exists() else 'after'}")
            n_different += 1
            continue
        old, new = read(x), read(y)
        n += len(new) // SIZE
        n_partial += sum(new[3::SIZE])
        n_whole_again += sum(old[3::SIZE]) - sum(new[3::SIZE])
        n_different += compare(y.name, old, new)
    print(f"{len(pairs)} files, {n} answers, {n_partial} while partial "
          f"({n_whole_again} fewer than before); {n_different} differences")
    sys.exit(n_different > 0 or n == 0)


if __name__ == "__main__":
    main()
