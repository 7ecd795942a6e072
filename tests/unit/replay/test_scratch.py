"""The scratch gives back what it was given, by the place of the work item, whatever the order it came in."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path

import msgspec
from hypothesis import given
from hypothesis import strategies as st

from sie_stream.cli.replaying.scratch import MEMORY_BYTES_MAX, ROW_BYTES, Scratch
from sie_stream.ids import TopicPartition
from sie_stream.records import Provenance, Result, ResultError, Timings, Usage
from tests.examples import examples


def result(partition: int, offset: int) -> Result:
    failed = offset % 5 == 0
    provenance = Provenance(
        *("sie.requests", 0, 9, "sie.work.m", partition, offset), weights_digest="sha256:w", engine="e", batch_size=8
    )
    return Result(
        f"r{partition}-{offset}",
        "failed" if failed else "ok",
        *("mi-1", "m", f"{offset % 2}", "stable"),
        None if failed else b'{"score":%d}' % offset,
        ResultError("invalid_input", "no") if failed else None,
        Usage(),
        Timings(inference=1.5, total=9.0),
        msgspec.structs.replace(provenance, seed=offset if offset % 3 == 0 else None),
        1_000 + offset,
    )


@examples(25)
@given(
    st.lists(st.tuples(st.integers(0, 2), st.integers(0, 60)), max_size=60),
    st.integers(0, 60),
    st.integers(0, 60),
    st.sampled_from([0, 20 * ROW_BYTES, MEMORY_BYTES_MAX]),
)
def test_what_goes_in_comes_out_once(
    given_places: list[tuple[int, int]], first: int, last: int, memory_bytes_max: int
) -> None:
    """All on disk, the first twenty in memory, all in memory."""
    with closing(Scratch(memory_bytes_max=memory_bytes_max)) as scratch:
        for start in range(0, len(given_places), 7):
            scratch.add(result(*place) for place in given_places[start : start + 7])
        distinct = sorted(set(given_places))
        assert scratch.count == len(distinct)
        assert scratch.repeated == len(given_places) - len(distinct)
        for partition in range(3):
            place = TopicPartition("sie.work.m", partition)
            offsets = [offset for number, offset in distinct if number == partition]
            found = scratch.between(place, first, last)
            assert set(found) <= set(offsets)
            assert set(found) >= {offset for offset in offsets if first <= offset <= last}
            for offset, original in found.items():
                wanted = result(partition, offset)
                assert original.request_id == wanted.request_id
                assert (original.status, original.version) == (wanted.status, wanted.version)
                assert (original.outputs, original.seed) == (wanted.outputs, wanted.provenance.seed)
                assert original.error_code == ("invalid_input" if wanted.error else "")
            if offsets:
                assert place in scratch.places()
                assert list(scratch.offsets(place)) == offsets
                assert scratch.held(place) == len(offsets)
                below, listed = scratch.below(place, first, 2)
                assert below == sum(offset < first for offset in offsets)
                assert [offset for offset, *_ in listed] == [offset for offset in offsets if offset < first][:2]


def test_memory_takes_what_it_may_and_the_rest_goes_to_disk(tmp_path: Path) -> None:
    with closing(Scratch(tmp_path, memory_bytes_max=10 * ROW_BYTES)) as scratch:
        (file,) = tmp_path.rglob("results.sqlite")
        scratch.add(result(0, offset) for offset in range(8))
        assert file.stat().st_size == 0
        scratch.add(result(0, offset) for offset in range(100))
        assert (scratch.count, scratch.repeated) == (100, 8)
        assert file.stat().st_size > 0
