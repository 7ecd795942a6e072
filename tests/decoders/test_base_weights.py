"""Whose weights lie under an adapter: results say it, replay demands it, and other ones share no keys and values."""

from __future__ import annotations

from pathlib import Path
from typing import Any, cast

import pytest
from safetensors.torch import load_file, save_file

from gpu_worker.backends.base import ModelRefused
from gpu_worker.backends.torch_backend import TorchBackend
from sie_stream.adapter_digests import own_and_base, same_weights
from sie_stream.replay.versions import Declared, VersionBook
from tests.decoders.adapters import write_adapter
from tests.decoders.families import prompts, save, with_tokenizer
from tests.decoders.test_adapters import CALL, answer, engine
from tests.libraries.backends.launching import FixedClock, launch


@pytest.mark.parametrize("invocation", [None, CALL])
def test_a_base_of_the_same_place_with_other_weights_misses_and_is_not_taken_for_what_answered(
    invocation: list[int] | None, tmp_path: Path
) -> None:
    folder = with_tokenizer(save(tmp_path / "base", eos_token_id=None))
    adapter = write_adapter(tmp_path / "adapter", folder, alora_invocation_tokens=invocation)
    prompt = prompts([40])[0]
    load = engine()
    first = load(adapter, folder)
    before = answer(first, prompt)
    declared = launch(adapter, "torch", {"kind": "text_generation", "kv_mb": 4, "base": str(folder)}, "")
    book = VersionBook([Declared(0, 0, declared, cast("Any", None))])
    tensors = load_file(folder / "model.safetensors")
    changed = {name: tensor.flip(0).contiguous() for name, tensor in tensors.items()}
    save_file(changed, folder / "model.safetensors", metadata={"format": "pt"})
    second = load(adapter, folder)
    assert answer(second, prompt) == answer(engine()(adapter, folder), prompt) != before
    assert second.reused_tokens == 0
    assert own_and_base(second.weights_digest)[0] == own_and_base(first.weights_digest)[0]
    assert not same_weights(second.weights_digest, first.weights_digest)
    then, now = (book.as_it_was(declared.model, declared.version, one.weights_digest, 1) for one in (first, second))
    assert isinstance(then, Declared)
    assert isinstance(now, Declared)
    assert TorchBackend(FixedClock()).load(now.launch).weights_digest == second.weights_digest
    with pytest.raises(ModelRefused, match=f"{folder} are not the declared ones"):
        TorchBackend(FixedClock()).load(then.launch)
