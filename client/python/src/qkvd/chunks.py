"""Chunks that are found by name: for engines that tell neither tokens nor positions of what they store.

A chunk is a tensor. It is a session where it is rows: [layers, tokens, width], a row's keys and values in one (`heads`
says in how many heads they come, each its keys and then its values); or [2, layers, tokens, width], keys and values apart.
Any other tensor is an opaque object, exactly its bytes: caches in fp8, Mamba states, heads of a width that the daemon does
not code; and with `opaque` all of them are, such as the latents of MLA, which are no pairs of keys and values. What lies
under a chunk's name is whole (`Client.put`).
"""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

import torch

from qkvd.arrays import Array, as_numpy
from qkvd.errors import (
    AlreadyExists,
    DataLoss,
    DeadlineExceeded,
    Error,
    InvalidArgument,
    NotFound,
    Unavailable,
    Unimplemented,
)
from qkvd.model import Model
from qkvd.prefixes import Breaker, Options

DTYPES: dict[torch.dtype, Any] = {torch.float32: "fp32", torch.float16: "fp16", torch.bfloat16: "bf16"}
DIM_MOST = 1024  # that the daemon takes
NAMES_MOST = 16384  # that a lookup asks for
CALLS = 4  # at a time, of one `put_all` or `get_all`
BATCH_BYTES = 64 << 20  # of the objects of one call, whose time is `timeout`


class Shape(NamedTuple):
    """A chunk as rows: k and v of each layer are [tokens, heads, dim]."""

    layers: int
    tokens: int
    heads: int
    dim: int
    apart: bool  # keys and values in two halves of the tensor

    def views(self, tensor: torch.Tensor, layer: int) -> tuple[Array, Array]:
        """k and v of a layer, over the tensor's memory."""
        if self.apart:
            k, v = tensor.view(2, self.layers, self.tokens, self.heads, self.dim)[:, layer]
        else:
            both = tensor.view(self.layers, self.tokens, self.heads, 2 * self.dim)[layer]
            k, v = both[..., : self.dim], both[..., self.dim :]
        return as_numpy(k, "k"), as_numpy(v, "v")


def shape_of(tensor: torch.Tensor, heads: int) -> Shape | None:
    """How a tensor is kept as rows; None: as bytes. Unimplemented: rows that do not divide into so many heads."""
    if tensor.dtype not in DTYPES or not (tensor.ndim == 3 or (tensor.ndim == 4 and tensor.shape[0] == 2)):
        return None
    apart = tensor.ndim == 4
    layers, tokens, width = tensor.shape[-3:]
    dim, rest = divmod(width, heads if apart else 2 * heads)
    if rest:
        raise Unimplemented(f"a chunk of {list(tensor.shape)} is no rows of {heads} heads: kv_heads says how many")
    return Shape(layers, tokens, heads, dim, apart) if dim % 8 == 0 and dim <= DIM_MOST else None


def bytes_of(tensor: torch.Tensor) -> Array:
    """Over the tensor's memory, where it is contiguous."""
    return as_numpy(tensor.reshape(-1).view(torch.uint8), "chunk")


def _batches(sizes: Sequence[int]) -> Iterator[range]:
    """Places of objects that go in one call: up to BATCH_BYTES, or one that is larger."""
    begin = total = 0
    for place, size in enumerate(sizes):
        if total and total + size > BATCH_BYTES:
            yield range(begin, place)
            begin, total = place, 0
        total += size
    if sizes:
        yield range(begin, len(sizes))


class Chunks:
    """Chunks in a daemon. Threads may share it. What fails is a miss, and said in the log."""

    def __init__(self, options: Options, heads: int, log: logging.Logger, *, opaque: bool = False):
        if heads < 1:
            raise InvalidArgument(f"kv_heads is {heads}, it begins at 1")
        self.options = options
        self.heads = heads
        self.opaque = opaque
        self.client = options.client()
        self._pool = ThreadPoolExecutor(CALLS, "qkvd-chunks")
        self.breaker = Breaker()
        self._log = log
        self._registered: set[str] = set()

    def close(self) -> None:
        """Closes the connection; chunks stay."""
        self._pool.shutdown()
        self.client.close()

    def name(self, *parts: Any) -> str:
        """A session's name for a chunk, of what tells it from others and of how it is kept."""
        form = ("opaque",) if self.opaque else self.options.coding()
        what = repr((self.options.model_name, *form, self.heads, parts))
        return "chunk/" + hashlib.blake2b(what.encode(), digest_size=16).hexdigest()

    def has(self, names: Sequence[str]) -> list[bool]:
        """Which of these are held; it counts as a use of them."""
        held: list[bool] = []
        for begin in range(0, len(names), NAMES_MOST):
            part = names[begin : begin + NAMES_MOST]
            answer = self._try(lambda part=part: self._has(part), "look up")
            held += [False] * len(part) if answer is None else answer
        return held

    def _has(self, names: Sequence[str]) -> list[bool]:
        held = [False] * len(names)
        if not self.opaque:
            held = [one.open for one in self.client.has_sessions(names, touch=True, tokens=False)]
        others = [name for name, found in zip(names, held, strict=True) if not found]
        if others:
            sizes = iter(self.client.has_objects(others, touch=True))
            held = [found or next(sizes) > 0 for found in held]
        return held

    def shape(self, tensor: torch.Tensor) -> Shape | None:
        """How such a tensor is kept: as rows, or None, as bytes."""
        return None if self.opaque else shape_of(tensor, self.heads)

    def put(self, name: str, tensor: torch.Tensor, model: str) -> bool:
        """Keeps a chunk; whether it is held now. `model` names what such chunks are of."""
        return self.put_all([(name, tensor, model)])[0]

    def put_all(self, chunks: Sequence[tuple[str, torch.Tensor, str]]) -> list[bool]:
        """`put` of many, several at a time: chunks of rows by a call each, those of bytes by a call for many."""

        def rows(name: str, tensor: torch.Tensor, model: str) -> bool:
            return bool(self._try(lambda: self._put_rows(name, tensor.cpu(), model), "save"))

        def objects(some: Sequence[tuple[str, torch.Tensor, str]]) -> list[bool]:
            pairs = [(name, bytes_of(tensor.cpu())) for name, tensor, _ in some]
            return [bool(self._try(lambda: self._put_objects(pairs), "save"))] * len(some)

        return self._each(chunks, rows, objects)

    def get(self, name: str, tensor: torch.Tensor) -> bool:
        """Fills a tensor on the processor; whether it has come as a whole."""
        return self.get_all([(name, tensor)])[0]

    def get_all(self, chunks: Sequence[tuple[str, torch.Tensor]]) -> list[bool]:
        """`get` of many, as `put_all`."""

        def rows(name: str, tensor: torch.Tensor) -> bool:
            return bool(self._try(lambda: self._get_rows(name, tensor), "load"))

        def objects(some: Sequence[tuple[str, torch.Tensor]]) -> list[bool]:
            return self._try(lambda: self._get_objects(some), "load") or [False] * len(some)

        return self._each(chunks, rows, objects)

    def _each(self, chunks: Sequence[Any], rows: Callable[..., bool], objects: Callable[[Any], list[bool]]) -> list[bool]:
        """What these calls give for each chunk."""
        done = [False] * len(chunks)
        alone = [place for place, chunk in enumerate(chunks) if self._goes_as_rows(chunk[1])]
        others = sorted(set(range(len(chunks))) - set(alone))
        batches = [[others[place] for place in batch] for batch in _batches([chunks[place][1].nbytes for place in others])]

        def run(places: list[int], together: bool) -> None:
            some = [chunks[place] for place in places]
            for place, one in zip(places, objects(some) if together else [rows(*some[0])], strict=True):
                done[place] = one

        jobs = [([place], False) for place in alone] + [(batch, True) for batch in batches]
        if len(jobs) > 1:
            list(self._pool.map(lambda job: run(*job), jobs))
        elif jobs:
            run(*jobs[0])
        return done

    def _goes_as_rows(self, tensor: torch.Tensor) -> bool:
        try:
            return self.shape(tensor) is not None
        except Unimplemented:
            return True  # where that is said

    def tokens(self, name: str) -> int | None:
        """How many tokens a chunk of rows has; None where it is not held."""
        return self._try(lambda: min(self.client.session_info(name).lengths), "look up")  # type: ignore[no-any-return]

    def size(self, name: str) -> int:
        """How many bytes a chunk of bytes has; 0 where it is not held."""
        sizes = self._try(lambda: self.client.has_objects([name]), "look up")
        return sizes[0] if sizes else 0

    def delete(self, names: Sequence[str]) -> list[bool]:
        """Which of these were held, and are no longer."""
        return [bool(self._try(lambda name=name: self._delete(name), "delete")) for name in names]

    def _try(self, call: Any, what: str) -> Any:
        if self.breaker.open():
            return None
        try:
            result = call()
        except NotFound:
            return None
        except Error as error:
            self.breaker.tell(error)
            self._log.warning("qkvd does not %s a chunk: %s", what, error)
            return None
        self.breaker.tell(None)
        return result

    def _put_objects(self, objects: Sequence[tuple[str, Array]]) -> bool:
        options = self.options
        self.client.put_objects(
            objects, ttl=options.ttl, durability=options.durability, retention="evict", replace=True
        )  # fmt: skip
        return True

    def _put_rows(self, name: str, tensor: torch.Tensor, model: str) -> bool:
        options, shape = self.options, self.shape(tensor)
        assert shape is not None
        dtype = DTYPES[tensor.dtype]
        of = Model(
            name=f"{model}:{shape.layers}x{shape.heads}x{shape.dim}:{dtype}", layers=shape.layers, kv_heads=shape.heads,
            q_heads=shape.heads, key_dim=shape.dim, value_dim=shape.dim, dtype=dtype,
        )  # fmt: skip
        for registered in (of.name in self._registered, False):
            if not registered:
                self.client.register_model(of)
                self._registered.add(of.name)
            try:
                self.client.put(
                    name, (shape.views(tensor, layer) for layer in range(shape.layers)), model=of.name, purpose="fetch",
                    policy=options.policy(), ttl=options.ttl,
                    durability=options.durability, retention="evict", seal=True,
                )  # fmt: skip
                return True
            except AlreadyExists:  # another one has saved the same chunk
                return True
            except NotFound:
                if not registered:
                    raise
                # A daemon that began anew does not know the model.
        return False

    def _get_objects(self, chunks: Sequence[tuple[str, torch.Tensor]]) -> list[bool]:
        for name, tensor in chunks:
            if not tensor.is_contiguous():
                raise InvalidArgument(f"chunk {name} is to go to memory that is not in one piece")
        targets = [bytes_of(tensor) for _, tensor in chunks]
        try:
            found = self.client.get_objects([name for name, _ in chunks], out=targets)
        except (InvalidArgument, DataLoss):  # one of them does not fit, or is damaged: the others may be whole
            if len(chunks) == 1:
                raise
            return [self.get(name, tensor) for name, tensor in chunks]
        return [one is not None and one.nbytes == target.nbytes for one, target in zip(found, targets, strict=True)]

    def _get_rows(self, name: str, tensor: torch.Tensor) -> bool:
        shape, came = self.shape(tensor), 0
        assert shape is not None
        for piece in self.client.fetch_rows(name):
            assert piece.k is not None and piece.v is not None
            end = piece.position + len(piece.k)
            if piece.layer >= shape.layers or end > shape.tokens or piece.k.shape[1:] != (shape.heads, shape.dim):
                raise InvalidArgument(f"chunk {name} is no {list(tensor.shape)}, to which it is to go")
            k, v = shape.views(tensor, piece.layer)
            if k.dtype != piece.k.dtype:
                raise InvalidArgument(f"chunk {name} is not of {tensor.dtype}")
            k[piece.position : end], v[piece.position : end] = piece.k, piece.v
            came += len(piece.k)
        return came == shape.layers * shape.tokens

    def _delete(self, name: str) -> bool:
        gone = self.client.delete_objects([name])[0]
        try:
            self.client.close_session(name)
        except NotFound:
            return gone
        return True

    def healthy(self) -> bool:
        """Whether the daemon answers."""
        try:
            self.client.models(timeout=self.options.lookup_timeout)
        except (Unavailable, DeadlineExceeded):
            return False
        except Error:
            return True
        return True
