"""Orthrus: the reference vectors, exactness against plain AR, and what must hold for any added weights."""

import dataclasses
import json
import math
import shutil

import pytest
import torch
from conftest import golden, load_backbone
from safetensors.torch import load_file, save_file
from torch.nn.attention.flex_attention import create_block_mask
from transformers import (
    AutoModelForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

import common
import kernels
import orthrus
from common import Decoder, causal, dense, dual_view, full, generate_ar, walk
from orthrus import (
    VIEW,
    Config,
    Views,
    accept,
    attach,
    both_views,
    draw_noise,
    forward,
    generate,
    make_training_inputs,
    new_decoder,
    row_losses,
    training_loss,
)

CASES, TENSORS, FOLDER = golden("orthrus")
PLAIN = dict(mask_id=CASES["mask_token_id"], device="cpu", dtype="float32", compile=False)


@pytest.fixture(scope="module")
def models():
    """The backbone with the diffusion view of each variant; `ar_copy` has no file: copies."""
    made = {}

    def model(variant):
        if variant not in made:
            file = FOLDER / "model" / f"diffusion_{variant}.safetensors"
            made[variant] = attach(load_backbone(FOLDER / "model"), load_file(file) if file.exists() else {})
        return made[variant]

    return model


def spy(monkeypatch, name):
    """Calls of a function of orthrus: a list of (arguments, result)."""
    calls, original = [], getattr(orthrus, name)

    def wrapped(*args):
        calls.append((args, original(*args)))
        return calls[-1][1]

    monkeypatch.setattr(orthrus, name, wrapped)
    return calls


def tensors_of(prefix):
    return {key[len(prefix) + 1 :]: value for key, value in TENSORS.items() if key.startswith(f"{prefix}.")}


# --------------------------------------------------------------------------------------------------- reference vectors


def decode_config(case, **changes):
    own = dict(block_size=case["block_size"], max_new_tokens=case["max_new_tokens"], eos_id=case["eos_token_id"])
    return Config(**(PLAIN | own | changes))


def decode(model, case, monkeypatch, change_views=lambda views: views, **changes):
    """(output, trace in the words of the vectors without the prefill, record)"""
    cfg, prompt_ids = decode_config(case, **changes), torch.tensor([case["prompt_ids"]])
    with monkeypatch.context() as patch:
        verified = spy(patch, "accept")
        views = change_views(new_decoder(model, prompt_ids.shape[1], cfg))
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
    last, eos_id = cycles[-1] if cycles else None, case["eos_token_id"]
    if case["stop"] == "length":
        assert case["n_new_tokens"] == case["max_new_tokens"]
    else:
        assert ids[-1] == eos_id and eos_id not in ids[len(case["prompt_ids"]) : -1]
        in_draft = last and eos_id in last["draft_tokens"][: last["n_accepted"]]
        expected = "eos_draft" if in_draft else "eos_correction" if last else "eos_first"
        assert expected == case["stop"]


@pytest.mark.parametrize("case", CASES["passes"], ids=lambda case: case["name"])
def test_single_passes_equal_the_published_implementation(models, case):
    model, cfg = models(case["variant"]), Config(**PLAIN, block_size=case["block_size"], max_new_tokens=64)
    tensor, prefix, K = tensors_of(case["name"]), torch.tensor(case["prefix_ids"]), case["block_size"]
    P, views = len(prefix), new_decoder(model, len(prefix), cfg)
    cache = views.ar.kv_cache
    forward(views.ar, prefix, causal(), cfg)
    cache.commit(P)
    keys, values = cache.layers[0][0][0, :, :P].clone(), cache.layers[-1][1][0, :, :P].clone()
    assert (keys - tensor["cache_key_layer0"]).abs().max() < 1e-4
    assert (values - tensor["cache_value_last"]).abs().max() < 1e-4

    block = torch.tensor([case["anchor_id"]] + [cfg.mask_id] * (K - 1))
    logits = forward(views.diffusion, block, full(), cfg).clone()
    assert (logits - tensor["diffusion_logits"]).abs().max() < 1e-4
    assert logits[:-1].argmax(-1).tolist() == case["draft_tokens"]
    positions = torch.tensor([case["position_ids"]])
    assert positions[0].tolist() == list(range(P, P + K))
    hidden = walk(model, block[None], positions, dense(full(), 1, K, P + K), cache.layers, cache.scratch_idx(K),
                  project=orthrus.diffusion_projection)  # fmt: skip
    assert (hidden[0] - tensor["diffusion_hidden"]).abs().max() < 1e-4
    assert cache.cache_len == P and torch.equal(cache.layers[0][0][0, :, :P], keys), "the draft leaves the cache alone"

    verify = forward(views.ar, torch.tensor(case["verify_input_ids"]), causal(P), cfg)
    assert (verify - tensor["verify_logits"]).abs().max() < 1e-4


def training_inputs(case, cfg):
    tensor = tensors_of(f"train_{case['name']}")
    answers = tensor.get("supervise_mask", torch.ones_like(tensor["input_ids"])).bool()
    rows = zip(tensor["input_ids"].tolist(), answers.tolist())
    batch = [{"input_ids": ids, "is_answer": is_answer} for ids, is_answer in rows]
    draws = zip(tensor["anchors"].tolist(), tensor["anchor_valid"].tolist())
    return make_training_inputs(batch, [dict(anchors=a, anchor_valid=valid) for a, valid in draws], cfg)


def grad_norms(model):
    return {name: p.grad.norm().item() for name, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("case", CASES["training"], ids=lambda case: case["name"])
def test_training_step_equals_the_published_implementation(models, case):
    model, tensor = models(case["variant"]), tensors_of(f"train_{case['name']}")
    cfg = Config(**PLAIN, block_size=case["block_size"])
    inputs = training_inputs(case, cfg)
    B, T, M, K = case["batch"], case["seq_len"], case["num_anchors"], case["block_size"]
    assert torch.equal(inputs["block_ids"], tensor["block_ids"])
    assert torch.equal(inputs["position_ids"], tensor["position_ids"])
    assert torch.equal(inputs["weights"] > 0, tensor["keep"].bool())
    assert (inputs["weights"] > 0).sum() == case["n_supervised_rows"]
    mask = dense(dual_view(T, K, inputs["anchors"]), B, M * K, T + M * K)
    assert torch.equal(mask[:, 0], tensor["attention_mask"].bool())

    ar_hidden, hidden = both_views(model, inputs, cfg)
    assert (model.lm_head(hidden) - tensor["student_logits"]).abs().max() < 1e-4
    if "teacher_logits" in tensor:
        assert (model.lm_head(ar_hidden) - tensor["teacher_logits"]).abs().max() < 1e-4
    row_idx, at = torch.arange(B)[:, None, None], inputs["position_ids"][..., :-1]
    every_row = [x.flatten(0, 2) for x in (hidden[:, :, :-1], ar_hidden[row_idx, at], inputs["labels"])]
    for loss in ("kl", "ce"):
        cfg.loss = loss
        rows = row_losses(model, *every_row, cfg, chunk=7).view(B, M, K - 1)
        assert (rows - tensor[f"{loss}_rows"]).abs().max() < 2e-4
        model.zero_grad()
        total, logs = training_loss(model, inputs, cfg)
        total.backward()
        assert total.item() == pytest.approx(case[f"loss_{loss}_mean"], rel=1e-5)
        assert logs["rows"] == case["n_supervised_rows"]
        norms = grad_norms(model)
        if loss == "kl":
            assert total.item() * logs["rows"] == pytest.approx(case["loss_kl_sum"], rel=1e-5)
            assert norms == pytest.approx(case["grad_norms_kl"], rel=1e-3), "those six a layer, no other"
        squares = torch.tensor(list(norms.values())).square()
        assert squares.sum().sqrt().item() == pytest.approx(case[f"grad_norm_total_{loss}"], rel=1e-3)


def test_optimiser_trajectory_equals_the_published_one():
    trajectory = CASES["trajectory"]
    case = next(case for case in CASES["training"] if case["name"] == trajectory["uses_training_case"])
    file = FOLDER / "model" / f"diffusion_{trajectory['start_variant']}.safetensors"
    model = attach(load_backbone(FOLDER / "model"), load_file(file) if file.exists() else {})
    before = {name: p.clone() for name, p in model.named_parameters()}
    names = {name: p for name, p in before.items() if "_diff." in name}
    trained = [p for name, p in model.named_parameters() if name in names]
    cfg = Config(**PLAIN, block_size=case["block_size"])
    assert cfg.beta2 == trajectory["betas"][1] and cfg.weight_decay == trajectory["weight_decay"]
    optimizer = torch.optim.AdamW(trained, trajectory["lr"], trajectory["betas"], trajectory["eps"],
                                  weight_decay=trajectory["weight_decay"])  # fmt: skip
    inputs, losses, norms = training_inputs(case, cfg), [], []
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
        assert torch.equal(p, before[name]) != (name in names), "frozen means frozen, and the view learns"


@pytest.mark.parametrize("case", CASES["sampling"], ids=lambda case: case["name"])
def test_sampling_equals_the_published_implementation(models, monkeypatch, case):
    tensor, tape = tensors_of(f"sample_{case['name']}"), [[case["u_first"]]]
    for cycle in case["cycles"]:
        unused = [0.0] * (len(cycle["u_draft"]) - len(cycle["u_accept"]))
        tape += [cycle["u_draft"], cycle["u_accept"] + unused, [cycle["u_next"]]]

    def replay(n, generator):
        u = tape.pop(0) if n else []
        assert len(u) == n
        return torch.tensor(u, dtype=torch.float64)

    monkeypatch.setattr(orthrus, "uniform", replay)
    proposed, accepted, drawn = (spy(monkeypatch, name) for name in ("propose", "accept", "draw_token"))
    names = ("temperature", "top_k", "top_p", "block_size", "max_new_tokens")
    cfg = Config(**PLAIN, **{name: case[name] for name in names})
    cfg.eos_id = case.get("eos_token_id")
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
            assert (q - tensor[f"cycle{c}.q"]).abs().max() < 1e-5 and (p - tensor[f"cycle{c}.p"]).abs().max() < 1e-5
            next_dist = final[c] / final[c].sum()
            assert (next_dist - tensor[f"cycle{c}.next_dist"]).abs().max() < 1e-5


# ------------------------------------------------------------------------------------------ exactness against plain AR


def random_view(model, seed):
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, p in model.named_parameters():
            if "_diff." in name:
                p.copy_(torch.randn(p.shape, generator=generator) * (0.2 if "proj" in name else 1.0))
    return model


def backbone(kind, seed=0):
    """A random model of each supported shape; initial weights wide enough that greedy text is not constant."""
    torch.manual_seed(seed)
    sizes = dict(vocab_size=40, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
                 num_key_value_heads=2, initializer_range=0.3)  # fmt: skip
    sizes |= dict(pad_token_id=None, bos_token_id=None, eos_token_id=None)
    make = dict(
        llama=lambda: LlamaForCausalLM(LlamaConfig(**sizes)),
        qwen2=lambda: Qwen2ForCausalLM(Qwen2Config(**sizes)),
        qwen3=lambda: Qwen3ForCausalLM(Qwen3Config(**sizes, head_dim=16)),
    )
    return make[kind]().train(False)


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
    """Copied and random weights, any block size, with and without EOS; the merged form with any number of groups."""
    model = attach(backbone(kind), {})
    ar = ar_text(model, PROMPT, settings())
    eos_ids = [None, ar[0, -6].item(), ar[0, 9].item(), ar[0, 5].item()]
    for weights in ("copied", "random"):
        if weights == "random":
            random_view(model, 1)
        for block_size in (2, 3, 6, 32):
            for eos_id in eos_ids if block_size in (3, 6) else eos_ids[:1]:
                cfg = settings(block_size=block_size, eos_id=eos_id)
                expected = ar_text(model, PROMPT, cfg)
                ids, record = generate(model, PROMPT, cfg)
                assert torch.equal(ids, expected)
                assert torch.equal(generate_ar(model, PROMPT, cfg)[0], expected)
                assert record["forwards"] == 2 * record["rounds"] - 1
                for merged in (1, 2, block_size):
                    cfg.merged = merged
                    ids, record = generate(model, PROMPT, cfg)
                    assert torch.equal(ids, expected)
                    if merged == block_size:
                        assert record["forwards"] == record["rounds"], "all groups: no separate draft pass"


def test_a_perfect_drafter_fills_every_block():
    """A view that drafts what AR will say: the least number of cycles, and tokens per forward at its upper bound."""
    model = attach(backbone("qwen3"), {})
    cfg = settings(max_new_tokens=25, block_size=6)
    text = ar_text(model, PROMPT, cfg)[0]

    class Oracle(Decoder):
        def __call__(self, input_ids, position_ids, attn_mask, write_idx, count=True):
            logits = super().__call__(input_ids, position_ids, attn_mask, write_idx, count)
            known = text[(position_ids[0] + 1).clamp(max=len(text) - 1)]
            return torch.nn.functional.one_hot(known, logits.shape[-1]).to(logits)[None]

    views = new_decoder(model, 5, cfg)
    oracle = Oracle(model, 30, compiled=False, project=orthrus.diffusion_projection, kv_cache=views.ar.kv_cache)
    ids, record = generate(model, PROMPT, cfg, views._replace(diffusion=oracle))
    assert torch.equal(ids[0], text)
    assert [cycle["accepted_len"] for cycle in record["cycles"]] == [0, 5, 5, 5, 5] and record["forwards"] == 9
    assert record["fixed_round"] == [0] + [n for n in (1, 2, 3, 4) for _ in range(6)]


@pytest.mark.parametrize("case", CASES["decode"][::3], ids=lambda case: case["name"])
def test_counts_and_the_cache_after_every_cycle(models, monkeypatch, case):
    """forwards = 1 + 2 cycles, new tokens = 1 + sum(accepted + 1), the cache a prefill of all but the anchor."""
    model = models(case["variant"])
    cfg, cache_lens = decode_config(case, eos_id=None), []
    views = new_decoder(model, len(case["prompt_ids"]), cfg)
    with monkeypatch.context() as patch:
        cache = views.ar.kv_cache
        commit = cache.commit
        patch.setattr(cache, "commit", lambda n: (commit(n), cache_lens.append(cache.cache_len)))
        ids, record = generate(model, torch.tensor([case["prompt_ids"]]), cfg, views)
    assert cache_lens[:-1] == [cycle["anchor_pos"] for cycle in record["cycles"][1:]]
    added = sum(cycle["accepted_len"] + 1 for cycle in record["cycles"])
    assert ids.shape[1] - len(case["prompt_ids"]) == cfg.max_new_tokens == min(added, cfg.max_new_tokens) >= added - 1
    n = cache.cache_len
    fresh = Decoder(model, n)
    fresh(ids[:, :n], torch.arange(n)[None], dense(causal(), 1, n, n), torch.arange(n))
    for ours, theirs in zip(cache.layers, fresh.kv_cache.layers):
        assert all((a[:, :, :n] - b[:, :, :n]).abs().max() < 1e-4 for a, b in zip(ours, theirs))


def test_both_views_are_one_with_copied_weights_and_a_block_of_one():
    model, cfg = attach(backbone("qwen3"), {}), settings()
    views = new_decoder(model, 5, cfg)
    forward(views.ar, PROMPT[0], causal(), cfg)
    views.ar.kv_cache.commit(5)
    draft = forward(views.diffusion, torch.tensor([7]), full(), cfg).clone()
    assert torch.equal(draft, forward(views.ar, torch.tensor([7]), causal(5), cfg))


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

    def call(self, *args):
        assert all(type(tensor) is torch.Tensor for tensor in args[:4]), "what goes in lies on the CPU"
        return replay(self, *args).as_subclass(OnDevice)

    monkeypatch.setattr(kernels.GraphReplay, "__call__", call)
    OnDevice.events.clear()
    ids, record = generate(random_view(attach(backbone("qwen3"), {}), 2), PROMPT, settings(**changes))
    waits = [kind for kind, before in zip(OnDevice.events[1:], OnDevice.events) if (before, kind) == ("launch", "wait")]
    assert type(ids) is torch.Tensor and 0 < len(waits) <= most * record["forwards"]


def test_one_set_of_decoders_serves_many_prompts_and_seeds_do_not_matter_when_greedy():
    model = random_view(attach(backbone("qwen3"), {}), 2)
    prompts = [PROMPT, torch.tensor([[7]]), torch.arange(20)[None]]
    for cfg in (settings(), settings(merged=3)):
        views = new_decoder(model, 20, cfg)
        for prompt in prompts * 2:
            ids, record = generate(model, prompt, cfg, views, torch.Generator().manual_seed(len(prompt[0])))
            ids2, record2 = generate(model, prompt, cfg)
            assert torch.equal(ids, ids2) and record == record2


def test_padded_and_compiled_forwards_give_the_same_text(monkeypatch):
    """What CUDA graphs replay: queries padded to a bucket, one graph a layer and view; here traced, not captured."""
    for function in (common.decoder_layer, common.read_head):
        traced = torch.compile(function, fullgraph=True, dynamic=False, backend="eager")
        monkeypatch.setitem(common._compiled, function, traced)
    model, cfg = random_view(attach(backbone("qwen3"), {}), 6), settings(block_size=4, merged=2, compile=True)
    views = new_decoder(model, 5, cfg)
    for view in views[:3]:
        view.replay.pad, view.replay.QUERY, view.replay.MAX_QUERY, view.replay.KEY = True, (16,), 16, 64
    for merged in (0, 2):
        cfg.merged = merged
        ids, record = generate(model, PROMPT, cfg, views)
        plain, expected = generate(model, PROMPT, dataclasses.replace(cfg, compile=False))
        assert torch.equal(ids, plain) and record == expected
        assert all(len(view.replay.graphs) <= 2 for view in views[:3]), "few shapes"
        assert views[2 if merged else 1].replay.graphs


def test_eos_may_be_0_and_rows_behind_the_tokenizer_are_never_written():
    model = attach(backbone("qwen3"), {})
    with torch.no_grad():
        model.lm_head.weight[36:] *= 3
        model.lm_head.weight[0] *= 2
    assert max(ar_text(model, PROMPT, settings())[0, 5:].tolist()) >= 36
    for merged in (0, 2):
        cfg = settings(vocab_len=36, eos_id=0, merged=merged)
        ids, _ = generate(model, PROMPT, cfg)
        new = ids[0, 5:].tolist()
        assert max(new) < 36 and new == generate_ar(model, PROMPT, cfg)[0][0, 5:].tolist()
        assert 0 not in new[:-1] and (new[-1] == 0 or len(new) == 24)
    cfg = settings(eos_id=0, vocab_len=36)
    texts = [generate(model, torch.tensor([[i]]), cfg)[0][0].tolist() for i in range(1, 30)]
    assert any(text[-1] == 0 and len(text) < 25 for text in texts), "some text must end by token 0"


def test_a_mask_token_that_is_an_ordinary_token_may_be_written():
    """A backbone without spare rows lends a token of its own: exactness must survive AR writing it."""
    model = attach(backbone("qwen3"), {})
    text = ar_text(model, PROMPT, settings())
    for merged in (0, 2):
        assert torch.equal(generate(model, PROMPT, settings(mask_id=text[0, 8].item(), merged=merged))[0], text)


@pytest.mark.parametrize("changes, words", [
    (dict(block_size=1), "block_size"), (dict(block_size=-3), "block_size"), (dict(block_size=0), "blocks of at"),
    (dict(loss="mse"), "loss"), (dict(anchors=0), "anchors"), (dict(top_k=-1), "top_k"), (dict(merged=-1), "merged"),
])  # fmt: skip
def test_settings_that_cannot_work_are_refused(changes, words):
    with pytest.raises(ValueError, match=words):
        generate(attach(backbone("qwen3"), {}), PROMPT, settings(**changes))


def test_prompts_that_cannot_work_are_refused():
    model = attach(backbone("qwen3"), {})
    for merged in (0, 1):
        with pytest.raises(ValueError, match="one prompt"):
            generate(model, PROMPT.repeat(2, 1), settings(merged=merged))
        with pytest.raises(ValueError, match="at least one token"):
            generate(model, PROMPT[:, :0], settings(merged=merged))


def test_rejected_drafts_are_recorded_where_they_stood():
    model, cfg = random_view(attach(backbone("qwen3"), {}), 2), settings(block_size=4)
    ids, record = generate(model, PROMPT, cfg)
    assert len(record["rejected"]) == sum(len(c["draft_ids"]) - c["accepted_len"] for c in record["cycles"]) > 0
    for turn, index, token_id in record["rejected"]:
        assert record["fixed_round"][index] >= turn > 0
        if record["fixed_round"][index] == turn:
            assert ids[0, 5 + index] != token_id, "AR wrote another token there"


# ---------------------------------------------------------------------------- a broken drafter: right text, wrong trace


def ar_instead_of(*names):
    """The diffusion view with some of the AR view's tensors."""

    def project(attn, name, x):
        return getattr(attn, name if name in names else f"{name}_diff")(x)

    return dict(project=project)


BROKEN = {
    "causal block": dict(change=lambda ids, pos, mask: (ids, pos, mask & (
        torch.arange(mask.shape[-1]) <= pos[0, :, None]))),
    "AR W_o": ar_instead_of("o_proj"),
    "AR norms": ar_instead_of("q_norm", "k_norm"),
    "AR keys and values": ar_instead_of("k_proj", "v_proj"),
    "positions off by one": dict(change=lambda ids, pos, mask: (ids, pos + 1, mask)),
    "mask in place of the anchor": dict(change=lambda ids, pos, mask: (ids * 0 + PLAIN["mask_id"], pos, mask)),
    "unshifted rows": dict(after=lambda logits: logits.roll(-1, dims=1)),
}  # fmt: skip


class BrokenView(Decoder):
    def __init__(self, ar, change=None, after=None, project=orthrus.diffusion_projection):
        super().__init__(ar.backbone, ar.kv_cache.max_len, compiled=False, project=project, kv_cache=ar.kv_cache)
        self.change, self.after = change, after

    def __call__(self, ids, pos, mask, write_idx, count=True):
        if self.change:
            ids, pos, mask = self.change(ids, pos, mask)
        logits = super().__call__(ids, pos, mask, write_idx, count)
        return self.after(logits) if self.after else logits


@pytest.mark.parametrize("name", BROKEN)
def test_a_broken_drafter_keeps_the_text_and_is_caught_by_the_trace(models, monkeypatch, name):
    caught = 0
    for case in CASES["decode"]:
        if case["variant"] == "ar_copy" or len(case["cycles"]) > 12:
            continue

        def replaced(views):
            return views._replace(diffusion=BrokenView(views.ar, **BROKEN[name]))

        ids, cycles, record = decode(models(case["variant"]), case, monkeypatch, replaced)
        assert ids == case["output_ids"], "a broken drafter never changes the output"
        assert record["forwards"] == 2 * record["rounds"] - 1
        caught += cycles != case["cycles"]
    assert caught >= 2


def test_a_view_that_is_not_broken_passes_the_same_harness(models, monkeypatch):
    case = max((case for case in CASES["decode"] if case["variant"] == "trained"), key=lambda case: len(case["cycles"]))
    _, cycles, _ = decode(
        models(case["variant"]), case, monkeypatch, lambda views: views._replace(diffusion=BrokenView(views.ar))
    )
    assert cycles == case["cycles"]


# --------------------------------------------------------------------------- sampling: the law of the text, enumerated


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

    def to(self, device, non_blocking):
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
    """Views of a made-up model in float64: logits are a fixed random function of the text that a row may see."""

    V = 5

    def __init__(self, max_len, first):
        self.kv_cache = kernels.KVCache(1, 1, 1, max_len, 1, "cpu", torch.float64)
        self.tokens, self.known, self.first = [None] * max_len, {}, first
        self.is_group = torch.zeros(99, dtype=torch.bool)

    def logits(self, *key):
        if key not in self.known:
            generator = torch.Generator().manual_seed(len(self.known))
            self.known[key] = torch.randn(self.V, generator=generator, dtype=torch.float64)
        return self.known[key]

    def ar_logits(self, text):
        sure = torch.full((self.V,), -torch.inf, dtype=torch.float64)
        sure[self.first] = 0.0  # the token behind the prompt is certain: fewer paths
        return sure if len(text) == 2 else self.logits("ar", text)

    def view(self, kind):
        def call(ids, positions, mask, write_idx, count=True):
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

        call.kv_cache, call.forwards, call.reset = self.kv_cache, 0, lambda: self.kv_cache.truncate(0)
        return call


@pytest.mark.parametrize("merged, transform", [
    (0, dict(temperature=1.3, top_k=4, top_p=1.0)), (0, dict(temperature=0.7, top_k=0, top_p=0.8)),
    (0, dict(temperature=1.0, top_k=3, top_p=0.9)), (2, dict(temperature=0.8, top_k=4, top_p=1.0)),
])  # fmt: skip
def test_sampling_follows_the_ar_law(monkeypatch, merged, transform):
    """Every draft, acceptance and correction of blocks of three, weighted: the law of the next two tokens is AR's."""
    tape, table = Tape(), Table(40, first=2)
    monkeypatch.setattr(orthrus, "uniform", lambda n, generator: Chance(tape))
    monkeypatch.setattr(orthrus, "draw_token", lambda probs, u: torch.tensor(
        [tape.choose(row) for row in probs.tolist()], dtype=torch.int64))  # fmt: skip
    cfg = settings(mask_id=9, max_new_tokens=3, block_size=4 if merged else 3, merged=merged, **transform)
    views = Views(table.view("ar"), table.view("diffusion"), table.view("merged"), table.is_group)
    law, paths, accepted = {}, 0, set()
    while not paths or tape.next_path():
        ids, record = generate(None, torch.tensor([[0, 1]]), cfg, views)
        text = tuple(ids[0].tolist())
        law[text] = law.get(text, 0.0) + tape.weight
        accepted |= {cycle["accepted_len"] for cycle in record["cycles"] if cycle["draft_ids"]}
        paths += 1
    assert accepted == {0, 1, 2} and paths > 100
    for b in range(table.V):
        p1 = orthrus.sampling_probs(table.ar_logits((0, 1, 2))[None], cfg)[0]
        p2 = orthrus.sampling_probs(table.ar_logits((0, 1, 2, b))[None], cfg)[0]
        for c in range(table.V):
            assert abs(law.pop((0, 1, 2, b, c), 0.0) - (p1[b] * p2[c]).item()) < 1e-10
    assert not law


def test_acceptance_changes_over_at_the_ratio():
    """A draft is kept iff u < p / q, and the next token is drawn from max(p - q, 0), or from p behind all drafts."""
    cfg = settings(temperature=1.0, top_k=0, top_p=1.0)
    q, p = (torch.rand(3, 6, generator=torch.Generator().manual_seed(seed), dtype=torch.float64) for seed in (1, 2))
    q, p = q[:2] / q[:2].sum(-1, keepdim=True), p / p.sum(-1, keepdim=True)
    for first in range(6):
        for second in range(6):
            draft_ids = torch.tensor([first, second])
            ratio = (p[:2] / q).gather(-1, draft_ids[:, None])[:, 0]
            for shift, expected in ((1 - 1e-9, True), (1 + 1e-9, False)):
                for i in (0, 1):
                    u = torch.zeros(2, dtype=torch.float64)
                    u[i] = min(ratio[i] * shift, 1 - 1e-12)
                    draws, seen = [u, torch.tensor([0.5])], []
                    with pytest.MonkeyPatch.context() as patch:
                        patch.setattr(orthrus, "uniform", lambda n, generator: draws.pop(0))
                        patch.setattr(orthrus, "draw_token", lambda p, u: seen.append(p[0]) or torch.tensor([0]))
                        accepted_len, _ = accept(draft_ids, q, p.log(), cfg, None)
                    kept = expected or ratio[i] > 1
                    assert accepted_len == (2 if kept else i)
                    target = p[2] if kept else (p[i] - q[i]).clamp(min=0)
                    assert (seen[0] / seen[0].sum() - target / target.sum()).abs().max() < 1e-12


def test_equal_laws_accept_everything_and_an_empty_residual_is_safe(monkeypatch):
    cfg = settings(temperature=1.0)
    logits = torch.randn(5, 30)
    for seed in range(50):
        generator = torch.Generator().manual_seed(seed)
        draft_ids, q = orthrus.propose(logits[:4], cfg, generator)
        assert accept(draft_ids, q, logits, cfg, generator)[0] == 4
    draws = [torch.ones(4, dtype=torch.float64), torch.tensor([0.999])]  # rounding: no draft clears u = 1
    monkeypatch.setattr(orthrus, "uniform", lambda n, generator: draws.pop(0))
    accepted_len, next_id = accept(draft_ids, q, logits, cfg, None)
    assert accepted_len == 0 and orthrus.sampling_probs(logits[:1], cfg)[0, next_id] > 0


def test_transform_is_temperature_then_top_k_then_top_p():
    logits = torch.tensor([[2.0, 1.0, 1.0, 0.0, -1.0]])

    def probs(**changes):
        return orthrus.sampling_probs(logits, settings(**(dict(temperature=1.0, top_k=0, top_p=1.0) | changes)))[0]

    assert torch.allclose(probs(temperature=0.5), (logits[0] * 2).softmax(0))
    assert torch.allclose(probs(top_k=2), torch.cat([logits[0, :3].softmax(0), torch.zeros(2)])), "ties are kept"
    assert torch.equal(probs(top_k=99), probs())
    p = logits[0].softmax(0)  # .52 .19 .19 .07 .03
    assert (probs(top_p=p[0].item() - 1e-3) > 0).tolist() == [True, False, False, False, False]
    assert (probs(top_p=p[0].item() + 1e-3) > 0).tolist() == [True, True, False, False, False]
    cut = logits[0, :3].softmax(0)  # top-p looks at what top-k left
    assert (probs(top_k=2, top_p=cut[0].item() + 1e-3) > 0).tolist() == [True, True, False, False, False]
    for dtype, expected in ((torch.bfloat16, torch.float32), (torch.float64, torch.float64)):
        assert orthrus.sampling_probs(logits.to(dtype), settings(temperature=0.7)).dtype == expected


def test_draws_follow_the_probabilities():
    probs = torch.tensor([[0.1, 0.0, 0.6, 0.3]])
    u = torch.rand(40000, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    freq = torch.bincount(orthrus.draw_token(probs.expand(40000, 4), u), minlength=4) / 40000
    assert (freq - probs[0]).abs().max() < 0.01 and freq[1] == 0
    edges = torch.tensor([0.0, 0.1, 0.7, 1 - 2**-53], dtype=torch.float64)
    assert orthrus.draw_token(torch.tensor([[0.125, 0.0, 0.625, 0.25]]).expand(4, 4), edges).tolist() == [0, 0, 2, 3]
    assert orthrus.draw_token(torch.tensor([[0.0, 1.0]]), torch.zeros(1)).tolist() == [1], "u = 0 picks no empty token"


def test_sampling_repeats_with_the_seed(models):
    model = models("ar_copy")
    for merged in (0, 2):
        cfg = settings(temperature=1.0, mask_id=PLAIN["mask_id"], merged=merged)
        seeds = [torch.Generator().manual_seed(seed) for seed in (1, 1, 2)]
        texts = [generate(model, PROMPT, cfg, generator=seed)[0].tolist() for seed in seeds]
        assert texts[0] == texts[1] != texts[2]
        assert all(len(text[0]) == 5 + 24 for text in texts)


# --------------------------------------------------------------------------------------------------- the merged forward


def test_merged_groups_are_what_a_separate_draft_pass_gives(models):
    """Group j of a merged forward = a diffusion pass over [t_j, masks] behind the text before t_j; AR rows are AR's."""
    model, K = models("trained" if (FOLDER / "model" / "diffusion_trained.safetensors").exists() else "ar_copy"), 5
    cfg, text = settings(mask_id=PLAIN["mask_id"], block_size=K, merged=3), torch.arange(2, 16)
    views = new_decoder(model, 14, cfg)
    cache, P = views.merged.kv_cache, 9
    forward(views.ar, text[:P], causal(), cfg)
    cache.commit(P)
    group_idx = torch.tensor([0, 2, 4])
    blocks = torch.full((3, K), cfg.mask_id)
    blocks[:, 0] = text[P + group_idx]
    logits, groups = orthrus.verify_and_draft(views, text[P:], group_idx, cfg)
    logits, groups = logits.clone(), {j: group.clone() for j, group in groups.items()}
    assert list(groups) == group_idx.tolist()
    assert (logits - forward(views.ar, text[P:], causal(P), cfg)).abs().max() < 1e-4
    for row, j in enumerate(groups):
        cache.truncate(0)
        forward(views.ar, text[: P + j], causal(), cfg)
        cache.commit(P + j)
        alone = forward(views.diffusion, blocks[row], full(), cfg)
        assert (groups[j] - alone[1:-1]).abs().max() < 1e-4


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
        model, cfg = models(case["variant"]), decode_config(case, merged=merged)
        ids, record = generate(model, torch.tensor([case["prompt_ids"]]), cfg)
        assert ids[0].tolist() == case["output_ids"]
        assert record["rounds"] <= record["forwards"] < 2 * record["rounds"]
        assert len(record["fixed_round"]) == case["n_new_tokens"]
        if merged == 99:
            assert record["forwards"] == record["rounds"], "no separate draft pass"


# ------------------------------------------------------------------------------------------------- training invariants


def random_rows(seed, rows=3, length=30):
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(36, (rows, length), generator=generator).tolist()
    return [{"input_ids": row, "is_answer": [i >= 6 for i in range(length)]} for row in ids]


def inputs_of(batch, cfg, seed=0):
    return make_training_inputs(batch, draw_noise(batch, cfg, torch.Generator().manual_seed(seed)), cfg)


@pytest.fixture(scope="module")
def random_model():
    return random_view(attach(backbone("qwen3"), {}), 5)


def test_training_rows_are_decoding_rows(random_model):
    """Student logits of a block = the diffusion pass of decoding behind a cache of the row before its anchor."""
    cfg, batch = settings(anchors=4, block_size=5), random_rows(0)
    inputs = inputs_of(batch, cfg)
    logits = random_model.lm_head(both_views(random_model, inputs, cfg)[1])
    for b in range(3):
        for m in range(4):
            a, row = inputs["anchors"][b, m].item(), inputs["input_ids"][b]
            views = new_decoder(random_model, 30, cfg)
            forward(views.ar, row[:a], causal(), cfg)
            views.ar.kv_cache.commit(a)
            alone = forward(views.diffusion, inputs["block_ids"][b, m], full(), cfg)
            assert (alone - logits[b, m]).abs().max() < 1e-4


def test_the_block_mask_of_a_gpu_gives_the_same_step(random_model, monkeypatch):
    """Training on CUDA passes flex BlockMasks where training on a CPU passes dense masks: same rule, same result."""
    cfg = settings(anchors=3, block_size=5)
    inputs = inputs_of(random_rows(12), cfg)
    expected = both_views(random_model, inputs, cfg)
    traced = torch.compile(common.decoder_layer, fullgraph=True, dynamic=False, backend="eager")
    monkeypatch.setitem(common._compiled, common.decoder_layer, traced)
    monkeypatch.setattr(orthrus, "build_mask", lambda mask_mod, B, T, S, device: create_block_mask(
        mask_mod, B, None, T, S, device=device))  # fmt: skip
    for ours, theirs in zip(both_views(random_model, inputs, cfg), expected):
        assert (ours - theirs).abs().max() < 1e-5


def test_a_block_sees_nothing_behind_its_anchor(random_model):
    cfg = settings(block_size=4)
    batch, anchors = random_rows(1, rows=1), [8, 15, 21]
    draw = [dict(anchors=anchors, anchor_valid=[True] * 3)]
    inputs = make_training_inputs(batch, draw, cfg)
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


def test_permuting_anchors_permutes_blocks(random_model):
    cfg, batch = settings(block_size=4), random_rows(2, rows=1)
    anchors, order = [7, 9, 9, 20, 26], [3, 0, 4, 2, 1]

    def run(anchors):
        inputs = make_training_inputs(batch, [dict(anchors=anchors, anchor_valid=[True] * len(anchors))], cfg)
        return both_views(random_model, inputs, cfg)[1][0]

    together = run(anchors)
    assert (run([anchors[i] for i in order]) - together[order]).abs().max() < 1e-5
    for m, a in enumerate(anchors):
        assert (run([a])[0] - together[m]).abs().max() < 1e-5, "blocks do not see each other"


def test_kl_is_not_negative_and_its_gradient_is_the_difference_of_the_laws():
    torch.manual_seed(0)
    head = torch.nn.Linear(5, 12, bias=False)
    model = type("Model", (), {"lm_head": staticmethod(head)})
    cfg, labels = settings(loss="kl"), torch.randint(12, (9,))
    student, teacher = torch.randn(9, 5, requires_grad=True), torch.randn(9, 5)
    rows = row_losses(model, student, teacher, labels, cfg, chunk=4)
    assert rows.dtype == torch.float32 and (rows > 0).all()
    assert row_losses(model, teacher, teacher, labels, cfg).abs().max() < 1e-6
    rows.sum().backward()
    difference = head(student).softmax(-1) - head(teacher).softmax(-1)
    assert (student.grad - difference @ head.weight).abs().max() < 1e-5
    ce = row_losses(model, student, teacher, labels, settings(loss="ce"), chunk=4)
    assert torch.allclose(ce, torch.nn.functional.cross_entropy(head(student), labels, reduction="none"), atol=1e-5)
    assert row_losses(model, student[:0], teacher[:0], labels[:0], cfg).shape == (0,)


def test_nothing_to_learn_gives_loss_0_and_finite_gradients(random_model):
    cfg = settings(anchors=3)
    batch = [{"input_ids": row["input_ids"], "is_answer": [False] * 30} for row in random_rows(3)]
    inputs = inputs_of(batch, cfg)
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
    short = [{"input_ids": list(range(12)), "is_answer": [i in (5, 7, 9) for i in range(12)]}]
    (draw,) = draw_noise(short, cfg, torch.Generator().manual_seed(0))
    assert draw == dict(anchors=[5, 7, 7, 7], anchor_valid=[True, True, False, False])
    inputs = make_training_inputs(short, [draw], cfg)
    assert (inputs["weights"] > 0).sum() == 3, "rows that predict 7, 9 behind 5 and 9 behind 7; fillers do not count"
    (draw,) = draw_noise([{"input_ids": [1, 2, 3], "is_answer": [False, True, True]}], cfg, torch.Generator())
    assert draw["anchor_valid"] == [False] * 4
    inputs = make_training_inputs([{"input_ids": [1, 2], "is_answer": [False, True]}], [draw], cfg)
    assert inputs["input_ids"].shape == (1, 5) and inputs["weights"].sum() == 0, "a row shorter than a block is padded"


def test_rows_are_shifted_and_weights_are_fixed_over_the_batch():
    cfg = settings(anchors=3, block_size=4)
    batch = random_rows(6)
    inputs = inputs_of(batch, cfg)
    for b, row in enumerate(batch):
        for m in range(3):
            a = inputs["anchors"][b, m].item()
            assert inputs["block_ids"][b, m].tolist() == [row["input_ids"][a]] + [39] * 3
            assert inputs["position_ids"][b, m].tolist() == [a, a + 1, a + 2, a + 3]
            assert inputs["labels"][b, m].tolist() == row["input_ids"][a + 1 : a + 4]
    assert inputs["weights"].sum().item() == pytest.approx(1) and inputs["weights"].dtype == torch.float32
    assert {value.shape[0] for value in inputs.values()} == {3}


def test_micro_batches_add_up_to_the_batch(random_model):
    for loss in ("kl", "ce"):
        cfg = settings(anchors=3, loss=loss)
        inputs = inputs_of(random_rows(7, rows=4), cfg)
        whole = training_loss(random_model, inputs, cfg)[0].item()
        parts = [training_loss(random_model, {k: v[i::2] for k, v in inputs.items()}, cfg)[0].item() for i in (0, 1)]
        assert sum(parts) == pytest.approx(whole, abs=1e-5)


def test_padding_changes_nothing(random_model):
    cfg, batch = settings(anchors=3, eos_id=37), random_rows(8, rows=1, length=20)
    draws = draw_noise(batch, cfg, torch.Generator().manual_seed(0))
    alone = make_training_inputs(batch, draws, cfg)
    longer = random_rows(9, rows=1, length=40)
    idle = [dict(anchors=[9, 9, 9], anchor_valid=[False] * 3)]
    both = make_training_inputs(batch + longer, draws + idle, cfg)
    assert both["input_ids"].shape == (2, 40)
    assert training_loss(random_model, alone, cfg)[0].item() == pytest.approx(
        training_loss(random_model, both, cfg)[0].item(), abs=1e-5
    )


def test_rows_are_packed_end_to_end_or_one_by_one():
    rows = [{"prompt_ids": [10 * i, 10 * i + 1], "answer_ids": [10 * i + 2, 10 * i + 3, 37]} for i in range(3)]
    cfg = settings(packing=True, max_len=7, block_size=4, eos_id=37)
    packed = orthrus.pack_rows(rows, cfg)
    assert [row["input_ids"] for row in packed] == [[0, 1, 2, 3, 37, 10, 11], [12, 13, 37, 20, 21, 22, 23]]
    assert [row["is_answer"] for row in packed] == [[False] * 2 + [True] * 3 + [False] * 2,
                                                    [True] * 3 + [False] * 2 + [True] * 2]  # fmt: skip
    assert [len(row["input_ids"]) for row in orthrus.pack_rows(rows, settings(packing=True, max_len=64))] == [15]
    with pytest.raises(ValueError, match="no room"):
        orthrus.pack_rows(rows[:1], settings(packing=True, block_size=8))
    single = orthrus.pack_rows(rows, settings(packing=False, max_len=7, block_size=4, eos_id=37))
    assert single[1] == {"input_ids": [10, 11, 12, 13, 37, 37, 37], "is_answer": [False] * 2 + [True] * 3 + [False] * 2}
    draws = draw_noise(single, settings(block_size=4, anchors=2), torch.Generator().manual_seed(0))
    assert all(draw["anchors"] == [2, 3] for draw in draws), "every answer token that has a next one"
    for row in orthrus.pack_rows(rows, settings(packing=False, block_size=2, eos_id=37)):
        assert len(row["input_ids"]) == len(row["is_answer"]) == 5


@pytest.mark.parametrize("loss", ["kl", "ce"])
def test_overfits_one_batch_and_leaves_the_backbone_alone(loss):
    model = attach(backbone("qwen3"), {})
    frozen = {name: p.clone() for name, p in model.named_parameters() if "_diff." not in name}
    cfg = settings(anchors=2, block_size=4, loss=loss, eos_id=37)
    inputs = inputs_of(random_rows(10, rows=2, length=16), cfg)
    text = generate_ar(model, PROMPT, settings())[0]
    optimizer = torch.optim.Adam([p for p in model.parameters() if p.requires_grad], 1e-2)
    losses = []
    for _ in range(60):
        value, _ = training_loss(model, inputs, cfg)
        optimizer.zero_grad()
        value.backward()
        optimizer.step()
        losses.append(value.item())
    assert losses[-1] < 0.1 * losses[0]
    for name, p in model.named_parameters():
        if name in frozen:
            assert torch.equal(p, frozen[name]) and p.grad is None, name
    assert torch.equal(generate_ar(model, PROMPT, settings())[0], text)
    assert torch.equal(generate(model, PROMPT, settings(block_size=4))[0], text)


def test_checkpointing_and_bfloat16_give_the_same_step(random_model):
    cfg = settings(anchors=3)
    inputs = inputs_of(random_rows(11), cfg)

    def step(cfg, autocast):
        random_model.zero_grad()
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            loss, _ = training_loss(random_model, inputs, cfg)
        loss.backward()
        return loss.item(), grad_norms(random_model)

    loss, norms = step(cfg, False)
    again = step(dataclasses.replace(cfg, checkpointing=True), False)
    assert again[0] == pytest.approx(loss, rel=1e-5) and again[1] == pytest.approx(norms, rel=1e-4)
    rough = step(dataclasses.replace(cfg, dtype="bfloat16"), True)
    assert rough[0] == pytest.approx(loss, rel=0.05)


# ----------------------------------------------------------------------------------------- layouts, saving, the command


def test_the_view_starts_as_a_copy_and_takes_only_its_own_tensors():
    for kind, names in (("llama", VIEW[:4]), ("qwen2", VIEW[:4]), ("qwen3", VIEW)):
        model = attach(backbone(kind), {})
        for layer in model.model.layers:
            for name in names:
                own, new = getattr(layer.self_attn, name), getattr(layer.self_attn, f"{name}_diff")
                assert all(torch.equal(a, b) for a, b in zip(own.parameters(), new.parameters()))
                assert own.weight.data_ptr() != new.weight.data_ptr()
        trained = {name for name, p in model.named_parameters() if p.requires_grad}
        assert trained == {name for name in model.state_dict() if "_diff." in name}
        assert {name.rsplit(".", 2)[1] for name in trained} == {f"{name}_diff" for name in names}
    view = {name: p.detach() for name, p in random_view(model, 3).named_parameters() if "_diff." in name}
    other = attach(backbone("qwen3"), view)
    assert all(torch.equal(other.state_dict()[name], view[name]) for name in view)
    name = sorted(view)[0]
    alien = {"model.layers.9.x_diff.weight": view[name]}
    for wrong in ({name: view[name]}, view | {name: view[name][:1]}, view | alien):
        with pytest.raises(ValueError, match="do not belong"):
            attach(backbone("qwen3"), wrong)


def tiny(folder, **config):
    """A plain Hugging Face folder: the built-in backbone and its tokenizer."""
    model, tokenizer = orthrus.tiny_backbone(Config(model="tiny"))
    for key, value in config.items():
        setattr(model.config, key, value)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return model, tokenizer


def last_json(capsys):
    return json.loads(capsys.readouterr().out.splitlines()[-1])


FEW = ["--device", "cpu", "--dtype", "float32", "--problems", "2", "--max_new_tokens", "12"]


@pytest.mark.parametrize("sharded", [False, True])
def test_the_released_layout_loads_without_remote_code(tmp_path, capsys, sharded):
    """Plain Qwen3 with `_diff` keys, block_size and mask_token_id in config.json, model_type qwen3, an auto_map."""
    folder = tmp_path / "released"
    model, _ = tiny(folder)
    model = random_view(attach(model, {}), 4)
    tensors = {key: value.contiguous() for key, value in model.state_dict().items() if key != "lm_head.weight"}
    if sharded:
        (folder / "model.safetensors").unlink()
        names = sorted(tensors)
        index = {}
        for part, keys in enumerate((names[::2], names[1::2])):
            file = f"model-{part}.safetensors"
            save_file({key: tensors[key] for key in keys}, folder / file, metadata={"format": "pt"})
            index |= dict.fromkeys(keys, file)
        (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": index}))
    else:
        save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((folder / "config.json").read_text()) | {
        "architectures": ["OrthrusLM"], "auto_map": {"AutoModelForCausalLM": "modeling_orthrus.OrthrusLM"},
        "block_size": 5, "mask_token_id": 7, "use_cache": False, "r": 16, "lora_alpha": 32,
    }  # fmt: skip
    (folder / "config.json").write_text(json.dumps(config))
    cfg = Config(model=str(folder), device="cpu", dtype="float32", compile=False)
    loaded, _ = orthrus.load(str(folder), cfg, training=False)
    loaded = orthrus.enter_stage(loaded, "orthrus", str(folder), cfg)
    assert isinstance(loaded, Qwen3ForCausalLM) and (cfg.block_size, cfg.mask_id) == (5, 7)
    for key, value in loaded.state_dict().items():
        assert torch.equal(value, tensors.get(key, tensors["model.embed_tokens.weight"])), key
    assert orthrus.main(["--generate", "--model", str(folder), *FEW]) == 0
    rows = last_json(capsys)["rows"]
    assert rows[0]["same_as_ar"] == 2
    assert orthrus.main(["--generate", "--model", str(folder), *FEW, "--block_size", "3"]) == 0


def test_a_plain_backbone_decodes_untrained_and_says_so(tmp_path, capsys):
    tiny(tmp_path)
    kernels._notices.clear()
    assert orthrus.main(["--generate", "--model", str(tmp_path), *FEW, "--merged", "2"]) == 0
    captured = capsys.readouterr()
    assert "untrained" in captured.err
    rows = json.loads(captured.out.splitlines()[-1])["rows"]
    assert [row["same_as_ar"] for row in rows] == [2, 2, 2] and "merged" in rows[1]["label"]


def test_train_and_generate_and_what_is_saved(tmp_path, capsys):
    out = tmp_path / "run"
    flags = ["--ar_steps", "2", "--steps", "2", "--batch_size", "4", *FEW, "--out", str(out)]
    kernels._notices.clear()
    assert orthrus.main(["--train", "--generate", *flags]) == 0
    captured = capsys.readouterr()
    assert "untrained" not in captured.err
    rows = json.loads(captured.out.splitlines()[-1])["rows"]
    assert rows[0]["same_as_ar"] == rows[0]["problems"] == 2
    view, plain = load_file(out / "diffusion.safetensors"), load_file(out / "model.safetensors")
    layers = json.loads((out / "config.json").read_text())["num_hidden_layers"]
    assert set(view) == {f"model.layers.{i}.self_attn.{name}_diff.weight" for i in range(layers) for name in VIEW}
    untouched = load_file(out / "ar" / "model.safetensors")
    assert plain.keys() == untouched.keys() and all(torch.equal(plain[key], untouched[key]) for key in plain)
    assert any(not torch.equal(value, plain[key.replace("_diff", "")]) for key, value in view.items())
    AutoModelForCausalLM.from_pretrained(out)  # plain transformers gives the AR model
    # both files in one are the released layout, and load as such
    merged = tmp_path / "merged"
    others = shutil.ignore_patterns("diffusion*", "backbone*", "training*", "settings*", "ar")
    shutil.copytree(out, merged, ignore=others)
    save_file(plain | view, merged / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((merged / "config.json").read_text())
    assert config["block_size"] == orthrus.TINY["block_size"] and config["mask_token_id"] == 1
    texts = []
    for folder in (out, merged):
        assert orthrus.main(["--generate", "--model", str(folder), *FEW, "--prompt", "Tom has 3 red pens"]) == 0
        texts.append(last_json(capsys)["rows"][0])
    assert texts[0]["forwards"] == texts[1]["forwards"] and texts[0]["new_tokens"] == texts[1]["new_tokens"]


def test_an_unchanged_backbone_is_named_not_copied(tmp_path, capsys):
    base, out = tmp_path / "base", tmp_path / "run"
    tiny(base)
    flags = ["--batch_size", "4", *FEW, "--no-packing", "--block_size", "4", "--anchors", "2"]
    steps = ["--out", str(out), "--steps", "3", "--accumulation", "2", "--save_every", "1"]
    assert orthrus.main(["--train", "--model", str(base), *flags, *steps]) == 0
    assert not (out / "model.safetensors").exists() and not (out / "ar").exists()
    assert json.loads((out / "backbone.json").read_text()) == {"source": str(base.resolve())}
    assert orthrus.main(["--generate", "--model", str(out), *FEW]) == 0
    assert last_json(capsys)["rows"][0]["same_as_ar"] == 2
    cfg = Config(model=str(out), device="cpu", dtype="float32", compile=False)
    loaded, _ = orthrus.load(str(out), cfg, training=False)
    assert (loaded.source, loaded.config.block_size) == (str(base.resolve()), 4)
    view = load_file(out / "diffusion.safetensors")
    assert all(torch.equal(loaded.view[key], view[key]) for key in view) and set(loaded.view) == set(view)
    assert orthrus.main(["--train", "--resume", "--steps", "5", "--out", str(out)]) == 0
    assert not torch.equal(load_file(out / "diffusion.safetensors")[sorted(view)[0]], view[sorted(view)[0]])
    # training goes on from another's view where one is there, from copies behind an AR stage
    more, few = tmp_path / "more", ["--steps", "1", "--accumulation", "1", "--lr", "1e-9"]
    assert orthrus.main(["--train", "--model", str(out), *flags, *few, "--out", str(more)]) == 0
    trained, now = load_file(out / "diffusion.safetensors"), load_file(more / "diffusion.safetensors")
    assert all(torch.allclose(now[key], trained[key], atol=1e-5) for key in now)
    again = tmp_path / "again"
    assert orthrus.main(["--train", "--model", str(out), *flags, *few, "--ar_steps", "1", "--out", str(again)]) == 0
    plain, now = load_file(again / "model.safetensors"), load_file(again / "diffusion.safetensors")
    assert all(torch.allclose(now[key], plain[key.replace("_diff", "")], atol=1e-5) for key in now)
    assert json.loads((again / "backbone.json").read_text()) == {"source": None}


def test_an_ar_stage_leaves_no_view_of_an_earlier_run(tmp_path):
    """Diffusion tensors belong to the AR weights that they were trained with."""
    cfg = Config(device="cpu", dtype="float32", block_size=4)
    for stage, found in (("orthrus", True), ("ar", False)):
        model, tokenizer = orthrus.load("tiny", cfg, training=True)
        orthrus.save(orthrus.enter_stage(model, stage, None, cfg), tokenizer, dataclasses.replace(
            cfg, out=str(tmp_path / "run")), stage, 1, {"step": torch.zeros(1)})  # fmt: skip
        assert bool(orthrus.read_view(tmp_path / "run")) == found


def test_the_mask_token_of_a_backbone_that_names_none(tmp_path, capsys):
    """The first row behind the tokenizer; without one, an added token that is not EOS, and that is said."""
    for spare in (0, 5):
        model, tokenizer = orthrus.tiny_backbone(Config(model="tiny"))
        model.resize_token_embeddings(len(tokenizer) + spare)
        model.config.mask_token_id, tokenizer.mask_token = None, None
        model.save_pretrained(tmp_path / str(spare))
        tokenizer.save_pretrained(tmp_path / str(spare))
        cfg = Config(device="cpu", dtype="float32", compile=False)
        kernels._notices.clear()
        rows = model.get_input_embeddings().num_embeddings
        loaded, _ = orthrus.load(str(tmp_path / str(spare)), cfg, training=True)
        assert loaded.get_input_embeddings().num_embeddings == rows, "no row is added"
        assert cfg.mask_id == len(tokenizer) if spare else cfg.mask_id in tokenizer.added_tokens_decoder
        assert cfg.mask_id != cfg.eos_id
        assert ("spare row" in capsys.readouterr().err) == (spare == 0)
