"""The few file nodes of ComfyUI that a graph of ours needs, for runs without it: pictures, sound and video."""

from dataclasses import dataclass
from pathlib import Path

import av
import numpy as np
import torch

from ..fasth3_core.errors import CheckpointError, FastH3Error
from ..fasth3_core.media.images import load_rgb, to_image, to_tensor
from ..nodes import _host
from ..nodes._host import io
from ..nodes._paths import is_within


def _input_files(*suffixes: str) -> list[str]:
    folder = _host.get().input_dir()
    return sorted(p.relative_to(folder).as_posix() for p in folder.rglob("*") if p.suffix.lower() in suffixes)


def _input_path(name: str):
    folder = _host.get().input_dir()
    path = folder / name
    if not is_within(folder, path) or not path.is_file():
        raise CheckpointError(f"{name!r} is not a file in {folder}.")
    return path


class LoadImage(io.ComfyNode):
    @classmethod
    def define_schema(cls) -> io.Schema:
        return io.Schema(
            node_id="LoadImage", display_name="Load Image", category="image",
            inputs=[io.Combo.Input("image", options=_input_files(".png", ".jpg", ".jpeg", ".webp", ".bmp"))],
            outputs=[io.Image.Output()],
        )

    @classmethod
    def execute(cls, image) -> io.NodeOutput:
        return io.NodeOutput(to_tensor(load_rgb(_input_path(image)))[None])


class LoadAudio(io.ComfyNode):
    @classmethod
    def define_schema(cls) -> io.Schema:
        return io.Schema(
            node_id="LoadAudio", display_name="Load Audio", category="audio",
            inputs=[io.Combo.Input("audio", options=_input_files(".wav", ".flac", ".mp3", ".ogg", ".m4a", ".mp4"))],
            outputs=[io.Audio.Output()],
        )

    @classmethod
    def execute(cls, audio) -> io.NodeOutput:
        path = _input_path(audio)
        try:
            with av.open(str(path), metadata_errors="replace") as container:
                if not container.streams.audio:
                    raise FastH3Error(f"{path} has no sound track.")
                stream = container.streams.audio[0]
                resampler = av.AudioResampler(format="fltp", layout="stereo")
                frames = [*container.decode(stream), None]
                parts = [part.to_ndarray() for frame in frames for part in resampler.resample(frame)]
                rate = stream.codec_context.sample_rate
        except av.error.FFmpegError as error:
            raise FastH3Error(f"{path} cannot be read as a sound: {error}") from error
        if not parts:
            raise FastH3Error(f"{path} has no samples in its sound track.")
        waveform = torch.from_numpy(np.concatenate(parts, axis=1))
        return io.NodeOutput({"waveform": waveform[None], "sample_rate": rate})


@dataclass(frozen=True)
class VideoFile:
    """What of ComfyUI's VIDEO our nodes read."""

    path: Path

    def get_stream_source(self) -> str:
        return str(self.path)

    def get_active_trim_window(self) -> tuple[float, float]:
        return 0.0, 0.0


class LoadVideo(io.ComfyNode):
    @classmethod
    def define_schema(cls) -> io.Schema:
        return io.Schema(
            node_id="LoadVideo", display_name="Load Video", category="video",
            inputs=[io.Combo.Input("file", options=_input_files(".mp4", ".mov", ".mkv", ".webm"))],
            outputs=[io.Video.Output()],
        )

    @classmethod
    def execute(cls, file) -> io.NodeOutput:
        return io.NodeOutput(VideoFile(_input_path(file)))


class SaveImage(io.ComfyNode):
    @classmethod
    def define_schema(cls) -> io.Schema:
        return io.Schema(
            node_id="SaveImage", display_name="Save Image", category="image", is_output_node=True,
            inputs=[io.Image.Input("images"), io.String.Input("filename_prefix", default="ComfyUI")],
        )

    @classmethod
    def execute(cls, images, filename_prefix) -> io.NodeOutput:
        saved = []
        for image in images:
            file = _host.get().output_file(filename_prefix, ".png", image.shape[1], image.shape[0])
            to_image(image[..., :3]).save(file.path)
            saved.append(file.as_ui())
        return io.NodeOutput(ui={"images": saved})


FILE_NODES: list[type[io.ComfyNode]] = [LoadImage, LoadAudio, LoadVideo, SaveImage]
