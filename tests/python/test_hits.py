# SPDX-License-Identifier: Apache-2.0
"""Hits of several cache groups: C's formula against that of the vLLM connector, and an engine's loop over host tier and disk."""
import array
import math
import os
import random

from kvpython import check, equal, folder, raises, run  # first: it finds the package
from kvasir import Invalid, _vllm_groups as vllm
from kvasir.blocks import (MISS, NEEDS_ALL, NEEDS_CHUNK, NEEDS_RUN, NEEDS_STATE, NOT_LOOKED, ON_DISK, READY, CacheGroup, Chain, Manager,
                           Shape)

SHAPE = Shape(layers=1, page_size=4, inner=8)
KINDS = {vllm.FULL: NEEDS_ALL, vllm.WINDOW: NEEDS_RUN, vllm.CHUNK: NEEDS_CHUNK, vllm.STATE: NEEDS_STATE}


def seeded():
    seed = int(os.environ.get("KV_TEST_SEED", random.randrange(1 << 32)))
    print("seed", seed)
    return random.Random(seed)


def bytes_of(group, key):
    return random.Random(group << 40 | key).randbytes(SHAPE.nbytes)


def store(cache, memory, group, keys, **sequence):
    """Store blocks under @keys; their bytes follow from group and key."""
    for i, key in enumerate(keys):
        memory[i * SHAPE.nbytes:(i + 1) * SHAPE.nbytes] = bytes_of(group, key)
    packed = array.array("Q", keys)
    equal(cache.store(packed if sequence else Chain(packed, scattered=True), range(len(keys)), group=group, **sequence), len(keys), "stored")


def random_groups(rng):
    kinds = [rng.choice(list(KINDS)) for _ in range(rng.randrange(1, 5))]
    groups = [vllm.Group(kind, size := rng.choice((2, 4, 8)), {vllm.WINDOW: rng.randrange(1, 20),
                                                               vllm.CHUNK: size * rng.randrange(1, 5)}.get(kind, 0), ()) for kind in kinds]
    sizes = [group.size for group in groups]
    return vllm.Groups(groups, math.lcm(*sizes) * rng.randrange(1, 3), math.gcd(*sizes), None)


def of(group):
    return CacheGroup(KINDS[group.kind], group.size, group.span)


def test_c_and_the_connector_agree_what_a_hit_needs():
    rng = seeded()
    for _ in range(2000):
        groups = random_groups(rng)
        n, computed = rng.randrange(60) * groups.unit, rng.randrange(20) * groups.unit
        for group in groups.all:
            right = group.needed(n, computed)
            equal(list(of(group).needed(n, computed)), list(right), f"blocks of {group} for {n} tokens beyond {computed}")


def test_c_and_the_connector_agree_on_the_longest_hit():
    rng, hits = seeded(), 0
    memory = bytearray(128 * SHAPE.nbytes)
    with Manager(SHAPE, host_bytes="64MiB") as manager, manager.attach(memory) as cache:
        for prompt in range(1, 81):
            groups = random_groups(rng)
            computed, last = rng.randrange(3) * groups.unit, rng.randrange(2, 12) * groups.unit
            there = [[rng.random() < 0.9 for _ in blocks] for blocks in groups.blocks(0, last)]
            keys = [[prompt << 20 | i for i in range(len(each))] for each in there]
            for number, each in enumerate(there):
                store(cache, memory, number, [key for key, is_there in zip(keys[number], each) if is_there])
            asked = {number: (of(group), Chain(array.array("Q", keys[number]), scattered=True)) for number, group in enumerate(groups.all)}
            hit = manager.hit(asked, computed=computed, unit=groups.unit)
            equal(hit.tokens, groups.longest(there, 0, computed, last), f"the longest hit of {groups.all} beyond {computed} of {there}")
            equal((hit.sure, hit.pending), (hit.tokens, 0), "nothing is pending")
            hits += hit.tokens > computed
            for number, group in enumerate(groups.all):
                needed = group.needed(hit.tokens, computed)
                equal(list(hit.needed[number]), list(needed), "blocks to load")
                equal({hit.where[number][i] for i in needed} - {READY}, set(), "places of needed blocks")
                for is_there, where in zip(there[number], hit.where[number]):
                    check(where == NOT_LOOKED or where == (READY if is_there else MISS), "places of others")
    check(hits > 30, f"{hits} hits")


def load(manager, cache, memory, prompt):
    """Load what the longest hit needs; returns its tokens."""
    hit = manager.hit({number: (group, array.array("Q", keys)) for number, (group, keys) in prompt.items()})
    for number, blocks in hit.needed.items():
        keys, first = prompt[number][1], blocks.start
        memory[:] = bytes(len(memory))
        n = cache.load(array.array("Q", keys[first:blocks.stop]), range(len(blocks)), group=number, position=first,
                       parent=keys[first - 1] if first else None)
        equal(n, len(blocks), "loaded")
        for i, block in enumerate(blocks):
            check(memory[i * SHAPE.nbytes:(i + 1) * SHAPE.nbytes] == bytes_of(number, keys[block]), f"bytes of block {block} of group {number}")
    return hit


def test_an_engine_loads_what_each_group_needs():
    groups = {0: CacheGroup(NEEDS_ALL, 4), 5: CacheGroup(NEEDS_RUN, 4, 9), 63: CacheGroup(NEEDS_STATE, 12)}
    memory = bytearray(32 * SHAPE.nbytes)
    prompts = [{number: (group, [n << 20 | i for i in range(96 // group.block_size)]) for number, group in groups.items()} for n in range(1, 9)]
    with folder() as path:
        options = {"host_bytes": 24 * 4096, "disk": str(path), "disk_bytes": "4MiB", "fingerprint": "model"}
        with Manager(SHAPE, **options) as manager, manager.attach(memory) as cache:
            for prompt in prompts:
                for number, (group, keys) in prompt.items():
                    blocks = group.needed(60)
                    store(cache, memory, number, keys[blocks.start:blocks.stop], position=blocks.start,
                          parent=keys[blocks.start - 1] if blocks.start else None)
                equal(load(manager, cache, memory, prompt).tokens, 60, "the prompt just stored")
            manager.drain()
        with Manager(SHAPE, **options) as manager, manager.attach(memory) as cache:
            for prompt in prompts:
                hit = load(manager, cache, memory, prompt)
                equal((hit.tokens, hit.needed), (60, {0: range(15), 5: range(13, 15), 63: range(4, 5)}), "after a restart")
                equal(set(hit.where[0][:15]), {ON_DISK}, "where it was")


def test_blocks_of_two_sizes_in_two_managers():
    """A window's blocks have three times the bytes of full attention's, so they lie in a manager of their own."""
    large = Shape(layers=3, page_size=4, inner=8)
    groups = {0: CacheGroup(NEEDS_ALL, 4), 1: CacheGroup(NEEDS_RUN, 4, 9)}
    keys = array.array("Q", range(1, 13))
    memory, memory2 = bytearray(16 * SHAPE.nbytes), bytearray(16 * large.nbytes)
    with Manager(SHAPE, host_bytes="1MiB") as manager, Manager(large, host_bytes="1MiB") as other, \
            manager.attach(memory) as cache, other.attach(memory2) as cache2:
        store(cache, memory, 0, keys)
        memory2[:] = random.Random(1).randbytes(len(memory2))
        written = bytes(memory2)
        equal(cache2.store(keys[4:6], range(2), group=1, parent=keys[3:4], position=4), 2, "stored")
        asked = {number: (group, keys) for number, group in groups.items()}
        equal(manager.hit(asked).tokens, 0, "without the window's manager")
        hit = manager.hit(asked, managers={1: other})
        equal((hit.tokens, hit.needed), (24, {0: range(6), 1: range(4, 6)}), "with it")
        memory2[:] = bytes(len(memory2))
        equal(cache2.load(keys[4:6], [0, 1], group=1, parent=keys[3:4], position=4), 2, "loaded")
        check(memory2[:2 * large.nbytes] == written[:2 * large.nbytes], "bytes of the window")
        raises(ValueError, lambda: manager.hit(asked, managers={2: other}))
        equal(manager.hit(asked, managers={0: manager, 1: other}).tokens, 24, "both named")
    raises(Invalid, lambda: manager.hit(asked, managers={1: other}))


def test_refusals_say_why():
    group = CacheGroup(NEEDS_ALL, 16)
    with Manager(SHAPE, host_bytes=1 << 20) as manager:
        keys = array.array("Q", [1, 2])
        equal(manager.hit({0: (group, keys), 1: (CacheGroup(NEEDS_RUN, 16, 33), keys)}).where,
              {0: bytes([MISS, MISS]), 1: bytes([NOT_LOOKED, NOT_LOOKED])}, "an empty tier")
        equal(manager.hit({0: (group, keys)}, computed=16).tokens, 16, "what the engine has")
        for groups, options in (({}, {}), ({0: (group, keys)}, {"unit": 8}), ({64: (group, keys)}, {}), ({0: (CacheGroup(NEEDS_RUN, 16), keys)}, {}),
                                ({0: (CacheGroup(9, 16), keys)}, {})):
            raises(OSError, manager.hit, groups, **options)
        raises(Invalid, manager.hit, {0: (group, b"123")})
    raises(OSError, group.needed, 15)


if __name__ == "__main__":
    run(globals())
