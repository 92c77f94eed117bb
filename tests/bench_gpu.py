"""What a GPU gives: decode forwards, training steps, loops, attention, the tests, each script's own run.

    python tests/bench_gpu.py                               (at most 12 minutes; made for an H100)
    python tests/bench_gpu.py --minutes 4                   (the most telling parts come first)
    python tests/bench_gpu.py --parts "decode 8B" loop      (those whose names begin so)
    python tests/bench_gpu.py --device cpu                  (tiny shapes of every part: does it run?)

Each part is a process with a limit of its own, and a line of --out when it ends. Parts run one after the
other; tests and the scripts' own runs, whose times are not compared, at once. Started again it goes on: what
the same code gave on the same card is taken from --out, the rest is run. At the end markdown with the goals,
and one line of JSON. Status 1: a part has no result, and the table says why; 2: there is no GPU.
"""

import concurrent.futures
import hashlib
import json
import os
import shlex
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch
from bench_decode import ROOT, header, parser, table
from bench_train import SCRIPTS

DECODE = "tests/bench_decode.py --queries 1 8 32 --cache 1280 --repeat 20 --shapes"
TRAIN = "tests/bench_train.py --shape 0.6B --length 2048 --repeat 5 --batch"
LOOP = "tests/bench_loop.py --shape 0.6B --prompt 256 --new 128 --scripts"
TEST = "-m pytest -q -m gpu -p no:cacheprovider tests -k"
ROWS = dict(refusion=4, d2f=4, fastdllm_v2=2, orthrus=1, codila=4)  # a row is 3 x as long, 5 x in Orthrus
CHECKS = {f"run {name}": f"{name}.py --train --generate" for name in SCRIPTS}
CHECKS |= {f"tests {name}": f"{TEST} {name}" for name in SCRIPTS}
CHECKS |= {"tests others": f"{TEST} 'not {' and not '.join(SCRIPTS)}'"}
TRAINS = [(60, {f"train {name}": f"{TRAIN} {ROWS[name]} --scripts {name}"}) for name in SCRIPTS]
LOOPS = [(55, {f"loop {name}": f"{LOOP} {name}"}) for name in SCRIPTS]
STEPS = [  # most seconds, {part: command}; the most telling first, the parts of a step at once
    (55, {"decode 0.6B": f"{DECODE} 0.6B"}),
    (65, {"decode 8B": f"{DECODE} 8B"}),
    TRAINS[0],
    LOOPS[0],
    (200, CHECKS),
    (50, {"decode 1.7B": f"{DECODE} 1.7B"}),
    *TRAINS[1:],
    *LOOPS[1:],
    (90, {"attention": "tests/bench_attention.py --length 2048 --repeat 20"}),
]
SMALL = dict(  # flags of each kind of part on CPU, where the figures mean nothing
    decode="--shapes tiny --queries 1 8 --cache 64 --repeat 1",
    train="--shape tiny --length 64 --batch 2 --repeat 1",
    loop="--shape tiny --prompt 9 --new 16",
    run="--steps 2 --problems 2",
    tests="",
    attention="--length 32 --repeat 1",
)
DECODE_GOALS = {"0.6B": (0.3, 15), "1.7B": (0.6, "-"), "8B": (0.8, 5)}  # share of the floor, x eager
TFLOPS = {"H100 80GB HBM3": 989, "H200": 989}  # bfloat16, dense, by the name of the card


def code_of(command):
    """A short hash of common.py, kernels.py, and the benchmark and the script that a command names."""
    words = shlex.split(command)
    names = {"common.py", "kernels.py", *words, *[f"{word}.py" for word in words]}
    files = [ROOT / name for name in sorted(names) if (ROOT / name).is_file()]
    return hashlib.sha256(b"".join(path.read_bytes() for path in files)).hexdigest()[:12]


def run(key, seconds, end):
    """Run a part for at most so many seconds. Returns its line: key, seconds, rows, or why it failed."""
    left = end - time.time()
    if left < 10:
        return key | dict(seconds=0, rows=[], failed="not started: no time left")
    words = [str(ROOT / word) if (ROOT / word).exists() else word for word in shlex.split(key["command"])]
    env = os.environ | ({"CUDA_VISIBLE_DEVICES": ""} if key["device"] == "CPU" else {})
    clock = time.time()
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        with open(f"{folder}/log", "w") as log:  # no pipe: what a killed part leaves behind may hold one
            said = dict(stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT)
            try:
                command = [sys.executable, "-u", *words]
                limit = min(seconds, left)
                status = subprocess.run(command, cwd=folder, env=env, timeout=limit, **said).returncode
                failed = f"status {status}: " if status else ""
            except subprocess.TimeoutExpired:
                failed = f"not done in {limit:.0f} s: "
        text = Path(folder, "log").read_text(errors="replace").strip() or "nothing said"
    line = key | dict(seconds=round(time.time() - clock, 1), rows=[])
    last = text.splitlines()[-1]
    if failed:
        return line | dict(failed=failed + last[:200], log=text[-8000:])
    return line | dict(rows=json.loads(last)["rows"] if last.startswith("{") else [dict(said=last)])


def cells(line, row):
    """(case, figures, those that have a goal) of a row of a part, as text."""
    kind = line["part"].split()[0]
    if kind == "decode":
        ours = row["ours_ms"][0]
        eager = row["eager_ms"][0]
        floor, gain = DECODE_GOALS.get(row["shape"], ("-", "-"))
        text = f"{ours:.2f} ms; SDPA {row['sdpa_ms'][0]:.2f}, eager {eager:.2f}"
        goals = f"{row['floor_ms'] / ours:.2f} of the floor ({floor}), {eager / ours:.1f} x eager ({gain})"
        return f"queries: {row['queries']}", text, goals
    if kind == "train":
        ours = row["ours"]
        library = row["library"]
        text = f"{ours['ms'][0]:.1f} ms, {row['tok_s']:,.0f} tokens/s, peak {ours['peak_mib'] or 0:,.0f} MiB"
        rates = [rate for name, rate in TFLOPS.items() if name in line["device"]]
        goals = [f"{row['tflops'] / rate:.2f} of the bf16 rate (0.4)" for rate in rates]
        gain = f"{library['ms'][0] / ours['ms'][0]:.2f} x library (2)" if library else "library: no memory"
        goals.append(gain)
        if library and library["peak_mib"]:
            goals += [f"{ours['peak_mib'] / library['peak_mib']:.2f} of its memory (0.5)"]
        return f"rows: {ROWS[row['script']]}", text, ", ".join(goals)
    if kind == "loop":
        text = f"{row['tok_s']:,.0f} tok/s, {row['x_ar']:.2f} x AR"
        text += f", {row['ms'] / row['forwards']:.2f} ms a forward"
        return row["label"], text, f"{row['outside']:.2f} outside forwards (0.1)"
    if kind == "attention":
        keys = [key for key in ("flex", "dense", "flash") if f"{key}_ms" in row]
        times = [f"{key} {row[f'{key}_ms']:.2f} ms, {row[f'{key}_tflops']:.3g} TFLOP/s" for key in keys]
        return row["mask"], "; ".join(times), ""
    if kind == "run":
        text = f"{row['right']}/{row['problems']} right, {row['tokens_per_forward']} tokens a forward"
        return row["label"], f"{text}, {row['x_ar']} x AR, {line['seconds']:.0f} s in all", ""
    return "", row["said"], ""


def main(argv=None):
    """Returns the exit status."""
    out = "runs/gpu.jsonl"
    found = parser(__doc__, minutes=(12.0, 12.0), parts=([""], [""]), out=(out, out))
    found.set_defaults(device="cuda")
    args = found.parse_args(argv)
    cpu = args.device == "cpu"
    if not cpu and not torch.cuda.is_available():
        print("bench_gpu.py: no CUDA device; --device cpu tries all parts on tiny shapes", file=sys.stderr)
        return 2
    end = time.time() + 60 * args.minutes
    head = header(args.device)
    file = Path(args.out)
    file.parent.mkdir(parents=True, exist_ok=True)
    kept = [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []
    lines = {}  # part: its line
    for seconds, commands in STEPS:
        keys = []
        for part, command in commands.items():
            command += f" {SMALL[part.split()[0]]}" if cpu else ""
            key = dict(part=part, command=command, code=code_of(command))
            keys.append(key | dict(device=head["device"], torch=head["torch"]))
        keys = [key for key in keys if key["part"].startswith(tuple(args.parts))]
        lines |= {key["part"]: line for key in keys for line in kept if line.items() >= key.items()}
        with concurrent.futures.ThreadPoolExecutor(1 if cpu else len(commands)) as pool:
            runs = [pool.submit(run, key, seconds, end) for key in keys if key["part"] not in lines]
            for done in concurrent.futures.as_completed(runs):
                line = head | done.result()
                lines[line["part"]] = line
                print(f"{line['part']}: {line['seconds']} s {line.get('failed', '')}", file=sys.stderr)
                kept += [] if "failed" in line else [line]
                file.with_suffix(".tmp").write_text("".join(json.dumps(line) + "\n" for line in kept))
                os.replace(file.with_suffix(".tmp"), file)
    table("part", "case", "figures", "with a goal (in brackets)")
    table(*["---"] * 4)
    lines = [lines[part] for _, commands in STEPS for part in commands if part in lines]
    for line in lines:
        if "failed" in line:
            table(line["part"], "", line["failed"].replace("|", "/"), "")
        for row in line["rows"]:
            table(line["part"], *cells(line, row))
    print(json.dumps(head | dict(parts=lines)))
    return int(any("failed" in line for line in lines))


if __name__ == "__main__":
    sys.exit(main())
