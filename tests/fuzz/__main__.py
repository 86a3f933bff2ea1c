"""Runs the fuzzers for a while: python -m tests.fuzz --minutes 10 [--only http --only gguf].

Ends with status 1 when an input was found that fails; its folder is named.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path

from tests.fuzz.run import FuzzError, Result, fuzz, keep
from tests.fuzz.targets import TARGETS, Target


def one(target: Target, seconds: float, folder: Path, add: bool) -> tuple[Result, int]:
    result = fuzz(target, seconds, folder)
    return result, keep(target, folder) if add and not target.seeds_in and not result.finding else 0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--minutes", type=float, default=10, help="of each target")
    parser.add_argument("--only", action="append", choices=sorted(TARGETS), help="may be repeated")
    parser.add_argument("--jobs", type=int, default=2, help="targets at once")
    parser.add_argument(
        "--keep",
        action="store_true",
        help="add what reaches new code to the kept seeds",
    )
    options = parser.parse_args()
    names = options.only or list(TARGETS)
    top = Path(tempfile.mkdtemp(prefix="colibri-fuzz-"))
    found = 0
    with ThreadPoolExecutor(options.jobs) as pool:
        work = [
            pool.submit(one, TARGETS[n], options.minutes * 60, top / n, options.keep)
            for n in dict.fromkeys(names)
        ]
        for done in as_completed(work):
            try:
                result, added = done.result()
            except FuzzError as error:
                print(error, file=sys.stderr, flush=True)
                found += 1
                continue
            found += bool(result.finding)
            print(f"{result}{f', {added} seeds kept' if added else ''}", flush=True)
    return int(found > 0)


if __name__ == "__main__":
    raise SystemExit(main())
