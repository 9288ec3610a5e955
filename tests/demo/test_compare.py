from collections.abc import Callable

import pytest
from msgspec.structs import replace

from belayer.demo.chat import Chat
from belayer.demo.compare import Outcome, compare
from belayer.demo.container_state import ContainerState, FileState
from belayer.demo.recording import Message, Recording, Turn
from belayer.demo.witness import WitnessState
from belayer.journal.columns import pack_logprobs, pack_loss_mask, pack_token_ids
from belayer.journal.events import ActionCommitted, ActionStarted, TokensAppended
from belayer.projections.trajectory import Boundary, Generation, Step, TrajectoryState

CHAT = Chat(Recording("r", (Message("user", "Do it."),), (Turn("I do it.", ("ls",)),)))
SAID = CHAT.turn(CHAT.recording.turns[0])


def _chunk(logprob: float = -0.5) -> TokensAppended:
    count = len(SAID)
    logprobs = pack_logprobs([logprob] * count)
    return TokensAppended(1, 0, count, pack_token_ids(SAID), logprobs, pack_loss_mask([1] * count), 0)


def _step(output: bytes = b"AUTHORS 22 passed in 0.04s", exit_status: int = 0, command: str = "ls") -> Step:
    seen = CHAT.observation(exit_status, output, timed_out=False, dropped_bytes=0, last=True)
    committed = ActionCommitted(1, exit_status, pack_token_ids(seen), b"", 0.1)
    return Step(ActionStarted(1, command, 60.0, "c-1"), committed, Boundary(1, 9))


FILE = FileState("file", 0o644, 0, 0, 3, "abc", ())
CONTAINER = ContainerState({"/a": FILE, "/b": FILE}, ["python3 witness.py"], WitnessState(1, "00"))
GENERATION = Generation(1, "w", "w-1", len(SAID), (_chunk(),), "stop")
TRAJECTORY = TrajectoryState(phase="finished", reason="submitted", segments=(GENERATION, _step()))
UNDISTURBED = Outcome(TRAJECTORY, CONTAINER)


def _with_step(step: Step) -> Outcome:
    return Outcome(replace(TRAJECTORY, segments=(GENERATION, step)), CONTAINER)


def _with_files(files: dict[str, FileState]) -> Outcome:
    return Outcome(TRAJECTORY, CONTAINER._replace(files=files))


def test_a_run_equals_itself_and_one_at_another_time_and_place() -> None:
    assert compare(UNDISTURBED, UNDISTURBED, CHAT) == []
    later = Outcome(
        replace(
            TRAJECTORY,
            segments=(replace(GENERATION, worker="w", incarnation="w-2"), _step(b"AUTHORS 22 passed in 7.77s")),
            rewinds=3,
            epoch=9,
            sandbox_incarnation="c-7",
        ),
        CONTAINER,
    )
    assert compare(UNDISTURBED, later, CHAT) == []


@pytest.mark.parametrize(
    ("other", "what"),
    [
        (Outcome(replace(TRAJECTORY, reason="gave up"), CONTAINER), "how the trajectory ended"),
        (Outcome(replace(TRAJECTORY, segments=(GENERATION,)), CONTAINER), "number of generations and actions"),
        (_with_step(_step(b"LICENSE 22 passed in 0.04s")), "action 1: what the model saw"),
        (_with_step(_step(exit_status=1)), "action 1: exit status"),
        (_with_step(_step(command="pwd")), "action 1: command"),
        (_with_files({"/a": FILE}), "file /b"),
        (_with_files({"/a": FILE, "/b": FILE, "/c": FILE}), "file /c"),
        (_with_files({"/a": FILE, "/b": FILE._replace(mode=0o600)}), "file /b"),
        (_with_files({"/a": FILE, "/b": FILE._replace(content="abd")}), "file /b"),
        (Outcome(TRAJECTORY, CONTAINER._replace(processes=[])), "background processes"),
        (Outcome(TRAJECTORY, CONTAINER._replace(witness=WitnessState(1, "01"))), "the witness's memory"),
        (Outcome(TRAJECTORY, CONTAINER._replace(witness=WitnessState(2, "00"))), "actions that the witness saw"),
    ],
)
def test_each_difference_is_found_and_named(other: Outcome, what: str) -> None:
    found = compare(UNDISTURBED, other, CHAT)
    assert any(difference.what.startswith(what) for difference in found)
    assert all("\n" not in str(difference) for difference in found)


@pytest.mark.parametrize(
    ("change", "what"),
    [
        (lambda said: replace(said, chunks=(_chunk(-0.25),)), "generation 1: logprobs from 0 on"),
        (lambda said: replace(said, finish_reason="length"), "generation 1: finish reason"),
        (
            lambda said: replace(said, chunks=(replace(_chunk(), token_ids=pack_token_ids([*SAID[:-1], 5])),)),
            f"generation 1: tokens from {len(SAID) - 1} on",
        ),
        (
            lambda said: replace(said, chunks=(replace(_chunk(), loss_mask=bytes(len(SAID))),)),
            "generation 1: loss mask",
        ),
    ],
)
def test_tokens_and_their_columns_are_compared_one_by_one(
    change: Callable[[Generation], Generation], what: str
) -> None:
    other = Outcome(replace(TRAJECTORY, segments=(change(GENERATION), _step())), CONTAINER)
    assert [difference.what for difference in compare(UNDISTURBED, other, CHAT)] == [what]
