"""Settings: file, environment, flag, in rising order; a file that is wrong says where, what was expected and found."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from belayer.cli.settings import FILE, SETTINGS, defaults, read_settings, set_home
from belayer.errors import InputError
from tests.cli.command import assert_one_line_error, belayer

NOWHERE = "unix:///nosuch/{}.sock"


def written(folder: Path, text: str) -> Path:
    path = folder / FILE
    path.write_text(text)
    return path


def test_no_file_is_no_settings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert read_settings(None) == {}


def test_every_key_is_read(tmp_path: Path) -> None:
    path = written(tmp_path, "".join(f'{key} = "value of {key}"\n' for key in SETTINGS))
    assert read_settings(path) == {key: f"value of {key}" for key in SETTINGS}


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ('journal = "x"', "unknown key 'journal'; expected one of journal_url"),
        ("journal_url = 6379", "journal_url: expected a text"),
        ("journal_url = 6379", "found int 6379"),
        ('namespace = ""', "namespace: expected a text"),
        ("[home]\npath = 1", "home: expected a text"),
        ("journal_url = ", "not TOML"),
    ],
)
def test_a_wrong_file_says_what_is_wrong(tmp_path: Path, text: str, said: str) -> None:
    path = written(tmp_path, text)
    with pytest.raises(InputError) as caught:
        read_settings(path)
    assert said in str(caught.value)
    assert str(path) in str(caught.value)


def test_a_file_that_was_asked_for_must_be_there(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="there is no such file"):
        read_settings(tmp_path / "nosuch.toml")
    with pytest.raises(InputError, match="cannot be read"):
        read_settings(tmp_path)


def test_settings_become_options_of_every_verb() -> None:
    assert defaults({"journal_url": "u", "namespace": "n"}, ["a", "b"]) == {
        "a": {"url": "u", "namespace": "n"},
        "b": {"url": "u", "namespace": "n"},
    }


@pytest.mark.parametrize("verb", ["actors --engine-log logs", "memory start", "gateway --worker w"])
def test_one_setting_tells_all_how_long_a_weight_update_may_be_silent(verb: str, tmp_path: Path) -> None:
    written(tmp_path, 'update_s = "an hour"')
    for done in (belayer(*verb.split(), cwd=tmp_path), belayer(*verb.split(), BELAYER_UPDATE_S="an hour")):
        assert_one_line_error(done, "'--update-s'", "should be a valid number")


def test_the_environment_goes_before_the_file(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BELAYER_HOME", "/from/the/environment")
    set_home({"home": "/from/the/file"})
    assert os.environ["BELAYER_HOME"] == "/from/the/environment"


def test_rising_order(tmp_path: Path) -> None:
    """Each source names a socket that is not there; the complaint says which one was used."""
    written(tmp_path, f'journal_url = "{NOWHERE.format("file")}"\n')
    by_environment = {"BELAYER_JOURNAL_URL": NOWHERE.format("environment")}
    flag = ("--url", NOWHERE.format("flag"))
    assert_one_line_error(belayer("status", cwd=tmp_path), "/nosuch/file.sock")
    assert_one_line_error(belayer("status", cwd=tmp_path, **by_environment), "/nosuch/environment.sock")
    assert_one_line_error(belayer("status", *flag, cwd=tmp_path, **by_environment), "/nosuch/flag.sock")


def test_config_names_another_file(tmp_path: Path) -> None:
    (tmp_path / "other.toml").write_text(f'journal_url = "{NOWHERE.format("other")}"\n')
    assert_one_line_error(belayer("--config", "other.toml", "status", cwd=tmp_path), "/nosuch/other.sock")
    assert_one_line_error(belayer("--config", "nosuch.toml", "status", cwd=tmp_path), "nosuch.toml")
