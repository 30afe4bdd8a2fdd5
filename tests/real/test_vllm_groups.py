# SPDX-License-Identifier: Apache-2.0
"""kvasir.vllm.Connector under vLLM 0.33's own Scheduler and KVCacheManager, with models of many shapes; the model runner is simulated.

The runner keeps for each token what follows from the tokens up to it, in the blocks that the scheduler names, all groups over
the same memory as in vLLM. Before it computes a token it looks at all that the model would read: one wrong byte fails the test.
What was computed in one life is loaded in the next.
"""
import hashlib
import json
import os
import random
import sys
import tempfile
import time

from realtest import *

sys.path.insert(0, str(BUILD / "python"))
SCRATCH = tempfile.TemporaryDirectory()
os.environ.update(KVASIR_LIBRARY_PATH=str(BUILD / "lib"), VLLM_CACHE_ROOT=SCRATCH.name, VLLM_CPU_KVCACHE_SPACE="1")
use("vllm-0.33.0")

import numpy  # noqa: E402
import torch  # noqa: E402
from vllm.config import (CacheConfig, DeviceConfig, KVTransferConfig, ModelConfig, SchedulerConfig, VllmConfig)  # noqa: E402
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole  # noqa: E402
from vllm.sampling_params import SamplingParams  # noqa: E402
from vllm.utils.hashing import sha256  # noqa: E402
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash, resolve_kv_cache_block_sizes  # noqa: E402
from vllm.v1.core.sched.scheduler import Scheduler  # noqa: E402
from vllm.v1.kv_cache_interface import (ChunkedLocalAttentionSpec, FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec,  # noqa: E402
                                        MambaSpec, RSWASpec, SlidingWindowSpec)
from vllm.v1.outputs import KVConnectorOutput, ModelRunnerOutput  # noqa: E402
from vllm.v1.request import Request  # noqa: E402
from vllm.v1.structured_output import StructuredOutputManager  # noqa: E402
from kvasir import store as stores  # noqa: E402
from kvasir._vllm_moves import keys_of  # noqa: E402
from kvasir.vllm import Connector  # noqa: E402
from test_vllm_live import MODEL_CONFIG  # noqa: E402

init_none_hash(sha256)
CELL = 16  # bytes that a layer keeps of a token, or of a state
HEADS = {"num_kv_heads": 1, "head_size": 2, "dtype": torch.float32}


def full(block):
    return FullAttentionSpec(block_size=block, **HEADS)


def window(span, block):
    return SlidingWindowSpec(block_size=block, sliding_window=span, **HEADS)


def chunk(span, block):
    return ChunkedLocalAttentionSpec(block_size=block, attention_chunk_size=span, **HEADS)


def state(block, mode="align"):
    return MambaSpec(block_size=block, shapes=((4,),), dtypes=(torch.float32,), mamba_cache_mode=mode)


SHAPES = {
    "full": [full(8)],
    "window alone": [window(20, 8)],
    "full, windows": [full(8), window(20, 8), window(9, 8)],
    "full, window of smaller blocks": [full(32), window(20, 8)],
    "full of two sizes, windows of three": [full(16), full(8), window(30, 16), window(12, 4)],
    "state alone": [state(16)],
    "full, states": [full(16), state(16), state(16)],
    "full, window, state": [full(16), window(24, 16), state(16)],
    "full, state of larger blocks": [full(8), state(32)],
    "full, chunks": [full(8), chunk(32, 8)],
}


def after(request):
    """What follows from a request's tokens up to each of them, of 16 bytes."""
    known = getattr(request, "known", None) or [hashlib.sha256(b"start").digest()]
    for token in request.all_token_ids[len(known) - 1:]:
        known.append(hashlib.sha256(known[-1] + b"%d" % token).digest())
    request.known = known
    return known


def cell(group, layer, known):
    return numpy.frombuffer(hashlib.md5(b"%d %d " % (group, layer) + known).digest(), numpy.uint8)


class Life:
    """A scheduler, its connector, and a worker that is the runner."""

    model = None  # its configuration takes vLLM seconds

    def __init__(self, folder, specs, retention):
        blocks = 60 * -(-len(specs) // 2)  # few: requests push each other out
        self.specs = specs
        groups = [KVCacheGroupSpec([f"layer{i}.{layer}" for layer in range(2)], spec) for i, spec in enumerate(specs)]
        has_states = any(isinstance(spec, MambaSpec) for spec in specs)
        cache = CacheConfig(block_size=specs[0].block_size, enable_prefix_caching=True, mamba_cache_mode="align" if has_states else "none",
                            mamba_block_size=next((spec.block_size for spec in specs if isinstance(spec, MambaSpec)), None))
        extra = {"uri": f"{folder}/store", "flush_s": 0, "timeout": 60}
        transfer = KVTransferConfig(kv_connector="Connector", kv_connector_module_path="kvasir.vllm", kv_role="kv_both",
                                    kv_load_failure_policy="recompute", kv_connector_extra_config=extra)
        config = VllmConfig(
            model_config=self.model_config(), cache_config=cache,
            scheduler_config=SchedulerConfig(max_num_seqs=4, max_num_batched_tokens=96, max_model_len=512, enable_chunked_prefill=True,
                                             is_encoder_decoder=False), device_config=DeviceConfig("cpu"), kv_transfer_config=transfer)
        cache.block_size = cache.mamba_block_size or specs[0].block_size  # vLLM ends steps at its multiples where there are states
        cache.num_gpu_blocks = blocks
        self.kv = KVCacheConfig(num_blocks=blocks, kv_cache_tensors=[], kv_cache_groups=groups, prefix_cache_retention_interval=retention)
        self.unit, hashed = resolve_kv_cache_block_sizes(self.kv, config)
        self.scheduler = Scheduler(config, self.kv, StructuredOutputManager(config), self.unit, hashed)
        self.worker = Connector(config, KVConnectorRole.WORKER, self.kv)
        self.hasher = get_request_block_hasher(hashed, sha256)
        largest = max(self.cells(spec) for spec in specs)
        memory = numpy.zeros((blocks, 2, largest, CELL), numpy.uint8)
        self.views = [memory[:, :, :self.cells(spec)] for spec in specs]
        self.worker.register_kv_caches({name: view[:, layer] for group, view in zip(groups, self.views)
                                        for layer, name in enumerate(group.layer_names)})
        self.requests, self.tables, self.begun, self.count, self.failed = {}, {}, {}, 0, 0

    @classmethod
    def model_config(cls):
        if cls.model is None:
            os.mkdir(f"{SCRATCH.name}/model")
            with open(f"{SCRATCH.name}/model/config.json", "w", encoding="ascii") as config:
                json.dump(MODEL_CONFIG, config)
            cls.model = ModelConfig(model=f"{SCRATCH.name}/model", skip_tokenizer_init=True, dtype="float32")
        return cls.model

    @staticmethod
    def cells(spec):
        return 1 if isinstance(spec, MambaSpec) else spec.block_size

    def add(self, tokens, n=4):
        self.count += 1
        request = Request(request_id=f"r{self.count}", prompt_token_ids=list(tokens), pooling_params=None, block_hasher=self.hasher,
                          sampling_params=SamplingParams(max_tokens=n, ignore_eos=True))
        self.requests[request.request_id] = request
        self.scheduler.add_request(request)
        return request

    def read(self, request, computed):
        """Look at all that the model reads for the token behind @computed ones."""
        known, table = after(request), self.tables[request.request_id]
        for index, (spec, view) in enumerate(zip(self.specs, self.views)):
            if isinstance(spec, MambaSpec):
                tokens = [computed - 1] if computed else []
            else:
                first = {SlidingWindowSpec: lambda spec: computed - spec.sliding_window + 1,
                         ChunkedLocalAttentionSpec: lambda spec: computed // spec.attention_chunk_size * spec.attention_chunk_size}
                tokens = range(max(0, first.get(type(spec), lambda spec: 0)(spec)), computed)
            for token in tokens:
                at = 0 if isinstance(spec, MambaSpec) else token % spec.block_size
                for layer in range(2):
                    found = view[table[index][token // spec.block_size], layer, at]
                    if not (found == cell(index, layer, known[token + 1])).all():
                        raise AssertionError(f"{request.request_id}: group {index} ({type(spec).__name__}) has other bytes of token {token}, with "
                                             f"{computed} computed")

    def write(self, request, computed, n):
        known, table = after(request), self.tables[request.request_id]
        for index, (spec, view) in enumerate(zip(self.specs, self.views)):
            has_state = isinstance(spec, MambaSpec)
            for token in [computed + n - 1] if has_state else range(computed, computed + n):
                for layer in range(2):
                    at = 0 if has_state else token % spec.block_size
                    view[table[index][token // spec.block_size], layer, at] = cell(index, layer, known[token + 1])

    def update(self, output):
        for new in output.scheduled_new_reqs:
            self.tables[new.req_id] = [list(ids) for ids in new.block_ids]
            self.begun.setdefault(new.req_id, new.num_computed_tokens)
        cached = output.scheduled_cached_reqs
        for name, added in zip(cached.req_ids, cached.new_block_ids):
            if name in cached.resumed_req_ids:
                self.tables[name] = [list(ids) for ids in added]
            elif added is not None:
                for table, ids in zip(self.tables[name], added):
                    table += ids

    def step(self):
        output = self.scheduler.schedule()
        plan, worker = output.kv_connector_metadata, self.worker
        worker.handle_preemptions(plan)
        for view in self.views:
            view[output.new_block_ids_to_zero or []] = 0
        for copy in output.kv_cache_block_copies or ():
            self.views[0].base[copy.dst_block_id] = self.views[0].base[copy.src_block_id]
        self.update(output)
        starts = {new.req_id: new.num_computed_tokens for new in output.scheduled_new_reqs}
        starts.update(zip(output.scheduled_cached_reqs.req_ids, output.scheduled_cached_reqs.num_computed_tokens))
        sampled = []
        for name, n in output.num_scheduled_tokens.items():
            request = self.requests[name]
            self.read(request, starts[name])
            self.write(request, starts[name], n)
            whole = starts[name] + n == request.num_tokens
            sampled.append([after(request)[-1][0] + 256 * after(request)[-1][1] % 768] if whole else [])
        worker.bind_connector_metadata(plan)
        worker.start_load_kv(None)
        worker.wait_for_save()
        results = worker.get_transfer_results(output.finished_req_ids)
        transferred = KVConnectorOutput(finished_recving=results.finished_recving, failed_recving=results.failed_recving,
                                        invalid_block_ids=worker.get_block_ids_with_load_errors())
        self.failed += len(transferred.failed_recving) + bool(transferred.invalid_block_ids)
        names = list(output.num_scheduled_tokens)
        self.scheduler.update_from_output(output, ModelRunnerOutput(
            req_ids=names, req_id_to_index={name: i for i, name in enumerate(names)}, sampled_token_ids=sampled,
            kv_connector_output=transferred))

    def run(self, requests, between=lambda: None):
        """Step until all requests have ended. Returns how many of each one's tokens were there when it was computed first."""
        limit = time.monotonic() + 120
        while any(not request.is_finished() for request in requests):
            check(time.monotonic() < limit, f"requests that never end: {[request.status for request in requests]}")
            self.step()
            between()
        return [self.begun[request.request_id] for request in requests]

    def settle(self):
        wait_until(lambda: not self.worker.worker.jobs, 60, "the end of stores", interval=0.001)
        self.worker.worker.flusher.note_put()

    def close(self):
        self.scheduler.shutdown()
        self.worker.shutdown()


def prompts(rng, n=14):
    """Prompts that share beginnings, of all lengths; some are repeated at once."""
    base, found = [rng.randrange(3, 1000) for _ in range(300)], []
    for _ in range(n):
        tokens = base[:rng.choice((0, 32, 64, 71, 128))] + [rng.randrange(3, 1000) for _ in range(rng.randrange(1, 130))]
        found.append(tokens)
        if rng.random() < 0.3:
            found.append(tokens[:rng.randrange(1, len(tokens) + 1)])
    return found


def lose_some(folder, rng, keys=None):
    """Delete a fifth of the store's blocks, or of those of @keys, at least one. Returns of how many."""
    with stores.open(f"{folder}/store") as opened:
        keys = sorted(keys or opened.keys())
        for key in rng.sample(keys, max(1, len(keys) // 5)):
            opened.discard(key)
        return len(keys)


def lives(specs, retention):
    rng, total = random.Random(hashlib.md5(repr((specs, retention)).encode()).digest()), 0
    with tempfile.TemporaryDirectory() as folder:
        asked = prompts(rng)
        life = Life(folder, specs, retention)
        for begin in range(0, len(asked), 3):  # three run at once, and push each other out
            life.run([life.add(tokens) for tokens in asked[begin:begin + 3]])
        life.settle()
        life.close()
        life = Life(folder, specs, retention)
        # Where states have larger blocks than others, vLLM keeps the state inside of a block where a prompt ends; the connector doesn't.
        exact = not life.worker.worker.kinds.has_states or len({spec.block_size for spec in specs}) == 1
        for tokens in asked:
            cached, = life.run([life.add(tokens)])
            total += cached
            most = (len(tokens) - 1) // life.unit * life.unit
            if exact:
                equal(cached, most, f"cached tokens of {len(tokens)}")
            check(cached < len(tokens), f"{cached} of {len(tokens)} tokens cached")
        life.close()
        check(total, "nothing is loaded")
        print(f"  {total} of {sum(len(tokens) for tokens in asked)} tokens cached after a restart", flush=True)
        n = lose_some(folder, rng)
        life = Life(folder, specs, retention)
        again = sum(cached for tokens in asked for cached in life.run([life.add(tokens)]))
        check(again <= total, "hits")
        life.settle()
        life.close()
        life = Life(folder, specs, retention)  # what is gone between the answer and the load
        found, losses = life.scheduler.connector.scheduler, []
        load = found.allocated

        def lose(request, blocks, n_tokens):
            n = len(found.loads)
            load(request, blocks, n_tokens)
            for move in found.loads[n:]:
                losses.append(not losses or rng.random() < 0.5)
                if losses[-1]:
                    lose_some(folder, rng, keys_of(move.root, 0, move.groups, move.hashes))

        found.allocated = lose
        life.run([life.add(tokens) for tokens in asked])
        failed = life.failed
        life.close()
        print(f"  {again} with a fifth of {n} blocks gone; then {failed} of {len(losses)} loads failed", flush=True)
        check(failed, f"{sum(losses)} loads have lost blocks, and none failed")


def test_refusals():
    for specs, words in (([full(8), state(8, "none")], "align"), ([full(8), RSWASpec(block_size=8, rswa_window=8, **HEADS)], "RSWASpec")):
        with tempfile.TemporaryDirectory() as folder:
            try:
                Life(folder, specs, None)
            except ValueError as problem:
                check(words in str(problem) and "cache group 1" in str(problem), f"{problem}")
            else:
                raise AssertionError(f"{specs} aren't refused")


if __name__ == "__main__":
    with SCRATCH:  # @retention: None keeps all blocks in vLLM's cache, 0 (vllm serve) those at a prompt's end
        run_all({f"{name}, retention {retention}": lambda specs=specs, retention=retention: lives(specs, retention)
                 for name, specs in SHAPES.items() for retention in (None, 0)}, globals(), "test_")
