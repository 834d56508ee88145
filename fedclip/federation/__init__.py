# SPDX-License-Identifier: Apache-2.0
"""What concerns a whole federation: common statistics, and the clients' round updates."""
