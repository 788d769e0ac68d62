"""Rows that come in pieces, put together into one array for keys and one for values."""

from __future__ import annotations

from typing import Any

import numpy as np

from qkvd.arrays import Array, as_numpy
from qkvd.errors import InvalidArgument
from qkvd.wire import Rows


class Part:
    """Keys or values: an array of the caller's, or one that grows where a session is longer than was known."""

    def __init__(self, out: Any, what: str, tokens: int, heads_first: bool):
        self._axis = 1 if heads_first else 0
        self._tokens = tokens
        self._what = what
        self._fixed = out is not None
        self._array: Array | None = None if out is None else as_numpy(out, what)
        if self._array is not None and (self._array.ndim != 3 or not self._array.flags.writeable):
            raise InvalidArgument(f"{what} is not an array of 3 dimensions that can be written to")

    def put(self, rows: Array, at: int) -> None:
        """Copies the rows of a piece to their places."""
        count = rows.shape[self._axis]
        array = self._with_room(rows, at + count)
        if self._axis == 0:
            array[at : at + count] = rows
        else:
            array[:, at : at + count] = rows

    def _with_room(self, rows: Array, tokens: int) -> Array:
        if self._array is not None and self._array.shape[self._axis] >= tokens:
            if self._fixed:
                self._check(rows)
            return self._array
        if self._fixed:
            raise InvalidArgument(f"{self._what} has room for {self._tokens_of()} tokens, {tokens} and more have come")
        shape = list(rows.shape)
        shape[self._axis] = max(self._tokens, tokens, 2 * self._tokens_of())
        grown = np.empty(shape, rows.dtype)
        if self._array is not None:
            held = self._array.shape[self._axis]
            grown[(slice(None),) * self._axis + (slice(held),)] = self._array
        self._array = grown
        return grown

    def _tokens_of(self) -> int:
        return 0 if self._array is None else int(self._array.shape[self._axis])

    def _check(self, rows: Array) -> None:
        array = self._array
        assert array is not None
        want, have = list(rows.shape), list(array.shape)
        want[self._axis] = have[self._axis]
        if want != have or array.dtype != rows.dtype:
            raise InvalidArgument(f"{self._what} is {array.dtype} {have}, what comes is {rows.dtype} {want}")

    def taken(self, tokens: int) -> Array:
        """The rows that have come; [0, 0, 0] where none has and the caller gave no array."""
        if self._array is None:
            return np.empty((0, 0, 0), np.float32)
        return self._array[(slice(None),) * self._axis + (slice(tokens),)]


class Gathered:
    """The rows of one layer."""

    def __init__(self, out: tuple[Any, Any] | None, tokens: int, heads_first: bool):
        outs = out if out is not None else (None, None)
        self.k = Part(outs[0], "out[0]", tokens, heads_first)
        self.v = Part(outs[1], "out[1]", tokens, heads_first)
        self.tokens = 0
        self._axis = 1 if heads_first else 0

    def put(self, piece: Rows) -> None:
        """Pieces come in the order of their positions."""
        count = 0
        for part, rows in ((self.k, piece.k), (self.v, piece.v)):
            if rows is not None:
                part.put(rows, self.tokens)
                count = rows.shape[self._axis]
        self.tokens += count

    def taken(self) -> tuple[Array, Array]:
        """Keys and values."""
        return self.k.taken(self.tokens), self.v.taken(self.tokens)
