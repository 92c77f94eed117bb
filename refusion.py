"""ReFusion: slots chosen by diffusion, filled by autoregression, on a Hugging Face causal LM.

Paper         ReFusion: A Diffusion Large Language Model with Parallel Autoregressive Decoding
              arXiv 2512.13586v2 (numbers in brackets are of this version), https://arxiv.org/abs/2512.13586
Idea          The answer is cut into slots of k tokens. Finished slots are moved in front of the masked ones
              while a token keeps its position id: a causal LM sees all that is finished, and its KV cache is
              never recomputed. A round drafts all masked slots at once, as a diffusion LM does, and verifies
              the confident ones left to right, as an AR model does.
Differs       from plain AR: 1. buffer order is completion order, RoPE sees the text order  2. two losses:
              next token in clean slots, denoising of masked slots  3. several slots of tokens a round
Implements    sequence reorganisation [§4.1], training [§4.3], Eq. 2-4 -> make_training_inputs, training_loss;
              decoding [§4.2, App. A.3], Eq. 5-9 -> generate
Left out      decoding of several prompts at once, LoRA
Not as in     the paper: drafts are the argmax, not a sample of Eq. 5 and 9 (the code's choice)
              the code: an EOS found in parallel completion drops only the slots after it; no clean target
              gives L_ARM = 0 instead of NaN; probabilities are float32; the mask token is never an output
Run           python refusion.py --train --generate            (tests/tiny, CPU)
              python refusion.py --generate --model GSAI-ML/ReFusion --prompt "..."
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
from safetensors.torch import save_file
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from tqdm import tqdm
from transformers import PretrainedConfig, logging

import common
from common import Decoder, build_mask, causal, completion_rows, dense, from_pretrained, generate_ar, is_eos
from common import kernels, padded_len, token_nll, walk

METHOD = "refusion"
HERE = Path(__file__).resolve().parent


@dataclasses.dataclass
class Config:
    # what all five scripts share
    model: str = f"{HERE}/tests/tiny/ar"  # Hub id or folder of the backbone
    data: str = f"{HERE}/tests/tiny/train.jsonl"  # JSONL to train on
    test: str = ""  # JSONL to decode
    problems: int = 64  # most rows of it to decode
    out: str = f"runs/{METHOD}"  # folder of the saves
    steps: int = 2000
    batch_size: int = 512  # [App. B.1] rows a step, over all processes
    accumulation: int = 0  # forwards a step and process, 0: one row each; changes memory, not results
    lr: float = 2e-5  # [App. B.1] cosine to lr_floor
    warmup: float = 0.0  # [code] share of the steps
    lr_floor: float = 0.0  # [code] share of lr at the end
    beta2: float = 0.999  # [code] AdamW
    weight_decay: float = 0.0  # [code]
    clip: float = 1.0  # [code] largest norm of the gradient
    max_len: int = 4096  # [App. B.1] tokens; longer rows are dropped
    save_every: int = 500  # steps
    checkpointing: bool = False  # recompute layers in backward
    max_new_tokens: int = 128  # [code]
    temperature: float = 0.0  # [code] of the drafts
    seed: int = 0
    device: str = "cuda" if torch.cuda.is_available() else "cpu"
    dtype: Literal["bfloat16", "float32"] = "bfloat16" if torch.cuda.is_available() else "float32"
    baseline: str = ""  # plain AR model to compare with; without it the model that was trained on
    mask_id: int | None = None
    eos_id: int | list | None = None  # of a list each ends a text
    vocab_len: int | None = None  # rows of the head from here on are no tokens
    text_len: int | None = None  # most positions of the model
    # ReFusion
    slot_sizes: str = "4,8,16,32"  # [App. B.1] k in training: uniform, per row
    masking: Literal["bernoulli", "fixed"] = "bernoulli"  # [code]; fixed: floor(t K) slots [§4.3]
    loss_norm: Literal["code", "paper"] = "code"  # paper: mean over the row's own targets [Eq. 2, 3]
    mdm_weight: float = 1.0  # lambda [App. B.1]
    slot_size: int = 8  # k in decoding [code]; 8 to 32 by task [Table 5]
    serial_blocks: int = 2  # [code] blocks one after the other [§5.1]
    tau_slot: float = 0.9  # [Table 5] 0.8 or 0.9 by task
    tau_token: float = 0.9  # [code]; 0.1 to 0.6 by task [Table 5]
    plan_ahead: bool = False  # [ours] draft the next round while verifying: same text, fewer forwards
    recompute_kv: bool = False  # rewrite the cache after each parallel completion [Table 8]


# what the model of tests/tiny changes
TINY = dict(test=f"{HERE}/tests/tiny/test.jsonl", steps=400, batch_size=64, accumulation=1, lr=2e-3,
            warmup=0.05, beta2=0.98, max_len=96, max_new_tokens=32, loss_norm="paper", slot_sizes="4",
            slot_size=4, serial_blocks=1, tau_slot=0.6, tau_token=0.3)  # the thresholds of Fig. 5; fmt: skip
LIMITS = dict(slot_size=(1, 4096), serial_blocks=(1, 4096), tau_slot=(0, 1), tau_token=(0, 1))
TEMPLATE = {}  # arguments of the chat template: Qwen3's default  [code]


# --------------------------------------------------------------------------------------------- training step


def sizes(text):
    """The numbers of a list like 2,4,8. Raises ValueError for anything else."""
    if not re.fullmatch(r"[1-9]\d{0,3}(,[1-9]\d{0,3})*", text):
        raise ValueError(f"sizes are a list like 2,4,8, not {text!r}")
    return [int(size) for size in text.split(",")]


def draw_noise(batch, cfg, generator):
    """Per row: slot size k, noise level t, which slots are masked, the order of the clean ones.  [§4.3]

    batch: list of {"prompt_ids", "answer_ids"} (lists of ints, the answer ends with EOS). Returns a list of
    dicts: slot_size int; p_mask float; slot_masked, one bool per slot; clean_slot_order, slot indices in
    buffer order.
    """
    draws = []
    options = sizes(cfg.slot_sizes)
    for row in batch:
        k = options[torch.randint(len(options), (1,), generator=generator).item()]
        K = math.ceil(len(row["answer_ids"]) / k)
        t = torch.rand(1, generator=generator).item()
        p_mask = (1 - 1e-3) * t + 1e-3  # [code]
        if cfg.masking == "fixed":
            chosen = torch.randperm(K, generator=generator)[: int(t * K)]  # [§4.3 (1)]
            masked = torch.isin(torch.arange(K), chosen)
        else:
            masked = torch.rand(K, generator=generator) < p_mask  # one draw a slot [code]
        clean = (~masked).nonzero()[:, 0]
        order = clean[torch.randperm(len(clean), generator=generator)].tolist()  # [§4.3 (2)]
        draws.append(dict(slot_size=k, p_mask=p_mask, slot_masked=masked.tolist(), clean_slot_order=order))
    return draws


def make_training_inputs(batch, draws, cfg):
    """Rows of a half-way state of decoding, with the weight of every token in the loss.  [§4.3 (3), Fig. 3]

        input_ids     prompt | clean slots, shuffled               | masked slots in order, <mask> | padding
        labels        -100   | tokens 2..k of each slot, then -100 | the original tokens           | -100
        position_ids  0..P-1 | original, moved with the tokens     | original                      | N..L-1

    Labels stand where their logits do: a clean token predicts its right neighbour in the slot (shifted), a
    mask predicts itself (unshifted). The last token of a clean slot and the prompt predict nothing. Returns a
    dict of (B, L) tensors: input_ids, position_ids, labels int64; is_masked bool; weights float32, such that
    the loss is sum(weights * nll). For B rows, answer length A and mask probability p of a row:
        code:   L_ARM 1 / (AR targets of the batch),      L_MDM 1 / (B p A)
        paper:  L_ARM 1 / (B * AR targets of the row),    L_MDM 1 / (B * masked tokens of the row)
    """
    B = len(batch)
    L = padded_len(max(len(row["prompt_ids"] + row["answer_ids"]) for row in batch), cfg.device)
    input_ids = torch.full((B, L), cfg.eos_id)
    position_ids = torch.arange(L).repeat(B, 1)
    labels = torch.full((B, L), -100)
    is_masked = torch.zeros(B, L, dtype=torch.bool)
    for r, (row, draw) in enumerate(zip(batch, draws)):
        ids = torch.tensor(row["prompt_ids"] + row["answer_ids"])
        P = len(row["prompt_ids"])
        N = len(ids)
        slots = torch.arange(P, N).split(draw["slot_size"])  # text places; the ragged tail is a slot too
        clean = [slots[slot_idx] for slot_idx in draw["clean_slot_order"]]
        masked = [slot for slot, slot_masked in zip(slots, draw["slot_masked"]) if slot_masked]
        order = torch.cat([torch.arange(P), *clean, *masked])  # text place of each token of the buffer
        shifted = [F.pad(ids[slot[1:]], (0, 1), value=-100) for slot in clean]
        input_ids[r, :N] = ids[order]
        position_ids[r, :N] = order
        labels[r, P:N] = torch.cat([*shifted, *(ids[slot] for slot in masked)])
        is_masked[r, P + sum(map(len, clean)) : N] = True
    is_ar = (labels != -100) & ~is_masked
    if cfg.loss_norm == "paper":  # mean over the n (k-1) and the n k targets of the row  [Eq. 2, 3]
        n_ar = B * is_ar.sum(1, keepdim=True).clamp(min=1)
        n_mdm = B * is_masked.sum(1, keepdim=True).clamp(min=1)
    else:  # one token mean over the batch; no target, no term
        n_ar = is_ar.sum().clamp(min=1)
        n_mdm = [[B * draw["p_mask"] * len(row["answer_ids"])] for row, draw in zip(batch, draws)]
        n_mdm = torch.tensor(n_mdm, dtype=torch.float64)  # (B, 1)
    weights = (is_ar / n_ar + is_masked * (cfg.mdm_weight / n_mdm.double())).float()
    return dict(input_ids=input_ids.masked_fill(is_masked, cfg.mask_id), position_ids=position_ids,
                labels=labels, is_masked=is_masked, weights=weights)  # fmt: skip


def training_loss(model, inputs, cfg):
    """L = L_ARM + lambda L_MDM [Eq. 4] over the rows of make_training_inputs. Returns (loss, logs).

    L_ARM = -mean log P(token j of a clean slot | prompt, clean tokens before it), j = 2..k  [Eq. 2]
    L_MDM = -mean log P(token of a masked slot | prompt, clean slots, masks up to its own)  [Eq. 3]
    """
    input_ids = inputs["input_ids"]
    L = input_ids.shape[1]
    attn_mask = build_mask(causal(), 1, L, L, input_ids.device)  # in buffer order [§4.1]; padding is last
    hidden = walk(model, input_ids, inputs["position_ids"], attn_mask, checkpointing=cfg.checkpointing)
    terms = inputs["weights"] * token_nll(model.lm_head, hidden, inputs["labels"])  # (B, L)
    mdm = (terms * inputs["is_masked"]).sum()
    loss = terms.sum()
    return loss, {"ar": (loss - mdm).detach(), "mdm": mdm.detach()}


# -------------------------------------------------------------------------------------------------- decoding


def draw_token(probs, u):
    """The first token at which the cumulative probability passes u. (n, V), (n,) float64 -> (n,) int64"""
    cumulative = probs.double().cumsum(-1)
    bar = u.to(probs.device, non_blocking=True)[:, None] * cumulative[:, -1:]
    return torch.searchsorted(cumulative, bar, right=True)[:, 0].clamp(max=probs.shape[-1] - 1)


def without_mask(logits, cfg):
    """Logits over the tokens, float32, the mask at -inf: it is never an output. (n, V) -> (n, vocab_len)"""
    logits = logits[:, : cfg.vocab_len].float()
    return logits.masked_fill(torch.arange(logits.shape[-1], device=logits.device) == cfg.mask_id, -torch.inf)


def propose(logits, cfg, generator):
    """A draft for each masked position and its probability. (n, V) -> (n,) int64, (n,) float32, on the CPU

    d ~ P(. | prompt, clean, masks up to its own) [Eq. 5], the argmax at temperature 0 [code]. Its probability
    is at temperature 1 and counts the mask token in [code].
    """
    allowed = without_mask(logits, cfg)
    draft_ids = allowed.argmax(-1)
    if cfg.temperature > 0:
        u = torch.rand(len(logits), generator=generator, dtype=torch.float64)
        draft_ids = draw_token((allowed / cfg.temperature).softmax(-1), u)
    conf = logits[:, : cfg.vocab_len].float().softmax(-1).gather(-1, draft_ids[:, None])[:, 0]
    return draft_ids.cpu(), conf.cpu()


def select_slots(conf, tau_slot):
    """Slots whose certainty passes tau_slot, strictly; if none, the best one.  conf (n, k) -> (m,), ascending

    C(slot i) = P(d(i,1) | prompt, clean, masks up to (i,1)): a slot is judged by its first token.  [Eq. 6]
    """
    certainty = conf[:, 0]
    slot_idx = (certainty > tau_slot).nonzero()[:, 0]
    return slot_idx if len(slot_idx) else certainty.argmax().view(1)


def good_drafts(model, hidden, draft_ids, cfg):
    """Whether P(d(i,j) | all before it in the buffer) passes tau_token, strictly. -> (m, k) bool, on the CPU

    draft_ids (m, k), hidden (m k, width) of their forward: each row predicts the next token of its slot, the
    last row of a slot nothing. Its first token has passed with the certainty that chose it.  [Eq. 7]
    """
    logits = model.lm_head(hidden.view(*draft_ids.shape, -1)[:, :-1])  # (m, k-1, V)
    probs = logits[..., : cfg.vocab_len].float().softmax(-1)
    targets = draft_ids[:, 1:, None].to(logits.device, non_blocking=True)
    return F.pad(probs.gather(-1, targets)[..., 0].cpu() > cfg.tau_token, (1, 0), value=True)


def forward(decoder, ids, positions, mask_mod, write_idx):
    """Hidden states (n, width) of ids (n,) at text positions (n,), after the committed part of the cache.

    write_idx (n,): where in the cache their keys and values go, ascending.
    """
    mask = dense(mask_mod, 1, len(ids), int(write_idx[-1]) + 1)
    return decoder(ids[None], positions[None], mask, write_idx)[0]


def complete_rows(model, decoder, draft_ids, ok, position_ids, cfg):
    """Parallel iterative completion: every selected slot on a row of its own until all its tokens are good.

    draft_ids (m, k); ok (m, k) bool, what has passed; position_ids (m, k). The rows are packed in one
    sequence and leave their keys and values in scratch, row after row. Returns (tokens up to an EOS, flat;
    iterations): rows after the EOS are dropped.  [App. A.3, Eq. 8 and 9]
    """
    k = ok.shape[1]
    token_ids = draft_ids.clone()
    good = ok.cummin(dim=1).values  # a prefix of each row
    start = 0
    iterations = 0
    while not good.all():
        # predict [Eq. 9]: a mask wherever a token is not good yet, the argmax whatever the temperature [code]
        todo = ~good
        m = len(todo)
        window = slice(start, k)  # of every row
        window_pos = position_ids[:m, window].flatten()
        write_idx = decoder.kv_cache.scratch_idx(m * k).view(m, k)[:, window].flatten()
        mask_mod = completion_rows(decoder.kv_cache.cache_len, k, start)
        masked_ids = token_ids.masked_fill(todo, cfg.mask_id)[:, window].flatten()
        hidden = forward(decoder, masked_ids, window_pos, mask_mod, write_idx)
        rows = todo[:, window].flatten().nonzero()[:, 0].to(hidden.device, non_blocking=True)
        token_ids[todo] = without_mask(model.lm_head(hidden[rows]), cfg).argmax(-1).cpu()
        # verify [Eq. 8]: good stays good, and each unfinished row gains at least one token [code]
        hidden = forward(decoder, token_ids[:, window].flatten(), window_pos, mask_mod, write_idx)
        sure = good_drafts(model, hidden, token_ids[:, window], cfg)
        forced = F.pad(good[:, start:-1], (1, 0), value=True)
        good[:, window] = (forced | sure).cummin(dim=1).values
        ended = (is_eos(token_ids, cfg.eos_id) & good).any(dim=1).nonzero()[:1, 0].tolist()
        if ended:
            token_ids = token_ids[: ended[0] + 1]
            good = good[: ended[0] + 1]
            good[-1] = True
        start = good.sum(dim=1).min().item() - 1  # the last common token predicts the next
        iterations += 1
    return token_ids.flatten()[: accept(token_ids, good, cfg)], iterations


def accept(draft_ids, ok, cfg):
    """How many drafts stay: the longest good prefix up to an EOS, else its whole slots.  [below Eq. 7]

    draft_ids (m, k) int64, ok (m, k) bool.
    """
    k = ok.shape[1]
    prefix_len = ok.flatten().cummin(0).values.sum().item()  # l
    eos_idx = is_eos(draft_ids.flatten()[:prefix_len], cfg.eos_id).nonzero()[:1, 0].tolist()
    return eos_idx[0] + 1 if eos_idx else prefix_len // k * k  # floor(l / k) slots


@torch.no_grad()
def generate(model, prompt_ids, cfg, decoder=None, generator=None):
    """Select and infill slots until each is written; batch 1, its state on the CPU.  [§4.2, App. A.3]

    prompt_ids (1, P) int64. Of cfg: max_new_tokens, slot_size, serial_blocks, tau_slot, tau_token,
    temperature, plan_ahead, recompute_kv, mask_id, eos_id, vocab_len. Returns (seq_ids (1, P+R), record): the
    text in position order, tokens after an EOS included, and forwards, rounds, fixed_round (R,), rejected
    (round, index, token id), buffer_ids and buffer_pos (cache order), tpf_mean_of_ratios, the published
    "TPF". Raises ValueError for a batch, an empty prompt, or lengths of no whole slots.
    """
    P = prompt_ids.shape[1]
    k = cfg.slot_size
    R = -(-cfg.max_new_tokens // k) * k
    if prompt_ids.shape[0] != 1 or P == 0:
        raise ValueError(f"ReFusion decodes one prompt of at least one token, not {tuple(prompt_ids.shape)}")
    if R % (k * cfg.serial_blocks):
        raise ValueError(f"{R} tokens in {cfg.serial_blocks} serial blocks are no whole slots of {k}")
    block_len = R // cfg.serial_blocks  # b
    decoder = (decoder or Decoder(model, P + R)).reset()
    kv_cache = decoder.kv_cache
    buffer_ids = prompt_ids[0].cpu()
    buffer_pos = torch.arange(P)
    fixed_round, ratios, rejected = [], [], []
    for block_start in range(P, P + R, block_len):  # serial blocks  [§5.1]
        todo = torch.arange(block_start, block_start + block_len).view(-1, k)  # (n, k) places of masked slots
        plan = None  # logits at the masks of todo; the verification before may have computed them
        while len(todo):
            # propose: drafts for every masked slot [Eq. 5]; the first forward takes the prompt along
            if plan is None:
                start = kv_cache.cache_len
                ids = F.pad(buffer_ids[start:], (0, todo.numel()), value=cfg.mask_id)
                positions = torch.cat([buffer_pos[start:], todo.flatten()])
                hidden = forward(decoder, ids, positions, causal(start), kv_cache.scratch_idx(len(ids)))
                kv_cache.commit(len(buffer_ids) - start)  # never the masks
                plan = model.lm_head(hidden[-todo.numel() :])
            draft_ids, conf = propose(plan, cfg, generator)
            # score and select: slots by the certainty of their first token [Eq. 6]
            slot_idx = select_slots(conf.view(-1, k), cfg.tau_slot)
            draft_ids = draft_ids.view(-1, k)[slot_idx]  # (m, k)
            new_ids = draft_ids.flatten()
            new_pos = todo[slot_idx].flatten()
            # verify: all drafts in one sequence, where a slot sees the drafts of the slots before it [Eq. 7]
            ahead = todo[~torch.isin(todo[:, 0], new_pos) & cfg.plan_ahead].flatten()  # for the next plan
            ids = F.pad(new_ids, (0, len(ahead)), value=cfg.mask_id)
            positions = torch.cat([new_pos, ahead])
            mask_mod = causal(kv_cache.cache_len)
            hidden = forward(decoder, ids, positions, mask_mod, kv_cache.scratch_idx(len(ids)))
            ok = good_drafts(model, hidden[: len(new_ids)], draft_ids, cfg)
            n_kept = accept(draft_ids, ok, cfg)
            plan = model.lm_head(hidden[n_kept:]) if len(ahead) and n_kept == len(new_ids) else None
            iterations = 0
            if n_kept == 0:  # not one whole slot: complete the selected slots in parallel
                new_ids, iterations = complete_rows(model, decoder, draft_ids, ok, todo[slot_idx], cfg)
                n_kept = len(new_ids)
                if cfg.recompute_kv:
                    forward(decoder, new_ids, new_pos[:n_kept], mask_mod, kv_cache.scratch_idx(n_kept))
            # commit: keys and values as they stand; the other drafts are masked again
            kv_cache.commit(n_kept)
            lost = zip((new_pos[n_kept:] - P).tolist(), new_ids[n_kept:].tolist())
            rejected += [(len(ratios), index, token_id) for index, token_id in lost]
            buffer_ids = torch.cat([buffer_ids, new_ids[:n_kept]])
            buffer_pos = torch.cat([buffer_pos, new_pos[:n_kept]])
            fixed_round += [len(ratios)] * n_kept
            n_slots = len(slot_idx) if iterations else -(-n_kept // k)
            ratios.append(k * n_slots / (2 * iterations + 2))
            todo = todo[~torch.isin(todo[:, 0], buffer_pos)]
            if is_eos(buffer_ids[-1], cfg.eos_id):  # slots before the EOS are still decoded
                todo = todo[todo[:, 0] < buffer_pos[-1]]
                plan = None
        if is_eos(buffer_ids[P:], cfg.eos_id).any():
            break
    order = buffer_pos.argsort()  # text order  [end of §4.2]
    rounds = torch.tensor([-1] * P + fixed_round)[order][P:].tolist()
    record = dict(forwards=decoder.forwards, rounds=len(ratios), fixed_round=rounds, rejected=rejected,
                  buffer_ids=buffer_ids, buffer_pos=buffer_pos,
                  tpf_mean_of_ratios=sum(ratios) / len(ratios))  # fmt: skip
    return buffer_ids[order][None].to(prompt_ids.device), record


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
    """Train all weights of the backbone; folder: the save to go on from, or None."""
    model, tokenizer = load(folder or cfg.model, cfg, torch.float32, training=True)
    fit(model, model, tokenizer, encode_rows(tokenizer, cfg), cfg, folder)


def compare(args, cfg):
    """Decode the same prompts by plain AR and by ReFusion. Returns the figures of both."""
    rows = []
    plans = [("plain AR", generate_ar, cfg.baseline or cfg.model), (METHOD, generate, newest(args.folder))]
    for label, run, name in plans:
        model, tokenizer = load(name, cfg, getattr(torch, cfg.dtype))
        problems = read_problems(tokenizer, args, cfg)
        max_len = max(prompt_ids.shape[1] for prompt_ids, *_ in problems) + cfg.max_new_tokens + cfg.slot_size
        decoder = Decoder(model.to(cfg.device), max_len)
        rows.append(decode(label, run, decoder, model, tokenizer, problems, cfg, args, *rows))
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
