"""For `upstream.py`: vLLM's tests of connectors meet qkvd's, over a daemon of their own.

It stands for the example connector, the one of NIXL, those that offload and the tests' own mock. Where a test says how many
tokens of a prompt another engine holds, another engine's session with them is put into the daemon first. Where prompts
are counted in blocks of the helpers' size, that is 64 here, as the daemon's pages have: with 16 most would be shorter.
"""

import json
import pathlib

import numpy as np
from daemon import Daemon
from upstream_report import pytest_collectreport, pytest_runtest_logreport, pytest_unconfigure  # noqa: F401
from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
from vllm.distributed.kv_transfer.kv_connector.v1 import example_connector

import qkvd
from qkvd.vllm import QkvdConnector, QkvdMetadata
from qkvd.vllm_scheduler import salt_of

PLACES = (
    "ExampleConnector", "NixlConnector", "OffloadingConnector", "SimpleCPUOffloadConnector", "MockKVConnector",
)  # fmt: skip
DAEMON = Daemon()
made = 0


class Substitute(QkvdConnector):
    """With settings of its own, and what the test's connector was to hold in the daemon."""

    def __init__(self, vllm_config, role, kv_cache_config):
        global made
        made += 1
        transfer = vllm_config.kv_transfer_config
        self.given = transfer.kv_connector_extra_config
        self.name = f"m{made}"
        settings = {"target": DAEMON.target, "bits": "exact", "lookup_timeout": 5.0, "model_name": self.name}
        transfer.kv_connector_extra_config = settings
        try:
            super().__init__(vllm_config, role, kv_cache_config)
        finally:
            transfer.kv_connector_extra_config = self.given
        self.asked = set()

    def get_num_new_matched_tokens(self, request, num_computed_tokens):
        if request.request_id not in self.asked:
            self.asked.add(request.request_id)
            self.put(request)
        return super().get_num_new_matched_tokens(request, num_computed_tokens)

    def update_state_after_alloc(self, request, blocks, num_external_tokens):
        if request.request_id in self.asked:  # else the test itself has said what is held
            super().update_state_after_alloc(request, blocks, num_external_tokens)

    def build_connector_meta(self, scheduler_output):
        """With the list that the tests' mock has in it: requests that are new, or come back."""
        meta = super().build_connector_meta(scheduler_output)
        cached = scheduler_output.scheduled_cached_reqs
        names = [new.req_id for new in scheduler_output.scheduled_new_reqs]
        names += [name for name in cached.req_ids if name in cached.resumed_req_ids]
        meta.requests = [{"req_id": name} for name in names]
        return meta

    def put(self, request):
        """What another engine has saved of this prompt."""
        tokens = self.given.get("matched_tokens", 0)
        if (request.kv_transfer_params or {}).get("do_remote_prefill"):
            tokens = request.num_tokens
        ids = list(request.all_token_ids)[: tokens // 64 * 64]
        if not ids:
            return
        with qkvd.Client(DAEMON.target) as client:
            client.register_model(
                qkvd.Model(name=self.name, layers=1, kv_heads=1, q_heads=1, key_dim=16, value_dim=16, dtype="fp32")
            )
            session = client.open(
                f"{self.name}/{request.request_id}", model=self.name, purpose="fetch", tokens=ids, policy=qkvd.EXACT,
                salt=salt_of(self._options, request, ""),
            )  # fmt: skip
            rows = np.zeros((len(ids), 1, 16), np.float32)
            session.append(0, rows, rows, position=0)


def pytest_configure(config):
    example_connector.ExampleConnector = Substitute
    example_connector.ExampleConnectorMetadata = QkvdMetadata
    register = KVConnectorFactory.register_connector.__func__

    def registered(cls, name, module, class_name):
        if name not in PLACES:
            register(cls, name, module, class_name)

    for name in PLACES:
        KVConnectorFactory._registry[name] = lambda: Substitute
    KVConnectorFactory.register_connector = classmethod(registered)
    model = pathlib.Path("facebook/opt-125m")  # in the tests' folder: it is not fetched
    model.mkdir(parents=True, exist_ok=True)
    (model / "config.json").write_text(json.dumps({
        "architectures": ["OPTForCausalLM"], "model_type": "opt", "hidden_size": 768, "num_hidden_layers": 12,
        "num_attention_heads": 12, "ffn_dim": 3072, "vocab_size": 50272, "max_position_embeddings": 16384,
        "word_embed_proj_dim": 768, "bos_token_id": 2, "eos_token_id": 2, "pad_token_id": 1, "torch_dtype": "float16",
    }))  # fmt: skip
    from tests.v1.kv_connector.unit import conftest, utils

    defaults(utils.create_vllm_config, block_size=64, max_num_batched_tokens=256)
    defaults(utils.create_request, block_size=64)
    config.pluginmanager.register(conftest)


def defaults(function, **values):
    """Other defaults for arguments of this function."""
    names = function.__code__.co_varnames[: function.__code__.co_argcount]
    of = dict(zip(names[-len(function.__defaults__) :], function.__defaults__, strict=True))
    function.__defaults__ = tuple({name: values.get(name, value) for name, value in of.items()}.values())


def pytest_collection_modifyitems(config, items):
    """Of the scheduler's tests those with a connector."""
    left = [item for item in items if "core/test_scheduler.py" in item.nodeid and "kv_connector" not in item.nodeid]
    items[:] = [item for item in items if item not in left]


def pytest_sessionfinish():
    DAEMON.__exit__(None, None, None)
