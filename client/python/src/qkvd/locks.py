"""Locks that a child of fork() finds open, and a fork() that waits for calls.

gRPC prepares itself for fork() only while no thread is inside it. Otherwise a child that calls may crash or hang in it. So
a fork waits for the calls that are under way, and for gRPC's own threads, which stay inside it for a while after a call has
ended. Calls that begin meanwhile wait for the fork. Where some calls went on all the same, or a stream was open, the child
is told.
"""

from __future__ import annotations

import asyncio
import gc
import os
import sys
import threading
import time
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

from qkvd.errors import FailedPrecondition

FORK_WAITS = 1.0  # seconds at most, for calls that are under way
SETTLES = 0.25  # seconds at most after those, for threads that are still inside gRPC
LOOKS = 0.0005  # seconds between two looks at them


class Lock:
    """A `threading.Lock` for `with`."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        _locks.add(self)

    def __enter__(self) -> None:
        self._lock.acquire()

    def __exit__(self, *error: object) -> None:
        self._lock.release()

    def renew(self) -> None:
        """Open again. In a child, whose one thread holds none of them."""
        self._lock = threading.Lock()


class Calls:
    """Counts the calls that are under way: `with` around each. `streams`: of them, those that a fork does not wait for."""

    def __init__(self) -> None:
        self.usable = True  # False in a child: calls were under way as it was forked
        self._parents: list[Any] = []
        self.renew()

    def renew(self) -> None:
        # The collector of garbage may end a stream while its thread is in one of these.
        self._changed = threading.Condition(threading.RLock())
        self._used = False  # a call has begun
        self._running = 0
        self._streams = 0
        self._forking: set[int] = set()  # threads that are about to
        self._staying: set[int] = set()  # threads that the last fork has waited for in vain
        self._given_up: list[Any] = []
        self._readers: dict[object, int] = {}  # their threads; 0: it has read all
        self._unended: set[object] = set()  # of readers, whose calls gRPC has not ended
        self._channels: weakref.WeakSet[Any] = weakref.WeakSet()  # whose end in a child would wait for a parent's thread

    def check(self) -> None:
        """Raises FailedPrecondition in a child that was forked while calls were under way."""
        if not self.usable:
            raise FailedPrecondition(
                "this process was forked while a call or a stream was open, and gRPC may crash in it: close streams first,"
                " or spawn processes"
            )

    def __enter__(self) -> None:
        # A thread does not wait for its own fork: the collector of garbage may close a session in the middle of that.
        own = {threading.get_ident()}
        with self._changed:
            self._changed.wait_for(lambda: self._forking <= own)
            self._used = True
            self._running += 1

    def __exit__(self, *error: object) -> None:
        with self._changed:
            self._running -= 1
            self._changed.notify_all()

    def stream_begins(self) -> None:
        """In `with`, around what begins the call: a fork in between would not know of it."""
        with self._changed:
            self._streams += 1

    def stream_ends(self) -> None:
        with self._changed:
            self._streams = max(self._streams - 1, 0)  # one of the parent's may end in the child

    def read_begins(self, answers: Any) -> object:
        """As `stream_begins`, of a stream of answers that a fork of another thread waits for: until `read_ends`, and
        gRPC has ended the call."""
        reader = object()
        with self._changed:
            self._streams += 1
            self._readers[reader] = threading.get_ident()
            self._unended.add(reader)
        answers.add_done_callback(lambda _: self._has_ended(reader))
        return reader

    def task_begins(self) -> object | None:
        """As `read_begins`, of a call of a task: None while a thread is about to fork, for which the task waits."""
        with self._changed:
            if self._forking:
                return None
            reader = object()
            self._used = True
            self._streams += 1
            self._readers[reader] = threading.get_ident()
        return reader

    def keep(self, channel: Any) -> None:
        """A channel of asyncio's is not to end in a child."""
        self._channels.add(channel)

    def read_ends(self, reader: object) -> None:
        self.stream_ends()
        with self._changed:
            if reader in self._unended:
                self._readers[reader] = 0  # a fork of its thread waits, too
            else:
                self._readers.pop(reader, None)
            self._changed.notify_all()

    def _has_ended(self, reader: object) -> None:
        with self._changed:
            self._unended.discard(reader)
            if self._readers.get(reader) == 0:
                del self._readers[reader]
            self._changed.notify_all()

    @contextmanager
    def given_up(self, call: Any) -> Iterator[None]:
        """A fork cancels this call, so that it has not long to wait: until gRPC has ended it, and not only told of it."""
        ended = threading.Event()
        call.add_done_callback(lambda _: ended.set())
        with self._changed:
            self._given_up.append(call)
            if self._forking:  # since the call began
                call.cancel()
        try:
            yield
        finally:
            ended.wait(FORK_WAITS)
            with self._changed:
                self._given_up.remove(call)

    def is_own(self, process: int, *calls: Any) -> bool:
        """Whether these calls, which began in that process, are of this one. Those of a parent are kept: they would be
        cancelled with their objects, in a gRPC that is not whole, on a connection that the parent uses."""
        if process == os.getpid():
            return True
        self._parents.extend(calls)
        return False

    def before_fork(self) -> None:
        """The lock is free while the process forks: gRPC's threads, for which gRPC may wait then, tell here of ends."""
        own = threading.get_ident()
        with self._changed:
            self._forking.add(own)
            for call in self._given_up:
                call.cancel()
            self._changed.wait_for(
                lambda: self._running == 0 and all(one == own for one in self._readers.values()), FORK_WAITS
            )
        if self._used and self._running == 0 and self._streams == 0:
            self._settle()

    def _settle(self) -> None:
        """Waits until no other thread is inside gRPC, but for those that stay there, such as a server's."""
        inside, until = _inside_grpc(), time.monotonic() + SETTLES
        self._staying &= inside
        while inside - self._staying and time.monotonic() < until:
            time.sleep(LOOKS)
            inside = _inside_grpc()
        self._staying = inside

    def after_in_parent(self) -> None:
        with self._changed:
            self._forking.discard(threading.get_ident())
            self._changed.notify_all()

    def after_in_child(self) -> None:
        self.usable = self.usable and self._running == 0 and self._streams == 0
        self._parents.extend(self._channels)
        if self._used:
            gc.freeze()  # what is garbage of the parent's may have channels, too
        self.renew()


class UnderWay:
    """`async with` around a call: it waits for a fork of another thread, which waits for it otherwise."""

    def __init__(self) -> None:
        self._reader: object | None = None

    async def __aenter__(self) -> UnderWay:
        while (reader := calls_under_way.task_begins()) is None:
            await asyncio.sleep(LOOKS)
        self._reader = reader
        return self

    async def __aexit__(self, *error: object) -> None:
        self.end()

    def end(self) -> None:
        reader, self._reader = self._reader, None
        if reader is not None:
            calls_under_way.read_ends(reader)

    __del__ = end  # of a generator whose loop is closed


class Stream:
    """A stream of a task's, which a fork does not wait for: it counts until its end, or until nobody has it any more."""

    def __init__(self) -> None:
        calls_under_way.stream_begins()
        self.end = weakref.finalize(self, calls_under_way.stream_ends)
        self.end.atexit = False


def _inside_grpc() -> set[int]:
    """The other threads that have a frame of gRPC's, as its own threads do."""
    inside, own = set(), threading.get_ident()
    for thread, innermost in sys._current_frames().items():
        frame: FrameType | None = None if thread == own else innermost
        while frame is not None:
            if str(frame.f_globals.get("__name__")).startswith("grpc."):
                inside.add(thread)
                break
            frame = frame.f_back
    return inside


_locks: weakref.WeakSet[Lock] = weakref.WeakSet()
calls_under_way = Calls()


def _after_in_child() -> None:
    for lock in list(_locks):
        lock.renew()
    calls_under_way.after_in_child()


os.register_at_fork(
    before=calls_under_way.before_fork,
    after_in_parent=calls_under_way.after_in_parent,
    after_in_child=_after_in_child,
)
