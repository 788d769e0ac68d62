"""Holds the compiled kernels to what they may take of a multiprocessor: registers.py LOG, what ptxas -v said of them.

At most 128 registers a thread (168 from compute capability 10.0 on), so that 16 (12) warps of each run at once; no stack and
no spills, which would be traffic to memory. Fails where a kernel is missing, too.
"""

import re
import sys

REGISTERS_MAX = {"sm_80": 128, "sm_90": 128}
REGISTERS_MAX_LATER = 168
SHAPES = [f"{dim}x{rows}" for dim in (64, 128) for rows in ("4_q1w1", "8_q1w1", "4_q2w1", "4_q2w2")]
KERNELS = ({f"qkv_simt_attend_{shape}" for shape in SHAPES} | {"qkv_simt_merge_partials", "qkv_simt_decode_rows", "qkv_simt_encode_rows"}
           | {f"qkv_simt_{kind}_{dim}" for kind in ("calibrated", "turn") for dim in (64, 128)})


def kernels_of(log):
    """(kernel, architecture): registers, bytes of stack, bytes of spills."""
    found = {}
    for part in log.split("Compiling entry function '")[1:]:
        name, arch = re.match(r"(\w+)' for '(\w+)'", part).groups()
        stack, stores, loads = re.search(
            r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads", part).groups()
        found[name, arch] = int(re.search(r"Used (\d+) registers", part)[1]), int(stack), int(stores) + int(loads)
    return found


def main():
    with open(sys.argv[1], encoding="utf-8") as file:
        found = kernels_of(file.read())
    wrong = 0
    for (name, arch), (registers, stack, spills) in sorted(found.items()):
        bad = registers > REGISTERS_MAX.get(arch, REGISTERS_MAX_LATER) or stack > 0 or spills > 0
        wrong += bad
        print(f"{arch} {name}: {registers} registers, {stack} bytes of stack, {spills} of spills{' TOO MUCH' if bad else ''}")
    for arch in sorted({arch for _, arch in found}) or ["any architecture"]:
        for name in sorted(KERNELS - {name for name, of in found if of == arch}):
            print(f"{arch} {name}: missing")
            wrong += 1
    sys.exit(1 if wrong else 0)


if __name__ == "__main__":
    main()
