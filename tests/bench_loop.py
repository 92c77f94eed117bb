"""Where a decode goes: time in forwards and time between them, and how often the loop waits for the device.

    python tests/bench_loop.py                                          (tiny shape on CPU, 0.6B on a GPU)
    python tests/bench_loop.py --scripts refusion --profile 15          (and the 15 dearest operations)

Random weights in Qwen3 shapes, a random prompt, default decoding settings, batch 1. A forward is timed from its
inputs to the last of its results, so everything else is the loop: masks, positions, choices, copies. waits:
synchronising calls per forward that PyTorch reports on CUDA. The first generation (compiling, capturing) is outside
the clock. The last line of stdout is JSON.
"""

import argparse
import importlib
import json
import subprocess
import sys
import time
import warnings
from pathlib import Path
from unittest import mock

import torch

sys.path[:0] = [str(Path(__file__).resolve().parent), str(Path(__file__).resolve().parent.parent)]
from bench_decode import SHAPES
from bench_train import SCRIPTS, random_model

import kernels


def waits(run):
    """How many synchronising calls PyTorch reports while run() runs."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        torch.cuda.set_sync_debug_mode("warn")
        try:
            run()
        finally:
            torch.cuda.set_sync_debug_mode("default")
    return sum("synchroniz" in str(warning.message) for warning in caught)


def main(argv=None):
    on_gpu = torch.cuda.is_available()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--scripts", nargs="+", choices=SCRIPTS, default=list(SCRIPTS))
    parser.add_argument("--shape", choices=SHAPES, default="0.6B" if on_gpu else "tiny")
    parser.add_argument("--prompt", type=int, default=256 if on_gpu else 32, help="tokens")
    parser.add_argument("--new", type=int, default=128 if on_gpu else 32, help="tokens")
    parser.add_argument("--profile", type=int, default=0, metavar="N", help="list the N dearest operations")
    parser.add_argument("--device", default="cuda" if on_gpu else "cpu")
    args = parser.parse_args(argv)
    cuda = args.device.startswith("cuda")
    dtype = torch.bfloat16 if cuda else torch.float32
    sync = torch.cuda.synchronize if cuda else (lambda: None)
    device = torch.cuda.get_device_name(args.device) if cuda else "CPU"
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True).stdout.strip()
    case = f"prompt {args.prompt}, {args.new} new tokens"
    print(f"{device}, {args.shape}, {str(dtype)[6:]}, {case}, commit {commit or '-'}\n")
    print("| script | forwards | total ms | in forwards ms | outside | waits per forward |\n" + "| --- " * 6 + "|")
    rows, call = [], kernels.GraphReplay.__call__
    for name in args.scripts:
        script = importlib.import_module(name)
        sizes = {"max_new_tokens": args.new, "max_len": max(script.TINY["max_len"], args.prompt + args.new)}
        model, cfg = random_model(script, args.shape, dtype, device=args.device, dtype=str(dtype)[6:], **sizes)
        model.train(False)
        decoder, (_, generate) = script.new_decoder(model, args.prompt, cfg), script.decoders(cfg)[0]
        generator = torch.Generator().manual_seed(0)
        prompt_ids = torch.randint(2, cfg.vocab_len, (1, args.prompt), generator=generator).to(args.device)

        def run():
            return generate(model, prompt_ids, cfg, decoder, torch.Generator().manual_seed(0))[1]

        inside = 0.0

        def timed(self, *args):
            nonlocal inside
            sync()
            start = time.perf_counter()
            out = call(self, *args)
            sync()
            inside += time.perf_counter() - start
            return out

        forwards = run()["forwards"]
        count = waits(run) / forwards if cuda else None
        with mock.patch.object(kernels.GraphReplay, "__call__", timed):
            start = time.perf_counter()
            run()
            sync()
            total = time.perf_counter() - start
        row = {"script": name, "forwards": forwards, "total_ms": 1e3 * total, "inside_ms": 1e3 * inside,
               "outside": 1 - inside / total, "waits_per_forward": count}  # fmt: skip
        rows.append(row)
        print(f"| {name} | {forwards} | {row['total_ms']:.1f} | {row['inside_ms']:.1f} | {row['outside']:.0%} | "
              f"{'-' if count is None else f'{count:.2f}'} |", flush=True)  # fmt: skip
        if args.profile:
            with torch.profiler.profile() as profile:
                run()
            key = "self_cuda_time_total" if cuda else "self_cpu_time_total"
            print(profile.key_averages().table(sort_by=key, row_limit=args.profile))
    print(json.dumps({"device": device, "shape": args.shape, "dtype": str(dtype)[6:], "commit": commit,
                      "torch": torch.__version__, "rows": rows}))  # fmt: skip


if __name__ == "__main__":
    main()
