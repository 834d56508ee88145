# SPDX-License-Identifier: Apache-2.0
"""The counterparts of shared clippers, for the server's optimizer: one small class each."""

from __future__ import annotations

from fedclip.clippers.adaptive_clip import AdaptiveClip
from fedclip.clippers.auto_clip import AutoClip
from fedclip.clippers.ema_clip import EmaClip
from fedclip.clippers.mad_clip import MadClip
from fedclip.clippers.percentile_norm_clip import PercentileNormClip
from fedclip.clippers.zscore_clip import ZScoreClip
from fedclip.engines.declearn.statistics_server import SharedServer


class ZScoreClipServer(SharedServer):
    """Keep mean and variance of all clients, for a shared `zscore-clip`.

    A round has N norms with mean m and population variance V; ``D = decay^N``. Before `warmup`
    norms, counted in whole rounds, the state is mean and variance of all norms. Afterwards ``mean
    <- D mean + (1-D) m`` and ``variance <- D variance + (1-D) (V + (m - mean)^2)``, exact to 1e-12
    for any number of clients.
    """

    name = "zscore-clip-server"
    clipper = ZScoreClip


class EmaClipServer(SharedServer):
    """Keep the average of all clients' norms, for a shared `ema-clip`.

    A round has N norms with mean m. Before `warmup` norms, counted in whole rounds, the mean is the
    smallest m. Afterwards ``mean <- decay^N mean + (1 - decay^N) m``, exact to 1e-12.
    """

    name = "ema-clip-server"
    clipper = EmaClip


class AutoClipServer(SharedServer):
    """Keep median and deviation of all clients, for a shared `auto-clip`.

    Mean and variance are those of all norms, exact to 1e-12. A sketch estimates the median, of all
    norms or of the last rounds with `window` norms, within 3 %.
    """

    name = "auto-clip-server"
    clipper = AutoClip


class PercentileNormClipServer(SharedServer):
    """Keep a percentile of all norms, for a shared `percentile-norm-clip`.

    A sketch estimates the percentile, of all norms or of the last rounds with `window` norms:
    within 3 % for norms between 1e-8 and 2e5.
    """

    name = "percentile-norm-clip-server"
    clipper = PercentileNormClip


class MadClipServer(SharedServer):
    """Keep median and deviation of all clients, for a shared `mad-clip`.

    A sketch estimates both from the last rounds with `window` norms: the median within 3 %, the
    deviation within 3 % of its norms.
    """

    name = "mad-clip-server"
    clipper = MadClip


class AdaptiveClipServer(SharedServer):
    """Keep one limit for all clients, for a shared `adaptive-clip`.

    The limit changes once a round, by the number of all clients' norms that were at most the limit,
    as soon as there are `every` norms.
    """

    name = "adaptive-clip-server"
    clipper = AdaptiveClip
