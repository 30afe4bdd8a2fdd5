# SPDX-License-Identifier: Apache-2.0
"""The benchmarks under bench/ tell their arguments at once: some run for minutes when they get none."""
import subprocess
import sys

from kvtest import *

PROGRAMS = sorted((BUILD / "bench").glob("*_bench"))
if SANITIZED:
    skip_all("benchmarks aren't built with sanitizers")
if not PROGRAMS:
    sys.exit("no benchmarks in build/bench")


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


def test_unknown_name():
    """A misspelt figure isn't a run of nothing that ends well."""
    for program, name in (("store_bench", "save"), ("lend_bench", "shmm"), ("peer_bench", "|"), ("tier_bench", "")):
        done = subprocess.run([BUILD / "bench" / program, name], capture_output=True, text=True, timeout=patience(10), check=False)
        equal((done.returncode, done.stdout), (2, ""), f"{program} {name}")
        check(done.stderr.startswith(f"usage: {program}"), repr(done.stderr))


def test_free_names():
    """Indexers have names of one's own."""
    done = subprocess.run([BUILD / "bench" / "indexer_bench", "-f", "none", "mine=http://127.0.0.1:1,1"], capture_output=True, text=True,
                          timeout=patience(10), check=False)
    equal((done.returncode, done.stdout, done.stderr), (0, "", ""))


if __name__ == "__main__":
    run(globals())
