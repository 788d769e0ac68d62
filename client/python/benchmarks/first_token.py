#!/usr/bin/env python3
"""Time to the first token of a long prompt in vLLM: computed, loaded from qkvd, and computed while it is saved.

Starts a qkvd of QKV_BIN_DIR and three engines, each in a process of its own: without qkvd, with the connector, and with it
where another process (the second one) has saved the prompt. They take turns, one request a round, after a request that sets
up what the first one has to. Wall times of `generate` for one token: medians, lowest and highest. Needs vLLM, SmolLM2
(QKV_SMOLLM2; deploy/smollm2.sh) and as many free gigabytes as engines.
"""

import argparse
import os
import statistics
import sys
import tempfile
from contextlib import ExitStack
from pathlib import Path

import qkvd

sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", "tests"))
from daemon import Daemon, wait_for
from smollm2 import smollm2
from vllm_process import Engine

TINYLM = os.environ.get("QKV_TINYLM") or os.path.realpath(
    os.path.join(os.path.dirname(__file__), "..", "..", "..", "tests", "data", "tinylm")
)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5, metavar="N")
    parser.add_argument("--bits", help='of the connector: a number or "exact"; its own 8 by default')
    options = parser.parse_args()
    bits = {} if options.bits is None else {"bits": "exact" if options.bits == "exact" else float(options.bits)}
    with ExitStack() as stack:
        folder, prompt = smollm2(Path(stack.enter_context(tempfile.TemporaryDirectory())), TINYLM)
        daemon = stack.enter_context(Daemon())
        client = stack.enter_context(qkvd.Client(daemon.target))
        settings = {"target": daemon.target, **bits}
        engines = {what: stack.enter_context(Engine(folder, its, role=role)) for what, its, role in (
            ("computed", None, None), ("computed and saved", settings, "kv_producer"), ("loaded", settings, "kv_consumer"),
        )}  # fmt: skip
        for engine in engines.values():
            engine.generate(prompt[:200][::-1], 2)
        engines["computed and saved"].generate(prompt, 1)
        saved = len(prompt) // 64 * 64
        wait_for(lambda: holds(client, saved), "the prompt is not saved")
        times = {what: [] for what in engines}
        for number in range(options.rounds):
            for what, engine in engines.items():
                assert engine.ask(reset=True)
                # What is computed and saved is a prompt that nobody has: its first token is another one each time.
                ids = [prompt[0] + 1 + number, *prompt[1:]] if what == "computed and saved" else prompt
                made = engine.generate(ids, 1)
                assert made["cached"] == ((len(prompt) - 1) // 64 * 64 if what == "loaded" else 0)
                times[what].append(made["seconds"])
        base = statistics.median(times["computed"])
        print(f"| {len(prompt)} tokens of SmolLM2, to the first token | s | of computing |\n|---|---|---|")
        for what, took in times.items():
            median = statistics.median(took)
            print(f"| {what} | {median:.2f} ({min(took):.2f} to {max(took):.2f}) | {median / base:.3f} |")


def holds(client, tokens):
    return any(min(client.session_info(info.session).lengths) >= tokens for info in client.sessions("vllm/"))


if __name__ == "__main__":
    main()
