"""Several processes (gloo, CPU) give what one process gives: losses, weights, decoded problems."""

import importlib
import json
import os
import subprocess
import sys
import tempfile
import warnings
from pathlib import Path

import pytest
from conftest import POOL, ROOT, TMP
from safetensors.torch import load_file
from test_frame import SCRIPTS, short

WORKER = str(ROOT / "tests" / "distributed_worker.py")


def start():
    """One process with 4 rows a step, two processes with 2 rows each; see conftest."""
    return POOL.submit(train_in, Path(tempfile.mkdtemp(dir=TMP.name)))


def train_in(folder):
    """(folder, {world: (losses, figures)}) of all scripts."""
    results = {}
    for world in (1, 2):
        words = []
        for name in SCRIPTS:
            script = importlib.import_module(name)
            out = ["--out", str(folder / f"{name}{world}"), "--accumulation", str(2 // world), "--max_new_tokens", "16"]
            words += [name, "--train", "--generate", *short(script, batch_size=4 // world), *out, "--"]
        target = folder / f"losses{world}.json"
        launcher = [] if world == 1 else ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
        env = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
        if sys.platform == "linux":
            env["GLOO_SOCKET_IFNAME"] = "lo"  # whatever the machine's name resolves to
        command = [sys.executable, *launcher, WORKER, str(target), *words[:-1]]
        for _ in range(2):  # where the processes did not find each other, once more; what they run gets one try
            done = subprocess.run(command, capture_output=True, text=True, env=env, cwd=ROOT, timeout=600)
            if done.returncode == 0 or target.with_suffix(".begun").exists():
                break
            warnings.warn(f"{world} processes did not start: {done.stderr[-3000:]}", stacklevel=1)
        assert done.returncode == 0, done.stderr[-3000:]
        reports = [json.loads(line) for line in done.stdout.splitlines() if line.startswith('{"method"')]
        results[world] = json.loads(target.read_text()), {report["method"]: report["rows"] for report in reports}
    return folder, results


@pytest.fixture
def runs(started):
    return started.result()


@pytest.mark.parametrize("name", SCRIPTS)
def test_two_processes_give_the_losses_of_one(runs, name):
    _, results = runs
    one, two = results[1][0][name], results[2][0][name]
    assert len(one) >= 5 and two == pytest.approx(one, rel=2e-3)


@pytest.mark.parametrize("name", SCRIPTS)
def test_one_plain_folder_is_saved_with_the_same_weights(runs, name):
    folder, _ = runs
    files = sorted(file.name for file in (folder / f"{name}1").rglob("*.safetensors"))
    assert files == sorted(file.name for file in (folder / f"{name}2").rglob("*.safetensors"))
    a, b = (load_file(folder / f"{name}{world}" / "model.safetensors") for world in (1, 2))
    assert a.keys() == b.keys()
    for key in a:  # Adam moves a weight of tiny gradient by its sign: a few may differ by a few steps
        gap = (a[key].float() - b[key].float()).abs()
        assert a[key].shape == b[key].shape and gap.mean() < 1e-4


@pytest.mark.parametrize("name", SCRIPTS)
def test_prompts_are_split_and_gathered(runs, name):
    _, results = runs
    for one, two in zip(results[1][1][name], results[2][1][name], strict=True):
        assert (one["label"], one["problems"]) == (two["label"], two["problems"]) and two["new_tokens"] > 0
