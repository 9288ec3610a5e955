"""`belayer demo` given what it cannot use: one line, exit code 2, and nothing started."""

import json
from pathlib import Path

import pytest

from tests.cli.command import assert_one_line_error, belayer

MESSAGES = [
    {"role": "user", "content": "Fix it."},
    *({"role": "assistant", "content": f"```bash\necho {number}\n```"} for number in range(3)),
]
TESTBEDS = {name: {"package": "pydicom", "version": "2.1.0"} for name in ("t", "u")}


@pytest.mark.parametrize(
    ("files", "arguments", "said"),
    [
        ({}, (), "no file *.traj.json"),
        ({"t.traj.json": '{"messages": ['}, (), "perhaps truncated"),
        ({"t.traj.json": "{}"}, (), "`messages`"),
        ({"mystery.traj.json": json.dumps(MESSAGES)}, (), "which package"),
        ({"t.traj.json": json.dumps(MESSAGES)}, ("--failures", "3"), "3 turns, too few for 3 failures"),
        ({"t.traj.json": json.dumps(MESSAGES)}, ("--failures", "engine,fire"), "container-idle"),
        (
            {"t.traj.json": json.dumps(MESSAGES), "u.traj.json": json.dumps(MESSAGES)},
            ("--failures", "1"),
            "same prompt",
        ),
    ],
)
def test_what_cannot_be_run_is_said_in_one_line(
    tmp_path: Path, files: dict[str, str], arguments: tuple[str, ...], said: str
) -> None:
    for name, text in {"testbeds.json": json.dumps(TESTBEDS), **files}.items():
        (tmp_path / name).write_text(text)
    done = belayer("demo", "--trajectories", str(tmp_path), *arguments)
    assert_one_line_error(done, said)
    assert done.stdout == ""


def test_a_missing_folder_is_named(tmp_path: Path) -> None:
    assert_one_line_error(belayer("demo", "--trajectories", str(tmp_path / "gone")), "gone is not a folder")
