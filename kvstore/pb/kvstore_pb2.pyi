from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from typing import ClassVar as _ClassVar, Iterable as _Iterable, Mapping as _Mapping, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class MemberState(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    MEMBER_STATE_UNSPECIFIED: _ClassVar[MemberState]
    MEMBER_JOINING: _ClassVar[MemberState]
    MEMBER_SERVING: _ClassVar[MemberState]
    MEMBER_DRAINING: _ClassVar[MemberState]

class PutVerdict(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    PUT_VERDICT_UNSPECIFIED: _ClassVar[PutVerdict]
    WRITE: _ClassVar[PutVerdict]
    EXISTS: _ClassVar[PutVerdict]
    BUSY: _ClassVar[PutVerdict]
    FULL: _ClassVar[PutVerdict]

class PageHealth(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    PAGE_HEALTH_UNSPECIFIED: _ClassVar[PageHealth]
    PAGE_ABSENT: _ClassVar[PageHealth]
    PAGE_INTACT: _ClassVar[PageHealth]
    PAGE_DROPPED: _ClassVar[PageHealth]

class HintAction(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    HINT_ACTION_UNSPECIFIED: _ClassVar[HintAction]
    HINT_NAME: _ClassVar[HintAction]
    HINT_RETAIN: _ClassVar[HintAction]
    HINT_PIN: _ClassVar[HintAction]
    HINT_PREFETCH: _ClassVar[HintAction]
    HINT_DEMOTE: _ClassVar[HintAction]
    HINT_DELETE: _ClassVar[HintAction]

class HintVerdict(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    HINT_VERDICT_UNSPECIFIED: _ClassVar[HintVerdict]
    HINT_ACCEPTED: _ClassVar[HintVerdict]
    HINT_CLIPPED: _ClassVar[HintVerdict]
    HINT_REFUSED: _ClassVar[HintVerdict]
MEMBER_STATE_UNSPECIFIED: MemberState
MEMBER_JOINING: MemberState
MEMBER_SERVING: MemberState
MEMBER_DRAINING: MemberState
PUT_VERDICT_UNSPECIFIED: PutVerdict
WRITE: PutVerdict
EXISTS: PutVerdict
BUSY: PutVerdict
FULL: PutVerdict
PAGE_HEALTH_UNSPECIFIED: PageHealth
PAGE_ABSENT: PageHealth
PAGE_INTACT: PageHealth
PAGE_DROPPED: PageHealth
HINT_ACTION_UNSPECIFIED: HintAction
HINT_NAME: HintAction
HINT_RETAIN: HintAction
HINT_PIN: HintAction
HINT_PREFETCH: HintAction
HINT_DEMOTE: HintAction
HINT_DELETE: HintAction
HINT_VERDICT_UNSPECIFIED: HintVerdict
HINT_ACCEPTED: HintVerdict
HINT_CLIPPED: HintVerdict
HINT_REFUSED: HintVerdict

class HelloRequest(_message.Message):
    __slots__ = ("protocol_version", "token")
    PROTOCOL_VERSION_FIELD_NUMBER: _ClassVar[int]
    TOKEN_FIELD_NUMBER: _ClassVar[int]
    protocol_version: int
    token: str
    def __init__(self, protocol_version: _Optional[int] = ..., token: _Optional[str] = ...) -> None: ...

class Limits(_message.Message):
    __slots__ = ("batch_keys_max", "batch_nbytes_max", "page_nbytes_max", "message_nbytes_max", "pin_ttl_ms_max")
    BATCH_KEYS_MAX_FIELD_NUMBER: _ClassVar[int]
    BATCH_NBYTES_MAX_FIELD_NUMBER: _ClassVar[int]
    PAGE_NBYTES_MAX_FIELD_NUMBER: _ClassVar[int]
    MESSAGE_NBYTES_MAX_FIELD_NUMBER: _ClassVar[int]
    PIN_TTL_MS_MAX_FIELD_NUMBER: _ClassVar[int]
    batch_keys_max: int
    batch_nbytes_max: int
    page_nbytes_max: int
    message_nbytes_max: int
    pin_ttl_ms_max: int
    def __init__(self, batch_keys_max: _Optional[int] = ..., batch_nbytes_max: _Optional[int] = ..., page_nbytes_max: _Optional[int] = ..., message_nbytes_max: _Optional[int] = ..., pin_ttl_ms_max: _Optional[int] = ...) -> None: ...

class HelloReply(_message.Message):
    __slots__ = ("protocol_version", "version", "instance_id", "bulk_port", "limits", "shm_socket", "arena_nbytes", "view", "member_id", "tenant", "role", "shm_refused")
    PROTOCOL_VERSION_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    INSTANCE_ID_FIELD_NUMBER: _ClassVar[int]
    BULK_PORT_FIELD_NUMBER: _ClassVar[int]
    LIMITS_FIELD_NUMBER: _ClassVar[int]
    SHM_SOCKET_FIELD_NUMBER: _ClassVar[int]
    ARENA_NBYTES_FIELD_NUMBER: _ClassVar[int]
    VIEW_FIELD_NUMBER: _ClassVar[int]
    MEMBER_ID_FIELD_NUMBER: _ClassVar[int]
    TENANT_FIELD_NUMBER: _ClassVar[int]
    ROLE_FIELD_NUMBER: _ClassVar[int]
    SHM_REFUSED_FIELD_NUMBER: _ClassVar[int]
    protocol_version: int
    version: str
    instance_id: bytes
    bulk_port: int
    limits: Limits
    shm_socket: str
    arena_nbytes: int
    view: View
    member_id: str
    tenant: str
    role: str
    shm_refused: str
    def __init__(self, protocol_version: _Optional[int] = ..., version: _Optional[str] = ..., instance_id: _Optional[bytes] = ..., bulk_port: _Optional[int] = ..., limits: _Optional[_Union[Limits, _Mapping]] = ..., shm_socket: _Optional[str] = ..., arena_nbytes: _Optional[int] = ..., view: _Optional[_Union[View, _Mapping]] = ..., member_id: _Optional[str] = ..., tenant: _Optional[str] = ..., role: _Optional[str] = ..., shm_refused: _Optional[str] = ...) -> None: ...

class Member(_message.Message):
    __slots__ = ("id", "address", "weight", "zone", "state", "bulk_port")
    ID_FIELD_NUMBER: _ClassVar[int]
    ADDRESS_FIELD_NUMBER: _ClassVar[int]
    WEIGHT_FIELD_NUMBER: _ClassVar[int]
    ZONE_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    BULK_PORT_FIELD_NUMBER: _ClassVar[int]
    id: str
    address: str
    weight: float
    zone: str
    state: MemberState
    bulk_port: int
    def __init__(self, id: _Optional[str] = ..., address: _Optional[str] = ..., weight: _Optional[float] = ..., zone: _Optional[str] = ..., state: _Optional[_Union[MemberState, str]] = ..., bulk_port: _Optional[int] = ...) -> None: ...

class View(_message.Message):
    __slots__ = ("cluster", "number", "replicas", "members")
    CLUSTER_FIELD_NUMBER: _ClassVar[int]
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    REPLICAS_FIELD_NUMBER: _ClassVar[int]
    MEMBERS_FIELD_NUMBER: _ClassVar[int]
    cluster: str
    number: int
    replicas: int
    members: _containers.RepeatedCompositeFieldContainer[Member]
    def __init__(self, cluster: _Optional[str] = ..., number: _Optional[int] = ..., replicas: _Optional[int] = ..., members: _Optional[_Iterable[_Union[Member, _Mapping]]] = ...) -> None: ...

class FollowRequest(_message.Message):
    __slots__ = ("number", "wait_ms")
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    WAIT_MS_FIELD_NUMBER: _ClassVar[int]
    number: int
    wait_ms: int
    def __init__(self, number: _Optional[int] = ..., wait_ms: _Optional[int] = ...) -> None: ...

class DrainRequest(_message.Message):
    __slots__ = ("end", "forget")
    END_FIELD_NUMBER: _ClassVar[int]
    FORGET_FIELD_NUMBER: _ClassVar[int]
    end: bool
    forget: str
    def __init__(self, end: bool = ..., forget: _Optional[str] = ...) -> None: ...

class DrainReply(_message.Message):
    __slots__ = ("over", "pages_left", "pages_handed")
    OVER_FIELD_NUMBER: _ClassVar[int]
    PAGES_LEFT_FIELD_NUMBER: _ClassVar[int]
    PAGES_HANDED_FIELD_NUMBER: _ClassVar[int]
    over: bool
    pages_left: int
    pages_handed: int
    def __init__(self, over: bool = ..., pages_left: _Optional[int] = ..., pages_handed: _Optional[int] = ...) -> None: ...

class SweepRequest(_message.Message):
    __slots__ = ("dry",)
    DRY_FIELD_NUMBER: _ClassVar[int]
    dry: bool
    def __init__(self, dry: bool = ...) -> None: ...

class SweepReply(_message.Message):
    __slots__ = ("pages_missing", "nbytes_missing", "away")
    PAGES_MISSING_FIELD_NUMBER: _ClassVar[int]
    NBYTES_MISSING_FIELD_NUMBER: _ClassVar[int]
    AWAY_FIELD_NUMBER: _ClassVar[int]
    pages_missing: int
    nbytes_missing: int
    away: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, pages_missing: _Optional[int] = ..., nbytes_missing: _Optional[int] = ..., away: _Optional[_Iterable[str]] = ...) -> None: ...

class Plane(_message.Message):
    __slots__ = ("name", "dtype", "unit_tokens", "unit_shape")
    NAME_FIELD_NUMBER: _ClassVar[int]
    DTYPE_FIELD_NUMBER: _ClassVar[int]
    UNIT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    UNIT_SHAPE_FIELD_NUMBER: _ClassVar[int]
    name: str
    dtype: str
    unit_tokens: int
    unit_shape: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, name: _Optional[str] = ..., dtype: _Optional[str] = ..., unit_tokens: _Optional[int] = ..., unit_shape: _Optional[_Iterable[int]] = ...) -> None: ...

class LayerGroup(_message.Message):
    __slots__ = ("name", "layers", "planes")
    NAME_FIELD_NUMBER: _ClassVar[int]
    LAYERS_FIELD_NUMBER: _ClassVar[int]
    PLANES_FIELD_NUMBER: _ClassVar[int]
    name: str
    layers: _containers.RepeatedScalarFieldContainer[int]
    planes: _containers.RepeatedCompositeFieldContainer[Plane]
    def __init__(self, name: _Optional[str] = ..., layers: _Optional[_Iterable[int]] = ..., planes: _Optional[_Iterable[_Union[Plane, _Mapping]]] = ...) -> None: ...

class PageLayout(_message.Message):
    __slots__ = ("page_tokens", "groups")
    PAGE_TOKENS_FIELD_NUMBER: _ClassVar[int]
    GROUPS_FIELD_NUMBER: _ClassVar[int]
    page_tokens: int
    groups: _containers.RepeatedCompositeFieldContainer[LayerGroup]
    def __init__(self, page_tokens: _Optional[int] = ..., groups: _Optional[_Iterable[_Union[LayerGroup, _Mapping]]] = ...) -> None: ...

class Namespace(_message.Message):
    __slots__ = ("tenant", "model", "revision", "tp_rank", "tp_size", "pp_rank", "pp_size", "cp_rank", "cp_size", "salt", "epoch", "layout", "key_id", "part")
    TENANT_FIELD_NUMBER: _ClassVar[int]
    MODEL_FIELD_NUMBER: _ClassVar[int]
    REVISION_FIELD_NUMBER: _ClassVar[int]
    TP_RANK_FIELD_NUMBER: _ClassVar[int]
    TP_SIZE_FIELD_NUMBER: _ClassVar[int]
    PP_RANK_FIELD_NUMBER: _ClassVar[int]
    PP_SIZE_FIELD_NUMBER: _ClassVar[int]
    CP_RANK_FIELD_NUMBER: _ClassVar[int]
    CP_SIZE_FIELD_NUMBER: _ClassVar[int]
    SALT_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    LAYOUT_FIELD_NUMBER: _ClassVar[int]
    KEY_ID_FIELD_NUMBER: _ClassVar[int]
    PART_FIELD_NUMBER: _ClassVar[int]
    tenant: str
    model: str
    revision: str
    tp_rank: int
    tp_size: int
    pp_rank: int
    pp_size: int
    cp_rank: int
    cp_size: int
    salt: str
    epoch: int
    layout: PageLayout
    key_id: str
    part: str
    def __init__(self, tenant: _Optional[str] = ..., model: _Optional[str] = ..., revision: _Optional[str] = ..., tp_rank: _Optional[int] = ..., tp_size: _Optional[int] = ..., pp_rank: _Optional[int] = ..., pp_size: _Optional[int] = ..., cp_rank: _Optional[int] = ..., cp_size: _Optional[int] = ..., salt: _Optional[str] = ..., epoch: _Optional[int] = ..., layout: _Optional[_Union[PageLayout, _Mapping]] = ..., key_id: _Optional[str] = ..., part: _Optional[str] = ...) -> None: ...

class OpenNamespaceRequest(_message.Message):
    __slots__ = ("namespace", "digest")
    NAMESPACE_FIELD_NUMBER: _ClassVar[int]
    DIGEST_FIELD_NUMBER: _ClassVar[int]
    namespace: Namespace
    digest: bytes
    def __init__(self, namespace: _Optional[_Union[Namespace, _Mapping]] = ..., digest: _Optional[bytes] = ...) -> None: ...

class OpenNamespaceReply(_message.Message):
    __slots__ = ("page_nbytes", "created")
    PAGE_NBYTES_FIELD_NUMBER: _ClassVar[int]
    CREATED_FIELD_NUMBER: _ClassVar[int]
    page_nbytes: int
    created: bool
    def __init__(self, page_nbytes: _Optional[int] = ..., created: bool = ...) -> None: ...

class ListNamespacesRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class NamespaceInfo(_message.Message):
    __slots__ = ("digest", "namespace", "page_nbytes", "page_count", "counters", "disk_page_count")
    DIGEST_FIELD_NUMBER: _ClassVar[int]
    NAMESPACE_FIELD_NUMBER: _ClassVar[int]
    PAGE_NBYTES_FIELD_NUMBER: _ClassVar[int]
    PAGE_COUNT_FIELD_NUMBER: _ClassVar[int]
    COUNTERS_FIELD_NUMBER: _ClassVar[int]
    DISK_PAGE_COUNT_FIELD_NUMBER: _ClassVar[int]
    digest: bytes
    namespace: Namespace
    page_nbytes: int
    page_count: int
    counters: Counters
    disk_page_count: int
    def __init__(self, digest: _Optional[bytes] = ..., namespace: _Optional[_Union[Namespace, _Mapping]] = ..., page_nbytes: _Optional[int] = ..., page_count: _Optional[int] = ..., counters: _Optional[_Union[Counters, _Mapping]] = ..., disk_page_count: _Optional[int] = ...) -> None: ...

class Counters(_message.Message):
    __slots__ = ("pages_asked", "prefix_hits", "pages_hit", "miss_absent", "miss_evicted", "miss_writing", "miss_removed", "miss_corrupt", "pages_put", "pages_put_exists", "pages_put_busy", "pages_put_full", "pages_put_aborted", "pages_got", "pages_get_missed", "pages_evicted", "nbytes_put", "nbytes_got", "miss_expired", "pages_hit_disk", "pages_hit_peer")
    PAGES_ASKED_FIELD_NUMBER: _ClassVar[int]
    PREFIX_HITS_FIELD_NUMBER: _ClassVar[int]
    PAGES_HIT_FIELD_NUMBER: _ClassVar[int]
    MISS_ABSENT_FIELD_NUMBER: _ClassVar[int]
    MISS_EVICTED_FIELD_NUMBER: _ClassVar[int]
    MISS_WRITING_FIELD_NUMBER: _ClassVar[int]
    MISS_REMOVED_FIELD_NUMBER: _ClassVar[int]
    MISS_CORRUPT_FIELD_NUMBER: _ClassVar[int]
    PAGES_PUT_FIELD_NUMBER: _ClassVar[int]
    PAGES_PUT_EXISTS_FIELD_NUMBER: _ClassVar[int]
    PAGES_PUT_BUSY_FIELD_NUMBER: _ClassVar[int]
    PAGES_PUT_FULL_FIELD_NUMBER: _ClassVar[int]
    PAGES_PUT_ABORTED_FIELD_NUMBER: _ClassVar[int]
    PAGES_GOT_FIELD_NUMBER: _ClassVar[int]
    PAGES_GET_MISSED_FIELD_NUMBER: _ClassVar[int]
    PAGES_EVICTED_FIELD_NUMBER: _ClassVar[int]
    NBYTES_PUT_FIELD_NUMBER: _ClassVar[int]
    NBYTES_GOT_FIELD_NUMBER: _ClassVar[int]
    MISS_EXPIRED_FIELD_NUMBER: _ClassVar[int]
    PAGES_HIT_DISK_FIELD_NUMBER: _ClassVar[int]
    PAGES_HIT_PEER_FIELD_NUMBER: _ClassVar[int]
    pages_asked: int
    prefix_hits: int
    pages_hit: int
    miss_absent: int
    miss_evicted: int
    miss_writing: int
    miss_removed: int
    miss_corrupt: int
    pages_put: int
    pages_put_exists: int
    pages_put_busy: int
    pages_put_full: int
    pages_put_aborted: int
    pages_got: int
    pages_get_missed: int
    pages_evicted: int
    nbytes_put: int
    nbytes_got: int
    miss_expired: int
    pages_hit_disk: int
    pages_hit_peer: int
    def __init__(self, pages_asked: _Optional[int] = ..., prefix_hits: _Optional[int] = ..., pages_hit: _Optional[int] = ..., miss_absent: _Optional[int] = ..., miss_evicted: _Optional[int] = ..., miss_writing: _Optional[int] = ..., miss_removed: _Optional[int] = ..., miss_corrupt: _Optional[int] = ..., pages_put: _Optional[int] = ..., pages_put_exists: _Optional[int] = ..., pages_put_busy: _Optional[int] = ..., pages_put_full: _Optional[int] = ..., pages_put_aborted: _Optional[int] = ..., pages_got: _Optional[int] = ..., pages_get_missed: _Optional[int] = ..., pages_evicted: _Optional[int] = ..., nbytes_put: _Optional[int] = ..., nbytes_got: _Optional[int] = ..., miss_expired: _Optional[int] = ..., pages_hit_disk: _Optional[int] = ..., pages_hit_peer: _Optional[int] = ...) -> None: ...

class ListNamespacesReply(_message.Message):
    __slots__ = ("namespaces",)
    NAMESPACES_FIELD_NUMBER: _ClassVar[int]
    namespaces: _containers.RepeatedCompositeFieldContainer[NamespaceInfo]
    def __init__(self, namespaces: _Optional[_Iterable[_Union[NamespaceInfo, _Mapping]]] = ...) -> None: ...

class LookupRequest(_message.Message):
    __slots__ = ("namespace", "prefix_hashes", "touch", "near", "wait_ms")
    NAMESPACE_FIELD_NUMBER: _ClassVar[int]
    PREFIX_HASHES_FIELD_NUMBER: _ClassVar[int]
    TOUCH_FIELD_NUMBER: _ClassVar[int]
    NEAR_FIELD_NUMBER: _ClassVar[int]
    WAIT_MS_FIELD_NUMBER: _ClassVar[int]
    namespace: bytes
    prefix_hashes: _containers.RepeatedScalarFieldContainer[bytes]
    touch: bool
    near: bool
    wait_ms: int
    def __init__(self, namespace: _Optional[bytes] = ..., prefix_hashes: _Optional[_Iterable[bytes]] = ..., touch: bool = ..., near: bool = ..., wait_ms: _Optional[int] = ...) -> None: ...

class LookupReply(_message.Message):
    __slots__ = ("prefix_pages", "present", "tiers")
    PREFIX_PAGES_FIELD_NUMBER: _ClassVar[int]
    PRESENT_FIELD_NUMBER: _ClassVar[int]
    TIERS_FIELD_NUMBER: _ClassVar[int]
    prefix_pages: int
    present: _containers.RepeatedScalarFieldContainer[bool]
    tiers: bytes
    def __init__(self, prefix_pages: _Optional[int] = ..., present: _Optional[_Iterable[bool]] = ..., tiers: _Optional[bytes] = ...) -> None: ...

class PutRequest(_message.Message):
    __slots__ = ("namespace", "prefix_hashes", "page_nbytes", "ttl_ms", "durable", "wait_ms", "forwarded_by", "ack_all", "pages_missed")
    NAMESPACE_FIELD_NUMBER: _ClassVar[int]
    PREFIX_HASHES_FIELD_NUMBER: _ClassVar[int]
    PAGE_NBYTES_FIELD_NUMBER: _ClassVar[int]
    TTL_MS_FIELD_NUMBER: _ClassVar[int]
    DURABLE_FIELD_NUMBER: _ClassVar[int]
    WAIT_MS_FIELD_NUMBER: _ClassVar[int]
    FORWARDED_BY_FIELD_NUMBER: _ClassVar[int]
    ACK_ALL_FIELD_NUMBER: _ClassVar[int]
    PAGES_MISSED_FIELD_NUMBER: _ClassVar[int]
    namespace: bytes
    prefix_hashes: _containers.RepeatedScalarFieldContainer[bytes]
    page_nbytes: int
    ttl_ms: int
    durable: bool
    wait_ms: int
    forwarded_by: str
    ack_all: bool
    pages_missed: int
    def __init__(self, namespace: _Optional[bytes] = ..., prefix_hashes: _Optional[_Iterable[bytes]] = ..., page_nbytes: _Optional[int] = ..., ttl_ms: _Optional[int] = ..., durable: bool = ..., wait_ms: _Optional[int] = ..., forwarded_by: _Optional[str] = ..., ack_all: bool = ..., pages_missed: _Optional[int] = ...) -> None: ...

class PutReply(_message.Message):
    __slots__ = ("verdicts", "offsets")
    VERDICTS_FIELD_NUMBER: _ClassVar[int]
    OFFSETS_FIELD_NUMBER: _ClassVar[int]
    verdicts: _containers.RepeatedScalarFieldContainer[PutVerdict]
    offsets: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, verdicts: _Optional[_Iterable[_Union[PutVerdict, str]]] = ..., offsets: _Optional[_Iterable[int]] = ...) -> None: ...

class CommitRequest(_message.Message):
    __slots__ = ("leaves",)
    LEAVES_FIELD_NUMBER: _ClassVar[int]
    leaves: _containers.RepeatedScalarFieldContainer[bytes]
    def __init__(self, leaves: _Optional[_Iterable[bytes]] = ...) -> None: ...

class CommitReply(_message.Message):
    __slots__ = ("stored",)
    STORED_FIELD_NUMBER: _ClassVar[int]
    stored: int
    def __init__(self, stored: _Optional[int] = ...) -> None: ...

class PageChunk(_message.Message):
    __slots__ = ("data",)
    DATA_FIELD_NUMBER: _ClassVar[int]
    data: bytes
    def __init__(self, data: _Optional[bytes] = ...) -> None: ...

class PutFrame(_message.Message):
    __slots__ = ("begin", "chunk", "commit")
    BEGIN_FIELD_NUMBER: _ClassVar[int]
    CHUNK_FIELD_NUMBER: _ClassVar[int]
    COMMIT_FIELD_NUMBER: _ClassVar[int]
    begin: PutRequest
    chunk: PageChunk
    commit: CommitRequest
    def __init__(self, begin: _Optional[_Union[PutRequest, _Mapping]] = ..., chunk: _Optional[_Union[PageChunk, _Mapping]] = ..., commit: _Optional[_Union[CommitRequest, _Mapping]] = ...) -> None: ...

class PutFrameReply(_message.Message):
    __slots__ = ("begin", "commit")
    BEGIN_FIELD_NUMBER: _ClassVar[int]
    COMMIT_FIELD_NUMBER: _ClassVar[int]
    begin: PutReply
    commit: CommitReply
    def __init__(self, begin: _Optional[_Union[PutReply, _Mapping]] = ..., commit: _Optional[_Union[CommitReply, _Mapping]] = ...) -> None: ...

class PutWholeRequest(_message.Message):
    __slots__ = ("begin", "chunk", "commit")
    BEGIN_FIELD_NUMBER: _ClassVar[int]
    CHUNK_FIELD_NUMBER: _ClassVar[int]
    COMMIT_FIELD_NUMBER: _ClassVar[int]
    begin: PutRequest
    chunk: PageChunk
    commit: CommitRequest
    def __init__(self, begin: _Optional[_Union[PutRequest, _Mapping]] = ..., chunk: _Optional[_Union[PageChunk, _Mapping]] = ..., commit: _Optional[_Union[CommitRequest, _Mapping]] = ...) -> None: ...

class ByteRange(_message.Message):
    __slots__ = ("offset", "nbytes")
    OFFSET_FIELD_NUMBER: _ClassVar[int]
    NBYTES_FIELD_NUMBER: _ClassVar[int]
    offset: int
    nbytes: int
    def __init__(self, offset: _Optional[int] = ..., nbytes: _Optional[int] = ...) -> None: ...

class GetRequest(_message.Message):
    __slots__ = ("namespace", "prefix_hashes", "ranges", "prefix_only", "near", "wait_ms", "in_parts")
    NAMESPACE_FIELD_NUMBER: _ClassVar[int]
    PREFIX_HASHES_FIELD_NUMBER: _ClassVar[int]
    RANGES_FIELD_NUMBER: _ClassVar[int]
    PREFIX_ONLY_FIELD_NUMBER: _ClassVar[int]
    NEAR_FIELD_NUMBER: _ClassVar[int]
    WAIT_MS_FIELD_NUMBER: _ClassVar[int]
    IN_PARTS_FIELD_NUMBER: _ClassVar[int]
    namespace: bytes
    prefix_hashes: _containers.RepeatedScalarFieldContainer[bytes]
    ranges: _containers.RepeatedCompositeFieldContainer[ByteRange]
    prefix_only: bool
    near: bool
    wait_ms: int
    in_parts: bool
    def __init__(self, namespace: _Optional[bytes] = ..., prefix_hashes: _Optional[_Iterable[bytes]] = ..., ranges: _Optional[_Iterable[_Union[ByteRange, _Mapping]]] = ..., prefix_only: bool = ..., near: bool = ..., wait_ms: _Optional[int] = ..., in_parts: bool = ...) -> None: ...

class GetReply(_message.Message):
    __slots__ = ("hits", "checksums", "offsets", "ttls_ms", "more")
    HITS_FIELD_NUMBER: _ClassVar[int]
    CHECKSUMS_FIELD_NUMBER: _ClassVar[int]
    OFFSETS_FIELD_NUMBER: _ClassVar[int]
    TTLS_MS_FIELD_NUMBER: _ClassVar[int]
    MORE_FIELD_NUMBER: _ClassVar[int]
    hits: _containers.RepeatedScalarFieldContainer[bool]
    checksums: _containers.RepeatedScalarFieldContainer[bytes]
    offsets: _containers.RepeatedScalarFieldContainer[int]
    ttls_ms: _containers.RepeatedScalarFieldContainer[int]
    more: bool
    def __init__(self, hits: _Optional[_Iterable[bool]] = ..., checksums: _Optional[_Iterable[bytes]] = ..., offsets: _Optional[_Iterable[int]] = ..., ttls_ms: _Optional[_Iterable[int]] = ..., more: bool = ...) -> None: ...

class GetFrame(_message.Message):
    __slots__ = ("begin", "chunk")
    BEGIN_FIELD_NUMBER: _ClassVar[int]
    CHUNK_FIELD_NUMBER: _ClassVar[int]
    begin: GetReply
    chunk: PageChunk
    def __init__(self, begin: _Optional[_Union[GetReply, _Mapping]] = ..., chunk: _Optional[_Union[PageChunk, _Mapping]] = ...) -> None: ...

class GetWholeReply(_message.Message):
    __slots__ = ("begin", "chunk")
    BEGIN_FIELD_NUMBER: _ClassVar[int]
    CHUNK_FIELD_NUMBER: _ClassVar[int]
    begin: GetReply
    chunk: PageChunk
    def __init__(self, begin: _Optional[_Union[GetReply, _Mapping]] = ..., chunk: _Optional[_Union[PageChunk, _Mapping]] = ...) -> None: ...

class VerifyRequest(_message.Message):
    __slots__ = ("namespace", "prefix_hashes")
    NAMESPACE_FIELD_NUMBER: _ClassVar[int]
    PREFIX_HASHES_FIELD_NUMBER: _ClassVar[int]
    namespace: bytes
    prefix_hashes: _containers.RepeatedScalarFieldContainer[bytes]
    def __init__(self, namespace: _Optional[bytes] = ..., prefix_hashes: _Optional[_Iterable[bytes]] = ...) -> None: ...

class VerifyReply(_message.Message):
    __slots__ = ("intact", "dropped", "absent", "pages")
    INTACT_FIELD_NUMBER: _ClassVar[int]
    DROPPED_FIELD_NUMBER: _ClassVar[int]
    ABSENT_FIELD_NUMBER: _ClassVar[int]
    PAGES_FIELD_NUMBER: _ClassVar[int]
    intact: int
    dropped: int
    absent: int
    pages: _containers.RepeatedScalarFieldContainer[PageHealth]
    def __init__(self, intact: _Optional[int] = ..., dropped: _Optional[int] = ..., absent: _Optional[int] = ..., pages: _Optional[_Iterable[_Union[PageHealth, str]]] = ...) -> None: ...

class RemoveRequest(_message.Message):
    __slots__ = ("namespace", "prefix_hashes")
    NAMESPACE_FIELD_NUMBER: _ClassVar[int]
    PREFIX_HASHES_FIELD_NUMBER: _ClassVar[int]
    namespace: bytes
    prefix_hashes: _containers.RepeatedScalarFieldContainer[bytes]
    def __init__(self, namespace: _Optional[bytes] = ..., prefix_hashes: _Optional[_Iterable[bytes]] = ...) -> None: ...

class RemoveReply(_message.Message):
    __slots__ = ("removed", "view_number")
    REMOVED_FIELD_NUMBER: _ClassVar[int]
    VIEW_NUMBER_FIELD_NUMBER: _ClassVar[int]
    removed: _containers.RepeatedScalarFieldContainer[bool]
    view_number: int
    def __init__(self, removed: _Optional[_Iterable[bool]] = ..., view_number: _Optional[int] = ...) -> None: ...

class PinRequest(_message.Message):
    __slots__ = ("namespace", "prefix_hashes", "ttl_ms")
    NAMESPACE_FIELD_NUMBER: _ClassVar[int]
    PREFIX_HASHES_FIELD_NUMBER: _ClassVar[int]
    TTL_MS_FIELD_NUMBER: _ClassVar[int]
    namespace: bytes
    prefix_hashes: _containers.RepeatedScalarFieldContainer[bytes]
    ttl_ms: int
    def __init__(self, namespace: _Optional[bytes] = ..., prefix_hashes: _Optional[_Iterable[bytes]] = ..., ttl_ms: _Optional[int] = ...) -> None: ...

class PinReply(_message.Message):
    __slots__ = ("pinned",)
    PINNED_FIELD_NUMBER: _ClassVar[int]
    pinned: _containers.RepeatedScalarFieldContainer[bool]
    def __init__(self, pinned: _Optional[_Iterable[bool]] = ...) -> None: ...

class UnpinRequest(_message.Message):
    __slots__ = ("namespace", "prefix_hashes")
    NAMESPACE_FIELD_NUMBER: _ClassVar[int]
    PREFIX_HASHES_FIELD_NUMBER: _ClassVar[int]
    namespace: bytes
    prefix_hashes: _containers.RepeatedScalarFieldContainer[bytes]
    def __init__(self, namespace: _Optional[bytes] = ..., prefix_hashes: _Optional[_Iterable[bytes]] = ...) -> None: ...

class UnpinReply(_message.Message):
    __slots__ = ("unpinned",)
    UNPINNED_FIELD_NUMBER: _ClassVar[int]
    unpinned: _containers.RepeatedScalarFieldContainer[bool]
    def __init__(self, unpinned: _Optional[_Iterable[bool]] = ...) -> None: ...

class HintRequest(_message.Message):
    __slots__ = ("namespace", "prefix_hashes", "action", "priority", "ttl_ms", "session", "session_age_ms")
    NAMESPACE_FIELD_NUMBER: _ClassVar[int]
    PREFIX_HASHES_FIELD_NUMBER: _ClassVar[int]
    ACTION_FIELD_NUMBER: _ClassVar[int]
    PRIORITY_FIELD_NUMBER: _ClassVar[int]
    TTL_MS_FIELD_NUMBER: _ClassVar[int]
    SESSION_FIELD_NUMBER: _ClassVar[int]
    SESSION_AGE_MS_FIELD_NUMBER: _ClassVar[int]
    namespace: bytes
    prefix_hashes: _containers.RepeatedScalarFieldContainer[bytes]
    action: HintAction
    priority: int
    ttl_ms: int
    session: bytes
    session_age_ms: int
    def __init__(self, namespace: _Optional[bytes] = ..., prefix_hashes: _Optional[_Iterable[bytes]] = ..., action: _Optional[_Union[HintAction, str]] = ..., priority: _Optional[int] = ..., ttl_ms: _Optional[int] = ..., session: _Optional[bytes] = ..., session_age_ms: _Optional[int] = ...) -> None: ...

class HintReply(_message.Message):
    __slots__ = ("verdicts", "reason", "deleted", "more")
    VERDICTS_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    DELETED_FIELD_NUMBER: _ClassVar[int]
    MORE_FIELD_NUMBER: _ClassVar[int]
    verdicts: _containers.RepeatedScalarFieldContainer[HintVerdict]
    reason: str
    deleted: _containers.RepeatedScalarFieldContainer[bytes]
    more: bool
    def __init__(self, verdicts: _Optional[_Iterable[_Union[HintVerdict, str]]] = ..., reason: _Optional[str] = ..., deleted: _Optional[_Iterable[bytes]] = ..., more: bool = ...) -> None: ...

class HintCount(_message.Message):
    __slots__ = ("action", "verdict", "pages")
    ACTION_FIELD_NUMBER: _ClassVar[int]
    VERDICT_FIELD_NUMBER: _ClassVar[int]
    PAGES_FIELD_NUMBER: _ClassVar[int]
    action: str
    verdict: str
    pages: int
    def __init__(self, action: _Optional[str] = ..., verdict: _Optional[str] = ..., pages: _Optional[int] = ...) -> None: ...

class HintStatus(_message.Message):
    __slots__ = ("counts", "retained_count", "session_count", "session_page_count", "sessions_forgotten", "prefetching_count")
    COUNTS_FIELD_NUMBER: _ClassVar[int]
    RETAINED_COUNT_FIELD_NUMBER: _ClassVar[int]
    SESSION_COUNT_FIELD_NUMBER: _ClassVar[int]
    SESSION_PAGE_COUNT_FIELD_NUMBER: _ClassVar[int]
    SESSIONS_FORGOTTEN_FIELD_NUMBER: _ClassVar[int]
    PREFETCHING_COUNT_FIELD_NUMBER: _ClassVar[int]
    counts: _containers.RepeatedCompositeFieldContainer[HintCount]
    retained_count: int
    session_count: int
    session_page_count: int
    sessions_forgotten: int
    prefetching_count: int
    def __init__(self, counts: _Optional[_Iterable[_Union[HintCount, _Mapping]]] = ..., retained_count: _Optional[int] = ..., session_count: _Optional[int] = ..., session_page_count: _Optional[int] = ..., sessions_forgotten: _Optional[int] = ..., prefetching_count: _Optional[int] = ...) -> None: ...

class ListRequest(_message.Message):
    __slots__ = ("namespace", "key_prefix", "page_token", "limit", "owner")
    NAMESPACE_FIELD_NUMBER: _ClassVar[int]
    KEY_PREFIX_FIELD_NUMBER: _ClassVar[int]
    PAGE_TOKEN_FIELD_NUMBER: _ClassVar[int]
    LIMIT_FIELD_NUMBER: _ClassVar[int]
    OWNER_FIELD_NUMBER: _ClassVar[int]
    namespace: bytes
    key_prefix: bytes
    page_token: bytes
    limit: int
    owner: str
    def __init__(self, namespace: _Optional[bytes] = ..., key_prefix: _Optional[bytes] = ..., page_token: _Optional[bytes] = ..., limit: _Optional[int] = ..., owner: _Optional[str] = ...) -> None: ...

class ListReply(_message.Message):
    __slots__ = ("pages", "next_page_token")
    PAGES_FIELD_NUMBER: _ClassVar[int]
    NEXT_PAGE_TOKEN_FIELD_NUMBER: _ClassVar[int]
    pages: _containers.RepeatedCompositeFieldContainer[PageStat]
    next_page_token: bytes
    def __init__(self, pages: _Optional[_Iterable[_Union[PageStat, _Mapping]]] = ..., next_page_token: _Optional[bytes] = ...) -> None: ...

class StatRequest(_message.Message):
    __slots__ = ("namespace", "prefix_hashes")
    NAMESPACE_FIELD_NUMBER: _ClassVar[int]
    PREFIX_HASHES_FIELD_NUMBER: _ClassVar[int]
    namespace: bytes
    prefix_hashes: _containers.RepeatedScalarFieldContainer[bytes]
    def __init__(self, namespace: _Optional[bytes] = ..., prefix_hashes: _Optional[_Iterable[bytes]] = ...) -> None: ...

class PageStat(_message.Message):
    __slots__ = ("prefix_hash", "present", "nbytes", "checksum", "age_ms", "idle_ms", "pin_ttl_ms", "holds", "writing", "in_ram", "on_disk", "ttl_ms", "is_copy")
    PREFIX_HASH_FIELD_NUMBER: _ClassVar[int]
    PRESENT_FIELD_NUMBER: _ClassVar[int]
    NBYTES_FIELD_NUMBER: _ClassVar[int]
    CHECKSUM_FIELD_NUMBER: _ClassVar[int]
    AGE_MS_FIELD_NUMBER: _ClassVar[int]
    IDLE_MS_FIELD_NUMBER: _ClassVar[int]
    PIN_TTL_MS_FIELD_NUMBER: _ClassVar[int]
    HOLDS_FIELD_NUMBER: _ClassVar[int]
    WRITING_FIELD_NUMBER: _ClassVar[int]
    IN_RAM_FIELD_NUMBER: _ClassVar[int]
    ON_DISK_FIELD_NUMBER: _ClassVar[int]
    TTL_MS_FIELD_NUMBER: _ClassVar[int]
    IS_COPY_FIELD_NUMBER: _ClassVar[int]
    prefix_hash: bytes
    present: bool
    nbytes: int
    checksum: bytes
    age_ms: int
    idle_ms: int
    pin_ttl_ms: int
    holds: int
    writing: bool
    in_ram: bool
    on_disk: bool
    ttl_ms: int
    is_copy: bool
    def __init__(self, prefix_hash: _Optional[bytes] = ..., present: bool = ..., nbytes: _Optional[int] = ..., checksum: _Optional[bytes] = ..., age_ms: _Optional[int] = ..., idle_ms: _Optional[int] = ..., pin_ttl_ms: _Optional[int] = ..., holds: _Optional[int] = ..., writing: bool = ..., in_ram: bool = ..., on_disk: bool = ..., ttl_ms: _Optional[int] = ..., is_copy: bool = ...) -> None: ...

class StatReply(_message.Message):
    __slots__ = ("pages",)
    PAGES_FIELD_NUMBER: _ClassVar[int]
    pages: _containers.RepeatedCompositeFieldContainer[PageStat]
    def __init__(self, pages: _Optional[_Iterable[_Union[PageStat, _Mapping]]] = ...) -> None: ...

class NodeStatusRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class SizeClass(_message.Message):
    __slots__ = ("slot_nbytes", "block_count", "slot_count", "used_count")
    SLOT_NBYTES_FIELD_NUMBER: _ClassVar[int]
    BLOCK_COUNT_FIELD_NUMBER: _ClassVar[int]
    SLOT_COUNT_FIELD_NUMBER: _ClassVar[int]
    USED_COUNT_FIELD_NUMBER: _ClassVar[int]
    slot_nbytes: int
    block_count: int
    slot_count: int
    used_count: int
    def __init__(self, slot_nbytes: _Optional[int] = ..., block_count: _Optional[int] = ..., slot_count: _Optional[int] = ..., used_count: _Optional[int] = ...) -> None: ...

class RamStatus(_message.Message):
    __slots__ = ("capacity_nbytes", "used_nbytes", "extent_nbytes", "extent_count", "extent_free_count", "page_count", "writing_count", "held_count", "pinned_count", "size_classes", "huge_nbytes")
    CAPACITY_NBYTES_FIELD_NUMBER: _ClassVar[int]
    USED_NBYTES_FIELD_NUMBER: _ClassVar[int]
    EXTENT_NBYTES_FIELD_NUMBER: _ClassVar[int]
    EXTENT_COUNT_FIELD_NUMBER: _ClassVar[int]
    EXTENT_FREE_COUNT_FIELD_NUMBER: _ClassVar[int]
    PAGE_COUNT_FIELD_NUMBER: _ClassVar[int]
    WRITING_COUNT_FIELD_NUMBER: _ClassVar[int]
    HELD_COUNT_FIELD_NUMBER: _ClassVar[int]
    PINNED_COUNT_FIELD_NUMBER: _ClassVar[int]
    SIZE_CLASSES_FIELD_NUMBER: _ClassVar[int]
    HUGE_NBYTES_FIELD_NUMBER: _ClassVar[int]
    capacity_nbytes: int
    used_nbytes: int
    extent_nbytes: int
    extent_count: int
    extent_free_count: int
    page_count: int
    writing_count: int
    held_count: int
    pinned_count: int
    size_classes: _containers.RepeatedCompositeFieldContainer[SizeClass]
    huge_nbytes: int
    def __init__(self, capacity_nbytes: _Optional[int] = ..., used_nbytes: _Optional[int] = ..., extent_nbytes: _Optional[int] = ..., extent_count: _Optional[int] = ..., extent_free_count: _Optional[int] = ..., page_count: _Optional[int] = ..., writing_count: _Optional[int] = ..., held_count: _Optional[int] = ..., pinned_count: _Optional[int] = ..., size_classes: _Optional[_Iterable[_Union[SizeClass, _Mapping]]] = ..., huge_nbytes: _Optional[int] = ...) -> None: ...

class DiskStatus(_message.Message):
    __slots__ = ("state", "reason", "data_dir", "capacity_nbytes", "used_nbytes", "page_count", "queue_nbytes", "queue_nbytes_max", "direct_io", "extent_count", "extent_free_count", "pages_written", "pages_read", "pages_evicted", "pages_corrupt", "pages_refused", "pages_scrubbed", "rows_damaged", "nbytes_written", "nbytes_read", "pages_read_in_part", "no_space_errors", "usable_nbytes", "limit", "filesystem_free_nbytes", "filesystem_nbytes")
    STATE_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    DATA_DIR_FIELD_NUMBER: _ClassVar[int]
    CAPACITY_NBYTES_FIELD_NUMBER: _ClassVar[int]
    USED_NBYTES_FIELD_NUMBER: _ClassVar[int]
    PAGE_COUNT_FIELD_NUMBER: _ClassVar[int]
    QUEUE_NBYTES_FIELD_NUMBER: _ClassVar[int]
    QUEUE_NBYTES_MAX_FIELD_NUMBER: _ClassVar[int]
    DIRECT_IO_FIELD_NUMBER: _ClassVar[int]
    EXTENT_COUNT_FIELD_NUMBER: _ClassVar[int]
    EXTENT_FREE_COUNT_FIELD_NUMBER: _ClassVar[int]
    PAGES_WRITTEN_FIELD_NUMBER: _ClassVar[int]
    PAGES_READ_FIELD_NUMBER: _ClassVar[int]
    PAGES_EVICTED_FIELD_NUMBER: _ClassVar[int]
    PAGES_CORRUPT_FIELD_NUMBER: _ClassVar[int]
    PAGES_REFUSED_FIELD_NUMBER: _ClassVar[int]
    PAGES_SCRUBBED_FIELD_NUMBER: _ClassVar[int]
    ROWS_DAMAGED_FIELD_NUMBER: _ClassVar[int]
    NBYTES_WRITTEN_FIELD_NUMBER: _ClassVar[int]
    NBYTES_READ_FIELD_NUMBER: _ClassVar[int]
    PAGES_READ_IN_PART_FIELD_NUMBER: _ClassVar[int]
    NO_SPACE_ERRORS_FIELD_NUMBER: _ClassVar[int]
    USABLE_NBYTES_FIELD_NUMBER: _ClassVar[int]
    LIMIT_FIELD_NUMBER: _ClassVar[int]
    FILESYSTEM_FREE_NBYTES_FIELD_NUMBER: _ClassVar[int]
    FILESYSTEM_NBYTES_FIELD_NUMBER: _ClassVar[int]
    state: str
    reason: str
    data_dir: str
    capacity_nbytes: int
    used_nbytes: int
    page_count: int
    queue_nbytes: int
    queue_nbytes_max: int
    direct_io: bool
    extent_count: int
    extent_free_count: int
    pages_written: int
    pages_read: int
    pages_evicted: int
    pages_corrupt: int
    pages_refused: int
    pages_scrubbed: int
    rows_damaged: int
    nbytes_written: int
    nbytes_read: int
    pages_read_in_part: int
    no_space_errors: int
    usable_nbytes: int
    limit: str
    filesystem_free_nbytes: int
    filesystem_nbytes: int
    def __init__(self, state: _Optional[str] = ..., reason: _Optional[str] = ..., data_dir: _Optional[str] = ..., capacity_nbytes: _Optional[int] = ..., used_nbytes: _Optional[int] = ..., page_count: _Optional[int] = ..., queue_nbytes: _Optional[int] = ..., queue_nbytes_max: _Optional[int] = ..., direct_io: bool = ..., extent_count: _Optional[int] = ..., extent_free_count: _Optional[int] = ..., pages_written: _Optional[int] = ..., pages_read: _Optional[int] = ..., pages_evicted: _Optional[int] = ..., pages_corrupt: _Optional[int] = ..., pages_refused: _Optional[int] = ..., pages_scrubbed: _Optional[int] = ..., rows_damaged: _Optional[int] = ..., nbytes_written: _Optional[int] = ..., nbytes_read: _Optional[int] = ..., pages_read_in_part: _Optional[int] = ..., no_space_errors: _Optional[int] = ..., usable_nbytes: _Optional[int] = ..., limit: _Optional[str] = ..., filesystem_free_nbytes: _Optional[int] = ..., filesystem_nbytes: _Optional[int] = ...) -> None: ...

class ShmStatus(_message.Message):
    __slots__ = ("socket", "client_count", "orphan_count", "orphan_page_count")
    SOCKET_FIELD_NUMBER: _ClassVar[int]
    CLIENT_COUNT_FIELD_NUMBER: _ClassVar[int]
    ORPHAN_COUNT_FIELD_NUMBER: _ClassVar[int]
    ORPHAN_PAGE_COUNT_FIELD_NUMBER: _ClassVar[int]
    socket: str
    client_count: int
    orphan_count: int
    orphan_page_count: int
    def __init__(self, socket: _Optional[str] = ..., client_count: _Optional[int] = ..., orphan_count: _Optional[int] = ..., orphan_page_count: _Optional[int] = ...) -> None: ...

class LostMember(_message.Message):
    __slots__ = ("id", "address", "since_unix_s", "share", "owners_left", "share_alone")
    ID_FIELD_NUMBER: _ClassVar[int]
    ADDRESS_FIELD_NUMBER: _ClassVar[int]
    SINCE_UNIX_S_FIELD_NUMBER: _ClassVar[int]
    SHARE_FIELD_NUMBER: _ClassVar[int]
    OWNERS_LEFT_FIELD_NUMBER: _ClassVar[int]
    SHARE_ALONE_FIELD_NUMBER: _ClassVar[int]
    id: str
    address: str
    since_unix_s: int
    share: float
    owners_left: int
    share_alone: float
    def __init__(self, id: _Optional[str] = ..., address: _Optional[str] = ..., since_unix_s: _Optional[int] = ..., share: _Optional[float] = ..., owners_left: _Optional[int] = ..., share_alone: _Optional[float] = ...) -> None: ...

class PeersStatus(_message.Message):
    __slots__ = ("view_number", "registry", "queue_pages", "queue_nbytes", "queue_nbytes_max", "pages_handed", "pages_dropped", "nbytes_handed", "copy_count", "copy_nbytes", "pages_fetched", "nbytes_fetched", "pages_fetch_failed", "apart", "cluster", "member_id", "member_count", "replicas", "sweeping", "sweep_pages_missing", "sweep_pages_fetched", "sweep_pages_full", "sweep_pages_failed", "sweep_age_ms", "lost", "pages_under_replicated")
    VIEW_NUMBER_FIELD_NUMBER: _ClassVar[int]
    REGISTRY_FIELD_NUMBER: _ClassVar[int]
    QUEUE_PAGES_FIELD_NUMBER: _ClassVar[int]
    QUEUE_NBYTES_FIELD_NUMBER: _ClassVar[int]
    QUEUE_NBYTES_MAX_FIELD_NUMBER: _ClassVar[int]
    PAGES_HANDED_FIELD_NUMBER: _ClassVar[int]
    PAGES_DROPPED_FIELD_NUMBER: _ClassVar[int]
    NBYTES_HANDED_FIELD_NUMBER: _ClassVar[int]
    COPY_COUNT_FIELD_NUMBER: _ClassVar[int]
    COPY_NBYTES_FIELD_NUMBER: _ClassVar[int]
    PAGES_FETCHED_FIELD_NUMBER: _ClassVar[int]
    NBYTES_FETCHED_FIELD_NUMBER: _ClassVar[int]
    PAGES_FETCH_FAILED_FIELD_NUMBER: _ClassVar[int]
    APART_FIELD_NUMBER: _ClassVar[int]
    CLUSTER_FIELD_NUMBER: _ClassVar[int]
    MEMBER_ID_FIELD_NUMBER: _ClassVar[int]
    MEMBER_COUNT_FIELD_NUMBER: _ClassVar[int]
    REPLICAS_FIELD_NUMBER: _ClassVar[int]
    SWEEPING_FIELD_NUMBER: _ClassVar[int]
    SWEEP_PAGES_MISSING_FIELD_NUMBER: _ClassVar[int]
    SWEEP_PAGES_FETCHED_FIELD_NUMBER: _ClassVar[int]
    SWEEP_PAGES_FULL_FIELD_NUMBER: _ClassVar[int]
    SWEEP_PAGES_FAILED_FIELD_NUMBER: _ClassVar[int]
    SWEEP_AGE_MS_FIELD_NUMBER: _ClassVar[int]
    LOST_FIELD_NUMBER: _ClassVar[int]
    PAGES_UNDER_REPLICATED_FIELD_NUMBER: _ClassVar[int]
    view_number: int
    registry: str
    queue_pages: int
    queue_nbytes: int
    queue_nbytes_max: int
    pages_handed: int
    pages_dropped: int
    nbytes_handed: int
    copy_count: int
    copy_nbytes: int
    pages_fetched: int
    nbytes_fetched: int
    pages_fetch_failed: int
    apart: _containers.RepeatedScalarFieldContainer[str]
    cluster: str
    member_id: str
    member_count: int
    replicas: int
    sweeping: bool
    sweep_pages_missing: int
    sweep_pages_fetched: int
    sweep_pages_full: int
    sweep_pages_failed: int
    sweep_age_ms: int
    lost: _containers.RepeatedCompositeFieldContainer[LostMember]
    pages_under_replicated: int
    def __init__(self, view_number: _Optional[int] = ..., registry: _Optional[str] = ..., queue_pages: _Optional[int] = ..., queue_nbytes: _Optional[int] = ..., queue_nbytes_max: _Optional[int] = ..., pages_handed: _Optional[int] = ..., pages_dropped: _Optional[int] = ..., nbytes_handed: _Optional[int] = ..., copy_count: _Optional[int] = ..., copy_nbytes: _Optional[int] = ..., pages_fetched: _Optional[int] = ..., nbytes_fetched: _Optional[int] = ..., pages_fetch_failed: _Optional[int] = ..., apart: _Optional[_Iterable[str]] = ..., cluster: _Optional[str] = ..., member_id: _Optional[str] = ..., member_count: _Optional[int] = ..., replicas: _Optional[int] = ..., sweeping: bool = ..., sweep_pages_missing: _Optional[int] = ..., sweep_pages_fetched: _Optional[int] = ..., sweep_pages_full: _Optional[int] = ..., sweep_pages_failed: _Optional[int] = ..., sweep_age_ms: _Optional[int] = ..., lost: _Optional[_Iterable[_Union[LostMember, _Mapping]]] = ..., pages_under_replicated: _Optional[int] = ...) -> None: ...

class TenantUse(_message.Message):
    __slots__ = ("tenant", "ram_nbytes", "ram_quota_nbytes", "disk_nbytes", "disk_quota_nbytes", "pin_count", "pin_quota", "held_nbytes", "held_quota_nbytes", "refused_puts", "refused_pins", "refused_holds", "refused_connections", "refused_requests", "refused_bytes")
    TENANT_FIELD_NUMBER: _ClassVar[int]
    RAM_NBYTES_FIELD_NUMBER: _ClassVar[int]
    RAM_QUOTA_NBYTES_FIELD_NUMBER: _ClassVar[int]
    DISK_NBYTES_FIELD_NUMBER: _ClassVar[int]
    DISK_QUOTA_NBYTES_FIELD_NUMBER: _ClassVar[int]
    PIN_COUNT_FIELD_NUMBER: _ClassVar[int]
    PIN_QUOTA_FIELD_NUMBER: _ClassVar[int]
    HELD_NBYTES_FIELD_NUMBER: _ClassVar[int]
    HELD_QUOTA_NBYTES_FIELD_NUMBER: _ClassVar[int]
    REFUSED_PUTS_FIELD_NUMBER: _ClassVar[int]
    REFUSED_PINS_FIELD_NUMBER: _ClassVar[int]
    REFUSED_HOLDS_FIELD_NUMBER: _ClassVar[int]
    REFUSED_CONNECTIONS_FIELD_NUMBER: _ClassVar[int]
    REFUSED_REQUESTS_FIELD_NUMBER: _ClassVar[int]
    REFUSED_BYTES_FIELD_NUMBER: _ClassVar[int]
    tenant: str
    ram_nbytes: int
    ram_quota_nbytes: int
    disk_nbytes: int
    disk_quota_nbytes: int
    pin_count: int
    pin_quota: int
    held_nbytes: int
    held_quota_nbytes: int
    refused_puts: int
    refused_pins: int
    refused_holds: int
    refused_connections: int
    refused_requests: int
    refused_bytes: int
    def __init__(self, tenant: _Optional[str] = ..., ram_nbytes: _Optional[int] = ..., ram_quota_nbytes: _Optional[int] = ..., disk_nbytes: _Optional[int] = ..., disk_quota_nbytes: _Optional[int] = ..., pin_count: _Optional[int] = ..., pin_quota: _Optional[int] = ..., held_nbytes: _Optional[int] = ..., held_quota_nbytes: _Optional[int] = ..., refused_puts: _Optional[int] = ..., refused_pins: _Optional[int] = ..., refused_holds: _Optional[int] = ..., refused_connections: _Optional[int] = ..., refused_requests: _Optional[int] = ..., refused_bytes: _Optional[int] = ...) -> None: ...

class NodeStatusReply(_message.Message):
    __slots__ = ("version", "instance_id", "state", "uptime_ms", "pid", "rss_nbytes", "session_count", "ram", "namespaces", "totals", "limits", "bulk_port", "metrics_port", "disk", "shm", "peers", "tenants", "insecure", "refused_calls", "tls", "now_unix_ms", "gateways", "gateway_ends", "identities", "request_times", "hints")
    VERSION_FIELD_NUMBER: _ClassVar[int]
    INSTANCE_ID_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    UPTIME_MS_FIELD_NUMBER: _ClassVar[int]
    PID_FIELD_NUMBER: _ClassVar[int]
    RSS_NBYTES_FIELD_NUMBER: _ClassVar[int]
    SESSION_COUNT_FIELD_NUMBER: _ClassVar[int]
    RAM_FIELD_NUMBER: _ClassVar[int]
    NAMESPACES_FIELD_NUMBER: _ClassVar[int]
    TOTALS_FIELD_NUMBER: _ClassVar[int]
    LIMITS_FIELD_NUMBER: _ClassVar[int]
    BULK_PORT_FIELD_NUMBER: _ClassVar[int]
    METRICS_PORT_FIELD_NUMBER: _ClassVar[int]
    DISK_FIELD_NUMBER: _ClassVar[int]
    SHM_FIELD_NUMBER: _ClassVar[int]
    PEERS_FIELD_NUMBER: _ClassVar[int]
    TENANTS_FIELD_NUMBER: _ClassVar[int]
    INSECURE_FIELD_NUMBER: _ClassVar[int]
    REFUSED_CALLS_FIELD_NUMBER: _ClassVar[int]
    TLS_FIELD_NUMBER: _ClassVar[int]
    NOW_UNIX_MS_FIELD_NUMBER: _ClassVar[int]
    GATEWAYS_FIELD_NUMBER: _ClassVar[int]
    GATEWAY_ENDS_FIELD_NUMBER: _ClassVar[int]
    IDENTITIES_FIELD_NUMBER: _ClassVar[int]
    REQUEST_TIMES_FIELD_NUMBER: _ClassVar[int]
    HINTS_FIELD_NUMBER: _ClassVar[int]
    version: str
    instance_id: bytes
    state: str
    uptime_ms: int
    pid: int
    rss_nbytes: int
    session_count: int
    ram: RamStatus
    namespaces: _containers.RepeatedCompositeFieldContainer[NamespaceInfo]
    totals: Counters
    limits: Limits
    bulk_port: int
    metrics_port: int
    disk: DiskStatus
    shm: ShmStatus
    peers: PeersStatus
    tenants: _containers.RepeatedCompositeFieldContainer[TenantUse]
    insecure: str
    refused_calls: int
    tls: TlsStatus
    now_unix_ms: int
    gateways: _containers.RepeatedCompositeFieldContainer[GatewayStatus]
    gateway_ends: _containers.RepeatedCompositeFieldContainer[GatewayEnd]
    identities: IdentitiesStatus
    request_times: RequestTimes
    hints: HintStatus
    def __init__(self, version: _Optional[str] = ..., instance_id: _Optional[bytes] = ..., state: _Optional[str] = ..., uptime_ms: _Optional[int] = ..., pid: _Optional[int] = ..., rss_nbytes: _Optional[int] = ..., session_count: _Optional[int] = ..., ram: _Optional[_Union[RamStatus, _Mapping]] = ..., namespaces: _Optional[_Iterable[_Union[NamespaceInfo, _Mapping]]] = ..., totals: _Optional[_Union[Counters, _Mapping]] = ..., limits: _Optional[_Union[Limits, _Mapping]] = ..., bulk_port: _Optional[int] = ..., metrics_port: _Optional[int] = ..., disk: _Optional[_Union[DiskStatus, _Mapping]] = ..., shm: _Optional[_Union[ShmStatus, _Mapping]] = ..., peers: _Optional[_Union[PeersStatus, _Mapping]] = ..., tenants: _Optional[_Iterable[_Union[TenantUse, _Mapping]]] = ..., insecure: _Optional[str] = ..., refused_calls: _Optional[int] = ..., tls: _Optional[_Union[TlsStatus, _Mapping]] = ..., now_unix_ms: _Optional[int] = ..., gateways: _Optional[_Iterable[_Union[GatewayStatus, _Mapping]]] = ..., gateway_ends: _Optional[_Iterable[_Union[GatewayEnd, _Mapping]]] = ..., identities: _Optional[_Union[IdentitiesStatus, _Mapping]] = ..., request_times: _Optional[_Union[RequestTimes, _Mapping]] = ..., hints: _Optional[_Union[HintStatus, _Mapping]] = ...) -> None: ...

class IdentitiesStatus(_message.Message):
    __slots__ = ("digest", "identity_count", "problem_count", "writable")
    DIGEST_FIELD_NUMBER: _ClassVar[int]
    IDENTITY_COUNT_FIELD_NUMBER: _ClassVar[int]
    PROBLEM_COUNT_FIELD_NUMBER: _ClassVar[int]
    WRITABLE_FIELD_NUMBER: _ClassVar[int]
    digest: bytes
    identity_count: int
    problem_count: int
    writable: bool
    def __init__(self, digest: _Optional[bytes] = ..., identity_count: _Optional[int] = ..., problem_count: _Optional[int] = ..., writable: bool = ...) -> None: ...

class RequestTimes(_message.Message):
    __slots__ = ("bounds_ns", "operations")
    BOUNDS_NS_FIELD_NUMBER: _ClassVar[int]
    OPERATIONS_FIELD_NUMBER: _ClassVar[int]
    bounds_ns: _containers.RepeatedScalarFieldContainer[int]
    operations: _containers.RepeatedCompositeFieldContainer[OperationTimes]
    def __init__(self, bounds_ns: _Optional[_Iterable[int]] = ..., operations: _Optional[_Iterable[_Union[OperationTimes, _Mapping]]] = ...) -> None: ...

class OperationTimes(_message.Message):
    __slots__ = ("op", "counts")
    OP_FIELD_NUMBER: _ClassVar[int]
    COUNTS_FIELD_NUMBER: _ClassVar[int]
    op: str
    counts: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, op: _Optional[str] = ..., counts: _Optional[_Iterable[int]] = ...) -> None: ...

class GatewayStatus(_message.Message):
    __slots__ = ("name", "pid", "ready", "rss_nbytes", "nbytes_max", "call_count", "recent_ends")
    NAME_FIELD_NUMBER: _ClassVar[int]
    PID_FIELD_NUMBER: _ClassVar[int]
    READY_FIELD_NUMBER: _ClassVar[int]
    RSS_NBYTES_FIELD_NUMBER: _ClassVar[int]
    NBYTES_MAX_FIELD_NUMBER: _ClassVar[int]
    CALL_COUNT_FIELD_NUMBER: _ClassVar[int]
    RECENT_ENDS_FIELD_NUMBER: _ClassVar[int]
    name: str
    pid: int
    ready: bool
    rss_nbytes: int
    nbytes_max: int
    call_count: int
    recent_ends: int
    def __init__(self, name: _Optional[str] = ..., pid: _Optional[int] = ..., ready: bool = ..., rss_nbytes: _Optional[int] = ..., nbytes_max: _Optional[int] = ..., call_count: _Optional[int] = ..., recent_ends: _Optional[int] = ...) -> None: ...

class GatewayEnd(_message.Message):
    __slots__ = ("why", "count")
    WHY_FIELD_NUMBER: _ClassVar[int]
    COUNT_FIELD_NUMBER: _ClassVar[int]
    why: str
    count: int
    def __init__(self, why: _Optional[str] = ..., count: _Optional[int] = ...) -> None: ...

class TlsStatus(_message.Message):
    __slots__ = ("certificates", "client_certificates", "problem")
    CERTIFICATES_FIELD_NUMBER: _ClassVar[int]
    CLIENT_CERTIFICATES_FIELD_NUMBER: _ClassVar[int]
    PROBLEM_FIELD_NUMBER: _ClassVar[int]
    certificates: _containers.RepeatedCompositeFieldContainer[CertificateStatus]
    client_certificates: bool
    problem: str
    def __init__(self, certificates: _Optional[_Iterable[_Union[CertificateStatus, _Mapping]]] = ..., client_certificates: bool = ..., problem: _Optional[str] = ...) -> None: ...

class CertificateStatus(_message.Message):
    __slots__ = ("setting", "ends_unix_s")
    SETTING_FIELD_NUMBER: _ClassVar[int]
    ENDS_UNIX_S_FIELD_NUMBER: _ClassVar[int]
    setting: str
    ends_unix_s: int
    def __init__(self, setting: _Optional[str] = ..., ends_unix_s: _Optional[int] = ...) -> None: ...

class RemoveNamespaceRequest(_message.Message):
    __slots__ = ("namespace", "removal")
    NAMESPACE_FIELD_NUMBER: _ClassVar[int]
    REMOVAL_FIELD_NUMBER: _ClassVar[int]
    namespace: bytes
    removal: bytes
    def __init__(self, namespace: _Optional[bytes] = ..., removal: _Optional[bytes] = ...) -> None: ...

class RemoveNamespaceReply(_message.Message):
    __slots__ = ("removed",)
    REMOVED_FIELD_NUMBER: _ClassVar[int]
    removed: int
    def __init__(self, removed: _Optional[int] = ...) -> None: ...

class ForgetRequest(_message.Message):
    __slots__ = ("tenant", "removal", "remove_only", "wait_ms")
    TENANT_FIELD_NUMBER: _ClassVar[int]
    REMOVAL_FIELD_NUMBER: _ClassVar[int]
    REMOVE_ONLY_FIELD_NUMBER: _ClassVar[int]
    WAIT_MS_FIELD_NUMBER: _ClassVar[int]
    tenant: str
    removal: bytes
    remove_only: bool
    wait_ms: int
    def __init__(self, tenant: _Optional[str] = ..., removal: _Optional[bytes] = ..., remove_only: bool = ..., wait_ms: _Optional[int] = ...) -> None: ...

class ForgetReply(_message.Message):
    __slots__ = ("namespaces", "pages", "ram_nbytes", "keys_destroyed", "left", "why", "plain_disk")
    NAMESPACES_FIELD_NUMBER: _ClassVar[int]
    PAGES_FIELD_NUMBER: _ClassVar[int]
    RAM_NBYTES_FIELD_NUMBER: _ClassVar[int]
    KEYS_DESTROYED_FIELD_NUMBER: _ClassVar[int]
    LEFT_FIELD_NUMBER: _ClassVar[int]
    WHY_FIELD_NUMBER: _ClassVar[int]
    PLAIN_DISK_FIELD_NUMBER: _ClassVar[int]
    namespaces: int
    pages: int
    ram_nbytes: int
    keys_destroyed: int
    left: int
    why: _containers.RepeatedScalarFieldContainer[str]
    plain_disk: bool
    def __init__(self, namespaces: _Optional[int] = ..., pages: _Optional[int] = ..., ram_nbytes: _Optional[int] = ..., keys_destroyed: _Optional[int] = ..., left: _Optional[int] = ..., why: _Optional[_Iterable[str]] = ..., plain_disk: bool = ...) -> None: ...

class FlushRequest(_message.Message):
    __slots__ = ("wait_ms",)
    WAIT_MS_FIELD_NUMBER: _ClassVar[int]
    wait_ms: int
    def __init__(self, wait_ms: _Optional[int] = ...) -> None: ...

class FlushReply(_message.Message):
    __slots__ = ("pages_on_disk", "pages_replicated")
    PAGES_ON_DISK_FIELD_NUMBER: _ClassVar[int]
    PAGES_REPLICATED_FIELD_NUMBER: _ClassVar[int]
    pages_on_disk: int
    pages_replicated: int
    def __init__(self, pages_on_disk: _Optional[int] = ..., pages_replicated: _Optional[int] = ...) -> None: ...

class ScrubRequest(_message.Message):
    __slots__ = ("cursor", "nbytes_max")
    CURSOR_FIELD_NUMBER: _ClassVar[int]
    NBYTES_MAX_FIELD_NUMBER: _ClassVar[int]
    cursor: bytes
    nbytes_max: int
    def __init__(self, cursor: _Optional[bytes] = ..., nbytes_max: _Optional[int] = ...) -> None: ...

class ScrubReply(_message.Message):
    __slots__ = ("intact", "damaged", "nbytes", "next_cursor")
    INTACT_FIELD_NUMBER: _ClassVar[int]
    DAMAGED_FIELD_NUMBER: _ClassVar[int]
    NBYTES_FIELD_NUMBER: _ClassVar[int]
    NEXT_CURSOR_FIELD_NUMBER: _ClassVar[int]
    intact: int
    damaged: int
    nbytes: int
    next_cursor: bytes
    def __init__(self, intact: _Optional[int] = ..., damaged: _Optional[int] = ..., nbytes: _Optional[int] = ..., next_cursor: _Optional[bytes] = ...) -> None: ...

class RecoverRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class RecoverReply(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class RecordRequest(_message.Message):
    __slots__ = ("ms", "recording", "end")
    MS_FIELD_NUMBER: _ClassVar[int]
    RECORDING_FIELD_NUMBER: _ClassVar[int]
    END_FIELD_NUMBER: _ClassVar[int]
    ms: int
    recording: bytes
    end: bool
    def __init__(self, ms: _Optional[int] = ..., recording: _Optional[bytes] = ..., end: bool = ...) -> None: ...

class RecordedUse(_message.Message):
    __slots__ = ("at_ms", "stored", "page_nbytes", "page_tokens", "pages", "session", "ended")
    AT_MS_FIELD_NUMBER: _ClassVar[int]
    STORED_FIELD_NUMBER: _ClassVar[int]
    PAGE_NBYTES_FIELD_NUMBER: _ClassVar[int]
    PAGE_TOKENS_FIELD_NUMBER: _ClassVar[int]
    PAGES_FIELD_NUMBER: _ClassVar[int]
    SESSION_FIELD_NUMBER: _ClassVar[int]
    ENDED_FIELD_NUMBER: _ClassVar[int]
    at_ms: int
    stored: bool
    page_nbytes: int
    page_tokens: float
    pages: _containers.RepeatedScalarFieldContainer[int]
    session: int
    ended: bool
    def __init__(self, at_ms: _Optional[int] = ..., stored: bool = ..., page_nbytes: _Optional[int] = ..., page_tokens: _Optional[float] = ..., pages: _Optional[_Iterable[int]] = ..., session: _Optional[int] = ..., ended: bool = ...) -> None: ...

class RecordReply(_message.Message):
    __slots__ = ("recording", "uses", "more", "dropped", "over")
    RECORDING_FIELD_NUMBER: _ClassVar[int]
    USES_FIELD_NUMBER: _ClassVar[int]
    MORE_FIELD_NUMBER: _ClassVar[int]
    DROPPED_FIELD_NUMBER: _ClassVar[int]
    OVER_FIELD_NUMBER: _ClassVar[int]
    recording: bytes
    uses: _containers.RepeatedCompositeFieldContainer[RecordedUse]
    more: bool
    dropped: int
    over: bool
    def __init__(self, recording: _Optional[bytes] = ..., uses: _Optional[_Iterable[_Union[RecordedUse, _Mapping]]] = ..., more: bool = ..., dropped: _Optional[int] = ..., over: bool = ...) -> None: ...

class EventsRequest(_message.Message):
    __slots__ = ("since_unix_ms", "limit")
    SINCE_UNIX_MS_FIELD_NUMBER: _ClassVar[int]
    LIMIT_FIELD_NUMBER: _ClassVar[int]
    since_unix_ms: int
    limit: int
    def __init__(self, since_unix_ms: _Optional[int] = ..., limit: _Optional[int] = ...) -> None: ...

class Event(_message.Message):
    __slots__ = ("unix_ms", "kind", "member", "text")
    UNIX_MS_FIELD_NUMBER: _ClassVar[int]
    KIND_FIELD_NUMBER: _ClassVar[int]
    MEMBER_FIELD_NUMBER: _ClassVar[int]
    TEXT_FIELD_NUMBER: _ClassVar[int]
    unix_ms: int
    kind: str
    member: str
    text: str
    def __init__(self, unix_ms: _Optional[int] = ..., kind: _Optional[str] = ..., member: _Optional[str] = ..., text: _Optional[str] = ...) -> None: ...

class EventsReply(_message.Message):
    __slots__ = ("events", "member_id", "kept")
    EVENTS_FIELD_NUMBER: _ClassVar[int]
    MEMBER_ID_FIELD_NUMBER: _ClassVar[int]
    KEPT_FIELD_NUMBER: _ClassVar[int]
    events: _containers.RepeatedCompositeFieldContainer[Event]
    member_id: str
    kept: bool
    def __init__(self, events: _Optional[_Iterable[_Union[Event, _Mapping]]] = ..., member_id: _Optional[str] = ..., kept: bool = ...) -> None: ...

class FeedRequest(_message.Message):
    __slots__ = ("model", "cursor", "wait_ms", "member")
    MODEL_FIELD_NUMBER: _ClassVar[int]
    CURSOR_FIELD_NUMBER: _ClassVar[int]
    WAIT_MS_FIELD_NUMBER: _ClassVar[int]
    MEMBER_FIELD_NUMBER: _ClassVar[int]
    model: str
    cursor: bytes
    wait_ms: int
    member: bool
    def __init__(self, model: _Optional[str] = ..., cursor: _Optional[bytes] = ..., wait_ms: _Optional[int] = ..., member: bool = ...) -> None: ...

class FeedModel(_message.Message):
    __slots__ = ("id", "tenant", "model", "revision", "epoch", "page_tokens", "namespaces", "blocks", "group", "groups", "rank", "ranks")
    ID_FIELD_NUMBER: _ClassVar[int]
    TENANT_FIELD_NUMBER: _ClassVar[int]
    MODEL_FIELD_NUMBER: _ClassVar[int]
    REVISION_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    PAGE_TOKENS_FIELD_NUMBER: _ClassVar[int]
    NAMESPACES_FIELD_NUMBER: _ClassVar[int]
    BLOCKS_FIELD_NUMBER: _ClassVar[int]
    GROUP_FIELD_NUMBER: _ClassVar[int]
    GROUPS_FIELD_NUMBER: _ClassVar[int]
    RANK_FIELD_NUMBER: _ClassVar[int]
    RANKS_FIELD_NUMBER: _ClassVar[int]
    id: bytes
    tenant: str
    model: str
    revision: str
    epoch: int
    page_tokens: int
    namespaces: _containers.RepeatedScalarFieldContainer[bytes]
    blocks: bytes
    group: int
    groups: int
    rank: int
    ranks: int
    def __init__(self, id: _Optional[bytes] = ..., tenant: _Optional[str] = ..., model: _Optional[str] = ..., revision: _Optional[str] = ..., epoch: _Optional[int] = ..., page_tokens: _Optional[int] = ..., namespaces: _Optional[_Iterable[bytes]] = ..., blocks: _Optional[bytes] = ..., group: _Optional[int] = ..., groups: _Optional[int] = ..., rank: _Optional[int] = ..., ranks: _Optional[int] = ...) -> None: ...

class FeedChange(_message.Message):
    __slots__ = ("model", "sequence", "removed", "prefix_hashes")
    MODEL_FIELD_NUMBER: _ClassVar[int]
    SEQUENCE_FIELD_NUMBER: _ClassVar[int]
    REMOVED_FIELD_NUMBER: _ClassVar[int]
    PREFIX_HASHES_FIELD_NUMBER: _ClassVar[int]
    model: bytes
    sequence: int
    removed: bool
    prefix_hashes: _containers.RepeatedScalarFieldContainer[bytes]
    def __init__(self, model: _Optional[bytes] = ..., sequence: _Optional[int] = ..., removed: bool = ..., prefix_hashes: _Optional[_Iterable[bytes]] = ...) -> None: ...

class FeedReply(_message.Message):
    __slots__ = ("cursor", "begin", "snapshot", "models", "changes")
    CURSOR_FIELD_NUMBER: _ClassVar[int]
    BEGIN_FIELD_NUMBER: _ClassVar[int]
    SNAPSHOT_FIELD_NUMBER: _ClassVar[int]
    MODELS_FIELD_NUMBER: _ClassVar[int]
    CHANGES_FIELD_NUMBER: _ClassVar[int]
    cursor: bytes
    begin: bool
    snapshot: bool
    models: _containers.RepeatedCompositeFieldContainer[FeedModel]
    changes: _containers.RepeatedCompositeFieldContainer[FeedChange]
    def __init__(self, cursor: _Optional[bytes] = ..., begin: bool = ..., snapshot: bool = ..., models: _Optional[_Iterable[_Union[FeedModel, _Mapping]]] = ..., changes: _Optional[_Iterable[_Union[FeedChange, _Mapping]]] = ...) -> None: ...

class QueryRequest(_message.Message):
    __slots__ = ("model", "tenant", "prefix_hashes")
    MODEL_FIELD_NUMBER: _ClassVar[int]
    TENANT_FIELD_NUMBER: _ClassVar[int]
    PREFIX_HASHES_FIELD_NUMBER: _ClassVar[int]
    model: str
    tenant: str
    prefix_hashes: _containers.RepeatedScalarFieldContainer[bytes]
    def __init__(self, model: _Optional[str] = ..., tenant: _Optional[str] = ..., prefix_hashes: _Optional[_Iterable[bytes]] = ...) -> None: ...

class QueryPart(_message.Message):
    __slots__ = ("about", "places")
    ABOUT_FIELD_NUMBER: _ClassVar[int]
    PLACES_FIELD_NUMBER: _ClassVar[int]
    about: FeedModel
    places: bytes
    def __init__(self, about: _Optional[_Union[FeedModel, _Mapping]] = ..., places: _Optional[bytes] = ...) -> None: ...

class QueryReply(_message.Message):
    __slots__ = ("parts",)
    PARTS_FIELD_NUMBER: _ClassVar[int]
    parts: _containers.RepeatedCompositeFieldContainer[QueryPart]
    def __init__(self, parts: _Optional[_Iterable[_Union[QueryPart, _Mapping]]] = ...) -> None: ...

class PushIdentitiesRequest(_message.Message):
    __slots__ = ("content", "force", "check")
    CONTENT_FIELD_NUMBER: _ClassVar[int]
    FORCE_FIELD_NUMBER: _ClassVar[int]
    CHECK_FIELD_NUMBER: _ClassVar[int]
    content: bytes
    force: bool
    check: bool
    def __init__(self, content: _Optional[bytes] = ..., force: bool = ..., check: bool = ...) -> None: ...

class PushIdentitiesReply(_message.Message):
    __slots__ = ("digest", "added", "removed")
    DIGEST_FIELD_NUMBER: _ClassVar[int]
    ADDED_FIELD_NUMBER: _ClassVar[int]
    REMOVED_FIELD_NUMBER: _ClassVar[int]
    digest: bytes
    added: _containers.RepeatedScalarFieldContainer[str]
    removed: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, digest: _Optional[bytes] = ..., added: _Optional[_Iterable[str]] = ..., removed: _Optional[_Iterable[str]] = ...) -> None: ...

class ReleaseRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class OnBehalfRequest(_message.Message):
    __slots__ = ("address", "authorization", "certificate", "names")
    ADDRESS_FIELD_NUMBER: _ClassVar[int]
    AUTHORIZATION_FIELD_NUMBER: _ClassVar[int]
    CERTIFICATE_FIELD_NUMBER: _ClassVar[int]
    NAMES_FIELD_NUMBER: _ClassVar[int]
    address: str
    authorization: str
    certificate: bool
    names: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, address: _Optional[str] = ..., authorization: _Optional[str] = ..., certificate: bool = ..., names: _Optional[_Iterable[str]] = ...) -> None: ...

class AdmitRequest(_message.Message):
    __slots__ = ("op",)
    OP_FIELD_NUMBER: _ClassVar[int]
    op: str
    def __init__(self, op: _Optional[str] = ...) -> None: ...

class AdmitReply(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class BulkRequest(_message.Message):
    __slots__ = ("hello", "open_namespace", "list_namespaces", "lookup", "put", "commit", "get", "verify", "remove", "pin", "unpin", "list", "stat", "node_status", "remove_namespace", "flush", "scrub", "recover", "release", "drain", "sweep", "forget", "record", "follow", "admit", "on_behalf", "events", "push_identities", "feed", "query", "hint", "trace")
    HELLO_FIELD_NUMBER: _ClassVar[int]
    OPEN_NAMESPACE_FIELD_NUMBER: _ClassVar[int]
    LIST_NAMESPACES_FIELD_NUMBER: _ClassVar[int]
    LOOKUP_FIELD_NUMBER: _ClassVar[int]
    PUT_FIELD_NUMBER: _ClassVar[int]
    COMMIT_FIELD_NUMBER: _ClassVar[int]
    GET_FIELD_NUMBER: _ClassVar[int]
    VERIFY_FIELD_NUMBER: _ClassVar[int]
    REMOVE_FIELD_NUMBER: _ClassVar[int]
    PIN_FIELD_NUMBER: _ClassVar[int]
    UNPIN_FIELD_NUMBER: _ClassVar[int]
    LIST_FIELD_NUMBER: _ClassVar[int]
    STAT_FIELD_NUMBER: _ClassVar[int]
    NODE_STATUS_FIELD_NUMBER: _ClassVar[int]
    REMOVE_NAMESPACE_FIELD_NUMBER: _ClassVar[int]
    FLUSH_FIELD_NUMBER: _ClassVar[int]
    SCRUB_FIELD_NUMBER: _ClassVar[int]
    RECOVER_FIELD_NUMBER: _ClassVar[int]
    RELEASE_FIELD_NUMBER: _ClassVar[int]
    DRAIN_FIELD_NUMBER: _ClassVar[int]
    SWEEP_FIELD_NUMBER: _ClassVar[int]
    FORGET_FIELD_NUMBER: _ClassVar[int]
    RECORD_FIELD_NUMBER: _ClassVar[int]
    FOLLOW_FIELD_NUMBER: _ClassVar[int]
    ADMIT_FIELD_NUMBER: _ClassVar[int]
    ON_BEHALF_FIELD_NUMBER: _ClassVar[int]
    EVENTS_FIELD_NUMBER: _ClassVar[int]
    PUSH_IDENTITIES_FIELD_NUMBER: _ClassVar[int]
    FEED_FIELD_NUMBER: _ClassVar[int]
    QUERY_FIELD_NUMBER: _ClassVar[int]
    HINT_FIELD_NUMBER: _ClassVar[int]
    TRACE_FIELD_NUMBER: _ClassVar[int]
    hello: HelloRequest
    open_namespace: OpenNamespaceRequest
    list_namespaces: ListNamespacesRequest
    lookup: LookupRequest
    put: PutRequest
    commit: CommitRequest
    get: GetRequest
    verify: VerifyRequest
    remove: RemoveRequest
    pin: PinRequest
    unpin: UnpinRequest
    list: ListRequest
    stat: StatRequest
    node_status: NodeStatusRequest
    remove_namespace: RemoveNamespaceRequest
    flush: FlushRequest
    scrub: ScrubRequest
    recover: RecoverRequest
    release: ReleaseRequest
    drain: DrainRequest
    sweep: SweepRequest
    forget: ForgetRequest
    record: RecordRequest
    follow: FollowRequest
    admit: AdmitRequest
    on_behalf: OnBehalfRequest
    events: EventsRequest
    push_identities: PushIdentitiesRequest
    feed: FeedRequest
    query: QueryRequest
    hint: HintRequest
    trace: bytes
    def __init__(self, hello: _Optional[_Union[HelloRequest, _Mapping]] = ..., open_namespace: _Optional[_Union[OpenNamespaceRequest, _Mapping]] = ..., list_namespaces: _Optional[_Union[ListNamespacesRequest, _Mapping]] = ..., lookup: _Optional[_Union[LookupRequest, _Mapping]] = ..., put: _Optional[_Union[PutRequest, _Mapping]] = ..., commit: _Optional[_Union[CommitRequest, _Mapping]] = ..., get: _Optional[_Union[GetRequest, _Mapping]] = ..., verify: _Optional[_Union[VerifyRequest, _Mapping]] = ..., remove: _Optional[_Union[RemoveRequest, _Mapping]] = ..., pin: _Optional[_Union[PinRequest, _Mapping]] = ..., unpin: _Optional[_Union[UnpinRequest, _Mapping]] = ..., list: _Optional[_Union[ListRequest, _Mapping]] = ..., stat: _Optional[_Union[StatRequest, _Mapping]] = ..., node_status: _Optional[_Union[NodeStatusRequest, _Mapping]] = ..., remove_namespace: _Optional[_Union[RemoveNamespaceRequest, _Mapping]] = ..., flush: _Optional[_Union[FlushRequest, _Mapping]] = ..., scrub: _Optional[_Union[ScrubRequest, _Mapping]] = ..., recover: _Optional[_Union[RecoverRequest, _Mapping]] = ..., release: _Optional[_Union[ReleaseRequest, _Mapping]] = ..., drain: _Optional[_Union[DrainRequest, _Mapping]] = ..., sweep: _Optional[_Union[SweepRequest, _Mapping]] = ..., forget: _Optional[_Union[ForgetRequest, _Mapping]] = ..., record: _Optional[_Union[RecordRequest, _Mapping]] = ..., follow: _Optional[_Union[FollowRequest, _Mapping]] = ..., admit: _Optional[_Union[AdmitRequest, _Mapping]] = ..., on_behalf: _Optional[_Union[OnBehalfRequest, _Mapping]] = ..., events: _Optional[_Union[EventsRequest, _Mapping]] = ..., push_identities: _Optional[_Union[PushIdentitiesRequest, _Mapping]] = ..., feed: _Optional[_Union[FeedRequest, _Mapping]] = ..., query: _Optional[_Union[QueryRequest, _Mapping]] = ..., hint: _Optional[_Union[HintRequest, _Mapping]] = ..., trace: _Optional[bytes] = ...) -> None: ...

class Error(_message.Message):
    __slots__ = ("code", "message", "last")
    CODE_FIELD_NUMBER: _ClassVar[int]
    MESSAGE_FIELD_NUMBER: _ClassVar[int]
    LAST_FIELD_NUMBER: _ClassVar[int]
    code: int
    message: str
    last: bool
    def __init__(self, code: _Optional[int] = ..., message: _Optional[str] = ..., last: bool = ...) -> None: ...

class BulkReply(_message.Message):
    __slots__ = ("hello", "open_namespace", "list_namespaces", "lookup", "put", "commit", "get", "verify", "remove", "pin", "unpin", "list", "stat", "node_status", "error", "remove_namespace", "flush", "scrub", "recover", "drain", "sweep", "forget", "record", "follow", "admit", "events", "push_identities", "feed", "query", "hint")
    HELLO_FIELD_NUMBER: _ClassVar[int]
    OPEN_NAMESPACE_FIELD_NUMBER: _ClassVar[int]
    LIST_NAMESPACES_FIELD_NUMBER: _ClassVar[int]
    LOOKUP_FIELD_NUMBER: _ClassVar[int]
    PUT_FIELD_NUMBER: _ClassVar[int]
    COMMIT_FIELD_NUMBER: _ClassVar[int]
    GET_FIELD_NUMBER: _ClassVar[int]
    VERIFY_FIELD_NUMBER: _ClassVar[int]
    REMOVE_FIELD_NUMBER: _ClassVar[int]
    PIN_FIELD_NUMBER: _ClassVar[int]
    UNPIN_FIELD_NUMBER: _ClassVar[int]
    LIST_FIELD_NUMBER: _ClassVar[int]
    STAT_FIELD_NUMBER: _ClassVar[int]
    NODE_STATUS_FIELD_NUMBER: _ClassVar[int]
    ERROR_FIELD_NUMBER: _ClassVar[int]
    REMOVE_NAMESPACE_FIELD_NUMBER: _ClassVar[int]
    FLUSH_FIELD_NUMBER: _ClassVar[int]
    SCRUB_FIELD_NUMBER: _ClassVar[int]
    RECOVER_FIELD_NUMBER: _ClassVar[int]
    DRAIN_FIELD_NUMBER: _ClassVar[int]
    SWEEP_FIELD_NUMBER: _ClassVar[int]
    FORGET_FIELD_NUMBER: _ClassVar[int]
    RECORD_FIELD_NUMBER: _ClassVar[int]
    FOLLOW_FIELD_NUMBER: _ClassVar[int]
    ADMIT_FIELD_NUMBER: _ClassVar[int]
    EVENTS_FIELD_NUMBER: _ClassVar[int]
    PUSH_IDENTITIES_FIELD_NUMBER: _ClassVar[int]
    FEED_FIELD_NUMBER: _ClassVar[int]
    QUERY_FIELD_NUMBER: _ClassVar[int]
    HINT_FIELD_NUMBER: _ClassVar[int]
    hello: HelloReply
    open_namespace: OpenNamespaceReply
    list_namespaces: ListNamespacesReply
    lookup: LookupReply
    put: PutReply
    commit: CommitReply
    get: GetReply
    verify: VerifyReply
    remove: RemoveReply
    pin: PinReply
    unpin: UnpinReply
    list: ListReply
    stat: StatReply
    node_status: NodeStatusReply
    error: Error
    remove_namespace: RemoveNamespaceReply
    flush: FlushReply
    scrub: ScrubReply
    recover: RecoverReply
    drain: DrainReply
    sweep: SweepReply
    forget: ForgetReply
    record: RecordReply
    follow: View
    admit: AdmitReply
    events: EventsReply
    push_identities: PushIdentitiesReply
    feed: FeedReply
    query: QueryReply
    hint: HintReply
    def __init__(self, hello: _Optional[_Union[HelloReply, _Mapping]] = ..., open_namespace: _Optional[_Union[OpenNamespaceReply, _Mapping]] = ..., list_namespaces: _Optional[_Union[ListNamespacesReply, _Mapping]] = ..., lookup: _Optional[_Union[LookupReply, _Mapping]] = ..., put: _Optional[_Union[PutReply, _Mapping]] = ..., commit: _Optional[_Union[CommitReply, _Mapping]] = ..., get: _Optional[_Union[GetReply, _Mapping]] = ..., verify: _Optional[_Union[VerifyReply, _Mapping]] = ..., remove: _Optional[_Union[RemoveReply, _Mapping]] = ..., pin: _Optional[_Union[PinReply, _Mapping]] = ..., unpin: _Optional[_Union[UnpinReply, _Mapping]] = ..., list: _Optional[_Union[ListReply, _Mapping]] = ..., stat: _Optional[_Union[StatReply, _Mapping]] = ..., node_status: _Optional[_Union[NodeStatusReply, _Mapping]] = ..., error: _Optional[_Union[Error, _Mapping]] = ..., remove_namespace: _Optional[_Union[RemoveNamespaceReply, _Mapping]] = ..., flush: _Optional[_Union[FlushReply, _Mapping]] = ..., scrub: _Optional[_Union[ScrubReply, _Mapping]] = ..., recover: _Optional[_Union[RecoverReply, _Mapping]] = ..., drain: _Optional[_Union[DrainReply, _Mapping]] = ..., sweep: _Optional[_Union[SweepReply, _Mapping]] = ..., forget: _Optional[_Union[ForgetReply, _Mapping]] = ..., record: _Optional[_Union[RecordReply, _Mapping]] = ..., follow: _Optional[_Union[View, _Mapping]] = ..., admit: _Optional[_Union[AdmitReply, _Mapping]] = ..., events: _Optional[_Union[EventsReply, _Mapping]] = ..., push_identities: _Optional[_Union[PushIdentitiesReply, _Mapping]] = ..., feed: _Optional[_Union[FeedReply, _Mapping]] = ..., query: _Optional[_Union[QueryReply, _Mapping]] = ..., hint: _Optional[_Union[HintReply, _Mapping]] = ...) -> None: ...
