"""scripts/bench.py gives a verdict where noise allows one, and times nothing that is wrong.

Speed itself is not tested.
"""

import importlib
import json
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from ddpstats.testing import RanksFailed, run_ranks
from tests import programs

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("scripts")]

SCRIPTS = Path(__file__).parents[1] / "scripts"


@pytest.fixture
def scripts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make the scripts importable, also for ranks, which are given the parent's sys.path."""
    monkeypatch.syspath_prepend(str(SCRIPTS))


def row(samples: list[float], limit: float | None, **options: Any) -> Any:
    return importlib.import_module("bench_rows").Row("what", samples, limit, **options)


def test_verdict_is_short_beyond_the_limit_and_noisy_where_quartiles_are_far_from_each_other() -> None:
    assert row([1.2], 1.1).verdict == "short"
    assert row([1.1], 1.1).verdict == "ok"
    assert row([8.9], 9.0, at_least=True).verdict == "short"
    assert row([9.0], 9.0, at_least=True).verdict == "ok"
    assert row([1e9], None).verdict == "-"
    assert row([], 1.1).verdict == "-"
    assert row([0.9, 1.0, 1.2], 1.1).verdict == "ok"
    assert row([0.8, 0.8, 1.7, 2.3, 2.3], 1.1).verdict == "noisy"


def test_row_shows_median_and_quartiles_of_the_rounds() -> None:
    rows = importlib.import_module("bench_rows")
    samples = rows.ratios({"a": [1.0, 4.0, 9.0], "b": [1.0, 2.0, 3.0]}, "a", "b")
    assert samples == [1.0, 2.0, 3.0]
    assert row(samples, 2.5).cells() == ("what", "<= 2.50 x", "2 x", "1.50 .. 2.50", "ok")
    assert row([], None).cells() == ("what", "-", "skipped", "", "-")


def turns_of_known_length() -> tuple[list[str], dict[str, list[float]]]:
    rows, rank = importlib.import_module("bench_rows"), dist.get_rank()
    order: list[str] = []

    def variant(name: str, start: float, end: float) -> Any:
        def run(number: int) -> tuple[float, float]:
            order.append(f"{name}{number}")
            return start, end

        return run

    seconds = rows.take_turns({"a": variant("a", rank, 2.0 + 3 * rank), "b": variant("b", 0.0, 1.0)}, 0)
    return order, seconds


def test_variants_take_turns_in_one_order_and_last_from_the_last_start_to_the_last_end() -> None:
    first, second = run_ranks(turns_of_known_length, 2).values()
    assert first == second
    order, seconds = first
    assert [set(order[at : at + 2]) for at in (0, 2, 4)] == [{"a0", "b0"}, {"a0", "b0"}, {"a1", "b1"}]
    assert seconds == {"a": [4.0, 4.0], "b": [1.0, 1.0]}


def time_an_average(factor: float) -> None:
    reduction = importlib.import_module("bench_reduction")
    reducer, weight = importlib.import_module("ddpstats").StatsReducer(), 8.0 * (dist.get_rank() + 1)
    reduction.checked(lambda stats: {k: factor * v for k, v in reducer(stats, weight).values.items()}, 3, float)


def test_variant_with_wrong_result_is_not_timed() -> None:
    run_ranks(time_an_average, 2, 1.0).values()
    with pytest.raises(RanksFailed, match="a result is wrong"):
        run_ranks(time_an_average, 2, 1.001).values()


def test_words_choose_what_is_measured_and_json_holds_its_samples(tmp_path: Path) -> None:
    numbers = tmp_path / "bench.json"
    command = [str(SCRIPTS / "bench.py"), "--quick", "imports", "flush 10", "--json", str(numbers)]
    done = programs.run(command, timeout=180, fresh=True)
    assert done.returncode == 0, done.stderr
    names = ["import ddpstats, beyond a bare", "window, 50 adds of 10 tensors and a flush / 50 reductions"]
    written = json.loads(numbers.read_text())
    for name, line, data in zip(names, done.stdout.splitlines()[4:], written["rows"], strict=True):
        assert line.startswith(name)
        assert data["name"].startswith(name)
    assert "torch" in written["machine"]
    assert len(written["rows"][1]["samples"]) == 2
    assert written["rows"][1]["limit"] == 0.05


def test_word_without_a_measurement_is_an_error_that_names_all() -> None:
    done = programs.run([str(SCRIPTS / "bench.py"), "no such"], timeout=60, fresh=True)
    assert done.returncode == 2
    assert "no measurement has no such in its name; there are reduction, new_keys, memory" in done.stderr
