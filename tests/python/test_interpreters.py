# SPDX-License-Identifier: Apache-2.0
"""Several interpreters in one process, each in a thread of its own: they share the libraries, and end one by one."""
import os
import subprocess
import sys

from kvpython import BUILD, equal, folder, run, skip_all  # first: it finds the package

try:
    import _interpreters  # noqa: F401 pylint: disable=unused-import
except ImportError:
    try:
        import _xxsubinterpreters  # noqa: F401 pylint: disable=unused-import
    except ImportError:
        skip_all("this Python has no interpreters beside the first")

THREADS, TURNS, BLOCKS = 4, 2, 50

# Program of each interpreter. Ends of the odd ones come with work under way and nothing closed.
INNER = """
import sys
sys.path.insert(0, package)
import kvasir.queue, kvasir.store
from kvasir import blocks, index
store = kvasir.store.open(folder)
keys = [b"%8d" % (number * 1000 + i) for i in range(count)]
for key in keys:
    store.put(key, key * 512)
    assert bytes(store.get(key)) == key * 512
store.flush()
try:
    store.put(b"", b"")
    raise SystemExit("an empty key was taken")
except kvasir.Error as problem:
    assert problem.errno == 22, problem
hashes = index.hash_tokens(range(64), 16)
chain = index.sequence_hashes(hashes)
found = index.PrefixIndex()
found.store(7, list(chain), hashes, parent=None)
assert [match.device for match in found.find(hashes)] == [4]
shape = blocks.Shape(layers=2, page_size=16, inner=64)
memory = bytearray(range(256)) * (8 * shape.nbytes // 256)
before = bytes(memory[:4 * shape.nbytes])
manager = blocks.Manager(shape, host_bytes=1 << 20)
cache = manager.attach(memory)
assert cache.store(chain, [0, 1, 2, 3]) == 4
memory[:4 * shape.nbytes] = bytes(4 * shape.nbytes)
assert cache.load(chain, [0, 1, 2, 3]) == 4 and bytes(memory[:4 * shape.nbytes]) == before
queue = kvasir.queue.Queue(store)
into = [bytearray(4096) for _ in keys]
queue.get(keys, into)
if number % 2 == 0:
    queue.close()
    cache.close()
    manager.close()
    store.close()
"""

OUTER = """
import sys, threading
package, folder, threads, turns, count, inner = sys.argv[1:]
try:
    import _interpreters as interpreters
except ImportError:
    import _xxsubinterpreters as interpreters
sys.path.insert(0, package)
import kvasir.store
failures, how = [], {"isolated": False} if sys.version_info[:2] == (3, 12) else {}  # its isolated ones can't import ctypes

def use(thread):
    try:
        for turn in range(int(turns)):
            number = thread * int(turns) + turn
            one = interpreters.create(**how)
            given = f"package, folder, number, count = {package!r}, {folder!r}, {number}, {count}\\n"
            failed = interpreters.run_string(one, given + inner)  # older ones raise
            if failed:
                failures.append(failed.formatted)
            interpreters.destroy(one)
    except BaseException as problem:
        failures.append(repr(problem))

all = [threading.Thread(target=use, args=(i,)) for i in range(int(threads))]
for thread in all:
    thread.start()
for thread in all:
    thread.join()
for failure in failures:
    print(failure)
with kvasir.store.open(folder) as store:  # the first interpreter goes on
    for number in range(int(threads) * int(turns)):
        for i in range(int(count)):
            key = b"%8d" % (number * 1000 + i)
            assert bytes(store.get(key)) == key * 512, key
print("end")
"""


def test_interpreters_in_threads():
    with folder() as path:
        done = subprocess.run([sys.executable, "-B", "-W", "ignore::DeprecationWarning", "-c", OUTER, str(BUILD / "python"), path,
                               str(THREADS), str(TURNS), str(BLOCKS), INNER], env=os.environ, capture_output=True, text=True, timeout=300,
                              check=False)
    equal((done.returncode, done.stdout), (0, "end\n"), f"interpreters ({done.stderr})")


if __name__ == "__main__":
    run(globals())
