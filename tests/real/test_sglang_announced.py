# SPDX-License-Identifier: Apache-2.0
"""What kvasir.sglang.HiCache's store holds, in kv-indexer's answers: SGLang 0.5.23's own trees, hashes, events and publisher.

Pages of cached prompts are stored, and the store loses some; the tree evicts them from device and host meanwhile. Each answer's `disk`
is compared with the prefix whose pages are on the device, in host memory or in the store, and the view stays whole.
"""
import importlib
import os
import sys
import tempfile
from types import SimpleNamespace
from unittest import mock

from sglang_engine import *

sys.path.insert(0, str(BUILD / "python"))
os.environ["KVASIR_LIBRARY_PATH"] = str(BUILD / "lib")

from sglang.srt.mem_cache.hicache_storage import HiCacheStorageConfig  # noqa: E402
from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool  # noqa: E402
from sglang.srt.mem_cache.pool_host.mha import MHATokenToKVPoolHost  # noqa: E402
from sglang.srt.mem_cache.storage.backend_factory import StorageBackendFactory  # noqa: E402
from sglang.srt.mem_cache.utils import get_storage_hash_str  # noqa: E402

PAGE, STEPS, LOOKUPS = 16, 40, 10
SALTED = (Names(), Names(), Names(salt="tenant"), Names(lora="adapter"))


def host_pool():
    device = MHATokenToKVPool(PAGE, PAGE, torch.float16, 2, 16, 2, "cpu", False, enable_alt_stream=False)
    return MHATokenToKVPoolHost(device._mha_buffer_info(), 1.0, 0, PAGE, "page_first", pin_memory=False, device_capacity_tokens=PAGE,
                                start_layer=0, end_layer=2, host_token_capacity=256 * PAGE)


def attach(self, folder, pool, tp_size=1):
    """Make the backend as SGLang does: below a method of the tree. @self: the tree."""
    check(self.take_events, "a tree")
    config = HiCacheStorageConfig(
        tp_rank=0, tp_size=tp_size, pp_rank=0, pp_size=1, attn_cp_rank=0, attn_cp_size=1, is_mla_model=False, enable_storage_metrics=False,
        is_page_first_layout=True, model_name="org/model",
        extra_config={"backend_name": "kvasir", "module_path": "kvasir.sglang", "class_name": "HiCache", "interface_v1": 1, "uri": folder})
    backend = StorageBackendFactory.create_backend("dynamic", config, pool)
    backend.register_mem_pool_host(pool)
    backend.on_host_pools_registered()
    return backend


class Held:
    """An engine with a backend, and the truth: the pages that its store has."""

    def __init__(self, option, rng, folder):
        self.engine, self.rng, self.pool, self.stored = Engine(option, rng), rng, host_pool(), set()
        self.backend = attach(self.engine.tree, folder, self.pool)

    def hashes(self, tokens, names):
        pages = len(tokens) // PAGE
        return get_storage_hash_str(self.engine.key(tokens[:pages * PAGE], names), None, page_size=PAGE) if pages else []

    def rows(self, n):
        return torch.arange(n * PAGE)

    def store(self):
        """Store what the tree has of a prompt, as SGLang backs up host pages."""
        tokens, names = self.rng.choice(self.engine.talks)
        hashes = self.hashes(tokens, names)[:self.engine.tiers_tokens(tokens, names)["cpu"] // PAGE]
        if hashes:
            equal(self.backend.batch_set_v1(hashes, self.rows(len(hashes))), [True] * len(hashes), "stored")
            if names == Names():  # pages of others have other names in events than in the store
                self.stored.update(hashes)

    def lose(self):
        """Let the store evict some pages, of which SGLang asks for a few."""
        keys, pool = sorted(self.backend._store.keys()), self.backend._pools["kv"]  # in an order that is the same in each run
        lost = [key for key in keys if len(key) > 64 and self.rng.random() < 0.1]
        for key in lost:
            self.backend._store.discard(key)
        for key in lost:
            text = key.decode()[len(pool.prefix):]
            self.backend.exists(text)
            self.stored.discard(text)

    def load(self):
        """Read what a prompt has in the store, which a damaged page ends."""
        tokens, names = self.rng.choice(self.engine.talks)
        hashes = self.hashes(tokens, names)
        found = self.backend.batch_exists(hashes)
        self.backend.batch_get_v1(hashes[:found], self.rows(found))

    def truth(self, tokens, names):
        tiers = self.engine.tiers_tokens(tokens, names)
        pages = tiers["cpu"] // PAGE
        for text in self.hashes(tokens, names)[pages:]:
            if text not in self.stored or names != Names():
                break
            pages += 1
        return {**tiers, "disk": pages * PAGE}


def announced(option):
    def test():
        tally, beyond = Tally("SGLang 0.5.23, pages in a store"), 0
        with Indexer() as indexer:
            for seed, rng in histories(3):
                port, replay = free_port(), free_port()
                feed = Feed(indexer, 100 + seed, make_publisher(port, replay), make_batch, f"tcp://127.0.0.1:{port}", PAGE,
                            f"tcp://127.0.0.1:{replay}")
                with tempfile.TemporaryDirectory() as folder:
                    held = Held(option, rng, folder)
                    for step in range(STEPS):
                        for _ in range(rng.randint(1, 6)):
                            held.engine.step()
                        feed.publish(held.engine.take_events())
                        for act in rng.sample((held.store, held.store, held.lose, held.load), 3) if held.engine.talks else ():
                            act()
                        feed.publish(held.engine.take_events())
                        feed.settle()
                        check(not feed.listener()["partial"], f"KV_TEST_SEED={seed}, step {step}: partial")
                        for _ in range(LOOKUPS if held.engine.talks else 0):
                            tokens, names = rng.choice(held.engine.talks)
                            answer = indexer.query(tokens, **question(names, tokens))["instances"].get(str(feed.instance), {})
                            truth = held.truth(tokens, names)
                            beyond += truth["disk"] > truth["cpu"]
                            for tier, right in truth.items():
                                tally.add(f"{option.name} {tier}", right, answer.get(tier, 0),
                                          f"KV_TEST_SEED={seed}, step {step}, {len(tokens)} tokens, {names}, {held.engine.story[-8:]}")
                    held.backend.close()
                    feed.publish(held.engine.take_events())
                    feed.settle()
                    check("take_events" not in held.engine.tree.__dict__, "still wrapped after close")
                    for tokens, names in held.engine.talks:
                        answer = indexer.query(tokens, **question(names, tokens))["instances"].get(str(feed.instance), {})
                        equal(answer.get("disk", 0), held.truth(tokens, names)["cpu"], "the store is detached")
                feed.close()
        for row in list(tally.rows):
            tally.exact(row)
        check(beyond > 10, f"only {beyond} prompts had more in the store than elsewhere")
    return test


def test_several_ranks_announce_nothing():
    """Each rank has a part of a page and doesn't know whether the others still have theirs."""
    for _, rng in histories(1):
        with tempfile.TemporaryDirectory() as folder:
            engine, pool = Engine(Option("ranks", tree="python", host_rows=256), rng), host_pool()
            backend = attach(engine.tree, folder, pool, tp_size=2)
            tokens = [rng.randrange(1, 1000) for _ in range(4 * PAGE)]
            engine.insert(tokens, Names())
            hashes = get_storage_hash_str(engine.key(tokens, Names()), None, page_size=PAGE)
            equal(backend.batch_set_v1(hashes, torch.arange(4 * PAGE)), [True] * 4, "stored")
            equal(backend.batch_get_v1(hashes, torch.arange(4 * PAGE)), [True] * 4, "read")
            equal([event for event in engine.take_events() if getattr(event, "ownership", None)], [], "announced by one rank's word")
            backend.close()


def test_weights_change_before_a_reset():
    """SGLang's own host pool tells of a reset: pages of the weights before are not stored in between."""
    with tempfile.TemporaryDirectory() as folder:
        context = importlib.import_module("sglang.srt.runtime_context")
        versions = ["1"]
        with mock.patch.object(context, "get_serving", lambda: SimpleNamespace(weight_version=versions[-1])):
            for _, rng in histories(1):
                engine, pool = Engine(Option("weights", tree="python", host_rows=256), rng), host_pool()
                backend, hashes, rows = attach(engine.tree, folder, pool), [f"{n:064x}" for n in range(4)], torch.arange(4 * PAGE)
                equal(backend.batch_set_v1(hashes, rows), [True] * 4, "before")
                versions.append("2")
                equal((backend.batch_set_v1(hashes, rows), backend.batch_exists(hashes)), ([False] * 4, 0), "between")
                pool.clear()
                equal((backend.batch_set_v1(hashes, rows), backend.batch_exists(hashes)), ([True] * 4, 4), "behind the reset")
                backend.close()
                check("clear" not in pool.__dict__, "the pool is as before")


OPTIONS = [Option(f"{tree}{'_salted' if names != (Names(),) else ''}", tree=tree, rows=320, host_rows=480, names=names,
                  resets=names == (Names(),)) for tree in ("python", "rust") for names in ((Names(),), SALTED)]

if __name__ == "__main__":
    run_all({option.name: announced(option) for option in OPTIONS}, globals())
