"""Stepdown: compiles transformer layers so that they move less data.

A layer is written once, as a DaCe program; it becomes an SDFG of operators; passes transform the SDFG; DaCe generates
the kernels; the result is a PyTorch module that trains.

* ``stepdown.models``: what is computed (layers, operators, presets, the PyTorch reference).
* ``stepdown.transformations``: every rewrite of an SDFG.
* ``stepdown.pipeline``: what runs when (compiler, build cache, PyTorch runtime, training, command line).
"""

import warnings

__version__ = "0.1.0"

# Importing DaCe warns about its own source, once and under Python 3.11 and 3.12 only. Which import brings DaCe is not
# known here, so this one text stays ignored; what DaCe says later is for stepdown.models.quiet.
warnings.filterwarnings(
    "ignore", "In 3.13 classes created inside an enum will not become", DeprecationWarning, r"dace\.dtypes$"
)
