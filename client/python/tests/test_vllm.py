"""vLLM's engine with its prefixes in a real daemon: the same text as by itself."""

import json
import math
import os

import numpy as np
import pytest
from daemon import Daemon, wait_for
from proxy import Proxy
from secured import Secured

pytest.importorskip("vllm")

from smollm2 import smollm2
from vllm_process import Engine

import qkvd
from qkvd.prefixes import Options

TINYLM = os.environ.get("QKV_TINYLM") or os.path.realpath(
    os.path.join(os.path.dirname(__file__), "..", "..", "..", "tests", "data", "tinylm")
)
COUNT = 160
LOGS = os.environ.get("QKV_ENGINE_LOGS")  # a folder, where engines are to log


def log(name):
    return LOGS and os.path.join(LOGS, name + ".log")


def ids(name):
    with open(os.path.join(TINYLM, name), "rb") as file:
        return list(file.read())


PROMPT = ids("prompt.txt")
EXPECTED = ids("greedy_continuation_160.txt")
# Whole blocks of the prompt that leave a token to compute.
LOADED = (len(PROMPT) - 1) // 64 * 64


@pytest.fixture(scope="module")
def daemon(tmp_path_factory):
    with Daemon("--data-dir", str(tmp_path_factory.mktemp("data")), "--durability", "sync") as running:
        yield running


@pytest.fixture(scope="module")
def proxy(daemon):
    with Proxy(daemon.target) as proxy:
        yield proxy


@pytest.fixture(scope="module")
def first(daemon):
    """An engine that computes prompts and saves them; it has few blocks, so that requests are preempted."""
    settings = {"target": daemon.target, "bits": "exact"}
    with Engine(
        TINYLM, settings, role="kv_producer", log=log("first"), max_model_len=1024, num_gpu_blocks_override=30
    ) as engine:
        yield engine


@pytest.fixture(scope="module")
def endpoint(tmp_path_factory):
    """Where the second engine publishes its KV events."""
    return f"ipc://{tmp_path_factory.mktemp('events')}/socket"


@pytest.fixture(scope="module")
def second(proxy, first, endpoint):
    """Another process. It speaks to the daemon by way of the proxy."""
    settings = {"target": proxy.target, "bits": "exact", "timeout": 30.0, "lookup_timeout": 5.0}
    events = {"enable_kv_cache_events": True, "publisher": "zmq", "endpoint": endpoint}
    with Engine(TINYLM, settings, log=log("second"), max_model_len=1024, kv_events_config=events) as engine:
        yield engine


@pytest.fixture
def client(daemon):
    with qkvd.Client(daemon.target) as client:
        yield client


def held(client, tokens):
    """Waits until some session has so many tokens in all layers."""

    def ready():
        return any(min(client.session_info(info.session).lengths) >= tokens for info in client.sessions("vllm/"))

    wait_for(ready, f"no session gets {tokens} tokens")


def test_what_one_engine_computes_another_one_loads(client, first, second):
    made = first.generate(PROMPT, COUNT, transfer={"do_remote_decode": True})
    assert made["tokens"] == EXPECTED
    assert made["cached"] == 0
    # What a producer tells a consumer: how many tokens are saved, or will be soon.
    assert made["transfer"]["qkvd_tokens"] == (len(PROMPT) + COUNT - 1) // 64 * 64
    loaded = second.generate(PROMPT, COUNT, transfer=made["transfer"])
    assert loaded["tokens"] == EXPECTED
    assert loaded["cached"] == LOADED


def test_sessions_hold_the_models_rows(client, first):
    torch, transformers = pytest.importorskip("torch"), pytest.importorskip("transformers")
    first.generate(PROMPT, 2)
    held(client, len(PROMPT) // 64 * 64)
    (model,) = client.models()
    found = client.match(model.model.name, PROMPT, salt=Options(bits="exact").salt(None, None, None))
    assert found.tokens == len(PROMPT) // 64 * 64
    session = client.session(found.session)
    model = transformers.LlamaForCausalLM.from_pretrained(TINYLM, dtype=torch.float32)
    with torch.no_grad():
        cache = model(torch.tensor([PROMPT]), use_cache=True).past_key_values
    for index, layer in enumerate(cache.layers):
        k, v = session.fetch(index, end=len(PROMPT), heads_first=True)
        np.testing.assert_allclose(k, layer.keys[0].numpy(), atol=2e-3)
        np.testing.assert_allclose(v, layer.values[0].numpy(), atol=2e-3)


def test_an_engines_router_learns_what_qkvd_holds(first, second, endpoint):
    """What the first engine saves comes out of the second one as an event, by a socket of vLLM's."""
    msgspec, zmq = pytest.importorskip("msgspec"), pytest.importorskip("zmq")
    from vllm.distributed.kv_events import KVEventBatch

    decoder = msgspec.msgpack.Decoder(type=KVEventBatch)
    prompt = PROMPT[100:300]
    held = set()
    with zmq.Context() as context, context.socket(zmq.SUB) as socket:
        socket.subscribe(b"")
        socket.connect(endpoint)
        first.generate(prompt, 2)

        def told():
            second.generate(prompt[:20], 1)  # events are published with steps
            while socket.poll(100):
                for event in decoder.decode(socket.recv_multipart()[-1]).events:
                    if getattr(event, "ownership", None) == "qkvd" and event.medium == "CPU":
                        held.add(tuple(event.token_ids))
            return tuple(prompt[:192]) in held or {tuple(prompt[at : at + 64]) for at in (0, 64, 128)} <= held

        wait_for(told, "the events do not come")


def test_users_with_salts_of_their_own_share_nothing(second):
    assert second.ask(reset=True)
    assert second.generate(PROMPT, 8, salt="alice")["cached"] == 0

    def hits():  # once it is saved
        assert second.ask(reset=True)
        return second.generate(PROMPT, 8, salt="alice")["cached"] == LOADED

    wait_for(hits, "alice's own rows are not found")
    assert second.ask(reset=True)
    assert second.generate(PROMPT, 8, salt="bob")["cached"] == 0


def test_preempted_requests_have_the_same_text(first):
    prompts = [PROMPT[at : at + 300] + PROMPT[:at] for at in range(0, 180, 30)]
    alone = [first.generate(prompt, 100)["tokens"] for prompt in prompts]
    first.ask(reset=True)
    together = first.ask(prompts=prompts, count=100)
    assert [output["tokens"] for output in together["outputs"]] == alone
    assert together["metrics"]["vllm:num_preemptions"] > 0


def test_requests_load_side_by_side(second):
    assert second.ask(reset=True)
    prompts = [PROMPT[:at] for at in (130, 200, 330, 450, len(PROMPT))]
    answer = second.ask(prompts=prompts, count=8)
    assert [output["cached"] for output in answer["outputs"]] == [(len(prompt) - 1) // 64 * 64 for prompt in prompts]
    assert answer["outputs"][-1]["tokens"] == EXPECTED[:8]


def test_a_daemon_killed_in_the_middle_of_a_load(daemon, proxy, client, second):
    assert second.ask(reset=True)
    failed = second.ask(prompts=[[1]], count=1)["metrics"].get("vllm:qkvd_loads_failed", 0)
    proxy.after(1_000_000, daemon.kill)
    made = second.generate(PROMPT, COUNT)
    wait_for(lambda: daemon.process.poll() is not None, "the load has ended before it was broken off")
    assert made["tokens"] == EXPECTED
    assert made["cached"] == 0
    assert second.ask(prompts=[[1]], count=1)["metrics"]["vllm:qkvd_loads_failed"] == failed + 1
    # Without a daemon.
    assert second.ask(reset=True)
    assert second.generate(PROMPT, COUNT)["tokens"] == EXPECTED
    daemon.start()

    def hits():
        assert second.ask(reset=True)
        made = second.generate(PROMPT, COUNT)
        assert made["tokens"] == EXPECTED
        return made["cached"] == LOADED

    wait_for(hits, "the daemon is not used again")


def test_after_a_reset_of_the_connector_nothing_older_is_loaded(second):
    """As after a change of weights; what is saved from then on is found."""
    assert second.ask(reset=True, connector=True)
    assert second.generate(PROMPT, COUNT)["cached"] == 0

    def hits():
        assert second.ask(reset=True)
        made = second.generate(PROMPT, COUNT)
        assert made["tokens"] == EXPECTED
        return made["cached"] == LOADED

    wait_for(hits, "what was saved after the reset is not found")


def test_mutual_tls(tmp_path):
    """Scheduler and worker by a certificate of their own."""
    with (
        Secured(tmp_path) as daemon,
        Engine(
            TINYLM, daemon.settings | {"bits": "exact", "lookup_timeout": 5.0}, log=log("tls"), max_model_len=1024
        ) as engine,
    ):
        assert engine.generate(PROMPT, COUNT)["tokens"] == EXPECTED
        with qkvd.Client(daemon.tcp, tls=daemon.tls) as client:
            held(client, len(PROMPT) // 64 * 64)
        assert engine.ask(reset=True)
        made = engine.generate(PROMPT, COUNT)
        assert (made["tokens"], made["cached"]) == (EXPECTED, LOADED)


@pytest.mark.parametrize("bits", [8, 4])
def test_coded_rows(daemon, bits):
    """The engine's own text at 8 bits; what 4 bits change is reported."""
    settings = {"target": daemon.target, "bits": bits}
    with Engine(TINYLM, settings, log=log(f"bits-{bits}"), max_model_len=1024) as engine:
        own = engine.generate(PROMPT, COUNT, logprobs=True)
        assert own["tokens"] == EXPECTED
        with qkvd.Client(daemon.target) as client:
            held(client, len(PROMPT) // 64 * 64)
        engine.ask(reset=True)
        loaded = engine.generate(PROMPT, COUNT, logprobs=True)
    assert loaded["cached"] == LOADED
    same = next((i for i, (a, b) in enumerate(zip(own["tokens"], loaded["tokens"], strict=True)) if a != b), COUNT)
    steps = min(same + 1, COUNT)
    print(f"\ntinylm, {bits} bits: {same} of {COUNT} tokens the same, KL {kl_bits(own, loaded, steps):.2g} bits")
    if bits == 8:
        assert same == COUNT


def kl_bits(own, other, steps):
    """Mean KL divergence over tokens whose context is the same."""
    p, q = (np.array(one["logprobs"][:steps]) for one in (own, other))
    return float((np.exp(p) * (p - q)).sum(-1).mean()) / math.log(2)


def test_first_token_of_a_long_prompt(tmp_path):
    """A prompt of 1500 tokens of SmolLM2, whose rows another process has saved: time to the first token."""
    if "QKV_SMOLLM2" not in os.environ:
        pytest.skip("QKV_SMOLLM2 does not say where SmolLM2 is")
    folder, prompt = smollm2(tmp_path, TINYLM)
    short = prompt[:200][::-1]
    times, tokens = {}, {}
    with Daemon() as daemon:
        here = {"target": daemon.target}
        for what, settings in (("recomputed", None), ("saved", here), ("loaded", here)):
            with Engine(folder, settings, log=log(what)) as engine:
                engine.generate(short, 2)  # of what the first request has to set up
                made = engine.generate(prompt, 1)
                times[what], tokens[what] = made["seconds"], made["tokens"]
                assert made["cached"] == (0 if what != "loaded" else (len(prompt) - 1) // 64 * 64)
                if what == "saved":
                    with qkvd.Client(daemon.target) as client:
                        held(client, len(prompt) // 64 * 64)
    ratio = times["loaded"] / times["recomputed"]
    print(f"\nSmolLM2, {len(prompt)} tokens, to the first: " + ", ".join(f"{k} {v:.2f} s" for k, v in times.items()))
    print(f"loaded / recomputed: {ratio:.3f}")
    assert ratio <= 0.5


def tiny_mla(folder):
    """A model with multi-head latent attention, whose weights vLLM makes up: the same in every process."""
    with open(folder / "config.json", "w") as out:
        json.dump({
            "architectures": ["DeepseekV2ForCausalLM"], "model_type": "deepseek_v2", "hidden_size": 64, "vocab_size": 256,
            "num_hidden_layers": 2, "first_k_dense_replace": 2, "intermediate_size": 64, "moe_intermediate_size": 32,
            "n_routed_experts": 2, "n_shared_experts": 1, "num_experts_per_tok": 1, "num_attention_heads": 2,
            "num_key_value_heads": 2, "kv_lora_rank": 512, "q_lora_rank": None, "qk_nope_head_dim": 32,
            "qk_rope_head_dim": 64, "v_head_dim": 32, "max_position_embeddings": 2048, "rms_norm_eps": 1e-6,
            "rope_theta": 10000.0, "torch_dtype": "float32", "topk_method": "greedy",
        }, out)  # fmt: skip
    return str(folder)


@pytest.mark.parametrize("kind", ["opaque", "fp8", "mla"])
def test_blocks_as_they_are(daemon, tmp_path, kind):
    """Caches that are no keys and values of floats: another process loads them, and goes on with the same text."""
    model, more = TINYLM, {}
    if kind == "fp8":
        more = {"kv_cache_dtype": "fp8", "dtype": "bfloat16"}
    elif kind == "mla":
        model, more = tiny_mla(tmp_path), {"load_format": "dummy", "dtype": "bfloat16"}
    settings = {"target": daemon.target, "model_name": kind, **({"opaque": True} if kind == "opaque" else {})}
    block = 64
    if kind == "mla" and not pytest.importorskip("torch").cpu._is_amx_tile_supported():
        block = 16  # whatever is asked for: vLLM's kernel for processors without AMX has no other one
    loaded = (len(PROMPT) - 1) // block * block
    with qkvd.Client(daemon.target) as client, Engine(model, settings, log=log(kind), max_model_len=1024, **more) as engine:
        before = len(list(client.objects()))
        own = engine.generate(PROMPT, COUNT)
        assert own["cached"] == 0
        full = (len(PROMPT) + COUNT - 1) // block
        wait_for(lambda: len(list(client.objects())) == before + full, "blocks are not saved")
        if kind == "opaque":
            assert own["tokens"] == EXPECTED
    with Engine(model, settings, log=log(kind + "-2"), max_model_len=1024, **more) as engine:
        made = engine.generate(PROMPT, COUNT)
        assert made["tokens"] == own["tokens"]
        assert made["cached"] == loaded
        assert engine.ask(reset=True)
        assert engine.generate(PROMPT, 8, salt="alice")["cached"] == 0
        # A block that is damaged or of another layout is not used.
        with qkvd.Client(daemon.target) as client:
            for info in client.objects():
                data = bytearray(client.get_object(info.object))
                data[0] ^= 1
                client.put_object(info.object, data, replace=True)
        assert engine.ask(reset=True)
        made = engine.generate(PROMPT, COUNT)
        assert (made["tokens"], made["cached"]) == (own["tokens"], 0)
        assert engine.ask(prompts=[[1]], count=1)["metrics"]["vllm:qkvd_loads_failed"] == 1
    with qkvd.Client(daemon.target) as client:
        client.delete_objects([info.object for info in client.objects()])


def random_model(kind, folder):
    """A model of random weights whose layers differ in what they keep, and the engine's settings for it."""
    torch, transformers = pytest.importorskip("torch"), pytest.importorskip("transformers")
    base = {
        "hidden_size": 64, "vocab_size": 256, "num_attention_heads": 2, "num_hidden_layers": 4, "intermediate_size": 128,
        "initializer_range": 0.3, "max_position_embeddings": 2048, "tie_word_embeddings": False,
    }  # fmt: skip
    more = {}
    if kind == "windows":
        config = transformers.Gemma3TextConfig(
            **base, num_key_value_heads=1, head_dim=32, sliding_window=128,
            layer_types=["sliding_attention"] * 3 + ["full_attention"],
        )  # fmt: skip
    elif kind == "convolutions":
        config = transformers.Lfm2Config(
            **base, num_key_value_heads=1, layer_types=["conv", "full_attention"] * 2, block_multiple_of=16, conv_dim=64,
            block_dim=64, block_ff_dim=128,
        )  # fmt: skip
    else:
        more = {"dtype": "bfloat16"}  # the processor's kernels have no other
        config = transformers.Qwen3NextConfig(
            **base, num_key_value_heads=2, head_dim=256, moe_intermediate_size=32, shared_expert_intermediate_size=32,
            num_experts=4, num_experts_per_tok=2, linear_num_key_heads=1, linear_num_value_heads=1,
            linear_key_head_dim=128, linear_value_head_dim=128, layer_types=["linear_attention", "full_attention"] * 2,
        )  # fmt: skip
    torch.manual_seed(7)
    transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32).save_pretrained(folder)
    return str(folder), more


@pytest.mark.parametrize("kind", ["windows", "convolutions", "linear"])
def test_layers_that_keep_different_things(daemon, tmp_path, kind):
    """Windows and full attention are rows; states of convolutions and of linear attention are opaque objects, as are blocks
    of attention. Another process loads them, and goes on with the same text; with other states it does not."""
    model, more = random_model(kind, tmp_path)
    settings = {"target": daemon.target, "model_name": kind, "bits": "exact", "lookup_timeout": 5.0}
    more |= {"max_model_len": 1024, "enable_prefix_caching": True}
    with qkvd.Client(daemon.target) as client:
        with Engine(model, settings, log=log(kind), **more) as engine:
            own = engine.generate(PROMPT, 40)
            assert own["cached"] == 0
        assert bool(list(client.objects())) == (kind != "windows")
        with Engine(model, settings, log=log(kind + "-2"), **more) as engine:
            made = engine.generate(PROMPT, 40)
            assert (made["tokens"], made["cached"]) == (own["tokens"], LOADED)
            if kind == "windows":
                return
            # What is held of the states of one boundary alone says how far a prefix reaches.
            states = [info.object for info in client.objects() if info.object.endswith("/0")]
            for name in states:
                data = bytearray(client.get_object(name))
                data[16:] = bytes(len(data) - 16)
                client.put_object(name, data, replace=True)
            assert engine.ask(reset=True)
            made = engine.generate(PROMPT, 40)
            assert made["cached"] == LOADED
            if kind == "linear":  # a convolution's state is two tokens
                assert made["tokens"] != own["tokens"]
            client.delete_objects(states)
            assert engine.ask(reset=True)
            made = engine.generate(PROMPT, 40)
            assert (made["tokens"], made["cached"]) == (own["tokens"], 0)
        client.delete_objects([info.object for info in client.objects()])


def test_a_conversation_of_a_model_with_states(daemon, tmp_path):
    """What follows an answer begins with a state of the answer's: another process has the text of one that computes all.

    Ten tokens of it: the state is of steps of one token, which round otherwise, in bfloat16, than those of a prompt.
    """
    model, more = random_model("linear", tmp_path)
    settings = {"target": daemon.target, "model_name": "conversation", "lookup_timeout": 5.0}
    more |= {"max_model_len": 1024, "enable_prefix_caching": True}
    with Engine(model, settings, log=log("conversation"), **more) as engine:
        prompt = PROMPT + engine.generate(PROMPT, COUNT)["tokens"]
    with Engine(model, log=log("conversation-alone"), **more) as engine:
        own = engine.generate(prompt, 10)
    with qkvd.Client(daemon.target) as client:
        with Engine(model, settings, log=log("conversation-2"), **more) as engine:
            made = engine.generate(prompt, 10)
        assert (made["tokens"], made["cached"]) == (own["tokens"], (len(prompt) - 1) // 64 * 64)
        client.delete_objects([info.object for info in client.objects()])
