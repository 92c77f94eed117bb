"""One decode forward at batch 1: ours against the library's own eager forward, and as a share of the memory floor.

    python tests/bench_decode.py                                        (tiny shape on CPU, all four on a GPU)
    python tests/bench_decode.py --shapes 0.6B 8B --queries 1 8 32 --cache 1024

A forward is embed, layers, norm and head for `queries` tokens on top of a filled cache, random weights in Qwen3 shapes.
floor: bytes of the weights that a forward reads, over the copy bandwidth measured in the same run. Times are medians,
with the smallest and the largest beside them; compiling and capturing are timed apart. The last line of stdout is JSON.
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
from transformers import DynamicCache, Qwen3Config, Qwen3ForCausalLM

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from common import Decoder, causal, dense

SHAPES = {  # hidden, intermediate, layers, heads, kv heads, head dim, vocabulary, tied
    "tiny": (128, 384, 4, 4, 2, 32, 64, True),
    "0.6B": (1024, 3072, 28, 16, 8, 128, 151936, True),
    "1.7B": (2048, 6144, 28, 16, 8, 128, 151936, True),
    "8B": (4096, 12288, 36, 32, 8, 128, 151936, False),
}


def build(shape, device, dtype):
    """A Qwen3 of random weights, made on the device."""
    hidden, inner, layers, heads, kv_heads, head_dim, vocab, tied = SHAPES[shape]
    config = Qwen3Config(
        hidden_size=hidden, intermediate_size=inner, num_hidden_layers=layers, num_attention_heads=heads, head_dim=head_dim,
        num_key_value_heads=kv_heads, vocab_size=vocab, tie_word_embeddings=tied, attn_implementation="eager",
        bos_token_id=None, eos_token_id=None, pad_token_id=None,
    )  # fmt: skip
    torch.manual_seed(0)
    usual = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        with torch.device(device):
            return Qwen3ForCausalLM(config).train(False)
    finally:
        torch.set_default_dtype(usual)


def milliseconds(call, device, repeat):
    """(median, smallest, largest) wall time of a call in ms, the device waited for before and after."""
    sync = torch.cuda.synchronize if device.startswith("cuda") else (lambda: None)
    times = []
    for _ in range(repeat):
        sync()
        start = time.perf_counter()
        call()
        sync()
        times.append(1e3 * (time.perf_counter() - start))
    return statistics.median(times), min(times), max(times)


def copy_bandwidth(device, repeat):
    """Bytes per second of a copy, read and written bytes both counted."""
    source = torch.empty(1 << 29, dtype=torch.uint8, device=device)  # more than a CPU's last cache holds
    target = torch.empty_like(source)
    median, _, _ = milliseconds(lambda: target.copy_(source), device, repeat + 2)
    return 2 * source.numel() / (median * 1e-3)


def weight_bytes(lm):
    """What a forward reads: every parameter, but an untied embedding only by a few rows."""
    untied = lm.lm_head.weight is not lm.model.embed_tokens.weight
    skip = lm.model.embed_tokens.weight if untied else None
    return sum(p.numel() * p.element_size() for p in lm.parameters() if p is not skip)


@torch.no_grad()
def library_call(lm, cache_len, T, device):
    """The library's eager forward on a filled cache, which is cut back after each call."""
    cache = DynamicCache(config=lm.config)
    name = "cache" if "cache" in inspect.signature(lm.forward).parameters else "past_key_values"
    ids = torch.randint(lm.config.vocab_size, (1, cache_len), device=device)
    for start in range(0, cache_len, 256):
        lm(input_ids=ids[:, start : start + 256], use_cache=True, **{name: cache})

    @torch.no_grad()
    def call():
        lm(input_ids=ids[:, :T], use_cache=True, **{name: cache})
        cache.crop(-T)

    return call


@torch.no_grad()
def our_call(lm, cache_len, T, device):
    """Decoder's forward on a filled cache. Returns (call, seconds of the first call)."""
    decoder = Decoder(lm, cache_len + T)
    ids = torch.randint(lm.config.vocab_size, (1, cache_len), device=device)
    positions = torch.arange(cache_len + T, device=device)[None]
    chunk = 256
    for start in range(0, cache_len, chunk):
        n = min(chunk, cache_len - start)
        mask = dense(causal(start), 1, n, start + n, device)
        decoder(ids[:, start : start + n], positions[:, start : start + n], mask, decoder.kv_cache.scratch_idx(n))
        decoder.kv_cache.commit(n)
    mask, write_idx = dense(causal(cache_len), 1, T, cache_len + T, device), decoder.kv_cache.scratch_idx(T)

    @torch.no_grad()
    def call():
        decoder(ids[:, :T], positions[:, cache_len:], mask, write_idx)

    start = time.perf_counter()
    call()
    return call, time.perf_counter() - start


def main(argv=None):
    on_gpu = torch.cuda.is_available()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shapes", nargs="+", choices=SHAPES, default=list(SHAPES) if on_gpu else ["tiny"])
    parser.add_argument("--queries", nargs="+", type=int, default=[1, 8, 32])
    parser.add_argument("--cache", type=int, default=1024)
    parser.add_argument("--repeat", type=int, default=50 if on_gpu else 10)
    parser.add_argument("--device", default="cuda" if on_gpu else "cpu")
    args = parser.parse_args(argv)
    dtype = torch.bfloat16 if args.device.startswith("cuda") else torch.float32
    name = torch.cuda.get_device_name(args.device) if args.device.startswith("cuda") else "CPU"
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True).stdout.strip()
    bandwidth = copy_bandwidth(args.device, args.repeat)
    print(
        f"{name}, {str(dtype)[6:]}, batch 1, cache {args.cache}, copy {bandwidth / 1e12:.3f} TB/s, commit {commit or '-'}"
    )
    print(
        "| shape | queries | ours ms (min-max) | library eager ms (min-max) | x faster | floor ms | share of the floor |"
    )
    print("| --- | --- | --- | --- | --- | --- | --- |")
    rows = []
    for shape in args.shapes:
        lm = build(shape, args.device, dtype)
        floor = weight_bytes(lm) / bandwidth * 1e3
        for T in args.queries:
            theirs = milliseconds(library_call(lm, args.cache, T, args.device), args.device, args.repeat)
            call, first = our_call(lm, args.cache, T, args.device)
            ours = milliseconds(call, args.device, args.repeat)
            row = {"shape": shape, "queries": T, "ours_ms": ours[0], "ours_min": ours[1], "ours_max": ours[2],
                   "library_ms": theirs[0], "library_min": theirs[1], "library_max": theirs[2], "floor_ms": floor,
                   "share": floor / ours[0], "x_library": theirs[0] / ours[0], "first_call_s": first}  # fmt: skip
            rows.append({key: round(value, 4) if isinstance(value, float) else value for key, value in row.items()})
            print(f"| {shape} | {T} | {ours[0]:.2f} ({ours[1]:.2f}-{ours[2]:.2f}) | {theirs[0]:.2f} ({theirs[1]:.2f}-"
                  f"{theirs[2]:.2f}) | {theirs[0] / ours[0]:.1f} | {floor:.3f} | {floor / ours[0]:.2f} |")  # fmt: skip
        del lm
    print(json.dumps({"device": name, "dtype": str(dtype)[6:], "cache": args.cache, "commit": commit,
                      "copy_bytes_per_s": bandwidth, "torch": torch.__version__, "rows": rows}))  # fmt: skip


if __name__ == "__main__":
    main()
