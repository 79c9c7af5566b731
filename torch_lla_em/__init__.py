"""Sampling-based linearised Laplace with EM: error bars for trained networks."""

__version__ = "0.1.0"
