"""Masks, RoPE, the decoder walk, attention, KV cache, graph replay and traces, on tiny random models."""

import copy
import gc
import runpy
import sys
import weakref
from types import SimpleNamespace
from unittest import mock
from xml.etree import ElementTree

import pytest
import tokenizers
import torch
import torch.nn.functional as F
import transformers
from conftest import ROOT
from torch.nn.attention.flex_attention import BlockMask, flex_attention
from transformers import Gemma2Config, LlamaConfig, MistralConfig, Phi3Config, Qwen2Config, Qwen3Config

import common
from common import Decoder, block_causal, build_mask, causal, dense, full, fuse, kernels, segments, walk

SHAPE = dict(
    vocab_size=60, hidden_size=32, intermediate_size=48, num_hidden_layers=3, num_attention_heads=4,
    num_key_value_heads=2, max_position_embeddings=256, pad_token_id=None, bos_token_id=None,
    eos_token_id=None,
)  # fmt: skip
ROPES = {
    "default": {"rope_type": "default", "rope_theta": 5e5},
    "linear": {"rope_type": "linear", "rope_theta": 1e4, "factor": 4.0},
    "llama3": {"rope_type": "llama3", "rope_theta": 1e4, "factor": 8.0, "low_freq_factor": 1.0,
               "high_freq_factor": 4.0, "original_max_position_embeddings": 64},
    "yarn": {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 64},
}  # fmt: skip


def tiny(kind="qwen3", rope="default", tied=False):
    """A tiny random model in float32, its norms and biases away from 1 and 0, where a fault would hide."""
    torch.manual_seed(0)
    kinds = {"llama": LlamaConfig, "mistral": MistralConfig, "qwen2": Qwen2Config, "qwen3": Qwen3Config}
    extra = {"qwen3": {"head_dim": 16}, "mistral": {"sliding_window": None}}.get(kind, {})  # 4 * 16 != 32
    lm = model_of(kinds[kind](**SHAPE, **extra, tie_word_embeddings=tied, rope_parameters=ROPES[rope]))
    with torch.no_grad():
        for name, p in lm.named_parameters():
            if p.dim() == 1:
                p.add_(0.3 * torch.randn_like(p))
            elif "embed" not in name:
                p.mul_(4)
    return lm


def model_of(config):
    return transformers.AutoModelForCausalLM.from_config(config).eval()


def ids_and_positions(B=2, T=9, V=60, seed=1):
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(V, (B, T), generator=generator), torch.arange(T).expand(B, T)


TEXT, PLACES = ids_and_positions()
CAUSAL = dense(causal(), 1, 9, 9)


def logits_of(lm, input_ids, position_ids, mask, *args, **kwargs):
    return lm.lm_head(walk(lm, input_ids, position_ids, mask, *args, **kwargs))


def apart(a, b):
    return (a - b).abs().max().item()


def by_parts(decoder, input_ids, positions, sizes):
    """Hidden states of one causal text, given to the decoder in parts of these sizes, each committed."""
    outs, start = [], 0
    for T in sizes:
        here = slice(start, start + T)
        mask, write_idx = dense(causal(start), 1, T, start + T), decoder.kv_cache.scratch_idx(T)
        outs.append(decoder(input_ids[:, here], positions[:, here], mask, write_idx).clone())
        decoder.kv_cache.commit(T)
        start += T
    return torch.cat(outs, dim=1)


# ------------------------------------------------------------------------------------------------------- walk


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("kind", ["llama default", "qwen2 default", "qwen3 default", "mistral default",
                                  "llama linear", "llama llama3", "qwen3 yarn"])  # fmt: skip
def test_walk_equals_the_librarys_causal_forward_and_gradients(kind, tied):
    kind, rope = kind.split()
    ours, theirs = tiny(kind, rope, tied), tiny(kind, rope, tied)
    input_ids, positions = ids_and_positions(T=70 if rope != "default" else 9)
    T = input_ids.shape[1]
    positions = positions + 3
    a = logits_of(ours, input_ids, positions, dense(causal(), 1, T, T))
    given = dict(input_ids=input_ids, position_ids=positions, attention_mask=torch.ones_like(input_ids))
    b = theirs(**given).logits
    assert apart(a, b) < 1e-5 * max(1, b.abs().max().item())
    assert torch.equal(ours(**given).logits, b), "the library's own calls stay as they are"
    a.pow(2).mean().backward()
    b.pow(2).mean().backward()
    for (name, p), q in zip(ours.named_parameters(), theirs.parameters()):
        assert apart(p.grad, q.grad) < 1e-5 * max(1, q.grad.abs().max().item()), name


def test_unsupported_backbones_are_refused_by_name():
    padded = {**SHAPE, "pad_token_id": 0}
    sliding_qwen = Qwen2Config(**SHAPE, use_sliding_window=True, sliding_window=8, max_window_layers=1)
    configs = [(Gemma2Config(**padded, head_dim=8), "gemma2"), (Phi3Config(**padded), "phi3"),
               (MistralConfig(**SHAPE, sliding_window=8), "sliding"), (sliding_qwen, "sliding")]  # fmt: skip
    for rope_type in ("dynamic", "longrope", "made_up"):
        configs.append((tiny().config, rope_type))
        configs[-1][0].rope_parameters = {"rope_type": rope_type, "rope_theta": 1e4}
    for config, word in configs:
        with pytest.raises(ValueError, match=word) as error:
            common.check_config(config)
        assert "\n" not in str(error.value)
    with pytest.raises(ValueError, match="phi3"):
        common.prepare(model_of(Phi3Config(**padded)))


def test_permuted_tokens_with_their_positions_only_permute_the_logits():
    lm = tiny()
    order = torch.randperm(9, generator=torch.Generator().manual_seed(0))
    mask = dense(full(), 1, 9, 9)
    straight = logits_of(lm, TEXT, PLACES, mask)
    assert apart(logits_of(lm, TEXT[:, order], PLACES[:, order], mask), straight[:, order]) < 1e-5
    assert apart(logits_of(lm, TEXT[:, order], PLACES, mask), straight[:, order]) > 1e-2


def test_a_row_without_a_visible_key_stays_finite():
    lm = tiny()
    mask = dense(causal(), 2, 9, 9).clone()
    mask[:, :, 4] = False
    out = logits_of(lm, TEXT, PLACES, mask)
    out.pow(2).mean().backward()
    assert out.isfinite().all() and all(p.grad.isfinite().all() for p in lm.parameters())


def test_a_model_cast_to_bfloat16_keeps_float32_rope():
    lm = tiny("llama", "llama3").to(torch.bfloat16)
    reference = tiny("llama", "llama3").model.rotary_emb
    inv_freq, scale = common.prepare(lm).rotary
    assert inv_freq.dtype == torch.float32 and torch.equal(inv_freq, reference.inv_freq)
    cos, _ = common.rope_angles((inv_freq, scale), torch.tensor([[255, 256, 257]]))
    assert cos.dtype == torch.float32 and len({tuple(row) for row in cos[0, 0].tolist()}) == 3


def test_a_copy_walks_through_its_own_weights():
    lm = common.prepare(tiny())
    before = walk(lm, TEXT, PLACES, CAUSAL)
    twin = copy.deepcopy(lm)
    with torch.no_grad():
        for p in lm.model.layers.parameters():
            p.zero_()
    assert torch.allclose(walk(twin, TEXT, PLACES, CAUSAL), before)


def test_token_nll_equals_cross_entropy_on_full_logits():
    lm = tiny(tied=True)
    hidden = torch.randn(2, 9, 32, requires_grad=True)
    labels = torch.randint(60, (2, 9))
    labels[0, :4] = -100
    logits = lm.lm_head(hidden).transpose(1, 2)
    expected = F.cross_entropy(logits, labels, reduction="none")
    expected_grad = torch.autograd.grad(expected.sum(), hidden)[0]
    seen = []
    lm.lm_head.register_forward_hook(lambda module, args, out: seen.append(out.shape[0]))
    for chunk in (1, 5, 2048):
        nll = common.token_nll(lm.lm_head, hidden, labels, chunk)
        assert torch.allclose(nll, expected, atol=1e-5) and (nll[0, :4] == 0).all()
        assert torch.allclose(torch.autograd.grad(nll.sum(), hidden)[0], expected_grad, atol=1e-5)
        assert max(seen) <= chunk and sum(seen) == 2 * 14  # forward, and again in backward
        seen.clear()
    nothing = common.token_nll(lm.lm_head, hidden, torch.full((2, 9), -100))
    nothing.sum().backward()
    assert (nothing == 0).all() and hidden.grad.isfinite().all()


def test_generate_ar_equals_the_librarys_greedy_generate():
    lm, reference = tiny(), tiny()
    prompt = ids_and_positions(1, 5)[0]
    settings = dict(max_new_tokens=20, do_sample=False, eos_token_id=None, pad_token_id=0)
    expected = reference.generate(prompt, **settings)
    cfg = SimpleNamespace(max_new_tokens=20, eos_id=None, vocab_len=None)
    ids, record = common.generate_ar(lm, prompt, cfg)
    assert ids.tolist() == expected.tolist() and record["forwards"] == 20
    cfg.eos_id = expected[0, 12].item()
    ids, record = common.generate_ar(lm, prompt, cfg)
    stop = expected[0, 5:].tolist().index(cfg.eos_id) + 1
    assert ids[0, 5:].tolist() == expected[0, 5 : 5 + stop].tolist() and record["forwards"] == stop


# --------------------------------------------------------------------------------------------------- KV cache


def test_cached_equals_uncached():
    lm = tiny()
    input_ids, positions = ids_and_positions(B=2)
    decoder, expected = Decoder(lm, 12, batch=2), walk(lm, input_ids, positions, dense(causal(), 1, 9, 9))
    assert apart(by_parts(decoder, input_ids, positions, (4, 1, 4)), expected) < 1e-5
    assert decoder.forwards == 3 and decoder.kv_cache.cache_len == 9


def test_a_refinement_pass_leaves_the_cache_untouched():
    decoder = Decoder(tiny(), 12, batch=2)
    cache = decoder.kv_cache
    by_parts(decoder, TEXT, PLACES, [5])
    before = copy.deepcopy(cache.layers)
    given = TEXT[:, 5:], PLACES[:, 5:], dense(causal(5), 1, 4, 9), cache.scratch_idx(4)
    assert torch.equal(decoder(*given), decoder(*given))  # the scratch of the first pass must not be seen
    assert cache.cache_len == 5
    for now, then in zip(cache.layers, before):
        assert all(torch.equal(x[:, :, :5], y[:, :, :5]) for x, y in zip(now, then))


def test_cache_counts():
    cache = kernels.KVCache(1, 2, 1, 8, 4, "cpu", torch.float32)
    assert cache.scratch_idx(3).tolist() == [0, 1, 2]
    cache.commit(0)
    cache.commit(3)
    assert cache.cache_len == 3 and cache.scratch_idx(2, offset=1).tolist() == [4, 5]
    cache.commit(5)
    for call, n in ((cache.commit, 1), (cache.commit, -1), (cache.scratch_idx, 1)):
        with pytest.raises(ValueError):
            call(n)
    cache.reset()
    assert cache.cache_len == 0
    cache.layers[0][0][1] = 7
    cache.keep_rows(torch.tensor([1]))
    assert cache.layers[0][0].shape[0] == 1 and (cache.layers[0][0] == 7).all()


def test_layers_are_compiled_once_for_all_lengths_of_the_cache(monkeypatch):
    counter = torch._dynamo.testing.CompileCounter()
    traced = torch.compile(common.decoder_layer, fullgraph=True, dynamic=False, backend=counter)
    monkeypatch.setattr(common, "_compiled_layer", traced)
    monkeypatch.setattr(kernels.GraphReplay, "KEY", 64)
    lm = tiny()
    plain, padded = Decoder(lm, 600, compiled=False), Decoder(lm, 600, compiled=True)
    padded.replay.pad = True
    given = (*ids_and_positions(B=1, T=600), (100, 4, 3, 110, 4, 120, 3, 4, 70, 4))
    assert apart(by_parts(plain, *given), by_parts(padded, *given)) < 1e-5
    assert len(padded.replay.graphs) > 6
    assert counter.frame_count == 2, "4 and 128 queries"


def test_a_decoder_dies_with_its_last_name():
    """No reference cycle keeps its graphs: what a graph reads is freed with the Decoder."""
    decoder = Decoder(tiny(), 12, batch=2)
    by_parts(decoder, TEXT, PLACES, [9])
    seen = weakref.ref(decoder.replay)
    gc.disable()
    try:
        del decoder
        assert seen() is None
    finally:
        gc.enable()


@pytest.mark.parametrize("kind", ["llama", "qwen2", "qwen3"])
def test_fused_projections_change_nothing(kind, tmp_path):
    """Same logits and weights, no memory added; writing in place is seen; saving and training go on."""
    lm = tiny(kind)
    with torch.no_grad():
        plain = walk(lm, TEXT, PLACES, CAUSAL)
        before = {name: p.clone() for name, p in lm.named_parameters()}
        fuse(lm)
        calls = []
        for linear in (lm.model.layers[0].self_attn.k_proj, lm.model.layers[1].mlp.up_proj):
            linear.register_forward_hook(lambda *args: calls.append(args))
        assert apart(walk(lm, TEXT, PLACES, CAUSAL), plain) < 1e-5 and not calls
        fused = lm.model.layers[0].fused["qkv"][0]
        fuse(lm)
        assert lm.model.layers[0].fused["qkv"][0] is fused  # a captured graph may be reading it
        assert all(torch.equal(p, before[name]) for name, p in lm.named_parameters())
        attn = lm.model.layers[0].self_attn
        assert attn.q_proj.weight.data_ptr() == fused.data_ptr()
        assert len(fused) == sum(len(linear.weight) for linear in (attn.q_proj, attn.k_proj, attn.v_proj))
        attn.v_proj.weight.mul_(2)
        changed = walk(lm, TEXT, PLACES, CAUSAL)
        assert apart(changed, plain) > 1e-3
        for linear in (attn.q_proj, attn.v_proj):  # other tensors, as after a move: the fused weight is stale
            linear.weight.data = linear.weight.clone()
        attn.v_proj.weight.div_(2)
        fuse(lm)
        assert apart(walk(lm, TEXT, PLACES, CAUSAL), plain) < 1e-5
        attn.v_proj.weight.mul_(2)
        assert apart(walk(lm, TEXT, PLACES, CAUSAL), changed) < 1e-5
    lm.save_pretrained(tmp_path)
    again = type(lm).from_pretrained(tmp_path, dtype=torch.float32)
    assert all(torch.equal(p, q) for p, q in zip(lm.parameters(), again.parameters()))
    walk(lm, TEXT, PLACES, CAUSAL).sum().backward()  # with gradients the modules themselves run
    assert calls and all(p.grad is not None for p in lm.model.layers.parameters())
    lm.to(torch.bfloat16)
    fuse(lm)
    assert lm.model.layers[0].fused["qkv"][0].dtype == torch.bfloat16


def test_layers_run_as_they_are_where_compiling_is_refused(monkeypatch, capsys):
    lm = tiny()

    def refuse(*args):
        raise torch._dynamo.exc.Unsupported("no")

    monkeypatch.setattr(common, "_compiled_layer", refuse)
    monkeypatch.setattr(kernels, "_refused", set())
    for _ in range(2):
        out = walk(lm, TEXT, PLACES, CAUSAL, compiled=True)
        assert torch.equal(out, walk(lm, TEXT, PLACES, CAUSAL))
    assert capsys.readouterr().err == "torch.compile refused (Unsupported): layers run as they are\n"


def test_an_adapter_is_not_fused():
    lm = tiny()
    attn = lm.model.layers[0].self_attn
    attn.q_proj = torch.nn.Sequential(attn.q_proj)
    fuse(lm)
    assert [sorted(layer.fused) for layer in lm.model.layers] == [["gate_up"]] + [["gate_up", "qkv"]] * 2


# ---------------------------------------------------------------------------------------- masks and attention


def all_masks(device="cpu"):
    """name -> (mask_mod, B, T, S, independent predicate over ints) at awkward sizes."""
    segment = [0] * 30 + [1] * 41 + [-1] * 9 + [2] * 20
    prompts, anchors = [7, 23], [[3, 40, 41], [1, 20, 60]]
    groups = [0, 2, 4]

    def at(values):
        return torch.tensor(values, device=device)

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
        "segments": (segments(at([segment])), 1, 100, 100,
                     lambda b, i, j: segment[i] == segment[j] >= 0 and j <= i),
        "completion_rows": (common.completion_rows(13, 7, 2), 1, 15, 34, rows),
        "block_causal_d2f": (block_causal(6, at(prompts)), 2, 50, 50,
                             lambda b, i, j: blk(j, prompts[b], 6) <= blk(i, prompts[b], 6)),
        "block_causal_fv2": (block_causal(8, offset=24), 1, 17, 41, lambda b, i, j: j // 8 <= (i + 24) // 8),
        "noisy_clean": (common.noisy_clean(33, 7, views=2), 1, 99, 99, noisy_clean),
        "dual_view": (common.dual_view(70, 5, at(anchors)), 2, 15, 85, dual),
        "merged_views": (common.merged_views(11, 5, 4, at(groups)), 1, 17, 28, merged),
    }  # fmt: skip


@pytest.mark.parametrize("name", all_masks())
def test_mask_equals_an_independent_reference_in_both_forms(name):
    mask_mod, B, T, S, allowed = all_masks()[name]
    mask = dense(mask_mod, B, T, S)
    rows = [[[bool(allowed(b, i, j)) for j in range(S)] for i in range(T)] for b in range(B)]
    expected = torch.tensor(rows)[:, None]
    assert mask.dtype == torch.bool and torch.equal(mask, expected)
    # the fused form of the same predicate, uncompiled: B or 1 in the batch, grouped heads
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(B, H, n, 16, generator=generator) for H, n in ((4, T), (2, S), (2, S)))
    block_mask = common.create_block_mask(mask_mod, B, None, T, S, device="cpu")
    fused = flex_attention(q, k, v, block_mask=block_mask, enable_gqa=True)
    assert apart(fused, kernels.attention(q, k, v, mask)) < 1e-5
    assert apart(fused, kernels.attention(q, k, v, block_mask)) < 1e-5  # on CPU: the same predicate, dense


@pytest.mark.parametrize("kind", ["random", "all", "causal"])
def test_attention_equals_plain_softmax(kind):
    """Values and gradients; a plainly causal mask takes a way of its own."""
    generator = torch.Generator().manual_seed(0)
    S = 5 if kind == "causal" else 11
    shapes = ((2, 6, 5, 8), (2, 2, S, 8), (2, 2, S, 8))
    leaves = [torch.randn(shape, generator=generator, requires_grad=True) for shape in shapes]
    some = torch.rand(2, 1, 5, S, generator=generator) < 0.6
    some[..., 0] = True
    mask = dict(random=some, all=torch.ones_like(some), causal=dense(causal(), 2, 5, S))[kind]
    q, k, v = leaves
    scores = q @ k.repeat_interleave(3, 1).transpose(2, 3) / 8**0.5
    expected = scores.masked_fill(~mask, -torch.inf).softmax(-1) @ v.repeat_interleave(3, 1)
    found = kernels.attention(q, k, v, None if kind == "all" else mask)
    assert apart(found, expected) < 1e-5
    grads = [torch.autograd.grad(out.pow(2).sum(), leaves) for out in (found, expected)]
    assert all(apart(a, b) < 1e-4 for a, b in zip(*grads))


def test_only_a_plainly_causal_mask_is_taken_for_one():
    assert kernels.layer_mask(dense(causal(), 3, 7, 7), 2, torch.float32) == "causal"
    for mask_mod, T in ((causal(), 5), (causal(2), 5), (full(), 7), (block_causal(2), 7)):
        mask = dense(mask_mod, 1, T, 7)
        bias = kernels.layer_mask(mask, 2, torch.bfloat16)
        assert bias.dtype == torch.bfloat16 and torch.equal(bias == 0, mask[:, :, None].expand_as(bias))
    for place in ((0, 0, 0, 1), (1, 0, 6, 2)):  # one entry more or less, in one row of the batch
        mask = dense(causal(), 2, 7, 7).clone()
        mask[place] ^= True
        assert torch.is_tensor(kernels.layer_mask(mask, 2, torch.float32))


@pytest.mark.parametrize("mask_mod", [causal(), block_causal(3)])
def test_a_mask_is_made_ready_once_a_forward_also_under_autocast(mask_mod):
    lm, mask = tiny(), dense(mask_mod, 1, 9, 9)
    expected = walk(lm, *ids_and_positions(), mask)
    with mock.patch.object(kernels, "layer_mask", side_effect=kernels.layer_mask) as made:
        with torch.autocast("cpu", torch.bfloat16):
            out = walk(lm, *ids_and_positions(), mask)
    assert made.call_count == 1 and apart(out, expected) < 0.1 * expected.abs().max()


@pytest.mark.parametrize("dtype", [torch.float32, torch.int64, torch.uint8])
def test_masks_that_are_not_boolean_are_refused(dtype):
    q = torch.randn(1, 2, 3, 8)
    with pytest.raises(TypeError, match="boolean"):
        kernels.attention(q, q, q, torch.ones(1, 1, 3, 3, dtype=dtype))


def test_build_mask_is_dense_on_cpu():
    assert torch.equal(build_mask(causal(), 1, 5, 5, "cpu"), dense(causal(), 1, 5, 5))


def test_common_draws_every_mask(capsys):
    with mock.patch.dict(sys.modules):
        runpy.run_path(str(ROOT / "common.py"), run_name="__main__")
    out = capsys.readouterr().out
    names = "full causal segments completion_rows block_causal noisy_clean dual_view merged_views"
    assert all(f"\n{name}" in out for name in names.split()) and "# = may attend" in out
    assert common.draw(causal(), "012", "abc") == "  abc\n0 #..\n1 ##.\n2 ###"


@pytest.mark.parametrize("ours_first", [True, False])
def test_a_package_called_kernels_is_neither_hidden_nor_taken_for_ours(ours_first, tmp_path, monkeypatch):
    """transformers imports a package of this name where it is installed; our folder stands before it."""
    (tmp_path / "kernels").mkdir()
    (tmp_path / "kernels" / "__init__.py").write_text("from .layer import Layer\nCUDAProperties = 'real'\n")
    (tmp_path / "kernels" / "layer.py").write_text("class Layer: pass\n")
    elsewhere = [place for place in sys.path if place != str(ROOT)]
    path = [str(ROOT), str(tmp_path)] if ours_first else [str(tmp_path), str(ROOT)]
    monkeypatch.setattr(sys, "path", path + elsewhere)
    with mock.patch.dict(sys.modules):
        for name in ("kernels", "kernels.layer", "common"):
            sys.modules.pop(name, None)
        import kernels as found
        from kernels.layer import Layer

        import common as again

        assert found.CUDAProperties == "real" and found.Layer is Layer and not hasattr(found, "GraphReplay")
        assert again is not common and again.kernels.GraphReplay is not kernels.GraphReplay


# ----------------------------------------------------------------------------------------------------- traces


def pieces_tokenizer():
    """Words that begin with a Metaspace and bytes of characters, decoded as Llama-2 does."""
    words = "<unk> ▁Tom ▁has ▁3 ▁+ ▁pens . <0xE2> <0x82> <0xAC> \n \x1b".split(" ")
    model = tokenizers.models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="<unk>")
    made = tokenizers.Tokenizer(model)
    kinds = tokenizers.decoders
    made.decoder = kinds.Sequence(
        [kinds.Replace("▁", " "), kinds.ByteFallback(), kinds.Fuse(), kinds.Strip(" ", 1, 0)]
    )
    return transformers.PreTrainedTokenizerFast(tokenizer_object=made, unk_token="<unk>")


IDS = [1, 2, 3, 7, 8, 9, 5, 6]  # Tom has 3€ pens.
RECORD = {"fixed_round": [0, 1, 2, 2, 2, 2, 0, 3], "rejected": [(0, 1, 4), (1, 2, 5), (1, 9, 5)]}


def test_a_trace_ends_with_the_text_and_its_columns_stand_still():
    tokenizer = pieces_tokenizer()
    rounds = common.trace(tokenizer, IDS, RECORD)
    texts = ["".join(text for text, _, _ in row) for row in rounds]
    assert texts == ["Tom +  ··· pens·", "Tom has p· pens·", "Tom has 3€ pens·", "Tom has 3€ pens."]
    assert texts[-1] == tokenizer.decode(IDS)
    assert [text for text, _, _ in rounds[-1]] == ["Tom", " has", " 3", "", "", "€", " pens", "."]
    assert rounds[0][:3] == [("Tom", 0, False), (" +  ", 0, True), ("··", None, False)]
    broken = [1, 7, 8, 3]  # a character that never ends
    (row,) = common.trace(tokenizer, broken, {"fixed_round": [0] * 4})
    assert "".join(text for text, _, _ in row) == tokenizer.decode(broken)


def test_a_trace_on_a_terminal_and_without_colours(capsys, monkeypatch):
    rounds = common.trace(pieces_tokenizer(), [*IDS[:3], 10, 11], RECORD)
    pauses = []
    monkeypatch.setattr(common.time, "sleep", pauses.append)
    monkeypatch.delenv("NO_COLOR", raising=False)
    common.show_trace(rounds, 3)
    plain = capsys.readouterr().out
    assert plain.splitlines()[:2] == ["  round   1 | Tom +  ····", "   rejected |    ~~~~"]
    assert plain.splitlines()[-1] == "  round   3 | Tom has 3⏎�" and not pauses
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    common.show_trace(rounds, 3)
    coloured = capsys.readouterr().out.splitlines()
    assert pauses == [1] * 3 and len(coloured) == 3
    assert coloured[0].startswith("  round   1 | \033[38;5;") and "\033[7;9;38;5;" in coloured[0]
    monkeypatch.setenv("NO_COLOR", "1")
    common.show_trace(rounds, 3)
    assert capsys.readouterr().out == plain
    monkeypatch.setenv("NO_COLOR", "")
    many = [[("a", number, False)] for number in range(40)]
    common.show_trace(many, 0)
    colours = {line.split("| ")[1] for line in capsys.readouterr().out.splitlines()}
    assert len(colours) == 40, "a colour a round"


def test_a_trace_as_a_picture():
    rounds = common.trace(pieces_tokenizer(), [*IDS[:3], 10, 11], RECORD)
    background, prompt, *lines = ElementTree.fromstring(common.trace_svg(rounds, "1 < 2 &\n\0?"))
    assert background.tag.endswith("rect") and prompt.text == "1 < 2 &⏎�?"
    texts = ["".join(line.itertext()) for line in lines]
    assert texts == ["round   1 | Tom +  ····", "round   2 | Tom has p··", "round   3 | Tom has 3⏎�"]
    struck = [span for span in lines[0] if span.get("text-decoration") == "line-through"]
    assert [span.text for span in struck] == [" +  "]
    many = ElementTree.fromstring(common.trace_svg([[("a", number, False)] for number in range(40)]))
    colours = {line[0].get("fill") for line in many[1:]}
    assert len(colours) == 40 and struck[0].get("fill") not in colours  # and no prompt, no line for it


# ---------------------------------------------------------------------------------------------------- on CUDA


@pytest.mark.gpu
@pytest.mark.parametrize("name", all_masks())
@pytest.mark.parametrize("dtype, tolerance", [(torch.float32, 2e-3), (torch.bfloat16, 2e-2)])
def test_flex_equals_dense_forward_and_backward(name, dtype, tolerance):
    mask_mod, B, T, S, _ = all_masks("cuda")[name]
    generator = torch.Generator("cuda").manual_seed(0)
    mask, results = dense(mask_mod, B, T, S, "cuda"), []
    block_mask = build_mask(mask_mod, B, T, S, "cuda")
    assert isinstance(block_mask, BlockMask)
    place = dict(device="cuda", dtype=dtype, generator=generator)
    leaves = [torch.randn(B, H, n, 64, **place) for H, n in ((4, T), (2, S), (2, S))]
    for form in (mask, block_mask):
        q, k, v = (leaf.clone().requires_grad_() for leaf in leaves)
        out = kernels.attention(q, k, v, form)
        out.float().pow(2).sum().backward()
        results.append([out, q.grad, k.grad, v.grad])
    for a, b in zip(*results):
        assert apart(a, b) <= tolerance * b.abs().max()
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
        assert apart(a, b) <= 2e-3 * a.abs().max()
    assert not kernels.refused("torch.compile") and not kernels.refused("flex_attention")


@pytest.mark.gpu
def test_graph_replay_equals_the_plain_call():
    lm = tiny().to("cuda")
    plain, graphed = Decoder(lm, 48, compiled=False), Decoder(lm, 48, compiled=True)
    plain.replay.pad = plain.replay.capture = False
    given = (*ids_and_positions(B=1, T=40), (5, 1, 3, 8, 9, 11))
    assert apart(by_parts(plain, *given), by_parts(graphed, *given)) < 1e-3
