"""Who gives way in a full pool, in which order, and that it comes back without flapping."""

from __future__ import annotations

from typing import Any

import msgspec
from hypothesis import given
from hypothesis import strategies as st
from msgspec import structs

from scheduler.yielding import (
    PRESSED_BP,
    RELIEVED_BP,
    RESTORE_MS,
    Moved,
    Pool,
    Relief,
    Tenant,
    YieldState,
    relieve,
)
from sie_stream.spec.model import Tag

H100 = Pool("h100", 20, 0, cost=900)
L4 = Pool("l4", 20, 0, cost=70)


def tenant(name: str, tags: tuple[Tag, ...], replicas: int, **more: Any) -> Tenant:
    return structs.replace(Tenant(name, tags, "h100", replicas, 0, 1), **more)


def filled(pools: tuple[Pool, ...], models: list[Tenant]) -> list[Pool]:
    """Pools with what their tenants use."""
    return [
        structs.replace(pool, used=sum(m.replicas * m.units for m in models if m.pool == pool.name)) for pool in pools
    ]


def obey(state: YieldState, models: list[Tenant]) -> list[Tenant]:
    """What the scheduler makes of caps and homes, once everything is where it should be."""
    return [
        structs.replace(
            model,
            pool=state.moved[model.model].now if model.model in state.moved else "h100",
            replicas=min(model.wanted or model.replicas, state.caps.get(model.model, 99)),
        )
        for model in models
    ]


def once(models: list[Tenant], state: YieldState | None = None, at_ms: int = 1_000_000) -> tuple[YieldState, Relief]:
    return relieve(state or YieldState(), at_ms, filled((H100, L4), models), models)


def test_cost_sensitive_moves_before_batch_gives_up() -> None:
    models = [
        tenant("chat", ("high-sla",), 10),
        tenant("embed", ("cost-sensitive",), 2, cheaper=("l4",)),
        tenant("report", ("batch-job",), 6),
    ]
    state, relief = once(models)
    assert [(step.kind, step.model, step.to_pool) for step in relief.steps] == [("move", "embed", "l4")]
    assert state.moved == {"embed": Moved("h100", "l4")}
    assert relief.steps[0].reason == "h100 is at 90 %, above 85 %; l4 costs 70 instead of 900 and has room."
    assert relief.unmet == ()


def test_batch_gives_up_when_nobody_can_move() -> None:
    models = [tenant("chat", ("high-sla",), 12), tenant("report", ("batch-job",), 6)]
    state, relief = once(models)
    assert state.caps == {"report": 4}, "18 of 20 go down to 16: 80 %"
    assert relief.steps[0].reason == "h100 is at 90 %, above 85 %; report goes from 6 to 4."


def test_the_batch_model_with_most_above_its_minimum_gives_up_first() -> None:
    models = [
        tenant("chat", ("high-sla",), 11),
        tenant("a", ("batch-job",), 4, replicas_min=3),
        tenant("b", ("batch-job",), 4, replicas_min=0),
    ]
    state, relief = once(models)
    assert state.caps == {"b": 1}
    assert relief.unmet == ()


def test_a_lacking_high_sla_model_is_served_at_once_and_below_the_threshold() -> None:
    models = [
        tenant("chat", ("high-sla",), 5, units=2, lacking=3),
        tenant("report", ("batch-job",), 6),
    ]
    pools = [structs.replace(H100, used=16)]
    state, relief = relieve(YieldState({}, {}, {"h100": 999_999}), 1_000_000, pools, models)
    assert state.caps == {"report": 4}, "6 units are needed and 4 are free"
    assert "high-sla models lack 2 units on h100" in relief.steps[0].reason


def test_what_nobody_can_give_is_said() -> None:
    models = [tenant("chat", ("high-sla",), 18, lacking=4), tenant("report", ("batch-job",), 2, replicas_min=1)]
    state, relief = once(models)
    assert state.caps == {"report": 1}
    assert len(relief.unmet) == 1
    assert relief.unmet[0].startswith("h100: high-sla models lack 4 units on h100, and 1 can be freed")


def test_a_full_cheaper_pool_takes_nobody() -> None:
    models = [
        tenant("chat", ("high-sla",), 15),
        tenant("embed", ("cost-sensitive",), 3, cheaper=("l4",)),
        tenant("other", (), 15, pool="l4"),
    ]
    state, relief = once(models)
    assert state.moved == {}
    assert len(relief.unmet) == 1


def test_nobody_is_asked_twice_while_it_is_under_way() -> None:
    models = [tenant("chat", ("high-sla",), 12), tenant("report", ("batch-job",), 6)]
    state, _ = once(models)
    for second in range(1, 60):
        state, relief = once(models, state, 1_000_000 + 1000 * second)
        assert relief.steps == (), "the replicas are still there, but on their way out"


def test_back_again_below_70_percent_one_step_at_a_time() -> None:
    state = YieldState({"report": 2}, {"embed": Moved("h100", "l4")}, {"h100": 0})
    models = [
        tenant("chat", ("high-sla",), 7),
        tenant("embed", ("cost-sensitive",), 2, wanted=2),
        tenant("report", ("batch-job",), 2, wanted=4),
    ]
    said: list[tuple[int, str, str, int]] = []
    for second in range(200):
        at_ms = RESTORE_MS + second * 1000
        models = obey(state, models)
        state, relief = once(models, state, at_ms)
        said += [(second, step.kind, step.model, step.replicas) for step in relief.steps]
    assert said == [
        (0, "get_back", "report", 3),
        (30, "get_back", "report", 4),
        (60, "get_back", "report", 4),
        (90, "return", "embed", 2),
    ]
    assert (state.caps, state.moved) == ({}, {})


def test_nothing_comes_back_between_the_thresholds() -> None:
    state = YieldState({"report": 2}, {}, {"h100": 0})
    models = [tenant("chat", ("high-sla",), 13), tenant("report", ("batch-job",), 2, wanted=4)]
    assert once(models, state)[1].steps == ()


# ---------------------------------------------------------------- whatever the cluster looks like

tags = st.sampled_from([("high-sla",), ("batch-job",), ("cost-sensitive",), (), ("high-sla", "batch-job")])
tenants = st.lists(
    st.builds(
        Tenant,
        model=st.sampled_from("abcdefgh"),
        tags=tags,
        pool=st.just("h100"),
        replicas=st.integers(0, 6),
        replicas_min=st.integers(0, 2),
        units=st.integers(1, 4),
        wanted=st.integers(0, 8),
        lacking=st.integers(0, 3),
        cheaper=st.sampled_from([(), ("l4",)]),
    ),
    max_size=8,
    unique_by=lambda tenant: tenant.model,
)


@given(tenants, st.integers(1, 60), st.integers(1, 60))
def test_only_who_may_yield_yields_and_never_below_the_minimum(models: list[Tenant], premium: int, cheap: int) -> None:
    pools = filled((structs.replace(H100, capacity=premium), structs.replace(L4, capacity=cheap)), models)
    by_name = {model.model: model for model in models}
    state, relief = relieve(YieldState(), 1_000_000, pools, models)
    assert relieve(YieldState(), 1_000_000, pools, list(reversed(models))) == (state, relief), "order is no input"
    assert len({step.model for step in relief.steps}) == len(relief.steps)
    for step in relief.steps:
        model = by_name[step.model]
        assert "high-sla" not in model.tags
        if step.kind == "give_up":
            assert "batch-job" in model.tags
            assert model.replicas_min <= step.replicas < model.replicas
        else:
            assert (step.kind, step.to_pool) == ("move", "l4")
            assert "cost-sensitive" in model.tags
    moved = sum(by_name[name].replicas * by_name[name].units for name in state.moved)
    if moved:
        assert moved * 10_000 <= RELIEVED_BP * cheap, "the cheaper pool is not pressed by what moves there"
    assert msgspec.json.decode(msgspec.json.encode(state), type=YieldState) == state


@given(tenants, st.integers(8, 60))
def test_a_steady_cluster_comes_to_rest(models: list[Tenant], capacity: int) -> None:
    models = [structs.replace(model, lacking=0, wanted=max(model.replicas, model.replicas_min)) for model in models]
    pools = (structs.replace(H100, capacity=capacity), structs.replace(L4, capacity=60))
    state, relief = YieldState(), Relief(0, (), ())
    steps: list[int] = []
    for round_ in range(40):
        models = obey(state, models)
        state, relief = relieve(state, 1_000_000 + round_ * RESTORE_MS, filled(pools, models), models)
        steps.append(len(relief.steps))
    assert sum(steps[28:]) == 0, "no step aside is taken back and taken again"
    pressed = [pool for pool in filled(pools, models) if pool.utilisation_bp > PRESSED_BP]
    assert not pressed or relief.unmet
