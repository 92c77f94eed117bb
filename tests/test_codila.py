"""CoDiLA: the reference vectors, the two theorems on small alphabets, and what must hold for any pair of models."""

import collections
import dataclasses
import itertools
import json
import math
import random
import re
import types

import numpy as np
import pytest
import torch
from conftest import golden, load_backbone
from safetensors.torch import save_file
from torch import nn
from transformers import AutoModelForCausalLM, Qwen2Config, Qwen2ForCausalLM, Qwen3Config, Qwen3ForCausalLM

import codila
import kernels
from codila import Config, Pair, draw_noise, generate, make_training_inputs, training_loss
from common import Decoder, causal, dense, full, segments, walk

CASES, TENSORS, FOLDER = golden("codila")
META = CASES["meta"]
MASK, EOS, VS = META["mask_id"], META["eos_id"], META["shared_vocab"]
TAGS = [META["think_id"], META["end_think_id"]]
PLAIN = dict(mask_id=MASK, eos_id=[EOS, META["im_end_id"]], vocab_len=VS, device="cpu", dtype="float32")
GEN = [case for case in CASES["decode"] if case["mode"] == "static"]  # canvases to decode in other ways
MODES = list(codila.SELECT)


@pytest.fixture(scope="module")
def model():
    return Pair(load_backbone(FOLDER / "model" / "dlm"), load_backbone(FOLDER / "model" / "ar"), TAGS)


def field(case, name):
    return TENSORS[f"{case['name']}.{name}"]


def named(group):
    return pytest.mark.parametrize("case", CASES[group], ids=lambda case: case["name"])


def no_text(model, suppress_ids=()):
    return codila.no_text(model, Config(**PLAIN), "cpu", suppress_ids)


# ------------------------------------------------------------------------------ reference vectors: marginals


@torch.no_grad()
def marginals(model, input_ids):
    """Log-marginals (S, Vs), straight from the definition: full attention, the row before a token predicts it."""
    S = input_ids.shape[1]
    hidden = walk(model.backbone, input_ids, torch.arange(S)[None], dense(full(), 1, S, S))
    raw = model.backbone.lm_head(hidden)[0]
    return torch.cat([raw[:1], raw[:-1]])[:, :VS].float().log_softmax(-1)


@torch.no_grad()
def forced_logits(model, embeds, target, cfg):
    inputs = codila.ar_inputs(model, embeds[None], target[None, :-1], cfg)
    T = inputs.shape[1]
    hidden = walk(model.aux_model, inputs, torch.arange(T)[None], dense(causal(), 1, T, T))
    return inputs[0], codila.shared_logits(model.aux_model.lm_head(hidden[0, -len(target) :]), no_text(model))


@torch.no_grad()
def soft_embed(model, probs, cfg):
    """Of marginals (n, Vs) at masked positions."""
    return codila.soft_embed(model, probs, torch.full(probs.shape[:1], MASK), cfg)


@named("soft")
def test_soft_conditioning(model, case):
    cfg = Config(**PLAIN)
    close = dict(atol=2e-4, rtol=0)
    B, start, target = case["B"], case["block_start"], field(case, "target")
    input_ids, block = field(case, "input_ids"), slice(start, start + B)
    logp = marginals(model, input_ids)
    torch.testing.assert_close(logp, field(case, "dlm_logprobs"), **close)
    _, conf = codila.propose(logp, cfg, None)
    torch.testing.assert_close(-conf, field(case, "entropy").double(), **close)
    embeds = soft_embed(model, logp[block].exp(), cfg)
    torch.testing.assert_close(embeds, field(case, "soft_embeds"), atol=1e-5, rtol=0)
    top2 = soft_embed(model, logp[block].exp(), dataclasses.replace(cfg, topk=2))
    torch.testing.assert_close(top2, field(case, "soft_embeds_top2"), atol=1e-5, rtol=0)
    inputs, logits = forced_logits(model, embeds, target, cfg)
    assert list(range(2 * B + 1)) == case["position_ids"]
    torch.testing.assert_close(inputs, field(case, "ar_inputs"), atol=1e-5, rtol=0)
    torch.testing.assert_close(logits, field(case, "ar_logits"), **close)
    _, bare = forced_logits(model, embeds, target, dataclasses.replace(cfg, envelope=False))
    torch.testing.assert_close(bare, field(case, "ar_logits_no_envelope"), **close)
    pick = torch.arange(B), target
    assert logits.log_softmax(-1)[pick].sum().item() == pytest.approx(case["joint_logprob"], abs=2e-4)
    assert logp[block][pick].sum().item() == pytest.approx(case["independent_logprob"], abs=2e-4)
    # the first token known
    known = input_ids[0].clone()
    known[start] = target[0]
    with torch.no_grad():
        embeds = codila.soft_embed(model, marginals(model, known[None])[block].exp(), known[block], cfg)
    inputs, logits = forced_logits(model, embeds, target, cfg)
    torch.testing.assert_close(inputs, field(case, "ar_inputs_first_known"), atol=1e-5, rtol=0)
    torch.testing.assert_close(logits, field(case, "ar_logits_first_known"), **close)


@named("packing")
def test_packed_blocks(model, case):
    B, n = case["B"], case["n_segments"]
    T = 2 * B + 1
    segment_ids = torch.arange(n).repeat_interleave(T)[None]
    assert torch.equal(dense(segments(segment_ids), 1, n * T, n * T)[0, 0], field(case, "allowed"))
    positions = torch.arange(T).repeat(n)
    assert torch.equal(positions, field(case, "position_ids"))
    rows = torch.cat([torch.arange(B + 1, T) + i * T for i in range(n)])
    assert torch.equal(rows, field(case, "logit_rows"))
    # the same numbers as one row per block
    x = torch.randn(n, T, model.aux_model.config.hidden_size, generator=torch.Generator().manual_seed(0))
    mask = dense(segments(segment_ids), 1, n * T, n * T)
    with torch.no_grad():
        packed = walk(model.aux_model, x.view(1, n * T, -1), positions[None], mask)
        single = walk(model.aux_model, x, torch.arange(T).expand(n, T), dense(causal(), 1, T, T))
    torch.testing.assert_close(packed.view(single.shape), single, atol=1e-5, rtol=0)


# ------------------------------------------------------------------------------- reference vectors: training


def batch_of(input_ids, prompt_lens):
    return [{"prompt_ids": ids[:P], "answer_ids": ids[P:]} for ids, P in zip(input_ids.tolist(), prompt_lens)]


def draws_of(B, length, block_masked, t=None):
    rows = zip(block_masked, t or [1.0] * len(block_masked))
    return [dict(block_size=B, length=length, p_mask=t, block_masked=row, known=[[False] * B] * len(row))
            for row, t in rows]  # fmt: skip


def train_inputs(case, weighting="inverse_t"):
    cfg = Config(**PLAIN, topk=case["topk"] or 0, envelope=case["envelope"], weighting=weighting)
    input_ids, mask = field(case, "input_ids"), field(case, "block_mask")
    block_masked = [mask[r, :n].tolist() for r, n in enumerate(case["n_blocks"])]
    assert not any(mask[r, n:].any() for r, n in enumerate(case["n_blocks"]))
    draws = draws_of(case["B"], input_ids.shape[1], block_masked, case["t"])
    return make_training_inputs(batch_of(input_ids, case["prompt_len"]), draws, cfg), cfg


def places(inputs):
    """Row and column (m, B) of the tokens of all masked blocks."""
    return (inputs["labels"] != -100).nonzero().view(-1, inputs["block_size"][0], 2).unbind(-1)


@named("train")
def test_training_loss_and_gradients(model, case):
    inputs, cfg = train_inputs(case)
    row_idx, pos = places(inputs)
    assert torch.equal(inputs["input_ids"], field(case, "noisy_ids"))
    assert torch.equal(inputs["input_ids"] != field(case, "input_ids"), field(case, "token_mask"))
    assert torch.equal(inputs["labels"][row_idx, pos], field(case, "block_ids"))
    assert torch.equal(row_idx[:, 0], field(case, "block_row"))
    pi = torch.stack([marginals(model, ids[None]) for ids in inputs["input_ids"]]).exp()
    torch.testing.assert_close(pi[row_idx, pos], field(case, "pi"), atol=2e-4, rtol=0)
    nll, nll_alone, _ = codila.block_nll(model, inputs, cfg)
    torch.testing.assert_close(nll.sum(-1), field(case, "block_ce"), atol=2e-4, rtol=0)
    torch.testing.assert_close(nll_alone.sum(-1), field(case, "block_ce_independent"), atol=2e-4, rtol=0)
    expected = case["expected"]
    for weighting in expected["loss"]:
        inputs, cfg = train_inputs(case, weighting)
        weights = inputs["weights"].amax(1) * case["maskable_tokens"]
        for row, weight in enumerate(case["weights"][weighting]):
            assert weights[row].item() == pytest.approx(weight if row in row_idx else 0, rel=1e-6)
        loss, logs = training_loss(model, inputs, cfg)
        assert loss.item() == pytest.approx(expected["loss"][weighting], rel=1e-5)
        assert logs["marginals"].item() == pytest.approx(expected["loss_independent"][weighting], rel=1e-5)
        if weighting == "inverse_t":
            model.zero_grad()
            loss.backward()
            grads = {name: p.grad.norm().item() for name, p in model.aux_model.named_parameters()}  # none is None
            for name, norm in expected["grad_norm_inverse_t"].items():
                assert grads[name] == pytest.approx(norm, rel=1e-3)
            total = math.sqrt(sum(norm**2 for norm in grads.values()))
            assert total == pytest.approx(expected["total_grad_norm_inverse_t"], rel=1e-3)
            wrong = expected["WRONG_embed_grad_norm_if_soft_embeds_detached"]
            assert abs(grads["model.embed_tokens.weight"] / wrong - 1) > 0.02
            assert all(p.grad is None for p in model.backbone.parameters())


def exact_bound(model, case):
    """{block mask: (sum of block CE by the AR model, by the marginals)}, and the bound from it, in nats."""
    ids, B, N = field(case, "input_ids"), case["B"], case["n_blocks"]
    cfg = Config(**PLAIN)
    table, bound = {}, np.zeros(2)
    batch = batch_of(ids, [case["prompt_len"]])
    for masked in itertools.product([False, True], repeat=N):
        if any(masked):
            inputs = make_training_inputs(batch, draws_of(B, ids.shape[1], [list(masked)]), cfg)
            with torch.no_grad():
                nll, alone, _ = codila.block_nll(model, inputs, cfg)
            ce = nll.sum().item(), alone.sum().item()
            table["".join("01"[m] for m in masked)] = ce
            bound += np.array(ce) / (sum(masked) * math.comb(N, sum(masked)))
    return table, bound


@named("nelbo_exact")
def test_exact_bound_of_the_models(model, case):
    table, bound = exact_bound(model, case)
    assert table.keys() == case["sum_ce_by_mask"].keys()
    for key, ce in table.items():
        assert ce == pytest.approx(case["sum_ce_by_mask"][key], abs=1e-3)
    assert bound[0] == pytest.approx(case["nelbo_nats"], abs=1e-3)
    assert bound[1] == pytest.approx(case["nelbo_independent_nats"], abs=1e-3)
    assert bound[0] / (case["B"] * case["n_blocks"]) == pytest.approx(case["nelbo_nats_per_token"], abs=1e-4)
    assert bound[0] < bound[1]  # a trained local AR model is below the token-independent bound


@pytest.mark.parametrize("weighting", ["count", "inverse_t"])
@named("nelbo_exact")
def test_the_expected_loss_is_the_bound(monkeypatch, case, weighting):
    """Draws and weights only: the cross-entropies come from the table of the vectors."""
    ids, B, N, P = field(case, "input_ids"), case["B"], case["n_blocks"], case["prompt_len"]
    cfg = Config(**PLAIN, weighting=weighting, block_sizes=str(B))
    monkeypatch.setattr(codila, "padded_len", lambda *_: ids.shape[1])
    batch, generator = batch_of(ids, [P]), torch.Generator().manual_seed(1)
    total, n = 0.0, 2000
    for _ in range(n):
        draws = draw_noise(batch, cfg, generator)
        weights = make_training_inputs(batch, draws, cfg)["weights"]
        if any(draws[0]["block_masked"]):
            key = "".join("01"[m] for m in draws[0]["block_masked"])
            total += weights.max().item() * N * B * case["sum_ce_by_mask"][key][0]
    assert total / n == pytest.approx(case["nelbo_nats"], rel=0.05)


# ------------------------------------------------------------------------------- reference vectors: decoding


def decode(model, case, **changes):
    """(ids, record) of a case's canvas; changes: of the settings, or stop_ids, suppress_ids, canvas."""
    case = case | {name: changes.pop(name) for name in ("stop_ids", "suppress_ids", "canvas") if name in changes}
    s = case["settings"]
    names = {"B": "block_size", "K": "tokens_per_step"}
    given = {names.get(name, name): value for name, value in s.items() if value is not None}
    given |= dict(mode=case["mode"], window=s["window"] or 0, eos_id=case["stop_ids"] or None)
    ids = torch.tensor([case["canvas"]])
    P = case["origin"]
    cfg = Config(**PLAIN | given | changes)
    seq_ids, record = generate(model, ids[:, :P], cfg, None, None, ids[:, P:], case["suppress_ids"])
    return seq_ids[0].tolist(), record


@named("decode")
def test_decoding(model, case):
    ids, record = decode(model, case)
    expected = case["expected"]
    assert case["fill_id"] == EOS
    assert ids == expected["ids"]
    assert (record["forwards"], record["aux_forwards"]) == (expected["steps"], expected["ar_forwards"])
    assert record["trace"] == expected["trace"]
    # every mask was fixed in some round, nothing else was touched
    masked = [token == MASK for token in case["canvas"][case["origin"] :]]
    assert [turn >= 0 for turn in record["fixed_round"]] == masked
    assert set(record["fixed_round"]) - {-1} <= set(range(record["rounds"]))
    for before, after, is_masked in zip(case["canvas"][case["origin"] :], ids[case["origin"] :], masked):
        assert is_masked or before == after or case["stop_ids"]
    assert ids[: case["origin"]] == case["canvas"][: case["origin"]]


# --------------------------------------------------------------------------------------------------------- the theorems


def entropy(p):
    p = np.asarray(p, dtype=np.float64).ravel()
    return float(-(p[p > 0] * np.log(p[p > 0])).sum())


def noise_pairs(q0, V, L, keep_prev, keep):
    """{x_t: {x_{t-1}: probability}} of two neighbouring times of absorbing noise per token; V stands for the mask."""
    pairs = collections.defaultdict(lambda: collections.defaultdict(float))
    for x0, p0 in zip(itertools.product(range(V), repeat=L), q0):
        for prev in itertools.product([True, False], repeat=L):
            p_prev = p0 * math.prod(keep_prev if k else 1 - keep_prev for k in prev)
            if p_prev > 0:
                x_prev = tuple(x if k else V for x, k in zip(x0, prev))
                alive = [j for j in range(L) if prev[j]]
                for now in itertools.product([True, False], repeat=len(alive)):
                    p = p_prev * math.prod(keep if k else 1 - keep for k in now)
                    if p > 0:
                        x_t = list(x_prev)
                        for j, k in zip(alive, now):
                            x_t[j] = x_t[j] if k else V
                        pairs[tuple(x_t)][x_prev] += p
    return pairs


def block_marginals(row, L, B):
    """Of the weights {x: p}: per block of B, {block of x: p}."""
    blocks = [collections.defaultdict(float) for _ in range(L // B)]
    for x, p in row.items():
        for i, block in enumerate(blocks):
            block[x[i * B : i * B + B]] += p
    return blocks


def token_noise_bounds(q0, V, L, B, alpha):
    """Bounds of the best reverse models that factorise over tokens and over blocks; the sum of TC(b_{t-1} | x_t)."""
    bounds, total_correlation = {1: 0.0, B: 0.0}, 0.0
    for before, now in zip(alpha, alpha[1:]):
        r = (before - now) / (1 - now)
        pairs = noise_pairs(q0, V, L, before, now / before)
        for x_t, row in pairs.items():
            mass = sum(row.values())
            for size in bounds:  # cross-entropy of the factorised optimum with the truth
                parts = block_marginals(row, L, size)
                bounds[size] -= sum(
                    p * sum(math.log(part[x[i * size : i * size + size]] / mass) for i, part in enumerate(parts))
                    for x, p in row.items()
                )
            joint = [entropy(np.array([*part.values()]) / mass) for part in block_marginals(row, L, B)]
            alone = [entropy(np.array([*part.values()]) / mass) for part in block_marginals(row, L, 1)]
            total_correlation += mass * (sum(alone) - sum(joint))
        for size in bounds:  # minus E H[x_{t-1} | x_t, x_0]
            bounds[size] -= L * (1 - now) * entropy([r, 1 - r])
    return bounds, total_correlation


def conditional(q0, keep, seen=()):
    """H(x_keep | x_seen) of q0, one axis a token."""

    def h(axes):
        return entropy(q0.sum(axis=tuple(j for j in range(q0.ndim) if j not in axes)))

    return h([*keep, *seen]) - h(seen)


def block_noise_bounds(q0, L, B, alpha):
    """The cross-entropy form under block noise: of the block model, and of the token-independent one."""
    joint = alone = 0.0
    for before, now in zip(alpha, alpha[1:]):
        for masked in itertools.product([True, False], repeat=L // B):
            weight = (before - now) / (1 - now) * math.prod(1 - now if m else now for m in masked)
            seen = [j for j in range(L) if not masked[j // B]]
            for i in (i for i in range(L // B) if masked[i] and weight > 0):
                block = range(i * B, i * B + B)
                joint += weight * conditional(q0, block, seen)
                alone += weight * sum(conditional(q0, [j], seen) for j in block)
    return joint, alone


@named("theory")
def test_theorem_3_2(case):
    """NELBO_1 - NELBO_B = sum_t E sum_i TC(b^i_{t-1} | x_t) >= 0, and the cross-entropy form under block noise."""
    q0, V, L, B, alpha = field(case, "q0").numpy(), case["V"], case["L"], case["B"], case["alpha"]
    assert alpha[0] == 1 and alpha[-1] == 0 and len(alpha) == case["T"] + 1
    bounds, tc = token_noise_bounds(q0, V, L, B, alpha)
    got = dict(nelbo_token=bounds[1], nelbo_block=bounds[B], gap=bounds[1] - bounds[B], sum_total_correlation_x_prev=tc)
    assert got == pytest.approx({key: case["token_noise"][key] for key in got}, abs=1e-9)
    assert bounds[1] - bounds[B] == pytest.approx(tc, abs=1e-12) and tc >= 0
    assert entropy(q0) == pytest.approx(case["entropy_x0"], abs=1e-9)
    assert bounds[1] >= bounds[B] - 1e-12 and bounds[B] >= entropy(q0) - 1e-12
    axes = q0.reshape([V] * L)
    blocks = [range(start, start + B) for start in range(0, L, B)]
    tc0 = sum(conditional(axes, [j]) for j in range(L)) - sum(conditional(axes, block) for block in blocks)
    assert tc0 == pytest.approx(case["sum_block_total_correlation_x0"], abs=1e-9)
    if case["T"] == 1:
        assert bounds[1] - bounds[B] == pytest.approx(tc0, abs=1e-9)
    if B == L:
        assert bounds[B] == pytest.approx(entropy(q0), abs=1e-9)
    joint, alone = block_noise_bounds(axes, L, B, alpha)
    got = dict(nelbo_block=joint, ce_token_independent=alone, gap=alone - joint,
               weighted_total_correlation_x0=alone - joint)  # fmt: skip
    assert got == pytest.approx({key: case["block_noise"][key] for key in got}, abs=1e-9)
    # a block is one absorbing symbol over V^B: the KL definition gives the same bound
    assert token_noise_bounds(q0, V**B, L // B, 1, alpha)[0][1] == pytest.approx(joint, abs=1e-9)


def test_incoherence_is_the_price_of_few_steps():
    q0 = np.random.default_rng(0).dirichlet([0.1] * 16)
    gaps = []
    for T in (1, 2, 4, 8):
        bounds, _ = token_noise_bounds(q0, 2, 4, 2, [1 - t / T for t in range(T + 1)])
        gaps.append(bounds[1] - bounds[2])
    assert all(0 < b < 0.7 * a for a, b in zip(gaps, gaps[1:]))


@pytest.mark.parametrize("case", CASES["theory_topk"], ids=lambda case: "collision" if "collision" in case else "topk")
def test_theorem_3_3(case):
    """Whole marginals lose nothing; the product of top-k sets may lose the mode, and top-1 sets mix what differs."""
    near = dict(abs=1e-9)
    if "collision" in case:
        q_a, q_b = np.array(case["q_a"]), np.array(case["q_b"])
        for axis in (0, 1):
            assert q_a.sum(axis).argmax() == q_b.sum(axis).argmax()  # the same input for a top-1-conditioned model
        mixture = (q_a + q_b) / 2
        excess = entropy(mixture) - (entropy(q_a) + entropy(q_b)) / 2  # the best predictor is the mixture
        assert excess == pytest.approx(case["excess_nats_top1"], **near) and excess > 0
        assert not np.allclose(q_a.sum(1), q_b.sum(1))  # a softly conditioned one can tell them apart
        assert case["excess_nats_soft"] == 0
        return
    q, k = np.array(case["q"]), case["k"]
    both = [q.sum(1), q.sum(0)]
    np.testing.assert_allclose(both, case["marginals"], atol=1e-9)
    top = [sorted(np.argsort(-p, kind="stable")[:k].tolist()) for p in both]
    assert top == case["topk_sets"]
    cut = [np.where(np.isin(np.arange(len(p)), s), p, 0) for p, s in zip(both, top)]
    np.testing.assert_allclose([p / p.sum() for p in cut], case["truncated_marginals"], atol=1e-9)
    mode = list(np.unravel_index(q.argmax(), q.shape))
    assert mode == case["mode"] and q.max() == pytest.approx(case["mode_prob"], **near)
    assert (mode[0] not in top[0] or mode[1] not in top[1]) == case["mode_excluded"]
    inside = q[np.ix_(*top)].sum()
    assert inside == pytest.approx(case["mass_inside"], **near)
    assert 1 - inside == pytest.approx(case["tv_lower_bound"], **near)
    # no model on the product of the sets comes nearer than that: the best one is q itself, cut and renormalised
    best = np.zeros_like(q)
    best[np.ix_(*top)] = q[np.ix_(*top)] / inside
    assert np.abs(q - best).sum() / 2 >= case["tv_lower_bound"] - 1e-12
    assert sum(map(entropy, both)) - entropy(q) == pytest.approx(case["total_correlation"], **near)
    alone = [int(p.argmax()) for p in both]
    assert alone == case["independent_mode"]
    assert q[tuple(alone)] == pytest.approx(case["prob_of_independent_mode"], **near)
    # left to right with whole marginals: some AR model reproduces q
    first, then = q.sum(1, keepdims=True), q / np.maximum(q.sum(1, keepdims=True), 1e-300)
    np.testing.assert_allclose(first * then, q, atol=1e-15)


# ----------------------------------------------------------------------------------------- soft conditioning


def test_one_hot_marginals_are_plain_embeddings(model):
    ids = torch.arange(VS)
    for topk in (0, 1, VS):
        embeds = soft_embed(model, nn.functional.one_hot(ids).float(), Config(**PLAIN, topk=topk))
        assert torch.equal(embeds, model.aux_model.model.embed_tokens(ids))


def random_block(known, seed=0):
    """Arbitrary marginals of a block and its tokens on the canvas; True in known: the token is there."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(VS, (len(known),), generator=generator)
    probs = (3 * torch.randn(len(known), VS, generator=generator)).softmax(-1)
    return probs, ids.masked_fill(~torch.tensor(known), MASK)


@pytest.mark.parametrize("known", [[False] * 4, [True, False, False, True, False], [False], [False, True] * 4])
@torch.no_grad()
def test_cached_writing_equals_recomputing(model, known):
    cfg, b = Config(**PLAIN), len(known)
    probs, token_ids = random_block(known)
    aux, again, banned = Decoder(model.aux_model, 2 * b + 1), token_ids.clone(), no_text(model)
    written = codila.write_block(model, aux, probs, token_ids, b - 1, cfg, banned, None)
    assert aux.forwards == b and torch.equal(token_ids, again)
    embeds = torch.where(torch.tensor(known)[:, None], model.aux_model.model.embed_tokens(written),
                         soft_embed(model, probs, cfg))  # fmt: skip
    for j in range(b):
        _, logits = forced_logits(model, embeds, again.masked_fill(again == MASK, 0), cfg)
        again[j] = again[j] if known[j] else logits[j].argmax()
    assert torch.equal(written, again)
    padded = Decoder(model.aux_model, 2 * b + 1)
    padded.replay.pad = True  # as a captured graph would, on the CPU
    assert torch.equal(codila.write_block(model, padded, probs, token_ids, b - 1, cfg, banned, None), written)


@pytest.mark.parametrize("suppress_ids", [(), tuple(range(0, VS, 2))])
@torch.no_grad()
def test_a_block_knows_nothing_of_its_neighbours(model, suppress_ids):
    """The AR model reads a block's marginals only, alone or packed with others; it agrees with its own writing."""
    cfg, banned = Config(**PLAIN, block_size=4), no_text(model, suppress_ids)
    # the last of them is cut short, as at the end of a canvas: it can only stand last
    blocks = [random_block([False] * (4 if seed < 4 else 3), seed) for seed in range(5)]
    drafts = torch.randint(VS, (5, 4), generator=torch.Generator().manual_seed(5))

    def own_choice(n):
        last = len(blocks[n][1]) - 1
        return codila.write_block(model, Decoder(model.aux_model, 9), *blocks[n], last, cfg, banned, None)

    def verdict(order):
        """Where the AR model disagrees, per block, when the blocks stand in this order."""
        probs, token_ids = (torch.cat(column) for column in zip(*(blocks[n] for n in order)))
        own = torch.cat([own_choice(n) if n % 2 else drafts[n, : len(blocks[n][1])] for n in order])
        aux = Decoder(model.aux_model, 9 * len(order))
        no = codila.review(model, aux, probs, token_ids, own, cfg, banned) != own
        assert aux.forwards == 1
        return dict(zip(order, (part.tolist() for part in no.split(4))))

    alone = {n: verdict([n])[n] for n in range(5)}
    assert not any(map(any, (alone[1], alone[3]))) and any(map(any, (alone[0], alone[2], alone[4])))
    for order in ([0, 1, 2, 3, 4], [2, 0, 4], [3, 0, 1]):
        assert verdict(order) == {n: alone[n] for n in order}


# -------------------------------------------------------------------------------------------------- decoding


def free(case, length=None, **changes):
    """A canvas of a reference case without stop ids, cut to `length` masks after its prompt."""
    P = case["origin"]
    return dict(canvas=case["canvas"][:P] + [MASK] * (length or len(case["canvas"]) - P), stop_ids=[], **changes)


@pytest.mark.parametrize("case", GEN, ids=lambda case: case["name"])
def test_limits_of_the_schedules(model, case):
    # nothing passes: one token of the diffusion LM a step
    one, record = decode(model, case, mode="dynamic", tau=-1.0)
    want, other = decode(model, case, mode="tokens", tokens_per_step=1)
    assert one == want and record["forwards"] == other["forwards"] and record["aux_forwards"] == 0
    # everything passes: whole blocks, the most certain first
    B = case["settings"]["B"]
    if B > 1:
        every = decode(model, case, **free(case, 4 * B, mode="dynamic", tau=1e9))
        whole = decode(model, case, **free(case, 4 * B, mode="static", blocks_per_step=1))
        assert every[0] == whole[0] and every[1]["trace"] == whole[1]["trace"]
        assert every[1]["forwards"] == 4
    for conf in ("entropy", "maxprob"):
        # a veto that costs nothing
        vetoed, record = decode(model, case, mode="verify", lam=0.0, conf=conf, tokens_per_step=2)
        plain, other = decode(model, case, mode="tokens", conf=conf, tokens_per_step=2)
        assert vetoed == plain and record["forwards"] == other["forwards"] == record["aux_forwards"]
        # by default a draft that both models want goes before any other
        one, other = (decode(model, case, mode="verify", conf=conf, **lam) for lam in ({}, {"lam": 1e6}))
        assert one == other
        assert all(index < len(one[0]) - case["origin"] for _, index, _ in one[1]["rejected"])


@pytest.mark.parametrize("case", GEN, ids=lambda case: case["name"])
def test_two_blocks_of_4_cost_what_one_of_8_costs(model, case):
    two = decode(model, case, **free(case, 24, block_size=4, blocks_per_step=2, window=0))[1]
    one = decode(model, case, **free(case, 24, block_size=8, blocks_per_step=1, window=0))[1]
    assert two["forwards"] == one["forwards"] == 3


@pytest.mark.parametrize("mode", MODES)
def test_infilling_with_an_empty_suffix_is_generation(model, mode):
    case, suppress = GEN[0], [EOS, META["im_end_id"]]
    ids = torch.tensor([case["canvas"]])
    P, S = case["origin"], ids.shape[1]
    cfg = Config(**PLAIN | dict(eos_id=None, mode=mode, tau=0.8, max_new_tokens=S - P))
    a, _ = generate(model, ids[:, :P], cfg, None, None, torch.full((1, S - P), MASK), suppress)
    b, _ = generate(model, ids[:, :P], cfg, suppress_ids=suppress)
    assert torch.equal(a, b) and not set(suppress) & set(a[0, P:].tolist())


SETTINGS = {"max_new_tokens", "mode", "block_size", "blocks_per_step", "tokens_per_step", "tau", "window", "conf", "lam",
            "envelope", "topk", "temperature", "mask_id", "eos_id", "vocab_len"}  # fmt: skip


@pytest.mark.parametrize("mode", MODES)
def test_generate_reads_settings_of_decoding_alone_and_writes_the_whole_budget(model, mode):
    named = re.search(r"Of cfg: ([\w,\s]+)\.", generate.__doc__)[1]
    assert set(re.findall(r"\w+", named)) == SETTINGS
    whole = Config(**PLAIN | dict(eos_id=None, mode=mode, max_new_tokens=13, tau=1.0))
    cfg = types.SimpleNamespace(**{name: getattr(whole, name) for name in SETTINGS})
    prompt_ids = torch.tensor([GEN[0]["canvas"][: GEN[0]["origin"]]])
    P = prompt_ids.shape[1]
    ids, record = generate(model, prompt_ids, cfg)  # no EOS ends it: the text has two
    assert ids.shape[1] == P + 13 and len(record["fixed_round"]) == 13 and MASK not in ids[0]
    new = ids[0, P:].tolist()
    for eos_id in (new[5], [EOS, new[5]], [new[5], new[8]]):
        cfg.eos_id = eos_id
        found = generate(model, prompt_ids, cfg)[0][0, P:].tolist()
        ends = [i for i, token in enumerate(found) if token in ([eos_id] if type(eos_id) is int else eos_id)]
        padding = eos_id if type(eos_id) is int else eos_id[0]
        assert len(found) == 13 and ends and set(found[ends[0] + 1 :]) <= {padding}


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("temperature", [0.0, 3.0])
def test_every_round_writes_masks_and_nothing_else(model, monkeypatch, mode, temperature):
    """Masks get strictly fewer, all else stays, every forward is counted; every id is one of both models."""
    rng, seen, calls = random.Random(3), [], [0]
    candidates, forward = codila.candidates, Decoder.forward

    def spy(ids, *args):
        seen.append(ids.tolist())
        return candidates(ids, *args)

    def count(self, *args):
        calls[0] += self.backbone is model.backbone
        return forward(self, *args)

    monkeypatch.setattr(codila, "candidates", spy)
    monkeypatch.setattr(Decoder, "forward", count)
    for number in range(6):
        B, P, R = rng.randint(1, 6), rng.randint(0, 5), rng.randint(1, 21)
        prompt_ids = torch.tensor([[rng.randrange(VS) for _ in range(P)]], dtype=torch.int64)
        canvas = [rng.choice([MASK] * 3 + [rng.randrange(EOS)]) for _ in range(R)]
        stops = [EOS, 7, 8] if number % 2 else None
        cfg = Config(**PLAIN | dict(eos_id=stops, mode=mode, block_size=B, window=rng.choice([0, 1, 3]), tau=1.0,
                                    temperature=temperature, blocks_per_step=rng.choice([1, 2])))  # fmt: skip
        seen.clear()
        calls[0] = 0
        generator = torch.Generator().manual_seed(number)
        ids, record = generate(model, prompt_ids, cfg, None, generator, torch.tensor([canvas]))
        ids = ids[0].tolist()
        assert record["forwards"] == calls[0] == record["rounds"] == len(seen) - 1 <= canvas.count(MASK)
        for before, after in zip(seen, seen[1:]):
            assert all(a == b or a == MASK for a, b in zip(before, after))
            assert after.count(MASK) < before.count(MASK)
        assert ids[:P] == prompt_ids[0].tolist() and len(ids) == P + R and MASK not in ids
        assert all(i < VS for i in ids)
        end = next((j for j, i in enumerate(ids) if j >= P and i in (stops or ())), len(ids))
        assert set(ids[end + 1 :]) <= {EOS}
        for j, token in enumerate(canvas[: max(end - P, 0)]):
            assert token in (MASK, ids[P + j])


def test_one_prompt_after_another_on_one_decoder(model):
    cfg = Config(**PLAIN, max_new_tokens=12, mode="dynamic", tau=1.0)
    prompts = [torch.tensor([case["canvas"][: case["origin"]]]) for case in GEN[:3]]
    decoder = Decoder(model.backbone, 40), Decoder(model.aux_model, 99)
    for prompt_ids in prompts + prompts[:1]:
        ids, record = generate(model, prompt_ids, cfg, decoder)
        alone, other = generate(model, prompt_ids, cfg)
        assert torch.equal(ids, alone) and record == other
    with pytest.raises(ValueError, match="one prompt"):
        generate(model, prompts[0].expand(2, -1), cfg)


class Shifted:
    """A diffusion LM that is sure of token 10 + p at position p, as Dream says it: in the row before."""

    def __init__(self):
        self.forwards = 0
        self.kv_cache = kernels.KVCache(1, 1, 1, 512, 8, "cpu", torch.float32)

    def reset(self):
        return self

    def __call__(self, input_ids, position_ids, attn_mask, write_idx):
        S = input_ids.shape[1]
        assert attn_mask.all() and torch.equal(position_ids[0], torch.arange(S))
        self.forwards += 1
        logits = torch.zeros(1, S, META["dlm_vocab"])
        logits[0, torch.arange(S), 11 + torch.arange(S)] = 30.0
        logits[0, :, MASK] = 60.0  # and it loves what it must not say
        return logits


@pytest.mark.parametrize("mode", ["tokens", "indep", "dynamic"])
def test_the_row_before_predicts(model, mode):
    cfg = Config(**PLAIN, mode=mode, max_new_tokens=9, tau=-1.0)
    backbone = types.SimpleNamespace(lm_head=lambda hidden: hidden)
    pair = types.SimpleNamespace(backbone=backbone, aux_model=model.aux_model, tag_ids=TAGS)
    ids, _ = generate(pair, torch.tensor([[1, 2, 3]]), cfg, (Shifted(), Decoder(model.aux_model, 99)))
    assert ids[0].tolist() == [1, 2, 3] + list(range(13, 22))


def grid(*rows):
    """(is_open, conf) of blocks: a number is the entropy of a place where something may be written."""
    is_open = torch.tensor([[h is not None for h in row] for row in rows])
    return is_open, -torch.tensor([[h or 0.0 for h in row] for row in rows], dtype=torch.float64)


def test_the_longest_prefix_is_searched_to_its_end():
    """Running means of block 0: 0.4, 0.55, 0.5; only its second is above tau."""

    def prefix(*rows):
        (idx,) = codila.select_prefix(*grid(*rows), Config(tau=0.5, block_size=len(rows[0])))
        return idx.tolist()

    assert prefix([0.4, 0.7, 0.4], [0.1, 0.2, 9.0]) == [0, 1, 2]
    assert prefix([0.4, 0.7, None], [0.1, 0.2, 9.0]) == [3, 4]
    assert prefix([None, 0.7, 9.0], [0.4, None, None]) == [3]
    assert prefix([None, 0.1, 9.0], [0.2, None, 0.3]) == [3, 5]
    # a prefix of one token is none: the most certain position of all, wherever it stands
    assert prefix([0.4, 0.7, None], [9.0, None, 0.1]) == [5]
    assert prefix([0.6, 0.9, None], [None, 0.6, 0.7]) == [0]  # ties: lowest index
    assert prefix([0.25, 0.25], [0.25, 0.25]) == [0, 1]
    assert prefix([9.0, 0.25], [0.5, 0.5], [0.1, 0.3]) == [4, 5]  # of two of one length the more certain one


def test_blocks_and_tokens_are_chosen_by_certainty():
    """Known tokens do not count as certain ones; ties go to the lowest index, also in what is chosen together."""

    def blocks(n, *rows):
        cfg = Config(block_size=len(rows[0]), blocks_per_step=n)
        return [idx.tolist() for idx in codila.select_blocks(*grid(*rows), cfg)]

    assert blocks(1, [0.3, 0.3], [None, 0.5], [None, None]) == [[0, 1]]
    assert blocks(1, [0.25, 0.25], [0.25, 0.25]) == [[0, 1]]
    assert blocks(2, [0.5, 0.5], [None, None], [None, 0.25], [0.1, 0.9]) == [[5], [0, 1]]
    assert blocks(3, [None, 0.5], [None, None]) == [[1]]
    for K, want in ((2, [1, 2]), (1, [1]), (3, [0, 1, 2]), (9, [0, 1, 2, 4])):
        (idx,) = codila.select_tokens(*grid([-0.5, -1.0], [-1.0, None], [0.0, None]), Config(tokens_per_step=K))
        assert idx.tolist() == want


def test_candidates_end_at_a_stop_and_at_the_window():
    m = MASK

    def found(ids, P, eos_id, window=2):
        cfg = types.SimpleNamespace(mask_id=MASK, block_size=2, window=window, eos_id=eos_id)
        span = codila.candidates(torch.tensor(ids), P, cfg)
        return span and (span[0], [i + span[0] for i in span[1].flatten().nonzero()[:, 0].tolist()])

    ids = [1, m, m, 5, m, m, m, m, m]
    assert found(ids, 1, None) == (1, [1, 2, 4])
    assert found(ids, 3, None) == (3, [4, 5, 6])
    assert found(ids, 1, [5]) == found(ids, 1, 5) == (1, [1, 2])
    assert found([5, m, 5], 1, 5) == (1, [1])  # the prompt may hold a stop token
    assert found([1, 2, 3, 4, m, m], 1, None) == (3, [4, 5])  # from the first block with something open
    assert found([1, 2, 3], 1, None) is found([1, 5, m], 1, 5) is found([1], 1, None) is None
    assert found(ids, 1, None, window=0) == (1, [1, 2, 4, 5, 6, 7, 8])


def test_drawing_follows_the_softmax():
    logits, n = torch.tensor([[1.0, 0.0, 2.0, -torch.inf, -1.0]]), 20000
    cfg = Config(temperature=0.7)
    draws = codila.choose(logits.expand(n, -1), cfg, torch.Generator().manual_seed(0))
    share = draws.bincount(minlength=5) / n
    torch.testing.assert_close(share, (logits[0] / 0.7).softmax(-1), atol=0.012, rtol=0)
    again, conf = codila.propose(logits.expand(n, -1), cfg, torch.Generator().manual_seed(0))
    assert torch.equal(again, draws)
    p = logits[0].softmax(-1)  # at temperature 1
    assert conf[0].item() == pytest.approx(-torch.special.entr(p).sum().item(), abs=1e-6)
    cfg = dataclasses.replace(cfg, mode="tokens", conf="maxprob", temperature=0.0)
    ids, conf = codila.propose(logits, cfg, None)  # greedy: without a draw
    assert ids.item() == 2 and conf.item() == pytest.approx(p.max().item(), abs=1e-6)


def test_a_known_token_that_only_one_model_has_is_refused(model):
    with pytest.raises(ValueError, match="both models"):
        generate(model, torch.tensor([[1]]), Config(**PLAIN), canvas_ids=torch.tensor([[MASK, VS]]))
    batch = [{"prompt_ids": [1], "answer_ids": [2, VS, 3, EOS]}]
    with pytest.raises(ValueError, match=f"token {VS} "):
        make_training_inputs(batch, draws_of(2, 5, [[True, True]]), Config(**PLAIN))


# -------------------------------------------------------------------------------------------------- training


@pytest.mark.parametrize("weighting", ["count", "inverse_t", "uniform"])
def test_noise_masks_whole_blocks_after_the_prompt(weighting):
    cfg = Config(**PLAIN, block_sizes="2,3,8", max_pad=9, weighting=weighting)
    batch = [{"prompt_ids": [1] * P, "answer_ids": [2] * A + [EOS]} for P, A in ((3, 14), (9, 0), (1, 30))]
    found = set()
    for seed in range(60):
        draws = draw_noise(batch, cfg, torch.Generator().manual_seed(seed))
        inputs = make_training_inputs(batch, draws, cfg)
        B, S = draws[0]["block_size"], inputs["input_ids"].shape[1]
        assert S % 8 == 0 and 32 <= S <= 48 and (inputs["block_size"] == B).all()
        found.add(B)
        for r, (row, draw) in enumerate(zip(batch, draws)):
            P, masked = len(row["prompt_ids"]), inputs["input_ids"][r] == MASK
            N = len(draw["block_masked"])
            assert N == (S - P) // B and not masked[:P].any() and not masked[P + N * B :].any()
            blocks = masked[P : P + N * B].view(N, B)
            assert torch.equal(blocks.any(1), blocks.all(1)) and blocks.all(1).tolist() == draw["block_masked"]
            assert 0 < draw["p_mask"] <= 1 and (weighting != "count" or masked.any())
            clean = torch.tensor((row["prompt_ids"] + row["answer_ids"] + [EOS] * S)[:S])
            assert torch.equal(inputs["input_ids"][r][~masked], clean[~masked])
            assert torch.equal(inputs["labels"][r], clean.masked_fill(~masked, -100))
            assert torch.equal(inputs["weights"][r] > 0, masked)
    assert found == {2, 3, 8}
    again = [draw_noise(batch, cfg, torch.Generator().manual_seed(4)) for _ in range(2)]
    assert again[0] == again[1]


def test_partial_blocks(model):
    """Known tokens of a masked block are seen, forced and not counted; the loss is that of the rest."""
    cfg = Config(**PLAIN, p_partial=1.0, weighting="uniform")
    case = CASES["train"][0]
    input_ids, P = field(case, "input_ids")[:1], case["prompt_len"][0]
    batch = batch_of(input_ids, [P])
    assert any(map(any, draw_noise(batch, cfg, torch.Generator().manual_seed(1))[0]["known"]))
    N = (input_ids.shape[1] - P) // 4
    draws = draws_of(4, input_ids.shape[1], [[True, False, True] + [False] * (N - 3)])
    draws[0]["known"] = [[True, False, True, False]] + [[False] * 4] * (N - 1)
    inputs = make_training_inputs(batch, draws, cfg)
    noisy = input_ids[0].clone()
    noisy[[P + 1, P + 3, *range(P + 8, P + 12)]] = MASK
    assert torch.equal(inputs["input_ids"][0], noisy)
    row_idx, pos = places(inputs)
    assert pos.tolist() == [list(range(P, P + 4)), list(range(P + 8, P + 12))]
    assert (inputs["weights"][row_idx, pos] > 0).tolist() == [[False, True, False, True], [True] * 4]
    with torch.no_grad():
        nll, _, _ = codila.block_nll(model, inputs, cfg)
        embeds = soft_embed(model, marginals(model, noisy[None]).exp(), cfg)[P : P + 4]
        for j in (0, 2):
            embeds[j] = model.aux_model.model.embed_tokens(input_ids[0, P + j])
    _, logits = forced_logits(model, embeds, input_ids[0, P : P + 4], cfg)
    want = -logits.log_softmax(-1)[torch.arange(4), input_ids[0, P : P + 4]]
    torch.testing.assert_close(nll[0], want, atol=1e-5, rtol=0)
    loss, _ = training_loss(model, inputs, cfg)
    assert loss.item() == pytest.approx((want[[1, 3]].sum() + nll[1].sum()).item() / (4 * N), rel=1e-5)


def test_a_row_or_batch_without_masked_blocks_counts_0(model):
    cfg = Config(**PLAIN)
    batch = [{"prompt_ids": [1, 2], "answer_ids": [3, 4, 5, EOS]} for _ in range(2)]
    one = make_training_inputs(batch, draws_of(2, 6, [[True, False], [False, False]]), cfg)
    assert training_loss(model, one, cfg)[0].item() > 0
    none = make_training_inputs(batch, draws_of(2, 6, [[False, False], [False, False]]), cfg)
    for inputs in (none, {key: value[1:] for key, value in one.items()}):
        model.zero_grad()
        loss, logs = training_loss(model, inputs, cfg)
        loss.backward()
        assert loss.item() == logs["marginals"].item() == 0
        assert not any(p.grad.any() for p in model.aux_model.parameters())  # zeros, not None: ranks do the same


def test_blocks_that_only_pad_the_shape_change_nothing(model, monkeypatch):
    """On CUDA the number of blocks is a multiple of 128."""
    inputs, cfg = train_inputs(CASES["train"][0])
    results = []
    for pad in (lambda n, device: n, lambda n, device: -(-n // 128) * 128):
        monkeypatch.setattr(codila, "padded_len", pad)
        model.zero_grad()
        loss, _ = training_loss(model, inputs, cfg)
        loss.backward()
        results.append((loss.item(), model.aux_model.model.embed_tokens.weight.grad.clone()))
    assert len(codila.block_nll(model, inputs, cfg)[0]) == 128
    assert results[0][0] == pytest.approx(results[1][0], rel=1e-6)
    torch.testing.assert_close(results[0][1], results[1][1], atol=1e-6, rtol=1e-5)


@torch.no_grad()
def test_slices_of_a_batch_add_up_to_it(model):
    cfg = Config(**PLAIN, p_partial=0.5)
    lengths = ((3, 9), (5, 4), (1, 7), (2, 2))
    batch = [{"prompt_ids": [1] * P, "answer_ids": [9] * A + [EOS]} for P, A in lengths]
    inputs = make_training_inputs(batch, draw_noise(batch, cfg, torch.Generator().manual_seed(0)), cfg)
    assert len({len(value) for value in inputs.values()}) == 1
    whole = training_loss(model, inputs, cfg)[0]
    parts = [training_loss(model, {k: v[i::3] for k, v in inputs.items()}, cfg)[0] for i in range(3)]
    assert whole.item() == pytest.approx(sum(parts).item(), rel=1e-5)


def test_only_the_local_model_learns_and_it_overfits_one_batch():
    cfg = Config(**codila.TINY | dict(device="cpu", dtype="float32", block_sizes="4", p_partial=0.0))
    model, tokenizer, _ = codila.load_pair(cfg.aux, cfg, torch.float32)
    before = {name: p.clone() for name, p in model.named_parameters()}
    rows = [codila.encode(tokenizer, messages, answer) for messages, answer, _ in codila.read_data(cfg.test)[:2]]
    inputs = make_training_inputs(rows, draw_noise(rows, cfg, torch.Generator().manual_seed(0)), cfg)
    # the tags are rows of the AR model alone
    assert codila.no_text(model, cfg, "cpu").nonzero()[:, 0].tolist() == [cfg.mask_id]
    learnt = [p for p in model.parameters() if p.requires_grad]
    assert len(learnt) == len([*model.aux_model.parameters()])
    optimizer, losses = torch.optim.AdamW(learnt, 1e-2), []
    for _ in range(40):
        loss, _ = training_loss(model, inputs, cfg)
        loss.backward()
        assert all(p.grad is not None for p in learnt)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    assert losses[-1] < 0.2 * losses[0]
    for name, p in model.named_parameters():
        assert torch.equal(p, before[name]) == name.startswith("backbone.")
        assert name.startswith("aux_model.") or p.grad is None


def test_the_pad_row_learns(model):
    """EOS is padding and a target: hard look-ups of it must have a gradient."""
    changes = dict(pad_token_id=EOS, tie_word_embeddings=False)
    aux_model = Qwen3ForCausalLM(Qwen3Config(**model.aux_model.config.to_dict() | changes))
    assert aux_model.model.embed_tokens.padding_idx == EOS
    Pair(model.backbone, aux_model, TAGS)
    aux_model.model.embed_tokens(torch.tensor([EOS])).sum().backward()
    assert aux_model.model.embed_tokens.weight.grad[EOS].any()


# ------------------------------------------------------------------------------------------------- the pair and its ids

TEXT = [chr(i) for i in range(33, 127)] + ["Ġ", "Ċ", "th", "the"]  # a byte-level vocabulary, small
CONTROL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]


def write_tokenizer(folder, special, text=TEXT, dream=False):
    """vocab.json and merges.txt as Qwen2's tokenizer has them; `special` follow the text. Returns {token: id}."""
    folder.mkdir(parents=True, exist_ok=True)
    ids = {word: i for i, word in enumerate(text + special)}
    (folder / "vocab.json").write_text(json.dumps({word: ids[word] for word in text}))
    (folder / "merges.txt").write_text("#version: 0.2\nt h\nth e\n")
    flags = dict.fromkeys(("lstrip", "rstrip", "normalized", "single_word"), False)
    config = {
        "added_tokens_decoder": {
            str(ids[word]): {"content": word, "special": "think" not in word, **flags} for word in special
        },
        "eos_token": "<|endoftext|>", "pad_token": "<|endoftext|>", "unk_token": None, "bos_token": None,
        "tokenizer_class": "DreamTokenizer" if dream else "Qwen2Tokenizer",
    }  # fmt: skip
    if dream:
        config |= {"mask_token": "<|mask|>", "auto_map": {"AutoTokenizer": ["tokenization_dream.DreamTokenizer", None]}}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return ids


SHAPE = dict(hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
             max_position_embeddings=256, rope_parameters={"rope_theta": 1e6, "rope_type": "default"})  # fmt: skip


def write_dream(folder):
    """A released Dream-Coder in small: Qwen2 weights, config and tokenizer of a type that needs remote code."""
    ids = write_tokenizer(folder, CONTROL + ["<|beginoftext|>", "<|mask|>"], dream=True)
    torch.manual_seed(0)
    backbone = Qwen2ForCausalLM(Qwen2Config(vocab_size=len(ids) + 30, tie_word_embeddings=False, **SHAPE))
    for p in backbone.parameters():
        nn.init.normal_(p, std=0.3) if p.dim() > 1 else None
    weights = {name: p.contiguous() for name, p in backbone.state_dict().items()}
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    fields = {key: value for key, value in SHAPE.items() if key != "rope_parameters"}
    auto_map = {"AutoConfig": "configuration_dream.DreamConfig", "AutoModel": "modeling_dream.DreamModel"}
    (folder / "config.json").write_text(json.dumps(fields | {
        "model_type": "Dream", "architectures": ["DreamModel"], "auto_map": auto_map, "vocab_size": len(ids) + 30,
        "rope_theta": 1e6, "mask_token_id": ids["<|mask|>"], "eos_token_id": ids["<|endoftext|>"],
        "pad_token_id": ids["<|endoftext|>"], "tie_word_embeddings": False, "hidden_act": "silu", "rms_norm_eps": 1e-6,
    }))  # fmt: skip
    return backbone, ids


def write_qwen3(folder, special=("<tool_response>", "</tool_response>", "<think>", "</think>"), text=TEXT, rows=None):
    """A Qwen3 in small; its tool and think tokens have the ids of Dream's beginning, mask and unused rows."""
    ids = write_tokenizer(folder, CONTROL + list(special), text)
    torch.manual_seed(1)
    config = Qwen3Config(vocab_size=rows or len(ids) + 4, head_dim=16, tie_word_embeddings=True, **SHAPE)
    Qwen3ForCausalLM(config).save_pretrained(folder)
    return ids


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    root = tmp_path_factory.mktemp("pair")
    backbone, dream_ids = write_dream(root / "dream")
    return root, backbone, dream_ids, write_qwen3(root / "qwen3")


ON_CPU = ["--device", "cpu", "--dtype", "float32"]


def pair_of(root, aux, **changes):
    cfg = Config(model=str(root / "dream"), aux=str(aux), device="cpu", dtype="float32", **changes)
    return *codila.load_pair(cfg.aux, cfg, torch.float32), cfg


def test_dream_and_qwen3_load_as_a_pair_without_remote_code(folders):
    root, plain, dream_ids, qwen_ids = folders
    model, _, _, cfg = pair_of(root, root / "qwen3")
    assert type(model.backbone) is Qwen2ForCausalLM and type(model.aux_model) is Qwen3ForCausalLM
    assert model.backbone.config.rope_parameters["rope_theta"] == 1e6
    # attention: all-ones mask of the library, not its causal default
    ids = torch.randint(len(TEXT), (2, 9), generator=torch.Generator().manual_seed(0))
    mask = dense(full(), 1, 9, 9)
    with torch.no_grad():
        ours = model.backbone.lm_head(walk(model.backbone, ids, torch.arange(9).expand(2, 9), mask))
        theirs = plain(ids, attention_mask=mask.expand(2, 1, 9, 9)).logits
        torch.testing.assert_close(ours, theirs, atol=1e-4, rtol=1e-4)
        assert (ours - plain(ids).logits).abs().max() > 0.1
    # the ids collide: Dream's mask is a tool token of Qwen3, Qwen3's tags are unused rows of Dream
    assert qwen_ids["</tool_response>"] == dream_ids["<|mask|>"] == cfg.mask_id
    assert cfg.vocab_len == dream_ids["<|beginoftext|>"]
    assert model.tag_ids == [qwen_ids["<think>"], qwen_ids["</think>"]]
    assert not codila.no_text(model, cfg, "cpu").any()
    assert cfg.eos_id == [dream_ids["<|endoftext|>"], dream_ids["<|im_end|>"]]
    for mode in MODES:
        cfg = dataclasses.replace(cfg, mode=mode, max_new_tokens=20, temperature=2.0, tau=2.0)
        seq_ids, _ = generate(model, ids[:1], cfg, None, torch.Generator().manual_seed(0))
        assert seq_ids.max() < cfg.vocab_len


def test_ids_may_have_holes():
    """The shared ids end where the two vocabularies part, whatever is missing in both before."""

    def tokenizer(**ids):
        return types.SimpleNamespace(get_vocab=lambda: ids, vocab_size=3, eos_token_id=1)

    cfg = Config(mask_id=9, tags="x y")
    ours = tokenizer(a=0, eos=1, c=2, e=5, mask=9)
    assert codila.link_vocabularies(ours, tokenizer(a=0, eos=1, c=2, e=5, y=7, x=8), cfg) == (7, [8, 7])
    assert codila.link_vocabularies(ours, tokenizer(a=0, eos=1, c=2, y=3, x=4), cfg) == (3, [4, 3])
    assert codila.link_vocabularies(ours, tokenizer(a=0, eos=1, c=2, e=5, mask=9, x=10, y=11), cfg)[0] == 10
    for theirs in (dict(a=0, eos=1, b=2, x=8, y=7), dict(a=0, x=1, y=2)):
        with pytest.raises(ValueError, match="part at id"):
            codila.link_vocabularies(ours, tokenizer(**theirs), cfg)


def refused(capsys, *args):
    """Exit status 2 and one line on stderr; returns it."""
    capsys.readouterr()
    try:
        status = codila.main([str(arg) for arg in args])
    except SystemExit as error:
        status = error.code
    err = [line for line in capsys.readouterr().err.splitlines() if line.startswith("codila.py: ")]
    assert status == 2 and len(err) == 1, (status, err)
    return err[0]


def test_models_that_are_no_pair_are_refused(folders, tmp_path, capsys):
    root = folders[0]
    head = ["--generate", "--model", root / "dream", "--prompt", "the", *ON_CPU, "--aux"]
    write_qwen3(tmp_path / "other", text=TEXT[::-1])
    assert "part at id 0" in refused(capsys, *head, tmp_path / "other")
    write_qwen3(tmp_path / "nearly", text=TEXT[:-2] + ["the", "th"])
    assert "part at id" in refused(capsys, *head, tmp_path / "nearly")
    write_qwen3(tmp_path / "untagged", special=["<tool_response>"])
    assert "<think>" in refused(capsys, *head, tmp_path / "untagged")
    write_qwen3(tmp_path / "short", rows=len(TEXT) + len(CONTROL) + 3)
    assert "rows" in refused(capsys, *head, tmp_path / "short")
    assert "nowhere" in refused(capsys, *head, tmp_path / "nowhere")
    assert "2,x" in refused(capsys, "--train", "--block_sizes", "2,x", "--out", tmp_path / "out", *ON_CPU)
    assert "lists" in refused(capsys, "--train", "--block_sizes", "0", "--out", tmp_path / "out", *ON_CPU)


def test_tags_of_ones_own(folders, tmp_path):
    """Two models of one tokenizer: unused tokens serve as tags, and are never written; nor is the mask."""
    ids = write_qwen3(tmp_path / "ar", special=["<|mask|>", "<file>", "</file>"])
    cfg = Config(model=str(tmp_path / "ar"), tags="<file> </file>", device="cpu", dtype="float32", temperature=5.0,
                 max_new_tokens=60)  # fmt: skip
    model, _, _ = codila.load_pair(cfg.model, cfg, torch.float32)
    never = [ids["<|mask|>"], ids["<file>"], ids["</file>"]]
    assert cfg.vocab_len == len(ids) and codila.no_text(model, cfg, "cpu").nonzero()[:, 0].tolist() == never
    for mode in MODES:
        cfg = dataclasses.replace(cfg, mode=mode, eos_id=None)
        seq_ids, _ = generate(model, torch.tensor([[5]]), cfg, None, torch.Generator().manual_seed(0))
        assert not set(never) & set(seq_ids[0].tolist()) and seq_ids.max() < len(ids)


def test_train_save_reload_a_released_pair(folders, tmp_path, capsys):
    root = folders[0]
    data = tmp_path / "rows.jsonl"
    data.write_text("\n".join(json.dumps({"prompt": "the", "response": "then " * n}) for n in range(1, 7)))
    out = tmp_path / "out"
    args = ["--train", "--model", root / "dream", "--aux", root / "qwen3", "--data", data, "--out", out, *ON_CPU,
            "--steps", 2, "--batch_size", 2, "--accumulation", 1, "--max_new_tokens", 8, "--lr", 1e-3]  # fmt: skip
    rows, make = [], codila.make_training_inputs
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(codila, "make_training_inputs", lambda batch, *rest: (rows.extend(batch), make(batch, *rest))[1])
        assert codila.main([str(arg) for arg in args]) == 0
    model, _, _, cfg = pair_of(root, root / "qwen3")
    assert all(row["answer_ids"][-2:] == cfg.eos_id[::-1] for row in rows)  # the turn ends, then the text
    plain = AutoModelForCausalLM.from_pretrained(out)  # the AR model as a plain Hugging Face folder
    assert type(plain) is Qwen3ForCausalLM
    moved = {name: not torch.equal(p, model.aux_model.state_dict()[name]) for name, p in plain.named_parameters()}
    assert all(moved.values())
    trained = json.loads((out / "config.json").read_text())["trained_with"]
    assert (trained["method"], trained["model"]) == ("codila", str(root / "dream"))
    capsys.readouterr()
    texts = []
    for flags in (["--out", out], ["--model", out], ["--model", root / "dream", "--aux", out]):
        more = ["--prompt", "the", "--max_new_tokens", 8, *ON_CPU]
        assert codila.main([str(arg) for arg in ["--generate", *flags, *more]]) == 0
        lines = capsys.readouterr().out.splitlines()
        assert [row["label"] for row in json.loads(lines[-1])["rows"]] == ["plain AR", "codila static"]
        texts.append([line for line in lines if line.startswith("  codila static: ")])
    assert texts[0] == texts[1] == texts[2]


# ---------------------------------------------------------------------------------------------- the tiny pair


def test_train_compare_and_infill(tmp_path, capsys):
    out = tmp_path / "run"
    args = ["--train", "--generate", "--out", out, "--steps", 3, "--batch_size", 4, "--problems", 2, *ON_CPU]
    assert codila.main([str(arg) for arg in args]) == 0
    lines = capsys.readouterr().out.splitlines()
    rows = json.loads(lines[-1])["rows"]
    labels = [row["label"] for row in rows]
    assert labels[:2] == ["plain AR", "one token a forward"] and "dynamic" in labels[-1]
    for B in (2, 4, 8):
        names = f"codila, K=B={B}", f"independent tokens, K={B}", f"independent block, K=B={B}"
        assert set(names) <= set(labels)
    for row in rows:
        assert row["problems"] == 2 and row["forwards"] > 0 and 0 <= row["right"] <= 2
        assert any(line.startswith(row["label"] + ": ") for line in lines)
    assert rows[0]["right"] == rows[1]["right"] == 2  # the two models as they come
    suffix = "+aα1;"
    spy = []
    with pytest.MonkeyPatch.context() as patch:
        run = codila.generate
        patch.setattr(codila, "generate", lambda *args, **kwargs: spy.append(run(*args, **kwargs)) or spy[-1])
        for mode in ("static", "dynamic"):
            more = ["--prompt", "2 red lines 0042:aα1=", "--suffix", suffix, "--max_new_tokens", 3, "--mode", mode]
            assert codila.main([str(arg) for arg in ["--generate", "--out", out, *more, *ON_CPU]]) == 0
            rows = json.loads(capsys.readouterr().out.splitlines()[-1])["rows"]
            assert (rows[1]["label"], rows[1]["new_tokens"]) == (f"codila {mode}", 3)
    for seq_ids, record in spy:
        assert record["fixed_round"][3:] == [-1] * 5 and all(n >= 0 for n in record["fixed_round"][:3])
        assert not {0, 1} & set(seq_ids[0, -8:].tolist())  # no EOS and no mask in the hole


def test_every_promise_of_the_header_has_a_place():
    places = re.findall(r"->([\w\s,]+)", re.search(r"Implements(.*?)Left out", codila.__doc__, re.S)[1])
    assert len(places) >= 4
    for name in re.findall(r"\w+", " ".join(places)):
        assert callable(getattr(codila, name)), name
