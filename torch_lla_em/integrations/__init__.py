"""Other libraries: one module for each, which needs its library."""
