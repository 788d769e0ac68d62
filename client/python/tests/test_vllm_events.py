"""KV events of what a real daemon holds, as a router would take them from vLLM; no engine runs."""

import logging
import time

import numpy as np
import pytest
from daemon import Daemon, wait_for

pytest.importorskip("vllm")

from vllm.distributed.kv_events import BlockRemoved, BlockStored

import qkvd
from qkvd import vllm_events
from qkvd.prefixes import Options, Prefixes

LOG = logging.getLogger("test")


class Router:
    """What it would know: ids of the prefixes that can be loaded, and where their last block lies."""

    def __init__(self):
        self.blocks = {}
        self.events = []

    def take(self, events):
        for event in events:
            self.events.append(event)
            assert event.ownership == "qkvd"
            if isinstance(event, BlockStored):
                assert event.block_size == 64 and len(event.token_ids) == 64 * len(event.block_hashes)
                before = () if event.parent_block_hash is None else self.blocks[event.parent_block_hash][0]
                for number, name in enumerate(event.block_hashes):
                    before = (*before, *event.token_ids[64 * number : 64 * (number + 1)])
                    media = self.blocks.get(name, (before, frozenset()))[1] | {event.medium}
                    assert self.blocks.get(name, (before,))[0] == before
                    self.blocks[name] = before, media
            else:
                assert isinstance(event, BlockRemoved)
                for name in event.block_hashes:
                    ids, media = self.blocks[name]
                    assert event.medium in media
                    self.blocks[name] = ids, media - {event.medium}
                    if not self.blocks[name][1]:
                        del self.blocks[name]

    @property
    def prefixes(self):
        return {ids for ids, _ in self.blocks.values()}


@pytest.fixture
def prefixes(daemon, model):
    made = Prefixes(Options(target=daemon.target, bits="exact", timeout=30, lookup_timeout=30), model, LOG)
    yield made
    made.close()


@pytest.fixture
def events(prefixes):
    made = vllm_events.Events(prefixes.options, prefixes, prefixes.model.name, PLAIN)
    yield made
    made.close()


def save(prefixes, name, ids, salt):
    model = prefixes.model
    k, v = np.zeros((2, len(ids), model.kv_heads, model.key_dim), np.float32)
    begin = prefixes.open(name, ids, salt)
    prefixes.append(name, begin, ids[begin:], [(k[begin:], v[begin:])] * model.layers)


def comes_to(events, router, expected, perhaps=frozenset()):
    def done():
        router.take(events.take())
        return expected <= router.prefixes <= expected | perhaps

    wait_for(done, "the router does not come to know what there is")


def heads(ids):
    """All of its prefixes of whole pages."""
    return {tuple(ids[:end]) for end in range(64, len(ids) + 1, 64)}


PLAIN = Options(bits="exact").salt(None, None, None)
CHAT, OTHER = list(range(320)), [*range(128), *range(1000, 1192)]


def test_a_router_learns_what_can_be_loaded(client, prefixes, events):
    router = Router()
    save(prefixes, "chat", CHAT, PLAIN)
    comes_to(events, router, heads(CHAT))
    save(prefixes, "other", OTHER, PLAIN)
    # What others cannot load is not told.
    save(prefixes, "secret", list(range(5000, 5128)), Options(bits="exact").salt(None, "alice", None))
    comes_to(events, router, heads(CHAT) | heads(OTHER))
    prefixes.drop("chat")
    comes_to(events, router, heads(OTHER))
    time.sleep(0.2)
    router.take(events.take())
    assert router.prefixes == heads(OTHER)
    # Another engine comes later, and begins with a snapshot.
    late = vllm_events.Events(prefixes.options, prefixes, prefixes.model.name, PLAIN)
    comes_to(late, Router(), heads(OTHER))
    late.close()
    for name in ("other", "secret"):
        client.close_session(name)


def test_a_daemon_that_goes_and_comes(model, tmp_path):
    with Daemon("--data-dir", str(tmp_path), "--durability", "sync") as daemon:
        options = Options(target=daemon.target, bits=4, timeout=30, lookup_timeout=30)
        prefixes, router = Prefixes(options, model, LOG), Router()
        salt = options.salt(None, None, None)
        events = vllm_events.Events(options, prefixes, model.name, salt)
        save(prefixes, "chat", CHAT, salt)
        comes_to(events, router, heads(CHAT))
        daemon.kill()
        comes_to(events, router, set())
        daemon.start()
        # Its pages have no ids now: they are not told. Rows that were no pages yet may have some, and new ones have.
        wait_for(lambda: answers(prefixes.client), "the daemon is not found again")
        save(prefixes, "new", OTHER[128:], salt)
        comes_to(events, router, heads(OTHER[128:]), perhaps=heads(CHAT))
        events.close()
        prefixes.close()


def test_an_engine_that_takes_no_events_holds_the_reader_up(prefixes, monkeypatch):
    """Nothing piles up: the daemon says that something was missed, and the router still comes to what there is."""
    monkeypatch.setattr(vllm_events, "PAGES_WAITING", 4)
    monkeypatch.setattr(vllm_events, "PAGES_A_STEP", 2)
    events, router = vllm_events.Events(prefixes.options, prefixes, prefixes.model.name, PLAIN), Router()
    for number in range(30):
        save(prefixes, f"s{number}", [number] * 128, PLAIN)
    wait_for(lambda: events._pages >= 4, "nothing waits")
    assert events._pages <= 4 + vllm_events.PAGES_AN_EVENT
    assert 0 < sum(len(event.block_hashes) for event in events._waiting) == events._pages
    comes_to(events, router, set().union(*(heads([number] * 128) for number in range(30))))
    events.close()
    for number in range(30):
        prefixes.drop(f"s{number}")


def answers(client):
    try:
        return client.status()
    except qkvd.Unavailable:
        return None


def event(kind, parent, hashes, **more):
    return qkvd.v1.kv_cache_pb2.PrefixEvent(kind=kind, parent=parent, hashes=hashes, **more)


def test_snapshots_and_moves():
    from qkvd.v1.kv_cache_pb2 import PrefixEvent, WatchResponse

    added, removed, moved = PrefixEvent.KIND_ADDED, PrefixEvent.KIND_REMOVED, PrefixEvent.KIND_MOVED
    root, a, b, c, d = (bytes([number]) * 16 for number in range(5))
    pages, router = vllm_events.Pages(root), Router()

    def tell(*events, **more):
        router.take(pages.take(WatchResponse(events=events, **more)))

    # Children come before their parents.
    tell(event(added, a, b + c, position=64, token_ids=range(64, 192)), reset=True)
    tell(event(moved, b, c, place=PrefixEvent.PLACE_SSD), event(added, d, d, token_ids=range(64)))
    assert not router.blocks
    tell(event(added, root, a, token_ids=range(64)), complete=True)
    assert router.blocks == {
        a: (tuple(range(64)), {"CPU"}), b: (tuple(range(128)), {"CPU"}), c: (tuple(range(192)), {"STORAGE"}),
    }  # fmt: skip
    tell(event(moved, a, b, place=PrefixEvent.PLACE_SSD), event(moved, b, c, place=PrefixEvent.PLACE_MEMORY))
    assert [router.blocks[name][1] for name in (a, b, c)] == [{"CPU"}, {"STORAGE"}, {"CPU"}]
    count = len(router.events)
    # Told twice, not known, without ids, of another root: nothing.
    tell(event(added, root, a, token_ids=range(64)), event(removed, a, d), event(added, c, d), event(added, d, d))
    assert len(router.events) == count
    # Missed something: only what is different is told.
    tell(event(added, root, a, token_ids=range(64)), event(added, a, b, token_ids=range(64, 128)), reset=True, missed=True)
    tell(complete=True)
    assert {name: media for name, (_, media) in router.blocks.items()} == {a: {"CPU"}, b: {"CPU"}}
    assert len(router.events) == count + 3
    router.take(pages.clear())
    assert not router.blocks
