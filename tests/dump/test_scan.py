"""A `dump.json` of every layout is read entry by entry; one that is cut off or no dump is refused."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import pytest

from ddpstats.dump import scan
from ddpstats.dump.scan import Scanner
from ddpstats.errors import DumpError
from tests.dump.hand_made import as_lines, backward, document, forward, tensor

ENTRIES = [
    ("Functional.linear.0.forward", forward([tensor(1.0, 2.0)], [tensor(3.0), {"type": "str", "value": 'a "}{" b'}])),
    ("Tensor.é\\.1.backward", backward([tensor(float("nan"), 1.0)], [None, {}])),
    ("empty", {}),
    *(
        (f"Torch.add.{n}.forward", forward([tensor(float(n)), {"type": "slice", "value": [None, 1]}]))
        for n in range(40)
    ),
]
WHOLE = document(ENTRIES)
LAYOUTS = {
    "our lines": as_lines(WHOLE),
    "lines of Windows": as_lines(WHOLE).replace("\n", "\r\n"),
    "one line": json.dumps(WHOLE),
    "indent 4, not ASCII": json.dumps(WHOLE, indent=4, ensure_ascii=False),
    "tabs": json.dumps(WHOLE, indent="\t"),
    "two members on a line": as_lines(WHOLE).replace(",\n", ", ", 3),
    "with a byte order mark": "\ufeff" + json.dumps(WHOLE),
    "more after the data": json.dumps({**WHOLE, "later": [1, {"a": "}"}]}, indent=2),
}


def read(text: str) -> tuple[dict[str, Any], list[tuple[str, Any]]]:
    scanner = Scanner(io.BytesIO(text.encode()), Path("dump.json"))
    scanner.enter()
    header = {member.key: member.value() for member in scanner.members(stop_at="data")}
    scanner.enter()
    entries = [(member.key, member.value()) for member in scanner.members()]
    scanner.rest_of_braces()
    assert scanner.at_end()
    return header, entries


@pytest.mark.parametrize("chunk", [31, 1 << 20])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_layout_has_the_same_entries(layout: str, chunk: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scan, "_CHUNK_BYTES", chunk)
    header, entries = read(LAYOUTS[layout])
    assert header == {key: value for key, value in WHOLE.items() if key != "data"}
    assert repr(entries) == repr(ENTRIES)


@pytest.mark.parametrize("layout", ["our lines", "tabs", "one line"])
def test_file_cut_anywhere_is_refused(layout: str) -> None:
    text = LAYOUTS[layout].rstrip()
    for cut in [0, 1, *range(2, len(text) - 1, 97), len(text) - 1]:
        with pytest.raises(DumpError, match=r"dump\.json: .* \(byte [\d,]+\)\. It is damaged") as caught:
            read(text[:cut])
        assert caught.value.path == "dump.json"


NOT_DUMPS = ["[1]", "nothing", '{"a" 1}', '{"a": 1 "b": 2}', '{"data": {"a": {]}}', "{1: 2}", '{"data": 3}']


@pytest.mark.parametrize("text", NOT_DUMPS)
def test_file_without_an_object_of_objects_is_refused(text: str) -> None:
    with pytest.raises(DumpError, match=r"dump.json: "):
        read(text)


def test_wrong_value_is_refused_without_reading_on() -> None:
    for wrong in ("nope", "1" * 5000):
        file = io.BytesIO(b'{"data": {"a": [' + wrong.encode() + b"], " + b" " * 4_000_000 + b"}}")
        scanner = Scanner(file, Path("dump.json"))
        scanner.enter()
        list(scanner.members(stop_at="data"))
        scanner.enter()
        with pytest.raises(DumpError, match=r"dump\.json: "):
            list(scanner.members())
        assert file.tell() < 3_000_000


def test_number_cut_between_reads_is_one_number(monkeypatch: pytest.MonkeyPatch) -> None:
    text = '{"a": 1e+5, "b": -2.5E-3, "data": {}}'
    for chunk in range(1, len(text)):
        monkeypatch.setattr(scan, "_CHUNK_BYTES", chunk)
        assert read(text)[0] == {"a": 1e5, "b": -2.5e-3}


def test_deeply_nested_file_is_refused() -> None:
    with pytest.raises(DumpError, match="nested too deeply"):
        read('{"data": {"a": ' + "[" * 200_000)
