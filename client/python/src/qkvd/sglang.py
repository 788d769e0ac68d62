"""A storage backend for SGLang 0.5.23's hierarchical cache: its third level, behind the processor's memory, is qkvd.

    python -m sglang.launch_server --model-path MODEL --enable-hierarchical-cache --hicache-storage-backend dynamic
      --hicache-storage-backend-extra-config '{"backend_name": "qkvd", "module_path": "qkvd.sglang",
      "class_name": "QkvdHiCache", "interface_v1": 1, "hicache_storage_pass_prefix_keys": true,
      "target": "unix:/run/qkvd.sock"}'

What is not SGLang's in the extra config are the fields of `qkvd.prefixes.Options`, and `opaque` (true): pages are kept as
the bytes that they are, as they are anyway of MLA and in dtypes other than float32, float16 and bfloat16
(`qkvd.sglang_pages`).

SGLang names a page by a hash of all tokens up to its end. These names stand for token ids here: `page_size` numbers are
derived from each, so that a chain of pages is a sequence, which the daemon finds by its longest prefix, holds once however
many sequences have it, and knows the positions of. That needs the whole chain: `hicache_storage_pass_prefix_keys`.
"""

from __future__ import annotations

import hashlib
import logging
import re
import secrets
from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from sglang.srt.mem_cache.hicache_storage import HiCacheStorage

from qkvd.arrays import Array, as_numpy
from qkvd.configs import rope_of
from qkvd.errors import Error, FailedPrecondition, InvalidArgument, NotFound, Unimplemented
from qkvd.locks import Lock
from qkvd.model import Model, Rope
from qkvd.prefixes import NAMELESS, Options, Prefixes
from qkvd.sglang_pages import OpaquePages

logger = logging.getLogger("sglang.qkvd")
DTYPES: dict[torch.dtype, Any] = {torch.float32: "fp32", torch.float16: "fp16", torch.bfloat16: "bf16"}
# Of the extra config, SGLang's own.
FOREIGN = {"backend_name", "module_path", "class_name", "interface_v1", "hicache_storage_pass_prefix_keys"}
ID_BITS = 28
CHUNK_BYTES = 1 << 20  # of rows in a message
TAILS = 4096  # ends of chains whose sessions are remembered


class QkvdHiCache(HiCacheStorage):  # type: ignore[misc]
    """The backend; SGLang makes one for each rank. What fails is a miss, and said in the log."""

    def __init__(self, storage_config: Any, kwargs: dict[str, Any]):
        extra = dict(storage_config.extra_config or {})
        if not extra.get("interface_v1"):
            raise InvalidArgument('the extra config needs "interface_v1": 1')
        self._bytes = extra.pop("opaque", False) or storage_config.is_mla_model
        if not isinstance(self._bytes, bool):
            raise InvalidArgument(f"opaque is {self._bytes!r}, it is true or false")
        self._options = Options.of({key: value for key, value in extra.items() if key not in FOREIGN})
        self._config = storage_config
        self._prefixes: Prefixes | None = None
        self._pages: Pages | None = None
        self._opaque: OpaquePages | None = None
        self._lock = Lock()
        # The end of a chain: its session, and how many of its tokens are the chain's.
        self._tails: OrderedDict[str, tuple[str, int]] = OrderedDict()
        self._lengths: dict[str, int] = {}  # of these sessions
        self._prefix = f"sglang/{secrets.token_hex(6)}"
        self._opened = 0
        self._told = False

    def register_mem_pool_host(self, mem_pool_host: Any) -> None:
        """The pool that pages come from and go to. Unimplemented: a layout that is not served."""
        super().register_mem_pool_host(mem_pool_host)
        if self._bytes or mem_pool_host.dtype not in DTYPES:
            self._prefixes = Prefixes(self._options, NAMELESS, logger)
            name = self._options.model_name or str(self._config.model_name)
            self._opaque = OpaquePages(self._prefixes, mem_pool_host, self._config, name)
            return
        self._pages = Pages(mem_pool_host)
        self._prefixes = Prefixes(self._options, self._model(mem_pool_host), logger)

    def _model(self, pool: Any) -> Model:
        config, rope = self._config, rope_of_model(self._config.model_name)
        geometry = (pool.layer_num, pool.start_layer, pool.head_num, pool.head_dim, pool.v_head_dim, str(pool.dtype), rope)
        name = self._options.model_name
        if not name:
            digest = hashlib.blake2b(repr((config.model_name, geometry)).encode(), digest_size=6).hexdigest()
            name = re.sub(r"[^A-Za-z0-9._@-]", "-", (config.model_name or "model").rstrip("/").rpartition("/")[2])[:80]
            name = f"{name}:{digest}"
        for what in ("tp", "pp", "attn_cp"):
            if (size := getattr(config, f"{what}_size")) > 1:
                name += f":{what}{getattr(config, f'{what}_rank')}of{size}"
        return Model(
            name=name, layers=pool.layer_num, kv_heads=pool.head_num, q_heads=pool.head_num, key_dim=pool.head_dim,
            value_dim=pool.v_head_dim, dtype=DTYPES[pool.dtype], rope=rope,
        )  # fmt: skip

    # ---- what SGLang asks for ----

    def batch_exists(self, keys: list[str], extra_info: Any = None) -> int:
        """How many of these pages, from the first one on, are held."""
        if self._opaque is not None:
            return self._opaque.held(keys)
        chain = self._chain(keys, extra_info)
        if chain is None:
            return 0
        assert self._pages is not None
        tokens = self._find(chain)[1]
        return min(max(tokens // self._pages.tokens - (len(chain) - len(keys)), 0), len(keys))

    def batch_get_v1(self, keys: list[str], host_indices: torch.Tensor, extra_info: Any = None) -> list[bool]:
        """Pages into the pool's places; which of them have come."""
        came = 0
        if self._opaque is not None:
            came = self._tried(lambda opaque: opaque.get(keys, host_indices), f"{len(keys)} pages are not loaded")
            return [place < came for place in range(len(keys))]
        chain = self._chain(keys, extra_info)
        if chain is not None:
            try:
                came = self._get(chain, len(chain) - len(keys), host_indices)
            except Error as error:
                logger.warning("%d pages are not loaded: %s", len(keys), error)
        return [place < came for place in range(len(keys))]

    def batch_set_v1(self, keys: list[str], host_indices: torch.Tensor, extra_info: Any = None) -> list[bool]:
        """Pages out of the pool; whether all of them are held now."""
        if self._opaque is not None:
            count = self._tried(lambda opaque: opaque.set(keys, host_indices), f"{len(keys)} pages are not saved")
            return [count == len(keys)] * len(keys)
        chain = self._chain(keys, extra_info)
        done = False
        if chain is not None and not self._left_alone():
            try:
                self._set(chain, len(chain) - len(keys), host_indices)
                done = True
            except Error as error:
                logger.warning("%d pages are not saved: %s", len(keys), error)
        return [done] * len(keys)

    def _tried(self, call: Callable[[OpaquePages], int], failure: str) -> int:
        """What the call gives; 0 where it fails."""
        assert self._opaque is not None
        if self._left_alone():
            return 0
        try:
            return call(self._opaque)
        except Error as error:
            logger.warning("%s: %s", failure, error)
            return 0

    def _left_alone(self) -> bool:
        """Whether the daemon has not answered a moment ago."""
        assert self._prefixes is not None
        return self._prefixes.breaker.open()

    def exists(self, key: str) -> bool:
        """Never: a page by itself is not found."""
        return False

    def get(self, key: str, target_location: Any = None, target_sizes: Any = None) -> torch.Tensor | None:
        """Nothing, as `exists`."""
        return None

    def batch_get(
        self, keys: list[str], target_locations: Any = None, target_sizes: Any = None
    ) -> list[torch.Tensor | None]:
        """Nothing, as `exists`."""
        return [None] * len(keys)

    def set(self, key: str, value: Any = None, target_location: Any = None, target_sizes: Any = None) -> bool:
        """Refused, as `exists`."""
        return False

    def batch_set(
        self, keys: list[str], values: Any = None, target_locations: Any = None, target_sizes: Any = None
    ) -> bool:
        """Refused, as `exists`."""
        return False

    def close(self) -> None:
        """Closes the connection; what is held stays."""
        if self._prefixes is not None:
            self._prefixes.close()

    # ---- chains ----

    def _chain(self, keys: list[str], extra_info: Any) -> list[str] | None:
        """The pages from the first token on; None where SGLang does not say."""
        if extra_info is None or extra_info.prefix_keys is None:
            if not self._told:
                logger.error('nothing is saved or loaded: the extra config needs "hicache_storage_pass_prefix_keys": true')
                self._told = True
            return None
        return [*extra_info.prefix_keys, *keys]

    def _ids(self, chain: Sequence[str]) -> Array:
        """Numbers that stand for the tokens of these pages."""
        assert self._pages is not None
        size = 4 * self._pages.tokens
        data = b"".join(hashlib.shake_128(key.encode()).digest(size) for key in chain)
        return np.frombuffer(data, "<u4") >> (32 - ID_BITS)

    def _find(self, chain: Sequence[str]) -> tuple[str, int]:
        """A session and how many tokens of the chain it holds."""
        assert self._prefixes is not None
        found = self._prefixes.match(self._ids(chain), self._options.salt())
        with self._lock:
            tail = self._tails.get(chain[-1]) if chain else None
        if tail is not None and found.tokens + 64 > tail[1] > found.tokens and found.session:
            return tail  # what does not fill a page of the daemon's is not matched
        return found.session, found.tokens

    def _get(self, chain: list[str], known: int, places: torch.Tensor) -> int:
        """Loads what is held of the pages after the first `known`; gives how many these are."""
        assert self._prefixes is not None and self._pages is not None
        pages = self._pages
        session, tokens = self._find(chain)
        count = min(tokens // pages.tokens, len(chain)) - known
        if count <= 0:
            return 0
        begin, end = known * pages.tokens, (known + count) * pages.tokens
        starts = places[:: pages.tokens].tolist()
        chunk = max(CHUNK_BYTES // (pages.row_bytes * pages.tokens), 1) * pages.tokens
        for piece in self._prefixes.fetch(session, range(pages.layers), begin, end, chunk):
            assert piece.k is not None and piece.v is not None
            pages.put(starts, piece.layer, piece.position - begin, piece.k, piece.v)
        return count

    def _set(self, chain: list[str], known: int, places: torch.Tensor) -> None:
        assert self._prefixes is not None and self._pages is not None
        pages = self._pages
        begin, end = known * pages.tokens, len(chain) * pages.tokens
        session, held = self._session(chain, known)
        if held < begin:
            self._prefixes.drop(session)
            raise NotFound(f"of the {begin} tokens before them {held} are held")
        if held < end:
            starts = places[:: pages.tokens].tolist()
            rows = [pages.take(starts, layer, held - begin) for layer in range(pages.layers)]
            self._prefixes.append(session, held, self._ids(chain)[held:end], rows)
        self._remember(chain, session, max(held, end))

    def _session(self, chain: list[str], known: int) -> tuple[str, int]:
        """A session for the chain, and how many of its tokens that holds: the one of the chain so far, a fork of it, or a
        new one with what is held anywhere."""
        assert self._prefixes is not None
        with self._lock:
            tail = self._tails.get(chain[known - 1]) if known else None
            if tail is not None and self._lengths.get(tail[0]) == tail[1]:
                self._lengths[tail[0]] = -1  # until `_remember`: one caller goes on with it
                return tail
            self._opened += 1
            name = f"{self._prefix}/{self._opened}"
        if tail is not None:
            try:
                self._prefixes.fork(tail[0], name, tail[1])
                return name, tail[1]
            except (FailedPrecondition, NotFound):
                pass  # closed since, or shorter after a restart
        return name, self._prefixes.open(name, self._ids(chain), self._options.salt())

    def _remember(self, chain: list[str], session: str, tokens: int) -> None:
        with self._lock:
            self._tails[chain[-1]] = (session, tokens)
            self._tails.move_to_end(chain[-1])
            self._lengths[session] = tokens
            while len(self._tails) > TAILS:
                _, (forgotten, _) = self._tails.popitem(last=False)
                if all(forgotten != name for name, _ in self._tails.values()):
                    self._lengths.pop(forgotten, None)


def rope_of_model(name: str | None) -> Rope | None:
    """RoPE of the model's configuration, where that is at hand; without it keys are coded as they are."""
    if not name:
        return None
    try:
        from transformers import AutoConfig

        return rope_of(AutoConfig.from_pretrained(name, local_files_only=True).get_text_config(decoder=True))
    except Exception as error:  # whatever transformers makes of it
        logger.info("keys of %s are coded without its RoPE: %s", name, error)
        return None


class Pages:
    """The pages of a host pool, by layer: [kv_heads, tokens, dim] of each."""

    def __init__(self, pool: Any):
        views = {
            "layer_first": _layer_first,
            "page_first": _page_first,
            "page_first_direct": _direct,
            "page_head": _page_head,
        }
        if pool.layout not in views:
            raise Unimplemented(f"the host pool's layout is {pool.layout}; the backend serves {', '.join(views)}")
        if pool.dtype not in DTYPES:
            raise Unimplemented(f"the cache is of {pool.dtype}; the backend serves float32, float16 and bfloat16")
        self._view = views[pool.layout]
        self.tokens = int(pool.page_size)
        self.layers = int(pool.layer_num)
        self.row_bytes = pool.head_num * (pool.head_dim + pool.v_head_dim) * pool.dtype.itemsize
        self._k, self._v = as_numpy(pool.k_buffer, "k_buffer"), as_numpy(pool.v_buffer, "v_buffer")

    def put(self, starts: list[int], layer: int, at: int, k: Array, v: Array) -> None:
        """Rows, heads first, from token `at` of these pages on."""
        taken = 0
        while taken < k.shape[1]:
            page, token = divmod(at + taken, self.tokens)
            count = min(self.tokens - token, k.shape[1] - taken)
            for buffer, rows in ((self._k, k), (self._v, v)):
                target = self._view(buffer, starts[page], layer, self.tokens)
                target[:, token : token + count] = rows[:, taken : taken + count]
            taken += count

    def take(self, starts: list[int], layer: int, at: int) -> tuple[Array, Array]:
        """Rows [tokens, kv_heads, dim] from token `at` of these pages on."""
        first, skip = divmod(at, self.tokens)
        k, v = (
            np.concatenate([self._view(buffer, start, layer, self.tokens).transpose(1, 0, 2) for start in starts[first:]])[
                skip:
            ]
            for buffer in (self._k, self._v)
        )
        return k, v


def _layer_first(buffer: Array, start: int, layer: int, tokens: int) -> Array:
    """Of [layers, size, heads, dim]."""
    return buffer[layer, start : start + tokens].transpose(1, 0, 2)


def _page_first(buffer: Array, start: int, layer: int, tokens: int) -> Array:
    """Of [size, layers, heads, dim]."""
    return buffer[start : start + tokens, layer].transpose(1, 0, 2)


def _direct(buffer: Array, start: int, layer: int, tokens: int) -> Array:
    """Of [pages, layers, tokens, heads, dim]."""
    page: Array = buffer[start // tokens, layer]
    return page.transpose(1, 0, 2)


def _page_head(buffer: Array, start: int, layer: int, tokens: int) -> Array:
    """Of [pages, heads, tokens, layers, dim]."""
    page: Array = buffer[start // tokens, :, :, layer]
    return page
