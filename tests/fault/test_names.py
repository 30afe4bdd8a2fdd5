# SPDX-License-Identifier: Apache-2.0
"""Host names and a name server that never answers, one that is gone, names that move.

Runs itself again in a mount and a network namespace of its own, with its own resolv.conf, nsswitch.conf and hosts.
"""
import os
import pathlib
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1] / "e2e"))
from kvtest import *

INSIDE = "KV_TEST_NAMES"
BS = 4


def enter():
    """Become a process whose names are in the files below $KV_TEST_NAMES; 77 where that isn't allowed."""
    folder = tempfile.TemporaryDirectory()
    path = pathlib.Path(folder.name)
    (path / "resolv.conf").write_text("nameserver 127.0.0.1\noptions timeout:30 attempts:2\n")
    (path / "nsswitch.conf").write_text("hosts: files dns\n")
    (path / "hosts").write_text("127.0.0.1 localhost\n")
    mounts = " && ".join(f"mount --bind {path}/{name} /etc/{name}" for name in ("resolv.conf", "nsswitch.conf", "hosts"))
    space = ["unshare", "--mount", "--net", *([] if os.geteuid() == 0 else ["--map-root-user"]), "sh", "-c"]
    if not shutil.which("unshare") or not shutil.which("ip") or subprocess.run(
            [*space, f"ip link set lo up && {mounts}"], capture_output=True).returncode:
        skip_all("needs namespaces for mounts and networks, and ip(8)")
    child = subprocess.Popen([*space, f'ip link set lo up && {mounts} && exec "$@"', "sh", sys.executable, "-B", *sys.argv],
                             env=dict(os.environ, **{INSIDE: folder.name}))
    signal.signal(signal.SIGTERM, lambda *_: child.terminate())
    status = child.wait()
    folder.cleanup()
    sys.exit(status if status >= 0 else 1)


class Hosts:
    """The names that resolve; every other one is asked of the name server."""

    def __init__(self, **names):
        self.set(**names)

    def set(self, **names):
        lines = ["127.0.0.1 localhost"] + [f"{address} {name}" for name, address in names.items()]
        (pathlib.Path(os.environ[INSIDE]) / "hosts").write_text("\n".join(lines) + "\n")


class SilentServer:
    """A name server that takes questions and never answers."""

    def __enter__(self):
        self.socket = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
        self.socket.bind(("127.0.0.1", 53))
        return self

    def __exit__(self, *_):
        self.socket.close()

    def asked(self):
        self.socket.setblocking(False)
        try:
            return bool(self.socket.recv(4096))
        except BlockingIOError:
            return False


def listener(indexer, instance):
    return next(w for w in indexer.workers() if w["instance_id"] == instance)["listeners"]["0"]


def test_dead_names_hold_up_nobody():
    with SilentServer() as server, Indexer() as indexer, Publisher() as engine:
        for i in range(8):
            indexer.register(100 + i, f"tcp://dead-{i}.example.com:5557", block_size=BS, replay_endpoint=f"tcp://dead-{i}.example.com:5558")
        Hosts(engine="127.0.0.1")
        port = engine.endpoint.rsplit(":", 1)[1]
        started = time.monotonic()
        indexer.register(1, f"tcp://engine:{port}", block_size=BS)
        indexer.register(2, engine.endpoint, block_size=BS)
        engine.wait_subscriber(2)
        engine.store([1, 2], range(8), block_size=BS)
        indexer.wait_score(range(8), 1, 8)
        indexer.wait_score(range(8), 2, 8)
        took = time.monotonic() - started
        check(took < 30, f"a healthy engine's first event took {took:.1f} s")
        wait_until(server.asked, what="a question for the name server")
        wait_until(lambda: "not resolved in time" in listener(indexer, 100).get("last_error", ""), 20, "a word about the dead name")
        equal(listener(indexer, 100)["status"], "failed")
        engine.store([3], range(8, 12), parent=2, block_size=BS)
        indexer.wait_score(range(12), 1, 12)
        started = time.monotonic()
        indexer.process.send_signal(signal.SIGTERM)
        equal(indexer.process.wait(patience(20)), 0)
        took = time.monotonic() - started
        check(took < 30, f"SIGTERM took {took:.1f} s")


def test_a_name_that_moves():
    """An engine that comes back under its name and another address is followed there."""
    Hosts(engine="127.0.0.2")
    port = free_port()
    with Indexer() as indexer:
        with Publisher(endpoint=f"tcp://127.0.0.2:{port}", replay=None) as engine:
            indexer.register(1, f"tcp://engine:{port}", block_size=BS)
            engine.wait_subscriber()
            engine.store([1], range(4), block_size=BS)
            indexer.wait_score(range(4), 1, 4)
        wait_until(lambda: not listener(indexer, 1)["connected"], what="the loss")
        Hosts(engine="127.0.0.3")
        with Publisher(endpoint=f"tcp://127.0.0.3:{port}", replay=None, first=1) as engine:
            engine.wait_subscriber(timeout=20)
            engine.store([2], range(4, 8), parent=1, block_size=BS)
            indexer.wait_score(range(8), 1, 8, timeout=20)


def test_a_name_with_several_addresses():
    """The first doesn't answer, the second does."""
    hosts = pathlib.Path(os.environ[INSIDE]) / "hosts"
    hosts.write_text("127.0.0.1 localhost\n127.0.0.4 engine\n127.0.0.5 engine\n")
    port = free_port()
    with Indexer() as indexer, Publisher(endpoint=f"tcp://127.0.0.5:{port}", replay=None) as engine:
        indexer.register(1, f"tcp://engine:{port}", block_size=BS)
        engine.wait_subscriber(timeout=30)
        engine.store([1], range(4), block_size=BS)
        indexer.wait_score(range(4), 1, 4)


def test_a_name_server_that_goes_keeps_nobody_from_coming_back():
    """What it said before still counts: the engine returns to the address it had."""
    Hosts(engine="127.0.0.2")
    port = free_port()
    with SilentServer(), Indexer() as indexer:
        with Publisher(endpoint=f"tcp://127.0.0.2:{port}", replay=None) as engine:
            indexer.register(1, f"tcp://engine:{port}", block_size=BS)
            engine.wait_subscriber()
        Hosts()
        wait_until(lambda: not listener(indexer, 1)["connected"], what="the loss")
        time.sleep(1.5)
        with Publisher(endpoint=f"tcp://127.0.0.2:{port}", replay=None) as engine:
            engine.wait_subscriber(timeout=20)


def test_peers_with_dead_names():
    """The program starts without its peers when their names don't resolve, and ends at once meanwhile."""
    with SilentServer():
        command = [str(BUILD / "bin" / "kv-indexer"), "--port", "0", "--peers", "http://dead.example.com:8090"]
        process = subprocess.Popen(command, stderr=subprocess.PIPE)
        time.sleep(3 * SLOW)
        started = time.monotonic()
        process.send_signal(signal.SIGTERM)
        try:
            process.communicate(timeout=60)
        finally:
            process.kill()
        took = time.monotonic() - started
        check(took < 30, f"SIGTERM took {took:.1f} s")


def test_stores_with_dead_names():
    """A store whose server's name doesn't resolve fails within its own time limit, not the name server's."""
    environment = dict(os.environ, KV_STORE_LIBRARY_PATH=str(BUILD / "lib"), AWS_ACCESS_KEY_ID="a", AWS_SECRET_ACCESS_KEY="b")
    uris = ("redis://dead.example.com/?timeout_ms=2000", "s3://bucket/x?endpoint=http://dead.example.com:9000&region=x&timeout=4")
    with SilentServer() as server:
        for uri in uris:
            started = time.monotonic()
            done = subprocess.run([BUILD / "bin" / "kvasir", "store", "ls", uri], env=environment, capture_output=True, text=True, timeout=60)
            took = time.monotonic() - started
            equal(done.returncode, 3, done.stderr)
            check(took < 30, f"{uri}: {took:.1f} s")
            check(server.asked(), "no question for the name server")


def test_top_with_a_dead_name():
    with SilentServer():
        started = time.monotonic()
        done = subprocess.run([BUILD / "bin" / "kvasir", "top", "--once", "--url", "http://dead.example.com:8090"],
                              capture_output=True, text=True, timeout=60)
        took = time.monotonic() - started
        equal(done.returncode, 1, done.stderr)
        check(took < 30, f"{took:.1f} s")


if __name__ == "__main__":
    if INSIDE not in os.environ:
        enter()
    run(globals())
