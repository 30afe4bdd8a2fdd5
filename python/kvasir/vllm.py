# SPDX-License-Identifier: Apache-2.0
"""Tier of vLLM's own KV offloading (0.33): chunks of its host memory go to disk, to an object store and to peers, and come back.

    vllm serve MODEL --kv-transfer-config '{"kv_connector": "OffloadingConnector", "kv_role": "kv_both",
      "kv_connector_extra_config": {"spec_name": "TieringOffloadingSpec", "cpu_bytes_to_use": 10737418240,
        "secondary_tiers": [{"type": "Tier", "module_path": "kvasir.vllm", "disk": "/nvme/kv", "disk_bytes": "200GiB"}]}}'

Other keys of the tier are options of kvasir.offload.Offload: `object` (a store's URI), `peers` and `listen` (chunks of other
engines, and for them), `timeout`, `forget`, `fingerprint` (a revision of the weights, or anything else that vLLM's configuration
doesn't tell) ...
"""
import hashlib
import importlib
import json
import os
from typing import Any, Dict, Iterable, List, Optional, Sequence

from .offload import ABSENT, HIT, Offload, Transfer

__all__ = ["Tier", "fingerprint_of"]

_base: Any = importlib.import_module("vllm.v1.kv_offload.base")
_tiering: Any = importlib.import_module("vllm.v1.kv_offload.tiering.base")
_Parent: Any = _tiering.SecondaryTierManager
_LIKE_A_CACHE = {"disk_buffered": True, "disk_volatile": True}  # a chunk lost by a power cut is a miss, and computed
_RESULTS = {ABSENT: _base.LookupResult.MISS, HIT: _base.LookupResult.HIT}


def fingerprint_of(spec: Any, chunk_bytes: int, extra: str = "") -> str:
    """Name all that makes equal keys mean equal bytes: the model, its cache's form, the ranks whose parts a chunk holds."""
    config = spec.config
    parallel = config.parallel
    form = {
        "model": config.model.name, "dtype": str(config.model.dtype), "extra": extra, "chunk_bytes": chunk_bytes,
        "tokens_per_hash": config.cache.tokens_per_hash, "blocks_per_chunk": config.cache.blocks_per_chunk,
        "groups": [[group.group_id, group.tokens_per_block, list(group.layer_names)] for group in config.groups],
        "ranks": [parallel.world_size, parallel.tp_size, parallel.pp_size, parallel.pcp_size, parallel.dcp_size],
        "layout": [config.replicated_layout, config.canonical_layout, config.kv_cache_layout],
    }
    digest = hashlib.sha256(json.dumps(form, sort_keys=True).encode()).hexdigest()
    return f"vllm {config.model.name[:200]} {digest}"


def __getattr__(name: str) -> Any:
    if name == "Connector":  # engines with a tier don't need it
        return importlib.import_module("kvasir._vllm_connector").Connector
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


class Tier(_Parent):  # type: ignore[misc]
    """Secondary tier over kvasir.offload.Offload. vLLM makes it from the configuration; see the module."""

    medium = _base.Medium.STORAGE

    def __init__(self, offloading_spec: Any, primary_kv_view: memoryview, tier_type: str, backpressure_detector: Any = None, *,
                 disk: Optional[str] = None, fingerprint: str = "", locality: Optional[str] = None, listen: Any = None,
                 **options: Any) -> None:
        super().__init__(offloading_spec, primary_kv_view, tier_type, backpressure_detector)
        self.locality = None if locality is None else _base.Locality(locality)
        chunk_bytes, parallel = primary_kv_view.nbytes // len(primary_kv_view), offloading_spec.config.parallel
        if disk is not None:
            folders = [folder for folder in disk.split(":") if folder]
            if parallel.data_parallel_size > 1:  # one process has a folder
                folders = [os.path.join(folder, f"dp{parallel.data_parallel_index}") for folder in folders]
            for folder in folders:
                os.makedirs(folder, exist_ok=True)
            options = {"disk": ":".join(folders), **_LIKE_A_CACHE, **options}
        if listen:  # as a folder, an endpoint is one process's
            places = [listen] if isinstance(listen, str) else listen
            options["listen"] = [place.replace("{dp}", str(parallel.data_parallel_index)) for place in places]
        self.chunks = Offload(primary_kv_view, chunk_bytes, fingerprint=fingerprint_of(offloading_spec, chunk_bytes, fingerprint), **options)

    def on_new_request(self, req_context: Any) -> Any:
        """No request needs more than vLLM offers anyway."""
        return _tiering.RequestOffloadingContext()

    def lookup(self, key: bytes, req_context: Any) -> Any:
        """HIT, MISS, or RETRY while the object store is being asked. Never waits."""
        return _RESULTS.get(self.chunks.lookup(key), _base.LookupResult.RETRY)

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
        return [_result(transfer) for transfer in self.chunks.finished()]

    def drain_jobs(self) -> None:
        """Wait until no job uses the host memory."""
        self.chunks.drain()

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
