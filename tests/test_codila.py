"""CoDiLA: the reference vectors, the two theorems on small alphabets, and what must hold for any pair of models."""

import collections
import dataclasses
import itertools
import json
import math
import random
import re

import numpy as np
import pytest
import torch
from conftest import golden, load_backbone
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import (
    AutoModelForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

import codila
import kernels
from codila import Config, Pair, generate, make_training_inputs, training_loss
from common import Decoder, dense, full, segments, walk

CASES, TENSORS, FOLDER = golden("codila")
META = CASES["meta"]
LINK = dict(vocab_len=META["shared_vocab"], think_id=META["think_id"], end_think_id=META["end_think_id"],
            turn_end_id=META["im_end_id"])  # fmt: skip
PLAIN = dict(mask_id=META["mask_id"], eos_id=META["eos_id"], turn_end_id=META["im_end_id"], device="cpu",
             dtype="float32", compile=False)  # fmt: skip
GEN = [case for case in CASES["decode"] if case["mode"] == "static"]  # canvases to decode in other ways


@pytest.fixture(scope="module")
def model():
    backbone = load_backbone(FOLDER / "model" / "dlm")
    backbone.config.mask_token_id = META["mask_id"]
    return Pair(backbone, load_backbone(FOLDER / "model" / "ar"), LINK).train(False)


def field(case, name):
    return TENSORS[f"{case['name']}.{name}"]


def named(group):
    return pytest.mark.parametrize("case", CASES[group], ids=lambda case: case["name"])


# ----------------------------------------------------------------------------------------- reference vectors: marginals


@torch.no_grad()
def shifted_logits(model, input_ids):
    """Logits (S, V) of every position, straight from the definition: full attention, the row before predicts."""
    S = input_ids.shape[1]
    hidden = walk(model.backbone, input_ids, torch.arange(S)[None], dense(full(), 1, S, S))
    raw = model.backbone.lm_head(hidden)[0]
    return torch.cat([raw[:1], raw[:-1]])


def marginals(model, input_ids):
    """Log-marginals (S, Vs) over what both models can say."""
    return codila.shared_logits(shifted_logits(model, input_ids), model.banned).log_softmax(-1)


@torch.no_grad()
def forced_logits(model, embeds, target, cfg):
    inputs = codila.ar_inputs(model, embeds[None], target[None, :-1], cfg)
    T = inputs.shape[1]
    hidden = walk(model.aux_model, inputs, torch.arange(T)[None], dense(codila.causal(), 1, T, T))
    return inputs[0], codila.shared_logits(model.aux_model.lm_head(hidden[0, -len(target) :]), model.banned)


def soft_embed(model, probs, cfg):
    """Of marginals (n, Vs) at masked positions."""
    return codila.soft_embed(model, probs, torch.full(probs.shape[:1], META["mask_id"]), cfg)


@named("soft")
def test_soft_conditioning(model, case):
    cfg, close = Config(**PLAIN), dict(atol=2e-4, rtol=0)
    B, start, target = case["B"], case["block_start"], field(case, "target")
    input_ids, block = field(case, "input_ids"), slice(start, start + B)
    logp = marginals(model, input_ids)
    torch.testing.assert_close(logp, field(case, "dlm_logprobs"), **close)
    torch.testing.assert_close(torch.special.entr(logp.exp()).sum(-1), field(case, "entropy"), **close)
    embeds = soft_embed(model, logp[block].exp(), cfg).detach()
    torch.testing.assert_close(embeds, field(case, "soft_embeds"), atol=1e-5, rtol=0)
    top2 = soft_embed(model, logp[block].exp(), dataclasses.replace(cfg, topk=2)).detach()
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
    # the first token known, by the way of decoding
    known = input_ids[0].clone()
    known[start] = target[0]
    cfg = dataclasses.replace(cfg, block_size=B, window=1)
    assert codila.candidates(known, start, cfg, ())[1].tolist() == [[False] + [True] * (B - 1)]
    dlm = Decoder(model.backbone, len(known))
    with torch.no_grad():
        probs = codila.propose(model, dlm, known, start, start + B, cfg, model.banned, None)[1]
        embeds = codila.soft_embed(model, probs, known[block], cfg)
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
        single = walk(model.aux_model, x, torch.arange(T).expand(n, T), dense(codila.causal(), 1, T, T))
    torch.testing.assert_close(packed.view(single.shape), single, atol=1e-5, rtol=0)


# ------------------------------------------------------------------------------------------ reference vectors: training


def batch_of(input_ids, prompt_lens):
    return [{"prompt_ids": ids[:P], "answer_ids": ids[P:]} for ids, P in zip(input_ids.tolist(), prompt_lens)]


def draws_of(B, length, block_masked, t=None, weighting="uniform"):
    rows, same = zip(block_masked, t or [1.0] * len(block_masked)), dict(block_size=B, length=length)
    return [dict(same, weight=codila.row_weight(weighting, t, row), block_masked=row, known=[[False] * B] * len(row))
            for row, t in rows]  # fmt: skip


def train_inputs(case, weighting="inverse_t", **changes):
    cfg = Config(**PLAIN, topk=case["topk"] or 0, envelope=case["envelope"])
    input_ids, mask = field(case, "input_ids"), field(case, "block_mask")
    block_masked = [mask[r, :n].tolist() for r, n in enumerate(case["n_blocks"])]
    assert not any(mask[r, n:].any() for r, n in enumerate(case["n_blocks"]))
    draws = draws_of(case["B"], input_ids.shape[1], block_masked, case["t"], weighting)
    return make_training_inputs(batch_of(input_ids, case["prompt_len"]), draws, cfg), cfg


@named("train")
def test_training_loss_and_gradients(model, case):
    inputs, cfg = train_inputs(case)
    assert torch.equal(inputs["input_ids"], field(case, "noisy_ids"))
    assert torch.equal(inputs["input_ids"] != field(case, "input_ids"), field(case, "token_mask"))
    used = (inputs["weights"] > 0).any(-1)
    assert torch.equal(inputs["block_ids"][used], field(case, "block_ids"))
    assert torch.equal(used.nonzero()[:, 0], field(case, "block_row"))
    pi = torch.stack([marginals(model, ids[None]) for ids in inputs["input_ids"]]).exp()
    pi = pi[used.nonzero()[:, :1], inputs["block_pos"][used]]
    torch.testing.assert_close(pi, field(case, "pi"), atol=2e-4, rtol=0)
    nll, nll_alone, _ = codila.block_nll(model, inputs, cfg)
    torch.testing.assert_close(nll.sum(-1), field(case, "block_ce"), atol=2e-4, rtol=0)
    torch.testing.assert_close(nll_alone.sum(-1), field(case, "block_ce_independent"), atol=2e-4, rtol=0)
    expected = case["expected"]
    for weighting in expected["loss"]:
        inputs, cfg = train_inputs(case, weighting)
        weights = inputs["weights"].amax((1, 2)) * case["maskable_tokens"]
        for row, weight in zip(range(len(weights)), case["weights"][weighting]):
            if used[row].any():
                assert weights[row].item() == pytest.approx(weight, rel=1e-6)
        loss, logs = training_loss(model, inputs, cfg)
        assert loss.item() == pytest.approx(expected["loss"][weighting], rel=1e-5)
        assert logs["marginals"] == pytest.approx(expected["loss_independent"][weighting], rel=1e-5)
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
    cfg, table, bound = Config(**PLAIN), {}, np.zeros(2)
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
    cfg = Config(**PLAIN, weighting=weighting, block_sizes=str(case["B"]))
    ids, B, N, P = field(case, "input_ids"), case["B"], case["n_blocks"], case["prompt_len"]
    monkeypatch.setattr(codila, "draw_length", lambda *args: ids.shape[1])
    batch, generator, total, n = batch_of(ids, [P]), torch.Generator().manual_seed(1), 0.0, 2000
    for _ in range(n):
        draws = codila.draw_noise(batch, cfg, generator)
        weights = make_training_inputs(batch, draws, cfg)["weights"]
        if any(draws[0]["block_masked"]):
            key = "".join("01"[m] for m in draws[0]["block_masked"])
            total += weights.max().item() * N * B * case["sum_ce_by_mask"][key][0]
    assert total / n == pytest.approx(case["nelbo_nats"], rel=0.05)


# ------------------------------------------------------------------------------------------ reference vectors: decoding


def decode_config(case, **changes):
    s = case["settings"]
    return Config(
        **PLAIN, mode=case["mode"], block_size=s["B"], window=s["window"] or 0, topk=s.get("topk") or 0,
        envelope=s.get("envelope", True), **{
            {"K": "tokens_per_step"}.get(name, name): s[name]
            for name in ("tau", "K", "lam", "conf", "blocks_per_step") if s.get(name) is not None},
    )  # fmt: skip


def decode(model, case, **changes):
    stops = {name: changes.pop(name, case[name]) for name in ("stop_ids", "suppress_ids")}
    canvas, cfg = changes.pop("canvas", case["canvas"]), dataclasses.replace(decode_config(case), **changes)
    ids = torch.tensor([canvas])
    seq_ids, record = generate(model, ids[:, : case["origin"]], cfg, canvas_ids=ids[:, case["origin"] :], **stops)
    return seq_ids[0].tolist(), record


@named("decode")
def test_decoding(model, case):
    ids, record = decode(model, case)
    expected = case["expected"]
    assert case["fill_id"] == META["eos_id"]
    assert ids == expected["ids"]
    assert (record["forwards"], record["aux_forwards"]) == (expected["steps"], expected["ar_forwards"])
    assert record["trace"] == expected["trace"]
    # every mask was fixed in some round, nothing else was touched
    masked = [token == META["mask_id"] for token in case["canvas"][case["origin"] :]]
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


def block_noise_bounds(q0, V, L, B, alpha):
    """The cross-entropy form under block noise: of the block model, and of the token-independent one."""
    N, q0, joint, alone = L // B, np.asarray(q0).reshape([V] * L), 0.0, 0.0
    for before, now in zip(alpha, alpha[1:]):
        r = (before - now) / (1 - now)
        for masked in itertools.product([True, False], repeat=N):
            weight = r * math.prod(1 - now if m else now for m in masked)
            if weight > 0:
                seen = [j for j in range(L) if not masked[j // B]]

                def conditional(axes):  # H(x_axes | x_seen)
                    def h(keep):
                        return entropy(q0.sum(axis=tuple(j for j in range(L) if j not in keep)))

                    return h([*axes, *seen]) - h(seen)

                for i in (i for i in range(N) if masked[i]):
                    joint += weight * conditional(range(i * B, i * B + B))
                    alone += weight * sum(conditional([j]) for j in range(i * B, i * B + B))
    return joint, alone


@named("theory")
def test_theorem_3_2(case):
    """NELBO_1 - NELBO_B = sum_t E sum_i TC(b^i_{t-1} | x_t) >= 0, and the cross-entropy form under block noise."""
    q0, V, L, B, alpha = field(case, "q0").numpy(), case["V"], case["L"], case["B"], case["alpha"]
    assert alpha[0] == 1 and alpha[-1] == 0 and len(alpha) == case["T"] + 1
    want, near = case["token_noise"], dict(abs=1e-9)
    bounds, total_correlation = token_noise_bounds(q0, V, L, B, alpha)
    assert bounds[1] == pytest.approx(want["nelbo_token"], **near)
    assert bounds[B] == pytest.approx(want["nelbo_block"], **near)
    assert bounds[1] - bounds[B] == pytest.approx(want["gap"], **near)
    assert total_correlation == pytest.approx(want["sum_total_correlation_x_prev"], **near)
    assert bounds[1] - bounds[B] == pytest.approx(total_correlation, abs=1e-12) and total_correlation >= 0
    assert entropy(q0) == pytest.approx(case["entropy_x0"], **near)
    assert bounds[1] >= bounds[B] - 1e-12 and bounds[B] >= entropy(q0) - 1e-12
    grid = q0.reshape([V**B] * (L // B))
    axes = range(L // B)
    tc0 = sum(
        sum(
            entropy(q0.reshape([V] * L).sum(axis=tuple(j for j in range(L) if j != k))) for k in range(i * B, i * B + B)
        )
        - entropy(grid.sum(axis=tuple(j for j in axes if j != i)))
        for i in axes
    )
    assert tc0 == pytest.approx(case["sum_block_total_correlation_x0"], **near)
    if case["T"] == 1:
        assert bounds[1] - bounds[B] == pytest.approx(tc0, **near)
    if B == L:
        assert bounds[B] == pytest.approx(entropy(q0), **near)
    want = case["block_noise"]
    joint, alone = block_noise_bounds(q0, V, L, B, alpha)
    assert joint == pytest.approx(want["nelbo_block"], **near)
    assert alone == pytest.approx(want["ce_token_independent"], **near)
    assert alone - joint == pytest.approx(want["gap"], **near)
    assert alone - joint == pytest.approx(want["weighted_total_correlation_x0"], **near)
    # a block is one absorbing symbol over V^B: the KL definition gives the same bound
    by_kl, _ = token_noise_bounds(q0, V**B, L // B, 1, alpha)
    assert by_kl[1] == pytest.approx(joint, **near)


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


# ---------------------------------------------------------------------------------------------------- soft conditioning


def test_one_hot_marginals_are_plain_embeddings(model):
    ids = torch.arange(META["shared_vocab"])
    probs = torch.nn.functional.one_hot(ids).float()
    with torch.no_grad():
        for topk in (0, 1, META["shared_vocab"]):
            embeds = soft_embed(model, probs, Config(**PLAIN, topk=topk))
            assert torch.equal(embeds, model.aux_model.model.embed_tokens(ids))


def test_topk_keeps_the_likeliest_and_renormalises(model):
    probs, V = torch.zeros(2, META["shared_vocab"]), META["shared_vocab"]
    probs[:, :3] = torch.tensor([[0.5, 0.3, 0.2], [0.1, 0.2, 0.7]])
    weight = model.aux_model.model.embed_tokens.weight
    with torch.no_grad():
        for k, want in ((1, [[1, 0, 0], [0, 0, 1]]), (2, [[0.625, 0.375, 0], [0, 2 / 9, 7 / 9]]), (V, probs[:, :3])):
            got = soft_embed(model, probs, Config(**PLAIN, topk=k))
            torch.testing.assert_close(got, torch.as_tensor(want).float() @ weight[:3], atol=1e-6, rtol=0)


def random_block(known, seed=0):
    """Arbitrary marginals of a block and its tokens on the canvas; True in known: the token is there."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(META["shared_vocab"], (len(known),), generator=generator)
    probs = (3 * torch.randn(len(known), META["shared_vocab"], generator=generator)).softmax(-1)
    return probs, ids.masked_fill(~torch.tensor(known), META["mask_id"])


@pytest.mark.parametrize("known", [[False] * 4, [True, False, False, True, False], [False], [False, True] * 4])
@torch.no_grad()
def test_cached_writing_equals_recomputing(model, known):
    cfg, (probs, token_ids), b = Config(**PLAIN), random_block(known), len(known)
    aux, again = Decoder(model.aux_model, 2 * b + 1), token_ids.clone()
    written = codila.write_block(model, aux, probs, token_ids, b - 1, cfg, model.banned, None)
    assert aux.forwards == b and torch.equal(token_ids, again)
    embeds = torch.where(torch.tensor(known)[:, None], model.aux_model.model.embed_tokens(written),
                         soft_embed(model, probs, cfg))  # fmt: skip
    for j in range(b):
        _, logits = forced_logits(model, embeds, again.masked_fill(again == META["mask_id"], 0), cfg)
        again[j] = again[j] if known[j] else logits[j].argmax()
    assert torch.equal(written, again)
    padded = Decoder(model.aux_model, 2 * b + 1)
    padded.replay.pad = True  # as a captured graph would, on the CPU
    assert torch.equal(codila.write_block(model, padded, probs, token_ids, b - 1, cfg, model.banned, None), written)


@pytest.mark.parametrize("suppress_ids", [(), tuple(range(0, META["shared_vocab"], 2))])
@torch.no_grad()
def test_a_block_knows_nothing_of_its_neighbours(model, suppress_ids):
    """The AR model reads a block's marginals only, alone or packed with others; it agrees with its own writing."""
    cfg, draft_seed, banned = Config(**PLAIN, block_size=4), torch.Generator().manual_seed(5), model.banned.clone()
    banned[list(suppress_ids)] = True
    # the last of them is cut short, as at the end of a canvas: it can only stand last
    blocks = [random_block([False] * (4 if seed < 4 else 3), seed) for seed in range(5)]
    drafts = torch.randint(META["shared_vocab"], (5, 4), generator=draft_seed)

    def verdict(order):
        """Where the AR model disagrees, per block, when the blocks stand in this order."""
        probs, token_ids = (torch.cat(column) for column in zip(*(blocks[n] for n in order)))
        own = torch.cat([own_choice(n) if n % 2 else drafts[n, : len(blocks[n][1])] for n in order])
        aux = Decoder(model.aux_model, 9 * len(order))
        no = codila.review(model, aux, probs, token_ids, own, cfg, banned) != own
        assert aux.forwards == 1
        return dict(zip(order, (part.tolist() for part in no.split(4))))

    def own_choice(n):
        last = len(blocks[n][1]) - 1
        return codila.write_block(model, Decoder(model.aux_model, 9), *blocks[n], last, cfg, banned, None)

    alone = {n: verdict([n])[n] for n in range(5)}
    assert not any(map(any, (alone[1], alone[3]))) and any(map(any, (alone[0], alone[2], alone[4])))
    for order in ([0, 1, 2, 3, 4], [2, 0, 4], [3, 0, 1]):
        assert verdict(order) == {n: alone[n] for n in order}


# ------------------------------------------------------------------------------------------------------------- decoding


def free(case, **changes):
    """A canvas of a reference case without stop ids, cut to `length` masks behind its prompt."""
    length = changes.pop("length", None)
    canvas = case["canvas"][: case["origin"]] + [META["mask_id"]] * (length or len(case["canvas"]) - case["origin"])
    return dict(canvas=canvas, stop_ids=[], **changes)


@pytest.mark.parametrize("case", GEN, ids=lambda case: case["name"])
def test_limits_of_the_schedules(model, case):
    # nothing passes: one token of the diffusion LM a step
    one, record = decode(model, case, mode="dynamic", tau=-1.0)
    want, other = decode(model, case, mode="tokens", tokens_per_step=1)
    assert one == want and record["forwards"] == other["forwards"] and record["aux_forwards"] == 0
    # everything passes: whole blocks, the most certain first
    B = case["settings"]["B"]
    if B > 1:
        length = 4 * B
        every = decode(model, case, **free(case, mode="dynamic", tau=1e9, length=length))
        whole = decode(model, case, **free(case, mode="static", blocks_per_step=1, length=length))
        assert every[0] == whole[0] and every[1]["trace"] == whole[1]["trace"]
        assert every[1]["forwards"] == 4
    # a veto that costs nothing
    for conf in ("entropy", "maxprob"):
        vetoed, record = decode(model, case, mode="verify", lam=0.0, conf=conf, tokens_per_step=2)
        plain, other = decode(model, case, mode="tokens", conf=conf, tokens_per_step=2)
        assert vetoed == plain and record["forwards"] == other["forwards"] == record["aux_forwards"]
        # by default a draft that both models want goes before any other
        one, other, last = (decode(model, case, mode="verify", conf=conf, lam=lam) for lam in (-1.0, 1e6, math.inf))
        assert one == other and META["mask_id"] not in last[0]


@pytest.mark.parametrize("case", GEN, ids=lambda case: case["name"])
def test_two_blocks_of_4_cost_what_one_of_8_costs(model, case):
    two = decode(model, case, **free(case, block_size=4, blocks_per_step=2, window=0, length=24))[1]
    one = decode(model, case, **free(case, block_size=8, blocks_per_step=1, window=0, length=24))[1]
    assert two["forwards"] == one["forwards"] == 3


@pytest.mark.parametrize("mode", codila.MODES)
def test_infilling_with_an_empty_suffix_is_generation(model, mode):
    case, suppress = GEN[0], [META["eos_id"], META["im_end_id"]]
    ids = torch.tensor([case["canvas"]])
    prompt_ids, length = ids[:, : case["origin"]], ids.shape[1] - case["origin"]
    cfg = Config(**PLAIN, mode=mode, tau=0.8, max_new_tokens=length)
    hole = torch.full((1, length), META["mask_id"])
    a, _ = generate(model, prompt_ids, cfg, canvas_ids=hole, stop_ids=(), suppress_ids=suppress)
    b, _ = generate(model, prompt_ids, cfg, stop_ids=(), suppress_ids=suppress)
    assert torch.equal(a, b) and not set(suppress) & set(a[0, case["origin"] :].tolist())


@pytest.mark.parametrize("mode", codila.MODES)
@pytest.mark.parametrize("temperature", [0.0, 3.0])
def test_every_round_writes_masks_and_nothing_else(model, monkeypatch, mode, temperature):
    """Masks get strictly fewer, all else stays, every forward is counted; every id is one of both models."""
    rng, seen, calls = random.Random(3), [], [0]
    propose, forward = codila.propose, codila.Decoder._forward

    def spy(model, dlm, ids, *args):
        seen.append(ids.tolist())
        return propose(model, dlm, ids, *args)

    def count(self, *args):
        calls[0] += self.backbone is model.backbone
        return forward(self, *args)

    monkeypatch.setattr(codila, "propose", spy)
    monkeypatch.setattr(codila.Decoder, "_forward", count)
    for number in range(6):
        B, P, R = rng.randint(1, 6), rng.randint(0, 5), rng.randint(1, 21)
        prompt_ids = torch.tensor([[rng.randrange(META["shared_vocab"]) for _ in range(P)]], dtype=torch.int64)
        canvas = [rng.choice([META["mask_id"]] * 3 + [rng.randrange(META["eos_id"])]) for _ in range(R)]
        stops = (META["eos_id"], 7, 8) if number % 2 else ()
        cfg = Config(**PLAIN, mode=mode, block_size=B, window=rng.choice([0, 1, 3]), tau=1.0, temperature=temperature,
                     blocks_per_step=rng.choice([1, 2]), top_p=rng.choice([1.0, 0.9]))  # fmt: skip
        seen.clear()
        calls[0] = 0
        generator = torch.Generator().manual_seed(number)
        ids, record = generate(model, prompt_ids, cfg, None, generator, torch.tensor([canvas]), stops)
        ids = ids[0].tolist()
        rounds = [*seen, ids]
        assert record["forwards"] == calls[0] == record["rounds"] == len(seen) <= canvas.count(META["mask_id"])
        for before, after in zip(rounds, rounds[1:-1]):
            assert all(a == b or a == META["mask_id"] for a, b in zip(before, after))
            assert after.count(META["mask_id"]) < before.count(META["mask_id"])
        assert ids[:P] == prompt_ids[0].tolist() and len(ids) == P + R and META["mask_id"] not in ids
        assert all(i < META["shared_vocab"] for i in ids)
        end = next((j for j, i in enumerate(ids) if j >= P and i in stops), len(ids))
        assert set(ids[end + 1 :]) <= {META["eos_id"]}
        for j, token in enumerate(canvas[: max(end - P, 0)]):
            assert token in (META["mask_id"], ids[P + j])


def test_one_prompt_after_another_on_one_decoder(model):
    cfg = Config(**PLAIN, max_new_tokens=12, mode="dynamic", tau=1.0)
    prompts = [torch.tensor([case["canvas"][: case["origin"]]]) for case in GEN[:3]]
    decoder = codila.new_decoder(model, max(p.shape[1] for p in prompts), cfg)
    for prompt_ids in prompts + prompts[:1]:
        ids, record = generate(model, prompt_ids, cfg, decoder)
        alone, other = generate(model, prompt_ids, cfg)
        assert torch.equal(ids, alone) and record == other
    with pytest.raises(ValueError, match="one prompt"):
        generate(model, prompts[0].expand(2, -1), cfg)


def test_rows_of_a_training_batch_do_not_affect_each_other(model):
    case = next(case for case in CASES["train"] if len(case["prompt_len"]) > 1)
    inputs, cfg = train_inputs(case)
    with torch.no_grad():
        both = codila.block_nll(model, inputs, cfg)
        single = [codila.block_nll(model, {k: v[r : r + 1] for k, v in inputs.items()}, cfg) for r in range(2)]
    for together, apart in zip(both, zip(*single)):
        torch.testing.assert_close(together, torch.cat(apart), atol=1e-5, rtol=1e-5)


class Shifted:
    """A diffusion LM that is sure of token 10 + p at position p, as Dream says it: in the row before."""

    def __init__(self, model, sure=30.0):
        self.backbone, self.sure, self.forwards = model.backbone, sure, 0
        self.kv_cache = kernels.KVCache(1, 1, 1, 512, 8, "cpu", torch.float32)

    def reset(self):
        return self

    def __call__(self, input_ids, position_ids, attn_mask, write_idx):
        assert attn_mask.all() and torch.equal(position_ids[0], torch.arange(input_ids.shape[1]))
        self.forwards += 1
        S = input_ids.shape[1]
        logits = torch.zeros(1, S, META["dlm_vocab"])
        logits[0, torch.arange(S - 1), 11 + torch.arange(S - 1)] = self.sure
        logits[0, 0, 11] += S == 1  # z[0] = raw[0]
        logits[0, :, META["mask_id"]] = 2 * self.sure  # and it loves what it must not say
        return logits


@pytest.mark.parametrize("mode", ["tokens", "indep", "dynamic"])
def test_the_row_before_predicts(model, mode):
    cfg = Config(**PLAIN, mode=mode, max_new_tokens=9, tau=-1.0)
    decoder = Shifted(model), Decoder(model.aux_model, 99)
    ids, _ = generate(model, torch.tensor([[1, 2, 3]]), cfg, decoder)
    assert ids[0].tolist() == [1, 2, 3] + list(range(13, 22))


def grid(*rows):
    """(is_open, doubt) of blocks: a number is the doubt of a place where something may be written, None another."""
    is_open = torch.tensor([[h is not None for h in row] for row in rows])
    return is_open, torch.tensor([[h or 0.0 for h in row] for row in rows], dtype=torch.float64)


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
    for K, want in ((0, [1, 2]), (1, [1]), (3, [0, 1, 2]), (9, [0, 1, 2, 4])):
        cfg = Config(block_size=2, tokens_per_step=K)
        (idx,) = codila.select_tokens(*grid([-0.5, -1.0], [-1.0, None], [0.0, None]), cfg)
        assert idx.tolist() == want


def test_candidates_end_at_a_stop_and_at_the_window():
    m = META["mask_id"]
    cfg = Config(**PLAIN, block_size=2, window=2)

    def found(ids, origin, stop_ids):
        window = codila.candidates(torch.tensor(ids), origin, cfg, stop_ids)
        return window and (window[0], [i + window[0] for i in window[1].flatten().nonzero()[:, 0].tolist()])

    ids = [1, m, m, 5, m, m, m, m, m]
    assert found(ids, 1, ()) == (1, [1, 2, 4])
    assert found(ids, 3, ()) == (3, [4, 5, 6])
    assert found(ids, 1, (5,)) == (1, [1, 2])
    assert found([5, m, 5], 1, (5,)) == (1, [1])  # the prompt may hold a stop token
    assert found([1, 2, 3, 4, m, m], 1, ()) == (3, [4, 5])  # from the first block with something open
    assert found([1, 2, 3], 1, ()) is found([1, 5, m], 1, (5,)) is found([1], 1, ()) is None
    cfg.window = 0
    assert found(ids, 1, ()) == (1, [1, 2, 4, 5, 6, 7, 8])


def test_by_default_only_verification_looks_beyond_10_blocks():
    ids = torch.full((50,), META["mask_id"])
    for mode in codila.MODES:
        start, is_open = codila.candidates(ids, 0, Config(**PLAIN, mode=mode, block_size=4), ())
        assert start == 0 and len(is_open) == (13 if mode == "verify" else 10)


def test_drawing_follows_the_softmax():
    logits, n = torch.tensor([[1.0, 0.0, 2.0, -torch.inf, -1.0]]), 20000
    cfg, generator = Config(temperature=0.7), torch.Generator().manual_seed(0)
    share = codila.draw_tokens(logits.expand(n, -1), cfg, generator).bincount(minlength=5) / n
    torch.testing.assert_close(share, (logits[0] / 0.7).softmax(-1), atol=0.012, rtol=0)
    some = codila.draw_tokens(logits.expand(n, -1), dataclasses.replace(cfg, top_p=0.9), generator)
    share = some.bincount(minlength=5) / n  # 0.77 + 0.18 reaches 0.9
    want = (logits[0] / 0.7).masked_fill(torch.tensor([False, True, False, True, True]), -torch.inf).softmax(-1)
    torch.testing.assert_close(share, want, atol=0.012, rtol=0)
    a, b = (codila.draw_tokens(logits, Config(), torch.Generator().manual_seed(seed)) for seed in (1, 2))
    assert a.item() == b.item() == 2  # greedy: free of the seed


def test_a_known_token_that_only_one_model_has_is_refused(model):
    cfg, alien = Config(**PLAIN), META["shared_vocab"]
    with pytest.raises(ValueError, match=str(alien)):
        generate(model, torch.tensor([[1]]), cfg, canvas_ids=torch.tensor([[META["mask_id"], alien]]))
    batch = [{"prompt_ids": [1], "answer_ids": [2, alien, 3, META["eos_id"]]}]
    with pytest.raises(ValueError, match=str(alien)):
        inputs = make_training_inputs(batch, draws_of(2, 5, [[True, True]]), cfg)
        training_loss(model, inputs, cfg)


# ------------------------------------------------------------------------------------------------------------- training


def test_noise_masks_whole_blocks_behind_the_prompt():
    cfg = Config(**PLAIN, block_sizes="2,3,8", max_pad=9)
    batch = [{"prompt_ids": [1] * P, "answer_ids": [2] * A + [META["eos_id"]]} for P, A in ((3, 14), (9, 0), (1, 30))]
    found = collections.Counter()
    for seed in range(60):
        for weighting in ("count", "inverse_t", "uniform"):
            cfg.weighting = weighting
            draws = codila.draw_noise(batch, cfg, torch.Generator().manual_seed(seed))
            inputs = make_training_inputs(batch, draws, cfg)
            B, S = draws[0]["block_size"], inputs["input_ids"].shape[1]
            assert S % 8 == 0 and 32 <= S <= 48
            found[B] += 1
            for r, row in enumerate(batch):
                P, masked = len(row["prompt_ids"]), inputs["input_ids"][r] == META["mask_id"]
                N = len(draws[r]["block_masked"])
                assert N == (S - P) // B and not masked[:P].any() and not masked[P + N * B :].any()
                blocks = masked[P : P + N * B].view(N, B)
                assert torch.equal(blocks.any(1), blocks.all(1)) and blocks.all(1).tolist() == draws[r]["block_masked"]
                if weighting == "count":
                    assert 1 <= blocks.all(1).sum() <= N and draws[r]["weight"] == N / blocks.all(1).sum().item()
                clean = torch.tensor((row["prompt_ids"] + row["answer_ids"] + [META["eos_id"]] * S)[:S])
                assert torch.equal(inputs["input_ids"][r][~masked], clean[~masked])
                used = inputs["weights"][r].any(-1)
                assert torch.equal(inputs["block_ids"][r][used], clean[inputs["block_pos"][r][used]])
    assert set(found) == {2, 3, 8}
    again = [codila.draw_noise(batch, cfg, torch.Generator().manual_seed(4)) for _ in range(2)]
    assert again[0] == again[1]


def test_partial_blocks(model):
    """Known tokens of a masked block are seen, forced and not counted; the loss is that of the rest."""
    cfg = Config(**PLAIN, p_partial=1.0, block_sizes="4")
    case = CASES["train"][0]
    input_ids, P = field(case, "input_ids")[:1], case["prompt_len"][0]
    batch = batch_of(input_ids, [P])
    draws = codila.draw_noise(batch, cfg, torch.Generator().manual_seed(1))
    assert any(map(any, draws[0]["known"]))
    draws = draws_of(4, input_ids.shape[1], [[True, False, True] + [False] * ((input_ids.shape[1] - P) // 4 - 3)])
    draws[0]["known"][0] = [True, False, True, False]
    inputs = make_training_inputs(batch, draws, cfg)
    noisy = input_ids[0].clone()
    noisy[[P + 1, P + 3, *range(P + 8, P + 12)]] = META["mask_id"]
    assert torch.equal(inputs["input_ids"][0], noisy)
    assert (inputs["weights"][0] > 0).tolist() == [[False, True, False, True], [True] * 4]
    with torch.no_grad():
        nll, _, weights = codila.block_nll(model, inputs, cfg)
        logp = marginals(model, noisy[None])
        embeds = soft_embed(model, logp.exp(), cfg)[P : P + 4]
        for j in (0, 2):
            embeds[j] = model.aux_model.model.embed_tokens(input_ids[0, P + j])
        _, logits = forced_logits(model, embeds, input_ids[0, P : P + 4], cfg)
    want = -logits.log_softmax(-1)[torch.arange(4), input_ids[0, P : P + 4]]
    torch.testing.assert_close(nll[0], want, atol=1e-5, rtol=0)
    loss, _ = training_loss(model, inputs, cfg)
    maskable = (input_ids.shape[1] - P) // 4 * 4
    assert loss.item() == pytest.approx((want[[1, 3]].sum() + nll[1].sum()).item() / maskable, rel=1e-5)


def test_a_row_or_batch_without_masked_blocks_counts_0(model):
    cfg = Config(**PLAIN)
    batch = [{"prompt_ids": [1, 2], "answer_ids": [3, 4, 5, META["eos_id"]]} for _ in range(2)]
    one = make_training_inputs(batch, draws_of(2, 6, [[True, False], [False, False]], [0.5, 0.5]), cfg)
    assert training_loss(model, one, cfg)[0].item() > 0
    model.zero_grad()
    for inputs in (
        make_training_inputs(batch, draws_of(2, 6, [[False, False], [False, False]], [0.5, 0.5]), cfg),
        {key: value[1:] for key, value in one.items()},
    ):
        loss, _ = training_loss(model, inputs, cfg)
        loss.backward()
        assert loss.item() == 0
        assert all(p.grad is None or not p.grad.any() for p in model.aux_model.parameters())


def test_slices_of_a_batch_add_up_to_it(model):
    cfg = Config(**PLAIN, p_partial=0.5)
    lengths = ((3, 9), (5, 4), (1, 7), (2, 2))
    batch = [{"prompt_ids": [1] * P, "answer_ids": [9] * A + [META["eos_id"]]} for P, A in lengths]
    generator = torch.Generator().manual_seed(0)
    for stage in codila.stages(cfg)[1:]:
        target = model.backbone if stage.name == "dlm" else model
        inputs = stage.build(batch, stage.draw(batch, cfg, generator), cfg)
        assert len({len(value) for value in inputs.values()}) == 1
        with torch.no_grad():
            whole = stage.loss(target, inputs, cfg)[0]
            parts = [stage.loss(target, {k: v[i::3] for k, v in inputs.items()}, cfg)[0] for i in range(3)]
        assert whole.item() == pytest.approx(sum(parts).item(), rel=1e-5)


def test_masked_diffusion_of_the_backbone(model):
    cfg = Config(**PLAIN, max_pad=0)
    batch = [{"prompt_ids": [1] * P, "answer_ids": [7, 8, 9] * 3 + [META["eos_id"]]} for P in (2, 6)]
    total, generator = 0.0, torch.Generator().manual_seed(0)
    for _ in range(300):
        inputs = make_training_inputs(batch, codila.draw_token_noise(batch, cfg, generator), cfg)
        total += inputs["weights"].sum().item() / 300
        for r, row in enumerate(batch):
            P, ids = len(row["prompt_ids"]), inputs["input_ids"][r]
            masked, used = ids == META["mask_id"], inputs["weights"][r, :, 0] > 0
            clean = torch.tensor((row["prompt_ids"] + row["answer_ids"] + [META["eos_id"]] * 99)[: len(ids)])
            assert not masked[:P].any() and torch.equal(ids[~masked], clean[~masked])
            assert torch.equal(inputs["block_pos"][r, used, 0], masked.nonzero()[:, 0])
            assert torch.equal(inputs["block_ids"][r, used, 0], clean[masked])
    assert total == pytest.approx(1, rel=0.05)  # the 1/t weights average to the plain mean
    with torch.no_grad():  # the row before predicts, everything sees everything
        want = sum(
            weights.sum() * -shifted_logits(model, ids[None]).log_softmax(-1)[pos, token]
            for ids, *blocks in zip(*(inputs[key] for key in ("input_ids", "weights", "block_pos", "block_ids")))
            for weights, pos, token in zip(*blocks)
        )
        assert codila.dlm_loss(model.backbone, inputs, cfg)[0].item() == pytest.approx(want.item(), rel=1e-5)


def tiny_pair(**changes):
    cfg = Config(**codila.TINY | dict(device="cpu", dtype="float32", compile=False) | changes)
    backbone, tokenizer = codila.load("tiny", cfg, training=True)
    return codila.enter_stage(backbone, "codila", None, cfg), tokenizer, cfg


def test_only_the_local_model_learns_and_it_overfits_one_batch():
    model, tokenizer, cfg = tiny_pair(block_sizes="4", p_partial=0.0, weighting="uniform")
    before = {name: p.clone() for name, p in model.named_parameters()}
    rows = [codila.encode(tokenizer, *problem) for problem in codila.read_problems(cfg)[0][:4]]
    stage = codila.stages(cfg)[-1]
    inputs = stage.build(rows, stage.draw(rows, cfg, torch.Generator().manual_seed(0)), cfg)
    assert model.banned.nonzero()[:, 0].tolist() == [cfg.mask_id]  # the tags are rows of the AR model alone
    learnt = [p for p in model.parameters() if p.requires_grad]
    assert len(learnt) == len([*model.aux_model.parameters()])
    optimizer, losses = torch.optim.AdamW(learnt, 1e-2), []
    model.train()
    assert not model.backbone.training and model.aux_model.training
    for _ in range(40):
        loss, _ = stage.loss(model, inputs, cfg)
        loss.backward()
        assert all(p.grad is not None for p in learnt)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    assert losses[-1] < 0.2 * losses[0]
    for name, p in model.named_parameters():
        assert torch.equal(p, before[name]) == name.startswith("backbone.")
        assert name.startswith("aux_model.") or p.grad is None


def test_checkpointing_changes_no_number(model):
    case = CASES["train"][0]
    inputs, cfg = train_inputs(case)
    losses, grads = [], []
    for checkpointing in (False, True):
        model.zero_grad()
        loss, _ = training_loss(model, inputs, dataclasses.replace(cfg, checkpointing=checkpointing))
        loss.backward()
        losses.append(loss.item())
        grads.append(model.aux_model.model.embed_tokens.weight.grad.clone())
    assert losses[0] == pytest.approx(losses[1], rel=1e-6)
    torch.testing.assert_close(*grads, atol=1e-6, rtol=1e-5)


def test_the_pad_row_learns(model):
    """EOS is padding and a target: hard look-ups of it must have a gradient."""
    changes = dict(pad_token_id=META["eos_id"], tie_word_embeddings=False)
    aux_model = Qwen3ForCausalLM(Qwen3Config(**model.aux_model.config.to_dict() | changes))
    assert aux_model.model.embed_tokens.padding_idx == META["eos_id"]
    Pair(model.backbone, aux_model, LINK)
    aux_model.model.embed_tokens(torch.tensor([META["eos_id"]])).sum().backward()
    assert aux_model.model.embed_tokens.weight.grad[META["eos_id"]].any()


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


def pair_of(root, aux, model="dream"):
    cfg = Config(model=str(root / model), aux=str(aux), device="cpu", dtype="float32", compile=False)
    backbone, tokenizer = codila.load(cfg.model, cfg, training=False)
    return codila.enter_stage(backbone, "codila", cfg.model, cfg).train(False), tokenizer, cfg


def test_dream_and_qwen3_load_as_a_pair_without_remote_code(folders):
    root, plain, dream_ids, qwen_ids = folders
    model, tokenizer, cfg = pair_of(root, root / "qwen3")
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
    assert model.link == dict(vocab_len=dream_ids["<|beginoftext|>"], think_id=qwen_ids["<think>"],
                              end_think_id=qwen_ids["</think>"], turn_end_id=dream_ids["<|im_end|>"])  # fmt: skip
    assert not model.banned.any()
    assert (cfg.eos_id, cfg.turn_end_id) == (dream_ids["<|endoftext|>"], dream_ids["<|im_end|>"])
    for mode in codila.MODES:
        cfg = dataclasses.replace(cfg, mode=mode, max_new_tokens=20, temperature=2.0, tau=2.0)
        seq_ids, _ = generate(model, ids[:1], cfg, None, torch.Generator().manual_seed(0))
        assert seq_ids.max() < model.link["vocab_len"]
    row = codila.encode(tokenizer, [{"content": "the"}], "then")
    assert row == {"prompt_ids": [TEXT.index("the")], "answer_ids": [TEXT.index("the"), TEXT.index("n"), cfg.eos_id]}
    packed = codila.pack([row], cfg)[0]["answer_ids"]  # the turn ends, then the text
    assert packed == row["answer_ids"][:-1] + [cfg.turn_end_id, cfg.eos_id]


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
    assert "not a pair" in refused(capsys, *head, tmp_path / "other")
    write_qwen3(tmp_path / "nearly", text=TEXT[:-2] + ["the", "th"])
    assert "not a pair" in refused(capsys, *head, tmp_path / "nearly")
    write_qwen3(tmp_path / "untagged", special=["<tool_response>"])
    assert "<think>" in refused(capsys, *head, tmp_path / "untagged")
    write_qwen3(tmp_path / "short", rows=len(TEXT) + len(CONTROL) + 3)
    assert "do not fit" in refused(capsys, *head, tmp_path / "short")
    assert "nowhere" in refused(capsys, *head, tmp_path / "nowhere")


def test_tags_of_ones_own(folders, tmp_path):
    """Two models of one tokenizer: unused tokens serve as tags, and are never written; nor is the mask."""
    ids = write_qwen3(tmp_path / "ar", special=["<file>", "</file>"])
    torch.manual_seed(2)
    cfg = Config(model=str(tmp_path / "ar"), aux=str(tmp_path / "ar"), tags="<file> </file>", device="cpu",
                 dtype="float32", temperature=5.0, max_new_tokens=60)  # fmt: skip
    backbone, _ = codila.load(cfg.model, cfg, training=True)
    assert cfg.mask_id == len(ids)  # a new token
    model = codila.enter_stage(backbone, "codila", None, cfg).train(False)
    assert model.link["vocab_len"] == len(ids)
    assert model.banned.nonzero()[:, 0].tolist() == [ids["<file>"], ids["</file>"]]
    for mode in codila.MODES:
        cfg.mode = mode
        seq_ids, _ = generate(model, torch.tensor([[5]]), cfg, None, torch.Generator().manual_seed(0), stop_ids=())
        assert not {ids["<file>"], ids["</file>"], cfg.mask_id} & set(seq_ids[0].tolist())
        assert seq_ids.max() < len(ids)


def test_train_save_reload_a_released_pair(folders, tmp_path, capsys):
    root = folders[0]
    data = tmp_path / "rows.jsonl"
    data.write_text("\n".join(json.dumps({"prompt": "the", "response": "then " * n}) for n in range(1, 7)))
    out = tmp_path / "out"
    args = ["--train", "--model", root / "dream", "--aux", root / "qwen3", "--data", data, "--out", out, *ON_CPU,
            "--steps", 2, "--batch_size", 2, "--max_new_tokens", 8, "--problems", 2, "--lr", 1e-3]  # fmt: skip
    assert codila.main([str(arg) for arg in args]) == 0
    state = load_file(out / "training_state.safetensors")
    plain = AutoModelForCausalLM.from_pretrained(out / "aux")  # a plain Hugging Face folder, as is `out` itself
    for name, p in plain.named_parameters():
        assert torch.equal(p, state[f"param.aux_model.{name}"])
    assert not any(key.startswith("param.backbone") for key in state)
    saved = AutoModelForCausalLM.from_pretrained(out).state_dict()
    assert all(torch.equal(saved[name], p) for name, p in folders[1].state_dict().items())  # frozen
    model, _, cfg = pair_of(tmp_path, "unused", "out")
    assert model.link == pair_of(root, root / "qwen3")[0].link and cfg.turn_end_id is not None
    assert torch.equal(model.aux_model.lm_head.weight, plain.lm_head.weight)
    assert codila.main([str(arg) for arg in ["--generate", "--model", out, "--prompt", "the", *ON_CPU]]) == 0
    line = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert [row["label"] for row in line["rows"]] == ["codila static", "plain AR, same weights"]


# ---------------------------------------------------------------------------------------------------- the built-in task


def test_the_checker_reads_programs():
    rng = random.Random(0)
    names = codila.NAMES
    assert len(set(names)) == 12 and all(len(set(codila.names_of(theme))) == 6 for theme in codila.THEMES)
    for _ in range(100):
        prompt, text = codila.problem(rng)
        count, theme = int(prompt[0]), prompt.split()[1]
        assert codila.is_right(prompt, text, "") and len(text) == 12 * count
        assert not codila.is_right(prompt, text[:-1], "") and not codila.is_right(prompt, text + text[:12], "")
        alien = next(name for name in names if name not in codila.names_of(theme))
        assert not codila.is_right(prompt, alien + text[3:], "")
        spot = rng.randrange(3)
        broken = text[:spot] + rng.choice([c for c in "abcdef1234" if c != text[spot]]) + text[spot + 1 :]
        assert codila.is_right(prompt, broken, "") == (broken[:3] in codila.names_of(theme))
    assert codila.is_right("What?", " 4 ", "4")  # other data: as it stands


def test_a_line_is_12_tokens():
    cfg = Config(**codila.TINY | dict(device="cpu", dtype="float32"))
    _, tokenizer = codila.load("tiny", cfg, training=True)
    for messages, answer in codila.read_problems(cfg)[0][:50]:
        row = codila.encode(tokenizer, messages, answer)
        assert len(row["prompt_ids"]) == 8 and len(row["answer_ids"]) == 12 * int(messages[0]["content"][0]) + 1
        assert tokenizer.unk_token_id not in row["prompt_ids"] + row["answer_ids"]


def test_train_and_generate(tmp_path, capsys):
    out = tmp_path / "run"
    args = ["--train", "--generate", "--out", out, "--steps", 3, "--ar_steps", 2, "--batch_size", 4, "--problems", 2]
    assert codila.main([str(arg) for arg in args + ON_CPU]) == 0
    lines = capsys.readouterr().out.splitlines()
    rows = json.loads(lines[-1])["rows"]
    labels = [row["label"] for row in rows]
    assert labels[0] == "one token a forward" and labels[-1] == "plain AR"
    for B in (2, 4, 8):
        assert f"codila, K=B={B}" in labels and f"independent tokens, K={B}" in labels
    assert sum("dynamic" in label for label in labels) >= 2
    for row in rows:
        assert row["problems"] == 2 and row["forwards"] > 0 and 0 <= row["right"] <= 2
        assert any(line.startswith(row["label"] + ": new_tokens") for line in lines)
    for name in ("model.safetensors", "aux/model.safetensors", "ar/model.safetensors", "settings.json"):
        assert (out / name).is_file()


def test_infill(tmp_path, capsys):
    out = tmp_path / "run"
    train = ["--train", "--steps", 2, "--ar_steps", 0, "--batch_size", 2, "--out", out, *ON_CPU]
    assert codila.main([str(arg) for arg in train]) == 0
    capsys.readouterr()
    prefix, suffix = "2 red lines 0042:aα1=", "+aα1;"
    for folder in (["--model", out], ["--out", out]):
        args = [*folder, "--infill", prefix, suffix, "--max_new_tokens", "3", *ON_CPU]
        assert codila.main([str(arg) for arg in args]) == 0
        text, line = capsys.readouterr().out.splitlines()[-2:]
        assert text.startswith(prefix + "[") and text.endswith("]" + suffix)
        line = json.loads(line)
        assert (line["rows"], line["new_tokens"], line["forwards"]) == (1, 3, 1)
    data = tmp_path / "rows.jsonl"
    data.write_text("".join(json.dumps({"prompt": prefix, "suffix": s, "task_id": s}) + "\n" for s in (suffix, "")))
    args = ["--model", out, "--infill", "--data", data, "--max_new_tokens", "3", "--mode", "dynamic", *ON_CPU]
    assert codila.main([str(arg) for arg in args]) == 0
    assert json.loads(capsys.readouterr().out.splitlines()[-1])["rows"] == 2
    assert "--infill" in refused(capsys, "--model", out, "--infill", "one")
    assert "--infill" in refused(capsys, "--model", out, "--infill")
    data.write_text('{"prompt": "a", "suffix": "b"}\n{"prompt": "a"}\n')
    assert "line 2" in refused(capsys, "--model", out, "--infill", "--data", data, *ON_CPU)
    data.write_text("\n")
    assert "no rows" in refused(capsys, "--model", out, "--infill", "--data", data, *ON_CPU)


@pytest.mark.parametrize("flags", [
    "--mode best", "--conf high", "--weighting none", "--block_size 0", "--blocks_per_step 0", "--window -2",
    "--topk -1", "--p_partial 1.5", "--p_partial nan", "--block_sizes 2,x", "--block_sizes 0", "--table 2,",
    "--max_pad -1", "--tokens_per_step -1", "--tau nan", "--lam nan", "--dlm_steps -2", "--dlm_lr 0", "--tags one",
])  # fmt: skip
def test_settings_that_cannot_work(capsys, flags):
    name = flags.split()[0][2:]
    assert name.split("_")[0] in refused(capsys, "--generate", *flags.split(), *ON_CPU)


def test_every_promise_of_the_header_has_a_place():
    places = re.findall(r"->([\w\s,]+)", re.search(r"Implements(.*?)Left out", codila.__doc__, re.S)[1])
    assert len(places) >= 4
    for name in re.findall(r"\w+", " ".join(places)):
        assert callable(getattr(codila, name)), name
