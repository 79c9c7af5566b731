"""Interfaces of other libraries: ``Laplace`` of laplace-torch."""

from torch_lla_em.compat.laplace import Laplace

__all__ = ["Laplace"]
