# SPDX-License-Identifier: Apache-2.0
"""The block manager as a binding in another language has it: libkvbm.so through ctypes, structures declared from the
headers, a block from allocation to its events."""
import ctypes
import errno
import os

from kvtest import *

U8, U32, U64, INT, LONG, SIZE = (ctypes.c_uint8, ctypes.c_uint32, ctypes.c_uint64, ctypes.c_int, ctypes.c_long,
                                 ctypes.c_size_t)
PTR, STR, BOOL = ctypes.c_void_p, ctypes.c_char_p, ctypes.c_bool
BLOCK, STORED, REMOVED, HOST = 4, 1, 2, 1


def structure(name, *fields):
    return type(name, (ctypes.Structure,), {"_fields_": fields})


Handle = structure("Handle", ("pool", PTR), ("block", U32), ("generation", U32))
RegistryOpts = structure("RegistryOpts", ("size", SIZE), ("key_len", U32), ("events", PTR))
PoolOpts = structure("PoolOpts", ("size", SIZE), ("name", STR), ("tier", INT), ("groups", U64), ("n_blocks", U32),
                     ("block_size", U32))  # what follows is left at its default: that's what size is for
Shortage = structure("Shortage", ("requested", SIZE), ("available", SIZE))
Chain = structure("Chain", ("size", SIZE), ("group", U32), ("keys", PTR), ("parent", PTR), ("position", U32),
                  ("tokens", PTR))
Event = structure("Event", ("type", INT), ("tier", INT), ("first", BOOL), ("last", BOOL), ("group", U32),
                  ("key_len", U32), ("key", ctypes.POINTER(U64)), ("parent", ctypes.POINTER(U64)), ("position", U32),
                  ("n_tokens", U32), ("tokens", ctypes.POINTER(U32)), ("sequence", U64), ("time_ns", U64))


def load():
    library = ctypes.CDLL(str(BUILD / "lib" / "libkvbm.so"), mode=os.RTLD_LOCAL | os.RTLD_NOW)
    for name, result, *arguments in (
            ("kvbm_events_create", INT, PTR, PTR), ("kvbm_events_destroy", None, PTR),
            ("kvbm_events_add_ring", INT, PTR, INT, U64, PTR), ("kvbm_events_flush", INT, PTR, U32),
            ("kvbm_event_ring_drain", LONG, PTR, PTR, SIZE, PTR), ("kvbm_registry_create", INT, PTR, PTR),
            ("kvbm_registry_destroy", INT, PTR), ("kvbm_registry_check", INT, PTR),
            ("kvbm_registry_metrics", LONG, PTR, PTR, SIZE), ("kvbm_pool_create", INT, PTR, PTR, PTR),
            ("kvbm_pool_destroy", INT, PTR), ("kvbm_pool_allocate", INT, PTR, SIZE, PTR, PTR),
            ("kvbm_pool_complete", INT, PTR, PTR, SIZE, PTR, PTR), ("kvbm_pool_register", INT, PTR, PTR, SIZE, PTR),
            ("kvbm_pool_match", LONG, PTR, U32, PTR, SIZE, ctypes.c_uint, PTR),
            ("kvbm_pool_release", INT, PTR, PTR, SIZE), ("kvbm_hash_tokens", SIZE, PTR, SIZE, U32, U64, INT, PTR, PTR, PTR)):
        function = getattr(library, name)
        function.restype, function.argtypes = result, arguments
    return library


def hashes(library, tokens):
    keys = (U64 * (len(tokens) // BLOCK))()
    equal(library.kvbm_hash_tokens((U32 * len(tokens))(*tokens), len(tokens), BLOCK, 0, 0, None, None, keys), len(keys))
    return keys


def fill(library, pool, n, chain):
    """Allocate n blocks and register them as what chain says; handles to hold."""
    fresh, full, held = (Handle * n)(), (Handle * n)(), (Handle * n)()
    equal(library.kvbm_pool_allocate(pool, n, fresh, None), 0, "allocate")
    equal(library.kvbm_pool_complete(pool, fresh, n, ctypes.byref(chain), full), 0, "complete")
    check(not fresh[0].pool, "complete consumes its handles")
    equal(library.kvbm_pool_register(pool, full, n, held), 0, "register")
    return held


class Manager:
    """An event manager with a ring, a registry and a pool of four blocks of four tokens."""

    def __init__(self):
        self.library = load()
        self.events, self.ring, self.registry, self.pool = PTR(), PTR(), PTR(), PTR()
        equal(self.library.kvbm_events_create(None, ctypes.byref(self.events)), 0, "events")
        check(self.library.kvbm_events_add_ring(self.events, 0, 0, ctypes.byref(self.ring)) >= 0, "ring")
        opts = RegistryOpts(ctypes.sizeof(RegistryOpts), 0, self.events)
        equal(self.library.kvbm_registry_create(ctypes.byref(opts), ctypes.byref(self.registry)), 0, "registry")
        opts = PoolOpts(ctypes.sizeof(PoolOpts), b"ctypes", HOST, 0, 4, BLOCK)
        equal(self.library.kvbm_pool_create(self.registry, ctypes.byref(opts), ctypes.byref(self.pool)), 0, "pool")

    def drain(self):
        """[(type, first, last, key, parent, position, tokens)] of what has happened."""
        events, lost = (Event * 16)(), U64(7)
        equal(self.library.kvbm_events_flush(self.events, 60000), 0, "flush")
        n = self.library.kvbm_event_ring_drain(self.ring, events, 16, ctypes.byref(lost))
        equal(lost.value, 0, "lost events")
        for event in events[:n]:
            equal((event.tier, event.key_len, event.group), (HOST, 8, 0), "an event's tier, key length and group")
        return [(e.type, e.first, e.last, e.key[0], e.parent[0] if e.parent else None, e.position, e.tokens[:e.n_tokens])
                for e in events[:n]]

    def close(self):
        equal(self.library.kvbm_pool_destroy(self.pool), 0, "destroy the pool")
        equal(self.library.kvbm_registry_destroy(self.registry), 0, "destroy the registry")
        self.library.kvbm_events_destroy(self.events)


def test_a_block_from_allocation_to_its_events():
    manager = Manager()
    library, pool = manager.library, manager.pool
    tokens = list(range(100, 110))  # two blocks and a tail
    keys = hashes(library, tokens)
    array = (U32 * len(tokens))(*tokens)
    chain = Chain(ctypes.sizeof(Chain), 0, ctypes.addressof(keys), None, 0, ctypes.addressof(array))
    held = fill(library, pool, 2, chain)
    equal(manager.drain(), [(STORED, True, False, keys[0], None, 0, tokens[:4]),
                            (STORED, True, False, keys[1], keys[0], 1, tokens[4:8])], "stored events")

    found = (Handle * 2)()
    equal(library.kvbm_pool_match(pool, 0, keys, 2, 0, found), 2, "match")
    equal([h.block for h in found], [h.block for h in held], "the blocks found")
    equal(library.kvbm_pool_destroy(pool), -errno.EBUSY, "destroy with handles held")
    equal(library.kvbm_pool_release(pool, found, 2), 0, "release")
    copy = Handle(held[1].pool, held[1].block, held[1].generation)
    equal(library.kvbm_pool_release(pool, held, 2), 0, "release")
    equal(library.kvbm_pool_release(pool, ctypes.byref(copy), 1), -errno.ESTALE, "a copy of a released handle")

    fresh, shortage = (Handle * 5)(), Shortage()
    equal(library.kvbm_pool_allocate(pool, 5, fresh, ctypes.byref(shortage)), -errno.ENOSPC, "five of four")
    equal((shortage.requested, shortage.available), (5, 4), "the shortage")
    equal(library.kvbm_pool_match(pool, 0, keys, 2, 0, found), 2, "nothing was evicted for it")
    equal(library.kvbm_pool_release(pool, found, 2), 0, "release")
    text = ctypes.create_string_buffer(1 << 14)
    check(0 < library.kvbm_registry_metrics(manager.registry, text, len(text)) < len(text), "metrics")
    check(b'\nkvbm_registrations_total{pool="ctypes"} 2\n' in text.value, text.value)
    equal(library.kvbm_registry_check(manager.registry), 0, "check")
    manager.close()


def test_eviction_is_told():
    manager = Manager()
    library, pool = manager.library, manager.pool
    old, new = hashes(library, range(16)), hashes(library, range(50, 58))
    held = fill(library, pool, 4, Chain(ctypes.sizeof(Chain), 0, ctypes.addressof(old), None, 0, None))
    equal(library.kvbm_pool_release(pool, held, 4), 0, "release")
    held = fill(library, pool, 2, Chain(ctypes.sizeof(Chain), 0, ctypes.addressof(new), None, 0, None))
    events = manager.drain()
    equal(events[4:], [(REMOVED, False, True, old[3], None, 3, []), (REMOVED, False, True, old[2], None, 2, []),
                       (STORED, True, False, new[0], None, 0, []), (STORED, True, False, new[1], new[0], 1, [])], "events")
    left = (Handle * 4)()
    equal(library.kvbm_pool_match(pool, 0, old, 4, 0, left), 2, "what is left of the old")
    equal(library.kvbm_pool_release(pool, left, 2), 0, "release")
    equal(library.kvbm_pool_release(pool, held, 2), 0, "release")
    manager.close()


if __name__ == "__main__":
    preload_sanitizer("libkvbm.so")
    run(globals())
