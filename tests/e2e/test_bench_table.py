# SPDX-License-Identifier: Apache-2.0
"""docs/benchmarks.md shows what the newest file of bench/results has, and tools/bench-table.py judges figures by their targets."""
import json
import subprocess
import sys
import tempfile

from kvtest import *

sys.path.insert(0, str(SOURCE / "tools"))
from bench_rows import ROOMS, Row  # pylint: disable=wrong-import-position

TOOL = [sys.executable, "-B", SOURCE / "tools" / "bench-table.py"]
MACHINE = {"bench": "machine", "date": "2026-12-01", "commit": "0", "processor": "P", "cores": 2, "memory_gib": 1, "system": "S", "compiler": "C",
           "load": "0"}


def table(lines, *args):
    with tempfile.NamedTemporaryFile("w", suffix=".jsonl") as file:
        file.write("\n".join(json.dumps(line) for line in lines))
        file.flush()
        return subprocess.run([*TOOL, *args, file.name], capture_output=True, text=True, timeout=60, check=False)


def lines_of(row, value):
    """What a run prints whose figure is @value, and its yardstick 1."""
    line = {**row.line, row.value: value, **({row.ratio: value} if row.ratio else {})}
    return [{**line, **row.of_line, row.of: 1}, line] if row.of_line else [{**line, **({row.of: 1} if row.of else {})}]


def judged(row, value):
    """The tool's word on the row's figure."""
    done = table([MACHINE, *lines_of(row, value)])
    equal(done.returncode, 0, done.stderr)
    return next(text for text in done.stdout.splitlines() if text.strip().startswith(row.figure)).split()[-1]


def test_page():
    newest = sorted((SOURCE / "bench" / "results").glob("20??-??-??.jsonl"))[-1]
    done = subprocess.run([*TOOL, "--check", newest], capture_output=True, text=True, timeout=60, check=False)
    equal((done.returncode, done.stderr), (0, ""))


def test_check_finds_another_figure():
    """A check that can't fail would hold nothing."""
    newest = sorted((SOURCE / "bench" / "results").glob("20??-??-??.jsonl"))[-1]
    lines = [json.loads(line) for line in newest.read_text().splitlines() if line.startswith("{")]
    for line in lines:
        if line.get("what") == "memory" and line["bench"] == "index":
            line["bytes_per_holder_block"] *= 2
    done = table(lines, "--check")
    equal(done.returncode, 1)
    check("differs" in done.stderr, done.stderr)


def test_verdicts():
    for _, _, rows in ROOMS:
        for row in rows:
            check(isinstance(row, Row) and row.figure and row.value, str(row))
    least = next(row for _, _, rows in ROOMS for row in rows if row.target and row.target[0] == "value" and row.target[1] == ">=" and row.scale == 1)
    most = next(row for _, _, rows in ROOMS for row in rows if row.target and row.target[0] == "value" and row.target[1] == "<=" and row.scale == 1)
    ratio = next(row for _, _, rows in ROOMS for row in rows if row.target and row.target[0] == "ratio" and row.ratio)
    for row, better in ((least, 2), (most, 0.5), (ratio, 2 if ratio.target[1] == ">=" else 0.5)):
        bound = row.target[2]
        equal([judged(row, bound * better), judged(row, bound), judged(row, bound / better)], ["met", "met", "short"], row.figure)


def test_absent():
    done = table([MACHINE])
    check(f"{sum(len(rows) for _, _, rows in ROOMS)} figures not run" in done.stdout, done.stdout)


if __name__ == "__main__":
    run(globals())
