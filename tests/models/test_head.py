"""Head.stats against float64 oracles: values, gradients, invariances."""

from __future__ import annotations

import logging
import math

import pytest
import torch
from references import vocabulary_statistics

from draftsmith.models import vocabulary_pass
from draftsmith.models.head import Head, StatsOptions, logit_stats
from draftsmith.models.token_stats import COMPARED, DIFFERENTIABLE

DETACHED = ("draft_token", "label_prob", "confidence", "entropy", "acceptance", "target_token")
KNOWN = [
    # p, q, tv, kl, lk, lk_alpha (eta 3)
    ([0.7, 0.3], [0.6, 0.4], 0.1, 0.021601, 0.094731, 0.105361),
    ([0.5, 0.3, 0.2], [0.2, 0.3, 0.5], 0.3, 0.274887, 0.296925, 0.356675),
    ([0.5, 0.25, 0.25], [0.25, 0.25, 0.5], 0.25, 0.173287, 0.241914, 0.287682),
    ([1.0, 0.0, 0.0], [0.2, 0.3, 0.5], 0.8, 1.609438, 1.244229, 1.609438),
]


def fields(stats):
    return {name: value for name in (*DIFFERENTIABLE, *DETACHED) if (value := stats.__getattribute__(name)) is not None}


def problem(*, rows=9, hidden=8, vocab=50, spread=1.0, seed=0, dtype=torch.float64):
    torch.manual_seed(seed)
    weight = torch.randn(vocab, hidden, dtype=torch.float64).to(dtype)
    draft = (spread * torch.randn(rows, hidden, dtype=torch.float64)).to(dtype).requires_grad_()
    target = (spread * torch.randn(rows, hidden, dtype=torch.float64)).to(dtype)
    return weight, draft, target, torch.randint(vocab, (rows,))


def oracle(head, draft, target, labels, **settings):
    return vocabulary_statistics(head.logits(draft), head.logits(target), labels, **settings)


def assert_equals_oracle(stats, expected, draft, *, tolerance=1e-9):
    """Every value, and the gradient of every differentiable statistic with rows weighted unequally."""
    weights = torch.linspace(0.5, 2, len(draft), dtype=torch.float64)
    found = fields(stats)
    for name, value in found.items():
        torch.testing.assert_close(value.double(), expected[name].double(), rtol=tolerance, atol=tolerance, msg=name)
    for name in DIFFERENTIABLE:
        if name in found:
            (fast,) = torch.autograd.grad((found[name].double() * weights).sum(), draft, retain_graph=True)
            (slow,) = torch.autograd.grad((expected[name] * weights).sum(), draft, retain_graph=True)
            torch.testing.assert_close(fast, slow, rtol=tolerance, atol=tolerance, msg=f"gradient of {name}")


@pytest.mark.parametrize(("p", "q", "tv", "kl", "lk", "lk_alpha"), KNOWN)
def test_known_answers(p, q, tv, kl, lk, lk_alpha):
    logits_p, logits_q = torch.tensor([p]).log(), torch.tensor([q]).log()
    stats = logit_stats(logits_q, logits_p, torch.tensor([0]), ("ce", "kl", "tv", "lk", "log_acceptance"))
    assert stats.tv.item() == pytest.approx(tv, abs=1e-6)
    assert stats.kl.item() == pytest.approx(kl, abs=1e-6)
    assert stats.lk.item() == pytest.approx(lk, abs=1e-6)
    assert stats.log_acceptance.item() == pytest.approx(-lk_alpha, abs=1e-6)
    assert stats.ce.item() == pytest.approx(-math.log(q[0]), abs=1e-6)
    assert stats.label_prob.item() == pytest.approx(q[0], abs=1e-6)
    assert stats.confidence.item() == pytest.approx(max(q), abs=1e-6)
    assert stats.acceptance.item() == pytest.approx(1 - tv, abs=1e-6)


def test_lk_blend_is_per_token():
    p = torch.tensor([[0.5, 0.3, 0.2], [0.9, 0.05, 0.05]])
    q = torch.tensor([[0.2, 0.3, 0.5], [0.05, 0.05, 0.9]])
    stats = logit_stats(q.log(), p.log(), torch.zeros(2, dtype=torch.int64), ("lk",))
    assert stats.lk.mean().item() == pytest.approx(1.08574, abs=1e-5)


def test_eta_zero_is_kl_and_large_is_tv():
    weight, draft, target, labels = problem()
    head = Head(weight, weight)
    stats = head.stats(draft, target, labels, want=("kl", "tv"))
    torch.testing.assert_close(head.stats(draft, target, labels, want=("lk",), lk_eta=0.0).lk, stats.kl)
    torch.testing.assert_close(head.stats(draft, target, labels, want=("lk",), lk_eta=1e4).lk, stats.tv)


@pytest.mark.parametrize("spread", [0.3, 1.0, 6.0], ids=["flat", "random", "peaked"])
@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_equals_the_oracle(spread, temperature):
    weight, draft, target, labels = problem(spread=spread)
    head = Head(weight, weight).with_options(StatsOptions(temperature=temperature))
    stats = head.stats(draft, target, labels, want=DIFFERENTIABLE)
    assert_equals_oracle(stats, oracle(head, draft, target, labels, temperature=temperature), draft)


def test_one_hot_teacher_and_disjoint_supports():
    draft = torch.tensor([[0.3, -1.0, 2.0, 0.1], [-40.0, -41.0, 40.0, 39.0], [1.0, 2.0, 3.0, 4.0]], dtype=torch.float64)
    target = torch.tensor([[60.0, 0, 0, 0], [40.0, 41.0, -40.0, -39.0], [1.0, 2.0, 3.0, 4.0]], dtype=torch.float64)
    draft.requires_grad_()
    labels = torch.tensor([0, 1, 2])
    stats = logit_stats(draft, target, labels, DIFFERENTIABLE)
    assert_equals_oracle(stats, vocabulary_statistics(draft, target, labels), draft)
    (gradient,) = torch.autograd.grad(stats.log_acceptance.sum() - stats.kl.sum(), draft)
    assert gradient[1].abs().sum() > 0


def test_soft_cap_scale_and_bias_are_in_the_gradient():
    weight, draft, target, labels = problem(spread=2.0)
    bias = torch.randn(len(weight), dtype=torch.float64)
    head = Head(weight, weight, lm_head_bias=bias, logit_scale=0.6, logit_softcap=3.0)
    stats = head.stats(draft, target, labels, want=DIFFERENTIABLE)
    assert_equals_oracle(stats, oracle(head, draft, target, labels), draft)


def test_top_k_renormalises_both_sides_on_the_teachers_tokens():
    weight, draft, target, labels = problem()
    head = Head(weight, weight).with_options(StatsOptions(top_k=7, temperature=1.3))
    stats = head.stats(draft, target, labels, want=DIFFERENTIABLE)
    assert_equals_oracle(stats, oracle(head, draft, target, labels, top_k=7, temperature=1.3), draft)
    all_tokens = head.with_options(StatsOptions(top_k=50)).stats(draft, target, labels)
    torch.testing.assert_close(all_tokens.kl, Head(weight, weight).stats(draft, target, labels).kl)


def test_top_k_overstates_acceptance():
    p, q = torch.tensor([[0.4, 0.3, 0.2, 0.1]]).double(), torch.tensor([[0.06, 0.05, 0.09, 0.8]]).double()
    head = Head(torch.eye(4).double(), torch.eye(4).double())
    exact = head.stats(q.log(), p.log(), torch.tensor([0]), want=("tv",)).acceptance
    two = head.with_options(StatsOptions(top_k=2)).stats(q.log(), p.log(), torch.tensor([0]), want=("tv",)).acceptance
    assert exact.item() == pytest.approx(0.30)
    assert two.item() == pytest.approx(3 / 7 + 6 / 11)


def test_draft_vocabulary_keeps_the_targets_mass_of_the_full_vocabulary():
    weight, draft, target, _ = problem()
    ids = torch.tensor([0, 3, 4, 11, 30, 31, 49])
    labels = torch.tensor([0, 1, 2, 3, 4, 11, 48, 49, 30])
    head = Head(weight, weight, lm_head_bias=torch.randn(50, dtype=torch.float64)).with_draft_vocabulary(ids)
    stats = head.stats(draft, target, labels, want=DIFFERENTIABLE)
    expected = vocabulary_statistics(head.logits(draft)[:, ids], head.logits(target), labels, draft_ids=ids)
    assert_equals_oracle(stats, expected, draft)
    assert (stats.ce[[1, 2, 6]] == 0).all()
    assert (stats.label_prob[[1, 2, 6]] == 0).all()
    assert set(stats.draft_token.tolist()) <= set(ids.tolist())


def test_draft_vocabulary_refuses_what_it_cannot_be():
    weight, draft, target, labels = problem()
    head = Head(weight, weight)
    for ids in ([3, 1], [0, 0], [49, 50], []):
        with pytest.raises(ValueError, match=r"must ascend without repetition inside 0\.\.49"):
            head.with_draft_vocabulary(torch.tensor(ids, dtype=torch.int64))
    both = head.with_draft_vocabulary(torch.tensor([1, 2])).with_options(StatsOptions(top_k=5))
    with pytest.raises(ValueError, match="top_k=5 cannot be combined"):
        both.stats(draft, target, labels)


def test_options_out_of_range():
    weight, *_ = problem()
    for settings in ({"temperature": 0.0}, {"lk_eta": -1.0}, {"top_k": 0}, {"budget_bytes": 0}):
        (name,) = settings
        with pytest.raises(ValueError, match=f"{name}="):
            StatsOptions(**settings)
    with pytest.raises(ValueError, match="top_k=51 exceeds the vocabulary of 50"):
        Head(weight, weight).with_options(StatsOptions(top_k=51))


@pytest.mark.parametrize("softcap", [None, 4.0])
def test_markov_bias_and_own_weight_are_trained_exactly(softcap, monkeypatch):
    monkeypatch.setattr(vocabulary_pass, "MIN_CHUNK_ROWS", 4)
    weight, draft, target, labels = problem()
    own = torch.randn_like(weight).requires_grad_()
    rows = torch.randn(9, 3, dtype=torch.float64, requires_grad=True)
    basis = torch.randn(50, 3, dtype=torch.float64, requires_grad=True)
    head = Head(weight, weight, logit_scale=0.8, logit_softcap=softcap)
    head = head.with_options(StatsOptions(budget_bytes=1))
    stats = head.stats(draft, target, labels, want=DIFFERENTIABLE, weight=own, bias=(rows, basis))
    logits = Head(weight, own, logit_scale=0.8, logit_softcap=softcap).logits(draft) + rows @ basis.T
    expected = vocabulary_statistics(logits, head.logits(target), labels)
    mix = torch.randn(len(DIFFERENTIABLE), 9, dtype=torch.float64)
    total = sum((fields(stats)[name] * w).sum() for name, w in zip(DIFFERENTIABLE, mix, strict=True))
    slow = sum((expected[name] * w).sum() for name, w in zip(DIFFERENTIABLE, mix, strict=True))
    inputs = (draft, own, rows, basis)
    for fast_gradient, slow_gradient in zip(
        torch.autograd.grad(total, inputs), torch.autograd.grad(slow, inputs), strict=True
    ):
        torch.testing.assert_close(fast_gradient, slow_gradient, rtol=1e-9, atol=1e-9)


def test_shared_teacher_rows():
    weight, draft, target, labels = problem()
    index = torch.tensor([2, 2, 0, 5, 5, 5, 1, 0, 2])
    head = Head(weight, weight)
    shared = head.stats(draft, target[:6], labels, want=("lk", "tv"), teacher_index=index)
    assert_equals_oracle(shared, oracle(head, draft, target[index], labels), draft)


@pytest.mark.parametrize("chunk", [1, 7])
def test_chunks_change_nothing(chunk, monkeypatch):
    weight, draft, target, labels = problem(rows=15, vocab=1100)
    whole = fields(Head(weight, weight).stats(draft, target, labels, want=DIFFERENTIABLE))
    monkeypatch.setattr(vocabulary_pass, "MIN_CHUNK_ROWS", chunk)
    tight = Head(weight, weight).with_options(StatsOptions(budget_bytes=1))
    pieces = fields(tight.stats(draft, target, labels, want=DIFFERENTIABLE))
    for name, value in whole.items():
        torch.testing.assert_close(pieces[name], value, rtol=1e-12, atol=1e-12)
    for name in DIFFERENTIABLE:
        (a,) = torch.autograd.grad(whole[name].sum(), draft, retain_graph=True)
        (b,) = torch.autograd.grad(pieces[name].sum(), draft, retain_graph=True)
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12)


def test_threads_change_nothing():
    weight, draft, target, labels = problem(rows=150, vocab=700)
    head = Head(weight, weight).with_options(StatsOptions(budget_bytes=2**19))
    before = torch.get_num_threads()
    found = {}
    try:
        for threads in (1, 3):
            torch.set_num_threads(threads)
            stats = fields(head.stats(draft, target, labels, want=DIFFERENTIABLE))
            gradients = torch.autograd.grad(sum(stats[name].sum() for name in DIFFERENTIABLE), draft)
            found[threads] = (*stats.values(), *gradients)
            assert torch.get_num_threads() == threads
    finally:
        torch.set_num_threads(before)
    for one, three in zip(found[1], found[3], strict=True):
        torch.testing.assert_close(one, three, rtol=1e-12, atol=1e-12)


def test_chunks_respect_budget_and_floor():
    assert [p.stop - p.start for p in vocabulary_pass.split(1000, 100, 30_000)] == [250] * 4
    assert [p.stop - p.start for p in vocabulary_pass.split(100, 10**9, 1)] == [50, 50]
    assert list(vocabulary_pass.split(0, 100, 100)) == []


@pytest.mark.parametrize("vocab", [600, 1100])
def test_ties_go_to_the_lowest_id(vocab, monkeypatch):
    weight = torch.zeros(vocab, 4)
    weight[[3, 200, 515, vocab - 1]] = torch.tensor([1.0, 0, 0, 0])
    weight[[70, 530]] = torch.tensor([0, 1.0, 0, 0])
    hidden = torch.tensor([[2.0, 0, 0, 0], [0, 2.0, 0, 0], [0, 0, 0, 1.0]]).repeat(3, 1)
    for rows in (64, 1):
        monkeypatch.setattr(vocabulary_pass, "MIN_CHUNK_ROWS", rows)
        head = Head(weight, weight).with_options(StatsOptions(budget_bytes=1))
        stats = head.stats(hidden, hidden.flip(0), torch.zeros(9, dtype=torch.int64))
        assert stats.draft_token.tolist() == [3, 70, 0] * 3
        assert stats.target_token.tolist() == [0, 70, 3] * 3


def test_dead_columns():
    draft = torch.tensor([[1.0, 1.0, -torch.inf]], requires_grad=True)
    target = torch.tensor([[0.0, 2.0, -torch.inf]])
    label = torch.tensor([1])
    stats = logit_stats(draft, target, label, DIFFERENTIABLE)
    assert stats.kl.item() == pytest.approx(0.32781, abs=1e-5)
    for name, value in fields(stats).items():
        assert torch.isfinite(value).all(), name
        if name in DIFFERENTIABLE:
            (gradient,) = torch.autograd.grad(value.sum(), draft, retain_graph=True)
            assert torch.isfinite(gradient).all(), name
            assert gradient[0, 2] == 0, name


def test_an_infinite_divergence_is_an_error_and_tv_is_not():
    draft = torch.tensor([[1.0, 1.0, -torch.inf]], requires_grad=True)
    target = torch.tensor([[0.0, 2.0, 1.0]])
    label = torch.tensor([0])
    for name in ("kl", "lk"):
        with pytest.raises(ValueError, match=f"{name} is infinite: in row 0 p > 0 where q = 0"):
            logit_stats(draft, target, label, (name,))
    with pytest.raises(ValueError, match="reverse_kl is infinite: in row 0 q > 0 where p = 0"):
        logit_stats(target, draft, label, ("reverse_kl",))
    with pytest.raises(ValueError, match="log_acceptance is infinite: in row 0 p and q have no token in common"):
        logit_stats(torch.tensor([[0.0, -torch.inf]]), torch.tensor([[-torch.inf, 0.0]]), label, ("log_acceptance",))
    p, q = torch.softmax(target, -1), torch.tensor([[0.5, 0.5, 0.0]])
    stats = logit_stats(draft, target, label, ("tv", "log_acceptance"))
    assert stats.tv.item() == pytest.approx(0.5 * (p - q).abs().sum().item(), abs=1e-6)
    (gradient,) = torch.autograd.grad(stats.tv.sum() + stats.log_acceptance.sum(), draft)
    assert torch.isfinite(gradient).all()
    assert gradient[0, 2] == 0


def test_a_row_of_padding_gives_no_nan():
    draft = torch.full((1, 4), -torch.inf, requires_grad=True)
    stats = logit_stats(draft, torch.full((1, 4), -torch.inf), torch.tensor([0]), DIFFERENTIABLE)
    total = sum(fields(stats)[name].sum() for name in DIFFERENTIABLE)
    (gradient,) = torch.autograd.grad(total, draft)
    assert torch.isfinite(total)
    assert (gradient == 0).all()


def test_a_dead_column_of_the_heads_bias():
    weight, draft, target, labels = problem(dtype=torch.float32)
    bias = torch.zeros(50)
    bias[[7, 20]] = -torch.inf
    live = [v for v in range(50) if v not in (7, 20)]
    labels = torch.full_like(labels, 3)
    masked = Head(weight, weight, lm_head_bias=bias).stats(draft, target, labels, want=DIFFERENTIABLE)
    without = Head(weight, weight[live]).stats(draft, target, labels, want=DIFFERENTIABLE)
    for name in DIFFERENTIABLE:
        torch.testing.assert_close(fields(masked)[name], fields(without)[name])
        (a,) = torch.autograd.grad(fields(masked)[name].sum(), draft, retain_graph=True)
        (b,) = torch.autograd.grad(fields(without)[name].sum(), draft, retain_graph=True)
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(("gap", "expected"), [(20.0, 18.9), (60.0, 58.9), (200.0, None)])
def test_log_acceptance_stays_finite_at_large_gaps(gap, expected):
    draft = torch.tensor([[gap, 0.0, 0.0]], requires_grad=True)
    target = torch.tensor([[0.0, gap, 0.0]])
    stats = logit_stats(draft, target, torch.tensor([1]), ("log_acceptance", "kl", "lk"))
    exact = -math.log(3) + gap + math.log1p(2 * math.exp(-gap))
    assert -stats.log_acceptance.item() == pytest.approx(exact, abs=1e-4)
    if expected is not None:
        assert -stats.log_acceptance.item() == pytest.approx(expected, abs=0.05)
    (gradient,) = torch.autograd.grad(stats.log_acceptance.sum() + stats.kl.sum() + stats.lk.sum(), draft)
    assert torch.isfinite(gradient).all()
    assert gradient.abs().sum() > 0.5


def test_a_distribution_with_itself():
    torch.manual_seed(0)
    logits = 3 * torch.randn(4, 151_936)
    draft = logits.clone().requires_grad_()
    stats = logit_stats(draft, logits, torch.zeros(4, dtype=torch.int64), ("kl", "tv", "lk", "log_acceptance"))
    assert stats.tv.max() < 1e-6
    assert stats.kl.abs().max() < 2e-5
    (gradient,) = torch.autograd.grad(stats.tv.sum() + stats.kl.sum() + stats.lk.sum(), draft)
    assert gradient.abs().max() < 1e-6
    low = logits.bfloat16()
    assert logit_stats(low, low.float(), torch.zeros(4, dtype=torch.int64), ("tv",)).tv.max() < 1e-6


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_low_precision_inputs_stay_within_two_percent(dtype):
    weight, draft, target, labels = problem(rows=64, hidden=64, vocab=2000, spread=0.3, dtype=dtype)
    exact = draft.detach().double().requires_grad_()
    head, exact_head = Head(weight, weight), Head(weight.double(), weight.double())
    stats = head.stats(draft, target, labels, want=DIFFERENTIABLE)
    expected = oracle(exact_head, exact, target.double(), labels)
    for name in DIFFERENTIABLE:
        assert fields(stats)[name].dtype == torch.float32
        (low,) = torch.autograd.grad(fields(stats)[name].sum(), draft, retain_graph=True)
        (high,) = torch.autograd.grad(expected[name].sum(), exact, retain_graph=True)
        assert (low.double() - high).norm() / high.norm() < 0.02, name


def test_blend_of_lk_is_detached():
    draft = torch.randn(3, 6, dtype=torch.float64, requires_grad=True)
    target, labels = torch.randn(3, 6, dtype=torch.float64), torch.zeros(3, dtype=torch.int64)
    stats = logit_stats(draft, target, labels, ("kl", "tv", "lk"))
    (lk,) = torch.autograd.grad(stats.lk.sum(), draft, retain_graph=True)
    blend = torch.exp(-3 * stats.acceptance)
    (mixed,) = torch.autograd.grad((blend * stats.kl + (1 - blend) * stats.tv).sum(), draft)
    torch.testing.assert_close(lk, mixed)


@pytest.mark.parametrize("name", DIFFERENTIABLE)
def test_gradcheck(name):
    weight, draft, target, labels = problem(rows=3, hidden=4, vocab=7)
    head = Head(weight, weight, logit_softcap=5.0)
    if name == "lk":  # its blend is detached: with eta 0 nothing is
        head = head.with_options(StatsOptions(lk_eta=0.0))
    assert torch.autograd.gradcheck(lambda h: fields(head.stats(h, target, labels, want=(name,)))[name], (draft,))


def test_nonlinear_use_of_several_statistics():
    weight, draft, target, labels = problem()
    head = Head(weight, weight)
    stats, expected = head.stats(draft, target, labels, want=("ce", "tv")), oracle(head, draft, target, labels)
    (fast,) = torch.autograd.grad((stats.ce * stats.tv.exp()).sum(), draft)
    (slow,) = torch.autograd.grad((expected["ce"] * expected["tv"].exp()).sum(), draft)
    torch.testing.assert_close(fast, slow)


def count_products(monkeypatch, call):
    made = []
    original = torch.mm
    monkeypatch.setattr(torch, "mm", lambda *args, **kwargs: made.append(1) or original(*args, **kwargs))
    call()
    return len(made)


@pytest.mark.parametrize(
    ("want", "products"), [(("ce",), 2), (("lk",), 3), (("kl",), 3), (("tv",), 3), (("lk", "tv"), 4), (("ce", "kl"), 4)]
)
def test_products(want, products, monkeypatch):
    weight, draft, target, labels = problem()
    head = Head(weight, weight)

    def step():
        stats = fields(head.stats(draft, target, labels, want=want))
        sum(stats[name].sum() for name in want).backward()

    assert count_products(monkeypatch, step) == products


def test_no_gradient_row_without_gradient(monkeypatch):
    weight, draft, target, labels = problem()
    head = Head(weight, weight)

    def evaluate():
        with torch.no_grad():
            assert not head.stats(draft, target, labels, want=("lk", "tv")).lk.requires_grad

    assert count_products(monkeypatch, evaluate) == 2
    assert count_products(monkeypatch, lambda: head.stats(draft.detach(), target, labels, want=("lk",))) == 2


def test_what_is_not_wanted_is_none():
    weight, draft, target, labels = problem()
    head = Head(weight, weight)
    alone = head.stats(draft, target, labels, want=("ce",))
    assert set(fields(alone)) == {"ce", "draft_token", "label_prob", "confidence", "entropy"}
    both = head.stats(draft, target, labels, want=("ce", "acceptance"))
    assert set(fields(both)) == {"ce", *DETACHED}
    assert not both.acceptance.requires_grad
    with pytest.raises(ValueError, match="want names entrpy; choose from ce"):
        head.stats(draft, target, labels, want=("entrpy",))


@pytest.mark.parametrize("own_weight", [False, True])
def test_no_rows(own_weight):
    weight, draft, target, labels = problem()
    own = weight.clone().requires_grad_() if own_weight else None
    stats = Head(weight, weight).stats(draft[:0], target[:0], labels[:0], want=DIFFERENTIABLE, weight=own)
    sum(fields(stats)[name].sum() for name in DIFFERENTIABLE).backward()
    assert (draft.grad == 0).all()
    assert stats.draft_token.dtype == torch.int64


def test_shapes_that_do_not_fit():
    weight, draft, target, labels = problem()
    head = Head(weight, weight)
    with pytest.raises(ValueError, match=r"9 draft rows have 5 teacher rows; give teacher_index"):
        head.stats(draft, target[:5], labels)
    with pytest.raises(ValueError, match=r"must be \(row, hidden\)"):
        head.stats(draft, target[:, :3], labels)
    with pytest.raises(ValueError, match=r"weight \(50, 3\) must be \(vocab, hidden\)"):
        head.stats(draft, target, labels, weight=weight[:, :3])


def test_buffers_outlive_inference_mode():
    weight, draft, target, labels = problem()
    head = Head(weight, weight)
    with torch.inference_mode():
        head.stats(draft, target, labels)
    stats = head.stats(draft, target, labels)
    stats.kl.sum().backward()
    assert draft.grad.abs().sum() > 0


def test_without_a_compiler_the_eager_path_runs_and_says_so(monkeypatch, caplog):
    weight, draft, target, labels = problem()
    vocabulary_pass.kernel_works.cache_clear()

    def broken(function, **_):
        def run(*args):
            raise torch._dynamo.exc.TorchDynamoException("no C++ compiler")

        return run

    monkeypatch.setattr(torch, "compile", broken)
    head = Head(weight, weight).with_options(StatsOptions(compile=True))
    with caplog.at_level(logging.WARNING):
        for _ in range(2):
            stats = head.stats(draft, target, labels, want=DIFFERENTIABLE)
    assert caplog.text.count("statistics run eagerly, torch.compile cannot build a kernel: no C++ compiler") == 1
    assert_equals_oracle(stats, oracle(head, draft, target, labels), draft)
    vocabulary_pass.kernel_works.cache_clear()


@pytest.mark.parametrize(
    ("want", "budget_bytes"),
    [
        (("lk",), 1 << 22),  # many blocks, the last one smaller
        pytest.param(("kl", "tv"), 1 << 22, marks=pytest.mark.slow),
        pytest.param(COMPARED, 1 << 28, marks=pytest.mark.slow),
    ],
)
def test_compiled_equals_eager(want, budget_bytes):
    weight, draft, target, labels = problem(rows=70, vocab=1300, dtype=torch.float32)
    head = Head(weight, weight)
    uniform = torch.rand(70, dtype=torch.float64)
    compiled = head.with_options(StatsOptions(compile=True, budget_bytes=budget_bytes))
    eager, fused = (h.stats(draft, target, labels, want=want, uniform=uniform) for h in (head, compiled))
    assert (fused.sampled_token == eager.sampled_token).float().mean() > 0.98  # rounding may move a number's token
    eager, fused = fields(eager), fields(fused)
    for name, value in eager.items():
        torch.testing.assert_close(fused[name], value, rtol=1e-4, atol=1e-5)
    for name in want:
        (a,) = torch.autograd.grad(fused[name].sum(), draft, retain_graph=True)
        (b,) = torch.autograd.grad(eager[name].sum(), draft, retain_graph=True)
        torch.testing.assert_close(a, b, rtol=1e-3, atol=1e-5)


@pytest.mark.parametrize("teacher", ["own", "shared", "known"])
@pytest.mark.parametrize(
    "want", [("kl",), ("tv",), ("lk",), ("kl", "tv"), ("tv", "lk"), ("kl", "lk"), COMPARED], ids="+".join
)
def test_nothing_is_written_over_that_is_read_again(want, teacher):
    """The pass reuses memory; every value and gradient must be that of logits which nobody writes to."""
    weight, draft, target, labels = problem(rows=30, vocab=70)
    head = Head(weight, weight)
    index = torch.arange(30) // 2 if teacher == "shared" else None
    given = head.teacher_logits(target) if teacher == "known" else None
    before = None if given is None else given.clone()
    stats = fields(head.stats(draft, target, labels, want=want, teacher_index=index, teacher_logits=given))
    rows = target if index is None else target[index]
    held = fields(logit_stats(draft @ weight.T, rows @ weight.T, labels, want))
    for name in want:
        torch.testing.assert_close(stats[name], held[name])
        (ours,) = torch.autograd.grad(stats[name].sum(), draft, retain_graph=True)
        (theirs,) = torch.autograd.grad(held[name].sum(), draft, retain_graph=True)
        torch.testing.assert_close(ours, theirs)
    assert given is None or torch.equal(given, before)


@pytest.mark.parametrize("shared", [False, True])
def test_known_teacher_logits_change_nothing(shared):
    """In several chunks; with rows that share a teacher row, and without."""
    weight, draft, target, labels = problem(rows=200)
    head = Head(weight, weight, logit_scale=0.5).with_options(StatsOptions(budget_bytes=1))
    index = torch.arange(200) // 3 if shared else None
    want = ("ce", "kl", "lk")
    plain = head.stats(draft, target, labels, want=want, teacher_index=index)
    given = head.stats(
        draft, target, labels, want=want, teacher_index=index, teacher_logits=head.teacher_logits(target)
    )
    for name, value in fields(plain).items():
        torch.testing.assert_close(fields(given)[name], value, rtol=1e-12, atol=1e-12)
    gradients = [torch.autograd.grad(stats.lk.sum() + stats.ce.sum(), draft)[0] for stats in (plain, given)]
    torch.testing.assert_close(*gradients, rtol=1e-12, atol=1e-12)
    with pytest.raises(ValueError, match="teacher_logits may be overwritten before backward needs them"):
        head.stats(
            draft, target, labels, weight=weight.clone().requires_grad_(), teacher_logits=head.teacher_logits(target)
        )


def test_known_teacher_logits_in_low_precision():
    weight, draft, target, labels = problem(dtype=torch.bfloat16)
    head = Head(weight, weight)
    plain = head.stats(draft, target, labels)
    given = head.stats(draft, target, labels, teacher_logits=head.teacher_logits(target))
    torch.testing.assert_close(given.kl, plain.kl)


@pytest.mark.parametrize("temperature", [1.0, 0.5])
@pytest.mark.parametrize("draft_ids", [None, torch.arange(1, 50, 3)])
def test_sampled_tokens_are_drawn_from_q_and_touch_nothing_else(temperature, draft_ids, monkeypatch):
    weight, draft, target, labels = problem(rows=300)
    head = Head(weight, weight).with_options(StatsOptions(temperature=temperature))
    ids = torch.arange(50) if draft_ids is None else draft_ids
    if draft_ids is not None:
        head = head.with_draft_vocabulary(draft_ids)
    uniform = torch.rand(300, dtype=torch.float64)
    plain = head.stats(draft, target, labels, want=("kl",))
    assert plain.sampled_token is None
    found = []
    for floor in (64, 7):
        monkeypatch.setattr(vocabulary_pass, "MIN_CHUNK_ROWS", floor)
        options = StatsOptions(temperature=temperature, budget_bytes=256 * 2**20 if floor == 64 else 1)
        stats = head.with_options(options).stats(draft, target, labels, want=("kl",), uniform=uniform)
        for name, value in fields(plain).items():
            torch.testing.assert_close(fields(stats)[name], value, rtol=1e-12, atol=1e-12)
        found.append(stats.sampled_token)
    upper = (head.logits(draft)[:, ids] / temperature).softmax(-1).cumsum(-1)
    assert torch.equal(found[0], ids[(upper <= uniform[:, None]).sum(-1)])
    assert torch.equal(found[0], found[1])
    with pytest.raises(ValueError, match=r"uniform \(299,\) must be \(row,\), here \(300,\)"):
        head.stats(draft, target, labels, uniform=uniform[1:])
