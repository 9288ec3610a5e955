"""Names that SGLang's imports ask for; each function raises NotImplementedError when it is called."""

from __future__ import annotations

import enum
from collections.abc import Callable


class InterpolationMode(enum.Enum):
    NEAREST = "nearest"
    NEAREST_EXACT = "nearest-exact"
    BILINEAR = "bilinear"
    BICUBIC = "bicubic"
    BOX = "box"
    HAMMING = "hamming"
    LANCZOS = "lanczos"


class ImageReadMode(enum.Enum):
    UNCHANGED = 0
    GRAY = 1
    GRAY_ALPHA = 2
    RGB = 3
    RGB_ALPHA = 4


def missing(name: str) -> Callable[..., None]:
    if name.startswith("__"):
        raise AttributeError(name)

    def call(*_: object, **__: object) -> None:
        raise NotImplementedError(f"torchvision's {name} is not in the stand-in")

    return call
