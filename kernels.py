"""The fast path under all five scripts: fused attention, its KV cache, the replay of a decode forward.

Shapes: B batch, T queries of this forward, S keys seen, H query heads, G key/value heads, D head dim.
"""

import importlib.machinery
import importlib.util
import sys
import time
from pathlib import Path

import torch
import torch.nn.functional as F
from torch._dynamo.exc import TorchDynamoException
from torch._inductor.exc import InductorError
from torch.nn.attention.flex_attention import BlockMask, flex_attention

if __name__ == "kernels":  # transformers imports a package of this name where it is installed
    elsewhere = [place for place in sys.path if Path(place).resolve() != Path(__file__).resolve().parent]
    spec = importlib.machinery.PathFinder.find_spec("kernels", elsewhere)
    if spec and spec.submodule_search_locations:  # a package, not another copy of this file
        sys.modules["kernels"] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(sys.modules["kernels"])

torch._dynamo.config.recompile_limit = 256  # one entry per bucket; past the limit flex runs unfused
torch.backends.cuda.enable_cudnn_sdp(False)  # one plan a shape, and wrong results with masks in some versions
_compiled_flex = torch.compile(flex_attention, dynamic=False)
COMPILER_ERRORS = (TorchDynamoException, InductorError, NotImplementedError)
_refused = set()


def refused(what, error=None, instead=""):
    """Whether `what` was refused in this process; with an error: from now on, said once on stderr."""
    if error is not None and what not in _refused:
        _refused.add(what)
        print(f"{what} refused ({type(error).__name__}): {instead}", file=sys.stderr)
    return what in _refused


def dense(mask_mod, B, T, S, device="cpu"):
    """Dense mask of a predicate: (B, 1, T, S) bool, True = may attend. The readable form."""
    b = torch.arange(B, device=device).view(B, 1, 1, 1)
    q_idx = torch.arange(T, device=device).view(1, 1, T, 1)
    kv_idx = torch.arange(S, device=device).view(1, 1, 1, S)
    return torch.as_tensor(mask_mod(b, 0, q_idx, kv_idx), device=device).expand(B, 1, T, S)


def layer_mask(mask, R, dtype):
    """A mask (B or 1, 1, T, S) bool in the form that all layers of a forward take; True = may attend.

    Returns 0 or -inf (B or 1, 1, R, T, S), added to the scores of the R query heads, of this dtype, of a key
    head; on CPU, where asking makes nothing wait, "causal" for a plainly causal mask. Raises TypeError for a
    mask of another dtype: 0/1 numbers would be added to the scores, silently wrong.
    """
    if mask.dtype != torch.bool:
        raise TypeError(f"attention takes a boolean mask or a BlockMask, not {mask.dtype}")
    is_square = mask.shape[2] == mask.shape[3]
    if is_square and mask.device.type == "cpu" and torch.equal(mask, torch.ones_like(mask).tril()):
        return "causal"
    bias = torch.where(mask, 0.0, -torch.inf).to(dtype)
    bias = bias[:, :, None].expand(-1, -1, R, -1, -1).contiguous()
    torch._dynamo.maybe_mark_dynamic(bias, 4)  # one compilation for all S
    return bias


def attention(q_BHTD, k_BGSD, v_BGSD, mask=None):
    """softmax(q k^T / sqrt(D)) v with grouped query heads; keys and values are never copied to H heads.

    q (B, H, T, D), k and v (B, G, S, D), H a multiple of G: query heads g*H/G .. (g+1)*H/G-1 read key head g.
    mask: None (all see all), bool (B or 1, 1, T, S), what `layer_mask` makes of it, or a BlockMask, which is
    made dense where flex refuses it. Returns (B, H, T, D), zeros for a row without a visible key.
    """
    B, H, T, D = q_BHTD.shape
    G, S = k_BGSD.shape[1:3]
    R = H // G
    if isinstance(mask, BlockMask):
        if q_BHTD.is_cuda and not refused("flex_attention"):
            try:
                return _compiled_flex(q_BHTD, k_BGSD, v_BGSD, block_mask=mask, enable_gqa=H != G)
            except COMPILER_ERRORS as error:  # some head sizes in some versions; a full memory is no refusal
                refused("flex_attention", error, "SDPA with the same predicate made dense")
        mask = dense(mask.mask_mod, mask.kv_num_blocks.shape[0], T, S, q_BHTD.device)
    if torch.is_tensor(mask) and mask.dim() == 4:
        mask = layer_mask(mask, R, q_BHTD.dtype)
    if isinstance(mask, str):  # SDPA skips the keys after a query, where one head has T queries and not R T
        q = q_BHTD.reshape(B * G, R, T, D)
        k = k_BGSD.reshape(B * G, 1, S, D).expand(-1, R, -1, -1)
        v = v_BGSD.reshape(B * G, 1, S, D).expand(-1, R, -1, -1)
        return F.scaled_dot_product_attention(q, k, v, is_causal=True).reshape(B, H, T, D)
    q_BGRTD = q_BHTD.reshape(B, G, R * T, D)  # the R query heads of one key head side by side
    bias = None if mask is None else mask.flatten(2, 3)
    return F.scaled_dot_product_attention(q_BGRTD, k_BGSD, v_BGSD, attn_mask=bias).reshape(B, H, T, D)


class KVCache:
    """Keys (already rotated) and values of every layer, preallocated, with a count of committed entries.

    A forward writes after the committed part (scratch) and attends to both; `commit(n)` keeps the first n
    entries of the scratch, the next forward overwrites the rest. layers[i] = (keys, values), each (B, G,
    room, D): entry max_len takes what padding queries write; the padded keys of a graph never reach the end.
    """

    def __init__(self, num_layers, batch, kv_heads, max_len, head_dim, device, dtype):
        shape = (batch, kv_heads, (max_len // GraphReplay.KEY + 2) * GraphReplay.KEY, head_dim)
        zeros = dict(device=device, dtype=dtype)
        self.layers = [(torch.zeros(shape, **zeros), torch.zeros(shape, **zeros)) for _ in range(num_layers)]
        self.max_len = max_len
        self.cache_len = 0

    def scratch_idx(self, n, offset=0):
        """(n,) int64, CPU: places offset .. offset+n-1 after the committed part. ValueError past max_len."""
        start = self.cache_len + offset
        if start + n > self.max_len:
            raise ValueError(f"the KV cache holds {self.max_len} entries, entry {start + n} was asked for")
        return torch.arange(start, start + n)

    def commit(self, n):
        """Keep the first n scratch entries."""
        if not 0 <= n <= self.max_len - self.cache_len:
            raise ValueError(f"cannot commit {n} entries after {self.cache_len} of {self.max_len}")
        self.cache_len += n

    def reset(self):
        """Keep nothing."""
        self.cache_len = 0

    def keep_rows(self, row_idx):
        """Keep batch rows row_idx (n,), in this order; the others are freed."""
        row_idx = row_idx.to(self.layers[0][0].device)
        self.layers = [(keys[row_idx], values[row_idx]) for keys, values in self.layers]


class GraphReplay:
    """Calls `forward(input_ids, position_ids, attn_mask, write_idx)`, on CUDA as a captured graph.

    Inputs as common.Decoder takes them. T is padded to a bucket of QUERY, S to a multiple of KEY: padding
    queries write to the spare entry `trash_idx` and are cut from the result; nobody sees padding keys. Longer
    queries run without a graph. Returns (B, T, width), valid until the next call. One stream and memory pool
    for all graphs: cuBLAS's workspace is freed with its stream. No reference cycle: forward is not kept.
    """

    QUERY, KEY = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 768, 1024), 256
    setup_seconds = 0.0  # of this process, for compilation and capture: not decoding time

    def __init__(self, trash_idx, device="cpu", pad=None):
        self.trash_idx = trash_idx
        self.device = torch.device(device)
        self.capture = self.device.type == "cuda"
        self.pad = self.capture if pad is None else pad  # padding without capture exists for tests on CPU
        self.graphs = {}
        if self.capture:
            self.stream = torch.cuda.Stream(device)
            self.pool = torch.cuda.graph_pool_handle()

    def __call__(self, forward, *inputs):
        input_ids, position_ids, attn_mask, write_idx = inputs
        B, T = input_ids.shape[:2]
        S = attn_mask.shape[-1]
        if not self.pad or T > self.QUERY[-1]:
            return forward(*(x.to(self.device, non_blocking=True) for x in inputs))
        T_pad = next(size for size in self.QUERY if size >= T)
        S_pad = -(-S // self.KEY) * self.KEY
        bucket = (B, T_pad, S_pad, *input_ids.shape[2:])
        if bucket not in self.graphs:
            self.graphs[bucket] = self._prepare(forward, bucket, input_ids.dtype)
        static, graph, hidden = self.graphs[bucket]
        ids, positions, mask, places = static
        padded_mask = F.pad(attn_mask, (0, S_pad - S, 0, T_pad - T))
        padded_mask[:, :, T:, 0] = True  # what padding computes must be finite: 0 * NaN would reach others
        mask.copy_(padded_mask, non_blocking=True)
        ids[:, :T].copy_(input_ids, non_blocking=True)
        positions[:, :T].copy_(position_ids, non_blocking=True)
        places[:T].copy_(write_idx, non_blocking=True)
        places[T:] = self.trash_idx
        if graph is None:
            return forward(*static)[:, :T]
        graph.replay()
        return hidden[:, :T]

    def _prepare(self, forward, bucket, dtype):
        """(static inputs, captured graph, its output) of a bucket; without capture the last two are None."""
        B, T, S, *width = bucket
        ids = torch.zeros(B, T, *width, dtype=dtype, device=self.device)
        positions = torch.zeros(B, T, dtype=torch.int64, device=self.device)
        mask = torch.ones(B, 1, T, S, dtype=torch.bool, device=self.device)
        static = ids, positions, mask, torch.full((T,), self.trash_idx, device=self.device)
        if not self.capture:
            return static, None, None
        clock = time.time()
        self.stream.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(self.stream):  # compile and warm up outside the capture
            for _ in range(3):
                forward(*static)
        torch.cuda.current_stream(self.device).wait_stream(self.stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self.pool, stream=self.stream):
            hidden = forward(*static)
        torch.cuda.synchronize(self.device)
        GraphReplay.setup_seconds += time.time() - clock
        return static, graph, hidden
