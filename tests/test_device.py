"""Every script on a device that does not exist: tensors carry a mark, what a GPU would refuse is refused.

A mixture of marked and unmarked tensors is an error, as with a GPU and a CPU; what makes the CPU wait is
counted. The models, decoders and rows are those of the script's own command line.
"""

import contextlib
import importlib

import pytest
import torch
from bench_train import SCRIPTS, prepared_step, run_script
from conftest import few_rows
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves, tree_map

from common import kernels

DEVICE = torch.device("xpu")  # a name that the library knows and no test machine has
FREE = {"__setitem__", "copy_", "index_put_"}  # a GPU takes these from the CPU
NO_WORK = {"__get__", "size", "dim", "numel", "__len__", "is_floating_point"}  # nor has indexing by numbers
NUMBERS = {"item", "tolist", "__bool__", "__int__", "__float__", "__index__"}
WAITS = {"cpu", "nonzero", "equal", "allclose"} | NUMBERS


def marked(value):
    return isinstance(value, torch.Tensor) and getattr(value, "is_marked", False)


def mark(value):
    if isinstance(value, torch.Tensor):
        value.is_marked = True
    return value


class PretendedDevice(TorchFunctionMode):
    """Marks what is made or moved there, refuses mixtures, and notes launches and waits in `events`."""

    def __init__(self):
        super().__init__()
        self.events = []

    def waits(self):
        """Names of the waits with work before them; a second one right after the first is free."""
        pairs = zip(["wait", *self.events], self.events)
        return [name for before, name in pairs if name != "launch" and before == "launch"]

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = dict(kwargs or {})
        name = getattr(func, "__name__", "")
        leaves = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
        here = any(map(marked, leaves))
        if name == "__get__" and func == torch.Tensor.device.__get__:
            return DEVICE if here else torch.device("cpu")
        if name == "to":
            return self.move(args, kwargs)
        if here:
            others = [leaf for leaf in leaves if not marked(leaf) and leaf.dim()]
            by_index = name == "__getitem__" and marked(args[0])
            allowed = by_index or (name in FREE and marked(args[0]))
            assert allowed or not others, f"{name}: tensors that are not on the device"
            by_mask = name == "__getitem__" and any(leaf.dtype == torch.bool for leaf in leaves[1:])
            waits = name in WAITS or by_mask or (others and not kwargs.get("non_blocking"))
            if name not in NO_WORK and not (by_index and len(leaves) == 1):
                self.events.append(name if waits else "launch")
            if name == "cpu":
                return args[0].detach().clone()
        if torch.device(kwargs.get("device") or "cpu") == DEVICE:
            here = True
            kwargs["device"] = "cpu"
        result = func(*args, **kwargs)
        return tree_map(mark, result) if here else result

    def move(self, args, kwargs):
        tensor = args[0]
        target = kwargs.pop("device", None)
        for arg in args[1:]:
            if isinstance(arg, torch.dtype):
                kwargs["dtype"] = arg
            elif isinstance(arg, torch.Tensor):
                target = DEVICE if marked(arg) else "cpu"
                kwargs["dtype"] = arg.dtype
            elif isinstance(arg, (str, torch.device)):
                target = arg
        there = marked(tensor) if target is None else torch.device(target) == DEVICE
        result = tensor.to(**kwargs) if kwargs else tensor
        if there != marked(tensor):
            result = result.clone()  # another tensor, whose mark is its own
            if not (there and kwargs.get("non_blocking")):
                self.events.append("to")
        return mark(result) if there else result


@pytest.fixture(autouse=True)
def modules_move_there(monkeypatch):
    """`module.to(DEVICE)` marks parameters and buffers; what a module holds besides stays where it is."""
    to = torch.nn.Module.to

    def moved(module, target):
        if isinstance(target, torch.dtype) or torch.device(target) != DEVICE:
            return to(module, target)
        for tensor in [*module.parameters(), *module.buffers()]:
            mark(tensor)
        return module

    monkeypatch.setattr(torch.nn.Module, "to", moved)


def test_the_pretended_device_refuses_what_a_gpu_refuses():
    with PretendedDevice() as device:
        here, there = torch.ones(3), torch.ones(3, device=DEVICE)
        assert there.device == DEVICE and (there + 1).device == DEVICE and here.device.type == "cpu"
        for call in (lambda: here + there, lambda: torch.cat([here, there]), lambda: here[there.long()]):
            with pytest.raises(AssertionError, match="not on the device"):
                call()
        device.events.clear()
        assert (there * torch.tensor(2.0) + here.to(DEVICE)).cpu().tolist() == [2 + 1] * 3
        there.cpu()  # nothing is under way
        there.add_(here.to(DEVICE, non_blocking=True))
        there[:2].copy_(here[:2], non_blocking=True)
        assert device.waits() == ["to", "cpu"]
        assert there[torch.tensor([0, 1])].device == DEVICE and device.waits()[2:] == ["__getitem__"]


def decodings(script, monkeypatch, device, *flags, padded=False, times=1):
    """[(label, texts, rounds, waits, forwards)] of all that `compare` decodes, and of a ragged batch."""
    found, calls = [], []
    replay = kernels.GraphReplay.__call__

    def call(self, forward, *inputs):
        calls.append(inputs)
        assert not any(map(marked, inputs[1:])), "positions, mask and places lie on the CPU"
        self.pad |= padded
        return replay(self, forward, *inputs)

    def decode(label, run, decoder, model, tokenizer, problems, cfg, args, ar=None):
        prompt_ids = problems[0][0]
        runs = {label: lambda generator: run(model, prompt_ids, cfg, decoder, generator)}
        if label == "fastdllm_v2":
            prompts = [prompt_ids[0, :n] for n in (5, 8, prompt_ids.shape[1])]
            runs["batch"] = lambda generator: script.generate_batch(model, prompts, cfg, generator=generator)
        for name, one in [*runs.items()] * times:
            pretended.events.clear()
            calls.clear()
            ids, record = one(torch.Generator().manual_seed(1))
            waits = pretended.waits()
            rows = [ids[i] for i in range(len(ids))]
            assert all(marked(row) == (device == str(DEVICE)) for row in rows), name
            texts = [row.tolist() for row in rows]
            found.append((name, texts, record["fixed_round"], waits, len(calls)))
        return dict(label=label)

    pretended = PretendedDevice()
    flags = ["--device", device, "--dtype", "float32", "--max_new_tokens", 12, *flags]
    with monkeypatch.context() as patch, contextlib.nullcontext() if device == "cuda" else pretended:
        patch.setattr(kernels.GraphReplay, "__call__", call)
        run_script(script, ["--generate", "--model", script.Config.model, *flags], decode=decode)
    return found


OWN = dict(refusion=["--plan_ahead"], orthrus=["--merged", 2], codila=["--table", 4], d2f=[],
           fastdllm_v2=["--block_cache"])  # fmt: skip


@pytest.mark.parametrize("name, temperature, padded",
                         [*((name, 1, True) for name in SCRIPTS), ("refusion", 0, False), ("orthrus", 0, False)])  # fmt: skip
def test_decoding_keeps_devices_apart_and_waits_once_a_forward(monkeypatch, name, temperature, padded):
    """Every decoding that the script offers, and plain AR; padded: as CUDA graphs do it."""
    script = importlib.import_module(name)
    flags = ["--temperature", temperature, *(OWN[name] if padded or name == "codila" else [])]
    expected = decodings(script, monkeypatch, "cpu", *flags)
    found = decodings(script, monkeypatch, str(DEVICE), *flags, padded=padded)
    assert [row[:3] for row in found] == [row[:3] for row in expected]
    for label, _, _, waits, calls in found:
        choices = 2 if "merged" in label else 1  # which drafts are likely to be kept is a choice of its own
        assert len(waits) <= choices * calls + 3, (label, waits)


@pytest.mark.parametrize("name", SCRIPTS)
def test_a_training_step_keeps_devices_apart_and_waits_only_to_choose_rows(name):
    """Which rows the head reads is asked once or twice; nothing else makes the CPU wait."""
    script = importlib.import_module(name)
    losses = []
    for device in ("cpu", str(DEVICE)):
        with PretendedDevice() as pretended:
            flags = ["--batch_size", 4, "--dtype", "float32", *few_rows(script)]
            step = prepared_step(script, flags, device=device)
            pretended.events.clear()
            torch.manual_seed(0)
            loss = script.training_loss(*step)[0]
            assert marked(loss) == (device != "cpu")
            waits = pretended.waits()
            assert len(waits) <= 2 and {*waits} <= {"__getitem__", "nonzero"}, waits
            loss.backward()
        losses.append(loss.item())
    assert losses[0] == pytest.approx(losses[1], rel=1e-6)  # sums of other shapes


@pytest.mark.gpu
@pytest.mark.parametrize("name", SCRIPTS)
def test_a_gpu_writes_the_texts_of_the_cpu(monkeypatch, name):
    """Compiled layers, captured and replayed graphs, a training step on flex_attention: float32."""
    script = importlib.import_module(name)
    results = [decodings(script, monkeypatch, device, *OWN[name], times=2) for device in ("cpu", "cuda")]
    for expected, found in zip(*results):
        assert found[:3] == expected[:3]
    losses = []
    for device in ("cpu", "cuda"):
        torch.manual_seed(0)
        step = prepared_step(script, ["--batch_size", 4, "--dtype", "float32"], device=device)
        losses.append(script.training_loss(*step)[0].item())
    assert losses[0] == pytest.approx(losses[1], rel=2e-2)
    assert not kernels.refused("torch.compile") and not kernels.refused("flex_attention")


@pytest.mark.gpu
@pytest.mark.parametrize("name", SCRIPTS)
def test_a_gpu_resumes_training(tmp_path, name):
    """Fused AdamW wants its step counts on the device; a save holds them as CPU tensors."""
    script = importlib.import_module(name)
    flags = ["--train", "--device", "cuda", "--batch_size", "4", "--out", str(tmp_path)]
    for more in (["--steps", "1"], ["--resume", "--steps", "2"]):
        assert script.main([*flags, *more]) == 0
