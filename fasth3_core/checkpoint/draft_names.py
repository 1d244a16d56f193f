"""The tensors of a draft decoder (taeh3), which has one layout and its own names everywhere."""

from ..errors import CheckpointError
from ..vae.draft import is_draft
from .kinds import Plan, Source
from .rows import Assembly, Piece


def plan_draft_decoder(source: Source) -> Plan:
    """Every decoder tensor of the file as it is stored; shapes are checked when it is built.

    Raises CheckpointError where the file is no draft decoder.
    """
    if not is_draft(source.tensors):
        raise CheckpointError(f"{source.label}: no draft decoder (taeh3): decoder.1, .3.conv.0 or .22 is missing.")
    kept = {name: stored for name, stored in source.tensors.items() if name.startswith("decoder.")}
    entries = {
        name: Assembly(stored.dtype, stored.shape, (Piece(name, 0, stored.shape[0] if stored.shape else 1),))
        for name, stored in kept.items()
    }
    shapes = {name: stored.shape for name, stored in kept.items()}
    return Plan("draft decoder", "taeh3", "", entries, shapes, {}, tuple(n for n in source.tensors if n not in kept))
