"""A Linux console as something that runs programs: login, framed commands, checked answers.

The shell at the prompt is asked once to read lines in a loop (``while read -r l; do eval
"$l"; done``): from then on the kernel's terminal echoes exactly what is typed, without a
line editor. A program's text goes over in quoted pieces, and runs only when its sum on
the board is the one here. Its output is kept in files there and fetched in pieces with a
cksum each, between markers that carry the command's number. Kernel messages, lost bytes
and repeats therefore cost time, never correctness.

Needs sh, cksum or md5sum, and base64 or od on the board.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import re
import secrets
from collections.abc import Callable

from colibri_kit.errors import AuthError, PreflightError, UnreachableError
from colibri_kit.transport.base import CommandTimeout, Completed
from colibri_kit.transport.serial_answer import Answer, identify
from colibri_kit.transport.serial_line import EchoLost, Line

KILL = b"\x15"
_LOOP = 'while read -r l;do eval "$l";done'
#: Typed at the prompt before the loop: no colours, no kernel messages, no fancy echo.
_QUIET = (
    "export TERM=dumb",
    "P=$(cut -f1 /proc/sys/kernel/printk)",
    "dmesg -n 1",
    "stty sane -echoctl -echoke",
    "stty cols 9999",
)
#: How the board makes ``SUM SIZE`` of its input: POSIX cksum, or md5sum's first 28 bits
#: (Debian's busybox has no cksum).
_SUMS = {
    "c": "S(){ cksum;}",
    "m": "S(){ cat >$T/z;set -- $(md5sum<$T/z);printf '%d %d' 0x${1%\"${1#???????}\"} $(wc -c<$T/z);}",
}
_GUARDS = {"c": "cksum", "m": "md5sum|cut -c1-32"}
_HELPERS = r"""
K(){ printf %s "$c"|S;}
X(){ [ "$(K)" = "$2 $3" ]||{ printf '\n<%s !>\n' $1;return;}
I=$1;R=-1;(eval "$c")<$4 >$T/o 2>$T/e;R=$?;H;}
H(){ set -- $(S<$T/o) $(S<$T/e)
printf '\n<%s %d %s %s %s %s %s>\n' $I $R $1 $2 $3 $4 $((R+$1+$2+$3+$4));}
Y(){ printf '\n<%s %s>\n' $1 "$(S<$2)";}
F(){ dd if=$2 bs=$3 skip=$4 count=1 2>/dev/null >$T/p
printf '\n<%s %s ' $1 "$(S<$T/p)";C<$T/p;printf '>\n';}
if command -v base64 >/dev/null 2>&1;then B=64;C(){ base64|tr -d '\n';}
else B=16;C(){ od -An -v -tx1|tr -d ' \n';};fi
for d in /tmp /run /dev/shm "$HOME";do T=$(mktemp -d $d/ck.XXXXXX 2>/dev/null)&&break;done
N='
'
"""
_PIECE_MAX, _PIECE_MIN = 900, 20
_FETCH_MAX, _FETCH_MIN = 8192, 16


def _table() -> list[int]:
    out = []
    for byte in range(256):
        crc = byte << 24
        for _ in range(8):
            crc = ((crc << 1) ^ 0x04C11DB7 if crc & 0x80000000 else crc << 1) & 0xFFFFFFFF
        out.append(crc)
    return out


_TABLE = _table()


def cksum(data: bytes) -> int:
    """The checksum of POSIX ``cksum``."""
    crc = 0
    size = len(data)
    tail = b""
    while size:
        tail += bytes([size & 0xFF])
        size >>= 8
    for byte in data + tail:
        crc = (crc << 8 & 0xFFFFFFFF) ^ _TABLE[crc >> 24 ^ byte]
    return crc ^ 0xFFFFFFFF


def quote(text: bytes) -> list[str]:
    """Shell words that together give ``text``, ASCII and without a line break. Pure."""
    out = []
    for part in re.findall(rb"[ -&(-~]+|'|\n|[^ -~\n]+", text):
        if part == b"'":
            out.append("\\'")
        elif part == b"\n":
            out.append("$N")
        elif 0x20 <= part[0] < 0x7F:
            out.append(f"'{part.decode()}'")
        else:
            out.append("$(printf '" + "".join(f"\\{b:03o}" for b in part) + "')")
    return out


def pieces(text: bytes, size: int) -> list[bytes]:
    """Cuts text so that no piece is longer than ``size``; UTF-8 may be cut. Pure."""
    return [text[i : i + size] for i in range(0, len(text), size)]


class Console:
    """A login shell on a serial line. Make it, :meth:`start` it, then :meth:`run`."""

    def __init__(self, line: Line, note: Callable[[str], None] = lambda text: None) -> None:
        self.line, self._note = line, note
        self._number = 0
        self._nonce = secrets.token_hex(2)
        self._piece = 200
        self._fetch = _FETCH_MAX
        self.base64 = True
        self.scratch = ""
        self._sum = "c"

    def start(self, user: str, password: Callable[[], str | None], wait: float = 20.0) -> None:
        """Logs in where that is asked for, and makes the shell ready.

        Raises:
            UnreachableError: no Linux console answers. AuthError: the login was refused.
            PreflightError: the shell lacks a program.
        """
        answer = self.login(user, password, wait)
        if answer.kind != "shell":
            raise UnreachableError(
                f"no Linux shell answers on {self.line.name} but: {answer.kind} {answer.text!r}",
                code="CK-SERIAL-SILENT",
            )
        self._begin()

    def login(self, user: str, password: Callable[[], str | None], wait: float) -> Answer:
        answer = identify(self.line, wait)
        if answer.kind == "password":  # somebody's half-done login
            self.line.write(b"\r")
            answer = identify(self.line, wait)
        for _ in range(3):
            if answer.kind != "login":
                return answer
            self.line.write(user.encode() + b"\r")
            found, seen = self.line.wait_for(re.compile(rb"[Pp]assword: ?$|[#$%>~] ?$"), 8)
            if found and found.group(0).lower().startswith(b"password"):
                secret = password()
                if secret is None:
                    raise AuthError(
                        f"{self.line.name}: {user} needs a password",
                        hint="--password-file FILE, or COLIBRI_SERIAL_PASSWORD",
                        code="CK-SERIAL-LOGIN",
                    )
                self.line.write(secret.encode() + b"\r")
                found, seen = self.line.wait_for(re.compile(rb"incorrect|[#$%>~] ?$|login: ?$"), 15)
                if found and b"incorrect" in seen:
                    raise AuthError(f"{self.line.name}: login as {user} refused", code="CK-SERIAL-LOGIN")
            answer = identify(self.line, 8)
        raise AuthError(f"{self.line.name}: login as {user} does not succeed", code="CK-SERIAL-LOGIN")

    def _begin(self) -> None:
        for text in _QUIET:
            self.line.type_line(text, kill=b"\x03")
            self.line.drain(self.line.latency + 0.05)
        self._loop()
        self._type("N=\"$(printf '\\nx')\";N=${N%x}")
        probe = "command -v cksum >/dev/null 2>&1&&Q=c||Q=m;printf '\\n<%s %s>\\n' @ $Q"
        self._sum = self.ask(probe, "([cm])").group(1).decode()
        helpers = f"{_SUMS[self._sum]}\n{_HELPERS.strip()}".encode()
        want = hashlib.md5(helpers, usedforsecurity=False).hexdigest()
        if self._sum == "c":
            want = f"{cksum(helpers)} {len(helpers)}"
        for _ in range(20):
            self._text(helpers)
            self._number += 1
            mark = f"{self._nonce}{self._number}"
            self._type(f'[ "$(printf %s "$c"|{_GUARDS[self._sum]})" = "{want}" ]&&eval "$c"')
            self._type(f"printf '\\n<%s %s>\\n' {mark} \"$B$T\"")
            found, seen = self.line.wait_for(re.compile(rb"\n<%s (64|16)(/\S+)>" % mark.encode()), 10)
            if found:
                self.base64 = found.group(1) == b"64"
                self.scratch = found.group(2).decode()
                return
            if b"not found" in seen:
                break
        raise PreflightError(
            f"the shell on {self.line.name} lacks cksum and md5sum, mktemp or a writable /tmp",
            state="nothing was changed",
            code="CK-SERIAL-TOOLS",
        )

    def checksum(self, data: bytes) -> int:
        """The sum that the board's helper makes of these bytes."""
        if self._sum == "c":
            return cksum(data)
        return int(hashlib.md5(data, usedforsecurity=False).hexdigest()[:7], 16)

    @property
    def empty(self) -> str:
        """``SUM SIZE`` of an empty file."""
        return f"{self.checksum(b'')} 0"

    def _loop(self) -> None:
        """Makes the shell read lines plainly."""
        self.line.type_line(_LOOP, kill=b"\x03")
        self.line.drain(self.line.latency + 0.05)

    def recover(self) -> None:
        """Back to the reading loop, after an interrupt or when the line is out of step."""
        self.line.write(b"\x03" * 3)
        self.line.drain(0.3, limit=5)
        answer = identify(self.line, 10)
        if answer.kind != "shell":
            raise UnreachableError(
                f"the shell on {self.line.name} went away: {answer.text!r}",
                hint="repeat the command: it goes on where it stopped",
                code="CK-SERIAL-LOST",
            )
        self._loop()

    def _type(self, text: str, *, tries: int = 60) -> None:
        """Types one line in the loop; when it goes badly, what follows is cut shorter."""
        before = self.line.retyped
        try:
            self.line.type_line(text, kill=KILL, end=b"\n", window=1024, tries=tries)
        finally:
            if self.line.retyped > before:
                self._piece = max(_PIECE_MIN, self._piece * 2 // 3)
            else:
                self._piece = min(_PIECE_MAX, self._piece + self._piece // 8 + 1)

    def append(self, variable: str, data: bytes) -> None:
        """Adds bytes to a shell variable (no NUL), piece by piece."""
        at = 0
        while at < len(data):
            take = data[at : at + self._piece]
            words = quote(take)
            # Octal escapes are four times as long: keep lines under the terminal's limit.
            while sum(map(len, words)) > 3000:
                take = take[: len(take) // 2]
                words = quote(take)
            shortest = len(take) <= _PIECE_MIN
            try:
                self._type(f"{variable}=${variable}{''.join(words)}", tries=40 if shortest else 2)
            except EchoLost:
                if shortest:
                    raise
                continue  # nothing was run: the next try is with a shorter piece
            at += len(take)

    def _text(self, data: bytes) -> None:
        self._type("c=")
        self.append("c", data)

    def ask(self, command: str, answer: str, *, timeout: float = 15.0, tries: int = 30) -> re.Match[bytes]:
        """Types a helper's call that may run twice; returns the match of its framed answer.

        Args:
            command: with ``@`` where the mark goes. answer: pattern after the mark.

        Raises:
            CommandTimeout: no whole answer in so many tries.
        """
        for _ in range(tries):
            self._number += 1
            mark = f"{self._nonce}{self._number}"
            self._type(command.replace("@", mark, 1))
            found, _ = self.line.wait_for(
                re.compile(rb"\n<%s %s>" % (mark.encode(), answer.encode())), timeout
            )
            if found:
                return found
            timeout = max(timeout / 2, 2.0) if timeout > 2 else timeout
        raise CommandTimeout(f"the shell on {self.line.name} gives no whole answer to `{command}`")

    def run_text(self, text: str, *, timeout: float, stdin: str = "/dev/null") -> Completed:
        """Runs shell text; returns its status and output.

        Raises:
            CommandTimeout: it did not end in time; it was interrupted.
        """
        import time

        data = text.encode("utf-8", "surrogateescape")
        want = f"{self.checksum(data)} {len(data)}"
        end = time.monotonic() + timeout + 5
        for _ in range(20):
            self._text(data)
            self._number += 1
            mark = f"{self._nonce}{self._number}"
            self._type(f"X {mark} {want} {stdin}")
            head = self._header(mark, end)
            if head is None:
                continue
            rc, out_sum, out_size, err_sum, err_size = head
            out = self.fetch("$T/o", out_size, out_sum)
            return Completed(rc, out, self.fetch("$T/e", err_size, err_sum))
        raise CommandTimeout(f"the shell on {self.line.name} does not take a command whole")

    def _header(self, mark: str, end: float) -> tuple[int, int, int, int, int] | None:
        """The result line of command ``mark``; None when the shell got another text than ours."""
        import time

        any_head = re.compile(rb"\n<(\w+) (?:(!)|(-?\d+) (\d+) (\d+) (\d+) (\d+) (\d+))>")
        step = 5.0
        while True:
            left = end - time.monotonic()
            if left <= 0:
                self.recover()
                raise CommandTimeout(f"a program on {self.line.name} did not end in time; it was interrupted")
            found, seen = self.line.wait_for(any_head, min(step, left))
            if found and found.group(1) == mark.encode():
                if found.group(2):
                    return None
                rc, a, b, c, d, total = (int(g) for g in found.groups()[2:])
                if rc + a + b + c + d == total and rc >= 0:
                    return rc, a, b, c, d
            if found and found.group(1) != mark.encode():
                continue
            # Damaged, or still at work: what is typed now is answered when it is done.
            self._type("H")
            step = min(step * 1.5, 60.0) if not seen.strip() else 2.0

    def fetch(self, path: str, size: int, want: int) -> bytes:
        """A file's bytes, in pieces that are each compared by cksum, and as a whole."""
        for _ in range(4):
            data = self._fetched(path, size)
            if self.checksum(data) == want:
                return data
        raise CommandTimeout(f"{self.line.name}: a program's output does not come over whole")

    def _fetched(self, path: str, size: int) -> bytes:
        out = b""
        while len(out) < size:
            step = self._fetch
            while len(out) % step:  # dd skips whole blocks
                step //= 2
            piece = self._one(path, step, len(out) // step)
            if piece is None:
                self._fetch = max(_FETCH_MIN, self._fetch // 2)
            else:
                out += piece
        return out

    def _one(self, path: str, step: int, index: int) -> bytes | None:
        self._number += 1
        mark = f"{self._nonce}{self._number}"
        self._type(f"F {mark} {path} {step} {index}")
        pattern = rb"\n<%s (\d+) (\d+) ([A-Za-z0-9+/=]*)>" % mark.encode()
        wait = 3 + self.line.wire_time(2 * step) if self.line.paced else 3.0
        found, _ = self.line.wait_for(re.compile(pattern), wait, quiet=0.1 + 4 * self.line.latency)
        if not found:
            return None
        try:
            text = found.group(3)
            piece = base64.b64decode(text, validate=True) if self.base64 else bytes.fromhex(text.decode())
        except (binascii.Error, ValueError):
            return None
        return (
            piece
            if (self.checksum(piece), len(piece)) == (int(found.group(1)), int(found.group(2)))
            else None
        )

    def set_baud(self, baud: int) -> bool:
        """Both sides to another rate; the board goes back by itself when we cannot follow."""
        old = self.line.baud
        self._type(f"rm -f $T/k;stty {baud};(trap '' TTOU;sleep 8;[ -e $T/k ]||stty {old})</dev/tty &")
        self.line.drain(0.3)
        try:
            self.line.set_baud(baud)
            self.ask(":>$T/k;Y @ $T/k", self.empty, timeout=2, tries=2)
        except Exception:
            self.line.set_baud(old)
            self.line.drain(9, limit=12)
            return False
        return True

    def stop(self) -> None:
        """Leaves the board's shell as it was found, as far as the line lets us."""
        try:
            leave = 'rm -rf "$T";dmesg -n "$P" 2>/dev/null;printf "\\n<%s ok>\\n" @'
            self.ask(leave, "ok", timeout=5, tries=4)
            self.line.write(b"\x03")
            self.line.drain(0.1)
        except (EchoLost, UnreachableError, CommandTimeout):
            self._note("the console was left in a loop: press Ctrl-C there")
