"""D2F: a bidirectional diffusion LM distilled into a block-causal one, decoded as a pipeline of blocks.

Paper         Diffusion LLMs Can Do Faster-Than-AR Inference via Discrete Diffusion Forcing, arXiv 2508.09192
              and the ICLR 2026 text: numbers in brackets are of both, lines of Alg. 2 of the ICLR text
Idea          A masked diffusion LM keeps its weights and changes one thing, the mask: full attention inside a
              block, causal between blocks, so finished blocks have an exact KV cache. LoRA is distilled from
              the same weights with full attention, later blocks being noisier: the student predicts a block
              while those before it are still half masked, and every forward fills several blocks.
Differs       from plain AR: 1. a bidirectional block predicts its masks  2. loss against a teacher, not data
              3. a forward fixes any number of tokens, in several blocks  4. a block is cached a pass later
Implements    rising noise [§4.1, Eq. 1] -> make_training_inputs; Alg. 1, Eq. 2 and 3 -> training_loss;
              Alg. 2 -> generate; the teacher, decoded without cache -> generate_vanilla
Left out      making the teacher, decoding of several prompts at once, training without LoRA
Not as in     the paper: KL(teacher, student) and a weight 1/p, as in the code (--objective reverse
              --no-weighted is Eq. 3); tau_add and tau_act are reached, not exceeded [code]; Alg. 2 l.14 would
              cache a block in the pass that fills its last masks, with keys made from masks: here in the next
              the code: the mask token is never an output; nothing masked gives a zero loss instead of NaN;
              confidences are float32; max_new_tokens is rounded up to whole blocks, not down
Run           python d2f.py --train --generate            (tests/tiny, CPU)
              python d2f.py --generate --model GSAI-ML/LLaDA-8B-Instruct \\
                  --adapter SJTU-Deng-Lab/D2F_LLaDA_Instruct_8B_Lora --prompt "..."
"""

import argparse
import contextlib
import dataclasses
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
import torch.nn.functional as F
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import distribute_tensor
from tqdm import tqdm
from transformers import LlamaConfig, PretrainedConfig
from transformers.utils import cached_file, logging

import common
from common import Decoder, block_causal, build_mask, dense, full, generate_ar, is_eos, kernels, walk

METHOD = "d2f"
HERE = Path(__file__).resolve().parent


@dataclasses.dataclass
class Config:
    # what all five scripts share
    model: str = f"{HERE}/tests/tiny/dlm"  # Hub id or folder of the backbone, a masked diffusion LM
    data: str = f"{HERE}/tests/tiny/train.jsonl"  # JSONL to train on
    test: str = ""  # JSONL to decode
    problems: int = 64  # most rows of it to decode
    out: str = f"runs/{METHOD}"  # folder of the saves
    steps: int = 10000  # [code] up to 50000
    batch_size: int = 8  # [code] rows a step, over all processes
    accumulation: int = 8  # forwards a step and process; changes memory, not results
    lr: float = 1e-5  # [§5.1]; 5e-6 for Dream [code]
    warmup: float = 0.0  # [code] share of the steps
    lr_floor: float = 1.0  # [§5.1] share of lr at the end: constant
    beta2: float = 0.95  # [code] AdamW
    weight_decay: float = 0.05  # [code]
    clip: float = 1.0  # [code] largest norm of the gradient
    max_len: int = 1024  # [§5.1] tokens of every row, filled with EOS; 512 in v1
    save_every: int = 500  # steps
    checkpointing: bool = False  # recompute layers in backward
    max_new_tokens: int = 256  # [code] of Dream; 512 of LLaDA
    temperature: float = 0.0  # [code]
    seed: int = 0
    device: str = "cuda" if torch.cuda.is_available() else "cpu"
    dtype: Literal["bfloat16", "float32"] = "bfloat16" if torch.cuda.is_available() else "float32"
    baseline: str = ""  # plain AR model to compare with
    mask_id: int | None = None
    eos_id: int | list | None = None  # of a list each ends a text
    vocab_len: int | None = None  # rows of the head from here on are no tokens
    # D2F
    adapter: str = ""  # folder or Hub id of a PEFT adapter to start or to decode from
    shifted: bool = True  # logits at i-1 predict token i (Dream) or at i (LLaDA); the model's mark wins
    eot_id: int | None = None  # closes the answer before the EOS padding: LLaDA's <|eot_id|> [code]
    long_rows: Literal["drop", "cut"] = "drop"  # [code] of LLaDA; cut: Dream, prompts up to max_len - 100
    block_size: int = 16  # [§5.1] in training
    schedule: Literal["monotone", "random"] = "monotone"  # [§4.1]; random: each block for itself [Table 4]
    p_min: float = 0.2  # [§5.1] least mask ratio; 0.3 in v1
    p_max: float = 0.7  # [§5.1] largest mask ratio
    objective: Literal["soft", "reverse", "hard"] = "soft"  # [code]; KL(student, teacher) [Eq. 3]; the data
    weighted: bool = True  # [code] 1/p for each token
    lora_rank: int = 32  # [§5.1] a ready adapter's own wins, here and in the next two
    lora_alpha: float = 32.0  # [§5.1]
    lora_dropout: float = 0.1  # [§5.1]
    decode_block_size: int = 32  # [Table 8 of v1] 32, 48 or 64 by task
    tau_add: float = 0.1  # [§5.1] share of the last block decoded when one more is appended
    tau_act: float = 0.95  # [§5.1] share of its predecessor decoded when a block becomes fully active
    tau_conf: float = 0.9  # [§5.1] confidence above which a token is fixed
    top_p: float = 1.0  # [code] nucleus
    top_k: int = 0  # [code] 0: off
    sampling_strategy: Literal["default", "margin_confidence", "neg_entropy"] = "default"  # [code] ranking


# what the model of tests/tiny changes; p_max: a small teacher must show blocks of masks alone
TINY = dict(test=f"{HERE}/tests/tiny/test.jsonl", baseline=f"{HERE}/tests/tiny/ar", steps=150, batch_size=64,
            accumulation=1, lr=2e-3, warmup=0.05, lr_floor=0.0, beta2=0.98, weight_decay=0.0, max_len=41,
            max_new_tokens=24, block_size=8, decode_block_size=8, p_max=1.0, lora_dropout=0.0)  # fmt: skip
LIMITS = dict.fromkeys(("block_size", "decode_block_size", "lora_rank"), (1, 10**6)) | dict(
    tau_add=(0, 1), tau_act=(0, 1), tau_conf=(-1, 1), p_min=(1e-3, 1), p_max=(1e-3, 1), lora_dropout=(0, 1),
    lora_alpha=(1e-6, 1e6), top_p=(0, 1), top_k=(0, 10**9))  # fmt: skip
TEMPLATE = {}  # arguments of the chat template


# ---------------------------------------------------------------------------------------------- training step


def pad_rows(rows, cfg):
    """Rows of exactly max_len tokens: prompt | answer | EOS ... The padding is learnt as well [code].

    cfg.long_rows says what becomes of longer ones. ValueError if none is left.
    """
    padded = []
    for row in rows:
        *answer, eos_id = row["answer_ids"]
        answer.append(eos_id if cfg.eot_id is None else cfg.eot_id)
        room = cfg.max_len - len(row["prompt_ids"])
        fits = len(answer) <= room if cfg.long_rows == "drop" else room >= min(100, cfg.max_len - 1)
        if fits and row["prompt_ids"]:
            padded.append(row | {"answer_ids": (answer + [eos_id] * room)[:room]})
    if not padded:
        raise ValueError(f"{cfg.data}: no row fits into max_len {cfg.max_len}")
    if len(padded) < len(rows):
        print(f"{len(rows) - len(padded)} of {len(rows)} rows exceed max_len: dropped", file=sys.stderr)
    return padded


def draw_noise(batch, cfg, generator):
    """Uniform draws in [0, 1) for rows of `pad_rows`; N is the largest number of blocks in the batch.

    Returns u_first (B,) and u_increment (B, N-1), which make the mask ratios of blocks, and u_token (B, L).
    """
    B = len(batch)
    L = len(batch[0]["prompt_ids"]) + len(batch[0]["answer_ids"])
    N = max(-(-len(row["answer_ids"]) // cfg.block_size) for row in batch)
    shapes = dict(u_first=(B,), u_increment=(B, N - 1), u_token=(B, L))
    return {name: torch.rand(shape, generator=generator) for name, shape in shapes.items()}


def mask_ratios(u_first, u_increment, cfg):
    """Mask ratio of each block: (B,), (B, N-1) -> (B, N). Later blocks are noisier.  [§4.1, Alg. 1 l.4]

    p[0] = p_min + u_first (p_max - p_min);  p[b] = p[b-1] + u_increment[b-1] (p_max - p[0]) / (N - 1)  [code]
    """
    first = (cfg.p_min + u_first * (cfg.p_max - cfg.p_min))[:, None]  # (B, 1)
    if cfg.schedule == "random":
        return torch.cat([first, cfg.p_min + u_increment * (cfg.p_max - cfg.p_min)], dim=1)
    steps = u_increment * (cfg.p_max - first) / max(u_increment.shape[1], 1)  # N is the batch's  [code]
    return torch.cat([first, first + steps.cumsum(dim=1)], dim=1).clamp(max=1)


def make_training_inputs(batch, draws, cfg):
    """The noisy rows that teacher and student both see; the prompt is never masked.  [Alg. 1 l.3-5]

    Response token i is masked where u_token < p of its block [Eq. 1]; blocks start where the prompt ends.
    Returns input_ids, labels (B, L) int64, -100: not masked; prompt_lens (B,) int64; weights (B, L) float32:
    1 / (masked tokens of the batch), with cfg.weighted over p; the loss is sum(weights * term). Labels and
    weights stand where the logits do that predict the token: one place to the left if cfg.shifted.
    """
    ids = torch.tensor([row["prompt_ids"] + row["answer_ids"] for row in batch])
    prompt_lens = torch.tensor([len(row["prompt_ids"]) for row in batch])
    response_idx = torch.arange(ids.shape[1]) - prompt_lens[:, None]  # (B, L)
    p_block = mask_ratios(draws["u_first"], draws["u_increment"], cfg)
    p_mask = p_block.gather(1, response_idx.clamp(min=0) // cfg.block_size)  # (B, L)
    is_masked = (draws["u_token"] < p_mask) & (response_idx >= 0)
    labels = ids.masked_fill(~is_masked, -100)
    weights = is_masked / is_masked.sum().clamp(min=1)
    if cfg.weighted:
        weights = weights / p_mask
    if cfg.shifted:  # nothing wraps round: the first token is always prompt
        labels = labels.roll(-1, dims=1)
        weights = weights.roll(-1, dims=1)
    input_ids = ids.masked_fill(is_masked, cfg.mask_id)
    return dict(input_ids=input_ids, labels=labels, weights=weights, prompt_lens=prompt_lens)


def token_distances(head, hidden, teacher_hidden, labels, cfg, chunk=2048):
    """Distance of student and teacher: (B, L) float32, 0 where the label is -100: no row there is projected.

    head: hidden (n, width) -> logits (n, V); hidden, teacher_hidden (B, L, width); labels (B, L) int64.
    """

    def distance(rows, teacher_rows, targets):
        student = head(rows).float().log_softmax(-1)  # (n, V)
        if cfg.objective == "hard":
            return F.nll_loss(student, targets, reduction="none")
        with torch.no_grad():
            teacher = head(teacher_rows).float().log_softmax(-1)
        if cfg.objective == "reverse":
            return (student.exp() * (student - teacher)).sum(-1)  # KL(student, teacher)  [Eq. 3]
        return -(teacher.exp() * student).sum(-1)  # KL(teacher, student) + the teacher's entropy  [code]

    keep = labels != -100
    distances = common.by_chunks(distance, hidden[keep], teacher_hidden[keep], labels[keep], chunk=chunk)
    return torch.zeros(labels.shape, device=labels.device).masked_scatter(keep, distances)


def training_loss(model, inputs, cfg):
    """Student against teacher, the same weights without LoRA, on the same noisy rows. Returns (loss, logs).

    The teacher sees all blocks, the student those up to the token's own.  [Eq. 2, Alg. 1 l.6-9]
    """
    input_ids = inputs["input_ids"]
    B, L = input_ids.shape
    positions = torch.arange(L, device=input_ids.device).expand(B, L)
    with torch.no_grad():
        teacher_hidden = walk(model, input_ids, positions, build_mask(full(), 1, L, L, input_ids.device))
    attn_mask = build_mask(block_causal(cfg.block_size, inputs["prompt_lens"]), B, L, L, input_ids.device)
    hidden = walk(model, input_ids, positions, attn_mask, project=adapted, checkpointing=cfg.checkpointing)
    distances = token_distances(model.lm_head, hidden, teacher_hidden, inputs["labels"], cfg)
    return (inputs["weights"] * distances).sum(), {"masked": (inputs["labels"] != -100).float().mean()}


# ------------------------------------------------------------------------------------------------------- LoRA

PROJECTIONS = ("q_proj", "k_proj", "v_proj", "o_proj")  # [§5.1]; LLaDA calls the last attn_out


def adapted(attn, name, x):
    """The student's projection: W x + scale B A dropout(x). Without it LoRA is off: the teacher."""
    linear = getattr(attn, name)
    if not hasattr(linear, "lora_A"):
        return linear(x)
    low = F.linear(F.dropout(x, linear.lora_dropout, linear.training), linear.lora_A.to(x.dtype))  # (B, T, r)
    return linear(x) + linear.lora_scale * F.linear(low, linear.lora_B.to(x.dtype))


def attach_adapter(model, cfg, tensors):
    """Hang lora_A (r, in) and lora_B (out, r), float32, on PROJECTIONS; freeze all else. Returns the model.

    tensors: of `read_adapter` or of a save; {}: a new adapter that changes nothing yet, A Kaiming-uniform
    (a = sqrt 5), B zero [code]. Raises ValueError for an adapter of other projections, layers or sizes.
    """
    model.requires_grad_(False)
    generator = torch.Generator().manual_seed(cfg.seed)
    fresh = {}
    for path, linear in model.named_modules():
        if path.split(".")[-1] in PROJECTIONS:
            bound = linear.in_features**-0.5
            A = torch.empty(cfg.lora_rank, linear.in_features).uniform_(-bound, bound, generator=generator)
            fresh[f"{path}.lora_A"] = A
            fresh[f"{path}.lora_B"] = A.new_zeros(linear.out_features, cfg.lora_rank)
    tensors = tensors or fresh
    shapes = {(key, tensor.shape) for key, tensor in fresh.items()}
    if odd := shapes ^ {(key, tensor.shape) for key, tensor in tensors.items()}:
        raise ValueError(f"the adapter does not fit the model: see {min(odd)[0]}")
    for key in fresh:
        path, _, name = key.rpartition(".")
        linear = model.get_submodule(path)
        linear.register_parameter(name, torch.nn.Parameter(tensors[key].float().to(linear.weight.device)))
        linear.lora_scale = cfg.lora_alpha / cfg.lora_rank
        linear.lora_dropout = cfg.lora_dropout
    return model


@torch.no_grad()
def merge_adapter(model):
    """W + scale B A in place of W, in float32, then cast; LoRA is gone, and with it the teacher."""
    for linear in [module for module in model.modules() if hasattr(module, "lora_A")]:
        linear.weight.copy_(linear.weight.float() + linear.lora_scale * (linear.lora_B @ linear.lora_A))
        del linear.lora_A, linear.lora_B


# --------------------------------------------------------------------------------------------------- decoding


def draw_token(probs, u):
    """The first token at which the cumulative probability passes u. (n, V), (n,) float64 -> (n,) int64"""
    cumulative = probs.double().cumsum(-1)
    bar = u.to(probs.device, non_blocking=True)[:, None] * cumulative[:, -1:]
    return torch.searchsorted(cumulative, bar, right=True)[:, 0].clamp(max=probs.shape[-1] - 1)


def nucleus(probs, top_p):
    """The likeliest tokens, each while the mass before it is at most top_p, renormalised. (n, V) -> (n, V)"""
    ordered, order = probs.sort(dim=-1, descending=True, stable=True)
    before = F.pad(ordered.cumsum(-1)[..., :-1], (1, 0))
    kept = ordered.masked_fill(before > top_p, 0)
    return torch.zeros_like(probs).scatter(-1, order, kept / kept.sum(-1, keepdim=True))


def without_mask(logits, cfg):
    """Logits over the tokens, float32, the mask at -inf: it is never an output. (n, V) -> (n, vocab_len)"""
    logits = logits[:, : cfg.vocab_len].float()
    return logits.masked_fill(torch.arange(logits.shape[-1], device=logits.device) == cfg.mask_id, -torch.inf)


def propose(logits, cfg, generator):
    """A token for each masked position, its confidence and rank. (n, V) -> (n,) int64, (n,), (n,), on the CPU

    Temperature, nucleus, top-k, in this order: the confidence is the probability after them [code].
    """
    logits = without_mask(logits, cfg)
    probs = (logits / cfg.temperature if cfg.temperature > 0 else logits).softmax(-1)
    if cfg.top_p < 1:
        probs = nucleus(probs, cfg.top_p)
    if cfg.top_k > 0:
        least = probs.topk(min(cfg.top_k, probs.shape[-1])).values[:, -1:]
        probs = probs.masked_fill(probs < least, 0)
        probs = probs / probs.sum(-1, keepdim=True)
    if cfg.temperature > 0:
        pred_ids = draw_token(probs, torch.rand(len(probs), generator=generator, dtype=torch.float64))
    else:
        pred_ids = probs.argmax(-1)
    conf = rank = probs.gather(-1, pred_ids[:, None])[:, 0]
    if cfg.sampling_strategy == "margin_confidence":
        best = probs.topk(2).values
        rank = best[:, 0] - best[:, 1]
    elif cfg.sampling_strategy == "neg_entropy":
        rank = (probs * torch.log(probs + 1e-10)).sum(-1)
    return pred_ids.cpu(), conf.cpu(), rank.cpu()


def select(conf, rank, block_idx, is_full, cfg):
    """What is fixed, (n,) bool: all above tau_conf; in a fully active block without any, its best rank.

    conf, rank (n,) of masked positions; block_idx (n,) their blocks; is_full: of each block. [Alg. 2 l.9-12]
    """
    accept = conf > cfg.tau_conf  # J_i
    for b in {*block_idx.tolist()}:
        own = block_idx == b
        if is_full[b] and not accept[own].any():
            accept[rank.masked_fill(~own, -torch.inf).argmax()] = True
    return accept


def forward(decoder, ids, mask_mod):
    """Hidden states (n, width) of ids (n,), the tokens after the committed part of the cache."""
    n = len(ids)
    start = decoder.kv_cache.cache_len
    positions = torch.arange(start, start + n)
    mask = dense(mask_mod, 1, n, start + n)
    return decoder(ids[None], positions[None], mask, decoder.kv_cache.scratch_idx(n))[0]


@torch.no_grad()
def generate(model, prompt_ids, cfg, decoder=None, generator=None):
    """A pipeline of blocks, all filled by every forward, until no mask is left.  [Alg. 2]

    Batch 1; the state of the loop lies on the CPU. prompt_ids (1, P) int64. Of cfg: max_new_tokens,
    decode_block_size, tau_add, tau_act, tau_conf, temperature, top_p, top_k, sampling_strategy, shifted,
    mask_id, eos_id, vocab_len. Returns (seq_ids (1, P+R), record): whole blocks, what stands after a first
    EOS included; forwards, rounds, fixed_round (R,) and passes, a dict a forward: cache_len before it,
    n_input tokens, n_commit of them that stay in the cache, revealed [[place in the response, token], ...].
    Raises ValueError for a batch, an empty prompt, or tau_add or tau_act above 1.
    """
    P = prompt_ids.shape[1]
    B = cfg.decode_block_size
    num_blocks = -(-cfg.max_new_tokens // B)
    if prompt_ids.shape[0] != 1 or P == 0:
        raise ValueError(f"D2F decodes one prompt of at least one token, not {tuple(prompt_ids.shape)}")
    if max(cfg.tau_add, cfg.tau_act) > 1:
        raise ValueError("tau_add and tau_act must be at most 1")  # or decoding would not begin, or not end
    decoder = (decoder or Decoder(model, P + num_blocks * B, project=adapted)).reset()
    kv_cache = decoder.kv_cache
    seq_ids = prompt_ids[0].cpu()
    fixed_round = torch.full((num_blocks * B,), -1)
    is_full = []  # of each block: fully active?
    passes = []
    eos_seen = False
    last = None  # hidden state of the last cached token

    while True:
        # append a block, semi-active, once the last one is far enough [Alg. 2 l.3-4]; then promote those with
        # a nearly finished predecessor: fully active, for good [Alg. 2 l.5-7]
        n_masks = (seq_ids[P:] == cfg.mask_id).view(-1, B).sum(1).tolist()
        decoded = [1.0] + [(B - n) / B for n in n_masks]  # of each block's predecessor; the prompt is done
        if len(is_full) < num_blocks and not eos_seen and decoded[-1] >= cfg.tau_add:
            seq_ids = F.pad(seq_ids, (0, B), value=cfg.mask_id)
            is_full.append(False)
        is_full = [flag or share >= cfg.tau_act for flag, share in zip(is_full, decoded)]
        masked_idx = (seq_ids[P:] == cfg.mask_id).nonzero()[:, 0]  # (n,) places in the response
        if not len(masked_idx):
            break
        # propose and score: one forward of all that is not cached [Alg. 2 l.8]; the prompt, then the blocks
        # that the pass before finished, stay in the cache: they and all that they see are final
        start = kv_cache.cache_len
        n_input = len(seq_ids) - start
        n_commit = P + masked_idx[0].item() // B * B - start
        hidden = forward(decoder, seq_ids[start:], block_causal(B, torch.tensor([P]), start))
        kv_cache.commit(n_commit)  # [Alg. 2 l.14], one pass later
        if cfg.shifted:  # the row before a token predicts it, also that of the last cached one
            last = hidden[n_commit - 1 : n_commit].clone() if n_commit else last
            hidden = torch.cat([last, hidden])
        rows = (P + masked_idx - start).to(hidden.device, non_blocking=True)
        pred_ids, conf, rank = propose(model.lm_head(hidden[rows]), cfg, generator)
        # select: blocks do not see each other's new tokens before the next pass [Alg. 2 l.9-12]
        accept = select(conf, rank, masked_idx // B, is_full, cfg)
        # commit: all others stay masked [Alg. 2 l.13]
        new_idx = masked_idx[accept]
        new_ids = pred_ids[accept]
        seq_ids[P + new_idx] = new_ids
        fixed_round[new_idx] = len(passes)
        eos_seen |= is_eos(new_ids, cfg.eos_id).any().item()  # no further block, but those there are finished
        revealed = torch.stack([new_idx, new_ids], dim=1).tolist()
        passes.append(dict(cache_len=start, n_input=n_input, n_commit=n_commit, revealed=revealed))
    rounds = fixed_round[: len(seq_ids) - P].tolist()
    record = dict(forwards=decoder.forwards, rounds=len(passes), fixed_round=rounds, passes=passes)
    return seq_ids[None].to(prompt_ids.device), record


@torch.no_grad()
def generate_vanilla(model, prompt_ids, cfg, decoder=None, generator=None):
    """The teacher: full attention over prompt and all masks, no cache, one token a forward, as LLaDA is used.

    The best token of the first unfinished block is fixed. Arguments and result as of `generate`, without
    thresholds and passes; the decoder must be one without `adapted`.
    """
    P = prompt_ids.shape[1]
    B = cfg.decode_block_size
    R = -(-cfg.max_new_tokens // B) * B
    decoder = (decoder or Decoder(model, P + R)).reset()
    seq_ids = F.pad(prompt_ids[0].cpu(), (0, R), value=cfg.mask_id)
    fixed_round = [-1] * R
    for number in range(R):
        hidden = forward(decoder, seq_ids, full())  # never committed
        first = P + number // B * B
        masked_pos = first + (seq_ids[first : first + B] == cfg.mask_id).nonzero()[:, 0]
        rows = (masked_pos - int(cfg.shifted)).to(hidden.device, non_blocking=True)
        pred_ids, _, rank = propose(model.lm_head(hidden[rows]), cfg, generator)
        best = rank.argmax()
        seq_ids[masked_pos[best]] = pred_ids[best]
        fixed_round[masked_pos[best] - P] = number
    return seq_ids[None].to(prompt_ids.device), dict(forwards=R, rounds=R, fixed_round=fixed_round)


# -------------------------------------------------------------------------- what is released: LLaDA, adapters

LLADA_KEYS = {  # parts of a tensor's name there and in Llama; ff_out occurs at both levels
    "model.transformer.blocks": "model.layers", "model.transformer.wte": "model.embed_tokens",
    "model.transformer.ln_f": "model.norm", "model.transformer.ff_out": "lm_head",
    "attn_norm": "input_layernorm", "ff_norm": "post_attention_layernorm", "attn_out": "self_attn.o_proj",
    "q_proj": "self_attn.q_proj", "k_proj": "self_attn.k_proj", "v_proj": "self_attn.v_proj",
    "ff_proj": "mlp.gate_proj", "up_proj": "mlp.up_proj", "ff_out": "mlp.down_proj",
}  # fmt: skip
LLADA_STANDARD = dict(
    block_type="llama", layer_norm_type="rms", block_group_size=1, rope=True, alibi=False, weight_tying=False,
    attention_layer_norm=False, scale_logits=False, input_emb_norm=False, multi_query_attention=False,
    activation_type="silu", include_bias=False, include_qkv_bias=False)  # fmt: skip
LLADA_EOT = 126348  # <|eot_id|>, which its config does not have
# of a PEFT config, what is read or changes nothing: any other entry that is set makes other arithmetic
PEFT_KNOWN = """r lora_alpha lora_dropout use_rslora target_modules init_lora_weights peft_type peft_version
    revision task_type base_model_name_or_path auto_mapping inference_mode eva_config megatron_core
    qalora_group_size""".split()
PEFT_INIT = (None, True, False, "gaussian", "eva", "orthogonal")  # PiSSA, OLoRA, CorDA ... change the base


def as_llama(key):
    """The name in a Llama model of a LLaDA tensor; other names stay as they are."""
    for name, llama in LLADA_KEYS.items() if "transformer." in key else ():
        key = key.replace(name, llama)
    return key


def from_pretrained(name, dtype, meta=False):
    """common's, which reads Dream as Qwen2; here LLaDA as Llama: names change, no value does.

    Raises ValueError for another architecture than the released one, and as common's.
    """
    raw = PretrainedConfig.get_config_dict(name)[0]
    if raw.get("model_type") != "llada":
        return common.from_pretrained(name, dtype, meta)
    for key, value in LLADA_STANDARD.items():
        if (raw.get(key, value) or False) != value:
            raise ValueError(f"LLaDA with {key} {raw[key]!r} is not supported")
    config = LlamaConfig(
        hidden_size=raw["d_model"], num_hidden_layers=raw["n_layers"], num_attention_heads=raw["n_heads"],
        num_key_value_heads=raw.get("n_kv_heads") or raw["n_heads"], intermediate_size=raw["mlp_hidden_size"],
        vocab_size=raw.get("embedding_size") or raw["vocab_size"], rms_norm_eps=raw["rms_norm_eps"],
        max_position_embeddings=raw["max_sequence_length"], rope_theta=raw["rope_theta"], bos_token_id=None,
        eos_token_id=raw["eos_token_id"], mask_token_id=raw["mask_token_id"],
        eot_token_id=LLADA_EOT if raw["vocab_size"] > LLADA_EOT else None, shifted_logits=False,
    )  # fmt: skip
    try:
        index = json.loads(Path(cached_file(name, "model.safetensors.index.json")).read_text())
        files = sorted({*index["weight_map"].values()})
    except OSError:
        files = ["model.safetensors"]
    loaded = [load_file(cached_file(name, file)) for file in files if not meta]
    tensors = {as_llama(key): x for part in loaded for key, x in part.items()}
    return common.from_pretrained(None, dtype, meta, config, tensors)


def read_adapter(name, cfg):
    """Tensors of a PEFT folder or Hub id for `attach_adapter`; sets cfg.lora_rank, lora_alpha, lora_dropout.

    Names as in LLaDA or as in Llama. Raises ValueError, one line, for all but plain LoRA on PROJECTIONS.
    """
    try:
        config = json.loads(Path(cached_file(name, "adapter_config.json")).read_text())
        loaded = load_file(cached_file(name, "adapter_model.safetensors"))
        cfg.lora_rank = config["r"]
        cfg.lora_alpha = config["lora_alpha"] * (config["r"] ** 0.5 if config.get("use_rslora") else 1)
        cfg.lora_dropout = config.get("lora_dropout") or 0.0
        unset = (None, False, "none", {}, [])
        odd = [key for key, value in config.items() if key not in PEFT_KNOWN and value not in unset]
        odd += ["peft_type"] * (config["peft_type"] != "LORA")
        odd += ["init_lora_weights"] * (config.get("init_lora_weights") not in PEFT_INIT)
        names = [as_llama(key.removeprefix("base_model.model.")).removesuffix(".weight") for key in loaded]
        targets = {target.split(".")[-1].replace("attn_out", "o_proj") for target in config["target_modules"]}
        odd += ["target_modules"] * (targets != {*PROJECTIONS} or not loaded)
    except Exception as error:
        raise ValueError(f"cannot load adapter {name}: {error!r}") from error
    if odd:
        raise ValueError(f"adapter {name} is not plain LoRA on {', '.join(PROJECTIONS)}: see {odd[0]}")
    return dict(zip(names, loaded.values()))


def load_student(name, cfg):
    """(backbone with LoRA, tokenizer): LoRA of cfg.adapter, else as saved in the folder, else a new one.

    The base is frozen, in cfg.dtype. Sets cfg.shifted, cfg.eot_id; empties cfg.adapter: a save will have it.
    """
    model, tokenizer = load(name, cfg, getattr(torch, cfg.dtype))
    cfg.shifted = getattr(model.config, "shifted_logits", cfg.shifted)
    cfg.eot_id = getattr(model.config, "eot_token_id", None)
    tensors = {}
    if cfg.adapter:
        tensors = read_adapter(cfg.adapter, cfg)
    elif hasattr(model.config, "trained_with"):
        with safe_open(cached_file(str(name), "model.safetensors"), "pt") as file:
            tensors = {key: file.get_tensor(key) for key in file.keys() if ".lora_" in key}
    cfg.adapter = ""
    return attach_adapter(model, cfg, tensors), tokenizer


# =============================================== frame: the same text in all five scripts, compared by a test
# Rows, backbone, saves, the optimiser loop, decoding of many problems, the command line. Of its own script it
# calls draw_noise, make_training_inputs and training_loss.

RANK = int(os.environ.get("RANK", 0))
WORLD = int(os.environ.get("WORLD_SIZE", 1))
WHOLE = StateDictOptions(full_state_dict=True, cpu_offload=True)  # of shards: whole tensors, on rank 0 alone
COUNTS = "steps batch_size accumulation max_len save_every max_new_tokens problems".split()
SHARED_LIMITS = dict(lr=(0, 10), clip=(0, 1e9), warmup=(0, 1), lr_floor=(0, 1), beta2=(0, 1),
                     temperature=(0, 1e9), seed=(0, 2**31), **dict.fromkeys(COUNTS, (1, 10**9)))  # fmt: skip
MASKS = ("<|mask|>", "|<MASK>|", "<|mdm_mask|>")  # added tokens of the published checkpoints
PAIRS = ("prompt/response", "question/answer", "query/response", "prompt/completion", "instruction/output")


def read_data(path):
    """Rows of JSONL: (messages of the prompt, answer, pattern or None). Raises ValueError with file and line.

    One object a line: `messages`, of which the last answer is learnt, or one of PAIRS; `pattern`: a regular
    expression of all right answers, where there are several.
    """
    rows = []
    for number, line in enumerate(Path(path).read_bytes().split(b"\n"), 1):
        try:
            row = json.loads(line.decode("utf-8-sig")) if line.strip() else {"messages": None}
            if "messages" not in row:
                user, assistant = next(pair.split("/") for pair in PAIRS if row.keys() >= {*pair.split("/")})
                row["messages"] = [dict(role="user", content=row[user])]
                row["messages"] += [dict(role="assistant", content=row[assistant])]
            if line.strip():
                "".join(m["role"] + m["content"] for m in row["messages"]).encode()  # no half characters
                *prompt, answer = row["messages"]
                rows.append((prompt, {"assistant": answer["content"]}[answer["role"]], row.get("pattern")))
        except Exception as error:
            wanted = f"an object with {', '.join(PAIRS)} or messages that end with the assistant's"
            wanted = "UTF-8" if isinstance(error, UnicodeDecodeError) else wanted
            raise ValueError(f"{path}, line {number}: not {wanted}") from None
    if not rows:
        raise ValueError(f"{path} has no rows")
    return rows


def encode(tokenizer, messages, answer=""):
    """Token ids (lists): the prompt in the model's chat form, the answer closed by EOS.

    Text stays text: the name of a special token in a message is never taken for the token.
    """
    plain = dict(add_special_tokens=False, split_special_tokens=True)
    eos_id = tokenizer.eos_token_id
    if not tokenizer.chat_template:
        text = "\n".join(message["content"] for message in messages)
        prompt_ids = tokenizer(text, split_special_tokens=True)["input_ids"]
        prompt_ids = prompt_ids[: -1 if prompt_ids[-1:] == [eos_id] else None]  # some tokenizers end texts
    else:
        special = {token.content: i for i, token in tokenizer.added_tokens_decoder.items() if token.special}
        names = "|".join(map(re.escape, sorted(special, key=len, reverse=True)))
        messages = [m | {"content": re.sub(f"({names})", "\ue000\\1", m["content"])} for m in messages]
        text = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False, **TEMPLATE)
        prompt_ids = tokenizer(text, add_special_tokens=False)["input_ids"] if "\ue000" not in text else []
        for part in re.split(f"((?<!\ue000)(?:{names}))", text) if not prompt_ids else ():
            part_ids = tokenizer(part.replace("\ue000", ""), **plain)["input_ids"]
            prompt_ids += [special[part]] if part in special else part_ids  # the template's own, or text
    return {"prompt_ids": prompt_ids, "answer_ids": tokenizer(answer, **plain)["input_ids"] + [eos_id]}


def encode_rows(tokenizer, cfg):
    """The rows of cfg.data; those of more than max_len tokens are dropped, not cut, and counted on stderr."""
    rows = [encode(tokenizer, messages, answer) for messages, answer, _ in read_data(cfg.data)]
    short = [row for row in rows if len(row["prompt_ids"]) + len(row["answer_ids"]) <= cfg.max_len]
    if not short or not all(row["prompt_ids"] for row in short):
        raise ValueError(f"{cfg.data}: no row fits into max_len {cfg.max_len}, or a prompt has no tokens")
    if len(short) < len(rows):
        print(f"{len(rows) - len(short)} of {len(rows)} rows exceed max_len: dropped", file=sys.stderr)
    return short


def load(name, cfg, dtype, training=False):
    """(backbone, tokenizer) of a folder or Hub id, on the CPU; sets cfg.mask_id, cfg.eos_id, cfg.vocab_len.

    A backbone to be trained that has no mask token gets one: the row of its embedding after the last token.
    """
    try:
        tokenizer = common.read_tokenizer(name)
        model = from_pretrained(name, dtype, meta=RANK > 0)
        if not encode(tokenizer, [{"role": "user", "content": "a"}])["prompt_ids"]:  # or its template fails
            raise ValueError("its tokenizer has no tokens")
        cfg.vocab_len = max(tokenizer.get_vocab().values()) + 1
        given = [getattr(model.config, "mask_token_id", None), tokenizer.mask_token_id]
        given += [tokenizer.get_added_vocab().get(word) for word in MASKS]
        given += [cfg.vocab_len] if training else []
        cfg.mask_id = model.config.mask_token_id = next((i for i in given if i is not None), None)
        cfg.eos_id = tokenizer.eos_token_id
        if cfg.mask_id == cfg.vocab_len == model.config.vocab_size:
            torch.manual_seed(cfg.seed)
            model.resize_token_embeddings(cfg.vocab_len + 1, mean_resizing=RANK == 0)
        rows = model.config.vocab_size
        if cfg.eos_id in (None, cfg.mask_id) or max(cfg.eos_id, cfg.mask_id or 0, cfg.vocab_len - 1) >= rows:
            raise ValueError(f"EOS {cfg.eos_id}, mask {cfg.mask_id} and {cfg.vocab_len} tokens do not fit an "
                             f"embedding of {rows} rows, or are no tokens of their own")  # fmt: skip
    except Exception as error:
        hint = " (a git-lfs pointer?)" if isinstance(error, SafetensorError) else ""
        raise ValueError(f"cannot load model {name}: {str(error)[:300]}{hint}") from error
    if type(model.config.eos_token_id) is list and not training:
        cfg.eos_id = model.config.eos_token_id
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
    weights = get_model_state_dict(part, options=WHOLE)
    moments = get_optimizer_state_dict(part, optimizer, options=WHOLE)
    if RANK == 0:
        tmp = Path(cfg.out, "unfinished")
        shutil.rmtree(tmp, ignore_errors=True)
        part.config.trained_with = {"method": METHOD, **dataclasses.asdict(cfg)}
        weights = {name: weights[name] for name, _ in part.named_parameters()}  # a tied head once
        state = {f"{name} {key}": x for name, pair in moments["state"].items() for key, x in pair.items()}
        try:
            part.save_pretrained(tmp, state_dict=weights, max_shard_size="1000GB")
            tokenizer.save_pretrained(tmp)
            save_file(state, tmp / "optimizer.safetensors", {"rows": str(step * cfg.batch_size)})
        except Exception:
            shutil.rmtree(tmp)  # a full disk: the last save stays
            raise
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
        for name, p in part.named_parameters():
            for key in ("step", "exp_avg", "exp_avg_sq") if p.requires_grad else ():
                x = file.get_tensor(f"{name} {key}")
                x = x.to(p.device) if key != "step" else x
                sharded = WORLD > 1 and key != "step"
                optimizer.state[p][key] = distribute_tensor(x, p.device_mesh, p.placements) if sharded else x
        return int(file.metadata()["rows"])


def shard(model, cfg):
    """FSDP2 in place, layer by layer. Rank 0 has read the weights; it sends the others their shards."""
    weights = model.state_dict() if RANK == 0 else {}
    low = torch.bfloat16 if cfg.dtype == "bfloat16" else None
    policy = MixedPrecisionPolicy(low, torch.float32, cast_forward_inputs=False)
    mesh = init_device_mesh(torch.device(cfg.device).type, (WORLD,))
    for module in [*(m for m in model.modules() if hasattr(m, "input_layernorm")), model]:
        fully_shard(module, mesh=mesh, mp_policy=policy)
    if RANK > 0:
        model.to_empty(device=cfg.device)
    options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
    set_model_state_dict(model, weights, options=options)


@contextlib.contextmanager
def stop_signals():
    """A list that fills on Ctrl-C, SIGTERM and SIGHUP: the step is finished and saved. Not in a thread."""
    stopped = []
    in_main = threading.current_thread() is threading.main_thread()
    signals = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP) if in_main else ()
    usual = {s: signal.signal(s, lambda number, _: stopped.append(number)) for s in signals}
    try:
        yield stopped
    finally:
        for number, handler in usual.items():
            signal.signal(number, handler)


def fit(model, part, tokenizer, rows, cfg, folder=None):
    """AdamW, linear warm-up, cosine to lr_floor. Returns the losses.

    part: what is trained and saved, the model or a module of it; folder: the save to go on from. Step s takes
    rows and noise from (seed, s) alone, so a resumed run repeats an uninterrupted one. The loss's weights are
    set over the whole batch before it is cut into micro-batches and ranks: neither changes the gradient.
    """
    Path(cfg.out, "unfinished").mkdir(parents=True, exist_ok=True)  # a place that cannot be written shows now
    device = torch.device(cfg.device)
    model.forward = lambda inputs: training_loss(model, inputs, cfg)  # the call that FSDP2 hooks
    if WORLD > 1:
        shard(model, cfg)
    model.to(device).train()
    trained = [p for p in part.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trained, cfg.lr, (0.9, cfg.beta2), weight_decay=cfg.weight_decay,
                                  fused=device.type == "cuda")  # fmt: skip
    start = resume(part, optimizer, folder) // cfg.batch_size if folder else 0
    autocast = torch.autocast(device.type, torch.bfloat16, enabled=cfg.dtype == "bfloat16")
    order = torch.randperm(len(rows), generator=torch.Generator().manual_seed(cfg.seed)).tolist()
    parts = cfg.accumulation * WORLD
    losses, total, clock = [], torch.zeros(2), time.time()
    bar = tqdm(range(start, cfg.steps), METHOD, cfg.steps, initial=start, mininterval=1, disable=RANK > 0,
               bar_format="{desc} {n}/{total} |{bar}| {elapsed}<{remaining}{postfix}")  # fmt: skip
    with stop_signals() as stopped:
        for step in bar:
            generator = torch.manual_seed(cfg.seed * 1_000_003 + step)  # noise and dropout
            picks = range(step * cfg.batch_size, (step + 1) * cfg.batch_size)
            batch = [rows[order[i % len(rows)]] for i in picks]
            inputs = make_training_inputs(batch, draw_noise(batch, cfg, generator), cfg)
            total = torch.zeros(2, dtype=torch.float64, device=device)  # loss; ranks that were told to stop
            for i in range(RANK, parts, WORLD):
                micro = {name: tensor[i::parts].to(device) for name, tensor in inputs.items()}
                with autocast:
                    loss = model(micro)[0]
                (loss * WORLD).backward()  # FSDP2 takes the mean over ranks
                total[0] += loss.detach()
            total[1] += len(stopped)
            if WORLD > 1:
                dist.all_reduce(total)
            losses.append(total[0].item())
            if not math.isfinite(losses[-1]):
                raise ValueError(f"loss {losses[-1]} at step {step}: the last save stays")
            torch.nn.utils.clip_grad_norm_(trained, cfg.clip)
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
                break
    if total[1]:
        print(f"{METHOD}.py: stopped and saved after {step + 1} steps; --resume goes on", file=sys.stderr)
        sys.exit(128 + (stopped or [signal.SIGTERM])[0])
    return losses


def trim(ids, cfg):
    """New tokens as a user wants them: up to the first EOS, at most max_new_tokens. (n,) -> list"""
    ids = ids[: cfg.max_new_tokens].cpu()
    ends = is_eos(ids, cfg.eos_id).nonzero()[:, 0].tolist()
    return ids[: ends[0] + 1 if ends else None].tolist()


def is_right(text, answer, pattern):
    """By the row's pattern; else by the number after #### where the answer has one; else as it stands."""
    if pattern is not None:
        return re.fullmatch(pattern, text.strip()) is not None
    if "####" in answer:
        text = text.partition("####")[2].replace(",", "")
        answer = answer.partition("####")[2].replace(",", "")
    return text.strip() == answer.strip()


def decode(label, run, decoder, model, tokenizer, problems, cfg, args, ar=None):
    """Decode the problems one by one; prints the first texts and a line of figures. Returns the figures.

    ar: what this function returned for plain AR. All ratios are of totals.
    """
    generator = torch.Generator().manual_seed(cfg.seed)
    outputs, right, forwards, seconds = [], 0, 0, 0.0
    for number, (messages, answer, pattern) in enumerate(problems):
        prompt_ids = torch.tensor([encode(tokenizer, messages)["prompt_ids"]], device=cfg.device)
        if prompt_ids.shape[1] == 0 or (cfg.mask_id is None and run is not generate_ar):
            raise ValueError(f"prompt {number + 1} has no tokens, or the model has no mask token")
        clock = time.time() - kernels.GraphReplay.setup_seconds
        seq_ids, record = run(model, prompt_ids, cfg, decoder, generator)
        outputs.append(trim(seq_ids[0, prompt_ids.shape[1] :], cfg))
        lap = time.time() - kernels.GraphReplay.setup_seconds - clock
        text = tokenizer.decode(outputs[-1], skip_special_tokens=True)
        right += answer is not None and is_right(text, answer, pattern)
        forwards += record["forwards"]
        seconds += lap
        if number < 4 or answer is None:
            print(f"{messages[-1]['content']}\n  {label}: {text.strip()}", flush=True)
            rounds = common.trace(tokenizer, outputs[-1], record)
            if args.trace and run is not generate_ar:
                common.show_trace(rounds, lap)
            if args.trace_svg and run is not generate_ar:
                Path(args.trace_svg).write_text(common.trace_svg(rounds))
                args.trace_svg = ""  # the first one alone
    n = sum(map(len, outputs))
    right = right if answer is not None else None
    row = dict(label=label, problems=len(problems), right=right, new_tokens=n, forwards=forwards,
               tokens_per_forward=round(n / forwards, 3), tok_s=round(n / seconds, 1))  # fmt: skip
    row["x_ar"] = round(row["tok_s"] / ar["tok_s"], 2) if ar else 1.0
    row["same_as_ar"] = sum(a == b for a, b in zip(outputs, ar["outputs"])) if ar else len(outputs)
    judged = "" if right is None else f"{right}/{len(problems)} right | "
    print(f"{label}: {judged}new_tokens {n} | forwards {forwards} | "
          f"tokens_per_forward {n / forwards:.2f} | {row['tok_s']:,.1f} tok/s | {row['x_ar']} x AR | "
          f"{row['same_as_ar']} same as AR")  # fmt: skip
    return row | {"outputs": outputs}


def parse(argv):
    """(args, cfg). A flag wins over what a folder was trained with, that over TINY, that over Config.

    args.folder: what --generate decodes, the model that is named or else what --out holds.
    """
    logging.set_verbosity_error()  # what is wrong is said in one line
    logging.disable_progress_bar()
    look = dict(formatter_class=argparse.RawDescriptionHelpFormatter, argument_default=argparse.SUPPRESS)
    parser = argparse.ArgumentParser(description=__doc__, **look)
    parser.error = lambda message: sys.exit(failed(message))
    for flag in ("train", "generate", "resume", "trace"):
        parser.add_argument(f"--{flag}", action="store_true", default=False)
    parser.add_argument("--prompt", action="append", default=[])
    parser.add_argument("--trace-svg", metavar="FILE", default="")
    comments = dict(re.findall(r"^    (\w+):.*?  # (.+)$", inspect.getsource(Config), re.M))
    fields = [field for field in dataclasses.fields(Config) if field.default is not None]
    for field in fields:
        kind = {"choices": get_args(field.type)} if get_args(field.type) else {"type": field.type}
        kind = {"action": argparse.BooleanOptionalAction} if field.type is bool else kind
        parser.add_argument(f"--{field.name}", help=comments.get(field.name, "").replace("%", "%%"), **kind)
    args = parser.parse_args(argv)
    "".join(args.prompt).encode()  # half a character is no text
    if not args.train and not args.generate:
        raise ValueError("nothing to do: say --train, --generate or both")
    given = {field.name: getattr(args, field.name) for field in fields if field.name in args}
    tiny = TINY if Path(given.get("model", Config.model)).resolve() == Path(Config.model) else {}
    if "data" in given:  # rows of the user's own: no others are decoded
        given = {"test": "" if args.train else given["data"], **given}
    args.folder = given.get("out", Config.out) if args.train or "model" not in given else given["model"]
    source = given.get("model", Config.model) if args.train and not args.resume else str(newest(args.folder))
    if source == args.folder == given.get("out", Config.out) and not Path(source, "config.json").exists():
        raise ValueError(f"nothing is trained in {source}: --train first, or name a --model")
    try:
        held = PretrainedConfig.get_config_dict(source)[0].get("trained_with", {"method": METHOD})
    except Exception as error:
        raise ValueError(f"cannot load model {source}: {str(error)[:300]}") from error
    if held["method"] != METHOD:
        raise ValueError(f"{source} was trained by {held['method']}.py")
    for name in ("out", "device", "dtype"):  # of a machine, not of a model
        held.pop(name, None)
    held = {field.name: held[field.name] for field in fields if field.name in held}
    if not args.train:
        given["model"] = held.get("model", source)  # the base
    cfg = Config(**(tiny | held | given))
    for name, (low, high) in {**SHARED_LIMITS, **LIMITS}.items():
        if not low <= getattr(cfg, name) <= high:  # not a number is out of range too
            raise ValueError(f"{name} must lie in [{low}, {high}], not {getattr(cfg, name)}")
    if args.generate and not args.prompt and not cfg.test:
        raise ValueError("--test FILE or --prompt TEXT must say what to decode")
    if WORLD > 1:
        on_gpu = cfg.device.startswith("cuda")
        cfg.device = f"cuda:{os.environ['LOCAL_RANK']}" if on_gpu else cfg.device
        if on_gpu:
            torch.cuda.set_device(cfg.device)
        dist.init_process_group("nccl" if on_gpu else "gloo", timeout=timedelta(hours=2))  # saves are slow
    return args, cfg


def failed(error):
    """One line on stderr for bad input and for what the machine cannot do. Returns the exit status, 2."""
    line = " ".join(str(error).split()) or type(error).__name__
    if re.search("out of memory|allocate memory|MemoryError", line):
        line = "out of memory: raise --accumulation, lower --max_len, train with --checkpointing"
    print(f"{METHOD}.py: {line}", file=sys.stderr)
    return 2


def start(args, cfg):
    """The folder of cfg.out that --resume goes on from, or None; a run that is there is not trained over."""
    found = Path(newest(cfg.out), "config.json").exists()
    if found and not args.resume:
        raise ValueError(f"{cfg.out} holds a run: --resume it, or name another --out")
    if args.resume and not found:
        raise ValueError(f"nothing to resume in {cfg.out}")
    if cfg.batch_size % (cfg.accumulation * WORLD):
        raise ValueError(f"batch_size {cfg.batch_size} is no multiple of accumulation x {WORLD} processes")
    return newest(cfg.out) if args.resume else None


def report(rows, cfg):
    """The last line of stdout: the figures as JSON."""
    rows = [{key: value for key, value in row.items() if key != "outputs"} for row in rows]
    print(json.dumps({"method": METHOD, "device": cfg.device, "dtype": cfg.dtype, "rows": rows}))


# ====================================================================================================== main


def train(cfg, folder):
    """Train LoRA on the frozen backbone, its own teacher; folder: the save to go on from, or None."""
    model, tokenizer = load_student(folder or cfg.model, cfg)
    rows = [encode(tokenizer, messages, answer) for messages, answer, _ in read_data(cfg.data)]
    fit(model, model, tokenizer, pad_rows(rows, cfg), cfg, folder)


def compare(args, cfg):
    """Decode the same prompts by plain AR, by the teacher without cache and by D2F. Returns the figures."""
    problems = [([{"role": "user", "content": prompt}], None, None) for prompt in args.prompt]
    problems = problems or read_data(cfg.test)[: cfg.problems]
    rows = []

    def run(label, function):
        longest = max(len(encode(tokenizer, row[0])["prompt_ids"]) for row in problems)
        decoder = Decoder(model.to(cfg.device), longest + cfg.max_new_tokens + cfg.decode_block_size)
        ar = rows[0] if rows else None
        rows.append(decode(label, function, decoder, model, tokenizer, problems, cfg, args, ar))

    if cfg.baseline:
        model, tokenizer = load(cfg.baseline, cfg, getattr(torch, cfg.dtype))
        run("plain AR", generate_ar)
    else:
        print("no --baseline, so no plain AR: the teacher stands in its place")
    model, tokenizer = load_student(newest(args.folder), cfg)
    run("teacher, no cache", generate_vanilla)
    merge_adapter(model)
    run(METHOD, generate)
    return rows


def main(argv=None):
    """Returns the exit status: 0, or 2 with one line on stderr."""
    try:
        args, cfg = parse(argv)
        if args.train:
            train(cfg, start(args, cfg))
        if args.generate and RANK == 0:
            report(compare(args, cfg), cfg)
    except (ValueError, OSError, RuntimeError, MemoryError, SafetensorError) as error:
        return failed(error)
    return 0


if __name__ == "__main__":
    sys.exit(main())
