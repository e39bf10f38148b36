"""`python -m bench [NAME ...] [--json FILE]`; without a name all but `flatness`, which takes minutes."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path

from bench import closed_loop, decode_step, report_load, startup, table

TIMINGS: dict[str, Callable[[], list[table.Row]]] = {
    "closed_loop": closed_loop.rows,
    "decode_step": decode_step.rows,
    "startup": startup.rows,
    "report_load": report_load.rows,
    "flatness": closed_loop.flatness,
}


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(prog="python -m bench", description=__doc__)
    parser.add_argument("names", nargs="*", metavar="NAME", help=", ".join(TIMINGS))
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the rows there too")
    asked = parser.parse_args()
    if unknown := [name for name in asked.names if name not in TIMINGS]:
        parser.error(f"no timing is called {unknown[0]}; there are {', '.join(TIMINGS)}")
    names = asked.names or [name for name in TIMINGS if name != "flatness"]
    results = {}
    for name in names:
        results[name] = TIMINGS[name]()
        print(f"{name}\n{table.text(results[name])}\n", flush=True)
    if asked.json is not None:
        table.save(results, asked.json)


if __name__ == "__main__":
    main()
