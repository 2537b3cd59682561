"""Lightning is there under two names, with the same modules below: ``lightning.pytorch`` and ``pytorch_lightning``.

Whoever installs the first gets the second with it, and a program may use either. So all that are installed are imported
here (the second one costs a fifth of a second, as they share what takes long), and a callback of ours is one of each.
"""

from __future__ import annotations

import importlib
from types import ModuleType
from typing import Any

from ddpstats.errors import ConfigError

ROOTS = {"lightning": "lightning.pytorch", "pytorch_lightning": "pytorch_lightning"}
"""By the name of the distribution, the package with Lightning's modules below it."""


def _imported() -> dict[str, ModuleType]:
    """The copies that can be imported. Raises `ConfigError` where none can: what the program cannot use stays out."""
    found: dict[str, ModuleType] = {}
    errors: list[str] = []
    for library, root in ROOTS.items():
        try:
            found[library] = importlib.import_module(root)
        except Exception as error:
            errors.append(f"{type(error).__name__}: {error}")
    if not found:
        raise ConfigError(
            f"ddpstats.integrations.lightning needs lightning or pytorch_lightning: {'; '.join(errors)}. "
            "pip install 'ddpstats[lightning]'"
        )
    return found


COPIES = _imported()
"""Of `ROOTS`, those that are installed."""

Callback: Any = type("Callback", tuple(copy.Callback for copy in COPIES.values()), {})
"""What is a callback to the trainers of every copy."""
