# SPDX-License-Identifier: Apache-2.0
"""The benchmarks under bench/ tell their arguments at once: some run for minutes when they get none."""
import subprocess

from kvtest import *

PROGRAMS = sorted((BUILD / "bench").glob("*_bench"))
if not PROGRAMS:
    skip_all("no benchmarks are built here")


def test_help():
    for program in PROGRAMS:
        for option in ("--help", "-h"):
            done = subprocess.run([program, option], capture_output=True, text=True, timeout=patience(10), check=False)
            equal(done.returncode, 0, f"{program.name} {option}: status")
            check(done.stdout.startswith(f"usage: {program.name}"), f"{program.name}: {done.stdout[:200]!r}")
            equal(done.stderr, "", program.name)


def test_no_arguments_taken():
    done = subprocess.run([BUILD / "bench" / "json_bench", "twice"], capture_output=True, text=True, timeout=patience(10), check=False)
    equal((done.returncode, done.stdout), (2, ""))
    check(done.stderr.startswith("usage: json_bench"), repr(done.stderr))


if __name__ == "__main__":
    run(globals())
