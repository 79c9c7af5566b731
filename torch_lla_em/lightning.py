"""Deprecated name of ``torch_lla_em.integrations.lightning``."""

import sys
import warnings
from importlib import import_module

_NEW = "torch_lla_em.integrations.lightning"
warnings.warn(f"Import {_NEW} instead of {__name__}.", DeprecationWarning, stacklevel=2)
sys.modules[__name__] = import_module(_NEW)
