"""What the scripts share.

``compare.py``: ``tasks`` (data, networks, training), ``metrics``, ``measure``, ``baselines``,
``posteriors`` (laplace-torch, the dense posterior, feature density), ``ours``. The ladder of
images: ``images``, ``shifts``, ``training``, ``ranks``, ``ladder``. ``tomography.py``:
``radon``, ``unet``, ``image_scores``. ``report.py``: ``image_sections``.
"""
