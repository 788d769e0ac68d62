"""Chunks of LMCache 0.5.6 in qkvd: behind its server, or in an engine's process.

The server (MP mode):

    lmcache server --l2-adapter '{"type": "plugin", "module_path": "qkvd.lmcache", "class_name": "QkvdL2Adapter",
      "adapter_params": {"target": "unix:/run/qkvd.sock", "kv_heads": 8}}'

In the engine's process, in LMCache's configuration file:

    remote_storage_plugins: ["qkvd"]
    extra_config:
      remote_storage_plugin.qkvd.module_path: qkvd.lmcache
      remote_storage_plugin.qkvd.class_name: QkvdConnectorAdapter
      remote_storage_plugin.qkvd.target: unix:/run/qkvd.sock
      remote_storage_plugin.qkvd.kv_heads: 8

`kv_heads` is how many heads a token's keys come in, on one rank. `opaque` (true) keeps all chunks as the bytes that they
are, for models whose cache is no pairs of keys and values, such as those with MLA; fp8 caches and states are kept so in any
case. Other settings are the fields of `qkvd.prefixes.Options`.
LMCache says neither which tokens a chunk has nor where they stand, so that keys are coded as they are, turned to positions
that the daemon does not know: what the daemon could gain from them is left.
"""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any, Generic, TypeVar

import torch
from lmcache.lmcache_native import Bitmap
from lmcache.v1.distributed.internal_api import L2StoreResult
from lmcache.v1.distributed.l2_adapters.base import L2AdapterInterface
from lmcache.v1.platform import create_event_notifier
from lmcache.v1.storage_backend.connector import ConnectorAdapter
from lmcache.v1.storage_backend.connector.base_connector import RemoteConnector

from qkvd.chunks import Chunks
from qkvd.errors import InvalidArgument
from qkvd.prefixes import Options

logger = logging.getLogger("lmcache.qkvd")
THREADS = 4
T = TypeVar("T")


def chunks_of(settings: dict[str, Any]) -> Chunks:
    """From a dictionary of `kv_heads`, `opaque` and the fields of `Options`."""
    settings = dict(settings)
    heads, opaque = settings.pop("kv_heads", 1), settings.pop("opaque", False)
    if not isinstance(heads, int):
        raise InvalidArgument(f"kv_heads is {heads!r}, it is a whole number")
    if not isinstance(opaque, bool):
        raise InvalidArgument(f"opaque is {opaque!r}, it is true or false")
    return Chunks(Options.of(settings), heads, logger, opaque=opaque)


class Tasks(Generic[T]):
    """Tasks of one kind, run by threads; a file descriptor says when one has ended."""

    def __init__(self, pool: ThreadPoolExecutor, failed: Callable[[int], T]):
        self._pool = pool
        self._failed = failed
        self._lock = threading.Lock()
        self._next = 0
        self._ended: dict[int, T] = {}
        self.notifier = create_event_notifier()

    def submit(self, run: Callable[[], T], items: int) -> int:
        """Gives the task's number."""
        with self._lock:
            self._next += 1
            number = self._next
        self._pool.submit(self._run, number, run, items)
        return number

    def _run(self, number: int, run: Callable[[], T], items: int) -> None:
        try:
            result = run()
        except Exception:  # a task that nobody hears of again would be waited for
            logger.exception("a task of %d chunks has failed", items)
            result = self._failed(items)
        with self._lock:
            self._ended[number] = result
        self.notifier.notify()

    def pop(self, number: int) -> T | None:
        """A task's result, once."""
        with self._lock:
            return self._ended.pop(number, None)

    def pop_all(self) -> dict[int, T]:
        """Of all that have ended."""
        with self._lock:
            ended, self._ended = self._ended, {}
        return ended


class QkvdL2Adapter(L2AdapterInterface):  # type: ignore[misc]
    """The L2 adapter of LMCache's server. Several servers may share a daemon."""

    def __init__(self, settings: dict[str, Any], l1_memory_desc: Any = None):
        super().__init__()
        self._chunks = chunks_of(settings)
        self._pool = ThreadPoolExecutor(THREADS, "qkvd-lmcache")
        self._stores: Tasks[L2StoreResult] = Tasks(self._pool, lambda items: L2StoreResult(False, 0))
        self._lookups: Tasks[Any] = Tasks(self._pool, Bitmap)
        self._loads: Tasks[Any] = Tasks(self._pool, Bitmap)
        # Of chunks stored here, for LMCache's account of what each user's take. It keeps their keys itself as well.
        self._sizes: dict[Any, int] = {}
        self._sizes_lock = threading.Lock()

    def _name(self, key: Any) -> str:
        return self._chunks.name(key.chunk_hash.hex(), key.model_name, key.kv_rank, key.object_group_id, key.cache_salt)

    def get_store_event_fd(self) -> int:
        """Says that a store has ended."""
        return int(self._stores.notifier.fileno())

    def get_lookup_and_lock_event_fd(self) -> int:
        """Says that a lookup has ended."""
        return int(self._lookups.notifier.fileno())

    def get_load_event_fd(self) -> int:
        """Says that a load has ended."""
        return int(self._loads.notifier.fileno())

    def submit_store_task(self, keys: list[Any], objects: list[Any]) -> int:
        """Keeps chunks; the task succeeds where all are held."""
        return self._stores.submit(partial(self._store, list(keys), list(objects)), len(keys))

    def _store(self, keys: list[Any], objects: list[Any]) -> L2StoreResult:
        chunks = []
        for key, chunk in zip(keys, objects, strict=True):
            model = f"lmcache/{key.model_name}".replace("@", "-")[:80] + f":{key.kv_rank:x}:{key.object_group_id}"
            chunks.append((self._name(key), chunk.tensor, model))
        done = self._chunks.put_all(chunks)
        kept = {key: chunk.tensor.nbytes for key, chunk, held in zip(keys, objects, done, strict=True) if held}
        with self._sizes_lock:
            more = [size - self._sizes.get(key, 0) for key, size in kept.items()]
            self._sizes.update(kept)
        self._notify_keys_stored(list(kept), more)
        return L2StoreResult(all(done), sum(kept.values()))

    def pop_completed_store_tasks(self) -> dict[int, L2StoreResult]:
        """The stores that have ended."""
        return self._stores.pop_all()

    def submit_lookup_and_lock_task(self, keys: list[Any], group_layout_descs: Any) -> int:
        """Which chunks are held. They are not locked: a use keeps them from expiring, and a load may fail."""
        return self._lookups.submit(partial(self._look_up, list(keys)), len(keys))

    def _look_up(self, keys: list[Any]) -> Any:
        return bits(self._chunks.has([self._name(key) for key in keys]))

    def query_lookup_and_lock_result(self, task_id: int) -> Any:
        """A bitmap, once the task has ended."""
        return self._lookups.pop(task_id)

    def submit_unlock(self, keys: list[Any]) -> None:
        """Nothing: nothing was locked."""

    def submit_load_task(self, keys: list[Any], objects: list[Any]) -> int:
        """Fills objects with chunks."""
        return self._loads.submit(partial(self._load, list(keys), list(objects)), len(keys))

    def _load(self, keys: list[Any], objects: list[Any]) -> Any:
        came = self._chunks.get_all(
            [(self._name(key), chunk.tensor) for key, chunk in zip(keys, objects, strict=True)]
        )  # fmt: skip
        self._notify_keys_accessed([key for key, done in zip(keys, came, strict=True) if done])
        return bits(came)

    def query_load_result(self, task_id: int) -> Any:
        """A bitmap, once the task has ended."""
        return self._loads.pop(task_id)

    def delete(self, keys: list[Any]) -> None:
        """Drops chunks."""
        gone = self._chunks.delete([self._name(key) for key in keys])
        with self._sizes_lock:
            # Those that the daemon has closed before are counted no more, those that another server stored never were.
            sizes = {
                key: self._sizes.pop(key, 0)
                for key, was in zip(keys, gone, strict=True)
                if was or key in self._sizes
            }  # fmt: skip
        self._notify_keys_deleted(list(sizes), list(sizes.values()))

    def report_status(self) -> dict[str, Any]:
        """Whether the daemon answers."""
        return {"is_healthy": self._chunks.healthy(), "type": "QkvdL2Adapter", "target": self._chunks.options.target}

    def close(self) -> None:
        """Ends when the tasks that run have ended; chunks stay."""
        self._pool.shutdown(cancel_futures=True)
        self._chunks.close()
        for tasks in (self._stores, self._lookups, self._loads):
            tasks.notifier.close()


def bits(flags: list[bool]) -> Any:
    """A bitmap of these."""
    bitmap = Bitmap(len(flags))
    for place, flag in enumerate(flags):
        if flag:
            bitmap.set(place)
    return bitmap


class QkvdConnectorAdapter(ConnectorAdapter):  # type: ignore[misc]
    """Makes the connector for LMCache in an engine's process."""

    def __init__(self) -> None:
        super().__init__("plugin://qkvd")

    def create_connector(self, context: Any) -> RemoteConnector:
        """With the settings of `extra_config`."""
        return QkvdConnector(context)


class QkvdConnector(RemoteConnector):  # type: ignore[misc]
    """Chunks for LMCache in an engine's process."""

    def __init__(self, context: Any):
        super().__init__(context.config, context.metadata)
        prefix = f"remote_storage_plugin.{context.plugin_name or 'qkvd'}."
        extra = context.config.extra_config or {}
        settings = {key.removeprefix(prefix): value for key, value in extra.items() if key.startswith(prefix)}
        self._chunks = chunks_of({key: settings[key] for key in settings if key not in ("module_path", "class_name")})
        self._pool = ThreadPoolExecutor(THREADS, "qkvd-lmcache")
        self._backend = context.local_cpu_backend
        self._model = f"lmcache/{context.metadata.model_name}".replace("@", "-")[:80]

    def _name(self, key: Any) -> str:
        return self._chunks.name(key.to_string())

    async def _run(self, call: Callable[[], T]) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._pool, call)

    async def exists(self, key: Any) -> bool:
        """Whether a chunk is held."""
        return await self._run(partial(self.exists_sync, key))

    def exists_sync(self, key: Any) -> bool:
        """Whether a chunk is held."""
        return self._chunks.has([self._name(key)])[0]

    async def get(self, key: Any) -> Any:
        """A chunk in memory of LMCache's, or None."""
        return await self._run(partial(self._get, key))

    def _get(self, key: Any) -> Any:
        name = self._name(key)
        shape = list(self.meta_shapes[0])
        whole = torch.empty(shape, dtype=self.meta_dtypes[0], device="meta")
        along = self.meta_fmt.token_dim() if len(shape) > 1 else 0
        if self._chunks.shape(whole) is not None:
            tokens = self._chunks.tokens(name) or 0
        else:
            tokens = self._chunks.size(name) * shape[along] // (whole.numel() * whole.element_size())
        if tokens == 0:
            return None
        shape[along] = min(tokens, shape[along])  # a sequence's last chunk may be shorter
        chunk = self._backend.allocate([torch.Size(shape)], self.meta_dtypes, self.meta_fmt)
        if chunk is None:
            return None
        if self._chunks.get(name, chunk.tensor):
            return chunk
        chunk.ref_count_down()
        return None

    async def put(self, key: Any, memory_obj: Any) -> None:
        """Keeps a chunk."""
        model = f"{self._model}:{key.worker_id}of{key.world_size}"
        await self._run(partial(self._chunks.put, self._name(key), memory_obj.tensor, model))

    def support_batched_contains(self) -> bool:
        """Yes."""
        return True

    def batched_contains(self, keys: list[Any]) -> int:
        """How many of these chunks, from the first one on, are held."""
        held = self._chunks.has([self._name(key) for key in keys])
        return held.index(False) if False in held else len(held)

    async def batched_async_contains(self, lookup_id: str, keys: list[Any], pin: bool = False) -> int:
        """As `batched_contains`."""
        return await self._run(partial(self.batched_contains, keys))

    def remove_sync(self, key: Any) -> bool:
        """Drops a chunk; whether it was held."""
        return self._chunks.delete([self._name(key)])[0]

    def support_ping(self) -> bool:
        """Yes."""
        return True

    async def ping(self) -> int:
        """0 where the daemon answers."""
        return 0 if await self._run(self._chunks.healthy) else 1

    async def list(self) -> list[str]:
        """Nothing: names are hashes of keys."""
        return []

    async def close(self) -> None:
        """Ends when the calls that run have ended; chunks stay."""
        self._pool.shutdown(cancel_futures=True)
        self._chunks.close()
