"""An adapter that names a declared model as its base: what the fold makes of it, and who sees which base it was."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from msgspec import Raw

from scheduler.adapter_bases import Following
from scheduler.launches import accept
from scheduler.state import from_bytes, to_bytes
from sie_stream.commands import StartRollout
from sie_stream.control import ApplyModel, Decision, DeleteModel, RecordDecision
from sie_stream.ids import TopicNames
from tests.unit.scheduler.kit import Cluster, joined, spec_json

TEXT = {"service_type": "text-generation", "input_schema": None}
ONE, TWO, OTHER = (f"sha256:{digit * 64}" for digit in "123")
ROLLOUT = {"steps": [10, 100]}


def chat(version: str = "1.0.0", digest: str | None = ONE, name: str = "chat", **fields: Any) -> bytes:
    return spec_json(
        name,
        version,
        **TEXT,
        **{
            "source": {"uri": f"file:///models/{name}-{version}", "digest": digest},
            "backend": {"name": "torch", "config": {"kind": "text_generation"}},
            **fields,
        },
    )


def support(base: str = "model:chat", lora: str = "chat", name: str = "support", **config: Any) -> bytes:
    return spec_json(
        name,
        **TEXT,
        lora={"base": lora, "rank": 16},
        backend={"name": "torch", "config": {"kind": "text_generation", "base": base, **config}},
    )


def cluster(*specs: bytes) -> Cluster:
    made = Cluster()
    made.lead()
    made.append(joined("w0", "a"))
    for spec in specs:
        made.apply(spec)
    return made


def last(made: Cluster) -> Decision:
    said = [one.decision for one in made.commands if isinstance(one, RecordDecision)]
    return [one for one in said if one.kind.startswith(("model_", "rollout_"))][-1]


def over(made: Cluster, name: str = "support") -> dict[str, object]:
    config = made.model(name).launch.config
    return {key: config.get(key) for key in ("base", "base_model", "base_digest")}


CHAT_1 = {"base": "/models/chat-1.0.0", "base_model": "chat@1.0.0", "base_digest": ONE}


@pytest.mark.parametrize("base", ["model:chat", "model:chat@1.0.0"])
def test_a_named_base_is_that_models_source_and_digest_and_everybody_sees_which_it_was(base: str) -> None:
    made = cluster(chat(), support(base))
    assert over(made) == CHAT_1
    assert last(made).kind == "model_accepted"
    assert last(made).chosen["base"] == "chat@1.0.0"
    declared = msgspec.json.decode(made.model("support").spec)
    assert declared["backend"]["config"] | CHAT_1 == declared["backend"]["config"], "in the table of models, too"


def test_a_base_without_a_declared_digest_is_taken_with_the_digest_that_the_adapter_gives_or_none() -> None:
    made = cluster(chat(digest=None), support(), support(name="careful", base_digest=OTHER))
    assert over(made) == CHAT_1 | {"base_digest": None}
    assert over(made, "careful") == CHAT_1 | {"base_digest": OTHER}


def test_an_adapter_without_a_tokenizer_has_that_of_its_base() -> None:
    made = cluster(chat(tokenizer={"path": "tokenizer.json"}), support())
    assert made.model("support").launch.tokenizer == "/models/chat-1.0.0/tokenizer.json"
    file = {"uri": "/models/chat.gguf"}
    made = cluster(chat(source=file, tokenizer={"path": "tokenizer.json", "digest": TWO}), support())
    assert made.model("support").launch.tokenizer == "/models/tokenizer.json"
    assert made.model("support").route.tokenizer_digest == TWO
    made = cluster(chat(tokenizer={"path": "/shared/tokenizer.json"}), support())
    assert made.model("support").launch.tokenizer == "/shared/tokenizer.json"


ADAPTER = support(name="chat", lora="root", base="/models/root")


@pytest.mark.parametrize(
    ("there", "base", "said"),
    [
        (chat(), "model:chta", "no model 'chta' is declared. Apply it first; `sie-stream get models` lists what there "
         "is. Did you mean 'model:chat'?"),
        (chat(), "model:chat@1.0.1", "no version '1.0.1' of chat serves or is rolled out. Allowed: model:chat@1.0.0. "
         "Did you mean 'model:chat@1.0.0'?"),
        (chat(), "model:llama", "no model 'llama' is declared. Apply it first; `sie-stream get models` lists what "
         "there is. Allowed: model:chat."),
        (spec_json("caht"), "model:chta", "no model 'chta' is declared. Apply it first; `sie-stream get models` lists "
         "what there is.\n"),
        (spec_json("chat"), "model:chat", "chat is no model of backend torch and kind text_generation: only those take "
         "adapters.\n"),
        (ADAPTER, "model:chat", "chat is an adapter itself, and an adapter over another one is not followed. Did you "
         "mean 'model:root'?"),
    ],
)  # fmt: skip
def test_what_is_no_base_is_rejected_with_what_was_meant(there: bytes, base: str, said: str) -> None:
    made = cluster(there, support(base, lora=base.removeprefix("model:").partition("@")[0]))
    assert last(made).kind == "model_rejected"
    assert last(made).subject == "support"
    assert f"backend.config.base: '{base}': {said}" in f"{last(made).reason}\n"
    assert "support" not in made.machine.state.models


def test_another_digest_than_the_base_is_declared_with_is_rejected() -> None:
    made = cluster(chat(), support(base_digest=OTHER))
    assert last(made).kind == "model_rejected"
    assert f"backend.config.base_digest: chat@1.0.0 is declared with the digest {ONE}" in last(made).reason
    assert over(cluster(chat(), support(base_digest=ONE))) == CHAT_1


def test_a_model_that_is_being_deleted_is_no_base_for_anything_new() -> None:
    made = cluster(chat(), support())
    made.append(DeleteModel("chat"))
    made.apply(support(name="late"))
    assert last(made).kind == "model_rejected"
    assert over(made) == CHAT_1, "what was accepted goes on"


def test_an_adapter_stays_on_its_base_until_it_is_applied_again() -> None:
    made = cluster(chat(), support(), support())
    assert last(made).kind == "model_unchanged"
    made.apply(chat("2.0.0", TWO))
    assert (over(made), made.model("support").generation) == (CHAT_1, 1)
    made.apply(support())
    assert last(made).chosen["base"] == "chat@2.0.0"
    assert over(made)["base_digest"] == TWO
    assert made.model("support").generation == 2
    old = made.machine.state
    assert from_bytes(to_bytes(old)) == old


def test_an_adapter_that_names_a_version_may_be_applied_again_after_the_base_went_on() -> None:
    """Else a folder of declarations could not be applied twice. Nothing new gets that version any more."""
    exact = support("model:chat@1.0.0")
    made = cluster(chat(tokenizer={"path": "tokenizer.json"}), exact)
    made.apply(chat("2.0.0", TWO))
    made.apply(exact)
    assert last(made).kind == "model_unchanged"
    made.apply(support("model:chat@1.0.0", lora="chat", threads=2))
    assert (last(made).kind, over(made)) == ("model_accepted", CHAT_1)
    assert made.model("support").launch.tokenizer == "/models/chat-1.0.0/tokenizer.json"
    for other in (support("model:chat@1.0.0", name="late"), support("model:chat@1.0.1")):
        made.apply(other)
        assert last(made).kind == "model_rejected"
    made.apply(chat(digest=OTHER))
    made.apply(exact)
    assert over(made)["base_digest"] == OTHER, "declared anew, it is that one"
    made.append(DeleteModel("chat"))
    made.apply(exact)
    assert last(made).kind == "model_rejected"


def test_a_new_version_of_a_base_says_which_adapters_stay_on_the_one_before() -> None:
    made = cluster(chat(), support())
    said = "those that name no version follow when they are applied again: support (over chat@1.0.0)."
    made.apply(chat(replicas={"max": 2}))
    assert said not in last(made).reason, "the same weights"
    made.apply(chat("2.0.0", TWO))
    assert said in last(made).reason
    made.apply(support())
    made.apply(chat("2.0.0", TWO, replicas={"max": 2}))
    assert said not in last(made).reason
    made.apply(chat("2.0.0", OTHER))
    assert "applied again: support (over chat@2.0.0)." in last(made).reason


def test_whoever_deletes_a_base_is_told_which_adapters_go_on_over_its_weights() -> None:
    made = cluster(chat(), spec_json("other"), support(), *(support(name=f"more-{number}") for number in range(9)))
    made.append(DeleteModel("other"))
    assert "Adapters" not in last(made).reason
    made.append(DeleteModel("chat"))
    assert last(made).kind == "model_deleting"
    assert (
        "Adapters go on over its weights, so leave these where they are: support (in /models/chat-1.0.0), more-0"
        in (last(made).reason)
    )
    assert last(made).reason.endswith(" and 2 more.")


def test_an_option_of_the_same_name_of_another_backend_makes_no_adapter() -> None:
    option = {"name": "sklearn", "config": {"base_model": "chat@1.0.0"}}
    made = cluster(chat(), spec_json("other", backend=option))
    assert "base" not in last(made).chosen
    made.append(DeleteModel("chat"))
    assert (last(made).kind, "Adapters" in last(made).reason) == ("model_deleting", False)


def test_a_version_that_is_rolled_out_is_a_base_by_its_version_only() -> None:
    made = cluster(chat(rollout=ROLLOUT))
    made.make_ready("chat")
    made.apply(chat("2.0.0", TWO, rollout=ROLLOUT))
    assert made.model("chat").rollouts
    made.apply(support())
    made.apply(support("model:chat@2.0.0", name="early"))
    assert over(made) == CHAT_1
    assert over(made, "early")["base_model"] == "chat@2.0.0"


def test_a_rollout_of_an_adapter_takes_the_base_of_its_start_and_says_which() -> None:
    made = cluster(chat(), support())
    made.make_ready("support")
    made.apply(chat("2.0.0", TWO))
    body = msgspec.json.decode(support()) | {"version": "1.1.0"}
    made.append(StartRollout(Raw(msgspec.json.encode(body)), "canary"))
    assert last(made).kind == "rollout_started", last(made)
    assert last(made).chosen["base"] == "chat@2.0.0"
    assert over(made) == CHAT_1
    rolled = made.model("support").rollouts["canary"]
    assert accept(bytes(rolled.spec), TopicNames()).launch.config["base_digest"] == TWO, "and so it is taken over"
    made.append(StartRollout(Raw(support("model:gone", "gone", "support")), "b"))
    assert last(made).kind == "model_rejected"


# ---------------------------------------------------------------- without the fold


def readings(*commands: ApplyModel | StartRollout | DeleteModel) -> list[object]:
    """Versions of the base of the last one."""
    bases = Following()
    found: list[Raw] = []
    for one in commands:
        if isinstance(one, DeleteModel):
            bases.withdrawn(one.model)
        else:
            found = bases.readings(one)
    return [msgspec.json.decode(one)["backend"]["config"].get("base_model") for one in found]


def test_who_reads_the_log_alone_gets_each_base_that_it_may_have_been_the_likeliest_last() -> None:
    one, two, three = (ApplyModel(Raw(chat(f"{number}.0.0"))) for number in (1, 2, 3))
    adapter = ApplyModel(Raw(support()))
    beside = StartRollout(three.spec, "canary")
    assert readings(one, adapter) == ["chat@1.0.0"]
    assert readings(one, two, one, adapter) == ["chat@2.0.0", "chat@1.0.0"]
    assert readings(one, beside, adapter) == ["chat@3.0.0", "chat@1.0.0"]
    assert readings(one, two, ApplyModel(Raw(support("model:chat@1.0.0")))) == ["chat@1.0.0"]
    assert readings(one, DeleteModel("chat"), two, adapter) == ["chat@2.0.0"]


def test_where_the_log_begins_after_its_base_the_adapter_stands_as_it_was_written() -> None:
    assert readings(ApplyModel(Raw(support()))) == [None]


@pytest.mark.parametrize(
    ("before", "base"),
    [
        ([ApplyModel(Raw(chat())), DeleteModel("chat")], "model:chat"),
        ([ApplyModel(Raw(chat()))], "model:chat@1.0.1"),
        ([ApplyModel(Raw(spec_json("chat")))], "model:chat"),
    ],
)
def test_what_the_scheduler_refused_has_no_reading(before: list[ApplyModel | DeleteModel], base: str) -> None:
    """Else it would stand for the declaration that goes on, over a base that nobody finds."""
    assert readings(*before, ApplyModel(Raw(support(base)))) == []
