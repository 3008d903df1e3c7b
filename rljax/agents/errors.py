"""Errors of the OpenAI-compatible endpoint, in the shape that OpenAI's clients expect."""

from __future__ import annotations

from typing import Any

CONTEXT_EXCEEDED = "context_length_exceeded"  # code of a request whose prompt leaves no room in the context


class ApiError(Exception):
    """A request that is refused or failed, as {"error": {"message", "type", "param", "code"}}.

    Example: ApiError("Unrecognized request argument supplied: temprature", param="temprature",
    code="unknown_parameter")
    """

    def __init__(self, message: str, *, param: str | None = None, code: str | None = None, status: int = 400) -> None:
        super().__init__(message)
        self.param, self.code, self.status = param, code, status

    @property
    def kind(self) -> str:
        """OpenAI's type of the error, which follows from the status."""
        if self.status >= 500:
            return "server_error"
        return {401: "authentication_error", 429: "rate_limit_error"}.get(self.status, "invalid_request_error")

    def body(self) -> dict[str, Any]:
        return {"error": {"message": str(self), "type": self.kind, "param": self.param, "code": self.code}}
