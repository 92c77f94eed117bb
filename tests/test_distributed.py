"""Several processes (gloo, CPU) give what one process gives: losses, weights; a run goes on with another number."""

import importlib
import json
import os
import subprocess
import sys
import tempfile
import warnings
from pathlib import Path

import pytest
from conftest import POOL, ROOT, TMP, few_rows
from safetensors.torch import load_file
from test_frame import SCRIPTS, short

WORKER = str(ROOT / "tests" / "distributed_worker.py")


def start():
    """In one process, then in two; see conftest."""
    return POOL.submit(train_all, Path(tempfile.mkdtemp(dir=TMP.name)))


def launch(world, target, jobs, **settings):
    """Run [(script, flags)] in `world` processes. Returns the losses of each that rank 0 saw."""
    words = [word for name, flags in jobs for word in (name, *flags, "--")][:-1]
    launcher = [] if world == 1 else ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(world)]
    env = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", **settings}
    if sys.platform == "linux":
        env["GLOO_SOCKET_IFNAME"] = "lo"  # whatever the machine's name resolves to
    command = [sys.executable, *launcher, WORKER, str(target), *words]
    for _ in range(2):  # where the processes did not find each other, once more; what they run gets one try
        done = subprocess.run(command, capture_output=True, text=True, env=env, cwd=ROOT, timeout=300)
        if done.returncode == 0 or target.with_suffix(".begun").exists():
            break
        warnings.warn(f"{world} processes did not start: {done.stderr[-3000:]}", stacklevel=1)
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(target.read_text())


def train_all(folder):
    """(folder, {run: losses by script}): `one` and `two` processes; `on`: from step 4 of `one`, by two."""

    def jobs(run, **flags):
        return [(name, ["--train", *few_rows(importlib.import_module(name)), *short(batch_size=8, steps=6, **flags),
                        "--out", str(folder / f"{name}-{run}")]) for name in SCRIPTS]  # fmt: skip

    one = launch(1, folder / "one.json", jobs("one", accumulation=2, save_every=4), COPY="1")
    again = [(name, [*flags, "--resume"]) for name, flags in jobs("one-copy")]
    two = launch(2, folder / "two.json", jobs("two") + again)
    found = dict(one=one, two=two[: len(SCRIPTS)], on=two[len(SCRIPTS) :])
    return folder, {run: dict(zip(SCRIPTS, losses, strict=True)) for run, losses in found.items()}


@pytest.fixture
def runs(started):
    return started.result()


@pytest.mark.parametrize("name", SCRIPTS)
def test_two_processes_give_the_losses_of_one(runs, name):
    _, found = runs
    assert len(found["one"][name]) == 6 and found["two"][name] == pytest.approx(found["one"][name], rel=2e-3)


@pytest.mark.parametrize("name", SCRIPTS)
def test_one_plain_folder_is_saved_with_the_same_weights(runs, name):
    folder, _ = runs
    for file in ("model.safetensors", "optimizer.safetensors"):
        one, two = (load_file(folder / f"{name}-{run}" / file) for run in ("one", "two"))
        assert one.keys() == two.keys()
        for key in one:  # Adam moves a weight of tiny gradient by its sign: a few may differ by a few steps
            assert one[key].shape == two[key].shape and (one[key].float() - two[key].float()).abs().mean() < 1e-4


@pytest.mark.parametrize("name", SCRIPTS)
def test_a_run_goes_on_in_another_number_of_processes(runs, name):
    folder, found = runs
    assert found["on"][name] == pytest.approx(found["one"][name][4:], rel=2e-3)
    one, on = (load_file(folder / f"{name}-{run}" / "model.safetensors") for run in ("one", "one-copy"))
    assert all((one[key].float() - on[key].float()).abs().mean() < 1e-4 for key in one)
