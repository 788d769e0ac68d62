"""Items: rows for one layer of a session, queries to it, or both; and the requests that are made of them."""

from __future__ import annotations

import operator
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from qkvd import wire
from qkvd.arrays import Array, WireTensor, destination, dtype_number, to_wire
from qkvd.errors import Error, Internal, InvalidArgument, of_number
from qkvd.model import AttendOptions
from qkvd.v1 import kv_cache_pb2, tensor_pb2

RopeForm = Literal["after", "before"]
ROPE_FORMS = {"after": tensor_pb2.ROPE_FORM_AFTER, "before": tensor_pb2.ROPE_FORM_BEFORE}
# Of rows in one message of an append. Measured by benchmarks/transfer.py: with 1 MiB a message stays in the processor's
# cache on its way out, with 16 MiB it takes twice the processor time.
APPEND_BYTES = 1 << 20
# The same by libqkv, which sends rows from where they lie: with 1 MiB it takes a quarter more.
NATIVE_BYTES = 4 << 20
APPEND_ITEMS = 1024  # in one message: the daemon's default limit
UNARY_BYTES = 32 << 10  # an append of so few is one call without a stream


@dataclass(frozen=True, kw_only=True)
class Item:
    """One layer of one session.

    k [tokens, kv_heads, key_dim] and v [tokens, kv_heads, value_dim] come together, q is [queries, q_heads, key_dim].
    `position` is that of the first row, and of the first query. `rope` says whether keys and queries are turned to their
    positions already ("after") or as projected ("before"). `tokens` are the ids of the rows' tokens.
    """

    session: str
    layer: int = 0
    position: int = 0
    k: Any = None
    v: Any = None
    q: Any = None
    rope: RopeForm = "after"
    options: AttendOptions | None = None
    tokens: Sequence[int] | Array | None = None


@dataclass(frozen=True)
class Result:
    """What became of one item: `error`, or else the layer's length afterwards and, where it had queries, attention.

    `out` is [queries, q_heads, value_dim], zeros where a query sees nothing; `lse` is [queries, q_heads] in fp32, the
    natural log of the softmax's denominator, -inf where a query sees nothing.
    """

    length: int
    out: Array | None
    lse: Array | None
    error: Error | None


@dataclass(frozen=True)
class Packed:
    """An item whose arrays have been looked at."""

    item: Item
    k: WireTensor | None
    v: WireTensor | None
    q: WireTensor | None

    @property
    def bytes(self) -> int:
        """Of its rows and queries."""
        return sum(tensor.data.nbytes for tensor in (self.k, self.v, self.q) if tensor is not None)

    @property
    def placed(self) -> bool:
        """Whether any of them lie in a region of the daemon's."""
        return any(tensor is not None and tensor.place is not None for tensor in (self.k, self.v, self.q))

    def parts(self) -> list[wire.Part]:
        """The parts of the entry in a request's message."""
        item = self.item
        form = ROPE_FORMS.get(item.rope)
        if form is None:
            raise InvalidArgument(f'rope is {item.rope!r}, allowed are "after" and "before"')
        small = kv_cache_pb2.Item(
            session=item.session,
            layer=not_negative(item.layer, "layer", 32),
            position=not_negative(item.position, "position"),
            k_rope=form if self.k else tensor_pb2.ROPE_FORM_UNSPECIFIED,
            q_rope=form if self.q else tensor_pb2.ROPE_FORM_UNSPECIFIED,
            options=item.options.message() if item.options else None,
            token_ids=() if item.tokens is None else wire.checked_ids(item.tokens),
        )
        tensors = ((8, "k", self.k), (9, "v", self.v), (10, "q", self.q))
        return wire.item(small, [(field, name, tensor) for field, name, tensor in tensors if tensor is not None])


def not_negative(number: int, what: str, width: int = 64) -> int:
    """A whole number of so many bits at most, or InvalidArgument."""
    try:
        whole = operator.index(number)
    except TypeError:
        raise InvalidArgument(f"{what} is {number!r}, it is a whole number") from None
    if whole < 0:
        raise InvalidArgument(f"{what} is {whole}, it begins at 0")
    if whole >> width:
        raise InvalidArgument(f"{what} is {whole}, at most 2^{width} - 1 are possible")
    return whole


def check_outs(batch: Sequence[Item], outs: Sequence[Any] | None) -> None:
    """Before a call that gives a result for each item: after it the items have been applied."""
    if outs is not None and len(outs) != len(batch):
        raise InvalidArgument(f"out has {len(outs)} entries, there are {len(batch)} items")


def pack(item: Item) -> Packed:
    """Looks at the item's arrays, and packs those that cannot be sent as they lie."""
    k, v, q = (None if a is None else to_wire(a, n) for a, n in ((item.k, "k"), (item.v, "v"), (item.q, "q")))
    if (k is None) != (v is None):
        raise InvalidArgument("k and v come together")
    return Packed(item, k, v, q)


def cut(item: Item, tokens: int) -> Iterator[Item]:
    """The item in pieces of so many tokens, rows and queries in step.

    InvalidArgument: values or ids of other tokens than the keys', of which the daemon would see only in a later piece.
    """
    for what, with_it in (("v", item.v), ("tokens", item.tokens)):
        if item.k is not None and with_it is not None and len(with_it) != len(item.k):
            raise InvalidArgument(f"{what} has {len(with_it)} tokens, k has {len(item.k)}")
    count = max((len(array) for array in (item.k, item.v, item.q) if array is not None), default=0)
    for begin in range(0, count, tokens):
        end = min(begin + tokens, count)
        k, v, q = (None if array is None else array[begin:end] for array in (item.k, item.v, item.q))
        ids = None if item.tokens is None else item.tokens[begin:end]
        yield replace(item, position=item.position + begin, k=k, v=v, q=q, tokens=ids)


def append_groups(items: Sequence[Packed], most: int = APPEND_BYTES) -> Iterator[list[Packed]]:
    """What goes into one message each, of about `most` bytes: small items together, large ones in pieces."""
    group: list[Packed] = []
    size = 0
    for packed in items:
        for piece in _pieces(packed, most):
            if group and (size + piece.bytes > most or len(group) == APPEND_ITEMS):
                yield group
                group, size = [], 0
            group.append(piece)
            size += piece.bytes
    if group:
        yield group


def append_messages(items: Sequence[Packed]) -> Iterator[bytes]:
    """AppendRequests."""
    for group in append_groups(items):
        yield wire.message([part for piece in group for part in piece.parts()])


def _pieces(packed: Packed, most: int) -> Iterator[Packed]:
    if packed.bytes <= most or packed.k is None or len(packed.k.dims) == 0:
        yield packed
        return
    tokens = max(most * packed.k.dims[0] // packed.bytes, 1)
    for piece in cut(packed.item, tokens):
        yield pack(piece)


def attend_message(items: Sequence[Item], dtype: str, request_id: int = 0) -> bytes:
    """An AttendRequest."""
    parts: list[wire.Part] = []
    for item in items:
        parts += pack(item).parts()
    parts.append(kv_cache_pb2.AttendRequest(out_dtype=dtype_number(dtype), id=request_id).SerializeToString())
    return wire.message(parts)


def attend_results(answer: bytes, items: Sequence[Item], outs: Sequence[Any] | None) -> list[Result]:
    """The results of an AttendResponse: in arrays of their own, or `out` in the caller's."""
    came = wire.attend_results(answer)
    if len(came) != len(items):
        raise Internal(f"the daemon answered {len(came)} results to {len(items)} items")
    results = []
    for place, result in enumerate(came):
        if result.code:
            results.append(Result(0, None, None, of_number(result.code, result.text)))
            continue
        out, lse = result.out, result.lse
        if out is not None and outs is not None and outs[place] is not None:
            target = destination(outs[place], "out", out.shape, out.dtype)
            target[...] = out
            out = target
        elif out is not None:
            out = out.copy()
        results.append(Result(result.length, out, None if lse is None else lse.copy(), None))
    return results
