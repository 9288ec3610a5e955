"""What a process that was lent memory does in the contract tests.

    python -m tests.gpu.arena_child FD DEVICE SIZE VERB

It takes the allocation that comes over the socket FD, maps it at a fixed address, acts, and says what it saw. A shadow
gets it twice, readable and then writable.
"""

from __future__ import annotations

import socket
import sys

import torch

from belayer.gpu.arena import KV_ADDRESS, open_mapper

PIECES = 64
"""The memory is looked at as this many equal pieces; piece n holds the number n + 1 when it is filled."""


def main() -> None:
    connection = socket.socket(fileno=int(sys.argv[1]))
    device, size_bytes, verb = sys.argv[2], int(sys.argv[3]), sys.argv[4]
    _, fds, _, _ = socket.recv_fds(connection, 1, 2)
    mapper = open_mapper(device)
    memory = mapper.take(fds[0], size_bytes)
    mapper.reserve(KV_ADDRESS, size_bytes)
    tensor = None
    if verb == "scratch":
        mapper.map_scratch(KV_ADDRESS, size_bytes)
        tensor = mapper.tensor(KV_ADDRESS, (size_bytes // 4,), torch.int32)
        tensor[:] = 7
        mapper.synchronize()
        assert int(tensor[0]) == 7 and int(tensor[-1]) == 7
        mapper.unmap(KV_ADDRESS, size_bytes)
    mapper.map(KV_ADDRESS, memory, writable=verb == "fill")
    # The tensor made over the scratch is valid over the memory that took its place: same addresses.
    tensor = mapper.tensor(KV_ADDRESS, (size_bytes // 4,), torch.int32) if tensor is None else tensor
    pieces = tensor[: tensor.numel() // PIECES * PIECES].view(PIECES, -1)
    if verb == "fill":
        pieces.copy_(torch.arange(1, PIECES + 1, dtype=torch.int32, device=tensor.device)[:, None].expand_as(pieces))
        mapper.synchronize()
    if verb == "trespass":
        connection.send(b"about to write")
        pieces[0] = -1
        mapper.synchronize()
    numbers = torch.arange(1, PIECES + 1, dtype=torch.int32, device=tensor.device)
    right = bool((pieces == numbers[:, None]).all())
    connection.send(b"right" if right else b"wrong")
    if verb == "scratch":
        mapper.protect(KV_ADDRESS, fds[1], size_bytes, writable=True)
        pieces += 1
        mapper.synchronize()
        connection.send(b"right" if bool((pieces == numbers[:, None] + 1).all()) else b"wrong")
    connection.recv(1)


if __name__ == "__main__":
    main()
