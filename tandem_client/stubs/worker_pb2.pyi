from tandem_client.stubs import inference_pb2 as _inference_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class WorkerRole(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    WORKER_ROLE_UNSPECIFIED: _ClassVar[WorkerRole]
    WORKER_ROLE_PREFILL: _ClassVar[WorkerRole]
    WORKER_ROLE_DECODE: _ClassVar[WorkerRole]

class WorkerState(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    WORKER_STATE_UNSPECIFIED: _ClassVar[WorkerState]
    WORKER_STATE_STARTING: _ClassVar[WorkerState]
    WORKER_STATE_SERVING: _ClassVar[WorkerState]
    WORKER_STATE_DRAINING: _ClassVar[WorkerState]
    WORKER_STATE_LOST: _ClassVar[WorkerState]

class PathLane(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    PATH_LANE_UNKNOWN: _ClassVar[PathLane]
    PATH_LANE_SHARED_MEMORY: _ClassVar[PathLane]
    PATH_LANE_CUDA_IPC: _ClassVar[PathLane]
    PATH_LANE_RDMA: _ClassVar[PathLane]
    PATH_LANE_TCP: _ClassVar[PathLane]

class PathState(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    PATH_STATE_UNSPECIFIED: _ClassVar[PathState]
    PATH_STATE_CONNECTING: _ClassVar[PathState]
    PATH_STATE_FINE: _ClassVar[PathState]
    PATH_STATE_SLOW: _ClassVar[PathState]
    PATH_STATE_FALLBACK: _ClassVar[PathState]
    PATH_STATE_UNREACHABLE: _ClassVar[PathState]
    PATH_STATE_REFUSED: _ClassVar[PathState]

class HolderKind(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    HOLDER_KIND_UNSPECIFIED: _ClassVar[HolderKind]
    HOLDER_KIND_SEQUENCE: _ClassVar[HolderKind]
    HOLDER_KIND_OFFER: _ClassVar[HolderKind]
    HOLDER_KIND_PULL: _ClassVar[HolderKind]

class HolderState(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    HOLDER_STATE_UNSPECIFIED: _ClassVar[HolderState]
    HOLDER_STATE_WAITING: _ClassVar[HolderState]
    HOLDER_STATE_RUNNING: _ClassVar[HolderState]
    HOLDER_STATE_TRANSFER: _ClassVar[HolderState]
    HOLDER_STATE_ENDING: _ClassVar[HolderState]
    HOLDER_STATE_COMPUTING: _ClassVar[HolderState]
    HOLDER_STATE_OFFERED: _ClassVar[HolderState]
    HOLDER_STATE_RESERVED: _ClassVar[HolderState]
    HOLDER_STATE_WANTING: _ClassVar[HolderState]
    HOLDER_STATE_READING: _ClassVar[HolderState]
    HOLDER_STATE_VERIFYING: _ClassVar[HolderState]
WORKER_ROLE_UNSPECIFIED: WorkerRole
WORKER_ROLE_PREFILL: WorkerRole
WORKER_ROLE_DECODE: WorkerRole
WORKER_STATE_UNSPECIFIED: WorkerState
WORKER_STATE_STARTING: WorkerState
WORKER_STATE_SERVING: WorkerState
WORKER_STATE_DRAINING: WorkerState
WORKER_STATE_LOST: WorkerState
PATH_LANE_UNKNOWN: PathLane
PATH_LANE_SHARED_MEMORY: PathLane
PATH_LANE_CUDA_IPC: PathLane
PATH_LANE_RDMA: PathLane
PATH_LANE_TCP: PathLane
PATH_STATE_UNSPECIFIED: PathState
PATH_STATE_CONNECTING: PathState
PATH_STATE_FINE: PathState
PATH_STATE_SLOW: PathState
PATH_STATE_FALLBACK: PathState
PATH_STATE_UNREACHABLE: PathState
PATH_STATE_REFUSED: PathState
HOLDER_KIND_UNSPECIFIED: HolderKind
HOLDER_KIND_SEQUENCE: HolderKind
HOLDER_KIND_OFFER: HolderKind
HOLDER_KIND_PULL: HolderKind
HOLDER_STATE_UNSPECIFIED: HolderState
HOLDER_STATE_WAITING: HolderState
HOLDER_STATE_RUNNING: HolderState
HOLDER_STATE_TRANSFER: HolderState
HOLDER_STATE_ENDING: HolderState
HOLDER_STATE_COMPUTING: HolderState
HOLDER_STATE_OFFERED: HolderState
HOLDER_STATE_RESERVED: HolderState
HOLDER_STATE_WANTING: HolderState
HOLDER_STATE_READING: HolderState
HOLDER_STATE_VERIFYING: HolderState

class KVLayout(_message.Message):
    __slots__ = ("model", "dtype", "num_layers", "num_kv_heads", "block_size", "head_dim", "first_layer", "first_kv_head", "quantization")
    MODEL_FIELD_NUMBER: _ClassVar[int]
    DTYPE_FIELD_NUMBER: _ClassVar[int]
    NUM_LAYERS_FIELD_NUMBER: _ClassVar[int]
    NUM_KV_HEADS_FIELD_NUMBER: _ClassVar[int]
    BLOCK_SIZE_FIELD_NUMBER: _ClassVar[int]
    HEAD_DIM_FIELD_NUMBER: _ClassVar[int]
    FIRST_LAYER_FIELD_NUMBER: _ClassVar[int]
    FIRST_KV_HEAD_FIELD_NUMBER: _ClassVar[int]
    QUANTIZATION_FIELD_NUMBER: _ClassVar[int]
    model: str
    dtype: str
    num_layers: int
    num_kv_heads: int
    block_size: int
    head_dim: int
    first_layer: int
    first_kv_head: int
    quantization: str
    def __init__(self, model: _Optional[str] = ..., dtype: _Optional[str] = ..., num_layers: _Optional[int] = ..., num_kv_heads: _Optional[int] = ..., block_size: _Optional[int] = ..., head_dim: _Optional[int] = ..., first_layer: _Optional[int] = ..., first_kv_head: _Optional[int] = ..., quantization: _Optional[str] = ...) -> None: ...

class Location(_message.Message):
    __slots__ = ("machine", "on_gpu", "memory_bytes_per_s", "link_bytes_per_s", "gpu")
    MACHINE_FIELD_NUMBER: _ClassVar[int]
    ON_GPU_FIELD_NUMBER: _ClassVar[int]
    MEMORY_BYTES_PER_S_FIELD_NUMBER: _ClassVar[int]
    LINK_BYTES_PER_S_FIELD_NUMBER: _ClassVar[int]
    GPU_FIELD_NUMBER: _ClassVar[int]
    machine: str
    on_gpu: bool
    memory_bytes_per_s: float
    link_bytes_per_s: float
    gpu: str
    def __init__(self, machine: _Optional[str] = ..., on_gpu: _Optional[bool] = ..., memory_bytes_per_s: _Optional[float] = ..., link_bytes_per_s: _Optional[float] = ..., gpu: _Optional[str] = ...) -> None: ...

class AgentAddress(_message.Message):
    __slots__ = ("name", "incarnation", "metadata", "pool_base", "num_blocks", "layout", "lease_s", "probe_bytes", "location", "protocol_version", "device")
    NAME_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    METADATA_FIELD_NUMBER: _ClassVar[int]
    POOL_BASE_FIELD_NUMBER: _ClassVar[int]
    NUM_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    LAYOUT_FIELD_NUMBER: _ClassVar[int]
    LEASE_S_FIELD_NUMBER: _ClassVar[int]
    PROBE_BYTES_FIELD_NUMBER: _ClassVar[int]
    LOCATION_FIELD_NUMBER: _ClassVar[int]
    PROTOCOL_VERSION_FIELD_NUMBER: _ClassVar[int]
    DEVICE_FIELD_NUMBER: _ClassVar[int]
    name: str
    incarnation: int
    metadata: bytes
    pool_base: int
    num_blocks: int
    layout: KVLayout
    lease_s: float
    probe_bytes: int
    location: Location
    protocol_version: int
    device: int
    def __init__(self, name: _Optional[str] = ..., incarnation: _Optional[int] = ..., metadata: _Optional[bytes] = ..., pool_base: _Optional[int] = ..., num_blocks: _Optional[int] = ..., layout: _Optional[_Union[KVLayout, _Mapping]] = ..., lease_s: _Optional[float] = ..., probe_bytes: _Optional[int] = ..., location: _Optional[_Union[Location, _Mapping]] = ..., protocol_version: _Optional[int] = ..., device: _Optional[int] = ...) -> None: ...

class PeerChange(_message.Message):
    __slots__ = ("owner", "reader", "left")
    OWNER_FIELD_NUMBER: _ClassVar[int]
    READER_FIELD_NUMBER: _ClassVar[int]
    LEFT_FIELD_NUMBER: _ClassVar[int]
    owner: AgentAddress
    reader: AgentAddress
    left: str
    def __init__(self, owner: _Optional[_Union[AgentAddress, _Mapping]] = ..., reader: _Optional[_Union[AgentAddress, _Mapping]] = ..., left: _Optional[str] = ...) -> None: ...

class UpdatePeersRequest(_message.Message):
    __slots__ = ("changes",)
    CHANGES_FIELD_NUMBER: _ClassVar[int]
    changes: _containers.RepeatedCompositeFieldContainer[PeerChange]
    def __init__(self, changes: _Optional[_Iterable[_Union[PeerChange, _Mapping]]] = ...) -> None: ...

class UpdatePeersResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class SequenceRequest(_message.Message):
    __slots__ = ("request_id", "num_prompt_tokens", "sampling", "stop", "logprobs", "cache_salt", "priority", "call", "router_id", "packed_token_ids", "tenant", "grammar", "no_speculation", "age_us", "adapter")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    NUM_PROMPT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    SAMPLING_FIELD_NUMBER: _ClassVar[int]
    STOP_FIELD_NUMBER: _ClassVar[int]
    LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    CACHE_SALT_FIELD_NUMBER: _ClassVar[int]
    PRIORITY_FIELD_NUMBER: _ClassVar[int]
    CALL_FIELD_NUMBER: _ClassVar[int]
    ROUTER_ID_FIELD_NUMBER: _ClassVar[int]
    PACKED_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    TENANT_FIELD_NUMBER: _ClassVar[int]
    GRAMMAR_FIELD_NUMBER: _ClassVar[int]
    NO_SPECULATION_FIELD_NUMBER: _ClassVar[int]
    AGE_US_FIELD_NUMBER: _ClassVar[int]
    ADAPTER_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    num_prompt_tokens: int
    sampling: _inference_pb2.SamplingParams
    stop: _inference_pb2.StopConditions
    logprobs: int
    cache_salt: str
    priority: int
    call: int
    router_id: str
    packed_token_ids: bytes
    tenant: str
    grammar: str
    no_speculation: bool
    age_us: int
    adapter: str
    def __init__(self, request_id: _Optional[str] = ..., num_prompt_tokens: _Optional[int] = ..., sampling: _Optional[_Union[_inference_pb2.SamplingParams, _Mapping]] = ..., stop: _Optional[_Union[_inference_pb2.StopConditions, _Mapping]] = ..., logprobs: _Optional[int] = ..., cache_salt: _Optional[str] = ..., priority: _Optional[int] = ..., call: _Optional[int] = ..., router_id: _Optional[str] = ..., packed_token_ids: _Optional[bytes] = ..., tenant: _Optional[str] = ..., grammar: _Optional[str] = ..., no_speculation: _Optional[bool] = ..., age_us: _Optional[int] = ..., adapter: _Optional[str] = ...) -> None: ...

class PrefixSource(_message.Message):
    __slots__ = ("transfer_id", "agent", "num_tokens", "limit_ms")
    TRANSFER_ID_FIELD_NUMBER: _ClassVar[int]
    AGENT_FIELD_NUMBER: _ClassVar[int]
    NUM_TOKENS_FIELD_NUMBER: _ClassVar[int]
    LIMIT_MS_FIELD_NUMBER: _ClassVar[int]
    transfer_id: bytes
    agent: AgentAddress
    num_tokens: int
    limit_ms: float
    def __init__(self, transfer_id: _Optional[bytes] = ..., agent: _Optional[_Union[AgentAddress, _Mapping]] = ..., num_tokens: _Optional[int] = ..., limit_ms: _Optional[float] = ...) -> None: ...

class OfferPrefixRequest(_message.Message):
    __slots__ = ("transfer_id", "reader", "packed_token_ids", "cache_salt", "limit_ms")
    TRANSFER_ID_FIELD_NUMBER: _ClassVar[int]
    READER_FIELD_NUMBER: _ClassVar[int]
    PACKED_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    CACHE_SALT_FIELD_NUMBER: _ClassVar[int]
    LIMIT_MS_FIELD_NUMBER: _ClassVar[int]
    transfer_id: bytes
    reader: AgentAddress
    packed_token_ids: bytes
    cache_salt: str
    limit_ms: float
    def __init__(self, transfer_id: _Optional[bytes] = ..., reader: _Optional[_Union[AgentAddress, _Mapping]] = ..., packed_token_ids: _Optional[bytes] = ..., cache_salt: _Optional[str] = ..., limit_ms: _Optional[float] = ...) -> None: ...

class OfferPrefixResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class PrefillRequest(_message.Message):
    __slots__ = ("sequence", "transfer_id", "reader", "prefix")
    SEQUENCE_FIELD_NUMBER: _ClassVar[int]
    TRANSFER_ID_FIELD_NUMBER: _ClassVar[int]
    READER_FIELD_NUMBER: _ClassVar[int]
    PREFIX_FIELD_NUMBER: _ClassVar[int]
    sequence: SequenceRequest
    transfer_id: bytes
    reader: AgentAddress
    prefix: PrefixSource
    def __init__(self, sequence: _Optional[_Union[SequenceRequest, _Mapping]] = ..., transfer_id: _Optional[bytes] = ..., reader: _Optional[_Union[AgentAddress, _Mapping]] = ..., prefix: _Optional[_Union[PrefixSource, _Mapping]] = ...) -> None: ...

class SampledToken(_message.Message):
    __slots__ = ("index", "token_id", "logprobs")
    INDEX_FIELD_NUMBER: _ClassVar[int]
    TOKEN_ID_FIELD_NUMBER: _ClassVar[int]
    LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    index: int
    token_id: int
    logprobs: _inference_pb2.TokenLogprobs
    def __init__(self, index: _Optional[int] = ..., token_id: _Optional[int] = ..., logprobs: _Optional[_Union[_inference_pb2.TokenLogprobs, _Mapping]] = ...) -> None: ...

class PrefillResponse(_message.Message):
    __slots__ = ("first_token", "finish_reason", "cached_tokens", "queue_ms", "prefill_ms", "kv_block_seconds", "stages", "handoff", "read_tokens", "read_bytes")
    FIRST_TOKEN_FIELD_NUMBER: _ClassVar[int]
    FINISH_REASON_FIELD_NUMBER: _ClassVar[int]
    CACHED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    QUEUE_MS_FIELD_NUMBER: _ClassVar[int]
    PREFILL_MS_FIELD_NUMBER: _ClassVar[int]
    KV_BLOCK_SECONDS_FIELD_NUMBER: _ClassVar[int]
    STAGES_FIELD_NUMBER: _ClassVar[int]
    HANDOFF_FIELD_NUMBER: _ClassVar[int]
    READ_TOKENS_FIELD_NUMBER: _ClassVar[int]
    READ_BYTES_FIELD_NUMBER: _ClassVar[int]
    first_token: SampledToken
    finish_reason: _inference_pb2.FinishReason
    cached_tokens: int
    queue_ms: float
    prefill_ms: float
    kv_block_seconds: float
    stages: _containers.RepeatedCompositeFieldContainer[StageSpan]
    handoff: bytes
    read_tokens: int
    read_bytes: int
    def __init__(self, first_token: _Optional[_Union[SampledToken, _Mapping]] = ..., finish_reason: _Optional[_Union[_inference_pb2.FinishReason, str]] = ..., cached_tokens: _Optional[int] = ..., queue_ms: _Optional[float] = ..., prefill_ms: _Optional[float] = ..., kv_block_seconds: _Optional[float] = ..., stages: _Optional[_Iterable[_Union[StageSpan, _Mapping]]] = ..., handoff: _Optional[bytes] = ..., read_tokens: _Optional[int] = ..., read_bytes: _Optional[int] = ...) -> None: ...

class WithdrawRequest(_message.Message):
    __slots__ = ("transfer_id",)
    TRANSFER_ID_FIELD_NUMBER: _ClassVar[int]
    transfer_id: bytes
    def __init__(self, transfer_id: _Optional[bytes] = ...) -> None: ...

class WithdrawResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class HandOverRequest(_message.Message):
    __slots__ = ("transfer_id", "handoff")
    TRANSFER_ID_FIELD_NUMBER: _ClassVar[int]
    HANDOFF_FIELD_NUMBER: _ClassVar[int]
    transfer_id: bytes
    handoff: bytes
    def __init__(self, transfer_id: _Optional[bytes] = ..., handoff: _Optional[bytes] = ...) -> None: ...

class HandOverResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class StageSpan(_message.Message):
    __slots__ = ("name", "start_ms", "duration_ms", "attributes")
    class AttributesEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: str
        def __init__(self, key: _Optional[str] = ..., value: _Optional[str] = ...) -> None: ...
    NAME_FIELD_NUMBER: _ClassVar[int]
    START_MS_FIELD_NUMBER: _ClassVar[int]
    DURATION_MS_FIELD_NUMBER: _ClassVar[int]
    ATTRIBUTES_FIELD_NUMBER: _ClassVar[int]
    name: str
    start_ms: float
    duration_ms: float
    attributes: _containers.ScalarMap[str, str]
    def __init__(self, name: _Optional[str] = ..., start_ms: _Optional[float] = ..., duration_ms: _Optional[float] = ..., attributes: _Optional[_Mapping[str, str]] = ...) -> None: ...

class DecodeRequest(_message.Message):
    __slots__ = ("sequence", "transfer_id", "source", "stream_id", "is_move", "prefix")
    SEQUENCE_FIELD_NUMBER: _ClassVar[int]
    TRANSFER_ID_FIELD_NUMBER: _ClassVar[int]
    SOURCE_FIELD_NUMBER: _ClassVar[int]
    STREAM_ID_FIELD_NUMBER: _ClassVar[int]
    IS_MOVE_FIELD_NUMBER: _ClassVar[int]
    PREFIX_FIELD_NUMBER: _ClassVar[int]
    sequence: SequenceRequest
    transfer_id: bytes
    source: AgentAddress
    stream_id: int
    is_move: bool
    prefix: PrefixSource
    def __init__(self, sequence: _Optional[_Union[SequenceRequest, _Mapping]] = ..., transfer_id: _Optional[bytes] = ..., source: _Optional[_Union[AgentAddress, _Mapping]] = ..., stream_id: _Optional[int] = ..., is_move: _Optional[bool] = ..., prefix: _Optional[_Union[PrefixSource, _Mapping]] = ...) -> None: ...

class MoveRequest(_message.Message):
    __slots__ = ("request_id", "transfer_id", "reader", "resume")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    TRANSFER_ID_FIELD_NUMBER: _ClassVar[int]
    READER_FIELD_NUMBER: _ClassVar[int]
    RESUME_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    transfer_id: bytes
    reader: MoveReader
    resume: MoveResume
    def __init__(self, request_id: _Optional[str] = ..., transfer_id: _Optional[bytes] = ..., reader: _Optional[_Union[MoveReader, _Mapping]] = ..., resume: _Optional[_Union[MoveResume, _Mapping]] = ...) -> None: ...

class MoveReader(_message.Message):
    __slots__ = ("agent", "num_tokens")
    AGENT_FIELD_NUMBER: _ClassVar[int]
    NUM_TOKENS_FIELD_NUMBER: _ClassVar[int]
    agent: AgentAddress
    num_tokens: int
    def __init__(self, agent: _Optional[_Union[AgentAddress, _Mapping]] = ..., num_tokens: _Optional[int] = ...) -> None: ...

class MoveResume(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class MoveResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class MoveNotice(_message.Message):
    __slots__ = ("call", "first_index", "lacks_room")
    CALL_FIELD_NUMBER: _ClassVar[int]
    FIRST_INDEX_FIELD_NUMBER: _ClassVar[int]
    LACKS_ROOM_FIELD_NUMBER: _ClassVar[int]
    call: int
    first_index: int
    lacks_room: bool
    def __init__(self, call: _Optional[int] = ..., first_index: _Optional[int] = ..., lacks_room: _Optional[bool] = ...) -> None: ...

class StreamTokensRequest(_message.Message):
    __slots__ = ("router_id", "stream_id")
    ROUTER_ID_FIELD_NUMBER: _ClassVar[int]
    STREAM_ID_FIELD_NUMBER: _ClassVar[int]
    router_id: str
    stream_id: int
    def __init__(self, router_id: _Optional[str] = ..., stream_id: _Optional[int] = ...) -> None: ...

class StepTokens(_message.Message):
    __slots__ = ("calls", "indexes", "token_ids", "logprob_places", "logprobs", "moves")
    CALLS_FIELD_NUMBER: _ClassVar[int]
    INDEXES_FIELD_NUMBER: _ClassVar[int]
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    LOGPROB_PLACES_FIELD_NUMBER: _ClassVar[int]
    LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    MOVES_FIELD_NUMBER: _ClassVar[int]
    calls: _containers.RepeatedScalarFieldContainer[int]
    indexes: _containers.RepeatedScalarFieldContainer[int]
    token_ids: _containers.RepeatedScalarFieldContainer[int]
    logprob_places: _containers.RepeatedScalarFieldContainer[int]
    logprobs: _containers.RepeatedCompositeFieldContainer[_inference_pb2.TokenLogprobs]
    moves: _containers.RepeatedCompositeFieldContainer[MoveNotice]
    def __init__(self, calls: _Optional[_Iterable[int]] = ..., indexes: _Optional[_Iterable[int]] = ..., token_ids: _Optional[_Iterable[int]] = ..., logprob_places: _Optional[_Iterable[int]] = ..., logprobs: _Optional[_Iterable[_Union[_inference_pb2.TokenLogprobs, _Mapping]]] = ..., moves: _Optional[_Iterable[_Union[MoveNotice, _Mapping]]] = ...) -> None: ...

class DecodeFinished(_message.Message):
    __slots__ = ("finish_reason", "cached_tokens", "queue_ms", "prefill_ms", "transfer_ms", "transfer_exposed_ms", "transferred_bytes", "num_tokens", "kv_block_seconds", "num_moved_blocks", "num_skipped_blocks", "stages", "drafted_tokens", "accepted_drafts", "has_moved", "recomputed_tokens", "read_tokens", "read_bytes")
    FINISH_REASON_FIELD_NUMBER: _ClassVar[int]
    CACHED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    QUEUE_MS_FIELD_NUMBER: _ClassVar[int]
    PREFILL_MS_FIELD_NUMBER: _ClassVar[int]
    TRANSFER_MS_FIELD_NUMBER: _ClassVar[int]
    TRANSFER_EXPOSED_MS_FIELD_NUMBER: _ClassVar[int]
    TRANSFERRED_BYTES_FIELD_NUMBER: _ClassVar[int]
    NUM_TOKENS_FIELD_NUMBER: _ClassVar[int]
    KV_BLOCK_SECONDS_FIELD_NUMBER: _ClassVar[int]
    NUM_MOVED_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    NUM_SKIPPED_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    STAGES_FIELD_NUMBER: _ClassVar[int]
    DRAFTED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    ACCEPTED_DRAFTS_FIELD_NUMBER: _ClassVar[int]
    HAS_MOVED_FIELD_NUMBER: _ClassVar[int]
    RECOMPUTED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    READ_TOKENS_FIELD_NUMBER: _ClassVar[int]
    READ_BYTES_FIELD_NUMBER: _ClassVar[int]
    finish_reason: _inference_pb2.FinishReason
    cached_tokens: int
    queue_ms: float
    prefill_ms: float
    transfer_ms: float
    transfer_exposed_ms: float
    transferred_bytes: int
    num_tokens: int
    kv_block_seconds: float
    num_moved_blocks: int
    num_skipped_blocks: int
    stages: _containers.RepeatedCompositeFieldContainer[StageSpan]
    drafted_tokens: int
    accepted_drafts: int
    has_moved: bool
    recomputed_tokens: int
    read_tokens: int
    read_bytes: int
    def __init__(self, finish_reason: _Optional[_Union[_inference_pb2.FinishReason, str]] = ..., cached_tokens: _Optional[int] = ..., queue_ms: _Optional[float] = ..., prefill_ms: _Optional[float] = ..., transfer_ms: _Optional[float] = ..., transfer_exposed_ms: _Optional[float] = ..., transferred_bytes: _Optional[int] = ..., num_tokens: _Optional[int] = ..., kv_block_seconds: _Optional[float] = ..., num_moved_blocks: _Optional[int] = ..., num_skipped_blocks: _Optional[int] = ..., stages: _Optional[_Iterable[_Union[StageSpan, _Mapping]]] = ..., drafted_tokens: _Optional[int] = ..., accepted_drafts: _Optional[int] = ..., has_moved: _Optional[bool] = ..., recomputed_tokens: _Optional[int] = ..., read_tokens: _Optional[int] = ..., read_bytes: _Optional[int] = ...) -> None: ...

class WatchRequest(_message.Message):
    __slots__ = ("router_id", "min_interval_ms")
    ROUTER_ID_FIELD_NUMBER: _ClassVar[int]
    MIN_INTERVAL_MS_FIELD_NUMBER: _ClassVar[int]
    router_id: str
    min_interval_ms: int
    def __init__(self, router_id: _Optional[str] = ..., min_interval_ms: _Optional[int] = ...) -> None: ...

class PaceReportsRequest(_message.Message):
    __slots__ = ("router_id", "min_interval_ms")
    ROUTER_ID_FIELD_NUMBER: _ClassVar[int]
    MIN_INTERVAL_MS_FIELD_NUMBER: _ClassVar[int]
    router_id: str
    min_interval_ms: int
    def __init__(self, router_id: _Optional[str] = ..., min_interval_ms: _Optional[int] = ...) -> None: ...

class PaceReportsResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class Ledger(_message.Message):
    __slots__ = ("free", "cached", "held", "leased", "incoming")
    FREE_FIELD_NUMBER: _ClassVar[int]
    CACHED_FIELD_NUMBER: _ClassVar[int]
    HELD_FIELD_NUMBER: _ClassVar[int]
    LEASED_FIELD_NUMBER: _ClassVar[int]
    INCOMING_FIELD_NUMBER: _ClassVar[int]
    free: int
    cached: int
    held: int
    leased: int
    incoming: int
    def __init__(self, free: _Optional[int] = ..., cached: _Optional[int] = ..., held: _Optional[int] = ..., leased: _Optional[int] = ..., incoming: _Optional[int] = ...) -> None: ...

class TransferCounts(_message.Message):
    __slots__ = ("computing", "offered", "reserved", "wanting", "reading", "verifying")
    COMPUTING_FIELD_NUMBER: _ClassVar[int]
    OFFERED_FIELD_NUMBER: _ClassVar[int]
    RESERVED_FIELD_NUMBER: _ClassVar[int]
    WANTING_FIELD_NUMBER: _ClassVar[int]
    READING_FIELD_NUMBER: _ClassVar[int]
    VERIFYING_FIELD_NUMBER: _ClassVar[int]
    computing: int
    offered: int
    reserved: int
    wanting: int
    reading: int
    verifying: int
    def __init__(self, computing: _Optional[int] = ..., offered: _Optional[int] = ..., reserved: _Optional[int] = ..., wanting: _Optional[int] = ..., reading: _Optional[int] = ..., verifying: _Optional[int] = ...) -> None: ...

class PathReport(_message.Message):
    __slots__ = ("peer", "state", "lane", "bytes_per_s", "expected_bytes_per_s", "latency_ms", "detail")
    PEER_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    LANE_FIELD_NUMBER: _ClassVar[int]
    BYTES_PER_S_FIELD_NUMBER: _ClassVar[int]
    EXPECTED_BYTES_PER_S_FIELD_NUMBER: _ClassVar[int]
    LATENCY_MS_FIELD_NUMBER: _ClassVar[int]
    DETAIL_FIELD_NUMBER: _ClassVar[int]
    peer: str
    state: PathState
    lane: PathLane
    bytes_per_s: float
    expected_bytes_per_s: float
    latency_ms: float
    detail: str
    def __init__(self, peer: _Optional[str] = ..., state: _Optional[_Union[PathState, str]] = ..., lane: _Optional[_Union[PathLane, str]] = ..., bytes_per_s: _Optional[float] = ..., expected_bytes_per_s: _Optional[float] = ..., latency_ms: _Optional[float] = ..., detail: _Optional[str] = ...) -> None: ...

class LoadReport(_message.Message):
    __slots__ = ("state", "num_running", "num_waiting", "num_pulls_waiting", "num_queued_tokens", "ledger", "num_prefilled_tokens", "num_sampled_tokens", "num_transfers", "transferred_bytes", "num_expired_leases", "num_preemptions", "transfers", "num_malformed_messages", "num_dropped_messages", "transfer_seconds", "paths", "num_corrupt_blocks", "num_calls", "router_calls", "step_cost", "step_limit_s", "num_decoding", "decode_context", "prompt_backlog", "num_promised_blocks", "num_released_blocks", "max_step_tokens", "batch_sequences", "batch_tokens", "busy_seconds", "decode_steps", "decode_step_seconds", "flop", "memory_bytes", "flop_use", "bandwidth_use", "slo_itl_s", "num_drafts", "num_right_drafts", "takes_moves", "gives_prefixes", "num_disk_blocks", "num_disk_reads", "num_disk_writes", "num_disk_failures", "disk_bytes_per_s")
    STATE_FIELD_NUMBER: _ClassVar[int]
    NUM_RUNNING_FIELD_NUMBER: _ClassVar[int]
    NUM_WAITING_FIELD_NUMBER: _ClassVar[int]
    NUM_PULLS_WAITING_FIELD_NUMBER: _ClassVar[int]
    NUM_QUEUED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    LEDGER_FIELD_NUMBER: _ClassVar[int]
    NUM_PREFILLED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    NUM_SAMPLED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    NUM_TRANSFERS_FIELD_NUMBER: _ClassVar[int]
    TRANSFERRED_BYTES_FIELD_NUMBER: _ClassVar[int]
    NUM_EXPIRED_LEASES_FIELD_NUMBER: _ClassVar[int]
    NUM_PREEMPTIONS_FIELD_NUMBER: _ClassVar[int]
    TRANSFERS_FIELD_NUMBER: _ClassVar[int]
    NUM_MALFORMED_MESSAGES_FIELD_NUMBER: _ClassVar[int]
    NUM_DROPPED_MESSAGES_FIELD_NUMBER: _ClassVar[int]
    TRANSFER_SECONDS_FIELD_NUMBER: _ClassVar[int]
    PATHS_FIELD_NUMBER: _ClassVar[int]
    NUM_CORRUPT_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    NUM_CALLS_FIELD_NUMBER: _ClassVar[int]
    ROUTER_CALLS_FIELD_NUMBER: _ClassVar[int]
    STEP_COST_FIELD_NUMBER: _ClassVar[int]
    STEP_LIMIT_S_FIELD_NUMBER: _ClassVar[int]
    NUM_DECODING_FIELD_NUMBER: _ClassVar[int]
    DECODE_CONTEXT_FIELD_NUMBER: _ClassVar[int]
    PROMPT_BACKLOG_FIELD_NUMBER: _ClassVar[int]
    NUM_PROMISED_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    NUM_RELEASED_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    MAX_STEP_TOKENS_FIELD_NUMBER: _ClassVar[int]
    BATCH_SEQUENCES_FIELD_NUMBER: _ClassVar[int]
    BATCH_TOKENS_FIELD_NUMBER: _ClassVar[int]
    BUSY_SECONDS_FIELD_NUMBER: _ClassVar[int]
    DECODE_STEPS_FIELD_NUMBER: _ClassVar[int]
    DECODE_STEP_SECONDS_FIELD_NUMBER: _ClassVar[int]
    FLOP_FIELD_NUMBER: _ClassVar[int]
    MEMORY_BYTES_FIELD_NUMBER: _ClassVar[int]
    FLOP_USE_FIELD_NUMBER: _ClassVar[int]
    BANDWIDTH_USE_FIELD_NUMBER: _ClassVar[int]
    SLO_ITL_S_FIELD_NUMBER: _ClassVar[int]
    NUM_DRAFTS_FIELD_NUMBER: _ClassVar[int]
    NUM_RIGHT_DRAFTS_FIELD_NUMBER: _ClassVar[int]
    TAKES_MOVES_FIELD_NUMBER: _ClassVar[int]
    GIVES_PREFIXES_FIELD_NUMBER: _ClassVar[int]
    NUM_DISK_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    NUM_DISK_READS_FIELD_NUMBER: _ClassVar[int]
    NUM_DISK_WRITES_FIELD_NUMBER: _ClassVar[int]
    NUM_DISK_FAILURES_FIELD_NUMBER: _ClassVar[int]
    DISK_BYTES_PER_S_FIELD_NUMBER: _ClassVar[int]
    state: WorkerState
    num_running: int
    num_waiting: int
    num_pulls_waiting: int
    num_queued_tokens: int
    ledger: Ledger
    num_prefilled_tokens: int
    num_sampled_tokens: int
    num_transfers: int
    transferred_bytes: int
    num_expired_leases: int
    num_preemptions: int
    transfers: TransferCounts
    num_malformed_messages: int
    num_dropped_messages: int
    transfer_seconds: float
    paths: _containers.RepeatedCompositeFieldContainer[PathReport]
    num_corrupt_blocks: int
    num_calls: int
    router_calls: _containers.RepeatedCompositeFieldContainer[RouterCalls]
    step_cost: StepCost
    step_limit_s: float
    num_decoding: int
    decode_context: int
    prompt_backlog: _containers.RepeatedScalarFieldContainer[float]
    num_promised_blocks: int
    num_released_blocks: int
    max_step_tokens: int
    batch_sequences: int
    batch_tokens: int
    busy_seconds: float
    decode_steps: _containers.RepeatedScalarFieldContainer[int]
    decode_step_seconds: float
    flop: float
    memory_bytes: float
    flop_use: float
    bandwidth_use: float
    slo_itl_s: float
    num_drafts: int
    num_right_drafts: int
    takes_moves: bool
    gives_prefixes: bool
    num_disk_blocks: int
    num_disk_reads: int
    num_disk_writes: int
    num_disk_failures: int
    disk_bytes_per_s: float
    def __init__(self, state: _Optional[_Union[WorkerState, str]] = ..., num_running: _Optional[int] = ..., num_waiting: _Optional[int] = ..., num_pulls_waiting: _Optional[int] = ..., num_queued_tokens: _Optional[int] = ..., ledger: _Optional[_Union[Ledger, _Mapping]] = ..., num_prefilled_tokens: _Optional[int] = ..., num_sampled_tokens: _Optional[int] = ..., num_transfers: _Optional[int] = ..., transferred_bytes: _Optional[int] = ..., num_expired_leases: _Optional[int] = ..., num_preemptions: _Optional[int] = ..., transfers: _Optional[_Union[TransferCounts, _Mapping]] = ..., num_malformed_messages: _Optional[int] = ..., num_dropped_messages: _Optional[int] = ..., transfer_seconds: _Optional[float] = ..., paths: _Optional[_Iterable[_Union[PathReport, _Mapping]]] = ..., num_corrupt_blocks: _Optional[int] = ..., num_calls: _Optional[int] = ..., router_calls: _Optional[_Iterable[_Union[RouterCalls, _Mapping]]] = ..., step_cost: _Optional[_Union[StepCost, _Mapping]] = ..., step_limit_s: _Optional[float] = ..., num_decoding: _Optional[int] = ..., decode_context: _Optional[int] = ..., prompt_backlog: _Optional[_Iterable[float]] = ..., num_promised_blocks: _Optional[int] = ..., num_released_blocks: _Optional[int] = ..., max_step_tokens: _Optional[int] = ..., batch_sequences: _Optional[int] = ..., batch_tokens: _Optional[int] = ..., busy_seconds: _Optional[float] = ..., decode_steps: _Optional[_Iterable[int]] = ..., decode_step_seconds: _Optional[float] = ..., flop: _Optional[float] = ..., memory_bytes: _Optional[float] = ..., flop_use: _Optional[float] = ..., bandwidth_use: _Optional[float] = ..., slo_itl_s: _Optional[float] = ..., num_drafts: _Optional[int] = ..., num_right_drafts: _Optional[int] = ..., takes_moves: _Optional[bool] = ..., gives_prefixes: _Optional[bool] = ..., num_disk_blocks: _Optional[int] = ..., num_disk_reads: _Optional[int] = ..., num_disk_writes: _Optional[int] = ..., num_disk_failures: _Optional[int] = ..., disk_bytes_per_s: _Optional[float] = ...) -> None: ...

class StepCost(_message.Message):
    __slots__ = ("step_s", "sequence_s", "context_s", "token_s", "pair_s")
    STEP_S_FIELD_NUMBER: _ClassVar[int]
    SEQUENCE_S_FIELD_NUMBER: _ClassVar[int]
    CONTEXT_S_FIELD_NUMBER: _ClassVar[int]
    TOKEN_S_FIELD_NUMBER: _ClassVar[int]
    PAIR_S_FIELD_NUMBER: _ClassVar[int]
    step_s: float
    sequence_s: float
    context_s: float
    token_s: float
    pair_s: float
    def __init__(self, step_s: _Optional[float] = ..., sequence_s: _Optional[float] = ..., context_s: _Optional[float] = ..., token_s: _Optional[float] = ..., pair_s: _Optional[float] = ...) -> None: ...

class RouterCalls(_message.Message):
    __slots__ = ("router_id", "last_call", "num_open")
    ROUTER_ID_FIELD_NUMBER: _ClassVar[int]
    LAST_CALL_FIELD_NUMBER: _ClassVar[int]
    NUM_OPEN_FIELD_NUMBER: _ClassVar[int]
    router_id: str
    last_call: int
    num_open: int
    def __init__(self, router_id: _Optional[str] = ..., last_call: _Optional[int] = ..., num_open: _Optional[int] = ...) -> None: ...

class WorkerReport(_message.Message):
    __slots__ = ("sequence_number", "snapshot", "load", "block_changes", "block_runs", "paths", "removed_paths")
    SEQUENCE_NUMBER_FIELD_NUMBER: _ClassVar[int]
    SNAPSHOT_FIELD_NUMBER: _ClassVar[int]
    LOAD_FIELD_NUMBER: _ClassVar[int]
    BLOCK_CHANGES_FIELD_NUMBER: _ClassVar[int]
    BLOCK_RUNS_FIELD_NUMBER: _ClassVar[int]
    PATHS_FIELD_NUMBER: _ClassVar[int]
    REMOVED_PATHS_FIELD_NUMBER: _ClassVar[int]
    sequence_number: int
    snapshot: WorkerSnapshot
    load: LoadReport
    block_changes: _containers.RepeatedScalarFieldContainer[int]
    block_runs: _containers.RepeatedScalarFieldContainer[int]
    paths: _containers.RepeatedCompositeFieldContainer[PathReport]
    removed_paths: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, sequence_number: _Optional[int] = ..., snapshot: _Optional[_Union[WorkerSnapshot, _Mapping]] = ..., load: _Optional[_Union[LoadReport, _Mapping]] = ..., block_changes: _Optional[_Iterable[int]] = ..., block_runs: _Optional[_Iterable[int]] = ..., paths: _Optional[_Iterable[_Union[PathReport, _Mapping]]] = ..., removed_paths: _Optional[_Iterable[str]] = ...) -> None: ...

class WorkerSnapshot(_message.Message):
    __slots__ = ("worker_id", "role", "agent", "cached_blocks")
    WORKER_ID_FIELD_NUMBER: _ClassVar[int]
    ROLE_FIELD_NUMBER: _ClassVar[int]
    AGENT_FIELD_NUMBER: _ClassVar[int]
    CACHED_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    worker_id: str
    role: WorkerRole
    agent: AgentAddress
    cached_blocks: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, worker_id: _Optional[str] = ..., role: _Optional[_Union[WorkerRole, str]] = ..., agent: _Optional[_Union[AgentAddress, _Mapping]] = ..., cached_blocks: _Optional[_Iterable[int]] = ...) -> None: ...

class DescribeLedgerRequest(_message.Message):
    __slots__ = ("max_holders",)
    MAX_HOLDERS_FIELD_NUMBER: _ClassVar[int]
    max_holders: int
    def __init__(self, max_holders: _Optional[int] = ...) -> None: ...

class BlockHolder(_message.Message):
    __slots__ = ("kind", "name", "state", "num_blocks", "num_counted", "age_ms", "peer")
    KIND_FIELD_NUMBER: _ClassVar[int]
    NAME_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    NUM_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    NUM_COUNTED_FIELD_NUMBER: _ClassVar[int]
    AGE_MS_FIELD_NUMBER: _ClassVar[int]
    PEER_FIELD_NUMBER: _ClassVar[int]
    kind: HolderKind
    name: str
    state: HolderState
    num_blocks: int
    num_counted: int
    age_ms: float
    peer: str
    def __init__(self, kind: _Optional[_Union[HolderKind, str]] = ..., name: _Optional[str] = ..., state: _Optional[_Union[HolderState, str]] = ..., num_blocks: _Optional[int] = ..., num_counted: _Optional[int] = ..., age_ms: _Optional[float] = ..., peer: _Optional[str] = ...) -> None: ...

class DescribeLedgerResponse(_message.Message):
    __slots__ = ("worker_id", "ledger", "holders", "num_left_out")
    WORKER_ID_FIELD_NUMBER: _ClassVar[int]
    LEDGER_FIELD_NUMBER: _ClassVar[int]
    HOLDERS_FIELD_NUMBER: _ClassVar[int]
    NUM_LEFT_OUT_FIELD_NUMBER: _ClassVar[int]
    worker_id: str
    ledger: Ledger
    holders: _containers.RepeatedCompositeFieldContainer[BlockHolder]
    num_left_out: int
    def __init__(self, worker_id: _Optional[str] = ..., ledger: _Optional[_Union[Ledger, _Mapping]] = ..., holders: _Optional[_Iterable[_Union[BlockHolder, _Mapping]]] = ..., num_left_out: _Optional[int] = ...) -> None: ...
