"""The benchmarks' harness: medians over the floor, peaks, and refusals of the command."""

from __future__ import annotations

import json

import pytest
import torch

from draftsmith.scripts import benchmark, measure
from draftsmith.scripts.benchmark_objectives import CASES
from draftsmith.scripts.measure import Case, Product, Work


def test_a_case_is_measured_over_its_bare_products(monkeypatch):
    now = [0.0]

    def spend(seconds):
        now[0] += seconds

    monkeypatch.setattr(measure.time, "perf_counter", lambda: now[0])
    product = Product(run=lambda: spend(2), flops=4e9, times=3)
    work = Work(run=lambda: spend(9), products=[product])
    row = measure.measure(Case(name="fake", build=lambda: work, runs=5))
    assert (row.case, row.seconds, row.floor_seconds, row.ratio, row.runs) == ("fake", 9, 6, 1.5, 5)
    assert (row.gflops_before, row.gflops_after) == (2, 2)


def test_peak_is_what_a_call_adds():
    def allocate():
        torch.ones(64 * 2**20, dtype=torch.uint8)

    assert 60 * 2**20 < measure.peak_growth_bytes(allocate) < 100 * 2**20


def test_rows_are_written(tmp_path):
    row = measure.Row(
        case="a",
        seconds=3.0,
        floor_seconds=2.0,
        ratio=1.5,
        peak_bytes=7,
        runs=5,
        gflops_before=1.0,
        gflops_after=1.0,
        threads=2,
    )
    measure.write([row], tmp_path / "new" / "rows.json")
    (read,) = json.loads((tmp_path / "new" / "rows.json").read_text())
    expected = {"case": "a", "seconds": 3.0, "floor_seconds": 2.0, "ratio": 1.5, "peak_bytes": 7}
    assert {name: read[name] for name in expected} == expected


def test_objectives_cover_every_product_count():
    assert {"ce", "lk", "e2e_tv", "lk+e2e_tv"} <= {case.name for case in CASES}
    assert all(case.runs >= 5 for case in CASES)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "no such suite: none given; usage: python scripts/benchmark.py"),
        (["speed"], "no such suite: speed"),
        (["objectives", "jsn=x"], "no such option: jsn"),
        (["objectives", "case=nothing"], "case=nothing: objectives has ce, lk"),
    ],
)
def test_refusals(arguments, message):
    with pytest.raises(ValueError, match=message):
        benchmark.main(arguments)
