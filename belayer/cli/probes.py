"""What `belayer doctor` looks at: one small function a question, each answering with a Finding.

Invariant: a probe changes nothing (two temporary files in Belayer's folder apart) and always ends: whatever it asks of
another program has a deadline, and a program that is missing, fails or hangs is a finding, never an error.
"""

from __future__ import annotations

import errno
import fcntl
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from belayer.gpu.plugin import KNOWN_VERSIONS
from belayer.gpu.sglang_cpu import PYTHON_VARIABLE, find_python
from belayer.journal.embedded import ServerStartError, find_server
from belayer.sandbox.home import default_home

PROBE_S = 10.0
"""How long one program may take to answer."""
LEAST_FREE_BYTES = 4 << 30
BASE_IMAGE = "belayer-base:bookworm"
_DOCKER_FACTS = "{{.ServerVersion}}|{{range $name, $_ := .Runtimes}}{{$name}} {{end}}|{{.Driver}}|{{.DockerRootDir}}"
_PLUGIN_GROUP = "sglang.srt.plugins"
_FICLONE = 0x40049409
"""ioctl_ficlone(2): share one file's blocks with another."""


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing that this machine can or cannot do."""

    name: str
    ok: bool
    detail: str
    remedy: str
    """What to do when it is not ok, in one sentence; empty when it is."""
    needed: bool = True
    """Whether the main job (recovery of engines and sandboxes) needs it."""


class _NoAnswerError(Exception):
    """A program is missing, failed or did not answer; the message says which, in a few words."""


def _ask(*command: str) -> str:
    """What the program prints, or _NoAnswerError."""
    try:
        done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=PROBE_S)
    except subprocess.TimeoutExpired:
        raise _NoAnswerError(f"{command[0]} did not answer within {PROBE_S:.0f} s") from None
    except OSError as error:
        raise _NoAnswerError(f"{command[0]}: {error.strerror}") from None
    if done.returncode != 0:
        lines = (done.stderr.strip() or done.stdout.strip()).splitlines()
        raise _NoAnswerError(lines[-1] if lines else f"{command[0]} ended with status {done.returncode}")
    return done.stdout.strip()


def probe_python() -> Finding:
    version = ".".join(map(str, sys.version_info[:3]))
    ok = sys.version_info >= (3, 11)
    return Finding("Python", ok, f"{version}, {sys.executable}", "" if ok else "use Python 3.11 or newer")


def probe_root() -> Finding:
    ok = os.geteuid() == 0
    remedy = "" if ok else "run Belayer as root: CRIU and Docker's files need it"
    return Finding("Root", ok, f"user id {os.geteuid()}", remedy)


def probe_server() -> Finding:
    """The Redis or Valkey that Belayer would start when no server is configured."""
    try:
        path = find_server()
        text = _ask(str(path), "--version")
    except ServerStartError as error:
        return Finding("Redis or Valkey", False, error.what, error.remedy)
    except _NoAnswerError as error:
        return Finding("Redis or Valkey", False, str(error), "`apt-get install redis-server` puts one on PATH")
    found = re.search(r"v=(\d+)\.(\d+)\S*", text)
    version = [int(part) for part in found.groups()] if found else [0]
    # XAUTOCLAIM came with Redis 6.2, WAITAOF with 7.2; Valkey began at 7.2.
    ok = version >= [6, 2]
    shown = found[0].removeprefix("v=") if found else "of an unknown version"
    durability = "with WAITAOF" if version >= [7, 2] else "no WAITAOF, so no durability mode fsync"
    remedy = "" if ok else "put Redis 6.2 or newer, or Valkey, on PATH (`apt-get install redis-server`)"
    return Finding("Redis or Valkey", ok, f"{path.name} {shown} at {path}, {durability}", remedy)


def probe_docker() -> Finding:
    name = "Docker daemon"
    try:
        text = _ask("docker", "info", "--format", _DOCKER_FACTS)
    except _NoAnswerError as error:
        where = f" (DOCKER_HOST={os.environ['DOCKER_HOST']})" if os.environ.get("DOCKER_HOST") else ""
        remedy = "start the daemon with `scripts/dockerd.sh start`, or install it with `make setup`, as root"
        if where:
            remedy = "start the daemon that DOCKER_HOST names, or unset DOCKER_HOST and run `scripts/dockerd.sh start`"
        return Finding(name, False, f"{error}{where}", remedy)
    version, runtimes, driver, folder = (text.split("|") + [""] * 4)[:4]
    if not version:  # older clients print an empty server when none answers, and end with status 0
        return Finding(name, False, "no daemon answers", "start the daemon with `scripts/dockerd.sh start`, as root")
    detail = f"{version}, storage {driver}, data in {folder}"
    if "belayer" not in runtimes.split():
        path = default_home() / "runtime" / "runc"
        setting = f'"runtimes": {{"belayer": {{"path": "{path}"}}}}'
        remedy = f"add {setting} to /etc/docker/daemon.json and send dockerd SIGHUP"
        return Finding(name, False, f"{detail}, without the runtime 'belayer': it restores no container", remedy)
    if driver != "overlay2":
        remedy = 'set "storage-driver": "overlay2" in the daemon\'s configuration, on a file system that it supports'
        return Finding(name, False, f"{detail}: Belayer reads and fills the layers of overlay2 only", remedy)
    return Finding(name, True, f"{detail}, with the runtime 'belayer'", "")


def probe_image() -> Finding:
    try:
        digest = _ask("docker", "image", "inspect", "--format", "{{.Id}}", BASE_IMAGE)
    except _NoAnswerError as error:
        return Finding("Sandbox image", False, str(error), "once Docker runs, build it with `scripts/image.sh`")
    return Finding("Sandbox image", True, f"{BASE_IMAGE}, {digest[:19]}", "")


def probe_runc() -> Finding:
    try:
        return Finding("runc", True, _ask("runc", "--version").splitlines()[0], "")
    except _NoAnswerError as error:
        return Finding("runc", False, str(error), "`apt-get install runc` (docker.io brings it along)")


def probe_criu() -> Finding:
    criu = str(default_home() / "criu" / "criu")
    try:
        found = re.search(r"Version: (\d+)\.(\d+)\S*", _ask(criu, "--version"))
        shown = found[0].removeprefix("Version: ") if found else "of an unknown version"
        if not found or (int(found[1]), int(found[2])) < (4, 2):
            remedy = f"remove {criu} and run `scripts/criu.sh` as root: 4.2 or newer is needed"
            return Finding("CRIU", False, f"{shown} at {criu}", remedy)
        _ask(criu, "check")
    except _NoAnswerError as error:
        remedy = "put it there with `scripts/criu.sh`, as root; if its check fails, the kernel lacks what it names"
        return Finding("CRIU", False, str(error), remedy)
    if shutil.which("ip") is None:  # it fails only in the middle of a dump
        return Finding("CRIU", False, "it calls `ip`, which is not on PATH", "`apt-get install iproute2`")
    return Finding("CRIU", True, f"{shown} at {criu}, its check passes", "")


def _criu_feature(name: str, feature: str, gives: str, remedy: str) -> Finding:
    criu = default_home() / "criu" / "criu"
    if not criu.exists():
        return Finding(name, False, "no CRIU to ask", "put CRIU there first", needed=False)
    try:
        _ask(str(criu), "check", "--feature", feature)
    except _NoAnswerError as error:
        return Finding(name, False, str(error), remedy, needed=False)
    return Finding(name, True, gives, "", needed=False)


def probe_criu_lazy() -> Finding:
    remedy = "use a kernel with CONFIG_USERFAULTFD; without it restores read all memory before the first instruction"
    return _criu_feature("CRIU lazy restore", "uffd-noncoop", "memory can follow after the restore", remedy)


def probe_criu_tracking() -> Finding:
    remedy = "use a kernel with CONFIG_MEM_SOFT_DIRTY; without it every checkpoint writes all memory, which is correct"
    return _criu_feature("CRIU memory tracking", "mem_dirty_track", "a checkpoint can hold only what changed", remedy)


def probe_pycriu() -> Finding:
    folder = default_home() / "criu" / "python"
    # In a process of its own: pycriu stays out of this one.
    code = "import sys; sys.path.insert(0, sys.argv[1]); import pycriu; print(pycriu.__file__)"
    try:
        where = _ask(sys.executable, "-c", code, str(folder))
    except _NoAnswerError as error:
        missing = "protobuf" if "google" in str(error) else "pycriu"
        remedy = "`pip install protobuf`" if missing == "protobuf" else "put it there with `scripts/criu.sh`, as root"
        return Finding("pycriu", False, str(error), remedy)
    return Finding("pycriu", True, where, "")


def probe_cgroup() -> Finding:
    root = Path("/sys/fs/cgroup")
    if (root / "cgroup.controllers").exists():
        return Finding("cgroup", True, "version 2", "")
    if (root / "freezer").is_dir():
        return Finding("cgroup", True, "version 1", "")
    return Finding("cgroup", False, f"nothing usable at {root}", f"as root, `mount -t cgroup2 cgroup2 {root}`")


def probe_left_out() -> Finding:
    """What no checkpoint ever holds; docs/sandbox.md has the reasons."""
    never = (
        "never the contents of bind mounts and volumes (each checkpoint's event and manifest name theirs), "
        "connections to the outside, or processes of `docker exec`"
    )
    return Finding("Checkpoints", True, f"hold a container's files and processes, {never}", "", needed=False)


def _existing(path: Path) -> Path:
    """The path, or its nearest parent that exists."""
    while not path.exists():
        path = path.parent
    return path


def _file_system(folder: Path) -> str:
    """The type of the file system that holds the folder: the mount with the longest path above it, proc(5)."""
    best, kind = "", "unknown"
    for line in Path("/proc/self/mounts").read_text().splitlines():
        _, point, found, *_ = line.split()
        if len(point) >= len(best) and folder.resolve().is_relative_to(point):
            best, kind = point, found
    return kind


def probe_disk() -> Finding:
    home = default_home()
    folder = _existing(home)
    free_bytes = shutil.disk_usage(folder).free
    detail = f"{home}: {_file_system(folder)}, {free_bytes / (1 << 30):.0f} GiB free"
    if free_bytes < LEAST_FREE_BYTES:
        need = f"free {LEAST_FREE_BYTES >> 30} GiB there or set BELAYER_HOME to a folder on a larger disk"
        return Finding("Disk", False, detail, need)
    if not os.access(folder, os.W_OK):
        return Finding("Disk", False, f"{detail}, not writable", "run as root or set BELAYER_HOME to a folder of yours")
    return Finding("Disk", True, detail, "")


def probe_reflink() -> Finding:
    """Tried, not guessed from the file system's name: xfs and btrfs can be made without it."""
    remedy = "put BELAYER_HOME on btrfs or xfs: without shared blocks a checkpoint copies its files, which is correct"
    try:
        with (
            tempfile.NamedTemporaryFile(dir=_existing(default_home())) as source,
            tempfile.NamedTemporaryFile(dir=_existing(default_home())) as target,
        ):
            source.write(bytes(4096))
            source.flush()
            fcntl.ioctl(target.fileno(), _FICLONE, source.fileno())
    except OSError as error:
        unsupported = error.errno in (errno.EOPNOTSUPP, errno.ENOTTY, errno.EINVAL)
        detail = "the file system cannot share blocks" if unsupported else str(error)
        return Finding("Reflink", False, detail, remedy, needed=False)
    return Finding("Reflink", True, "files are copied by sharing blocks", "", needed=False)


def probe_gpu() -> Finding:
    try:
        text = _ask("nvidia-smi", "--query-gpu=name,memory.total,driver_version", "--format=csv,noheader")
    except _NoAnswerError as error:
        return Finding("GPU", False, str(error), "only real engines need one, with NVIDIA's driver", needed=False)
    return Finding("GPU", True, "; ".join(text.splitlines()), "", needed=False)


def probe_gpu_errors() -> Finding:
    """Whether the memory server would hear of XID errors. Asked in the interpreter that has NVML's package."""
    name = "GPU errors"
    if shutil.which("nvidia-smi") is None:
        return Finding(name, False, "no GPU to ask", "only real engines on a GPU need it", needed=False)
    python = str(find_python() or sys.executable)
    try:
        without = _ask(python, "-m", "belayer.gpu.health").splitlines()
    except _NoAnswerError as error:
        remedy = f"`{python} -m pip install nvidia-ml-py`, and look at `nvidia-smi`: no engine starts without NVML"
        return Finding(name, False, str(error), remedy, needed=False)
    if without:
        remedy = "let the virtual machine or container have XID events; without them ECC errors alone are seen"
        return Finding(name, False, "; ".join(without), remedy, needed=False)
    return Finding(name, True, "XID events and ECC errors are watched", "", needed=False)


def probe_sglang() -> Finding:
    """SGLang with our plugin in it: needed for real engines alone. Nothing of it is imported."""
    name, python = "SGLang", find_python()
    if python is None:
        remedy = f"`scripts/sglang_cpu.sh` installs it for the CPU; or set {PYTHON_VARIABLE} to an interpreter with it"
        return Finding(name, False, "no interpreter with SGLang is known", remedy, needed=False)
    code = (
        "from importlib.metadata import entry_points, version; print(version('sglang'));"
        f"print(*[e.value for e in entry_points(group='{_PLUGIN_GROUP}')])"
    )
    try:
        version, plugins = (_ask(str(python), "-c", code) + "\n").splitlines()[:2]
    except (_NoAnswerError, ValueError) as error:
        return Finding(name, False, f"{python}: {error}", "install SGLang there", needed=False)
    detail = f"{version} in {python}"
    if version not in KNOWN_VERSIONS:
        return Finding(name, False, detail, f"the plugin knows {', '.join(KNOWN_VERSIONS)}", needed=False)
    if "belayer.gpu.plugin:register" not in plugins.split():
        remedy = f"`{python} -m pip install --no-deps belayer` puts the plugin there"
        return Finding(name, False, f"{detail}, without Belayer's plugin", remedy, needed=False)
    return Finding(name, True, f"{detail}, with Belayer's plugin", "", needed=False)


PROBES: tuple[Callable[[], Finding], ...] = (
    probe_python,
    probe_root,
    probe_server,
    probe_docker,
    probe_image,
    probe_runc,
    probe_criu,
    probe_pycriu,
    probe_cgroup,
    probe_disk,
    probe_criu_lazy,
    probe_criu_tracking,
    probe_reflink,
    probe_left_out,
    probe_gpu,
    probe_gpu_errors,
    probe_sglang,
)
