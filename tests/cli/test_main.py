"""The command itself: what it loads, its exit statuses, and that whatever goes wrong is said in one line."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from belayer import __version__
from belayer.cli.main import run
from belayer.cli.settings import SETTINGS
from belayer.cli.verbs import VERBS, load
from belayer.exits import INTERRUPTED, READER_GONE
from tests.cli.command import COMMAND, ROOT, assert_one_line_error, belayer, environment
from tests.waiting import DEADLINE_S


def test_version() -> None:
    done = belayer("--version")
    assert (done.returncode, done.stdout, done.stderr) == (0, f"belayer {__version__}\n", "")


def test_help_names_every_verb_and_loads_none(tmp_path: Path) -> None:
    code = (
        "import sys; from belayer.cli.main import run; status = run(['--help'])\n"
        "loaded = {name.split('.')[0] for name in sys.modules} | {n for n in sys.modules if n.startswith('belayer.')}\n"
        "heavy = {'redis', 'docker', 'aiohttp', 'torch', 'replay', 'asyncio', 'belayer.journal', 'belayer.demo'}\n"
        "sys.exit(status or ', '.join(sorted(loaded & heavy)) or 0)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        env=environment(),
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=DEADLINE_S,
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert all(verb in done.stdout for verb in VERBS)


@pytest.mark.parametrize("verb", VERBS)
def test_every_verb_is_there_with_help_of_its_own(verb: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert load(verb).name == verb
    assert run([verb, "--help"]) == 0
    assert f"belayer {verb}" in capsys.readouterr().out


def test_no_verb_shows_the_help() -> None:
    done = belayer()
    assert done.returncode == 0
    assert "timeline" in done.stdout


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["nosuch"], "nosuch"),
        (["status", "--nosuch"], "--nosuch"),
        (["tail"], "stream"),
        (["tail", "t", "--lines", "many"], "--lines"),
        (["status"], "no journal is named"),
        (["status", "--url", "http://host"], "not a usable journal URL"),
        (["status", "--url", "unix:///nosuch/redis.sock"], "is the server up?"),
        (["audit", "--file", "nosuch.journal"], "nosuch.journal"),
        (["timeline", "../t", "--file", "nosuch.journal"], "nosuch.journal"),
    ],
)
def test_what_a_person_can_put_right_is_one_line(arguments: list[str], said: str, tmp_path: Path) -> None:
    assert_one_line_error(belayer(*arguments, cwd=tmp_path), said)


def test_who_asked_for_json_gets_the_error_as_json_too(tmp_path: Path) -> None:
    for arguments, kind in ((["status", "--json"], "InputError"), (["export", "--json"], "MissingParameter")):
        done = belayer(*arguments, cwd=tmp_path)
        error = json.loads(done.stdout)["error"]
        assert (done.returncode, error["type"], done.stderr) == (2, kind, f"belayer: {error['message']}\n")


def test_a_wrong_command_line_names_the_help_of_its_verb() -> None:
    assert_one_line_error(belayer("status", "--nosuch"), "see `belayer status --help`")
    assert_one_line_error(belayer("archive", "nosuch"), "see `belayer archive --help`")
    assert_one_line_error(belayer("nosuch"), "see `belayer --help`")


@pytest.mark.parametrize("command", [[*COMMAND, "--help"], [*COMMAND, "doctor"], [*COMMAND, "status", "--json"]])
def test_a_reader_that_goes_away_is_no_error(command: list[str], tmp_path: Path) -> None:
    """`belayer --help | head -1`: the pipe is closed before anything is written."""
    read_end, write_end = os.pipe()
    os.close(read_end)
    done = subprocess.run(
        command, env=environment(), stdout=write_end, stderr=subprocess.PIPE, cwd=tmp_path, timeout=60, check=False
    )
    os.close(write_end)
    assert done.returncode == READER_GONE
    assert b"Traceback" not in done.stderr and b"Broken" not in done.stderr


def test_a_full_disk_under_the_output_is_one_line(tmp_path: Path) -> None:
    with Path("/dev/full").open("w") as full:
        done = subprocess.run(
            [*COMMAND, "--help"], env=environment(), stdout=full, stderr=subprocess.PIPE, cwd=tmp_path, timeout=60
        )
    assert (done.returncode, done.stderr) == (2, b"belayer: the output cannot be written: No space left on device\n")


def test_a_closed_output_is_borne(tmp_path: Path) -> None:
    code = f"exec {sys.executable} -m belayer.cli --version >&-"
    done = subprocess.run(["bash", "-c", code], env=environment(), cwd=tmp_path, capture_output=True, timeout=60)
    assert (done.returncode, done.stderr) == (0, b"")


# --- for a person at a shell ---------------------------------------------------------------------------------------

WITHOUT_JSON = {"actors", "gateway"}
"""They serve until they are ended, and say `ready`."""


@pytest.mark.parametrize("verb", VERBS)
def test_every_verb_shows_examples_and_speaks_json(verb: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run([verb, "--help"]) == 0
    said = capsys.readouterr().out
    assert f"belayer {verb}" in said.split("Examples:")[1]
    command = load(verb)
    commands = getattr(command, "commands", {}).values() or [command]
    for each in commands:
        speaks = any("--json" in parameter.opts for parameter in each.params)
        assert speaks is not (verb in WITHOUT_JSON), each.name


def test_the_page_on_the_command_line_has_every_verb_and_setting() -> None:
    told = (ROOT / "docs" / "cli.md").read_text()
    assert [verb for verb in VERBS if f"`{verb}" not in told] == []
    assert [key for key, one in SETTINGS.items() if f"| `{key}` | `{one.variable}` |" not in told] == []


@pytest.mark.parametrize(
    ("typed", "offered"),
    [
        ("belayer ", set(VERBS)),
        ("belayer ti", {"timeline"}),
        ("belayer status --na", {"--namespace"}),
        ("belayer archive pr", {"prune"}),
    ],
)
def test_the_shell_completes_verbs_and_options(typed: str, offered: set[str], tmp_path: Path) -> None:
    asked = {"_BELAYER_COMPLETE": "complete_bash", "COMP_WORDS": typed, "COMP_CWORD": str(len(typed.split(" ")) - 1)}
    done = subprocess.run(
        COMMAND, env=environment(**asked), cwd=tmp_path, capture_output=True, text=True, timeout=DEADLINE_S, check=False
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert set(done.stdout.split()) == offered


@pytest.mark.parametrize(
    "moment",
    [
        pytest.param("class Finder:\n    def find_spec(self, name, *_):\n        if name == 'typer': strike()\n"
                     "sys.meta_path.insert(0, Finder())", id="while it is imported"),
        pytest.param("atexit.register(strike)", id="while Python tidies up"),
    ],
)  # fmt: skip
def test_ctrl_c_is_no_traceback_from_the_first_import_to_the_end(moment: str, tmp_path: Path) -> None:
    code = (
        "import atexit, os, signal, sys\n"
        "def strike(): os.kill(os.getpid(), signal.SIGINT)\n"
        f"{moment}\n"
        "sys.argv = ['belayer', '--version']\n"
        "from belayer.cli.__main__ import main\n"
        "main()\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        env=environment(),
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=DEADLINE_S,
    )
    assert (done.returncode, done.stderr) == (0 if "atexit.register" in moment else INTERRUPTED, "")
