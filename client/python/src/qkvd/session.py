"""A session: the KV cache of one sequence."""

from __future__ import annotations

import math
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from types import TracebackType
from typing import TYPE_CHECKING, Any

import numpy as np

from qkvd import calls, native
from qkvd.arrays import Array, dtype_number
from qkvd.errors import InvalidArgument, Unavailable
from qkvd.fetched import Gathered
from qkvd.items import ROPE_FORMS, Item, Result, RopeForm, cut, not_negative, pack
from qkvd.locks import Lock
from qkvd.model import AttendOptions
from qkvd.v1 import kv_cache_pb2

if TYPE_CHECKING:
    from qkvd.client import Client

# Of rows, queries and answers in one request, together: what is larger goes in several. A quarter of the daemon's default
# `limit-message`.
STEP_BYTES = 16 << 20


class SessionState:
    """What a session knows of its sequence: name, lengths and tokens. `Session` and `AsyncSession` add the calls."""

    def __init__(self, info: kv_cache_pb2.SessionInfo, tokens: Sequence[int] | Array | None):
        self.name = info.session
        self.model = info.model
        self.first_position = info.first_position
        self._lengths = list(info.lengths)
        self.tokens = tokens

    def __repr__(self) -> str:
        return f"<qkvd session {self.name} of {self.model}>"

    @property
    def lengths(self) -> tuple[int, ...]:
        """The next position of each layer, as this object knows it: from its own calls, and from `info`."""
        return tuple(self._lengths)

    def _forget_ids(self, position: int) -> None:
        """Which tokens stand from here on is not known any more."""
        if self.tokens is not None:
            self.tokens = self.tokens[: max(position - self.first_position, 0)]

    def _length(self, layer: int) -> int:
        if not_negative(layer, "layer") >= len(self._lengths):
            raise InvalidArgument(f"layer is {layer}, {self.model} has {len(self._lengths)} layers")
        return self._lengths[layer]

    def _rows(self, layer: int, k: Any, v: Any, q: Any, position: int | None, **fields: Any) -> Item:
        """An item with rows, at the layer's end unless told otherwise, and the ids of its tokens where they are known."""
        position = self._length(layer) if position is None else position
        tokens = fields.pop("tokens", None)
        if tokens is None and self.tokens is not None and k is not None:
            begin = position - self.first_position
            tokens = self.tokens[begin : begin + len(k)]
            tokens = tokens if len(tokens) == len(k) else None
        return Item(session=self.name, layer=layer, position=position, k=k, v=v, q=q, tokens=tokens, **fields)

    def _attend_item(self, layer: int, q: Any, position: int | None, k: Any, v: Any, **fields: Any) -> Item:
        """An item with queries: with rows at the layer's end, or else those of the layer's last tokens."""
        if k is not None or v is not None:
            return self._rows(layer, k, v, q, position, **fields)
        if position is None:
            position = self._length(layer) - len(q)
            if position < self.first_position:
                held = self._length(layer) - self.first_position
                raise InvalidArgument(f"layer {layer} has {held} tokens, too few for {len(q)} queries: give a position")
        return Item(session=self.name, layer=layer, position=position, q=q, **fields)

    def _steps(self, item: Item, out: Any) -> list[tuple[Item, Any]]:
        """The item in requests that the daemon takes, each with its part of `out`.

        Rows and queries of different counts stay together: the position of both is one.
        """
        count = len(item.q)
        if count == 1 or (item.k is not None and len(item.k) != count):
            return [(item, out)]
        # What comes back is taken to be as wide as the queries.
        wide = sum(math.prod(a.shape[1:]) for a in (item.k, item.v, item.q, item.q) if a is not None)
        tokens = max(STEP_BYTES // max(4 * wide, 1), 1)
        if tokens >= count:
            return [(item, out)]
        pieces = cut(item, tokens)
        return [(p, None if out is None else out[i * tokens : (i + 1) * tokens]) for i, p in enumerate(pieces)]

    def _took(self, layer: int, length: int) -> None:
        if 0 <= layer < len(self._lengths):
            self._lengths[layer] = length

    def _took_info(self, info: kv_cache_pb2.SessionInfo) -> None:
        self._lengths = list(info.lengths)

    def _expected(self, layer: int, begin: int, end: int) -> int:
        """Tokens that a fetch will bring, as far as is known."""
        last = min(end, self._length(layer)) if end else self._length(layer)
        return max(last - max(begin, self.first_position), 0)


def joined(results: list[Result], out: Any) -> tuple[Array, Array]:
    """Attention of one item that went in several requests; the first error is raised."""
    for result in results:
        if result.error is not None:
            raise result.error
    outs = [result.out for result in results if result.out is not None]
    lses = [result.lse for result in results if result.lse is not None]
    if len(outs) == 1:
        return (outs[0] if out is None else out), lses[0]
    return (np.concatenate(outs) if out is None else out), np.concatenate(lses)


class Session(SessionState):
    """The KV cache of one sequence; made by `Client.open` and `Client.session`.

    Every layer has a length of its own, and positions count from `first_position`. Leaving a `with` block closes the
    session and frees its rows; without one it stays in the daemon until `close`.

    Threads may use different layers at once. Appends of several threads to one layer, without a position, take turns.
    """

    def __init__(self, client: Client, info: kv_cache_pb2.SessionInfo, tokens: Sequence[int] | Array | None):
        super().__init__(info, tokens)
        self._client = client
        self._turns = [Lock() for _ in self._lengths]

    def __enter__(self) -> Session:
        return self

    def __exit__(self, kind: type[BaseException] | None, value: BaseException | None, at: TracebackType | None) -> None:
        self.close()

    def _turn(self, layer: int, position: int | None) -> AbstractContextManager[Any]:
        """Where the position is the layer's length, one call at a time."""
        self._length(layer)
        return self._turns[layer] if position is None else nullcontext()

    def append(
        self,
        layer: int,
        k: Any,
        v: Any,
        position: int | None = None,
        *,
        rope: RopeForm = "after",
        tokens: Sequence[int] | Array | None = None,
        coded: int = 0,
        timeout: float | None = None,
    ) -> int:
        """Appends k [tokens, kv_heads, key_dim] and v [tokens, kv_heads, value_dim], fp32, fp16 or bf16; gives new tokens.

        position: of the first row; the layer's length by default. Rows that are held already must be the same, and are
            acknowledged: an append can be repeated.
        rope: "after", keys turned to their positions; "before", as projected, the daemon turns them.
        tokens: ids of these tokens, where `open` was not given those of the sequence.
        coded: rows are coded here, on so many threads, and cross as pages, for slow networks and busy daemons. It is for
            whole prompts, into an empty layer as a rule, and sends no ids. Unimplemented: qkvd-native is not installed.

        FailedPrecondition: a gap before `position`. AlreadyExists: other rows are held there. ResourceExhausted: memory.
        """
        with self._turn(layer, position):
            item = self._rows(layer, k, v, None, position, rope=rope, tokens=tokens)
            if coded:
                packed = pack(item)
                new = self._client._coded(
                    self.name, timeout, lambda one, left: one._native.append_encoded(packed, coded, left)
                )
            else:
                new = self._client.append([item], timeout=timeout)
            self._took(layer, max(self._length(layer), item.position + len(k)))
            return new

    def attend(
        self,
        layer: int,
        q: Any,
        position: int | None = None,
        *,
        k: Any = None,
        v: Any = None,
        rope: RopeForm = "after",
        options: AttendOptions | None = None,
        dtype: str = "fp32",
        out: Any = None,
        timeout: float | None = None,
    ) -> tuple[Array, Array]:
        """Attention of q [queries, q_heads, key_dim] over the layer: (out [queries, q_heads, value_dim], lse [queries,
        q_heads] fp32).

        With k and v, as of `append`, those rows are appended first, in the same call. It is a partial attention, over what
        the daemon holds: `merge` adds what a worker holds itself.

        position: of the first query, and of the first row; by default the queries are those of the layer's last tokens, or
            of the new rows.
        dtype: of out: "fp32", "fp16" or "bf16" (as uint16). out: an array of that type and shape to write to.
        """
        with self._turn(layer, position):
            item = self._attend_item(layer, q, position, k, v, rope=rope, options=options)
            results = []
            for piece, target in self._steps(item, out):
                results += self._client.attend([piece], dtype=dtype, out=[target], timeout=timeout)
                if results[-1].error is None:
                    self._took(layer, results[-1].length)
            return joined(results, out)

    def fetch(
        self,
        layer: int,
        *,
        begin: int = 0,
        end: int = 0,
        dtype: str | None = None,
        heads_first: bool = False,
        part: str = "both",
        rope: RopeForm = "after",
        out: tuple[Any, Any] | None = None,
        coded: int = 0,
        timeout: float | None = None,
    ) -> tuple[Array, Array]:
        """The rows of a layer, decoded: (k [tokens, kv_heads, key_dim], v [tokens, kv_heads, value_dim]).

        begin, end: positions; `end` 0 is the layer's end. dtype: "fp32", "fp16" or "bf16" (as uint16); the model's by
        default. heads_first: [kv_heads, tokens, dim] instead. part: "k" or "v" for one of them, the other is [0, 0, 0], as
        both are where there are no rows. rope: "before" gives keys as projected. out: two arrays of the right type that
        the rows are written to, from their first token on; what is returned are the parts of them that were filled.
        coded: pages cross, and are decoded here on so many threads. Unimplemented: qkvd-native is not installed.

        DataLoss: a page on the SSD is damaged.
        """
        if coded and (part != "both" or heads_first):
            raise InvalidArgument("coded fetches give both parts, tokens first")
        asked = (layer, begin, end, dtype, rope, out, coded)
        backoff, filled = self._client._backoff(timeout), None
        if coded:
            filled = self._client._coded(self.name, timeout, lambda one, left: self._fetch_native(one, *asked, left))
        elif part == "both" and not heads_first and self._client._fetches_native(self.name):
            with suppress(Unavailable):  # grpcio waits for a daemon that comes back
                filled = self._fetch_native(self._client._at(self.name), *asked, self._client._seconds(timeout))
        if filled is not None:
            return filled
        while True:
            gathered = Gathered(out, self._expected(layer, begin, end), heads_first)
            try:
                for piece in self._client.fetch_rows(
                    self.name, [layer], begin=begin, end=end, dtype=dtype, heads_first=heads_first, part=part,
                    rope=rope, timeout=backoff.left(),
                ):  # fmt: skip
                    gathered.put(piece)
                return gathered.taken()
            except Unavailable as error:  # a stream that broke off begins anew
                self._client._sleep(backoff.pause(error, True))

    def _fetch_native(
        self, client: Client, layer: int, begin: int, end: int, dtype: str | None, rope: RopeForm,
        out: tuple[Any, Any] | None, coded: int, seconds: float,
    ) -> tuple[Array, Array] | None:  # fmt: skip
        """By libqkv; None where that is not possible."""
        expected = self._expected(layer, begin, end)
        if rope not in ROPE_FORMS or (not coded and (begin < 0 or end < 0 or (out is None and not expected))):
            return None
        if coded:
            client._native.demand()
        found = native.places(out, expected, dtype_number(dtype), client._geometry(self.model, seconds, anew=coded > 0))
        if found is None and coded:
            raise InvalidArgument("out is not two dense arrays of the model's shapes and of the dtype")
        if found is None:
            return None
        to, number = found
        asked = (begin, end, number, rope == "before", seconds)
        if coded:
            tokens: int | None = client._native.fetch_decoded(self.name, layer, to, coded, *asked)
        else:
            tokens = client._native.fetch(self.name, layer, to, *asked)
        return None if tokens is None else (to[0][:tokens], to[1][:tokens])

    def truncate(self, position: int, *, layers: Sequence[int] | None = None, timeout: float | None = None) -> None:
        """Drops positions from `position` on, in all layers unless told otherwise; beyond the length changes nothing.

        What comes there next may be other tokens than before: their ids are sent where `append` is given them, or `tokens`
        of this object is set anew.
        """
        self._lengths = list(self._client._call(calls.truncate(self.name, position, layers), timeout).lengths)
        self._forget_ids(position)

    def fork(self, name: str, position: int = 0, *, timeout: float | None = None) -> Session:
        """A new session that has this one's rows up to `position` (0: all), held once until the two differ. It has the ids
        of these tokens; those of others are sent where `append` is given them, or `tokens` of the new object is set.

        FailedPrecondition: a layer ends before `position`; of several daemons, another one owns `name` (a client with a
        `placement` has them all at one). AlreadyExists: the name is taken.
        """
        self._client._check_fork(self.name, name)
        info = self._client._call(calls.fork(self.name, name, position), timeout).info
        forked = Session(self._client, info, self.tokens)
        forked._forget_ids(max(info.lengths))
        return forked

    def info(self, *, timeout: float | None = None) -> kv_cache_pb2.SessionInfo:
        """What the session is and holds now; `lengths` follow it. NotFound: it has been closed."""
        info = self._client.session_info(self.name, timeout=timeout)
        self._took_info(info)
        return info

    def demote(
        self,
        bits: float,
        *,
        begin: int = 0,
        end: int = 0,
        layers: Sequence[int] | None = None,
        even: bool = False,
        timeout: float | None = None,
    ) -> kv_cache_pb2.DemoteResponse:
        """Brings coded rows down to an average of `bits` a coordinate, by attention, or with `even` all to so many at most.

        What is dropped is lost, unless the session keeps its pages in full or has them on the SSD.
        """
        return self._client._call(calls.demote(self.name, bits, begin, end, layers, even), timeout)

    def prefetch(
        self,
        bits: float = 0,
        *,
        begin: int = 0,
        end: int = 0,
        layers: Sequence[int] | None = None,
        timeout: float | None = None,
    ) -> kv_cache_pb2.PrefetchResponse:
        """Brings rows back into memory, up to `bits` or all that they were coded with.

        FailedPrecondition: bits were dropped and not kept. ResourceExhausted: memory.
        """
        return self._client._call(calls.prefetch(self.name, bits, begin, end, layers), timeout)

    def pin(self, *, timeout: float | None = None) -> None:
        """Keeps the session's pages in memory, until `unpin`."""
        self._client._call(calls.pin(self.name, False), timeout)

    def unpin(self, *, timeout: float | None = None) -> None:
        """Ends `pin`."""
        self._client._call(calls.pin(self.name, True), timeout)

    def touch(self, ttl: float | None = None, *, timeout: float | None = None) -> None:
        """Counts as a use of the session; `ttl` seconds to live from now on, 0 for no end, None as it was."""
        self._client._call(calls.touch(self.name, ttl), timeout)

    def close(self, *, keep: bool = False, timeout: float | None = None) -> int:
        """Closes the session and frees its rows; with `keep` they stay on the SSD alone. Gives the bytes freed."""
        return self._client.close_session(self.name, keep=keep, timeout=timeout)
