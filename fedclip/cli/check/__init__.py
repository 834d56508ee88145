# SPDX-License-Identifier: Apache-2.0
"""What `fedclip check` looks for in a configuration."""
