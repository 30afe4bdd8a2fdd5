# SPDX-License-Identifier: Apache-2.0
"""Connector of vLLM (0.32, 0.33) over any store, for engines whose KV cache lies in host memory: vLLM on CPUs.

Full blocks of all cache groups go to the store when a step has computed them; a prompt's come back before it is scheduled. Blocks move between
the engine's tensors and the store in place, on threads of the library, and verify on the way. See docs/python.md.
"""
import hashlib
import importlib
import logging
import os
import platform
import select
import sys
import time
from typing import Any, Dict, Iterable, List, NamedTuple, Optional, Sequence, Set, Tuple

from . import _identity
from . import store as _store
from ._connector import Warner
from ._native import Error
from ._vllm_groups import STATE, Groups, groups_of
from ._vllm_moves import ASK_WAIT_S, Figures, Move, Plan, close, keys_of
from ._vllm_worker import Worker
from .queue import Queue, Result

__all__ = ["Connector"]

logger = logging.getLogger("kvasir.vllm")
_v1: Any = importlib.import_module("vllm.distributed.kv_transfer.kv_connector.v1.base")
_Parent: Any = _v1.KVConnectorBase_V1
MOST_CHECKS = 16  # questions under way for blocks that were stored
MEMBERS = ("hidden_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads", "head_dim", "vocab_size")


def _processor() -> List[str]:
    """Name what vLLM's attention arranges blocks for: with AMX it keeps keys in another order."""
    cpu: Any = getattr(sys.modules.get("torch"), "cpu", None)
    known = [getattr(cpu, name, None) for name in ("_is_amx_tile_supported", "_is_avx512_supported")]
    return [platform.machine(), *(str(ask()) if ask else "" for ask in known)]


class _Names:
    """Roots of the keys of blocks: all that decides a block's bytes beside its hash and its rank. The scheduler makes them."""

    def __init__(self, config: Any, groups: Groups, extra: str, store: _store.Store, warn: Warner) -> None:
        model, cache, parallel = config.model_config, config.cache_config, config.parallel_config
        text = getattr(model, "hf_text_config", None)
        weights = _identity.weights_of(model.model, extra, revision=getattr(model, "revision", None), dtype=model.dtype,
                                       quantization=model.quantization, overrides=getattr(model, "hf_overrides", None),
                                       format=getattr(getattr(config, "load_config", None), "load_format", None))
        form = {"vllm": getattr(importlib.import_module("vllm"), "__version__", ""), "weights": weights,
                "cache_dtype": str(cache.cache_dtype), "groups": groups.layout, "hash": str(cache.prefix_caching_hash_algo),
                "processor": _processor(),
                "ranks": [parallel.tensor_parallel_size, parallel.pipeline_parallel_size],
                "sizes": [str(getattr(text, name, None)) for name in MEMBERS]}
        self.world, self._identity, self._warn = parallel.world_size, _identity.digest_of(form), warn
        self._adapters: Dict[Tuple[Any, ...], Any] = {}  # what an adapter's files were when it was first asked for
        self.epoch = _identity.Epoch(store, self._identity, warn)

    def root(self, request: Any) -> Optional[bytes]:
        """Return the root of a request's keys; None: what its adapter's weights are isn't known, so it has no blocks in a store."""
        adapter, state = getattr(request, "lora_request", None), None
        if adapter is not None:
            state = _identity.state_of(adapter.lora_path, file="adapter_config.json")
            ident = (adapter.lora_int_id, adapter.lora_name, adapter.lora_path)
            if state is None or self._adapters.setdefault(ident, state) != state:
                self._warn("an adapter", ValueError(f"the files of {adapter.lora_name} changed since it was loaded, or aren't known; "
                                                    "load it anew under another id"))
                return None
            state = [adapter.lora_name, state]
        return _identity.digest_of([self._identity.hex(), self.epoch.value.hex(), state])

    def of_all_ranks(self, root: bytes, hashes: Sequence[Sequence[bytes]]) -> List[bytes]:
        """Return the keys of all ranks' blocks, one rank after the other. @hashes: of each group."""
        groups, flat = [group for group, each in enumerate(hashes) for _ in each], [digest for each in hashes for digest in each]
        return [key for rank in range(self.world) for key in keys_of(root, rank, groups, flat)]


# -- scheduler's half ----------------------------------------------------------------------------------------------------

class _Question(NamedTuple):
    """What the store was asked for a request: its blocks in tokens [@first, @last); @id of the queue until @there is known.

    @there: for each group, which of its blocks are there. @hit: the longest one, beyond the tokens @computed of vLLM's last question,
    or of the store's answer before it.
    """
    first: int
    last: int
    id: int
    since: float
    there: Optional[List[List[bool]]]
    root: bytes
    computed: int = -1
    hit: int = 0


class _Scheduler:
    """Finds what the store has, and plans each step's work. One thread."""

    def __init__(self, config: Any, groups: Groups, n_blocks: int, extra: Dict[str, Any], warn: Warner) -> None:
        self.groups, self.n_blocks, self.timeout, self.warn = groups, n_blocks, float(extra.get("timeout", 2.0)), warn
        self.store = _store.open(extra["uri"])
        self.names = _Names(config, groups, str(extra.get("fingerprint", "")), self.store, warn)
        self.queue = Queue(self.store, threads=1)
        self.poll = select.poll()
        self.poll.register(self.queue.fileno(), select.POLLIN)
        self.requests: Dict[str, Any] = {}
        self.questions: Dict[str, _Question] = {}
        self.asked: Dict[int, str] = {}  # questions without an answer
        self.next: Dict[str, int] = {}  # tokens of a request whose blocks were stored
        self.roots: Dict[str, Optional[bytes]] = {}  # of requests that run; None: their blocks aren't stored
        self.resets = 0
        self.tries: Dict[str, int] = {}  # how often a request had been preempted when it was loaded last
        self.loads: List[Move] = []
        self.loading: Dict[str, int] = {}  # blocks that requests may need which load, or have loaded and wait
        self.silent_until = 0.0
        self.figures = Figures()
        events = getattr(config, "kv_events_config", None)
        self.news: Any = None  # what the store holds, for vLLM's KV events
        if getattr(events, "enable_kv_cache_events", False) and groups.announced >= 0:
            delay = float(extra.get("flush_s", 1.0)) + 0.5
            self.news = importlib.import_module("kvasir._vllm_events").News(groups.unit, delay, groups.announced)
        self.checked: Dict[int, Any] = {}  # questions for blocks that were stored
        self.blocks_of: Any = None  # numbers of a request's blocks

    def _last(self, request: Any) -> int:
        """Return the number of tokens that may be loaded: vLLM always computes one token of a prompt."""
        last: int = min(request.num_tokens - 1, self.groups.tokens(request))
        return last // self.groups.unit * self.groups.unit

    def matched(self, request: Any, computed: int) -> Optional[int]:
        """Return how many tokens behind @computed can be loaded; None: not known yet."""
        name, last, unit = request.request_id, self._last(request), self.groups.unit
        question, root = self.questions.get(name), self.names.root(request)
        self.roots.pop(name, None)  # it begins anew
        if question is None or question.first > computed or question.root != root:
            # What couldn't be read is computed: a second load might have to wait for blocks of requests that vLLM lets wait behind it.
            failed = self.tries.get(name) == getattr(request, "num_preemptions", 0)
            if root is None or last <= computed or failed or time.monotonic() < self.silent_until:
                return 0
            question = self._ask(request, computed // unit * unit, last, root)
        if question.there is None:
            self._take(name)
            question = self.questions[name]
        if question.there is None and time.monotonic() - question.since > self.timeout:
            self.silent_until = time.monotonic() + 10
            self.figures.add(silent=(question.last - question.first) // unit)
            self.warn("asking for blocks", TimeoutError(f"no answer within {self.timeout} s"))
            question = self.questions[name] = question._replace(there=self.groups.none(), id=0)
        if question.there is None:
            return None
        if self.news is not None and question.id:  # an answer of the store, and not told yet
            whole = self.groups.whole(question.there, question.first, question.last)
            self.news.asked(request, question.root, question.first // unit, (whole - question.first) // unit, question.last // unit)
        if question.computed != computed or question.hit > last:
            question = question._replace(computed=computed, hit=self._longest(question, computed, last))
        self.questions[name] = question._replace(id=0)
        return question.hit - computed if question.hit == computed or self._may_load(request) else None

    def _may_load(self, request: Any) -> bool:
        """Tell whether a request may load beside those that do.

        A request whose load fails is computed from its first token on, and vLLM lets all others that have loaded wait until it has its
        blocks: there must be enough beside theirs.
        """
        return not self.loading or sum(self.loading.values()) + self.groups.most_blocks(request.num_tokens) <= self.n_blocks

    def _longest(self, question: _Question, computed: int, last: int) -> int:
        """Return the longest hit of a request up to @last; @computed where the store has nothing that goes on from there."""
        if question.there is None or not any(question.there) or computed % self.groups.unit:
            return computed
        return self.groups.longest(question.there, question.first, computed, min(last, question.last))

    def _ask(self, request: Any, first: int, last: int, root: bytes) -> _Question:
        question, name = _Question(first, last, 0, time.monotonic(), self.groups.none(), root), request.request_id
        hashes = [self.groups.hashes(request, group, blocks) for group, blocks in enumerate(self.groups.blocks(first, last))]
        try:
            ident = self.queue.exists(self.names.of_all_ranks(root, hashes))
            self.asked[ident] = name
            question = question._replace(id=ident, there=None)
            self.figures.add(asked=(last - first) // self.groups.unit)
        except Error as problem:
            self.warn("asking for blocks", problem)
        self.questions[name] = question
        return question

    def _take(self, name: str) -> None:
        """Take the answers that are there; give the one for @name a moment."""
        until = time.monotonic() + ASK_WAIT_S
        while True:
            for result in self.queue.poll():
                self._answer(result)
            if self.questions[name].there is not None or time.monotonic() >= until:
                return
            self.poll.poll(1)

    def _answer(self, result: Result) -> None:
        if result.id in self.checked:
            blocks = self.checked.pop(result.id)
            there = self._there(result, [range(len(blocks.hashes))] * len(self.groups.all))
            self.news.answered(blocks, self.groups.whole(there, 0, len(blocks.hashes) * self.groups.unit) // self.groups.unit)
            return
        name = self.asked.pop(result.id, "")
        question = self.questions.get(name)
        if question is None or question.id != result.id:
            return  # the request has ended, or asked again
        if result.status:
            self.warn("asking for blocks", OSError(-result.status, os.strerror(-result.status)))
        there = self._there(result, self.groups.blocks(question.first, question.last))
        hit = self.groups.longest(there, question.first, question.first, question.last)
        self.questions[name] = question._replace(there=there, id=0 if result.status else question.id, computed=question.first, hit=hit)
        self.figures.add(found=(hit - question.first) // self.groups.unit)

    @staticmethod
    def _there(result: Result, blocks: Sequence[range]) -> List[List[bool]]:
        """Return for each group which of its blocks are there, of all ranks."""
        n, there = sum(len(each) for each in blocks), []
        begin = 0
        for each in blocks:
            there.append([all(rc == 1 for rc in result.each[i::n]) for i in range(begin, begin + len(each))])
            begin += len(each)
        return there

    def _check_stored(self) -> None:
        """Ask the store for blocks that are to be announced, and take answers."""
        while len(self.checked) < MOST_CHECKS:
            blocks = self.news.due()
            if blocks is None:
                break
            try:
                keys = self.names.of_all_ranks(blocks.root, [blocks.hashes] * len(self.groups.all))
                self.checked[self.queue.exists(keys)] = blocks
            except (Error, ValueError) as problem:
                self.warn("asking for blocks", problem)
                break
        for result in self.queue.poll() if self.checked else ():
            self._answer(result)

    def allocated(self, request: Any, blocks: Any, n_tokens: int) -> None:
        """Note a request that has got its blocks, and plan to load @n_tokens of it."""
        name = request.request_id
        self.requests[name] = request
        question = self.questions.pop(name, None)
        if name not in self.roots:
            self.roots[name] = self.names.root(request) if question is None else question.root
        if question is None or not n_tokens:
            return
        end, move = question.computed + n_tokens, Move(name, question.root)
        fits = end % self.groups.unit == 0 and end <= question.last
        for group, ids in enumerate(blocks.get_block_ids()):
            needed = self.groups.all[group].needed(end, question.computed)
            hashes = self.groups.hashes(request, group, needed) if fits else [bytes(request.block_hashes[0])] * len(needed)
            move.add(group, ids[needed.start:needed.stop], hashes)
        if not fits:  # vLLM didn't take what it was told
            move.root = self._unknown(move.root)
        self.tries[name] = getattr(request, "num_preemptions", 0)
        self.loading[name] = self.groups.most_blocks(request.num_tokens)
        self.loads.append(move)

    def _unknown(self, root: bytes) -> bytes:
        """Return a root under which nothing is stored: a load fails, and vLLM computes."""
        return hashlib.sha256(self.names.epoch.value + root).digest()

    def plan(self, output: Any) -> Plan:
        """Make a step's plan: queued loads, and stores of the blocks that the step fills."""
        plan = Plan(loads=self.loads, idle=not output.total_num_scheduled_tokens, resets=self.resets)
        self.loads = []
        if self.news is not None:
            self._check_stored()
        for move in plan.loads:
            plan.fresh += move.blocks
        for new in output.scheduled_new_reqs:
            self._begin(plan, new.req_id, new.block_ids, new.num_computed_tokens)
            self._store(plan, new.req_id, new.num_computed_tokens, output)
        cached = output.scheduled_cached_reqs
        for name, added, computed in zip(cached.req_ids, cached.new_block_ids, cached.num_computed_tokens):
            if name in cached.resumed_req_ids:
                self._begin(plan, name, added or (), computed)
            else:
                plan.fresh += [block for ids in added or () for block in ids]
            self._store(plan, name, computed, output)
        if self.groups.has_states:
            computed = {new.req_id: new.num_computed_tokens for new in output.scheduled_new_reqs}
            self._store_states(plan, {**computed, **dict(zip(cached.req_ids, cached.num_computed_tokens))}, output)
        plan.fresh += [copy.dst_block_id for copy in getattr(output, "kv_cache_block_copies", None) or ()]
        return plan

    def _begin(self, plan: Plan, name: str, blocks: Sequence[Sequence[int]], computed: int) -> None:
        """Note that a request is computed from a token on, and gets blocks for it."""
        self.next[name] = computed
        self.loading.pop(name, None)
        for group, ids in zip(self.groups.all, blocks):
            plan.fresh += ids[computed // group.size:]

    def _store_states(self, plan: Plan, computed: Dict[str, int], output: Any) -> None:
        """Plan to store the states that the step leaves at the ends of blocks. vLLM tells which: a block table doesn't.

        A step leaves the state behind its last token. What vLLM tells of a block that the step goes on behind isn't believed.
        """
        told = getattr(output, "kv_connector_block_state", None)
        for name, states in (told.boundary_state_offloads if told is not None else {}).items():
            request, root = self.requests.get(name), self.roots.get(name)
            if request is None or root is None:
                continue
            move, last = Move(name, root), computed.get(name, 0) + output.num_scheduled_tokens.get(name, 0)
            for index, block, end in states:
                group, number = self.groups.all[index], end // self.groups.all[index].size
                if group.kind == STATE and end == last == number * group.size and end <= self.groups.tokens(request):
                    move.add(index, [block], self.groups.hashes(request, index, range(number - 1, number)))
            if move.blocks:
                plan.stores.append(move)

    def _store(self, plan: Plan, name: str, computed: int, output: Any) -> None:
        request, root = self.requests.get(name), self.roots.get(name)
        if request is None or root is None:
            return
        first = self.next.get(name, 0)
        last = min(computed + output.num_scheduled_tokens.get(name, 0), self.groups.tokens(request))
        filled = [range(0) if group.kind == STATE else blocks for group, blocks in zip(self.groups.all, self.groups.blocks(first, last))]
        if not any(filled):
            return
        move = Move(name, root)
        for group, (ids, blocks) in enumerate(zip(self.blocks_of(name), filled)):
            move.add(group, ids[blocks.start:blocks.stop], self.groups.hashes(request, group, blocks))
        self.next[name] = last
        if move.blocks:
            plan.stores.append(move)
        if self.news is not None:
            self.news.stored(request, root, first // self.groups.unit, last // self.groups.unit)

    def reset(self) -> bool:
        """Let nothing that was stored so far be found, nor stored of requests that run. False: a restart may find it again."""
        kept = True
        try:
            self.names.epoch.renew()
        except (Error, ValueError) as problem:
            self.warn("resetting the cache", problem)
            kept = False
        self.resets += 1
        self.questions.clear()
        self.checked.clear()
        if self.news is not None:
            self.news.clear()
        self.roots = dict.fromkeys(self.roots)
        for move in self.loads:  # they fail, and vLLM computes
            move.root = self._unknown(move.root)
        return kept

    def finished(self, name: str) -> None:
        """Forget a request."""
        for of in (self.requests, self.questions, self.next, self.tries, self.roots, self.loading):
            of.pop(name, None)

    def close(self) -> None:
        """Close the store."""
        close(self.queue, self.store, self.warn)


# -- vLLM's interface ------------------------------------------------------------------------------------------------------

def _refuse(config: Any) -> None:
    """Raise ValueError for what the connector can't do with any model."""
    if config.kv_transfer_config.kv_load_failure_policy != "recompute":
        raise ValueError('kvasir.vllm: --kv-transfer-config needs "kv_load_failure_policy": "recompute"; else a block that can\'t be read '
                         "ends its request")
    parallel = config.parallel_config
    if max(getattr(parallel, "decode_context_parallel_size", 1), getattr(parallel, "prefill_context_parallel_size", 1)) > 1:
        raise ValueError("kvasir.vllm: the connector doesn't know context parallelism, which spreads a block over ranks")


class Connector(_Parent, _v1.SupportsHMA):  # type: ignore[misc]
    """KV connector of vLLM over the store that `uri` in kv_connector_extra_config names.

    Other fields there: `fingerprint` (revision of the weights, or anything else that vLLM's configuration doesn't tell), `flush_s`
    (blocks are durable and seen by other processes after so many seconds at most; default 1), `timeout` (seconds until a store
    that doesn't answer counts as empty, for 10 s; default 2).
    """

    def __init__(self, vllm_config: Any, role: Any, kv_cache_config: Any = None) -> None:
        super().__init__(vllm_config=vllm_config, role=role, kv_cache_config=kv_cache_config)
        _refuse(vllm_config)
        groups = groups_of(vllm_config, kv_cache_config)
        extra: Dict[str, Any] = vllm_config.kv_transfer_config.kv_connector_extra_config or {}
        if not isinstance(extra.get("uri"), str):
            raise ValueError('kvasir.vllm: kv_connector_extra_config needs "uri", such as "/var/lib/kv?limit=100GiB"')
        warn = Warner(logger, "vLLM goes on without these blocks")
        self._n_blocks = kv_cache_config.num_blocks
        self.scheduler: Optional[_Scheduler] = None
        self.worker: Optional[Worker] = None
        if role is _v1.KVConnectorRole.SCHEDULER:
            _identity.warn_of_seed(vllm_config.cache_config, logger)
            self.scheduler = _Scheduler(vllm_config, groups, self._n_blocks, extra, warn)
        else:
            self.worker = Worker(extra["uri"], vllm_config.parallel_config.rank, float(extra.get("flush_s", 1.0)), groups, warn)

    @property
    def requires_kv_delivery(self) -> bool:
        """Nobody waits for what is stored."""
        return False

    # scheduler
    def bind_kv_cache_manager(self, kv_cache_manager: Any) -> None:
        """Take vLLM's manager, which knows the blocks of each request."""
        super().bind_kv_cache_manager(kv_cache_manager)
        if self.scheduler is not None:
            self.scheduler.blocks_of = kv_cache_manager.get_block_ids

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> Tuple[Optional[int], bool]:
        """Tell how many tokens more the store has; None while it is being asked."""
        assert self.scheduler is not None
        n = self.scheduler.matched(request, num_computed_tokens)
        return n, bool(n)

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        """Plan to load a request's blocks."""
        assert self.scheduler is not None
        self.scheduler.allocated(request, blocks, num_external_tokens)

    def build_connector_meta(self, scheduler_output: Any) -> Plan:
        """Make a step's plan."""
        assert self.scheduler is not None
        return self.scheduler.plan(scheduler_output)

    def request_finished(self, request: Any, block_ids: Any) -> Tuple[bool, Optional[Dict[str, Any]]]:
        """Forget a request; its blocks are free, and workers wait before they write to one that is being stored."""
        assert self.scheduler is not None
        self.scheduler.finished(request.request_id)
        return False, None

    def request_finished_all_groups(self, request: Any, block_ids: Any) -> Tuple[bool, Optional[Dict[str, Any]]]:
        """Forget a request, as request_finished() does."""
        return self.request_finished(request, block_ids)

    def reset_cache(self) -> Optional[bool]:
        """Let no block be found that was stored so far, also after a restart. False: a restart may find them again."""
        assert self.scheduler is not None
        return self.scheduler.reset()

    def take_events(self) -> Iterable[Any]:
        """Take vLLM's KV events of what the store holds."""
        news: List[Any] = [] if self.scheduler is None or self.scheduler.news is None else self.scheduler.news.take()
        return news

    # worker
    def register_kv_caches(self, kv_caches: Dict[str, Any]) -> None:
        """Take the tensors of all layers."""
        assert self.worker is not None
        self.worker.register(kv_caches, self._n_blocks)

    def handle_preemptions(self, kv_connector_metadata: Any) -> None:
        """Wait until no store reads what this step writes."""
        assert self.worker is not None
        self.worker.begin(kv_connector_metadata)

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        """Begin to load."""
        assert self.worker is not None
        self.worker.load(self._get_connector_metadata())

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Do nothing: requests are scheduled when all of their blocks are there."""

    def save_kv_layer(self, layer_name: str, kv_layer: Any, attn_metadata: Any, **kwargs: Any) -> None:
        """Do nothing: whole blocks are stored behind the step."""

    def wait_for_save(self) -> None:
        """Begin to store the blocks that the step has filled."""
        assert self.worker is not None
        self.worker.save(self._get_connector_metadata())

    def get_finished(self, finished_req_ids: Set[str]) -> Tuple[Optional[Set[str]], Optional[Set[str]]]:
        """Return the requests whose loads have ended."""
        assert self.worker is not None
        return None, self.worker.ended(self._get_connector_metadata().idle) or None

    def get_transfer_results(self, finished_req_ids: Set[str]) -> Any:
        """Return the requests whose loads have ended, and those of them that vLLM computes from their first token on."""
        assert self.worker is not None
        _, ended = self.get_finished(finished_req_ids)
        return _v1.KVConnectorTransferResults(finished_recving=ended or set(), failed_recving=self.worker.told_lost)

    def get_block_ids_with_load_errors(self) -> Set[int]:
        """Return the blocks that could not be loaded, of the requests that get_finished() returned last."""
        assert self.worker is not None
        return self.worker.told

    # statistics
    def get_kv_connector_stats(self) -> Any:
        """Take this half's figures since the last call."""
        if self.worker is None:
            return None if self.scheduler is None else self.scheduler.figures.take()
        with self.worker.changed:
            return self.worker.figures.take(jobs=len(self.worker.jobs))

    @classmethod
    def build_kv_connector_stats(cls, data: Optional[Dict[str, Any]] = None) -> Any:
        """Make the object of figures that came from another process."""
        return importlib.import_module("kvasir._vllm_metrics").Stats(data=data or {})

    @classmethod
    def build_prom_metrics(cls, vllm_config: Any, metric_types: Any, labelnames: List[str], per_engine_labelvalues: Dict[int, List[object]]) -> Any:
        """Make the metrics of vLLM's /metrics."""
        return importlib.import_module("kvasir._vllm_metrics").Prometheus(vllm_config, metric_types, labelnames, per_engine_labelvalues)

    def shutdown(self) -> None:
        """Wait for stores under way and close the store."""
        for half in (self.scheduler, self.worker):
            if half is not None:
                half.close()
        self.scheduler = self.worker = None
