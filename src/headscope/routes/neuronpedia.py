"""A route in the attribution-graph format that Neuronpedia's graph page reads."""

from __future__ import annotations

import hashlib
import json
import re
from typing import Any

from headscope.routes.route import Node, Route

_KINDS = {"embed": "embedding", "mid": "residual stream", "post": "residual stream", "mlp": "mlp", "bias": "bias"}
#: numbers for what is no head, so that layer, number and position name a node
_OFFSET = {"mlp": 1, "mid": 2, "post": 3, "bias": 4}


def attribution_graph(route: Route) -> dict[str, Any]:
    """Nodes and links as that format has them; heads are nodes of their own, the target's logit is the root.

    A head's node takes its edges' sum to the stream, and its keys' shares of that sum; so weights into a node sum to 1.
    The format has no signed values: they stand in the labels (`clerp`).
    """
    top = 1 + max((node.layer for node in route.nodes if node.layer is not None), default=0)
    base = 1 + max((_index(e.component) for e in route.edges if e.kind == "head" and e.component), default=0)
    names = {node.id: _name(node, route, base) for node in route.nodes}
    logit = f"{top}_{route.target_id}_{route.position}"
    nodes = [_row(names[node.id], node.layer, node.position, _KINDS[node.kind], _label(node)) for node in route.nodes]
    links: dict[tuple[str, str], float] = {}
    signs: dict[str, float] = {}
    heads: dict[str, tuple[int, int, str, float]] = {}
    for edge in route.edges:
        if edge.kind != "head" or edge.component is None:
            links[names[edge.source], names[edge.target]] = edge.weight
            continue
        layer, head = map(int, re.findall(r"\d+", edge.component))
        position = int(edge.target.rpartition("@")[2])
        name = f"{layer}_{head}_{position}"
        total = heads[name][3] if name in heads else 0.0
        heads[name] = (layer, position, edge.component, total + edge.weight)
        signs[name] = signs.get(name, 0.0) + edge.signed
        links[name, names[edge.target]] = heads[name][3]
    for edge in route.edges:
        if edge.kind == "head" and edge.component is not None:
            layer, head = map(int, re.findall(r"\d+", edge.component))
            name = f"{layer}_{head}_{edge.target.rpartition('@')[2]}"
            links[names[edge.source], name] = edge.weight / heads[name][3]
    for name, (layer, position, component, _) in heads.items():
        nodes.append(_row(name, layer, position, "attention head", f"{component} ({signs[name]:+.3f})"))
    nodes.append(_row(logit, top, route.position, "logit", f"output {route.target!r} (logit {route.logit:+.3f})"))
    links[names[route.start], logit] = 1.0
    return {
        "metadata": {
            "slug": f"headscope-{_digest(route)}", "scan": route.model, "prompt": route.prompt,
            "prompt_tokens": route.tokens, "node_threshold": route.threshold,
            "info": {
                "description": "Information-flow route: unsigned shares of each state of the stream, no interventions.",
                "generator": {"name": "headscope", "version": route.version},
            },
            "generation_settings": {"threshold": route.threshold, "biases": route.biases, "foil": route.foil},
        },
        "qParams": {"pinnedIds": [], "supernodes": [], "linkType": "both", "clickedId": logit},
        "nodes": nodes,
        "links": [{"source": s, "target": t, "weight": w} for (s, t), w in links.items()],
    }  # fmt: skip


def _index(component: str) -> int:
    return int(component.rpartition("H")[2])


def _name(node: Node, route: Route, base: int) -> str:
    if node.kind == "embed":
        return f"E_{route.token_ids[node.position]}_{node.position}"
    return f"{node.layer}_{base + _OFFSET[node.kind]}_{node.position}"


def _label(node: Node) -> str:
    return f"Emb: {node.token!r}" if node.kind == "embed" else node.id


def _row(name: str, layer: int | None, position: int, kind: str, label: str) -> dict[str, Any]:
    return {
        "node_id": name, "feature": None if layer is None else int(name.split("_")[1]),
        "layer": "E" if layer is None else str(layer), "ctx_idx": position, "feature_type": kind,
        "jsNodeId": f"{name}-0", "clerp": label, "influence": None, "activation": None,
    }  # fmt: skip


def _digest(route: Route) -> str:
    """Tells graphs of one model apart: by the prompt and all that was asked of it."""
    asked = (
        route.fingerprint, route.token_ids, route.position, route.target_id, route.foil_id, route.threshold, route.biases,
    )  # fmt: skip
    return hashlib.sha256(json.dumps(asked).encode()).hexdigest()[:16]
