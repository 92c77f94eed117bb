"""Trials too long for the test suite, run by hand on CPU. Each ends in one line of figures, or in a failure.

python tests/stress.py kill --trials 50        kill -9 at random moments of a run that saves every step
python tests/stress.py fuzz --trials 2000      mutated rows of JSONL, mutated files of a trained folder
python tests/stress.py long --trials 2000      one decoder, prompt after prompt: same texts, memory flat
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
from pathlib import Path

import torch
from bench_decode import parser
from bench_train import SCRIPTS, run_script
from safetensors import safe_open
from transformers import AutoModelForCausalLM, AutoTokenizer

VALUES = None, True, "", "x", "\ud800", [], {}, [1], {"a": 1}, -1, 0, 1, 3, 1.5, 1e30, float("nan"), "float64"


def main_of(script, *argv):
    """(status, lines on stderr) of the script's command line; an error that it lets through is the status."""
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()) as err:
        try:
            status = script.main([str(word) for word in argv])
        except Exception as error:
            status = repr(error)
    return status, [line for line in err.getvalue().splitlines() if line and f"{script.METHOD}: " not in line]


def kill(script, rng, trials, out):
    """A child goes on with a run, saving every step, until it is killed: a whole save is there, none lost."""
    steps = [1]
    go_on = ("--train", "--resume", "--out", out, "--steps")
    for _ in range(trials):
        child = os.fork()
        if child == 0:  # it must not come to an end by itself
            main_of(script, *go_on, 10**6, "--save_every", 1)
            os._exit(1)
        last = time.time() + (30 if rng.random() < 0.8 else 0)  # after its first save, or while it starts
        before = script.newest(out).name
        while time.time() < last and max(out.glob("step-*"), default=out).name in (before, out.name):
            time.sleep(0.01)
        time.sleep(rng.uniform(0, 0.5))
        os.kill(child, signal.SIGKILL)
        assert os.WIFSIGNALED(os.waitpid(child, 0)[1]), f"step {steps[-1]}: the run ended by itself"
        found = script.newest(out)
        AutoTokenizer.from_pretrained(found)
        AutoModelForCausalLM.from_pretrained(found)
        with safe_open(found / "optimizer.safetensors", "pt") as file:
            steps.append(int(file.metadata()["rows"]) // 4)
    assert steps == sorted(steps), "a save was lost"
    ends = main_of(script, *go_on, steps[-1] + 1, "--generate", "--problems", 1)
    assert ends[0] == 0 and all(path.is_file() for path in out.iterdir()), ends
    return f"{trials} kills in {steps[-1]} steps, a whole save after each"


def mutated(data, rng):
    """Bytes with a cut, a repeat or noise in it; half of all JSON with a value in it gone or exchanged."""
    if data[:1] == b"{" and rng.random() < 0.5:
        root = tree = json.loads(data)
        while isinstance(tree, (dict, list)) and tree and (tree is root or rng.random() < 0.7):
            node = tree
            key = rng.choice([*tree] if isinstance(tree, dict) else range(len(tree)))
            tree = tree[key]
        node[key] = rng.choice(VALUES)
        if rng.random() < 0.2:
            del node[key]
        return json.dumps(root).encode()
    start = rng.randrange(len(data) + 1)
    end = rng.choice((start, start + 1, start + 8, start + 64, len(data)))
    new = (rng.randbytes(min(end - start, 64)), data[start:end] * 2, b"", b"null", b'"', b"\xff", b"9")
    return data[:start] + rng.choice(new) + data[end:]


def fuzz(script, rng, trials, out):
    """What is mutated gives a result, or one line and status 2; nothing hangs."""
    (out / "data.jsonl").write_text('{"prompt": "Tom has 3", "response": "4", "pattern": "4"}\n')
    files = sorted(path.name for path in out.iterdir())
    refused = faults = 0
    for number in range(trials):
        copy = shutil.copytree(out, out.with_name("copy"), copy_function=os.link)
        victim = copy / rng.choice(files)
        data = victim.read_bytes()
        end = 8 + int.from_bytes(data[:8], "little") if victim.suffix == ".safetensors" else None
        head = mutated(data[8 if end else 0 : end], rng)
        victim.unlink()  # it is a link
        victim.write_bytes(len(head).to_bytes(8, "little") + head + data[end:] if end else head)
        argv = ["--data", copy / "data.jsonl", "--steps", 2, "--problems", 1, "--max_new_tokens", 16]
        resumes = number % 4 == 0 or victim.name == "optimizer.safetensors"
        argv += ["--train", "--resume", "--out", copy] if resumes else ["--generate", "--model", copy]
        signal.alarm(60)
        status, lines = main_of(script, *argv)
        signal.alarm(0)
        shutil.rmtree(copy)
        refused += status == 2
        if status != 0 and (status != 2 or len(lines) != 1):
            faults += 1
            print(f"{number}: {victim.name}, {argv[8]}, status {status}", *lines[-8:], sep="\n", flush=True)
    assert not faults, f"{faults} faults"
    return f"{trials} mutated files, {refused} refused in one line, the others read"


def long(script, rng, trials, out):
    """Every decoding of `compare`, prompt after prompt on one decoder: texts as of a new one, memory flat."""
    said = []

    def decode(label, run, decoder, model, tokenizer, problems, cfg, args, ar=None):
        prompts = [row[0] for row in problems]

        def one(n, decoder):
            return run(model, prompts[n], cfg, decoder, torch.Generator().manual_seed(n))[0].tolist()

        expected = [one(n, None) for n in range(len(prompts))]
        pages = []
        for n in rng.choices(range(len(prompts)), k=trials):
            assert one(n, decoder) == expected[n], f"{label}: another text of prompt {n}"
            pages.append(int(Path("/proc/self/statm").read_text().split()[1]))
        grown = (pages[-1] - pages[trials // 4]) * resource.getpagesize() / 2**20
        assert grown < 20, f"{label}: memory grew by {grown:.0f} MiB"
        said.append(f"{label} {grown:+.1f}")
        return {}

    run_script(script, ["--generate", "--model", out, "--problems", 8, "--max_new_tokens", 16], decode=decode)
    return f"{trials} texts each; growth in MiB after a quarter of them: {', '.join(said)}"


def main(argv=None):
    found = parser(__doc__, scripts=(SCRIPTS, SCRIPTS), trials=(50, 50), seed=(0, 0))
    found.add_argument("what", choices=["kill", "fuzz", "long"])
    args = found.parse_args(argv)
    for name in args.scripts:
        script = importlib.import_module(name)
        with tempfile.TemporaryDirectory() as folder:
            out = Path(folder, "run")
            run_script(script, ["--train", "--out", out, "--steps", 1, "--batch_size", 4, "--device", "cpu"])
            line = globals()[args.what](script, random.Random(args.seed), args.trials, out)
        print(f"{args.what} {name}: {line}", flush=True)


if __name__ == "__main__":
    torch.set_num_threads(1)  # a forked process must not inherit a thread pool
    resource.setrlimit(resource.RLIMIT_AS, (12 << 30, 12 << 30))  # for sizes out of a mutated file
    main()
