"""Attention, forward and backward, for every training mask: flex, SDPA with the dense mask, causal flash beside them.

    python tests/bench_attention.py                                     (short on CPU, 2 x 2048 on a GPU)

Every mask has 2 x length queries; 16 query and 8 key heads of 128, bfloat16 on a GPU. Useful operations only: 4 H D for
each allowed pair forward, 2.5 times as many backward. Where flex does not run (no backward on CPU) the cell is "-".
The last line of stdout is JSON.
"""

import argparse
import json
import subprocess
import sys
from pathlib import Path

import torch
import torch.nn.functional as F

sys.path.insert(0, str(Path(__file__).resolve().parent))
from bench_decode import milliseconds

import common
import kernels
from common import build_mask, dense


def masks(L, device):
    """name -> (mask_mod, queries, keys); 2 L queries each."""
    block = min(32, L // 4)
    anchors = torch.arange(1, L - block, max((L - block) // (2 * L // block), 1), device=device)[None, : 2 * L // block]
    anchors = F.pad(anchors, (0, 2 * L // block - anchors.shape[1]), value=1)
    segment_ids = torch.arange(2 * L, device=device)[None] // max(L // 8, 1)
    return {
        "causal (ReFusion)": (common.causal(), 2 * L, 2 * L),
        "segments (CoDiLA)": (common.segments(segment_ids), 2 * L, 2 * L),
        "block_causal (D2F)": (common.block_causal(block, torch.tensor([L // 3], device=device)), 2 * L, 2 * L),
        "noisy_clean (Fast-dLLM v2)": (common.noisy_clean(L, block), 2 * L, 2 * L),
        "dual_view (Orthrus)": (common.dual_view(L, block, anchors), 2 * L, 3 * L),
    }


def step(q, k, v, call):
    for x in (q, k, v):
        x.grad = None
    call().sum().backward()


def main(argv=None):
    on_gpu = torch.cuda.is_available()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--length", type=int, default=2048 if on_gpu else 128)
    parser.add_argument("--repeat", type=int, default=20 if on_gpu else 3)
    parser.add_argument("--device", default="cuda" if on_gpu else "cpu")
    args = parser.parse_args(argv)
    cuda = args.device.startswith("cuda")
    H, G, D = (16, 8, 128) if cuda else (4, 2, 32)
    dtype = torch.bfloat16 if cuda else torch.float32
    name = torch.cuda.get_device_name(args.device) if cuda else "CPU"
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True).stdout.strip()
    print(f"{name}, {str(dtype)[6:]}, {H}/{G} heads of {D}, 2 x {args.length} queries, commit {commit or '-'}")
    print("| mask | allowed | flex TFLOP/s | SDPA dense TFLOP/s | causal flash TFLOP/s | flex / dense |")
    print("| --- | --- | --- | --- | --- | --- |")
    rows = []
    for title, (mask_mod, T, S) in masks(args.length, args.device).items():
        q, k, v = (
            torch.randn(1, n, m, D, device=args.device, dtype=dtype, requires_grad=True)
            for n, m in ((H, T), (G, S), (G, S))
        )
        mask = dense(mask_mod, 1, T, S, args.device)
        pairs = int(mask.sum())
        work = 3.5 * 4 * H * D * 1e-9  # per pair and ms: TFLOP/s
        calls = {"dense": (lambda: kernels.attention(q, k, v, mask), pairs)}
        if cuda:
            block_mask = build_mask(mask_mod, 1, T, S, args.device)
            calls["flex"] = (lambda: kernels.attention(q, k, v, block_mask), pairs)
        causal_kv = [x[:, :, :T] for x in (k, v)]
        calls["flash"] = (
            lambda: F.scaled_dot_product_attention(q, *causal_kv, is_causal=True, enable_gqa=True),
            T * (T + 1) // 2,
        )
        row = {"mask": title, "queries": T, "keys": S, "allowed": round(pairs / (T * S), 4)}
        for key, (call, useful) in calls.items():
            for _ in range(3 if cuda else 1):
                step(q, k, v, call)
            row[f"{key}_ms"] = milliseconds(lambda: step(q, k, v, call), args.device, args.repeat)[0]
            row[f"{key}_tflops"] = work * useful / row[f"{key}_ms"]
        row["flex_refused"] = kernels.refused("flex_attention")
        rows.append(row)
        flex = f"{row['flex_tflops']:.1f} | " if cuda else "- | "
        gain = f"{row['flex_tflops'] / row['dense_tflops']:.1f}" if cuda else "-"
        print(
            f"| {title} | {row['allowed']:.2f} | {flex}{row['dense_tflops']:.3f} | {row['flash_tflops']:.3f} | {gain} |"
        )
    print(
        json.dumps(
            {"device": name, "dtype": str(dtype)[6:], "commit": commit, "torch": torch.__version__, "rows": rows}
        )
    )


if __name__ == "__main__":
    main()
