# SPDX-License-Identifier: Apache-2.0
"""What the fault tests of the file store share: a directory on a real disk, the client, the shim.

    with Store() as store:
        store.save(version=1)                            # must succeed; acknowledged objects are remembered
        run = store.client(version=2, fault=("sync", 3, "EIO"))
        store.check()                                    # nothing lost, nothing half, not a wrong byte
"""
import os
import pathlib
import random
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import traceback

SOURCE = pathlib.Path(os.environ.get("KV_SOURCE_DIR", pathlib.Path(__file__).resolve().parents[2]))
BUILD = pathlib.Path(os.environ.get("KV_BUILD_DIR", SOURCE / "build"))
SANITIZED = os.environ.get("KV_SANITIZE", "")
SLOW = 5 if SANITIZED else 1
SEED = int(os.environ.get("KV_TEST_SEED", time.time()))
SCALE = int(os.environ.get("KV_TEST_SCALE", 20 if SANITIZED else 100)) / 100
CLIENT, SHIM = BUILD / "tests" / "store_client", BUILD / "tests" / "fault_shim.so"
BYTES = 8192  # about, of a chunk


class Skip(Exception):
    pass


def check(condition, message="check failed"):
    if not condition:
        raise AssertionError(message)


class Run:
    """One client that has ended: its status (negative: signal), what it said, and whether the fault happened."""

    def __init__(self, process, out, log, injected):
        self.status, self.out, self.log, self.injected = process, out, log, injected

    def __str__(self):
        return f"status {self.status}\n{self.out[-3000:]}\n{self.log[-3000:]}"


class Store:
    """A directory that goes away at the end, and the state that all its clients have acknowledged."""

    def __init__(self, directory=None, options=""):
        self._temporary = tempfile.mkdtemp(prefix="store-", dir=BUILD)
        self.dir = pathlib.Path(directory or self._temporary) / "kv"
        self.options = options
        self.state = pathlib.Path(self._temporary) / "state"
        self.state.touch()
        self._report = pathlib.Path(self._temporary) / "injected"

    @property
    def uri(self):
        return f"{self.dir}{self.options}"

    def environment(self, fault=None, more=False, clock=None):
        env = {key: value for key, value in os.environ.items() if not key.startswith("KVF_")}
        if fault or clock:
            env["LD_PRELOAD"] = str(SHIM)
            env["ASAN_OPTIONS"] = "verify_asan_link_order=0:detect_leaks=0"
        if fault:
            call, nth, what = fault
            env.update(KVF_DIR=str(self.dir.resolve()), KVF_CALL=call, KVF_NTH=str(nth), KVF_DO=what, KVF_REPORT=str(self._report))
            if more:
                env["KVF_MORE"] = "1"
        if clock:
            env["KVF_CLOCK"] = clock
        return env

    def command(self, version, writer=1, objects=1, names=3, chunks=7):
        return [str(CLIENT), "write", self.uri, *map(str, (writer, objects, names, chunks, BYTES, version))]

    def note(self, out):
        """What was acknowledged is written down, and on disk, before anything goes on."""
        with open(self.state, "ab") as state:
            state.write(out)
            state.flush()
            os.fsync(state.fileno())

    def client(self, version, fault=None, more=False, clock=None, before=None, **kw):
        self._report.unlink(missing_ok=True)
        done = subprocess.run(self.command(version, **kw), env=self.environment(fault, more, clock), capture_output=True,
                              timeout=120 * SLOW, check=False, preexec_fn=before)
        self.note(done.stdout)
        run = Run(done.returncode, done.stdout.decode(), done.stderr.decode(errors="replace"), self._report.exists())
        check("Sanitizer" not in run.log, str(run))
        check(run.status in (0, 1, 3, -signal.SIGKILL), str(run))
        return run

    def save(self, version, **kw):
        """A save that must succeed."""
        run = self.client(version, **kw)
        check(run.status == 0, f"save of version {version}: {run}")
        return run

    def check(self, what=""):
        done = subprocess.run([str(CLIENT), "check", self.uri, str(self.state)], capture_output=True, timeout=240 * SLOW, check=False)
        out = done.stdout.decode()
        check(done.returncode == 0, f"{what}: check: status {done.returncode}\n{out}\n{done.stderr.decode(errors='replace')[-3000:]}")
        return dict((key, int(value)) for key, value in re.findall(r"(\w+)=(\d+)", out))

    def litter(self):
        """Files of writers that have gone: only in temporary places, and gone after the next open."""
        return [str(p) for p in self.dir.rglob("*") if p.is_file() and ("/tmp/" in str(p)[len(str(self.dir)):])]

    def __enter__(self):
        return self

    def __exit__(self, kind, *_):
        if kind is not None and os.environ.get("KV_TEST_KEEP"):
            print(f"kept {self._temporary}", file=sys.stderr)
            return
        shutil.rmtree(self._temporary, ignore_errors=True)


def run(namespace):
    """Run the test_* functions of a module in order (or those whose names contain an argument)."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    failed = skipped = passed = 0
    for name, test in [item for item in namespace.items() if item[0].startswith("test_") and callable(item[1])]:
        if sys.argv[1:] and not any(word in name for word in sys.argv[1:]):
            continue
        started = time.monotonic()
        try:
            test()
            passed += 1
            print(f"ok      {name} ({time.monotonic() - started:.1f} s)", flush=True)
        except Skip as why:
            skipped += 1
            print(f"skipped {name}: {why}", flush=True)
        except Exception:  # pylint: disable=broad-except
            failed += 1
            traceback.print_exc()
            print(f"FAILED  {name} (KV_TEST_SEED={SEED})", flush=True)
    print(f"{passed} passed, {failed} failed, {skipped} skipped")
    sys.exit(1 if failed else 0 if passed else 77)
