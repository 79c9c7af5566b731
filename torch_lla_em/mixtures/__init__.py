"""Mixtures by expectation maximisation; ``torch_lla_em.mixture`` is their public face.

Every mixture here is one of exponential families: log p(x, component k) = θ_k · φ(x).
The E-step is then one matrix product with the features φ, its statistics Σ_n r_nk φ(x_n)
another, and data pass by in chunks. Reading order: ``rows`` (passes over data),
``kmeans`` (starts), ``family`` (the EM), ``base`` (fit and queries), ``blocks``
(covariance structures), ``conjugate`` (their prior), then the members ``gaussian``,
``variational`` and ``bernoulli``.
"""
