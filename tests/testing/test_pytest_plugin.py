"""The pytest plugin runs a marked test on ranks, and its report names the ranks and errors of those that fail."""

from __future__ import annotations

import configparser
import os
import textwrap
from pathlib import Path

import pytest

from ddpstats.testing import pytest_plugin
from tests import programs

pytest_plugins = ("pytester",)
ROOT = Path(__file__).parents[2]
PLUGIN = "ddpstats.testing.pytest_plugin"

TESTS = """
    import asyncio, os, pathlib, signal, time, unittest
    import pytest, torch
    import torch.distributed as dist
    from hypothesis import given, strategies

    class TestClass:
        number = 2

        def setup_method(self):
            self.made = dist.get_rank()

        @pytest.mark.ranks(2)
        @pytest.mark.collective_guard("step", infer_labels=False)
        def test_method(self):
            one = torch.ones(1)
            dist.all_reduce(one)
            assert one.item() == self.number == dist.get_world_size()
            assert self.made == dist.get_rank()

    @pytest.mark.ranks(2)
    def test_one_rank_differs():
        print("printed by", dist.get_rank())
        loss = 0.5
        if dist.get_rank() == 1:
            assert loss == 0.25
        dist.barrier()

    @pytest.mark.ranks(2)
    @pytest.mark.collective_guard("strict")
    def test_mismatch():
        stats = {"loss": torch.ones(1), "snr" if dist.get_rank() else "l1": torch.ones(1)}
        for key in stats:
            dist.all_reduce(stats[key])

    @pytest.mark.ranks(2)
    @pytest.mark.collective_guard("strict")
    @pytest.mark.parametrize("then_skips", [False, True])
    def test_mismatch_is_caught(then_skips):
        try:
            dist.all_reduce(torch.ones(2 + dist.get_rank()))
        except Exception:
            print("caught by", dist.get_rank())
        if then_skips:
            pytest.skip("no step was taken")

    @pytest.mark.ranks(2)
    @pytest.mark.collective_guard("strict", on_mismatch="warn")
    def test_mismatch_is_warned_of():
        dist.all_reduce(torch.ones(1), dist.ReduceOp.MAX if dist.get_rank() else dist.ReduceOp.SUM)

    @pytest.mark.ranks(2, timeout=6)
    def test_hangs():
        def inner():
            time.sleep(1000)
        if dist.get_rank() == 1:
            print("about to hang")
            inner()

    @pytest.mark.ranks(2)
    def test_dies():
        if dist.get_rank() == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        dist.barrier()

    @pytest.mark.ranks(1)
    def test_skips():
        pytest.skip("not here")

    @pytest.mark.ranks(2)
    def test_one_skips():
        if dist.get_rank() == 1:
            pytest.skip("no data")

    class Own(Exception):
        pass

    @pytest.mark.ranks(2)
    @pytest.mark.xfail(raises=Own, strict=True)
    def test_raises_what_is_expected():
        raise type("Special", (Own,), {})("on both")

    @pytest.mark.ranks(2)
    @pytest.mark.xfail(raises=(KeyError, Own))
    def test_raises_something_else():
        raise ValueError("on both") if dist.get_rank() else KeyError("on one")

    @pytest.mark.ranks(2)
    async def test_coroutine():
        raise AssertionError

    @pytest.mark.ranks(2)
    @given(strategies.integers())
    def test_given(number):
        raise AssertionError

    class TestCase(unittest.TestCase):
        @pytest.mark.ranks(2)
        def test_of_a_case(self):
            pass

    @pytest.mark.collective_guard("strict")
    def test_guard_alone():
        pass

    @pytest.mark.ranks
    def test_how_many():
        pass

    @pytest.mark.ranks(0)
    def test_none():
        pass
"""

CAUGHT = [
    "rank ? failed: *CollectiveMismatch: *",
    "rank ? failed: *CollectiveMismatch: *",
    "E * rank 0: all_reduce(float32[[]2], sum)*",
    "caught by 0",
    "caught by 1",
]


@pytest.mark.parametrize("mode", [pytest.param("prepend", marks=pytest.mark.slow), "importlib"])
def test_report_names_ranks_errors_output_and_stacks(pytester: pytest.Pytester, mode: str) -> None:
    """Also with the way to import tests that leaves no name for the ranks; then of some of them."""
    pytester.makepyfile(test_trainer=TESTS)
    some = ["-k", "method or differs"] if mode == "importlib" else []
    result = pytester.runpytest_inprocess("-p", PLUGIN, "-rfs", "--strict-markers", f"--import-mode={mode}", *some)
    lines = result.stdout
    lines.fnmatch_lines(
        [
            "rank 1 failed: assert 0.5 == 0.25",
            "rank 0 failed: RuntimeError: *",
            "rank 1:",
            ">           assert loss == 0.25",
            "E           assert 0.5 == 0.25",
            "test_trainer.py:*: AssertionError",
            "*- Captured rank 0 call -*",
            "printed by 0",
            "*- Captured rank 1 call -*",
            "printed by 1",
        ],
        consecutive=False,
    )
    if some:
        result.assert_outcomes(passed=1, failed=1, deselected=16)
        return
    result.assert_outcomes(passed=2, failed=10, skipped=1, xfailed=1, errors=4)
    for block in (
        ["rank ? failed: *CollectiveMismatch: *", "E * rank 0: all_reduce(*) 'l1'", "E * rank 1: all_reduce(*) 'snr'"],
        ["*_ test_mismatch_is_caught?False? _*", *CAUGHT],
        ["*_ test_mismatch_is_caught?True? _*", *CAUGHT],
        ["rank 1 still ran after 6 s, and was ended", "about to hang", "*rank 1 stack*", "*in inner"],
        ["rank 1 died: killed by SIGKILL (exit code -9)", "rank 0 failed: RuntimeError: *"],
        ["@pytest.mark.ranks does not run coroutines: let the test call asyncio.run"],
        ["@pytest.mark.ranks and @given: *"],
        ["@pytest.mark.ranks is for functions, and for methods of classes that are no unittest.TestCase"],
        ["@pytest.mark.collective_guard needs @pytest.mark.ranks(N): *"],
        ["@pytest.mark.ranks: ranks(n, timeout=60) missing 1 required positional argument: 'n'"],
        ["@pytest.mark.ranks: world_size must be at least 1, not 0"],
        ["FAILED *::test_raises_something_else - rank *"],
        ["SKIPPED [[]1] test_trainer.py:*: not here"],
        ["rank 1 skipped, and not all ranks did: no data"],
    ):
        lines.fnmatch_lines(block)


WARNING = """
    import os, signal, warnings, pytest, torch
    import torch.distributed as dist

    class Own(DeprecationWarning):
        pass

    @pytest.mark.ranks(2)
    def test_warns():
        warnings.warn(Own("old, says " + str(dist.get_rank())))
        warnings.warn("not to be heard")

    @pytest.mark.ranks(2)
    @pytest.mark.filterwarnings("error")
    def test_marked():
        warnings.warn("careful")

    @pytest.mark.ranks(2)
    @pytest.mark.filterwarnings("error::test_trainer.Own")
    def test_marked_with_its_own():
        warnings.warn(Own("careful"))

    @pytest.mark.ranks(2)
    @pytest.mark.collective_guard("strict", on_mismatch="warn")
    def test_mismatch():
        dist.all_reduce(torch.ones(1), dist.ReduceOp.MAX if dist.get_rank() else dist.ReduceOp.SUM)

    @pytest.mark.ranks("2")
    def test_of_a_text():
        pass

    @pytest.mark.ranks(1, timeout="2")
    def test_until_a_text():
        pass
"""


@pytest.mark.slow
def test_filters_of_warnings_reach_the_ranks_and_their_warnings_the_summary(pytester: pytest.Pytester) -> None:
    pytester.makeini("[pytest]\nfilterwarnings = ignore:not to be")
    pytester.makepyfile(test_trainer=WARNING)
    result = pytester.runpytest_inprocess("-p", PLUGIN)
    result.assert_outcomes(passed=2, failed=4, warnings=4)
    result.stdout.no_fnmatch_line("*not to be heard*")
    for block in (
        [
            "*test_trainer.py:9: UserWarning: rank 0: old, says 0",
            "*test_trainer.py:9: UserWarning: rank 1: old, says 1",
            "*UserWarning: rank 0: the ranks of the default group of 2 ranks do not run the same*",
            "*UserWarning: rank 1: the ranks of the default group of 2 ranks do not run the same*",
        ],
        ["rank ? failed: UserWarning: careful"],
        ["rank ? failed: *Own: careful"],
        ["@pytest.mark.ranks: '<' not supported between instances of 'str' and 'int'"],
        ["@pytest.mark.ranks: '>' not supported between instances of 'str' and 'int'"],
    ):
        result.stdout.fnmatch_lines(block)
    pytester.makeini("[pytest]\nfilterwarnings = error")
    result = pytester.runpytest_inprocess("-p", PLUGIN, "-k", "test_warns")
    result.stdout.fnmatch_lines("rank ? failed: *Own: old, says ?")
    on_the_line = ("-W", "error::UserWarning", "-c", os.devnull)
    result = pytester.runpytest_inprocess("-p", PLUGIN, *on_the_line, "-k", "test_warns")
    result.stdout.fnmatch_lines("rank ? failed: UserWarning: not to be heard")


OF_THE_ENVIRONMENT = """
    import ddpstats, pytest, torch
    import torch.distributed as dist

    def reduce(differs):
        dist.all_reduce(torch.ones(1), dist.ReduceOp.MAX if differs and dist.get_rank() else dist.ReduceOp.SUM)

    @pytest.mark.ranks(2)
    def test_mismatch_is_caught():
        try:
            reduce(True)
            dist.barrier()
        except ddpstats.CollectiveMismatch:
            print("caught by", dist.get_rank())

    @pytest.mark.ranks(2)
    def test_ranks_agree():
        reduce(False)
"""


@pytest.mark.slow
@pytest.mark.parametrize("guard", ["strict", "step"])
def test_the_guard_of_the_environment_fails_a_test_as_the_mark_does(
    pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch, guard: str
) -> None:
    monkeypatch.setenv("DDPSTATS_GUARD", guard)
    pytester.makepyfile(test_trainer=OF_THE_ENVIRONMENT)
    result = pytester.runpytest_inprocess("-p", PLUGIN, "-rN")  # in a CI the summary says all of it again
    result.assert_outcomes(passed=1, failed=1)
    assert "rank 0 failed: ddpstats.errors.CollectiveMismatch: " in str(result.stdout)
    assert "What differs: the reduce op." in str(result.stdout)


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["prepend", "importlib"])
def test_relative_imports_find_the_package_of_the_test(
    pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch, mode: str
) -> None:
    """Also where PYTHONPATH has another one of its name, and in a directory that is no package."""
    test = """
        import pytest
        from .helper import VALUE
        from . import helper

        @pytest.mark.ranks(2)
        @pytest.mark.parametrize("made", [helper.Made()])
        def test_relative(made):
            assert (VALUE, helper.VALUE, type(made)) == ("own", "own", helper.Made)
    """
    helper = "VALUE = 'own'\nclass Made:\n    pass"
    files = {"checks/__init__": "", "checks/inner/__init__": "from .. import helper as outer"}
    files |= {"other/checks/__init__": "", "other/checks/helper": "VALUE = 'another'"}
    packages = ["checks", "checks/inner"] + ["plain"] * (mode == "importlib")
    for package in packages:
        files |= {f"{package}/helper": helper, f"{package}/test_{package.replace('/', '_')}": test}
    for name, text in files.items():
        path = pytester.path / "project" / f"{name}.py"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(textwrap.dedent(text))
    monkeypatch.setenv("PYTHONPATH", str(pytester.path / "project" / "other"), prepend=os.pathsep)
    what = ["project/checks"] + ["project/plain"] * (mode == "importlib")
    result = pytester.runpytest_subprocess("-p", PLUGIN, f"--import-mode={mode}", "--rootdir=project", *what)
    result.assert_outcomes(passed=len(packages))


def test_long_output_is_cut_to_its_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pytest_plugin, "_SHOWN_BYTES", 4)
    path = tmp_path / "output0"
    assert pytest_plugin._end_of(path) == ""
    path.write_text("four")
    assert pytest_plugin._end_of(path) == "four"
    path.write_text("more than four")
    assert pytest_plugin._end_of(path) == "(10 bytes before this are left out)\nfour"


@pytest.mark.slow
def test_unmarked_tests_do_not_import_torch(tmp_path: Path) -> None:
    (tmp_path / "test_plain.py").write_text("def test_plain():\n    pass\n")
    code = (
        "import sys, pytest\n"
        f"status = pytest.main(['-p', {PLUGIN!r}, '--strict-markers', 'test_plain.py'])\n"
        "print(int(status), {'torch', 'numpy'} & set(sys.modules))"
    )
    done = programs.run(["-c", code], cwd=tmp_path, fresh=True)
    assert done.stdout.endswith("\n0 set()\n"), done.stdout + done.stderr


def test_entry_point_has_the_name_of_the_module() -> None:
    """Pytest refuses a plugin that ``-p`` registers once more, under another name."""
    settings = configparser.ConfigParser(delimiters=["="])
    settings.read(ROOT / "setup.cfg")
    assert settings["options.entry_points"]["pytest11"].split() == [PLUGIN, "=", PLUGIN]


ON_EACH_RANK = """
    import os, pytest, torch
    import torch.distributed as dist

    @pytest.fixture(params=["low", "high"])
    def own(request, tmp_path, pytestconfig):
        assert pytestconfig.getoption("of_the_project") == "given"
        yield lambda: (request.param, dist.get_rank())  # an object that pickle cannot carry
        assert (tmp_path / "written").read_text() == str(dist.get_rank())

    @pytest.mark.ranks(2)
    @pytest.mark.parametrize("number", [1])
    def test_passes(number, own, of_conftest, monkeypatch, capsys, tmp_path):
        rank = dist.get_rank()
        monkeypatch.setenv("PATCHED", str(rank))
        print("says", rank)
        assert capsys.readouterr().out == f"says {rank}\\n"
        assert (own()[1], of_conftest, os.environ["PATCHED"]) == (rank, ["made", rank], str(rank))
        assert list(tmp_path.iterdir()) == []
        (tmp_path / "written").write_text(str(rank))
        total = torch.ones(1)
        dist.all_reduce(total)
        assert total.item() == 2

    @pytest.mark.ranks(2)
    def test_differs(of_conftest):
        assert of_conftest == ["made", 0]

    @pytest.fixture
    def broken():
        raise OSError("no data") if dist.get_rank() else pytest.skip("not needed")

    @pytest.mark.ranks(2)
    def test_with_broken_fixture(broken):
        pass

    @pytest.fixture
    def ends_badly():
        yield
        raise OSError("still open")

    @pytest.mark.ranks(1)
    def test_with_teardown(ends_badly):
        pass

    def test_without_ranks():
        assert "PATCHED" not in os.environ and not dist.is_initialized()
"""
CONFTEST = """
    import pytest, torch.distributed as dist

    def pytest_addoption(parser):
        parser.addoption("--of-the-project")

    @pytest.fixture(scope="session")
    def of_conftest():
        return ["made", dist.get_rank()]
"""


@pytest.mark.parametrize("workers", [[], pytest.param(["-n", "2"], marks=pytest.mark.slow)], ids=["alone", "xdist"])
def test_fixtures_are_set_up_on_each_rank_and_asserts_are_rewritten(
    pytester: pytest.Pytester, workers: list[str]
) -> None:
    """Also under xdist, in a directory below the root, with options that are for the run and not for a rank."""
    pytester.makeconftest(CONFTEST)
    pytester.makeini("[pytest]\naddopts = --of-the-project=given -ra")
    pytester.mkdir("checks").joinpath("test_fixtures.py").write_text(textwrap.dedent(ON_EACH_RANK))
    options = ("-v", "--junitxml=report.xml", "--lf", "-p", PLUGIN, "--strict-markers", "-W", "error", *workers)
    run = pytester.runpytest_subprocess if workers else pytester.runpytest_inprocess
    result = run(*options, "checks")
    result.assert_outcomes(passed=3, failed=1, errors=2)
    for block in (
        ["*rank 1 failed: AssertionError: assert ?'made', 1? == ?'made', 0?*"],
        ["E*At index 1 diff: 1 != 0"],
        ["*ERROR at setup of test_with_broken_fixture*"],
        ["rank 1 failed: OSError: no data", "rank 0 skipped, and not all ranks did: not needed"],
        ["*ERROR at teardown of test_with_teardown*", "rank 0 failed: OSError: still open"],
    ):
        result.stdout.fnmatch_lines(block)
    assert 'errors="2" failures="1"' in (pytester.path / "report.xml").read_text()
