from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from belayer.errors import InputError, PrefixRefusedError
from belayer.gpu.recorded_prefix import ASSISTANT, CALL, END, TOOL, USER, TokenRecording, load, locate, logprob
from belayer.journal.columns import pack_logprobs, unpack_logprobs

TEXT = st.lists(st.integers(0, 255) | st.integers(272, 300), max_size=6)
PROMPT = [USER, 1, 2, END, ASSISTANT]


@st.composite
def contexts(draw: st.DrawFn) -> tuple[TokenRecording, list[int], int, int]:
    """A recording, a context within it and where that context ends."""
    turns = draw(st.lists(TEXT.map(lambda text: [*text, END]), min_size=1, max_size=4))
    recording = TokenRecording("r", PROMPT, turns)
    turn = draw(st.integers(0, len(turns)))
    context = list(PROMPT)
    for said in turns[:turn]:
        context += [*said, TOOL, *draw(TEXT), END, ASSISTANT]
    offset = draw(st.integers(0, len(recording.turn(turn)) - 1))
    return recording, context + recording.turn(turn)[:offset], turn, offset


@given(contexts())
def test_every_point_of_every_turn_is_found(case: tuple[TokenRecording, list[int], int, int]) -> None:
    recording, context, turn, offset = case
    assert locate([recording], context) == (recording, turn, offset)


@given(contexts(), st.data())
def test_a_wrong_token_is_never_accepted_as_the_recording(
    case: tuple[TokenRecording, list[int], int, int], data: st.DataObject
) -> None:
    recording, context, turn, offset = case
    at = data.draw(st.integers(0, len(context) - 1))
    changed = list(context)
    changed[at] = data.draw(st.integers(0, 300).filter(lambda token: token != context[at]))
    free = _observation_text(context)
    try:
        found = locate([recording], changed)
    except PrefixRefusedError as refused:
        assert at <= refused.offset or at in free
    else:
        assert at in free or (at - 1 in free and changed[at] == USER)
        assert found.turn <= turn or offset == 0


def _observation_text(context: list[int]) -> set[int]:
    """Places from an observation's role token to its end: what is there is the environment's."""
    free: set[int] = set()
    inside = False
    for at, token in enumerate(context):
        inside = inside or token == TOOL
        if inside:
            free.add(at)
        if token == ASSISTANT:
            inside = False
    return free


TWO = TokenRecording("two", PROMPT, [[5, CALL, 6, CALL, 7, END], [8, END]])
SEEN = [TOOL, END]
AFTER_TWO = [*PROMPT, *TWO.turns[0], *SEEN, *SEEN, ASSISTANT, *TWO.turns[1], *SEEN, ASSISTANT]


@pytest.mark.parametrize(
    ("prefix", "offset", "problem"),
    [
        ([USER, 1, 3], 2, "prompt"),
        (PROMPT[:3], 3, "prompt"),
        ([*PROMPT, 5, CALL, 7], 7, "turn 1"),
        ([*PROMPT, 5, CALL, 6, CALL, 7, END], 11, "needs 2 observations"),
        ([*PROMPT, 5, CALL, 6, CALL, 7, END, TOOL, 1, END, ASSISTANT], 14, "needs 2 observations"),
        ([*PROMPT, 5, CALL, 6, CALL, 7, END, TOOL, 1], 13, "not ended"),
        ([*PROMPT, 5, CALL, 6, CALL, 7, END, TOOL, 1, END, TOOL, 2, END], 17, "nothing asks"),
        ([*AFTER_TWO, END, *SEEN, ASSISTANT], 25, "has ended"),
    ],
)
def test_a_wrong_resume_is_refused_at_its_first_wrong_token(prefix: list[int], offset: int, problem: str) -> None:
    with pytest.raises(PrefixRefusedError, match=problem) as raised:
        locate([TWO], prefix)
    assert raised.value.offset == offset


def test_recordings_are_told_apart_by_their_prompts() -> None:
    other = TokenRecording("other", [USER, 1, 9, END, ASSISTANT], [[4, END]])
    assert locate([TWO, other], [*other.prompt, 4]) == (other, 0, 1)


@given(st.text(min_size=1), st.integers(0, 200), st.integers(0, 9999), st.integers(0, 5000))
def test_logprobs_are_fixed_and_survive_the_journal(name: str, turn: int, offset: int, token: int) -> None:
    value = logprob(name, turn, offset, token)
    assert value <= 0.0
    assert unpack_logprobs(pack_logprobs([value])) == [value]
    assert logprob(name, turn, offset, token) == value


def test_a_folder_without_recordings_or_with_a_broken_one_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="no file"):
        load(tmp_path)
    (tmp_path / "x.recording.json").write_text('{"name": "x"')
    with pytest.raises(InputError, match=r"x\.recording\.json"):
        load(tmp_path)
