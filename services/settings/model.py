"""Every setting of Headwater: its type, default and meaning. Sections are the tables of the TOML file."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, SecretStr

from services.settings.units import Duration, DurationOrNone, Size, SizeOrNone

Count = Annotated[int, Field(ge=1)]
Weight = Annotated[float, Field(ge=0, allow_inf_nan=False)]
OptimiserKind = Literal["sgd", "rowwise_adagrad", "adagrad", "adam", "ftrl"]


class Section(BaseModel):
    """A table of the settings file: frozen, and unknown keys are errors."""

    model_config = ConfigDict(frozen=True, extra="forbid")


class DataSettings(Section):
    """Where embedded backends, snapshots and caches keep their files."""

    dir: Path = Path(".headwater")
    shared: Path | None = None
    """Where the embedded message log and online features are, if not in ``dir``: regions of one machine share them."""


class RegionSettings(Section):
    """Processes with a coordination store, parameter servers and APIs of their own, near those whom they serve."""

    name: Annotated[str, Field(pattern=r"^[a-z][a-z0-9-]{0,31}$")] = "home"
    number: Annotated[int, Field(ge=0, le=255)] = 0
    """Of no other region. It leads the number of everyone who writes parameters here, so that no two regions ever give
    the same version to different values. Never changes, and is not used again."""


class SyncSettings(Section):
    """How the parameters of other regions reach this one."""

    upstreams: tuple[str, ...] = ()
    """Addresses of the parameter servers of each region that this one follows. Each is asked for the shards that it
    leads at the time. Empty: this region follows none."""
    writes: str = "auto"
    """The shards that this region writes: ``all``, ``none``, or numbers such as ``0-3,8``. Pushes for another go to the
    region that writes it. ``auto``: all where there are no upstreams, else none."""
    precision: Literal["float32", "float16", "int8"] = "float32"
    """How values travel to this region: exact, in half the bytes, or in a quarter with a scale for each row."""
    optimiser_state: bool = False
    """Whether this region also gets what the optimiser keeps: it must be so where it may have to write in another's
    place."""
    max_bandwidth: SizeOrNone = 0
    """Bytes per second that each link may take. 0: what there is."""
    coalesce: DurationOrNone = 0.005
    """Updates of this long travel together."""
    window: Annotated[int, Field(ge=1, le=256)] = 3
    """Answers that may be on their way to this region at once: more keep a long link busy."""
    max_staleness: Duration = 60.0
    """How long an update may wait for more important ones where a link cannot carry all."""
    priority_share: Annotated[float, Field(gt=0, le=1)] = 0.1
    """The share of recent updates that counts as important and goes first. 1: all alike."""
    reader_wait: DurationOrNone = 0.01
    """Readers come first: while their calls wait longer than this in a server, what comes from other regions is taken
    in smaller pieces, with pauses. 0: it is taken as fast as it comes."""
    max_clock_skew: Duration = 600.0
    """A version further in the future than this is refused: somebody's clock is wrong."""
    max_behind: DurationOrNone = 60.0
    """When this region is longer behind those that it follows, its replies say ``degraded`` and its API is not ready,
    so that a gateway asks another region. What is idle is level, and says so once a second: less than ``5s`` is too
    little. 0: however long."""
    member_timeout: Duration = 3_600.0
    """A region that has been silent for so long no longer keeps deletions from being forgotten; it gets everything anew
    when it returns."""


class LogSettings(Section):
    """The message log."""

    backend: Literal["sqlite", "kafka"] = "sqlite"
    servers: str = "127.0.0.1:9092"
    partitions: Count = 1
    """Bounds how many processors and trainers share the work. One is fastest with one of each: a batch makes a
    training step per partition, whatever its size. Cannot be changed later."""
    retention: Duration = Field(default=7 * 86_400.0, validate_default=True)
    replication: Count = 1


class FeatureSettings(Section):
    """The online feature store and the schema file (the built-in schema if absent)."""

    backend: Literal["sqlite", "redis"] = "sqlite"
    url: SecretStr = SecretStr("redis://127.0.0.1:6379/0")
    schema_file: Path | None = None
    max_claims: Count = 20_000_000
    """How many event ids are remembered at most, whatever their age."""
    offline: bool = True
    """Whether clean events are kept as Parquet below the data folder, for point-in-time training."""


class CoordinationSettings(Section):
    """Membership, shard map, leases."""

    backend: Literal["sqlite", "etcd"] = "sqlite"
    url: str = "http://127.0.0.1:2379"
    lease_ttl: Duration = 5.0


class ApiSettings(Section):
    """The REST server."""

    listen: str = "127.0.0.1:8080"
    advertise: str | None = None
    keys: tuple[SecretStr, ...] = ()
    """Hashed keys, ``scope:sha256-hex`` (made by ``headwater config new-key SCOPE``)."""
    max_body: Size = 4 * 2**20
    max_batch: Count = 1_000
    max_results: Count = 100
    deadline: Duration = 0.25
    max_clock_ahead: Duration = 300.0
    """An event whose timestamp lies further in the future is refused (422)."""
    queue: Count = 20_000
    """Events waiting for the log at most; beyond it, 429."""
    cursor_ttl: Duration = 1_800.0
    max_cursors: Count = 50_000


class ProcessorSettings(Section):
    """From raw events to features and samples."""

    count: Count = 1
    max_batch: Count = 512
    linger: Duration = 0.002
    pace: Duration = 0.04
    """Under load a batch starts at least this long after the one before, so that steps are fewer and larger."""
    dedupe_window: Duration = 7 * 86_400.0
    positive_actions: tuple[str, ...] = ("like", "click", "purchase", "play")
    rating_threshold: float = 4.0
    """A rating of at least this counts as liked."""
    negatives: Count = 24
    """Negatives that each sample carries."""
    recent_items: Count = 30
    seen_items: Count = 2_000


class TrainerSettings(Section):
    """Gradients from samples."""

    count: Count = 1
    """How many trainer processes `headwater up` starts; each needs a partition of its own (log.partitions)."""
    mode: Literal["async", "sync", "backup", "hybrid"] = "async"
    """How several trainers learn together; the same for all of them. `async`: each pushes when it is ready.
    `sync`: all push a step together, which counts as one. `backup`: a step does not wait for the slowest.
    `hybrid`: dense weights are summed between the trainers, embeddings pushed when ready."""
    staleness: Annotated[int, Field(ge=0)] = 64
    """Pushes of other trainers that a shard may have applied between a trainer's pull and its push (async, and
    hybrid's embeddings); beyond it the micro-batch is computed again. 0: none."""
    backup_ratio: Annotated[float, Field(gt=0, le=1)] = 0.9
    """In backup mode, the share of the trainers whose gradients make a step whole, rounded up; later ones are
    dropped."""
    step_wait: Duration = 0.02
    """How long a trainer waits for samples before the others' step goes on without it (sync, backup, hybrid)."""
    host: str = "127.0.0.1"
    """The address of this trainer's machine, under which the other trainers reach it in hybrid mode. What they
    exchange there is neither encrypted nor authenticated."""
    commit_interval: Duration = 1.0
    nice: Annotated[int, Field(ge=0, le=19)] = 5


class ParameterSettings(Section):
    """The parameter servers."""

    servers: Count = 1
    shards: Annotated[int, Field(ge=1, le=65_536)] = 4
    replicas: Count = 1
    """Servers that hold each shard: one leads it, the others follow, and one of them leads when it dies."""
    replication: Literal["async", "quorum", "chain"] = "async"
    """When a push is acknowledged: at once (``async``), once a majority of the replicas holds it (``quorum``; wants
    three or more), once all that are in step do, each passing it on to the next (``chain``)."""
    listen: str = "127.0.0.1:0"
    advertise: str | None = None
    snapshot_interval: Duration = 60.0
    """Between two snapshots of a shard that moves. What happened since the last is in the log, so this decides how long
    a restart takes, not what it loses."""
    snapshots_kept: Count = 2
    fsync_interval: Duration = 0.02
    """Updates of this long reach the disk together. An update that was not on disk is pushed again after a crash."""
    log_size: Size = 256 * 2**20
    """A snapshot is also due once a shard's log since the last one is longer than this, and than that snapshot."""
    log_backlog: Size = 256 * 2**20
    """Updates that wait in memory for the disk at most. Beyond it pushes wait too; where the disk fails, the log is
    given up until there is room for a snapshot, and training goes on from memory."""
    generation_interval: Duration = 30.0
    deadline: Duration = 5.0
    reads: Literal["leader", "any"] = "leader"
    """Whom the api asks for rows: the leader of each shard, or any of its replicas in turn. A replica's rows may lag
    behind; replies say how old they are, and a request with min_freshness is answered by leaders."""
    cached_rows: Annotated[int, Field(ge=0)] = 0
    """Hot rows of each table that the api keeps; servers then send of them only what changed. 0: none."""
    cache_age: DurationOrNone = 0.0
    """For this long a kept row is used without asking a server. Replies say how old it is, and a request with
    min_freshness asks. 0: it is always asked for."""
    change_stream: Count = 262_144
    """Rows a shard's change stream remembers; a reader further behind gets a full scan."""


class RpcSettings(Section):
    """Calls between our own processes: who may make them, and who can read them on their way."""

    keys: Path | None = None
    """Folder with the keys of this deployment (``headwater keys create FOLDER``). With it calls are encrypted and
    both ends prove who they are; without it they travel in the clear, and only loopback addresses are allowed."""
    create_keys: bool = False
    """Whether the first process that does not find the folder makes it: for processes that share a volume."""
    insecure: bool = False
    """Allow addresses that others can reach without keys. Whoever reaches them can read and change parameters."""


class LinkSettings(Section):
    """An emulated link: who connects to where it listens reaches its target, later and slower."""

    name: Annotated[str, Field(pattern=r"^[a-z][a-z0-9_-]{0,31}$")]
    target: str
    listen: str = "127.0.0.1:0"
    conditions: str = ""
    """Such as ``delay=80ms,rate=100mbit,jitter=5ms``, for each direction by itself. Empty: no delay, no limit."""
    back: str | None = None
    """Conditions of what the target sends, where they are not the same."""


class WanSettings(Section):
    """Emulated wide-area links (``headwater service link``), for trials and tests on one machine."""

    links: tuple[LinkSettings, ...] = ()
    """Tables ``[[wan.links]]`` with name, target and listen (HOST:PORT), conditions such as
    ``delay=80ms,rate=100mbit,jitter=5ms``, and back where the other direction differs."""
    control: str = "127.0.0.1:0"
    """Where the process of the links listens for ``headwater link``."""
    advertise: str | None = None


class FreshnessSettings(Section):
    """Measuring how soon what happens is visible (``headwater freshness``)."""

    regions: tuple[str, ...] = ()
    """Regions to watch beside home, each as ``eu=http://HOST:PORT``. Those that run on this machine are found."""


class FederationSettings(Section):
    """Federated rounds with real devices: servers over a shared store, and edges near the clients."""

    role: Literal["server", "scheduler", "edge"] = "server"
    """``server`` serves devices and sums what they send, ``scheduler`` creates and watches jobs alone, ``edge`` serves
    the devices of its region for one job of its parent."""
    listen: str = "127.0.0.1:8090"
    advertise: str | None = None
    store: SecretStr = SecretStr("")
    """What all servers share: ``sqlite:FOLDER`` on one machine, ``redis://HOST:PORT/DB`` for several. Empty: SQLite in
    the data folder. An edge has a store of its own."""
    keys: tuple[SecretStr, ...] = ()
    """Hashed keys of operators, ``scope:sha256-hex`` (made by ``headwater config new-key SCOPE``): ``read`` lists,
    ``admin`` makes, stops and resumes jobs and enrols clients."""
    tokens: bool = False
    """Whether a device needs a token that its job has signed (``headwater fl token``)."""
    certificate: Path | None = None
    """TLS: the server's certificate with its chain (PEM)."""
    certificate_key: Path | None = None
    create_certificate: tuple[str, ...] = ()
    """Names and addresses for which the first process that does not find the certificate's folder makes it, with a
    certificate, its key and ``ca.pem``, the authority that devices know it by: for servers that share a volume."""
    client_ca: Path | None = None
    """TLS: only clients with a certificate of this authority may connect, and the certificate's name is their id."""
    max_connections: Count = 1_024
    """Open connections; beyond them new ones are closed at once."""
    header_timeout: Duration = 10.0
    """A connection that has not sent a whole request head by then is closed."""
    body_timeout: Duration = 60.0
    """A body that has not arrived whole by then is refused. Long uploads travel in parts, each with this time."""
    max_body: Size = 64 * 2**20
    """A request's body may be this long. A job's updates may be longer: they travel in parts."""
    max_waiting: Count = 10_000
    """Requests that wait for the store at most; beyond it, 429."""
    threads: Annotated[int, Field(ge=1, le=64)] = 8
    """Bodies that are checked and stored at once."""
    heartbeat: Duration = 2.0
    """How often a server says that it lives. One that has been silent for five of them is no longer listed."""
    parent: str = ""
    """An edge's parent, as ``https://HOST:PORT``."""
    parent_ca: Path | None = None
    """An edge's authority for its parent's certificate, where it is not one that the system knows."""
    token_file: Path | None = None
    """An edge's token (``headwater fl token JOB EDGE --edge``)."""
    job: str = ""
    """An edge's job."""
    edge_wait: Duration = 1.0
    """How long an edge gathers uploads before it hands their sum on, unless all whom it admitted have sent theirs."""


class ModelSettings(Section):
    """Shape of the models trained online, and how their parameters are kept and learned: the same for every process.
    A model is declared with these once, by the first trainer; another shape needs another name."""

    name: Annotated[str, Field(pattern=r"^[a-z][a-z0-9_-]{0,31}$")] = "main"
    retrieval_dim: Count = 32
    ranking_dim: Count = 16
    temperature: Annotated[float, Field(gt=0)] = 0.3
    embedding_optimiser: OptimiserKind = "rowwise_adagrad"
    """How a gradient changes an embedding. Beside each row ``sgd`` keeps nothing, ``rowwise_adagrad`` one number,
    ``adagrad`` as many as the row has, ``adam`` and ``ftrl`` twice as many."""
    embedding_rate: Annotated[float, Field(gt=0)] = 0.1
    embedding_l2: Weight = 0.0
    """Weight decay of embeddings, at each push of the row. 0: none."""
    embedding_clip: Weight = 0.0
    """An embedding's gradient longer than this is shortened to it. 0: none is."""
    dense_optimiser: OptimiserKind = "adagrad"
    """How a gradient changes the dense weights."""
    dense_rate: Annotated[float, Field(gt=0)] = 0.02
    dense_l2: Weight = 0.0
    """Weight decay of the dense weights. 0: none."""
    dense_clip: Weight = 0.0
    """A gradient of a chunk of dense weights longer than this is shortened to it. 0: none is."""
    guard: Weight = 1_000.0
    """A push is refused where one of its gradients is longer than this many times what is usual in its table. 0: no
    push is, for its length."""
    admission: Annotated[int, Field(ge=1, le=255)] = 1
    """Pushes that a key needs before it costs an embedding. With 1 each item and user has one from its first event on;
    more keeps what is seen once out of memory, and learns it later."""
    expiry: Duration | None = None
    """Embeddings that no push touched for so long are deleted, and begin anew when they come again. Empty: never."""
    seed: int = 7


class RecommendationSettings(Section):
    """From candidates to the list."""

    candidates: Count = 200
    popular_candidates: Count = 50
    fresh_candidates: Count = 10
    retrieval_weight: Weight = 1.0
    """Weight of the two-tower score in the final score."""
    ranking_weight: Weight = 0.5
    """Weight of the DLRM's logit."""
    popularity_weight: Weight = 2.5
    """Weight of the logarithm of a week's decayed likes."""
    taste_weight: Weight = 8.0
    """Weight of the affinity to the categories of recent likes."""
    explore: Annotated[int, Field(ge=0)] = 1
    """Places of a list at most that go to fresh items which score alone would leave out."""


class Settings(Section):
    """All of it."""

    data: DataSettings = DataSettings()
    region: RegionSettings = RegionSettings()
    sync: SyncSettings = SyncSettings()
    log: LogSettings = LogSettings()
    features: FeatureSettings = FeatureSettings()
    coordination: CoordinationSettings = CoordinationSettings()
    api: ApiSettings = ApiSettings()
    processor: ProcessorSettings = ProcessorSettings()
    trainer: TrainerSettings = TrainerSettings()
    parameters: ParameterSettings = ParameterSettings()
    rpc: RpcSettings = RpcSettings()
    wan: WanSettings = WanSettings()
    freshness: FreshnessSettings = FreshnessSettings()
    federation: FederationSettings = FederationSettings()
    model: ModelSettings = ModelSettings()
    recommendation: RecommendationSettings = RecommendationSettings()
