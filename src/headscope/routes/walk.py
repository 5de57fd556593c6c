"""The walk from a prediction down through the layers, over the states that are reached and the parts that matter."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from headscope.model import Model, bias_of
from headscope.model.frozen import Frozen, freeze
from headscope.routes.neurons import nearest, neurons_of, routing
from headscope.routes.proximity import Survivors, survivors
from headscope.routes.route import Edge, Neuron, Node, Route
from headscope.trace import Calls, Capture, Run, recording, trace


@dataclass(frozen=True)
class Goal:
    """The token ids that a route explains, and the logit of the one minus that of the other."""

    target: int
    foil: int | None
    logit: float


@dataclass(eq=False)
class Walk:
    """From the prediction down: what one pass gave, and what has been reached so far."""

    model: Model
    tokens: Tensor
    at: int
    threshold: float
    biases: str
    n_neurons: int
    edges: list[Edge] = field(default_factory=list)
    neurons: list[Neuron] = field(default_factory=list)
    parts: int = 0
    evaluated: int = 0

    def __post_init__(self) -> None:
        anatomy = self.model.anatomy
        sites = ["resid_pre", "attn_out", "v"] + (["mlp_out"] if anatomy.blocks[0].mlp_out is not None else [])
        last = anatomy.n_layers - 1
        captures = [*map(Capture, sites), Capture("resid_post", [last])]
        if anatomy.blocks[0].post_attn is not None:
            captures.append(Capture("z"))
        with recording(self.model) as calls:
            self.run: Run = trace(self.model, self.tokens, captures, logits=torch.tensor([[self.at]]))
        self.calls: Calls = calls
        self.double = torch.float64 if self.tokens.device.type != "mps" else torch.float32

    def _rows(self, site: str, layer: int, rows: Tensor) -> Tensor:
        """[row, d_model] of a captured site."""
        return self.run[site, layer][0, rows].to(self.double)

    def aim(self, target: int, foil: int | None) -> None:
        """Signs are those of the target's logit minus the foil's, through the final norm as it is at each position."""
        anatomy = self.model.anatomy
        top = self.run["resid_post", anatomy.n_layers - 1][0]
        chosen = anatomy.W_U[:, [target] if foil is None else [target, foil]].to(self.double)
        direction = chosen[:, 0] - (0.0 if foil is None else chosen[:, 1])
        frozen = freeze(anatomy.final_norm, top)
        wide = direction.expand(top.shape[0], -1)
        self.direction = wide if frozen is None else frozen.to(self.double).pull(wide)

    def route(self, goal: Goal) -> Route:
        """All edges that lead to the prediction."""
        model = self.model
        n = model.anatomy.n_layers
        self.aim(goal.target, goal.foil)
        rows = torch.tensor([self.at], device=self.tokens.device)
        for layer in reversed(range(n)):
            rows = self.into(layer, rows)
        text = model.words(self.tokens[0])
        names = dict.fromkeys([f"L{n - 1}@{self.at}", *(x for e in self.edges for x in (e.target, e.source))])
        from headscope import __version__

        return Route(
            model=model.name, fingerprint=model.fingerprint, version=__version__, prompt=model.text(self.tokens[0]), tokens=text,
            token_ids=self.tokens[0].tolist(), position=self.at, target=model.word(goal.target), foil=None if goal.foil is None else model.word(goal.foil),
            target_id=goal.target, foil_id=goal.foil, logit=goal.logit, threshold=self.threshold, biases=self.biases,
            nodes=[_node(name, text) for name in names], edges=self.edges, neurons=self.neurons, parts=self.parts,
            evaluated=self.evaluated,
        )  # fmt: skip

    def into(self, layer: int, rows: Tensor) -> Tensor:
        """Edges into the states `rows` after a layer; returns the positions that are reached below it."""
        anatomy, block = self.model.anatomy, self.model.anatomy.blocks[layer]
        pre, attn = self._rows("resid_pre", layer, rows), self._rows("attn_out", layer, rows)
        mlp = self._rows("mlp_out", layer, rows) if block.mlp_out is not None else None
        look = self._look(layer, rows)
        if mlp is None or anatomy.parts.parallel:
            post = pre + attn + (0 if mlp is None else mlp)
            name, mids = f"L{layer}", None
        else:
            post, name, mids = pre + attn + mlp, f"L{layer}A", pre + attn
        reads_mlp = torch.zeros(len(rows), dtype=torch.bool, device=rows.device)
        below = "E" if layer == 0 else f"L{layer - 1}"
        if mids is not None:
            assert mlp is not None  # said by mids
            step = self._fixed(post, torch.stack([mids, mlp], 1))
            self._emit(f"L{layer}", f"L{layer}A", "residual", None, rows, step[:, 0], mids)
            self._emit(f"L{layer}", f"L{layer}MLP", "mlp", f"L{layer}MLP", rows, step[:, 1], mlp)
            reads_mlp = step[:, 1] > 0
        fixed = [pre]
        bias = self._bias(layer, rows, look["pattern"])
        if bias is not None:
            fixed.append(bias)
        if mids is None and mlp is not None:
            fixed.append(mlp)
        found = self._heads(layer, rows, post if mids is None else mids, torch.stack(fixed, 1), look["pattern"])
        reached = found.fixed[:, 0] > 0
        self._emit(name, below, "residual", None, rows, found.fixed[:, 0], pre)
        if bias is not None:
            self._emit(name, f"L{layer}B", "bias", None, rows, found.fixed[:, 1], bias)
        if mids is None and mlp is not None:
            self._emit(name, f"L{layer}MLP", "mlp", f"L{layer}MLP", rows, found.fixed[:, -1], mlp)
            reads_mlp = found.fixed[:, -1] > 0
            reached |= reads_mlp
        if mlp is not None and bool(reads_mlp.any()):
            source = below if mids is None else f"L{layer}A"
            self._emit(f"L{layer}MLP", source, "input", None, rows, reads_mlp.to(post.dtype), mlp)
            if self.n_neurons:
                self._neurons(layer, rows[reads_mlp], post[reads_mlp], look, reads_mlp)
        keys = found.parts % self.tokens.shape[1]
        return torch.unique(torch.cat([rows[reached], keys]))

    def _look(self, layer: int, rows: Tensor) -> dict[str, Any]:
        """The layer again, for the attention rows (and neurons) of the reached positions."""
        captures = [Capture("pattern", [layer], lambda x, _: x[0].to(self.double))]
        stream = self.run["resid_pre", layer]
        if not self.n_neurons:
            return self.calls.again(layer, stream, captures, rows)
        if self.model.anatomy.blocks[layer].down is not None:
            captures.append(Capture("neuron", [layer], lambda x, _: x[0][rows].to(self.double)))
            return self.calls.again(layer, stream, captures, rows)
        captures.append(Capture("mlp_out", [layer], lambda *_: None))  # the layer must come to its experts
        with routing(self.model, layer) as routed:
            return {**self.calls.again(layer, stream, captures, rows), "routed": routed, "rows": rows}

    def _fixed(self, y: Tensor, parts: Tensor) -> Tensor:
        none = y.new_zeros(len(y), 0)
        return survivors(y, parts, none, lambda rows, _: y[rows], self.threshold).fixed

    def _post_norm(self, layer: int, rows: Tensor) -> Frozen | None:
        """The norm after the attention, as it acts in this pass on what the heads give."""
        block = self.model.anatomy.blocks[layer]
        if block.post_attn is None:
            return None
        made = block.o(self.run["z", layer].flatten(2))[0, rows]
        frozen = freeze(block.post_attn, made)
        return None if frozen is None else frozen.to(self.double)

    def _value_bias(self, layer: int) -> Tensor | None:
        """[kv_head, d_head] bias of the values, or None."""
        anatomy = self.model.anatomy
        found = []
        for g in range(anatomy.n_kv_heads):
            module, columns = anatomy.qkv_columns("v", g, layer)
            bias = bias_of(module)
            if bias is None:
                return None
            found.append(bias[columns])
        return torch.stack(found).to(self.double)

    def _bias(self, layer: int, rows: Tensor, pattern: Tensor) -> Tensor | None:
        """[row, d_model] what the attention's biases add, or None where it has none (or they are dropped)."""
        anatomy, block = self.model.anatomy, self.model.anatomy.blocks[layer]
        post_norm = self._post_norm(layer, rows)
        out = bias_of(block.o)
        value = None if self.biases == "heads" else self._value_bias(layer)
        after = None if post_norm is None or not bool(post_norm.bias.any()) else post_norm.bias
        if self.biases == "drop" or (out is None and value is None and after is None):
            return None
        total = torch.zeros(len(rows), anatomy.d_model, dtype=self.double, device=rows.device)
        if out is not None:
            total = total + out.to(self.double)
        if value is not None:
            spread = value.repeat_interleave(anatomy.n_heads // anatomy.n_kv_heads, 0)  # [head, d_head]
            total = total + torch.einsum("hq,hd,hdm->qm", pattern.sum(-1), spread, self._W_O(layer))
        if post_norm is not None:
            total = post_norm.through(total) + post_norm.bias
        return total

    def _W_O(self, layer: int) -> Tensor:
        anatomy = self.model.anatomy
        return torch.stack([anatomy.W_O(layer, h) for h in range(anatomy.n_heads)]).to(self.double)

    def _heads(self, layer: int, rows: Tensor, y: Tensor, fixed: Tensor, pattern: Tensor) -> Survivors:
        """Which (head, key) edges carry the sums `y` [row, d_model]; parts are numbered head × width + key."""
        anatomy, width = self.model.anatomy, self.tokens.shape[1]
        v, W_O = self.run["v", layer][0].to(self.double), self._W_O(layer)
        value_bias = None if self.biases == "heads" else self._value_bias(layer)
        v = v if value_bias is None else v - value_bias
        v = v.repeat_interleave(anatomy.n_heads // anatomy.n_kv_heads, 1)  # [key, head, d_head]
        norm = self._post_norm(layer, rows)
        sign = torch.where(y < 0, -1.0, 1.0).to(y.dtype)
        sign = sign if norm is None else norm.pull(sign)
        u = torch.einsum("qm,hdm->qhd", sign, W_O)
        bound = pattern.transpose(0, 1) * torch.einsum("qhd,khd->qhk", u, v)  # [row, head, key]
        # above what rounding can take away
        slack = 1e-10 if y.dtype == torch.float64 else 1e-4
        bound = bound + slack * pattern.transpose(0, 1) * u.norm(dim=-1)[..., None] * v.norm(dim=-1).T
        later = torch.arange(width, device=rows.device) > rows[:, None]
        bound = bound.masked_fill(later[:, None], -torch.inf).flatten(1)

        def exact(at: Tensor, parts: Tensor) -> Tensor:
            h, key = parts // width, parts % width
            out = y.new_empty(len(at), anatomy.d_model)
            for head in h.unique().tolist():
                mine = h == head
                scaled = pattern[head, at[mine], key[mine], None] * v[key[mine], head]
                out[mine] = scaled @ W_O[head]
            return out if norm is None else norm.through(out, at)

        found = survivors(y, fixed, bound, exact, self.threshold)
        self.parts += int((bound > -torch.inf).sum())
        self.evaluated += found.evaluated
        if len(found.rows):
            vectors = exact(found.rows, found.parts)
            signed = (vectors * self.direction[rows[found.rows]]).sum(-1).tolist()
            name = f"L{layer}" if anatomy.parts.parallel or anatomy.blocks[layer].mlp_out is None else f"L{layer}A"
            below = "E" if layer == 0 else f"L{layer - 1}"
            queries = rows[found.rows].tolist()
            for q, part, weight, s in zip(queries, found.parts.tolist(), found.weights.tolist(), signed, strict=True):
                head, key = divmod(part, width)
                self.edges.append(Edge(f"{below}@{key}", f"{name}@{q}", "head", f"L{layer}H{head}", weight, s))
        return found

    def _emit(
        self, target: str, source: str, kind: str, component: str | None, rows: Tensor, weights: Tensor, vectors: Tensor
    ) -> None:
        """Edges at each position of its own, where the weight is above 0."""
        signed = (vectors * self.direction[rows]).sum(-1)
        for i, weight, s in zip(rows.tolist(), weights.tolist(), signed.tolist(), strict=True):
            if weight > 0:
                self.edges.append(Edge(f"{source}@{i}", f"{target}@{i}", kind, component, weight, s))

    def _neurons(self, layer: int, rows: Tensor, y: Tensor, look: dict[str, Any], which: Tensor) -> None:
        """The neurons nearest to the sums after an MLP: shares of all neurons, the rest of the stream, and the bias."""
        mlp = self._rows("mlp_out", layer, rows)
        written = neurons_of(self.model, layer, look, which, mlp, self.double)
        for i, position in enumerate(rows.tolist()):
            for n, share in nearest(y[i], y[i] - mlp[i], written[i], self.n_neurons):
                vector = written[i].vectors(torch.tensor([n], device=y.device))[0]
                self.neurons.append(
                    Neuron(
                        f"L{layer}MLP@{position}", written[i].names(n), share, float(vector @ self.direction[position]),
                        float(written[i].activation[n]),
                    )
                )  # fmt: skip


def _node(name: str, tokens: list[str]) -> Node:
    what, _, position = name.partition("@")
    p = int(position)
    if what == "E":
        return Node(name, "embed", None, p, tokens[p])
    digits = "".join(c for c in what[1:] if c.isdigit())
    kind = {"": "post", "A": "mid", "MLP": "mlp", "B": "bias"}[what[1 + len(digits) :]]
    return Node(name, kind, int(digits), p, tokens[p])
