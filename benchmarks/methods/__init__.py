"""What the scripts share.

Records: ``markdown`` (JSON lines to a table), ``provenance``, ``measure``, ``metrics``.
Data and networks: ``keel`` (real tables), ``tasks``, ``images``, ``shifts``, ``networks``,
``large_networks``, ``training``, ``ranks``, ``radon``, ``unet``. Peers: ``baselines``,
``posteriors``, ``recipe`` (the paper's SGD), ``plain_cg``, ``plain_pass``. Studies: ``ours``,
``ladder``, ``counted``, ``race``, ``fits``, ``image_scores``.
"""
