"""ReFusion: slots chosen by diffusion, filled by autoregression; training step and decoding loop on a Hugging Face LM.

Paper         ReFusion: A Diffusion Large Language Model with Parallel Autoregressive Decoding, arXiv 2512.13586
Idea          The answer is cut into slots of k tokens. Finished slots are moved in front of the masked ones while every
              token keeps its position id: a causal LM sees everything finished, its KV cache is never recomputed.
              A round plans (all masked slots at once, by diffusion) and verifies (confident slots, left to right, by
              autoregression).
Differs       from plain AR: 1. buffer order is completion order, RoPE sees the text order  2. two losses: next token
              inside clean slots, denoising of masked slots  3. several slots a round, each of several tokens
Implements    row building -> make_training_inputs; L = L_AR + lambda L_MDM -> training_loss; plan, select, joint
              verification, parallel completion -> generate
Left out      decoding of several prompts at once, LoRA
Not as in     the published code: an EOS found in parallel completion drops only slots behind it; no clean target gives
              L_AR = 0 instead of NaN; probabilities are float32; the mask token is never an output
Run           python refusion.py --train --generate                        (tiny backbone, CPU)
              python refusion.py --generate --model GSAI-ML/ReFusion --prompt "..."
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
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import distribute_tensor
from tqdm import tqdm
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM
from transformers.utils import logging

import common
from common import Decoder, build_mask, causal, completion_rows, dense, generate_ar, prepare, token_nll, walk
from kernels import to_host

METHOD = "refusion"


@dataclasses.dataclass
class Config:
    # what all five scripts share
    model: str = "tiny"  # Hub id, folder, or the built-in backbone
    data: str = ""  # JSONL; empty: the built-in task
    out: str = f"runs/{METHOD}"
    steps: int = 2000
    ar_steps: int = 0  # plain AR fine-tuning before the method's own steps; kept as the AR baseline
    batch_size: int = 4  # [code] per device
    accumulation: int = 1  # micro-batches a step; changes memory, not results
    lr: float = 2e-5  # [code] cosine to 0
    ar_lr: float = 2e-5  # of the AR stage
    warmup: float = 0.0  # [code] share of the steps
    lr_floor: float = 0.0  # share of lr at the end
    beta2: float = 0.999  # [code] AdamW
    weight_decay: float = 0.0  # [code]
    clip: float = 1.0  # [code]
    max_len: int = 4096  # [code] longer rows are dropped
    max_new_tokens: int = 128  # [code]
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
    # ReFusion
    slot_sizes: str = "4,8,16,32"  # [code] training: uniform, per row
    masking: str = "bernoulli"  # [code]; "fixed" masks floor(t K) slots  [paper]
    loss_norm: str = "code"  # [code]; "paper" is the mean over the row's own targets
    mdm_weight: float = 1.0  # lambda  [code]
    slot_size: int = 8  # [code] k in decoding
    serial_blocks: int = 2  # [code] S
    tau_slot: float = 0.9  # [code]
    tau_token: float = 0.9  # [code]
    plan_ahead: bool = False  # [ours] plan the next round behind the drafts being verified: same text, fewer forwards
    recompute_kv: bool = False  # [paper] ablation: rewrite the cache after each parallel completion
    checkpointing: bool = False  # recompute layers in backward


# what `--model tiny` changes
TINY = dict(steps=550, ar_steps=350, batch_size=64, lr=3e-3, ar_lr=3e-3, warmup=0.02, beta2=0.95, max_len=96,
            max_new_tokens=32, slot_sizes="4", slot_size=4, serial_blocks=1, tau_slot=0.9, tau_token=0.5)  # fmt: skip
TEMPLATE = {}  # arguments of the chat template: Qwen3's default  [code]


# ------------------------------------------------------------------------------------------------------- training step


def draw_noise(batch, cfg, generator):
    """Per row: slot size k, noise level t, which slots are masked, the order of the clean ones.

    batch: list of {"prompt_ids", "answer_ids"} (lists of ints, the answer ends with EOS). Returns a list of dicts:
    slot_size int; p_mask float; slot_masked, one bool per slot; clean_slot_order, slot indices in buffer order.
    """
    draws = []
    sizes = [int(size) for size in cfg.slot_sizes.split(",")]
    for row in batch:
        k = sizes[torch.randint(len(sizes), (1,), generator=generator).item()]
        K = math.ceil(len(row["answer_ids"]) / k)
        t = torch.rand(1, generator=generator).item()
        p_mask = (1 - 1e-3) * t + 1e-3  # [code]
        if cfg.masking == "fixed":
            slot_masked = [False] * K
            for slot_idx in torch.randperm(K, generator=generator)[: int(t * K)].tolist():
                slot_masked[slot_idx] = True
        else:
            slot_masked = (torch.rand(K, generator=generator) < p_mask).tolist()  # u < p, one draw a slot  [code]
        clean = [slot_idx for slot_idx in range(K) if not slot_masked[slot_idx]]
        order = torch.randperm(len(clean), generator=generator).tolist()
        draws.append(
            dict(slot_size=k, p_mask=p_mask, slot_masked=slot_masked, clean_slot_order=[clean[i] for i in order])
        )
    return draws


def make_training_inputs(batch, draws, cfg):
    """Rows of a half-way state of decoding, with the weight of every token in the loss.

        input_ids     prompt | clean slots, shuffled                  | masked slots in order, all <mask> | padding
        labels        -100   | tokens 2..len of each slot, then -100  | the original tokens              | -100
        position_ids  0..P-1 | original, moved with the tokens        | original                         | N..L-1

    Labels stand where their logits do: a clean token predicts its right neighbour in the slot (shifted), a mask
    predicts itself (unshifted). The last token of a clean slot and the prompt predict nothing.
    Returns a dict of (B, L) tensors: input_ids, position_ids, labels int64; is_masked bool; weights float32, such that
    the loss is sum(weights * nll). For B rows, answer length A and mask probability p of a row:
        code:   AR 1 / (AR targets of the batch),      MDM 1 / (B p A)
        paper:  AR 1 / (B * AR targets of the row),    MDM 1 / (B * masked tokens of the row)
    """
    length = padded_len(batch, cfg)
    columns = dict(input_ids=[], position_ids=[], labels=[], is_masked=[], weights=[])
    for row, draw in zip(batch, draws):
        prompt, answer, k = row["prompt_ids"], row["answer_ids"], draw["slot_size"]
        P, A = len(prompt), len(answer)
        slots = [range(start, min(start + k, A)) for start in range(0, A, k)]  # the ragged tail is a slot too
        clean = [slots[slot_idx] for slot_idx in draw["clean_slot_order"]]
        masked = [i for slot, is_masked in zip(slots, draw["slot_masked"]) if is_masked for i in slot]
        pad = length - P - A
        ar_labels = [label for slot in clean for label in [answer[i] for i in slot[1:]] + [-100]]
        n_ar, n_mdm = sum(label != -100 for label in ar_labels), len(masked)
        columns["input_ids"].append(
            prompt + [answer[i] for slot in clean for i in slot] + [cfg.mask_id] * n_mdm + [cfg.eos_id] * pad
        )
        order = [P + i for slot in clean for i in slot] + [P + i for i in masked]
        columns["position_ids"].append([*range(P), *order, *range(P + A, length)])
        columns["labels"].append([-100] * P + ar_labels + [answer[i] for i in masked] + [-100] * pad)
        columns["is_masked"].append([False] * (P + A - n_mdm) + [True] * n_mdm + [False] * pad)
        if cfg.loss_norm == "paper":
            ar, mdm = 1 / (len(batch) * max(n_ar, 1)), 1 / (len(batch) * max(n_mdm, 1))
        else:
            ar, mdm = 1.0, 1 / (len(batch) * draw["p_mask"] * A)
        columns["weights"].append([ar] * (P + A - n_mdm) + [cfg.mdm_weight * mdm] * (n_mdm + pad))
    inputs = {name: torch.tensor(column) for name, column in columns.items()}
    is_ar = (inputs["labels"] != -100) & ~inputs["is_masked"]
    if cfg.loss_norm == "code":
        inputs["weights"][is_ar] /= is_ar.sum()  # one token mean over the batch; no target, no term
    return inputs


def training_loss(model, inputs, cfg):
    """L = L_AR + lambda L_MDM over the rows of make_training_inputs. Returns (loss, logs)."""
    input_ids, labels, weights = inputs["input_ids"], inputs["labels"], inputs["weights"]
    L = input_ids.shape[1]
    attn_mask = build_mask(causal(), 1, L, L, input_ids.device)  # in buffer order; padding is on the right
    hidden = walk(model, input_ids, inputs["position_ids"], attn_mask, checkpointing=cfg.checkpointing)
    terms = weights * token_nll(model, hidden, labels)  # (B, L)
    mdm = terms[inputs["is_masked"]].sum()
    loss = terms.sum()
    return loss, {"ar": (loss - mdm).item(), "mdm": mdm.item()}


# ------------------------------------------------------------------------------------------------------------ decoding


Reading = collections.namedtuple("Reading", "logits draft_ids draft_probs next_probs")


def readout(logits, input_ids, mask_id, vocab_len):
    """What a round reads of each row, in the decoder's graph. logits (B, T, V), input_ids (B, T) -> a Reading's fields

    logits (B, T, vocab_len); (B, T) each: the greedy draft of a mask and its confidence (unshifted), the probability of
    the token behind the row in the buffer (shifted). Probabilities are float32, at temperature 1, the mask token among
    them  [code]; it is never an output.
    """
    logits = logits[..., :vocab_len]
    probs = logits.float().softmax(-1)
    draft_ids = without_mask(logits, mask_id).argmax(-1)
    next_ids = input_ids.roll(-1, dims=1).clamp(max=logits.shape[-1] - 1)
    draft_probs, next_probs = (probs.gather(-1, ids[..., None])[..., 0] for ids in (draft_ids, next_ids))
    return logits, draft_ids, draft_probs, next_probs


def without_mask(logits, mask_id):
    """The mask token is never an output. (..., V) -> (..., V)"""
    return logits.masked_fill(torch.arange(logits.shape[-1], device=logits.device) == mask_id, -torch.inf)


def propose(logits, cfg, generator):
    """A draft of every mask, drawn at cfg.temperature > 0, and its confidence. (n, V) -> (n,) int64, (n,) float32"""
    uniform = torch.rand(logits.shape, generator=generator, dtype=torch.float64)
    gumbel = -torch.log(-torch.log(uniform.to(logits.device, non_blocking=True)))
    # Gumbel-max in float64 = a draw from softmax(logits / T)
    draft_ids = (without_mask(logits.float(), cfg.mask_id).double() / cfg.temperature + gumbel).argmax(-1)
    return draft_ids, logits.float().softmax(-1).gather(-1, draft_ids[:, None])[:, 0]


def select_slots(conf, tau_slot):
    """Slots whose first token is confident, strictly; if none, the best one.  conf (n, k) -> (m,), ascending"""
    lead = conf[:, 0]
    slot_idx = (lead > tau_slot).nonzero()[:, 0]
    return slot_idx if len(slot_idx) else lead.argmax().view(1)


def good_drafts(next_probs, k, cfg):
    """Whether p(token | tokens before it) clears the bar, strictly. next_probs (m k,) -> (m, k) bool, on the CPU

    Row j - 1 of a slot speaks of its token j, the last row of nothing; the first token was chosen by the plan.
    """
    return F.pad(next_probs.cpu().view(-1, k)[:, :-1] > cfg.tau_token, (1, 0), value=True)


def complete_rows(decoder, token_ids, good, position_ids, cfg):
    """Parallel completion: every selected slot on a row of its own, predict and verify until all its tokens are good.

    token_ids (m, k) drafts; good (m, k) bool, a prefix of each row; position_ids (m, k). The rows are packed in one
    sequence and leave their keys and values in scratch, row after row. Returns (token_ids (r, k), eos row or None,
    iterations): rows behind the one that holds EOS are dropped.
    """
    kv_cache, k = decoder.kv_cache, token_ids.shape[1]
    token_ids, good, start, iterations, eos_row = token_ids.clone(), good.clone(), 0, 0, None

    def forward(ids):  # the window [start, k) of every row
        m, n = ids.shape
        mask = dense(completion_rows(kv_cache.cache_len, k, start), 1, m * n, kv_cache.cache_len + m * k)
        write_idx = kv_cache.scratch_idx(m * k).view(m, k)[:, start:].flatten()
        read = readout, cfg.mask_id, cfg.vocab_len
        ids, positions = ids.reshape(1, -1), position_ids[:m, start:].reshape(1, -1)
        return Reading(*decoder(ids, positions, mask, write_idx, read=read))

    while not good.all():
        # predict: a mask wherever a token is not good yet, read unshifted, greedy whatever the temperature  [code]
        pred_ids = forward(token_ids.masked_fill(~good, cfg.mask_id)[:, start:]).draft_ids.cpu().view(-1, k - start)
        token_ids[:, start:] = torch.where(good[:, start:], token_ids[:, start:], pred_ids)
        # verify: good stays good, and each unfinished row gains at least the token behind its good prefix
        sure = good_drafts(forward(token_ids[:, start:]).next_probs, k - start, cfg)
        forced = F.pad(good[:, start:-1], (1, 0), value=True)
        good[:, start:] = (forced | sure).cummin(dim=1).values
        found = ((token_ids == cfg.eos_id) & good)[:, start:].any(dim=1).nonzero()
        if len(found):
            eos_row = found[0, 0].item()
            token_ids, good = token_ids[: eos_row + 1], good[: eos_row + 1]
            good[eos_row] = True
        if not good.all():
            start += good[:, start:].sum(dim=1).min().item() - 1  # the last common token stays: its logits are needed
        iterations += 1
    return token_ids, eos_row, iterations


def accept(draft_ids, ok, cfg):
    """What verification keeps: the good prefix up to an EOS in it, else the whole slots of that prefix.

    draft_ids (m, k) int64, ok (m, k) bool. Returns (tokens, slots, row of the EOS or None).
    """
    k, accepted_len = ok.shape[1], ok.flatten().cummin(0).values.sum().item()
    eos_idx = (draft_ids.flatten()[:accepted_len] == cfg.eos_id).nonzero()[:1, 0].tolist()
    if eos_idx:
        return eos_idx[0] + 1, eos_idx[0] // k + 1, eos_idx[0] // k
    return accepted_len // k * k, accepted_len // k, None


@torch.no_grad()
def generate(model, prompt_ids, cfg, decoder=None, generator=None):
    """Plan, select, verify, commit, until every slot is written. Batch 1; the state of the loop lies on the CPU.

    prompt_ids (1, P) int64. Returns (seq_ids (1, P+R), record): the text in position order, what stands behind a first
    EOS included (`trim` cuts it), and forwards, rounds, fixed_round (R,), rejected (round, index, token id), buffer_ids
    and buffer_pos (commit order = cache order), tpf_mean_of_ratios, the published "TPF". Raises ValueError for a batch,
    or lengths of no whole slots.
    """
    check(cfg)
    if prompt_ids.shape[0] != 1 or prompt_ids.shape[1] == 0:
        raise ValueError(f"ReFusion decodes one prompt of at least one token, not {tuple(prompt_ids.shape)}")
    P, k = prompt_ids.shape[1], cfg.slot_size
    block_len = -(-cfg.max_new_tokens // k) * k // cfg.serial_blocks
    decoder = (decoder or Decoder(model, P + block_len * cfg.serial_blocks, compiled=cfg.compile)).reset()
    kv_cache = decoder.kv_cache
    buffer_ids, buffer_pos = prompt_ids[0].cpu(), torch.arange(P)
    fixed_round, ratios, rejected, eos_seen = [], [], [], False

    def forward(ids, positions, masked, last=None):  # causal in buffer order; masked: masks stand behind ids
        ids = torch.cat([ids.flatten(), torch.full((masked.numel(),), cfg.mask_id)])
        positions, n = torch.cat([positions.flatten(), masked.flatten()]), len(ids)
        mask = dense(causal(kv_cache.cache_len), 1, n, kv_cache.cache_len + n)
        read = readout, cfg.mask_id, cfg.vocab_len
        out = decoder(ids[None], positions[None], mask, kv_cache.scratch_idx(n), last=last, read=read)
        return Reading(*(x[0] for x in out))

    for block_idx in range(cfg.serial_blocks):
        first = P + block_idx * block_len
        todo = torch.arange(first, first + block_len).view(-1, k)  # (n, k) positions of unwritten slots
        plan = None  # what is read of the masks of todo; the verification before may have done so already
        while len(todo):
            # propose: masks on every unwritten slot; the first forward takes the prompt along
            if plan is None:
                start = kv_cache.cache_len
                plan = forward(buffer_ids[start:], buffer_pos[start:], todo, last=todo.numel())
                kv_cache.commit(len(buffer_ids) - start)  # never the masks
            drafts = propose(plan.logits, cfg, generator) if cfg.temperature > 0 else (plan.draft_ids, plan.draft_probs)
            draft_ids, conf = to_host(*drafts)
            # select
            slot_idx = select_slots(conf.view(-1, k), cfg.tau_slot)
            keep = torch.ones(len(todo), dtype=torch.bool).index_fill(0, slot_idx, False)
            slot_pos, draft_ids = todo[slot_idx], draft_ids.view(-1, k)[slot_idx]  # (m, k)
            # score: all drafts in one sequence, so that a slot sees the drafts of the slots before it
            verdict = forward(draft_ids, slot_pos, todo[keep] if cfg.plan_ahead else todo[:0])
            n_drafts, m = draft_ids.numel(), len(slot_idx)
            ok = good_drafts(verdict.next_probs[:n_drafts], k, cfg)
            # commit: the accepted prefix up to EOS, or its whole slots; else complete the slots in parallel
            n_kept, n_slots, eos_row = accept(draft_ids, ok, cfg)
            plan = None
            if cfg.plan_ahead and n_kept == n_drafts:  # its masks saw what stays
                plan = Reading(*(x[n_drafts:] for x in verdict))
            iterations = 0
            if n_kept == 0:
                good = ok.cummin(dim=1).values
                draft_ids, eos_row, iterations = complete_rows(decoder, draft_ids, good, slot_pos, cfg)
                eos_idx = (draft_ids.flatten() == cfg.eos_id).nonzero()[:1, 0].tolist()
                n_kept, n_slots = eos_idx[0] + 1 if eos_idx else draft_ids.numel(), m
                if cfg.recompute_kv:
                    forward(draft_ids.flatten()[:n_kept], slot_pos.flatten()[:n_kept], todo[:0])
            kv_cache.commit(n_kept)
            fallen = zip((slot_pos.flatten() - P)[n_kept:].tolist(), draft_ids.flatten()[n_kept:].tolist())
            rejected += [(len(ratios), index, token_id) for index, token_id in fallen]
            buffer_ids = torch.cat([buffer_ids, draft_ids.flatten()[:n_kept]])
            buffer_pos = torch.cat([buffer_pos, slot_pos.flatten()[:n_kept]])
            fixed_round += [len(ratios)] * n_kept
            ratios.append(k * n_slots / (2 * iterations + 2))
            keep[slot_idx[n_slots:]] = True
            if eos_row is not None:
                eos_seen, plan = True, None
                keep &= todo[:, 0] < slot_pos[eos_row, 0]  # slots before the EOS are still decoded
            todo = todo[keep]
        if eos_seen:
            break
    order = buffer_pos.argsort()
    rounds = torch.tensor([-1] * P + fixed_round)[order][P:].tolist()
    record = dict(forwards=decoder.forwards, rounds=len(ratios), fixed_round=rounds, rejected=rejected,
                  buffer_ids=buffer_ids, buffer_pos=buffer_pos,
                  tpf_mean_of_ratios=sum(ratios) / len(ratios))  # fmt: skip
    return buffer_ids[order][None].to(prompt_ids.device), record


# -------------------------------------------------------------------------------------- what the frame asks of a script


OWN_FLAGS = {}  # flags of this script alone: name -> (arguments of add_argument, function(cfg, value))


def check(cfg):
    """Raise ValueError, one line, for settings that cannot work."""
    for name in ("tau_slot", "tau_token"):
        if not 0 <= getattr(cfg, name) <= 1:
            raise ValueError(f"{name} must lie in [0, 1], not {getattr(cfg, name)}")
    if cfg.slot_size < 1 or cfg.serial_blocks < 1:
        raise ValueError("slot_size and serial_blocks must be at least 1")
    length = -(-cfg.max_new_tokens // cfg.slot_size) * cfg.slot_size
    if length % (cfg.slot_size * cfg.serial_blocks):
        raise ValueError(
            f"{length} new tokens in {cfg.serial_blocks} serial blocks are not whole slots of {cfg.slot_size} tokens"
        )
    if cfg.masking not in ("bernoulli", "fixed") or cfg.loss_norm not in ("code", "paper"):
        raise ValueError("masking is bernoulli or fixed, loss_norm is code or paper")
    if not all(size.strip().isdigit() and int(size) > 0 for size in cfg.slot_sizes.split(",")):
        raise ValueError(f"slot_sizes is a list like 4,8,16, not {cfg.slot_sizes!r}")
    if cfg.top_p != 1:
        raise ValueError("ReFusion samples without top_p: leave it at 1")


def load_backbone(name, dtype):
    """A Hugging Face causal LM; the released checkpoint has plain Qwen3 names and loads as it is."""
    return common.from_pretrained(AutoModelForCausalLM, name, dtype=dtype)


def load_tokenizer(name):
    return AutoTokenizer.from_pretrained(name, trust_remote_code=False)


def enter_stage(model, stage, folder, cfg):
    """The model at the start of a stage of training, or as saved in folder: ReFusion adds no parameter."""
    return model


def save_method(model, folder, cfg):
    """Everything that decoding needs; the frame adds tokenizer and settings."""
    model.save_pretrained(folder, max_shard_size="1000GB")


def plain_lm(model):
    """What plain AR decoding runs on where there is no AR baseline."""
    return model


def spare_mask_id(backbone, tokenizer):
    """A mask token for a backbone that has none and is not to be trained: ReFusion must have learnt it."""
    return None


def new_decoder(model, prompt_len, cfg):
    """A Decoder with room for a prompt and what generate writes."""
    room = -(-cfg.max_new_tokens // cfg.slot_size) * cfg.slot_size
    return Decoder(model, prompt_len + room, compiled=cfg.compile)


def stages(cfg):
    """The stages of training, in order: a plain AR model of the data first, if asked for, then the method."""
    return [
        Stage("ar", cfg.ar_steps, cfg.ar_lr, keep_short, None, make_ar_inputs, ar_loss),
        Stage(METHOD, cfg.steps, cfg.lr, keep_short, draw_noise, make_training_inputs, training_loss),
    ]


def decoders(cfg):
    """(label, generate) of each decoding that `--generate` puts beside plain AR."""
    return [(METHOD, generate)]


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
