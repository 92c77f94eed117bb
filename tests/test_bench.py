"""The benchmarks and trials stay alive: each runs at a small size and ends as it should. Nothing is timed."""

import dataclasses
import importlib
import json
import re
import shlex
from pathlib import Path

import bench_attention
import bench_decode
import bench_gpu
import bench_loop
import bench_real
import bench_table
import bench_train
import pytest
import stress
import torch
from conftest import TINY


def report(capsys, part=None):
    """Rows of the last line of stdout, which says on what it ran; bench_gpu must be able to show them."""
    found = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert {"device", "threads", "dtype", "torch", "commit", "rows"} <= found.keys()
    if part:
        line = dict(part=part, device="NVIDIA H200")
        assert all(len(bench_gpu.cells(line, row)) == 3 for row in found["rows"])
    return found["rows"]


def test_bench_decode(capsys, monkeypatch):
    monkeypatch.setattr(bench_decode, "copy_bandwidth", lambda device, repeat: 1e10)
    sizes = ["--queries", "1", "3", "--cache", "30", "--repeat", "2"]
    bench_decode.main([*sizes, "--device", "cpu", "--shapes", "tiny"])
    rows = report(capsys, "decode tiny")
    assert [(row["shape"], row["queries"]) for row in rows] == [("tiny", 1), ("tiny", 3)]
    for name in ("ours_ms", "sdpa_ms", "eager_ms"):
        assert all(0 < row[name][1] <= row[name][0] for row in rows)


def test_the_decode_forward_is_the_librarys():
    """Both sides compute the same logits after the same cache."""
    lm = bench_decode.build("tiny", "cpu", torch.float32)
    ids = torch.randint(lm.config.vocab_size, (1, 20))
    with torch.no_grad():
        expected = lm(input_ids=torch.cat([ids, ids[:, :3]], dim=1)).logits[:, -3:]
    assert torch.allclose(bench_decode.our_call(lm, ids, 3)(), expected, atol=1e-4)
    hidden, inner, layers, heads, kv_heads, head_dim, vocab, _ = bench_decode.SHAPES["tiny"]
    a_layer = hidden * head_dim * (2 * heads + 2 * kv_heads) + 2 * head_dim + 3 * hidden * inner + 2 * hidden
    cache = 2 * layers * kv_heads * head_dim * 20
    assert bench_decode.bytes_read(lm, 20) == 4 * (layers * a_layer + hidden + vocab * hidden + cache)


def test_bench_attention(capsys):
    bench_attention.main(["--length", "32", "--repeat", "1", "--device", "cpu"])
    rows = report(capsys, "attention")
    assert len(rows) == 5 and all(row["dense_tflops"] > 0 and 0 < row["allowed"] < 1 for row in rows)


@pytest.mark.parametrize("name", bench_train.SCRIPTS)
def test_bench_train(capsys, name):
    """Both sides take the same step: the losses are equal."""
    sizes = ["--shape", "tiny", "--length", "64", "--repeat", "1", "--device", "cpu"]
    bench_train.main(["--scripts", name, *sizes])
    (row,) = report(capsys, f"train {name}")
    assert row["ours"]["loss"] == pytest.approx(row["library"]["loss"], rel=1e-4) and row["ours"]["loss"] > 0


def test_useful_flops_are_those_of_the_closed_form():
    """Causal rows of 64 tokens, all weights trained: 6 a weight and token, 14 D a head and allowed pair."""
    script = importlib.import_module("refusion")
    changes = bench_train.random_weights("tiny", "cpu", 16, 48)
    flags = ["--batch_size", 2, "--max_len", 64, "--dtype", "float32"]
    model, inputs, cfg = bench_train.prepared_step(script, flags, "tiny", **changes)
    hidden, inner, layers, heads, kv_heads, head_dim, vocab, _ = bench_decode.SHAPES["tiny"]
    weights = hidden * head_dim * (2 * heads + 2 * kv_heads) + 3 * hidden * inner
    scored = (inputs["labels"] != -100).sum().item()
    expected = 6 * 2 * 64 * layers * weights + 6 * scored * hidden * vocab
    expected += 14 * head_dim * heads * layers * 2 * 64 * 65 // 2
    assert bench_train.useful_flops(script, model, inputs, cfg) == expected


def test_bench_loop(capsys):
    bench_loop.main(["--shape", "tiny", "--prompt", "9", "--new", "16", "--device", "cpu"])
    rows = report(capsys, "loop")
    assert [*dict.fromkeys(row["script"] for row in rows)] == bench_train.SCRIPTS and len(rows) > 10
    assert all(row["tokens"] == 16 and row["forwards"] > 0 and 0 < row["outside"] < 1 for row in rows)


@pytest.mark.parametrize("small", [False, True])
def test_commands_of_bench_gpu_parse(monkeypatch, small):
    def parsed(device):
        raise InterruptedError

    for part, command in [pair for _, commands in bench_gpu.STEPS for pair in commands.items()]:
        kind = part.split()[0]
        file, *flags = shlex.split(f"{command} {bench_gpu.SMALL[kind]}" if small else command)
        if kind == "tests":
            continue
        module = importlib.import_module(Path(file).stem)
        if kind == "run":
            fields = [field.name for field in dataclasses.fields(module.Config)]
            names = [flag[2:] for flag in flags if flag.startswith("--")]
            assert {*names} <= {"train", "generate", *fields}, part
        else:
            monkeypatch.setattr(module, "header", parsed)
            with pytest.raises(InterruptedError):
                module.main(flags)
    assert sum(step[0] for step in bench_gpu.STEPS[:4]) <= 4 * 60  # what --minutes 4 is for


def test_bench_gpu_keeps_what_it_has_and_says_what_failed(capsys, monkeypatch, tmp_path):
    row = dict(label="x", right=1, problems=2, tokens_per_forward=3.5, x_ar=1.5)
    good = f"import json, os\nopen({str(tmp_path / 'calls')!r}, 'a').write('x')\n"
    good += f"print(json.dumps(dict(rows=[{row}])))"
    bad = "print('| half |')\nraise MemoryError('full | up')"
    for name, text in dict(good=good, bad=bad, slow="import time\ntime.sleep(60)").items():
        (tmp_path / f"{name}.py").write_text(text)
    monkeypatch.setattr(bench_gpu, "ROOT", tmp_path)
    commands = {"run good": "good.py --train", "run bad": "bad.py"}
    monkeypatch.setattr(bench_gpu, "STEPS", [(30, commands), (0.5, {"run slow": "slow.py"})])
    argv = ["--device", "cpu", "--out", str(tmp_path / "gpu.jsonl")]
    assert bench_gpu.main(argv) == 1
    out = capsys.readouterr().out
    assert "| run good | x | 1/2 right, 3.5 tokens a forward, 1.5 x AR, " in out
    assert "| run bad |  | status 1: MemoryError: full / up |  |\n| run slow |  | not done in" in out
    assert [line["part"] for line in json.loads(out.splitlines()[-1])["parts"]] == [*commands, "run slow"]
    assert bench_gpu.main([*argv, "--parts", "run good"]) == 0
    assert "| run good | x | 1/2 right" in capsys.readouterr().out
    (line,) = (tmp_path / "gpu.jsonl").read_text().splitlines()
    assert json.loads(line)["rows"] == [row] and (tmp_path / "calls").read_text() == "x"
    assert bench_gpu.main([*argv, "--minutes", "0"]) == 1
    assert capsys.readouterr().out.count("no time left") == 4
    (tmp_path / "good.py").write_text(good + "\n")  # other code: run again
    assert bench_gpu.main([*argv, "--parts", "run good"]) == 0 and (tmp_path / "calls").read_text() == "xx"


def test_bench_gpu_without_a_gpu_is_one_line(capsys, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert bench_gpu.main([]) == 2
    said = capsys.readouterr()
    assert said.out == "" and len(said.err.splitlines()) == 1


def test_bench_table_keeps_what_it_has(capsys, monkeypatch, tmp_path):
    calls = []

    def run(key):
        calls.append((key["script"], key["seed"]))
        if key["seed"] == 2:
            raise ValueError("status 2")
        row = dict(label="x", problems=64, right=60 + key["seed"], x_ar=1.5)
        return dict(seconds=7.0 + key["seed"], cpu_seconds=6.0,
                    rows=[row | dict(tokens_per_forward=2.0 + key["seed"])])  # fmt: skip

    monkeypatch.setattr(bench_table, "run", run)
    argv = ["--scripts", "refusion", "--out", str(tmp_path / "table.jsonl"), "--device", "cpu", "--seeds"]
    assert bench_table.main([*argv, "0"]) == 0 and bench_table.main([*argv, "0", "1"]) == 0
    out = capsys.readouterr().out
    assert "| refusion | x | 1 | 2 | 60/64 | 60.5 | 2 | 2.5 | 1.5 | 1.5 | 8 | 7.5 |" in out
    assert calls == [("refusion", 0), ("refusion", 1)]
    assert bench_table.main([*argv, "1", "2"]) == 1 and calls[2:] == [("refusion", 2)]
    assert report(capsys)[0]["right_worst"] == 61
    other = bench_table.main([*argv, "0", "--steps", "3"])
    assert other == 0 and calls[3:] == [("refusion", 0)], "other flags"


def test_bench_table_takes_the_last_line_of_a_run(monkeypatch, tmp_path):
    row = "[sys.argv, os.environ['OMP_NUM_THREADS']]"
    stub = f"import json, os, sys\nprint(json.dumps(dict(rows={row})))\nsys.exit(STATUS)"
    monkeypatch.setattr(bench_table, "ROOT", tmp_path)
    key = dict(script="refusion", seed=5, threads=2, flags=["--steps", "3"])
    (tmp_path / "refusion.py").write_text(stub.replace("STATUS", "0"))
    argv, threads = bench_table.run(key)["rows"]
    assert argv[1:5] == ["--train", "--generate", "--seed", "5"] and argv[7:] == ["--steps", "3"]
    assert threads == "2"
    (tmp_path / "refusion.py").write_text(stub.replace("STATUS", "2"))
    with pytest.raises(ValueError, match="status 2"):
        bench_table.run(key)


def test_bench_real_goes_on_and_decodes(capsys, monkeypatch, tmp_path):
    """A stage that ran out of time is told to stop, and resumed; each setting is a row beside plain AR's."""
    stub = tmp_path / "refusion.py"
    stub.write_text("import pathlib, sys, time\nwords = sys.argv[1:]\nout = words[words.index('--out') + 1]\n"
                    "pathlib.Path(out, 'step-1').mkdir(parents=True, exist_ok=True)\n"
                    "if '--resume' not in words:\n    import signal\n"
                    "    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))\n    time.sleep(60)\n")  # fmt: skip
    monkeypatch.setattr(bench_real, "ROOT", tmp_path)
    # without torch, whose import may take longer than the stage is given
    monkeypatch.setattr(bench_real, "START", re.sub(".*torch.*\n", "import os, runpy, sys\n", bench_real.START))
    settings = [dict(tau_slot=0.9), dict(tau_slot=0.1)]
    monkeypatch.setattr(bench_real, "DECODE", dict(refusion=("--slot_size 4 --serial_blocks 1", settings)))
    argv = ["--out", str(tmp_path / "out"), "--device", "cpu", "--problems", "3", "--test", str(TINY / "test.jsonl"),
            "--data", str(TINY / "train.jsonl")]  # fmt: skip
    for name in ("ar", "refusion"):
        (tmp_path / "out").mkdir(exist_ok=True)
        (tmp_path / "out" / name).symlink_to(TINY / "ar")
    few = tmp_path / "few.jsonl"
    few.write_text("".join((TINY / "train.jsonl").read_text().splitlines(True)[:4]))
    more = ["--model", str(TINY / "ar"), "--data", str(few), "--max_len", "96", "--steps", "5"]
    args = bench_real.settings_of([*argv, "--out", str(tmp_path / "new"), *more])
    made = bench_real.train("refusion", args, 3)
    assert made | dict(minutes=0) == dict(flags=made["flags"], minutes=0, done=False)
    bench_real.show([made | dict(part="train refusion", minutes=2.0)], args)
    shown = capsys.readouterr().out
    assert "| refusion | ar | 160 | " in shown and "| 2 | False |" in shown, "5 steps of 32, not those of TRAIN"
    assert bench_real.train("refusion", args, 60)["done"]
    assert bench_real.main([*argv, "--parts", "decode"]) == 0
    assert bench_real.main([*argv, "--parts", "decode"]) == 0, "nothing is run again"
    lines = report(capsys)
    assert [(line["dtype"], len(line["rows"])) for line in lines] == [("float32", 3), ("bfloat16", 2)]
    assert lines[0]["rows"][0]["right"] == 3 and lines[0]["rows"][2]["settings"] == settings[1]
    assert bench_real.interval(95, 100) == "89-98"  # Wilson's own, by hand


def test_python_rows_are_small_functions(tmp_path, monkeypatch):
    source = "class A:\n    def f(self, x):\n        y = x + 1\n        return y * 2\n\ndef g():\n    'words'\n    return 1\n"
    (tmp_path / "a.py").write_text(source + "async def h():\n    pass\ndef k():\n    return " + "1 + " * 30 + "1\n")
    (tmp_path / "broken.py").write_text("def")
    monkeypatch.setattr(bench_real.sysconfig, "get_path", lambda name: tmp_path)
    args = bench_real.settings_of(["--model", str(TINY / "ar"), "--out", str(tmp_path)])
    train, test = bench_real.rows_of("codila", args)
    assert train.read_text() == "" and bench_real.rows_of("refusion", args) == (args.data, args.test)
    (row,) = map(json.loads, test.read_text().splitlines())
    assert row == dict(prompt="def f(self, x):", response="\n    y = x + 1\n    return y * 2")
    judged = {text: bench_real.is_python(text, None, None) for text in (row["response"], " pass", "", "\nreturn", "\0")}
    assert list(judged.values()) == [True, True, False, False, False]


@pytest.mark.parametrize("what, script", [("fuzz", "refusion"), ("long", "orthrus")])
def test_trials(capsys, what, script):
    stress.main([what, "--scripts", script, "--trials", "4"])
    assert capsys.readouterr().out.startswith(f"{what} {script}: 4 ")
