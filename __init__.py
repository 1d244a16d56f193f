"""FastH3 for ComfyUI. Importing this package imports neither torch, comfy nor triton; see comfy_entrypoint."""

WEB_DIRECTORY = "./web"


async def comfy_entrypoint():
    from .nodes import FastH3Extension  # here, not at the top: the core and its tests run without ComfyUI

    return FastH3Extension()
