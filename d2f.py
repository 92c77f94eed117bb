"""D2F: a bidirectional diffusion LM distilled into a block-causal one, decoded as a pipeline of unfinished blocks.

Paper         Diffusion LLMs Can Do Faster-Than-AR Inference via Discrete Diffusion Forcing, arXiv 2508.09192v1
Idea          A masked diffusion LM keeps its weights and changes one thing, the mask: full attention inside a block,
              causal between blocks, so finished blocks have an exact KV cache. LoRA is distilled from the same weights
              with full attention, later blocks being noisier; hence the student can predict a block while the blocks
              before it are still half masked, and every forward fills several blocks.
Differs       from plain AR: 1. masks are predicted, by a bidirectional block  2. loss against a teacher, not the data
              3. a forward fixes any number of tokens, in several blocks  4. a block is cached one pass after its end
Implements    monotone noise -> make_training_inputs; distillation -> training_loss; pipelined decoding with semi-active
              and fully active blocks -> generate; the teacher, decoded without cache -> generate_vanilla
Left out      decoding of several prompts at once, full fine-tuning of the student
Not as in     the published code: the mask token is never an output; nothing masked gives a zero loss instead of NaN;
              confidences are float32; ids come from the model's config. A backbone that is no diffusion LM is made one
              first (stage `adapt`, all weights), which the paper takes for granted
Run           python d2f.py --train --generate                                   (tiny backbone, CPU, 2 minutes)
              python d2f.py --generate --model GSAI-ML/LLaDA-8B-Instruct \\
                  --adapter SJTU-Deng-Lab/D2F_LLaDA_Instruct_8B_Lora --prompt "..."
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
from safetensors.torch import load_file, save_file
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import distribute_tensor
from torch.utils.checkpoint import checkpoint
from tqdm import tqdm
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedTokenizerFast,
    Qwen2Config,
    Qwen2Tokenizer,
    Qwen3Config,
    Qwen3ForCausalLM,
)
from transformers.utils import cached_file, logging

import common
from common import (
    Decoder,
    block_causal,
    build_mask,
    causal,
    dense,
    full,
    generate_ar,
    own_projection,
    prepare,
    token_nll,
    walk,
)
from kernels import to_host

METHOD = "d2f"


@dataclasses.dataclass
class Config:
    # what all five scripts share
    model: str = "tiny"  # Hub id, folder, or the built-in backbone
    data: str = ""  # JSONL; empty: the built-in task
    out: str = f"runs/{METHOD}"
    steps: int = 10000  # [code] up to 50000
    ar_steps: int = 0  # plain AR fine-tuning before the method's own steps; kept as the AR baseline
    batch_size: int = 8  # [code] 1 on each of 8 devices
    accumulation: int = 1  # micro-batches a step; changes memory, not results
    lr: float = 1e-5  # [code] LLaDA, constant; Dream 5e-6
    ar_lr: float = 2e-5  # of the AR stage
    warmup: float = 0.0  # [code] share of the steps
    lr_floor: float = 1.0  # share of lr at the end: constant  [code]
    beta2: float = 0.95  # [code] AdamW
    weight_decay: float = 0.05  # [code]
    clip: float = 1.0  # [code]
    max_len: int = 1024  # [code] every row is padded with EOS to this length; longer ones are dropped
    max_new_tokens: int = 256  # [code] Dream; whole blocks: `generate` rounds down, --generate up
    problems: int = 64  # held-out problems decoded when no prompt is given
    temperature: float = 0.0  # [code]
    top_p: float = 1.0
    seed: int = 0
    device: str = "cuda" if torch.cuda.is_available() else "cpu"
    dtype: str = "bfloat16" if torch.cuda.is_available() else "float32"
    compile: bool = torch.cuda.is_available()
    save_every: int = 500
    mask_id: int | None = None  # None: from the model and its tokenizer
    eos_id: int | None = None
    vocab_len: int | None = None  # rows of the head behind the last token are never an output
    # D2F
    adapt_steps: int = 10000  # [ours] stage `adapt`, only for a backbone that is not a diffusion LM
    adapt_lr: float = 2e-5  # [ours]
    teacher: str = ""  # folder or id of a ready diffusion LM with the same vocabulary; takes the place of `adapt`
    adapter: str = ""  # folder or id of a PEFT adapter to start or to decode from
    shifted: bool = True  # logits at i-1 predict token i (Dream, AR descent) or at i (LLaDA); the model's mark wins
    eot_id: int | None = None  # closes the answer in front of the EOS padding: LLaDA's <|eot_id|>  [code]
    long_rows: str = "drop"  # [code] LLaDA; "cut": Dream cuts the answer, drops prompts above max_len - 100
    block_size: int = 16  # [code] training
    schedule: str = "monotone"  # [code]; "random": a ratio of its own for each block  [paper's ablation]
    p_min: float = 0.2  # [code]; 0.3  [paper]
    p_max: float = 0.7  # [code]
    objective: str = "soft"  # [code] the teacher's softmax; "hard": the data; "reverse": KL(student, teacher)  [Eq. 3]
    weighted: bool = True  # 1/p per token  [code]; not in the paper
    lora_rank: int = 32  # [code] this and the next two only for a new adapter
    lora_alpha: float = 32.0  # [code]
    lora_dropout: float = 0.1  # [code]
    decode_block_size: int = 32  # [paper] 32, 48 or 64, by task
    tau_add: float = 0.1  # [paper] progress of the last block at which one more is appended
    tau_act: float = 0.95  # [paper] progress of its predecessor at which a block becomes fully active
    tau_conf: float = 0.9  # [paper] confidence above which a token is fixed
    sampling_strategy: str = "default"  # [code] rank of the one forced token; margin_confidence, neg_entropy
    top_k: int = 0  # 0: off
    checkpointing: bool = False  # recompute layers in backward


# what `--model tiny` changes
TINY = dict(steps=250, ar_steps=650, adapt_steps=900, batch_size=32, lr=3e-3, ar_lr=2e-3, adapt_lr=1.5e-3, warmup=0.02,
            lr_floor=0.0, beta2=0.98, weight_decay=0.0, max_len=41, max_new_tokens=24, block_size=8,
            decode_block_size=8, p_max=1.0, lora_dropout=0.0)  # fmt: skip
TEMPLATE = {}  # arguments of the chat template


# ------------------------------------------------------------------------------------------------------- training step


def pad_rows(rows, cfg):
    """Rows of exactly max_len tokens, prompt | answer | EOS ...: padding is content, masked and learnt like all else.

    cfg.long_rows says what happens to longer ones: LLaDA's "drop", or Dream's "cut".  [code] ValueError if none fits.
    """
    padded = []
    for row in rows:
        prompt, answer = row["prompt_ids"], row["answer_ids"]
        if cfg.eot_id is not None:
            answer = answer[:-1] + [cfg.eot_id]
        room = cfg.max_len - len(prompt)
        keep = len(answer) <= room if cfg.long_rows == "drop" else room >= min(100, cfg.max_len - 1)
        if keep and prompt and room > 0:
            padded.append({"prompt_ids": prompt, "answer_ids": (answer + [cfg.eos_id] * room)[:room]})
    if not padded:
        raise ValueError(f"no row of {cfg.data or 'the built-in task'} fits into max_len {cfg.max_len}")
    if len(padded) < len(rows):
        print(f"{len(rows) - len(padded)} of {len(rows)} rows do not fit into max_len {cfg.max_len}: dropped",
              file=sys.stderr)  # fmt: skip
    return padded


def draw_noise(batch, cfg, generator):
    """Uniform draws in [0, 1) for rows of `pad_rows`; N is the largest number of blocks in the batch.

    Returns u_first (B,) and u_increment (B, N - 1), which make each block's mask ratio, and u_token (B, L).
    """
    B, L = len(batch), len(batch[0]["prompt_ids"]) + len(batch[0]["answer_ids"])
    N = max(-(-len(row["answer_ids"]) // cfg.block_size) for row in batch)
    shapes = dict(u_first=(B,), u_increment=(B, N - 1), u_token=(B, L))
    return {name: torch.rand(shape, generator=generator) for name, shape in shapes.items()}


def mask_ratios(u_first, u_increment, cfg):
    """Mask ratio of each block, (B, N): never falling along the blocks, so that later blocks are noisier.

    p[0] = p_min + u_first (p_max - p_min);  p[b] = p[b-1] + u_increment[b-1] (p_max - p[0]) / (N - 1).  [code]
    The random schedule gives each block a ratio of its own, uniform in [p_min, p_max].
    """
    first = (cfg.p_min + u_first * (cfg.p_max - cfg.p_min))[:, None]  # (B, 1)
    if cfg.schedule == "random":
        return torch.cat([first, cfg.p_min + u_increment * (cfg.p_max - cfg.p_min)], dim=1)
    steps = u_increment * (cfg.p_max - first) / max(u_increment.shape[1], 1)  # the batch's N, not the row's  [code]
    return torch.cat([first, first + steps.cumsum(dim=1)], dim=1).clamp(max=1)


def noisy_inputs(batch, p_mask, u_token, cfg):
    """Mask response token i where u_token < p_mask, both (B, L); never the prompt.

    Returns input_ids, labels (B, L) int64, -100: not masked; prompt_lens (B,) int64, is_masked (B, L) bool and weights
    (B, L) float32, 1 / (masked tokens of the batch) on each of them. All but the first and prompt_lens stand where the
    logits do that predict the token: one place to the left for a shifted backbone.
    """
    ids = torch.tensor([row["prompt_ids"] + row["answer_ids"] for row in batch])
    prompt_lens = torch.tensor([len(row["prompt_ids"]) for row in batch])
    is_masked = (u_token < p_mask) & (torch.arange(ids.shape[1]) >= prompt_lens[:, None])
    labels, weights = ids.masked_fill(~is_masked, -100), is_masked / is_masked.sum().clamp(min=1)
    moved = {name: at_logits(x, cfg) for name, x in dict(labels=labels, is_masked=is_masked, weights=weights).items()}
    return moved | dict(input_ids=ids.masked_fill(is_masked, cfg.mask_id), prompt_lens=prompt_lens)


def at_logits(x, cfg):
    """x (B, L) of token positions, moved to where the logits that predict them stand; position 0 is always prompt."""
    return x.roll(-1, dims=1) if cfg.shifted else x


def make_training_inputs(batch, draws, cfg):
    """The noisy rows that teacher and student both see; blocks are counted from the end of each prompt.

    Returns `noisy_inputs`; the loss is sum(weights * term). cfg.weighted: weights over the block's mask ratio as well.
    """
    prompt_lens = torch.tensor([len(row["prompt_ids"]) for row in batch])
    block_idx = (torch.arange(draws["u_token"].shape[1]) - prompt_lens[:, None]).clamp(min=0) // cfg.block_size
    p_mask = mask_ratios(draws["u_first"], draws["u_increment"], cfg).gather(1, block_idx)  # (B, L)
    inputs = noisy_inputs(batch, p_mask, draws["u_token"], cfg)
    return inputs | {"weights": inputs["weights"] / at_logits(p_mask, cfg)} if cfg.weighted else inputs


def token_distances(model, hidden, teacher_hidden, labels, cfg, chunk=2048):
    """Loss term of each masked token: (B, L) float32, 0 where the label is -100. hidden, teacher_hidden (B, L, width).

    Only masked rows are projected, in chunks that are recomputed in backward: logits (B, L, V) never exist.
    """

    def terms(rows, teacher_rows, targets):
        student = model.lm_head(rows).float().log_softmax(-1)  # (n, V)
        if cfg.objective == "hard":
            return F.nll_loss(student, targets, reduction="none")
        with torch.no_grad():
            teacher = model.lm_head(teacher_rows).float().log_softmax(-1)
        if cfg.objective == "reverse":
            return (student.exp() * (student - teacher)).sum(-1)  # KL(student, teacher)  [Eq. 3]
        return -(teacher.exp() * student).sum(-1)  # KL(teacher, student) + the teacher's entropy  [code]

    keep = labels != -100
    chunks = zip(hidden[keep].split(chunk), teacher_hidden[keep].split(chunk), labels[keep].split(chunk))
    parts = [checkpoint(terms, *rows, use_reentrant=False) for rows in chunks]
    return torch.zeros(labels.shape, device=labels.device).masked_scatter(keep, torch.cat(parts))


def training_loss(model, inputs, cfg):
    """Student (adapter on, block-causal) against teacher (adapter off, full attention). Returns (loss, logs)."""
    input_ids, labels, prompt_lens = inputs["input_ids"], inputs["labels"], inputs["prompt_lens"]
    (B, L), device = input_ids.shape, input_ids.device
    positions = torch.arange(L, device=device).expand(B, L)
    with torch.no_grad():
        teacher_hidden = walk(model, input_ids, positions, build_mask(full(), 1, L, L, device))
    attn_mask = build_mask(block_causal(cfg.block_size, prompt_lens), B, L, L, device)
    hidden = walk(model, input_ids, positions, attn_mask, project=adapted, checkpointing=cfg.checkpointing)
    loss = (inputs["weights"] * token_distances(model, hidden, teacher_hidden, labels, cfg)).sum()
    return loss, {"masked": round(inputs["is_masked"].float().mean().item(), 2)}


# ------------------------------------------------------------------------------------------------------------ decoding


def confidence(logits, cfg, generator):
    """A token for each row, its confidence and its rank. logits (..., V) -> (...) int64, float, float.

    Temperature, nucleus, top-k, softmax, in this order: the confidence is the probability after the filters.  [code]
    """
    logits = logits[..., : cfg.vocab_len].float()
    logits = logits.masked_fill(torch.arange(logits.shape[-1], device=logits.device) == cfg.mask_id, -torch.inf)
    if cfg.temperature > 0:
        logits = logits.double() / cfg.temperature
    if cfg.top_p < 1:
        ordered, order = logits.sort(dim=-1, descending=True)
        before = F.pad(ordered.softmax(-1).cumsum(-1)[..., :-1], (1, 0))  # mass in front; the best one stays
        logits = logits.masked_fill((before > cfg.top_p).gather(-1, order.argsort(-1)), -torch.inf)
    if cfg.top_k > 0:
        least = logits.topk(min(cfg.top_k, logits.shape[-1])).values[..., -1:]
        logits = logits.masked_fill(logits < least, -torch.inf)
    probs = logits.softmax(-1)
    pred_ids = probs.argmax(-1)
    if cfg.temperature > 0:  # the first of V exponential clocks with rates p rings for v with probability p_v
        clocks = torch.empty(probs.shape, dtype=torch.float64).exponential_(generator=generator)
        pred_ids = (probs / clocks.to(probs.device, non_blocking=True)).argmax(-1)
    conf = rank = probs.gather(-1, pred_ids[..., None])[..., 0]
    if cfg.sampling_strategy == "margin_confidence":
        best = probs.topk(2).values
        rank = best[..., 0] - best[..., 1]
    elif cfg.sampling_strategy == "neg_entropy":
        rank = (probs * torch.log(probs + 1e-10)).sum(-1)
    return pred_ids, conf, rank


Settings = collections.namedtuple("Settings", "mask_id vocab_len temperature top_p top_k sampling_strategy")


def readout(logits, input_ids, *settings):
    """For Decoder's read: `confidence` of every row when greedy, in the decoder's graph; else the logits."""
    settings = Settings(*settings)
    return (logits,) if settings.temperature > 0 else confidence(logits, settings, None)


def select(conf, rank, block_idx, is_full, cfg):
    """What is fixed: everything confident, strictly; in a fully active block without it the best rank.  (n,) bool

    conf, rank (n,) of the masked positions; block_idx (n,) their blocks; is_full: a bool for each block.
    """
    accept = conf > cfg.tau_conf
    for b in {*block_idx.tolist()}:
        own = block_idx == b
        if is_full[b] and not accept[own].any():
            accept[rank.masked_fill(~own, -torch.inf).argmax()] = True
    return accept


def begin(model, prompt_ids, cfg, decoder):
    """(P, block size, empty decoder) of a decoding; ValueError for a batch, an empty prompt, bad settings."""
    check(cfg)
    if prompt_ids.shape[0] != 1 or prompt_ids.shape[1] == 0:
        raise ValueError(f"D2F decodes one prompt of at least one token, not {tuple(prompt_ids.shape)}")
    P = prompt_ids.shape[1]
    return P, cfg.decode_block_size, (decoder or new_decoder(model, P, cfg)).reset()


@torch.no_grad()
def generate(model, prompt_ids, cfg, decoder=None, generator=None):
    """A pipeline of blocks, all filled by every forward, until no mask is left. Batch 1; loop state on the CPU.

    prompt_ids (1, P) int64. Returns (seq_ids (1, P+R), record): R whole blocks, what stands behind a first EOS included
    (`trim` cuts it), and forwards, rounds, fixed_round (R,) and passes, one dict a forward: cache_len before it,
    n_input tokens, n_commit of them that stay in the cache, revealed [[place in the response, token], ...].
    Raises ValueError for a batch or an empty prompt.
    """
    P, B, decoder = begin(model, prompt_ids, cfg, decoder)
    kv_cache, prompt_lens = decoder.kv_cache, torch.tensor([P])
    seq_ids, fixed_round, passes = prompt_ids[0].cpu(), [], []
    remaining, is_full, eos_seen = [], [], False  # per block: masks left; fully active
    read = readout, *(getattr(cfg, name) for name in Settings._fields)

    def progress(b):  # the prompt is a finished block in front of block 0
        return (B - remaining[b]) / B if b >= 0 else 1.0

    while True:
        # propose: one more block of masks once the last is far enough; a block is fully active from the time on that
        # its predecessor is nearly done
        if len(remaining) < cfg.max_new_tokens // B and not eos_seen and progress(len(remaining) - 1) >= cfg.tau_add:
            seq_ids = F.pad(seq_ids, (0, B), value=cfg.mask_id)
            remaining, is_full, fixed_round = remaining + [B], is_full + [False], fixed_round + [-1] * B
        is_full = [flag or progress(b - 1) >= cfg.tau_act for b, flag in enumerate(is_full)]
        if not any(remaining):
            break
        # score: all that is not cached yet, in front of it what has been finished by the pass before
        first = next(b for b, n_masks in enumerate(remaining) if n_masks)
        start, n = kv_cache.cache_len, len(seq_ids) - kv_cache.cache_len
        n_commit = P + first * B - start
        positions = torch.arange(start, start + n)[None]
        mask = dense(block_causal(B, prompt_lens, start), 1, n, start + n)
        out = decoder(seq_ids[None, start:], positions, mask, kv_cache.scratch_idx(n), read=read)
        out = [x[0] for x in out]  # per row
        kv_cache.commit(n_commit)  # its tokens and all that they see are final
        if cfg.shifted:
            if n_commit:
                seed = [x[n_commit - 1 : n_commit].clone() for x in out]  # of the first uncached token, also later on
            out = [torch.cat([row, x[:-1]]) for row, x in zip(seed, out)]
        masked_idx = first * B + (seq_ids[P + first * B :] == cfg.mask_id).nonzero()[:, 0]  # places in the response
        rows = (P + masked_idx - start).to(out[0].device, non_blocking=True)
        out = [x[rows] for x in out]
        pred_ids, conf, rank = to_host(*(confidence(*out, cfg, generator) if cfg.temperature > 0 else out))
        # select: blocks do not see each other's new tokens before the next pass
        accept = select(conf, rank, masked_idx // B, is_full, cfg)
        # commit
        revealed = list(zip(masked_idx[accept].tolist(), pred_ids[accept].tolist()))
        for i, token in revealed:
            seq_ids[P + i], fixed_round[i] = token, len(passes)
            remaining[i // B] -= 1
            eos_seen |= token == cfg.eos_id  # anywhere: no further block, but all existing ones are finished
        passes.append(dict(cache_len=start, n_input=n, n_commit=n_commit, revealed=[list(pair) for pair in revealed]))
    record = dict(forwards=decoder.forwards, rounds=len(passes), fixed_round=fixed_round, passes=passes)
    return seq_ids[None].to(prompt_ids.device), record


# ----------------------------------------- the teacher: an AR backbone made a masked diffusion LM, and its own decoding


def draw_adapt_noise(batch, cfg, generator):
    """u_row (B,), spread evenly over [0, 1) from one draw, and u_token (B, L)."""
    B, L = len(batch), len(batch[0]["prompt_ids"]) + len(batch[0]["answer_ids"])
    u_row = (torch.rand(1, generator=generator) + torch.arange(B) / B) % 1
    return dict(u_row=u_row, u_token=torch.rand(B, L, generator=generator))


def make_adapt_inputs(batch, draws, cfg):
    """Plain masked diffusion: one mask ratio in [0.001, 1] a row; the loss is the mean over the masked tokens.

    Without the 1/t of the likelihood bound, which learns slower here.  [ours]
    """
    t = (1 - 1e-3) * draws["u_row"][:, None] + 1e-3  # (B, 1)
    return noisy_inputs(batch, t, draws["u_token"], cfg)


def adapt_to_diffusion(model, inputs, cfg):
    """The loss that makes any causal LM a masked diffusion LM with full attention, all weights trained: the teacher."""
    (B, L), device = inputs["input_ids"].shape, inputs["input_ids"].device
    positions, attn_mask = torch.arange(L, device=device).expand(B, L), build_mask(full(), 1, L, L, device)
    hidden = walk(model, inputs["input_ids"], positions, attn_mask, checkpointing=cfg.checkpointing)
    return (inputs["weights"] * token_nll(model, hidden, inputs["labels"])).sum(), {}


@torch.no_grad()
def generate_vanilla(model, prompt_ids, cfg, decoder=None, generator=None):
    """The teacher without D2F: full attention over prompt and all masks, no cache, one token a forward. Batch 1.

    The most confident token of the first unfinished block is fixed.  [ours: block after block, as LLaDA is used]
    Arguments, result (without passes) and errors as `generate`; the decoder serves the teacher alone from then on.
    """
    P, B, decoder = begin(model, prompt_ids, cfg, decoder)
    R = cfg.max_new_tokens // B * B
    decoder.project = own_projection  # adapter off
    seq_ids = F.pad(prompt_ids.cpu(), (0, R), value=cfg.mask_id)
    positions, mask = torch.arange(P + R)[None], dense(full(), 1, P + R, P + R)
    fixed_round = [-1] * R
    for turn in range(R):
        logits = decoder(seq_ids, positions, mask, decoder.kv_cache.scratch_idx(P + R))[0]  # never committed
        first = P + turn // B * B  # of the block's places
        idx = first + (seq_ids[0, first : first + B] == cfg.mask_id).nonzero()[:, 0]
        rows = logits[(idx - int(cfg.shifted)).to(logits.device, non_blocking=True)]
        pred_ids, _, rank = to_host(*confidence(rows, cfg, generator))
        best = rank.argmax()
        seq_ids[0, idx[best]], fixed_round[idx[best] - P] = pred_ids[best], turn
    return seq_ids.to(prompt_ids.device), dict(forwards=decoder.forwards, rounds=R, fixed_round=fixed_round)


# ---------------------------------------------------------------------------------------------------------------- LoRA

ADAPTER_FILES = ("adapter_config.json", "adapter_model.safetensors")
PLAIN = dict(peft_type="LORA", bias="none", fan_in_fan_out=False, use_dora=False, modules_to_save=None,
             rank_pattern={}, alpha_pattern={})  # fmt: skip
PEFT_KEY = re.compile(
    r"base_model\.model\.model\.(?:layers\.(\d+)\.self_attn|transformer\.blocks\.(\d+))\.(\w+)\.lora_([AB])\.weight"
)
PROJECTIONS = ("q_proj", "k_proj", "v_proj", "o_proj")  # what LoRA hangs on  [code]; LLaDA calls the last attn_out


def adapted(attn, name, x):
    """The student's projection: W x + scale B A dropout(x). `own_projection` leaves the adapter off: the teacher."""
    linear = getattr(attn, name)
    if not hasattr(linear, "lora_A"):
        return linear(x)
    low = F.linear(F.dropout(x, linear.lora_dropout, linear.training), linear.lora_A)  # (B, T, r)
    return linear(x) + linear.lora_scale * F.linear(low, linear.lora_B)


def merged(attn, name, x):
    """`adapted` in one product, for decoding; see `merge_adapter`."""
    linear = getattr(attn, name)
    return F.linear(x, linear.merged, linear.bias) if hasattr(linear, "merged") else linear(x)


def projections(model):
    """(layer, name, module) of all projections that may carry an adapter."""
    layers = enumerate(model.model.layers)
    return [(idx, name, getattr(layer.self_attn, name)) for idx, layer in layers for name in PROJECTIONS]


@torch.no_grad()
def merge_adapter(model):
    """W + scale B A beside each W, in float32, then cast. W stays: merging twice adds nothing, the teacher is there."""
    for _, _, linear in projections(model):
        if hasattr(linear, "lora_A"):
            if not hasattr(linear, "merged"):
                linear.register_buffer("merged", torch.empty_like(linear.weight), persistent=False)
            weight = linear.weight.float() + linear.lora_scale * (linear.lora_B @ linear.lora_A)
            linear.merged.copy_(weight)  # in place: captured graphs hold the address


def new_adapter(model, cfg):
    """(config, tensors) of an adapter that changes nothing yet: A Kaiming-uniform (a = sqrt 5), B zero.  [code]"""
    generator, tensors = torch.Generator().manual_seed(cfg.seed), {}
    for idx, name, linear in projections(model):
        bound = linear.in_features**-0.5
        A = torch.empty(cfg.lora_rank, linear.in_features).uniform_(-bound, bound, generator=generator)
        tensors |= {(idx, name, "A"): A, (idx, name, "B"): torch.zeros(linear.out_features, cfg.lora_rank)}
    return dict(r=cfg.lora_rank, lora_alpha=cfg.lora_alpha, lora_dropout=cfg.lora_dropout), tensors


def attach_adapter(model, config, tensors):
    """Hang lora_A (r, in) and lora_B (out, r), float32, on the projections; freeze all else. Returns the model.

    config, tensors: of `new_adapter` or `read_adapter`. Raises ValueError for an adapter of other layers or sizes.
    """
    model.requires_grad_(False)
    scale = config["lora_alpha"] / (config["r"] ** 0.5 if config.get("use_rslora") else config["r"])
    todo = dict(tensors)
    for idx, name, linear in projections(model):
        A, B = (todo.pop((idx, name, X), torch.empty(0)) for X in "AB")
        if A.numel() == B.numel() == 0:
            continue
        if (A.shape, B.shape) != ((config["r"], linear.in_features), (linear.out_features, config["r"])):
            raise ValueError(f"the adapter does not fit the model: layer {idx}, {name}")
        linear.lora_A, linear.lora_B = (torch.nn.Parameter(x.float().to(linear.weight.device)) for x in (A, B))
        linear.lora_scale, linear.lora_dropout = scale, config.get("lora_dropout") or 0.0
    if todo:
        raise ValueError("the adapter does not fit the model: layer {}, {}".format(*next(iter(todo))))
    model.adapter_config = config
    return model


def read_adapter(name):
    """(config, tensors) of a PEFT folder or id, with LLaDA's own key names or Llama's; for `attach_adapter`.

    Raises ValueError, one line, for whatever is not plain LoRA on q, k, v and attention-output projections.
    """
    try:
        config_file, tensor_file = (cached_file(name, file) for file in ADAPTER_FILES)
        config, loaded, tensors = json.loads(Path(config_file).read_text()), load_file(tensor_file), {}
        odd = [key for key, value in PLAIN.items() if (config.get(key, value) or None) != (value or None)]
        odd += [key for key in ("r", "lora_alpha") if not config[key] > 0]
        odd += ["lora_dropout"] * (not 0 <= (config.get("lora_dropout") or 0.0) < 1)
    except Exception as error:
        raise ValueError(f"cannot load adapter {name!r}: {' '.join(str(error).split())[:300]}") from error
    for key, tensor in loaded.items():
        match = PEFT_KEY.fullmatch(key)
        projection = match and match[3].replace("attn_out", "o_proj")
        if projection in PROJECTIONS:
            tensors[int(match[1] or match[2]), projection, match[4]] = tensor
        else:
            odd.append(key)
    if odd or not tensors:
        raise ValueError(f"adapter {name!r} is not plain LoRA on {', '.join(PROJECTIONS)}: see {(odd + ['keys'])[0]}")
    return config, tensors


def write_adapter(model, folder, cfg):
    """The adapter in PEFT's format, under the key names of the checkpoint that the backbone came from."""
    is_llada = getattr(model.config, "native_layout", None) == "llada"
    path, output = ("transformer.blocks.{}", "attn_out") if is_llada else ("layers.{}.self_attn", "o_proj")
    tensors = {}
    for idx, name, linear in projections(model):
        key = f"base_model.model.model.{path.format(idx)}.{name.replace('o_proj', output)}"
        if hasattr(linear, "lora_A"):
            tensors |= {f"{key}.lora_{X}.weight": getattr(linear, f"lora_{X}").detach() for X in "AB"}
    trained = any(stage.steps for stage in stages(cfg)[:-1])  # is the base another than the one that was named?
    base = cfg.teacher or (cfg.out if trained else cfg.model)
    targets = sorted({key.rsplit(".", 3)[1] for key in tensors})
    config = PLAIN | {"task_type": None, "use_rslora": False, "inference_mode": True} | model.adapter_config
    config |= {"base_model_name_or_path": base, "target_modules": targets}
    Path(folder, ADAPTER_FILES[0]).write_text(json.dumps(config, indent=1))
    save_file(tensors, Path(folder, ADAPTER_FILES[1]))


# ----------------------------------------------------------------------------------------------- backbones of the paper

LLADA_LAYER = dict(attn_norm="input_layernorm", q_proj="self_attn.q_proj", k_proj="self_attn.k_proj",
                   v_proj="self_attn.v_proj", attn_out="self_attn.o_proj", ff_norm="post_attention_layernorm",
                   ff_proj="mlp.gate_proj", up_proj="mlp.up_proj", ff_out="mlp.down_proj")  # fmt: skip
LLADA_EOT = 126348  # <|eot_id|>; the checkpoint's config does not name it
LLADA_TOP = dict(wte="model.embed_tokens", ln_f="model.norm", ff_out="lm_head")
LLADA_STANDARD = dict(block_type="llama", layer_norm_type="rms", block_group_size=1, rope=True, alibi=False,
                      attention_layer_norm=False, scale_logits=False, input_emb_norm=False,
                      multi_query_attention=False)  # fmt: skip


def read_config(name):
    """config.json of a folder or id, as it stands."""
    return json.loads(Path(cached_file(name, "config.json")).read_text())


def read_tensors(name):
    """All tensors of a folder or id, in one file or several."""
    try:
        index = json.loads(Path(cached_file(name, "model.safetensors.index.json")).read_text())
        files = sorted(set(index["weight_map"].values()))
    except OSError:
        files = ["model.safetensors"]
    return {key: tensor for file in files for key, tensor in load_file(cached_file(name, file)).items()}


def llada_to_llama(raw, tensors):
    """(LlamaConfig, tensors) of a LLaDA checkpoint: names change, no value does. Raises ValueError if it is another."""
    for key, value in LLADA_STANDARD.items():
        if (raw.get(key, value) or False) != value:
            raise ValueError(f"LLaDA with {key} {raw[key]!r} is not supported")
    config = LlamaConfig(
        hidden_size=raw["d_model"], num_hidden_layers=raw["n_layers"], num_attention_heads=raw["n_heads"],
        num_key_value_heads=raw.get("n_kv_heads") or raw["n_heads"], intermediate_size=raw["mlp_hidden_size"],
        vocab_size=raw.get("embedding_size") or raw["vocab_size"], max_position_embeddings=raw["max_sequence_length"],
        rms_norm_eps=raw["rms_norm_eps"], rope_theta=raw["rope_theta"], hidden_act=raw["activation_type"],
        tie_word_embeddings=raw["weight_tying"], attention_bias=raw["include_bias"] or bool(raw["include_qkv_bias"]),
        mlp_bias=raw["include_bias"], bos_token_id=None, eos_token_id=raw["eos_token_id"], pad_token_id=None,
        mask_token_id=raw["mask_token_id"], eot_token_id=LLADA_EOT if raw["vocab_size"] > LLADA_EOT else None,
        shifted_logits=False, native_layout="llada",
    )  # fmt: skip
    renamed = {}
    for key, tensor in tensors.items():
        stem, _, kind = key.removeprefix("model.transformer.").rpartition(".")
        layer = re.fullmatch(r"blocks\.(\d+)\.(\w+)", stem)  # ff_out occurs at both levels
        target = LLADA_LAYER.get(layer[2]) if layer else LLADA_TOP.get(stem)
        if target is None:
            raise ValueError(f"LLaDA's tensor {key} is unknown")
        renamed[f"model.layers.{layer[1]}.{target}.{kind}" if layer else f"{target}.{kind}"] = tensor
    return config, renamed


def dream_to_qwen2(raw):
    """Qwen2Config of a Dream checkpoint; its tensors have Qwen2's names."""
    raw = {key: value for key, value in raw.items() if key not in ("model_type", "architectures", "auto_map")}
    return Qwen2Config(**raw, shifted_logits=True)


# -------------------------------------------------------------------------------------- what the frame asks of a script


OWN_FLAGS = {}  # flags of this script alone: name -> (arguments of add_argument, function(cfg, value))


def check(cfg):
    """Raise ValueError, one line, for settings that cannot work."""
    for name, low in (("tau_add", 0), ("tau_act", 0), ("tau_conf", -1)):  # tau_act > 1 would stall, tau_add never start
        if not low <= getattr(cfg, name) <= 1:
            raise ValueError(f"{name} must lie in [{low}, 1], not {getattr(cfg, name)}")
    if min(cfg.block_size, cfg.decode_block_size, cfg.lora_rank) < 1 or cfg.top_k < 0:
        raise ValueError("block_size, decode_block_size and lora_rank must be at least 1, top_k at least 0")
    if not (0 < cfg.p_min <= cfg.p_max <= 1 and 0 <= cfg.lora_dropout < 1):
        raise ValueError("mask ratios need 0 < p_min <= p_max <= 1, lora_dropout must lie in [0, 1)")
    if cfg.adapt_lr <= 0 or cfg.adapt_steps < 0:
        raise ValueError("adapt_lr must be positive, adapt_steps at least 0")
    choices = dict(schedule="monotone random", objective="soft reverse hard", long_rows="drop cut",
                   sampling_strategy="default margin_confidence neg_entropy")  # fmt: skip
    for name, words in choices.items():
        if getattr(cfg, name) not in words.split():
            raise ValueError(f"{name} is one of {words}, not {getattr(cfg, name)!r}")


def load_backbone(name, dtype):
    """A Hugging Face causal LM; LLaDA comes in Llama's shape, Dream in Qwen2's. Raises ValueError for missing weights.

    config.shifted_logits, where it is there, marks a masked diffusion LM and says which logits predict a token.
    """
    raw = read_config(name)
    if raw.get("model_type") == "llada":
        config, tensors = llada_to_llama(raw, read_tensors(name))
        return common.from_pretrained(LlamaForCausalLM, None, config=config, state_dict=tensors, dtype=dtype)
    config = {"config": dream_to_qwen2(raw)} if raw.get("model_type") == "Dream" else {}
    return common.from_pretrained(AutoModelForCausalLM, name, dtype=dtype, **config)


def load_tokenizer(name):
    """Dream and LLaDA name remote code; Dream's tokenizer files are Qwen2's, LLaDA's is a plain fast tokenizer."""
    own = {"Dream": Qwen2Tokenizer, "llada": PreTrainedTokenizerFast}.get(read_config(name).get("model_type"))
    return own.from_pretrained(name) if own else AutoTokenizer.from_pretrained(name, trust_remote_code=False)


def enter_stage(model, stage, folder, cfg):
    """`adapt`: all weights train, the config is marked. `d2f`: the base is frozen, an adapter hangs on it.

    The adapter is cfg.adapter, which is used up by this, else the one saved in folder, else (in training) a new one.
    """
    cfg.shifted = getattr(model.config, "shifted_logits", cfg.shifted)
    cfg.eot_id = getattr(model.config, "eot_token_id", cfg.eot_id)
    if stage == "adapt":
        print(f"{METHOD}: {cfg.model} is no diffusion LM: `adapt` makes it one, with full attention; it is the teacher")
    for name, read in ((cfg.teacher, read_config), (cfg.adapter, read_adapter)):
        if name and stage != METHOD:  # what the last stage needs is looked for before the first one trains
            read(name)
    if stage == METHOD and folder is None and cfg.teacher:
        held = dataclasses.replace(cfg)
        model, _ = load(cfg.teacher, held, training=True)
        if (held.mask_id, held.eos_id, held.vocab_len) != (cfg.mask_id, cfg.eos_id, cfg.vocab_len):
            raise ValueError(f"teacher {cfg.teacher!r} has another vocabulary or mask token than {cfg.model}")
        cfg.shifted = getattr(model.config, "shifted_logits", cfg.shifted)
    if stage != "ar":
        model.config.shifted_logits = cfg.shifted
    if stage == METHOD:
        source, cfg.adapter = cfg.adapter or saved_adapter(folder), ""
        if source or folder is None:
            attach_adapter(model, *(read_adapter(source) if source else new_adapter(model, cfg)))
        else:
            print(f"{folder} has no adapter: D2F decodes with its own weights", file=sys.stderr)
    return model


def saved_adapter(folder):
    """The adapter in a folder of ours, or "": one of an earlier run may lie beside a save of an earlier stage."""
    state = Path(folder or "", "training_state.safetensors")
    if folder is None or not Path(folder, "adapter").is_dir():
        return ""
    return f"{folder}/adapter" if not state.is_file() or read_state(folder)[0] == METHOD else ""


def save_method(model, folder, cfg):
    """The base as a plain Hugging Face folder, in it the PEFT folder `adapter`; the frame adds tokenizer, settings."""
    base = {key: tensor for key, tensor in model.state_dict().items() if "lora_" not in key}
    model.save_pretrained(folder, state_dict=base, max_shard_size="1000GB")
    if hasattr(model, "adapter_config"):
        Path(folder, "adapter").mkdir()
        write_adapter(model, Path(folder, "adapter"), cfg)


def plain_lm(model):
    """What plain AR decoding runs on where there is no AR baseline."""
    return model


def spare_mask_id(backbone, tokenizer):
    """A mask token for a backbone that has none and is not to be trained: D2F must have learnt it."""
    return None


def whole_blocks(cfg):
    """max_new_tokens that makes `generate` write at least the wanted number of tokens: it counts whole blocks."""
    return -(-cfg.max_new_tokens // cfg.decode_block_size) * cfg.decode_block_size


def new_decoder(model, prompt_len, cfg):
    """A Decoder with room for a prompt and what generate writes, the adapter merged."""
    merge_adapter(model)
    return Decoder(model, prompt_len + whole_blocks(cfg), compiled=cfg.compile, project=merged)


def stages(cfg):
    """The stages of training, in order: plain AR, if asked for; the teacher, if there is none yet; the method."""
    try:
        raw = {} if cfg.model == "tiny" else read_config(cfg.model)
    except OSError:  # resumed elsewhere: the settings say what is left to do
        raw = {}
    is_ready = cfg.teacher or "shifted_logits" in raw or raw.get("model_type") in ("llada", "Dream")
    adapt_steps = 0 if is_ready else cfg.adapt_steps
    return [
        Stage("ar", cfg.ar_steps, cfg.ar_lr, keep_short, None, make_ar_inputs, ar_loss),
        Stage("adapt", adapt_steps, cfg.adapt_lr, pad_rows, draw_adapt_noise, make_adapt_inputs, adapt_to_diffusion),
        Stage(METHOD, cfg.steps, cfg.lr, pad_rows, draw_noise, make_training_inputs, training_loss),
    ]


def decoders(cfg):
    """(label, generate) of each decoding that `--generate` puts beside plain AR."""

    def rounded(run):
        return lambda model, prompt_ids, cfg, *rest: run(
            model, prompt_ids, dataclasses.replace(cfg, max_new_tokens=whole_blocks(cfg)), *rest
        )

    return [(METHOD, rounded(generate)), ("vanilla diffusion (teacher, no cache)", rounded(generate_vanilla))]


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
