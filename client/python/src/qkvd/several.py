"""Several daemons behind one client: whose a session is, who answers, and batches in groups.

`Client` and `AsyncClient` with a list of targets have a client for each of them, their daemons, and hold no connection
themselves. A daemon that has answered UNAVAILABLE, or not in time, is suspect: before it is used again it must answer a
health check. Where it does not, it is watched: asked after growing pauses, in the background, so that no call waits for it.
Its sessions are another's meanwhile. A call asks it again, and brings it the client's models, once the watch has ended.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, Generic, TypeVar

from qkvd.errors import DeadlineExceeded, Error, FailedPrecondition, NotFound, Unavailable
from qkvd.items import Result
from qkvd.place import hash_of, weight

C = TypeVar("C")
T = TypeVar("T")

CHECK = "/grpc.health.v1.Health/Check"
SERVING = b"\x08\x01"  # of grpc.health.v1.HealthCheckResponse
CHECK_SECONDS = 1.0
PAUSE_FIRST, PAUSE_MOST = 0.1, 2.0  # seconds


class Daemon(Generic[C]):
    """One of several: its client, and whether it may be used."""

    def __init__(self, target: str, client: C):
        self.target = target
        self.client = client
        self.place = hash_of(target)
        self.suspect = True
        self.watch: Any = None  # while it is watched

    def failed(self, error: Error) -> None:
        """What a call has failed with."""
        if isinstance(error, (Unavailable, DeadlineExceeded)):
            self.suspect = True


class Daemons(Generic[C]):
    """All of them; empty where a client has one target."""

    def __init__(self, targets: str, all_of_them: Sequence[Daemon[C]]):
        self._targets = targets
        self.all = list(all_of_them)

    def __bool__(self) -> bool:
        return bool(self.all)

    def clients(self) -> dict[str, C]:
        """By targets."""
        return {daemon.target: daemon.client for daemon in self.all}

    def ranked(self, key: str | None) -> list[Daemon[C]]:
        """The owner first, then who stands in for it. FailedPrecondition: no session is named, so there is none."""
        if key is None:
            raise FailedPrecondition(
                f"the call is for one daemon, the client has {len(self.all)}: use its `daemons`, or give it a placement"
            )
        hashed = hash_of(key)
        return sorted(self.all, key=lambda daemon: weight(daemon.place, hashed), reverse=True)

    def check_fork(self, session: str, home: Daemon[C], name: str, other: Daemon[C]) -> None:
        """Raises where the fork belongs to another daemon than its session, with which it stays."""
        if home is not other:
            raise FailedPrecondition(
                f"session {session} is at {home.target}, a session named {name} belongs to {other.target}: forks need a"
                " client with a placement"
            )

    def nobody(self) -> Unavailable:
        """None of them answers."""
        return Unavailable(f"none of the {len(self.all)} daemons {self._targets} answers")


class Within:
    """Time for the health checks of one call: CHECK_SECONDS each, but together no more than the call has."""

    def __init__(self, seconds: float):
        self._until = time.monotonic() + seconds

    def left(self) -> float:
        """Seconds for the next one."""
        return min(self.rest(), CHECK_SECONDS)

    def rest(self) -> float:
        """Seconds that the call has."""
        return max(self._until - time.monotonic(), 0.001)


def pauses() -> Iterator[float]:
    """Between health checks of a watch, in seconds."""
    pause = PAUSE_FIRST
    while True:
        yield pause
        pause = min(2 * pause, PAUSE_MOST)


def grouped(owners: Sequence[T]) -> dict[T, list[int]]:
    """The places of each owner."""
    groups: dict[T, list[int]] = {}
    for place, owner in enumerate(owners):
        groups.setdefault(owner, []).append(place)
    return groups


def chosen(values: Sequence[T] | None, places: Sequence[int]) -> list[T] | None:
    """Those of a list, where there is one."""
    return None if values is None else [values[place] for place in places]


def in_order(count: int, parts: Sequence[tuple[list[int], Sequence[T] | Error]]) -> list[T]:
    """Answers in the order of what was asked; the first error is raised."""
    answers: dict[int, T] = {}
    for places, part in parts:
        if isinstance(part, Error):
            raise part
        answers.update(zip(places, part, strict=True))
    return [answers[place] for place in range(count)]


def merged(count: int, parts: Sequence[tuple[list[int], list[Result] | Error]]) -> list[Result]:
    """Results in the batch's order; where all daemons have failed, the first one's error is raised."""
    errors = [part for _, part in parts if isinstance(part, Error)]
    if errors and len(errors) == len(parts):
        raise errors[0]
    answers = [
        (places, [Result(0, None, None, part)] * len(places) if isinstance(part, Error) else part) for places, part in parts
    ]
    return in_order(count, answers)


def found(answers: Iterable[T | Error]) -> list[T]:
    """Those that are no errors; daemons that lack the model, are gone or say nothing are passed over unless all are."""
    good: list[T] = []
    bad: list[Error] = []
    for answer in answers:
        if isinstance(answer, Error):
            if not isinstance(answer, (NotFound, Unavailable, DeadlineExceeded)):
                raise answer
            bad.append(answer)
        else:
            good.append(answer)
    if not good:
        raise next((error for error in bad if isinstance(error, NotFound)), bad[0])
    return good
