"""What the scripts share.

Data: ``tasks`` (real tables), ``families`` (images of digits). Networks: ``networks``, ``learning``. Methods to compare:
``peers``. Scores: ``metrics``. Records: ``markdown`` (JSON lines to a table), ``provenance``.
"""
