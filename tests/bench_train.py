"""One training step, forward and backward, of each script, against the same step on the library's forward.

    python tests/bench_train.py                    (tiny shape on CPU, 0.6B with rows of 2048 tokens on a GPU)
    python tests/bench_train.py --scripts refusion --shape 0.6B --length 512

Random rows, a quarter of each the prompt; random weights in a Qwen3 shape, prepared by the script's own
`train`. The library's side: its own forward with SDPA and a dense mask, and the logits of all rows at once.
Where a step needs other projections than the library has (D2F's LoRA, Orthrus's second view), that walk is
ours, uncompiled, with the dense mask. tokens/s counts tokens of the data, not their copies. Times are medians
(smallest - largest), after a step apart; peak memory on CUDA; "-" where the library's side runs out of it.
TFLOP/s count what `UsefulFlops` does. The last line of stdout is JSON.
"""

import contextlib
import dataclasses
import importlib
import io
import json
import tempfile
from pathlib import Path
from unittest import mock

import torch
import torch.nn.functional as F
from bench_decode import SHAPES, build, header, milliseconds, parser, spread, table
from torch.overrides import TorchFunctionMode

import common
from common import dense, own_projection, walk

SCRIPTS = ["refusion", "d2f", "fastdllm_v2", "orthrus", "codila"]


def run_script(script, argv, **changes):
    """The script's own main(argv), silent, some of its functions replaced. ValueError where it refuses."""
    said = io.StringIO()
    silent = contextlib.redirect_stdout(said), contextlib.redirect_stderr(said)
    with mock.patch.multiple(script, METHOD=script.METHOD, **changes), silent[0], silent[1]:
        status = script.main([str(word) for word in argv])
    if status:
        raise ValueError(f"{script.METHOD} {argv}: {said.getvalue()}")


def random_weights(shape, device, prompt, answer):
    """Changes for `run_script`: a backbone of random weights in a named shape, random rows of so many tokens.

    Settings as in the paper. Ids are of the whole vocabulary: cfg.vocab_len must become `vocab_len(shape)`.
    """

    def encode(tokenizer, messages, text=""):
        ids = torch.randint(2, vocab_len(shape), (prompt + answer,)).tolist()
        return {"prompt_ids": ids[:prompt], "answer_ids": [*ids[prompt:-1], tokenizer.eos_token_id]}

    return dict(
        TINY={},
        encode=encode,
        from_pretrained=lambda name, dtype, meta=False: build(shape, device, dtype),
        read_data=lambda path: [([{"role": "user", "content": ""}], "", None)] * 8,
    )


def vocab_len(shape):
    return SHAPES[shape][6] - 2


def prepared_step(script, argv, shape=None, device="cpu", **changes):
    """(model, inputs, cfg) of the first step of the script's own `train`, on its device; see `run_script`."""
    found = []

    def fit(model, part, tokenizer, rows, cfg, folder=None):
        cfg.vocab_len = vocab_len(shape) if shape else cfg.vocab_len
        generator = torch.Generator().manual_seed(0)
        batch = rows[: cfg.batch_size]
        inputs = script.make_training_inputs(batch, script.draw_noise(batch, cfg, generator), cfg)
        model.to(cfg.device).train()
        found.extend([model, {name: x.to(cfg.device) for name, x in inputs.items()}, cfg])

    with tempfile.TemporaryDirectory() as folder:
        argv = ["--train", "--accumulation", 1, "--out", Path(folder, "run"), "--device", device, *argv]
        run_script(script, argv, fit=fit, **changes)
    return found


def library_walk(backbone, input_ids, position_ids, attn_mask, layer_kvs=None, write_idx=None, *,
                 project=own_projection, **settings):  # fmt: skip
    """walk's signature on the library's own forward, where that can do it; else our layers, uncompiled."""
    if layer_kvs is not None or project is not own_projection:
        return walk(backbone, input_ids, position_ids, attn_mask, layer_kvs, write_idx, project=project,
                    compiled=False)  # fmt: skip
    embeds = input_ids if input_ids.is_floating_point() else backbone.model.embed_tokens(input_ids)
    mask = attn_mask.expand(len(embeds), -1, -1, -1)
    inputs = dict(inputs_embeds=embeds, position_ids=position_ids, attention_mask=mask)
    return backbone.model(**inputs, use_cache=False).last_hidden_state


def full_token_nll(head, hidden, labels, chunk=None):
    """-log p of every label, from the logits of all rows at once."""
    logits = head(hidden).float()
    return F.cross_entropy(logits.flatten(0, -2), labels.flatten(), reduction="none").view(labels.shape)


@contextlib.contextmanager
def on_the_library(script):
    """The script's loss on the library's forward, dense masks and whole logits."""
    changes = dict(walk=library_walk, token_nll=full_token_nll, build_mask=dense,
                   by_chunks=lambda function, *rows, chunk=None: function(*rows))  # fmt: skip
    own = {name: change for name, change in changes.items() if hasattr(script, name)}
    with mock.patch.multiple(script, **own), mock.patch.object(common, "by_chunks", changes["by_chunks"]):
        yield


class UsefulFlops(TorchFunctionMode):
    """Counts in `flops` the products of a loss, and those of the backward that will follow.

    A product counts again for each side that wants a gradient; attention counts the pairs that the dense mask
    allows, and 2.5 times as much backward. What is computed a second time in backward is not useful.
    """

    flops = 0

    def __torch_function__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        wanted = [torch.is_grad_enabled() and x.requires_grad for x in args[:2] if torch.is_tensor(x)]
        if func.__name__ in ("linear", "matmul", "__matmul__"):
            self.flops += 2 * result.numel() * args[0].shape[-1] * (1 + sum(wanted))
        if func.__name__ == "scaled_dot_product_attention":
            T = args[0].shape[-2]
            S = args[1].shape[-2]
            mask = kwargs.get("attn_mask")
            if mask is None:
                mask = torch.ones(T, S, device=result.device).tril(0 if kwargs.get("is_causal") else S) > 0
            allowed = mask if mask.dtype == torch.bool else mask == 0  # else -inf
            pairs = allowed.expand(*result.shape[:-1], S).sum().item()
            self.flops += 4 * pairs * result.shape[-1] * (3.5 if any(wanted) else 1)
        return result


def loss_of(script, model, inputs, cfg):
    with torch.autocast(torch.device(cfg.device).type, torch.bfloat16, enabled=cfg.dtype == "bfloat16"):
        return script.training_loss(model, inputs, cfg)[0]


def useful_flops(script, model, inputs, cfg):
    """Of a step, counted in a forward of plain layers under dense masks, which keeps no activations."""
    cfg = dataclasses.replace(cfg, checkpointing=True)
    with mock.patch.object(script, "build_mask", dense), UsefulFlops() as counted:
        loss_of(script, model, inputs, cfg)
    return counted.flops


def timed(script, model, inputs, cfg, repeat):
    """Loss, (median, smallest, largest) ms of forward and backward, first ms, peak MiB on CUDA or None."""
    cuda = cfg.device.startswith("cuda")

    def step():
        loss = loss_of(script, model, inputs, cfg)
        loss.backward()
        model.zero_grad()
        return loss

    torch.manual_seed(0)  # dropout
    loss = step().item()
    first = milliseconds(step, cfg.device, 1)[0]
    if cuda:
        torch.cuda.reset_peak_memory_stats()
    times = milliseconds(step, cfg.device, repeat)
    peak = torch.cuda.max_memory_allocated() / 2**20 if cuda else None
    return dict(loss=loss, ms=times, first_ms=first, peak_mib=peak)


def main(argv=None):
    sizes = dict(shape=("tiny", "0.6B"), length=(128, 2048), batch=(1, 1), repeat=(3, 10))
    args = parser(__doc__, scripts=(SCRIPTS, SCRIPTS), **sizes).parse_args(argv)
    head = header(args.device)
    print(f"{args.shape} shape, rows of {args.length} tokens, batch {args.batch}\n")
    peaks = "peak MiB, ours", "library"
    table("script", "ours ms", "library ms", "x library", "tokens/s", "TFLOP/s", *peaks)
    table(*["---"] * 8)
    rows = []
    for name in args.scripts:
        script = importlib.import_module(name)
        changes = random_weights(args.shape, args.device, args.length // 4, args.length - args.length // 4)
        flags = ["--batch_size", args.batch, "--max_len", args.length, "--dtype", head["dtype"]]
        flags += ["--anchors", args.length // 8] if name == "orthrus" else []  # the paper's of 2048
        model, inputs, cfg = prepared_step(script, flags, args.shape, args.device, **changes)
        ours = timed(script, model, inputs, cfg, args.repeat)
        try:
            with on_the_library(script):
                library = timed(script, model, inputs, cfg, args.repeat)
        except torch.OutOfMemoryError:
            library = None
        seconds = 1e-3 * ours["ms"][0]
        row = dict(script=name, ours=ours, library=library, tok_s=args.batch * args.length / seconds)
        row["tflops"] = 1e-12 * useful_flops(script, model, inputs, cfg) / seconds
        rows.append(row)
        theirs = (spread(library["ms"]), library["ms"][0] / ours["ms"][0]) if library else ("-", "-")
        peaks = [side["peak_mib"] if side and side["peak_mib"] else "-" for side in (ours, library)]
        table(name, spread(ours["ms"]), *theirs, row["tok_s"], row["tflops"], *peaks)
        del model, inputs
    print(json.dumps(head | dict(shape=args.shape, length=args.length, batch=args.batch, rows=rows)))


if __name__ == "__main__":
    main()
