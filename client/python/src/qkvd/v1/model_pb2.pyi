from qkvd.v1 import tensor_pb2 as _tensor_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from typing import ClassVar as _ClassVar, Iterable as _Iterable, Mapping as _Mapping, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class Rope(_message.Message):
    __slots__ = ("theta", "width", "pairing", "scaling", "factor", "original_max_position", "low_freq_factor", "high_freq_factor", "beta_fast", "beta_slow", "attention_factor")
    class Scaling(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
        __slots__ = ()
        SCALING_NONE: _ClassVar[Rope.Scaling]
        SCALING_LINEAR: _ClassVar[Rope.Scaling]
        SCALING_DYNAMIC: _ClassVar[Rope.Scaling]
        SCALING_YARN: _ClassVar[Rope.Scaling]
        SCALING_LLAMA3: _ClassVar[Rope.Scaling]
    SCALING_NONE: Rope.Scaling
    SCALING_LINEAR: Rope.Scaling
    SCALING_DYNAMIC: Rope.Scaling
    SCALING_YARN: Rope.Scaling
    SCALING_LLAMA3: Rope.Scaling
    class Pairing(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
        __slots__ = ()
        PAIRING_HALF: _ClassVar[Rope.Pairing]
        PAIRING_INTERLEAVED: _ClassVar[Rope.Pairing]
    PAIRING_HALF: Rope.Pairing
    PAIRING_INTERLEAVED: Rope.Pairing
    THETA_FIELD_NUMBER: _ClassVar[int]
    WIDTH_FIELD_NUMBER: _ClassVar[int]
    PAIRING_FIELD_NUMBER: _ClassVar[int]
    SCALING_FIELD_NUMBER: _ClassVar[int]
    FACTOR_FIELD_NUMBER: _ClassVar[int]
    ORIGINAL_MAX_POSITION_FIELD_NUMBER: _ClassVar[int]
    LOW_FREQ_FACTOR_FIELD_NUMBER: _ClassVar[int]
    HIGH_FREQ_FACTOR_FIELD_NUMBER: _ClassVar[int]
    BETA_FAST_FIELD_NUMBER: _ClassVar[int]
    BETA_SLOW_FIELD_NUMBER: _ClassVar[int]
    ATTENTION_FACTOR_FIELD_NUMBER: _ClassVar[int]
    theta: float
    width: int
    pairing: Rope.Pairing
    scaling: Rope.Scaling
    factor: float
    original_max_position: int
    low_freq_factor: float
    high_freq_factor: float
    beta_fast: float
    beta_slow: float
    attention_factor: float
    def __init__(self, theta: _Optional[float] = ..., width: _Optional[int] = ..., pairing: _Optional[_Union[Rope.Pairing, str]] = ..., scaling: _Optional[_Union[Rope.Scaling, str]] = ..., factor: _Optional[float] = ..., original_max_position: _Optional[int] = ..., low_freq_factor: _Optional[float] = ..., high_freq_factor: _Optional[float] = ..., beta_fast: _Optional[float] = ..., beta_slow: _Optional[float] = ..., attention_factor: _Optional[float] = ...) -> None: ...

class CodecPolicy(_message.Message):
    __slots__ = ("codec", "bits_k", "bits_v", "recent_window", "anchor", "anchor_every", "anchor_threshold", "gqa_compensation", "self_calibration", "low_rank", "rank", "sink_tokens", "codec_v", "kivi", "turboquant", "polarquant", "turboquant_ip", "low_rank_stage", "delta_stage", "turboquant_outliers", "turboquant_ip_outliers")
    CODEC_FIELD_NUMBER: _ClassVar[int]
    BITS_K_FIELD_NUMBER: _ClassVar[int]
    BITS_V_FIELD_NUMBER: _ClassVar[int]
    RECENT_WINDOW_FIELD_NUMBER: _ClassVar[int]
    ANCHOR_FIELD_NUMBER: _ClassVar[int]
    ANCHOR_EVERY_FIELD_NUMBER: _ClassVar[int]
    ANCHOR_THRESHOLD_FIELD_NUMBER: _ClassVar[int]
    GQA_COMPENSATION_FIELD_NUMBER: _ClassVar[int]
    SELF_CALIBRATION_FIELD_NUMBER: _ClassVar[int]
    LOW_RANK_FIELD_NUMBER: _ClassVar[int]
    RANK_FIELD_NUMBER: _ClassVar[int]
    SINK_TOKENS_FIELD_NUMBER: _ClassVar[int]
    CODEC_V_FIELD_NUMBER: _ClassVar[int]
    KIVI_FIELD_NUMBER: _ClassVar[int]
    TURBOQUANT_FIELD_NUMBER: _ClassVar[int]
    POLARQUANT_FIELD_NUMBER: _ClassVar[int]
    TURBOQUANT_IP_FIELD_NUMBER: _ClassVar[int]
    LOW_RANK_STAGE_FIELD_NUMBER: _ClassVar[int]
    DELTA_STAGE_FIELD_NUMBER: _ClassVar[int]
    TURBOQUANT_OUTLIERS_FIELD_NUMBER: _ClassVar[int]
    TURBOQUANT_IP_OUTLIERS_FIELD_NUMBER: _ClassVar[int]
    codec: str
    bits_k: float
    bits_v: float
    recent_window: int
    anchor: str
    anchor_every: int
    anchor_threshold: float
    gqa_compensation: bool
    self_calibration: bool
    low_rank: str
    rank: int
    sink_tokens: int
    codec_v: str
    kivi: Kivi
    turboquant: Turboquant
    polarquant: Polarquant
    turboquant_ip: Turboquant
    low_rank_stage: LowRankStage
    delta_stage: DeltaStage
    turboquant_outliers: OutlierChannels
    turboquant_ip_outliers: OutlierChannels
    def __init__(self, codec: _Optional[str] = ..., bits_k: _Optional[float] = ..., bits_v: _Optional[float] = ..., recent_window: _Optional[int] = ..., anchor: _Optional[str] = ..., anchor_every: _Optional[int] = ..., anchor_threshold: _Optional[float] = ..., gqa_compensation: bool = ..., self_calibration: bool = ..., low_rank: _Optional[str] = ..., rank: _Optional[int] = ..., sink_tokens: _Optional[int] = ..., codec_v: _Optional[str] = ..., kivi: _Optional[_Union[Kivi, _Mapping]] = ..., turboquant: _Optional[_Union[Turboquant, _Mapping]] = ..., polarquant: _Optional[_Union[Polarquant, _Mapping]] = ..., turboquant_ip: _Optional[_Union[Turboquant, _Mapping]] = ..., low_rank_stage: _Optional[_Union[LowRankStage, _Mapping]] = ..., delta_stage: _Optional[_Union[DeltaStage, _Mapping]] = ..., turboquant_outliers: _Optional[_Union[OutlierChannels, _Mapping]] = ..., turboquant_ip_outliers: _Optional[_Union[OutlierChannels, _Mapping]] = ...) -> None: ...

class Kivi(_message.Message):
    __slots__ = ("q_group_size",)
    Q_GROUP_SIZE_FIELD_NUMBER: _ClassVar[int]
    q_group_size: int
    def __init__(self, q_group_size: _Optional[int] = ...) -> None: ...

class Turboquant(_message.Message):
    __slots__ = ("rotation",)
    class Rotation(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
        __slots__ = ()
        ROTATION_UNSPECIFIED: _ClassVar[Turboquant.Rotation]
        ROTATION_HADAMARD: _ClassVar[Turboquant.Rotation]
        ROTATION_DENSE: _ClassVar[Turboquant.Rotation]
    ROTATION_UNSPECIFIED: Turboquant.Rotation
    ROTATION_HADAMARD: Turboquant.Rotation
    ROTATION_DENSE: Turboquant.Rotation
    ROTATION_FIELD_NUMBER: _ClassVar[int]
    rotation: Turboquant.Rotation
    def __init__(self, rotation: _Optional[_Union[Turboquant.Rotation, str]] = ...) -> None: ...

class Polarquant(_message.Message):
    __slots__ = ("row_norms",)
    class RowNorms(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
        __slots__ = ()
        ROW_NORMS_UNSPECIFIED: _ClassVar[Polarquant.RowNorms]
        ROW_NORMS_STORED: _ClassVar[Polarquant.RowNorms]
        ROW_NORMS_NONE: _ClassVar[Polarquant.RowNorms]
    ROW_NORMS_UNSPECIFIED: Polarquant.RowNorms
    ROW_NORMS_STORED: Polarquant.RowNorms
    ROW_NORMS_NONE: Polarquant.RowNorms
    ROW_NORMS_FIELD_NUMBER: _ClassVar[int]
    row_norms: Polarquant.RowNorms
    def __init__(self, row_norms: _Optional[_Union[Polarquant.RowNorms, str]] = ...) -> None: ...

class LowRankStage(_message.Message):
    __slots__ = ("rank",)
    RANK_FIELD_NUMBER: _ClassVar[int]
    rank: int
    def __init__(self, rank: _Optional[int] = ...) -> None: ...

class DeltaStage(_message.Message):
    __slots__ = ("anchor_every", "anchor_threshold")
    ANCHOR_EVERY_FIELD_NUMBER: _ClassVar[int]
    ANCHOR_THRESHOLD_FIELD_NUMBER: _ClassVar[int]
    anchor_every: int
    anchor_threshold: int
    def __init__(self, anchor_every: _Optional[int] = ..., anchor_threshold: _Optional[int] = ...) -> None: ...

class OutlierChannels(_message.Message):
    __slots__ = ("n_out",)
    N_OUT_FIELD_NUMBER: _ClassVar[int]
    n_out: int
    def __init__(self, n_out: _Optional[int] = ...) -> None: ...

class LayerOverride(_message.Message):
    __slots__ = ("layer", "sliding_window", "soft_cap", "policy")
    LAYER_FIELD_NUMBER: _ClassVar[int]
    SLIDING_WINDOW_FIELD_NUMBER: _ClassVar[int]
    SOFT_CAP_FIELD_NUMBER: _ClassVar[int]
    POLICY_FIELD_NUMBER: _ClassVar[int]
    layer: int
    sliding_window: int
    soft_cap: float
    policy: CodecPolicy
    def __init__(self, layer: _Optional[int] = ..., sliding_window: _Optional[int] = ..., soft_cap: _Optional[float] = ..., policy: _Optional[_Union[CodecPolicy, _Mapping]] = ...) -> None: ...

class Model(_message.Message):
    __slots__ = ("name", "layers", "kv_heads", "q_heads", "key_dim", "value_dim", "dtype", "rope", "scale", "sliding_window", "soft_cap", "policy", "overrides", "calibration", "calibration_trusted", "calibration_kept", "tenant", "shared")
    NAME_FIELD_NUMBER: _ClassVar[int]
    LAYERS_FIELD_NUMBER: _ClassVar[int]
    KV_HEADS_FIELD_NUMBER: _ClassVar[int]
    Q_HEADS_FIELD_NUMBER: _ClassVar[int]
    KEY_DIM_FIELD_NUMBER: _ClassVar[int]
    VALUE_DIM_FIELD_NUMBER: _ClassVar[int]
    DTYPE_FIELD_NUMBER: _ClassVar[int]
    ROPE_FIELD_NUMBER: _ClassVar[int]
    SCALE_FIELD_NUMBER: _ClassVar[int]
    SLIDING_WINDOW_FIELD_NUMBER: _ClassVar[int]
    SOFT_CAP_FIELD_NUMBER: _ClassVar[int]
    POLICY_FIELD_NUMBER: _ClassVar[int]
    OVERRIDES_FIELD_NUMBER: _ClassVar[int]
    CALIBRATION_FIELD_NUMBER: _ClassVar[int]
    CALIBRATION_TRUSTED_FIELD_NUMBER: _ClassVar[int]
    CALIBRATION_KEPT_FIELD_NUMBER: _ClassVar[int]
    TENANT_FIELD_NUMBER: _ClassVar[int]
    SHARED_FIELD_NUMBER: _ClassVar[int]
    name: str
    layers: int
    kv_heads: int
    q_heads: int
    key_dim: int
    value_dim: int
    dtype: _tensor_pb2.DType
    rope: Rope
    scale: float
    sliding_window: int
    soft_cap: float
    policy: CodecPolicy
    overrides: _containers.RepeatedCompositeFieldContainer[LayerOverride]
    calibration: bytes
    calibration_trusted: bool
    calibration_kept: bool
    tenant: str
    shared: bool
    def __init__(self, name: _Optional[str] = ..., layers: _Optional[int] = ..., kv_heads: _Optional[int] = ..., q_heads: _Optional[int] = ..., key_dim: _Optional[int] = ..., value_dim: _Optional[int] = ..., dtype: _Optional[_Union[_tensor_pb2.DType, str]] = ..., rope: _Optional[_Union[Rope, _Mapping]] = ..., scale: _Optional[float] = ..., sliding_window: _Optional[int] = ..., soft_cap: _Optional[float] = ..., policy: _Optional[_Union[CodecPolicy, _Mapping]] = ..., overrides: _Optional[_Iterable[_Union[LayerOverride, _Mapping]]] = ..., calibration: _Optional[bytes] = ..., calibration_trusted: bool = ..., calibration_kept: bool = ..., tenant: _Optional[str] = ..., shared: bool = ...) -> None: ...

class CalibrationState(_message.Message):
    __slots__ = ("source", "version", "since_unix_ms", "tokens", "trusted", "tried", "attention_error", "attention_error_data_free", "parts", "parts_data_free", "on_trial", "refused", "refusal", "watched_error", "watched_error_data_free", "rope_doubt", "archive_refused")
    class Source(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
        __slots__ = ()
        SOURCE_NONE: _ClassVar[CalibrationState.Source]
        SOURCE_LEARNT: _ClassVar[CalibrationState.Source]
        SOURCE_REGISTERED: _ClassVar[CalibrationState.Source]
        SOURCE_FILE: _ClassVar[CalibrationState.Source]
        SOURCE_STORED: _ClassVar[CalibrationState.Source]
    SOURCE_NONE: CalibrationState.Source
    SOURCE_LEARNT: CalibrationState.Source
    SOURCE_REGISTERED: CalibrationState.Source
    SOURCE_FILE: CalibrationState.Source
    SOURCE_STORED: CalibrationState.Source
    SOURCE_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    SINCE_UNIX_MS_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    TRUSTED_FIELD_NUMBER: _ClassVar[int]
    TRIED_FIELD_NUMBER: _ClassVar[int]
    ATTENTION_ERROR_FIELD_NUMBER: _ClassVar[int]
    ATTENTION_ERROR_DATA_FREE_FIELD_NUMBER: _ClassVar[int]
    PARTS_FIELD_NUMBER: _ClassVar[int]
    PARTS_DATA_FREE_FIELD_NUMBER: _ClassVar[int]
    ON_TRIAL_FIELD_NUMBER: _ClassVar[int]
    REFUSED_FIELD_NUMBER: _ClassVar[int]
    REFUSAL_FIELD_NUMBER: _ClassVar[int]
    WATCHED_ERROR_FIELD_NUMBER: _ClassVar[int]
    WATCHED_ERROR_DATA_FREE_FIELD_NUMBER: _ClassVar[int]
    ROPE_DOUBT_FIELD_NUMBER: _ClassVar[int]
    ARCHIVE_REFUSED_FIELD_NUMBER: _ClassVar[int]
    source: CalibrationState.Source
    version: int
    since_unix_ms: int
    tokens: int
    trusted: bool
    tried: bool
    attention_error: float
    attention_error_data_free: float
    parts: int
    parts_data_free: int
    on_trial: int
    refused: int
    refusal: str
    watched_error: float
    watched_error_data_free: float
    rope_doubt: str
    archive_refused: bool
    def __init__(self, source: _Optional[_Union[CalibrationState.Source, str]] = ..., version: _Optional[int] = ..., since_unix_ms: _Optional[int] = ..., tokens: _Optional[int] = ..., trusted: bool = ..., tried: bool = ..., attention_error: _Optional[float] = ..., attention_error_data_free: _Optional[float] = ..., parts: _Optional[int] = ..., parts_data_free: _Optional[int] = ..., on_trial: _Optional[int] = ..., refused: _Optional[int] = ..., refusal: _Optional[str] = ..., watched_error: _Optional[float] = ..., watched_error_data_free: _Optional[float] = ..., rope_doubt: _Optional[str] = ..., archive_refused: bool = ...) -> None: ...

class RegisterModelRequest(_message.Message):
    __slots__ = ("model",)
    MODEL_FIELD_NUMBER: _ClassVar[int]
    model: Model
    def __init__(self, model: _Optional[_Union[Model, _Mapping]] = ...) -> None: ...

class RegisterModelResponse(_message.Message):
    __slots__ = ("model", "calibration", "tenant", "shared")
    MODEL_FIELD_NUMBER: _ClassVar[int]
    CALIBRATION_FIELD_NUMBER: _ClassVar[int]
    TENANT_FIELD_NUMBER: _ClassVar[int]
    SHARED_FIELD_NUMBER: _ClassVar[int]
    model: Model
    calibration: CalibrationState
    tenant: str
    shared: bool
    def __init__(self, model: _Optional[_Union[Model, _Mapping]] = ..., calibration: _Optional[_Union[CalibrationState, _Mapping]] = ..., tenant: _Optional[str] = ..., shared: bool = ...) -> None: ...

class GetModelRequest(_message.Message):
    __slots__ = ("name",)
    NAME_FIELD_NUMBER: _ClassVar[int]
    name: str
    def __init__(self, name: _Optional[str] = ...) -> None: ...

class GetModelResponse(_message.Message):
    __slots__ = ("model", "sessions", "calibration", "tenant", "shared")
    MODEL_FIELD_NUMBER: _ClassVar[int]
    SESSIONS_FIELD_NUMBER: _ClassVar[int]
    CALIBRATION_FIELD_NUMBER: _ClassVar[int]
    TENANT_FIELD_NUMBER: _ClassVar[int]
    SHARED_FIELD_NUMBER: _ClassVar[int]
    model: Model
    sessions: int
    calibration: CalibrationState
    tenant: str
    shared: bool
    def __init__(self, model: _Optional[_Union[Model, _Mapping]] = ..., sessions: _Optional[int] = ..., calibration: _Optional[_Union[CalibrationState, _Mapping]] = ..., tenant: _Optional[str] = ..., shared: bool = ...) -> None: ...

class ListModelsRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class ListModelsResponse(_message.Message):
    __slots__ = ("models",)
    MODELS_FIELD_NUMBER: _ClassVar[int]
    models: _containers.RepeatedCompositeFieldContainer[GetModelResponse]
    def __init__(self, models: _Optional[_Iterable[_Union[GetModelResponse, _Mapping]]] = ...) -> None: ...

class GetCalibrationRequest(_message.Message):
    __slots__ = ("model", "version")
    MODEL_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    model: str
    version: int
    def __init__(self, model: _Optional[str] = ..., version: _Optional[int] = ...) -> None: ...

class GetCalibrationResponse(_message.Message):
    __slots__ = ("chunk",)
    CHUNK_FIELD_NUMBER: _ClassVar[int]
    chunk: bytes
    def __init__(self, chunk: _Optional[bytes] = ...) -> None: ...
