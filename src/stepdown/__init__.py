"""Stepdown: compiles transformer layers so that they move less data.

A layer is written once, as a DaCe program; it becomes an SDFG of operators; passes transform the SDFG; DaCe generates
the kernels; the result is a PyTorch module that trains.

* ``stepdown.models``: what is computed (layers, operators, presets, the PyTorch reference).
* ``stepdown.transformations``: every rewrite of an SDFG.
* ``stepdown.pipeline``: what runs when (compiler, build cache, PyTorch runtime, training, command line).
"""

__version__ = "0.1.0"
