"""The scheduler's half of the connector for vLLM: which prefixes are held, and which rows are to be loaded and saved."""

from __future__ import annotations

import hashlib
import json
import logging
import math
import os
import re
import secrets
import time
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorMetadata, KVConnectorWorkerMetadata
from vllm.v1.kv_cache_interface import FullAttentionSpec, MLAAttentionSpec, SlidingWindowSpec, iter_layer_specs

from qkvd.arrays import Array
from qkvd.errors import Unimplemented
from qkvd.prefixes import NAMELESS, PAGE, Options, Prefixes
from qkvd.vllm_events import Events, Told, events_of

logger = logging.getLogger("vllm.qkvd")
DTYPES: dict[torch.dtype, Any] = {torch.float32: "fp32", torch.float16: "fp16", torch.bfloat16: "bf16"}
Blocks = tuple[list[int], ...]  # of each group of layers


# ---- what the scheduler's half tells the worker's ----


@dataclass
class Load:
    """Tokens [begin, end) of a request's prompt, whole blocks."""

    request: str
    names: tuple[str, ...]  # of the session of each rank
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

    @property
    def tokens(self) -> int:
        """That are saved."""
        return self.end - self.begin


@dataclass
class QkvdMetadata(KVConnectorMetadata):  # type: ignore[misc]
    """Of one step."""

    loads: list[Any] = field(default_factory=list)  # Load, or BlockLoad
    saves: list[Any] = field(default_factory=list)  # Save, or BlockSave
    ended: set[str] = field(default_factory=set)  # requests
    idle: bool = False  # no token is computed in this step


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
    if world_of(vllm_config) == 1:
        return name
    parallel = vllm_config.parallel_config
    tensor, pipeline = parallel.tensor_parallel_size, parallel.pipeline_parallel_size
    return f"{name}:tp{rank % tensor}of{tensor}:pp{rank // tensor}of{pipeline}"


def salt_of(options: Options, request: Any, epoch: str) -> bytes:
    """Of a request: its adapter, its user's salt, its images and where they stand; and the epoch."""
    adapter = request.lora_request
    return options.salt(
        None if adapter is None else [adapter.lora_name, adapter.lora_path],
        request.cache_salt,
        [[item.identifier, item.mm_position.offset, item.mm_position.length] for item in request.mm_features] or None,
        *epoch_part(epoch),
    )


def epoch_part(epoch: str) -> list[str]:
    """What the salt has of an epoch; engines that were never reset share what they hold."""
    return [f"epoch {epoch}"] if epoch else []


def layers_in(group: Any) -> str:
    """For an error's text; a pipeline rank may have none of a group's."""
    return f"layer {group.layer_names[0]} has" if group.layer_names else "layers of another rank have"


def has_rows(spec: Any) -> bool:
    """Whether the cache of such a layer is keys and values that the daemon codes."""
    attention = isinstance(spec, FullAttentionSpec | SlidingWindowSpec) and not isinstance(spec, MLAAttentionSpec)
    return attention and spec.dtype in DTYPES


def block_tokens_of(kv_cache_config: Any) -> list[int]:
    """Tokens in a block of each group of layers. Unimplemented: layers whose cache is no keys and values."""
    for group in kv_cache_config.kv_cache_groups:
        for spec in iter_layer_specs(group.kv_cache_spec):
            if not has_rows(spec):
                raise Unimplemented(
                    f"{layers_in(group)} a cache of {type(spec).__name__} in {getattr(spec, 'dtype', None)}: "
                    "the connector codes keys and values of full and sliding-window attention, in float32, float16 and "
                    'bfloat16; "opaque": true keeps blocks as they are'
                )
    return [group.kv_cache_spec.block_size for group in kv_cache_config.kv_cache_groups]


def token_bytes_of(kv_cache_config: Any) -> int:
    """Bytes of a token's rows in all layers, on one rank."""
    size = 0
    for group in kv_cache_config.kv_cache_groups:
        specs = list(iter_layer_specs(group.kv_cache_spec))
        layers = len(group.layer_names) if len(specs) == 1 else 1
        size += layers * sum(spec.page_size_bytes for spec in specs) // group.kv_cache_spec.block_size
    return max(size, 1)


# ---- what the worker's half tells the scheduler's ----


@dataclass
class Progress(KVConnectorWorkerMetadata):  # type: ignore[misc]
    """Of each rank, how many tokens of saves have been sent or given up since it began."""

    done: dict[int, int]

    def aggregate(self, other: KVConnectorWorkerMetadata) -> KVConnectorWorkerMetadata:
        """With another rank's, or a later one of the same."""
        ranks = self.done.keys() | other.done.keys()
        return Progress({rank: max(self.done.get(rank, 0), other.done.get(rank, 0)) for rank in ranks})


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
    loading: bool = False
    load_failed: bool = False
    outdated: bool = False  # it began before the last reset
    asked_at: float = 0.0  # the clock, when it was first asked for


class Scheduler:
    """Finds prefixes, and says which rows are to be loaded and saved."""

    def __init__(self, options: Options, vllm_config: Any, kv_cache_config: Any):
        transfer = vllm_config.kv_transfer_config
        self._options = options
        self._loads, self._saves = bool(transfer.is_kv_consumer), bool(transfer.is_kv_producer)
        self._block_tokens = self._tokens_of(vllm_config, kv_cache_config)
        self._whole = math.lcm(*self._block_tokens)  # tokens that are whole blocks in every group
        self._models = [model_name(options, vllm_config, rank) for rank in range(world_of(vllm_config))]
        # Lookups name the model; its geometry is known to the workers alone.
        self._prefixes = Prefixes(options, NAMELESS, logger)
        self._sequences: dict[str, Sequence] = {}
        self._to_load: list[Any] = []
        self._prefix = f"vllm/{secrets.token_hex(6)}"
        self._opened = 0
        self._epoch = ""  # "": never reset
        # Tokens that wait to be saved, at most; those that were handed out, and what each rank has done of them.
        self._waiting_most = options.save_buffer // token_bytes_of(kv_cache_config)
        self._handed_out = 0
        self._done = dict.fromkeys(range(world_of(vllm_config)), 0)
        self._vllm_config = vllm_config
        self._events = self._begin_events()

    def _begin_events(self) -> Events | None:
        """Of what requests without adapters, salts and images can load."""
        if not self._loads:
            return None
        salt = self._options.salt(None, None, None, *epoch_part(self._epoch))
        return events_of(self._options, self._prefixes, self._vllm_config, self._models[0], salt)

    def _tokens_of(self, vllm_config: Any, kv_cache_config: Any) -> list[int]:
        """In a block of each group of layers."""
        return block_tokens_of(kv_cache_config)

    def close(self) -> None:
        """Closes the connection."""
        if self._events is not None:
            self._events.close()
        self._prefixes.close()

    def reset(self) -> bool:
        """The model's weights may be others: what is held is found no more, and requests under way are left alone.

        False where some of these are loading: their rows are those of before.
        """
        self._epoch = secrets.token_hex(8)
        for sequence in self._sequences.values():
            sequence.outdated = True
        if self._events is not None:
            # What was told routers forget by the engine's own AllBlocksCleared.
            self._events.close()
            self._events = self._begin_events()
        return not any(sequence.loading for sequence in self._sequences.values())

    def take_events(self) -> list[Told]:
        """Of one step; none where none are published."""
        return [] if self._events is None else self._events.take()

    def matched(self, request: Any, computed: int) -> tuple[int | None, bool]:
        """Tokens beyond `computed` that the daemon holds, in whole blocks; at least one token is left to compute."""
        sequence = self._sequences.get(request.request_id)
        if sequence is None:
            salt = salt_of(self._options, request, self._epoch)
            sequence = Sequence(request, salt, asked_at=time.monotonic())
            self._sequences[request.request_id] = sequence
        if not self._has_ids(request) or sequence.load_failed or sequence.outdated:
            return 0, False
        ids = request.all_token_ids
        self._look_up(sequence, ids[: len(ids) // PAGE * PAGE])
        sequence.computed = computed
        if not self._loads:
            return 0, False
        whole, most = self._whole, len(ids) - 1
        hit, announced = (min(tokens, most) // whole * whole for tokens in (sequence.held, self._announced(request)))
        if max(hit, computed) < announced and self._may_wait(sequence):
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
        sequence.loading = True
        self._to_load.append(self._load(sequence, begin, end, self._cover(blocks, begin, end)))

    def _load(self, sequence: Sequence, begin: int, end: int, blocks: Blocks) -> Any:
        """What tells the workers to load these tokens."""
        return Load(sequence.request.request_id, sequence.sessions, begin, end, blocks)

    def _cover(self, blocks: Blocks, begin: int, end: int) -> Blocks:
        """The blocks of positions [begin, end)."""
        return tuple(
            list(ids[begin // tokens : -(-end // tokens)]) for ids, tokens in zip(blocks, self._block_tokens, strict=True)
        )

    def take_output(self, output: Any) -> None:
        """What the workers tell of a step."""
        for name in output.finished_recving or ():
            if name in self._sequences:
                self._sequences[name].loading = False
        self.failed(output.failed_recving or ())
        if output.kv_connector_worker_meta is not None:
            self._done.update(output.kv_connector_worker_meta.done)

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
            sequence = self._sequences.get(name)
            if sequence is None or sequence.outdated or not self._has_ids(sequence.request):
                continue
            # Of drafts and of tokens still on their way the ids are not known yet. What goes beyond the buffer comes with a
            # later step of the request.
            reached, begin = computed + output.num_scheduled_tokens[name], sequence.saved
            end = min(reached, len(sequence.request.all_token_ids), begin + self._free())
            save = self._save(name, sequence, end, (computed, reached), output.kv_connector_block_state)
            if save is not None:
                meta.saves.append(save)
                self._handed_out += sequence.saved - begin
        return meta

    def _free(self) -> int:
        """Tokens that may be handed out to be saved."""
        return max(self._waiting_most - (self._handed_out - min(self._done.values())), 0)

    def _save(self, name: str, sequence: Sequence, end: int, step: tuple[int, int], state: Any) -> Any:
        """The pages of a request below `end` that are not saved yet: a Save, or None. `step`: the tokens that the step
        begins and ends with."""
        ids = sequence.request.all_token_ids
        begin, end = sequence.saved, end // PAGE * PAGE
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
