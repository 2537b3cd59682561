"""Two hosts on one machine: network namespaces with addresses of their own, and a link between them."""

from __future__ import annotations

import contextlib
import secrets
import subprocess
import sys
from collections.abc import Iterator
from typing import NamedTuple

import pytest

from tests.needs import ROOT

NEAR, FAR = "10.213.77.1", "10.213.77.2"


def ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True, capture_output=True, timeout=20)


@pytest.fixture
def hosts() -> Iterator[tuple[str, str, str, str]]:
    """(two network namespaces, and the ends of the link between them)."""
    with _two_spaces() as (near, far):
        here, there = (f"{name}{secrets.token_hex(3)}" for name in ("dvn", "dvf"))
        with _skipped_where_not_allowed():
            ip("link", "add", here, "netns", near, "type", "veth", "peer", "name", there, "netns", far)
            for space, link, address in ((near, here, NEAR), (far, there, FAR)):
                ip("-n", space, "addr", "add", f"{address}/24", "dev", link)
                ip("-n", space, "link", "set", link, "up")
        yield near, far, here, there


class BadLink(NamedTuple):
    """Two network namespaces, the name that the link between them has in both, and the program that carries it."""

    near: str
    far: str
    link: str
    relay: subprocess.Popen[str]

    def set(self, state: str) -> None:
        """ "down" loses all packets until "up"."""
        assert self.relay.stdin is not None
        self.relay.stdin.write(state + "\n")
        self.relay.stdin.flush()


@contextlib.contextmanager
def bad_link(delay_sec: float, loss: float, seed: int = 0) -> Iterator[BadLink]:
    """A link on which a packet takes so long, each way, and is lost so often. Skips where it cannot be made."""
    link = f"dt{secrets.token_hex(3)}"
    with _two_spaces() as (near, far), contextlib.ExitStack() as stack:
        command = [sys.executable, "-m", "tests.relay", near, far, link, str(delay_sec), str(loss), str(seed)]
        relay = stack.enter_context(subprocess.Popen(command, cwd=ROOT, stdin=-1, stdout=-1, stderr=-1, text=True))
        stack.callback(relay.kill)
        assert relay.stdout is not None
        assert relay.stderr is not None
        if relay.stdout.readline().strip() != "ready":
            pytest.skip(f"no TUN device can be made here: {relay.stderr.read().strip().splitlines()[-1]}")
        with _skipped_where_not_allowed():
            for space, mine, other in ((near, NEAR, FAR), (far, FAR, NEAR)):
                ip("-n", space, "addr", "add", mine, "peer", other, "dev", link)
                ip("-n", space, "link", "set", link, "up")
        yield BadLink(near, far, link, relay)


@contextlib.contextmanager
def _two_spaces() -> Iterator[list[str]]:
    spaces = [f"{name}{secrets.token_hex(3)}" for name in ("dn", "df")]
    try:
        with _skipped_where_not_allowed():
            for space in spaces:
                ip("netns", "add", space)
                ip("-n", space, "link", "set", "lo", "up")
        yield spaces
    finally:
        for space in spaces:
            subprocess.run(["ip", "netns", "del", space], check=False, capture_output=True)


@contextlib.contextmanager
def _skipped_where_not_allowed() -> Iterator[None]:
    try:
        yield
    except (OSError, subprocess.CalledProcessError) as error:
        pytest.skip(f"network namespaces cannot be made here: {error}")
