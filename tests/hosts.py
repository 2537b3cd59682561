"""A fixture with two hosts on one machine: network namespaces with different addresses, and a link between them."""

from __future__ import annotations

import contextlib
import secrets
import subprocess
from collections.abc import Iterator
from typing import NamedTuple

import pytest

NEAR, FAR = "10.213.77.1", "10.213.77.2"


class Hosts(NamedTuple):
    """The names of the network namespaces, and those of the link's ends in them."""

    near: str
    far: str
    near_link: str
    far_link: str


def ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True, capture_output=True, timeout=20)


@pytest.fixture
def hosts() -> Iterator[Hosts]:
    with two_namespaces() as (near, far):
        made = Hosts(near, far, *(f"{name}{secrets.token_hex(3)}" for name in ("dvn", "dvf")))
        with skip_where_not_allowed():
            ends = f"{made.near_link} netns {near} type veth peer name {made.far_link} netns {far}"
            ip("link", "add", *ends.split())
            for namespace, link, address in ((near, made.near_link, NEAR), (far, made.far_link, FAR)):
                ip("-n", namespace, "addr", "add", f"{address}/24", "dev", link)
                ip("-n", namespace, "link", "set", link, "up")
        yield made


@contextlib.contextmanager
def two_namespaces() -> Iterator[list[str]]:
    names = [f"{name}{secrets.token_hex(3)}" for name in ("dn", "df")]
    try:
        with skip_where_not_allowed():
            for name in names:
                ip("netns", "add", name)
                ip("-n", name, "link", "set", "lo", "up")
        yield names
    finally:
        for name in names:
            subprocess.run(["ip", "netns", "del", name], check=False, capture_output=True)


@contextlib.contextmanager
def skip_where_not_allowed() -> Iterator[None]:
    try:
        yield
    except (OSError, subprocess.CalledProcessError) as error:
        pytest.skip(f"network namespaces cannot be made here: {error}")
