"""Containers as Docker keeps them, through docker-py. Every call blocks (callers use threads) and has a deadline.

A daemon that is down is a HostUnfitError; anything else that Docker refuses is a DockerRefusedError with its words.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from belayer.errors import HostUnfitError, SandboxError
from belayer.sandbox import options
from belayer.sandbox.criu import errors_in
from belayer.sandbox.owner import Owner
from belayer.sandbox.runtime import Runtime

if TYPE_CHECKING:
    import docker

RUN_LABEL = "belayer.run"
TRAJECTORY_LABEL = "belayer.trajectory"
HOME_LABEL = "belayer.home"
CALL_TIMEOUT_S = 60
REMOVE_TRIES = 3
RUNTIME = "belayer"
RESTORE_OPTIONS = ("--tcp-established", "--file-locks", "--ext-unix-sk", "--empty-ns network")
"""For `runc restore`; they go with the options of the dump in `criu.py`."""
MOUNT_POINT = "/.belayer"
RUNNER = Path(__file__).with_name("runner.py")
START_DAEMON = "start it (`scripts/dockerd.sh start`, or `systemctl start docker`)"


class DockerRefusedError(SandboxError):
    """Docker did not do what it was asked to; the message is Docker's."""


@dataclass(frozen=True, slots=True)
class Container:
    """What we need to know of one container."""

    id: str
    name: str
    pid: int
    """0 when it does not run."""
    image_digest: str
    upper: Path
    merged: Path
    volumes: tuple[str, ...]
    """Where folders of the host and volumes are mounted, but ours: what a checkpoint leaves out."""
    given: Path
    """Docker's folder of it, with the files that it binds (`given.py`)."""

    @property
    def devices(self) -> set[int]:
        """The st_dev of its files. It must run."""
        return {path.stat().st_dev for path in (self.upper, self.merged)}


class Containers:
    """The containers of one Docker daemon that belong to one Belayer folder."""

    def __init__(self, home: Path) -> None:
        self._home = home
        self._client: docker.APIClient | None = None
        self._runtime: Runtime | None = None
        self._root: Path | None = None

    def check(self) -> None:
        """HostUnfitError unless Docker is there, uses overlay2 and knows our runtime."""
        info = self._info()
        if info["Driver"] != "overlay2":
            raise HostUnfitError(
                "Docker's storage driver", info["Driver"], "set `storage-driver` to overlay2 in /etc/docker/daemon.json"
            )
        if RUNTIME not in info["Runtimes"]:
            path = self._home / "runtime" / "runc"
            raise HostUnfitError(
                "Docker's runtimes",
                f"{RUNTIME!r}, which restores containers, is not among them",
                f'add `"runtimes": {{"{RUNTIME}": {{"path": "{path}"}}}}` to /etc/docker/daemon.json and send dockerd '
                "SIGHUP, or start it with `scripts/dockerd.sh start`",
            )
        self._runtime = Runtime(Path(info["Runtimes"][RUNTIME]["path"]))
        self._runtime.install()
        self._runtime.remove_old()

    def close(self) -> None:
        if self._client is not None:
            self._client.close()
            self._client = None

    def image_digest(self, image: str) -> str:
        """The image's id, by which its containers are pinned. HostUnfitError when it is not here."""
        with self._errors():
            found = [each for each in self._api().images() if _is_image(each, image)]
        if not found:
            raise HostUnfitError("the sandbox's image", f"{image} is not on this machine", "build or pull it first")
        return found[0]["Id"]

    def create(self, name: str, owner: Owner, control: Path) -> Container:
        """Create, not start, a container with the runner as its process 1."""
        api = self._api()
        spec = owner.spec
        user = [spec.user] if spec.user else []
        with self._errors():
            made = api.create_container(
                image=owner.image_digest,
                command=["python3", "-I", "-S", f"{MOUNT_POINT}/runner.py", f"{MOUNT_POINT}/control", *user],
                entrypoint=[],
                name=name,
                hostname="sandbox",
                working_dir=spec.workdir,
                environment=dict(spec.environment),
                stdin_open=False,
                tty=False,
                labels={RUN_LABEL: owner.run, TRAJECTORY_LABEL: owner.trajectory, HOME_LABEL: str(self._home)},
                user="0:0",
                host_config=api.create_host_config(
                    ipc_mode="private",
                    init=False,
                    runtime=RUNTIME,
                    mounts=[
                        {"Type": "bind", "Source": str(control), "Target": f"{MOUNT_POINT}/control"},
                        {"Type": "bind", "Source": str(RUNNER), "Target": f"{MOUNT_POINT}/runner.py", "ReadOnly": True},
                        *options.mounts(spec),
                    ],
                    **options.host_config(spec),
                ),
            )
        return self.inspect(made["Id"])

    def rename(self, container_id: str, name: str) -> None:
        """Give a container another name."""
        with self._errors():
            self._api().rename(container_id, name)

    def start(self, container_id: str) -> Container:
        """Start a created container."""
        with self._errors():
            self._api().start(container_id)
        return self.inspect(container_id)

    def restore(self, container_id: str, images: Path, work: Path, lazily: bool) -> Container:
        """Start a created container from CRIU's images, by way of our runtime. Logs go to `work`.

        `lazily`: a lazy-pages daemon listens in `work`.
        """
        options = [*RESTORE_OPTIONS, "--lazy-pages"] if lazily else RESTORE_OPTIONS
        try:
            with self._our_runtime().restoring(container_id, images, work, options):
                return self.start(container_id)
        except DockerRefusedError as error:
            raise DockerRefusedError(f"{error}{errors_in(work / 'restore.log')}") from None

    def inspect(self, name: str) -> Container:
        """DockerRefusedError when there is none."""
        with self._errors():
            found = self._api().inspect_container(name)
        layers = found["GraphDriver"]["Data"]
        if not layers:
            raise DockerRefusedError(f"{name} is being removed")
        return Container(
            id=found["Id"],
            name=found["Name"].lstrip("/"),
            pid=found["State"]["Pid"],
            image_digest=found["Image"],
            upper=Path(layers["UpperDir"]),
            merged=Path(layers["MergedDir"]),
            given=self._docker_root() / "containers" / found["Id"],
            volumes=tuple(
                sorted(to for each in found["Mounts"] if not (to := each["Destination"]).startswith(f"{MOUNT_POINT}/"))
            ),
        )

    def remove(self, name: str) -> None:
        """Kill and remove it. None there, or one that is being removed, is fine."""
        from docker.errors import APIError, NotFound

        with self._errors():
            for tries_left in reversed(range(REMOVE_TRIES)):
                try:
                    self._api().remove_container(name, force=True, v=True)
                except NotFound:
                    return
                except APIError as error:
                    if "already in progress" in str(error):
                        return
                    if tries_left == 0:  # it may have died just when Docker was about to kill it
                        raise

    def names(self, run: str | None = None) -> list[str]:
        """Our containers, dead or alive, of this folder and, if given, of one run."""
        labels = [f"{HOME_LABEL}={self._home}"]
        if run is not None:
            labels.append(f"{RUN_LABEL}={run}")
        with self._errors():
            found = self._api().containers(all=True, filters={"label": labels})
        return sorted(names[0].lstrip("/") for each in found if (names := each.get("Names")))

    def _our_runtime(self) -> Runtime:
        """The one that Docker knows; it lies in another folder than ours in tests."""
        if self._runtime is None:
            self._runtime = Runtime(Path(self._info()["Runtimes"][RUNTIME]["path"]))
        return self._runtime

    def _docker_root(self) -> Path:
        if self._root is None:
            self._root = Path(self._info()["DockerRootDir"])
        return self._root

    def _info(self) -> dict[str, Any]:
        with self._errors():
            return self._api().info()

    def _api(self) -> docker.APIClient:
        if self._client is None:
            try:
                import docker
            except ImportError:
                raise HostUnfitError(
                    "the package docker", "it is not installed", "install Belayer with its extra `sandbox`"
                ) from None
            with self._errors():
                self._client = docker.APIClient(
                    base_url=os.environ.get("DOCKER_HOST"), version="auto", timeout=CALL_TIMEOUT_S
                )
        return self._client

    @contextmanager
    def _errors(self) -> Iterator[None]:
        import docker.errors
        import requests.exceptions

        try:
            yield
        except docker.errors.APIError as error:
            raise DockerRefusedError(str(error.explanation or error)) from None
        except requests.exceptions.Timeout:
            raise DockerRefusedError(f"no answer within {CALL_TIMEOUT_S} s") from None
        except (docker.errors.DockerException, requests.exceptions.ConnectionError) as error:
            raise HostUnfitError("Docker", f"no daemon answers ({error})", START_DAEMON) from None


def _is_image(found: Mapping[str, Any], image: str) -> bool:
    names = [*(found.get("RepoTags") or ()), *(found.get("RepoDigests") or ()), found["Id"]]
    return image in names or f"{image}:latest" in names
