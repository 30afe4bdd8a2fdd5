# SPDX-License-Identifier: Apache-2.0
"""What vLLM's /metrics has of kvasir.vllm.Connector: statistics that go from workers to the server, and their Prometheus metrics."""
import importlib
from typing import Any, Dict, List, Tuple

__all__ = ["Prometheus", "Stats"]

_metrics: Any = importlib.import_module("vllm.distributed.kv_transfer.kv_connector.v1.metrics")
_Stats: Any = _metrics.KVConnectorStats
_Prometheus: Any = _metrics.KVConnectorPromMetrics
START = "vllm:kvasir_connector_"
SECONDS = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30)
# Keys of the statistics: counters, and lists of seconds. Each is a metric's name and the values of its labels.
COUNTERS = {"loaded": ("blocks", "load", "done"), "load_failed": ("blocks", "load", "failed"), "stored": ("blocks", "store", "done"),
            "present": ("blocks", "store", "present"), "store_failed": ("blocks", "store", "failed"), "bytes_loaded": ("bytes", "load"),
            "bytes_stored": ("bytes", "store"), "asked": ("asked", "asked"), "found": ("asked", "found"), "silent": ("asked", "silent")}
TIMES = {"load_seconds": ("seconds", "load"), "store_seconds": ("seconds", "store")}
_NAMES: Dict[str, Tuple[str, List[str]]] = {
    "blocks": ("Blocks that the store gave or took, by what came of them.", ["operation", "outcome"]),
    "bytes": ("Bytes loaded from the store and put into it.", ["operation"]),
    "asked": ("Blocks of prompts: asked of the store, found there, and not answered in time.", ["answer"]),
    "seconds": ("Seconds from a load's or a store's submission to its end.", ["operation"]),
    "jobs": ("Loads and stores under way.", [])}


class Stats(_Stats):  # type: ignore[misc]
    """Statistics since they were taken last: `data` has numbers by the keys of COUNTERS, lists by those of TIMES, and "jobs"."""

    def reset(self) -> None:
        """Forget all."""
        self.data: Dict[str, Any] = {}

    def aggregate(self, other: Any) -> "Stats":
        """Add those of another rank, or of a later interval."""
        for name, value in other.data.items():
            self.data[name] = self.data[name] + value if name in self.data else value
        return self

    def reduce(self) -> Dict[str, Any]:
        """Return numbers for a line of the log."""
        return {name: round(sum(value) / len(value), 6) if isinstance(value, list) else value for name, value in self.data.items()
                if value}

    def is_empty(self) -> bool:
        """Tell whether there is nothing."""
        return not self.data


class Prometheus(_Prometheus):  # type: ignore[misc]
    """The metrics in vLLM's registry, for each of its engines."""

    def __init__(self, vllm_config: Any, metric_types: Any, labelnames: List[str], per_engine_labelvalues: Dict[int, List[object]]) -> None:
        super().__init__(vllm_config, metric_types, labelnames, per_engine_labelvalues)
        self._of: Dict[str, Any] = {}
        for name, (text, labels) in _NAMES.items():
            kind = {"seconds": self._histogram_cls, "jobs": self._gauge_cls}.get(name, self._counter_cls)
            more = {"buckets": SECONDS} if name == "seconds" else {}
            self._of[name] = kind(name=START + name, documentation=text, labelnames=labelnames + labels, **more)

    def _metric(self, engine: int, name: str, *labels: str) -> Any:
        return self._of[name].labels(*self.per_engine_labelvalues[engine], *labels)

    def observe(self, transfer_stats_data: Dict[str, Any], engine_idx: int = 0) -> None:
        """Take statistics of an engine."""
        for name, value in transfer_stats_data.items():
            if name in COUNTERS:
                self._metric(engine_idx, *COUNTERS[name]).inc(value)
            elif name in TIMES:
                for seconds in value:
                    self._metric(engine_idx, *TIMES[name]).observe(seconds)
            elif name == "jobs":
                self._metric(engine_idx, name).set(value)
