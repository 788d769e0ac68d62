"""The unary calls of the contract: what is sent, how the answer is read, and whether the call may be sent again.

A call that may be repeated leaves the daemon as it is when it arrives twice: reads, and writes at a given position, whose
rows the daemon compares with those that it holds.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

from google.protobuf.message import Message

from qkvd import wire
from qkvd.arrays import Array, dtype_number
from qkvd.errors import DeadlineExceeded, Error, Internal, InvalidArgument, Unavailable, Unknown
from qkvd.items import ROPE_FORMS, Item, RopeForm, append_messages, not_negative, pack
from qkvd.model import Model, Policy
from qkvd.v1 import admin_pb2, kv_cache_pb2, model_pb2, tensor_pb2

T = TypeVar("T")
M = TypeVar("M", bound=Message)

CACHE, ADMIN = "/qkv.v1.KvCache/", "/qkv.v1.Admin/"
TIMEOUT_MOST = 2e6  # seconds
WATCH_PATIENCE = 30.0  # seconds, at least: a watch has a message every ten
PURPOSES = {"attend": kv_cache_pb2.PURPOSE_ATTEND, "fetch": kv_cache_pb2.PURPOSE_FETCH}
DURABILITIES = {
    None: kv_cache_pb2.DURABILITY_UNSPECIFIED,
    "memory": kv_cache_pb2.DURABILITY_MEMORY,
    "async": kv_cache_pb2.DURABILITY_ASYNC,
    "sync": kv_cache_pb2.DURABILITY_SYNC,
}


RETENTIONS = {
    None: kv_cache_pb2.RETENTION_UNSPECIFIED,
    "keep": kv_cache_pb2.RETENTION_KEEP,
    "evict": kv_cache_pb2.RETENTION_EVICT,
}


@dataclass(frozen=True)
class Call(Generic[T]):
    """One request and how its answer is read."""

    method: str
    request: bytes
    read: Callable[[bytes], T]
    repeat: bool
    key: str | None = None  # the session or object that it is for, by which its daemon is found
    step: bool = False  # of a decode loop, or a lookup: the quickest way, which is no way for large messages (waits.py)


def simple(method: str, request: Message, answer: type[M], *, repeat: bool, key: str | None = None) -> Call[M]:
    """A call whose answer is a message of a generated class."""
    return Call(method, request.SerializeToString(), reader(answer), repeat, key)


def reader(answer: type[M]) -> Callable[[bytes], M]:
    """Parses a message; Internal where it is none."""

    def read(data: bytes) -> M:
        try:
            return answer.FromString(data)
        except Exception as error:  # DecodeError, whose module is one of protobuf's implementation
            raise Internal(f"the daemon's answer cannot be read: {error}") from error

    return read


class Backoff:
    """When a call that met UNAVAILABLE is sent again: after 50 ms, then twice as long each time, up to 1 s, with jitter."""

    FIRST, MOST = 0.05, 1.0

    def __init__(self, retry_for: float, timeout: float):
        begin = time.monotonic()
        self.deadline = begin + timeout
        self._until = begin + min(retry_for, timeout)
        self._pause = self.FIRST

    def left(self) -> float:
        """Seconds until the deadline."""
        return max(self.deadline - time.monotonic(), 0.001)

    def pause(self, error: Error, repeat: bool) -> float:
        """Seconds to wait before the call is sent again; raises `error` where it is not."""
        pause = self._pause * random.uniform(0.5, 1.0)
        if not repeat or not isinstance(error, Unavailable) or time.monotonic() + pause >= self._until:
            raise error from None
        self._pause = min(2 * self._pause, self.MOST)
        return pause


def checked_timeout(timeout: float) -> float:
    """A number of seconds above 0, or InvalidArgument. Infinity and what gRPC could not count with is TIMEOUT_MOST."""
    if not timeout > 0:
        raise InvalidArgument(f"timeout is {timeout}, it is a number of seconds above 0")
    return min(float(timeout), TIMEOUT_MOST)


class Outgoing:
    """Messages of a client stream. gRPC keeps what their generator raises to itself: `failure` has it."""

    def __init__(self, messages: Iterator[bytes]):
        self._messages = messages
        self.failure: Exception | None = None

    def __iter__(self) -> Iterator[bytes]:
        return self

    def __next__(self) -> bytes:
        try:
            return next(self._messages)
        except StopIteration:
            raise
        except Exception as error:
            self.failure = error
            raise

    def check(self) -> None:
        """After the call has failed: raises what the messages have raised. What is no error of ours is the cause of one."""
        if isinstance(self.failure, Error):
            raise self.failure from None
        if self.failure is not None:
            raise Unknown("what makes the messages has raised an exception") from self.failure


# ---- models ----


def register_model(model: Model) -> Call[model_pb2.RegisterModelResponse]:
    request = model_pb2.RegisterModelRequest(model=model.message())
    return simple(CACHE + "RegisterModel", request, model_pb2.RegisterModelResponse, repeat=True)


def get_model(name: str) -> Call[model_pb2.GetModelResponse]:
    return simple(CACHE + "GetModel", model_pb2.GetModelRequest(name=name), model_pb2.GetModelResponse, repeat=True)


def list_models() -> Call[model_pb2.ListModelsResponse]:
    return simple(CACHE + "ListModels", model_pb2.ListModelsRequest(), model_pb2.ListModelsResponse, repeat=True)


# ---- sessions ----


def open_request(
    name: str,
    *,
    model: str,
    purpose: str = "attend",
    bits: float | tuple[float, float] | None = None,
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
) -> kv_cache_pb2.OpenSessionRequest:
    if purpose not in PURPOSES:
        raise InvalidArgument(f'purpose is {purpose!r}, allowed are "attend" and "fetch"')
    if durability not in DURABILITIES:
        raise InvalidArgument(f'durability is {durability!r}, allowed are "memory", "async" and "sync"')
    if retention not in RETENTIONS:
        raise InvalidArgument(f'retention is {retention!r}, allowed are "keep" and "evict"')
    coding = (policy or Policy()).message()
    if bits is not None:
        coding.bits_k, coding.bits_v = bits if isinstance(bits, tuple) else (bits, bits)
    return kv_cache_pb2.OpenSessionRequest(
        session=name,
        model=model,
        purpose=PURPOSES[purpose],
        policy=coding,
        first_position=not_negative(first_position, "first_position"),
        durability=DURABILITIES[durability],
        max_attention_error=max_attention_error,
        ttl_ms=milliseconds(ttl),
        tier_bits=tier_bits,
        keep_full=keep_full,  # type: ignore[arg-type]
        salt=salt,
        prefix_token_ids=None if prefix is None else wire.checked_ids(prefix),
        retention=RETENTIONS[retention],
    )


def open_session(request: kv_cache_pb2.OpenSessionRequest) -> Call[kv_cache_pb2.OpenSessionResponse]:
    return simple(CACHE + "OpenSession", request, kv_cache_pb2.OpenSessionResponse, repeat=False, key=request.session)


def milliseconds(seconds: float) -> int:
    """Of a time to live."""
    return round(1000 * not_negative_number(seconds, "ttl"))


def not_negative_number(number: float, what: str) -> float:
    """The number as it is, or InvalidArgument."""
    if not 0 <= number < 2**50:
        raise InvalidArgument(f"{what} is {number}, it is a number of seconds")
    return number


def get_session(name: str) -> Call[kv_cache_pb2.SessionInfo]:
    request = kv_cache_pb2.GetSessionRequest(session=name)
    return simple(CACHE + "GetSession", request, kv_cache_pb2.SessionInfo, repeat=True, key=name)


def list_sessions(prefix: str, tenant: str, model: str, page_token: str) -> Call[kv_cache_pb2.ListSessionsResponse]:
    request = kv_cache_pb2.ListSessionsRequest(prefix=prefix, tenant=tenant, model=model, page_token=page_token)
    return simple(CACHE + "ListSessions", request, kv_cache_pb2.ListSessionsResponse, repeat=True)


def next_page(asked: str, answered: str) -> str:
    """The token of a list's next page, "" at its end. Internal: the same again, with which the list would never end."""
    if answered and answered == asked:
        raise Internal(f"the daemon gives the page token {answered!r} again: the list would never end")
    return answered


@dataclass(frozen=True)
class Presence:
    """Whether a session is open, and how it is held."""

    open: bool
    in_memory: bool  # all of its pages; False: some are on the SSD alone, or it is not open
    tokens: int  # that every layer holds; 0 where they are not asked for

    def __bool__(self) -> bool:
        return self.open


class _Presences(dict[tuple[int, int], Presence]):
    """Of (presence, tokens): those of an answer are mostly the same few, and making one takes longer than a look."""

    def __missing__(self, key: tuple[int, int]) -> Presence:
        presence, tokens = key
        made = self[key] = Presence(presence != 0, presence == kv_cache_pb2.HasSessionsResponse.PRESENCE_MEMORY, tokens)
        return made


def has_sessions(names: Sequence[str], touch: bool, tokens: bool) -> Call[list[Presence]]:
    request = kv_cache_pb2.HasSessionsRequest(sessions=names, tokens=tokens, touch=touch)
    parse = reader(kv_cache_pb2.HasSessionsResponse)

    def read(data: bytes) -> list[Presence]:
        answer = parse(data)
        lengths = answer.tokens if tokens else [0] * len(answer.presence)
        return list(map(_Presences().__getitem__, zip(answer.presence, lengths, strict=True)))

    return Call(CACHE + "HasSessions", request.SerializeToString(), read, True, names[0] if names else None, step=True)


def put_messages(
    name: str,
    rows: Iterable[tuple[Any, Any]],
    model: str,
    tokens: Sequence[int] | Array | None,
    seal: bool,
    options: dict[str, Any],
) -> Iterator[bytes]:
    """A stream of AppendRequests that opens a session, appends one pair of rows to each layer, and completes it."""
    if "prefix" in options:
        raise InvalidArgument("prefix is set, put opens without one")
    return _put_messages(open_request(name, model=model, **options), rows, tokens, seal)


def _put_messages(
    request: kv_cache_pb2.OpenSessionRequest,
    rows: Iterable[tuple[Any, Any]],
    tokens: Sequence[int] | Array | None,
    seal: bool,
) -> Iterator[bytes]:
    yield kv_cache_pb2.AppendRequest(open=[request]).SerializeToString()
    for layer, (k, v) in enumerate(rows):
        item = Item(
            session=request.session, layer=layer, position=request.first_position, k=k, v=v,
            tokens=tokens if layer == 0 else None,
        )  # fmt: skip
        yield from append_messages([pack(item)])
    yield kv_cache_pb2.AppendRequest(complete=True, seal=seal).SerializeToString()


def close_session(name: str, keep: bool) -> Call[kv_cache_pb2.CloseSessionResponse]:
    request = kv_cache_pb2.CloseSessionRequest(session=name, keep=keep)
    return simple(CACHE + "CloseSession", request, kv_cache_pb2.CloseSessionResponse, repeat=False, key=name)


def truncate(name: str, position: int, layers: Sequence[int] | None) -> Call[kv_cache_pb2.TruncateResponse]:
    request = kv_cache_pb2.TruncateRequest(
        session=name, position=not_negative(position, "position"), layers=layers_of(layers)
    )
    return simple(CACHE + "Truncate", request, kv_cache_pb2.TruncateResponse, repeat=True, key=name)


def demote(
    name: str, bits: float, begin: int, end: int, layers: Sequence[int] | None, even: bool
) -> Call[kv_cache_pb2.DemoteResponse]:
    request = kv_cache_pb2.DemoteRequest(
        session=name, range=range_of(begin, end), bits=bits, even=even, layers=layers_of(layers)
    )
    return simple(CACHE + "Demote", request, kv_cache_pb2.DemoteResponse, repeat=False, key=name)


def prefetch(
    name: str, bits: float, begin: int, end: int, layers: Sequence[int] | None
) -> Call[kv_cache_pb2.PrefetchResponse]:
    request = kv_cache_pb2.PrefetchRequest(session=name, range=range_of(begin, end), bits=bits, layers=layers_of(layers))
    return simple(CACHE + "Prefetch", request, kv_cache_pb2.PrefetchResponse, repeat=False, key=name)


def pin(name: str, unpin: bool) -> Call[kv_cache_pb2.PinResponse]:
    request = kv_cache_pb2.PinRequest(session=name, unpin=unpin)
    return simple(CACHE + "Pin", request, kv_cache_pb2.PinResponse, repeat=True, key=name)


def touch(name: str, ttl: float | None) -> Call[kv_cache_pb2.TouchResponse]:
    request = kv_cache_pb2.TouchRequest(session=name, ttl_ms=None if ttl is None else milliseconds(ttl))
    return simple(CACHE + "Touch", request, kv_cache_pb2.TouchResponse, repeat=True, key=name)


def fork(name: str, new: str, position: int) -> Call[kv_cache_pb2.ForkResponse]:
    request = kv_cache_pb2.ForkRequest(session=name, fork=new, position=not_negative(position, "position"))
    return simple(CACHE + "Fork", request, kv_cache_pb2.ForkResponse, repeat=False, key=name)


@dataclass(frozen=True)
class Match:
    """The session that shares the longest prefix with some tokens: "" and 0 where none shares 64 of them."""

    session: str
    tokens: int  # a multiple of 64 that every layer of the session holds
    tokens_in_memory: int  # of these, in all layers
    tokens_on_ssd: int  # the others
    restore_ms: float  # about how long it takes to bring these back
    # Of the tenant, model and salt that were asked for: `PrefixEvent.parent` of their first pages.
    root: bytes = field(default=b"", compare=False)


def match(model: str, tokens: Sequence[int] | Array, salt: bytes) -> Call[Match]:
    request = kv_cache_pb2.MatchRequest(model=model, salt=salt)
    message = wire.token_ids(3, tokens, before=request.SerializeToString())
    parse = reader(kv_cache_pb2.MatchResponse)

    def read(data: bytes) -> Match:
        answer = parse(data)
        return Match(
            answer.session, answer.tokens, answer.tokens_in_memory, answer.tokens_on_ssd, answer.restore_ms,
            answer.prefix_root,
        )  # fmt: skip

    return Call(CACHE + "Match", message, read, True)


def watch_request(tenant: str, model: str, token_ids: bool, instance: int, after: int) -> bytes:
    request = kv_cache_pb2.WatchRequest(
        tenant=tenant,
        model=model,
        token_ids=token_ids,
        instance=not_negative(instance, "instance"),
        after=not_negative(after, "after"),
    )
    return request.SerializeToString()


def fetch_request(
    name: str,
    layers: Sequence[int] | None,
    begin: int,
    end: int,
    dtype: str | None,
    heads_first: bool,
    part: str,
    rope: RopeForm,
    chunk_tokens: int,
) -> bytes:
    parts = {
        "both": kv_cache_pb2.FetchRequest.PART_BOTH,
        "k": kv_cache_pb2.FetchRequest.PART_K,
        "v": kv_cache_pb2.FetchRequest.PART_V,
    }
    if part not in parts:
        raise InvalidArgument(f'part is {part!r}, allowed are "both", "k" and "v"')
    if rope not in ROPE_FORMS:
        raise InvalidArgument(f'rope is {rope!r}, allowed are "after" and "before"')
    first = kv_cache_pb2.ROW_LAYOUT_HEADS_FIRST if heads_first else kv_cache_pb2.ROW_LAYOUT_TOKENS_FIRST
    request = kv_cache_pb2.FetchRequest(
        session=name,
        layers=layers_of(layers),
        range=range_of(begin, end),
        dtype=dtype_number(dtype),
        layout=first,
        part=parts[part],
        rope=ROPE_FORMS[rope],
        chunk_tokens=not_negative(chunk_tokens, "chunk_tokens", 32),
    )
    return request.SerializeToString()


def stats_request(name: str, layers: Sequence[int] | None, buckets: int) -> bytes:
    request = kv_cache_pb2.GetAttentionStatsRequest(
        session=name, layers=layers_of(layers), buckets=not_negative(buckets, "buckets", 32)
    )
    return request.SerializeToString()


def layers_of(layers: Sequence[int] | None) -> list[int]:
    """None is all, which the wire writes as none; a list of none is refused."""
    if layers is None:
        return []
    if len(layers) == 0:
        raise InvalidArgument("layers is empty; None means all of them")
    return [not_negative(layer, "layers", 32) for layer in layers]


def range_of(begin: int, end: int) -> tensor_pb2.TokenRange:
    return tensor_pb2.TokenRange(begin=not_negative(begin, "begin"), end=not_negative(end, "end"))


# ---- the daemon ----


def status() -> Call[admin_pb2.GetStatusResponse]:
    return simple(ADMIN + "GetStatus", admin_pb2.GetStatusRequest(), admin_pb2.GetStatusResponse, repeat=True)


def metrics_of(answer: admin_pb2.GetStatusResponse) -> dict[str, float]:
    return {metric.name: metric.value for metric in answer.metrics}


def late(method: str, timeout: float) -> DeadlineExceeded:
    return DeadlineExceeded(f"{method} was not answered within {timeout:g} s")
