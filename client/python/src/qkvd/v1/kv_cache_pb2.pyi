from qkvd.v1 import model_pb2 as _model_pb2
from qkvd.v1 import tensor_pb2 as _tensor_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from typing import ClassVar as _ClassVar, Iterable as _Iterable, Mapping as _Mapping, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class Purpose(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    PURPOSE_UNSPECIFIED: _ClassVar[Purpose]
    PURPOSE_ATTEND: _ClassVar[Purpose]
    PURPOSE_FETCH: _ClassVar[Purpose]

class Durability(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    DURABILITY_UNSPECIFIED: _ClassVar[Durability]
    DURABILITY_MEMORY: _ClassVar[Durability]
    DURABILITY_ASYNC: _ClassVar[Durability]
    DURABILITY_SYNC: _ClassVar[Durability]

class Retention(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    RETENTION_UNSPECIFIED: _ClassVar[Retention]
    RETENTION_KEEP: _ClassVar[Retention]
    RETENTION_EVICT: _ClassVar[Retention]

class RowLayout(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    ROW_LAYOUT_UNSPECIFIED: _ClassVar[RowLayout]
    ROW_LAYOUT_TOKENS_FIRST: _ClassVar[RowLayout]
    ROW_LAYOUT_HEADS_FIRST: _ClassVar[RowLayout]
PURPOSE_UNSPECIFIED: Purpose
PURPOSE_ATTEND: Purpose
PURPOSE_FETCH: Purpose
DURABILITY_UNSPECIFIED: Durability
DURABILITY_MEMORY: Durability
DURABILITY_ASYNC: Durability
DURABILITY_SYNC: Durability
RETENTION_UNSPECIFIED: Retention
RETENTION_KEEP: Retention
RETENTION_EVICT: Retention
ROW_LAYOUT_UNSPECIFIED: RowLayout
ROW_LAYOUT_TOKENS_FIRST: RowLayout
ROW_LAYOUT_HEADS_FIRST: RowLayout

class OpenSessionRequest(_message.Message):
    __slots__ = ("session", "model", "tenant", "purpose", "policy", "first_position", "durability", "max_attention_error", "ttl_ms", "tier_bits", "keep_full", "salt", "prefix_token_ids", "retention")
    SESSION_FIELD_NUMBER: _ClassVar[int]
    MODEL_FIELD_NUMBER: _ClassVar[int]
    TENANT_FIELD_NUMBER: _ClassVar[int]
    PURPOSE_FIELD_NUMBER: _ClassVar[int]
    POLICY_FIELD_NUMBER: _ClassVar[int]
    FIRST_POSITION_FIELD_NUMBER: _ClassVar[int]
    DURABILITY_FIELD_NUMBER: _ClassVar[int]
    MAX_ATTENTION_ERROR_FIELD_NUMBER: _ClassVar[int]
    TTL_MS_FIELD_NUMBER: _ClassVar[int]
    TIER_BITS_FIELD_NUMBER: _ClassVar[int]
    KEEP_FULL_FIELD_NUMBER: _ClassVar[int]
    SALT_FIELD_NUMBER: _ClassVar[int]
    PREFIX_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    RETENTION_FIELD_NUMBER: _ClassVar[int]
    session: str
    model: str
    tenant: str
    purpose: Purpose
    policy: _model_pb2.CodecPolicy
    first_position: int
    durability: Durability
    max_attention_error: float
    ttl_ms: int
    tier_bits: float
    keep_full: bool
    salt: bytes
    prefix_token_ids: _containers.RepeatedScalarFieldContainer[int]
    retention: Retention
    def __init__(self, session: _Optional[str] = ..., model: _Optional[str] = ..., tenant: _Optional[str] = ..., purpose: _Optional[_Union[Purpose, str]] = ..., policy: _Optional[_Union[_model_pb2.CodecPolicy, _Mapping]] = ..., first_position: _Optional[int] = ..., durability: _Optional[_Union[Durability, str]] = ..., max_attention_error: _Optional[float] = ..., ttl_ms: _Optional[int] = ..., tier_bits: _Optional[float] = ..., keep_full: bool = ..., salt: _Optional[bytes] = ..., prefix_token_ids: _Optional[_Iterable[int]] = ..., retention: _Optional[_Union[Retention, str]] = ...) -> None: ...

class OpenSessionResponse(_message.Message):
    __slots__ = ("info", "matched_tokens")
    INFO_FIELD_NUMBER: _ClassVar[int]
    MATCHED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    info: SessionInfo
    matched_tokens: int
    def __init__(self, info: _Optional[_Union[SessionInfo, _Mapping]] = ..., matched_tokens: _Optional[int] = ...) -> None: ...

class CloseSessionRequest(_message.Message):
    __slots__ = ("session", "keep")
    SESSION_FIELD_NUMBER: _ClassVar[int]
    KEEP_FIELD_NUMBER: _ClassVar[int]
    session: str
    keep: bool
    def __init__(self, session: _Optional[str] = ..., keep: bool = ...) -> None: ...

class CloseSessionResponse(_message.Message):
    __slots__ = ("bytes_freed",)
    BYTES_FREED_FIELD_NUMBER: _ClassVar[int]
    bytes_freed: int
    def __init__(self, bytes_freed: _Optional[int] = ...) -> None: ...

class GetSessionRequest(_message.Message):
    __slots__ = ("session", "token_ids")
    SESSION_FIELD_NUMBER: _ClassVar[int]
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    session: str
    token_ids: _tensor_pb2.TokenRange
    def __init__(self, session: _Optional[str] = ..., token_ids: _Optional[_Union[_tensor_pb2.TokenRange, _Mapping]] = ...) -> None: ...

class SessionInfo(_message.Message):
    __slots__ = ("session", "model", "tenant", "purpose", "policy", "first_position", "durability", "lengths", "tokens_coded", "tokens_exact", "bytes_coded", "bytes_exact", "bytes_fp16", "bits_per_coordinate", "created_unix_ms", "last_used_unix_ms", "durable", "bytes_overhead", "tier_bits", "keep_full", "attention_error", "max_attention_error", "contract_pages", "contract_missed", "tokens_cold", "bytes_stored", "bytes_shared", "ttl_ms", "pinned", "calibration", "calibration_since_unix_ms", "watched_error", "watched_error_data_free", "prefix_root", "retention", "whole", "model_tenant", "token_ids")
    SESSION_FIELD_NUMBER: _ClassVar[int]
    MODEL_FIELD_NUMBER: _ClassVar[int]
    TENANT_FIELD_NUMBER: _ClassVar[int]
    PURPOSE_FIELD_NUMBER: _ClassVar[int]
    POLICY_FIELD_NUMBER: _ClassVar[int]
    FIRST_POSITION_FIELD_NUMBER: _ClassVar[int]
    DURABILITY_FIELD_NUMBER: _ClassVar[int]
    LENGTHS_FIELD_NUMBER: _ClassVar[int]
    TOKENS_CODED_FIELD_NUMBER: _ClassVar[int]
    TOKENS_EXACT_FIELD_NUMBER: _ClassVar[int]
    BYTES_CODED_FIELD_NUMBER: _ClassVar[int]
    BYTES_EXACT_FIELD_NUMBER: _ClassVar[int]
    BYTES_FP16_FIELD_NUMBER: _ClassVar[int]
    BITS_PER_COORDINATE_FIELD_NUMBER: _ClassVar[int]
    CREATED_UNIX_MS_FIELD_NUMBER: _ClassVar[int]
    LAST_USED_UNIX_MS_FIELD_NUMBER: _ClassVar[int]
    DURABLE_FIELD_NUMBER: _ClassVar[int]
    BYTES_OVERHEAD_FIELD_NUMBER: _ClassVar[int]
    TIER_BITS_FIELD_NUMBER: _ClassVar[int]
    KEEP_FULL_FIELD_NUMBER: _ClassVar[int]
    ATTENTION_ERROR_FIELD_NUMBER: _ClassVar[int]
    MAX_ATTENTION_ERROR_FIELD_NUMBER: _ClassVar[int]
    CONTRACT_PAGES_FIELD_NUMBER: _ClassVar[int]
    CONTRACT_MISSED_FIELD_NUMBER: _ClassVar[int]
    TOKENS_COLD_FIELD_NUMBER: _ClassVar[int]
    BYTES_STORED_FIELD_NUMBER: _ClassVar[int]
    BYTES_SHARED_FIELD_NUMBER: _ClassVar[int]
    TTL_MS_FIELD_NUMBER: _ClassVar[int]
    PINNED_FIELD_NUMBER: _ClassVar[int]
    CALIBRATION_FIELD_NUMBER: _ClassVar[int]
    CALIBRATION_SINCE_UNIX_MS_FIELD_NUMBER: _ClassVar[int]
    WATCHED_ERROR_FIELD_NUMBER: _ClassVar[int]
    WATCHED_ERROR_DATA_FREE_FIELD_NUMBER: _ClassVar[int]
    PREFIX_ROOT_FIELD_NUMBER: _ClassVar[int]
    RETENTION_FIELD_NUMBER: _ClassVar[int]
    WHOLE_FIELD_NUMBER: _ClassVar[int]
    MODEL_TENANT_FIELD_NUMBER: _ClassVar[int]
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    session: str
    model: str
    tenant: str
    purpose: Purpose
    policy: _model_pb2.CodecPolicy
    first_position: int
    durability: Durability
    lengths: _containers.RepeatedScalarFieldContainer[int]
    tokens_coded: int
    tokens_exact: int
    bytes_coded: int
    bytes_exact: int
    bytes_fp16: int
    bits_per_coordinate: float
    created_unix_ms: int
    last_used_unix_ms: int
    durable: _containers.RepeatedScalarFieldContainer[int]
    bytes_overhead: int
    tier_bits: float
    keep_full: bool
    attention_error: float
    max_attention_error: float
    contract_pages: int
    contract_missed: int
    tokens_cold: int
    bytes_stored: int
    bytes_shared: int
    ttl_ms: int
    pinned: bool
    calibration: int
    calibration_since_unix_ms: int
    watched_error: float
    watched_error_data_free: float
    prefix_root: bytes
    retention: Retention
    whole: int
    model_tenant: str
    token_ids: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, session: _Optional[str] = ..., model: _Optional[str] = ..., tenant: _Optional[str] = ..., purpose: _Optional[_Union[Purpose, str]] = ..., policy: _Optional[_Union[_model_pb2.CodecPolicy, _Mapping]] = ..., first_position: _Optional[int] = ..., durability: _Optional[_Union[Durability, str]] = ..., lengths: _Optional[_Iterable[int]] = ..., tokens_coded: _Optional[int] = ..., tokens_exact: _Optional[int] = ..., bytes_coded: _Optional[int] = ..., bytes_exact: _Optional[int] = ..., bytes_fp16: _Optional[int] = ..., bits_per_coordinate: _Optional[float] = ..., created_unix_ms: _Optional[int] = ..., last_used_unix_ms: _Optional[int] = ..., durable: _Optional[_Iterable[int]] = ..., bytes_overhead: _Optional[int] = ..., tier_bits: _Optional[float] = ..., keep_full: bool = ..., attention_error: _Optional[float] = ..., max_attention_error: _Optional[float] = ..., contract_pages: _Optional[int] = ..., contract_missed: _Optional[int] = ..., tokens_cold: _Optional[int] = ..., bytes_stored: _Optional[int] = ..., bytes_shared: _Optional[int] = ..., ttl_ms: _Optional[int] = ..., pinned: bool = ..., calibration: _Optional[int] = ..., calibration_since_unix_ms: _Optional[int] = ..., watched_error: _Optional[float] = ..., watched_error_data_free: _Optional[float] = ..., prefix_root: _Optional[bytes] = ..., retention: _Optional[_Union[Retention, str]] = ..., whole: _Optional[int] = ..., model_tenant: _Optional[str] = ..., token_ids: _Optional[_Iterable[int]] = ...) -> None: ...

class ListSessionsRequest(_message.Message):
    __slots__ = ("prefix", "tenant", "model", "page_size", "page_token")
    PREFIX_FIELD_NUMBER: _ClassVar[int]
    TENANT_FIELD_NUMBER: _ClassVar[int]
    MODEL_FIELD_NUMBER: _ClassVar[int]
    PAGE_SIZE_FIELD_NUMBER: _ClassVar[int]
    PAGE_TOKEN_FIELD_NUMBER: _ClassVar[int]
    prefix: str
    tenant: str
    model: str
    page_size: int
    page_token: str
    def __init__(self, prefix: _Optional[str] = ..., tenant: _Optional[str] = ..., model: _Optional[str] = ..., page_size: _Optional[int] = ..., page_token: _Optional[str] = ...) -> None: ...

class ListSessionsResponse(_message.Message):
    __slots__ = ("sessions", "next_page_token")
    SESSIONS_FIELD_NUMBER: _ClassVar[int]
    NEXT_PAGE_TOKEN_FIELD_NUMBER: _ClassVar[int]
    sessions: _containers.RepeatedCompositeFieldContainer[SessionInfo]
    next_page_token: str
    def __init__(self, sessions: _Optional[_Iterable[_Union[SessionInfo, _Mapping]]] = ..., next_page_token: _Optional[str] = ...) -> None: ...

class HasSessionsRequest(_message.Message):
    __slots__ = ("sessions", "tokens", "touch")
    SESSIONS_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    TOUCH_FIELD_NUMBER: _ClassVar[int]
    sessions: _containers.RepeatedScalarFieldContainer[str]
    tokens: bool
    touch: bool
    def __init__(self, sessions: _Optional[_Iterable[str]] = ..., tokens: bool = ..., touch: bool = ...) -> None: ...

class HasSessionsResponse(_message.Message):
    __slots__ = ("presence", "tokens")
    class Presence(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
        __slots__ = ()
        PRESENCE_NONE: _ClassVar[HasSessionsResponse.Presence]
        PRESENCE_MEMORY: _ClassVar[HasSessionsResponse.Presence]
        PRESENCE_SSD: _ClassVar[HasSessionsResponse.Presence]
    PRESENCE_NONE: HasSessionsResponse.Presence
    PRESENCE_MEMORY: HasSessionsResponse.Presence
    PRESENCE_SSD: HasSessionsResponse.Presence
    PRESENCE_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    presence: _containers.RepeatedScalarFieldContainer[HasSessionsResponse.Presence]
    tokens: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, presence: _Optional[_Iterable[_Union[HasSessionsResponse.Presence, str]]] = ..., tokens: _Optional[_Iterable[int]] = ...) -> None: ...

class Item(_message.Message):
    __slots__ = ("session", "layer", "position", "k_rope", "q_rope", "options", "token_ids", "k", "v", "q", "pages")
    SESSION_FIELD_NUMBER: _ClassVar[int]
    LAYER_FIELD_NUMBER: _ClassVar[int]
    POSITION_FIELD_NUMBER: _ClassVar[int]
    K_ROPE_FIELD_NUMBER: _ClassVar[int]
    Q_ROPE_FIELD_NUMBER: _ClassVar[int]
    OPTIONS_FIELD_NUMBER: _ClassVar[int]
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    K_FIELD_NUMBER: _ClassVar[int]
    V_FIELD_NUMBER: _ClassVar[int]
    Q_FIELD_NUMBER: _ClassVar[int]
    PAGES_FIELD_NUMBER: _ClassVar[int]
    session: str
    layer: int
    position: int
    k_rope: _tensor_pb2.RopeForm
    q_rope: _tensor_pb2.RopeForm
    options: AttendOptions
    token_ids: _containers.RepeatedScalarFieldContainer[int]
    k: _tensor_pb2.Tensor
    v: _tensor_pb2.Tensor
    q: _tensor_pb2.Tensor
    pages: _containers.RepeatedCompositeFieldContainer[CodedPage]
    def __init__(self, session: _Optional[str] = ..., layer: _Optional[int] = ..., position: _Optional[int] = ..., k_rope: _Optional[_Union[_tensor_pb2.RopeForm, str]] = ..., q_rope: _Optional[_Union[_tensor_pb2.RopeForm, str]] = ..., options: _Optional[_Union[AttendOptions, _Mapping]] = ..., token_ids: _Optional[_Iterable[int]] = ..., k: _Optional[_Union[_tensor_pb2.Tensor, _Mapping]] = ..., v: _Optional[_Union[_tensor_pb2.Tensor, _Mapping]] = ..., q: _Optional[_Union[_tensor_pb2.Tensor, _Mapping]] = ..., pages: _Optional[_Iterable[_Union[CodedPage, _Mapping]]] = ...) -> None: ...

class AppendRequest(_message.Message):
    __slots__ = ("items", "open", "complete", "seal")
    ITEMS_FIELD_NUMBER: _ClassVar[int]
    OPEN_FIELD_NUMBER: _ClassVar[int]
    COMPLETE_FIELD_NUMBER: _ClassVar[int]
    SEAL_FIELD_NUMBER: _ClassVar[int]
    items: _containers.RepeatedCompositeFieldContainer[Item]
    open: _containers.RepeatedCompositeFieldContainer[OpenSessionRequest]
    complete: bool
    seal: bool
    def __init__(self, items: _Optional[_Iterable[_Union[Item, _Mapping]]] = ..., open: _Optional[_Iterable[_Union[OpenSessionRequest, _Mapping]]] = ..., complete: bool = ..., seal: bool = ...) -> None: ...

class AppendResponse(_message.Message):
    __slots__ = ("items", "tokens", "sessions")
    ITEMS_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    SESSIONS_FIELD_NUMBER: _ClassVar[int]
    items: int
    tokens: int
    sessions: int
    def __init__(self, items: _Optional[int] = ..., tokens: _Optional[int] = ..., sessions: _Optional[int] = ...) -> None: ...

class AttendOptions(_message.Message):
    __slots__ = ("scale", "sliding_window", "soft_cap", "range", "causal_offset", "not_causal", "precision")
    class Precision(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
        __slots__ = ()
        PRECISION_UNSPECIFIED: _ClassVar[AttendOptions.Precision]
        PRECISION_FP32: _ClassVar[AttendOptions.Precision]
        PRECISION_INT16: _ClassVar[AttendOptions.Precision]
        PRECISION_INT8: _ClassVar[AttendOptions.Precision]
    PRECISION_UNSPECIFIED: AttendOptions.Precision
    PRECISION_FP32: AttendOptions.Precision
    PRECISION_INT16: AttendOptions.Precision
    PRECISION_INT8: AttendOptions.Precision
    SCALE_FIELD_NUMBER: _ClassVar[int]
    SLIDING_WINDOW_FIELD_NUMBER: _ClassVar[int]
    SOFT_CAP_FIELD_NUMBER: _ClassVar[int]
    RANGE_FIELD_NUMBER: _ClassVar[int]
    CAUSAL_OFFSET_FIELD_NUMBER: _ClassVar[int]
    NOT_CAUSAL_FIELD_NUMBER: _ClassVar[int]
    PRECISION_FIELD_NUMBER: _ClassVar[int]
    scale: float
    sliding_window: int
    soft_cap: float
    range: _tensor_pb2.TokenRange
    causal_offset: int
    not_causal: bool
    precision: AttendOptions.Precision
    def __init__(self, scale: _Optional[float] = ..., sliding_window: _Optional[int] = ..., soft_cap: _Optional[float] = ..., range: _Optional[_Union[_tensor_pb2.TokenRange, _Mapping]] = ..., causal_offset: _Optional[int] = ..., not_causal: bool = ..., precision: _Optional[_Union[AttendOptions.Precision, str]] = ...) -> None: ...

class AttendRequest(_message.Message):
    __slots__ = ("items", "options", "out_dtype", "id", "results_into")
    ITEMS_FIELD_NUMBER: _ClassVar[int]
    OPTIONS_FIELD_NUMBER: _ClassVar[int]
    OUT_DTYPE_FIELD_NUMBER: _ClassVar[int]
    ID_FIELD_NUMBER: _ClassVar[int]
    RESULTS_INTO_FIELD_NUMBER: _ClassVar[int]
    items: _containers.RepeatedCompositeFieldContainer[Item]
    options: AttendOptions
    out_dtype: _tensor_pb2.DType
    id: int
    results_into: _tensor_pb2.RegionPart
    def __init__(self, items: _Optional[_Iterable[_Union[Item, _Mapping]]] = ..., options: _Optional[_Union[AttendOptions, _Mapping]] = ..., out_dtype: _Optional[_Union[_tensor_pb2.DType, str]] = ..., id: _Optional[int] = ..., results_into: _Optional[_Union[_tensor_pb2.RegionPart, _Mapping]] = ...) -> None: ...

class AttendResult(_message.Message):
    __slots__ = ("status", "length", "out", "lse")
    STATUS_FIELD_NUMBER: _ClassVar[int]
    LENGTH_FIELD_NUMBER: _ClassVar[int]
    OUT_FIELD_NUMBER: _ClassVar[int]
    LSE_FIELD_NUMBER: _ClassVar[int]
    status: _tensor_pb2.Status
    length: int
    out: _tensor_pb2.Tensor
    lse: _tensor_pb2.Tensor
    def __init__(self, status: _Optional[_Union[_tensor_pb2.Status, _Mapping]] = ..., length: _Optional[int] = ..., out: _Optional[_Union[_tensor_pb2.Tensor, _Mapping]] = ..., lse: _Optional[_Union[_tensor_pb2.Tensor, _Mapping]] = ...) -> None: ...

class AttendResponse(_message.Message):
    __slots__ = ("results", "id")
    RESULTS_FIELD_NUMBER: _ClassVar[int]
    ID_FIELD_NUMBER: _ClassVar[int]
    results: _containers.RepeatedCompositeFieldContainer[AttendResult]
    id: int
    def __init__(self, results: _Optional[_Iterable[_Union[AttendResult, _Mapping]]] = ..., id: _Optional[int] = ...) -> None: ...

class FetchRequest(_message.Message):
    __slots__ = ("session", "layers", "range", "dtype", "layout", "part", "rope", "chunk_tokens", "coded", "k_into", "v_into")
    class Part(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
        __slots__ = ()
        PART_BOTH: _ClassVar[FetchRequest.Part]
        PART_K: _ClassVar[FetchRequest.Part]
        PART_V: _ClassVar[FetchRequest.Part]
    PART_BOTH: FetchRequest.Part
    PART_K: FetchRequest.Part
    PART_V: FetchRequest.Part
    SESSION_FIELD_NUMBER: _ClassVar[int]
    LAYERS_FIELD_NUMBER: _ClassVar[int]
    RANGE_FIELD_NUMBER: _ClassVar[int]
    DTYPE_FIELD_NUMBER: _ClassVar[int]
    LAYOUT_FIELD_NUMBER: _ClassVar[int]
    PART_FIELD_NUMBER: _ClassVar[int]
    ROPE_FIELD_NUMBER: _ClassVar[int]
    CHUNK_TOKENS_FIELD_NUMBER: _ClassVar[int]
    CODED_FIELD_NUMBER: _ClassVar[int]
    K_INTO_FIELD_NUMBER: _ClassVar[int]
    V_INTO_FIELD_NUMBER: _ClassVar[int]
    session: str
    layers: _containers.RepeatedScalarFieldContainer[int]
    range: _tensor_pb2.TokenRange
    dtype: _tensor_pb2.DType
    layout: RowLayout
    part: FetchRequest.Part
    rope: _tensor_pb2.RopeForm
    chunk_tokens: int
    coded: bool
    k_into: _tensor_pb2.RegionPart
    v_into: _tensor_pb2.RegionPart
    def __init__(self, session: _Optional[str] = ..., layers: _Optional[_Iterable[int]] = ..., range: _Optional[_Union[_tensor_pb2.TokenRange, _Mapping]] = ..., dtype: _Optional[_Union[_tensor_pb2.DType, str]] = ..., layout: _Optional[_Union[RowLayout, str]] = ..., part: _Optional[_Union[FetchRequest.Part, str]] = ..., rope: _Optional[_Union[_tensor_pb2.RopeForm, str]] = ..., chunk_tokens: _Optional[int] = ..., coded: bool = ..., k_into: _Optional[_Union[_tensor_pb2.RegionPart, _Mapping]] = ..., v_into: _Optional[_Union[_tensor_pb2.RegionPart, _Mapping]] = ...) -> None: ...

class FetchResponse(_message.Message):
    __slots__ = ("layer", "position", "k", "v", "pages")
    LAYER_FIELD_NUMBER: _ClassVar[int]
    POSITION_FIELD_NUMBER: _ClassVar[int]
    K_FIELD_NUMBER: _ClassVar[int]
    V_FIELD_NUMBER: _ClassVar[int]
    PAGES_FIELD_NUMBER: _ClassVar[int]
    layer: int
    position: int
    k: _tensor_pb2.Tensor
    v: _tensor_pb2.Tensor
    pages: _containers.RepeatedCompositeFieldContainer[CodedPage]
    def __init__(self, layer: _Optional[int] = ..., position: _Optional[int] = ..., k: _Optional[_Union[_tensor_pb2.Tensor, _Mapping]] = ..., v: _Optional[_Union[_tensor_pb2.Tensor, _Mapping]] = ..., pages: _Optional[_Iterable[_Union[CodedPage, _Mapping]]] = ...) -> None: ...

class CodedPage(_message.Message):
    __slots__ = ("tokens", "calibration_hash", "image")
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    CALIBRATION_HASH_FIELD_NUMBER: _ClassVar[int]
    IMAGE_FIELD_NUMBER: _ClassVar[int]
    tokens: int
    calibration_hash: int
    image: bytes
    def __init__(self, tokens: _Optional[int] = ..., calibration_hash: _Optional[int] = ..., image: _Optional[bytes] = ...) -> None: ...

class TruncateRequest(_message.Message):
    __slots__ = ("session", "position", "layers")
    SESSION_FIELD_NUMBER: _ClassVar[int]
    POSITION_FIELD_NUMBER: _ClassVar[int]
    LAYERS_FIELD_NUMBER: _ClassVar[int]
    session: str
    position: int
    layers: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, session: _Optional[str] = ..., position: _Optional[int] = ..., layers: _Optional[_Iterable[int]] = ...) -> None: ...

class TruncateResponse(_message.Message):
    __slots__ = ("lengths",)
    LENGTHS_FIELD_NUMBER: _ClassVar[int]
    lengths: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, lengths: _Optional[_Iterable[int]] = ...) -> None: ...

class DemoteRequest(_message.Message):
    __slots__ = ("session", "range", "bits", "even", "layers")
    SESSION_FIELD_NUMBER: _ClassVar[int]
    RANGE_FIELD_NUMBER: _ClassVar[int]
    BITS_FIELD_NUMBER: _ClassVar[int]
    EVEN_FIELD_NUMBER: _ClassVar[int]
    LAYERS_FIELD_NUMBER: _ClassVar[int]
    session: str
    range: _tensor_pb2.TokenRange
    bits: float
    even: bool
    layers: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, session: _Optional[str] = ..., range: _Optional[_Union[_tensor_pb2.TokenRange, _Mapping]] = ..., bits: _Optional[float] = ..., even: bool = ..., layers: _Optional[_Iterable[int]] = ...) -> None: ...

class DemoteResponse(_message.Message):
    __slots__ = ("bytes_freed", "bytes_taken", "pages")
    BYTES_FREED_FIELD_NUMBER: _ClassVar[int]
    BYTES_TAKEN_FIELD_NUMBER: _ClassVar[int]
    PAGES_FIELD_NUMBER: _ClassVar[int]
    bytes_freed: int
    bytes_taken: int
    pages: int
    def __init__(self, bytes_freed: _Optional[int] = ..., bytes_taken: _Optional[int] = ..., pages: _Optional[int] = ...) -> None: ...

class PrefetchRequest(_message.Message):
    __slots__ = ("session", "range", "layers", "bits")
    SESSION_FIELD_NUMBER: _ClassVar[int]
    RANGE_FIELD_NUMBER: _ClassVar[int]
    LAYERS_FIELD_NUMBER: _ClassVar[int]
    BITS_FIELD_NUMBER: _ClassVar[int]
    session: str
    range: _tensor_pb2.TokenRange
    layers: _containers.RepeatedScalarFieldContainer[int]
    bits: float
    def __init__(self, session: _Optional[str] = ..., range: _Optional[_Union[_tensor_pb2.TokenRange, _Mapping]] = ..., layers: _Optional[_Iterable[int]] = ..., bits: _Optional[float] = ...) -> None: ...

class PrefetchResponse(_message.Message):
    __slots__ = ("bytes", "pages")
    BYTES_FIELD_NUMBER: _ClassVar[int]
    PAGES_FIELD_NUMBER: _ClassVar[int]
    bytes: int
    pages: int
    def __init__(self, bytes: _Optional[int] = ..., pages: _Optional[int] = ...) -> None: ...

class GetAttentionStatsRequest(_message.Message):
    __slots__ = ("session", "layers", "buckets")
    SESSION_FIELD_NUMBER: _ClassVar[int]
    LAYERS_FIELD_NUMBER: _ClassVar[int]
    BUCKETS_FIELD_NUMBER: _ClassVar[int]
    session: str
    layers: _containers.RepeatedScalarFieldContainer[int]
    buckets: int
    def __init__(self, session: _Optional[str] = ..., layers: _Optional[_Iterable[int]] = ..., buckets: _Optional[int] = ...) -> None: ...

class GetAttentionStatsResponse(_message.Message):
    __slots__ = ("layer", "kv_head", "position", "tokens_per_bucket", "ema", "bits", "tokens", "counted", "queries", "cold")
    LAYER_FIELD_NUMBER: _ClassVar[int]
    KV_HEAD_FIELD_NUMBER: _ClassVar[int]
    POSITION_FIELD_NUMBER: _ClassVar[int]
    TOKENS_PER_BUCKET_FIELD_NUMBER: _ClassVar[int]
    EMA_FIELD_NUMBER: _ClassVar[int]
    BITS_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    COUNTED_FIELD_NUMBER: _ClassVar[int]
    QUERIES_FIELD_NUMBER: _ClassVar[int]
    COLD_FIELD_NUMBER: _ClassVar[int]
    layer: int
    kv_head: int
    position: int
    tokens_per_bucket: int
    ema: _containers.RepeatedScalarFieldContainer[float]
    bits: _containers.RepeatedScalarFieldContainer[float]
    tokens: int
    counted: bool
    queries: int
    cold: _containers.RepeatedScalarFieldContainer[float]
    def __init__(self, layer: _Optional[int] = ..., kv_head: _Optional[int] = ..., position: _Optional[int] = ..., tokens_per_bucket: _Optional[int] = ..., ema: _Optional[_Iterable[float]] = ..., bits: _Optional[_Iterable[float]] = ..., tokens: _Optional[int] = ..., counted: bool = ..., queries: _Optional[int] = ..., cold: _Optional[_Iterable[float]] = ...) -> None: ...

class PinRequest(_message.Message):
    __slots__ = ("session", "unpin")
    SESSION_FIELD_NUMBER: _ClassVar[int]
    UNPIN_FIELD_NUMBER: _ClassVar[int]
    session: str
    unpin: bool
    def __init__(self, session: _Optional[str] = ..., unpin: bool = ...) -> None: ...

class PinResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class TouchRequest(_message.Message):
    __slots__ = ("session", "ttl_ms")
    SESSION_FIELD_NUMBER: _ClassVar[int]
    TTL_MS_FIELD_NUMBER: _ClassVar[int]
    session: str
    ttl_ms: int
    def __init__(self, session: _Optional[str] = ..., ttl_ms: _Optional[int] = ...) -> None: ...

class TouchResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class ForkRequest(_message.Message):
    __slots__ = ("session", "fork", "position")
    SESSION_FIELD_NUMBER: _ClassVar[int]
    FORK_FIELD_NUMBER: _ClassVar[int]
    POSITION_FIELD_NUMBER: _ClassVar[int]
    session: str
    fork: str
    position: int
    def __init__(self, session: _Optional[str] = ..., fork: _Optional[str] = ..., position: _Optional[int] = ...) -> None: ...

class ForkResponse(_message.Message):
    __slots__ = ("info",)
    INFO_FIELD_NUMBER: _ClassVar[int]
    info: SessionInfo
    def __init__(self, info: _Optional[_Union[SessionInfo, _Mapping]] = ...) -> None: ...

class MatchRequest(_message.Message):
    __slots__ = ("model", "tenant", "token_ids", "salt")
    MODEL_FIELD_NUMBER: _ClassVar[int]
    TENANT_FIELD_NUMBER: _ClassVar[int]
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    SALT_FIELD_NUMBER: _ClassVar[int]
    model: str
    tenant: str
    token_ids: _containers.RepeatedScalarFieldContainer[int]
    salt: bytes
    def __init__(self, model: _Optional[str] = ..., tenant: _Optional[str] = ..., token_ids: _Optional[_Iterable[int]] = ..., salt: _Optional[bytes] = ...) -> None: ...

class MatchResponse(_message.Message):
    __slots__ = ("session", "tokens", "tokens_in_memory", "tokens_on_ssd", "restore_ms", "prefix_root")
    SESSION_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    TOKENS_IN_MEMORY_FIELD_NUMBER: _ClassVar[int]
    TOKENS_ON_SSD_FIELD_NUMBER: _ClassVar[int]
    RESTORE_MS_FIELD_NUMBER: _ClassVar[int]
    PREFIX_ROOT_FIELD_NUMBER: _ClassVar[int]
    session: str
    tokens: int
    tokens_in_memory: int
    tokens_on_ssd: int
    restore_ms: float
    prefix_root: bytes
    def __init__(self, session: _Optional[str] = ..., tokens: _Optional[int] = ..., tokens_in_memory: _Optional[int] = ..., tokens_on_ssd: _Optional[int] = ..., restore_ms: _Optional[float] = ..., prefix_root: _Optional[bytes] = ...) -> None: ...

class WatchRequest(_message.Message):
    __slots__ = ("tenant", "model", "token_ids", "instance", "after")
    TENANT_FIELD_NUMBER: _ClassVar[int]
    MODEL_FIELD_NUMBER: _ClassVar[int]
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    INSTANCE_FIELD_NUMBER: _ClassVar[int]
    AFTER_FIELD_NUMBER: _ClassVar[int]
    tenant: str
    model: str
    token_ids: bool
    instance: int
    after: int
    def __init__(self, tenant: _Optional[str] = ..., model: _Optional[str] = ..., token_ids: bool = ..., instance: _Optional[int] = ..., after: _Optional[int] = ...) -> None: ...

class PrefixEvent(_message.Message):
    __slots__ = ("kind", "tenant", "model", "parent", "hashes", "position", "token_ids", "place")
    class Kind(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
        __slots__ = ()
        KIND_UNSPECIFIED: _ClassVar[PrefixEvent.Kind]
        KIND_ADDED: _ClassVar[PrefixEvent.Kind]
        KIND_REMOVED: _ClassVar[PrefixEvent.Kind]
        KIND_MOVED: _ClassVar[PrefixEvent.Kind]
    KIND_UNSPECIFIED: PrefixEvent.Kind
    KIND_ADDED: PrefixEvent.Kind
    KIND_REMOVED: PrefixEvent.Kind
    KIND_MOVED: PrefixEvent.Kind
    class Place(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
        __slots__ = ()
        PLACE_MEMORY: _ClassVar[PrefixEvent.Place]
        PLACE_SSD: _ClassVar[PrefixEvent.Place]
    PLACE_MEMORY: PrefixEvent.Place
    PLACE_SSD: PrefixEvent.Place
    KIND_FIELD_NUMBER: _ClassVar[int]
    TENANT_FIELD_NUMBER: _ClassVar[int]
    MODEL_FIELD_NUMBER: _ClassVar[int]
    PARENT_FIELD_NUMBER: _ClassVar[int]
    HASHES_FIELD_NUMBER: _ClassVar[int]
    POSITION_FIELD_NUMBER: _ClassVar[int]
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    PLACE_FIELD_NUMBER: _ClassVar[int]
    kind: PrefixEvent.Kind
    tenant: str
    model: str
    parent: bytes
    hashes: bytes
    position: int
    token_ids: _containers.RepeatedScalarFieldContainer[int]
    place: PrefixEvent.Place
    def __init__(self, kind: _Optional[_Union[PrefixEvent.Kind, str]] = ..., tenant: _Optional[str] = ..., model: _Optional[str] = ..., parent: _Optional[bytes] = ..., hashes: _Optional[bytes] = ..., position: _Optional[int] = ..., token_ids: _Optional[_Iterable[int]] = ..., place: _Optional[_Union[PrefixEvent.Place, str]] = ...) -> None: ...

class WatchResponse(_message.Message):
    __slots__ = ("reset", "missed", "complete", "instance", "sequence", "events")
    RESET_FIELD_NUMBER: _ClassVar[int]
    MISSED_FIELD_NUMBER: _ClassVar[int]
    COMPLETE_FIELD_NUMBER: _ClassVar[int]
    INSTANCE_FIELD_NUMBER: _ClassVar[int]
    SEQUENCE_FIELD_NUMBER: _ClassVar[int]
    EVENTS_FIELD_NUMBER: _ClassVar[int]
    reset: bool
    missed: bool
    complete: bool
    instance: int
    sequence: int
    events: _containers.RepeatedCompositeFieldContainer[PrefixEvent]
    def __init__(self, reset: bool = ..., missed: bool = ..., complete: bool = ..., instance: _Optional[int] = ..., sequence: _Optional[int] = ..., events: _Optional[_Iterable[_Union[PrefixEvent, _Mapping]]] = ...) -> None: ...
