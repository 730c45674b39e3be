"""Which releases of Keras and its backends unisono is known to work with.

Engines build on names that no framework promises to keep, so a newer release may compute something
else without an error of its own. A bound among the dependencies would be final; this one is not.
"""

import os
import re
import sys

from unisono.errors import ConfigurationError

ANY_VERSION = "UNISONO_ANY_VERSION"
# The newest that all tests passed with; later patches of these are taken as well.
_TESTED = {"keras": (3, 15), "jax": (0, 10), "tensorflow": (2, 21), "torch": (2, 13)}


def check_versions(*frameworks: str) -> None:
    """Raise ConfigurationError where an imported framework is newer than those that were tested."""
    if os.environ.get(ANY_VERSION, "0") not in ("", "0"):
        return
    for name in frameworks:
        version = str(getattr(sys.modules.get(name), "__version__", ""))
        found = re.match(r"(\d+)\.(\d+)", version)
        major, minor = _TESTED[name]
        if found is not None and tuple(map(int, found.groups())) > (major, minor):
            raise ConfigurationError(
                f"Found {name} {version}; unisono was tested with {name} up to {major}.{minor}: "
                f'a newer one may train wrongly without an error. Install "{name}<{major}.'
                f'{minor + 1}", or a newer unisono, or set {ANY_VERSION}=1 to try it as it is.'
            )
