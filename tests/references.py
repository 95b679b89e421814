"""Slow, obvious oracles: element loops, full-vocabulary float64 losses, unpacked rows."""

from __future__ import annotations

import math

import torch


def block_sees(
    slot: int, key_slot: int | None, key_position: int, *, anchor: int, window: int | None, documents: list[int]
) -> bool:
    """Whether a slot of the block at `anchor` sees a key: a slot of its own block (key_slot), or a context position."""
    if key_slot is not None:
        return True
    if documents[key_position] != documents[anchor] or key_position >= anchor:
        return False
    return window is None or anchor + slot - key_position < window


def block_attention(q, k, v, context_k, context_v, *, anchors, exists, documents, window=None):
    """Attention of blocks by loops over elements, float64: the softmax of method.md section 2.

    Args:
        q: (batch, anchor, slot, head, head_dim); k, v: (batch, anchor, slot, kv_head, head_dim).
        context_k: (batch, seq, kv_head, head_dim); likewise context_v.
        anchors: nested lists (batch, anchor); likewise exists.
        documents: nested lists (batch, seq).
    """
    q, k, v, context_k, context_v = (x.double() for x in (q, k, v, context_k, context_v))
    batch, num_anchors, slots, heads, head_dim = q.shape
    share = heads // k.shape[3]
    rows = []
    for b in range(batch):
        for a in range(num_anchors):
            for s in range(slots):
                for h in range(heads):
                    if not exists[b][a]:
                        rows.append(torch.zeros(head_dim, dtype=torch.float64))
                        continue
                    rule = {"anchor": anchors[b][a], "window": window, "documents": documents[b]}
                    keys = [k[b, a, j, h // share] for j in range(slots) if block_sees(s, j, -1, **rule)]
                    values = [v[b, a, j, h // share] for j in range(slots) if block_sees(s, j, -1, **rule)]
                    for position in range(context_k.shape[1]):
                        if block_sees(s, None, position, **rule):
                            keys.append(context_k[b, position, h // share])
                            values.append(context_v[b, position, h // share])
                    weights = torch.softmax(torch.stack(keys) @ q[b, a, s, h] / head_dim**0.5, dim=0)
                    rows.append(weights @ torch.stack(values))
    return torch.stack(rows).view(q.shape)


def chain_attention_loop(query, key, value, own_key, own_value, first, last):
    """Each row and head by itself: one explicit softmax over context positions first..last and the row's own entries.

    Shapes as in draftsmith.models.chain_attention.chain_attention.
    """
    rows = []
    for r in range(len(query)):
        heads = []
        for h in range(query.shape[1]):
            g = h // (query.shape[1] // key.shape[1])
            seen = slice(int(first[r]), int(last[r]) + 1)
            keys = torch.cat([key[seen, g], own_key[r, :, g]])
            values = torch.cat([value[seen, g], own_value[r, :, g]])
            weights = torch.softmax(keys @ query[r, h] / query.shape[-1] ** 0.5, dim=0)
            heads.append(weights @ values)
        rows.append(torch.stack(heads))
    return torch.stack(rows)


def mtp_chain(mtp, target_head, tokens, final, anchor, gold):
    """One chain of an MTP drafter, position by position, for one document by itself.

    Args:
        tokens: (seq,); final: (seq, hidden), the target's states.
        anchor: position of the last committed token.
        gold: read the data's tokens after the anchor (where the document has them) instead of the drafter's own.

    Returns:
        (step, hidden) the states that meet lm_head, and the tokens that were read after the anchor.
    """
    block, config = mtp.block, mtp.config

    def norm(module, x):
        scale = 1 + module.weight if config.norm_plus_one else module.weight
        return x / torch.sqrt((x * x).mean(-1, keepdim=True) + module.eps) * scale

    def rope(x, position):
        half = len(mtp.spec.rope_inv_freq)
        angle = position * torch.tensor(mtp.spec.rope_inv_freq, dtype=x.dtype)
        cos, sin = angle.cos() * mtp.spec.rope_attention_scaling, angle.sin() * mtp.spec.rope_attention_scaling
        a, b, rest = x[..., :half], x[..., half : 2 * half], x[..., 2 * half :]
        return torch.cat([a * cos - b * sin, b * cos + a * sin, rest], -1)

    def read(token, u, position):
        e = target_head.embed(token).to(u.dtype)
        if config.zero_first_embedding and position == 0:
            e = torch.zeros_like(e)
        pair = [norm(block.enorm, e), norm(block.hnorm, u)]
        z = block.eh_proj.weight @ torch.cat(pair if config.fuse_order == "embedding_hidden" else pair[::-1])
        x = norm(block.input_layernorm, z)
        k = block.k_proj(x).view(block.num_kv_heads, -1)
        k = rope(norm(block.k_norm, k) if config.qk_norm else k, position)
        return z, x, k, block.v_proj(x).view(block.num_kv_heads, -1)

    j = anchor - 1
    entries = [read(tokens[i + 1], final[i], i)[2:] for i in range(anchor)]
    token, u, states, read_tokens = tokens[anchor], final[j], [], []
    for depth in range(mtp.num_draft_tokens):
        z, x, k, v = read(token, u, j + depth)
        if depth > 0:
            entries.append((k, v))
        q, gate = block.q_proj(x).view(block.num_heads, -1), None
        if config.attention_output_gate:
            q, gate = q[:, : block.head_dim], q[:, block.head_dim :]
        q = rope(norm(block.q_norm, q) if config.qk_norm else q, j + depth)
        heads = []
        for h in range(block.num_heads):
            g = h // (block.num_heads // block.num_kv_heads)
            weights = torch.softmax(torch.stack([k[g] for k, _ in entries]) @ q[h] / block.head_dim**0.5, dim=0)
            heads.append(weights @ torch.stack([v[g] for _, v in entries]))
        attended = torch.stack(heads)
        if gate is not None:
            attended = attended * torch.sigmoid(gate)
        z = z + block.o_proj.weight @ attended.flatten()
        z = z + block.mlp(norm(block.post_attention_layernorm, z)[None])[0]
        states.append(norm(block.final_layernorm, z))
        u = z if config.feedback == "pre_norm" else states[-1]
        if gold:
            token = tokens[min(anchor + depth + 1, len(tokens) - 1)]
        else:
            token = target_head.logits(states[-1][None])[0].argmax()
        read_tokens.append(token)
    return torch.stack(states), torch.stack(read_tokens)


def moe_loop(moe, x):
    """A mixture of experts token by token and expert by expert. x: (token, hidden)."""
    config, router = moe.router.config, moe.router
    rows = []
    for token in x:
        logits = router.weight @ token
        scores = torch.sigmoid(logits) if config.scores == "sigmoid" else torch.softmax(logits, 0)
        ranked = sorted(range(config.num_experts), key=lambda e: -(scores[e] + router.expert_bias[e]).item())
        chosen = ranked[: config.experts_per_token]
        norm = sum(scores[e] for e in chosen) + 1e-20
        total = torch.zeros_like(token)
        for e in chosen:
            gate, up = (moe.experts.gate_up_proj[e] @ token).chunk(2)
            out = moe.experts.down_proj[e] @ (torch.nn.functional.silu(gate) * up)
            total = total + config.scaling * scores[e] / norm * out
        if moe.shared_expert is not None:
            shared = moe.shared_expert(token[None])[0]
            if moe.shared_expert_gate is not None:
                shared = shared * torch.sigmoid(moe.shared_expert_gate.weight @ token)
            total = total + shared
        rows.append(total)
    return torch.stack(rows)


def vocabulary_statistics(draft_logits, target_logits, labels, *, eta=3.0, temperature=1.0, top_k=None, draft_ids=None):
    """Every statistic of TokenStats in float64 from whole rows of logits, one row at a time, by autograd alone.

    draft_logits: (row, vocab), or (row, draft_vocab) with draft_ids. Gradients flow to draft_logits.
    """
    names = ("ce", "target_ce", "kl", "reverse_kl", "tv", "lk", "log_acceptance", "acceptance", "draft_token")
    names += ("target_token", "label_prob", "confidence", "entropy")
    rows = {name: [] for name in names}
    for z_q, z_p, label in zip(draft_logits.double(), target_logits.detach().double(), labels.tolist(), strict=True):
        ids = list(range(len(z_p))) if draft_ids is None else draft_ids.tolist()
        log_q1 = torch.log_softmax(z_q, 0)
        target_token = int(z_p.argmax())
        log_q, log_p = torch.log_softmax(z_q / temperature, 0), torch.log_softmax(z_p / temperature, 0)[ids]
        confidence, entropy = log_q.exp().max(), -(log_q.exp() * log_q).sum()
        if top_k is not None:
            support = z_p.topk(top_k).indices
            log_q = torch.log_softmax(z_q[support] / temperature, 0)
            log_p = torch.log_softmax(z_p[support] / temperature, 0)
        p, q = log_p.exp(), log_q.exp()
        kl, overlap = (p * (log_p - log_q)).sum(), torch.minimum(p, q).sum()
        blend = torch.exp(-eta * overlap.detach())
        rows["ce"].append(-log_q1[ids.index(label)] if label in ids else 0 * z_q.sum())
        rows["target_ce"].append(-log_q1[ids.index(target_token)] if target_token in ids else 0 * z_q.sum())
        rows["kl"].append(kl)
        rows["reverse_kl"].append((q * (log_q - log_p)).sum())
        rows["tv"].append(1 - overlap)
        rows["lk"].append(blend * kl + (1 - blend) * (1 - overlap))
        rows["log_acceptance"].append(torch.minimum(log_p, log_q).logsumexp(0))
        rows["acceptance"].append(overlap)
        rows["draft_token"].append(torch.tensor(ids[int(z_q.argmax())]))
        rows["target_token"].append(torch.tensor(target_token))
        rows["label_prob"].append(log_q1[ids.index(label)].exp() if label in ids else torch.tensor(0.0).double())
        rows["confidence"].append(confidence)
        rows["entropy"].append(entropy)
    return {name: torch.stack(values) for name, values in rows.items()}


def chain_lengths(valid):
    """Steps of each chain before its first hole. valid: (chain, step)."""
    return [next((k for k, v in enumerate(row) if not v), len(row)) for row in valid.tolist()]


def e2e_tv_loop(tv, valid):
    """End-to-end TV chain by chain and step by step: a list with None where a chain has no valid step."""
    losses = []
    for row, n in zip(tv, chain_lengths(valid), strict=True):
        survival, expected = 1.0, 0.0
        for k in range(n):
            survival = survival * (1 - row[k])
            expected = expected + survival
        losses.append(1 - expected / n if n else None)
    return losses


def dpace_loop(label_prob, valid, rho):
    """D-PACE weights chain by chain. label_prob: (chain, step)."""
    weights = torch.zeros_like(label_prob)
    for c, n in enumerate(chain_lengths(valid)):
        reach = [math.prod((1 - rho) * float(label_prob[c, j]) + rho for j in range(i + 1)) for i in range(n)]
        for k in range(n):
            weights[c, k] = sum(reach[k:])
    return weights
