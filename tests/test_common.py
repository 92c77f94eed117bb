"""Masks, RoPE, the decoder walk, attention, KV cache and graph replay, on tiny random models."""

import copy
import gc
import os
import subprocess
import sys
import weakref

import pytest
import torch
import torch.nn.functional as F
from conftest import ROOT
from torch.nn.attention.flex_attention import BlockMask, flex_attention
from transformers import (
    Gemma2Config,
    Gemma2ForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    Phi3Config,
    Phi3ForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

import common
from common import Decoder, block_causal, build_mask, causal, dense, full, fuse, kernels, segments, walk

SHAPE = dict(
    vocab_size=60, hidden_size=32, intermediate_size=48, num_hidden_layers=3, num_attention_heads=4, num_key_value_heads=2,
    max_position_embeddings=256, pad_token_id=None, bos_token_id=None, eos_token_id=None,
)  # fmt: skip
ROPES = {
    "default": {"rope_type": "default", "rope_theta": 5e5},
    "linear": {"rope_type": "linear", "rope_theta": 1e4, "factor": 4.0},
    "llama3": {"rope_type": "llama3", "rope_theta": 1e4, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
               "original_max_position_embeddings": 64},
    "yarn": {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 64},
}  # fmt: skip


def tiny(kind="qwen3", rope="default", tied=False, **kwargs):
    """A tiny random model in float32, its norms and biases away from 1 and 0, where a fault would hide."""
    torch.manual_seed(0)
    config = {"llama": LlamaConfig, "mistral": MistralConfig, "qwen2": Qwen2Config, "qwen3": Qwen3Config}[kind]
    model = {
        "llama": LlamaForCausalLM,
        "mistral": MistralForCausalLM,
        "qwen2": Qwen2ForCausalLM,
        "qwen3": Qwen3ForCausalLM,
    }[kind]
    extra = {"qwen3": {"head_dim": 16}, "mistral": {"sliding_window": None}}.get(kind, {})  # 4 * 16 != 32
    lm = model(config(**SHAPE, **extra, **kwargs, tie_word_embeddings=tied, rope_parameters=ROPES[rope])).eval()
    with torch.no_grad():
        for name, p in lm.named_parameters():
            if p.dim() == 1:
                p.add_(0.3 * torch.randn_like(p))
            elif "embed" not in name:
                p.mul_(4)
    return lm


def ids_and_positions(B=2, T=9, V=60, seed=1):
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(V, (B, T), generator=generator), torch.arange(T).expand(B, T)


def logits_of(lm, input_ids, position_ids, mask, *args, **kwargs):
    return lm.lm_head(walk(lm, input_ids, position_ids, mask, *args, **kwargs))


# ----------------------------------------------------------------------------------------------------------------- walk


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("kind, rope", [("llama", "default"), ("qwen2", "default"), ("qwen3", "default"), ("mistral", "default"),
                                        ("llama", "linear"), ("llama", "llama3"), ("qwen3", "yarn")])  # fmt: skip
def test_walk_equals_the_librarys_causal_forward_and_gradients(kind, rope, tied):
    ours, theirs = tiny(kind, rope, tied), tiny(kind, rope, tied)
    input_ids, positions = ids_and_positions(T=70 if rope != "default" else 9)
    T = input_ids.shape[1]
    positions = positions + 3
    a = logits_of(ours, input_ids, positions, dense(causal(), 1, T, T))
    b = theirs(input_ids=input_ids, position_ids=positions, attention_mask=torch.ones_like(input_ids)).logits
    assert (a - b).abs().max() < 1e-5 * max(1, b.abs().max().item())
    a.pow(2).mean().backward()
    b.pow(2).mean().backward()
    for (name, p), q in zip(ours.named_parameters(), theirs.parameters()):
        assert (p.grad - q.grad).abs().max() < 1e-5 * max(1, q.grad.abs().max().item()), name


@pytest.mark.parametrize("rope_type", ["dynamic", "longrope", "made_up"])
def test_length_dependent_rope_is_refused_by_name(rope_type):
    config = tiny().config
    config.rope_parameters = {"rope_type": rope_type, "rope_theta": 1e4}
    with pytest.raises(ValueError, match=rope_type):
        common.check_config(config)


def test_unsupported_backbones_are_refused_by_name():
    gemma = Gemma2ForCausalLM(Gemma2Config(**{**SHAPE, "pad_token_id": 0}, head_dim=8))
    phi = Phi3ForCausalLM(Phi3Config(**{**SHAPE, "pad_token_id": 0}))
    sliding = MistralForCausalLM(MistralConfig(**SHAPE, sliding_window=8))
    sliding_qwen = Qwen2ForCausalLM(
        Qwen2Config(**SHAPE, use_sliding_window=True, sliding_window=8, max_window_layers=1)
    )
    for lm, word in ((gemma, "gemma2"), (phi, "phi3"), (sliding, "sliding"), (sliding_qwen, "sliding")):
        with pytest.raises(ValueError, match=word) as error:
            common.prepare(lm)
        assert "\n" not in str(error.value)
    capped, missing = tiny(), tiny()
    capped.config.final_logit_softcapping = 30.0
    with pytest.raises(ValueError, match="softcapping"):
        common.prepare(capped)
    del missing.model.layers[1].self_attn.v_proj
    with pytest.raises(ValueError, match="layer 1 has no v_proj"):
        common.prepare(missing)


def test_walk_takes_embeddings():
    lm = tiny()
    input_ids, positions = ids_and_positions()
    mask = dense(causal(), 1, 9, 9)
    embeddings = lm.model.embed_tokens(input_ids)
    assert torch.equal(walk(lm, embeddings, positions, mask), walk(lm, input_ids, positions, mask))


def test_permuted_tokens_with_their_positions_only_permute_the_logits():
    lm = tiny()
    input_ids, positions = ids_and_positions()
    order = torch.randperm(9, generator=torch.Generator().manual_seed(0))
    mask = dense(full(), 1, 9, 9)
    straight = logits_of(lm, input_ids, positions, mask)
    assert (logits_of(lm, input_ids[:, order], positions[:, order], mask) - straight[:, order]).abs().max() < 1e-5
    assert (logits_of(lm, input_ids[:, order], positions, mask) - straight[:, order]).abs().max() > 1e-2


def test_out_of_order_positions_never_change_who_sees_whom():
    lm = tiny()
    input_ids, _ = ids_and_positions()
    positions = torch.tensor([[0, 1, 6, 7, 2, 3, 8, 4, 5]]).expand(2, 9)
    mask = dense(causal(), 1, 9, 9)
    before = logits_of(lm, input_ids, positions, mask)
    for place in range(9):
        changed = input_ids.clone()
        changed[:, place] = (changed[:, place] + 1) % 60
        moved = (logits_of(lm, changed, positions, mask) - before).abs().amax(dim=(0, 2)) > 1e-7
        assert moved.tolist() == [i >= place for i in range(9)]


def test_bidirectional_means_bidirectional():
    lm = tiny()
    input_ids, positions = ids_and_positions()
    changed = input_ids.clone()
    changed[:, -1] = (changed[:, -1] + 1) % 60
    mask = dense(full(), 1, 9, 9)
    assert (logits_of(lm, input_ids, positions, mask) - logits_of(lm, changed, positions, mask))[
        :, 0
    ].abs().max() > 1e-4


def test_a_row_without_a_visible_key_stays_finite():
    lm = tiny()
    input_ids, positions = ids_and_positions()
    mask = dense(causal(), 2, 9, 9).clone()
    mask[:, :, 4] = False
    out = logits_of(lm, input_ids, positions, mask)
    out.pow(2).mean().backward()
    assert out.isfinite().all() and all(p.grad.isfinite().all() for p in lm.parameters())


def test_padding_content_does_not_matter():
    lm = tiny()
    input_ids, positions = ids_and_positions()
    ids = torch.tensor([[0] * 6 + [-1] * 3])
    changed = input_ids.clone()
    changed[:, 6:] = 0
    mask = dense(segments(ids), 1, 9, 9)
    a, b = logits_of(lm, input_ids, positions, mask), logits_of(lm, changed, positions, mask)
    assert torch.equal(a[:, :6], b[:, :6]) and a.isfinite().all()


def test_a_model_cast_to_bfloat16_keeps_float32_rope():
    lm = tiny("llama", "llama3").to(torch.bfloat16)
    reference = tiny("llama", "llama3").model.rotary_emb
    inv_freq, scale = common.prepare(lm).rotary
    assert inv_freq.dtype == torch.float32 and torch.equal(inv_freq, reference.inv_freq)
    cos, _ = common.rope_angles((inv_freq, scale), torch.tensor([[255, 256, 257]]))
    assert cos.dtype == torch.float32 and len({tuple(row) for row in cos[0, 0].tolist()}) == 3


def test_rope_base_is_read_from_the_config():
    cos_small = common.rope_angles(common.prepare(tiny("qwen3", "linear")).rotary, torch.tensor([[7]]))[0]
    cos_large = common.rope_angles(common.prepare(tiny("qwen3", "default")).rotary, torch.tensor([[7]]))[0]
    assert (cos_small - cos_large).abs().max() > 0.1


def test_checkpointing_and_deepcopy_change_nothing():
    lm = common.prepare(tiny())
    input_ids, positions = ids_and_positions()
    mask = dense(causal(), 1, 9, 9)
    walk(lm, input_ids, positions, mask).sum().backward()
    grads = [p.grad.clone() for p in lm.model.parameters()]
    lm.zero_grad()
    walk(lm, input_ids, positions, mask, checkpointing=True).sum().backward()
    assert all(torch.allclose(p.grad, grad, atol=1e-6) for p, grad in zip(lm.model.parameters(), grads))
    before = walk(lm, input_ids, positions, mask)
    twin = copy.deepcopy(lm)
    with torch.no_grad():
        for p in lm.model.layers.parameters():
            p.zero_()
    assert torch.allclose(walk(twin, input_ids, positions, mask), before), "a copy must walk through its own weights"


def test_the_librarys_own_forward_still_works_after_prepare():
    lm, untouched = common.prepare(tiny()), tiny()
    input_ids, _ = ids_and_positions()
    assert torch.equal(lm(input_ids=input_ids).logits, untouched(input_ids=input_ids).logits)


def test_token_nll_equals_cross_entropy_on_full_logits():
    lm = tiny(tied=True)
    hidden = torch.randn(2, 9, 32, requires_grad=True)
    labels = torch.randint(60, (2, 9))
    labels[0, :4] = -100
    expected = F.cross_entropy(lm.lm_head(hidden).flatten(0, 1), labels.flatten(), reduction="none").view(2, 9)
    expected_grad = torch.autograd.grad(expected.sum(), hidden)[0]
    for chunk in (1, 5, 2048):
        nll = common.token_nll(lm.lm_head, hidden, labels, chunk)
        assert torch.allclose(nll, expected, atol=1e-5) and (nll[0, :4] == 0).all()
        assert torch.allclose(torch.autograd.grad(nll.sum(), hidden)[0], expected_grad, atol=1e-5)
    nothing = common.token_nll(lm.lm_head, hidden, torch.full((2, 9), -100))
    nothing.sum().backward()
    assert (nothing == 0).all() and hidden.grad.isfinite().all()


def test_token_nll_never_holds_the_full_logits():
    lm, seen = tiny(), []
    hidden, labels = torch.randn(2, 500, 32, requires_grad=True), torch.randint(60, (2, 500))
    lm.lm_head.register_forward_hook(lambda module, args, out: seen.append(out.shape[0]))
    common.token_nll(lm.lm_head, hidden, labels, chunk=64).sum().backward()
    assert max(seen) <= 64 and sum(seen) == 2 * 1000  # forward, and again in backward


def test_generate_ar_equals_the_librarys_greedy_generate():
    from types import SimpleNamespace

    lm, reference = tiny(), tiny()
    prompt = ids_and_positions(1, 5)[0]
    expected = reference.generate(
        prompt, max_new_tokens=20, do_sample=False, use_cache=True, eos_token_id=None, pad_token_id=0
    )
    cfg = SimpleNamespace(max_new_tokens=20, eos_id=None, vocab_len=None)
    ids, record = common.generate_ar(lm, prompt, cfg)
    assert ids.tolist() == expected.tolist() and record["forwards"] == 20
    cfg.eos_id = expected[0, 12].item()
    ids, record = common.generate_ar(lm, prompt, cfg)
    stop = expected[0, 5:].tolist().index(cfg.eos_id) + 1
    assert ids[0, 5:].tolist() == expected[0, 5 : 5 + stop].tolist() and record["forwards"] == stop


# ------------------------------------------------------------------------------------------------------------ KV cache


def test_cached_equals_uncached():
    lm = tiny()
    input_ids, positions = ids_and_positions(B=2)
    decoder, expected = Decoder(lm, 12, batch=2), walk(lm, input_ids, positions, dense(causal(), 1, 9, 9))
    cache = decoder.kv_cache
    for start, end in ((0, 4), (4, 5), (5, 9)):
        T = end - start
        out = decoder(
            input_ids[:, start:end], positions[:, start:end], dense(causal(start), 1, T, end), cache.scratch_idx(T)
        )
        cache.commit(T)
        assert (out - expected[:, start:end]).abs().max() < 1e-5
    assert decoder.forwards == 3 and cache.cache_len == 9


def test_a_refinement_pass_leaves_the_cache_untouched():
    lm = tiny()
    input_ids, positions = ids_and_positions(B=1)
    decoder = Decoder(lm, 12)
    cache = decoder.kv_cache

    def forward(start, end):
        T = end - start
        mask = dense(causal(start), 1, T, end)
        return decoder(input_ids[:, start:end], positions[:, start:end], mask, cache.scratch_idx(T))

    forward(0, 5)
    cache.commit(5)
    before = [(k[:, :, :5].clone(), v[:, :, :5].clone()) for k, v in cache.layers]
    first = forward(5, 9)
    second = forward(5, 9)  # the same again: the scratch of the first pass must not be seen
    assert torch.equal(first, second) and cache.cache_len == 5
    assert all(
        torch.equal(k[:, :, :5], a) and torch.equal(v[:, :, :5], b) for (k, v), (a, b) in zip(cache.layers, before)
    )


def test_cache_counts():
    cache = kernels.KVCache(1, 2, 1, 8, 4, "cpu", torch.float32)
    assert cache.scratch_idx(3).tolist() == [0, 1, 2]
    cache.commit(0)
    cache.commit(3)
    assert cache.cache_len == 3 and cache.scratch_idx(2, offset=1).tolist() == [4, 5]
    cache.commit(5)
    for call in (
        lambda: cache.commit(1),
        lambda: cache.commit(-1),
        lambda: cache.scratch_idx(1),
    ):
        with pytest.raises(ValueError):
            call()
    cache.reset()
    assert cache.cache_len == 0
    cache.layers[0][0][1] = 7
    cache.keep_rows(torch.tensor([1]))
    assert cache.layers[0][0].shape[0] == 1 and (cache.layers[0][0] == 7).all()


def test_padding_to_buckets_changes_nothing():
    """What graph replay does to a call, without a graph: padded queries and keys, spare places for padding."""
    lm = tiny()
    input_ids, positions = ids_and_positions(B=1, T=40)
    plain, padded = Decoder(lm, 48), Decoder(lm, 48)
    padded.replay.pad = True
    start = 0
    for T in (5, 1, 3, 8, 9, 11):
        outs = []
        for decoder in (plain, padded):
            ids, pos = input_ids[:, start : start + T], positions[:, start : start + T]
            outs.append(
                decoder(ids, pos, dense(causal(start), 1, T, start + T), decoder.kv_cache.scratch_idx(T)).clone()
            )
            decoder.kv_cache.commit(T)
        assert (outs[0] - outs[1]).abs().max() < 1e-5
        start += T
    assert sorted(bucket[1] for bucket in padded.replay.graphs) == [1, 4, 8, 16]  # each made once


def test_layers_are_compiled_once_for_all_lengths_of_the_cache(monkeypatch):
    counter = torch._dynamo.testing.CompileCounter()
    traced = torch.compile(common.decoder_layer, fullgraph=True, dynamic=False, backend=counter)
    monkeypatch.setattr(common, "_compiled_layer", traced)
    monkeypatch.setattr(kernels.GraphReplay, "KEY", 64)
    lm = tiny()
    plain, padded = Decoder(lm, 600, compiled=False), Decoder(lm, 600, compiled=True)
    padded.replay.pad = True
    input_ids, positions = ids_and_positions(B=1, T=600)
    start = 0
    for T in (100, 3, 4, 110, 4, 120, 3, 4, 70, 4):
        here, outs = slice(start, start + T), []
        for decoder in (plain, padded):
            given = dense(causal(start), 1, T, start + T), decoder.kv_cache.scratch_idx(T)
            outs.append(decoder(input_ids[:, here], positions[:, here], *given).clone())
            decoder.kv_cache.commit(T)
        assert (outs[0] - outs[1]).abs().max() < 1e-5
        start += T
    assert len(padded.replay.graphs) > 6
    assert counter.frame_count == 2, "4 and 128 queries"


def test_a_decoder_dies_with_its_last_name():
    """No reference cycle keeps its graphs: what a captured graph reads is freed with the Decoder, not some day."""
    decoder = Decoder(tiny(), 12)
    input_ids, positions = ids_and_positions(B=1)
    decoder(input_ids, positions, dense(causal(), 1, 9, 9), torch.arange(9))
    seen = weakref.ref(decoder.replay)
    gc.disable()
    try:
        del decoder
        assert seen() is None
    finally:
        gc.enable()


def test_embeddings_take_the_place_of_ids_in_padded_buckets():
    lm, mask, write_idx = tiny(), dense(causal(), 1, 11, 11), torch.arange(11)
    input_ids, positions = ids_and_positions(B=2, T=11)
    embeddings = lm.model.embed_tokens(input_ids).detach()
    outs = []
    for pad in (False, True):
        decoder = Decoder(lm, 16, batch=2)
        decoder.replay.pad = pad
        outs += [decoder(x, positions, mask, write_idx).clone() for x in (input_ids, embeddings)]
        assert decoder.forwards == 2 and len(decoder.replay.graphs) == (2 if pad else 0)
    assert all((out - outs[0]).abs().max() < 1e-5 for out in outs)


@pytest.mark.parametrize("kind", ["llama", "qwen2", "qwen3"])
def test_fused_projections_change_nothing(kind, tmp_path):
    """Same logits, same weights, no memory added; what is written in place is seen; saving and training go on."""
    lm = tiny(kind)
    input_ids, positions = ids_and_positions()
    mask = dense(causal(), 1, 9, 9)
    with torch.no_grad():
        plain = walk(lm, input_ids, positions, mask)
        before = {name: p.clone() for name, p in lm.named_parameters()}
        fuse(lm)
        calls = []
        for linear in (lm.model.layers[0].self_attn.k_proj, lm.model.layers[1].mlp.up_proj):
            linear.register_forward_hook(lambda *args: calls.append(args))
        assert (walk(lm, input_ids, positions, mask) - plain).abs().max() < 1e-5 and not calls
        fused = lm.model.layers[0].fused["qkv"][0]
        fuse(lm)
        assert lm.model.layers[0].fused["qkv"][0] is fused  # a captured graph may be reading it
        assert all(torch.equal(p, before[name]) for name, p in lm.named_parameters())
        attn = lm.model.layers[0].self_attn
        assert attn.q_proj.weight.data_ptr() == fused.data_ptr() and len(fused) == sum(
            len(getattr(attn, name).weight) for name in ("q_proj", "k_proj", "v_proj")
        )
        attn.v_proj.weight.mul_(2)
        changed = walk(lm, input_ids, positions, mask)
        assert (changed - plain).abs().max() > 1e-3
        for linear in (attn.q_proj, attn.v_proj):  # other tensors, as after a move: the fused weight is stale
            linear.weight.data = linear.weight.clone()
        attn.v_proj.weight.div_(2)
        fuse(lm)
        assert (walk(lm, input_ids, positions, mask) - plain).abs().max() < 1e-5
        attn.v_proj.weight.mul_(2)
        assert (walk(lm, input_ids, positions, mask) - changed).abs().max() < 1e-5
    lm.save_pretrained(tmp_path)
    again = type(lm).from_pretrained(tmp_path, dtype=torch.float32)
    assert all(torch.equal(p, q) for p, q in zip(lm.parameters(), again.parameters()))
    walk(lm, input_ids, positions, mask).sum().backward()  # with gradients the modules themselves run
    assert calls and all(p.grad is not None for p in lm.model.layers.parameters())
    lm.to(torch.bfloat16)
    fuse(lm)
    assert lm.model.layers[0].fused["qkv"][0].dtype == torch.bfloat16


def test_layers_run_as_they_are_where_compiling_is_refused(monkeypatch, capsys):
    lm = tiny()
    input_ids, positions = ids_and_positions()
    mask = dense(causal(), 1, 9, 9)

    def refuse(*args):
        raise torch._dynamo.exc.Unsupported("no")

    monkeypatch.setattr(common, "_compiled_layer", refuse)
    monkeypatch.setattr(kernels, "_said", set())
    for _ in range(2):
        assert torch.equal(walk(lm, input_ids, positions, mask, compiled=True), walk(lm, input_ids, positions, mask))
    assert capsys.readouterr().err == "torch.compile refused (Unsupported): layers run as they are\n"


def test_an_adapter_is_not_fused():
    lm = tiny()
    attn = lm.model.layers[0].self_attn
    attn.q_proj = torch.nn.Sequential(attn.q_proj)
    fuse(lm)
    assert lm.model.layers[0].fused is None and lm.model.layers[1].fused is not None


def test_projections_can_be_exchanged():
    lm = tiny()
    input_ids, positions = ids_and_positions()
    seen = set()

    def project(attn, name, x):
        seen.add(name)
        return getattr(attn, name)(x)

    mask = dense(causal(), 1, 9, 9)
    assert torch.equal(walk(lm, input_ids, positions, mask, project=project), walk(lm, input_ids, positions, mask))
    assert seen == {"q_proj", "k_proj", "v_proj", "o_proj", "q_norm", "k_norm"}


def test_a_read_only_context_equals_one_sequence():
    lm = tiny()
    input_ids, positions = ids_and_positions(B=1)
    decoder = Decoder(lm, 9)
    decoder(input_ids[:, :5], positions[:, :5], dense(causal(), 1, 5, 5), decoder.kv_cache.scratch_idx(5))
    context = [(k[:, :, :5].clone(), v[:, :, :5].clone()) for k, v in decoder.kv_cache.layers]
    out = logits_of(lm, input_ids[:, 5:], positions[:, 5:], dense(causal(5), 1, 4, 9), context)
    assert (out - logits_of(lm, input_ids, positions, dense(causal(), 1, 9, 9))[:, 5:]).abs().max() < 1e-5


# -------------------------------------------------------------------------------------------------- masks and attention


def all_masks(device="cpu"):
    """name -> (mask_mod, B, T, S, independent predicate over ints) at sizes that are no multiple of anything."""
    segment = [0] * 30 + [1] * 41 + [-1] * 9 + [2] * 20
    prompts, anchors = [7, 23], [[3, 40, 41], [1, 20, 60]]
    groups = [0, 2, 4]

    def blk(i, prompt, size):
        return -1 if i < prompt else (i - prompt) // size

    def noisy_clean(b, i, j, L=33, D=7, views=2):
        (cq, q), (ck, k) = divmod(i, L), divmod(j, L)
        if cq < views:
            return (ck == cq and q // D == k // D) or (ck == views and k // D < q // D)
        return ck == views and k // D <= q // D

    def dual(b, i, j, T=70, K=5):
        return j < anchors[b][i // K] if j < T else (j - T) // K == i // K

    def merged(b, i, j, C=11, n=5, K=4):
        if i < n:
            return j < C or j - C <= i
        g = (i - n) // K
        return j < C or j - C < groups[g] or (j - C >= n and (j - C - n) // K == g)

    def rows(b, i, j, C=13, k=7, w=2):
        row, off = divmod(i, k - w)
        return j < C or (j - C) // k == row and (j - C) % k <= off + w

    return {
        "full": (full(), 1, 50, 60, lambda b, i, j: True),
        "causal": (causal(), 1, 100, 100, lambda b, i, j: j <= i),
        "causal_offset": (causal(31), 1, 9, 40, lambda b, i, j: j <= i + 31),
        "segments": (segments(torch.tensor([segment], device=device)), 1, 100, 100,
                     lambda b, i, j: segment[i] == segment[j] >= 0 and j <= i),
        "completion_rows": (common.completion_rows(13, 7, 2), 1, 15, 34, rows),
        "block_causal_d2f": (common.block_causal(6, torch.tensor(prompts, device=device)), 2, 50, 50,
                             lambda b, i, j: blk(j, prompts[b], 6) <= blk(i, prompts[b], 6)),
        "block_causal_fv2": (common.block_causal(8, offset=24), 1, 17, 41, lambda b, i, j: j // 8 <= (i + 24) // 8),
        "noisy_clean": (common.noisy_clean(33, 7, views=2), 1, 99, 99, noisy_clean),
        "dual_view": (common.dual_view(70, 5, torch.tensor(anchors, device=device)), 2, 15, 85, dual),
        "merged_views": (common.merged_views(11, 5, 4, torch.tensor(groups, device=device)), 1, 17, 28, merged),
    }  # fmt: skip


@pytest.mark.parametrize("name", all_masks())
def test_mask_equals_an_independent_reference_in_both_forms(name):
    mask_mod, B, T, S, allowed = all_masks()[name]
    mask = dense(mask_mod, B, T, S)
    expected = torch.tensor([[[[bool(allowed(b, i, j)) for j in range(S)] for i in range(T)]] for b in range(B)])
    assert mask.dtype == torch.bool and torch.equal(mask, expected)
    # the fused form of the same predicate, uncompiled: B or 1 in the batch, grouped heads
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(B, H, n, 16, generator=generator) for H, n in ((4, T), (2, S), (2, S)))
    block_mask = common.create_block_mask(mask_mod, B, None, T, S, device="cpu")
    fused = flex_attention(q, k, v, block_mask=block_mask, enable_gqa=True)
    assert (fused - kernels.attention(q, k, v, mask)).abs().max() < 1e-5
    assert (kernels.attention(q, k, v, block_mask) - fused).abs().max() < 1e-5  # on CPU: the same predicate, dense


def test_attention_equals_plain_softmax():
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(2, H, n, 8, generator=generator) for H, n in ((6, 5), (2, 11), (2, 11)))
    mask = torch.rand(2, 1, 5, 11, generator=generator) < 0.6
    mask[..., 0] = True
    scores = q @ k.repeat_interleave(3, 1).transpose(2, 3) / 8**0.5
    expected = scores.masked_fill(~mask, -torch.inf).softmax(-1) @ v.repeat_interleave(3, 1)
    assert (kernels.attention(q, k, v, mask) - expected).abs().max() < 1e-5
    assert (kernels.attention(q, k, v) - scores.softmax(-1) @ v.repeat_interleave(3, 1)).abs().max() < 1e-5


@pytest.mark.parametrize("dtype", [torch.float32, torch.int64, torch.uint8])
def test_masks_that_are_not_boolean_are_refused(dtype):
    q = torch.randn(1, 2, 3, 8)
    with pytest.raises(TypeError, match="boolean"):
        kernels.attention(q, q, q, torch.ones(1, 1, 3, 3, dtype=dtype))


def test_build_mask_is_dense_on_cpu():
    assert torch.equal(build_mask(causal(), 1, 5, 5, "cpu"), dense(causal(), 1, 5, 5))


def test_common_draws_every_mask():
    out = subprocess.run([sys.executable, str(ROOT / "common.py")], capture_output=True, text=True, check=True).stdout
    names = (
        "full",
        "causal",
        "segments",
        "completion_rows",
        "block_causal",
        "noisy_clean",
        "dual_view",
        "merged_views",
    )
    assert all(name in out for name in names) and "# = may attend" in out
    assert common.draw(causal(), 3, 3) == "0 #..\n1 ##.\n2 ###"


@pytest.mark.parametrize("how", ["as a script", "from elsewhere"])
def test_a_package_called_kernels_is_neither_hidden_nor_taken_for_ours(how, tmp_path):
    """transformers imports a package of this name where it is installed; a script's folder stands before it."""
    fake = tmp_path / "site" / "kernels"
    fake.mkdir(parents=True)
    (fake / "__init__.py").write_text("from .layer import Layer\nCUDAProperties = 'real'\n")
    (fake / "layer.py").write_text("class Layer: pass\n")
    asks = ("from kernels import CUDAProperties\nfrom kernels.layer import Layer\nimport kernels\n"
            "import refusion\nassert refusion.kernels.GraphReplay and not hasattr(kernels, 'GraphReplay')\n"
            "print(CUDAProperties)\n")  # fmt: skip
    program = tmp_path / "program.py"
    program.write_text(asks)
    # as a script: the scripts' folder is first on the path; from elsewhere: last
    path = [str(ROOT), str(tmp_path / "site")] if how == "as a script" else [str(tmp_path / "site"), str(ROOT)]
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(path), "HF_HUB_OFFLINE": "1"}
    done = subprocess.run([sys.executable, str(program)], capture_output=True, text=True, env=env, timeout=100)
    assert done.returncode == 0 and done.stdout == "real\n", done.stderr


@pytest.mark.gpu
@pytest.mark.parametrize("name", all_masks())
@pytest.mark.parametrize("dtype, tolerance", [(torch.float32, 2e-3), (torch.bfloat16, 2e-2)])
def test_flex_equals_dense_forward_and_backward(name, dtype, tolerance):
    mask_mod, B, T, S, _ = all_masks("cuda")[name]
    generator = torch.Generator("cuda").manual_seed(0)
    mask, results = dense(mask_mod, B, T, S, "cuda"), []
    block_mask = build_mask(mask_mod, B, T, S, "cuda")
    assert isinstance(block_mask, BlockMask)
    leaves = [
        torch.randn(B, H, n, 64, device="cuda", dtype=dtype, generator=generator) for H, n in ((4, T), (2, S), (2, S))
    ]
    for form in (mask, block_mask):
        q, k, v = (leaf.clone().requires_grad_() for leaf in leaves)
        out = kernels.attention(q, k, v, form)
        out.float().pow(2).sum().backward()
        results.append([out, q.grad, k.grad, v.grad])
    for a, b in zip(*results):
        assert (a - b).abs().max() <= tolerance * b.abs().max()
    assert not kernels.refused("flex_attention")


@pytest.mark.gpu
def test_compiled_training_on_flex_equals_the_plain_dense_walk():
    lm, results = tiny().to("cuda"), []
    input_ids, positions = (x.to("cuda") for x in ids_and_positions(T=128))
    mask_mod = block_causal(4, torch.tensor([7, 60], device="cuda"))
    block_mask = build_mask(mask_mod, 2, 128, 128, "cuda")
    for mask in (dense(mask_mod, 2, 128, 128, "cuda"), block_mask):
        lm.zero_grad()
        out = walk(lm, input_ids, positions, mask)
        out.pow(2).sum().backward()
        results.append([out.detach(), *(p.grad.clone() for p in lm.parameters() if p.grad is not None)])
    for a, b in zip(*results):
        assert (a - b).abs().max() <= 2e-3 * a.abs().max()
    assert not kernels.refused("torch.compile") and not kernels.refused("flex_attention")


@pytest.mark.gpu
def test_graph_replay_equals_the_plain_call():
    lm = tiny().to("cuda")
    input_ids, positions = (x.to("cuda") for x in ids_and_positions(B=1, T=40))
    plain, graphed = Decoder(lm, 48, compiled=False), Decoder(lm, 48, compiled=True)
    plain.replay.pad = plain.replay.capture = False
    start = 0
    for T in (5, 1, 3, 8, 9, 11):
        outs = []
        for decoder in (plain, graphed):
            ids, pos = input_ids[:, start : start + T], positions[:, start : start + T]
            given = ids, pos, dense(causal(start), 1, T, start + T, "cuda"), decoder.kv_cache.scratch_idx(T)
            outs.append(decoder(*given).clone())
            decoder.kv_cache.commit(T)
        assert (outs[0] - outs[1]).abs().max() < 1e-3
        start += T
