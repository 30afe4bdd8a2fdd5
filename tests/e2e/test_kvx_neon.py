# SPDX-License-Identifier: Apache-2.0
"""The NEON code of libkvx, on a machine of another kind: compiled for aarch64 and run by qemu. The matrix against its
reference, and every 16-bit and 8-bit value through every conversion, beside the GPU's arithmetic in C. Left out where
the compiler or qemu isn't there (Debian: gcc-aarch64-linux-gnu libc6-dev-arm64-cross qemu-user)."""
import os
import shutil
import subprocess

from kvtest import *

FOLDER = BUILD / "kvx-neon"
COMPILER = "aarch64-linux-gnu-gcc"
MACHINE = shutil.which("qemu-aarch64") or shutil.which("qemu-aarch64-static")


def build():
    if SANITIZED:
        skip("it makes a build of its own, without sanitizers: release has run it")
    for what, found in ((COMPILER, shutil.which(COMPILER)), ("qemu-aarch64", MACHINE)):
        if not found:
            skip(f"no {what} (Debian: gcc-aarch64-linux-gnu, qemu-user)")
    subprocess.run(["cmake", "-S", SOURCE / "src" / "kvx", "-B", FOLDER, "-DCMAKE_BUILD_TYPE=Release", "-DKVX_CUDA=OFF",
                    "-DKVX_GPU_DRY=ON", "-DCMAKE_SYSTEM_NAME=Linux", "-DCMAKE_SYSTEM_PROCESSOR=aarch64",
                    f"-DCMAKE_C_COMPILER={COMPILER}"], check=True, stdout=subprocess.DEVNULL, timeout=60)
    subprocess.run(["cmake", "--build", FOLDER, "-j", str(os.cpu_count()), "--target", "test-kvx-matrix", "kvx_model",
                    "gpu_matrix"], check=True, stdout=subprocess.DEVNULL, timeout=300)


def emulate(program, *arguments, scale):
    environment = dict(os.environ, KV_BUILD_DIR=str(FOLDER), KV_TEST_SCALE=str(scale))
    done = subprocess.run([MACHINE, "-L", "/usr/aarch64-linux-gnu", FOLDER / "tests" / program, *arguments],
                          env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=300)
    check(done.returncode == 0, done.stdout)
    return done.stdout


def test_matrix():
    build()
    told = emulate("test-kvx-matrix", scale=1)
    check(told.startswith("neon: "), told)


def test_numbers():
    build()
    told = emulate("gpu_matrix", "numbers", scale=1)
    check("200 conversions of 65536 values, 0 failed" in told, told)


if __name__ == "__main__":
    run(globals())
