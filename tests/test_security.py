"""ddpstats opens no port beside gloo's, fetches and unpickles nothing, and loads files as tensors (`SECURITY.md`)."""

from __future__ import annotations

import re
from pathlib import Path

from ddpstats.testing import run_ranks
from tests import security_runs

PACKAGE = Path(__file__).parents[1] / "ddpstats"
BESIDE_RUNS = ("testing", "demo", "report")  # two start ranks and talk to them over socket pairs; one reads files later
UNPICKLES = r"^\s*(?:import|from) (?:pickle|marshal|shelve|dill|cloudpickle|joblib)\b"
FETCHES = r"^\s*(?:import|from) (?:urllib(?!\.parse)|http|requests|httpx|ftplib|smtplib|xmlrpc)\b"
LISTENS = r"\.listen\(|create_server\(|socketserver"
EXECUTES = r"(?<![.\w])(?:eval|exec)\("
SUSPICIOUS = re.compile("|".join((UNPICKLES, FETCHES, LISTENS, EXECUTES)), re.MULTILINE)


def test_what_listens_besides_torch_is_one_gloo_group_on_the_same_addresses() -> None:
    for before, after in run_ranks(security_runs.before_and_after, 2).values():
        assert before, "nothing listens, not even gloo"
        assert set(after) == set(before)
        assert len(after) <= len(before) + 1


def test_nothing_that_runs_in_a_training_unpickles_listens_or_fetches() -> None:
    files = [path for path in PACKAGE.rglob("*.py") if path.relative_to(PACKAGE).parts[0] not in BESIDE_RUNS]
    assert len(files) > 100
    found = {str(path): SUSPICIOUS.findall(path.read_text()) for path in files}
    assert {path: lines for path, lines in found.items() if lines} == {}


def test_such_code_would_be_seen() -> None:
    lines = ["import urllib.request", "    from pickle import loads", "x = socket.create_server(a)", "y = eval(text)"]
    assert all(map(SUSPICIOUS.search, lines))
    assert not any(map(SUSPICIOUS.search, ["model.eval()", "import pickletools", "# whoever listens"]))


def test_files_are_loaded_as_tensors_alone() -> None:
    pattern = r"(?<!safetensors\.)torch\.load\(.*\)"
    loads = [call for path in PACKAGE.rglob("*.py") for call in re.findall(pattern, path.read_text())]
    assert loads
    assert all("weights_only=True" in call for call in loads)
