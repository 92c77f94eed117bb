"""One decode forward at batch 1: ours, the library's with SDPA and with eager attention, the memory floor.

    python tests/bench_decode.py                                  (tiny shape on CPU, three of Qwen3 on a GPU)
    python tests/bench_decode.py --shapes 0.6B --queries 1 8 --repeat 5

A forward is embedding, layers, norm and head for `queries` tokens after a filled cache; random weights. Ours
is what decoding runs: on CUDA compiled layers in a replayed graph. floor: bytes of weights and cache that a
forward reads, over the copy bandwidth measured in the same run. Times are medians (smallest - largest); the
first call, which compiles and captures, is timed apart. The last line of stdout is JSON.
"""

import argparse
import inspect
import json
import statistics
import subprocess
import sys
import time
from pathlib import Path

import torch
import transformers
from transformers import DynamicCache, Qwen3Config, Qwen3ForCausalLM

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))
from common import Decoder, causal, dense

SHAPES = {  # hidden, intermediate, layers, heads, kv heads, head dim, vocabulary, tied
    "tiny": (128, 384, 4, 4, 2, 32, 64, True),
    "0.6B": (1024, 3072, 28, 16, 8, 128, 151936, True),
    "1.7B": (2048, 6144, 28, 16, 8, 128, 151936, True),
    "8B": (4096, 12288, 36, 32, 8, 128, 151936, False),
}


# ---------------------------------------------------------------------------------- what all benchmarks share


def parser(doc, **defaults):
    """A parser with --device and one flag for each default: (its value on CPU, on a GPU)."""
    on_gpu = torch.cuda.is_available()
    found = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    found.add_argument("--device", default="cuda" if on_gpu else "cpu")
    for name, values in defaults.items():
        value = values[on_gpu]
        more = dict(nargs="+", type=type(value[0])) if isinstance(value, list) else dict(type=type(value))
        found.add_argument(f"--{name}", default=value, **more)
    return found


def header(device):
    """What a figure is of: printed on top, and part of the JSON line."""
    cuda = device.startswith("cuda")
    git = ["git", "-C", str(ROOT), "describe", "--always", "--dirty"]
    commit = subprocess.run(git, capture_output=True, text=True).stdout.strip() or "-"
    found = dict(
        device=torch.cuda.get_device_name(device) if cuda else "CPU",
        threads=torch.get_num_threads(),
        dtype="bfloat16" if cuda else "float32",
        torch=torch.__version__,
        transformers=transformers.__version__,
        commit=commit,
    )
    print(", ".join(f"{key} {value}" for key, value in found.items()) + "\n")
    return found


def table(*cells):
    """A row of markdown."""
    texts = [(f"{x:.3g}" if x < 100 else f"{x:,.0f}") if isinstance(x, float) else str(x) for x in cells]
    print("| " + " | ".join(texts) + " |", flush=True)


def build(shape, device, dtype):
    """A Qwen3 of random weights, made on the device."""
    hidden, inner, layers, heads, kv_heads, head_dim, vocab, tied = SHAPES[shape]
    config = Qwen3Config(
        hidden_size=hidden, intermediate_size=inner, num_hidden_layers=layers, num_attention_heads=heads,
        head_dim=head_dim, num_key_value_heads=kv_heads, vocab_size=vocab, tie_word_embeddings=tied,
        attn_implementation="sdpa", bos_token_id=None, eos_token_id=None, pad_token_id=None,
    )  # fmt: skip
    torch.manual_seed(0)
    usual = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        with torch.device(device):
            return Qwen3ForCausalLM(config).eval()
    finally:
        torch.set_default_dtype(usual)


def milliseconds(call, device, repeat):
    """(median, smallest, largest) wall time of a call in ms, the device waited for before and after."""
    wait = torch.cuda.synchronize if device.startswith("cuda") else (lambda: None)
    times = []
    for _ in range(repeat):
        wait()
        start = time.perf_counter()
        call()
        wait()
        times.append(1e3 * (time.perf_counter() - start))
    return statistics.median(times), min(times), max(times)


def spread(times):
    return "{:.2f} ({:.2f}-{:.2f})".format(*times)


# --------------------------------------------------------------------------------------------- this benchmark


def copy_bandwidth(device, repeat):
    """Bytes per second of a copy, read and written bytes both counted."""
    source = torch.ones(1 << 29, dtype=torch.uint8, device=device)  # more than a CPU's last cache takes
    target = torch.ones_like(source)
    return 2 * source.numel() / (milliseconds(lambda: target.copy_(source), device, repeat + 2)[0] * 1e-3)


def bytes_read(lm, S):
    """What a forward reads with S tokens in the cache: all weights, but of an untied embedding a few rows."""
    embedding = lm.model.embed_tokens.weight
    weights = sum(p.numel() for p in lm.parameters())
    if lm.lm_head.weight is not embedding:
        weights -= embedding.numel()
    config = lm.config
    cache = 2 * config.num_hidden_layers * config.num_key_value_heads * config.head_dim * S
    return (weights + cache) * embedding.element_size()


@torch.no_grad()
def library_call(lm, ids, T):
    """The library's own forward of T tokens after a cache of ids (1, S), cut back after each call."""
    cache = DynamicCache(config=lm.config)
    name = "cache" if "cache" in inspect.signature(lm.forward).parameters else "past_key_values"  # until 5.40
    lm(input_ids=ids, logits_to_keep=1, **{name: cache})

    @torch.no_grad()
    def call():
        lm(input_ids=ids[:, :T], **{name: cache})
        cache.crop(-T)

    return call


@torch.no_grad()
def our_call(lm, ids, T):
    """Decoder and head on T tokens after a cache of ids (1, S)."""
    S = ids.shape[1]
    decoder = Decoder(lm, S + T)
    decoder(ids, torch.arange(S)[None], dense(causal(), 1, S, S), decoder.kv_cache.scratch_idx(S))
    decoder.kv_cache.commit(S)
    positions = torch.arange(S, S + T)[None]
    mask = dense(causal(S), 1, T, S + T)
    write_idx = decoder.kv_cache.scratch_idx(T)

    @torch.no_grad()
    def call():
        return lm.lm_head(decoder(ids[:, :T], positions, mask, write_idx))

    return call


def main(argv=None):
    sizes = dict(queries=([1, 8, 32], [1, 8, 32]), cache=(1280, 1280), repeat=(10, 50))
    args = parser(__doc__, shapes=(["tiny"], ["0.6B", "1.7B", "8B"]), **sizes).parse_args(argv)
    head = header(args.device)
    bandwidth = copy_bandwidth(args.device, args.repeat)
    print(f"batch 1, {args.cache} tokens in the cache, copy {bandwidth * 1e-12:.3f} TB/s\n")
    table(
        "shape", "queries", "ours ms", "SDPA ms", "eager ms", "x SDPA", "x eager", "floor ms", "floor / ours"
    )
    table(*["---"] * 9)
    rows = []
    for shape in args.shapes:
        lm = build(shape, args.device, getattr(torch, head["dtype"]))
        floor = 1e3 * bytes_read(lm, args.cache) / bandwidth
        ids = torch.randint(lm.config.vocab_size, (1, args.cache), device=args.device)
        for T in args.queries:
            times = {}
            for attention in ("sdpa", "eager"):  # the first is the library's default
                lm.set_attn_implementation(attention)
                call = library_call(lm, ids, T)
                call()
                times[attention] = milliseconds(call, args.device, args.repeat)
            call = our_call(lm, ids, T)
            first = milliseconds(call, args.device, 1)[0]
            ours = milliseconds(call, args.device, args.repeat)
            gains = [times[attention][0] / ours[0] for attention in ("sdpa", "eager")]
            row = dict(shape=shape, queries=T, ours_ms=ours, floor_ms=floor, first_call_ms=first)
            rows.append(row | {f"{attention}_ms": found for attention, found in times.items()})
            cells = [spread(found) for found in (ours, *times.values())]
            table(shape, T, *cells, *gains, floor, floor / ours[0])
        del lm, call
    print(json.dumps(head | dict(cache=args.cache, copy_bytes_per_s=bandwidth, rows=rows)))


if __name__ == "__main__":
    main()
