"""Write a file or a folder whole, or not at all.

What is to be written goes to a folder of its own beside the target, under the target's own name,
so that whatever looks at a name's ending or writes a second file beside it works as ever. When all
of it is on the disk it is renamed into place. A kill or a full disk before that leaves the target
as it was; what is left of a killed process is removed by the next one that writes there.
"""

import contextlib
import ctypes
import errno
import functools
import os
import shutil
import stat
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from unisono.errors import OutputError, UnisonoError
from unisono.scratch import Scratch, sweep

_PREFIX = ".unisono-save-"
# Errors that more room on the disk would not mend.
_NOT_FULL = (errno.EACCES, errno.EISDIR, errno.ENOENT, errno.ENOTDIR, errno.EPERM, errno.EROFS)
_AT_FDCWD, _RENAME_EXCHANGE = -100, 2


class Draft:
    """What is to take the place of a target; write it to `path`."""

    def __init__(self, path: Path, target: Path, folder: Path | None) -> None:
        self.target = target
        self._folder = folder
        self._parent = _existing_parent(target)
        if folder is None:  # Nothing can be put beside the target.
            self.path = path
            return
        for part in (self._new, self._old):
            part.mkdir()
        self.path = self._new / target.relative_to(self._parent)
        if path.is_symlink():  # Its own name says what is to be written, and not that of the file.
            self.path = self.path.with_name(path.name)

    @property
    def temporary(self) -> Path | None:
        """A folder for files that nobody needs afterwards, if there is one."""
        return self._folder

    def check_room(self, num_bytes: int) -> None:
        """Raise OSError if that much cannot be written, without writing it."""
        if self._folder is None:
            return
        # Not Python's own: where a file system cannot, that one writes every block.
        reserve = getattr(ctypes.CDLL(None, use_errno=True), "fallocate64", None)
        if reserve is None:
            return
        trial = self._folder / "trial"
        file = os.open(trial, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        try:
            found = 0
            if reserve(file, 0, ctypes.c_int64(0), ctypes.c_int64(num_bytes)) != 0:
                found = ctypes.get_errno()
            if found in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
                raise OSError(found, os.strerror(found))
        finally:
            os.close(file)
            trial.unlink()

    def told_of_target(self, text: str) -> str:
        """A text that names the draft, as it reads with the target's name."""
        return text.replace(str(self.path), str(self.target))

    def commit(self) -> None:
        """Rename all that was written into place, the target itself last."""
        if self._folder is None:
            return
        _sync(self._new)
        for entry in sorted(os.listdir(self._new), key=lambda entry: entry == self.path.name):
            is_target = self._new / entry == self.path
            self._put(self._new / entry, self.target if is_target else self._parent / entry)
        _sync_folder(self._parent)

    def _put(self, source: Path, target: Path) -> None:
        if not source.is_dir() or source.is_symlink():
            _keep_mode(source, target)
            os.replace(source, target)
        elif not target.is_dir():
            os.rename(source, target)
        elif not self._swap(source, target):
            for entry in os.listdir(source):
                self._put(source / entry, target / entry)

    def _swap(self, source: Path, target: Path) -> bool:
        """Put a folder in another's place, if that is possible."""
        if Path.cwd().is_relative_to(target) or target.is_mount():
            return False
        _keep_others(target, source)
        _keep_mode(source, target)
        # One step on Linux, where the file system can (ext4, XFS, Btrfs, tmpfs; not NFS).
        if _exchange(source, target):
            _keep_others(source, target)  # What came in between.
            return True
        if source.parent != self._new:
            return False
        # Else two: a kill between them leaves the old one for `_rescue`.
        aside = self._old / target.name
        os.rename(target, aside)
        try:
            os.rename(source, target)
        except OSError:
            os.rename(aside, target)
            raise
        _keep_others(aside, target)
        return True

    @property
    def _new(self) -> Path:
        assert self._folder is not None
        return self._folder / "new"

    @property
    def _old(self) -> Path:
        assert self._folder is not None
        return self._folder / "old"


@contextlib.contextmanager
def replacing(path: str | os.PathLike[str], advice: str = "") -> Iterator[Draft]:
    """Give a draft to write to; what is there at the end takes the place of `path`.

    A link is followed to the file that it names, whose mode is kept; files of a folder that are
    not written anew stay.

    Args:
        path: A file or a folder. Folders on the way to it are made if the caller makes them.
        advice: What to do when it fails, as the error's last sentence.

    Yields:
        The draft.

    Raises:
        OutputError: It could not be written. What was there before is unchanged. It is also of the
            type of the error that caused it.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     with replacing(f"{folder}/results.csv") as draft:
    ...         _ = draft.path.write_text("loss")
    ...     os.listdir(folder)
    ['results.csv']
    """
    target, draft = Path(os.path.realpath(path)), None
    try:
        with _folder_beside(target) as folder:
            draft = Draft(Path(path), target, folder)
            yield draft
            draft.commit()
    except (OSError, RuntimeError) as error:
        # h5py reports a full disk as a RuntimeError where it closes a file, and so does torch.
        is_of_writing = isinstance(error, OSError) or type(error) is RuntimeError
        if isinstance(error, UnisonoError) or not is_of_writing:
            raise
        is_bare = isinstance(error, OSError) and error.filename is None
        reason = getattr(error, "strerror", None) if is_bare else None
        reason = reason or str(error)
        if draft is not None:
            reason = draft.told_of_target(reason)
        raise _named(error, reason, Path(path), advice) from error


@contextlib.contextmanager
def _folder_beside(target: Path) -> Iterator[Path | None]:
    is_device = target.exists() and not target.is_file() and not target.is_dir()
    if is_device:  # Such as /dev/null, which is written to and not replaced.
        yield None
        return
    if target.is_file() and not os.access(target, os.W_OK):
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))
    parent = _existing_parent(target)
    sweep(_PREFIX, parent, functools.partial(_rescue, parent))
    try:
        scratch = Scratch(_PREFIX, parent)
    except OSError as error:
        if error.errno not in (errno.EACCES, errno.EPERM, errno.EROFS) or not target.is_file():
            raise
        warnings.warn(
            f"{target} is overwritten in place, since nothing can be put into its folder "
            f"({error.strerror}): a kill meanwhile leaves it broken. Make the folder writable.",
            stacklevel=2,
        )
        yield None
        return
    with scratch:
        yield scratch.path


def _existing_parent(target: Path) -> Path:
    found = next(parent for parent in target.parents if parent.exists())
    if not found.is_dir():
        raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), str(found))
    return found


def _rescue(parent: Path, left: Path) -> None:
    """Give a folder back its name, if a kill came when it had just been taken."""
    if not (left / "old").is_dir():
        return  # Killed before there was anything to take aside.
    for aside in (left / "old").iterdir():
        if not os.path.lexists(parent / aside.name):
            os.rename(aside, parent / aside.name)


def _exchange(source: Path, target: Path) -> bool:
    try:
        rename = ctypes.CDLL(None).renameat2
    except AttributeError:
        return False
    names = (os.fsencode(source), os.fsencode(target))
    return bool(rename(_AT_FDCWD, names[0], _AT_FDCWD, names[1], _RENAME_EXCHANGE) == 0)


def _keep_others(old: Path, new: Path) -> None:
    """Take over the files of a folder that were not written anew: they are not ours to remove."""
    for entry in os.scandir(old):
        target, is_folder = new / entry.name, entry.is_dir(follow_symlinks=False)
        if is_folder and target.is_dir():
            _keep_others(Path(entry.path), target)
        elif os.path.lexists(target):
            continue
        elif is_folder:
            shutil.copytree(entry.path, target, symlinks=True, copy_function=_link)
        else:
            _link(entry.path, target)


def _link(source: Any, target: Any) -> None:
    try:
        os.link(source, target, follow_symlinks=False)
    except OSError:
        shutil.copy2(source, target, follow_symlinks=False)


def _keep_mode(source: Path, target: Path) -> None:
    try:
        found = target.stat()
    except FileNotFoundError:
        return
    mine = source.stat()
    if (mine.st_uid, mine.st_gid) != (found.st_uid, found.st_gid):
        with contextlib.suppress(PermissionError):
            os.chown(source, found.st_uid, found.st_gid)
    source.chmod(stat.S_IMODE(found.st_mode))


def _sync(path: Path) -> None:
    """Wait until a file, or all of a folder, is on the disk."""
    if path.is_symlink():
        return
    if path.is_dir():
        for entry in path.iterdir():
            _sync(entry)
        _sync_folder(path)
        return
    file = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(file)
    finally:
        os.close(file)


def _sync_folder(path: Path) -> None:
    folder = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        # Not every file system knows what to do with it.
        with contextlib.suppress(OSError):
            os.fsync(folder)
    finally:
        os.close(folder)


def _named(error: Exception, reason: str, path: Path, advice: str) -> OutputError:
    reason = reason.splitlines()[0] if reason else type(error).__name__
    is_full = getattr(error, "errno", None) not in _NOT_FULL
    free = _free_bytes(path) if is_full else ""
    message = f"Could not write {path}: {reason}{free}. What was there is unchanged."
    named = output_error_of(type(error))(f"{message} {advice}".rstrip())
    named.errno = getattr(error, "errno", None)
    named.filename = str(path)
    return named


def output_error_of(cause: type[Exception]) -> type[OutputError]:
    """OutputError that is also caught as what caused it."""
    if issubclass(OutputError, cause):
        return OutputError

    def reduce(self: OutputError) -> Any:
        return OutputError, self.args  # This class has no name that pickle could find.

    names: dict[str, Any] = {"__reduce__": reduce, "__module__": OutputError.__module__}
    make: Any = type  # To mypy these bases disagree.
    kind: type[OutputError] = make(OutputError.__name__, (OutputError, cause), names)
    return kind


def _free_bytes(path: Path) -> str:
    try:
        free = shutil.disk_usage(_existing_parent(Path(os.path.realpath(path)))).free
    except OSError:
        return ""
    return f" ({free:,} bytes are free there)"
