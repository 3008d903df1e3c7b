"""Token of a user, which servers of this user ask for and clients send.

It is that of RLJAX_TOKEN, or one that is made at its first use and kept in a file which this user
alone can read, so that servers and runs of one user on one machine need no setting.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import stat
from pathlib import Path

VARIABLE = "RLJAX_TOKEN"


class UnsafeToken(Exception):
    """The token's file can't be made, or others could read or change it. The message is one line."""


def token_file() -> Path:
    """Returns the path of the user's token, below XDG_STATE_HOME."""
    return Path(os.environ.get("XDG_STATE_HOME") or Path.home() / ".local" / "state") / "rljax" / "token"


def own_token() -> str:
    """Returns the token that a server of this user asks for. Makes it if there is none yet.

    Raises UnsafeToken.
    """
    return os.environ.get(VARIABLE) or kept_token(token_file())


def kept_token(path: Path) -> str:
    """Returns the token of a file. Makes it, readable by this user alone, if it is missing.

    Raises UnsafeToken.
    """
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        with contextlib.suppress(FileExistsError):
            _make(path)
    except OSError as error:
        raise UnsafeToken(f"{path}: a token can't be kept there: {error.strerror} (set {VARIABLE})") from None
    return _read(path)


def token_to_send(*, to_this_machine: bool) -> str | None:
    """Returns the token for a server; None if there is none that it may see.

    That of the file stays on this machine.

    Raises UnsafeToken.
    """
    if token := os.environ.get(VARIABLE):
        return token
    return _read(token_file()) if to_this_machine and token_file().exists() else None


def _make(path: Path) -> None:
    """Writes a new token, whole or not at all. Raises FileExistsError if there is one."""
    temporary = path.with_name(f".token.{secrets.token_hex(8)}")
    try:
        with os.fdopen(os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
            file.write(secrets.token_urlsafe() + "\n")
        os.link(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


def _read(path: Path) -> str:
    try:
        with open(os.open(path, os.O_RDONLY | os.O_NOFOLLOW)) as file:
            found = os.fstat(file.fileno())
            if found.st_uid != os.getuid() or stat.S_IMODE(found.st_mode) & 0o077:
                raise UnsafeToken(f"{path}: others can read or change it (delete it, or set {VARIABLE})")
            token = file.read().strip()
    except OSError as error:
        raise UnsafeToken(f"{path}: {error.strerror} (delete it, or set {VARIABLE})") from None
    if not token:
        raise UnsafeToken(f"{path}: empty (delete it, or set {VARIABLE})")
    return token
