"""Runs of differing elements, and what is said about them."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

import pytest
from hypothesis import given, settings, strategies as st

from tests.dump.dumps import runs_of


@pytest.mark.parametrize(
    ("positions", "elements", "words"),
    [
        ([], 10, "all 10 elements are equal"),
        (
            range(2048),
            3072,
            "elements 0..2047 of 3072 differ: contiguous, 2,048 elements = 8 KiB (a power of two), which is what a "
            "buffer overwritten in memory looks like",
        ),
        (
            range(100, 400),
            1000,
            "elements 100..399 of 1000 differ: contiguous, 300 elements = 1.2 KiB, which is what a buffer overwritten "
            "in memory looks like",
        ),
        (range(3, 6), 10, "elements 3..5 of 10 differ: contiguous, 3 elements = 12 bytes"),
        ([7], 10, "element 7 of 10 differs: a single one"),
        (range(10), 10, "all 10 elements differ: no block of memory stands out"),
        (
            range(0, 100, 3),
            100,
            "34 of 100 elements differ, in 34 runs, the largest of 1: element 0, element 3, element 6, element 9, ...; "
            "scattered, as computed values differ",
        ),
        (
            [*range(64), *range(128, 192)],
            512,
            "128 of 512 elements differ, in 2 runs of 64 elements = 256 bytes (a power of two) each: elements 0..63, "
            "elements 128..191; a few contiguous blocks, which memory written over looks like",
        ),
    ],
)
def test_words(positions: range, elements: int, words: str) -> None:
    assert runs_of(positions, elements, 4).describe() == words


@given(st.sets(st.integers(0, 60)))
@settings(deadline=None)
def test_runs_are_the_positions(positions: set[int]) -> None:
    runs = runs_of(sorted(positions), 61, 4)
    assert {place for start, stop in runs.first for place in range(start, stop)} == positions
    assert runs.differing == len(positions)
    assert runs.count == len(runs.first) == sum(place - 1 not in positions for place in positions)
    assert runs.largest == max((stop - start for start, stop in runs.first), default=0)


def test_the_list_is_capped_and_the_numbers_are_not() -> None:
    runs = runs_of(range(0, 10_000, 2), 10_000, 4)
    assert (runs.count, runs.differing, runs.largest, len(runs.first)) == (5000, 5000, 1, 1000)


@pytest.mark.parametrize("positions", [range(100, 400), [*range(64), *range(128, 192)]])
def test_in_a_view_with_gaps_no_block_of_memory_is_suspected(positions: Iterable[int]) -> None:
    words = replace(runs_of(positions, 1000, 4), is_dense=False).describe()
    assert "contiguous" not in words
    assert "overwritten" not in words
    assert "KiB" not in words
