"""The client: a connection to a daemon, for models, sessions, and batches over many sessions."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, TypeVar

import grpc
from google.protobuf.message import Message

from qkvd import calls, connection, errors, items, several_sync, waits, wire
from qkvd import objects as opaque
from qkvd.arrays import Array
from qkvd.calls import Backoff, Call, Match, Presence
from qkvd.connection import DEFAULT_RETRY, DEFAULT_TARGET, DEFAULT_TIMEOUT, Connection, Tls
from qkvd.decode import DecodeStream
from qkvd.items import Item, Result, RopeForm
from qkvd.locks import Lock, calls_under_way
from qkvd.model import Model, Policy
from qkvd.native import Native
from qkvd.session import Session
from qkvd.several import Daemon, Daemons, chosen
from qkvd.v1 import admin_pb2, kv_cache_pb2, model_pb2, objects_pb2

T = TypeVar("T")
M = TypeVar("M", bound=Message)


class Client:
    """A connection to the daemon at `target`, "unix:PATH" or "HOST:PORT", or to several, a list with commas.

    Nothing is opened before the first call; a daemon that went away is connected to anew. A client may be used by several
    threads at once, and in a child process after fork(), where it opens a connection of its own. A fork waits for calls of
    other threads, at most a second. The child gets FailedPrecondition where some went on, where a stream was open, and with
    grpcio before 1.80: gRPC is not whole then. Leaving a `with` block closes the client; sessions stay open in the daemon.

    Of several daemons each session and object has one, by its name (rendezvous hashing: every client must give the targets
    in the same words). Batches go to all at once, and answers are merged. While a daemon does not answer a health check,
    others stand in for it: its sessions are not found there (NotFound), those of the others stay where they are.
    FailedPrecondition: calls that are for one daemon (`status`, `watch`, `calibration`, `call`) go by `daemons`, and a fork
    stays where its session is.

    tenant: whose sessions and prefixes all calls mean; "": "default", and for `sessions` and `watch` all.
    placement: a label that stands for the names of sessions where their daemon is chosen, here or by a proxy, so that all
        calls of this client go to one.
    token: sent with each call as `authorization: Bearer TOKEN`; without `tls` it can be read on the way.
    token_file: a file that has it, read again within a second or two when it has changed.
    tls: True for the system's certificates, or `Tls`.
    timeout: seconds for each call, which raises DeadlineExceeded after them; each method takes one of its own.
    retry_for: seconds during which a call that found nobody (UNAVAILABLE) is sent again, with growing pauses, if it may
        arrive twice: not `open`, `close_session`, `demote`, `prefetch`, `fork` and what goes over a decode stream.
    native: whether rows go by libqkv, for less processor time: where the package qkvd-native is installed, unless False.
        True: Unimplemented where they cannot.

    Every method raises `qkvd.Error`, of the class that belongs to the status: `InvalidArgument` for arguments beyond their
    limits, `Unavailable` where nobody answers, `DeadlineExceeded`, and what the method names.
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
        native: bool | None = None,
        placement: str = "",
        token_file: str | Path | None = None,
    ):
        self._connection = Connection(target, tenant, token, tls, timeout, retry_for, placement, token_file)
        targets = self._connection.targets if len(self._connection.targets) > 1 else []
        of_each: dict[str, Any] = {
            "tenant": tenant, "token": token, "token_file": token_file, "tls": tls, "timeout": timeout, "native": native,
        }  # fmt: skip
        self._daemons: Daemons[Client] = Daemons(
            target, [Daemon(one, Client(one, retry_for=0, placement=placement, **of_each)) for one in targets]
        )
        self._threads = several_sync.Threads(len(targets))
        self._kept_models: dict[str, Call[Any]] = {}
        self._native = Native(self._connection, native)
        self._models: dict[str, model_pb2.Model] = {}
        self._lock = Lock()
        self._channel: grpc.Channel | None = None
        self._stubs: dict[tuple[str, str], Any] = {}
        self._process = 0
        self._parents: list[Any] = []
        self._closed = False

    @property
    def target(self) -> str:
        """As given."""
        return self._connection.target

    @property
    def daemons(self) -> dict[str, Client]:
        """A client of each daemon, by target; of one target this client."""
        return self._daemons.clients() or {self.target: self}

    def __repr__(self) -> str:
        return f"qkvd.Client({self.target!r})"

    def __enter__(self) -> Client:
        return self

    def __exit__(self, kind: type[BaseException] | None, value: BaseException | None, at: TracebackType | None) -> None:
        self.close()

    def close(self) -> None:
        """Closes the connection. Sessions stay open in the daemon. Calls that are under way end with Cancelled."""
        with self._lock:
            self._closed = True
            channel, self._channel, self._stubs = self._channel, None, {}
        if channel is not None and self._process == os.getpid():
            waits.close(channel)
        self._native.close()
        for daemon in self._daemons.all:
            if daemon.watch is not None:
                daemon.watch.end()
            daemon.client.close()
        self._threads.close()

    # ---- models ----

    def register_model(self, model: Model, *, timeout: float | None = None) -> model_pb2.RegisterModelResponse:
        """Registers a geometry for the client's tenant; the same one again is fine.

        AlreadyExists: the tenant has another model of the name, or a shared one has it.

        The answer has the model with its defaults filled in, and the state of its calibration.
        """
        call = calls.register_model(model)
        if self._daemons:
            return several_sync.register_model(self, model.name, call, timeout)
        return self._call(call, timeout)

    def model(self, name: str, *, timeout: float | None = None) -> model_pb2.GetModelResponse:
        """A registered model, its calibration and how many sessions it has. NotFound."""
        if self._daemons:
            answers = several_sync.each(self, self._backoff(timeout), lambda one, left: one.model(name, timeout=left))
            return answers[0][1]
        return self._call(calls.get_model(name), timeout)

    def models(self, *, timeout: float | None = None) -> list[model_pb2.GetModelResponse]:
        """The tenant's models and shared ones, by name; without a tenant those of all."""
        if self._daemons:
            return several_sync.models(self, timeout)
        return list(self._call(calls.list_models(), timeout).models)

    def calibration(self, model: str, *, timeout: float | None = None) -> bytes:
        """The model's calibration file as the daemon has learnt or loaded it. NotFound: no such model, or it has none."""
        request = model_pb2.GetCalibrationRequest(model=model).SerializeToString()
        read = calls.reader(model_pb2.GetCalibrationResponse)
        return b"".join(read(data).chunk for data in self._stream(calls.CACHE + "GetCalibration", request, timeout))

    # ---- sessions ----

    def open(
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
    ) -> Session:
        """Opens a session, empty unless a `prefix` is found. It stays until it is closed, whatever becomes of this client.

        purpose: "attend", queries come to the daemon; or "fetch", rows go back: smaller, slower to attend.
        bits: code bits a coordinate, in eighths up to 8, of keys and values or a pair of both; `policy` has more settings,
            `qkvd.EXACT` keeps rows as they come.
        tokens: ids of the sequence's tokens, sent along with the rows that belong to them.
        durability: "memory", "async" or "sync"; the latter two need a daemon with a data directory (FailedPrecondition).
        max_attention_error: quality contract, 0 to 1; 0: none.
        ttl: seconds after which an unused session is closed; 0: never.
        salt: what the rows depend on other than model and tokens (an adapter, images, a user's secret), up to 256 bytes:
            `match` finds sessions of the same salt alone.
        prefix: token ids from position 0 on. The session begins with as many of them, a multiple of 64, as an open session
            of the same model, salt and coding holds; `lengths` of the new session says how many.
        retention: "keep", or "evict": where memory, sessions or the SSD are full, the longest unused of these are closed;
            None: the daemon's own, which is "keep" unless its `--retention` says otherwise.

        AlreadyExists: the name is taken. NotFound: no such model. ResourceExhausted: too many sessions, or no memory.
        """
        request = calls.open_request(
            name, model=model, purpose=purpose, bits=bits, policy=policy, first_position=first_position,
            durability=durability, max_attention_error=max_attention_error, ttl=ttl, tier_bits=tier_bits,
            keep_full=keep_full, salt=salt, prefix=prefix, retention=retention,
        )  # fmt: skip
        call = calls.open_session(request)
        return Session(self, self._call(call, timeout).info, tokens)

    def put(
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
        """Opens a session with these rows, one (k, v) a layer in order, in one call: a whole session, or none at all.

        `rows` may be a generator, whose pairs are sent as they come; where it raises, and where this process dies, the
        daemon has nothing of the session. tokens: ids of the rows' tokens. seal: the exact rows of the recent window and of
        the last page are coded, too; for sessions that are not appended to any more. options: those of `open`, without
        `prefix`. AlreadyExists: the name is open. ResourceExhausted: too many sessions, or no memory. Not repeated.
        """
        self._send(calls.CACHE + "Append", calls.put_messages(name, rows, model, tokens, seal, options), timeout, name)

    def session(self, name: str, *, timeout: float | None = None) -> Session:
        """A session that is open already, in the daemon or on its SSD. NotFound."""
        return Session(self, self.session_info(name, timeout=timeout), None)

    def session_info(self, name: str, *, timeout: float | None = None) -> kv_cache_pb2.SessionInfo:
        """What a session is and holds now. NotFound."""
        return self._call(calls.get_session(name), timeout)

    def sessions(
        self, prefix: str = "", *, tenant: str = "", model: str = "", timeout: float | None = None
    ) -> Iterator[kv_cache_pb2.SessionInfo]:
        """The open sessions by name, without their lengths; asked for a thousand at a time."""
        if self._daemons:
            yield from several_sync.listed(
                self,
                lambda one: one.sessions(prefix, tenant=tenant, model=model, timeout=timeout),
                lambda info: info.session,
            )
            return
        token = ""
        while True:
            answer = self._call(calls.list_sessions(prefix, tenant, model, token), timeout)
            yield from answer.sessions
            token = calls.next_page(token, answer.next_page_token)
            if not token:
                return

    def has_sessions(
        self, names: Sequence[str], *, touch: bool = False, tokens: bool = True, timeout: float | None = None
    ) -> list[Presence]:
        """Which of these sessions are open (true in a condition), in order; up to 16384 names in one call.

        touch: counts as a use of those that are open, which matters where sessions expire or are evicted.
        tokens: whether `Presence.tokens` is wanted, for which the daemon reads all layers; False: it is 0.
        """
        if self._daemons:
            return several_sync.listwise(
                self,
                names,
                timeout,
                lambda one, at, left: one.has_sessions([names[i] for i in at], touch=touch, tokens=tokens, timeout=left),
            )
        return self._call(calls.has_sessions(names, touch, tokens), timeout)

    def close_session(self, name: str, *, keep: bool = False, timeout: float | None = None) -> int:
        """Closes a session and frees its rows; with `keep` they stay on the SSD alone. Gives the bytes freed. NotFound."""
        return self._call(calls.close_session(name, keep), timeout).bytes_freed

    def match(
        self,
        model: str,
        tokens: Sequence[int] | Array,
        *,
        salt: bytes = b"",
        timeout: float | None = None,
    ) -> Match:
        """The open session of this model and salt that shares the longest prefix with these token ids.

        Sessions whose rows were appended with their `tokens` can be found. NotFound: no such model.
        """
        call = calls.match(model, tokens, salt)
        if self._daemons:
            return several_sync.match(self, call, timeout)
        return self._call(call, timeout)

    def watch(
        self, *, tenant: str = "", model: str = "", token_ids: bool = False, instance: int = 0, after: int = 0
    ) -> Iterator[kv_cache_pb2.WatchResponse]:
        """What prefixes come and go, for routers: messages until the loop is left, one every ten seconds at least.

        The first has `reset`: forget all, a snapshot begins, which ends with `complete`. It comes again with `missed` where
        the reader was too slow. instance, after: `instance` and `sequence` of the last message of a watch before, which
        goes on there if the daemon still knows what has happened since. Unavailable: the daemon stops, or is gone.
        DeadlineExceeded: no message came for the client's `timeout`, or for 30 s where that is longer. ResourceExhausted:
        `limit-watchers`.
        """
        request = calls.watch_request(tenant, model, token_ids, instance, after)
        read = calls.reader(kv_cache_pb2.WatchResponse)
        client = self._at(None)
        with calls_under_way:
            answers = client._answers("unary_stream", calls.CACHE + "Watch", request, None)
            calls_under_way.stream_begins()
        silence, process = waits.Silence(answers, max(self._connection.timeout, calls.WATCH_PATIENCE)), os.getpid()
        try:
            for answer in silence.heard():
                yield read(answer)
                if process != os.getpid():
                    raise errors.FailedPrecondition("the watch began before fork(): begin one in the child")
        except grpc.RpcError as error:
            raise silence.error("Watch") or client._failure(error, "Watch", None) from None
        finally:
            if calls_under_way.is_own(process, silence, answers):
                silence.end()
                answers.cancel()
                calls_under_way.stream_ends()

    # ---- opaque objects ----

    def put_object(self, name: str, data: Any, *, timeout: float | None = None, **options: Any) -> None:
        """Keeps bytes under a name; `put_objects` says what the options are."""
        self.put_objects([(name, data)], timeout=timeout, **options)

    def put_objects(
        self, objects: Iterable[tuple[str, Any]], *, timeout: float | None = None, **options: Any
    ) -> objects_pb2.PutObjectsResponse:
        """Keeps bytes, or anything with a buffer in one piece, under names, each whole or not at all, in order.

        options: `retention`, `durability` and `ttl` as in `open`; `replace`: an object
        takes the place of another one of its name. The same bytes again are fine. AlreadyExists: other bytes have the
        name. ResourceExhausted: `limit-objects`, or memory. The first that fails ends the call; those before it stay.
        Not repeated.
        """
        if self._daemons:
            return several_sync.put_objects(self, objects, timeout, options)
        first, objects = opaque.first_name(objects)
        messages = opaque.put_messages(objects, **options)
        read = calls.reader(objects_pb2.PutObjectsResponse)
        return read(self._send(opaque.OBJECTS + "PutObjects", messages, timeout, first))

    def get_object(self, name: str, *, timeout: float | None = None) -> memoryview | None:
        """The bytes of an object, or None where there is none."""
        return (self.get_objects([name], timeout=timeout))[0]

    def get_objects(
        self, names: Sequence[str], *, out: Sequence[Any] | None = None, timeout: float | None = None
    ) -> list[memoryview | None]:
        """The bytes of many objects, None where there is none, in order; up to 16384 names in one call.

        out: memory for each of them, that can be written to; what is given back are views of it. InvalidArgument: it is too
        small. DataLoss: what came does not have the object's checksum.
        """
        opaque.check_outs(names, out)
        if self._daemons:
            return several_sync.listwise(
                self, names, timeout,
                lambda one, at, left: one.get_objects([names[i] for i in at], out=chosen(out, at), timeout=left),
            )  # fmt: skip
        gathering = opaque.Gathering(names, out)
        request, key = opaque.get_request(names), opaque.key_of(names)
        for answer in self._stream(opaque.OBJECTS + "GetObjects", request, timeout, key):
            gathering.take(answer)
        return gathering.all()

    def has_objects(self, names: Sequence[str], *, touch: bool = False, timeout: float | None = None) -> list[int]:
        """How many bytes each of these objects has, 0 where there is none, in order; up to 16384 names in one call.

        touch: counts as a use of those that are there.
        """
        if self._daemons:
            return several_sync.listwise(
                self,
                names,
                timeout,
                lambda one, at, left: one.has_objects([names[i] for i in at], touch=touch, timeout=left),
            )
        return self._call(opaque.has_objects(names, touch), timeout)

    def delete_objects(self, names: Sequence[str], *, timeout: float | None = None) -> list[bool]:
        """Deletes objects; which of them were there."""
        if self._daemons:
            return several_sync.listwise(
                self, names, timeout, lambda one, at, left: one.delete_objects([names[i] for i in at], timeout=left)
            )
        return self._call(opaque.delete_objects(names), timeout)

    def objects(self, prefix: str = "", *, timeout: float | None = None) -> Iterator[objects_pb2.ObjectInfo]:
        """The objects of the client's tenant, by name."""
        if self._daemons:
            yield from several_sync.listed(self, lambda one: one.objects(prefix, timeout=timeout), lambda info: info.object)
            return
        token = ""
        while True:
            answer = self._call(opaque.list_objects(prefix, token), timeout)
            yield from answer.objects
            token = calls.next_page(token, answer.next_page_token)
            if not token:
                return

    # ---- batches ----

    def append(self, batch: Sequence[Item], *, timeout: float | None = None) -> int:
        """Appends rows, of any sessions and layers, in order; gives how many tokens were new.

        Each item is applied whole or not at all, large ones in pieces of some MiB; the first that fails ends the call, and
        what was before it stays. FailedPrecondition: a gap, the text has the expected position. AlreadyExists: other rows
        are held there. ResourceExhausted: memory.
        """
        if self._daemons:
            return several_sync.append(self, batch, timeout)
        packed = [items.pack(item) for item in batch]
        if not packed:
            return 0
        key, backoff = batch[0].session, self._backoff(timeout)
        if self._native.usable() and all(item.k is not None and item.q is None and not item.placed for item in packed):
            new = self._native.append(packed, self._seconds(timeout))
            if new is not None:
                return new
            timeout = backoff.left()
        read = calls.reader(kv_cache_pb2.AppendResponse)
        if sum(item.bytes for item in packed) <= items.UNARY_BYTES and len(packed) <= items.APPEND_ITEMS:
            # On the wire a stream of one message is a unary call; here it needs no thread of its own.
            message = b"".join(items.append_messages(packed))
            return self._call(Call(calls.CACHE + "Append", message, read, True, key, step=True), timeout).tokens
        while True:
            try:
                outgoing = calls.Outgoing(items.append_messages(packed))
                with calls_under_way:
                    stub = self._stub("stream_unary", calls.CACHE + "Append")
                    metadata, left = self._connection.metadata_of(key), backoff.left()
                    answer = stub.future(outgoing, timeout=left, metadata=metadata)
                    return read(waits.answer(answer, left, "Append", self._seconds(timeout))).tokens
            except grpc.RpcError as error:
                outgoing.check()
                self._wait(backoff, error, "Append", timeout, repeat=True)
            except ValueError:
                self._check_open()
                raise

    def attend(
        self,
        batch: Sequence[Item],
        *,
        dtype: str = "fp32",
        out: Sequence[Any] | None = None,
        timeout: float | None = None,
    ) -> list[Result]:
        """Appends where an item has rows, then attends where it has queries; one result for each item, in order.

        dtype: of the results' `out`. out: an array for each item that its attention is written to, or None. Items fail one
        by one (`Result.error`); where all of them failed the call raises the first one's error. Two items that append to
        the same layer of a session belong into two calls.
        """
        items.check_outs(batch, out)
        if self._daemons and batch:
            return several_sync.attend(self, batch, dtype, out, timeout)
        message = items.attend_message(batch, dtype)
        key = next((item.session for item in batch), "")
        call: Call[bytes] = Call(calls.CACHE + "Attend", message, lambda data: data, True, key, step=True)
        answer = self._call(call, timeout)
        return items.attend_results(answer, batch, out)

    def decode(self) -> DecodeStream:
        """Opens a stream for a decode loop: `attend` over and over on one call, cheaper for each step."""
        if self._daemons:
            return several_sync.DecodeStreams(self)
        return DecodeStream(
            lambda requests, key: self._answers("stream_stream", calls.CACHE + "Decode", requests, key),
            self._connection.timeout,
        )

    def fetch_rows(
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
    ) -> Iterator[wire.Rows]:
        """Rows as they arrive, without a copy: views that cannot be written to. Leaving the loop cancels the call.

        `Session.fetch` puts a layer together, and says what the arguments are; `chunk_tokens` is how many tokens a piece
        has at most (0: about 1 MiB of rows). A call that breaks off is not repeated here.
        """
        request = calls.fetch_request(session, layers, begin, end, dtype, heads_first, part, rope, chunk_tokens)
        return map(wire.rows, self._stream(calls.CACHE + "Fetch", request, timeout, session))

    def attention_stats(
        self, session: str, layers: Sequence[int] | None = None, *, buckets: int = 0, timeout: float | None = None
    ) -> list[kv_cache_pb2.GetAttentionStatsResponse]:
        """How much attention a session's tokens receive and how many bits they have, for each layer and KV head."""
        request = calls.stats_request(session, layers, buckets)
        read = calls.reader(kv_cache_pb2.GetAttentionStatsResponse)
        return [read(data) for data in self._stream(calls.CACHE + "GetAttentionStats", request, timeout, session)]

    # ---- the daemon ----

    def status(self, *, timeout: float | None = None) -> admin_pb2.GetStatusResponse:
        """Version, memory, options in force and metrics of the daemon."""
        return self._call(calls.status(), timeout)

    def metrics(self, *, timeout: float | None = None) -> dict[str, float]:
        """The daemon's metrics by name, as Prometheus would show them."""
        return calls.metrics_of(self.status(timeout=timeout))

    def call(self, method: str, request: Message, answer: type[M], *, timeout: float | None = None) -> M:
        """Any other unary method, such as "/qkv.v1.Admin/GetStorage", with messages of `qkvd.v1`. It is not repeated."""
        return self._call(calls.simple(method, request, answer, repeat=False), timeout)

    # ---- how calls are made ----

    def _at(self, key: str | None) -> Client:
        """The client whose calls reach the session's daemon: this one, or one of several."""
        return several_sync.owner(self, key).client if self._daemons else self

    def _coded(self, session: str, timeout: float | None, work: Callable[[Client, float], T]) -> T:
        """A coded transfer, which is not repeated, with the client of the session's daemon."""
        if self._daemons:
            return several_sync.routed(self, session, timeout, False, work)
        return work(self, self._seconds(timeout))

    def _fetches_native(self, session: str) -> bool:
        """Whether rows of this session come by libqkv; where its daemon does not answer, the call says so."""
        try:
            return self._at(session)._native.usable()
        except errors.Unavailable:
            return False

    def _check_fork(self, session: str, name: str) -> None:
        """Not where a daemon other than the session's owns the new name."""
        if self._daemons:
            self._daemons.check_fork(session, several_sync.owner(self, session), name, several_sync.owner(self, name))

    def _stub(self, kind: str, method: str) -> Any:
        """The callable of a method, on a channel of this process."""
        with self._lock:
            if self._closed:
                raise errors.FailedPrecondition("the client is closed")
            if self._process not in (0, os.getpid()) and not connection.SERVES_CHILDREN:
                raise errors.FailedPrecondition(
                    f"a client after fork() needs grpcio 1.80 or later, this is {grpc.__version__}: spawn processes instead"
                )
            calls_under_way.check()
            if self._process != os.getpid():
                # After fork() the parent's channel is left as it is: closing it would end the parent's connection.
                self._parents.append((self._channel, self._stubs))
                self._process, self._channel, self._stubs = os.getpid(), None, {}
            if self._channel is None:
                self._channel = self._open()
            if (kind, method) not in self._stubs:
                self._stubs[kind, method] = getattr(self._channel, kind)(method, None, None)
            return self._stubs[kind, method]

    def _open(self) -> grpc.Channel:
        to = self._connection
        if to.credentials is None:
            return grpc.insecure_channel(to.target, to.options())
        return grpc.secure_channel(to.target, to.credentials, to.options())

    def _backoff(self, timeout: float | None) -> Backoff:
        default = self._connection
        return Backoff(default.retry_for, calls.checked_timeout(default.timeout if timeout is None else timeout))

    def _seconds(self, timeout: float | None) -> float:
        return calls.checked_timeout(self._connection.timeout if timeout is None else timeout)

    def _geometry(self, model: str, timeout: float | None, *, anew: bool = False) -> model_pb2.Model:
        """A model as it is registered; asked for once, or `anew`."""
        if anew or model not in self._models:
            self._models[model] = self.model(model, timeout=timeout).model
        return self._models[model]

    def _sleep(self, seconds: float) -> None:
        time.sleep(seconds)

    def _wait(self, backoff: Backoff, error: grpc.RpcError, method: str, timeout: float | None, *, repeat: bool) -> None:
        """Waits until the call is sent again, or raises what it failed with."""
        timeout = self._connection.timeout if timeout is None else timeout
        self._sleep(backoff.pause(self._failure(error, method, timeout), repeat))

    def _failure(self, error: grpc.RpcError, method: str, timeout: float | None) -> errors.Error:
        """Why a call has failed."""
        if self._closed and error.code() is grpc.StatusCode.CANCELLED:
            return errors.Cancelled("the client was closed")
        return errors.of_call(error, method, timeout)

    def _check_open(self) -> None:
        """After a ValueError, which is gRPC's for a channel that another thread has closed a moment before a call."""
        if self._closed:
            raise errors.FailedPrecondition("the client is closed") from None

    def _answers(self, kind: str, method: str, request: Any, key: str | None, left: float | None = None) -> Any:
        """A call whose answers are a stream."""
        stub = self._stub(kind, method)
        try:
            return stub(request, timeout=left, metadata=self._connection.metadata_of(key))
        except ValueError:
            self._check_open()
            raise

    def _call(self, call: Call[T], timeout: float | None) -> T:
        if self._daemons:
            return several_sync.routed(self, call.key, timeout, call.repeat, lambda one, left: one._call(call, left))
        backoff = self._backoff(timeout)
        while True:
            try:
                with calls_under_way:
                    stub = self._stub("unary_unary", call.method)
                    left, metadata = backoff.left(), self._connection.metadata_of(call.key)
                    if call.step and len(call.request) <= items.UNARY_BYTES:
                        return call.read(stub(call.request, timeout=left, metadata=metadata))
                    answer = stub.future(call.request, timeout=left, metadata=metadata)
                    return call.read(waits.answer(answer, left, call.method, self._seconds(timeout)))
            except grpc.RpcError as error:
                self._wait(backoff, error, call.method, timeout, repeat=call.repeat)
            except ValueError:
                self._check_open()
                raise

    def _send(self, method: str, messages: Iterator[bytes], timeout: float | None, key: str | None) -> bytes:
        """A stream of messages and the daemon's answer; not repeated. An error of ours that `messages` raise is raised."""
        if self._daemons:
            return several_sync.routed(self, key, timeout, False, lambda one, left: one._send(method, messages, left, key))
        outgoing = calls.Outgoing(messages)
        seconds = calls.checked_timeout(self._connection.timeout if timeout is None else timeout)
        try:
            with calls_under_way:
                stub = self._stub("stream_unary", method)
                answer = stub.future(outgoing, timeout=seconds, metadata=self._connection.metadata_of(key))
                return bytes(waits.answer(answer, seconds, method, seconds))
        except grpc.RpcError as error:
            outgoing.check()
            raise self._failure(error, method, seconds) from None
        except ValueError:
            self._check_open()
            raise

    def _stream(self, method: str, request: bytes, timeout: float | None, key: str | None = None) -> Iterator[bytes]:
        """The messages of a server stream; sent again while none has come."""
        if self._daemons:
            yield from several_sync.stream(self, method, request, timeout, key)
            return
        backoff, process = self._backoff(timeout), os.getpid()
        began = False
        while True:
            left = backoff.left()
            with calls_under_way:
                answers = self._answers("unary_stream", method, request, key, left)
                reader = calls_under_way.read_begins(answers)
            watch = waits.Watch(answers, left)
            try:
                watch.start()
                for answer in answers:
                    watch.cancel()
                    began = True
                    yield answer
                    if process != os.getpid():
                        raise errors.FailedPrecondition("the answers were asked for before fork(): ask anew in the child")
                return
            except grpc.RpcError as error:
                if was := watch.error(method, self._seconds(timeout)):
                    raise was from None
                self._wait(backoff, error, method, timeout, repeat=not began)
            finally:
                if calls_under_way.is_own(process, watch, answers):
                    watch.cancel()
                    answers.cancel()
                    calls_under_way.read_ends(reader)
