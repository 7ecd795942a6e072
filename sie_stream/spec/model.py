"""ModelSpec: everything a declaration can say about one model, in its one canonical shape.

The three written forms (see `forms`) all become this. Times are milliseconds, memory is MiB. Objects are frozen and
strict: nothing is guessed from a value of another type.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, Strict, WithJsonSchema
from pydantic_core import PydanticCustomError

NAME_PATTERN = r"^[a-z0-9][a-z0-9._-]{0,99}$"
VERSION_PATTERN = r"^v?[0-9]+(\.[0-9]+){0,2}(-[0-9A-Za-z.-]+)?(\+[0-9A-Za-z.-]+)?$"
TOPIC_PATTERN = r"^[A-Za-z0-9._-]{1,249}$"
SERVERS_PATTERN = r"^[A-Za-z0-9.\[\]:_-]+:[0-9]{1,5}(,[A-Za-z0-9.\[\]:_-]+:[0-9]{1,5})*$"
BACKEND_PATTERN = r"^[a-z][a-z0-9_-]{0,62}$"
DIGEST_PATTERN = r"^sha256:[0-9a-f]{64}$"
_NUMBERS = r"[0-9]{1,9}(\.[0-9]{1,9})*"
_CLAUSE = rf"\s*(>=|<=|==|!=|~=|<|>)\s*{_NUMBERS}\s*"
RANGE_PATTERN = rf"^{_CLAUSE}(,{_CLAUSE})*$"

BUILT_IN_BACKENDS = ("torch", "sklearn", "onnx", "sglang", "vllm", "triton")
SOURCE_SCHEMES = ("file", "package", "s3", "hf", "oci", "https")
REPLICAS_MAX = 64

ServiceType = Literal[
    "text-generation", "embedding", "rerank", "classification", "regression", "scoring", "vision", "audio"
]
Priority = Literal["P0", "P1", "P2"]
Precision = Literal["fp32", "bf16", "fp16", "fp8", "int8", "int4"]
Tag = Literal["high-sla", "batch-job", "a/b-test", "cost-sensitive"]
Tier = Literal["tier-0", "tier-1", "tier-2"]

VersionRange = Annotated[str, Field(pattern=RANGE_PATTERN)]
Milliseconds = Annotated[int, Field(ge=1, le=86_400_000)]
Share = Annotated[float, Field(ge=0, le=1)]
BatchCount = Annotated[int, Field(ge=1, le=65_536)]


class Part(BaseModel):
    """Base of every object in a declaration."""

    model_config = ConfigDict(frozen=True, strict=True, extra="forbid", allow_inf_nan=False, protected_namespaces=())


def _say(default: Any, description: str, *examples: Any, **limits: Any) -> Any:
    """A field with the description and examples that the published schema shows."""
    return Field(default, description=description, examples=list(examples), **limits)


class Source(Part):
    uri: str = _say(
        ...,
        "Where the weights are: a path, file://, package://NAME/FILE, s3://, hf://ORG/REPO@REV, oci://, https://.",
        "models/churn.skops",
        "hf://HuggingFaceTB/SmolLM2-135M-Instruct@main",
        min_length=1,
        max_length=2048,
    )
    digest: str | None = _say(None, "sha256 of the weights; loading anything else fails.", pattern=DIGEST_PATTERN)

    @property
    def kind(self) -> str:
        """One of SOURCE_SCHEMES; a plain path is `file`."""
        scheme, separator, _ = self.uri.partition("://")
        return scheme if separator else "file"


class BackendSpec(Part):
    name: str = _say("torch", "The engine that runs the model: built in, or an installed plug-in.", *BUILT_IN_BACKENDS)
    config: dict[str, Any] = _say({}, "Passed to the backend as it is.", {"threads": 2})


class Requires(Part):
    cuda: VersionRange | None = _say(None, "CUDA driver range.", ">=12.1,<13")
    pytorch: VersionRange | None = _say(None, "PyTorch range.", ">=2.6")
    sglang: VersionRange | None = _say(None, "SGLang range.", ">=0.5,<0.6")
    vllm: VersionRange | None = _say(None, "vLLM range.", ">=0.10")


class Slas(Part):
    p99_latency_ms: Milliseconds | None = _say(None, "99 % of requests must be answered within this time.", 50)
    max_queue_time_ms: Milliseconds | None = _say(None, "Longest time a request may wait for a device.", 20)


class Replicas(Part):
    min: int = _say(1, "Copies always kept; 0 lets an idle model leave the device.", 1, ge=0, le=REPLICAS_MAX)
    max: int = _say(1, "Most copies; also the width of the model's topic.", 4, ge=1, le=REPLICAS_MAX)


class BatchSizes(Part):
    preferred: Annotated[tuple[BatchCount, ...], Strict(False)] = _say((), "Sizes that run best, rising.", [8, 32])
    max: BatchCount = _say(64, "Most requests in one engine call.", 64)


class PagedAttention(Part):
    enabled: bool = _say(True, "Keep the KV cache in pages.", True)
    block_tokens: Literal[8, 16, 32, 64, 128] = _say(16, "Tokens in one page.", 16)


class Lora(Part):
    base: str = _say(..., "Name of the model whose weights the adapter extends.", "llama-8b", pattern=NAME_PATTERN)
    rank: int = _say(..., "Rank of the adapter matrices.", 16, ge=1, le=1024)
    sharing: bool = _say(True, "Share the base's weights with its other adapters.", True)


class Toleration(Part):
    key: str = _say("", "Taint to tolerate; empty with `Exists` tolerates all.", "nvidia.com/gpu")
    operator: Literal["Exists", "Equal"] = _say("Equal", "How `value` is compared.", "Exists")
    value: str = _say("", "Value of the taint.", "spot")
    effect: Literal["", "NoSchedule", "PreferNoSchedule", "NoExecute"] = _say("", "Empty: any.", "NoSchedule")


class Quota(Part):
    requests_per_second: float = _say(..., "Sustained rate; more is shed.", 100, gt=0, le=10_000_000)
    burst: int | None = _say(None, "Requests accepted at once; default: one second's worth.", 200, ge=1)
    per: Literal["model", "tenant"] = _say(
        "model", "Whether all callers share the rate, or each tenant has it.", "tenant"
    )


class Baseline(Part):
    batch_size: BatchCount = _say(..., "Requests in the measured call.", 8)
    latency_ms: float = _say(..., "Latency of that call.", 12.5, gt=0)
    memory_mb: float = _say(..., "Device memory during that call, in MiB.", 640, gt=0)


class KafkaInput(Part):
    topic: str = _say(..., "A topic of your own that ingress reads for this model.", "orders", pattern=TOPIC_PATTERN)
    bootstrap_servers: str | None = _say(
        None, "Another cluster (then at least once with dedupe); default: ours.", "kafka:9092", pattern=SERVERS_PATTERN
    )
    group_id: str | None = _say(
        None, "Consumer group; default: made from the model's name.", "sie-orders", min_length=1
    )
    auto_offset_reset: Literal["earliest", "latest"] = _say("earliest", "Where a new group starts.", "latest")
    value_deserializer: Literal["json", "string", "avro", "request-json", "request-avro"] = _say(
        "json",
        "What a value is. json: the inputs object; string: UTF-8 for the model's single text field; avro: the inputs "
        "record in Confluent framing; request-json, request-avro: a whole InferenceRequest.",
        "json",
        "request-avro",
    )


class KafkaOutput(Part):
    topic: str = _say(..., "A topic of your own that results are copied to.", "scores", pattern=TOPIC_PATTERN)
    bootstrap_servers: str | None = _say(None, "Another cluster; default: ours.", "kafka:9092", pattern=SERVERS_PATTERN)
    value_serializer: Literal["json", "avro"] = _say("json", "How a Result is written.", "avro")


class Gates(Part):
    error_rate_max: Share = _say(0.01, "Largest share of failed answers.", 0.01)
    p99_ratio_max: float = _say(1.2, "Largest p99 relative to the stable version.", 1.2, ge=1, le=100)
    psi_max: float | None = _say(
        None,
        "Largest population stability index of the scores; default: 0.2, only told at a fixed share.",
        0.2,
        gt=0,
        le=10,
    )
    ks_max: Share | None = _say(
        None, "Largest Kolmogorov-Smirnov distance of the scores; default: 0.1, only told at a fixed share.", 0.1
    )
    schema_violations_max: Share = _say(0.0, "Largest share of answers that output_schema refuses.", 0.001)
    cost_ratio_max: float | None = _say(
        None, "Largest engine time for each answer relative to the stable version; default: not looked at.", 1.5, gt=0
    )


class Pin(Part):
    by: Literal["tenant", "header", "field"] = _say(..., "What of a request decides.", "tenant")
    name: str = _say("", "Name of the header, or of the field of the inputs.", "x-canary", max_length=256)
    equals: str = _say(..., "Its value; numbers and booleans as JSON writes them.", "1", max_length=1024)
    to: Literal["new", "stable"] = _say("new", "The version that answers such requests during the rollout.", "new")


class Rollout(Part):
    steps: Annotated[tuple[Annotated[int, Field(ge=1, le=100)], ...], Strict(False)] = _say(
        (10, 20, 50, 100), "Percent of traffic at each step, rising to 100.", [10, 20, 50, 100], min_length=1
    )
    hold_ms: Milliseconds = _say(15_000, "Shortest time at each step.", 15_000)
    samples_min: int = _say(
        200, "Fewest answers before a step is passed; a breach may undo the rollout before.", 200, ge=1
    )
    shadow: bool = _say(False, "Send copies first, never answering from them.", True)
    gates: Gates = _say(Gates(), "What stops a rollout and undoes it.", {"error_rate_max": 0.02})
    pins: Annotated[tuple[Pin, ...], Strict(False)] = _say(
        (), "Requests that go to one version whatever their key.", [{"by": "tenant", "equals": "beta"}], max_length=32
    )


class Probe(Part):
    period_ms: Milliseconds = _say(5_000, "Time between two checks.", 5_000)
    timeout_ms: Milliseconds = _say(1_000, "Time one check may take.", 1_000)
    failures_max: int = _say(3, "Failures in a row that count.", 3, ge=1, le=100)


class Probes(Part):
    startup: Probe | None = _say(None, "Until the replica is ready for the first time.", {"failures_max": 30})
    readiness: Probe | None = _say(None, "Whether it gets work.", {"period_ms": 2_000})
    liveness: Probe | None = _say(None, "Whether it is replaced.", {"period_ms": 10_000})


class Tokenizer(Part):
    path: str = _say(..., "tokenizer.json, relative to the source.", "tokenizer.json", min_length=1)
    digest: str | None = _say(None, "sha256 of the file; models with equal digests share it.", pattern=DIGEST_PATTERN)


def _warmup(value: object) -> object:
    if isinstance(value, str | dict):
        return value
    raise PydanticCustomError("warmup", "a prompt (text) or an inputs object is expected")


Warmup = Annotated[Any, AfterValidator(_warmup), WithJsonSchema({"type": ["string", "object"]})]


class Golden(Part):
    inputs: Warmup = _say(..., "A prompt, or an inputs object.", {"age": 40})
    outputs: dict[str, Any] = _say(..., "What must come out; fields that are not named are free.", {"score": 0.2})
    tolerance: float = _say(0.0, "Largest difference of a number.", 0.001, ge=0)


class Privacy(Part):
    subject: str | None = _say(
        None,
        "The input that names the person whose data it is: its encrypted values have keys of their own and can be "
        "shredded. Default: the session of the request, else its record key, else its id.",
        "customer_id",
        min_length=1,
    )


class ModelSpec(Part):
    name: str = _say(
        ..., "Name of the model; a part of its topic's name.", "churn-eu", "smollm2-135m", pattern=NAME_PATTERN
    )
    version: str = _say(..., "Version of the model, as text.", "1.0.0", "2", pattern=VERSION_PATTERN)
    source: Source = _say(..., "Where the weights come from.", "models/churn.skops")
    min_gpu_memory_mb: int = _say(
        ..., "Device memory one replica needs, in MiB (`cpu` devices too).", 512, ge=1, le=16_777_216
    )
    description: str = _say("", "For people.", "Churn within 30 days, EU customers.", max_length=4096)
    labels: dict[str, str] = _say({}, "For people and selectors.", {"team": "risk"})
    backend: BackendSpec = _say(BackendSpec(), "The engine that runs the model.", "sklearn")
    service_type: ServiceType = _say("scoring", "What the model does.", "text-generation", "classification")
    requires: Requires = _say(Requires(), "Versions the worker must have.", {"cuda": ">=12.1"})
    preferred_precision: Annotated[tuple[Precision, ...], Strict(False)] = _say(
        (), "Precisions the model may run in, best first; empty: as stored.", ["bf16", "int8"]
    )
    supported_context_length: int | None = _say(None, "Longest context in tokens.", 8192, ge=1, le=100_000_000)
    max_seq_len: int | None = _say(None, "Longest prompt plus answer in tokens.", 2048, ge=1, le=100_000_000)
    shared_kv_cache: bool = _say(False, "KV blocks may be shared with models on the same trunk.", True)
    max_concurrent_requests: int | None = _say(None, "Requests in the engine at once.", 32, ge=1, le=65_536)
    batch_sizes: BatchSizes = _say(BatchSizes(), "Batching limits.", {"preferred": [8, 32], "max": 64})
    paged_attention: PagedAttention | None = _say(None, "Paged KV cache.", True)
    lora: Lora | None = _say(None, "This model is an adapter over another one.", {"base": "llama-8b", "rank": 16})
    tensor_parallel_size: int = _say(1, "Devices one replica spans.", 2, ge=1, le=64)
    tensor_parallel_over: Literal["nvlink", "numa", "any"] = _say(
        "nvlink",
        "How near these devices have to be: one NVLink island; one NUMA node, over PCIe where there is no NVLink; any "
        "of one worker. The nearest with room are taken. The cpu devices of a worker always do.",
        "numa",
    )
    tokenizer: Tokenizer | None = _say(None, "The tokenizer that Stage 0 applies.", {"path": "tokenizer.json"})
    input_schema: dict[str, Any] | None = _say(
        None, "What inputs must look like (a part of JSON Schema).", {"properties": {"age": {"type": "integer"}}}
    )
    output_schema: dict[str, Any] | None = _say(
        None, "What outputs must look like.", {"properties": {"score": {"type": "number"}}}
    )
    privacy: Privacy | None = _say(
        None, "Whose data the fields are that input_schema and output_schema mark `pii`.", {"subject": "customer_id"}
    )
    priority_level: Priority = _say("P1", "Lane of requests that name no priority.", "P0")
    deadline_ms: Milliseconds | None = _say(None, "Deadline of requests that name none.", 500)
    slas: Slas = _say(Slas(), "What the model promises.", {"p99_latency_ms": 50, "max_queue_time_ms": 20})
    replicas: Replicas = _say(Replicas(), "How many copies run.", {"min": 1, "max": 4})
    tags: Annotated[tuple[Tag, ...], Strict(False)] = _say((), "What matters to the business.", ["high-sla"])
    node_selector: dict[str, str] = _say({}, "Labels a server must have.", {"gpu": "a100"})
    tolerations: Annotated[tuple[Toleration, ...], Strict(False)] = _say(
        (), "Taints that do not keep the model away.", [{"key": "spot", "operator": "Exists"}]
    )
    tier: Tier | None = _say(None, "Group of devices kept apart; tier-0 takes only P0.", "tier-0")
    quota: Quota | None = _say(None, "Accepted request rate.", {"requests_per_second": 100, "burst": 200})
    pre_warmup: Annotated[tuple[Warmup, ...], Strict(False)] = _say(
        (), "Prompts or inputs run before a replica is ready.", ["Hello"], max_length=100
    )
    baselines: Annotated[tuple[Baseline, ...], Strict(False)] = _say(
        (),
        "Measurements at three or more batch sizes.",
        [{"batch_size": 1, "latency_ms": 2, "memory_mb": 100}],
        max_length=64,
    )
    kafka_input: KafkaInput | None = _say(None, "A topic of your own to read requests from.", {"topic": "orders"})
    kafka_output: KafkaOutput | None = _say(None, "A topic of your own to write results to.", {"topic": "scores"})
    fusion: Literal["auto", "fused", "pooled"] = _say(
        "auto", "Stage 2 in the worker (fused, two hops) or in the shared pool (pooled).", "fused"
    )
    ordering: Literal["none", "key"] = _say("none", "key: results of one key stay in order.", "key")
    golden: Annotated[tuple[Golden, ...], Strict(False)] = _say(
        (),
        "Requests with known answers, checked before a replica is ready.",
        [{"inputs": {"age": 40}, "outputs": {"score": 0.2}, "tolerance": 0.001}],
        max_length=100,
    )
    rollout: Rollout | None = _say(
        None, "A new version takes over in steps; without it, all at once.", {"steps": [10, 20, 50, 100]}
    )
    probes: Probes = _say(Probes(), "Health checks.", {"readiness": {"period_ms": 2_000}})

    @property
    def model_id(self) -> str:
        """The name, as documents call it."""
        return self.name

    @property
    def at_version(self) -> str:
        """`name@version`, as requests write it."""
        return f"{self.name}@{self.version}"
