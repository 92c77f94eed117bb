"""One training step, forward and backward, of each script: ours against the same step on the library's forward.

    python tests/bench_train.py                                     (tiny shape on CPU, 0.6B with rows of 2048 on a GPU)
    python tests/bench_train.py --scripts refusion --shape 0.6B --length 2048 --batch 2

Rows are random tokens, a quarter of each the prompt; weights are random in Qwen3 shapes, in float32, under bfloat16
autocast on a GPU. The library's side: its own forward with SDPA and a dense mask, logits of every row at once. Where
a step needs other projections than the library's (D2F's adapter, Orthrus's second view) that part runs on the same
layers one by one, uncompiled. tokens/s counts tokens of the data, not their copies. useful: products that the method
asks for (masked pairs not counted, what is recomputed not counted), over the chip's dense bfloat16 rate where that is
known. Times are medians with the smallest and the largest; the last line of stdout is JSON.
"""

import argparse
import contextlib
import importlib
import json
import subprocess
import sys
import time
from pathlib import Path
from unittest import mock

import torch
import torch.nn.functional as F

sys.path[:0] = [str(Path(__file__).resolve().parent), str(Path(__file__).resolve().parent.parent)]
from bench_decode import SHAPES, build, milliseconds

import kernels
from common import dense, own_projection, prepare, walk

SCRIPTS = ("refusion", "d2f", "fastdllm_v2", "orthrus", "codila")
DENSE_RATE = {"H100": 989e12, "H200": 989e12, "A100": 312e12}  # bfloat16 without sparsity, by the maker's data sheets


def random_model(script, shape, weights_dtype, **changes):
    """(model, cfg) of a script at the start of its own stage, random weights of weights_dtype."""
    own = script.TINY if shape == "tiny" else {"aux": "tiny"} if script.METHOD == "codila" else {}
    cfg, vocab = script.Config(**own | changes), SHAPES[shape][6]
    cfg.mask_id, cfg.eos_id, cfg.vocab_len = 1, 0, vocab - 2
    script.check(cfg)

    def aux_of_the_same_shape(*args, tiny=getattr(script, "load_aux", None)):
        aux_model = build(shape, cfg.device, weights_dtype)
        aux_model.config.codila = tiny(*args)[0].config.codila  # of the built-in one: which ids are shared
        return aux_model, None

    backbone = prepare(build(shape, cfg.device, weights_dtype))
    backbone.config.mask_token_id = cfg.mask_id
    with mock.patch.object(script, "load_aux", aux_of_the_same_shape, create=True):
        return script.enter_stage(backbone, script.METHOD, None, cfg), cfg


def setup(script, shape, length, batch, device):
    """(model, inputs, cfg, loss) of one step of the method's own stage, everything drawn from fixed seeds."""
    low = "bfloat16" if device.startswith("cuda") else "float32"
    sizes = {"batch_size": batch, "max_len": length}
    model, cfg = random_model(script, shape, torch.float32, device=device, dtype=low, **sizes)
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(2, cfg.vocab_len, (batch, length - 1), generator=generator).tolist()
    rows = [{"prompt_ids": row[: length // 4], "answer_ids": [*row[length // 4 :], cfg.eos_id]} for row in ids]
    stage = script.stages(cfg)[-1]
    packed = stage.pack(rows, cfg)[:batch]
    inputs = stage.build(packed, stage.draw(packed, cfg, generator), cfg)
    model.train()
    for lm in {id(m): m for m in model.modules() if hasattr(m, "set_attn_implementation")}.values():
        lm.set_attn_implementation("sdpa")
    return model, {key: value.to(device) for key, value in inputs.items()}, cfg, stage.loss


def library_walk(backbone, input_ids, position_ids, attn_mask, layer_kvs=None, write_idx=None, *,
                 project=own_projection, compiled=None, checkpointing=False):  # fmt: skip
    """walk's signature on the library's own forward, where that can do it; else our plain layers."""
    if layer_kvs is not None or project is not own_projection:
        return walk(backbone, input_ids, position_ids, attn_mask, layer_kvs, write_idx, project=project, compiled=False)
    embeds = input_ids if input_ids.is_floating_point() else backbone.model.embed_tokens(input_ids)
    mask = attn_mask.expand(len(embeds), -1, -1, -1)
    return backbone.model(
        inputs_embeds=embeds, position_ids=position_ids, attention_mask=mask, use_cache=False
    ).last_hidden_state


def full_token_nll(backbone, hidden, labels):
    """-log p of every label from the logits of every row at once."""
    logits = backbone.lm_head(hidden).float()
    return F.cross_entropy(logits.flatten(0, -2), labels.flatten(), reduction="none").view(labels.shape)


@contextlib.contextmanager
def on_the_library(script):
    """The script's step on the library's forward, dense masks and whole logits."""
    changes = {"walk": library_walk, "token_nll": full_token_nll,
               "build_mask": lambda mask_mod, B, T, S, device: dense(mask_mod, B, T, S, device),
               "checkpoint": lambda function, *args, use_reentrant: function(*args)}  # fmt: skip
    with contextlib.ExitStack() as stack:
        for name, change in changes.items():
            if hasattr(script, name):
                stack.enter_context(mock.patch.object(script, name, change))
        yield


def useful_operations(script, model, inputs, cfg, loss_of):
    """Multiply-adds, doubled, of one step: Linear layers and allowed pairs of attention, forward and backward.

    Backward costs as much as forward once for the input and once for the weight, where each wants a gradient.
    """
    total, attention = 0, kernels.attention

    def linear(module, args, out):
        nonlocal total
        wanted = torch.is_grad_enabled() * (1 * args[0].requires_grad + 1 * module.weight.requires_grad)
        total += 2 * out.numel() * module.in_features * (1 + wanted)

    def counted(q, k, v, mask=None):
        nonlocal total
        B, H, T, D = q.shape
        allowed = B * T * k.shape[2] if mask is None else int(mask.expand(B, 1, T, k.shape[2]).sum())
        total += 4 * H * D * allowed * (1 + 2 * (torch.is_grad_enabled() and q.requires_grad))
        return attention(q, k, v, mask)

    hooks = [m.register_forward_hook(linear) for m in model.modules() if isinstance(m, torch.nn.Linear)]
    plain = {"build_mask": lambda mask_mod, B, T, S, device: dense(mask_mod, B, T, S, device)}
    with mock.patch.object(kernels, "attention", counted), mock.patch.multiple(script, **plain):
        loss_of(model, inputs, cfg)
    for hook in hooks:
        hook.remove()
    return total


def timed(model, inputs, cfg, loss_of, repeat):
    """(loss, (median, smallest, largest) ms, peak MiB or None, seconds of the first step) of forward and backward."""
    cuda = cfg.device.startswith("cuda")

    def step():
        with torch.autocast(torch.device(cfg.device).type, torch.bfloat16, enabled=cuda):
            loss, _ = loss_of(model, inputs, cfg)
        loss.backward()
        model.zero_grad(set_to_none=True)
        return loss.item()

    start = time.perf_counter()
    torch.manual_seed(0)  # dropout of an adapter
    loss = step()
    first = time.perf_counter() - start
    step()
    if cuda:
        torch.cuda.reset_peak_memory_stats()
    times = milliseconds(step, cfg.device, repeat)
    return loss, times, torch.cuda.max_memory_allocated() / 2**20 if cuda else None, first


def main(argv=None):
    on_gpu = torch.cuda.is_available()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--scripts", nargs="+", choices=SCRIPTS, default=list(SCRIPTS))
    parser.add_argument("--shape", choices=SHAPES, default="0.6B" if on_gpu else "tiny")
    parser.add_argument("--length", type=int, default=2048 if on_gpu else 128)
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--repeat", type=int, default=10 if on_gpu else 3)
    parser.add_argument("--device", default="cuda" if on_gpu else "cpu")
    args = parser.parse_args(argv)
    device = torch.cuda.get_device_name(args.device) if args.device.startswith("cuda") else "CPU"
    rate = next((value for key, value in DENSE_RATE.items() if key in device), None)
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True).stdout.strip()
    print(f"{device}, {args.shape}, rows of {args.length}, batch {args.batch}, commit {commit or '-'}\n")
    print("| script | ours ms (min-max) | library ms (min-max) | ours tokens/s | x library | useful TFLOP/s | share | "
          "peak MiB, ours / library |\n" + "| --- " * 8 + "|")  # fmt: skip
    rows = []
    for name in args.scripts:
        script = importlib.import_module(name)
        model, inputs, cfg, loss_of = setup(script, args.shape, args.length, args.batch, args.device)
        work = useful_operations(script, model, inputs, cfg, loss_of)
        loss, ours, our_peak, first = timed(model, inputs, cfg, loss_of, args.repeat)
        with on_the_library(script):
            library_loss, theirs, their_peak, _ = timed(model, inputs, cfg, loss_of, args.repeat)
        tokens_s = args.batch * args.length / ours[0] * 1e3
        done = work / ours[0] * 1e3
        row = {"script": name, "loss": loss, "library_loss": library_loss, "ours_ms": ours[0], "ours_min": ours[1],
               "ours_max": ours[2], "library_ms": theirs[0], "library_min": theirs[1], "library_max": theirs[2],
               "tokens_s": tokens_s, "x_library": theirs[0] / ours[0], "useful_flop": work, "useful_flop_s": done,
               "share": done / rate if rate else None, "peak_mib": our_peak, "library_peak_mib": their_peak,
               "first_step_s": first}  # fmt: skip
        rows.append(row)
        share = "-" if rate is None else f"{row['share']:.2f}"
        peaks = "-" if our_peak is None else f"{our_peak:,.0f} / {their_peak:,.0f}"
        print(f"| {name} | {ours[0]:.1f} ({ours[1]:.1f}-{ours[2]:.1f}) | {theirs[0]:.1f} ({theirs[1]:.1f}-{theirs[2]:.1f}) | "
              f"{tokens_s:,.0f} | {row['x_library']:.2f} | {done * 1e-12:.3f} | {share} | {peaks} |", flush=True)  # fmt: skip
        del model, inputs
    print(json.dumps({"device": device, "shape": args.shape, "length": args.length, "batch": args.batch, "commit": commit,
                      "torch": torch.__version__, "rows": rows}))  # fmt: skip


if __name__ == "__main__":
    main()
