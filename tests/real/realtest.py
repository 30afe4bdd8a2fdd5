# SPDX-License-Identifier: Apache-2.0
"""Shared by the tests that run the engines' own code (vLLM, SGLang, Dynamo) beside a real kv-indexer.

    from realtest import *          # first: starts the program again with the Python of KV_REAL_ENGINES

    use("vllm-0.33.0")                # that package folder comes first on the module path
    with Indexer() as indexer: ...

KV_REAL_ENGINES names a virtual environment made by tests/real/make_env.sh; without it every program is skipped.
"""
import mmap
import os
import pathlib
import random
import sys
from collections import defaultdict

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1] / "e2e"))

ENVIRONMENT = os.environ.get("KV_REAL_ENGINES", "")
if not ENVIRONMENT:
    print("skipped: KV_REAL_ENGINES names no virtual environment (tests/real/make_env.sh makes one)")
    sys.exit(77)
ENGINES = pathlib.Path(ENVIRONMENT).resolve()
PYTHON = ENGINES / "bin" / "python"
if not PYTHON.exists():
    print(f"skipped: {PYTHON} doesn't exist (tests/real/make_env.sh makes it)")
    sys.exit(77)
QUIET = {"VLLM_LOGGING_LEVEL": "ERROR", "VLLM_NO_USAGE_STATS": "1", "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1",
         "TOKENIZERS_PARALLELISM": "false", "PYTHONHASHSEED": "0"}
if pathlib.Path(sys.prefix).resolve() != ENGINES:
    os.execve(PYTHON, [str(PYTHON), "-B", *sys.argv], {**os.environ, **QUIET})

from kvtest import *  # noqa: E402 (needs the environment's Python)

__all__ = ["BUILD", "SOURCE", "MODEL", "PYTHON", "ENGINES", "Indexer", "Tally", "Feed", "check", "equal", "flip_bit", "free_port", "histories",
           "http_request", "run", "run_all", "skip", "skip_all", "use", "wait_until", "warm"]


def use(folder):
    """Put the package folder @folder of the environment (an engine's own version) first on the module path."""
    path = ENGINES / folder
    if not path.is_dir():
        skip_all(f"{path} doesn't exist (tests/real/make_env.sh makes it)")
    sys.path.insert(0, str(path))


def warm(nbytes):
    """Touch free memory, at most half of it: the host of a virtual machine takes back what is free for seconds, and whoever is measured
    next would pay 10 us for each page."""
    with open("/proc/meminfo", encoding="ascii") as file:
        free = next(int(line.split()[1]) << 10 for line in file if line.startswith("MemFree:"))
    mmap.mmap(-1, max(mmap.PAGESIZE, min(nbytes, free // 2)), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | mmap.MAP_POPULATE).close()


def histories(default):
    """Yield (seed, random generator) for each random history. KV_TEST_SEED repeats one, KV_TEST_SCALE is a percentage."""
    seed = os.environ.get("KV_TEST_SEED")
    if seed:
        yield int(seed), random.Random(int(seed))
        return
    for number in range(max(1, default * int(os.environ.get("KV_TEST_SCALE", "100")) // 100)):
        yield number, random.Random(number)


class Feed:
    """One engine's publisher, followed by @indexer as instance @instance.

    @publisher: the engine's own ZmqEventPublisher. @make_batch(events): its own batch type.
    """

    def __init__(self, indexer, instance, publisher, make_batch, endpoint, block_size, replay=None, **fields):
        self.indexer, self.instance, self.publisher, self.make_batch = indexer, instance, publisher, make_batch
        self.sent = 0
        if replay:
            fields["replay_endpoint"] = replay
        indexer.register(instance, endpoint, block_size=block_size, **fields)
        wait_until(lambda: self.listener()["status"] == "active", what="an active listener")

    def listener(self):
        for worker in self.indexer.workers():
            if worker["instance_id"] == self.instance:
                return worker["listeners"]["0"]
        raise KeyError(self.instance)

    def publish(self, events):
        """Publish one batch with @events, if there are any."""
        if events:
            self.publisher.publish(self.make_batch(events))
            self.sent += 1

    def settle(self):
        """Wait until the indexer has applied every published batch."""
        if self.sent:
            wait_until(lambda: self.listener().get("last_seq") == self.sent - 1, what=f"batch {self.sent - 1}", interval=0.001)

    def close(self, unregister=True):
        self.publisher.shutdown()
        if unregister:
            self.indexer.unregister(self.instance)


class Tally:
    """Count, per option, the lookups whose answer is over or under the engine's own.

    An answer while the view is partial may be under: those count apart. With @loose it may be over, too.
    """

    def __init__(self, title, loose=False):
        self.loose = loose
        self.title, self.rows, self.first = title, defaultdict(lambda: [0, 0, 0, 0, 0, 0]), {}
        self.partial = defaultdict(lambda: [0, 0, 0])  # lookups, of these under, over

    def add(self, option, truth, answer, story="", partial=False):
        """@truth, @answer: tokens. @story: how to reproduce; kept for the first difference of each option."""
        row = self.rows[option]
        row[0] += 1
        row[1] += truth > 0
        self.partial[option][0] += partial
        if answer > truth and partial and self.loose:
            self.partial[option][2] += 1
            return
        if answer > truth:
            row[2] += 1
            row[4] += answer - truth
        elif answer < truth and partial:
            self.partial[option][1] += 1
            return
        elif answer < truth:
            row[3] += 1
            row[5] += truth - answer
        if answer != truth and option not in self.first:
            self.first[option] = f"engine {truth} tokens, kv-indexer {answer}: {story}"

    def show(self, option):
        lookups, hits, over, under, over_tokens, under_tokens = self.rows[option]
        partial = self.partial[option]
        print(f"  {self.title} {option}: {lookups} lookups, {hits} hits, over {over} ({over_tokens} tokens), "
              f"under {under} ({under_tokens} tokens)"
              + (f"; {partial[0]} while partial, {partial[1]} of them under, {partial[2]} over" if partial[0] else ""), flush=True)

    def exact(self, option):
        """Fail unless every lookup of @option was right and at least one was a hit."""
        self.show(option)
        check(self.rows[option][1] > 0, f"{option}: no lookup had a hit, so the test shows nothing")
        check(option not in self.first, f"{option}: {self.first.get(option)}")


def run_all(cases, namespace, prefix="test_"):
    """Make one test function per entry of @cases (name: function without arguments), then run the module's tests."""
    for name, function in cases.items():
        namespace[prefix + name] = function
    run(namespace)
