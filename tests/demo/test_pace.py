"""A run keeps the recorded model's pace, or a multiple of it."""

import json
from pathlib import Path

import pytest

from belayer.demo.pace import generation_times_s, paced
from belayer.errors import InputError


def written(tmp_path: Path, *stamps: tuple[str, float | None]) -> Path:
    path = tmp_path / "t.traj.json"
    messages = [{"role": role, "content": "", "extra": {"timestamp": at} if at else {}} for role, at in stamps]
    path.write_text(json.dumps({"messages": messages}))
    return path


def test_a_generation_takes_from_the_message_before_it(tmp_path: Path) -> None:
    path = written(
        tmp_path, ("system", None), ("user", 100.0), ("assistant", 103.5), ("tool", 110.0), ("assistant", 111.0)
    )
    times_s = generation_times_s(path)
    assert times_s == [3.5, 1.0]
    model_s = paced(times_s, 10)
    assert [model_s(number) for number in (1, 2, 3)] == [0.35, 0.1, 0.0]


def test_what_the_time_stamps_do_not_tell_takes_no_time(tmp_path: Path) -> None:
    assert generation_times_s(written(tmp_path, ("user", None), ("assistant", 5.0), ("assistant", None))) == [0.0, 0.0]


def test_a_file_that_is_gone(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="cannot be read"):
        generation_times_s(tmp_path / "nosuch.traj.json")
