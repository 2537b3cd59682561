"""Every promise of README.md, docs/ and the docstrings has a test beside it, in ``promises.md``."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests import promises
from tests.promises import Sentence

TESTS = {"tests/test_a.py::test_one", "tests/test_a.py::test_two"}
SENTENCE = Sentence("Limits", "It never sleeps.")
ENTRY = ("Limits", "It never sleeps.")


def test_every_promise_has_a_test_or_a_reason() -> None:
    listed = promises.entries(promises.FILE.read_text())
    problems = promises.problems(promises.promises(), listed, promises.existing_tests(promises.ROOT))
    assert not problems, "\n".join([f"{len(problems)} problems; see the head of tests/promises.md", *problems])


def test_the_file_is_in_the_order_of_the_documents() -> None:
    text = promises.FILE.read_text()
    ordered = promises.written(text.split("\n## ")[0], promises.promises(), promises.entries(text))
    assert text == ordered, "python -m tests.promises puts it in order"


@pytest.mark.parametrize(
    ("sentences", "beside", "said"),
    [
        ([SENTENCE], ["tests/test_a.py::test_one"], None),
        ([SENTENCE], ["tests/test_a.py::test_one[with-parameters]", "tests/test_a.py::test_two"], None),
        ([SENTENCE], ["no promise: it speaks of cats"], None),
        ([SENTENCE], None, "not in promises.md: Limits: It never sleeps."),
        ([], ["tests/test_a.py::test_one"], "no longer in the documents: Limits: It never sleeps."),
        ([SENTENCE], ["tests/test_a.py::test_three"], "no such test: tests/test_a.py::test_three"),
        ([SENTENCE], ["test_one"], "no such test: test_one"),
        ([SENTENCE], [], "neither a test nor a reason"),
        ([SENTENCE], ["no promise: "], "neither a test nor a reason"),
        ([Sentence("Other", SENTENCE.text)], ["tests/test_a.py::test_one"], "not in promises.md: Other: "),
    ],
)
def test_what_does_not_fit_is_told(sentences: list[Sentence], beside: list[str] | None, said: str | None) -> None:
    found = promises.problems(sentences, {} if beside is None else {ENTRY: beside}, TESTS)
    assert found == [] if said is None else any(line.startswith(said) for line in found)


def test_what_is_written_is_read() -> None:
    sentences = [
        SENTENCE,
        Sentence("ddpstats.Sum", "The same everywhere."),
        Sentence("ddpstats.Sum", "At once.", "`a`"),
    ]
    listed = {
        (one.group, one.line): ["tests/test_a.py::test_one", "no promise: it speaks of cats"] for one in sentences
    }
    assert promises.entries(promises.written("# Head\n\ntext", sentences, listed)) == listed


README = """# Title

First line never ends
here. Second `a. B never` one! Third one.

- a point, always
1. a number, never

| name | what |
|---|---|
| `x` | at once. Later it is `the same`; no rank is left |

```python
call()  # the same again
```

```console
$ always
```
"""


def test_the_readme_is_taken_apart() -> None:
    found = list(promises.document_sentences(README))
    assert [one.line for one in found] == [
        "First line never ends here.",
        "Second `a. B never` one!",
        "Third one.",
        "a point, always",
        "a number, never",
        "name: what",
        "`x`: at once.",
        "`x`: Later it is `the same`; no rank is left",
        "the same again",
    ]
    assert {one.group for one in found} == {"Title"}
    assert [one.promises for one in found] == [*(True, False, False, True, True, False, True, True, True)]


PAGE = """# My loss

Never.

<!-- measured: begin -->
Always.
<!-- measured: end -->

## Limits

Nothing.
"""


def test_pages_of_docs_are_read_and_measured_parts_are_not(tmp_path: Path) -> None:
    (tmp_path / "docs").mkdir()
    for name in ("loss.md", *promises.MEASURED):
        (tmp_path / "docs" / name).write_text(PAGE)
    assert [page.name for page in promises.documents(tmp_path)] == ["README.md", "loss.md"]
    found = list(promises.document_sentences(PAGE, "docs/loss.md"))
    assert [(one.group, one.text) for one in found] == [
        ("docs/loss.md: My loss", "Never."),
        ("docs/loss.md: Limits", "Nothing."),
    ]
    titles = [line for line in promises.written("# Head", found, {}).splitlines() if line.startswith("## ")]
    assert titles == ["## docs/loss.md"]


def test_no_sentence_of_the_documents_stands_twice() -> None:
    places: dict[str, list[str]] = {}
    for page in promises.documents(promises.ROOT):
        for sentence in promises.document_sentences(page.read_text(), page.name):
            if len(sentence.text) > 40:
                places.setdefault(sentence.text, []).append(sentence.group)
    assert {text: groups for text, groups in places.items() if len(groups) > 1} == {}


MODULE = '''"""Never fails.

Steps::

    always()  # code

1. Every rank must call. It is at once
   there.
"""

from ddpstats._inner import Kept as Kept, hidden


def public() -> None:
    """What.

    Args:
        value, other: the same.
        third: no thread
            of ours.

    Example::

        nothing()
    """


def _private() -> None:
    """Always."""
'''

INNER = '''
class _Base:
    def inherited(self) -> None:
        """Bit for bit."""


class Kept(_Base):
    """Everything."""

    def __call__(self) -> None:
        """One collective."""

    @property
    def value(self) -> int:
        """Nothing."""

    def _inside(self) -> None:
        """Never."""
'''


def test_docstrings_are_those_of_public_names(tmp_path: Path) -> None:
    package = tmp_path / "ddpstats"
    for name in (*promises.PACKAGES, *promises.MODULES):
        file = package.joinpath(*name.split("."))
        file.parent.mkdir(parents=True, exist_ok=True)
        if name in promises.PACKAGES or name == "integrations":
            file.mkdir(exist_ok=True)
            (file / "__init__.py").touch()
        else:
            file.with_suffix(".py").touch()
    (package / "__init__.py").write_text(MODULE)
    (package / "_inner.py").write_text(INNER)
    assert [(one.group, one.text) for one in promises.docstring_sentences(tmp_path)] == [
        ("ddpstats.__init__", "Never fails."),
        ("ddpstats.__init__", "Steps"),
        ("ddpstats.__init__", "Every rank must call."),
        ("ddpstats.__init__", "It is at once there."),
        ("ddpstats.Kept", "Everything."),
        ("ddpstats.Kept.__call__", "One collective."),
        ("ddpstats.Kept.value", "Nothing."),
        ("ddpstats.Kept.inherited", "Bit for bit."),
        ("ddpstats.public", "What."),
        ("ddpstats.public", "value, other: the same."),
        ("ddpstats.public", "third: no thread of ours."),
    ]


@pytest.mark.parametrize(
    ("text", "promises_something"),
    [
        ("Every rank must call.", False),
        ("Every rank must call; every rank gets the same.", True),
        ("Compared every 64 steps.", False),
        ("Compared in every step.", True),
        ("NaN where no rank holds it.", False),
        ("No rank holds it.", True),
        ("There is no longer a key.", False),
        ("One of them.", False),
        ("One small all_reduce.", True),
        ("A single text.", True),
        ("None was given.", False),
        ("It takes `nothing` and ``never``.", False),
        ("It takes nothing.", True),
        ("BITWISE alike.", True),
    ],
)
def test_words_that_promise(text: str, promises_something: bool) -> None:
    assert Sentence("", text).promises == promises_something


def test_all_public_names_are_read() -> None:
    groups = {group for group, _ in promises.public_nodes()}
    import ddpstats
    from ddpstats import capture, dump, errors, guard, sentinel, testing

    for package in (ddpstats, capture, dump, guard, sentinel):
        expected = {f"{package.__name__}.{name}" for name in package.__all__ if name != "__version__"}
        assert expected <= groups
    for module in (errors, testing):
        names = [name for name, value in vars(module).items() if isinstance(value, type) and not name.startswith("_")]
        assert {f"{module.__name__}.{name}" for name in names if "Error" in name or "Rank" in name} <= groups
