# SPDX-License-Identifier: Apache-2.0
"""Writers of one file store killed at any moment: what was acknowledged restores, and nothing is half."""
import pathlib
import random
import signal
import subprocess
import sys
import time

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent))
from storetest import SANITIZED, SCALE, SEED, SLOW, Store, check, run  # noqa: E402


def kill_at_every_call(options, step):
    """SIGKILL before (odd) or after (even) the Nth file call of a save, for every N."""
    with Store(options=options) as store:
        store.save(version=0, objects=3)
        nth, version = 1, 10
        while True:
            done = store.client(version, fault=("any", nth, "kill" if nth % 2 else "kill-after"), objects=2)
            what = f"killed at file call {nth}{options}"
            if not done.injected:
                check(done.status == 0, f"nothing injected at {nth}, yet {done}")
                version += 10
                break
            check(done.status == -signal.SIGKILL, f"{what}: {done}")
            store.check(what)
            version += 10
            if nth % 7 == 0:
                store.save(version)
                version += 10
            nth += step
        check(nth > 20, f"only {nth} file calls in a save: the shim doesn't see them")
        store.save(version)
        store.check("in the end")
        check(not store.litter(), f"left behind: {store.litter()[:5]}")
        print(f"        {nth} places to die{options}")


def test_killed_at_every_file_call():
    kill_at_every_call("", 1 if SCALE >= 1 else 7)


def test_killed_at_every_file_call_with_options():
    kill_at_every_call("?zstd=1&sync=fs", 3 if SCALE >= 1 else 17)
    kill_at_every_call("?sums=files", 3 if SCALE >= 1 else 17)


def start(store, writer, version, log):
    with open(log, "ab") as out:
        return subprocess.Popen(store.command(version, writer=writer, objects=0, names=5, chunks=12), stdout=out, stderr=subprocess.DEVNULL)


def wait_for_words(logs):
    """Each writer has something acknowledged by now, or soon: a slow machine may have killed them all before."""
    deadline = time.monotonic() + 60 * SLOW
    while time.monotonic() < deadline and not all(log.exists() and b"ACK" in log.read_bytes() for log in logs):
        time.sleep(0.02)


def test_a_storm_of_kills():
    """Six writers on one directory, each killed and started again at random moments."""
    rng = random.Random(SEED)
    print(f"        KV_TEST_SEED={SEED}")
    n, rounds = (3, 3) if SANITIZED else (6, max(2, int(3 * SCALE)))
    kills = 0
    with Store() as store:
        logs = [store.state.parent / f"writer-{i}" for i in range(n)]
        versions = [1] * n
        for r in range(rounds):
            writers = [start(store, i, versions[i], logs[i]) for i in range(n)]
            try:
                for _ in range(n * 4):
                    time.sleep(rng.uniform(0.01, 0.12))
                    i = rng.randrange(n)
                    check(writers[i].poll() is None, f"writer {i} ended by itself with {writers[i].returncode}")
                    writers[i].kill()
                    writers[i].wait()
                    kills += 1
                    versions[i] += 100000
                    writers[i] = start(store, i, versions[i], logs[i])
                wait_for_words(logs)
                for i in rng.sample(range(n), n // 2):  # frozen, then killed while frozen
                    writers[i].send_signal(signal.SIGSTOP)
                time.sleep(0.05)
            finally:
                for writer in writers:
                    writer.kill()
                    writer.wait()
            versions = [v + 100000 for v in versions]
            store.state.write_bytes(b"".join(log.read_bytes() for log in logs if log.exists()))
            found = store.check(f"round {r}")
        check(b"ERR" not in store.state.read_bytes(), store.state.read_bytes()[-500:])
        store.save(version=10**9, writer=7)
        store.check("after the next save")
        check(found["acknowledged"] >= n, f"{found}: nobody got anything done")
        check(not store.litter(), f"left behind: {store.litter()[:5]}")
        print(f"        {kills} kills, {found['acknowledged']} acknowledged objects, {found['chunks']} chunks checked")


if __name__ == "__main__":
    run({name: item for name, item in globals().items() if getattr(item, "__module__", "") == "__main__"})
