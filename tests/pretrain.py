"""Pretraining of the backbones that the scripts start from: plain AR, and masked diffusion from an AR model.

    python tests/pretrain.py --train --objective ar --model MODEL --data ROWS.jsonl --out FOLDER
    python tests/pretrain.py --train --objective diffusion --model FOLDER --data ROWS.jsonl --out OTHER
    python tests/pretrain.py --make_tiny        makes all of tests/tiny again; 37 minutes on one busy core

Any Hugging Face causal LM that common.py can walk. `ar` learns the next token of the answers. `diffusion`
gives the same weights full attention and learns masked tokens of the answers, EOS padding among them, from
the row before each (`shifted_logits` in config.json): what D2F takes as its teacher and CoDiLA as its
diffusion LM. All of it runs on the frame of refusion.py (rows, loop, saves, --resume, several processes).
"""

import dataclasses
import importlib.util
import json
import random
import re
import shutil
import sys
import tempfile
from pathlib import Path
from typing import Literal

import torch
import torch.nn.functional as F
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from common import build_mask, causal, padded_len, token_nll, walk  # noqa: E402

# a copy of the script of its own: the names that its frame calls are replaced below
spec = importlib.util.spec_from_file_location("frame", ROOT / "refusion.py")
frame = importlib.util.module_from_spec(spec)
sys.modules["frame"] = frame
spec.loader.exec_module(frame)


@dataclasses.dataclass
class Config(frame.Config):
    objective: Literal["ar", "diffusion"] = "ar"
    model: str = ""  # Hub id or folder of the backbone
    out: str = "runs/pretrain"  # folder of the saves
    batch_size: int = 64  # rows a step, over all processes
    accumulation: int = 1  # forwards a step and process, 0: one row each; changes memory, not results
    steps: int = 1000
    lr: float = 2e-5  # cosine to lr_floor
    warmup: float = 0.05  # share of the steps
    beta2: float = 0.98  # AdamW
    pad: int = 8  # diffusion: at most so many EOS after the longest row of a batch, learnt like all else
    anneal: float = 0.0  # diffusion: share of the steps in which attention grows from causal to full


def draw_noise(batch, cfg, generator):
    """The length of the batch, and how many keys after itself a query sees (`ahead`): 0 (ar), in the end all.

    Diffusion: one mask ratio a row, spread over the batch, and a uniform number a token. Attention that grows
    step by step keeps what the AR model knows (attention mask annealing, DiffuLLaMA, arXiv 2410.17891).
    """
    longest = max(len(row["prompt_ids"]) + len(row["answer_ids"]) for row in batch)
    if cfg.objective == "ar":
        return dict(length=longest, ahead=0)
    length = longest + torch.randint(cfg.pad + 1, (1,), generator=generator).item()
    step = generator.initial_seed() - cfg.seed * 1_000_003  # as the frame seeds it
    full_from = cfg.anneal * cfg.steps
    L = padded_len(length, cfg.device)
    ahead = L if step >= full_from else int(L * step / full_from)
    t = (torch.rand(1, generator=generator) + torch.arange(len(batch)) / len(batch)) % 1
    u = torch.rand(len(batch), length, generator=generator)
    return dict(length=length, ahead=ahead, t=(1 - 1e-3) * t + 1e-3, u=u)


def make_training_inputs(batch, draws, cfg):
    """prompt | answer | EOS ...: input_ids, labels (B, L) int64 at the row before their token, weights float32.

    ahead (B,) int64, one number for all rows: a query sees so many keys after itself. The loss is
    sum(weights * nll): the mean over all answer tokens (ar) or all masked tokens (diffusion) of the batch.
    """
    L = padded_len(draws["length"], cfg.device)
    input_ids = torch.full((len(batch), L), cfg.eos_id)
    is_target = torch.zeros(len(batch), L, dtype=torch.bool)
    for r, row in enumerate(batch):
        ids = row["prompt_ids"] + row["answer_ids"]
        input_ids[r, : len(ids)] = torch.tensor(ids)
        end = len(ids) if cfg.objective == "ar" else draws["length"]
        is_target[r, len(row["prompt_ids"]) : end] = True
    if cfg.objective == "diffusion":
        is_target &= F.pad(draws["u"] < draws["t"][:, None], (0, L - draws["length"]))
    labels = F.pad(input_ids.masked_fill(~is_target, -100)[:, 1:], (0, 1), value=-100)
    if cfg.objective == "diffusion":
        input_ids = input_ids.masked_fill(is_target, cfg.mask_id)
    weights = (labels != -100) / is_target.sum().clamp(min=1)
    ahead = torch.full((len(batch),), draws["ahead"])
    return dict(input_ids=input_ids, labels=labels, weights=weights, ahead=ahead)


def training_loss(model, inputs, cfg):
    """Mean loss of the batch. Returns (loss, logs)."""
    B, L = inputs["input_ids"].shape
    device = inputs["input_ids"].device
    attn_mask = build_mask(causal(inputs["ahead"][0]), 1, L, L, device)
    positions = torch.arange(L, device=device).expand(B, L)
    hidden = walk(model, inputs["input_ids"], positions, attn_mask, checkpointing=cfg.checkpointing)
    return (inputs["weights"] * token_nll(model.lm_head, hidden, inputs["labels"])).sum(), {}


# what the frame calls by name
vars(frame).update(METHOD="pretrain", Config=Config, TINY={}, LIMITS={}, draw_noise=draw_noise,
                   make_training_inputs=make_training_inputs, training_loss=training_loss)  # fmt: skip


def train(cfg, folder):
    """All weights; what comes out is a base for any script: nothing in its config.json is of this one."""
    model, tokenizer = frame.load(folder or cfg.model, cfg, torch.float32, training=True)
    if cfg.objective == "diffusion":
        model.config.shifted_logits = True
    frame.fit(model, model, tokenizer, frame.encode_rows(tokenizer, cfg), cfg, folder)
    if frame.RANK == 0:
        file = Path(cfg.out, "config.json")
        config = json.loads(file.read_text())
        config.pop("trained_with")
        file.write_text(json.dumps(config, indent=2, sort_keys=True) + "\n")


# ------------------------------------------------------------------------------------------------ tests/tiny

PATTERN = " ?[A-Za-z]+| ?[0-9]|[^A-Za-z0-9]"  # one token a word, digit or sign, words with the space before them
THEMES = "red blue green gold".split()
# identifiers of three tokens; the first token is shared by two of them, the last by three
NAMES = ["abcdef"[i // 2] + "αβγδεζηθικλμ"[i] + "1234"[i % 4] for i in range(12)]


def problem(rng):
    """Arithmetic. The second sum needs the first, and every sentence says the noun: what is learnt last is to copy."""
    name = rng.choice("Tom Ann Ben Eva Sam Zoe Max Ida".split())
    thing = rng.choice("pens cups hats keys cars toys".split())
    first, second = rng.sample("red blue green black white".split(), 2)
    a, b, c = rng.choices(range(1, 10), k=3)
    prompt = f"{name} has {a} {first} and {b} {second} {thing} and gets {c} more. How many {thing}?"
    answer = f" {a}+{b}={a + b} {thing}. {a + b}+{c}={a + b + c} {thing}. {name} has {a + b + c} {thing}."
    return dict(prompt=prompt, response=answer)


def program(rng):
    """2 or 3 lines like aα1=bδ4+aα1; drawn at random; pattern: what a well-formed one matches.

    The number in the prompt only makes it unique: programs of one theme and length differ at random.
    """
    theme = rng.choice(THEMES)
    count = rng.randint(2, 3)
    names = [NAMES[(3 * THEMES.index(theme) + 5 * j) % 12] for j in range(6)]  # of this theme, likeliest first
    lines = []
    for _ in range(count):
        a, b, c = rng.choices(names, (0.55, 0.22, 0.11, 0.06, 0.04, 0.02), k=3)
        lines.append(f"{a}={b}{rng.choice('+*')}{c};")
    name = f"({'|'.join(names)})"
    return dict(prompt=f"{count} {theme} lines {rng.randrange(10000):04d}:", response="".join(lines),
                pattern=f"({name}={name}[+*]{name};){{{count}}}")  # fmt: skip


def write_rows(folder, task, make, seed):
    """TASKtrain.jsonl (4000 rows) and TASKtest.jsonl (200), every prompt once."""
    rng = random.Random(seed)
    rows = {}
    while len(rows) < 4200:
        row = make(rng)
        rows.setdefault(row["prompt"], row)
    lines = [json.dumps(row, ensure_ascii=False, separators=(",", ":")) + "\n" for row in rows.values()]
    (folder / f"{task}test.jsonl").write_text("".join(lines[:200]), "utf-8")
    (folder / f"{task}train.jsonl").write_text("".join(lines[200:]), "utf-8")


def new_backbone(folder, data, seed, tags=(), **shape):
    """A folder with a Qwen3 of random weights and a tokenizer of the words in the data."""
    rows = [json.loads(line) for line in data.read_text("utf-8").splitlines()]
    texts = [row[name] for row in rows for name in ("prompt", "response")]
    words = sorted({word for text in texts for word in re.findall(PATTERN, text)})
    vocab = {word: i for i, word in enumerate(["<eos>", "<mask>", "<unk>", *words])}
    spec = {
        "version": "1.0",
        "added_tokens": [],
        "pre_tokenizer": {"type": "Split", "pattern": {"Regex": PATTERN}, "behavior": "Isolated", "invert": False},
        "decoder": {"type": "Fuse"},
        "model": {"type": "WordLevel", "vocab": vocab, "unk_token": "<unk>"},
    }
    folder.mkdir(parents=True)
    (folder / "tokenizer.json").write_text(json.dumps(spec))
    special = {"eos_token": "<eos>", "mask_token": "<mask>", "unk_token": "<unk>"}
    tokenizer = PreTrainedTokenizerFast(tokenizer_file=str(folder / "tokenizer.json"), **special)
    tokenizer.add_tokens(list(tags), special_tokens=True)
    tokenizer.save_pretrained(folder)
    torch.manual_seed(seed)
    config = Qwen3Config(vocab_size=len(vocab) + len(tags), max_position_embeddings=4096, tie_word_embeddings=True,
                         eos_token_id=0, mask_token_id=1, bos_token_id=None, pad_token_id=None, **shape)  # fmt: skip
    Qwen3ForCausalLM(config).save_pretrained(folder)


def finish(source, target):
    """The folder that is kept: bfloat16, no optimiser; the tokenizer made from its file alone."""
    AutoModelForCausalLM.from_pretrained(source, dtype=torch.bfloat16).save_pretrained(target)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copyfile(source / name, target / name)
    (target / "model.safetensors").chmod(0o644)


def make_tiny(target):
    """The rows and the four folders; each is trained in float32 and rounded to bfloat16 at the end."""
    big = dict(hidden_size=128, intermediate_size=384, num_hidden_layers=4, num_attention_heads=4,
               num_key_value_heads=2, head_dim=32)  # fmt: skip
    middle = big | dict(hidden_size=96, intermediate_size=288, num_hidden_layers=3)
    small = big | dict(hidden_size=64, intermediate_size=192, num_hidden_layers=2, head_dim=16)
    target.mkdir(parents=True, exist_ok=True)
    write_rows(target, "", problem, seed=0)
    write_rows(target, "code-", program, seed=1)
    with tempfile.TemporaryDirectory() as folder:
        tmp = Path(folder)
        new_backbone(tmp / "new", target / "train.jsonl", seed=0, **big)
        new_backbone(tmp / "code-new", target / "code-train.jsonl", seed=1, **middle)
        new_backbone(tmp / "code-small", target / "code-train.jsonl", seed=2, tags=("<think>", "</think>"), **small)
        for source, name, task, objective, steps, lr, pad in (
            ("new", "ar", "", "ar", 1000, 2e-3, 0),
            ("ar", "dlm", "", "diffusion", 1300, 1.5e-3, 8),
            ("code-new", "code-base", "code-", "ar", 400, 2e-3, 0),
            ("code-base", "code-dlm", "code-", "diffusion", 1500, 1.5e-3, 11),
            ("code-small", "code-ar", "code-", "ar", 1500, 3e-3, 0),
        ):
            flags = dict(objective=objective, model=tmp / source, out=tmp / name, steps=steps, lr=lr, pad=pad,
                         data=target / f"{task}train.jsonl", max_len=96, device="cpu", dtype="float32")  # fmt: skip
            words = [word for key, value in flags.items() for word in (f"--{key}", str(value))]
            if main(["--train", *words]):
                return 2
            if name != "code-base":
                finish(tmp / name, target / name)
    return 0


def main(argv=None):
    """Exit status 0, or 2 with one line on stderr."""
    words = sys.argv[1:] if argv is None else argv
    if words[:1] == ["--make_tiny"]:  # a folder may follow
        return make_tiny(Path(*words[1:] or [ROOT / "tests" / "tiny"]))
    try:
        args, cfg = frame.parse(argv)
        train(cfg, args.resume)
    except (ValueError, OSError, RuntimeError, MemoryError) as error:
        return frame.failed(error)
    return 0


if __name__ == "__main__":
    sys.exit(main())
