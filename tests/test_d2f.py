"""D2F: reference vectors, masks, losses, decoding, LoRA and released layouts, what a run writes."""

import dataclasses
import json
import shutil

import pytest
import torch
from conftest import ROOT, few_rows, golden, last_line, load_backbone, random_lm, write_tokenizer
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace
from transformers import AutoModelForCausalLM, LlamaForCausalLM, PreTrainedTokenizerFast

import d2f
from common import block_causal, dense, full, walk

CASES, TENSORS, FOLDER = golden("d2f")
META = CASES["meta"]
IDS = META["special_ids"]
BACKBONES = list(META["shifted"])


def config(**kwargs):
    return d2f.Config(**(dict(mask_id=IDS["mask"], eos_id=IDS["eos"], device="cpu", dtype="float32") | kwargs))


_models = {}


def student(backbone, zero=False):
    """The base of a family with its adapter attached; zero: lora_B set to zero."""
    if (backbone, zero) not in _models:
        model = load_backbone(FOLDER / META["model_dir"][backbone])
        cfg = config()
        tensors = d2f.read_adapter(str(FOLDER / META["adapter_dir"][backbone]), cfg)
        if zero:
            tensors = {key: tensor * key.endswith("A") for key, tensor in tensors.items()}
        _models[backbone, zero] = d2f.attach_adapter(model, cfg, tensors)
    return _models[backbone, zero].requires_grad_(False)


def hidden_states(model, ids, mask, **kwargs):
    """The walk over whole rows ids (B, L)."""
    return walk(model, ids, torch.arange(ids.shape[1]).expand(ids.shape), mask, **kwargs)


# --------------------------------------------------------------------------------------------- reference vectors


@pytest.mark.parametrize("name", CASES["schedule"])
def test_schedule(name):
    u_first, u_increment, want = (TENSORS[f"schedule/{name}/{key}"] for key in ("u_first", "u_increment", "p_block"))
    torch.testing.assert_close(d2f.mask_ratios(u_first, u_increment, config()), want, rtol=0, atol=1e-7)


@pytest.mark.parametrize("case", CASES["confidence"], ids=lambda case: str(case["index"]))
def test_confidence(case):
    logits = TENSORS["confidence/logits"]
    cfg = config(mask_id=logits.shape[1], temperature=case["temperature"], top_p=case["top_p"] or 1.0,
                 top_k=case["top_k"] or 0, sampling_strategy=case["sampling_strategy"])  # fmt: skip
    with_mask = torch.cat([logits, torch.full((len(logits), 1), 99.0)], dim=1)  # the mask's row must not count
    got = d2f.propose(with_mask, cfg, None)
    for tensor, key in zip(got, ("token", "confidence", "rank_score")):
        torch.testing.assert_close(tensor, TENSORS[f"confidence/{case['index']}/{key}"], rtol=0, atol=1e-5)


@pytest.mark.parametrize("case", CASES["data"], ids=lambda case: case["backbone"])
def test_data(case):
    is_llada = case["backbone"] == "llada"
    cfg = config(max_len=case["max_length"], long_rows="drop" if is_llada else "cut",
                 eot_id=IDS["eot_llada"] if is_llada else None)  # fmt: skip
    rows = [{"prompt_ids": s["question_ids"], "answer_ids": s["answer_ids"] + [IDS["eos"]]} for s in case["samples"]]
    got = [(row["prompt_ids"] + row["answer_ids"], len(row["prompt_ids"])) for row in d2f.pad_rows(rows, cfg)]
    assert got == [(kept["ids"], kept["prompt_len"]) for kept in case["kept"]]


@pytest.mark.parametrize("case", CASES["train"], ids=lambda case: case["id"])
def test_training(case):
    """With the published draws: inputs, mask, logits, terms (also in chunks), both divergences, gradients."""
    t = {key.split("/")[-1]: value for key, value in TENSORS.items() if key.startswith(f"train/{case['id']}/")}
    B, L = t["input_ids"].shape
    shift = int(META["shifted"][case["backbone"]])
    cfg = config(block_size=case["block_size"], shifted=bool(shift), objective=case["objective"])
    rows = zip(t["input_ids"].tolist(), t["prompt_lens"].tolist())
    inputs = d2f.make_training_inputs([{"prompt_ids": ids[:P], "answer_ids": ids[P:]} for ids, P in rows], t, cfg)
    assert torch.equal(inputs["input_ids"], t["noisy_ids"])
    is_masked = inputs["labels"] != -100
    assert torch.equal(is_masked, t["masked"]) and is_masked.sum() == case["n_masked"]
    assert torch.equal(inputs["labels"][is_masked], t["input_ids"][is_masked])
    mask = dense(block_causal(cfg.block_size, inputs["prompt_lens"]), B, L, L)
    if "attention_mask" in t:
        assert torch.equal(mask[:, 0], t["attention_mask"])

    model = student(case["backbone"], case["adapter"] == "zero")
    hidden = hidden_states(model, inputs["input_ids"], mask, project=d2f.adapted).roll(shift, 1)
    teacher_hidden = hidden_states(model, inputs["input_ids"], dense(full(), 1, L, L)).roll(shift, 1)
    for chunk in (2048, 3):
        terms = d2f.token_distances(model.lm_head, hidden, teacher_hidden, inputs["labels"], cfg, chunk)
        torch.testing.assert_close(terms, t["token_ce"], rtol=1e-5, atol=1e-5)
    for key, rows in (("student_logits", hidden), ("teacher_logits", teacher_hidden)):
        if key in t:
            torch.testing.assert_close(model.lm_head(rows)[:, shift:], t[key][:, shift:], rtol=1e-4, atol=1e-4)

    flat = inputs | {"weights": is_masked / case["n_masked"]}
    assert d2f.training_loss(model, flat, cfg)[0].item() == pytest.approx(case["mean_ce_unweighted"], abs=1e-5)
    if "derived" in case:
        derived = case["derived"]
        kl = d2f.training_loss(model, inputs, cfg)[0].item() - derived["mean_teacher_entropy_weighted"]
        assert kl == pytest.approx(derived["kl_teacher_student_weighted"], abs=1e-5)
        reverse = dataclasses.replace(cfg, objective="reverse")
        for x, key in ((inputs, "kl_student_teacher_weighted"), (flat, "kl_student_teacher_unweighted")):
            assert d2f.training_loss(model, x, reverse)[0].item() == pytest.approx(derived[key], abs=1e-5)

    loss, _ = d2f.training_loss(model.requires_grad_(True), inputs, cfg)
    loss.backward()
    assert loss.item() == pytest.approx(case["loss"], rel=1e-5)
    grads = {name: p.grad for name, p in model.named_parameters()}
    model.zero_grad()
    prefix = "base_model.model."
    lora = {d2f.as_llama(key.removeprefix(prefix)).removesuffix(".weight"): want
            for key, want in case["grad_norm_lora"].items()}  # fmt: skip
    assert set(grads) == {*lora, *case["grad_norm_full"]}
    for key, want in (lora | case["grad_norm_full"]).items():
        assert grads[key].norm().item() == pytest.approx(want, rel=1e-4, abs=1e-6), key
    total = torch.stack([grads[name].norm() for name in lora]).norm().item()
    assert total == pytest.approx(case["grad_norm_lora_total"], rel=1e-4)
    if case["adapter"] == "zero":  # B = 0: no gradient reaches A, one reaches B
        assert all((grads[name].norm() == 0) == name.endswith("lora_A") for name in lora)


class Watched(d2f.Decoder):
    """A Decoder that notes its calls."""

    def __init__(self, model, room):
        super().__init__(model, room, project=d2f.adapted)
        self.passes, self.outputs = [], []
        self.keep, self.kv_cache.commit = self.kv_cache.commit, self.commit

    def __call__(self, *args):
        self.passes.append(dict(cache_len=self.kv_cache.cache_len, n_input=args[0].shape[1]))
        self.outputs.append(super().__call__(*args).clone())
        return self.outputs[-1]

    def commit(self, n):
        self.passes[-1]["n_commit"] = n
        self.keep(n)


def fixed(record):
    """The places that each round fixed."""
    rounds = record["fixed_round"]
    return [[i for i, number in enumerate(rounds) if number == one] for one in range(record["rounds"])]


@pytest.mark.parametrize("case", CASES["decode"], ids=lambda case: case["id"])
def test_decode(case):
    """Ids and every pass; the head is asked for masked places alone, and no mask is committed."""
    P, B, rows = len(case["prompt_ids"]), case["block_size"], []
    names = ("tau_add", "tau_act", "tau_conf", "sampling_strategy", "temperature")
    budget = case["max_new_tokens"] // B * B  # the published code rounds down
    cfg = config(**{name: case[name] for name in names}, max_new_tokens=budget, decode_block_size=B,
                 shifted=META["shifted"][case["backbone"]], top_p=case["top_p"] or 1.0)  # fmt: skip
    model = student(case["backbone"])
    decoder = Watched(model, P + budget)
    hook = model.lm_head.register_forward_hook(lambda _, args, out: rows.append(len(out)))
    seq_ids, record = d2f.generate(model, torch.tensor([case["prompt_ids"]]), cfg, decoder)
    hook.remove()
    new = seq_ids[0, P:].tolist()
    assert new == case["output_ids"] and seq_ids[0, :P].tolist() == case["prompt_ids"]
    assert record["forwards"] == record["rounds"] == case["n_forwards"] == len(decoder.passes)
    places = fixed(record)
    trace = [one | {"revealed": [[i, new[i]] for i in found]} for one, found in zip(decoder.passes, places)]
    assert trace == case["trace"]
    assert all(places) and sorted(sum(places, [])) == list(range(len(new))), "each place is fixed once"
    cached, done = 0, set()
    for one, found, n in zip(decoder.passes, places, rows):
        assert one["cache_len"] == cached and n == cached + one["n_input"] - P - len(done)
        cached += one["n_commit"]
        assert (cached - P) % B == 0 and done >= {*range(cached - P)}, "a mask was committed"
        done |= {*found}


# ---------------------------------------------------------------------------------------------- noise and losses


def rows_of(lengths, seed=0):
    generator = torch.Generator().manual_seed(seed)
    ids = [[torch.randint(0, 150, (n,), generator=generator).tolist() for n in row] for row in lengths]
    return [dict(zip(("prompt_ids", "answer_ids"), row)) for row in ids]


@pytest.mark.parametrize("schedule", ["monotone", "random"])
def test_noise(schedule):
    cfg = config(block_size=4, schedule=schedule, max_len=33)
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
    flat = d2f.make_training_inputs(batch, draws, dataclasses.replace(cfg, objective="reverse"))
    assert flat["weights"].sum().item() == pytest.approx(1) and len(flat["weights"].unique()) == 2
    again = d2f.draw_noise(batch, cfg, torch.Generator().manual_seed(0))
    assert all(torch.equal(again[key], draws[key]) for key in draws)


def test_nothing_masked_gives_a_zero_loss_and_zero_gradients():
    cfg, model = config(block_size=4, max_len=9), student("llada").requires_grad_(True)
    batch = rows_of([(3, 6), (4, 5)])
    draws = d2f.draw_noise(batch, cfg, None) | {"u_token": torch.ones(2, 9)}
    loss, _ = d2f.training_loss(model, d2f.make_training_inputs(batch, draws, cfg), cfg)
    loss.backward()
    assert loss.item() == 0 and all(p.grad is None or not p.grad.any() for p in model.parameters())
    model.zero_grad()


# ------------------------------------------------------------------------------------------------------ decoding


def random_model(seed=0, width=0.5):
    return random_lm("llama", seed, vocab_size=160, initializer_range=width).requires_grad_(False)


PROMPT = torch.tensor([[3, 1, IDS["mask"], 1, 5]])  # a prompt may hold the mask token


@pytest.mark.parametrize("backbone", BACKBONES)
@pytest.mark.parametrize("tau_add, tau_act, tau_conf", [(0.1, 0.95, 0.9), (0.5, 0.5, 0.7), (0, 0.25, 0.3)])
def test_cached_equals_uncached(backbone, tau_add, tau_act, tau_conf):
    model = student(backbone)
    cfg = config(tau_add=tau_add, tau_act=tau_act, tau_conf=tau_conf, decode_block_size=4, max_new_tokens=24,
                 shifted=META["shifted"][backbone], eos_id=None)  # fmt: skip
    decoder = Watched(model, 29)
    seq_ids, record = d2f.generate(model, PROMPT, cfg, decoder)
    for number, (one, hidden) in enumerate(zip(decoder.passes, decoder.outputs)):
        n = one["cache_len"] + one["n_input"]
        is_masked = torch.tensor([-1] * 5 + record["fixed_round"])[:n] >= number
        mask = dense(block_causal(4, torch.tensor([5])), 1, n, n)
        ids = seq_ids[:, :n].masked_fill(is_masked, cfg.mask_id)
        want = hidden_states(model, ids, mask, project=d2f.adapted)[:, one["cache_len"] :]
        assert (hidden - want).abs().max() < 1e-4


@pytest.mark.parametrize("shifted", [True, False])
@pytest.mark.parametrize("B, blocks, tau_add, tau_act",
                         [(8, 4, 0.1, 0.95), (5, 3, 0.7, 0.2), (25, 3, 0.56, 0.3), (4, 5, 1.0, 1.0), (1, 6, 0.5, 0.5),
                          (3, 1, 0.9, 0.9), (7, 4, 0.01, 0.01)])  # fmt: skip
def test_forward_count_in_closed_form(B, blocks, tau_add, tau_act, shifted):
    """Nothing is confident enough: each fully active block gains one token a pass, whatever the model."""
    cfg = config(decode_block_size=B, max_new_tokens=B * blocks, tau_add=tau_add, tau_act=tau_act, tau_conf=1.0,
                 eos_id=None, shifted=shifted)  # fmt: skip
    d = next(n for n in range(1, B + 1) if n / B >= max(tau_act, tau_add))
    for seed in range(2):
        seq_ids, record = d2f.generate(random_model(seed, 0.02), PROMPT, cfg)
        assert seq_ids.shape[1] == 5 + B * blocks and record["forwards"] == (blocks - 1) * d + B


def test_limits_of_the_thresholds():
    model = random_model()
    cfg = config(decode_block_size=4, max_new_tokens=10, eos_id=None, tau_conf=1.0, tau_add=1.0)
    seq_ids, record = d2f.generate(model, PROMPT, cfg)
    assert torch.equal(seq_ids[:, :5], PROMPT)
    assert [len(places) for places in fixed(record)] == [1] * 12
    assert [places[0] // 4 for places in fixed(record)] == [0] * 4 + [1] * 4 + [2] * 4, "block after block"
    _, record = d2f.generate(model, PROMPT, dataclasses.replace(cfg, decode_block_size=1, max_new_tokens=6))
    assert record["fixed_round"] == list(range(6)), "blocks of one: left to right"
    _, record = d2f.generate(model, PROMPT, dataclasses.replace(cfg, tau_conf=-1.0, tau_add=0.0))
    assert record["fixed_round"] == [0] * 4 + [1] * 4 + [2] * 4, "all at once, one unfinished block a time"
    for name in ("tau_add", "tau_act"):
        with pytest.raises(ValueError, match="at most 1"):
            d2f.generate(model, PROMPT, dataclasses.replace(cfg, **{name: 1.1}))


def test_select_semi_active_blocks_take_only_what_is_confident():
    conf, block_idx = torch.tensor([0.9, 0.5, 0.95, 0.2, 0.6, 0.6]), torch.tensor([0, 0, 1, 1, 2, 2])
    cfg = config(tau_conf=float(conf[0]))
    assert d2f.select(conf, conf, block_idx, [False, False, False], cfg).tolist() == [0, 0, 1, 0, 0, 0]
    assert d2f.select(conf, conf, block_idx, [True, True, True], cfg).tolist() == [1, 0, 1, 0, 1, 0], "ties: the first"
    assert d2f.select(conf, -conf, block_idx, [True, False, False], cfg).tolist() == [0, 1, 1, 0, 0, 0], "by rank"


def test_draws_and_confidences_are_of_the_nucleus():
    logits = torch.tensor([[1.0, 0.0, -1.0, 2.0, 5.0]])
    cfg = config(mask_id=4, temperature=0.7, top_p=0.9)  # the best has 0.76, the two best 0.95
    pred_ids, conf, _ = d2f.propose(logits.repeat(9999, 1), cfg, torch.Generator().manual_seed(0))
    assert pred_ids.unique().tolist() == [0, 3] and conf.unique().sum().item() == pytest.approx(1)
    four = torch.tensor([[0.0, 0.0, 0.0, 0.0, 9.0]])  # mass before them: 0, 0.25, 0.5, 0.75
    for top_p, kept in ((0.2, 1), (0.25, 2), (0.5, 3), (0.75, 4)):
        assert d2f.propose(four, config(mask_id=4, top_p=top_p), None)[1].item() == pytest.approx(1 / kept)


def test_vanilla_is_the_teacher_with_full_attention_and_without_the_adapter():
    model, cfg = student("dream"), config(decode_block_size=4, max_new_tokens=8, shifted=True)
    seq_ids, record = d2f.generate_vanilla(model, PROMPT, cfg)
    bare = load_backbone(FOLDER / META["model_dir"]["dream"])
    x = torch.cat([PROMPT, torch.full((1, 8), cfg.mask_id)], dim=1)
    for number in range(8):
        logits = bare.lm_head(hidden_states(bare, x, dense(full(), 1, 13, 13)))[0].roll(1, 0)
        probs = logits.index_fill(1, torch.tensor(cfg.mask_id), -torch.inf).softmax(-1)
        block = range(5 + number // 4 * 4, 9 + number // 4 * 4)
        best = max((i for i in block if x[0, i] == cfg.mask_id), key=lambda i: probs[i].max().item())
        x[0, best] = probs[best].argmax()
        assert record["fixed_round"][best - 5] == number
    assert torch.equal(seq_ids, x) and record["forwards"] == 8


# ---------------------------------------------------------------------------------------------- LoRA and layouts


def new_student(**kwargs):
    model = random_model()
    return d2f.attach_adapter(model, config(lora_rank=4, **kwargs))


def test_a_new_adapter_changes_nothing_and_its_first_gradient_is_that_of_b():
    model, mask = new_student(lora_alpha=8), dense(full(), 1, 5, 5)
    hidden = hidden_states(model, PROMPT, mask, project=d2f.adapted)
    assert torch.equal(hidden, hidden_states(model, PROMPT, mask))
    trained = {name for name, p in model.named_parameters() if p.requires_grad}
    assert len(trained) == 2 * 4 * 2 and all("lora_" in name for name in trained)
    linear = model.model.layers[0].self_attn.k_proj
    assert linear.lora_A.shape == (4, 32) and linear.lora_B.shape == (16, 4) and not linear.lora_B.any()
    assert linear.lora_A.abs().max() <= 32**-0.5 and linear.lora_A.std() > 0.4 * 32**-0.5 and linear.lora_scale == 2
    hidden.square().sum().backward()
    for name, p in model.named_parameters():
        assert (p.grad is not None and p.grad.any()) == ("lora_B" in name)
    with torch.device("meta"):  # a process that is sent its part of the weights: the same parameters
        meta = LlamaForCausalLM(model.config)
    d2f.attach_adapter(meta, config(lora_rank=4))
    both = [[(name, p.shape, p.requires_grad) for name, p in m.named_parameters()] for m in (model, meta)]
    assert both[0] == both[1] and all(p.is_meta for p in meta.parameters())


def test_dropout_is_the_students_alone():
    model, mask = new_student(lora_dropout=0.5), dense(full(), 1, 5, 5)
    for name, p in model.named_parameters():
        if "lora_B" in name:
            p.data.normal_()
    for training, project, same in ((True, d2f.common.own_projection, True), (True, d2f.adapted, False),
                                    (False, d2f.adapted, True)):  # fmt: skip
        model.train(training)
        assert torch.equal(*(hidden_states(model, PROMPT, mask, project=project) for _ in "ab")) == same


@pytest.mark.parametrize("backbone", BACKBONES)
def test_merged_equals_unmerged(backbone):
    model, cfg = load_backbone(FOLDER / META["model_dir"][backbone]), config()
    d2f.attach_adapter(model, cfg, d2f.read_adapter(str(FOLDER / META["adapter_dir"][backbone]), cfg))
    mask = dense(full(), 1, 5, 5)
    teacher = hidden_states(model, PROMPT, mask)
    want = hidden_states(model, PROMPT, mask, project=d2f.adapted)
    d2f.merge_adapter(model)
    for project in (d2f.adapted, d2f.common.own_projection):
        got = hidden_states(model, PROMPT, mask, project=project)
        assert torch.allclose(got, want, atol=1e-5) and not torch.allclose(got, teacher, atol=1e-2)
    assert not any("lora" in name for name, _ in model.named_parameters())


def attach_copy(tmp_path, change):
    """(model, cfg) with a changed copy of Dream's adapter; change(config, tensors) works in place."""
    folder, cfg = tmp_path / "adapter", config()
    shutil.copytree(FOLDER / META["adapter_dir"]["dream"], folder)
    fields = json.loads((folder / "adapter_config.json").read_text())
    tensors = load_file(folder / "adapter_model.safetensors")
    change(fields, tensors)
    (folder / "adapter_config.json").write_text(json.dumps(fields))
    save_file(tensors, folder / "adapter_model.safetensors")
    model = load_backbone(FOLDER / META["model_dir"]["dream"])
    return d2f.attach_adapter(model, cfg, d2f.read_adapter(str(folder), cfg)), cfg


@pytest.mark.parametrize("init", [True, False, "gaussian", "eva", "orthogonal"])
def test_rank_stabilised_scale_and_initialisations_that_leave_the_base(init, tmp_path):
    change = dict(init_lora_weights=init, use_rslora=init is True, lora_alpha=12)
    model, cfg = attach_copy(tmp_path, lambda config, _: config.update(change))
    scale = 12 / cfg.lora_rank ** (0.5 if init is True else 1)
    assert model.model.layers[0].self_attn.q_proj.lora_scale == pytest.approx(scale)


KEY = "base_model.model.model.layers.0.self_attn."
SETTINGS = dict(use_dora=True, peft_type="LOHA", bias="all", rank_pattern={"q_proj": 4}, alpha_pattern={"q_proj": 4},
                modules_to_save=["lm_head"], layers_to_transform=[0], a_new_variant={"x": 1}, r=0,
                init_lora_weights="pissa_niter_4", target_modules=["q_proj", "v_proj", "o_proj"])  # fmt: skip
CHANGES = {f"see {key}$": lambda config, tensors, one={key: x}: config.update(one) for key, x in SETTINGS.items()}
CHANGES |= {
    "see target_modules": lambda config, tensors: config["target_modules"].append("up_proj"),
    "up_proj": lambda config, tensors: tensors.update({f"{KEY}up_proj.lora_A.weight": torch.zeros(8, 64)}),
    "does not fit": lambda config, tensors: tensors.clear(),
    "'r'": lambda config, tensors: config.pop("r"),
    "see model.layers.": lambda config, tensors: config.update(r=config["r"] * 2),
    "layers.0.self_attn.q_proj": lambda config, tensors: tensors.pop(f"{KEY}q_proj.lora_B.weight"),
    "layers.9.self_attn.q_proj": lambda config, tensors: tensors.update(
        {f"{KEY}q_proj.lora_{X}.weight".replace(".0.", ".9."): torch.zeros(8, 8) for X in "AB"}),
    "layers.0.self_attn.k_proj": lambda config, tensors: tensors.update(
        {f"{KEY}k_proj.lora_A.weight": torch.zeros(8, 63)}),
    "layers.1.self_attn.v_proj": lambda config, tensors: [
        tensors.pop(f"{KEY}v_proj.lora_{X}.weight".replace(".0.", ".1.")) for X in "AB"],
}  # fmt: skip


@pytest.mark.parametrize("words", CHANGES)
def test_other_adapters_are_refused_in_one_line(words, tmp_path):
    with pytest.raises(ValueError, match=words) as error:
        attach_copy(tmp_path, CHANGES[words])
    assert "\n" not in str(error.value)
    with pytest.raises(ValueError, match="cannot load adapter"):
        d2f.read_adapter(str(tmp_path / "nothing"), config())


def tokenizer_files(folder, is_dream):
    """A tokenizer of the family's layout: LLaDA's is one fast file, Dream names a class in remote code."""
    if is_dream:
        words = [chr(97 + i) if i < 26 else f"x{i}" for i in range(158)]
        write_tokenizer(folder, words, ["<|endoftext|>", "<|mask|>"], dream=True)
        return
    special = {"<s>": 156, "<|eot_id|>": 157, "<|endoftext|>": IDS["eos"], "<|mdm_mask|>": IDS["mask"]}
    words = Tokenizer(WordLevel({f"w{i}": i for i in range(156)} | special, unk_token="w0"))
    words.pre_tokenizer = Whitespace()
    names = dict(eos_token="<|endoftext|>", bos_token="<s>", pad_token="<|endoftext|>", unk_token="w0")
    PreTrainedTokenizerFast(tokenizer_object=words, **names).save_pretrained(folder)


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
        shutil.copy(FOLDER / META["model_dir"]["dream"] / "model.safetensors", folder)
    if shards > 1:
        tensors = load_file(folder / "model.safetensors")
        (folder / "model.safetensors").unlink()
        weight_map = {key: f"model-{i % shards}.safetensors" for i, key in enumerate(tensors)}
        for file in set(weight_map.values()):
            part = {key: x for key, x in tensors.items() if weight_map[key] == file}
            save_file(part, folder / file, {"format": "pt"})
        (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    tokenizer_files(folder, is_dream)
    return str(folder)


@pytest.mark.parametrize("shards", [1, 3])
@pytest.mark.parametrize("backbone", BACKBONES)
def test_native_checkpoints_load_bit_for_bit_without_remote_code(backbone, shards, tmp_path):
    cfg = config(mask_id=None, eos_id=None)
    name = native_folder(backbone, tmp_path / "native", shards)
    model, _ = d2f.load_student(name, cfg)
    assert cfg.eot_id == (IDS["eot_llada"] if backbone == "llada" else None)
    assert (cfg.mask_id, cfg.eos_id, cfg.shifted) == (IDS["mask"], IDS["eos"], META["shifted"][backbone])
    want = load_backbone(FOLDER / META["model_dir"][backbone])
    weights = {key: tensor for key, tensor in model.state_dict().items() if "lora" not in key}
    wanted = want.state_dict()
    assert weights.keys() == wanted.keys() and all(torch.equal(weights[key], wanted[key]) for key in wanted)
    for key in ("model_type", "rms_norm_eps", "rope_parameters", "tie_word_embeddings", "hidden_act", "vocab_size"):
        assert getattr(model.config, key) == getattr(want.config, key), key
    assert all(p.is_meta for p in d2f.from_pretrained(name, torch.float32, meta=True).parameters())


ODD_LLADA = dict(block_type="sequential", layer_norm_type="low_precision", alibi=True, attention_layer_norm=True,
                 scale_logits=True, input_emb_norm=True, block_group_size=2, rope=False, include_bias=True)  # fmt: skip


@pytest.mark.parametrize("key, value", ODD_LLADA.items())
def test_other_llada_checkpoints_are_refused(key, value, tmp_path):
    with pytest.raises(ValueError, match=f"{key} {value!r}"):
        d2f.from_pretrained(native_folder("llada", tmp_path / "native", **{key: value}), torch.float32)


def test_missing_tensors_are_refused(tmp_path):
    name = native_folder("llada", tmp_path / "native")
    file = tmp_path / "native" / "model.safetensors"
    tensors = load_file(file)
    tensors.pop("model.transformer.blocks.0.ff_norm.weight")
    save_file(tensors, file, {"format": "pt"})
    with pytest.raises(ValueError, match="missing .*: model.layers.0"):
        d2f.from_pretrained(name, torch.float32)


def test_llada_config_details(tmp_path):
    def config_of(folder, **changes):
        name = native_folder("llada", tmp_path / folder, **changes)
        return d2f.from_pretrained(name, torch.float32, meta=True).config

    assert config_of("a", embedding_size=None, vocab_size=170).vocab_size == 170
    assert config_of("b", embedding_size=192).vocab_size == 192
    heads = config_of("c", n_kv_heads=None, rope_theta=123.0)
    assert heads.num_key_value_heads == heads.num_attention_heads
    assert heads.rope_parameters["rope_theta"] == 123.0
    assert heads.pad_token_id is None and heads.shifted_logits is False


# ------------------------------------------------------------------------------------------------ what a run writes


def run(*args):
    return d2f.main([str(arg) for arg in args])


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    out = tmp_path_factory.mktemp("d2f") / "run"
    assert run("--train", *few_rows(d2f), "--steps", 3, "--batch_size", 4, "--lr", 0.1, "--out", out) == 0
    return out


def texts(folder):
    cfg = d2f.parse(["--generate", "--model", str(folder)])[1]
    model, tokenizer = d2f.load_student(folder, cfg)
    prompts = [d2f.encode(tokenizer, row[0])["prompt_ids"] for row in d2f.read_data(ROOT / "tests/tiny/test.jsonl")[:3]]
    return [d2f.generate(model, torch.tensor([ids]), cfg)[0].tolist() for ids in prompts]


def test_what_is_compared(trained, capsys):
    """With plain AR of tests/tiny; without a baseline the teacher stands in its place."""
    assert run("--generate", "--out", trained, "--problems", 2, "--decode_block_size", 7) == 0
    rows = last_line(capsys)["rows"]
    assert [row["label"] for row in rows] == ["plain AR", "teacher, no cache", "d2f"]
    assert rows[1]["forwards"] == 2 * 28 and all(row["new_tokens"] <= 2 * 24 for row in rows)
    assert run("--generate", "--model", trained, "--baseline", "", "--prompt", "Tom has 3 pens") == 0
    rows = last_line(capsys)["rows"]
    assert [row["label"] for row in rows] == ["teacher, no cache", "d2f"] and rows[0]["x_ar"] == 1


def test_a_trained_folder_is_its_base_with_lora_tensors_beside(trained):
    """Plain transformers loads it as the base, this script as the student."""
    base = load_file(ROOT / "tests/tiny/dlm/model.safetensors")
    tensors = load_file(trained / "model.safetensors")
    lora = {key for key in tensors if ".lora_" in key}
    assert len(lora) == 4 * 4 * 2 and lora | base.keys() == tensors.keys()
    assert all(tensors[key].any() for key in lora), "B has left zero"
    assert all(torch.equal(tensors[key], base[key].float()) for key in base)
    plain, info = AutoModelForCausalLM.from_pretrained(trained, dtype=torch.float32, output_loading_info=True)
    assert not info["missing_keys"] and all(torch.equal(plain.state_dict()[key], base[key].float()) for key in base)
    assert plain.get_input_embeddings().weight is plain.lm_head.weight, "tied"
    assert plain.config.trained_with["adapter"] == ""
    optimizer = load_file(trained / "optimizer.safetensors")
    assert optimizer and all(".lora_" in key for key in optimizer)
    assert texts(trained) == texts(trained) != texts(ROOT / "tests/tiny/dlm")


@pytest.mark.parametrize("backbone", BACKBONES)
def test_native_checkpoint_with_released_adapter_from_the_command_line(backbone, tmp_path):
    """Train on from the adapter, save in Llama's or Qwen2's shape, decode, resume."""
    name, adapter = native_folder(backbone, tmp_path / "native"), FOLDER / META["adapter_dir"][backbone]
    data, out = tmp_path / "data.jsonl", tmp_path / "out"
    data.write_text(json.dumps({"prompt": "a b w1 w2", "response": "c w3"}))
    flags = ["--model", name, "--adapter", adapter, "--data", data, "--max_new_tokens", 16]
    assert run("--generate", *flags) == 0
    few = ["--steps", 2, "--batch_size", 2, "--accumulation", 1, "--max_len", 40, "--lr", 1e-2]
    assert run("--train", "--generate", *flags, "--test", data, *few, "--out", out) == 0
    tensors, want = load_file(out / "model.safetensors"), load_backbone(FOLDER / META["model_dir"][backbone])
    assert all(torch.equal(tensors[key], tensor) for key, tensor in want.state_dict().items())
    cfg = config()
    released = d2f.read_adapter(str(adapter), cfg)
    assert released.keys() == {key for key in tensors if "lora" in key}
    assert not all(torch.equal(tensors[key], released[key]) for key in released)
    held = json.loads((out / "config.json").read_text())["trained_with"]
    assert (held["lora_rank"], held["lora_alpha"]) == (cfg.lora_rank, cfg.lora_alpha)
    assert texts(out) == texts(out) and run("--train", "--resume", "--steps", 3, "--out", out) == 0


def test_rows_that_do_not_fit(capsys):
    cfg = config(max_len=10)
    assert len(d2f.pad_rows(rows_of([(3, 7), (3, 8)]), cfg)) == 1 and "1 of 2 rows" in capsys.readouterr().err
    with pytest.raises(ValueError, match="max_len 10"):
        d2f.pad_rows(rows_of([(9, 8)]), cfg)
