"""Messages shorten lists, name ranks and count things in one way."""

from __future__ import annotations

import pytest

from ddpstats._base.rank_names import ranks_text
from ddpstats._base.wording import count_of, dtype_name, listed


@pytest.mark.parametrize(
    ("things", "text"),
    [([], ""), (["a"], "a"), (["a", "b"], "a, b"), ("abc", "a, b and 1 more"), (range(5), "0, 1 and 3 more")],
)
def test_a_long_list_is_cut_short(things: list[object], text: str) -> None:
    assert listed(things, 2) == text


def test_eight_ranks_are_named() -> None:
    assert ranks_text([3]) == "rank 3"
    assert ranks_text(range(10)) == "ranks 0, 1, 2, 3, 4, 5, 6, 7 and 2 more"


def test_count_has_separators_and_the_noun_its_plural() -> None:
    assert [count_of(1, "entries in both"), count_of(1024, "tensors")] == ["1 entry in both", "1,024 tensors"]


def test_dtypes_of_tensors_and_of_files() -> None:
    assert [dtype_name("torch.float32"), dtype_name("int64")] == ["float32", "int64"]
