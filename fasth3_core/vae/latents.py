"""Latent and pixel statistics, and the posterior. Used by both VAEs; every tensor here is fp32.

The transformer samples *normalised* latents z_n = (z - mean) / std, per channel on dim 1. Pixels enter and leave
the video VAE in [0, 1]; inside it works on ImageNet-normalised values.
"""

import torch

from ..errors import CheckpointError
from .tensors import Reader

PIXEL_MEAN = (0.485, 0.456, 0.406)
PIXEL_STD = (0.229, 0.224, 0.225)

VIDEO_MEAN = (
    0.858090341091156, -0.9606591463088989, 1.0661640167236328, -0.5090325474739075,
    -0.2727581858634949, -1.3675414323806763, -0.2553254961967468, -0.26907554268836975,
    -0.5376840829849243, -0.0464097298681736, 0.6657370328903198, 0.19690127670764923,
    -0.5460608005523682, -0.4035342037677765, -0.23683024942874908, 0.25928452610969543,
    -0.30133944749832153, 0.211341992020607, -1.1206848621368408, 0.3581933379173279,
    -0.04225143790245056, 0.2604829967021942, 0.22864092886447906, 0.7056031823158264,
)  # fmt: skip
VIDEO_STD = (
    1.2223774194717407, 1.2767263650894165, 1.68317747116088865, 1.7549455165863037,
    1.5636216402053833, 2.194143533706665, 0.96531379222869875, 1.05698859691619875,
    0.841948926448822, 0.7729952931404114, 1.8955937623977661, 0.946841835975647,
    0.7996809482574463, 0.44988900423049925, 0.7197399735450745, 0.69362932443618775,
    2.961095094680786, 2.7694199085235595, 3.0496184825897215, 2.1088054180145265,
    3.276226282119751, 3.1627357006073, 2.28168129920959475, 2.6127843856811525,
)  # fmt: skip
AUDIO_MEAN = (
    -0.020211687488382354, 0.3876466479950502, -0.04398279799186767, -0.28591514936373,
    0.08179686214561671, -0.35782641352446604, 0.040623809960919084, -0.01552534501956604,
    -0.223362481667332, 0.1821006842509091, 0.2941778783780663, -0.07901167601970885,
    -0.056815072777201, -0.3699028221860095, -0.31616315591624855, 0.5905951377425391,
    -0.052139568068853864, 0.013673160263486295, -0.03691647864630577, 0.09732660653298163,
    -0.3394662328788498, -0.30685677538541667, -0.24504598907458763, -0.034698524462007344,
    0.02868032184767538, -0.21217779266454084, -0.1678263169941987, 0.3221287889040614,
    -0.1223055851554907, 0.4356604928128464, -0.0502599202236253, 0.3979258376211797,
)  # fmt: skip
AUDIO_STD = (
    1.6895524230479284, 2.76263727217653, 1.7945344281264435, 1.6801681847309828,
    1.6390226546605453, 2.7788298348882177, 1.7659090095747236, 1.6199757612137327,
    2.6336525640336896, 1.8539356672817833, 2.5056497896915633, 1.811019237886178,
    1.9579657790720237, 1.6685498243529284, 1.4922469314453364, 3.298670198067373,
    1.9491804496832168, 1.8720003270431442, 1.8334080103291832, 1.6488070416529093,
    1.6176957696319716, 1.9131449234774398, 1.5695245398428617, 1.6943659940415912,
    1.8318420762504692, 1.5540637421583379, 1.9344930328968526, 1.599198216109855,
    1.718045989838149, 1.6307219190837705, 1.8661226051202384, 1.5613768203168363,
)  # fmt: skip


def statistics(
    reader: Reader, mean: tuple[float, ...], std: tuple[float, ...], channels: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Latent mean and std, fp32 [channels]: those of the file where it stores them, else the given official ones.

    Raises CheckpointError for another number of them, or a std that nothing can be divided by.
    """
    values = []
    for name, official in (("latents_mean", mean), ("latents_std", std)):
        if name in reader.tensors:
            value = reader.take(name, (None,) * len(reader.shape(name))).flatten()
        else:
            value = torch.tensor(official, dtype=torch.float32, device=reader.device)
        if value.shape != (channels,):
            raise CheckpointError(f"{reader.what}: {len(value)} values of {name} for {channels} latent channels")
        values.append(value)
    if not bool((torch.isfinite(values[1]) & (values[1] > 0)).all()):
        raise CheckpointError(f"{reader.what}: latents_std is zero, negative or not finite. Download the file again.")
    return values[0], values[1]


def per_channel(values: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """`values` [C] shaped to broadcast over dim 1 of `like` [B, C, ...], on its device."""
    return values.to(like.device).view(1, -1, *[1] * (like.ndim - 2))


def normalise(raw: torch.Tensor, mean: torch.Tensor, std: torch.Tensor) -> torch.Tensor:
    """(raw - mean) / std over dim 1, fp32."""
    return (raw.float() - per_channel(mean, raw)) / per_channel(std, raw)


def denormalise(latent: torch.Tensor, mean: torch.Tensor, std: torch.Tensor) -> torch.Tensor:
    """latent * std + mean over dim 1, fp32."""
    return latent.float() * per_channel(std, latent) + per_channel(mean, latent)


def sample_posterior(mean: torch.Tensor, logvar: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    """mean + exp(logvar / 2) * noise, with the noise drawn on the generator's device in the mean's dtype.

    A CPU generator therefore gives the same sample whatever device the VAE runs on.
    """
    noise = torch.randn(mean.shape, generator=generator, dtype=mean.dtype, device=generator.device)
    return mean + torch.exp(0.5 * logvar) * noise.to(mean.device)


def pixel_statistics(device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """Mean and standard deviation of the colours, [3] each."""
    mean, std = torch.tensor((PIXEL_MEAN, PIXEL_STD), dtype=torch.float32, device=device)
    return mean, std


def _over_frames(like: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    mean, std = pixel_statistics(like.device)
    return mean[:, None, None, None], std[:, None, None, None]


def to_pixels(frames_CFHW: torch.Tensor) -> torch.Tensor:
    """ImageNet-normalised frames of any dtype to [1, 3, F, H, W] fp32 in [0, 1]; always a new tensor."""
    mean, std = _over_frames(frames_CFHW)
    return torch.mul(frames_CFHW, std).add_(mean).clamp_(0, 1)[None]


def from_pixels(pixels_BCFHW: torch.Tensor) -> torch.Tensor:
    """Pixels in [0, 1] to ImageNet-normalised fp32."""
    mean, std = _over_frames(pixels_BCFHW)
    return (pixels_BCFHW.float() - mean) / std
