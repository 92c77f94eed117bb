"""Fast-dLLM v2: an AR model adapted to block diffusion; training step and decoding loop on a Hugging Face LM.

Paper         Fast-dLLM v2: Efficient Block-Diffusion LLM, arXiv 2509.26328
Idea          The text is cut into blocks of D tokens: causal between blocks, bidirectional inside. Masked tokens of a
              block are predicted from the noisy block and the clean blocks before it. Decoding goes block by block,
              inside a block every confident token at once, and a finished block's keys and values are kept for good.
Differs       from plain AR: 1. attention is full inside a block  2. the input is doubled, [noisy | clean], every sample
              used with a mask and with its complement  3. several tokens a forward. The next-token head stays: the
              token at i is read from the logits at i-1.
Implements    block-aligned packing -> pack; complementary masks -> make_training_inputs; masked loss with token shift
              -> training_loss; block cache, sub-blocks, threshold, DualCache -> generate_batch, generate
Left out      likelihood scoring of benchmark answers; labels on earlier turns and on the newline behind the stop token
Not as in     the published code: an aligned sample gets no extra pad block; a prompt of exactly D tokens is prefilled;
              the mask token is never an output; in batches, rows stop at a stop token that a commit gives, take their
              first token from the commit wherever their prompt ends, and are sampled each on its own
Run           python fastdllm_v2.py --train --generate [--sweep]           (tiny backbone, CPU)
              python fastdllm_v2.py --generate --model Efficient-Large-Model/Fast_dLLM_v2_1.5B --prompt "..."
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
from torch.nn.utils.rnn import pad_sequence
from tqdm import tqdm
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    PreTrainedTokenizerFast,
    Qwen2Config,
    Qwen3Config,
    Qwen3ForCausalLM,
)
from transformers.utils import logging

import common
from common import Decoder, block_causal, build_mask, causal, dense, generate_ar, noisy_clean, prepare, token_nll, walk
from kernels import notice, to_host

METHOD = "fastdllm_v2"


@dataclasses.dataclass
class Config:
    # what all five scripts share
    model: str = "tiny"  # Hub id, folder, or the built-in backbone
    data: str = ""  # JSONL; empty: the built-in task
    out: str = f"runs/{METHOD}"
    steps: int = 6000  # [paper] 1.5B; 2500 for 7B
    ar_steps: int = 0  # plain AR fine-tuning before the method's own steps; kept as the AR baseline
    batch_size: int = 4  # windows of max_len tokens on one device; 256 over 64 devices  [paper]
    accumulation: int = 1  # micro-batches a step; changes memory, not results
    lr: float = 2e-5  # [paper] 1.5B; 1e-5 for 7B
    ar_lr: float = 2e-5  # of the AR stage
    warmup: float = 0.03  # [code] share of the steps
    lr_floor: float = 1.0  # [code] share of lr at the end: constant
    beta2: float = 0.999  # [code] AdamW
    weight_decay: float = 0.0  # [code]
    clip: float = 1.0  # [code]
    max_len: int = 2048  # L, the training window  [paper]; longest prompt in decoding
    max_new_tokens: int = 128  # [ours]
    problems: int = 64  # held-out problems decoded when no prompt is given
    temperature: float = 0.0  # [code]
    top_p: float = 0.95  # [code] of no effect at temperature 0
    seed: int = 0
    device: str = "cuda" if torch.cuda.is_available() else "cpu"
    dtype: str = "bfloat16" if torch.cuda.is_available() else "float32"
    compile: bool = torch.cuda.is_available()
    save_every: int = 500
    mask_id: int | None = None  # None: from the model and its tokenizer
    eos_id: int | None = None
    vocab_len: int | None = None  # rows of the head behind the last token are never an output
    # Fast-dLLM v2
    block_size: int = 32  # D  [paper]; left at 32 it gives way to the `bd_size` of the model's config
    sub_block_size: int = 8  # S, in decoding  [paper]
    tau: float = 0.9  # [paper] for speed; 1.0, one token a forward, for its accuracy tables
    block_cache: bool = False  # DualCache: keep keys and values inside a block, approximate  [code] off
    confidence: str = "nucleus"  # [code] when sampling, of the renormalised top-p; "softmax" of the plain softmax
    pad_blocks: bool = True  # [paper] each sample is padded with masks to whole blocks; off in the published run
    complementary: bool = True  # [paper] the second view with the complement of the mask
    shared_clean: bool = True  # [ours] both views beside one clean copy, same loss; else rows of 2 L  [code]
    checkpointing: bool = False  # recompute layers in backward
    sweep: bool = False  # decode at thresholds 0.5 .. 1.0


# what `--model tiny` changes
TINY = dict(steps=300, ar_steps=350, batch_size=48, lr=3e-3, ar_lr=3e-3, warmup=0.02, lr_floor=0.0, beta2=0.95,
            max_len=40, max_new_tokens=32, block_size=8, sub_block_size=4)  # fmt: skip
TEMPLATE = {}  # arguments of the chat template: Qwen2.5's default  [code]


# ------------------------------------------------------------------------------------------------------- training step


def pack_windows(samples, window, cfg):
    """Samples one behind the other, each filled with masks to whole blocks, cut into windows; the remainder is dropped.

    samples: (input_ids, labels) lists of equal length. Returns a list of {"input_ids", "labels"}, `window` ints each.
    With pad_blocks no block holds tokens of two samples. Earlier samples of a window stay visible  [code].
    """
    input_ids, labels = [], []
    for sample_ids, sample_labels in samples:
        pad = -len(sample_ids) % cfg.block_size if cfg.pad_blocks else 0
        input_ids += sample_ids + [cfg.mask_id] * pad
        labels += sample_labels + [-100] * pad
    starts = range(0, len(input_ids) - window + 1, window)
    return [{"input_ids": input_ids[i : i + window], "labels": labels[i : i + window]} for i in starts]


def pack(rows, cfg):
    """Windows of max_len tokens out of rows of prompt_ids, answer_ids; labels on the answer and its EOS alone."""
    samples = [
        (row["prompt_ids"] + row["answer_ids"], [-100] * len(row["prompt_ids"]) + row["answer_ids"]) for row in rows
    ]
    if not (windows := pack_windows(samples, cfg.max_len, cfg)):
        raise ValueError(f"{len(rows)} rows do not fill one window of max_len {cfg.max_len} tokens")
    return windows


def draw_noise(batch, cfg, generator):
    """t (n,): the noise level of every block; u (n, D): one uniform number per token. n blocks in the whole batch."""
    n = sum(len(window["input_ids"]) for window in batch) // cfg.block_size
    return {"t": torch.rand(n, generator=generator), "u": torch.rand(n, cfg.block_size, generator=generator)}


def make_training_inputs(batch, draws, cfg):
    """Noisy copies of every window, the clean one behind them, and the weight of every token in the loss.

        input_ids  (R, (V+1) L)   noisy view 1 | noisy view 2 | clean      R = B rows, V = 2 views   (shared_clean)
                                  noisy view   | clean                     R = 2 B rows, V = 1, first views first

    batch: windows of pack, L tokens each. A view masks answer tokens where u < p(t of the block), the other view the
    remaining ones: together every answer token once. Returns a dict: input_ids and position_ids, which count 0..L-1 in
    every copy, (R, (V+1) L) int64; labels (R, V, L) int64, the token itself where it is masked, else -100; weights
    (R, V, L) float32 = 1 / N there, N answer tokens in the whole batch: loss = sum(weights * nll)  [code].
    """
    clean, labels = (torch.tensor([window[name] for window in batch]) for name in ("input_ids", "labels"))
    B, L = clean.shape
    p_mask = (1 - 1e-3) * draws["t"] + 1e-3  # (n,)  [code]
    hit = (draws["u"] < p_mask[:, None]).view(B, L)
    answer = labels != -100
    views = [hit & answer, ~hit & answer] if cfg.complementary else [hit & answer]
    is_masked = torch.stack(views, dim=1)  # (B, V, L)
    if not cfg.shared_clean:
        is_masked = is_masked.transpose(0, 1).reshape(-1, 1, L)  # (V B, 1, L)
        clean, labels = clean.repeat(len(views), 1), labels.repeat(len(views), 1)
    noisy = torch.where(is_masked, cfg.mask_id, clean[:, None])
    input_ids = torch.cat([noisy.flatten(1), clean], dim=1)
    return {
        "input_ids": input_ids,
        "position_ids": torch.arange(L).repeat(noisy.shape[1] + 1).expand_as(input_ids),
        "labels": torch.where(is_masked, labels[:, None], -100),
        "weights": is_masked / answer.sum().clamp(min=1),
    }


def masked_nll(model, inputs, cfg):
    """-log p of every masked token from its view, (R, V, L-1) float32: entry i-1 for position i, 0 where not masked."""
    labels = inputs["labels"]
    R, V, L = labels.shape
    T = (V + 1) * L
    attn_mask = build_mask(noisy_clean(L, cfg.block_size, V), 1, T, T, labels.device)
    hidden = walk(model, inputs["input_ids"], inputs["position_ids"], attn_mask, checkpointing=cfg.checkpointing)
    noisy = hidden[:, : V * L].unflatten(1, (V, L))  # (R, V, L, width)
    # token shift: i is predicted at i-1, over block borders too; nobody predicts the window's first token
    return token_nll(model, noisy[:, :, :-1], labels[:, :, 1:])


def training_loss(model, inputs, cfg):
    """L = sum over both views of the masked tokens' nll / N; no 1/t, no mean per view.  Returns (loss, logs)."""
    nll = masked_nll(model, inputs, cfg)
    loss = (inputs["weights"][:, :, 1:] * nll).sum()
    return loss, {"loss_sum": nll.sum().item(), "scored": (inputs["labels"][:, :, 1:] != -100).sum().item()}


# ------------------------------------------------------------------------------------------------------------ decoding


def forward(decoder, ids, cfg, offset=0, **asked):
    """One backbone call on ids (B, n), which stand `offset` tokens behind the committed blocks. -> logits (B, n, V)

    Keys and values go to scratch. Visible: the committed blocks and the whole current block, what an earlier call left
    of it in scratch included; in a prefill of several blocks, those up to the token's own. asked: of Decoder.
    """
    start, n = decoder.kv_cache.cache_len, ids.shape[1]
    first, end = start + offset, start + max(offset + n, cfg.block_size)
    mask = dense(block_causal(cfg.block_size, offset=first), 1, n, end)
    positions = torch.arange(first, first + n)[None]
    return decoder(ids, positions, mask, decoder.kv_cache.scratch_idx(n, offset), **asked)


def without_mask(logits, mask_id):
    """The mask token is never an output. (..., V) -> (..., V)"""
    return logits.masked_fill(torch.arange(logits.shape[-1], device=logits.device) == mask_id, -torch.inf)


def readout(logits, input_ids, mask_id, vocab_len):
    """For Decoder's read: the likeliest token of each row and its probability. (B, n, V) -> (B, n) int64, float32"""
    logits = logits[..., :vocab_len]
    probs = logits.float().softmax(-1)  # the mask token counts here, though it is never chosen
    pred_ids = without_mask(logits, mask_id).argmax(-1)
    return pred_ids, probs.gather(-1, pred_ids[..., None])[..., 0]


def window(decoder, block_ids, s, is_sub, cfg, generator):
    """Tokens for offsets s .. s+S-1 of the current block (B, D), and their confidence.  -> (B, S) each, on the CPU

    is_sub: run the sub-block alone over what scratch holds of the rest of the block (DualCache, approximate). Token
    shift: i is named by row i-1. The first row repeats itself instead of its missing left neighbour: its token is known
    by then.
    """
    first, n = (s, cfg.sub_block_size) if is_sub else (0, cfg.block_size)
    read = () if cfg.temperature > 0 else (readout, cfg.mask_id, cfg.vocab_len)
    out = forward(decoder, block_ids[:, first : first + n], cfg, offset=first, read=read)
    rows = (torch.arange(s, s + cfg.sub_block_size) - 1 - first).clamp(min=0)
    if cfg.temperature > 0:
        rows = rows.to(out.device, non_blocking=True)
        return to_host(*propose(out[:, rows, : cfg.vocab_len], cfg, generator))
    return (x[:, rows] for x in to_host(*out))


def commit(decoder, ids, cfg, count=True):
    """Run clean blocks (B, n) to keep their exact keys and values. -> (B,) next token, greedy, no bar, CPU  [code]"""
    next_ids = forward(decoder, ids, cfg, count=count, last=1, read=(readout, cfg.mask_id, cfg.vocab_len))[0]
    decoder.kv_cache.commit(ids.shape[1])
    return next_ids[:, 0].cpu()


def nucleus(logits, temperature, top_p):
    """softmax(logits / T), cut where the mass before a token exceeds top_p, renormalised.  (..., V) -> (..., V)"""
    probs, order = (logits.float() / temperature).softmax(-1).sort(dim=-1, descending=True)
    before = F.pad(probs.cumsum(-1)[..., :-1], (1, 0))
    probs = probs.masked_fill(before > top_p, 0)
    probs = probs / probs.sum(-1, keepdim=True)
    return torch.zeros_like(probs).scatter(-1, order, probs)


def propose(logits, cfg, generator):
    """A token and its confidence for every position.  (B, n, V) -> (B, n) int64, (B, n) float32"""
    if cfg.temperature == 0:
        return readout(logits, None, cfg.mask_id, cfg.vocab_len)
    kept = nucleus(without_mask(logits.float(), cfg.mask_id), cfg.temperature, cfg.top_p)
    uniform = torch.rand(kept.shape, generator=generator, dtype=torch.float64)
    race = kept / -uniform.to(kept.device, non_blocking=True).log()
    pred_ids = race.argmax(-1)  # of exponentials = one draw a position
    probs = kept if cfg.confidence == "nucleus" else logits.float().softmax(-1)
    return pred_ids, probs.gather(-1, pred_ids[..., None])[..., 0]


def select(conf, is_masked, tau):
    """Masked positions of confidence above tau, strictly, and each row's most confident one.  (B, n) -> (B, n) bool"""
    best = conf.masked_fill(~is_masked, -1).argmax(-1, keepdim=True)
    return is_masked & (conf > tau).scatter(-1, best, True)


@torch.no_grad()
def generate_batch(model, prompts, cfg, decoder=None, generator=None):
    """Block after block: fill the masks sub-block by sub-block, commit the block, go on with the token it names.

    prompts: list of (P,) int64, of unequal lengths under one block clock; the state of the loop lies on the CPU.
    Returns (texts, record): per prompt its tokens and the new ones up to the first EOS, (P+R,) int64; forwards, rounds,
    fixed_round, a list (R,) per prompt, and calls, the kind of every call: prefill, block, sub, commit.
    The budget counts blocks: max_new_tokens // D of them behind the whole blocks of the longest prompt, for one prompt
    up to max_new_tokens + 1 tokens  [code]. A prompt alone ends inside a block, with its EOS; several fill their block,
    then the finished ones leave  [code]. Without block_cache a row's text is that of its prompt alone. decoder: of as
    many rows as prompts; its layers are compiled for one alone, since rows leave.
    Raises ValueError for no prompt, one without tokens or one that holds the mask token.
    """
    check(cfg)
    device, prompts = prompts[0].device if prompts else None, [ids.cpu() for ids in prompts]
    if not prompts or any(ids.ndim != 1 or len(ids) == 0 or (ids == cfg.mask_id).any() for ids in prompts):
        raise ValueError("a prompt is at least one token, none of them the mask")
    B, D, S, lengths = len(prompts), cfg.block_size, cfg.sub_block_size, [len(ids) for ids in prompts]
    whole = min(lengths) // D * D  # tokens of every prompt in whole blocks
    end = (max(lengths) // D + cfg.max_new_tokens // D) * D
    decoder = (decoder or Decoder(model, end, batch=B, compiled=cfg.compile and B == 1)).reset()
    seq_ids = pad_sequence(prompts, batch_first=True, padding_value=cfg.mask_id)
    seq_ids = F.pad(seq_ids, (0, max(end + 1 - max(lengths), 0)), value=cfg.mask_id)  # the last commit names one more
    is_new, rows = seq_ids == cfg.mask_id, torch.arange(B)  # rows: which prompts are still in the batch
    fixed_round, calls = torch.zeros_like(seq_ids), []

    def goes_on():  # (n,) rows without an EOS behind the prompt that has no mask before it
        ids = seq_ids[rows]
        ended = (ids == cfg.eos_id) & is_new[rows] & ((ids == cfg.mask_id).cumsum(dim=1) == 0)
        return ~ended.any(dim=1)

    borders = sorted({0, *range(whole, end + 1, D)})
    for start, stop in zip(borders, borders[1:]):  # the first is the prefill, if any: whole blocks without masks
        keep, in_scratch = goes_on(), False
        if not keep.any():
            break
        if not keep.all():
            rows = rows[keep]
            decoder.keep_rows(keep.nonzero()[:, 0])
        while (is_masked := seq_ids[rows, start:stop] == cfg.mask_id).any() and (B > 1 or goes_on()):
            # propose: the whole block, masks included; the first sub-block with masks in any row is the one to fill
            s = is_masked.any(dim=0).nonzero()[0, 0].item() // S * S
            is_masked = is_masked[:, s : s + S]
            is_sub = in_scratch and not is_masked[:, 0].any()
            # score
            pred_ids, conf = window(decoder, seq_ids[rows, start:stop], s, is_sub, cfg, generator)
            calls.append("sub" if is_sub else "block")
            in_scratch = cfg.block_cache
            # select
            chosen = select(conf, is_masked, cfg.tau)
            row, offset = chosen.nonzero(as_tuple=True)
            where = rows[row], start + s + offset
            seq_ids[where], fixed_round[where] = pred_ids[chosen], decoder.forwards - 1
        if not goes_on().any():
            break
        # commit
        is_named = is_new[rows, stop]  # the others go on with their prompt
        counts = stop > whole or is_named.any().item()  # a pure prefill does not
        next_ids = commit(decoder, seq_ids[rows, start:stop], cfg, counts)
        calls.append("commit" if stop > whole else "prefill")
        where = rows[is_named], stop
        seq_ids[where], fixed_round[where] = next_ids[is_named], decoder.forwards - 1
    record = dict(forwards=decoder.forwards, rounds=decoder.forwards, fixed_round=[], calls=calls)
    texts = []
    for P, ids, fixed in zip(lengths, seq_ids, fixed_round):
        ends = (ids[P:] == cfg.eos_id).nonzero()[:1, 0].tolist()
        length = P + ends[0] + 1 if ends else (ids != cfg.mask_id).sum().item()
        texts.append(ids[:length].to(device))
        record["fixed_round"].append(fixed[P:length].tolist())
    return texts, record


def generate(model, prompt_ids, cfg, decoder=None, generator=None):
    """`generate_batch` for one prompt (1, P). Returns (seq_ids (1, P+R), record) with its own fixed_round (R,).

    Raises ValueError for a batch, an empty prompt or one that holds the mask token.
    """
    if prompt_ids.ndim != 2 or prompt_ids.shape[0] != 1:
        raise ValueError(f"generate decodes one prompt, not {tuple(prompt_ids.shape)}: see generate_batch")
    (ids,), record = generate_batch(model, list(prompt_ids), cfg, decoder, generator)
    return ids[None], record | {"fixed_round": record["fixed_round"][0]}


# -------------------------------------------------------------------------------------- what the frame asks of a script


OWN_FLAGS = {}  # flags of this script alone: name -> (arguments of add_argument, function(cfg, value))


def check(cfg):
    """Raise ValueError, one line, for settings that cannot work."""
    if not 0 <= cfg.tau <= 1:
        raise ValueError(f"tau must lie in [0, 1], not {cfg.tau}")
    if cfg.block_size < 1 or cfg.sub_block_size < 1 or cfg.block_size % cfg.sub_block_size:
        raise ValueError(f"sub_block_size {cfg.sub_block_size} must divide block_size {cfg.block_size}")
    if cfg.confidence not in ("nucleus", "softmax"):
        raise ValueError(f"confidence is nucleus or softmax, not {cfg.confidence!r}")


def load_backbone(name, dtype):
    """A Hugging Face causal LM. The released layout is Qwen2 under another name and is read as such, no remote code."""
    held = Qwen2Config.get_config_dict(name)[0]
    config = {}
    if held.get("model_type") == "Fast_dLLM_Qwen":
        foreign = ("model_type", "architectures", "auto_map", "torch_dtype", "dtype", "transformers_version")
        held = {key: value for key, value in held.items() if key not in foreign}
        config["config"] = Qwen2Config(**held | {"pad_token_id": None})  # theirs is EOS, which would get no gradient
    return common.from_pretrained(AutoModelForCausalLM, name, dtype=dtype, **config)


def load_tokenizer(name):
    return AutoTokenizer.from_pretrained(name, trust_remote_code=False)


def enter_stage(model, stage, folder, cfg):
    """The model at the start of a stage of training, or as saved in folder: Fast-dLLM v2 adds no parameter."""
    trained = getattr(model.config, "bd_size", None) or cfg.block_size
    if trained != cfg.block_size == Config.block_size:
        cfg.block_size = trained
        notice(f"block_size {trained}, as the model was trained")
        check(cfg)
    return model


def save_method(model, folder, cfg):
    """Everything that decoding needs; the frame adds tokenizer and settings."""
    model.config.bd_size = cfg.block_size
    model.save_pretrained(folder, max_shard_size="1000GB")


def plain_lm(model):
    """What plain AR decoding runs on where there is no AR baseline."""
    return model


def spare_mask_id(backbone, tokenizer):
    """A mask token for a backbone that has none and is not to be trained: Fast-dLLM v2 must have learnt it."""
    return None


def new_decoder(model, prompt_len, cfg):
    """A Decoder with room for a prompt of up to prompt_len tokens and what generate writes."""
    return Decoder(model, prompt_len + cfg.max_new_tokens + cfg.block_size, compiled=cfg.compile)


def stages(cfg):
    """The stages of training, in order: a plain AR model of the data first, if asked for, then the method."""
    if cfg.max_len % cfg.block_size:
        raise ValueError(f"max_len {cfg.max_len}, the window, is not a multiple of block_size {cfg.block_size}")

    def keep_packable(rows, cfg):
        pack(rows, cfg)  # rows that the method refuses are refused before the AR stage trains on them
        return keep_short(rows, cfg)

    return [
        Stage("ar", cfg.ar_steps, cfg.ar_lr, keep_packable, None, make_ar_inputs, ar_loss),
        Stage(METHOD, cfg.steps, cfg.lr, pack, draw_noise, make_training_inputs, training_loss),
    ]


def decoders(cfg):
    """(label, generate) of each decoding that `--generate` puts beside plain AR: one, or one per threshold."""

    def at(tau):
        def run(model, prompt_ids, cfg, decoder=None, generator=None):
            P, D = prompt_ids.shape[1], cfg.block_size
            budget = -(-(P % D + cfg.max_new_tokens) // D) * D  # in whole blocks, not less than the wanted tokens
            cfg = dataclasses.replace(cfg, tau=tau, max_new_tokens=budget)
            return generate(model, prompt_ids, cfg, decoder, generator)

        return run

    taus = (0.5, 0.6, 0.7, 0.8, 0.9, 1.0) if cfg.sweep else (cfg.tau,)
    return [(f"{METHOD}, tau {tau:.2f}" if cfg.sweep else METHOD, at(tau)) for tau in taus]


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
