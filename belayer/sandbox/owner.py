"""What a container's folder says of it: whose it is and how it was made, so that anyone can remove or replace it."""

from __future__ import annotations

import hashlib

import msgspec

from belayer.journal.events import SandboxSpec
from belayer.sandbox.given import Files


class Owner(msgspec.Struct, frozen=True):
    """Written before the container is made, and again when more is known."""

    run: str
    trajectory: str
    spec: SandboxSpec
    image_digest: str
    container_id: str = ""
    """Empty until Docker has named it."""
    traits: str = ""
    """What its process 1 was like when it was fresh (`quiet.py`); empty until it answers."""

    given: Files = {}
    """What Docker wrote into the files that it binds (`given.py`)."""

    @property
    def key(self) -> str:
        """Equal for containers that are the same when fresh and are removed with the same run."""
        spec = msgspec.structs.replace(self.spec, image="", setup=())
        return hashlib.sha256(msgspec.json.encode((self.run, self.image_digest, spec), order="sorted")).hexdigest()[:12]

    def encode(self) -> bytes:
        return msgspec.json.encode(self)

    @classmethod
    def decode(cls, data: bytes) -> Owner:
        """msgspec.MsgspecError when it is not one."""
        return msgspec.json.decode(data, type=cls)
