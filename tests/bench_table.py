"""One table: five methods, one backbone, one data set, one machine; every figure comes from the scripts' own functions.

    python tests/bench_table.py --work runs/table                    (tiny backbone, CPU, about 15 minutes)
    python tests/bench_table.py --work runs/table --model FOLDER --data train.jsonl --problems 200 \\
        --tokens 4000000 --ar_steps 300 --set batch_size=16 --set max_len=512            (a real backbone on a GPU)

Parts: one plain AR fine-tuning, which is the baseline and the base of every adaptation; then for each method its
training (the same rows, --tokens tokens of them, copies not counted) and a sweep of its threshold. Each part runs in
a process of its own and keeps what it found in WORK/results.json; started again, the script goes on where it stopped,
training within a part included. D2F's tokens are those of adapting the AR base to diffusion and of distilling
together. CoDiLA's built-in task is a language of its own, so on the tiny backbone it keeps its own AR model and its
own steps.

AUP, accuracy under parallelism: with points (rho_i tokens per forward, y_i percent right) by rising rho, those below
y_1 - 5 dropped: rho_1 y_1 + 1/2 sum_i (rho_i - rho_{i-1}) (y_i W(y_i) + y_{i-1} W(y_{i-1})), W(y) = min(exp(-3 (1 -
y/y_max)), 1). Intervals are Wilson's, 95 %. Prints markdown and the curves as text; the last line of stdout is JSON;
--svg FILE draws them.
"""

import argparse
import dataclasses
import importlib
import json
import math
import os
import resource
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

import torch

from common import Decoder, generate_ar

SWEEPS = {  # method: the setting that trades quality for parallelism, its values, and what goes with them
    "refusion": ("tau_token", (0.1, 0.3, 0.5, 0.7, 0.9, 1.0), {}),
    "d2f": ("tau_conf", (0.5, 0.7, 0.8, 0.9, 0.95, 1.0), {}),
    "fastdllm_v2": ("tau", (0.5, 0.6, 0.7, 0.8, 0.9, 1.0), {}),
    "orthrus": ("block_size", (2, 3, 4, 8, 16), {}),
    "codila": ("tau", (0.0, 0.1, 0.3, 0.5, 1.0, 2.0), {"mode": "dynamic", "table": ""}),
}
PAPER = {  # headline of each paper: what was measured there
    "refusion": "2.33 x the tok/s of Qwen3-8B, mean of 7 tasks (8B, A100)",
    "d2f": "2.5 x the tok/s of LLaMA3-8B on GSM8K (Dream-7B, A100)",
    "fastdllm_v2": "2.6 x from threshold 1.0 to 0.9 on GSM8K (7B, A100)",
    "orthrus": "4.20 tokens per forward on GSM8K (1.7B)",
    "codila": "1.3 tokens per step at the quality of one (DreamOn-7B, tau 0.2)",
}


def wilson(right, n, z=1.96):
    """95 % interval of a share, in percent."""
    p, d = right / n, 1 + z * z / n
    middle, half = (p + z * z / (2 * n)) / d, z * math.sqrt(p * (1 - p) / n + z * z / (4 * n * n)) / d
    return 100 * max(middle - half, 0.0), 100 * min(middle + half, 1.0)


def aup(points):
    """Accuracy under parallelism of (tokens per forward, percent right) pairs; see the top of this file."""
    points = sorted(points)
    points = [(rho, y) for rho, y in points if y >= points[0][1] - 5]
    top = max(y for _, y in points)

    def weighted(y):
        return y * min(math.exp(-3 * (1 - y / top)), 1.0) if top else 0.0

    area = points[0][0] * points[0][1]
    for (rho_0, y_0), (rho_1, y_1) in zip(points, points[1:]):
        area += (rho_1 - rho_0) * (weighted(y_1) + weighted(y_0)) / 2
    return area


def flags(script, args, **more):
    """Command-line flags of a run: the script's settings for a tiny backbone, the common ones, what --set says."""
    own_task = args.model == "tiny" and script.METHOD == "codila"
    chosen = dict(script.TINY) if args.model == "tiny" else {}
    chosen |= {"data": args.data, "problems": args.problems, "seed": args.seed, "device": args.device}
    if not own_task:
        chosen |= {"model": str(Path(args.work, "base", "ar")), "ar_steps": 0}
    for text in args.set:
        scope, _, rest = text.rpartition(".") if text.split("=")[0].count(".") else ("", "", text)
        if scope in ("", script.METHOD):
            key, _, value = rest.partition("=")
            chosen[key] = value
    chosen |= more
    names = {field.name: field.type for field in dataclasses.fields(script.Config)}
    words = []
    for key, value in chosen.items():
        if key in names and value != "":
            on = str(value).lower() in ("true", "1")
            words += [f"--{'' if on else 'no-'}{key}"] if names[key] is bool else [f"--{key}", str(value)]
    return words


def stage_steps(script, words, tokens):
    """Steps of each own stage that see so many tokens of the data, and what they see: ({flag: steps}, tokens)."""
    _, cfg = script.parse(["--train", *words])
    tokenizer = script.load(cfg.model, cfg, training=True)[1]
    rows = [script.encode(tokenizer, *problem) for problem in script.read_problems(cfg)[0]]
    lengths = [len(row["prompt_ids"]) + len(row["answer_ids"]) for row in rows]
    packed = script.METHOD == "fastdllm_v2" or getattr(cfg, "packing", False)  # a row is a window of max_len tokens
    a_step = cfg.batch_size * (cfg.max_len if packed else sum(lengths) / len(lengths))
    shares = {"adapt_steps": cfg.adapt_steps, "steps": cfg.steps} if script.METHOD == "d2f" else {"steps": cfg.steps}
    if script.METHOD == "codila" and cfg.model == "tiny":
        return {}, round(a_step * 2 * cfg.steps)  # the adaptation to diffusion, then the local model
    total = tokens / a_step
    steps = {name: round(total * share / sum(shares.values())) for name, share in shares.items()}
    return steps, round(a_step * sum(steps.values()))


def peak_mib(device):
    if device.startswith("cuda"):
        return torch.cuda.max_memory_allocated() / 2**20
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def train_part(name, args):
    """Train to the end, resuming what an earlier start left. Returns minutes of this start, peak MiB, tokens seen."""
    script = importlib.import_module("refusion" if name == "base" else name)
    out = Path(args.work, name)
    words, tokens = flags(script, args, out=out), None
    if name == "base":
        words = flags(script, args, model=args.model, steps=0, ar_steps=args.ar_steps, out=out)
    else:
        steps, tokens = stage_steps(script, words, args.tokens)
        words = flags(script, args, out=out, **steps)
    start = time.time()
    resume = ["--resume"] if (out / "training_state.safetensors").exists() else []
    if status := script.main(["--train", *resume, *words]):
        sys.exit(status)
    return {"minutes": (time.time() - start) / 60, "peak_mib": peak_mib(args.device), "tokens": tokens}


def sweep_part(name, args):
    """Decode the held-out problems at each value of the method's threshold, and by plain AR. Returns the rows."""
    script = importlib.import_module(name)
    field, values, fixed = SWEEPS[name]
    folder = str(Path(args.work, name))
    given = ["--problems", str(args.problems), "--device", args.device]
    _, cfg = script.parse(["--generate", "--model", folder, *given])
    cfg = dataclasses.replace(cfg, **fixed)
    backbone, tokenizer = script.load(folder, cfg, training=False)
    model = script.enter_stage(backbone, script.METHOD, folder, cfg).train(False)
    ar_folder = Path(folder, "ar") if Path(folder, "ar").exists() else Path(args.work, "base", "ar")
    baseline, _ = script.load(str(ar_folder), cfg, training=False)
    problems = script.read_problems(cfg)[1]
    longest = max(len(script.encode(tokenizer, messages)["prompt_ids"]) for messages, _ in problems)
    decoder = Decoder(baseline, longest + cfg.max_new_tokens, compiled=cfg.compile)
    ar = script.measure("plain AR", generate_ar, decoder, baseline, tokenizer, problems, cfg)
    rows, default = [], getattr(cfg, field)
    for value in sorted({*values, default}):
        at = dataclasses.replace(cfg, **{field: value})
        label, run = script.decoders(at)[0]
        row = script.measure(label, run, script.new_decoder(model, longest, at), model, tokenizer, problems, at)
        row |= {"setting": f"{field} {value:g}", "default": value == default, "x_ar": row["tok_s"] / ar["tok_s"]}
        row["same_as_ar"] = sum(a == b for a, b in zip(row.pop("outputs"), ar["outputs"]))
        rows.append(row)
    ar.pop("outputs")
    return {"ar": ar, "rows": rows, "peak_mib": peak_mib(args.device), "dtype": cfg.dtype}


def lines(results, args):
    """The markdown table, one row a method at its default threshold, and the JSON beside it."""
    text = ["| method | setting | right (95 %) | tokens per forward | tok/s | x AR | AUP | same as AR | decode / train MiB | "
            "train min | train tokens | the paper, elsewhere |", "| --- " * 12 + "|"]  # fmt: skip
    report = {}
    for name in [name for name in SWEEPS if f"sweep:{name}" in results]:
        found, trained = results[f"sweep:{name}"], results[f"train:{name}"]
        for row in [found["ar"], *[row for row in found["rows"] if row["default"]]]:
            low, high = wilson(row["right"], row["problems"])
            is_ar = row["label"] == "plain AR"
            if is_ar and name not in ("codila", next(iter(SWEEPS))) and args.model == "tiny":
                continue  # the same base for all but CoDiLA
            area = (
                "-"
                if is_ar
                else f"{aup([(r['tokens_per_forward'], 100 * r['right'] / r['problems']) for r in found['rows']]):.0f}"
            )
            base = results.get("train:base", trained)
            cells = [f"plain AR ({name})" if is_ar else name, "-" if is_ar else row["setting"],
                     f"{row['right']}/{row['problems']} ({low:.0f}-{high:.0f})", f"{row['tokens_per_forward']:.2f}",
                     f"{row['tok_s']:,.0f}", f"{row.get('x_ar', 1.0):.2f}", area,
                     "-" if is_ar else f"{row['same_as_ar']}/{row['problems']}",
                     f"{found['peak_mib']:,.0f} / {trained['peak_mib']:,.0f}",
                     f"{(base if is_ar else trained)['minutes']:.1f}",
                     "-" if is_ar or not trained["tokens"] else f"{trained['tokens'] / 1e6:.2f} M",
                     "-" if is_ar else PAPER[name]]  # fmt: skip
            text.append("| " + " | ".join(cells) + " |")
        report[name] = found | {"train": trained}
    return "\n".join(text), report


def curve(results, width=64):
    """Percent right over tokens per forward as text: a letter a point, * where letters meet; empty rows are left out."""
    letters = {name: letter for name, letter in zip(SWEEPS, "RDFOC") if f"sweep:{name}" in results}
    points = [(letters[name], row["tokens_per_forward"], 100 * row["right"] / row["problems"])
              for name in letters for row in results[f"sweep:{name}"]["rows"]]  # fmt: skip
    right = max(rho for _, rho, _ in points) * 1.02
    grid = [[" "] * width for _ in range(11)]
    for letter, rho, y in points:
        row, column = grid[10 - round(y / 10)], int(rho / right * width)
        row[column] = letter if row[column] in (" ", letter) else "*"
    lines = [f"{100 - 10 * i:>4} % |" + "".join(row).rstrip() for i, row in enumerate(grid) if "".join(row).strip()]
    ticks = [" "] * (width + 4)
    for rho in range(0, int(right) + 1, max(1, int(right / 8))):
        ticks[int(rho / right * width) : int(rho / right * width) + len(str(rho))] = str(rho)
    names = ", ".join(f"{letter} {name}" for name, letter in letters.items())
    axis = ["       +" + "-" * width, "        " + "".join(ticks).rstrip() + "  tokens per forward"]
    return "\n".join([*lines, *axis, names])


def svg(results):
    """Percent right over tokens per forward, one curve a method."""
    curves = {name: sorted((row["tokens_per_forward"], 100 * row["right"] / row["problems"])
                           for row in results[f"sweep:{name}"]["rows"]) for name in SWEEPS if f"sweep:{name}" in results}  # fmt: skip
    right = max([2.0, *(rho for points in curves.values() for rho, _ in points)]) * 1.05
    colours, parts = ("#c33", "#383", "#a60", "#33c", "#939"), []

    def at(rho, y):
        return f"{50 + 500 * rho / right:.1f},{330 - 3 * y:.1f}"

    for y in range(0, 101, 20):
        parts.append(f'<path d="M{at(0, y)} L{at(right, y)}" stroke="#ddd"/><text x="8" y="{334 - 3 * y}">{y} %</text>')
    for rho in range(1, int(right) + 1, max(1, int(right) // 8)):
        parts.append(f'<text x="{46 + 500 * rho / right:.0f}" y="348">{rho}</text>')
    for (name, points), colour in zip(curves.items(), colours):
        path = " ".join(f"{'L' if i else 'M'}{at(*point)}" for i, point in enumerate(points))
        dots = "".join(
            f'<circle cx="{at(*p).split(",")[0]}" cy="{at(*p).split(",")[1]}" r="3" fill="{colour}"/>' for p in points
        )
        key = f'<text x="560" y="{50 + 20 * list(curves).index(name)}" fill="{colour}">{name}</text>'
        parts.append(f'<path d="{path}" fill="none" stroke="{colour}" stroke-width="2"/>{dots}{key}')
    head = '<svg xmlns="http://www.w3.org/2000/svg" width="680" height="370" font-family="sans-serif" font-size="12">'
    return "\n".join([head, *parts, '<text x="220" y="366">tokens per forward</text>', "</svg>"]) + "\n"


def main(argv=None):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--work", default="runs/table", help="folder of checkpoints and results, kept between starts")
    parser.add_argument("--model", default="tiny")
    parser.add_argument("--data", default="")
    parser.add_argument("--methods", nargs="+", choices=SWEEPS, default=list(SWEEPS))
    parser.add_argument("--tokens", type=int, default=1_200_000, help="tokens of the data that each method trains on")
    parser.add_argument("--ar_steps", type=int, default=350)
    parser.add_argument("--problems", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--set", action="append", default=[], metavar="[METHOD.]FIELD=VALUE")
    parser.add_argument("--svg", default="")
    parser.add_argument("--part", default="", help=argparse.SUPPRESS)
    args = parser.parse_args(argv)
    file = Path(args.work, "results.json")
    results = json.loads(file.read_text()) if file.exists() else {}
    if args.part:
        kind, name = args.part.split(":")
        results[args.part] = (train_part if kind == "train" else sweep_part)(name, args)
        file.with_suffix(".tmp").write_text(json.dumps(results, indent=1))
        os.replace(file.with_suffix(".tmp"), file)
        return
    Path(args.work).mkdir(parents=True, exist_ok=True)
    parts = ["train:base", *(f"{kind}:{name}" for name in args.methods for kind in ("train", "sweep"))]
    for part in parts:
        if part not in results:
            subprocess.run([sys.executable, __file__, *(argv or sys.argv[1:]), "--part", part], check=True)
            results = json.loads(file.read_text())
    commit = (
        subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True).stdout.strip() or "-"
    )
    device = torch.cuda.get_device_name() if args.device.startswith("cuda") else "CPU"
    table, report = lines(results, args)
    dtype = next(iter(report.values()))["dtype"]
    print(f"{args.model} on {args.data or 'the built-in task'}, {device}, {dtype}, batch 1, {args.problems} held-out problems, "
          f"seed {args.seed}, commit {commit}\n\n{table}")  # fmt: skip
    print(f"\n{curve(results)}\n")
    if args.svg:
        Path(args.svg).write_text(svg(results))
    print(json.dumps({"model": args.model, "device": device, "commit": commit, "methods": report}))


if __name__ == "__main__":
    main()
