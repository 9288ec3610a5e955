"""An engine's weights lie in the memory server's arena, at a fixed address, read-only.

The first engine loads them as SGLang always does, copies them into the arena and drops its own; later engines build
the model without memory and map. Updates write in place: begin before the first write, commit once the engine would
serve them. SGLang updates in one call or in many (buckets) and is not told which is the last, so a version is committed
only when the caller ends it: with a call that asks to flush the cache, with flush_cache, or with continue_generation.
A forward pass before that gives tokens of the new version (as much of it as there is), but commits nothing. A crash
before the end leaves the version torn in the memory server, and torn weights are never lent to another engine.
"""

from __future__ import annotations

# torch, CUDA's bindings and SGLang are the engine's, not in this project's own environment.
# pyright: reportMissingImports=false
import gc
import logging
import os
import time
from collections.abc import Callable
from typing import Any

from belayer.gpu import wire
from belayer.gpu.arena import WEIGHTS_ADDRESS
from belayer.gpu.errors import UnsupportedEngineError
from belayer.gpu.plugin.layout import Layout, build_without_memory
from belayer.gpu.plugin.link import Link

_log = logging.getLogger("belayer")
_NOTHING_WRITTEN = "Failed to get "
"""How SGLang's message begins when an update failed before it had any weights to write."""


class _Update:
    """A weight update under way."""

    def __init__(self, version: int) -> None:
        self.version = version
        self.written = False
        """Some of it has been written."""
        self.failed = False
        self.begin_s = self.write_s = 0.0


class Weights:
    """The weights of one engine process; its methods are SGLang's hooks."""

    def __init__(self, link: Link) -> None:
        self._link = link
        self.version = 0
        self._update: _Update | None = None
        self._in_call = False

    # --- loading ------------------------------------------------------------------------------------------------

    def model_loader(self, original: Callable[..., Any], load_config: Any, model_config: Any = None) -> Any:
        """Around SGLang's get_model_loader: the same loader, whose load_model puts the weights into the arena."""
        loader = original(load_config, model_config)
        weights = self

        class ArenaLoader(type(loader)):  # type: ignore[misc]
            def load_model(self, *, model_config: Any, device_config: Any) -> Any:
                return weights.load(self, super().load_model, model_config, device_config)

        loader.__class__ = ArenaLoader
        return loader

    def load(self, loader: Any, load_model: Callable[..., Any], model_config: Any, device_config: Any) -> Any:
        """Return the model with every parameter and buffer in the arena."""
        began_s = time.monotonic()
        mapper = self._link.mapper(device_config.device, getattr(device_config, "gpu_id", None))
        model = build_without_memory(loader, model_config)
        layout = Layout(model)
        client = self._link.client
        anew = self._link.role == "main" and not self._link.weights_are_whole
        lent, fds = client.ask(wire.OpenWeights(layout.spec, layout.size_bytes, anew), wire.WeightsLent)
        if lent.writable:
            model = load_model(model_config=model_config, device_config=device_config)
            layout = _same_layout(Layout(model), layout)
        allocation = mapper.take(fds[0], lent.size_bytes)
        mapper.reserve(WEIGHTS_ADDRESS, lent.size_bytes)
        mapper.map(WEIGHTS_ADDRESS, allocation, writable=lent.writable)
        layout.move(mapper, WEIGHTS_ADDRESS, copy=lent.writable)
        self.version = lent.version
        if lent.writable:
            mapper.synchronize()
            self._commit(_Update(0))
            gc.collect()
            _empty_cache(str(device_config.device))
        _log.info(
            "belayer: weights %s, %.3f GB, version %d, in %.3f s",
            "loaded into the arena" if lent.writable else "mapped",
            lent.size_bytes / 1e9,
            self.version,
            time.monotonic() - began_s,
        )
        return model.eval()

    # --- updates ------------------------------------------------------------------------------------------------

    def update(self, original: Callable[..., Any], manager: Any, recv_req: Any) -> Any:
        """Around SGLang's update calls. One that fails after its first write leaves the version begun.

        The next one may finish it; if none does, the engine ends at the next forward pass (`are_used`).
        """
        named = str(getattr(recv_req, "weight_version", None) or "")
        began_s = time.monotonic()
        self._begin(int(named) if named.isdecimal() else None)
        writing_s = time.monotonic()
        self._in_call = True
        try:
            result = original(manager, recv_req)
        finally:
            self._in_call = False
        assert self._update is not None
        self._update.begin_s += writing_s - began_s
        self._update.write_s += time.monotonic() - writing_s
        nothing = not result.success and result.message.startswith(_NOTHING_WRITTEN)
        outcomes = set(self._link.ranks.all_say("done" if result.success else "nothing" if nothing else "half"))
        if outcomes == {"nothing"}:
            if not self._update.written:
                self._update.version = self.version
                self._commit_update()
            return result
        self._update.written = True
        if outcomes != {"done"}:  # on any rank
            self._update.failed = True
        elif getattr(recv_req, "flush_cache", False):
            self._commit_update()
        return result

    def ended(self) -> None:
        """The caller flushed the cache, or has generation go on: an update is whole, unless a part of it failed."""
        if self._update is not None and not self._in_call and not self._update.failed:
            self._commit_update()

    def are_used(self) -> None:
        """A forward pass begins: from here on tokens come from what has been written."""
        if self._update is not None and self._update.failed:
            _log.error("belayer: the update to version %d failed half way: this engine ends", self._update.version)
            os._exit(4)  # the memory server then says `torn`, and whoever watches starts another main
        if self._update is not None and self.version != self._update.version:
            self.version = self._update.version
            _log.warning(
                "belayer: version %d is used before its update was ended: no shadow may take it over until there is a "
                "call with flush_cache, /flush_cache or /continue_generation",
                self.version,
            )

    def _begin(self, version: int | None) -> None:
        if self._update is None:
            version = self.version + 1 if version is None else version
            lent, fds = self._link.client.ask(wire.BeginWeights(version), wire.WeightsLent)
            self._link.mapper().protect(WEIGHTS_ADDRESS, fds[0], lent.size_bytes, writable=True)
            self._update = _Update(version)
        elif version is not None:
            self._update.version = version
        self._update.failed = False

    def _commit_update(self) -> None:
        update, self._update = self._update, None
        assert update is not None
        began_s = time.monotonic()
        self._link.mapper().synchronize()
        self._commit(update)
        _log.info(
            "belayer: weights of version %d: begun in %.4f s, written in %.4f s, committed in %.4f s",
            update.version,
            update.begin_s,
            update.write_s,
            time.monotonic() - began_s,
        )

    def _commit(self, update: _Update) -> None:
        """Read-only again, for every engine."""
        lent, fds = self._link.client.ask(wire.CommitWeights(update.version), wire.WeightsLent)
        self._link.mapper().protect(WEIGHTS_ADDRESS, fds[0], lent.size_bytes, writable=False)
        self.version = update.version


def _same_layout(loaded: Layout, planned: Layout) -> Layout:
    if loaded.spec != planned.spec:
        raise UnsupportedEngineError(
            "the model after loading", "of another layout than before it", "models whose loading keeps shapes"
        )
    return loaded


def _empty_cache(device: str) -> None:
    if device != "cpu":
        import torch

        torch.cuda.empty_cache()
