#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""A manager whose disk is slow, fails, is full, cut, overwritten or removed while it stores and loads: the other tiers go on, the
counters say what happened, and no byte is ever wrong."""
import os
import pathlib
import random
import sys
import tempfile

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent))
from managertest import *


def on_disk(manager, first, n):
    return manager.ask("where", first, n)["disk"]


def test_slow_disk():
    """What the host tier has comes as ever; what only the disk has is late at its deadline, not when the disk answers."""
    with Manager() as m:
        m.store(1, 20)
        m.forget()
        m.store(100, 2)
        with m.fault("any slow:8000"):
            late = m.ask("load", 1, 1, 300)
            check(late["ok"] == 0 and late["slowest_ms"] < 7000, f"a deadline was not kept: {late}")
            host = m.ask("load", 100, 2, 0)
            check(host["ok"] == 2 * LENGTH and host["slowest_ms"] < 7000, f"the host tier's were slow: {host}")
            equal(m.ask("store", 200, 2, 0)["ok"], 2 * LENGTH, "stores wait for nothing but the host tier")
        m.down()
        equal(m.ask("load", 1, 20, 0)["ok"], 20 * LENGTH, "loads when it is well again")
        m.forget()
        equal(m.ask("load", 200, 2, 0)["ok"], 2 * LENGTH, "what was stored meanwhile")
        equal(m.ask("stats")["volumes_down"], 0)
        m.close()


def test_reads_fail():
    """The object store has them, too; the volume is left alone after some errors, the other one goes on."""
    with tempfile.TemporaryDirectory(dir=BUILD) as store, Manager(volumes=2, object_=store) as m:
        m.store(1, 10)
        m.forget()
        with m.fault("read EIO"):
            equal(m.ask("load", 1, 10, 0)["ok"], 10 * LENGTH, "from the other volume and the object store")
            stats = m.ask("stats")
            check(stats["disk_failed"] >= 8 and stats["object_out"] >= 8 and stats["volumes_down"] == 1, stats)
            check(stats["disk_out"] >= 5 * LENGTH, stats)  # of the volume that is well
            m.store(100, 4)
            equal(on_disk(m, 100, 4), 4 * LENGTH, "new ones, on the other volume")
        m.forget()
        equal(m.ask("load", 100, 4, 0)["ok"], 4 * LENGTH, "stored since")
        m.close()


def test_writes_fail():
    with Manager(volumes=2) as m:
        with m.fault("write EIO"):
            m.store(1, 20)
            stats = m.ask("stats")
            check(stats["disk_failed"] >= 8 and stats["volumes_down"] == 1, stats)
            m.store(100, 5)
            equal(on_disk(m, 100, 5), 5 * LENGTH, "on the other volume")
        m.forget()
        equal(m.ask("load", 100, 5, 0)["ok"], 5 * LENGTH)
        m.close()
        with Manager(volumes=2, root=m.root) as again:  # as after the disk was changed
            equal(again.ask("load", 100, 5, 0)["ok"], 5 * LENGTH, "reopened")
            again.store(300, 40)
            equal(on_disk(again, 300, 40), 40 * LENGTH, "both volumes take blocks again")
            again.close()


def test_full_disk():
    """Counted, not fatal; what was there stays, and once there is room all the slots are used again."""
    with Manager() as m:
        m.store(1, 5)
        m.forget()
        with m.fault("write ENOSPC"):
            m.store(100, 40)
            stats = m.ask("stats")
            check(stats["disk_failed"] >= 40 * LENGTH and stats["volumes_down"] == 0, stats)
            m.forget()
            equal(m.ask("load", 100, 40, 0)["ok"], 0, "of what there was no room for")
            equal(m.ask("load", 1, 5, 0)["ok"], 5 * LENGTH, "of what was there")
        m.store(200, 75)
        equal(on_disk(m, 200, 75) + on_disk(m, 1, 5), 80 * LENGTH, "every slot is used")
        m.forget()
        equal(m.ask("load", 200, 75, 0)["ok"], 75 * LENGTH)
        m.close()


def test_cut_and_overwritten():
    """The slots' file is cut, bits of it are flipped, while it is used: misses, counted, whose slots are used again."""
    rng = random.Random(int(os.environ.get("KV_TEST_SEED", 1)))
    for how in ("cut", "flipped"):
        with Manager() as m:
            m.store(1, 40)
            m.forget()
            path = m.files("slots")
            size = path.stat().st_size
            if how == "cut":
                os.truncate(path, 4096 + 160 * STRIDE)
            else:
                with open(path, "r+b") as file:
                    for _ in range(300):
                        at = rng.randrange(size)
                        file.seek(at)
                        byte = file.read(1)[0]
                        file.seek(at)
                        file.write(bytes([byte ^ (1 << rng.randrange(8))]))
            told = m.ask("load", 1, 40, 0)
            check(0 < told["ok"] < 40 * LENGTH, f"{how}: {told}")
            stats = m.ask("stats")
            check(stats["disk_bad"] + stats["disk_failed"] >= 8, f"{how}: {stats}")
            m.store(100, 80)
            equal(on_disk(m, 100, 80), 80 * LENGTH, f"{how}: every slot is used again")
            m.forget()
            equal(m.ask("load", 100, 80, 0)["ok"], 80 * LENGTH, f"{how}: stored since")
            m.close()


def test_removed():
    """Files that have gone from their directory are there until the manager ends; the next one begins anew."""
    with tempfile.TemporaryDirectory(dir=BUILD) as store, Manager(object_=store) as m:
        m.store(1, 6)
        m.forget()
        m.files("slots").unlink()
        m.files("index").unlink()
        equal(m.ask("load", 1, 6, 0)["ok"], 6 * LENGTH)
        m.store(100, 2)
        m.forget()
        equal(m.ask("load", 100, 2, 0)["ok"], 2 * LENGTH)
        m.close()
        with Manager(object_=store, root=m.root) as again:
            equal(on_disk(again, 1, 6), 0)
            # A key that a store still being opened can't answer for is a miss.
            wait_until(lambda: again.ask("load", 1, 6, 0)["ok"] == 6 * LENGTH, 20, "all from the object store")
            again.store(200, 2)
            again.forget()
            equal(again.ask("load", 200, 2, 0)["ok"], 2 * LENGTH)
            again.close()


if __name__ == "__main__":
    run(globals())
