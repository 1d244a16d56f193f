"""What an adapter says of the student that it makes, and what that leaves to decide."""

import json
import re
from collections.abc import Mapping
from typing import Any

from ..config import DiTConfig
from ..contracts import CONTRACTS, Contract, Record, against_record, check_fit, infer
from ..errors import ContractError
from ..model.handle import H3Model
from .file import Adapter

_STUDENTS = (
    (re.compile(r"fasth3.*dense", re.I), "preview-4-dense"),
    (re.compile(r"fasth3.*(8-?step.*v2|qad-v2)", re.I), "v2-8"),
    (re.compile(r"fasth3.*(4-?step|preview|fasth3-v1)", re.I), "preview-4"),
)
"""`finetuned_model` of FastVideo's releases -> contract. Their adapters name the student and no schedule."""


def record(adapter: Adapter) -> Record | None:
    """What the adapter's metadata records; None if it says no student.

    Metadata holds texts: numbers and lists are read as JSON.
    """
    source = f"the metadata of {adapter.name}"
    if "dmd_denoising_steps" in adapter.metadata:
        return Record({key: _value(text) for key, text in adapter.metadata.items()}, source)
    name = student(adapter)
    return None if name is None else Record(as_record(CONTRACTS[name], adapter.metadata["finetuned_model"]), source)


def student(adapter: Adapter) -> str | None:
    """The contract of the release that the metadata names."""
    named = adapter.metadata.get("finetuned_model", "")
    return next((name for pattern, name in _STUDENTS if pattern.search(named)), None)


def _value(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        return text


def as_record(contract: Contract, model_id: str) -> Mapping[str, Any]:
    """The fields by which `infer` finds the contract again."""
    return {
        "model_id": model_id,
        "dmd_denoising_steps": list(contract.rungs),
        "num_inference_steps": contract.points,
        "attention_backend": "VIDEO_SPARSE_ATTN_H3" if contract.sparse else "FLASH_ATTN",
        "video_scheduler_shift": contract.shift_video,
        "audio_scheduler_shift": contract.shift_audio,
        **({"vsa_sparsity": contract.sparsity, "vsa_tile_size": contract.tile_size} if contract.sparse else {}),
    }


def decide(
    model: H3Model, adapter: Adapter, config: DiTConfig, gates_zero: bool | None, requested: str
) -> tuple[Contract, tuple[str, ...]]:
    """The contract of the model with the adapter, and where it departs from what the adapter says.

    A name decides: that given with the adapter, else that given with the model. Then what the adapter says of itself;
    an adapter that says nothing leaves the model's.

    Args:
        config: dimensions of the model with the adapter.
        requested: "auto" or a name.

    Raises:
        ContractError: the tensors cannot run it; or the adapter brings gates and says nothing, so a name is needed.
    """
    recorded = record(adapter)
    if requested != "auto":
        decided = infer(config, gates_zero=gates_zero, recorded=recorded, requested=requested)
    elif model.opened.contract != "auto":
        decided = model.contract
        try:
            check_fit(decided, config, gates_zero)
        except ContractError as error:
            raise ContractError(
                f"{adapter.name} does not go with contract {decided.name!r}, as which the model was loaded: {error} "
                "Load the model with contract 'auto', or name the contract where the adapter is applied."
            ) from error
    elif recorded is not None or config.has_gates != model.config.has_gates:
        return infer(config, gates_zero=gates_zero, recorded=recorded), ()
    else:
        check_fit(model.contract, config, gates_zero)
        return model.contract, ()
    return decided, against_record(decided, recorded) if recorded is not None else ()


def decided_by(adapter: Adapter, decided: Contract, model: H3Model, requested: str) -> str:
    """What `decide` went by, for the report."""
    if requested != "auto":
        return "name"
    if decided is model.contract:
        return model.details.get("contract_by", "")
    return f"the metadata of {adapter.name}"
