"""Blocks of vLLM's cache as opaque objects: for caches that are no plain keys and values, such as MLA's latents and fp8.

A block of the engine's, all layers of a rank, is one object. Its name has the hash that vLLM itself gives the block, which
stands for all tokens up to its end, the adapter, the user's salt and images; so a prefix is held as far as its blocks are.

    object   | layout 16 | block of layer 0 | block of layer 1 | ...     bytes as they lie in the engine's memory

`layout` is a hash of what the bytes mean: version 1, and of each layer its attention backend, dtype and shape. Blocks of
another layout are never loaded; engines that share a model and not its layout need a `model_name` of their own.
"""

from __future__ import annotations

import hashlib
import logging
from dataclasses import dataclass
from typing import Any

import torch
from vllm.v1.kv_cache_interface import FullAttentionSpec, iter_layer_specs

from qkvd.arrays import Array
from qkvd.errors import NotFound, Unimplemented
from qkvd.paged import gathered
from qkvd.prefixes import NAMELESS, Options, Prefixes
from qkvd.vllm_scheduler import Load, Scheduler, Sequence, block_tokens_of, model_name, world_of
from qkvd.vllm_worker import SEND_BYTES, Work, Worker, rank_of

logger = logging.getLogger("vllm.qkvd")
LAYOUT = 16  # bytes
LOAD_BYTES = 64 << 20  # of blocks that are on their way at once


def takes_rows(kv_cache_config: Any) -> bool:
    """Whether the cache is one of keys and values that the daemon codes."""
    try:
        block_tokens_of(kv_cache_config)
    except Unimplemented:
        return False
    return True


def opaque_block_tokens_of(vllm_config: Any, kv_cache_config: Any) -> int:
    """Tokens in a block. Unimplemented: blocks that do not have all there is of their tokens."""
    if getattr(vllm_config.cache_config, "calculate_kv_scales", False):
        raise Unimplemented("the scales of calculate_kv_scales differ from run to run: blocks mean nothing to another one")
    groups = kv_cache_config.kv_cache_groups
    for group in groups:
        for spec in iter_layer_specs(group.kv_cache_spec):
            if len(groups) > 1 or not isinstance(spec, FullAttentionSpec):
                raise Unimplemented(
                    f"layer {group.layer_names[0]} has a cache of {type(spec).__name__} in {getattr(spec, 'dtype', None)}, "
                    f"in {len(groups)} groups of layers: the connector serves keys and values of full and sliding-window "
                    "attention in float32, float16 and bfloat16, and blocks of one group of layers with full attention"
                )
    return int(groups[0].kv_cache_spec.block_size)


def tag_of(options: Options, vllm_config: Any, block_tokens: int, rank: int) -> str:
    """What names of a rank's blocks begin with."""
    cache = vllm_config.cache_config
    what = [model_name(options, vllm_config, rank), cache.cache_dtype, cache.prefix_caching_hash_algo, block_tokens]
    return f"vllm/{hashlib.blake2b(repr(what).encode(), digest_size=8).hexdigest()}/"


@dataclass
class BlockSave:
    """Blocks that a step completes, and their hashes."""

    request: str
    names: tuple[str, ...]
    blocks: list[int]
    block_tokens: int

    @property
    def tokens(self) -> int:
        """That are saved."""
        return len(self.names) * self.block_tokens


class BlockScheduler(Scheduler):
    """Finds the blocks of a prompt by their hashes."""

    def __init__(self, options: Options, vllm_config: Any, kv_cache_config: Any):
        super().__init__(options, vllm_config, kv_cache_config)
        (self._tokens,) = self._block_tokens
        self._tags = [tag_of(options, vllm_config, self._tokens, rank) for rank in range(world_of(vllm_config))]

    def _tokens_of(self, vllm_config: Any, kv_cache_config: Any) -> list[int]:
        return [opaque_block_tokens_of(vllm_config, kv_cache_config)]

    def _hashes(self, request: Any, begin: int, end: int) -> tuple[str, ...]:
        """Of the blocks of tokens [begin, end), as far as vLLM has them, and of the epoch."""
        hashes = request.block_hashes[begin // self._tokens : end // self._tokens]
        return tuple(self._epoch + one[:16].hex() for one in hashes)

    def _look_up(self, sequence: Sequence, ids: list[int]) -> None:
        hashes = self._hashes(sequence.request, 0, len(sequence.request.all_token_ids))
        held = len(hashes)
        for tag in self._tags:
            held = self._prefixes.pages_held([tag + one for one in hashes[:held]])
        sequence.held = sequence.saved = held * self._tokens

    def _names(self, sequence: Sequence, begin: int, end: int) -> tuple[str, ...]:
        return self._hashes(sequence.request, begin, end)

    def _save(self, name: str, sequence: Sequence, computed: int, state: Any) -> BlockSave | None:
        begin, end = sequence.saved, computed
        hashes = self._hashes(sequence.request, begin, end)
        if not hashes:
            return None
        sequence.saved = end = begin + len(hashes) * self._tokens
        (blocks,) = self._cover(state.get_block_ids(name), begin, end)
        return BlockSave(name, hashes, blocks, self._tokens)


class BlockWorker(Worker):
    """Blocks of one rank."""

    def __init__(self, options: Options, vllm_config: Any, kv_cache_config: Any, caches: dict[str, torch.Tensor]):
        tokens = opaque_block_tokens_of(vllm_config, kv_cache_config)
        self._tag = tag_of(options, vllm_config, tokens, rank_of())
        attention = vllm_config.compilation_config.static_forward_context
        names = [name for name in kv_cache_config.kv_cache_groups[0].layer_names if name in caches]
        layout: list[Any] = ["qkvd block 1"]
        self._layers: list[Bytes] = []
        for name in names:
            cache = caches[name]
            backend = type(getattr(attention[name], "impl", attention[name])).__name__
            self._layers.append(Bytes(name, cache, kv_cache_config.num_blocks))
            layout.append([name, backend, str(cache.dtype), list(cache.shape[1:]), self._layers[-1].bytes])
        self._layout = hashlib.blake2b(repr(layout).encode(), digest_size=LAYOUT).digest()
        self._block_bytes: int = LAYOUT + sum(layer.bytes for layer in self._layers)
        super().__init__(Prefixes(options, NAMELESS, logger), rank_of())

    def _read(self, load: Load) -> int:
        (blocks,) = load.blocks
        at_once = max(LOAD_BYTES // self._block_bytes, 1)
        for at in range(0, len(blocks), at_once):
            self._read_some([self._tag + name for name in load.names[at : at + at_once]], blocks[at : at + at_once])
        if self._layers[0].cache.is_cuda:
            torch.cuda.current_stream(self._layers[0].cache.device).synchronize()
        return len(blocks) * self._block_bytes

    def _read_some(self, names: list[str], blocks: list[int]) -> None:
        came = torch.empty((len(blocks), self._block_bytes), dtype=torch.uint8)
        rows: Array = came.numpy()
        if (count := self._prefixes.get_pages(names, list(rows))) != len(names):
            raise NotFound(f"of {len(names)} blocks {count} are still held")
        if any(row[:LAYOUT].tobytes() != self._layout for row in rows):
            raise NotFound("blocks are of an engine with another layout: a model_name of its own keeps them apart")
        begin = LAYOUT
        for layer in self._layers:
            layer.put(blocks, came[:, begin : begin + layer.bytes])
            begin += layer.bytes

    def _copy(self, save: BlockSave) -> Work:
        names = [self._tag + name for name in save.names]
        parts = [layer.copy(save.blocks) for layer in self._layers]
        return CopiedBlocks(save, names, self._layout, parts, self._layers[0].cache.is_cuda)


class Bytes:
    """The cache of one layer: dimension 0 has its blocks, or several smaller ones for each."""

    def __init__(self, name: str, cache: torch.Tensor, blocks: int):
        self._split, rest = divmod(cache.shape[0], blocks)
        if rest or not self._split or (cache.stride(-1) != 1 and cache.element_size() > 1):
            raise Unimplemented(
                f"the cache of {name} is {list(cache.shape)} with strides {cache.stride()}, of {blocks} blocks"
            )
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


class CopiedBlocks(Work):
    """Blocks of each layer, [blocks, bytes]."""

    def __init__(self, save: BlockSave, names: list[str], layout: bytes, parts: list[torch.Tensor], on_its_way: bool):
        super().__init__(save.request, save.tokens, parts, on_its_way)
        self._block_tokens = save.block_tokens
        self._names, self._layout, self._parts = names, layout, parts

    def send(self, prefixes: Prefixes) -> int:
        """Those that are not held, some at a time."""
        self.wait()
        at_once, new = max(SEND_BYTES * len(self._names) // max(self.bytes, 1), 1), 0
        for at in range(0, len(self._names), at_once):
            names = self._names[at : at + at_once]
            head = torch.frombuffer(bytearray(self._layout), dtype=torch.uint8).expand(len(names), LAYOUT)
            blocks: Array = torch.cat([head, *(part[at : at + at_once] for part in self._parts)], 1).numpy()
            new += int(prefixes.put_pages(dict(zip(names, blocks, strict=True))))
        return new * self._block_tokens
