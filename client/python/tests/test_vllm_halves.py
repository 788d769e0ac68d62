"""The two halves of the connector for vLLM without an engine: what one is told, and what it does."""

import dataclasses
import threading
from types import SimpleNamespace

import numpy as np
import pytest
from daemon import PATIENCE

torch = pytest.importorskip("torch")
pytest.importorskip("vllm")

from vllm.v1.core.kv_cache_utils import generate_scheduler_kv_cache_config  # noqa: E402
from vllm.v1.kv_cache_interface import (  # noqa: E402
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    MambaSpec,
    SlidingWindowSpec,
    UniformTypeKVCacheSpecs,
)

from qkvd import vllm_worker  # noqa: E402
from qkvd.calls import Match  # noqa: E402
from qkvd.errors import Unavailable, Unimplemented  # noqa: E402
from qkvd.paged import PagedLayer  # noqa: E402
from qkvd.prefixes import Breaker, Options  # noqa: E402
from qkvd.vllm_blocks import BlockLoad, BlockScheduler, BlockWorker, Bytes, takes_rows  # noqa: E402
from qkvd.vllm_scheduler import Progress, QkvdMetadata, Save, Scheduler, block_tokens_of, model_name  # noqa: E402
from qkvd.vllm_worker import Copied, Worker, geometry  # noqa: E402

BLOCK, HEADS, DIM, LAYERS = 64, 2, 16, 2
TOKEN_BYTES = LAYERS * HEADS * 2 * DIM * 4
IDS = list(range(1000, 1512))


def config(tensor=1, pipeline=1):
    return SimpleNamespace(
        kv_transfer_config=SimpleNamespace(is_kv_consumer=True, is_kv_producer=True),
        parallel_config=SimpleNamespace(
            tensor_parallel_size=tensor, pipeline_parallel_size=pipeline, decode_context_parallel_size=1
        ),
        cache_config=SimpleNamespace(
            cache_dtype="auto", prefix_caching_hash_algo="sha256", enable_prefix_caching=True, prefix_match_unit=None
        ),
        kv_events_config=None,
    )


def caches():
    spec = FullAttentionSpec(block_size=BLOCK, num_kv_heads=HEADS, head_size=DIM, dtype=torch.float32)
    names = [f"layer.{index}" for index in range(LAYERS)]
    return SimpleNamespace(kv_cache_groups=[SimpleNamespace(layer_names=names, kv_cache_spec=spec)])


def scheduler(kind=Scheduler, tensor=1, layers=None, **options):
    """And the salts that it asks with; `made.held` says what the daemon holds of each."""
    made = kind(Options(model_name="m", target="unix:/nobody", **options), config(tensor), layers or caches())
    made.asked = []

    def match(ids, salt, model=None):
        made.asked.append(salt)
        return Match("s", made.held, 0, 0, 0.0)

    made.held = 0
    made._prefixes.match = match
    made._prefixes.pages_held = lambda names: made.asked.append(names[:1]) or made.held // BLOCK
    return made


def request(name="r", ids=IDS, **transfer):
    return SimpleNamespace(
        request_id=name, all_token_ids=ids, prompt_token_ids=ids, prompt_is_token_ids=None, lora_request=None,
        cache_salt=None, mm_features=[], kv_transfer_params=transfer or None,
        block_hashes=[bytes([place]) * 32 for place in range(len(ids) // BLOCK)],
    )  # fmt: skip


def step(made, computed=0, scheduled=0, name="r", blocks=(list(range(1, 100)),)):
    """The saves of a step in which this request goes on."""
    blocks = SimpleNamespace(get_block_ids=lambda name, blocks=blocks: blocks)
    output = SimpleNamespace(
        finished_req_ids=set(), total_num_scheduled_tokens=scheduled, num_scheduled_tokens={name: scheduled},
        scheduled_new_reqs=[SimpleNamespace(req_id=name, num_computed_tokens=computed)],
        scheduled_cached_reqs=SimpleNamespace(req_ids=[], num_computed_tokens=[]), kv_connector_block_state=blocks,
    )  # fmt: skip
    return made.step(output).saves


def output(received=(), failed=(), done=None):
    return SimpleNamespace(
        finished_recving=set(received), failed_recving=set(failed),
        kv_connector_worker_meta=None if done is None else Progress(done),
    )  # fmt: skip


def test_ranks_of_other_sizes_have_other_names():
    sizes = [(1, 1), (2, 1), (1, 2), (2, 2), (4, 1), (1, 4)]
    names = [
        model_name(Options(model_name="m"), config(tensor, pipeline), rank)
        for tensor, pipeline in sizes
        for rank in range(tensor * pipeline)
    ]
    assert len(set(names)) == len(names)
    assert names[0] == "m"
    assert model_name(Options(model_name="m"), config(4, 2), 6) == "m:tp2of4:pp1of2"


def test_what_is_announced_is_waited_for_as_far_as_it_can_be_loaded():
    made = scheduler()
    made.held = 512
    told = {"do_remote_prefill": True, "qkvd_tokens": 640}  # the producer's answer included
    assert made.matched(request("whole", **told), 0) == (448, True)  # a token is left to compute
    made.held = 256
    assert made.matched(request("part", **told), 0) == (None, False)
    assert made.matched(request("own", **told), 448) == (0, False)  # the engine itself has the rest


@pytest.mark.parametrize("kind", [Scheduler, BlockScheduler])
def test_saves_are_handed_out_as_far_as_the_buffer_goes(kind):
    made = scheduler(kind, tensor=2, save_buffer=200 * TOKEN_BYTES)
    made.matched(request(), 0)
    (save,) = step(made, 0, 512)
    assert save.tokens == 192 // BLOCK * BLOCK
    assert step(made, 512, 0) == []  # on their way
    made.take_output(output(done={0: 192, 1: 64}))
    (save,) = step(made, 512, 0)
    assert save.tokens == 64  # as far as the slower rank has come
    made.take_output(output(done={0: 256}))
    assert step(made, 512, 0) == []
    made.take_output(output(done={0: 256, 1: 256}))
    (save,) = step(made, 512, 0)
    assert save.tokens == 192
    assert scheduler(kind, save_buffer=0).matched(request(), 0) == (0, False)
    assert Progress({0: 3, 1: 5}).aggregate(Progress({1: 6})) == Progress({0: 3, 1: 6})


@pytest.mark.parametrize("kind", [Scheduler, BlockScheduler])
def test_a_reset_leaves_what_was_held_alone(kind):
    made = scheduler(kind)
    made.held = 256
    assert made.matched(request(), 0) == (256, True)
    made.load(request(), ([1, 2, 3, 4],), 256)
    assert made.reset() is False  # rows of before are on their way
    made.take_output(output(received=["r"]))
    assert made.reset() is True
    assert step(made, 256, 256) == []
    assert made.matched(request(), 0) == (0, False)
    assert made.matched(request("new"), 0) == (256, True)
    made.reset()
    made.matched(request("newer"), 0)
    assert len(made.asked) == 3 and all(made.asked.count(one) == 1 for one in made.asked)


class Daemon:
    """Of `Prefixes`, what a save needs."""

    def __init__(self):
        self.breaker = Breaker()
        self.appended = []

    def open(self, name, ids, salt):
        return 0

    def append(self, name, position, ids, layers):
        self.appended.append((position, list(ids), layers))

    def close(self):
        pass


class Half(Worker):
    """Of one layer, or out of memory."""

    def __init__(self, daemon, layer=None):
        super().__init__(daemon, 1)
        self.layer = layer

    def _read(self, load):
        raise AssertionError

    def _copy(self, save):
        if self.layer is None:
            raise MemoryError("no memory is left")
        return Copied(save, "", [self.layer], [self.layer.copy(save.blocks[0])], [save.begin % BLOCK], False)


def saved(worker, *saves):
    worker.start_saves(QkvdMetadata(saves=list(saves)))
    worker._saver.close(30)
    return worker.progress()


@pytest.mark.parametrize("block, split", [(64, 1), (16, 4), (128, 1)])
def test_rows_are_sent_some_pages_at_a_time(monkeypatch, block, split):
    monkeypatch.setattr(vllm_worker, "SEND_BYTES", 160 * HEADS * 2 * DIM * 4)
    cache = torch.rand(64 // block * 12 if block <= 64 else 6, HEADS, block, 2 * DIM)
    layer, daemon = PagedLayer(cache, DIM, split), Daemon()
    tokens = layer.block_tokens
    blocks = [3, 1, 5, 2, 4][: 320 // tokens if tokens == 64 else 3]
    save = Save("r", "s", 0, 320, np.array(IDS[:320], np.uint32), True, b"", (blocks,))
    assert saved(Half(daemon, layer), save) == Progress({1: 320})
    assert [(position, len(ids)) for position, ids, _ in daemon.appended] == [(0, 128), (128, 128), (256, 64)]
    assert [one for _, ids, _ in daemon.appended for one in ids] == IDS[:320]
    places = [block * split + part for block in blocks for part in range(split)]
    whole = cache[places].permute(0, 2, 1, 3).reshape(-1, HEADS, 2 * DIM)[:320]
    for place, part in enumerate((slice(DIM), slice(DIM, None))):
        came = np.concatenate([layers[0][place] for _, _, layers in daemon.appended])
        np.testing.assert_array_equal(came, whole[..., part].numpy())


def test_saves_that_fail_are_done_with():
    """No step fails, and their place in the buffer is free again."""
    save = Save("r", "s", 0, 64, np.array(IDS[:64], np.uint32), True, b"", ([1],))
    worker = Half(Daemon())
    assert saved(worker, save, save) == Progress({1: 128})
    assert worker.progress() is None
    assert worker.take_stats().data["saves_dropped"] == 1
    worker = Half(Daemon())
    worker._prefixes.breaker.tell(Unavailable("gone"))
    assert saved(worker, save) == Progress({1: 64})


def test_saves_in_the_queue_are_given_up_where_a_daemon_does_not_answer():
    """Else each of them waits for its deadline."""
    asked = []

    def no_answer(name, ids, salt):
        asked.append(name)
        daemon.breaker.tell(Unavailable("gone"))
        raise Unavailable("gone")

    daemon = Daemon()
    daemon.open = no_answer
    worker = Half(daemon, PagedLayer(torch.rand(6, HEADS, BLOCK, 2 * DIM), DIM, 1))
    saves = [Save(f"r{i}", f"s{i}", 0, 64, np.array(IDS[:64], np.uint32), True, b"", ([1],)) for i in range(3)]
    release = threading.Event()
    worker._saver._queue.put(SimpleNamespace(request="first", tokens=0, bytes=0, send=lambda _: release.wait(30) and 0))
    worker.start_saves(QkvdMetadata(saves=saves))
    release.set()
    worker._saver.close(30)
    assert worker.progress() == Progress({1: 192})
    assert len(asked) == 1 and worker.take_stats().data["saves_dropped"] == 3


def several_groups():
    """Full attention in blocks of 32, a window of 100 tokens in blocks of 64, states at ends of 64 tokens."""
    shape = {"num_kv_heads": HEADS, "head_size": DIM, "dtype": torch.float32}
    specs = [
        FullAttentionSpec(block_size=32, **shape),
        SlidingWindowSpec(block_size=64, sliding_window=100, **shape),
        MambaSpec(block_size=64, shapes=((4, 4),), dtypes=(torch.float32,), mamba_cache_mode="align"),
    ]
    groups = [SimpleNamespace(layer_names=[f"layer.{place}"], kv_cache_spec=spec) for place, spec in enumerate(specs)]
    return SimpleNamespace(kv_cache_groups=groups)


def grouped(count=320):
    """A request whose block hashes, of 32 tokens, are their numbers."""
    made = request(ids=IDS[:count])
    made.block_hashes = [bytes([place]) * 32 for place in range(count // 32)]
    return made


def named(place, group):
    """The block that ends with hash `place`."""
    return f"{place:02x}" * 16 + f"/{group}"


@pytest.mark.parametrize(
    "attention, window, states, held",
    [
        (10, [0, 1, 2, 3], [0, 1, 2, 3], 256),  # a token is left to compute
        (10, [2, 3], [3], 256),  # what a window of 100 reaches behind 256 tokens
        (10, [3], [0, 1, 2, 3], 0),  # but behind no others
        (10, [0, 1, 2, 3], [1], 128),
        (7, [0, 1, 2, 3], [0, 1, 2, 3], 192),
        (10, [0, 1, 2, 3], [], 0),
        (1, [0, 1, 2, 3], [0, 1, 2, 3], 0),
    ],
)
def test_a_prefix_is_held_where_every_group_can_go_on(attention, window, states, held):
    made = scheduler(BlockScheduler, layers=several_groups())
    holds = {named(place, 0) for place in range(attention)}
    holds |= {named(2 * place + 1, 1) for place in window} | {named(2 * place + 1, 2) for place in states}
    (tag,) = made._tags

    def which(names):
        return [name.removeprefix(tag) in holds for name in names]

    made._prefixes.which_held = which
    made._prefixes.pages_held = lambda names: [*which(names), False].index(False)
    assert made.matched(grouped(), 0) == ((held, True) if held else (0, False))
    if held != 256:
        return
    # Of blocks that the engine has not allocated, since nothing reaches them, nothing is loaded.
    made.load(grouped(), (list(range(10, 20)), [0, 0, 5, 6, 7], [0, 0, 0, 9, 0]), held)
    (load,) = made.step(SimpleNamespace(
        finished_req_ids=set(), total_num_scheduled_tokens=0, scheduled_new_reqs=[],
        scheduled_cached_reqs=SimpleNamespace(req_ids=[], num_computed_tokens=[]),
    )).loads  # fmt: skip
    assert [(group.names, group.blocks) for group in load.groups] == [
        ([named(place, 0) for place in range(8)], list(range(10, 18))),
        ([named(5, 1), named(7, 1)], [5, 6]),
        ([named(7, 2)], [9]),
    ]


def test_states_are_saved_where_a_step_ends_with_them():
    made = scheduler(BlockScheduler, layers=several_groups())
    made._prefixes.which_held = lambda names: [False] * len(names)
    made.matched(grouped(), 0)
    blocks = (list(range(10, 20)), [0, 2, 3, 4, 5], [0, 7, 8, 9, 6])
    (save,) = step(made, 0, 128, blocks=blocks)
    assert save.tokens == 128
    assert [(group.names, group.blocks) for group in save.groups] == [
        ([named(place, 0) for place in range(4)], [10, 11, 12, 13]),
        ([named(3, 1)], [2]),
        ([named(3, 2)], [7]),
    ]
    (save,) = step(made, 128, 80, blocks=blocks)  # the state is that of 208 tokens
    assert [len(group.names) for group in save.groups] == [2, 1, 0]
    (save,) = step(made, 208, 113, blocks=blocks)  # with a token that is not known yet
    assert [len(group.names) for group in save.groups] == [4, 2, 0]


@pytest.mark.parametrize("drafts", [0, 1])
def test_states_are_saved_a_step_later_where_tokens_are_still_on_their_way(drafts):
    """As with async scheduling: the last token of a block is known when the step behind it is scheduled."""
    layers = several_groups()
    layers.kv_cache_groups[2].kv_cache_spec = dataclasses.replace(
        layers.kv_cache_groups[2].kv_cache_spec, num_speculative_blocks=drafts
    )
    made = scheduler(BlockScheduler, layers=layers)
    made._prefixes.which_held = lambda names: [False] * len(names)
    going_on = grouped(128)
    made.matched(going_on, 0)
    blocks = (list(range(10, 20)), [0, 2, 3, 4, 5], [0, 7, 8, 9, 6])
    assert len(step(made, 0, 128, blocks=blocks)) == 1
    for known in range(128, 192):
        going_on.all_token_ids = IDS[:known]
        going_on.block_hashes = [bytes([place]) * 32 for place in range(known // 32)]
        assert step(made, known, 1, blocks=blocks) == []  # the token that it computes is the one before's
    going_on.all_token_ids = IDS[:192]
    going_on.block_hashes = [bytes([place]) * 32 for place in range(6)]
    (save,) = step(made, 192, 1, blocks=blocks)
    assert save.tokens == 64
    states = ([named(5, 2)], [8]) if not drafts else ([], [])
    assert [(group.names, group.blocks) for group in save.groups][2] == states


def test_layers_of_several_shapes_are_kept_as_they_are():
    assert takes_rows(caches()) and takes_rows(SimpleNamespace(kv_cache_groups=[]))
    assert not takes_rows(several_groups())
    other = FullAttentionSpec(block_size=BLOCK, num_kv_heads=HEADS, head_size=2 * DIM, dtype=torch.float32)
    both = caches()
    both.kv_cache_groups.append(SimpleNamespace(layer_names=["layer.9"], kv_cache_spec=other))
    assert not takes_rows(both)


def test_both_halves_know_what_is_kept():
    """vLLM tells the scheduler of a group's first layer alone: others that are not like it are refused at the start."""
    like = {"block_size": BLOCK, "num_kv_heads": HEADS, "head_size": DIM, "dtype": torch.float32}
    for first, second, rows in (
        ({}, {"num_kv_heads": 1}, True),
        ({}, {"dtype": torch.uint8}, True),
        ({"dtype": torch.uint8}, {}, False),
    ):
        layers = {"layer.0": FullAttentionSpec(**like | first), "layer.1": FullAttentionSpec(**like | second)}
        group = KVCacheGroupSpec(list(layers), UniformTypeKVCacheSpecs(block_size=BLOCK, kv_cache_specs=layers))
        whole = KVCacheConfig(num_blocks=4, kv_cache_tensors=[], kv_cache_groups=[group])
        assert takes_rows(whole) == takes_rows(generate_scheduler_kv_cache_config([whole])) == rows
        if rows:
            paged = [
                PagedLayer(torch.zeros(4, spec.num_kv_heads, BLOCK, 2 * DIM, dtype=spec.dtype), DIM)
                for spec in layers.values()
            ]
            with pytest.raises(Unimplemented, match='"opaque": true keeps blocks as they are'):
                block_tokens_of(whole)
                geometry(Options(), config(), paged, 0)


def test_blocks_of_transposed_states_come_back():
    kept = torch.rand(6, 8, 3)
    cache = kept.clone().transpose(1, 2)  # as some engines keep states of convolutions
    made = Bytes("layer", cache, 6)
    copied = made.copy([4, 1])
    cache[:] = 0
    made.put([4, 1], copied)
    np.testing.assert_array_equal(cache[[4, 1]].transpose(1, 2), kept[[4, 1]])
    assert not cache[[0, 2, 3, 5]].any()


@pytest.mark.parametrize("without", [1, 2])
def test_a_pipeline_rank_without_layers_of_a_group(daemon, monkeypatch, without):
    """The second of two ranks has none of full attention, or no states: prefixes come back on both."""
    options = Options(model_name=f"without-{without}", target=daemon.target, timeout=PATIENCE, lookup_timeout=PATIENCE)
    whole = config(pipeline=2)
    names = [f"layer.{place}" for place in range(6)]
    whole.compilation_config = SimpleNamespace(static_forward_context=dict.fromkeys(names, SimpleNamespace()))
    caches = {name: torch.rand(9, 3, 4) for name in names}
    kept = {name: cache.clone() for name, cache in caches.items()}

    def of_rank(rank):
        made = several_groups()
        made.num_blocks = 9
        for place, group in enumerate(made.kv_cache_groups):
            group.layer_names = [] if rank and place == without - 1 else [names[2 * place + rank]]
        return made

    assert not takes_rows(of_rank(1))
    workers = []
    for rank in range(2):
        monkeypatch.setattr("qkvd.vllm_blocks.rank_of", lambda rank=rank: rank)
        held = of_rank(rank)
        its = {name: caches[name] for group in held.kv_cache_groups for name in group.layer_names}
        workers.append(BlockWorker(options, whole, held, its))
    made = BlockScheduler(options, whole, of_rank(0))
    assert made.matched(grouped(), 0) == (0, False)
    (save,) = step(made, 0, 256, blocks=([*range(1, 9)], [1, 2, 3, 4], [1, 2, 3, 4]))
    assert [len(group.names) for group in save.groups] == [8, 4, 1]
    for worker in workers:
        assert saved(worker, save).done == {workers.index(worker): save.tokens}
        assert "saves_dropped" not in worker.take_stats().data
    assert made.matched(grouped(), 0) == (256, True)
    for cache in caches.values():
        cache.zero_()
    load = BlockLoad("r", 0, 256, save.groups)
    for worker in workers:
        worker._load(load)
        assert worker.ended_loads(idle=False) == ({"r"}, set())
        worker.close()
    made.close()
    ranks = [of_rank(rank).kv_cache_groups for rank in range(2)]
    for groups in ranks:
        for group, part in zip(groups, save.groups, strict=True):
            for name in group.layer_names:
                assert torch.equal(caches[name][part.blocks], kept[name][part.blocks])
