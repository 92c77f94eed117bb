"""The table of the README: each script's own tiny run with several seeds, worst and median.

    python tests/bench_table.py --scripts refusion d2f --seeds 0 1 2 --threads 1 2 --out runs/table.jsonl

Runs `python SCRIPT.py --train --generate --seed S` one after the other, each in a process of its own with T
threads, and keeps what its last line says, with the seconds, as a line of --out. Started again it goes on:
what the file has of the same code (script, common.py, kernels.py, models and data of tests/tiny) and the same
flags is taken from there. A flag that is not known here, as --steps, goes to the scripts. At the end
markdown, and one line of JSON.
"""

import hashlib
import json
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from bench_decode import ROOT, header, parser, table
from bench_train import SCRIPTS

FIGURES = dict(right=min, tokens_per_forward=min, x_ar=min, seconds=max)  # name: what is worst of several


def code_of(script):
    """A short hash of all files that decide what a run gives."""
    files = [ROOT / f"{name}.py" for name in (script, "common", "kernels")]
    files += sorted(path for path in (ROOT / "tests/tiny").rglob("*") if path.is_file())
    return hashlib.sha256(b"".join(path.read_bytes() for path in files)).hexdigest()[:12]


def run(key):
    """Train and decode once. Returns rows, seconds by the clock and of the CPU; ValueError if it fails."""
    env = os.environ | {"OMP_NUM_THREADS": str(key["threads"])}
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    start = time.time()
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, ROOT / f"{key['script']}.py", "--train", "--generate"]
        command += ["--seed", str(key["seed"]), "--out", folder, *key["flags"]]
        done = subprocess.run(command, capture_output=True, text=True, env=env)
    seconds = time.time() - start
    if done.returncode:
        raise ValueError(f"status {done.returncode}, {done.stderr.splitlines()[-1:]}")
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    cpu = after.ru_utime - before.ru_utime + after.ru_stime - before.ru_stime
    rows = json.loads(done.stdout.splitlines()[-1])["rows"]
    return dict(seconds=round(seconds, 1), cpu_seconds=round(cpu, 1), rows=rows)


def summary(runs):
    """Markdown: of each decoding the worst and the median of its runs. Returns the same as a list."""
    groups = {}
    for line in runs:
        for row in line["rows"]:
            groups.setdefault((line["script"], row["label"], line["threads"]), []).append(line | row)
    figures = ("right, worst", "tokens per forward, worst", "tok/s x AR, worst", "seconds, longest")
    table("script", "decoding", "threads", "n", *(cell for name in figures for cell in (name, "median")))
    table(*["---"] * 12)
    found = []
    for (script, label, threads), group in sorted(groups.items(), key=lambda item: SCRIPTS.index(item[0][0])):
        entry = dict(script=script, label=label, threads=threads, n=len(group), problems=group[0]["problems"])
        for name, worst in FIGURES.items():
            values = [row[name] for row in group]
            entry |= {f"{name}_worst": worst(values), f"{name}_median": statistics.median(values)}
        found.append(entry)
        right = f"{entry['right_worst']}/{entry['problems']}", f"{entry['right_median']:g}"
        others = [
            float(entry[f"{name}_{kind}"]) for name in list(FIGURES)[1:] for kind in ("worst", "median")
        ]
        table(script, label, threads, len(group), *right, *others)
    return found


def main(argv=None):
    """Returns the exit status: 1 where a run failed; the others are in the table."""
    found = parser(__doc__, scripts=(SCRIPTS, SCRIPTS), seeds=([0, 1, 2], [0, 1, 2]), threads=([1], [1]),
                   out=("runs/table.jsonl", "runs/table.jsonl"))  # fmt: skip
    args, flags = found.parse_known_args(argv)
    head = header(args.device)
    flags += ["--device", args.device, "--dtype", head["dtype"]]
    file = Path(args.out)
    file.parent.mkdir(parents=True, exist_ok=True)
    lines = [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []
    runs = []
    keys = [dict(script=script, seed=seed, threads=threads, flags=flags, code=code_of(script))
            for seed in args.seeds for threads in args.threads for script in args.scripts]  # fmt: skip
    for number, key in enumerate(keys, 1):
        name = f"{number} of {len(keys)}: {key['script']}, seed {key['seed']}, {key['threads']} threads"
        line = next((line for line in lines if line.items() >= key.items()), None)
        if line is None:
            try:
                line = head | key | run(key)
            except ValueError as error:
                print(f"{name}: {error}", file=sys.stderr)
                continue
            lines.append(line)
            file.with_suffix(".tmp").write_text("".join(json.dumps(line) + "\n" for line in lines))
            os.replace(file.with_suffix(".tmp"), file)
        print(f"{name}: {line['rows'][-1]['right']} right, {line['seconds']} s", file=sys.stderr)
        runs.append(line)
    print(json.dumps(head | dict(rows=summary(runs))))
    return int(len(runs) < len(keys))


if __name__ == "__main__":
    sys.exit(main())
