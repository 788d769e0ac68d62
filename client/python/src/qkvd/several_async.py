"""`AsyncClient` with several targets: calls that go to more than one of its daemons. As several_sync.py, awaited."""

from __future__ import annotations

import asyncio
import contextlib
import heapq
import weakref
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

import grpc
import grpc.aio

from qkvd import errors
from qkvd.calls import Backoff, Call, Match, checked_timeout
from qkvd.items import Item, Result
from qkvd.locks import UnderWay
from qkvd.several import CHECK, CHECK_SECONDS, SERVING, Daemon, Within, chosen, found, grouped, in_order, merged, pauses
from qkvd.v1 import model_pb2, objects_pb2

if TYPE_CHECKING:
    from qkvd.aio import AsyncClient, AsyncDecodeStream

T = TypeVar("T")
Groups = list[tuple[list[int], T | errors.Error]]  # places of what was asked, and the answer to them


async def _watch(client: weakref.ref[AsyncClient], daemon: AsyncClient) -> None:
    """Asks a daemon that has not answered until it does, or its client is no more."""
    for pause in pauses():
        await asyncio.sleep(pause)
        if client() is None:
            return
        try:
            if await _healthy(daemon, CHECK_SECONDS):
                return
        except errors.Error:  # it is closed
            return


async def serves(client: AsyncClient, daemon: Daemon[AsyncClient], within: Within) -> bool:
    """Whether calls may go there. One that is suspect, and not watched, is asked, and gets the client's models."""
    if not daemon.suspect:
        return True
    if daemon.watch is not None and not daemon.watch.done():
        return False
    answers = await _healthy(daemon.client, within.left())
    for call in list(client._kept_models.values()) if answers else ():
        try:
            await daemon.client._call(call, within.rest() / 2)
        except (errors.Unavailable, errors.DeadlineExceeded):
            answers = False
        except errors.Error:
            pass  # what refuses a model refuses its sessions, too
    daemon.suspect = not answers  # not before it has the models, which calls of other tasks need
    if daemon.suspect and (daemon.watch is None or daemon.watch.done()):
        daemon.watch = asyncio.create_task(_watch(weakref.ref(client), daemon.client))
    return not daemon.suspect


async def _healthy(client: AsyncClient, seconds: float) -> bool:
    try:
        async with UnderWay():
            stub = client._stub("unary_unary", CHECK)
            return bool(await stub(b"", timeout=seconds, metadata=client._connection.metadata) == SERVING)
    except grpc.RpcError:
        return False


async def owner(client: AsyncClient, key: str | None, seconds: float = CHECK_SECONDS) -> Daemon[AsyncClient]:
    """Of those that serve, which takes no longer than that."""
    within = Within(seconds)
    for daemon in client._daemons.ranked(client._connection.placement or key):
        if await serves(client, daemon, within):
            return daemon
    raise client._daemons.nobody()


async def serving(client: AsyncClient, seconds: float = CHECK_SECONDS) -> list[Daemon[AsyncClient]]:
    """All that do, which takes no longer than that; those that are to be asked are asked at the same time. Unavailable
    where none does."""
    answers = await asyncio.gather(*(serves(client, daemon, Within(seconds)) for daemon in client._daemons.all))
    all_of_them = [daemon for daemon, answer in zip(client._daemons.all, answers, strict=True) if answer]
    if not all_of_them:
        raise client._daemons.nobody()
    return all_of_them


async def routed(
    client: AsyncClient,
    key: str | None,
    timeout: float | None,
    repeat: bool,
    work: Callable[[AsyncClient, float], Awaitable[T]],
) -> T:
    """A call of one daemon. Where that does not answer, and the call may arrive twice, of who stands in for it."""
    backoff = client._backoff(timeout)
    while True:
        daemon = None
        try:
            daemon = await owner(client, key, backoff.left())
            return await work(daemon.client, backoff.left())
        except errors.Error as error:
            if daemon is not None:
                daemon.failed(error)
            await asyncio.sleep(backoff.pause(error, repeat or daemon is None))


async def stream(
    client: AsyncClient, method: str, request: bytes, timeout: float | None, key: str | None
) -> AsyncGenerator[bytes, None]:
    """The messages of a server stream of one daemon; sent again while none has come."""
    backoff = client._backoff(timeout)
    began = False
    while True:
        daemon = None
        try:
            daemon = await owner(client, key, backoff.left())
            async with contextlib.aclosing(daemon.client._stream(method, request, backoff.left(), key)) as answers:
                async for answer in answers:
                    began = True
                    yield answer
            return
        except errors.Error as error:
            if daemon is not None:
                daemon.failed(error)
            await asyncio.sleep(backoff.pause(error, not began))


async def spread(
    client: AsyncClient,
    keys: Sequence[str],
    timeout: float | None,
    work: Callable[[AsyncClient, list[int], float], Awaitable[T]],
    *,
    repeat: bool = True,
) -> Groups[T]:
    """Each owner's part of a batch, at once; the parts of those that do not answer, of who stands in for them."""
    backoff = client._backoff(timeout)

    async def attempt(daemon: Daemon[AsyncClient], places: list[int]) -> T | errors.Error:
        try:
            return await work(daemon.client, places, backoff.left())
        except errors.Error as error:
            daemon.failed(error)
            return error

    done: Groups[T] = []
    left = list(range(len(keys)))
    while left:
        failure: errors.Error
        again: list[int] = []
        try:
            groups = grouped([await owner(client, keys[place], backoff.left()) for place in left])
        except errors.Error as error:
            failure, again = error, left
        else:
            parts = [(daemon, [left[i] for i in places]) for daemon, places in groups.items()]
            answers = await asyncio.gather(*(attempt(daemon, places) for daemon, places in parts))
            for (_, places), answer in zip(parts, answers, strict=True):
                if repeat and isinstance(answer, errors.Unavailable):
                    again, failure = again + places, answer
                else:
                    done.append((places, answer))
        left = again
        if left:
            try:
                await asyncio.sleep(backoff.pause(failure, True))
            except errors.Error as error:
                done.append((left, error))
                left = []
    return done


# ---- what AsyncClient has ----


async def register_model(client: AsyncClient, name: str, call: Call[T], timeout: float | None) -> T:
    """With all that serve; the others get it as soon as they do."""
    answer = (await each(client, client._backoff(timeout), lambda one, left: one._call(call, left)))[0][1]
    client._kept_models[name] = call
    return answer


async def each(
    client: AsyncClient, backoff: Backoff, work: Callable[[AsyncClient, float], Awaitable[T]]
) -> list[tuple[Daemon[AsyncClient], T]]:
    """The answers of all that serve; those that lack what was asked for, are gone or say nothing are passed over unless all
    are."""

    async def attempt(daemon: Daemon[AsyncClient]) -> tuple[Daemon[AsyncClient], T] | errors.Error:
        try:
            return daemon, await work(daemon.client, backoff.left())
        except errors.Error as error:
            daemon.failed(error)
            return error

    return found(await asyncio.gather(*(attempt(daemon) for daemon in await serving(client, backoff.left()))))


async def match(client: AsyncClient, call: Call[Match], timeout: float | None) -> Match:
    """The longest of all, of a session that is reached by its name."""
    best, backoff = Match("", 0, 0, 0, 0.0), client._backoff(timeout)
    for daemon, one in await each(client, backoff, lambda it, left: it._call(call, left)):
        longer = (one.tokens, one.tokens_in_memory) > (best.tokens, best.tokens_in_memory)
        if longer and await owner(client, one.session, backoff.left()) is daemon:
            best = one
    return best


async def models(client: AsyncClient, timeout: float | None) -> list[model_pb2.GetModelResponse]:
    """Of all, each tenant's name once."""
    by_name: dict[tuple[str, str], model_pb2.GetModelResponse] = {}
    for _, part in await each(client, client._backoff(timeout), lambda one, left: one.models(timeout=left)):
        for model in part:
            by_name.setdefault((model.model.name, model.tenant), model)
    return [by_name[name] for name in sorted(by_name)]


async def listed(client: AsyncClient, work: Callable[[AsyncClient], AsyncIterator[T]], name: Callable[[T], str]) -> list[T]:
    """Of all daemons, by name."""
    parts = []
    for daemon in await serving(client):
        try:
            parts.append([one async for one in work(daemon.client)])
        except errors.Error as error:
            daemon.failed(error)
            raise
    return list(heapq.merge(*parts, key=name))


async def append(client: AsyncClient, batch: Sequence[Item], timeout: float | None) -> int:
    parts = await spread(
        client, [item.session for item in batch], timeout,
        lambda one, places, left: one.append(chosen(batch, places) or [], timeout=left),
    )  # fmt: skip
    for _, part in parts:
        if isinstance(part, errors.Error):
            raise part
    return sum(part for _, part in parts if isinstance(part, int))


async def attend(
    client: AsyncClient, batch: Sequence[Item], dtype: str, out: Sequence[Any] | None, timeout: float | None
) -> list[Result]:
    parts = await spread(
        client, [item.session for item in batch], timeout,
        lambda one, at, left: one.attend(chosen(batch, at) or [], dtype=dtype, out=chosen(out, at), timeout=left),
    )  # fmt: skip
    return merged(len(batch), parts)


async def listwise(
    client: AsyncClient,
    names: Sequence[str],
    timeout: float | None,
    work: Callable[[AsyncClient, list[int], float], Awaitable[list[T]]],
) -> list[T]:
    """A call with an answer for each name."""
    return in_order(len(names), await spread(client, names, timeout, work))


async def put_objects(
    client: AsyncClient, objects: Iterable[tuple[str, Any]], timeout: float | None, options: dict[str, Any]
) -> objects_pb2.PutObjectsResponse:
    given = list(objects)
    total = objects_pb2.PutObjectsResponse()
    parts = await spread(
        client, [name for name, _ in given], timeout,
        lambda one, places, left: one.put_objects(chosen(given, places) or [], timeout=left, **options), repeat=False,
    )  # fmt: skip
    for _, part in parts:
        if isinstance(part, errors.Error):
            raise part
        total.objects += part.objects
        total.existing += part.existing
    return total


class Streams:
    """Decode streams to several daemons: one to each that a step has items for. One that ends fails its items alone, and is
    opened anew by the next step."""

    def __init__(self, client: AsyncClient):
        self._client = client
        self._streams: dict[int, AsyncDecodeStream] = {}

    async def attend(
        self, batch: Sequence[Item], dtype: str, out: Sequence[Any] | None, timeout: float | None
    ) -> list[Result]:
        """A step."""

        async def step(one: AsyncClient, places: list[int], left: float) -> list[Result]:
            if id(one) not in self._streams:
                self._streams[id(one)] = one.decode()
            try:
                part = chosen(batch, places) or []
                return await self._streams[id(one)].attend(part, dtype=dtype, out=chosen(out, places), timeout=left)
            except errors.Error:
                await self._streams.pop(id(one)).close()
                raise

        seconds = checked_timeout(self._client._connection.timeout if timeout is None else timeout)
        keys = [item.session for item in batch]
        return merged(len(batch), await spread(self._client, keys, seconds, step, repeat=False))

    async def close(self) -> None:
        """Ends them."""
        for one in self._streams.values():
            await one.close()
