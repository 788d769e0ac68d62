"""Locks that a child of fork() finds open, whoever held them in the parent."""

from __future__ import annotations

import os
import threading
import weakref


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


_locks: weakref.WeakSet[Lock] = weakref.WeakSet()


def _renew_all() -> None:
    for lock in list(_locks):
        lock.renew()


os.register_at_fork(after_in_child=_renew_all)
