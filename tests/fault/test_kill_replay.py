# SPDX-License-Identifier: Apache-2.0
"""kill -9 at random moments, of the indexer and of workers; after recovery everything must be right."""
import collections
import json
import os
import pathlib
import random
import signal
import subprocess
import sys
import tempfile
import time

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1] / "e2e"))
from kvtest import *  # noqa: E402

KVASIR = str(BUILD / "bin" / "kvasir")
SEED = int(os.environ.get("KV_TEST_SEED", time.time()))
BLOCK = 4
N_PROMPTS = 40


# -- the replay, its indexer killed under it -----------------------------------------------------------

def test_indexer_killed_under_replay():
    """The replay waits, registers again on the same port, and ends in the right state."""
    rng = random.Random(SEED)
    print(f"KV_TEST_SEED={SEED}")
    port = free_port()
    indexer = Indexer(port=port)
    with tempfile.NamedTemporaryFile(suffix=".json") as report:
        command = [KVASIR, "replay", "--only", "index", "--quiet", "--json", report.name, "--url", indexer.url, "--requests", "1440" if SANITIZED else "2400",
                   "--rate", "60" if SANITIZED else "200", "--workers", "6", "--blocks", "4000", "--replay-buffer", "100000"]
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        try:
            wait_until(lambda: len(indexer.workers()) == 6, 20, "registration")
            for _ in range(3):
                time.sleep(rng.uniform(0.3, 2.5))
                indexer.kill()
                time.sleep(rng.uniform(0, 0.7))
                indexer = Indexer(port=port)
            out, _ = process.communicate(timeout=120 * SLOW)
        finally:
            process.kill()
            process.wait()
            indexer.kill()
        equal(process.returncode, 0, f"status\n{out}\n" + "\n".join(indexer.log[-40:]))
        r = json.load(report)
    check(1 <= r["indexer_came_back"] <= 3, f"came back {r['indexer_came_back']} times")
    check(r["verified"] and r["wrong"] == 0, f"{r}")
    check(r["replayed_batches"] > 0, "nothing was replayed")
    check(r["blocks_removed"] > 0, "nothing was evicted")


def asked(indexer):
    return indexer.metrics().get('kv_indexer_queries_total{result="hit"}', 0)


def compared(limit, after_kill):
    """A replay with --@limit whose indexer is killed during the comparison of the end state: status, output, report."""
    port = free_port()
    indexer = Indexer(port=port)
    with tempfile.NamedTemporaryFile(suffix=".json") as report:
        command = [KVASIR, "replay", "--only", "index", "--quiet", "--json", report.name, "--url", indexer.url, *limit, "--rate", "400",
                   "--workers", "4", "--blocks", "2000", "--replay-buffer", "100000", "--verify", "1000000"]
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        try:
            # the requests take a second at most; so many queries come from the comparison
            wait_until(lambda: asked(indexer) > 1500, 60 * SLOW, "comparison")
            indexer.kill()
            indexer = after_kill(port, indexer)
            started = time.monotonic()
            process.send_signal(signal.SIGINT)  # enough was compared
            out, _ = process.communicate(timeout=60 * SLOW)
            seconds = time.monotonic() - started
        finally:
            process.kill()
            process.wait()
            indexer.kill()
        report.seek(0)
        r = json.loads(report.read() or "{}")
    equal((process.returncode, r["interrupted"], r["wrong"]), (130, True, 0), f"{out}\n{r}")
    return seconds, r


def come_back(port, _):
    indexer = Indexer(port=port)
    wait_until(lambda: asked(indexer) > 1500, 60 * SLOW, "comparison after the restart")
    return indexer


def test_indexer_killed_under_verification():
    """The comparison of the end state waits, too, and gives what comes back the time to catch up."""
    for limit in (("--requests", "200"), ("--seconds", "1")):
        _, r = compared(limit, come_back)
        equal(r["indexer_came_back"], 1, f"{limit}")


def test_interrupted_while_the_indexer_is_away():
    """^C doesn't wait for an indexer that doesn't come back."""
    seconds, _ = compared(("--requests", "200"), lambda port, killed: killed)
    check(seconds < 20 * SLOW, f"ended after {seconds:.1f} s")


# -- worker processes --------------------------------------------------------------------------------

def prompt(number):
    """A prompt out of a small tree: the first blocks are shared by many."""
    rng = random.Random(number)
    path = [rng.randrange(2), rng.randrange(2), rng.randrange(3)] + [number * 100 + i for i in range(rng.randrange(1, 10))]
    tokens = []
    for depth, value in enumerate(path):
        tokens += [depth * 10000 + value * BLOCK + i for i in range(BLOCK)]
    return tokens


def names(tokens):
    """Block names as an engine makes them: each depends on all before it."""
    chain, name = [], 0
    for i in range(0, len(tokens), BLOCK):
        name = hash((name, tuple(tokens[i:i + BLOCK]))) & 0xFFFFFFFFFFFFFFFF
        chain.append(name)
    return chain


def worker_main(endpoint, replay_endpoint, capacity):
    """An engine process: serves prompts it is told on stdin, from a bounded cache that evicts leaves first."""
    cache = collections.OrderedDict()  # oldest first
    with Publisher(endpoint=endpoint, replay_endpoint=replay_endpoint) as engine:
        print("ready", flush=True)
        for line in sys.stdin:
            verb, _, rest = line.strip().partition(" ")
            if verb == "subscribed":
                engine.wait_subscriber()
                print("yes", flush=True)
            elif verb == "serve":
                serve(engine, cache, capacity, prompt(int(rest)))
                print("served", flush=True)
            elif verb == "truth":
                held = []
                for number in range(N_PROMPTS):
                    chain = names(prompt(number))
                    n = 0
                    while n < len(chain) and chain[n] in cache:
                        n += 1
                    held.append(n)
                print(json.dumps({"held": held, "blocks": len(cache)}), flush=True)


def serve(engine, cache, capacity, tokens):
    chain = names(tokens)
    held = 0
    while held < len(chain) and chain[held] in cache:
        held += 1
    evicted = []
    for name in reversed(chain[:held]):
        cache.move_to_end(name)
    while len(cache) + len(chain) - held > capacity:
        evicted.append(cache.popitem(last=False)[0])
    for name in reversed(chain):
        cache[name] = True
        cache.move_to_end(name)
    events = [engine.removed(evicted)] if evicted else []
    if held < len(chain):
        events.append(engine.stored(chain[held:], tokens[held * BLOCK:], chain[held - 1] if held else None, BLOCK))
    if events:
        engine.send(*events)


class Worker:
    def __init__(self, instance):
        self.instance = instance
        self.endpoint = f"tcp://127.0.0.1:{free_port()}"
        self.replay_endpoint = f"tcp://127.0.0.1:{free_port()}"
        self.start()

    def start(self):
        command = [sys.executable, "-B", __file__, "worker", self.endpoint, self.replay_endpoint, "60"]
        # block names must be the same in every process of a run
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
                                        env={**os.environ, "PYTHONHASHSEED": "0"})
        equal(self.process.stdout.readline(), "ready\n", "a worker's first word")

    def ask(self, line):
        self.process.stdin.write(line + "\n")
        self.process.stdin.flush()
        return self.process.stdout.readline()

    def register(self, indexer):
        equal(indexer.post("/register", {"instance_id": self.instance, "endpoint": self.endpoint, "model_name": MODEL,
                                         "block_size": BLOCK, "replay_endpoint": self.replay_endpoint}).status, 201, "register")

    def kill(self):
        self.process.kill()
        self.process.wait()
        self.process.stdin.close()
        self.process.stdout.close()


def check_truth(indexer, workers):
    truth = {w.instance: json.loads(w.ask("truth")) for w in workers}
    for number in range(N_PROMPTS):
        wanted = {str(i): {"0": t["held"][number] * BLOCK} for i, t in truth.items() if t["held"][number]}
        answer = indexer.query(prompt(number))
        equal(answer["scores"], wanted, f"scores of prompt {number}")
        equal(answer["tree_sizes"], {i: {"0": truth[int(i)]["blocks"]} for i in wanted}, f"tree_sizes of prompt {number}")
    return True


def test_workers_and_indexer_killed():
    """Real worker processes and the indexer die in the middle of things, again and again."""
    rng = random.Random(SEED)
    print(f"KV_TEST_SEED={SEED}")
    port, workers, indexer = free_port(), [], None
    kills = collections.Counter()
    try:
        indexer = Indexer(port=port)
        workers = [Worker(instance) for instance in (1, 2, 3)]
        for worker in workers:
            worker.register(indexer)
            worker.ask("subscribed")
        for step in range(1500 if not SANITIZED else 300):
            worker = rng.choice(workers)
            dice = rng.random()
            if dice < 0.02 or step == 100:
                # kill it with a command under way; then it starts anew, empty, numbers from 0
                worker.process.stdin.write(f"serve {rng.randrange(N_PROMPTS)}\n")
                worker.process.stdin.flush()
                time.sleep(rng.uniform(0, 0.004))
                worker.kill()
                worker.start()
                worker.ask("subscribed")
                kills["worker"] += 1
            elif dice < 0.026:
                indexer.kill()
                indexer = Indexer(port=port)
                for each in workers:
                    each.register(indexer)
                kills["indexer"] += 1
            else:
                worker.ask(f"serve {rng.randrange(N_PROMPTS)}")
                if rng.random() < 0.2:
                    time.sleep(rng.uniform(0, 0.01))
        # From the first event after a restart on, the index must follow; every worker makes one.
        for worker in workers:
            worker.ask("subscribed")
        deadline = time.monotonic() + patience(60)
        while True:
            for worker in workers:
                worker.ask(f"serve {rng.randrange(N_PROMPTS)}")
            try:
                wait_until(lambda: check_truth(indexer, workers), what="the truth", give_up=3 * SLOW)
                break
            except AssertionError:
                if time.monotonic() > deadline:
                    raise
        check(kills["worker"] > 0 and indexer.log is not None, f"{kills}")
        indexer.stop()
        print(f"        {kills['worker']} workers and {kills['indexer']} indexers were killed")
    finally:
        for worker in workers:
            worker.kill()
        if indexer:
            indexer.kill()


if __name__ == "__main__":
    if sys.argv[1:2] == ["worker"]:
        worker_main(sys.argv[2], sys.argv[3], int(sys.argv[4]))
    else:
        run(globals())
