"""A session for asyncio; `qkvd.AsyncClient` makes them."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from contextlib import AbstractAsyncContextManager, aclosing, nullcontext
from types import TracebackType
from typing import TYPE_CHECKING, Any

from qkvd import calls, errors
from qkvd.arrays import Array
from qkvd.fetched import Gathered
from qkvd.items import RopeForm
from qkvd.model import AttendOptions
from qkvd.session import SessionState, joined
from qkvd.v1 import kv_cache_pb2

if TYPE_CHECKING:
    from qkvd.aio import AsyncClient


class AsyncSession(SessionState):
    """`qkvd.Session` for asyncio: arguments, answers and errors are the same, every call is awaited."""

    def __init__(self, client: AsyncClient, info: kv_cache_pb2.SessionInfo, tokens: Sequence[int] | Array | None):
        super().__init__(info, tokens)
        self._client = client
        self._turns = [asyncio.Lock() for _ in self._lengths]

    async def __aenter__(self) -> AsyncSession:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, value: BaseException | None, at: TracebackType | None
    ) -> None:
        await self.close()

    def _turn(self, layer: int, position: int | None) -> AbstractAsyncContextManager[Any]:
        self._length(layer)
        return self._turns[layer] if position is None else nullcontext()

    async def append(
        self,
        layer: int,
        k: Any,
        v: Any,
        position: int | None = None,
        *,
        rope: RopeForm = "after",
        tokens: Sequence[int] | Array | None = None,
        timeout: float | None = None,
    ) -> int:
        """As `Session.append`."""
        async with self._turn(layer, position):
            item = self._rows(layer, k, v, None, position, rope=rope, tokens=tokens)
            new = await self._client.append([item], timeout=timeout)
            self._took(layer, max(self._length(layer), item.position + len(k)))
            return new

    async def attend(
        self,
        layer: int,
        q: Any,
        position: int | None = None,
        *,
        k: Any = None,
        v: Any = None,
        rope: RopeForm = "after",
        options: AttendOptions | None = None,
        dtype: str = "fp32",
        out: Any = None,
        timeout: float | None = None,
    ) -> tuple[Array, Array]:
        """As `Session.attend`."""
        async with self._turn(layer, position):
            item = self._attend_item(layer, q, position, k, v, rope=rope, options=options)
            results = []
            for piece, target in self._steps(item, out):
                results += await self._client.attend([piece], dtype=dtype, out=[target], timeout=timeout)
                if results[-1].error is None:
                    self._took(layer, results[-1].length)
            return joined(results, out)

    async def fetch(
        self,
        layer: int,
        *,
        begin: int = 0,
        end: int = 0,
        dtype: str | None = None,
        heads_first: bool = False,
        part: str = "both",
        rope: RopeForm = "after",
        out: tuple[Any, Any] | None = None,
        timeout: float | None = None,
    ) -> tuple[Array, Array]:
        """As `Session.fetch`."""
        backoff = self._client._backoff(timeout)
        while True:
            gathered = Gathered(out, self._expected(layer, begin, end), heads_first)
            try:
                pieces = self._client.fetch_rows(
                    self.name, [layer], begin=begin, end=end, dtype=dtype, heads_first=heads_first, part=part,
                    rope=rope, timeout=backoff.left(),
                )  # fmt: skip
                async with aclosing(pieces):
                    async for piece in pieces:
                        gathered.put(piece)
                return gathered.taken()
            except errors.Unavailable as error:
                await asyncio.sleep(backoff.pause(error, True))

    async def truncate(self, position: int, *, layers: Sequence[int] | None = None, timeout: float | None = None) -> None:
        """As `Session.truncate`."""
        self._lengths = list((await self._client._call(calls.truncate(self.name, position, layers), timeout)).lengths)
        self._forget_ids(position)

    async def fork(self, name: str, position: int = 0, *, timeout: float | None = None) -> AsyncSession:
        """As `Session.fork`."""
        await self._client._check_fork(self.name, name)
        answer = await self._client._call(calls.fork(self.name, name, position), timeout)
        forked = AsyncSession(self._client, answer.info, self.tokens)
        forked._forget_ids(max(answer.info.lengths))
        return forked

    async def info(self, *, timeout: float | None = None) -> kv_cache_pb2.SessionInfo:
        """As `Session.info`."""
        info = await self._client.session_info(self.name, timeout=timeout)
        self._took_info(info)
        return info

    async def demote(
        self,
        bits: float,
        *,
        begin: int = 0,
        end: int = 0,
        layers: Sequence[int] | None = None,
        even: bool = False,
        timeout: float | None = None,
    ) -> kv_cache_pb2.DemoteResponse:
        """As `Session.demote`."""
        return await self._client._call(calls.demote(self.name, bits, begin, end, layers, even), timeout)

    async def prefetch(
        self,
        bits: float = 0,
        *,
        begin: int = 0,
        end: int = 0,
        layers: Sequence[int] | None = None,
        timeout: float | None = None,
    ) -> kv_cache_pb2.PrefetchResponse:
        """As `Session.prefetch`."""
        return await self._client._call(calls.prefetch(self.name, bits, begin, end, layers), timeout)

    async def pin(self, *, timeout: float | None = None) -> None:
        """As `Session.pin`."""
        await self._client._call(calls.pin(self.name, False), timeout)

    async def unpin(self, *, timeout: float | None = None) -> None:
        """As `Session.unpin`."""
        await self._client._call(calls.pin(self.name, True), timeout)

    async def touch(self, ttl: float | None = None, *, timeout: float | None = None) -> None:
        """As `Session.touch`."""
        await self._client._call(calls.touch(self.name, ttl), timeout)

    async def close(self, *, keep: bool = False, timeout: float | None = None) -> int:
        """As `Session.close`."""
        return await self._client.close_session(self.name, keep=keep, timeout=timeout)
