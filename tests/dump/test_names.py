"""The name of an entry has a prefix, a path, a class, a number and a direction, as msprobe writes it."""

from __future__ import annotations

from typing import Any

import pytest

from ddpstats.dump.msprobe import Name, parse_name


@pytest.mark.parametrize(
    ("full", "parts"),
    [
        ("Functional.linear.5.backward", ("Functional", "linear", "", 5, "backward")),
        ("Tensor.__add__.0.forward", ("Tensor", "__add__", "", 0, "forward")),
        ("Module.net.0.fc.Linear.forward.3", ("Module", "net.0.fc", "Linear", 3, "forward")),
        ("Module.fc.Linear.parameters_grad", ("Module", "fc", "Linear", None, "parameters_grad")),
        ("Distributed.all_reduce.0.forward", ("Distributed", "all_reduce", "", 0, "forward")),
        ("Functional.linear.5.backward.1", ("Functional", "linear", "", 5, "backward")),
        ("Module.net.0.fc.Linear.backward.3.1", ("Module", "net.0.fc", "Linear", 3, "backward")),
        ("Functional.linear.5.forward.1", ("", "Functional.linear.5.forward.1", "", None, "")),
        ("something else", ("", "something else", "", None, "")),
    ],
)
def test_name_is_parsed_into_its_parts(full: str, parts: Any) -> None:
    name = parse_name(full)
    assert name == Name(full, *parts)
    assert name.is_module == (parts[0] == "Module")
    assert name.is_collective == (parts[0] == "Distributed")


@pytest.mark.parametrize(
    ("full", "forward"),
    [
        ("Torch.log.0.backward", "Torch.log.0.forward"),
        ("Torch.log.0.backward.1", "Torch.log.0.forward"),
        ("Module.a.backward.Linear.backward.3.1", "Module.a.backward.Linear.forward.3"),
        ("Torch.log.0.forward", "Torch.log.0.forward"),
        ("a.backward.b", "a.backward.b"),
    ],
)
def test_name_of_a_backward_entry_gives_that_of_its_forward_pass(full: str, forward: str) -> None:
    assert parse_name(full).forward == forward
