"""What a GGUF file says of the sizes of its network, in the keys of a config.json. The same is asked of it as llama.cpp
asks, whose format this is: what it lacks is refused where llama.cpp does, too, and else means what it means there.
"""

from __future__ import annotations

import math
from typing import Any

from gpu_worker.backends.base import ModelRefused
from gpu_worker.backends.gguf_file import GgufFile

WHOLE = {
    "hidden_size": "embedding_length",
    "intermediate_size": "feed_forward_length",
    "num_hidden_layers": "block_count",
    "num_attention_heads": "attention.head_count",
    "num_key_value_heads": "attention.head_count_kv",
    "head_dim": "attention.key_length",
    "max_position_embeddings": "context_length",
    "sliding_window": "attention.sliding_window",
}
FRACTIONS = {
    "rms_norm_eps": "attention.layer_norm_rms_epsilon",
    "rope_theta": "rope.freq_base",
    "attn_logit_softcapping": "attn_logit_softcapping",
    "final_logit_softcapping": "final_logit_softcapping",
}
OPTIONAL = (
    *("num_key_value_heads", "head_dim", "sliding_window"),
    *("rope_theta", "attn_logit_softcapping", "final_logit_softcapping"),
)
TOKENS = "tokenizer.ggml.tokens"
EMBEDDING = "token_embd.weight"


class Metadata:
    """Of one file and the architecture that it names. Everything raises ModelRefused, naming key, value and what is
    allowed.
    """

    def __init__(self, file: GgufFile) -> None:
        self._file = file
        self.architecture = str(file.metadata.get("general.architecture"))

    def get(self, key: str) -> Any:
        return self._file.metadata.get(f"{self.architecture}.{key}")

    def sizes(self) -> dict[str, Any]:
        """What WHOLE and FRACTIONS name, and how many tokens there are."""
        found = {name: self.whole(key) for name, key in WHOLE.items() if self._there(name, key)}
        found |= {name: self.fraction(key) for name, key in FRACTIONS.items() if self._there(name, key)}
        heads, width = found["num_attention_heads"], found["hidden_size"]
        found.setdefault("num_key_value_heads", heads)
        if "head_dim" not in found:
            if width % heads:
                raise self.refused(WHOLE["num_attention_heads"], heads, f"a divisor of the embedding_length, {width}")
            found["head_dim"] = width // heads
        for key in ("attention.value_length", "rope.dimension_count"):
            told = self.get(key)
            if told is not None and told != found["head_dim"]:
                raise self.refused(key, told, f"the width of a head, {found['head_dim']}: others are not followed")
        return found | {"vocab_size": self._vocabulary()}

    def whole(self, key: str) -> int:
        value = self.get(key)
        if type(value) is not int or value < 1:
            raise self.refused(key, value, "a whole number >= 1")
        return value

    def fraction(self, key: str) -> float:
        """GGUF keeps float32; the shortest decimal that means the same is what the model was trained with."""
        value = self.get(key)
        if type(value) not in (int, float) or not math.isfinite(value) or value <= 0:
            raise self.refused(key, value, "a finite number > 0")
        return float(f"{value:.7g}")

    def stop_tokens(self) -> frozenset[int]:
        """End of the text, and of a turn where the file tells it."""
        found: set[int] = set()
        for name in ("eos", "eot"):
            key = f"tokenizer.ggml.{name}_token_id"
            token = self._file.metadata.get(key)
            if token is None:
                continue
            if type(token) is not int or token < 0:
                raise refused(key, token, "a token id, a whole number >= 0")
            found.add(token)
        return frozenset(found)

    def refused(self, key: str, value: object, allowed: str) -> ModelRefused:
        key = f"{self.architecture}.{key}"
        return refused(key, value if key in self._file.metadata else "missing", allowed)

    def _there(self, name: str, key: str) -> bool:
        """A list, one value for each layer, is there, too: it is refused as a value."""
        if f"{self.architecture}.{key}" in self._file.metadata:
            return True
        if name not in OPTIONAL:
            raise self.refused(key, None, "a number: the file is of no use without it. Fetch or convert it again")
        return False

    def _vocabulary(self) -> int:
        """Rows of the embedding, one for each token of the tokenizer."""
        entry = self._file.entries.get(EMBEDDING)
        if entry is None or len(entry.shape) != 2:
            shape = "missing" if entry is None else f"of sizes {entry.shape}"
            raise refused(f"tensor {EMBEDDING}", shape, "a matrix with a row for each token")
        tokens = self._file.lengths.get(TOKENS, entry.shape[0])
        if tokens != entry.shape[0]:
            what = f"{tokens} tokens"
            raise refused(TOKENS, what, f"as many as {EMBEDDING} has rows, {entry.shape[0]}")
        return entry.shape[0]


def refused(key: str, value: object, allowed: str) -> ModelRefused:
    told = "a list" if value is None else value if isinstance(value, str) else repr(value)
    return ModelRefused("weights_unreadable", f"GGUF metadata: {key} is {told}; it must be {allowed}.")
