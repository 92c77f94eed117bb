"""D2F: a bidirectional diffusion LM distilled into a block-causal one, decoded as a pipeline of blocks.

Paper         Diffusion LLMs Can Do Faster-Than-AR Inference via Discrete Diffusion Forcing, arXiv 2508.09192,
              v1 and ICLR 2026: numbers in brackets are of both; Alg. 2 and the settings of §5.1 are ICLR's
Idea          A masked diffusion LM keeps its weights and gets another mask: full attention inside a block,
              causal between blocks, so keys and values of finished blocks are final. LoRA is distilled from
              the same weights with full attention, later blocks being noisier: the student predicts a block
              while those before it are still half masked, and every forward fills several blocks.
Differs       from plain AR: 1. masks are predicted, with their whole block in view  2. the loss is against a
              teacher, not data  3. a forward fixes any number of tokens, in several blocks
Implements    Alg. 1 and Eq. 1 -> make_training_inputs, Eq. 2 and 3 -> training_loss; Alg. 2 -> generate
Left out      making the teacher (tests/pretrain.py), decoding several prompts at once, training without LoRA
Not as in     the paper, but as in the code: KL(teacher, student) and a weight 1/p (--objective reverse is
              Eq. 3); tau_add and tau_act are reached, not exceeded; a block is cached one forward after it
              was filled: Alg. 2 l.14, read literally, would keep keys and values made from masks
              the code: the mask token is never an output; nothing masked gives a zero loss instead of NaN;
              confidences are float32; max_new_tokens is rounded up to whole blocks, not down
Run           python d2f.py --train --generate            (tests/tiny, CPU)
              python d2f.py --generate --model GSAI-ML/LLaDA-8B-Instruct \\
                  --adapter SJTU-Deng-Lab/D2F_LLaDA_Instruct_8B_Lora --prompt "..."
"""

import argparse
import atexit
import contextlib
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
    batch_size: int = 8  # rows a step, over all processes; [code] one a GPU, accumulated 3 or 5 times
    accumulation: int = 0  # forwards a step and process, 0: one row each; changes memory, not results
    lr: float = 1e-5  # [§5.1]; 5e-6 for Dream [code]
    warmup: float = 0.0  # [code] share of the steps
    lr_floor: float = 1.0  # [§5.1] share of lr at the end: constant
    beta2: float = 0.95  # [code] AdamW
    weight_decay: float = 0.05  # [code]
    clip: float = 1.0  # [code] largest norm of the gradient
    max_len: int = 1024  # [§5.1] tokens of every row, filled with EOS; 512 in v1
    save_every: int = 500  # steps
    checkpointing: bool = False  # recompute layers in backward
    max_new_tokens: int = 256  # [Table 8 of v1] of Dream; 512 of LLaDA
    temperature: float = 0.0  # [code] 0: the likeliest token
    seed: int = 0
    device: str = "cuda" if torch.cuda.is_available() else "cpu"
    dtype: Literal["bfloat16", "float32"] = "bfloat16" if torch.cuda.is_available() else "float32"
    baseline: str = ""  # plain AR model to compare with
    mask_id: int | None = None
    eos_id: int | list | None = None  # of a list each ends a text
    vocab_len: int | None = None  # rows of the head from here on are no tokens
    text_len: int | None = None  # most positions of the model
    # D2F
    adapter: str = ""  # folder or Hub id of a PEFT adapter to start or to decode from
    shifted: bool = True  # logits at i-1 predict token i (Dream) or at i (LLaDA); the model's mark wins
    eot_id: int | None = None  # closes the answer before the EOS padding: LLaDA's <|eot_id|>  [code]
    long_rows: Literal["drop", "cut"] = "drop"  # [code] of LLaDA; cut: Dream, prompts up to max_len - 100
    block_size: int = 16  # [§5.1] in training
    schedule: Literal["monotone", "random"] = "monotone"  # [§4.1]; random: each block for itself [Table 4]
    p_min: float = 0.2  # [§5.1] least mask ratio; 0.3 in v1
    p_max: float = 0.7  # [§5.1] largest mask ratio
    objective: Literal["soft", "reverse", "hard"] = "soft"  # [code]; reverse: [Eq. 3]; hard: the data [code]
    lora_rank: int = 32  # [§5.1] a ready adapter's own wins, here and in the next two
    lora_alpha: float = 32.0  # [§5.1]
    lora_dropout: float = 0.1  # [§5.1]
    decode_block_size: int = 32  # [Fig. 5] 32, 48 or 64 by task [Table 8 of v1]
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
    """Rows of exactly max_len tokens: prompt | answer | EOS ... EOS; the padding is learnt as well.  [code]

    Longer ones are dropped, or cut where the prompt leaves room (cfg.long_rows). ValueError if none is left.
    """
    padded = []
    for row in rows:
        *answer, eos_id = row["answer_ids"]
        room = cfg.max_len - len(row["prompt_ids"])
        needed = len(row["answer_ids"]) if cfg.long_rows == "drop" else min(100, cfg.max_len - 1)
        if row["prompt_ids"] and room >= needed:
            answer += [cfg.eot_id or eos_id] + [eos_id] * room
            padded.append(row | {"answer_ids": answer[:room]})
    need(padded, f"{cfg.data}: no row fits into max_len {cfg.max_len}")
    if len(padded) < len(rows):
        print(f"{len(rows) - len(padded)} of {len(rows)} rows exceed max_len: dropped", file=sys.stderr)
    return padded


def draw_noise(batch, cfg, generator):
    """Uniform draws in [0, 1) for rows of `pad_rows`: u_first (B,), u_increment (B, N-1), u_token (B, L)."""
    B = len(batch)
    N = max(-(-len(row["answer_ids"]) // cfg.block_size) for row in batch)  # most blocks of a row
    shapes = dict(u_first=(B,), u_increment=(B, N - 1), u_token=(B, cfg.max_len))
    return {name: torch.rand(shape, generator=generator) for name, shape in shapes.items()}


def mask_ratios(u_first, u_increment, cfg):
    """Mask ratio p of each block, later blocks being noisier: (B,), (B, N-1) -> (B, N).  [§4.1, Alg. 1 l.4]

    p[0] = p_min + u_first (p_max - p_min);  p[b] = p[b-1] + u_increment[b-1] (p_max - p[0]) / (N - 1)  [code]
    """
    first = cfg.p_min + u_first[:, None] * (cfg.p_max - cfg.p_min)  # (B, 1)
    if cfg.schedule == "random":  # [Table 4]
        return torch.cat([first, cfg.p_min + u_increment * (cfg.p_max - cfg.p_min)], dim=1)
    steps = u_increment * (cfg.p_max - first) / max(u_increment.shape[1], 1)  # N is the batch's  [code]
    return torch.cat([first, first + steps.cumsum(dim=1)], dim=1)


def make_training_inputs(batch, draws, cfg):
    """The noisy rows that teacher and student both see; the prompt is never masked.  [Alg. 1 l.3-5]

    Blocks start where the prompt ends. Returns input_ids, labels (B, L) int64, -100: not masked; prompt_lens
    (B,) int64; weights (B, L) float32: the loss is sum(weights * distances).
    """
    ids = torch.tensor([row["prompt_ids"] + row["answer_ids"] for row in batch])
    prompt_lens = torch.tensor([len(row["prompt_ids"]) for row in batch])
    response_idx = torch.arange(ids.shape[1]) - prompt_lens[:, None]  # (B, L), below 0 in the prompt
    p_block = mask_ratios(draws["u_first"], draws["u_increment"], cfg)
    p_mask = p_block.gather(1, response_idx.clamp(min=0) // cfg.block_size)  # (B, L)
    is_masked = (draws["u_token"] < p_mask) & (response_idx >= 0)  # [Eq. 1]
    weights = is_masked / is_masked.sum().clamp(min=1)  # the mean over masked tokens of the batch  [code]
    if cfg.objective != "reverse":
        weights = weights / p_mask  # [code]; not in Eq. 3
    return dict(input_ids=ids.masked_fill(is_masked, cfg.mask_id), labels=ids.masked_fill(~is_masked, -100),
                weights=weights, prompt_lens=prompt_lens)  # fmt: skip


def token_distances(head, hidden, teacher_hidden, labels, cfg, chunk=2048):
    """Student against teacher at masked tokens: (B, L) float32, 0 where the label is -100.  [Alg. 1 l.9]

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
    """Student against teacher, the same weights without LoRA, on the same rows. Returns (loss, logs)."""
    input_ids = inputs["input_ids"]
    B, L = input_ids.shape
    positions = torch.arange(L, device=input_ids.device).expand(B, L)
    with torch.no_grad():  # the teacher sees all blocks  [Alg. 1 l.7]
        teacher_hidden = walk(model, input_ids, positions, build_mask(full(), 1, L, L, input_ids.device))
    # the student sees the blocks up to the token's own  [Eq. 2, Alg. 1 l.8]
    attn_mask = build_mask(block_causal(cfg.block_size, inputs["prompt_lens"]), B, L, L, input_ids.device)
    hidden = walk(model, input_ids, positions, attn_mask, project=adapted, checkpointing=cfg.checkpointing)
    if cfg.shifted:  # the row before a token predicts it; nothing wraps round: the first token is prompt
        hidden = hidden.roll(1, dims=1)
        teacher_hidden = teacher_hidden.roll(1, dims=1)
    distances = token_distances(model.lm_head, hidden, teacher_hidden, inputs["labels"], cfg)
    return (inputs["weights"] * distances).sum(), {"masked": (inputs["labels"] != -100).float().mean()}


# ------------------------------------------------------------------------------------------------------- LoRA

PROJECTIONS = ("q_proj", "k_proj", "v_proj", "o_proj")  # [§5.1]; LLaDA calls the last attn_out


def adapted(attn, name, x):
    """The student's projection: W x + scale B A dropout(x). Without it `walk` takes W x: the teacher."""
    linear = getattr(attn, name)
    if not hasattr(linear, "lora_A"):
        return linear(x)
    low = F.linear(F.dropout(x, linear.lora_dropout, linear.training), linear.lora_A.to(x.dtype))  # (B, T, r)
    return linear(x) + linear.lora_scale * F.linear(low, linear.lora_B.to(x.dtype))


def attach_adapter(model, cfg, tensors=None):
    """Hang lora_A (r, in) and lora_B (out, r), float32, on PROJECTIONS; freeze all else. Returns the model.

    tensors: of `read_adapter` or of a save; ValueError if of other projections, layers or sizes. None: A is
    Kaiming-uniform (a = sqrt 5), B zero [code], so that the student starts as the teacher [§4.2].
    """
    model.requires_grad_(False)
    generator = torch.Generator().manual_seed(cfg.seed)
    for linear in [getattr(layer.self_attn, name) for layer in model.model.layers for name in PROJECTIONS]:
        bound = linear.in_features**-0.5
        A = torch.empty(cfg.lora_rank, linear.in_features).uniform_(-bound, bound, generator=generator)
        linear.lora_A = torch.nn.Parameter(A.to(linear.weight.device))
        linear.lora_B = torch.nn.Parameter(linear.lora_A.new_zeros(linear.out_features, cfg.lora_rank))
        linear.lora_scale = cfg.lora_alpha / cfg.lora_rank
        linear.lora_dropout = cfg.lora_dropout
    if tensors is not None:
        wanted = {(name, p.shape) for name, p in model.named_parameters() if p.requires_grad}
        if odd := wanted ^ {(name, tensor.shape) for name, tensor in tensors.items()}:
            raise ValueError(f"the adapter does not fit the model: see {min(odd)[0]}")
        for name, tensor in tensors.items():
            model.get_parameter(name).data.copy_(tensor)
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

    Temperature, nucleus, top-k, in this order: the confidence is the probability after them.  [code]
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
    """Which masked positions are fixed: (n,) bool. conf, rank, block_idx (n,); is_full: one bool a block."""
    accept = conf > cfg.tau_conf  # J_i  [Alg. 2 l.9-10]
    for b in {*block_idx.tolist()}:
        own = block_idx == b
        if is_full[b] and not accept[own].any():  # a fully active block always gets one  [Alg. 2 l.11-12]
            accept[rank.masked_fill(~own, -torch.inf).argmax()] = True
    return accept


def forward(decoder, ids, mask_mod):
    """Hidden states (n, width) of ids (n,), the tokens after the committed part of the cache."""
    n = len(ids)
    positions = decoder.kv_cache.scratch_idx(n)  # of a token in the text and of its entry in the cache
    mask = dense(mask_mod, 1, n, decoder.kv_cache.cache_len + n)
    return decoder(ids[None], positions[None], mask, positions)[0]


@torch.no_grad()
def generate(model, prompt_ids, cfg, decoder=None, generator=None):
    """A pipeline of blocks, all filled by every forward, until no mask is left.  [§4.3, Alg. 2]

    prompt_ids (1, P) int64. Of cfg: max_new_tokens, decode_block_size, tau_add, tau_act, tau_conf,
    temperature, top_p, top_k, sampling_strategy, shifted, mask_id, eos_id, vocab_len. Returns (seq_ids
    (1, P+R), record): whole blocks, what stands after a first EOS included; forwards, rounds, fixed_round
    (R,). Raises ValueError for a batch, an empty prompt, or tau_add or tau_act above 1.
    """
    P = prompt_ids.shape[1]
    B = cfg.decode_block_size
    R = -(-cfg.max_new_tokens // B) * B  # at most so many tokens
    if len(prompt_ids) != 1 or P == 0 or max(cfg.tau_add, cfg.tau_act) > 1:  # above 1: never reached
        raise ValueError("D2F decodes one prompt of at least one token, with tau_add and tau_act at most 1")
    decoder = (decoder or Decoder(model, P + R, project=adapted)).reset()
    seq_ids = prompt_ids[0].cpu()  # the state of the loop lies on the CPU
    fixed_round = torch.full((R,), -1)
    last = None  # (1, width), hidden state of the last cached token
    while True:
        # append a semi-active block when the last one, at first the prompt, is far enough [Alg. 2 l.1, 3-4];
        # promote blocks whose predecessor is nearly finished to fully active, for good [Alg. 2 l.5-7]
        n_masks = (seq_ids[P:] == cfg.mask_id).view(-1, B).sum(1).tolist()
        decoded = [1.0] + [(B - n) / B for n in n_masks]  # shares of the prompt, block 0, block 1 ...
        ended = is_eos(seq_ids[P:], cfg.eos_id).any()  # no further block, but those there are finished
        if len(seq_ids) < P + R and not ended and decoded[-1] >= cfg.tau_add:
            seq_ids = F.pad(seq_ids, (0, B), value=cfg.mask_id)
        is_full = [before >= cfg.tau_act for before in decoded]  # of block 0, block 1 ...; shares never fall
        masked_idx = (seq_ids[P:] == cfg.mask_id).nonzero()[:, 0]  # (n,) places in the response
        if not len(masked_idx):
            break
        # propose and score: one forward of all that is not cached [Alg. 2 l.8]; keys and values are kept of
        # what is final: the prompt, later the blocks that were finished before this forward [Alg. 2 l.14]
        start = decoder.kv_cache.cache_len
        hidden = forward(decoder, seq_ids[start:], block_causal(B, torch.tensor([P]), start))
        n_commit = P + masked_idx[0].item() // B * B - start
        decoder.kv_cache.commit(n_commit)
        if cfg.shifted:  # the row before a token predicts it, also that of the last cached one
            last = hidden[n_commit - 1 : n_commit].clone() if n_commit else last
            hidden = torch.cat([last, hidden])
        rows = (P + masked_idx - start).to(hidden.device, non_blocking=True)
        pred_ids, conf, rank = propose(model.lm_head(hidden[rows]), cfg, generator)
        # select: blocks do not see each other's new tokens before the next round [Alg. 2 l.9-12]
        accept = select(conf, rank, masked_idx // B, is_full, cfg)
        # commit: all others stay masked [Alg. 2 l.13]
        new_idx = masked_idx[accept]
        seq_ids[P + new_idx] = pred_ids[accept]
        fixed_round[new_idx] = decoder.forwards - 1  # a round is one forward
    n = decoder.forwards
    record = dict(forwards=n, rounds=n, fixed_round=fixed_round[: len(seq_ids) - P].tolist())
    return seq_ids[None].to(prompt_ids.device), record


@torch.no_grad()
def generate_vanilla(model, prompt_ids, cfg, decoder=None, generator=None):
    """The teacher, as LLaDA is used: full attention over prompt and all masks, no cache, one token a forward.

    That is the best of the first unfinished block. As `generate`, without thresholds and without `adapted`.
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

LLADA_KEYS = {  # LLaDA is Llama but for names: parts of a tensor's name there and in Llama
    "model.transformer.blocks": "model.layers", "model.transformer.wte": "model.embed_tokens",
    "model.transformer.ln_f": "model.norm", "model.transformer.ff_out": "lm_head",
    "attn_norm": "input_layernorm", "ff_norm": "post_attention_layernorm", "attn_out": "self_attn.o_proj",
    "q_proj": "self_attn.q_proj", "k_proj": "self_attn.k_proj", "v_proj": "self_attn.v_proj",
    "ff_proj": "mlp.gate_proj", "up_proj": "mlp.up_proj", "ff_out": "mlp.down_proj",
}  # fmt: skip
LLADA_STANDARD = dict(  # another value makes another architecture: refused
    block_type="llama", layer_norm_type="rms", block_group_size=1, rope=True, alibi=False, weight_tying=False,
    attention_layer_norm=False, scale_logits=False, input_emb_norm=False, multi_query_attention=False,
    activation_type="silu", include_bias=False, include_qkv_bias=False)  # fmt: skip
# of a PEFT config: entries that are read or change nothing; values that mean plain LoRA. What is set besides
# makes other arithmetic or, as PiSSA, changes the base.
PEFT_FREE = """lora_alpha lora_dropout use_rslora peft_version revision task_type auto_mapping inference_mode
    base_model_name_or_path eva_config megatron_core qalora_group_size""".split()
PEFT_PLAIN = dict(r=range(1, 10**6), peft_type=["LORA"], target_modules=[{*PROJECTIONS}],
                  init_lora_weights=[None, True, False, "gaussian", "eva", "orthogonal"])  # fmt: skip


def as_llama(key):
    """The name in a Llama model of a LLaDA tensor; other names stay as they are."""
    if "transformer." in key:
        for name, llama in LLADA_KEYS.items():
            key = key.replace(name, llama)
    return key


def from_pretrained(name, dtype, meta=False):
    """common's, which reads Dream as Qwen2; here LLaDA is read as Llama. Raises ValueError as common's."""
    raw = PretrainedConfig.get_config_dict(name)[0]
    if raw.get("model_type") != "llada":
        return common.from_pretrained(name, dtype, meta)
    for key, value in LLADA_STANDARD.items():
        need((raw.get(key, value) or False) == value, f"LLaDA with {key} {raw.get(key)!r} is not supported")
    config = LlamaConfig(
        hidden_size=raw["d_model"], num_hidden_layers=raw["n_layers"], num_attention_heads=raw["n_heads"],
        num_key_value_heads=raw.get("n_kv_heads") or raw["n_heads"], intermediate_size=raw["mlp_hidden_size"],
        vocab_size=raw.get("embedding_size") or raw["vocab_size"], rms_norm_eps=raw["rms_norm_eps"],
        max_position_embeddings=raw["max_sequence_length"], rope_theta=raw["rope_theta"],
        eos_token_id=raw["eos_token_id"], mask_token_id=raw["mask_token_id"], bos_token_id=None,
        shifted_logits=False)  # fmt: skip
    try:
        index = json.loads(Path(cached_file(name, "model.safetensors.index.json")).read_text())
        files = {*index["weight_map"].values()}
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
        tensors = load_file(cached_file(name, "adapter_model.safetensors"))
        cfg.lora_rank = config["r"]
        cfg.lora_alpha = config["lora_alpha"] * (config["r"] ** 0.5 if config.get("use_rslora") else 1.0)
        cfg.lora_dropout = config.get("lora_dropout") or 0.0
        targets = {key.split(".")[-1].replace("attn_out", "o_proj") for key in config.pop("target_modules")}
    except Exception as error:
        raise ValueError(f"cannot load adapter {name}: {error!r}") from error
    for key, value in [*config.items(), ("target_modules", targets)]:
        is_plain = key in PEFT_FREE or value in PEFT_PLAIN.get(key, [None, False, "none", {}, []])
        need(is_plain, f"adapter {name} is not plain LoRA on {', '.join(PROJECTIONS)}: see {key}")
    prefix = "base_model.model."
    return {as_llama(key.removeprefix(prefix)).removesuffix(".weight"): x for key, x in tensors.items()}


def load_student(name, cfg):
    """(backbone with LoRA, tokenizer): LoRA of cfg.adapter, else as saved in the folder, else a new one.

    The base is frozen, in cfg.dtype. Sets cfg.shifted, cfg.eot_id; empties cfg.adapter: a save will have it.
    """
    model, tokenizer = load(name, cfg, getattr(torch, cfg.dtype))
    need(cfg.mask_id is not None, f"{name} has no mask token: it is no masked diffusion LM")
    cfg.shifted = getattr(model.config, "shifted_logits", cfg.shifted)
    cfg.eot_id = tokenizer.get_vocab().get("<|eot_id|>")  # LLaDA's; Dream's answers end with EOS  [code]
    tensors = None
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
    """Train LoRA on the frozen backbone, its own teacher; folder: the save to go on from, or None."""
    model, tokenizer = load_student(folder or cfg.model, cfg)
    rows = [encode(tokenizer, messages, answer) for messages, answer, _ in read_data(cfg.data)]
    fit(model, model, tokenizer, pad_rows(rows, cfg), cfg, folder)


def compare(args, cfg):
    """Decode the same prompts by plain AR, by the teacher without cache and by D2F. Returns the figures."""
    rows = []

    def run(label, function):
        problems = read_problems(tokenizer, args, cfg)
        longest = max(prompt_ids.shape[1] for prompt_ids, *_ in problems)
        decoder = Decoder(model.to(cfg.device), longest + cfg.max_new_tokens + cfg.decode_block_size)
        rows.append(decode(label, function, decoder, model, tokenizer, problems, cfg, args, *rows[:1]))

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
            train(cfg, args.resume)
        if args.generate and RANK == 0:
            report(compare(args, cfg), cfg)
    except (ValueError, OSError, RuntimeError, MemoryError, SafetensorError) as error:
        return failed(error)
    return 0


if __name__ == "__main__":
    sys.exit(main())
