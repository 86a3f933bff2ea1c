"""A mixed load at a multiple of the capacity: python -m tests.service.load --minutes 30.

Valid requests (plain, streamed, chat, logprobs), invalid ones, clients that leave and
clients that read slowly, all at once. Every whole answer is compared with the one
that the same request got when it was alone; memory and the latency of /health are
watched throughout. Ends with status 1 when anything was wrong.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import random
import socket
import sys
import tempfile
import threading
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "unit"))

from tests.service.rig import Service, parse, request


@dataclass
class Result:
    """Counts of what clients saw; ``wrong`` are descriptions of answers that differ."""

    right: int = 0
    refused: int = 0  # 429
    invalid: int = 0
    left: int = 0
    slow: int = 0
    wrong: list[str] = field(default_factory=list)
    health_s: list[float] = field(default_factory=list)
    rss: list[int] = field(default_factory=list)

    def p99(self) -> float:
        """Of /health, in seconds."""
        return sorted(self.health_s)[int(len(self.health_s) * 0.99)]


def questions(n: int, chat: bool) -> list[tuple[str, dict[str, Any]]]:
    """(path, body) of requests with fixed seeds: each has one right answer."""
    out: list[tuple[str, dict[str, Any]]] = []
    for i in range(n):
        more: dict[str, Any] = {"seed": i, "max_tokens": 10 + 7 * i % 60, "temperature": 0.5 + i % 3 / 2}
        if i % 4 == 1:
            more["stop"] = ["e", "zz"]
        if i % 3 == 2:
            more["logprobs"] = True if chat and i % 2 else 3
        if chat and i % 2:
            out.append(
                (
                    "/v1/chat/completions",
                    {"messages": [{"role": "user", "content": f"word {i} " * i}], **more},
                )
            )
        else:
            out.append(("/v1/completions", {"prompt": f"number {i} " * (1 + i * 3 % 40), **more}))
    return out


def content(doc: Any) -> Any:
    """What must be the same each time."""
    choice = doc["choices"][0]
    text = choice["text"] if "text" in choice else choice["message"]["content"]
    return [text, choice["finish_reason"], choice["logprobs"], doc["usage"]]


INVALID = [
    b"GET / HTTP/9.9\r\n\r\n",
    b"\x00" * 40,
    request("POST", "/v1/completions", b'{"prompt": '),
    request("POST", "/v1/completions", b'{"prompt": "x", "n": 5}'),
    request("GET", "/nowhere"),
    request("GET", "/", Host="evil.example"),
    request("POST", "/v1/completions", b"{}", Transfer_Encoding="chunked"),
]


class Load:
    """Clients in threads against one service until ``stop``."""

    def __init__(self, service: Service, chat: bool, seed: int) -> None:
        self.service = service
        self.result = Result()
        self.lock = threading.Lock()
        self.stop = threading.Event()
        self.seed = seed
        self.asks = questions(24, chat)
        self.want = [self.alone(i) for i in range(len(self.asks))]

    def alone(self, i: int) -> Any:
        path, body = self.asks[i]
        status, doc = self.service.post(path, body)
        assert status == 200, doc
        return content(doc)

    def valid(self, rng: random.Random) -> None:
        i = rng.randrange(len(self.asks))
        path, body = self.asks[i]
        stream = rng.random() < 0.4 and "logprobs" not in body
        data = json.dumps({**body, "stream": stream}).encode()
        status, answer = parse(self.service.raw(request("POST", path, data), timeout=120))
        with self.lock:
            if status == 429:
                self.result.refused += 1
            elif status != 200:
                self.result.wrong.append(f"{i}: status {status}: {answer[:200]!r}")
            elif stream and text_of(answer) != self.want[i][0]:
                self.result.wrong.append(f"{i}: streamed {text_of(answer)!r}, not {self.want[i][0]!r}")
            elif not stream and content(json.loads(answer)) != self.want[i]:
                self.result.wrong.append(f"{i}: {answer[:300]!r}")
            else:
                self.result.right += 1

    def invalid(self, rng: random.Random) -> None:
        status, _ = parse(self.service.raw(rng.choice(INVALID)))
        with self.lock:
            self.result.invalid += 1
            if not 400 <= status < 600:
                self.result.wrong.append(f"an invalid request got {status}")

    def leaving(self, rng: random.Random) -> None:
        path, body = rng.choice(self.asks)
        data = request("POST", path, json.dumps({**body, "stream": rng.random() < 0.5}).encode())
        with self.service.connect() as s:
            s.sendall(data[: rng.randrange(1, len(data) + 1)])
            time.sleep(rng.random() * 0.2)
            if rng.random() < 0.3:
                s.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")  # a reset
        with self.lock:
            self.result.left += 1

    def slow(self, rng: random.Random) -> None:
        data = request("GET", "/metrics")
        with self.service.connect() as s, contextlib.suppress(OSError):
            for at in range(0, len(data), 10):
                s.sendall(data[at : at + 10])
                time.sleep(0.02)
            while s.recv(2000):
                time.sleep(0.02)
        with self.lock:
            self.result.slow += 1

    def client(self, number: int) -> None:
        rng = random.Random(self.seed * 1000 + number)
        kinds = [self.valid] * 7 + [self.invalid, self.leaving, self.slow]
        while not self.stop.is_set():
            try:
                rng.choice(kinds)(rng)
            except (ConnectionError, TimeoutError, IndexError, ValueError) as error:
                if self.stop.is_set() or isinstance(error, ConnectionError):
                    continue  # turned away: no connection was free
                with self.lock:
                    self.result.wrong.append(f"{type(error).__name__}: {error}")

    def watch(self) -> None:
        """Latency of /health on a kept connection, and memory."""
        keep = request("GET", "/health").replace(b"Connection: close\r\n", b"")
        with self.service.connect() as s:
            while not self.stop.is_set():
                start = time.perf_counter()
                s.sendall(keep)
                answer = b""
                while b"failed_checks" not in answer:
                    answer += s.recv(4096)
                self.result.health_s.append(time.perf_counter() - start)
                self.result.rss.append(self.service.rss_anon())
                time.sleep(0.05)


def text_of(stream: bytes) -> str:
    """The text of a stream's events; it must have an end."""
    events = [e.removeprefix(b"data: ") for e in stream.split(b"\n\n") if e.startswith(b"data: ")]
    if not events or events[-1] != b"[DONE]":
        raise ValueError(f"a stream without end: {stream[-200:]!r}")
    choices = [c for e in events[:-1] for c in json.loads(e)["choices"]]
    return "".join(c["text"] if "text" in c else c["delta"].get("content", "") for c in choices)


def run(service: Service, seconds: float, clients: int, chat: bool, seed: int = 1) -> Result:
    """The load for so long; the service stays up."""
    load = Load(service, chat, seed)
    threads = [threading.Thread(target=load.client, args=(i,), daemon=True) for i in range(clients)]
    threads.append(threading.Thread(target=load.watch, daemon=True))
    for t in threads:
        t.start()
    time.sleep(seconds)
    load.stop.set()
    for t in threads:
        t.join(130)
    return load.result


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--minutes", type=float, default=30)
    parser.add_argument("--sequences", type=int, default=4)
    parser.add_argument("--model", type=Path, help="default: the tests' small model")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        from tests.service.small import small_chat_model

        model = options.model or small_chat_model(Path(folder))
        capacity = options.sequences + 4
        words = ["--sequences", str(options.sequences), "--queue", "4", "--connections", str(capacity * 6)]
        with Service(model, *words) as service:
            r = run(service, options.minutes * 60, capacity * 4, options.model is None)
            served = service.metrics()["tokens_answer_total"]
    print(
        f"right {r.right}, refused with 429 {r.refused}, invalid {r.invalid}, left {r.left}, slow {r.slow}, "
        f"tokens {served:.0f}\n/health: {len(r.health_s)} times, p99 {1000 * r.p99():.1f} ms, "
        f"worst {1000 * max(r.health_s):.1f} ms\nRssAnon {r.rss[len(r.rss) // 10]} to {r.rss[-1]} bytes\n"
        f"wrong {len(r.wrong)} {r.wrong[:3]}"
    )
    return int(bool(r.wrong) or r.rss[-1] > r.rss[len(r.rss) // 10] or r.p99() > 0.05)


if __name__ == "__main__":
    raise SystemExit(main())
