from qkvd.v1 import kv_cache_pb2 as _kv_cache_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from typing import ClassVar as _ClassVar, Iterable as _Iterable, Mapping as _Mapping, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class ObjectInfo(_message.Message):
    __slots__ = ("object", "tenant", "bytes", "checksum", "retention", "durability", "ttl_ms", "created_unix_ms", "last_used_unix_ms", "bytes_in_memory")
    OBJECT_FIELD_NUMBER: _ClassVar[int]
    TENANT_FIELD_NUMBER: _ClassVar[int]
    BYTES_FIELD_NUMBER: _ClassVar[int]
    CHECKSUM_FIELD_NUMBER: _ClassVar[int]
    RETENTION_FIELD_NUMBER: _ClassVar[int]
    DURABILITY_FIELD_NUMBER: _ClassVar[int]
    TTL_MS_FIELD_NUMBER: _ClassVar[int]
    CREATED_UNIX_MS_FIELD_NUMBER: _ClassVar[int]
    LAST_USED_UNIX_MS_FIELD_NUMBER: _ClassVar[int]
    BYTES_IN_MEMORY_FIELD_NUMBER: _ClassVar[int]
    object: str
    tenant: str
    bytes: int
    checksum: int
    retention: _kv_cache_pb2.Retention
    durability: _kv_cache_pb2.Durability
    ttl_ms: int
    created_unix_ms: int
    last_used_unix_ms: int
    bytes_in_memory: int
    def __init__(self, object: _Optional[str] = ..., tenant: _Optional[str] = ..., bytes: _Optional[int] = ..., checksum: _Optional[int] = ..., retention: _Optional[_Union[_kv_cache_pb2.Retention, str]] = ..., durability: _Optional[_Union[_kv_cache_pb2.Durability, str]] = ..., ttl_ms: _Optional[int] = ..., created_unix_ms: _Optional[int] = ..., last_used_unix_ms: _Optional[int] = ..., bytes_in_memory: _Optional[int] = ...) -> None: ...

class PutObjectsRequest(_message.Message):
    __slots__ = ("pieces",)
    PIECES_FIELD_NUMBER: _ClassVar[int]
    pieces: _containers.RepeatedCompositeFieldContainer[PutPiece]
    def __init__(self, pieces: _Optional[_Iterable[_Union[PutPiece, _Mapping]]] = ...) -> None: ...

class PutPiece(_message.Message):
    __slots__ = ("begin", "replace", "data")
    BEGIN_FIELD_NUMBER: _ClassVar[int]
    REPLACE_FIELD_NUMBER: _ClassVar[int]
    DATA_FIELD_NUMBER: _ClassVar[int]
    begin: ObjectInfo
    replace: bool
    data: bytes
    def __init__(self, begin: _Optional[_Union[ObjectInfo, _Mapping]] = ..., replace: bool = ..., data: _Optional[bytes] = ...) -> None: ...

class PutObjectsResponse(_message.Message):
    __slots__ = ("objects", "existing")
    OBJECTS_FIELD_NUMBER: _ClassVar[int]
    EXISTING_FIELD_NUMBER: _ClassVar[int]
    objects: int
    existing: int
    def __init__(self, objects: _Optional[int] = ..., existing: _Optional[int] = ...) -> None: ...

class GetObjectsRequest(_message.Message):
    __slots__ = ("tenant", "objects")
    TENANT_FIELD_NUMBER: _ClassVar[int]
    OBJECTS_FIELD_NUMBER: _ClassVar[int]
    tenant: str
    objects: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, tenant: _Optional[str] = ..., objects: _Optional[_Iterable[str]] = ...) -> None: ...

class GetObjectsResponse(_message.Message):
    __slots__ = ("pieces",)
    PIECES_FIELD_NUMBER: _ClassVar[int]
    pieces: _containers.RepeatedCompositeFieldContainer[GetPiece]
    def __init__(self, pieces: _Optional[_Iterable[_Union[GetPiece, _Mapping]]] = ...) -> None: ...

class GetPiece(_message.Message):
    __slots__ = ("index", "info", "missing", "data")
    INDEX_FIELD_NUMBER: _ClassVar[int]
    INFO_FIELD_NUMBER: _ClassVar[int]
    MISSING_FIELD_NUMBER: _ClassVar[int]
    DATA_FIELD_NUMBER: _ClassVar[int]
    index: int
    info: ObjectInfo
    missing: bool
    data: bytes
    def __init__(self, index: _Optional[int] = ..., info: _Optional[_Union[ObjectInfo, _Mapping]] = ..., missing: bool = ..., data: _Optional[bytes] = ...) -> None: ...

class HasObjectsRequest(_message.Message):
    __slots__ = ("tenant", "objects", "touch")
    TENANT_FIELD_NUMBER: _ClassVar[int]
    OBJECTS_FIELD_NUMBER: _ClassVar[int]
    TOUCH_FIELD_NUMBER: _ClassVar[int]
    tenant: str
    objects: _containers.RepeatedScalarFieldContainer[str]
    touch: bool
    def __init__(self, tenant: _Optional[str] = ..., objects: _Optional[_Iterable[str]] = ..., touch: bool = ...) -> None: ...

class HasObjectsResponse(_message.Message):
    __slots__ = ("presence", "bytes")
    class Presence(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
        __slots__ = ()
        PRESENCE_NONE: _ClassVar[HasObjectsResponse.Presence]
        PRESENCE_MEMORY: _ClassVar[HasObjectsResponse.Presence]
        PRESENCE_SSD: _ClassVar[HasObjectsResponse.Presence]
    PRESENCE_NONE: HasObjectsResponse.Presence
    PRESENCE_MEMORY: HasObjectsResponse.Presence
    PRESENCE_SSD: HasObjectsResponse.Presence
    PRESENCE_FIELD_NUMBER: _ClassVar[int]
    BYTES_FIELD_NUMBER: _ClassVar[int]
    presence: _containers.RepeatedScalarFieldContainer[HasObjectsResponse.Presence]
    bytes: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, presence: _Optional[_Iterable[_Union[HasObjectsResponse.Presence, str]]] = ..., bytes: _Optional[_Iterable[int]] = ...) -> None: ...

class DeleteObjectsRequest(_message.Message):
    __slots__ = ("tenant", "objects")
    TENANT_FIELD_NUMBER: _ClassVar[int]
    OBJECTS_FIELD_NUMBER: _ClassVar[int]
    tenant: str
    objects: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, tenant: _Optional[str] = ..., objects: _Optional[_Iterable[str]] = ...) -> None: ...

class DeleteObjectsResponse(_message.Message):
    __slots__ = ("deleted",)
    DELETED_FIELD_NUMBER: _ClassVar[int]
    deleted: _containers.RepeatedScalarFieldContainer[bool]
    def __init__(self, deleted: _Optional[_Iterable[bool]] = ...) -> None: ...

class ListObjectsRequest(_message.Message):
    __slots__ = ("tenant", "prefix", "page_size", "page_token")
    TENANT_FIELD_NUMBER: _ClassVar[int]
    PREFIX_FIELD_NUMBER: _ClassVar[int]
    PAGE_SIZE_FIELD_NUMBER: _ClassVar[int]
    PAGE_TOKEN_FIELD_NUMBER: _ClassVar[int]
    tenant: str
    prefix: str
    page_size: int
    page_token: str
    def __init__(self, tenant: _Optional[str] = ..., prefix: _Optional[str] = ..., page_size: _Optional[int] = ..., page_token: _Optional[str] = ...) -> None: ...

class ListObjectsResponse(_message.Message):
    __slots__ = ("objects", "next_page_token")
    OBJECTS_FIELD_NUMBER: _ClassVar[int]
    NEXT_PAGE_TOKEN_FIELD_NUMBER: _ClassVar[int]
    objects: _containers.RepeatedCompositeFieldContainer[ObjectInfo]
    next_page_token: str
    def __init__(self, objects: _Optional[_Iterable[_Union[ObjectInfo, _Mapping]]] = ..., next_page_token: _Optional[str] = ...) -> None: ...
