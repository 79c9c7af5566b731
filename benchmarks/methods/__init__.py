"""What ``compare.py`` puts side by side.

``tasks`` (data, networks, training), ``metrics``, ``measure``, ``baselines``,
``posteriors`` (laplace-torch, the dense posterior, feature density), ``ours``.
"""
