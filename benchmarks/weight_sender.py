"""A trainer, as far as an engine sees one: gives a running SGLang new weights in each of the ways that it knows.

    python -m benchmarks.weight_sender URL --shape tiny --seed 5 --how tensor --version 3

`--how`: `tensor` (shared by handle, in buckets), `distributed` (broadcast in a process group), `disk` (the engine reads
a folder, which `--how save` writes before). One seed means the same weights in all of them. Prints one JSON line.
Without arguments it reads them from its input, a line each time. Needs SGLang's interpreter. An engine that refuses is
an error with its answer.
"""

# torch, CUDA's bindings and SGLang are the engine's, not in this project's own environment.
# pyright: reportMissingImports=false

from __future__ import annotations

import argparse
import contextlib
import json
import os
import shlex
import socket
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from benchmarks.sglang_shapes import SHAPES, checkpoint_weights, write_model

_TIMEOUT_S = 300.0
_GROUP = "belayer_bench"


class RefusedError(Exception):
    """The engine refused; it says why."""


def post(url: str, path: str, body: dict[str, Any]) -> dict[str, Any]:
    request = urllib.request.Request(f"{url}/{path}", json.dumps(body).encode(), {"Content-Type": "application/json"})
    try:
        with urllib.request.urlopen(request, timeout=_TIMEOUT_S) as response:
            said = response.read()
    except urllib.error.HTTPError as error:
        raise RefusedError(f"{path}: {error.code} {error.read()[:500].decode(errors='replace')}") from None
    try:
        return json.loads(said)
    except ValueError:
        return {"said": said.decode(errors="replace")}


def buckets(weights: list[tuple[str, Any]], limit_bytes: int) -> Iterator[list[tuple[str, Any]]]:
    """The same tensors, in groups of at most so many bytes (or one tensor)."""
    bucket: list[tuple[str, Any]] = []
    size_bytes = 0
    for name, tensor in weights:
        if bucket and size_bytes + tensor.nbytes > limit_bytes:
            yield bucket
            bucket, size_bytes = [], 0
        bucket.append((name, tensor))
        size_bytes += tensor.nbytes
    yield bucket


def send_tensors(options: argparse.Namespace, weights: list[tuple[str, Any]]) -> int:
    """As verl and slime do on one machine: flattened buckets, shared by handle; the last one flushes the cache."""
    import torch.multiprocessing
    from sglang.srt.utils import MultiprocessingSerializer
    from sglang.srt.utils.patch_torch import monkey_patch_torch_reductions
    from sglang.srt.weight_sync.tensor_bucket import FlattenedTensorBucket

    if options.device == "cpu":
        torch.multiprocessing.set_sharing_strategy("file_system")  # by name: the engine is no child of ours
    else:
        monkey_patch_torch_reductions()
    parts = list(buckets(weights, options.bucket_mb << 20))
    for number, part in enumerate(parts[: options.only_buckets or len(parts)]):
        bucket = FlattenedTensorBucket(named_tensors=part)
        shared = {"flattened_tensor": bucket.get_flattened_tensor(), "metadata": bucket.get_metadata()}
        body = {
            "serialized_named_tensors": [
                MultiprocessingSerializer.serialize(shared, output_str=True) for _ in range(options.ranks)
            ],
            "load_format": "flattened_bucket",
            "flush_cache": number == len(parts) - 1,
            "weight_version": str(options.version),
        }
        post(options.url, "update_weights_from_tensor", body)
    return len(parts)


@contextlib.contextmanager
def joined(options: argparse.Namespace) -> Iterator[Any]:
    """A process group of this process, rank 0, and the engine's ranks. NCCL wants a device for each of them."""
    import torch
    from sglang.srt.utils import init_custom_process_group

    backend = "gloo" if options.device == "cpu" else "nccl"
    if backend == "nccl":
        torch.cuda.set_device(options.device)
        os.environ.setdefault("NCCL_CUMEM_ENABLE", "0")  # as SGLang has it: both ends must map memory in the same way
    size = 1 + options.ranks
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    group_of = {"master_address": "127.0.0.1", "master_port": port, "rank_offset": 1, "world_size": size}
    joining = _beside(options.url, "init_weights_update_group", group_of | {"group_name": _GROUP, "backend": backend})
    group = init_custom_process_group(
        backend=backend, init_method=f"tcp://127.0.0.1:{port}", world_size=size, rank=0, group_name=_GROUP
    )
    joining.join()
    yield group
    post(options.url, "destroy_weights_update_group", {"group_name": _GROUP})


def broadcast(options: argparse.Namespace, weights: list[tuple[str, Any]], group: Any) -> int:
    """As a trainer on other devices does: a broadcast of each tensor in a process group with the engine."""
    import torch

    parts = list(buckets(weights, options.bucket_mb << 20))
    for number, part in enumerate(parts):
        body = {
            "names": [name for name, _ in part],
            "dtypes": [str(tensor.dtype).removeprefix("torch.") for _, tensor in part],
            "shapes": [list(tensor.shape) for _, tensor in part],
            "group_name": _GROUP,
            "flush_cache": number == len(parts) - 1,
            "weight_version": str(options.version),
        }
        updating = _beside(options.url, "update_weights_from_distributed", body)
        for _, tensor in part:
            torch.distributed.broadcast(tensor, src=0, group=group)
        updating.join()
    return len(parts)


def _beside(url: str, path: str, body: dict[str, Any]) -> threading.Thread:
    thread = threading.Thread(target=post, args=(url, path, body))
    thread.start()
    return thread


def act(options: argparse.Namespace) -> dict[str, Any]:
    """Do what is asked; seconds that each time took, and buckets."""
    weights: list[tuple[str, Any]] = []
    if options.how != "disk":
        weights = list(checkpoint_weights(options.shape, options.seed, options.device).items())
    with joined(options) if options.how == "distributed" else contextlib.nullcontext() as group:
        return _repeat(options, weights, group)


def _repeat(options: argparse.Namespace, weights: list[tuple[str, Any]], group: Any) -> dict[str, Any]:
    took_s: list[float] = []
    parts = 1
    for _ in range(options.repeat):
        began_s = time.monotonic()
        match options.how:
            case "save":
                from safetensors.torch import save_file

                save_file(dict(weights), write_model(options.folder, options.shape) / "model.safetensors")
            case "disk":
                body = {"model_path": str(options.folder), "load_format": "auto", "flush_cache": not options.keep_cache}
                post(options.url, "update_weights_from_disk", body | {"weight_version": str(options.version)})
            case "tensor":
                parts = send_tensors(options, weights)
            case _:
                parts = broadcast(options, weights, group)
        took_s.append(round(time.monotonic() - began_s, 4))
        options.version += 1
    return {"how": options.how, "took_s": took_s, "buckets": parts}


def main() -> None:
    parser = argparse.ArgumentParser(prog="benchmarks.weight_sender")
    parser.add_argument("url")
    parser.add_argument("--shape", choices=sorted(SHAPES), default="tiny")
    parser.add_argument("--device", default="cpu", help="where this process has the weights")
    parser.add_argument("--ranks", type=int, default=1, help="the engine's tensor parallel ranks")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--how", choices=("save", "disk", "tensor", "distributed"), required=True)
    parser.add_argument("--version", type=int, default=1)
    parser.add_argument("--folder", type=Path, help="of a model, for save and disk")
    parser.add_argument("--keep-cache", action="store_true", help="disk: do not flush the KV cache")
    parser.add_argument("--bucket-mb", type=int, default=512, help="0: a bucket for each tensor")
    parser.add_argument("--only-buckets", type=int, default=0, help="tensor: leave off after so many, to be torn")
    parser.add_argument("--repeat", type=int, default=1, help="send so many times, as versions that count up")
    if len(sys.argv) > 1:
        print(json.dumps(act(parser.parse_args())))
        return
    for line in sys.stdin:
        try:
            answer = act(parser.parse_args(shlex.split(line)))
        except RefusedError as error:
            answer = {"refused": str(error)}
        print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    main()
