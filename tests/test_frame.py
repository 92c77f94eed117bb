"""The frame that all scripts share word for word: data, saves, resume, bad input, the command line."""

import ast
import dataclasses
import fcntl
import importlib
import inspect
import json
import os
import pickle
import re
import resource
import shutil
import signal
import stat
import subprocess
import sys
import tempfile
import threading
import time
import types
import xml.etree.ElementTree as ElementTree
from pathlib import Path

import pytest
import torch
from bench_train import SCRIPTS, prepared_step, run_script
from conftest import POOL, ROOT, TINY, TMP, few_rows, last_line
from safetensors.torch import load_file, save_file
from tokenizers.processors import TemplateProcessing
from transformers import AutoModelForCausalLM, AutoTokenizer

import refusion
from refusion import encode, is_right, read_data

MARKS = re.compile(r"^# =+ (frame: .*|main)$", re.MULTILINE)
# what makes a run of a few steps: every script on its own tiny models
FEW = dict(steps=3, batch_size=4, problems=2, device="cpu", dtype="float32")
ON_CPU = ("--device", "cpu", "--dtype", "float32")


def short(**flags):
    return [text for name, value in {**FEW, **flags}.items() for text in (f"--{name}", str(value))]


@pytest.fixture(params=SCRIPTS)
def script(request):
    return importlib.import_module(request.param)


def run(script, *args):
    words = [str(arg) for arg in args]
    if "--train" in words and not {"--data", "--resume"} & {*words}:
        words += few_rows(script)
    try:
        return script.main(words)
    except SystemExit as error:  # argparse, and a run that was told to stop
        return error.code


def refused(script, capsys, *args, words=()):
    """Exit status 2 and exactly one line on stderr, which holds the words."""
    capsys.readouterr()
    status = run(script, *args)
    err = capsys.readouterr().err.splitlines()
    assert status == 2 and len(err) == 1, (status, err)
    assert err[0].startswith(f"{script.METHOD}.py: ")
    for word in words:
        assert str(word) in err[0], err[0]
    return err[0]


def jsonl(path, rows):
    path.write_text("".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows))
    return path


# -------------------------------------------------------------------------------------------------- the text


def source_of(name):
    return (ROOT / f"{name}.py").read_text()


def frame_of(name):
    source = source_of(name)
    start, end = (mark.start() for mark in MARKS.finditer(source))
    return source[start:end]


def test_the_frame_is_the_same_text_in_every_script():
    frames = {name: frame_of(name) for name in SCRIPTS}
    assert [name for name in SCRIPTS if frames[name] != frames["refusion"]] == []


def test_the_common_part_of_config_is_the_same(script):
    names = [field.name for field in dataclasses.fields(refusion.Config)]
    shared = names[: names.index("vocab_len") + 1]
    assert [field.name for field in dataclasses.fields(script.Config)][: len(shared)] == shared


def test_every_setting_has_its_comment_in_the_help(script, capsys):
    assert run(script, "--help") == 0
    text = "".join(capsys.readouterr().out.split())
    comments = dict(re.findall(r"^    (\w+):.*?  # (.+)$", inspect.getsource(script.Config), re.M))
    assert len(comments) >= 25 and all(
        "".join(comment.split()) in text for name, comment in comments.items() if f"--{name}" in text
    )


def test_nothing_unsafe_and_no_other_package(script):
    source = source_of(script.METHOD)
    assert not re.search(r"torch\.load\(|\bpickle\b|trust_remote_code\s*=\s*True|\beval\(|\bexec\(", source)
    modules = set(re.findall(r"^(?:from|import) (\w+)", source, re.MULTILINE)) - set(sys.stdlib_module_names)
    assert modules <= {"torch", "transformers", "safetensors", "tqdm", "numpy", "common"}


def test_functions_are_short(script):
    for node in ast.walk(ast.parse(source_of(script.METHOD))):
        if isinstance(node, ast.FunctionDef):
            assert node.end_lineno - node.lineno < 80, node.name


def test_helpers_of_the_same_name_are_the_same_text():
    """One form in all scripts that have them."""
    for name in ("nucleus", "draw_token", "without_mask", "sizes"):
        texts = [inspect.getsource(getattr(script, name)) for script in map(importlib.import_module, SCRIPTS)
                 if hasattr(script, name)]  # fmt: skip
        assert len(texts) >= 2 and len({*texts}) == 1, name


# --------------------------------------------------------------------------------------- training and resume


def weights(folder):
    return {file.name: load_file(file) for file in sorted(Path(folder).glob("*.safetensors"))}


def same(a, b):
    return a.keys() == b.keys() and all(
        a[f].keys() == b[f].keys() and all(torch.equal(a[f][k], b[f][k]) for k in a[f]) for f in a
    )


class Stopped(BaseException):
    """Stands for kill -9 at this very call: no code of ours handles it."""


def test_interrupted_and_resumed_equals_uninterrupted(script, tmp_path, monkeypatch):
    """Bit for bit: weights, optimiser, order of rows and noise."""
    whole, out = tmp_path / "whole", tmp_path / "stopped"
    assert run(script, "--train", *short(), "--out", whole, "--save_every", 1) == 0
    save = script.save

    def save_once(*args):
        save(*args)
        raise Stopped

    with monkeypatch.context() as patch:
        patch.setattr(script, "save", save_once)
        with pytest.raises(Stopped):
            run(script, "--train", *short(), "--out", out, "--save_every", 1)
    assert script.newest(out).name == "step-000000001"
    AutoModelForCausalLM.from_pretrained(script.newest(out))
    assert run(script, "--train", "--resume", "--out", out, "--device", "cpu", "--dtype", "float32") == 0
    assert same(weights(out), weights(whole))
    assert sorted(path.name for path in out.iterdir()) == sorted(path.name for path in whole.iterdir())


def test_another_seed_is_another_run(tmp_path):
    for seed in (1, 2):
        assert run(refusion, "--train", *short(), "--seed", seed, "--out", tmp_path / str(seed)) == 0
    assert not same(weights(tmp_path / "1"), weights(tmp_path / "2"))


@pytest.mark.parametrize("flags", [*SCRIPTS, "refusion --loss_norm paper", "orthrus --objective ce",
                                   "codila --weighting inverse_t"])  # fmt: skip
def test_micro_batches_and_recomputed_layers_give_the_gradients_of_the_batch(flags):
    name, *flags = flags.split()
    script, results = importlib.import_module(name), []
    model, inputs, cfg = prepared_step(script, ["--batch_size", 4, "--dtype", "float32", *few_rows(script), *flags])
    model.eval()  # no dropout
    for n in (1, 3):
        cfg.checkpointing = n > 1
        parts = [{key: tensor[i::n] for key, tensor in inputs.items()} for i in range(n)]
        losses = [script.training_loss(model, part, cfg)[0] for part in parts]
        sum(losses).backward()
        results.append([sum(losses).detach(), *(p.grad for p in model.parameters() if p.grad is not None)])
        model.zero_grad()
    assert len(results[0]) > 8
    for a, b in zip(*results, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-3, atol=1e-5)


def test_a_loss_that_is_not_finite_stops_and_leaves_the_last_save(tmp_path, capsys, monkeypatch):
    training_loss, calls, out = refusion.training_loss, [], tmp_path / "run"

    def poisoned(*args):
        calls.append(1)
        loss, logs = training_loss(*args)
        return loss * (float("nan") if len(calls) == 3 else 1.0), logs

    monkeypatch.setattr(refusion, "training_loss", poisoned)
    assert run(refusion, "--train", *short(), "--save_every", 1, "--out", out) == 2
    assert "step 2" in capsys.readouterr().err.splitlines()[-1]
    AutoModelForCausalLM.from_pretrained(out / "step-000000002")


@pytest.mark.parametrize("moment", (1, 4, 9))
def test_killed_during_a_save(tmp_path, monkeypatch, moment):
    """At whichever file operation the process dies, a whole save is found and training goes on from it."""
    out, count = tmp_path / "run", [0]
    assert run(refusion, "--train", *short(), "--save_every", 1, "--out", out) == 0

    def dying(function):
        def wrapped(*args, **kwargs):
            is_ours = threading.current_thread() is threading.main_thread()  # conftest.POOL has another
            count[0] += is_ours
            if is_ours and count[0] == moment:
                raise Stopped
            return function(*args, **kwargs)

        return wrapped

    with monkeypatch.context() as patch:
        calls = (os, "replace"), (os, "sync"), (Path, "rename"), (shutil, "rmtree"), (refusion, "save_file")
        for owner, name in calls:
            patch.setattr(owner, name, dying(getattr(owner, name)))
        with pytest.raises(Stopped):
            run(refusion, "--train", "--resume", "--steps", 5, "--save_every", 1, "--out", out)
    found = refusion.newest(out)
    AutoTokenizer.from_pretrained(found)
    AutoModelForCausalLM.from_pretrained(found)
    assert run(refusion, "--train", "--resume", "--generate", "--steps", 6, "--out", out) == 0
    AutoModelForCausalLM.from_pretrained(out)
    assert not list(out.glob("step-*")) and not (out / "unfinished").exists() and not (out / "ended").exists()


@pytest.mark.parametrize("name, status", [("SIGINT", 130), ("SIGTERM", 143), ("SIGHUP", 129)])
def test_what_asks_to_stop_finishes_the_step_and_saves(tmp_path, monkeypatch, capsys, name, status):
    calls, training_loss, number = [], refusion.training_loss, getattr(signal, name)

    def interrupted(*args):
        calls.append(1)
        if len(calls) == 2:
            os.kill(os.getpid(), number)
        return training_loss(*args)

    monkeypatch.setattr(refusion, "training_loss", interrupted)
    usual = signal.signal(number, signal.default_int_handler)  # ignored where the suite runs in the background
    try:
        assert run(refusion, "--train", *short(), "--out", tmp_path) == status and len(calls) == 2
        assert "saved after 2 steps" in capsys.readouterr().err.splitlines()[-1]
        assert signal.getsignal(number) is signal.default_int_handler
        signal.signal(number, signal.SIG_IGN)  # what nohup does with SIGHUP: training goes on
        calls.clear()
        assert run(refusion, "--train", "--resume", "--out", tmp_path, "--steps", 5) == 0 and len(calls) == 3
    finally:
        signal.signal(number, usual)


def start():
    """What test_kill_9 needs; see conftest."""
    return POOL.submit(killed, Path(tempfile.mkdtemp(dir=TMP.name), "run"))


def killed(out):
    """A training run that kill -9 has ended some time after its first save. Returns (out, status, stderr)."""
    flags = [*short(steps=100000, save_every=3), *few_rows(refusion), "--out", str(out)]
    command = [sys.executable, str(ROOT / "refusion.py"), "--train", *flags]
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=env)
    deadline = time.time() + 100
    while not list(out.glob("step-*")) and time.time() < deadline and process.poll() is None:
        time.sleep(0.05)
    process.kill()
    error = process.communicate(timeout=60)[1]
    return out, process.returncode, error


def test_kill_9_in_a_real_process(started):
    """The last save is whole, and training goes on from it."""
    out, status, error = started.result()
    assert status == -9 and list(out.glob("step-*")), error
    step = int(refusion.newest(out).name.removeprefix("step-"))
    assert run(refusion, "--train", "--resume", "--steps", step + 1, "--out", out) == 0
    assert json.loads((out / "config.json").read_text())["trained_with"]["steps"] == step + 1


def test_training_works_in_a_thread(tmp_path):
    found = []
    thread = threading.Thread(target=lambda: found.append(run(refusion, "--train", *short(), "--out", tmp_path)))
    thread.start()
    thread.join(100)
    assert found == [0]


def test_a_full_disk_is_one_line_and_leaves_the_last_save(tmp_path, capsys):
    """No file may be larger than 2 MB for a while: the weights have 3."""
    usual = resource.getrlimit(resource.RLIMIT_FSIZE), signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (2_000_000, usual[0][1]))
    try:
        assert run(refusion, "--train", *short(), "--out", tmp_path / "run") == 2
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, usual[0])
        signal.signal(signal.SIGXFSZ, usual[1])
    line = capsys.readouterr().err.splitlines()[-1]
    assert line.startswith("refusion.py: ") and "File too large" in line
    assert [path.name for path in (tmp_path / "run").iterdir()] == [".lock0"]


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A folder with a few steps of training, one per script, made when first asked for."""
    made = {}

    def folder(script):
        if script not in made:
            made[script] = tmp_path_factory.mktemp(script.__name__) / "run"
            assert run(script, "--train", *short(), "--out", made[script]) == 0
        return made[script]

    return folder


def test_a_trained_folder_is_plain_hugging_face(script, trained):
    out = trained(script)
    assert AutoTokenizer.from_pretrained(out).eos_token_id == 0
    model = AutoModelForCausalLM.from_pretrained(out, dtype=torch.float32)
    saved = load_file(out / "model.safetensors")
    assert all(torch.equal(saved[name], p.float()) for name, p in model.named_parameters() if name in saved)
    held = json.loads((out / "config.json").read_text())["trained_with"]
    assert held["method"] == script.METHOD and held["steps"] == 3
    modes = {stat.S_IMODE(path.stat().st_mode) for path in out.iterdir()}
    assert len(modes) == 1, "every file has the mode that the umask asks for"


def test_a_finished_run_is_not_trained_over(script, trained, capsys):
    out = trained(script)
    before = {path.name: path.read_bytes() for path in out.iterdir()}
    refused(script, capsys, "--train", *short(), "--out", out, words=["--resume"])
    assert before == {path.name: path.read_bytes() for path in out.iterdir()}


def test_two_runs_do_not_write_into_one_folder(tmp_path, capsys, monkeypatch):
    tmp_path.joinpath(".lock0").touch()
    with open(tmp_path / ".lock0") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        refused(refusion, capsys, "--train", *short(), "--out", tmp_path, words=["another run", tmp_path])
    monkeypatch.setattr(fcntl, "flock", lambda *_: os.lstat(tmp_path / "none"))  # a file system without locks
    assert run(refusion, "--train", *short(steps=1), "--out", tmp_path) == 0


def test_an_empty_folder_and_a_link_are_places_to_save_to(tmp_path):
    (tmp_path / "there").mkdir()
    (tmp_path / "there" / "notes.txt").write_text("mine")
    (tmp_path / "link").symlink_to(tmp_path / "there")
    assert run(refusion, "--train", *short(), "--out", tmp_path / "link") == 0
    assert (tmp_path / "link").is_symlink() and (tmp_path / "there" / "config.json").exists()
    assert (tmp_path / "there" / "notes.txt").read_text() == "mine"


# -------------------------------------------------------------------------------------------------- generate


def test_generate_prints_text_figures_and_json(script, trained, tmp_path, capsys):
    picture = tmp_path / "trace.svg"
    flags = (*ON_CPU, "--max_new_tokens", 16, "--trace", "--trace-svg", picture)
    texts = []
    for _ in range(2):
        assert run(script, "--generate", "--out", trained(script), *flags) == 0
        out = capsys.readouterr().out
        lines = out.splitlines()
        texts.append([line for line in lines if "tok_s" not in line])
    assert texts[0] == texts[1], "the seed decides"
    assert len(ElementTree.parse(picture).getroot()) >= 1
    report = json.loads(lines[-1])
    assert report["method"] == script.METHOD and report["rows"][0]["label"].startswith("plain AR")
    for row in report["rows"]:
        assert row["problems"] == 2 and row["forwards"] > 0 and 0 <= row["right"] <= 2
        assert row["tokens_per_forward"] == pytest.approx(row["new_tokens"] / row["forwards"], abs=1e-3)
        line = next(text for text in lines if text.startswith(f"{row['label']}: problems 2 | right {row['right']} |"))
        assert all(word in line for word in ("new_tokens", "forwards", "tokens_per_forward", "tok_s", "x_ar"))
    assert report["rows"][0]["tokens_per_forward"] == 1.0 and len(report["rows"]) >= 2
    assert "  round" in out and "\033" not in out, "piped: plain text"


OFFERED = dict(refusion=["--plan_ahead"], d2f=[], fastdllm_v2=["--block_cache"], orthrus=["--merged", 2],
               codila=["--table", 4])  # fmt: skip


def decodings(script, *flags):
    """(run, decoder, model, cfg) of all that the script decodes beside plain AR, of its tiny models."""
    found = []

    def decode(label, run, decoder, model, tokenizer, problems, cfg, *rest):
        found.append((run, decoder, model, cfg))
        return dict(label=label)

    flags = [*OFFERED[script.METHOD], "--max_new_tokens", 10, *ON_CPU, *flags]
    run_script(script, ["--generate", "--model", script.Config.model, *flags], decode=decode)
    return found[1:]


@pytest.mark.parametrize("temperature", [0, 3])
def test_a_text_depends_on_its_prompt_and_the_seed_alone(script, temperature):
    """Not on what its decoder wrote before; of cfg only what the docstring names is read; no batch."""
    prompts = [torch.tensor([ids]) for ids in ([5, 6, 7], [9], [8, 7, 6, 5, 4, 3, 2])]
    doc = getattr(script, "generate_batch", script.generate).__doc__
    names = re.findall(r"\w+", re.search(r"Of cfg: ([\w,\s]+)\.", doc)[1])
    for run, decoder, model, cfg in decodings(script, "--temperature", temperature):
        bare = types.SimpleNamespace(**{name: getattr(cfg, name) for name in names})

        def text(ids, cfg, *decoder, seed=1):
            seq_ids, record = run(model, ids, cfg, *decoder, generator=torch.Generator().manual_seed(seed))
            return seq_ids.tolist(), {key: x for key, x in record.items() if not torch.is_tensor(x)}

        fresh = [text(ids, bare) for ids in prompts]
        assert [text(ids, cfg, decoder) for ids in [*prompts[::-1], *prompts]] == fresh[::-1] + fresh
        assert ([text(ids, cfg, seed=2) for ids in prompts] == fresh) == (temperature == 0)
        bare.eos_id = fresh[0][0][0][9]
        ended = text(prompts[0], bare)
        bare.eos_id = [bare.eos_id, 10**6]
        assert text(prompts[0], bare) == ended, "of a list each ends a text"
        bare.eos_id = None
        endless = text(prompts[0], bare)
        bare.eos_id = 10**6
        assert endless == text(prompts[0], bare) and len(endless[0][0]) >= 3 + 10
        for bad in [prompts[0].repeat(2, 1)] + [prompts[0][:, :0]] * (script.METHOD != "codila"):
            with pytest.raises(ValueError):
                script.generate(model, bad, cfg)


@pytest.mark.parametrize("temperature", [0, 3])
def test_neither_the_mask_nor_a_row_without_a_token_is_written(script, temperature):
    """Also where the models say nothing else; but Orthrus's AR view may write the token that is its mask."""
    for run, _, model, cfg in decodings(script, "--temperature", temperature):
        heads = [module for name, module in model.named_modules() if name.endswith("lm_head")]
        cfg.eos_id, cfg.vocab_len = None, heads[0].out_features - 9
        loud = [*range(cfg.vocab_len, cfg.vocab_len + 9)] + [cfg.mask_id] * (script.METHOD != "orthrus")
        for head in heads:
            head.register_forward_hook(lambda head, args, out: out.index_fill(-1, torch.tensor(loud), 50.0))
        seq_ids, _ = run(model, torch.tensor([[5, 6, 7]]), cfg, None, torch.Generator().manual_seed(1))
        assert seq_ids.shape[1] >= 3 + 10 and not {*loud} & {*seq_ids[0, 3:].tolist()}


def test_drafts_are_drawn_from_the_tempered_softmax_and_at_0_not_drawn(script):
    logits, n = torch.tensor([[1.0, 0.0, -1.0, 2.0, 5.0]]), 40000  # the last is the mask's
    logits = logits[:, :4] if script.METHOD in ("orthrus", "codila") else logits  # cut before they propose
    names = {field.name for field in dataclasses.fields(script.Config)}
    plain = {name: value for name, value in dict(top_p=1.0, top_k=0).items() if name in names}
    cfg = script.Config(mask_id=4, temperature=0.7, **plain)
    draws = script.propose(logits.expand(n, -1), cfg, torch.Generator().manual_seed(0))[0]
    expected = (logits[0, :4] / 0.7).softmax(-1)
    assert draws.max() < 4 and (draws.bincount(minlength=4) / n - expected).abs().max() < 0.01
    cfg.temperature = 0
    assert script.propose(logits, cfg, None)[0].item() == 3


def test_prompts_at_the_borders_of_a_block(script, trained, capsys):
    """1, block-1, block, block+1 tokens; a budget of one token, and of one more than a block."""
    cfg = script.parse(["--generate", "--model", str(trained(script)), "--prompt", "a"])[1]
    names = ("decode_block_size", "slot_size", "block_size")
    block = next(getattr(cfg, name) for name in names if hasattr(cfg, name))
    tokenizer = AutoTokenizer.from_pretrained(trained(script))
    word = tokenizer.decode([tokenizer.vocab_size // 2])
    prompts = [part for n in (1, block - 1, block, block + 1) for part in ("--prompt", word * n)]
    assert block > 1
    for budget in (1, block + 1):
        command = ("--generate", "--model", trained(script), "--max_new_tokens", budget)
        assert run(script, *command, *prompts) == 0
        for row in last_line(capsys)["rows"]:
            assert row["right"] is None and 4 <= row["new_tokens"] <= 4 * budget, row["label"]


def test_generate_says_what_it_cannot_decode(script, trained, tmp_path, capsys):
    refused(script, capsys, "--generate", "--out", tmp_path / "nothing", words=["nothing is trained in"])
    other = next(name for name in ("refusion", "orthrus") if name != script.METHOD)
    folder = trained(importlib.import_module(other))
    refused(script, capsys, "--generate", "--model", folder, words=[f"trained by {other}.py"])
    train = ("--train", "--model", folder, *short(), "--out", tmp_path / "out")
    refused(script, capsys, *train, words=[f"trained by {other}.py"])


def test_data_that_is_named_is_what_is_decoded(trained, tmp_path, capsys):
    rows = [{"prompt": f"Tom has {i}", "response": " pens."} for i in range(5)]
    data = jsonl(tmp_path / "data.jsonl", rows)
    assert run(refusion, "--generate", "--out", trained(refusion), "--data", data, "--problems", 10) == 0
    assert all(row["problems"] == 5 for row in last_line(capsys)["rows"])
    flags = (*short(), "--data", data, "--out", tmp_path / "x")
    refused(refusion, capsys, "--train", "--generate", *flags, words=["--test"])


def test_trim_ends_at_the_first_eos_or_the_budget():
    cfg = types.SimpleNamespace(max_new_tokens=4, eos_id=0)
    for ids, expected in (([3, 0, 5, 0], [3, 0]), ([0], [0]), ([1, 2, 3, 4, 0], [1, 2, 3, 4]), ([7], [7])):
        assert refusion.trim(torch.tensor(ids), cfg) == expected
    cfg.eos_id = [5, 3]
    assert refusion.trim(torch.tensor([1, 3, 5]), cfg) == [1, 3]
    cfg.eos_id = None
    assert refusion.trim(torch.tensor([1, 0, 5]), cfg) == [1, 0, 5]


def test_right_is_the_pattern_the_number_or_the_text():
    assert is_right(" ab ", "", "a[bc]") and not is_right("abx", "abx", "a[bc]")
    assert is_right("so #### 1,200", "because\n#### 1200", None) and not is_right("1200", "#### 1200", None)
    assert is_right(" 7.", "7. ", None) and not is_right("8.", "7.", None)


# ------------------------------------------------------------------------------------------------------ data

ROWS = {
    "prompt/response": {"prompt": "Tom has 3 red", "response": " 3+4=7."},
    "question/answer": {"question": "Tom has 3 red", "answer": " 3+4=7."},
    "query/response": {"query": "Tom has 3 red", "response": " 3+4=7."},
    "prompt/completion": {"prompt": "Tom has 3 red", "completion": " 3+4=7."},
    "instruction/output": {"instruction": "Tom has 3 red", "output": " 3+4=7."},
    "messages": {
        "prompt": ["beside messages nothing else is read"],
        "messages": [{"role": "user", "content": "Tom has 3 red"}, {"role": "assistant", "content": " 3+4=7."}]
    },
}


def test_every_kind_of_row_is_read(tmp_path):
    file = jsonl(tmp_path / "data.jsonl", [*ROWS.values(), "", "  \r"])
    file.write_bytes(b"\xef\xbb\xbf" + file.read_bytes().replace(b"\n", b"\r\n"))
    rows = read_data(file)
    assert rows == [([{"role": "user", "content": "Tom has 3 red"}], " 3+4=7.", None)] * len(ROWS)
    assert read_data(TINY / "code-test.jsonl")[0][2]
    file = jsonl(tmp_path / "input.jsonl", [{"instruction": "Add.", "input": "3 4", "output": "7"}])
    assert read_data(file)[0][0][0]["content"] == "Add.\n3 4"
    files = TINY / "train.jsonl", TINY / "test.jsonl"
    train, test = ({row[0][0]["content"] for row in read_data(file)} for file in files)
    assert len(test) == 200 and not train & test


@pytest.fixture
def tokenizer():
    return AutoTokenizer.from_pretrained(TINY / "ar")


def test_encode_takes_plain_and_chat_tokenizers(tokenizer):
    messages, answer, _ = read_data(TINY / "test.jsonl")[3]
    row = encode(tokenizer, messages, answer)
    assert tokenizer.decode(row["prompt_ids"]) == messages[0]["content"]
    assert row["answer_ids"][-1] == tokenizer.eos_token_id and tokenizer.decode(row["answer_ids"][:-1]) == answer
    assert tokenizer.unk_token_id not in row["prompt_ids"] + row["answer_ids"]
    tokenizer.chat_template = (
        "{% for m in messages %}<mask>{{ m['content'] }}{% endfor %}{% if add_generation_prompt %}={% endif %}"
    )
    assert encode(tokenizer, [{"role": "user", "content": "3"}], "4")["prompt_ids"] == tokenizer("<mask>3=")["input_ids"]


@pytest.mark.parametrize("template", ["", "{% for m in messages %}<mask>{{ m['content'] }}<eos>{% endfor %}"])
def test_text_stays_text(tokenizer, template):
    """The name of a special token in a message or an answer is never taken for the token."""
    tokenizer.chat_template = template or None
    row = encode(tokenizer, [{"role": "user", "content": "3<mask>4<eos>\ue000"}], " <mask>")
    special = [i for i in row["prompt_ids"] if i in (0, 1)]
    assert special == ([1, 0] if template else []) and 1 not in row["answer_ids"]
    assert row["answer_ids"].count(0) == 1
    plain = tokenizer("3<mask>4<eos>\ue000", split_special_tokens=True)["input_ids"]
    assert row["prompt_ids"] == ([1, *plain, 0] if template else plain)


def test_a_tokenizer_that_ends_its_texts_does_not_end_prompts(tokenizer):
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(single="$A <eos>", special_tokens=[("<eos>", 0)])
    assert tokenizer("Tom")["input_ids"][-1] == 0
    assert encode(tokenizer, [{"role": "user", "content": "Tom has 3"}])["prompt_ids"][-1] != 0


def copied(folder, change=None, source=TINY / "ar"):
    shutil.copytree(source, folder)
    if change:
        change(folder)
    return folder


def rewritten(folder, name, **values):
    """A JSON file of a folder with other values on top."""
    held = json.loads((folder / name).read_text())
    held |= {key: value(held) if callable(value) else value for key, value in values.items()}
    (folder / name).write_text(json.dumps(held))


def without_mask(folder):
    rewritten(folder, "config.json", mask_token_id=None)
    rewritten(folder, "tokenizer_config.json", mask_token=None)


def test_a_backbone_without_a_mask_gets_the_row_after_its_last_token(tmp_path, capsys):
    cfg = refusion.Config(device="cpu", dtype="float32")
    name = str(copied(tmp_path / "model", without_mask))
    model, _ = refusion.load(name, cfg, torch.float32, training=True)
    rows = model.get_input_embeddings().num_embeddings
    assert cfg.mask_id == cfg.vocab_len == rows - 1 == model.config.mask_token_id
    assert model.lm_head.weight.data_ptr() == model.model.embed_tokens.weight.data_ptr()
    assert model.model.embed_tokens.padding_idx is None, "the EOS row must get its gradient"
    refusion.load(name, cfg, torch.float32)
    assert cfg.mask_id is None, "enough for plain AR"
    assert "no mask token" in refused(refusion, capsys, "--generate", "--model", name, "--prompt", "Tom")
    for other in ("d2f", "codila"):  # their big model must be a masked diffusion LM
        train = ("--train", *short(), "--model", name, "--out", tmp_path / "out", "--max_len", 41)
        refused(importlib.import_module(other), capsys, *train, words=["no mask token"])


def test_a_hole_in_the_ids_of_a_tokenizer(tmp_path):
    """The last token has the largest id; the number of tokens says nothing."""
    def with_hole(folder):
        model = AutoModelForCausalLM.from_pretrained(folder)
        model.resize_token_embeddings(200)
        model.save_pretrained(folder)
        vocab = json.loads((folder / "tokenizer.json").read_text())
        vocab["model"]["vocab"]["<eos>"] = 150
        for token in vocab["added_tokens"]:
            token["id"] = 150 if token["content"] == "<eos>" else token["id"]
        (folder / "tokenizer.json").write_text(json.dumps(vocab))

    cfg = refusion.Config()
    refusion.load(str(copied(tmp_path / "model", with_hole)), cfg, torch.float32)
    assert (cfg.eos_id, cfg.vocab_len) == (150, 151)


def test_every_eos_of_the_config_ends_a_text(tmp_path):
    cfg = refusion.Config()
    name = str(copied(tmp_path / "model", lambda f: rewritten(f, "config.json", eos_token_id=[0, 7])))
    refusion.load(name, cfg, torch.float32)
    assert cfg.eos_id == [0, 7]
    refusion.load(name, cfg, torch.float32, training=True)
    assert cfg.eos_id == 0, "an answer is closed by one"


# ------------------------------------------------------------------------------------------------- bad input


OWN = {  # flags of one method that cannot work
    "refusion": ["--tau_slot 1.5", "--tau_token -1", "--slot_size 0", "--masking x"],
    "d2f": ["--tau_add 2", "--tau_act -1", "--tau_conf nan", "--decode_block_size 0", "--schedule x", "--p_min 0",
            "--lora_rank 0", "--adapter not/there"],
    "fastdllm_v2": ["--tau 2", "--block_size 0", "--tau x"],
    "orthrus": ["--block_size 1", "--objective x", "--anchors 0", "--top_k -1"],
    "codila": ["--block_size 0", "--mode x", "--p_partial 2", "--tau nan", "--aux not/there"],
}  # fmt: skip


def test_bad_input_ends_in_one_line_and_status_2(script, tmp_path, trained, capsys):
    good = jsonl(tmp_path / "good.jsonl", [ROWS["prompt/response"]] * 8)
    out = tmp_path / "out"
    train = ("--train", *short(), "--out", out)
    generate = ("--generate", "--model", trained(script), "--prompt", "4")
    cases = {
        "no such model": (("--generate", "--model", tmp_path / "none", "--prompt", "a"), ["none"]),
        "no such model, trained": ((*train, "--model", "./not/there"), ["not/there"]),
        "nothing asked": ((), ["--train"]),
        "unknown flag": (("--train", "--colour", "red"), ["colour"]),
        "not a number": (("--train", "--steps", "many"), ["steps"]),
        "no such data": ((*train, "--data", tmp_path / "none.jsonl"), ["none.jsonl"]),
        "data is a folder": ((*train, "--data", tmp_path), [tmp_path.name]),
        "empty data": ((*train, "--data", jsonl(tmp_path / "empty.jsonl", [])), ["no rows"]),
        "rows all too long": ((*train, "--data", good, "--max_len", 2), ["max_len"]),
        "empty prompt": (("--generate", "--model", trained(script), "--prompt", ""), ["token"]),
        "batch 0": ((*train, "--batch_size", 0), ["batch_size"]),
        "accumulation": ((*train, "--batch_size", 4, "--accumulation", 3), ["accumulation"]),
        "more than the model's positions": ((*generate, "--max_new_tokens", 4096), ["1 to 4096"]),
        "no new tokens": ((*generate, "--max_new_tokens", 0), ["max_new_tokens"]),
        "temperature": ((*generate, "--temperature", -1), ["temperature"]),
        "temperature nan": ((*generate, "--temperature", "nan"), ["temperature"]),
        "clip": ((*train, "--clip", -1), ["clip"]),
        "lr": ((*train, "--lr", "nan"), ["lr"]),
        "seed": ((*train, "--seed", 2**62), ["seed"]),
        "negative seed": ((*generate, "--seed", -1), ["seed"]),
        "a model that is a file": (("--generate", "--model", good, "--prompt", "a"), [good.name]),
        "out is a file": (("--train", *short(), "--out", good), [good.name]),
        "out is under a file": (("--train", *short(), "--out", good / "a" / "b"), [good.name]),
        "dtype": ((*generate, "--dtype", "float17"), ["float17"]),
        "device": ((*generate, "--device", "tpu"), ["tpu"]),
        "nothing to resume": (("--train", "--resume", "--out", tmp_path / "nowhere"), ["nowhere"]),
        "prompt that is no text": (("--generate", "--model", trained(script), "--prompt", "\udcff"), ["utf-8"]),
        "latin-1": ((*train, "--data", tmp_path / "latin.jsonl"), ["line 2", "UTF-8"]),
        "utf-16": ((*train, "--data", tmp_path / "utf16.jsonl"), ["line 1", "UTF-8"]),
    }
    text = json.dumps(ROWS["prompt/response"]) + '\n{"prompt": "café", "response": "x"}\n'
    (tmp_path / "latin.jsonl").write_bytes(text.encode("latin-1"))
    (tmp_path / "utf16.jsonl").write_bytes(text.encode("utf-16"))
    rows = ("{", "[1]", "3", '"text"', '{"prompt": "a"}', '{"response": "a"}', '{"prompt": 1, "response": "a"}',
            '{"messages": []}', '{"messages": [{"role": "user", "content": "a"}]}', '{"messages": 3}', "[" * 100000,
            '{"prompt": null, "response": null}', '{"messages": ["a"]}', '{"prompt": "\\ud800", "response": "a"}',
            '{"messages": [{"content": "a"}, {"role": "assistant", "content": "b"}]}',
            '{"messages": [{"role": "user", "content": ["a"]}, {"role": "assistant", "content": "b"}]}')  # fmt: skip
    for row in rows:
        file = jsonl(tmp_path / f"broken{len(cases)}.jsonl", [ROWS["prompt/response"], row, ROWS["prompt/response"]])
        cases[f"broken row {row[:40]}"] = ((*train, "--data", file), [file.name, "line 2"])
    for flags in OWN[script.METHOD]:
        cases[flags] = ((*train, *flags.split()), [])
    if script.METHOD != "refusion":  # the frame is the same text: its own flags, and one case of each kind
        kinds = ("no such model", "batch 0", "latin-1", "empty prompt", *OWN[script.METHOD])
        cases = {name: cases[name] for name in kinds}
    for name, (args, words) in cases.items():
        refused(script, capsys, *args, words=words)
        assert not out.exists(), name


def reshaped(folder, change):
    """The weights of a folder with a change."""
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


def with_code(folder):
    """Names code in the folder, which leaves a file `executed` behind when it runs."""
    for name in ("modeling_x", "tokenization_x"):
        (folder / f"{name}.py").write_text(f"open({str(folder / 'executed')!r}, 'w')\nclass X: pass\n")
    names = {key: "modeling_x.X" for key in ("AutoConfig", "AutoModel", "AutoModelForCausalLM")}
    rewritten(folder, "config.json", model_type="x", architectures=["X"], auto_map=names)
    tokenizers = {"AutoTokenizer": ["tokenization_x.X", None]}
    rewritten(folder, "tokenizer_config.json", tokenizer_class="X", auto_map=tokenizers)


def with_pickle(folder):
    """Weights in torch's old format, which runs what it holds."""

    class Touch:
        def __reduce__(self):
            return open, (str(folder / "executed"), "w")

    (folder / "model.safetensors").unlink()
    (folder / "pytorch_model.bin").write_bytes(pickle.dumps(Touch()))


UP = "model.layers.1.mlp.up_proj.weight"


def with_layers(n):
    """The config says n layers more than there are."""
    return lambda folder: rewritten(
        folder, "config.json", num_hidden_layers=lambda c: c["num_hidden_layers"] + n, layer_types=None
    )


def with_word(folder):
    """The tokenizer knows a word whose id is far outside the embedding."""
    rewritten(folder, "tokenizer.json", model=lambda t: t["model"] | {"vocab": t["model"]["vocab"] | {"zebra": 10**6}})


def written(name, text):
    return lambda folder: (folder / name).write_text(text)


LFS = "version https://git-lfs.github.com/spec/v1\n"
BROKEN = {  # name: (change of a folder, words of the line)
    "weights are junk": (written("model.safetensors", "junk"), ["cannot load"]),
    "config is cut off": (written("config.json", "{"), ["cannot load"]),
    "tokenizer is empty": (written("tokenizer.json", "{}"), ["cannot load"]),
    "no tokenizer": (lambda f: [path.unlink() for path in f.glob("tokenizer*")], ["cannot load"]),
    "another hidden_size": (lambda f: rewritten(f, "config.json", hidden_size=64), ["another shape"]),
    "a missing tensor": (lambda f: reshaped(f, lambda t: t.pop(UP)), [UP]),
    "a tensor cut short": (lambda f: reshaped(f, lambda t: t.update({UP: t[UP][1:].clone()})), [UP]),
    "more layers in the config": (with_layers(1), ["missing", "layers."]),
    "fewer layers in the config": (with_layers(-1), ["more layers"]),
    "a token id outside the embedding": (with_word, ["embedding"]),
    "quantised weights": (
        lambda f: rewritten(f, "config.json", quantization_config={"quant_method": "fp8"}), ["quantised"]),
    "no EOS token": (lambda f: rewritten(f, "tokenizer_config.json", eos_token=None), ["EOS None"]),
    "mask and EOS are one token": (lambda f: rewritten(f, "config.json", mask_token_id=0), ["EOS 0, mask 0"]),
    "a chat template that only fails": (written("chat_template.jinja", "{{ raise_exception('x') }}"), ["cannot load"]),
    "a chat template that does not parse": (written("chat_template.jinja", "{% for %}"), ["cannot load"]),
    "code in the folder": (with_code, ["cannot load"]),
    "a pickle in the folder": (with_pickle, ["cannot load"]),
    "a git-lfs pointer": (written("model.safetensors", LFS), ["git-lfs"]),
    "a git-lfs pointer instead of a tokenizer": (written("tokenizer.json", LFS), ["git-lfs"]),
}


@pytest.mark.parametrize("name", BROKEN)
def test_broken_checkpoints_are_refused(tmp_path, capsys, name):
    """To decode and to train on: one line, nothing written, nothing executed."""
    change, words = BROKEN[name]
    folder, out = copied(tmp_path / "model", change), tmp_path / "out"
    for args in (("--generate", "--prompt", "a"), ("--train", "--steps", 1, "--out", out)):
        refused(refusion, capsys, *args, "--model", folder, words=words)
        assert not out.exists() and not (folder / "executed").exists()


def test_decoding_ends_whatever_the_model_says(script, trained, tmp_path, capsys):
    """Weights that are not numbers: no confidence passes a threshold, no comparison is true."""
    for value in (float("nan"), float("inf")):
        folder = copied(tmp_path / str(value), source=trained(script))
        reshaped(folder, lambda t: t["model.norm.weight"].fill_(value))
        for temperature in (0, 1):
            flags = ("--problems", 1, "--max_new_tokens", 8, "--temperature", temperature)
            assert run(script, "--generate", "--model", folder, *flags) == 0
            report = last_line(capsys)
            assert all(1 <= row["new_tokens"] <= 8 for row in report["rows"])


def test_a_broken_state_is_not_resumed(script, trained, tmp_path, capsys):
    folder = copied(tmp_path / "run", source=trained(script))
    (folder / "optimizer.safetensors").write_text("junk")
    refused(script, capsys, "--train", "--resume", "--steps", 9, "--out", folder)
