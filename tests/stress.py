"""Trials too long for the test suite, run by hand on CPU. Each ends in one line of figures, or in the first failure.

    python tests/stress.py kill --trials 50        kill -9 at random moments of a run that saves every step
    python tests/stress.py fuzz --files 2000       mutated JSONL files, then mutated checkpoints: an answer or one line
    python tests/stress.py long --generations 2000 one process decodes again and again: same outputs, memory flat

--scripts NAME ... chooses the scripts (default: all five).
"""

import argparse
import contextlib
import dataclasses
import faulthandler
import importlib
import io
import json
import os
import random
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]
os.environ.setdefault("HF_HUB_OFFLINE", "1")

import torch
from test_frame import SCRIPTS, short
from transformers import AutoModelForCausalLM, AutoTokenizer

torch.set_num_threads(1)  # a forked process must not inherit a thread pool


def quiet(call, *args):
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()) as err:
        result = call(*args)
    return result, err.getvalue()


def trained(script, folder, **flags):
    status, err = quiet(script.main, ["--train", *short(script, **flags), "--out", str(folder)])
    assert status == 0, err
    return folder


def kill(script, args):
    """A child trains and saves every step; it is killed at a random moment; the folder must load and resume.

    Every fifth child begins anew in the same folder, so that kills also fall into the first stages and between them.
    """
    rng, folder = random.Random(args.seed), Path(tempfile.mkdtemp())
    out = trained(script, folder / "run", save_every=1)
    cfg = script.parse(["--train", "--resume", "--out", str(out)])[1]
    order = [stage.name for stage in script.stages(cfg)]
    early = {field.name: 12 for field in dataclasses.fields(cfg) if field.name.endswith("_steps")}
    at, survived, stages = script.read_state(out), 0, set()
    at = (order.index(at[0]), at[1])
    for trial in range(args.trials):
        if anew := trial % 5 == 0:
            call = short(script, steps=10**6, save_every=1, **early)
        else:
            call = ["--resume", "--steps", str(10**6)]
        child = os.fork()
        if child == 0:
            quiet(script.main, ["--train", *call, "--out", str(out)])
            os._exit(1)  # it must not come to an end by itself
        time.sleep(rng.uniform(0.2, 1.5))
        os.kill(child, signal.SIGKILL)
        _, status = os.waitpid(child, 0)
        assert os.WIFSIGNALED(status), f"trial {trial}: the run ended by itself"
        stage, now, _ = script.read_state(out)
        now = (order.index(stage), now)
        assert anew or now >= at, f"trial {trial}: from {at} back to {now}"
        survived += max(now[1] - at[1], 0) if now[0] == at[0] else now[1]
        at = now
        stages.add(stage)
        AutoTokenizer.from_pretrained(out)
        AutoModelForCausalLM.from_pretrained(out)
        cfg = script.parse(["--generate", "--model", str(out)])[1]
        (model, _), _ = quiet(script.load, str(out), cfg, False)
        quiet(script.enter_stage, model, script.METHOD, str(out), cfg)
    shutil.rmtree(folder)
    return f"{args.trials} kills, in stages {', '.join(sorted(stages))}, every folder loaded, {survived} steps survived"


def mutated(data, rng):
    """Bytes with a few flips, cuts, repeats, or digits exchanged."""
    data = bytearray(data)
    for _ in range(rng.randint(1, 4)):
        start = rng.randrange(len(data) + 1)
        end = min(len(data), start + rng.choice((1, 1, 2, 8, 64)))
        kind = rng.randrange(6)
        if kind == 0:
            data[start:end] = rng.randbytes(end - start)
        elif kind == 1:
            del data[start:end]
        elif kind == 2:
            data[start:start] = data[start:end] * rng.randint(1, 3)
        elif kind == 3:
            del data[start:]
        elif kind == 4:
            data[start:end] = rng.choice((b"null", b"[]", b"{}", b"-1", b"1e999", b'"', b"\\u0000", b"\xff", b"true"))
        else:
            data = bytearray(
                bytes(data).replace(rng.choice(b"0123456789").to_bytes(1, "big"), rng.choice((b"9", b"0", b"-")))
            )
        if not data:
            data = bytearray(b"\n")
    return bytes(data)


def exchanged(tree, rng):
    """A JSON value in which one part, anywhere in it, is gone, doubled or another value."""
    while isinstance(tree, (dict, list)) and tree:
        node, key = tree, rng.choice(list(tree) if isinstance(tree, dict) else range(len(tree)))
        tree = node[key]
        if rng.random() < 0.3:
            break
    else:
        if tree in ({}, []):
            return
    others = [None, True, "", "x", [], {}, [1], {"a": 1}, -1, 0, 1, 3, 1.5, 1e30, float("nan"), "float64", "U8"]
    if type(tree) in (int, float):
        others += [tree + 1, tree - 1, tree * 2, str(tree), [tree]]
    kind = rng.randrange(8)
    if kind == 0:
        del node[key]
    elif kind == 1 and isinstance(node, dict):
        node[rng.choice([f"{key}x", *node])] = node.pop(key)
    else:
        node[key] = rng.choice(others)


def broken(file, rng):
    """Bytes of a file of a checkpoint with a fault: in its bytes, or in a value of its JSON (a safetensors header)."""
    data, start = file.read_bytes(), 0
    if file.suffix == ".safetensors":
        start = 8
        data, numbers = data[: 8 + int.from_bytes(data[:8], "little")], data[8 + int.from_bytes(data[:8], "little") :]
    if file.suffix not in (".json", ".safetensors") or rng.random() < 0.3:
        data = mutated(data, rng)
    else:
        tree = json.loads(data[start:])
        exchanged(tree, rng)
        text = json.dumps(tree).encode()
        data = len(text).to_bytes(8, "little") * (start == 8) + text
    return data + (numbers if start else b"")


def fuzz(script, args):
    """Mutated input ends in a result, or in one line and status 2; nothing hangs. Settings and state resume as well."""
    rng, folder, slowest = random.Random(args.seed), Path(tempfile.mkdtemp()), 0.0
    rows = [
        {"prompt": "Tom has 3", "response": " 4"},
        {"question": "a", "answer": "b"},
        {"query": "a", "response": "b"},
        {"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]},
    ]
    good = "".join(json.dumps(row) + "\n" for row in rows).encode()
    refused = {"rows": 0, "checkpoints": 0}
    for _ in range(args.files):
        file = folder / "data.jsonl"
        file.write_bytes(mutated(good, rng))
        start = time.time()
        try:
            training, held_out = script.read_problems(script.Config(data=str(file)))
            assert all(isinstance(answer, str) for _, answer in training + held_out)
        except ValueError as error:
            assert str(file) in str(error) and "\n" not in str(error)
            refused["rows"] += 1
        slowest = max(slowest, time.time() - start)
    out, copy = trained(script, folder / "run"), folder / "copy"
    shutil.rmtree(out / "ar")
    step = script.read_state(out)[1]
    resource.setrlimit(
        resource.RLIMIT_AS, (12 << 30, 12 << 30)
    )  # a size out of a mutated file must not eat the machine
    signal.signal(signal.SIGALRM, lambda *_: os.abort())  # hangs: faulthandler shows where
    faulthandler.enable()
    files = sorted(path.relative_to(out) for path in out.rglob("*") if path.is_file())
    faults = []
    for number in range(args.files):
        shutil.rmtree(copy, ignore_errors=True)
        shutil.copytree(out, copy, copy_function=os.link)
        victim = rng.choice(files)
        (copy / victim).unlink()
        (copy / victim).write_bytes(broken(out / victim, rng))
        if number % 4 == 0 or victim.name == "training_state.safetensors" and number % 2:
            call = ["--train", "--resume", "--out", str(copy), "--steps", str(step + 1)]
        else:
            call = ["--generate", "--model", str(copy), "--problems", "1", "--max_new_tokens", "16"]
        start = time.time()
        signal.alarm(60)
        try:
            status, err = quiet(script.main, call)
        except BaseException:
            status, err = "traceback", traceback.format_exc()
        signal.alarm(0)
        lines = [line for line in err.splitlines() if line.strip()]
        said = sum(line.startswith(f"{script.METHOD}.py: ") for line in lines)
        if status != 0 and (status, len(lines), said) != (2, 1, 1) and (status, said) != (1, 1):  # 1: loss not finite
            kept = Path(tempfile.gettempdir(), f"fault_{script.METHOD}_{number}")
            shutil.rmtree(kept, ignore_errors=True)
            shutil.copytree(copy, kept)
            faults.append((number, status))
            print(f"{kept}: {victim}, {call[0]}, status {status}\n" + "\n".join(lines[-8:]), flush=True)
            assert len(faults) < args.faults, f"{len(faults)} faults"
        refused["checkpoints"] += status == 2
        slowest = max(slowest, time.time() - start)
    shutil.rmtree(folder)
    assert not faults, f"{len(faults)} faults"
    return (
        f"{args.files} JSONL files ({refused['rows']} refused), "
        f"{args.files} checkpoints ({refused['checkpoints']} refused), slowest {slowest:.1f} s"
    )


def decoding(script, out):
    """A function n -> token ids that decodes prompt n of a few, again and again with one decoder, and their number."""
    cfg = script.parse(["--generate", "--model", str(out), "--max_new_tokens", "16"])[1]
    (model, tokenizer), _ = quiet(script.load, str(out), cfg, False)
    model = script.enter_stage(model, script.METHOD, str(out), cfg).train(False)
    problems = script.read_problems(dataclasses.replace(cfg, data="", problems=4))[1]
    prompts = [torch.tensor([script.encode(tokenizer, messages)["prompt_ids"]]) for messages, _ in problems]
    decoder = script.new_decoder(model, max(p.shape[1] for p in prompts), cfg)
    generate = script.decoders(cfg)[0][1]

    def run(n):
        return generate(model, prompts[n % len(prompts)], cfg, decoder, torch.Generator().manual_seed(0))[0].tolist()

    return run, len(prompts)


def first_output(name, out, n):
    return decoding(importlib.import_module(name), out)[0](n)


def long(script, args):
    """Generation after generation in one process: outputs as in a process for each, memory does not grow."""
    folder = Path(tempfile.mkdtemp())
    out = trained(script, folder / "run", steps=20, ar_steps=20)
    run, count = decoding(script, out)
    expected = []
    for n in range(count):
        code = f"import stress; print(stress.first_output({script.__name__!r}, {str(out)!r}, {n}))"
        said = subprocess.check_output([sys.executable, "-c", code], cwd=ROOT / "tests", stderr=subprocess.DEVNULL)
        expected.append(json.loads(said.splitlines()[-1]))

    def resident():
        return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 2**20

    for n in range(100):
        run(n)
    before = resident()
    for n in range(args.generations):
        assert run(n) == expected[n % count], f"generation {n} differs"
    grown = resident() - before
    shutil.rmtree(folder)
    assert grown < 20, f"memory grew by {grown:.0f} MiB"
    return f"{args.generations} generations, each as in a process of its own, memory {before:.0f} MiB {grown:+.1f}"


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["kill", "fuzz", "long"])
    parser.add_argument("--scripts", nargs="+", choices=SCRIPTS, default=SCRIPTS)
    parser.add_argument("--trials", type=int, default=50)
    parser.add_argument("--files", type=int, default=2000)
    parser.add_argument("--generations", type=int, default=2000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--faults", type=int, default=10, help="fuzz: stop at so many")
    args = parser.parse_args()
    for name in args.scripts:
        start = time.time()
        line = {"kill": kill, "fuzz": fuzz, "long": long}[args.what](importlib.import_module(name), args)
        print(f"{args.what} {name}: {line}, {time.time() - start:.0f} s", flush=True)


if __name__ == "__main__":
    main()
