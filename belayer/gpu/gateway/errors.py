"""What the gateway answers when it cannot do as it was asked: one JSON shape, always with what to do about it."""

from __future__ import annotations

from belayer.errors import BelayerError


class RefusedError(BelayerError):
    """The answer to a request that ends without its tokens. `status` is HTTP's, `kind` is for programs."""

    def __init__(self, status: int, kind: str, message: str, retry_after_s: int | None = None) -> None:
        super().__init__(message)
        self.status = status
        self.kind = kind
        self.message = message
        self.retry_after_s = retry_after_s

    def body(self) -> dict[str, object]:
        """The JSON object, in the shape of OpenAI's and SGLang's errors."""
        return {"error": {"message": self.message, "type": self.kind, "code": self.status}}


def wrong(message: str) -> RefusedError:
    """The request itself is not usable."""
    return RefusedError(400, "invalid_request_error", message)


def conflict(kind: str, message: str) -> RefusedError:
    """The request is in order, but it does not fit what the journal says."""
    return RefusedError(409, kind, message)


def later(kind: str, message: str, retry_after_s: int = 1) -> RefusedError:
    """Nothing is lost: the same request, with the same id, may be made again."""
    return RefusedError(503, kind, message, retry_after_s)
