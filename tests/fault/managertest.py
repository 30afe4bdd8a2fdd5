# SPDX-License-Identifier: Apache-2.0
"""A manager in a process of its own, for the fault tests: it does what it is told, and says what came of it."""
import contextlib
import os
import pathlib
import re
import shutil
import subprocess
import sys
import tempfile

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1] / "e2e"))
from redistest import *

CLIENT, SHIM = BUILD / "tests" / "manager_client", BUILD / "tests" / "fault_shim.so"
LENGTH, STRIDE = 8, 8192  # of the client's sequences; a block in the tiers
HOST, DISK = 48, 640  # blocks


class Manager:
    """A program with a manager: a small host tier, a disk of @volumes directories, an object store. Faults come to the first volume."""

    def __init__(self, object_=None, volumes=1, disk=DISK, host=HOST, root=None, **more):
        self.root = root or pathlib.Path(tempfile.mkdtemp(prefix="manager-", dir=BUILD))
        self.mine = root is None
        self.dirs = [self.root / f"v{i}" for i in range(volumes)]
        for directory in self.dirs:
            directory.mkdir(exist_ok=True)
        self.switch = self.root / "switch"
        self.env = {**os.environ, "KVBM_HOST_BYTES": str(host * STRIDE), "KVBM_IO": "threads", "LD_PRELOAD": str(SHIM),
                    "ASAN_OPTIONS": "verify_asan_link_order=0:detect_leaks=0", "KVF_DIR": str(self.dirs[0].resolve()),
                    "KVF_SWITCH": str(self.switch), "KV_STORE_LIBRARY_PATH": str(BUILD / "lib")}
        if disk:
            self.env.update(KVBM_DISK=":".join(map(str, self.dirs)), KVBM_DISK_BYTES=str(disk * STRIDE))
        if object_:
            self.env.update(KVBM_OBJECT=object_, KVBM_OBJECT_TIMEOUT_MS="60000")
        self.env.update(more)
        self.log = open(self.root / "log", "ab")
        self.process = subprocess.Popen([str(CLIENT), "talk"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self.log,
                                        env=self.env, text=True)
        equal(self.process.stdout.readline(), "OPEN\n", "opening")

    def begin(self, *words):
        self.process.stdin.write(" ".join(map(str, words)) + "\n")
        self.process.stdin.flush()

    def answer(self):
        line = self.process.stdout.readline()
        check(line, f"the client is gone: {(self.root / 'log').read_text(errors='replace')[-3000:]}")
        told = {name: int(value) for name, value in re.findall(r"(\w+)=(-?\d+)", line)}
        equal(told.get("wrong", 0), 0, f"wrong bytes: {line}")
        return told

    def ask(self, *words):
        self.begin(*words)
        return self.answer()

    def store(self, first, n):
        """All of them are stored, and go down as far as they can: some at a time, with nothing else on its way, so that none is
        evicted before."""
        self.down()
        for some in range(first, first + n, 4):
            count = min(4, first + n - some)
            equal(self.ask("store", some, count, 0)["ok"], count * LENGTH, "stored")
            self.down()

    def down(self):
        equal(self.ask("drain", 60_000 * SLOW)["rc"], 0, "drain")

    def forget(self):
        equal(self.ask("forget"), {"rc": 0, "used": 0})

    @contextlib.contextmanager
    def fault(self, what):
        temporary = self.root / "switch.new"
        temporary.write_text(what)
        temporary.rename(self.switch)
        try:
            yield
        finally:
            self.switch.unlink()

    def files(self, kind, volume=0):
        return self.dirs[volume] / f"kvbm-cache.{kind}"

    def close(self):
        """It ends by itself, with nothing left over."""
        stats = self.ask("stats")
        equal((stats["pins"], stats["jobs"]), (0, 0), "pins and jobs left")
        self.process.stdin.close()
        out = self.process.stdout.read()
        equal(self.process.wait(timeout=patience(30)), 0, f"exit status {out}")

    def __enter__(self):
        return self

    def __exit__(self, *_):
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait()
        self.process.stdin.close()
        self.process.stdout.close()
        self.log.close()
        if self.mine:
            shutil.rmtree(self.root, ignore_errors=True)
