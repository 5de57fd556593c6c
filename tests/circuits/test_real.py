"""The pretrained model's own circuit."""

from __future__ import annotations

import pytest

import headscope as hs
from headscope.model import Model


@pytest.mark.real
@pytest.mark.slow
def test_the_best_edges_for_ioi_beat_every_random_circuit_of_their_shape(smollm2: Model) -> None:
    scores = hs.circuits.eap_ig(smollm2, hs.tasks.make("ioi", smollm2, 8, 0))
    found = hs.circuits.prune(smollm2, hs.circuits.top_edges(smollm2, scores, 200))
    proof = hs.prove_circuit(smollm2, hs.tasks.make("ioi", smollm2, 6, 10_000), found, n_random=5)
    assert proof.verdict == "supported", proof.reason
    assert proof.faithfulness > 0.1 > abs(proof.random_most) and abs(proof.complement) < 0.5
    by_sign = hs.circuits.top_edges(smollm2, scores, 1000, by="signed")
    assert hs.circuits.faithfulness(smollm2, hs.tasks.make("ioi", smollm2, 6, 10_000), by_sign)[0] > 1
