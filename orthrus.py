"""Orthrus: a second, diffusion view in a frozen AR model; training step and lossless decoding on a Hugging Face LM.

Paper         Orthrus: Memory-Efficient Parallel Token Generation via Dual-View Diffusion, arXiv 2605.12825
Idea          Every layer of a frozen AR model gets a second attention. One pass of it over [last token, mask, ...]
              drafts a block of tokens, reading the keys and values that the AR model has cached. The AR model then
              checks the block in one pass and keeps what it would have written itself.
Differs       from plain AR: 1. two forwards a cycle, 1 to block_size tokens  2. only the added attention learns, from
              the AR view's own distribution  3. the text is that of the AR model, whatever the added weights are
Implements    anchored blocks behind a clean row -> make_training_inputs, both_views; forward KL -> training_loss;
              draft, verify, keep the longest agreeing prefix -> generate; rejection sampling -> accept
Left out      decoding of several prompts at once; more than one EOS id; the authors' empty system turn; all answers
              of a conversation but the last as text to learn
Not as in     the published code, which has no training step: probabilities are at least float32; the cache is never
              copied, a draft's keys and values are scratch that verification overwrites; EOS may be id 0
Run           python orthrus.py --train --generate                        (tiny backbone, CPU)
              python orthrus.py --generate --model chiennv/Orthrus-Qwen3-1.7B --prompt "..."
              python orthrus.py --generate --model HuggingFaceTB/SmolLM2-135M-Instruct    (untrained: right, but slow)
"""

import argparse
import collections
import contextlib
import copy
import dataclasses
import json
import math
import os
import random
import re
import shutil
import signal
import sys
import tempfile
import time
import types
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from safetensors import safe_open
from safetensors.torch import save_file
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import distribute_tensor
from torch.utils.checkpoint import checkpoint
from tqdm import tqdm
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    PreTrainedTokenizerFast,
    Qwen3Config,
    Qwen3ForCausalLM,
)
from transformers.utils import cached_file, logging

import common
from common import (
    Decoder,
    build_mask,
    causal,
    dense,
    dual_view,
    full,
    generate_ar,
    merged_views,
    prepare,
    token_nll,
    walk,
)
from kernels import GraphReplay, notice

METHOD = "orthrus"


@dataclasses.dataclass
class Config:
    # what all five scripts share
    model: str = "tiny"  # Hub id, folder, or the built-in backbone
    data: str = ""  # JSONL; empty: the built-in task
    out: str = f"runs/{METHOD}"
    steps: int = 7400  # [paper] two epochs of 472 k rows
    ar_steps: int = 0  # plain AR fine-tuning before the method's own steps; kept as the AR baseline
    batch_size: int = 128  # [paper]
    accumulation: int = 1  # micro-batches a step (128 in the paper: rows one by one); changes memory, not results
    lr: float = 2e-4  # [paper] cosine; this, batch_size, warmup and clip by summaries of its appendix
    ar_lr: float = 2e-5  # of the AR stage
    warmup: float = 0.05  # [paper] share of the steps
    lr_floor: float = 0.1  # [code] share of lr at the end, of a later training code as beta2 and weight_decay are
    beta2: float = 0.95  # [code] AdamW
    weight_decay: float = 0.0  # [code]
    clip: float = 1.0  # [paper]
    max_len: int = 2048  # [paper] T, tokens of a training row
    max_new_tokens: int = 128
    problems: int = 64  # held-out problems decoded when no prompt is given
    temperature: float = 0.0  # [code]
    top_p: float = 0.8  # [code] of the target as of the draft; not looked at when greedy
    seed: int = 0
    device: str = "cuda" if torch.cuda.is_available() else "cpu"
    dtype: str = "bfloat16" if torch.cuda.is_available() else "float32"
    compile: bool = torch.cuda.is_available()
    save_every: int = 500
    mask_id: int | None = None  # None: from the model and its tokenizer
    eos_id: int | None = None
    vocab_len: int | None = None  # rows of the head behind the last token are never an output
    # Orthrus
    block_size: int = 0  # K, the anchor included; 0: what the checkpoint says, else 32  [paper]
    anchors: int = 256  # [paper] M, blocks a training row
    packing: bool = True  # [code] conversations end to end, cut to max_len; else one a row
    loss: str = "kl"  # [paper]; "ce" learns the text instead of the AR view's distribution
    top_k: int = 20  # [code] like top_p
    merged: int = 0  # [ours] more than 0: also decode with one forward a cycle, carrying so many groups
    checkpointing: bool = False  # recompute layers in backward


# what `--model tiny` changes
TINY = dict(steps=400, ar_steps=350, batch_size=64, lr=3e-3, ar_lr=3e-3, warmup=0.02, lr_floor=0.0, max_len=96,
            max_new_tokens=32, block_size=8, anchors=4, packing=False)  # fmt: skip
TEMPLATE = {"enable_thinking": False}  # arguments of the chat template  [code]


# ---------------------------------------------------------------------------------------------------- the second view

VIEW = ("q_proj", "k_proj", "v_proj", "o_proj", "q_norm", "k_norm")  # what a layer has of these is doubled


def attach(backbone, tensors):
    """Give every layer a second attention, freeze all the rest. Returns the backbone.

    tensors: {"model.layers.{l}.self_attn.{name}_diff.weight": tensor}, or {} to start as copies of the AR ones  [paper]
    Raises ValueError where names or shapes are not those of this backbone.
    """
    backbone.requires_grad_(False)
    for attn in (layer.self_attn for layer in backbone.model.layers):
        for name in VIEW:
            if hasattr(attn, name):
                setattr(attn, f"{name}_diff", copy.deepcopy(getattr(attn, name)).requires_grad_())
    own = {name: p for name, p in backbone.named_parameters() if p.requires_grad}
    needed, given = ({(name, p.shape) for name, p in part.items()} for part in (own, tensors or own))
    if wrong := needed ^ given:
        raise ValueError(f"the diffusion tensors do not belong to this backbone: {min(wrong)[0]} is missing or alien")
    backbone.load_state_dict(tensors, strict=False)
    return backbone


def diffusion_projection(attn, name, x):
    """For common.walk: the layer's second set. Embedding, layer norms, MLPs and head stay the shared ones."""
    return getattr(attn, f"{name}_diff")(x)


# ------------------------------------------------------------------------------------------------------- training step


def pack_rows(rows, cfg):
    """Rows of {"input_ids", "is_answer"}, lists of the same length; is_answer marks answer tokens, the EOS included.

    packing: conversations end to end, cut to max_len tokens, the rest dropped, nothing between them  [code]. Else one
    conversation a row, and so much EOS behind it that a block may be anchored at any token that has a next one  [ours].
    """
    rows, pad = (rows, 0) if cfg.packing else (keep_short(rows, cfg), cfg.block_size - 2)
    single = [dict(input_ids=row["prompt_ids"] + row["answer_ids"] + [cfg.eos_id] * pad,
                   is_answer=[False] * len(row["prompt_ids"]) + [True] * len(row["answer_ids"]) + [False] * pad)
              for row in rows]  # fmt: skip
    if not cfg.packing:
        return single
    text = {name: [x for row in single for x in row[name]] for name in single[0]}
    T = min(cfg.max_len, len(text["input_ids"]))
    if T <= cfg.block_size:
        raise ValueError(f"rows of {T} tokens have no room for a block of {cfg.block_size} behind its context")
    starts = range(0, len(text["input_ids"]) - T + 1, T)
    return [{name: column[start : start + T] for name, column in text.items()} for start in starts]


def draw_noise(batch, cfg, generator):
    """Where the blocks of each row are anchored: answer tokens, without replacement, the whole block inside the row.

    batch: rows of pack_rows. Returns a list of dicts: anchors, M positions, ascending; anchor_valid, M bools, False for
    the fillers of a row with fewer than M candidates.
    """
    draws, M = [], cfg.anchors
    for row in batch:
        last = len(row["input_ids"]) - cfg.block_size
        candidates = [a for a in range(1, last + 1) if row["is_answer"][a]]
        picks = torch.randperm(len(candidates), generator=generator)[:M].tolist()
        anchors = sorted(candidates[i] for i in picks)
        filler = anchors[-1:] or [0]
        draws.append(dict(anchors=anchors + filler * (M - len(picks)), anchor_valid=[i < len(picks) for i in range(M)]))
    return draws


def make_training_inputs(batch, draws, cfg):
    """Clean rows, and M blocks a row for the diffusion view.

        input_ids (B, T)         the row; padding on the right
        anchors (B, M)           a: a block sees the clean row strictly before its anchor
        block_ids (B, M, K)      x[a]   <mask>  <mask>  ...      one real token, the rest is to be guessed
        position_ids (B, M, K)   a      a+1     a+2     ...
        labels (B, M, K-1)       x[a+1] x[a+2]  ...              shifted: a row predicts the token behind it, the last
                                                                 mask of a block predicts nothing
        weights (B, M, K-1)      float32, the loss is sum(weights * loss of a row): 1 / (rows of the whole batch that
                                 count), 0 where the target is no answer token or the anchor a filler
    """
    K, T = cfg.block_size, max(cfg.block_size, *(len(row["input_ids"]) for row in batch))
    T = -(-T // 128) * 128 if cfg.device.startswith("cuda") else T  # few lengths, few compilations
    input_ids, is_answer = (torch.tensor([row[name] + [0] * (T - len(row[name])) for row in batch])
                            for name in ("input_ids", "is_answer"))  # fmt: skip
    anchors, valid = (torch.tensor([draw[name] for draw in draws]) for name in ("anchors", "anchor_valid"))
    position_ids = anchors[..., None] + torch.arange(K)  # (B, M, K)
    block_ids = F.pad(input_ids.gather(1, anchors)[..., None], (0, K - 1), value=cfg.mask_id)
    targets = torch.arange(len(batch))[:, None, None], position_ids[..., 1:]
    keep = valid[..., None] & is_answer.bool()[targets]
    return dict(input_ids=input_ids, anchors=anchors, block_ids=block_ids, position_ids=position_ids,
                labels=input_ids[targets], weights=keep / keep.sum().clamp(min=1))  # fmt: skip


def both_views(model, inputs, cfg):
    """Hidden states of the AR view (B, T, width), no gradient, and of the diffusion view (B, M, K, width).

    One AR pass over the clean rows is the context of the blocks and their teacher.
    """
    (B, T), (_, M, K), device = inputs["input_ids"].shape, inputs["block_ids"].shape, inputs["input_ids"].device
    layers, positions, dtype = model.model.layers, torch.arange(T, device=device), getattr(torch, cfg.dtype)
    shape = B, model.config.num_key_value_heads, T, layers[0].self_attn.head_dim
    context = [[torch.empty(shape, device=device, dtype=dtype) for _ in range(2)] for _ in layers]  # keys, values
    with torch.no_grad():
        mask = build_mask(causal(), 1, T, T, device)
        ar_hidden = walk(model, inputs["input_ids"], positions.expand(B, T), mask, context, positions)
    mask = build_mask(dual_view(T, K, inputs["anchors"]), B, M * K, T + M * K, device)
    hidden = walk(model, inputs["block_ids"].view(B, -1), inputs["position_ids"].view(B, -1), mask, context,
                  project=diffusion_projection, checkpointing=cfg.checkpointing)  # fmt: skip
    return ar_hidden, hidden.view(B, M, K, -1)


def row_losses(model, student, teacher, labels, cfg, chunk=1024):
    """Loss of each row, (R,) float32. student, teacher (R, width) hidden states, labels (R,) int64.

        kl:  sum_v p_AR(v) (log p_AR(v) - log p_diff(v)), temperature 1, the whole vocabulary
        ce:  -log p_diff(label)

    The head is applied in chunks that are recomputed in backward: logits (R, V) never exist.
    """

    def loss(student, teacher, labels):
        log_q = model.lm_head(student).float().log_softmax(-1)
        if cfg.loss == "ce":
            return F.nll_loss(log_q, labels, reduction="none")
        with torch.no_grad():
            log_p = model.lm_head(teacher).float().log_softmax(-1)
        return F.kl_div(log_q, log_p, reduction="none", log_target=True).sum(-1)

    chunks = zip(student.split(chunk), teacher.split(chunk), labels.split(chunk))
    return torch.cat([checkpoint(loss, *rows, use_reentrant=False) for rows in chunks])


def training_loss(model, inputs, cfg):
    """Mean loss of the blocks' rows that count, against the AR view at the same position. Returns (loss, logs)."""
    ar_hidden, hidden = both_views(model, inputs, cfg)
    weights = inputs["weights"]
    b, m, i = weights.nonzero(as_tuple=True)  # the rows that count; none: the loss is 0
    teacher = ar_hidden[b, inputs["position_ids"][b, m, i]]  # both rows stand at a+i and predict the token at a+i+1
    losses = row_losses(model, hidden[b, m, i], teacher, inputs["labels"][b, m, i], cfg)
    return (weights[b, m, i] * losses).sum(), {"rows": len(b)}


# ------------------------------------------------------------------------------------------------------------ decoding


def sampling_probs(logits, cfg):
    """Temperature, then top-k, then top-p, of draft and target alike. (n, V) -> (n, V), at least float32  [code]"""
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32)) / cfg.temperature
    if cfg.top_k:
        kth = logits.topk(min(cfg.top_k, logits.shape[-1])).values[:, -1:]
        logits = logits.masked_fill(logits < kth, -torch.inf)  # ties stay
    if cfg.top_p < 1:
        probs, order = logits.softmax(-1).sort(descending=True, stable=True)
        before = F.pad(probs.cumsum(-1)[:, :-1], (1, 0))  # mass of the likelier tokens; 0 for the first, which stays
        logits = logits.masked_fill((before > cfg.top_p).scatter(-1, order, before > cfg.top_p), -torch.inf)
    return logits.softmax(-1)


def uniform(n, generator):
    """(n,) float64 in [0, 1): the only source of chance in decoding."""
    return torch.rand(n, generator=generator, dtype=torch.float64)


def draw_token(probs, u):
    """The first token at which the cumulative probability passes u. (n, V), (n,) -> (n,) int64"""
    cumulative = probs.double().cumsum(-1)
    bar = u.to(probs.device, non_blocking=True)[:, None] * cumulative[:, -1:]
    return torch.searchsorted(cumulative, bar, right=True)[:, 0].clamp(max=probs.shape[-1] - 1)


def propose(logits, cfg, generator):
    """Tokens, on the CPU, and the distributions they were drawn from. (n, V) -> (n,), (n, V) or None when greedy"""
    if cfg.temperature < 1e-5:
        return logits.argmax(-1).cpu(), None
    probs = sampling_probs(logits, cfg)
    return draw_token(probs, uniform(len(probs), generator)).cpu(), probs


def accept(draft_ids, draft_probs, logits, cfg, generator):
    """How many drafts the AR view keeps, and its own next token. Exact for any drafts.

    draft_ids (n,) on the CPU, draft_probs (n, V) or None, logits (n+1, V) of the AR view. Returns (accepted_len,
    next_id (1,) on the CPU). Greedy: the longest prefix that equals the argmax. Else a draft d is kept with probability
    min(1, p(d) / q(d)), and behind the first that is not the next token is drawn from max(p - q, 0), behind the last
    draft from p.
    """
    n = len(draft_ids)
    if cfg.temperature < 1e-5:
        verify_ids = logits.argmax(-1).cpu()
        accepted_len = (draft_ids == verify_ids[:n]).cumprod(0).sum().item()
        return accepted_len, verify_ids[accepted_len : accepted_len + 1]
    verify_probs = sampling_probs(logits, cfg)  # (n+1, V)
    draft_idx = draft_ids.to(logits.device, non_blocking=True)[:, None]
    p, q = (probs[:n].gather(-1, draft_idx)[:, 0] for probs in (verify_probs, draft_probs))
    kept = uniform(n, generator).to(logits.device, non_blocking=True) * q < p
    accepted_len = kept.cumprod(0).sum()  # stays on the device, so that nothing waits before the next token is drawn
    residual = (verify_probs[:n] - draft_probs).clamp(min=0)
    residual = torch.where(residual.sum(-1, keepdim=True) > 0, residual, verify_probs[:n])  # all 0: rounding
    next_probs = torch.cat([residual, verify_probs[n:]])[accepted_len[None]]
    next_id = draw_token(next_probs, uniform(1, generator))
    return accepted_len.item(), next_id.cpu()


def forward(decoder, ids, mask_mod, cfg, offsets=None):
    """Logits (n, V) of ids (n,) behind the committed part of the cache, which ends right before the anchor.

    offsets (n,): how far behind it in the text each id stands; None: one after the other.
    """
    start, n = decoder.kv_cache.cache_len, len(ids)
    positions = start + (torch.arange(n) if offsets is None else offsets)
    mask = dense(mask_mod, 1, n, start + n)
    return decoder(ids[None], positions[None], mask, decoder.kv_cache.scratch_idx(n))[0, :, : cfg.vocab_len]


@torch.no_grad()
def generate(model, prompt_ids, cfg, decoder=None, generator=None):
    """Draft a block through the diffusion view, verify it through the AR view, until EOS or max_new_tokens. Batch 1.

    prompt_ids (1, P) int64; the state of the loop lies on the CPU. Returns (seq_ids (1, P+R), record): in exact
    arithmetic the text of plain AR decoding, the first EOS its last token; forwards, rounds, fixed_round (R,), rejected
    (round, index, token id) and cycles (anchor_pos, draft_ids, accepted_len). Cycle 0 is the prefill, which gives the
    first token and has no draft.
    Raises ValueError for a batch or an empty prompt.
    """
    check(cfg)
    if prompt_ids.shape[0] != 1 or prompt_ids.shape[1] == 0 or cfg.block_size == 0:
        raise ValueError(f"Orthrus decodes one prompt of at least one token, not {tuple(prompt_ids.shape)}, "
                         f"in blocks of at least 2, not {cfg.block_size}")  # fmt: skip
    P, seq_ids = prompt_ids.shape[1], prompt_ids[0].cpu()
    views = decoder or new_decoder(model, P, cfg)
    kv_cache, fixed_round, rejected, cycles, ended = views.ar.kv_cache, [], [], [], False
    for view in views[:3]:
        view.reset()
    draft_logits = torch.empty(0, 1, device=prompt_ids.device)  # nothing is drafted in front of the prefill
    while not ended:  # seq_ids is x_0 .. x_a, and the cache holds 0 .. a-1: all but the anchor x_a
        a, start, room = len(seq_ids) - 1, kv_cache.cache_len, P + cfg.max_new_tokens - len(seq_ids)
        # propose: one pass of the diffusion view, where all see all; what it writes to the cache stays scratch
        if draft_logits is None:
            block_ids = F.pad(seq_ids[a:], (0, min(cfg.block_size - 1, room)), value=cfg.mask_id)
            draft_logits = forward(views.diffusion, block_ids, full(), cfg)[:-1]  # shifted: row i is for x_{a+i+1}
        draft_logits = draft_logits[:room]
        draft_ids, draft_probs = propose(draft_logits, cfg, generator)
        # score: one pass of the AR view over the anchor (at first the prompt) and the drafts
        ar_ids = torch.cat([seq_ids[start:], draft_ids])
        if cfg.merged:  # it carries the next draft along
            group_idx = a - start + likeliest_lengths(draft_logits, cfg.merged)
            logits, groups = verify_and_draft(views, ar_ids, group_idx, cfg)
        else:
            logits, groups = forward(views.ar, ar_ids, causal(start), cfg), {}
        # select
        accepted_len, next_id = accept(draft_ids, draft_probs, logits[a - start :], cfg, generator)
        # commit: the anchor's and the accepted drafts' AR keys and values; the AR view's own token is the next anchor
        kv_cache.commit(a - start + accepted_len + 1)
        draft_logits = groups.get(a - start + accepted_len)
        new_ids = torch.cat([draft_ids[:accepted_len], next_id])[:room].tolist()
        ended = len(new_ids) == room or cfg.eos_id in new_ids
        new_ids = new_ids[: new_ids.index(cfg.eos_id) + 1] if cfg.eos_id in new_ids else new_ids
        seq_ids = torch.cat([seq_ids, torch.tensor(new_ids, dtype=torch.int64)])
        rejected += [(len(cycles), a + 1 + i - P, draft_ids[i].item()) for i in range(accepted_len, len(draft_ids))]
        fixed_round += [len(cycles)] * len(new_ids)
        cycles.append(dict(anchor_pos=a, draft_ids=draft_ids.tolist(), accepted_len=accepted_len))
    record = dict(forwards=sum(view.forwards for view in views[:3]), rounds=len(cycles), fixed_round=fixed_round,
                  rejected=rejected, cycles=cycles)  # fmt: skip
    return seq_ids[None].to(prompt_ids.device), record


# -------------------------------------------------------------------------------- --merged: one forward a cycle  [ours]


def merged_projection(is_group):
    """Both views in one forward: rows where is_group (rows,) bool is set go through the second set.  [ours]"""

    def project(attn, name, x):
        rows = is_group[: x.shape[1]].view(1, -1, *[1] * (x.dim() - 2))
        return torch.where(rows, getattr(attn, f"{name}_diff")(x), getattr(attn, name)(x))

    return project


def likeliest_lengths(logits, count):
    """The `count` likeliest acceptance lengths by the drafts' confidences. (m, V) -> (<= count,), ascending  [ours]

    P(j) = c_1 .. c_j (1 - c_{j+1}), c_i the probability of draft i and c_{m+1} = 0.
    """
    conf = logits.float().softmax(-1).amax(-1).cpu()  # (m,)
    probs = F.pad(conf.cumprod(0), (1, 0), value=1.0) * F.pad(1 - conf, (0, 1), value=1.0)  # (m+1,)
    return probs.topk(min(count, len(probs))).indices.sort().values


def verify_and_draft(views, ar_ids, group_idx, cfg):
    """One forward: AR rows ar_ids (n,), and a block [token, mask, ...] on each AR row of group_idx (w,).  [ours]

    If the AR view keeps the drafts up to that row, rows 1 .. K-2 of its block guess what follows the AR view's next
    token, unseen. Returns (logits of the AR rows (n, V), {AR row: logits (K-2, V)}).
    """
    n, w, K = len(ar_ids), len(group_idx), cfg.block_size
    block_ids = F.pad(ar_ids[group_idx, None], (0, K - 1), value=cfg.mask_id)  # (w, K)
    offsets = torch.cat([torch.arange(n), (group_idx[:, None] + torch.arange(K)).flatten()])
    views.is_group.zero_()[n : n + w * K] = True
    mask_mod = merged_views(views.merged.kv_cache.cache_len, n, K, group_idx)
    logits = forward(views.merged, torch.cat([ar_ids, block_ids.flatten()]), mask_mod, cfg, offsets)
    return logits[:n], dict(zip(group_idx.tolist(), logits[n:].view(w, K, -1)[:, 1 : K - 1]))


# -------------------------------------------------------------------------------------- what the frame asks of a script


OWN_FLAGS = {}  # flags of this script alone: name -> (arguments of add_argument, function(cfg, value))
Views = collections.namedtuple("Views", "ar diffusion merged is_group")  # three Decoders, one cache; see new_decoder


def check(cfg):
    """Raise ValueError, one line, for settings that cannot work."""
    if cfg.block_size == 1 or cfg.block_size < 0:
        raise ValueError(f"block_size counts the anchor: at least 2 (or 0: the checkpoint's), not {cfg.block_size}")
    if cfg.loss not in ("kl", "ce"):
        raise ValueError(f"loss is kl or ce, not {cfg.loss!r}")
    if cfg.anchors < 1 or cfg.top_k < 0 or cfg.merged < 0:
        raise ValueError("anchors must be at least 1, top_k and merged at least 0")


def read_view(name):
    """The `_diff` tensors in the safetensors files of a folder or Hub id: {key: tensor}, {} where there are none."""
    with contextlib.suppress(OSError):
        cached_file(name, "diffusion.safetensors")  # fetched from the Hub, where a repository holds them apart
    folder, tensors = Path(cached_file(name, "config.json")).parent, {}
    for path in [*folder.glob("model*.safetensors"), *folder.glob("diffusion.safetensors")]:
        with safe_open(path, "pt") as file:
            tensors |= {key: file.get_tensor(key) for key in file.keys() if "_diff." in key}
    return tensors


def load_backbone(name, dtype):
    """A Hugging Face causal LM and the diffusion tensors beside or in it.

    The released checkpoint is a plain Qwen3 with `_diff` keys that the library drops: they are read again. A folder of
    ours may name its untouched backbone in backbone.json instead of holding it.
    """
    file = Path(name, "backbone.json")
    source = json.loads(file.read_bytes())["source"] if file.is_file() else None
    config = AutoConfig.from_pretrained(name, trust_remote_code=False)  # with our block_size and mask_token_id
    backbone = common.from_pretrained(AutoModelForCausalLM, source or name, config=config, dtype=dtype)
    backbone.source = source or (str(Path(name).resolve()) if Path(name).is_dir() else name)
    backbone.view = read_view(name)
    return backbone


def load_tokenizer(name):
    return AutoTokenizer.from_pretrained(name, trust_remote_code=False)


def enter_stage(model, stage, folder, cfg):
    """The model at the start of a stage of training, or as loaded for decoding.

    "ar" trains the backbone, which makes it another one than that it was loaded as. The method's stage freezes it.
    """
    view = vars(model).pop("view", {})
    if stage == "ar":
        model.source = None
        return model
    cfg.block_size = model.config.block_size = cfg.block_size or getattr(model.config, "block_size", 32)
    if folder is not None and not view:
        notice("the diffusion view is untrained, its weights are copies: the text is right, tokens per forward are few")
    return attach(model, view)


def save_method(model, folder, cfg):
    """The diffusion tensors alone, under their published names; beside them the backbone, or where it lies untouched.

    Both files put together are the released layout. The AR stage has no such tensors: those of an earlier run go.
    """
    source, tensors = getattr(model, "source", None), model.state_dict()
    view = {key: tensor.contiguous() for key, tensor in tensors.items() if "_diff." in key}
    save_file(view, folder / "diffusion.safetensors", metadata={"format": "pt"})
    (folder / "backbone.json").write_text(json.dumps({"source": source}))
    if source:
        model.config.save_pretrained(folder)
    else:
        plain = {key: tensor for key, tensor in tensors.items() if key not in view}
        model.save_pretrained(folder, state_dict=plain, max_shard_size="1000GB")


def plain_lm(model):
    """What plain AR decoding runs on where there is no AR baseline: the AR view is the untouched model."""
    return model


def spare_mask_id(backbone, tokenizer):
    """A mask token for a backbone that names none: the first row of its embedding that no token uses  [code].

    Without such a row the last added token that is not EOS: its frozen embedding is as good a sign as any  [ours].
    """
    rows, eos_id = backbone.get_input_embeddings().num_embeddings, tokenizer.eos_token_id
    if len(tokenizer) < rows:
        return len(tokenizer)
    added = [i for i in tokenizer.added_tokens_decoder if i < rows and i != eos_id]
    mask_id = max(added or {*range(rows)} - {eos_id})
    word = tokenizer.convert_ids_to_tokens(mask_id)
    notice(f"the embedding has no spare row: token {mask_id} ({word}) stands for the mask, its embedding frozen")
    return mask_id


def new_decoder(model, prompt_len, cfg):
    """Decoders of the AR view, the diffusion view and both at once, on one cache with room for all that they write."""
    groups = min(cfg.merged, cfg.block_size) * cfg.block_size
    max_len = prompt_len + cfg.max_new_tokens + groups
    is_group = torch.zeros(max_len + GraphReplay.MAX_QUERY, dtype=torch.bool, device=model.device)  # padded
    ar = Decoder(model, max_len, compiled=cfg.compile)
    diffusion, merged = (Decoder(model, max_len, compiled=cfg.compile, project=project, kv_cache=ar.kv_cache)
                         for project in (diffusion_projection, merged_projection(is_group)))  # fmt: skip
    return Views(ar, diffusion, merged, is_group)


def stages(cfg):
    """The stages of training, in order: a plain AR model of the data first, if asked for, then the method."""
    return [
        Stage("ar", cfg.ar_steps, cfg.ar_lr, keep_short, None, make_ar_inputs, ar_loss),
        Stage(METHOD, cfg.steps, cfg.lr, pack_rows, draw_noise, make_training_inputs, training_loss),
    ]


def decoders(cfg):
    """(label, generate) of each decoding that `--generate` puts beside plain AR."""

    def two_forwards(model, prompt_ids, cfg, *rest):
        return generate(model, prompt_ids, dataclasses.replace(cfg, merged=0), *rest)

    return [(METHOD, two_forwards)] + [(f"{METHOD}, merged, {cfg.merged} groups", generate)] * (cfg.merged > 0)


def problem(rng):
    """One problem of the built-in task: (prompt, worked answer)."""
    name = rng.choice("Tom Ann Ben Eva Sam Zoe Max Ida".split())
    thing = rng.choice("pens cups hats keys cars toys".split())
    first, second = rng.sample("red blue green black white".split(), 2)
    a, b, c = (rng.randint(1, 9) for _ in range(3))
    prompt = f"{name} has {a} {first} and {b} {second} {thing} and gets {c} more. How many {thing}?"
    return prompt, f" {a}+{b}={a + b}. {a + b}+{c}={a + b + c}. {name} has {a + b + c} {thing}."


def is_right(prompt, text, reference):
    """GSM8K answers are judged by the number behind ####, others as they stand."""
    if "####" in reference:
        text, reference = (part.partition("####")[2].replace(",", "") for part in (text, reference))
    return text.strip() == reference.strip()


# ========================================================= frame: the same text in all five scripts, compared by a test
# Data, the built-in backbone, plain AR as the baseline, the optimiser loop, checkpoints, the command line.

# of training; see `fit` and `stages`; draw is None where there is no noise
Stage = collections.namedtuple("Stage", "name steps lr pack draw build loss")


def padded_len(rows, cfg):
    """Columns for these rows; on CUDA a multiple of 128: few lengths, few compilations."""
    longest = max(len(row["prompt_ids"]) + len(row["answer_ids"]) for row in rows)
    return -(-longest // 128) * 128 if cfg.device.startswith("cuda") else longest


def keep_short(rows, cfg):
    """Rows of at most max_len tokens; the others are dropped, not cut, and counted on stderr."""
    short = [row for row in rows if len(row["prompt_ids"]) + len(row["answer_ids"]) <= cfg.max_len]
    if not short:
        raise ValueError(f"all {len(rows)} rows are longer than max_len {cfg.max_len}")
    if n_long := len(rows) - len(short):
        print(f"{n_long} of {len(rows)} rows are longer than max_len {cfg.max_len}: dropped", file=sys.stderr)
    return short


def make_ar_inputs(batch, draws, cfg):
    """Plain AR rows, prompt | answer | padding: label i is token i+1 where that is an answer token."""
    T = padded_len(batch, cfg)
    input_ids, labels = torch.full((len(batch), T), cfg.eos_id), torch.full((len(batch), T), -100)
    for i, row in enumerate(batch):
        P, ids = len(row["prompt_ids"]), torch.tensor(row["prompt_ids"] + row["answer_ids"])
        input_ids[i, : len(ids)], labels[i, P - 1 : len(ids) - 1] = ids, ids[P:]
    return {"input_ids": input_ids, "labels": labels, "weights": (labels != -100) / (labels != -100).sum()}


def ar_loss(model, inputs, cfg):
    """Mean next-token loss over the answer tokens of the whole batch. Returns (loss, logs)."""
    (B, T), device = inputs["input_ids"].shape, inputs["input_ids"].device
    positions = torch.arange(T, device=device).expand(B, T)
    hidden = walk(model, inputs["input_ids"], positions, build_mask(causal(), 1, T, T, device))
    return (inputs["weights"] * token_nll(model, hidden, inputs["labels"])).sum(), {}


def tiny_backbone(cfg):
    """A small Qwen3 of random weights, and a tokenizer whose tokens are the words and digits of the built-in task."""
    pattern, rng, special = " ?[A-Za-z]+| ?[0-9]|[^A-Za-z0-9]", random.Random(0), ["<eos>", "<mask>", "<unk>"]
    words = sorted({word for _ in range(2000) for text in problem(rng) for word in re.findall(pattern, text)})
    vocab = {word: i for i, word in enumerate(special + words)}
    spec = {
        "version": "1.0",
        "added_tokens": [],
        "pre_tokenizer": {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False},
        "decoder": {"type": "Fuse"},
        "model": {"type": "WordLevel", "vocab": vocab, "unk_token": "<unk>"},
    }
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "tokenizer.json")
        file.write_text(json.dumps(spec))
        names = {"eos_token": "<eos>", "mask_token": "<mask>", "unk_token": "<unk>"}
        tokenizer = PreTrainedTokenizerFast(tokenizer_file=str(file), **names)
    torch.manual_seed(cfg.seed)
    config = Qwen3Config(
        vocab_size=len(vocab), hidden_size=128, intermediate_size=384, num_hidden_layers=4, num_attention_heads=4,
        num_key_value_heads=2, head_dim=32, max_position_embeddings=4096, tie_word_embeddings=True, eos_token_id=0,
        mask_token_id=1, bos_token_id=None, pad_token_id=None,
    )  # fmt: skip
    return Qwen3ForCausalLM(config), tokenizer


def load(name, cfg, training):
    """(backbone, tokenizer) of a Hub id, a folder or `tiny`; sets cfg.mask_id, cfg.eos_id and cfg.vocab_len.

    Weights are float32 while training (bfloat16 enters by autocast), else cfg.dtype. A backbone to be trained that has
    no mask token gets one: a spare row of its embedding if there is one, else a new row near the mean of the others.
    Raises ValueError, one line, for whatever cannot be loaded or has no mask or EOS token.
    """
    try:
        if name == "tiny":
            backbone, tokenizer = tiny_backbone(cfg)
        else:
            tokenizer = load_tokenizer(name)
            backbone = load_backbone(name, torch.float32 if training else getattr(torch, cfg.dtype))
        encode(tokenizer, [{"role": "user", "content": "a"}], "a")  # what is wrong with it shows here
    except Exception as error:
        raise ValueError(f"cannot load model {name!r}: {' '.join(str(error).split())[:300]}") from error
    mask_id, known = getattr(backbone.config, "mask_token_id", None), tokenizer.get_vocab()
    for word in (tokenizer.mask_token, "<|mask|>", "|<MASK>|", "<|mdm_mask|>"):
        mask_id = known.get(word) if mask_id is None else mask_id
    mask_id = spare_mask_id(backbone, tokenizer) if mask_id is None else mask_id
    if mask_id is None and training:
        tokenizer.add_special_tokens({"mask_token": "<|mask|>"})
        mask_id = tokenizer.mask_token_id
        if mask_id >= backbone.get_input_embeddings().num_embeddings:
            torch.manual_seed(cfg.seed)
            backbone.resize_token_embeddings(mask_id + 1)
    cfg.mask_id, cfg.eos_id, cfg.vocab_len = mask_id, tokenizer.eos_token_id, len(tokenizer)
    if cfg.mask_id is None or cfg.eos_id is None:
        raise ValueError(f"model {name!r} has no {'mask' if cfg.mask_id is None else 'EOS'} token")
    if cfg.mask_id == cfg.eos_id:
        raise ValueError(f"mask and EOS must be two tokens, model {name!r} has {cfg.eos_id} for both")
    ids, rows = [*tokenizer.get_vocab().values(), cfg.mask_id], backbone.get_input_embeddings().num_embeddings
    if not all(type(i) is int and 0 <= i < rows for i in ids):
        raise ValueError(f"model {name!r} has an embedding of {rows} rows and token ids outside of it")
    backbone.config.mask_token_id = cfg.mask_id
    backbone.model.embed_tokens.padding_idx = None  # or EOS used as padding would get no gradient
    return prepare(backbone.to(cfg.device)), tokenizer


def read_problems(cfg):
    """(training, held-out) problems, each (messages, answer). Held out: the last cfg.problems rows, at most half."""
    pairs, problems = (("prompt", "response"), ("question", "answer"), ("query", "response")), []
    if not cfg.data:  # a dict: each prompt once, so that what is held out is unseen
        rng = random.Random(cfg.seed)
        texts = dict(problem(rng) for _ in range(6000 + cfg.problems))
        problems = [([{"role": "user", "content": prompt}], answer) for prompt, answer in texts.items()]
    for number, line in enumerate(Path(cfg.data).read_bytes().split(b"\n") if cfg.data else [], 1):
        try:
            row = json.loads(line) if line.strip() else {"messages": None}
            names = next((pair for pair in pairs if pair[0] in row), ("", ""))
            messages = row["messages"] if "messages" in row else [
                {"role": role, "content": row[name]} for role, name in zip(("user", "assistant"), names)]  # fmt: skip
            if messages:
                if messages[-1]["role"] != "assistant":
                    raise ValueError
                [m[key].encode() for m in messages for key in ("role", "content")]  # text, or one of the errors below
                problems.append((messages[:-1], messages[-1]["content"]))
        except (ValueError, TypeError, AttributeError, LookupError, RecursionError):
            raise ValueError(f"{cfg.data}, line {number}: not a JSON object with prompt/response, question/answer, "
                             "query/response or messages that end with the assistant's") from None  # fmt: skip
    if not problems:
        raise ValueError(f"{cfg.data} has no rows")
    held_out = min(cfg.problems, max(len(problems) // 2, 1))
    return problems[:-held_out] or problems, problems[-held_out:]


def encode(tokenizer, messages, answer=""):
    """Token ids (lists): the prompt in the model's chat form, the answer closed by EOS."""
    text = "\n".join(message["content"] for message in messages)
    (text + answer).encode()  # half a character raises ValueError
    if tokenizer.chat_template:
        try:
            text = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False, **TEMPLATE)
        except Exception as error:
            raise ValueError(f"the chat template refuses {str(messages)[:200]}: {error}") from error
    prompt_ids = tokenizer(text, add_special_tokens=not tokenizer.chat_template)["input_ids"]
    answer_ids = tokenizer(answer, add_special_tokens=False)["input_ids"]
    return {"prompt_ids": prompt_ids, "answer_ids": [*answer_ids, tokenizer.eos_token_id]}


def write_folder(out, write, last="model.safetensors"):
    """Let write(folder) fill a folder beside `out`, fsync, rename: each file is replaced whole, `last` at the end."""
    out, tmp = Path(out), Path(f"{out}.tmp")
    shutil.rmtree(tmp, ignore_errors=True)
    tmp.mkdir(parents=True)
    write(tmp)
    files = [path for path in tmp.rglob("*") if path.is_file()]
    files.sort(key=lambda path: path.name == last)
    for path in files:
        with open(path, "rb") as file:
            os.fsync(file.fileno())
    if out.exists():
        for path in files:
            (out / path.relative_to(tmp)).parent.mkdir(exist_ok=True)
            os.replace(path, out / path.relative_to(tmp))
        shutil.rmtree(tmp)
    else:
        tmp.rename(out)


def save(model, tokenizer, cfg, stage, step, tensors):
    """A Hugging Face folder in cfg.out, with settings.json and the training state: what is trained, the optimiser."""

    def write(folder):
        save_file(tensors, folder / "training_state.safetensors", metadata={"stage": stage, "step": str(step)})
        (folder / "settings.json").write_text(json.dumps({"method": METHOD, **dataclasses.asdict(cfg)}, indent=1))
        tokenizer.save_pretrained(folder)
        save_method(model, folder, cfg)

    partly = not all(p.requires_grad for p in model.parameters())  # then the state counts once the frozen rest is there
    write_folder(cfg.out, write, "training_state.safetensors" if partly else "model.safetensors")


def read_state(folder):
    """(stage, step, tensors) of the last save. Raises ValueError where there is none."""
    try:
        with safe_open(Path(folder, "training_state.safetensors"), "pt") as file:
            meta = file.metadata()
            return meta["stage"], int(meta["step"]), {key: file.get_tensor(key) for key in file.keys()}
    except Exception as error:
        raise ValueError(f"nothing to resume in {folder}: {error}") from error


def batch_at(rows, step, size, seed):
    """The `size` rows of a step, from the seed alone: each pass over the data has a permutation of its own."""

    def order(epoch):
        return torch.randperm(len(rows), generator=torch.Generator().manual_seed(seed * 1_000_003 + epoch)).tolist()

    picks = range(step * size, (step + 1) * size)
    orders = {epoch: order(epoch) for epoch in {i // len(rows) for i in picks}}
    return [rows[orders[i // len(rows)][i % len(rows)]] for i in picks]


def ranks(cfg):
    """(rank, world size): (0, 1), or torchrun's, with the process group started and this rank's device chosen."""
    world = int(os.environ.get("WORLD_SIZE", 1))
    if world > 1 and not dist.is_initialized():
        if cfg.device.startswith("cuda"):
            cfg.device = f"cuda:{os.environ['LOCAL_RANK']}"
            torch.cuda.set_device(cfg.device)
        dist.init_process_group("nccl" if cfg.device.startswith("cuda") else "gloo")
    return (dist.get_rank(), world) if world > 1 else (0, 1)


def shard(model, stage, cfg):
    """A copy of the model, sharded by FSDP2 layer by layer; its forward is the loss: there the sharding hooks stand."""
    low = torch.bfloat16 if cfg.dtype == "bfloat16" else None
    policy = MixedPrecisionPolicy(param_dtype=low, reduce_dtype=torch.float32)
    live = copy.deepcopy(model).to(cfg.device)
    live.forward = types.MethodType(lambda self, inputs: stage.loss(self, inputs, cfg), live)
    for module in [*live.modules()]:
        if hasattr(module, "input_layernorm"):
            fully_shard(module, mp_policy=policy)
    return fully_shard(live, mp_policy=policy)


def whole(tensor):
    """A tensor, or all of a sharded one."""
    return (tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor).detach().contiguous()


def fit(model, tokenizer, stage, rows, cfg, state=None):
    """One stage of training: AdamW, linear warm-up, cosine to lr_floor. Returns the losses.

    Step s takes its rows and its noise from (seed, s) alone, so a resumed run repeats an uninterrupted one. The loss's
    weights are set over the whole batch before it is cut into micro-batches and ranks: neither changes the gradient.
    """
    rank, world = ranks(cfg)
    start, tensors = state[1:] if state and state[0] == stage.name else (0, {})
    trained = {name: (p.shape, p.dtype) for name, p in model.named_parameters() if p.requires_grad}
    fitting = {f"{key}.{name}": kind for key in ("param", "exp_avg", "exp_avg_sq") for name, kind in trained.items()}
    if tensors and fitting != {key: (value.shape, value.dtype) for key, value in tensors.items()}:
        raise ValueError(f"the training state in {cfg.out} is of another model")
    for name, p in model.named_parameters():
        p.data.copy_(tensors.get(f"param.{name}", p))
    live = shard(model, stage, cfg) if world > 1 else model
    names = {name: p for name, p in live.named_parameters() if p.requires_grad}
    optimizer = torch.optim.AdamW(names.values(), stage.lr, (0.9, cfg.beta2), weight_decay=cfg.weight_decay)
    for name, p in names.items() if tensors else ():
        pair = {key: tensors[f"{key}.{name}"].to(p.device) for key in ("exp_avg", "exp_avg_sq")}
        if world > 1:
            pair = {key: distribute_tensor(value, p.device_mesh, p.placements) for key, value in pair.items()}
        optimizer.state[p] = {"step": torch.tensor(float(start)), **pair}
    stopped, losses, tokens, clock, parts = [], [], 0, time.time(), cfg.accumulation * world
    usual = signal.signal(signal.SIGINT, lambda *_: stopped.append(True))  # Ctrl-C: finish the step, save, go
    autocast = torch.autocast(torch.device(cfg.device).type, torch.bfloat16, enabled=cfg.dtype == "bfloat16")
    title = f"{METHOD}: {stage.name}"
    bar = tqdm(range(start, stage.steps), title, initial=start, total=stage.steps, mininterval=1, disable=rank > 0)
    live.train()
    try:
        for step in bar:
            generator = torch.manual_seed((cfg.seed * 1_000_003 + step) * 2 + 1)  # noise and dropout
            batch = batch_at(rows, step, cfg.batch_size * world, cfg.seed)
            inputs = stage.build(batch, stage.draw and stage.draw(batch, cfg, generator), cfg)
            tokens, loss = tokens + inputs["input_ids"].numel(), 0.0
            for part in range(rank, parts, world):
                micro = {key: value[part::parts].to(cfg.device) for key, value in inputs.items()}
                with autocast:
                    part_loss, logs = live(micro) if world > 1 else stage.loss(model, micro, cfg)
                (part_loss * world).backward()  # sharded gradients are means over the ranks
                loss += part_loss.item()
            if world > 1:
                total = torch.tensor([loss, len(stopped)], dtype=torch.float64, device=cfg.device)
                dist.all_reduce(total)
                loss, stopped = total[0].item(), [True] * int(total[1])
            if not math.isfinite(loss):
                raise FloatingPointError(f"loss {loss} at step {step} of stage {stage.name}; the last save stays")
            torch.nn.utils.clip_grad_norm_(names.values(), cfg.clip)
            rate = cfg.lr_floor + (1 - cfg.lr_floor) * (1 + math.cos(math.pi * step / stage.steps)) / 2
            for group in optimizer.param_groups:
                group["lr"] = stage.lr * min(rate, (step + 1) / max(cfg.warmup * stage.steps, 1))
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss)
            bar.set_postfix(loss=f"{loss:.3f}", **logs, tok_s=f"{tokens / (time.time() - clock):,.0f}", refresh=False)
            if stopped or step + 1 == stage.steps or (step + 1) % cfg.save_every == 0:
                for (_, p), (_, q) in zip(model.named_parameters(), live.named_parameters() if world > 1 else ()):
                    p.data.copy_(whole(q))
                held = {f"param.{name}": whole(p) for name, p in names.items()}
                for key in ("exp_avg", "exp_avg_sq"):
                    held |= {f"{key}.{name}": whole(optimizer.state[p][key]) for name, p in names.items()}
                if rank == 0:
                    save(model, tokenizer, cfg, stage.name, step + 1, held)
            if stopped:
                raise KeyboardInterrupt
    finally:
        signal.signal(signal.SIGINT, usual)
    return losses


def train(cfg, resume):
    """All stages of training, into cfg.out. What the AR stage gives stays in cfg.out/ar as the baseline."""
    held = read_settings(cfg.out)
    if not resume and Path(cfg.out).exists() and (held.get("method"), held.get("model")) != (METHOD, cfg.model):
        raise ValueError(f"{cfg.out} holds something else than {METHOD} on {cfg.model}: name another --out")
    above = next(path for path in Path(cfg.out).absolute().parents if path.exists())
    if not (above.is_dir() and os.access(above, os.W_OK)):
        raise ValueError(f"{above}, where {cfg.out} is to lie, cannot be written to")
    state = read_state(cfg.out) if resume else None
    model, tokenizer = load(cfg.out if resume else cfg.model, cfg, training=True)
    rows = [encode(tokenizer, *problem) for problem in read_problems(cfg)[0]]
    if not all(row["prompt_ids"] for row in rows):
        raise ValueError(f"{cfg.data}: a prompt has no tokens")
    todo = [stage for stage in stages(cfg) if stage.steps > 0]
    if not state and todo[:1] and todo[0].name != "ar":
        shutil.rmtree(f"{cfg.out}/ar", ignore_errors=True)  # the baseline of an earlier run
    if state:
        todo = todo[[stage.name for stage in todo].index(state[0]) :]
    for stage in todo:
        here = state is not None and state[0] == stage.name
        model = enter_stage(model, stage.name, cfg.out if here else None, cfg)
        losses = fit(model, tokenizer, stage, stage.pack(rows, cfg), cfg, state)
        if losses:
            print(f"{METHOD}: {stage.name}: loss {losses[0]:.3f} -> {losses[-1]:.3f} in {len(losses)} steps")
        if stage.name == "ar" and ranks(cfg)[0] == 0:
            write_folder(f"{cfg.out}/ar", lambda tmp: (model.save_pretrained(tmp), tokenizer.save_pretrained(tmp)))


def trim(ids, cfg):
    """New tokens as a user wants them: up to and including the first EOS, at most max_new_tokens. (n,) -> list"""
    ids = ids.tolist()[: cfg.max_new_tokens]
    return ids[: ids.index(cfg.eos_id) + 1] if cfg.eos_id in ids else ids


def measure(label, run, decoder, model, tokenizer, problems, cfg, shown=0, show=()):
    """Decode the problems one by one, print the first `shown` texts. Returns the figures, ratios of totals."""
    outputs, forwards, seconds, right, generator = [], 0, 0.0, 0, torch.Generator().manual_seed(cfg.seed)
    rank, world = ranks(cfg)
    for number, (messages, reference) in enumerate(problems[rank::world]):
        prompt_ids = torch.tensor([encode(tokenizer, messages)["prompt_ids"]], device=cfg.device)
        if number == 0 and cfg.device.startswith("cuda"):
            run(model, prompt_ids, cfg, decoder, generator)  # compiles and captures, outside the clock
        clock = time.time()
        seq_ids, record = run(model, prompt_ids, cfg, decoder, generator)
        outputs.append(trim(seq_ids[0, prompt_ids.shape[1] :], cfg))
        lap = time.time() - clock
        seconds += lap
        forwards += record["forwards"]
        text = tokenizer.decode(outputs[-1], skip_special_tokens=True)
        right += reference is not None and is_right(messages[-1]["content"], text, reference)
        if number < shown:
            print(f"{messages[-1]['content']}\n  {label}: {text.strip()}", flush=True)
            if "trace" in show:
                common.show_trace(common.trace(tokenizer, outputs[-1], record), lap)
            if "trace_svg" in show and number == 0:
                Path(show["trace_svg"]).write_text(common.trace_svg(common.trace(tokenizer, outputs[-1], record)))
    if world > 1:
        every = [None] * world
        dist.all_gather_object(every, (outputs, forwards, seconds, right))
        outputs, forwards, right = (sum((part[i] for part in every), start) for i, start in ((0, []), (1, 0), (3, 0)))
        seconds = max(part[2] for part in every)
    new_tokens = sum(map(len, outputs))
    return {"label": label, "problems": len(problems), "new_tokens": new_tokens, "forwards": forwards,
            "tokens_per_forward": round(new_tokens / max(forwards, 1), 3), "tok_s": round(new_tokens / seconds, 1),
            "right": right if problems[0][1] is not None else None, "outputs": outputs}  # fmt: skip


def compare(cfg, folder, prompts, show):
    """Decode held-out problems (or the prompts) by the method and by plain AR in one run; last line of stdout: JSON."""
    model, tokenizer = load(folder, cfg, training=False)
    baseline = load(f"{folder}/ar", cfg, training=False)[0] if Path(folder, "ar").exists() else None
    model = enter_stage(model, METHOD, folder, cfg).train(False)
    problems = [([{"role": "user", "content": prompt}], None) for prompt in prompts] or read_problems(cfg)[1]
    lengths = [len(encode(tokenizer, messages)["prompt_ids"]) for messages, _ in problems]
    if min(lengths) == 0 or max(lengths) > cfg.max_len:
        raise ValueError(f"prompts must have 1 to max_len = {cfg.max_len} tokens, not {min(lengths)} to {max(lengths)}")
    table, shown = [], len(prompts) or max(1, 4 // len(decoders(cfg)))
    for label, run in decoders(cfg):
        decoder = new_decoder(model, max(lengths), cfg)
        table.append(measure(label, run, decoder, model, tokenizer, problems, cfg, shown, show if not table else ()))
    label, lm = ("plain AR", baseline) if baseline else ("plain AR, same weights", plain_lm(model))
    decoder = Decoder(lm, max(lengths) + cfg.max_new_tokens, compiled=cfg.compile)
    table.append(measure(label, generate_ar, decoder, lm, tokenizer, problems, cfg))
    ar = dict(table[-1])
    for row in table:
        same = sum(ids == ar_ids for ids, ar_ids in zip(row.pop("outputs"), ar["outputs"]))
        row |= {"x_ar": round(row["tok_s"] / ar["tok_s"], 2), "same_as_ar": same}
        right = "" if row["right"] is None else f" | {row['right']}/{row['problems']} right"
        print(f"{row['label']}: new_tokens {row['new_tokens']} | forwards {row['forwards']} | tokens_per_forward "
              f"{row['tokens_per_forward']:.2f} | {row['tok_s']:,.1f} tok/s | {row['x_ar']:.2f} x AR"
              f" | {same}/{row['problems']} same as AR{right}")  # fmt: skip
    print(json.dumps({"method": METHOD, "device": cfg.device, "dtype": cfg.dtype, "rows": table}))


def read_settings(folder):
    """What a folder of ours was trained with, or {}. Raises ValueError where the file is not what `save` wrote."""
    file = Path(folder, "settings.json")
    held = json.loads(file.read_bytes()) if file.is_file() else {}
    right = type(held) is dict
    for field in dataclasses.fields(Config) if right else ():
        value = held.get(field.name, field.default)
        right &= isinstance(value, field.type) and isinstance(value, bool) == (field.type is bool)  # True is an int
    if not right:
        raise ValueError(f"{file} is not a settings file of this script")
    return held


def check_common(cfg):
    """Raise ValueError, one line, for common settings that cannot work."""
    for name in ("batch_size", "accumulation", "max_len", "max_new_tokens", "problems", "save_every"):
        if getattr(cfg, name) < 1:
            raise ValueError(f"{name} must be at least 1, not {getattr(cfg, name)}")
    if cfg.batch_size % cfg.accumulation:
        raise ValueError(f"batch_size {cfg.batch_size} is not a multiple of accumulation {cfg.accumulation}")
    if cfg.dtype not in ("float32", "bfloat16"):
        raise ValueError(f"dtype is float32 or bfloat16, not {cfg.dtype}")
    if not (0 <= cfg.temperature < math.inf and 0 < cfg.top_p <= 1 and cfg.lr > 0 and cfg.clip > 0):
        raise ValueError("temperature must be >= 0 and finite, top_p in (0, 1], lr and clip > 0")
    if not 0 <= cfg.seed < 2**31:
        raise ValueError(f"seed must lie in [0, 2**31), not {cfg.seed}")
    if not re.fullmatch(r"cpu|cuda(:\d+)?", cfg.device) or (cfg.device != "cpu" and not torch.cuda.is_available()):
        raise ValueError(f"there is no device {cfg.device} here")


def usage_error(message):
    print(f"{METHOD}.py: {' '.join(str(message).split())}", file=sys.stderr)
    return 2


def parse(argv):
    """(args, cfg). A flag wins over what a folder was trained with, that over what `tiny` changes, that over Config."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.error = lambda message: sys.exit(usage_error(message))
    for flag in ("train", "generate", "resume", "trace"):
        parser.add_argument(f"--{flag}", action="store_true")
    parser.add_argument("--prompt", action="append", default=[])
    parser.add_argument("--trace-svg", metavar="FILE", help="the first decode, round by round, as a picture")
    for flag, (kind, _) in OWN_FLAGS.items():
        parser.add_argument(f"--{flag}", **kind)
    fields = [field for field in dataclasses.fields(Config) if field.default is not None]
    for field in fields:
        kind = {"action": argparse.BooleanOptionalAction} if field.type is bool else {"type": field.type}
        parser.add_argument(f"--{field.name}", help=f"default {field.default}", **kind)
    args = vars(parser.parse_args(argv))
    given = {field.name: args[field.name] for field in fields if args[field.name] is not None}
    held = read_settings(given.get("out", Config.out) if args["resume"] else given.get("model", ""))
    mine = () if args["resume"] else ("model", "out", "device", "dtype", "compile")  # of a machine, not of a model
    base = {field.name: held[field.name] for field in fields if field.name in held and field.name not in mine}
    return args, Config(**((base or (TINY if given.get("model", "tiny") == "tiny" else {})) | given))


def main(argv=None):
    """Exit status 0; 2 with one line on stderr for bad input, 1 for a loss that is not finite, 130 on Ctrl-C."""
    logging.set_verbosity_error()  # what is wrong is said in one line
    logging.disable_progress_bar()
    logging.captureWarnings(True)
    try:
        args, cfg = parse(argv)
        own = [(run, args[flag]) for flag, (_, run) in OWN_FLAGS.items() if args[flag] is not None]
        if not (args["train"] or args["generate"] or own):
            raise ValueError("nothing to do: say --train, --generate or both")
        check_common(cfg)
        check(cfg)
        if ranks(cfg)[0] > 0:
            sys.stdout = open(os.devnull, "w")  # rank 0 speaks for all
        if args["train"]:
            train(cfg, args["resume"])
            if dist.is_initialized():
                dist.barrier()  # what rank 0 saved is there for all
        if args["generate"]:
            show = {name: args[name] for name in ("trace", "trace_svg") if args[name]}
            compare(cfg, cfg.out if args["train"] else cfg.model, args["prompt"], show)
        for run, value in own:
            run(cfg, value)
    except (ValueError, OSError) as error:
        return usage_error(error)
    except FloatingPointError as error:
        print(f"{METHOD}.py: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print(f"{METHOD}.py: interrupted", file=sys.stderr)
        return 130
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()
    return 0


if __name__ == "__main__":
    sys.exit(main())
