"""What a trajectory's events say about a request: pure, so every case is one line."""

from __future__ import annotations

from typing import Any

import pytest

from belayer.gpu.gateway.errors import RefusedError
from belayer.gpu.gateway.history import Place, place, read, writer_of
from belayer.gpu.gateway.request import Asked
from belayer.ids import trajectory
from belayer.journal.columns import pack_token_ids
from belayer.journal.events import (
    ActionCommitted,
    ActionStarted,
    AnyEvent,
    EpochStarted,
    GenerationFinished,
    GenerationStarted,
    TokensAppended,
    TrajectoryFinished,
    TrajectoryStarted,
)
from belayer.journal.memory_store import MemoryStore
from belayer.journal.writer import Reader, take_over
from belayer.projections.trajectory import INITIAL, Boundary


def asked(rid: str, *prompt: int, **changes: Any) -> Asked:
    known = {"trajectory": "t", "task": "", "text": None, "adds_special_tokens": True, "max_new_tokens": 9}
    return Asked(rid=rid, prompt=list(prompt), **{**known, **changes})


def begun(rid: str, number: int, *tokens: int) -> list[AnyEvent]:
    """A gateway's epoch and a generation in it that is not finished."""
    ids_, count = pack_token_ids(tokens), len(tokens)
    chunk = TokensAppended(number, 0, count, ids_, bytes(4 * count), b"\x01" * count, 0)
    return [EpochStarted(0, writer_of(asked(rid))), GenerationStarted(number, "w", "w-1"), chunk]


def finished(rid: str, number: int, *tokens: int) -> list[AnyEvent]:
    return [*begun(rid, number, *tokens), GenerationFinished(number, len(tokens), "stop")]


def acted(number: int, *tokens: int) -> list[AnyEvent]:
    return [ActionStarted(number, "ls", 1.0, ""), ActionCommitted(number, 0, pack_token_ids(tokens), b"", 0.1)]


START: list[AnyEvent] = [TrajectoryStarted("run", "task", pack_token_ids([1, 2]))]
FIRST = [*START, *finished("a", 1, 10, 11)]
SECOND = [*FIRST, *acted(1, 20)]


async def placed(events: list[AnyEvent], wanted: Asked) -> Place:
    """Where the request belongs after these events; an EpochStarted among them begins one."""
    store = MemoryStore()
    writer, _ = await take_over(store, trajectory("t"), "rollout")
    for event in events:
        if isinstance(event, EpochStarted):
            writer, _ = await take_over(store, trajectory("t"), event.writer)
        else:
            await writer.append(event)
    return place(read(await Reader(store, trajectory("t")).catch_up()), wanted, None)


async def test_a_new_request_begins_or_goes_on_from_the_whole_trajectory() -> None:
    assert await placed([], asked("a", 1, 2)) == Place([1, 2])
    assert await placed(START, asked("a", 1, 2)) == Place([1, 2])
    assert await placed(SECOND, asked("b", 1, 2, 10, 11, 20)) == Place([1, 2, 10, 11, 20])
    assert await placed(FIRST, asked("b", 1, 2, 10, 11, 7, 8)) == Place([1, 2, 10, 11, 7, 8], observation=(7, 8))


async def test_a_known_request_is_resumed_or_replayed() -> None:
    resumed = await placed([*START, *begun("a", 1, 10)], asked("a", 1, 2))
    assert resumed.generation is not None and resumed.generation.finish_reason is None
    assert resumed.generation.token_ids() == [10]
    replayed = await placed(SECOND, asked("a", 1, 2))
    assert replayed.generation is not None and replayed.generation.finish_reason == "stop"
    ended = await placed([*FIRST, TrajectoryFinished("done")], asked("a", 1, 2))
    assert ended.generation is not None


async def test_the_last_prompt_under_another_id_takes_the_last_answers_place() -> None:
    assert await placed(FIRST, asked("b", 1, 2)) == Place([1, 2], rewind=INITIAL)
    assert await placed([*START, *begun("a", 1, 10)], asked("b", 1, 2)) == Place([1, 2], rewind=INITIAL)
    again = await placed([*SECOND, *finished("b", 2, 30)], asked("c", 1, 2, 10, 11, 20))
    assert again.rewind is not None and again.rewind == Boundary(1, again.rewind.sequence)


@pytest.mark.parametrize(
    ("events", "wanted", "kind"),
    [
        (FIRST, asked("a", 1, 3), "rid_reused"),
        (FIRST, asked("a", 1, 2, max_new_tokens=8), "rid_reused"),
        ([*FIRST, TrajectoryFinished("done")], asked("b", 1, 2, 10, 11), "trajectory_ended"),
        ([*FIRST, TrajectoryFinished("done")], asked("t", 1, 2, 10, 11, trajectory=""), "rid_reused"),
        ([*FIRST, *acted(1, 20)[:1]], asked("b", 1, 2, 10, 11), "action_in_flight"),
        (SECOND, asked("b", 1, 2, 10, 12, 20), "prompt_differs"),
        (SECOND, asked("b", 1, 2), "prompt_differs"),
        ([*START, *begun("a", 1, 10)], asked("b", 1, 2, 10), "prompt_differs"),
        (START, asked("a", 1, 2, 3), "prompt_differs"),
    ],
)
async def test_what_does_not_fit_is_refused(events: list[AnyEvent], wanted: Asked, kind: str) -> None:
    with pytest.raises(RefusedError) as refused:
        await placed(events, wanted)
    assert (refused.value.status, refused.value.kind) == (409, kind)
