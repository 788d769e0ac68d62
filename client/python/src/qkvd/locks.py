"""Locks that a child of fork() finds open, and a fork() that waits for calls.

gRPC prepares itself for fork() only while nothing of it is at work. Otherwise a child that calls may crash or hang in it.
So a fork waits for the calls that are under way, and for gRPC's own threads, which are still at work for some time after a
call has ended. Calls that begin meanwhile wait for the fork. Where some calls went on all the same, or a stream was open,
the child is told.
"""

from __future__ import annotations

import os
import threading
import time
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

FORK_WAITS = 1.0  # seconds at most, for calls that are under way
# After those, seconds at most for the other threads: gRPC's may still be at work, and those of others compute.
SETTLES = 0.25
ASLEEP = 3  # looks at these threads, one after another, in which all are asleep
LOOKS = 0.0005  # seconds between them


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
        self._forking = False
        self._given_up: list[Any] = []
        self._readers: dict[object, int] = {}  # their threads; 0: it has read all
        self._unended: set[object] = set()  # of readers, whose calls gRPC has not ended

    def __enter__(self) -> None:
        with self._changed:
            self._changed.wait_for(lambda: not self._forking)
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
        self._changed.acquire()
        self._forking = True
        for call in self._given_up:
            call.cancel()
        own = threading.get_ident()
        self._changed.wait_for(lambda: self._running == 0 and all(one == own for one in self._readers.values()), FORK_WAITS)
        if self._used:
            self._settle()

    def _settle(self) -> None:
        """Waits until all other threads sleep. One that has work, but no processor yet, is not asleep."""
        until = time.monotonic() + SETTLES
        asleep = 0
        while asleep < ASLEEP and time.monotonic() < until:
            self._changed.wait(LOOKS)  # which lets others in: gRPC's thread may be about to tell of an end
            asleep = 0 if _at_work() else asleep + 1

    def after_in_parent(self) -> None:
        self._forking = False
        self._changed.notify_all()
        self._changed.release()

    def after_in_child(self) -> None:
        self.usable = self.usable and self._running == 0 and self._streams == 0
        self.renew()


def _at_work() -> bool:
    """Whether a thread but this one runs, or could. Never where the system does not say."""
    try:
        threads = [int(name) for name in os.listdir("/proc/self/task")]
    except OSError:
        return False
    for thread in threads:
        if thread == threading.get_native_id():
            continue
        try:
            with open(f"/proc/self/task/{thread}/stat", "rb") as stat:
                state = stat.read().rpartition(b") ")[2][:1]  # behind the name, which may hold anything
        except OSError:
            continue  # it has ended
        if state == b"R":
            return True
    return False


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
