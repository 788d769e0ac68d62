#!/usr/bin/env python3
"""What better quantizers would make of a model's values: a simulation in numpy, with what none of our codes has.

Takes rows that `qkv-worker dump` has written, of a text to learn from and of one to measure on. Values of each head
go through the KLT of the first text, their rows are scaled to a root mean square of 1, bands of 8 coordinates get whole
bits by reverse water-filling, and each quantizer codes what is then close to N(0, 1). Printed is the mean squared
error, relative, over layers, and the error of attention's outputs with the last 256 queries; the first four tokens stay
exact, as in pages. Gains and headers, the same for all, are not counted.
"""

import argparse
import json
import math

import numpy as np

SINKS, QUERIES, BAND, STATES = 4, 256, 8, 256
RNG = np.random.default_rng(1)


# ---- Files ----

def read(path):
    """layers.N.k, .v and .q of a .safetensors file in fp32."""
    with open(path, "rb") as file:
        header = json.loads(file.read(int.from_bytes(file.read(8), "little")))
        data = file.read()
    header.pop("__metadata__", None)
    return {name: np.frombuffer(data[slice(*one["data_offsets"])], "<f4").reshape(one["shape"]).astype(np.float64)
            for name, one in header.items()}


# ---- Quantizers of numbers close to N(0, 1), [rows, 8 * n], the same whole bits for all ----

def lloyd_max(levels):
    """The symmetric codebook for N(0, 1)."""
    grid = np.linspace(-8, 8, 160001)
    weight = np.exp(-grid ** 2 / 2)
    values = np.sort(RNG.standard_normal(200000))[np.linspace(0, 199999, 2 * levels + 1, dtype=int)[1::2]]
    for _ in range(400):
        cells = np.searchsorted((values[1:] + values[:-1]) / 2, grid)
        values = np.bincount(cells, weight * grid, levels) / np.bincount(cells, weight, levels)
    return (values - values[::-1]) / 2


CODEBOOKS = {bits: lloyd_max(1 << bits) for bits in range(1, 8)}


def scalar(x, bits):
    values = CODEBOOKS[bits]
    return values[np.searchsorted((values[1:] + values[:-1]) / 2, x)]


def nearest_e8(x):
    """The nearest point of the lattice E8 = D8 and D8 + 1/2, of rows of 8."""
    best = None
    for shift in (0.0, 0.5):
        y = np.rint(x - shift)
        miss = x - shift - y
        worst = np.abs(miss).argmax(1)
        odd = y.sum(1) % 2 != 0
        rows = np.arange(len(x))[odd]
        y[rows, worst[odd]] += np.where(miss[rows, worst[odd]] >= 0, 1, -1)
        y += shift
        if best is None:
            best = y
        else:
            closer = ((x - y) ** 2).sum(1) < ((x - best) ** 2).sum(1)
            best[closer] = y[closer]
    return best


def e8_radius(bits):
    """The largest squared length whose ball has at most 2^(8 bits) points: shells of length 2n have 240 sigma_3(n)."""
    points, n = 1, 0
    while True:
        shell = 240 * sum(d ** 3 for d in range(1, n + 2) if (n + 1) % d == 0)
        if points + shell > 1 << (8 * bits):
            return 2 * n
        points, n = points + shell, n + 1


def e8_ball(x, bits, scale):
    """The lattice in a ball: points beyond it are brought in."""
    radius = e8_radius(bits)
    blocks = x.reshape(-1, 8) / scale
    factor = np.ones(len(blocks))
    points = nearest_e8(blocks)
    for _ in range(40):
        far = (points ** 2).sum(1) > radius + 1e-9
        if not far.any():
            break
        factor[far] *= 0.97
        points[far] = nearest_e8(blocks[far] * factor[far, None])
    return (points * scale).reshape(x.shape)


def best_scale(bits):
    sample = RNG.standard_normal((8000, 8))
    tried = np.linspace(0.8, 3, 23) / 2 ** (bits - 1)
    return min(tried, key=lambda scale: ((sample - e8_ball(sample, bits, scale)) ** 2).mean())


E8_SCALES = {bits: best_scale(bits) for bits in (1, 2, 3)}


def e8(x, bits):
    return e8_ball(x, bits, E8_SCALES[bits]) if bits in E8_SCALES else scalar(x, bits)


def trellis_table():
    """One value for each state, as even in N(0, 1) as they go, in random order."""
    values = np.sort(RNG.standard_normal(400 * STATES)).reshape(STATES, 400).mean(1)
    return RNG.permutation(values / values.std() * 0.98)


TRELLIS = trellis_table()


def trellis(x, bits):
    """A shift register of 8 bits, of which each coordinate brings `bits` new ones; its state says the value."""
    if bits > 4:
        return scalar(x, bits)
    rows, steps = x.shape
    fan, keep = 1 << bits, STATES >> bits
    cost = (x[:, :1] - TRELLIS) ** 2
    back = np.zeros((steps, rows, STATES), np.uint8)
    for step in range(1, steps):
        # State s = (old << bits | new) mod 256: the old ones differ in their upper bits, which are dropped.
        old = cost.reshape(rows, fan, keep)
        back[step] = np.repeat(old.argmin(1), fan, axis=1)
        cost = np.repeat(old.min(1), fan, axis=1) + (x[:, step:step + 1] - TRELLIS) ** 2
    state = cost.argmin(1)
    out = np.empty_like(x)
    for step in range(steps - 1, -1, -1):
        out[:, step] = TRELLIS[state]
        state = (state >> bits) | (back[step][np.arange(rows), state].astype(int) * keep)
    return out


# ---- Values of a head ----

def klt(rows):
    mean = rows.mean(0)
    variance, axes = np.linalg.eigh(np.cov(rows.T))
    order = variance.argsort()[::-1]
    return mean, np.maximum(variance[order], 1e-12), axes[:, order]


def depths_of(variance, bits):
    """Whole bits of bands, one after the other where one lowers the error most."""
    distortion = [1, 0.36338, 0.11748, 0.03454, 0.00950, 0.00250, 0.00065, 0.00017]
    bands = variance.reshape(-1, BAND).sum(1)
    depths = np.zeros(len(bands), int)
    for _ in range(round(bits * len(bands))):
        gain = [band * (distortion[depth] - distortion[depth + 1]) if depth < 7 else 0
                for band, depth in zip(bands, depths)]
        depths[int(np.argmax(gain))] += 1
    return depths


def coded(z, depths, quantizer):
    """Coordinates of variance 1, [rows, dim]."""
    out = np.zeros_like(z)
    size = np.sqrt((z ** 2).mean(1, keepdims=True)) + 1e-12
    for depth in sorted(set(depths) - {0}):
        columns = np.repeat(depths == depth, BAND)
        out[:, columns] = quantizer(z[:, columns] / size, int(depth)) * size
    return out


def uniform_entropy(z, variance, step):
    """Evenly spaced levels of one step for all, and the ideal bits of a static table for each coordinate."""
    out, bits = np.zeros_like(z), 0.0
    for c in range(z.shape[1]):
        own = step / math.sqrt(variance[c])
        codes = np.sign(z[:, c]) * np.floor(np.abs(z[:, c]) / own + 0.4)
        values, inverse, counts = np.unique(codes, return_inverse=True, return_counts=True)
        centre = np.bincount(inverse, z[:, c]) / counts
        out[:, c] = centre[inverse]
        share = counts / len(codes)
        bits -= (share * np.log2(share)).sum() - (len(values) - 1) / 2 * math.log2(math.e) / len(codes)
    return out, bits / z.shape[1]


def entropy_coded(z, variance, bits):
    low, high = 1e-4, 1e4
    for _ in range(30):
        step = math.sqrt(low * high)
        out, used = uniform_entropy(z, variance, step)
        low, high = (step, high) if used > bits else (low, step)
    return out


def with_exact_channels(z, variance, bits, count):
    """`count` of a row's coordinates exact, 16 bits and 6 that say which: those that miss most; the rest is scalar."""
    depths = depths_of(variance, bits - count * 22 / z.shape[1])
    out = coded(z, depths, scalar)
    worst = np.argsort((z - out) ** 2 * variance, 1)[:, -count:]
    np.put_along_axis(out, worst, np.take_along_axis(z, worst, 1), 1)
    return out


def hadamard_axes(dim):
    axes = np.ones((1, 1))
    while len(axes) < dim:
        axes = np.block([[axes, axes], [axes, -axes]])
    return axes * RNG.choice([-1, 1], dim)[:, None] / math.sqrt(dim)


def ways(z, variance, bits):
    quantizers = {"scalar, Lloyd-Max": scalar, "lattice E8 in a ball": e8, "trellis, 256 states": trellis}
    for name, quantizer in quantizers.items():
        yield name, coded(z, depths_of(variance, bits), quantizer)
    yield "scalar, even steps, ideal entropy code", entropy_coded(z, variance, bits)
    yield "scalar, 1 of 64 coordinates exact", with_exact_channels(z, variance, bits, 1)


def attention(rows, layer, head):
    """Weights of the last queries of the head's group, [queries * group, tokens]."""
    k, q = rows[f"layers.{layer}.k"], rows[f"layers.{layer}.q"]
    group = q.shape[1] // k.shape[1]
    tokens = len(k)
    positions = np.arange(tokens - QUERIES, tokens)
    weights = []
    for i in range(group):
        scores = q[-QUERIES:, head * group + i] @ k[:, head].T / math.sqrt(k.shape[2])
        scores[np.arange(tokens)[None] > positions[:, None]] = -np.inf
        scores = np.exp(scores - scores.max(1, keepdims=True))
        weights.append(scores / scores.sum(1, keepdims=True))
    return np.concatenate(weights)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--learn", required=True, metavar="FILE", help="rows of the text to learn from")
    parser.add_argument("--rows", required=True, metavar="FILE", help="rows of the text to measure on")
    parser.add_argument("--bits", type=float, nargs="+", default=[1.5, 2, 2.5, 3])
    parser.add_argument("--layers", type=int, default=1, metavar="N", help="every Nth one (default 1)")
    options = parser.parse_args()
    learn, rows = read(options.learn), read(options.rows)
    layers = sorted(int(name.split(".")[1]) for name in rows if name.endswith(".v"))[::options.layers]
    sums = {}
    for layer in layers:
        v = rows[f"layers.{layer}.v"]
        for head in range(v.shape[1]):
            x, weights = v[:, head], attention(rows, layer, head)
            exact = weights @ x
            frames = {"KLT": klt(learn[f"layers.{layer}.v"][SINKS:, head]),
                      "Hadamard": (np.zeros(x.shape[1]), np.full(x.shape[1], x.var()), hadamard_axes(x.shape[1]))}
            for frame, (mean, variance, axes) in frames.items():
                z = (x - mean) @ axes / np.sqrt(variance)
                for bits in options.bits:
                    for name, out in ways(z, variance, bits):
                        if frame == "Hadamard" and not (name.startswith(("scalar, Lloyd", "lattice", "trellis"))):
                            continue
                        back = out * np.sqrt(variance) @ axes.T + mean
                        back[:SINKS] = x[:SINKS]
                        miss = ((back - x) ** 2).sum() / (x ** 2).sum()
                        off = ((weights @ back - exact) ** 2).sum() / (exact ** 2).sum()
                        sums.setdefault((frame, name), {}).setdefault(bits, []).append((miss, off))
    print("| values | " + " | ".join(f"{bits:g} bits: MSE, attention" for bits in options.bits) + " |")
    print("|---" * (len(options.bits) + 1) + "|")
    for (frame, name), by_bits in sums.items():
        cells = []
        for bits in options.bits:
            miss, off = np.array(by_bits[bits]).mean(0)
            cells.append(f"{miss:.4f}, {math.sqrt(off):.4f}")
        print(f"| {frame}; {name} | " + " | ".join(cells) + " |")


if __name__ == "__main__":
    main()
