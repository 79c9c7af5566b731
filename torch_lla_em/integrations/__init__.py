"""Integrations with other libraries; each module needs its library."""

__all__: list[str] = []  # the names are those of the modules
