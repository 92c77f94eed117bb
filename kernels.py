"""The fast path under all five scripts: fused attention, the KV cache it reads, the replay of a decode forward.

attention      one call for training and decoding. A BlockMask (CUDA training) goes to one compiled flex_attention, a
               dense boolean mask to PyTorch's SDPA. Where flex refuses, the same predicate is made dense, said once
               on stderr.
KVCache        preallocated keys and values with a count of committed entries; everything behind that count is scratch.
GraphReplay    one captured CUDA graph per (query length, key length) bucket; elsewhere it just calls the function.

Shapes: B batch, T queries of this forward, S keys seen, H query heads, G key/value heads, D head dim, V vocabulary.
"""

import sys

import torch
import torch.nn.functional as F
from torch.nn.attention.flex_attention import BlockMask, flex_attention

torch._dynamo.config.recompile_limit = 256  # one entry per bucket; behind the limit flex runs unfused and memory jumps
_compiled_flex = torch.compile(flex_attention, dynamic=False)
_notices = set()


def notice(text):
    """Say a thing once per process, on stderr."""
    if text not in _notices:
        _notices.add(text)
        print(text, file=sys.stderr)


def refused(what, error=None, instead=""):
    """Whether `what` was refused in this process; with an error: from now on, said once on stderr."""
    if error is not None:
        _notices.add(what)
        notice(f"{what} refused ({type(error).__name__}): {instead}")
    return what in _notices


def to_host(*tensors):
    """Tensors of one shape on the CPU by a single copy: a decoding loop waits once. float64 holds ids and float32."""
    if tensors[0].is_cuda and len(tensors) > 1:
        joined = torch.stack([tensor.double() for tensor in tensors]).cpu()
        return tuple(part.to(tensor.dtype) for part, tensor in zip(joined, tensors))
    return tuple(tensor.cpu() for tensor in tensors)


def dense(mask_mod, B, T, S, device="cpu"):
    """Dense mask of a predicate: (B, 1, T, S) bool, True = may attend. The readable form, the reference in tests."""
    b = torch.arange(B, device=device).view(B, 1, 1, 1)
    q_idx = torch.arange(T, device=device).view(1, 1, T, 1)
    kv_idx = torch.arange(S, device=device).view(1, 1, 1, S)
    return torch.as_tensor(mask_mod(b, 0, q_idx, kv_idx), device=device).expand(B, 1, T, S)


def attention(q_BHTD, k_BGSD, v_BGSD, mask=None):
    """softmax(q k^T / sqrt(D)) v with grouped query heads; keys and values are never expanded to H heads.

    q (B, H, T, D), k and v (B, G, S, D) with H a multiple of G: query heads g*H/G .. (g+1)*H/G-1 read key head g.
    mask: None (all see all), bool (B or 1, 1, T, S) with True = may attend, or a BlockMask.
    Returns (B, H, T, D). A row without a visible key gives zeros, and finite gradients.
    Raises TypeError for a mask of another dtype: 0/1 numbers would be added to the scores and be silently wrong.
    """
    B, H, T, D = q_BHTD.shape
    G, S = k_BGSD.shape[1:3]
    if isinstance(mask, BlockMask):
        if q_BHTD.is_cuda and not refused("flex_attention"):
            try:
                return _compiled_flex(q_BHTD, k_BGSD, v_BGSD, block_mask=mask, enable_gqa=H != G)
            except Exception as error:  # flex refuses some head sizes and group sizes in some versions
                refused("flex_attention", error, "SDPA with the same predicate made dense")
        batch = mask.kv_num_blocks.shape[0]
        mask = dense(mask.mask_mod, batch, T, S, q_BHTD.device)
    if mask is not None and mask.dtype != torch.bool:
        raise TypeError(f"attention takes a boolean mask (True = may attend) or a BlockMask, not {mask.dtype}")
    R = H // G
    q_BGRTD = q_BHTD.reshape(B, G, R * T, D)  # the R query heads of one key head side by side
    if mask is not None:
        mask = mask[:, :, None].expand(-1, 1, R, T, S).reshape(-1, 1, R * T, S)
    return F.scaled_dot_product_attention(q_BGRTD, k_BGSD, v_BGSD, attn_mask=mask).reshape(B, H, T, D)


class KVCache:
    """Keys (already rotated) and values of every layer, preallocated, with a count of committed entries.

    A forward writes its keys and values at chosen places behind the committed part (scratch) and attends to both. What
    follows decides what stays: `commit(n)` keeps a prefix of the scratch, `commit_chosen(idx)` gathers chosen entries
    down to the committed part. All else is overwritten by the next forward: there is nothing to roll back. The tensors
    never move, so that a captured graph can read them; no entry is ever copied but by `commit_chosen`.

    num_layers, batch B, G, D ints; max_len: entries per row. layers[i] = (keys, values), each (B, G, max_len and
    at least one spare, D).
    """

    def __init__(self, num_layers, batch, kv_heads, max_len, head_dim, device, dtype):
        # entry max_len takes what padding queries write, and nothing looks there; whole tiles of 64 for the kernels
        shape = (batch, kv_heads, (max_len // 64 + 1) * 64, head_dim)
        self.layers = [
            tuple(torch.zeros(shape, device=device, dtype=dtype) for _ in range(2)) for _ in range(num_layers)
        ]
        self.max_len, self.cache_len = max_len, 0

    def scratch_idx(self, n, offset=0):
        """(n,) int64, on the CPU: places `offset .. offset+n-1` behind the committed part. ValueError past max_len."""
        start = self.cache_len + offset
        if start + n > self.max_len:
            raise ValueError(f"the KV cache holds {self.max_len} entries, entry {start + n} was asked for")
        return torch.arange(start, start + n)

    def commit(self, n):
        """Keep the first n scratch entries."""
        if not 0 <= n <= self.max_len - self.cache_len:
            raise ValueError(f"cannot commit {n} entries behind {self.cache_len} of {self.max_len}")
        self.cache_len += n

    def commit_chosen(self, idx):
        """Keep scratch entries idx (n,), counted from the committed part, in this order."""
        source = self.cache_len + idx.to(self.layers[0][0].device)
        for keys, values in self.layers:
            for tensor in (keys, values):
                tensor[:, :, self.cache_len : self.cache_len + len(idx)] = tensor[:, :, source]
        self.commit(len(idx))

    def truncate(self, cache_len):
        """Keep the first cache_len committed entries: 0 none, cache_len all. Raises ValueError beyond either end."""
        if not 0 <= cache_len <= self.cache_len:
            raise ValueError(f"cannot cut a cache of {self.cache_len} entries to {cache_len}")
        self.cache_len = cache_len

    def keep_rows(self, row_idx):
        """Keep batch rows row_idx (n,), in this order; the freed rows at the end go."""
        row_idx = row_idx.to(self.layers[0][0].device)
        self.layers = [tuple(tensor[row_idx] for tensor in layer) for layer in self.layers]


class GraphReplay:
    """Call `forward(input_ids, position_ids, attn_mask, write_idx, row_idx, read)`, on CUDA as a captured graph.

    input_ids (B, T) int64, or embeddings (B, T, width); position_ids (B, T) int64; attn_mask (B or 1, 1, T, S) bool;
    write_idx (T,) int64, places in the cache. They may lie on the CPU: a decoding loop keeps its state there and waits
    for the device only where it reads the result.
    last: how many rows at the end are asked for; None: all, and row_idx is None, else (last,) int64.
    read: handed on as it is, hashable; every other `read` has a graph of its own.
    T is padded to a bucket of QUERY and S to a multiple of KEY: padding queries write to the spare entry
    `trash_idx` and are cut from the result; padding keys are seen by nobody. Longer queries run without a graph.
    max_key: entries of the cache, the spare one included; device: where forward runs.
    Returns what forward returns, a tensor or several, (B, T or last, ...): valid until the next call with the same
    bucket.
    """

    QUERY, MAX_QUERY, KEY = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 768, 1024), 1024, 256

    def __init__(self, forward, trash_idx, max_key, device="cpu", pad=None, capture=None):
        on_gpu = torch.device(device).type == "cuda"
        self.forward, self.trash_idx, self.max_key, self.device = forward, trash_idx, max_key, device
        self.pad = on_gpu if pad is None else pad  # padding without capture exists for tests on CPU
        self.capture = on_gpu if capture is None else capture
        self.graphs = {}

    def bucket(self, n):
        """The next size of QUERY."""
        return next(size for size in self.QUERY if size >= n)

    def __call__(self, input_ids, position_ids, attn_mask, write_idx, last=None, read=()):
        B, T = input_ids.shape[:2]
        S, n = attn_mask.shape[-1], T if last is None else last
        row_idx = None if n == T else torch.arange(T - n, T)
        if not self.pad or T > self.MAX_QUERY:
            args = (input_ids, position_ids, attn_mask, write_idx, row_idx)
            return self.forward(*(x if x is None else x.to(self.device, non_blocking=True) for x in args), read)
        T_pad, S_pad = self.bucket(T), min(-(-S // self.KEY) * self.KEY, self.max_key)
        key = (B, T_pad, S_pad, n < T and self.bucket(n), *input_ids.shape[2:], read)
        if key not in self.graphs:
            self.graphs[key] = self._prepare(*key[:4], input_ids, read)
        static, graph, out = self.graphs[key]
        ids, positions, mask, places, rows = static
        padded_mask = torch.zeros(attn_mask.shape[0], 1, T_pad, S_pad, dtype=torch.bool, device=attn_mask.device)
        padded_mask[:, :, :T, :S] = attn_mask
        padded_mask[:, :, T:, 0] = True  # what padding computes must be finite: 0 * NaN would reach the others
        mask.copy_(padded_mask, non_blocking=True)  # from the CPU: nobody waits
        places[:T].copy_(write_idx, non_blocking=True)
        places[T:] = self.trash_idx
        ids[:, :T].copy_(input_ids, non_blocking=True)
        positions[:, :T].copy_(position_ids, non_blocking=True)
        if n < T:
            rows[:n].copy_(row_idx, non_blocking=True)
        if graph is None:
            out = self.forward(*static, read)
        else:
            graph.replay()
        return out[:, :n] if torch.is_tensor(out) else tuple(tensor[:, :n] for tensor in out)

    def _prepare(self, B, T, S, n, like, read):
        device = self.device
        static = (
            torch.zeros(B, T, *like.shape[2:], dtype=like.dtype, device=device),
            torch.zeros(B, T, dtype=torch.int64, device=device),
            torch.ones(B, 1, T, S, dtype=torch.bool, device=device),
            torch.full((T,), self.trash_idx, device=device),
            torch.zeros(n, dtype=torch.int64, device=device) if n else None,
        )
        torch._dynamo.maybe_mark_dynamic(static[2], 3)  # one compilation for all S
        if not self.capture:
            return static, None, None
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):  # compile and warm up outside the capture
            for _ in range(3):
                self.forward(*static, read)
        torch.cuda.current_stream().wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            out = self.forward(*static, read)
        return static, graph, out
