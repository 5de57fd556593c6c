"""Whether a neuron writes what it reads, or takes it away: the cosine of its input and output weights."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import cosine_similarity, normalize

from headscope.core.errors import NotApplicable
from headscope.core.scores import make
from headscope.methods.base import Check, Info, ScoreMethod
from headscope.model.frozen import Frozen, freeze
from headscope.trace.wiring import mlp_norm

if TYPE_CHECKING:
    import xarray as xr

    from headscope.model import Model

#: a cosine beyond this is no accident
THRESHOLD = 0.5
#: neurons whose weights are widened at once, so that a large layer needs no second copy of itself
CHUNK = 4096
#: by the sign of the cosine of input and output where it is beyond the threshold, then whether that of the gate is
CLASSES = {
    (1, True): "enrichment", (1, False): "conditional enrichment", (0, True): "proportional change",
    (0, False): "orthogonal output", (-1, True): "depletion", (-1, False): "conditional depletion",
}  # fmt: skip


@dataclass(frozen=True)
class IoWeightCosineNeurons(ScoreMethod):
    """Neurons that strengthen the direction they read (enrichment), or weaken it (depletion).

    What it measures: how far the direction that a neuron writes is the one that it reads, by its weights alone.

    Formula: score[l, n] = cos(w_in, w_out), with w_in and w_out [d_model] the neuron's column of W_in and its row of
    W_out; gate_out[l, n] = cos(w_gate, w_out) and gate_in[l, n] = cos(w_gate, w_in) where the MLP is gated. The class:
    enrichment (score > 0.5), depletion (score < -0.5), each conditional unless |gate_out| > 0.5; between them,
    proportional change if |gate_out| > 0.5, else orthogonal output. Coordinates: gate_out, gate_in, class.

    Options: none.

    Does not show: when a neuron is active, how strongly, or whether anything depends on it; the sign is that of the
    linear side, so a neuron whose gate is negative (SiLU and GELU allow it) does the opposite.

    Cost: weights only; a few products a neuron.

    Paper and differences: Gerstner & Schütze 2025. The gain of the norm before the MLP is folded into w_in and w_gate,
    that of a norm after the MLP into w_out, and what a LayerNorm takes out (the mean) is taken out of both. An MLP
    without a gate has one input vector; its classes are enrichment, depletion and orthogonal output.
    """

    info = Info(
        title="Input-output weight cosine of neurons",
        papers=("arXiv:2505.17936",),
        claim="The neurons of the first half of the layers on average add to the direction that they read, those of the "
        "second half take from it, each beyond every shuffle of inputs and outputs.",
        higher_means="writes more of the direction that it reads; below 0, takes it away",
        cost="weights only",
        units="neuron",
        dims=("layer", "neuron"),
        quick=True,
        values_in=(-1.0, 1.0),
    )

    @torch.no_grad()
    def score(self, model: Model, *, seed: int = 0) -> xr.DataArray:
        if model.anatomy.blocks[0].down is None:
            what = "its MLPs are experts" if model.anatomy.blocks[0].n_experts else "it has no MLPs"
            raise NotApplicable(f"There are no neurons to number in {model.name}: {what}.")
        rows = [_Layer(model, layer).cosines() for layer in range(model.anatomy.n_layers)]
        in_out, *gates = (torch.stack(layers).clamp(-1, 1) for layers in zip(*rows, strict=True))
        named = {"class": classes(in_out, gates[0] if gates else None)}
        if gates:
            named |= {"gate_out": gates[0].double().numpy(), "gate_in": gates[1].double().numpy()}
        coordinates = {name: (("layer", "neuron"), values) for name, values in named.items()}
        return make(in_out, ("layer", "neuron")).assign_coords(coordinates)

    @torch.no_grad()
    def check(self, model: Model, *, seed: int = 0) -> Check:
        generator = torch.Generator().manual_seed(seed)
        n = model.anatomy.n_layers
        if n < 2:
            raise NotApplicable(f"{model.name} has one layer, and the claim compares the first half with the second.")
        means = self.score(model, seed=seed).mean("neuron").values
        null = np.array([_Layer(model, layer).shuffled(generator) for layer in range(n)])  # [layer shuffle]
        early, late = slice(0, n // 2), slice(n // 2, n)
        figures = {
            "mean of the first half": float(means[early].mean()),
            "shuffled, highest of 20": float(null[early].mean(0).max()),
            "mean of the second half": float(means[late].mean()),
            "shuffled there, lowest of 20": float(null[late].mean(0).min()),
        }
        first, high, second, low = figures.values()
        lowest = int(means.argmin())
        return Check(
            first > max(0.0, high) and second < min(0.0, low),
            figures,
            f"highest in layer {int(means.argmax())} ({means.max():.2f}), lowest in layer {lowest} ({means[lowest]:.2f})",
        )


def classes(in_out: Tensor, gate_out: Tensor | None = None) -> np.ndarray:
    """The class of each neuron, as text, from its cosines; see `IoWeightCosineNeurons`."""
    sign = (in_out > THRESHOLD).int() - (in_out < -THRESHOLD).int()
    # without a gate there is nothing else that the neuron could depend on
    gated = sign != 0 if gate_out is None else gate_out.abs() > THRESHOLD
    names = np.array([CLASSES[s, g] for s in (-1, 0, 1) for g in (False, True)], dtype=object)
    found: np.ndarray = names[(2 * (sign + 1) + gated.int()).numpy()]
    return found


class _Layer:
    """What the neurons of one layer read and write, with the norms around the MLP folded in."""

    def __init__(self, model: Model, layer: int) -> None:
        a = model.anatomy
        self.W_in, self.W_gate, self.W_out = a.W_in(layer), a.W_gate(layer), a.W_out(layer)
        self.dtype = torch.promote_types(self.W_in.dtype, torch.float32)
        x = torch.linspace(-1, 1, a.d_model, dtype=model.dtype, device=model.device)[None]
        # after each sum, as in BERT, the stream itself is normalised: it is read as it stands
        before = None if a.parts.norm_placement == "post" else mlp_norm(model, layer)
        self.before, self.after = freeze(before, x), freeze(a.blocks[layer].post_mlp, x)

    def reads(self, W: Tensor) -> Tensor:
        """[neuron d_model] from columns of W [d_model neuron]."""
        return self._centred(_times(W.T.to(self.dtype), self.before))

    def writes(self, W: Tensor) -> Tensor:
        """[neuron d_model] from rows of W [neuron d_model]."""
        rows = W.to(self.dtype)
        if self.after is not None and self.after.centred:
            rows = rows - rows.mean(-1, keepdim=True)
        return self._centred(_times(rows, self.after))

    def _centred(self, rows: Tensor) -> Tensor:
        """Without the direction that a LayerNorm before the MLP takes out of all that is read."""
        return rows - rows.mean(-1, keepdim=True) if self.before is not None and self.before.centred else rows

    def cosines(self) -> tuple[Tensor, ...]:
        """[neuron] each: input and output, and where there is a gate: gate and output, gate and input."""
        found = []
        for start in range(0, len(self.W_out), CHUNK):
            chunk = slice(start, start + CHUNK)
            w_in, w_out = self.reads(self.W_in[:, chunk]), self.writes(self.W_out[chunk])
            pairs = [(w_in, w_out)]
            if self.W_gate is not None:
                w_gate = self.reads(self.W_gate[:, chunk])
                pairs += [(w_gate, w_out), (w_gate, w_in)]
            found.append([cosine_similarity(*pair, eps=1e-30).cpu() for pair in pairs])
        return tuple(torch.cat(parts) for parts in zip(*found, strict=True))

    def shuffled(self, generator: torch.Generator, times: int = 20) -> list[float]:
        """The mean cosine of inputs with the outputs of other neurons, several times."""
        w_in, w_out = (normalize(rows) for rows in (self.reads(self.W_in), self.writes(self.W_out)))
        orders = [torch.randperm(len(w_out), generator=generator).to(w_out.device) for _ in range(times)]
        return [float((w_in * w_out[order]).sum(-1).mean()) for order in orders]


def _times(rows: Tensor, norm: Frozen | None) -> Tensor:
    return rows if norm is None else rows * norm.gain.to(rows)
