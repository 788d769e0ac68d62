"""transformers generates with its cache in a real daemon: the same text as with its own cache."""

import os
import threading

import numpy as np
import pytest
from daemon import Daemon
from proxy import Proxy
from readme import TARGET, python_example
from secured import Secured
from test_fork import in_child, new_grpc

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

import qkvd  # noqa: E402
from qkvd.transformers import QkvdCache, attention  # noqa: E402

TINYLM = os.environ.get("QKV_TINYLM") or os.path.join(
    os.path.dirname(__file__), "..", "..", "..", "tests", "data", "tinylm"
)
MODES = ["attend", "fetch"]
FAMILIES = ["llama", "mistral", "qwen2", "gemma2", "gpt_neox", "phi"]
MAMBA = {"mamba_d_state": 16, "mamba_d_conv": 4}
MAMBA2 = MAMBA | {"mamba_n_groups": 1, "mamba_d_head": 16, "mamba_chunk_size": 16}
# Models whose other layers hold states: of convolutions, linear attention, Mamba, and Mamba 2 in the layers of attention.
HYBRIDS = {
    "lfm2": {"layer_types": ["conv", "full_attention", "conv"], "block_multiple_of": 16, "tie_embedding": False},
    "qwen3_next": {
        "layer_types": ["linear_attention", "full_attention", "linear_attention"], "head_dim": 16,
        "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 16, "linear_value_head_dim": 16,
        "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "shared_expert_intermediate_size": 32,
    },
    "jamba": {
        "attn_layer_period": 2, "attn_layer_offset": 1, "mamba_dt_rank": 8, "use_mamba_kernels": False, "num_experts": 2,
        "num_experts_per_tok": 1,
    } | MAMBA,
    "falcon_h1": {"head_dim": 16, "mamba_d_ssm": 64, "mamba_n_heads": 4} | MAMBA2,
}  # fmt: skip
STATES = pytest.mark.skipif(qkvd.transformers._BEFORE_STATES, reason="transformers keeps states in caches of each model's")


@pytest.fixture(scope="module", autouse=True)
def one_thread():
    torch.set_num_threads(1)


@pytest.fixture(scope="module")
def daemon():
    with Daemon("--limit-models", "1000") as running:
        yield running


@pytest.fixture
def client(daemon):
    with qkvd.Client(daemon.target) as client:
        yield client
        assert not list(client.sessions()), "sessions are left open"


@pytest.fixture(scope="module")
def tinylm():
    model = transformers.LlamaForCausalLM.from_pretrained(TINYLM, torch_dtype=torch.float32)
    model.generation_config.pad_token_id = 0
    return model.eval()


def text(name):
    with open(os.path.join(TINYLM, name), "rb") as file:
        return file.read()


def tokens(data):
    return torch.tensor([list(data)])


def small(family, **fields):
    """A model of random weights; of sharp attention, so that its text depends on every row."""
    torch.manual_seed(3)
    common = {
        "vocab_size": 97, "hidden_size": 64, "num_hidden_layers": 3, "num_attention_heads": 4, "num_key_value_heads": 2,
        "intermediate_size": 96, "max_position_embeddings": 512, "bos_token_id": None, "eos_token_id": None,
        "pad_token_id": 0,
    }  # fmt: skip
    if family in ("gpt_neox",):
        common.pop("num_key_value_heads")
    if family == "gemma2":
        fields = {"head_dim": 16, "sliding_window": 24, "attn_logit_softcapping": 5.0, "query_pre_attn_scalar": 16} | fields
    if family == "mistral":
        fields = {"sliding_window": 24} | fields
    fields = HYBRIDS.get(family, {}) | fields
    config = transformers.AutoConfig.for_model(family, **common, **fields)
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if any(part in name for part in ("q_proj", "k_proj", "query_key_value", "conv.in_proj", "conv.out_proj")):
                weight.mul_(8)
    return model


def generate(model, inputs, cache=None, count=40, **options):
    """Greedy, and the logits of each step."""
    options = {
        "max_new_tokens": count,
        "do_sample": False,
        "return_dict_in_generate": True,
        "output_logits": True,
    } | options
    if not isinstance(inputs, dict):
        inputs = {"input_ids": inputs, "attention_mask": torch.ones_like(inputs)}
    made = model.generate(**inputs, past_key_values=cache, **options)
    return made.sequences, torch.stack(made.logits) if made.logits else None


def kl_bits(logits, reference):
    """Mean KL divergence of next tokens."""
    p, q = (torch.log_softmax(values.double(), -1) for values in (reference, logits))
    return float((p.exp() * (p - q)).sum(-1).mean() / np.log(2))


def given(model, sequence, before, cache):
    """The logits of what comes after each of `sequence`'s tokens behind the first `before`, which are given."""
    with torch.no_grad():
        model(sequence[:, :before], past_key_values=cache, use_cache=True, logits_to_keep=1)
        return model(sequence[:, before:], past_key_values=cache, use_cache=True).logits[0]


def compare(client, model, prompt, expected, mode, bits):
    """The engine's own text, at exact and at 8 bits; at 4 bits what is different is reported."""
    before, count = prompt.shape[1], expected.shape[1] - prompt.shape[1]
    with QkvdCache(client, model, mode=mode, bits=bits, policy=None if bits else qkvd.EXACT) as cache:
        got, _ = generate(model, prompt, cache, count=count)
        length = before + count - 1
        assert cache.get_seq_length() == length
        assert [session.lengths for session in cache.sessions] == [(length,) * model.config.num_hidden_layers]
        info = cache.sessions[0].info()
        assert (info.bytes_coded == 0) == (bits is None)
        held = (info.bytes_coded + info.bytes_exact) / info.bytes_fp16
        cache.reset()
        logits = given(model, expected, before, cache)
    same = int((torch.cat([got[0] != expected[0], torch.tensor([True])])).int().argmax()) - before
    divergence = kl_bits(logits, given(model, expected, before, transformers.DynamicCache()))
    print(
        f"{cache.model_name}, {mode}, bits {bits}: the same for {same} of {count} tokens, KL over the engine's text "
        f"{divergence:.6f} bits, {held:.2f} of the bytes in fp16",
        flush=True,
    )
    if bits != 4:
        assert torch.equal(got, expected)
    assert divergence < {None: 1e-6, 8: 1e-3, 4: 0.3}[bits]


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("bits", [None, 8, 4])
def test_tinylm(client, tinylm, mode, bits):
    prompt = tokens(text("prompt.txt"))
    expected, _ = generate(tinylm, prompt, count=160)
    assert bytes(expected[0, 512:].tolist()) == text("greedy_continuation_160.txt")
    compare(client, tinylm, prompt, expected, mode, bits)


@pytest.fixture(scope="module")
def smollm2():
    """The model, a prompt of its own, and what it says to that by itself."""
    path = os.environ.get("QKV_SMOLLM2")
    if not path:
        pytest.skip("QKV_SMOLLM2 does not name the file that deploy/smollm2.sh downloads")
    where = {"pretrained_model_name_or_path": os.path.dirname(path), "gguf_file": os.path.basename(path)}
    model = transformers.AutoModelForCausalLM.from_pretrained(**where, torch_dtype=torch.float32).eval()
    tokenizer = transformers.AutoTokenizer.from_pretrained(**where)
    with open(os.path.join(TINYLM, "..", "smollm2", "prose.txt")) as file:
        prompt = tokenizer(file.read(2000), return_tensors="pt").input_ids
    return model, prompt, generate(model, prompt, count=64)[0]


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("bits", [None, 8, 4])
def test_smollm2(client, smollm2, mode, bits):
    compare(client, *smollm2, mode, bits)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("mode", MODES)
def test_families(client, family, mode):
    """Windows, caps, partial RoPE, no grouping: logits as with the model's own attention and cache."""
    model = small(family)
    prompt = torch.randint(1, 97, (1, 50))
    expected, logits = generate(model, prompt)
    with QkvdCache(client, model, mode=mode, policy=qkvd.EXACT, model_name=f"{family}-{mode}") as cache:
        got, got_logits = generate(model, prompt, cache)
    torch.testing.assert_close(got_logits, logits, rtol=1e-3, atol=2e-3)
    assert torch.equal(got, expected)


@STATES
@pytest.mark.parametrize("family", HYBRIDS)
@pytest.mark.parametrize("mode", MODES)
def test_hybrids(client, family, mode):
    """Attention in the daemon, states here: a batch with padding, the text and logits of the model's own cache."""
    model = small(family)
    prompt = torch.randint(1, 97, (2, 50))
    inputs = {"input_ids": prompt, "attention_mask": torch.ones_like(prompt)}
    inputs["attention_mask"][1, :17] = prompt[1, :17] = 0
    expected, logits = generate(model, inputs)
    assert len(set(expected[0, 50:].tolist())) > 5, "a text that does not depend on what is held"
    with QkvdCache(client, model, mode=mode, policy=qkvd.EXACT, model_name=f"{family}-{mode}") as cache:
        got, got_logits = generate(model, inputs, cache)
        attention = 3 if family == "falcon_h1" else 1
        assert [len(session.lengths) for session in cache.sessions] == [attention] * 2
        torch.testing.assert_close(got_logits, logits, rtol=1e-3, atol=2e-3)
        assert torch.equal(got, expected)
        cache.reset()
        again, _ = generate(model, prompt[:1], cache)
    assert torch.equal(again, generate(model, prompt[:1])[0])


@STATES
@pytest.mark.parametrize("family", HYBRIDS)
def test_beams_of_hybrids(client, family):
    """States follow their sequences, as the daemon's forks do."""
    model = small(family)
    prompt = torch.randint(1, 97, (2, 30))
    options = {"num_beams": 3, "output_logits": False, "num_return_sequences": 2}
    expected, _ = generate(model, prompt, **options)
    with QkvdCache(client, model, policy=qkvd.EXACT, model_name=f"beams-{family}") as cache:
        got, _ = generate(model, prompt, cache, **options)
        assert torch.equal(got, expected)
        cache.reset()
        with torch.no_grad():
            model(prompt, past_key_values=cache)
            cache.batch_repeat_interleave(2)
            cache.batch_select_indices(torch.tensor([3, 0]))
            next_one = model(torch.tensor([[5], [6]]), past_key_values=cache).logits[:, 0]
            ids = torch.cat([prompt[[1, 0]], torch.tensor([[5], [6]])], 1)
            torch.testing.assert_close(next_one, model(ids).logits[:, -1], rtol=1e-3, atol=2e-3)


@STATES
@pytest.mark.parametrize("family", HYBRIDS)
def test_crop_of_hybrids(client, family):
    """As far as states go back; what cannot be done changes nothing."""
    model = small(family)
    ids = torch.randint(1, 97, (1, 60))
    with QkvdCache(client, model, policy=qkvd.EXACT, model_name=f"crop-{family}") as cache, torch.no_grad():
        model(ids[:, :40], past_key_values=cache)
        with pytest.raises(qkvd.Unimplemented, match="activate_past_recording" if family == "lfm2" else "recurrent"):
            cache.crop(-1)
        cache.crop(-0)
        logits = model(ids[:, 40:], past_key_values=cache).logits
        torch.testing.assert_close(logits, model(ids).logits[:, 40:], rtol=1e-3, atol=2e-3)
        cache.crop(-60)
        assert cache.get_seq_length() == 0
        cache.activate_past_recording()
        model(ids[:, :40], past_key_values=cache)
        if family == "lfm2":
            cache.crop(-20)
            assert cache.get_seq_length() == 20
            with pytest.raises(qkvd.Unimplemented, match="1 tokens cannot be cropped"):
                cache.crop(-1)
        else:
            with pytest.raises(qkvd.Unimplemented, match="recurrent"):
                cache.crop(-20)
        held = cache.get_seq_length()
        logits = model(ids[:, held:], past_key_values=cache).logits
        torch.testing.assert_close(logits, model(ids).logits[:, held:], rtol=1e-3, atol=2e-3)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("family", ["llama", "mistral"])
def test_padded_batches(client, family, mode):
    model = small(family)
    torch.manual_seed(1)
    ids = torch.randint(1, 97, (3, 40))
    mask = torch.ones_like(ids)
    for row, padding in enumerate((0, 13, 39)):
        ids[row, :padding], mask[row, :padding] = 0, 0
    inputs = {"input_ids": ids, "attention_mask": mask}
    expected, logits = generate(model, inputs)
    with QkvdCache(client, model, mode=mode, policy=qkvd.EXACT, model_name=f"{family}-padded-{mode}") as cache:
        got, got_logits = generate(model, inputs, cache)
        lengths = [session.lengths[0] for session in cache.sessions]
        assert lengths == ([79, 66, 40] if mode == "attend" else [79] * 3)  # padding is not kept where it is known
    torch.testing.assert_close(got_logits, logits, rtol=1e-3, atol=2e-3)
    assert torch.equal(got, expected)


def test_what_the_readme_says(daemon, tinylm):
    prompt = tokens(text("prompt.txt"))
    names = {
        "model": tinylm,
        "inputs": {"input_ids": prompt, "attention_mask": torch.ones_like(prompt), "max_new_tokens": 2},
    }
    exec(python_example().replace(TARGET, daemon.target), names)
    assert isinstance(names["cache"], QkvdCache) and names["cache"].get_seq_length() == len(text("prompt.txt")) + 1


def test_mutual_tls(tinylm, tmp_path):
    """By a client of the caller's."""
    with (
        Secured(tmp_path) as daemon,
        qkvd.Client(daemon.tcp, tls=daemon.tls) as client,
        QkvdCache(client, tinylm, policy=qkvd.EXACT) as cache,
    ):
        got, _ = generate(tinylm, tokens(text("prompt.txt")), cache, count=8)
        assert client.session_info(cache.sessions[0].name).tenant == "team-a"
    assert bytes(got[0, 512:].tolist()) == text("greedy_continuation_160.txt")[:8]


@pytest.mark.parametrize("mode", MODES)
def test_beams(client, mode):
    model = small("llama")
    prompt = torch.randint(1, 97, (2, 30))
    options = {"num_beams": 3, "output_logits": False, "num_return_sequences": 2}
    expected, _ = generate(model, prompt, **options)
    with QkvdCache(client, model, mode=mode, policy=qkvd.EXACT, model_name=f"beams-{mode}") as cache:
        got, _ = generate(model, prompt, cache, **options)
        assert len(cache.sessions) == 6
    assert torch.equal(got, expected)


def test_batch_changes(client):
    model = small("llama")
    ids = torch.randint(1, 97, (2, 20))
    with QkvdCache(client, model, policy=qkvd.EXACT, model_name="changes") as cache, torch.no_grad():
        model(ids, past_key_values=cache)
        cache.batch_repeat_interleave(2)
        assert len(cache.sessions) == 4
        rows = [session.fetch(1)[0] for session in cache.sessions]
        assert all(np.array_equal(rows[i], rows[j]) for i, j in ((0, 1), (2, 3))) and not np.array_equal(rows[0], rows[2])
        cache.batch_select_indices(torch.tensor([3, 0]))
        rows = [rows[3], rows[0]]
        cache.reorder_cache(torch.tensor([1, 1]))
        assert all(np.array_equal(session.fetch(1)[0], rows[1]) for session in cache.sessions)
        assert len(list(client.sessions())) == 2
        next_one = torch.tensor([[5], [5]])
        logits = model(next_one, past_key_values=cache).logits
        torch.testing.assert_close(logits[0], logits[1])
        with pytest.raises(qkvd.InvalidArgument, match="batch of 1 meets a cache of 2"):
            model(next_one[:1], past_key_values=cache)
        cache.reset()
        assert cache.get_seq_length() == 0
        model(ids[:1], past_key_values=cache)


@pytest.mark.parametrize("mode", MODES)
def test_crop(client, mode):
    model = small("llama")
    ids = torch.randint(1, 97, (1, 60))
    with QkvdCache(client, model, mode=mode, policy=qkvd.EXACT, model_name=f"crop-{mode}") as cache, torch.no_grad():
        model(ids, past_key_values=cache)
        cache.crop(-20)
        assert cache.get_seq_length() == 40 and cache.sessions[0].lengths == (40,) * 3
        logits = model(ids[:, 40:], past_key_values=cache).logits
        cache.crop(30)
        assert cache.get_seq_length() == 30
        torch.testing.assert_close(logits, model(ids).logits[:, 40:], rtol=1e-3, atol=2e-3)


def test_prompt_lookup(client, tinylm):
    """Assisted decoding crops what was not accepted."""
    prompt = tokens(text("prompt.txt"))
    expected, _ = generate(tinylm, prompt, count=60, output_logits=False)
    with QkvdCache(client, tinylm, policy=qkvd.EXACT) as cache:
        got, _ = generate(tinylm, prompt, cache, count=60, output_logits=False, prompt_lookup_num_tokens=4)
    assert torch.equal(got, expected)


def test_a_named_session_goes_on(daemon, client, tinylm):
    """What one cache has left, another one takes up: in a conversation, or after a restart of the process."""
    prompt = tokens(text("prompt.txt"))
    expected, _ = generate(tinylm, prompt, count=60)
    with QkvdCache(client, tinylm, session="chat-42", policy=qkvd.EXACT) as cache:
        first, _ = generate(tinylm, prompt, cache, count=30)
    with QkvdCache(daemon.target, tinylm, session="chat-42") as cache:
        assert cache.get_seq_length() == 541
        before = client.metrics()["qkvd_append_tokens_total"]
        second, _ = generate(tinylm, first, cache, count=30)
        assert client.metrics()["qkvd_append_tokens_total"] - before == 30 * 6  # the prompt is not computed again
    assert torch.equal(second, expected)
    with pytest.raises(qkvd.FailedPrecondition, match="chat-42 is of the model tinylm, not of other"):
        QkvdCache(client, tinylm, session="chat-42", model_name="other")
    client.session("chat-42").close()


def test_a_named_session_begins_anew(client):
    """After a reset it has its name."""
    model = small("llama")
    ids = torch.randint(1, 97, (1, 20))
    with QkvdCache(client, model, session="anew", policy=qkvd.EXACT, model_name="anew") as cache, torch.no_grad():
        model(ids, past_key_values=cache)
        cache.reset()
        model(ids[:, :15], past_key_values=cache)
    assert [info.session for info in client.sessions()] == ["anew"]
    with QkvdCache(client, model, session="anew", model_name="anew") as cache:
        assert cache.get_seq_length() == 15
    client.session("anew").close()


def test_no_session_is_left_behind(client):
    """Where one of a batch has been closed by somebody else; the fixture looks."""
    model, ids = small("llama"), torch.randint(1, 97, (3, 20))
    for end in (QkvdCache.close, QkvdCache.reset):
        with QkvdCache(client, model, model_name="behind") as cache, torch.no_grad():
            model(ids, past_key_values=cache)
            client.close_session(cache.sessions[0].name)
            end(cache)
            assert not list(client.sessions())


def test_a_session_is_opened_and_nobody_is_told(client, monkeypatch):
    """The answer comes too late: the next try succeeds; the fixture looks whether a session is left."""
    model, ids = small("llama"), torch.randint(1, 97, (2, 20))
    begin = client.open

    def late(name, **options):
        session = begin(name, **options)
        if name.endswith("/1"):
            raise qkvd.DeadlineExceeded("late")
        return session

    with QkvdCache(client, model, model_name="late") as cache, torch.no_grad():
        monkeypatch.setattr(client, "open", late)
        with pytest.raises(qkvd.DeadlineExceeded):
            model(ids, past_key_values=cache)
        monkeypatch.undo()
        assert not list(client.sessions())
        model(ids, past_key_values=cache)


def test_as_many_sessions_as_there_may_be():
    """What does not fit leaves nothing behind, and can be tried again."""
    model, ids = small("llama"), torch.randint(1, 97, (3, 20))
    with Daemon("--limit-sessions", "4") as daemon, qkvd.Client(daemon.target) as client, torch.no_grad():
        client.register_model(qkvd.Model(name="other", layers=1, kv_heads=1, q_heads=1, key_dim=16, value_dim=16))
        others = [client.open(f"other/{i}", model="other") for i in range(2)]
        with QkvdCache(client, model, model_name="small") as cache:
            with pytest.raises(qkvd.ResourceExhausted):
                model(ids, past_key_values=cache)
            assert len(list(client.sessions())) == len(others)
            for session in others:
                session.close()
            model(ids, past_key_values=cache)
            with pytest.raises(qkvd.ResourceExhausted):
                cache.batch_repeat_interleave(2)
            assert [info.session for info in client.sessions()] == sorted(one.name for one in cache.sessions)
            model(ids[:, :1], past_key_values=cache)
        assert not list(client.sessions())


@pytest.mark.parametrize("mode", MODES)
def test_a_daemon_killed_in_the_middle_of_a_text(tinylm, tmp_path, mode):
    """Calls under way are sent again to the one that follows it, which has the rows: nobody sees that it was gone."""
    prompt = tokens(text("prompt.txt"))
    expected, _ = generate(tinylm, prompt, count=60)
    over, came_back = threading.Event(), threading.Event()
    with Daemon("--data-dir", str(tmp_path), "--durability", "sync") as daemon, Proxy(daemon.target) as proxy:

        def start_again():
            daemon.process.wait()
            daemon.start()
            came_back.set()
            over.wait()  # the daemon ends with the thread that has started it

        with (
            qkvd.Client(proxy.target, retry_for=60) as client,
            QkvdCache(client, tinylm, mode=mode, policy=qkvd.EXACT) as cache,
        ):
            first, _ = generate(tinylm, prompt, cache, count=30)
            threading.Thread(target=start_again, daemon=True).start()
            proxy.after(20_000, daemon.kill)  # of a hundred thousand and more
            got, _ = generate(tinylm, first, cache, count=30)
        assert came_back.is_set()
    over.set()
    assert torch.equal(got, expected)


@pytest.mark.parametrize("mode", MODES)
def test_somebody_else_truncates_a_session(client, monkeypatch, mode):
    """Between a layer's append and its fetch, or between two steps: an error, and no rows of which nothing is known."""
    model, ids = small("llama"), torch.randint(1, 97, (1, 60))
    expected = model(ids).logits[:, 40:]
    with QkvdCache(client, model, mode=mode, policy=qkvd.EXACT, model_name=f"truncated-{mode}") as cache, torch.no_grad():
        model(ids[:, :40], past_key_values=cache)
        other = client.session(cache.sessions[0].name)
        fetch = qkvd.Session.fetch

        def truncated(session, layer, **options):
            if layer == 1:
                other.truncate(50, layers=[1])
            return fetch(session, layer, **options)

        if mode == "fetch":
            monkeypatch.setattr(qkvd.Session, "fetch", truncated)
        else:
            other.truncate(30, layers=[1])
        with pytest.raises(qkvd.FailedPrecondition, match="60 tokens of layer 1" if mode == "fetch" else ""):
            model(ids[:, 40:], past_key_values=cache)
        monkeypatch.setattr(qkvd.Session, "fetch", fetch)
        cache.reset()
        model(ids[:, :40], past_key_values=cache)
        torch.testing.assert_close(model(ids[:, 40:], past_key_values=cache).logits, expected, rtol=1e-3, atol=2e-3)


@pytest.mark.parametrize("mode", MODES)
def test_a_step_that_fails_is_not_gone_on_with(client, monkeypatch, mode):
    """Some layers have its rows. What was before comes back by `crop`."""
    model, ids = small("llama"), torch.randint(1, 97, (1, 60))
    expected = model(ids).logits[:, 40:]
    call = "append" if mode == "fetch" else "attend"
    work = getattr(client, call)
    with QkvdCache(client, model, mode=mode, policy=qkvd.EXACT, model_name=f"fails-{mode}") as cache, torch.no_grad():
        model(ids[:, :40], past_key_values=cache)

        def fails(items, **options):
            if items[0].layer == 1:
                raise qkvd.Unavailable("gone")
            return work(items, **options)

        monkeypatch.setattr(client, call, fails)
        with pytest.raises(qkvd.Unavailable):
            model(ids[:, 40:], past_key_values=cache)
        monkeypatch.undo()
        with pytest.raises(qkvd.Error, match=r"call its reset\(\), or crop\(\)"):
            model(ids[:, 40:], past_key_values=cache)
        cache.crop(40 - cache.get_seq_length())
        assert cache.get_seq_length() == 40
        torch.testing.assert_close(model(ids[:, 40:], past_key_values=cache).logits, expected, rtol=1e-3, atol=2e-3)


def test_long_prompts_go_in_steps(client, monkeypatch):
    monkeypatch.setattr("qkvd.transformers.STEP_BYTES", 1 << 16)
    model = small("llama")
    ids = torch.randint(1, 97, (2, 300))
    with QkvdCache(client, model, policy=qkvd.EXACT, model_name="steps") as cache, torch.no_grad():
        torch.testing.assert_close(model(ids, past_key_values=cache).logits, model(ids).logits, rtol=1e-3, atol=2e-3)


def test_other_caches_are_not_touched(client):
    """A model whose attention is "qkvd" works with any cache."""
    model = small("llama")
    prompt = torch.randint(1, 97, (2, 30))
    mask = torch.ones_like(prompt)
    mask[1, :7] = 0
    inputs = {"input_ids": prompt, "attention_mask": mask}
    expected, _ = generate(model, inputs)
    qkvd.transformers.register()
    model.set_attn_implementation("qkvd")
    assert torch.equal(generate(model, inputs)[0], expected)


def test_dtypes(client):
    for dtype in (torch.float16, torch.bfloat16):
        model = small("llama").to(dtype)
        ids = torch.randint(1, 97, (1, 30))
        for mode in MODES:
            name = f"{mode}-{str(dtype)[6:]}"
            with QkvdCache(client, model, mode=mode, policy=qkvd.EXACT, model_name=name) as cache, torch.no_grad():
                logits = model(ids, past_key_values=cache).logits
                assert logits.dtype == dtype
                torch.testing.assert_close(logits, model(ids).logits, rtol=0.1, atol=0.1)


def test_keys_are_attended_with_once(client):
    """An attention that is asked twice would append its rows twice."""
    q, k, v = (torch.rand(1, heads, 3, 16) for heads in (4, 2, 2))
    with QkvdCache(client, small("llama"), policy=qkvd.EXACT, model_name="once") as cache:
        key, value = cache.layers[0].update(k, v)
        attention(None, q, key, value, None)
        with pytest.raises(qkvd.Unimplemented, match="layer 0 attends with keys that it has attended with before"):
            attention(None, q, key, value, None)
        assert [session.lengths[0] for session in cache.sessions] == [3]


def test_what_is_refused(client):
    model = small("llama")
    ids = torch.randint(1, 97, (2, 10))
    with QkvdCache(client, model, policy=qkvd.EXACT, model_name="refused") as cache, torch.no_grad():
        right = torch.ones_like(ids)
        right[0, 8:] = 0
        with pytest.raises(qkvd.Unimplemented, match="padded on the left"):
            model(ids, attention_mask=right, past_key_values=cache)
        cache.reset()
        own = torch.ones(2, 1, 10, 10, dtype=torch.bool).tril()
        with pytest.raises(NotImplementedError, match="transformers' own"):
            model(ids, attention_mask=own, past_key_values=cache)
        cache.reset()
        model(ids, past_key_values=cache)
        model.set_attn_implementation("sdpa")  # behind the cache's back
        said = r'layer 0 gave its keys .* is now "sdpa"; call model.set_attn_implementation.* reset\(\), or crop'
        with pytest.raises(qkvd.Unimplemented, match=said):
            model(ids[:, :1], past_key_values=cache)
        model.set_attn_implementation("qkvd")
        with pytest.raises(qkvd.Unimplemented, match=r"layer 0 .*: an exception has ended its step, or .* mode=\"fetch\""):
            model(ids[:, :1], past_key_values=cache)
        cache.crop(ids.shape[1])
        model(ids[:, :1], past_key_values=cache)
    with pytest.raises(qkvd.InvalidArgument, match="mode is"):
        QkvdCache(client, model, mode="x")
    hybrid = small("jamba")
    if qkvd.transformers._BEFORE_STATES:
        with pytest.raises(qkvd.Unimplemented, match="jamba has layers that hold states"):
            QkvdCache(client, hybrid)
    else:
        with pytest.raises(qkvd.Unimplemented, match="jamba has states, too"):
            QkvdCache(client, hybrid, session="named")
    for types, error in ((["full_attention", "new_attention"], "new_attention"), (["linear_attention"] * 2, "llama has")):
        model.config.layer_types = types
        with pytest.raises(qkvd.Unimplemented, match=error):
            QkvdCache(client, model)


def test_a_chunked_mask_is_refused(client):
    """A mask that the daemon does not attend to is seen as one, whatever the layer says."""
    from transformers.masking_utils import causal_mask_function, packed_sequence_mask_function, sdpa_mask

    packed = packed_sequence_mask_function(torch.tensor([[0] * 5 + [1] * 5]))
    causal = qkvd.transformers._check_mask(causal_mask_function, 1, 0, 10, 0)
    assert causal is None and sdpa_mask is not None
    with pytest.raises(qkvd.Unimplemented, match="not the causal one"):
        qkvd.transformers._check_mask(lambda *at: packed(*at) & causal_mask_function(*at), 1, 0, 10, 0)
    with pytest.raises(qkvd.Unimplemented, match="sliding window of 4"):
        qkvd.transformers._check_mask(causal_mask_function, 1, 0, 10, 4)


@pytest.mark.parametrize("at_once", [1, 25, 1 << 24])
def test_a_mask_that_differs_at_one_query_is_refused(monkeypatch, at_once):
    """Tokens of an image see all of it, and may stand anywhere in a prompt."""
    monkeypatch.setattr("qkvd.transformers.MASK_ELEMENTS", at_once)

    def causal(batch, head, query, key):
        return key <= query

    qkvd.transformers._check_mask(causal, 2, 3, 10, 0)
    for place in range(3, 12):
        with pytest.raises(qkvd.Unimplemented, match="not the causal one"):
            qkvd.transformers._check_mask(
                lambda b, h, q, k, p=place: causal(b, h, q, k) | ((b == 1) & (q == p) & (k == p + 1)), 2, 3, 10, 0
            )


@new_grpc
def test_a_child_of_fork_closes_nothing(client):
    model = small("llama")
    cache = QkvdCache(client, model, policy=qkvd.EXACT)
    with torch.no_grad():
        model(torch.randint(1, 97, (2, 10)), past_key_values=cache)
    assert len(list(client.sessions())) == 2
    assert in_child(cache.close) == 0
    assert len(list(client.sessions())) == 2
    cache.close()


def test_rope_of_configs():
    rope = qkvd.configs.rope_of
    config = transformers.AutoConfig.for_model
    assert rope(transformers.AutoConfig.from_pretrained(TINYLM)).theta == 10000.0
    neox = rope(config("gpt_neox", rotary_pct=0.25))
    assert neox is None or neox.width in (0, 24)
    scaling = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
    fields = {"rope_theta": 5e5, "rope_type": "llama3"} | scaling
    if qkvd.transformers._BEFORE_5:
        llama3 = rope(config("llama", rope_theta=5e5, rope_scaling={"rope_type": "llama3"} | scaling))
    else:
        llama3 = rope(config("llama", rope_parameters=fields))
    assert (llama3.scaling, llama3.theta, llama3.factor, llama3.original_max_position) == ("llama3", 5e5, 8.0, 8192)
    assert rope(config("gpt2")) is None


def test_sessions_end_with_the_cache(daemon, client):
    model = small("llama")
    cache = QkvdCache(client, model, policy=qkvd.EXACT, model_name="ends")
    with torch.no_grad():
        model(torch.randint(1, 97, (3, 10)), past_key_values=cache)
    assert len(list(client.sessions())) == 3
    del cache
    assert not list(client.sessions())
