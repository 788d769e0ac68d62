"""SGLang's pages as opaque objects: latents of MLA, caches in fp8, whatever a host pool gives as flat bytes.

A page is an object, named by the hash that SGLang gives it, which stands for all tokens up to its end, and by what its
bytes mean: model, ranks, and the pool's layout, dtype and sizes.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Any

import torch

from qkvd.arrays import Array, as_numpy
from qkvd.errors import Unimplemented
from qkvd.prefixes import Prefixes

AT_ONCE = 64 << 20  # bytes of pages on their way


class OpaquePages:
    """Pages of one rank's host pool. MLA's are the same on all tensor-parallel ranks, of which SGLang lets one save."""

    def __init__(self, prefixes: Prefixes, pool: Any, config: Any, model: str):
        if getattr(config, "dcp_size", 1) > 1:
            raise Unimplemented(f"dcp_size is {config.dcp_size}: the backend serves tensor and pipeline parallelism")
        sample = pool.get_dummy_flat_data_page()
        self.bytes = int(sample.numel() * sample.element_size())
        self._dtype = sample.dtype
        self._prefixes, self._pool, self._tokens = prefixes, pool, int(pool.page_size)
        ranks = [] if config.is_mla_model else [config.tp_rank, config.tp_size]
        ranks += [config.pp_rank, config.pp_size, config.attn_cp_rank, config.attn_cp_size]
        what = [model, ranks, pool.layout, str(pool.dtype), self._tokens, pool.layer_num, self.bytes]
        self._tag = f"sglang/{hashlib.blake2b(repr(what).encode(), digest_size=8).hexdigest()}/"

    def _names(self, keys: Sequence[str]) -> list[str]:
        return [self._tag + hashlib.blake2b(key.encode(), digest_size=16).hexdigest() for key in keys]

    def held(self, keys: Sequence[str]) -> int:
        """How many of these, from the first one on."""
        return self._prefixes.pages_held(self._names(keys))

    def get(self, keys: Sequence[str], places: torch.Tensor) -> int:
        """Into the pool's places; gives how many have come, from the first one on. Raises `qkvd.Error`."""
        names, starts = self._names(keys), places[:: self._tokens].tolist()
        step = max(AT_ONCE // self.bytes, 1)
        for at in range(0, len(names), step):
            part = names[at : at + step]
            came = torch.empty((len(part), self.bytes), dtype=torch.uint8)
            count = self._prefixes.get_pages(part, list(as_numpy(came, "pages")))
            for start, page in zip(starts[at : at + count], came[:count], strict=True):
                self._pool.set_from_flat_data_page(start, page.view(self._dtype))
            if count < len(part):
                return at + count
        return len(names)

    def set(self, keys: Sequence[str], places: torch.Tensor) -> int:
        """Out of the pool; gives how many these are. Raises `qkvd.Error`."""
        names, starts = self._names(keys), places[:: self._tokens].tolist()
        step = max(AT_ONCE // self.bytes, 1)
        for at in range(0, len(names), step):
            pages: dict[str, Array] = {}
            for name, start in zip(names[at : at + step], starts[at : at + step], strict=True):
                page = self._pool.get_data_page(start, flat=True).contiguous()
                pages[name] = as_numpy(page.view(torch.uint8), "page")
            self._prefixes.put_pages(pages)
        return len(names)
