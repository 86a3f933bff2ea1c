"""The :class:`Transport` over a Linux console: programs, and files in checked segments."""

from __future__ import annotations

import base64
import io
from collections.abc import Callable, Sequence

from colibri_kit.errors import TransferError
from colibri_kit.transport.base import (
    CommandTimeout,
    Completed,
    ConnectionLost,
    PutFailed,
    Reader,
    Sink,
    TransportBase,
    is_no_space,
    sh_join,
)
from colibri_kit.transport.serial_console import Console, quote
from colibri_kit.transport.serial_modem import ModemError, Sender

#: Bytes of a file that are sent, compared and appended together; what a cut can cost.
SEGMENT = 32 * 1024
#: Most bytes that a program may get as its stdin: they are staged on the board first.
STDIN_MAX = 8 << 20


class SerialTransport(TransportBase):
    """Programs and files over a started :class:`Console`.

    Args:
        method: how segments travel: ``rx`` (XMODEM by lrzsz's or busybox's rx, YMODEM by
            rb), ``base64`` (typed text), or ``auto``: rx or rb where present.
    """

    def __init__(
        self, console: Console, *, method: str = "auto", note: Callable[[str], None] = lambda text: None
    ) -> None:
        self._console, self._note = console, note
        self._receiver = self._find_receiver() if method in ("auto", "rx") else None
        if method == "rx" and self._receiver is None:
            raise TransferError(
                f"{self.describe()} has neither rx nor rb", hint="--method base64", code="CK-SERIAL-TOOLS"
            )
        self.sent_by: dict[str, int] = {"modem": 0, "base64": 0}

    def describe(self) -> str:
        return self._console.line.name

    def close(self) -> None:
        try:
            self._console.stop()
        except ConnectionLost:
            pass
        finally:
            self._console.line.close()

    def _find_receiver(self) -> str | None:
        text = (
            "if command -v rx >/dev/null;then rx --version 2>&1|grep -q lrzsz&&echo rx -c||echo rx;"
            "elif command -v rb >/dev/null;then echo rb;fi"
        )
        return self._console.run_text(text, timeout=15).text or None

    @property
    def scratch(self) -> str:
        """The folder on the board that holds outputs and segments until :meth:`close`."""
        return self._console.scratch

    @property
    def method(self) -> str:
        """``rx -c``, ``rx``, ``rb`` or ``base64``: how the next segment travels."""
        return self._receiver or "base64"

    def run(self, argv: Sequence[str], *, stdin: bytes | None = None, timeout: float = 60.0) -> Completed:
        source = "/dev/null"
        if stdin is not None:
            self.stage(stdin, "$T/i")
            source = "$T/i"
        return self._console.run_text(sh_join(argv), timeout=timeout, stdin=source)

    def stream(
        self,
        argv: Sequence[str],
        *,
        stdin: bytes | None = None,
        on_out: Sink,
        on_err: Sink | None = None,
        timeout: float | None = None,
    ) -> Completed:
        """Output comes at the program's end: a console cannot carry it apart from its echo."""
        done = self.run(argv, stdin=stdin, timeout=timeout or 3600.0)
        on_out(done.out)
        if on_err is not None and done.err:
            on_err(done.err)
        return Completed(done.rc, b"", done.err)

    def pipe(
        self,
        argv: Sequence[str],
        reader: Reader,
        size: int,
        *,
        progress: Callable[[int], None] | None = None,
    ) -> Completed:
        if size > STDIN_MAX:
            raise TransferError(f"{size} bytes are too many to hand to a program over a serial line")
        data = _exactly(reader, size)
        done = self.run(argv, stdin=data, timeout=120)
        if progress is not None:
            progress(size)
        return done

    def put_stream(
        self,
        reader: Reader,
        size: int,
        remote_path: str,
        *,
        mode: int = 0o644,
        offset: int = 0,
        progress: Callable[[int], None] | None = None,
    ) -> None:
        """Appends segment after segment; each is there whole or not at all."""
        if not offset:
            self._shell(f": >{_word(remote_path)}", remote_path)
        at = offset
        while at < offset + size:
            data = _exactly(reader, min(SEGMENT, offset + size - at))
            self.stage(data, "$T/s")
            # Runs twice without harm: the size tells whether it was appended already.
            self._shell(
                f'p={_word(remote_path)};n=$(wc -c <"$p");'
                f'[ $n -eq {at + len(data)} ]||{{ [ $n -eq {at} ]&&cat $T/s >>"$p";}}',
                remote_path,
            )
            at += len(data)
            if progress is not None:
                progress(len(data))
        self._shell(f"chmod {mode:o} {_word(remote_path)}", remote_path)

    def _shell(self, text: str, path: str) -> None:
        done = self._console.run_text(text, timeout=60)
        if done.rc != 0:
            raise PutFailed(
                f"{self.describe()} could not write {path}: {done.why}", no_space=is_no_space(done.err_text)
            )

    def stage(self, data: bytes, path: str) -> None:
        """Puts bytes into a scratch file on the board, compared by cksum.

        Raises:
            TransferError: the line is too bad.
        """
        for _ in range(8):
            receiver = self._receiver
            if receiver and len(data) > 512:
                if self._by_modem(receiver, data, path):
                    self.sent_by["modem"] += len(data)
                    return
                self._receiver = None
                self._note(f"{receiver} fails on this line: going on with base64")
                continue
            self._by_text(data, path)
            if self._same(data, path):
                self.sent_by["base64"] += len(data)
                return
        raise TransferError(
            f"{self.describe()} damages too much: {len(data)} bytes did not arrive right in 8 attempts",
            hint="a lower --baud, a shorter cable, or --txdelay 0.002",
            code="CK-SERIAL-NOISE",
        )

    def _same(self, data: bytes, path: str) -> bool:
        found = self._console.ask(f"Y @ {path}", r"(\d+) (\d+)")
        return (int(found.group(1)), int(found.group(2))) == (self._console.checksum(data), len(data))

    def _by_modem(self, receiver: str, data: bytes, path: str) -> bool:
        """One file by XMODEM or YMODEM; XMODEM's padding is cut off there. False: it failed."""
        console = self._console
        ymodem = receiver == "rb"
        # lrzsz refuses absolute paths: "Security Violation".
        call = "rb -y" if ymodem else f"{receiver} x"
        try:
            console.line.type_line(
                f"rm -f $T/x;(cd $T&&{call}) 2>/dev/null;echo '<'ck-end'>'", kill=b"\x15", end=b"\n"
            )
            stats = Sender(console.line, name="x" if ymodem else None, finish=b"<ck-end>").send(data)
        except ModemError as err:
            self._note(err.message)
            console.line.drain(1.0, limit=12)
            console.recover()
            return False
        console.line.drain(0.1)
        try:
            console.ask(
                f"head -c {len(data)} $T/x>{path};Y @ {path}",
                f"{console.checksum(data)} {len(data)}",
                tries=4,
            )
        except CommandTimeout:
            return False
        if stats.repeats > 4 + len(data) // 2048:
            self._note(f"{stats.repeats} blocks were sent again")
            self._receiver = None
        return True

    def _by_text(self, data: bytes, path: str) -> None:
        """Typed as base64, or as octal escapes where the board has no base64."""
        console = self._console
        console.ask(f"b=;:>{path};Y @ {path}", console.empty)
        if console.base64:
            console.append("b", base64.b64encode(data))
            console.ask(f'printf %s "$b"|base64 -d>{path};Y @ {path}', r"\d+ \d+")
        else:
            console.append("b", "".join(f"\\{b:03o}" for b in data).encode())
            console.ask(f'printf "$b">{path};Y @ {path}', r"\d+ \d+")


def _word(path: str) -> str:
    """A path as one shell word of printable ASCII."""
    return "".join(quote(path.encode("utf-8", "surrogateescape"))) or "''"


def _exactly(reader: Reader, size: int) -> bytes:
    out = io.BytesIO()
    while out.tell() < size:
        piece = reader.read(size - out.tell())
        if not piece:
            raise ConnectionLost(f"the source ended {size - out.tell()} bytes early")
        out.write(piece)
    return out.getvalue()
