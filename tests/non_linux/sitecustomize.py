"""Makes Linux look like another system to every process that has this folder on PYTHONPATH, and to its children.

Removes what macOS or Windows doesn't have: names of `os`, whole modules, the files of /proc and /sys, and `prctl` of
the C library. Libraries with code for each system are imported before that, so that they see the real one.
"""

import builtins
import ctypes
import io
import os
import sys
import sysconfig
import urllib.request  # noqa: F401

import llvmlite.binding
import psutil

_NAMES = (
    *("sched_getaffinity", "sched_setaffinity", "preadv", "pwritev", "pread", "posix_fadvise", "posix_fallocate"),
    *("sendfile", "copy_file_range", "memfd_create", "eventfd", "pidfd_open", "splice", "setns", "unshare"),
)
_MODULES = ("fcntl", "resource", "uvloop")


def _without_files(function):
    def call(path=".", *args, **kwargs):
        caller = sys._getframe(1).f_globals.get("__name__", "")
        if str(path).startswith(("/proc", "/sys")) and not caller.startswith("psutil"):
            raise FileNotFoundError(2, "No such file or directory", str(path))
        return function(path, *args, **kwargs)

    return call


def _without_prctl(library, name, get=ctypes.CDLL.__getattr__):
    if name == "prctl":
        raise AttributeError("dlsym: symbol not found: prctl")
    return get(library, name)


sysconfig.get_config_vars()
llvmlite.binding.get_host_cpu_name()
psutil.virtual_memory()
for name in _NAMES:
    if hasattr(os, name):
        delattr(os, name)
for name in _MODULES:
    sys.modules[name] = None
builtins.open = io.open = _without_files(io.open)
for name in ("open", "listdir", "scandir"):
    setattr(os, name, _without_files(getattr(os, name)))
ctypes.CDLL.__getattr__ = _without_prctl
sys.platform = "darwin"
