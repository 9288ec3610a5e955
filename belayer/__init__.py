"""Belayer keeps long agentic-RL rollouts alive: it journals what happened and recovers by reading it back."""

__version__ = "0.1.0"
