"""What the five scripts share: attention-mask builders, RoPE from explicit position ids, the walk through a decoder.

    python common.py        draws every mask below as text

Masks      a factory over plain ints and small tensors returns one predicate `mask_mod(b, h, q_idx, kv_idx)`, True =
           query may attend key. From the same predicate come the dense mask (`dense`) and flex_attention's BlockMask
           (`build_mask`), so the readable form and the fused one cannot drift apart.
RoPE       angles in float32 from integer position ids; where a token stands in the buffer never matters.
Walk       embed, layers, norm of a Hugging Face causal LM, with the mask, the positions and the cache that we say. The
           library's own forward guesses packed documents from permuted position ids, and its cache changes between
           versions; its modules (weights, norms, MLP, config) are used as is. A backbone is read whole or refused.
Drawings   every mask as text; a decode, round by round, as text or as a picture.

Shapes: B batch, T tokens in this forward, S keys seen, H query heads, G key/value heads, D head dim, V vocabulary.
"""

import html
import re
import sys
import time
import types

import torch
import torch.nn.functional as F
from torch.nn.attention.flex_attention import BlockMask, create_block_mask
from torch.utils.checkpoint import checkpoint

import kernels
from kernels import dense

# ---------------------------------------------------------------------------------------------------------------- masks


def full():
    """Everything sees everything: a bidirectional diffusion LM."""

    def mask_mod(b, h, q_idx, kv_idx):
        return (q_idx >= 0) & (kv_idx >= 0)

    return mask_mod


def causal(offset=0):
    """Query i stands at buffer index offset + i and sees keys up to itself: plain AR, and ReFusion in buffer order."""

    def mask_mod(b, h, q_idx, kv_idx):
        return kv_idx <= q_idx + offset

    return mask_mod


def segments(segment_ids):
    """Causal sequences packed in one row: same segment, not later. segment_ids (B, T) int64, < 0 sees nothing."""

    def mask_mod(b, h, q_idx, kv_idx):
        own, other = segment_ids[b, q_idx], segment_ids[b, kv_idx]
        return (own == other) & (own >= 0) & (kv_idx <= q_idx)

    return mask_mod


def completion_rows(cache_len, slot_size, start):
    """ReFusion's parallel completion, the rows packed in one sequence  [code].

    Queries: for each row (slot) its offsets start .. slot_size-1, row after row. Keys: cache_len committed entries,
    then slot_size places a row. A query sees the committed part and its own row up to its offset, never another row.
    """
    window = slot_size - start

    def mask_mod(b, h, q_idx, kv_idx):
        row, offset = q_idx // window, start + q_idx % window
        key = kv_idx - cache_len
        return (key < 0) | ((key // slot_size == row) & (key % slot_size <= offset))

    return mask_mod


def block_causal(block_size, prompt_lens=None, offset=0):
    """Full attention inside a block, causal between blocks: blk(key) <= blk(query).

    Fast-dLLM v2 counts blocks from the first token (prompt_lens None); D2F from the end of the prompt, which is one
    block that sees only itself: prompt_lens (B,) int64. offset: position of query 0.
    """

    def mask_mod(b, h, q_idx, kv_idx):
        start = 0 if prompt_lens is None else prompt_lens[b]
        query, key = q_idx + offset - start, kv_idx - start
        return key.clamp(min=-1) // block_size <= query.clamp(min=-1) // block_size  # the prompt is block -1

    return mask_mod


def noisy_clean(seq_len, block_size, views=1):
    """Fast-dLLM v2 training: `views` noisy copies of a row of seq_len tokens, then the clean row.

    A noisy block sees itself and the clean tokens of strictly earlier blocks; a clean block sees clean blocks up to its
    own (bidirectional inside); nobody sees another view, clean never sees noisy. Blocks go by original position.
    """

    def mask_mod(b, h, q_idx, kv_idx):
        q_copy, kv_copy = q_idx // seq_len, kv_idx // seq_len
        q_block, kv_block = q_idx % seq_len // block_size, kv_idx % seq_len // block_size
        own_noisy = (q_copy < views) & (q_copy == kv_copy) & (q_block == kv_block)
        earlier_clean = (q_copy < views) & (kv_copy == views) & (q_block > kv_block)
        clean = (q_copy == views) & (kv_copy == views) & (q_block >= kv_block)
        return own_noisy | earlier_clean | clean

    return mask_mod


def dual_view(context_len, block_size, anchors):
    """Orthrus's diffusion view: keys are context_len AR positions, then the rows of every block.

    anchors (B, M) int64, query row r belongs to block r // block_size. It sees the AR context strictly before its own
    anchor and every row of its own block, both directions.
    """

    def mask_mod(b, h, q_idx, kv_idx):
        block = q_idx // block_size
        own_block = (kv_idx - context_len) // block_size == block
        return ((kv_idx < context_len) & (kv_idx < anchors[b, block])) | ((kv_idx >= context_len) & own_block)

    return mask_mod


def merged_views(cache_len, ar_rows, block_size, group_idx):
    """Orthrus, verification and the next draft in one forward: ar_rows AR rows, then one diffusion group per candidate.

    Keys: cache_len committed, then the rows of this forward. group_idx (N,) int64: group n is anchored at AR row
    group_idx[n]. AR rows are causal; a group sees the cache, the AR rows before its anchor and itself.
    """

    def mask_mod(b, h, q_idx, kv_idx):
        key = kv_idx - cache_len
        is_ar = q_idx < ar_rows
        group = ((q_idx - ar_rows) // block_size).clamp(min=0)
        last_seen = torch.where(is_ar, q_idx, group_idx[group] - 1)
        own_group = ~is_ar & (key >= ar_rows) & ((key - ar_rows) // block_size == group)
        return (key <= torch.where(key < ar_rows, last_seen, -1)) | own_group

    return mask_mod


def build_mask(mask_mod, B, T, S, device):
    """The form that training on this device runs on: a BlockMask on CUDA, else the dense mask (B, 1, T, S) bool."""
    if torch.device(device).type != "cuda":
        return dense(mask_mod, B, T, S, device)
    return create_block_mask(mask_mod, B, None, T, S, device=device)


# ----------------------------------------------------------------------------------------------------------------- RoPE

ROPE_TYPES = ("default", "linear", "llama3", "yarn")


def rope_angles(rotary, position_ids):
    """cos and sin (B, 1, T, D), float32, of integer position_ids (B, T); `rotary` = (inv_freq (D/2,), scale)."""
    inv_freq, scale = rotary
    angles = position_ids[:, None, :, None].float() * inv_freq.to(position_ids.device)  # (B, 1, T, D/2)
    angles = torch.cat([angles, angles], dim=-1)
    return angles.cos() * scale, angles.sin() * scale


def rope(x, cos, sin):
    """Rotate x (B, heads, T, D) by position, in float32; the two halves of a head are the two coordinates."""
    x = x.float()
    first, second = x.chunk(2, dim=-1)
    return x * cos + torch.cat([-second, first], dim=-1) * sin


# --------------------------------------------------------------------------------------------------------- decoder walk

MODEL_TYPES = ("llama", "mistral", "qwen2", "qwen3")


def check_config(config):
    """Raise ValueError, one line with the name of what is not supported, unless the walk equals the library's own."""
    name = getattr(config, "model_type", None)
    if name not in MODEL_TYPES:
        raise ValueError(f"model type {name!r} is not supported (supported: {', '.join(MODEL_TYPES)})")
    sliding = "sliding_attention" in (getattr(config, "layer_types", None) or [])
    if sliding or (name == "mistral" and getattr(config, "sliding_window", None) is not None):
        raise ValueError(f"{name} with sliding-window layers is not supported")
    for key in ("attn_logit_softcapping", "final_logit_softcapping"):
        if getattr(config, key, None):
            raise ValueError(f"{name} with {key} (soft-capping) is not supported")
    rope_parameters = getattr(config, "rope_parameters", None) or {}
    rope_type = rope_parameters.get("rope_type", "default")
    if rope_type not in ROPE_TYPES:
        raise ValueError(f"RoPE type {rope_type!r} is not supported (supported: {', '.join(ROPE_TYPES)})")
    if rope_parameters.get("partial_rotary_factor", 1.0) != 1.0:
        raise ValueError("RoPE on a part of each head (partial_rotary_factor) is not supported")


def from_pretrained(cls, name, **settings):
    """cls.from_pretrained(name, **settings), from safetensors and without remote code.

    Raises ValueError unless the file held every weight, in its shape, and no layer more: the library only warns, and
    fills gaps with random numbers.
    """
    strict = dict(use_safetensors=True, trust_remote_code=False, output_loading_info=True, ignore_mismatched_sizes=True)
    model, info = cls.from_pretrained(name, **settings, **strict)
    layers = [re.match(r"model\.layers\.(\d+)\.", key) for key in info["unexpected_keys"]]
    if any(found and int(found[1]) >= model.config.num_hidden_layers for found in layers):
        raise ValueError(f"the weights have more layers than the {model.config.num_hidden_layers} of the config")
    if gaps := sorted([*info["missing_keys"], *(key for key, *_ in info["mismatched_keys"])]):
        raise ValueError(f"weights are missing or of another shape: {', '.join(gaps[:3])}")
    return model


def prepare(backbone):
    """Check that a Hugging Face causal LM can be walked and make its layers answer to `walk`. Safe to repeat.

    The layers keep the library's own forward for the library's own calls. RoPE frequencies are computed anew from the
    config in float32: the model's buffer is cast with the model, and may come back from loading as garbage.
    Returns the backbone. Raises ValueError (one line) for anything that the walk does not cover.
    """
    check_config(backbone.config)
    rotary = type(backbone.model.rotary_emb)(backbone.config)
    backbone.rotary = (rotary.inv_freq.to(backbone.model.embed_tokens.weight.device), rotary.attention_scaling)
    for index, layer in enumerate(backbone.model.layers):
        for name in ("q_proj", "k_proj", "v_proj", "o_proj"):
            if not hasattr(layer.self_attn, name):
                raise ValueError(f"layer {index} has no {name}")
        layer.forward = types.MethodType(_layer_forward, layer)
    return backbone


def _layer_forward(layer, hidden, *args, walk=None, **kwargs):
    # through the module's own __call__, so that hooks (sharding engines) see every layer
    if walk is None:
        return type(layer).forward(layer, hidden, *args, **kwargs)
    compiled, walk_args = walk
    return _run(compiled, decoder_layer, layer, hidden, *walk_args)


def _run(compiled, function, *args):
    """function(*args), through its compiled twin where that is asked for and possible."""
    if compiled and not kernels.refused("torch.compile"):
        try:
            return _compiled[function](*args)
        except torch._dynamo.exc.TorchDynamoException as error:
            kernels.refused("torch.compile", error, "layers run as they are")
    return function(*args)


def own_projection(attn, name, x):
    """The projection or norm that the layer calls `name`; Orthrus passes another function to use its second set."""
    return getattr(attn, name)(x)


def decoder_layer(layer, hidden, cos, sin, attn_mask, layer_kv=None, write_idx=None, project=own_projection):
    """One decoder layer. hidden (B, T, width) -> (B, T, width).

    layer_kv = (keys, values), each (B, G, max_len, D). With write_idx (T,) this forward's keys and values are written
    there and the first S entries are attended, S being the width of attn_mask. Without write_idx they are a read-only
    context in front of this forward's own. What fuse_projections has made is used where no gradient is wanted.
    """
    attn, fused = layer.self_attn, None if torch.is_grad_enabled() else getattr(layer, "fused", None)
    B, T = hidden.shape[:2]
    x = layer.input_layernorm(hidden)
    if fused and project is own_projection:
        qkv = split_product(x, *fused["qkv"])
    else:
        qkv = (project(attn, name, x) for name in ("q_proj", "k_proj", "v_proj"))
    q, k, v = (tensor.view(B, T, -1, attn.head_dim) for tensor in qkv)
    if hasattr(attn, "q_norm"):
        q, k = project(attn, "q_norm", q), project(attn, "k_norm", k)
    v = v.transpose(1, 2)  # (B, G, T, D)
    q = rope(q.transpose(1, 2), cos, sin).to(v.dtype)  # (B, H, T, D)
    k = rope(k.transpose(1, 2), cos, sin).to(v.dtype)  # (B, G, T, D)
    if layer_kv is not None:
        keys, values = layer_kv
        if write_idx is None:
            k, v = torch.cat([keys, k], dim=2), torch.cat([values, v], dim=2)
        else:
            S = attn_mask.shape[-1]
            keys.index_copy_(2, write_idx, k.to(keys.dtype))
            values.index_copy_(2, write_idx, v.to(values.dtype))
            k, v = keys[:, :, :S], values[:, :, :S]
    x = kernels.attention(q, k, v, attn_mask).transpose(1, 2).reshape(B, T, -1)
    hidden = hidden + project(attn, "o_proj", x)
    x = layer.post_attention_layernorm(hidden)
    if not fused:
        return hidden + layer.mlp(x)
    gate, up = split_product(x, *fused["gate_up"])
    return hidden + layer.mlp.down_proj(layer.mlp.act_fn(gate) * up)


def fuse_projections(backbone):
    """q, k, v side by side in one weight, gate and up in another: two products a layer where there were five.

    For decoding: a forward without gradients uses them. The layers' own weights become views of the fused ones: no
    memory is added, and what is written into them in place is seen here. Layers with anything but plain Linear modules
    (an adapter) stay as they are. Safe to repeat; needed again after weights were moved or cast. Returns the backbone.
    """
    for layer in backbone.model.layers:
        attn, mlp, held = layer.self_attn, layer.mlp, getattr(layer, "fused", None)
        groups = {"qkv": (attn.q_proj, attn.k_proj, attn.v_proj), "gate_up": (mlp.gate_proj, mlp.up_proj)}
        if any(type(linear) is not torch.nn.Linear for group in groups.values() for linear in group):
            layer.fused = None
        elif not held or not all(still_views(group, *held[name]) for name, group in groups.items()):
            layer.fused = {
                name: (
                    side_by_side([linear.weight for linear in group]),
                    side_by_side([linear.bias for linear in group]),
                    [linear.out_features for linear in group],
                )
                for name, group in groups.items()
            }
    return backbone


def side_by_side(parts):
    """One tensor of several parameters, which become views of it; None of biases that are not there."""
    if parts[0] is None:
        return None
    joined = torch.cat([part.detach() for part in parts])
    for part, view in zip(parts, joined.split([len(part) for part in parts])):
        part.data = view
    return joined


def still_views(group, weight, bias, sizes):
    """Nothing has moved since they were fused: the fused tensors stay, which captured graphs may be reading."""
    pairs = [(linear.weight, weight) for linear in group]
    pairs += [(linear.bias, bias) for linear in group if bias is not None]
    return all(part.untyped_storage().data_ptr() == whole.untyped_storage().data_ptr() for part, whole in pairs)


def split_product(x, weight, bias, sizes):
    """One product instead of several, cut into what each projection gives."""
    return F.linear(x, weight, bias).split(sizes, dim=-1)


def read_head(lm_head, hidden, row_idx, input_ids, read):
    """What a decoding loop asks of a forward: logits, or read[0](logits, input_ids, *read[1:]) in the same graph.

    hidden (B, T, width); row_idx (n,) int64: the rows that are asked for, None: all; see Decoder for read.
    """
    if row_idx is not None:
        hidden = hidden[:, row_idx]
        input_ids = input_ids[:, row_idx]
    logits = lm_head(hidden)  # (B, n, V)
    return read[0](logits, input_ids, *read[1:]) if read else logits


_compiled = {f: torch.compile(f, fullgraph=True, dynamic=False) for f in (decoder_layer, read_head)}


def walk(
    backbone,
    input_ids,
    position_ids,
    attn_mask,
    layer_kvs=None,
    write_idx=None,
    *,
    project=own_projection,
    compiled=None,
    checkpointing=False,
):
    """Hidden states (B, T, width) after the final norm; the caller applies `backbone.lm_head` to the rows it needs.

    input_ids      (B, T) int64, or embeddings (B, T, width)
    position_ids   (B, T) int64, the place of each token in the text: the only thing RoPE sees
    attn_mask      (B or 1, 1, T, S) bool, True = may attend, or a BlockMask: the only thing that decides who sees whom
    layer_kvs      KVCache.layers, or per layer (keys, values) of a read-only context; see decoder_layer for write_idx
    compiled       one graph a layer; None: where the mask is a BlockMask, that is in training on CUDA
    checkpointing  recompute each layer in backward instead of keeping its activations
    Raises ValueError where the backbone is not of a supported shape.
    """
    if not hasattr(backbone, "rotary"):
        prepare(backbone)
    compiled = isinstance(attn_mask, BlockMask) if compiled is None else compiled
    hidden = input_ids if input_ids.is_floating_point() else backbone.model.embed_tokens(input_ids)
    cos, sin = rope_angles(backbone.rotary, position_ids)
    for index, layer in enumerate(backbone.model.layers):
        layer_kv = None if layer_kvs is None else layer_kvs[index]
        args = (compiled, (cos, sin, attn_mask, layer_kv, write_idx, project))
        if checkpointing and torch.is_grad_enabled():
            hidden = checkpoint(layer, hidden, walk=args, use_reentrant=False)
        else:
            hidden = layer(hidden, walk=args)
    return backbone.model.norm(hidden)


def token_nll(backbone, hidden, labels, chunk=2048):
    """-log p(label) by the backbone's head: (B, T) float32, 0 where the label is -100.

    hidden (B, T, width), labels (B, T) int64. Only labelled rows are projected, in chunks that are recomputed in
    backward: float32 logits (B, T, V) never exist.
    """

    def nll(rows, targets):
        return F.cross_entropy(backbone.lm_head(rows).float(), targets, reduction="none")

    keep = labels != -100
    pairs = zip(hidden[keep].split(chunk), labels[keep].split(chunk))
    parts = [checkpoint(nll, rows, targets, use_reentrant=False) for rows, targets in pairs]
    return torch.zeros(labels.shape, device=labels.device).masked_scatter(keep, torch.cat(parts))


class Decoder:
    """A backbone with its KV cache and the replayed forward: what every decoding loop calls, and where forwards count.

    decoder(input_ids, position_ids, attn_mask, write_idx) -> logits (B, T, V), in the backbone's dtype, of every row,
    on the backbone's device; what goes in may lie on the CPU. last=n: of the last n rows alone.
    read = (function, *plain arguments), hashable: function(logits (B, n, V), input_ids (B, n), *arguments) takes the
    place of the logits, and may be a tuple of tensors (B, n, ...). It is compiled and captured with the forward, so it
    must not ask the device for a value; pass the same function each time, not a new closure.
    Keep one Decoder for many prompts (`reset` between them): its graphs are captured once.
    max_len: most entries that committed and scratch take together. kv_cache: that of another Decoder of the same
    backbone, batch and max_len, so that two views read and write the same entries.
    """

    def __init__(self, backbone, max_len, batch=1, compiled=None, project=own_projection, kv_cache=None):
        prepare(backbone)
        self.backbone, self.project = backbone, project
        weight, layers = backbone.model.embed_tokens.weight, backbone.model.layers
        kv_heads, head_dim = backbone.config.num_key_value_heads, layers[0].self_attn.head_dim
        self.kv_cache = kv_cache or kernels.KVCache(
            len(layers), batch, kv_heads, max_len, head_dim, weight.device, weight.dtype
        )
        self.compiled = weight.is_cuda if compiled is None else compiled
        if weight.is_cuda:
            fuse_projections(backbone)
        max_key = self.kv_cache.layers[0][0].shape[2]
        self.replay = kernels.GraphReplay(self._forward, max_len, max_key, weight.device)
        self.forwards = 0

    def reset(self):
        """Empty cache, no forwards counted: what a new prompt starts from. Returns self."""
        self.kv_cache.truncate(0)
        self.forwards = 0
        return self

    def keep_rows(self, row_idx):
        """Batch rows row_idx (n,) stay, in this order. What was captured for more rows reads memory that goes."""
        self.kv_cache.keep_rows(row_idx)
        self.replay.graphs.clear()

    def _forward(self, input_ids, position_ids, attn_mask, write_idx, row_idx, read):
        compiled = self.compiled and input_ids.shape[1] <= kernels.GraphReplay.MAX_QUERY
        layer_kvs, switches = self.kv_cache.layers, dict(project=self.project, compiled=compiled)
        hidden = walk(self.backbone, input_ids, position_ids, attn_mask, layer_kvs, write_idx, **switches)
        return _run(compiled, read_head, self.backbone.lm_head, hidden, row_idx, input_ids, read)

    @torch.no_grad()
    def __call__(self, input_ids, position_ids, attn_mask, write_idx, count=True, last=None, read=()):
        self.forwards += count  # False for a call that only prefills the prompt
        return self.replay(input_ids, position_ids, attn_mask, write_idx, last, read)


def best_token(logits, input_ids, vocab_len):
    """For Decoder's read: the likeliest token of each row. (B, n, V) -> (B, n) int64"""
    return logits[..., :vocab_len].argmax(-1)


@torch.no_grad()
def generate_ar(backbone, prompt_ids, cfg, decoder=None, generator=None):
    """Plain greedy decoding, one token a forward through the same walk, cache and graphs: the line beside every method.

    prompt_ids (1, P) int64; cfg gives max_new_tokens, eos_id, vocab_len, compile. Returns (ids (1, P+R), record).
    """
    P, ids = prompt_ids.shape[1], prompt_ids.cpu()
    decoder = (decoder or Decoder(backbone, P + cfg.max_new_tokens, compiled=cfg.compile)).reset()
    for _ in range(cfg.max_new_tokens):
        start = decoder.kv_cache.cache_len
        n = ids.shape[1] - start  # the prompt, then one token
        positions = torch.arange(start, start + n)[None]
        mask, write_idx = dense(causal(start), 1, n, start + n), decoder.kv_cache.scratch_idx(n)
        next_ids = decoder(ids[:, start:], positions, mask, write_idx, last=1, read=(best_token, cfg.vocab_len))
        decoder.kv_cache.commit(n)
        ids = torch.cat([ids, next_ids.cpu()], dim=1)
        if ids[0, -1] == cfg.eos_id:
            break
    new_tokens = ids.shape[1] - P
    record = {"forwards": decoder.forwards, "rounds": new_tokens, "fixed_round": list(range(new_tokens))}
    return ids.to(prompt_ids.device), record


# ------------------------------------------------------------------------------------------------------------- drawings


def draw(mask_mod, T, S, q_names=None, kv_names=None):
    """A mask as text: one line per query, one column per key, # = may attend, . = may not."""
    q_names = q_names or [str(i) for i in range(T)]
    width = max(map(len, q_names))
    lines = [" " * width + " " + "".join(kv_names)] if kv_names else []
    for name, row in zip(q_names, dense(mask_mod, 1, T, S)[0, 0].tolist()):
        lines.append(f"{name:>{width}} " + "".join("#" if may else "." for may in row))
    return "\n".join(lines)


def drawings():
    """(title, drawing) of every mask, small enough to read."""
    return [
        ("full: everything sees everything (LLaDA, Dream, D2F's teacher)", draw(full(), 6, 6)),
        ("causal: plain AR; ReFusion's buffer [prompt | clean slots, any order | masked slots]", draw(causal(), 8, 8)),
        (
            "causal(offset=4): 3 new queries behind 4 cached keys",
            draw(causal(4), 3, 7, kv_names="cccc012"),
        ),
        (
            "segments: causal sequences 0 0 0 | 1 1 | 2 2 2 packed in one row (CoDiLA's blocks)",
            draw(segments(torch.tensor([[0, 0, 0, 1, 1, 2, 2, 2]])), 8, 8, kv_names="00011222"),
        ),
        (
            "completion_rows: ReFusion, 3 committed keys (c), two slots of 4 (a, b), offsets 1.. are recomputed",
            draw(completion_rows(3, 4, 1), 6, 11, "a1 a2 a3 b1 b2 b3".split(), "cccaaaabbbb"),
        ),
        (
            "block_causal: D2F, prompt of 3 (p), response blocks of 2",
            draw(block_causal(2, torch.tensor([3])), 9, 9, kv_names="ppp001122"),
        ),
        (
            "block_causal: Fast-dLLM v2, blocks of 4 counted from the first token; 4 queries behind 4 cached",
            draw(block_causal(4, offset=4), 4, 8, kv_names="cccc1111"),
        ),
        (
            "noisy_clean: Fast-dLLM v2 training, 3 blocks of 2, noisy (n) then clean (c) tokens",
            draw(noisy_clean(6, 2), 12, 12, [f"n{i}" for i in range(6)] + [f"c{i}" for i in range(6)], "nnnnnncccccc"),
        ),
        (
            "dual_view: Orthrus training, 6 AR keys (a), two diffusion blocks of 3 with anchors at 2 and 4",
            draw(dual_view(6, 3, torch.tensor([[2, 4]])), 6, 12, "0a 0m 0m 1a 1m 1m".split(), "aaaaaa000111"),
        ),
        (
            "merged_views: Orthrus --merged, 3 cached keys (c), 3 AR rows (a), diffusion groups at AR rows 0 and 2",
            draw(merged_views(3, 3, 2, torch.tensor([0, 2])), 7, 10, "a0 a1 a2 g0 g0 g2 g2".split(), "cccaaa0022"),
        ),
    ]


def trace(tokenizer, ids, record):
    """Rounds of a decode, each a list of (text, round that fixed it or None, struck through) with one entry a token.

    Not yet fixed: a dot, or the draft that this round rejected, where record["rejected"] has (round, index, token id).
    """
    rejected = {(turn, index): token_id for turn, index, token_id in record.get("rejected", ())}
    fixed = record["fixed_round"][: len(ids)]

    def entry(turn, i):
        if fixed[i] <= turn:
            return tokenizer.decode([ids[i]]), fixed[i], False
        draft = rejected.get((turn, i))
        return ("·", None, False) if draft is None else (tokenizer.decode([draft]), turn, True)

    return [[entry(turn, i) for i in range(len(fixed))] for turn in sorted(set(fixed))]


def show_trace(rounds, seconds):
    """One line a round; on a terminal at the decode's pace, coloured by the round, fallen drafts struck through."""
    for number, row in enumerate(rounds, 1):
        if sys.stdout.isatty():
            time.sleep(seconds / len(rounds))
            paint = [f"\033[{'9;' * struck}{31 + (n or 0) % 6}m" for _, n, struck in row]
            words = [text if n is None else f"{on}{text}\033[0m" for on, (text, n, _) in zip(paint, row)]
        else:
            words = [f"~{text}~" if struck else text for text, n, struck in row]
        print(f"  round {number:>3} | " + "".join(words).replace("\n", "\\n"), flush=True)


def trace_svg(rounds):
    """The same as one self-contained picture (text of an SVG file)."""
    colours, lines, width = ("#c33", "#383", "#a60", "#33c", "#939", "#088"), [], 0
    for number, row in enumerate(rounds, 1):
        spans = ""
        for text, n, struck in row:
            line = 'text-decoration="line-through"' if struck else ""
            spans += f'<tspan fill="{"#999" if n is None else colours[n % 6]}" {line}>{html.escape(text)}</tspan>'
        spans = spans.replace("\n", "⏎")
        lines.append(f'<text x="8" y="{number * 20}" xml:space="preserve">round {number:>3} | {spans}</text>')
        width = max(width, 12 + sum(len(text) for text, _, _ in row))
    size = f'width="{width * 8.5 + 16:.0f}" height="{len(rounds) * 20 + 12}" font-family="monospace" font-size="14"'
    return "\n".join([f'<svg xmlns="http://www.w3.org/2000/svg" {size}>', *lines, "</svg>"]) + "\n"


if __name__ == "__main__":
    print("One line per query, one column per key: # = may attend, . = may not.\n")
    for title, drawing in drawings():
        print(title, drawing, sep="\n", end="\n\n")
