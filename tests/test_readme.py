"""Every Python block of README.md and docs/ runs as one script, as pasted, with the reader's own program around it.

Blocks that need torch alone have no mark.
"""

from __future__ import annotations

import re
import shlex
import textwrap
from pathlib import Path
from typing import Any

import pytest

from ddpstats import cli
from tests import programs
from tests.needs import needs

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
BLOCKS = [
    block
    for page in PAGES
    for block in re.findall(r"^```python\n(.*?)^```$", page.read_text(), re.MULTILINE | re.DOTALL)
]
VERBS = "run|watch|report|replay|compare|nan-origin|doctor|lint"
COMMANDS = dict.fromkeys(
    command
    for page in PAGES
    for block in re.findall(r"^```console\n(.*?)^```$", page.read_text(), re.MULTILINE | re.DOTALL)
    for command in re.findall(rf"^\$ .*?\bddpstats ((?:{VERBS})\b.*)$", block, re.MULTILINE)
)
LIMIT_SEC = 150
README_LINES = 220

PROGRAM = """
    import torch
    import torch.distributed as dist
    from torch.nn.parallel import DistributedDataParallel

    dist.init_process_group("gloo", store=dist.TCPStore("127.0.0.1", 0, 1, True), rank=0, world_size=1)
    batch_size, stats = 8, {"loss": torch.tensor(0.5)}
    model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.LayerNorm(8), torch.nn.Linear(8, 1))
    ddp = DistributedDataParallel(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loader = [torch.randn(3, 4)] * 2

    def loss_fn(output, wanted=0.0):
        return (output - wanted).square().mean()

    def train(batch):
        loss_fn(ddp(batch)).backward()
"""
PAIRS = (
    PROGRAM
    + """
    loader = [{"x": torch.randn(3, 4), "y": torch.randn(3, 1)}] * 2
"""
)
CONFIG = (
    PROGRAM
    + """
    import json, pathlib, re

    page = pathlib.Path(ROOT, "docs", "dumps.md").read_text()
    pathlib.Path("config.json").write_text(re.search(r"^```json\\n(.*?)^```$", page, re.M | re.S)[1])
"""
)
LIGHTNING = """
    import lightning, torch

    class Module(lightning.LightningModule):
        def __init__(self):
            super().__init__()
            self.layer = torch.nn.Linear(4, 1)

        def training_step(self, batch, index):
            self.trainer.should_stop = True
            return self.layer(batch).square().mean()

        def configure_optimizers(self):
            return torch.optim.SGD(self.parameters(), lr=0.1)

    module, loader = Module(), torch.utils.data.DataLoader(torch.randn(8, 4))
"""
TRANSFORMERS = """
    import torch, transformers

    class Model(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = torch.nn.Linear(1, 1)

        def forward(self, x, labels):
            return {"loss": (self.layer(x) - labels).square().mean()}

    model, data = Model(), [{"x": torch.ones(1), "labels": torch.zeros(1)}] * 4
    args = transformers.TrainingArguments("out", max_steps=2, use_cpu=True, report_to=[], save_strategy="no")
"""
OWN_REDUCTIONS = """
    import torch

    losses = {"loss_cls": torch.ones(2)}
"""
ESPNET = """
    import torch
    from espnet2.train.distributed_utils import DistributedOption
    from espnet2.train.trainer import TrainerOptions
    from tests.integrations import espnet_runs

    steps = [[({"a": 1.0}, 2), ({"a": 2.0}, 2)]]
    script = espnet_runs.Script(steps, steps)
    model = espnet_runs.scripted_model(script)
    arguments = dict(
        optimizers=[torch.optim.SGD(model.parameters(), lr=0.05)],
        schedulers=[None],
        train_iter_factory=espnet_runs.batches(script.train),
        valid_iter_factory=espnet_runs.batches(script.valid),
        plot_attention_iter_factory=None,
        trainer_options=espnet_runs.options_of(TrainerOptions, ".", script),
        distributed_option=DistributedOption(distributed=False, ngpu=0),
    )
"""

# What a block begins with, past its imports -> the reader's program ("" for none), the libraries, what it prints.
READERS = {
    "averages =": (PROGRAM, [], ""),
    'ddpstats.integrations.install("espnet")': ("", ["espnet2"], ""),
    "capture = ddpstats.NaNCapture": (PROGRAM, [], ""),
    "sentinel = ddpstats.Sentinel(ddp, mode=2, digest": (PAIRS, [], ""),
    "dump = ddpstats.StatsDump": (CONFIG, [], ""),
    "def mean_of": ("", [], "2 passed"),
    "with ddpstats.collective_guard": (PROGRAM, [], ""),
    "print(ddpstats.integrations.install(": ("", ["lightning", "torchmetrics"], "patched: lightning, torchmetrics\n"),
    "loss, log_vars = parse_losses(losses)": (OWN_REDUCTIONS, [], "{'loss': tensor(1.)}"),
    "stopper = DdpstatsNaNCapture": (LIGHTNING, ["lightning"], ""),
    "with NaNCaptureCallback": (TRANSFORMERS, ["transformers"], ""),
    'with capture("captures")': (ESPNET, ["espnet2"], ""),
    "reducer = StatsReducer": ("", [], ""),
    "sentinel = ddpstats.Sentinel(ddp, mode=2)": (PROGRAM, [], ""),
    "class Trainer": ("", [], "2 passed"),
    "loader = [torch.ones": ("", [], "'loss': 1.0, 'tokens': 1600.0"),
}


def beginning(block: str) -> str:
    lines = [line for line in block.splitlines() if line and not line.startswith(("import ", "from ", "#"))]
    matches = [key for key in READERS if lines[0].startswith(key)]
    assert len(matches) == 1, f"no program for the block that begins with {lines[0]!r}: add it to READERS"
    return matches[0]


def test_every_program_has_its_block_and_every_block_its_program() -> None:
    assert [beginning(block) for block in BLOCKS] == list(READERS)


def test_the_readme_is_short() -> None:
    assert len((ROOT / "README.md").read_text().splitlines()) <= README_LINES


def test_every_page_is_linked_and_every_link_leads_somewhere() -> None:
    linked = set()
    for page in [*PAGES, ROOT / "CONTRIBUTING.md"]:
        for link in re.findall(r"\]\(([^)#:]*)(#[^)]*)?\)", page.read_text()):
            target = (page.parent / link[0]).resolve() if link[0] else page
            assert target.exists(), f"{page.name} links to {link[0]}"
            if link[1]:
                assert link[1][1:] in _anchors(target.read_text()), f"{page.name} links to {link[0]}{link[1]}"
            linked.add(target)
    assert set(PAGES[1:]) <= linked


@pytest.mark.parametrize("command", COMMANDS)
def test_a_command_line_of_the_pages_is_understood(command: str) -> None:
    words = shlex.split(command, comments=True)
    cli._parser(words[0]).parse_args(words)


def _anchors(text: str) -> list[str]:
    """Return the anchors of the headings, as GitHub makes them."""
    headings = re.findall(r"^#+ (.*)$", text, re.MULTILINE)
    return [re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-") for heading in headings]


def marked(block: str) -> Any:
    libraries = READERS[beginning(block)][1]
    return pytest.param(block, id=beginning(block), marks=[pytest.mark.library] if libraries else [])


@pytest.mark.parametrize("block", [marked(block) for block in BLOCKS])
def test_a_block_runs_as_one_script(block: str, tmp_path: Path) -> None:
    program, libraries, printed = READERS[beginning(block)]
    needs(*libraries)
    if program:
        (tmp_path / "program.py").write_text(f"ROOT = {str(ROOT)!r}\n" + textwrap.dedent(program))
        block = f"from program import *\n{block}"
    script = tmp_path / "pasted.py"
    script.write_text(block)
    # pytest finds the plugin by itself where the package is installed, and not where it is only on PYTHONPATH
    plugins = {"PYTEST_PLUGINS": "ddpstats.testing.pytest_plugin"}
    done = programs.run([str(script)], timeout=LIMIT_SEC, cwd=tmp_path, environ=plugins)
    assert done.returncode == 0, done.stdout + done.stderr
    assert printed in done.stdout, done.stdout + done.stderr


def test_no_block_needs_an_import_of_another() -> None:
    for block in BLOCKS:
        for module in ("ddpstats", "torch", "dist"):
            if re.search(rf"\b{module}\.\w", re.sub(r"#.*|^(import|from) .*", "", block, flags=re.MULTILINE)):
                assert re.search(rf"^import .*\b{module}\b", block, re.MULTILINE), f"{module} in:\n{block}"
