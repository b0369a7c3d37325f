"""The error of everything that writes or reads checkpoints; it holds plain text only, so that it crosses processes."""

from __future__ import annotations

import errno
import os
from typing import NoReturn

from mixle_core.errors import MixleError

_WAYS_OUT = {
    errno.ENOSPC: "free space there, or save elsewhere",
    errno.EDQUOT: "raise the quota, or save elsewhere",
    errno.EFBIG: "raise the limit on file sizes (ulimit -f), or save elsewhere",
    errno.EROFS: "choose a directory that can be written",
    errno.EACCES: "give this user the rights, or choose another directory",
    errno.EPERM: "give this user the rights, or choose another directory",
    errno.EIO: "the device failed: look into the system log, and use other storage",
    errno.ENOENT: "check the path; another process may have removed it",
    errno.ELOOP: "links are not followed here: give the directory itself",
    errno.ENOTDIR: "give a directory",
}


class CheckpointError(MixleError):
    """A checkpoint that cannot be written, or that does not hold what it says.

    Args:
        text: what was found in which file, what was expected, and the way out.
        path: of the file or directory concerned, or "".
        errno: its name and text when the operating system refused, such as "ENOSPC (No space left on device)", or "".
        rank: on which it happened, or "" when one process reads or writes.
    """

    def __init__(self, text: str, *, path: str = "", errno: str = "", rank: str = "") -> None:
        super().__init__(text)
        self.path = path
        self.errno = errno
        self.rank = rank

    def on_rank(self, rank: int) -> CheckpointError:
        """The same error, saying where it happened."""
        return CheckpointError(f"rank {rank}: {self}", path=self.path, errno=self.errno, rank=str(rank))


def refuse(path: str, found: str, expected: str, way_out: str = "the checkpoint is damaged: load another step") -> NoReturn:
    """Raise what is wrong with a file."""
    raise CheckpointError(f"{path}: {found}; expected {expected}; way out: {way_out}", path=path)


def from_os_error(error: OSError, doing: str, path: str) -> CheckpointError:
    """What the operating system refused, as an error with its number and path in the text.

    Args:
        doing: such as "could not be written".
    """
    code = errno.errorcode.get(error.errno or 0, "")
    text = f"{code} ({os.strerror(error.errno)})" if error.errno else str(error)
    way_out = _WAYS_OUT.get(error.errno or 0, "check the path and the storage under it")
    return CheckpointError(f"{path}: {doing}: {text}; way out: {way_out}", path=path, errno=text)
