"""Fast-dLLM v2: the reference vectors, and what must hold for any model and any setting."""

import collections
import dataclasses
import json

import pytest
import torch
import torch.nn.functional as F
from conftest import golden, load_backbone
from safetensors.torch import load_file, save_file
from test_device import PretendedDevice, mark, marked, put_there
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM

import fastdllm_v2
import kernels
from common import Decoder, block_causal, dense, noisy_clean, prepare, walk
from fastdllm_v2 import (
    Config,
    draw_noise,
    generate,
    generate_batch,
    make_training_inputs,
    masked_nll,
    pack_windows,
    training_loss,
)

CASES, TENSORS, FOLDER = golden("fastdllm_v2")
META = CASES["meta"]
PLAIN = dict(mask_id=META["mask_id"], eos_id=META["eos_id"], device="cpu", dtype="float32", compile=False)


@pytest.fixture(scope="module")
def model():
    return load_backbone(FOLDER / "model")


class Recorder(Decoder):
    """A Decoder that remembers what every forward was given."""

    made = []

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.calls = []
        self.made.append(self)

    def __call__(self, input_ids, position_ids, attn_mask, write_idx, count=True, **asked):
        self.calls.append((position_ids[0, 0].item(), input_ids.tolist(), self.kv_cache.cache_len))
        return super().__call__(input_ids, position_ids, attn_mask, write_idx, count, **asked)


# --------------------------------------------------------------------------------------------------- reference vectors


def named(cases):
    return pytest.mark.parametrize("case", cases, ids=lambda case: case.get("name") or case.get("tensor") or "greedy")


@named(CASES["packing"])
def test_packing_equals_the_published_implementation(case):
    cfg = Config(**PLAIN, block_size=case["block_size"], pad_blocks=case["pad_with_mask"])
    samples = [(sample["input_ids"], sample["labels"]) for sample in case["samples"]]
    windows = pack_windows(samples, case["window"], cfg)
    got = [[window[name] for window in windows] for name in ("input_ids", "labels")]
    expected = [case["expected_input_ids"], case["expected_labels"]]
    if not case["name"].endswith("quirk"):
        assert got == expected
        return
    # published: a sample of whole blocks gets a whole block of masks on top; ours gets none
    assert got != expected
    quirky = [(ids + [cfg.mask_id] * cfg.block_size, labels + [-100] * cfg.block_size)
              if len(ids) % cfg.block_size == 0 else (ids, labels) for ids, labels in samples]  # fmt: skip
    windows = pack_windows(quirky, case["window"], cfg)
    assert [[window[name] for window in windows] for name in ("input_ids", "labels")] == expected


@named(CASES["masks"])
def test_masks_equal_the_published_ones(case):
    expected = TENSORS[case["tensor"]]
    T, S = expected.shape
    mask_mod = (noisy_clean(case["L"], case["block_size"]) if case["kind"] == "train"
                else block_causal(case["block_size"], offset=S - T))  # fmt: skip
    assert torch.equal(dense(mask_mod, 1, T, S)[0, 0], expected)


def test_forwards_equal_the_published_implementation(model):
    case, tensor = CASES["forward"], {key[8:]: value for key, value in TENSORS.items() if key.startswith("forward/")}
    cfg = Config(**PLAIN, block_size=case["block_size"], sub_block_size=case["sub_block_size"])
    n, s = case["prefix_len"], case["sub_position"]

    def near(a, b):
        return (a - b).abs().max() < 2e-4

    decoder = Decoder(model, n + 2 * cfg.block_size)
    assert near(fastdllm_v2.forward(decoder, tensor["full_ids"], cfg), tensor["full_logits"])
    assert near(fastdllm_v2.forward(decoder, tensor["prefill_ids"], cfg)[:, -1], tensor["prefill_last_logits"])
    decoder.kv_cache.commit(n)
    keys, values = decoder.kv_cache.layers[0][0], decoder.kv_cache.layers[-1][1]
    assert near(fastdllm_v2.forward(decoder, tensor["block_ids"], cfg), tensor["block_logits"])
    for name in ("sub1", "sub2"):  # on the block cache that the calls before left, in this order
        assert near(fastdllm_v2.forward(decoder, tensor[f"{name}_ids"], cfg, offset=s), tensor[f"{name}_logits"])
    assert near(fastdllm_v2.forward(decoder, tensor["commit_ids"], cfg), tensor["commit_logits"])
    assert near(keys[:, :, :n], tensor["prefix_k_layer0"]) and near(values[:, :, :n], tensor["prefix_v_last"])
    assert decoder.kv_cache.cache_len == n


def training_windows(case):
    ids, labels = (TENSORS[f"train/{case['name']}/{name}"].tolist() for name in ("input_ids", "labels"))
    return [{"input_ids": row, "labels": row_labels} for row, row_labels in zip(ids, labels)]


@named(CASES["training"])
def test_training_step_equals_the_published_implementation(model, case):
    tensor = {key.split("/", 2)[2]: value for key, value in TENSORS.items() if key.startswith(f"train/{case['name']}/")}
    cfg = Config(**PLAIN, block_size=case["block_size"], shared_clean=False)
    batch, draws = training_windows(case), {"t": tensor["t"], "u": tensor["u"]}
    inputs = make_training_inputs(batch, draws, cfg)
    B, L = tensor["input_ids"].shape
    assert torch.equal(inputs["input_ids"], tensor["model_input_ids"])
    assert torch.equal(inputs["labels"][:, 0], tensor["view_labels"])
    assert torch.equal(inputs["labels"][:B, 0] != -100, tensor["masked_first_view"])
    assert (inputs["position_ids"] == torch.arange(L).repeat(2)).all()
    assert (tensor["labels"] != -100).sum() == case["n_labelled"]

    nll = masked_nll(model, inputs, cfg)[:, 0]
    assert (nll - tensor["per_token_ce"]).abs().max() < 1e-4
    for view, (total, count) in enumerate(zip(case["loss_sum_per_view"], case["n_scored_per_view"])):
        rows = slice(view * B, (view + 1) * B)
        assert nll[rows].sum().item() == pytest.approx(total, abs=1e-4, rel=1e-6)
        assert (inputs["labels"][rows, 0, 1:] != -100).sum() == count
    if "logits" in tensor:
        mask = dense(noisy_clean(L, cfg.block_size), 1, 2 * L, 2 * L)
        hidden = walk(model, inputs["input_ids"], inputs["position_ids"], mask)
        assert (model.lm_head(hidden[:, :L]) - tensor["logits"]).abs().max() < 2e-4

    params = dict(model.named_parameters())
    for shared_clean in (False, True):  # one clean copy for both views: other rows, the same loss and gradients
        inputs = make_training_inputs(batch, draws, dataclasses.replace(cfg, shared_clean=shared_clean))
        assert inputs["input_ids"].shape == ((B, 3 * L) if shared_clean else (2 * B, 2 * L))
        model.zero_grad()
        loss, logs = training_loss(model, inputs, cfg)
        loss.backward()
        assert logs["loss_sum"] == pytest.approx(case["loss_sum"], abs=1e-4, rel=1e-6)
        assert logs["scored"] == case["n_scored"]
        assert loss.item() == pytest.approx(case["loss_trainer"], abs=1e-5)
        scale = case["n_labelled"] / case["n_scored"]  # the vectors' gradients are of the mean over scored tokens
        assert loss.item() * scale == pytest.approx(case["loss_mean"], abs=1e-5)
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
    probs = fastdllm_v2.nucleus(logits, case["temperature"], case["top_p"])
    assert (probs - TENSORS[case["tensor"]]).abs().max() < 1e-6
    assert (probs > 0).sum(-1).tolist() == case["support_sizes"]


def decode_config(case):
    return Config(**PLAIN, block_size=case["block_size"], sub_block_size=case["sub_block_size"], tau=case["threshold"],
                  max_new_tokens=case["max_new_tokens"], block_cache=case["use_block_cache"],
                  temperature=case["temperature"])  # fmt: skip


def cut(ids, eos_id):
    return ids[: ids.index(eos_id) + 1] if eos_id in ids else ids


@named(CASES["decode"])
def test_decoding_equals_the_published_implementation(model, case, monkeypatch):
    monkeypatch.setattr(fastdllm_v2, "Decoder", Recorder)
    cfg, eos_id = decode_config(case), META["eos_id"]
    hook = model.lm_head.register_forward_hook(lambda module, args, out: out * case["logit_scale"])
    try:
        if case["api"] == "generate":
            prompts = [case["prompt"]]
            ids, record = generate(model, torch.tensor(prompts), cfg)
            texts, expected = ids.tolist(), [case["expected"]]
            assert len(record["fixed_round"]) == case["n_generated"]
        else:
            prompts, expected = case["prompts"], case["expected"]
            texts, record = generate_batch(model, [torch.tensor(ids) for ids in prompts], cfg)
            texts = [ids.tolist() for ids in texts]
    finally:
        hook.remove()
    assert texts == expected
    made, stopped = case["n_generated"], case["stopped_by_eos"]
    for text, prompt, n, eos in zip(texts, prompts, *((made, stopped) if type(made) is list else ([made], [stopped]))):
        assert len(text) - len(prompt) == n and (text[-1] == eos_id) == eos
    count = collections.Counter(record["calls"])
    assert {kind: count[kind] for kind in case["forwards"]} == case["forwards"]
    assert len(record["calls"]) == case["n_forwards"]
    # the vectors count every call; ours leaves a prefill out, unless it gives a row its first token
    names_a_token = min(map(len, prompts)) % cfg.block_size == 0
    assert record["forwards"] == case["n_forwards"] - (count["prefill"] and not names_a_token)
    if case["logit_scale"] != 1:
        return  # confidences are tied, their order is open
    for kind, (start, ids, cache_len), (kind_there, start_there, ids_there) in zip(
        record["calls"], Recorder.made[-1].calls, case["trace"], strict=True
    ):
        ids_there = ids_there if type(ids_there[0]) is list else [ids_there]
        if kind == "commit":  # the published batch decoder pads finished rows behind their stop token before they go
            ids, ids_there = ([cut(row, eos_id) for row in rows] for rows in (ids, ids_there))
        assert (kind, start, ids) == (kind_there, start_there, ids_there)
        assert cache_len % cfg.block_size == 0


# ------------------------------------------------------------------------------------------------- decoding invariants


@pytest.fixture(scope="module")
def random_model():
    torch.manual_seed(5)
    config = Qwen2Config(
        vocab_size=40, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=1, initializer_range=0.4, tie_word_embeddings=True, pad_token_id=None, bos_token_id=None,
        eos_token_id=None,
    )  # fmt: skip
    return Qwen2ForCausalLM(config).eval()


def settings(**changes):
    base = dict(PLAIN, mask_id=39, eos_id=-1, max_new_tokens=24, block_size=8, sub_block_size=4, tau=0.3)
    return Config(**(base | changes))


def prompt(P, seed=0):
    return torch.randint(36, (1, P), generator=torch.Generator().manual_seed(seed))


LENGTHS = [1, 3, 7, 8, 9, 16, 21]


class Uncached(Decoder):
    """Every forward recomputes [committed tokens, this block] under the block-causal mask."""

    block_size, text = 8, []

    def __call__(self, input_ids, position_ids, attn_mask, write_idx, count=True, last=None, read=()):
        self.forwards += count
        start = self.kv_cache.cache_len
        self.text = self.text[:start] + input_ids[0].tolist()
        ids = torch.tensor([self.text])
        T = ids.shape[1]
        hidden = walk(self.backbone, ids, torch.arange(T)[None], dense(block_causal(self.block_size), 1, T, T))
        rows = slice(start if last is None else T - last, None)
        return read[0](self.backbone.lm_head(hidden[:, rows]), ids[:, rows], *read[1:])


@pytest.mark.parametrize("P", LENGTHS)
@pytest.mark.parametrize("tau", [0.0, 0.3, 1.0])
def test_cached_equals_recomputed(random_model, P, tau):
    """The cache of finished blocks is exact."""
    cfg = settings(tau=tau)
    ids, record = generate(random_model, prompt(P), cfg)
    ids2, record2 = generate(random_model, prompt(P), cfg, Uncached(random_model, 64))
    assert torch.equal(ids, ids2) and record == record2
    assert cfg.mask_id not in ids[0].tolist() and ids[0, :P].tolist() == prompt(P)[0].tolist()


@pytest.mark.parametrize("P", LENGTHS)
@pytest.mark.parametrize("block_cache", [False, True])
def test_the_prefix_is_whole_blocks_and_only_commits_touch_it(random_model, P, block_cache):
    class Watcher(Decoder):
        seen = []

        def __call__(self, *args, **kwargs):
            n = self.kv_cache.cache_len
            before = [tensor[:, :, :n].clone() for layer in self.kv_cache.layers for tensor in layer]
            out = super().__call__(*args, **kwargs)
            after = [tensor[:, :, :n] for layer in self.kv_cache.layers for tensor in layer]
            assert n % 8 == 0 and self.kv_cache.cache_len == n and all(map(torch.equal, before, after))
            self.seen.append(n)
            return out

    decoder = Watcher(random_model, 64)
    ids, record = generate(random_model, prompt(P), settings(block_cache=block_cache), decoder)
    assert len(decoder.seen) == len(record["calls"]) and ("sub" in record["calls"]) == block_cache
    n = decoder.kv_cache.cache_len
    assert n == P // 8 * 8 + 24
    fresh = Decoder(random_model, 64)  # what was committed is what a fresh forward over the clean text gives
    fresh(ids[:, :n], torch.arange(n)[None], dense(block_causal(8), 1, n, n), torch.arange(n))
    for layer, other in zip(decoder.kv_cache.layers, fresh.kv_cache.layers):
        for a, b in zip(layer, other):
            assert (a[:, :, :n] - b[:, :, :n]).abs().max() < 1e-4


@pytest.mark.parametrize("P", [1, 5, 8])
def test_blocks_of_one_token_are_plain_greedy_decoding(random_model, P):
    cfg = settings(block_size=1, sub_block_size=1)
    ids, record = generate(random_model, prompt(P), cfg)
    theirs = random_model.generate(prompt(P), max_new_tokens=25, do_sample=False, pad_token_id=0,
                                   suppress_tokens=[cfg.mask_id])  # fmt: skip
    assert torch.equal(ids, theirs) and set(record["calls"]) == {"prefill", "commit"}
    assert record["fixed_round"] == list(range(25)) and record["forwards"] == 25


@pytest.mark.parametrize("P", LENGTHS)
@pytest.mark.parametrize("block_cache", [False, True])
def test_threshold_one_fills_one_token_a_forward(random_model, P, block_cache):
    cfg = settings(tau=1.0, block_cache=block_cache)
    ids, record = generate(random_model, prompt(P), cfg)
    made = ids.shape[1] - P
    assert made == (P // 8 * 8 + 24 + 1) - P
    assert record["forwards"] == made and sorted(record["fixed_round"]) == list(range(made))


@pytest.mark.parametrize("P", LENGTHS)
def test_threshold_zero_takes_one_forward_a_sub_block(random_model, P):
    ids, record = generate(random_model, prompt(P), settings(tau=0.0))
    # the first offset of a block is known, so every sub-block has masks but those inside the prompt
    assert record["calls"].count("block") == 3 * 2 - P % 8 // 4 and record["calls"].count("commit") == 3
    rounds = torch.tensor(record["fixed_round"])
    assert (rounds[1:] >= rounds[:-1]).all(), "sub-blocks from left to right, never one ahead"


@pytest.mark.parametrize("P", LENGTHS)
def test_block_cache_is_exact_where_the_sub_block_is_the_block(random_model, P):
    runs = [generate(random_model, prompt(P), settings(sub_block_size=8, block_cache=on)) for on in (False, True)]
    (ids, record), (ids2, record2) = runs
    assert torch.equal(ids, ids2) and record["forwards"] == record2["forwards"]
    assert record["fixed_round"] == record2["fixed_round"]


@pytest.mark.parametrize("block_size", [8, 24, 64])
def test_a_prompt_of_whole_blocks_names_the_first_token(random_model, block_size):
    """Also at exactly one block, and alone, in a batch of shorter and longer ones; nothing of the prompt is lost."""
    cfg = settings(block_size=block_size, max_new_tokens=block_size, tau=0.1)
    for P in (block_size, 2 * block_size):
        firsts = []
        for seed in range(3):
            ids = prompt(P, seed)
            mask = dense(block_causal(block_size), 1, P, P)
            logits = random_model.lm_head(walk(random_model, ids, torch.arange(P)[None], mask))[0, -1]
            logits[cfg.mask_id] = -torch.inf
            firsts.append(logits.argmax().item())
            single = generate(random_model, ids, cfg)[0][0]
            others = [prompt(3)[0], prompt(3 * block_size + 1)[0]]
            batch = generate_batch(random_model, [others[0], ids[0], others[1]], cfg)[0][1]
            assert single[P] == batch[P] == firsts[-1] and torch.equal(batch[: len(single)], single)
        assert len(set(firsts)) > 1
    lengths = (1, block_size - 1, block_size + 1)
    assert all(len({tuple(generate(random_model, prompt(P, seed), cfg)[0][0, P:].tolist()) for seed in range(3)}) > 1
               for P in lengths)  # fmt: skip


def eos_that_ends_texts(model, prompts, cfg):
    """The token that stands most often in the texts, so that rows of a batch stop at different blocks."""
    texts = torch.cat([generate(model, ids[None], cfg)[0][0, len(ids) :] for ids in prompts])
    return texts.bincount().argsort(descending=True).tolist()


@pytest.mark.parametrize("tau", [0.1, 1.0])
@pytest.mark.parametrize("rank", [0, 2, 6])
def test_rows_of_a_batch_equal_their_single_runs(random_model, tau, rank, monkeypatch):
    prompts = [prompt(P, seed=P)[0] for P in LENGTHS]
    cfg = settings(tau=tau, max_new_tokens=40)
    cfg.eos_id = eos_that_ends_texts(random_model, prompts, cfg)[rank]
    left = []
    keep_rows = Decoder.keep_rows
    monkeypatch.setattr(Decoder, "keep_rows", lambda self, rows: (left.append(len(rows)), keep_rows(self, rows)))
    texts, record = generate_batch(random_model, prompts, cfg)

    def order(rounds):
        return [sorted(set(rounds)).index(number) for number in rounds]

    for ids, text, rounds in zip(prompts, texts, record["fixed_round"], strict=True):
        single, single_record = generate(random_model, ids[None], cfg)
        single, fixed = single[0], single_record["fixed_round"]
        assert len(rounds) == len(text) - len(ids) and order(rounds[: len(fixed)]) == order(fixed)
        assert torch.equal(text[: len(single)], single)
        assert len(text) == len(single) or cfg.eos_id not in single[len(ids) :].tolist()
        assert cfg.mask_id not in text.tolist() and cfg.eos_id not in text[len(ids) : -1].tolist()
    assert rank > 2 or (left and left == sorted(left, reverse=True)), "rows must leave at different blocks"
    order = torch.randperm(len(prompts), generator=torch.Generator().manual_seed(1)).tolist()
    again, record2 = generate_batch(random_model, [prompts[i] for i in order], cfg)
    assert record["calls"] == record2["calls"]
    assert all(torch.equal(texts[i], text) for i, text in zip(order, again))


def test_a_padded_replay_gives_the_same_batch(random_model, monkeypatch):
    """What CUDA graphs do but for the capture: buckets, kept while rows leave."""
    prompts = [prompt(P, seed=P)[0] for P in LENGTHS]
    for block_cache in (False, True):
        cfg = settings(tau=0.2, max_new_tokens=40, block_cache=block_cache)
        cfg.eos_id = eos_that_ends_texts(random_model, prompts, cfg)[1]
        plain = generate_batch(random_model, prompts, cfg)
        with monkeypatch.context() as patch:
            init = kernels.GraphReplay.__init__
            patch.setattr(kernels.GraphReplay, "__init__", lambda self, forward, trash_idx, max_key, *args: init(
                self, forward, trash_idx, max_key, pad=True, capture=False))  # fmt: skip
            padded = generate_batch(random_model, prompts, cfg)
        assert all(map(torch.equal, plain[0], padded[0])) and plain[1] == padded[1]


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_batch_keeps_devices_apart_and_waits_once_a_forward(random_model, temperature):
    cfg, prompts = settings(tau=0.1, max_new_tokens=40, temperature=temperature), [prompt(P)[0] for P in LENGTHS]
    cfg.eos_id = eos_that_ends_texts(random_model, prompts, cfg)[0]
    here = generate_batch(random_model, prompts, cfg, generator=torch.Generator().manual_seed(0))
    model = Qwen2ForCausalLM(random_model.config).eval()
    model.load_state_dict(random_model.state_dict())
    with PretendedDevice() as device:
        model = put_there(prepare(model))
        device.events.clear()
        there = generate_batch(model, list(map(mark, prompts)), cfg, generator=torch.Generator().manual_seed(0))
        assert device.waits() <= there[1]["forwards"] + len(prompts) and all(map(marked, there[0]))
    assert here[1] == there[1] and [ids.tolist() for ids in here[0]] == [ids.tolist() for ids in there[0]]
    assert len(set(map(len, here[1]["fixed_round"]))) > 1, "rows must leave at different blocks"


def test_a_stop_token_ends_the_text_wherever_it_comes_from(random_model):
    """Accepted in a forward, named by a commit or by the prefill; what stands before it is filled, nothing behind."""
    sources = set()
    for P in LENGTHS:
        free, record = generate(random_model, prompt(P), settings())
        for eos_id in set(free[0, P:].tolist()):
            cfg = settings(eos_id=eos_id)
            ids, record = generate(random_model, prompt(P), cfg)
            n = ids.shape[1]
            assert ids[0, -1] == eos_id and torch.equal(ids, free[:, :n]) and (ids[0, P : n - 1] != eos_id).all()
            sources.add(record["calls"][-1])
            batch, _ = generate_batch(random_model, [ids[0, :P], ids[0, :P], prompt(2, seed=9)[0]], cfg)
            assert torch.equal(batch[0], ids[0]) and torch.equal(batch[1], ids[0])
            if (n - 1) % 8 == 0:
                assert record["calls"][-1] in ("commit", "prefill"), "no forward is spent behind it"
    assert sources == {"commit", "prefill", "block"}


def test_a_batch_fills_its_blocks_and_spends_nothing_behind_its_last_row(random_model):
    """A prompt alone ends inside a block; a batch fills the block, does not commit it, and begins no other."""
    sources = set()
    for P in LENGTHS:
        twice = [prompt(P)[0]] * 2
        free, free_record = generate_batch(random_model, twice, settings())
        for eos_id in set(free[0][P:].tolist()):
            texts, record = generate_batch(random_model, twice, settings(eos_id=eos_id))
            calls, n = free_record["calls"], len(record["calls"])
            assert record["calls"] == calls[:n] and torch.equal(*texts)
            is_named = (len(texts[0]) - 1) % 8 == 0
            assert calls[n - 1] in ("commit", "prefill") if is_named else calls[n] == "commit"
            sources.add(calls[n - 1])
    assert sources == {"commit", "prefill", "block"}


def test_all_rows_may_stop_in_the_first_block(random_model):
    prompts = [prompt(P)[0] for P in (2, 3)]
    free = [generate(random_model, ids[None], settings())[0][0] for ids in prompts]
    shared = set(free[0][2:8].tolist()) & set(free[1][3:8].tolist()) or {free[0][3].item()}
    cfg = settings(eos_id=shared.pop())
    texts, record = generate_batch(random_model, [prompts[0], prompts[0]], cfg)
    assert torch.equal(*texts) and texts[0][-1] == cfg.eos_id and "prefill" not in record["calls"]


def test_the_budget_counts_blocks_but_the_command_line_counts_tokens(random_model):
    for P in LENGTHS:
        for wanted in (1, 7, 8, 20):
            cfg = settings(max_new_tokens=wanted)
            made = generate(random_model, prompt(P), cfg)[0].shape[1] - P
            assert made == max(P // 8 * 8 + wanted // 8 * 8 + 1 - P, 0)
            ((_, run),) = fastdllm_v2.decoders(cfg)
            ids = run(random_model, prompt(P), cfg, fastdllm_v2.new_decoder(random_model, P, cfg))[0]
            assert wanted <= ids.shape[1] - P <= wanted + 8
            assert len(fastdllm_v2.trim(ids[0, P:], cfg)) == wanted


def test_sampling_draws_from_the_nucleus():
    logits = torch.randn(1, 8, generator=torch.Generator().manual_seed(3)) * 2
    for confidence in ("nucleus", "softmax"):
        cfg = settings(temperature=0.7, top_p=0.8, mask_id=7, confidence=confidence)
        draws, conf = fastdllm_v2.propose(logits.expand(1, 40000, 8), cfg, torch.Generator().manual_seed(0))
        expected = torch.cat([fastdllm_v2.nucleus(logits[0, :7], 0.7, 0.8), torch.zeros(1)])
        freq = torch.bincount(draws[0], minlength=8) / 40000
        assert (freq - expected).abs().max() < 0.01 and (freq[expected == 0] == 0).all() and (expected > 0).sum() > 1
        probs = expected if confidence == "nucleus" else logits[0].softmax(-1)
        assert (conf[0] - probs[draws[0]]).abs().max() < 1e-6
    assert torch.equal(fastdllm_v2.nucleus(logits, 0.01, 0.95), F.one_hot(logits.argmax(-1), 8).float())
    assert (fastdllm_v2.nucleus(torch.zeros(4), 1.0, 0.5) > 0).sum() == 3, "mass before it exactly top_p: kept"


def test_sampling_repeats_with_the_seed_and_greedy_ignores_it(random_model):
    def run(temperature, seed):
        cfg = settings(temperature=temperature)
        generator = torch.Generator().manual_seed(seed)
        batch = generate_batch(random_model, [prompt(3)[0], prompt(9)[0]], cfg, generator=generator)[0]
        return generate(random_model, prompt(5), cfg, generator=generator)[0].tolist(), [ids.tolist() for ids in batch]

    assert run(1.0, 1) == run(1.0, 1) != run(1.0, 2)
    assert run(0.0, 1) == run(0.0, 2)


def test_selection_is_strict_and_never_stalls():
    conf = torch.tensor([[0.9, 0.95, 0.2, 1.0], [0.5, 0.6, 0.7, 0.1], [1.0, 1.0, 1.0, 1.0]])
    is_masked = torch.tensor([[1, 1, 1, 0], [1, 0, 1, 1], [0, 0, 0, 0]]).bool()
    assert fastdllm_v2.select(conf, is_masked, 0.9).tolist() == [
        [False, True, False, False], [False, False, True, False], [False] * 4]  # fmt: skip
    assert fastdllm_v2.select(torch.ones(1, 4), torch.ones(1, 4, dtype=torch.bool), 1.0).sum() == 1


def test_the_mask_token_and_rows_behind_the_tokenizer_are_never_written(random_model):
    model = Qwen2ForCausalLM(random_model.config).eval()
    model.load_state_dict(random_model.state_dict())
    model.lm_head.weight = torch.nn.Parameter(random_model.lm_head.weight.detach().clone())
    favourite = generate(model, prompt(5), settings())[0][0, 5:].mode().values
    with torch.no_grad():  # the mask, and three rows behind the tokenizer, beat what the model would like to write
        model.lm_head.weight[36:] = 1.5 * model.lm_head.weight[favourite]
    for temperature in (0.0, 1.0):
        for P in (5, 8):
            ids = generate(model, prompt(P), settings(temperature=temperature))[0][0, P:].tolist()
            assert 39 not in ids and max(ids) >= 36
            ids = generate(model, prompt(P), settings(vocab_len=36, temperature=temperature))[0][0, P:].tolist()
            assert max(ids) < 36


@pytest.mark.parametrize("rank", [None, 0])
def test_one_decoder_serves_many_prompts(random_model, rank):
    """Also where they end before their budget."""
    cfg, decoder = settings(block_cache=True), Decoder(random_model, 60)
    if rank is not None:
        cfg.eos_id = eos_that_ends_texts(random_model, [prompt(P)[0] for P in LENGTHS], cfg)[rank]
    fresh = [generate(random_model, prompt(P), cfg) for P in LENGTHS]
    again = [generate(random_model, prompt(P), cfg, decoder) for P in LENGTHS * 2]
    for (ids, record), (ids2, record2) in zip(fresh * 2, again):
        assert torch.equal(ids, ids2) and record == record2


@pytest.mark.parametrize("changes, words", [
    (dict(tau=1.5), "tau"), (dict(sub_block_size=3), "divide"), (dict(block_size=0), "divide"),
    (dict(sub_block_size=0), "divide"), (dict(confidence="mine"), "confidence"),
])  # fmt: skip
def test_settings_that_cannot_work_are_refused(random_model, changes, words):
    with pytest.raises(ValueError, match=words):
        generate(random_model, prompt(5), settings(**changes))


def test_prompts_that_cannot_work_are_refused(random_model):
    for bad in (prompt(5).repeat(2, 1), prompt(5)[0]):
        with pytest.raises(ValueError, match="generate_batch"):
            generate(random_model, bad, settings())
    for bad in (prompt(5)[:, :0], torch.tensor([[1, 39]])):
        with pytest.raises(ValueError, match="at least one token"):
            generate(random_model, bad, settings())
        with pytest.raises(ValueError, match="at least one token"):
            generate_batch(random_model, [prompt(5)[0], bad[0]], settings())
    with pytest.raises(ValueError, match="at least one token"):
        generate_batch(random_model, [], settings())
    with pytest.raises(ValueError, match="KV cache holds"):
        generate(random_model, prompt(5), settings(), Decoder(random_model, 8))


# ------------------------------------------------------------------------------------------------- training invariants


def random_windows(seed, rows=3, window=32, cfg=settings(eos_id=37)):
    generator = torch.Generator().manual_seed(seed)
    sizes = torch.randint(1, 14, (rows * window // 6, 2), generator=generator).tolist()

    def ids(n):
        return torch.randint(36, (n,), generator=generator).tolist()

    samples = [{"prompt_ids": ids(P), "answer_ids": ids(A - 1) + [37]} for P, A in sizes]
    return fastdllm_v2.pack(samples, dataclasses.replace(cfg, max_len=window))[:rows]


def built(seed, **changes):
    cfg = settings(**changes)
    batch = random_windows(seed)
    return batch, make_training_inputs(batch, draw_noise(batch, cfg, torch.Generator().manual_seed(seed)), cfg), cfg


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("pad_blocks", [True, False])
def test_windows_hold_every_token_once_and_no_block_two_samples(seed, pad_blocks):
    generator, cfg = torch.Generator().manual_seed(seed), settings(pad_blocks=pad_blocks, max_len=24)
    rows = [{"prompt_ids": [i] * P, "answer_ids": [i] * A}
            for i, (P, A) in enumerate(torch.randint(1, 20, (20, 2), generator=generator).tolist())]  # fmt: skip
    windows = fastdllm_v2.pack(rows, cfg)
    ids, labels = (sum((window[name] for window in windows), []) for name in ("input_ids", "labels"))
    everything = [i for row in rows for i in row["prompt_ids"] + row["answer_ids"]]
    pads = ids.count(cfg.mask_id)
    kept = [i for i in ids if i != cfg.mask_id]
    assert kept == everything[: len(kept)] and all(len(window["input_ids"]) == 24 for window in windows)
    assert all(label in (-100, i) for i, label in zip(ids, labels))
    for i, row in enumerate(rows[: kept[-1]]):
        assert labels.count(i) == len(row["answer_ids"])
    two = [b for b in range(0, len(ids), 8) if len(set(ids[b : b + 8]) - {cfg.mask_id}) > 1]
    if pad_blocks:
        whole = [len(row["prompt_ids"]) + len(row["answer_ids"]) for row in rows[: kept[-1]]]
        assert not two and pads >= sum(-n % 8 for n in whole) and len(everything) + 8 * 20 - len(ids) - pads < 24 + 160
    else:
        assert two and pads == 0 and len(everything) - len(ids) < 24


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("shared_clean", [True, False])
def test_the_two_views_predict_every_answer_token_once(seed, shared_clean):
    batch, inputs, cfg = built(seed, shared_clean=shared_clean)
    B, L = 3, 32
    clean, labels = (torch.tensor([window[name] for window in batch]) for name in ("input_ids", "labels"))
    answer = labels != -100
    views = inputs["labels"].transpose(0, 1) if shared_clean else inputs["labels"].view(2, B, L)
    masked = views != -100
    assert torch.equal(masked.sum(0), answer.int()) and torch.equal(views.amax(0), labels)
    copies = inputs["input_ids"].unflatten(1, (-1, L))
    noisy = copies[:, :-1].transpose(0, 1) if shared_clean else copies[:, 0].view(2, B, L)
    assert torch.equal(noisy, torch.where(masked, cfg.mask_id, clean)), "prompt and padding stay as they are"
    assert all(torch.equal(copy, clean) for copy in copies[:, -1].view(-1, B, L))
    assert torch.equal(inputs["position_ids"].unflatten(1, (-1, L))[:, :], torch.arange(L).expand_as(copies))
    assert inputs["weights"].sum().item() == pytest.approx(1)


def test_one_view_alone_masks_what_the_first_view_masks():
    _, both, _ = built(2)
    _, one, _ = built(2, complementary=False)
    assert torch.equal(one["labels"][:, 0], both["labels"][:, 0]) and one["labels"].shape[1] == 1
    assert one["input_ids"].shape == (3, 64) and torch.equal(one["weights"][:, 0], both["weights"][:, 0])


def test_noise_is_drawn_per_block():
    cfg = settings()
    batch = [{"input_ids": [1] * 800, "labels": [1] * 800}] * 40
    draws = draw_noise(batch, cfg, torch.Generator().manual_seed(0))
    assert draws["t"].shape == (4000,) and draws["u"].shape == (4000, 8)
    generator = torch.Generator().manual_seed(0)  # all of t, then all of u
    assert torch.equal(draws["t"], torch.rand(4000, generator=generator))
    assert torch.equal(draws["u"], torch.rand(4000, 8, generator=generator))
    masked = (make_training_inputs(batch, draws, cfg)["labels"][:, 0] != -100).float().view(4000, 8).mean(1)
    assert abs(masked.mean() - 0.5) < 0.02 and (masked - draws["t"]).abs().mean() < 0.15 < masked.std()


def test_a_token_is_masked_where_u_is_below_p():
    """p = (1 - 1e-3) t + 1e-3, strictly below."""
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


@pytest.mark.parametrize("shared_clean", [True, False])
def test_no_leak_between_blocks_views_and_copies(random_model, shared_clean):
    """Clean tokens at or after a noisy block's start change nothing in it; a noisy token changes its block alone."""
    _, inputs, cfg = built(0, shared_clean=shared_clean)
    R, V, L = inputs["labels"].shape
    noisy, clean = noisy_logits(random_model, inputs, cfg)
    for b in range(L // 8):
        here, after = slice(8 * b, 8 * b + 8), slice(8 * b + 8, L)
        changed = inputs["input_ids"].clone()
        changed[:, V * L + 8 * b :] = 1 + changed[:, V * L + 8 * b :] % 35  # clean tokens from this block's start on
        noisy2, clean2 = noisy_logits(random_model, {**inputs, "input_ids": changed}, cfg)
        assert torch.allclose(noisy2[:, :, : 8 * b + 8], noisy[:, :, : 8 * b + 8], atol=1e-5)
        assert torch.allclose(clean2[:, : 8 * b], clean[:, : 8 * b], atol=1e-5)
        if b < L // 8 - 1:
            assert (noisy2[:, :, after] - noisy[:, :, after]).abs().amax(-1).min() > 1e-4
        changed = inputs["input_ids"].clone()
        changed[:, 8 * b + 3] = 1 + changed[:, 8 * b + 3] % 35  # a noisy token of the first view
        noisy2, clean2 = noisy_logits(random_model, {**inputs, "input_ids": changed}, cfg)
        differs = (noisy2 - noisy).abs().amax(-1) > 1e-5
        assert differs[:, 0, here].all() and differs.sum() == differs[:, 0, here].sum()
        assert torch.allclose(clean2, clean, atol=1e-5)
        changed = inputs["input_ids"].clone()
        changed[:, V * L + 8 * b + 7] = 1 + changed[:, V * L + 8 * b + 7] % 35  # the last token of a clean block ...
        clean2 = noisy_logits(random_model, {**inputs, "input_ids": changed}, cfg)[1]
        assert ((clean2 - clean).abs().amax(-1) > 1e-4)[:, 8 * b :].all(), "... is seen from its block's start on"


def test_training_and_decoding_see_the_same(random_model):
    """The noisy logits of a block are those of a decoding forward over the cached clean blocks before it."""
    batch, inputs, cfg = built(1)
    logits, _ = noisy_logits(random_model, inputs, cfg)
    for row in range(3):
        decoder = Decoder(random_model, 40)
        for b in range(4):
            for view in range(2):
                block = inputs["input_ids"][row : row + 1, 32 * view + 8 * b : 32 * view + 8 * b + 8]
                here = fastdllm_v2.forward(decoder, block, cfg)[0]
                assert (here - logits[row, view, 8 * b : 8 * b + 8]).abs().max() < 1e-4
            fastdllm_v2.forward(decoder, torch.tensor([batch[row]["input_ids"][8 * b : 8 * b + 8]]), cfg)
            decoder.kv_cache.commit(8)


def test_the_shift_crosses_block_borders(random_model):
    """A block's first token is scored at the last noisy position of the block before; a window's first never is."""
    firsts = borders = 0
    for seed in range(8):
        batch, inputs, cfg = built(seed)
        logits, _ = noisy_logits(random_model, inputs, cfg)
        labels = inputs["labels"]
        expected = torch.zeros(labels.shape)
        for r, v, i in (labels != -100).nonzero().tolist():
            if i > 0:
                expected[r, v, i] = -logits[r, v, i - 1].log_softmax(-1)[labels[r, v, i]]
        assert (masked_nll(random_model, inputs, cfg) - expected[:, :, 1:]).abs().max() < 1e-4
        loss, logs = training_loss(random_model, inputs, cfg)
        n_answer = sum(label != -100 for window in batch for label in window["labels"])
        first = sum(window["labels"][0] != -100 for window in batch)
        assert loss.item() == pytest.approx(expected.sum().item() / n_answer, rel=1e-5)
        assert logs["scored"] == n_answer - first
        firsts, borders = firsts + first, borders + (expected[:, :, 8::8] > 0).sum()
    assert firsts > 0 and borders > 0


def test_both_layouts_give_the_same_loss_and_gradients(random_model):
    results = []
    for shared_clean in (True, False):
        _, inputs, cfg = built(4, shared_clean=shared_clean)
        random_model.zero_grad()
        loss, logs = training_loss(random_model, inputs, cfg)
        loss.backward()
        results.append((loss.item(), logs["scored"], [p.grad.clone() for p in random_model.parameters()]))
    (loss, scored, grads), (loss2, scored2, grads2) = results
    assert loss == pytest.approx(loss2, abs=1e-6) and scored == scored2
    assert all((a - b).abs().max() < 1e-5 for a, b in zip(grads, grads2))


def test_blocks_of_one_token_with_nothing_masked_are_the_causal_model(random_model):
    batch = random_windows(0)
    cfg = settings(block_size=1, sub_block_size=1)
    draws = {"t": torch.zeros(96), "u": torch.ones(96, 1)}  # the first view masks nothing
    inputs = make_training_inputs(batch, draws, dataclasses.replace(cfg, complementary=False))
    noisy, clean = noisy_logits(random_model, inputs, cfg)
    theirs = random_model(input_ids=torch.tensor([window["input_ids"] for window in batch])).logits
    assert (noisy[:, 0] - theirs).abs().max() < 1e-4 and (clean - theirs).abs().max() < 1e-4


def test_micro_batches_add_up_to_the_batch(random_model):
    for shared_clean in (True, False):
        _, inputs, cfg = built(5, shared_clean=shared_clean)
        whole = training_loss(random_model, inputs, cfg)[0].item()
        parts = [training_loss(random_model, {k: v[i::3] for k, v in inputs.items()}, cfg)[0].item() for i in range(3)]
        assert sum(parts) == pytest.approx(whole, abs=1e-5)


def test_a_batch_without_answers_gives_zero_and_finite_gradients(random_model):
    batch, cfg = [{"input_ids": [1] * 16, "labels": [-100] * 16}], settings()
    inputs = make_training_inputs(batch, draw_noise(batch, cfg, torch.Generator().manual_seed(0)), cfg)
    random_model.zero_grad()
    loss, _ = training_loss(random_model, inputs, cfg)
    loss.backward()
    assert loss.item() == 0 and all(p.grad is None or p.grad.isfinite().all() for p in random_model.parameters())


def test_recomputed_layers_give_the_same_gradients(random_model):
    grads = []
    for checkpointing in (False, True):
        _, inputs, cfg = built(6, checkpointing=checkpointing)
        random_model.zero_grad()
        training_loss(random_model, inputs, cfg)[0].backward()
        grads.append([p.grad.clone() for p in random_model.parameters()])
    assert all((a - b).abs().max() < 1e-6 for a, b in zip(*grads))


def test_overfits_one_batch(random_model):
    torch.manual_seed(0)
    model = Qwen2ForCausalLM(random_model.config)
    _, inputs, cfg = built(7)
    optimizer = torch.optim.Adam(model.parameters(), 1e-2)
    for _ in range(100):
        loss, _ = training_loss(model, inputs, cfg)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    assert loss.item() < 0.1


# ------------------------------------------------------------------------------ the released layout, the command line


def released_folder(folder, tokenizer):
    """The vectors' model as the released checkpoints are laid out: their config keys, remote code named, none there."""
    backbone = load_backbone(FOLDER / "model")
    tokenizer.save_pretrained(folder)
    config = json.loads((FOLDER / "model" / "config_released_style.json").read_text())
    config |= {"bd_size": 16, "eos_token_id": tokenizer.eos_token_id, "pad_token_id": tokenizer.eos_token_id}
    (folder / "config.json").write_text(json.dumps(config))
    tensors = {key: value for key, value in backbone.state_dict().items() if key != "lm_head.weight"}
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return backbone


def released_tokenizer():
    """One that has the mask among its added tokens only, as the released one has."""
    _, tokenizer = fastdllm_v2.tiny_backbone(Config())
    spec = json.loads(tokenizer.backend_tokenizer.to_str())
    spec["model"]["vocab"] = {word.replace("<mask>", "|<MASK>|"): i for word, i in spec["model"]["vocab"].items()}
    for token in spec["added_tokens"]:
        token["content"] = token["content"].replace("<mask>", "|<MASK>|")
    from tokenizers import Tokenizer

    return PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer.from_str(json.dumps(spec)), eos_token="<eos>", unk_token="<unk>"
    )


def test_the_released_layout_loads_without_remote_code(tmp_path, model, capsys):
    folder = tmp_path / "released"
    folder.mkdir()
    theirs = released_folder(folder, released_tokenizer())
    for training in (False, True):
        cfg = Config(device="cpu", dtype="float32", compile=False)
        loaded, tokenizer = fastdllm_v2.load(str(folder), cfg, training)
        assert type(loaded) is Qwen2ForCausalLM and not hasattr(loaded.config, "auto_map")
        assert tokenizer.mask_token is None and (cfg.mask_id, cfg.eos_id) == (1, 0)
        assert all(torch.equal(a, b) for a, b in zip(loaded.parameters(), theirs.parameters(), strict=True))
        assert loaded.get_input_embeddings().num_embeddings == 160 and cfg.vocab_len == len(tokenizer) < 160
        assert loaded.lm_head.weight.data_ptr() == loaded.model.embed_tokens.weight.data_ptr()
        fastdllm_v2.enter_stage(loaded, "fastdllm_v2", str(folder), cfg)
        assert cfg.block_size == 16, "the block size that the model was trained with"
    ids = torch.tensor([[0, 5, 7, 0]])  # the stop token must learn, though the released config calls it padding
    hidden = walk(loaded, ids, torch.arange(4)[None], dense(block_causal(16), 1, 4, 4))
    hidden.square().sum().backward()
    assert loaded.model.embed_tokens.weight.grad[0].abs().sum() > 0
    cfg = Config(device="cpu", block_size=8)
    fastdllm_v2.enter_stage(loaded, "fastdllm_v2", str(folder), cfg)
    assert cfg.block_size == 8, "unless another one is asked for"
    logits = theirs(input_ids=ids).logits
    assert (loaded(input_ids=ids).logits - logits).abs().max() < 1e-5

    flags = ["--generate", "--model", str(folder), "--prompt", "Tom has 3 red", "--device", "cpu", "--dtype", "float32"]
    assert fastdllm_v2.main(flags + ["--no-compile", "--max_new_tokens", "20"]) == 0
    assert json.loads(capsys.readouterr().out.splitlines()[-1])["rows"][0]["new_tokens"] <= 20


def run(capsys, *flags):
    status = fastdllm_v2.main([*flags, "--device", "cpu", "--dtype", "float32", "--no-compile"])
    out, err = capsys.readouterr()
    return status, out, err


def test_train_generate_and_sweep(tmp_path, capsys):
    out = tmp_path / "run"
    status, text, _ = run(capsys, "--train", "--generate", "--sweep", "--trace", "--steps", "3", "--ar_steps", "2",
                          "--batch_size", "4", "--problems", "2", "--out", str(out))  # fmt: skip
    assert status == 0
    rows = json.loads(text.splitlines()[-1])["rows"]
    taus = (0.5, 0.6, 0.7, 0.8, 0.9, 1)
    assert [row["label"] for row in rows] == [*(f"fastdllm_v2, tau {tau:.2f}" for tau in taus), "plain AR"]
    assert all(row["problems"] == 2 and row["forwards"] > 0 for row in rows)
    assert rows[5]["tokens_per_forward"] <= 1, "threshold 1: one token a forward"
    for row in rows:
        assert f"{row['label']}: new_tokens {row['new_tokens']} | forwards {row['forwards']} |" in text
    # the folder is plain Hugging Face, and knows its block size
    cfg = Config(device="cpu", dtype="float32", compile=False)
    ours, _ = fastdllm_v2.load(str(out), cfg, training=False)
    theirs = AutoModelForCausalLM.from_pretrained(out, dtype=torch.float32)
    assert all(torch.equal(a, b) for a, b in zip(ours.parameters(), theirs.parameters(), strict=True))
    assert set(load_file(out / "model.safetensors")) <= set(theirs.state_dict())
    assert ours.config.bd_size == fastdllm_v2.TINY["block_size"] and cfg.mask_id == 1
    status, text, _ = run(capsys, "--generate", "--no-sweep", "--model", str(out), "--prompt", "Tom has 3 red")
    rows = json.loads(text.splitlines()[-1])["rows"]
    assert status == 0 and [row["label"] for row in rows] == ["fastdllm_v2", "plain AR"]


def test_a_resumed_run_repeats_an_uninterrupted_one(tmp_path, capsys):
    flags = ["--batch_size", "2", "--ar_steps", "0", "--lr_floor", "1", "--warmup", "0"]  # no last step in the rate
    for steps, out, resume in ((4, "whole", []), (2, "parts", []), (4, "parts", ["--resume"])):
        assert run(capsys, "--train", "--steps", str(steps), "--out", str(tmp_path / out), *flags, *resume)[0] == 0
    whole, parts = (load_file(tmp_path / name / "model.safetensors") for name in ("whole", "parts"))
    assert all((whole[key] - parts[key]).abs().max() < 1e-6 for key in whole)


@pytest.mark.parametrize("flags, words", [
    (["--train", "--max_len", "90"], "max_len 90"), (["--generate", "--tau", "1.5"], "tau"),
    (["--train", "--sub_block_size", "3"], "divide"), (["--train", "--max_len", "8000000"], "do not fill"),
])  # fmt: skip
def test_bad_flags_end_in_one_line(tmp_path, capsys, flags, words):
    status, _, err = run(capsys, *flags, "--ar_steps", "0", "--out", str(tmp_path / "run"))
    assert status == 2 and len(err.strip().splitlines()) == 1 and words in err
    assert not (tmp_path / "run").exists()
