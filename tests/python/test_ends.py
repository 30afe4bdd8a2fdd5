# SPDX-License-Identifier: Apache-2.0
"""The end of an interpreter, in the process that made the objects and in its forked children, for every connector.

Each case runs in a process of its own: it makes the objects, puts work under way, forks a child that leaves them alone and ends,
uses them on, starts a thread that uses them until the end, and ends without closing anything. tests of queue, store and blocks
have the same for their classes. Under a sanitizer nothing is forked: its allocator's lock may be held by another thread at that
moment (gcc's runtimes before 14 don't take it around a fork), and the child then waits for ever.
"""
import os
import subprocess
import sys

from kvpython import BUILD, SANITIZED, SLOW, equal, folder, run, skip  # first: it finds the package

try:
    import numpy  # noqa: F401 pylint: disable=unused-import
except ImportError:
    skip("python3-numpy is needed")

START = """
import os, sys, threading
here, path = sys.argv[1:]
sys.path[:0] = [here]
import kvpython
sys.stdout, shown = sys.stderr, sys.stdout  # what the tests' modules print
"""
FORK = """
child = os.fork()
if child == 0:
    sys.exit(0)  # with all that the end of an interpreter does
if os.waitpid(child, 0)[1] != 0:
    sys.exit("the child's end")
"""
END = """
use(0)
begin()
{fork}
use(1)
begun = threading.Event()

def on():
    try:
        for number in range(2, 1 << 30):
            use(number)
            begun.set()
    except Exception:  # the end may have closed it; a traceback that a daemon thread writes then can abort Python
        if not begun.is_set():
            raise

begin()
threading.Thread(target=on, daemon=True).start()
if not begun.wait(60):
    sys.exit("the thread has not begun")
print("end", file=shown, flush=True)
"""
CASES = {
    "offload": """
from test_offload import Engine, content, key_of
engine = Engine(n=64, disk=path, disk_bytes="16MiB")

def use(number):
    engine.tier.store(number, [key_of(100 + number)], [number % 32])
    engine.tier.drain()
    engine.tier.finished()

def begin():
    for chunk in range(32, 64):
        engine.tier.store(1000 + chunk, [key_of(chunk)], [chunk])
""",
    "vllm_tier": """
from test_vllm import job, key_of, make, result
memory, view, tier = make(path)

def use(number):
    tier.submit_store(job(number, [key_of(number)], [number % 16]))
    tier.drain_jobs()
    list(tier.get_finished_jobs())

def begin():
    for chunk in range(16, 32):
        tier.submit_store(job(1000 + chunk, [key_of(1000 + chunk)], [chunk]))
""",
    "vllm_connector": """
from test_vllm_connector import Engine, Request, prompt
engine = Engine(path, n=64)

def use(number):
    engine.run(Request(f"request {number}", prompt(number)))

def begin():
    use(1000)
""",
    "sglang": """
from test_sglang import KV, cache, config, hashes, indices
pool = KV("page_first", seed=1)
opened = cache(path, pool)
store = opened.__enter__()

def use(number):
    store.batch_set_v1(hashes(4, number), indices(range(4)))
    store.batch_get_v1(hashes(4, number), indices(range(4)))

def begin():
    store.batch_set_v1(hashes(64, 1000), indices(range(64)))
""",
    "llama": """
from test_llama import Cache, Llama, words
model = os.path.join(path, "model.gguf")
with open(model, "wb") as file:
    file.write(b"a model" * 1000)
llm = Llama(model)
llm.cache = Cache(llm, os.path.join(path, "store"), block_tokens=16)

def use(number):
    llm.complete(words(number % 5, 60), words(1000 + number, 3))

def begin():
    use(7)
""",
    "lmcache": """
from test_lmcache import Driver, memory, names
ours = Driver(path)

def use(number):
    ours.set(names(2), [b"1" * 500, b"2" * 500])

def begin():
    for number in range(16):
        ours.client.submit_batch_set(names(32), [memory(bytes(9000))] * 32)
""",
    "events": """
from kvasir.events import Publisher
events = Publisher("tcp://127.0.0.1:*", block_size=4, replay_endpoint="tcp://127.0.0.1:*")

def use(number):
    events.stored([number + 1], [1, 2, 3, 4], parent=None)

def begin():
    for number in range(100):
        use(number)
""",
    "index": """
from kvasir.index import PrefixIndex, hash_tokens
index, tokens = PrefixIndex(), hash_tokens(range(256), 16)

def use(number):
    index.store(number % 9, tokens, tokens)
    index.find(tokens)

def begin():
    use(0)
""",
}


def make_case(text):
    def case():
        with folder() as path, folder() as own:
            program = os.path.join(own, "case.py")
            with open(program, "w", encoding="utf-8") as file:
                file.write(START + text + END.format(fork="" if SANITIZED else FORK))
            done = subprocess.run([sys.executable, "-B", "-W", "ignore", program, os.path.dirname(os.path.abspath(__file__)), path],
                                  env={**os.environ, "KV_BUILD_DIR": str(BUILD)}, capture_output=True, text=True, timeout=240 * SLOW, check=False)
            equal((done.returncode, done.stdout), (0, "end\n"), f"the end ({done.stderr[-2000:]})")
    return case


for name, text_of in CASES.items():
    globals()["test_" + name] = make_case(text_of)

if __name__ == "__main__":
    run(globals())
