# SPDX-License-Identifier: Apache-2.0
"""A manager killed at any moment while threads store and load through small tiers: what it had said to be on the disk is served
afterwards, and nothing wrong ever is. KV_FAULT_KILLS=300 kills as often in each test."""
import collections
import os
import pathlib
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent))
from storetest import BUILD, SCALE, SEED, SLOW, check, run  # noqa: E402

CLIENT = BUILD / "tests" / "manager_client"
LENGTH, STRIDE, HOST, THREADS = 8, 8192, 24, 4  # of the client's sequences; blocks
KILLS = int(os.environ.get("KV_FAULT_KILLS", "0"))


class Tier:
    """Directories that go away at the end, and what all writers said."""

    def __init__(self, sequences, blocks, volumes=1, **env):
        self.root = pathlib.Path(tempfile.mkdtemp(prefix="manager-", dir=BUILD))
        self.sequences, self.blocks = sequences, blocks
        self.state = self.root / "state"
        dirs = [self.root / f"v{i}" for i in range(volumes)]
        for directory in dirs:
            directory.mkdir()
        self.env = {**os.environ, "KVBM_HOST_BYTES": str(HOST * STRIDE), "KVBM_DISK": ":".join(map(str, dirs)),
                    "KVBM_DISK_BYTES": str(blocks * STRIDE), **env}

    def start(self, seed):
        with open(self.state, "wb") as out:
            return subprocess.Popen([str(CLIENT), "write", str(self.sequences), str(THREADS), str(seed)], stdout=out,
                                    stderr=subprocess.DEVNULL, env=self.env)

    def wait_for_start(self, writer):
        deadline = time.monotonic() + 30 * SLOW
        while not self.state.read_bytes().startswith(b"OPEN\n"):
            check(writer.poll() is None and time.monotonic() < deadline, "the writer did not start")
            time.sleep(0.005)

    def said(self):
        """The lines of the last writer; one that the kill has cut doesn't count."""
        return [line.split() for line in self.state.read_text().split("\n")[:-1]]

    def check(self, what):
        done = subprocess.run([str(CLIENT), "check", str(self.sequences)], env=self.env, capture_output=True, timeout=60 * SLOW, check=False)
        lines = done.stdout.decode().splitlines()
        check(done.returncode == 0 and lines[-1].startswith("OK"),
              f"{what}: status {done.returncode}\n{lines[-3:]}\n{done.stderr.decode(errors='replace')[-3000:]}")
        check(" wrong=0 bad=0 failed=0" in lines[-1], f"{what}: {lines[-1]}")
        return {tuple(map(int, line.split()[1:])) for line in lines if line.startswith("HAVE")}

    def __enter__(self):
        return self

    def __exit__(self, *_):
        shutil.rmtree(self.root, ignore_errors=True)


def on_disk(lines):
    return {(int(line[2]), int(line[3])) for line in lines if line[0] in ("ON", "KEPT")}


def not_evicted(lines, blocks):
    """Of those that were on the disk, the ones that are newer than all that can have come to it or been used there since: what was
    asked for later, or still waited to go down."""
    certain, since, looked = set(), collections.defaultdict(int), {}
    for number, line in enumerate(lines):
        if line[0] == "LOOK":
            looked[line[1]] = number
        elif line[0] == "ON":
            key = (int(line[2]), int(line[3]))
            since[key] = max(since[key], looked[line[1]])
    room = blocks - HOST - THREADS * (2 * LENGTH + 4)
    used = set()
    for number in range(len(lines) - 1, -1, -1):
        line = lines[number]
        if line[0] == "USE":
            used |= {(int(line[1]), i) for i in range(int(line[2]))}
        elif line[0] == "ON":
            used.add((int(line[2]), int(line[3])))
        if len(used) >= room:
            break
        if line[0] == "LOOK":
            certain |= {key for key, at in since.items() if at == number}
    return certain


def killed(tier, kills, enough, evicting=False):
    """So many kills, and more where a busy machine let the writers do little, until more than @enough blocks were asked for."""
    rng = random.Random(SEED)
    kills = KILLS or max(4, int(kills * SCALE))
    expected, asked = set(), []
    print(f"        KV_TEST_SEED={SEED}")
    while len(asked) < kills or (max(asked) <= enough and len(asked) < kills + 30):
        number = len(asked)
        writer = tier.start(rng.randrange(1 << 40))
        try:
            if rng.random() < 0.8:  # else perhaps before it has opened its tiers
                tier.wait_for_start(writer)
            time.sleep(rng.uniform(0.0, 0.3 if number < kills else 2))
            check(writer.poll() is None, f"the writer ended by itself: {writer.returncode}")
        finally:
            writer.send_signal(signal.SIGKILL)
            writer.wait()
        lines = tier.said()
        check(["WRONG"] not in lines, "wrong bytes while it ran")
        expected = not_evicted(lines, tier.blocks) if evicting else expected | on_disk(lines)
        have = tier.check(f"after kill {number}")
        check(expected <= have, f"after kill {number}: lost {sorted(expected - have)[:10]} of {len(expected)}")
        asked.append(len(expected))
    print(f"        blocks asked for after each kill: {asked if len(asked) < 20 else (min(asked), max(asked))}")
    check(max(asked) > enough, f"{asked}: too little was ever certain to be on the disk")


def test_nothing_on_the_disk_is_lost():
    """It has room for all: once on the disk is for ever."""
    with Tier(24, 24 * LENGTH + 16) as tier:
        killed(tier, 12, enough=24)


def test_while_the_disk_evicts():
    with Tier(120, 400, volumes=2, KVBM_IO="threads") as tier:
        killed(tier, 10, enough=12, evicting=True)


def test_without_barriers():
    with Tier(24, 24 * LENGTH + 16, KVBM_DISK_VOLATILE="yes", KVBM_DISK_BUFFERED="yes") as tier:
        killed(tier, 6, enough=24)


def test_without_a_host_tier():
    with Tier(24, 24 * LENGTH + 16, KVBM_HOST_BYTES="0", KVBM_STAGING_BLOCKS="48") as tier:
        killed(tier, 6, enough=24)


def test_a_slow_disk_without_a_host_tier():
    """Stores of one key overlap for long. None may take a slot of its own, which evicts what others have there."""
    with Tier(24, 24 * LENGTH + 16, KVBM_HOST_BYTES="0", KVBM_STAGING_BLOCKS="48", KVBM_IO="threads") as tier:
        switch = tier.root / "switch"
        switch.write_text("write slow:20")
        quick, start = tier.env, tier.start

        def start_slow(seed):
            tier.env = {**quick, "LD_PRELOAD": str(BUILD / "tests" / "fault_shim.so"), "KVF_DIR": str((tier.root / "v0").resolve()),
                        "KVF_SWITCH": str(switch), "ASAN_OPTIONS": "verify_asan_link_order=0:detect_leaks=0"}
            writer = start(seed)
            tier.env = quick
            return writer

        tier.start = start_slow
        killed(tier, 12, enough=24)


if __name__ == "__main__":
    run({name: item for name, item in globals().items() if getattr(item, "__module__", "") == "__main__"})
