"""Counts, rates and output that README.md and docs/guard.md quote are those of the tables, and of the command."""

from __future__ import annotations

import re

from ddpstats.demo import as_text, report_of
from tests.demo.test_demo import report
from tests.guard.scenarios import SCENARIOS
from tests.needs import ROOT


def text_of(page: str) -> str:
    """Return the page as one line, so that a sentence is found wherever its lines break."""
    return " ".join((ROOT / page).read_text().split())


def rows_of(page: str, header: str) -> list[list[str]]:
    """Return the cells of the table whose header line begins so."""
    _, _, table = (ROOT / page).read_text().partition(f"\n{header}")
    lines = table.split("\n\n")[0].splitlines()[2:]
    return [[cell.strip() for cell in re.split(r"(?<!\\)\|", line.strip()[1:-1])] for line in lines]


def test_faults_that_the_guard_names_are_those_of_its_table() -> None:
    rows = rows_of("docs/guard-scenarios.md", "| scenario |")
    assert [row[0].strip("` ") for row in rows] == list(SCENARIOS)
    _, plain, detail, twins, strict, _, _, legal = zip(*rows, strict=True)
    assert all(cell.startswith(("**CollectiveMismatch**", "**RankMissing**")) for cell in strict)
    assert set(legal) == {"silent"}
    wrong = sum(cell.startswith("wrong") for cell in plain)
    assert (
        f"names the fault of all {len(rows)} programs that it is measured on; plain torch goes on with wrong numbers "
        f"in {wrong} of them"
    ) in text_of("README.md")
    hangs = sum(cell.startswith("hang") for cell in plain)
    on, detail_hangs = (sum(cell.startswith(how) for cell in detail) for how in ("wrong", "hang"))
    assert (
        f"has {len(rows)} faulty programs, each beside a legal twin. Plain torch goes on with wrong numbers in {wrong} "
        f"of them, and hangs in {hangs}. With `TORCH_DISTRIBUTED_DEBUG=DETAIL` {on} still go on and {detail_hangs} hang"
    ) in text_of("docs/guard.md")
    assert (sum(cell != "silent" for cell in twins), sum("hang" in cell for cell in twins)) == (6, 2)
    assert "of the twins four crash and two hang" in text_of("docs/guard.md")
    assert f'Mode "strict" names the fault in all {len(rows)}' in text_of("docs/guard.md")


def test_public_programs_are_those_of_their_table() -> None:
    rows = rows_of("docs/others.md", "| program | what it is |")
    programs = {
        row[0].partition(", tensor parallel")[0].partition(", pipeline")[0].partition(", context")[0] for row in rows
    }
    repositories = {re.findall(r"^\[([\w./-]+)\]", row[0])[0] for row in rows}
    assert f"[{len(programs)} public programs](docs/others.md)" in text_of("README.md")
    assert f"{len(programs)} public training programs of {len(repositories)} repositories" in text_of("docs/others.md")
    assert all(re.match(r"\[.*\]\(.*\) ([0-9a-f]{7}|release \d+): ", row[0]) for row in rows), "of which version?"


def test_suites_of_others_lost_no_test() -> None:
    packaged, by_hand = (
        rows_of("docs/others.md", "| suite | version |"),
        rows_of("docs/others.md", "| suite | commit |"),
    )
    runs = 0
    for *_, bare, with_us in [*packaged, *by_hand]:
        if passed := re.match(r"(\d+) pass\b", bare):
            runs += int(passed[1])
            kept = re.findall(r"(?:strict|step|patched|the same) (\d+)\b", with_us)
            assert set(kept) == {passed[1]}, (bare, with_us)
    assert f"of {runs} runs of the own tests of torch and five libraries" in text_of("README.md")


def test_rates_of_the_sentinel_are_those_of_its_table() -> None:
    rows = [row for row in rows_of("docs/sentinel.md", "| | layer 1, either detector |") if row[0].startswith("in a")]
    _, first, second, third, _ = zip(*rows, strict=True)
    assert second[0] == "100 %"
    shares = [float(cell.removesuffix(" %")) for cell in third if cell]
    largest = max(float(cell.removesuffix(" %")) for cell in first)
    assert (
        f"Of 5,400 flipped bits, replica digests (layer 2) find every one in a weight, a peer's replay (3) "
        f"{min(shares):.0f} to {max(shares):.0f} %, by place, and layer 1 alone at most {largest} %."
    ) in text_of("README.md")


def test_demo_prints_what_the_readme_shows() -> None:
    _, _, shown = (ROOT / "README.md").read_text().partition("$ scripts/launch.sh demo\n")
    assert as_text(report_of([report(0), report(1)])).startswith(shown.partition("```")[0])
