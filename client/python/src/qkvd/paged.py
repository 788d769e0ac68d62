"""Between an engine's paged cache in torch and rows as the daemon has them.

A layer's cache is [blocks, kv_heads, block_tokens, key_dim + value_dim]: a region for each head of a block, in which an
attention backend puts keys and values as it likes (`order`). An engine's block may be several of these in a row (`split`).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from qkvd.arrays import Array, as_numpy
from qkvd.errors import Unimplemented

PIECE_BYTES = 16 << 20  # of a GPU's memory that a copy to the processor's takes


class PagedLayer:
    """The cache of one layer. order: of each element of [block_tokens, key_dim + value_dim], where in its region it lies;
    None: it lies there as it is read."""

    def __init__(self, cache: torch.Tensor, key_dim: int, split: int = 1, order: torch.Tensor | None = None):
        self.cache = cache
        self.key_dim = key_dim
        self.split = split
        self.order = order
        self.inverse = None if order is None else torch.argsort(order)

    @property
    def block_tokens(self) -> int:
        """Of an engine's block."""
        return int(self.cache.shape[2]) * self.split

    def _places(self, blocks: Sequence[int]) -> torch.Tensor:
        places = torch.tensor(blocks, dtype=torch.long, device=self.cache.device)
        if self.split > 1:
            places = (places[:, None] * self.split + torch.arange(self.split, device=places.device)).flatten()
        return places

    def copy(self, blocks: Sequence[int]) -> torch.Tensor:
        """What these blocks hold now, in the processor's memory."""
        return gathered(self.cache, self._places(blocks))

    def rows(self, copied: torch.Tensor, skip: int, tokens: int) -> tuple[Array, Array]:
        """k and v [tokens, kv_heads, dim] of what `copy` gave, without its first `skip` tokens."""
        width = copied.shape[2]
        first, end = skip // width, -(-(skip + tokens) // width)
        both = reordered(copied[first:end], self.order).permute(0, 2, 1, 3)
        heads, skip = both.shape[2], skip - first * width
        k, v = (
            part.reshape(-1, heads, part.shape[3])[skip : skip + tokens]
            for part in (both[..., : self.key_dim], both[..., self.key_dim :])
        )
        return as_numpy(k, "k"), as_numpy(v, "v")

    def landing(self, blocks: Sequence[int]) -> Landing:
        """Where rows for these blocks are put together."""
        return Landing(self, self._places(blocks))


class Landing:
    """Rows on their way into whole blocks: heads first, from the first block's first token on."""

    def __init__(self, layer: PagedLayer, places: torch.Tensor):
        self._layer = layer
        self._places = places
        self._rows = torch.empty((len(places), *layer.cache.shape[1:]), dtype=layer.cache.dtype)
        self._array = as_numpy(self._rows, "rows")
        self.tokens = 0

    def put(self, k: Array, v: Array) -> None:
        """The next rows: k and v [kv_heads, tokens, dim]."""
        width = self._array.shape[2]
        taken = 0
        while taken < k.shape[1]:
            block, at = divmod(self.tokens, width)
            count = min(width - at, k.shape[1] - taken)
            target = self._array[block, :, at : at + count]
            target[..., : self._layer.key_dim] = k[:, taken : taken + count]
            target[..., self._layer.key_dim :] = v[:, taken : taken + count]
            taken += count
            self.tokens += count

    def land(self) -> None:
        """Writes the blocks, which must be full by now."""
        assert self.tokens == len(self._places) * self._array.shape[2], "blocks are not full"
        cache: Any = self._layer.cache
        cache.index_copy_(0, self._places, reordered(self._rows, self._layer.inverse).to(cache.device))


def gathered(cache: torch.Tensor, places: torch.Tensor) -> torch.Tensor:
    """cache[places], in the processor's memory.

    From a GPU it comes to pinned memory, piece by piece in the device's stream: it is there once that has come so far.
    """
    if not cache.is_cuda:
        return cache.index_select(0, places)
    target = torch.empty((len(places), *cache.shape[1:]), dtype=cache.dtype, pin_memory=True)
    step = max(PIECE_BYTES // (cache[0].numel() * cache.element_size()), 1)
    for at in range(0, len(places), step):
        target[at : at + step].copy_(cache.index_select(0, places[at : at + step]), non_blocking=True)
    return target


def reordered(blocks: torch.Tensor, order: torch.Tensor | None) -> torch.Tensor:
    """The elements of each region in another order."""
    return blocks if order is None else blocks.flatten(2).index_select(2, order).view(blocks.shape)


def order_of(ids: torch.Tensor) -> torch.Tensor | None:
    """`order`, given the number of the element that was found at each place of each head's region, [kv_heads, places].

    Unimplemented: they are no permutation, or not the same one for all heads.
    """
    order = torch.argsort(ids[0])
    if not torch.equal(ids, ids[:1].expand_as(ids)) or not torch.equal(ids[0][order], torch.arange(ids.shape[1])):
        raise Unimplemented("the attention backend keeps rows in a form that the connector does not know")
    return None if torch.equal(order, torch.arange(len(order))) else order
