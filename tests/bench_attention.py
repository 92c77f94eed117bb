"""Attention, forward and backward, under every training mask: compiled flex, dense SDPA, causal flash.

    python tests/bench_attention.py                               (short on CPU, 2 x 2048 queries on a GPU)

flex is what training runs on CUDA, dense SDPA what it runs elsewhere; flash is PyTorch's own on as many
causal queries, for comparison: it has no other mask. Gradients are dense tensors, as a following layer gives
them. TFLOP/s count useful operations alone: 4 H D for each allowed pair forward, 2.5 times as many backward.
16 query and 8 key heads of 128 on a GPU. Where something does not run the cell is "-". The last line of
stdout is JSON.
"""

import json

import torch
import torch.nn.functional as F
from bench_decode import header, milliseconds, parser, table
from torch.nn.attention import SDPBackend, sdpa_kernel

import common
from common import build_mask, dense, kernels


def masks(L, device):
    """name -> (mask_mod, queries, keys); 2 L queries each."""
    block = min(32, L // 4)
    anchors = torch.linspace(1, L - block, 2 * L // block, device=device).long()[None]
    segment_ids = torch.arange(2 * L, device=device)[None] // max(L // 8, 1)
    prompt_lens = torch.tensor([L // 3], device=device)
    return {
        "causal (ReFusion)": (common.causal(), 2 * L, 2 * L),
        "segments (CoDiLA)": (common.segments(segment_ids), 2 * L, 2 * L),
        "block_causal (D2F)": (common.block_causal(block, prompt_lens), 2 * L, 2 * L),
        "noisy_clean (Fast-dLLM v2)": (common.noisy_clean(L, block), 2 * L, 2 * L),
        "dual_view (Orthrus)": (common.dual_view(L, block, anchors), 2 * L, 3 * L),
    }


def flash(q, k, v):
    with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
        return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)


def main(argv=None):
    args = parser(__doc__, length=(128, 2048), repeat=(3, 20)).parse_args(argv)
    head = header(args.device)
    cuda = args.device.startswith("cuda")
    H, G, D = (16, 8, 128) if cuda else (4, 2, 32)
    print(f"{H}/{G} heads of {D}, 2 x {args.length} queries, forward and backward\n")
    units = [f"{key} {unit}" for unit in ("ms", "TFLOP/s") for key in ("flex", "dense", "flash")]
    table("mask", "allowed", *units, "dense / flex")
    table(*["---"] * 9)
    rows = []
    for name, (mask_mod, T, S) in masks(args.length, args.device).items():
        shapes = dict(q=(1, H, T, D), k=(1, G, S, D), v=(1, G, S, D), grad=(1, H, T, D))
        place = dict(device=args.device, dtype=getattr(torch, head["dtype"]))
        x = {key: torch.randn(shape, **place, requires_grad=key != "grad") for key, shape in shapes.items()}
        mask = dense(mask_mod, 1, T, S, args.device)
        pairs = int(mask.sum())
        calls = dict(dense=lambda: kernels.attention(x["q"], x["k"], x["v"], mask))
        calls["flash"] = lambda: flash(x["q"], x["k"][:, :, :T], x["v"][:, :, :T])
        if cuda:
            block_mask = build_mask(mask_mod, 1, T, S, args.device)
            calls["flex"] = lambda: kernels.attention(x["q"], x["k"], x["v"], block_mask)
        row = dict(mask=name, queries=T, keys=S, allowed=pairs / (T * S))
        for key, call in calls.items():

            def step():
                torch.autograd.grad(call(), [x["q"], x["k"], x["v"]], x["grad"])

            try:
                step()  # compiles
                row[f"{key}_ms"] = milliseconds(step, args.device, args.repeat)[0]
            except RuntimeError as error:  # flash has no kernel for this device or type
                print(f"{key}: {str(error).splitlines()[0]}")
                continue
            useful = T * (T + 1) // 2 if key == "flash" else pairs
            row[f"{key}_tflops"] = 3.5 * 4 * H * D * useful * 1e-9 / row[f"{key}_ms"]
        row["flex_refused"] = kernels.refused("flex_attention")
        rows.append(row)
        columns = [f"{key}_{unit}" for unit in ("ms", "tflops") for key in ("flex", "dense", "flash")]
        gain = row["dense_ms"] / row["flex_ms"] if "flex_ms" in row else "-"
        table(name, row["allowed"], *(row.get(column, "-") for column in columns), gain)
    print(json.dumps(head | dict(heads=[H, G, D], rows=rows)))


if __name__ == "__main__":
    main()
