"""Sparse attention settings. Widgets -> VSAConfig; the sampler fills in what is left to the contract."""

from ..fasth3_core.config import KEEP_RULES, MODES, TILE_SHAPES, VSAConfig
from ..fasth3_core.errors import ConfigError
from ..kernels import registry
from ._host import io
from ._types import CATEGORY, Vsa

_DEFAULT = VSAConfig()
_CONTRACT = "contract"


class FastH3VSAConfig(io.ComfyNode):
    @classmethod
    def define_schema(cls) -> io.Schema:
        return io.Schema(
            node_id="FastH3VSAConfig",
            display_name="FastH3 VSA Config",
            category=CATEGORY,
            description="Video sparse attention: each tile of video tokens attends to the best-scoring video tiles. "
            "Without this node the sampler runs what the model was distilled with.",
            inputs=[
                io.Combo.Input(
                    "keep_rule", options=list(KEEP_RULES), default=_DEFAULT.keep_rule,
                    tooltip="How many video tiles are kept: as trained, a fraction (sparsity), or a number (top_k).",
                ),
                io.Float.Input(
                    "sparsity", default=_DEFAULT.sparsity, min=0.0, max=0.999, step=0.01,
                    tooltip="Fraction of video tiles dropped per query tile, with keep_rule 'sparsity'. "
                    "0 keeps every tile and still runs the trained gate.",
                ),
                io.Int.Input(
                    "top_k", default=_DEFAULT.top_k, min=1, max=100_000,
                    tooltip="Video tiles kept per query tile, with keep_rule 'top_k'.",
                ),
                io.Combo.Input(
                    "tile_size", options=[_CONTRACT, *map(str, TILE_SHAPES)], default=_CONTRACT, advanced=True,
                    tooltip="Tokens per tile. Students were trained at 64 unless their contract says otherwise.",
                ),
                io.Combo.Input(
                    "mode", options=list(MODES), default=_DEFAULT.mode, advanced=True,
                    tooltip="'exempt': text, audio and conditions are always attended to, as trained. "
                    "'compete': they compete with the video tiles.",
                ),
                io.Int.Input(
                    "dense_first_steps", default=_DEFAULT.dense_first_steps, min=0, max=64, advanced=True,
                    tooltip="Sampler steps at the start that keep every tile. 0 as trained.",
                ),
                io.String.Input(
                    "dense_layers", default="", advanced=True,
                    tooltip="Blocks that keep every tile, e.g. '0, 1, 40-49'. Empty as trained.",
                ),
                io.Combo.Input(
                    "backend", options=["auto", *registry.names("block_sparse_attention")], default="auto",
                    advanced=True, tooltip="A named backend runs or the sampler fails with the reason; only 'auto' may "
                    "choose another, and says so in the report.",
                ),
            ],
            outputs=[Vsa.Output(display_name="vsa")],
        )

    @classmethod
    def execute(
        cls, keep_rule, sparsity, top_k, tile_size, mode, dense_first_steps, dense_layers, backend
    ) -> io.NodeOutput:
        config = VSAConfig(
            keep_rule=keep_rule, sparsity=sparsity, top_k=top_k, mode=mode, backend=backend,
            tile_size=0 if tile_size == _CONTRACT else int(tile_size),
            dense_first_steps=dense_first_steps, dense_layers=parse_layers(dense_layers),
        )
        return io.NodeOutput(config)


def parse_layers(text: str) -> tuple[int, ...]:
    """'0, 3, 5-7' -> (0, 3, 5, 6, 7)."""
    layers: set[int] = set()
    for part in filter(None, text.replace(" ", "").split(",")):
        first, dash, last = part.partition("-")
        if not first.isdecimal() or (dash and not last.isdecimal()) or (dash and int(last) < int(first)):
            raise ConfigError("dense_layers", text, "block numbers and ranges such as '0, 3, 5-7'", "Leave it empty.")
        layers.update(range(int(first), int(last or first) + 1))
    return tuple(sorted(layers))
