"""CoDiLA: the reference vectors, both theorems in small, and what must hold for any pair of models."""

import dataclasses
import functools
import itertools
import json
import math
import random
import re
import types

import numpy as np
import pytest
import torch
from conftest import few_rows, golden, last_line, load_backbone, named, random_lm, spy, write_tokenizer
from transformers import AutoModelForCausalLM, Qwen2ForCausalLM, Qwen3ForCausalLM

import codila
from codila import Config, Pair, draw_noise, generate, make_training_inputs, training_loss
from common import Decoder, causal, dense, full, segments, walk

CASES, TENSORS, FOLDER = golden("codila")
META = CASES["meta"]
MASK, EOS, VS = META["mask_id"], META["eos_id"], META["shared_vocab"]
TAGS = [META["think_id"], META["end_think_id"]]
ON_CPU = dict(device="cpu", dtype="float32")
PLAIN = dict(mask_id=MASK, eos_id=[EOS, META["im_end_id"]], vocab_len=VS, **ON_CPU)
GEN = [case for case in CASES["decode"] if case["mode"] == "static"]  # canvases to decode in other ways
MODES = list(codila.SELECT)


@pytest.fixture(scope="module")
def model():
    return Pair(load_backbone(FOLDER / "model" / "dlm"), load_backbone(FOLDER / "model" / "ar"), TAGS)


def settings(**changes):
    return Config(**PLAIN | changes)


def field(case, name):
    return TENSORS[f"{case['name']}.{name}"]


def seeded(seed=0):
    return torch.Generator().manual_seed(seed)


def near(found, wanted, atol=2e-4):
    torch.testing.assert_close(found, wanted, atol=atol, rtol=0)


def no_text(model, suppress_ids=()):
    return codila.no_text(model, settings(), "cpu", suppress_ids)


# ------------------------------------------------------------------------------ reference vectors: marginals


@torch.no_grad()
def marginals(model, input_ids):
    """Log-marginals (S, Vs) by the definition: full attention, the row before a token predicts it."""
    S = input_ids.shape[1]
    hidden = walk(model.backbone, input_ids, torch.arange(S)[None], dense(full(), 1, S, S))
    raw = model.backbone.lm_head(hidden)[0]
    return torch.cat([raw[:1], raw[:-1]])[:, :VS].float().log_softmax(-1)


@torch.no_grad()
def forced_logits(model, embeds, target, cfg):
    inputs = codila.ar_inputs(model, embeds[None], target[None, :-1], cfg)
    T = inputs.shape[1]
    hidden = walk(model.aux_model, inputs, torch.arange(T)[None], dense(causal(), 1, T, T))
    logits = model.aux_model.lm_head(hidden[0, -len(target) :])
    return inputs[0], codila.shared_logits(logits, no_text(model))


@torch.no_grad()
def soft_embed(model, probs, **changes):
    """Of marginals (n, Vs) at masked positions."""
    return codila.soft_embed(model, probs, torch.full(probs.shape[:1], MASK), settings(**changes))


@named(CASES["soft"])
def test_soft_conditioning(model, case):
    cfg = settings()
    B, start, target = case["B"], case["block_start"], field(case, "target")
    input_ids, block = field(case, "input_ids"), slice(start, start + B)
    logp = marginals(model, input_ids)
    near(logp, field(case, "dlm_logprobs"))
    near(-codila.propose(logp, cfg, None)[1], field(case, "entropy").double())
    embeds = soft_embed(model, logp[block].exp())
    near(embeds, field(case, "soft_embeds"), 1e-5)
    near(soft_embed(model, logp[block].exp(), topk=2), field(case, "soft_embeds_top2"), 1e-5)
    inputs, logits = forced_logits(model, embeds, target, cfg)
    assert list(range(2 * B + 1)) == case["position_ids"]
    near(inputs, field(case, "ar_inputs"), 1e-5)
    near(logits, field(case, "ar_logits"))
    bare = forced_logits(model, embeds, target, settings(envelope=False))[1]
    near(bare, field(case, "ar_logits_no_envelope"))
    pick = torch.arange(B), target
    assert logits.log_softmax(-1)[pick].sum().item() == pytest.approx(case["joint_logprob"], abs=2e-4)
    assert logp[block][pick].sum().item() == pytest.approx(case["independent_logprob"], abs=2e-4)
    # the first token known
    known = input_ids[0].clone()
    known[start] = target[0]
    with torch.no_grad():
        embeds = codila.soft_embed(model, marginals(model, known[None])[block].exp(), known[block], cfg)
    inputs, logits = forced_logits(model, embeds, target, cfg)
    near(inputs, field(case, "ar_inputs_first_known"), 1e-5)
    near(logits, field(case, "ar_logits_first_known"))


@named(CASES["packing"])
def test_packed_blocks(model, case):
    B, n = case["B"], case["n_segments"]
    T = 2 * B + 1
    segment_ids = torch.arange(n).repeat_interleave(T)[None]
    mask = dense(segments(segment_ids), 1, n * T, n * T)
    positions = torch.arange(T).repeat(n)
    assert torch.equal(mask[0, 0], field(case, "allowed"))
    assert torch.equal(positions, field(case, "position_ids"))
    rows = torch.cat([torch.arange(B + 1, T) + i * T for i in range(n)])
    assert torch.equal(rows, field(case, "logit_rows"))
    # the same numbers as one row per block
    x = torch.randn(n, T, model.aux_model.config.hidden_size, generator=seeded())
    with torch.no_grad():
        packed = walk(model.aux_model, x.view(1, n * T, -1), positions[None], mask)
        single = walk(model.aux_model, x, torch.arange(T).expand(n, T), dense(causal(), 1, T, T))
    near(packed.view(single.shape), single, 1e-5)


# ------------------------------------------------------------------------------- reference vectors: training


def batch_of(input_ids, prompt_lens):
    rows = zip(input_ids.tolist(), prompt_lens)
    return [{"prompt_ids": ids[:P], "answer_ids": ids[P:]} for ids, P in rows]


def draws_of(B, length, block_masked, t=None):
    rows = zip(block_masked, t or [1.0] * len(block_masked))
    return [dict(block_size=B, length=length, p_mask=t, block_masked=row, known=[[False] * B] * len(row))
            for row, t in rows]  # fmt: skip


def train_inputs(case, weighting="inverse_t"):
    cfg = settings(topk=case["topk"] or 0, envelope=case["envelope"], weighting=weighting)
    input_ids, mask = field(case, "input_ids"), field(case, "block_mask")
    block_masked = [mask[r, :n].tolist() for r, n in enumerate(case["n_blocks"])]
    assert not any(mask[r, n:].any() for r, n in enumerate(case["n_blocks"]))
    draws = draws_of(case["B"], input_ids.shape[1], block_masked, case["t"])
    return make_training_inputs(batch_of(input_ids, case["prompt_len"]), draws, cfg), cfg


def places(inputs):
    """Row and column (m, B) of the tokens of all masked blocks."""
    return (inputs["labels"] != -100).nonzero().view(-1, inputs["block_size"][0], 2).unbind(-1)


@named(CASES["train"])
def test_training_loss_and_gradients(model, case):
    inputs, cfg = train_inputs(case)
    row_idx, pos = places(inputs)
    assert torch.equal(inputs["input_ids"], field(case, "noisy_ids"))
    assert torch.equal(inputs["input_ids"] != field(case, "input_ids"), field(case, "token_mask"))
    assert torch.equal(inputs["labels"][row_idx, pos], field(case, "block_ids"))
    assert torch.equal(row_idx[:, 0], field(case, "block_row"))
    pi = torch.stack([marginals(model, ids[None]) for ids in inputs["input_ids"]]).exp()
    near(pi[row_idx, pos], field(case, "pi"))
    nll, nll_alone, _ = codila.block_nll(model, inputs, cfg)
    near(nll.sum(-1), field(case, "block_ce"))
    near(nll_alone.sum(-1), field(case, "block_ce_independent"))
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
            grads = {name: p.grad.norm().item() for name, p in model.aux_model.named_parameters()}
            for name, norm in expected["grad_norm_inverse_t"].items():
                assert grads[name] == pytest.approx(norm, rel=1e-3)
            total = math.sqrt(sum(norm**2 for norm in grads.values()))
            assert total == pytest.approx(expected["total_grad_norm_inverse_t"], rel=1e-3)
            wrong = expected["WRONG_embed_grad_norm_if_soft_embeds_detached"]
            assert abs(grads["model.embed_tokens.weight"] / wrong - 1) > 0.02
            assert not any(p.requires_grad or p.grad is not None for p in model.backbone.parameters())


@named(CASES["nelbo_exact"])
def test_exact_bound_of_the_models(model, case):
    """All block masks: the sum of block CE by the AR model and by the marginals, and the bound from it."""
    ids, B, N = field(case, "input_ids"), case["B"], case["n_blocks"]
    batch, cfg, bound = batch_of(ids, [case["prompt_len"]]), settings(), np.zeros(2)
    for masked in itertools.product([False, True], repeat=N):
        if any(masked):
            inputs = make_training_inputs(batch, draws_of(B, ids.shape[1], [list(masked)]), cfg)
            with torch.no_grad():
                nll, alone, _ = codila.block_nll(model, inputs, cfg)
            ce = np.array([nll.sum().item(), alone.sum().item()])
            assert ce == pytest.approx(case["sum_ce_by_mask"]["".join("01"[m] for m in masked)], abs=1e-3)
            bound += ce / (sum(masked) * math.comb(N, sum(masked)))
    assert len(case["sum_ce_by_mask"]) == 2**N - 1
    assert bound == pytest.approx([case["nelbo_nats"], case["nelbo_independent_nats"]], abs=1e-3)
    assert bound[0] / (B * N) == pytest.approx(case["nelbo_nats_per_token"], abs=1e-4)
    assert bound[0] < bound[1]  # a trained local AR model is below the token-independent bound


@pytest.mark.parametrize("weighting", ["count", "inverse_t"])
@named(CASES["nelbo_exact"])
def test_the_expected_loss_is_the_bound(monkeypatch, case, weighting):
    """Draws and weights only: the cross-entropies come from the table of the vectors."""
    ids, B, N = field(case, "input_ids"), case["B"], case["n_blocks"]
    cfg = settings(weighting=weighting, block_sizes=str(B))
    monkeypatch.setattr(codila, "padded_len", lambda *_: ids.shape[1])
    batch, generator = batch_of(ids, [case["prompt_len"]]), seeded(1)
    total, n = 0.0, 1500
    for _ in range(n):
        draws = draw_noise(batch, cfg, generator)
        weight = make_training_inputs(batch, draws, cfg)["weights"].max().item() * N * B
        key = "".join("01"[m] for m in draws[0]["block_masked"])
        total += weight * case["sum_ce_by_mask"].get(key, [0])[0]  # nothing masked: 0
    assert total / n == pytest.approx(case["nelbo_nats"], rel=0.06)


# ------------------------------------------------------------------------------- reference vectors: decoding


def decode(model, case):
    """(ids, record) of a case's canvas."""
    s = case["settings"]
    names = {"B": "block_size", "K": "tokens_per_step"}
    given = {names.get(name, name): value for name, value in s.items() if value is not None}
    given |= dict(mode=case["mode"], window=s["window"] or 0, eos_id=case["stop_ids"] or None)
    ids = torch.tensor([case["canvas"]])
    P = case["origin"]
    cfg = settings(**given)
    seq_ids, record = generate(model, ids[:, :P], cfg, None, None, ids[:, P:], case["suppress_ids"])
    return seq_ids[0].tolist(), record


@named(CASES["decode"])
def test_decoding(model, case, monkeypatch):
    """Ids, counts, each round's choice: [block, tokens] or [positions, where the AR model disagrees]."""
    P, B, review, vetoed = case["origin"], case["settings"]["B"], codila.review, []

    def watched(model, aux, probs, token_ids, draft_ids, *args):
        ar_ids = review(model, aux, probs, token_ids, draft_ids, *args)
        vetoed.append(((token_ids == MASK) & (ar_ids != draft_ids)).nonzero()[:, 0])
        return ar_ids

    monkeypatch.setattr(codila, "review", watched)
    ids, record = decode(model, case)
    expected = case["expected"]
    assert case["fill_id"] == EOS and ids == expected["ids"]
    assert (record["forwards"], record["aux_forwards"]) == (expected["steps"], expected["ar_forwards"])
    fixed, trace = record["fixed_round"], list(expected["trace"])
    masks = [j for j, token in enumerate(case["canvas"][P:]) if token == MASK]
    for number in range(record["rounds"]):
        written = [j for j, turn in enumerate(fixed) if turn == number]
        if case["mode"] in ("verify", "tokens"):
            start = next(j for j in masks if not 0 <= fixed[j] < number) // B * B
            asked = vetoed[number] + P + start if vetoed else torch.tensor([])
            assert trace.pop(0) == [[P + j for j in written], asked.tolist()]
        else:
            blocks = sorted({j // B for j in written})
            found = sorted(trace.pop(0) for _ in blocks)
            assert found == [[i, sum(j // B == i for j in written)] for i in blocks]
    # every mask before the first EOS was fixed
    end = next((j for j in range(P, len(ids)) if ids[j] in case["stop_ids"]), len(ids))
    assert not trace and [j for j in range(end - P) if fixed[j] >= 0] == [j for j in masks if j < end - P]


# ---------------------------------------------------------------------------------------------- the theorems


def entropy(p):
    p = np.asarray(p, dtype=np.float64).ravel()
    return float(-(p[p > 0] * np.log(p[p > 0])).sum())


def conditional(q0, keep, seen=()):
    """H(x_keep | x_seen) of q0, one axis a token."""

    def h(axes):
        return entropy(q0.sum(axis=tuple(j for j in range(q0.ndim) if j not in axes)))

    return h([*keep, *seen]) - h(seen)


def absorb(V, keep):
    """(V+1, V+1): from each symbol to itself, or to the mask V, which stays."""
    step = np.eye(V + 1) * keep
    step[:, V] = 1 - keep
    step[V, V] = 1
    return step


def token_noise_bounds(q0, V, L, B, alpha):
    """{size: bound of the best reverse model that factorises over blocks of that size}, of tokens and of B.

    Its cross-entropy with the truth is sum_i H(b^i_{t-1} | x_t); from it goes E H[x_{t-1} | x_t, x_0].
    """
    bounds = {1: 0.0, B: 0.0}
    for before, now in zip(alpha, alpha[1:]):
        start = functools.reduce(np.kron, [absorb(V, before)[:V]] * L)  # from x_0 to x_{t-1}
        step = functools.reduce(np.kron, [absorb(V, now / before)] * L)
        pairs = ((q0.ravel() @ start)[:, None] * step).reshape([V + 1] * L + [-1])  # x_{t-1} by token, x_t
        r = (before - now) / (1 - now)
        for size in bounds:
            blocks = [range(i, i + size) for i in range(0, L, size)]
            bounds[size] += sum(conditional(pairs, block, [L]) for block in blocks)
            bounds[size] -= L * (1 - now) * entropy([r, 1 - r])
    return bounds


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


@named(CASES["theory"])
def test_theorem_3_2(case):
    """NELBO_1 - NELBO_B = sum_t E sum_i TC(b^i_{t-1} | x_t) >= 0; the cross-entropy form of block noise."""
    q0, V, L, B, alpha = field(case, "q0").numpy(), case["V"], case["L"], case["B"], case["alpha"]
    assert alpha[0] == 1 and alpha[-1] == 0 and len(alpha) == case["T"] + 1
    bounds = token_noise_bounds(q0, V, L, B, alpha)
    gap = bounds[1] - bounds[B]
    got = dict(nelbo_token=bounds[1], nelbo_block=bounds[B], gap=gap, sum_total_correlation_x_prev=gap)
    assert got == pytest.approx({key: case["token_noise"][key] for key in got}, abs=1e-9)
    assert entropy(q0) == pytest.approx(case["entropy_x0"], abs=1e-9)
    assert bounds[1] >= bounds[B] - 1e-12 and bounds[B] >= entropy(q0) - 1e-12
    axes = q0.reshape([V] * L)
    tc0 = sum(conditional(axes, [j]) for j in range(L))
    tc0 -= sum(conditional(axes, range(start, start + B)) for start in range(0, L, B))
    assert tc0 == pytest.approx(case["sum_block_total_correlation_x0"], abs=1e-9)
    assert case["T"] > 1 or gap == pytest.approx(tc0, abs=1e-9)
    assert B < L or bounds[B] == pytest.approx(entropy(q0), abs=1e-9)
    joint, alone = block_noise_bounds(axes, L, B, alpha)
    got = dict(nelbo_block=joint, ce_token_independent=alone, gap=alone - joint,
               weighted_total_correlation_x0=alone - joint)  # fmt: skip
    assert got == pytest.approx({key: case["block_noise"][key] for key in got}, abs=1e-9)
    # a block is one absorbing symbol over V^B: the KL definition gives the same bound
    assert token_noise_bounds(q0, V**B, L // B, 1, alpha)[1] == pytest.approx(joint, abs=1e-9)


@pytest.mark.parametrize("case", [case for case in CASES["theory_topk"] if "collision" not in case])
def test_theorem_3_3(case):
    """Whole marginals lose nothing; the product of top-k sets may lose the mode."""
    q, k = np.array(case["q"]), case["k"]
    both = [q.sum(1), q.sum(0)]
    np.testing.assert_allclose(both, case["marginals"], atol=1e-9)
    top = [sorted(np.argsort(-p, kind="stable")[:k].tolist()) for p in both]
    assert top == case["topk_sets"]
    cut = [np.where(np.isin(np.arange(len(p)), s), p, 0) for p, s in zip(both, top)]
    np.testing.assert_allclose([p / p.sum() for p in cut], case["truncated_marginals"], atol=1e-9)
    mode = list(np.unravel_index(q.argmax(), q.shape))
    assert mode == case["mode"]
    assert (mode[0] not in top[0] or mode[1] not in top[1]) == case["mode_excluded"]
    inside = q[np.ix_(*top)].sum()
    alone = [int(p.argmax()) for p in both]
    assert alone == case["independent_mode"]
    got = dict(mode_prob=q.max(), mass_inside=inside, tv_lower_bound=1 - inside,
               total_correlation=sum(map(entropy, both)) - entropy(q),
               prob_of_independent_mode=q[tuple(alone)])  # fmt: skip
    assert got == pytest.approx({key: case[key] for key in got}, abs=1e-9)
    # no model on the product of the sets comes nearer than that: the best one is q itself, cut, renormalised
    best = np.zeros_like(q)
    best[np.ix_(*top)] = q[np.ix_(*top)] / inside
    assert np.abs(q - best).sum() / 2 >= case["tv_lower_bound"] - 1e-12
    # left to right with whole marginals: some AR model reproduces q
    first, then = q.sum(1, keepdims=True), q / np.maximum(q.sum(1, keepdims=True), 1e-300)
    np.testing.assert_allclose(first * then, q, atol=1e-15)


@pytest.mark.parametrize("case", [case for case in CASES["theory_topk"] if "collision" in case])
def test_theorem_3_3_top_1_sets_mix_what_differs(case):
    q_a, q_b = np.array(case["q_a"]), np.array(case["q_b"])
    for axis in (0, 1):  # the same input for a top-1-conditioned model
        assert q_a.sum(axis).argmax() == q_b.sum(axis).argmax()
    excess = entropy((q_a + q_b) / 2) - (entropy(q_a) + entropy(q_b)) / 2  # the best predictor is the mixture
    assert excess == pytest.approx(case["excess_nats_top1"], abs=1e-9) and excess > 0
    assert not np.allclose(q_a.sum(1), q_b.sum(1))  # a softly conditioned one can tell them apart
    assert case["excess_nats_soft"] == 0


# ----------------------------------------------------------------------------------------- soft conditioning


def random_block(known, seed=0):
    """Arbitrary marginals of a block and its tokens on the canvas; True in known: the token is there."""
    generator = seeded(seed)
    ids = torch.randint(VS, (len(known),), generator=generator)
    probs = (3 * torch.randn(len(known), VS, generator=generator)).softmax(-1)
    return probs, ids.masked_fill(~torch.tensor(known), MASK)


@pytest.mark.parametrize("known", [[False] * 4, [True, False, False, True], [False], [False, True] * 4])
@torch.no_grad()
def test_cached_writing_equals_recomputing(model, known):
    cfg, b = settings(), len(known)
    probs, token_ids = random_block(known)
    aux, again, banned = Decoder(model.aux_model, 2 * b + 1), token_ids.clone(), no_text(model)
    written = codila.write_block(model, aux, probs, token_ids, b - 1, cfg, banned, None)
    assert aux.forwards == b and torch.equal(token_ids, again)
    hard = model.aux_model.model.embed_tokens(written)
    embeds = torch.where(torch.tensor(known)[:, None], hard, soft_embed(model, probs))
    for j in range(b):
        logits = forced_logits(model, embeds, again.masked_fill(again == MASK, 0), cfg)[1]
        again[j] = again[j] if known[j] else logits[j].argmax()
    assert torch.equal(written, again)
    padded = Decoder(model.aux_model, 2 * b + 1)
    padded.replay.pad = True  # as a captured graph would, on the CPU
    assert torch.equal(codila.write_block(model, padded, probs, token_ids, b - 1, cfg, banned, None), written)


@torch.no_grad()
def test_a_block_knows_nothing_of_its_neighbours(model):
    """The AR model reads a block's marginals alone, also among others, and agrees with its own writing."""
    banned = no_text(model, range(0, VS, 2))
    cfg, drafts = settings(block_size=4), torch.randint(VS, (5, 4), generator=seeded(5))
    aux = Decoder(model.aux_model, 45)
    # the last of them is cut short, as at the end of a canvas: it can only stand last
    blocks = [random_block([False] * (4 if seed < 4 else 3), seed) for seed in range(5)]
    own = [codila.write_block(model, aux, *block, len(block[1]) - 1, cfg, banned, None) for block in blocks]

    def verdict(order):
        """Where the AR model disagrees, per block, in this order: with every second block it should not."""
        probs = torch.cat([blocks[n][0] for n in order])
        token_ids = torch.cat([blocks[n][1] for n in order])
        draft_ids = torch.cat([own[n] if n % 2 else drafts[n, : len(own[n])] for n in order])
        aux.reset()
        no = codila.review(model, aux, probs, token_ids, draft_ids, cfg, banned) != draft_ids
        assert aux.forwards == 1
        return {n: part.tolist() for n, part in zip(order, no.split(4))}

    alone = {n: verdict([n])[n] for n in range(5)}
    assert [any(alone[n]) for n in range(5)] == [True, False, True, False, True]
    for order in ([0, 1, 2, 3, 4], [3, 2, 0]):
        assert verdict(order) == {n: alone[n] for n in order}


# -------------------------------------------------------------------------------------------------- decoding


@pytest.mark.parametrize("mode", MODES)
def test_the_whole_budget_is_written_and_infilling_with_an_empty_suffix_is_generation(model, mode):
    cfg = settings(eos_id=None, mode=mode, max_new_tokens=13, tau=1.0)
    prompt_ids = torch.tensor([GEN[0]["canvas"][: GEN[0]["origin"]]])
    P = prompt_ids.shape[1]
    ids, record = generate(model, prompt_ids, cfg)  # no EOS ends it: the text has two
    assert ids.shape[1] == P + 13 and len(record["fixed_round"]) == 13 and MASK not in ids[0]
    suppress = [EOS, META["im_end_id"]]
    a, _ = generate(model, prompt_ids, cfg, None, None, torch.full((1, 13), MASK), suppress)
    b, _ = generate(model, prompt_ids, cfg, suppress_ids=suppress)
    assert torch.equal(a, b) and not set(suppress) & set(a[0, P:].tolist())


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
        cfg = settings(eos_id=stops, mode=mode, block_size=B, window=rng.choice([0, 1, 3]), tau=1.0,
                       temperature=temperature, blocks_per_step=rng.choice([1, 2]))  # fmt: skip
        seen.clear()
        calls[0] = 0
        ids, record = generate(model, prompt_ids, cfg, None, seeded(number), torch.tensor([canvas]))
        ids = ids[0].tolist()
        assert record["forwards"] == calls[0] == record["rounds"] == len(seen) - 1 <= canvas.count(MASK)
        for before, after in zip(seen, seen[1:]):
            assert all(a == b or a == MASK for a, b in zip(before, after))
            assert after.count(MASK) < before.count(MASK)
        assert ids[:P] == prompt_ids[0].tolist() and len(ids) == P + R and max(ids) < VS
        end = next((j for j, i in enumerate(ids) if j >= P and i in (stops or ())), len(ids))
        assert set(ids[end + 1 :]) <= {EOS} and MASK not in ids
        for token, new in zip(canvas, ids[P:end]):
            assert token in (MASK, new)


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
    """Known tokens do not count as certain ones; ties go to the lowest index."""

    def blocks(n, *rows):
        cfg = Config(block_size=len(rows[0]), blocks_per_step=n)
        return [idx.tolist() for idx in codila.select_blocks(*grid(*rows), cfg)]

    assert blocks(1, [0.3, 0.3], [None, 0.5], [None, None]) == [[0, 1]]
    assert blocks(1, [0.25, 0.25], [0.25, 0.25]) == [[0, 1]]
    assert blocks(2, [0.5, 0.5], [None, None], [None, 0.25], [0.1, 0.9]) == [[5], [0, 1]]
    for K, want in ((2, [1, 2]), (9, [1, 2, 0, 4])):
        places = grid([-0.5, -1.0], [-1.0, None], [0.0, None])
        (idx,) = codila.select_tokens(*places, Config(tokens_per_step=K))
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


def test_confidences_are_those_at_temperature_1():
    logits = torch.tensor([[1.0, 0.0, 2.0, -torch.inf, -1.0]])
    _, conf = codila.propose(logits, Config(temperature=0.7), seeded())
    p = logits[0].softmax(-1)
    assert conf[0].item() == pytest.approx(-torch.special.entr(p).sum().item(), abs=1e-6)
    ids, conf = codila.propose(logits, Config(mode="tokens", conf="maxprob"), None)  # greedy: without a draw
    assert ids.item() == 2 and conf.item() == pytest.approx(p.max().item(), abs=1e-6)


def test_a_known_token_that_only_one_model_has_is_refused(model):
    with pytest.raises(ValueError, match="both models"):
        generate(model, torch.tensor([[1]]), settings(), canvas_ids=torch.tensor([[MASK, VS]]))
    batch = [{"prompt_ids": [1], "answer_ids": [2, VS, 3, EOS]}]
    with pytest.raises(ValueError, match=f"token {VS} "):
        make_training_inputs(batch, draws_of(2, 5, [[True, True]]), settings())


# -------------------------------------------------------------------------------------------------- training


@pytest.mark.parametrize("weighting", ["count", "inverse_t", "uniform"])
def test_noise_masks_whole_blocks_after_the_prompt(weighting):
    cfg = settings(block_sizes="2,3,8", max_pad=9, weighting=weighting)
    batch = [{"prompt_ids": [1] * P, "answer_ids": [2] * A + [EOS]} for P, A in ((3, 14), (9, 0), (1, 30))]
    found = set()
    for seed in range(40):
        draws = draw_noise(batch, cfg, seeded(seed))
        inputs = make_training_inputs(batch, draws, cfg)
        B, S = draws[0]["block_size"], inputs["input_ids"].shape[1]
        assert S % 8 == 0 and 32 <= S <= 48 and (inputs["block_size"] == B).all()
        found.add(B)
        for r, (row, draw) in enumerate(zip(batch, draws)):
            P, masked = len(row["prompt_ids"]), inputs["input_ids"][r] == MASK
            N = len(draw["block_masked"])
            assert N == (S - P) // B and not masked[:P].any() and not masked[P + N * B :].any()
            blocks = masked[P : P + N * B].view(N, B)
            assert blocks.any(1).tolist() == blocks.all(1).tolist() == draw["block_masked"]
            assert 0 < draw["p_mask"] <= 1 and (weighting != "count" or masked.any())
            clean = torch.tensor((row["prompt_ids"] + row["answer_ids"] + [EOS] * S)[:S])
            assert torch.equal(inputs["input_ids"][r][~masked], clean[~masked])
            assert torch.equal(inputs["labels"][r], clean.masked_fill(~masked, -100))
            assert torch.equal(inputs["weights"][r] > 0, masked)
    assert found == {2, 3, 8}
    assert draw_noise(batch, cfg, seeded(4)) == draw_noise(batch, cfg, seeded(4))


def test_partial_blocks(model):
    """Known tokens of a masked block are seen, forced and not counted; the loss is that of the rest."""
    cfg = settings(p_partial=1.0, weighting="uniform")
    case = CASES["train"][0]
    input_ids, P = field(case, "input_ids")[:1], case["prompt_len"][0]
    batch = batch_of(input_ids, [P])
    assert any(map(any, draw_noise(batch, cfg, seeded(1))[0]["known"]))
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
        embeds = soft_embed(model, marginals(model, noisy[None]).exp())[P : P + 4]
        for j in (0, 2):
            embeds[j] = model.aux_model.model.embed_tokens(input_ids[0, P + j])
    logits = forced_logits(model, embeds, input_ids[0, P : P + 4], cfg)[1]
    want = -logits.log_softmax(-1)[torch.arange(4), input_ids[0, P : P + 4]]
    near(nll[0], want, 1e-5)
    loss, _ = training_loss(model, inputs, cfg)
    assert loss.item() == pytest.approx((want[[1, 3]].sum() + nll[1].sum()).item() / (4 * N), rel=1e-5)


def test_a_row_or_batch_without_masked_blocks_counts_0(model):
    cfg = settings()
    batch = [{"prompt_ids": [1, 2], "answer_ids": [3, 4, 5, EOS]} for _ in range(2)]
    one = make_training_inputs(batch, draws_of(2, 6, [[True, False], [False, False]]), cfg)
    assert training_loss(model, one, cfg)[0].item() > 0
    none = make_training_inputs(batch, draws_of(2, 6, [[False, False], [False, False]]), cfg)
    for inputs in (none, {key: value[1:] for key, value in one.items()}):
        model.zero_grad()
        loss, logs = training_loss(model, inputs, cfg)
        loss.backward()
        assert loss.item() == logs["marginals"].item() == 0
        assert not any(p.grad.any() for p in model.aux_model.parameters())  # zeros, not None


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


# ------------------------------------------------------------------------------------ the pair and its ids

TEXT = [chr(i) for i in range(33, 127)] + ["Ġ", "Ċ", "th", "the"]  # a byte-level vocabulary, small
CONTROL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
SHAPE = dict(max_position_embeddings=256, rope_parameters={"rope_theta": 1e6, "rope_type": "default"})


def write_dream(folder):
    """A released Dream-Coder in small: Qwen2 weights; config and tokenizer would need remote code."""
    ids = write_tokenizer(folder, TEXT, CONTROL + ["<|beginoftext|>", "<|mask|>"], dream=True)
    backbone = random_lm("qwen2", vocab_size=len(ids) + 30, tie_word_embeddings=False, **SHAPE)
    backbone.save_pretrained(folder)
    config = json.loads((folder / "config.json").read_text())
    del config["rope_parameters"]
    auto_map = {"AutoConfig": "configuration_dream.DreamConfig", "AutoModel": "modeling_dream.DreamModel"}
    config |= dict(model_type="Dream", architectures=["DreamModel"], auto_map=auto_map, rope_theta=1e6)
    config |= dict(mask_token_id=ids["<|mask|>"], eos_token_id=ids[CONTROL[0]], pad_token_id=ids[CONTROL[0]])
    (folder / "config.json").write_text(json.dumps(config))
    return backbone, ids


QWEN3 = ["<tool_response>", "</tool_response>", "<think>", "</think>"]


def write_qwen3(folder, special=QWEN3, text=TEXT, **config):
    """A Qwen3 in small; its tool and think tokens have the ids of Dream's beginning, mask and unused rows."""
    ids = write_tokenizer(folder, text, CONTROL + special)
    config = dict(vocab_size=len(ids) + 4, tie_word_embeddings=True) | SHAPE | config
    random_lm("qwen3", 1, **config).save_pretrained(folder)
    return ids


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    root = tmp_path_factory.mktemp("pair")
    backbone, dream_ids = write_dream(root / "dream")
    return root, backbone, dream_ids, write_qwen3(root / "qwen3")


def pair_of(root, aux, **changes):
    cfg = Config(model=str(root / "dream"), aux=str(aux), **ON_CPU, **changes)
    return codila.load_pair(cfg.aux, cfg, torch.float32)[0], cfg


def run(*args):
    """The exit status of the command line, on the CPU."""
    return codila.main([str(arg) for arg in (*args, "--device", "cpu", "--dtype", "float32")])


def test_dream_and_qwen3_load_as_a_pair_without_remote_code(folders):
    root, plain, dream_ids, qwen_ids = folders
    model, cfg = pair_of(root, root / "qwen3")
    assert type(model.backbone) is Qwen2ForCausalLM and type(model.aux_model) is Qwen3ForCausalLM
    assert model.backbone.config.rope_parameters["rope_theta"] == 1e6
    ids = torch.randint(len(TEXT), (2, 9), generator=seeded())
    mask = dense(full(), 1, 9, 9)
    with torch.no_grad():
        ours = model.backbone.lm_head(walk(model.backbone, ids, torch.arange(9).expand(2, 9), mask))
        theirs = plain(ids, attention_mask=mask.expand(2, 1, 9, 9)).logits
        torch.testing.assert_close(ours, theirs, atol=1e-4, rtol=1e-4)
    # the ids collide: Dream's mask is a tool token of Qwen3, Qwen3's tags are unused rows of Dream
    assert qwen_ids["</tool_response>"] == dream_ids["<|mask|>"] == cfg.mask_id
    assert cfg.vocab_len == dream_ids["<|beginoftext|>"]
    assert model.tag_ids == [qwen_ids["<think>"], qwen_ids["</think>"]]
    assert not codila.no_text(model, cfg, "cpu").any()
    assert cfg.eos_id == [dream_ids["<|endoftext|>"], dream_ids["<|im_end|>"]]
    for mode in MODES:
        cfg = dataclasses.replace(cfg, mode=mode, max_new_tokens=20, temperature=2.0, tau=2.0)
        seq_ids, _ = generate(model, ids[:1], cfg, None, seeded())
        assert seq_ids.max() < cfg.vocab_len


def test_ids_may_have_holes():
    """The shared ids end where the two vocabularies part, whatever is missing in both before."""

    def tokenizer(**ids):
        return types.SimpleNamespace(get_vocab=lambda: ids, vocab_size=3, eos_token_id=1)

    cfg = Config(mask_id=9, tags="x y")
    ours = tokenizer(a=0, eos=1, c=2, e=5, mask=9)
    assert codila.link_vocabularies(ours, tokenizer(a=0, eos=1, c=2, e=5, y=7, x=8), cfg) == (7, [8, 7])
    assert codila.link_vocabularies(ours, tokenizer(a=0, eos=1, c=2, y=3, x=4), cfg) == (3, [4, 3])
    longer = tokenizer(a=0, eos=1, c=2, e=5, mask=9, x=11, y=12)
    assert codila.link_vocabularies(ours, longer, cfg) == (10, [11, 12])
    for theirs in (dict(a=0, eos=1, b=2, x=8, y=7), dict(a=0, x=1, y=2)):
        with pytest.raises(ValueError, match="part at id"):
            codila.link_vocabularies(ours, tokenizer(**theirs), cfg)


def test_models_that_are_no_pair_are_refused(folders, tmp_path):
    others = [dict(text=TEXT[::-1]), dict(text=TEXT[:-2] + ["the", "th"]), dict(special=["<tool_response>"]),
              dict(vocab_size=len(TEXT) + len(CONTROL) + 3)]  # fmt: skip
    for number, words in enumerate(("part at id 0", "part at id", "<think>", "rows")):
        write_qwen3(tmp_path / str(number), **others[number])
        with pytest.raises(ValueError, match=words):
            pair_of(folders[0], tmp_path / str(number))
    for sizes in ("2,x", "0", "", "4,", "-4"):
        with pytest.raises(ValueError, match="a list like"):
            codila.sizes(sizes)


def test_tags_of_ones_own(tmp_path):
    """Two models of one tokenizer: unused tokens serve as tags, and are never written; nor is the mask."""
    ids = write_qwen3(tmp_path, special=["<|mask|>", "<file>", "</file>"])
    cfg = Config(model=str(tmp_path), tags="<file> </file>", temperature=5.0, max_new_tokens=60, **ON_CPU)
    model, _, _ = codila.load_pair(cfg.model, cfg, torch.float32)
    never = [ids["<|mask|>"], ids["<file>"], ids["</file>"]]
    assert cfg.vocab_len == len(ids)
    assert codila.no_text(model, cfg, "cpu").nonzero()[:, 0].tolist() == never
    for mode in MODES:
        cfg = dataclasses.replace(cfg, mode=mode, eos_id=None)
        seq_ids, _ = generate(model, torch.tensor([[5]]), cfg, None, seeded())
        assert not set(never) & set(seq_ids[0].tolist()) and seq_ids.max() < len(ids)


def test_train_save_reload_a_released_pair(folders, tmp_path, capsys, monkeypatch):
    root, out, data = folders[0], tmp_path / "out", tmp_path / "rows.jsonl"
    data.write_text("\n".join(json.dumps(dict(prompt="the", response="then " * n)) for n in range(1, 7)))
    rows = spy(monkeypatch, codila, "encode_rows")
    assert run("--train", "--model", root / "dream", "--aux", root / "qwen3", "--data", data, "--out", out,
               "--steps", 2, "--batch_size", 2, "--accumulation", 1, "--lr", 1e-3) == 0  # fmt: skip
    model, cfg = pair_of(root, root / "qwen3")
    assert all(row["answer_ids"][-2:] == cfg.eos_id[::-1] for row in rows[0][1])  # the turn, the text
    plain = AutoModelForCausalLM.from_pretrained(out)  # the AR model as a plain Hugging Face folder
    assert type(plain) is Qwen3ForCausalLM
    before = model.aux_model.state_dict()
    assert not any(torch.equal(p, before[name]) for name, p in plain.named_parameters())
    trained = json.loads((out / "config.json").read_text())["trained_with"]
    assert (trained["method"], trained["model"]) == ("codila", str(root / "dream"))
    capsys.readouterr()
    texts = []
    for flags in (["--out", out], ["--model", out], ["--model", root / "dream", "--aux", out]):
        assert run("--generate", *flags, "--prompt", "the", "--max_new_tokens", 8) == 0
        lines = capsys.readouterr().out.splitlines()
        assert [row["label"] for row in json.loads(lines[-1])["rows"]] == ["plain AR", "codila static"]
        texts.append([line for line in lines if line.startswith("  codila static: ")])
    assert texts[0] == texts[1] == texts[2]


# --------------------------------------------------------------------------------------------- the tiny pair


def test_train_compare_and_infill(tmp_path, capsys, monkeypatch):
    out = tmp_path / "run"
    few = ["--steps", 2, "--batch_size", 4, "--problems", 1]
    assert run("--train", "--generate", *few_rows(codila), *few, "--out", out) == 0
    rows = last_line(capsys)["rows"]
    kinds = "independent tokens, K={0}", "independent block, K=B={0}", "codila, K=B={0}"
    labels = ["plain AR", "one token a forward", *(kind.format(B) for B in (2, 4, 8) for kind in kinds)]
    assert [row["label"] for row in rows] == [*labels, "codila dynamic, B=4, tau=1"]
    for row in rows:
        assert row["problems"] == 1 and row["forwards"] > 0 and 0 <= row["right"] <= 1
    assert rows[0]["right"] == rows[1]["right"] == 1  # the two models as they come
    found = spy(monkeypatch, codila, "generate")
    for mode in ("static", "dynamic"):
        assert run("--generate", "--out", out, "--prompt", "2 red lines 0042:aα1=", "--suffix", "+aα1;",
                   "--max_new_tokens", 3, "--mode", mode) == 0  # fmt: skip
        row = last_line(capsys)["rows"][1]
        assert (row["label"], row["new_tokens"]) == (f"codila {mode}", 3)
    for _, (seq_ids, record) in found:
        assert record["fixed_round"][3:] == [-1] * 5 and all(n >= 0 for n in record["fixed_round"][:3])
        assert not {0, 1} & set(seq_ids[0, -8:].tolist())  # no EOS and no mask in the hole


def test_every_promise_of_the_header_has_a_place():
    places = re.findall(r"->([\w\s,]+)", re.search(r"Implements(.*?)Left out", codila.__doc__, re.S)[1])
    assert len(places) >= 4
    for name in re.findall(r"\w+", " ".join(places)):
        assert callable(getattr(codila, name)), name
