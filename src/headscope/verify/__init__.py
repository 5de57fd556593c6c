"""Prove a role: controls, paired seeds, intervals, verdicts."""

from headscope.verify.circuit import CircuitProof, prove_circuit
from headscope.verify.roles import ROLES, Role, get_role
from headscope.verify.route import RouteProof, prompt_of, prove_routes
from headscope.verify.stats import bootstrap_interval, holm, sign_flip_p
from headscope.verify.verify import Verdict, decide, n_heads_of, n_runs, verify

__all__ = [
    "ROLES",
    "CircuitProof",
    "Role",
    "RouteProof",
    "Verdict",
    "bootstrap_interval",
    "decide",
    "get_role",
    "holm",
    "n_heads_of",
    "n_runs",
    "prompt_of",
    "prove_circuit",
    "prove_routes",
    "sign_flip_p",
    "verify",
]
