"""LoRA adapters over the real SmolLM2, as declared, beside transformers over merged weights. Needs `make models`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
import yaml
from transformers import AutoModelForCausalLM, AutoTokenizer

from gpu_worker.backends.decoder.model import DecoderModel
from gpu_worker.backends.torch_backend import TorchBackend
from sie_stream.control import ModelLaunch, PlacementRow
from sie_stream.trunks import own_bytes
from tests.decoders.adapters import RANK, merged, write_adapter
from tests.decoders.families import ask
from tests.libraries.backends.launching import FixedClock, launch
from tests.unit.scheduler.kit import Cluster, joined
from zoo.texts import sentences

SMOLLM2 = Path(__file__).resolve().parents[2] / ".models" / "smollm2-135m-instruct"
PROMPTS = 8
TOKENS = 12
STRENGTH = 0.06

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not (SMOLLM2 / "build.json").exists(), reason="make models has not built SmolLM2"),
]


def declared(adapter: Path) -> ModelLaunch:
    """What a worker is told of a declared adapter: from YAML through the fold to the row of its replica."""
    body = yaml.safe_load((SMOLLM2 / "model-spec.yaml").read_text())
    name = body["model_id"]
    body |= {"model_id": "support", "source": {"uri": str(adapter)}, "lora": {"base": name, "rank": RANK}}
    body["tokenizer"] = {"path": str(SMOLLM2 / "tokenizer.json")}
    body["backend"]["config"] |= {"base": str(SMOLLM2), "kv_mb": 64, "context_tokens": 256}
    for field in ("golden", "preferred_precision", "pre_warmup", "rollout"):
        body.pop(field, None)
    cluster = Cluster()
    cluster.lead()
    cluster.append(joined("w0", "a", memory_mb=4_000))
    cluster.apply(msgspec.json.encode(body))
    [replica] = msgspec.json.decode(msgspec.json.encode(cluster.placement("support")), type=PlacementRow).replicas
    return replica.launch


def loaded(backend: TorchBackend, asked: ModelLaunch) -> DecoderModel:
    model = backend.load(asked)
    assert isinstance(model, DecoderModel)
    return model


def plain(**config: Any) -> ModelLaunch:
    common = {"kind": "text_generation", "threads": 1, "kv_mb": 64, "context_tokens": 256}
    return launch(SMOLLM2, "torch", common | config)


def tokens_of(model: DecoderModel, prompts: list[list[int]]) -> list[list[int]]:
    answers = model.run([ask(str(n), prompt, max_tokens=TOKENS) for n, prompt in enumerate(prompts)])
    assert not [answer.error_message for answer in answers if answer.error_code]
    return [answer.token_ids or [] for answer in answers]


def follows(network: Any, prompt: list[int], tokens: list[int], cache: Any = None) -> bool:
    """Whether every token is the likeliest after those before it; if there are fewer than asked for, then the stop."""
    known = 0 if cache is None else cache.get_seq_length()
    with torch.inference_mode():
        ids = torch.tensor([(prompt + tokens)[known:]])
        logits = network(input_ids=ids, past_key_values=cache, logits_to_keep=len(tokens) + 1).logits[0]
    stop = [network.generation_config.eos_token_id] if len(tokens) < TOKENS else []
    wanted = [*tokens, *stop]
    return logits.argmax(dim=-1).tolist()[: len(wanted)] == wanted


def reference(folder: Path) -> Any:
    return AutoModelForCausalLM.from_pretrained(folder, local_files_only=True, dtype=torch.float32).eval()


def test_a_declared_adapter_answers_as_transformers_over_merged_weights_and_adds_only_its_matrices(
    tmp_path: Path,
) -> None:
    tokenizer: Any = AutoTokenizer.from_pretrained(SMOLLM2, local_files_only=True)
    prompts = [tokenizer.encode(sentence.text)[:20] for sentence in sentences()[:PROMPTS]]
    adapter = write_adapter(tmp_path / "adapter", SMOLLM2, strength=STRENGTH)
    backend = TorchBackend(FixedClock())
    base, model = loaded(backend, plain()), loaded(backend, declared(adapter))
    answers = tokens_of(model, prompts)
    network = reference(merged(tmp_path / "merged", SMOLLM2, adapter))
    assert [follows(network, *pair) for pair in zip(prompts, answers, strict=True)] == [True] * PROMPTS
    assert tokens_of(base, prompts) != answers
    added = own_bytes(model.memory_bytes, model.parts, base.parts)
    assert added < 2 * (adapter / "adapter_model.safetensors").stat().st_size < base.memory_bytes / 50


def test_an_activated_adapter_goes_on_from_blocks_of_its_base_with_the_same_bits(tmp_path: Path) -> None:
    tokenizer: Any = AutoTokenizer.from_pretrained(SMOLLM2, local_files_only=True)
    call = tokenizer.encode("Verdict:", add_special_tokens=False)
    texts = [sentence.text for sentence in sentences()[:4]]
    heads = [tokenizer.encode(f"{text} {texts[3]}")[:40] for text in texts[:3]]
    prompts = [head + call for head in heads]
    adapter = write_adapter(tmp_path / "adapter", SMOLLM2, strength=STRENGTH, alora_invocation_tokens=call)
    over = msgspec.structs.replace(declared(adapter), config=declared(adapter).config | {"repeatable": True})
    alone = tokens_of(loaded(TorchBackend(FixedClock()), over), prompts)
    backend = TorchBackend(FixedClock())
    base, model = loaded(backend, plain(repeatable=True)), loaded(backend, over)
    of_base = tokens_of(base, prompts)
    assert tokens_of(model, prompts) == alone != of_base
    assert model.reused_tokens == sum(len(head) // 16 * 16 for head in heads) > 0
    unmerged, network = reference(SMOLLM2), reference(merged(tmp_path / "merged", SMOLLM2, adapter))
    for head, prompt, tokens in zip(heads, prompts, alone, strict=True):
        with torch.inference_mode():
            cache = unmerged(input_ids=torch.tensor([head]), use_cache=True).past_key_values
        assert follows(network, prompt, tokens, cache)
