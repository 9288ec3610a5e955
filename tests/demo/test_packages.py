import re
from pathlib import Path

import pytest

from belayer.demo.packages import Package, package_of
from belayer.demo.recording import find, read
from belayer.errors import InputError

EXAMPLES = Path(__file__).resolve().parents[2] / "examples" / "trajectories"


def test_the_shipped_trajectories_are_whole_and_say_what_they_are() -> None:
    paths = find(EXAMPLES)
    assert len(paths) == 3
    readme = (EXAMPLES / "README.md").read_text()
    for path in paths:
        recording = read(path)
        package = package_of(path)
        assert f"| `{path.name}` | {package.package} {package.version} | {recording.actions} |" in readme
        assert recording.workdir == "/testbed"


def test_a_table_beside_the_file_wins_over_the_name(tmp_path: Path) -> None:
    path = tmp_path / "django__django-11039.traj.json"
    assert package_of(path) == Package("Django", "2.2")
    (tmp_path / "testbeds.json").write_text('{"django__django-11039": {"package": "mine", "version": "1.2"}}')
    assert package_of(path) == Package("mine", "1.2")
    assert package_of(tmp_path / "pydicom__pydicom-1694.traj.json") == Package("pydicom", "2.3.0")


@pytest.mark.parametrize("name", ["mystery", "a__b-12", "django__django", "7"])
def test_an_unknown_trajectory_is_asked_about(tmp_path: Path, name: str) -> None:
    with pytest.raises(InputError, match="which package") as raised:
        package_of(tmp_path / f"{name}.traj.json")
    assert str(tmp_path / "testbeds.json") in str(raised.value)


@pytest.mark.parametrize("text", ["{", '{"x": 1}', '{"x": {"package": "p"}}'])
def test_a_broken_table_is_named(tmp_path: Path, text: str) -> None:
    (tmp_path / "testbeds.json").write_text(text)
    with pytest.raises(InputError, match=re.escape(str(tmp_path / "testbeds.json"))):
        package_of(tmp_path / "x.traj.json")
