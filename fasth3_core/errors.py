"""Exceptions that users see. Each message says what was wrong, with the numbers, and what to do about it."""


class FastH3Error(ValueError):
    """Root of everything that a user can mend: bad settings, files, geometry or combinations."""


class ConfigError(FastH3Error):
    """A setting outside what it may be: names the field, the value, the allowed range and the mend."""

    def __init__(self, field: str, got: object, expected: str, hint: str):
        self.field = field
        super().__init__(f"{field}={got!r}: expected {expected}. {hint}")


class GeometryError(FastH3Error):
    """Sizes, frame counts or grids that the model does not take."""


class CheckpointError(FastH3Error):
    """A file that cannot be read as the component it was given for."""


class ContractError(FastH3Error):
    """Model, adapter, conditioning or settings that do not belong together."""


class Interrupted(Exception):
    """The caller's `check_interrupt` asked to stop. Never caught here: what the run held is released as it passes."""
