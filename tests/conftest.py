"""Puts the root on sys.path, finds the reference vectors, registers the gpu marker.

GOLDEN_DIR=FOLDER runs the same tests over other vectors of the same layout.
"""

import concurrent.futures
import json
import os
import sys
import tempfile
from pathlib import Path

os.environ.setdefault("HF_HUB_OFFLINE", "1")  # no network in tests; read by the import below

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoConfig, AutoModelForCausalLM

ROOT = Path(__file__).resolve().parent.parent
TINY = ROOT / "tests" / "tiny"
sys.path.insert(0, str(ROOT))
GOLDEN = Path(os.environ.get("GOLDEN_DIR", ROOT / "tests" / "golden"))
torch.set_num_threads(int(os.environ.get("TEST_THREADS", 1)))  # small tensors; the other core is for POOL
POOL = concurrent.futures.ThreadPoolExecutor(1)
TMP = tempfile.TemporaryDirectory()


def pytest_configure(config):
    config.addinivalue_line("markers", "gpu: needs a CUDA device")


def pytest_collection_modifyitems(items):
    if not torch.cuda.is_available():
        skip = pytest.mark.skip(reason="needs a CUDA device")
        for item in items:
            if "gpu" in item.keywords:
                item.add_marker(skip)


def pytest_collection_finish(session):
    """What a module runs in processes of its own (`start`) begins now, beside the tests of the other modules."""
    if not session.config.option.collectonly:
        for module in dict.fromkeys(item.module for item in session.items):
            if hasattr(module, "start"):
                module.STARTED = module.start()


@pytest.fixture
def started(request):
    return request.module.STARTED


def few_rows(script):
    """Flags: the script's own data cut to 64 rows, since a few steps need no more; its own test file."""
    whole = Path(script.Config.data)
    few = Path(TMP.name, whole.name)
    if not few.exists():
        few.write_text("".join(whole.read_text("utf-8").splitlines(True)[:64]), "utf-8")
    return ["--data", str(few), "--test", script.TINY["test"]]


def golden(method):
    """(cases of cases.json, tensors of cases.safetensors, folder) of a method."""
    folder = GOLDEN / method
    return json.loads((folder / "cases.json").read_text()), load_file(folder / "cases.safetensors"), folder


def named(cases):
    names = [case.get("name") or case.get("tensor") or "greedy" for case in cases]
    return pytest.mark.parametrize("case", cases, ids=names)


def load_backbone(folder):
    from common import from_pretrained

    return from_pretrained(folder, torch.float32).eval()


def random_lm(kind, seed=0, **changes):
    """A tiny random model of this type; initial weights wide enough that greedy text is not constant."""
    sizes = dict(vocab_size=40, hidden_size=32, intermediate_size=48, num_hidden_layers=2,
                 num_attention_heads=4, num_key_value_heads=2, initializer_range=0.3, pad_token_id=None,
                 bos_token_id=None, eos_token_id=None)  # fmt: skip
    extra = {"head_dim": 16} if kind == "qwen3" else {}
    torch.manual_seed(seed)
    return AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **(sizes | extra | changes))).eval()


def write_tokenizer(folder, text, special, dream=False):
    """The files of a Qwen2 tokenizer; `special` come after the text. dream: remote code named. {token: id}"""
    folder.mkdir(parents=True, exist_ok=True)
    ids = {word: i for i, word in enumerate(text + special)}
    (folder / "vocab.json").write_text(json.dumps({word: ids[word] for word in text}))
    (folder / "merges.txt").write_text("#version: 0.2\n" + "t h\nth e\n" * ("the" in text))
    flags = dict.fromkeys(("lstrip", "rstrip", "normalized", "single_word"), False)
    added = {str(ids[word]): dict(content=word, special="think" not in word, **flags) for word in special}
    config = dict(added_tokens_decoder=added, eos_token="<|endoftext|>", pad_token="<|endoftext|>",
                  unk_token=None, bos_token=None, tokenizer_class="Qwen2Tokenizer")  # fmt: skip
    if dream:
        config |= dict(tokenizer_class="DreamTokenizer", mask_token="<|mask|>")
        config["auto_map"] = {"AutoTokenizer": ["tokenization_dream.DreamTokenizer", None]}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return ids


def spy(monkeypatch, owner, name):
    """The calls of a function from now on: a list of (arguments, result)."""
    calls, original = [], getattr(owner, name)

    def wrapped(*args, **kwargs):
        calls.append((args, original(*args, **kwargs)))
        return calls[-1][1]

    monkeypatch.setattr(owner, name, wrapped)
    return calls


def watched(monkeypatch, note):
    """note(decoder, input_ids, position_ids, attn_mask, write_idx) of all calls of Decoders from now on."""
    from common import Decoder

    notes, call = [], Decoder.__call__
    monkeypatch.setattr(Decoder, "__call__", lambda *args: notes.append(note(*args)) or call(*args))
    return notes


def last_line(capsys):
    """The report of a script: the last line of stdout, read as JSON."""
    return json.loads(capsys.readouterr().out.splitlines()[-1])
