"""How one prediction came about: information-flow routes."""

from headscope.routes.extract import routes, token_id
from headscope.routes.route import Edge, Neuron, Node, Route

__all__ = ["Edge", "Neuron", "Node", "Route", "routes", "token_id"]
