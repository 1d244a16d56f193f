"""The nodes. ComfyUI asks `FastH3Extension` for them; nothing else outside this folder imports it."""

from ._host import ComfyExtension, io
from .adapters import FastH3ApplyAdapter
from .conditioning import FastH3EmptyLatent, FastH3LoadPromptEmbeds, FastH3SavePromptEmbeds
from .decode_to_video import FastH3DecodeToVideo
from .decoding import FastH3Decode
from .keyframes import FastH3Keyframes
from .latents import FastH3LoadLatent, FastH3SaveLatent
from .loading import FastH3LoadModel, FastH3LoadVAE
from .offload import FastH3Offload
from .planning import FastH3Plan
from .references import FastH3References
from .sampling import FastH3Sampler
from .saving import FastH3SavePreview
from .vsa import FastH3VSAConfig

NODES: list[type[io.ComfyNode]] = [
    FastH3LoadModel,
    FastH3LoadVAE,
    FastH3VSAConfig,
    FastH3EmptyLatent,
    FastH3Sampler,
    FastH3Decode,
    FastH3SavePreview,
    FastH3SavePromptEmbeds,
    FastH3LoadPromptEmbeds,
    FastH3ApplyAdapter,
    FastH3Offload,
    FastH3Plan,
    FastH3DecodeToVideo,
    FastH3SaveLatent,
    FastH3LoadLatent,
    FastH3Keyframes,
    FastH3References,
]


class FastH3Extension(ComfyExtension):
    async def get_node_list(self) -> list[type[io.ComfyNode]]:
        return NODES
