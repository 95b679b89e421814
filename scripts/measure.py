"""How the benchmarks measure: each case in a fresh process, medians, beside the time of the bare products it needs.

A suite is a list of `Case`s. A case is built only in the process that measures it:

    def build() -> Work:
        ...tensors...
        return Work(run=step, products=[matrix_product(rows, hidden, vocab, times=3)])

    CASES = [Case(name="lk", build=build)]

`seconds` is the median of `run`, `floor_seconds` the sum over products of the median time of each, timed in the same
process before and after every run; `peak_bytes` is how far the first run raises the memory in use (of the device, on
CUDA). Where a work names a `reference` product, `utilisation` is its products' FLOPs over what the reference's rate
would have done in `seconds`.
"""

from __future__ import annotations

import json
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """Where a case computes and in which type."""

    device: str = "cpu"
    dtype: torch.dtype = torch.float32

    def randn(self, *shape: int) -> Tensor:
        """Standard normal values."""
        return torch.randn(shape, device=self.device, dtype=self.dtype)

    def empty(self, *shape: int) -> Tensor:
        """Memory for results."""
        return torch.empty(shape, device=self.device, dtype=self.dtype)


CPU = Place()
CUDA = Place(device="cuda", dtype=torch.bfloat16)
# Side of the square product whose rate counts as a device's own.
REFERENCE_SIZE = 8192


@dataclass(frozen=True, slots=True, kw_only=True)
class Product:
    """A bare matrix product that a case cannot do without.

    Attributes:
        run: does it once.
        flops: of doing it once.
        times: how often the case needs it.
    """

    run: Callable[[], object]
    flops: float
    times: int = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """What a case runs, ready to run.

    Attributes:
        reference: the product whose rate utilisation is measured against; None: no utilisation.
    """

    run: Callable[[], object]
    products: Sequence[Product]
    reference: Product | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """A measurement.

    Attributes:
        name: of the row.
        build: makes the tensors; called in the process that measures.
        runs: how many timed runs, at least 5.
    """

    name: str
    build: Callable[[], Work]
    runs: int = 9


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """The figures of a case. Seconds are medians, GFLOP/s those of the bare products before and after the runs.

    `utilisation` is None where the work names no reference product.
    """

    case: str
    seconds: float
    floor_seconds: float
    ratio: float
    peak_bytes: int
    runs: int
    gflops_before: float
    gflops_after: float
    threads: int
    utilisation: float | None = None


def matrix_product(rows: int, inner: int, columns: int, *, times: int = 1, place: Place = CPU) -> Product:
    """(rows, inner) times (inner, columns), into a buffer that is there."""
    left, right, out = place.randn(rows, inner), place.randn(inner, columns), place.empty(rows, columns)
    return Product(run=lambda: torch.mm(left, right, out=out), flops=2.0 * rows * inner * columns, times=times)


def seconds_of(run: Callable[[], object]) -> float:
    """Wall-clock seconds of one call, until the device is done."""
    start = time.perf_counter()
    run()
    if torch.cuda.is_initialized():
        torch.cuda.synchronize()
    return time.perf_counter() - start


def peak_growth_bytes(run: Callable[[], object]) -> int:
    """How far one call raises the process's resident memory, or CUDA's allocated memory, above what it was."""
    if torch.cuda.is_initialized():
        torch.cuda.reset_peak_memory_stats()
        allocated = torch.cuda.memory_allocated()
        run()
        torch.cuda.synchronize()
        return torch.cuda.max_memory_allocated() - allocated
    try:
        Path("/proc/self/clear_refs").write_text("5")  # Linux: resets the high-water mark
    except OSError:
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        run()
        return (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) * 1024
    before = _status_bytes("VmRSS")
    run()
    return max(0, _status_bytes("VmHWM") - before)


def _status_bytes(field: str) -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(f"{field}:"):
            return int(line.split()[1]) * 1024
    raise ValueError(f"/proc/self/status has no {field}")


def measure(case: Case) -> Row:
    """Measures a case in this process."""
    work = case.build()
    peak = peak_growth_bytes(work.run)
    for product in (*work.products, *([work.reference] if work.reference else [])):
        product.run()
    before: list[list[float]] = [[] for _ in work.products]
    after: list[list[float]] = [[] for _ in work.products]
    seconds, reference_seconds = [], []
    for _ in range(case.runs):
        if work.reference is not None:
            reference_seconds.append(seconds_of(work.reference.run))
        for samples, product in zip(before, work.products, strict=True):
            samples.append(seconds_of(product.run))
        seconds.append(seconds_of(work.run))
        for samples, product in zip(after, work.products, strict=True):
            samples.append(seconds_of(product.run))
    floor = sum(
        product.times * statistics.median(first + second)
        for product, first, second in zip(work.products, before, after, strict=True)
    )
    flops = sum(product.flops for product in work.products)
    median = statistics.median(seconds)
    utilisation = None
    if work.reference is not None:
        rate = work.reference.flops / statistics.median(reference_seconds)
        utilisation = sum(product.times * product.flops for product in work.products) / (median * rate)
    return Row(
        case=case.name,
        seconds=median,
        floor_seconds=floor,
        ratio=median / floor,
        peak_bytes=peak,
        runs=case.runs,
        gflops_before=flops / sum(map(statistics.median, before)) / 1e9,
        gflops_after=flops / sum(map(statistics.median, after)) / 1e9,
        threads=torch.get_num_threads(),
        utilisation=utilisation,
    )


def measure_in_fresh_process(suite: str, case: str, device: str = "cpu") -> Row:
    """Measures a case in a process of its own, so that its peak is its own.

    Raises:
        ValueError: the case failed; its output is above.
    """
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "row.json"
        command = [sys.executable, "-m", "draftsmith.scripts.benchmark", suite, f"device={device}", f"case={case}"]
        command.append(f"json={path}")
        if subprocess.run(command, stdout=subprocess.DEVNULL, check=False).returncode != 0:
            raise ValueError(f"benchmark {suite}, case {case} failed; run it alone: {' '.join(command[:-1])}")
        (row,) = json.loads(path.read_text())
    return Row(**row)


def show(rows: Sequence[Row], title: str, console: Console) -> None:
    """Prints the rows as a table."""
    table = Table("case", "seconds", "floor", "ratio", "peak MiB", "GFLOP/s before", "after", "MFU", title=title)
    for row in rows:
        table.add_row(
            row.case,
            f"{row.seconds:.3f}",
            f"{row.floor_seconds:.3f}",
            f"{row.ratio:.2f}",
            f"{row.peak_bytes / 2**20:.0f}",
            f"{row.gflops_before:.0f}",
            f"{row.gflops_after:.0f}",
            "" if row.utilisation is None else f"{row.utilisation:.0%}",
        )
    console.print(table)


def write(rows: Sequence[Row], path: Path) -> None:
    """Writes the rows as a JSON list."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps([asdict(row) for row in rows], indent=2) + "\n")
