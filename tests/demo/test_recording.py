import json
from pathlib import Path
from typing import Any

import pytest

from belayer.demo.chat import Chat, is_submission, render
from belayer.demo.recording import Turn, commands_of, find, read
from belayer.errors import InputError
from belayer.gpu.recorded_prefix import ASSISTANT, END, TOOL, USER, locate

PROMPT = [{"role": "system", "content": "You help."}, {"role": "user", "content": "Fix the bug."}]
SHARED = Path(__file__).resolve().parents[3] / "shared" / "trajectories"


def _write(folder: Path, document: Any, name: str = "pkg__pkg-1.traj.json") -> Path:
    path = folder / name
    path.write_text(document if isinstance(document, str) else json.dumps(document))
    return path


def _format_2(*commands: str) -> dict[str, Any]:
    assistant = {"role": "assistant", "content": "Look.", "extra": {"actions": [{"command": c} for c in commands]}}
    environment = {"cwd": "/testbed", "env": {"PAGER": "cat"}, "timeout": 30}
    messages = [*PROMPT, assistant, {"role": "tool", "content": "ok"}, {"role": "exit", "content": "patch"}]
    return {"info": {"config": {"environment": environment}}, "messages": messages}


def test_format_2_reads_calls_and_environment(tmp_path: Path) -> None:
    recording = read(_write(tmp_path, _format_2("ls", "cat 'x y'\n")))
    assert recording.name == "pkg__pkg-1"
    assert recording.turns == (Turn("Look.", ("ls", "cat 'x y'\n")),)
    assert [message.role for message in recording.prompt] == ["system", "user"]
    assert (recording.workdir, recording.environment, recording.timeout_s) == ("/testbed", {"PAGER": "cat"}, 30.0)
    assert recording.actions == 2


@pytest.mark.parametrize("as_list", [True, False])
def test_the_older_formats_read_the_one_block(tmp_path: Path, as_list: bool) -> None:
    said = [
        {"role": "assistant", "content": "THOUGHT: look\n\n```bash\nls -la &&\npwd\n```\n"},
        {"role": "user", "content": "<returncode>0</returncode>"},
        {"role": "assistant", "content": [{"type": "text", "text": "two\n```bash\na\n```\n```bash\nb\n```"}]},
    ]
    messages = [*PROMPT, *said]
    recording = read(_write(tmp_path, messages if as_list else {"messages": messages, "info": {}}))
    assert [commands_of(turn) for turn in recording.turns] == [["ls -la &&\npwd"], []]
    assert recording.workdir == "/testbed"


@pytest.mark.parametrize(
    ("document", "expected"),
    [
        ('{"messages": [{"role"', "truncated"),
        ("[]", "at least one message"),
        ("3", "list of messages"),
        ({"messages": 5}, "`messages`"),
        ({"messages": ["x"]}, "messages[0]"),
        ({"messages": [{"role": "robot", "content": ""}]}, "messages[0].role"),
        ({"messages": [{"role": "user", "content": 7}]}, "messages[0].content"),
        ({"messages": PROMPT}, "no assistant message"),
        ({"messages": [{"role": "assistant", "content": "x"}]}, "no prompt"),
        (
            {"messages": [*PROMPT, {"role": "assistant", "content": "", "extra": {"actions": [{"c": 1}]}}]},
            "messages[2].extra.actions[0].command",
        ),
        ({**_format_2("ls"), "info": {"config": {"environment": {"env": {"A": 1}}}}}, "environment.env"),
    ],
)
def test_bad_files_are_named_with_place_and_expectation(tmp_path: Path, document: Any, expected: str) -> None:
    path = _write(tmp_path, document)
    with pytest.raises(InputError) as raised:
        read(path)
    assert str(path) in str(raised.value)
    assert expected in str(raised.value)
    assert "\n" not in str(raised.value)


def test_missing_files_and_folders_are_input_errors(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="cannot be read"):
        read(tmp_path / "gone.traj.json")
    with pytest.raises(InputError, match="not a folder"):
        find(tmp_path / "gone")
    with pytest.raises(InputError, match="no file"):
        find(tmp_path)


def test_commands_are_read_back_from_the_tokens(tmp_path: Path) -> None:
    recording = read(_write(tmp_path, _format_2("ls -la", "echo 'ünï' > x")))
    chat = Chat(recording)
    [turn] = chat.token_recording().turns
    assert chat.commands(1, turn) == ["ls -la", "echo 'ünï' > x"]
    assert chat.commands(1, [END]) is None
    assert chat.commands(1, [*chat.tokenizer.encode(b"only words"), END]) == []


def test_observations_are_segments_that_the_engine_accepts(tmp_path: Path) -> None:
    chat = Chat(read(_write(tmp_path, _format_2("ls", "pwd"))))
    tokens = chat.token_recording()
    first = chat.observation(0, b"a\xffb", timed_out=False, dropped_bytes=0, last=False)
    second = chat.observation(1, b"", timed_out=False, dropped_bytes=0, last=True)
    assert first[0] == TOOL and first[-1] == END and second[-1] == ASSISTANT
    assert chat.tokenizer.decode(first) == b"<returncode>0</returncode>\n<output>\na\xffb</output>"
    assert locate([tokens], tokens.prompt + tokens.turns[0] + first + second).turn == 1
    assert chat.no_command()[0] == USER


def test_long_outputs_are_shown_by_head_and_tail() -> None:
    shown = render(0, b"h" * 6000 + b"t" * 6000, timed_out=True, dropped_bytes=100)
    assert shown.startswith(b"<exception>timed out</exception>\n<returncode>0</returncode>\n<warning>")
    assert b"<output_head>\n" + b"h" * 5000 + b"\n</output_head>" in shown
    assert b"2100 characters elided" in shown
    assert b"t" * 5000 in shown and b"t" * 5001 not in shown


def test_a_submission_is_known_by_its_first_line() -> None:
    assert is_submission(b"COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT\ndiff --git")
    assert not is_submission(b"echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT")
    assert not is_submission(b"")


@pytest.mark.skipif(not SHARED.is_dir(), reason="the shared recordings are not here")
def test_every_shared_recording_replays_from_tokens() -> None:
    for path in find(SHARED):
        recording = read(path)
        chat = Chat(recording)
        tokens = chat.token_recording()
        context = list(tokens.prompt)
        for index, (turn, said) in enumerate(zip(recording.turns, tokens.turns, strict=True)):
            assert chat.commands(index + 1, said) == list(turn.calls)
            middle = len(said) // 2
            assert locate([tokens], context + said[:middle])[1:] == (index, middle)
            context += said
            for number, _ in enumerate(turn.calls, 1):
                last = number == len(turn.calls)
                context += chat.observation(0, b"seen\n", timed_out=False, dropped_bytes=0, last=last)
