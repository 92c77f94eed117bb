"""Orthrus: the reference vectors, exactness against plain AR, and what must hold for any added weights."""

import dataclasses
import json
import math
import shutil
import types

import pytest
import torch
import torch.nn.functional as F
from conftest import ROOT, golden, load_backbone
from safetensors.torch import load_file, save_file
from torch.nn.attention.flex_attention import create_block_mask
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM, Qwen2Config, Qwen2ForCausalLM
from transformers import Qwen3Config, Qwen3ForCausalLM

import common
import orthrus
from common import Decoder, causal, dense, dual_view, full, generate_ar, kernels
from orthrus import VIEW, Config, Views, accept, attach, both_views, draw_noise, forward, generate
from orthrus import make_training_inputs, make_views, row_losses, training_loss

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


def spy(monkeypatch, name):
    """Calls of a function of orthrus: a list of (arguments, result)."""
    calls = []
    original = getattr(orthrus, name)

    def wrapped(*args):
        calls.append((args, original(*args)))
        return calls[-1][1]

    monkeypatch.setattr(orthrus, name, wrapped)
    return calls


def tensors_of(prefix):
    return {key[len(prefix) + 1 :]: value for key, value in TENSORS.items() if key.startswith(f"{prefix}.")}


# ------------------------------------------------------------------------------------------ reference vectors


def decode_config(case, **changes):
    own = dict(block_size=case["block_size"], max_new_tokens=case["max_new_tokens"], eos_id=case["eos_token_id"])
    return Config(**(PLAIN | own | changes))


def decode(model, case, monkeypatch, change_views=lambda views: views, **changes):
    """(output, trace in the words of the vectors without the prefill, record)"""
    cfg = decode_config(case, **changes)
    prompt_ids = torch.tensor([case["prompt_ids"]])
    with monkeypatch.context() as patch:
        verified = spy(patch, "accept")
        views = change_views(make_views(model, prompt_ids.shape[1] + cfg.max_new_tokens, cfg))
        ids, record = generate(model, prompt_ids, cfg, views)
    cycles = [
        dict(anchor_pos=cycle["anchor_pos"], block_len=len(args[2]), draft_tokens=cycle["draft_ids"],
             verify_tokens=args[2].argmax(-1).tolist(), n_accepted=cycle["accepted_len"])
        for cycle, (args, _) in zip(record["cycles"], verified, strict=True)
    ][1:]  # fmt: skip
    return ids[0].tolist(), cycles, record


@pytest.mark.parametrize("case", CASES["decode"], ids=lambda case: case["name"])
def test_decoding_equals_the_published_implementation(models, monkeypatch, case):
    ids, cycles, record = decode(models(case["variant"]), case, monkeypatch)
    assert ids == case["output_ids"]
    assert cycles == case["cycles"]
    assert record["forwards"] == case["n_forward_total"] == 1 + 2 * len(cycles)
    assert len(record["fixed_round"]) == case["n_new_tokens"] and record["rounds"] == 1 + len(cycles)
    last = cycles[-1] if cycles else None
    eos_id = case["eos_token_id"]
    if case["stop"] == "length":
        assert case["n_new_tokens"] == case["max_new_tokens"]
    else:
        assert ids[-1] == eos_id and eos_id not in ids[len(case["prompt_ids"]) : -1]
        in_draft = last and eos_id in last["draft_tokens"][: last["n_accepted"]]
        expected = "eos_draft" if in_draft else "eos_correction" if last else "eos_first"
        assert expected == case["stop"]


@pytest.mark.parametrize("case", CASES["passes"], ids=lambda case: case["name"])
def test_single_passes_equal_the_published_implementation(models, case):
    model = models(case["variant"])
    cfg = Config(**PLAIN, block_size=case["block_size"])
    tensor = tensors_of(case["name"])
    prefix = torch.tensor(case["prefix_ids"])
    P = len(prefix)
    K = case["block_size"]
    views = make_views(model, P + K, cfg)
    cache = views.ar.kv_cache
    forward(views.ar, prefix, causal())
    cache.commit(P)
    keys = cache.layers[0][0][0, :, :P].clone()
    values = cache.layers[-1][1][0, :, :P].clone()
    assert (keys - tensor["cache_key_layer0"]).abs().max() < 1e-4
    assert (values - tensor["cache_value_last"]).abs().max() < 1e-4

    assert case["position_ids"] == list(range(P, P + K))
    block = torch.tensor([case["anchor_id"]] + [cfg.mask_id] * (K - 1))
    hidden = forward(views.diffusion, block, full()).clone()
    assert (hidden - tensor["diffusion_hidden"]).abs().max() < 1e-4
    logits = model.lm_head(hidden)
    assert (logits - tensor["diffusion_logits"]).abs().max() < 1e-4
    assert logits[:-1].argmax(-1).tolist() == case["draft_tokens"]
    assert cache.cache_len == P and torch.equal(cache.layers[0][0][0, :, :P], keys), "a draft leaves the cache alone"

    verify = model.lm_head(forward(views.ar, torch.tensor(case["verify_input_ids"]), causal(P)))
    assert (verify - tensor["verify_logits"]).abs().max() < 1e-4


def training_inputs(case, cfg):
    tensor = tensors_of(f"train_{case['name']}")
    answers = tensor.get("supervise_mask", torch.ones_like(tensor["input_ids"]))
    batch = [torch.stack([ids, is_answer.long()]) for ids, is_answer in zip(tensor["input_ids"], answers)]
    draws = zip(tensor["anchors"].tolist(), tensor["anchor_valid"].tolist())
    return make_training_inputs(batch, [dict(anchors=a, anchor_valid=valid) for a, valid in draws], cfg)


def grad_norms(model):
    return {name: p.grad.norm().item() for name, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("case", CASES["training"], ids=lambda case: case["name"])
def test_training_step_equals_the_published_implementation(models, case):
    model = models(case["variant"])
    tensor = tensors_of(f"train_{case['name']}")
    cfg = Config(**PLAIN, block_size=case["block_size"])
    inputs = training_inputs(case, cfg)
    B, T, M, K = case["batch"], case["seq_len"], case["num_anchors"], case["block_size"]
    assert torch.equal(inputs["block_ids"], tensor["block_ids"])
    assert torch.equal(inputs["position_ids"], tensor["position_ids"])
    assert torch.equal(inputs["weights"] > 0, tensor["keep"].bool())
    assert inputs["weights"].sum().item() == pytest.approx(1) and inputs["weights"].dtype == torch.float32
    n_rows = (inputs["weights"] > 0).sum().item()
    assert n_rows == case["n_supervised_rows"]
    mask = dense(dual_view(T, K, inputs["anchors"]), B, M * K, T + M * K)
    assert torch.equal(mask[:, 0], tensor["attention_mask"].bool())

    ar_hidden, hidden = both_views(model, inputs, cfg)
    assert (model.lm_head(hidden) - tensor["student_logits"]).abs().max() < 1e-4
    if "teacher_logits" in tensor:
        assert (model.lm_head(ar_hidden) - tensor["teacher_logits"]).abs().max() < 1e-4
    row_idx = torch.arange(B)[:, None, None]
    teacher = ar_hidden[row_idx, inputs["position_ids"][..., :-1]]
    every_row = [x.flatten(0, 2) for x in (hidden[:, :, :-1], teacher, inputs["labels"])]
    for objective in ("kl", "ce"):
        cfg.objective = objective
        rows = row_losses(model, *every_row, objective).view(B, M, K - 1)
        assert (rows - tensor[f"{objective}_rows"]).abs().max() < 2e-4
        model.zero_grad()
        loss, logs = training_loss(model, inputs, cfg)
        loss.backward()
        assert loss.item() == pytest.approx(case[f"loss_{objective}_mean"], rel=1e-5) == logs[objective].item()
        norms = grad_norms(model)
        if objective == "kl":
            assert loss.item() * n_rows == pytest.approx(case["loss_kl_sum"], rel=1e-5)
            assert norms == pytest.approx(case["grad_norms_kl"], rel=1e-3), "those six a layer, no other"
        squares = torch.tensor(list(norms.values())).square()
        assert squares.sum().sqrt().item() == pytest.approx(case[f"grad_norm_total_{objective}"], rel=1e-3)


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


@pytest.mark.parametrize("case", CASES["sampling"], ids=lambda case: case["name"])
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
    proposed = spy(monkeypatch, "propose")
    accepted = spy(monkeypatch, "accept")
    drawn = spy(monkeypatch, "draw_token")
    with monkeypatch.context() as patch:
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
        p = orthrus.sampling_probs(verify_logits, cfg)
        ratios = (p[:-1] / q).gather(-1, draft_ids[:, None])[:, 0].clamp(max=1)
        if f"cycle{c}.p" in tensor:
            assert ratios.tolist() == pytest.approx(cycle["ratios"], abs=1e-4)
            assert (proposed[c + 1][0][0] - tensor[f"cycle{c}.diffusion_logits"][:-1]).abs().max() < 1e-4
            assert (verify_logits - tensor[f"cycle{c}.verify_logits"]).abs().max() < 1e-4
            assert (q - tensor[f"cycle{c}.q"]).abs().max() < 1e-5
            assert (p - tensor[f"cycle{c}.p"]).abs().max() < 1e-5
            assert (final[c] / final[c].sum() - tensor[f"cycle{c}.next_dist"]).abs().max() < 1e-5


# --------------------------------------------------------------------------------- exactness against plain AR


def random_view(model, seed):
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, p in model.named_parameters():
            if "_diff." in name:
                p.copy_(torch.randn(p.shape, generator=generator) * (0.2 if "proj" in name else 1.0))
    return model


def backbone(kind="qwen3"):
    """A random model of each supported shape; initial weights wide enough that greedy text is not constant."""
    torch.manual_seed(0)
    sizes = dict(vocab_size=40, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
                 num_key_value_heads=2, initializer_range=0.3)  # fmt: skip
    sizes |= dict(pad_token_id=None, bos_token_id=None, eos_token_id=None)
    make = dict(
        llama=lambda: LlamaForCausalLM(LlamaConfig(**sizes)),
        qwen2=lambda: Qwen2ForCausalLM(Qwen2Config(**sizes)),
        qwen3=lambda: Qwen3ForCausalLM(Qwen3Config(**sizes, head_dim=16)),
    )
    return make[kind]().train(False)


def copied(kind="qwen3"):
    return attach(backbone(kind), {}, torch.float32)


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
        for block_size in (2, 3, 6, 32):
            for eos_id in eos_ids if block_size in (3, 6) else eos_ids[:1]:
                cfg = settings(block_size=block_size, eos_id=eos_id)
                ids, record = generate(model, PROMPT, cfg)
                assert torch.equal(ids, expected[eos_id])
                assert record["forwards"] == 2 * record["rounds"] - 1
                for merged in (1, 2, block_size):
                    cfg.merged = merged
                    ids, record = generate(model, PROMPT, cfg)
                    assert torch.equal(ids, expected[eos_id])
                    if merged == block_size:
                        assert record["forwards"] == record["rounds"], "all groups: no separate draft pass"


@pytest.mark.parametrize("merged", [0, 2])
def test_only_settings_of_decoding_are_read_and_eos_may_be_none_or_a_list(merged):
    model = random_view(copied(), 2)
    cfg = types.SimpleNamespace(max_new_tokens=20, block_size=6, temperature=0.0, top_k=0, top_p=1.0, merged=merged,
                                mask_id=39, eos_id=None, vocab_len=None)  # fmt: skip
    text = ar_text(model, PROMPT, cfg)
    ids, record = generate(model, PROMPT, cfg)
    assert torch.equal(ids, text) and ids.shape[1] == 5 + 20 == 5 + len(record["fixed_round"])
    new = text[0, 5:].tolist()
    for cfg.eos_id in ([new[12], new[7]], [new[7], 99], new[7]):
        stop = min(new.index(i) for i in (new[12], new[7]) if i in torch.tensor(cfg.eos_id).view(-1).tolist())
        ids, record = generate(model, PROMPT, cfg)
        assert ids[0, 5:].tolist() == new[: stop + 1] and len(record["fixed_round"]) == stop + 1
        assert torch.equal(ids, generate_ar(model, PROMPT, cfg)[0])
    for cfg.eos_id, cfg.max_new_tokens in ((None, 1), ([98, 99], 13)):
        assert generate(model, PROMPT, cfg)[0][0, 5:].tolist() == new[: cfg.max_new_tokens]


def test_a_perfect_drafter_fills_every_block():
    """A view that drafts what AR will say: the least number of rounds, tokens per forward at its upper bound."""
    model = copied()
    cfg = settings(max_new_tokens=25, block_size=6)
    text = ar_text(model, PROMPT, cfg)[0]
    head = types.SimpleNamespace(
        device=model.device, lm_head=lambda x: x if x.shape[-1] == 40 else model.lm_head(x)
    )  # an Oracle's hidden states are logits

    class Oracle(Decoder):
        def __call__(self, input_ids, position_ids, attn_mask, write_idx):
            super().__call__(input_ids, position_ids, attn_mask, write_idx)
            known = text[(position_ids[0] + 1).clamp(max=len(text) - 1)]
            return F.one_hot(known, 40).float()[None]

    views = make_views(model, 30, cfg)
    oracle = Oracle(model, 30, project=orthrus.diffusion_projection, kv_cache=views.ar.kv_cache)
    ids, record = generate(head, PROMPT, cfg, views._replace(diffusion=oracle))
    assert torch.equal(ids[0], text)
    assert [cycle["accepted_len"] for cycle in record["cycles"]] == [0, 5, 5, 5, 5] and record["forwards"] == 9
    assert record["fixed_round"] == [0] + [n for n in (1, 2, 3, 4) for _ in range(6)]


@pytest.mark.parametrize("case", CASES["decode"][::3], ids=lambda case: case["name"])
def test_counts_and_the_cache_after_every_cycle(models, monkeypatch, case):
    """forwards = 1 + 2 cycles, new tokens = 1 + sum(accepted + 1), the cache a prefill of all but the anchor."""
    model = models(case["variant"])
    cfg = decode_config(case, eos_id=None)
    cache_lens = []
    views = make_views(model, len(case["prompt_ids"]) + cfg.max_new_tokens, cfg)
    with monkeypatch.context() as patch:
        cache = views.ar.kv_cache
        commit = cache.commit
        patch.setattr(cache, "commit", lambda n: (commit(n), cache_lens.append(cache.cache_len)))
        ids, record = generate(model, torch.tensor([case["prompt_ids"]]), cfg, views)
    assert cache_lens[:-1] == [cycle["anchor_pos"] for cycle in record["cycles"][1:]]
    added = sum(cycle["accepted_len"] + 1 for cycle in record["cycles"])
    new = ids.shape[1] - len(case["prompt_ids"])
    assert new == cfg.max_new_tokens == min(added, cfg.max_new_tokens) >= added - 1
    n = cache.cache_len
    fresh = Decoder(model, n)
    fresh(ids[:, :n], torch.arange(n)[None], dense(causal(), 1, n, n), torch.arange(n))
    for ours, theirs in zip(cache.layers, fresh.kv_cache.layers):
        assert all((a[:, :, :n] - b[:, :, :n]).abs().max() < 1e-4 for a, b in zip(ours, theirs))


def test_both_views_are_one_with_copied_weights_and_a_block_of_one():
    views = make_views(copied(), 9, settings())
    forward(views.ar, PROMPT[0], causal())
    views.ar.kv_cache.commit(5)
    draft = forward(views.diffusion, torch.tensor([7]), full()).clone()
    assert torch.equal(draft, forward(views.ar, torch.tensor([7]), causal(5)))


def test_the_head_is_applied_to_rows_that_are_read_alone():
    model = random_view(copied(), 2)
    rows = []
    model.lm_head.register_forward_hook(lambda module, args, output: rows.append(args[0].shape[:-1].numel()))
    for merged in (0, 2):
        rows.clear()
        _, record = generate(model, torch.arange(20)[None], settings(merged=merged))
        drafts = [len(cycle["draft_ids"]) for cycle in record["cycles"]]
        assert rows[0] == 1, "of the prompt the last row alone"
        if not merged:
            assert rows == [1] + [n for m in drafts[1:] for n in (m, m + 1)]
        assert max(rows) <= 6


class OnDevice(torch.Tensor):
    """A tensor that stands for one on a GPU: notes what is launched on it, and where the loop waits for it."""

    events = []

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        wait = func.__name__ in ("cpu", "item", "tolist", "__bool__", "nonzero")
        cls.events.append("wait" if wait else "launch")
        result = super().__torch_function__(func, types, args, kwargs or {})
        return result.as_subclass(torch.Tensor) if func.__name__ == "cpu" else result


@pytest.mark.parametrize("changes, most", [({}, 1), ({"temperature": 1.0}, 1), ({"merged": 2}, 3)])
def test_the_loop_waits_for_the_device_once_a_forward(monkeypatch, changes, most):
    """Merged, two of the three waits are for the choice and the drafts of a group, not for a forward."""
    replay = kernels.GraphReplay.__call__

    def call(self, function, *args):
        assert all(type(tensor) is torch.Tensor for tensor in args), "what goes in lies on the CPU"
        return replay(self, function, *args).as_subclass(OnDevice)

    monkeypatch.setattr(kernels.GraphReplay, "__call__", call)
    OnDevice.events.clear()
    ids, record = generate(random_view(copied(), 2), PROMPT, settings(**changes))
    pairs = zip(OnDevice.events[1:], OnDevice.events)
    waits = sum(kind == "wait" and before == "launch" for kind, before in pairs)
    assert type(ids) is torch.Tensor and 0 < waits <= most * record["forwards"]


def test_one_set_of_decoders_serves_many_prompts_and_seeds_do_not_matter_when_greedy():
    model = random_view(copied(), 2)
    prompts = [PROMPT, torch.tensor([[7]]), torch.arange(20)[None]]
    for cfg in (settings(), settings(merged=3)):
        views = make_views(model, 44, cfg)
        for prompt in prompts * 2:
            ids, record = generate(model, prompt, cfg, views, torch.Generator().manual_seed(len(prompt[0])))
            ids2, record2 = generate(model, prompt, cfg)
            assert torch.equal(ids, ids2) and record == record2


def test_padded_and_compiled_forwards_give_the_same_text(monkeypatch):
    """What CUDA graphs replay: queries padded to a bucket, one graph a layer and view; traced, not captured."""
    traced = torch.compile(common.decoder_layer, fullgraph=True, dynamic=False, backend="eager")
    monkeypatch.setattr(common, "_compiled_layer", traced)
    model = random_view(copied(), 6)
    cfg = settings(block_size=4, merged=2)
    views = make_views(model, 29, cfg)
    for view in views[:3]:
        view.compiled, view.replay.pad, view.replay.QUERY, view.replay.KEY = True, True, (16,), 64
    for merged in (0, 2):
        cfg.merged = merged
        ids, record = generate(model, PROMPT, cfg, views)
        plain, expected = generate(model, PROMPT, cfg)
        assert torch.equal(ids, plain) and record == expected
        assert all(len(view.replay.graphs) <= 2 for view in views[:3]), "few shapes"
        assert views[2 if merged else 1].replay.graphs


def test_eos_may_be_0_and_rows_after_the_last_token_are_never_written():
    model = copied()
    with torch.no_grad():
        model.lm_head.weight[36:] *= 3
        model.lm_head.weight[0] *= 2
    assert max(ar_text(model, PROMPT, settings())[0, 5:].tolist()) >= 36
    for merged in (0, 2):
        cfg = settings(vocab_len=36, eos_id=0, merged=merged)
        new = generate(model, PROMPT, cfg)[0][0, 5:].tolist()
        assert max(new) < 36 and new == generate_ar(model, PROMPT, cfg)[0][0, 5:].tolist()
        assert 0 not in new[:-1] and (new[-1] == 0 or len(new) == 24)
    cfg = settings(eos_id=0, vocab_len=36)
    texts = [generate(model, torch.tensor([[i]]), cfg)[0][0].tolist() for i in range(1, 30)]
    assert any(text[-1] == 0 and len(text) < 25 for text in texts), "some text must end by token 0"


def test_a_mask_token_that_is_an_ordinary_token_may_be_written():
    """Exactness must survive that the AR view writes the token that stands for the mask."""
    model = copied()
    text = ar_text(model, PROMPT, settings())
    for merged in (0, 2):
        cfg = settings(mask_id=text[0, 8].item(), merged=merged)
        assert torch.equal(generate(model, PROMPT, cfg)[0], text)


def test_prompts_that_cannot_work_are_refused():
    for prompt in (PROMPT.repeat(2, 1), PROMPT[:, :0]):
        with pytest.raises(ValueError, match="one prompt of at least one token"):
            generate(copied(), prompt, settings())


def test_rejected_drafts_are_recorded_where_they_stood():
    ids, record = generate(random_view(copied(), 2), PROMPT, settings(block_size=4))
    assert len(record["rejected"]) == sum(len(c["draft_ids"]) - c["accepted_len"] for c in record["cycles"]) > 0
    for number, index, token_id in record["rejected"]:
        assert record["fixed_round"][index] >= number > 0
        if record["fixed_round"][index] == number:
            assert ids[0, 5 + index] != token_id, "AR wrote another token there"


# ------------------------------------------------------------------- a broken drafter: right text, wrong trace


def ar_instead_of(*names):
    """The diffusion view with some of the AR view's tensors."""

    def project(attn, name, x):
        return getattr(attn, name if name in names else f"{name}_diff")(x)

    return dict(project=project)


BROKEN = {
    "nothing": {},
    "causal block": dict(change=lambda ids, pos, mask: (ids, pos, mask & (
        torch.arange(mask.shape[-1]) <= pos[0, :, None]))),
    "AR W_o": ar_instead_of("o_proj"),
    "AR norms": ar_instead_of("q_norm", "k_norm"),
    "AR keys and values": ar_instead_of("k_proj", "v_proj"),
    "positions off by one": dict(change=lambda ids, pos, mask: (ids, pos + 1, mask)),
    "mask in place of the anchor": dict(change=lambda ids, pos, mask: (ids * 0 + PLAIN["mask_id"], pos, mask)),
    "unshifted rows": dict(after=lambda hidden: hidden.roll(-1, dims=1)),
}  # fmt: skip


class BrokenView(Decoder):
    def __init__(self, ar, change=None, after=None, project=orthrus.diffusion_projection):
        super().__init__(ar.backbone, ar.kv_cache.max_len, project=project, kv_cache=ar.kv_cache)
        self.change = change or (lambda *inputs: inputs)
        self.after = after or (lambda hidden: hidden)

    def __call__(self, ids, pos, mask, write_idx):
        return self.after(super().__call__(*self.change(ids, pos, mask), write_idx))


@pytest.mark.parametrize("name", BROKEN)
def test_a_broken_drafter_keeps_the_text_and_is_caught_by_the_trace(models, monkeypatch, name):
    def replaced(views):
        return views._replace(diffusion=BrokenView(views.ar, **BROKEN[name]))

    caught = 0
    for case in CASES["decode"]:
        if case["variant"] != "ar_copy" and len(case["cycles"]) <= 12:
            ids, cycles, record = decode(models(case["variant"]), case, monkeypatch, replaced)
            assert ids == case["output_ids"], "a broken drafter never changes the output"
            caught += cycles != case["cycles"]
    assert caught == 0 if name == "nothing" else caught >= 2


# ------------------------------------------------------------------ sampling: the law of the text, enumerated


class Tape:
    """Depth-first search over every choice that a run makes; `weight` is the probability of the path taken."""

    def __init__(self):
        self.path, self.at, self.weight = [], 0, 1.0

    def choose(self, weights):
        """An index with its weight > 0; which one, the path says."""
        options = [i for i, weight in enumerate(weights) if weight > 0]
        if self.at == len(self.path):
            self.path.append([0, len(options)])
        pick = options[self.path[self.at][0]]
        self.at += 1
        self.weight *= weights[pick] / sum(weights)
        return pick

    def next_path(self):
        self.at, self.weight = 0, 1.0
        while self.path and self.path[-1][0] + 1 == self.path[-1][1]:
            self.path.pop()
        if self.path:
            self.path[-1][0] += 1
        return bool(self.path)


class Chance:
    """Stands for uniform draws u in `u * q < p`: both outcomes, weighted by min(1, p / q) and the rest."""

    def __init__(self, tape):
        self.tape = tape

    def to(self, device, non_blocking=False):
        return self

    def __mul__(self, q):
        self.q = q
        return self

    def __lt__(self, p):
        kept = [True] * len(p)
        for i, ratio in enumerate((p / self.q).clamp(max=1).tolist()):
            kept[i] = self.tape.choose([ratio, 1 - ratio]) == 0
            if not kept[i]:
                break  # what follows a rejection is not looked at
        return torch.tensor(kept, dtype=torch.bool)


class Table:
    """Views of a made-up model: the logits of a row are a fixed random function of the text that it may see."""

    V = 5

    def __init__(self, max_len, first):
        self.kv_cache = kernels.KVCache(1, 1, 1, max_len, 1, "cpu", torch.float32)
        self.tokens, self.known, self.first = [None] * max_len, {}, first
        self.is_group = torch.zeros(99, dtype=torch.bool)

    def logits(self, *key):
        if key not in self.known:
            self.known[key] = torch.randn(self.V, generator=torch.Generator().manual_seed(len(self.known)))
        return self.known[key]

    def ar_logits(self, text):
        sure = torch.full((self.V,), -torch.inf)
        sure[self.first] = 0.0  # the token after the prompt is certain: fewer paths
        return sure if len(text) == 2 else self.logits("ar", text)

    def view(self, kind):
        def call(ids, positions, mask, write_idx):
            rows, text = [], self.tokens[: self.kv_cache.cache_len]
            for row, (i, pos) in enumerate(zip(ids[0].tolist(), positions[0].tolist())):
                if kind == "diffusion" or (kind == "merged" and self.is_group[row]):
                    if i < self.V:
                        anchor, offset = tuple(text[:pos]) + (i,), 0
                    rows.append(self.logits("diffusion", anchor, offset))
                    offset += 1
                else:
                    assert pos == len(text)
                    text = text + [i]
                    rows.append(self.ar_logits(tuple(text)))
                self.tokens[write_idx[row]] = i
            return torch.stack(rows)[None]

        call.kv_cache, call.forwards, call.reset = self.kv_cache, 0, self.kv_cache.reset
        return call


@pytest.mark.parametrize("merged, transform", [
    (0, dict(temperature=1.3, top_k=4, top_p=1.0)), (0, dict(temperature=0.7, top_k=0, top_p=0.8)),
    (0, dict(temperature=1.0, top_k=3, top_p=0.9)), (2, dict(temperature=0.8, top_k=4, top_p=1.0)),
])  # fmt: skip
def test_sampling_follows_the_ar_law(monkeypatch, merged, transform):
    """Every draft, acceptance and correction of blocks of three, weighted: the law of two more tokens is AR's."""
    tape = Tape()
    table = Table(40, first=2)
    cfg = settings(mask_id=9, max_new_tokens=3, block_size=4 if merged else 3, merged=merged, **transform)
    views = Views(table.view("ar"), table.view("diffusion"), table.view("merged"), table.is_group)
    model = types.SimpleNamespace(lm_head=lambda hidden: hidden)
    law, paths, accepted = {}, 0, set()
    with monkeypatch.context() as patch:
        patch.setattr(torch, "rand", lambda n, generator, dtype: Chance(tape))
        patch.setattr(orthrus, "draw_token", lambda probs, u: torch.tensor(
            [tape.choose(row) for row in probs.tolist()], dtype=torch.int64))  # fmt: skip
        while not paths or tape.next_path():
            ids, record = generate(model, torch.tensor([[0, 1]]), cfg, views)
            text = tuple(ids[0].tolist())
            law[text] = law.get(text, 0.0) + tape.weight
            accepted |= {cycle["accepted_len"] for cycle in record["cycles"] if cycle["draft_ids"]}
            paths += 1
    assert accepted == {0, 1, 2} and paths > 100
    for b in range(table.V):
        p1 = orthrus.sampling_probs(table.ar_logits((0, 1, 2))[None], cfg)[0]
        p2 = orthrus.sampling_probs(table.ar_logits((0, 1, 2, b))[None], cfg)[0]
        for c in range(table.V):
            assert abs(law.pop((0, 1, 2, b, c), 0.0) - (p1[b] * p2[c]).item()) < 1e-6
    assert not law


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


def test_draws_follow_the_probabilities():
    probs = torch.tensor([[0.1, 0.0, 0.6, 0.3]])
    u = torch.rand(40000, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    freq = torch.bincount(orthrus.draw_token(probs.expand(40000, 4), u), minlength=4) / 40000
    assert (freq - probs[0]).abs().max() < 0.01 and freq[1] == 0
    edges = torch.tensor([0.0, 0.1, 0.7, 1 - 2**-53], dtype=torch.float64)
    assert orthrus.draw_token(torch.tensor([[0.125, 0.0, 0.625, 0.25]]).expand(4, 4), edges).tolist() == [0, 0, 2, 3]
    assert orthrus.draw_token(torch.tensor([[0.0, 1.0]]), torch.zeros(1)).tolist() == [1], "u = 0: no empty token"


@pytest.mark.parametrize("merged", [0, 2])
def test_sampling_repeats_with_the_seed(models, merged):
    cfg = settings(temperature=1.0, mask_id=PLAIN["mask_id"], merged=merged)
    texts = []
    for seed in (1, 1, 2):
        ids, _ = generate(models("ar_copy"), PROMPT, cfg, generator=torch.Generator().manual_seed(seed))
        texts.append(ids[0].tolist())
    assert texts[0] == texts[1] != texts[2]
    assert all(len(text) == 5 + 24 for text in texts)


# ------------------------------------------------------------------------------------------ the merged forward


def test_merged_groups_are_what_a_separate_draft_pass_gives(models):
    """Group j = a diffusion pass over [t_j, masks] after the text before t_j; AR rows are AR's."""
    model = models("trained")
    K = 5
    P = 9
    cfg = settings(mask_id=PLAIN["mask_id"], block_size=K, merged=3)
    text = torch.arange(2, 16)
    views = make_views(model, 14, cfg)
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


@pytest.mark.parametrize("merged", [1, 2, 4, 99])
def test_merged_decoding_gives_the_vectors_text(models, merged):
    for case in CASES["decode"]:
        if len(case["cycles"]) > 8:
            continue
        cfg = decode_config(case, merged=merged)
        ids, record = generate(models(case["variant"]), torch.tensor([case["prompt_ids"]]), cfg)
        assert ids[0].tolist() == case["output_ids"]
        assert record["rounds"] <= record["forwards"] < 2 * record["rounds"]
        assert len(record["fixed_round"]) == case["n_new_tokens"]
        if merged == 99:
            assert record["forwards"] == record["rounds"], "no separate draft pass"


# ----------------------------------------------------------------------------------------- training invariants


def random_rows(seed, rows=3, length=30):
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(36, (rows, length), generator=generator)
    return [torch.stack([row, (torch.arange(length) >= 6).long()]) for row in ids]


def inputs_of(batch, cfg, seed=0):
    return make_training_inputs(batch, draw_noise(batch, cfg, torch.Generator().manual_seed(seed)), cfg)


def inputs_at(batch, anchors, cfg):
    return make_training_inputs(batch, [dict(anchors=anchors, anchor_valid=[True] * len(anchors))], cfg)


@pytest.fixture(scope="module")
def random_model():
    return random_view(copied(), 5)


def test_training_rows_are_decoding_rows(random_model):
    """A block of training = the diffusion pass of decoding after a cache of the row before its anchor."""
    cfg = settings(anchors=4, block_size=5)
    inputs = inputs_of(random_rows(0), cfg)
    hidden = both_views(random_model, inputs, cfg)[1]
    for b in range(3):
        for m in range(4):
            a = inputs["anchors"][b, m].item()
            views = make_views(random_model, 40, cfg)
            forward(views.ar, inputs["input_ids"][b, :a], causal())
            views.ar.kv_cache.commit(a)
            alone = forward(views.diffusion, inputs["block_ids"][b, m], full())
            assert (alone - hidden[b, m]).abs().max() < 1e-4


def test_the_block_mask_of_a_gpu_gives_the_same_step(random_model, monkeypatch):
    """Training on CUDA passes BlockMasks where training on a CPU passes dense masks: same rule, same result."""
    cfg = settings(anchors=3, block_size=5)
    inputs = inputs_of(random_rows(12), cfg)
    expected = both_views(random_model, inputs, cfg)
    traced = torch.compile(common.decoder_layer, fullgraph=True, dynamic=False, backend="eager")
    monkeypatch.setattr(common, "_compiled_layer", traced)
    monkeypatch.setattr(orthrus, "build_mask", lambda mask_mod, B, T, S, device: create_block_mask(
        mask_mod, B, None, T, S, device=device))  # fmt: skip
    for ours, theirs in zip(both_views(random_model, inputs, cfg), expected):
        assert (ours - theirs).abs().max() < 1e-5


def test_a_block_sees_nothing_after_its_anchor(random_model):
    cfg = settings(block_size=4)
    anchors = [8, 15, 21]
    inputs = inputs_at(random_rows(1, rows=1), anchors, cfg)
    before = both_views(random_model, inputs, cfg)[1][0]
    for m, a in enumerate(anchors):
        for changed in (a - 1, a, a + 1, a + 2, 29):
            other = {key: value.clone() for key, value in inputs.items()}
            other["input_ids"][0, changed] = (other["input_ids"][0, changed] + 1) % 36
            after = both_views(random_model, other, cfg)[1][0]  # the clean row alone is changed
            assert torch.equal(before[m], after[m]) == (changed >= a)
        other = {key: value.clone() for key, value in inputs.items()}
        other["block_ids"][0, m, 0] = (other["block_ids"][0, m, 0] + 1) % 36
        after = both_views(random_model, other, cfg)[1][0]
        assert [torch.equal(before[i], after[i]) for i in range(3)] == [i != m for i in range(3)]


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
    cfg = settings(anchors=4, block_size=5)
    batch = random_rows(4, rows=2000)
    draws = draw_noise(batch, cfg, torch.Generator().manual_seed(0))
    counts = torch.zeros(30)
    for draw in draws:
        a = draw["anchors"]
        assert a == sorted(set(a)) and len(a) == 4 and all(draw["anchor_valid"]) and 6 <= a[0] and a[-1] <= 25
        counts[a] += 1
    assert (counts[6:26] / 8000 - 1 / 20).abs().max() < 0.01 and counts.sum() == 8000
    assert draws == draw_noise(batch, cfg, torch.Generator().manual_seed(0))
    assert draws != draw_noise(batch, cfg, torch.Generator().manual_seed(1))
    short = [torch.tensor([list(range(12)), [i in (5, 7, 9) for i in range(12)]])]
    (draw,) = draw_noise(short, cfg, torch.Generator().manual_seed(0))
    assert draw == dict(anchors=[5, 7, 0, 0], anchor_valid=[True, True, False, False])
    inputs = make_training_inputs(short, [draw], cfg)
    assert (inputs["weights"] > 0).sum() == 3, "rows for 7, 9 after 5 and 9 after 7; fillers do not count"
    for length in (2, 3):  # shorter than a block
        (draw,) = draw_noise([torch.ones(2, length, dtype=torch.int64)], cfg, torch.Generator())
        assert draw["anchor_valid"] == [False] * 4
        inputs = make_training_inputs([torch.ones(2, length, dtype=torch.int64)], [draw], cfg)
        assert inputs["input_ids"].shape == (1, 5) and inputs["weights"].sum() == 0


@pytest.mark.parametrize("objective", ["kl", "ce"])
def test_micro_batches_add_up_to_the_batch(random_model, objective):
    cfg = settings(anchors=3, objective=objective)
    inputs = inputs_of(random_rows(7, rows=4), cfg)
    whole = training_loss(random_model, inputs, cfg)[0].item()
    parts = [training_loss(random_model, {k: v[i::2] for k, v in inputs.items()}, cfg)[0].item() for i in (0, 1)]
    assert sum(parts) == pytest.approx(whole, abs=1e-5)


def test_padding_changes_nothing(random_model):
    cfg = settings(anchors=3, eos_id=37)
    batch = random_rows(8, rows=1, length=20)
    draws = draw_noise(batch, cfg, torch.Generator().manual_seed(0))
    alone = make_training_inputs(batch, draws, cfg)
    idle = [dict(anchors=[9, 9, 9], anchor_valid=[False] * 3)]
    both = make_training_inputs(batch + random_rows(9, rows=1, length=40), draws + idle, cfg)
    assert both["input_ids"].shape == (2, 40)
    losses = [training_loss(random_model, inputs, cfg)[0].item() for inputs in (alone, both)]
    assert losses[0] == pytest.approx(losses[1], abs=1e-5)


def test_rows_are_packed_end_to_end_or_one_by_one():
    rows = [{"prompt_ids": [10 * i, 10 * i + 1], "answer_ids": [10 * i + 2, 10 * i + 3, 37]} for i in range(3)]

    def packed(rows=rows, **changes):
        cfg = settings(**(dict(max_len=7, block_size=4, eos_id=37) | changes))
        return [row.tolist() for row in orthrus.pack_rows(rows, cfg)]

    assert packed() == [[[0, 1, 2, 3, 37, 10, 11], [0, 0, 1, 1, 1, 0, 0]],
                        [[12, 13, 37, 20, 21, 22, 23], [1, 1, 1, 0, 0, 1, 1]]]  # fmt: skip
    assert [len(ids) for ids, _ in packed(max_len=64)] == [15]
    with pytest.raises(ValueError, match="no room"):
        packed(rows[:1], block_size=8)
    single = packed(packing=False)
    assert single[1] == [[10, 11, 12, 13, 37, 37, 37], [0, 0, 1, 1, 1, 0, 0]]
    cfg = settings(block_size=4, anchors=2)
    draws = draw_noise([torch.tensor(row) for row in single], cfg, torch.Generator().manual_seed(0))
    assert all(draw["anchors"] == [2, 3] for draw in draws), "every answer token but the last"
    assert [len(ids) for ids, _ in packed(packing=False, block_size=2)] == [5, 5, 5]


@pytest.mark.parametrize("objective", ["kl", "ce"])
def test_overfits_one_batch_and_leaves_the_backbone_alone(objective):
    model = copied()
    frozen = {name: p.clone() for name, p in model.named_parameters() if "_diff." not in name}
    cfg = settings(anchors=2, block_size=4, objective=objective, eos_id=37)
    inputs = inputs_of(random_rows(10, rows=2, length=16), cfg)
    text = generate_ar(model, PROMPT, settings())[0]
    optimizer = torch.optim.Adam([p for p in model.parameters() if p.requires_grad], 1e-2)
    losses = []
    for _ in range(60):
        loss, _ = training_loss(model, inputs, cfg)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < 0.1 * losses[0]
    for name, p in model.named_parameters():
        if name in frozen:
            assert torch.equal(p, frozen[name]) and p.grad is None, name
    assert torch.equal(generate_ar(model, PROMPT, settings())[0], text)
    assert torch.equal(generate(model, PROMPT, settings(block_size=4))[0], text)


def test_checkpointing_and_bfloat16_give_the_same_step(random_model):
    """bfloat16: a frozen backbone in bfloat16 and a float32 view under autocast, as `train` has them on a GPU."""
    cfg = settings(anchors=3)
    inputs = inputs_of(random_rows(11), cfg)

    def step(model, cfg):
        model.zero_grad()
        with torch.autocast("cpu", torch.bfloat16, enabled=cfg.dtype == "bfloat16"):
            loss, _ = training_loss(model, inputs, cfg)
        loss.backward()
        return loss.item(), grad_norms(model)

    loss, norms = step(random_model, cfg)
    again = step(random_model, dataclasses.replace(cfg, checkpointing=True))
    assert again[0] == pytest.approx(loss, rel=1e-5) and again[1] == pytest.approx(norms, rel=1e-4)
    low = random_view(attach(backbone().bfloat16(), {}, torch.float32), 5)
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
    other = attach(backbone(), view, torch.float32)
    assert all(torch.equal(other.state_dict()[name], view[name]) for name in view)
    name = min(view)
    unknown = {"model.layers.9.x_diff.weight": view[name]}
    for wrong in ({name: view[name]}, view | {name: view[name][:1]}, view | unknown):
        with pytest.raises(ValueError, match="do not belong"):
            attach(backbone(), wrong, torch.float32)


def test_a_process_that_is_sent_its_weights_makes_the_copies_on_meta():
    model = attach(orthrus.from_pretrained(TINY, torch.bfloat16, meta=True), {}, torch.float32)
    real = attach(orthrus.from_pretrained(TINY, torch.bfloat16), {}, torch.float32)
    kinds = [{name: (p.shape, p.dtype, p.requires_grad) for name, p in m.named_parameters()} for m in (model, real)]
    assert kinds[0] == kinds[1] and all(p.is_meta for p in model.parameters())


FEW = ["--device", "cpu", "--dtype", "float32", "--problems", "2", "--max_new_tokens", "12"]


def run(*flags):
    assert orthrus.main([str(flag) for flag in flags]) == 0


def figures(capsys):
    return json.loads(capsys.readouterr().out.splitlines()[-1])["rows"]


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    out = tmp_path_factory.mktemp("orthrus") / "run"
    run("--train", *FEW, "--steps", 3, "--batch_size", 4, "--block_size", 5, "--out", out)
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
    rows = figures(capsys)
    assert [row["same_as_ar"] for row in rows] == [2, 2, 2] and "merged" in rows[2]["label"]


@pytest.mark.parametrize("layout", ["released", "sharded", "beside"])
def test_other_layouts_load_without_remote_code(trained, tmp_path, capsys, layout):
    """`_diff` keys among the weights of a plain Qwen3, in one file or several, or in a file of their own."""
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
    if layout == "beside":
        save_file(view, folder / "diffusion.safetensors")
        (folder / "model.safetensors").unlink()  # the tensors are mapped from it
        shutil.copy(TINY / "model.safetensors", folder)
    config = json.loads((folder / "config.json").read_text()) | {
        "architectures": ["OrthrusLM"], "auto_map": {"AutoModelForCausalLM": "modeling_orthrus.OrthrusLM"},
        "use_cache": False, "r": 16, "lora_alpha": 32,
    }  # fmt: skip
    del config["trained_with"]
    (folder / "config.json").write_text(json.dumps(config))
    read = orthrus.read_view(folder)
    assert read.keys() == view.keys() and all(torch.equal(read[key], view[key]) for key in view)
    flags = ["--prompt", "Tom has 3 red pens", *FEW, "--block_size", 5]
    forwards = []
    for model in (folder, trained):
        run("--generate", "--model", model, *flags)
        rows = figures(capsys)
        assert rows[1]["same_as_ar"] == 1
        forwards.append(rows[1]["forwards"])
    assert forwards[0] == forwards[1]


def test_training_goes_on_from_a_trained_view_and_an_untrained_one_is_said(trained, tmp_path, capsys):
    out = tmp_path / "more"
    run("--train", "--model", trained, *FEW, "--steps", 1, "--lr", "1e-9", "--batch_size", 4, "--out", out)
    before = orthrus.read_view(trained)
    after = orthrus.read_view(out)
    assert all(torch.allclose(after[key], before[key], atol=1e-6) for key in before)
    capsys.readouterr()
    run("--generate", "--model", TINY, "--prompt", "Tom has 3 red pens", *FEW)
    captured = capsys.readouterr()
    assert "untrained" in captured.err
    assert json.loads(captured.out.splitlines()[-1])["rows"][1]["same_as_ar"] == 1
