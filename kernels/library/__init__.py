"""The transformer's ops for torch.compile: operators of torch.library with fakes, so that a graph stays whole.

While a graph is traced, `registry.Resolved` calls what is registered here instead of the implementation. An operator
takes the implementation's name and flat arguments, and runs that implementation when the graph runs: a compiled block
computes what an uncompiled one does, bit for bit. Its fake says shape, dtype and layout of the results alone.

Runs of this package compile nothing; this is for those who compile around it. Calls inside a graph are not counted.
"""

from . import products, sparse, token_ops

__all__ = ["products", "sparse", "token_ops"]
