"""The benchmarks stay alive: each runs at a small size and ends in a JSON line. Nothing is timed here."""

import json
import math
import xml.etree.ElementTree as ElementTree
from types import SimpleNamespace

import bench_attention
import bench_decode
import bench_loop
import bench_table
import bench_train
import pytest
import torch

import refusion


def last_json(capsys):
    return json.loads(capsys.readouterr().out.splitlines()[-1])


def test_bench_decode(capsys):
    bench_decode.main(["--shapes", "tiny", "--queries", "1", "3", "--cache", "300", "--repeat", "2", "--device", "cpu"])
    report = last_json(capsys)
    assert [(row["shape"], row["queries"]) for row in report["rows"]] == [("tiny", 1), ("tiny", 3)]
    assert all(0 < row["ours_min"] <= row["ours_ms"] <= row["ours_max"] and row["share"] > 0 for row in report["rows"])


def test_weight_bytes_counts_what_a_forward_reads():
    lm = bench_decode.build("tiny", "cpu", torch.float32)
    hidden, inner, layers, heads, kv_heads, head_dim, vocab, _ = bench_decode.SHAPES["tiny"]
    attention = hidden * head_dim * (2 * heads + 2 * kv_heads) + 2 * head_dim
    assert bench_decode.weight_bytes(lm) == 4 * (
        layers * (attention + 3 * hidden * inner + 2 * hidden) + hidden + vocab * hidden
    )


def test_bench_attention(capsys):
    bench_attention.main(["--length", "32", "--repeat", "1", "--device", "cpu"])
    report = last_json(capsys)
    assert len(report["rows"]) == 5 and all(
        row["dense_tflops"] > 0 and 0 < row["allowed"] < 1 for row in report["rows"]
    )


def test_bench_loop(capsys):
    bench_loop.main(["--shape", "tiny", "--prompt", "9", "--new", "8", "--device", "cpu"])
    rows = last_json(capsys)["rows"]
    assert [row["script"] for row in rows] == list(bench_train.SCRIPTS)
    assert all(row["forwards"] > 0 and 0 < row["inside_ms"] < row["total_ms"] for row in rows)


@pytest.mark.parametrize("script", bench_train.SCRIPTS)
def test_bench_train(capsys, script):
    """Both sides take the same step: the losses are equal."""
    bench_train.main(["--scripts", script, "--shape", "tiny", "--length", "32", "--repeat", "1", "--device", "cpu"])
    (row,) = last_json(capsys)["rows"]
    assert row["loss"] == pytest.approx(row["library_loss"], rel=1e-4) and 0 < row["ours_min"] <= row["ours_ms"]
    assert row["useful_flop_s"] == pytest.approx(row["useful_flop"] / row["ours_ms"] * 1e3)


def test_useful_operations_are_those_of_the_formula():
    """6 for each weight of a layer and token, 6 for each weight of the head and label, 12 H D for each allowed pair."""
    model, inputs, cfg, loss = bench_train.setup(refusion, "tiny", 32, 2, "cpu")
    hidden, inner, layers, heads, kv_heads, head_dim, vocab, _ = bench_decode.SHAPES["tiny"]
    weights = layers * (hidden * head_dim * (2 * heads + 2 * kv_heads) + 3 * hidden * inner)
    pairs = layers * 2 * 32 * 33 // 2
    labels = int((inputs["labels"] != -100).sum())
    expected = 6 * (weights * 64 + hidden * vocab * labels) + 12 * heads * head_dim * pairs
    assert bench_train.useful_operations(refusion, model, inputs, cfg, loss) == expected


def test_accuracy_under_parallelism():
    assert bench_table.aup([(1.0, 80.0)]) == 80.0
    assert bench_table.aup([(2.0, 80.0), (1.0, 80.0)]) == 160.0  # no loss: the area under a level line
    assert bench_table.aup([(1.0, 80.0), (2.0, 80.0), (3.0, 74.9)]) == 160.0  # more than 5 points below y_1: dropped
    weight = math.exp(-3 * (1 - 76 / 80))
    assert bench_table.aup([(1.0, 80.0), (3.0, 76.0)]) == pytest.approx(80 + 2 * (80 + 76 * weight) / 2)
    low, high = bench_table.wilson(50, 100)
    assert low == pytest.approx(40.38, abs=0.01) and high == pytest.approx(59.62, abs=0.01)
    assert bench_table.wilson(64, 64)[1] == pytest.approx(100) and bench_table.wilson(0, 10)[0] == 0


def test_table_and_curve_from_kept_results():
    row = {"label": "x", "problems": 4, "new_tokens": 8, "forwards": 4, "tokens_per_forward": 2.0, "tok_s": 10.0, "right": 3,
           "setting": "tau 0.9", "default": True, "x_ar": 2.0, "same_as_ar": 1}  # fmt: skip
    ar = row | {"label": "plain AR", "tokens_per_forward": 1.0}
    results = {"train:base": {"minutes": 1.0, "peak_mib": 5.0},
               "train:refusion": {"minutes": 2.0, "peak_mib": 6.0, "tokens": 1234567},
               "sweep:refusion": {"ar": ar, "rows": [row], "peak_mib": 7.0, "dtype": "float32"}}  # fmt: skip
    text, report = bench_table.lines(results, SimpleNamespace(model="tiny"))
    assert "| refusion | tau 0.9 | 3/4 (30-95) | 2.00 | 10 | 2.00 | 150 | 1/4 | 7 / 6 | 2.0 | 1.23 M |" in text
    assert report["refusion"]["rows"] == [row] and len(ElementTree.fromstring(bench_table.svg(results))) > 5
    drawn = bench_table.curve(results).splitlines()
    assert drawn[0].startswith("  80 % |") and drawn[0].endswith("R") and drawn[-1] == "R refusion"
    assert len(drawn) == 4 and not any("R" in line for line in drawn[1:-1])  # a row with a point, the axis, the legend
