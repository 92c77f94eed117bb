"""The frame that all scripts share word for word: data, checkpoints, resume, bad input, the command line."""

import dataclasses
import importlib
import json
import os
import pickle
import random
import re
import shutil
import signal
import subprocess
import sys
import time
import xml.etree.ElementTree as ElementTree
from pathlib import Path

import common
import pytest
import torch
from conftest import ROOT, TMP
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoTokenizer

SCRIPTS = [name for name in ("refusion", "d2f", "fastdllm_v2", "orthrus", "codila") if (ROOT / f"{name}.py").exists()]
MARK = re.compile(r"^# =+ frame: ", re.MULTILINE)


def short(script, **flags):
    """Flags of a run of a few steps in every stage, on the built-in backbone and a few of its problems."""
    rng, data = random.Random(0), Path(TMP.name, f"problems_{script.METHOD}.jsonl")
    if not data.exists():
        jsonl(data, [dict(zip(("prompt", "response"), script.problem(rng))) for _ in range(24)])
    steps = {field.name: 2 for field in dataclasses.fields(script.Config) if field.name.endswith("_steps")}
    flags = {
        **steps,
        "steps": 3,
        "batch_size": 4,
        "problems": 2,
        "device": "cpu",
        "dtype": "float32",
        "data": data,
        **flags,
    }
    return [text for name, value in flags.items() for text in (f"--{name}", str(value))]


@pytest.fixture(params=SCRIPTS)
def script(request):
    return importlib.import_module(request.param)


def run(script, *args):
    try:
        return script.main([str(arg) for arg in args])
    except SystemExit as error:  # argparse
        return error.code


def refused(script, capsys, *args, words=()):
    """Exit status 2 and exactly one line on stderr, which holds the words."""
    capsys.readouterr()
    status = run(script, *args)
    err = capsys.readouterr().err.splitlines()
    assert status == 2 and len(err) == 1, (status, err)
    for word in words:
        assert str(word) in err[0], err[0]
    return err[0]


# ------------------------------------------------------------------------------------------------------------ the text


def frame_of(name):
    source = (ROOT / f"{name}.py").read_text()
    return source[MARK.search(source).start() :]


def test_the_frame_is_the_same_text_in_every_script():
    frames = {name: frame_of(name) for name in SCRIPTS}
    assert all(frame == frames[SCRIPTS[0]] for frame in frames.values()), [
        n for n in SCRIPTS if frames[n] != frames[SCRIPTS[0]]
    ]


def test_the_common_part_of_config_is_the_same(script):
    import refusion

    names = [field.name for field in dataclasses.fields(refusion.Config)]
    common = names[: names.index("vocab_len") + 1]
    assert [field.name for field in dataclasses.fields(script.Config)][: len(common)] == common


def test_nothing_unsafe_and_no_other_package(script):
    source = Path(script.__file__).read_text()
    assert not re.search(r"torch\.load\(|\bpickle\b|trust_remote_code\s*=\s*True|\beval\(|\bexec\(", source)
    modules = set(re.findall(r"^(?:from|import) (\w+)", source, re.MULTILINE)) - set(sys.stdlib_module_names)
    assert modules <= {"torch", "transformers", "safetensors", "tqdm", "numpy", "common", "kernels"}


def test_every_test_that_the_readme_names_exists():
    """Its table of faults: words behind a letter are names of tests in the file that the letter stands for."""
    files = dict(C="common", F="frame", R="refusion", D="d2f", V="fastdllm_v2", O="orthrus", L="codila")
    found = {x: set(re.findall(r"^def test_(\w+)", (ROOT / "tests" / f"test_{name}.py").read_text(), re.MULTILINE))
             for x, name in files.items()}  # fmt: skip
    note = r"(?: \([^)]*\))?"
    lists = rf"\b([CFRDVOL]) (\w+{note}(?:, (?![CFRDVOL] )\w+{note})*)"
    table = (ROOT / "tests" / "README.md").read_text().partition("\n| fault |")[2].partition("\n\n")[0]
    named = [(x, name) for x, names in re.findall(lists, table) for name in re.sub(note, "", names).split(", ")]
    assert not [(x, name) for x, name in named if name not in found[x]]
    assert len(named) > 100


# -------------------------------------------------------------------------------------------------- training and resume


def weights(folder):
    return {file.name: load_file(file) for file in sorted(Path(folder).glob("*.safetensors"))}


def same(a, b):
    return a.keys() == b.keys() and all(
        a[f].keys() == b[f].keys() and all(torch.equal(a[f][k], b[f][k]) for k in a[f]) for f in a
    )


def test_interrupted_and_resumed_equals_uninterrupted(script, tmp_path):
    """Bit for bit: weights, optimiser, data order and noise, from a stop in the middle of any stage."""
    assert run(script, "--train", *short(script), "--out", tmp_path / "whole", "--save_every", 1) == 0
    save, saves = script.save, []

    def stop_after(n):
        def wrapped(*args):
            save(*args)
            saves.append(1)
            if len(saves) == n:
                raise KeyboardInterrupt

        return wrapped

    for n in (1, 4):  # inside the first stage, and inside a later one
        out = tmp_path / f"stopped{n}"
        saves.clear()
        script.save = stop_after(n)
        try:
            assert run(script, "--train", *short(script), "--out", out, "--save_every", 1) == 130
        finally:
            script.save = save
        assert run(script, "--train", "--resume", "--out", out) == 0
        assert same(weights(out), weights(tmp_path / "whole"))
        assert same(weights(out / "ar"), weights(tmp_path / "whole" / "ar"))


def test_the_seed_decides_everything(script, tmp_path):
    for name, seed in (("a", 1), ("b", 1), ("c", 2)):
        assert run(script, "--train", *short(script), "--seed", seed, "--out", tmp_path / name) == 0
    assert same(weights(tmp_path / "a"), weights(tmp_path / "b"))
    assert not same(weights(tmp_path / "a"), weights(tmp_path / "c"))


def test_accumulation_equals_the_big_batch(script, tmp_path, monkeypatch):
    fit, losses = script.fit, {1: [], 4: []}
    for n in losses:
        monkeypatch.setattr(script, "fit", lambda *args: losses[n].extend(found := fit(*args)) or found)
        assert run(script, "--train", *short(script), "--accumulation", n, "--out", tmp_path / str(n)) == 0
    assert losses[1] == pytest.approx(losses[4], rel=1e-3) and len(losses[1]) >= 5


def test_a_loss_that_is_not_finite_stops_and_leaves_the_last_save(script, tmp_path, capsys, monkeypatch):
    stages, calls, out = script.stages, [], tmp_path / "run"

    def poisoned(cfg):
        *earlier, last = stages(cfg)

        def loss(model, inputs, cfg):
            calls.append(1)
            value, logs = last.loss(model, inputs, cfg)
            return value * (float("nan") if len(calls) == 3 else 1.0), logs

        return [*earlier, last._replace(loss=loss)]

    monkeypatch.setattr(script, "stages", poisoned)
    assert run(script, "--train", *short(script), "--save_every", 1, "--out", out) == 1
    assert "step 2" in capsys.readouterr().err.splitlines()[-1]
    assert script.read_state(out)[1] == 2
    AutoModelForCausalLM.from_pretrained(out)


class Killed(BaseException):
    """Stands for kill -9 at this very call: no code of ours handles it."""


@pytest.mark.parametrize(
    "name, moment", [*(("refusion", n) for n in (1, 2, 3, 5, 8, 12, 17)), *((n, 9) for n in SCRIPTS[1:])]
)
def test_killed_during_a_save(tmp_path, monkeypatch, name, moment):
    """At whichever file operation the process dies, the folder still loads and training resumes from it."""
    script, out, count = importlib.import_module(name), tmp_path / "run", [0]
    assert run(script, "--train", *short(script), "--out", out) == 0

    def dying(function):
        def wrapped(*args, **kwargs):
            count[0] += 1
            if count[0] == moment:
                raise Killed
            return function(*args, **kwargs)

        return wrapped

    with monkeypatch.context() as patch:
        for name in ("replace", "fsync"):
            patch.setattr(os, name, dying(getattr(os, name)))
        patch.setattr(script, "save_file", dying(script.save_file))
        with pytest.raises(Killed):
            run(script, "--train", "--resume", "--steps", 5, "--save_every", 1, "--out", out)
    assert 3 <= script.read_state(out)[1] <= 5
    AutoTokenizer.from_pretrained(out)
    AutoModelForCausalLM.from_pretrained(out)
    assert run(script, "--train", "--resume", "--generate", "--steps", 5, "--problems", 1, "--out", out) == 0


@pytest.mark.parametrize("name", [*SCRIPTS, "d2f with a teacher"])
def test_resumed_from_between_two_renames_equals_uninterrupted(tmp_path, monkeypatch, name):
    """Where a save replaces file after file: whichever it died between, resuming gives the run that did not die.

    Of the first save of the last stage, in which the frozen part of the model may be another than that on disk.
    """
    script, out, extra = importlib.import_module(name.split()[0]), tmp_path / "run", ()
    if name != script.METHOD:
        backbone, tokenizer = script.tiny_backbone(script.Config(seed=1))
        backbone.save_pretrained(tmp_path / "teacher")
        tokenizer.save_pretrained(tmp_path / "teacher")
        extra = ("--teacher", tmp_path / "teacher")
    replace, save, last, copies = os.replace, script.save, [None], []

    def recorded(*args):
        if last[0] == (script.METHOD, 1) and str(args[1]).startswith(str(out)):
            copies.append(shutil.copytree(out, tmp_path / f"copy{len(copies)}"))
        replace(*args)

    monkeypatch.setattr(os, "replace", recorded)
    monkeypatch.setattr(script, "save", lambda *args: (last.__setitem__(0, args[3:5]), save(*args)))
    assert run(script, "--train", *short(script, steps=2), *extra, "--out", out, "--save_every", 1) == 0
    monkeypatch.undo()
    assert len(copies) >= 6
    for copy in copies[1::4] + copies[-1:]:
        assert run(script, "--train", "--resume", "--out", copy) == 0
        for folder in ("", "ar", "adapter", "aux"):
            assert same(weights(copy / folder), weights(out / folder)), copy.name


def spawn(name, *args):
    command = [sys.executable, str(ROOT / f"{name}.py"), *map(str, args)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=ROOT)


def wait_for(path, process):
    deadline = time.time() + 60
    while not path.exists():
        assert time.time() < deadline and process.poll() is None, process.communicate()[1]
        time.sleep(0.05)


@pytest.mark.parametrize("signal_, status", [(signal.SIGINT, 130), (signal.SIGKILL, -9)])
def test_ctrl_c_and_kill_in_a_real_process(tmp_path, signal_, status):
    """Ctrl-C finishes the step and saves; after kill -9 the last save is whole. Both resume."""
    import refusion

    out = tmp_path / "run"
    flags = short(refusion, ar_steps=0, steps=100000, save_every=3)
    process = spawn("refusion", "--train", *flags, "--out", out)
    wait_for(out / "training_state.safetensors", process)
    time.sleep(0.5)
    process.send_signal(signal_)
    _, err = process.communicate(timeout=60)
    assert process.returncode == status
    if signal_ == signal.SIGINT:
        assert err.splitlines()[-1] == "refusion.py: interrupted" and "Traceback" not in err
    step = refusion.read_state(out)[1]
    AutoModelForCausalLM.from_pretrained(out)
    assert run(refusion, "--train", "--resume", "--steps", step + 1, "--out", out) == 0
    assert refusion.read_state(out)[1] == step + 1


# ------------------------------------------------------------------------------------------------------------- generate


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A folder with a few steps of training, one per script, made when first asked for."""
    made = {}

    def folder(script):
        if script not in made:
            made[script] = tmp_path_factory.mktemp(script.__name__) / "run"
            assert run(script, "--train", *short(script), "--out", made[script]) == 0
        return made[script]

    return folder


def test_generate_prints_text_figures_and_json(script, trained, tmp_path, capsys):
    picture = tmp_path / "trace.svg"
    assert run(script, "--generate", "--model", trained(script), "--trace", "--trace-svg", picture) == 0
    assert len(ElementTree.parse(picture).getroot()) >= 1
    out = capsys.readouterr().out
    lines = out.splitlines()
    report = json.loads(lines[-1])
    assert report["method"] == script.METHOD and report["rows"][-1]["label"].startswith("plain AR")
    for row in report["rows"]:
        assert row["problems"] == 2 and row["forwards"] > 0 and row["new_tokens"] <= 2 * script.Config.max_new_tokens
        assert row["tokens_per_forward"] == pytest.approx(row["new_tokens"] / row["forwards"], abs=1e-3)
        line = next(text for text in lines if text.startswith(f"{row['label']}: new_tokens"))
        assert all(word in line for word in ("forwards", "tokens_per_forward", "tok/s", "x AR"))
    assert report["rows"][-1]["tokens_per_forward"] == 1.0
    assert "  round" in out and "\033" not in out, "piped: plain text"


def test_prompts_at_the_borders_of_a_block_and_of_max_len(script, trained, capsys):
    """1, block-1, block, block+1, max_len tokens; a budget of one token, and of one more than a block."""
    cfg = script.parse(["--generate", "--model", str(trained(script))])[1]
    names = ("decode_block_size", "slot_size", "block_size")
    block = next(getattr(cfg, name) for name in names if hasattr(cfg, name))
    max_len = 2 * block + 3
    lengths = (1, block - 1, block, block + 1, max_len)
    tokenizer = script.load_tokenizer(trained(script))
    texts = [" pens" * length for length in lengths]
    assert block > 1
    assert lengths == tuple(len(script.encode(tokenizer, [{"content": text}])["prompt_ids"]) for text in texts)
    command = ("--generate", "--model", trained(script), "--max_len", max_len)
    prompts = [word for text in texts for word in ("--prompt", text)]
    for budget in (1, block + 1):
        assert run(script, *command, *prompts, "--max_new_tokens", budget) == 0
        for row in json.loads(capsys.readouterr().out.splitlines()[-1])["rows"]:
            assert len(lengths) <= row["new_tokens"] <= len(lengths) * budget, row["label"]
    refused(script, capsys, *command, *prompts, "--prompt", " pens" * (max_len + 1), words=["max_len"])


def test_64_ragged_prompts_in_a_batch_equal_64_single_decodes(trained):
    """Where batches are offered: Fast-dLLM v2."""
    import fastdllm_v2 as script

    cfg = script.parse(["--generate", "--model", str(trained(script)), "--max_new_tokens", "16"])[1]
    model, tokenizer = script.load(str(trained(script)), cfg, training=False)
    model = script.enter_stage(model, script.METHOD, str(trained(script)), cfg).train(False)
    generator = torch.Generator().manual_seed(0)
    prompts = [torch.randint(3, cfg.vocab_len, (1 + i % 40,), generator=generator) for i in range(64)]
    texts, _ = script.generate_batch(model, prompts, cfg)
    for ids, text in zip(prompts, texts, strict=True):
        single = script.generate(model, ids[None], cfg)[0][0]
        assert torch.equal(text[: len(single)], single), len(ids)


def test_prompts_and_two_runs_in_a_process(script, trained, capsys):
    texts = []
    for _ in range(2):
        prompts = ("--prompt", "Tom has 3 red pens", "--prompt", "How many cups?")
        assert run(script, "--generate", "--model", trained(script), *prompts, "--max_new_tokens", 16) == 0
        lines = capsys.readouterr().out.splitlines()
        report = json.loads(lines[-1])
        assert all(row["problems"] == 2 and row["right"] is None for row in report["rows"])
        texts.append([line for line in lines if "tok/s" not in line and "tok_s" not in line])
    assert texts[0] == texts[1] and any(line.startswith("How many cups?") for line in texts[0])


def test_trace_has_a_dot_per_mask_a_colour_per_round_and_fallen_drafts(capsys, monkeypatch):
    class Letters:
        def decode(self, ids):
            return "<&\n"[ids[0] - 9] if ids[0] >= 9 else chr(97 + ids[0])

    rounds = common.trace(Letters(), [0, 1, 10], {"fixed_round": [1, 0, 1], "rejected": [(0, 2, 9), (1, 7, 0)]})
    pauses = []
    monkeypatch.setattr(common.time, "sleep", pauses.append)
    common.show_trace(rounds, 3)
    assert capsys.readouterr().out.splitlines() == ["  round   1 | ·b~<~", "  round   2 | ab&"] and not pauses
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    common.show_trace(rounds, 3)
    assert pauses == [1.5, 1.5]
    assert capsys.readouterr().out.splitlines()[0] == "  round   1 | ·\033[31mb\033[0m\033[9;31m<\033[0m"
    picture = ElementTree.fromstring(common.trace_svg(rounds))
    texts = ["".join(line.itertext()) for line in picture]
    assert texts == ["round   1 | ·b<", "round   2 | ab&"] and picture[0][2].get("text-decoration") == "line-through"


def test_trim_ends_at_the_first_eos_or_the_budget(script):
    cfg = script.Config(max_new_tokens=4)
    cfg.eos_id = 0
    for ids, expected in (([3, 0, 5, 0], [3, 0]), ([0], [0]), ([1, 2, 3, 4, 0], [1, 2, 3, 4]), ([7], [7])):
        assert script.trim(torch.tensor(ids), cfg) == expected


# ----------------------------------------------------------------------------------------------------------------- data

ROWS = {
    "prompt/response": {"prompt": "Tom has 3 red", "response": " 3+4=7."},
    "question/answer": {"question": "Tom has 3 red", "answer": " 3+4=7."},
    "query/response": {"query": "Tom has 3 red", "response": " 3+4=7."},
    "messages": {
        "messages": [{"role": "user", "content": "Tom has 3 red"}, {"role": "assistant", "content": " 3+4=7."}]
    },
}


ROWS_WITHOUT = [{"prompt": "", "response": " 3+4=7."}] * 8


def jsonl(path, rows):
    path.write_text("".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows))
    return path


def test_every_kind_of_row_is_read_and_held_out_rows_are_not_trained_on(script, tmp_path):
    file = jsonl(tmp_path / "data.jsonl", [*ROWS.values(), "", *ROWS.values()])
    training, held_out = script.read_problems(script.Config(data=str(file), problems=3))
    assert len(training) == 5 and len(held_out) == 3
    assert all(p == ([{"role": "user", "content": "Tom has 3 red"}], " 3+4=7.") for p in training + held_out)
    training, held_out = script.read_problems(script.Config(problems=64))
    prompts = {messages[0]["content"] for messages, _ in training}
    assert len(held_out) == 64 and not prompts & {messages[0]["content"] for messages, _ in held_out}


def test_encode_takes_plain_and_chat_tokenizers(script):
    _, tokenizer = script.tiny_backbone(script.Config())
    prompt, answer = script.problem(__import__("random").Random(3))
    row = script.encode(tokenizer, [{"role": "user", "content": prompt}], answer)
    assert tokenizer.decode(row["prompt_ids"]) == prompt
    assert row["answer_ids"][-1] == tokenizer.eos_token_id and tokenizer.decode(row["answer_ids"][:-1]) == answer
    assert tokenizer.unk_token_id not in row["prompt_ids"] + row["answer_ids"]
    tokenizer.chat_template = (
        "{% for m in messages %}[{{ m['content'] }}]{% endfor %}{% if add_generation_prompt %}={% endif %}"
    )
    chat = script.encode(tokenizer, [{"role": "user", "content": "3"}], "4")
    assert len(chat["prompt_ids"]) == 4 and len(chat["answer_ids"]) == 2


def test_padding_mask_and_eos_tokens(script, tmp_path):
    """A backbone without a mask token gets a spare row if there is one, else a new one; the head stays tied."""
    from transformers import Qwen3ForCausalLM

    for spare, name in ((0, "full"), (5, "spare")):
        cfg = script.Config(device="cpu", dtype="float32", compile=False)
        backbone, tokenizer = script.tiny_backbone(cfg)
        tokenizer.mask_token = None
        backbone.resize_token_embeddings(len(tokenizer) + spare)
        config = backbone.config
        config.mask_token_id, config.pad_token_id = None, 0
        lm = Qwen3ForCausalLM(config)
        lm.save_pretrained(tmp_path / name)
        tokenizer.save_pretrained(tmp_path / name)
        vocab = json.loads((tmp_path / name / "tokenizer.json").read_text())
        loaded, tok = script.load(str(tmp_path / name), cfg, training=True)
        rows = loaded.get_input_embeddings().num_embeddings
        assert cfg.mask_id not in (cfg.eos_id, None) and cfg.mask_id < rows and len(vocab["model"]["vocab"]) <= rows
        assert loaded.lm_head.weight.data_ptr() == loaded.model.embed_tokens.weight.data_ptr()
        assert loaded.model.embed_tokens.padding_idx is None, "the EOS row must get its gradient"
        assert loaded.config.mask_token_id == cfg.mask_id


# ------------------------------------------------------------------------------------------------------------ bad input


OWN = {  # flags of one method that cannot work
    "refusion": ["--tau_slot 1.5", "--tau_token -1", "--slot_size 0", "--slot_size 8 --serial_blocks 3",
                 "--slot_sizes 4,x", "--masking x", "--top_p 0.5"],
    "d2f": ["--tau_add 2", "--tau_act -1", "--tau_conf nan", "--decode_block_size 0", "--schedule x", "--p_min 0",
            "--lora_rank 0", "--adapter not/there", "--teacher not/there"],
    "fastdllm_v2": ["--tau 2", "--sub_block_size 3", "--block_size 0", "--confidence x", "--max_len 41",
                    "--max_len 80000"],
    "orthrus": ["--block_size 1", "--loss x", "--anchors 0", "--top_k -1"],
    "codila": ["--block_size 0", "--mode x", "--block_sizes 2,x", "--p_partial 2", "--tau nan", "--tags one",
               "--aux not/there"],
}  # fmt: skip


def test_bad_input_ends_in_one_line_and_status_2(script, tmp_path, trained, capsys):
    good = jsonl(tmp_path / "good.jsonl", [ROWS["prompt/response"]] * 8)
    out = tmp_path / "out"
    train = ("--train", *short(script), "--out", out)
    model = trained(script)
    cases = {
        "no such model": (("--generate", "--model", tmp_path / "none"), ["none"]),
        "no such model, trained": ((*train, "--model", "./not/there"), ["not/there"]),
        "nothing asked": ((), ["--train"]),
        "unknown flag": (("--train", "--colour", "red"), ["colour"]),
        "not a number": (("--train", "--steps", "many"), ["steps"]),
        "no such data": ((*train, "--data", tmp_path / "none.jsonl"), ["none.jsonl"]),
        "data is a folder": ((*train, "--data", tmp_path), [tmp_path.name]),
        "empty data": ((*train, "--data", jsonl(tmp_path / "empty.jsonl", [])), ["no rows"]),
        "rows all too long": ((*train, "--data", good, "--max_len", 2), ["max_len"]),
        "prompt too long": (("--generate", "--model", model, "--prompt", "pens " * 40, "--max_len", 8), ["max_len"]),
        "empty prompt": (("--generate", "--model", model, "--prompt", ""), ["1 to"]),
        "batch 0": ((*train, "--batch_size", 0), ["batch_size"]),
        "accumulation": ((*train, "--batch_size", 4, "--accumulation", 3), ["accumulation"]),
        "no new tokens": (("--generate", "--model", model, "--max_new_tokens", 0), ["max_new_tokens"]),
        "temperature": (("--generate", "--model", model, "--temperature", -1), ["temperature"]),
        "top_p": (("--generate", "--model", model, "--top_p", 0), ["top_p"]),
        "top_p 2": (("--generate", "--model", model, "--top_p", 2), ["top_p"]),
        "temperature nan": (("--generate", "--model", model, "--temperature", "nan"), ["temperature"]),
        "temperature inf": (("--generate", "--model", model, "--temperature", "inf"), ["temperature"]),
        "clip": ((*train, "--clip", -1), ["clip"]),
        "lr": ((*train, "--lr", "nan"), ["lr"]),
        "seed": ((*train, "--seed", 2**62), ["seed"]),
        "negative seed": (("--generate", "--model", model, "--seed", -1), ["seed"]),
        "a model that is a file": (("--generate", "--model", good), [good.name]),
        "a model without a name": (("--generate", "--model", ""), ["cannot load"]),
        "out is a file": (("--train", *short(script), "--out", good), ["name another --out"]),
        "out is under a file": (("--train", *short(script), "--out", good / "a" / "b"), ["cannot be written"]),
        "dtype": (("--generate", "--model", model, "--dtype", "float17"), ["float17"]),
        "device": (("--generate", "--model", model, "--device", "tpu"), ["tpu"]),
        "nothing to resume": (("--train", "--resume", "--out", tmp_path / "nowhere"), ["nowhere"]),
        "another model's folder": (("--train", "--model", model, "--out", ROOT / "tests"), ["name another --out"]),
        "no prompt in a row": ((*train, "--data", jsonl(tmp_path / "no_prompt.jsonl", ROWS_WITHOUT)), ["no tokens"]),
        "prompt that is no text": (("--generate", "--model", model, "--prompt", "\udcff"), ["utf-8"]),
    }
    for row in ("{", "[1]", "3", '"text"', '{"prompt": "a"}', '{"response": "a"}', '{"prompt": 1, "response": "a"}', "\xff\xfe",
                '{"messages": []}x', '{"messages": [{"role": "user", "content": "a"}]}', '{"messages": 3}', "[" * 100000,
                '{"prompt": null, "response": null}', '{"messages": ["a"]}', '{"prompt": "\\ud800", "response": "a"}',
                '{"messages": [{"content": "a"}, {"role": "assistant", "content": "b"}]}',
                '{"messages": [{"role": "user", "content": ["a"]}, {"role": "assistant", "content": "b"}]}'):  # fmt: skip
        file = jsonl(tmp_path / f"broken{len(cases)}.jsonl", [ROWS["prompt/response"], row, ROWS["prompt/response"]])
        cases[f"broken row {row[:40]}"] = ((*train, "--data", file), [file.name, "line 2"])
    for flags in OWN[script.METHOD]:
        cases[flags] = ((*train, *flags.split()), [])
    for name, (args, words) in cases.items():
        line = refused(script, capsys, *args, words=words)
        assert line.startswith(f"{script.METHOD}.py: "), name
        assert not out.exists() and not Path(f"{out}.tmp").exists(), name


@pytest.mark.parametrize("name", [name for name in SCRIPTS if name != "orthrus"])  # it borrows an unused token
def test_a_backbone_without_a_mask_token_cannot_decode_untrained(name, tmp_path, capsys):
    script = importlib.import_module(name)
    backbone, tokenizer = script.tiny_backbone(script.Config())
    backbone.config.mask_token_id, tokenizer.mask_token = None, None
    backbone.save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    refused(script, capsys, "--generate", "--model", tmp_path, words=["no mask token"])


def reshaped(folder, change):
    """The weights of a folder with a change."""
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


def rewritten(folder, name, **values):
    """A JSON file of a folder with other values on top."""
    held = json.loads((folder / name).read_text())
    held |= {key: value(held) if callable(value) else value for key, value in values.items()}
    (folder / name).write_text(json.dumps(held))


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


BROKEN = {  # name: (change of a trained folder, words of the line)
    "weights are junk": (written("model.safetensors", "junk"), ["cannot load"]),
    "config is cut off": (written("config.json", "{"), ["cannot load"]),
    "tokenizer is empty": (written("tokenizer.json", "{}"), ["cannot load"]),
    "settings are a list": (written("settings.json", "[1]"), ["settings"]),
    "settings of another type": (written("settings.json", '{"steps": "x"}'), ["settings"]),
    "settings with True for a number": (written("settings.json", '{"problems": true}'), ["settings"]),
    "settings are cut off": (written("settings.json", "{"), []),
    "another hidden_size": (lambda f: rewritten(f, "config.json", hidden_size=64), ["another shape"]),
    "a missing tensor": (lambda f: reshaped(f, lambda t: t.pop(UP)), [UP]),
    "a tensor cut short": (lambda f: reshaped(f, lambda t: t.update({UP: t[UP][1:].clone()})), [UP]),
    "more layers in the config": (with_layers(1), ["missing", "layers."]),
    "fewer layers in the config": (with_layers(-1), ["more layers"]),
    "a token id outside the embedding": (with_word, ["outside"]),
    "no EOS token": (lambda f: rewritten(f, "tokenizer_config.json", eos_token=None), ["no EOS"]),
    "mask and EOS are one token": (lambda f: rewritten(f, "config.json", mask_token_id=0), ["two tokens"]),
    "a tokenizer that fails": (lambda f: rewritten(f, "tokenizer_config.json", model_max_length="x"), ["cannot load"]),
    "a chat template that only fails": (written("chat_template.jinja", "{{ raise_exception('x') }}"), ["template"]),
    "a chat template that does not parse": (written("chat_template.jinja", "{% for %}"), ["template"]),
    "code in the folder": (with_code, ["cannot load"]),
    "a pickle in the folder": (with_pickle, ["cannot load"]),
}


def test_broken_checkpoints_are_refused(script, trained, tmp_path, capsys):
    """To decode and to train on: one line, nothing written, nothing executed."""
    out = tmp_path / "out"
    for name, (change, words) in BROKEN.items():
        folder = tmp_path / name.replace(" ", "_")
        shutil.copytree(trained(script), folder)
        change(folder)
        for args in (("--generate",), ("--train", "--steps", 1, "--out", out)):
            line = refused(script, capsys, *args, "--model", folder, words=words)
            assert line.startswith(f"{script.METHOD}.py: "), name
            assert not out.exists() and not Path(f"{out}.tmp").exists() and not (folder / "executed").exists(), name


def test_decoding_ends_whatever_the_model_says(script, trained, tmp_path, capsys):
    """Weights that are not numbers: no confidence passes a threshold, no comparison is true."""
    for value in (float("nan"), float("inf")):
        folder = tmp_path / str(value)
        shutil.copytree(trained(script), folder)
        reshaped(folder, lambda t: t["model.norm.weight"].fill_(value))
        for temperature in (0, 1):
            flags = ("--problems", 1, "--max_new_tokens", 8, "--temperature", temperature)
            assert run(script, "--generate", "--model", folder, *flags) == 0
            report = json.loads(capsys.readouterr().out.splitlines()[-1])
            assert all(1 <= row["new_tokens"] <= 8 for row in report["rows"])


def test_broken_states_are_not_resumed(script, trained, tmp_path, capsys):
    def without_one(file):
        with safe_open(file, "pt") as held:
            tensors, metadata = {key: held.get_tensor(key) for key in held.keys()}, held.metadata()
        del tensors[next(key for key in tensors if key.startswith("exp_avg."))]
        save_file(tensors, file, metadata=metadata)

    changes = {
        "nothing to resume": lambda file: file.write_text("junk"),
        "of another model": without_one,
    }
    for words, change in changes.items():
        folder = tmp_path / words.replace(" ", "_")
        shutil.copytree(trained(script), folder)
        before = {file.name: file.read_bytes() for file in folder.iterdir() if file.is_file()}
        change(folder / "training_state.safetensors")
        before["training_state.safetensors"] = (folder / "training_state.safetensors").read_bytes()
        refused(script, capsys, "--train", "--resume", "--steps", 9, "--out", folder, words=[words])
        assert before == {file.name: file.read_bytes() for file in folder.iterdir() if file.is_file()}


def test_a_row_that_the_chat_template_refuses(script, trained, tmp_path, capsys):
    folder, out = tmp_path / "model", tmp_path / "out"
    shutil.copytree(trained(script), folder)
    (folder / "chat_template.jinja").write_text(
        "{% for m in messages %}{% if m['role'] == 'system' %}{{ raise_exception('no system') }}{% endif %}"
        "{{ m['content'] }}{% endfor %}"
    )
    row = {"messages": [{"role": role, "content": "3"} for role in ("system", "user", "assistant")]}
    data = jsonl(tmp_path / "data.jsonl", [row] * 4)
    for args in (("--train", "--out", out), ("--generate",)):
        refused(script, capsys, *args, "--model", folder, "--data", data, words=["template refuses", "no system"])
    assert not out.exists()


def test_infilling_refuses_what_is_no_text_and_what_is_too_long(trained, tmp_path, capsys):
    import codila

    model = trained(codila)
    file = jsonl(tmp_path / "rows.jsonl", ['{"prompt": "\\ud800", "suffix": "a"}'])
    for args, word in (
        (("--infill", "a", "\udcff"), "utf-8"),
        (("--infill", "--data", file), "utf-8"),
        (("--infill", "a " * 40, "a", "--max_len", 20), "max_len"),
    ):
        refused(codila, capsys, "--model", model, *args, words=[word])


def test_a_run_does_not_overwrite_another_models_run(script, trained, tmp_path, capsys):
    before = {file.name: file.read_bytes() for file in trained(script).glob("*.json")}
    other = tmp_path / "other"
    backbone, tokenizer = script.tiny_backbone(script.Config())
    backbone.save_pretrained(other)
    tokenizer.save_pretrained(other)
    refused(script, capsys, "--train", "--model", other, "--out", trained(script), words=["name another --out"])
    assert before == {file.name: file.read_bytes() for file in trained(script).glob("*.json")}
