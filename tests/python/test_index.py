# SPDX-License-Identifier: Apache-2.0
"""kvasir.index: hashing against known values and against XXH3's rules, lookups against a naive model."""
import array
import ctypes
import gc
import os
import random
import threading

from kvpython import check, equal, raises, run  # first: it finds the package
import kvasir
from kvasir import _abi, index
from kvasir.index import PrefixIndex, hash_tokens


def test_hashes():
    equal(index.SEED, 1337, "seed")
    equal(index.seed(), 1337, "no namespace")
    tokens = list(range(50))
    local = hash_tokens(tokens, 16)
    equal((local.typecode, len(local)), ("Q", 3), "full blocks")
    equal(list(local), [index.hash_block(tokens[i:i + 16]) for i in (0, 16, 32)], "block by block")
    equal(hash_tokens(array.array("I", tokens), 16), local, "an array")
    equal(hash_tokens(array.array("I", tokens).tobytes(), 16), local, "bytes")
    check(hash_tokens(tokens, 16, seed=index.seed("adapter"))[0] != local[0], "another namespace")
    sequence = index.sequence_hashes(local)
    equal(sequence[0], local[0], "the first")
    equal(index.sequence_hashes(local[:2]), sequence[:2], "a prefix")
    equal(len(hash_tokens([1, 2], 16)), 0, "no full block")
    equal(index.mm_identity("f" * 64), 0xffffffffffffffff, "a digest")
    check(index.hash_block([1], mm=[5]) != index.hash_block([1]), "multimodal")
    raises(ValueError, hash_tokens, tokens, 0)
    raises((OverflowError, TypeError), hash_tokens, [-1], 1)
    for code in "qQlLhH":
        equal(hash_tokens(array.array(code, range(64)), 16), hash_tokens(range(64), 16), f"array of {code}")
        equal(hash_tokens(memoryview(array.array(code, range(64))), 16), hash_tokens(range(64), 16), f"view of {code}")
    for code in "fd":
        raises(TypeError, hash_tokens, array.array(code, range(64)), 16)
        raises(TypeError, hash_tokens, memoryview(array.array(code, range(64))), 16)
    raises(TypeError, hash_tokens, [1.0] * 16, 16)
    try:
        import numpy
        equal(hash_tokens(numpy.array(tokens, dtype=numpy.uint32), 16), local, "numpy")
        for kind in "int64", "uint64", "int32", "int16", "<i8":
            few = numpy.array(tokens, dtype=numpy.uint32) % 30000
            equal(hash_tokens(few.astype(kind), 16), hash_tokens(few, 16), f"numpy's {kind}")
        equal(hash_tokens(numpy.array(tokens, dtype=numpy.int64), 16), local, "numpy's usual integers")
        equal(hash_tokens(numpy.array([tokens, tokens], dtype=numpy.int64)[1], 16), local, "a row of a batch")
        equal(hash_tokens(numpy.repeat(numpy.array(tokens, dtype=numpy.int64), 2)[::2], 16), local, "every second one")
        for kind in "float32", "float64", "float16", "bool", "complex64":
            raises(TypeError, hash_tokens, numpy.ones(32, dtype=kind), 16)
        for odd in -1, 1 << 32:
            raises(OverflowError, hash_tokens, numpy.array([odd] * 16, dtype=numpy.int64), 16)
    except ImportError:
        print("without numpy")


def test_match_is_the_struct_of_c():
    equal(index._MATCH.size, ctypes.sizeof(_abi.kvi_match), "size")
    match = _abi.kvi_match(_abi.kv_holder(1, 2), (ctypes.c_uint32 * 4)(3, 4, 5, 6), 7)
    equal(tuple(index.Match._make(index._MATCH.unpack(bytes(match)))), (1, 2, 3, 4, 5, 6, 7), "fields")


def test_lookups_against_a_model():
    seed = int(os.environ.get("KV_TEST_SEED", random.randrange(1 << 32)))
    print("seed", seed)
    rng = random.Random(seed)
    prompts = [[rng.randrange(3) for _ in range(8)] for _ in range(30)]  # short alphabets share prefixes
    model, tree = {}, PrefixIndex(expected_blocks=1000)
    for _ in range(400):
        prompt, worker, rank = rng.choice(prompts), rng.randrange(3), rng.randrange(2)
        local = hash_tokens(prompt, 1)
        names = index.sequence_hashes(local)
        held = model.setdefault((worker, rank), set())
        n = rng.randrange(1, 9)
        if rng.random() < 0.7:
            tree.store(worker, names[:n], local[:n], rank=rank)
            held |= set(names[:n])
        elif rng.random() < 0.9:  # leaves first, as engines evict
            tree.remove(worker, list(reversed(names[n - 1:])), rank=rank)
            held -= set(names[n - 1:])
            below = {name for p in prompts for s in [index.sequence_hashes(hash_tokens(p, 1))] if names[n - 1] in s
                     for name in s[s.index(names[n - 1]):]}
            for name in below & held:
                tree.remove(worker, [name], rank=rank)
            held -= below
        else:
            tree.clear(worker, rank=rank)
            held.clear()
        question = rng.choice(prompts)
        names = index.sequence_hashes(hash_tokens(question, 1))
        wanted = {}
        for holder, blocks in model.items():
            length = next((i for i, name in enumerate(names) if name not in blocks), len(names))
            if length:
                wanted[holder] = length
        equal({(m.worker, m.rank): m.device for m in tree.find(hash_tokens(question, 1))}, wanted, "matches")
        equal({(m.worker, m.rank): m.device for m in tree.find_named(names)}, wanted, "matches by name")
    for (worker, rank), blocks in model.items():
        equal(tree.holder_blocks(worker, rank), len(blocks), "blocks of a holder")
        if blocks:
            info = tree.holder(worker, rank)
            equal((info["blocks"], info["tier_blocks"], info["lost"]), (len(blocks), [len(blocks), 0, 0, 0], 0), "counts of a holder")
    raises(kvasir.NotFound, tree.holder, 99)


def test_tiers_parents_and_errors():
    tree = PrefixIndex()
    local = hash_tokens(range(32), 8)
    equal(tree.store(7, [1, 2], local[:2]), (2, 0, 0, 0, 0), "stored")
    equal(tree.store(7, [3, 4], local[2:], parent=2, tier=index.HOST).added, 2, "below a parent")
    equal(tree.find(local), [index.Match(7, 0, 2, 4, 4, 4, 4)], "tiers")
    equal(tree.store_known(7, [3, 99], tier=index.DEVICE), 1, "known")
    equal(tree.remove(7, [1]), 1, "removed")
    equal(tree.find(local), [], "no first block")
    equal(tree.stats()["parked"], 3, "parked")
    raises(kvasir.NotFound, tree.remove_worker, 8)
    tree.remove_worker(7)
    equal(tree.stats()["holder_blocks"], 0, "gone")
    raises(kvasir.Error, tree.store, 1, [5, 5], local[:2])  # one name twice
    raises(ValueError, tree.store, 1, [5], local)
    number = tree.set_window(1, index.Window(group=1, window=8, need=1))
    tree.store(1, [1, 2], local[:2])
    equal(tree.find(local), [], "the window has no block yet")
    tree.window_add(1, number, [2])
    equal([m.device for m in tree.find(local)], [2], "it has")
    equal(tree.find_groups([99]), [], "no group of an unknown prompt")
    equal(tree.find_groups(local), [(1, 0, None, 2, 2, 2, 2), (1, 0, 1, 2, 2, 2, 2)], "both groups have it")
    equal(tree.window_remove(1, number, [2]), 1, "and lost it")
    equal([match[2:] for match in tree.find_groups(local)], [(None, 2, 2, 2, 2), (1, 0, 0, 0, 0)], "the window ends the match")
    for no_window in (-1, 2**32 - 1):  # nor the main cache
        raises(kvasir.Error, tree.window_add, 1, no_window, [2])
        raises(kvasir.Error, tree.window_remove, 1, no_window, [2])
    equal(tree.holder_blocks(1), 2, "blocks of the main cache")
    tree.close()
    raises(ValueError, tree.find, local)


def test_many_threads():
    tree, problems = PrefixIndex(), []
    local = hash_tokens(range(640), 10)

    def work(worker):
        try:
            for _ in range(200):
                tree.store(worker, local, local)
                equal(next(m.device for m in tree.find(local) if m.worker == worker), 64, "own prefix")
        except BaseException as problem:  # pylint: disable=broad-except
            problems.append(problem)

    threads = [threading.Thread(target=work, args=(n,)) for n in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    equal(problems, [], "problems")
    check(len(tree._spare) <= 4, "a buffer for each thread at most")
    del tree
    gc.collect()


if __name__ == "__main__":
    run(globals())
