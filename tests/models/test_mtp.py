"""The MTP drafter: what each column reads, sees, predicts, and that decoding drafts what training rolled out."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from references import mtp_chain

from draftsmith.data.batch import Batch, TargetStates
from draftsmith.models import mtp_scoring
from draftsmith.models.chain_attention import chain_attention
from draftsmith.models.head import Head
from draftsmith.models.moe import MoEConfig
from draftsmith.models.mtp import MTPConfig
from draftsmith.models.target import TargetSpec

HIDDEN, VOCAB = 16, 40


@pytest.fixture
def spec():
    return TargetSpec(
        hidden_size=HIDDEN,
        num_layers=2,
        num_heads=4,
        num_kv_heads=2,
        head_dim=6,
        intermediate_size=24,
        rms_norm_eps=1e-5,
        vocab_size=VOCAB,
        max_position_embeddings=512,
        rope_inv_freq=(1.0, 0.1),
        rope_attention_scaling=1.1,
    )


@pytest.fixture
def head():
    torch.manual_seed(1)
    return Head(torch.randn(VOCAB, HIDDEN), torch.randn(VOCAB, HIDDEN))


def build(spec, **settings):
    """A drafter with every parameter drawn at random, none at its initial value."""
    torch.manual_seed(2)
    mtp = MTPConfig(**settings).build(spec)
    with torch.no_grad():
        for weight in mtp.parameters():
            weight.normal_(std=0.5)
    return mtp


def pack(*documents, seed=0, rows=1, supervised=None):
    """Packed documents of the given lengths, all supervised unless said, with random tokens and states."""
    generator = torch.Generator().manual_seed(seed)
    seq = sum(documents)
    ids = torch.cat([torch.full((n,), 100 + i) for i, n in enumerate(documents)])
    positions = torch.cat([torch.arange(n) for n in documents])
    return Batch(
        input_ids=torch.randint(0, VOCAB, (rows, seq), generator=generator),
        supervised=torch.ones(rows, seq, dtype=torch.bool) if supervised is None else supervised,
        document_ids=ids.repeat(rows, 1),
        position_ids=positions.repeat(rows, 1),
        states=TargetStates(
            layers=torch.zeros(rows, seq, 0, HIDDEN), final=torch.randn(rows, seq, HIDDEN, generator=generator)
        ),
    )


def grid_of(mtp, batch):
    return mtp.grid(batch, seed=0, epoch=0)


class Recorder(Head):
    """A head that keeps what it was asked for, and can be made to draft one token everywhere."""

    def __init__(self, head, always=None):
        super().__init__(head.embedding, head.lm_head)
        self.calls, self.embedded, self.always = [], [], always

    def embed(self, ids):
        self.embedded.append(ids)
        return super().embed(ids)

    def stats(self, draft_hidden, target_hidden, labels, **options):
        self.calls.append((draft_hidden, target_hidden[options["teacher_index"]], labels))
        stats = super().stats(draft_hidden, target_hidden, labels, **options)
        if self.always is None:
            return stats
        return replace(stats, draft_token=torch.full_like(stats.draft_token, self.always))


CONVENTIONS = [
    {},
    {"qk_norm": True, "norm_plus_one": True, "attention_output_gate": True},
    {"qkv_bias": True, "fuse_order": "hidden_embedding", "zero_first_embedding": True},
    {"feedback": "pre_norm", "num_heads": 6, "num_kv_heads": 1, "head_dim": 4, "intermediate_size": 10},
    {"moe": MoEConfig(num_experts=4, experts_per_token=2, expert_intermediate_size=8, shared_intermediate_size=8)},
]


@pytest.mark.parametrize("tokens", ["own", "gold"])
@pytest.mark.parametrize("settings", CONVENTIONS, ids=lambda s: "+".join(s) or "plain")
def test_rollout_equals_the_loop(spec, head, settings, tokens):
    """Packed rows of two, every chain against its own document alone, values and gradients."""
    mtp = build(spec, tokens=tokens, **settings)
    batch = pack(6, 1, 4, rows=2)
    grid = grid_of(mtp, batch)
    recorder = Recorder(head)
    stats = mtp(batch, grid, recorder, ("ce",))
    rows = []
    for b, a, s in grid.valid.nonzero().tolist():
        anchor = int(grid.anchor_index[b, a])
        start = anchor - int(batch.position_ids[b, anchor])
        end = start + int((batch.document_ids[b] == batch.document_ids[b, anchor]).sum())
        states, _ = mtp_chain(
            mtp, head, batch.input_ids[b, start:end], batch.states.final[b, start:end], anchor - start, tokens == "gold"
        )
        label = batch.input_ids[b, anchor + s + 1]
        rows.append(torch.nn.functional.cross_entropy(head.logits(states[s]), label))
        assert grid.label_index[b, a, s] == anchor + s + 1
        torch.testing.assert_close(stats.ce[b, a, s], rows[-1], rtol=2e-4, atol=2e-4)
    weights = torch.rand(len(rows))
    mine = torch.autograd.grad((stats.ce[grid.valid] * weights).sum(), list(mtp.parameters()))
    theirs = torch.autograd.grad((torch.stack(rows) * weights).sum(), list(mtp.parameters()))
    for (name, _), ours, oracle in zip(mtp.named_parameters(), mine, theirs, strict=True):
        scale = oracle.abs().max().clamp(min=1.0)
        torch.testing.assert_close(
            ours / scale, oracle / scale, rtol=1e-3, atol=5e-4, msg=lambda m, n=name: f"{n}: {m}"
        )


@pytest.mark.parametrize("tokens", ["own", "gold"])
def test_what_a_column_reads(spec, head, tokens):
    """Token j has value j and state value j + 1."""
    mtp = build(spec, tokens=tokens, num_draft_tokens=2)
    batch = pack(9)
    values = torch.arange(9)
    batch = replace(
        batch,
        input_ids=values[None],
        states=TargetStates(layers=batch.states.layers, final=(values + 1.0)[None, :, None].expand(1, 9, HIDDEN)),
    )
    fused = []
    original = mtp.block.fuse
    mtp.block.fuse = lambda embedding, hidden: (fused.append((embedding, hidden)), original(embedding, hidden))[1]
    recorder = Recorder(head, always=33)
    mtp(batch, grid_of(mtp, batch), recorder, ("ce",))
    columns = torch.arange(7)  # anchors 1..7
    embedding, hidden = fused[1]
    assert torch.equal(embedding, head.embed(columns + 1))
    assert torch.equal(hidden[:, 0], columns + 1.0)
    for depth, (_, teacher, labels) in enumerate(recorder.calls):
        assert torch.equal(labels, columns[: 7 - depth] + depth + 2)
        assert torch.equal(teacher[:, 0], columns[: 7 - depth] + depth + 2.0)
    second = recorder.embedded[-1]
    expected = torch.full((7,), 33) if tokens == "own" else columns + 2
    assert torch.equal(second, expected)


def test_labels_and_teachers_do_not_depend_on_the_tokens_read(spec, head):
    batch = pack(7, 5)
    calls = []
    for tokens, always in (("own", None), ("own", 7), ("sampled", None), ("gold", None)):
        mtp = build(spec, tokens=tokens)
        recorder = Recorder(head, always)
        mtp(batch, grid_of(mtp, batch), recorder, ("ce", "tv"))
        calls.append(recorder.calls)
    for other in calls[1:]:
        for (_, teacher, labels), (_, other_teacher, other_labels) in zip(calls[0], other, strict=True):
            assert torch.equal(teacher, other_teacher)
            assert torch.equal(labels, other_labels)
    assert torch.equal(calls[0][0][0], calls[1][0][0])  # depth 0 reads gold in every mode
    assert not torch.equal(calls[0][1][0], calls[1][1][0])


def test_a_sampled_token_is_drawn_from_the_depth_before(spec, head):
    """Depth k + 1 reads what depth k drew; draws follow each depth's own distribution, anew in every epoch."""
    head = Head(head.embedding, head.lm_head[:6] * 0.3)
    mtp = build(spec, tokens="sampled")
    ids = torch.randint(0, 6, (1, 40), generator=torch.Generator().manual_seed(0))
    batch = replace(pack(40), input_ids=ids)
    counts, expected, seen = torch.zeros(3, 6), torch.zeros(3, 6), []
    for epoch in range(100):
        grid = mtp.grid(batch, seed=3, epoch=epoch)
        recorder = Recorder(head)
        with torch.no_grad():
            stats = mtp(batch, grid, recorder, ("ce",))
        for depth, (states, _, _) in enumerate(recorder.calls):
            drawn = stats.sampled_token[0, :, depth][grid.valid[0, :, depth]]
            counts[depth] += torch.bincount(drawn, minlength=6)
            expected[depth] += head.logits(states).softmax(-1).sum(0)
            if depth < 2:
                assert torch.equal(recorder.embedded[depth + 2][: len(drawn)], drawn)
        seen.append(stats.sampled_token)
    assert torch.equal(stats.sampled_token, mtp(batch, grid, head, ("ce",)).sampled_token)
    assert not torch.equal(seen[0], seen[1])
    chi2 = ((counts - expected) ** 2 / expected).sum(-1)
    assert (chi2 < 20.5).all()  # 5 degrees of freedom: p < 1e-3
    assert not torch.equal(stats.sampled_token, stats.draft_token)


@pytest.mark.parametrize("recompute", [False, True])
def test_expert_load_counts_every_column_at_every_depth_once(spec, head, recompute):
    moe = MoEConfig(num_experts=5, experts_per_token=2, expert_intermediate_size=8, shared_intermediate_size=0)
    mtp, batch = build(spec, moe=moe, checkpoint_depths=recompute), pack(9, 4)
    chosen = []
    mtp.block.mlp.router.register_forward_hook(lambda module, args, out: chosen.append(out[1].flatten()))
    grid = grid_of(mtp, batch)
    loss = mtp(batch, grid, head, ("ce",)).ce.sum()
    load = torch.bincount(torch.cat(chosen), minlength=5)
    assert load.sum() == 2 * 3 * (7 + 2)
    loss.backward()  # runs the block again where depths are recomputed
    assert (len(chosen) > 3) == recompute
    expected = {"expert_max_load": pytest.approx(5 * int(load.max()) / 54), "experts_unused": float((load == 0).sum())}
    assert torch.equal(mtp.expert_load, load)
    assert mtp.measures(lambda own: own) == expected
    assert mtp.measures(lambda own: own) == {"expert_max_load": 0.0, "experts_unused": 5.0}  # since the last time
    assert "expert_load" not in mtp.state_dict()
    assert build(spec).measures(lambda own: own) == {}


def test_visibility_of_packed_documents(spec, head):
    """Documents of 1, 2 and 3 tokens: entry i reaches column j iff both are in one document and i <= j."""
    mtp = build(spec)
    batch = pack(1, 2, 3)
    first = torch.arange(6) - batch.position_ids[0]
    seen = torch.zeros(6, 6, dtype=torch.bool)
    key, value = torch.randn(6, 1, 9), torch.eye(9)[:6, None]
    own_value = torch.eye(9)[None, 6:, None].expand(6, 3, 1, 9)
    for depth in range(4):
        weights = chain_attention(
            torch.randn(6, 1, 9), key, value, torch.randn(6, depth, 1, 9), own_value[:, :depth], first, torch.arange(6)
        )[:, 0]
        seen = weights[:, :6] > 0
        documents = batch.document_ids[0]
        expected = (documents[:, None] == documents) & (torch.arange(6)[:, None] >= torch.arange(6))
        assert torch.equal(seen, expected)
        assert seen.sum() == 10
        assert torch.equal(weights[:, 6:] > 0, torch.arange(3).expand(6, 3) < depth)
    assert mtp.num_draft_tokens == 3


def test_rope_positions_are_position_plus_depth(spec, head):
    mtp = build(spec)
    batch = pack(3, 5)
    positions = []
    mtp.block.rotary.register_forward_hook(lambda module, args, out: positions.append(args[0].tolist()))
    mtp(batch, grid_of(mtp, batch), head, ("ce",))
    columns = [0, 0, 1, 2]  # positions of j for anchors 1 | 4, 5, 6
    assert positions[0] == [0, 1, 2, 0, 1, 2, 3, 4]
    for depth in range(3):
        assert [p for p in positions if p == [c + depth for c in columns]]
    assert positions[-1] == [c + 2 for c in columns]


def test_valid_predictions_of_packed_documents(spec):
    mtp = build(spec)
    assert grid_of(mtp, pack(5, 4)).valid.sum((0, 1)).tolist() == [5, 3, 1]


def test_only_columns_with_supervised_anchor_and_label_count(spec, head):
    """Eight tokens, answer at 4..6: columns 3 and 4 at depth 0, column 3 at depth 1, nothing else."""
    mtp = build(spec)
    supervised = torch.zeros(1, 8, dtype=torch.bool)
    supervised[:, 4:7] = True
    batch = pack(8, supervised=supervised)
    grid = grid_of(mtp, batch)
    where = [(int(grid.anchor_index[0, a]) - 1, s) for _, a, s in grid.valid.nonzero().tolist()]
    assert sorted(where) == [(3, 0), (3, 1), (4, 0)]
    stats = mtp(batch, grid, head, ("ce",))
    assert torch.equal(stats.ce > 0, grid.valid)


@pytest.mark.parametrize("tokens", ["own", "gold"])
def test_no_prediction_sees_its_future(spec, head, tokens):
    """Changing the token or state at i moves no prediction that must not see it, and does move one that must."""
    mtp = build(spec, tokens=tokens)
    batch = pack(12)
    grid = grid_of(mtp, batch)

    def hidden_of(changed):
        recorder = Recorder(head)
        mtp(changed, grid, recorder, ("ce",))
        states = torch.zeros(10, 3, HIDDEN)
        for depth, (rows, _, _) in enumerate(recorder.calls):
            states[: len(rows), depth] = rows.detach()
        return states

    anchors, steps = grid.anchor_index[0][:, None], torch.arange(3)
    before = hidden_of(batch)
    ids = batch.input_ids.clone()
    ids[0, 6] = (ids[0, 6] + 1) % VOCAB
    moved = (hidden_of(replace(batch, input_ids=ids)) != before).any(-1)
    reach = anchors + (steps if tokens == "gold" else 0)
    assert torch.equal(moved & grid.valid[0], (reach >= 6) & grid.valid[0])

    final = batch.states.final.clone()
    final[0, 6] += 1
    moved = (hidden_of(replace(batch, states=TargetStates(layers=batch.states.layers, final=final))) != before).any(-1)
    assert torch.equal(moved & grid.valid[0], (anchors - 1 + 0 * steps >= 6) & grid.valid[0])


@pytest.mark.parametrize("tokens", ["own", "sampled", "gold"])
def test_packed_equals_unpacked(spec, head, tokens):
    mtp = build(spec, tokens=tokens)
    packed, weights = pack(7, 2, 5), torch.rand(20)
    pieces = [(0, 7), (7, 9), (9, 14)]

    def total(batches):
        losses = [stats.kl[grid.valid] for batch in batches for grid in [grid_of(mtp, batch)]
                  for stats in [mtp(batch, grid, head, ("kl",))]]  # fmt: skip
        losses = torch.cat(losses)
        return losses, torch.autograd.grad((losses * weights[: len(losses)]).sum(), list(mtp.parameters()))

    def cut(start, end):
        states = TargetStates(layers=packed.states.layers[:, start:end], final=packed.states.final[:, start:end])
        return Batch(
            input_ids=packed.input_ids[:, start:end],
            supervised=packed.supervised[:, start:end],
            document_ids=packed.document_ids[:, start:end],
            position_ids=packed.position_ids[:, start:end],
            states=states,
        )

    together, together_grads = total([packed])
    apart, apart_grads = total([cut(*piece) for piece in pieces])
    torch.testing.assert_close(together, apart, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(together_grads, apart_grads, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("tokens", ["own", "sampled", "gold"])
def test_pieces_of_columns_change_nothing(spec, head, tokens, monkeypatch):
    mtp = build(spec, tokens=tokens)
    batch = pack(40, 50, 60, rows=2)
    grid = grid_of(mtp, batch)
    results = []
    for teacher_bytes in (1, 1 << 30):
        monkeypatch.setattr(mtp_scoring, "TEACHER_BYTES", teacher_bytes)
        stats = mtp(batch, grid, head, ("lk",))
        loss = stats.lk.sum() / grid.num_slots
        results.append((stats.lk, stats.draft_token, torch.autograd.grad(loss, list(mtp.parameters()))))
    torch.testing.assert_close(results[0], results[1], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("tokens", ["own", "sampled", "gold"])
def test_recomputation_changes_nothing(spec, head, tokens):
    batch = pack(9, 4)
    results = []
    for recompute in (False, True):
        mtp = build(spec, tokens=tokens, checkpoint_depths=recompute)
        stats = mtp(batch, grid_of(mtp, batch), head, ("tv",))
        results.append((stats.tv, torch.autograd.grad(stats.tv.sum(), list(mtp.parameters()))))
    assert torch.equal(results[0][0], results[1][0])
    torch.testing.assert_close(results[0][1], results[1][1], rtol=1e-5, atol=1e-6)


def test_hidden_gives_the_states_that_meet_lm_head(spec, head):
    mtp = build(spec, tokens="gold")
    batch = pack(6, 4, rows=2)
    grid = grid_of(mtp, batch)
    hidden = mtp.hidden(batch, grid, head)
    assert hidden.shape == (*grid.valid.shape, HIDDEN)
    labels = batch.input_ids[:, None].expand(-1, grid.valid.shape[1], -1).gather(2, grid.label_index)
    ce = -head.logits(hidden).log_softmax(-1).gather(-1, labels[..., None]).squeeze(-1)
    stats = mtp(batch, grid, head, ("ce",))
    torch.testing.assert_close(ce[grid.valid], stats.ce[grid.valid], rtol=1e-4, atol=1e-4)
    with pytest.raises(ValueError, match="gold"):
        build(spec, tokens="own").hidden(batch, grid, head)


@pytest.mark.parametrize("supervised", [None, torch.zeros(1, 9, dtype=torch.bool)])
def test_a_batch_without_anchors_has_zero_loss_and_gradients(spec, head, supervised):
    mtp = build(spec)
    batch = pack(1, 1, 1, 1, 1, 1, 1, 1, 1) if supervised is None else pack(9, supervised=supervised)
    stats = mtp(batch, grid_of(mtp, batch), head, ("ce", "tv"))
    loss = stats.ce.sum() + stats.tv.sum()
    loss.backward()
    assert loss == 0
    assert all(weight.grad is not None and not weight.grad.any() for weight in mtp.parameters())


def test_stop_gradient_cuts_between_depths(spec, head):
    """The loss of depth 1 reaches what only depth 0 used (hnorm of the true state) unless it is cut."""
    batch = pack(8)
    grads = {}
    for cut in (False, True):
        mtp = build(spec, tokens="gold", stop_gradient=cut, num_kv_heads=4)
        seen = []
        mtp.block.final_layernorm.register_forward_hook(lambda module, args, out, seen=seen: seen.append(out))
        grid = grid_of(mtp, batch)
        stats = mtp(batch, grid, head, ("ce",))
        (grads[cut],) = torch.autograd.grad(stats.ce[..., 1].sum(), [seen[0]], allow_unused=True)
    assert grads[False].abs().max() > 0
    assert grads[True] is None or not grads[True].any()


def test_zero_first_embedding_touches_position_0_only(spec, head):
    batch = pack(5, 6)
    mtp = build(spec, zero_first_embedding=True)
    inputs = []
    mtp.block.enorm.register_forward_hook(lambda module, args, out: inputs.append(args[0]))
    mtp(batch, grid_of(mtp, batch), head, ("ce",))
    assert torch.equal(inputs[0].abs().sum(-1) == 0, batch.position_ids[0] == 0)
    assert (inputs[2].abs().sum(-1) > 0).all()


def test_learns_to_count(spec):
    """A target that counts up: depth k drafts x + k + 2 after a short training, and decoding drafts the same."""
    torch.manual_seed(0)
    embedding, lm_head = torch.randn(VOCAB, HIDDEN), torch.randn(VOCAB, HIDDEN)
    head = Head(embedding, lm_head * 4)
    mtp = MTPConfig(head_dim=8).build(spec)
    ids = (torch.arange(60) % VOCAB)[None]
    states = TargetStates(layers=torch.zeros(1, 60, 0, HIDDEN), final=lm_head[(ids + 1) % VOCAB])
    batch = replace(pack(60), input_ids=ids, states=states)
    grid = grid_of(mtp, batch)
    optimizer = torch.optim.Adam(mtp.parameters(), lr=1e-2)
    for _ in range(80):
        loss = mtp(batch, grid, head, ("ce",)).ce.sum() / grid.num_slots
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    with torch.no_grad():
        drafted = mtp(batch, grid, head, ("ce",)).draft_token
    labels = ids[0][grid.label_index]
    assert (drafted == labels)[grid.valid].float().mean() > 0.98
    cache = mtp.new_cache(1)
    mtp.observe(
        cache, TargetStates(layers=states.layers[:, :3], final=states.final[:, :3]), ids[:, 1:4], torch.tensor([3])
    )
    assert mtp.propose(cache, ids[:, 3], head).tokens.tolist() == [[4, 5, 6]]


@pytest.mark.parametrize("settings", [{}, {"zero_first_embedding": True, "feedback": "pre_norm", "qk_norm": True}])
def test_proposals_equal_the_rollout(spec, head, settings):
    """Two requests of different lengths, observed in rounds: at each anchor the drafts of training."""
    mtp = build(spec, **settings)
    batch = pack(14, rows=2)
    grid = grid_of(mtp, batch)
    with torch.no_grad():
        stats = mtp(batch, grid, head, ("ce",))
    cache = mtp.new_cache(2)
    seen = torch.zeros(2, dtype=torch.int64)
    for step in ([3, 1], [1, 4], [4, 0], [0, 2], [2, 2]):
        lengths = torch.tensor(step)
        window = seen[:, None] + torch.arange(max(step))
        window = window.clamp(max=13)
        final = batch.states.final.gather(1, window[..., None].expand(-1, -1, HIDDEN))
        next_ids = batch.input_ids.gather(1, (window + 1).clamp(max=13))
        mtp.observe(cache, TargetStates(layers=final[:, :, None][:, :, :0], final=final), next_ids, lengths)
        seen = seen + lengths
        proposal = mtp.propose(cache, batch.input_ids.gather(1, seen[:, None]).squeeze(1), head)
        assert proposal.probs is None
        for b in range(2):
            a = grid.anchor_index[b].tolist().index(int(seen[b]))
            valid = grid.valid[b, a]
            assert torch.equal(proposal.tokens[b][valid], stats.draft_token[b, a][valid])
            torch.testing.assert_close(
                proposal.confidence[b][valid], stats.confidence[b, a][valid], rtol=1e-4, atol=1e-5
            )


def test_sampled_proposals_come_from_their_distributions(spec, head):
    mtp = build(spec)
    batch = pack(6)
    head = Head(head.embedding, head.lm_head * 0.3)
    counts = torch.zeros(VOCAB)
    generator = torch.Generator().manual_seed(0)
    cache = mtp.new_cache(500)
    final = batch.states.final[:, :4].expand(500, -1, -1)
    states = TargetStates(layers=final[:, :, None][:, :, :0], final=final)
    mtp.observe(cache, states, batch.input_ids[:, 1:5].expand(500, -1), torch.full((500,), 4))
    anchors = batch.input_ids[:, 4].expand(500)
    for _ in range(4):
        proposal = mtp.propose(cache, anchors, head, temperature=0.7, generator=generator)
        counts += torch.bincount(proposal.tokens[:, 0], minlength=VOCAB)
    probs = proposal.probs
    assert probs.shape == (500, 3, VOCAB)
    torch.testing.assert_close(probs.sum(-1), torch.ones(500, 3))
    expected = probs[0, 0] * 2000
    chi2 = ((counts - expected) ** 2 / expected.clamp(min=1e-9))[expected > 5].sum()
    assert chi2 < 80  # 39 degrees of freedom at most: p < 1e-4
    confidence = probs[0, 0].log().mul(0.7).softmax(-1).max()
    torch.testing.assert_close(proposal.confidence[0, 0], confidence, rtol=1e-4, atol=1e-5)


def test_proposing_before_observing_is_refused(spec, head):
    mtp = build(spec)
    with pytest.raises(ValueError, match="no observed position"):
        mtp.propose(mtp.new_cache(1), torch.tensor([3]), head)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"num_draft_tokens": 0}, "num_draft_tokens is 0"),
        ({"tokens": "golden"}, "tokens is 'golden'; it must be one of: own, sampled, gold"),
        ({"init": "zeros"}, "random, last_layer, target_mtp"),
        ({"fuse_order": "both"}, "embedding_hidden, hidden_embedding"),
        ({"feedback": "none"}, "post_norm, pre_norm"),
        ({"num_heads": 3, "num_kv_heads": 2}, "multiple"),
        ({"head_dim": 2}, "RoPE turns 4"),
    ],
)
def test_bad_settings_are_refused(spec, settings, message):
    with pytest.raises(ValueError, match=message):
        MTPConfig(**settings).build(spec)


def test_reads_the_final_state_only(spec, head):
    mtp = build(spec)
    assert mtp.target_layer_ids == ()
    assert mtp.config.num_heads == 4
    assert mtp.config.head_dim == 6
    batch = replace(pack(5), states=None)
    grid = grid_of(mtp, batch)
    with pytest.raises(ValueError, match="no target states"):
        mtp(batch, grid, head, ("ce",))


@pytest.mark.parametrize("tokens", ["own", "gold", "sampled"])
def test_each_prediction_and_each_teacher_is_one_row_of_the_vocabulary(spec, head, tokens, vocabulary_rows):
    """The teacher at depth k + 1 of a column is that at depth k of the next: no row of it is computed twice."""
    mtp = build(spec, tokens=tokens)
    batch = pack(9, 3, 6)
    grid = grid_of(mtp, batch)
    mtp(batch, grid, head, ("lk",)).lk.sum().backward()
    predictions = int(grid.num_slots)
    teachers = (grid.label_index[grid.valid] - 1).unique().numel()
    assert predictions > 2 * teachers
    assert vocabulary_rows["logits"] == predictions + teachers
    assert vocabulary_rows["gradients"] == predictions


def test_only_legal_anchors_are_columns(spec, head):
    """Depth-0 keys are those of every position; queries, MLP and later depths those of anchors that predict."""
    mtp = build(spec)
    supervised = torch.zeros(1, 20, dtype=torch.bool)
    supervised[0, 12:16] = True
    batch = pack(20, supervised=supervised)
    grid = grid_of(mtp, batch)
    assert int(grid.num_chains) == 3
    keys, columns = [], []
    mtp.block.k_proj.register_forward_hook(lambda module, args, out: keys.append(len(out)))
    mtp.block.q_proj.register_forward_hook(lambda module, args, out: columns.append(len(out)))
    mtp(batch, grid, head, ("lk",))
    assert columns == [3] * mtp.num_draft_tokens
    assert keys == [20] + [3] * (mtp.num_draft_tokens - 1)
