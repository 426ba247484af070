"""Tell numba the cache folder of the module that is being loaded, independent of the location of its source.

Numba's own locators name folders after the path of the source and need write access; a folder of `kernel_cache` is
named by a hash of everything its content depends on, so that copies of the package share it, and may be read-only.

Code comes from the cache without the parts of numba that only compiling needs, which take longer to import than code.
"""

from numba.core.caching import Cache, UserProvidedCacheLocator
from numba.core.runtime import rtsys


class InFolder(UserProvidedCacheLocator):
    """Locator of files in `folder`, set while a module is loaded; `complete` if nothing will be compiled there."""

    folder, complete = "", False

    def __init__(self, py_func, py_file):
        # part of a file's name: in dtypes/ the code before a function does not belong to its module
        in_room = py_func.__module__.startswith("packtrain.dtypes.")
        self._py_file, self._lineno = py_file, 0 if in_room else py_func.__code__.co_firstlineno
        self._cache_path = self.folder

    def get_source_stamp(self):
        return ""

    @classmethod
    def from_function(cls, py_func, py_file):
        return cls(py_func, py_file)


_load_overload = Cache.load_overload


def load_overload(cache, sig, target_context):
    """Return code from the cache, or None; numba's own method first imports all that code could be compiled with."""
    target_context.refresh = lambda: rtsys.initialize(target_context)
    try:
        return _load_overload(cache, sig, target_context)
    finally:
        del target_context.refresh
