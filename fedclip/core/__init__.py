# SPDX-License-Identifier: Apache-2.0
"""What all clippers share: parameters, scopes, measures, states, records."""
