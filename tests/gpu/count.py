"""Counts the instructions of a page in the attend kernels, without a GPU, and holds them to docs/gpu.md's limits.

Needs nvcc, and cuobjdump and nvdisasm in PATH (the toolkit has them; PyPI as nvidia-cuda-cuobjdump and nvidia-cuda-nvdisasm).
Where one is missing it says so and exits with 77. Counted is the loop over pages, compiled with one path for up to two bits,
up to four or, of calibrated codes, up to six, and without what most pages skip: masks, outlier rows, sums that decay. A loop
within it counts as often as it runs, waits once. Of the kernels that turn queries: a page of four rows, with all pairs
anchored, 14 of 64 or 9 of 32 of them fast.

count.py [ARCH]     90 by default
"""

import collections
import math
import pathlib
import re
import shutil
import subprocess
import sys
import tempfile

ROOT = pathlib.Path(__file__).resolve().parents[2]
# Kernel, bits: warp instructions of a page and KV head at most.
LIMITS = {("qkv_simt_attend_128x4_q2w1", 2): 1150, ("qkv_simt_attend_128x4_q2w1", 4): 1550}
ALSO = ("qkv_simt_attend_128x4_q1w1", "qkv_simt_attend_128x8_q1w1", "qkv_simt_attend_64x4_q1w1")
CALIBRATED = ("qkv_simt_calibrated_128", "qkv_simt_calibrated_64")
# Loops of the turn kernels in their order, and how often each runs: inputs, products, terms, fast pairs.
TURNS = {"qkv_simt_turn_128": (2, 2, 7, 14), "qkv_simt_turn_64": (1, 1, 3, 9)}
KEY_PASSES = 2  # of the loop over pairs of groups of keys, where it is one
ALU = "PRMT LOP3 SHF IADD3 ISETP FSETP FSEL SEL FMNMX LEA VIADD PLOP3 IMNMX I2FP VIMNMX".split()


def instructions_of(cubin, kernel):
    """[(address, opcode, operands)]"""
    text = subprocess.run(["cuobjdump", "-sass", "-fun", kernel, cubin], capture_output=True, text=True, check=True).stdout
    rows = []
    for line in text.splitlines():
        found = re.match(r"\s+/\*([0-9a-f]{4,})\*/\s+(?:@!?U?P\w+ )?([A-Z][A-Z0-9_]*)(\S*)\s*(.*?);", line)
        if found:
            rows.append((int(found[1], 16), found[2], found[4]))
    return rows


def loops_of(rows):
    """[(first, last)] of all backward branches, the longest first."""
    found = []
    for address, opcode, operands in rows:
        target = re.search(r"0x([0-9a-f]+)", operands) if opcode == "BRA" else None
        if target and int(target[1], 16) < address:
            found.append((int(target[1], 16), address))
    return sorted(found, key=lambda loop: loop[0] - loop[1])


def count_page(cubin, kernel):
    """Opcodes of a page."""
    rows = instructions_of(cubin, kernel)
    products = [address for address, opcode, _ in rows if opcode == "IMMA"]
    inside = {loop: sum(loop[0] <= at <= loop[1] for at in products) for loop in loops_of(rows)}
    *_, pages = [loop for loop, n in inside.items() if n == len(products)]
    inner = [loop for loop, n in inside.items() if n > 0 and pages[0] <= loop[0] and loop[1] < pages[1]]
    count = collections.Counter()
    for address, opcode, _ in rows:
        if pages[0] <= address <= pages[1]:
            count[opcode] += KEY_PASSES if any(first <= address <= last for first, last in inner) else 1
    return count


def count_turn(cubin, kernel):
    """Opcodes of a page of the turn kernel."""
    rows = instructions_of(cubin, kernel)
    products = [address for address, opcode, _ in rows if opcode == "IMMA"]
    loops = loops_of(rows)
    # What is seldom done lies behind the loops and jumps back, which looks like a loop as well.
    inside = {loop: sorted(other for other in loops if loop[0] < other[0] and other[1] < loop[1]) for loop in loops}
    found = [loop for loop in loops
             if all(loop[0] <= at <= loop[1] for at in products) and len(inside[loop]) == len(TURNS[kernel])]
    if not found:
        sys.exit(f"count.py: {kernel} has no loop over pages with {len(TURNS[kernel])} loops in it")
    pages, inner = found[-1], inside[found[-1]]
    count = collections.Counter()
    for address, opcode, _ in rows:
        if pages[0] <= address <= pages[1]:
            passes = [n for (first, last), n in zip(inner, TURNS[kernel]) if first <= address <= last]
            count[opcode] += math.prod(passes)
    return count


def main():
    for tool in ("nvcc", "cuobjdump", "nvdisasm"):
        if shutil.which(tool) is None:
            print(f"count.py: there is no {tool}")
            sys.exit(77)
    arch = sys.argv[1] if len(sys.argv) > 1 else "90"
    failed = False
    with tempfile.TemporaryDirectory() as folder:
        for bits in (2, 4, 6):
            cubin = f"{folder}/{bits}.cubin"
            subprocess.run(["nvcc", f"-arch=sm_{arch}", "-x", "cu", "-std=c++17", "-fmad=false", f"-DQKV_SIMT_COUNT={bits}", "-I",
                            ROOT, "-cubin", "-o", cubin, ROOT / "engine/kernel/simt/attend.c"], check=True)
            plain = (*dict.fromkeys(name for name, _ in LIMITS), *ALSO) if bits <= 4 else ()
            for kernel in (*plain, *CALIBRATED, *(TURNS if bits == 2 else ())):
                count = (count_turn if kernel in TURNS else count_page)(cubin, kernel)
                limit = LIMITS.get((kernel, bits))
                failed |= limit is not None and count.total() > limit
                most = ", ".join(f"{opcode} {n}" for opcode, n in count.most_common(8))
                print(f"sm_{arch} {kernel}, up to {bits} bits: {count.total()}{f' (at most {limit})' if limit else ''}; "
                      f"ALU {sum(count[opcode] for opcode in ALU)}, products {count['IMMA']}; {most}")
    sys.exit(1 if failed else 0)


if __name__ == "__main__":
    main()
