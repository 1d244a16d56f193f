"""Shrink the H3 parts whose sizes ComfyUI hard-codes, so that its stock loaders take tiny files.

The transformer needs nothing: ComfyUI reads all of its sizes from the tensors. The constructors of both VAEs and the
text encoder's configuration are replaced by ones with other defaults; no method is touched.
"""

from functools import partial

DIT = {
    "hidden_size": 64, "num_layers": 3, "token_refiner_num_layers": 2, "num_attention_heads": 2,
    "attention_head_dim": 64, "ffn_hidden_size": 96, "latents_dim": 24, "audio_latents_dim": 32, "text_dim": 80,
    "timestep_input_dim": 32, "time_embed_hidden_size": 64, "time_embed_dim": 32, "rope_inv_freq_len": 8,
}
"""Arguments of ComfyUI's transformer. 6 x rope_inv_freq_len must fit into the head; text_dim must differ from
hidden_size, because ComfyUI takes a prompt of that width for one that has been through the token refiner."""

DIT_CURVE = {**DIT, "adaln_curve_grid": 33, "time_embed_dim": 8}

VIDEO_VAE = {"ch": 32, "ch_mult": (1, 1, 1, 1, 1, 1), "num_res_blocks": 1}
VIDEO_DECODER = {"num_layers": 2, "heads": 2, "dim_head": 64}
AUDIO_VAE = {"encoder_dim": 4, "latent_dim": 128, "decoder_dim": 256}
TEXT = {"hidden_size": DIT["text_dim"], "intermediate_size": 96, "num_attention_heads": 2, "num_key_value_heads": 1}
"""The 50 layers stay: ComfyUI recognises the encoder by its layer 49."""
VISION = {"hidden_size": 32, "intermediate_size": 64, "depth": 3, "deepstack_visual_indexes": [0, 1, 2], "num_heads": 2}


def shrink() -> None:
    """Once a process, before any H3 file is loaded."""
    from comfy.ldm.minimax import audio_vae, vae
    from comfy.text_encoders import qwen3vl

    if isinstance(vae.ViT3DDecoder, partial):
        return
    vae.ViT3DDecoder = partial(vae.ViT3DDecoder, **VIDEO_DECODER)
    vae.MiniMaxH3VideoVAE = partial(vae.MiniMaxH3VideoVAE, **VIDEO_VAE)
    audio_vae.MiniMaxH3AudioVAE = partial(audio_vae.MiniMaxH3AudioVAE, **AUDIO_VAE)
    qwen3vl.QWEN3VL_CONFIGS["qwen3vl_32b"] = partial(qwen3vl.QWEN3VL_CONFIGS["qwen3vl_32b"], **TEXT)
    qwen3vl.QWEN3VL_VISION["qwen3vl_32b"] = VISION
