"""Event ids: no two are alike, whatever threads and forks draw them."""

from __future__ import annotations

import os
from concurrent.futures import ThreadPoolExecutor

from belayer.ids import EVENT_ID_BYTES, StreamKind, nearest, new_event_id, trajectory

MANY = 1_000


def test_the_nearest_names_are_those_that_hold_it_and_those_like_it() -> None:
    known = ["django__django-11039.failures-1", "django__django-11039.undisturbed", "pydicom__pydicom-1256", "t-17"]
    assert nearest("11039", known) == known[:2]
    assert nearest("Pydicom", known) == [known[2]]
    assert nearest("t-71", known) == ["t-17"]
    assert nearest("nosuch", known) == nearest("x", []) == []
    assert len(nearest("t", [f"t-{number}" for number in range(100)])) == 3


def test_threads_draw_different_ids() -> None:
    with ThreadPoolExecutor(4) as threads:
        drawn = list(threads.map(lambda _: new_event_id(), range(4 * MANY)))
    assert len(set(drawn)) == 4 * MANY
    assert {len(event_id) for event_id in drawn} == {EVENT_ID_BYTES}


def test_a_forked_child_draws_other_ids_than_its_parent() -> None:
    """Also when ids were drawn ahead before the fork."""
    new_event_id()
    reading, writing = os.pipe()
    if (child := os.fork()) == 0:
        os.write(writing, b"".join(new_event_id() for _ in range(MANY)))
        os._exit(0)
    os.close(writing)
    with os.fdopen(reading, "rb") as pipe:
        theirs = pipe.read()
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    split = {theirs[at : at + EVENT_ID_BYTES] for at in range(0, len(theirs), EVENT_ID_BYTES)}
    assert len(split) == MANY
    assert split.isdisjoint({new_event_id() for _ in range(MANY)})


def test_a_kind_is_found_under_its_text() -> None:
    assert {StreamKind.TRAJECTORY: 1}["trajectory"] == 1
    assert hash(trajectory("t")) == hash(("trajectory", "t"))
