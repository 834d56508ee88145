# SPDX-License-Identifier: Apache-2.0
"""A federation in one process, with any number of clients; and audits of privacy claims."""
