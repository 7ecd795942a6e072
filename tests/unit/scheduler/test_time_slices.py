"""Who decodes where: one model to a device where that is possible, and nobody is left without one that has work."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec import structs

from scheduler.busy import FREE, engines_on_one
from scheduler.solver.model import Objective
from scheduler.time_slices import Slices, Tenant, share_out

DEVICES = tuple(f"w{number}/cuda:0" for number in range(6))


def tenant(model: str, devices: str, load: float = 0.4, may_rest: bool = True, **more: Any) -> Tenant:
    """`devices`: their digits."""
    return Tenant(model, tuple(DEVICES[int(digit)] for digit in devices), load, may_rest, **more)


def decodes(slices: Slices, one: Tenant) -> set[str]:
    return set(one.devices) - set(slices.resting.get(one.model, ()))


def test_two_models_on_the_same_two_devices_have_one_each() -> None:
    a, b = tenant("a", "01"), tenant("b", "01")
    slices = share_out([a, b], {})
    assert len(decodes(slices, a)) == len(decodes(slices, b)) == 1
    assert decodes(slices, a).isdisjoint(decodes(slices, b))


def test_the_busier_model_has_more_devices() -> None:
    a, b = tenant("a", "0123", 2.4), tenant("b", "0123", 0.6)
    slices = share_out([a, b], {})
    assert len(decodes(slices, a)) == 3
    assert len(decodes(slices, b)) == 1


def test_alone_on_a_device_nobody_rests() -> None:
    slices = share_out([tenant("a", "01"), tenant("b", "23")], {})
    assert (slices.owners, slices.resting, slices.pressed) == ({}, {}, ())


def test_what_cannot_rest_has_its_device_and_the_other_goes_elsewhere() -> None:
    bound, other = tenant("b", "0", may_rest=False), tenant("a", "01", 0.8)
    assert decodes(share_out([bound, other], {}), other) == {DEVICES[1]}


def test_a_model_that_owns_nothing_decodes_where_it_is() -> None:
    a, b = tenant("a", "0", may_rest=False), tenant("b", "1", may_rest=False)
    little, much = tenant("c", "01", 0.4), tenant("c", "01", 0.8)
    assert len(decodes(share_out([a, b, little], {}), little)) == 1
    assert decodes(share_out([a, b, much], {}), much) == set(much.devices)


def test_owners_stay_while_the_difference_is_small() -> None:
    a, b = tenant("a", "01", 0.42), tenant("b", "01", 0.4)
    before = {DEVICES[0]: "b", DEVICES[1]: "a"}
    assert share_out([a, b], before).owners == before


def test_an_owner_of_before_that_left_is_replaced() -> None:
    a, b = tenant("a", "01"), tenant("b", "1")
    assert share_out([a, b], {DEVICES[0]: "gone", DEVICES[1]: "gone"}).owners[DEVICES[1]] == "b"


@pytest.mark.parametrize(("load", "queued", "pressed"), [(0.9, False, True), (0.4, True, True), (0.8, False, False)])
def test_a_model_with_too_much_to_do_uses_its_reserve(load: float, queued: bool, pressed: bool) -> None:
    a, b = tenant("a", "01", load, queued=queued), tenant("b", "01", 0.3)
    slices = share_out([a, b], {})
    assert (slices.pressed == ("a",)) is pressed
    assert (decodes(slices, a) == set(a.devices)) is pressed


def test_it_rests_again_when_it_has_clearly_less_to_do() -> None:
    b = tenant("b", "01", 0.3)
    assert share_out([tenant("a", "01", 0.7, pressed=True), b], {}).pressed == ("a",)
    assert share_out([tenant("a", "01", 0.5, pressed=True), b], {}).pressed == ()


def test_a_model_with_many_devices_still_gets_another() -> None:
    """With five of them one more is less than a quarter more; what counts is what the other has to give."""
    devices = tuple(f"w{number}/cuda:0" for number in range(10))
    busy, idle = Tenant("a", devices, 6.25, True), Tenant("b", devices, 1.0, True)
    before = {device: "b" if number > 4 else "a" for number, device in enumerate(devices)}
    assert list(share_out([busy, idle], before).owners.values()).count("a") == 8


def test_owners_stay_while_both_have_time() -> None:
    a, b = tenant("a", "012345", 1.0), tenant("b", "012345", 0.1)
    before = {device: "a" if number < 2 else "b" for number, device in enumerate(DEVICES)}
    assert share_out([a, b], before).owners == before


def test_a_model_with_too_much_to_do_wakes_no_more_than_it_needs_where_there_is_least_to_do() -> None:
    """Each device that is shared is worth half of one."""
    bound = [tenant("b", "1", 0.7, may_rest=False), tenant("c", "2", 0.1, may_rest=False)]
    others = [*bound, tenant("d", "3", 0.5, may_rest=False), tenant("e", "4", 0.6, may_rest=False)]
    busy = tenant("a", "01234", 1.2)
    first = share_out([busy, *others], {})
    assert decodes(first, busy) == {DEVICES[0], DEVICES[2]}
    pressed = structs.replace(busy, pressed=True)
    assert decodes(share_out([pressed, *others], first.owners, {"a": DEVICES[1:4]}), pressed) == {
        DEVICES[0],
        DEVICES[4],
    }, "the same as before"
    queued = structs.replace(busy, queued=True)
    assert decodes(share_out([queued, *others], first.owners), queued) == set(busy.devices)


def test_a_model_on_its_way_takes_no_device_where_it_has_no_keys() -> None:
    moving, other = tenant("a", "012", may_rest=False), tenant("b", "12", 0.6)
    assert decodes(share_out([moving, other], {}), other) == set(other.devices), "it is squeezed everywhere"
    keyless = structs.replace(moving, keyless=DEVICES[1:3])
    slices = share_out([keyless, other], dict.fromkeys(DEVICES[1:3], "b"))
    assert (slices.owners, slices.pressed) == (dict.fromkeys(DEVICES[1:3], "b"), ())


def test_placement_and_sizing_agree_on_how_many_share_a_device() -> None:
    assert Objective().load_free == FREE
    assert (engines_on_one("vllm"), engines_on_one("sglang"), engines_on_one("torch")) == (2, 2, 1)


SOME = st.builds(
    tenant,
    st.sampled_from("abcdefgh"),
    st.sets(st.sampled_from("012345"), min_size=1).map(lambda digits: "".join(sorted(digits))),
    st.floats(0.01, 4.0),
    st.booleans(),
    queued=st.booleans(),
    pressed=st.booleans(),
)
MANY = st.lists(SOME, max_size=8, unique_by=lambda one: one.model)


@given(MANY, st.dictionaries(st.sampled_from(DEVICES), st.sampled_from("abcdefgh")), st.randoms())
def test_everybody_decodes_somewhere_and_every_device_is_used(tenants: list[Tenant], before: dict, luck) -> None:
    slices = share_out(tenants, before)
    for one in tenants:
        assert decodes(slices, one)
        assert one.may_rest or one.model not in slices.resting
    for device in {device for one in tenants for device in one.devices}:
        assert any(device in decodes(slices, one) for one in tenants)
    assert all(
        device in next(t for t in tenants if t.model == owner).devices for device, owner in slices.owners.items()
    )
    shuffled = list(tenants)
    luck.shuffle(shuffled)
    assert share_out(shuffled, before) == slices


@given(MANY)
def test_what_was_decided_is_kept_when_nothing_changes(tenants: list[Tenant]) -> None:
    first = share_out(tenants, {})
    assert share_out(tenants, first.owners).owners == first.owners
