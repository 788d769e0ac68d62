"""What a model is: the geometry of its KV cache, its RoPE, and how its rows are coded.

Fields that are left out take the daemon's defaults; proto/qkv/v1/model.proto has the limits of each.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, TypeVar

from qkvd.arrays import dtype_number
from qkvd.errors import Error, InvalidArgument
from qkvd.v1 import kv_cache_pb2, model_pb2

_T = TypeVar("_T")
_M = TypeVar("_M")
_SCALINGS = {
    "none": model_pb2.Rope.SCALING_NONE,
    "linear": model_pb2.Rope.SCALING_LINEAR,
    "dynamic": model_pb2.Rope.SCALING_DYNAMIC,
    "yarn": model_pb2.Rope.SCALING_YARN,
    "llama3": model_pb2.Rope.SCALING_LLAMA3,
}
_PRECISIONS = {
    None: kv_cache_pb2.AttendOptions.PRECISION_UNSPECIFIED,
    "fp32": kv_cache_pb2.AttendOptions.PRECISION_FP32,
    "int16": kv_cache_pb2.AttendOptions.PRECISION_INT16,
    "int8": kv_cache_pb2.AttendOptions.PRECISION_INT8,
}


def _refused(message: Callable[[_T], _M]) -> Callable[[_T], _M]:
    """What a message has no place for is InvalidArgument."""

    @functools.wraps(message)
    def checked(of: _T) -> _M:
        try:
            return message(of)
        except Error:
            raise
        except (TypeError, ValueError) as error:
            raise InvalidArgument(f"{type(of).__name__}: {error}") from error

    return checked


@dataclass(frozen=True, kw_only=True)
class Rope:
    """Rotary position embedding, with the names of Hugging Face's `rope_scaling`."""

    theta: float  # the base
    width: int = 0  # coordinates that turn, the first ones of a row; 0: all
    interleaved: bool = False  # 2 i turns with 2 i + 1, instead of i with i + width / 2
    scaling: Literal["none", "linear", "dynamic", "yarn", "llama3"] = "none"
    factor: float = 0
    original_max_position: int = 0
    low_freq_factor: float = 0
    high_freq_factor: float = 0
    beta_fast: float = 0
    beta_slow: float = 0
    attention_factor: float = 0

    @_refused
    def message(self) -> model_pb2.Rope:
        """The message of the wire."""
        if self.scaling not in _SCALINGS:
            raise InvalidArgument(f"rope.scaling is {self.scaling!r}, allowed are {', '.join(_SCALINGS)}")
        return model_pb2.Rope(
            theta=self.theta,
            width=self.width,
            pairing=model_pb2.Rope.PAIRING_INTERLEAVED if self.interleaved else model_pb2.Rope.PAIRING_HALF,
            scaling=_SCALINGS[self.scaling],
            factor=self.factor,
            original_max_position=self.original_max_position,
            low_freq_factor=self.low_freq_factor,
            high_freq_factor=self.high_freq_factor,
            beta_fast=self.beta_fast,
            beta_slow=self.beta_slow,
            attention_factor=self.attention_factor,
        )


Codec = Literal[
    "",
    "embedded",
    "exact",
    "kivi",
    "turboquant",
    "turboquant-ip",
    "polarquant",
    "running-u8",
    "pq",
    "int8",
    "commvq",
    "turboquant-outliers",
    "turboquant-ip-outliers",
    "turboquant-low-rank",
    "kivi-low-rank",
    "turboquant-delta",
    "int8-delta",
    "polarquant-low-rank",
    "int8-low-rank",
    "running-u8-low-rank",
    "kivi-delta",
    "polarquant-delta",
    "turboquant-outliers-delta",
    "ecsq",
]
Rotation = Literal["", "hadamard", "dense"]

_ROTATIONS = {"hadamard": model_pb2.Turboquant.ROTATION_HADAMARD, "dense": model_pb2.Turboquant.ROTATION_DENSE}
_ROW_NORMS = {"stored": model_pb2.Polarquant.ROW_NORMS_STORED, "none": model_pb2.Polarquant.ROW_NORMS_NONE}


def _turboquant(field: str, rotation: str) -> model_pb2.Turboquant | None:
    return model_pb2.Turboquant(rotation=_said(field, rotation, _ROTATIONS)) if rotation else None


def _outliers(n_out: int) -> model_pb2.OutlierChannels | None:
    return model_pb2.OutlierChannels(n_out=n_out) if n_out else None


def _low_rank(rank: int) -> model_pb2.LowRankStage | None:
    return model_pb2.LowRankStage(rank=rank) if rank else None


def _delta(every: int, threshold: int) -> model_pb2.DeltaStage | None:
    return model_pb2.DeltaStage(anchor_every=every, anchor_threshold=threshold) if every or threshold else None


def _said(field: str, value: str, known: dict[str, _T]) -> _T:
    if value not in known:
        raise InvalidArgument(f"{field} is {value!r}, known are {' and '.join(known)}")
    return known[value]


@dataclass(frozen=True, kw_only=True)
class Policy:
    """How rows are coded. What is left out takes the next level's: session, then model, then the daemon's options.

    Fields that begin with the name of a codec or of a stage are its own parameters; left out they are its defaults. The
    daemon refuses those of a codec that is neither `codec` nor `codec_v`, nor in one of them.
    """

    codec: Codec = ""  # exact: rows stay as they came, in the model's dtype; others: docs/codecs.md
    codec_v: Codec = ""  # of values, where that of keys is another one
    kivi_q_group_size: int = 0  # 32 or 64
    turboquant_rotation: Rotation = ""
    turboquant_ip_rotation: Rotation = ""
    polarquant_row_norms: Literal["", "stored", "none"] = ""
    turboquant_outliers_n_out: int = 0  # channels, a multiple of 8
    turboquant_ip_outliers_n_out: int = 0
    low_rank_stage_rank: int = 0  # 1 to 16; of turboquant-low-rank and the others
    delta_stage_anchor_every: int = 0  # 8, 16, 32 or 64; of turboquant-delta and the others
    delta_stage_anchor_threshold: int = 0  # thousandths
    bits_k: float = 0  # code bits a coordinate, in eighths up to 8
    bits_v: float = 0
    recent_window: int | None = None  # newest tokens that are kept exact
    anchor: str = ""  # "none", "mean", "group", "chain", "auto"
    anchor_every: int = 0
    anchor_threshold: float = 0
    gqa_compensation: bool | None = None
    self_calibration: bool | None = None
    low_rank: str = ""  # "none", "predictor", "correction", "auto"
    rank: int = 0
    sink_tokens: int | None = None

    @_refused
    def message(self) -> model_pb2.CodecPolicy:
        """The message of the wire."""
        return model_pb2.CodecPolicy(
            codec=self.codec,
            codec_v=self.codec_v,
            kivi=model_pb2.Kivi(q_group_size=self.kivi_q_group_size) if self.kivi_q_group_size else None,
            turboquant=_turboquant("turboquant_rotation", self.turboquant_rotation),
            turboquant_ip=_turboquant("turboquant_ip_rotation", self.turboquant_ip_rotation),
            polarquant=model_pb2.Polarquant(row_norms=_said("polarquant_row_norms", self.polarquant_row_norms, _ROW_NORMS))
            if self.polarquant_row_norms
            else None,
            turboquant_outliers=_outliers(self.turboquant_outliers_n_out),
            turboquant_ip_outliers=_outliers(self.turboquant_ip_outliers_n_out),
            low_rank_stage=_low_rank(self.low_rank_stage_rank),
            delta_stage=_delta(self.delta_stage_anchor_every, self.delta_stage_anchor_threshold),
            bits_k=self.bits_k,
            bits_v=self.bits_v,
            recent_window=self.recent_window,
            anchor=self.anchor,
            anchor_every=self.anchor_every,
            anchor_threshold=self.anchor_threshold,
            gqa_compensation=self.gqa_compensation,  # type: ignore[arg-type]
            self_calibration=self.self_calibration,  # type: ignore[arg-type]
            low_rank=self.low_rank,
            rank=self.rank,
            sink_tokens=self.sink_tokens,
        )


EXACT = Policy(codec="exact")


@dataclass(frozen=True, kw_only=True)
class LayerOverride:
    """What differs in one layer; its policy goes before a session's."""

    layer: int
    sliding_window: int = 0
    soft_cap: float = 0
    policy: Policy | None = None


@dataclass(frozen=True, kw_only=True)
class Model:
    """The geometry of a model's KV cache.

    Keys are [tokens, kv_heads, key_dim], values [tokens, kv_heads, value_dim], queries [queries, q_heads, key_dim]; query
    head h reads KV head h / (q_heads / kv_heads). `dtype` is what exact rows are kept in: "fp32", "fp16" or "bf16".
    """

    name: str
    layers: int
    kv_heads: int
    q_heads: int
    key_dim: int
    value_dim: int
    dtype: Literal["fp32", "fp16", "bf16"] = "fp16"
    rope: Rope | None = None
    scale: float = 0  # of scores; 0: 1 / sqrt(key_dim)
    sliding_window: int = 0  # 0: none
    soft_cap: float = 0  # 0: none
    policy: Policy | None = None
    overrides: tuple[LayerOverride, ...] = ()  # at most one a layer, in ascending order
    calibration: bytes = b""  # a calibration file
    calibration_trusted: bool = False  # used at once, neither tried nor withdrawn
    shared: bool = False  # with tenants that have none of its name; for a client of the tenant "default" alone

    @_refused
    def message(self) -> model_pb2.Model:
        """The message of the wire."""
        return model_pb2.Model(
            name=self.name,
            layers=self.layers,
            kv_heads=self.kv_heads,
            q_heads=self.q_heads,
            key_dim=self.key_dim,
            value_dim=self.value_dim,
            dtype=dtype_number(self.dtype),
            rope=self.rope.message() if self.rope else None,
            scale=self.scale,
            sliding_window=self.sliding_window,
            soft_cap=self.soft_cap,
            policy=self.policy.message() if self.policy else None,
            overrides=[
                model_pb2.LayerOverride(
                    layer=override.layer,
                    sliding_window=override.sliding_window,
                    soft_cap=override.soft_cap,
                    policy=override.policy.message() if override.policy else None,
                )
                for override in self.overrides
            ],
            calibration=self.calibration,
            calibration_trusted=self.calibration_trusted,
            shared=self.shared,
        )


@dataclass(frozen=True, kw_only=True)
class AttendOptions:
    """How queries attend. 0: the model's. Query i stands at position + causal_offset + i.

    It sees the positions that are at most its own (unless `not_causal`), within `sliding_window`, and inside [begin, end);
    `end` 0 is the end of the layer.
    """

    scale: float = 0
    sliding_window: int = 0
    soft_cap: float = 0
    begin: int = 0
    end: int = 0
    causal_offset: int = 0
    not_causal: bool = False
    precision: Literal["fp32", "int16", "int8"] | None = None  # None: integers as fine as the codes need

    @_refused
    def message(self) -> kv_cache_pb2.AttendOptions:
        """The message of the wire."""
        if self.precision not in _PRECISIONS:
            raise InvalidArgument(f'options.precision is {self.precision!r}, allowed are "fp32", "int16" and "int8"')
        message = kv_cache_pb2.AttendOptions(
            scale=self.scale,
            sliding_window=self.sliding_window,
            soft_cap=self.soft_cap,
            causal_offset=self.causal_offset,
            not_causal=self.not_causal,
            precision=_PRECISIONS[self.precision],
        )
        if self.begin or self.end:
            message.range.begin, message.range.end = self.begin, self.end
        return message
