"""Parameters and bytes of a transformer from its dimensions alone."""

from .config import DiTConfig
from .contracts import Contract
from .model.time import BLOCK_ROWS
from .weights.placement import Sizes


def released(contract: Contract) -> DiTConfig:
    """Dimensions of the released model that a contract is of."""
    trimmed = contract.name in ("trim-8", "compact")
    rank = 16 if contract.name == "trim-8" else None
    return DiTConfig(
        hidden_size=5376, num_layers=42 if trimmed else 50, num_refiner_layers=2, num_heads=56, head_dim=128,
        ffn_dim=14336, in_channels=24, audio_in_channels=32, text_dim=5120, freq_dim=256, time_embed_hidden_dim=5376,
        time_embed_dim=2688, rope_freq_dim=16, adaln="rank" if rank else "full", adaln_rank=rank,
        has_gates=contract.sparse, output_heads=max(1, contract.fine_steps),
    )


def released_sizes(config: DiTConfig, element_size: int, fp8: bool = False) -> Sizes:
    """Bytes of its weights in one dtype, or with the projections of its blocks in float8 and one fp32 scale a row."""
    block = num_block_parameters(config) * element_size
    text = text_parameters(config) * element_size
    top = resident_parameters(config) * element_size - config.num_layers * block - text
    if fp8:
        rows, values = _projections(config)
        block -= values * (element_size - 1) - 4 * rows
    return Sizes(top=top, text=text, blocks=(block,) * config.num_layers)


def num_parameters(config: DiTConfig) -> int:
    """Of a transformer, the AdaLN of every block included."""
    C = config.hidden_size
    adaln_in = _adaln_inputs(config)
    block = num_block_parameters(config) + BLOCK_ROWS * C * (adaln_in + 1)
    rows = config.video_row_dim + config.audio_in_channels
    patches = rows * C + 2 * C + config.output_heads * rows * (C + 1)
    time_hidden = config.time_embed_hidden_dim
    time = time_hidden * (config.freq_dim + 1) + config.time_embed_dim * (time_hidden + 1)
    time += (config.adaln_rank or 0) * config.time_embed_dim * (config.adaln == "rank")
    rest = patches + time * (config.adaln != "curve") + C + 2 * C * (adaln_in + 1)
    return config.num_layers * block + text_parameters(config) + rest


def text_parameters(config: DiTConfig) -> int:
    """Of what refines a prompt: a projection, blocks without gates, and a norm."""
    C = config.hidden_size
    block = num_block_parameters(config) - config.has_gates * config.inner_dim * C
    return C * (config.text_dim + 1) + config.num_refiner_layers * block + C


def num_block_parameters(config: DiTConfig) -> int:
    """Of a main block without its AdaLN."""
    _, projections = _projections(config)
    return projections + 2 * config.head_dim + 2 * config.hidden_size


def _projections(config: DiTConfig) -> tuple[int, int]:
    """Output rows, and parameters, of a block's large products: q, k, v, gate and out, fc1 and fc2."""
    C, inner = config.hidden_size, config.inner_dim
    rows = (3 + config.has_gates) * inner + 2 * config.ffn_dim + 2 * C
    return rows, (4 + config.has_gates) * inner * C + 3 * config.ffn_dim * C


def resident_parameters(config: DiTConfig) -> int:
    """Without the AdaLN of the main blocks, which is read for its tables and not kept."""
    adaln = BLOCK_ROWS * config.hidden_size * (_adaln_inputs(config) + 1)
    return num_parameters(config) - config.num_layers * adaln


def _adaln_inputs(config: DiTConfig) -> int:
    return config.adaln_rank or config.time_embed_dim
