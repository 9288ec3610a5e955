"""A stand-in for torchvision: SGLang imports it for image models, which are not served here."""

__version__ = "0.0.0"
