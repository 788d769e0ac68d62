"""The two halves of the connector for vLLM without an engine: what one is told, and what it does."""

from types import SimpleNamespace

import numpy as np
import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("vllm")

from vllm.v1.kv_cache_interface import FullAttentionSpec  # noqa: E402

from qkvd import vllm_worker  # noqa: E402
from qkvd.calls import Match  # noqa: E402
from qkvd.errors import Unavailable  # noqa: E402
from qkvd.paged import PagedLayer  # noqa: E402
from qkvd.prefixes import Breaker, Options  # noqa: E402
from qkvd.vllm_blocks import BlockScheduler  # noqa: E402
from qkvd.vllm_scheduler import Progress, QkvdMetadata, Save, Scheduler, model_name  # noqa: E402
from qkvd.vllm_worker import Copied, Worker  # noqa: E402

BLOCK, HEADS, DIM, LAYERS = 64, 2, 16, 2
TOKEN_BYTES = LAYERS * HEADS * 2 * DIM * 4
IDS = list(range(1000, 1512))


def config(tensor=1, pipeline=1):
    return SimpleNamespace(
        kv_transfer_config=SimpleNamespace(is_kv_consumer=True, is_kv_producer=True),
        parallel_config=SimpleNamespace(tensor_parallel_size=tensor, pipeline_parallel_size=pipeline),
        cache_config=SimpleNamespace(cache_dtype="auto", prefix_caching_hash_algo="sha256"),
        kv_events_config=None,
    )


def caches():
    spec = FullAttentionSpec(block_size=BLOCK, num_kv_heads=HEADS, head_size=DIM, dtype=torch.float32)
    names = [f"layer.{index}" for index in range(LAYERS)]
    return SimpleNamespace(kv_cache_groups=[SimpleNamespace(layer_names=names, kv_cache_spec=spec)])


def scheduler(kind=Scheduler, tensor=1, **options):
    """And the salts that it asks with; `made.held` says what the daemon holds of each."""
    made = kind(Options(model_name="m", target="unix:/nobody", **options), config(tensor), caches())
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


def step(made, computed=0, scheduled=0, name="r"):
    """The saves of a step in which this request goes on."""
    blocks = SimpleNamespace(get_block_ids=lambda name: (list(range(1, 100)),))
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
