"""Readers of foreign bytes take honest files, and refuse all others with the error that they document.

Add an input that a run has found to `KNOWN_BAD`. `scripts/launch.sh test --nightly tests/fuzz` tries 20 times as many.
"""

from __future__ import annotations

import resource
from collections.abc import Iterator

import pytest
from hypothesis import HealthCheck, given, settings, strategies as st

from tests.fuzz import targets
from tests.fuzz.targets import LONGEST_BYTES, TARGETS

EXAMPLES = {"wire": 400, "bundle": 25, "dump": 10, "record": 150, "config": 200}
NIGHTLY = settings().max_examples // 100  # 20, or 1 in all other runs
KNOWN_BAD = (b"", b"[" * 2000, b'{"a":' * 2000, b"9" * 400, b"NaN", b"-1", b"1e999", b"../../x", b"\x1b[2J")
MOST_MB = 2048


@pytest.fixture(scope="module", autouse=True)
def scratch() -> Iterator[None]:
    yield
    targets.leave()


@st.composite
def changed(draw: st.DrawFn, seeds: list[bytes]) -> bytes:
    """Draw an honest input with some faults: bytes replaced, cut out, put in again, or all that follows left out."""
    data = bytearray(draw(st.sampled_from(seeds)))
    for _ in range(draw(st.integers(1, 8))):
        start = draw(st.integers(1, max(1, len(data) - 1)))
        donor = draw(st.sampled_from([bytes(data), *seeds]))
        begin, count = draw(st.integers(0, len(donor))), draw(st.sampled_from((1, 2, 100)))
        copied = st.just(donor[begin:][: draw(st.sampled_from((1, 4, 64)))] * count)
        end = start + draw(st.sampled_from((0, 1, 4, 64, LONGEST_BYTES)))
        data[start:end] = draw(st.binary(max_size=8) | st.sampled_from(KNOWN_BAD) | copied)
    return bytes(data[:LONGEST_BYTES])


@pytest.mark.parametrize("name", [pytest.param(name, marks=[pytest.mark.slow] * (name == "dump")) for name in TARGETS])
def test_honest_files_are_read(name: str) -> None:
    for seed in TARGETS[name].seeds():
        TARGETS[name].run(seed)


@pytest.mark.slow
@pytest.mark.parametrize("name", TARGETS)
def test_inputs_known_to_be_bad_raise_documented_errors_only(name: str) -> None:
    for data in KNOWN_BAD:
        for reader in range(9):
            TARGETS[name].run(bytes([reader]) + data)


@pytest.mark.slow
@pytest.mark.parametrize("name", TARGETS)
def test_changed_bytes_raise_documented_errors_only(name: str) -> None:
    target, before_kb = TARGETS[name], resource.getrusage(resource.RUSAGE_SELF).ru_maxrss

    @settings(
        max_examples=EXAMPLES[name] * NIGHTLY,
        deadline=60_000,
        derandomize=True,
        database=None,
        suppress_health_check=list(HealthCheck),
    )
    @given(changed(target.seeds()))
    def read(data: bytes) -> None:
        target.run(data)
        assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss < before_kb + (MOST_MB << 10)

    read()
