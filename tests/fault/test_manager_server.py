#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""A manager whose object store's server is killed, or frozen, while it stores and loads: the tiers above are as fast as before,
and once the server is back what is stored arrives there."""
import itertools
import pathlib
import signal
import sys
import time

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent))
from managertest import *


def traffic_is_well(before, told):
    """The upper tiers' loads: all there, and none waited for the store, whose time for a batch is eight seconds."""
    check(told["missing"] == 0 and told["loads"] > 2 and told["stored"] > 0, told)
    check(told["median_us"] < 4 * before["median_us"] + 20_000 * SLOW, f"{told}, before {before}")
    check(told["max_us"] < 7_500_000, f"{told}, before {before}")


def is_down_at_last(m, new):
    """Whether the breaker is open. Only calls that fail open it: one prompt more, and few, or the disk evicts the first ones."""
    m.ask("store", next(new), 1, 0)
    time.sleep(0.2)
    return m.ask("stats")["object_down"]


def server_goes_and_comes(goes, comes):
    tiers = {"host": 160, "disk": 8000, "KVBM_OBJECT_TIMEOUT_MS": "8000"}
    with Server("--appendonly", "yes", "--appendfsync", "always") as server, Manager(server.uri + "?timeout_ms=20000", **tiers) as m:
        m.store(1, 30)
        equal(m.ask("where", 1, 30)["object"], 30 * LENGTH, "in the object store")
        new = itertools.count(20_000)
        before = m.ask("traffic", 1, 30, 500)
        traffic_is_well(before, before)
        goes(server)
        try:
            traffic_is_well(before, m.ask("traffic", 1, 30, 2500))
            wait_until(lambda: is_down_at_last(m, new), 120, "the breaker")
            traffic_is_well(before, m.ask("traffic", 1, 30, 500))
            late = m.ask("load", 5000, 1, 500)  # nobody has it
            check(late["ok"] == 0 and late["slowest_ms"] < 7500, late)
            check(m.ask("stats")["object_dropped"] > 0, "what could not go there was dropped")
        finally:
            comes(server)
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


def test_removed_before_the_server_took_them():
    """A full server refused the blocks, and the plugin kept some for a later publication: once removed they never get there."""
    with Server("--maxmemory-policy", "noeviction") as server, Manager(server.uri, disk=0, host=160) as m:
        m.store(1, 2)
        server.command("CONFIG", "SET", "maxmemory", "1")
        for sequence in range(10, 18):
            m.ask("store", sequence, 1, 0)
        m.down()
        check(m.ask("stats")["object_failed"] + m.ask("stats")["object_dropped"] > 0, "the server was full")
        removed = m.ask("remove", 1, 17)
        equal((removed["rc"], removed["object"], removed["held"]), (0, 2 * LENGTH, 0))
        server.command("CONFIG", "SET", "maxmemory", "0")
        new, arrived = itertools.count(100), []

        def arrives():  # the first publications may fail for what was lost before
            sequence = next(new)
            m.store(sequence, 1)
            if m.ask("where", sequence, 1)["object"] == LENGTH:
                arrived.append(sequence)
            return len(arrived) >= 4

        wait_until(arrives, 60, "the store to be used again")
        with Manager(server.uri, disk=0) as other:
            equal(other.ask("load", 1, 17, 0)["ok"], 0)
            wait_until(lambda: other.ask("load", arrived[-1], 1, 0)["ok"] == LENGTH, 20, "another one's load")
            other.close()
        m.close()


PROMPT = 128  # blocks: manager_client.c


def round_trips(server):
    """How often the server has read from a connection. Asking takes one itself, and opening the connection for that some."""
    found = re.search(rb"total_reads_processed:(\d+)", server.command("INFO", "stats"))
    return int(found.group(1)) if found else None


def test_prompt_after_restart():
    """All blocks of a prompt are in the store alone, and a new manager knows of none: it says "not yet", then where they are, after
    a few round trips; and a load straight after the restart brings all."""
    tiers = {"host": 160, "disk": 0}
    with Server() as server:
        with Manager(server.uri, **tiers) as m:
            for _ in range(2):  # what was evicted or dropped the first time
                equal(m.ask("prompt_store", 1)["ok"], PROMPT)
                m.down()
            equal(m.ask("prompt_where", 1)["prefix"], PROMPT)
            m.close()
        with Manager(server.uri, **tiers) as m:
            idle = [round_trips(server), round_trips(server)]
            equal(m.ask("prompt_where", 1), {"prefix": PROMPT, "pending": PROMPT, "remote": 0, "miss": 0})
            told = []
            wait_until(lambda: told.append(m.ask("prompt_where", 1)) or told[-1]["remote"] == PROMPT, 20, "to be known")
            check(all(t["prefix"] == PROMPT and t["miss"] == 0 for t in told), told)
            asked = round_trips(server)
            equal(m.ask("prompt_load", 1), {"prefix": PROMPT, "ok": PROMPT, "wrong": 0})
            loaded = round_trips(server)
            if asked is not None:  # Redis 6.0.9 and later count them
                own = idle[1] - idle[0]
                check(4 <= asked - idle[1] - own <= 4 + 8, f"{idle} {asked}: four batches, and three connections more")
                check(4 <= loaded - asked - own <= 12 + 8, f"{asked} {loaded}: four batches, which are marked as used")
            m.close()
        with Manager(server.uri, **tiers) as m:
            equal(m.ask("prompt_load", 1), {"prefix": PROMPT, "ok": PROMPT, "wrong": 0}, "straight after a restart")
            equal(m.ask("prompt_load", 2)["ok"], 0, "which nobody has")
            m.close()


if __name__ == "__main__":
    run(globals())
