import pytest
from hypothesis import given
from hypothesis import strategies as st

from federated.rounds import Closed, Entry, Event, Header, Keys, Phase, RecordRefused, Slot, Work
from federated.rounds.aggregation import Lease
from federated.rounds.phases import TRANSITIONS, ImpossibleTransition, follow

HEADER = Header(
    Phase.UPDATING, 3, 2, 1.5, 0.25, 1.0, None, 100, 7, 0, (1, 2, 3, 0, 0, 0, 0, 0, 9), 4, 2.5, 1, 1, True
)
ENTRY = Entry(7, 6, 123.456, 12, b"d" * 16)
SLOT = Slot(7, 12, "Müller/1", 6, b"d" * 16, 20, 10, 0.125, 1, 14.142135623730951)
CLOSED = Closed(7, 6, False, Event.TOO_FEW_UPLOADS, 100, 3, 1.5, 2.5)
WORK = Work(7, (Lease("s", 2.5, 2, 1, 2), Lease()), Lease("t", 1.0, 1))


def test_records_come_back_as_they_were() -> None:
    for record in (HEADER, ENTRY, SLOT, CLOSED, WORK, HEADER._replace(opened_at=None)):
        assert type(record).from_bytes(record.to_bytes()) == record


def test_records_do_not_grow_with_the_cohort() -> None:
    assert len(HEADER.to_bytes()) < 400
    assert len(ENTRY.to_bytes()) == 41
    assert len(SLOT.to_bytes()) == 65 + len("Müller/1".encode())


@pytest.mark.parametrize("kind", [Header, Entry, Slot, Closed, Work])
@given(
    body=st.binary(max_size=120)
    | st.sampled_from([b"{}", b"[]", b'{"format":1}', b'{"format":2,"leases":[]}'])
)
def test_foreign_bytes_are_refused(kind: type[Header | Entry | Slot | Closed | Work], body: bytes) -> None:
    if len(body) in (41, 65 + 8) and body[0] == 1:
        return
    try:
        kind.from_bytes(body)
    except RecordRefused:
        return
    assert kind is Slot
    assert body[0] == 1


def test_another_format_is_refused() -> None:
    for record in (ENTRY, SLOT):
        body = record.to_bytes()
        with pytest.raises(RecordRefused):
            type(record).from_bytes(b"\x02" + body[1:])


def test_every_phase_has_a_row_and_unknown_events_are_our_own_fault() -> None:
    assert set(TRANSITIONS) == {*Phase, None}
    assert follow(Phase.STARTING, Event.STARTS_FULL) is Phase.UPDATING
    with pytest.raises(ImpossibleTransition):
        follow(Phase.AGGREGATING, Event.STOP)
    reached = {after for row in TRANSITIONS.values() for after in row.values()}
    assert reached == {*Phase, None}


@pytest.mark.parametrize("name", ["", "Job", "a/b", "a" * 65, "-a", "a\n"])
def test_a_jobs_name_is_short_and_plain(name: str) -> None:
    with pytest.raises(ValueError, match="a job's name"):
        Keys(name)
