"""The pages that are stories: their programs run on two real ranks, in order, and say what the page shows."""

from __future__ import annotations

import importlib
import json
import re
import shlex
import sys
from pathlib import Path

import pytest

from tests import programs

DOCS = Path(__file__).parents[1] / "docs"
LIMIT_SEC = 150
PROGRAMS = {"torchrun": ["-m", "torch.distributed.run"], "ddpstats": ["-m", "ddpstats"]}

# What a notebook does with a cell, as far as ours need it.
RUN_CELLS = """
import json, pathlib, sys
for cell in json.loads(pathlib.Path(sys.argv[1]).read_text())["cells"]:
    source = "".join(cell["source"])
    if cell["cell_type"] == "code":
        magic, _, rest = source.partition("\\n")
        if magic.startswith("%%writefile "):
            pathlib.Path(magic.split()[1]).write_text(rest)
        else:
            exec(source)
"""


def test_from_a_wrong_number_to_a_right_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    page = (DOCS / "ten-minutes.md").read_text()
    files = dict(re.findall(r'^```python title="([\w.]+)"\n(.*?)^```$', page, re.MULTILINE | re.DOTALL))
    broken, average = files["train.py"], files["average"]
    repaired = "import ddpstats\n" + re.sub(r"^def average.*?\n\n\n", average + "\n\n", broken, flags=re.M | re.S)
    train = tmp_path / "train.py"
    (tmp_path / "test_train.py").write_text(files["test_train.py"])
    shown = re.findall(r"^```console\n\$ (.*)\n((?:.*\n)*?)```$", page, re.MULTILINE)
    assert len(shown) == 3
    error = re.findall(r"^```text\n(.*?)^```$", page, re.MULTILINE | re.DOTALL)[0]
    for program, (command, output), text in zip((broken, broken, repaired), shown, ("", error, ""), strict=True):
        train.write_text(program)
        verb, *arguments = shlex.split(command)
        done = programs.run([*PROGRAMS[verb], *arguments], timeout=LIMIT_SEC, cwd=tmp_path)
        assert (done.returncode != 0) is bool(text), done.stdout + done.stderr
        assert programs.without_gloo(done.stdout) == output, done.stderr
        said = done.stderr.replace(f"{tmp_path}/", "")
        assert text in said, said

    monkeypatch.syspath_prepend(tmp_path)
    for program, is_right in ((broken, False), (repaired, True)):
        train.write_text(program)
        for name in ("train", "test_train"):
            sys.modules.pop(name, None)
        importlib.invalidate_caches()
        test = importlib.import_module("test_train").test_ranks_that_hold_different_losses
        if is_right:
            test()
        else:
            with pytest.raises(AssertionError):
                test()
    for name in ("train", "test_train"):
        del sys.modules[name]


def test_the_notebook_runs_from_its_first_cell_to_its_last(tmp_path: Path) -> None:
    notebook = DOCS / "two-ranks.ipynb"
    cells = json.loads(notebook.read_text())["cells"]
    assert not any(cell.get("outputs") or cell.get("execution_count") for cell in cells), "save it without outputs"
    (tmp_path / "run_cells.py").write_text(RUN_CELLS)
    done = programs.run(["run_cells.py", str(notebook)], timeout=LIMIT_SEC, cwd=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "hold different things under 'acc'" in done.stdout
