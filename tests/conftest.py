"""Puts the root on sys.path, finds the reference vectors, registers the gpu marker.

GOLDEN_DIR=FOLDER runs the same tests over other vectors of the same layout.
"""

import json
import os
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))
GOLDEN = Path(os.environ.get("GOLDEN_DIR", ROOT / "tests" / "golden"))
os.environ.setdefault("HF_HUB_OFFLINE", "1")  # no test may reach for the network
torch.set_num_threads(int(os.environ.get("TEST_THREADS", 2)))


def pytest_configure(config):
    config.addinivalue_line("markers", "gpu: needs a CUDA device")


def pytest_collection_modifyitems(items):
    if not torch.cuda.is_available():
        skip = pytest.mark.skip(reason="needs a CUDA device")
        for item in items:
            if "gpu" in item.keywords:
                item.add_marker(skip)


def golden(method):
    """(cases of cases.json, tensors of cases.safetensors, folder) of a method."""
    folder = GOLDEN / method
    return json.loads((folder / "cases.json").read_text()), load_file(folder / "cases.safetensors"), folder


def load_backbone(folder):
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
