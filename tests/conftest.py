"""Puts the root on sys.path, finds the reference vectors, registers the gpu marker.

GOLDEN_DIR=FOLDER runs the same tests over other vectors of the same layout.
"""

import concurrent.futures
import json
import os
import sys
import tempfile
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

ROOT = Path(__file__).resolve().parent.parent
TINY = ROOT / "tests" / "tiny"
sys.path.insert(0, str(ROOT))
GOLDEN = Path(os.environ.get("GOLDEN_DIR", ROOT / "tests" / "golden"))
os.environ.setdefault("HF_HUB_OFFLINE", "1")  # no test may reach for the network
torch.set_num_threads(int(os.environ.get("TEST_THREADS", 1)))  # small tensors; the other core is for POOL
POOL = concurrent.futures.ThreadPoolExecutor(1)
TMP = tempfile.TemporaryDirectory()


def pytest_configure(config):
    config.addinivalue_line("markers", "gpu: needs a CUDA device")


def pytest_collection_modifyitems(items):
    if not torch.cuda.is_available():
        skip = pytest.mark.skip(reason="needs a CUDA device")
        for item in items:
            if "gpu" in item.keywords:
                item.add_marker(skip)


def pytest_collection_finish(session):
    """What a module runs in processes of its own (`start`) begins now, beside the tests of the other modules."""
    if not session.config.option.collectonly:
        for module in dict.fromkeys(item.module for item in session.items):
            if hasattr(module, "start"):
                module.STARTED = module.start()


@pytest.fixture
def started(request):
    return request.module.STARTED


def golden(method):
    """(cases of cases.json, tensors of cases.safetensors, folder) of a method."""
    folder = GOLDEN / method
    return json.loads((folder / "cases.json").read_text()), load_file(folder / "cases.safetensors"), folder


def load_backbone(folder):
    from common import from_pretrained

    return from_pretrained(folder, torch.float32).eval()
