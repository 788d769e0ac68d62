"""The client for asyncio: the same calls, awaited."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator, Iterable, Iterator, Sequence
from contextlib import AbstractAsyncContextManager, nullcontext
from types import TracebackType
from typing import Any, TypeVar

import grpc
import grpc.aio
from google.protobuf.message import Message

from qkvd import calls, errors, items, wire
from qkvd import objects as opaque
from qkvd.arrays import Array
from qkvd.calls import Backoff, Call, Match, Presence
from qkvd.connection import DEFAULT_RETRY, DEFAULT_TARGET, DEFAULT_TIMEOUT, Connection, Tls
from qkvd.fetched import Gathered
from qkvd.items import Item, Result, RopeForm
from qkvd.model import AttendOptions, Model, Policy
from qkvd.session import SessionState, joined
from qkvd.v1 import admin_pb2, kv_cache_pb2, model_pb2, objects_pb2

T = TypeVar("T")
M = TypeVar("M", bound=Message)


class AsyncClient:
    """`qkvd.Client` for asyncio: arguments, answers and errors are the same, every call is awaited.

    The connection belongs to the event loop of the first call. After fork() a child makes a client of its own: used there,
    one of the parent raises FailedPrecondition.
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
    ):
        self._connection = Connection(target, tenant, token, tls, timeout, retry_for)
        self._channel: grpc.aio.Channel | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._stubs: dict[tuple[str, str], Any] = {}
        self._process = os.getpid()
        self._closed = False

    @property
    def target(self) -> str:
        """As given."""
        return self._connection.target

    def __repr__(self) -> str:
        return f"qkvd.AsyncClient({self.target!r})"

    async def __aenter__(self) -> AsyncClient:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, value: BaseException | None, at: TracebackType | None
    ) -> None:
        await self.close()

    async def close(self) -> None:
        """Closes the connection. Sessions stay open in the daemon."""
        self._closed = True
        channel, self._channel, self._stubs = self._channel, None, {}
        if channel is not None:
            await channel.close(None)

    # ---- models ----

    async def register_model(self, model: Model, *, timeout: float | None = None) -> model_pb2.RegisterModelResponse:
        """As `Client.register_model`."""
        return await self._call(calls.register_model(model), timeout)

    async def model(self, name: str, *, timeout: float | None = None) -> model_pb2.GetModelResponse:
        """As `Client.model`."""
        return await self._call(calls.get_model(name), timeout)

    async def models(self, *, timeout: float | None = None) -> list[model_pb2.GetModelResponse]:
        """As `Client.models`."""
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
        retention: str = "keep",
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
        """As `Client.put`."""
        await self._send(calls.CACHE + "Append", calls.put_messages(name, rows, model, tokens, seal, options), timeout)

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
        token = ""
        while True:
            answer = await self._call(calls.list_sessions(prefix, tenant, model, token), timeout)
            for info in answer.sessions:
                yield info
            token = answer.next_page_token
            if not token:
                return

    async def has_sessions(
        self, names: Sequence[str], *, touch: bool = False, timeout: float | None = None
    ) -> list[Presence]:
        """As `Client.has_sessions`."""
        return await self._call(calls.has_sessions(names, touch), timeout)

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
        return await self._call(calls.match(model, tokens, salt), timeout)

    async def watch(
        self, *, tenant: str = "", model: str = "", token_ids: bool = False, instance: int = 0, after: int = 0
    ) -> AsyncIterator[kv_cache_pb2.WatchResponse]:
        """As `Client.watch`."""
        request = calls.watch_request(tenant, model, token_ids, instance, after)
        read = calls.reader(kv_cache_pb2.WatchResponse)
        answers = self._stub("unary_stream", calls.CACHE + "Watch")(request, metadata=self._connection.metadata)
        try:
            async for answer in answers:
                yield read(answer)
        except grpc.RpcError as error:
            raise errors.of_call(error, "Watch", self._connection.timeout) from None
        finally:
            answers.cancel()

    # ---- opaque objects ----

    async def put_object(self, name: str, data: Any, *, timeout: float | None = None, **options: Any) -> None:
        """As `Client.put_object`."""
        await self.put_objects([(name, data)], timeout=timeout, **options)

    async def put_objects(
        self, objects: Iterable[tuple[str, Any]], *, timeout: float | None = None, **options: Any
    ) -> objects_pb2.PutObjectsResponse:
        """As `Client.put_objects`."""
        messages = opaque.put_messages(objects, **options)
        read = calls.reader(objects_pb2.PutObjectsResponse)
        return read(await self._send(opaque.OBJECTS + "PutObjects", messages, timeout))

    async def get_object(self, name: str, *, timeout: float | None = None) -> memoryview | None:
        """As `Client.get_object`."""
        return (await self.get_objects([name], timeout=timeout))[0]

    async def get_objects(
        self, names: Sequence[str], *, out: Sequence[Any] | None = None, timeout: float | None = None
    ) -> list[memoryview | None]:
        """As `Client.get_objects`."""
        gathering = opaque.Gathering(names, out)
        async for answer in self._stream(opaque.OBJECTS + "GetObjects", opaque.get_request(names), timeout):
            gathering.take(answer)
        return gathering.found

    async def has_objects(self, names: Sequence[str], *, touch: bool = False, timeout: float | None = None) -> list[int]:
        """As `Client.has_objects`."""
        return await self._call(opaque.has_objects(names, touch), timeout)

    async def delete_objects(self, names: Sequence[str], *, timeout: float | None = None) -> list[bool]:
        """As `Client.delete_objects`."""
        return await self._call(opaque.delete_objects(names), timeout)

    async def objects(self, prefix: str = "", *, timeout: float | None = None) -> AsyncIterator[objects_pb2.ObjectInfo]:
        """As `Client.objects`."""
        token = ""
        while True:
            answer = await self._call(opaque.list_objects(prefix, token), timeout)
            for info in answer.objects:
                yield info
            token = answer.next_page_token
            if not token:
                return

    # ---- batches ----

    async def append(self, batch: Sequence[Item], *, timeout: float | None = None) -> int:
        """As `Client.append`."""
        packed = [items.pack(item) for item in batch]
        if not packed:
            return 0
        read = calls.reader(kv_cache_pb2.AppendResponse)
        backoff = self._backoff(timeout)
        while True:
            try:
                stub = self._stub("stream_unary", calls.CACHE + "Append")
                messages = items.append_messages(packed)
                answer = await stub(messages, timeout=backoff.left(), metadata=self._connection.metadata)
                return read(answer).tokens
            except grpc.RpcError as error:
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
        message = items.attend_message(batch, dtype)
        answer: bytes = await self._call(Call(calls.CACHE + "Attend", message, lambda data: data, True), timeout)
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
    ) -> AsyncIterator[wire.Rows]:
        """As `Client.fetch_rows`."""
        request = calls.fetch_request(session, layers, begin, end, dtype, heads_first, part, rope, chunk_tokens)
        async for data in self._stream(calls.CACHE + "Fetch", request, timeout):
            yield wire.rows(data)

    async def attention_stats(
        self, session: str, layers: Sequence[int] | None = None, *, buckets: int = 0, timeout: float | None = None
    ) -> list[kv_cache_pb2.GetAttentionStatsResponse]:
        """As `Client.attention_stats`."""
        request = calls.stats_request(session, layers, buckets)
        read = calls.reader(kv_cache_pb2.GetAttentionStatsResponse)
        return [read(data) async for data in self._stream(calls.CACHE + "GetAttentionStats", request, timeout)]

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

    def _stub(self, kind: str, method: str) -> Any:
        if self._closed:
            raise errors.FailedPrecondition("the client is closed")
        if self._process != os.getpid():
            raise errors.FailedPrecondition("the client was made before fork(): make one in the child")
        loop = asyncio.get_running_loop()
        if self._loop not in (None, loop):
            raise errors.FailedPrecondition("the client belongs to another event loop")
        if self._channel is None:
            self._loop, self._channel = loop, self._open()
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

    async def _call(self, call: Call[T], timeout: float | None) -> T:
        backoff = self._backoff(timeout)
        while True:
            try:
                stub = self._stub("unary_unary", call.method)
                return call.read(await stub(call.request, timeout=backoff.left(), metadata=self._connection.metadata))
            except grpc.RpcError as error:
                await self._wait(backoff, error, call.method, timeout, repeat=call.repeat)

    async def _send(self, method: str, messages: Iterator[bytes], timeout: float | None) -> bytes:
        """A stream of messages and the daemon's answer; not repeated. An error of ours that `messages` raise is raised."""
        outgoing = calls.Outgoing(messages)
        stub = self._stub("stream_unary", method)
        seconds = calls.checked_timeout(self._connection.timeout if timeout is None else timeout)
        try:
            return bytes(await stub(outgoing, timeout=seconds, metadata=self._connection.metadata))
        except grpc.RpcError as error:
            if isinstance(outgoing.failure, errors.Error):
                raise outgoing.failure from None
            raise errors.of_call(error, method, seconds) from outgoing.failure

    async def _stream(self, method: str, request: bytes, timeout: float | None) -> AsyncIterator[bytes]:
        backoff = self._backoff(timeout)
        began = False
        while True:
            stub = self._stub("unary_stream", method)
            answers = stub(request, timeout=backoff.left(), metadata=self._connection.metadata)
            try:
                async for answer in answers:
                    began = True
                    yield answer
                return
            except grpc.RpcError as error:
                await self._wait(backoff, error, method, timeout, repeat=not began)
            finally:
                answers.cancel()


class AsyncDecodeStream:
    """As `DecodeStream`; made by `AsyncClient.decode`. Steps of several tasks take turns."""

    def __init__(self, client: AsyncClient):
        self._client = client
        self._lock = asyncio.Lock()
        self._call: Any = None
        self._failure: errors.Error | None = None

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
        message = items.attend_message(batch, dtype)
        seconds = calls.checked_timeout(self._client._connection.timeout if timeout is None else timeout)
        async with self._lock:
            return items.attend_results(await self._step(message, seconds), batch, out)

    async def close(self) -> None:
        """Ends the stream."""
        async with self._lock:
            if self._failure is None:
                self._fail(errors.FailedPrecondition("the decode stream is closed"))

    async def _step(self, message: bytes, seconds: float) -> bytes:
        if self._failure is not None:
            raise self._failure
        try:
            if self._call is None:
                stub = self._client._stub("stream_stream", calls.CACHE + "Decode")
                self._call = stub(metadata=self._client._connection.metadata)
            answer = await asyncio.wait_for(self._exchange(message), seconds)
            if answer is not grpc.aio.EOF:  # type: ignore[attr-defined]
                return bytes(answer)
            self._fail(errors.Unavailable("the daemon has ended the decode stream"))
        except asyncio.TimeoutError:
            self._fail(calls.late("Decode", seconds))
        except grpc.RpcError as error:
            self._fail(errors.of_call(error, "Decode", None))
        except asyncio.CancelledError:
            self._fail(errors.Cancelled("a step of the decode stream was cancelled"))
            raise
        assert self._failure is not None
        raise self._failure

    async def _exchange(self, message: bytes) -> Any:
        await self._call.write(message)
        return await self._call.read()

    def _fail(self, error: errors.Error) -> None:
        self._failure = error
        if self._call is not None:
            self._call.cancel()


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
                async for piece in self._client.fetch_rows(
                    self.name, [layer], begin=begin, end=end, dtype=dtype, heads_first=heads_first, part=part,
                    rope=rope, timeout=backoff.left(),
                ):  # fmt: skip
                    gathered.put(piece)
                return gathered.taken()
            except errors.Unavailable as error:
                await asyncio.sleep(backoff.pause(error, True))

    async def truncate(self, position: int, *, layers: Sequence[int] | None = None, timeout: float | None = None) -> None:
        """As `Session.truncate`."""
        self._lengths = list((await self._client._call(calls.truncate(self.name, position, layers), timeout)).lengths)

    async def fork(self, name: str, position: int = 0, *, timeout: float | None = None) -> AsyncSession:
        """As `Session.fork`."""
        answer = await self._client._call(calls.fork(self.name, name, position), timeout)
        return AsyncSession(self._client, answer.info, self.tokens)

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
