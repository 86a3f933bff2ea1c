"""Errors for logins that are not root: the way they name is there."""

from __future__ import annotations

import pytest

from colibri_kit.deploy import root
from colibri_kit.errors import PreflightError
from colibri_kit.transport.base import Completed
from colibri_kit.transport.fake import FakeTransport


def board(uid: bytes, sudo: bool) -> FakeTransport:
    return FakeTransport({"command -v sudo": Completed(0 if sudo else 127), "-u": Completed(0, uid + b"\n")})


def test_root_is_enough() -> None:
    transport = board(b"0", sudo=False)
    root.need(transport, "this", state="")
    assert transport.calls == [["id", "-u"]]


@pytest.mark.parametrize(
    ("sudo", "way"), [(True, "add --sudo"), (False, "there is no sudo there: log in as root")]
)
def test_another_login_is_told_a_way_that_is_there(sudo: bool, way: str) -> None:
    with pytest.raises(PreflightError, match=r"^removing it needs root") as caught:
        root.need(board(b"1000", sudo), "removing it", state="nothing was removed")
    assert caught.value.hint == way and caught.value.state == "nothing was removed"
    error = root.missing(board(b"1000", sudo), "this", state="", otherwise="leave it out")
    assert error.hint == f"{way}, or leave it out" and error.code == "CK-PREFLIGHT-ROOT"
