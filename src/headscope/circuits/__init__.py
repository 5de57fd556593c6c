"""Which edges between heads and MLPs do a task: scores of edges, circuits of the best, and how good these are."""

from headscope.circuits.circuit import Circuit, greedy_edges, prune, top_edges
from headscope.circuits.paths import path_patching
from headscope.circuits.quality import (
    Completeness,
    Curve,
    completeness,
    curve,
    edge_auroc,
    enough_edges,
    faithfulness,
    minimality,
)
from headscope.circuits.reuse import Overlap, overlap
from headscope.circuits.scores import eap, eap_ig, exact
from headscope.circuits.stepwise import acdc
from headscope.model.graph import Graph, graph_of

__all__ = [
    "Circuit",
    "Completeness",
    "Curve",
    "Graph",
    "Overlap",
    "acdc",
    "completeness",
    "curve",
    "eap",
    "eap_ig",
    "edge_auroc",
    "enough_edges",
    "exact",
    "faithfulness",
    "graph_of",
    "greedy_edges",
    "minimality",
    "overlap",
    "path_patching",
    "prune",
    "top_edges",
]
