"""See torchvision/__init__.py."""

from torchvision._missing import InterpolationMode as InterpolationMode
from torchvision._missing import missing as __getattr__  # noqa: F401

from . import functional as functional
