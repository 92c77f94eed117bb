"""The benchmarks stay alive: each runs at a small size and ends in a JSON line. Nothing is timed here."""

import json

import bench_attention
import bench_decode


def last_json(capsys):
    return json.loads(capsys.readouterr().out.splitlines()[-1])


def test_bench_decode(capsys):
    bench_decode.main(["--shapes", "tiny", "--queries", "1", "3", "--cache", "300", "--repeat", "2", "--device", "cpu"])
    report = last_json(capsys)
    assert [(row["shape"], row["queries"]) for row in report["rows"]] == [("tiny", 1), ("tiny", 3)]
    assert all(0 < row["ours_min"] <= row["ours_ms"] <= row["ours_max"] and row["share"] > 0 for row in report["rows"])


def test_weight_bytes_counts_what_a_forward_reads():
    lm = bench_decode.build("tiny", "cpu", __import__("torch").float32)
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
