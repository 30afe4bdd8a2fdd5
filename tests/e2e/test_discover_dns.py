# SPDX-License-Identifier: Apache-2.0
"""kv-indexer --discover dns: beside a real name server (nsd): addresses, services, changes, and all ways to have no answer."""
import contextlib
import os
import shutil
import signal
import socket
import struct
import subprocess
import sys
import tempfile

from kvtest import *

TOKENS = list(range(1, 17))
if not shutil.which("nsd", path=os.environ["PATH"] + ":/usr/sbin"):
    skip_all("nsd is needed")


class Nsd:
    """A name server for the zone kv.test. Records have a time to live of a second."""

    def __init__(self, folder):
        self.folder, self.port, self.serial, self.process = folder, free_port(), 0, None
        with open(f"{folder}/nsd.conf", "w", encoding="ascii") as conf:
            conf.write(f'''server:
    ip-address: 127.0.0.1@{self.port}
    username: ""
    chroot: ""
    zonesdir: "{folder}"
    database: ""
    zonelistfile: "{folder}/zone.list"
    xfrdfile: "{folder}/xfrd.state"
    xfrdir: "{folder}"
    pidfile: "{folder}/nsd.pid"
    server-count: 1
remote-control:
    control-enable: no
zone:
    name: "kv.test"
    zonefile: "kv.test.zone"
zone:
    name: "other.test"
    zonefile: "missing.zone"
''')

    def write(self, *records):
        self.serial += 1
        with open(f"{self.folder}/kv.test.zone.new", "w", encoding="ascii") as zone:
            zone.write(f"$ORIGIN kv.test.\n$TTL 1\n@ SOA ns.kv.test. root.kv.test. {self.serial} 1 1 3600 1\n@ NS ns.kv.test.\n"
                       "ns A 127.0.0.1\n" + "\n".join(records) + "\n")
        os.rename(f"{self.folder}/kv.test.zone.new", f"{self.folder}/kv.test.zone")

    def change(self, *records):
        """Write the zone and have it read again."""
        self.write(*records)
        self.process.send_signal(signal.SIGHUP)

    def start(self):
        self.process = subprocess.Popen([shutil.which("nsd", path=os.environ["PATH"] + ":/usr/sbin"), "-d", "-c", f"{self.folder}/nsd.conf"],
                                        stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True)

    def stop(self):
        if self.process and self.process.poll() is None:
            self.process.terminate()
            self.process.wait(60)

    def code(self, name):
        """The code of its answer to a question for A; None without an answer."""
        question = struct.pack(">HHHHHH", 7, 0x100, 1, 0, 0, 0) + b"".join(bytes([len(part)]) + part.encode() for part in name.split("."))
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as udp:
            udp.settimeout(1)
            try:
                udp.sendto(question + b"\0\0\1\0\1", ("127.0.0.1", self.port))
                return udp.recv(512)[3] & 15
            except OSError:
                return None

    @property
    def server(self):
        return f"127.0.0.1:{self.port}"


@contextlib.contextmanager
def served(*records):
    with tempfile.TemporaryDirectory() as folder:
        nsd = Nsd(folder)
        nsd.write(*records)
        nsd.start()
        try:
            yield nsd
        finally:
            nsd.stop()


def follow(nsd, name, *args, options="", grace="600s", **kw):
    return Indexer("--discover", f"dns:{name}?server={nsd.server}{options}", "--discover-grace", grace, "--block-size", 4, "--model-name", MODEL,
                   *args, **kw)


def present(indexer):
    return {worker["instance_id"]: worker["endpoints"]["0"] for worker in indexer.workers() if worker["status"] != "withdrawn"}


def wait_present(indexer, wanted):
    wait_until(lambda: present(indexer) == wanted, 60, f"{wanted}, not {present(indexer)} by {source(indexer)}")


def source(indexer):
    return indexer.get("/discovery").json()[0]


def wait_error(indexer, *texts):
    seen = [None]

    def there():
        seen[0] = source(indexer)
        return any(text in seen[0].get("error", "") for text in texts)

    try:
        wait_until(there, 60)
    except AssertionError as problem:
        raise AssertionError(f"{texts}, not {seen[0]}") from problem


def port_of(endpoint):
    return int(endpoint.rsplit(":", 1)[1])


def test_addresses():
    with Publisher() as engine, served("w A 127.0.0.1") as nsd:
        port = port_of(engine.endpoint)
        with follow(nsd, f"w.kv.test:{port}", options=f"&replay-port={port_of(engine.replay_endpoint)}") as indexer:
            name = f"127.0.0.1:{port}"
            wait_present(indexer, {name: engine.endpoint})
            equal(indexer.workers()[0]["listeners"]["0"]["replay_endpoint"], engine.replay_endpoint)
            engine.store([1], TOKENS[:4], block_size=4)
            indexer.wait_score(TOKENS, name, 4)
            nsd.change("w A 127.0.0.1", "w A 127.0.0.2", "w AAAA ::1")
            wait_present(indexer, {name: engine.endpoint, f"127.0.0.2:{port}": f"tcp://127.0.0.2:{port}", f"[::1]:{port}": f"tcp://[::1]:{port}"})
            nsd.change("w AAAA ::1")
            wait_present(indexer, {f"[::1]:{port}": f"tcp://[::1]:{port}"})
            equal(indexer.query(TOKENS)["scores"], {})
            nsd.change("w A 127.0.0.1")  # within the grace: back with what it had
            indexer.wait_score(TOKENS, name, 4)
            equal(engine.replays, 1, "the replay of the start")


def test_services():
    """SRV records: targets with ports of their own, resolved; a target whose address changes is another process."""
    srv = lambda port, target: f"_kv._tcp.w SRV 0 0 {port} {target}"
    with served(srv(5557, "a.kv.test."), srv(5558, "a.kv.test."), srv(5557, "b.kv.test."), srv(1, "nowhere.kv.test."),
                "a A 127.0.9.1", "b AAAA fd00::2", r'_kv._tcp.w TXT "v=1"', r'''_kv._tcp.w TXT "{\"model_name\":\"qwen\"," "\"block_size\":32}"''') as nsd:
        with follow(nsd, "_kv._tcp.w.kv.test") as indexer:
            wait_present(indexer, {"a.kv.test:5557": "tcp://127.0.9.1:5557", "a.kv.test:5558": "tcp://127.0.9.1:5558",
                                   "b.kv.test:5557": "tcp://[fd00::2]:5557"})
            equal({(w["model_name"], w["block_size"]) for w in indexer.workers()}, {("qwen", 32)})
            equal((source(indexer)["left_out"], source(indexer)["left_out_first"]), (1, "nowhere.kv.test: the target has no address"))
            nsd.change(srv(5557, "a.kv.test."), "a A 127.0.9.9")
            wait_present(indexer, {"a.kv.test:5557": "tcp://127.0.9.9:5557"})
            nsd.change(srv(5557, "a.kv.test."), "a A 127.0.9.9", "a A 127.0.9.2")  # the one so far stays
            nsd.change(srv(5557, "a.kv.test."), srv(7, "c.kv.test."), "a A 127.0.9.9", "a A 127.0.9.2", "c A 127.0.9.3")
            wait_present(indexer, {"a.kv.test:5557": "tcp://127.0.9.9:5557", "c.kv.test:7": "tcp://127.0.9.3:7"})


def test_no_answer_is_no_news():
    """A server that is gone, or says SERVFAIL or REFUSED, changes nothing; one that knows no such name, or no records, tells of no workers."""
    with served("w A 127.0.0.1") as nsd:
        with follow(nsd, "w.kv.test:5557", grace="100ms") as indexer:
            wait_present(indexer, {"127.0.0.1:5557": "tcp://127.0.0.1:5557"})
            nsd.stop()
            wait_error(indexer, "w.kv.test: no name server answers")
            equal(list(present(indexer)), ["127.0.0.1:5557"])
            equal(source(indexer)["current"], False)
            os.remove(f"{nsd.folder}/kv.test.zone")
            nsd.start()  # a zone without its file: SERVFAIL
            wait_until(lambda: nsd.code("w.kv.test") == 2, 60, "SERVFAIL")
            failures = source(indexer)["failures"]
            wait_until(lambda: source(indexer)["failures"] > failures + 1, 60, "another look")
            equal((list(present(indexer)), source(indexer)["current"]), (["127.0.0.1:5557"], False))
            nsd.stop()
            nsd.write("w TXT text")  # the name is there, without an address
            nsd.start()
            wait_until(lambda: indexer.workers() == [], 60, "the worker to leave")
            equal((source(indexer)["current"], source(indexer)["workers"]), (True, 0))
            nsd.change("w A 127.0.0.1")
            wait_present(indexer, {"127.0.0.1:5557": "tcp://127.0.0.1:5557"})
            nsd.change("x A 127.0.0.1")  # NXDOMAIN
            wait_until(lambda: indexer.workers() == [], 60, "the worker to leave")
            equal(source(indexer)["current"], True)
        for name, code in (("w.other.test", 2), ("w.refused.test", 5)):
            equal(nsd.code(name), code)
            with follow(nsd, f"{name}:1") as indexer:
                wait_error(indexer, "no name server answers, or all fail or refuse")
                equal("age_ms" in source(indexer), False)


def test_options():
    def refused(wanted, text):
        done = subprocess.run([str(BUILD / "bin" / "kv-indexer"), "--port", "0", "--discover", text], capture_output=True, text=True, timeout=60)
        equal(done.returncode != 0 and wanted in done.stderr, True, f"{text}: {done.stderr!r}")

    refused("expected NAME:PORT", "dns:w.kv.test")
    refused("expected NAME:PORT", "dns:w.kv.test:70000")
    refused("ports of their own", "dns:_kv._tcp.w.kv.test:1")
    refused("expected server=", "dns:w.kv.test:1?sever=127.0.0.1")
    refused("expected server=", "dns:w.kv.test:1?replay-port=0")


if __name__ == "__main__":
    sys.exit(run(globals()))
