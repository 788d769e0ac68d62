"""Waiting for answers until the deadline, also where gRPC would wait longer.

gRPC tells of a call's end when all of its parts have ended, and a message that the daemon has stopped reading in the middle
does not end: the call's deadline passes, and the call waits until the daemon reads on or is gone. So answers are waited
for here, and a call whose deadline is over is left to itself. Closing its channel would wait for it, too, and is not waited
for longer than a second.
"""

from __future__ import annotations

import threading
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
