"""What the scripts share.

Records: ``markdown`` (JSON lines to a table), ``provenance``, ``measure``, ``metrics``.
Data and networks: ``tasks`` (real tables), ``images``, ``shifts``, ``networks``,
``learning``, ``training``, ``ranks``, ``radon``, ``unet``. Peers: ``peers``,
``recipe`` (the paper's SGD), ``plain_cg``, ``plain_pass``. Studies:
``ladder``, ``counted``, ``race``, ``fits``, ``image_scores``.
"""
