"""D2F: reference vectors, masks, losses, decoding, checkpoint layouts, the command line."""

import dataclasses
import json
import shutil

import pytest
import torch
from conftest import golden, load_backbone
from safetensors.torch import load_file, save_file

import d2f
from common import block_causal, dense, full, own_projection, prepare, walk

CASES, TENSORS, FOLDER = golden("d2f")
IDS = CASES["meta"]["special_ids"]


def config(**kwargs):
    own = dict(mask_id=IDS["mask"], eos_id=IDS["eos"], device="cpu", dtype="float32", compile=False)
    return d2f.Config(**(own | kwargs))


def case_ids(cases):
    return [case["id"] for case in cases]


_models = {}


def student(backbone, zero=False):
    """The base of a family with its adapter attached; zero: lora_B set to zero."""
    if (backbone, zero) not in _models:
        meta = CASES["meta"]
        model = prepare(load_backbone(FOLDER / meta["model_dir"][backbone]))
        adapter, tensors = d2f.read_adapter(str(FOLDER / meta["adapter_dir"][backbone]))
        if zero:
            tensors = {key: t * (key[2] == "A") for key, t in tensors.items()}
        _models[backbone, zero] = d2f.attach_adapter(model, adapter, tensors)
    return _models[backbone, zero].requires_grad_(False)


# ---------------------------------------------------------------------------------------------------- reference vectors


@pytest.mark.parametrize("name", CASES["schedule"])
def test_schedule(name):
    u_first, u_increment, want = (TENSORS[f"schedule/{name}/{key}"] for key in ("u_first", "u_increment", "p_block"))
    torch.testing.assert_close(d2f.mask_ratios(u_first, u_increment, config()), want, rtol=0, atol=1e-7)


@pytest.mark.parametrize("case", CASES["confidence"], ids=lambda case: str(case["index"]))
def test_confidence(case):
    logits = TENSORS["confidence/logits"]
    V = logits.shape[1]
    cfg = config(mask_id=V, temperature=case["temperature"], top_p=case["top_p"] or 1.0, top_k=case["top_k"] or 0,
                 sampling_strategy=case["sampling_strategy"])  # fmt: skip
    with_mask = torch.cat([logits, torch.full((len(logits), 1), 99.0)], dim=1)  # the mask's row must not count
    pred_ids, conf, rank = d2f.confidence(with_mask, cfg, None)
    for got, key in ((pred_ids, "token"), (conf, "confidence"), (rank, "rank_score")):
        torch.testing.assert_close(got, TENSORS[f"confidence/{case['index']}/{key}"], rtol=0, atol=1e-5)


@pytest.mark.parametrize("case", CASES["data"], ids=lambda case: case["backbone"])
def test_data(case):
    is_llada = case["backbone"] == "llada"
    cfg = config(max_len=case["max_length"], long_rows="drop" if is_llada else "cut",
                 eot_id=IDS["eot_llada"] if is_llada else None)  # fmt: skip
    rows = [{"prompt_ids": s["question_ids"], "answer_ids": s["answer_ids"] + [IDS["eos"]]} for s in case["samples"]]
    got = [(row["prompt_ids"] + row["answer_ids"], len(row["prompt_ids"])) for row in d2f.pad_rows(rows, cfg)]
    assert got == [(kept["ids"], kept["prompt_len"]) for kept in case["kept"]]


def training_case(case):
    """(cfg, inputs, tensors of the case) with the published draws replayed."""
    t = {key.split("/")[-1]: value for key, value in TENSORS.items() if key.startswith(f"train/{case['id']}/")}
    cfg = config(block_size=case["block_size"], shifted=CASES["meta"]["shifted"][case["backbone"]],
                 objective=case["objective"])  # fmt: skip
    batch = [
        {"prompt_ids": ids[:P], "answer_ids": ids[P:]}
        for ids, P in zip(t["input_ids"].tolist(), t["prompt_lens"].tolist())
    ]
    draws = {key: t[key] for key in ("u_first", "u_increment", "u_token")}
    return cfg, d2f.make_training_inputs(batch, draws, cfg), t


@pytest.mark.parametrize("case", CASES["train"], ids=case_ids(CASES["train"]))
def test_training(case):
    cfg, inputs, t = training_case(case)
    B, L = t["input_ids"].shape
    assert torch.equal(inputs["input_ids"], t["noisy_ids"])
    is_masked = inputs["labels"] != -100
    at_token = is_masked.roll(int(cfg.shifted), 1)
    assert torch.equal(at_token, t["masked"]) and at_token.sum() == case["n_masked"]
    assert torch.equal(inputs["labels"][is_masked], t["input_ids"][t["masked"]])
    mask = dense(block_causal(cfg.block_size, inputs["prompt_lens"]), B, L, L)[:, 0]
    if "attention_mask" in t:
        assert torch.equal(mask, t["attention_mask"])

    model = student(case["backbone"], case["adapter"] == "zero")
    positions = torch.arange(L).expand(B, L)
    hidden = walk(model, inputs["input_ids"], positions, mask[:, None], project=d2f.adapted)
    teacher_hidden = walk(model, inputs["input_ids"], positions, dense(full(), 1, L, L))
    terms = d2f.token_distances(model, hidden, teacher_hidden, inputs["labels"], cfg)
    torch.testing.assert_close(terms.roll(int(cfg.shifted), 1), t["token_ce"], rtol=1e-5, atol=1e-5)
    assert terms.sum().item() / case["n_masked"] == pytest.approx(case["mean_ce_unweighted"], abs=1e-5)
    for key, rows in (("student_logits", hidden), ("teacher_logits", teacher_hidden)):
        if key in t:
            logits = model.lm_head(rows)
            shift = int(cfg.shifted)
            torch.testing.assert_close(logits[:, : L - shift], t[key][:, shift:], rtol=1e-4, atol=1e-4)

    loss = d2f.training_loss(model, inputs, cfg)[0].item()
    assert loss == pytest.approx(case["loss"], rel=1e-5)
    unweighted = dataclasses.replace(cfg, weighted=False)
    inputs |= {"weights": is_masked / is_masked.sum()}
    assert d2f.training_loss(model, inputs, unweighted)[0].item() == pytest.approx(case["mean_ce_unweighted"], abs=1e-5)


@pytest.mark.parametrize("case", [c for c in CASES["train"] if "derived" in c], ids=lambda case: case["id"])
def test_both_kl_directions(case):
    cfg, inputs, t = training_case(case)
    model = student(case["backbone"], case["adapter"] == "zero")
    derived = case["derived"]
    flat = inputs | {"weights": (inputs["labels"] != -100) / case["n_masked"]}
    soft = d2f.training_loss(model, inputs, cfg)[0].item()
    kl = soft - derived["mean_teacher_entropy_weighted"]
    assert kl == pytest.approx(derived["kl_teacher_student_weighted"], abs=1e-5)
    reverse = dataclasses.replace(cfg, objective="reverse")
    for x, key in ((inputs, "kl_student_teacher_weighted"), (flat, "kl_student_teacher_unweighted")):
        assert d2f.training_loss(model, x, reverse)[0].item() == pytest.approx(derived[key], abs=1e-5)


@pytest.mark.parametrize("case", CASES["train"], ids=case_ids(CASES["train"]))
def test_gradients(case):
    cfg, inputs, _ = training_case(case)
    model = student(case["backbone"], case["adapter"] == "zero").requires_grad_(True)
    d2f.training_loss(model, inputs, cfg)[0].backward()
    grads = {name: p.grad for name, p in model.named_parameters()}
    model.zero_grad()
    lora = {}
    for key in case["grad_norm_lora"]:
        match = d2f.PEFT_KEY.fullmatch(key)
        name = match[3].replace("attn_out", "o_proj")
        lora[key] = f"model.layers.{match[1] or match[2]}.self_attn.{name}.lora_{match[4]}"
    for key, want in case["grad_norm_lora"].items():
        assert grads[lora[key]].norm().item() == pytest.approx(want, rel=1e-4, abs=1e-6), key
    for key, want in case["grad_norm_full"].items():
        assert grads[key].norm().item() == pytest.approx(want, rel=1e-4, abs=1e-6), key
    assert set(grads) == set(lora.values()) | set(case["grad_norm_full"])
    total = torch.stack([grads[name].norm() for name in lora.values()]).norm().item()
    assert total == pytest.approx(case["grad_norm_lora_total"], rel=1e-4)
    if case["adapter"] == "zero":  # B = 0: no gradient reaches A, one reaches B
        assert all((grads[name].norm() == 0) == name.endswith("lora_A") for name in lora.values())


def decode_config(case):
    names = ("tau_add", "tau_act", "tau_conf", "max_new_tokens", "sampling_strategy", "temperature")
    return config(**{name: case[name] for name in names}, decode_block_size=case["block_size"],
                  top_p=case["top_p"] or 1.0, shifted=CASES["meta"]["shifted"][case["backbone"]])  # fmt: skip


@pytest.mark.parametrize("case", CASES["decode"], ids=case_ids(CASES["decode"]))
def test_decode(case):
    seq_ids, record = d2f.generate(student(case["backbone"]), torch.tensor([case["prompt_ids"]]), decode_config(case))
    assert seq_ids[0].tolist() == case["prompt_ids"] + case["output_ids"]
    assert record["forwards"] == case["n_forwards"] == len(record["passes"])
    assert record["passes"] == case["trace"]


# ----------------------------------------------------------------------------------------------------- noise and losses


def test_mask_is_the_rule_of_blocks_counted_from_the_prompts_end():
    for L, B, prompts in ((11, 3, [1, 4, 10]), (9, 16, [2]), (7, 1, [3, 1])):
        got = dense(block_causal(B, torch.tensor(prompts)), len(prompts), L, L)[:, 0].tolist()
        for row, P in zip(got, prompts):
            blk = [-1 if i < P else (i - P) // B for i in range(L)]
            assert row == [[blk[j] <= blk[i] for j in range(L)] for i in range(L)]
    one_block = dense(block_causal(16, torch.tensor([2])), 1, 9, 9)[0, 0]
    assert one_block[2:].all() and not one_block[:2, 2:].any() and one_block[:2, :2].all()
    assert torch.equal(dense(block_causal(1, torch.tensor([3])), 1, 7, 7)[0, 0, 3:], torch.ones(7, 7).tril().bool()[3:])


@pytest.mark.parametrize("backbone", CASES["meta"]["shifted"])
def test_a_block_does_not_see_what_comes_behind_it(backbone):
    """Nor does the prediction of the first token of a block see its block, where the backbone is shifted."""
    model, P, B, L, b = student(backbone), 5, 4, 17, 1
    ids = torch.randint(0, 150, (1, L), generator=torch.Generator().manual_seed(0))
    mask, positions = dense(block_causal(B, torch.tensor([P])), 1, L, L), torch.arange(L)[None]

    def predictions(ids):  # (L, V), each at the place that it predicts
        logits = model.lm_head(walk(model, ids, positions, mask, project=d2f.adapted))[0]
        return logits.roll(1, 0) if CASES["meta"]["shifted"][backbone] else logits

    first = P + b * B
    before = predictions(ids)
    for i in range(first, L):
        changed = ids.clone()
        changed[0, i] = (ids[0, i] + 1) % 150
        same = (predictions(changed) == before).all(dim=1)[1:]
        end = first + (i - first) // B * B  # the first place of the changed token's block
        assert same[: end - 1 + CASES["meta"]["shifted"][backbone]].all() and not same[end:].any()


def rows_of(lengths, seed=0):
    generator = torch.Generator().manual_seed(seed)
    ids = [[torch.randint(0, 150, (n,), generator=generator).tolist() for n in row] for row in lengths]
    return [dict(zip(("prompt_ids", "answer_ids"), row)) for row in ids]


@pytest.mark.parametrize("schedule", ["monotone", "random"])
def test_noise(schedule):
    cfg = config(block_size=4, schedule=schedule, shifted=False)
    batch = rows_of([(3, 30), (20, 13)] * 8)
    draws = d2f.draw_noise(batch, cfg, torch.Generator().manual_seed(0))
    p = d2f.mask_ratios(draws["u_first"], draws["u_increment"], cfg)
    assert p.shape == (16, 8) and p.min() >= 0.2 and p.max() <= 0.7
    assert (p.diff(dim=1) >= 0).all() == (schedule == "monotone")
    inputs = d2f.make_training_inputs(batch, draws, cfg)
    is_masked = inputs["labels"] != -100
    for row, ids, masked, P in zip(batch, inputs["input_ids"].tolist(), is_masked.tolist(), inputs["prompt_lens"]):
        clean = row["prompt_ids"] + row["answer_ids"]
        assert ids == [IDS["mask"] if m else c for m, c in zip(masked, clean)] and not any(masked[:P])
    assert 0.2 < is_masked[:, -10:].float().mean() < 0.7
    assert torch.equal(inputs["weights"] > 0, is_masked)
    again = d2f.draw_noise(batch, cfg, torch.Generator().manual_seed(0))
    assert all(torch.equal(again[key], draws[key]) for key in draws)


def test_nothing_masked_gives_a_zero_loss_and_zero_gradients():
    cfg, model = config(block_size=4), student("llada").requires_grad_(True)
    batch = rows_of([(3, 6), (4, 5)])
    draws = d2f.draw_noise(batch, cfg, None) | {"u_token": torch.ones(2, 9)}
    loss, _ = d2f.training_loss(model, d2f.make_training_inputs(batch, draws, cfg), cfg)
    loss.backward()
    assert loss.item() == 0 and all(p.grad is None or not p.grad.any() for p in model.parameters())
    model.zero_grad()


@pytest.mark.parametrize("objective", ["soft", "reverse", "hard"])
def test_loss_in_chunks_equals_the_plain_formula(objective):
    """The formula over whole logits, its gradients, the bound by the teacher's entropy."""
    cfg, model = config(block_size=4, objective=objective, shifted=True), student("dream").requires_grad_(True)
    batch = rows_of([(3, 14), (6, 11)])
    inputs = d2f.make_training_inputs(batch, d2f.draw_noise(batch, cfg, torch.Generator().manual_seed(3)), cfg)
    ids, labels, positions = inputs["input_ids"], inputs["labels"], torch.arange(17).expand(2, 17)
    mask = dense(block_causal(4, inputs["prompt_lens"]), 2, 17, 17)
    hidden = walk(model, ids, positions, mask, project=d2f.adapted)
    with torch.no_grad():
        teacher_hidden = walk(model, ids, positions, dense(full(), 1, 17, 17))
        t = model.lm_head(teacher_hidden).log_softmax(-1)
    s = model.lm_head(hidden).log_softmax(-1)
    plain = {
        "soft": -(t.exp() * s).sum(-1),
        "reverse": (s.exp() * (s - t)).sum(-1),
        "hard": -s.gather(-1, labels.clamp(min=0)[..., None])[..., 0],
    }[objective]
    want = (inputs["weights"] * plain).sum()
    got = (inputs["weights"] * d2f.token_distances(model, hidden, teacher_hidden, labels, cfg, chunk=3)).sum()
    torch.testing.assert_close(got, want)
    if objective == "soft":
        assert got > (inputs["weights"] * -(t.exp() * t).sum(-1)).sum()
    params = list(model.parameters())
    for a, b in zip(*(torch.autograd.grad(x, params, retain_graph=True) for x in (got, want))):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)


def test_adapt_trains_every_weight_on_the_data_with_full_attention():
    model, cfg = prepare(load_backbone(FOLDER / "model")), config(shifted=True)
    batch = rows_of([(3, 14), (6, 11)])
    draws = d2f.draw_adapt_noise(batch, cfg, torch.Generator().manual_seed(0))
    inputs = d2f.make_adapt_inputs(batch, draws | {"u_row": torch.ones(2)}, cfg)  # t = 1: the mean over the response
    assert (inputs["labels"] != -100).sum() == 25
    loss, _ = d2f.adapt_to_diffusion(model, inputs, cfg)
    logits = model.lm_head(walk(model, inputs["input_ids"], torch.arange(17).expand(2, 17), dense(full(), 1, 17, 17)))
    clean = torch.tensor([row["prompt_ids"] + row["answer_ids"] for row in batch])
    nll = -logits[:, :-1].log_softmax(-1).gather(-1, clean[:, 1:, None])[..., 0]
    response = torch.arange(1, 17) >= torch.tensor([[3], [6]])
    torch.testing.assert_close(loss, nll[response].mean())
    loss.backward()
    assert all(p.grad is not None and p.grad.any() for p in model.parameters())


# ------------------------------------------------------------------------------------------------------------ decoding


def random_model(seed=0, **kwargs):
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(seed)
    sizes = dict(vocab_size=160, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
                 num_key_value_heads=2, pad_token_id=None, initializer_range=0.5)  # fmt: skip
    return prepare(LlamaForCausalLM(LlamaConfig(**(sizes | kwargs))).requires_grad_(False))


PROMPT = torch.tensor([[3, 1, 4, 1, 5]])


@pytest.mark.parametrize("case", CASES["decode"], ids=case_ids(CASES["decode"]))
def test_passes_add_up(case):
    cfg, P, B = decode_config(case), len(case["prompt_ids"]), case["block_size"]
    seq_ids, record = d2f.generate(student(case["backbone"]), torch.tensor([case["prompt_ids"]]), cfg)
    response, cached, places = {}, 0, []
    for turn, one in enumerate(record["passes"]):
        assert one["cache_len"] == cached
        committed = range(cached - P, cached - P + one["n_commit"])
        assert one["n_commit"] == P if turn == 0 else one["n_commit"] % B == 0
        assert all(i in response for i in committed if i >= 0), "a mask was committed"
        cached += one["n_commit"]
        assert (one["n_input"] + one["cache_len"] - P) % B == 0
        assert one["revealed"], "a pass without a new token"
        response |= {i: token for i, token in one["revealed"]}
        places += [i for i, _ in one["revealed"]]
        assert all(record["fixed_round"][i] == turn for i, _ in one["revealed"])
    assert sorted(places) == list(range(seq_ids.shape[1] - P)), "each place is fixed once"
    assert [response[i] for i in range(len(response))] == seq_ids[0, P:].tolist()


def uncached(model, prompt_ids, cfg):
    """The decoding rule once more, from the specification, with all tokens recomputed in every pass and no cache."""
    P, B, M = prompt_ids.shape[1], cfg.decode_block_size, cfg.mask_id
    x, is_full, stop, all_logits = prompt_ids[0].tolist(), [], False, []
    while True:
        blocks = [x[i : i + B] for i in range(P, len(x), B)]
        progress = [1.0] + [(B - block.count(M)) / B for block in blocks]
        if len(blocks) < cfg.max_new_tokens // B and not stop and progress[-1] >= cfg.tau_add:
            x, blocks, is_full = x + [M] * B, blocks + [[M] * B], is_full + [False]
        is_full = [flag or progress[b] >= cfg.tau_act for b, flag in enumerate(is_full)]
        if M not in x[P:]:
            return x, all_logits
        L = len(x)
        mask = dense(block_causal(B, torch.tensor([P])), 1, L, L)
        logits = model.lm_head(walk(model, torch.tensor([x]), torch.arange(L)[None], mask, project=d2f.adapted))[0]
        all_logits.append(logits)
        probs = (logits.roll(1, 0) if cfg.shifted else logits).index_fill(1, torch.tensor(M), -torch.inf).softmax(-1)
        for b, block in enumerate(blocks):
            masked = [P + b * B + i for i, token in enumerate(block) if token == M]
            chosen = [i for i in masked if probs[i].max().item() > cfg.tau_conf]
            if masked and not chosen and is_full[b]:
                chosen = [max(masked, key=lambda i: probs[i].max().item())]
            for i in chosen:
                x[i] = probs[i].argmax().item()
                stop = stop or x[i] == cfg.eos_id


class Watched(d2f.Decoder):
    """A Decoder that keeps what it returned. stale: commit what the pass before had written, masks in its input."""

    def __init__(self, model, room, stale=False):
        d2f.merge_adapter(model)
        super().__init__(model, room, compiled=False, project=d2f.merged)
        self.outputs, commit, cache = [], self.kv_cache.commit, self.kv_cache

        def stale_commit(n):
            part = slice(cache.cache_len, cache.cache_len + n)
            for layer, before in zip(cache.layers, self.before):
                for tensor, old in zip(layer, before):
                    if cache.cache_len:  # not the prompt
                        tensor[:, :, part] = old[:, :, part]
            commit(n)

        if stale:
            cache.commit = stale_commit

    def __call__(self, ids, *args, read):
        self.before = [[tensor.clone() for tensor in layer] for layer in self.kv_cache.layers]
        self.outputs.append(super().__call__(ids, *args).clone())
        return read[0](self.outputs[-1], ids, *read[1:])


@pytest.mark.parametrize("backbone", CASES["meta"]["shifted"])
@pytest.mark.parametrize("tau_add, tau_act, tau_conf", [(0.1, 0.95, 0.9), (0.5, 0.5, 0.7), (0, 0.25, 0.3)])
def test_cached_equals_uncached_and_a_stale_commit_does_not(backbone, tau_add, tau_act, tau_conf):
    model, errors = student(backbone), []
    cfg = config(tau_add=tau_add, tau_act=tau_act, tau_conf=tau_conf, decode_block_size=4, max_new_tokens=24,
                 shifted=CASES["meta"]["shifted"][backbone], eos_id=-1)  # fmt: skip
    want, want_logits = uncached(model, PROMPT, cfg)
    for stale in (False, True):
        decoder = Watched(model, 29, stale)
        seq_ids, record = d2f.generate(model, PROMPT, cfg, decoder)
        pairs = zip(decoder.outputs, record["passes"], want_logits)
        gaps = [(out[0] - logits[one["cache_len"] :][: out.shape[1]]).abs().max().item() for out, one, logits in pairs
                if out.shape[1] == len(logits) - one["cache_len"]]  # fmt: skip
        errors.append(max(gaps))
        assert stale or (seq_ids[0].tolist() == want and len(gaps) == len(want_logits) == record["forwards"])
    assert errors[0] < 1e-4 and errors[1] > 1e-2


@pytest.mark.parametrize("shifted", [True, False])
@pytest.mark.parametrize("B, blocks, tau_add, tau_act",
                         [(8, 4, 0.1, 0.95), (5, 3, 0.7, 0.2), (25, 3, 0.56, 0.3), (4, 5, 1.0, 1.0), (1, 6, 0.5, 0.5),
                          (3, 1, 0.9, 0.9), (7, 4, 0.01, 0.01)])  # fmt: skip
def test_forward_count_in_closed_form(B, blocks, tau_add, tau_act, shifted):
    """Nothing is confident enough: each fully active block gains one token a pass, whatever the model."""
    cfg = config(decode_block_size=B, max_new_tokens=B * blocks, tau_add=tau_add, tau_act=tau_act, tau_conf=1.0,
                 eos_id=-1, shifted=shifted)  # fmt: skip
    d = next(n for n in range(1, B + 1) if n / B >= max(tau_act, tau_add))
    for seed in range(2):
        seq_ids, record = d2f.generate(random_model(seed, initializer_range=0.02), PROMPT, cfg)
        assert seq_ids.shape[1] == 5 + B * blocks and record["forwards"] == (blocks - 1) * d + B


def test_limits_of_the_thresholds():
    model = random_model()
    cfg = config(decode_block_size=4, max_new_tokens=14, eos_id=-1, tau_conf=1.0, tau_add=1.0)
    seq_ids, record = d2f.generate(model, PROMPT, cfg)
    assert record["forwards"] == 12 and all(len(one["revealed"]) == 1 for one in record["passes"])
    order = [one["revealed"][0][0] // 4 for one in record["passes"]]
    assert order == sorted(order) and seq_ids.shape[1] == 17, "block after block, whole blocks only"
    _, record = d2f.generate(model, PROMPT, dataclasses.replace(cfg, decode_block_size=1, max_new_tokens=6))
    assert [one["revealed"][0][0] for one in record["passes"]] == list(range(6)), "blocks of one: left to right"
    _, record = d2f.generate(model, PROMPT, dataclasses.replace(cfg, tau_conf=-1.0, tau_add=0.0))
    assert [len(one["revealed"]) for one in record["passes"]] == [4, 4, 4], "all at once, one unfinished block a time"
    seq_ids, record = d2f.generate(model, PROMPT, dataclasses.replace(cfg, max_new_tokens=3))
    assert torch.equal(seq_ids, PROMPT) and record["forwards"] == 0 and record["fixed_round"] == []


def test_select_semi_active_blocks_take_only_what_is_confident():
    conf, block_idx = torch.tensor([0.9, 0.5, 0.95, 0.2, 0.6, 0.6]), torch.tensor([0, 0, 1, 1, 2, 2])
    cfg = config(tau_conf=float(conf[0]))
    assert d2f.select(conf, conf, block_idx, [False, False, False], cfg).tolist() == [0, 0, 1, 0, 0, 0]
    assert d2f.select(conf, conf, block_idx, [True, True, True], cfg).tolist() == [1, 0, 1, 0, 1, 0], "ties: the first"
    assert d2f.select(conf, -conf, block_idx, [True, False, False], cfg).tolist() == [0, 1, 1, 0, 0, 0], "by rank"


@pytest.mark.parametrize("run", [d2f.generate, d2f.generate_vanilla])
def test_neither_the_mask_nor_a_row_without_a_token_is_ever_written(run):
    model = random_model()
    model.lm_head.register_forward_hook(lambda _, args, out: out.index_fill(-1, torch.tensor([155, 159]), 50.0))
    cfg = config(decode_block_size=4, max_new_tokens=12, mask_id=155, eos_id=-1, tau_conf=0.05)
    cfg.vocab_len = 158
    for temperature in (0.0, 1.0):
        cfg.temperature = temperature
        seq_ids, record = run(model, PROMPT, cfg, None, torch.Generator().manual_seed(0))
        new = seq_ids[0, 5:]
        assert len(new) == 12 and (new < 158).all() and (new != 155).all() and record["forwards"] == record["rounds"]


def test_eos_stops_appending_but_every_block_is_finished():
    model = random_model()
    model.lm_head.register_forward_hook(lambda _, args, out: out.index_fill(-1, torch.tensor([158]), 50.0))
    cfg = config(decode_block_size=4, max_new_tokens=40, tau_add=0.1)
    seq_ids, _ = d2f.generate(model, PROMPT, cfg)
    assert seq_ids[0, 5:].tolist() == [158] * 4
    assert d2f.trim(seq_ids[0, 5:], cfg) == [158]


def test_a_prompt_may_hold_the_mask_token():
    model, cfg = random_model(), config(decode_block_size=4, max_new_tokens=8, eos_id=-1)
    prompt_ids = torch.tensor([[7, IDS["mask"], 9]])
    seq_ids, _ = d2f.generate(model, prompt_ids, cfg)
    assert torch.equal(seq_ids[:, :3], prompt_ids) and (seq_ids[:, 3:] != IDS["mask"]).all()


def test_temperature_draws_from_the_tempered_softmax_and_zero_is_argmax():
    logits, n = torch.tensor([[1.0, 0.0, -1.0, 2.0, 5.0]]), 40000
    cfg = config(mask_id=4, temperature=0.7)
    want = (logits[0, :4].double() / 0.7).softmax(-1)
    pred_ids, conf, _ = d2f.confidence(logits.repeat(n, 1), cfg, torch.Generator().manual_seed(0))
    counts = pred_ids.bincount(minlength=5) / n
    torch.testing.assert_close(counts[:4].double(), want, atol=0.01, rtol=0)
    torch.testing.assert_close(conf.double(), want[pred_ids])
    cfg = config(mask_id=4, temperature=0.7, top_p=0.9)  # the best holds 0.76, the two best 0.95
    pred_ids, conf, _ = d2f.confidence(logits.repeat(n, 1), cfg, torch.Generator().manual_seed(0))
    assert pred_ids.unique().tolist() == [0, 3] and conf.unique().sum().item() == pytest.approx(1)
    pred_ids, conf, _ = d2f.confidence(logits.repeat(3, 1), config(mask_id=4, temperature=1e-39), None)
    assert pred_ids.tolist() == [3, 3, 3] and conf.tolist() == [1, 1, 1]
    four = torch.tensor([[0.0, 0.0, 0.0, 0.0, 9.0]])  # mass in front of them: 0, 0.25, 0.5, 0.75
    for top_p, kept in ((0.2, 1), (0.25, 2), (0.5, 3), (0.75, 4)):
        assert d2f.confidence(four, config(mask_id=4, top_p=top_p), None)[1].item() == pytest.approx(1 / kept)
    model = random_model(initializer_range=0.02)
    cfg = config(decode_block_size=4, max_new_tokens=12, eos_id=-1)
    texts = [d2f.generate(model, PROMPT, cfg, None, torch.Generator().manual_seed(s))[0].tolist() for s in (1, 2)]
    assert texts[0] == texts[1]
    cfg.temperature = 1.0
    texts = [d2f.generate(model, PROMPT, cfg, None, torch.Generator().manual_seed(s))[0].tolist() for s in (1, 2, 1)]
    assert texts[0] == texts[2] != texts[1]


def test_vanilla_is_the_teacher_with_full_attention_and_without_the_adapter():
    model, cfg = student("dream"), config(decode_block_size=4, max_new_tokens=10, shifted=True)
    seq_ids, record = d2f.generate_vanilla(model, PROMPT, cfg)
    bare = prepare(load_backbone(FOLDER / CASES["meta"]["model_dir"]["dream"]))
    x = torch.cat([PROMPT, torch.full((1, 8), cfg.mask_id)], dim=1)
    for turn in range(8):
        logits = bare.lm_head(walk(bare, x, torch.arange(13)[None], dense(full(), 1, 13, 13)))[0].roll(1, 0)
        probs = logits.index_fill(1, torch.tensor(cfg.mask_id), -torch.inf).softmax(-1)
        block = range(5 + turn // 4 * 4, 9 + turn // 4 * 4)
        best = max((i for i in block if x[0, i] == cfg.mask_id), key=lambda i: probs[i].max().item())
        x[0, best] = probs[best].argmax()
        assert record["fixed_round"][best - 5] == turn
    assert torch.equal(seq_ids, x) and record["forwards"] == 8


def test_one_decoder_for_many_prompts():
    model, cfg = student("llada"), config(decode_block_size=8, max_new_tokens=24, shifted=False)
    decoder = d2f.new_decoder(model, 9, cfg)
    for prompt in (PROMPT, torch.tensor([[9, 8, 7, 6, 5, 4, 3, 2, 1]]), PROMPT[:, :1]):
        alone, shared = d2f.generate(model, prompt, cfg), d2f.generate(model, prompt, cfg, decoder)
        assert torch.equal(alone[0], shared[0]) and alone[1] == shared[1]
    for prompt in (PROMPT.repeat(2, 1), PROMPT[:, :0]):
        for run in (d2f.generate, d2f.generate_vanilla):
            with pytest.raises(ValueError, match="one prompt"):
                run(model, prompt, cfg)


# ---------------------------------------------------------------------------------------------------- LoRA and layouts


def test_a_new_adapter_changes_nothing_and_its_first_gradient_is_that_of_b():
    model = random_model()
    d2f.attach_adapter(model, *d2f.new_adapter(model, config(lora_rank=4, lora_alpha=8)))
    ids, mask, positions = PROMPT, dense(full(), 1, 5, 5), torch.arange(5)[None]
    assert torch.equal(walk(model, ids, positions, mask, project=d2f.adapted), walk(model, ids, positions, mask))
    trained = {name for name, p in model.named_parameters() if p.requires_grad}
    assert len(trained) == 2 * 4 * 2 and all("lora_" in name for name in trained)
    linear = model.model.layers[0].self_attn.k_proj
    assert linear.lora_A.shape == (4, 32) and linear.lora_B.shape == (16, 4) and not linear.lora_B.any()
    assert linear.lora_A.abs().max() <= 32**-0.5 and linear.lora_A.std() > 0.4 * 32**-0.5
    walk(model, ids, positions, mask, project=d2f.adapted).square().sum().backward()
    for name, p in model.named_parameters():
        assert (p.grad is not None and p.grad.any()) == ("lora_B" in name)


def test_dropout_is_the_students_alone():
    model = random_model()
    d2f.attach_adapter(model, *d2f.new_adapter(model, config(lora_rank=4, lora_dropout=0.5)))
    for name, p in model.named_parameters():
        if "lora_B" in name:
            p.data.normal_()
    model.train()
    args = (PROMPT, torch.arange(5)[None], dense(full(), 1, 5, 5))
    assert torch.equal(walk(model, *args), walk(model, *args))
    assert not torch.equal(walk(model, *args, project=d2f.adapted), walk(model, *args, project=d2f.adapted))
    model.train(False)
    assert torch.equal(walk(model, *args, project=d2f.adapted), walk(model, *args, project=d2f.adapted))


@pytest.mark.parametrize("backbone", CASES["meta"]["shifted"])
def test_merged_equals_unmerged_however_often(backbone):
    model = student(backbone)
    before = {name: p.clone() for name, p in model.named_parameters()}
    for _ in range(2):
        d2f.merge_adapter(model)
        for project in (d2f.adapted, own_projection):
            want = walk(model, PROMPT, torch.arange(5)[None], dense(full(), 1, 5, 5), project=project)
            got = walk(model, PROMPT, torch.arange(5)[None], dense(full(), 1, 5, 5), project=d2f.merged)
            assert torch.allclose(got, want, atol=1e-5) == (project is d2f.adapted)
    assert all(torch.equal(before[name], p) for name, p in model.named_parameters()), "the teacher must stay"


def copy_adapter(source, target, change=lambda config, tensors: None):
    """A changed copy of an adapter folder; change(config, tensors) works in place."""
    shutil.copytree(source, target)
    config = json.loads((target / "adapter_config.json").read_text())
    tensors = load_file(target / "adapter_model.safetensors")
    change(config, tensors)
    (target / "adapter_config.json").write_text(json.dumps(config))
    save_file(tensors, target / "adapter_model.safetensors")
    return str(target)


@pytest.mark.parametrize("backbone", CASES["meta"]["shifted"])
def test_adapter_written_as_it_was_read(backbone, tmp_path):
    """Same key names, same bytes, same scale; from the checkpoint that the released adapter belongs to."""
    source = FOLDER / CASES["meta"]["adapter_dir"][backbone]
    model = d2f.load_backbone(native_folder(backbone, tmp_path / "native"), torch.float32)
    d2f.attach_adapter(prepare(model), *d2f.read_adapter(str(source)))
    (tmp_path / "written").mkdir()
    d2f.write_adapter(model, tmp_path / "written", config(model="some/id", adapt_steps=0))
    held, want = (load_file(folder / "adapter_model.safetensors") for folder in (tmp_path / "written", source))
    assert held.keys() == want.keys() and all(torch.equal(held[key], want[key]) for key in want)
    held, want = (json.loads((folder / "adapter_config.json").read_text()) for folder in (tmp_path / "written", source))
    for key in ("peft_type", "r", "lora_alpha", "lora_dropout", "bias", "use_rslora", "use_dora", "fan_in_fan_out"):
        assert held[key] == want[key]
    assert held["target_modules"] == sorted(want["target_modules"])


def test_rank_stabilised_scale(tmp_path):
    source = FOLDER / CASES["meta"]["adapter_dir"]["dream"]
    scales = []
    for flag in (False, True):
        change = dict(use_rslora=flag, lora_alpha=12)
        name = copy_adapter(source, tmp_path / str(flag), lambda config, _: config.update(change))
        config, tensors = d2f.read_adapter(name)
        model = d2f.attach_adapter(prepare(load_backbone(FOLDER / "model_dream")), config, tensors)
        scales.append(model.model.layers[0].self_attn.q_proj.lora_scale)
    assert scales == [12 / config["r"], pytest.approx(12 / config["r"] ** 0.5)]


KEY = "base_model.model.model.layers.0."
CHANGES = {
    "use_dora": lambda config, tensors: config.update(use_dora=True),
    "peft_type": lambda config, tensors: config.update(peft_type="LOHA"),
    "bias": lambda config, tensors: config.update(bias="all"),
    "rank_pattern": lambda config, tensors: config.update(rank_pattern={"q_proj": 4}),
    "modules_to_save": lambda config, tensors: config.update(modules_to_save=["lm_head"]),
    "lora_alpha": lambda config, tensors: config.update(lora_alpha=0),
    "'r'": lambda config, tensors: config.pop("r"),
    "mlp.up_proj": lambda config, tensors: tensors.update({f"{KEY}mlp.up_proj.lora_A.weight": torch.zeros(8, 64)}),
    "layer 0, q_proj": lambda config, tensors: tensors.pop(f"{KEY}self_attn.q_proj.lora_B.weight"),
    "layer 9, q_proj": lambda config, tensors: tensors.update(
        {f"{KEY}self_attn.q_proj.lora_{X}.weight".replace(".0.", ".9."): torch.zeros(8, 8) for X in "AB"}),
    "layer 0, k_proj": lambda config, tensors: tensors.update(
        {f"{KEY}self_attn.k_proj.lora_A.weight": torch.zeros(8, 63)}),
    "see keys": lambda config, tensors: tensors.clear(),
}  # fmt: skip


@pytest.mark.parametrize("word", CHANGES)
def test_other_adapters_are_refused_in_one_line(word, tmp_path):
    name = copy_adapter(FOLDER / CASES["meta"]["adapter_dir"]["dream"], tmp_path / "adapter", CHANGES[word])
    with pytest.raises(ValueError, match=word) as error:
        d2f.attach_adapter(prepare(load_backbone(FOLDER / "model_dream")), *d2f.read_adapter(name))
    assert "\n" not in str(error.value)
    with pytest.raises(ValueError, match="cannot load adapter"):
        d2f.read_adapter(str(tmp_path / "nothing"))


def tokenizer_files(folder, is_dream):
    """A tokenizer of the family's layout: LLaDA's is one fast file, Dream names a class in remote code."""
    if is_dream:
        vocab = {chr(97 + i) if i < 26 else f"x{i}": i for i in range(158)}
        vocab |= {"<|endoftext|>": IDS["eos"], "<|mask|>": IDS["mask"]}
        (folder / "vocab.json").write_text(json.dumps(vocab))
        (folder / "merges.txt").write_text("#version: 0.2\n")
        spec = {"tokenizer_class": "DreamTokenizer", "eos_token": "<|endoftext|>", "mask_token": "<|mask|>",
                "auto_map": {"AutoTokenizer": ["tokenization_dream.DreamTokenizer", None]}}  # fmt: skip
        (folder / "tokenizer_config.json").write_text(json.dumps(spec))
        return
    from transformers import PreTrainedTokenizerFast

    special = {"<s>": 156, "<|eot_id|>": 157, "<|endoftext|>": IDS["eos"], "<|mdm_mask|>": IDS["mask"]}
    vocab = {f"w{i}": i for i in range(156)} | special
    spec = {"version": "1.0", "added_tokens": [], "normalizer": None, "post_processor": None, "decoder": None,
            "pre_tokenizer": {"type": "Whitespace"},
            "model": {"type": "WordLevel", "vocab": vocab, "unk_token": "w0"}}  # fmt: skip
    (folder / "raw.json").write_text(json.dumps(spec))
    names = dict(eos_token="<|endoftext|>", bos_token="<s>", pad_token="<|endoftext|>", unk_token="w0")
    PreTrainedTokenizerFast(tokenizer_file=str(folder / "raw.json"), **names).save_pretrained(folder)
    (folder / "raw.json").unlink()


def native_folder(backbone, folder, shards=1, **changes):
    """A folder as released: native config with remote code named in it, native key names, the family's tokenizer."""
    is_dream = backbone == "dream"
    shutil.copytree(FOLDER / f"native_{backbone}", folder)
    raw = json.loads((folder / "config.json").read_text())
    code = {"auto_map": {"AutoConfig": "configuration_x.XConfig", "AutoModel": "modeling_x.XModel"}}
    (folder / "config.json").write_text(json.dumps(raw | code | changes))
    for file in ("configuration_x.py", "modeling_x.py", "tokenization_dream.py"):
        (folder / file).write_text("raise SystemExit('remote code ran')")
    if is_dream:
        shutil.copy(FOLDER / "model_dream" / "model.safetensors", folder)
    if shards > 1:
        tensors = load_file(folder / "model.safetensors")
        (folder / "model.safetensors").unlink()
        weight_map = {key: f"model-{i % shards}.safetensors" for i, key in enumerate(tensors)}
        for file in set(weight_map.values()):
            part = {key: t for key, t in tensors.items() if weight_map[key] == file}
            save_file(part, folder / file, {"format": "pt"})
        (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    tokenizer_files(folder, is_dream)
    return str(folder)


@pytest.mark.parametrize("shards", [1, 3])
@pytest.mark.parametrize("backbone", CASES["meta"]["shifted"])
def test_native_checkpoints_load_bit_for_bit_without_remote_code(backbone, shards, tmp_path):
    cfg = config(mask_id=None, eos_id=None, shifted=None)
    model, tokenizer = d2f.load(native_folder(backbone, tmp_path / "native", shards), cfg, training=False)
    want = load_backbone(FOLDER / CASES["meta"]["model_dir"][backbone])
    held, wanted = model.state_dict(), want.state_dict()
    assert held.keys() == wanted.keys() and all(torch.equal(held[key], wanted[key]) for key in wanted)
    for key in ("model_type", "rms_norm_eps", "rope_parameters", "tie_word_embeddings", "hidden_act", "vocab_size"):
        assert getattr(model.config, key) == getattr(want.config, key), key
    assert (cfg.mask_id, cfg.eos_id) == (IDS["mask"], IDS["eos"]) and model.config.eos_token_id == IDS["eos"]
    d2f.enter_stage(model, d2f.METHOD, None, cfg)
    assert cfg.shifted == CASES["meta"]["shifted"][backbone]
    mask, positions = dense(full(), 1, 5, 5), torch.arange(5)[None]
    assert torch.equal(walk(model, PROMPT, positions, mask), walk(prepare(want), PROMPT, positions, mask))


ODD_LLADA = dict(block_type="sequential", layer_norm_type="low_precision", alibi=True, attention_layer_norm=True,
                 scale_logits=True, input_emb_norm=True, block_group_size=2, rope=False)  # fmt: skip


@pytest.mark.parametrize("key, value", ODD_LLADA.items())
def test_other_llada_checkpoints_are_refused(key, value, tmp_path):
    with pytest.raises(ValueError, match=f"{key} {value!r}"):
        d2f.load_backbone(native_folder("llada", tmp_path / "native", **{key: value}), torch.float32)


@pytest.mark.parametrize("backbone", CASES["meta"]["shifted"])
def test_missing_and_unknown_tensors_are_refused(backbone, tmp_path):
    name = native_folder(backbone, tmp_path / "native")
    file, key = tmp_path / "native" / "model.safetensors", "model.transformer.blocks.0.ff_norm.weight"
    tensors = load_file(file)
    key = key if backbone == "llada" else "model.layers.0.mlp.up_proj.weight"
    save_file({k: t for k, t in tensors.items() if k != key}, file, {"format": "pt"})
    with pytest.raises(ValueError, match="missing .*: model.layers.0"):
        d2f.load_backbone(name, torch.float32)
    if backbone == "llada":
        save_file(tensors | {"model.transformer.blocks.0.extra.weight": torch.zeros(1)}, file, {"format": "pt"})
        with pytest.raises(ValueError, match="blocks.0.extra"):
            d2f.load_backbone(name, torch.float32)


def test_llada_config_details():
    raw = json.loads((FOLDER / "native_llada" / "config.json").read_text())
    assert d2f.llada_to_llama(raw | {"embedding_size": None, "vocab_size": 170}, {})[0].vocab_size == 170
    assert d2f.llada_to_llama(raw | {"embedding_size": 192}, {})[0].vocab_size == 192
    assert d2f.llada_to_llama(raw | {"n_kv_heads": None}, {})[0].num_key_value_heads == raw["n_heads"]
    config, _ = d2f.llada_to_llama(raw | {"vocab_size": 126464, "rope_theta": 123.0}, {})
    assert config.eot_token_id == 126348 and config.rope_parameters["rope_theta"] == 123.0
    assert d2f.llada_to_llama(raw, {})[0].eot_token_id is None and config.pad_token_id is None


# ---------------------------------------------------------------------------------------------------- the command line


def run(*args):
    return d2f.main([str(arg) for arg in args])


SHORT = ["--steps", 3, "--ar_steps", 2, "--adapt_steps", 2, "--batch_size", 4, "--problems", 2]


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    out = tmp_path_factory.mktemp("d2f") / "run"
    assert run("--train", *SHORT, "--lr", 0.1, "--out", out) == 0
    return out


def report(capsys):
    return json.loads(capsys.readouterr().out.splitlines()[-1])


def texts(model, *args):
    cfg = d2f.parse(["--model", str(model), "--problems", "2", *args])[1]
    model, tokenizer = d2f.load(cfg.model, cfg, training=False)
    d2f.enter_stage(model, d2f.METHOD, cfg.model, cfg)
    prompts = [d2f.encode(tokenizer, messages)["prompt_ids"] for messages, _ in d2f.read_problems(cfg)[1]]
    return [d2f.generate(model, torch.tensor([ids]), cfg)[0].tolist() for ids in prompts]


def test_train_and_generate(tmp_path, capsys):
    assert run("--train", "--generate", "--trace", *SHORT, "--out", tmp_path / "run") == 0
    out = capsys.readouterr().out
    assert "tiny is no diffusion LM: `adapt` makes it one" in out
    labels = [row["label"] for row in json.loads(out.splitlines()[-1])["rows"]]
    assert labels[0] == "d2f" and labels[1].startswith("vanilla") and labels[2] == "plain AR"


def test_what_is_saved(trained, tmp_path):
    """A plain Hugging Face folder without a trace of LoRA, and beside it the adapter; both load again."""
    from transformers import AutoModelForCausalLM

    plain = AutoModelForCausalLM.from_pretrained(trained, dtype=torch.float32)
    assert not any("lora" in key for key in load_file(trained / "model.safetensors"))
    assert plain.get_input_embeddings().weight is plain.lm_head.weight, "tied"
    assert plain.config.shifted_logits is True and plain.config.mask_token_id == 1
    config, tensors = d2f.read_adapter(str(trained / "adapter"))
    assert config["r"] == d2f.Config.lora_rank and len(tensors) == 4 * 4 * 2
    assert all(t.any() for t in tensors.values()), "B has left zero"
    bare = tmp_path / "bare"
    shutil.copytree(trained, bare, ignore=shutil.ignore_patterns("adapter", "training_state*"))
    assert texts(trained) == texts(trained) == texts(bare, "--adapter", str(trained / "adapter"))
    assert texts(bare) != texts(trained), "the adapter counts"


def test_only_the_adapter_trains_in_the_last_stage(tmp_path):
    assert run("--train", *SHORT, "--steps", 0, "--out", tmp_path / "teacher") == 0
    flags = ["--train", "--model", tmp_path / "teacher", "--ar_steps", 0, "--steps", 2]
    assert run(*flags, "--out", tmp_path / "student") == 0
    before, after = (load_file(tmp_path / name / "model.safetensors") for name in ("teacher", "student"))
    assert all(torch.equal(before[key], after[key]) for key in before)
    state = load_file(tmp_path / "student" / "training_state.safetensors")
    assert state and all("lora_" in key for key in state)
    names = [stage.name for stage in d2f.stages(d2f.Config(model=str(tmp_path / "teacher"))) if stage.steps]
    assert names == ["d2f"], "a marked diffusion LM is not adapted again"


def test_teacher_takes_the_place_of_adapt(trained, tmp_path, capsys):
    assert run("--train", *SHORT, "--teacher", trained, "--out", tmp_path / "run") == 0
    assert "adapt" not in capsys.readouterr().out
    base, teacher = (load_file(folder / "model.safetensors") for folder in (tmp_path / "run", trained))
    assert all(torch.equal(base[key], teacher[key]) for key in teacher)
    state = json.loads((trained / "config.json").read_text())
    other = tmp_path / "other"
    shutil.copytree(trained, other)
    (other / "config.json").write_text(json.dumps(state | {"mask_token_id": 5}))
    assert run("--train", *SHORT, "--teacher", other, "--out", tmp_path / "refused") == 2
    assert "another vocabulary or mask token" in capsys.readouterr().err


def test_an_adapter_of_an_earlier_run_does_not_reach_a_later_base(trained, tmp_path, capsys):
    out = tmp_path / "run"
    shutil.copytree(trained, out)
    assert run("--train", *SHORT, "--steps", 0, "--out", out) == 0
    assert (out / "adapter").exists() and d2f.saved_adapter(str(out)) == ""
    capsys.readouterr()
    assert run("--generate", "--model", out, "--problems", 1) == 0
    assert "has no adapter" in capsys.readouterr().err


@pytest.mark.parametrize("backbone", CASES["meta"]["shifted"])
def test_native_checkpoint_with_released_adapter_from_the_command_line(backbone, tmp_path, capsys):
    """Decode, train on from the adapter, save in Llama's or Qwen2's shape with the adapter's own key names."""
    name, adapter = native_folder(backbone, tmp_path / "native"), FOLDER / CASES["meta"]["adapter_dir"][backbone]
    data = tmp_path / "data.jsonl"
    data.write_text("".join(json.dumps({"prompt": "a b w1 w2", "response": "c w3"}) + "\n" for _ in range(8)))
    flags = ["--model", name, "--adapter", adapter, "--max_len", 40, "--max_new_tokens", 16, "--decode_block_size", 8,
             "--block_size", 8, "--problems", 2, "--data", data]  # fmt: skip
    assert run("--generate", *flags) == 0
    assert report(capsys)["rows"][0]["forwards"] > 0
    out = tmp_path / "out"
    assert run("--train", "--generate", *flags, "--steps", 2, "--batch_size", 2, "--lr", 1e-2, "--out", out) == 0
    text = capsys.readouterr().out
    assert "adapt" not in text
    base, want = load_file(out / "model.safetensors"), load_backbone(FOLDER / CASES["meta"]["model_dir"][backbone])
    assert all(torch.equal(base[key], tensor) for key, tensor in want.state_dict().items())
    held, old = (load_file(folder / "adapter_model.safetensors") for folder in (out / "adapter", adapter))
    assert held.keys() == old.keys() and not all(torch.equal(held[key], old[key]) for key in old)
    settings = json.loads((out / "adapter" / "adapter_config.json").read_text())
    assert settings["base_model_name_or_path"] == name and settings["r"] == d2f.read_adapter(str(adapter))[0]["r"]
    assert texts(out) == texts(out) and run("--train", "--resume", "--steps", 3, "--out", out) == 0


BAD = dict(tau_act=1.1, tau_add=-0.1, tau_conf="nan", block_size=0, decode_block_size=0, lora_rank=0, p_min=0,
           p_max=1.5, schedule="linear", objective="kl", sampling_strategy="x", top_k=-1, long_rows="x", adapt_lr=0,
           adapter="no/such", teacher="no/such")  # fmt: skip


@pytest.mark.parametrize("name, value", BAD.items())
def test_bad_settings_end_in_one_line(name, value, tmp_path, capsys):
    flags = [*SHORT, "--ar_steps", 0, "--adapt_steps", 0, f"--{name}", value]
    assert run("--train", *flags, "--out", tmp_path / "run") == 2
    last = capsys.readouterr().err.strip().splitlines()[-1]
    assert last.startswith("d2f.py: ") and (name in last or str(value) in last), last
    assert not (tmp_path / "run").exists()


def test_rows_that_do_not_fit(tmp_path, capsys):
    cfg = config(max_len=10)
    assert len(d2f.pad_rows(rows_of([(3, 7), (3, 8)]), cfg)) == 1 and "1 of 2 rows" in capsys.readouterr().err
    with pytest.raises(ValueError, match="max_len 10"):
        d2f.pad_rows(rows_of([(9, 8)]), cfg)
