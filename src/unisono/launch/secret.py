"""What the processes of a run know and strangers do not.

On one node the launcher draws it. Across nodes, and where another launcher started us, it must be
known before anybody has spoken: `UNISONO_SECRET`, or a file of the user that all nodes have, as
homes usually are. A run's own secret is worked out from that and never sent.
"""

import contextlib
import hashlib
import hmac
import os
import secrets
import stat
from collections.abc import Mapping
from pathlib import Path

from unisono.errors import LaunchError

SECRET = "UNISONO_SECRET"


def new_secret() -> str:
    return secrets.token_hex(32)


def shared_secret(env: Mapping[str, str]) -> str:
    """The user's secret: the variable, or the file, which is made where there is none."""
    return env.get(SECRET) or _from_file(Path.home() / ".config" / "unisono" / "secret")


def secret_of_run(shared: str, run: str) -> str:
    """One run's secret, so that a process never meets another run of the same user."""
    return hmac.new(shared.encode(), f"unisono run {run}".encode(), hashlib.sha256).hexdigest()


def _from_file(path: Path) -> str:
    try:
        if not path.exists():
            _make(path)
        _check(path)
        return path.read_text().strip()
    except OSError as error:
        raise LaunchError(
            f"Looked for this user's secret in {path}: {error}. Make it readable for you alone, "
            f"or set {SECRET} to the same long random text on every node."
        ) from error


def _make(path: Path) -> None:
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    draft = path.with_name(f".{path.name}-{secrets.token_hex(8)}")
    file = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    try:
        with os.fdopen(file, "w") as text:
            text.write(new_secret() + "\n")
            text.flush()
            os.fsync(text.fileno())
        # Of several processes that come first at once, one makes the file.
        with contextlib.suppress(FileExistsError):
            os.link(draft, path)
    finally:
        draft.unlink()


def _check(path: Path) -> None:
    found = path.stat()
    if found.st_uid not in (os.geteuid(), 0) or stat.S_IMODE(found.st_mode) & 0o077:
        raise LaunchError(
            f"The secret in {path} can be read by others. Remove it, and a new one is made, or "
            f"make it yours alone: chmod 600 {path}."
        )
    if not found.st_size:
        raise LaunchError(f"The secret in {path} is empty. Remove it, and a new one is made.")
