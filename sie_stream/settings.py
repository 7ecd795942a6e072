"""Settings: read once at start, frozen, every number bounded by a table. edge/env_settings.py reads the environment."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal, get_type_hints

import msgspec
from msgspec import Struct, field

from sie_stream.errors import ConfigError, did_you_mean
from sie_stream.ids import TopicNames
from sie_stream.references import parse_prefixes, place_of
from sie_stream.worker_marks import parse_labels, parse_taints


class Settings(Struct, frozen=True, kw_only=True):
    """Everything that can be set by SIE_STREAM_<NAME>, a settings file, or a flag."""

    bootstrap_servers: str = ""
    """Kafka to use; empty: the embedded broker of `sie-stream up`."""
    topic_prefix: str = "sie."
    state_dir: str = ".sie"
    """Logs, pid files, broker data of `sie-stream up`."""
    models_dir: str = ".models"
    kafka_dir: str = ""
    """Cache of the Kafka jars; empty: ~/.cache/sie-stream."""
    broker_heap_mb: int = 0
    """Heap of the embedded broker; 0: 1024 for that of `up`, 512 for that of a demo."""
    java_home: str = ""
    client_overrides: dict[str, str] = field(default_factory=dict)
    """librdkafka settings passed through to every client (security.protocol, sasl.*, ssl.* ...). Transactional
    producers leave out timeouts and retries: those follow transaction_timeout_ms."""
    replication_factor: int = 1

    requests_partitions: int = 4
    request_bytes_max: int = 256 * 1024
    """Larger requests are rejected (payload_too_large)."""
    reference_prefixes: str = ""
    """Places from which ingress reads inputs that requests name by inputs_ref (url and sha256), separated by commas:
    s3://bucket/inputs,/data/inputs. Whoever may send requests may have every file below them read. Empty: none."""
    reference_bytes_max: int = 8 * 1024 * 1024
    """Largest inputs behind a reference."""
    reference_timeout_ms: int = 5_000
    """For one reading: so long may a partition of requests wait for a reference that hangs. A store that lets
    references_at_once of them hang is left alone for twice as long, and requests fail that name something in it."""
    references_at_once: int = 8
    reference_store: str = ""
    """Where clients put inputs that are too large for a request: one of reference_prefixes, or a folder below one.
    Empty: nowhere."""
    record_bytes_max: int = 1_000_000
    """Largest record a worker may write; a larger result becomes a failed terminal record."""
    deadletter_bytes_max: int = 64 * 1024
    json_depth_max: int = 64
    dedupe_window_ms: int = 600_000
    dedupe_entries_max: int = 2_000_000
    ingress_batch_max: int = 10_000

    heartbeat_ms: int = 500
    worker_lost_after_ms: int = 2_000
    tick_ms: int = 250
    snapshot_every_records: int = 5_000
    fence_timeout_ms: int = 10_000
    load_timeout_ms: int = 120_000
    placement_packing: Literal["spread", "binpack"] = "spread"
    """spread: even over the devices; binpack: as few devices as possible."""
    rebalance_policy: Literal["never", "idle", "always"] = "never"
    """Whether replicas that run well move to better places (a worker came back, an SLA is missed on a kind of device):
    never; idle: only while the workers have little to do; always.
    """

    commit_interval_ms_min: int = 5
    commit_interval_ms_max: int = 50
    transaction_timeout_ms: int = 10_000
    worker_poll_max: int = 2_000
    worker_queue_max: int = 8_192
    """Work items a worker holds admitted but unfinished; partitions pause above it."""
    partition_open_max: int = 2_048
    """Unfinished offsets of one partition."""
    engine_attempts_max: int = 3
    engine_batch_timeout_ms: int = 120_000
    cpu_memory_mb: int = 4_096
    """Declared size of the cpu device of a worker."""
    device_memory_mb: int = 0
    """What models may take of the cpu device at one time: weights, KV pools and workspace. The worker decides which
    models are there, and the others wait in host memory or on the disk. 0: no budget, all models stay where they are
    loaded."""
    host_memory_mb: int = 0
    """With device_memory_mb: host memory for the weights of models, which the worker offers for placement instead of
    cpu_memory_mb; images above it go to the disk. 0: as much as cpu_memory_mb."""
    worker_labels: str = ""
    """Labels of the worker's server, for node_selector: gpu=a100,zone=eu-1."""
    worker_taints: str = ""
    """What keeps models away unless they tolerate it: spot=true:NoSchedule,dedicated=risk:NoExecute."""
    worker_tier: str = ""
    """tier-0 (takes P0 only), tier-1 or tier-2; empty: takes models that declare no tier."""
    engine_threads: int = 1
    engine_memory_limit_mb: int = 0
    """Private memory of one engine process; 0: that of its cpu device and 2 GiB, and no limit for engines of GPUs."""
    engine_cpus: str = ""
    """Processors for engine processes: 0-3,6. Empty: all."""
    engine_realtime_priority: int = 0
    """1 to 99: engines of tier-0 workers run before all ordinary processes. Needs the right to do so."""
    engine_cgroup: str = ""
    """A cgroup v2 folder that this user may write to (systemd: Delegate=memory): every engine gets a group in it, and
    the kernel ends an engine that goes over its memory limit, with all that it started."""
    spare_engines: str = ""
    """Backends, separated by commas, of whose engines a second process waits with its imports done and takes over when
    the first one ends (torch: some seconds less, 250 MB more). Empty: none."""
    trial_engines: str = "onnx,sklearn"
    """Backends, separated by commas, whose versions on trial run in engine processes of their own, beside the ones that
    hold what serves: one that ends its engine ends no other model, and its slow batches keep none waiting. Not for
    backends whose models share weights, KV blocks or a server. Empty: none."""
    kv_tier_mb: int = 0
    """Host memory of each engine process that outlives it: full KV blocks and where requests stand, so that requests
    of an engine that was killed go on instead of being computed again. The oldest is overwritten first: as large as
    the KV pool (kv_mb) or larger. 0: none."""
    sequence_images_mb: int = 0
    """Running requests of decoder models move with their partition at a handover, instead of being waited for: so much
    memory for their images, at each end, and the images travel by TCP. 0: they are waited for."""
    sequence_images_host: str = "127.0.0.1"
    """Address of this worker at which others fetch images: one that they can reach, in a network that only they can
    read (images hold inputs and answers in plain form). The default serves workers of the same server."""
    prestart_engines: str = ""
    """Backends whose engine processes start with the worker, separated by commas: the first model of one need not wait
    for its imports (torch: some seconds, 250 MB). Empty: an engine starts when a model is placed on it."""
    launchable_servers: str = ""
    """Programs that declarations may start on this worker (backends triton, vllm, sglang): absolute paths, separated
    by commas. Empty: none; such models attach to servers that run already."""
    pii_keys: str = ""
    """Folder of the key ring that protects personal data (`sie-stream keys create`); empty: models that ask for
    protection are not loaded, and protected values are not read."""
    offsets_renew_ms: int = 6 * 3600 * 1000
    """Committed offsets of idle partitions are written again this often."""

    @property
    def engine_cpu_numbers(self) -> tuple[int, ...]:
        return parse_cpus(self.engine_cpus)

    @property
    def trial_backends(self) -> frozenset[str]:
        return frozenset(filter(None, (name.strip() for name in self.trial_engines.split(","))))

    @property
    def work_bytes_max(self) -> int:
        """Largest WorkItem: inputs with their token ids, or whatever a worker may write."""
        return max(self.record_bytes_max, 2 * self.request_bytes_max, self.reference_bytes_max + TOKENS_ROOM_BYTES)

    @property
    def reference_places(self) -> tuple[str, ...]:
        return parse_prefixes(self.reference_prefixes)

    @property
    def topics(self) -> TopicNames:
        return TopicNames(self.topic_prefix)


CPUS_MAX = 8_192
TOKENS_ROOM_BYTES = 1024 * 1024
"""For the token ids of a text behind a reference; models read far less."""
DEVICE_MEMORY_MB_MIN = 16
TIERS = ("", "tier-0", "tier-1", "tier-2")
BOUNDS: tuple[tuple[str, int, int], ...] = (
    ("replication_factor", 1, 32),
    ("requests_partitions", 1, 10_000),
    ("request_bytes_max", 1_024, 64 * 1024 * 1024),
    ("reference_bytes_max", 1_024, 48 * 1024 * 1024),
    ("reference_timeout_ms", 100, 30_000),
    ("references_at_once", 1, 256),
    ("record_bytes_max", 1_024, 64 * 1024 * 1024),
    ("deadletter_bytes_max", 0, 900_000),
    ("json_depth_max", 4, 512),
    ("dedupe_window_ms", 0, 7 * 24 * 3600 * 1000),
    ("dedupe_entries_max", 1_000, 100_000_000),
    ("ingress_batch_max", 1, 100_000),
    ("heartbeat_ms", 50, 60_000),
    ("worker_lost_after_ms", 200, 600_000),
    ("tick_ms", 20, 10_000),
    ("snapshot_every_records", 10, 10_000_000),
    ("fence_timeout_ms", 1_000, 120_000),
    ("load_timeout_ms", 1_000, 3_600_000),
    ("commit_interval_ms_min", 0, 1_000),
    ("commit_interval_ms_max", 1, 10_000),
    ("transaction_timeout_ms", 1_500, 900_000),
    ("worker_poll_max", 1, 100_000),
    ("worker_queue_max", 1, 1_000_000),
    ("partition_open_max", 1, 20_000),
    ("engine_attempts_max", 1, 100),
    ("engine_batch_timeout_ms", 100, 3_600_000),
    ("cpu_memory_mb", 16, 16 * 1024 * 1024),
    ("device_memory_mb", 0, 16 * 1024 * 1024),
    ("host_memory_mb", 0, 16 * 1024 * 1024),
    ("engine_threads", 1, 256),
    ("broker_heap_mb", 0, 1024 * 1024),
    ("engine_memory_limit_mb", 0, 16 * 1024 * 1024),
    ("engine_realtime_priority", 0, 99),
    ("kv_tier_mb", 0, 16 * 1024 * 1024),
    ("sequence_images_mb", 0, 16 * 1024 * 1024),
    ("offsets_renew_ms", 1_000, 7 * 24 * 3600 * 1000),
)


def settings_from(values: Mapping[str, object]) -> Settings:
    """Settings from text or typed values, e.g. of the environment.

    Raises ConfigError naming the setting, its value, what is allowed and the nearest spelling.
    """
    known = get_type_hints(Settings)
    for name in values:
        if name not in known:
            raise ConfigError(f"unknown setting {name!r}.{did_you_mean(name, known)}")
    try:
        settings = msgspec.convert(dict(values), Settings, strict=False)
    except msgspec.ValidationError as error:
        raise ConfigError(f"settings: {error}") from error
    check_bounds(settings)
    return settings


def check_bounds(settings: Settings) -> None:
    """Raises ConfigError for the first value outside its bounds or in conflict with another."""
    for name, low, high in BOUNDS:
        value = getattr(settings, name)
        if not low <= value <= high:
            raise ConfigError(f"setting {name} = {value}: allowed {low} to {high}")
    parse_labels(settings.worker_labels)
    parse_taints(settings.worker_taints)
    parse_cpus(settings.engine_cpus)
    parse_prefixes(settings.reference_prefixes)
    if settings.reference_store:
        place_of(settings.reference_store)
    if settings.worker_tier not in TIERS:
        known = ", ".join(filter(None, TIERS))
        raise ConfigError(
            f"setting worker_tier = {settings.worker_tier!r}: {known}, or empty."
            f"{did_you_mean(settings.worker_tier, TIERS)}"
        )
    if settings.commit_interval_ms_min > settings.commit_interval_ms_max:
        raise ConfigError("setting commit_interval_ms_min must not exceed commit_interval_ms_max")
    if settings.host_memory_mb and not settings.device_memory_mb:
        raise ConfigError(
            f"setting host_memory_mb = {settings.host_memory_mb} has no effect without device_memory_mb, which says "
            "what models may take of the device at one time: set both, or cpu_memory_mb alone."
        )
    if 0 < settings.device_memory_mb < DEVICE_MEMORY_MB_MIN:
        raise ConfigError(
            f"setting device_memory_mb = {settings.device_memory_mb}: 0 (no budget), or {DEVICE_MEMORY_MB_MIN} or more"
        )
    if settings.worker_lost_after_ms < 2 * settings.heartbeat_ms:
        raise ConfigError(
            "setting worker_lost_after_ms must be at least twice heartbeat_ms, or live workers are fenced"
        )


def parse_cpus(text: str) -> tuple[int, ...]:
    """Numbers of processors from `0-3,6`, ascending. Raises ConfigError for anything else."""
    found: set[int] = set()
    for part in filter(None, text.replace(" ", "").split(",")):
        first, dash, last = part.partition("-")
        if not first.isdecimal() or (dash and not last.isdecimal()) or (dash and int(last) < int(first)):
            raise ConfigError(f"setting engine_cpus = {text!r}: {part!r} is neither a number nor a range such as 0-3")
        found.update(range(int(first), min(int(last or first), CPUS_MAX) + 1))
    return tuple(sorted(found))
