"""Other libraries: one module for each, which needs its library."""

__all__: list[str] = []  # the names are those of the modules
