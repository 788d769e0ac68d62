"""KV events of vLLM for what qkvd holds, so that routers which follow an engine know what it can load.

A thread reads the daemon's `Watch`. A page of 64 tokens becomes a `BlockStored`, with its ids and the daemon's hashes, and
a `BlockRemoved` when no session has it any more, or when the daemon is gone; on the SSD its medium is STORAGE. Told are
pages that any request of these ids could load: those of adapters, of users with salts and behind images are left out, and
so are pages whose ids the daemon does not know (after its restart).
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
from vllm.distributed.kv_events import MEDIUM_CPU, MEDIUM_STORAGE, BlockRemoved, BlockStored

from qkvd.client import Client
from qkvd.errors import Error, NotFound
from qkvd.prefixes import PAGE, Options, Prefixes
from qkvd.v1 import kv_cache_pb2

logger = logging.getLogger("vllm.qkvd")
HASH = 16  # bytes
IDS = np.dtype("<u4")
PAGES_WAITING = 65536  # that the engine has not taken; the daemon is then read no further
PAGES_A_STEP = 1024  # that an engine's step is given
PAGES_AN_EVENT = 256
RESUME = 0.1  # seconds before a stream that broke off is asked for again
PAUSE_FIRST, PAUSE_MOST = 1.0, 30.0  # seconds before a daemon that is gone is asked again
OWNER = "qkvd"
Told: TypeAlias = "BlockStored | BlockRemoved"


@dataclass
class Page:
    """What was told of a page, and what is needed to tell it again."""

    parent: bytes
    ids: bytes
    medium: str


class Pages:
    """The pages that have been told, and what is to be told when others come and go. Knows neither threads nor daemons.

    root: the hash before the first page. Pages that do not follow it, or others of these, are passed over.
    owner: what the events name as the owner of the blocks.
    """

    def __init__(self, root: bytes, owner: str = OWNER):
        self._root = root
        self._owner = owner
        self._told: dict[bytes, Page] = {}
        self._snapshot: dict[bytes, Page] | None = None

    def take(self, message: kv_cache_pb2.WatchResponse) -> Iterator[Told]:
        """What a message of `Watch` changes."""
        if message.reset:
            self._snapshot = {}
        for event in message.events:
            if self._snapshot is not None:
                self._collect(self._snapshot, event)
            elif event.kind == event.KIND_ADDED:
                yield from self._stored(self._follow(pages_of(event)))
            elif event.kind == event.KIND_REMOVED:
                yield from self._removed(hashes_of(event))
            elif event.kind == event.KIND_MOVED:
                yield from self._moved(hashes_of(event), medium_of(event))
        if message.complete and self._snapshot is not None:
            snapshot, self._snapshot = self._snapshot, None
            yield from self._replace(snapshot)

    def clear(self) -> Iterator[Told]:
        """Nothing can be loaded any more."""
        self._snapshot = None
        yield from self._removed(list(self._told))

    def _collect(self, snapshot: dict[bytes, Page], event: kv_cache_pb2.PrefixEvent) -> None:
        if event.kind == event.KIND_ADDED:
            snapshot.update(pages_of(event))
        elif event.kind == event.KIND_MOVED:
            for name in hashes_of(event):
                if name in snapshot:
                    snapshot[name].medium = medium_of(event)
        else:
            for name in hashes_of(event):
                snapshot.pop(name, None)

    def _replace(self, snapshot: dict[bytes, Page]) -> Iterator[Told]:
        """What is told becomes what the snapshot has, whose pages come in any order."""
        children: dict[bytes, list[bytes]] = {}
        for name, page in snapshot.items():
            if page.ids:
                children.setdefault(page.parent, []).append(name)
        held: dict[bytes, Page] = {}  # parents before their children
        rest = children.get(self._root, [])
        while rest:
            name = rest.pop()
            held[name] = snapshot[name]
            rest.extend(children.get(name, ()))
        yield from self._removed([name for name in self._told if name not in held])
        for name, page in held.items():
            yield from self._moved([name], page.medium)
        yield from self._stored((name, page) for name, page in held.items() if name not in self._told)

    def _follow(self, pages: Iterable[tuple[bytes, Page]]) -> Iterator[tuple[bytes, Page]]:
        for name, page in pages:
            if (page.parent == self._root or page.parent in self._told) and page.ids and name not in self._told:
                yield name, page

    def _stored(self, pages: Iterable[tuple[bytes, Page]]) -> Iterator[Told]:
        run: list[tuple[bytes, Page]] = []
        for name, page in pages:
            self._told[name] = page
            if run and (run[-1][0] != page.parent or run[-1][1].medium != page.medium or len(run) == PAGES_AN_EVENT):
                yield self._stored_run(run)
                run = []
            run.append((name, page))
        if run:
            yield self._stored_run(run)

    def _stored_run(self, run: list[tuple[bytes, Page]]) -> BlockStored:
        first = run[0][1]
        return BlockStored(
            block_hashes=[name for name, _ in run],
            parent_block_hash=None if first.parent == self._root else first.parent,
            token_ids=np.frombuffer(b"".join(page.ids for _, page in run), IDS).tolist(),
            block_size=PAGE, lora_id=None, lora_name=None, medium=first.medium, ownership=self._owner,
        )  # fmt: skip

    def _removed(self, names: Iterable[bytes]) -> Iterator[Told]:
        of: dict[str, list[bytes]] = {}
        for name in names:
            page = self._told.pop(name, None)
            if page is not None:
                of.setdefault(page.medium, []).append(name)
        for medium, gone in of.items():
            for at in range(0, len(gone), PAGES_AN_EVENT):
                yield BlockRemoved(block_hashes=gone[at : at + PAGES_AN_EVENT], medium=medium, ownership=self._owner)

    def _moved(self, names: Iterable[bytes], medium: str) -> Iterator[Told]:
        moved = [(name, self._told[name]) for name in names if name in self._told and self._told[name].medium != medium]
        for name, page in moved:
            was, page.medium = page.medium, medium
            yield self._stored_run([(name, page)])
            yield BlockRemoved(block_hashes=[name], medium=was, ownership=self._owner)


def hashes_of(event: kv_cache_pb2.PrefixEvent) -> list[bytes]:
    return [event.hashes[at : at + HASH] for at in range(0, len(event.hashes), HASH)]


def medium_of(event: kv_cache_pb2.PrefixEvent) -> str:
    return str(MEDIUM_STORAGE if event.place == event.PLACE_SSD else MEDIUM_CPU)


def pages_of(event: kv_cache_pb2.PrefixEvent) -> Iterator[tuple[bytes, Page]]:
    """Of an event that adds them, with their hashes."""
    ids, parent = np.array(event.token_ids, IDS), event.parent
    for number, name in enumerate(hashes_of(event)):
        its = ids[number * PAGE : (number + 1) * PAGE].tobytes()
        yield name, Page(parent, its, MEDIUM_CPU)
        parent = name


class Events:
    """Reads the daemon in a thread until it is closed, or each of several. `take` gives what has come, in order.

    Of several daemons each owns its blocks, "qkvd@TARGET": a page may be held by more than one.
    """

    def __init__(self, options: Options, prefixes: Prefixes, model: str, salt: bytes):
        self._tenant, self._model, self._salt = options.tenant, model, salt
        self._changed = threading.Condition()
        self._waiting: deque[Told] = deque()
        self._pages = 0  # in these
        self._closed = False
        daemons = prefixes.client.daemons
        for target, client in daemons.items():
            owner = OWNER if len(daemons) == 1 else f"{OWNER}@{target}"
            threading.Thread(target=self._run, args=(client, owner), name="qkvd-events", daemon=True).start()

    def take(self) -> list[Told]:
        """At most about PAGES_A_STEP pages; the others come with the next steps."""
        taken: list[Told] = []
        pages = 0
        with self._changed:
            while self._waiting and pages < PAGES_A_STEP:
                taken.append(self._waiting.popleft())
                pages += len(taken[-1].block_hashes)
            self._pages -= pages
            if pages:
                self._changed.notify_all()
        return taken

    def close(self) -> None:
        """Threads end with the next message, or with the connection."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()

    def _run(self, client: Client, owner: str) -> None:
        pages: Pages | None = None
        instance = after = 0
        pause, said = 0.0, False
        while not self._wait(lambda: False, pause):
            came, registered = False, True
            try:
                if pages is None:
                    pages = Pages(client.match(self._model, [], salt=self._salt).root, owner)
                watch = client.watch(tenant=self._tenant, model=self._model, token_ids=True, instance=instance, after=after)
                for message in watch:
                    came, said = True, False
                    instance, after = message.instance, message.sequence
                    if not self._tell(pages.take(message)):
                        return
            except NotFound:  # nobody has saved anything yet
                registered = False
            except Error as error:
                if not said and self._open():
                    logger.info("no KV events of what qkvd holds: %s", error)
                    said = True
            except Exception:  # what is not told is not found by routers, which is no reason to end
                logger.exception("KV events of what qkvd holds end here")
                return
            if came:
                pause = RESUME  # a daemon that is still there goes on where it was
                continue
            instance = after = 0
            if pages is not None and not self._tell(pages.clear()):
                return
            pause = max(min(2 * pause, PAUSE_MOST), PAUSE_FIRST) if registered else PAUSE_FIRST

    def _open(self) -> bool:
        with self._changed:
            return not self._closed

    def _wait(self, until: Callable[[], bool], seconds: float | None) -> bool:
        """Waits until something holds, or so long; whether this is closed."""
        deadline = None if seconds is None else time.monotonic() + seconds
        with self._changed:
            while not self._closed and not until():
                left = None if deadline is None else deadline - time.monotonic()
                if left is not None and left <= 0:
                    break
                self._changed.wait(left)
            return self._closed

    def _tell(self, events: Iterable[Told]) -> bool:
        """Whether somebody still listens."""
        for event in events:
            if self._wait(lambda: self._pages < PAGES_WAITING, None):
                return False
            with self._changed:
                self._waiting.append(event)
                self._pages += len(event.block_hashes)
        return True


def events_of(options: Options, prefixes: Prefixes, vllm_config: Any, model: str, salt: bytes) -> Events | None:
    """None where the engine publishes no events."""
    config = vllm_config.kv_events_config
    return Events(options, prefixes, model, salt) if config is not None and config.enable_kv_cache_events else None
