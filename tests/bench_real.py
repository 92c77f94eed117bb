"""The methods on real weights: every stage from one Hugging Face causal LM, its figures as they come.

    python tests/bench_real.py --model smollm2                 all parts, hours on a CPU; then the table
    python tests/bench_real.py --model smollm2 --minutes 50    what is not done then goes on next time
    python tests/bench_real.py --model smollm2 --parts "train ar" "train orthrus" "decode orthrus float32"
    python tests/bench_real.py --model smollm2 --data train.jsonl --test test.jsonl --max_len 168 --steps 80

The settings are for SmolLM2-135M-Instruct without its chat template (rows of 46 tokens instead of 76).
`train` parts call the scripts and tests/pretrain.py and leave a folder each under --out. `decode` parts
decode --test by plain AR and by the method, in float32 and in bfloat16; in float32 half of it at other
thresholds too. Each is a line of --out/results.jsonl. CoDiLA writes the bodies of small Python functions, of
which `right` counts those that ast.parse accepts; the other methods answer arithmetic problems, or --data.
Flags that are not listed here go to the stages, after their own in TRAIN.
"""

import ast
import dataclasses
import importlib
import json
import math
import random
import shlex
import subprocess
import sys
import sysconfig
import time
from pathlib import Path

from bench_decode import ROOT, header, parser, table
from bench_train import run_script

from common import read_tokenizer
from refusion import Config, encode_rows

PRETRAIN = "tests/pretrain.py --objective"
# Runs a script with SDPA's unfused form: faster on a CPU for such short rows in bfloat16. GPUs train on
# flex_attention.
START = """import os, runpy, sys, torch
torch.backends.cuda.enable_flash_sdp(False)
del sys.argv[0]
sys.path[0] = os.path.dirname(sys.argv[0])
runpy.run_path(sys.argv[0], run_name="__main__")"""
FEW = "--max_len 64 --accumulation 1 --warmup 0.05 --beta2 0.98 --lr_floor 0 --weight_decay 0 --batch_size"
TRAIN = {  # folder: (script, the folder that it starts from, flags)
    "ar": (f"{PRETRAIN} ar", "", f"{FEW} 32 --steps 64 --lr 1e-4"),
    "orthrus": ("orthrus.py", "ar", f"{FEW} 16 --steps 150 --lr 5e-4 --block_size 16 --anchors 4"
                " --no-packing"),
    "refusion": ("refusion.py", "ar", f"{FEW} 32 --steps 320 --lr 2e-4 --slot_sizes 4 --loss_norm paper"),
    "dlm": (f"{PRETRAIN} diffusion", "ar", f"{FEW} 16 --steps 1600 --lr 4e-4 --anneal 0.125"),
    "d2f": ("d2f.py", "dlm", f"{FEW} 16 --steps 200 --lr 1e-3 --p_max 1 --lora_dropout 0 --block_size 8"
            " --max_len 56"),
    "fastdllm_v2": ("fastdllm_v2.py", "ar", f"{FEW} 16 --steps 320 --lr 3e-4 --max_len 49 --block_size 7"
                    " --sub_block_size 7"),
    "python-ar": (f"{PRETRAIN} ar", "", f"{FEW} 32 --steps 32 --lr 1e-4"),
    "python-dlm": (f"{PRETRAIN} diffusion", "", f"{FEW} 16 --steps 600 --lr 4e-4"),
    "codila": ("codila.py", "python-dlm", f"{FEW} 16 --steps 300 --lr 2e-4 --block_sizes 2,4,8 --p_partial 0.5"
               " --max_pad 8 --tags '<repo_name> <reponame>' --aux OUT/python-ar"),
}  # fmt: skip
PAIRS = ((0.9, 0.9), (0.6, 0.3), (0.8, 0.6), (0.95, 0.95), (0.99, 0.99))
DECODE = {  # script: (flags, settings: the first is the main one)
    "orthrus": ("--merged 2", [{}]),
    "refusion": ("--slot_size 4 --serial_blocks 1", [dict(tau_slot=a, tau_token=b) for a, b in PAIRS]),
    "d2f": ("--decode_block_size 8", [dict(tau_conf=tau) for tau in (0.9, 0.5, 0.7, 0.95, 0.99)]),
    "fastdllm_v2": ("--sub_block_size 7", [dict(tau=tau) for tau in (0.9, 0.5, 0.7, 0.95, 1.0)]),
    "codila": ("--table 2,4,8", [dict(tau=tau) for tau in (0.3, 0.1, 0.2, 0.5, 1.0)]),  # of dynamic
}


def write_python_rows(args):
    """python-train.jsonl, python-test.jsonl (200 rows): small functions of Python's own library.

    The prompt is `def NAME(...):`, at most 16 tokens; the response is its body, 17 to 32 tokens, EOS counted.
    """
    tokenizer = read_tokenizer(args.model)
    bodies = {}
    for file in sorted(Path(sysconfig.get_path("stdlib")).rglob("*.py")):
        try:
            tree = ast.parse("" if "site-packages" in file.parts else file.read_text("utf-8"))
        except (SyntaxError, ValueError):  # the library's tests have such files
            continue
        for node in ast.walk(tree):
            if isinstance(node, ast.FunctionDef):
                node.decorator_list = []
                head, _, body = ast.unparse(node).partition("\n")
                lens = [len(tokenizer(text)["input_ids"]) for text in (head, "\n" + body)]
                if lens[0] <= 16 and 16 <= lens[1] < 32 and '"""' not in body:
                    bodies.setdefault(head, body)
    rows = [json.dumps(dict(prompt=head, response="\n" + body)) + "\n" for head, body in bodies.items()]
    random.Random(0).shuffle(rows)
    Path(args.out, "python-test.jsonl").write_text("".join(rows[:200]))
    Path(args.out, "python-train.jsonl").write_text("".join(rows[200:]))


def rows_of(name, args):
    """The files that a stage or a method is trained on and decodes."""
    if name != "codila" and not name.startswith("python"):
        return args.data, args.test
    files = [Path(args.out, f"python-{kind}.jsonl") for kind in ("train", "test")]
    if not files[0].exists():
        write_python_rows(args)
    return files


def is_python(text, answer, pattern):
    """Whether the body of a function is well-formed."""
    try:
        ast.parse("def f():" + text)
    except (SyntaxError, ValueError):
        return False
    return True


def train(name, args, seconds):
    """Run a stage, or go on with it, for so many seconds. Returns its flags, minutes, whether it is done."""
    script, base, flags = TRAIN[name]
    out = Path(args.out, name)
    model = Path(args.out, base) if base else args.model
    flags = [*shlex.split(flags.replace("OUT", args.out)), *args.more]  # of one said twice the second counts
    if (out / "config.json").exists():
        return dict(flags=flags, minutes=0.0, done=True)
    file, *words = script.split()
    command = [sys.executable, "-c", START, ROOT / file, *words, "--train", "--model", model, "--out", out]
    command += ["--data", rows_of(name, args)[0], "--dtype", args.dtype, "--device", args.device, *flags]
    command += ["--resume"] if any(out.glob("step-*")) else []
    clock = time.time()
    process = subprocess.Popen([str(word) for word in command])
    try:
        status = process.wait(seconds)
    except subprocess.TimeoutExpired:
        process.terminate()  # the step is finished and saved
        status = process.wait(600)
    finally:
        process.kill()
    if status not in (0, 143):
        raise ValueError(f"train {name}: status {status}")
    return dict(flags=flags, minutes=round((time.time() - clock) / 60, 1), done=status == 0)


def decode(name, args, dtype):
    """Plain AR and each setting, in one process. Returns their figures, those of `decode` in the scripts."""
    script = importlib.import_module(name)
    flags, settings = DECODE[name]
    settings = settings if dtype == "float32" else settings[:1]
    usual = script.decode
    rows = []

    def each_setting(label, run, decoder, model, tokenizer, problems, cfg, args, ar=None):
        is_single = ar is None or label.startswith("teacher") or (name == "codila" and cfg.mode != "dynamic")
        for number, change in enumerate([{}] if is_single else settings):
            one = dataclasses.replace(cfg, **change)
            some = problems[: -(-len(problems) // 2)] if number else problems
            some = some[:20] if label.startswith("teacher") else some  # a whole text each forward
            row = usual(label, run, decoder, model, tokenizer, some, one, args, ar)
            rows.append(row | dict(settings=change))
        return rows[-1]

    argv = ["--generate", "--out", Path(args.out, name)]
    if name not in ("orthrus", "codila"):  # Orthrus: its own base, which the folder holds in the dtype of training
        argv += ["--baseline", Path(args.out, "ar")]
    argv += ["--test", rows_of(name, args)[1], "--problems", args.problems]
    argv += ["--max_new_tokens", args.max_new_tokens, "--dtype", dtype, "--device", args.device]
    judge = is_python if name == "codila" else script.is_right
    run_script(script, [*argv, *flags.split()], decode=each_setting, is_right=judge)
    return [{key: value for key, value in row.items() if key != "outputs"} for row in rows]


def interval(right, n):
    """95 % of a share, after Wilson, in per cent."""
    z = 1.96
    middle = (right + z * z / 2) / (n + z * z)
    half = z * math.sqrt(right * (n - right) / n + z * z / 4) / (n + z * z)
    return f"{100 * (middle - half):.0f}-{100 * (middle + half):.0f}"


def show(lines, args):
    """The table, in markdown."""
    print()
    table("stage", "starts from", "rows", "tokens a row", "minutes", "done")
    table(*["---"] * 6)
    for name, (_, base, _) in TRAIN.items():
        parts = [line for line in lines if line["part"] == f"train {name}"]
        if parts:
            flags = parts[-1]["flags"]
            value = dict(zip(flags, flags[1:]))
            n = int(value["--steps"]) * int(value["--batch_size"])
            cfg = Config(data=rows_of(name, args)[0], max_len=int(value["--max_len"]))
            rows = encode_rows(read_tokenizer(args.model), cfg)
            length = sum(len(row["prompt_ids"]) + len(row["answer_ids"]) for row in rows) / len(rows)
            minutes = sum(part["minutes"] for part in parts)
            table(name, base or "the model", n, f"{length:.1f}", f"{minutes:.0f}", parts[-1]["done"])
    print()
    figures = ("right", "95 %", "tokens per forward", "tok/s", "x AR", "texts as AR")
    table("decoding", "settings", "dtype", *figures)
    table(*["---"] * 9)
    for line in lines:
        for row in line.get("rows", ()):
            said = " ".join(f"{key} {value}" for key, value in row["settings"].items())
            n = row["problems"]
            table(row["label"], said, line["dtype"], f"{row['right']} of {n}", interval(row["right"], n),
                  *(float(row[key]) for key in ("tokens_per_forward", "tok_s", "x_ar")), row["same_as_ar"])


def settings_of(argv):
    """The arguments; flags that are not known here go to the stages that are trained."""
    tiny = ROOT / "tests" / "tiny"
    texts = dict(model="", out="runs/real", dtype="bfloat16")
    texts |= dict(data=f"{tiny}/train.jsonl", test=f"{tiny}/test.jsonl")
    found = parser(__doc__, minutes=(1e6, 1e6), problems=(200, 200), max_new_tokens=(32, 32),
                   parts=([""], [""]), **{name: (text, text) for name, text in texts.items()})  # fmt: skip
    args, more = found.parse_known_args(argv)
    args.more = more
    return args


def main(argv=None):
    """Returns the exit status: 1 where a part failed or was not reached; those done are in the table."""
    args = settings_of(argv)
    head = header(args.device)
    end = time.time() + 60 * args.minutes
    file = Path(args.out, "results.jsonl")
    file.parent.mkdir(parents=True, exist_ok=True)
    lines = [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []
    keys = [dict(part=f"train {name}", dtype=args.dtype) for name in TRAIN]
    asked = dict(problems=args.problems, max_new_tokens=args.max_new_tokens)
    keys += [asked | dict(part=f"decode {name}", dtype=dtype)
             for name in DECODE for dtype in ("float32", "bfloat16")]  # fmt: skip
    left = []
    for key in keys:
        kind, name = key["part"].split()
        is_done = any(line.items() >= key.items() and line.get("done", True) for line in lines)
        if is_done or not f"{key['part']} {key['dtype']}".startswith(tuple(args.parts)):
            continue
        seconds = end - time.time()
        try:
            if seconds < 60:
                raise ValueError(f"{key['part']}: no time left")
            if kind == "train":
                made = train(name, args, seconds)
            else:
                made = dict(rows=decode(name, args, key["dtype"]))
        except ValueError as error:
            print(error, file=sys.stderr)
            left.append(key["part"])
            continue
        lines.append(head | key | made)
        with open(file, "a") as out:
            out.write(json.dumps(lines[-1]) + "\n")
        left += [] if made.get("done", True) else [key["part"]]
    show(lines, args)
    print(json.dumps(head | dict(rows=lines)))
    return int(bool(left))


if __name__ == "__main__":
    sys.exit(main())
