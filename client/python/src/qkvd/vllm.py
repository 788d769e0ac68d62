"""A connector for vLLM 0.32: prefixes that any engine has computed come from qkvd instead of being computed again.

    vllm serve MODEL --kv-transfer-config '{"kv_connector": "QkvdConnector", "kv_connector_module_path": "qkvd.vllm",
      "kv_role": "kv_both", "kv_connector_extra_config": {"target": "unix:/run/qkvd.sock"}}'

`kv_connector_extra_config` takes the fields of `qkvd.prefixes.Options`, and `opaque` (true): blocks are kept as the bytes
that they are, as they are anyway where a model's cache is no keys and values in float32, float16 or bfloat16
(`qkvd.vllm_blocks`).

The scheduler's half asks the daemon for the longest prefix of a prompt (Match), one call for each request. The worker's
half loads it in the background while other requests run, and copies full pages of 64 tokens as they are computed, which a
thread then sends. A step waits for neither. What fails is a miss: a request whose load failed is computed, rows
that cannot be saved are not. Rows of a tensor-parallel or pipeline rank are a model of their own in the daemon.
"""

from __future__ import annotations

from typing import Any

import torch
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorRole,
    KVConnectorTransferResults,
    SupportsHMA,
)

from qkvd.errors import InvalidArgument
from qkvd.prefixes import Options
from qkvd.vllm_blocks import BlockScheduler, BlockWorker, takes_rows
from qkvd.vllm_events import Told
from qkvd.vllm_scheduler import Blocks, Progress, QkvdMetadata, Scheduler
from qkvd.vllm_stats import QkvdPromMetrics, QkvdStats
from qkvd.vllm_worker import RowWorker, Worker


class QkvdConnector(KVConnectorBase_V1, SupportsHMA):  # type: ignore[misc]
    """The connector. An engine makes one for its scheduler and one for each worker."""

    def __init__(self, vllm_config: Any, role: KVConnectorRole, kv_cache_config: Any):
        super().__init__(vllm_config, role, kv_cache_config)
        # To fail a request because a cache has lost its rows is never what is wanted.
        self._kv_transfer_config.kv_load_failure_policy = "recompute"
        settings = dict(self._kv_transfer_config.kv_connector_extra_config)
        opaque = settings.pop("opaque", False)
        if not isinstance(opaque, bool):
            raise InvalidArgument(f"opaque is {opaque!r}, it is true or false")
        self._options = Options.of(settings)
        self._rows = not opaque and takes_rows(kv_cache_config)
        self._scheduler: Scheduler | None = None
        self._worker: Worker | None = None
        if role is KVConnectorRole.SCHEDULER:
            kind = Scheduler if self._rows else BlockScheduler
            self._scheduler = kind(self._options, vllm_config, kv_cache_config)

    @property
    def requires_kv_delivery(self) -> bool:
        """No: what is not saved is computed again."""
        return False

    # ---- the scheduler's half ----

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int | None, bool]:
        """How many tokens more than these can be loaded, asynchronously; None while a producer's rows are waited for."""
        assert self._scheduler is not None
        return self._scheduler.matched(request, num_computed_tokens)

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        """The request has blocks for what is to be loaded."""
        assert self._scheduler is not None
        if num_external_tokens:
            self._scheduler.load(request, blocks.get_block_ids(), num_external_tokens)

    def build_connector_meta(self, scheduler_output: Any) -> QkvdMetadata:
        """What the workers are to load and to save in this step."""
        assert self._scheduler is not None
        return self._scheduler.step(scheduler_output)

    def update_connector_output(self, connector_output: Any) -> None:
        """Loads that have failed are not tried again; saves that are done make place for others."""
        assert self._scheduler is not None
        self._scheduler.take_output(connector_output)

    def reset_cache(self) -> bool | None:
        """After a change of weights: nothing that is held now is loaded any more, nor is what requests under way compute
        saved. False while rows of before are being loaded. Another engine with the new weights needs a `model_name` of its
        own."""
        return None if self._scheduler is None else self._scheduler.reset()

    def request_finished(self, request: Any, block_ids: list[int]) -> tuple[bool, dict[str, Any] | None]:
        """As `request_finished_all_groups`."""
        return self.request_finished_all_groups(request, (block_ids,))

    def request_finished_all_groups(self, request: Any, block_ids: Blocks) -> tuple[bool, dict[str, Any] | None]:
        """Blocks can be freed at once: what is saved has been copied."""
        assert self._scheduler is not None
        return False, self._scheduler.finished(request)

    def take_events(self) -> list[Told]:
        """What of the daemon's pages has come and gone for this engine's routers, where it publishes KV events."""
        assert self._scheduler is not None
        return self._scheduler.take_events()

    # ---- the worker's half ----

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        """The cache of every layer."""
        kind = RowWorker if self._rows else BlockWorker
        self._worker = kind(self._options, self._vllm_config, self._kv_cache_config, kv_caches)

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        """Loads begin, in the background."""
        if self._worker is not None:
            self._worker.start_loads(self._get_connector_metadata())

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Nothing: a request runs when all of its layers have come."""

    def save_kv_layer(self, layer_name: str, kv_layer: torch.Tensor, attn_metadata: Any, **kwargs: Any) -> None:
        """Nothing: pages are copied when they are complete, at the step's end."""

    def wait_for_save(self) -> None:
        """Copies the pages that this step completed, so that their blocks may be used anew."""
        if self._worker is not None:
            self._worker.start_saves(self._get_connector_metadata())

    def get_transfer_results(self, finished_req_ids: set[str]) -> KVConnectorTransferResults:
        """Loads that have ended, and which of them have failed."""
        if self._worker is None:
            return KVConnectorTransferResults()
        ended, failed = self._worker.ended_loads(self._get_connector_metadata().idle)
        return KVConnectorTransferResults(finished_recving=ended, failed_recving=failed)

    def build_connector_worker_meta(self) -> Progress | None:
        """How far saves have come, for the scheduler's half."""
        return None if self._worker is None else self._worker.progress()

    def get_kv_connector_stats(self) -> QkvdStats | None:
        """What was loaded and saved since the last call."""
        return None if self._worker is None else self._worker.take_stats()

    @classmethod
    def build_kv_connector_stats(cls, data: dict[str, Any] | None = None) -> QkvdStats:
        """Stats that have come from a worker."""
        return QkvdStats(data=data or {})

    @classmethod
    def build_prom_metrics(
        cls, vllm_config: Any, metric_types: Any, labelnames: list[str], per_engine_labelvalues: dict[int, list[object]]
    ) -> QkvdPromMetrics:
        """Counters for vLLM's /metrics."""
        return QkvdPromMetrics(vllm_config, metric_types, labelnames, per_engine_labelvalues)

    def shutdown(self) -> None:
        """Sends what waits to be saved, and closes the connections."""
        if self._worker is not None:
            self._worker.close()
        if self._scheduler is not None:
            self._scheduler.close()
