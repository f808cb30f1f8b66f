"""The native library behind remote stores; the only module that imports obstore.

obstore runs on a native thread pool that a forked child does not inherit: every call
there would hang (H51). A child that notices a new process id loads a private copy of the
native library, which has a pool of its own. See docs/adr/0003.
"""

import importlib.machinery
import importlib.util
import os
import shutil
import tempfile
from typing import Any

import obstore
import obstore.store

from reef.runtime import leaf_lock

__all__ = ["NATIVE", "Native", "abandoned"]

abandoned: list[Any] = []
"""Clients from before a fork: never used again, and never freed, since freeing would hang."""


class Native:
    """The native library, in a copy whose threads belong to this process."""

    def __init__(self) -> None:
        self._lock = leaf_lock()
        self.module: Any = obstore
        self._classes: Any = obstore.store
        self.process_id = -1

    def client(self, name: str) -> Any:
        return getattr(self._classes, name)

    def for_process(self, process_id: int) -> "Native":
        """Return the library as this process may use it."""
        if self.process_id != process_id:
            with self._lock:
                if self.process_id not in (-1, process_id):
                    self.module = _load_private_copy()
                    self._classes = self.module._store
                self.process_id = process_id
        return self


def _load_private_copy() -> Any:
    """The loader knows a library by its file: a copy of the file is another library."""
    original = obstore._obstore.__file__
    folder = tempfile.mkdtemp(prefix="reef-obstore-")
    try:
        path = shutil.copy(original, os.path.join(folder, os.path.basename(original)))
        name = "reef_forked._obstore"
        loader = importlib.machinery.ExtensionFileLoader(name, path)
        spec = importlib.util.spec_from_file_location(name, path, loader=loader)
        assert spec is not None
        module = importlib.util.module_from_spec(spec)
        loader.exec_module(module)
        return module
    finally:
        shutil.rmtree(folder, ignore_errors=True)


NATIVE = Native()
