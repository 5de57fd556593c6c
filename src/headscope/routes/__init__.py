"""How one prediction came about: information-flow routes, and what each layer would have said."""

from headscope.routes.extract import routes, token_id
from headscope.routes.logit_lens import Lens, lens
from headscope.routes.route import Edge, Neuron, Node, Route
from headscope.routes.walk import Walk

__all__ = ["Edge", "Lens", "Neuron", "Node", "Route", "Walk", "lens", "routes", "token_id"]
