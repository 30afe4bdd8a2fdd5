# SPDX-License-Identifier: Apache-2.0
"""Tier of vLLM's own KV offloading (0.33): chunks of its host memory go to disk, to an object store and to peers, and come back.

    vllm serve MODEL --kv-transfer-config '{"kv_connector": "OffloadingConnector", "kv_role": "kv_both",
      "kv_connector_extra_config": {"spec_name": "TieringOffloadingSpec", "cpu_bytes_to_use": 10737418240,
        "secondary_tiers": [{"type": "Tier", "module_path": "kvasir.vllm", "disk": "/nvme/kv", "disk_bytes": "200GiB"}]}}'

Other keys of the tier are options of kvasir.offload.Offload: `object` (a store's URI), `peers` and `listen` (chunks of other
engines, and for them), `timeout`, `forget`, `fingerprint` (a revision of the weights, or anything else that vLLM's configuration
doesn't tell) ...
"""
import contextlib
import importlib
import itertools
import logging
import os
from typing import Any, Dict, Iterable, List, Optional, Sequence, Tuple

from . import _identity, store
from ._connector import Warner
from ._native import Error
from .offload import ABSENT, HIT, Offload, Transfer

__all__ = ["Tier", "fingerprint_of"]

logger = logging.getLogger(__name__)
_base: Any = importlib.import_module("vllm.v1.kv_offload.base")
_tiering: Any = importlib.import_module("vllm.v1.kv_offload.tiering.base")
_Parent: Any = _tiering.SecondaryTierManager
OWNER = "kvasir"  # of this tier's chunks in vLLM's KV events
MOST_HELD = 1 << 18  # chunks that are announced at a time
PREFIX = "vllm:kvasir_tier_"  # of names in /metrics
_METRICS = {"bytes": ("Counter", "Bytes moved between vLLM's host memory and the tier.", ("operation",)),
            "chunks": ("Counter", "Chunks of jobs that have ended.", ("operation", "outcome")),
            "lookups": ("Counter", "Lookups of chunks.", ("result",)),
            "read": ("Counter", "Chunks read, by where they were: disk, object, peer.", ("place",)),
            "seconds": ("Histogram", "Seconds from a job's submission to its end.", ("operation",)),
            "jobs": ("Gauge", "Jobs under way.", ())}
_LIKE_A_CACHE = {"disk_buffered": True, "disk_volatile": True}  # a chunk lost by a power cut is a miss, and computed
_RESULTS = {ABSENT: _base.LookupResult.MISS, HIT: _base.LookupResult.HIT}


def fingerprint_of(spec: Any, chunk_bytes: int, extra: str = "") -> str:
    """Name all that makes equal keys mean equal bytes: the model, its cache's form, the ranks whose parts a chunk holds."""
    config = spec.config
    parallel = config.parallel
    whole = _identity.of_frames("vllm_config", "model_config")  # a tier is given the model's name only
    model, load = getattr(whole, "model_config", None), getattr(whole, "load_config", None)
    weights = _identity.weights_of(config.model.name, extra, dtype=config.model.dtype, revision=getattr(model, "revision", None),
                                   quantization=getattr(model, "quantization", None), overrides=getattr(model, "hf_overrides", None),
                                   format=getattr(load, "load_format", None))
    form = {
        "weights": weights, "chunk_bytes": chunk_bytes,
        "tokens_per_hash": config.cache.tokens_per_hash, "blocks_per_chunk": config.cache.blocks_per_chunk,
        "groups": [[group.group_id, group.tokens_per_block, list(group.layer_names)] for group in config.groups],
        "ranks": [parallel.world_size, parallel.tp_size, parallel.pp_size, parallel.pcp_size, parallel.dcp_size],
        "layout": [config.replicated_layout, config.canonical_layout, config.kv_cache_layout],
    }
    return f"vllm {config.model.name[:200]} {_identity.digest_of(form).hex()}"


def __getattr__(name: str) -> Any:
    if name == "Connector":  # engines with a tier don't need it
        return importlib.import_module("kvasir._vllm_connector").Connector
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def _make_folder(folder: str) -> str:
    """Make a folder whose parent is there. Else its disk isn't mounted, maybe: the tier goes on without it while another one is left."""
    try:
        os.mkdir(folder)
    except FileExistsError:
        pass
    except FileNotFoundError:
        logger.warning("kvasir.vllm: %s isn't made: its parent isn't there. Is the disk mounted?", folder)
    return folder


class Resets:
    """Salt of a tier's keys, which a reset of vLLM's caches draws anew: kept in the folders of its disks and in its object store."""

    def __init__(self, fingerprint: str, folders: Sequence[str], uri: Optional[str], warn: Warner) -> None:
        self._identity, self._uri, self._warn = _identity.digest_of(fingerprint), uri, warn
        self._files = [os.path.join(folder, f"kvasir-reset-{self._identity.hex()[:32]}") for folder in folders]
        self.salt = self._read()

    def _read(self) -> bytes:
        kept = set()
        for file in self._files:
            with contextlib.suppress(FileNotFoundError), open(file, "rb") as opened:
                kept.add(opened.read())
        try:
            if self._uri:
                kept.add(self._in_store(False))
        except (Error, ValueError) as problem:
            if not self._files:  # nothing tells what was reset
                self._warn("asking the object store for resets", problem)
                return os.urandom(32)
        kept.discard(b"")
        return b"".join(sorted(kept))

    def _in_store(self, renew: bool) -> bytes:
        with store.open(self._uri or "") as opened:
            epoch = _identity.Epoch(opened, self._identity)
            if renew:
                epoch.renew(self.salt)
            return epoch.value

    def renew(self) -> bytes:
        """Draw another salt and keep it. What fails is told: a later start may find chunks of before then."""
        self.salt = os.urandom(32)
        try:
            for file in self._files:
                with open(file + ".new", "wb") as opened:
                    opened.write(self.salt)
                    opened.flush()
                    os.fsync(opened.fileno())
                os.replace(file + ".new", file)
            if self._uri:
                self._in_store(True)
        except (OSError, ValueError) as problem:
            self._warn("keeping note of a reset; after a restart chunks of before may be found", problem)
        return self.salt


class _Held:
    """Chunks that were announced in vLLM's KV events as held by this tier, and the news since the last events.

    Nobody tells what disk or store evict. A chunk counts as gone when a lookup or a load doesn't find it, when the cache is reset,
    and, of more than MOST_HELD, when it is the one announced longest ago.
    """

    def __init__(self) -> None:
        self._held: Dict[bytes, None] = {}
        self._news: List[Tuple[bool, bytes]] = []  # whether removed, and what

    def note(self, key: bytes, there: bool) -> None:
        """Take note that a chunk is there, or that it isn't."""
        if there == (key in self._held):
            return
        self._news.append((not there, key))
        if not there:
            del self._held[key]
            return
        self._held[key] = None
        if len(self._held) > MOST_HELD:
            self.note(next(iter(self._held)), False)

    def clear(self) -> None:
        """Take note that nothing is there any more."""
        for key in list(self._held):
            self.note(key, False)

    def take(self, medium: Any, locality: Any) -> List[Any]:
        """Return the news as vLLM's events, in their order."""
        news, self._news = self._news, []
        return [_base.OffloadingEvent(keys=[key for _, key in group], medium=medium, removed=removed, locality=locality, ownership=OWNER,
                                      removal_expected=not removed) for removed, group in itertools.groupby(news, lambda entry: entry[0])]


class _Counts:
    """What vLLM's /metrics has of this tier: counters and times since they were taken."""

    def __init__(self) -> None:
        self._counters: Dict[Tuple[str, Tuple[str, ...]], float] = {}
        self._seconds: List[Tuple[str, float]] = []
        self._before: Dict[str, int] = {}  # chunks that were read from each tier below
        self._jobs = 0

    def add(self, name: str, labels: Tuple[str, ...], n: float = 1) -> None:
        """Count."""
        self._counters[name, labels] = self._counters.get((name, labels), 0) + n

    def note_job(self, transfer: Transfer) -> None:
        """Count a job that has ended."""
        what, good = "load" if transfer.loads else "store", sum(transfer.ok)
        self._seconds.append((what, transfer.seconds))
        for name, labels, n in (("bytes", (what,), transfer.bytes), ("chunks", (what, "done"), good), ("chunks", (what, "failed"), len(transfer.ok) - good)):
            if n:
                self.add(name, labels, n)

    def take(self, chunks: Offload) -> Any:
        """Return vLLM's statistics; None: nothing happened."""
        jobs = chunks.n_jobs
        if not self._counters and not self._seconds and jobs == self._jobs:
            return None
        self._jobs, tiers = jobs, chunks.stats()
        for place in ("disk", "object", "peer"):
            read, before = int(tiers[place]["blocks_out"]), self._before.get(place, 0)
            if read > before:
                self.add("read", (place,), read - before)
                self._before[place] = read
        stats: Any = importlib.import_module("vllm.distributed.kv_transfer.kv_connector.v1.offloading.metrics").OffloadingConnectorStats()
        for (name, labels), n in self._counters.items():
            stats.increase_counter(PREFIX + name, n, labels)
        for what, seconds in self._seconds:
            stats.observe_histogram(PREFIX + "seconds", seconds, (what,))
        stats.set_gauge(PREFIX + "jobs", jobs)
        self._counters.clear()
        self._seconds.clear()
        return stats


class Tier(_Parent):  # type: ignore[misc]
    """Secondary tier over kvasir.offload.Offload. vLLM makes it from the configuration; see the module."""

    medium = _base.Medium.STORAGE

    def __init__(self, offloading_spec: Any, primary_kv_view: memoryview, tier_type: str, backpressure_detector: Any = None, *,
                 disk: Optional[str] = None, fingerprint: str = "", locality: Optional[str] = None, listen: Any = None,
                 **options: Any) -> None:
        super().__init__(offloading_spec, primary_kv_view, tier_type, backpressure_detector)
        self.locality = None if locality is None else _base.Locality(locality)
        chunk_bytes, parallel = primary_kv_view.nbytes // len(primary_kv_view), offloading_spec.config.parallel
        _identity.warn_of_seed(getattr(_identity.of_frames("vllm_config", "cache_config"), "cache_config", None), logger)
        events = getattr(offloading_spec, "kv_events_config", None)
        self._held = _Held() if getattr(events, "enable_kv_cache_events", False) else None
        self._counts = _Counts()
        self._warn = Warner(logger, "vLLM goes on without these chunks")
        fingerprint, folders = fingerprint_of(offloading_spec, chunk_bytes, fingerprint), []
        if disk is not None:
            folders = [folder for folder in disk.split(":") if folder]
            if parallel.data_parallel_size > 1:  # one process has a folder
                folders = [os.path.join(_make_folder(folder), f"dp{parallel.data_parallel_index}") for folder in folders]
            for folder in folders:
                _make_folder(folder)
            options = {"disk": ":".join(folders), **_LIKE_A_CACHE, **options}
        self._resets = Resets(fingerprint, folders, options.get("object"), self._warn)
        if listen:  # as a folder, an endpoint is one process's
            places = [listen] if isinstance(listen, str) else listen
            options["listen"] = [place.replace("{dp}", str(parallel.data_parallel_index)) for place in places]
        self.chunks = Offload(primary_kv_view, chunk_bytes, fingerprint=fingerprint, salt=self._resets.salt, **options)

    def on_new_request(self, req_context: Any) -> Any:
        """No request needs more than vLLM offers anyway."""
        return _tiering.RequestOffloadingContext()

    def lookup(self, key: bytes, req_context: Any) -> Any:
        """HIT, MISS, or RETRY while the object store is being asked. Never waits."""
        found = self.chunks.lookup(key)
        self._counts.add("lookups", ({HIT: "hit", ABSENT: "miss"}.get(found, "retry"),))
        if self._held is not None and found in _RESULTS:
            self._held.note(bytes(key), found == HIT)
        return _RESULTS.get(found, _base.LookupResult.RETRY)

    def touch(self, keys: Sequence[bytes], req_context: Any) -> None:
        """Count a use of chunks, so that others are evicted first."""
        self.chunks.touch(list(keys))

    def submit_store(self, job_metadata: Any) -> None:
        """Copy chunks of the host memory to this tier."""
        self.chunks.store(job_metadata.job_id, list(job_metadata.keys), job_metadata.chunk_ids.tolist())

    def submit_load(self, job_metadata: Any) -> None:
        """Copy chunks of this tier into the host memory."""
        self.chunks.load(job_metadata.job_id, list(job_metadata.keys), job_metadata.chunk_ids.tolist())

    def get_finished_jobs(self) -> Iterable[Any]:
        """Results of the jobs that have ended since the last call."""
        ended = self.chunks.finished()
        for transfer in ended:
            self._counts.note_job(transfer)
            for key, ok in zip(transfer.keys, transfer.ok):
                if self._held is not None and (ok or transfer.loads):
                    self._held.note(bytes(key), ok)
        return [_result(transfer) for transfer in ended]

    def take_events(self) -> Iterable[Any]:
        """Take the events of chunks that came to this tier, or are found to be gone."""
        return () if self._held is None else self._held.take(self.medium, self.locality)

    @classmethod
    def build_metric_definitions(cls, extra_config: Dict[str, Any]) -> Dict[str, Any]:
        """Name this tier's figures in vLLM's /metrics."""
        return {PREFIX + name: getattr(_base, f"Offloading{kind}Metadata")(documentation=text, labelnames=labels)
                for name, (kind, text, labels) in _METRICS.items()}

    def get_stats(self) -> Any:
        """Take this tier's figures since the last call."""
        return self._counts.take(self.chunks)

    def drain_jobs(self) -> None:
        """Wait until no job uses the host memory. vLLM calls this when its caches are reset: nothing of before is found from here on."""
        self.chunks.drain()
        self.chunks.salt = self._resets.renew()
        if self._held is not None:
            self._held.clear()

    def shutdown(self) -> None:
        """End all jobs, write what was stored, and give the host memory back."""
        self.chunks.close()

    def stats(self) -> Dict[str, Any]:
        """Statistics of the tiers by the names of kvbm_manager_stats."""
        return self.chunks.stats()


def _result(transfer: Transfer) -> Any:
    whole = all(transfer.ok)
    loaded: List[bytes] = [key for key, ok in zip(transfer.keys, transfer.ok) if ok] if transfer.loads and not whole else []
    return _tiering.JobResult(job_id=transfer.job, success=whole, successful_keys=tuple(loaded) or None, transfer_time=transfer.seconds,
                     transfer_bytes=transfer.bytes)
