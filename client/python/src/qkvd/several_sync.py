"""`Client` with several targets: calls that go to more than one of its daemons."""

from __future__ import annotations

import contextlib
import heapq
import os
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent import futures
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

import grpc

from qkvd import calls, errors, waits
from qkvd.calls import Backoff, Call, Match
from qkvd.decode import DecodeStream
from qkvd.items import Item, Result, check_outs
from qkvd.locks import Lock, calls_under_way
from qkvd.several import CHECK, CHECK_SECONDS, SERVING, Daemon, Within, chosen, found, grouped, in_order, merged, pauses
from qkvd.v1 import model_pb2, objects_pb2

if TYPE_CHECKING:
    from qkvd.client import Client

T = TypeVar("T")
Groups = list[tuple[list[int], T | errors.Error]]  # places of what was asked, and the answer to them


CALLERS = 64  # threads of the program whose batches do not wait for each other's


class Threads:
    """Those that a batch needs besides its caller's, where it goes to several daemons at once. A child of fork() has its
    own."""

    def __init__(self, most: int):
        self._most = most
        self._process = 0
        self._pool: futures.ThreadPoolExecutor | None = None
        self._closed = False
        self._lock = Lock()

    def map(self, works: Sequence[Callable[[], T]]) -> list[T]:
        """Their answers, in order. The last one is found by the caller's thread."""
        if len(works) < 2:
            return [work() for work in works]
        with self._lock:
            if self._closed:
                raise errors.FailedPrecondition("the client is closed")
            if self._pool is None or self._process != os.getpid():
                self._process = os.getpid()
                self._pool = futures.ThreadPoolExecutor(CALLERS * self._most, "qkvd-daemons")  # made as they are needed
            others = [self._pool.submit(work) for work in works[:-1]]
        last = works[-1]()
        return [*(one.result() for one in others), last]

    def close(self) -> None:
        """Ends them."""
        with self._lock:
            self._closed = True
            if self._pool is not None and self._process == os.getpid():
                self._pool.shutdown(wait=False)


class Watch(threading.Thread):
    """Asks a daemon that has not answered until it does, `end` is called, or its client is no more."""

    def __init__(self, client: Client, daemon: Daemon[Client]):
        super().__init__(name="qkvd-health", daemon=True)
        self._client = weakref.ref(client)
        self._daemon = daemon.client
        self._process = os.getpid()
        self._ended = threading.Event()

    def goes_on(self) -> bool:
        """Not in a child of fork(), which has none of its parent's threads."""
        return self._process == os.getpid() and self.is_alive()

    def end(self) -> None:
        """Looks no more."""
        if self._process == os.getpid():
            self._ended.set()

    def run(self) -> None:
        for pause in pauses():
            if self._ended.wait(pause) or self._client() is None:
                return
            try:
                if _healthy(self._daemon, CHECK_SECONDS, in_background=True):
                    return
            except (errors.Error, ValueError):  # it is closed
                return


def serves(client: Client, daemon: Daemon[Client], within: Within) -> bool:
    """Whether calls may go there. One that is suspect, and not watched, is asked, and gets the client's models."""
    if not daemon.suspect:
        return True
    if daemon.watch is not None and daemon.watch.goes_on():
        return False
    answers = _healthy(daemon.client, within.left())
    for call in list(client._kept_models.values()) if answers else ():
        try:
            daemon.client._call(call, within.rest() / 2)
        except (errors.Unavailable, errors.DeadlineExceeded):
            answers = False
        except errors.Error:
            pass  # what refuses a model refuses its sessions, too
    daemon.suspect = not answers  # not before it has the models, which calls of other threads need
    if daemon.suspect:
        with client._lock, contextlib.suppress(RuntimeError):  # no thread is left: the next call asks itself
            if daemon.watch is None or not daemon.watch.goes_on():
                watch = Watch(client, daemon)
                watch.start()
                daemon.watch = watch
    return not daemon.suspect


def _healthy(client: Client, seconds: float, *, in_background: bool = False) -> bool:
    """in_background: a fork does not wait for the answer, and the daemon counts as one that does not answer."""
    try:
        with calls_under_way:
            stub = client._stub("unary_unary", CHECK)
            answer = stub.future(b"", timeout=seconds, metadata=client._connection.metadata)
            with calls_under_way.given_up(answer) if in_background else contextlib.nullcontext():
                return bool(waits.answer(answer, seconds, CHECK, seconds) == SERVING)
    except (grpc.RpcError, grpc.FutureCancelledError, errors.DeadlineExceeded):
        return False


def owner(client: Client, key: str | None, seconds: float = CHECK_SECONDS) -> Daemon[Client]:
    """Of those that serve, which takes no longer than that."""
    within = Within(seconds)
    for daemon in client._daemons.ranked(client._connection.placement or key):
        if serves(client, daemon, within):
            return daemon
    raise client._daemons.nobody()


def serving(client: Client, seconds: float = CHECK_SECONDS) -> list[Daemon[Client]]:
    """All that do, which takes no longer than that; those that are to be asked are asked at the same time. Unavailable
    where none does."""
    asked = [daemon for daemon in client._daemons.all if daemon.suspect]
    if asked:
        client._threads.map([partial(serves, client, daemon, Within(seconds)) for daemon in asked])
    all_of_them = [daemon for daemon in client._daemons.all if not daemon.suspect]
    if not all_of_them:
        raise client._daemons.nobody()
    return all_of_them


def routed(client: Client, key: str | None, timeout: float | None, repeat: bool, work: Callable[[Client, float], T]) -> T:
    """A call of one daemon. Where that does not answer, and the call may arrive twice, of who stands in for it."""
    backoff = client._backoff(timeout)
    while True:
        daemon = None
        try:
            daemon = owner(client, key, backoff.left())
            return work(daemon.client, backoff.left())
        except errors.Error as error:
            if daemon is not None:
                daemon.failed(error)
            client._sleep(backoff.pause(error, repeat or daemon is None))


def stream(client: Client, method: str, request: bytes, timeout: float | None, key: str | None) -> Iterator[bytes]:
    """The messages of a server stream of one daemon; sent again while none has come."""
    backoff = client._backoff(timeout)
    began = False
    while True:
        daemon = None
        try:
            daemon = owner(client, key, backoff.left())
            for answer in daemon.client._stream(method, request, backoff.left(), key):
                began = True
                yield answer
            return
        except errors.Error as error:
            if daemon is not None:
                daemon.failed(error)
            client._sleep(backoff.pause(error, not began))


def spread(
    client: Client,
    keys: Sequence[str],
    timeout: float | None,
    work: Callable[[Client, list[int], float], T],
    *,
    repeat: bool = True,
) -> Groups[T]:
    """Each owner's part of a batch, at once; the parts of those that do not answer, of who stands in for them."""
    backoff = client._backoff(timeout)

    def attempt(daemon: Daemon[Client], places: list[int]) -> T | errors.Error:
        try:
            return work(daemon.client, places, backoff.left())
        except errors.Error as error:
            daemon.failed(error)
            return error

    done: Groups[T] = []
    left = list(range(len(keys)))
    while left:
        failure: errors.Error
        try:
            groups = grouped([owner(client, keys[place], backoff.left()) for place in left])
        except errors.Error as error:
            groups, failure, again = {}, error, left
        else:
            parts = [(daemon, [left[i] for i in chosen_places]) for daemon, chosen_places in groups.items()]
            again = []
            answers = client._threads.map([lambda d=d, p=p: attempt(d, p) for d, p in parts])  # type: ignore[misc]
            for (_, places), answer in zip(parts, answers, strict=True):
                if repeat and isinstance(answer, errors.Unavailable):
                    again, failure = again + places, answer
                else:
                    done.append((places, answer))
        left = again
        if left:
            try:
                client._sleep(backoff.pause(failure, True))
            except errors.Error as error:
                done.append((left, error))
                left = []
    return done


# ---- what Client has ----


def register_model(client: Client, name: str, call: Call[T], timeout: float | None) -> T:
    """With all that serve; the others get it as soon as they do."""
    answer = each(client, client._backoff(timeout), lambda one, left: one._call(call, left))[0][1]
    client._kept_models[name] = call
    return answer


def each(client: Client, backoff: Backoff, work: Callable[[Client, float], T]) -> list[tuple[Daemon[Client], T]]:
    """The answers of all that serve; those that lack what was asked for, are gone or say nothing are passed over unless all
    are."""

    def attempt(daemon: Daemon[Client]) -> tuple[Daemon[Client], T] | errors.Error:
        try:
            return daemon, work(daemon.client, backoff.left())
        except errors.Error as error:
            daemon.failed(error)
            return error

    all_of_them = serving(client, backoff.left())
    return found(client._threads.map([lambda d=d: attempt(d) for d in all_of_them]))  # type: ignore[misc]


def match(client: Client, call: Call[Match], timeout: float | None) -> Match:
    """The longest of all, of a session that is reached by its name."""
    best, backoff = Match("", 0, 0, 0, 0.0), client._backoff(timeout)
    for daemon, one in each(client, backoff, lambda it, left: it._call(call, left)):
        longer = (one.tokens, one.tokens_in_memory) > (best.tokens, best.tokens_in_memory)
        if longer and owner(client, one.session, backoff.left()) is daemon:
            best = one
    return best


def models(client: Client, timeout: float | None) -> list[model_pb2.GetModelResponse]:
    """Of all, each tenant's name once."""
    by_name: dict[tuple[str, str], model_pb2.GetModelResponse] = {}
    for _, part in each(client, client._backoff(timeout), lambda one, left: one.models(timeout=left)):
        for model in part:
            by_name.setdefault((model.model.name, model.tenant), model)
    return [by_name[name] for name in sorted(by_name)]


def listed(client: Client, work: Callable[[Client], Iterator[T]], name: Callable[[T], str]) -> Iterator[T]:
    """Of all daemons, by name."""

    def part(daemon: Daemon[Client]) -> Iterator[T]:
        try:
            yield from work(daemon.client)
        except errors.Error as error:
            daemon.failed(error)
            raise

    return iter(heapq.merge(*map(part, serving(client)), key=name))


def append(client: Client, batch: Sequence[Item], timeout: float | None) -> int:
    parts = spread(
        client, [item.session for item in batch], timeout,
        lambda one, places, left: one.append(chosen(batch, places) or [], timeout=left),
    )  # fmt: skip
    for _, part in parts:
        if isinstance(part, errors.Error):
            raise part
    return sum(part for _, part in parts if isinstance(part, int))


def attend(
    client: Client, batch: Sequence[Item], dtype: str, out: Sequence[Any] | None, timeout: float | None
) -> list[Result]:
    parts = spread(
        client, [item.session for item in batch], timeout,
        lambda one, at, left: one.attend(chosen(batch, at) or [], dtype=dtype, out=chosen(out, at), timeout=left),
    )  # fmt: skip
    return merged(len(batch), parts)


def listwise(
    client: Client, names: Sequence[str], timeout: float | None, work: Callable[[Client, list[int], float], list[T]]
) -> list[T]:
    """A call with an answer for each name."""
    return in_order(len(names), spread(client, names, timeout, work))


def put_objects(
    client: Client, objects: Iterable[tuple[str, Any]], timeout: float | None, options: dict[str, Any]
) -> objects_pb2.PutObjectsResponse:
    given = list(objects)
    total = objects_pb2.PutObjectsResponse()
    parts = spread(
        client, [name for name, _ in given], timeout,
        lambda one, places, left: one.put_objects(chosen(given, places) or [], timeout=left, **options), repeat=False,
    )  # fmt: skip
    for _, part in parts:
        if isinstance(part, errors.Error):
            raise part
        total.objects += part.objects
        total.existing += part.existing
    return total


class DecodeStreams(DecodeStream):
    """`DecodeStream` over several daemons: a stream to each that a step has items for. One that ends fails its items alone,
    and is opened anew by the next step."""

    def __init__(self, client: Client):
        super().__init__(lambda requests, key: None, client._connection.timeout)
        self._client = client
        self._streams: dict[int, DecodeStream] = {}

    def attend(
        self,
        batch: Sequence[Item],
        *,
        dtype: str = "fp32",
        out: Sequence[Any] | None = None,
        timeout: float | None = None,
    ) -> list[Result]:
        """As `DecodeStream.attend`; where all daemons have failed, the first one's error is raised."""
        check_outs(batch, out)
        seconds = calls.checked_timeout(self._timeout if timeout is None else timeout)
        if self._opened.process != os.getpid():
            raise errors.FailedPrecondition("the decode stream was opened before fork(): open one in the child")

        def step(one: Client, places: list[int], left: float) -> list[Result]:
            if id(one) not in self._streams:
                self._streams[id(one)] = one.decode()
            try:
                return self._streams[id(one)].attend(
                    chosen(batch, places) or [], dtype=dtype, out=chosen(out, places), timeout=left
                )
            except errors.Error:
                self._streams.pop(id(one)).close()
                raise

        with self._lock:
            if self._failure is not None:
                raise self._failure
            return merged(len(batch), spread(self._client, [item.session for item in batch], seconds, step, repeat=False))

    def close(self) -> None:
        """Ends the streams."""
        super().close()
        with self._lock:
            for stream_of_one in self._streams.values():
                stream_of_one.close()
