"""How layers hear of the other ranks: the one way in which they communicate."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

Gathered = Callable[[Callable[[], Any], str], dict[int, Any]]
"""Every rank's tree by global rank. Collective: called with what makes this rank's tree, and what it is."""
