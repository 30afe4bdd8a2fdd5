# SPDX-License-Identifier: Apache-2.0
"""The disk tier killed, starved, damaged and refused: what was acknowledged is there, and nothing is ever wrong."""
import os
import pathlib
import random
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
import time

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent))
from storetest import BUILD, SANITIZED, SCALE, SEED, SHIM, SLOW, check, run  # noqa: E402

CLIENT = BUILD / "tests" / "disk_client"
SLOTS = 48


class Disk:
    """Volumes in a directory that goes away at the end, and what all writers said."""

    def __init__(self, volumes=1, **env):
        self._root = pathlib.Path(tempfile.mkdtemp(prefix="disk-", dir=BUILD))
        self.dirs = [self._root / f"v{i}" for i in range(volumes)]
        for directory in self.dirs:
            directory.mkdir()
        self.state = self._root / "state"
        self.state.touch()
        self.report = self._root / "injected"
        self.env = {**os.environ, **env}
        self.version = 1

    def files(self, kind):
        return [directory / f"kvbm-fault.{kind}" for directory in self.dirs]

    def arguments(self, what, *rest):
        return [str(CLIENT), what, ",".join(map(str, self.dirs)), str(SLOTS), *map(str, rest)]

    def writing(self, rounds=0, threads=3):
        self.version += 1_000_000
        return self.arguments("write", self.version, rounds, threads)

    def start(self):
        with open(self.state, "ab") as out:
            return subprocess.Popen(self.writing(), stdout=out, stderr=subprocess.DEVNULL, env=self.env)

    def write(self, rounds=20, fault=None, more=False, before=None, status=0):
        env = dict(self.env)
        if fault:
            call, nth, what = fault
            self.report.unlink(missing_ok=True)
            env.update(LD_PRELOAD=str(SHIM), ASAN_OPTIONS="verify_asan_link_order=0:detect_leaks=0", KVD_IO="threads",
                       KVF_DIR=str(self._root.resolve() / "v0"), KVF_CALL=call, KVF_NTH=str(nth), KVF_DO=what, KVF_REPORT=str(self.report))
            if more:
                env["KVF_MORE"] = "1"
        done = subprocess.run(self.writing(rounds, 2), env=env, capture_output=True, timeout=120 * SLOW, check=False, preexec_fn=before)
        with open(self.state, "ab") as out:
            out.write(done.stdout)
        log = done.stderr.decode(errors="replace")
        check("Sanitizer" not in log, log)
        check(done.returncode == status or status is None, f"writer: status {done.returncode}\n{done.stdout[-500:]}\n{log[-2000:]}")
        return done.stdout.decode()

    def check(self, what="", damaged=False):
        done = subprocess.run(self.arguments("check", self.state, *(["damaged"] if damaged else [])), env=self.env, capture_output=True,
                              timeout=120 * SLOW, check=False)
        out = done.stdout.decode()
        check(done.returncode == 0 and out.splitlines()[-1].startswith("OK"),
              f"{what}: status {done.returncode}\n{out[-2000:]}\n{done.stderr.decode(errors='replace')[-2000:]}")
        return dict((key, int(value)) for key, value in (pair.split("=") for pair in out.splitlines()[-1].split()[1:]))

    def __enter__(self):
        return self

    def __exit__(self, *_):
        shutil.rmtree(self._root, ignore_errors=True)

    def acknowledged(self):
        """Of how many slots the last word is an acknowledgement."""
        words = [line.split() for line in self.state.read_text().splitlines()]
        return list({word[1]: word[0] for word in words if len(word) > 1}.values()).count("ACK")


def wait_for_many(disk):
    """On a slow machine no writer may have come far before it was killed: the last one is given the time."""
    deadline = time.monotonic() + 60 * SLOW
    while disk.acknowledged() <= SLOTS // 2 and time.monotonic() < deadline:
        time.sleep(0.02)


def killed(volumes, kills, **env):
    rng = random.Random(SEED)
    print(f"        KV_TEST_SEED={SEED}")
    acked = 0
    with Disk(volumes, **env) as disk:
        for number in range(kills):
            writer = disk.start()
            try:
                time.sleep(rng.uniform(0.0, 0.25) * (4 if SANITIZED else 1))
                if number == kills - 1:
                    wait_for_many(disk)
                check(writer.poll() is None, f"the writer ended by itself: {writer.returncode}")
            finally:
                writer.send_signal(signal.SIGKILL)
                writer.wait()
            acked = max(acked, disk.check(f"after kill {number}")["acknowledged"])
        check(acked > SLOTS // 4, f"only {acked} slots were ever acknowledged at once")
        disk.write()
        disk.check("in the end")


def test_killed_at_any_moment():
    killed(1, max(5, int(25 * SCALE)))


def test_killed_with_volumes():
    killed(3, max(4, int(12 * SCALE)), KVD_IO="threads")


def test_killed_without_barriers():
    killed(1, max(4, int(8 * SCALE)), KVD_VOLATILE="1", KVD_BUFFERED="1")


def test_killed_with_files():
    killed(1, max(4, int(8 * SCALE)), KVD_FILES="3", KVD_BUFFERED="1")
    killed(2, max(4, int(8 * SCALE)), KVD_FILES="2", KVD_VOLATILE="1", KVD_BUFFERED="1")


def every_call(call, what, more, step):
    """The Nth call fails, for every N. What the store says of each block must be true."""
    with Disk() as disk:
        disk.write(10)
        nth, injected = 1, 0
        while nth < 400:
            disk.write(3, fault=(call, nth, what), more=more, status=None)
            disk.check(f"{what} at {call} {nth}")
            if not disk.report.exists():
                break
            injected += 1
            nth += step
        check(injected > 2, f"{call} {what}: only {injected} were injected")
        disk.write(10)
        found = disk.check("in the end")
        check(found["acknowledged"] > SLOTS // 4, str(found))
        print(f"        {call} {what}: {injected} places")


def test_errors_at_every_call():
    step = 3 if SCALE >= 1 else 11
    every_call("write", "EIO", False, step)
    every_call("write", "ENOSPC", False, step + 2)
    every_call("write", "EINTR", False, step + 4)
    every_call("write", "short", False, step + 4)
    every_call("sync", "EIO", False, 1)
    every_call("read", "EIO", False, 1)
    every_call("read", "short", False, 1)


def test_everything_fails_from_some_call_on():
    step = 7 if SCALE >= 1 else 23
    every_call("write", "EIO", True, step)
    every_call("sync", "EIO", True, 3)
    every_call("any", "kill", False, step)


def test_one_volume_fails_and_the_other_goes_on():
    with Disk(2) as disk:
        disk.write(10)
        out = disk.write(60, fault=("write", 20, "EIO"), more=True)
        errors = [int(line.split()[1]) for line in out.splitlines() if line.startswith("ERR")]
        last = [line for line in out.splitlines() if line.startswith("ACK")][-20:]
        check(errors and all(slot % 2 == 0 for slot in errors), f"of the volume that is well: {errors[:10]}")
        check(len(last) == 20 and all(int(line.split()[1]) % 2 for line in last), f"{last}")
        check(all(line.endswith(" 5") for line in out.splitlines() if line.startswith("ERR")), out[-500:])
        disk.check()
        disk.write()
        disk.check("after the disk was changed")


def test_no_room_at_opening():
    with Disk() as disk:
        disk.write(status=3, before=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000)))
        disk.write()
        disk.check()


def test_full_disk():
    """Without fallocate room shows when blocks are written: each says so, and the tier goes on."""
    with Disk() as disk:
        out = disk.write(40, fault=("write", 30, "ENOSPC"), more=True)
        check(" 28" in out and "ACK" in out, out[-300:])
        disk.check()
        disk.write()
        disk.check("after room was made")


def test_bits_and_ends():
    """Any bit of either file flipped, either file cut anywhere: fewer blocks, never others."""
    rng = random.Random(SEED)
    print(f"        KV_TEST_SEED={SEED}")
    lost = 0
    for number in range(max(6, int(30 * SCALE))):
        with Disk(rng.choice([1, 2])) as disk:
            disk.write(12)
            whole = disk.check()["found"]
            path = rng.choice(disk.files(rng.choice(["slots", "index"])))
            size = path.stat().st_size
            if rng.random() < 0.3:
                os.truncate(path, rng.randrange(size))
            else:
                with open(path, "r+b") as file:
                    for _ in range(rng.choice([1, 1, 50])):
                        at = rng.randrange(size)
                        file.seek(at)
                        byte = file.read(1)[0]
                        file.seek(at)
                        file.write(bytes([byte ^ (1 << rng.randrange(8))]))
            lost += whole - disk.check(f"damage {number} of {path.name}", damaged=True)["found"]
            disk.write(12)
            disk.check(f"after damage {number}", damaged=True)
    check(lost > 0, "nothing was damaged at all")


def test_removed_files():
    for kinds in (["slots"], ["index"], ["slots", "index"]):
        with Disk(2) as disk:
            disk.write(20)
            whole = disk.check()["found"]
            for kind in kinds:
                disk.files(kind)[1].unlink()
            found = disk.check(str(kinds), damaged=True)["found"]
            check(0 < found < whole, f"{kinds}: {found} of {whole}")
            disk.write(30)
            disk.check("written again", damaged=True)


def test_second_process():
    with Disk() as disk:
        writer = disk.start()
        try:
            for _ in range(1200 * SLOW):
                if b"OPEN" in disk.state.read_bytes():
                    break
                time.sleep(0.05)
            done = subprocess.run(disk.writing(1), capture_output=True, env=disk.env, timeout=60 * SLOW, check=False)
            check(done.returncode == 3 and b"busy" in done.stdout, f"{done}")
            check(writer.poll() is None, "the first one ended")
        finally:
            writer.kill()
            writer.wait()
        disk.check()


if __name__ == "__main__":
    run({name: item for name, item in globals().items() if getattr(item, "__module__", "") == "__main__"})
