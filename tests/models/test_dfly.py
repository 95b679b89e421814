"""The block-diffusion family: what each slot may depend on, equality of its forms, and that it learns."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hydra import compose, initialize_config_module
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

import draftsmith.train.config  # noqa: F401  (registers the schemas that the YAML files name)
from draftsmith.configs.schema import parse
from draftsmith.data.batch import Batch, Document, TargetStates
from draftsmith.models.dfly import DFly, DFlyConfig
from draftsmith.models.dfly_layers import fusion_logits
from draftsmith.models.dfly_shape import spread_layers
from draftsmith.models.grid import Grid, build_grid, draw_uniform
from draftsmith.models.head import Head, StatsOptions, TokenStats
from draftsmith.models.target import TargetSpec

HIDDEN, VOCAB, MASK = 32, 50, 49
SPEC = TargetSpec(
    hidden_size=HIDDEN,
    num_layers=8,
    num_heads=4,
    num_kv_heads=2,
    head_dim=8,
    intermediate_size=48,
    rms_norm_eps=1e-6,
    vocab_size=VOCAB,
    max_position_embeddings=512,
    rope_parameters={"rope_theta": 10000.0, "rope_type": "default"},
    rope_inv_freq=(1.0, 0.1, 0.01, 0.001),
    mask_token_id=MASK,
)

EAGER = StatsOptions(compile=False)  # no compilation for a few rows

VARIANTS = {
    "dflash": {"context": "shared", "head": "none"},
    "dflare": {"context": "fused", "head": "none"},
    "dfly": {"context": "hybrid", "head": "correction"},
    "dspark": {"context": "shared", "head": "markov", "confidence_head": True, "markov_rank": 4},
    "windowed": {"context": "hybrid", "head": "correction", "sliding_window": 5},
}


def new_drafter(*, seed: int = 0, **settings) -> DFly:
    """A drafter with every parameter drawn at random: none at its zero or one initialisation."""
    torch.manual_seed(seed)
    drafter = DFlyConfig(**settings).build(SPEC)
    for parameter in drafter.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    return drafter


def new_head(seed: int = 1) -> Head:
    generator = torch.Generator().manual_seed(seed)
    embedding, lm_head = torch.randn(2, VOCAB, HIDDEN, generator=generator)
    return Head(embedding, lm_head).with_options(EAGER)


def new_batch(lengths: list[list[int]], drafter: DFly, *, seq: int | None = None, seed: int = 2) -> Batch:
    """Rows of packed documents of these lengths, everything supervised, states random."""
    generator = torch.Generator().manual_seed(seed)
    seq = seq or max(sum(row) for row in lengths)
    documents, positions = torch.full((len(lengths), seq), -1), torch.zeros(len(lengths), seq, dtype=torch.int64)
    for row, row_lengths in enumerate(lengths):
        begin = 0
        for index, length in enumerate(row_lengths):
            documents[row, begin : begin + length] = 10 * row + index
            positions[row, begin : begin + length] = torch.arange(length)
            begin += length
    states = TargetStates(
        layers=torch.randn(len(lengths), seq, len(drafter.target_layer_ids), HIDDEN, generator=generator),
        final=torch.randn(len(lengths), seq, HIDDEN, generator=generator),
    )
    return Batch(
        input_ids=torch.randint(0, MASK, documents.shape, generator=generator),
        supervised=documents >= 0,
        document_ids=documents,
        position_ids=positions,
        states=states,
    )


def changed(batch: Batch, **fields: Tensor) -> Batch:
    states = batch.states
    assert states is not None
    return Batch(
        input_ids=fields.get("input_ids", batch.input_ids),
        supervised=batch.supervised,
        document_ids=batch.document_ids,
        position_ids=batch.position_ids,
        states=TargetStates(layers=fields.get("layers", states.layers), final=fields.get("final", states.final)),
    )


def grid_at(batch: Batch, anchors: list[list[int]], drafter: DFly) -> Grid:
    chosen = [torch.tensor(row, dtype=torch.int64) for row in anchors]
    grid = build_grid(batch, chosen, num_steps=drafter.num_draft_tokens)
    return replace(grid, uniform=draw_uniform(batch, grid, seed=3, epoch=0))


def grid_logits(drafter: DFly, batch: Batch, grid: Grid, target_head: Head) -> Tensor:
    """(batch, anchor, step, vocab), the Markov head's bias included."""
    logits = target_head.logits(drafter.hidden(batch, grid, target_head))
    if drafter.markov is not None:
        steps = torch.arange(drafter.num_draft_tokens)
        position = (grid.anchor_index[..., None] + steps).clamp(max=batch.input_ids.shape[1] - 1)
        rows, basis = drafter.markov(batch.input_ids.gather(1, position.flatten(1)).view_as(position))
        logits = logits + rows @ basis.T
    return logits


def moved(before: Tensor, after: Tensor) -> list[list[bool]]:
    """For each anchor and step of the first row, whether its logits changed at all."""
    return (before != after).any(-1)[0].tolist()


@pytest.mark.parametrize("variant", VARIANTS)
def test_no_slot_depends_on_what_it_must_not_see(variant):
    drafter, target_head = new_drafter(**VARIANTS[variant]), new_head()
    batch = new_batch([[24]], drafter)
    anchors = [4, 6, 7, 15]
    grid = grid_at(batch, [anchors], drafter)
    window = VARIANTS[variant].get("sliding_window")
    states = batch.states
    assert states is not None
    with torch.no_grad():
        before = grid_logits(drafter, batch, grid, target_head)
        for position in range(24):
            layers = states.layers.clone()
            layers[0, position] += 1
            after = grid_logits(drafter, changed(batch, layers=layers), grid, target_head)
            # Slots of a block see each other, so a block that sees a feature at all changes as a whole.
            sees = [position < a and (window is None or position > a - window) for a in anchors]
            assert moved(before, after) == [[s] * 7 for s in sees], position

            tokens = batch.input_ids.clone()
            tokens[0, position] = (tokens[0, position] + 1) % MASK
            after = grid_logits(drafter, changed(batch, input_ids=tokens), grid, target_head)
            expected = []
            for a in anchors:
                offset = position - a  # step s reads the anchor's token, and its predecessor at a + s in the head part
                steps = [offset == 0 or (offset == s and drafter.config.head != "none") for s in range(7)]
                expected.append([s and v for s, v in zip(steps, grid.valid[0, anchors.index(a)].tolist(), strict=True)])
            got = [
                [m and v for m, v in zip(*pair, strict=True)]
                for pair in zip(moved(before, after), grid.valid[0].tolist(), strict=True)
            ]
            assert got == expected, position


def total(stats: TokenStats) -> Tensor:
    value = (stats.ce + stats.kl + stats.tv).sum()
    return value if stats.confidence_logit is None else value + stats.confidence_logit.square().sum()


@pytest.mark.parametrize("variant", VARIANTS)
def test_packed_rows_equal_single_documents(variant):
    drafter, target_head = new_drafter(**VARIANTS[variant]), new_head()
    packed = new_batch([[9, 7, 12]], drafter, seq=31)
    grid = grid_at(packed, [[1, 4, 7, 10, 14, 17, 20, 26]], drafter)
    stats = drafter(packed, grid, target_head, ("ce", "kl", "tv"))
    total(stats).backward()
    expected = [p.grad.clone() for p in drafter.parameters()]
    drafter.zero_grad()

    begin, alone = 0, []
    for length in (9, 7, 12):
        rows = slice(begin, begin + length)
        states = packed.states
        assert states is not None
        document = Batch(
            input_ids=packed.input_ids[:, rows],
            supervised=packed.supervised[:, rows],
            document_ids=packed.document_ids[:, rows],
            position_ids=packed.position_ids[:, rows],
            states=TargetStates(layers=states.layers[:, rows], final=states.final[:, rows]),
        )
        own = grid.anchor_index[0][(grid.anchor_index[0] >= begin) & (grid.anchor_index[0] < begin + length)] - begin
        single = drafter(document, grid_at(document, [own.tolist()], drafter), target_head, ("ce", "kl", "tv"))
        alone.append(single.ce[0])
        total(single).backward()
        begin += length
    torch.testing.assert_close(torch.cat(alone), stats.ce[0], rtol=1e-5, atol=1e-6)
    for own_grad, parameter in zip(expected, drafter.parameters(), strict=True):
        torch.testing.assert_close(own_grad, parameter.grad, rtol=1e-4, atol=1e-5 * float(own_grad.abs().max()))


def test_documents_of_a_row_never_see_each_other():
    drafter, target_head = new_drafter(), new_head()
    batch = new_batch([[12, 12]], drafter)
    grid = grid_at(batch, [[3, 9, 14, 20]], drafter)
    states = batch.states
    assert states is not None
    layers, tokens = states.layers.clone(), batch.input_ids.clone()
    layers[0, :12] += 1
    tokens[0, :12] = (tokens[0, :12] + 1) % MASK
    before = drafter.hidden(batch, grid, target_head)
    after = drafter.hidden(changed(batch, layers=layers, input_ids=tokens), grid, target_head)
    assert not torch.equal(before[0, :2], after[0, :2])
    assert torch.equal(before[0, 2:][grid.valid[0, 2:]], after[0, 2:][grid.valid[0, 2:]])


def test_a_block_keeps_its_slots_at_a_documents_end():
    """Near the end the block is as long as elsewhere: cutting the data after it changes nothing."""
    drafter, target_head = new_drafter(), new_head()
    long = new_batch([[24]], drafter)
    short_states = TargetStates(layers=long.states.layers[:, :14], final=long.states.final[:, :14])
    short = Batch(
        input_ids=long.input_ids[:, :14],
        supervised=long.supervised[:, :14],
        document_ids=long.document_ids[:, :14],
        position_ids=long.position_ids[:, :14],
        states=short_states,
    )
    short_grid = grid_at(short, [[11]], drafter)
    assert short_grid.valid[0, 0].tolist() == [True, True] + [False] * 5
    whole = drafter.hidden(long, grid_at(long, [[11]], drafter), target_head)
    cut = drafter.hidden(short, short_grid, target_head)
    torch.testing.assert_close(cut[0, 0, :2], whole[0, 0, :2])


def test_the_order_of_anchors_changes_nothing():
    drafter, target_head = new_drafter(), new_head()
    batch = new_batch([[15, 9]], drafter)
    anchors = [2, 5, 6, 11, 17, 20]
    order = [3, 0, 5, 1, 4, 2]
    sorted_hidden = drafter.hidden(batch, grid_at(batch, [anchors], drafter), target_head)
    shuffled = drafter.hidden(batch, grid_at(batch, [[anchors[i] for i in order]], drafter), target_head)
    torch.testing.assert_close(shuffled, sorted_hidden[:, order], rtol=1e-5, atol=1e-6)


POISON = MASK - 1  # its embedding is NaN


def poisoned(batch: Batch, grid: Grid, window: int | None) -> Batch:
    """NaN wherever no valid chain may read: states, and tokens whose embedding is NaN; found by loops."""
    states = batch.states
    assert states is not None
    layers, final = torch.full_like(states.layers, torch.nan), torch.full_like(states.final, torch.nan)
    tokens = torch.full_like(batch.input_ids, POISON)
    for row, anchor, step in grid.valid.nonzero().tolist():
        a = int(grid.anchor_index[row, anchor])
        for position in range(a):
            same = batch.document_ids[row, position] == batch.document_ids[row, a]
            if same and (window is None or position > a - window):
                layers[row, position] = states.layers[row, position]
        final[row, a + step] = states.final[row, a + step]
        tokens[row, a + step : a + step + 2] = batch.input_ids[row, a + step : a + step + 2]
    assert layers.isnan().any()
    assert final.isnan().any()
    return changed(batch, layers=layers, final=final, input_ids=tokens)


@pytest.mark.parametrize("variant", [*VARIANTS, "own tokens"])
def test_what_no_valid_chain_may_read_changes_nothing(variant):
    """Padding, what lies beyond a document's anchors, invalid anchors and steps: all NaN; every bit stays."""
    settings = VARIANTS.get(variant, {"own_token_rate": 0.5, "base_loss_weight": 0.5})
    drafter, target_head = new_drafter(**settings), new_head()
    target_head.embedding[POISON] = torch.nan
    batch = new_batch([[10, 9], [16], [5]], drafter, seq=22)
    batch = changed(batch, input_ids=batch.input_ids.clamp(max=POISON - 1))
    grid = grid_at(batch, [[3, 6, 15], [4, 9, 13], []], drafter)
    results = []
    for data in (batch, poisoned(batch, grid, drafter.config.sliding_window)):
        drafter.zero_grad()
        torch.manual_seed(0)
        stats = drafter(data, grid, target_head, ("ce", "kl", "tv"))
        total(stats).backward()
        results.append((stats, [p.grad.clone() for p in drafter.parameters()]))
    (clean, clean_grads), (dirty, dirty_grads) = results
    assert all(torch.equal(a, b) for a, b in zip(values(clean), values(dirty), strict=True))
    assert all(torch.equal(a, b) for a, b in zip(clean_grads, dirty_grads, strict=True))
    assert clean.ce[~grid.valid].eq(0).all()
    assert clean.label_prob[~grid.valid].eq(1).all()


def values(stats: TokenStats) -> list[Tensor]:
    found: list[Tensor] = []
    stats.map(lambda value, _: found.append(value) or value)
    return found


def test_a_static_grid_is_filled_up_and_its_statistics_stay():
    drafter, target_head = new_drafter(anchors_per_document=3, anchors_per_row=5), new_head()
    batch = new_batch([[20], [16]], drafter)
    small, wide = (drafter.grid(batch, seed=0, epoch=0, static=static) for static in (False, True))
    assert (small.valid.shape, wide.valid.shape) == ((2, 3, 7), (2, 5, 7))
    assert not wide.valid[:, 3:].any()
    ours, theirs = (drafter(batch, grid, target_head, ("ce",)).ce for grid in (wide, small))
    torch.testing.assert_close(ours[:, :3], theirs)


def test_a_batch_without_an_anchor_gives_zero_gradients():
    drafter, target_head = new_drafter(), new_head()
    batch = new_batch([[6]], drafter)
    stats = drafter(batch, grid_at(batch, [[]], drafter), target_head, ("ce",))
    stats.ce.sum().backward()
    assert stats.ce.eq(0).all()
    assert all(p.grad is not None and p.grad.eq(0).all() for p in drafter.parameters())


@pytest.mark.parametrize("variant", VARIANTS)
def test_propose_equals_the_training_forward(variant):
    """Greedy drafts of requests of different lengths, observed in two rounds, against the same anchors in training."""
    drafter, target_head = new_drafter(**VARIANTS[variant]), new_head()
    batch = new_batch([[20], [20], [20]], drafter)
    states = batch.states
    assert states is not None
    anchors, first_round = torch.tensor([9, 12, 1]), torch.tensor([4, 11, 0])
    cache = drafter.new_cache(3)
    for begin, end in ((torch.zeros(3, dtype=torch.int64), first_round), (first_round, anchors)):
        width = int((end - begin).max())
        index = (begin[:, None] + torch.arange(width)).clamp(max=19)
        rows = torch.arange(3)[:, None]
        new = TargetStates(layers=states.layers[rows, index], final=states.final[rows, index])
        drafter.observe(cache, new, batch.input_ids[rows, index + 1 - (index == 19).long()], end - begin)
    proposal = drafter.propose(cache, batch.input_ids[torch.arange(3), anchors], target_head)
    assert proposal.probs is None
    assert proposal.tokens.shape == (3, 7)

    tokens = batch.input_ids.clone()
    for row, anchor in enumerate(anchors.tolist()):
        tokens[row, anchor + 1 : anchor + 8] = proposal.tokens[row]
    forced = changed(batch, input_ids=tokens)
    grid = grid_at(forced, [[a] for a in anchors.tolist()], drafter)
    logits = grid_logits(drafter, forced, grid, target_head)[:, 0]
    assert torch.equal(logits.argmax(-1), proposal.tokens)
    confidence = logits.softmax(-1).amax(-1)
    if drafter.confidence is not None:
        confidence = drafter.confidence(drafter.hidden(forced, grid, target_head)[:, 0])[..., 0].sigmoid()
    torch.testing.assert_close(proposal.confidence, confidence, rtol=1e-4, atol=1e-6)


def test_sampled_drafts_come_with_their_distributions():
    drafter, target_head = new_drafter(), new_head()
    batch = new_batch([[12]], drafter)
    cache = drafter.new_cache(1)
    assert batch.states is not None
    seen = TargetStates(layers=batch.states.layers[:, :9], final=batch.states.final[:, :9])
    drafter.observe(cache, seen, batch.input_ids[:, 1:10], torch.tensor([9]))
    generator = torch.Generator().manual_seed(0)
    proposal = drafter.propose(
        cache, batch.input_ids[:, 9], target_head, temperature=2.0, top_p=0.9, generator=generator
    )
    assert proposal.probs is not None
    assert proposal.probs.shape == (1, 7, VOCAB)
    torch.testing.assert_close(proposal.probs.sum(-1), torch.ones(1, 7))
    drawn = proposal.probs.gather(-1, proposal.tokens[..., None])
    assert drawn.gt(0).all()
    # Each distribution is conditioned on the drafts before it.
    tokens = batch.input_ids.clone()
    tokens = torch.cat((tokens[:, :10], proposal.tokens), dim=1)
    forced = new_batch([[17]], drafter)
    layers = forced.states.layers.clone()
    layers[:, :9] = seen.layers
    forced = changed(forced, input_ids=tokens, layers=layers)
    hidden = drafter.hidden(forced, grid_at(forced, [[9]], drafter), target_head)
    probs = (target_head.logits(hidden[:, 0]) / 2).softmax(-1)
    kept = torch.where(proposal.probs > 0, probs, 0)
    torch.testing.assert_close(proposal.probs, kept / kept.sum(-1, keepdim=True), rtol=1e-4, atol=1e-6)


def test_hybrid_context_by_hand():
    drafter = new_drafter(num_layers=3)
    layers = torch.randn(2, 5, 5, HIDDEN)
    encoder = drafter.backbone.context
    contexts = encoder(layers)
    for i in range(3):
        weights = torch.exp(encoder.fusion[i]) / torch.exp(encoder.fusion[i]).sum()
        for b in range(2):
            for s in range(5):
                mixed = encoder.projection.weight @ torch.cat([layers[b, s, t] for t in range(5)])
                for t in range(5):
                    mixed = mixed + weights[t] * layers[b, s, t]
                expected = mixed / (mixed.square().mean() + 1e-6).sqrt() * encoder.norm.weight
                torch.testing.assert_close(contexts[i][b, s], expected, rtol=1e-5, atol=1e-5)


def test_equal_fusion_rows_are_dflash_with_another_projection():
    dfly = new_drafter(head="none")
    dflash = new_drafter(context="shared", head="none")
    row = torch.randn(5)
    with torch.no_grad():
        dfly.backbone.context.fusion.copy_(row)
    weights = dict(dfly.state_dict())
    del weights["backbone.context.fusion"]
    eye = torch.cat([p * torch.eye(HIDDEN) for p in row.softmax(-1)], dim=1)
    weights["backbone.context.projection.weight"] = weights["backbone.context.projection.weight"] + eye
    dflash.load_state_dict(weights)
    target_head = new_head()
    batch = new_batch([[20]], dfly)
    grid = grid_at(batch, [[3, 8, 15]], dfly)
    torch.testing.assert_close(
        dfly.hidden(batch, grid, target_head), dflash.hidden(batch, grid, target_head), rtol=1e-5, atol=1e-5
    )


def test_at_the_start_the_correction_is_the_identity_bit_for_bit():
    torch.manual_seed(0)
    dfly = DFlyConfig().build(SPEC)
    plain = DFlyConfig(head="none").build(SPEC)
    plain.load_state_dict({k: v for k, v in dfly.state_dict().items() if not k.startswith("correction.")})
    target_head = new_head()
    batch = new_batch([[20]], dfly)
    grid = grid_at(batch, [[3, 8, 15]], dfly)
    assert torch.equal(dfly.hidden(batch, grid, target_head), plain.hidden(batch, grid, target_head))
    assert torch.equal(dfly(batch, grid, target_head, ("ce",)).ce, plain(batch, grid, target_head, ("ce",)).ce)


def test_the_correction_reads_the_anchor_then_the_data():
    drafter, target_head = new_drafter(), new_head()
    batch = new_batch([[20]], drafter)
    grid = grid_at(batch, [[6]], drafter)
    seen = []
    assert drafter.correction is not None
    drafter.correction.register_forward_pre_hook(lambda module, args: seen.append(args[1]))
    drafter.hidden(batch, grid, target_head)
    torch.testing.assert_close(seen[0][0, 0], target_head.embed(batch.input_ids[0, 6:13]))


def test_fusion_starts_as_published():
    assert torch.equal(fusion_logits(1, 3), torch.tensor([[-4.0, -2.0, 0.0]]))
    expected = torch.tensor([[0.0, -2, -4, -6, -8], [-4, -2, 0, -2, -4], [-8, -6, -4, -2, 0]])
    assert torch.equal(fusion_logits(3, 5), expected)
    assert torch.equal(DFlyConfig(num_layers=3).build(SPEC).backbone.context.fusion, expected)


def test_captured_layers_are_spread_as_published():
    assert spread_layers(36, 5) == [1, 9, 17, 25, 33]
    assert spread_layers(36, 2) == [1, 33]
    assert spread_layers(30, 5) == [1, 8, 14, 20, 27]
    assert spread_layers(9, 1) == [4]
    assert DFlyConfig().build(SPEC).target_layer_ids == (1, 2, 3, 4, 5)
    for num_layers in range(4, 40):
        for count in range(1, num_layers - 2):
            ids = spread_layers(num_layers, count)
            assert sorted(set(ids)) == ids
            assert 0 <= ids[0] <= ids[-1] < num_layers


def test_a_counting_sequence_is_learnt_and_a_block_of_8_drafts_7():
    torch.manual_seed(0)
    drafter = DFlyConfig(num_layers=2, num_target_layers=1, anchors_per_document=8).build(SPEC)
    embedding = torch.randn(VOCAB, HIDDEN) / HIDDEN**0.5
    target_head = Head(embedding * 3, embedding * 3).with_options(EAGER)
    optimizer = torch.optim.AdamW(drafter.parameters(), lr=5e-3)

    def batch_of(tokens: Tensor) -> Batch:
        shape = tokens.shape
        states = embedding[tokens] * 3
        return Batch(
            input_ids=tokens,
            supervised=torch.ones(shape, dtype=torch.bool),
            document_ids=torch.arange(shape[0])[:, None].expand(shape),
            position_ids=torch.arange(shape[1]).expand(shape),
            states=TargetStates(layers=states[:, :, None], final=embedding[(tokens + 1) % 40] * 3),
        )

    for step in range(60):
        tokens = (torch.arange(24) + torch.randint(0, 40, (8, 1))) % 40
        batch = batch_of(tokens)
        grid = drafter.grid(batch, seed=0, epoch=step)
        stats = drafter(batch, grid, target_head, ("ce",))
        loss = stats.ce.sum() / grid.num_slots
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    history = torch.tensor([[1, 2, 3]])
    cache = drafter.new_cache(1)
    drafter.observe(cache, batch_of(history[:, :2]).states, history[:, 1:], torch.tensor([2]))
    assert drafter.propose(cache, history[:, 2], target_head).tokens.tolist() == [[4, 5, 6, 7, 8, 9, 10]]


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"block_size": 1}, "block_size=1: it must be at least 2"),
        ({"context": "mixed"}, "choose one of shared, fused, hybrid"),
        ({"head": "markovian"}, "choose one of none"),
        ({"init": "target"}, "choose one of auto, random, target_layers"),
        ({"num_layers": 0}, "num_layers=0"),
        ({"num_heads": 3}, "no multiple of num_kv_heads=2"),
        ({"num_kv_heads": 0}, "num_kv_heads=0"),
        ({"target_layer_ids": [1, 8]}, r"inside 0\.\.7; a legal choice is drafter.target_layer_ids=\[1, 5\]"),
        ({"target_layer_ids": [3, 1]}, "distinct, ascending"),
        ({"target_layer_ids": [-1, 1]}, "inside"),
        ({"target_layer_ids": []}, "a legal choice"),
        ({"target_layer_ids": [1, 2], "num_target_layers": 3}, "leave one out"),
        ({"num_target_layers": 7}, r"a legal choice is drafter.target_layer_ids=\[1, 2, 3, 4, 5\]"),
        ({"sliding_window": 0}, "sliding_window=0"),
    ],
)
def test_bad_settings_are_refused_with_a_legal_choice(settings, message):
    with pytest.raises(ValueError, match=message):
        DFlyConfig(**settings).build(SPEC)


def test_small_targets_must_be_given_their_layers():
    small = replace(SPEC, num_layers=3)
    with pytest.raises(ValueError, match=r"target_layer_ids=\[0, 1, 2\]"):
        DFlyConfig().build(small)
    assert DFlyConfig(target_layer_ids=[0, 2]).build(small).target_layer_ids == (0, 2)


def test_a_target_without_a_mask_token_is_refused():
    with pytest.raises(ValueError, match=r"target\.mask_token_id=<row>"):
        DFlyConfig().build(replace(SPEC, mask_token_id=None))


def test_data_with_the_mask_token_is_refused():
    def document(tokens: list[int]) -> Document:
        return Document(
            tokens=torch.tensor(tokens), supervised=torch.ones(len(tokens), dtype=torch.bool), domain="chat", id="a-b"
        )

    drafter = new_drafter()
    drafter.check_documents([document([1, 2])])
    with pytest.raises(ValueError, match=f"1 documents contain the mask token {MASK}"):
        drafter.check_documents([document([1, 2]), document([3, MASK])])


def test_states_of_another_target_are_refused():
    drafter, target_head = new_drafter(), new_head()
    batch = new_batch([[12]], drafter)
    grid = grid_at(batch, [[3]], drafter)
    assert batch.states is not None
    for layers in (batch.states.layers[:, :, :4], batch.states.layers[..., :16]):
        with pytest.raises(ValueError, match=r"this drafter reads \(5, 32\)"):
            drafter.hidden(changed(batch, layers=layers), grid, target_head)


def test_bad_options_of_the_head_part_are_refused():
    for settings, message in (
        ({"head": "none", "own_token_rate": 0.5}, "own_token_rate has no effect"),
        ({"head": "none", "base_loss_weight": 0.5}, "base_loss_weight has no effect"),
        ({"own_token_agreeing": True}, "own_token_agreeing has no effect"),
        ({"own_token_rate": 1.5}, "at most 1"),
        ({"base_loss_weight": -1.0}, "at least 0"),
    ):
        with pytest.raises(ValueError, match=message):
            DFlyConfig(**settings).build(SPEC)


@pytest.mark.parametrize("head", ["correction", "markov"])
def test_own_tokens_are_fed_step_by_step_while_labels_stay_the_datas(head):
    drafter, target_head = new_drafter(head=head, own_token_rate=1.0), new_head()
    batch = new_batch([[18], [12]], drafter)
    grid = grid_at(batch, [[3, 9], [5]], drafter)
    stats = drafter(batch, grid, target_head, ("ce", "tv"))
    drafter.eval()
    # By hand: write the drafter's own token over the data's, step by step, and read the next step's statistics.
    for row, slot in ((0, 0), (0, 1), (1, 0)):
        tokens, anchor = batch.input_ids.clone(), int(grid.anchor_index[row, slot])
        for step in range(int(grid.valid[row, slot].sum())):
            logits = grid_logits(drafter, changed(batch, input_ids=tokens), grid, target_head)[row, slot, step]
            assert int(stats.draft_token[row, slot, step]) == int(logits.argmax())
            label = batch.input_ids[row, anchor + step + 1]
            torch.testing.assert_close(stats.ce[row, slot, step], -logits.log_softmax(-1)[label], rtol=1e-4, atol=1e-4)
            tokens[row, anchor + step + 1] = logits.argmax()
    # In evaluation, predecessors are the data's.
    gold = new_drafter(head=head)(batch, grid, target_head, ("ce",))
    torch.testing.assert_close(drafter(batch, grid, target_head, ("ce",)).ce, gold.ce)


def test_own_tokens_only_where_the_target_agrees_and_only_at_their_rate():
    batch_of = [[40]] * 4
    target_head = new_head()
    gold = new_drafter()
    batch = new_batch(batch_of, gold)
    grid = grid_at(batch, [[3, 9, 20]] * 4, gold)
    reference = gold(batch, grid, target_head, ("ce", "tv"))
    # Random states: the drafter's token is hardly ever the target's, so hardly a predecessor changes.
    agreeing = new_drafter(own_token_rate=1.0, own_token_agreeing=True)(batch, grid, target_head, ("ce", "tv"))
    agrees = (reference.draft_token == reference.target_token)[..., :-1] & grid.valid[..., :-1]
    same = torch.isclose(agreeing.ce, reference.ce, rtol=1e-4, atol=1e-5)
    assert same[..., 0].all()
    assert same[..., 1:][~agrees.cumsum(-1).bool()].all()
    half = new_drafter(own_token_rate=0.5)(batch, grid, target_head, ("ce", "tv"))
    differs = ~torch.isclose(half.ce, reference.ce, rtol=1e-4, atol=1e-5)[..., 1:][grid.valid[..., 1:]]
    assert 0.3 < float(differs.float().mean()) < 0.7


@pytest.mark.parametrize("head", ["correction", "markov"])
def test_the_base_loss_adds_the_uncorrected_states_gradient_and_no_value(head):
    target_head = new_head()
    gradients, values = {}, {}
    for weight in (0.0, 0.5):
        drafter = new_drafter(head=head, base_loss_weight=weight)
        batch = new_batch([[18]], drafter)
        grid = grid_at(batch, [[3, 9]], drafter)
        stats = drafter(batch, grid, target_head, ("ce", "lk"))
        (stats.ce + 2 * stats.lk).sum().backward()
        gradients[weight] = {name: p.grad.clone() for name, p in drafter.named_parameters()}
        values[weight] = stats
    assert torch.equal(values[0.0].draft_token, values[0.5].draft_token)
    torch.testing.assert_close(values[0.0].ce, values[0.5].ce)
    plain = new_drafter(head="none")
    plain.load_state_dict({name: p for name, p in drafter.state_dict().items() if name in plain.state_dict()})
    stats = plain(batch, grid, target_head, ("ce", "lk"))
    (stats.ce + 2 * stats.lk).sum().backward()
    base = {name: p.grad for name, p in plain.named_parameters()}
    for name, gradient in gradients[0.5].items():
        expected = gradients[0.0][name] + (0.5 * base[name] if name in base else 0)
        torch.testing.assert_close(gradient, expected, rtol=1e-4, atol=1e-5 * float(expected.abs().max()))


def test_hidden_is_refused_where_predecessors_are_drafts():
    drafter, target_head = new_drafter(own_token_rate=0.5), new_head()
    batch = new_batch([[12]], drafter)
    grid = grid_at(batch, [[3]], drafter)
    with pytest.raises(ValueError, match=r"call eval\(\)"):
        drafter.hidden(batch, grid, target_head)
    drafter.eval().hidden(batch, grid, target_head)


def test_activation_checkpointing_changes_nothing():
    results = []
    for checkpointing in (False, True):
        drafter, target_head = new_drafter(activation_checkpointing=checkpointing), new_head()
        batch = new_batch([[18]], drafter)
        stats = drafter(batch, grid_at(batch, [[3, 9]], drafter), target_head, ("ce",))
        stats.ce.sum().backward()
        results.append([stats.ce, *(p.grad for p in drafter.parameters())])
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


def test_the_markov_head_starts_as_dflash():
    torch.manual_seed(0)
    dspark = DFlyConfig(context="shared", head="markov", markov_rank=4).build(SPEC)
    torch.manual_seed(0)
    dflash = DFlyConfig(context="shared", head="none").build(SPEC)
    assert float(dspark.markov.previous.weight.detach().std()) == pytest.approx(0.02, rel=0.3)
    dflash.load_state_dict({n: p for n, p in dspark.state_dict().items() if not n.startswith("markov.")})
    target_head = new_head()
    batch = new_batch([[20]], dflash)
    grid = grid_at(batch, [[3, 8, 15]], dflash)
    ours, theirs = (d(batch, grid, target_head, ("ce", "tv")) for d in (dspark, dflash))
    torch.testing.assert_close(ours.ce, theirs.ce)
    torch.testing.assert_close(ours.tv, theirs.tv)


def test_grouped_query_attention_norms_and_biases_are_free():
    for settings in (
        {"num_heads": 6, "num_kv_heads": 3, "intermediate_size": 20},
        {"head_dim": 16, "num_heads": 2, "num_kv_heads": 1},
        {"qk_norm": True, "qkv_bias": True},
        {"block_size": 2, "num_layers": 1},
        {"block_size": 5, "num_layers": 4, "num_target_layers": 2},
    ):
        drafter, target_head = new_drafter(**settings), new_head()
        batch = new_batch([[15]], drafter)
        stats = drafter(batch, grid_at(batch, [[4, 9]], drafter), target_head, ("ce",))
        stats.ce.sum().backward()
        assert all(p.grad is not None and p.grad.abs().max() > 0 for p in drafter.parameters())
        assert stats.ce.shape == (1, 2, drafter.config.block_size - 1)


@pytest.mark.parametrize(
    ("name", "parts"),
    [
        ("dflash", ("shared", "none", False)),
        ("dflare", ("fused", "none", False)),
        ("dfly", ("hybrid", "correction", False)),
        ("dspark", ("shared", "markov", True)),
    ],
)
def test_each_drafter_is_one_yaml(name, parts):
    with initialize_config_module("draftsmith.configs", version_base="1.3"):
        node = compose("train", overrides=[f"drafter={name}"])
    config = parse(node.drafter, DFlyConfig)
    assert (config.context, config.head, config.confidence_head) == parts
    drafter = config.build(SPEC)
    assert drafter.num_draft_tokens == 7
    # A configuration with its defaults filled in builds the same drafter: what an export stores.
    again = drafter.config.build(SPEC)
    again.load_state_dict(drafter.state_dict())
    assert again.config == drafter.config


@pytest.mark.slow
def test_compiled_layers_change_nothing():
    results = []
    for compiled in (False, True):
        drafter, target_head = new_drafter(compile=compiled), new_head()
        values = []
        for length, anchors in ((18, [3, 9]), (22, [2, 5, 8, 11])):
            batch = new_batch([[length]], drafter)
            stats = drafter(batch, grid_at(batch, [anchors], drafter), target_head, ("ce",))
            stats.ce.sum().backward()
            values.append(stats.ce)
        results.append(([*values, *(p.grad for p in drafter.parameters())], list(drafter.state_dict())))
    (eager, names), (compiled_values, compiled_names) = results
    assert names == compiled_names
    for own, reference in zip(compiled_values, eager, strict=True):
        torch.testing.assert_close(own, reference, rtol=1e-4, atol=1e-4 * float(reference.abs().max()))


class ShapesOfData(TorchDispatchMode):
    """Notes operations whose result's shape depends on data: on a device the host would wait for them."""

    def __init__(self) -> None:
        super().__init__()
        self.found: set[str] = set()

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if function.overloadpacket.__name__ in {"nonzero", "masked_select", "_unique2"}:
            self.found.add(str(function))
        return function(*args, **kwargs or {})


@pytest.mark.parametrize("variant", VARIANTS)
def test_a_step_looks_for_valid_predictions_only_where_the_grid_is_made(variant):
    drafter, target_head = new_drafter(**VARIANTS[variant], anchors_per_row=5), new_head()
    batch = new_batch([[9, 14], [20]], drafter)
    grid = drafter.grid(batch, seed=0, epoch=0, static=True)
    assert torch.equal(torch.stack(grid.slots, dim=1), grid.valid.nonzero())
    with ShapesOfData() as data_dependent:
        drafter(batch, grid.to("cpu"), target_head, ("lk",)).lk.sum().backward()
    assert data_dependent.found == set()
    with ShapesOfData() as data_dependent:
        grid.valid.nonzero()
    assert data_dependent.found == {"aten.nonzero.default"}


@pytest.mark.parametrize("head", ["correction", "markov"])
@pytest.mark.parametrize("own_token_rate", [0.0, 1.0])
def test_own_tokens_cost_no_second_vocabulary_product(head, own_token_rate, vocabulary_rows):
    drafter, target_head = new_drafter(head=head, own_token_rate=own_token_rate), new_head()
    batch = new_batch([[18], [12]], drafter)
    grid = grid_at(batch, [[3, 9], [5]], drafter)
    drafter(batch, grid, target_head, ("lk",)).lk.sum().backward()
    predictions = int(grid.num_slots)
    # A Markov head trains weights of the vocabulary: its rows are computed again in backward, and its basis has a
    # product of its own.
    times = 2 if head == "markov" else 1
    assert vocabulary_rows["logits"] == times * 2 * predictions  # the drafter's and the teacher's
    assert vocabulary_rows["gradients"] == times * predictions


def test_context_is_projected_up_to_the_largest_anchor_and_once_in_decoding():
    drafter, target_head = new_drafter(), new_head()
    batch = new_batch([[20], [20]], drafter)
    assert batch.states is not None
    widths = []
    drafter.backbone.context.register_forward_pre_hook(lambda module, args: widths.append(args[0].shape[1]))
    drafter(batch, grid_at(batch, [[3, 11], [7]], drafter), target_head, ("lk",))
    assert widths == [11]
    widths.clear()
    cache = drafter.new_cache(2)
    for begin, end in ((0, 9), (9, 12), (12, 13)):
        new = TargetStates(layers=batch.states.layers[:, begin:end], final=batch.states.final[:, begin:end])
        drafter.observe(cache, new, batch.input_ids[:, begin + 1 : end + 1], torch.tensor([end - begin] * 2))
        drafter.propose(cache, batch.input_ids[:, end], target_head)
    assert widths == [9, 3, 1]
