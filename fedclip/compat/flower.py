# SPDX-License-Identifier: Apache-2.0
"""The clipping of updates in Flower."""

from __future__ import annotations

from fedclip.compat.base import Given, Peers, Translation, entry, renamed, to

_UPDATES = (
    'it clips a round\'s update: write aggregator = "clipped-averaging" beside it, and '
    "update-clip-client into client_opt; the line is for server_opt"
)
_WEIGHTS = "all clients weigh the same; Flower's FedAvg weighs by numbers of examples"
_SAME = (
    "the noise on the sum of the updates is Flower's, noise_multiplier times the bound: there are "
    "no votes to pay for"
)
_SPLIT = (
    "noise_multiplier is what a round is accounted with, votes included, as in Flower: the same "
    "clipped_count_stddev gives the same noise on updates. Without one, the votes get the larger "
    "of noise_multiplier and num_sampled_clients / 20 here, and the latter in Flower"
)
_SETTLES = (
    "the bound settles where the share target_clipped_quantile of the updates is clipped; Flower "
    "lowers its bound when more are, so that it runs away"
)


def _flower_fixed(c: Given) -> Translation:
    if not c["noise_multiplier"]:
        return to("clipped-averaging", _WEIGHTS, max_norm=c["clipping_norm"])
    limits = "start_norm=clipping_norm, min_norm=clipping_norm, max_norm=clipping_norm"
    return to(
        "update-clip-server",
        _UPDATES,
        _WEIGHTS,
        _SAME,
        **renamed(c, f"{limits}, {_NOISE}"),
        learning_rate=0.0,
    )


def _flower_adaptive(c: Given) -> Translation:
    noisy = bool(c["noise_multiplier"])
    noise = renamed(c, f"{_NOISE}, bits_noise=clipped_count_stddev") if noisy else {}
    return to(
        "update-clip-server",
        _UPDATES,
        _WEIGHTS,
        _SPLIT if noisy else None,
        _SETTLES,
        **renamed(c, "start_norm=initial_clipping_norm, learning_rate=clip_norm_lr"),
        **noise,
        quantile=1.0 - c["target_clipped_quantile"],
    )


_NOISE = "noise_multiplier=noise_multiplier, expected_clients=num_sampled_clients"
_FIXED = entry(_flower_fixed, "noise_multiplier, num_sampled_clients, clipping_norm")
_ADAPTIVE = entry(
    _flower_adaptive,
    "noise_multiplier, num_sampled_clients, initial_clipping_norm=0.1, "
    "target_clipped_quantile=0.5, clip_norm_lr=0.2, clipped_count_stddev=None",
)

PEERS: Peers = {
    "flower": {
        "DifferentialPrivacyServerSideFixedClipping": _FIXED,
        "DifferentialPrivacyClientSideFixedClipping": _FIXED,
        "DifferentialPrivacyServerSideAdaptiveClipping": _ADAPTIVE,
        "DifferentialPrivacyClientSideAdaptiveClipping": _ADAPTIVE,
        "fixedclipping_mod": entry(
            lambda clipping_norm: to("clipped-averaging", _WEIGHTS, max_norm=clipping_norm)
        ),
    }
}
