"""Orthrus: a second, diffusion view inside a frozen AR model drafts what the AR view verifies, without loss.

Paper         Orthrus: Memory-Efficient Parallel Token Generation via Dual-View Diffusion
              arXiv 2605.12825v1 (numbers in brackets are of this version), https://arxiv.org/abs/2605.12825
              average tokens per forward 3.89 at 1.7B, 5.39 at 8B (in time 4.25 and 5.36 x AR)  [Table 1, §4]
Idea          Every layer of a frozen AR model gets a second attention. One pass of it over [last token,
              masks] drafts a block of tokens, reading the keys and values that the AR model has cached. The
              AR model then verifies the block in one pass and keeps what it would have written itself.
Differs       from plain AR: 1. two forwards a round, for 1 to block_size tokens  2. only the added attention
              is trained, on the AR view's distribution  3. the text stays the AR model's, exactly
Implements    dual view [§3.1] -> attach, diffusion_projection; anchored blocks, dual-pass mask, forward KL
              [§3.2] -> draw_noise, make_training_inputs, training_loss; drafts, consensus [§3.3] -> generate
Left out      decoding of several prompts at once; the authors' empty system turn
Not as in     the paper: W_O and the norms of q and k are doubled too (the code's choice)
              the code: probabilities are float32; the cache is never copied; EOS may be 0 or a list; too long
              rows are dropped, not cut. Its training step came later, for Qwen3.5, and learns the text (ce)
Run           python orthrus.py --train --generate            (tests/tiny, CPU)
              python orthrus.py --generate --model chiennv/Orthrus-Qwen3-1.7B --prompt "..."
"""

import argparse
import atexit
import collections
import contextlib
import copy
import dataclasses
import fcntl
import inspect
import json
import math
import os
import re
import shutil
import signal
import sys
import threading
import time
from datetime import timedelta
from pathlib import Path
from typing import Literal, get_args

import torch
import torch.distributed as dist
import torch.distributed.checkpoint.state_dict as dcp
import torch.nn.functional as F
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from tqdm import tqdm
from transformers import PretrainedConfig
from transformers.utils import cached_file, logging

import common
from common import Decoder, build_mask, by_chunks, causal, dense, dual_view, from_pretrained, full
from common import generate_ar, is_eos, kernels, merged_views, padded_len, walk

METHOD = "orthrus"
HERE = Path(__file__).resolve().parent


@dataclasses.dataclass
class Config:
    # what all five scripts share
    model: str = f"{HERE}/tests/tiny/ar"  # Hub id or folder of the backbone
    data: str = f"{HERE}/tests/tiny/train.jsonl"  # JSONL to train on
    test: str = ""  # JSONL to decode
    problems: int = 64  # most rows of it to decode
    out: str = f"runs/{METHOD}"  # folder of the saves
    steps: int = 7400  # [§4, App. A] two epochs of 472 k rows
    batch_size: int = 128  # [Table 4] rows a step, over all processes
    accumulation: int = 0  # forwards a step and process, 0: one row each; changes memory, not results
    lr: float = 2e-4  # [Table 4] cosine to lr_floor
    warmup: float = 0.05  # [Table 4] share of the steps
    lr_floor: float = 0.1  # [code] share of lr at the end
    beta2: float = 0.95  # [code] AdamW
    weight_decay: float = 0.0  # [code]
    clip: float = 1.0  # [Table 4] largest norm of the gradient
    max_len: int = 2048  # [§4] tokens; longer rows are dropped
    save_every: int = 500  # steps
    checkpointing: bool = False  # recompute layers in backward
    max_new_tokens: int = 128
    temperature: float = 0.0  # [code] of drafts and text
    seed: int = 0
    device: str = "cuda" if torch.cuda.is_available() else "cpu"
    dtype: Literal["bfloat16", "float32"] = "bfloat16" if torch.cuda.is_available() else "float32"
    baseline: str = ""  # plain AR model to compare with; without it the model that was trained on
    mask_id: int | None = None
    eos_id: int | list | None = None  # of a list each ends a text
    vocab_len: int | None = None  # rows of the head from here on are no tokens
    text_len: int | None = None  # most positions of the model
    # Orthrus
    block_size: int = 32  # K, the anchor included [Table 4]
    anchors: int = 256  # M, blocks a training row [§4]
    packing: bool = True  # [App. A] conversations end to end, cut into rows of max_len; else one a row
    objective: Literal["kl", "ce"] = "kl"  # [§3.2]; ce: learn the text, not the AR view's distribution [code]
    top_k: int = 20  # [code] of drafts and text, 0: off; of no effect at temperature 0, as top_p
    top_p: float = 0.8  # [code]
    merged: int = 0  # [ours] above 0: decode also with one forward a round, that carries so many next drafts


# what the model of tests/tiny changes
TINY = dict(test=f"{HERE}/tests/tiny/test.jsonl", steps=400, batch_size=32, accumulation=1, lr=3e-3,
            lr_floor=0.0, beta2=0.98, max_len=96, max_new_tokens=32, block_size=16, anchors=2,
            packing=False)  # fmt: skip
LIMITS = dict(block_size=(2, 4096), anchors=(1, 65536), top_k=(0, 10**9), top_p=(1e-9, 1), merged=(0, 4096))
TEMPLATE = {"enable_thinking": False}  # arguments of the chat template  [code]


# ---------------------------------------------------------------------------------------------- training step


def pack_rows(rows, cfg):
    """Training rows, each (2, n) int64: token ids, and 1 where the token is of an answer, its EOS included.

    packing: conversations end to end, cut into rows of max_len, the rest dropped [App. A]. Else one a row.
    Raises ValueError where a packed row has no room for a block.
    """
    packed = []
    for row in rows:
        is_answer = [0] * len(row["prompt_ids"]) + [1] * len(row["answer_ids"])
        packed.append(torch.tensor([row["prompt_ids"] + row["answer_ids"], is_answer]))
    if cfg.packing:
        text = torch.cat(packed, dim=1)
        T = min(cfg.max_len, text.shape[1])
        need(T > cfg.block_size, f"rows of {T} tokens have no room for a block of {cfg.block_size}")
        packed = text[:, : text.shape[1] // T * T].split(T, dim=1)
    return packed


def draw_noise(batch, cfg, generator):
    """The M anchors of each row of pack_rows: answer tokens, uniform, without replacement.  [§3.2]

    In packed rows a block lies inside the row [code]; a conversation alone in its row may have blocks that
    reach beyond its end [ours], where nothing is learnt. Returns {"anchors": (B, M) int64, ascending;
    "is_valid": (B, M) bool, False for what fills up a row of fewer}.
    """
    anchors = torch.zeros(len(batch), cfg.anchors, dtype=torch.int64)  # 0 is no candidate
    for r, row in enumerate(batch):
        last = max(row.shape[1] - (cfg.block_size if cfg.packing else 2), 0)
        candidates = row[1, 1 : last + 1].nonzero()[:, 0] + 1
        picks = torch.randperm(len(candidates), generator=generator)[: cfg.anchors]
        anchors[r, : len(picks)] = candidates[picks].sort().values
    return {"anchors": anchors, "is_valid": anchors > 0}


def make_training_inputs(batch, draws, cfg):
    """Clean rows for the AR view, and M blocks a row for the diffusion view.  [§3.2]

        input_ids     (B, T)       the clean row, padded, so that all blocks find their labels
        anchors       (B, M)       a: its block sees the clean row strictly before a
        block_ids     (B, M, K)    x[a]    <mask>  <mask>  ...  <mask>
        position_ids  (B, M, K)    a       a+1     a+2     ...  a+K-1
        labels        (B, M, K-1)  x[a+1]  x[a+2]  ...          shifted: a row predicts the token after its
                                                                own, the last mask nothing [code]
        weights       (B, M, K-1)  1 / (rows of the batch that count), 0 where the label is no answer token or
                                   the anchor not valid: the loss is sum(weights * losses of the rows)
    """
    K = cfg.block_size
    T = padded_len(max(row.shape[1] for row in batch) + K - 2, cfg.device)
    input_ids, is_answer = torch.stack([F.pad(row, (0, T - row.shape[1])) for row in batch], dim=1)
    anchors = draws["anchors"]
    position_ids = anchors[..., None] + torch.arange(K)  # (B, M, K)
    block_ids = F.pad(input_ids.gather(1, anchors)[..., None], (0, K - 1), value=cfg.mask_id)
    targets = (torch.arange(len(batch))[:, None, None], position_ids[..., 1:])
    counts = draws["is_valid"][..., None] & is_answer[targets].bool()
    return dict(input_ids=input_ids, anchors=anchors, block_ids=block_ids, position_ids=position_ids,
                labels=input_ids[targets], weights=counts / counts.sum().clamp(min=1))  # fmt: skip


def both_views(model, inputs, cfg):
    """Hidden states of the AR view (B, T, width), no gradient, and of the diffusion view (B, M, K, width).

    One AR pass over the clean rows is the context of all blocks, and their teacher.  [§3.2, Fig. 2(a)]
    """
    B, T = inputs["input_ids"].shape
    M, K = inputs["block_ids"].shape[1:]
    device = inputs["input_ids"].device
    layers = model.model.layers
    shape = (B, model.config.num_key_value_heads, T, layers[0].self_attn.head_dim)
    place = dict(device=device, dtype=getattr(torch, cfg.dtype))
    context = [(torch.empty(shape, **place), torch.empty(shape, **place)) for _ in layers]  # keys, values
    positions = torch.arange(T, device=device)
    with torch.no_grad():
        mask = build_mask(causal(), 1, T, T, device)
        ar_hidden = walk(model, inputs["input_ids"], positions.expand(B, T), mask, context, positions)
    mask = build_mask(dual_view(T, K, inputs["anchors"]), B, M * K, T + M * K, device)
    hidden = walk(model, inputs["block_ids"].view(B, -1), inputs["position_ids"].view(B, -1), mask, context,
                  project=diffusion_projection, checkpointing=cfg.checkpointing)  # fmt: skip
    return ar_hidden, hidden.view(B, M, K, -1)


def training_loss(model, inputs, cfg):
    """Mean loss of the rows that count, 0 where none does: forward KL, AR view to diffusion view.  [§3.2]

        kl:  sum_v p_AR(v) (log p_AR(v) - log p_diff(v)), temperature 1, the whole vocabulary
        ce:  -log p_diff(label)  [code]

    The teacher of row i of a block is the AR view at the same position a+i: both predict the token at a+i+1.
    Returns (loss, {"rows": (n,) float32}): of each row that counts.
    """

    def row_losses(student, teacher, labels):  # (n, width), (n, width), (n,) -> (n,)
        log_q = model.lm_head(student).float().log_softmax(-1)
        if cfg.objective == "ce":
            return F.nll_loss(log_q, labels, reduction="none")
        log_p = model.lm_head(teacher).float().log_softmax(-1)  # no gradient: states and head are frozen
        return F.kl_div(log_q, log_p, reduction="none", log_target=True).sum(-1)

    ar_hidden, hidden = both_views(model, inputs, cfg)
    b, m, i = inputs["weights"].nonzero(as_tuple=True)
    teacher = ar_hidden[b, inputs["position_ids"][b, m, i]]
    rows = by_chunks(row_losses, hidden[b, m, i], teacher, inputs["labels"][b, m, i])
    return (inputs["weights"][b, m, i] * rows).sum(), {"rows": rows.detach()}


# --------------------------------------------------------------------------------------------------- decoding


def nucleus(probs, top_p):
    """The likeliest tokens, each while the mass before it is at most top_p, renormalised. (n, V) -> (n, V)"""
    ordered, order = probs.sort(dim=-1, descending=True, stable=True)
    before = F.pad(ordered.cumsum(-1)[..., :-1], (1, 0))
    kept = ordered.masked_fill(before > top_p, 0)
    return torch.zeros_like(probs).scatter(-1, order, kept / kept.sum(-1, keepdim=True))


def draw_token(probs, u):
    """The first token at which the cumulative probability passes u. (n, V), (n,) float64 -> (n,) int64"""
    cumulative = probs.double().cumsum(-1)
    bar = u.to(probs.device, non_blocking=True)[:, None] * cumulative[:, -1:]
    return torch.searchsorted(cumulative, bar, right=True)[:, 0].clamp(max=probs.shape[-1] - 1)


def sampling_probs(logits, cfg):
    """Temperature, then top-k, then top-p, of draft and text alike. (n, V) -> (n, V) float32  [code]"""
    logits = logits.float() / cfg.temperature
    if cfg.top_k:
        kth = logits.topk(min(cfg.top_k, logits.shape[-1])).values[:, -1:]
        logits = logits.masked_fill(logits < kth, -torch.inf)  # ties stay
    probs = logits.softmax(-1)
    return nucleus(probs, cfg.top_p) if cfg.top_p < 1 else probs


def propose(logits, cfg, generator):
    """Drafts, each drawn on its own [Eq. 3], and their distributions q. (n, V) -> (n,) on the CPU, (n, V)

    At temperature 0 the argmax, and None.
    """
    if cfg.temperature == 0:
        return logits.argmax(-1).cpu(), None
    probs = sampling_probs(logits, cfg)
    u = torch.rand(len(probs), generator=generator, dtype=torch.float64)
    return draw_token(probs, u).cpu(), probs


def accept(draft_ids, draft_probs, logits, cfg, generator):
    """How many drafts the AR view keeps, and its own next token; exact for any drafts.  [§3.3, consensus]

    draft_ids (n,), draft_probs q of propose; logits (n+1, V): AR row i verifies draft i, the last row goes
    beyond them. Returns (accepted_len, next_id (1,) on the CPU). Greedy: the longest prefix that equals the
    argmax. Else draft d is kept with probability min(1, p(d) / q(d)); the next token is drawn from max(p - q,
    0) where one is rejected, else from p. Raises ValueError for another number of rows.
    """
    n = len(draft_ids)
    need(len(logits) == n + 1, f"{n} drafts are verified by {n + 1} rows of logits, not {len(logits)}")
    if draft_probs is None:
        verify_ids = logits.argmax(-1).cpu()
        accepted_len = (draft_ids == verify_ids[:n]).cumprod(0).sum().item()
        return accepted_len, verify_ids[accepted_len : accepted_len + 1]
    verify_probs = sampling_probs(logits, cfg)  # (n+1, V)
    draft_idx = draft_ids.to(logits.device, non_blocking=True)[:, None]
    p = verify_probs[:n].gather(-1, draft_idx)[:, 0]
    q = draft_probs.gather(-1, draft_idx)[:, 0]
    u = torch.rand(n, generator=generator, dtype=torch.float64).to(logits.device, non_blocking=True)
    accepted_len = (u * q < p).cumprod(0).sum()  # nothing waits for the device before the return
    residual = (verify_probs - F.pad(draft_probs, (0, 0, 0, 1))).clamp(min=0)  # beyond the drafts q is 0
    residual = torch.where(residual.sum(-1, keepdim=True) > 0, residual, verify_probs)  # all 0: rounding
    u = torch.rand(1, generator=generator, dtype=torch.float64)
    next_id = draw_token(residual[accepted_len[None]], u)
    return accepted_len.item(), next_id.cpu()


def forward(decoder, ids, mask_mod, offsets=None):
    """Hidden states (n, width) of ids (n,), after the committed part of the cache.

    offsets (n,): how far after it in the text each id stands; None: one after the other.
    """
    n = len(ids)
    start = decoder.kv_cache.cache_len
    positions = start + (torch.arange(n) if offsets is None else offsets)
    mask = dense(mask_mod, 1, n, start + n)
    return decoder(ids[None], positions[None], mask, decoder.kv_cache.scratch_idx(n))[0]


@torch.no_grad()
def generate(model, prompt_ids, cfg, decoder=None, generator=None):
    """Draft a block through the diffusion view, verify it through the AR view, until EOS or max_new_tokens.

    prompt_ids (1, P) int64; the state of the loop lies on the CPU. Of cfg: max_new_tokens, block_size,
    temperature, top_k, top_p, merged, mask_id, eos_id, vocab_len. decoder: of make_views. Returns (seq_ids
    (1, P+R), record): the text of plain AR, a first EOS its last token; forwards, rounds, fixed_round (R,),
    rejected (round, index, token id), accepted: drafts kept by each round [Fig. 4]. Round 0 is the prefill:
    no draft, the first token. Raises ValueError for a batch or an empty prompt.
    """
    P = prompt_ids.shape[1]
    if prompt_ids.shape[0] != 1 or P == 0:
        raise ValueError(f"Orthrus decodes one prompt of at least one token, not {tuple(prompt_ids.shape)}")
    views = decoder or make_views(model, P + cfg.max_new_tokens, cfg)
    for view in views[:3]:
        view.reset()
    seq_ids = prompt_ids[0].cpu()
    fixed_round, rejected, accepted = [], [], []
    draft_logits = torch.empty(0, 1, device=prompt_ids.device)  # nothing is drafted before the prefill
    room = cfg.max_new_tokens  # tokens that may still be written, none after an EOS
    while room:  # seq_ids is x_0 .. x_a; the cache holds 0 .. a-1, all but the anchor x_a
        start = views.ar.kv_cache.cache_len
        first = len(seq_ids) - 1 - start  # the anchor's row in the AR view's forward: 0, in round 0 the last
        # propose: the diffusion view over [x_a, masks], all see all; nothing is committed [Fig. 2(b), Step 1]
        if draft_logits is None:
            block_ids = F.pad(seq_ids[-1:], (0, min(cfg.block_size - 1, room)), value=cfg.mask_id)
            hidden = forward(views.diffusion, block_ids, full())
            draft_logits = model.lm_head(hidden[:-1])[:, : cfg.vocab_len]  # row i predicts x_{a+i+1} [code]
        draft_ids, draft_probs = propose(draft_logits, cfg, generator)
        # score: the AR view over [x_a, drafts], in round 0 over the prompt [§3.3]
        ar_ids = torch.cat([seq_ids[start:], draft_ids])
        groups = {}
        if cfg.merged:
            group_idx = first + likeliest_lengths(draft_logits, cfg.merged)
            hidden, groups = verify_and_draft(views, ar_ids, group_idx, cfg)
        else:
            hidden = forward(views.ar, ar_ids, causal(start))
        logits = model.lm_head(hidden[first : len(ar_ids)])[:, : cfg.vocab_len]
        # select: the drafts that the AR view keeps, and its own token, which is the next anchor [§3.3]
        accepted_len, next_id = accept(draft_ids, draft_probs, logits, cfg, generator)
        new_ids = trim(torch.cat([draft_ids[:accepted_len], next_id])[:room], cfg)  # not beyond an EOS
        # commit: the AR keys and values of the anchor and of the kept drafts [Fig. 2(b), Step 2]
        views.ar.kv_cache.commit(first + accepted_len + 1)
        lost = enumerate(draft_ids[accepted_len:].tolist(), len(fixed_round) + accepted_len)
        rejected += [(len(accepted), index, token_id) for index, token_id in lost]
        fixed_round += [len(accepted)] * len(new_ids)
        accepted.append(accepted_len)
        seq_ids = torch.cat([seq_ids, torch.tensor(new_ids)])
        room = 0 if is_eos(seq_ids[-1], cfg.eos_id) else room - len(new_ids)
        group = groups.get(first + accepted_len)  # merged: hidden states that draft what follows next_id
        draft_logits = None if group is None else model.lm_head(group)[:room, : cfg.vocab_len]
    record = dict(forwards=sum(view.forwards for view in views[:3]), rounds=len(accepted),
                  fixed_round=fixed_round, rejected=rejected, accepted=accepted)  # fmt: skip
    return seq_ids[None].to(prompt_ids.device), record


# ------------------------------------------------------------------------------------------------ second view

VIEW = ("q_proj", "k_proj", "v_proj", "o_proj", "q_norm", "k_norm")  # of each layer, doubled  [code]
Views = collections.namedtuple("Views", "ar diffusion merged is_group")  # three Decoders on one cache


def attach(model, tensors, dtype):
    """Give every layer a second attention, in dtype; freeze all the rest. Returns the model.  [§3.1]

    tensors: {"model.layers.{l}.self_attn.{name}_diff.weight": tensor}, or {} for copies of the AR ones.
    Raises ValueError where they are not those of this backbone.
    """
    model.requires_grad_(False)
    for layer in model.model.layers:
        for name in VIEW:
            if hasattr(layer.self_attn, name):
                second = copy.deepcopy(getattr(layer.self_attn, name)).to(dtype).requires_grad_()
                setattr(layer.self_attn, f"{name}_diff", second)
    own = {(name, p.shape) for name, p in model.named_parameters() if p.requires_grad}
    wrong = own ^ {(name, tensor.shape) for name, tensor in tensors.items()}
    if tensors and wrong:
        raise ValueError(f"the diffusion tensors do not belong to this backbone: {min(wrong)[0]}")
    model.load_state_dict(tensors, strict=False)
    return model


def read_view(name):
    """The `_diff` tensors among the weights of a folder or Hub id, or {}: a plain AR model.  [code]"""
    folder = Path(cached_file(name, "config.json")).parent
    names = ["model.safetensors"]
    if not (folder / names[0]).exists():  # in parts; other files there are none of the model's
        names = {*json.loads((folder / "model.safetensors.index.json").read_text())["weight_map"].values()}
    tensors = {}
    for file in names:
        tensors |= {key: tensor for key, tensor in load_file(folder / file).items() if "_diff." in key}
    return tensors


def diffusion_projection(attn, name, x):
    """For common.walk: the layer's second set. Embedding, layer norms, MLPs and head are shared.  [§3.1]"""
    return getattr(attn, f"{name}_diff")(x)


def make_views(model, text_len, cfg):
    """Decoders of the AR view, the diffusion view and both at once, for texts of text_len tokens.

    One cache: what a draft writes is the scratch of the AR view's.  [§3.1]
    """
    max_len = text_len + min(cfg.merged, cfg.block_size) * cfg.block_size
    is_group = torch.zeros(max_len + kernels.GraphReplay.QUERY[-1], dtype=torch.bool, device=model.device)

    def both(attn, name, x):  # [ours] rows where is_group is set take the second set
        rows = is_group[: x.shape[1]].view(1, -1, *[1] * (x.dim() - 2))
        return torch.where(rows, diffusion_projection(attn, name, x), common.own_projection(attn, name, x))

    ar = Decoder(model, max_len)
    diffusion = Decoder(model, max_len, project=diffusion_projection, kv_cache=ar.kv_cache)
    return Views(ar, diffusion, Decoder(model, max_len, project=both, kv_cache=ar.kv_cache), is_group)


# --------------------------------------------------------------- --merged: one forward a round, exact  [ours]


def likeliest_lengths(logits, count):
    """The `count` likeliest acceptance lengths by the drafts' confidences. (m, V) -> (<= count,), ascending

    P(j) = c_1 .. c_j (1 - c_{j+1}), c_i the probability of draft i and c_{m+1} = 0.
    """
    conf = logits.float().softmax(-1).amax(-1).cpu()  # (m,)
    probs = F.pad(conf.cumprod(0), (1, 0), value=1.0) * F.pad(1 - conf, (0, 1), value=1.0)  # (m+1,)
    return probs.topk(min(count, len(probs))).indices.sort().values


def verify_and_draft(views, ar_ids, group_idx, cfg):
    """One forward: AR rows ar_ids (n,), and a block [token, masks] on each AR row of group_idx (w,).

    If the AR view keeps the drafts up to that row, rows 1 .. K-2 of its block predict what follows the AR
    view's next token, unseen. Returns the hidden states, AR rows first, and {AR row: those of its block}.
    """
    n = len(ar_ids)
    K = cfg.block_size
    block_ids = F.pad(ar_ids[group_idx, None], (0, K - 1), value=cfg.mask_id)  # (w, K)
    offsets = torch.cat([torch.arange(n), (group_idx[:, None] + torch.arange(K)).flatten()])
    views.is_group.zero_()[n : n + block_ids.numel()] = True
    mask_mod = merged_views(views.merged.kv_cache.cache_len, n, K, group_idx)
    hidden = forward(views.merged, torch.cat([ar_ids, block_ids.flatten()]), mask_mod, offsets)
    return hidden, dict(zip(group_idx.tolist(), hidden[n:].view(len(group_idx), K, -1)[:, 1 : K - 1]))


# =============================================== frame: the same text in all five scripts, compared by a test
# Rows, backbone, saves, the optimiser loop, decoding of many problems, the command line. Of its own script it
# calls draw_noise, make_training_inputs and training_loss.

RANK = int(os.environ.get("RANK", 0))
WORLD = int(os.environ.get("WORLD_SIZE", 1))
WHOLE = dcp.StateDictOptions(full_state_dict=True, cpu_offload=True)  # shards to whole tensors, on rank 0
SHARDS = dcp.StateDictOptions(full_state_dict=True, broadcast_from_rank0=WORLD > 1)  # and back
BOUNDS = dict.fromkeys("steps batch_size max_len save_every max_new_tokens problems".split(), (1, 1e9))
BOUNDS |= dict.fromkeys(("clip", "temperature", "accumulation"), (0, 1e9))
BOUNDS |= dict(lr=(0, 10), warmup=(0, 1), lr_floor=(0, 1), beta2=(0, 1), seed=(0, 2**31))
MASKS = ("<|mask|>", "|<MASK>|", "<|mdm_mask|>")  # added tokens of the published checkpoints
ASKED = ("prompt", "question", "query", "instruction", "input")  # of a row: in this order, a line each
ANSWERED = ("response", "answer", "completion", "output")  # the first of them


def need(condition, message):
    """What is wrong is said in one line, by `main`."""
    if not condition:
        raise ValueError(message)


def read_data(path):
    """Rows of JSONL: (messages of the prompt, answer, pattern or None). Raises ValueError with file and line.

    One object a line: `messages`, of which the last answer is learnt, or ASKED and ANSWERED.
    """
    rows = []
    for number, line in enumerate(Path(path).read_bytes().split(b"\n"), 1):
        if not line.strip():
            continue
        try:
            row = json.loads(line.decode("utf-8-sig"))
            if "messages" not in row:
                asked = "\n".join(row[name] for name in ASKED if row.get(name))
                answer = next(row[name] for name in ANSWERED if name in row and asked)
                row["messages"] = [dict(role="user", content=asked), dict(role="assistant", content=answer)]
            *prompt, last = row["messages"]
            "".join(turn["role"] + turn["content"] for turn in [*prompt, last]).encode()  # no half characters
            need(last["role"] == "assistant" and re.compile(row.get("pattern") or ""), "no answer")
            rows.append((prompt, last["content"], row.get("pattern")))
        except Exception as error:
            wanted = "one object a line, with messages or with prompt and response (README, Run it)"
            wanted = "UTF-8" if isinstance(error, UnicodeDecodeError) else wanted
            raise ValueError(f"{path}, line {number}: not {wanted}") from None
    need(rows, f"{path} has no rows")
    return rows


def encode(tokenizer, messages, answer=""):
    """Lists of token ids: prompt in chat form, answer closed by EOS. A token's name in a row stays text."""
    plain = dict(add_special_tokens=False, split_special_tokens=True)
    answer_ids = tokenizer(answer, **plain)["input_ids"] + [tokenizer.eos_token_id]
    text = "\n".join(turn["content"] for turn in messages)
    if not tokenizer.chat_template:
        prompt_ids = tokenizer(text, split_special_tokens=True)["input_ids"]
        if prompt_ids[-1:] == answer_ids[-1:]:  # some tokenizers end every text
            prompt_ids.pop()
        return {"prompt_ids": prompt_ids, "answer_ids": answer_ids}
    special = [token.content for token in tokenizer.added_tokens_decoder.values() if token.special]
    names = "|".join(map(re.escape, sorted(special, key=len, reverse=True))) or "(?!)"
    mark = next(char for char in map(chr, range(0xE000, 0xF900)) if char not in text)
    marked = [{**turn, "content": re.sub(names, rf"{mark}\g<0>", turn["content"])} for turn in messages]
    try:
        text = tokenizer.apply_chat_template(marked, add_generation_prompt=True, tokenize=False, **TEMPLATE)
    except Exception as error:  # of the template's own, as for a role that it does not take
        raise ValueError(f"the chat template refuses {messages}: {error}"[:300]) from error
    prompt_ids = []
    for part in re.split(f"((?<!{mark})(?:{names}))", text) if mark in text else [text]:
        how = plain | dict(split_special_tokens=mark in part)  # a name without it is the template's: a token
        prompt_ids += tokenizer(part.replace(mark, ""), **how)["input_ids"]
    return {"prompt_ids": prompt_ids, "answer_ids": answer_ids}


def encode_rows(tokenizer, cfg):
    """The rows of cfg.data; those of more than max_len tokens are dropped, not cut, and counted on stderr."""
    rows = [encode(tokenizer, messages, answer) for messages, answer, _ in read_data(cfg.data)]
    short = [row for row in rows if len(row["prompt_ids"]) + len(row["answer_ids"]) <= cfg.max_len]
    need(short, f"{cfg.data}: no row fits into max_len {cfg.max_len}")
    need(all(row["prompt_ids"] for row in short), f"{cfg.data}: a prompt has no tokens")
    if len(short) < len(rows):
        print(f"{len(rows) - len(short)} of {len(rows)} rows exceed max_len: dropped", file=sys.stderr)
    return short


def load(name, cfg, dtype, training=False):
    """(model, tokenizer) of a folder or Hub id, on the CPU; sets cfg.mask_id, eos_id, vocab_len, text_len."""
    try:
        tokenizer = common.read_tokenizer(name)
        model = from_pretrained(name, dtype, meta=RANK > 0)
        config = model.config
        cfg.vocab_len = max(tokenizer.get_vocab().values()) + 1  # ids may have holes
        known = [getattr(config, "mask_token_id", None), tokenizer.mask_token_id]
        known += [*map(tokenizer.get_added_vocab().get, MASKS), cfg.vocab_len if training else None]
        cfg.mask_id = config.mask_token_id = next((i for i in known if i is not None), None)
        eos_id = tokenizer.eos_token_id
        if cfg.mask_id == cfg.vocab_len == config.vocab_size:  # one of our own, after the last token
            torch.manual_seed(cfg.seed)
            model.resize_token_embeddings(cfg.vocab_len + 1, mean_resizing=RANK == 0)
        last = max(cfg.vocab_len - 1, cfg.mask_id or 0, eos_id or 0)
        need(eos_id not in (None, cfg.mask_id) and last < config.vocab_size,
             f"EOS {eos_id}, mask {cfg.mask_id} and {cfg.vocab_len} tokens need rows of their own in an "
             f"embedding of {config.vocab_size}")  # fmt: skip
        need(encode(tokenizer, [dict(role="user", content="a")])["prompt_ids"], "its tokenizer has no tokens")
    except Exception as error:
        hint = " (a git-lfs pointer?)" if isinstance(error, (SafetensorError, json.JSONDecodeError)) else ""
        raise ValueError(f"cannot load model {name}: {str(error)[:300]}{hint}") from error
    cfg.eos_id = config.eos_token_id if type(config.eos_token_id) is list and not training else eos_id
    cfg.text_len = config.max_position_embeddings
    cfg.max_len = min(cfg.max_len, cfg.text_len)
    model.model.embed_tokens.padding_idx = None  # or EOS used as padding would get no gradient
    return model, tokenizer


def newest(out):
    """The last whole save: out/step-N while training runs, `out` itself once out/ended has been moved up."""
    if RANK == 0:
        for path in Path(out, "ended").glob("*"):
            os.replace(path, Path(out, path.name))
        shutil.rmtree(Path(out, "ended"), ignore_errors=True)
    return max(Path(out).glob("step-*"), default=Path(out))


def save(part, tokenizer, optimizer, step, cfg):
    """A Hugging Face folder with the optimiser's state after `step` steps: written, then renamed whole."""
    weights, moments = dcp.get_state_dict(part, optimizer, options=WHOLE)
    if RANK == 0:
        tmp = Path(cfg.out, "unfinished")
        shutil.rmtree(tmp, ignore_errors=True)
        part.config.trained_with = {"method": METHOD, **dataclasses.asdict(cfg)}
        weights = {name: weights[name] for name, _ in part.named_parameters()}  # a tied head once
        state = {f"{name} {key}": x for name, pair in moments["state"].items() for key, x in pair.items()}
        part.save_pretrained(tmp, state_dict=weights, max_shard_size="1000GB")
        tokenizer.save_pretrained(tmp)
        save_file(state, tmp / "optimizer.safetensors", {"rows": str(step * cfg.batch_size)})
        for path in tmp.glob("*.safetensors"):
            path.chmod((tmp / "config.json").stat().st_mode)  # what the umask asks for
        os.sync()
        older = list(Path(cfg.out).glob("step-*"))
        tmp.rename(Path(cfg.out, "ended" if step == cfg.steps else f"step-{step:09d}"))
        for path in older:
            shutil.rmtree(path)
        newest(cfg.out)
    if WORLD > 1:
        dist.barrier()


def resume(part, optimizer, folder):
    """Put AdamW's moments back, on each rank its shards; the weights are there. Returns the rows seen."""
    with safe_open(Path(folder, "optimizer.safetensors"), "pt") as file:
        moments = dcp.get_optimizer_state_dict(part, optimizer)  # zeros in the place of each
        for name, pair in moments["state"].items():
            moments["state"][name] = {key: file.get_tensor(f"{name} {key}") for key in pair}
        dcp.set_optimizer_state_dict(part, optimizer, moments, options=SHARDS)
        return int(file.metadata()["rows"])


def shard(model, cfg):
    """FSDP2 in place, layer by layer. Rank 0 has read the weights; it sends the others their shards."""
    weights = model.state_dict() if RANK == 0 else {}
    policy = MixedPrecisionPolicy(getattr(torch, cfg.dtype), torch.float32, cast_forward_inputs=False)
    mesh = dist.init_device_mesh(torch.device(cfg.device).type, (WORLD,))
    for module in [*(m for m in model.modules() if hasattr(m, "input_layernorm")), model]:
        fully_shard(module, mesh=mesh, mp_policy=policy)
    if RANK > 0:
        model.to_empty(device=cfg.device)
    dcp.set_model_state_dict(model, weights, options=SHARDS)


def fit(model, part, tokenizer, rows, cfg, folder=None):
    """AdamW, linear warm-up, cosine to lr_floor. Returns the losses.

    part: what is trained and saved, the model or a module of it; folder: the save to go on from. The loss's
    weights are those of the whole batch: cutting it into micro-batches and ranks changes no gradient.
    """
    Path(cfg.out, "unfinished").mkdir(parents=True, exist_ok=True)  # a place that cannot be written shows now
    lock = open(Path(cfg.out, f".lock{RANK}"), "w")  # closed, and so released, when fit ends
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:  # some file systems have no locks
        need(type(error) is not BlockingIOError, f"another run trains into {cfg.out}")
    model.forward = lambda inputs: training_loss(model, inputs, cfg)  # the call that FSDP2 hooks
    if WORLD > 1:
        shard(model, cfg)
    model.to(cfg.device).train()
    device = torch.device(cfg.device)
    optimizer = torch.optim.AdamW(part.parameters(), cfg.lr, (0.9, cfg.beta2), weight_decay=cfg.weight_decay,
                                  fused=True)  # fmt: skip
    start = resume(part, optimizer, folder) // cfg.batch_size if folder else 0
    rows = [rows[i] for i in torch.randperm(len(rows), generator=torch.Generator().manual_seed(cfg.seed))]
    parts = cfg.accumulation * WORLD or cfg.batch_size  # of a batch, one a forward
    losses = []
    clock = time.time()
    bar = tqdm(range(start, cfg.steps), METHOD, cfg.steps, initial=start, mininterval=1, disable=RANK > 0,
               bar_format="{desc} {n}/{total} |{bar}| {elapsed}<{remaining}{postfix}")  # fmt: skip
    stopped = []  # fills on Ctrl-C, SIGTERM and SIGHUP: the step is finished and saved
    with contextlib.ExitStack() as cleanup:
        cleanup.callback(shutil.rmtree, Path(cfg.out, "unfinished"), ignore_errors=True)  # of a full disk
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            usual = signal.getsignal(number)  # ignored under nohup
            if usual != signal.SIG_IGN and threading.current_thread() is threading.main_thread():
                signal.signal(number, lambda number, _: stopped.append(number))
                cleanup.callback(signal.signal, number, usual)
        for step in bar:
            generator = torch.manual_seed(cfg.seed * 1_000_003 + step)  # noise, dropout: the same if resumed
            batch = [rows[i % len(rows)] for i in range(step * cfg.batch_size, (step + 1) * cfg.batch_size)]
            inputs = make_training_inputs(batch, draw_noise(batch, cfg, generator), cfg)
            total = torch.zeros(2, dtype=torch.float64, device=device)  # loss; ranks that were told to stop
            for i in range(RANK, parts, WORLD):
                micro = {name: tensor[i::parts].to(device) for name, tensor in inputs.items()}
                with torch.autocast(device.type, torch.bfloat16, enabled=cfg.dtype == "bfloat16"):
                    loss = model(micro)[0]
                (loss * WORLD).backward()  # FSDP2 takes the mean over ranks
                total[0] += loss.detach()
            total[1] += len(stopped)
            if WORLD > 1:
                dist.all_reduce(total)
            losses.append(total[0].item())
            need(math.isfinite(losses[-1]), f"loss {losses[-1]} at step {step}: the last save stays")
            torch.nn.utils.clip_grad_norm_(part.parameters(), cfg.clip)
            cosine = cfg.lr_floor + (1 - cfg.lr_floor) * (1 + math.cos(math.pi * step / cfg.steps)) / 2
            lr = cfg.lr * min(cosine, (step + 1) / max(cfg.warmup * cfg.steps, 1))
            optimizer.param_groups[0]["lr"] = lr
            optimizer.step()
            optimizer.zero_grad()
            mean = sum(losses[-20:]) / len(losses[-20:])
            speed = inputs["input_ids"].numel() * len(losses) / (time.time() - clock)
            bar.set_postfix_str(f"loss {mean:.3f}, lr {lr:.1e}, {speed:,.0f} tok/s", refresh=False)
            if total[1] or step + 1 == cfg.steps or (step + 1) % cfg.save_every == 0:
                save(part, tokenizer, optimizer, step + 1, cfg)
            if total[1]:
                bar.close()
                print(f"{METHOD}.py: saved after {step + 1} steps; --resume goes on", file=sys.stderr)
                sys.exit(128 + (stopped or [signal.SIGTERM])[0])
    return losses


def read_problems(tokenizer, args, cfg):
    """What is decoded, --prompt or --test: a list of (prompt_ids (1, P), text, answer, pattern or None)."""
    rows = [([dict(role="user", content=prompt)], None, None) for prompt in args.prompt]
    problems = []
    for messages, answer, pattern in rows or read_data(cfg.test)[: cfg.problems]:
        ids = encode(tokenizer, messages)["prompt_ids"]
        name = f"prompt {len(problems) + 1}"
        need(0 < len(ids) <= cfg.text_len - cfg.max_new_tokens, f"{name} has {len(ids)} tokens and "
             f"max_new_tokens is {cfg.max_new_tokens}: the model takes 1 to {cfg.text_len}")  # fmt: skip
        if tokenizer.unk_token_id in ids:
            print(f"{name} has words that the model does not know", file=sys.stderr)
        problems.append((torch.tensor([ids], device=cfg.device), messages[-1]["content"], answer, pattern))
    return problems


def trim(ids, cfg):
    """New tokens as a user wants them: up to the first EOS, at most max_new_tokens. (n,) -> list"""
    ids = ids[: cfg.max_new_tokens].cpu()
    ends = is_eos(ids, cfg.eos_id).nonzero()[:, 0].tolist()
    return ids[: ends[0] + 1 if ends else None].tolist()


def is_right(text, answer, pattern):
    """By the row's pattern, a regular expression; else the number after ####, if any; else as it stands."""
    if pattern is not None:
        return re.fullmatch(pattern, text.strip()) is not None
    if "####" in answer:
        text = text.partition("####")[2].replace(",", "")
        answer = answer.partition("####")[2].replace(",", "")
    return text.strip() == answer.strip()


def decode(label, run, decoder, model, tokenizer, problems, cfg, args, ar=None):
    """Decode one by one; prints the first texts, and figures, which it returns; ar: those of plain AR."""
    need(cfg.mask_id is not None or run is generate_ar, "the model has no mask token")
    generator = torch.Generator().manual_seed(cfg.seed)
    row = dict(problems=len(problems), right=0, new_tokens=0, forwards=0)
    outputs, laps = [], []
    for prompt_ids, prompt, answer, pattern in problems:
        clock = time.time() - kernels.GraphReplay.setup_seconds
        seq_ids, record = run(model, prompt_ids, cfg, decoder, generator)
        outputs.append(trim(seq_ids[0, prompt_ids.shape[1] :], cfg))
        laps.append(time.time() - kernels.GraphReplay.setup_seconds - clock)
        text = tokenizer.decode(outputs[-1], skip_special_tokens=True)
        row["right"] += answer is not None and is_right(text, answer, pattern)
        row["new_tokens"] += len(outputs[-1])
        row["forwards"] += record["forwards"]
        if len(outputs) <= 4 or answer is None:
            print(f"{prompt}\n  {label}: {text.strip()}", flush=True)
            rounds = common.trace(tokenizer, outputs[-1], record) if args.trace or args.trace_svg else []
            if ar and args.trace:
                common.show_trace(rounds, laps[-1])
            if ar and args.trace_svg and len(outputs) == 1:
                Path(args.trace_svg).write_text(common.trace_svg(rounds, prompt))
    row["tokens_per_forward"] = round(row["new_tokens"] / row["forwards"], 3)  # of totals, as those below
    row["tok_s"] = round(row["new_tokens"] / sum(laps), 1)
    row["x_ar"] = round(row["tok_s"] / ar["tok_s"], 2) if ar else 1.0
    row["same_as_ar"] = sum(a == b for a, b in zip(outputs, ar["outputs"])) if ar else len(outputs)
    row["right"] = None if answer is None else row["right"]  # prompts have no answers
    print(f"{label}: " + " | ".join(f"{name} {value}" for name, value in row.items() if value is not None))
    return dict(label=label, **row, outputs=outputs)


def parse(argv):
    """(args, cfg). A flag wins over what a folder was trained with, that over TINY, that over Config."""
    logging.set_verbosity_error()  # what is wrong is said in one line
    logging.get_logger("huggingface_hub").setLevel("ERROR")
    logging.disable_progress_bar()
    parser = argparse.ArgumentParser(description=__doc__, argument_default=argparse.SUPPRESS,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)  # fmt: skip
    parser.error = lambda message: sys.exit(failed(message))
    for flag in ("train", "generate", "resume", "trace"):
        parser.add_argument(f"--{flag}", action="store_true", default=False)
    parser.add_argument("--prompt", action="append", default=[])
    parser.add_argument("--trace-svg", metavar="FILE", default="")
    comments = dict(re.findall(r"^    (\w+):.*?  # (.+)$", inspect.getsource(Config), re.M))
    fields = {field.name: field for field in dataclasses.fields(Config) if field.default is not None}
    for name, field in fields.items():
        kind = {"choices": get_args(field.type)} if get_args(field.type) else {"type": field.type}
        kind = {"action": argparse.BooleanOptionalAction} if field.type is bool else kind
        parser.add_argument(f"--{name}", help=comments.get(name, "").replace("%", "%%"), **kind)
    args = parser.parse_args(argv)
    "".join(args.prompt).encode()  # half a character is no text
    given = {name: value for name, value in vars(args).items() if name in fields}
    if "data" in given:  # rows of the user's own: no others are decoded
        given = {"test": "" if args.train else given["data"], **given}
    out = given.get("out", Config.out)
    model = given.get("model", Config.model)
    is_done = Path(newest(out), "config.json").exists()
    from_out = args.resume if args.train else "model" not in given
    need(args.train or args.generate, "nothing to do: say --train, --generate or both")
    need(is_done or not from_out, f"nothing is trained in {out}: --train first, or name a --model")
    need(args.resume or not (args.train and is_done), f"{out} holds a run: --resume it or name another --out")
    args.folder = out if args.train or from_out else model  # what --generate decodes
    args.resume = newest(out) if args.resume else None  # the save to go on from
    source = str(newest(out if from_out else model))
    try:
        past = {"method": METHOD} | PretrainedConfig.get_config_dict(source)[0].get("trained_with", {})
    except Exception as error:
        raise ValueError(f"cannot load model {source}: {str(error)[:300]}") from error
    need(past["method"] == METHOD, f"{source} was trained by {past['method']}.py")
    if not args.train:
        given["model"] = past.get("model", source)  # the base
    kept = past.keys() & fields.keys() - {"out", "device", "dtype"}  # these are of a machine, not of a model
    tiny = TINY if Path(model).resolve() == Path(Config.model) else {}
    cfg = Config(**(tiny | {name: past[name] for name in kept} | given))
    on_gpu = cfg.device.startswith("cuda")
    need(torch.cuda.is_available() or not on_gpu, "there is no CUDA device: --device cpu")
    for name, (low, high) in {**BOUNDS, **LIMITS}.items():
        value = getattr(cfg, name)
        need(low <= value <= high, f"{name} must lie in [{low}, {high}], not {value}")  # nan is refused too
    need(args.prompt or cfg.test or not args.generate, "--test FILE or --prompt TEXT must say what to decode")
    need(not args.train or cfg.batch_size % (WORLD * max(cfg.accumulation, 1)) == 0,
         f"batch_size {cfg.batch_size} is no multiple of accumulation x {WORLD} processes")  # fmt: skip
    if WORLD > 1:
        cfg.device = f"cuda:{os.environ['LOCAL_RANK']}" if on_gpu else cfg.device
        if on_gpu:
            torch.cuda.set_device(cfg.device)
        dist.init_process_group("nccl" if on_gpu else "gloo", timeout=timedelta(hours=2))  # saves are slow
        atexit.register(dist.destroy_process_group)
    return args, cfg


def failed(error):
    """One line on stderr for bad input and for what the machine cannot do. Returns the exit status, 2."""
    line = " ".join(str(error).split()) or type(error).__name__
    if re.search("out of memory|allocate memory|MemoryError", line):
        line = "out of memory: lower --max_len, --max_new_tokens; train with --checkpointing --accumulation 0"
    if isinstance(error, BrokenPipeError):
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # or Python complains once more at its end
    print(f"{METHOD}.py: {line}", file=sys.stderr)
    return 2


def report(rows, cfg):
    """The last line of stdout: the figures as JSON."""
    rows = [{key: value for key, value in row.items() if key != "outputs"} for row in rows]
    print(json.dumps({"method": METHOD, "device": cfg.device, "dtype": cfg.dtype, "rows": rows}))


# ====================================================================================================== main


def train(cfg, folder):
    """Train the second view, in float32, beside the base in cfg.dtype; folder: the save to go on from."""
    source = folder or cfg.model
    model, tokenizer = load(source, cfg, getattr(torch, cfg.dtype), training=True)
    model.config.block_size = cfg.block_size  # said in config.json, as in the released checkpoints
    attach(model, read_view(source) if RANK == 0 else {}, torch.float32)
    fit(model, model, tokenizer, pack_rows(encode_rows(tokenizer, cfg), cfg), cfg, folder)


def compare(args, cfg):
    """Decode the same prompts by plain AR, by Orthrus, and by its --merged form. Returns their figures."""
    dtype = getattr(torch, cfg.dtype)
    folder = newest(args.folder)
    model, tokenizer = load(folder, cfg, dtype)
    view = read_view(folder)  # after load, which fetches what is on the Hub
    if not view:
        print("the diffusion view is untrained: the same text, few tokens per forward", file=sys.stderr)
    attach(model, view, dtype).to(cfg.device)
    base = load(cfg.baseline, copy.copy(cfg), dtype)[0].to(cfg.device) if cfg.baseline else model
    problems = read_problems(tokenizer, args, cfg)
    max_len = max(prompt_ids.shape[1] for prompt_ids, *_ in problems) + cfg.max_new_tokens
    rows = [decode("plain AR", generate_ar, Decoder(base, max_len), base, tokenizer, problems, cfg, args)]
    for merged in sorted({0, cfg.merged}):
        one = dataclasses.replace(cfg, merged=merged)
        label = f"{METHOD}, merged {merged}" if merged else METHOD
        views = make_views(model, max_len, one)
        rows.append(decode(label, generate, views, model, tokenizer, problems, one, args, rows[0]))
    return rows


def main(argv=None):
    """Returns the exit status: 0, or 2 with one line on stderr."""
    try:
        args, cfg = parse(argv)
        if args.train:
            train(cfg, args.resume)
        if args.generate and RANK == 0:
            report(compare(args, cfg), cfg)
    except (ValueError, OSError, RuntimeError, MemoryError, SafetensorError) as error:
        return failed(error)
    return 0


if __name__ == "__main__":
    sys.exit(main())
