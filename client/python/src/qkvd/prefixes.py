"""What connectors of engines share: sequences are found by their token ids, and what fails is a miss.

A sequence lies in a session of purpose "fetch", with its ids, which the daemon closes where it needs the place. `match`
finds the session that holds the longest prefix of a prompt, `open` begins a new one with what is held already, so that a
prefix is held once however many sequences have it.
A connector never waits for a daemon that does not answer: `Breaker`.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import json
import logging
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import NoneType
from typing import Any, TypeVar, cast, get_args

from qkvd import calls
from qkvd.arrays import NUMPY_OF, Array, dtype_number
from qkvd.calls import DURABILITIES, Match
from qkvd.client import Client
from qkvd.connection import DEFAULT_TARGET, Tls
from qkvd.errors import DeadlineExceeded, Error, InvalidArgument, NotFound, Unavailable
from qkvd.items import Item
from qkvd.model import EXACT, Codec, Model, Policy
from qkvd.wire import Rows

T = TypeVar("T")
PAGE = 64  # tokens: what a match is a multiple of
FIRST_ASKED = 4096  # ids of a long prompt: the others are sent where a session has all of these
NAMES_MOST = 16384  # that a lookup asks for
BITS = 8  # a coordinate, where the settings do not say: with these the text stays the engine's own (docs/python.md)
NAMELESS = Model(name="-", layers=1, kv_heads=1, q_heads=1, key_dim=8, value_dim=8)  # of who only looks up, or has no rows
CODECS = tuple(name for name in get_args(Codec) if name)
TEXTS = (
    "target", "token", "token_file", "tls_ca", "tls_cert", "tls_key", "tls_server_name", "model_name", "tenant",
    "durability",
)  # fmt: skip
NUMBERS = ("timeout", "lookup_timeout", "ttl", "save_buffer", "prefill_wait")
NOTHING = Match("", 0, 0, 0, 0.0)


@dataclass(frozen=True, kw_only=True)
class Options:
    """A connector's settings, as an engine's configuration has them."""

    target: str = DEFAULT_TARGET  # "unix:PATH" or "HOST:PORT"
    token: str | None = None  # sent with each call
    token_file: str | None = None  # the same from a file
    tls_ca: str | None = None  # PEM: authorities of the daemon's certificate; with it connections are TLS
    tls_cert: str | None = None  # PEM: this client's certificate, where the daemon asks for one
    tls_key: str | None = None  # PEM: its key
    tls_server_name: str | None = None  # that the daemon's certificate is for, where it is not the target's
    model_name: str = ""  # as the daemon knows the model; "": of the engine's model and its configuration
    tenant: str = ""
    bits: float | str | None = BITS  # code bits a coordinate, or "exact"; None: those of `codec`, or the daemon's own
    codec: str | None = None  # what codes rows (docs/codecs.md); None: the daemon's own
    codec_v: str | None = None  # the codec of values, where that of keys is another one
    self_calibration: bool | None = (
        None  # whether rows teach the model's calibration; None: unless another tenant's shared one
    )
    durability: str | None = None  # "memory", "async" or "sync"; None: the daemon's own
    ttl: float = 0.0  # seconds after which an unused session is closed; 0: when the daemon has no place for others
    timeout: float = 10.0  # seconds for a load, and for each step of a save
    lookup_timeout: float = 0.25  # seconds for a lookup, which the scheduler waits for
    save_buffer: int = 1 << 30  # bytes of rows that wait to be saved, at most, on each rank
    prefill_wait: float = 5.0  # seconds that a consumer waits for rows that a producer has announced

    @classmethod
    def of(cls, config: Mapping[str, Any]) -> Options:
        """From a dictionary. InvalidArgument: a key that is not known, or a value beyond its limits."""
        known = {field.name for field in dataclasses.fields(cls)}
        for key in config:
            if key not in known:
                raise InvalidArgument(f"{key!r} is no option of the connector; it has {', '.join(sorted(known))}")
        options = cls(**config)
        for names, kinds, what in ((TEXTS, (str, NoneType), "text"), (NUMBERS, (int, float), "number")):
            for name in names:
                value = getattr(options, name)
                if not isinstance(value, kinds) or isinstance(value, bool):
                    raise InvalidArgument(f"{name} is of type {type(value).__name__}, it is a {what}")
        if options.codec is not None and "bits" not in config:  # not all codecs have 8 bits
            options = dataclasses.replace(options, bits=None)
        bits = options.bits
        if bits not in ("exact", None) and not (isinstance(bits, int | float) and 0 <= bits <= 8):
            raise InvalidArgument(f'bits is {bits!r}, allowed are a number up to 8 and "exact"')
        for name in ("codec", "codec_v"):
            if getattr(options, name) not in (None, *CODECS):
                raise InvalidArgument(f"{name} is {getattr(options, name)!r}, known are {', '.join(CODECS)}")
        if options.codec_v is not None and options.codec is None:
            raise InvalidArgument(f"codec_v is {options.codec_v!r} without codec")
        if options.bits == "exact" and options.codec not in (None, "exact"):
            raise InvalidArgument(f'bits is "exact" and codec is {options.codec!r}')
        if options.self_calibration not in (None, True, False):
            raise InvalidArgument(f"self_calibration is {options.self_calibration!r}, allowed are true and false")
        if options.durability not in DURABILITIES:
            raise InvalidArgument(f'durability is {options.durability!r}, allowed are "memory", "async" and "sync"')
        for name in ("timeout", "lookup_timeout"):
            if not getattr(options, name) > 0:
                raise InvalidArgument(f"{name} is {getattr(options, name)}, it is a number of seconds above 0")
        for name in ("ttl", "save_buffer", "prefill_wait"):
            if not getattr(options, name) >= 0:
                raise InvalidArgument(f"{name} is {getattr(options, name)}, it begins at 0")
        calls.milliseconds(options.ttl)
        if options.token is not None and options.token_file is not None:
            raise InvalidArgument("token and token_file are both given")
        if options.tls_ca is None and (options.tls_cert or options.tls_key or options.tls_server_name):
            raise InvalidArgument("tls_cert, tls_key and tls_server_name need tls_ca")
        return options

    def client(self) -> Client:
        """For calls to the daemon, which are not repeated. InvalidArgument: a file cannot be read."""
        tls = None
        if self.tls_ca is not None:
            tls = Tls(ca=self.tls_ca, certificate=self.tls_cert, key=self.tls_key, server_name=self.tls_server_name)
        return Client(
            self.target, tenant=self.tenant, token=self.token, token_file=self.token_file, tls=tls, timeout=self.timeout,
            retry_for=0,
        )  # fmt: skip

    def policy(self) -> Policy:
        """How rows are coded. What is saved is a prefix of something: none of it is recent."""
        if self.bits == "exact":
            return EXACT
        bits = float(self.bits or 0)
        return Policy(
            codec=cast(Codec, self.codec or ""),
            codec_v=cast(Codec, self.codec_v or ""),
            bits_k=bits,
            bits_v=bits,
            recent_window=0,
            self_calibration=self.self_calibration,
        )

    def coding(self) -> tuple[Any, ...]:
        """What is asked for of the coding: rows that were saved with another one are not loaded."""
        if self.codec is None:
            return (self.bits,)
        return (self.bits, self.codec, self.codec_v)

    def salt(self, *parts: Any) -> bytes:
        """What sessions of one model and ids differ in: what is asked of them, and `parts` (None counts as absent).

        It has whatever must be equal for a session to begin with another one's rows (docs/prefixes.md). A match with less
        would find sessions that `Prefixes.open` passes over, and nothing could ever be added to what they hold.
        """
        what = [*self.coding(), self.durability, self.self_calibration, *parts]
        if all(part is None for part in what):
            return b""
        return hashlib.blake2b(json.dumps(what, default=str).encode(), digest_size=16).digest()


class Breaker:
    """Keeps calls from a daemon that did not answer: for a second at first, then twice as long each time, up to MOST.

    One thread may tell of a failure while another asks; a race costs a call.
    """

    FIRST, MOST = 1.0, 30.0

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._pause = 0.0
        self._until = 0.0

    def open(self) -> bool:
        """Whether calls are to be left out for now."""
        return self._clock() < self._until

    def tell(self, error: Error | None) -> None:
        """How a call ended. An answer, even a refusal, is a sign of life."""
        if isinstance(error, Unavailable | DeadlineExceeded):
            self._pause = min(2 * self._pause, self.MOST) or self.FIRST
            self._until = self._clock() + self._pause
        else:
            self._pause = self._until = 0.0


class Prefixes:
    """Sequences of one model in a daemon. Threads may share it. Nothing is sent before the first call."""

    def __init__(self, options: Options, model: Model, log: logging.Logger):
        self.options = options
        self.model = model
        self.client = options.client()
        self.breaker = Breaker()
        self._log = log
        self._registered = False

    def close(self) -> None:
        """Closes the connection; sessions stay."""
        self.client.close()

    def _guarded(self, call: Callable[[], T]) -> T:
        try:
            result = call()
        except Error as error:
            was_open = self.breaker.open()
            self.breaker.tell(error)
            if self.breaker.open() and not was_open:
                self._log.warning("qkvd at %s is left alone for a while: %s", self.options.target, error)
            raise
        self.breaker.tell(None)
        return result

    def match(self, ids: Sequence[int] | Array, salt: bytes, model: str | None = None) -> Match:
        """The session that holds the longest prefix of these ids; NOTHING where none does, or nobody answers in time."""
        if self.breaker.open() or len(ids) < PAGE:
            return NOTHING
        name, timeout = model or self.model.name, self.options.lookup_timeout
        try:
            if len(ids) > 4 * FIRST_ASKED:
                first = self._guarded(lambda: self.client.match(name, ids[:FIRST_ASKED], salt=salt, timeout=timeout))
                if first.tokens < FIRST_ASKED:
                    return first
            return self._guarded(lambda: self.client.match(name, ids, salt=salt, timeout=timeout))
        except NotFound:  # nobody has saved anything yet
            return NOTHING
        except Error as error:
            self._log.debug("no lookup: %s", error)
            return NOTHING

    def open(self, name: str, ids: Sequence[int] | Array, salt: bytes) -> int:
        """Opens a session for these ids, and gives how many of them it holds already. Raises `qkvd.Error`."""

        def call() -> int:
            options = self.options
            if not self._registered:
                self.client.register_model(self.model)
                self._registered = True
            session = self.client.open(
                name, model=self.model.name, purpose="fetch", policy=options.policy(),
                durability=options.durability, ttl=options.ttl, salt=salt, prefix=ids, retention="evict",
            )  # fmt: skip
            return min(session.lengths)

        try:
            return self._guarded(call)
        except NotFound:  # a daemon that began anew does not know the model
            self._registered = False
            return self._guarded(call)

    def fork(self, name: str, new: str, position: int) -> None:
        """A new session that has the first `position` tokens of another one. Raises `qkvd.Error`."""
        self._guarded(lambda: self.client._call(calls.fork(name, new, position), None))

    def append(self, name: str, position: int, ids: Sequence[int] | Array, layers: Sequence[tuple[Any, Any]]) -> None:
        """Appends k [tokens, kv_heads, key_dim] and v of every layer, at `position`. Raises `qkvd.Error`."""
        batch = [
            # Ids come with the first layer: they are then known when pages of the last one are sealed, and go to the SSD.
            Item(session=name, layer=layer, position=position, k=k, v=v, tokens=None if layer else ids)
            for layer, (k, v) in enumerate(layers)
        ]
        self._guarded(lambda: self.client.append(batch))

    def fetch(self, name: str, layers: Sequence[int], begin: int, end: int, chunk_tokens: int) -> Iterator[Rows]:
        """Rows, heads first, layer after layer and in order within each. Raises `qkvd.Error`.

        NotFound, in the middle too: fewer rows have come than were asked for, or rows of another shape or dtype than the
        model's, whose name another one has had.
        """
        came, model = 0, self.model
        dtype, heads = NUMPY_OF[dtype_number(model.dtype)], model.kv_heads
        try:
            for piece in self.client.fetch_rows(
                name, layers, begin=begin, end=end, heads_first=True, chunk_tokens=chunk_tokens
            ):
                assert piece.k is not None and piece.v is not None
                for rows, dim in ((piece.k, model.key_dim), (piece.v, model.value_dim)):
                    if rows.dtype != dtype or rows.shape[::2] != (heads, dim):
                        raise NotFound(
                            f"session {name} has rows of {rows.shape[0]} heads of {rows.shape[2]} in {rows.dtype}, not of "
                            f"{heads} heads of {dim} in {dtype}"
                        )
                came += piece.k.shape[1]
                yield piece
        except Error as error:
            self.breaker.tell(error)
            raise
        self.breaker.tell(None)
        if came != len(layers) * (end - begin):
            raise NotFound(f"session {name} had {came} rows of {len(layers) * (end - begin)}")

    def drop(self, name: str) -> None:
        """Closes a session, if that is possible."""
        try:
            self._guarded(lambda: self.client.close_session(name))
        except Error as error:
            self._log.debug("session %s is left open: %s", name, error)

    # ---- opaque pages ----

    def pages_held(self, names: Sequence[str]) -> int:
        """How many of these objects are held, from the first one on; 0 where nobody answers in time."""
        held = 0
        try:
            for part in self._pages(names):
                if not all(part):
                    return held + part.index(False)
                held += len(part)
        except Error as error:
            self._log.debug("no lookup: %s", error)
            return 0
        return held

    def which_held(self, names: Sequence[str]) -> list[bool]:
        """Of each of these objects whether it is held; of none where nobody answers in time."""
        try:
            return [one for part in self._pages(names) for one in part]
        except Error as error:
            self._log.debug("no lookup: %s", error)
            return [False] * len(names)

    def _pages(self, names: Sequence[str]) -> Iterator[list[bool]]:
        """Which are held, of some at a time. Raises `qkvd.Error`."""
        if self.breaker.open() and names:
            raise Unavailable(f"qkvd at {self.options.target} is left alone for a while")
        for at in range(0, len(names), NAMES_MOST):
            part, timeout = names[at : at + NAMES_MOST], self.options.lookup_timeout
            sizes = self._guarded(functools.partial(self.client.has_objects, part, timeout=timeout))
            yield [bool(size) for size in sizes]

    def get_pages(self, names: Sequence[str], out: Sequence[Array]) -> int:
        """Objects into arrays of their size; gives how many have come, from the first one on. Raises `qkvd.Error`."""
        found = self._guarded(lambda: self.client.get_objects(names, out=out))
        came = 0
        for data, target in zip(found, out, strict=True):
            if data is None or data.nbytes != target.nbytes:
                break
            came += 1
        return came

    def put_pages(self, pages: Mapping[str, Array]) -> int:
        """Keeps those objects that are not held; gives how many. Raises `qkvd.Error`."""
        options = self.options
        sizes = self._guarded(lambda: self.client.has_objects(list(pages)))
        new = [(name, data) for (name, data), size in zip(pages.items(), sizes, strict=True) if not size]
        if new:
            self._guarded(
                lambda: self.client.put_objects(
                    new, ttl=options.ttl, durability=options.durability, retention="evict", replace=True
                )
            )
        return len(new)
