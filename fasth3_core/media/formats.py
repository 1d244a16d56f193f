"""What a video can be saved as: file, encoder, pixels and sound of every choice, as plain data. Imports no PyAV."""

from dataclasses import dataclass

from ..errors import ConfigError, GeometryError

BIT_DEPTHS = (8, 10)
AUDIO_CODECS = ("auto", "aac", "flac", "none")


@dataclass(frozen=True, slots=True)
class Format:
    """One kind of file."""

    name: str
    suffix: str
    """Of the file's name; "" for a folder of pictures."""
    muxer: str
    """FFmpeg's name of the container; "" for a folder of pictures."""
    encoder: str
    pixels: dict[int, str]
    """Bit depth -> FFmpeg's name of the pixel format."""
    audio: str
    """Codec that "auto" takes."""
    crf: int | None = None
    """Largest value of the quality setting; None: lossless, there is none."""
    options: tuple[tuple[str, str], ...] = ()
    """More of the encoder's own."""
    tag: str | None = None
    """Four letters that players know the codec by, where FFmpeg's default is not understood everywhere."""

    @property
    def rgb(self) -> bool:
        """Whether pixels are stored as they are, not as luma and halved chroma."""
        return self.crf is None


FORMATS = {
    form.name: form
    for form in (
        # what waits for the encoder when decoding ends keeps the user waiting: of 124 decoded frames on 16 cores the
        # file was done 0.5 s after the last, 0.7 with preset medium, at 0.1 dB more and the same size
        Format("mp4 h264", ".mp4", "mp4", "libx264", {8: "yuv420p", 10: "yuv420p10le"}, "aac", 51,
               (("preset", "fast"), ("rc-lookahead", "20"))),
        # hvc1: QuickTime and Safari refuse FFmpeg's hev1
        Format("mp4 h265", ".mp4", "mp4", "libx265", {8: "yuv420p", 10: "yuv420p10le"}, "aac", 51,
               (("x265-params", "log-level=error"),), "hvc1"),
        Format("mp4 av1", ".mp4", "mp4", "libsvtav1", {8: "yuv420p", 10: "yuv420p10le"}, "aac", 63,
               (("preset", "8"),)),
        Format("mkv lossless", ".mkv", "matroska", "ffv1", {8: "bgr0", 10: "gbrp10le"}, "flac", None,
               (("level", "3"), ("slices", "16"), ("slicecrc", "1"))),
        Format("png frames", "", "", "png", {8: "rgb24"}, "none"),
    )
}  # fmt: skip
DEFAULT_CRF = 18
"""Visually lossless in H.264."""


@dataclass(frozen=True, slots=True)
class Output:
    """One choice of every setting. Raises ConfigError for values that do not go together."""

    form: Format = FORMATS["mp4 h264"]
    bit_depth: int = 8
    crf: int = DEFAULT_CRF
    audio: str = "auto"

    def __post_init__(self) -> None:
        form, depths = self.form, ", ".join(map(str, self.form.pixels))
        if self.bit_depth not in form.pixels:
            raise ConfigError("bit_depth", self.bit_depth, f"{depths} for {form.name}", "Choose another format.")
        if self.audio not in AUDIO_CODECS:
            raise ConfigError("audio_codec", self.audio, f"one of {AUDIO_CODECS}", "'auto' suits the format.")
        if form.crf is not None and not 0 <= self.crf <= form.crf:
            raise ConfigError("crf", self.crf, f"0 to {form.crf} for {form.name}", "18 looks lossless, 28 is small.")
        if not form.muxer and self.audio not in ("auto", "none"):
            raise ConfigError("audio_codec", self.audio, f"'auto' for {form.name}", "The sound is a WAV beside them.")

    @property
    def pixels(self) -> str:
        return self.form.pixels[self.bit_depth]

    @property
    def audio_codec(self) -> str:
        """"aac", "flac" or "none"."""
        return self.form.audio if self.audio == "auto" else self.audio

    @property
    def sample_bits(self) -> int:
        """Bits of the whole numbers that frames are handed over in."""
        return 8 if self.bit_depth == 8 else 16

    def check_size(self, width: int, height: int) -> None:
        """Raise GeometryError for a picture that cannot be stored."""
        if not self.form.rgb and (height % 2 or width % 2):
            raise GeometryError(
                f"{self.form.name} in 4:2:0 needs an even size, got {width}x{height}. Crop or pad by one pixel."
            )


def output(name: str, bit_depth: int | str = 8, crf: int = DEFAULT_CRF, audio: str = "auto") -> Output:
    """The settings as a user names them; raises ConfigError."""
    if name not in FORMATS:
        raise ConfigError("format", name, f"one of {', '.join(FORMATS)}", "'mp4 h264' plays everywhere.")
    return Output(FORMATS[name], int(bit_depth), crf, audio)
