# SPDX-License-Identifier: Apache-2.0
"""Batches made by another msgpack, decoded by our reader, against a model written from the rules.

Random streams of events in every encoding; the model keeps whole prompts (tokens, salt, adapter) and
works out block hashes with libxxhash itself.
"""
import ctypes
import os
import random
import struct
import subprocess

from kvtest import BUILD, check, equal, msgpack, run, skip

SEED = int(os.environ.get("KV_TEST_SEED") or random.randrange(2**32))
MASK = 2**64 - 1
BLOCK = 4
MEDIA = {0: ["GPU", "gpu", None, "DEVICE"], 1: ["CPU", "cpu_pinned", "CPU_TIER1"], 2: ["DISK", "STORAGE", "Nvme"],
         3: ["EXTERNAL", "shared"]}
KINDS = ["sliding_window", "chunked_local_attention", "cross_attention"]  # a window without its length is none
VLLM_TIERS = ("CPU", "STORAGE")  # vLLM's clear leaves these, and its events there have no extra keys


def xxh3(data, seed):
    try:
        function = ctypes.CDLL("libxxhash.so.0").XXH3_64bits_withSeed
    except OSError:
        skip("libxxhash is needed")
    function.restype = ctypes.c_uint64
    function.argtypes = [ctypes.c_char_p, ctypes.c_size_t, ctypes.c_uint64]
    return function(data, len(data), seed)


def local_hash(tokens, lora, salt, mm=()):
    seed = 1337 + (xxh3(lora.encode(), 0) if lora else 0) + (xxh3(salt.encode(), 1) if salt else 0)
    data = struct.pack(f"<{len(tokens)}I", *tokens) + struct.pack(f"<{len(mm)}Q", *sorted(mm))
    return xxh3(data, seed & MASK)


class Stream:
    """One publisher: makes events, and says what each must become."""

    def __init__(self, rng):
        self.rng = rng
        self.salts = {}   # (rank, hash) -> [salt, copies by tier]
        self.stored = {}  # (rank, hash) -> lora, for choosing parents
        self.attends = set()  # ranks with full attention on the device
        self.lower = set()  # ranks with salted blocks outside the device
        self.cleared_tiers = set()  # lower tiers under other names than vLLM's: a clear empties them, too
        self.saw_salt = self.saw_adapter = self.saw_objects = False

    def put_salt(self, rank, block, salt, tier):
        if not any(r == rank for r, _ in self.salts):
            self.lower.discard(rank)
        if tier:
            self.lower.add(rank)
        copies = self.salts.setdefault((rank, block), [salt, {}])[1]
        copies[tier] = copies.get(tier, 0) + 1

    def take_salt(self, rank, block, tier):
        """True when the last copy of a salted block is gone."""
        if (rank, block) not in self.salts:
            return False
        copies = self.salts[rank, block][1]
        copies[tier] = max(0, copies.get(tier, 0) - 1)
        if any(copies.values()):
            return False
        del self.salts[rank, block]
        return True

    def note_medium(self, medium, tier):
        if tier and medium not in VLLM_TIERS:
            self.cleared_tiers.add(tier)

    def hash_form(self, value):
        """A hash as an unsigned or signed number or as the end of a digest."""
        kind = self.rng.randrange(4)
        if kind == 0 and value >> 63:
            return value - 2**64
        if kind == 1:
            return self.rng.randbytes(self.rng.choice([0, 8, 24])) + value.to_bytes(8, "big")
        return value

    def token_form(self, tokens):
        return [str(t) for t in tokens] if self.rng.random() < 0.05 else tokens

    def extras(self, n, lora):
        """extra_keys of n blocks and the identities in each."""
        keys, mms = [], []
        for _ in range(n):
            entry, mm = [], []
            if lora:
                entry.append(lora)
            for _ in range(self.rng.choice([0, 0, 1, 3])):
                name = self.rng.randbytes(32).hex() if self.rng.random() < 0.5 else f"image-{self.rng.randrange(9)}"
                identity = int(name[:16], 16) if len(name) == 64 else xxh3(name.encode(), 0)
                if self.rng.random() < 0.2:
                    entry.append([name])
                else:
                    place = self.rng.randrange(-300, 100)
                    identity = xxh3(struct.pack("<Qq", identity, place), 1337)
                    entry.append([name, place])
                mm.append(identity)
            keys.append(entry or None)
            mms.append(mm)
        return keys, mms

    def store(self, rank):
        rng = self.rng
        n = rng.choice([1, 1, 2, 5, 40])
        hashes = [rng.getrandbits(64) for _ in range(n)]
        tokens = [rng.choice([rng.randrange(128), rng.randrange(60000), rng.getrandbits(32)]) for _ in range(n * BLOCK)]
        lora = rng.choice([None, None, "adapter-a", "b"])
        tier = rng.choice([0, 0, 0, 1, 2, 3])
        mine = [h for r, h in self.stored if r == rank]
        parent = rng.choice(mine) if mine and rng.random() < 0.7 else None
        told = rng.choice([None, None, "tenant-a", "tenant-b"]) if parent is None else None
        salt = told or (self.salts[rank, parent][0] if (rank, parent) in self.salts else None)
        keys, mms = self.extras(n, lora) if rng.random() < 0.3 else (None, [[]] * n)
        medium = rng.choice(MEDIA[tier])
        forms = [self.hash_form(h) for h in hashes]
        parent_form = None if parent is None else self.hash_form(parent)
        salt_in_keys = told and rng.random() < 0.5
        if salt_in_keys:
            keys = keys or [None] * n
            keys[0] = (keys[0] or []) + [rng.choice([told, "dynamo-cache-salt:" + told])]
        if rng.random() < 0.6:
            event = {"type": "BlockStored", "block_hashes": forms, "parent_block_hash": parent_form,
                     "token_ids": self.token_form(tokens), "block_size": BLOCK, "lora_id": None, "medium": medium, "lora_name": lora}
            if keys is not None or rng.random() < 0.5:
                event["extra_keys"] = keys
            if told and not salt_in_keys:
                event["cache_salt"] = told
            if rng.random() < 0.5:
                event["group_idx"] = 0
                event["kv_cache_spec_kind"] = rng.choice(["full_attention", "mla_attention"])
            if rng.random() < 0.3:
                event = dict(rng.sample(sorted(event.items()), len(event)))
            if rng.random() < 0.1:
                event.update({f"unknown_{i}": [i, {"x": [None]}] for i in range(10)})
        else:
            slot7 = {"cache_salt": told, "session_id": None} if told and not salt_in_keys and not lora else lora
            if told and not salt_in_keys and lora:
                keys = keys or [None] * n
                keys[0] = (keys[0] or []) + [told]
            event = ["BlockStored", forms, parent_form, self.token_form(tokens), BLOCK, None, medium, slot7, keys]
            event += rng.choice([[], [0], [None], [0, "full_attention", None], [0, "full_attention", None, "LOCAL", "gpu"]])
            if not keys and not slot7 and len(event) == 9:
                event = event[:rng.choice([7, 8, 9])]
        owner = isinstance(event, list) and len(event) == 14  # on the device it isn't one
        if not (owner and tier):
            self.note_medium(medium, tier)
        for h in hashes:
            self.stored[rank, h] = lora
        if tier == 0:
            self.attends.add(rank)
        if medium in VLLM_TIERS and keys is None and not told and (
                self.saw_salt or self.saw_objects or (self.saw_adapter and not lora)):
            return event, f"known {tier} {rank} " + " ".join(map(str, hashes))
        self.saw_salt |= bool(salt)
        self.saw_objects |= any(mms)
        self.saw_adapter |= bool(lora)
        for h in hashes:
            if salt:
                self.put_salt(rank, h, salt, tier)
        blocks = [f"{h}:{local_hash(tokens[i * BLOCK:(i + 1) * BLOCK], lora, salt, mms[i])}" for i, h in enumerate(hashes)]
        return event, " ".join([f"store {tier} {rank}"] + ([] if parent is None else [f"parent={parent}"]) + blocks)

    def some_stored(self, rank):
        mine = [h for r, h in self.stored if r == rank] or [1]
        return self.rng.sample(mine, min(len(mine), self.rng.choice([1, 1, 3])))

    def offload(self, rank):
        hashes, tier = self.some_stored(rank), self.rng.choice([1, 2, 3])
        for h in hashes:
            if (rank, h) in self.salts:
                self.put_salt(rank, h, self.salts[rank, h][0], tier)
        forms = [self.hash_form(h) for h in hashes]
        medium = self.rng.choice(MEDIA[tier])
        self.note_medium(medium, tier)
        event = self.rng.choice([["BlockStored", forms, None, [], 0, None, medium],
                                 {"type": "BlockStored", "block_hashes": forms, "token_ids": None, "block_size": None,
                                  "medium": medium, "event_type": "stored", "seq_hashes": [1]}])
        return event, f"known {tier} {rank} " + " ".join(map(str, hashes))

    def remove(self, rank):
        hashes, tier = self.some_stored(rank), self.rng.choice([0, 0, 1])
        for h in hashes:
            if self.take_salt(rank, h, tier):
                self.stored.pop((rank, h), None)  # a parent that is gone is no parent
        forms = [self.hash_form(h) for h in hashes]
        medium = self.rng.choice(MEDIA[tier])
        self.note_medium(medium, tier)
        event = self.rng.choice([["BlockRemoved", forms, medium], ["BlockRemoved", forms, medium, 0],
                                 {"block_hashes": forms, "type": "BlockRemoved", "medium": medium}])
        return event, f"remove {tier} {rank} " + " ".join(map(str, hashes))

    def clear(self, rank):
        forgotten = [self.stored]
        if rank not in self.lower or self.cleared_tiers == {1, 2, 3}:
            forgotten.append(self.salts)
        for table in forgotten:
            for key in [k for k in table if k[0] == rank]:
                del table[key]
        return self.rng.choice([["AllBlocksCleared"], {"type": "AllBlocksCleared"}]), f"clear 0 {rank}"

    def state(self, rank):
        """A block of a recurrent layer's cache: named by its hash alone, whatever its tokens."""
        if rank not in self.attends:  # a model of states alone has its blocks placed
            return self.store(rank)
        block = self.rng.getrandbits(64)
        return {"type": "BlockStored", "block_hashes": [block], "token_ids": [1, 2, 3, 4, 5], "block_size": BLOCK,
                "kv_cache_spec_kind": "mamba", "group_idx": 3}, f"known 0 {rank} {block}"

    def bad(self, rank):
        del rank
        good = {"type": "BlockStored", "block_hashes": [1], "token_ids": [1, 2, 3, 4], "block_size": BLOCK}
        return self.rng.choice([
            ({**good, "kv_cache_spec_kind": self.rng.choice(KINDS), "group_idx": 1}, "group"),
            ({**good, "group_idx": 5}, "group"),
            ({**good, "medium": "TAPE"}, "medium"),
            ({**good, "locality": "REMOTE"}, "remote"),
            ({**good, "block_size": 16}, "block_size"),
            ({**good, "block_hashes": [1, 1], "token_ids": [0] * 8}, "duplicate_hash"),
            ({**good, "token_ids": [1]}, "token_count"),
            ({**good, "token_ids": [-1] * 4}, "malformed"),
            ({"type": "BlockPainted"}, "unknown_type"),
            ([["nested"]], "malformed"),
        ])

    def batch(self):
        """A payload and the lines that it must become."""
        rng = self.rng
        rank = rng.choice([None, 0, 1, 200, 70000])
        effective = 9 if rank is None else rank  # 9: what the tool gives its reader
        events, lines, skipped = [], [], {}
        for _ in range(rng.choice([0, 1, 3, 20])):
            kind = rng.choices([self.store, self.offload, self.remove, self.clear, self.state, self.bad], [10, 2, 4, 0.2, 0.5, 2])[0]
            event, line = kind(effective)
            events.append(event)
            if kind == self.bad:
                skipped[line] = skipped.get(line, 0) + 1
            else:
                lines.append(line)
        ts = rng.choice([1757500000.25, 1757500000250])
        forms = [[ts, events, rank], [ts, events, rank, "more"], {"events": events, "attn_dp_rank": rank, "ts": ts}]
        if rank is None:
            forms.append([ts, events])
        return msgpack.packb(rng.choice(forms)), lines, skipped


def decode(payloads):
    data = b"".join(struct.pack("<I", len(p)) + p for p in payloads)
    done = subprocess.run([BUILD / "tests" / "test-event-wire", "decode", str(BLOCK)], input=data, capture_output=True, timeout=120, check=True)
    batches = []
    for line in done.stdout.decode().splitlines():
        if line.startswith("batch "):
            equal(line, "batch 0", "return code")
            batches.append(([], {}))
        elif line.startswith("skipped "):
            _, name, count = line.split()
            batches[-1][1][name] = int(count)
        else:
            batches[-1][0].append(line)
    return batches


def test_random_streams():
    for i in range(8):
        stream = Stream(random.Random(SEED + i))
        wanted = [stream.batch() for _ in range(60)]
        got = decode([payload for payload, _, _ in wanted])
        equal(len(got), len(wanted))
        n_salted = 0
        for b, ((_, lines, skipped), (got_lines, got_skipped)) in enumerate(zip(wanted, got)):
            for line, got_line in zip(lines, got_lines):
                equal(got_line, line, f"seed {SEED + i}, batch {b}")
            equal(len(got_lines), len(lines), f"operations, seed {SEED + i}, batch {b}")
            equal(got_skipped, skipped, f"skipped, seed {SEED + i}, batch {b}")
        n_salted = len(stream.salts)
        check(n_salted > 0, "the streams have no salts")


def test_published_hash():
    equal(local_hash([0, 1, 2, 3], None, None), 9143094415614847814)
    equal(local_hash([0, 1, 2, 3], "adapter-a", "tenant-a"), 8269515957840517240)


if __name__ == "__main__":
    run(globals())
