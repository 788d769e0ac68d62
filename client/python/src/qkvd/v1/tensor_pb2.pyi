from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from typing import ClassVar as _ClassVar, Iterable as _Iterable, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class DType(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    DTYPE_UNSPECIFIED: _ClassVar[DType]
    DTYPE_FP32: _ClassVar[DType]
    DTYPE_FP16: _ClassVar[DType]
    DTYPE_BF16: _ClassVar[DType]

class RopeForm(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    ROPE_FORM_UNSPECIFIED: _ClassVar[RopeForm]
    ROPE_FORM_AFTER: _ClassVar[RopeForm]
    ROPE_FORM_BEFORE: _ClassVar[RopeForm]
DTYPE_UNSPECIFIED: DType
DTYPE_FP32: DType
DTYPE_FP16: DType
DTYPE_BF16: DType
ROPE_FORM_UNSPECIFIED: RopeForm
ROPE_FORM_AFTER: RopeForm
ROPE_FORM_BEFORE: RopeForm

class Tensor(_message.Message):
    __slots__ = ("dtype", "dims", "strides", "shared_memory_region", "shared_memory_offset", "shared_memory_byte_size", "data")
    DTYPE_FIELD_NUMBER: _ClassVar[int]
    DIMS_FIELD_NUMBER: _ClassVar[int]
    STRIDES_FIELD_NUMBER: _ClassVar[int]
    SHARED_MEMORY_REGION_FIELD_NUMBER: _ClassVar[int]
    SHARED_MEMORY_OFFSET_FIELD_NUMBER: _ClassVar[int]
    SHARED_MEMORY_BYTE_SIZE_FIELD_NUMBER: _ClassVar[int]
    DATA_FIELD_NUMBER: _ClassVar[int]
    dtype: DType
    dims: _containers.RepeatedScalarFieldContainer[int]
    strides: _containers.RepeatedScalarFieldContainer[int]
    shared_memory_region: str
    shared_memory_offset: int
    shared_memory_byte_size: int
    data: bytes
    def __init__(self, dtype: _Optional[_Union[DType, str]] = ..., dims: _Optional[_Iterable[int]] = ..., strides: _Optional[_Iterable[int]] = ..., shared_memory_region: _Optional[str] = ..., shared_memory_offset: _Optional[int] = ..., shared_memory_byte_size: _Optional[int] = ..., data: _Optional[bytes] = ...) -> None: ...

class RegionPart(_message.Message):
    __slots__ = ("shared_memory_region", "shared_memory_offset", "shared_memory_byte_size")
    SHARED_MEMORY_REGION_FIELD_NUMBER: _ClassVar[int]
    SHARED_MEMORY_OFFSET_FIELD_NUMBER: _ClassVar[int]
    SHARED_MEMORY_BYTE_SIZE_FIELD_NUMBER: _ClassVar[int]
    shared_memory_region: str
    shared_memory_offset: int
    shared_memory_byte_size: int
    def __init__(self, shared_memory_region: _Optional[str] = ..., shared_memory_offset: _Optional[int] = ..., shared_memory_byte_size: _Optional[int] = ...) -> None: ...

class Status(_message.Message):
    __slots__ = ("code", "message")
    CODE_FIELD_NUMBER: _ClassVar[int]
    MESSAGE_FIELD_NUMBER: _ClassVar[int]
    code: int
    message: str
    def __init__(self, code: _Optional[int] = ..., message: _Optional[str] = ...) -> None: ...

class TokenRange(_message.Message):
    __slots__ = ("begin", "end")
    BEGIN_FIELD_NUMBER: _ClassVar[int]
    END_FIELD_NUMBER: _ClassVar[int]
    begin: int
    end: int
    def __init__(self, begin: _Optional[int] = ..., end: _Optional[int] = ...) -> None: ...
