"""Makes tests/pictures/five.svg again: one problem decoded by the five methods, round by round.

    python tests/pictures.py [RUNS]      RUNS/SCRIPT is what a script trained there (default: runs); what is not there
                                         is trained first, about a minute a script on two cores
"""

import importlib
import sys
import tempfile
from pathlib import Path
from xml.etree import ElementTree

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))
PENS = "Tom has 3 red and 4 blue pens and gets 5 more. How many pens?"
PLANS = (  # script, prompt, flags, caption
    ("refusion", PENS, "--tau_slot 1", "ReFusion, the surest slot of 4 tokens a round (--tau_slot 1)"),
    ("d2f", PENS, "", "D2F, blocks of 8 in a pipeline"),
    ("fastdllm_v2", PENS, "", "Fast-dLLM v2, blocks of 7, all that is surer than 0.9"),
    ("orthrus", PENS, "", "Orthrus, drafts of up to 15 tokens, verified"),
    ("codila", "2 red lines 0042:", "--temperature 0.7", "CoDiLA, blocks of 4, on its own task"),
)


def main(runs="runs"):
    SVG = "{http://www.w3.org/2000/svg}"
    ElementTree.register_namespace("", SVG[1:-1])
    pictures = []
    for name, prompt, flags, caption in PLANS:
        script = importlib.import_module(name)
        out = ["--out", str(Path(runs, name))]
        with tempfile.TemporaryDirectory() as folder:
            file = f"{folder}/trace.svg"
            trained = Path(runs, name, "config.json").exists() or script.main(["--train", *out]) == 0
            decode = ["--generate", *out, "--prompt", prompt, "--trace-svg", file, *flags.split()]
            if not trained or script.main(decode):
                return 2
            pictures.append((caption, ElementTree.parse(file).getroot()))
    width = max(float(picture.get("width")) for _, picture in pictures)
    height = sum(float(picture.get("height")) + 34 for _, picture in pictures) + 10
    five = ElementTree.Element(f"{SVG}svg", width=f"{width:.0f}", height=f"{height:.0f}")
    ElementTree.SubElement(five, f"{SVG}rect", width="100%", height="100%", fill="#fff")
    y = 10
    for caption, picture in pictures:
        place = {"x": "8", "y": f"{y + 18}", "font-family": "sans-serif", "font-size": "15", "font-weight": "bold"}
        ElementTree.SubElement(five, f"{SVG}text", place).text = caption
        picture.set("y", f"{y + 26}")
        five.append(picture)
        y += float(picture.get("height")) + 34
    target = ROOT / "tests" / "pictures" / "five.svg"
    target.write_text(ElementTree.tostring(five, encoding="unicode") + "\n", "utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
