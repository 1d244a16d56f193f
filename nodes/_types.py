"""The package's own wire types. Everything else on the wires is ComfyUI's."""

from ._host import io

Model = io.Custom("FASTH3_MODEL")
"""fasth3_core.model.handle.H3Model: immutable."""
Vae = io.Custom("FASTH3_VAE")
"""nodes._vae_pair.VaePair"""
Vsa = io.Custom("FASTH3_VSA")
"""fasth3_core.config.VSAConfig"""
Offload = io.Custom("FASTH3_OFFLOAD")
"""fasth3_core.weights.placement.Offload"""
Report = io.Custom("FASTH3_REPORT")
"""fasth3_core.report.run_report.RunReport"""

CATEGORY = "FastH3"
