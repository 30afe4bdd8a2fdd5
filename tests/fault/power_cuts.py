#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Power cuts without a guest: a FUSE disk with a volatile cache (power_disk) under ext4, xfs or btrfs, a writer on it, and at a
random moment what such a disk would have left: flushed sectors, and of the others each, 512 or 4096 bytes at a time, or not. That is
mounted in the disk's place, and all that was acknowledged before must be there, byte-exact. Needs root, /dev/fuse and loop devices.

    power_cuts.py [--cuts N] [--fs "ext4 xfs btrfs"] [--of "store disk resize manager"] [--seed N] [--jobs N]

The first cuts of each kind are controls: the writer's fsync does nothing (fault_shim.so), and the disk's flush does nothing. Each must
lose something, or the cuts prove nothing. "resize" is a disk tier that is opened with another size all the time. --jobs of the kinds
and file systems run at a time, with a line for each control, each 25 cuts and each end; a table of all comes last. Exit status 1 when
anything was lost or wrong, or a control lost nothing."""
import argparse
import concurrent.futures
import contextlib
import fcntl
import os
import pathlib
import random
import re
import shutil
import struct
import subprocess
import sys
import tempfile
import time
import typing

BUILD = pathlib.Path(os.environ.get("KV_BUILD_DIR", pathlib.Path(__file__).resolve().parents[2] / "build")).resolve()
TESTS = BUILD / "tests"
MIB = {"ext4": 64, "xfs": 300, "btrfs": 128}
MKFS = {"ext4": ["mkfs.ext4", "-q", "-F"], "xfs": ["mkfs.xfs", "-q", "-f"], "btrfs": ["mkfs.btrfs", "-q", "-f"]}
OPTIONS = {"store": ["", "?sync=fs", "?sync=files"], "disk": [{}, {"KVD_IO": "threads"}, {"KVD_BUFFERED": "1"}, {"KVD_FILES": "3"}],
           "manager": [{}, {"KVBM_IO": "threads"}, {"KVBM_DISK_BUFFERED": "yes"}]}
OPTIONS["resize"] = OPTIONS["disk"]
LOST, WRONG = "lost", "wrong"
SHUTDOWN, WITHOUT_LOG = 0x8004587D, struct.pack("I", 2)  # an ioctl of ext4 and xfs: nothing more is written
TOLD_EACH = 25  # cuts
NEEDED = 2 << 30  # bytes of memory that a rig may fill


def run(*command, check=True, **more):
    return subprocess.run([str(word) for word in command], check=check, capture_output=True, text=True, timeout=120, **more)


@contextlib.contextmanager
def mounted(file, kind, where):
    """The file system in @file. Whatever happens, it is unmounted and the loop device is gone."""
    for left in range(20, 0, -1):
        done = run("losetup", "--find", "--show", file, check=left == 1)
        if done.returncode == 0:
            break
        time.sleep(0.05)  # somebody else took the same one
    loop = done.stdout.strip()
    try:
        # A process with a mount namespace of its own may keep the file system of the cut before alive, whose UUID is the same.
        run("mount", "-t", kind, *(("-o", "nouuid") if kind == "xfs" else ()), loop, where)
        try:
            yield
        finally:
            for _ in range(100):
                if run("umount", where, check=False).returncode == 0:
                    break
                time.sleep(0.05)
    finally:
        run("losetup", "--detach", loop, check=False)


class Writer:
    """Processes whose output goes to a file: what is there before a cut was acknowledged before it."""

    def __init__(self, commands, env, log):
        self.log = log
        with open(log, "wb") as out:
            self.processes = [subprocess.Popen([str(word) for word in command], stdout=out, stderr=subprocess.DEVNULL,
                                               env={**os.environ, **env}) for command in commands]

    def wait_for(self, word, seconds=60):
        until = time.monotonic() + seconds
        while time.monotonic() < until and all(process.poll() is None for process in self.processes):
            if re.search(rb"^" + word + rb".*\n", self.log.read_bytes(), re.MULTILINE):
                return
            time.sleep(0.01)
        raise RuntimeError(f"nothing was written: {self.log.read_bytes()[-500:]!r}")

    def lines(self, end=None):
        text = self.log.read_bytes()[:end].decode(errors="replace")
        return text[:text.rfind("\n") + 1].splitlines()

    def kill(self):
        for process in self.processes:
            process.kill()
        for process in self.processes:
            process.wait()


# Each kind: commands of writers, the word they say when something is durable, and how to check what is left.

class Store:
    word = b"ACK"

    def __init__(self, mount, option, rng):
        self.uri, self.env, self.rng = f"{mount}/kv{option}", {}, rng

    def writers(self):
        return [[TESTS / "store_client", "write", self.uri, n, 0, 30, 10, 24000, 1] for n in (1, 2, 3)]

    def state(self, before, after):
        return [line for line in before if re.match("ACK|ERR", line)]

    def check(self, state, path):
        path.write_text("".join(line + "\n" for line in state))
        checks = [run(TESTS / "store_client", "check", self.uri, path, check=False)]
        saved = run(TESTS / "store_client", "write", self.uri, 4, 5, 5, 10, 24000, 1, check=False)
        checks.append(run(TESTS / "store_client", "check", self.uri, path, check=False))
        text = "".join(check.stdout for check in checks)
        if "WRONG BYTES" in text:
            return WRONG, text
        if saved.stdout.count("ACK 4") != 5 or any(check.returncode for check in checks):
            return LOST, text + saved.stdout + saved.stderr
        return None, text


class Disk:
    word = b"ACK"

    def __init__(self, mount, option, rng):
        self.env = dict(option or {})
        self.directories = [mount / "t0", mount / "t1"]  # volumes
        self.directory = ",".join(str(directory) for directory in self.directories)

    def writers(self):
        for directory in self.directories:
            directory.mkdir()
        return [[TESTS / "disk_client", "write", self.directory, 300, 1, 0, 4]]

    def state(self, before, after):
        """A slot whose write began before the cut, or perhaps before it, says nothing of the write before that."""
        return [line for line in before if re.match("BEGIN|ACK|ERR", line)] + \
               [line for line in after if line.startswith("BEGIN")]

    def check(self, state, path):
        path.write_text("".join(line + "\n" for line in state))
        env = {**os.environ, **self.env}
        done = run(TESTS / "disk_client", "check", self.directory, 300, path, check=False, env=env)
        more = run(TESTS / "disk_client", "write", self.directory, 300, 1000000, 5, 1, check=False, env=env)
        if re.search("^BAD (wrong bytes|a record)", done.stdout, re.MULTILINE):
            return WRONG, done.stdout
        if done.returncode or more.stdout.count("ACK") != 30:
            return LOST, done.stdout + more.stdout
        return None, done.stdout


class Resize(Disk):
    """The same, opened again and again with another size: cuts in mid open, growth and shrinking."""

    def writers(self):
        return [["resize" if word == "write" else 2 if word == 0 else word for word in command] for command in super().writers()]


class Manager:
    word = b"ON"

    def __init__(self, mount, option, rng):
        self.directory, self.rng = mount / "t", rng
        self.env = {"KVBM_HOST_BYTES": "192KiB", "KVBM_DISK": str(self.directory), "KVBM_DISK_BYTES": "3MiB", **(option or {})}

    def writers(self):
        self.directory.mkdir()
        return [[TESTS / "manager_client", "write", 40, 4, self.rng.randrange(32768)]]

    def state(self, before, after):
        if any(line.startswith("WRONG") for line in before + after):
            return ["WRONG"]
        return sorted({line.split(" ", 2)[2] for line in before if re.fullmatch(r"ON \d+ \d+ \d+", line)})

    def check(self, state, path):
        done = run(TESTS / "manager_client", "check", 40, check=False, env={**os.environ, **self.env})
        have = set(re.findall("^HAVE (.*)$", done.stdout, re.MULTILINE))
        if state == ["WRONG"] or (done.returncode == 0 and not re.search(r"^OK .*\bwrong=0\b", done.stdout, re.MULTILINE)):
            return WRONG, done.stdout
        lost = set(state) - have
        return (LOST if lost or done.returncode else None), f"{len(lost)} of {len(state)} lost; {done.stdout[-200:]}"


KINDS = {"store": Store, "disk": Disk, "resize": Resize, "manager": Manager}


class Rig:
    def __init__(self, work, seed):
        self.work, self.rng = work, random.Random(seed)
        self.fuse, self.mount, self.image, self.left = work / "fuse", work / "mnt", work / "image", work / "left"
        self.fuse.mkdir()
        self.mount.mkdir()

    def template(self, kind):
        """An empty file system, made once."""
        path = self.work / f"empty-{kind}"
        if not path.exists():
            with open(path, "wb") as file:
                file.truncate(MIB[kind] << 20)
            run(*MKFS[kind], path)
        return path

    def cut(self, kind, of, option, preload=None, lies=False):
        """One cut: None, LOST or WRONG, and what was said."""
        run("cp", "--sparse=always", self.template(kind), self.image)
        with subprocess.Popen([TESTS / "power_disk", self.fuse, self.image] + (["lies"] if lies else []), text=True,
                              stdin=subprocess.PIPE, stdout=subprocess.PIPE) as disk:
            try:
                if disk.stdout.readline() != "READY\n":
                    raise RuntimeError("power_disk did not start")
                with mounted(self.fuse / "disk", kind, self.mount):
                    what = KINDS[of](self.mount, option, self.rng)
                    state, said = self.write_and_cut(disk, what, preload)
            finally:
                disk.stdin.close()
                disk.wait()
        try:
            with mounted(self.left, kind, self.mount):
                verdict, text = what.check(state, self.work / "state")
        except subprocess.CalledProcessError as error:
            verdict, text = LOST, f"the file system can't be mounted: {error.stderr}"
        return verdict, f"{kind} {of} {option or ''}: {len(state)} lines acknowledged, {said}; {text}"

    def stop_writing(self):
        """What the file system has still to write is of no use after a cut: unmounting is quicker without."""
        with contextlib.suppress(OSError):
            at = os.open(self.mount, os.O_RDONLY)
            try:
                fcntl.ioctl(at, SHUTDOWN, WITHOUT_LOG)
            finally:
                os.close(at)

    def write_and_cut(self, disk, what, preload):
        env = dict(what.env)
        if preload:
            env |= {"LD_PRELOAD": str(TESTS / "fault_shim.so"), "KVF_DIR": str(self.mount), "KVF_CALL": "sync", "KVF_NTH": "1",
                    "KVF_MORE": "1", "KVF_DO": "skip", "ASAN_OPTIONS": "verify_asan_link_order=0:detect_leaks=0", "KVD_IO": "threads", "KVBM_IO": "threads"}
        writer = Writer(what.writers(), env, self.work / "written")
        try:
            writer.wait_for(what.word)
            time.sleep(self.rng.uniform(0.02, 0.5))
            end = os.path.getsize(writer.log)
            disk.stdin.write(f"cut {self.rng.randrange(1 << 40)} {self.rng.choice((512, 4096))} {self.left}\n")
            disk.stdin.flush()
            said = disk.stdout.readline().strip()
        finally:
            writer.kill()
        self.stop_writing()
        before = writer.lines(end)
        return what.state(before, writer.lines()[len(before):]), said


def control(rig, kind, of, **how):
    """Something is lost without barriers: at the first cut mostly, within ten surely. Nothing is ever wrong."""
    for _ in range(10):
        verdict, said = rig.cut(kind, of, OPTIONS[of][0], **how)
        if verdict:
            break
    return verdict, said


class Result(typing.NamedTuple):
    kind: str
    of: str
    cuts: int
    lost: int
    wrong: int
    caught: int  # controls, of which there are two
    seconds: float

    def failed(self):
        return self.lost + self.wrong + 2 - self.caught


def cuts_of(rig, kind, of, n):
    caught = 0
    for name, how in (("the writer's barriers do nothing", {"preload": True}), ("the disk's flushes do nothing", {"lies": True})):
        verdict, said = control(rig, kind, of, **how)
        caught += verdict == LOST
        print(f"{'ok    ' if verdict == LOST else 'FAILED'} control, {name}: {kind} {of}: {verdict or 'nothing was lost'}"
              f"{'' if verdict == LOST else ': ' + said}", flush=True)
    verdicts, began = [], time.monotonic()
    for i in range(n):
        verdict, said = rig.cut(kind, of, OPTIONS[of][i % len(OPTIONS[of])])
        verdicts.append(verdict)
        if verdict:
            print(f"FAILED {verdict}: {said}", flush=True)
        if (i + 1) % TOLD_EACH == 0 and i + 1 < n:
            print(f"       {kind} {of}: {i + 1} of {n} cuts, {sum(map(bool, verdicts))} failed", flush=True)
    lost, wrong = verdicts.count(LOST), verdicts.count(WRONG)
    seconds = time.monotonic() - began
    print(f"{'FAILED' if lost + wrong else 'ok    '} {kind} {of}: {n} cuts, {lost} lost, {wrong} wrong, "
          f"{seconds / max(n, 1):.1f} s each", flush=True)
    return Result(kind, of, n, lost, wrong, caught, seconds)


def tell(results, seconds):
    """The table of all cuts, and their sums."""
    row = "{:<6} {:<8} {:>5} {:>5} {:>6} {:>9} {:>7}"
    print("\n" + row.format("system", "of", "cuts", "lost", "wrong", "controls", "s each"))
    for each in results:
        print(row.format(each.kind, each.of, each.cuts, each.lost, each.wrong, f"{each.caught} of 2",
                         f"{each.seconds / max(each.cuts, 1):.1f}"))
    print(row.format("all", "", sum(each.cuts for each in results), sum(each.lost for each in results),
                     sum(each.wrong for each in results), f"{sum(each.caught for each in results)} of {2 * len(results)}", "")
          + f"  in {seconds:.0f} s", flush=True)


def missing():
    """Why there can be no power cuts here, or an empty string."""
    if os.geteuid() != 0:
        return "root is needed, to mount"
    for path in ("/dev/fuse", "/dev/loop-control"):
        if not os.access(path, os.R_OK | os.W_OK):
            return f"{path} is needed"
    with tempfile.TemporaryDirectory(prefix="power-cuts-") as work:
        try:
            with open(f"{work}/image", "wb") as file:
                file.truncate(16 << 20)
            run("mkfs.ext4", "-q", "-F", f"{work}/image")
            os.mkdir(f"{work}/mnt")
            with mounted(f"{work}/image", "ext4", f"{work}/mnt"):
                return ""
        except (OSError, subprocess.CalledProcessError) as error:
            return f"a file system in a file can't be mounted: {getattr(error, 'stderr', None) or error}"


def room():
    """Memory where there is enough: a sync of the disks' files costs nothing there. None: the usual place."""
    with contextlib.suppress(OSError):
        space = os.statvfs("/dev/shm")
        if space.f_bavail * space.f_frsize >= NEEDED:
            return "/dev/shm"
    return None


def one_rig(kind, of, options):
    work = pathlib.Path(tempfile.mkdtemp(prefix="power-cuts-", dir=room()))
    try:
        return cuts_of(Rig(work, f"{options.seed} {kind} {of}"), kind, of, options.cuts)
    finally:
        shutil.rmtree(work, ignore_errors=True)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cuts", type=int, default=int(os.environ.get("KV_FAULT_CUTS", "100")))
    parser.add_argument("--fs", default=os.environ.get("KV_FAULT_FS", "ext4 xfs btrfs"))
    parser.add_argument("--of", default=os.environ.get("KV_FAULT_OF", "store disk resize manager"))
    # A cut waits for half of its time.
    parser.add_argument("--jobs", type=int, default=int(os.environ.get("KV_FAULT_JOBS", 2 * (os.cpu_count() or 1))))
    parser.add_argument("--seed", type=int, default=int(os.environ.get("KV_TEST_SEED", time.time_ns() & 0xffffffff)))
    options = parser.parse_args()
    if missing():
        print(f"power_cuts.py: {missing()}", file=sys.stderr)
        return 2
    print(f"KV_TEST_SEED={options.seed}", flush=True)
    what = [(kind, of) for kind in options.fs.split() for of in options.of.split()]
    began = time.monotonic()
    with concurrent.futures.ThreadPoolExecutor(options.jobs) as pool:
        results = list(pool.map(lambda each: one_rig(*each, options), what))
    tell(results, time.monotonic() - began)
    return 1 if any(each.failed() for each in results) else 0


if __name__ == "__main__":
    sys.exit(main())
