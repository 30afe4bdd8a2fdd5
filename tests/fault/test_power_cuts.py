# SPDX-License-Identifier: Apache-2.0
"""A few power cuts under ext4 of the store, the disk tier and a manager, with controls: tools/fault.sh does many, on more file systems."""
import os
import pathlib
import subprocess
import sys

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1] / "e2e"))
from kvtest import *  # noqa: E402
import power_cuts  # noqa: E402


def cuts(of):
    why = power_cuts.missing()
    if why:
        skip(why)
    done = subprocess.run([sys.executable, power_cuts.__file__, "--cuts", "3", "--fs", "ext4", "--of", of], capture_output=True,
                          text=True, timeout=110, check=False, env={**os.environ, "KV_BUILD_DIR": str(BUILD)})
    equal(done.returncode, 0, done.stdout + done.stderr)
    equal(done.stdout.count("ok    "), 3, done.stdout)


def test_store():
    cuts("store")


def test_disk_tier():
    cuts("disk")


def test_disk_tier_resized():
    cuts("resize")


def test_manager():
    cuts("manager")


if __name__ == "__main__":
    run({name: item for name, item in globals().items() if getattr(item, "__module__", "") == "__main__"})
