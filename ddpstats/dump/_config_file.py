"""The file of a configuration, read as JSON, and what is said where that fails."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

from ddpstats.errors import ConfigError

EXAMPLE = '{"task": "statistics", "dump_path": "dump", "step": [0], "level": "mix"}'


def load(path: str) -> Mapping[str, object]:
    """The object in a JSON file. Raises `ConfigError`, which names the file and what is wrong with it."""
    try:
        with open(path, encoding="utf-8-sig") as file:
            given = json.load(file, object_pairs_hook=lambda pairs: _once(path, pairs))
    except ConfigError:
        raise
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error.strerror or error}. Is this the right path?") from None
    except UnicodeDecodeError:
        raise ConfigError(f"{path}: is not a text file in UTF-8") from None
    except json.JSONDecodeError as error:
        hint = _python_word(error)
        raise ConfigError(
            f"{path}: is not legal JSON: {error.msg}, at line {error.lineno}, column {error.colno}{hint}"
        ) from None
    except RecursionError:
        raise ConfigError(f"{path}: is nested too deep; it must hold one JSON object, as in {EXAMPLE}") from None
    except ValueError as error:  # a path with a NUL in it, a number of thousands of digits
        raise ConfigError(f"{path!r}: cannot be read: {error}") from None
    if not isinstance(given, dict):
        raise ConfigError(f"{path}: holds {shown(given)}, but must hold one JSON object, as in {EXAMPLE}")
    return given


def _once(path: str, pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for key, value in pairs:
        if key in found:
            raise ConfigError(
                f"{path}: key {key!r} is given twice, as {shown(found[key])} and as {shown(value)}; "
                "leave one of them out"
            )
        found[key] = value
    return found


def _python_word(error: json.JSONDecodeError) -> str:
    """What JSON writes in place of the word of Python's at which it stopped; empty where there is none."""
    word = re.match(r"True|False|None", error.doc[error.pos :])
    written = {"True": "true", "False": "false", "None": "null"}
    return f": JSON writes {written[word[0]]}, not {word[0]}" if word else ""


def shown(value: object) -> str:
    """As it stands in JSON, and not too long."""
    try:
        text = json.dumps(value, ensure_ascii=False)
    except (TypeError, ValueError, RecursionError):
        text = f"a {type(value).__name__} that cannot be shown" if isinstance(value, (int, list, dict)) else repr(value)
    return text if len(text) <= 120 else text[:117] + "..."
