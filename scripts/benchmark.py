"""Benchmarks: `python scripts/benchmark.py SUITE [json=PATH] [case=NAME]`.

Each case runs in a fresh process; with case=NAME only that one runs, in this process.
"""

from __future__ import annotations

import sys
from pathlib import Path

from rich.console import Console

from draftsmith.scripts import benchmark_dfly, benchmark_mtp, benchmark_objectives
from draftsmith.scripts.measure import measure, measure_in_fresh_process, show, write

SUITES = {
    "objectives": benchmark_objectives.CASES,
    "dfly": benchmark_dfly.CASES,
    "mtp": benchmark_mtp.CASES,
}


def main(arguments: list[str]) -> None:
    """Runs a suite, prints its table and writes it as JSON.

    Raises:
        ValueError: an unknown suite, case or option.
    """
    usage = f"usage: python scripts/benchmark.py {{{'|'.join(SUITES)}}} [json=PATH] [case=NAME]"
    if arguments in (["--help"], ["-h"]):
        print(usage)
        return
    if not arguments or arguments[0] not in SUITES:
        raise ValueError(f"no such suite: {' '.join(arguments[:1]) or 'none given'}; {usage}")
    suite, cases = arguments[0], {case.name: case for case in SUITES[arguments[0]]}
    options = dict(argument.partition("=")[::2] for argument in arguments[1:])
    unknown = sorted(set(options) - {"json", "case"})
    if unknown:
        raise ValueError(f"no such option: {', '.join(unknown)}; {usage}")
    console = Console()
    if "case" in options:
        if options["case"] not in cases:
            raise ValueError(f"case={options['case']}: {suite} has {', '.join(cases)}")
        rows = [measure(cases[options["case"]])]
    else:
        rows = []
        for name in cases:
            console.print(f"{suite}: {name} ...")
            rows.append(measure_in_fresh_process(suite, name))
    show(rows, suite, console)
    if "json" in options:
        write(rows, Path(options["json"]))
        console.print(f"written to {options['json']}")


if __name__ == "__main__":
    try:
        main(sys.argv[1:])
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(1)
