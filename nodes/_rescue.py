"""A sampled latent is never lost to what comes after it."""

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch

from ..fasth3_core.errors import FastH3Error, Interrupted
from ..fasth3_core.media import latent_file
from ..fasth3_core.report.run_report import RunReport
from . import _claim, _folder_files, _host

log = logging.getLogger("fasth3")

PREFIX = "latents/FastH3_undecoded"


@contextmanager
def kept_on_failure(
    video: torch.Tensor, audio: torch.Tensor, report: RunReport | None = None
) -> Iterator[Callable[[_host.OutputFile], None]]:
    """Save the latent if the block fails, and say so in the error; not if the user stopped it. Yields save(file), which
    saves it at once: it is not saved twice.

    Raises FastH3Error, which names the file and the node that loads it, from what the block raised.
    """
    saved: list[_host.OutputFile] = []

    def save(file: _host.OutputFile) -> None:
        latent_file.save(file.path, video, audio, report)
        saved.append(file)

    def save_or_say_why_not() -> str:
        try:
            if not saved:
                with _claim.output_file(PREFIX, latent_file.SUFFIX) as file:
                    save(file)
        except Exception as error:  # what led here matters more
            log.error("FastH3: the latent could not be saved", exc_info=True)
            return f"The sampled latent could not be saved either: {error}"
        return (
            f"The sampled latent is kept in {saved[0].path}. FastH3 Load Latent loads it as "
            f"'{_folder_files.output_choice(saved[0])}', so that it can be decoded without sampling again."
        )

    try:
        yield save
    except Interrupted:  # ComfyUI's own is no Exception
        raise
    except Exception as error:
        if not isinstance(error, FastH3Error):  # ours say all there is to say
            log.error("FastH3: decoding failed", exc_info=True)
        raise FastH3Error(f"{error or type(error).__name__}\n{save_or_say_why_not()}") from error
