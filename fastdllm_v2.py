"""Fast-dLLM v2: an AR model adapted to block diffusion, on a Hugging Face causal LM.

Paper         Fast-dLLM v2: Efficient Block-Diffusion LLM
              arXiv 2509.26328v1 (sections in brackets are of this version; it numbers no equation and has no
              algorithm box), https://arxiv.org/abs/2509.26328
Idea          The text is cut into blocks of D tokens: causal between blocks, bidirectional inside. The masked
              tokens of a block are predicted from the noisy block and the clean blocks before it. Decoding
              fills one block after another, several confident tokens a forward, and caches each for good.
Differs       from plain AR: 1. attention is full inside a block  2. a row of training holds noisy copies of
              the text before the clean one  3. several tokens a forward. The next-token head stays: token i
              is read from the logits at i-1
Implements    packing [§3.2] -> pack; complementary views, token shift, loss [§3.2, App. A.2, A.3] ->
              make_training_inputs, training_loss; decoding with its caches [§3.3] -> generate_batch, generate
Left out      likelihood scoring of benchmark answers; labels on earlier turns and on the newline after EOS
Not as in     the paper: answer tokens alone are masked and scored, not all D of a block [§3.2, App. A.3]; one
              t per block and the complement of that draw, not t and 1-t per sample [App. A.3] (both the
              code's choice); both views share one clean copy (ours, the same loss)
              the code: a sample of whole blocks gets no further block of masks; a prompt of exactly D tokens
              is prefilled; the mask token is never an output; the budget is rounded up, not down; rows of a
              batch are sampled one by one, end at an EOS that a commit writes, and take their first token
              from the commit wherever the prompt ends
Run           python fastdllm_v2.py --train --generate [--sweep]           (tests/tiny, CPU)
              python fastdllm_v2.py --generate --model Efficient-Large-Model/Fast_dLLM_v2_1.5B --prompt "..."
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
from common import Decoder, block_causal, build_mask, dense, from_pretrained, generate_ar, is_eos, kernels
from common import noisy_clean, read_config, token_nll, walk

METHOD = "fastdllm_v2"
HERE = Path(__file__).resolve().parent


@dataclasses.dataclass
class Config:
    # what all five scripts share
    model: str = f"{HERE}/tests/tiny/ar"  # Hub id or folder of the backbone
    data: str = f"{HERE}/tests/tiny/train.jsonl"  # JSONL to train on
    test: str = ""  # JSONL to decode
    problems: int = 64  # most rows of it to decode
    out: str = f"runs/{METHOD}"  # folder of the saves
    steps: int = 6000  # [App. A.1] 1.5B; 2500 for 7B
    batch_size: int = 256  # [App. A.1] windows a step, over all processes
    accumulation: int = 0  # forwards a step and process, 0: one row each; changes memory, not results
    lr: float = 2e-5  # [App. A.1] 1.5B; 1e-5 for 7B
    warmup: float = 0.083  # [App. A.1] share of the steps: 500 of 6000
    lr_floor: float = 1.0  # [code] share of lr at the end: constant
    beta2: float = 0.999  # [code] AdamW
    weight_decay: float = 0.0  # [code]
    clip: float = 1.0  # [code] largest norm of the gradient
    max_len: int = 2048  # [App. A.1] L, tokens of a window, a multiple of block_size; longer rows are dropped
    save_every: int = 500  # steps
    checkpointing: bool = False  # recompute layers in backward
    max_new_tokens: int = 128  # [ours]
    temperature: float = 0.0  # [App. A.4]
    seed: int = 0
    device: str = "cuda" if torch.cuda.is_available() else "cpu"
    dtype: Literal["bfloat16", "float32"] = "bfloat16" if torch.cuda.is_available() else "float32"
    baseline: str = ""  # plain AR model to compare with; without it the model that was trained on
    mask_id: int | None = None
    eos_id: int | list | None = None  # of a list each ends a text
    vocab_len: int | None = None  # rows of the head from here on are no tokens
    text_len: int | None = None  # most positions of the model
    # Fast-dLLM v2
    block_size: int = 32  # D [§4.1]; without the flag the bd_size of the model's config.json
    sub_block_size: int = 8  # S, in decoding [§3.3, Table 3]; divides D
    tau: float = 0.9  # [§4.2] for speed; 1, one token a forward, in the accuracy tables [App. A.4]
    block_cache: bool = False  # DualCache [§3.3], approximate: keys and values kept in a block; off [code]
    top_p: float = 0.95  # [code] of no effect at temperature 0
    pad_blocks: bool = True  # [§3.2, Table 2] masks fill a sample to whole blocks; off in their script
    complementary: bool = True  # [§3.2, Table 2] the second view, with the complement of the mask
    sweep: bool = False  # decode at the thresholds of Fig. 4, 0.5 to 1


# what the model of tests/tiny changes; a sample of 37 to 41 tokens fills a window of 6 blocks of 7
TINY = dict(test=f"{HERE}/tests/tiny/test.jsonl", steps=300, batch_size=16, accumulation=1, lr=1.2e-3,
            warmup=0.05, lr_floor=0.0, beta2=0.95, max_len=42, max_new_tokens=32, block_size=7,
            sub_block_size=7)  # fmt: skip
LIMITS = dict(block_size=(1, 4096), sub_block_size=(1, 4096), tau=(0, 1), top_p=(0, 1))
TEMPLATE = {}  # arguments of the chat template: Qwen2.5's default  [code]


# ---------------------------------------------------------------------------------------------- training step


def pack(samples, cfg):
    """Samples one after the other, each filled with masks to whole blocks, cut into windows of L.  [§3.2]

    samples: pairs of lists (token ids, labels: the token where it is scored, else -100). Returns a list of
    {"input_ids", "labels"}, L = max_len tokens each; the remainder is dropped. No block has tokens of two
    samples; earlier samples of a window stay visible [code]. Raises ValueError where blocks do not divide the
    window, or the samples do not fill one.
    """
    L = cfg.max_len
    if L % cfg.block_size:
        raise ValueError(f"max_len {L}, the window, is no multiple of block_size {cfg.block_size}")
    input_ids, labels = [], []
    for sample_ids, sample_labels in samples:
        pad = -len(sample_ids) % cfg.block_size if cfg.pad_blocks else 0
        input_ids += sample_ids + [cfg.mask_id] * pad
        labels += sample_labels + [-100] * pad
    starts = range(0, len(input_ids) - L + 1, L)
    if not starts:
        raise ValueError(f"{len(samples)} rows do not fill one window of max_len {L} tokens")
    return [{"input_ids": input_ids[i : i + L], "labels": labels[i : i + L]} for i in starts]


def draw_noise(batch, cfg, generator):
    """t (n,): a noise level for each of the n blocks; u (n, D): a uniform number for each token.  [code]"""
    n = sum(len(window["input_ids"]) for window in batch) // cfg.block_size
    return {"t": torch.rand(n, generator=generator), "u": torch.rand(n, cfg.block_size, generator=generator)}


def make_training_inputs(batch, draws, cfg):
    """Each window of pack as one row: a noisy copy for each view, then the clean window.  [§3.2, Fig. 2]

        input_ids     noisy view 1 | noisy view 2 | clean    (B, (V+1) L) int64, V views of L tokens
        position_ids  0 .. L-1     | 0 .. L-1     | 0 .. L-1
        masks         m            | 1 - m        | none     m: answer tokens with u < p(t of their block)

    The views are complementary: together they mask, and score, each answer token once. No block sees its own
    clean copy (noisy_clean), so the clean copy serves both views: 3 L tokens instead of two rows [noisy |
    clean] of 2 L [App. A.2], the same loss [ours]. Also returned, (B, V, L) each: labels int64, the token
    where the view masks it, at its own place, else -100; weights float32, 1 / N there, N answer tokens in the
    batch: the loss is sum(weights * nll).
    """
    clean = torch.tensor([window["input_ids"] for window in batch])
    labels = torch.tensor([window["labels"] for window in batch])
    is_answer = labels != -100
    p_mask = (1 - 1e-3) * draws["t"] + 1e-3  # (n,)  [code]
    m = (draws["u"] < p_mask[:, None]).view(clean.shape)
    views = [m & is_answer, ~m & is_answer] if cfg.complementary else [m & is_answer]  # [Table 2]
    is_masked = torch.stack(views, dim=1)  # (B, V, L)
    noisy = torch.where(is_masked, cfg.mask_id, clean[:, None])
    return {
        "input_ids": torch.cat([noisy.flatten(1), clean], dim=1),
        "position_ids": torch.arange(clean.shape[1]).repeat(len(batch), len(views) + 1),
        "labels": torch.where(is_masked, labels[:, None], -100),
        "weights": is_masked / is_answer.sum().clamp(min=1),  # no 1/t [App. A.3]; 1/N [code]
    }


def training_loss(model, inputs, cfg):
    """-1/N sum over masked i of both views of log P(x_i | clean blocks before, noisy block of i)  [App. A.3]

    Returns (loss, {"nll": (B, V, L-1) float32}): entry i-1 is that of token i, 0 where it is not masked.
    """
    labels = inputs["labels"]
    V, L = labels.shape[1:]
    T = (V + 1) * L
    mask = build_mask(noisy_clean(L, cfg.block_size, V), 1, T, T, labels.device)  # M_full  [App. A.2]
    hidden = walk(model, inputs["input_ids"], inputs["position_ids"], mask, checkpointing=cfg.checkpointing)
    noisy = hidden[:, : V * L].unflatten(1, (V, L))  # (B, V, L, width)
    # token shift [§3.2]: token i is read at i-1 of its view, across block borders: the first token of a block
    # from the noisy block before (in decoding from the clean one). A window's first token is not scored
    nll = token_nll(model.lm_head, noisy[:, :, :-1], labels[:, :, 1:])
    return (inputs["weights"][:, :, 1:] * nll).sum(), {"nll": nll.detach()}


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


def without_mask(logits, cfg):
    """Logits over the tokens, float32, the mask at -inf: it is never an output. (n, V) -> (n, vocab_len)"""
    logits = logits[:, : cfg.vocab_len].float()
    return logits.masked_fill(torch.arange(logits.shape[-1], device=logits.device) == cfg.mask_id, -torch.inf)


def propose(logits, cfg, generator):
    """A token for each masked position and its confidence. (n, V) -> (n,) int64, (n,) float32, on the CPU

    The confidence is the token's probability, the mask counted in; a sampled token's is that in the nucleus
    it was drawn from [code].
    """
    allowed = without_mask(logits, cfg)
    if cfg.temperature > 0:
        probs = nucleus((allowed / cfg.temperature).softmax(-1), cfg.top_p)
        pred_ids = draw_token(probs, torch.rand(len(probs), generator=generator, dtype=torch.float64))
    else:
        probs = logits[:, : cfg.vocab_len].float().softmax(-1)
        pred_ids = allowed.argmax(-1)
    conf = probs.gather(-1, pred_ids[:, None])[:, 0]
    return pred_ids.cpu(), conf.cpu()


def select(conf, is_masked, tau):
    """Which masked positions are written: all surer than tau [§3.3], and the surest of each row [code].

    conf (n,) of the n positions set in is_masked (B, S), row after row -> (n,) bool
    """
    conf = torch.full(is_masked.shape, -1.0).masked_scatter(is_masked, conf)
    return (conf > tau).scatter(-1, conf.argmax(-1, keepdim=True), True)[is_masked]


def has_ended(ids, is_new, cfg):
    """Rows with an EOS after the prompt and no mask before it. (n, L), (n, L) bool -> (n,) bool"""
    is_written = (ids == cfg.mask_id).cumsum(dim=1) == 0
    return (is_eos(ids, cfg.eos_id) & is_new & is_written).any(dim=1)


def forward(decoder, ids, cfg, offset=0):
    """Hidden states (B, n, width) of ids (B, n), which stand `offset` tokens after the committed blocks.

    ids: the current block, one of its sub-blocks (offset), or the whole blocks of a prompt. All see the
    committed blocks and their own block [App. A.2]. Keys and values go to scratch, to be overwritten by the
    next call; a sub-block sees what an earlier call left there of the rest of its block [DualCache, §3.3].
    """
    n = ids.shape[1]
    start = decoder.kv_cache.cache_len
    first = start + offset
    mask = dense(block_causal(cfg.block_size, offset=first), 1, n, start + max(offset + n, cfg.block_size))
    return decoder(ids, torch.arange(first, first + n)[None], mask, decoder.kv_cache.scratch_idx(n, offset))


@torch.no_grad()
def generate_batch(model, prompts, cfg, decoder=None, generator=None):
    """Block after block: fill its masks, sub-block by sub-block; commit it; write one token more.  [§3.3]

    prompts: list of (P,) int64 of any lengths, all in the same block at a time. Of cfg: max_new_tokens,
    block_size, sub_block_size, tau, block_cache, temperature, top_p, mask_id, eos_id, vocab_len. A text
    without EOS is filled to the end of its block: at least max_new_tokens. A prompt alone ends at its EOS; of
    several, finished rows leave after the block [code]. Without block_cache a row's text is that of its
    prompt alone. decoder: of as many rows as prompts; the state of the loop lies on the CPU.
    Returns (texts, record): of each prompt its tokens and the new ones up to the first EOS, (P+R,) int64;
    forwards, rounds, fixed_round, a list (R,) per prompt, calls: prefill, block, sub or commit.
    Raises ValueError for no prompt, one without tokens or with a mask, sub-blocks that do not divide a block.
    """
    B = len(prompts)
    D = cfg.block_size
    S = cfg.sub_block_size
    device = prompts[0].device if prompts else None
    prompts = [ids.cpu() for ids in prompts]
    if D % S or not prompts or any(len(ids) == 0 or (ids == cfg.mask_id).any() for ids in prompts):
        raise ValueError(f"prompts have a token and no mask, and sub_block_size {S} divides block_size {D}")
    lengths = [len(ids) for ids in prompts]
    end = max(lengths) + cfg.max_new_tokens
    whole = min(lengths) // D * D  # the prefill: blocks that are prompt in every row
    borders = sorted({0, *range(whole, end - 1 + D, D)})  # of prefill and blocks; a commit may write end - 1
    decoder = (decoder or Decoder(model, borders[-1], B, compiled=None if B == 1 else False)).reset()
    seq_ids = torch.stack([F.pad(ids, (0, borders[-1] + 1 - len(ids)), value=cfg.mask_id) for ids in prompts])
    is_new = seq_ids == cfg.mask_id
    fixed_round = torch.zeros_like(seq_ids)
    rows = torch.arange(B)  # those still in the batch
    calls = []
    for start, stop in zip(borders, borders[1:]):  # the prefill, if any, without masks; then each block
        keep = (~has_ended(seq_ids[rows], is_new[rows], cfg)).nonzero()[:, 0]
        if len(keep) == 0:
            break
        if len(keep) < len(rows):
            rows = rows[keep]
            decoder.keep_rows(keep)
        has_block = False  # DualCache: whether scratch holds keys and values of all of this block
        while True:
            block_ids = seq_ids[rows, start:stop]
            is_masked = block_ids == cfg.mask_id
            if not is_masked.any() or (B == 1 and has_ended(seq_ids, is_new, cfg)):
                break
            # propose: for the first sub-block with masks in any row, s .. s+S-1. DualCache feeds it alone
            # once its first token is written: the row that predicts that one is not in such a forward [code]
            s = is_masked.any(dim=0).nonzero()[0, 0].item() // S * S
            is_masked = is_masked[:, s : s + S]
            is_sub = has_block and not is_masked[:, 0].any()
            fed = slice(s, s + S) if is_sub else slice(0, D)
            hidden = forward(decoder, block_ids[:, fed], cfg, fed.start)
            has_block = cfg.block_cache
            calls.append("sub" if is_sub else "block")
            # score: token i is read at i-1 [§3.2]; the first of a block is never masked, see commit
            row, offset = is_masked.nonzero(as_tuple=True)
            idx = (row * hidden.shape[1] + s + offset - 1 - fed.start).to(hidden.device, non_blocking=True)
            pred_ids, conf = propose(model.lm_head(hidden.flatten(0, 1)[idx]), cfg, generator)
            # select
            chosen = select(conf, is_masked, cfg.tau)
            where = rows[row[chosen]], start + s + offset[chosen]
            seq_ids[where] = pred_ids[chosen]
            fixed_round[where] = decoder.forwards - 1
        if stop >= end or has_ended(seq_ids[rows], is_new[rows], cfg).all():
            break
        # commit: the finished block once more, without masks, for its exact keys and values; its last row
        # gives the first token of the next block, greedily, whatever the confidence [code]
        hidden = forward(decoder, block_ids, cfg)
        decoder.kv_cache.commit(stop - start)
        calls.append("commit" if stop > whole else "prefill")
        row = is_new[rows, stop].nonzero()[:, 0]  # the others have more prompt
        decoder.forwards -= int(stop <= whole and len(row) == 0)  # a pure prefill
        seq_ids[rows[row], stop] = without_mask(model.lm_head(hidden[:, -1]), cfg).argmax(-1).cpu()[row]
        fixed_round[rows[row], stop] = decoder.forwards - 1
    is_last = is_eos(seq_ids, cfg.eos_id) & is_new
    kept = (seq_ids != cfg.mask_id) & (F.pad(is_last, (1, -1)).cumsum(dim=1) == 0)  # up to the first EOS
    texts = [ids[keep].to(device) for ids, keep in zip(seq_ids, kept)]
    fixed = [numbers[keep].tolist() for numbers, keep in zip(fixed_round, kept & is_new)]
    return texts, dict(forwards=decoder.forwards, rounds=decoder.forwards, fixed_round=fixed, calls=calls)


def generate(model, prompt_ids, cfg, decoder=None, generator=None):
    """`generate_batch` for one prompt (1, P). Returns (seq_ids (1, P+R), record with fixed_round (R,)).

    Raises ValueError as generate_batch does, and for more than one prompt.
    """
    if prompt_ids.ndim != 2 or len(prompt_ids) != 1:
        raise ValueError(f"generate decodes one prompt, not {tuple(prompt_ids.shape)}: see generate_batch")
    texts, record = generate_batch(model, list(prompt_ids), cfg, decoder, generator)
    return texts[0][None], record | {"fixed_round": record["fixed_round"][0]}


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


def settle_block_size(config, args, cfg):
    """D as the weights were trained with, unless a flag says it. Raises ValueError unless S divides it."""
    if "block_size" not in args:
        cfg.block_size = getattr(config, "bd_size", cfg.block_size)
    if cfg.block_size % cfg.sub_block_size:
        raise ValueError(f"sub_block_size {cfg.sub_block_size} must divide block_size {cfg.block_size}")


def train(args, cfg, folder):
    """Train all weights on windows of packed rows; folder: the save to go on from, or None."""
    model, tokenizer = load(folder or cfg.model, cfg, torch.float32, training=True)
    settle_block_size(model.config, args, cfg)
    model.config.bd_size = cfg.block_size  # as the released checkpoints say it
    samples = [(row["prompt_ids"] + row["answer_ids"], [-100] * len(row["prompt_ids"]) + row["answer_ids"])
               for row in encode_rows(tokenizer, cfg)]  # fmt: skip
    fit(model, model, tokenizer, pack(samples, cfg), cfg, folder)


def compare(args, cfg):
    """Decode the same prompts by plain AR and by Fast-dLLM v2, at one or six thresholds. Returns figures."""
    settle_block_size(read_config(newest(args.folder)), args, cfg)
    folder = newest(args.folder)
    plans = [("plain AR", generate_ar, cfg.baseline or cfg.model, cfg.tau)]
    for tau in (0.5, 0.6, 0.7, 0.8, 0.9, 1.0) if cfg.sweep else (cfg.tau,):
        plans.append((f"{METHOD}, tau {tau:.1f}" if cfg.sweep else METHOD, generate, folder, tau))
    rows = []
    for label, run, name, tau in plans:
        at_tau = dataclasses.replace(cfg, tau=tau)
        model, tokenizer = load(name, at_tau, getattr(torch, cfg.dtype))
        problems = read_problems(tokenizer, args, at_tau)
        longest = max(prompt_ids.shape[1] for prompt_ids, *_ in problems)
        decoder = Decoder(model.to(cfg.device), longest + cfg.max_new_tokens + cfg.block_size)
        rows.append(decode(label, run, decoder, model, tokenizer, problems, at_tau, args, *rows[:1]))
    return rows


def main(argv=None):
    """Returns the exit status: 0, or 2 with one line on stderr."""
    try:
        args, cfg = parse(argv)
        if args.train:
            train(args, cfg, args.resume)
        if args.generate and RANK == 0:
            report(compare(args, cfg), cfg)
    except (ValueError, OSError, RuntimeError, MemoryError, SafetensorError) as error:
        return failed(error)
    return 0


if __name__ == "__main__":
    sys.exit(main())
