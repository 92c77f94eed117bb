"""CoDiLA: a diffusion LM whose blocks are written out by a tiny local AR model; training step and decoding loop.

Paper         Locally Coherent Parallel Decoding in Diffusion Language Models, arXiv 2603.20216
Idea          A diffusion LM gives one marginal for every masked position; committing several at once ignores that
              neighbours depend on each other. So the canvas is cut into blocks of B tokens, and a small AR model writes
              a block left to right, from nothing but the block's B marginals, each as one soft embedding.
Differs       from plain AR: 1. a frozen bidirectional model proposes, over a canvas of masks  2. a second, small model
              is trained, on whole masked blocks  3. up to B tokens per forward of the big model
Implements    shared vocabulary -> link_vocabularies; block-level absorbing noise -> draw_noise, make_training_inputs;
              soft conditioning and the bound -> block_nll, training_loss; static, dynamic, verifying schedules and
              token-independent baselines -> select_blocks, select_prefix, review, generate; fixed suffix -> infill
Left out      decoding of several prompts at once, variable-length infilling (DreamOn), a cache for the diffusion LM
Not as in     the published code, which we could not have: [paper] is what its public summary says, [code] the public
              code of the base models, [ours] what both leave open
Shapes        n rows or positions, S canvas, B tokens in a block, N blocks, m of them masked, Vs shared vocabulary,
              D width of the AR model
Run           python codila.py --train --generate                          (tiny models, CPU)
              python codila.py --generate --model FOLDER --aux FOLDER --prompt "..."
              python codila.py --model FOLDER --infill "def area(r): return" "# of a circle" --max_new_tokens 8
"""

import argparse
import collections
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
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import distribute_tensor
from torch.utils.checkpoint import checkpoint
from tqdm import tqdm
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    PretrainedConfig,
    PreTrainedTokenizerFast,
    Qwen2Config,
    Qwen2Tokenizer,
    Qwen3Config,
    Qwen3ForCausalLM,
)
from transformers.utils import logging

import common
from common import Decoder, build_mask, causal, dense, full, generate_ar, prepare, segments, token_nll, walk

METHOD = "codila"


@dataclasses.dataclass
class Config:
    # what all five scripts share
    model: str = "tiny"  # Hub id, folder, or the built-in backbone
    data: str = ""  # JSONL; empty: the built-in task
    out: str = f"runs/{METHOD}"
    steps: int = 32000  # [paper] for each block size
    ar_steps: int = 0  # plain AR fine-tuning before the method's own steps; kept as the AR baseline
    batch_size: int = 8  # [ours]
    accumulation: int = 1  # micro-batches a step; changes memory, not results
    lr: float = 1e-5  # [ours] cosine to 0
    ar_lr: float = 2e-5  # of the AR stage
    warmup: float = 0.03  # [ours] share of the steps
    lr_floor: float = 0.0  # share of lr at the end
    beta2: float = 0.999  # AdamW
    weight_decay: float = 0.0  # [ours]
    clip: float = 1.0  # [ours]
    max_len: int = 2048  # [ours] longer rows are dropped
    max_new_tokens: int = 512  # [code] the canvas behind the prompt
    problems: int = 64  # held-out problems decoded when no prompt is given
    temperature: float = 0.0  # [ours]
    top_p: float = 1.0
    seed: int = 0
    device: str = "cuda" if torch.cuda.is_available() else "cpu"
    dtype: str = "bfloat16" if torch.cuda.is_available() else "float32"
    compile: bool = torch.cuda.is_available()
    save_every: int = 500
    mask_id: int | None = None  # None: from the model and its tokenizer
    eos_id: int | None = None
    vocab_len: int | None = None  # rows of the head behind the last token are never an output
    # CoDiLA
    aux: str = "Qwen/Qwen3-0.6B"  # [paper] the local AR model: Hub id, folder, or tiny
    tags: str = "<think> </think>"  # [paper] the tokens of the AR model that enclose the marginals
    dlm_steps: int = 0  # masked diffusion for an AR backbone, before CoDiLA's own steps; -1: as many as those
    dlm_lr: float = 1e-4  # [ours] of that stage
    block_sizes: str = "4"  # [paper] training: an AR model for each B; of a list, one per step at random
    weighting: str = "count"  # [ours] or inverse_t, uniform: weight of a row in the loss
    p_partial: float = 0.0  # [ours] share of masked blocks that show some of their tokens, as dynamic decoding does
    max_pad: int = 49  # [ours] at most so many more EOS behind the longest row of a batch
    envelope: bool = True  # [paper] the two tags; off is an ablation
    topk: int = 0  # 0: whole marginals [paper]; k: only the k likeliest tokens of each, an ablation
    mode: str = "static"  # [paper] or dynamic, verify; baselines without AR model: tokens, indep
    block_size: int = 4  # [paper] B in decoding: 2, 4 or 8
    blocks_per_step: int = 1  # [paper] static
    tau: float = 0.3  # [ours] dynamic: mean entropy in nats; 0.2 and 0.5 are reported  [paper]
    window: int = -1  # [paper] candidate blocks from the first unfinished one; 0: no limit; -1: 10, verify no limit
    tokens_per_step: int = 0  # tokens, verify: K; 0: block_size
    conf: str = "entropy"  # [ours] tokens, verify: -entropy or maxprob
    lam: float = -1.0  # [ours] verify: penalty where the AR model disagrees; -1: larger than any confidence gap
    table: str = ""  # block sizes that --generate compares, in every mode
    checkpointing: bool = False  # recompute layers in backward
    turn_end_id: int | None = None  # what ends a turn in chat form, in front of EOS; None: from the tokenizer


# what `--model tiny` changes
TINY = dict(steps=400, ar_steps=100, dlm_steps=-1, batch_size=64, lr=3e-3, ar_lr=3e-3, dlm_lr=1.5e-3, warmup=0.05,
            beta2=0.98, max_len=96, max_new_tokens=40, max_pad=0, aux="tiny", block_sizes="2,4,8", p_partial=0.5,
            temperature=0.7, tau=1.0, table="2,4,8")  # fmt: skip
TEMPLATE = {}  # arguments of the chat template


def sizes(text):
    """The block sizes of a list like 2,4,8; none of an empty one."""
    return [int(size) for size in text.split(",")] if text else []


# --------------------------------------------------------------------------------------------- the two models as a pair


class Pair(nn.Module):
    """The frozen diffusion LM (`backbone`) and the local AR model (`aux_model`), which alone is trained.

    link: vocab_len, so many leading ids mean the same to both models; think_id and end_think_id, the AR model's tags;
    turn_end_id, what ends a turn in chat form, or None. banned (Vs,) bool: ids that are no text, the mask and the tags.
    """

    def __init__(self, backbone, aux_model, link):
        super().__init__()
        self.backbone, self.aux_model, self.link = backbone.requires_grad_(False), aux_model, link
        aux_model.requires_grad_(True)  # all of it, no added parameter  [paper]
        aux_model.model.embed_tokens.padding_idx = None  # EOS is padding and a target: it needs its gradient
        banned = torch.zeros(link["vocab_len"], dtype=torch.bool, device=aux_model.lm_head.weight.device)
        no_text = (backbone.config.mask_token_id, link["think_id"], link["end_think_id"])
        banned[[i for i in no_text if i < len(banned)]] = True
        self.register_buffer("banned", banned, persistent=False)

    def train(self, mode=True):
        super().train(mode)
        self.backbone.train(False)  # frozen, whatever the trainer says
        return self


def shared_logits(logits, banned):
    """Logits over what both models can say: the first Vs columns, float32, banned ids at -inf.  (.., V) -> (.., Vs)"""
    return logits[..., : len(banned)].float().masked_fill(banned, -torch.inf)


def check_known(token_ids, banned):
    """Raise ValueError for a token (n,) int64 that is not text to both models."""
    alien = token_ids[(token_ids >= len(banned)) | banned[token_ids.clamp(max=len(banned) - 1)]]
    if len(alien):
        raise ValueError(f"token {alien[0]} is no text to both models")


def soft_embed(model, probs, token_ids, cfg):
    """What the AR model reads at n positions: probs @ E, E not detached; the plain embedding of a known token.  [paper]

    probs (n, Vs) float32 marginals; token_ids (n,) int64 as on the canvas: a token that is known there has a one-hot
    marginal [ours].  -> (n, D)
    """
    if cfg.topk:
        top = probs.topk(min(cfg.topk, probs.shape[-1]))
        probs = torch.zeros_like(probs).scatter(-1, top.indices, top.values / top.values.sum(-1, keepdim=True))
    embed, token_ids = model.aux_model.model.embed_tokens, token_ids.to(probs.device, non_blocking=True)
    is_masked, soft = token_ids == cfg.mask_id, probs.to(embed.weight.dtype) @ embed.weight[: len(model.banned)]
    return torch.where(is_masked[:, None], soft, embed(token_ids.masked_fill(is_masked, 0)))


def ar_inputs(model, embeds, written_ids, cfg):
    """<think> e_1 .. e_b </think> y_1 .. y_k: all that the AR model knows of the canvas, and what it wrote.  [paper]

    embeds (m, b, D), written_ids (m, k) int64.  -> (m, b+2+k, D); the last k+1 rows predict y_1 .. y_{k+1}, so y_1
    comes from the </think> row.
    """
    embed = model.aux_model.model.embed_tokens
    tags = [embed.weight[model.link[name]].expand(len(embeds), 1, -1) for name in ("think_id", "end_think_id")]
    opening, closing = ([tag] if cfg.envelope else [] for tag in tags)
    return torch.cat([*opening, embeds, *closing, embed(written_ids)], dim=1)


# ------------------------------------------------------------------------------------------------------- training step


def draw_length(batch, block_size, cfg, generator):
    """Columns of a batch: some EOS behind the longest row, in all a multiple of 8 (CUDA: 128, few compilations)."""
    longest = max(len(row["prompt_ids"]) + max(len(row["answer_ids"]), block_size) for row in batch)
    unit = 128 if cfg.device.startswith("cuda") else 8
    return -(-(longest + torch.randint(cfg.max_pad + 1, (1,), generator=generator).item()) // unit) * unit


def row_weight(weighting, t, block_masked):
    """Weight of a row's masked blocks in the bound: count N / m, inverse_t 1 / t, uniform 1.  [ours]"""
    return {"count": len(block_masked) / max(sum(block_masked), 1), "inverse_t": 1 / t, "uniform": 1.0}[weighting]


def draw_noise(batch, cfg, generator):
    """Block-level absorbing noise: all tokens of a block are masked together.  [paper]

    batch: list of {"prompt_ids", "answer_ids"} (lists of ints, the answer ends with EOS). Returns a list of dicts:
    block_size and length, the same in all rows; block_masked, one bool per block, and their weight; known, per block
    one bool per token that is shown although its block is masked (none unless p_partial > 0).
    """
    options = sizes(cfg.block_sizes)
    B = options[torch.randint(len(options), (1,), generator=generator).item()]
    draws, length = [], draw_length(batch, B, cfg, generator)
    for row in batch:
        N = (length - len(row["prompt_ids"])) // B
        if cfg.weighting == "count":  # m ~ U{1..N}, then m of the N blocks: no empty row, less variance
            m = torch.randint(1, N + 1, (1,), generator=generator).item()
            t, block_masked = m / N, torch.rand(N, generator=generator).argsort().argsort() < m
        else:
            t = 1e-3 + (1 - 1e-3) * torch.rand(1, generator=generator).item()
            block_masked = torch.rand(N, generator=generator) < t
        partial = torch.rand(N, 1, generator=generator) < cfg.p_partial
        known = partial & (torch.rand(N, B, generator=generator) < torch.rand(N, 1, generator=generator))
        masked = block_masked.tolist()
        draws.append(dict(block_size=B, length=length, block_masked=masked, known=known.tolist(),
                          weight=row_weight(cfg.weighting, t, masked)))  # fmt: skip
    return draws


def make_training_inputs(batch, draws, cfg):
    """Rows with whole blocks masked, and for each masked block its place, its tokens and their weight in the loss.

        prompt | block 0 | block 1, masked | ... | block N-1 | rest of fewer than B tokens, never masked

    The grid starts behind the prompt; EOS padding is data, masked and learnt like any token. Returns a dict:
    input_ids (n, S) int64; block_pos, block_ids (n, M, B) int64 and weights (n, M, B) float32, M = most masked blocks
    of a row, the places not used at weight 0. The loss is sum(weights * nll): a token still masked has the weight of
    its row over the number of tokens in blocks, sum over rows of N B.
    """
    B, S = draws[0]["block_size"], draws[0]["length"]
    maskable = sum(len(draw["block_masked"]) * B for draw in draws)
    shape = (len(batch), max(1, *(sum(draw["block_masked"]) for draw in draws)), B)
    inputs = dict(input_ids=torch.full((len(batch), S), cfg.eos_id), block_pos=torch.zeros(shape, dtype=torch.int64),
                  block_ids=torch.full(shape, cfg.eos_id), weights=torch.zeros(shape))  # fmt: skip
    for r, (row, draw) in enumerate(zip(batch, draws)):
        P, ids, input_ids = len(row["prompt_ids"]), row["prompt_ids"] + row["answer_ids"], inputs["input_ids"][r]
        input_ids[: len(ids)] = torch.tensor(ids)
        masked = torch.tensor(draw["block_masked"]).nonzero()[:, 0]  # (m,)
        pos, known = P + masked[:, None] * B + torch.arange(B), torch.tensor(draw["known"])[masked]  # (m, B)
        inputs["block_pos"][r, : len(masked)], inputs["block_ids"][r, : len(masked)] = pos, input_ids[pos]
        inputs["weights"][r, : len(masked)] = ~known * (draw["weight"] / maskable)
        input_ids[pos[~known]] = cfg.mask_id
    return inputs


def read_rows(backbone, inputs, cfg):
    """One forward of the diffusion LM: everything sees everything, the row before a token predicts it.  [code]

    Returns hidden (m, B, width), what predicts the tokens of the masked blocks, and which those are, (n, M) bool.
    """
    (n, S), device = inputs["input_ids"].shape, inputs["input_ids"].device
    positions, mask = torch.arange(S, device=device).expand(n, S), build_mask(full(), 1, S, S, device)
    hidden = walk(backbone, inputs["input_ids"], positions, mask, checkpointing=cfg.checkpointing)
    used = (inputs["weights"] > 0).any(-1)
    used[0, 0] |= not used.any()  # a batch without any: one block of weight 0
    return hidden[used.nonzero()[:, :1], (inputs["block_pos"][used] - 1).clamp(min=0)], used


def block_nll(model, inputs, cfg):
    """-log p of every token of the m masked blocks: by the AR model, and by the marginals alone; their weights.

    inputs of make_training_inputs. Returns three (m, B) float32, blocks in row-major order. One forward of the frozen
    diffusion LM over the rows, one of the AR model over the blocks:  -log p(block | x) = -sum_j log p_AR(y_j | <think>
    e_1 .. e_B </think> y_<j),  e_j = marginal_j @ E.
    """
    with torch.no_grad():
        hidden, used = read_rows(model.backbone, inputs, cfg)
    labels, (m, B), device = inputs["block_ids"][used], hidden.shape[:2], hidden.device
    canvas_ids = inputs["input_ids"][used.nonzero()[:, :1], inputs["block_pos"][used]]  # (m, B)
    check_known(labels.flatten(), model.banned)

    def read(rows, targets, token_ids):
        with torch.no_grad():
            logp = shared_logits(model.backbone.lm_head(rows), model.banned).log_softmax(-1)
        return soft_embed(model, logp.exp(), token_ids, cfg), -logp.gather(-1, targets[:, None])[:, 0]

    # in chunks, recomputed in backward: rows of 150k logits never pile up
    chunks = zip(*(tensor.flatten(0, 1).split(2048) for tensor in (hidden, labels, canvas_ids)))
    parts = zip(*(checkpoint(read, *chunk, use_reentrant=False) for chunk in chunks))
    embeds, nll_alone = (torch.cat(part).unflatten(0, (m, B)) for part in parts)
    inputs_embeds = ar_inputs(model, embeds, labels[:, :-1], cfg)  # (m, T, D), T = 2 B + 1
    T = inputs_embeds.shape[1]
    positions = torch.arange(T, device=device).expand(m, T)  # every block starts at 0  [ours]
    mask = dense(causal(), 1, T, T, device)  # rows far shorter than a tile of flex_attention
    hidden = walk(model.aux_model, inputs_embeds, positions, mask, checkpointing=cfg.checkpointing)
    head = types.SimpleNamespace(lm_head=lambda rows: shared_logits(model.aux_model.lm_head(rows), model.banned))
    return token_nll(head, hidden[:, -B:], labels), nll_alone, inputs["weights"][used]


def training_loss(model, inputs, cfg):
    """The bound in nats per maskable token (if p_partial = 0). Returns (loss, logs), logs: that of the marginals."""
    nll, nll_alone, weights = block_nll(model, inputs, cfg)
    return (weights * nll).sum(), {"marginals": (weights * nll_alone).sum().item()}


# ------------------------------------------------------------------------------------------------------------ decoding


def draw_tokens(logits, cfg, generator):
    """Greedy, or a draw at cfg.temperature from the likeliest tokens of mass top_p.  (n, Vs) -> (n,) int64"""
    if cfg.temperature == 0:
        return logits.argmax(-1)
    logits = logits.double() / cfg.temperature
    if cfg.top_p < 1:
        ordered, order = logits.sort(descending=True)
        mass = ordered.softmax(-1)
        ordered[mass.cumsum(-1) - mass >= cfg.top_p] = -torch.inf
        logits = torch.empty_like(logits).scatter(-1, order, ordered)
    uniform = torch.rand(logits.shape, generator=generator, dtype=torch.float64)
    gumbel = -torch.log(-torch.log(uniform.to(logits.device, non_blocking=True)))
    return (logits + gumbel).argmax(-1)  # = a draw from the softmax


def end_ids(cfg):
    """What ends an answer: the end of a turn in chat form, then EOS."""
    return [i for i in (cfg.turn_end_id, cfg.eos_id) if i is not None]


def text_end(ids, origin, stop_ids):
    """Index of the first stop token from origin on, or the length of ids (S,)."""
    found = torch.isin(ids[origin:], torch.tensor(stop_ids, dtype=torch.int64)).nonzero()
    return origin + found[0].item() if len(found) else len(ids)


def candidates(ids, origin, cfg, stop_ids):
    """Where something may be written: masks in front of the first stop token, in the window. ids (S,) int64.

    Returns (start, is_open): the position of the first block with such a mask, and (N, B) bool, True at such masks of
    the blocks from there to the last candidate. None if there is none.
    """
    B, window = cfg.block_size, cfg.window
    if window < 0:
        window = 0 if cfg.mode == "verify" else 10
    is_open = ids[origin : text_end(ids, origin, stop_ids)] == cfg.mask_id
    is_open = F.pad(is_open, (0, -len(is_open) % B)).view(-1, B)  # the last block may be shorter
    block_idx = is_open.any(1).nonzero()[:, 0]
    if not len(block_idx):
        return None
    block_idx = block_idx[block_idx < block_idx[0] + (window or len(is_open))]
    return origin + block_idx[0].item() * B, is_open[block_idx[0] : block_idx[-1] + 1]


def propose(model, dlm, ids, start, end, cfg, banned, generator):
    """One forward of the diffusion LM over the whole canvas: the marginals of positions start .. end-1.

    ids (S,) int64, on the CPU. Returns logits and probs (n, Vs) float32, on the device; on the CPU doubt (n,) float64,
    entropy in nats or -maxprob, and draft_ids (n,) int64, what the diffusion LM itself would write at masks.
    """
    S, token_ids = len(ids), ids[start:end]
    raw = dlm(ids[None], torch.arange(S)[None], dense(full(), 1, S, S), dlm.kv_cache.scratch_idx(S))[0]  # no commit
    raw = torch.cat([raw[max(start - 1, 0)][None], raw[start : end - 1]])  # row p-1 predicts p  [code]
    logits = shared_logits(raw, banned)
    probs = logits.softmax(-1)  # temperature 1, as in training  [ours]
    by_tokens = cfg.mode in ("verify", "tokens")
    doubt = -probs.amax(-1) if by_tokens and cfg.conf == "maxprob" else torch.special.entr(probs).sum(-1)
    masked = (token_ids == cfg.mask_id).nonzero()[:, 0]
    rows = logits[masked.to(logits.device, non_blocking=True)]
    drafts = draw_tokens(rows, cfg, generator) if by_tokens or cfg.mode == "indep" else rows.argmax(-1)
    return logits, probs, doubt.cpu().double(), token_ids.index_copy(0, masked, drafts.cpu())


def review(model, aux, probs, token_ids, draft_ids, cfg, banned):
    """What the AR model would write at every position of a span, given the draft in front of it.  [paper]

    probs (n, Vs); token_ids (canvas) and draft_ids (n,) int64, from the start of a block. One forward for all blocks,
    packed in one row under a mask that keeps them apart.  -> (n,) int64, on the CPU
    """
    parts, segment_ids, positions, rows = [], [], [], []
    aux.kv_cache.truncate(0)
    embeds, draft_ids = soft_embed(model, probs, token_ids, cfg), draft_ids.to(probs.device, non_blocking=True)
    for own, drafts in zip(embeds.split(cfg.block_size), draft_ids.split(cfg.block_size)):
        part = ar_inputs(model, own[None], drafts[None, :-1], cfg)
        segment_ids += [len(parts)] * part.shape[1]
        positions += range(part.shape[1])  # every block starts at 0
        rows += range(len(positions) - len(own), len(positions))
        parts.append(part)
    T = len(positions)
    mask, write_idx = dense(segments(torch.tensor([segment_ids])), 1, T, T), aux.kv_cache.scratch_idx(T)
    logits = aux(torch.cat(parts, dim=1), torch.tensor([positions]), mask, write_idx)[0]
    return shared_logits(logits, banned).argmax(-1).cpu()[rows]


def write_block(model, aux, probs, token_ids, last, cfg, banned, generator):
    """The AR model writes a block from its first position to its offset `last`, one forward a token.

    probs (b, Vs), of the one forward of the diffusion LM throughout; token_ids (b,) int64 as on the canvas: a known
    token is fed, not drawn.  -> (b,) int64, on the CPU; nothing waits for the device before.
    """
    written, is_masked = token_ids.to(probs.device, copy=True, non_blocking=True), token_ids == cfg.mask_id
    aux.kv_cache.truncate(0)
    embeds = soft_embed(model, probs, token_ids, cfg)
    waiting = ar_inputs(model, embeds[None], written[None, :0], cfg)  # (1, b+2, D), then one token id
    for j in range(last + 1):
        start, n = aux.kv_cache.cache_len, waiting.shape[1]
        mask, write_idx = dense(causal(start), 1, n, start + n), aux.kv_cache.scratch_idx(n)
        logits = aux(waiting, torch.arange(start, start + n)[None], mask, write_idx)[:, -1]
        aux.kv_cache.commit(n)
        if is_masked[j]:
            written[j] = draw_tokens(shared_logits(logits, banned), cfg, generator)[0]
        waiting = written[j].view(1, 1)
    return written.cpu()


def select_blocks(is_open, doubt, cfg):
    """The open positions of the blocks of lowest mean doubt.  [paper]

    is_open (N, B) bool, doubt (N, B) float64. Returns a list of indices (k,) int64 into the N B places, here one for
    each block, the most certain first; ties go to the lowest index.
    """
    block_idx = is_open.any(1).nonzero()[:, 0]
    mean = ((doubt * is_open).sum(1) / is_open.sum(1))[block_idx]
    best = block_idx[mean.argsort(stable=True)[: cfg.blocks_per_step]]
    return [i * cfg.block_size + is_open[i].nonzero()[:, 0] for i in best.tolist()]


def select_prefix(is_open, doubt, cfg):
    """The longest prefix of a block's open positions whose mean doubt is at most tau, if it has two.  [paper]

    Else the single most certain position. The running mean is not monotone: every length is tried.
    """
    count = is_open.cumsum(1)
    mean = (doubt * is_open).cumsum(1) / count
    length = torch.where(is_open & (mean <= cfg.tau), count, 0)
    if length.max() < 2:
        return [torch.where(is_open, doubt, torch.inf).argmin().view(1)]
    i, j = divmod(torch.where(length == length.max(), mean, torch.inf).argmin().item(), cfg.block_size)
    return [i * cfg.block_size + is_open[i, : j + 1].nonzero()[:, 0]]


def select_tokens(is_open, doubt, cfg):
    """The K most certain open positions, whatever their blocks."""
    idx = is_open.flatten().nonzero()[:, 0]
    best = doubt.flatten()[idx].argsort(stable=True)[: cfg.tokens_per_step or cfg.block_size]
    return [idx[best.sort().values]]


# what a round writes; in the last three modes it is the diffusion LM that writes
MODES = dict(static=select_blocks, dynamic=select_prefix,
             verify=select_tokens, tokens=select_tokens, indep=select_blocks)  # fmt: skip


@torch.no_grad()
def generate(model, prompt_ids, cfg, decoder=None, generator=None, canvas_ids=None, stop_ids=None, suppress_ids=()):
    """Marginals, their entropies, the block or tokens of lowest entropy, written by the local AR model. Batch 1.

    prompt_ids (1, P) int64; canvas_ids (1, R) what follows, masks among it: max_new_tokens masks if None, a hole and a
    fixed suffix for infilling; stop_ids end the text (None: EOS and the end of a turn), suppress_ids are never written;
    decoder: of new_decoder. Returns (seq_ids (1, P+R), record), everything behind the first stop token being EOS.
    record: forwards (diffusion LM), aux_forwards (AR model), rounds, fixed_round (R,), -1 where nothing was masked;
    rejected, vetoed drafts as (round, index among the R, token id); trace: per round [block, tokens written] of each
    block, or [positions, positions where the AR model disagreed]. The state of the loop lies on the CPU.
    Raises ValueError for a batch, or a known token on the canvas that the AR model does not know as such.
    """
    check(cfg)
    if prompt_ids.shape[0] != 1:
        raise ValueError(f"CoDiLA decodes one prompt, not {prompt_ids.shape[0]}")
    P, B, banned = prompt_ids.shape[1], cfg.block_size, model.banned.clone()
    canvas = torch.full((1, cfg.max_new_tokens), cfg.mask_id) if canvas_ids is None else canvas_ids.cpu()
    check_known(canvas[canvas != cfg.mask_id], banned.cpu())
    banned[list(suppress_ids)] = True
    ids, stop_ids = torch.cat([prompt_ids.cpu(), canvas], dim=1)[0], end_ids(cfg) if stop_ids is None else stop_ids
    lam = cfg.lam if cfg.lam >= 0 else 1.0 if cfg.conf == "maxprob" else math.log(len(banned))
    dlm, aux = (part.reset() for part in decoder or new_decoder(model, P, cfg, len(ids) - P))
    fixed_round, rejected, trace, rounds = torch.full((len(ids),), -1), [], [], 0
    while window := candidates(ids, P, cfg, stop_ids):
        # propose: marginals for the candidate blocks, from one forward of the diffusion LM
        start, is_open = window
        token_ids = ids[start : start + is_open.numel()].clone()  # (n,): the last block may be shorter
        n, is_masked = len(token_ids), token_ids == cfg.mask_id
        logits, probs, doubt, draft_ids = propose(model, dlm, ids, start, start + n, cfg, banned, generator)
        # score: by entropy; a draft that the AR model would not write is lam more doubtful
        disagreed = torch.zeros_like(is_masked)
        if cfg.mode == "verify":
            disagreed = is_masked & (review(model, aux, probs, token_ids, draft_ids, cfg, banned) != draft_ids)
            doubt[disagreed] += lam
        doubt = F.pad(doubt, (0, is_open.numel() - n)).view(is_open.shape)
        # select
        for idx in MODES[cfg.mode](is_open, doubt, cfg):
            # commit: the AR model writes a block from its marginals; a single token needs no coherence
            block_idx, last = divmod(idx[-1].item(), B)
            if cfg.mode == "static" or (cfg.mode == "dynamic" and len(idx) > 1):
                own = slice(block_idx * B, block_idx * B + B)
                draft_ids[own] = write_block(model, aux, probs[own], token_ids[own], last, cfg, banned, generator)
            elif cfg.mode == "dynamic" and cfg.temperature > 0:
                draft_ids[idx] = draw_tokens(logits[idx], cfg, generator).cpu()
            ids[start + idx], fixed_round[start + idx] = draft_ids[idx], rounds
            if MODES[cfg.mode] is select_tokens:
                trace.append([(start + idx).tolist(), (start + disagreed.nonzero()[:, 0]).tolist()])
            else:
                trace.append([(start - P) // B + block_idx, len(idx)])
        vetoed = (disagreed & (fixed_round[start : start + n] < 0)).nonzero()[:, 0].tolist()
        rejected += [(rounds, start - P + i, draft_ids[i].item()) for i in vetoed]
        rounds += 1
    behind = slice(text_end(ids, P, stop_ids) + 1, None)
    fixed_round[behind][ids[behind] == cfg.mask_id] = rounds - 1
    ids[behind] = cfg.eos_id
    record = dict(forwards=dlm.forwards, aux_forwards=aux.forwards, rounds=rounds, rejected=rejected, trace=trace,
                  fixed_round=fixed_round[P:].tolist())  # fmt: skip
    return ids[None].to(prompt_ids.device), record


# ------------------------------------------------------------------- an AR backbone becomes a masked diffusion LM first


def draw_token_noise(batch, cfg, generator):
    """The same for blocks of one token, each masked with p = t, t stratified over the batch: masked diffusion."""
    length, n = draw_length(batch, 1, cfg, generator), len(batch)
    t = 1e-3 + (1 - 1e-3) * (torch.randperm(n, generator=generator) + torch.rand(n, generator=generator)) / n
    is_masked, draws = torch.rand(n, length, generator=generator) < t[:, None], []
    for r, row in enumerate(batch):
        masked = is_masked[r, len(row["prompt_ids"]) :].tolist()
        draws.append(dict(block_size=1, length=length, block_masked=masked, known=[[False]] * len(masked),
                          weight=row_weight("inverse_t", t[r].item(), masked)))  # fmt: skip
    return draws


def dlm_loss(model, inputs, cfg):
    """The masked-diffusion bound of a backbone, over blocks of one token. Returns (loss, logs)."""
    hidden, used = read_rows(model, inputs, cfg)
    return (inputs["weights"][used] * token_nll(model, hidden, inputs["block_ids"][used])).sum(), {}


# -------------------------------------------------------------------------------------- what the frame asks of a script


def check(cfg):
    """Raise ValueError, one line, for settings that cannot work."""
    choices = dict(mode=MODES, conf=("entropy", "maxprob"), weighting=("count", "inverse_t", "uniform"))
    for name, allowed in choices.items():
        if getattr(cfg, name) not in allowed:
            raise ValueError(f"{name} is one of {', '.join(allowed)}, not {getattr(cfg, name)!r}")
    least = dict(block_size=1, blocks_per_step=1, window=-1, tokens_per_step=0, topk=0, max_pad=0, dlm_steps=-1)
    for name, low in least.items():
        if getattr(cfg, name) < low:
            raise ValueError(f"{name} must be at least {low}, not {getattr(cfg, name)}")
    if not 0 <= cfg.p_partial <= 1:
        raise ValueError(f"p_partial must lie in [0, 1], not {cfg.p_partial}")
    if not cfg.dlm_lr > 0 or math.isnan(cfg.tau) or math.isnan(cfg.lam):
        raise ValueError("dlm_lr must be > 0, tau and lam numbers")
    for name, text in (("block_sizes", cfg.block_sizes), ("table", cfg.table or "1")):
        if not re.fullmatch(r"[1-9]\d*(,[1-9]\d*)*", text):
            raise ValueError(f"{name} is a list like 2,4,8, not {text!r}")
    if len(cfg.tags.split()) != 2:
        raise ValueError(f"tags are two tokens with a space between them, not {cfg.tags!r}")


def load_backbone(name, dtype):
    """A Hugging Face causal LM; Dream's checkpoints are Qwen2, weight names included, under a name of their own."""
    keys, fields = {"dtype": dtype}, PretrainedConfig.get_config_dict(name)[0]
    if fields.get("model_type") == "Dream":
        remote = ("auto_map", "architectures", "model_type")
        keys["config"] = Qwen2Config(**{key: value for key, value in fields.items() if key not in remote})
    return common.from_pretrained(AutoModelForCausalLM, name, **keys)


def load_tokenizer(name):
    """A Hugging Face tokenizer; Dream's is Qwen2's, under a name of its own."""
    is_dream = PretrainedConfig.get_config_dict(name)[0].get("model_type") == "Dream"
    return (Qwen2Tokenizer if is_dream else AutoTokenizer).from_pretrained(name, trust_remote_code=False)


def link_vocabularies(tokenizer, aux_tokenizer, cfg):
    """What Pair wants to know of two tokenizers. Raises ValueError, one line, for a pair that does not fit.

    Vs: so many leading ids are the same token in both. Both models' logits are cut there, before the softmax, which
    drops the mask of the one and the tags of the other, whose ids may collide, and rows that one of them lacks.  [ours]
    """
    ours, theirs = (t.convert_ids_to_tokens(list(range(len(t)))) for t in (tokenizer, aux_tokenizer))
    vocab_len = next((i for i, (a, b) in enumerate(zip(ours, theirs)) if a != b), min(len(ours), len(theirs)))
    # tokens added to a vocabulary (mask, tags) may differ, its text may not; a mask may be its last entry
    if vocab_len <= cfg.eos_id or vocab_len < tokenizer.vocab_size - (cfg.mask_id < tokenizer.vocab_size):
        raise ValueError(f"the tokenizers of the two models are not a pair: they part at id {vocab_len}")
    known, tags = aux_tokenizer.get_vocab(), cfg.tags.split()
    if missing := [tag for tag in tags if tag not in known]:
        raise ValueError(f"it has no token {missing[0]}: name two of its own with --tags")
    think_id, end_think_id = (known[tag] for tag in tags)
    turn_end = tokenizer.get_vocab().get("<|im_end|>", cfg.eos_id)
    return dict(vocab_len=vocab_len, think_id=think_id, end_think_id=end_think_id,
                turn_end_id=turn_end if turn_end < vocab_len and turn_end != cfg.eos_id else None)  # fmt: skip


def load_aux(name, cfg, dtype):
    """(AR model, its tokenizer or None) of a Hub id, a folder, or `tiny`: random, with two rows more for the tags."""
    if name != "tiny":
        aux_model = load_backbone(name, dtype)
        return aux_model, None if hasattr(aux_model.config, "codila") else load_tokenizer(name)
    torch.manual_seed(cfg.seed)
    config = Qwen3Config(
        vocab_size=cfg.vocab_len + 2, hidden_size=64, intermediate_size=192, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, head_dim=16, max_position_embeddings=4096, tie_word_embeddings=True, eos_token_id=0,
        bos_token_id=None, pad_token_id=None,
    )  # fmt: skip
    V = cfg.vocab_len
    config.codila = dict(vocab_len=V, think_id=V, end_think_id=V + 1, turn_end_id=None)
    return Qwen3ForCausalLM(config), None


def enter_stage(model, stage, folder, cfg):
    """The model at the start of a stage of training, or as saved in folder: CoDiLA adds the local AR model."""
    if stage != METHOD:
        if cfg.aux != "tiny":  # what the last stage needs is looked for before the first one trains
            PretrainedConfig.get_config_dict(cfg.aux)
        return model
    name = str(Path(folder, "aux")) if folder and Path(folder, "aux").is_dir() else cfg.aux
    dtype = model.lm_head.weight.dtype  # float32 where the AR model is to be trained
    try:
        aux_model, aux_tokenizer = load_aux(name, cfg, dtype)
        if aux_tokenizer is not None:
            aux_model.config.codila = link_vocabularies(load_tokenizer(folder or cfg.model), aux_tokenizer, cfg)
    except Exception as error:
        raise ValueError(f"cannot load local AR model {name!r}: {' '.join(str(error).split())[:300]}") from error
    link, kinds = aux_model.config.codila, dict(vocab_len=int, think_id=int, end_think_id=int, turn_end_id=int | None)
    if type(link) is not dict or not all(isinstance(link.get(key, ""), kind) for key, kind in kinds.items()):
        raise ValueError(f"{name!r} does not say which tokens it shares with the diffusion LM: `codila` in config.json")
    cfg.turn_end_id = link["turn_end_id"]
    rows, aux_rows = (part.get_input_embeddings().num_embeddings for part in (model, aux_model))
    ids, tags = [cfg.eos_id, cfg.turn_end_id or 0], [link["think_id"], link["end_think_id"]]
    if not (0 <= max(ids) < link["vocab_len"] <= min(rows, aux_rows) and 0 <= min(tags) <= max(tags) < aux_rows):
        raise ValueError(f"{link['vocab_len']} shared tokens and two tags do not fit {rows} and {aux_rows} rows")
    if ranks(cfg)[1] == 1:  # frozen: half the memory; shards want one dtype
        model.to(getattr(torch, cfg.dtype))
    return Pair(model, prepare(aux_model.to(cfg.device)), link)


def save_method(model, folder, cfg):
    """The diffusion LM as a Hugging Face folder, the local AR model as another one in its `aux`."""
    getattr(model, "backbone", model).save_pretrained(folder, max_shard_size="1000GB")
    if isinstance(model, Pair):
        model.aux_model.save_pretrained(Path(folder, "aux"), max_shard_size="1000GB")


def plain_lm(model):
    """What plain AR decoding runs on where there is no AR baseline."""
    return model.backbone


def spare_mask_id(backbone, tokenizer):
    """A mask token for a backbone that has none and is not to be trained: a diffusion LM must have learnt it."""
    return None


def new_decoder(model, prompt_len, cfg, canvas_len=None):
    """Decoders of both models, with room for a prompt and its canvas, and for all blocks of the canvas under review."""
    R = cfg.max_new_tokens if canvas_len is None else canvas_len
    room = max(-(-R // B) * (2 * B + 1) for B in [cfg.block_size, *sizes(cfg.table)])
    dlm = Decoder(model.backbone, prompt_len + R, compiled=cfg.compile)
    return dlm, Decoder(model.aux_model, max(room, 1), compiled=cfg.compile)


def pack(rows, cfg):
    """Rows of at most max_len tokens; in chat form the turn ends in front of EOS."""
    return keep_short([row | {"answer_ids": row["answer_ids"][:-1] + end_ids(cfg)} for row in rows], cfg)


def stages(cfg):
    """The stages of training: a plain AR model of the data, its adaptation to masked diffusion, the local AR model."""
    dlm_steps = cfg.steps if cfg.dlm_steps < 0 else cfg.dlm_steps
    return [
        Stage("ar", cfg.ar_steps, cfg.ar_lr, keep_short, None, make_ar_inputs, ar_loss),
        Stage("dlm", dlm_steps, cfg.dlm_lr, pack, draw_token_noise, make_training_inputs, dlm_loss),
        Stage(METHOD, cfg.steps, cfg.lr, pack, draw_noise, make_training_inputs, training_loss),
    ]


def decoders(cfg):
    """(label, generate) of each decoding that `--generate` puts beside plain AR; cfg.table: the paper's comparison."""

    def row(label, **changes):
        return label, lambda model, ids, cfg, *rest: generate(model, ids, dataclasses.replace(cfg, **changes), *rest)

    if not cfg.table:
        return [row(f"{METHOD} {cfg.mode}")]
    rows = [row("one token a forward", mode="tokens", tokens_per_step=1)]
    for B in sizes(cfg.table):
        rows.append(row(f"independent tokens, K={B}", mode="tokens", block_size=B, tokens_per_step=B))
        rows.append(row(f"independent block, K=B={B}", mode="indep", block_size=B))
        rows.append(row(f"{METHOD}, K=B={B}", mode="static", block_size=B))
    for tau in (cfg.tau / 2, cfg.tau):
        rows.append(row(f"{METHOD} dynamic, B={cfg.block_size}, tau={tau:g}", mode="dynamic", tau=tau))
    return rows


THEMES = "red blue green gold".split()
# identifiers of three tokens; the first token is shared by two of them, the last by three
NAMES = ["abcdef"[i // 2] + "αβγδεζηθικλμ"[i] + "1234"[i % 4] for i in range(12)]


def names_of(theme):
    """The 6 of the 12 identifiers that a theme allows, likeliest first."""
    return [NAMES[(3 * THEMES.index(theme) + 5 * j) % 12] for j in range(6)]


def problem(rng):
    """One problem of the built-in task: (prompt, program). Lines like aα1=bδ4+aα1; are 12 tokens each.

    The number in the prompt only makes it unique: programs of one theme and length differ at random.
    """
    theme, count = rng.choice(THEMES), rng.randint(2, 3)
    lines = []
    for _ in range(count):
        a, b, c = rng.choices(names_of(theme), (0.55, 0.22, 0.11, 0.06, 0.04, 0.02), k=3)
        lines.append(f"{a}={b}{rng.choice('+*')}{c};")
    return f"{count} {theme} lines {rng.randrange(10000):04d}:", "".join(lines)


def is_right(prompt, text, reference):
    """A program is well-formed: as many statements as asked for, of names that the theme allows."""
    asked = re.fullmatch(rf"(\d) ({'|'.join(THEMES)}) lines \d+:", prompt)
    if not asked:
        return text.strip() == reference.strip()
    name = f"({'|'.join(names_of(asked[2]))})"
    return re.fullmatch(rf"({name}={name}[+*]{name};){{{asked[1]}}}", text.strip()) is not None


def infill(cfg, value):
    """PREFIX SUFFIX, or nothing for the rows of --data (JSONL: prompt, suffix): fill max_new_tokens between them."""
    if len(value) not in (0, 2) or not (value or cfg.data):
        raise ValueError("--infill takes PREFIX and SUFFIX, or nothing and --data FILE with rows of prompt and suffix")
    pairs, folder = [value] if value else [], cfg.out if cfg.model == "tiny" else cfg.model
    for number, line in enumerate([] if value else Path(cfg.data).read_bytes().split(b"\n"), 1):
        try:
            if line.strip():
                row = json.loads(line)
                pairs.append((row["prompt"] + "", row["suffix"] + ""))
        except (ValueError, TypeError, LookupError):
            raise ValueError(f"{cfg.data}, line {number}: not a JSON object with prompt and suffix") from None
    if not pairs:
        raise ValueError(f"{cfg.data} has no rows")
    "".join(text for pair in pairs for text in pair).encode()  # half a character raises ValueError
    model, tokenizer = load(folder, cfg, training=False)
    model, totals = enter_stage(model, METHOD, folder, cfg).train(False), collections.Counter()
    hole, generator = [cfg.mask_id] * cfg.max_new_tokens, torch.Generator().manual_seed(cfg.seed)
    for prefix, suffix in pairs:
        prefix_ids, suffix_ids = (tokenizer(text, add_special_tokens=False)["input_ids"] for text in (prefix, suffix))
        if len(prefix_ids) + len(suffix_ids) > cfg.max_len:
            raise ValueError(f"{prefix[:40]!r} and {suffix[:40]!r} have more than max_len = {cfg.max_len} tokens")
        prompt_ids = torch.tensor([prefix_ids], dtype=torch.int64, device=cfg.device)
        canvas_ids, clock = torch.tensor([hole + suffix_ids]), time.time()
        seq_ids, record = generate(model, prompt_ids, cfg, None, generator, canvas_ids, (), end_ids(cfg))
        new_ids = seq_ids[0, len(prefix_ids) : len(prefix_ids) + len(hole)]
        print(f"{prefix}[{tokenizer.decode(new_ids)}]{suffix}")
        totals.update(rows=1, new_tokens=len(hole), forwards=record["forwards"], seconds=time.time() - clock)
    totals["tokens_per_forward"] = round(totals["new_tokens"] / totals["forwards"], 3)
    print(json.dumps({"method": METHOD, "infill": cfg.mode, **totals}))


# flags of this script alone: name -> (arguments of add_argument, function(cfg, value))
OWN_FLAGS = {"infill": (dict(nargs="*", metavar="TEXT", help=infill.__doc__), infill)}


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
