"""The compiled kernel of reads, where it was built.

`native` is the module `reef._kernel`, or None: it was not built, it is of another version than this
package, or the environment has REEF_KERNEL=0. Each of its functions returns the same result as the
Python code around its calls, or None if it leaves the case to that code: other codecs, pages of a
rare shape, and all damage.
"""

import os
from importlib import import_module
from types import ModuleType

VERSION = 1
"""Version of the functions and their arguments; a kernel of another one is not used."""


def _load() -> ModuleType | None:
    if os.environ.get("REEF_KERNEL") == "0":
        return None
    try:
        found = import_module("reef._kernel")
    except ImportError:
        return None
    return found if found.VERSION == VERSION else None


native = _load()
