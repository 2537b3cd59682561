"""Each path has one spelling, which no other path has."""

from __future__ import annotations

from hypothesis import given, strategies as st

from ddpstats._base.paths import Index, Path, escape_path, format_path, unique_names

steps = st.one_of(st.text(st.sampled_from("ab/[]\\0-1"), max_size=3), st.integers(-2, 2), st.integers(0, 2).map(Index))
paths = st.lists(st.lists(steps, max_size=3).map(tuple), max_size=8)


def identity(path: Path) -> tuple[tuple[type, object], ...]:
    return tuple((type(step), step) for step in path)


def test_name_of_a_path_has_slashes_and_brackets_and_escapes_those_in_keys() -> None:
    assert format_path(("train", "loss", Index(2))) == "train/loss[2]"
    assert format_path((Index(0), "a", 3)) == "[0]/a/3"
    assert format_path(()) == ""
    assert escape_path(("a/b", "0", 0, "x[1]", "")) == "a\\/b/\\0/0/x\\[1\\]/\\e"


@given(paths)
def test_names_are_unique_and_verbatim_where_that_is_possible(examples: list[Path]) -> None:
    distinct = list({identity(path): path for path in examples}.values())
    # The root is a leaf or a container, never both; `()` and `("",)` cannot meet.
    distinct = [path for path in distinct if path != ()]
    names = unique_names(distinct)
    assert len(set(names)) == len(names)
    verbatim = list(map(format_path, distinct))
    if len(set(verbatim)) == len(verbatim):
        assert names == verbatim


@given(paths)
def test_names_do_not_depend_on_the_order_of_paths(examples: list[Path]) -> None:
    distinct = list({identity(path): path for path in examples if path != ()}.values())
    forward = dict(zip(map(identity, distinct), unique_names(distinct), strict=True))
    backward = dict(zip(map(identity, distinct[::-1]), unique_names(distinct[::-1]), strict=True))
    assert forward == backward


def test_names_that_clash_are_escaped_and_no_other() -> None:
    paths = [("a/b",), ("a", "b"), ("c",), ("0",), (0,)]
    assert unique_names(paths) == [r"a\/b", "a/b", "c", r"\0", "0"]
