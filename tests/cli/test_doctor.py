"""`belayer doctor` on machines that are really broken: each finding says what to do, and nothing hangs or raises."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest
import typer
from typer.testing import CliRunner

from belayer.cli import probes
from belayer.cli.doctor import doctor, examine, ready
from belayer.cli.probes import Finding
from tests.waiting import DEADLINE_S

app = typer.Typer()
app.command()(doctor)


class Report(msgspec.Struct):
    ready: bool
    findings: list[Finding]


def program(folder: Path, name: str, text: str) -> None:
    path = folder / name
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)


def by_name(findings: list[Finding]) -> dict[str, Finding]:
    return {finding.name: finding for finding in findings}


def test_without_any_redis_it_says_how_to_get_one(tmp_path: Path) -> None:
    # In a process of its own, whose PATH and packages hold no server.
    code = (
        "import sys, msgspec; from belayer.cli import probes\n"
        "sys.path = [p for p in sys.path if 'site-packages' not in p and 'dist-packages' not in p]\n"
        "sys.stdout.buffer.write(msgspec.json.encode(probes.probe_server()))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], env={"PATH": str(tmp_path)}, capture_output=True, timeout=DEADLINE_S, check=True
    )
    finding = msgspec.json.decode(done.stdout, type=Finding)
    assert not finding.ok
    assert finding.needed
    assert "redis-server" in finding.remedy


@pytest.mark.parametrize(
    ("banner", "ok", "said"),
    [
        ("Redis server v=6.0.16 sha=0 bits=64", False, "6.0.16"),
        ("Redis server v=7.0.15 sha=0 bits=64", True, "no WAITAOF"),
        ("Redis server v=8.0.2 sha=0 bits=64", True, "with WAITAOF"),
        ("something else", False, "unknown version"),
    ],
)
def test_the_server_that_would_be_started_is_judged_by_its_version(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, banner: str, ok: bool, said: str
) -> None:
    program(tmp_path, "redis-server", f"echo '{banner}'")
    monkeypatch.setenv("PATH", str(tmp_path))
    finding = probes.probe_server()
    assert finding.ok is ok
    assert said in finding.detail
    assert bool(finding.remedy) is not ok


def test_a_server_that_does_not_start_is_a_finding(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program(tmp_path, "redis-server", "echo 'libjemalloc.so.2: cannot open shared object file' >&2; exit 127")
    monkeypatch.setenv("PATH", str(tmp_path))
    finding = probes.probe_server()
    assert not finding.ok
    assert "libjemalloc" in finding.detail
    assert finding.remedy


def test_a_program_that_hangs_is_given_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fifo = tmp_path / "fifo"
    os.mkfifo(fifo)
    program(tmp_path, "redis-server", f"read never < {fifo}")
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(probes, "PROBE_S", 0.2)
    finding = probes.probe_server()
    assert not finding.ok
    assert "did not answer" in finding.detail


def test_a_dead_docker_socket_names_the_setting(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DOCKER_HOST", f"unix://{tmp_path}/docker.sock")
    daemon, image = probes.probe_docker(), probes.probe_image()
    assert not daemon.ok
    assert "DOCKER_HOST" in daemon.detail
    assert "unset DOCKER_HOST" in daemon.remedy
    assert not image.ok
    assert "scripts/image.sh" in image.remedy


def test_without_docker_it_names_the_set_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("DOCKER_HOST", raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert "make setup" in probes.probe_docker().remedy
    assert "apt-get install runc" in probes.probe_runc().remedy


@pytest.mark.parametrize(
    ("facts", "ok", "said"),
    [
        ("27.0|belayer runc |overlay2|/data", True, ""),
        ("27.0|io.containerd.runc.v2 runc |overlay2|/data", False, "SIGHUP"),
        ("27.0|belayer runc |vfs|/data", False, "overlay2"),
        ("|||", False, "scripts/dockerd.sh start"),
    ],
)
def test_a_daemon_that_cannot_restore_is_told_from_one_that_can(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, facts: str, ok: bool, said: str
) -> None:
    program(tmp_path, "docker", f"echo '{facts}'")
    monkeypatch.setenv("PATH", str(tmp_path))
    finding = probes.probe_docker()
    assert finding.ok is ok
    assert said in finding.remedy


def test_a_home_without_criu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BELAYER_HOME", str(tmp_path))
    criu, pycriu, lazy = probes.probe_criu(), probes.probe_pycriu(), probes.probe_criu_lazy()
    assert not criu.ok
    assert "scripts/criu.sh" in criu.remedy
    assert not pycriu.ok
    assert "scripts/criu.sh" in pycriu.remedy
    assert not lazy.ok
    assert not lazy.needed


def test_a_criu_that_is_too_old(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "criu").mkdir()
    program(tmp_path / "criu", "criu", "echo 'Version: 3.17.1'")
    monkeypatch.setenv("BELAYER_HOME", str(tmp_path))
    finding = probes.probe_criu()
    assert not finding.ok
    assert "3.17.1" in finding.detail
    assert "4.2" in finding.remedy


def test_a_criu_whose_check_fails_reports_what_it_names(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "criu").mkdir()
    failing = "echo 'Error: CLONE_NEWTIME is not supported' >&2; exit 1"
    program(tmp_path / "criu", "criu", f'[ "$1" = --version ] && echo "Version: 4.2.1" && exit\n{failing}')
    monkeypatch.setenv("BELAYER_HOME", str(tmp_path))
    finding = probes.probe_criu()
    assert not finding.ok
    assert "CLONE_NEWTIME" in finding.detail
    assert "kernel" in finding.remedy


def test_a_criu_that_lacks_the_program_it_calls(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "criu").mkdir()
    program(tmp_path / "criu", "criu", "echo 'Version: 4.2.1'")
    monkeypatch.setenv("BELAYER_HOME", str(tmp_path))
    monkeypatch.setenv("PATH", str(tmp_path))
    finding = probes.probe_criu()
    assert not finding.ok
    assert "iproute2" in finding.remedy


def test_a_home_that_is_not_there_yet_is_judged_by_its_parent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BELAYER_HOME", str(tmp_path / "not" / "yet"))
    disk = probes.probe_disk()
    assert "GiB free" in disk.detail
    assert not disk.detail.startswith("unknown")
    probes.probe_reflink()
    assert list(tmp_path.iterdir()) == []


def test_a_full_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BELAYER_HOME", str(tmp_path))
    monkeypatch.setattr(probes, "LEAST_FREE_BYTES", 1 << 60)
    finding = probes.probe_disk()
    assert not finding.ok
    assert "BELAYER_HOME" in finding.remedy


def test_every_no_has_a_remedy_and_no_yes_has_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BELAYER_HOME", str(tmp_path))
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("DOCKER_HOST", raising=False)
    for finding in examine():
        assert finding.detail
        assert bool(finding.remedy) is not finding.ok, finding
        assert "\n" not in finding.remedy


def test_only_what_the_main_job_needs_decides() -> None:
    good = Finding("Docker daemon", True, "27.0", "")
    assert ready([good, Finding("GPU", False, "none", "get one", needed=False)])
    assert not ready([good, Finding("CRIU", False, "none", "get it")])


def test_json_is_one_object_and_the_exit_status_agrees(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BELAYER_HOME", str(tmp_path))
    result = CliRunner().invoke(app, ["--json"])
    report = msgspec.json.decode(result.stdout, type=Report)
    assert result.exit_code == 1
    assert not report.ready
    assert not by_name(report.findings)["CRIU"].ok


def test_the_table_names_what_is_missing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BELAYER_HOME", str(tmp_path))
    result = CliRunner().invoke(app, [])
    assert result.exit_code == 1
    assert "cannot run here yet" in " ".join(result.stdout.split())


def test_it_says_what_is_never_captured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BELAYER_HOME", str(tmp_path))
    report = msgspec.json.decode(CliRunner().invoke(app, ["--json"]).stdout, type=Report)
    said = by_name(report.findings)["Checkpoints"]
    assert said.ok and not said.needed
    assert "never the contents of bind mounts and volumes" in said.detail


@pytest.mark.sandbox
def test_a_machine_after_set_up_is_ready() -> None:
    findings = examine()
    assert ready(findings), [finding for finding in findings if finding.needed and not finding.ok]


def test_an_interpreter_without_sglang_and_one_without_our_plugin_are_found_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for answer, said in (
        ("exit 1", "install SGLang there"),
        ("echo 0.5.16; echo belayer.gpu.plugin:register", "the plugin knows 0.5.17"),
        ("echo 0.5.17; echo other.plugin:register", "puts the plugin there"),
        ("echo 0.5.17; echo belayer.gpu.plugin:register", ""),
    ):
        program(tmp_path, "python", answer)
        monkeypatch.setenv("BELAYER_SGLANG_PYTHON", str(tmp_path / "python"))
        finding = probes.probe_sglang()
        assert said in finding.remedy
        assert (finding.ok, finding.needed) == (said == "", False)
    monkeypatch.setenv("BELAYER_SGLANG_PYTHON", str(tmp_path / "nosuch"))
    assert "no interpreter" in probes.probe_sglang().detail


def test_a_gpu_whose_xid_errors_nobody_would_hear_of_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert probes.probe_gpu_errors().detail == "no GPU to ask"
    program(tmp_path, "nvidia-smi", "exit 1")
    for answer, said in (
        ("echo 'No module named pynvml' >&2; exit 1", "No module named pynvml"),
        ("echo 0000:C1:00.0: NVML offers no XID events", "0000:C1:00.0: NVML offers no XID events"),
        ("exit 0", "XID events and ECC errors are watched"),
    ):
        program(tmp_path, "python", f'[ "$*" = "-m belayer.gpu.health" ] || exit 9\n{answer}')
        monkeypatch.setenv("BELAYER_SGLANG_PYTHON", str(tmp_path / "python"))
        finding = probes.probe_gpu_errors()
        assert finding.detail == said and finding.ok is (answer == "exit 0") and not finding.needed
        assert bool(finding.remedy) is not finding.ok
