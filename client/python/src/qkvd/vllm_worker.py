"""The worker's half of the connector for vLLM: it loads and saves the rows of one rank, and a step waits for neither."""

from __future__ import annotations

import logging
import queue
import re
import threading
import time
from abc import ABC, abstractmethod
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
from vllm.distributed.parallel_state import get_pp_group, get_tp_group
from vllm.v1.kv_cache_interface import iter_layer_specs

from qkvd.arrays import Array
from qkvd.configs import rope_of
from qkvd.errors import Error, InvalidArgument, Unimplemented
from qkvd.model import Model
from qkvd.paged import PagedLayer, order_of
from qkvd.prefixes import PAGE, Options, Prefixes
from qkvd.vllm_scheduler import DTYPES, Load, Progress, QkvdMetadata, Save, block_tokens_of, model_name, world_of
from qkvd.vllm_stats import QkvdStats, Totals

logger = logging.getLogger("vllm.qkvd")
LOADERS = 2  # threads
CHUNK_BYTES = 1 << 20  # of rows in a message of a load
IDLE_WAIT = 0.005  # seconds that a step without tokens waits for loads, instead of turning at once
SEND_BYTES = 64 << 20  # of rows in a call of a save
FLUSH = 30.0  # seconds that a worker which ends gives to rows that wait to be saved


class Worker(ABC):
    """Loads and saves in threads of its own; what of each layer, a subclass knows."""

    def __init__(self, prefixes: Prefixes, rank: int):
        self._prefixes = prefixes
        self._rank = rank
        self._stats = Totals()
        self._loaders = ThreadPoolExecutor(LOADERS, "qkvd-load")
        self._changed = threading.Condition()
        self._loading: set[str] = set()
        self._ended: set[str] = set()
        self._failed: set[str] = set()
        self._saver = Saver(prefixes, self._stats)
        self._told = 0  # tokens that are done, as the scheduler was told last

    @abstractmethod
    def _read(self, load: Any) -> int:
        """Loads into the engine's blocks; gives the bytes. What it raises makes the load a miss."""

    @abstractmethod
    def _copy(self, save: Any) -> Work:
        """What is to be saved, in memory of its own. What it raises makes nothing of the request saved."""

    def close(self) -> None:
        """Waits for what is under way."""
        self._loaders.shutdown(cancel_futures=True)
        self._saver.close(FLUSH)
        self._prefixes.close()

    def take_stats(self) -> QkvdStats | None:
        """What has come together since the last call."""
        data = self._stats.take()
        return QkvdStats(data=data) if data else None

    # ---- loads ----

    def start_loads(self, meta: QkvdMetadata) -> None:
        """In the background."""
        for load in meta.loads:
            with self._changed:
                self._loading.add(load.request)
            self._loaders.submit(self._load, load)

    def _load(self, load: Load) -> None:
        began = time.monotonic()
        error: Exception | None = None
        try:
            size = self._read(load)
        except Exception as problem:  # a load that fails, for whatever reason, is a miss
            error = problem
            level = logging.WARNING if isinstance(problem, Error) else logging.ERROR
            logger.log(level, "request %s computes what it could not load: %s", load.request, problem)
        if error is None:
            self._stats.add(
                loads=1, load_tokens=load.end - load.begin, load_bytes=size, load_seconds=time.monotonic() - began
            )
        else:
            self._stats.add(loads_failed=1)
        with self._changed:
            self._loading.discard(load.request)
            self._ended.add(load.request)
            if error is not None:
                self._failed.add(load.request)
            self._changed.notify_all()

    def ended_loads(self, idle: bool) -> tuple[set[str], set[str]]:
        """Requests whose loads have ended, and those of them that failed. An idle step waits for one, a little."""
        with self._changed:
            if idle and self._loading and not self._ended:
                self._changed.wait(IDLE_WAIT)
            ended, failed = self._ended, self._failed
            self._ended, self._failed = set(), set()
        return ended, failed

    # ---- saves ----

    def start_saves(self, meta: QkvdMetadata) -> None:
        """Copies what is to be saved; the saver's thread sends it."""
        for save in meta.saves:
            copy = None
            if self._saver.takes(save.request):
                try:
                    copy = self._copy(save)
                except Exception as problem:  # such as no memory for it
                    self._saver.give_up(save.request, problem)
            if copy is None:
                self._saver.done(save.tokens)
            else:
                self._saver.put(copy)
        for name in meta.ended:
            self._saver.end(name)

    def progress(self) -> Progress | None:
        """How many tokens of saves have been sent or given up; None where they are as many as last time."""
        tokens = self._saver.tokens_done
        if tokens == self._told:
            return None
        self._told = tokens
        return Progress({self._rank: tokens})


def rank_of() -> int:
    """Of this process, among those that hold parts of a token's rows."""
    tensor, pipeline = get_tp_group(), get_pp_group()
    return int(pipeline.rank_in_group * tensor.world_size + tensor.rank_in_group)


# ---- rows ----


class RowWorker(Worker):
    """Keys and values, in sessions."""

    def __init__(self, options: Options, vllm_config: Any, kv_cache_config: Any, caches: dict[str, torch.Tensor]):
        self._block_tokens = block_tokens_of(kv_cache_config)
        rank = rank_of()
        self._suffix = "" if world_of(vllm_config) == 1 else f"/{rank}"
        attention = vllm_config.compilation_config.static_forward_context
        self._layers, self._groups = layers_of(kv_cache_config, caches, attention)
        model = geometry(options, vllm_config, self._layers, rank)
        super().__init__(Prefixes(options, model, logger), rank)

    def _read(self, load: Any) -> int:
        return sum(self._read_group(load, group) for group in range(len(self._groups)))

    def _read_group(self, load: Load, group: int) -> int:
        """Rows of the group's layers into its blocks; gives their bytes."""
        tokens, blocks = self._block_tokens[group], load.blocks[group]
        skipped = 0  # blocks that a sliding window does not reach
        while skipped < len(blocks) and blocks[skipped] == 0:
            skipped += 1
        blocks, begin = blocks[skipped:], load.begin + skipped * tokens
        if not blocks or not self._groups[group]:
            return 0
        layers = self._groups[group]
        first = self._layers[layers[0]].cache
        row = first.shape[1] * first.shape[3] * first.element_size()
        chunk = max(CHUNK_BYTES // (row * tokens), 1) * tokens
        landing, at = self._layers[layers[0]].landing(blocks), 0
        for piece in self._prefixes.fetch(load.names[self._rank], layers, begin, load.end, chunk):
            if piece.layer != layers[at]:
                landing.land()
                at += 1
                landing = self._layers[layers[at]].landing(blocks)
            landing.put(piece.k, piece.v)  # type: ignore[arg-type]  # both were asked for
        landing.land()
        if first.is_cuda:
            torch.cuda.current_stream(first.device).synchronize()
        return int(row * (load.end - begin) * len(layers))

    def _copy(self, save: Save) -> Work:
        parts, skip = [], []
        for index, layer in enumerate(self._layers):
            group = self._group_of[index]
            parts.append(layer.copy(save.blocks[group]))
            skip.append(save.begin % self._block_tokens[group])
        return Copied(save, self._suffix, self._layers, parts, skip, self._layers[0].cache.is_cuda)

    @property
    def _group_of(self) -> dict[int, int]:
        return {layer: group for group, layers in enumerate(self._groups) for layer in layers}


def layers_of(
    kv_cache_config: Any, caches: dict[str, torch.Tensor], attention: dict[str, Any]
) -> tuple[list[PagedLayer], list[list[int]]]:
    """The layers of this rank in the model's order, and the indices of each group's. `attention` has their modules."""
    found = []
    for number, group in enumerate(kv_cache_config.kv_cache_groups):
        specs = list(iter_layer_specs(group.kv_cache_spec))
        for place, name in enumerate(group.layer_names):
            if name in caches:
                spec = specs[place if len(specs) == len(group.layer_names) else 0]
                found.append((int(re.findall(r"\d+", name)[0]), name, number, spec))
    found.sort(key=lambda one: one[:2])
    layers: list[PagedLayer] = []
    groups: list[list[int]] = [[] for _ in kv_cache_config.kv_cache_groups]
    for index, (_, name, number, spec) in enumerate(found):
        cache = caches[name]
        key_dim, value_dim = spec.head_size, getattr(spec, "head_size_v", None) or spec.head_size
        split, rest = divmod(spec.block_size, cache.shape[2]) if cache.ndim == 4 else (0, 1)
        if rest or tuple(cache.shape[1::2]) != (spec.num_kv_heads, key_dim + value_dim):
            raise Unimplemented(
                f"the cache of {name} is {list(cache.shape)}: the connector serves [blocks, {spec.num_kv_heads} heads, "
                f"tokens, {key_dim + value_dim}]"
            )
        layers.append(PagedLayer(cache, key_dim, split, order_in(cache, key_dim, attention[name])))
        groups[number].append(index)
    return layers, groups


def order_in(cache: torch.Tensor, key_dim: int, attention: Any) -> torch.Tensor | None:
    """Where a layer's attention backend puts the elements of a block: it is let write their numbers, digit by digit.

    The processor's backend, for one, keeps keys transposed.
    """
    _, heads, tokens, width = cache.shape
    numbers = torch.arange(tokens * width).view(tokens, 1, width).expand(tokens, heads, width)
    slots = torch.arange(tokens, device=cache.device)
    found = torch.zeros(heads, tokens * width, dtype=torch.long)
    base = 256  # whole numbers below it are exact in every dtype
    for digit in range(3):
        rows = (numbers // base**digit % base).to(cache.device, cache.dtype)
        block = torch.empty_strided((1, heads, tokens, width), cache.stride(), dtype=cache.dtype, device=cache.device)
        k, v = rows[..., :key_dim].contiguous(), rows[..., key_dim:].contiguous()
        try:
            attention.impl.do_kv_cache_update(attention, k, v, block, slots)
        except Exception as error:
            raise Unimplemented(f"{type(attention.impl).__name__} does not say where it puts rows: {error}") from error
        found += block.cpu().reshape(heads, -1).long() * base**digit
    return order_of(found)


def geometry(options: Options, vllm_config: Any, layers: list[PagedLayer], rank: int) -> Model:
    """The rank's rows as a model of the daemon. Unimplemented: layers that differ."""
    kinds = {(layer.cache.shape[1], layer.key_dim, layer.cache.shape[3], layer.cache.dtype) for layer in layers}
    if len(kinds) != 1:
        raise Unimplemented(
            f"the model's layers have caches of {len(kinds)} shapes, and the connector codes rows of one; "
            '"opaque": true keeps blocks as they are'
        )
    heads, key_dim, width, dtype = kinds.pop()
    queries = vllm_config.model_config.get_num_attention_heads(vllm_config.parallel_config)
    return Model(
        name=model_name(options, vllm_config, rank),
        layers=len(layers),
        kv_heads=heads,
        q_heads=queries if queries % heads == 0 else heads,
        key_dim=key_dim,
        value_dim=width - key_dim,
        dtype=DTYPES[dtype],
        rope=rope_of(vllm_config.model_config.hf_text_config),
    )


class Work(ABC):
    """What a save has copied."""

    def __init__(self, request: str, tokens: int, parts: list[torch.Tensor], on_its_way: bool):
        self.request = request
        self.tokens = tokens
        self.bytes = sum(part.numel() * part.element_size() for part in parts)
        # The copies come in the model's stream, and another thread reads them.
        self._event = torch.cuda.Event() if on_its_way else None
        if self._event is not None:
            self._event.record()

    def wait(self) -> None:
        """Until the copies are there."""
        if self._event is not None:
            self._event.synchronize()

    @abstractmethod
    def send(self, prefixes: Prefixes) -> int:
        """Gives how many tokens of it are new. Raises `qkvd.Error`."""


class Copied(Work):
    """Rows: whole blocks of each layer, and how many tokens in them are before the first one."""

    def __init__(
        self,
        save: Save,
        suffix: str,
        layers: list[PagedLayer],
        parts: list[torch.Tensor],
        skip: list[int],
        on_its_way: bool,
    ):
        super().__init__(save.request, save.tokens, parts, on_its_way)
        self._save = save
        self._name = save.session + suffix
        self._layers, self._parts, self._skip = layers, parts, skip

    def rows(self, begin: int, end: int) -> list[tuple[Array, Array]]:
        """k and v of each layer, of positions [begin, end)."""
        return [
            layer.rows(part, skip + begin - self._save.begin, end - begin)
            for layer, part, skip in zip(self._layers, self._parts, self._skip, strict=True)
        ]

    def send(self, prefixes: Prefixes) -> int:
        """To its session, which is opened with what is held already; some pages at a time."""
        save, begin = self._save, self._save.begin
        if save.first:
            held = prefixes.open(self._name, save.ids, save.salt)
            if held < begin:  # the session with the prefix has been closed since
                prefixes.drop(self._name)
                raise InvalidArgument(f"of the {begin} tokens before them {held} are still held")
            begin = max(begin, held)
        self.wait()
        at_once = max(SEND_BYTES * save.tokens // self.bytes // PAGE, 1) * PAGE
        for at in range(begin, save.end, at_once):
            end = min(at + at_once, save.end)
            ids = save.ids[len(save.ids) - (save.end - at) : len(save.ids) - (save.end - end)]
            prefixes.append(self._name, at, ids, self.rows(at, end))
        return max(save.end - begin, 0)


class Saver:
    """Sends copied rows, in their order, in a thread. A request whose rows could not be saved once is left alone.

    The scheduler hands out no more than `save_buffer` at a time.
    """

    def __init__(self, prefixes: Prefixes, stats: Totals):
        self._prefixes = prefixes
        self._stats = stats
        self._lock = threading.Lock()
        self.tokens_done = 0  # sent or given up
        self._dropped: set[str] = set()  # requests
        self._queue: queue.SimpleQueue[Work | str | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="qkvd-save", daemon=True)
        self._thread.start()

    def takes(self, request: str) -> bool:
        """Whether rows of this request are worth a copy."""
        with self._lock:
            if request in self._dropped:
                return False
            if not self._prefixes.breaker.open():
                return True
        self._drop(request)
        return False

    def done(self, tokens: int) -> None:
        """So many tokens more are sent or given up."""
        with self._lock:
            self.tokens_done += tokens

    def give_up(self, request: str, problem: Exception) -> None:
        """Rows that cannot be saved are computed again some day."""
        level = logging.WARNING if isinstance(problem, Error) else logging.ERROR
        logger.log(level, "rows of request %s are not saved: %s", request, problem)
        self._drop(request)

    def put(self, copied: Work) -> None:
        """Rows to send."""
        self._queue.put(copied)

    def end(self, request: str) -> None:
        """A request that has no more rows."""
        self._queue.put(request)

    def close(self, patience: float) -> None:
        """Ends when everything has been sent, or `patience` seconds have gone."""
        self._queue.put(None)
        self._thread.join(patience)

    def _run(self) -> None:
        while (work := self._queue.get()) is not None:
            if isinstance(work, str):
                with self._lock:
                    self._dropped.discard(work)
                continue
            try:
                if self.takes(work.request):  # the daemon may not have answered since this was copied
                    self._send(work)
            except Exception as error:
                self.give_up(work.request, error)
            finally:
                self.done(work.tokens)

    def _drop(self, request: str) -> None:
        with self._lock:
            self._dropped.add(request)
        self._stats.add(saves_dropped=1)

    def _send(self, work: Work) -> None:
        began = time.monotonic()
        tokens = work.send(self._prefixes)
        self._stats.add(saves=1, save_tokens=tokens, save_bytes=work.bytes, save_seconds=time.monotonic() - began)
