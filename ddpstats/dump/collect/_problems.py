"""What went wrong while a step was collected: noted as it happens, told when the step's files are written."""

from __future__ import annotations

import traceback
from collections.abc import Callable, Iterable
from pathlib import Path

from ddpstats.dump.format._layout import ERRORS

_MOST_KEPT = 1_000


class Problems:
    """Of one step.

    Args:
        directory: of this step and rank; its log has the errors.
    """

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._kept: list[str] = []
        self._count = 0
        self._told: set[str] = set()

    def note_error(self, where: str, error: BaseException) -> None:
        """Something of ours failed; the program goes on."""
        self.note(where, "".join(traceback.format_exception(type(error), error, error.__traceback__)).strip())

    def note(self, where: str, text: str) -> None:
        """Something that could not be collected, without an error. All are counted, the first thousand kept."""
        self._count += 1
        if len(self._kept) < _MOST_KEPT:
            self._kept.append(f"{where}: {text}")

    def safely(self, where: str, what: Callable[[], None]) -> None:
        try:
            what()
        except Exception as error:
            self.note_error(where, error)

    def sentences(self, others: Iterable[str]) -> list[str]:
        """What is to be told, errors first; each of ``others`` once for a step. Writes the log."""
        new = [sentence for sentence in others if sentence not in self._told]
        self._told.update(new)
        return [*self._errors(), *new]

    def _errors(self) -> list[str]:
        if not self._count:
            return []
        log = self._directory / ERRORS
        try:
            self._directory.mkdir(parents=True, exist_ok=True)
            with log.open("a", encoding="utf-8") as file:
                file.write("\n".join(self._kept) + "\n")
            where = f"see {log}"
        except OSError as error:
            where = f"and the log could not be written ({error}); the first: {self._kept[0]}"
        count, self._count, self._kept = self._count, 0, []
        return [f"{count} part(s) of the dump could not be collected; {where}"]
