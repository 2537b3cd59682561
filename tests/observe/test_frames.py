"""A finding names the line of the program also where torch has compiled or traced it."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from ddpstats._observe.frames import calling_frame, site_of

NAME = "ddpstats_tests::look"
seen: list[str] = []


@pytest.fixture
def look() -> Iterator[None]:
    """An operator that notes who calls it."""
    with torch.library._scoped_library("ddpstats_tests", "DEF") as library:
        library.define("look(Tensor x) -> Tensor")

        def note(x: Tensor) -> Tensor:
            seen.append(str(site_of(calling_frame(2)[0])))
            return x + 1

        library.impl("look", note, "CPU")
        library.impl("look", torch.empty_like, "Meta")
        yield
    seen.clear()


def step(x: Tensor) -> Tensor:
    result: Tensor = torch.ops.ddpstats_tests.look(x)
    return result * 2


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_the_call_site_in_compiled_code_is_in_the_function(look: None, backend: str) -> None:
    torch.compile(step, backend=backend)(torch.ones(2))
    torch._dynamo.reset()
    assert seen
    assert all(f"{__file__}:" in site and site.endswith(" in step") for site in seen), seen


def test_the_call_site_of_a_traced_graph_is_the_call(look: None) -> None:
    torch.fx.symbolic_trace(step)(torch.ones(2))
    assert len(seen) == 1
    assert "test_the_call_site_of_a_traced_graph_is_the_call" in seen[0]
