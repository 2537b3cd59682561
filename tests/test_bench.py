"""scripts/bench.py reports every row, gives a verdict where noise allows one, and times nothing that is wrong.

Speed itself is not tested.
"""

import importlib
from pathlib import Path

import pytest

from ddpstats.testing import RanksFailed, run_ranks
from tests import programs
from tests.needs import needs

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("scripts")]

SCRIPTS = Path(__file__).parents[1] / "scripts"
LIMIT_SEC = 280


@pytest.fixture
def scripts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make the scripts importable, also for ranks, which are given the parent's sys.path."""
    monkeypatch.syspath_prepend(str(SCRIPTS))


def test_row_beyond_its_limit_is_short() -> None:
    rows = importlib.import_module("bench_rows")
    assert rows.Row("slow", 1.2, 1.1).is_short
    assert not rows.Row("fast", 1.1, 1.1).is_short
    assert rows.Row("gain", 8.9, 9.0, at_least=True).is_short
    assert not rows.Row("gain", 9.0, 9.0, at_least=True).is_short
    assert rows.Row("reported only", 1e9).verdict == "-"


def test_row_whose_quartiles_reach_over_the_limit_is_noisy() -> None:
    rows, loop = importlib.import_module("bench_rows"), importlib.import_module("_bench_loop")
    assert rows.Row("steady", 1.0, 1.1, quartiles=loop.Spread(1.0, 0.9, 1.2, 9)).verdict == "ok"
    assert rows.Row("lucky", 0.5, 1.1, quartiles=loop.Spread(0.6, 0.3, 2.3, 9)).verdict == "noisy"
    assert rows.Row("unlucky", 1.7, 1.1, quartiles=loop.Spread(1.6, 0.8, 2.3, 9)).verdict == "noisy"


def test_ratio_is_of_the_medians_and_quartiles_are_of_the_rounds() -> None:
    loop = importlib.import_module("_bench_loop")
    timings = loop.Timings({"a": [1.0, 4.0, 9.0], "b": [1.0, 2.0, 3.0]})
    assert timings.ratio("a", "b") == 2.0
    assert timings.ratios("a", "b") == loop.Spread(2.0, 1.5, 2.5, 3)


def averages_of_espnet_and_ours() -> list[list[float]]:
    import torch
    import torch.distributed as dist

    calls = importlib.import_module("bench_reduction")
    rank = dist.get_rank()
    stats = {"a": torch.tensor([1.0 + rank]), "b": torch.tensor([float("nan") if rank else 2.0])}
    averages = (calls.per_leaf_average()[0], calls.gathered_average)
    answers = [average(stats, torch.tensor([8.0 + rank]), True) for average in averages]
    return [[*map(float, values.values()), float(total)] for values, total in answers]


@pytest.mark.library
def test_averages_of_bench_equal_those_of_espnet() -> None:
    needs("espnet2")
    for espnets, ours in run_ranks(averages_of_espnet_and_ours, 2).values():
        assert espnets == ours


def time_a_wrong_one() -> None:
    calls = importlib.import_module("bench_reduction")
    calls._verify(
        "off by one", calls.Variant(lambda number: {"loss_00000": -1.0}, dict, lambda rank, number: range(1)), 1
    )


def test_variant_with_wrong_result_is_not_timed() -> None:
    with pytest.raises(RanksFailed, match="'off by one' is wrong"):
        run_ranks(time_a_wrong_one, 2).values()


def test_png_without_matplotlib_names_the_extra_to_install(tmp_path: Path) -> None:
    code = "import importlib.util, runpy, sys; importlib.util.find_spec = lambda name: None; "
    code += f"sys.path.insert(0, {str(SCRIPTS)!r}); sys.argv = ['bench', '--png', 'x.png']; "
    code += f"runpy.run_path({str(SCRIPTS / 'bench.py')!r}, run_name='__main__')"
    done = programs.run(["-c", code], timeout=LIMIT_SEC, cwd=tmp_path, fresh=True)
    assert done.returncode == 2
    assert "pip install 'ddpstats[bench]'" in done.stderr
