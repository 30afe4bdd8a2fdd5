# SPDX-License-Identifier: Apache-2.0
"""The disk says no: every file call of a save fails once; full and read-only file systems; jumping clocks."""
import os
import pathlib
import resource
import shutil
import subprocess
import sys
import tempfile

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent))
from storetest import BUILD, SCALE, Skip, Store, check, run  # noqa: E402

# what each kind of call may say; EINTR and short transfers must not be noticed at all
FAULTS = {"open": ("EMFILE", "ENOSPC", "EIO"), "write": ("ENOSPC", "EIO", "EDQUOT"), "sync": ("EIO", "ENOSPC"), "rename": ("EIO", "ENOSPC"),
          "link": ("ENOSPC", "EIO"), "mkdir": ("ENOSPC",), "xattr": ("ENOSPC", "EIO"), "truncate": ("ENOSPC",), "unlink": ("EIO",),
          "read": ("EIO",)}
UNNOTICED = {"read": ("EINTR", "short"), "write": ("EINTR", "short")}


def sweep(call, what, unnoticed, options="", step=1):
    """Fail the 1st, 2nd, ... call of a kind, each in a fresh process, until a run has fewer than that."""
    with Store(options=options) as store:
        store.save(version=0, objects=3)
        nth, version, failures = 1, 10, 0
        while True:
            done = store.client(version, fault=(call, nth, what), objects=2)
            where = f"{what} at {call} {nth}{options}"
            if not done.injected:
                check(done.status == 0, f"{where}: nothing injected, yet {done}")
                break
            if unnoticed:
                check(done.status == 0, f"{where} was not dealt with: {done}")
            if done.status:
                failures += 1
                check(done.log.strip(), f"{where}: failed without a line that says why")
            store.check(where)
            store.save(version + 5)  # the next save, of a fresh process, succeeds
            version += 10
            nth += step
        store.check(f"after the sweep of {call}")
        check(not store.litter(), f"{what} at {call}: left behind {store.litter()[:5]}")
        return (nth - 1) // step, failures


def test_every_call_fails_once():
    for call, kinds in FAULTS.items():
        for i, what in enumerate(kinds):
            step = 1 if SCALE >= 1 and i == 0 else 5
            print(f"        {call} {what}: %d injected, %d seen by the caller" % sweep(call, what, False, step=step), flush=True)


def test_the_first_open_of_a_directory_fails():
    """A store whose making failed half-way is made whole by the next one."""
    for call, what in (("mkdir", "ENOSPC"), ("open", "EMFILE"), ("sync", "EIO"), ("xattr", "ENOSPC")):
        nth, n_failed = 1, 0
        while True:
            with Store() as store:
                done = store.client(1, fault=(call, nth, what))
                if not done.injected:
                    break
                n_failed += done.status != 0
                store.save(version=10, objects=2)
                store.check(f"{what} at {call} {nth} in a new directory")
                check(not store.litter(), f"{what} at {call} {nth}: left behind {store.litter()[:5]}")
            nth += 2 if SCALE >= 1 else 6
        check(n_failed > 0 or call == "mkdir", f"no failing {call} of a first save was noticed")


def test_interruptions_and_short_transfers_are_not_noticed():
    for call, kinds in UNNOTICED.items():
        for what in kinds:
            n, _ = sweep(call, what, True, step=2 if SCALE >= 1 else 5)
            check(call != "write" or n > 0, f"no {what} {call} was injected")


def test_syncing_the_file_system_fails():
    n, failures = sweep("sync", "EIO", False, options="?sync=fs")
    check(n > 0 and failures > 0, f"a failed barrier was not reported: {n} injected, {failures} failed")


def test_all_writes_fail_from_one_on():
    """A disk that stays full: each save fails, the objects of before stay, and room makes it work again."""
    with Store() as store:
        store.save(version=0, objects=5)
        for nth in (1, 2, 5, 9):
            done = store.client(100 + nth, fault=("write", nth, "ENOSPC"), more=True, objects=3)
            check(done.injected and done.status in (1, 3), f"from write {nth} on: {done}")
            store.check(f"no write from {nth} on")
        store.save(version=1000)
        store.check("room again")
        check(not store.litter(), f"left behind: {store.litter()[:5]}")


def test_the_same_handle_goes_on_after_a_failure():
    """One barrier of many fails in the middle: later saves of the same process succeed."""
    with Store() as store:
        store.save(version=0)
        for call, what in (("sync", "EIO"), ("write", "ENOSPC"), ("rename", "EIO")):
            for nth in (2, 4, 7):
                done = store.client(100, fault=(call, nth, what), objects=12)
                check(done.injected, f"{call} {nth} was not reached")
                lines = [line.split()[0] for line in done.out.splitlines()]
                check(lines.count("ERR") <= 1 and lines[-1:] == ["ACK"], f"{what} at {call} {nth}: {done}")
                store.check(f"{what} at {call} {nth}")


def test_file_size_limit():
    def limit():
        resource.setrlimit(resource.RLIMIT_FSIZE, (4096, 4096))

    with Store() as store:
        store.save(version=0)
        done = store.client(10, before=limit)
        check(done.status in (1, 3) and "ACK" not in done.out, str(done))
        store.check("file size limit")
        store.save(version=20)


# -- file systems of their own ------------------------------------------------------------------------------

class Mounted:
    """A small file system; needs root."""

    def __init__(self, kind, size="3m"):
        if os.geteuid() != 0:
            raise Skip("mounting needs root")
        self.dir = tempfile.mkdtemp(prefix="mounted-", dir=BUILD)
        self.image = f"{self.dir}.img"
        if kind == "tmpfs":
            command = ["mount", "-t", "tmpfs", "-o", f"size={size}", "none", self.dir]
        else:
            if not shutil.which("mkfs.ext4"):
                raise Skip("mkfs.ext4 is needed")
            with open(self.image, "wb") as image:
                image.truncate(6 << 20)
            subprocess.run(["mkfs.ext4", "-q", "-O", "^has_journal", self.image], check=True)
            command = ["mount", "-o", "loop", self.image, self.dir]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            os.rmdir(self.dir)
            raise Skip(f"can't mount {kind} here: {done.stderr.strip()}")

    def __enter__(self):
        return self

    def __exit__(self, *_):
        subprocess.run(["umount", self.dir], check=True)
        os.rmdir(self.dir)
        if os.path.exists(self.image):
            os.unlink(self.image)


def fill(kind):
    with Mounted(kind) as mounted, Store(mounted.dir) as store:
        store.save(version=0)
        version = 10
        while True:
            done = store.client(version, objects=4, names=60, chunks=20, writer=2)
            if done.status:
                break
            version += 4
            check(version < 5000, f"{kind} does not get full")
        check("ENOSPC" in done.log or "No space" in done.log or "no space" in done.log.lower(), f"{kind}: the log doesn't say it's full: {done}")
        store.check(f"{kind} full")
        for path in list((store.dir / "chunks").rglob("*"))[:60]:  # somebody makes room: misses, never wrong bytes
            if path.is_file():
                path.unlink()
        again = Store(mounted.dir)
        again.dir = store.dir.parent / "other"
        with again:
            again.save(version=1)
            again.check(f"{kind} with room again")


def test_full_tmpfs():
    fill("tmpfs")


def test_full_ext4():
    fill("ext4")


def test_read_only_file_system():
    with Mounted("tmpfs") as mounted, Store(mounted.dir) as store:
        store.save(version=0)
        subprocess.run(["mount", "-o", "remount,ro", mounted.dir], check=True)
        done = store.client(10)
        check(done.status in (1, 3) and "ACK" not in done.out and done.log.strip(), str(done))
        found = store.check("read-only")
        check(found["objects"] > 0, "a read-only store can be read")
        subprocess.run(["mount", "-o", "remount,rw", mounted.dir], check=True)
        store.save(version=20)
        store.check("writable again")


# -- clocks ---------------------------------------------------------------------------------------------

def test_clock_jumps():
    """Wall-clock time leaps by years, forth and back, in the middle of saves."""
    with Store() as store:
        store.save(version=0)
        version = 10
        for jump in (10**8, -10**8, -3600, 3600):
            for nth in (1, 2, 5):
                store.save(version, clock=f"{nth}:{jump}", objects=4)
                store.check(f"clock by {jump} at reading {nth}")
                version += 10
        check(not store.litter(), f"left behind: {store.litter()[:5]}")


if __name__ == "__main__":
    run({name: item for name, item in globals().items() if getattr(item, "__module__", "") == "__main__"})
