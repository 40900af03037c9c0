"""Keeps freed memory with the process between steps.

A graph asks for the same memory in every step. By default glibc gives large freed blocks back to the kernel, which then
hands out zeroed pages anew, one fault per 4 KiB: 4 to 10 % of a training step on the CPU. PyTorch's CUDA allocator keeps
freed memory for the same reason.
"""

from __future__ import annotations

import ctypes
import platform

_M_TRIM_THRESHOLD = -1
_M_MMAP_THRESHOLD = -3
_LARGEST_THRESHOLD = 32 << 20
"""glibc takes no larger threshold: tensors above 32 MiB are still mapped anew."""


def keep_freed_memory() -> bool:
    """Asks glibc's allocator to keep freed blocks. Returns False where there is no glibc. Harmless to repeat."""
    if platform.libc_ver()[0] != "glibc":
        return False
    library = ctypes.CDLL(None)
    return bool(library.mallopt(_M_MMAP_THRESHOLD, _LARGEST_THRESHOLD) and library.mallopt(_M_TRIM_THRESHOLD, -1))
