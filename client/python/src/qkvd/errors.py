"""Errors: one class for each status that the daemon answers with, all below `Error`.

The text of an error is the daemon's sentence, which names the field, the value and the limit. What a call's arguments
already show to be wrong is raised before anything is sent, as `InvalidArgument`.
"""

from __future__ import annotations

from typing import ClassVar

import grpc


class Error(Exception):
    """A call that failed. `code` is its gRPC status."""

    code: ClassVar[grpc.StatusCode] = grpc.StatusCode.UNKNOWN


class Cancelled(Error):
    """The call was cancelled before it ended."""

    code = grpc.StatusCode.CANCELLED


class Unknown(Error):
    """A status that says no more."""


class InvalidArgument(Error, ValueError):
    """Malformed, or beyond a limit, whatever the daemon's state."""

    code = grpc.StatusCode.INVALID_ARGUMENT


class DeadlineExceeded(Error, TimeoutError):
    """No answer within the timeout. What was asked for may have been done."""

    code = grpc.StatusCode.DEADLINE_EXCEEDED


class NotFound(Error, LookupError):
    """No such model or session."""

    code = grpc.StatusCode.NOT_FOUND


class AlreadyExists(Error):
    """A name that is taken; other rows at a position that is held."""

    code = grpc.StatusCode.ALREADY_EXISTS


class PermissionDenied(Error, PermissionError):
    """The token does not allow it."""

    code = grpc.StatusCode.PERMISSION_DENIED


class ResourceExhausted(Error):
    """A budget or a queue is full; the text names it."""

    code = grpc.StatusCode.RESOURCE_EXHAUSTED


class FailedPrecondition(Error):
    """A gap between positions, planes that were not kept, a client that is closed."""

    code = grpc.StatusCode.FAILED_PRECONDITION


class Aborted(Error):
    """The call met another one and gave way."""

    code = grpc.StatusCode.ABORTED


class OutOfRange(Error):
    """Beyond the end of what there is."""

    code = grpc.StatusCode.OUT_OF_RANGE


class Unimplemented(Error, NotImplementedError):
    """In the contract, but not served by this daemon; or not possible with this package."""

    code = grpc.StatusCode.UNIMPLEMENTED


class Internal(Error):
    """The daemon's own fault, its disk's, or an answer that cannot be read."""

    code = grpc.StatusCode.INTERNAL


class Unavailable(Error, ConnectionError):
    """Nobody answers, or the daemon is about to end."""

    code = grpc.StatusCode.UNAVAILABLE


class DataLoss(Error):
    """The rows are held, but damaged."""

    code = grpc.StatusCode.DATA_LOSS


class Unauthenticated(Error):
    """The token is missing or not known."""

    code = grpc.StatusCode.UNAUTHENTICATED


CLASSES: dict[grpc.StatusCode, type[Error]] = {
    kind.code: kind
    for kind in (
        Cancelled, Unknown, InvalidArgument, DeadlineExceeded, NotFound, AlreadyExists, PermissionDenied,
        ResourceExhausted, FailedPrecondition, Aborted, OutOfRange, Unimplemented, Internal, Unavailable, DataLoss,
        Unauthenticated,
    )
}  # fmt: skip
_BY_NUMBER: dict[int, type[Error]] = {code.value[0]: kind for code, kind in CLASSES.items()}


def of_number(code: int, text: str) -> Error:
    """The error of a status of the wire."""
    return _BY_NUMBER.get(code, Unknown)(text)


def of_call(error: grpc.RpcError, method: str, timeout: float | None) -> Error:
    """The error of a call that gRPC reports as failed."""
    code, text = error.code(), error.details() or ""
    if code is grpc.StatusCode.DEADLINE_EXCEEDED and timeout is not None:
        text = f"{method.rpartition('/')[2]} was not answered within {timeout:g} s"
    if code is grpc.StatusCode.INTERNAL and text == "Internal error from Core":  # grpc.aio's of a message that is not sent
        return Unavailable("the call has ended while a message was sent")
    if code is grpc.StatusCode.CANCELLED and "Channel closed" in text:
        return Cancelled("the client was closed")
    if code is grpc.StatusCode.CANCELLED and not text.startswith("Locally cancelled"):
        return Unavailable("the daemon has ended the call, as it does when it stops")  # calls that came too late
    return CLASSES.get(code, Unknown)(text)
