from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from typing import ClassVar as _ClassVar, Iterable as _Iterable, Mapping as _Mapping, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class GetStatusRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class Metric(_message.Message):
    __slots__ = ("name", "help", "type", "value")
    NAME_FIELD_NUMBER: _ClassVar[int]
    HELP_FIELD_NUMBER: _ClassVar[int]
    TYPE_FIELD_NUMBER: _ClassVar[int]
    VALUE_FIELD_NUMBER: _ClassVar[int]
    name: str
    help: str
    type: str
    value: float
    def __init__(self, name: _Optional[str] = ..., help: _Optional[str] = ..., type: _Optional[str] = ..., value: _Optional[float] = ...) -> None: ...

class OptionValue(_message.Message):
    __slots__ = ("name", "value", "source")
    NAME_FIELD_NUMBER: _ClassVar[int]
    VALUE_FIELD_NUMBER: _ClassVar[int]
    SOURCE_FIELD_NUMBER: _ClassVar[int]
    name: str
    value: str
    source: str
    def __init__(self, name: _Optional[str] = ..., value: _Optional[str] = ..., source: _Optional[str] = ...) -> None: ...

class GpuStatus(_message.Message):
    __slots__ = ("device", "name", "uuid", "up", "reason", "bytes", "bytes_limit", "ranges", "sessions", "hits", "misses", "failures", "less_attended")
    DEVICE_FIELD_NUMBER: _ClassVar[int]
    NAME_FIELD_NUMBER: _ClassVar[int]
    UUID_FIELD_NUMBER: _ClassVar[int]
    UP_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    BYTES_FIELD_NUMBER: _ClassVar[int]
    BYTES_LIMIT_FIELD_NUMBER: _ClassVar[int]
    RANGES_FIELD_NUMBER: _ClassVar[int]
    SESSIONS_FIELD_NUMBER: _ClassVar[int]
    HITS_FIELD_NUMBER: _ClassVar[int]
    MISSES_FIELD_NUMBER: _ClassVar[int]
    FAILURES_FIELD_NUMBER: _ClassVar[int]
    LESS_ATTENDED_FIELD_NUMBER: _ClassVar[int]
    device: str
    name: str
    uuid: str
    up: bool
    reason: str
    bytes: int
    bytes_limit: int
    ranges: int
    sessions: int
    hits: int
    misses: int
    failures: int
    less_attended: int
    def __init__(self, device: _Optional[str] = ..., name: _Optional[str] = ..., uuid: _Optional[str] = ..., up: bool = ..., reason: _Optional[str] = ..., bytes: _Optional[int] = ..., bytes_limit: _Optional[int] = ..., ranges: _Optional[int] = ..., sessions: _Optional[int] = ..., hits: _Optional[int] = ..., misses: _Optional[int] = ..., failures: _Optional[int] = ..., less_attended: _Optional[int] = ...) -> None: ...

class GetStatusResponse(_message.Message):
    __slots__ = ("version", "state", "uptime_ms", "models", "sessions", "kv_bytes", "kv_bytes_limit", "rss_bytes", "listen", "cpu", "metrics", "options", "learning_bytes", "calibration_bytes", "kv_bytes_available", "overhead_bytes", "gpus")
    VERSION_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    UPTIME_MS_FIELD_NUMBER: _ClassVar[int]
    MODELS_FIELD_NUMBER: _ClassVar[int]
    SESSIONS_FIELD_NUMBER: _ClassVar[int]
    KV_BYTES_FIELD_NUMBER: _ClassVar[int]
    KV_BYTES_LIMIT_FIELD_NUMBER: _ClassVar[int]
    RSS_BYTES_FIELD_NUMBER: _ClassVar[int]
    LISTEN_FIELD_NUMBER: _ClassVar[int]
    CPU_FIELD_NUMBER: _ClassVar[int]
    METRICS_FIELD_NUMBER: _ClassVar[int]
    OPTIONS_FIELD_NUMBER: _ClassVar[int]
    LEARNING_BYTES_FIELD_NUMBER: _ClassVar[int]
    CALIBRATION_BYTES_FIELD_NUMBER: _ClassVar[int]
    KV_BYTES_AVAILABLE_FIELD_NUMBER: _ClassVar[int]
    OVERHEAD_BYTES_FIELD_NUMBER: _ClassVar[int]
    GPUS_FIELD_NUMBER: _ClassVar[int]
    version: str
    state: str
    uptime_ms: int
    models: int
    sessions: int
    kv_bytes: int
    kv_bytes_limit: int
    rss_bytes: int
    listen: _containers.RepeatedScalarFieldContainer[str]
    cpu: str
    metrics: _containers.RepeatedCompositeFieldContainer[Metric]
    options: _containers.RepeatedCompositeFieldContainer[OptionValue]
    learning_bytes: int
    calibration_bytes: int
    kv_bytes_available: int
    overhead_bytes: int
    gpus: _containers.RepeatedCompositeFieldContainer[GpuStatus]
    def __init__(self, version: _Optional[str] = ..., state: _Optional[str] = ..., uptime_ms: _Optional[int] = ..., models: _Optional[int] = ..., sessions: _Optional[int] = ..., kv_bytes: _Optional[int] = ..., kv_bytes_limit: _Optional[int] = ..., rss_bytes: _Optional[int] = ..., listen: _Optional[_Iterable[str]] = ..., cpu: _Optional[str] = ..., metrics: _Optional[_Iterable[_Union[Metric, _Mapping]]] = ..., options: _Optional[_Iterable[_Union[OptionValue, _Mapping]]] = ..., learning_bytes: _Optional[int] = ..., calibration_bytes: _Optional[int] = ..., kv_bytes_available: _Optional[int] = ..., overhead_bytes: _Optional[int] = ..., gpus: _Optional[_Iterable[_Union[GpuStatus, _Mapping]]] = ...) -> None: ...

class CompareRequest(_message.Message):
    __slots__ = ("session",)
    SESSION_FIELD_NUMBER: _ClassVar[int]
    session: str
    def __init__(self, session: _Optional[str] = ...) -> None: ...

class CompareResponse(_message.Message):
    __slots__ = ("layers", "tokens", "tokens_exact", "codecs")
    LAYERS_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    TOKENS_EXACT_FIELD_NUMBER: _ClassVar[int]
    CODECS_FIELD_NUMBER: _ClassVar[int]
    layers: int
    tokens: int
    tokens_exact: int
    codecs: _containers.RepeatedCompositeFieldContainer[ComparedCodec]
    def __init__(self, layers: _Optional[int] = ..., tokens: _Optional[int] = ..., tokens_exact: _Optional[int] = ..., codecs: _Optional[_Iterable[_Union[ComparedCodec, _Mapping]]] = ...) -> None: ...

class ComparedCodec(_message.Message):
    __slots__ = ("codec", "bits", "calibrated", "bytes_per_token", "bits_per_coordinate", "attention_error")
    CODEC_FIELD_NUMBER: _ClassVar[int]
    BITS_FIELD_NUMBER: _ClassVar[int]
    CALIBRATED_FIELD_NUMBER: _ClassVar[int]
    BYTES_PER_TOKEN_FIELD_NUMBER: _ClassVar[int]
    BITS_PER_COORDINATE_FIELD_NUMBER: _ClassVar[int]
    ATTENTION_ERROR_FIELD_NUMBER: _ClassVar[int]
    codec: str
    bits: float
    calibrated: bool
    bytes_per_token: float
    bits_per_coordinate: float
    attention_error: float
    def __init__(self, codec: _Optional[str] = ..., bits: _Optional[float] = ..., calibrated: bool = ..., bytes_per_token: _Optional[float] = ..., bits_per_coordinate: _Optional[float] = ..., attention_error: _Optional[float] = ...) -> None: ...

class DrainRequest(_message.Message):
    __slots__ = ("grace_ms", "notice_ms")
    GRACE_MS_FIELD_NUMBER: _ClassVar[int]
    NOTICE_MS_FIELD_NUMBER: _ClassVar[int]
    grace_ms: int
    notice_ms: int
    def __init__(self, grace_ms: _Optional[int] = ..., notice_ms: _Optional[int] = ...) -> None: ...

class DrainResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class GetStorageRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class StorageSegment(_message.Message):
    __slots__ = ("segment", "file_bytes", "live_bytes", "records", "sealed", "unread")
    SEGMENT_FIELD_NUMBER: _ClassVar[int]
    FILE_BYTES_FIELD_NUMBER: _ClassVar[int]
    LIVE_BYTES_FIELD_NUMBER: _ClassVar[int]
    RECORDS_FIELD_NUMBER: _ClassVar[int]
    SEALED_FIELD_NUMBER: _ClassVar[int]
    UNREAD_FIELD_NUMBER: _ClassVar[int]
    segment: int
    file_bytes: int
    live_bytes: int
    records: int
    sealed: bool
    unread: bool
    def __init__(self, segment: _Optional[int] = ..., file_bytes: _Optional[int] = ..., live_bytes: _Optional[int] = ..., records: _Optional[int] = ..., sealed: bool = ..., unread: bool = ...) -> None: ...

class GetStorageResponse(_message.Message):
    __slots__ = ("directory", "io", "records", "disk_bytes", "live_bytes", "dead_bytes", "dirty_bytes", "journal_bytes", "put_bytes", "put_stored_bytes", "read_bytes", "bad_records", "failed", "recovery_seconds", "segments", "unread_segments")
    DIRECTORY_FIELD_NUMBER: _ClassVar[int]
    IO_FIELD_NUMBER: _ClassVar[int]
    RECORDS_FIELD_NUMBER: _ClassVar[int]
    DISK_BYTES_FIELD_NUMBER: _ClassVar[int]
    LIVE_BYTES_FIELD_NUMBER: _ClassVar[int]
    DEAD_BYTES_FIELD_NUMBER: _ClassVar[int]
    DIRTY_BYTES_FIELD_NUMBER: _ClassVar[int]
    JOURNAL_BYTES_FIELD_NUMBER: _ClassVar[int]
    PUT_BYTES_FIELD_NUMBER: _ClassVar[int]
    PUT_STORED_BYTES_FIELD_NUMBER: _ClassVar[int]
    READ_BYTES_FIELD_NUMBER: _ClassVar[int]
    BAD_RECORDS_FIELD_NUMBER: _ClassVar[int]
    FAILED_FIELD_NUMBER: _ClassVar[int]
    RECOVERY_SECONDS_FIELD_NUMBER: _ClassVar[int]
    SEGMENTS_FIELD_NUMBER: _ClassVar[int]
    UNREAD_SEGMENTS_FIELD_NUMBER: _ClassVar[int]
    directory: str
    io: str
    records: int
    disk_bytes: int
    live_bytes: int
    dead_bytes: int
    dirty_bytes: int
    journal_bytes: int
    put_bytes: int
    put_stored_bytes: int
    read_bytes: int
    bad_records: int
    failed: int
    recovery_seconds: float
    segments: _containers.RepeatedCompositeFieldContainer[StorageSegment]
    unread_segments: int
    def __init__(self, directory: _Optional[str] = ..., io: _Optional[str] = ..., records: _Optional[int] = ..., disk_bytes: _Optional[int] = ..., live_bytes: _Optional[int] = ..., dead_bytes: _Optional[int] = ..., dirty_bytes: _Optional[int] = ..., journal_bytes: _Optional[int] = ..., put_bytes: _Optional[int] = ..., put_stored_bytes: _Optional[int] = ..., read_bytes: _Optional[int] = ..., bad_records: _Optional[int] = ..., failed: _Optional[int] = ..., recovery_seconds: _Optional[float] = ..., segments: _Optional[_Iterable[_Union[StorageSegment, _Mapping]]] = ..., unread_segments: _Optional[int] = ...) -> None: ...

class VerifyStorageRequest(_message.Message):
    __slots__ = ("start",)
    START_FIELD_NUMBER: _ClassVar[int]
    start: bool
    def __init__(self, start: bool = ...) -> None: ...

class VerifyStorageResponse(_message.Message):
    __slots__ = ("running", "records_done", "records", "bad", "bytes")
    RUNNING_FIELD_NUMBER: _ClassVar[int]
    RECORDS_DONE_FIELD_NUMBER: _ClassVar[int]
    RECORDS_FIELD_NUMBER: _ClassVar[int]
    BAD_FIELD_NUMBER: _ClassVar[int]
    BYTES_FIELD_NUMBER: _ClassVar[int]
    running: bool
    records_done: int
    records: int
    bad: int
    bytes: int
    def __init__(self, running: bool = ..., records_done: _Optional[int] = ..., records: _Optional[int] = ..., bad: _Optional[int] = ..., bytes: _Optional[int] = ...) -> None: ...

class CompactRequest(_message.Message):
    __slots__ = ("live_share",)
    LIVE_SHARE_FIELD_NUMBER: _ClassVar[int]
    live_share: float
    def __init__(self, live_share: _Optional[float] = ...) -> None: ...

class CompactResponse(_message.Message):
    __slots__ = ("bytes_freed",)
    BYTES_FREED_FIELD_NUMBER: _ClassVar[int]
    bytes_freed: int
    def __init__(self, bytes_freed: _Optional[int] = ...) -> None: ...

class Quota(_message.Message):
    __slots__ = ("tenant", "host_bytes", "host_bytes_guaranteed", "ssd_bytes", "ssd_bytes_guaranteed", "sessions", "models", "calls", "bytes_per_second", "rows_per_second", "weight", "gpu_bytes")
    TENANT_FIELD_NUMBER: _ClassVar[int]
    HOST_BYTES_FIELD_NUMBER: _ClassVar[int]
    HOST_BYTES_GUARANTEED_FIELD_NUMBER: _ClassVar[int]
    SSD_BYTES_FIELD_NUMBER: _ClassVar[int]
    SSD_BYTES_GUARANTEED_FIELD_NUMBER: _ClassVar[int]
    SESSIONS_FIELD_NUMBER: _ClassVar[int]
    MODELS_FIELD_NUMBER: _ClassVar[int]
    CALLS_FIELD_NUMBER: _ClassVar[int]
    BYTES_PER_SECOND_FIELD_NUMBER: _ClassVar[int]
    ROWS_PER_SECOND_FIELD_NUMBER: _ClassVar[int]
    WEIGHT_FIELD_NUMBER: _ClassVar[int]
    GPU_BYTES_FIELD_NUMBER: _ClassVar[int]
    tenant: str
    host_bytes: int
    host_bytes_guaranteed: int
    ssd_bytes: int
    ssd_bytes_guaranteed: int
    sessions: int
    models: int
    calls: int
    bytes_per_second: int
    rows_per_second: int
    weight: int
    gpu_bytes: int
    def __init__(self, tenant: _Optional[str] = ..., host_bytes: _Optional[int] = ..., host_bytes_guaranteed: _Optional[int] = ..., ssd_bytes: _Optional[int] = ..., ssd_bytes_guaranteed: _Optional[int] = ..., sessions: _Optional[int] = ..., models: _Optional[int] = ..., calls: _Optional[int] = ..., bytes_per_second: _Optional[int] = ..., rows_per_second: _Optional[int] = ..., weight: _Optional[int] = ..., gpu_bytes: _Optional[int] = ...) -> None: ...

class QuotaUsage(_message.Message):
    __slots__ = ("host_bytes", "ssd_bytes", "sessions", "models", "calls", "bytes", "rows", "refused", "gpu_bytes")
    HOST_BYTES_FIELD_NUMBER: _ClassVar[int]
    SSD_BYTES_FIELD_NUMBER: _ClassVar[int]
    SESSIONS_FIELD_NUMBER: _ClassVar[int]
    MODELS_FIELD_NUMBER: _ClassVar[int]
    CALLS_FIELD_NUMBER: _ClassVar[int]
    BYTES_FIELD_NUMBER: _ClassVar[int]
    ROWS_FIELD_NUMBER: _ClassVar[int]
    REFUSED_FIELD_NUMBER: _ClassVar[int]
    GPU_BYTES_FIELD_NUMBER: _ClassVar[int]
    host_bytes: int
    ssd_bytes: int
    sessions: int
    models: int
    calls: int
    bytes: int
    rows: int
    refused: int
    gpu_bytes: int
    def __init__(self, host_bytes: _Optional[int] = ..., ssd_bytes: _Optional[int] = ..., sessions: _Optional[int] = ..., models: _Optional[int] = ..., calls: _Optional[int] = ..., bytes: _Optional[int] = ..., rows: _Optional[int] = ..., refused: _Optional[int] = ..., gpu_bytes: _Optional[int] = ...) -> None: ...

class SetQuotaRequest(_message.Message):
    __slots__ = ("quota",)
    QUOTA_FIELD_NUMBER: _ClassVar[int]
    quota: Quota
    def __init__(self, quota: _Optional[_Union[Quota, _Mapping]] = ...) -> None: ...

class SetQuotaResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class GetQuotaRequest(_message.Message):
    __slots__ = ("tenant", "page_size", "page_token")
    TENANT_FIELD_NUMBER: _ClassVar[int]
    PAGE_SIZE_FIELD_NUMBER: _ClassVar[int]
    PAGE_TOKEN_FIELD_NUMBER: _ClassVar[int]
    tenant: str
    page_size: int
    page_token: str
    def __init__(self, tenant: _Optional[str] = ..., page_size: _Optional[int] = ..., page_token: _Optional[str] = ...) -> None: ...

class GetQuotaResponse(_message.Message):
    __slots__ = ("tenants", "next_page_token")
    TENANTS_FIELD_NUMBER: _ClassVar[int]
    NEXT_PAGE_TOKEN_FIELD_NUMBER: _ClassVar[int]
    tenants: _containers.RepeatedCompositeFieldContainer[TenantQuota]
    next_page_token: str
    def __init__(self, tenants: _Optional[_Iterable[_Union[TenantQuota, _Mapping]]] = ..., next_page_token: _Optional[str] = ...) -> None: ...

class TenantQuota(_message.Message):
    __slots__ = ("quota", "usage", "by_default")
    QUOTA_FIELD_NUMBER: _ClassVar[int]
    USAGE_FIELD_NUMBER: _ClassVar[int]
    BY_DEFAULT_FIELD_NUMBER: _ClassVar[int]
    quota: Quota
    usage: QuotaUsage
    by_default: bool
    def __init__(self, quota: _Optional[_Union[Quota, _Mapping]] = ..., usage: _Optional[_Union[QuotaUsage, _Mapping]] = ..., by_default: bool = ...) -> None: ...

class UnshareModelRequest(_message.Message):
    __slots__ = ("name",)
    NAME_FIELD_NUMBER: _ClassVar[int]
    name: str
    def __init__(self, name: _Optional[str] = ...) -> None: ...

class UnshareModelResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...
