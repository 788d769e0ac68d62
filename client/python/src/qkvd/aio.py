"""The client for asyncio: the same calls, awaited."""

from __future__ import annotations

import asyncio
import contextlib
import os
import weakref
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Iterable, Iterator, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, TypeVar

import grpc
import grpc.aio
from google.protobuf.message import Message

from qkvd import calls, errors, items, several_async, wire
from qkvd import objects as opaque
from qkvd.aio_session import AsyncSession
from qkvd.arrays import Array
from qkvd.calls import Backoff, Call, Match, Presence
from qkvd.connection import DEFAULT_RETRY, DEFAULT_TARGET, DEFAULT_TIMEOUT, Connection, Tls
from qkvd.items import Item, Result, RopeForm
from qkvd.locks import Stream, UnderWay, calls_under_way
from qkvd.model import Model, Policy
from qkvd.several import Daemon, Daemons, chosen
from qkvd.v1 import admin_pb2, kv_cache_pb2, model_pb2, objects_pb2
from qkvd.waits import GRACE, close

T = TypeVar("T")
M = TypeVar("M", bound=Message)
_END: Any = grpc.aio.EOF  # type: ignore[attr-defined]


class AsyncClient:
    """`qkvd.Client` for asyncio: arguments, answers and errors are the same, every call is awaited.

    The connection belongs to the event loop of the first call. After fork() a child makes a client of its own: used there,
    one of the parent raises FailedPrecondition. A fork waits for calls as those of `Client`.
    """

    def __init__(
        self,
        target: str = DEFAULT_TARGET,
        *,
        tenant: str = "",
        token: str | None = None,
        tls: Tls | bool | None = None,
        timeout: float = DEFAULT_TIMEOUT,
        retry_for: float = DEFAULT_RETRY,
        placement: str = "",
        token_file: str | Path | None = None,
    ):
        self._connection = Connection(target, tenant, token, tls, timeout, retry_for, placement, token_file)
        targets = self._connection.targets if len(self._connection.targets) > 1 else []
        of_each: dict[str, Any] = {
            "tenant": tenant, "token": token, "token_file": token_file, "tls": tls, "timeout": timeout,
        }  # fmt: skip
        self._daemons: Daemons[AsyncClient] = Daemons(
            target, [Daemon(one, AsyncClient(one, retry_for=0, placement=placement, **of_each)) for one in targets]
        )
        self._kept_models: dict[str, Call[Any]] = {}
        self._channel: grpc.aio.Channel | None = None
        self._senders: grpc.Channel | None = None  # of streams of messages (_sent)
        self._loop: asyncio.AbstractEventLoop | None = None
        self._stubs: dict[tuple[str, str], Any] = {}
        self._process = os.getpid()
        self._closed = False
        self._waiting: set[asyncio.Future[Any]] = set()
        self._counted: weakref.WeakSet[Stream | UnderWay] = weakref.WeakSet()  # that end with the connection

    @property
    def target(self) -> str:
        """As given."""
        return self._connection.target

    @property
    def daemons(self) -> dict[str, AsyncClient]:
        """As `Client.daemons`."""
        return self._daemons.clients() or {self.target: self}

    def __repr__(self) -> str:
        return f"qkvd.AsyncClient({self.target!r})"

    async def __aenter__(self) -> AsyncClient:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, value: BaseException | None, at: TracebackType | None
    ) -> None:
        await self.close()

    async def close(self) -> None:
        """Closes the connection. Sessions stay open in the daemon. Calls that are under way end with Cancelled."""
        self._closed = True
        channel, self._channel, self._stubs = self._channel, None, {}
        senders, self._senders = self._senders, None
        if channel is not None:
            await channel.close(None)
        for answer in self._waiting:
            answer.cancel()
        for one in list(self._counted):
            one.end()
        if senders is not None:
            await asyncio.get_running_loop().run_in_executor(None, close, senders)
        for daemon in self._daemons.all:
            if daemon.watch is not None:
                daemon.watch.cancel()
            await daemon.client.close()

    # ---- models ----

    async def register_model(self, model: Model, *, timeout: float | None = None) -> model_pb2.RegisterModelResponse:
        """As `Client.register_model`."""
        call = calls.register_model(model)
        if self._daemons:
            return await several_async.register_model(self, model.name, call, timeout)
        return await self._call(call, timeout)

    async def model(self, name: str, *, timeout: float | None = None) -> model_pb2.GetModelResponse:
        """As `Client.model`."""
        if self._daemons:
            backoff = self._backoff(timeout)
            return (await several_async.each(self, backoff, lambda one, left: one.model(name, timeout=left)))[0][1]
        return await self._call(calls.get_model(name), timeout)

    async def models(self, *, timeout: float | None = None) -> list[model_pb2.GetModelResponse]:
        """As `Client.models`."""
        if self._daemons:
            return await several_async.models(self, timeout)
        return list((await self._call(calls.list_models(), timeout)).models)

    async def calibration(self, model: str, *, timeout: float | None = None) -> bytes:
        """As `Client.calibration`."""
        request = model_pb2.GetCalibrationRequest(model=model).SerializeToString()
        read = calls.reader(model_pb2.GetCalibrationResponse)
        stream = self._stream(calls.CACHE + "GetCalibration", request, timeout)
        return b"".join([read(data).chunk async for data in stream])

    # ---- sessions ----

    async def open(
        self,
        name: str,
        *,
        model: str,
        purpose: str = "attend",
        bits: float | tuple[float, float] | None = None,
        tokens: Sequence[int] | Array | None = None,
        policy: Policy | None = None,
        first_position: int = 0,
        durability: str | None = None,
        max_attention_error: float = 0,
        ttl: float = 0,
        tier_bits: float | None = None,
        keep_full: bool | None = None,
        salt: bytes = b"",
        prefix: Sequence[int] | Array | None = None,
        retention: str | None = None,
        timeout: float | None = None,
    ) -> AsyncSession:
        """As `Client.open`."""
        request = calls.open_request(
            name, model=model, purpose=purpose, bits=bits, policy=policy, first_position=first_position,
            durability=durability, max_attention_error=max_attention_error, ttl=ttl, tier_bits=tier_bits,
            keep_full=keep_full, salt=salt, prefix=prefix, retention=retention,
        )  # fmt: skip
        call = calls.open_session(request)
        return AsyncSession(self, (await self._call(call, timeout)).info, tokens)

    async def put(
        self,
        name: str,
        rows: Iterable[tuple[Any, Any]],
        *,
        model: str,
        tokens: Sequence[int] | Array | None = None,
        seal: bool = False,
        timeout: float | None = None,
        **options: Any,
    ) -> None:
        """As `Client.put`. `rows` are taken in a thread of gRPC's."""
        messages = calls.put_messages(name, rows, model, tokens, seal, options)
        await self._send(calls.CACHE + "Append", messages, timeout, name)

    async def session(self, name: str, *, timeout: float | None = None) -> AsyncSession:
        """As `Client.session`."""
        return AsyncSession(self, await self.session_info(name, timeout=timeout), None)

    async def session_info(self, name: str, *, timeout: float | None = None) -> kv_cache_pb2.SessionInfo:
        """As `Client.session_info`."""
        return await self._call(calls.get_session(name), timeout)

    async def sessions(
        self, prefix: str = "", *, tenant: str = "", model: str = "", timeout: float | None = None
    ) -> AsyncIterator[kv_cache_pb2.SessionInfo]:
        """As `Client.sessions`."""
        if self._daemons:
            for info in await several_async.listed(
                self,
                lambda one: one.sessions(prefix, tenant=tenant, model=model, timeout=timeout),
                lambda info: info.session,
            ):
                yield info
            return
        token = ""
        while True:
            answer = await self._call(calls.list_sessions(prefix, tenant, model, token), timeout)
            for info in answer.sessions:
                yield info
            token = calls.next_page(token, answer.next_page_token)
            if not token:
                return

    async def has_sessions(
        self, names: Sequence[str], *, touch: bool = False, tokens: bool = True, timeout: float | None = None
    ) -> list[Presence]:
        """As `Client.has_sessions`."""
        if self._daemons:
            return await several_async.listwise(
                self,
                names,
                timeout,
                lambda one, at, left: one.has_sessions([names[i] for i in at], touch=touch, tokens=tokens, timeout=left),
            )
        return await self._call(calls.has_sessions(names, touch, tokens), timeout)

    async def close_session(self, name: str, *, keep: bool = False, timeout: float | None = None) -> int:
        """As `Client.close_session`."""
        return (await self._call(calls.close_session(name, keep), timeout)).bytes_freed

    async def match(
        self,
        model: str,
        tokens: Sequence[int] | Array,
        *,
        salt: bytes = b"",
        timeout: float | None = None,
    ) -> Match:
        """As `Client.match`."""
        call = calls.match(model, tokens, salt)
        return await (several_async.match(self, call, timeout) if self._daemons else self._call(call, timeout))

    async def watch(
        self, *, tenant: str = "", model: str = "", token_ids: bool = False, instance: int = 0, after: int = 0
    ) -> AsyncGenerator[kv_cache_pb2.WatchResponse, None]:
        """As `Client.watch`."""
        request = calls.watch_request(tenant, model, token_ids, instance, after)
        read = calls.reader(kv_cache_pb2.WatchResponse)
        client = await self._at(None)
        async with UnderWay():
            answers = client._stub("unary_stream", calls.CACHE + "Watch")(
                request, metadata=self._connection.metadata_of(None)
            )
            counted = Stream()
            client._counted.add(counted)
        patience = max(self._connection.timeout, calls.WATCH_PATIENCE)
        try:
            while (answer := await self._answer(answers.read(), patience, "Watch", patience)) is not _END:
                yield read(answer)
        except grpc.RpcError as error:
            raise errors.of_call(error, "Watch", None) from None
        finally:
            answers.cancel()
            counted.end()

    # ---- opaque objects ----

    async def put_object(self, name: str, data: Any, *, timeout: float | None = None, **options: Any) -> None:
        """As `Client.put_object`."""
        await self.put_objects([(name, data)], timeout=timeout, **options)

    async def put_objects(
        self, objects: Iterable[tuple[str, Any]], *, timeout: float | None = None, **options: Any
    ) -> objects_pb2.PutObjectsResponse:
        """As `Client.put_objects`."""
        if self._daemons:
            return await several_async.put_objects(self, objects, timeout, options)
        first, objects = opaque.first_name(objects)
        messages = opaque.put_messages(objects, **options)
        read = calls.reader(objects_pb2.PutObjectsResponse)
        return read(await self._send(opaque.OBJECTS + "PutObjects", messages, timeout, first))

    async def get_object(self, name: str, *, timeout: float | None = None) -> memoryview | None:
        """As `Client.get_object`."""
        return (await self.get_objects([name], timeout=timeout))[0]

    async def get_objects(
        self, names: Sequence[str], *, out: Sequence[Any] | None = None, timeout: float | None = None
    ) -> list[memoryview | None]:
        """As `Client.get_objects`."""
        opaque.check_outs(names, out)
        if self._daemons:
            return await several_async.listwise(
                self, names, timeout,
                lambda one, at, left: one.get_objects([names[i] for i in at], out=chosen(out, at), timeout=left),
            )  # fmt: skip
        gathering = opaque.Gathering(names, out)
        request, key = opaque.get_request(names), opaque.key_of(names)
        async with contextlib.aclosing(self._stream(opaque.OBJECTS + "GetObjects", request, timeout, key)) as stream:
            async for answer in stream:
                gathering.take(answer)
        return gathering.all()

    async def has_objects(self, names: Sequence[str], *, touch: bool = False, timeout: float | None = None) -> list[int]:
        """As `Client.has_objects`."""
        if self._daemons:
            return await several_async.listwise(
                self,
                names,
                timeout,
                lambda one, at, left: one.has_objects([names[i] for i in at], touch=touch, timeout=left),
            )
        return await self._call(opaque.has_objects(names, touch), timeout)

    async def delete_objects(self, names: Sequence[str], *, timeout: float | None = None) -> list[bool]:
        """As `Client.delete_objects`."""
        if self._daemons:
            return await several_async.listwise(
                self, names, timeout, lambda one, at, left: one.delete_objects([names[i] for i in at], timeout=left)
            )
        return await self._call(opaque.delete_objects(names), timeout)

    async def objects(self, prefix: str = "", *, timeout: float | None = None) -> AsyncIterator[objects_pb2.ObjectInfo]:
        """As `Client.objects`."""
        if self._daemons:
            for info in await several_async.listed(
                self, lambda one: one.objects(prefix, timeout=timeout), lambda info: info.object
            ):
                yield info
            return
        token = ""
        while True:
            answer = await self._call(opaque.list_objects(prefix, token), timeout)
            for info in answer.objects:
                yield info
            token = calls.next_page(token, answer.next_page_token)
            if not token:
                return

    # ---- batches ----

    async def append(self, batch: Sequence[Item], *, timeout: float | None = None) -> int:
        """As `Client.append`."""
        if self._daemons:
            return await several_async.append(self, batch, timeout)
        packed = [items.pack(item) for item in batch]
        if not packed:
            return 0
        read = calls.reader(kv_cache_pb2.AppendResponse)
        if sum(item.bytes for item in packed) <= items.APPEND_BYTES and len(packed) <= items.APPEND_ITEMS:
            # On the wire a stream of one message is a unary call; here it needs no thread.
            message = b"".join(items.append_messages(packed))
            return (await self._call(Call(calls.CACHE + "Append", message, read, True, batch[0].session), timeout)).tokens
        backoff = self._backoff(timeout)
        while True:
            try:
                outgoing = calls.Outgoing(items.append_messages(packed))
                answer = self._sent(calls.CACHE + "Append", outgoing, backoff.left(), batch[0].session, timeout)
                return read(await answer).tokens
            except grpc.RpcError as error:
                outgoing.check()
                await self._wait(backoff, error, "Append", timeout, repeat=True)

    async def attend(
        self,
        batch: Sequence[Item],
        *,
        dtype: str = "fp32",
        out: Sequence[Any] | None = None,
        timeout: float | None = None,
    ) -> list[Result]:
        """As `Client.attend`."""
        items.check_outs(batch, out)
        if self._daemons and batch:
            return await several_async.attend(self, batch, dtype, out, timeout)
        message = items.attend_message(batch, dtype)
        key = next((item.session for item in batch), "")
        answer: bytes = await self._call(Call(calls.CACHE + "Attend", message, lambda data: data, True, key), timeout)
        return items.attend_results(answer, batch, out)

    def decode(self) -> AsyncDecodeStream:
        """As `Client.decode`."""
        return AsyncDecodeStream(self)

    async def fetch_rows(
        self,
        session: str,
        layers: Sequence[int] | None = None,
        *,
        begin: int = 0,
        end: int = 0,
        dtype: str | None = None,
        heads_first: bool = False,
        part: str = "both",
        rope: RopeForm = "after",
        chunk_tokens: int = 0,
        timeout: float | None = None,
    ) -> AsyncGenerator[wire.Rows, None]:
        """As `Client.fetch_rows`."""
        request = calls.fetch_request(session, layers, begin, end, dtype, heads_first, part, rope, chunk_tokens)
        async with contextlib.aclosing(self._stream(calls.CACHE + "Fetch", request, timeout, session)) as stream:
            async for data in stream:
                yield wire.rows(data)

    async def attention_stats(
        self, session: str, layers: Sequence[int] | None = None, *, buckets: int = 0, timeout: float | None = None
    ) -> list[kv_cache_pb2.GetAttentionStatsResponse]:
        """As `Client.attention_stats`."""
        request = calls.stats_request(session, layers, buckets)
        read = calls.reader(kv_cache_pb2.GetAttentionStatsResponse)
        answers = self._stream(calls.CACHE + "GetAttentionStats", request, timeout, session)
        return [read(data) async for data in answers]

    # ---- the daemon ----

    async def status(self, *, timeout: float | None = None) -> admin_pb2.GetStatusResponse:
        """As `Client.status`."""
        return await self._call(calls.status(), timeout)

    async def metrics(self, *, timeout: float | None = None) -> dict[str, float]:
        """As `Client.metrics`."""
        return calls.metrics_of(await self.status(timeout=timeout))

    async def call(self, method: str, request: Message, answer: type[M], *, timeout: float | None = None) -> M:
        """As `Client.call`."""
        return await self._call(calls.simple(method, request, answer, repeat=False), timeout)

    # ---- how calls are made ----

    async def _at(self, key: str | None) -> AsyncClient:
        """The client whose calls reach the session's daemon: this one, or one of several."""
        return (await several_async.owner(self, key)).client if self._daemons else self

    async def _check_fork(self, session: str, name: str) -> None:
        """Not where a daemon other than the session's owns the new name."""
        if self._daemons:
            self._daemons.check_fork(
                session, await several_async.owner(self, session), name, await several_async.owner(self, name)
            )

    def _check(self) -> None:
        """Raises FailedPrecondition where no call can be made."""
        if self._closed:
            raise errors.FailedPrecondition("the client is closed")
        if self._process != os.getpid():
            raise errors.FailedPrecondition("the client was made before fork(): make one in the child")
        calls_under_way.check()
        loop = asyncio.get_running_loop()
        if self._loop not in (None, loop):
            raise errors.FailedPrecondition("the client belongs to another event loop")
        self._loop = loop

    def _stub(self, kind: str, method: str) -> Any:
        self._check()
        if self._channel is None:
            self._channel = self._open()
            calls_under_way.keep(self._channel)
        if (kind, method) not in self._stubs:
            self._stubs[kind, method] = getattr(self._channel, kind)(method, None, None)
        return self._stubs[kind, method]

    def _open(self) -> grpc.aio.Channel:
        connection = self._connection
        if connection.credentials is None:
            return grpc.aio.insecure_channel(connection.target, connection.options())
        return grpc.aio.secure_channel(connection.target, connection.credentials, connection.options())

    def _backoff(self, timeout: float | None) -> Backoff:
        connection = self._connection
        return Backoff(connection.retry_for, calls.checked_timeout(connection.timeout if timeout is None else timeout))

    async def _wait(
        self, backoff: Backoff, error: grpc.RpcError, method: str, timeout: float | None, *, repeat: bool
    ) -> None:
        timeout = self._connection.timeout if timeout is None else timeout
        await asyncio.sleep(backoff.pause(errors.of_call(error, method, timeout), repeat))

    async def _answer(self, answer: Awaitable[T], left: float, method: str, timeout: float | None) -> T:
        """Waits until the deadline, also where gRPC would wait longer (waits.py)."""
        try:
            return await self._wait_for(answer, left + GRACE)
        except asyncio.TimeoutError:
            seconds = self._connection.timeout if timeout is None else timeout
            raise calls.late(method.rpartition("/")[2], seconds) from None
        except asyncio.CancelledError:
            self._check_closed()
            raise

    async def _wait_for(self, answer: Awaitable[T], seconds: float) -> T:
        """Until the client is closed at most: gRPC does not cancel calls that have just begun then."""
        waiting = asyncio.ensure_future(answer)
        self._waiting.add(waiting)
        try:
            return await asyncio.wait_for(waiting, seconds)
        finally:
            self._waiting.discard(waiting)

    def _check_closed(self) -> None:
        """What grpc.aio calls cancelled is the task, unless the client has been closed under a call. (Python 3.10 does not
        tell.)"""
        cancels = getattr(asyncio.current_task(), "cancelling", lambda: 1)()
        if self._closed and not cancels:
            raise errors.Cancelled("the client was closed") from None

    async def _call(self, call: Call[T], timeout: float | None) -> T:
        if self._daemons:
            return await several_async.routed(self, call.key, timeout, call.repeat, lambda one, left: one._call(call, left))
        backoff = self._backoff(timeout)
        while True:
            try:
                async with UnderWay():
                    stub = self._stub("unary_unary", call.method)
                    metadata = self._connection.metadata_of(call.key)
                    left = backoff.left()
                    answer = stub(call.request, timeout=left, metadata=metadata)
                    return call.read(await self._answer(answer, left, call.method, timeout))
            except grpc.RpcError as error:
                await self._wait(backoff, error, call.method, timeout, repeat=call.repeat)

    async def _send(self, method: str, messages: Iterator[bytes], timeout: float | None, key: str | None) -> bytes:
        """A stream of messages and the daemon's answer; not repeated. An error of ours that `messages` raise is raised."""
        if self._daemons:
            return await several_async.routed(
                self, key, timeout, False, lambda one, left: one._send(method, messages, left, key)
            )
        outgoing = calls.Outgoing(messages)
        seconds = calls.checked_timeout(self._connection.timeout if timeout is None else timeout)
        try:
            return await self._sent(method, outgoing, seconds, key, timeout)
        except grpc.RpcError as error:
            outgoing.check()
            raise errors.of_call(error, method, seconds) from None

    async def _sent(
        self, method: str, outgoing: calls.Outgoing, left: float, key: str | None, timeout: float | None
    ) -> bytes:
        """What the daemon answers to a stream of messages, which a thread of gRPC's sends.

        Not by grpc.aio: where a message cannot be sent any more it takes that for the call's end, and what the daemon has
        said meanwhile, such as why it refuses the messages before, is lost.
        """
        loop = asyncio.get_running_loop()
        ended = loop.create_future()

        def tell() -> None:
            if not ended.done():
                ended.set_result(None)

        def end(_: Any) -> None:
            calls_under_way.stream_ends()
            with contextlib.suppress(RuntimeError):  # the loop is closed
                loop.call_soon_threadsafe(tell)

        async with UnderWay():
            call = self._sender(method).future(outgoing, timeout=left, metadata=self._connection.metadata_of(key))
            calls_under_way.stream_begins()
            call.add_done_callback(end)
            try:
                await self._answer(ended, left, method, timeout)
            finally:
                call.cancel()
            return bytes(call.result())

    def _sender(self, method: str) -> Any:
        self._check()
        if self._senders is None:
            to = self._connection
            self._senders = (
                grpc.insecure_channel(to.target, to.options())
                if to.credentials is None
                else grpc.secure_channel(to.target, to.credentials, to.options())
            )
        return self._senders.stream_unary(method, None, None)

    async def _stream(
        self, method: str, request: bytes, timeout: float | None, key: str | None = None
    ) -> AsyncGenerator[bytes, None]:
        if self._daemons:
            async with contextlib.aclosing(several_async.stream(self, method, request, timeout, key)) as stream:
                async for answer in stream:
                    yield answer
            return
        backoff = self._backoff(timeout)
        began = False
        while True:
            try:
                async with UnderWay() as counted:
                    self._counted.add(counted)
                    stub = self._stub("unary_stream", method)
                    left = backoff.left()
                    answers = stub(request, timeout=left, metadata=self._connection.metadata_of(key))
                    try:
                        answer = await self._answer(answers.read(), left, method, timeout)
                        while answer is not _END:
                            began = True
                            yield answer
                            answer = await self._answer(answers.read(), backoff.left(), method, timeout)
                        return
                    finally:
                        answers.cancel()
            except grpc.RpcError as error:
                await self._wait(backoff, error, method, timeout, repeat=not began)


class AsyncDecodeStream:
    """As `DecodeStream`; made by `AsyncClient.decode`. Steps of several tasks take turns."""

    def __init__(self, client: AsyncClient):
        self._client = client
        self._lock = asyncio.Lock()
        self._call: Any = None
        self._key: str | None = None  # of the first step's first item
        self._failure: errors.Error | None = None
        self._streams = several_async.Streams(client) if client._daemons else None

    async def __aenter__(self) -> AsyncDecodeStream:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, value: BaseException | None, at: TracebackType | None
    ) -> None:
        await self.close()

    async def attend(
        self,
        batch: Sequence[Item],
        *,
        dtype: str = "fp32",
        out: Sequence[Any] | None = None,
        timeout: float | None = None,
    ) -> list[Result]:
        """As `DecodeStream.attend`. A task that is cancelled while it waits ends the stream."""
        items.check_outs(batch, out)
        if self._streams is not None:
            async with self._lock:
                if self._failure is not None:
                    raise self._failure
                return await self._streams.attend(batch, dtype, out, timeout)
        message = items.attend_message(batch, dtype)
        seconds = calls.checked_timeout(self._client._connection.timeout if timeout is None else timeout)
        async with self._lock:
            self._key = self._key or next((item.session for item in batch), None)
            return items.attend_results(await self._step(message, seconds), batch, out)

    async def close(self) -> None:
        """Ends the stream."""
        async with self._lock:
            if self._failure is None:
                self._fail(errors.FailedPrecondition("the decode stream is closed"))
            if self._streams is not None:
                await self._streams.close()

    async def _step(self, message: bytes, seconds: float) -> bytes:
        if self._failure is not None:
            raise self._failure
        try:
            if self._call is None:
                async with UnderWay():
                    stub = self._client._stub("stream_stream", calls.CACHE + "Decode")
                    self._call = stub(metadata=self._client._connection.metadata_of(self._key))
                    self._counted = Stream()
                    self._client._counted.add(self._counted)
            answer = await self._client._wait_for(self._exchange(message), seconds)
            if answer is not _END:
                return bytes(answer)
            self._fail(errors.Unavailable("the daemon has ended the decode stream"))
        except asyncio.TimeoutError:
            self._fail(calls.late("Decode", seconds))
        except grpc.RpcError as error:
            self._fail(errors.of_call(error, "Decode", None))
        except asyncio.CancelledError:
            self._fail(errors.Cancelled("a step of the decode stream was cancelled"))
            self._client._check_closed()
            raise
        assert self._failure is not None
        raise self._failure

    async def _exchange(self, message: bytes) -> Any:
        with contextlib.suppress(asyncio.InvalidStateError):  # the call has ended since, which reading tells
            await self._call.write(message)
        return await self._call.read()

    def _fail(self, error: errors.Error) -> None:
        self._failure = error
        if self._call is not None:
            self._call.cancel()
            self._counted.end()
