"""Times attention of one decode step in PyTorch: d = 128, 8 KV heads. Run by run.sh; prints the median in us.

usage: torch_attention.py fp32|bf16 TOKENS QUERY_HEADS_PER_KV_HEAD THREADS REPEATS
"""

import statistics
import sys
import time

import torch

DIM, KV_HEADS = 128, 8
dtype = {"fp32": torch.float32, "bf16": torch.bfloat16}[sys.argv[1]]
tokens, group, threads, repeats = map(int, sys.argv[2:6])
torch.set_num_threads(threads)
torch.manual_seed(1)
k = torch.randn(KV_HEADS, tokens, DIM).to(dtype)
v = torch.randn(KV_HEADS, tokens, DIM).to(dtype)
q = torch.randn(KV_HEADS, group, DIM).to(dtype)


def attend():
    scores = torch.bmm(q, k.transpose(1, 2)) * DIM ** -0.5
    return torch.bmm(torch.softmax(scores.float(), -1).to(dtype), v)


times = []
with torch.no_grad():
    for _ in range(repeats + 1):
        begin = time.perf_counter()
        attend()
        times.append((time.perf_counter() - begin) * 1e6)
print(round(statistics.median(times[1:])))
