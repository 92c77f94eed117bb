"""Fast-dLLM v2: the reference vectors, and what must hold for any model and any setting."""

import collections
import json
import shutil

import pytest
import torch
from conftest import ROOT, golden, last_line, load_backbone, named, random_lm, watched
from safetensors.torch import save_file
from tokenizers import Tokenizer
from transformers import PreTrainedTokenizerFast, Qwen2ForCausalLM

import fastdllm_v2
from common import Decoder, block_causal, dense, noisy_clean, walk
from fastdllm_v2 import Config, draw_noise, generate, generate_batch, make_training_inputs, pack, training_loss

CASES, TENSORS, FOLDER = golden("fastdllm_v2")
META = CASES["meta"]
PLAIN = dict(mask_id=META["mask_id"], eos_id=META["eos_id"], device="cpu", dtype="float32")


@pytest.fixture(scope="module")
def model():
    return load_backbone(FOLDER / "model")


# --------------------------------------------------------------------------------------------------- reference vectors


@named(CASES["packing"])
def test_packing_equals_the_published_implementation(case):
    cfg = Config(**PLAIN, block_size=case["block_size"], pad_blocks=case["pad_with_mask"], max_len=case["window"])
    samples = [(sample["input_ids"], sample["labels"]) for sample in case["samples"]]
    expected = [case["expected_input_ids"], case["expected_labels"]]
    if case["name"].endswith("quirk"):  # published: a sample of whole blocks gets a whole block of masks more
        windows = pack(samples, cfg)
        assert [[window[name] for window in windows] for name in ("input_ids", "labels")] != expected
        samples = [(ids + [cfg.mask_id] * cfg.block_size, labels + [-100] * cfg.block_size)
                   if len(ids) % cfg.block_size == 0 else (ids, labels) for ids, labels in samples]  # fmt: skip
    windows = pack(samples, cfg)
    assert [[window[name] for window in windows] for name in ("input_ids", "labels")] == expected


@named(CASES["masks"])
def test_masks_equal_the_published_ones(case):
    expected = TENSORS[case["tensor"]]
    T, S = expected.shape
    mask_mod = (noisy_clean(case["L"], case["block_size"]) if case["kind"] == "train"
                else block_causal(case["block_size"], offset=S - T))  # fmt: skip
    assert torch.equal(dense(mask_mod, 1, T, S)[0, 0], expected)


@torch.no_grad()
def test_forwards_equal_the_published_implementation(model):
    case = CASES["forward"]
    tensor = {key[8:]: value for key, value in TENSORS.items() if key.startswith("forward/")}
    cfg = Config(**PLAIN, block_size=case["block_size"], sub_block_size=case["sub_block_size"])
    n = case["prefix_len"]
    s = case["sub_position"]
    decoder = Decoder(model, n + 2 * cfg.block_size)

    def logits(name, offset=0):
        return model.lm_head(fastdllm_v2.forward(decoder, tensor[f"{name}_ids"], cfg, offset))

    def near(a, b):
        return (a - b).abs().max() < 2e-4

    assert near(logits("full"), tensor["full_logits"])
    assert near(logits("prefill")[:, -1], tensor["prefill_last_logits"])
    decoder.kv_cache.commit(n)
    assert near(logits("block"), tensor["block_logits"])
    for name in ("sub1", "sub2"):  # on the block cache that the calls before left, in this order
        assert near(logits(name, s), tensor[f"{name}_logits"])
    assert near(logits("commit"), tensor["commit_logits"])
    assert near(decoder.kv_cache.layers[0][0][:, :, :n], tensor["prefix_k_layer0"])
    assert near(decoder.kv_cache.layers[-1][1][:, :, :n], tensor["prefix_v_last"])
    assert decoder.kv_cache.cache_len == n


@named(CASES["training"])
def test_training_step_equals_the_published_implementation(model, case):
    """Published: a row [noisy | clean] of 2 L for each view; here both views share one clean copy."""
    tensor = {key.split("/", 2)[2]: value for key, value in TENSORS.items() if key.startswith(f"train/{case['name']}/")}
    cfg = Config(**PLAIN, block_size=case["block_size"])
    rows = zip(tensor["input_ids"].tolist(), tensor["labels"].tolist())
    batch = [{"input_ids": ids, "labels": labels} for ids, labels in rows]
    inputs = make_training_inputs(batch, {"t": tensor["t"], "u": tensor["u"]}, cfg)
    B, L = tensor["input_ids"].shape

    def views_first(x):  # (B, 2, ...) -> (2 B, ...): as published, all first views before all second ones
        return x.transpose(0, 1).flatten(0, 1)

    copies = inputs["input_ids"].view(B, 3, L)
    rows = torch.cat([views_first(copies[:, :2]), copies[:, 2].repeat(2, 1)], dim=1)
    assert torch.equal(rows, tensor["model_input_ids"])
    assert torch.equal(views_first(inputs["labels"]), tensor["view_labels"])
    assert torch.equal(inputs["labels"][:, 0] != -100, tensor["masked_first_view"])
    assert (inputs["position_ids"] == torch.arange(L).repeat(3)).all()
    assert (tensor["labels"] != -100).sum() == case["n_labelled"]

    loss, logs = training_loss(model, inputs, cfg)
    assert (views_first(logs["nll"]) - tensor["per_token_ce"]).abs().max() < 1e-4
    assert logs["nll"].sum((0, 2)).tolist() == pytest.approx(case["loss_sum_per_view"], abs=1e-4, rel=1e-6)
    assert logs["nll"].sum().item() == pytest.approx(case["loss_sum"], abs=1e-4, rel=1e-6)
    assert (inputs["labels"][:, :, 1:] != -100).sum((0, 2)).tolist() == case["n_scored_per_view"]
    if "logits" in tensor:
        assert (views_first(noisy_logits(model, inputs, cfg)[0]) - tensor["logits"]).abs().max() < 2e-4
    assert loss.item() == pytest.approx(case["loss_trainer"], abs=1e-5)
    scale = case["n_labelled"] / case["n_scored"]  # the vectors' gradients are of the mean over scored tokens
    assert loss.item() * scale == pytest.approx(case["loss_mean"], abs=1e-5)
    model.zero_grad()
    loss.backward()
    params = dict(model.named_parameters())
    for name, norm in case["grad_norms"].items():
        assert params[name].grad.norm().item() * scale == pytest.approx(norm, rel=1e-4), name
    total = sum(p.grad.norm() ** 2 for p in params.values()).sqrt().item()
    assert total * scale == pytest.approx(case["grad_norm_total"], rel=1e-4)
    for key, grad in tensor.items():
        if key.startswith("grad/"):
            assert (params[key[5:]].grad * scale - grad).abs().max() < 1e-4 * max(1, grad.abs().max()), key


@named(CASES["sampling"])
def test_nucleus_equals_the_published_implementation(case):
    logits = TENSORS["sampling/logits"]
    if case["temperature"] == 0:
        pred_ids, conf = fastdllm_v2.propose(logits, Config(**PLAIN, top_p=case["top_p"]), None)
        assert pred_ids.tolist() == case["greedy_tokens"]
        assert conf.tolist() == pytest.approx(case["confidence"], abs=1e-6)
        return
    probs = fastdllm_v2.nucleus((logits / case["temperature"]).softmax(-1), case["top_p"])
    assert (probs - TENSORS[case["tensor"]]).abs().max() < 1e-6
    assert (probs > 0).sum(-1).tolist() == case["support_sizes"]


@named(CASES["decode"])
def test_decoding_equals_the_published_implementation(model, case, monkeypatch):
    calls = watched(monkeypatch, lambda decoder, ids, positions, *_: (
        positions[0, 0].item(), ids.tolist(), decoder.kv_cache.cache_len))  # fmt: skip
    D = case["block_size"]
    eos_id = META["eos_id"]
    single = case["api"] == "generate"
    prompts = [case["prompt"]] if single else case["prompts"]
    expected = [case["expected"]] if single else case["expected"]
    longest = max(map(len, prompts))
    # published: so many whole blocks, rounded down, and the token of the last commit. Ours writes at least its budget
    budget = (longest // D + case["max_new_tokens"] // D) * D + 1 - longest
    cfg = Config(**PLAIN, block_size=D, sub_block_size=case["sub_block_size"], tau=case["threshold"],
                 max_new_tokens=budget, block_cache=case["use_block_cache"], temperature=case["temperature"])  # fmt: skip
    hook = model.lm_head.register_forward_hook(lambda module, args, out: out * case["logit_scale"])
    try:
        if single:
            texts, record = generate(model, torch.tensor(prompts), cfg)
            assert len(record["fixed_round"]) == case["n_generated"]
        else:
            texts, record = generate_batch(model, [torch.tensor(ids) for ids in prompts], cfg)
    finally:
        hook.remove()
    texts = [ids.tolist() for ids in texts]
    assert texts == expected
    made = [case["n_generated"]] if single else case["n_generated"]
    stopped = [case["stopped_by_eos"]] if single else case["stopped_by_eos"]
    for text, prompt, n, eos in zip(texts, prompts, made, stopped, strict=True):
        assert len(text) - len(prompt) == n and (text[-1] == eos_id) == eos
    count = collections.Counter(record["calls"])
    assert {kind: count[kind] for kind in case["forwards"]} == case["forwards"]
    assert len(record["calls"]) == case["n_forwards"]
    # the vectors count every call; ours leaves a prefill out, unless it gives a row its first token
    gives_a_token = min(map(len, prompts)) % D == 0
    assert record["forwards"] == case["n_forwards"] - (count["prefill"] and not gives_a_token)
    if case["logit_scale"] != 1:
        return  # confidences are tied, their order is open
    for kind, (start, ids, cache_len), (kind_there, start_there, ids_there) in zip(
        record["calls"], calls, case["trace"], strict=True
    ):
        ids_there = ids_there if type(ids_there[0]) is list else [ids_there]
        if kind == "commit":  # the published batch decoder pads finished rows after their stop token before they leave
            ids = [row[: row.index(eos_id) + 1] if eos_id in row else row for row in ids]
            ids_there = [row[: row.index(eos_id) + 1] if eos_id in row else row for row in ids_there]
        assert (kind, start, ids) == (kind_there, start_there, ids_there)
        assert cache_len % D == 0


# ------------------------------------------------------------------------------------------------- decoding invariants


@pytest.fixture(scope="module")
def random_model():
    return random_lm("qwen2", 5, initializer_range=0.4, tie_word_embeddings=True)


def settings(**changes):
    base = dict(PLAIN, mask_id=39, eos_id=None, max_new_tokens=24, block_size=8, sub_block_size=4, tau=0.3)
    return Config(**(base | changes))


def prompt(P, seed=0):
    return torch.randint(36, (1, P), generator=torch.Generator().manual_seed(seed))


LENGTHS = [1, 3, 7, 8, 9, 16, 21]


@pytest.mark.parametrize("P", LENGTHS)
@pytest.mark.parametrize("block_cache", [False, True])
def test_the_cache_is_exact_and_only_commits_touch_it(random_model, P, block_cache):
    class Watcher(Decoder):
        seen = []

        def __call__(self, *args):
            n = self.kv_cache.cache_len
            before = [tensor[:, :, :n].clone() for layer in self.kv_cache.layers for tensor in layer]
            out = super().__call__(*args)
            after = [tensor[:, :, :n] for layer in self.kv_cache.layers for tensor in layer]
            assert n % 8 == 0 and self.kv_cache.cache_len == n and all(map(torch.equal, before, after))
            self.seen.append(n)
            return out

    decoder = Watcher(random_model, 64)
    ids, record = generate(random_model, prompt(P), settings(block_cache=block_cache), decoder)
    assert 39 not in ids[0].tolist() and torch.equal(ids[:, :P], prompt(P))
    assert len(decoder.seen) == len(record["calls"]) and ("sub" in record["calls"]) == block_cache
    n = decoder.kv_cache.cache_len
    assert n == (P + 23) // 8 * 8, "the last block is committed only for the token that is still asked for"
    fresh = Decoder(random_model, 64)  # what was committed is what a fresh forward over the clean text gives
    fresh(ids[:, :n], torch.arange(n)[None], dense(block_causal(8), 1, n, n), torch.arange(n))
    for layer, other in zip(decoder.kv_cache.layers, fresh.kv_cache.layers):
        for a, b in zip(layer, other):
            assert (a[:, :, :n] - b[:, :, :n]).abs().max() < 1e-4


@pytest.mark.parametrize("P", [1, 5, 8])
def test_blocks_of_one_token_are_plain_greedy_decoding(random_model, P):
    cfg = settings(block_size=1, sub_block_size=1)
    ids, record = generate(random_model, prompt(P), cfg)
    theirs = random_model.generate(prompt(P), max_new_tokens=24, do_sample=False, pad_token_id=0,
                                   suppress_tokens=[cfg.mask_id])  # fmt: skip
    assert torch.equal(ids, theirs) and set(record["calls"]) == {"prefill", "commit"}
    assert record["fixed_round"] == list(range(24)) and record["forwards"] == 24


@pytest.mark.parametrize("P", LENGTHS)
def test_thresholds_at_their_extremes(random_model, P):
    for block_cache in (False, True):  # 1: one token a forward
        _, record = generate(random_model, prompt(P), settings(tau=1.0, block_cache=block_cache))
        assert sorted(record["fixed_round"]) == list(range(record["forwards"]))
    _, record = generate(random_model, prompt(P), settings(tau=0.0))  # 0: one forward a sub-block
    blocks = (P + 24 + 6) // 8 - P // 8
    # the first token of a block is known, so every sub-block has masks but those inside the prompt
    assert record["calls"].count("block") == 2 * blocks - P % 8 // 4
    assert record["calls"].count("commit") == (P + 23) // 8 - P // 8
    assert record["fixed_round"] == sorted(record["fixed_round"]), "sub-blocks from left to right"


@pytest.mark.parametrize("P", LENGTHS)
def test_block_cache_is_exact_where_the_sub_block_is_the_block(random_model, P):
    runs = [generate(random_model, prompt(P), settings(sub_block_size=8, block_cache=on)) for on in (False, True)]
    assert torch.equal(runs[0][0], runs[1][0]) and runs[0][1]["fixed_round"] == runs[1][1]["fixed_round"]
    assert "sub" in runs[1][1]["calls"] and len(runs[0][1]["calls"]) == len(runs[1][1]["calls"])


@pytest.mark.parametrize("block_size", [24, 64])
def test_a_prompt_of_whole_blocks_gives_the_first_token(random_model, block_size):
    """Also at exactly one block, and alone, in a batch of shorter and longer ones; nothing of the prompt is lost."""
    cfg = settings(block_size=block_size, sub_block_size=block_size // 2, max_new_tokens=2, tau=0.0)
    for P in (block_size, 2 * block_size):
        firsts = set()
        for seed in range(3):
            ids = prompt(P, seed)
            mask = dense(block_causal(block_size), 1, P, P)
            logits = random_model.lm_head(walk(random_model, ids, torch.arange(P)[None], mask))[0, -1, :39]
            firsts.add(logits.argmax().item())
            single = generate(random_model, ids, cfg)[0][0]
            others = [prompt(3)[0], prompt(3 * block_size + 1)[0]]
            batch = generate_batch(random_model, [others[0], ids[0], others[1]], cfg)[0][1]
            assert single[P] == batch[P] == logits.argmax() and torch.equal(batch[: len(single)], single)
        assert len(firsts) > 1
    for P in (1, block_size - 1, block_size + 1):
        texts = [generate(random_model, prompt(P, seed), cfg)[0][0, P:].tolist() for seed in range(3)]
        assert any(text != texts[0] for text in texts), "the prompt counts"


def eos_that_ends_texts(model, prompts, cfg):
    """The tokens that stand most often in the texts, so that rows of a batch stop at different blocks."""
    texts = torch.cat([generate(model, ids[None], cfg)[0][0, len(ids) :] for ids in prompts])
    return texts.bincount().argsort(descending=True).tolist()


@pytest.mark.parametrize("tau, rank", [(0.1, 0), (0.1, 2), (0.1, 6), (1.0, 2)])
def test_rows_of_a_batch_equal_their_single_runs(random_model, tau, rank, monkeypatch):
    prompts = [prompt(P, seed=P)[0] for P in LENGTHS]
    cfg = settings(tau=tau, max_new_tokens=32)
    cfg.eos_id = eos_that_ends_texts(random_model, prompts, cfg)[rank]
    left = []
    keep_rows = Decoder.keep_rows
    monkeypatch.setattr(Decoder, "keep_rows", lambda self, rows: (left.append(len(rows)), keep_rows(self, rows)))
    texts, record = generate_batch(random_model, prompts, cfg)

    def order(rounds):
        return [sorted(set(rounds)).index(number) for number in rounds]

    for ids, text, rounds in zip(prompts, texts, record["fixed_round"], strict=True):
        single, single_record = generate(random_model, ids[None], cfg)
        fixed = single_record["fixed_round"]
        assert len(rounds) == len(text) - len(ids) and order(rounds[: len(fixed)]) == order(fixed)
        assert torch.equal(text[: single.shape[1]], single[0])
        assert len(text) == single.shape[1] or cfg.eos_id not in single[0, len(ids) :].tolist()
        assert cfg.mask_id not in text.tolist() and cfg.eos_id not in text[len(ids) : -1].tolist()
    assert rank > 2 or (left and left == sorted(left, reverse=True)), "rows must leave at different blocks"
    order = torch.randperm(len(prompts), generator=torch.Generator().manual_seed(1)).tolist()
    again, record2 = generate_batch(random_model, [prompts[i] for i in order], cfg)
    assert record["calls"] == record2["calls"]
    assert all(torch.equal(texts[i], text) for i, text in zip(order, again))


def test_an_eos_ends_the_text_wherever_it_comes_from(random_model):
    """From a forward, a commit, the prefill: what stands before it is written, no forward is spent after it.

    A prompt alone ends inside a block; a batch fills the block, does not commit it, and begins no other.
    """
    sources = set()
    for P in (1, 7, 8, 21):
        twice = [prompt(P)[0]] * 2
        free, _ = generate(random_model, prompt(P), settings())
        free_calls = generate_batch(random_model, twice, settings())[1]["calls"]
        for eos_id in {free[0, P + i].item() for i in (0, 2, -P % 8, 12)}:  # -P % 8: the next block's first
            cfg = settings(eos_id=eos_id)
            ids, record = generate(random_model, prompt(P), cfg)
            n = ids.shape[1]
            assert torch.equal(ids, free[:, :n]) and (ids[0, P:] == eos_id).nonzero().tolist() == [[n - 1 - P]]
            texts, batch_record = generate_batch(random_model, twice, cfg)
            assert torch.equal(texts[0], ids[0]) and torch.equal(texts[1], ids[0])
            calls = batch_record["calls"]
            assert calls == free_calls[: len(calls)]
            if (n - 1) % 8 == 0:
                assert record["calls"][-1] == calls[-1] in ("commit", "prefill")
            else:
                assert free_calls[len(calls) :][:1] in (["commit"], [])
            sources.add(record["calls"][-1])
            mixed, _ = generate_batch(random_model, [ids[0, :P], prompt(2, seed=9)[0]], cfg)
            assert torch.equal(mixed[0], ids[0])
        new = free[0, P:].tolist()
        for eos_id in ([new[5], new[13]], [new[13], new[5]]):  # of a list each ends a text
            texts, _ = generate_batch(random_model, twice, settings(eos_id=eos_id))
            assert all(text[P:].tolist() == new[: min(map(new.index, eos_id)) + 1] for text in texts)
    assert sources == {"commit", "prefill", "block"}


@pytest.mark.parametrize("block_size", [4, 32])
def test_generate_writes_at_least_what_is_asked_for(random_model, block_size):
    """Whole blocks, and not a forward more than they take."""
    for P in LENGTHS:
        for wanted in (1, 20):
            cfg = settings(max_new_tokens=wanted, block_size=block_size)
            ids, record = generate(random_model, prompt(P), cfg)
            assert wanted <= ids.shape[1] - P < wanted + block_size
            assert len(fastdllm_v2.trim(ids[0, P:], cfg)) == wanted
            assert (record["calls"][-1] in ("commit", "prefill")) == ((P + wanted - 1) % block_size == 0)
    texts, _ = generate_batch(random_model, [prompt(n)[0] for n in LENGTHS], cfg)
    assert all(len(text) - n >= 20 for text, n in zip(texts, LENGTHS))


def test_sampling_draws_from_the_nucleus():
    logits = torch.randn(1, 8, generator=torch.Generator().manual_seed(3)) * 2
    cfg = settings(temperature=0.7, top_p=0.8, mask_id=7)
    draws, conf = fastdllm_v2.propose(logits.expand(40000, 8), cfg, torch.Generator().manual_seed(0))
    expected = torch.cat([fastdllm_v2.nucleus((logits[:, :7] / 0.7).softmax(-1), 0.8)[0], torch.zeros(1)])
    freq = torch.bincount(draws, minlength=8) / 40000
    assert (freq - expected).abs().max() < 0.01 and (freq[expected == 0] == 0).all() and (expected > 0).sum() > 1
    assert (conf - expected[draws]).abs().max() < 1e-6, "the probability that a token was drawn with"
    assert (fastdllm_v2.nucleus(torch.full((1, 4), 0.25), 0.5) > 0).sum() == 3, "mass before it exactly top_p: kept"
    assert fastdllm_v2.nucleus(logits.softmax(-1), 0.0).argmax() == logits.argmax()


def test_selection_is_strict_and_never_stalls():
    is_masked = torch.tensor([[1, 1, 1, 0], [1, 0, 1, 1], [0, 0, 0, 0]]).bool()
    conf = torch.tensor([0.9, 0.95, 0.2, 0.5, 0.7, 0.1])  # of the masked ones, row after row
    assert fastdllm_v2.select(conf, is_masked, 0.9).tolist() == [False, True, False, False, True, False]
    assert fastdllm_v2.select(torch.ones(4), torch.ones(1, 4, dtype=torch.bool), 1.0).sum() == 1
    assert fastdllm_v2.select(torch.zeros(4), torch.ones(2, 2, dtype=torch.bool), 0.0).sum() == 2


def test_the_head_is_applied_to_masked_rows_of_the_sub_block_alone(random_model):
    rows = []
    hook = random_model.lm_head.register_forward_hook(lambda module, args, out: rows.append(args[0].shape[0]))
    _, record = generate(random_model, prompt(5), settings(tau=0.0))
    hook.remove()
    kinds = [kind for kind in record["calls"] if kind != "prefill"]
    assert all(n == 1 if kind == "commit" else n <= 4 for n, kind in zip(rows, kinds, strict=True))
    assert sum(rows) == len(record["fixed_round"]), "at threshold 0 each row is read once"


def test_prompts_and_sizes_that_cannot_work_are_refused(random_model):
    with pytest.raises(ValueError, match="generate_batch"):
        generate(random_model, prompt(5)[0], settings())
    for bad in ([], [prompt(5)[0, :0]], [prompt(5)[0], torch.tensor([1, 39])]):
        with pytest.raises(ValueError, match="a token and no mask"):
            generate_batch(random_model, bad, settings())
    with pytest.raises(ValueError, match="divides"):
        generate(random_model, prompt(5), settings(sub_block_size=3))
    with pytest.raises(ValueError, match="KV cache holds"):
        generate(random_model, prompt(5), settings(), Decoder(random_model, 8))
    for length, window, words in ((90, 42, "no multiple"), (9, 24, "do not fill")):
        with pytest.raises(ValueError, match=words):
            pack([([1] * length, [1] * length)], settings(max_len=window))


# ------------------------------------------------------------------------------------------------- training invariants


def random_windows(seed, rows=3, window=32):
    generator = torch.Generator().manual_seed(seed)
    sizes = torch.randint(1, 14, (rows * window // 6, 2), generator=generator).tolist()

    def ids(n):
        return torch.randint(36, (n,), generator=generator).tolist()

    samples = []
    for P, A in sizes:
        answer = [*ids(A - 1), 37]
        samples.append((ids(P) + answer, [-100] * P + answer))
    return pack(samples, settings(max_len=window))[:rows]


def built(seed, **changes):
    cfg = settings(**changes)
    batch = random_windows(seed)
    return batch, make_training_inputs(batch, draw_noise(batch, cfg, torch.Generator().manual_seed(seed)), cfg), cfg


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("pad_blocks", [True, False])
def test_windows_hold_every_token_once_and_no_block_two_samples(seed, pad_blocks):
    cfg = settings(pad_blocks=pad_blocks, max_len=24)
    sizes = torch.randint(1, 20, (20, 2), generator=torch.Generator().manual_seed(seed)).tolist()
    windows = pack([([i] * (P + A), [-100] * P + [i] * A) for i, (P, A) in enumerate(sizes)], cfg)
    assert all(len(window["input_ids"]) == len(window["labels"]) == 24 for window in windows)
    ids = [i for window in windows for i in window["input_ids"]]
    labels = [i for window in windows for i in window["labels"]]
    kept = [i for i in ids if i != cfg.mask_id]
    everything = [i for i, pair in enumerate(sizes) for _ in range(sum(pair))]
    assert kept == everything[: len(kept)] and all(label in (-100, i) for i, label in zip(ids, labels))
    assert all(labels.count(i) == A for i, (_, A) in enumerate(sizes[: kept[-1]]))
    padded = [sum(pair) + (-sum(pair) % 8 if pad_blocks else 0) for pair in sizes]
    assert len(ids) == sum(padded) // 24 * 24 and ids.count(39) <= sum(padded) - len(everything)
    two = [b for b in range(0, len(ids), 8) if len(set(ids[b : b + 8]) - {39}) > 1]
    assert bool(two) != pad_blocks


def test_one_view_is_the_first_of_two_and_weights_add_up_to_1():
    _, two, _ = built(0)
    _, one, _ = built(0, complementary=False)
    assert torch.equal(one["labels"], two["labels"][:, :1]) and one["input_ids"].shape == (3, 64)
    for inputs in (one, two):
        assert torch.equal(inputs["weights"] > 0, inputs["labels"] != -100)
    assert two["weights"].sum().item() == pytest.approx(1)


def test_noise_is_drawn_per_block():
    """p = (1 - 1e-3) t + 1e-3; a token is masked where u < p, strictly."""
    batch = [{"input_ids": [1] * 800, "labels": [1] * 800}] * 40
    draws = draw_noise(batch, settings(), torch.Generator().manual_seed(0))
    generator = torch.Generator().manual_seed(0)  # all of t, then all of u
    assert torch.equal(draws["t"], torch.rand(4000, generator=generator))
    assert torch.equal(draws["u"], torch.rand(4000, 8, generator=generator))
    u = torch.tensor([0.0, 9e-4, 1e-3, 2e-3, 0.5, 0.5004, 0.501, 1])
    batch = [{"input_ids": [1] * 16, "labels": [1] * 16}]
    draws = {"t": torch.tensor([0.0, 0.5]), "u": u.repeat(2, 1)}
    labels = make_training_inputs(batch, draws, settings())["labels"]
    assert (labels[0, 0] != -100).tolist() == [True] * 2 + [False] * 6 + [True] * 6 + [False] * 2


def noisy_logits(model, inputs, cfg):
    R, V, L = inputs["labels"].shape
    mask = dense(noisy_clean(L, cfg.block_size, V), 1, (V + 1) * L, (V + 1) * L)
    logits = model.lm_head(walk(model, inputs["input_ids"], inputs["position_ids"], mask))
    return logits[:, : V * L].unflatten(1, (V, L)), logits[:, V * L :]  # (R, V, L, vocab), (R, L, vocab)


def test_windows_without_an_answer_count_0(random_model):
    _, inputs, cfg = built(5)
    inputs["labels"].fill_(-100)
    random_model.zero_grad()
    loss, _ = training_loss(random_model, inputs, cfg)
    loss.backward()
    assert loss.item() == 0 and all(p.grad is None or p.grad.isfinite().all() for p in random_model.parameters())


# ------------------------------------------------------------------------- the released layout, the size of the blocks


def released(folder):
    """The vectors' model as the released checkpoints are laid out: their config keys, remote code named, none there.

    The mask is among the tokenizer's added tokens only.
    """
    backbone = load_backbone(FOLDER / "model")
    spec = (ROOT / "tests" / "tiny" / "ar" / "tokenizer.json").read_text().replace("<mask>", "|<MASK>|")
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=Tokenizer.from_str(spec), eos_token="<eos>", unk_token="<unk>")
    tokenizer.save_pretrained(folder)
    config = json.loads((FOLDER / "model" / "config_released_style.json").read_text())
    config |= {"bd_size": 16, "eos_token_id": tokenizer.eos_token_id, "pad_token_id": tokenizer.eos_token_id}
    (folder / "config.json").write_text(json.dumps(config))
    tensors = {key: value.detach().clone() for key, value in backbone.named_parameters()}  # a tied head once
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return backbone


def test_the_released_layout_loads_without_remote_code(tmp_path, capsys):
    theirs = released(tmp_path)
    tied = theirs.config.tie_word_embeddings
    for training in (False, True):
        cfg = Config(device="cpu", dtype="float32")
        loaded, tokenizer = fastdllm_v2.load(str(tmp_path), cfg, torch.float32, training)
        assert type(loaded) is Qwen2ForCausalLM and not hasattr(loaded.config, "auto_map")
        assert tokenizer.mask_token is None and (cfg.mask_id, cfg.eos_id) == (1, 0)
        assert all(torch.equal(a, b) for a, b in zip(loaded.parameters(), theirs.parameters(), strict=True))
        assert loaded.model.embed_tokens.num_embeddings == theirs.config.vocab_size > cfg.vocab_len == len(tokenizer)
        assert (loaded.lm_head.weight.data_ptr() == loaded.model.embed_tokens.weight.data_ptr()) == tied
    ids = torch.tensor([[0, 5, 7, 0]])  # the stop token must learn, though the released config calls it padding
    hidden = walk(loaded, ids, torch.arange(4)[None], dense(block_causal(16), 1, 4, 4))
    hidden.square().sum().backward()
    assert loaded.model.embed_tokens.weight.grad[0].abs().sum() > 0
    assert (loaded(input_ids=ids).logits - theirs(input_ids=ids).logits).abs().max() < 1e-5
    flags = ["--generate", "--model", str(tmp_path), "--prompt", "Tom has 3 red", "--device", "cpu"]
    assert fastdllm_v2.main([*flags, "--dtype", "float32", "--max_new_tokens", "20"]) == 0
    assert last_line(capsys)["rows"][1]["new_tokens"] <= 20


def test_blocks_are_as_the_model_was_trained_unless_a_flag_says_otherwise(tmp_path, capsys, monkeypatch):
    """bd_size of the config, in decoding and in further training, which saves it."""
    folder = tmp_path / "released"
    out = tmp_path / "out"
    shutil.copytree(ROOT / "tests" / "tiny" / "ar", folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"bd_size": 16}))
    seen = set()
    forward = fastdllm_v2.forward
    monkeypatch.setattr(fastdllm_v2, "forward", lambda decoder, ids, cfg, *args: (
        seen.add(cfg.block_size), forward(decoder, ids, cfg, *args))[1])  # fmt: skip

    def run(command, model, *flags):
        seen.clear()
        words = {"--train": "--out", "--generate": "--prompt"}[command], str(out)
        flags = [*flags, *words, "--device", "cpu", "--max_new_tokens", "3", "--steps", "1", "--batch_size", "1"]
        return fastdllm_v2.main([command, "--model", str(model), "--accumulation", "1", *flags])

    assert run("--generate", folder) == 0 and seen == {16}
    assert run("--generate", folder, "--block_size", "8") == 0 and seen == {8}
    assert run("--train", folder, "--sub_block_size", "3") == 2 and "divide" in capsys.readouterr().err
    assert run("--train", folder, "--max_len", "96") == 0
    assert json.loads((out / "config.json").read_text())["bd_size"] == 16
    capsys.readouterr()
    assert run("--generate", out, "--sweep") == 0 and seen == {16}  # at the thresholds of the paper
    rows = last_line(capsys)["rows"]
    assert [row["label"] for row in rows[1:]] == [f"fastdllm_v2, tau {tau / 10:.1f}" for tau in range(5, 11)]
    assert rows[-1]["tokens_per_forward"] <= 1, "threshold 1: one token a forward"
