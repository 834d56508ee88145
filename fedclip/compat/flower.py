# SPDX-License-Identifier: Apache-2.0
"""The clipping of updates in Flower."""

from __future__ import annotations

from typing import Any

from fedclip.compat.base import Peers, Translation, entry, to

__all__ = ["PEERS"]

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


def _flower_fixed(
    noise_multiplier: Any, num_sampled_clients: Any, clipping_norm: Any
) -> Translation:
    if not noise_multiplier:
        return to("clipped-averaging", _WEIGHTS, max_norm=clipping_norm)
    return to(
        "update-clip-server",
        _UPDATES,
        _WEIGHTS,
        _SAME,
        start_norm=clipping_norm,
        learning_rate=0.0,
        min_norm=clipping_norm,
        max_norm=clipping_norm,
        noise_multiplier=noise_multiplier,
        expected_clients=num_sampled_clients,
    )


def _flower_adaptive(
    noise_multiplier: Any,
    num_sampled_clients: Any,
    initial_clipping_norm: Any = 0.1,
    target_clipped_quantile: Any = 0.5,
    clip_norm_lr: Any = 0.2,
    clipped_count_stddev: Any = None,
) -> Translation:
    noise = {
        "noise_multiplier": noise_multiplier,
        "expected_clients": num_sampled_clients,
        "bits_noise": clipped_count_stddev,
    }
    return to(
        "update-clip-server",
        _UPDATES,
        _WEIGHTS,
        _SPLIT if noise_multiplier else None,
        _SETTLES,
        start_norm=initial_clipping_norm,
        quantile=1.0 - target_clipped_quantile,
        learning_rate=clip_norm_lr,
        **(noise if noise_multiplier else {}),
    )


PEERS: Peers = {
    "flower": {
        "DifferentialPrivacyServerSideFixedClipping": entry(_flower_fixed),
        "DifferentialPrivacyClientSideFixedClipping": entry(_flower_fixed),
        "DifferentialPrivacyServerSideAdaptiveClipping": entry(_flower_adaptive),
        "DifferentialPrivacyClientSideAdaptiveClipping": entry(_flower_adaptive),
        "fixedclipping_mod": entry(
            lambda clipping_norm: to("clipped-averaging", _WEIGHTS, max_norm=clipping_norm)
        ),
    },
}
