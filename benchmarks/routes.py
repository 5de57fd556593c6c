"""Routes by the lazy search against the full definition. Run as a module, it is one measured process."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from typing import Any

import torch
from torch import Tensor

import headscope as hs
from benchmarks.common import MODEL, ROOT, Result, environment, median_ratio
from benchmarks.memory import peak

SHORT, LONG, ROUNDS, THRESHOLD = 128, 1024, 3, 0.04
Edge = tuple[str, str]


def measure(threads: int) -> list[Result]:
    """Time and peak memory of both on the short prompt, of the lazy search on the long one; each in a fresh process."""
    seconds: dict[str, list[float]] = {}
    memory: dict[str, list[float]] = {}
    edges: dict[str, Any] = {}
    for i in range(ROUNDS):
        for way, length in (("lazy", SHORT), ("dense", SHORT), ("lazy", LONG)):
            if length == LONG and i == 2:
                continue
            command = [sys.executable, "-m", "benchmarks.routes", way, str(length), str(threads)]
            done = subprocess.run(command, cwd=ROOT, env=environment(threads), check=True, capture_output=True)
            found = json.loads(done.stdout)
            label = f"{way}, {length} tokens"
            seconds.setdefault(label, []).append(found["seconds"])
            memory.setdefault(label, []).append(found["MiB"])
            edges[label] = found
    lazy, dense, long = f"lazy, {SHORT} tokens", f"dense, {SHORT} tokens", f"lazy, {LONG} tokens"
    ratio = f"{dense} / {lazy}"
    ours, theirs = ({tuple(edge) for edge in edges[label]["edges"]} for label in (lazy, dense))
    what = (
        f"The route of the last token of plain text by {MODEL} at a threshold of {THRESHOLD}: `hs.routes` (forward pass "
        "included) against the full definition, which for each layer forms what every head brings from every key to every "
        "query [query, key, head, d_model], and then walks from the same token. {}."
    )
    note = (
        f"{SHORT} tokens: {len(ours)} edges (heads added up) against {len(theirs)}, {len(ours ^ theirs)} in one only; the "
        f"search looked at {edges[lazy]['evaluated']:,} of {edges[lazy]['parts']:,} edges of the states it reached. "
        f"{LONG} tokens: {len(edges[long]['edges'])} edges, {edges[long]['evaluated']:,} of {edges[long]['parts']:,} looked at."
    )
    return [
        Result(
            "routes", what.format("Wall time"), "s", seconds, {long: 300.0}, {ratio: median_ratio(_pairs(seconds), dense, lazy)},
            note, {ratio: 10.0},
        ),
        Result(
            "routes-memory", what.format("Peak memory above that of the loaded model"), "MiB", memory, {long: 4096.0},
            {ratio: median_ratio(_pairs(memory), dense, lazy)}, "", {ratio: 10.0},
        ),
    ]  # fmt: skip


def _pairs(runs: dict[str, list[float]]) -> dict[str, list[float]]:
    return {label: values for label, values in runs.items() if str(SHORT) in label}


@torch.no_grad()
def dense_route(model: hs.Model, tokens: Tensor) -> set[Edge]:
    """Edges (heads of an edge added up) by the full definition: all queries of all layers, then a walk from the last."""
    anatomy, width = model.anatomy, tokens.shape[1]
    sites = ["resid_pre", "attn_out", "mlp_out", "pattern", "v"]
    run = hs.trace(model, tokens, sites, logits=None)
    kept: list[tuple[Tensor, Tensor, Tensor, Tensor]] = []
    for layer in range(anatomy.n_layers):
        pre, attn, mlp = (run[site, layer][0] for site in sites[:3])
        mid, post = pre + attn, pre + attn + mlp
        W_O = torch.stack([anatomy.W_O(layer, h) for h in range(anatomy.n_heads)])
        v = run["v", layer][0].repeat_interleave(anatomy.n_heads // anatomy.n_kv_heads, 1)
        written = torch.einsum("khd,hdm->khm", v, W_O)
        parts = run["pattern", layer][0].permute(1, 2, 0)[..., None] * written  # [query, key, head, d_model]
        heads, residual = _shares(mid, parts.flatten(1, 2), pre[:, None])
        attention = heads.unflatten(1, (width, anatomy.n_heads)).sum(-1)
        ffn, stream = _shares(post, mlp[:, None], mid[:, None])
        kept.append((attention, residual[:, 0], ffn[:, 0], stream[:, 0]))
    edges: set[Edge] = set()
    reached = {width - 1}
    for layer in reversed(range(anatomy.n_layers)):
        attention, residual, ffn, stream = kept[layer]
        below, now = f"L{layer - 1}" if layer else "E", set()
        for i in sorted(reached):
            if float(ffn[i]) > 0:
                edges |= {(f"L{layer}MLP@{i}", f"L{layer}@{i}"), (f"L{layer}A@{i}", f"L{layer}MLP@{i}")}
            if float(stream[i]) > 0:
                edges.add((f"L{layer}A@{i}", f"L{layer}@{i}"))
            sources = set(attention[i].nonzero()[:, 0].tolist()) | ({i} if float(residual[i]) > 0 else set())
            edges |= {(f"{below}@{j}", f"L{layer}A@{i}") for j in sources}
            now |= sources
        reached = now
    return edges


def _shares(y: Tensor, many: Tensor, few: Tensor) -> tuple[Tensor, Tensor]:
    """Thresholded, renormalised shares of parts [row, part, d_model] of the sums y [row, d_model]."""
    parts = torch.cat([many, few], 1)
    value = (y.abs().sum(-1, keepdim=True) - (y[:, None] - parts).abs().sum(-1)).clamp(min=1e-5)
    share = value / value.sum(1, keepdim=True)
    share = torch.where(share > THRESHOLD, share, 0.0)
    share = share / share.sum(1, keepdim=True)
    return share[:, : many.shape[1]], share[:, many.shape[1] :]


def _child(way: str, length: int, threads: int) -> None:
    torch.set_num_threads(threads)
    model = hs.load(MODEL)
    text = hs.tasks.make("plain-text", model, n=1, length=length)
    tokens = text.tokens[:1, :length]
    assert tokens.shape[1] == length
    hs.routes(model, tokens[:, :8])  # warms up
    found: dict[str, Any] = {}

    def run() -> None:
        start = time.perf_counter()
        if way == "lazy":
            route = hs.routes(model, tokens, threshold=THRESHOLD)
            found.update(parts=route.parts, evaluated=route.evaluated)
            found["edges"] = sorted({(e.source, e.target) for e in route.edges})
        else:
            found["edges"] = sorted(dense_route(model, tokens))
        found["seconds"] = time.perf_counter() - start

    found["MiB"] = peak(run)
    print(json.dumps(found))


if __name__ == "__main__":
    _child(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]))
