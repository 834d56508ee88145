# SPDX-License-Identifier: Apache-2.0
"""An app whose server asks for a site's data, and whose client tries to send them."""
