"""Files written whole, by rename, so that a kill leaves the old one or the new one; files read
within bounds; and Python files of users as modules, whose values can be pickled. Standard library
only."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import fnmatch
import functools
import glob
import hashlib
import importlib.util
import json
import os
import re
import secrets
import socket
import stat
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

from headwise.errors import UsageError
from headwise.signals import half_written

MOST_TEXT = 64 << 20  # bytes of a note or of another description
MOST_CODE = 16 << 20  # bytes of a user's Python file
DAY = 86_400.0  # seconds
USER_FILE = "headwise_file_"  # the modules of users' files are named so, with a hash behind


@contextlib.contextmanager
def whole_file(path: Path) -> Iterator[Path]:
    """A file to write beside its place, which it takes when it is finished: a reader sees all of it
    or what was there before."""
    path.parent.mkdir(parents=True, exist_ok=True)
    remove_leftovers(path.parent, glob.escape(path.name))
    with _held_file(path) as temporary:
        try:
            yield temporary
            with temporary.open("rb") as f:
                os.fsync(f.fileno())
            os.replace(temporary, path)
        except BaseException:
            temporary.unlink(missing_ok=True)
            raise


@contextlib.contextmanager
def _held_file(path: Path) -> Iterator[Path]:
    """A new hidden file beside a path, locked until it is closed or its writer dies, and removed
    where a signal ends the process."""
    while True:
        # The new content lies in the same folder, since a rename is atomic within one file system
        # only.
        temporary = path.with_name(f".{path.name}.{own_mark()}")
        with half_written(temporary):
            handle = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666)
            try:
                lock(handle)
                # Between the two lines somebody may have taken it for a leftover.
                if os.fstat(handle).st_nlink:
                    yield temporary
                    return
            finally:
                os.close(handle)


@functools.cache
def _host_mark() -> str:
    """Four letters for this machine, in the names of half-written files."""
    return f"h{hashlib.sha256(socket.gethostname().encode()).hexdigest()[:3]}"


def own_mark() -> str:
    """Eight letters at the end of a half-written file's name, of this machine and of no other
    file."""
    return _host_mark() + secrets.token_hex(2)


def lock(handle: int, *, wait: bool = True) -> bool:
    """Lock an open file, or wait for it; False where somebody else holds it. A file system without
    locks has none to wait for."""
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
    except BlockingIOError:
        return False
    except OSError as e:
        if e.errno not in (errno.ENOLCK, errno.EOPNOTSUPP, errno.ENOSYS):
            raise
    return True


def may_remove(path: Path) -> bool:
    """Whether a half-written file of nobody alive may go. One of another machine, whose lock may
    not be seen here, has to be a day old."""
    mark = path.name.rpartition(".")[2][:4]
    if mark == _host_mark() or not re.fullmatch("h[0-9a-f]{3}", mark):
        return True
    with contextlib.suppress(OSError):
        return time.time() - path.lstat().st_mtime > DAY
    return False


def remove_leftovers(folder: Path, pattern: str) -> None:
    """Remove what writers that were killed left of the files of a pattern, such as `*.json`. What
    is being written is locked and stays."""
    try:
        names = os.listdir(folder)
    except OSError:
        return
    for name in names:
        stem, _, letters = name.rpartition(".")
        if len(letters) != 8 or not fnmatch.fnmatchcase(stem, f".{pattern}"):
            continue
        if not may_remove(folder / name):
            continue
        with contextlib.suppress(OSError):  # its writer holds it, or it is gone
            handle = os.open(folder / name, os.O_RDWR | os.O_NOFOLLOW | os.O_NONBLOCK)
            try:
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
                os.unlink(folder / name)
            finally:
                os.close(handle)


def write_whole(path: Path, data: bytes | str) -> None:
    """Write a file so that a reader sees all of it or what was there before."""
    with whole_file(path) as temporary:
        temporary.write_bytes(data.encode() if isinstance(data, str) else data)


def check_regular(path: Path) -> None:
    """Refuse to write in the place of a link, a folder, a pipe or a device."""
    with contextlib.suppress(FileNotFoundError):
        mode = path.lstat().st_mode
        if not stat.S_ISREG(mode):
            what = "a link" if stat.S_ISLNK(mode) else "not a regular file"
            raise UsageError(f"{path} cannot be written, it is {what}: remove it")


class DamagedError(ValueError):
    """A file that is not as it was written, or is none; the message says what is wrong."""


class NotReadableError(OSError):
    """What lies at a path is no file that may be read: a pipe, a device, a link, or too large."""

    def __str__(self) -> str:
        return str(self.args[0])


def read_file(
    path: str | Path, most: int = MOST_TEXT, *, links: bool = False, folder: int | None = None
) -> bytes:
    """A file's bytes, if it is a regular file of at most `most` bytes.

    Without `links` a symbolic link is refused, since it may lead anywhere. `folder` is an open
    folder that the path is relative to.
    """
    # Without O_NONBLOCK the opening of a named pipe waits for somebody who writes into it.
    flags = os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC | (0 if links else os.O_NOFOLLOW)
    try:
        handle = os.open(path, flags, dir_fd=folder)
    except OSError as e:
        if e.errno == errno.ELOOP:
            raise NotReadableError("it is a link") from None
        if e.errno == errno.ENXIO:
            raise NotReadableError("it is not a regular file") from None
        raise
    try:
        about = os.fstat(handle)
        if not stat.S_ISREG(about.st_mode):
            raise NotReadableError("it is not a regular file")
        if about.st_size > most:
            raise NotReadableError(f"it has {about.st_size:,} bytes, at most {most:,} are read")
        with os.fdopen(handle, "rb", closefd=False) as f:
            # As much as there is: Python sets aside at once what it is asked to read. The files of
            # some systems do not say their size.
            return f.read(about.st_size or most)
    finally:
        os.close(handle)


def read_json(data: bytes | str) -> Any:
    """JSON as a value; what is none is a ValueError, also where it is nested too deeply."""
    try:
        return json.loads(data)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None


@contextlib.contextmanager
def locked(path: Path) -> Iterator[None]:
    """Hold a lock file, or wait for it; the system frees it when its holder dies."""
    path.parent.mkdir(parents=True, exist_ok=True)
    handle = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o666)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX)
        yield
    finally:
        os.close(handle)


def load_module(name: str, path: str | Path) -> ModuleType:
    """A Python file as the module of that name."""
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise ImportError(f"{path} is no Python file")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses look their module up, and pickle its functions
    spec.loader.exec_module(module)
    return module


def load_user_file(path: str | Path) -> ModuleType:
    """A user's Python file as a module, run once for each content it has.

    The module's name is made of the file's path and content: it hides no other module, an edited
    file is another module, and every process gives the same file the same name.
    """
    file = Path(path).resolve()
    source = read_file(file, MOST_CODE)
    digest = hashlib.sha256(f"{file}\n".encode() + source).hexdigest()[:12]
    name = f"{USER_FILE}{file.stem}_{digest}"
    if name in sys.modules:
        return sys.modules[name]
    module = ModuleType(name)
    module.__file__ = str(file)
    sys.modules[name] = module  # dataclasses look their module up
    try:
        exec(compile(source, str(file), "exec"), module.__dict__)
    except BaseException:
        del sys.modules[name]
        raise
    return module


def reduce_by_file(value: Any, protocol: int) -> Any:
    """What `__reduce_ex__` returns for a value whose class may come from a user's file: file, class
    and fields, so that another process loads the file where it unpickles the value."""
    kind = type(value)
    if not kind.__module__.startswith(USER_FILE):
        return object.__reduce_ex__(value, protocol)
    file = sys.modules[kind.__module__].__file__
    return _blank, (file, kind.__module__, kind.__qualname__), value.__dict__


def _blank(file: str, module_name: str, class_name: str) -> Any:
    """An instance without its fields, which pickle sets."""
    module = sys.modules.get(module_name) or load_user_file(file)
    if module.__name__ != module_name:
        raise UsageError(f"{file} was edited while its runs were under way; run the command again")
    # A class inside another class has a dotted name.
    kind: Any = module
    for part in class_name.split("."):
        kind = getattr(kind, part)
    return object.__new__(kind)
