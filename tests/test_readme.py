"""What the README shows works: its recipes alone with the files they name, its commands, its line counts, its functions."""

import re
import shutil
import subprocess
import sys

import pytest
from conftest import ROOT

README = (ROOT / "README.md").read_text()
RECIPES = re.findall(r"```python\n(# files: ([^\n]+)\n.*?)```", README, re.DOTALL)


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """Every recipe in a process and a folder of its own, with the files it names and nothing else; all at once."""
    started = []
    for code, files in RECIPES:
        folder = tmp_path_factory.mktemp("recipe")
        for file in files.split():
            shutil.copy(ROOT / file, folder)
        (folder / "recipe.py").write_text(code)
        command = [sys.executable, "-I", "-c", f"import sys; sys.path.insert(0, {str(folder)!r}); import recipe"]
        started.append(
            subprocess.Popen(command, stderr=subprocess.PIPE, stdout=subprocess.DEVNULL, text=True, cwd=folder)
        )
    return started


@pytest.mark.parametrize("number", range(len(RECIPES)), ids=[files.split()[0] for _, files in RECIPES])
def test_a_recipe_runs_alone_with_the_files_it_names(runs, number):
    _, err = runs[number].communicate(timeout=120)
    assert runs[number].returncode == 0, err[-2000:]


def test_there_are_recipes():
    assert len(RECIPES) >= 5


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
    for block in re.split(r"^### ", section, flags=re.MULTILINE)[1:]:
        name = re.search(r"`(\w+)\.py`", block).group(1)
        sources = "".join((ROOT / f"{file}.py").read_text() for file in (name, "common", "kernels"))
        for function in re.findall(r"-> (.+)", block):
            for word in re.findall(r"`(?:\w+\.)?(\w+)`", function):
                assert re.search(rf"^(?:    )?(?:def|class) {word}\b", sources, re.MULTILINE), (name, word)
