"""What the C library's allocator does with large blocks."""

import ctypes
import sys
from contextlib import suppress

_M_MMAP_THRESHOLD = -3  # glibc's malloc.h
_LARGE_BYTES = 8 << 20


def return_large_blocks() -> None:
    """Has glibc give blocks of 8 MiB and more back to the system as soon as they are free.

    Left to itself it keeps them for later, up to 32 MiB each and for every thread apart: with a
    model of 86 MB, that was a third of what a worker took beyond plain training. Smaller ones are
    used again within a step, and giving them back costs time. Elsewhere nothing happens.
    """
    if sys.platform == "linux":
        with suppress(OSError, AttributeError):
            ctypes.CDLL(None).mallopt(_M_MMAP_THRESHOLD, _LARGE_BYTES)
