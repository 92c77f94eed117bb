"""The small backbones of tests/tiny answer, and tests/pretrain.py makes their like.

TINY_ROWS=200 judges them on every row of their test files (10 minutes), else on a few.
"""

import json
import os
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from conftest import TINY
from transformers import AutoModelForCausalLM

import codila
import d2f
import pretrain
import refusion
from common import generate_ar

ROWS = int(os.environ.get("TINY_ROWS", 6))


def right(model, tokenizer, rows_of, run, cfg):
    """How many of the first ROWS rows are right, each decoded by run(model, prompt_ids)."""
    count = 0
    for messages, answer, pattern in refusion.read_data(TINY / f"{rows_of}.jsonl")[:ROWS]:
        prompt_ids = torch.tensor([refusion.encode(tokenizer, messages)["prompt_ids"]])
        seq_ids = run(model.eval(), prompt_ids)[0]
        text = tokenizer.decode(refusion.trim(seq_ids[0, prompt_ids.shape[1] :], cfg), skip_special_tokens=True)
        count += refusion.is_right(text, answer, pattern)
    return count


def load(name, cfg):
    return refusion.load(str(TINY / name), cfg, torch.float32)


def bar(least):
    return ROWS if ROWS < 200 else least


def test_ar_answers_every_problem():
    cfg = refusion.Config(max_new_tokens=32, device="cpu")
    assert right(*load("ar", cfg), "test", lambda model, ids: generate_ar(model, ids, cfg), cfg) == bar(200)


def test_dlm_answers_at_one_token_a_step():
    cfg = d2f.Config(**{**d2f.TINY, "device": "cpu"})
    assert right(*load("dlm", cfg), "test", lambda model, ids: d2f.generate_vanilla(model, ids, cfg), cfg) >= bar(198)


def test_code_dlm_writes_well_formed_programs_at_one_token_a_step():
    cfg = codila.Config(**{**codila.TINY, "device": "cpu", "dtype": "float32", "mode": "tokens", "tokens_per_step": 1})
    pair, tokenizer, _ = codila.load_pair(str(TINY / "code-ar"), cfg, torch.float32)
    generator = torch.Generator().manual_seed(0)
    found = right(pair, tokenizer, "code-test", lambda model, ids: codila.generate(model, ids, cfg, None, generator), cfg)
    assert found >= bar(198)


def test_code_ar_writes_well_formed_programs():
    cfg = refusion.Config(max_new_tokens=40, device="cpu")
    assert right(*load("code-ar", cfg), "code-test", lambda model, ids: generate_ar(model, ids, cfg), cfg) >= bar(190)


@pytest.mark.parametrize("name", ["ar", "dlm", "code-dlm", "code-ar"])
def test_a_folder_is_small_plain_and_of_bfloat16(name):
    model = AutoModelForCausalLM.from_pretrained(TINY / name)
    assert all(p.dtype == torch.bfloat16 for p in model.parameters())
    assert sum(file.stat().st_size for file in TINY.rglob("*") if file.is_file()) < 6e6


@pytest.mark.parametrize("objective, loss", [("ar", 0.05), ("diffusion", None)])
def test_pretraining_makes_a_base_for_any_script(objective, loss, tmp_path, capsys):
    """AR on rows that are known has a small loss; masked diffusion marks the folder; both are no script's own."""
    out = tmp_path / "run"
    flags = f"--objective {objective} --steps 3 --batch_size 4 --device cpu --dtype float32 --out {out}".split()
    assert pretrain.main(["--train", "--model", str(TINY / "ar"), "--data", str(TINY / "train.jsonl"), *flags]) == 0
    shown = float(capsys.readouterr().err.rpartition("loss ")[2].partition(",")[0])
    assert shown < loss if loss else shown > 1
    config = json.loads((out / "config.json").read_text())
    assert config.get("shifted_logits") is (True if objective == "diffusion" else None)
    assert "trained_with" not in config and Path(out, "tokenizer.json").exists()
    AutoModelForCausalLM.from_pretrained(out)


def test_attention_grows_from_causal_to_full(monkeypatch):
    """Half of 8 steps: nothing ahead at step 0, half of the row at step 2, all of it from step 4 on; ar: nothing."""
    batch = [dict(prompt_ids=[1, 2], answer_ids=[3, 4, 5, 6, 7, 0])] * 2
    model = SimpleNamespace(lm_head=None)
    masks = []
    monkeypatch.setattr(pretrain, "walk", lambda model, ids, positions, mask, checkpointing: masks.append(mask[0, 0]))
    monkeypatch.setattr(pretrain, "token_nll", lambda head, hidden, labels: torch.zeros(labels.shape))
    cases = [("diffusion", 0, 0), ("diffusion", 2, 4), ("diffusion", 4, 8), ("diffusion", 7, 8), ("ar", 7, 0)]
    for objective, step, ahead in cases:
        cfg = pretrain.Config(objective=objective, steps=8, anneal=0.5, seed=3, pad=0, device="cpu")
        cfg.mask_id, cfg.eos_id = 9, 0
        generator = torch.manual_seed(cfg.seed * 1_000_003 + step)  # as `fit` does
        inputs = pretrain.make_training_inputs(batch, pretrain.draw_noise(batch, cfg, generator), cfg)
        pretrain.training_loss(model, inputs, cfg)
        assert torch.equal(masks[-1], torch.ones(8, 8).tril(ahead).bool())
