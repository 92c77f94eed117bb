"""CoDiLA: a diffusion LM proposes, a small local AR model writes its blocks out.

Paper         Locally Coherent Parallel Decoding in Diffusion Language Models
              arXiv 2603.20216v1 (numbers in brackets are of this version), https://arxiv.org/abs/2603.20216
Idea          A diffusion LM gives one marginal for each masked position; to commit several at once ignores
              that neighbours depend on each other. So the canvas is cut into blocks of B tokens, and a small
              AR model writes a block left to right from its B marginals alone, each as one soft embedding.
Differs       from plain AR: 1. a frozen bidirectional model proposes, over a canvas of masks  2. a second,
              small model is trained, on whole masked blocks  3. up to B tokens per forward of the big model
Implements    block-level absorbing noise -> draw_noise, make_training_inputs; soft conditioning [§3, Theorem
              3.3] -> soft_embed, ar_inputs; the bound [Eq. 2, Theorem 3.2] -> block_nll, training_loss;
              static, dynamic and verifying schedules, independent tokens [Fig. 1a] -> candidates,
              select_blocks, select_prefix, select_tokens, review, write_block, generate
Left out      several prompts at once, holes of unknown length (DreamOn), a cache for the diffusion LM
Not as in     the published code, which could not be found. [paper]: public summaries of the paper say so,
              without a number; [code]: the public code of the base models; [ours]: both leave it open
Run           python codila.py --train --generate              (tests/tiny, CPU)
              python codila.py --generate --model FOLDER --aux FOLDER --prompt "..."
              python codila.py --generate --prompt "2 red lines 0042:" --suffix "+aα1;" --max_new_tokens 7
"""

import argparse
import atexit
import contextlib
import dataclasses
import fcntl
import functools
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
from safetensors.torch import save_file
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from tqdm import tqdm
from transformers import PretrainedConfig, logging

import common
from common import Decoder, build_mask, by_chunks, causal, dense, from_pretrained, full, generate_ar, is_eos
from common import kernels, padded_len, segments, token_nll, walk

METHOD = "codila"
HERE = Path(__file__).resolve().parent


@dataclasses.dataclass
class Config:
    # what all five scripts share
    model: str = f"{HERE}/tests/tiny/code-dlm"  # Hub id or folder of the backbone, a masked diffusion LM
    data: str = f"{HERE}/tests/tiny/code-train.jsonl"  # JSONL to train on
    test: str = ""  # JSONL to decode
    problems: int = 64  # most rows of it to decode
    out: str = f"runs/{METHOD}"  # folder of the saves
    steps: int = 32000  # [App. A] for each block size
    batch_size: int = 8  # [ours] rows a step, over all processes
    accumulation: int = 0  # forwards a step and process, 0: one row each; changes memory, not results
    lr: float = 1e-5  # [ours] cosine to lr_floor
    warmup: float = 0.03  # [ours] share of the steps
    lr_floor: float = 0.0  # share of lr at the end
    beta2: float = 0.999  # AdamW
    weight_decay: float = 0.0  # [ours]
    clip: float = 1.0  # [ours] largest norm of the gradient
    max_len: int = 2048  # [ours] tokens; longer rows are dropped
    save_every: int = 500  # steps
    checkpointing: bool = False  # recompute layers in backward
    max_new_tokens: int = 512  # [code] the canvas after the prompt; with a suffix the hole before it
    temperature: float = 0.0  # [ours] of every token that is written
    seed: int = 0
    device: str = "cuda" if torch.cuda.is_available() else "cpu"
    dtype: Literal["bfloat16", "float32"] = "bfloat16" if torch.cuda.is_available() else "float32"
    baseline: str = ""  # plain AR model to compare with; without it the local AR model before its training
    mask_id: int | None = None
    eos_id: int | list | None = None  # of a list each ends a text, the first is padding
    vocab_len: int | None = None  # so many leading ids mean the same to both models
    text_len: int | None = None  # most positions of the model
    # CoDiLA
    aux: str = f"{HERE}/tests/tiny/code-ar"  # Hub id or folder of the local AR model; Qwen3-0.6B [paper]
    tags: str = "<think> </think>"  # [paper] tokens of the AR model that enclose the marginals
    block_sizes: str = "4"  # B in training, a model for each [App. A]; of a list one a step at random [ours]
    weighting: Literal["count", "inverse_t", "uniform"] = "count"  # of a row: N / m [ours], 1 / t [Eq. 2], 1
    p_partial: float = 0.0  # [ours] share of masked blocks that show some tokens, as in dynamic decoding
    max_pad: int = 49  # [code] at most so many more EOS after the longest row of a batch
    envelope: bool = True  # [paper] the two tags; without them: an ablation
    topk: int = 0  # k likeliest tokens of each marginal, an ablation [Theorem 3.3]; 0: all
    mode: Literal["static", "dynamic", "verify", "tokens", "indep"] = "static"  # the last two: no AR model
    block_size: int = 4  # [paper] B in decoding: 2, 4 or 8
    blocks_per_step: int = 1  # [paper] of static and indep
    tokens_per_step: int = 4  # [paper] K of verify and tokens
    tau: float = 0.3  # [ours] dynamic: mean entropy in nats; 0.2 and 0.5 in results [paper]
    window: int = 10  # [paper] blocks that may be written, from the first unfinished one; 0: all
    conf: Literal["entropy", "maxprob"] = "entropy"  # [ours] verify, tokens: -entropy or largest probability
    lam: float = 100.0  # [ours] verify: off the conf of a draft that the AR model would not write
    suffix: str = ""  # text after the hole; the prompt stands before it
    table: str = ""  # block sizes that --generate compares, in every mode


# what the models of tests/tiny change
TINY = dict(test=f"{HERE}/tests/tiny/code-test.jsonl", steps=400, batch_size=32, accumulation=1, lr=2e-3,
            warmup=0.05, beta2=0.98, max_len=96, max_pad=0, max_new_tokens=40, temperature=0.7,
            block_sizes="2,4,8", p_partial=0.5, tau=1.0, table="2,4,8")  # fmt: skip
LIMITS = dict(block_size=(1, 4096), blocks_per_step=(1, 4096), tokens_per_step=(1, 4096), window=(0, 10**6),
              topk=(0, 10**6), max_pad=(0, 4096), p_partial=(0, 1), tau=(-99, 1e9), lam=(0, 1e9))  # fmt: skip
TEMPLATE = {}  # arguments of the chat template


# ---------------------------------------------------------------------------------------------- training step
# n rows or positions, S columns, B tokens in a block, N blocks, m masked ones, Vs shared vocabulary, D width


def sizes(text):
    """The numbers of a list like 2,4,8. Raises ValueError for anything else."""
    if not re.fullmatch(r"[1-9]\d{0,3}(,[1-9]\d{0,3})*", text):
        raise ValueError(f"sizes are a list like 2,4,8, not {text!r}")
    return [int(size) for size in text.split(",")]


def draw_noise(batch, cfg, generator):
    """Block-level absorbing noise: the B tokens of a block are masked together.  [paper]

    So the bound asks for p(whole block), which an AR model gives. batch: list of {"prompt_ids", "answer_ids"}
    (lists of ints, the answer ends with EOS). Returns a list of dicts: block_size and length, alike in all;
    p_mask float; block_masked, N bools; known, N lists of B bools: tokens that stay though their block is
    masked, as in dynamic decoding (p_partial).
    """
    options = sizes(cfg.block_sizes)
    B = options[torch.randint(len(options), (1,), generator=generator).item()]
    length = max(len(row["prompt_ids"]) + max(len(row["answer_ids"]), B) for row in batch)
    length += torch.randint(cfg.max_pad + 1, (1,), generator=generator).item()
    length = padded_len(-(-length // 8) * 8, cfg.device)  # a multiple of 8  [code]
    draws = []
    for row in batch:
        N = (length - len(row["prompt_ids"])) // B
        p_mask = 1e-3 + (1 - 1e-3) * torch.rand(1, generator=generator).item()  # t of alpha_t = 1 - t
        if cfg.weighting == "count":  # m ~ U{1..N}, then m of the N blocks: the mean over t, no empty row
            m = torch.randint(1, N + 1, (1,), generator=generator).item()
            block_masked = torch.randperm(N, generator=generator) < m
        else:
            block_masked = torch.rand(N, generator=generator) < p_mask
        partial = torch.rand(N, 1, generator=generator) < cfg.p_partial
        known = partial & (torch.rand(N, B, generator=generator) < torch.rand(N, 1, generator=generator))
        draws.append(dict(block_size=B, length=length, p_mask=p_mask, block_masked=block_masked.tolist(),
                          known=known.tolist()))  # fmt: skip
    return draws


def make_training_inputs(batch, draws, cfg):
    """Rows with whole blocks masked, and the weight of every token in the loss, sum(weights * nll).

        prompt | block 0 | block 1, masked | ... | block N-1 | rest of fewer than B tokens, never masked

    EOS padding is data, masked and learnt like any token [code]. The weight of a row is N / m [ours] or
    1 / t = (alpha_(t-1) - alpha_t) / (1 - alpha_t) [Eq. 2]. Returns a dict: input_ids, labels (n, S) int64,
    labels -100 outside masked blocks; weights (n, S) float32, at masks the weight of the row / the number of
    tokens in all blocks of the batch, elsewhere 0; block_size (n,) int64. Raises ValueError for a token that
    is not one of both models.
    """
    B = draws[0]["block_size"]
    maskable = sum(len(draw["block_masked"]) * B for draw in draws)
    shape = (len(batch), draws[0]["length"])
    input_ids = torch.full(shape, batch[0]["answer_ids"][-1])  # EOS
    labels = torch.full(shape, -100)
    weights = torch.zeros(shape)
    for r, (row, draw) in enumerate(zip(batch, draws)):
        P = len(row["prompt_ids"])
        N = len(draw["block_masked"])
        input_ids[r, : P + len(row["answer_ids"])] = torch.tensor(row["prompt_ids"] + row["answer_ids"])
        block_ids = input_ids[r, P : P + N * B]  # a view
        in_masked = torch.tensor(draw["block_masked"]).repeat_interleave(B)
        is_masked = in_masked & ~torch.tensor(draw["known"]).flatten()
        weight = dict(count=N / max(sum(draw["block_masked"]), 1), inverse_t=1 / draw["p_mask"], uniform=1.0)
        labels[r, P : P + N * B] = block_ids.masked_fill(~in_masked, -100)
        weights[r, P : P + N * B] = is_masked * (weight[cfg.weighting] / maskable)
        block_ids[is_masked] = cfg.mask_id
    need(labels.max() < cfg.vocab_len, f"token {labels.max()} of an answer is not one of both models")
    return dict(input_ids=input_ids, labels=labels, weights=weights, block_size=torch.full(shape[:1], B))


def no_text(model, cfg, device, suppress_ids=()):
    """Which of the shared ids are never written: mask and tags, where they are among them. -> (Vs,) bool"""
    never = torch.tensor([cfg.mask_id, *model.tag_ids, *suppress_ids])
    return torch.isin(torch.arange(cfg.vocab_len), never).to(device, non_blocking=True)


def shared_logits(logits, banned):
    """Logits over what both models can say, float32, banned ids at -inf. (..., V), (Vs,) -> (..., Vs)"""
    return logits[..., : len(banned)].float().masked_fill(banned, -torch.inf)


def soft_embed(model, probs, token_ids, cfg):
    """What the AR model reads at n positions: e = sum_v probs(v) E(v), E its embeddings. -> (n, D)  [§3]

    probs (n, Vs) float32, the marginals; token_ids (n,) int64 as on the canvas: a token that stands there
    already is read as itself, as if its marginal were one-hot [ours]. topk: the likeliest k of each marginal,
    renormalised; what that cuts off excludes some outputs for good [Theorem 3.3].
    """
    if cfg.topk:
        top = probs.topk(min(cfg.topk, probs.shape[-1]))
        kept = top.values / top.values.sum(-1, keepdim=True)
        probs = torch.zeros_like(probs).scatter(-1, top.indices, kept)
    embed = model.aux_model.model.embed_tokens
    soft = probs.to(embed.weight.dtype) @ embed.weight[: probs.shape[-1]]
    token_ids = token_ids.to(probs.device, non_blocking=True)
    is_masked = token_ids == cfg.mask_id
    known = embed(token_ids.masked_fill(is_masked, 0))  # E may have no row for the mask
    return torch.where(is_masked[:, None], soft, known)


def ar_inputs(model, embeds, written_ids, cfg):
    """What the AR model reads: a block's soft embeddings between the tags, then what it wrote so far.  [§3]

        reads      <think>   e_1 .. e_B   </think>   y_1   ..   y_k
        predicts                          y_1        y_2   ..   y_(k+1)

    embeds (m, B, D), written_ids (m, k) int64 -> (m, B+2+k, D), nothing else: all that it knows of the canvas
    is in the marginals. Without the tags y_1 comes from the row of e_B.
    """
    embed = model.aux_model.model.embed_tokens
    tags = [embed.weight[i].expand(len(embeds), 1, -1) for i in model.tag_ids]
    context = [tags[0], embeds, tags[1]] if cfg.envelope else [embeds]
    return torch.cat([*context, embed(written_ids)], dim=1)


def block_nll(model, inputs, cfg):
    """-log p of each token of the m masked blocks, by the AR model and by the marginals; their weights.

    Three (m, B) float32, of inputs from make_training_inputs. One forward of the frozen diffusion LM over the
    noisy rows x_t, then one of the AR model, in which every masked block is a row of its own [§3]:

        -log p(y_1 .. y_B | x_t) = -sum_j log p_AR(y_j | <think> e_1 .. e_B </think> y_1 .. y_(j-1))
    """
    n, S = inputs["input_ids"].shape
    device = inputs["input_ids"].device
    B = inputs["block_size"][0].item()
    banned = no_text(model, cfg, device)
    # row and column of every token of a masked block, in reading order: B after B they are the blocks
    places = (inputs["labels"] != -100).nonzero().view(-1, B, 2)
    m = padded_len(max(len(places), 1), device)  # on CUDA few shapes, since each is compiled
    places = F.pad(places, (0, 0, 0, 0, 0, m - len(places)))  # with the start of a prompt, of weight 0
    row_idx, pos = places.unbind(-1)  # (m, B)
    labels = inputs["labels"][row_idx, pos]
    token_ids = inputs["input_ids"][row_idx, pos].masked_fill(labels == -100, cfg.mask_id)
    labels = labels.clamp(min=0)
    with torch.no_grad():
        positions = torch.arange(S, device=device).expand(n, S)
        hidden = walk(model.backbone, inputs["input_ids"], positions, build_mask(full(), 1, S, S, device))
        hidden = hidden[row_idx, (pos - 1).clamp(min=0)]  # the row before a token predicts it  [code]

    def read(hidden, labels, token_ids):
        with torch.no_grad():
            logp = shared_logits(model.backbone.lm_head(hidden), banned).log_softmax(-1)
        return soft_embed(model, logp.exp(), token_ids, cfg), -logp.gather(-1, labels[:, None])[:, 0]

    embeds, nll_alone = by_chunks(read, hidden.flatten(0, 1), labels.flatten(), token_ids.flatten())
    rows = ar_inputs(model, embeds.unflatten(0, (-1, B)), labels[:, :-1], cfg)  # (m, T, D), T = 2 B + 1
    T = rows.shape[1]
    positions = torch.arange(T, device=device).expand(len(rows), T)  # every block starts at 0  [ours]
    mask = dense(causal(), 1, T, T, device)  # rows far shorter than a tile of flex_attention
    hidden = walk(model.aux_model, rows, positions, mask, compiled=mask.is_cuda,
                  checkpointing=cfg.checkpointing)  # fmt: skip
    nll = token_nll(lambda x: shared_logits(model.aux_model.lm_head(x), banned), hidden[:, -B:], labels)
    return nll, nll_alone.view(-1, B), inputs["weights"][row_idx, pos]


def training_loss(model, inputs, cfg):
    """The bound in nats per token, if p_partial = 0 [Eq. 2]. Returns (loss, logs).

    logs: the same with tokens independent of each other. The bound is below it by what the tokens of a block
    tell of each other, their total correlation [Theorem 3.2].
    """
    nll, nll_alone, weights = block_nll(model, inputs, cfg)
    return (weights * nll).sum(), {"marginals": (weights * nll_alone).sum().detach()}


# --------------------------------------------------------------------------------------------------- decoding


def draw_token(probs, u):
    """The first token at which the cumulative probability passes u. (n, V), (n,) float64 -> (n,) int64"""
    cumulative = probs.double().cumsum(-1)
    bar = u.to(probs.device, non_blocking=True)[:, None] * cumulative[:, -1:]
    return torch.searchsorted(cumulative, bar, right=True)[:, 0].clamp(max=probs.shape[-1] - 1)


def propose(logits, cfg, generator):
    """The likeliest tokens, or draws at cfg.temperature, and how sure a model is of each marginal.

    conf = -H, the entropy in nats [paper], at temperature 1 [ours]. (n, Vs) -> (n,) int64, (n,) float64
    """
    probs = logits.softmax(-1)
    by_maxprob = cfg.conf == "maxprob" and cfg.mode in ("verify", "tokens")
    conf = (probs.amax(-1) if by_maxprob else -torch.special.entr(probs).sum(-1)).double()
    if cfg.temperature == 0:
        return logits.argmax(-1), conf
    u = torch.rand(len(logits), generator=generator, dtype=torch.float64)
    return draw_token((logits / cfg.temperature).softmax(-1), u), conf


def candidates(ids, P, cfg):
    """The blocks that may be written now: those with an open place, a mask before the first EOS.

        ids        prompt | a b . d | . . . . | e f g h | . . . EOS | . .     . a mask, B = 4, window 3
        is_open             0 0 1 0   1 1 1 1

    ids (S,). Returns (start, is_open): the position of the first such block; (N, B) bool, all places from
    there to the end of the last such block in the window. None if no place is open. The window keeps a far
    EOS from being written too early [paper]; it begins at the first such block [ours].
    """
    is_open = (ids[P:] == cfg.mask_id) & (is_eos(ids[P:], cfg.eos_id).cumsum(0) == 0)
    is_open = F.pad(is_open, (0, -len(is_open) % cfg.block_size)).view(-1, cfg.block_size)
    block_idx = is_open.any(1).nonzero()[:, 0]
    if not len(block_idx):
        return None
    first = block_idx[0].item()
    last = block_idx[block_idx < first + (cfg.window or len(is_open))][-1]
    return P + first * cfg.block_size, is_open[first : last + 1]


def select_blocks(is_open, conf, cfg):
    """Static: the blocks of lowest mean entropy.  [paper]

    is_open (N, B) bool; conf (N, B) float64, which counts at open places alone [ours]. Returns a list, here
    of the open places of each block: indices (k,) into the N B places in reading order. Ties: the lowest.
    """
    block_idx = is_open.any(1).nonzero()[:, 0]
    mean = ((conf * is_open).sum(1) / is_open.sum(1))[block_idx]
    best = block_idx[mean.argsort(descending=True, stable=True)[: cfg.blocks_per_step]]
    return [i * cfg.block_size + is_open[i].nonzero()[:, 0] for i in best.tolist()]


def select_prefix(is_open, conf, cfg):
    """Dynamic: the longest k with h(k) <= tau, the mean entropy of a block's first k open places.  [paper]

    h may fall again: every k is tried. Of several blocks that of lowest h(k) [ours]. If k < 2 the most
    certain place of all, for the diffusion LM to write: a single token needs no coherence.
    """
    k = is_open.cumsum(1)  # (N, B), of the prefix that ends at this place
    h = -(conf * is_open).cumsum(1) / k
    passed = torch.where(is_open & (h <= cfg.tau), k, 0)
    if passed.max() < 2:
        return [torch.where(is_open, conf, -torch.inf).argmax().view(1)]
    end = torch.where(passed == passed.max(), h, torch.inf).argmin().item()
    start = end - end % cfg.block_size  # of its block
    return [start + is_open.flatten()[start : end + 1].nonzero()[:, 0]]


def select_tokens(is_open, conf, cfg):
    """Verification and independent tokens: the K most certain places of all blocks.  [paper, Fig. 1a]"""
    idx = is_open.flatten().nonzero()[:, 0]
    best = conf.flatten()[idx].argsort(descending=True, stable=True)[: cfg.tokens_per_step]
    return [idx[best]]


SELECT = dict(static=select_blocks, dynamic=select_prefix, verify=select_tokens, tokens=select_tokens,
              indep=select_blocks)  # fmt: skip


def forward(decoder, inputs, positions, mask_mod):
    """Hidden states (n, width) of ids (n,) or embeddings (n, D), after the committed part of the cache."""
    n = len(inputs)
    write_idx = decoder.kv_cache.scratch_idx(n)
    mask = dense(mask_mod, 1, n, int(write_idx[-1]) + 1)
    return decoder(inputs[None], positions[None], mask, write_idx)[0]


def review(model, aux, probs, token_ids, draft_ids, cfg, banned):
    """What the AR model would write at n positions, each after the drafts before it in its block.  [paper]

    probs (n, Vs); token_ids (as on the canvas), draft_ids (n,) int64, from the start of a block on. One
    forward over the rows of all blocks, packed into one under a mask that keeps them apart. -> (n,) int64
    """
    aux.kv_cache.reset()
    embeds = soft_embed(model, probs, token_ids, cfg).split(cfg.block_size)
    drafts = draft_ids.to(probs.device, non_blocking=True).split(cfg.block_size)
    rows = [ar_inputs(model, e[None], y[None, :-1], cfg)[0] for e, y in zip(embeds, drafts)]  # (2b+1, D) each
    lengths = torch.tensor([len(row) for row in rows])
    segment_ids = torch.arange(len(rows)).repeat_interleave(lengths)
    positions = torch.cat([torch.arange(len(row)) for row in rows])  # every block starts at 0
    hidden = forward(aux, torch.cat(rows), positions, segments(segment_ids[None])).split(lengths.tolist())
    hidden = torch.cat([row[-len(y) :] for row, y in zip(hidden, drafts)])  # of each block the last b rows
    return shared_logits(model.aux_model.lm_head(hidden), banned).argmax(-1)


def write_block(model, aux, probs, token_ids, last, cfg, banned, generator):
    """The AR model writes a block up to place `last`, one forward a token. -> (b,) int64, on the CPU  [§3]

    probs (b, Vs), of one forward of the diffusion LM; token_ids (b,) int64 as on the canvas: a known token is
    fed, not drawn. Nothing waits for the device before the end.
    """
    aux.kv_cache.reset()
    written = token_ids.to(probs.device, copy=True, non_blocking=True)
    is_masked = (token_ids == cfg.mask_id).tolist()
    embeds = soft_embed(model, probs, token_ids, cfg)
    inputs = ar_inputs(model, embeds[None], written[None, :0], cfg)[0]  # (b+2, D), later one token id
    for j in range(last + 1):
        start = aux.kv_cache.cache_len
        hidden = forward(aux, inputs, torch.arange(start, start + len(inputs)), causal(start))
        aux.kv_cache.commit(len(inputs))
        if is_masked[j]:
            logits = shared_logits(model.aux_model.lm_head(hidden[-1:]), banned)
            written[j : j + 1], _ = propose(logits, cfg, generator)
        inputs = written[j : j + 1]
    return written.cpu()


@torch.no_grad()
def generate(model, prompt_ids, cfg, decoder=None, generator=None, canvas_ids=None, suppress_ids=()):
    """Marginals, their entropies, the most certain block or tokens, written by the AR model. Batch 1.

    prompt_ids (1, P) int64. canvas_ids (1, R): what follows, masks among it (for infilling a hole and its
    suffix); max_new_tokens masks if None. suppress_ids are never written. decoder: two, of the diffusion LM
    and of the AR model. Of cfg: max_new_tokens, mode, block_size, blocks_per_step, tokens_per_step, tau,
    window, conf, lam, envelope, topk, temperature, mask_id, eos_id, vocab_len. Returns (seq_ids (1, P+R), all
    EOS after the first one, record): forwards of the diffusion LM, aux_forwards, rounds, fixed_round (R,), -1
    where no round wrote. Raises ValueError for a batch, or a token on the canvas that is not one of both.
    """
    P = prompt_ids.shape[1]
    B = cfg.block_size
    canvas = torch.full((cfg.max_new_tokens,), cfg.mask_id) if canvas_ids is None else canvas_ids[0].cpu()
    if prompt_ids.shape[0] != 1 or (canvas[canvas != cfg.mask_id] >= cfg.vocab_len).any():
        raise ValueError("CoDiLA decodes one prompt, and a canvas of tokens that both models have")
    ids = torch.cat([prompt_ids[0].cpu(), canvas])  # (S,), on the CPU as all the state of the loop
    S = len(ids)
    banned = no_text(model, cfg, prompt_ids.device, suppress_ids)
    dlm, aux = decoder or (Decoder(model.backbone, S), Decoder(model.aux_model, 3 * len(canvas)))
    dlm.reset()
    aux.reset()
    fixed_round = torch.full((S,), -1)
    while span := candidates(ids, P, cfg):
        # propose: marginals of the candidate blocks, from one forward of the diffusion LM over the canvas
        start, is_open = span
        token_ids = ids[start : start + is_open.numel()]  # (n,), a view; the last block may be shorter
        n = len(token_ids)
        hidden = forward(dlm, ids, torch.arange(S), full())  # nothing is committed
        hidden = torch.cat([hidden[:1], hidden])[start : start + n]  # the row before predicts  [code]
        logits = shared_logits(model.backbone.lm_head(hidden), banned)
        draft_ids, conf = propose(logits, cfg, generator)
        draft_ids = torch.where(token_ids == cfg.mask_id, draft_ids.cpu(), token_ids)
        conf = conf.cpu()
        # score: by entropy; a draft that the AR model would not write is lam less certain  [paper]
        if cfg.mode == "verify":
            ar_ids = review(model, aux, logits.softmax(-1), token_ids, draft_ids, cfg, banned)
            conf -= cfg.lam * (ar_ids.cpu() != draft_ids)
        # select: whole blocks, the prefix of one, or single tokens
        conf = F.pad(conf, (0, is_open.numel() - n)).view(is_open.shape)
        for idx in SELECT[cfg.mode](is_open, conf, cfg):
            # commit: what the AR model writes in the block, or else the drafts
            if cfg.mode == "static" or (cfg.mode == "dynamic" and len(idx) > 1):
                block_idx, last = divmod(idx[-1].item(), B)
                own = slice(block_idx * B, block_idx * B + B)
                probs = logits[own].softmax(-1)
                draft_ids[own] = write_block(model, aux, probs, token_ids[own], last, cfg, banned, generator)
            token_ids[idx] = draft_ids[idx]
            fixed_round[start + idx] = dlm.forwards - 1  # a round is a forward of the diffusion LM
    ends = is_eos(ids[P:], cfg.eos_id).nonzero()
    if len(ends):
        ids[P + ends[0].item() + 1 :] = torch.tensor(cfg.eos_id).view(-1)[0]
    record = dict(forwards=dlm.forwards, aux_forwards=aux.forwards, rounds=dlm.forwards)
    record["fixed_round"] = fixed_round[P:].tolist()
    return ids[None].to(prompt_ids.device), record


# --------------------------------------------------------------------------------------- two models as a pair


class Pair(torch.nn.Module):
    """The frozen diffusion LM; the AR model, all of it trained [paper]; its ids of <think> and </think>."""

    def __init__(self, backbone, aux_model, tag_ids):
        super().__init__()
        self.backbone = backbone.requires_grad_(False)
        self.aux_model = aux_model.requires_grad_(True)
        self.tag_ids = tag_ids


def link_vocabularies(tokenizer, aux_tokenizer, cfg):
    """(vocab_len, tag_ids): how many leading ids are the same token in both; the tags in the AR model's ids.

        id            0 .. 151664   151665            151666             151667    151668
        Dream-Coder   text, chat    <|beginoftext|>   <|mask|>           -         -
        Qwen3         the same      <tool_response>   </tool_response>   <think>   </think>

    The logits of both models are cut to vocab_len columns, here 151665, before the softmax: else the AR model
    would read a mask as its </tool_response>  [ours]. Raises ValueError for tokenizers that are no pair.
    """
    ours = tokenizer.get_vocab()
    theirs = aux_tokenizer.get_vocab()
    lens = [max(ours.values()) + 1, max(theirs.values()) + 1]
    vocab_len = min(lens + [i for _, i in ours.items() ^ theirs.items()])  # (token, id) that only one has
    # tokens added after the text may differ, the text and EOS may not
    if vocab_len < tokenizer.vocab_size or vocab_len <= tokenizer.eos_token_id:
        raise ValueError(f"the tokenizers of {cfg.model} and of the AR model part at id {vocab_len}")
    tag_ids = [theirs[tag] for tag in cfg.tags.split() if tag in theirs]
    need(len(tag_ids) == 2, f"--tags must be two tokens of the AR model, not {cfg.tags}")
    return vocab_len, tag_ids


def load_pair(name, cfg, dtype):
    """(Pair, tokenizer, the AR model's tokenizer) of cfg.model, in cfg.dtype, and of `name`, in dtype.

    On the CPU. Sets cfg.mask_id; cfg.vocab_len; cfg.eos_id, a list: EOS, and what ends a turn in chat form.
    Raises ValueError where one cannot be loaded, or the two are no pair.
    """
    backbone, tokenizer = load(cfg.model, cfg, getattr(torch, cfg.dtype))
    need(cfg.mask_id is not None, f"{cfg.model} has no mask token: it is no masked diffusion LM")
    aux_model, aux_tokenizer = load(name, dataclasses.replace(cfg), dtype)  # a copy: load sets ids
    cfg.vocab_len, tag_ids = link_vocabularies(tokenizer, aux_tokenizer, cfg)
    ends = [tokenizer.eos_token_id, tokenizer.get_vocab().get("<|im_end|>", cfg.vocab_len)]
    cfg.eos_id = list(dict.fromkeys(i for i in ends if i < cfg.vocab_len))
    return Pair(backbone, aux_model, tag_ids), tokenizer, aux_tokenizer


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
    """Train the local AR model; the diffusion LM stays as it is. folder: the save to go on from, or None."""
    pair, tokenizer, aux_tokenizer = load_pair(folder or cfg.aux, cfg, torch.float32)
    rows = encode_rows(tokenizer, cfg)
    for row in rows:
        row["answer_ids"][-1:] = cfg.eos_id[::-1]  # the end of the turn, then EOS  [code]
    fit(pair, pair.aux_model, aux_tokenizer, rows, cfg, folder)


def comparison(cfg):
    """(label, settings) of what is compared for the block sizes of cfg.table.  [Fig. 1a]"""
    rows = [("one token a forward", dict(mode="tokens", tokens_per_step=1))]
    for B in sizes(cfg.table):
        rows.append((f"independent tokens, K={B}", dict(mode="tokens", block_size=B, tokens_per_step=B)))
        rows.append((f"independent block, K=B={B}", dict(mode="indep", block_size=B)))
        rows.append((f"{METHOD}, K=B={B}", dict(mode="static", block_size=B)))
    return rows + [(f"{METHOD} dynamic, B={cfg.block_size}, tau={cfg.tau:g}", dict(mode="dynamic"))]


def compare(args, cfg):
    """Decode the same prompts by plain AR and by CoDiLA, test rows as cfg.table says. Returns the figures."""
    dtype = getattr(torch, cfg.dtype)
    lm, lm_tokenizer = load(cfg.baseline or cfg.aux, cfg, dtype)
    problems = read_problems(lm_tokenizer, args, cfg)
    max_len = max(prompt_ids.shape[1] for prompt_ids, *_ in problems) + cfg.max_new_tokens
    decoder = Decoder(lm.to(cfg.device), max_len)
    rows = [decode("plain AR", generate_ar, decoder, lm, lm_tokenizer, problems, cfg, args)]
    trained = newest(args.folder)  # or the diffusion LM that --model names
    pair, tokenizer, _ = load_pair(cfg.aux if str(trained) == cfg.model else trained, cfg, dtype)
    run = generate
    R = cfg.max_new_tokens
    if cfg.suffix:  # plain text, and max_new_tokens tokens in the hole
        tokenizer.chat_template = None
        suffix_ids = tokenizer(cfg.suffix, add_special_tokens=False, split_special_tokens=True)["input_ids"]
        canvas_ids = torch.tensor([[cfg.mask_id] * R + suffix_ids])
        run = functools.partial(generate, canvas_ids=canvas_ids, suppress_ids=cfg.eos_id)
        cfg = dataclasses.replace(cfg, eos_id=None)
        R = canvas_ids.shape[1]
    plans = comparison(cfg) if cfg.table and not args.prompt else [(f"{METHOD} {cfg.mode}", {})]
    problems = read_problems(tokenizer, args, cfg)
    max_len = max(prompt_ids.shape[1] for prompt_ids, *_ in problems) + R
    pair.to(cfg.device)
    decoder = Decoder(pair.backbone, max_len), Decoder(pair.aux_model, 3 * R)
    for label, changes in plans:
        some = dataclasses.replace(cfg, **changes)
        rows.append(decode(label, run, decoder, pair, tokenizer, problems, some, args, rows[0]))
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
