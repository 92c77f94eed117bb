"""What the README shows works: its recipes alone with the files they name, its flags, line counts and functions."""

import dataclasses
import importlib
import os
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
from conftest import POOL, ROOT, TMP
from test_frame import SCRIPTS

README = (ROOT / "README.md").read_text()
RECIPES = [(code, re.search(r"\(files: (.+)\)$", code.splitlines()[0])[1])
           for code in re.search(r"```python\n(.*?)```", README, re.DOTALL)[1].split("\n\n")]  # fmt: skip


RUNNER = """import os, signal, sys
import torch, transformers  # read once for all; what a recipe imports of ours it reads itself
for folder in sys.argv[1:]:
    if os.fork() == 0:
        signal.alarm(200)
        os.chdir(folder)
        os.dup2(os.open("stderr", os.O_CREAT | os.O_WRONLY), 2)
        sys.path.insert(0, folder)
        import recipe
        open("done", "w").close()
        break
    os.wait()
"""


def start():
    """Every recipe in a process and a folder of its own, with the files it names and nothing else; see conftest."""
    return POOL.submit(run_all, Path(tempfile.mkdtemp(dir=TMP.name)))


def run_all(root):
    for number, (code, files) in enumerate(RECIPES):
        for name in files.split():
            copy = shutil.copytree if (ROOT / name).is_dir() else shutil.copy
            target = root / str(number) / name
            target.parent.mkdir(parents=True, exist_ok=True)
            copy(ROOT / name, target)
        (root / str(number) / "recipe.py").write_text(code)
    folders = [str(root / str(number)) for number in range(len(RECIPES))]
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    subprocess.run([sys.executable, "-I", "-c", RUNNER, *folders], capture_output=True, env=env, timeout=600)
    return root


@pytest.mark.parametrize("number", range(len(RECIPES)), ids=[files.split()[0] for _, files in RECIPES])
def test_a_recipe_runs_alone_with_the_files_it_names(started, number):
    folder = started.result() / str(number)
    assert (folder / "done").exists(), (folder / "stderr").read_text()[-2000:]


def test_there_are_recipes():
    assert {files.split()[0] for _, files in RECIPES} >= {f"{name}.py" for name in SCRIPTS} | {"common.py"}


def test_line_counts_are_those_of_the_files():
    counts = re.findall(r"^\| `(\w+\.py)` \|.* (\d+) \((\d+)\) \|$", README, re.MULTILINE)
    counts += [(*found, "") for found in re.findall(r"`(common\.py|kernels\.py)` \((\d+)(?: lines)?:", README)]
    assert len(counts) == 7
    for name, lines, frame in counts:
        source = (ROOT / name).read_text()
        assert len(source.splitlines()) == int(lines), name
        if frame:
            marks = [text.start() for text in re.finditer(r"^# =+ (?:frame: .*|main)$", source, re.MULTILINE)]
            assert source[marks[0] : marks[1]].count("\n") == int(frame), name


def test_every_flag_shown_exists():
    for name, flags in re.findall(r"python (\w+)\.py ((?:--?[^\n`|]*))", README):
        script = importlib.import_module(name)
        fields = {field.name for field in dataclasses.fields(script.Config)}
        for flag in re.findall(r"--([\w-]+)", flags):
            own = ("train", "generate", "resume", "trace", "prompt", "trace-svg")
            assert flag.removeprefix("no-") in fields or flag in own, (name, flag)


def test_every_function_named_in_the_maps_exists():
    section = README[README.index("## Beside the papers") : README.index("## To copy")]
    blocks = re.split(r"^(?=- \*\*.*\*\*, `\w+\.py`)", section, flags=re.MULTILINE)[1:]
    assert len(blocks) == 5
    for block in blocks:
        name = re.search(r"`(\w+)\.py`", block).group(1)
        sources = "".join((ROOT / f"{file}.py").read_text() for file in (name, "common", "kernels"))
        for function in re.findall(r"-> (.+)", block):
            for word in re.findall(r"`(?:\w+\.)?(\w+)`", function):
                assert re.search(rf"^(?:    )?(?:def|class) {word}\b", sources, re.MULTILINE), (name, word)


def test_every_test_that_the_tests_readme_names_exists():
    """Its table of faults: words after a letter are names of tests in the file that the letter stands for."""
    files = dict(C="common", F="frame", R="refusion", D="d2f", V="fastdllm_v2", O="orthrus", L="codila")
    found = {x: set(re.findall(r"^def test_(\w+)", (ROOT / "tests" / f"test_{name}.py").read_text(), re.MULTILINE))
             for x, name in files.items()}  # fmt: skip
    note = r"(?: \([^)]*\))?"
    lists = rf"\b([CFRDVOL]) (\w+{note}(?:, (?![CFRDVOL] )\w+{note})*)"
    table = (ROOT / "tests" / "README.md").read_text().partition("\n| fault |")[2].partition("\n\n")[0]
    named = [(x, name) for x, names in re.findall(lists, table) for name in re.sub(note, "", names).split(", ")]
    assert not [(x, name) for x, name in named if name not in found[x]]
    assert len(named) > 100
