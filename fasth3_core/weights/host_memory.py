"""How much host memory there is to take, without a package for it."""

import ctypes
import os
import sys
from pathlib import Path


def available_bytes() -> int:
    """Memory that can be taken without pushing other programs out; on systems that do not tell, half of what there is.
    """
    meminfo = Path("/proc/meminfo")
    if meminfo.exists():
        fields = dict(line.split(":", 1) for line in meminfo.read_text(encoding="ascii").splitlines())
        return int(fields["MemAvailable"].split()[0]) * 1024
    if sys.platform == "win32":
        return _windows_available()
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 2


class _MemoryStatus(ctypes.Structure):
    _fields_ = [
        ("length", ctypes.c_ulong), ("load", ctypes.c_ulong), ("total", ctypes.c_ulonglong),
        ("available", ctypes.c_ulonglong), *((f"unused{i}", ctypes.c_ulonglong) for i in range(5)),
    ]  # fmt: skip


def _windows_available() -> int:
    status = _MemoryStatus(length=ctypes.sizeof(_MemoryStatus))
    ctypes.windll.kernel32.GlobalMemoryStatusEx(ctypes.byref(status))
    return status.available
