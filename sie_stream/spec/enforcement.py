"""Which fields of a declaration some code acts on today. `describe` shows the others as "not enforced yet"."""

from __future__ import annotations

from sie_stream.backend_facts import PRECISIONS_OF_KIND
from sie_stream.spec.model import ModelSpec

# Add a field here in the change that makes it count.
ENFORCED = frozenset(
    {
        "name", "version", "source", "backend", "min_gpu_memory_mb", "batch_sizes", "tokenizer", "input_schema",
        "output_schema", "service_type", "priority_level", "deadline_ms", "replicas", "quota", "pre_warmup",
        "kafka_input", "kafka_output", "fusion", "ordering", "requires", "node_selector", "tolerations", "tier", "tags",
        "tensor_parallel_size", "tensor_parallel_over", "rollout", "golden", "slas", "baselines",
        "privacy",
    }
)  # fmt: skip
# For people; nothing to enforce.
INFORMATIVE = frozenset({"description", "labels"})


def not_enforced(spec: ModelSpec) -> list[str]:
    """Fields that the declaration sets (to something else than the default) and that nothing acts on, in spec order."""
    return [
        name
        for name, info in ModelSpec.model_fields.items()
        if name not in ENFORCED
        and not (name == "preferred_precision" and spec.backend.name in PRECISIONS_OF_KIND)
        and not (name == "lora" and spec.backend.name == "torch")  # the served ones are told of it by backend.config
        and name not in INFORMATIVE
        and getattr(spec, name) != info.get_default(call_default_factory=True)
    ]
