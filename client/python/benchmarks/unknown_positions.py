#!/usr/bin/env python3
"""What LMCache's chunks lose: rows at positions that the daemon does not know, next to the same rows at known ones.

LMCache names chunks of 256 tokens and tells no positions, so that their keys are coded as they are, turned by the model's
RoPE (`qkvd.chunks`); vLLM's and SGLang's connectors tell token ids, and with them positions (`qkvd.prefixes`). The keys and
values of a real model's context of 768 tokens go through a daemon either way, by the connectors' own code, and the next
256 tokens are scored on what comes back: the KL divergence of the next token from that of the exact rows, in bits, and how
often the most likely token is the same. First with a daemon that has learnt nothing, then with one that has learnt from
other text. Prints a table in Markdown. Needs torch and transformers; tinylm, and with QKV_SMOLLM2 (deploy/smollm2.sh)
SmolLM2.
"""

import argparse
import logging
import math
import os
import sys
import time

import torch
import transformers

from qkvd import configs
from qkvd.chunks import Chunks
from qkvd.model import Model
from qkvd.prefixes import Options, Prefixes

sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", "tests"))
from daemon import Daemon

DATA = os.path.realpath(os.path.join(os.path.dirname(__file__), "..", "..", "..", "tests", "data"))
CONTEXT, SCORED, CHUNK = 768, 256, 256
LOG = logging.getLogger("unknown_positions")


def tinylm():
    """Model, its name, and a function that gives a text's tokens."""
    model = transformers.LlamaForCausalLM.from_pretrained(os.path.join(DATA, "tinylm"), dtype=torch.float32)
    return model.eval(), "tinylm", lambda text: list(text.encode())


def smollm2(path):
    where = {"pretrained_model_name_or_path": os.path.dirname(path), "gguf_file": os.path.basename(path)}
    model = transformers.AutoModelForCausalLM.from_pretrained(**where, dtype=torch.float32)
    tokenizer = transformers.AutoTokenizer.from_pretrained(**where)
    return model.eval(), "SmolLM2", lambda text: tokenizer(text).input_ids


def windows(encode, files, count):
    """`count` windows of each text, spread over it, and all of one text with the others."""
    made = []
    for file in files:
        with open(os.path.join(DATA, file)) as text:
            ids = encode(text.read())
        last = len(ids) - CONTEXT - SCORED
        made += [ids[last * at // max(count - 1, 1) :][: CONTEXT + SCORED] for at in range(count)]
    return made


class Through:
    """A daemon, and a model's rows by way of it."""

    def __init__(self, daemon, model, name):
        config = model.config
        self.dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        self.heads, self.layers = config.num_key_value_heads, config.num_hidden_layers
        self.target, self.name, self.made = daemon.target, name, 0
        self.known = Model(
            name=name, layers=self.layers, kv_heads=self.heads, q_heads=self.heads, key_dim=self.dim, value_dim=self.dim,
            dtype="fp32", rope=configs.rope_of(config),
        )  # fmt: skip
        assert self.known.rope is not None

    def options(self, bits):
        return Options.of({"target": self.target, "bits": bits, "timeout": 60.0, "lookup_timeout": 60.0})

    def by_chunks(self, rows, bits):
        """As LMCache's connector: `rows` are (k, v) [tokens, heads, dim] of each layer."""
        chunks = Chunks(self.options(bits), self.heads, LOG)
        # K and V of a head lie next to each other, as in what vLLM gives to LMCache.
        whole = torch.stack([torch.cat(pair, -1).flatten(1) for pair in rows])
        parts = [part.contiguous() for part in whole.split(CHUNK, 1)]
        self.made += 1
        names = [chunks.name("quality", self.made, place) for place in range(len(parts))]
        assert all(chunks.put_all([(name, part, self.name) for name, part in zip(names, parts, strict=True)]))
        back = [torch.empty_like(part) for part in parts]
        assert all(chunks.get_all(list(zip(names, back, strict=True))))
        chunks.delete(names)
        chunks.close()
        both = torch.cat(back, 1).view(self.layers, -1, self.heads, 2 * self.dim)
        return [(one[..., : self.dim], one[..., self.dim :]) for one in both]

    def by_prefixes(self, rows, bits):
        """As vLLM's connector."""
        prefixes = Prefixes(self.options(bits), self.known, LOG)
        self.made += 1
        name, count = f"quality/{self.made}", len(rows[0][0])
        ids = [self.made] * count  # that no other sequence has
        prefixes.open(name, ids, prefixes.options.salt())
        prefixes.append(name, 0, ids, rows)
        back = [(torch.empty(count, self.heads, self.dim), torch.empty(count, self.heads, self.dim)) for _ in rows]
        for piece in prefixes.fetch(name, range(self.layers), 0, count, 0):
            for to, came in zip(back[piece.layer], (piece.k, piece.v), strict=True):
                to[piece.position : piece.position + came.shape[1]] = torch.tensor(came).transpose(0, 1)
        prefixes.drop(name)
        prefixes.close()
        return back

    def learnt(self):
        """Whether calibrations of both kinds of rows are in force."""
        prefixes = Prefixes(self.options(None), self.known, LOG)
        states = [one.calibration.source for one in prefixes.client.models()]
        prefixes.close()
        return len(states) == 2 and all(states)


def forward(model, ids):
    """Logits of the last SCORED tokens, and the rows of what is before them."""
    with torch.no_grad():
        made = model(torch.tensor([ids]), use_cache=True)
    rows = [
        tuple(part[0, :, :CONTEXT].transpose(0, 1).contiguous() for part in (layer.keys, layer.values))
        for layer in made.past_key_values.layers
    ]
    return made.logits[0, CONTEXT:], rows


def scored(model, ids, rows, exact):
    """(KL in bits, share of equal most likely tokens) with these rows as the context."""
    cache = transformers.DynamicCache()
    for layer, pair in enumerate(rows):
        cache.update(*(part.transpose(0, 1)[None].contiguous() for part in pair), layer)
    with torch.no_grad():
        logits = model(torch.tensor([ids[CONTEXT:]]), past_key_values=cache, use_cache=True).logits[0]
    p, q = (torch.log_softmax(one.double(), -1) for one in (exact, logits))
    kl = float((p.exp() * (p - q)).sum(-1).mean()) / math.log(2)
    return kl, float((exact.argmax(-1) == logits.argmax(-1)).double().mean())


def measure(model, through, texts, bits, state, name):
    sums = {}
    for ids in texts:
        exact, rows = forward(model, ids)
        for number in bits:
            for way, call in (("known", through.by_prefixes), ("unknown", through.by_chunks)):
                kl, same = scored(model, ids, call(rows, number), exact)
                total = sums.setdefault((number, way), [0.0, 0.0])
                total[0] += kl / len(texts)
                total[1] += same / len(texts)
    for number in bits:
        known, unknown = sums[number, "known"], sums[number, "unknown"]
        print(
            f"| {name}, {state} | {number} | {known[0]:.2g}, {known[1]:.3f} | {unknown[0]:.2g}, {unknown[1]:.3f} "
            f"| {unknown[0] / known[0]:.1f} |",
            flush=True,
        )


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--windows", type=int, default=2, metavar="N", help="of each text (default 2)")
    parser.add_argument("--bits", default="8,6,5,4,3", help="with commas (default 8,6,5,4,3)")
    parser.add_argument("--texts", type=int, default=3, metavar="N", help="of each model, at most (default 3)")
    parser.add_argument("--model", choices=["tinylm", "SmolLM2"], help="this one alone")
    given = parser.parse_args()
    bits = [float(one) if "." in one else int(one) for one in given.bits.split(",")]
    models = [(*tinylm(), ["tinylm/heldout_kjv.txt", "tinylm/heldout_jargon.txt"], "tinylm/calibration.txt")]
    if path := os.environ.get("QKV_SMOLLM2"):
        texts = ["smollm2/prose.txt", "smollm2/report.txt", "smollm2/licence.txt"]
        models.append((*smollm2(path), texts, "smollm2/calibration.txt"))
    print("| model, daemon | bits | known: KL, same | unknown: KL, same | ratio |\n|---|---|---|---|---|", flush=True)
    for model, name, encode, files, teaching in models:
        if given.model not in (None, name):
            continue
        texts = windows(encode, files[: given.texts], given.windows)
        with Daemon("--calibrate-tokens", "0") as daemon:
            measure(model, Through(daemon, model, name), texts, bits, "data-free", name)
        with Daemon() as daemon:
            through = Through(daemon, model, name)
            for ids in windows(encode, [teaching], 24):
                _, rows = forward(model, ids)
                through.by_prefixes(rows, 4)
                through.by_chunks(rows, 4)
            for _ in range(60):
                if not through.learnt():
                    time.sleep(1)
            measure(model, through, texts, bits, "learnt" if through.learnt() else "not learnt", name)


if __name__ == "__main__":
    main()
