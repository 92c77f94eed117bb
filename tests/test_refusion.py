"""ReFusion: the reference vectors, and what must hold for any model and any setting."""

import dataclasses
import math

import pytest
import torch
from conftest import golden, load_backbone, named, random_lm, watched

import common
import refusion
from common import Decoder, dense, walk
from refusion import Config, draw_noise, generate, make_training_inputs, training_loss

CASES, TENSORS, FOLDER = golden("refusion")
IDS = CASES["special_tokens"]
PLAIN = dict(mask_id=IDS["mask"], eos_id=IDS["eos"], device="cpu", dtype="float32")


@pytest.fixture(scope="module")
def model():
    return load_backbone(FOLDER / "model")


def decode_config(case):
    return Config(
        **PLAIN, max_new_tokens=case["gen_length"], slot_size=case["slot_size"], serial_blocks=case["serial_num_blocks"],
        tau_slot=case["slot_threshold"], tau_token=case["token_threshold"], temperature=case["temperature"],
    )  # fmt: skip


def decode(model, case):
    cfg = decode_config(case)
    decoder = Decoder(model, len(case["prompt_ids"]) + cfg.max_new_tokens + cfg.slot_size - 1)
    ids, record = generate(model, torch.tensor([case["prompt_ids"]]), cfg, decoder)
    return ids[0].tolist(), record, decoder


# --------------------------------------------------------------------------------------------------- reference vectors


@named(CASES["decode"])
def test_decoding_equals_the_published_implementation(model, case, monkeypatch):
    calls = watched(monkeypatch, lambda decoder, ids, positions, *_: (ids[0].tolist(), positions[0].tolist()))
    ids, record, _ = decode(model, case)
    P = len(case["prompt_ids"])
    assert ids == case["expected_output_ids"]
    assert record["buffer_ids"].tolist() == case["expected_buffer_ids"]
    assert record["buffer_pos"].tolist() == case["expected_buffer_positions"]
    assert sorted(record["buffer_pos"].tolist()) == case["expected_output_positions"]
    assert record["forwards"] == case["n_forwards"]
    assert record["tpf_mean_of_ratios"] == pytest.approx(case["tpf_mean_of_ratios"], abs=1e-6)
    assert record["rounds"] == len(case["rounds"]) and len(record["fixed_round"]) == len(ids) - P
    # every call's input: ours packs the rows of a completion in one sequence
    trace_ids = TENSORS[f"decode/{case['name']}/trace_input_ids"].tolist()
    trace_pos = TENSORS[f"decode/{case['name']}/trace_position_ids"].tolist()
    start = 0
    for (rows, query_len, _), (ids, positions) in zip(case["forward_shapes"], calls, strict=True):
        n = rows * query_len
        assert (ids, positions) == (trace_ids[start : start + n], trace_pos[start : start + n])
        start += n
    assert start == len(trace_ids)


@named(CASES["decode"])
def test_cache_equals_one_uncached_forward(model, case):
    """With 'and not (same completion, other row)' the cache is a recompute; without it only where no two rows were."""
    _, record, decoder = decode(model, case)
    ids, positions = record["buffer_ids"][None], record["buffer_pos"][None]
    n = ids.shape[1]
    event = torch.tensor(case["buffer_completion_event"])
    row = torch.tensor(case["buffer_completion_row"])

    def rows_apart(b, h, q, kv):
        return (kv <= q) & ~((event[q] == event[kv]) & (event[q] >= 0) & (row[q] != row[kv]))

    several_rows = bool((row > 0).any())
    for mask_mod, exact in ((rows_apart, True), (common.causal(), not several_rows)):
        fresh = Decoder(model, n)
        fresh(ids, positions, dense(mask_mod, 1, n, n), torch.arange(n))
        gaps = [max((a[:, :, :n] - b[:, :, :n]).abs().max().item() for a, b in zip(ours, theirs))
                for ours, theirs in zip(decoder.kv_cache.layers, fresh.kv_cache.layers)]  # fmt: skip
        assert gaps[0] < 1e-5, "layer 0 depends on token and position alone"
        assert (max(gaps) < 1e-4) == exact
    if (key := f"decode/{case['name']}/final_keys") in TENSORS:
        for layer, (k, v) in enumerate(decoder.kv_cache.layers):
            assert (k[0, :, :n] - TENSORS[key][layer]).abs().max() < 1e-4
            assert (v[0, :, :n] - TENSORS[key.replace("keys", "values")][layer]).abs().max() < 1e-4


def training_batch(case):
    ids = TENSORS[f"train/{case['name']}/input_ids"].tolist()
    lengths = zip(case["prompt_lengths"], case["total_lengths"])
    return [{"prompt_ids": row[:P], "answer_ids": row[P:N]} for row, (P, N) in zip(ids, lengths)]


@named(CASES["train"])
def test_training_step_equals_the_published_implementation(model, case):
    tensor = {key.split("/", 2)[2]: value for key, value in TENSORS.items() if key.startswith(f"train/{case['name']}/")}
    cfg, batch = Config(**PLAIN), training_batch(case)
    inputs = make_training_inputs(batch, case["draws"], cfg)
    L = inputs["input_ids"].shape[1]
    for row, N in enumerate(case["total_lengths"]):
        assert inputs["input_ids"][row, :N].tolist() == tensor["built_input_ids"][row, :N].tolist()
    assert torch.equal(inputs["labels"], tensor["built_labels"][:, :L].long())
    assert torch.equal(inputs["is_masked"], tensor["built_masked"][:, :L])
    assert torch.equal(inputs["position_ids"], tensor["built_position_ids"][:, :L].long())
    assert (tensor["built_labels"][:, L:] == -100).all()
    is_target = inputs["labels"] != -100
    assert (is_target & ~inputs["is_masked"]).sum() == case["n_ar_targets"]
    assert (is_target & inputs["is_masked"]).sum() == case["n_mdm_targets"]

    mask = dense(common.causal(), 1, L, L)
    hidden = walk(model, inputs["input_ids"], inputs["position_ids"], mask)
    nll = common.token_nll(model.lm_head, hidden, inputs["labels"])
    assert (nll - tensor["token_nll"][:, :L]).abs().max() < 1e-4
    if "logits" in tensor:
        N = min(case["total_lengths"])
        assert (model.lm_head(hidden)[:, :N] - tensor["logits"][:, :N]).abs().max() < 1e-4
        assert torch.equal(mask[0, 0, :N, :N].expand(len(batch), N, N), tensor["attention_allowed"][:, :N, :N])

    model.zero_grad()
    loss, logs = training_loss(model, inputs, cfg)
    loss.backward()
    assert logs["ar"].item() == pytest.approx(case["loss_ar"], abs=1e-5)
    assert logs["mdm"].item() == pytest.approx(case["loss_mdm"], abs=1e-5)
    assert loss.item() == pytest.approx(case["loss_total"], abs=1e-5)
    params = dict(model.named_parameters())
    for name, norm in case["grad_norms"].items():
        assert params[name].grad.norm().item() == pytest.approx(norm, rel=1e-4, abs=1e-6), name
    for key, grad in tensor.items():
        if key.startswith("grad/"):
            assert (params[key[5:]].grad - grad).norm() <= 1e-4 * grad.norm() + 1e-7

    paper = make_training_inputs(batch, case["draws"], dataclasses.replace(cfg, loss_norm="paper"))
    loss, logs = training_loss(model, paper, cfg)
    expected = case["derived_paper_normalised"]
    expected = expected if isinstance(expected, dict) else {"loss_total": expected}
    got = {"ar": logs["ar"].item(), "mdm": logs["mdm"].item(), "total": loss.item()}
    for key, value in expected.items():
        name = next(name for name in got if name in key)
        assert got[name] == pytest.approx(value, abs=1e-5), key


# -------------------------------------------------------------------------------------------------- decoding invariants


@pytest.fixture(scope="module")
def random_model():
    return random_lm("qwen3", 3)


def settings(**changes):
    base = dict(PLAIN, mask_id=39, eos_id=-1, max_new_tokens=24, slot_size=4, serial_blocks=1, tau_slot=0.1,
                tau_token=0.1)  # fmt: skip
    return Config(**(base | changes))


PROMPT = torch.tensor([[3, 1, 4, 1, 5]])


@pytest.mark.parametrize("slot_size, blocks", [(4, 1), (4, 3), (4, 6), (8, 1), (1, 1), (24, 1)])
@pytest.mark.parametrize("tau_slot, tau_token", [(0.05, 0.05), (0.2, 0.6), (1, 0.2), (0.1, 1), (0.1, 0)])
def test_every_position_is_written_once_and_progress_is_bounded(random_model, slot_size, blocks, tau_slot, tau_token):
    cfg = settings(slot_size=slot_size, serial_blocks=blocks, tau_slot=tau_slot, tau_token=tau_token)
    ids, record = generate(random_model, PROMPT, cfg)
    slots = 24 // slot_size
    assert ids.shape == (1, 29) and ids[0, :5].tolist() == PROMPT[0].tolist()
    assert sorted(record["buffer_pos"].tolist()) == list(range(29))  # no EOS here
    assert cfg.mask_id not in ids[0, 5:].tolist()
    assert 1 <= record["rounds"] <= slots and record["forwards"] <= 2 * slot_size * slots
    if tau_slot == 1.0:
        assert record["rounds"] == slots, "exactly one slot a round"
    if tau_token == 1.0:
        assert record["forwards"] == 2 * slot_size * record["rounds"]
        assert record["tpf_mean_of_ratios"] == pytest.approx(slots / record["rounds"] / 2)
    if tau_token == 0.0:
        assert record["forwards"] == 2 * record["rounds"], "every draft is accepted"
    if blocks == slots:
        assert record["buffer_pos"].tolist() == list(range(29)), "one slot a block: left to right"


@pytest.mark.parametrize("eos_id", range(0, 39, 5))
def test_eos_ends_the_text_but_slots_before_it_are_decoded(random_model, eos_id):
    """Up to the first EOS the positions have no gap, whatever the order in which slots were finished."""
    for tau_slot, tau_token in ((0.05, 0.3), (0.3, 0.05), (0.2, 0.9)):
        cfg = settings(eos_id=eos_id, tau_slot=tau_slot, tau_token=tau_token)
        ids, record = generate(random_model, PROMPT, cfg)
        positions = sorted(record["buffer_pos"].tolist())
        new = ids[0, 5:].tolist()
        end = new.index(eos_id) + 1 if eos_id in new else 24
        assert positions[: 5 + end] == list(range(5 + end))
        assert refusion.trim(ids[0, 5:], cfg) == new[:end] and len(record["fixed_round"]) == len(new)


def test_recompute_kv_makes_the_cache_a_plain_causal_recompute(random_model):
    cfg = settings(slot_size=8, tau_slot=0.02, tau_token=0.9, recompute_kv=True)
    plain = dataclasses.replace(cfg, recompute_kv=False)
    gaps = {}
    for name, setting in (("plain", plain), ("recomputed", cfg)):
        decoder = Decoder(random_model, 29)
        _, record = generate(random_model, PROMPT, setting, decoder)
        fresh = Decoder(random_model, 29)
        mask = dense(common.causal(), 1, 29, 29)
        fresh(record["buffer_ids"][None], record["buffer_pos"][None], mask, torch.arange(29))
        gaps[name] = max((a[:, :, :29] - b[:, :, :29]).abs().max().item()
                         for x, y in zip(decoder.kv_cache.layers, fresh.kv_cache.layers) for a, b in zip(x, y))  # fmt: skip
        gaps[name + " forwards"] = record["forwards"] - 2 * record["rounds"]
    assert gaps["recomputed"] < 1e-4 < gaps["plain"], "several rows must have been completed at once"


@pytest.mark.parametrize("tau_token", [0.0, 0.05, 0.6])
@pytest.mark.parametrize("changes", [{}, {"serial_blocks": 2}, {"temperature": 1.0}, {"eos_id": 10}, {"eos_id": 20}])
def test_planning_ahead_changes_forwards_only(random_model, tau_token, changes):
    runs = []
    for plan_ahead in (False, True):
        cfg = settings(tau_slot=0.3, tau_token=tau_token, plan_ahead=plan_ahead, **changes)
        runs.append(generate(random_model, PROMPT, cfg, generator=torch.Generator().manual_seed(3)))
    (ids, plain), (ahead_ids, ahead) = runs
    assert torch.equal(ids, ahead_ids)
    for key in ("rounds", "fixed_round", "rejected", "tpf_mean_of_ratios"):
        assert plain[key] == ahead[key]
    assert ahead["forwards"] <= plain["forwards"]
    if tau_token == 0 and "eos_id" not in changes:  # all drafts stay: one plan a serial block has a forward of its own
        assert ahead["forwards"] == ahead["rounds"] + changes.get("serial_blocks", 1) < plain["forwards"]


def test_lengths_of_no_whole_slots_are_refused(random_model):
    with pytest.raises(ValueError, match="whole slots"):
        generate(random_model, PROMPT, settings(max_new_tokens=25, slot_size=5, serial_blocks=2))


# -------------------------------------------------------------------------------------------------- training invariants


def random_batch(seed, rows=4, longest=30):
    generator = torch.Generator().manual_seed(seed)
    size = torch.randint(1, longest, (rows, 2), generator=generator).tolist()
    return [{"prompt_ids": torch.randint(36, (P,), generator=generator).tolist(),
             "answer_ids": torch.randint(36, (A - 1,), generator=generator).tolist() + [37]} for P, A in size]  # fmt: skip


@pytest.mark.parametrize("masking", ["bernoulli", "fixed"])
@pytest.mark.parametrize("seed", range(8))
def test_rows_are_a_rearrangement(seed, masking):
    cfg = settings(eos_id=37, masking=masking, slot_sizes="1,4,8,32")
    batch = random_batch(seed)
    draws = draw_noise(batch, cfg, torch.Generator().manual_seed(seed))
    inputs = make_training_inputs(batch, draws, cfg)
    n_ar = 0
    for i, (row, draw) in enumerate(zip(batch, draws)):
        prompt, answer, k = row["prompt_ids"], row["answer_ids"], draw["slot_size"]
        P, A = len(prompt), len(answer)
        ids, positions = inputs["input_ids"][i].tolist(), inputs["position_ids"][i].tolist()
        masked, labels = inputs["is_masked"][i].tolist(), inputs["labels"][i].tolist()
        text = prompt + answer
        assert sorted(positions) == list(range(len(ids))) and positions[:P] == list(range(P)) and ids[:P] == prompt
        assert all(ids[j] == text[positions[j]] for j in range(P + A) if not masked[j])
        assert all(ids[j] == cfg.mask_id and labels[j] == text[positions[j]] for j in range(P + A) if masked[j])
        masked_pos = [p for p, m in zip(positions, masked) if m]
        assert masked_pos == sorted(masked_pos) and all(p >= P for p in masked_pos)
        clean_slots = [s for s in range(math.ceil(A / k)) if not draw["slot_masked"][s]]
        targets = [j for j in range(P + A) if labels[j] != -100 and not masked[j]]
        assert len(targets) == A - sum(masked) - len(clean_slots)
        for j in targets:  # the right neighbour, in text and in buffer, of the same slot
            assert labels[j] == text[positions[j] + 1] == ids[j + 1] and positions[j + 1] == positions[j] + 1
            assert (positions[j] - P) // k == (positions[j] + 1 - P) // k
        assert labels[P + A :] == [-100] * (len(ids) - P - A) and labels[:P] == [-100] * P
        assert all(0 < draw["p_mask"] <= 1 for draw in draws)
        n_ar += len(targets)
        share = sum(draw["slot_masked"]) / len(draw["slot_masked"])
        assert masking != "fixed" or abs(share - draw["p_mask"]) < 1 / len(draw["slot_masked"])
    weights = inputs["weights"][(inputs["labels"] != -100) & ~inputs["is_masked"]]
    assert weights.sum().item() == pytest.approx(min(n_ar, 1), abs=1e-5)


def test_noise_is_drawn_as_described():
    batch = [{"prompt_ids": [1], "answer_ids": [2] * 64}] * 4000
    draws = draw_noise(batch, Config(**PLAIN), torch.Generator().manual_seed(0))
    sizes = torch.tensor([draw["slot_size"] for draw in draws])
    assert all(abs((sizes == k).float().mean().item() - 0.25) < 0.03 for k in (4, 8, 16, 32))
    p = torch.tensor([draw["p_mask"] for draw in draws])
    assert p.min() >= 1e-3 and p.max() <= 1 and abs(p.mean().item() - 0.5) < 0.02
    share = torch.tensor([sum(draw["slot_masked"]) / len(draw["slot_masked"]) for draw in draws])
    assert abs((share - p).mean().item()) < 0.02
    orders = [draw["clean_slot_order"] for draw in draws]
    assert sum(order != sorted(order) for order in orders) > 1000, "shuffled"
    again = draw_noise(batch, Config(**PLAIN), torch.Generator().manual_seed(0))
    assert draws == again != draw_noise(batch, Config(**PLAIN), torch.Generator().manual_seed(1))
