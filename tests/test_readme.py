"""What the README shows works: its recipes alone with the files they name, its flags, line counts and functions."""

import os
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
from conftest import POOL, ROOT
from test_frame import SCRIPTS

README = (ROOT / "README.md").read_text()
RECIPES = [(code, re.search(r"\(files: (.+)\)$", code.splitlines()[0])[1])
           for code in re.search(r"```python\n(.*?)```", README, re.DOTALL)[1].split("\n\n")]  # fmt: skip


def start():
    """Every recipe in a process and a folder of its own, with the files it names and nothing else; see conftest."""
    return [POOL.submit(run_alone, *recipe) for recipe in RECIPES]


def run_alone(code, files):
    with tempfile.TemporaryDirectory() as folder:
        for file in files.split():
            shutil.copy(ROOT / file, folder)
        Path(folder, "recipe.py").write_text(code)
        command = [sys.executable, "-I", "-c", f"import sys; sys.path.insert(0, {folder!r}); import recipe"]
        env = {**os.environ, "OMP_NUM_THREADS": "1"}
        return subprocess.run(command, capture_output=True, text=True, cwd=folder, env=env, timeout=300)


@pytest.mark.parametrize("number", range(len(RECIPES)), ids=[files.split()[0] for _, files in RECIPES])
def test_a_recipe_runs_alone_with_the_files_it_names(started, number):
    done = started[number].result()
    assert done.returncode == 0, done.stderr[-2000:]


def test_there_are_recipes():
    assert {files.split()[0] for _, files in RECIPES} >= {f"{name}.py" for name in SCRIPTS} | {"common.py"}


def test_line_counts_are_those_of_the_files():
    counts = re.findall(r"^\| `(\w+\.py)` \| (\d+) \|", README, re.MULTILINE)
    assert len(counts) == 7
    for name, lines in counts:
        assert len((ROOT / name).read_text().splitlines()) == int(lines), name


def test_every_flag_shown_exists():
    import importlib

    for name, flags in re.findall(r"python (\w+)\.py ((?:--?[^\n`|]*))", README):
        script = importlib.import_module(name)
        source = (ROOT / f"{name}.py").read_text()
        for flag in re.findall(r"--([\w-]+)", flags):
            field = flag.removeprefix("no-")
            known = field in {f.name for f in script.dataclasses.fields(script.Config)} | set(script.OWN_FLAGS)
            assert known or f'"--{flag}"' in source or f'"{flag}"' in source, (name, flag)


def test_every_function_named_in_the_maps_exists():
    section = README[README.index("## Reading beside the papers") : README.index("## To copy")]
    blocks = re.split(r"^(?=\*\*.*\*\*, `\w+\.py`)", section, flags=re.MULTILINE)[1:]
    assert len(blocks) == 5
    for block in blocks:
        name = re.search(r"`(\w+)\.py`", block).group(1)
        sources = "".join((ROOT / f"{file}.py").read_text() for file in (name, "common", "kernels"))
        for function in re.findall(r"-> (.+)", block):
            for word in re.findall(r"`(?:\w+\.)?(\w+)`", function):
                assert re.search(rf"^(?:    )?(?:def|class) {word}\b", sources, re.MULTILINE), (name, word)
