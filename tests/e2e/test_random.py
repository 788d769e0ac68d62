"""Random sequences of everything that sessions can do, through kill -9 and restarts, against a simple model.

Three threads open, append, fork, truncate, demote, sink, fold, restore, copy as pages, close; the daemon is killed in the midst
of it, or stopped. After each start, and at times before its end, everything is fetched and compared:

- A row is a function of the token ids up to its own. So what a session holds follows from its ids and its lengths, and
  these are all that the model keeps. Rows of exact layers and exact rows of coded ones are the same to the bit.
- Data-free codes are a function of the rows of a page. So all sessions that hold the same tokens, by fork, by prefix, by
  pages taken or copied, or coded by themselves, have the same images, before a restart and after it.
- What was acknowledged as durable is there, and no more than was sent. Match finds just what the model says.
- When the last session of a family is closed, memory and disk are as they were.

QKV_RANDOM_ROUNDS and QKV_RANDOM_SEED set how often and with what. By hand:
QKV_RANDOM_ROUNDS=2000 ctest --preset release --timeout 8000 -V -R e2e/random.
"""

import collections
import contextlib
import hashlib
import os
import random
import struct
import threading
import time

import grpc
import numpy as np

from daemon import SANITIZER, Daemon, wait_for
from kv import FP32, TIMEOUT, array_of, assert_close, attention, tensor
from qkv.v1 import admin_pb2, admin_pb2_grpc, model_pb2, tensor_pb2
from qkv.v1 import kv_cache_pb2 as kv

ROUNDS = int(os.environ.get("QKV_RANDOM_ROUNDS", {"": 200, "thread": 5}.get(SANITIZER, 20)))
SEED = int(os.environ.get("QKV_RANDOM_SEED", random.SystemRandom().randrange(1 << 32)))
FAMILY = 20  # rounds after which all sessions are closed
THREADS, SESSIONS_MAX, TOKENS_MAX, CHUNK = 3, 14, 700, 150
HEADS, WIDTH, PAGE = 2, 32, 64
SYNC, ASYNC, MEMORY = kv.DURABILITY_SYNC, kv.DURABILITY_ASYNC, kv.DURABILITY_MEMORY


def policy(bits, window, codec=""):
    return model_pb2.CodecPolicy(bits_k=bits, bits_v=bits, recent_window=window, codec=codec)


# Bits of each layer; 0: exact.
LAYERS = {"coded": (8, 3), "mixed": (0, 8, 3)}
MODELS = {name: model_pb2.Model(
    name=name, layers=len(bits), kv_heads=HEADS, q_heads=HEADS, key_dim=WIDTH, value_dim=WIDTH, dtype=FP32,
    policy=policy(8, 0), overrides=[
        model_pb2.LayerOverride(layer=layer, policy=policy(each or 8, 40 if each == 3 else 0, "" if each else "exact"))
        for layer, each in enumerate(bits)]) for name, bits in LAYERS.items()}
# Root of a row's mean square error: other rows than the right ones have 0.8.
ERROR_MAX, ERROR_MAX_DEMOTED = {8: 0.03, 3: 0.3}, 0.6


# ---- Rows ----

def mixed(x):
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


def chain(ids, begin=0):
    """For each id a number that it and all before it decide; `begin` is that of what goes before."""
    numbers = []
    for one in ids:
        begin = (begin ^ (one + 1)) * 0x9E3779B97F4A7C15 & 0xFFFFFFFFFFFFFFFF
        begin ^= begin >> 29
        numbers.append(begin)
    return numbers


def rows_of(numbers, layer):
    """K and V, uniform in -1 to 1."""
    places = np.arange(2 * HEADS * WIDTH, dtype=np.uint64) + np.uint64(layer << 20 | 1)
    numbers = np.array(numbers, np.uint64)
    bits = mixed(mixed(numbers[:, None]) + places[None] * np.uint64(0x9E3779B97F4A7C15))
    values = ((bits >> np.uint64(40)).astype(np.float32) * np.float32(2 ** -23) - 1).reshape(-1, 2, HEADS, WIDTH)
    return values[:, 0], values[:, 1]


# ---- The model ----

class Session:
    """What a session holds: ids[:lengths[layer]] in each layer."""

    def __init__(self, name, model, durability):
        self.name, self.model, self.durability = name, model, durability
        self.lock = threading.Lock()
        self.ids, self.numbers = [], []
        self.lengths = [0] * len(LAYERS[model])
        self.durable = list(self.lengths)  # known to be
        self.known = [0, 0]                # ids that the daemon holds: at least, at most
        self.hashed = 0                    # below it pages may have come from the SSD: with a hash, without ids
        # Planes may have been dropped: since the last start; for good, as the pages came from such a session.
        self.demoted = self.copied = False
        self.history = []  # of what was done, for messages
        # While a call is on its way, and for ever where the daemon was killed meanwhile: lengths that may be found.
        self.least, self.most, self.may_be_gone = None, None, False

    @property
    def bits(self):
        return LAYERS[self.model]

    def extend(self, ids):
        self.numbers += chain(ids, self.numbers[-1] if self.numbers else 0)
        self.ids += ids

    def note(self, what):
        self.history = [*self.history[-20:], what]

    def __str__(self):
        return (f"{self.name}, model {self.model}, durability {self.durability}, lengths {self.lengths}, "
                f"known to be durable {self.durable}, history {'; '.join(self.history)}")

    def forget_ids(self):
        """Those that no layer has."""
        del self.ids[max(self.lengths):], self.numbers[max(self.lengths):]

    def cut(self, position, layers):
        for layer in layers:
            self.lengths[layer] = min(self.lengths[layer], position)
            self.durable[layer] = min(self.durable[layer], position)
        self.known = [min(known, position) for known in self.known]
        if position < self.hashed:  # without ids nothing stands for the beginning of a page
            self.hashed = position // PAGE * PAGE
            self.known[0] = min(self.known[0], self.hashed)

    def fork(self, name, position=0):
        made = Session(name, self.model, self.durability)
        made.ids, made.numbers = list(self.ids), list(self.numbers)
        made.lengths, made.known, made.durable = list(self.lengths), list(self.known), list(self.durable)
        made.hashed = self.hashed
        made.demoted, made.copied, made.history = self.demoted, self.copied, list(self.history)
        made.note(f"made of {self.name} at {position}")
        if position > 0:
            made.cut(position, range(len(made.lengths)))
        made.forget_ids()
        return made

    def matches(self, ids):
        """Tokens of a prompt that Match may find here: at least, at most."""
        same = next((i for i, (ours, theirs) in enumerate(zip(self.ids, ids)) if ours != theirs),
                    min(len(self.ids), len(ids)))
        return [min(same, known, *self.lengths) // PAGE * PAGE for known in self.known]


class World:
    """All sessions, and all images that were seen."""

    def __init__(self, rng):
        self.random, self.lock = rng, threading.Lock()
        self.sessions, self.made = {}, 0
        self.documents = [[rng.randrange(1 << 32) for _ in range(TOKENS_MAX)] for _ in range(3)]
        self.coded = {}   # what page it is -> digest of its image
        self.images = {}  # digest -> (what page it is, its rows as decoded)
        self.counts, self.done = collections.Counter(), 0

    def new_name(self):
        with self.lock:
            self.made += 1
            return f"s{self.made}"

    def add(self, session):
        with self.lock:
            self.sessions[session.name] = session

    def remove(self, session):
        with self.lock:
            self.sessions.pop(session.name, None)


def durable_of(info):
    return list(info.durable) or [0] * len(info.lengths)  # none: in memory alone


# ---- What is found ----

def digest(data):
    return hashlib.blake2b(data, digest_size=16).digest()


def check_page(world, session, layer, begin, page, rows):
    """`rows`: K and V as the daemon decodes them, of the page's tokens."""
    image_tokens, = struct.unpack_from("<H", page.image, 24)
    position, = struct.unpack_from("<Q", page.image, 16)
    assert position == begin and 1 <= page.tokens <= min(image_tokens, PAGE)
    end = begin + page.tokens
    wanted = rows_of(session.numbers[begin:end], layer)
    demoted = session.demoted or session.copied
    limit = ERROR_MAX_DEMOTED if demoted else ERROR_MAX[session.bits[layer]]
    for want, got in zip(wanted, rows):
        error = np.sqrt(np.square(want - got).mean(axis=(1, 2)))
        assert error.max() < limit, f"rows {begin + error.argmax()} of {end} differ by {error.max()}"
    world.counts["pages"] += 1
    sha = digest(page.image)
    if page.tokens == image_tokens and not demoted:
        what = (session.model, layer, begin, end, session.numbers[end - 1])
        assert world.coded.setdefault(what, sha) == sha, f"page at {begin} has another image"
        world.counts["pages of other sessions"] += sha in world.images
    # The same image decodes to the same rows.
    known = world.images.setdefault(sha, rows)
    both = min(len(known[0]), page.tokens)
    assert all(np.array_equal(one[:both], other[:both]) for one, other in zip(known, rows))
    if len(known[0]) < page.tokens:
        world.images[sha] = rows


def check_layer(stub, world, session, layer):
    end = session.lengths[layer]
    pieces = list(stub.Fetch(kv.FetchRequest(session=session.name, layers=[layer]), timeout=TIMEOUT))
    found = [np.concatenate([array_of(getattr(piece, part)) for piece in pieces]) for part in "kv"] if pieces else []
    assert sum(piece.k.dims[0] for piece in pieces) == end
    position = 0
    for piece in stub.Fetch(kv.FetchRequest(session=session.name, layers=[layer], coded=True), timeout=TIMEOUT):
        assert piece.position == position
        for page in piece.pages:
            assert session.bits[layer] > 0
            check_page(world, session, layer, position, page, [rows[position:position + page.tokens] for rows in found])
            position += page.tokens
        if not piece.pages:
            until = position + piece.k.dims[0]
            for want, got, again in zip(rows_of(session.numbers[position:until], layer), (piece.k, piece.v), found):
                assert np.array_equal(want, array_of(got)) and np.array_equal(want, again[position:until])
            world.counts["exact rows"] += until - position
            position = until
    assert position == end


def check_session(stub, world, session):
    try:
        info = stub.GetSession(kv.GetSessionRequest(session=session.name), timeout=TIMEOUT)
        assert list(info.lengths) == session.lengths, f"lengths are {info.lengths}"
        for layer in range(len(session.lengths)):
            if session.lengths[layer] > 0:
                check_layer(stub, world, session, layer)
    except AssertionError as error:
        raise AssertionError(f"{session}: {error}") from error


def check_matches(stub, world):
    for _ in range(5):
        one = world.random.choice(list(world.sessions.values()))
        prompt = one.ids[:world.random.randrange(len(one.ids) + 1)] + world.random.choice(world.documents)[:100]
        bounds = {other.name: other.matches(prompt) for other in world.sessions.values() if other.model == one.model}
        answer = stub.Match(kv.MatchRequest(model=one.model, token_ids=prompt), timeout=TIMEOUT)
        text = f"{answer.tokens} of {answer.session!r} match, sessions may have {bounds}"
        best = max(bounds, key=lambda name: bounds[name][0])
        assert bounds[best][0] <= answer.tokens, f"{text}; {world.sessions[best]}"
        assert answer.tokens == 0 or answer.tokens <= bounds[answer.session][1], (
            f"{text}; {world.sessions[answer.session]}")
        world.counts["matched"] += answer.tokens > 0


def check_all(stub, world):
    for session in list(world.sessions.values()):
        check_session(stub, world, session)
    if world.sessions:
        check_matches(stub, world)


def believe(stub, world):
    """After a start: what may be there is there, nothing else. From here on that is the model."""
    listed = stub.ListSessions(kv.ListSessionsRequest(), timeout=TIMEOUT).sessions
    found = {info.session: info for info in listed}
    for session in list(world.sessions.values()):
        if session.name not in found:
            assert session.may_be_gone or session.durability == MEMORY, f"{session.name} is gone"
            world.remove(session)
            continue
        info = stub.GetSession(kv.GetSessionRequest(session=session.name), timeout=TIMEOUT)
        most = session.most or session.lengths
        least = session.least or session.lengths
        if session.durability == ASYNC:
            least = [min(pair) for pair in zip(least, session.durable)]
        for layer, length in enumerate(info.lengths):
            assert least[layer] <= length <= most[layer], (
                f"lengths are {info.lengths}, they may be {least} to {most}: {session}")
        session.note(f"start with {info.lengths} of {session.lengths}")
        session.lengths = list(info.lengths)
        session.durable = durable_of(info)
        session.known = [0, session.known[1]]
        session.hashed = session.known[1] // PAGE * PAGE
        session.forget_ids()
        session.least = session.most = None
        session.demoted = session.may_be_gone = False  # the records have all planes
    assert set(found) <= set(world.sessions), "sessions are there that were closed"


# ---- What is done ----

class Worker(threading.Thread):
    """Does random things until the daemon ends or `stop` is set."""

    def __init__(self, world, stub, admin, rng, stop):
        super().__init__(daemon=True)
        self.world, self.stub, self.admin, self.random, self.stop = world, stub, admin, rng, stop
        self.failure = None

    def run(self):
        try:
            while not self.stop.is_set():
                self.step()
        except grpc.RpcError as error:
            if error.code() not in (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.CANCELLED):
                self.failure = error
        except Exception as error:  # pylint: disable=broad-except
            self.failure = error

    def step(self):
        with self.world.lock:
            few = len(self.world.sessions) < SESSIONS_MAX
            one = self.random.choice(list(self.world.sessions.values()) or [None])
        if one is None or (few and self.random.random() < 0.05):
            self.open()
            return
        if not one.lock.acquire(blocking=False):
            return
        try:
            # Where the kill has cut off another worker's call, what that has done is known only after the next start.
            if one.name in self.world.sessions and one.least is None:
                actions = {self.append: 40, self.sink: 5, self.demote: 5, self.prefetch: 5, self.truncate: 8, self.ask: 6,
                           self.attend: 4, self.pin: 2, self.compact: 1}
                actions.update({self.fork: 10, self.open_prefix: 6, self.copy: 3} if few else {})
                actions.update({self.close: 3 if few else 20})
                action, = self.random.choices(list(actions), list(actions.values()))
                self.world.counts[action.__name__] += 1
                one.note(f"{action.__name__} at {one.lengths}")
                action(one)
                self.world.done += 1
        finally:
            one.lock.release()

    @contextlib.contextmanager
    def may_be_refused(self, *codes):
        try:
            yield
        except grpc.RpcError as error:
            if error.code() not in codes:
                raise
            self.world.counts[f"refused: {error.code().name}"] += 1

    def call(self, method, request):
        return getattr(self.stub, method)(request, timeout=TIMEOUT)

    def begin(self, session, least, most):
        session.least, session.most = list(least), list(most)

    def end(self, session):
        session.least, session.most, session.may_be_gone = None, None, False

    # A session that is being made is known before the call, and may be found with anything up to its lengths.
    @contextlib.contextmanager
    def making(self, session):
        with session.lock:
            self.begin(session, [0] * len(session.lengths), session.lengths)
            session.may_be_gone = True
            self.world.add(session)
            try:
                yield
            except grpc.RpcError as error:
                if error.code() not in (grpc.StatusCode.RESOURCE_EXHAUSTED,):
                    raise
                self.world.counts["refused: making"] += 1
                self.world.remove(session)
            else:
                self.end(session)

    def open(self):
        model = self.random.choice(list(LAYERS))
        durability = self.random.choices([SYNC, ASYNC, MEMORY], [6, 4, 1])[0]
        session = Session(self.world.new_name(), model, durability)
        with self.making(session):
            self.call("OpenSession", kv.OpenSessionRequest(session=session.name, model=model, durability=durability))

    def open_prefix(self, one):
        session = Session(self.world.new_name(), one.model, one.durability)
        prompt = one.ids[:self.random.randrange(len(one.ids) + 1)]
        session.extend(prompt)
        session.lengths, session.known = [len(prompt)] * len(one.lengths), [0, len(prompt)]
        with self.world.lock:  # it has pages as they are with the holder
            session.demoted = any(other.demoted for other in self.world.sessions.values())
            session.copied = any(other.copied for other in self.world.sessions.values())
        with self.making(session):
            answer = self.call("OpenSession", kv.OpenSessionRequest(
                session=session.name, model=one.model, durability=one.durability, prefix_token_ids=prompt))
            assert answer.matched_tokens % PAGE == 0 and answer.matched_tokens <= len(prompt)
            assert list(answer.info.lengths) == [answer.matched_tokens] * len(one.lengths)
            session.lengths = list(answer.info.lengths)
            session.known = [answer.matched_tokens] * 2
            session.hashed = answer.matched_tokens  # of a holder that may have come from the SSD
            session.forget_ids()
            self.world.counts["opened with a prefix"] += answer.matched_tokens > 0

    def fork(self, one):
        position = self.random.choice([0, self.random.randrange(min(one.lengths) + 1),
                                       self.random.randrange(min(one.lengths) + 1) // PAGE * PAGE])
        made = one.fork(self.world.new_name(), position)
        with self.making(made):
            answer = self.call("Fork", kv.ForkRequest(session=one.name, fork=made.name, position=position))
            assert list(answer.info.lengths) == made.lengths
            made.durable = durable_of(answer.info)

    def copy(self, one):
        """The pages that the session has, as they are; exact layers have rows."""
        if max(one.lengths) == 0:
            return
        made = one.fork(self.world.new_name())
        made.durable = [0] * len(one.lengths)
        made.known, made.hashed, made.copied = [0, 0], 0, one.demoted or one.copied
        items = []
        for layer in range(len(one.lengths)):
            made.lengths[layer] = 0
            for piece in self.call("Fetch", kv.FetchRequest(session=one.name, layers=[layer], coded=True)):
                item = kv.Item(session=made.name, layer=layer, position=piece.position, pages=piece.pages)
                if not piece.pages:
                    item.k.CopyFrom(piece.k)
                    item.v.CopyFrom(piece.v)
                items.append(item)
                made.lengths[layer] += sum(page.tokens for page in piece.pages) or piece.k.dims[0]
        made.forget_ids()
        with self.making(made):
            self.call("OpenSession", kv.OpenSessionRequest(session=made.name, model=made.model, durability=made.durability))
            try:
                self.stub.Append(iter([kv.AppendRequest(items=[item]) for item in items]), timeout=TIMEOUT)
            except grpc.RpcError as error:
                if error.code() == grpc.StatusCode.RESOURCE_EXHAUSTED:
                    self.call("CloseSession", kv.CloseSessionRequest(session=made.name))
                raise

    def next_ids(self, one, count):
        """As a document goes on, for sessions that have followed it so far."""
        begin = len(one.ids)
        if self.random.random() < 0.8:
            for document in self.world.documents:
                if document[:begin] == one.ids:
                    return document[begin:begin + count]
        return [self.random.randrange(1 << 32) for _ in range(count)]

    def append(self, one):
        """To all layers, or to some, which the others come up with later."""
        begin, layers = min(one.lengths), range(len(one.lengths))
        if begin >= TOKENS_MAX:
            return
        count = min(self.random.choice([1, self.random.randrange(1, CHUNK)]), TOKENS_MAX - begin)
        if len(one.ids) < begin + count:
            one.extend(self.next_ids(one, begin + count - len(one.ids)))
        end = min(begin + count, len(one.ids))
        if self.random.random() < 0.1:
            layers = self.random.sample(layers, 1)
        ids = self.random.random() < 0.8
        items, most = [], list(one.lengths)
        for layer in layers:
            if one.lengths[layer] < end:
                first = one.lengths[layer]
                k, v = rows_of(one.numbers[first:end], layer)
                items.append(kv.Item(session=one.name, layer=layer, position=first, k=tensor(k), v=tensor(v),
                                     token_ids=one.ids[first:end] if ids else []))
                most[layer] = end
        if not items:
            return
        if ids and any(item.position <= one.known[1] for item in items):
            one.known[1] = max(one.known[1], end)
        self.begin(one, one.lengths, most)
        try:
            self.stub.Append(iter([kv.AppendRequest(items=items)]), timeout=TIMEOUT)
        except grpc.RpcError as error:
            if error.code() != grpc.StatusCode.RESOURCE_EXHAUSTED:
                raise
            self.world.counts["refused: append"] += 1
            found = list(self.call("GetSession", kv.GetSessionRequest(session=one.name)).lengths)
            assert all(length in pair for length, *pair in zip(found, one.lengths, most)), "an item was taken in part"
            one.known[0] = 0  # which of the items brought ids is not looked into
            most = found
        if ids and most[items[0].layer] == end and any(item.position <= one.known[0] for item in items):
            one.known[0] = max(one.known[0], end)
        one.lengths = most
        if one.durability == SYNC:
            one.durable = list(most)
        one.forget_ids()
        self.end(one)

    def truncate(self, one):
        position = self.random.randrange(max(one.lengths) + 1)
        layers = self.random.choice([list(range(len(one.lengths)))] * 3 + [[self.random.randrange(len(one.lengths))]])
        least = [min(length, position) if layer in layers else length for layer, length in enumerate(one.lengths)]
        most = list(one.lengths)
        known = one.known[1]
        one.cut(position, layers)  # what is durable, too
        one.known[1] = known
        one.note(f"to {position}")
        self.begin(one, least, most)
        answer = self.call("Truncate", kv.TruncateRequest(session=one.name, position=position, layers=layers))
        assert list(answer.lengths) == one.lengths
        one.known[1] = min(known, position)
        one.forget_ids()
        self.end(one)

    def close(self, one):
        one.may_be_gone = True  # or there in part: its records go one by one
        self.begin(one, [0] * len(one.lengths), one.lengths)
        self.call("CloseSession", kv.CloseSessionRequest(session=one.name))
        self.world.remove(one)

    def sink(self, one):
        if one.durability == MEMORY:
            return
        self.call("CloseSession", kv.CloseSessionRequest(session=one.name, keep=True))
        if self.random.random() < 0.3:
            time.sleep(0.3)  # longer than it takes until the session is folded, if it can be
        one.durable = [length if one.durability == SYNC or bits else 0 for length, bits in zip(one.lengths, one.bits)]

    def demote(self, one):
        one.demoted = True
        begin = self.random.randrange(max(one.lengths) + 1)
        self.call("Demote", kv.DemoteRequest(session=one.name, bits=self.random.choice([2, 2.5]),
                                             even=self.random.random() < 0.5,
                                             range=tensor_pb2.TokenRange(begin=begin)))

    def prefetch(self, one):
        with self.may_be_refused(grpc.StatusCode.FAILED_PRECONDITION, grpc.StatusCode.RESOURCE_EXHAUSTED):
            self.call("Prefetch", kv.PrefetchRequest(session=one.name))
            one.demoted = False

    def pin(self, one):
        self.call("Pin", kv.PinRequest(session=one.name, unpin=self.random.random() < 0.7))

    def ask(self, one):
        info = self.call("GetSession", kv.GetSessionRequest(session=one.name))
        assert list(info.lengths) == one.lengths
        if one.durability == SYNC:
            assert list(info.durable) == one.lengths
        assert all(durable <= length for durable, length in zip(info.durable, info.lengths))
        one.durable = durable_of(info)

    def attend(self, one):
        layer = self.random.randrange(len(one.lengths))
        length = one.lengths[layer]
        if length == 0:
            return
        pieces = list(self.call("Fetch", kv.FetchRequest(session=one.name, layers=[layer])))
        k, v = (np.concatenate([array_of(getattr(piece, part)) for piece in pieces]) for part in "kv")
        q = np.random.default_rng(length).standard_normal((1, HEADS, WIDTH)).astype(np.float32)
        item = kv.Item(session=one.name, layer=layer, position=length - 1, q=tensor(q))
        item.options.precision = kv.AttendOptions.PRECISION_FP32
        with self.may_be_refused(grpc.StatusCode.RESOURCE_EXHAUSTED):
            result = self.call("Attend", kv.AttendRequest(items=[item])).results[0]
            out, lse = attention(q, k, v, length - 1)
            assert_close(array_of(result.out), out, 1e-4)
            assert_close(array_of(result.lse), lse, 1e-4)

    def compact(self, one):
        with self.may_be_refused(grpc.StatusCode.RESOURCE_EXHAUSTED):
            self.admin.Compact(admin_pb2.CompactRequest(), timeout=TIMEOUT)


def work(daemon, world, rng, kill):
    """Threads for a moment; then the daemon is killed, or they end."""
    stop, until, first = threading.Event(), time.monotonic() + 3, world.done
    workers = [Worker(world, daemon.stub(), admin_pb2_grpc.AdminStub(daemon.channel()), random.Random(rng.random()), stop)
               for _ in range(THREADS)]
    for worker in workers:
        worker.start()
    steps = rng.randrange(80)
    while world.done < first + steps and time.monotonic() < until and any(w.is_alive() for w in workers):
        time.sleep(0.001)
    time.sleep(rng.random() * 0.01)
    if kill:
        daemon.kill()
    stop.set()
    for worker in workers:
        worker.join()
    for worker in workers:
        if worker.failure is not None:
            raise worker.failure


def close_all(daemon, world):
    """Nothing is left of anything."""
    stub, storage = daemon.stub(), admin_pb2_grpc.AdminStub(daemon.channel())
    for session in list(world.sessions.values()):
        stub.CloseSession(kv.CloseSessionRequest(session=session.name), timeout=TIMEOUT)
        world.remove(session)
    world.coded.clear()
    world.images.clear()
    wait_for(lambda: daemon.metric("qkvd_kv_bytes") == 0, "memory to be free")
    wait_for(lambda: storage.GetStorage(admin_pb2.GetStorageRequest(), timeout=TIMEOUT).records == 0, "records to go")


def run_round(number, world, rng, data):
    options = ["--data-dir", data, "--calibrate-tokens", "0", "--storage-segment", "1MiB",
               "--memory-high", "1",  # the background demotes nothing
               "--fold-after", rng.choice(["1ms", "1ms", "0"]),
               "--storage-io", rng.choice(["uring", "pread"]), "--storage-compact-rate", rng.choice(["0", "64MiB"]),
               "--memory-budget", rng.choice(["6MiB", "12MiB", "64MiB"])]
    with Daemon(*options) as daemon:
        stub = daemon.stub()
        for model in MODELS.values():
            stub.RegisterModel(model_pb2.RegisterModelRequest(model=model), timeout=TIMEOUT)
        believe(stub, world)
        check_all(stub, world)
        way = rng.choice(["kill in the midst"] * 3 + ["kill", "stop"])
        if (number + 1) % FAMILY == 0:
            work(daemon, world, rng, False)
            check_all(stub, world)
            close_all(daemon, world)
        elif way == "kill in the midst":
            work(daemon, world, rng, True)
            return
        else:
            work(daemon, world, rng, False)
            check_all(stub, world)
        world.counts["unfolded"] += int(daemon.metric("qkvd_storage_unfolded_sessions_total"))
        for metric in "qkvd_storage_lost_pages_total", "qkvd_storage_bad_records_total":
            assert daemon.metric(metric) == 0, metric
        if way == "stop":
            for session in world.sessions.values():  # exact rows of coded layers are coded then
                if session.durability != MEMORY:
                    session.durable = [length if session.durability == SYNC or bits else durable for length, bits, durable
                                       in zip(session.lengths, session.bits, session.durable)]
        else:
            daemon.kill()


def test_random_sequences(tmp_path):
    print(f"seed {SEED}")
    rng = random.Random(SEED)
    world = World(random.Random(rng.random()))
    for number in range(ROUNDS):
        try:
            run_round(number, world, rng, str(tmp_path / "data"))
        except BaseException:
            print(f"seed {SEED}, round {number}, done so far: {dict(world.counts)}")
            raise
    print(dict(sorted(world.counts.items())))
    if ROUNDS >= 100:  # it has done what it is for
        for what in "fork", "opened with a prefix", "copy", "sink", "truncate", "matched", "pages of other sessions", "unfolded":
            assert world.counts[what] > 0, what
