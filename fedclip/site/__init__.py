# SPDX-License-Identifier: Apache-2.0
"""What a site lets out, whatever a server or a job asks for; for any engine."""
