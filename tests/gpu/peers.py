#!/usr/bin/env python3
"""Times attention of one decode step over fp16 and bf16 rows by PyTorch's SDPA and by FlashInfer, on the layer that times.csv is
of: rows of 128, 8 KV heads, four query heads each. Prints CSV: the library with its version, dtype, median microseconds, and GB/s
of keys and values. What is not installed is named on stderr; where PyTorch or its GPU is missing, the exit status is 77.

FlashInfer compiles its kernel at its first call, with nvcc."""

import argparse
import statistics
import sys
import time

DIM, KV_HEADS, GROUP = 128, 8, 4
SKIPPED = 77


def arguments():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=131072)
    parser.add_argument("--repeats", type=int, default=32)
    parser.add_argument("--device", default="cuda", help="cpu tries the script without a GPU; such times mean nothing")
    return parser.parse_args()


def reference(torch, q, k, v):
    """Attention in fp32, head by head; q: (heads, dim), k and v: (tokens, KV heads, dim)."""
    out = []
    for head in range(KV_HEADS):
        rows = q[head * GROUP:(head + 1) * GROUP].float()
        weights = torch.softmax(rows @ k[:, head].float().T * DIM ** -0.5, -1)
        out.append(weights @ v[:, head].float())
    return torch.cat(out)


def sdpa(torch, q, k, v):
    """The query heads of a KV head are rows of one head, which keys without a mask allow. Heads lie one after the other."""
    queries = q.view(1, KV_HEADS, GROUP, DIM)
    keys, values = (rows.transpose(0, 1).contiguous()[None] for rows in (k, v))
    return lambda: torch.nn.functional.scaled_dot_product_attention(queries, keys, values).view(KV_HEADS * GROUP, DIM)


def flashinfer_decode(flashinfer, q, k, v):
    return lambda: flashinfer.single_decode_with_kv_cache(q, k, v, kv_layout="NHD", use_tensor_cores=True)


def microseconds(torch, device, attend, repeats):
    """The median; a GPU's own clock, each call between two events."""
    for _ in range(3):
        attend()
    if device == "cpu":
        times = []
        for _ in range(repeats):
            begin = time.perf_counter()
            attend()
            times.append((time.perf_counter() - begin) * 1e6)
        return statistics.median(times)
    events = [[torch.cuda.Event(enable_timing=True) for _ in range(2)] for _ in range(repeats)]
    for begin, end in events:
        begin.record()
        attend()
        end.record()
    torch.cuda.synchronize()
    return statistics.median(begin.elapsed_time(end) * 1e3 for begin, end in events)


def main():
    options = arguments()
    try:
        import torch
    except ImportError:
        print("peers.py: PyTorch is not installed", file=sys.stderr)
        return SKIPPED
    if options.device == "cuda" and not torch.cuda.is_available():
        print("peers.py: PyTorch finds no GPU", file=sys.stderr)
        return SKIPPED
    try:
        import flashinfer
    except ImportError:
        flashinfer = None
        print("peers.py: FlashInfer is not installed", file=sys.stderr)
    torch.manual_seed(1)
    wrong = 0
    print("library,dtype,microseconds,gbps")
    for dtype in (torch.float16, torch.bfloat16):
        k, v = (torch.randn(options.tokens, KV_HEADS, DIM, device=options.device).to(dtype) for _ in range(2))
        q = torch.randn(KV_HEADS * GROUP, DIM, device=options.device).to(dtype)
        wanted = reference(torch, q, k, v)
        calls = {f"PyTorch {torch.__version__} SDPA": sdpa(torch, q, k, v)}
        if flashinfer is not None and options.device == "cuda":
            calls[f"FlashInfer {flashinfer.__version__}"] = flashinfer_decode(flashinfer, q, k, v)
        for name, attend in calls.items():
            error = ((attend().float() - wanted).norm() / wanted.norm()).item()
            if not error < 0.02:
                print(f"peers.py: {name} is {error:.3f} off, so that its time is of something else", file=sys.stderr)
                wrong = 1
                continue
            took = microseconds(torch, options.device, attend, options.repeats)
            print(f"{name},{str(dtype).split('.')[-1]},{took:.1f},{2 * k.nbytes / took / 1e3:.0f}")
    return wrong


if __name__ == "__main__":
    sys.exit(main())
