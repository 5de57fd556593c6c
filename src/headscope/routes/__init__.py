"""How one prediction came about: information-flow routes."""

from headscope.routes.extract import routes, token_id
from headscope.routes.route import Edge, Neuron, Node, Route
from headscope.routes.walk import Walk

__all__ = ["Edge", "Neuron", "Node", "Route", "Walk", "routes", "token_id"]
