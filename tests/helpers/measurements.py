"""The likelihood of linear measurements, from the recipe in ``examples``."""

import runpy
from pathlib import Path

RECIPE = Path(__file__).parents[2] / "examples" / "recipes" / "linear_measurements.py"
LinearOperatorRegression = runpy.run_path(str(RECIPE))["LinearOperatorRegression"]
