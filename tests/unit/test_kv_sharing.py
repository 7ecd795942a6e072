"""Why two models share keys and values, or do not."""

from __future__ import annotations

from typing import Any

import pytest
from msgspec import structs

from sie_stream.kv_sharing import SENTENCES, KvSide, Place, kv_sharing
from sie_stream.trunks import Trunk, adapted, own_bytes, trunk_of

HERE, THERE = Place("w0", "cpu:0"), Place("w1", "cpu:0")
PARTS: dict[str, Any] = {
    "weights": "sha256:w",
    "network": b'{"heads":3}',
    "rope": b"{}",
    "precision": "float32, dense, fast",
    "layout": "16 tokens",
}


def trunk(**changes: Any) -> Trunk:
    return trunk_of(**(PARTS | changes))


def side(model: str, **changes: Any) -> KvSide:
    plain = KvSide(model, "torch", {"kind": "text_generation"}, "sha256:files", "sha256:tokens")
    return structs.replace(plain, **changes)


def test_equal_trunks_in_one_engine_share() -> None:
    first = side("chat", trunks=((HERE, trunk()), (THERE, trunk())))
    second = side("embedder", weights="sha256:other files", trunks=((THERE, trunk()),))
    found = kv_sharing(first, second)
    assert (found.verdict, found.places, found.differences) == ("shared", ("w1/cpu:0",), ())
    assert found.trunk == trunk().digest
    assert found.sentence == "chat and embedder share keys, values and weights of their trunk on w1/cpu:0."


@pytest.mark.parametrize(
    ("part", "value"),
    [
        ("weights", "sha256:v"),
        ("network", b"{}"),
        ("rope", b'{"rope_theta":5}'),
        ("precision", "bfloat16, dense, fast"),
        ("layout", "32 tokens"),
    ],
)
def test_what_differs_in_the_trunks_is_named(part: str, value: object) -> None:
    other = trunk(**{part: value})
    found = kv_sharing(side("a", trunks=((HERE, trunk()),)), side("b", trunks=((HERE, other),)))
    assert found.verdict == "refused"
    [difference] = found.differences
    assert (difference.what, difference.sentence) == (part, SENTENCES[part])
    assert (difference.first, difference.second) == (getattr(trunk(), part), getattr(other, part))
    assert trunk().digest != other.digest
    assert found.sentence.endswith(f"because of: {part}.")


@pytest.mark.parametrize(
    ("changes", "what"),
    [
        ({"backend": "vllm"}, "engine"),
        ({"options": {"kind": "embedding"}}, "kind"),
        ({"tokenizer": "sha256:others"}, "tokenizer"),
        ({"tokenizer": ""}, "tokenizer"),
        ({"options": {"kind": "text_generation", "repeatable": "True"}}, "precision"),
        ({"options": {"kind": "text_generation", "precision": "int8"}}, "precision"),
    ],
)
def test_what_the_declarations_rule_out_is_known_before_anything_is_loaded(changes: dict[str, Any], what: str) -> None:
    found = kv_sharing(side("a"), side("b", **changes))
    assert found.verdict == "refused"
    assert [one.what for one in found.differences] == [what]


def test_an_adapter_of_another_engine_is_named() -> None:
    found = kv_sharing(side("a"), side("b", backend="vllm", adapter='{"base":"a"}'))
    assert [one.what for one in found.differences] == ["engine", "adapter"]
    assert found.differences[1].first == "none"


def test_of_an_adapter_that_is_not_loaded_it_is_not_known_whether_it_is_activated() -> None:
    found = kv_sharing(side("a"), side("b", adapter='{"base":"a"}'))
    assert (found.verdict, found.differences) == ("unknown", ())
    assert "only if it is an activated one" in found.sentence


def test_a_plain_adapter_is_refused_and_equal_ones_share() -> None:
    plain, other = adapted(trunk(), "sha256:a"), adapted(trunk(), "sha256:b")
    chat, support = side("chat", trunks=((HERE, trunk()),)), side("support", trunks=((HERE, plain),))
    found = kv_sharing(chat, support)
    assert found.verdict == "refused"
    [difference] = found.differences
    assert (difference.what, difference.first, difference.second) == ("adapter", "none", "sha256:a")
    assert "only an activated one" in difference.sentence
    renewed = kv_sharing(support, side("support", trunks=((HERE, other),)))
    assert [(one.first, one.second) for one in renewed.differences] == [("sha256:a", "sha256:b")]
    again = side("copy", trunks=((HERE, plain),))
    assert kv_sharing(support, again).sentence.startswith("support and copy share keys, values and weights")


def test_activated_adapters_share_with_their_base_and_each_other_up_to_the_invocation() -> None:
    first, second = adapted(trunk(), "sha256:a", [7, 8]), adapted(trunk(), "sha256:b", [7, 8])
    chat = side("chat", trunks=((HERE, trunk()), (THERE, trunk())))
    judge, critic = side("judge", trunks=((HERE, first),)), side("critic", trunks=((HERE, second),))
    found = kv_sharing(chat, judge)
    assert (found.verdict, found.places, found.trunk) == ("shared", ("w0/cpu:0",), trunk().digest)
    assert found.sentence == (
        "chat and judge share keys and values of the tokens before an invocation of judge, and the weights of their "
        "trunk, on w0/cpu:0."
    )
    assert "before an invocation of judge or critic" in kv_sharing(judge, critic).sentence
    plain = side("plain", trunks=((HERE, adapted(trunk(), "sha256:a")),))
    assert [one.what for one in kv_sharing(judge, plain).differences] == ["adapter"]
    foreign = side("foreign", trunks=((HERE, trunk(weights="sha256:v")),))
    assert [one.what for one in kv_sharing(judge, foreign).differences] == ["weights", "adapter"]


def test_the_digest_of_an_adapted_trunk_covers_base_adapter_and_invocation() -> None:
    made = [
        adapted(trunk(), "sha256:a"), adapted(trunk(), "sha256:b"), adapted(trunk(), "sha256:a", [7]),
        adapted(trunk(), "sha256:a", [7, 8]), adapted(trunk(weights="sha256:v"), "sha256:a"),
    ]  # fmt: skip
    assert len({one.digest for one in (trunk(), *made)}) == 6
    assert [one.opening == trunk().digest for one in made] == [False, False, True, True, False]


def test_two_names_of_one_precision_do_not_differ() -> None:
    named = side("b", options={"kind": "text_generation", "precision": "bf16"})
    assert kv_sharing(side("a", options={"kind": "text_generation", "dtype": "bfloat16"}), named).verdict == "unknown"
    assert [one.what for one in kv_sharing(side("a"), named).differences] == ["precision"]


def test_another_tokenizer_over_the_same_trunk_is_refused() -> None:
    loaded = {"trunks": ((HERE, trunk()),)}
    found = kv_sharing(side("a", **loaded), side("b", tokenizer="sha256:others", **loaded))
    assert (found.verdict, [one.what for one in found.differences]) == ("refused", ["tokenizer"])


def test_models_that_never_meet_in_an_engine_are_refused_by_device() -> None:
    found = kv_sharing(side("a", trunks=((HERE, trunk()),)), side("b", trunks=((THERE, trunk()),)))
    assert found.verdict == "refused"
    [difference] = found.differences
    assert (difference.what, difference.first, difference.second) == ("device", "w0/cpu:0", "w1/cpu:0")


def test_before_both_are_loaded_nothing_is_promised() -> None:
    found = kv_sharing(side("a", trunks=((HERE, trunk()),)), side("b"))
    assert (found.verdict, found.differences) == ("unknown", ())
    assert found.sentence.startswith("b is not loaded")
    assert "same weights" in found.sentence
    assert "another head" in kv_sharing(side("a"), side("b", weights="sha256:else")).sentence


def test_a_place_where_the_trunks_are_equal_counts_more_than_one_where_they_are_not() -> None:
    narrow = trunk(layout="32 tokens")
    first = side("a", trunks=((HERE, narrow), (THERE, trunk())))
    second = side("b", trunks=((HERE, trunk()), (THERE, trunk())))
    assert kv_sharing(first, second).places == ("w1/cpu:0",)


def test_parts_that_are_held_already_take_no_memory_again() -> None:
    parts = {"trunk": 70, "head": 20}
    assert own_bytes(100, parts, {}) == 100
    assert own_bytes(100, parts, {"trunk": 70, "other": 5}) == 30
    assert own_bytes(100, parts, parts) == 10
