from tandem_client.stubs import inference_pb2 as _inference_pb2
from tandem_client.stubs import worker_pb2 as _worker_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class ServiceRole(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    SERVICE_ROLE_UNSPECIFIED: _ClassVar[ServiceRole]
    SERVICE_ROLE_ROUTER: _ClassVar[ServiceRole]
    SERVICE_ROLE_PREFILL: _ClassVar[ServiceRole]
    SERVICE_ROLE_DECODE: _ClassVar[ServiceRole]

class SlotState(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    SLOT_STATE_UNSPECIFIED: _ClassVar[SlotState]
    SLOT_STATE_WAITING: _ClassVar[SlotState]
    SLOT_STATE_PLACING: _ClassVar[SlotState]
    SLOT_STATE_STARTING: _ClassVar[SlotState]
    SLOT_STATE_SERVING: _ClassVar[SlotState]
    SLOT_STATE_DRAINING: _ClassVar[SlotState]
    SLOT_STATE_SWITCHING: _ClassVar[SlotState]
SERVICE_ROLE_UNSPECIFIED: ServiceRole
SERVICE_ROLE_ROUTER: ServiceRole
SERVICE_ROLE_PREFILL: ServiceRole
SERVICE_ROLE_DECODE: ServiceRole
SLOT_STATE_UNSPECIFIED: SlotState
SLOT_STATE_WAITING: SlotState
SLOT_STATE_PLACING: SlotState
SLOT_STATE_STARTING: SlotState
SLOT_STATE_SERVING: SlotState
SLOT_STATE_DRAINING: SlotState
SLOT_STATE_SWITCHING: SlotState

class GetFleetRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class FleetWorker(_message.Message):
    __slots__ = ("worker_id", "role", "state", "address", "load", "report_age_ms", "num_dispatched", "protocol_version")
    WORKER_ID_FIELD_NUMBER: _ClassVar[int]
    ROLE_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    ADDRESS_FIELD_NUMBER: _ClassVar[int]
    LOAD_FIELD_NUMBER: _ClassVar[int]
    REPORT_AGE_MS_FIELD_NUMBER: _ClassVar[int]
    NUM_DISPATCHED_FIELD_NUMBER: _ClassVar[int]
    PROTOCOL_VERSION_FIELD_NUMBER: _ClassVar[int]
    worker_id: str
    role: _worker_pb2.WorkerRole
    state: _worker_pb2.WorkerState
    address: str
    load: _worker_pb2.LoadReport
    report_age_ms: float
    num_dispatched: int
    protocol_version: int
    def __init__(self, worker_id: _Optional[str] = ..., role: _Optional[_Union[_worker_pb2.WorkerRole, str]] = ..., state: _Optional[_Union[_worker_pb2.WorkerState, str]] = ..., address: _Optional[str] = ..., load: _Optional[_Union[_worker_pb2.LoadReport, _Mapping]] = ..., report_age_ms: _Optional[float] = ..., num_dispatched: _Optional[int] = ..., protocol_version: _Optional[int] = ...) -> None: ...

class FleetRouter(_message.Message):
    __slots__ = ("router_id", "address", "state", "num_queued", "num_in_flight")
    ROUTER_ID_FIELD_NUMBER: _ClassVar[int]
    ADDRESS_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    NUM_QUEUED_FIELD_NUMBER: _ClassVar[int]
    NUM_IN_FLIGHT_FIELD_NUMBER: _ClassVar[int]
    router_id: str
    address: str
    state: _worker_pb2.WorkerState
    num_queued: int
    num_in_flight: int
    def __init__(self, router_id: _Optional[str] = ..., address: _Optional[str] = ..., state: _Optional[_Union[_worker_pb2.WorkerState, str]] = ..., num_queued: _Optional[int] = ..., num_in_flight: _Optional[int] = ...) -> None: ...

class FleetSlot(_message.Message):
    __slots__ = ("name", "role", "state", "in_state_ms", "reason", "service_id", "machine", "version", "config_revision")
    NAME_FIELD_NUMBER: _ClassVar[int]
    ROLE_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    IN_STATE_MS_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    SERVICE_ID_FIELD_NUMBER: _ClassVar[int]
    MACHINE_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    CONFIG_REVISION_FIELD_NUMBER: _ClassVar[int]
    name: str
    role: ServiceRole
    state: SlotState
    in_state_ms: float
    reason: str
    service_id: str
    machine: str
    version: str
    config_revision: int
    def __init__(self, name: _Optional[str] = ..., role: _Optional[_Union[ServiceRole, str]] = ..., state: _Optional[_Union[SlotState, str]] = ..., in_state_ms: _Optional[float] = ..., reason: _Optional[str] = ..., service_id: _Optional[str] = ..., machine: _Optional[str] = ..., version: _Optional[str] = ..., config_revision: _Optional[int] = ...) -> None: ...

class GetFleetResponse(_message.Message):
    __slots__ = ("workers", "num_queued", "num_in_flight", "wanted_prefill", "wanted_decode", "routers", "wanted_routers", "slots", "config_revision", "rolling", "planner", "num_moved")
    WORKERS_FIELD_NUMBER: _ClassVar[int]
    NUM_QUEUED_FIELD_NUMBER: _ClassVar[int]
    NUM_IN_FLIGHT_FIELD_NUMBER: _ClassVar[int]
    WANTED_PREFILL_FIELD_NUMBER: _ClassVar[int]
    WANTED_DECODE_FIELD_NUMBER: _ClassVar[int]
    ROUTERS_FIELD_NUMBER: _ClassVar[int]
    WANTED_ROUTERS_FIELD_NUMBER: _ClassVar[int]
    SLOTS_FIELD_NUMBER: _ClassVar[int]
    CONFIG_REVISION_FIELD_NUMBER: _ClassVar[int]
    ROLLING_FIELD_NUMBER: _ClassVar[int]
    PLANNER_FIELD_NUMBER: _ClassVar[int]
    NUM_MOVED_FIELD_NUMBER: _ClassVar[int]
    workers: _containers.RepeatedCompositeFieldContainer[FleetWorker]
    num_queued: int
    num_in_flight: int
    wanted_prefill: int
    wanted_decode: int
    routers: _containers.RepeatedCompositeFieldContainer[FleetRouter]
    wanted_routers: int
    slots: _containers.RepeatedCompositeFieldContainer[FleetSlot]
    config_revision: int
    rolling: bool
    planner: Planner
    num_moved: int
    def __init__(self, workers: _Optional[_Iterable[_Union[FleetWorker, _Mapping]]] = ..., num_queued: _Optional[int] = ..., num_in_flight: _Optional[int] = ..., wanted_prefill: _Optional[int] = ..., wanted_decode: _Optional[int] = ..., routers: _Optional[_Iterable[_Union[FleetRouter, _Mapping]]] = ..., wanted_routers: _Optional[int] = ..., slots: _Optional[_Iterable[_Union[FleetSlot, _Mapping]]] = ..., config_revision: _Optional[int] = ..., rolling: _Optional[bool] = ..., planner: _Optional[_Union[Planner, _Mapping]] = ..., num_moved: _Optional[int] = ...) -> None: ...

class Planner(_message.Message):
    __slots__ = ("enabled", "pinned", "plan", "requests_per_s", "num_ended", "attainment")
    ENABLED_FIELD_NUMBER: _ClassVar[int]
    PINNED_FIELD_NUMBER: _ClassVar[int]
    PLAN_FIELD_NUMBER: _ClassVar[int]
    REQUESTS_PER_S_FIELD_NUMBER: _ClassVar[int]
    NUM_ENDED_FIELD_NUMBER: _ClassVar[int]
    ATTAINMENT_FIELD_NUMBER: _ClassVar[int]
    enabled: bool
    pinned: _containers.RepeatedScalarFieldContainer[ServiceRole]
    plan: str
    requests_per_s: float
    num_ended: int
    attainment: float
    def __init__(self, enabled: _Optional[bool] = ..., pinned: _Optional[_Iterable[_Union[ServiceRole, str]]] = ..., plan: _Optional[str] = ..., requests_per_s: _Optional[float] = ..., num_ended: _Optional[int] = ..., attainment: _Optional[float] = ...) -> None: ...

class GetConfigRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class GetConfigResponse(_message.Message):
    __slots__ = ("config", "config_revision")
    CONFIG_FIELD_NUMBER: _ClassVar[int]
    CONFIG_REVISION_FIELD_NUMBER: _ClassVar[int]
    config: str
    config_revision: int
    def __init__(self, config: _Optional[str] = ..., config_revision: _Optional[int] = ...) -> None: ...

class ApplyRequest(_message.Message):
    __slots__ = ("config", "options", "restart", "stop", "expected_revision")
    CONFIG_FIELD_NUMBER: _ClassVar[int]
    OPTIONS_FIELD_NUMBER: _ClassVar[int]
    RESTART_FIELD_NUMBER: _ClassVar[int]
    STOP_FIELD_NUMBER: _ClassVar[int]
    EXPECTED_REVISION_FIELD_NUMBER: _ClassVar[int]
    config: str
    options: str
    restart: bool
    stop: bool
    expected_revision: int
    def __init__(self, config: _Optional[str] = ..., options: _Optional[str] = ..., restart: _Optional[bool] = ..., stop: _Optional[bool] = ..., expected_revision: _Optional[int] = ...) -> None: ...

class ApplyResponse(_message.Message):
    __slots__ = ("config_revision", "changes", "restarts")
    CONFIG_REVISION_FIELD_NUMBER: _ClassVar[int]
    CHANGES_FIELD_NUMBER: _ClassVar[int]
    RESTARTS_FIELD_NUMBER: _ClassVar[int]
    config_revision: int
    changes: _containers.RepeatedScalarFieldContainer[str]
    restarts: bool
    def __init__(self, config_revision: _Optional[int] = ..., changes: _Optional[_Iterable[str]] = ..., restarts: _Optional[bool] = ...) -> None: ...

class ListEventsRequest(_message.Message):
    __slots__ = ("limit", "after")
    LIMIT_FIELD_NUMBER: _ClassVar[int]
    AFTER_FIELD_NUMBER: _ClassVar[int]
    limit: int
    after: int
    def __init__(self, limit: _Optional[int] = ..., after: _Optional[int] = ...) -> None: ...

class FleetNote(_message.Message):
    __slots__ = ("number", "at_unix_ms", "subject", "what", "reason")
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    AT_UNIX_MS_FIELD_NUMBER: _ClassVar[int]
    SUBJECT_FIELD_NUMBER: _ClassVar[int]
    WHAT_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    number: int
    at_unix_ms: float
    subject: str
    what: str
    reason: str
    def __init__(self, number: _Optional[int] = ..., at_unix_ms: _Optional[float] = ..., subject: _Optional[str] = ..., what: _Optional[str] = ..., reason: _Optional[str] = ...) -> None: ...

class ListEventsResponse(_message.Message):
    __slots__ = ("events",)
    EVENTS_FIELD_NUMBER: _ClassVar[int]
    events: _containers.RepeatedCompositeFieldContainer[FleetNote]
    def __init__(self, events: _Optional[_Iterable[_Union[FleetNote, _Mapping]]] = ...) -> None: ...

class Candidate(_message.Message):
    __slots__ = ("prefill_worker", "decode_worker", "cached_tokens", "uncached_tokens", "transfer_blocks", "chosen", "queue_ms", "prefill_ms", "transfer_ms", "room_wait_ms", "gap_ms", "num_streams", "first_token_ms", "cost_ms", "source", "read_tokens", "read_ms", "evict_ms")
    PREFILL_WORKER_FIELD_NUMBER: _ClassVar[int]
    DECODE_WORKER_FIELD_NUMBER: _ClassVar[int]
    CACHED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    UNCACHED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    TRANSFER_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    CHOSEN_FIELD_NUMBER: _ClassVar[int]
    QUEUE_MS_FIELD_NUMBER: _ClassVar[int]
    PREFILL_MS_FIELD_NUMBER: _ClassVar[int]
    TRANSFER_MS_FIELD_NUMBER: _ClassVar[int]
    ROOM_WAIT_MS_FIELD_NUMBER: _ClassVar[int]
    GAP_MS_FIELD_NUMBER: _ClassVar[int]
    NUM_STREAMS_FIELD_NUMBER: _ClassVar[int]
    FIRST_TOKEN_MS_FIELD_NUMBER: _ClassVar[int]
    COST_MS_FIELD_NUMBER: _ClassVar[int]
    SOURCE_FIELD_NUMBER: _ClassVar[int]
    READ_TOKENS_FIELD_NUMBER: _ClassVar[int]
    READ_MS_FIELD_NUMBER: _ClassVar[int]
    EVICT_MS_FIELD_NUMBER: _ClassVar[int]
    prefill_worker: str
    decode_worker: str
    cached_tokens: int
    uncached_tokens: int
    transfer_blocks: int
    chosen: bool
    queue_ms: float
    prefill_ms: float
    transfer_ms: float
    room_wait_ms: float
    gap_ms: float
    num_streams: int
    first_token_ms: float
    cost_ms: float
    source: str
    read_tokens: int
    read_ms: float
    evict_ms: float
    def __init__(self, prefill_worker: _Optional[str] = ..., decode_worker: _Optional[str] = ..., cached_tokens: _Optional[int] = ..., uncached_tokens: _Optional[int] = ..., transfer_blocks: _Optional[int] = ..., chosen: _Optional[bool] = ..., queue_ms: _Optional[float] = ..., prefill_ms: _Optional[float] = ..., transfer_ms: _Optional[float] = ..., room_wait_ms: _Optional[float] = ..., gap_ms: _Optional[float] = ..., num_streams: _Optional[int] = ..., first_token_ms: _Optional[float] = ..., cost_ms: _Optional[float] = ..., source: _Optional[str] = ..., read_tokens: _Optional[int] = ..., read_ms: _Optional[float] = ..., evict_ms: _Optional[float] = ...) -> None: ...

class ExplainResponse(_message.Message):
    __slots__ = ("prompt_tokens", "candidates", "path", "reason")
    PROMPT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    CANDIDATES_FIELD_NUMBER: _ClassVar[int]
    PATH_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    prompt_tokens: int
    candidates: _containers.RepeatedCompositeFieldContainer[Candidate]
    path: _inference_pb2.RequestPath
    reason: str
    def __init__(self, prompt_tokens: _Optional[int] = ..., candidates: _Optional[_Iterable[_Union[Candidate, _Mapping]]] = ..., path: _Optional[_Union[_inference_pb2.RequestPath, str]] = ..., reason: _Optional[str] = ...) -> None: ...

class ScaleRequest(_message.Message):
    __slots__ = ("prefill", "decode", "routers", "auto")
    PREFILL_FIELD_NUMBER: _ClassVar[int]
    DECODE_FIELD_NUMBER: _ClassVar[int]
    ROUTERS_FIELD_NUMBER: _ClassVar[int]
    AUTO_FIELD_NUMBER: _ClassVar[int]
    prefill: int
    decode: int
    routers: int
    auto: bool
    def __init__(self, prefill: _Optional[int] = ..., decode: _Optional[int] = ..., routers: _Optional[int] = ..., auto: _Optional[bool] = ...) -> None: ...

class ScaleResponse(_message.Message):
    __slots__ = ("wanted_prefill", "wanted_decode", "wanted_routers")
    WANTED_PREFILL_FIELD_NUMBER: _ClassVar[int]
    WANTED_DECODE_FIELD_NUMBER: _ClassVar[int]
    WANTED_ROUTERS_FIELD_NUMBER: _ClassVar[int]
    wanted_prefill: int
    wanted_decode: int
    wanted_routers: int
    def __init__(self, wanted_prefill: _Optional[int] = ..., wanted_decode: _Optional[int] = ..., wanted_routers: _Optional[int] = ...) -> None: ...

class SwitchRoleRequest(_message.Message):
    __slots__ = ("slot", "role")
    SLOT_FIELD_NUMBER: _ClassVar[int]
    ROLE_FIELD_NUMBER: _ClassVar[int]
    slot: str
    role: ServiceRole
    def __init__(self, slot: _Optional[str] = ..., role: _Optional[_Union[ServiceRole, str]] = ...) -> None: ...

class SwitchRoleResponse(_message.Message):
    __slots__ = ("wanted_prefill", "wanted_decode")
    WANTED_PREFILL_FIELD_NUMBER: _ClassVar[int]
    WANTED_DECODE_FIELD_NUMBER: _ClassVar[int]
    wanted_prefill: int
    wanted_decode: int
    def __init__(self, wanted_prefill: _Optional[int] = ..., wanted_decode: _Optional[int] = ...) -> None: ...

class GetLedgerRequest(_message.Message):
    __slots__ = ("worker_ids",)
    WORKER_IDS_FIELD_NUMBER: _ClassVar[int]
    worker_ids: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, worker_ids: _Optional[_Iterable[str]] = ...) -> None: ...

class WorkerLedger(_message.Message):
    __slots__ = ("worker_id", "ledger", "error")
    WORKER_ID_FIELD_NUMBER: _ClassVar[int]
    LEDGER_FIELD_NUMBER: _ClassVar[int]
    ERROR_FIELD_NUMBER: _ClassVar[int]
    worker_id: str
    ledger: _worker_pb2.DescribeLedgerResponse
    error: str
    def __init__(self, worker_id: _Optional[str] = ..., ledger: _Optional[_Union[_worker_pb2.DescribeLedgerResponse, _Mapping]] = ..., error: _Optional[str] = ...) -> None: ...

class GetLedgerResponse(_message.Message):
    __slots__ = ("workers",)
    WORKERS_FIELD_NUMBER: _ClassVar[int]
    workers: _containers.RepeatedCompositeFieldContainer[WorkerLedger]
    def __init__(self, workers: _Optional[_Iterable[_Union[WorkerLedger, _Mapping]]] = ...) -> None: ...

class ListRequestsRequest(_message.Message):
    __slots__ = ("limit", "after")
    LIMIT_FIELD_NUMBER: _ClassVar[int]
    AFTER_FIELD_NUMBER: _ClassVar[int]
    limit: int
    after: int
    def __init__(self, limit: _Optional[int] = ..., after: _Optional[int] = ...) -> None: ...

class RequestSummary(_message.Message):
    __slots__ = ("number", "request_id", "choice", "trace_id", "arrived_at_unix_ms", "total_ms", "first_token_ms", "tpot_ms", "end", "usage", "path", "prefill_worker", "decode_worker", "attempts", "tenant", "timings", "transferred_bytes")
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    CHOICE_FIELD_NUMBER: _ClassVar[int]
    TRACE_ID_FIELD_NUMBER: _ClassVar[int]
    ARRIVED_AT_UNIX_MS_FIELD_NUMBER: _ClassVar[int]
    TOTAL_MS_FIELD_NUMBER: _ClassVar[int]
    FIRST_TOKEN_MS_FIELD_NUMBER: _ClassVar[int]
    TPOT_MS_FIELD_NUMBER: _ClassVar[int]
    END_FIELD_NUMBER: _ClassVar[int]
    USAGE_FIELD_NUMBER: _ClassVar[int]
    PATH_FIELD_NUMBER: _ClassVar[int]
    PREFILL_WORKER_FIELD_NUMBER: _ClassVar[int]
    DECODE_WORKER_FIELD_NUMBER: _ClassVar[int]
    ATTEMPTS_FIELD_NUMBER: _ClassVar[int]
    TENANT_FIELD_NUMBER: _ClassVar[int]
    TIMINGS_FIELD_NUMBER: _ClassVar[int]
    TRANSFERRED_BYTES_FIELD_NUMBER: _ClassVar[int]
    number: int
    request_id: str
    choice: int
    trace_id: str
    arrived_at_unix_ms: float
    total_ms: float
    first_token_ms: float
    tpot_ms: float
    end: str
    usage: _inference_pb2.Usage
    path: _inference_pb2.RequestPath
    prefill_worker: str
    decode_worker: str
    attempts: int
    tenant: str
    timings: _inference_pb2.PhaseTimings
    transferred_bytes: int
    def __init__(self, number: _Optional[int] = ..., request_id: _Optional[str] = ..., choice: _Optional[int] = ..., trace_id: _Optional[str] = ..., arrived_at_unix_ms: _Optional[float] = ..., total_ms: _Optional[float] = ..., first_token_ms: _Optional[float] = ..., tpot_ms: _Optional[float] = ..., end: _Optional[str] = ..., usage: _Optional[_Union[_inference_pb2.Usage, _Mapping]] = ..., path: _Optional[_Union[_inference_pb2.RequestPath, str]] = ..., prefill_worker: _Optional[str] = ..., decode_worker: _Optional[str] = ..., attempts: _Optional[int] = ..., tenant: _Optional[str] = ..., timings: _Optional[_Union[_inference_pb2.PhaseTimings, _Mapping]] = ..., transferred_bytes: _Optional[int] = ...) -> None: ...

class ListRequestsResponse(_message.Message):
    __slots__ = ("requests",)
    REQUESTS_FIELD_NUMBER: _ClassVar[int]
    requests: _containers.RepeatedCompositeFieldContainer[RequestSummary]
    def __init__(self, requests: _Optional[_Iterable[_Union[RequestSummary, _Mapping]]] = ...) -> None: ...

class GetTraceRequest(_message.Message):
    __slots__ = ("id",)
    ID_FIELD_NUMBER: _ClassVar[int]
    id: str
    def __init__(self, id: _Optional[str] = ...) -> None: ...

class Span(_message.Message):
    __slots__ = ("name", "process", "choice", "start_ms", "duration_ms", "attributes", "error")
    class AttributesEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: str
        def __init__(self, key: _Optional[str] = ..., value: _Optional[str] = ...) -> None: ...
    NAME_FIELD_NUMBER: _ClassVar[int]
    PROCESS_FIELD_NUMBER: _ClassVar[int]
    CHOICE_FIELD_NUMBER: _ClassVar[int]
    START_MS_FIELD_NUMBER: _ClassVar[int]
    DURATION_MS_FIELD_NUMBER: _ClassVar[int]
    ATTRIBUTES_FIELD_NUMBER: _ClassVar[int]
    ERROR_FIELD_NUMBER: _ClassVar[int]
    name: str
    process: str
    choice: int
    start_ms: float
    duration_ms: float
    attributes: _containers.ScalarMap[str, str]
    error: str
    def __init__(self, name: _Optional[str] = ..., process: _Optional[str] = ..., choice: _Optional[int] = ..., start_ms: _Optional[float] = ..., duration_ms: _Optional[float] = ..., attributes: _Optional[_Mapping[str, str]] = ..., error: _Optional[str] = ...) -> None: ...

class Trace(_message.Message):
    __slots__ = ("requests", "spans", "candidates")
    REQUESTS_FIELD_NUMBER: _ClassVar[int]
    SPANS_FIELD_NUMBER: _ClassVar[int]
    CANDIDATES_FIELD_NUMBER: _ClassVar[int]
    requests: _containers.RepeatedCompositeFieldContainer[RequestSummary]
    spans: _containers.RepeatedCompositeFieldContainer[Span]
    candidates: _containers.RepeatedCompositeFieldContainer[Candidate]
    def __init__(self, requests: _Optional[_Iterable[_Union[RequestSummary, _Mapping]]] = ..., spans: _Optional[_Iterable[_Union[Span, _Mapping]]] = ..., candidates: _Optional[_Iterable[_Union[Candidate, _Mapping]]] = ...) -> None: ...

class GetMetricsRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class GetMetricsResponse(_message.Message):
    __slots__ = ("text",)
    TEXT_FIELD_NUMBER: _ClassVar[int]
    text: str
    def __init__(self, text: _Optional[str] = ...) -> None: ...
