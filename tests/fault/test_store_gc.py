# SPDX-License-Identifier: Apache-2.0
"""Collection beside savers, all of them killed at any moment: what was published restores, byte for byte."""
import json
import pathlib
import random
import subprocess
import sys
import threading
import time

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent))
from storetest import BUILD, SANITIZED, SCALE, SEED, SLOW, Store, check, run  # noqa: E402

KVASIR = str(BUILD / "bin" / "kvasir")
PART = 40000  # bytes that objects share or don't


def content(seed):
    """An object: parts that many others have too, in an order of its own, so that saves hit what others drop."""
    rng = random.Random(seed)
    parts = [random.Random(f"part {rng.randrange(40)}").randbytes(PART) for _ in range(rng.randrange(1, 5))]
    return b"".join(parts) + rng.randbytes(rng.randrange(1, 2000))


class Storm:
    """Programs that run, and are killed or not, until the time is up. What each name may hold is kept beside it."""

    def __init__(self, store, seconds, seed):
        self.store, self.until, self.seed = store, time.monotonic() + seconds, seed
        self.may_be = {}  # name: the contents it may have; None: deleted
        self.counts = dict(saves=0, killed=0, collections=0, deleted=0, removed=0)
        self.failed = []
        self.enough = dict(saves=6, killed=11, collections=4) if SCALE >= 1 else {}
        self.lock = threading.Lock()

    def count(self, **kinds):
        with self.lock:
            for kind, n in kinds.items():
                self.counts[kind] += n

    def goes_on(self):
        """Until its time is over and enough has happened; on a slow machine that takes longer."""
        late = time.monotonic() - self.until
        return not self.failed and (late < 0 or late < 100 and any(self.counts[kind] < n for kind, n in self.enough.items()))

    def program(self, rng, args, longest, fine=(0,)):
        """Run to its end, or kill it within `longest` seconds. Its output, or None when it was killed."""
        process = subprocess.Popen([KVASIR, "store", *args, "--json"], stdout=subprocess.PIPE, stderr=subprocess.PIPE)
        killed = rng.random() < 0.5
        if killed:
            time.sleep(rng.uniform(0, longest))
            process.kill()
        out, log = process.communicate(timeout=60 * SLOW)
        if killed and process.returncode < 0:
            self.count(killed=1)
            return None
        check(process.returncode in fine, f"{args}: status {process.returncode}\n{log.decode(errors='replace')[-2000:]}")
        return out

    def saver(self, number):
        rng, file = random.Random(f"{self.seed} saver {number}"), self.store.state.parent / f"object-{number}"
        while self.goes_on():
            name, data = f"s{number}-{rng.randrange(6)}", content(rng.random())
            file.write_bytes(data)
            before = self.may_be.setdefault(name, [None])
            if rng.random() < 0.3:
                self.may_be[name] = before + [None]
                if self.program(rng, ["rm", self.store.uri, name], 0.01, (0, 4) if None in before else (0,)) is not None:
                    self.may_be[name] = [None]
                    self.count(removed=1)
            else:
                self.may_be[name] = before + [data]
                if self.program(rng, ["save", self.store.uri, name, str(file), "--chunk", "16KiB"], 0.05) is not None:
                    self.may_be[name] = [data]
                    self.count(saves=1)

    def opaque_saver(self, number):
        """Manifests whose chunks only the store's own notes tell."""
        rng, version = random.Random(f"{self.seed} opaque {number}"), 1
        while self.goes_on():
            command = self.store.command(version, writer=number, objects=0, names=5, chunks=12)
            process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
            time.sleep(rng.uniform(0.01, 0.4))
            check(process.poll() is None, f"writer {number} ended by itself with {process.returncode}")
            process.kill()
            out = process.communicate()[0]
            check(b"ERR" not in out, out[-500:])
            with self.lock:
                self.store.note(out)
            version += 100000
            self.count(killed=1)

    def collector(self, number):
        rng = random.Random(f"{self.seed} collector {number}")
        while self.goes_on():
            out = self.program(rng, ["gc", self.store.uri, "--grace", "1s"], 0.05)
            if out is not None:
                self.count(collections=1, deleted=json.loads(out)["deleted_chunks"])
            time.sleep(rng.uniform(0, 0.1))

    def rage(self, jobs):
        def guard(job, number):
            try:
                job(number)
            except Exception as error:  # pylint: disable=broad-except
                self.failed.append(error)

        threads = [threading.Thread(target=guard, args=job) for job in jobs]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        if self.failed:
            raise self.failed[0]

    def verify(self, what):
        """Each name holds one of the contents that it may."""
        file, found = self.store.state.parent / "restored", 0
        for name, contents in self.may_be.items():
            file.unlink(missing_ok=True)
            done = subprocess.run([KVASIR, "store", "restore", self.store.uri, name, str(file), "--quiet"], capture_output=True,
                                  timeout=60 * SLOW, check=False)
            check(done.returncode in (0, 4), f"{what}: {name}: status {done.returncode}\n{done.stderr.decode(errors='replace')[-2000:]}")
            data = file.read_bytes() if done.returncode == 0 else None
            check(data in contents, f"{what}: {name} holds {'nothing' if data is None else 'other bytes'}")
            found += data is not None
        checked = self.store.check(what)
        return found, checked["objects"]


def test_collection_in_a_storm_of_kills():
    print(f"        KV_TEST_SEED={SEED}")
    for options, seconds in (("", 7), ("?sums=files&zstd=1", 4)):
        with Store(options=options) as store:
            waste = store.state.parent / "waste"  # so that there surely is something to collect, however slow the machine
            waste.write_bytes(random.Random(SEED).randbytes(100000))
            for command in (["save", store.uri, "waste", str(waste)], ["rm", store.uri, "waste"]):
                subprocess.run([KVASIR, "store", *command, "--quiet"], check=True, timeout=60 * SLOW, stdout=subprocess.DEVNULL)
            storm = Storm(store, max(2, seconds * SCALE) * (2 if SANITIZED else 1), SEED)
            storm.rage([(storm.saver, 0), (storm.saver, 1), (storm.opaque_saver, 0), (storm.opaque_saver, 1), (storm.collector, 0),
                        (storm.collector, 1)])
            found = storm.verify(f"after the storm{options}")
            done = subprocess.run([KVASIR, "store", "gc", store.uri, "--no-grace", "--json"], capture_output=True, text=True, check=True)
            left = json.loads(done.stdout)["deleted_chunks"]  # with nobody about and no age to protect anything
            check(storm.verify(f"after the last collection{options}") == found, "objects went with the last collection")
            bad = list((store.dir / ".kvasir" / "bad").iterdir())
            check(not bad, f"set aside: {bad[:3]}")
            check(not store.litter(), f"left behind: {store.litter()[:5]}")
            n = storm.counts
            check(all(n[kind] >= least for kind, least in storm.enough.items()), f"too little happened: {n}")
            check(n["deleted"] + left > 0, f"nothing was ever collected: {n}")
            print(f"        {n}, {left} more in the end; {found[0]} snapshots and {found[1]} other objects are whole{options}")


if __name__ == "__main__":
    run({name: item for name, item in globals().items() if getattr(item, "__module__", "") == "__main__"})
