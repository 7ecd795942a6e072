"""What a config.json means, without transformers, against transformers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig

from gpu_worker.backends.base import ModelRefused
from gpu_worker.backends.decoder.config import DEFAULTS, FAMILIES, config_of, read_config
from gpu_worker.backends.decoder.shape import shape_of
from gpu_worker.backends.decoder.sizes import SizedTensors, sizes_of
from gpu_worker.backends.tensors import Tensors
from tests.decoders.families import SIZES, ask, load, prompts, save
from tests.libraries.backends.misshapen import each_misshapen

BARE = {key: value for key, value in SIZES.items() if key not in ("num_key_value_heads", "initializer_range")}
BARE |= {"num_attention_heads": 32, "hidden_size": 256}  # what families take for num_key_value_heads divides it
YARN = {"factor": 4.0, "original_max_position_embeddings": 40}


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("changes", [{}, {"use_sliding_window": True, "max_window_layers": 2}])
def test_a_key_that_is_missing_means_what_it_means_to_transformers(family: str, changes: dict[str, Any]) -> None:
    known = AutoConfig.for_model(family, **BARE, **changes)
    ours = config_of({"model_type": family, **BARE, **changes}, "here")
    for key in ("rms_norm_eps", "tie_word_embeddings", "hidden_act", "attention_bias", "mlp_bias"):
        if hasattr(known, key):
            assert getattr(ours, key) == getattr(known, key), key
    shape = shape_of(ours)
    assert shape.kv_heads == known.num_key_value_heads
    assert shape.head_width == (getattr(known, "head_dim", None) or 8)
    for ours_name, theirs in (("score_cap", "attn_logit_softcapping"), ("logit_cap", "final_logit_softcapping")):
        assert getattr(shape, ours_name) == getattr(known, theirs, None)
    assert shape.attention_scale == getattr(known, "query_pre_attn_scalar", shape.head_width) ** -0.5
    assert shape.rope["rope_theta"] == known.rope_parameters["rope_theta"]
    kinds = getattr(known, "layer_types", None) or ["sliding_attention"] * 3
    window = getattr(known, "sliding_window", None)
    assert shape.windows == tuple(window if kind == "sliding_attention" else None for kind in kinds)


def test_every_default_is_of_a_family() -> None:
    assert set(DEFAULTS) <= set(FAMILIES)


@pytest.mark.parametrize("kind", ["type", "rope_type"])
def test_a_file_with_yesterdays_keys_gives_the_same_tokens(kind: str, tmp_path: Path) -> None:
    folder = save(tmp_path, rope_parameters={"rope_type": "yarn", "rope_theta": 500.0, **YARN})
    items = [ask(str(n), prompt, max_tokens=12) for n, prompt in enumerate(prompts([20, 60]))]
    today = [answer.token_ids for answer in load(folder).run(items)]
    file = folder / "config.json"
    content = json.loads(file.read_text())
    del content["rope_parameters"]
    file.write_text(json.dumps({**content, "rope_theta": 500.0, "rope_scaling": {kind: "yarn", **YARN}}))
    assert [answer.token_ids for answer in load(folder).run(items)] == today
    file.write_text(json.dumps({**content, "rope_theta": 500.0}))
    assert [answer.token_ids for answer in load(folder).run(items)] != today


@pytest.mark.parametrize(
    ("changes", "complaint"),
    [
        ({"model_type": "gemma"}, "model_type 'gemma'"),
        ({"hidden_size": None}, r"hidden_size"),
        ({"hidden_act": "gelu"}, "hidden_act 'gelu' is not one of silu"),
        ({"rope_parameters": {"rope_type": "longrope"}}, "rope_type 'longrope' is not one of default, linear"),
        ({"rope_parameters": {"full_attention": {}, "sliding_attention": {}}}, "differ between layers"),
        ({"model_type": "phi3", "rope_scaling": {"type": "su"}}, "rope_type 'su' is not one of default"),
        ({"model_type": "gemma2", "hidden_activation": "relu"}, "hidden_activation 'relu'"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor 0.5"),
        ({"model_type": "qwen2", "use_sliding_window": True, "layer_types": ["full_attention"]}, "1 layer_types for 3"),
    ],
)
def test_a_config_that_is_not_followed_is_refused_by_its_key(
    changes: dict[str, Any], complaint: str, tmp_path: Path
) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama", **BARE, **changes}))
    with pytest.raises(ModelRefused, match=complaint):
        shape_of(read_config(tmp_path))


def test_a_file_that_is_no_config_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelRefused, match="cannot read"):
        read_config(tmp_path)
    (tmp_path / "config.json").write_text("[]")
    with pytest.raises(ModelRefused, match="cannot read"):
        read_config(tmp_path)


@pytest.mark.parametrize("family", ["llama", "llama-tied-biased", "qwen2", "qwen3", "phi3", "gemma2"])
@pytest.mark.parametrize("precision", ["fp32", "int8"])
def test_a_tensor_of_another_size_is_refused_when_the_decoder_is_loaded(
    family: str, precision: str, tmp_path: Path
) -> None:
    folder = save(tmp_path, family, num_hidden_layers=1)
    for name in each_misshapen(folder / "model.safetensors"):
        with pytest.raises(ModelRefused, match=rf"the size of {name} is .* by its config\.json") as refused:
            load(folder, precision=precision)
        assert refused.value.code == "weights_unreadable"
    assert load(folder, precision=precision).run([ask("whole again", [5, 9], max_tokens=2)])[0].error_code is None


def test_blocks_of_four_bits_of_another_size_are_refused(tmp_path: Path) -> None:
    shape = shape_of(config_of({"model_type": "llama", **BARE, "num_key_value_heads": 2}, "here"))
    name = "model.layers.0.mlp.up_proj.weight"
    outs, ins = sizes_of(shape)["mlp.up_proj"]
    for rows, groups, fits in ((outs, ins // 32, True), (outs + 1, ins // 32, False), (outs, ins // 32 + 1, False)):
        blocks = torch.zeros((rows, groups, 20), dtype=torch.uint8)
        tensors = SizedTensors(Tensors(tmp_path, {}, {name: lambda blocks=blocks: blocks}), shape)
        if fits:
            assert tensors.blocks(name) is blocks
        else:
            with pytest.raises(ModelRefused, match=f"the size of {name}"):
                tensors.blocks(name)
