"""Trials too long for the test suite, run by hand on CPU. Each ends in one line of figures, or in a failure.

    python tests/stress.py kill --trials 50        kill -9 at random moments of a run that saves every step
    python tests/stress.py fuzz --trials 2000      mutated rows of JSONL, mutated files of a trained folder
    python tests/stress.py long --trials 2000      one decoder, prompt after prompt: same texts, memory flat

--scripts NAME ... chooses the scripts (default: all five).
"""

import contextlib
import importlib
import io
import json
import os
import random
import resource
import shutil
import signal
import tempfile
import time
import traceback
from pathlib import Path

import torch
from bench_decode import parser
from bench_train import SCRIPTS, run_script
from safetensors import safe_open
from transformers import AutoModelForCausalLM, AutoTokenizer

ROWS = '{"prompt": "Tom has 3", "response": " 4"}\n' * 2
VALUES = (None, True, "", "x", "\ud800", [], {}, [1], {"a": 1}, -1, 0, 1, 3, 1.5, 1e30, float("nan"), "float64")


def main_of(script, *argv):
    """(status, lines on stderr) of the script's command line; status -1 for an error that it lets through."""
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()) as err:
        try:
            status = script.main([str(word) for word in argv])
        except Exception:
            status = -1
            traceback.print_exc(file=err)
    bar = f"{script.METHOD}: "  # of tqdm
    return status, [line for line in err.getvalue().splitlines() if line.strip() and not line.startswith(bar)]


def trained(script, out):
    few = ("--steps", 1, "--batch_size", 4, "--accumulation", 1, "--device", "cpu")
    assert main_of(script, "--train", *few, "--out", out)[0] == 0
    return out


def kill(script, rng, trials, folder):
    """A child goes on with a run, saving every step, until it is killed: a whole save is there, none is older."""
    out = trained(script, folder / "run")
    step = 1
    for trial in range(trials):
        child = os.fork()
        if child == 0:
            main_of(script, "--train", "--resume", "--out", out, "--save_every", 1, "--steps", 10**6)
            os._exit(1)  # it must not come to an end by itself
        time.sleep(rng.uniform(0.2, 1.5))
        os.kill(child, signal.SIGKILL)
        assert os.WIFSIGNALED(os.waitpid(child, 0)[1]), f"trial {trial}: the run ended by itself"
        found = script.newest(out)
        AutoTokenizer.from_pretrained(found)
        AutoModelForCausalLM.from_pretrained(found)
        before = step
        with safe_open(Path(found, "optimizer.safetensors"), "pt") as file:
            step = int(file.metadata()["rows"]) // 4
        assert step >= before, f"trial {trial}: from step {before} back to {step}"
    ends = ("--steps", step + 1, "--problems", 1, "--max_new_tokens", 16)
    status, lines = main_of(script, "--train", "--resume", "--generate", "--out", out, *ends)
    assert status == 0 and not [path for path in out.iterdir() if path.is_dir()], lines
    return f"{trials} kills in {step} steps, a whole save after each"


def mutated(data, rng):
    """Bytes with a few cuts, repeats or noise; half of all JSON with a value, anywhere in it, gone or exchanged."""
    with contextlib.suppress(ValueError):
        root = tree = json.loads(data) if rng.random() < 0.5 else None
        while isinstance(tree, (dict, list)) and tree and (tree is root or rng.random() < 0.7):
            node = tree
            key = rng.choice([*tree] if isinstance(tree, dict) else range(len(tree)))
            tree = tree[key]
        if root:
            node[key] = rng.choice([*VALUES, tree + 1, tree * 2] if type(tree) in (int, float) else VALUES)
            if rng.random() < 0.2:
                del node[key]
            return json.dumps(root).encode()
    for _ in range(rng.randint(1, 4)):
        start = rng.randrange(len(data) + 1)
        end = rng.choice((start, start + 1, start + 8, start + 64, len(data)))
        new = rng.choice((rng.randbytes(min(end - start, 64)), data[start:end] * 2, b"", b"null", b'"', b"\xff", b"9"))
        data = data[:start] + new + data[end:]
    return data


def fuzz(script, rng, trials, folder):
    """What is mutated gives a result, or one line and status 2; nothing hangs."""
    out = trained(script, folder / "run")
    (out / "data.jsonl").write_text(ROWS)
    files = sorted(path.name for path in out.iterdir())
    refused = 0
    faults = 0
    for number in range(trials):
        copy = Path(shutil.copytree(out, folder / "copy", copy_function=os.link))
        victim = copy / rng.choice(files)
        data = victim.read_bytes()
        end = 8 + int.from_bytes(data[:8], "little") if victim.suffix == ".safetensors" else None
        head = mutated(data[8 if end else 0 : end], rng)
        victim.unlink()  # it is a link
        victim.write_bytes(len(head).to_bytes(8, "little") + head + data[end:] if end else head)
        resumes = number % 4 == 0 or victim.name == "optimizer.safetensors"
        argv = ("--train", "--resume", "--out", copy) if resumes else ("--generate", "--model", copy)
        few = ("--data", copy / "data.jsonl", "--steps", 2, "--problems", 1, "--max_new_tokens", 16)
        signal.alarm(60)
        status, lines = main_of(script, *argv, *few)
        signal.alarm(0)
        refused += status == 2
        if status != 0 and not (status == 2 and len(lines) == 1 and lines[0].startswith(f"{script.METHOD}.py: ")):
            faults += 1
            print(f"{number}: {victim.name}, {argv[0]}, status {status}", *lines[-8:], sep="\n", flush=True)
        shutil.rmtree(copy)
    assert not faults, f"{faults} faults"
    return f"{trials} mutated files, {refused} refused in one line, the others read"


def long(script, rng, trials, folder):
    """Every decoding of `compare` on one decoder, prompt after prompt: texts as with a new one, memory flat."""
    said = []

    def decode(label, run, decoder, model, tokenizer, problems, cfg, args, ar=None):
        prompts = [torch.tensor([script.encode(tokenizer, row[0])["prompt_ids"]]) for row in problems]

        def one(n, decoder):
            return run(model, prompts[n], cfg, decoder, torch.Generator().manual_seed(n))[0].tolist()

        expected = [one(n, None) for n in range(len(prompts))]
        pages = []
        for _ in range(trials):
            n = rng.randrange(len(prompts))
            assert one(n, decoder) == expected[n], f"{label}: another text of prompt {n}"
            pages.append(int(Path("/proc/self/statm").read_text().split()[1]))
        grown = (pages[-1] - pages[trials // 4]) * os.sysconf("SC_PAGE_SIZE") / 2**20
        said.append(f"{label} {grown:+.1f}")
        assert grown < 20, said[-1]
        return dict(label=label)

    flags = ["--model", trained(script, folder / "run"), "--problems", 8, "--max_new_tokens", 16]
    run_script(script, ["--generate", *flags], decode=decode)
    return f"{trials} texts each; growth in MiB after a quarter of them: {', '.join(said)}"


def main():
    found = parser(__doc__, scripts=(SCRIPTS, SCRIPTS), trials=(50, 50), seed=(0, 0))
    found.add_argument("what", choices=["kill", "fuzz", "long"])
    args = found.parse_args()
    torch.set_num_threads(1)  # a forked process must not inherit a thread pool
    resource.setrlimit(resource.RLIMIT_AS, (12 << 30,) * 2)  # a size out of a mutated file must not eat the machine
    for name in args.scripts:
        start = time.time()
        with tempfile.TemporaryDirectory() as folder:
            trial = globals()[args.what]
            line = trial(importlib.import_module(name), random.Random(args.seed), args.trials, Path(folder))
        print(f"{args.what} {name}: {line}, {time.time() - start:.0f} s", flush=True)


if __name__ == "__main__":
    main()
