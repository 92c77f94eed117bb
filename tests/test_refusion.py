"""ReFusion: the reference vectors, and what must hold for any model and any setting."""

import dataclasses
import json
import math
import shutil
import types

import pytest
import torch
from conftest import ROOT, golden, load_backbone
from safetensors.torch import load_file
from transformers import Qwen3Config, Qwen3ForCausalLM

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


class Recorder(Decoder):
    """A Decoder that remembers what every forward was given."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.calls = []

    def __call__(self, input_ids, position_ids, attn_mask, write_idx):
        self.calls.append(
            (input_ids[0].tolist(), position_ids[0].tolist(), self.kv_cache.cache_len, attn_mask.shape[-1])
        )
        return super().__call__(input_ids, position_ids, attn_mask, write_idx)


def decode(model, case, **changes):
    cfg = dataclasses.replace(decode_config(case), **changes)
    decoder = Recorder(model, len(case["prompt_ids"]) + -(-cfg.max_new_tokens // cfg.slot_size) * cfg.slot_size)
    ids, record = generate(model, torch.tensor([case["prompt_ids"]]), cfg, decoder)
    return ids[0].tolist(), record, decoder


# --------------------------------------------------------------------------------------------------- reference vectors


@pytest.mark.parametrize("case", CASES["decode"], ids=lambda case: case["name"])
def test_decoding_equals_the_published_implementation(model, case):
    ids, record, decoder = decode(model, case)
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
    for (rows, query_len, cache_len), (ids, positions, _, _) in zip(case["forward_shapes"], decoder.calls, strict=True):
        n = rows * query_len
        assert (ids, positions) == (trace_ids[start : start + n], trace_pos[start : start + n])
        start += n
    assert start == len(trace_ids)


@pytest.mark.parametrize("case", CASES["decode"], ids=lambda case: case["name"])
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


@pytest.mark.parametrize("case", CASES["train"], ids=lambda case: case["name"])
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
    torch.manual_seed(3)
    config = Qwen3Config(vocab_size=40, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=2,
                         num_key_value_heads=1, head_dim=16, initializer_range=0.3, pad_token_id=None,
                         bos_token_id=None, eos_token_id=None)  # fmt: skip
    return Qwen3ForCausalLM(config).eval()


def settings(**changes):
    base = dict(
        PLAIN, mask_id=39, eos_id=-1, max_new_tokens=24, slot_size=4, serial_blocks=1, tau_slot=0.1, tau_token=0.1
    )
    return Config(**(base | changes))


PROMPT = torch.tensor([[3, 1, 4, 1, 5]])


@pytest.mark.parametrize("slot_size, blocks", [(4, 1), (4, 3), (8, 1), (1, 1), (24, 1)])
@pytest.mark.parametrize("tau_slot, tau_token", [(0.05, 0.05), (0.2, 0.6), (1.0, 0.2), (0.1, 1.0)])
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
    if blocks > 1 and slot_size * blocks == 24:
        assert record["buffer_pos"].tolist() == sorted(record["buffer_pos"].tolist())


def test_one_slot_a_block_is_left_to_right(random_model):
    _, record = generate(random_model, PROMPT, settings(slot_size=4, serial_blocks=6))
    assert record["buffer_pos"].tolist() == list(range(29))


def test_token_threshold_zero_accepts_every_draft(random_model):
    _, record = generate(random_model, PROMPT, settings(tau_token=0.0))
    assert record["forwards"] == 2 * record["rounds"]


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


def test_temperature_samples_from_softmax():
    logits = torch.randn(1, 6) * 2
    cfg = settings(temperature=0.7, mask_id=5)
    draws, _ = refusion.propose(logits.repeat(40000, 1), cfg, torch.Generator().manual_seed(0))
    freq = torch.bincount(draws, minlength=6) / 40000
    expected = torch.cat([(logits[0, :5] / 0.7).softmax(0), torch.zeros(1)])
    assert (freq - expected).abs().max() < 0.01 and freq[5] == 0
    greedy, conf = refusion.propose(logits, settings(mask_id=5), None)
    assert greedy.item() == logits[0, :5].argmax() and conf.item() == logits[0].softmax(0)[greedy.item()]


def test_sampling_repeats_with_the_seed_and_greedy_ignores_it(random_model):
    def run(temperature, seed):
        cfg = settings(temperature=temperature)
        return generate(random_model, PROMPT, cfg, generator=torch.Generator().manual_seed(seed))[0].tolist()

    assert run(1.0, 1) == run(1.0, 1) != run(1.0, 2)
    assert run(0.0, 1) == run(0.0, 2)


def test_the_mask_token_and_rows_behind_the_tokenizer_are_never_written(random_model):
    model = Qwen3ForCausalLM(random_model.config).eval()
    model.load_state_dict(random_model.state_dict())
    favourite = generate(model, PROMPT, settings())[0][0, 5:].mode().values
    with torch.no_grad():  # the mask, and three rows behind the tokenizer, beat what the model would like to write
        model.lm_head.weight[36:] = 1.5 * model.lm_head.weight[favourite]
    for tau_token in (0.0, 0.9):
        ids = generate(model, PROMPT, settings(tau_token=tau_token))[0][0, 5:].tolist()
        assert 39 not in ids and max(ids) >= 36
        assert max(generate(model, PROMPT, settings(vocab_len=36, tau_token=tau_token))[0][0, 5:].tolist()) < 36


def test_one_decoder_serves_many_prompts(random_model):
    cfg, decoder = settings(tau_slot=0.02), Decoder(random_model, 60)
    prompts = [PROMPT, torch.tensor([[7]]), torch.tensor([[2, 9, 9, 8, 1, 1, 30, 31, 32]])]
    fresh = [generate(random_model, prompt, cfg) for prompt in prompts]
    again = [generate(random_model, prompt, cfg, decoder) for prompt in prompts + prompts]
    for (ids, record), (ids2, record2) in zip(fresh + fresh, again):
        assert torch.equal(ids, ids2) and record["forwards"] == record2["forwards"]


def test_lengths_of_no_whole_slots_are_refused(random_model):
    with pytest.raises(ValueError, match="whole slots"):
        generate(random_model, PROMPT, settings(max_new_tokens=25, slot_size=5, serial_blocks=2))


DECODING = "max_new_tokens slot_size serial_blocks tau_slot tau_token temperature plan_ahead recompute_kv"


def test_generate_reads_settings_of_decoding_alone(random_model):
    cfg = settings(tau_slot=0.02)
    names = f"{DECODING} mask_id eos_id vocab_len".split()
    assert all(name in generate.__doc__ for name in names)
    bare = types.SimpleNamespace(**{name: getattr(cfg, name) for name in names})
    assert torch.equal(generate(random_model, PROMPT, bare)[0], generate(random_model, PROMPT, cfg)[0])


def test_a_list_of_eos_ids_ends_at_each_and_none_at_no_token(random_model):
    free = generate(random_model, PROMPT, settings(eos_id=None))[0][0, 5:]
    assert len(free) == 24
    one, other = free[7].item(), free[15].item()
    for eos_id in (one, [other, one]):
        cfg = settings(eos_id=eos_id, serial_blocks=6)
        new = refusion.trim(generate(random_model, PROMPT, cfg)[0][0, 5:], cfg)
        assert new[-1] in (one, other) or len(new) == 24
        assert not any(token in (one, other) for token in new[:-1]) or eos_id == one


def test_more_than_one_prompt_is_refused(random_model):
    with pytest.raises(ValueError, match="one prompt"):
        generate(random_model, PROMPT.repeat(2, 1), settings())
    with pytest.raises(ValueError, match="at least one token"):
        generate(random_model, PROMPT[:, :0], settings())


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
        if masking == "fixed":
            assert sum(draw["slot_masked"]) <= len(draw["slot_masked"])
    weights = inputs["weights"][(inputs["labels"] != -100) & ~inputs["is_masked"]]
    assert weights.sum().item() == pytest.approx(min(n_ar, 1), abs=1e-5)


def test_all_slots_clean_is_shifted_finetuning_without_the_first_token(random_model):
    batch = random_batch(5)
    draws = [dict(slot_size=64, p_mask=0.5, slot_masked=[False], clean_slot_order=[0]) for _ in batch]
    loss, logs = training_loss(random_model, make_training_inputs(batch, draws, settings(eos_id=37)), settings())
    total, count = 0.0, 0
    for row in batch:
        ids, P = torch.tensor([row["prompt_ids"] + row["answer_ids"]]), len(row["prompt_ids"])
        logp = random_model(input_ids=ids).logits.log_softmax(-1)[0, :-1].gather(-1, ids[0, 1:, None])[P:]
        total, count = total - logp.sum().item(), count + len(logp)
    assert loss.item() == pytest.approx(total / count, abs=1e-5) and logs["mdm"].item() == 0


def test_order_of_clean_slots_matters_but_for_one_layer(random_model):
    def masked_logits(model, order):
        batch = [{"prompt_ids": [1, 2, 3], "answer_ids": list(range(4, 20))}]
        draws = [dict(slot_size=4, p_mask=0.5, slot_masked=[False, False, True, False], clean_slot_order=order)]
        inputs = make_training_inputs(batch, draws, settings())
        hidden = walk(model, inputs["input_ids"], inputs["position_ids"], dense(common.causal(), 1, 19, 19))
        return model.lm_head(hidden)[inputs["is_masked"]]

    assert (masked_logits(random_model, [0, 1, 3]) - masked_logits(random_model, [3, 0, 1])).abs().max() > 1e-3
    config = Qwen3Config(**{**random_model.config.to_dict(), "num_hidden_layers": 1, "layer_types": ["full_attention"]})
    one_layer = Qwen3ForCausalLM(config).eval()
    assert (masked_logits(one_layer, [0, 1, 3]) - masked_logits(one_layer, [3, 0, 1])).abs().max() < 1e-5


def test_padding_and_its_content_change_nothing(random_model):
    cfg = settings(eos_id=37)
    short, long = random_batch(1, rows=1, longest=6), random_batch(2, rows=1, longest=30)
    draws = [dict(slot_size=4, p_mask=0.5, slot_masked=[i % 2 == 0 for i in range(math.ceil(len(row["answer_ids"]) / 4))],
                  clean_slot_order=[i for i in range(math.ceil(len(row["answer_ids"]) / 4)) if i % 2])
             for row in short + long]  # fmt: skip
    alone = make_training_inputs(short, draws[:1], cfg)
    both = make_training_inputs(short + long, draws, cfg)
    padded = {key: value[:1] for key, value in both.items()}
    n = alone["input_ids"].shape[1]
    results = []
    for inputs in (
        alone,
        padded,
        {**padded, "input_ids": padded["input_ids"].index_fill(1, torch.arange(n, padded["input_ids"].shape[1]), 9)},
    ):
        hidden = walk(random_model, inputs["input_ids"], inputs["position_ids"],
                      dense(common.causal(), 1, inputs["input_ids"].shape[1], inputs["input_ids"].shape[1]))  # fmt: skip
        results.append(common.token_nll(random_model.lm_head, hidden, inputs["labels"]))
    assert (results[0] - results[1][:, :n]).abs().max() < 1e-5 and results[1][:, n:].abs().max() == 0
    assert torch.equal(results[1], results[2])


def test_denoising_loss_is_unbiased(random_model):
    """Mean over draws of L_MDM at fixed p = 1/A sum over tokens of its mean loss, given that it is masked."""
    batch, p, K = [{"prompt_ids": [1, 2], "answer_ids": [5, 6, 7, 8, 9, 37]}], 0.4, 3
    cfg = settings(eos_id=37)
    mean, per_slot = 0.0, [[0.0, 0.0] for _ in range(K)]
    for pattern in range(2**K):  # every draw of the three slots, with its probability
        masked = [bool(pattern >> s & 1) for s in range(K)]
        probability = math.prod(p if m else 1 - p for m in masked)
        draw = dict(slot_size=2, p_mask=p, slot_masked=masked, clean_slot_order=[s for s in range(K) if not masked[s]])
        inputs = make_training_inputs(batch, [draw], cfg)
        mean += probability * training_loss(random_model, inputs, cfg)[1]["mdm"].item()
        L = inputs["input_ids"].shape[1]
        hidden = walk(random_model, inputs["input_ids"], inputs["position_ids"], dense(common.causal(), 1, L, L))
        nll = common.token_nll(random_model.lm_head, hidden, inputs["labels"])[0]
        for s in range(K):
            if masked[s]:
                here = (inputs["position_ids"][0] - 2).div(2, rounding_mode="floor").eq(s) & inputs["is_masked"][0]
                per_slot[s][0] += probability * nll[here].sum().item()
                per_slot[s][1] += probability
    assert mean == pytest.approx(sum(total / mass for total, mass in per_slot) / 6, abs=1e-5)


def test_noise_is_drawn_as_described():
    batch = [{"prompt_ids": [1], "answer_ids": [2] * 64}] * 4000
    draws = draw_noise(batch, Config(**PLAIN), torch.Generator().manual_seed(0))
    sizes = torch.tensor([draw["slot_size"] for draw in draws])
    assert all(abs((sizes == k).float().mean().item() - 0.25) < 0.03 for k in (4, 8, 16, 32))
    p = torch.tensor([draw["p_mask"] for draw in draws])
    assert p.min() >= 1e-3 and p.max() <= 1 and abs(p.mean().item() - 0.5) < 0.02
    share = torch.tensor([sum(draw["slot_masked"]) / len(draw["slot_masked"]) for draw in draws])
    assert abs((share - p).mean().item()) < 0.02
    again = draw_noise(batch, Config(**PLAIN), torch.Generator().manual_seed(0))
    assert draws == again != draw_noise(batch, Config(**PLAIN), torch.Generator().manual_seed(1))


def test_micro_batches_add_up_to_the_batch(random_model):
    cfg, batch = settings(eos_id=37), random_batch(9)
    for norm in ("code", "paper"):
        inputs = make_training_inputs(
            batch, draw_noise(batch, cfg, torch.Generator().manual_seed(1)), dataclasses.replace(cfg, loss_norm=norm)
        )
        whole = training_loss(random_model, inputs, cfg)[0].item()
        parts = [training_loss(random_model, {k: v[i::2] for k, v in inputs.items()}, cfg)[0].item() for i in range(2)]
        assert sum(parts) == pytest.approx(whole, abs=1e-5)


def test_overfits_one_batch(random_model):
    model = Qwen3ForCausalLM(random_model.config)
    cfg, batch = settings(eos_id=37, slot_sizes="4"), random_batch(3, longest=12)
    inputs = make_training_inputs(batch, draw_noise(batch, cfg, torch.Generator().manual_seed(4)), cfg)
    optimizer = torch.optim.Adam(model.parameters(), 1e-2)
    for _ in range(80):
        loss, _ = training_loss(model, inputs, cfg)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    assert loss.item() < 0.05


# -------------------------------------------------------------------------------------------------- the released layout


def test_the_released_layout_loads_without_remote_code(tmp_path):
    """Plain Qwen3 names and config, mask_token_id beside them, EOS from the tokenizer; an auto_map is harmless."""
    tiny = ROOT / "tests" / "tiny" / "ar"
    folder = tmp_path / "released"
    shutil.copytree(tiny, folder)
    config = json.loads((tiny / "config.json").read_text()) | {
        "auto_map": {"AutoModelForCausalLM": "modeling.Qwen3ForCausalLM"}, "mask_token_id": 5, "bos_token_id": 4,
    }  # fmt: skip
    (folder / "config.json").write_text(json.dumps(config))
    cfg = Config(device="cpu", dtype="float32", slot_size=4, serial_blocks=1, max_new_tokens=16)
    loaded, tokenizer = refusion.load(str(folder), cfg, torch.float32)
    assert type(loaded) is Qwen3ForCausalLM and (cfg.mask_id, cfg.eos_id) == (5, tokenizer.eos_token_id)
    assert loaded.lm_head.weight.data_ptr() == loaded.model.embed_tokens.weight.data_ptr()
    for name, tensor in load_file(tiny / "model.safetensors").items():
        assert torch.equal(loaded.state_dict()[name], tensor.float()), name
    assert generate(loaded, PROMPT, cfg)[0].shape[1] > 5
