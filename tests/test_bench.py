"""The benchmarks and trials stay alive: each runs at a small size and ends as it should. Nothing is timed."""

import json

import bench_attention
import bench_decode
import bench_loop
import bench_table
import bench_train
import pytest
import stress
import torch


def report(capsys):
    """The last line of stdout, which says on what it ran."""
    found = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert {"device", "threads", "dtype", "torch", "commit", "rows"} <= found.keys()
    return found


def test_bench_decode(capsys, monkeypatch):
    monkeypatch.setattr(bench_decode, "copy_bandwidth", lambda device, repeat: 1e10)
    bench_decode.main(
        ["--queries", "1", "3", "--cache", "300", "--repeat", "2", "--device", "cpu", "--shapes", "tiny"]
    )
    rows = report(capsys)["rows"]
    assert [(row["shape"], row["queries"]) for row in rows] == [("tiny", 1), ("tiny", 3)]
    assert all(
        0 < row[f"{who}_ms"][1] <= row[f"{who}_ms"][0] for row in rows for who in ("ours", "sdpa", "eager")
    )


def test_the_decode_forward_is_the_librarys():
    """Both sides compute the same logits after the same cache."""
    lm = bench_decode.build("tiny", "cpu", torch.float32)
    ids = torch.randint(lm.config.vocab_size, (1, 20))
    with torch.no_grad():
        expected = lm(input_ids=torch.cat([ids, ids[:, :3]], dim=1)).logits[:, -3:]
    assert torch.allclose(bench_decode.our_call(lm, ids, 3)(), expected, atol=1e-4)
    hidden, inner, layers, heads, kv_heads, head_dim, vocab, _ = bench_decode.SHAPES["tiny"]
    a_layer = hidden * head_dim * (2 * heads + 2 * kv_heads) + 2 * head_dim + 3 * hidden * inner + 2 * hidden
    assert bench_decode.weight_bytes(lm) == 4 * (layers * a_layer + hidden + vocab * hidden)


def test_bench_attention(capsys):
    bench_attention.main(["--length", "32", "--repeat", "1", "--device", "cpu"])
    rows = report(capsys)["rows"]
    assert len(rows) == 5 and all(row["dense_tflops"] > 0 and 0 < row["allowed"] < 1 for row in rows)


@pytest.mark.parametrize("name", bench_train.SCRIPTS)
def test_bench_train(capsys, name):
    """Both sides take the same step: the losses are equal."""
    sizes = ["--shape", "tiny", "--length", "64", "--repeat", "1", "--device", "cpu"]
    bench_train.main(["--scripts", name, *sizes])
    (row,) = report(capsys)["rows"]
    assert row["ours"]["loss"] == pytest.approx(row["library"]["loss"], rel=1e-4) and row["ours"]["loss"] > 0


def test_bench_loop(capsys):
    bench_loop.main(["--shape", "tiny", "--prompt", "9", "--new", "32", "--device", "cpu"])
    rows = report(capsys)["rows"]
    assert {row["script"] for row in rows} == {*bench_train.SCRIPTS} and len(rows) > 2 * len(
        bench_train.SCRIPTS
    )
    assert all(row["tokens"] == 32 and row["forwards"] > 0 and 0 < row["outside"] < 1 for row in rows)


def test_bench_table_keeps_what_it_has(capsys, monkeypatch, tmp_path):
    calls = []

    def run(key):
        calls.append((key["script"], key["seed"]))
        if key["seed"] == 2:
            raise ValueError("status 2")
        row = dict(
            label="x", problems=64, right=60 + key["seed"], tokens_per_forward=2.0 + key["seed"], x_ar=1.5
        )
        return dict(seconds=7.0 + key["seed"], cpu_seconds=6.0, rows=[row])

    monkeypatch.setattr(bench_table, "run", run)
    argv = ["--scripts", "refusion", "--out", str(tmp_path / "table.jsonl"), "--device", "cpu", "--seeds"]
    assert bench_table.main([*argv, "0"]) == 0 and bench_table.main([*argv, "0", "1"]) == 0
    out = capsys.readouterr().out
    assert "| refusion | x | 1 | 2 | 60/64 | 60.5 | 2 | 2.5 | 1.5 | 1.5 | 8 | 7.5 |" in out
    assert calls == [("refusion", 0), ("refusion", 1)]
    assert bench_table.main([*argv, "1", "2"]) == 1 and calls[2:] == [("refusion", 2)]
    assert report(capsys)["rows"][0]["right_worst"] == 61
    assert bench_table.main([*argv, "0", "--steps", "3"]) == 0 and calls[3:] == [("refusion", 0)], (
        "other flags"
    )


def test_bench_table_takes_the_last_line_of_a_run(monkeypatch, tmp_path):
    row = "[sys.argv, os.environ['OMP_NUM_THREADS']]"
    stub = f"import json, os, sys\nprint(json.dumps(dict(rows={row})))\nsys.exit(STATUS)"
    monkeypatch.setattr(bench_table, "ROOT", tmp_path)
    key = dict(script="refusion", seed=5, threads=2, flags=["--steps", "3"])
    (tmp_path / "refusion.py").write_text(stub.replace("STATUS", "0"))
    argv, threads = bench_table.run(key)["rows"]
    assert (
        argv[1:5] == ["--train", "--generate", "--seed", "5"]
        and argv[7:] == ["--steps", "3"]
        and threads == "2"
    )
    (tmp_path / "refusion.py").write_text(stub.replace("STATUS", "2"))
    with pytest.raises(ValueError, match="status 2"):
        bench_table.run(key)


@pytest.mark.parametrize("what, script", [("fuzz", "refusion"), ("long", "orthrus")])
def test_trials(capsys, what, script):
    stress.main([what, "--scripts", script, "--trials", "8"])
    assert capsys.readouterr().out.startswith(f"{what} {script}: 8 ")
