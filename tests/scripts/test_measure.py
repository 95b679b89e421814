"""The benchmarks' harness: medians over the floor, peaks, and refusals of the command."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
import torch

from draftsmith.scripts import benchmark, benchmark_dfly, benchmark_mtp, measure
from draftsmith.scripts.benchmark_objectives import CASES
from draftsmith.scripts.measure import Case, Place, Product, Work


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


def test_utilisation_is_the_products_over_what_the_references_rate_would_have_done(monkeypatch):
    now = [0.0]

    def spend(seconds):
        now[0] += seconds

    monkeypatch.setattr(measure.time, "perf_counter", lambda: now[0])
    reference = Product(run=lambda: spend(1), flops=8e9)  # 8 GFLOP/s: 80 GFLOP in the 10 seconds of a run
    product = Product(run=lambda: spend(2), flops=5e9, times=4)
    work = Work(run=lambda: spend(10), products=[product], reference=reference)
    assert measure.measure(Case(name="fake", build=lambda: work, runs=5)).utilisation == 0.25


TINY = replace(
    benchmark_dfly.SPEC, hidden_size=32, num_heads=4, num_kv_heads=2, head_dim=64, intermediate_size=48, vocab_size=97
)


@pytest.mark.parametrize("suite", [benchmark_dfly, benchmark_mtp])
def test_the_cases_for_cuda_run_as_well_on_the_cpu(suite):
    """The same code at a small size, in bfloat16: all but the device."""
    place = Place(device="cpu", dtype=torch.bfloat16)
    own = {"seq": 64, "anchors": 4} if suite is benchmark_dfly else {"seq": 512, "document": 128, "recompute": True}
    for want, loss in (("lk", suite.lk), ("tv", suite.chains)):
        case = suite.case("tiny", want, loss, spec=TINY, place=place, reference_size=64, runs=1, **own)
        row = measure.measure(case)
        assert row.utilisation is not None
        assert row.utilisation > 0
        assert row.floor_seconds > 0


def test_the_tables_for_cuda_cover_lengths_anchors_and_the_large_vocabulary():
    names = [case.name for case in benchmark_dfly.CUDA_CASES]
    for part in ("64_anchors", "512_anchors", "1024_tokens", "8192_tokens", "e2e_tv"):
        assert any(part in name for name in names)
    assert benchmark_dfly.QWEN3_SPEC.vocab_size == 151_936
    lengths = [case.name for case in benchmark_mtp.CUDA_CASES]
    assert lengths == [f"lk_{n}_tokens" for n in (1024, 2048, 4096, 8192, 16384)]


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without CUDA")
def test_cuda_cases_need_a_cuda_device():
    with pytest.raises(ValueError, match="no CUDA device"):
        benchmark.main(["dfly", "device=cuda"])


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
        ([], "no such suite: none given on cpu; usage: python scripts/benchmark.py"),
        (["speed"], "no such suite: speed"),
        (["objectives", "device=cuda"], "no such suite: objectives on cuda"),
        (["dfly", "device=tpu"], "device=tpu: choose one of cpu, cuda"),
        (["objectives", "jsn=x"], "no such option: jsn"),
        (["objectives", "case=nothing"], "case=nothing: objectives has ce, lk"),
    ],
)
def test_refusals(arguments, message):
    with pytest.raises(ValueError, match=message):
        benchmark.main(arguments)
