"""Records of every kind, for property tests."""

from __future__ import annotations

from hypothesis import strategies as st
from msgspec import Raw

from sie_stream.records import (
    STATUSES,
    DeadLetter,
    InferenceRequest,
    InputsRef,
    Provenance,
    RawOutput,
    Result,
    ResultError,
    Timings,
    TokenDelta,
    Usage,
    WorkItem,
)

SMALL = st.integers(0, 200)
TEXTS = st.one_of(
    st.sampled_from(["", "mi-0123456789ab", "mi-ba9876543210", "credit-risk", "stable", "sie.requests"]),
    st.text(st.characters(exclude_categories=["Cs"]), max_size=70),
)
LONGS = st.one_of(
    SMALL,
    st.integers(-(2**63), 2**63 - 1),
    st.integers(0, 62).map(lambda bits: 1 << bits),
    st.integers(1_700_000_000_000, 1_700_000_000_050),
)
INTS = st.one_of(SMALL, st.integers(-(2**31), 2**31 - 1))
JSON_TEXTS = st.one_of(
    st.just(b"{}"), TEXTS.map(lambda text: text.encode()), st.integers(0, 9_000).map(lambda size: b"x" * size)
)
BLOBS = st.binary(max_size=70)
TOKENS = st.lists(INTS, max_size=40).map(tuple)


def maybe(strategy: st.SearchStrategy) -> st.SearchStrategy:
    return st.one_of(st.none(), strategy)


FLOATS = st.floats(allow_nan=False)
USAGES = st.builds(Usage, INTS, INTS)
TIMINGS = st.builds(Timings, FLOATS, FLOATS, FLOATS, FLOATS, FLOATS, FLOATS)
PROVENANCES = st.builds(
    Provenance,
    source_topic=TEXTS,
    source_partition=INTS,
    source_offset=LONGS,
    work_topic=TEXTS,
    work_partition=INTS,
    work_offset=LONGS,
    route_epoch=LONGS,
    placement_epoch=LONGS,
    worker=TEXTS,
    incarnation=TEXTS,
    device=TEXTS,
    weights_digest=TEXTS,
    engine=TEXTS,
    seed=maybe(LONGS),
    batch_size=INTS,
    schema_id=INTS,
)
REQUESTS = st.builds(
    InferenceRequest,
    model=TEXTS,
    instance=TEXTS,
    inputs=JSON_TEXTS.map(Raw),
    request_id=TEXTS,
    parameters=maybe(JSON_TEXTS.map(Raw)),
    priority=maybe(st.sampled_from(["P0", "P1", "P2"])),
    deadline_ms=maybe(LONGS),
    session=maybe(TEXTS),
    tenant=maybe(TEXTS),
    stream=st.booleans(),
    reply_topic=maybe(TEXTS),
    inputs_ref=maybe(st.builds(InputsRef, TEXTS, TEXTS, maybe(LONGS))),
)
WORK_ITEMS = st.builds(
    WorkItem,
    request_id=TEXTS,
    instance=TEXTS,
    model=TEXTS,
    version=TEXTS,
    variant=TEXTS,
    route_epoch=LONGS,
    priority=SMALL,
    inputs=JSON_TEXTS,
    key=BLOBS,
    source_topic=TEXTS,
    source_partition=INTS,
    source_offset=LONGS,
    requested_at_ms=LONGS,
    received_at_ms=LONGS,
    routed_at_ms=LONGS,
    schema_id=INTS,
    deadline_at_ms=LONGS,
    parameters=maybe(JSON_TEXTS),
    token_ids=maybe(TOKENS),
    seed=maybe(LONGS),
    session=maybe(TEXTS),
    tenant=maybe(TEXTS),
    stream=st.booleans(),
    reply_topic=maybe(TEXTS),
    output_topic=maybe(TEXTS),
    traceparent=maybe(TEXTS),
)
RESULTS = st.builds(
    Result,
    request_id=TEXTS,
    status=st.sampled_from(STATUSES),
    instance=TEXTS,
    model=TEXTS,
    version=TEXTS,
    variant=TEXTS,
    outputs=maybe(JSON_TEXTS),
    error=maybe(st.builds(ResultError, TEXTS, TEXTS, TEXTS)),
    usage=USAGES,
    timings_ms=TIMINGS,
    provenance=PROVENANCES,
    finished_at=LONGS,
)
RAW_OUTPUTS = st.builds(
    RawOutput,
    result=RESULTS,
    key=BLOBS,
    outputs=maybe(JSON_TEXTS),
    token_ids=maybe(TOKENS),
    finish_reason=TEXTS,
    reply_topic=maybe(TEXTS),
    output_topic=maybe(TEXTS),
)
DEAD_LETTERS = st.builds(
    DeadLetter,
    request_id=TEXTS,
    reason=TEXTS,
    message=TEXTS,
    source_topic=TEXTS,
    source_partition=INTS,
    source_offset=LONGS,
    original=BLOBS,
    original_bytes=LONGS,
    original_sha256=TEXTS,
    stack_digest=TEXTS,
    attempts=INTS,
    at_ms=LONGS,
    component=TEXTS,
)
TOKEN_DELTAS = st.builds(
    TokenDelta,
    request_id=TEXTS,
    index=INTS,
    token_ids=TOKENS,
    text=TEXTS,
    provisional=st.booleans(),
    worker=TEXTS,
    incarnation=TEXTS,
    attempt=INTS,
)
