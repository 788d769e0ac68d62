"""Which of several daemons has a session: the same rule as libqkv's (client/c/place.h), by the texts of targets and keys.

A session belongs to the daemon of the highest weight, of those that answer. The weight of a target and a key is the
avalanche of XXH64 over XXH3-64(target) ^ XXH3-64(key).
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from functools import lru_cache
from struct import unpack_from

MOST = 128  # bytes of a target or a name

_MASK = (1 << 64) - 1
_P64 = (0x9E3779B185EBCA87, 0xC2B2AE3D27D4EB4F, 0x165667B19E3779F9)
_SECRET = bytes.fromhex(
    "b8fe6c3923a44bbe7c01812cf721ad1cded46de9839097db7240a4a4b7b3671fcb79e64eccc0e578825ad07dccff7221"
    "b8084674f743248ee03590e6813a264c3c2852bb91c300cb88d0658b1b532ea371644897a20df94e3819ef46a9deacd8"
    "a8fa763fe39c343ff9dcbbc7c70b4f1d8a51e04bcdb45931c89f7ec9d9787364"
)


def _word(data: bytes, at: int) -> int:
    return int(unpack_from("<Q", data, at)[0])


def _half(data: bytes, at: int) -> int:
    return int(unpack_from("<I", data, at)[0])


def _fold(a: int, b: int) -> int:
    product = a * b
    return (product & _MASK) ^ (product >> 64)


def _avalanche_of_64(value: int) -> int:
    value = (value ^ (value >> 33)) * _P64[1] & _MASK
    value = (value ^ (value >> 29)) * _P64[2] & _MASK
    return value ^ (value >> 32)


def _avalanche(value: int) -> int:
    value = (value ^ (value >> 37)) * 0x165667919E3779F9 & _MASK
    return value ^ (value >> 32)


def _short(data: bytes) -> int:
    """Of up to 16 bytes."""
    size = len(data)
    if size > 8:
        low = _word(data, 0) ^ _word(_SECRET, 24) ^ _word(_SECRET, 32)
        high = _word(data, size - 8) ^ _word(_SECRET, 40) ^ _word(_SECRET, 48)
        swapped = int.from_bytes(low.to_bytes(8, "little"), "big")
        return _avalanche((size + swapped + high + _fold(low, high)) & _MASK)
    if size >= 4:
        value = (_half(data, size - 4) + (_half(data, 0) << 32)) ^ _word(_SECRET, 8) ^ _word(_SECRET, 16)
        value ^= ((value << 49 | value >> 15) ^ (value << 24 | value >> 40)) & _MASK
        value = value * 0x9FB21C651E98DF25 & _MASK
        value ^= (value >> 35) + size
        value = value * 0x9FB21C651E98DF25 & _MASK
        return value ^ (value >> 28)
    if size:
        value = data[0] << 16 | data[size >> 1] << 24 | data[-1] | size << 8
        return _avalanche_of_64(value ^ _half(_SECRET, 0) ^ _half(_SECRET, 4))
    return _avalanche_of_64(_word(_SECRET, 56) ^ _word(_SECRET, 64))


def _mix(data: bytes, at: int, secret: int) -> int:
    return _fold(_word(data, at) ^ _word(_SECRET, secret), _word(data, at + 8) ^ _word(_SECRET, secret + 8))


def xxh3_64(data: bytes) -> int:
    """XXH3-64 of up to 128 bytes."""
    size = len(data)
    if size > MOST:
        raise ValueError(f"{size} bytes, at most {MOST}")
    if size <= 16:
        return _short(data)
    value = size * _P64[0]
    for step in range((size - 1) // 32 + 1):
        value += _mix(data, 16 * step, 32 * step) + _mix(data, size - 16 * (step + 1), 32 * step + 16)
    return _avalanche(value & _MASK)


def _find_hash() -> Callable[[bytes], int]:
    try:
        return importlib.import_module("xxhash").xxh3_64_intdigest  # type: ignore[no-any-return]
    except ImportError:
        return xxh3_64


_hash = _find_hash()


@lru_cache(maxsize=1 << 16)
def hash_of(text: str) -> int:
    """Of a target or a key; what is beyond 128 bytes is no name, and does not count."""
    return _hash(text.encode()[:MOST])


def weight(target: int, key: int) -> int:
    """Of their hashes."""
    return _avalanche_of_64(target ^ key)
