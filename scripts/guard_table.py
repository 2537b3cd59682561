"""Play every scenario of the guard's tests without it, under DETAIL and under the guard, and write how each ended.

    scripts/launch.sh dev python scripts/guard_table.py docs/guard-scenarios.md [SCENARIO...]

With names only these rows are played again, and the others stay as they are in the file. Every cell is run, none is
remembered. Each run has fresh ranks and a time limit; what still runs then is a hang.
"""

from __future__ import annotations

import re
import sys
import tempfile
from collections.abc import Collection
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch

from ddpstats.guard.record import diagnose, read_records
from ddpstats.testing import RankPool, RankTimedOut
from tests.guard import scenarios

_LIMIT_SEC = 12.0
_DETAIL = {"TORCH_DISTRIBUTED_DEBUG": "DETAIL", "TORCH_CPP_LOG_LEVEL": "ERROR"}
_TELLING_WORDS = ("What differs", "Likely", "the process is gone", "did not take part", "left the guard by")


def main(target: Path, chosen: Collection[str]) -> None:
    """Play these scenarios, or all of them, and write the page."""
    lines = _head()
    before = {line.split("`")[1]: line for line in target.read_text().splitlines() if chosen and line[:3] == "| `"}
    for number, (name, row) in enumerate(scenarios.SCENARIOS.items(), 1):
        if name in before and name not in chosen:
            lines.append(before[name])
            continue
        print(f"[{number}/{len(scenarios.SCENARIOS)}] {name}", file=sys.stderr, flush=True)
        lines.append("| " + " | ".join(_row(name, row.ranks)) + " |")
    for pool in _pools.values():
        pool.close()
    target.write_text("\n".join(lines) + "\n")


def _head() -> list[str]:
    return [
        "# Which faults does the guard find, and which does torch find?",
        "",
        f"Written by `scripts/guard_table.py`: every cell was run, with torch {torch.__version__} on gloo. The "
        "programs are in `tests/guard/scenarios.py`, each beside a legal twin. *wrong, silent*: all ranks went on, "
        f"with numbers that mean nothing. *hang*: still running after {_LIMIT_SEC:.0f} s (torch's own timeout is 30 "
        "minutes). Where only the limit of a wait ends a scenario, as where two ranks wait in two groups, the guard's "
        f"limit (`timeout_sec`) is {scenarios.LIMIT_SEC:.0f} s here, {scenarios.COMPILED_LIMIT_SEC:.0f} s for "
        "`compiled`; a program without `timeout_sec` has the timeout of its process group. DETAIL is "
        "`TORCH_DISTRIBUTED_DEBUG=DETAIL`.",
        "",
        "| scenario | plain torch | DETAIL | DETAIL on the legal twin | ddpstats strict | step | record, `report` | "
        "legal twin under ddpstats |",
        "|---|---|---|---|---|---|---|---|",
    ]


def _row(name: str, ranks: int) -> list[str]:
    return [
        f"`{name}`",
        _played(name, ranks, True, {}),
        _played(name, ranks, True, _DETAIL),
        _played(name, ranks, False, _DETAIL),
        _guarded(name, ranks, "strict", True),
        _guarded(name, ranks, "step", True),
        _recorded(name, ranks),
        _both_silent(name, ranks),
    ]


_pools: dict[tuple[int, str], RankPool] = {}


def _run(ranks: int, env: dict[str, str], *call: Any) -> Any:
    """Run the call on ranks of a pool, which is started again once anything went wrong on it."""
    key = ranks, str(env)
    if key not in _pools:
        _pools[key] = RankPool(ranks, timeout_sec=_LIMIT_SEC, env=env)
    outcomes = _pools[key].run(*call)
    ends = [outcome.error or getattr(outcome.value, "error", outcome.value) for outcome in outcomes]
    if any(end not in ("", "silent") for end in ends):
        _pools[key].restart()
    return outcomes


# -- without the guard ------------------------------------------------------------------------------------------------


def _played(name: str, ranks: int, bad: bool, env: dict[str, str]) -> str:
    ends = dict.fromkeys(_end(outcome) for outcome in _run(ranks, env, scenarios.play_bare, name, bad))
    if list(ends) == [""]:
        return "wrong, silent" if bad else "silent"
    return "; ".join(end or "goes on" for end in ends)


def _end(outcome: Any) -> str:
    if isinstance(outcome.error, RankTimedOut):
        return "hang"
    if outcome.error is not None:
        return f"process dies (exit code {outcome.exit_code})"
    return _short(outcome.value)


# -- with it ----------------------------------------------------------------------------------------------------------


def _guarded(name: str, ranks: int, mode: str, bad: bool) -> str:
    outcomes = _run(ranks, {}, scenarios.probe, name, mode, bad)
    endings = [outcome.value for outcome in outcomes if outcome.value is not None]
    ends = [_cell(ending) for ending in endings] + ["process dies"] * (len(outcomes) - len(endings))
    return "; ".join(dict.fromkeys(ends))


def _cell(ending: scenarios.Ending) -> str:
    if ending.error == "silent":
        return "silent"
    lines = ending.message.splitlines()
    telling = [line.strip() for line in lines if any(words in line for words in _TELLING_WORDS)]
    return f"**{ending.error}** {_short(' '.join(telling) or lines[0], 150)}"


def _recorded(name: str, ranks: int) -> str:
    with tempfile.TemporaryDirectory() as directory:
        _run(ranks, {}, scenarios.probe, name, "record", True, directory)
        findings = diagnose(read_records(directory))
    return _cell(scenarios.Ending("found", findings[0].message)) if findings else "nothing found"


def _both_silent(name: str, ranks: int) -> str:
    ends = {_guarded(name, ranks, mode, False) for mode in ("strict", "step")}
    return "; ".join(sorted(ends))


def _short(text: str, limit: int = 90) -> str:
    without_folders = re.sub(r"(?<!\S)/\S+/", "", text)  # where some machine has built torch says nothing to a reader
    line = " ".join(word.replace("|", "/") for word in without_folders.split() if not word.startswith("["))
    return line if len(line) <= limit else line[: limit - 3] + "..."


if __name__ == "__main__":
    if len(sys.argv) < 2 or any(argument.startswith("-") for argument in sys.argv[1:]):
        print(__doc__.split("\n\n")[1].strip(), file=sys.stderr)
        sys.exit(0 if {"-h", "--help"} & {*sys.argv} else 2)
    main(Path(sys.argv[1]), sys.argv[2:])
