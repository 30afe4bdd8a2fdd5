# SPDX-License-Identifier: Apache-2.0
"""`kvasir bench tiers`: what it moves comes back, and what it says can be read by people and programs."""
import json
import os
import re
import signal
import subprocess
import tempfile

from kvtest import *

KVASIR = str(BUILD / "bin" / "kvasir")
SMALL = ["--block", "16KiB", "--blocks", "48"]


EMULATED_GPU = {"LD_LIBRARY_PATH": str(BUILD / "tests" / "cuda13"),
                "KVX_CUDA_LIBRARY": str(BUILD / "tests" / "libkvx_emulated.so")}


def bench(*options, **environment):
    return subprocess.run([KVASIR, "bench", *options], capture_output=True, text=True, timeout=120, check=False,
                          env={**os.environ, **environment})


def test_all_tiers():
    with tempfile.TemporaryDirectory() as directory:
        done = bench("tiers", *SMALL, "--disk", directory, "--object", directory + "/object", "--json")
        equal(done.returncode, 0, done.stderr)
        figures = json.loads(done.stdout)
        equal((figures["blocks"], figures["block_bytes"], figures["wrong"]), (48, 16384, 0))
        for name in ("memcpy", "store", "down", "load", "load_disk", "load_object"):
            check(figures[name]["seconds"] > 0 and figures[name]["gb_per_s"] > 0, name)


def test_converting_for_people():
    done = bench("tiers", *SMALL, "--order", "hnd")
    equal((done.returncode, done.stderr), (0, ""))
    check("48 blocks of 16.0 KiB" in done.stdout and "host to cache" in done.stdout, done.stdout)
    check("did not come back" not in done.stdout, done.stdout)


def test_gpu():
    """A cache on a GPU: here on an emulated driver; tools/gpu-check.sh runs it on a real one."""
    with tempfile.TemporaryDirectory() as directory:
        done = bench("tiers", *SMALL, "--gpu", "0", "--disk", directory, "--object", directory + "/object", "--json",
                     **EMULATED_GPU)
        equal(done.returncode, 0, done.stderr)
        figures = json.loads(done.stdout)
        equal((figures["blocks"], figures["wrong"]), (48, 0))
        check({"copy", "store", "down", "load", "load_disk", "load_object"} <= set(figures), figures)
        check("memcpy" not in figures, figures)
    done = bench("tiers", *SMALL, "--gpu", "7", **EMULATED_GPU)
    equal(done.returncode, 5, done.stdout)
    check("No such device" in done.stderr, done.stderr)


def test_configuration():
    with tempfile.TemporaryDirectory() as directory:
        path = directory + "/tiers.conf"
        with open(path, "w", encoding="utf-8") as file:
            file.write(f"disk = {directory}\ndisk_bytes = 4MiB\nio = threads\n")
        done = bench("tiers", *SMALL, "--config", path, "--json")
        equal(done.returncode, 0, done.stderr)
        check("load_disk" in json.loads(done.stdout), done.stdout)
        with open(path, "a", encoding="utf-8") as file:
            file.write("nosuch = 1\n")
        equal(bench("tiers", *SMALL, "--config", path).returncode, 5)


def test_too_small():
    """Blocks that a tier doesn't hold are missing, not damaged."""
    with tempfile.TemporaryDirectory() as directory:
        policy = directory + "/policy.conf"
        with open(policy, "w", encoding="utf-8") as file:
            file.write("disk_policy = frequency\ndisk_threshold = 2\n")
        for name, step, options in (("host", "host to cache", ["--host", "320KiB"]),
                                    ("disk", "disk to cache", ["--disk-bytes", "320KiB"]),
                                    ("policy", "disk to cache", ["--config", policy])):
            if name != "host":
                os.mkdir(f"{directory}/{name}")
                options += ["--disk", f"{directory}/{name}"]
            done = bench("tiers", *SMALL, *options)
            equal((done.returncode, done.stderr), (1, ""), name)
            found = re.search(rf"^{step}: (\d+) of 48 blocks were not there: a tier is too small, or its policy", done.stdout, re.M)
            check(found and "did not come back" not in done.stdout, f"{name}: {done.stdout}")
            figures = json.loads(bench("tiers", *SMALL, *options, "--json").stdout)
            check(figures["wrong"] == 0 and figures["missing"] > 0, f"{name}: {figures}")


def test_refused():
    for options in (("nosuch",), (), ("tiers", "--block", "1000"), ("tiers", "--nosuch"), ("tiers", "--blocks", "3")):
        done = bench(*options)
        equal((done.returncode, done.stdout), (2, ""), options)
        check(done.stderr, options)
    check("did you mean" in bench("tires").stderr, "a misspelt name")
    equal(bench("--help").returncode, 0)
    equal(bench("tiers", "--help").returncode, 0)
    equal(bench("tiers", *SMALL, "--disk", "/nonexistent").returncode, 5)


def test_interrupted():
    """^C ends it at once, and says what stays."""
    with tempfile.TemporaryDirectory() as folder:
        env = {**os.environ, "KV_STORE_LIBRARY_PATH": str(BUILD / "tests" / "plugins"), "SLOW_MS": "600000"}
        process = subprocess.Popen([KVASIR, "bench", "tiers", *SMALL, "--object", f"slow://{folder}/object"], env=env,
                                   stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
        wait_until(lambda: os.path.exists(f"{folder}/object"), timeout=60)
        check(process.poll() is None, "it ended before it was interrupted")
        process.send_signal(signal.SIGINT)
        text = process.communicate(timeout=60)[1]
        equal(process.returncode, 130, f"status {text}")
        check("interrupted" in text, text)


if __name__ == "__main__":
    run(globals())
