"""Who may use what is written: nobody who may not use what it was made from, whatever the umask allows."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterable
from dataclasses import dataclass
from functools import reduce
from pathlib import Path

from .folder_handle import FolderHandle

_FILE, _FOLDER = 0o644, 0o777
"""Permissions of new files and folders, from which the umask takes."""

_ANY_GROUP = -1
_READABLE = 0o044
_OWNER, _GROUP, _OTHERS = 0o700, 0o070, 0o007


@dataclass(frozen=True)
class Access:
    """The most permissions of files and folders that are written.

    Attributes:
        files, folders: bits that may be set, beside those of the owner; the umask takes more of them away.
        group: the group that those of the source's group are for; another group gets what all others get.

    Example:
        >>> private = Access(0o600, 0o700)
        >>> oct(private.of_file(Path())), oct(Access().of_file(Path()))
        ('0o600', '0o644')
    """

    files: int = 0o777
    folders: int = 0o777
    group: int = _ANY_GROUP

    def of_file(self, folder: Path) -> int:
        """The mode in which to create a file in `folder`."""
        return _FILE & self._in(self.files, folder)

    def of_folder(self, above: Path) -> int:
        """The mode in which to create a folder in `above`."""
        return _FOLDER & self._in(self.folders, above)

    def admits(self, status: os.stat_result, folder: Path) -> bool:
        """Whether a file of this `status` may be put into `folder` as it is, to be reached through it."""
        # The bits to search the folder, where those to read a file are.
        searchable = folder.stat().st_mode << 2 & _READABLE
        return not status.st_mode & searchable & ~self.of_file(folder)

    def _in(self, most: int, folder: Path) -> int:
        """`most`, with what its group has taken away where new files belong to another group."""
        if self.group == _ANY_GROUP or _group_in(folder) == self.group:
            return most
        return _without_group(most)

    def __and__(self, other: Access) -> Access:
        """What both permit."""
        groups = {self._counting_group, other._counting_group} - {_ANY_GROUP}
        both = Access(self.files & other.files, self.folders & other.folders, min(groups, default=_ANY_GROUP))
        if len(groups) < 2:
            return both
        return Access(*map(_without_group, (both.files, both.folders)))

    @property
    def _counting_group(self) -> int:
        """The group, if it may do what not all others may."""
        alike = self.files == _without_group(self.files) and self.folders == _without_group(self.folders)
        return _ANY_GROUP if alike else self.group


BY_UMASK = Access()
"""What is made from nothing that anyone has to be kept from."""


def access_of(folder: Path, names: Iterable[str]) -> Access:
    """Who may use the files `names` of `folder`: those who may read all of them, and search the folder.

    Raises CheckpointError if one of them cannot be opened.
    """
    with FolderHandle(folder) as handle:
        return access_like(folder.stat(), (handle.status(name) for name in names))


def access_like(folder: os.stat_result, files: Iterable[os.stat_result]) -> Access:
    """`access_of` files and their folder by what the system says of them."""
    home = Access(folders=_OWNER | stat.S_IMODE(folder.st_mode) & 0o077, group=folder.st_gid)
    every = reduce(Access.__and__, (_of_file(status) for status in files), home)
    kept = _OWNER
    for of_class in (_GROUP, _OTHERS):
        if every.files & of_class & _READABLE and every.folders & of_class & 0o011:
            kept |= of_class
    return Access(every.files & kept, every.folders & kept, every.group)


def _of_file(status: os.stat_result) -> Access:
    return Access(files=_OWNER | stat.S_IMODE(status.st_mode) & 0o077, group=status.st_gid)


def _without_group(bits: int) -> int:
    """`bits` with those of the group that all others have, too."""
    return bits & (bits << 3 & _GROUP | ~_GROUP)


def _group_in(folder: Path) -> int:
    """The group of what this process creates in `folder`."""
    status = folder.stat()
    return status.st_gid if status.st_mode & stat.S_ISGID else os.getegid()
