"""Orthrus: the reference vectors, exactness against plain AR, and what must hold for any added weights."""

import dataclasses
import itertools
import json
import math
import shutil

import pytest
import torch
import torch.nn.functional as F
from conftest import ROOT, few_rows, golden, last_line, load_backbone, named, random_lm, spy
from safetensors.torch import load_file, save_file
from torch.nn.attention.flex_attention import create_block_mask
from transformers import AutoModelForCausalLM

import common
import orthrus
from common import Decoder, causal, dense, dual_view, full
from orthrus import VIEW, Config, accept, attach, both_views, draw_noise, forward, generate
from orthrus import make_training_inputs, make_views, training_loss

CASES, TENSORS, FOLDER = golden("orthrus")
PLAIN = dict(mask_id=CASES["mask_token_id"], device="cpu", dtype="float32")
TINY = ROOT / "tests" / "tiny" / "ar"


def view_of(variant):
    """The diffusion tensors of a variant; `ar_copy` has no file: copies."""
    file = FOLDER / "model" / f"diffusion_{variant}.safetensors"
    return load_file(file) if file.exists() else {}


@pytest.fixture(scope="module")
def models():
    """The backbone with the diffusion view of each variant."""
    made = {}

    def model(variant):
        if variant not in made:
            made[variant] = attach(load_backbone(FOLDER / "model"), view_of(variant), torch.float32)
        return made[variant]

    return model


def tensors_of(prefix):
    return {key[len(prefix) + 1 :]: value for key, value in TENSORS.items() if key.startswith(f"{prefix}.")}


# ------------------------------------------------------------------------------------------ reference vectors


def decode(model, case, monkeypatch, views=None, **changes):
    """(output, trace in the words of the vectors without the prefill, record)"""
    own = dict(block_size=case["block_size"], max_new_tokens=case["max_new_tokens"], eos_id=case["eos_token_id"])
    cfg = Config(**(PLAIN | own | changes))
    with monkeypatch.context() as patch:
        verified = spy(patch, orthrus, "accept")
        ids, record = generate(model, torch.tensor([case["prompt_ids"]]), cfg, views)
    assert record["accepted"] == [accepted_len for _, (accepted_len, _) in verified]
    cycles = []
    anchor = len(case["prompt_ids"]) - 1
    for (draft_ids, _, logits, *_), (accepted_len, _) in verified:
        cycles.append(dict(anchor_pos=anchor, block_len=len(logits), draft_tokens=draft_ids.tolist(),
                           verify_tokens=logits.argmax(-1).tolist(), n_accepted=accepted_len))  # fmt: skip
        anchor += accepted_len + 1
    return ids[0].tolist(), cycles[1:], record


@named(CASES["decode"])
def test_decoding_equals_the_published_implementation(models, monkeypatch, case):
    """And the merged form, which has no vectors, writes the same text."""
    model = models(case["variant"])
    ids, cycles, record = decode(model, case, monkeypatch)
    assert ids == case["output_ids"]
    assert cycles == case["cycles"]
    assert record["forwards"] == case["n_forward_total"] == 1 + 2 * len(cycles)
    assert len(record["fixed_round"]) == case["n_new_tokens"] and record["rounds"] == 1 + len(cycles)
    eos_id = case["eos_token_id"]
    if case["stop"] == "length":
        assert case["n_new_tokens"] == case["max_new_tokens"]
    else:
        assert ids[-1] == eos_id and eos_id not in ids[len(case["prompt_ids"]) : -1]
        last = cycles[-1] if cycles else None
        in_draft = last and eos_id in last["draft_tokens"][: last["n_accepted"]]
        assert case["stop"] == ("eos_draft" if in_draft else "eos_correction" if last else "eos_first")
    for merged in (1, 99) if len(cycles) <= 8 else ():
        ids, _, record = decode(model, case, monkeypatch, merged=merged)
        assert ids == case["output_ids"] and len(record["fixed_round"]) == case["n_new_tokens"]
        assert record["rounds"] <= record["forwards"] < 2 * record["rounds"]
        assert merged == 1 or record["forwards"] == record["rounds"], "all groups: no separate draft pass"


@named(CASES["passes"])
def test_single_passes_equal_the_published_implementation(models, case):
    model = models(case["variant"])
    K = case["block_size"]
    cfg = Config(**PLAIN, block_size=K)
    tensor = tensors_of(case["name"])
    prefix = torch.tensor(case["prefix_ids"])
    P = len(prefix)
    views = make_views(model, P + K, cfg)
    cache = views.ar.kv_cache

    def near(a, name):
        return (a - tensor[name]).abs().max() < 1e-4

    forward(views.ar, prefix, causal())
    cache.commit(P)
    keys = cache.layers[0][0][0, :, :P].clone()
    assert near(keys, "cache_key_layer0") and near(cache.layers[-1][1][0, :, :P], "cache_value_last")
    assert case["position_ids"] == list(range(P, P + K))
    block = torch.tensor([case["anchor_id"]] + [cfg.mask_id] * (K - 1))
    hidden = forward(views.diffusion, block, full()).clone()
    logits = model.lm_head(hidden)
    assert near(hidden, "diffusion_hidden") and near(logits, "diffusion_logits")
    assert logits[:-1].argmax(-1).tolist() == case["draft_tokens"]
    assert cache.cache_len == P and torch.equal(cache.layers[0][0][0, :, :P], keys), "a draft leaves the cache alone"
    verify = model.lm_head(forward(views.ar, torch.tensor(case["verify_input_ids"]), causal(P)))
    assert near(verify, "verify_logits")


def training_inputs(case, cfg):
    tensor = tensors_of(f"train_{case['name']}")
    answers = tensor.get("supervise_mask", torch.ones_like(tensor["input_ids"]))
    batch = [torch.stack([ids, is_answer.long()]) for ids, is_answer in zip(tensor["input_ids"], answers)]
    draws = {"anchors": tensor["anchors"].long(), "is_valid": tensor["anchor_valid"].bool()}
    return make_training_inputs(batch, draws, cfg)


def grad_norms(model):
    return {name: p.grad.norm().item() for name, p in model.named_parameters() if p.grad is not None}


@named(CASES["training"])
def test_training_step_equals_the_published_implementation(models, case):
    model = models(case["variant"])
    tensor = tensors_of(f"train_{case['name']}")
    B, T, M, K = case["batch"], case["seq_len"], case["num_anchors"], case["block_size"]
    cfg = Config(**PLAIN, block_size=K)
    inputs = training_inputs(case, cfg)
    keep = tensor["keep"].bool()
    assert torch.equal(inputs["block_ids"], tensor["block_ids"])
    assert torch.equal(inputs["position_ids"], tensor["position_ids"])
    assert torch.equal(inputs["weights"] > 0, keep) and keep.sum() == case["n_supervised_rows"]
    assert inputs["weights"].sum().item() == pytest.approx(1) and inputs["weights"].dtype == torch.float32
    mask = dense(dual_view(T, K, inputs["anchors"]), B, M * K, T + M * K)
    assert torch.equal(mask[:, 0], tensor["attention_mask"].bool())

    ar_hidden, hidden = both_views(model, inputs, cfg)
    assert (model.lm_head(hidden) - tensor["student_logits"]).abs().max() < 1e-4
    if "teacher_logits" in tensor:
        assert (model.lm_head(ar_hidden[:, :T]) - tensor["teacher_logits"]).abs().max() < 1e-4
    for cfg.objective in ("kl", "ce"):
        model.zero_grad()
        loss, logs = training_loss(model, inputs, cfg)
        loss.backward()
        assert (logs["rows"] - tensor[f"{cfg.objective}_rows"][keep]).abs().max() < 2e-4
        assert loss.item() == pytest.approx(case[f"loss_{cfg.objective}_mean"], rel=1e-5)
        norms = grad_norms(model)
        if cfg.objective == "kl":
            assert loss.item() * case["n_supervised_rows"] == pytest.approx(case["loss_kl_sum"], rel=1e-5)
            assert norms == pytest.approx(case["grad_norms_kl"], rel=1e-3), "those six a layer, no other"
        total = torch.tensor(list(norms.values())).square().sum().sqrt().item()
        assert total == pytest.approx(case[f"grad_norm_total_{cfg.objective}"], rel=1e-3)


def test_optimiser_trajectory_equals_the_published_one():
    trajectory = CASES["trajectory"]
    case = next(case for case in CASES["training"] if case["name"] == trajectory["uses_training_case"])
    model = attach(load_backbone(FOLDER / "model"), view_of(trajectory["start_variant"]), torch.float32)
    before = {name: p.clone() for name, p in model.named_parameters()}
    trained = [p for name, p in model.named_parameters() if "_diff." in name]
    cfg = Config(**PLAIN, block_size=case["block_size"])
    assert cfg.beta2 == trajectory["betas"][1] and cfg.weight_decay == trajectory["weight_decay"]
    optimizer = torch.optim.AdamW(trained, trajectory["lr"], trajectory["betas"], trajectory["eps"],
                                  weight_decay=trajectory["weight_decay"])  # fmt: skip
    inputs = training_inputs(case, cfg)
    losses, norms = [], []
    for _ in trajectory["losses"]:
        loss, _ = training_loss(model, inputs, cfg)
        losses.append(loss.item())
        if len(losses) == len(trajectory["losses"]):
            break
        loss.backward()
        norms.append(torch.nn.utils.clip_grad_norm_(trained, trajectory["max_grad_norm"]).item())
        optimizer.step()
        optimizer.zero_grad()
    assert losses == pytest.approx(trajectory["losses"], rel=1e-3)
    assert norms == pytest.approx(trajectory["grad_norms_before_clip"], rel=1e-3)
    for name, p in model.named_parameters():
        assert torch.equal(p, before[name]) != ("_diff." in name), "frozen means frozen, and the view learns"


@named(CASES["sampling"])
def test_sampling_equals_the_published_implementation(models, monkeypatch, case):
    tensor = tensors_of(f"sample_{case['name']}")
    tape = [[case["u_first"]]]
    for cycle in case["cycles"]:
        unused = [0.0] * (len(cycle["u_draft"]) - len(cycle["u_accept"]))
        tape += [cycle["u_draft"], cycle["u_accept"] + unused, [cycle["u_next"]]]

    def replay(n, generator, dtype):
        u = tape.pop(0) if n else []
        assert len(u) == n
        return torch.tensor(u, dtype=dtype)

    names = ("temperature", "top_k", "top_p", "block_size", "max_new_tokens")
    cfg = Config(**PLAIN, **{name: case[name] for name in names})
    cfg.eos_id = case.get("eos_token_id")
    with monkeypatch.context() as patch:
        proposed = spy(patch, orthrus, "propose")
        accepted = spy(patch, orthrus, "accept")
        drawn = spy(patch, orthrus, "draw_token")
        patch.setattr(torch, "rand", replay)
        ids, record = generate(models(case["variant"]), torch.tensor([case["prompt_ids"]]), cfg)
    assert ids[0].tolist() == case["output_ids"] and not tape
    assert record["forwards"] == case["n_forward_total"]
    assert ids[0, len(case["prompt_ids"])] == case["first_token"]
    final = [args[0][0] for args, _ in drawn[1::2]]  # per cycle one draw of drafts and one of the next token
    assert (final.pop(0) - tensor["first_dist"]).abs().max() < 1e-5
    for c, (cycle, (args, (accepted_len, next_id))) in enumerate(zip(case["cycles"], accepted[1:], strict=True)):
        draft_ids, q, verify_logits = args[:3]
        assert draft_ids.tolist() == cycle["draft_tokens"] and accepted_len == cycle["n_accepted"]
        assert (accepted_len == len(draft_ids)) == cycle["all_accepted"] == (cycle["next_dist_kind"] == "target")
        assert next_id.tolist() == [cycle["next_token"]]
        if f"cycle{c}.p" not in tensor:
            continue
        p = orthrus.sampling_probs(verify_logits, cfg)
        ratios = (p[:-1] / q).gather(-1, draft_ids[:, None])[:, 0].clamp(max=1)
        assert ratios.tolist() == pytest.approx(cycle["ratios"], abs=1e-4)
        assert (proposed[c + 1][0][0] - tensor[f"cycle{c}.diffusion_logits"][:-1]).abs().max() < 1e-4
        assert (verify_logits - tensor[f"cycle{c}.verify_logits"]).abs().max() < 1e-4
        next_dist = final[c] / final[c].sum()
        for name, probs in dict(q=q, p=p, next_dist=next_dist).items():
            assert (probs - tensor[f"cycle{c}.{name}"]).abs().max() < 1e-5


# --------------------------------------------------------------------------------- exactness against plain AR


def random_view(model, seed):
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, p in model.named_parameters():
            if "_diff." in name:
                p.copy_(torch.randn(p.shape, generator=generator) * (0.2 if "proj" in name else 1.0))
    return model


def copied(kind="qwen3"):
    return attach(random_lm(kind), {}, torch.float32)


def settings(**changes):
    return Config(**(dict(PLAIN, mask_id=39, eos_id=None, max_new_tokens=24, block_size=6) | changes))


PROMPT = torch.tensor([[3, 1, 4, 1, 5]])


def ar_text(model, prompt_ids, cfg):
    """Greedy decoding by the library's own forward, no cache."""
    ids = prompt_ids
    for _ in range(cfg.max_new_tokens):
        ids = torch.cat([ids, model(input_ids=ids, use_cache=False).logits[:, -1:].argmax(-1)], dim=1)
        if ids[0, -1] == cfg.eos_id:
            break
    return ids


@pytest.mark.parametrize("kind", ["llama", "qwen2", "qwen3"])
def test_text_is_that_of_plain_ar_whatever_the_added_weights(kind):
    """Copied and random weights, any block size, with and without EOS; merged with any number of groups."""
    model = copied(kind)
    ar = ar_text(model, PROMPT, settings())
    eos_ids = [None, ar[0, -6].item(), ar[0, 9].item(), ar[0, 5].item()]
    expected = {eos_id: ar_text(model, PROMPT, settings(eos_id=eos_id)) for eos_id in eos_ids}
    for weights in ("copied", "random"):
        if weights == "random":
            random_view(model, 1)
        for block_size in (2, 6, 32):
            for eos_id in eos_ids if block_size == 6 else eos_ids[:1]:
                for merged in (0, 2, block_size) if kind == "qwen3" else (0, 2):
                    cfg = settings(block_size=block_size, eos_id=eos_id, merged=merged)
                    ids, record = generate(model, PROMPT, cfg)
                    assert torch.equal(ids, expected[eos_id])
                    if merged in (0, block_size):  # all groups: no separate draft pass
                        assert record["forwards"] == (1 if merged else 2) * record["rounds"] - (not merged)
    for merged in (0, 2):  # the token that stands for the mask is one that the AR view writes
        cfg = settings(mask_id=ar[0, 8].item(), merged=merged)
        assert torch.equal(generate(model, PROMPT, cfg)[0], ar)


@named(CASES["decode"][::3])
def test_counts_and_the_cache_after_every_cycle(models, monkeypatch, case):
    """forwards = 1 + 2 cycles, new tokens = 1 + sum(accepted + 1), the cache a prefill of all but the anchor."""
    model = models(case["variant"])
    room = len(case["prompt_ids"]) + case["max_new_tokens"]
    views = make_views(model, room, settings(block_size=case["block_size"]))
    cache, cache_lens = views.ar.kv_cache, []
    commit = cache.commit
    monkeypatch.setattr(cache, "commit", lambda n: (commit(n), cache_lens.append(cache.cache_len)))
    ids, cycles, record = decode(model, case, monkeypatch, views, eos_id=None)
    assert cache_lens[:-1] == [cycle["anchor_pos"] for cycle in cycles]
    added = sum(n + 1 for n in record["accepted"])
    new = len(ids) - len(case["prompt_ids"])
    assert new == case["max_new_tokens"] == min(added, new) >= added - 1
    n = cache.cache_len
    fresh = Decoder(model, n)
    fresh(torch.tensor([ids[:n]]), torch.arange(n)[None], dense(causal(), 1, n, n), torch.arange(n))
    for ours, theirs in zip(cache.layers, fresh.kv_cache.layers):
        assert all((a[:, :, :n] - b[:, :, :n]).abs().max() < 1e-4 for a, b in zip(ours, theirs))


def test_the_head_is_applied_to_rows_that_are_read_alone(monkeypatch):
    model = random_view(copied(), 2)
    rows = []
    model.lm_head.register_forward_hook(lambda module, args, output: rows.append(args[0].shape[:-1].numel()))
    verified = spy(monkeypatch, orthrus, "accept")
    for merged in (0, 2):
        rows.clear()
        verified.clear()
        generate(model, torch.arange(20)[None], settings(merged=merged))
        drafts = [len(args[0]) for args, _ in verified]
        assert rows[0] == 1 and max(rows) <= 6, "of the prompt the last row alone"
        assert merged or rows == [1] + [n for m in drafts[1:] for n in (m, m + 1)]


def traced(monkeypatch):
    """Layers as on a GPU, one graph each, but run by Python."""
    layer = torch.compile(common.decoder_layer, fullgraph=True, dynamic=False, backend="eager")
    monkeypatch.setattr(common, "_compiled_layer", layer)


def test_padded_and_compiled_forwards_give_the_same_text(monkeypatch):
    """What CUDA graphs replay: queries padded to a bucket, one graph a layer and view; traced, not captured."""
    traced(monkeypatch)
    model = random_view(copied(), 6)
    cfg = settings(block_size=4, merged=2, max_new_tokens=12)
    views = make_views(model, 17, cfg)
    for view in views[:3]:
        view.compiled, view.replay.pad, view.replay.QUERY, view.replay.KEY = True, True, (16,), 64
    for cfg.merged in (0, 2):
        ids, record = generate(model, PROMPT, cfg, views)
        plain, expected = generate(model, PROMPT, cfg)
        assert torch.equal(ids, plain) and record == expected
        assert all(len(view.replay.graphs) <= 2 for view in views[:3]), "few shapes"
        assert views[2 if cfg.merged else 1].replay.graphs


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_logits_of_another_number_of_rows_are_refused(temperature):
    """One row too few would be read as a draft that all agree on, one too many as its next token."""
    cfg = settings(temperature=temperature)
    draft_ids, draft_probs = orthrus.propose(torch.randn(3, 40), cfg, None)
    for n in (0, 3, 5):
        with pytest.raises(ValueError, match=f"^3 drafts are verified by 4 rows of logits, not {n}$"):
            accept(draft_ids, draft_probs, torch.randn(n, 40), cfg, None)


def test_rejected_drafts_are_recorded_where_they_stood(monkeypatch):
    verified = spy(monkeypatch, orthrus, "accept")
    ids, record = generate(random_view(copied(), 2), PROMPT, settings(block_size=4))
    assert len(record["rejected"]) == sum(len(args[0]) - n for args, (n, _) in verified) > 0
    for number, index, token_id in record["rejected"]:
        assert record["fixed_round"][index] >= number > 0
        if record["fixed_round"][index] == number:
            assert ids[0, 5 + index] != token_id, "AR wrote another token there"


# ---------------------------------------------------------------- sampling: the law of the text is that of AR


@pytest.mark.parametrize("transform", [dict(temperature=1.3, top_k=4, top_p=1.0),
                                       dict(temperature=0.7, top_k=0, top_p=0.8),
                                       dict(temperature=1.0, top_k=3, top_p=0.9)])  # fmt: skip
def test_sampling_follows_the_ar_law(monkeypatch, transform):
    """Every pair of drafts, rejection and next token, weighted: two more tokens have the law of AR, exactly."""
    V = 5
    cfg = settings(**transform)
    generator = torch.Generator().manual_seed(0)
    texts = [(), *((a,) for a in range(V)), *itertools.product(range(V), repeat=2)]
    ar = {text: torch.randn(V, generator=generator) for text in texts}  # a row depends on the text before it
    p = {text: orthrus.sampling_probs(row[None], cfg)[0] for text, row in ar.items()}
    q = orthrus.sampling_probs(torch.randn(2, V, generator=generator), cfg)
    uniform, drawn = [], []
    monkeypatch.setattr(torch, "rand", lambda n, generator, dtype: torch.tensor(uniform[:n], dtype=dtype))
    monkeypatch.setattr(orthrus, "draw_token", lambda probs, u: drawn.append(probs[0]) or torch.tensor([0]))
    law = torch.zeros(V, V)
    rejected = set()
    for draft in itertools.product(range(V), repeat=2):
        ratios = [min(1.0, (p[draft[:i]][d] / q[i, d]).item()) if q[i, d] > 0 else 0.0 for i, d in enumerate(draft)]
        for kept in range(3):
            weight = (q[0, draft[0]] * q[1, draft[1]]).item() * math.prod(ratios[:kept])
            weight *= 1 - ratios[kept] if kept < 2 else 1
            if weight == 0:
                continue
            uniform[:] = [0.0] * kept + [1.0] * (2 - kept)  # u q < p: at 0 kept, at 1 rejected where p < q
            logits = torch.stack([ar[draft[:i]] for i in range(3)])
            assert orthrus.accept(torch.tensor(draft), q, logits, cfg, None)[0] == kept
            rejected.add(kept)
            following = weight * drawn[-1] / drawn[-1].sum()  # weighted law of the next token
            if kept == 0:  # the second token is still open
                law += following[:, None] * torch.stack([p[(a,)] for a in range(V)])
            elif kept == 1:
                law[draft[0]] += following
            else:
                law[draft] += weight
    assert rejected == {0, 1, 2}
    expected = p[()][:, None] * torch.stack([p[(a,)] for a in range(V)])
    assert (law - expected).abs().max() < 1e-6


def test_equal_laws_accept_everything_and_an_empty_residual_is_safe(monkeypatch):
    cfg = settings(temperature=1.0)
    logits = torch.randn(5, 30)
    for seed in range(50):
        generator = torch.Generator().manual_seed(seed)
        draft_ids, q = orthrus.propose(logits[:4], cfg, generator)
        assert accept(draft_ids, q, logits, cfg, generator)[0] == 4
    draws = [torch.ones(4, dtype=torch.float64), torch.tensor([0.999])]  # rounding: no draft clears u = 1
    with monkeypatch.context() as patch:
        patch.setattr(torch, "rand", lambda n, generator, dtype: draws.pop(0))
        accepted_len, next_id = accept(draft_ids, q, logits, cfg, None)
    assert accepted_len == 0 and orthrus.sampling_probs(logits[:1], cfg)[0, next_id] > 0


def test_transform_is_temperature_then_top_k_then_top_p():
    logits = torch.tensor([[2.0, 1.0, 1.0, 0.0, -1.0]])

    def probs(**changes):
        return orthrus.sampling_probs(logits, settings(**(dict(temperature=1.0, top_k=0, top_p=1.0) | changes)))[0]

    assert torch.allclose(probs(temperature=0.5), (logits[0] * 2).softmax(0))
    assert torch.allclose(probs(top_k=2), torch.cat([logits[0, :3].softmax(0), torch.zeros(2)])), "ties are kept"
    assert torch.equal(probs(top_k=99), probs())
    first = logits[0].softmax(0)[0].item()  # of .52 .19 .19 .07 .03
    assert (probs(top_p=first - 1e-3) > 0).tolist() == [True, False, False, False, False]
    assert (probs(top_p=first + 1e-3) > 0).tolist() == [True, True, False, False, False]
    cut = logits[0, :3].softmax(0)  # top-p looks at what top-k left
    assert (probs(top_k=2, top_p=cut[0].item() + 1e-3) > 0).tolist() == [True, True, False, False, False]
    assert orthrus.sampling_probs(logits.bfloat16(), settings(temperature=0.7)).dtype == torch.float32


def test_draws_are_cut_at_the_sums_of_the_probabilities():
    edges = torch.tensor([0.0, 0.1, 0.7, 1 - 2**-53], dtype=torch.float64)
    assert orthrus.draw_token(torch.tensor([[0.125, 0.0, 0.625, 0.25]]).expand(4, 4), edges).tolist() == [0, 0, 2, 3]
    assert orthrus.draw_token(torch.tensor([[0.0, 1.0]]), torch.zeros(1)).tolist() == [1], "u = 0: no empty token"


# ------------------------------------------------------------------------------------------ the merged forward


def test_merged_groups_are_what_a_separate_draft_pass_gives(models):
    """Group j = a diffusion pass over [t_j, masks] after the text before t_j; AR rows are AR's."""
    K = 5
    P = 9
    cfg = settings(mask_id=PLAIN["mask_id"], block_size=K, merged=3)
    text = torch.arange(2, 16)
    views = make_views(models("trained"), 14, cfg)
    cache = views.merged.kv_cache
    forward(views.ar, text[:P], causal())
    cache.commit(P)
    group_idx = torch.tensor([0, 2, 4])
    hidden, groups = orthrus.verify_and_draft(views, text[P:], group_idx, cfg)
    assert list(groups) == group_idx.tolist()
    assert (hidden[:5] - forward(views.ar, text[P:], causal(P))).abs().max() < 1e-4
    for j, group in groups.items():
        cache.reset()
        forward(views.ar, text[: P + j], causal())
        cache.commit(P + j)
        block = F.pad(text[P + j : P + j + 1], (0, K - 1), value=cfg.mask_id)
        assert (group - forward(views.diffusion, block, full())[1:-1]).abs().max() < 1e-4


def test_likeliest_lengths_are_those_of_the_confidences():
    c = [0.9, 0.6, 0.2, 0.7]  # a draft's probability: the first of five tokens, the others share the rest
    logits = torch.tensor([[p] + [(1 - p) / 4] * 4 for p in c]).log()
    expected = [math.prod(c[:j]) * (1 - (c + [0])[j]) for j in range(5)]
    order = sorted(range(5), key=lambda j: -expected[j])
    for count in (1, 2, 3, 5, 9):
        assert orthrus.likeliest_lengths(logits, count).tolist() == sorted(order[:count])
    assert orthrus.likeliest_lengths(torch.empty(0, 7), 3).tolist() == [0]


# ----------------------------------------------------------------------------------------- training invariants


def random_rows(seed, rows=3, length=30):
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(36, (rows, length), generator=generator)
    return [torch.stack([row, (torch.arange(length) >= 6).long()]) for row in ids]


def inputs_of(batch, cfg, seed=0):
    return make_training_inputs(batch, draw_noise(batch, cfg, torch.Generator().manual_seed(seed)), cfg)


@pytest.fixture(scope="module")
def random_model():
    return random_view(copied(), 5)


def test_the_block_mask_of_a_gpu_gives_the_same_step(random_model, monkeypatch):
    """Training on CUDA passes BlockMasks where training on a CPU passes dense masks: same rule, same result."""
    cfg = settings(anchors=3, block_size=5)
    inputs = inputs_of(random_rows(12), cfg)
    expected = both_views(random_model, inputs, cfg)
    traced(monkeypatch)
    monkeypatch.setattr(orthrus, "build_mask", lambda mask_mod, B, T, S, device: create_block_mask(
        mask_mod, B, None, T, S, device=device))  # fmt: skip
    for ours, theirs in zip(both_views(random_model, inputs, cfg), expected):
        assert (ours - theirs).abs().max() < 1e-5


def test_nothing_to_learn_gives_loss_0_and_finite_gradients(random_model):
    cfg = settings(anchors=3)
    inputs = inputs_of([row * torch.tensor([[1], [0]]) for row in random_rows(3)], cfg)
    assert (inputs["weights"] == 0).all()
    random_model.zero_grad()
    loss, _ = training_loss(random_model, inputs, cfg)
    loss.backward()
    assert loss.item() == 0
    assert all(torch.isfinite(p.grad).all() for p in random_model.parameters() if p.grad is not None)


def test_anchors_are_answer_tokens_uniform_without_replacement():
    """In packed rows the block lies inside the row; else any but the last token: after it nothing is predicted."""
    batch = random_rows(4, rows=2000)
    for packing, last in ((True, 25), (False, 28)):
        cfg = settings(anchors=4, block_size=5, packing=packing)
        draws = draw_noise(batch, cfg, torch.Generator().manual_seed(0))
        anchors = draws["anchors"]
        assert draws["is_valid"].all() and (anchors.diff() > 0).all()
        counts = anchors.flatten().bincount(minlength=30)
        assert (counts[6 : last + 1] / 8000 - 1 / (last - 5)).abs().max() < 0.01
        assert counts[6 : last + 1].sum() == 8000
    assert torch.equal(anchors, draw_noise(batch, cfg, torch.Generator().manual_seed(0))["anchors"])
    assert not torch.equal(anchors, draw_noise(batch, cfg, torch.Generator().manual_seed(1))["anchors"])
    short = [torch.tensor([list(range(12)), [i in (5, 7, 9, 11) for i in range(12)]])]
    draws = draw_noise(short, cfg, torch.Generator().manual_seed(0))
    assert draws["anchors"].tolist() == [[5, 7, 9, 0]] and draws["is_valid"].tolist() == [[True] * 3 + [False]]
    inputs = make_training_inputs(short, draws, cfg)
    assert (inputs["weights"] > 0).sum() == 5, "7, 9 after 5; 9, 11 after 7; 11 after 9; fillers do not count"
    assert inputs["position_ids"][0, 2].tolist() == [9, 10, 11, 12, 13] and inputs["input_ids"].shape == (1, 15)
    for length in (2, 3):
        inputs = inputs_of([torch.ones(2, length, dtype=torch.int64)], cfg)
        assert inputs["input_ids"].shape == (1, length + 3) and inputs["weights"].sum() == length - 2


def test_padding_changes_nothing(random_model):
    cfg = settings(anchors=3)
    batch = random_rows(8, rows=1, length=20)
    draws = draw_noise(batch, cfg, torch.Generator().manual_seed(0))
    idle = {"anchors": torch.full((1, 3), 9), "is_valid": torch.zeros(1, 3, dtype=torch.bool)}
    alone = make_training_inputs(batch, draws, cfg)
    longer = batch + random_rows(9, rows=1, length=40)
    both = make_training_inputs(longer, {key: torch.cat([draws[key], idle[key]]) for key in draws}, cfg)
    assert both["input_ids"].shape == (2, 44)
    losses = [training_loss(random_model, inputs, cfg)[0].item() for inputs in (alone, both)]
    assert losses[0] == pytest.approx(losses[1], abs=1e-5)


def test_rows_are_packed_end_to_end_or_one_by_one():
    rows = [{"prompt_ids": [10 * i, 10 * i + 1], "answer_ids": [10 * i + 2, 10 * i + 3, 37]} for i in range(3)]

    def packed(**changes):
        return [row.tolist() for row in orthrus.pack_rows(rows, settings(**changes))]

    assert packed(max_len=7) == [[[0, 1, 2, 3, 37, 10, 11], [0, 0, 1, 1, 1, 0, 0]],
                                 [[12, 13, 37, 20, 21, 22, 23], [1, 1, 1, 0, 0, 1, 1]]]  # fmt: skip
    assert [len(ids) for ids, _ in packed(max_len=64)] == [15]
    assert packed(packing=False)[1] == [[10, 11, 12, 13, 37], [0, 0, 1, 1, 1]]
    with pytest.raises(ValueError, match="no room for a block of 7"):
        packed(max_len=7, block_size=7)


def test_bfloat16_gives_the_same_step(random_model):
    """A frozen backbone in bfloat16 and a float32 view under autocast, as `train` has them on a GPU."""
    cfg = settings(anchors=3)
    inputs = inputs_of(random_rows(11), cfg)

    def step(model, cfg):
        model.zero_grad()
        with torch.autocast("cpu", torch.bfloat16, enabled=cfg.dtype == "bfloat16"):
            loss, _ = training_loss(model, inputs, cfg)
        loss.backward()
        return loss.item(), grad_norms(model)

    loss, norms = step(random_model, cfg)
    low = random_view(attach(random_lm("qwen3").bfloat16(), {}, torch.float32), 5)
    rough = step(low, dataclasses.replace(cfg, dtype="bfloat16"))
    assert rough[0] == pytest.approx(loss, rel=0.05) and rough[1].keys() == norms.keys()
    assert {p.dtype for p in low.parameters() if p.grad is not None} == {torch.float32}


# ------------------------------------------------------------------------------ the view's tensors and folders


def test_the_view_starts_as_a_copy_and_takes_only_its_own_tensors():
    for kind, names in (("llama", VIEW[:4]), ("qwen2", VIEW[:4]), ("qwen3", VIEW)):
        model = copied(kind)
        for layer in model.model.layers:
            for name in names:
                own = getattr(layer.self_attn, name)
                new = getattr(layer.self_attn, f"{name}_diff")
                assert all(torch.equal(a, b) for a, b in zip(own.parameters(), new.parameters()))
                assert own.weight.data_ptr() != new.weight.data_ptr()
        trained = {name for name, p in model.named_parameters() if p.requires_grad}
        assert trained == {name for name in model.state_dict() if "_diff." in name}
        assert {name.rsplit(".", 2)[1] for name in trained} == {f"{name}_diff" for name in names}
    view = {name: p.detach() for name, p in random_view(model, 3).named_parameters() if "_diff." in name}
    other = attach(random_lm("qwen3"), view, torch.float32).state_dict()
    assert all(torch.equal(other[name], view[name]) for name in view)
    name = min(view)
    unknown = {"model.layers.9.x_diff.weight": view[name]}
    for wrong in ({name: view[name]}, view | {name: view[name][:1]}, view | unknown):
        with pytest.raises(ValueError, match="do not belong"):
            attach(random_lm("qwen3"), wrong, torch.float32)


FEW = ["--device", "cpu", "--dtype", "float32", "--problems", "2", "--max_new_tokens", "12"]


def run(*flags):
    assert orthrus.main([str(flag) for flag in flags]) == 0


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    out = tmp_path_factory.mktemp("orthrus") / "run"
    run("--train", *FEW, *few_rows(orthrus), "--steps", 3, "--batch_size", 4, "--block_size", 5, "--out", out)
    return out


def test_a_trained_folder_holds_its_base_and_the_view(trained, capsys):
    tensors = load_file(trained / "model.safetensors")
    view = {key: tensor for key, tensor in tensors.items() if "_diff." in key}
    config = json.loads((trained / "config.json").read_text())
    layers = range(config["num_hidden_layers"])
    assert set(view) == {f"model.layers.{i}.self_attn.{name}_diff.weight" for i in layers for name in VIEW}
    assert any(not torch.equal(tensor, tensors[key.replace("_diff", "")]) for key, tensor in view.items())
    base = load_file(TINY / "model.safetensors")
    plain = {key: tensor for key, tensor in tensors.items() if key not in view}
    assert plain.keys() == base.keys() and all(torch.equal(plain[key], base[key].float()) for key in base)
    assert (config["block_size"], config["mask_token_id"]) == (5, 1)
    AutoModelForCausalLM.from_pretrained(trained)  # plain transformers gives the AR model
    run("--generate", "--model", trained, "--test", ROOT / "tests/tiny/test.jsonl", *FEW, "--merged", 2)
    rows = last_line(capsys)["rows"]
    assert [row["same_as_ar"] for row in rows] == [2, 2, 2] and "merged" in rows[2]["label"]


def test_a_view_is_read_after_its_model_was_fetched(trained, monkeypatch):
    """Of a model on the Hub, the command line has only fetched config.json."""
    loads = spy(monkeypatch, orthrus, "load")
    read_view = orthrus.read_view

    def read(name):
        assert loads
        return read_view(name)

    monkeypatch.setattr(orthrus, "read_view", read)
    run("--generate", "--model", trained, "--prompt", "Tom has 3 red pens", *FEW)


@pytest.mark.parametrize("layout", ["released", "sharded"])
def test_other_layouts_load_without_remote_code(trained, tmp_path, capsys, layout):
    """`_diff` keys among the weights of a plain Qwen3, in one file or several."""
    folder = tmp_path / layout
    shutil.copytree(trained, folder)
    tensors = load_file(folder / "model.safetensors")
    view = {key: tensor for key, tensor in tensors.items() if "_diff." in key}
    if layout == "sharded":
        (folder / "model.safetensors").unlink()
        index = {}
        for part, keys in enumerate((sorted(tensors)[::2], sorted(tensors)[1::2])):
            file = f"model-{part}.safetensors"
            save_file({key: tensors[key] for key in keys}, folder / file, metadata={"format": "pt"})
            index |= dict.fromkeys(keys, file)
        (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": index}))
    config = json.loads((folder / "config.json").read_text()) | {
        "architectures": ["OrthrusLM"], "auto_map": {"AutoModelForCausalLM": "modeling_orthrus.OrthrusLM"},
        "use_cache": False, "r": 16, "lora_alpha": 32,
    }  # fmt: skip
    del config["trained_with"]
    (folder / "config.json").write_text(json.dumps(config))
    stray = {key: tensor + 1 for key, tensor in view.items()}
    save_file(stray, folder / "model_old.safetensors", metadata={"format": "pt"})  # none of the model's files
    read = orthrus.read_view(folder)
    assert read.keys() == view.keys() and all(torch.equal(read[key], view[key]) for key in view)
    forwards = []
    for model in (folder, trained):
        run("--generate", "--model", model, "--prompt", "Tom has 3 red pens", *FEW, "--block_size", 5)
        rows = last_line(capsys)["rows"]
        assert rows[1]["same_as_ar"] == 1
        forwards.append(rows[1]["forwards"])
    assert forwards[0] == forwards[1]


def test_training_goes_on_from_a_trained_view_and_an_untrained_one_is_said(trained, tmp_path, capsys):
    out = tmp_path / "more"
    short = ["--steps", 1, "--lr", "1e-9", "--batch_size", 4]
    run("--train", "--model", trained, *FEW, *few_rows(orthrus), *short, "--out", out)
    before = orthrus.read_view(trained)
    after = orthrus.read_view(out)
    assert all(torch.allclose(after[key], before[key], atol=1e-6) for key in before)
    capsys.readouterr()
    run("--generate", "--model", TINY, "--prompt", "Tom has 3 red pens", *FEW)
    captured = capsys.readouterr()
    assert "untrained" in captured.err
    assert json.loads(captured.out.splitlines()[-1])["rows"][1]["same_as_ar"] == 1
