"""The decode stream: one open call, an answer for each request."""

from __future__ import annotations

import os
import queue
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from types import TracebackType
from typing import Any

import grpc

from qkvd import errors, items
from qkvd.calls import checked_timeout, late
from qkvd.items import Item, Result
from qkvd.locks import Lock, calls_under_way


class _Opened:
    """A stream's call and its watch, which do not hold the stream itself: one that nobody has any more ends."""

    def __init__(self) -> None:
        self.process = os.getpid()
        self.requests: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()
        self.answers: Any = None
        # When the answer that is waited for is too late; only the watch looks at it without the stream's lock.
        self.deadline = float("inf")
        self.late = False
        self.ended = threading.Event()

    def watch(self) -> None:
        """Cancels the call when an answer is late: gRPC's own deadline would be that of the whole stream."""
        while not self.ended.wait(0.05):
            if time.monotonic() > self.deadline:
                self.late = True
                self.answers.cancel()
                return

    def end(self) -> None:
        """Once; not in a child of fork(), where it is the parent's."""
        if not calls_under_way.is_own(self.process, self.answers) or self.ended.is_set():
            return
        self.ended.set()
        self.requests.put(None)
        if self.answers is not None:
            self.answers.cancel()
            calls_under_way.stream_ends()


class DecodeStream:
    """`attend` over one open call; made by `Client.decode`. One request is answered before the next is sent.

    Items that fail leave the stream as it is. A request that is refused as a whole, a timeout, a lost connection or an
    exception in the middle of a step (KeyboardInterrupt) end it: every further call then raises the same error. Steps of
    several threads take turns. `close` ends it, leaving a `with` block, and the end of the object itself.
    """

    def __init__(self, start: Callable[[Iterator[bytes], str | None], Any], timeout: float):
        self._start = start
        self._key: str | None = None  # of the first step's first item
        self._timeout = timeout
        self._lock = Lock()
        self._failure: errors.Error | None = None
        self._opened = _Opened()
        weakref.finalize(self, self._opened.end).atexit = False

    def __enter__(self) -> DecodeStream:
        return self

    def __exit__(self, kind: type[BaseException] | None, value: BaseException | None, at: TracebackType | None) -> None:
        self.close()

    def attend(
        self,
        batch: Sequence[Item],
        *,
        dtype: str = "fp32",
        out: Sequence[Any] | None = None,
        timeout: float | None = None,
    ) -> list[Result]:
        """One request and its answer, as `Client.attend`; where all items failed, their results say so."""
        items.check_outs(batch, out)
        message = items.attend_message(batch, dtype)
        seconds = checked_timeout(self._timeout if timeout is None else timeout)
        if self._opened.process != os.getpid():
            raise errors.FailedPrecondition("the decode stream was opened before fork(): open one in the child")
        with self._lock:
            self._key = self._key or next((item.session for item in batch), None)
            return items.attend_results(self._step(message, seconds), batch, out)

    def close(self) -> None:
        """Ends the stream; not in a child of fork(), where it is the parent's."""
        with self._lock:
            if self._failure is None and self._opened.process == os.getpid():
                self._fail(errors.FailedPrecondition("the decode stream is closed"))

    def _step(self, message: bytes, seconds: float) -> bytes:
        if self._failure is not None:
            raise self._failure
        opened = self._opened
        opened.deadline = time.monotonic() + seconds
        try:
            if opened.answers is None:
                with calls_under_way:
                    opened.answers = self._start(iter(opened.requests.get, None), self._key)
                    calls_under_way.stream_begins()
                threading.Thread(target=opened.watch, name="qkvd-decode-watch", daemon=True).start()
            opened.requests.put(message)
            answer: bytes = next(opened.answers)
            return answer
        except StopIteration:
            self._fail(errors.Unavailable("the daemon has ended the decode stream"))
        except grpc.RpcError as error:
            self._fail(late("Decode", seconds) if opened.late else errors.of_call(error, "Decode", None))
        except BaseException:  # a signal, or no thread is left: the answer would be taken for the next step's
            self._fail(errors.Cancelled("a step of the decode stream was broken off"))
            raise
        finally:
            opened.deadline = float("inf")
        assert self._failure is not None
        raise self._failure

    def _fail(self, error: errors.Error) -> None:
        self._failure = error
        self._opened.end()
