"""Two hosts on one machine: network namespaces with addresses of their own, and a link between them."""

from __future__ import annotations

import secrets
import subprocess
from collections.abc import Iterator

import pytest

NEAR, FAR = "10.213.77.1", "10.213.77.2"


def ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True, capture_output=True, timeout=20)


@pytest.fixture
def hosts() -> Iterator[tuple[str, str, str, str]]:
    """(two network namespaces, and the ends of the link between them)."""
    tag = secrets.token_hex(3)
    near, far, here, there = (f"{name}{tag}" for name in ("dn", "df", "dvn", "dvf"))
    try:
        for space in (near, far):
            ip("netns", "add", space)
            ip("-n", space, "link", "set", "lo", "up")
        ip("link", "add", here, "netns", near, "type", "veth", "peer", "name", there, "netns", far)
        for space, link, address in ((near, here, NEAR), (far, there, FAR)):
            ip("-n", space, "addr", "add", f"{address}/24", "dev", link)
            ip("-n", space, "link", "set", link, "up")
    except (OSError, subprocess.CalledProcessError) as error:
        for space in (near, far):
            subprocess.run(["ip", "netns", "del", space], check=False, capture_output=True)
        pytest.skip(f"network namespaces cannot be made here: {error}")
    yield near, far, here, there
    for space in (near, far):
        ip("netns", "del", space)
