from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class HandoffAbortReason(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    HANDOFF_ABORT_REASON_UNSPECIFIED: _ClassVar[HandoffAbortReason]
    HANDOFF_ABORT_REASON_CANCELLED: _ClassVar[HandoffAbortReason]
    HANDOFF_ABORT_REASON_DEADLINE: _ClassVar[HandoffAbortReason]
    HANDOFF_ABORT_REASON_LEASE_EXPIRED: _ClassVar[HandoffAbortReason]
    HANDOFF_ABORT_REASON_UNKNOWN_TRANSFER: _ClassVar[HandoffAbortReason]
    HANDOFF_ABORT_REASON_LAYOUT_MISMATCH: _ClassVar[HandoffAbortReason]
    HANDOFF_ABORT_REASON_DIGEST_MISMATCH: _ClassVar[HandoffAbortReason]
    HANDOFF_ABORT_REASON_READ_FAILED: _ClassVar[HandoffAbortReason]
    HANDOFF_ABORT_REASON_PEER_LOST: _ClassVar[HandoffAbortReason]
    HANDOFF_ABORT_REASON_PREFILL_FAILED: _ClassVar[HandoffAbortReason]
    HANDOFF_ABORT_REASON_OVERLOADED: _ClassVar[HandoffAbortReason]
HANDOFF_ABORT_REASON_UNSPECIFIED: HandoffAbortReason
HANDOFF_ABORT_REASON_CANCELLED: HandoffAbortReason
HANDOFF_ABORT_REASON_DEADLINE: HandoffAbortReason
HANDOFF_ABORT_REASON_LEASE_EXPIRED: HandoffAbortReason
HANDOFF_ABORT_REASON_UNKNOWN_TRANSFER: HandoffAbortReason
HANDOFF_ABORT_REASON_LAYOUT_MISMATCH: HandoffAbortReason
HANDOFF_ABORT_REASON_DIGEST_MISMATCH: HandoffAbortReason
HANDOFF_ABORT_REASON_READ_FAILED: HandoffAbortReason
HANDOFF_ABORT_REASON_PEER_LOST: HandoffAbortReason
HANDOFF_ABORT_REASON_PREFILL_FAILED: HandoffAbortReason
HANDOFF_ABORT_REASON_OVERLOADED: HandoffAbortReason

class HandoffEnvelope(_message.Message):
    __slots__ = ("version", "incarnation", "counter", "transfer_id", "want", "ready", "heartbeat", "release", "abort", "ping")
    VERSION_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    COUNTER_FIELD_NUMBER: _ClassVar[int]
    TRANSFER_ID_FIELD_NUMBER: _ClassVar[int]
    WANT_FIELD_NUMBER: _ClassVar[int]
    READY_FIELD_NUMBER: _ClassVar[int]
    HEARTBEAT_FIELD_NUMBER: _ClassVar[int]
    RELEASE_FIELD_NUMBER: _ClassVar[int]
    ABORT_FIELD_NUMBER: _ClassVar[int]
    PING_FIELD_NUMBER: _ClassVar[int]
    version: int
    incarnation: int
    counter: int
    transfer_id: bytes
    want: HandoffWant
    ready: HandoffReady
    heartbeat: HandoffHeartbeat
    release: HandoffRelease
    abort: HandoffAbort
    ping: HandoffPing
    def __init__(self, version: _Optional[int] = ..., incarnation: _Optional[int] = ..., counter: _Optional[int] = ..., transfer_id: _Optional[bytes] = ..., want: _Optional[_Union[HandoffWant, _Mapping]] = ..., ready: _Optional[_Union[HandoffReady, _Mapping]] = ..., heartbeat: _Optional[_Union[HandoffHeartbeat, _Mapping]] = ..., release: _Optional[_Union[HandoffRelease, _Mapping]] = ..., abort: _Optional[_Union[HandoffAbort, _Mapping]] = ..., ping: _Optional[_Union[HandoffPing, _Mapping]] = ...) -> None: ...

class HandoffWant(_message.Message):
    __slots__ = ("layout_fingerprint", "position_runs")
    LAYOUT_FINGERPRINT_FIELD_NUMBER: _ClassVar[int]
    POSITION_RUNS_FIELD_NUMBER: _ClassVar[int]
    layout_fingerprint: int
    position_runs: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, layout_fingerprint: _Optional[int] = ..., position_runs: _Optional[_Iterable[int]] = ...) -> None: ...

class HandoffReady(_message.Message):
    __slots__ = ("ack", "first_block", "position_runs", "last", "blocks", "digests", "token_ids")
    ACK_FIELD_NUMBER: _ClassVar[int]
    FIRST_BLOCK_FIELD_NUMBER: _ClassVar[int]
    POSITION_RUNS_FIELD_NUMBER: _ClassVar[int]
    LAST_FIELD_NUMBER: _ClassVar[int]
    BLOCKS_FIELD_NUMBER: _ClassVar[int]
    DIGESTS_FIELD_NUMBER: _ClassVar[int]
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    ack: int
    first_block: int
    position_runs: _containers.RepeatedScalarFieldContainer[int]
    last: bool
    blocks: _containers.RepeatedScalarFieldContainer[int]
    digests: _containers.RepeatedScalarFieldContainer[int]
    token_ids: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, ack: _Optional[int] = ..., first_block: _Optional[int] = ..., position_runs: _Optional[_Iterable[int]] = ..., last: _Optional[bool] = ..., blocks: _Optional[_Iterable[int]] = ..., digests: _Optional[_Iterable[int]] = ..., token_ids: _Optional[_Iterable[int]] = ...) -> None: ...

class HandoffHeartbeat(_message.Message):
    __slots__ = ("ack", "entries")
    ACK_FIELD_NUMBER: _ClassVar[int]
    ENTRIES_FIELD_NUMBER: _ClassVar[int]
    ack: int
    entries: _containers.RepeatedCompositeFieldContainer[HandoffHeartbeatEntry]
    def __init__(self, ack: _Optional[int] = ..., entries: _Optional[_Iterable[_Union[HandoffHeartbeatEntry, _Mapping]]] = ...) -> None: ...

class HandoffHeartbeatEntry(_message.Message):
    __slots__ = ("transfer_id", "num_ready", "num_unplaced", "num_verified")
    TRANSFER_ID_FIELD_NUMBER: _ClassVar[int]
    NUM_READY_FIELD_NUMBER: _ClassVar[int]
    NUM_UNPLACED_FIELD_NUMBER: _ClassVar[int]
    NUM_VERIFIED_FIELD_NUMBER: _ClassVar[int]
    transfer_id: bytes
    num_ready: int
    num_unplaced: int
    num_verified: int
    def __init__(self, transfer_id: _Optional[bytes] = ..., num_ready: _Optional[int] = ..., num_unplaced: _Optional[int] = ..., num_verified: _Optional[int] = ...) -> None: ...

class HandoffRelease(_message.Message):
    __slots__ = ("reason",)
    REASON_FIELD_NUMBER: _ClassVar[int]
    reason: HandoffAbortReason
    def __init__(self, reason: _Optional[_Union[HandoffAbortReason, str]] = ...) -> None: ...

class HandoffAbort(_message.Message):
    __slots__ = ("reason", "detail")
    REASON_FIELD_NUMBER: _ClassVar[int]
    DETAIL_FIELD_NUMBER: _ClassVar[int]
    reason: HandoffAbortReason
    detail: str
    def __init__(self, reason: _Optional[_Union[HandoffAbortReason, str]] = ..., detail: _Optional[str] = ...) -> None: ...

class HandoffPing(_message.Message):
    __slots__ = ("ack",)
    ACK_FIELD_NUMBER: _ClassVar[int]
    ack: int
    def __init__(self, ack: _Optional[int] = ...) -> None: ...
