"""The device that a command runs on."""

import torch

from ..fasth3_core.errors import ConfigError


def chosen(name: str | None) -> torch.device:
    """The device that was asked for; without a name the accelerator, or the CPU where there is none.

    Raises:
        ConfigError: this machine has no such device; names those it has.
    """
    here = [torch.device("cpu")]
    if torch.accelerator.is_available():
        kind = torch.accelerator.current_accelerator().type
        here = [*(torch.device(kind, i) for i in range(torch.accelerator.device_count())), *here]
    if not name:
        return here[0]
    try:
        wanted = torch.device(name)
    except RuntimeError:  # no name of a device anywhere
        wanted = None
    for device in here:
        if wanted and wanted.type == device.type and wanted.index in (None, device.index or 0):
            return device
    raise ConfigError("device", name, f"one of this machine's, {', '.join(map(str, here))}", "Leave it out if unsure.")
