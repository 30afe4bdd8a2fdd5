# SPDX-License-Identifier: Apache-2.0
"""A block manager over a GPU that fails, where there is no GPU: an emulated driver and libkvx_cuda take their places.

tests/gpu/gpu_faults.c kills processes in mid-transfer, lets a kernel access an illegal address, and compares every block.
"""
import os
import pathlib
import re
import subprocess
import sys
import tempfile

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1] / "e2e"))
from kvtest import *

ENVIRONMENT = {**os.environ, "LD_LIBRARY_PATH": str(BUILD / "tests" / "cuda13"),
               "KVX_CUDA_LIBRARY": str(BUILD / "tests" / "libkvx_emulated.so")}


def faults(*arguments):
    return subprocess.run([BUILD / "tests" / "gpu_faults", *arguments], env=ENVIRONMENT, stdout=subprocess.PIPE,
                          stderr=subprocess.STDOUT, text=True, timeout=240)


def test_killed_and_illegal():
    if SANITIZED:
        skip("an emulated GPU whose context is lost frees nothing: release has run it")
    with tempfile.TemporaryDirectory() as folder:
        done = faults(folder)
        check(done.returncode == 0, done.stdout)
        found = [int(n) for n in re.findall(r"check: (\d+) of 256 blocks found, all right", done.stdout)]
        check(len(found) == 5 and found[3] > 0, done.stdout)  # of four killed processes the last has had time
        check("8 of 8 loads and 8 of 8 new stores failed" in done.stdout and "illegal: closed" in done.stdout, done.stdout)
        equal(found[4], 128, "blocks that the disk had before the access")


if __name__ == "__main__":
    run(globals())
