"""Blocks of vLLM's cache as opaque objects: for caches that are no plain keys and values of one shape, such as MLA's
latents, fp8, and the states of Mamba and other linear attention.

A block of the engine's, the layers of one group on a rank, is one object; of a pipeline rank without layers of a group it
is the layout alone. Its name has the hash that vLLM itself gives the
block, which stands for all tokens up to its end, the adapter, the user's salt and images, and where there are several
groups (full attention, windows, states) the group's number.

    object   | layout 16 | block of layer 0 | block of layer 1 | ...     bytes as they lie in the engine's memory

`layout` is a hash of what the bytes mean: version 1, and of each layer its attention backend, dtype and shape. Blocks of
another layout are never loaded; engines that share a model and not its layout need a `model_name` of their own.

A prefix is held where a request could go on behind it: of full attention all blocks are there, of a window those that it
reaches, of states the last one (`first_needed`).
"""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Sequence as Listed
from dataclasses import dataclass
from typing import Any

import torch
from vllm.v1.core.kv_cache_utils import resolve_kv_cache_block_sizes
from vllm.v1.kv_cache_interface import (
    ChunkedLocalAttentionSpec,
    FullAttentionSpec,
    MambaSpec,
    SlidingWindowSpec,
    iter_layer_specs,
)

from qkvd.arrays import Array
from qkvd.errors import NotFound, Unimplemented
from qkvd.paged import gathered
from qkvd.prefixes import NAMELESS, Options, Prefixes
from qkvd.vllm_scheduler import Blocks, Scheduler, Sequence, has_rows, layers_in, model_name, world_of
from qkvd.vllm_worker import SEND_BYTES, Work, Worker, rank_of

logger = logging.getLogger("vllm.qkvd")
LAYOUT = 16  # bytes
LOAD_BYTES = 64 << 20  # of blocks that are on their way at once


# ---- which blocks ----


def takes_rows(kv_cache_config: Any) -> bool:
    """Whether the cache is one of keys and values that the daemon codes: in all groups of one shape.

    By the first layer of each, of which alone vLLM tells the scheduler: both halves must come to the same. Where others
    are not like it, the worker's refuses them.
    """
    specs = [next(iter(iter_layer_specs(group.kv_cache_spec))) for group in kv_cache_config.kv_cache_groups]
    if not all(map(has_rows, specs)):
        return False
    shapes = {(spec.num_kv_heads, spec.head_size, getattr(spec, "head_size_v", None), spec.dtype) for spec in specs}
    return len(shapes) <= 1


def first_needed(spec: Any, end: int) -> int:
    """Of the tokens before `end`, the first whose cache is needed to go on there."""
    if isinstance(spec, MambaSpec):
        return end - 1
    if isinstance(spec, SlidingWindowSpec):
        return int(max(end - spec.sliding_window - spec.extra_retained_tokens + 1, 0))
    if isinstance(spec, ChunkedLocalAttentionSpec):
        return int(end // spec.attention_chunk_size * spec.attention_chunk_size)
    return 0


@dataclass(frozen=True)
class Group:
    """Layers that share a table of blocks."""

    spec: Any  # vLLM's, of any of its layers
    tokens: int  # in a block
    hashed: int  # of which vLLM has a hash, and those before
    suffix: str  # of names

    @property
    def at_steps_ends(self) -> bool:
        """Whether a block holds the state that a step ended with, and not what is of its own tokens."""
        return isinstance(self.spec, MambaSpec) and self.spec.mamba_cache_mode != "all"

    def has_state(self, end: int, step: tuple[int, int]) -> bool:
        """Whether the block before token `end` has the state there when a step that begins and ends with these is over.

        A step that begins behind a block copies its state to the next one, and leaves it as it is. Then states within
        answers are saved where the engine schedules a step before the token of the last one is known (async scheduling),
        and with it the block's hash. Blocks for drafts move.
        """
        begin, reached = step
        return end == reached or (end == begin and not self.spec.num_speculative_blocks)

    def names(self, hashes: Listed[bytes], epoch: str, begin: int, end: int) -> list[str]:
        """Of the whole blocks of tokens [begin, end)."""
        ends = range((begin // self.tokens + 1) * self.tokens, end + 1, self.tokens)
        return [
            epoch
            + hashes[(at - 1) // self.hashed][:16].hex()
            + (f".{rest}" if (rest := at % self.hashed) else "")
            + self.suffix
            for at in ends
        ]


def groups_of(vllm_config: Any, kv_cache_config: Any) -> list[Group]:
    """Unimplemented: blocks that do not have all there is of their tokens."""
    if getattr(vllm_config.cache_config, "calculate_kv_scales", False):
        raise Unimplemented("the scales of calculate_kv_scales differ from run to run: blocks mean nothing to another one")
    groups, found = kv_cache_config.kv_cache_groups, []
    hashed = groups[0].kv_cache_spec.block_size
    if len(groups) > 1:
        hashed = resolve_kv_cache_block_sizes(kv_cache_config, vllm_config)[1]
    for number, group in enumerate(groups):
        specs = list(iter_layer_specs(group.kv_cache_spec))
        for spec in specs:
            if not isinstance(spec, FullAttentionSpec | SlidingWindowSpec | ChunkedLocalAttentionSpec | MambaSpec):
                raise Unimplemented(
                    f"{layers_in(group)} a cache of {type(spec).__name__}: the connector serves full, "
                    "sliding-window and chunked attention, and the states of Mamba and other linear attention"
                )
        suffix = f"/{number}" if len(groups) > 1 else ""
        found.append(Group(specs[0], group.kv_cache_spec.block_size, hashed, suffix))
    return found


def tag_of(options: Options, vllm_config: Any, block_tokens: list[int], rank: int) -> str:
    """What names of a rank's blocks begin with."""
    cache, tokens = vllm_config.cache_config, block_tokens if len(block_tokens) > 1 else block_tokens[0]
    what = [model_name(options, vllm_config, rank), cache.cache_dtype, cache.prefix_caching_hash_algo, tokens]
    return f"vllm/{hashlib.blake2b(repr(what).encode(), digest_size=8).hexdigest()}/"


# ---- what the halves tell each other ----


@dataclass
class GroupBlocks:
    """Blocks of one group, and their names without the rank's tag."""

    names: list[str]
    blocks: list[int]


@dataclass
class BlockLoad:
    """Tokens [begin, end) of a request's prompt: of each group the blocks that are needed."""

    request: str
    begin: int
    end: int
    groups: list[GroupBlocks]


@dataclass
class BlockSave:
    """Blocks of each group that a step completes, and how many tokens more of the request are saved then."""

    request: str
    tokens: int
    groups: list[GroupBlocks]


# ---- the scheduler's half ----


class BlockScheduler(Scheduler):
    """Finds the blocks of a prompt by their hashes."""

    def __init__(self, options: Options, vllm_config: Any, kv_cache_config: Any):
        self._groups = groups_of(vllm_config, kv_cache_config)
        super().__init__(options, vllm_config, kv_cache_config)
        self._tags = [tag_of(options, vllm_config, self._block_tokens, rank) for rank in range(world_of(vllm_config))]
        if any(group.at_steps_ends and group.spec.mamba_cache_mode == "none" for group in self._groups):
            logger.warning("vLLM keeps no states of prefixes (mamba_cache_mode none): nothing is saved or loaded")

    def _tokens_of(self, vllm_config: Any, kv_cache_config: Any) -> list[int]:
        return [group.tokens for group in self._groups]

    def _hashed(self, request: Any, end: int) -> int:
        """Tokens below `end` in whole blocks of every group, of which vLLM has the hashes."""
        return min(len(request.block_hashes) * self._groups[0].hashed, end) // self._whole * self._whole

    def _look_up(self, sequence: Sequence, ids: list[int]) -> None:
        """The longest prefix that a request can go on behind, a token left to compute."""
        hashes = sequence.request.block_hashes
        end = self._hashed(sequence.request, len(sequence.request.all_token_ids) - 1)
        held: list[list[bool]] = []
        for group in self._groups:  # a group of full attention, where there is one, bounds what others are asked for
            names = group.names(hashes, self._epoch, 0, end)
            held.append([all(of) for of in zip(*(self._held(group, tag, names) for tag in self._tags), strict=True)])
            if isinstance(group.spec, FullAttentionSpec):
                end = min(end, sum(held[-1]) * group.tokens) // self._whole * self._whole
        while end > 0 and not all(
            all(of[first_needed(group.spec, end) // group.tokens : end // group.tokens])
            for group, of in zip(self._groups, held, strict=True)
        ):
            end -= self._whole
        sequence.held = sequence.saved = end

    def _held(self, group: Group, tag: str, names: list[str]) -> list[bool]:
        """Of each block. Those of full attention mean nothing behind the first that is missing."""
        tagged = [tag + name for name in names]
        if isinstance(group.spec, FullAttentionSpec):
            held = self._prefixes.pages_held(tagged)
            return [place < held for place in range(len(names))]
        return self._prefixes.which_held(tagged)

    def _load(self, sequence: Sequence, begin: int, end: int, blocks: Blocks) -> BlockLoad:
        hashes, groups = sequence.request.block_hashes, []
        for group, ids in zip(self._groups, blocks, strict=True):
            names = group.names(hashes, self._epoch, begin, end)
            needed = [(name, block) for name, block in zip(names, ids, strict=True) if block]
            groups.append(GroupBlocks([name for name, _ in needed], [block for _, block in needed]))
        return BlockLoad(sequence.request.request_id, begin, end, groups)

    def _save(self, name: str, sequence: Sequence, end: int, step: tuple[int, int], state: Any) -> BlockSave | None:
        begin, end = sequence.saved, self._hashed(sequence.request, end)
        if end <= begin:
            return None
        hashes, groups = sequence.request.block_hashes, []
        for group, ids in zip(self._groups, self._cover(state.get_block_ids(name), begin, end), strict=True):
            made = list(zip(group.names(hashes, self._epoch, begin, end), ids, strict=True))
            if group.at_steps_ends:
                made = made[-1:] if group.has_state(end, step) else []
            made = [(name, block) for name, block in made if block]  # of windows, some have gone
            groups.append(GroupBlocks([name for name, _ in made], [block for _, block in made]))
        sequence.saved = end
        return BlockSave(name, end - begin, groups)


# ---- the worker's half ----


class BlockWorker(Worker):
    """Blocks of one rank."""

    def __init__(self, options: Options, vllm_config: Any, kv_cache_config: Any, caches: dict[str, torch.Tensor]):
        groups = groups_of(vllm_config, kv_cache_config)
        self._tag = tag_of(options, vllm_config, [group.tokens for group in groups], rank_of())
        attention = vllm_config.compilation_config.static_forward_context
        self._groups: list[GroupCaches] = []
        for group in kv_cache_config.kv_cache_groups:
            names = [name for name in group.layer_names if name in caches]
            self._groups.append(GroupCaches(names, caches, attention, kv_cache_config.num_blocks))
        self._device = next((of.cache.device for group in self._groups for of in group.caches), torch.device("cpu"))
        super().__init__(Prefixes(options, NAMELESS, logger), rank_of())

    def _read(self, load: Any) -> int:
        size = 0
        for group, part in zip(self._groups, load.groups, strict=True):
            at_once = max(LOAD_BYTES // group.block_bytes, 1)
            for at in range(0, len(part.blocks), at_once):
                self._read_some(group, part.names[at : at + at_once], part.blocks[at : at + at_once])
            size += len(part.blocks) * group.block_bytes
        if self._device.type == "cuda":
            torch.cuda.current_stream(self._device).synchronize()
        return size

    def _read_some(self, group: GroupCaches, names: list[str], blocks: list[int]) -> None:
        came = torch.empty((len(blocks), group.block_bytes), dtype=torch.uint8)
        rows: Array = came.numpy()
        if (count := self._prefixes.get_pages([self._tag + name for name in names], list(rows))) != len(names):
            raise NotFound(f"of {len(names)} blocks {count} are still held")
        if any(row[:LAYOUT].tobytes() != group.layout for row in rows):
            raise NotFound("blocks are of an engine with another layout: a model_name of its own keeps them apart")
        group.put(blocks, came[:, LAYOUT:])

    def _copy(self, save: BlockSave) -> Work:
        parts = [
            CopiedGroup([self._tag + name for name in part.names], group.layout, group.copy(part.blocks))
            for group, part in zip(self._groups, save.groups, strict=True)
            if part.blocks
        ]
        return CopiedBlocks(save, parts, self._device.type == "cuda")


class GroupCaches:
    """The layers of one group that a rank has, which may be none; of states, the tensors of each layer."""

    def __init__(self, names: list[str], caches: dict[str, Any], attention: dict[str, Any], blocks: int):
        what: list[Any] = ["qkvd block 1"]
        self.caches: list[Bytes] = []
        for name in names:
            backend = type(getattr(attention[name], "impl", attention[name])).__name__
            tensors = caches[name]
            for cache in tensors if isinstance(tensors, list | tuple) else [tensors]:
                made = Bytes(name, cache, blocks)
                what.append([name, backend, str(cache.dtype), list(made.shape), made.bytes])
                self.caches.append(made)
        self.layout = hashlib.blake2b(repr(what).encode(), digest_size=LAYOUT).digest()
        self.block_bytes: int = LAYOUT + sum(cache.bytes for cache in self.caches)

    def copy(self, blocks: list[int]) -> list[torch.Tensor]:
        """Of each cache, [blocks, bytes]."""
        return [cache.copy(blocks) for cache in self.caches]

    def put(self, blocks: list[int], data: torch.Tensor) -> None:
        """The same back, one after the other."""
        begin = 0
        for cache in self.caches:
            cache.put(blocks, data[:, begin : begin + cache.bytes])
            begin += cache.bytes


class Bytes:
    """The cache of one layer: dimension 0 has its blocks, or several smaller ones for each."""

    def __init__(self, name: str, cache: torch.Tensor, blocks: int):
        # As it lies in memory: states of convolutions may be transposed.
        cache = cache.permute(0, *sorted(range(1, cache.ndim), key=lambda of: -cache.stride(of)))
        self._split, rest = divmod(cache.shape[0], blocks)
        if rest or not self._split or (cache.stride(-1) != 1 and cache.element_size() > 1):
            raise Unimplemented(
                f"the cache of {name} is {list(cache.shape)} with strides {cache.stride()}, of {blocks} blocks"
            )
        self.shape = cache.shape[1:]
        self.cache = cache.view(torch.uint8)
        self.bytes = self._split * (self.cache[0].numel())

    def _places(self, blocks: list[int]) -> torch.Tensor:
        places = torch.tensor(blocks, dtype=torch.long, device=self.cache.device)
        return (places[:, None] * self._split + torch.arange(self._split, device=places.device)).flatten()

    def copy(self, blocks: list[int]) -> torch.Tensor:
        """[blocks, bytes], in the processor's memory."""
        return gathered(self.cache, self._places(blocks)).view(len(blocks), -1)

    def put(self, blocks: list[int], data: torch.Tensor) -> None:
        """The same back."""
        cache: Any = self.cache
        data = data.reshape(len(blocks) * self._split, *cache.shape[1:])
        cache.index_copy_(0, self._places(blocks), data.to(cache.device))


@dataclass
class CopiedGroup:
    """Blocks of the caches of one group, [blocks, bytes] of each."""

    names: list[str]
    layout: bytes
    parts: list[torch.Tensor]


class CopiedBlocks(Work):
    """Blocks of each group."""

    def __init__(self, save: BlockSave, groups: list[CopiedGroup], on_its_way: bool):
        super().__init__(save.request, save.tokens, [part for group in groups for part in group.parts], on_its_way)
        self._groups = groups

    def send(self, prefixes: Prefixes) -> int:
        """Those that are not held, some at a time."""
        self.wait()
        new = sum(self._send_group(prefixes, group) for group in self._groups)
        blocks = sum(len(group.names) for group in self._groups)
        return self.tokens * new // max(blocks, 1)

    def _send_group(self, prefixes: Prefixes, group: CopiedGroup) -> int:
        block_bytes, new = LAYOUT + sum(part.shape[1] for part in group.parts), 0
        at_once = max(SEND_BYTES // block_bytes, 1)
        for at in range(0, len(group.names), at_once):
            names = group.names[at : at + at_once]
            head = torch.frombuffer(bytearray(group.layout), dtype=torch.uint8).expand(len(names), LAYOUT)
            blocks: Array = torch.cat([head, *(part[at : at + at_once] for part in group.parts)], 1).numpy()
            new += prefixes.put_pages(dict(zip(names, blocks, strict=True)))
        return new
