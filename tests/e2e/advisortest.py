# SPDX-License-Identifier: Apache-2.0
"""What the advisor's tests share: a kv-advisor over folders, the blobs of a block manager, and a publisher that tells of them."""
import os
import pathlib
import re
import shutil
import signal
import subprocess
import tempfile
import threading

from kvtest import *
from natstest import BlockManager

CLIENT = str(BUILD / "tests" / "advisor_client")
BYTES = 4096
BLOB = BYTES + 128  # with the object tier's header


def environment():
    return {**os.environ, "KV_STORE_PATH": str(BUILD / "lib")}


def client(*args):
    done = subprocess.run([CLIENT, *map(str, args)], env=environment(), capture_output=True, text=True, timeout=patience(60), check=False)
    equal(done.returncode, 0, f"{args}: {done.stdout}{done.stderr}")
    return done.stdout.split()


class Volumes:
    """Members fast and cold (folders) of a tiered store, fast with room for @room blobs."""

    def __init__(self, room=20, top="", linger="200ms", names=("fast", "cold")):
        self.path = pathlib.Path(tempfile.mkdtemp(prefix="kv-advisor-", dir=BUILD))
        self.names = names
        self.config = self.path / "kv.conf"
        text = f"linger = {linger}\nputs = {names[-1]}\n{top}"
        for name in names:
            capacity = f"capacity = {room * BLOB}\n" if name != names[-1] else ""
            text += f"[{name}]\nuri = {self.path / name}\n{capacity}"
        self.config.write_text(text)
        self.uri = f"tiered:{self.config}"

    def put(self, member, first, n):
        client("put", self.path / member, BYTES, first, n)

    def where(self, first, n):
        """For each blob the members that have it, by itself or in a pack, as "10"."""
        with tempfile.TemporaryDirectory(prefix="kv-members-") as folder:
            files = [pathlib.Path(folder) / name for name in self.names]
            for file in files:
                file.write_text(f"[{file.name}]\nuri = {self.path / file.name}\n")
            return client("where", BYTES, first, n, *(f"tiered:{file}" for file in files))

    def singles(self, first, n):
        """As where, of single blobs alone."""
        return client("where", BYTES, first, n, *(self.path / name for name in self.names))

    def __enter__(self):
        return self

    def __exit__(self, *_):
        shutil.rmtree(self.path, ignore_errors=True)


class Advisor:
    """A kv-advisor process. @start: wait until it has listed the members."""

    def __init__(self, volumes, *args, start=True):
        self.log, self.url = [], None
        command = [str(BUILD / "bin" / "kv-advisor"), "--store", volumes.uri, "--host", "127.0.0.1", "--port", "0", "--share", "100", *map(str, args)]
        self.process = subprocess.Popen(command, stderr=subprocess.PIPE, stdin=subprocess.DEVNULL, text=True, env=environment())
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()
        if start:
            wait_until(lambda: self.url or self.process.poll() is not None, 30, "the advisor's port")
            check(self.url, "".join(self.log))
            wait_until(lambda: self.get("/ready").status == 200, 30, "the first scan")

    def _read(self):
        for line in self.process.stderr:
            self.log.append(line)
            found = re.search(r"url=(\S+)", line)
            if found:
                self.url = found[1].strip('"')

    def get(self, path):
        return http_request(self.url, "GET", path)

    def explain(self, key):
        return self.get(f"/explain?hash={key}").json()

    def metric(self, name):
        for line in self.get("/metrics").body.decode().splitlines():
            if line.split(" ")[0] == name:
                return float(line.split()[-1])
        raise AssertionError(f"no metric {name}")

    def scan(self):
        """List the members once more."""
        before = self.metric("kv_advisor_scans_total")
        equal(http_request(self.url, "POST", "/scan", b"").status, 202)
        wait_until(lambda: self.metric("kv_advisor_scans_total") > before, 30, "a scan")

    def wait_idle(self):
        """Until nothing is left to move."""
        before = self.metric("kv_advisor_idle_passes_total")
        wait_until(lambda: self.metric("kv_advisor_idle_passes_total") > before + 1, 60, "nothing to move")

    def kill(self):
        self.process.send_signal(signal.SIGKILL)
        self.process.wait(patience(20))

    def close(self):
        if self.process.poll() is None:
            self.process.terminate()
        code = self.process.wait(patience(30))
        self._reader.join(10)
        return code

    def __enter__(self):
        return self

    def __exit__(self, kind, *_):
        code = self.close()
        check(kind is not None or code in (0, -signal.SIGKILL), f"status {code}: {''.join(self.log)}")


class Manager(BlockManager):
    """Publishes blobs of the client: blocks with keys from their numbers."""

    fingerprint = None

    def _message(self, kind, sequence, records=(), more=None):
        if not Manager.fingerprint:
            Manager.fingerprint = client("fingerprint")[0]
        text = super()._message(kind, sequence, records, more)
        return text.replace(b'"fingerprint": "' + b"00" * 16, b'"fingerprint": "' + self.fingerprint.encode())

    def _record(self, event, key, *args, **more):
        """Of chains of 16 blocks, by their numbers."""
        record = super()._record(event, key, *args, **more)
        record["prefix_hash"] = f"{key // 16 + 1:016x}"
        return record

    def stored(self, numbers):
        """The blocks are in the object tier."""
        for number in numbers:
            self.store([(number, None)], tier="external")

    def used(self, numbers):
        """They were read back into memory."""
        with self.lock:
            records = [self._record("store", number, "host") for number in numbers]
        self.send(records)
