"""Other tools zero attention heads, one request a line: run by the sweep benchmark in an environment of its own.

python serve.py FOLDER THREADS; the first answer says which tools are there and why others are not. A request is
{"tool", "tokens": [[id, …], …], "heads": [[layer, head], …]}, its answer the metric's values [head][prompt].
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from importlib.metadata import version
from typing import Any

import torch
from torch import Tensor

Run = Callable[[Tensor, list[list[int]]], list[list[float]]]


def metric(last: Tensor) -> list[float]:
    """The same as the benchmark's: log-probability of one token, from the logits [batch, vocab] at the last position."""
    values: list[float] = last.log_softmax(-1)[:, 1000].tolist()
    return values


def transformer_lens(folder: str) -> dict[str, Run]:
    """The bridge, a hook on hook_z a pass."""
    from transformer_lens.model_bridge import TransformerBridge

    model = TransformerBridge.boot_transformers(folder, device="cpu", dtype=torch.float32)
    model.eval()

    def run(tokens: Tensor, heads: list[list[int]]) -> list[list[float]]:
        values = []
        for layer, head in heads:

            def zero(z: Tensor, hook: Any, head: int = head) -> Tensor:
                z[:, :, head] = 0
                return z

            hooks = [(f"blocks.{layer}.attn.hook_z", zero)]
            logits = model.run_with_hooks(tokens, fwd_hooks=hooks, return_type="logits", use_cache=False)
            values.append(metric(logits[:, -1]))
        return values

    return {"TransformerLens": run}


def nnsight(folder: str) -> dict[str, Run]:
    """One edit a pass, and one invoke an edit with all invokes in one pass."""
    from nnsight import LanguageModel, save

    model = LanguageModel(folder, device_map="cpu", dtype=torch.float32, dispatch=True)
    d_head = model.model.layers[0].self_attn.head_dim

    def single(tokens: Tensor, heads: list[list[int]]) -> list[list[float]]:
        values = []
        for layer, head in heads:
            with model.trace(tokens, use_cache=False):
                model.model.layers[layer].self_attn.o_proj.input[..., head * d_head : (head + 1) * d_head] = 0
                last = model.lm_head.output[:, -1].save()
            values.append(metric(last))
        return values

    def batched(tokens: Tensor, heads: list[list[int]]) -> list[list[float]]:
        with model.trace(use_cache=False) as tracer:
            found = save([])
            for layer, head in heads:
                with tracer.invoke(tokens):
                    model.model.layers[layer].self_attn.o_proj.input[..., head * d_head : (head + 1) * d_head] = 0
                    found.append(model.lm_head.output[:, -1])
        return [metric(last) for last in found]

    return {"nnsight": single, "nnsight batched": batched}


def main() -> None:
    """Answer requests until the input ends."""
    answers, sys.stdout = sys.stdout, sys.stderr  # the tools print
    folder, threads = sys.argv[1:]
    torch.set_num_threads(int(threads))
    tools: dict[str, Run] = {}
    versions, missing = {}, {}
    for name, load in (("transformer-lens", transformer_lens), ("nnsight", nnsight)):
        try:
            tools |= load(folder)
            versions[name] = version(name)
        except Exception as error:
            missing[name] = f"{type(error).__name__}: {error}"
    print(json.dumps({"tools": list(tools), "versions": versions, "missing": missing}), file=answers, flush=True)
    for line in sys.stdin:
        request = json.loads(line)
        with torch.no_grad():
            values = tools[request["tool"]](torch.tensor(request["tokens"]), request["heads"])
        print(json.dumps(values), file=answers, flush=True)


if __name__ == "__main__":
    main()
