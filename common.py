"""What the five scripts share: attention-mask builders, RoPE from position ids, the walk through a decoder.

    python common.py        draws every mask below as text

A mask is a predicate `mask_mod(b, h, q_idx, kv_idx)`, True = query may attend key; `dense` and `build_mask`
make the dense mask and the BlockMask from it. The layers of a Hugging Face causal LM are walked here, since
the library's own forward guesses packed documents from position ids, and its cache changes between versions.
`generate_ar` is the loop to read first.

Shapes: B batch, T tokens of this forward, S keys seen, H query heads, G key/value heads, D head dim.
"""

import html
import importlib.util
import os
import re
import sys
import time
import types
from pathlib import Path

import torch
import torch.nn.functional as F
from torch.nn.attention.flex_attention import BlockMask, create_block_mask
from torch.utils.checkpoint import checkpoint
from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, AutoConfig, AutoModelForCausalLM, AutoTokenizer
from transformers import PretrainedConfig, PreTrainedTokenizerFast, Qwen2Config, Qwen2Tokenizer

# kernels.py beside this file, by its path: transformers imports another module of that name if it is there
spec = importlib.util.spec_from_file_location("parallel_kernels", Path(__file__).with_name("kernels.py"))
kernels = importlib.util.module_from_spec(spec)
sys.modules[spec.name] = kernels
spec.loader.exec_module(kernels)
dense = kernels.dense

# ------------------------------------------------------------------------------------------------------ masks


def full():
    """Everything sees everything: a bidirectional diffusion LM."""
    return lambda b, h, q_idx, kv_idx: (q_idx >= 0) & (kv_idx >= 0)


def causal(offset=0):
    """Query i stands at buffer index offset + i and sees keys up to itself: plain AR, ReFusion's buffer."""
    return lambda b, h, q_idx, kv_idx: kv_idx <= q_idx + offset


def segments(segment_ids):
    """Causal sequences packed in a row: same segment, not later. segment_ids (B, T), < 0 sees nothing."""

    def mask_mod(b, h, q_idx, kv_idx):
        own = segment_ids[b, q_idx]
        return (own == segment_ids[b, kv_idx]) & (own >= 0) & (kv_idx <= q_idx)

    return mask_mod


def completion_rows(cache_len, slot_size, start):
    """ReFusion's parallel completion: rows (slots) packed in one sequence  [code].

    Queries: offsets start .. slot_size-1 of each row. Keys: cache_len committed ones, then slot_size a row. A
    query sees the committed ones and its own row up to its offset.
    """
    window = slot_size - start

    def mask_mod(b, h, q_idx, kv_idx):
        row, offset = q_idx // window, start + q_idx % window
        key = kv_idx - cache_len
        return (key < 0) | ((key // slot_size == row) & (key % slot_size <= offset))

    return mask_mod


def block_causal(block_size, prompt_lens=None, offset=0):
    """Full attention inside a block, causal between blocks: blk(key) <= blk(query).

    Fast-dLLM v2 counts blocks from the first token; D2F from the end of the prompt, prompt_lens (B,) int64,
    which is one block that sees only itself. offset: position of query 0.
    """

    def mask_mod(b, h, q_idx, kv_idx):
        start = 0 if prompt_lens is None else prompt_lens[b]
        query = (q_idx + offset - start).clamp(min=-1)  # the prompt is block -1
        key = (kv_idx - start).clamp(min=-1)
        return key // block_size <= query // block_size

    return mask_mod


def noisy_clean(seq_len, block_size, views=1):
    """Fast-dLLM v2 training: `views` noisy copies of a row of seq_len tokens, then the clean row.

    A noisy block sees itself and the clean tokens of strictly earlier blocks; a clean block sees clean blocks
    up to its own. Nobody sees another view, clean never sees noisy.  [Fast-dLLM v2, App. A.2]
    """

    def mask_mod(b, h, q_idx, kv_idx):
        q_copy = q_idx // seq_len
        kv_copy = kv_idx // seq_len
        q_block = q_idx % seq_len // block_size
        kv_block = kv_idx % seq_len // block_size
        own_noisy = (q_copy < views) & (q_copy == kv_copy) & (q_block == kv_block)  # M_BD
        earlier_clean = (q_copy < views) & (kv_copy == views) & (q_block > kv_block)  # M_OBC
        clean = (q_copy == views) & (kv_copy == views) & (q_block >= kv_block)  # M_BC
        return own_noisy | earlier_clean | clean

    return mask_mod


def dual_view(context_len, block_size, anchors):
    """Orthrus's diffusion view: keys are context_len AR positions, then the rows of every block.

    anchors (B, M) int64, one a block, each in the context. A query sees the AR context strictly before the
    anchor of its block and every row of its block.
    """

    def mask_mod(b, h, q_idx, kv_idx):
        block = q_idx // block_size
        return (kv_idx < anchors[b, block]) | ((kv_idx - context_len) // block_size == block)

    return mask_mod


def merged_views(cache_len, ar_rows, block_size, group_idx):
    """Orthrus, verification and the next draft in one forward: ar_rows AR rows, then diffusion groups.

    Keys: cache_len committed, then the rows of this forward. Group n is anchored at AR row group_idx[n], (N,)
    int64. AR rows are causal; a group sees the cache, the AR rows before its anchor and itself.
    """
    ar = causal(cache_len)
    diffusion = dual_view(cache_len + ar_rows, block_size, cache_len + group_idx[None])

    def mask_mod(b, h, q_idx, kv_idx):
        row = (q_idx - ar_rows).clamp(min=0)  # of the diffusion view
        return torch.where(q_idx < ar_rows, ar(b, h, q_idx, kv_idx), diffusion(b, h, row, kv_idx))

    return mask_mod


def build_mask(mask_mod, B, T, S, device):
    """The form that training on this device runs on: a BlockMask on CUDA, else the dense mask."""
    if torch.device(device).type != "cuda":
        return dense(mask_mod, B, T, S, device)
    return create_block_mask(mask_mod, B, None, T, S, device=device)


def padded_len(n, device):
    """Columns for rows of n tokens; on CUDA a multiple of 128, since every new length is compiled."""
    return -(-n // 128) * 128 if torch.device(device).type == "cuda" else n


# ----------------------------------------------------------------------------------------------- the backbone


def rope_angles(rotary, position_ids):
    """cos and sin (B, 1, T, D) float32 of integer position_ids (B, T); rotary = (inv_freq (D/2,), scale)."""
    inv_freq, scale = rotary
    inv_freq = inv_freq.to(position_ids.device, non_blocking=True)
    angles = position_ids[:, None, :, None].float() * inv_freq  # (B, 1, T, D/2)
    angles = torch.cat([angles, angles], dim=-1)
    return angles.cos() * scale, angles.sin() * scale


def rope(x, cos, sin):
    """Rotate x (B, heads, T, D) by position, in float32; the two halves of a head are the two coordinates."""
    x = x.float()
    first, second = x.chunk(2, dim=-1)
    return x * cos + torch.cat([-second, first], dim=-1) * sin


MODEL_TYPES = ("llama", "mistral", "qwen2", "qwen3")
ROPE_TYPES = ("default", "linear", "llama3", "yarn")
QWEN2_IN_ALL_BUT_NAME = ("Dream", "Fast_dLLM_Qwen")  # released with remote code, weights named as Qwen2's


def check_config(config):
    """Raise ValueError, one line naming what is not supported, unless the walk equals the library's own."""
    name = getattr(config, "model_type", None)
    if name not in MODEL_TYPES:
        raise ValueError(f"model type {name!r} is not supported (supported: {', '.join(MODEL_TYPES)})")
    if getattr(config, "quantization_config", None):
        raise ValueError("quantised weights are not supported: name the checkpoint that they were made from")
    sliding = "sliding_attention" in (getattr(config, "layer_types", None) or [])
    if sliding or (name == "mistral" and getattr(config, "sliding_window", None) is not None):
        raise ValueError(f"{name} with sliding-window layers is not supported")
    rope_parameters = getattr(config, "rope_parameters", None) or {}
    rope_type = rope_parameters.get("rope_type", "default")
    if rope_type not in ROPE_TYPES:
        raise ValueError(f"RoPE type {rope_type!r} is not supported (supported: {', '.join(ROPE_TYPES)})")
    if rope_parameters.get("partial_rotary_factor", 1.0) != 1.0:
        raise ValueError("RoPE on a part of each head (partial_rotary_factor) is not supported")


def read_config(name):
    """The config of a folder or Hub id; what is Qwen2 under another name is read as Qwen2."""
    fields = PretrainedConfig.get_config_dict(name)[0]
    if fields.get("model_type") not in QWEN2_IN_ALL_BUT_NAME:
        return AutoConfig.from_pretrained(name, trust_remote_code=False)
    foreign = ("model_type", "architectures", "auto_map", "torch_dtype", "dtype", "transformers_version")
    return Qwen2Config(**{key: value for key, value in fields.items() if key not in foreign})


def read_tokenizer(name):
    """The tokenizer of a folder or Hub id, without remote code: Dream's and LLaDA's files are plain ones."""
    kinds = {"Dream": Qwen2Tokenizer, "llada": PreTrainedTokenizerFast}
    kind = PretrainedConfig.get_config_dict(name)[0].get("model_type")
    return kinds.get(kind, AutoTokenizer).from_pretrained(name, trust_remote_code=False)


def from_pretrained(name, dtype, meta=False, config=None, state_dict=None):
    """A causal LM that `walk` can walk, from safetensors and without remote code.

    name: folder or Hub id; or None, with config and state_dict. meta: shapes alone. Raises ValueError unless
    the file held every weight, in its shape, and no layer more: the library fills gaps with random numbers.
    """
    config = config or read_config(name)
    check_config(config)
    if meta:
        with torch.device("meta"):
            return AutoModelForCausalLM.from_config(config, dtype=dtype)
    kind = AutoModelForCausalLM if name else MODEL_FOR_CAUSAL_LM_MAPPING[type(config)]
    model, info = kind.from_pretrained(
        name, config=config, state_dict=state_dict, dtype=dtype, output_loading_info=True,
        use_safetensors=True, trust_remote_code=False, ignore_mismatched_sizes=True)  # fmt: skip
    if any(key.startswith(f"model.layers.{config.num_hidden_layers}.") for key in info["unexpected_keys"]):
        raise ValueError(f"the weights have more layers than the {config.num_hidden_layers} of the config")
    if gaps := sorted([*info["missing_keys"], *(key for key, *_ in info["mismatched_keys"])]):
        raise ValueError(f"weights are missing or of another shape: {', '.join(gaps[:3])}")
    return model


def prepare(backbone):
    """Make the layers of a Hugging Face causal LM answer to `walk` and return it. Safe to repeat.

    The library's own calls stay as they are. RoPE frequencies are computed anew in float32, since the model's
    buffer is cast with the model. Raises ValueError, one line, for what the walk does not cover.
    """
    check_config(backbone.config)
    rotary = type(backbone.model.rotary_emb)(backbone.config).to(backbone.device)
    backbone.rotary = (rotary.inv_freq, rotary.attention_scaling)
    for layer in backbone.model.layers:
        layer.forward = types.MethodType(_layer_forward, layer)
    return backbone


def _layer_forward(layer, hidden, *args, walk=None, **kwargs):
    # through the module's own __call__, so that hooks (FSDP2) see every layer
    if walk is None:
        return type(layer).forward(layer, hidden, *args, **kwargs)
    compiled, walk_args = walk
    if compiled and not kernels.refused("torch.compile"):
        try:
            return _compiled_layer(layer, hidden, *walk_args)
        except kernels.COMPILER_ERRORS as error:
            kernels.refused("torch.compile", error, "layers run as they are")
    return decoder_layer(layer, hidden, *walk_args)


def own_projection(attn, name, x):
    """The projection or norm that the layer calls `name`; D2F and Orthrus pass functions of their own."""
    return getattr(attn, name)(x)


def decoder_layer(layer, hidden, cos, sin, attn_mask, layer_kv=None, write_idx=None, project=own_projection):
    """One decoder layer. hidden (B, T, width) -> (B, T, width).

    layer_kv = (keys, values), each (B, G, max_len, D). With write_idx (T,) this forward's keys and values are
    written there and the first S entries are attended, S being the width of attn_mask. Without write_idx they
    are a read-only context before this forward's own.
    """
    attn = layer.self_attn
    fused = {} if torch.is_grad_enabled() else getattr(layer, "fused", {})  # made by `fuse`
    B, T = hidden.shape[:2]
    x = layer.input_layernorm(hidden)
    if "qkv" in fused and project is own_projection:
        weight, bias, sizes = fused["qkv"]
        q, k, v = F.linear(x, weight, bias).split(sizes, dim=-1)
    else:
        q = project(attn, "q_proj", x)
        k = project(attn, "k_proj", x)
        v = project(attn, "v_proj", x)
    q = q.view(B, T, -1, attn.head_dim)
    k = k.view(B, T, -1, attn.head_dim)
    v = v.view(B, T, -1, attn.head_dim).transpose(1, 2)  # (B, G, T, D)
    if hasattr(attn, "q_norm"):
        q = project(attn, "q_norm", q)
        k = project(attn, "k_norm", k)
    q = rope(q.transpose(1, 2), cos, sin).to(v.dtype)  # (B, H, T, D)
    k = rope(k.transpose(1, 2), cos, sin).to(v.dtype)  # (B, G, T, D)
    if layer_kv is not None:
        keys, values = layer_kv
        if write_idx is None:
            k = torch.cat([keys, k], dim=2)
            v = torch.cat([values, v], dim=2)
        else:
            S = T if isinstance(attn_mask, str) else attn_mask.shape[-1]
            keys.index_copy_(2, write_idx, k.to(keys.dtype))
            values.index_copy_(2, write_idx, v.to(values.dtype))
            k = keys[:, :, :S]
            v = values[:, :, :S]
    x = kernels.attention(q, k, v, attn_mask).transpose(1, 2).reshape(B, T, -1)
    hidden = hidden + project(attn, "o_proj", x)
    x = layer.post_attention_layernorm(hidden)
    if "gate_up" not in fused:
        return hidden + layer.mlp(x)
    weight, bias, sizes = fused["gate_up"]
    gate, up = F.linear(x, weight, bias).split(sizes, dim=-1)
    return hidden + layer.mlp.down_proj(layer.mlp.act_fn(gate) * up)


_compiled_layer = torch.compile(decoder_layer, fullgraph=True, dynamic=False)


def fuse(backbone):
    """q, k, v side by side in one weight, gate and up in another: two products a layer where there were five.

    For decoding: forwards without gradients use them. Layers with anything but plain Linear modules stay as
    they are. Safe to repeat; needed again after weights were moved or cast.
    """
    for layer in backbone.model.layers:
        attn, mlp = layer.self_attn, layer.mlp
        groups = dict(qkv=[attn.q_proj, attn.k_proj, attn.v_proj], gate_up=[mlp.gate_proj, mlp.up_proj])
        present = getattr(layer, "fused", {})
        layer.fused = {}
        for key, linears in groups.items():
            if key in present and present[key][0].data_ptr() == linears[0].weight.data_ptr():
                layer.fused[key] = present[key]  # captured graphs may be reading it
            elif all(type(linear) is torch.nn.Linear for linear in linears):
                weight = side_by_side([linear.weight for linear in linears])
                bias = side_by_side([linear.bias for linear in linears])
                layer.fused[key] = weight, bias, [linear.out_features for linear in linears]


def side_by_side(parts):
    """One tensor of several parameters, which become views of it: no memory is added. None for no biases."""
    if parts[0] is None:
        return None
    joined = torch.cat([part.detach() for part in parts])
    for part, view in zip(parts, joined.split([len(part) for part in parts])):
        part.data = view
    return joined


def walk(backbone, input_ids, position_ids, attn_mask, layer_kvs=None, write_idx=None, *,
         project=own_projection, compiled=None, checkpointing=False):  # fmt: skip
    """Hidden states (B, T, width) after the final norm; the caller applies `lm_head` to the rows it needs.

    input_ids      (B, T) int64, or embeddings (B, T, width)
    position_ids   (B, T) int64, the place of each token in the text: the only thing RoPE sees
    attn_mask      (B or 1, 1, T, S) bool, True = may attend, or a BlockMask: alone decides who sees whom
    layer_kvs      KVCache.layers, or per layer (keys, values) of a read-only context; see decoder_layer
    compiled       one graph a layer; None: where the mask is a BlockMask, that is in training on CUDA
    checkpointing  recompute each layer in backward instead of keeping its activations
    """
    if not hasattr(backbone, "rotary"):
        prepare(backbone)
    if compiled is None:
        compiled = isinstance(attn_mask, BlockMask)
    hidden = input_ids if input_ids.is_floating_point() else backbone.model.embed_tokens(input_ids)
    if not isinstance(attn_mask, BlockMask):
        R = backbone.config.num_attention_heads // backbone.config.num_key_value_heads
        attn_mask = kernels.layer_mask(attn_mask, R, hidden.dtype)
    cos, sin = rope_angles(backbone.rotary, position_ids)
    for index, layer in enumerate(backbone.model.layers):
        layer_kv = None if layer_kvs is None else layer_kvs[index]
        args = (compiled, (cos, sin, attn_mask, layer_kv, write_idx, project))
        if checkpointing and torch.is_grad_enabled():
            hidden = checkpoint(layer, hidden, walk=args, use_reentrant=False)
        else:
            hidden = layer(hidden, walk=args)
    return backbone.model.norm(hidden)


def by_chunks(function, *rows, chunk=2048):
    """function(*rows), rows (n, ...) cut into chunks that are recomputed in backward -> (n, ...) or a tuple.

    What the function makes on the way, as logits (chunk, V), never exists for all rows at once.
    """
    chunks = zip(*(x.split(chunk) for x in rows))
    parts = [checkpoint(function, *part, use_reentrant=False) for part in chunks]
    return torch.cat(parts) if torch.is_tensor(parts[0]) else tuple(torch.cat(part) for part in zip(*parts))


def token_nll(head, hidden, labels, chunk=2048):
    """-log p(label) of each row: (B, T) float32, 0 where the label is -100. Only labelled rows are projected.

    head: hidden (n, width) -> logits (n, V); hidden (B, T, width); labels (B, T) int64.
    """

    def nll(rows, targets):
        return F.cross_entropy(head(rows).float(), targets, reduction="none")

    keep = labels != -100
    losses = by_chunks(nll, hidden[keep], labels[keep], chunk=chunk)
    return torch.zeros(labels.shape, device=labels.device).masked_scatter(keep, losses)


# --------------------------------------------------------------------------------------------------- decoding


def is_eos(token_ids, eos_id):
    """Which of token_ids (...) end a text: (...) bool. eos_id: an id, a list of them, or None: none does."""
    return torch.isin(token_ids, torch.tensor([] if eos_id is None else eos_id, dtype=torch.int64))


class Decoder:
    """A backbone with its KV cache and the replayed forward: what every decoding loop calls.

    decoder(input_ids, position_ids, attn_mask, write_idx), as `walk` takes them, on any device -> hidden
    (B, T, width) on that of the backbone, valid until the next call. `forwards` counts the calls. One Decoder
    serves many prompts (`reset` between them): its graphs are captured once. max_len: most entries that the
    committed and the scratch take. kv_cache: of a Decoder of the same backbone, batch and max_len, to share.
    """

    def __init__(self, backbone, max_len, batch=1, compiled=None, project=own_projection, kv_cache=None):
        self.backbone = prepare(backbone)
        self.project = project
        weight = backbone.model.embed_tokens.weight
        layers = backbone.model.layers
        self.kv_cache = kv_cache or kernels.KVCache(
            len(layers), batch, backbone.config.num_key_value_heads, max_len, layers[0].self_attn.head_dim,
            weight.device, weight.dtype)  # fmt: skip
        self.compiled = weight.is_cuda if compiled is None else compiled
        if weight.is_cuda:
            fuse(backbone)
        self.replay = kernels.GraphReplay(max_len, weight.device)
        self.forwards = 0

    def reset(self):
        """Empty cache, no forwards counted: what a new prompt starts from. Returns self."""
        self.kv_cache.reset()
        self.forwards = 0
        return self

    def keep_rows(self, row_idx):
        """Batch rows row_idx (n,) stay, in this order. Graphs captured for more rows are dropped."""
        self.kv_cache.keep_rows(row_idx)
        self.replay.graphs.clear()

    def forward(self, input_ids, position_ids, attn_mask, write_idx):
        """The call itself, without replay and without counting."""
        compiled = self.compiled and input_ids.shape[1] <= self.replay.QUERY[-1]
        return walk(self.backbone, input_ids, position_ids, attn_mask, self.kv_cache.layers, write_idx,
                    project=self.project, compiled=compiled)  # fmt: skip

    @torch.no_grad()
    def __call__(self, input_ids, position_ids, attn_mask, write_idx):
        self.forwards += 1
        return self.replay(self.forward, input_ids, position_ids, attn_mask, write_idx)


@torch.no_grad()
def generate_ar(model, prompt_ids, cfg, decoder=None, generator=None):
    """Plain greedy decoding, one token a forward: the loop that every method's `generate` is read against.

    prompt_ids (1, P) int64; of cfg: max_new_tokens, eos_id, vocab_len. Returns (seq_ids (1, P+R), record).
    """
    P = prompt_ids.shape[1]
    decoder = (decoder or Decoder(model, P + cfg.max_new_tokens)).reset()
    kv_cache = decoder.kv_cache
    seq_ids = prompt_ids.cpu()
    for _ in range(cfg.max_new_tokens):
        start = kv_cache.cache_len
        n = seq_ids.shape[1] - start  # the prompt, then one token
        position_ids = torch.arange(start, start + n)[None]
        mask = dense(causal(start), 1, n, start + n)
        hidden = decoder(seq_ids[:, start:], position_ids, mask, kv_cache.scratch_idx(n))
        kv_cache.commit(n)
        logits = model.lm_head(hidden[:, -1])[:, : cfg.vocab_len]
        seq_ids = torch.cat([seq_ids, logits.argmax(-1, keepdim=True).cpu()], dim=1)
        if is_eos(seq_ids[0, -1], cfg.eos_id):
            break
    R = seq_ids.shape[1] - P
    return seq_ids.to(prompt_ids.device), {"forwards": R, "rounds": R, "fixed_round": list(range(R))}


# --------------------------------------------------------------------------------------------------- drawings


def draw(mask_mod, queries, keys):
    """A mask as text: one line per query, one column per key, all with their names; # = may attend."""
    width = max(map(len, queries))
    lines = [" " * width + " " + keys]
    for name, row in zip(queries, dense(mask_mod, 1, len(queries), len(keys))[0, 0].tolist()):
        lines.append(f"{name:>{width}} " + "".join("#" if may else "." for may in row))
    return "\n".join(lines)


def trace(tokenizer, ids, record):
    """Rounds of a decode, each a list of (text, round that fixed it or None, struck through), one a token.

    Texts are cut from that of all ids, since a piece of a word or of a character has none of its own: the
    last round joined is that text. Not yet fixed: dots, or the draft that this round rejected, both as wide
    as the final text: record["rejected"] has (round, index, token).
    """
    text = tokenizer.decode(ids)
    cuts = [0]
    for i in range(1, len(ids) + 1):
        before = os.path.commonprefix([tokenizer.decode(ids[:i]), text])
        cuts.append(max(cuts[-1], len(before)))
    rejected = {(number, index): token_id for number, index, token_id in record.get("rejected", ())}
    fixed = record["fixed_round"][: len(ids)]

    def entry(number, i):
        piece = text[cuts[i] : cuts[i + 1]]
        if fixed[i] <= number:
            return piece, fixed[i], False
        if (number, i) not in rejected:
            return "·" * len(piece), None, False
        draft = tokenizer.decode([*ids[:i], rejected[number, i]])[cuts[i] :]
        return draft[: len(piece)].ljust(len(piece)), number, True

    return [[entry(number, i) for i in range(len(fixed))] for number in sorted(set(fixed))]


def on_one_line(text):
    """As many characters, each of which prints: a line break as ⏎, other control characters as �."""
    return re.sub(r"[\x00-\x1f\x7f-\x9f]", "�", text.replace("\n", "⏎"))


def show_trace(rounds, seconds):
    """One line a round; on a terminal at the decode's pace and, unless NO_COLOR is set, a colour a round.

    A rejected draft is struck through and reversed, or where there are no colours, has ~ below it.
    """
    on_terminal = sys.stdout.isatty()
    coloured = on_terminal and not os.environ.get("NO_COLOR")
    # code 16 + 36 r + 6 g + b, r, g, b < 6: those of middle lightness, for light and for dark terminals
    codes = [16 + i for i in range(216) if 8 <= 2 * (i // 36) + 5 * (i // 6 % 6) <= 14]
    for number, row in enumerate(rounds, 1):
        if on_terminal:
            time.sleep(seconds / len(rounds))
        line, below = "", ""
        for text, n, struck in row:
            text = on_one_line(text)
            below += ("~" if struck else " ") * len(text)
            if coloured and n is not None:
                text = f"\033[{'7;9;' * struck}38;5;{codes[n * 29 % len(codes)]}m{text}\033[0m"
            line += text
        print(f"  round {number:>3} | {line}", flush=True)
        if "~" in below and not coloured:
            print(f"   rejected | {below.rstrip()}")


def trace_svg(rounds, prompt=""):
    """The same as one self-contained picture (text of an SVG file), the prompt on top."""
    lines = [html.escape(on_one_line(prompt))] if prompt else []
    width = len(prompt)
    for number, row in enumerate(rounds, 1):
        line = f"round {number:>3} | "
        width = max(width, len(line) + sum(len(text) for text, _, _ in row))
        for text, n, struck in row:
            style = 'fill="#888"'
            if n is not None:
                style = f'fill="hsl({40 + n * 173 % 280},70%,34%)"'  # steps of the golden angle, but no red
            if struck:
                style = 'fill="#e00" text-decoration="line-through"'
            line += f"<tspan {style}>{html.escape(on_one_line(text))}</tspan>"
        lines.append(line)
    size = f'width="{width * 8.5 + 16:.0f}" height="{len(lines) * 20 + 12}"'
    svg = f'<svg xmlns="http://www.w3.org/2000/svg" {size} font-family="monospace" font-size="14">'
    svg += '<rect width="100%" height="100%" fill="#fff"/>'
    body = [f'<text x="8" y="{i * 20}" xml:space="preserve">{line}</text>' for i, line in enumerate(lines, 1)]
    return "\n".join([svg, *body, "</svg>\n"])


if __name__ == "__main__":
    packed = torch.tensor([[0, 0, 0, 1, 1, 2, 2, 2]])
    drawings = [
        ("full: everything sees everything (LLaDA, Dream, D2F's teacher)", full(), "012345", "012345"),
        ("causal: plain AR; ReFusion's buffer [prompt | clean | masked slots]", causal(), "012345", "012345"),
        ("causal(offset=4): 3 new queries after 4 cached keys", causal(4), "012", "cccc012"),
        ("segments: causal sequences packed in one row (CoDiLA)", segments(packed), "01234567", "00011222"),
        ("completion_rows: ReFusion, 3 committed keys (c), slots of 4 (a, b), offsets 1.. are recomputed",
         completion_rows(3, 4, 1), "a1 a2 a3 b1 b2 b3".split(), "cccaaaabbbb"),
        ("block_causal: D2F, prompt of 3 (p), response blocks of 2",
         block_causal(2, torch.tensor([3])), "012345678", "ppp001122"),
        ("block_causal: Fast-dLLM v2, blocks of 4 from the first token; 4 queries after 4 cached",
         block_causal(4, offset=4), "0123", "cccc1111"),
        ("noisy_clean: Fast-dLLM v2 training, 3 blocks of 2, noisy (n) then clean (c) tokens",
         noisy_clean(6, 2), "n0 n1 n2 n3 n4 n5 c0 c1 c2 c3 c4 c5".split(), "nnnnnncccccc"),
        ("dual_view: Orthrus training, 6 AR keys (a), two diffusion blocks of 3 with anchors at 2 and 4",
         dual_view(6, 3, torch.tensor([[2, 4]])), "0a 0m 0m 1a 1m 1m".split(), "aaaaaa000111"),
        ("merged_views: Orthrus --merged, 3 cached keys (c), 3 AR rows (a), groups at AR rows 0 and 2",
         merged_views(3, 3, 2, torch.tensor([0, 2])), "a a a 0 0 2 2".split(), "cccaaa0022"),
    ]  # fmt: skip
    print("One line per query, one column per key: # = may attend, . = may not.\n")
    for title, *mask in drawings:
        print(title, draw(*mask), sep="\n", end="\n\n")
