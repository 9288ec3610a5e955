"""How fast full_checkpoint and full_restore are: `python -m benchmarks.sandbox [--quick] [--rounds N]`.

A process in a container touches 16 MB, 256 MB or 1 GB and looks at the clock every millisecond: the longest gap between
two looks is how long it stood, measured by the one who stood. Ours, `docker checkpoint` / `docker start --checkpoint`
and `runc checkpoint` take turns, round by round, so that the machine's noise hits all of them; podman takes part where
it is installed. Then ours alone: a quiet container (files only) with small and large layers, and its restore from a
spare container. `freeze_ratio_256mb` compares the time of `docker checkpoint create`, after which its caller can go on,
with how long ours stood; `stood_ratio_256mb` compares the two standing times. Medians and worst cases; the last line
is one JSON object, all figures go to benchmarks/results/sandbox.json, and with matplotlib installed a plot beside it.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import platform
import shutil
import statistics
import sys
import time
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from pathlib import Path
from typing import Any

from belayer.journal.events import SandboxSpec
from belayer.sandbox.docker_host import DockerHost, open_host
from belayer.sandbox.docker_sandbox import DockerSandbox
from belayer.sandbox.home import default_home
from belayer.sandbox.protocol import Action

RESULTS = Path(__file__).with_name("results") / "sandbox.json"
IMAGE = "belayer-base:bookworm"
SIZES_MB = (16, 256, 1024)
COMMAND_S = 180.0
BALLAST = """
import sys, time
memory = bytearray(b"x") * (int(sys.argv[1]) << 20)
open("/tmp/up", "w").close()
last, longest = time.monotonic(), 0.0
while True:
    time.sleep(0.001)
    now = time.monotonic()
    if now - last > 0.02:
        with open("/tmp/gaps", "a") as gaps:
            print(now - last, file=gaps)
    last = now
"""
LAYERS = {"empty": "true", "1000 files of 4 KB": "for i in $(seq 1000); do head -c 4096 /dev/urandom > f$i; done"}
LARGE_LAYER = {"one file of 500 MB": "head -c 500000000 /dev/zero | tr '\\\\0' x > big"}


async def command(*words: str) -> str:
    """Run a program; its output. RuntimeError with its words when it fails."""
    process = await asyncio.create_subprocess_exec(*words, stdout=-1, stderr=-1)
    try:
        out, err = await asyncio.wait_for(process.communicate(), COMMAND_S)
    except TimeoutError:
        process.kill()
        raise RuntimeError(f"{words[0]} {words[1]} took longer than {COMMAND_S:.0f} s") from None
    if process.returncode:
        raise RuntimeError(err.decode(errors="replace").strip()[-300:])
    return out.decode()


async def timed(work: Coroutine[Any, Any, Any]) -> float:
    began = time.perf_counter()
    await work
    return time.perf_counter() - began


class Ours:
    """Our containers of one run, removed at the end."""

    def __init__(self, host: DockerHost) -> None:
        self.host = host
        self.run = f"benchmark-{os.urandom(4).hex()}"
        self.spec = SandboxSpec(IMAGE, workdir="/testbed")
        self._count = 0

    def name(self) -> str:
        self._count += 1
        return f"{self.run}-{self._count}"

    async def start(self, *commands: str) -> DockerSandbox:
        made = await self.host.create(self.run, self.run, self.name(), self.spec)
        sandbox = await self.host.attach(made)
        for number, each in enumerate(commands, 1):
            done = await sandbox.run(Action(number, each, COMMAND_S))
            assert done.exit_status == 0, done.output
        return sandbox

    async def checkpoint(self, sandbox: DockerSandbox, action: int) -> tuple[str, dict[str, float]]:
        name = self.name()
        report = await self.host.checkpoint(sandbox.incarnation, name, action)
        return name, {"frozen_s": report.frozen_s, "total_s": report.total_s, "size_mb": report.size_bytes / 1e6}

    async def restore(self, checkpoint: str, action: int) -> float:
        """Seconds until the first action's answer."""
        began = time.perf_counter()
        made = await self.host.restore(self.run, self.run, self.name(), self.spec, checkpoint, action)
        async with await self.host.attach(made) as sandbox:
            await sandbox.run(Action(action + 1, "true"))
        took_s = time.perf_counter() - began
        await self.host.remove(made.name)
        return took_s


def longest_gap(root_pid: int, after: int) -> tuple[float, int]:
    """The longest gap that the ballast noted after its first `after` ones, and how many there are now."""
    with suppress(FileNotFoundError):
        gaps = Path(f"/proc/{root_pid}/root/tmp/gaps").read_text().split()
        return max(map(float, gaps[after:]), default=0.0), len(gaps)
    return 0.0, 0


async def after_gap(root_pid: int, work: Callable[[], Coroutine[Any, Any, Any]]) -> float:
    """How long the ballast stood while the work was done."""
    _, before = longest_gap(root_pid, 0)
    await work()
    await asyncio.sleep(0.05)  # it notes the gap when it runs again
    return longest_gap(root_pid, before)[0]


@asynccontextmanager
async def plain_container(size_mb: int) -> AsyncIterator[tuple[str, int]]:
    """A container as anyone would run it, with the ballast as its process 1; name and host pid."""
    name = f"benchmark-{os.urandom(4).hex()}"
    run = ["docker", "run", "--detach", "--name", name, "--network", "none", IMAGE]
    await command(*run, "python3", "-c", BALLAST, str(size_mb))
    try:
        pid = int(await command("docker", "inspect", "--format", "{{.State.Pid}}", name))
        await command("docker", "exec", name, "sh", "-c", "until [ -e /tmp/up ]; do sleep 0.01; done")
        yield name, pid
    finally:
        await command("docker", "rm", "--force", name)


async def docker_round(size_mb: int) -> dict[str, float]:
    """Docker's own checkpoint and restore."""
    async with plain_container(size_mb) as (name, pid):
        made = {}

        async def checkpoint() -> None:
            made["total_s"] = await timed(command("docker", "checkpoint", "create", "--leave-running", name, "one"))

        made["stood_s"] = await after_gap(pid, checkpoint)
        await command("docker", "kill", name)
        began = time.perf_counter()
        await command("docker", "start", "--checkpoint", "one", name)
        await command("docker", "exec", name, "true")
        made["restore_s"] = time.perf_counter() - began
        return made


async def runc_round(size_mb: int) -> dict[str, float]:
    """`runc checkpoint` on Docker's container. It has no restore that Docker would know of."""
    async with plain_container(size_mb) as (name, pid):
        identity = (await command("docker", "inspect", "--format", "{{.Id}}", name)).strip()
        images = default_home() / f"benchmark-{identity[:12]}"
        made = {}
        runc = ["runc", "--root", "/var/run/docker/runtime-runc/moby", "checkpoint", "--leave-running"]
        path = {**os.environ, "PATH": f"{default_home() / 'criu'}:{os.environ['PATH']}"}

        async def checkpoint() -> None:
            process = await asyncio.create_subprocess_exec(
                *runc, "--image-path", str(images), "--work-path", str(images), identity, env=path, stdout=-1, stderr=-1
            )
            _, err = await asyncio.wait_for(process.communicate(), COMMAND_S)
            if process.returncode:
                raise RuntimeError(err.decode(errors="replace")[-300:])

        try:
            began = time.perf_counter()
            made["stood_s"] = await after_gap(pid, checkpoint)
            made["total_s"] = time.perf_counter() - began
        finally:
            shutil.rmtree(images, ignore_errors=True)
        return made


class Podman:
    """Podman's checkpoint and restore, with runc (its other runtime, crun, comes without CRIU on Debian) and our CRIU.

    Its images and containers lie in a folder of their own, removed at the end.
    """

    def __init__(self) -> None:
        folder = default_home() / "benchmark-podman"
        self._folder = folder
        self._words = ["env", f"PATH={default_home() / 'criu'}:{os.environ['PATH']}", "podman", "--runtime", "runc"]
        self._words += ["--root", str(folder / "root"), "--runroot", str(folder / "run")]

    async def __aenter__(self) -> Podman:
        self._folder.mkdir(exist_ok=True)
        image = self._folder / "image.tar"
        await command("docker", "save", "--output", str(image), IMAGE)
        await self._do("load", "--input", str(image))
        image.unlink()
        return self

    async def __aexit__(self, *_: object) -> None:
        with suppress(RuntimeError):
            await self._do("rm", "--all", "--force", "--time", "0")
            await self._do("rmi", "--all", "--force")
        shutil.rmtree(self._folder, ignore_errors=True)

    async def round(self, size_mb: int) -> dict[str, float]:
        limits = ["--ulimit", "nofile=1024:1024", "--ulimit", "nproc=4096:4096"]  # podman's own need more rights
        name = f"benchmark-{os.urandom(4).hex()}"
        await self._do(
            *("run", "--detach", "--name", name, "--network", "none", *limits, IMAGE, "python3", "-c", BALLAST),
            str(size_mb),
        )
        made: dict[str, float] = {}
        try:
            pid = int(await self._do("inspect", "--format", "{{.State.Pid}}", name))
            await self._do("exec", name, "sh", "-c", "until [ -e /tmp/up ]; do sleep 0.01; done")

            async def checkpoint() -> None:
                made["total_s"] = await timed(self._do("container", "checkpoint", "--leave-running", name))

            made["stood_s"] = await after_gap(pid, checkpoint)
            await self._do("container", "checkpoint", name)  # it restores only what it has stopped itself
            began = time.perf_counter()
            await self._do("container", "restore", name)
            await self._do("exec", name, "true")
            made["restore_s"] = time.perf_counter() - began
        finally:
            await self._do("rm", "--force", "--time", "0", name)
        return made

    async def _do(self, *words: str) -> str:
        return await command(*self._words, *words)


async def our_round(ours: Ours, size_mb: int) -> dict[str, float]:
    sandbox = await ours.start(
        f"cat > /tmp/ballast.py <<'END'\n{BALLAST}\nEND\n"
        f"python3 /tmp/ballast.py {size_mb} & until [ -e /tmp/up ]; do sleep 0.01; done"
    )
    made: dict[str, float] = {}
    names: list[str] = []

    async def checkpoint() -> None:
        name, report = await ours.checkpoint(sandbox, 1)
        names.append(name)
        made.update(report)

    made["stood_s"] = await after_gap(sandbox.incarnation.pid, checkpoint)
    await sandbox.close()
    await ours.host.remove(sandbox.incarnation.name)
    made["restore_s"] = await ours.restore(names[0], 1)
    await ours.host.remove_checkpoint(names[0])
    return made


async def quiet_rounds(ours: Ours, layer: str, rounds: int) -> list[dict[str, float]]:
    """A container of files alone: captured after each of some small actions, restored from a spare one."""
    sandbox = await ours.start(layer)
    found = []
    for number in range(2, rounds + 2):
        await sandbox.run(Action(number, f"echo {number} >> notes"))
        name, made = await ours.checkpoint(sandbox, number)
        await ours.host.spares_settled()
        made["restore_s"] = await ours.restore(name, number)
        await ours.host.spares_settled()
        found.append(made)
    await sandbox.close()
    await ours.host.remove(sandbox.incarnation.name)
    return found


def summary(rounds: list[dict[str, float]]) -> dict[str, dict[str, float]]:
    """Median and worst of every figure."""
    keys = sorted({key for each in rounds for key in each})
    values = {key: [each[key] for each in rounds if key in each] for key in keys}
    return {key: {"median": statistics.median(found), "worst": max(found)} for key, found in values.items()}


async def measure(options: argparse.Namespace) -> dict[str, Any]:
    found: dict[str, Any] = {"processes": {}, "quiet": {}, "left_out": {}}
    async with open_host(spares=1) as host, AsyncExitStack() as stack:
        ours = Ours(host)
        ways: dict[str, Callable[[int], Coroutine[Any, Any, dict[str, float]]]] = {
            "ours": lambda size_mb: our_round(ours, size_mb),
            "docker": docker_round,
            "runc": runc_round,
        }
        if shutil.which("podman") is None:
            found["left_out"]["podman"] = "not installed"
        else:
            ways["podman"] = (await stack.enter_async_context(Podman())).round
        try:
            for size_mb in SIZES_MB[: 2 if options.quick else 3]:
                rounds: dict[str, list[dict[str, float]]] = {way: [] for way in ways}
                for turn in range(1 if size_mb == SIZES_MB[-1] else options.rounds):
                    for way, work in ways.items():
                        try:
                            rounds[way].append(await work(size_mb))
                        except RuntimeError as error:
                            found["left_out"][f"{way}, {size_mb} MB"] = str(error)
                        print(f"{size_mb} MB, round {turn + 1}, {way}: {rounds[way][-1:]}", file=sys.stderr, flush=True)
                if size_mb == SIZES_MB[-1]:
                    rounds["ours"] += [await our_round(ours, size_mb) for _ in range(options.rounds - 1)]
                found["processes"][size_mb] = {way: summary(each) for way, each in rounds.items() if each}
            for label, layer in (LAYERS if options.quick else LAYERS | LARGE_LAYER).items():
                found["quiet"][label] = summary(await quiet_rounds(ours, layer, 3 * options.rounds))
                print(f"quiet, {label}: {found['quiet'][label]}", file=sys.stderr, flush=True)
        finally:
            await host.remove_run(ours.run)
    return found


def headline(found: dict[str, Any]) -> dict[str, Any]:
    """The figures that the project's measures name; None where this run did not take them."""

    def figure(size_mb: int, way: str, key: str) -> float | None:
        with suppress(KeyError):
            return found["processes"][size_mb][way][key]["median"]
        return None

    def ratio(theirs: str, ours: str) -> float | None:
        docker, own = figure(256, "docker", theirs), figure(256, "ours", ours)
        return docker / own if docker and own else None

    return {
        "freeze_s_16mb": figure(16, "ours", "stood_s"),
        "freeze_ratio_256mb": ratio("total_s", "stood_s"),
        "stood_ratio_256mb": ratio("stood_s", "stood_s"),
        "restore_ratio_256mb": ratio("restore_s", "restore_s"),
        "lazy_first_action_s_256mb": figure(256, "ours", "restore_s"),
        "lazy_first_action_s_1gb": figure(1024, "ours", "restore_s"),
        "quiet_frozen_s": found["quiet"]["empty"]["frozen_s"]["median"],
        "quiet_restore_s": found["quiet"]["empty"]["restore_s"]["median"],
    }


def plot(found: dict[str, Any], path: Path) -> bool:
    """Bars of how long the processes stood and of the restore. False without matplotlib."""
    try:
        from matplotlib import pyplot  # pyright: ignore[reportMissingImports]
    except ImportError:
        return False
    figure, axes = pyplot.subplots(1, 2, figsize=(10, 4))
    for axis, key, title in zip(axes, ("stood_s", "restore_s"), ("processes stood, s", "restore, s"), strict=True):
        for place, way in enumerate(("ours", "runc", "podman", "docker")):
            values = [found["processes"][size].get(way, {}).get(key, {}).get("median") for size in found["processes"]]
            places = [n + (place - 1.5) * 0.2 for n in range(len(values))]
            axis.bar(places, [value or 0 for value in values], 0.2, label=way)
        axis.set_xticks(range(len(found["processes"])), [f"{size} MB" for size in found["processes"]])
        axis.set_yscale("log")
        axis.set_title(title)
        axis.legend()
    figure.savefig(path)
    return True


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="without 1 GB and without the large layer")
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    found = asyncio.run(measure(options))
    machine = {"kernel": platform.release(), "cpus": os.cpu_count(), "load": os.getloadavg(), "python": sys.version}
    RESULTS.parent.mkdir(exist_ok=True)
    RESULTS.write_text(json.dumps({"machine": machine, "headline": headline(found), **found}, indent=1) + "\n")
    plot(found, RESULTS.with_suffix(".png"))
    print(json.dumps(headline(found)))


if __name__ == "__main__":
    main()
