#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""A manager whose object store's server is killed, or frozen, while it stores and loads: the tiers above are as fast as before,
and once the server is back what is stored arrives there."""
import itertools
import pathlib
import signal
import sys

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent))
from managertest import *


def traffic_is_well(before, told):
    """The upper tiers' loads: all there, and none waited for the store, whose time for a batch is two seconds."""
    check(told["missing"] == 0 and told["loads"] > 2 and told["stored"] > 0, told)
    check(told["median_us"] < 4 * before["median_us"] + 20_000 * SLOW, f"{told}, before {before}")
    check(told["max_us"] < 1_800_000, f"{told}, before {before}")


def server_goes_and_comes(goes, comes):
    tiers = {"host": 160, "disk": 8000, "KVBM_OBJECT_TIMEOUT_MS": "2000"}
    with Server("--appendonly", "yes", "--appendfsync", "always") as server, Manager(server.uri + "?timeout_ms=20000", **tiers) as m:
        m.store(1, 30)
        equal(m.ask("where", 1, 30)["object"], 30 * LENGTH, "in the object store")
        before = m.ask("traffic", 1, 30, 500)
        traffic_is_well(before, before)
        goes(server)
        try:
            traffic_is_well(before, m.ask("traffic", 1, 30, 2500))
            wait_until(lambda: m.ask("stats")["object_down"], 20, "the breaker")
            traffic_is_well(before, m.ask("traffic", 1, 30, 500))
            late = m.ask("load", 5000, 1, 500)  # nobody has it
            check(late["ok"] == 0 and late["slowest_ms"] < 2000 * SLOW, late)
            check(m.ask("stats")["object_dropped"] > 0, "what could not go there was dropped")
        finally:
            comes(server)
        new = itertools.count(20_000)
        wait_until(lambda: m.ask("store", next(new), 1, 0) and not m.ask("stats")["object_down"], 30, "the store to be used again")
        m.store(9000, 6)
        equal(m.ask("where", 9000, 6)["object"], 6 * LENGTH, "stored since, and there")
        with Manager(object_=server.uri, disk=0) as other:
            for first, n in ((9000, 6), (1, 30)):
                wait_until(lambda: other.ask("load", first, n, 0)["ok"] == n * LENGTH, 20, f"another one's loads of {first}")
            other.close()
        m.close()


def test_server_killed():
    server_goes_and_comes(lambda server: server.kill(), lambda server: server.start())


def test_server_frozen():
    server_goes_and_comes(lambda server: server.process.send_signal(signal.SIGSTOP), lambda server: server.process.send_signal(signal.SIGCONT))


if __name__ == "__main__":
    run(globals())
