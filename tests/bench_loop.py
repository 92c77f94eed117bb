"""Where a decode goes: time outside forwards of each method's loop, and its tok/s against plain AR.

    python tests/bench_loop.py                                            (tests/tiny on CPU, 0.6B on a GPU)
    python tests/bench_loop.py --scripts refusion --shape "" --model runs/refusion --problems 16

Every decoding that the script's own `compare` offers, batch 1. With --shape: random weights in a Qwen3 shape,
a random prompt, the paper's settings, no EOS; nearly no draft is good, so tok/s is what a method costs where
it gains nothing. Without: the script's models, settings and problems. A flag that is not known here, as
--model, is the script's. tok/s is timed without waits between forwards. For the share, a forward lasts from
its inputs to the last of its results: all else is masks, positions, head, choices, copies. A pass before both
compiles and captures. The last line of stdout is JSON.
"""

import dataclasses
import importlib
import json
import time
from unittest import mock

import torch
from bench_decode import ROOT, header, parser, table
from bench_train import SCRIPTS, random_weights, run_script, vocab_len

from common import kernels

CALL = kernels.GraphReplay.__call__


def clock(call, wait):
    """(result of the call, seconds), the device waited for before and after."""
    wait()
    start = time.perf_counter()
    result = call()
    wait()
    return result, time.perf_counter() - start


def outside_forwards(call, wait):
    """Share of the seconds of call() that are not in a forward."""
    inside = 0.0

    def timed(*args):
        nonlocal inside
        result, seconds = clock(lambda: CALL(*args), wait)
        inside += seconds
        return result

    with mock.patch.object(kernels.GraphReplay, "__call__", timed):
        seconds = clock(call, wait)[1]
    return 1 - inside / seconds


def main(argv=None):
    found = parser(__doc__, scripts=(SCRIPTS, SCRIPTS), shape=("", "0.6B"), prompt=(32, 256), new=(32, 128))
    args, flags = found.parse_known_args(argv)
    head = header(args.device)
    wait = torch.cuda.synchronize if args.device.startswith("cuda") else (lambda: None)
    flags = ["--generate", "--device", args.device, "--dtype", head["dtype"], *flags]
    if args.shape:
        print(f"{args.shape} shape, prompt of {args.prompt} tokens, {args.new} new\n")
        flags += ["--max_new_tokens", args.new, "--prompt", ""]
    table("decoding", "tokens", "forwards", "ms", "outside forwards", "tok/s", "x AR")
    table(*["---"] * 7)
    rows = []
    for name in args.scripts:
        script = importlib.import_module(name)

        def decode(label, run, decoder, model, tokenizer, problems, cfg, command, ar=None):
            if args.shape:
                cfg = dataclasses.replace(cfg, vocab_len=vocab_len(args.shape), eos_id=None)

            def decode_all():
                tokens = 0
                forwards = 0
                for ids, *_ in problems:
                    seq_ids, record = run(model, ids, cfg, decoder, torch.Generator().manual_seed(0))
                    tokens += len(script.trim(seq_ids[0, ids.shape[1] :], cfg))
                    forwards += record["forwards"]
                return tokens, forwards

            decode_all()
            (tokens, forwards), seconds = clock(decode_all, wait)
            row = dict(script=name, label=label, tokens=tokens, forwards=forwards, ms=1e3 * seconds,
                       outside=outside_forwards(decode_all, wait), tok_s=tokens / seconds)  # fmt: skip
            row["x_ar"] = row["tok_s"] / ar["tok_s"] if ar else 1.0
            rows.append(row)
            return row

        own = flags if "--model" in flags else ["--model", script.Config.model, *flags]
        if args.shape and name == "d2f":
            own += ["--baseline", ROOT / "tests/tiny/ar"]  # its weights are random too
        changes = random_weights(args.shape, args.device, args.prompt, 1) if args.shape else {}
        first = len(rows)
        run_script(script, own, decode=decode, **changes)
        for row in rows[first:]:
            table(f"{name}: {row['label']}", *list(row.values())[2:])
    print(json.dumps(head | dict(shape=args.shape, rows=rows)))


if __name__ == "__main__":
    main()
