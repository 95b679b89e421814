"""Benchmarks: `python scripts/benchmark.py SUITE [device=cpu|cuda] [json=PATH] [case=NAME]`.

Each case runs in a fresh process; with case=NAME only that one runs, in this process.
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch
from rich.console import Console

from draftsmith.scripts import benchmark_dfly, benchmark_mtp, benchmark_objectives
from draftsmith.scripts.measure import measure, measure_in_fresh_process, show, write

SUITES = {
    "cpu": {
        "objectives": benchmark_objectives.CASES,
        "dfly": benchmark_dfly.CASES,
        "mtp": benchmark_mtp.CASES,
    },
    "cuda": {"dfly": benchmark_dfly.CUDA_CASES, "mtp": benchmark_mtp.CUDA_CASES},
}


def main(arguments: list[str]) -> None:
    """Runs a suite, prints its table and writes it as JSON.

    Raises:
        ValueError: an unknown suite, case or option, or no such device.
    """
    usage = (
        f"usage: python scripts/benchmark.py {{{'|'.join(SUITES['cpu'])}}} [device=cpu|cuda] [json=PATH] [case=NAME]"
    )
    if arguments in (["--help"], ["-h"]):
        print(usage)
        return
    options = dict(argument.partition("=")[::2] for argument in arguments[1:])
    unknown = sorted(set(options) - {"json", "case", "device"})
    if unknown:
        raise ValueError(f"no such option: {', '.join(unknown)}; {usage}")
    device = options.get("device", "cpu")
    if device not in SUITES:
        raise ValueError(f"device={device}: choose one of {', '.join(SUITES)}")
    if not arguments or arguments[0] not in SUITES[device]:
        raise ValueError(f"no such suite: {' '.join(arguments[:1]) or 'none given'} on {device}; {usage}")
    if device == "cuda" and not torch.cuda.is_available():
        raise ValueError("no CUDA device; device=cpu measures on the CPU")
    suite, cases = arguments[0], {case.name: case for case in SUITES[device][arguments[0]]}
    console = Console()
    if "case" in options:
        if options["case"] not in cases:
            raise ValueError(f"case={options['case']}: {suite} has {', '.join(cases)}")
        rows = [measure(cases[options["case"]])]
    else:
        rows = []
        for name in cases:
            console.print(f"{suite}: {name} ...")
            rows.append(measure_in_fresh_process(suite, name, device))
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
