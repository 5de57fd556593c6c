"""Load a model, know its parts."""

from headscope.model.anatomy import Anatomy, bias_of, weight_of
from headscope.model.load import load, probe_inputs
from headscope.model.model import Model

__all__ = ["Anatomy", "Model", "bias_of", "load", "probe_inputs", "weight_of"]
