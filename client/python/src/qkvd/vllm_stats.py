"""What the connector for vLLM counts, in the form of vLLM's metrics."""

from __future__ import annotations

import threading
from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorPromMetrics, KVConnectorStats

COUNTERS = {
    "loads": "requests whose prefix was loaded",
    "loads_failed": "requests whose prefix could not be loaded and was computed",
    "load_tokens": "tokens loaded",
    "load_bytes": "bytes of rows loaded",
    "load_seconds": "seconds that loads took",
    "saves": "runs of pages saved",
    "saves_dropped": "requests whose rows could not be saved",
    "save_tokens": "tokens saved, without those that were held already",
    "save_bytes": "bytes of rows copied to be saved",
    "save_seconds": "seconds that saves took",
}


class Totals:
    """Sums since they were last taken; threads may share it."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._sums: dict[str, float] = {}

    def add(self, **amounts: float) -> None:
        """To the counters of these names."""
        with self._lock:
            for name, amount in amounts.items():
                self._sums[name] = self._sums.get(name, 0) + amount

    def take(self) -> dict[str, float]:
        """The sums; they begin anew."""
        with self._lock:
            sums, self._sums = self._sums, {}
        return sums


class QkvdStats(KVConnectorStats):  # type: ignore[misc]
    """Counters of `COUNTERS`, as an engine passes them from its workers to its metrics."""

    def reset(self) -> None:
        """To nothing."""
        self.data.clear()

    def aggregate(self, other: KVConnectorStats) -> KVConnectorStats:
        """Adds another worker's, or a later step's."""
        for name, amount in other.data.items():
            self.data[name] = self.data.get(name, 0) + amount
        return self

    def reduce(self) -> dict[str, int | float]:
        """For the engine's log."""
        return {f"qkvd {name}": round(amount, 3) for name, amount in self.data.items()}

    def is_empty(self) -> bool:
        """Whether nothing has happened."""
        return not self.data


class QkvdPromMetrics(KVConnectorPromMetrics):  # type: ignore[misc]
    """Counters vllm:qkvd_*_total."""

    def __init__(self, vllm_config: Any, metric_types: Any, labelnames: list[str], labelvalues: dict[int, list[object]]):
        super().__init__(vllm_config, metric_types, labelnames, labelvalues)
        self._counters = {
            name: self._counter_cls(name=f"vllm:qkvd_{name}", documentation=f"qkvd: {text}.", labelnames=labelnames)
            for name, text in COUNTERS.items()
        }

    def observe(self, transfer_stats_data: dict[str, Any], engine_idx: int = 0) -> None:
        """Adds what a step has brought."""
        for name, amount in transfer_stats_data.items():
            if name in self._counters:
                self._counters[name].labels(*self.per_engine_labelvalues[engine_idx]).inc(amount)
