"""Merging partial attentions: the daemon's, and that over tokens which a worker holds itself."""

from __future__ import annotations

import numpy as np

from qkvd.arrays import Array, bf16_to_fp32


def merge(out: Array, lse: Array, other_out: Array, other_lse: Array) -> tuple[Array, Array]:
    """Attention over two disjoint sets of tokens, exactly, from that over each.

    out, other_out: [queries, q_heads, value_dim]; lse, other_lse: [queries, q_heads]. Where a side saw nothing (lse -inf)
    the other one is the answer, and zeros and -inf where neither did. Of bf16, as uint16, `out` is widened: the answer is
    fp32.
    """
    out, other_out = (bf16_to_fp32(one) if one.dtype == np.uint16 else one for one in (out, other_out))
    lse, other_lse = np.asarray(lse, np.float32), np.asarray(other_lse, np.float32)
    both = np.logaddexp(lse, other_lse)
    whole = np.where(np.isneginf(both), np.float32(0), both)
    weight, other_weight = np.exp(lse - whole)[..., None], np.exp(other_lse - whole)[..., None]
    return out * weight + other_out * other_weight, both
