# SPDX-License-Identifier: Apache-2.0
"""fedclip in declearn: modules, aggregator, samplers, network, clients and servers as plug-ins.

No other room imports declearn. Start reading with `update_server` and `aggregator`, the two ends of
a round, which `context` connects; `private_client` is DP-SGD, `site` a site's policy.
"""
