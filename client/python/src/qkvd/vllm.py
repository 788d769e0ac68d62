"""A connector for vLLM 0.32: prefixes that any engine has computed come from qkvd instead of being computed again.

    vllm serve MODEL --kv-transfer-config '{"kv_connector": "QkvdConnector", "kv_connector_module_path": "qkvd.vllm",
      "kv_role": "kv_both", "kv_connector_extra_config": {"target": "unix:/run/qkvd.sock"}}'

`kv_connector_extra_config` takes the fields of `qkvd.prefixes.Options`.

The scheduler's half asks the daemon for the longest prefix of a prompt (Match), one call for each request. The worker's
half loads it in the background while other requests run, and copies full pages of 64 tokens as they are computed, which a
thread then sends. A step waits for neither. What fails is a miss: a request whose load failed is computed, rows
that cannot be saved are not. Rows of a tensor-parallel or pipeline rank are a model of their own in the daemon.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import queue
import re
import secrets
import threading
import time
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorMetadata,
    KVConnectorRole,
    KVConnectorTransferResults,
    SupportsHMA,
)
from vllm.distributed.parallel_state import get_pp_group, get_tp_group
from vllm.v1.kv_cache_interface import FullAttentionSpec, MLAAttentionSpec, SlidingWindowSpec, iter_layer_specs

from qkvd.arrays import Array
from qkvd.configs import rope_of
from qkvd.errors import Error, InvalidArgument, Unimplemented
from qkvd.model import Model
from qkvd.paged import PagedLayer, order_of
from qkvd.prefixes import PAGE, Options, Prefixes
from qkvd.vllm_events import Told, events_of
from qkvd.vllm_stats import QkvdPromMetrics, QkvdStats, Totals

logger = logging.getLogger("vllm.qkvd")
DTYPES: dict[torch.dtype, Any] = {torch.float32: "fp32", torch.float16: "fp16", torch.bfloat16: "bf16"}
LOADERS = 2  # threads
CHUNK_BYTES = 1 << 20  # of rows in a message of a load
IDLE_WAIT = 0.005  # seconds that a step without tokens waits for loads, instead of turning at once
FLUSH = 30.0  # seconds that a worker which ends gives to rows that wait to be saved
Blocks = tuple[list[int], ...]  # of each group of layers


# ---- what the scheduler's half tells the worker's ----


@dataclass
class Load:
    """Rows [begin, end) of a request's prompt, whole blocks, from a session of each rank."""

    request: str
    sessions: tuple[str, ...]
    begin: int
    end: int
    blocks: Blocks


@dataclass
class Save:
    """Rows [begin, end) that this step completes, whole pages. The blocks are those that cover them."""

    request: str
    session: str
    begin: int
    end: int
    ids: Array  # of these rows; of all rows up to `end` where it is the session's first save
    first: bool
    salt: bytes
    blocks: Blocks


@dataclass
class QkvdMetadata(KVConnectorMetadata):  # type: ignore[misc]
    """Of one step."""

    loads: list[Load] = field(default_factory=list)
    saves: list[Save] = field(default_factory=list)
    ended: set[str] = field(default_factory=set)  # requests
    idle: bool = False  # no token is computed in this step


class QkvdConnector(KVConnectorBase_V1, SupportsHMA):  # type: ignore[misc]
    """The connector. An engine makes one for its scheduler and one for each worker."""

    def __init__(self, vllm_config: Any, role: KVConnectorRole, kv_cache_config: Any):
        super().__init__(vllm_config, role, kv_cache_config)
        # To fail a request because a cache has lost its rows is never what is wanted.
        self._kv_transfer_config.kv_load_failure_policy = "recompute"
        options = Options.of(self._kv_transfer_config.kv_connector_extra_config)
        self._scheduler: Scheduler | None = None
        self._worker: Worker | None = None
        if role is KVConnectorRole.SCHEDULER:
            self._scheduler = Scheduler(options, vllm_config, kv_cache_config)
        else:
            self._options = options

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
        """Loads that have failed are not tried again."""
        assert self._scheduler is not None
        self._scheduler.failed(connector_output.failed_recving)

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
        self._worker = Worker(self._options, self._vllm_config, self._kv_cache_config, kv_caches)

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


# ---- which model and which rows ----


def world_of(vllm_config: Any) -> int:
    """Ranks that hold parts of a token's rows. Unimplemented: ranks that hold parts of the tokens."""
    parallel = vllm_config.parallel_config
    for name in ("decode_context_parallel_size", "prefill_context_parallel_size"):
        if getattr(parallel, name, 1) > 1:
            raise Unimplemented(
                f"{name} is {getattr(parallel, name)}: the connector serves tensor and pipeline parallelism"
            )
    return int(parallel.tensor_parallel_size * parallel.pipeline_parallel_size)


def model_name(options: Options, vllm_config: Any, rank: int) -> str:
    """The daemon's name of a rank's rows: the same in every engine that computes the same rows.

    Where the user gives none it has the model's own name and a hash of its place and configuration.
    """
    name = options.model_name
    if not name:
        model = vllm_config.model_config
        place = os.path.realpath(model.model) if os.path.isdir(model.model) else model.model
        config = model.hf_config.to_dict()
        for passing in ("transformers_version", "_name_or_path"):
            config.pop(passing, None)
        what = [place, model.revision, str(model.dtype), model.quantization, vllm_config.cache_config.cache_dtype, config]
        digest = hashlib.blake2b(json.dumps(what, default=str, sort_keys=True).encode(), digest_size=6).hexdigest()
        short = re.sub(r"[^A-Za-z0-9._@-]", "-", os.path.basename(place.rstrip("/")))[:80]
        name = f"{short}:{digest}"
    world = world_of(vllm_config)
    return name if world == 1 else f"{name}:{rank}of{world}"


def salt_of(options: Options, request: Any) -> bytes:
    """Of a request: its adapter, its user's salt, its images and where they stand."""
    adapter = request.lora_request
    return options.salt(
        None if adapter is None else [adapter.lora_name, adapter.lora_path],
        request.cache_salt,
        [[item.identifier, item.mm_position.offset, item.mm_position.length] for item in request.mm_features] or None,
    )


def block_tokens_of(kv_cache_config: Any) -> list[int]:
    """Tokens in a block of each group of layers. Unimplemented: layers whose cache is no keys and values."""
    for group in kv_cache_config.kv_cache_groups:
        for spec in iter_layer_specs(group.kv_cache_spec):
            served = isinstance(spec, FullAttentionSpec | SlidingWindowSpec) and not isinstance(spec, MLAAttentionSpec)
            if not served or spec.dtype not in DTYPES:
                raise Unimplemented(
                    f"layer {group.layer_names[0]} has a cache of {type(spec).__name__} in {getattr(spec, 'dtype', None)}: "
                    "the connector serves keys and values of full and sliding-window attention, in float32, float16 and "
                    "bfloat16"
                )
    return [group.kv_cache_spec.block_size for group in kv_cache_config.kv_cache_groups]


# ---- the scheduler's half ----


@dataclass
class Sequence:
    """What the scheduler's half knows of a request."""

    request: Any
    salt: bytes
    sessions: tuple[str, ...] = ()  # that hold its prefix, of each rank
    held: int = 0  # tokens of the prefix that all of them hold
    computed: int = 0  # tokens that the engine itself has, when the daemon was asked
    saved: int = 0  # positions below are held or on their way
    session: str = ""  # that it is saved to, once that has begun
    load_failed: bool = False
    asked_at: float = 0.0  # the clock, when it was first asked for


class Scheduler:
    """Finds prefixes, and says which rows are to be loaded and saved."""

    def __init__(self, options: Options, vllm_config: Any, kv_cache_config: Any):
        transfer = vllm_config.kv_transfer_config
        self._options = options
        self._loads, self._saves = bool(transfer.is_kv_consumer), bool(transfer.is_kv_producer)
        self._block_tokens = block_tokens_of(kv_cache_config)
        self._models = [model_name(options, vllm_config, rank) for rank in range(world_of(vllm_config))]
        # Lookups name the model; its geometry is known to the workers alone.
        nameless = Model(name="-", layers=1, kv_heads=1, q_heads=1, key_dim=8, value_dim=8)
        self._prefixes = Prefixes(options, nameless, logger)
        self._events = events_of(options, self._prefixes, vllm_config, self._models[0]) if self._loads else None
        self._sequences: dict[str, Sequence] = {}
        self._to_load: list[Load] = []
        self._prefix = f"vllm/{secrets.token_hex(6)}"
        self._opened = 0

    def close(self) -> None:
        """Closes the connection."""
        if self._events is not None:
            self._events.close()
        self._prefixes.close()

    def take_events(self) -> list[Told]:
        """Of one step; none where none are published."""
        return [] if self._events is None else self._events.take()

    def matched(self, request: Any, computed: int) -> tuple[int | None, bool]:
        """Tokens beyond `computed` that the daemon holds, in whole blocks; at least one token is left to compute."""
        sequence = self._sequences.get(request.request_id)
        if sequence is None:
            sequence = Sequence(request, salt_of(self._options, request), asked_at=time.monotonic())
            self._sequences[request.request_id] = sequence
        if not self._has_ids(request) or sequence.load_failed:
            return 0, False
        ids = request.all_token_ids
        self._look_up(sequence, ids[: len(ids) // PAGE * PAGE])
        sequence.computed = computed
        if not self._loads:
            return 0, False
        whole = max(self._block_tokens)
        hit = min(sequence.held, len(ids) - 1) // whole * whole
        if hit < self._announced(request) // whole * whole and self._may_wait(sequence):
            return None, False
        return (hit - computed, True) if hit > computed else (0, False)

    def _has_ids(self, request: Any) -> bool:
        return request.prompt_token_ids is not None and request.prompt_is_token_ids is None

    def _look_up(self, sequence: Sequence, ids: list[int]) -> None:
        found = []
        for model in self._models:
            found.append(self._prefixes.match(ids, sequence.salt, model))
            if not found[-1].tokens:
                break
        sequence.held = min((match.tokens for match in found), default=0) if len(found) == len(self._models) else 0
        sequence.sessions = tuple(match.session for match in found)
        if not sequence.session:
            sequence.saved = sequence.held

    def _announced(self, request: Any) -> int:
        """Tokens that a producer has said it has saved."""
        params = request.kv_transfer_params or {}
        tokens = params.get("qkvd_tokens", 0)
        return tokens if isinstance(tokens, int) and params.get("do_remote_prefill") else 0

    def _may_wait(self, sequence: Sequence) -> bool:
        waited = time.monotonic() - sequence.asked_at
        return waited < self._options.prefill_wait and not self._prefixes.breaker.open()

    def load(self, request: Any, blocks: Blocks, tokens: int) -> None:
        """`blocks` are all of the request's; `tokens` after those that the engine has are to be loaded."""
        sequence = self._sequences[request.request_id]
        begin, end = sequence.computed, sequence.computed + tokens
        self._to_load.append(Load(request.request_id, sequence.sessions, begin, end, self._cover(blocks, begin, end)))

    def _cover(self, blocks: Blocks, begin: int, end: int) -> Blocks:
        """The blocks of positions [begin, end)."""
        return tuple(
            list(ids[begin // tokens : -(-end // tokens)]) for ids, tokens in zip(blocks, self._block_tokens, strict=True)
        )

    def failed(self, requests: Iterable[str]) -> None:
        """What these were to load is computed, and saved anew."""
        for name in requests:
            if name in self._sequences:
                self._sequences[name].load_failed = True
                if not self._sequences[name].session:
                    self._sequences[name].saved = 0

    def step(self, output: Any) -> QkvdMetadata:
        """Of one step."""
        loads, self._to_load = self._to_load, []
        meta = QkvdMetadata(loads, ended=set(output.finished_req_ids), idle=output.total_num_scheduled_tokens == 0)
        if not self._saves:
            return meta
        cached = output.scheduled_cached_reqs
        before = {new.req_id: new.num_computed_tokens for new in output.scheduled_new_reqs}
        before.update(zip(cached.req_ids, cached.num_computed_tokens, strict=True))
        for name, computed in before.items():
            save = self._save(name, computed + output.num_scheduled_tokens[name], output.kv_connector_block_state)
            if save is not None:
                meta.saves.append(save)
        return meta

    def _save(self, name: str, computed: int, state: Any) -> Save | None:
        """The pages of a request that are complete when `computed` of its tokens are."""
        sequence = self._sequences.get(name)
        if sequence is None or not self._has_ids(sequence.request):
            return None
        ids = sequence.request.all_token_ids
        # Of drafts and of tokens still on their way the ids are not known yet.
        begin, end = sequence.saved, min(computed, len(ids)) // PAGE * PAGE
        if end <= begin:
            return None
        blocks = self._cover(state.get_block_ids(name), begin, end)
        if any(0 in group for group in blocks):
            return None  # a sliding window has left rows behind that nobody has saved
        first = not sequence.session
        if first:
            self._opened += 1
            sequence.session = f"{self._prefix}/{self._opened}"
        sequence.saved = end
        wanted = np.array(ids[0 if first else begin : end], np.uint32)
        return Save(name, sequence.session, begin, end, wanted, first, sequence.salt, blocks)

    def finished(self, request: Any) -> dict[str, Any] | None:
        """What a consumer needs to know of a request that has ended here."""
        sequence = self._sequences.pop(request.request_id, None)
        params = request.kv_transfer_params or {}
        if sequence is None or not params.get("do_remote_decode"):
            return None
        return {"do_remote_prefill": True, "do_remote_decode": False, "qkvd_tokens": sequence.saved}


# ---- the worker's half ----


class Worker:
    """Loads and saves the rows of one rank."""

    def __init__(self, options: Options, vllm_config: Any, kv_cache_config: Any, caches: dict[str, torch.Tensor]):
        self._block_tokens = block_tokens_of(kv_cache_config)
        tensor, pipeline = get_tp_group(), get_pp_group()
        self._rank = pipeline.rank_in_group * tensor.world_size + tensor.rank_in_group
        world = world_of(vllm_config)
        self._suffix = "" if world == 1 else f"/{self._rank}"
        attention = vllm_config.compilation_config.static_forward_context
        self._layers, self._groups = layers_of(kv_cache_config, caches, attention)
        self._prefixes = Prefixes(options, geometry(options, vllm_config, self._layers, self._rank), logger)
        self._stats = Totals()
        self._loaders = ThreadPoolExecutor(LOADERS, "qkvd-load")
        self._changed = threading.Condition()
        self._loading: set[str] = set()
        self._ended: set[str] = set()
        self._failed: set[str] = set()
        self._saver = Saver(self._prefixes, options.save_buffer, self._stats)

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
            size = sum(self._load_group(load, group) for group in range(len(self._groups)))
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

    def _load_group(self, load: Load, group: int) -> int:
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
        for piece in self._prefixes.fetch(load.sessions[self._rank], layers, begin, load.end, chunk):
            if piece.layer != layers[at]:
                landing.land()
                at += 1
                landing = self._layers[layers[at]].landing(blocks)
            landing.put(piece.k, piece.v)  # type: ignore[arg-type]  # both were asked for
        landing.land()
        if first.is_cuda:
            torch.cuda.current_stream(first.device).synchronize()
        return int(row * (load.end - begin) * len(layers))

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
        """Copies the rows; the saver's thread sends them."""
        for save in meta.saves:
            if not self._saver.takes(save):
                continue
            parts, skip = [], []
            for index, layer in enumerate(self._layers):
                group = self._group_of[index]
                parts.append(layer.copy(save.blocks[group]))
                skip.append(save.begin % self._block_tokens[group])
            self._saver.put(Copied(save, self._suffix, self._layers, parts, skip))
        for name in meta.ended:
            self._saver.end(name)

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
        raise Unimplemented(f"the model's layers have caches of {len(kinds)} shapes; the connector serves one")
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


@dataclass
class Copied:
    """Rows of a save, in memory of their own."""

    save: Save
    suffix: str  # of the rank's sessions
    layers: list[PagedLayer]
    parts: list[torch.Tensor]  # whole blocks, of each layer
    skip: list[int]  # tokens before `begin`, of each layer

    def __post_init__(self) -> None:
        self.bytes = sum(part.numel() * part.element_size() for part in self.parts)
        # The copies lie in the model's stream, and another thread reads them.
        self._event = torch.cuda.Event() if self.parts[0].is_cuda else None
        if self._event is not None:
            self._event.record()

    def rows(self, begin: int) -> list[tuple[Array, Array]]:
        """k and v of each layer, from position `begin` on."""
        if self._event is not None:
            self._event.synchronize()
        save = self.save
        return [
            layer.rows(part, skip + begin - save.begin, save.end - begin)
            for layer, part, skip in zip(self.layers, self.parts, self.skip, strict=True)
        ]


class Saver:
    """Sends copied rows, in their order, in a thread. A request whose rows could not be saved once is left alone."""

    def __init__(self, prefixes: Prefixes, limit: int, stats: Totals):
        self._prefixes = prefixes
        self._limit = limit
        self._stats = stats
        self._lock = threading.Lock()
        self._waiting = 0  # bytes
        self._dropped: set[str] = set()  # requests
        self._queue: queue.SimpleQueue[Copied | str | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="qkvd-save", daemon=True)
        self._thread.start()

    def takes(self, save: Save) -> bool:
        """Whether rows of this save are worth a copy."""
        with self._lock:
            if save.request in self._dropped:
                return False
            if self._waiting < self._limit and not self._prefixes.breaker.open():
                return True
            self._dropped.add(save.request)
        self._stats.add(saves_dropped=1)
        return False

    def put(self, copied: Copied) -> None:
        """Rows to send."""
        with self._lock:
            self._waiting += copied.bytes
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
                if work.save.request not in self._dropped:
                    self._send(work)
            except Exception as error:  # rows that cannot be saved are computed again some day
                level = logging.WARNING if isinstance(error, Error) else logging.ERROR
                logger.log(level, "rows of request %s are not saved: %s", work.save.request, error)
                self._drop(work)
            finally:
                with self._lock:
                    self._waiting -= work.bytes

    def _drop(self, work: Copied) -> None:
        with self._lock:
            self._dropped.add(work.save.request)
        self._stats.add(saves_dropped=1)

    def _send(self, work: Copied) -> None:
        save, began = work.save, time.monotonic()
        name, begin = save.session + work.suffix, save.begin
        if save.first:
            held = self._prefixes.open(name, save.ids, save.salt)
            if held < begin:  # the session with the prefix has been closed since
                self._prefixes.drop(name)
                raise InvalidArgument(f"of the {begin} tokens before them {held} are still held")
            begin = max(begin, held)
        if begin < save.end:
            ids = save.ids[-(save.end - begin) :]
            self._prefixes.append(name, begin, ids, work.rows(begin))
        self._stats.add(saves=1, save_tokens=save.end - begin, save_bytes=work.bytes, save_seconds=time.monotonic() - began)
