"""Every script on a device that does not exist: tensors carry a mark, and what a GPU would refuse is refused here.

A mixture of marked and unmarked tensors is an error, as with a GPU and a CPU; what makes the CPU wait is counted. So
a loop or a loss that would break, or wait more than once a forward, on a GPU fails on any machine.
"""

import importlib

import pytest
import torch
from bench_train import SCRIPTS, random_model, setup
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves, tree_map

import common
import kernels
from common import Decoder, generate_ar, prepare

DEVICE = torch.device("meta")  # a name that the library knows and this test owns
FREE = {"__setitem__", "copy_"}  # a GPU takes these from the CPU
WAITS = {"cpu", "item", "tolist", "__bool__", "__int__", "__float__", "__index__", "nonzero", "equal", "allclose"}


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
        """Waits with work in front of them; a second copy right behind the first is free."""
        pairs = zip(["wait", *self.events], self.events)
        return sum(kind == "wait" and before == "launch" for before, kind in pairs)

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs, name = dict(kwargs or {}), getattr(func, "__name__", "")
        here = [tensor for tensor in tree_leaves((args, kwargs)) if marked(tensor)]
        if name == "__get__" and func == torch.Tensor.device.__get__:
            return DEVICE if here else torch.device("cpu")
        if name == "to":
            return self.move(args, kwargs)
        if here:
            index = name in ("__getitem__", "index_put_") and marked(args[0])
            leaves = tree_leaves((args, kwargs))
            others = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor) and not marked(leaf) and leaf.dim()]
            free = index or (name in FREE and marked(args[0]))
            assert free or not others, f"{name}: {len(here)} tensors on the device, {len(others)} not"
            by_mask = name == "__getitem__" and any(t.dtype == torch.bool for t in here[1:])
            self.events.append("wait" if name in WAITS or by_mask else "launch")
            if name == "cpu":
                return args[0].detach().clone()
        device = kwargs.get("device")
        made_here = device is not None and torch.device(device) == DEVICE
        if made_here:
            kwargs["device"] = "cpu"
        result = func(*args, **kwargs)
        return tree_map(mark, result) if here or made_here else result

    def move(self, args, kwargs):
        tensor, rest, target = args[0], [], kwargs.pop("device", None)
        for arg in args[1:]:
            if isinstance(arg, torch.Tensor):
                target, kwargs["dtype"] = DEVICE if marked(arg) else "cpu", arg.dtype
            elif isinstance(arg, (str, torch.device)):
                target = arg
            else:
                rest.append(arg)
        there = marked(tensor) if target is None else torch.device(target) == DEVICE
        result = tensor.to(*rest, **kwargs) if rest or kwargs else tensor
        if there == marked(tensor):
            return mark(result) if there else result
        if not (there and kwargs.get("non_blocking")):
            self.events.append("wait")
        result = result.clone()  # another tensor, whose mark is its own
        return mark(result) if there else result


def put_there(model):
    """A model on the pretended device, RoPE frequencies included."""
    for tensor in [*model.parameters(), *model.buffers()]:
        mark(tensor)
    for module in model.modules():
        for name, value in vars(module).items():
            if isinstance(value, torch.Tensor):
                mark(value)
        if hasattr(module, "rotary"):
            prepare(module)
    return model


def test_the_pretended_device_refuses_what_a_gpu_refuses():
    with PretendedDevice() as device:
        here, there = torch.ones(3), torch.ones(3, device=DEVICE)
        assert there.device == DEVICE and (there + 1).device == DEVICE and here.device.type == "cpu"
        for call in (lambda: here + there, lambda: torch.cat([here, there]), lambda: here[there.long()]):
            with pytest.raises(AssertionError, match="on the device"):
                call()
        there[1:] = here[1:]
        assert there[torch.tensor([0, 1])].device == DEVICE and (there * torch.tensor(2.0)).device == DEVICE
        device.events.clear()
        assert (there + here.to(there.device)).cpu().tolist() == [2, 2, 2] and device.waits() == 1
        there.cpu()
        assert device.waits() == 1


@pytest.mark.parametrize("temperature, padded", [(0.0, False), (0.0, True), (1.0, True)])
@pytest.mark.parametrize("name", SCRIPTS)
def test_decoding_keeps_devices_apart_and_waits_once_a_forward(monkeypatch, name, temperature, padded):
    """Every decoding that the script offers, and plain AR; padded: as CUDA graphs do it."""
    script, results = importlib.import_module(name), []
    replay = kernels.GraphReplay.__call__

    def call(self, *args):
        assert not any(map(marked, args[1:4])), "positions, mask and places lie on the CPU"
        self.pad = padded
        return replay(self, *args)

    for on_device in (False, True):
        torch.manual_seed(0)
        model, cfg = random_model(script, "tiny", torch.float32, device="cpu", dtype="float32", max_new_tokens=16)
        cfg.temperature = temperature
        if name == "orthrus":
            cfg.merged = 2
        if name == "codila":
            cfg.table = "4"
        prompt_ids = torch.arange(2, 11)[None]
        with PretendedDevice() as device:
            if on_device:
                put_there(model)
                monkeypatch.setattr(kernels.GraphReplay, "__call__", call)
                mark(prompt_ids)
            model.train(False)
            runs = [(label, run, model, script.new_decoder(model, 9, cfg)) for label, run in script.decoders(cfg)]
            lm = script.plain_lm(model)
            runs.append(("plain AR", generate_ar, lm, Decoder(lm, 25)))
            for label, run, lm, decoder in runs:
                device.events.clear()
                ids, record = run(lm, prompt_ids, cfg, decoder, torch.Generator().manual_seed(1))
                assert marked(ids) == on_device, label
                most = record["forwards"] + record.get("aux_forwards", 0) + 2
                if not ("merged" in label or (name == "codila" and temperature)):  # a choice or a draw of their own
                    assert device.waits() <= most, label
                results.append((label, ids.tolist(), record["forwards"], record["fixed_round"]))
    assert results[: len(runs)] == results[len(runs) :]


@pytest.mark.parametrize("temperature, padded", [(0.0, False), (1.0, True)])
@pytest.mark.parametrize("block_cache", [False, True])
def test_ragged_batches_of_fastdllm_v2_keep_devices_apart(monkeypatch, block_cache, temperature, padded):
    """Prompts in several blocks, rows that leave early by their stop token: one wait a forward, same texts."""
    script, replay = importlib.import_module("fastdllm_v2"), kernels.GraphReplay.__call__

    def call(self, *args):
        assert not any(map(marked, args[1:4])), "positions, mask and places lie on the CPU"
        self.pad = padded
        return replay(self, *args)

    def decode(eos_id, on_device):
        torch.manual_seed(0)
        model, cfg = random_model(script, "tiny", torch.float32, device="cpu", dtype="float32", max_new_tokens=32)
        cfg.temperature, cfg.block_cache, cfg.eos_id = temperature, block_cache, eos_id
        prompts = [torch.arange(2, 2 + P) for P in (3, 8, 13, 21)]  # blocks of 8: without prefill, aligned, ragged
        with PretendedDevice() as device, monkeypatch.context() as patch:
            if on_device:
                put_there(model)
                patch.setattr(kernels.GraphReplay, "__call__", call)
                prompts = [mark(ids) for ids in prompts]
            texts, record = script.generate_batch(
                model.train(False), prompts, cfg, generator=torch.Generator().manual_seed(1)
            )
            assert all(marked(ids) == on_device for ids in texts)
            assert device.waits() <= record["forwards"] + 2
            return [ids.tolist() for ids in texts], record

    eos_id = decode(-1, False)[0][0][12]  # what the first row says in its second block: it stops there
    results = [decode(eos_id, on_device) for on_device in (False, True)]
    assert results[0] == results[1]
    assert len({len(ids) for ids in results[0][1]["fixed_round"]}) > 1, "the rows end at different lengths"


@pytest.mark.parametrize("name", SCRIPTS)
def test_a_training_step_keeps_devices_apart(name):
    script, losses = importlib.import_module(name), []
    for on_device in (False, True):
        model, inputs, cfg, loss_of = setup(script, "tiny", 32, 2, "cpu")
        with PretendedDevice():
            if on_device:
                put_there(model)
                inputs = {key: value.to(DEVICE) for key, value in inputs.items()}
            torch.manual_seed(0)
            loss, _ = loss_of(model, inputs, cfg)
            assert marked(loss) == on_device
            loss.backward()
        losses.append(loss.item())
    assert losses[0] == losses[1]


@pytest.mark.parametrize("name", ["refusion", "d2f", "fastdllm_v2"])
def test_what_a_graph_captures_gives_the_same_text(monkeypatch, name):
    """Layers, head and readout traced whole, queries and rows padded to buckets: as on CUDA, only not captured."""
    for function in (common.decoder_layer, common.read_head):
        traced = torch.compile(function, fullgraph=True, dynamic=False, backend="eager")
        monkeypatch.setitem(common._compiled, function, traced)
    script, prompt_ids = importlib.import_module(name), torch.arange(2, 23)[None]
    for temperature in (0.0, 1.0):
        torch.manual_seed(0)
        model, cfg = random_model(script, "tiny", torch.float32, device="cpu", dtype="float32", max_new_tokens=16)
        cfg.temperature, results = temperature, []
        for cfg.compile in (False, True):
            method, ar = script.new_decoder(model.train(False), 21, cfg), Decoder(model, 37, compiled=cfg.compile)
            for run, decoder in ((script.decoders(cfg)[0][1], method), (generate_ar, ar)):
                decoder.replay.pad = cfg.compile
                ids, record = run(model, prompt_ids, cfg, decoder, torch.Generator().manual_seed(1))
                results.append((ids.tolist(), record["forwards"], record["fixed_round"]))
        assert results[:2] == results[2:] and not kernels.refused("torch.compile")
        assert any(key[3] for decoder in (method, ar) for key in decoder.replay.graphs), "a prefill reads its last rows"
        reads = {key[-1][:1] for key in method.replay.graphs}
        assert reads and (() not in reads or temperature > 0), "greedy decoding reads no logits outside the graph"


@pytest.mark.gpu
@pytest.mark.parametrize("name", SCRIPTS)
def test_a_gpu_writes_the_texts_of_the_cpu(name):
    """Compiled layers, captured and replayed graphs, a training step on flex_attention: float32, random weights.

    One text in many may part at a near tie.
    """
    script, results, losses = importlib.import_module(name), [], []
    for where in ("cpu", "cuda"):
        torch.manual_seed(0)
        model, cfg = random_model(script, "tiny", torch.float32, device="cpu", dtype="float32", max_new_tokens=16)
        cfg.device, cfg.compile = where, where == "cuda"
        if name == "orthrus":
            cfg.merged = 2
        model = model.to(where).train(False)
        for _, run in script.decoders(cfg):
            decoder = script.new_decoder(model, 21, cfg)
            for first in (2, 2, 7, 12, 17):  # captured, then replayed
                prompt_ids = torch.arange(first, first + 21, device=where)[None]
                ids, record = run(model, prompt_ids, cfg, decoder, torch.Generator().manual_seed(1))
                results.append((ids.tolist(), record["forwards"], record["fixed_round"]))
            assert results[-5] == results[-4]
        model, inputs, cfg, loss_of = setup(script, "tiny", 128, 2, where)
        cfg.dtype = "float32"
        losses.append(loss_of(model, inputs, cfg)[0].item())
    half = len(results) // 2
    assert sum(ours == theirs for ours, theirs in zip(results, results[half:])) >= 0.7 * half
    assert losses[0] == pytest.approx(losses[1], rel=2e-2)
    assert not kernels.refused("torch.compile") and not kernels.refused("flex_attention")
