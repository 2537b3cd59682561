"""NAMEs of entries, taken apart."""

from __future__ import annotations

from typing import Any

import pytest

from ddpstats.dump.format._names import Name, parse_name


@pytest.mark.parametrize(
    ("full", "parts"),
    [
        ("Functional.linear.5.backward", ("Functional", "linear", "", 5, "backward")),
        ("Tensor.__add__.0.forward", ("Tensor", "__add__", "", 0, "forward")),
        ("Torch.nn.functional.x.12.forward", ("Torch", "nn.functional.x", "", 12, "forward")),
        ("Module.net.0.fc.Linear.forward.3", ("Module", "net.0.fc", "Linear", 3, "forward")),
        ("Module.root.Net.backward.0", ("Module", "root", "Net", 0, "backward")),
        ("Module.fc.Linear.parameters_grad", ("Module", "fc", "Linear", None, "parameters_grad")),
        ("Module.fc.Linear.parameters_grad.1", ("Module", "fc", "Linear", 1, "parameters_grad")),
        ("Distributed.all_reduce.0.forward", ("Distributed", "all_reduce", "", 0, "forward")),
        ("Functional.linear.5.backward.1", ("Functional", "linear", "", 5, "backward")),
        ("Module.net.0.fc.Linear.backward.3.1", ("Module", "net.0.fc", "Linear", 3, "backward")),
        ("Functional.linear.5.forward.1", ("", "Functional.linear.5.forward.1", "", None, "")),
        ("something else", ("", "something else", "", None, "")),
    ],
)
def test_the_parts_of_a_name(full: str, parts: Any) -> None:
    name = parse_name(full)
    assert name == Name(full, *parts)
    assert name.is_module == (parts[0] == "Module")
    assert name.is_collective == (parts[0] == "Distributed")


@pytest.mark.parametrize(
    ("full", "forward"),
    [
        ("Torch.log.0.backward", "Torch.log.0.forward"),
        ("Torch.log.0.backward.1", "Torch.log.0.forward"),
        ("Module.backward_net.fc.Linear.backward.3", "Module.backward_net.fc.Linear.forward.3"),
        ("Module.a.backward.Linear.backward.3.1", "Module.a.backward.Linear.forward.3"),
        ("Module.fc.Linear.backward", "Module.fc.Linear.forward"),
        ("Torch.log.0.forward", "Torch.log.0.forward"),
        ("a.backward.b", "a.backward.b"),
    ],
)
def test_the_forward_pass(full: str, forward: str) -> None:
    assert parse_name(full).forward == forward
