"""Capture's tracer and nan-origin follow values that are not finite by the same rules."""

from __future__ import annotations

import contextlib
import io
import json
import math
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from ddpstats.capture.bisect import OPERATION, OperationTracer
from ddpstats.cli import main
from tests.dump.collecting import dumped

INF = math.inf


def set_item(x: Tensor) -> Tensor:
    y = x.clone()
    y[0] = -INF
    return y


def overwritten(fill: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    return lambda x: fill(x * INF)


MEANT: dict[str, Callable[[Tensor], Tensor]] = {
    "masked_fill": lambda x: x.masked_fill(x > 0, -INF),
    "full": lambda x: torch.full((2, 3), -INF),
    "full and triu": lambda x: torch.triu(torch.full((3, 3), -INF), 1),
    "fill_": lambda x: x.clone().fill_(-INF),
    "where": lambda x: torch.where(x > 2, x, -INF),
    "pad": lambda x: functional.pad(x, (0, 1), value=-INF),
    "add": lambda x: x + -INF,
    "sub": lambda x: x.sub(INF),
    "rsub": lambda x: INF - x,
    "clamp": lambda x: x.clamp(min=INF),
    "setitem": set_item,
    "constant_": lambda x: nn.init.constant_(x.clone(), -INF),
    "overwritten": overwritten(lambda y: y.fill_(-INF)),
    "empty": lambda x: torch.empty(2, 3).copy_(x),
}
MADE: dict[str, tuple[str, Callable[[Tensor], Tensor]]] = {
    "times infinity": ("mul", lambda x: x * INF),
    "divided by zero": ("div", lambda x: x / 0),
    "logarithm of zero": ("log", lambda x: torch.log(x * 0)),
    "overflow": ("exp", lambda x: torch.exp(x * 1000)),
    "row that is masked": ("softmax", lambda x: torch.softmax(x.masked_fill(x > 0, -INF), -1)),
    "given to what overwrites": ("log_normal_", overwritten(lambda y: y.log_normal_(1e4, 1.0))),
    "copied over": ("exp", lambda x: (x * INF).copy_(torch.exp(x * 1000))),
}


def captured(body: Callable[[Tensor], Tensor]) -> str | None:
    tracer = OperationTracer(nn.Identity())
    with tracer.watch():
        mark = tracer.mark_of(body(torch.ones(2, 3)))
    return mark.origin.what if mark is not None and mark.origin.kind == OPERATION else None


def found_in_dump(body: Callable[[Tensor], Tensor], path: Path) -> str | None:
    dumped(path, lambda: body(torch.ones(2, 3)))
    text = io.StringIO()
    with contextlib.redirect_stdout(text):
        main(["nan-origin", str(path), "--json"])
    origins = json.loads(text.getvalue())["origins"]
    return origins[0]["name"] if origins else None


@pytest.mark.parametrize("case", MEANT)
def test_infinity_that_is_meant_is_no_origin_for_both(case: str, tmp_path: Path) -> None:
    assert captured(MEANT[case]) is None
    assert found_in_dump(MEANT[case], tmp_path) is None


@pytest.mark.parametrize("case", MADE)
def test_both_name_the_operation_that_made_it(case: str, tmp_path: Path) -> None:
    operation, body = MADE[case]
    assert operation in str(captured(body))
    assert operation in str(found_in_dump(body, tmp_path))
