"""A vLLM engine in a process of its own, driven by lines of JSON: `Engine` is the other end.

It is what the tests of qkvd.vllm start; `python vllm_process.py` by hand reads requests from its standard input.
"""

import json
import os
import subprocess
import sys
import time

from readme import configuration

READY = 600  # seconds that an engine may take to start, on a busy machine


class Engine:
    """vLLM with `model` (a folder) and, where `connector` is not None, qkvd's connector with these settings.

    kv_events_config: a dictionary, as `--kv-events-config` takes it.
    """

    def __init__(self, model, connector=None, role="kv_both", log=None, **arguments):
        options = {
            "model": model, "skip_tokenizer_init": True, "dtype": "float32", "enforce_eager": True, "max_model_len": 2048,
            "block_size": 64, "max_logprobs": -1, "disable_log_stats": False, "distributed_executor_backend": "uni",
        }  # fmt: skip
        if connector is not None:
            options["kv_transfer_config"] = configuration("--kv-transfer-config") | {
                "kv_role": role,
                "kv_connector_extra_config": connector,
            }
        read, write = os.pipe()
        self.log = open(log, "ab") if log else subprocess.DEVNULL  # noqa: SIM115
        environment = os.environ | {
            "VLLM_CPU_KVCACHE_SPACE": "1", "HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1", "ANSWERS": str(write),
            # One process instead of three: each takes half a minute to start.
            "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        }  # fmt: skip
        self.process = subprocess.Popen(
            ["setpriv", "--pdeathsig", "TERM", sys.executable, __file__, json.dumps(options | arguments)],
            stdin=subprocess.PIPE, stdout=self.log, stderr=self.log, pass_fds=[write], env=environment, text=True,
        )  # fmt: skip
        os.close(write)
        self.answers = os.fdopen(read)
        self._answer()

    def _answer(self):
        line = self.answers.readline()
        assert line, f"the engine has ended with {self.process.wait()}"
        return json.loads(line)

    def ask(self, **request):
        """Sends a request: `prompts` (lists of ids), `count`, `logprobs`; or `reset`, with `connector` of that, too.

        Gives what came of it."""
        self.send(**request)
        return self._answer()

    def send(self, **request):
        self.process.stdin.write(json.dumps(request) + "\n")
        self.process.stdin.flush()

    def generate(self, prompt, count, **more):
        """One prompt, greedy: {"tokens", "cached", "seconds", "logprobs"}."""
        answer = self.ask(prompts=[prompt], count=count, **more)
        return answer["outputs"][0] | {"seconds": answer["seconds"]}

    def close(self):
        """As a server that is told to end: what waits to be saved is saved."""
        self.process.stdin.close()
        code = self.process.wait(READY)
        self.answers.close()
        assert code == 0, code

    def __enter__(self):
        return self

    def __exit__(self, kind, value, traceback):
        if kind is None:
            self.close()
        else:
            self.process.kill()
            self.process.wait()


def main():
    answers = os.fdopen(int(os.environ["ANSWERS"]), "w")
    mend_llvmlite()

    def say(what):
        answers.write(json.dumps(what) + "\n")
        answers.flush()

    from vllm import LLM, SamplingParams, TokensPrompt
    from vllm.config import KVEventsConfig

    options = json.loads(sys.argv[1])
    if "kv_events_config" in options:
        options["kv_events_config"] = KVEventsConfig(**options["kv_events_config"])
    llm = LLM(**options)
    say("ready")
    for line in sys.stdin:
        request = json.loads(line)
        if request.get("reset"):
            say(bool(llm.reset_prefix_cache(reset_connector=request.get("connector", False))))
            continue
        sampling = SamplingParams(
            temperature=0, detokenize=False, ignore_eos=True, max_tokens=request["count"],
            logprobs=-1 if request.get("logprobs") else None,
            extra_args={"kv_transfer_params": request["transfer"]} if request.get("transfer") else None,
        )  # fmt: skip
        began = time.monotonic()
        prompts = [TokensPrompt(prompt_token_ids=ids, cache_salt=request.get("salt")) for ids in request["prompts"]]
        made = llm.generate(prompts, sampling, use_tqdm=False)
        seconds = time.monotonic() - began
        say({"seconds": seconds, "metrics": metrics(llm), "outputs": [output(one, request) for one in made]})
    llm.llm_engine.engine_core.shutdown()


def mend_llvmlite():
    """vLLM asks all modules' values for `get`, where llvmlite's functions have none; LMCache loads that before."""
    try:
        from llvmlite.binding import ffi
    except ImportError:
        return
    ffi._lib_fn_wrapper.get = lambda self, *names: None


def metrics(llm):
    """Of the connector."""
    return {one.name: one.value for one in llm.get_metrics() if one.name.startswith(("vllm:qkvd_", "vllm:num_preemptions"))}


def output(one, request):
    said = one.outputs[0]
    logprobs = None
    if request.get("logprobs"):
        logprobs = [[step[token].logprob for token in sorted(step)] for step in said.logprobs]
    return {
        "tokens": list(said.token_ids), "cached": one.num_cached_tokens, "logprobs": logprobs,
        "transfer": one.kv_transfer_params,
    }  # fmt: skip


if __name__ == "__main__":
    main()
