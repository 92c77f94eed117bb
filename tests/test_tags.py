"""Every number of a paper that a script cites exists there, and every formula and step that has one is cited.

NUMBERS: what each paper numbers, in the version that the script's header names; MUST: what has to be found in the code
at its place. A number in brackets, `[Eq. 7]` or `[Alg. 2 l.9-12]`, is a tag; text in the header counts as mention only.
"""

import re

import pytest
from conftest import ROOT

NUMBERS = {  # label: how many are counted from 1 on, or a list of those that exist
    "refusion": {
        "Eq.": 9, "Fig.": 10, "Table": 10, "Alg.": 0,
        "§": "2 3 4.1 4.2 4.3 5.1 5.2 5.3 5.4 5.5", "App.": "A.1 A.2 A.3 B.1 B.2 C.1 C.2 C.3 C.4 C.5 C.6 C.7 D.1 D.2 E",
    },
    "d2f": {
        "Eq.": 3, "Fig.": 5, "Table": 8, "Alg.": 2,
        "§": "3 4.1 4.2 4.3 5.1 5.2 5.3", "App.": "A.1 A.2 A.3 D E",
    },
    "fastdllm_v2": {
        "Eq.": 0, "Fig.": 7, "Table": 6, "Alg.": 0,
        "§": "2.1 2.2 2.3 3.1 3.2 3.3 4.1 4.2 4.3", "App.": "A.1 A.2 A.3 A.4",
    },
    "orthrus": {
        "Eq.": "2 3", "Fig.": "1 2 4 6", "Table": 4, "Alg.": 0,
        "§": "2 2.2 3.1 3.2 3.3 4 4.3 4.4", "App.": "A",
    },
    "codila": {
        "Eq.": "2", "Fig.": "1 3 4", "Table": 0, "Alg.": 0, "Theorem": "3.2 3.3",
        "§": "1 2 3 4", "App.": "A B",
    },
}  # fmt: skip
LINES = {"Alg. 1": range(2, 10), "Alg. 2": range(1, 15)}  # D2F's algorithms
MUST = {
    "refusion": "Eq.2 Eq.3 Eq.4 Eq.5 Eq.6 Eq.7 Eq.8 Eq.9 §4.1 §4.2 §4.3 §5.1 App.A.3 App.B.1 Table5 Table8",
    "d2f": "Eq.1 Eq.2 Eq.3 §4.1 §4.3 §5.1 Table4 " + " ".join(
        [f"Alg.1l.{n}" for n in (3, 4, 5, 7, 8, 9)] + [f"Alg.2l.{n}" for n in (*range(3, 15),)]),
    "fastdllm_v2": "§3.2 §3.3 §4.1 §4.2 App.A.1 App.A.2 App.A.3 App.A.4 Table2 Table3",
    "orthrus": "Eq.3 §3.1 §3.2 §3.3 §4 Fig.2(a) Fig.2(b) Table4",
    "codila": "Eq.2 §3 Fig.1a Theorem3.2 Theorem3.3 App.A",
}  # fmt: skip
NAME = re.compile(r"(Eq\.|Fig\.|Table|Alg\.|App\.|Theorem|§) ?([A-Z](?:\.\d+)*|\d+(?:\.\d+)*)(?=([^\n;\]]*))")


def cited(text):
    """Every (label, number) of a text, ranges and lists spelled out: `Eq. 2-4`, `Eq. 5 and 9`, `Alg. 2 l.9-12`."""
    found = []
    for label, number, rest in NAME.findall(text):
        numbers = [number]
        if label == "Alg.":
            lines = re.match(r" l\.(\d+(?:-\d+)?(?:, \d+(?:-\d+)?)*)", rest)
            parts = [part.partition("-") for part in lines[1].split(", ")] if lines else []
            lines = [n for first, _, last in parts for n in range(int(first), int(last or first) + 1)]
            numbers = [f"{number}l.{n}" for n in lines] or numbers
        elif part := re.match(r"\([a-d]\)|[a-d]\b", rest):
            numbers = [number + part[0]]
        elif number.isdigit():
            more = re.match(r"-(\d+)", rest)
            numbers += map(str, range(int(number) + 1, int(more[1]) + 1)) if more else []
            more = re.match(r"(?:(?:,| and|, and) \d+(?![.\d]))+", rest)
            numbers += re.findall(r"\d+", more[0]) if more else []
        found += [(label, n) for n in numbers]
    return found


def exists(script, label, number):
    known = NUMBERS[script].get(label, 0)
    if label == "Alg." and "l." in number:
        algorithm, line = number.split("l.")
        return int(line) in LINES.get(f"Alg. {algorithm}", ()) and int(algorithm) <= known
    plain = re.sub(r"\([a-d]\)|(?<=\d)[a-d]$", "", number)
    return 1 <= int(plain) <= known if isinstance(known, int) and plain.isdigit() else plain in str(known).split()


def code_of(script):
    """The script's own part, without the frame, in which no paper is cited."""
    return re.split(r"^# =+ frame: ", (ROOT / f"{script}.py").read_text(), flags=re.MULTILINE)[0]


@pytest.mark.parametrize("script", NUMBERS)
def test_no_tag_cites_a_number_that_is_not_there(script):
    wrong = [f"{label} {number}" for label, number in cited(code_of(script)) if not exists(script, label, number)]
    assert not wrong


@pytest.mark.parametrize("script", MUST)
def test_every_numbered_formula_and_step_is_at_its_line(script):
    header, code = code_of(script).split('"""\n', 1)
    tags = " ".join(re.findall(r"\[[^\]]*\]", code))
    found = {label + number for label, number in cited(tags)}
    assert not [tag for tag in MUST[script].split() if tag not in found]


def test_lists_ranges_and_lines_are_read():
    assert cited("[Eq. 2-4] [Alg. 2 l.9-10, §4.3] [Fig. 2(b), Step 1] [App. A.3, Eq. 8 and 9]") == [
        ("Eq.", "2"), ("Eq.", "3"), ("Eq.", "4"), ("Alg.", "2l.9"), ("Alg.", "2l.10"), ("§", "4.3"),
        ("Fig.", "2(b)"), ("App.", "A.3"), ("Eq.", "8"), ("Eq.", "9")]  # fmt: skip
    assert not exists("refusion", "Eq.", "10") and not exists("d2f", "Alg.", "2l.15") and not exists("codila", "§", "3.1")
