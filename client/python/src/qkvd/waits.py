"""Waiting for answers until the deadline, also where gRPC would wait longer.

gRPC tells of a call's end when all of its parts have ended, and a message that the daemon has stopped reading in the middle
does not end: the call's deadline passes, and the call waits until the daemon reads on or is gone. So answers are waited
for here, and a call whose deadline is over is left to itself. Closing its channel would wait for it, too, and is not waited
for longer than a second.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from typing import Any

import grpc

from qkvd.calls import late
from qkvd.errors import DeadlineExceeded
from qkvd.locks import calls_under_way

GRACE = 0.1  # seconds after the deadline, for gRPC to say it by itself
CLOSING = 1.0  # seconds


def answer(future: Any, left: float, method: str, timeout: float) -> Any:
    """What a call answers that has `left` seconds, of `timeout`."""
    try:
        return future.result(left + GRACE)
    except grpc.FutureTimeoutError:
        _leave(future)
        raise late(method.rpartition("/")[2], timeout) from None


def close(channel: grpc.Channel) -> None:
    """Goes on in the background where calls have been left."""
    closing = threading.Thread(target=channel.close, name="qkvd-close", daemon=True)
    closing.start()
    closing.join(CLOSING)


def _leave(call: Any) -> None:
    calls_under_way.stream_begins()  # a child of fork() cannot use gRPC until the call has ended
    call.add_done_callback(lambda _: calls_under_way.stream_ends())
    call.cancel()


class Watch(threading.Timer):
    """Cancels a stream's call that is late with its first answer; from `start` to `cancel`."""

    def __init__(self, answers: Any, left: float):
        super().__init__(left + GRACE, self._fire)
        self.daemon = True
        self._answers = answers
        self._late = False

    def _fire(self) -> None:
        self._late = True
        _leave(self._answers)

    def error(self, method: str, timeout: float) -> DeadlineExceeded | None:
        """Why the call has failed, where it was this watch."""
        return late(method.rpartition("/")[2], timeout) if self._late else None


class Silence:
    """Cancels a stream without a deadline whose messages do not come any more: its peer may be gone without a word. Until
    `end`. The time between two messages that nobody waits for does not count."""

    def __init__(self, answers: Any, patience: float):
        self._answers = answers
        self._patience = patience
        self._deadline = float("inf")
        self._late = False
        self._ended = threading.Event()

    def heard(self) -> Iterator[Any]:
        """The messages."""
        threading.Thread(target=self._watch, name="qkvd-silence", daemon=True).start()
        while True:
            self._deadline = time.monotonic() + self._patience
            try:
                message = next(self._answers)
            except StopIteration:
                return
            finally:
                self._deadline = float("inf")
            yield message

    def end(self) -> None:
        """Looks no more."""
        self._ended.set()

    def error(self, method: str) -> DeadlineExceeded | None:
        """Why the stream has failed, where it was this."""
        return late(method, self._patience) if self._late else None

    def _watch(self) -> None:
        while not self._ended.wait(min(self._patience / 10, 1.0)):
            if time.monotonic() > self._deadline:
                self._late = True
                self._answers.cancel()
                return
