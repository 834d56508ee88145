# SPDX-License-Identifier: Apache-2.0
"""Other packages' clippers, translated into ours.

Each file has tables by the names of other packages (peers), with a function for each class. Its
parameters and defaults are those of the class; it says which clipper and parameters give the same
numbers, and what differs. If the class has a defect, the translation is the corrected clipper, and
`notes` says so. What a peer has and we have not is in the tables too, with the reason. The
translation treats NaN and infinity as `on_nonfinite` says, whatever the class does.
"""

from __future__ import annotations

from collections.abc import Mapping

from fedclip.compat import drytorch, flower, frameworks, papers, smartclip, torchzero
from fedclip.compat.base import Entry, Given, Peers, Translation, checked
from fedclip.compat.words import unknown
from fedclip.errors import shown

__all__ = ["known", "notes", "translate"]

PEERS: Peers = {
    **drytorch.PEERS,
    **smartclip.PEERS,
    **torchzero.PEERS,
    **frameworks.PEERS,
    **flower.PEERS,
    **papers.PEERS,
}
"""The classes of other packages, by package, and why some have no translation."""


def translate(package: str, cls: str, config: Mapping[str, object]) -> tuple[str, str, Given]:
    """Return the clipper of fedclip that does the same as another package's.

    Parameters
    ----------
    package : str
        Name of the package, e.g. "torchzero".
    cls : str
        Name of its class or function, e.g. "ClipNorm".
    config : mapping
        The parameters that it was given; the others have their defaults there.

    Returns
    -------
    kind : str
        "module" or "regularizer", where declearn's `Optimizer` takes it, or "aggregator".
    name : str
        Registered name of our clipper.
    config : dict
        Its parameters.

    Raises
    ------
    TypeError
        If the parameters are not given by name.
    ValueError
        If the package, class, parameter, or a word given for a parameter is not known; if we have
        nothing that does the same; if a parameter without a default is missing; or if the value
        of one is of a wrong type.

    Examples
    --------
    >>> translate("optax", "clip_by_global_norm", {"max_norm": 0.5})
    ('module', 'norm-clip', {'max_norm': 0.5})
    >>> translate("torchzero", "ClipNrm", {})
    Traceback (most recent call last):
    ...
    ValueError: torchzero has no clipper 'ClipNrm'; did you mean 'ClipNorm'?
    """
    found = _translation(package, cls, config)
    return found.kind, found.name, found.config


def notes(package: str, cls: str, config: Mapping[str, object]) -> list[str]:
    """Return how the translation differs from the original: one sentence for each difference.

    It takes the same arguments as `translate`, and raises the same errors.

    Examples
    --------
    >>> notes("optax", "clip_by_global_norm", {"max_norm": 0.5})
    []
    >>> for note in notes("torchzero", "ClipNorm", {"max_norm": 1, "ord": "var"}):
    ...     print(note.partition(":")[0])
    dim=None
    ord='var'
    """
    return list(_translation(package, cls, config).notes)


def known() -> dict[str, list[str]]:
    """Return the classes that can be translated, by package.

    Examples
    --------
    >>> known()["timm"]
    ['adaptive_clip_grad']
    """
    return {
        package: [name for name, entry in classes.items() if isinstance(entry, Entry)]
        for package, classes in PEERS.items()
    }


def _translation(package: str, cls: str, config: Mapping[str, object]) -> Translation:
    if package not in PEERS:
        raise ValueError(unknown("there is no translation from", package, PEERS))
    if cls not in PEERS[package]:
        raise ValueError(unknown(f"{package} has no clipper", cls, PEERS[package]))
    entry = PEERS[package][cls]
    if not isinstance(entry, Entry):
        raise ValueError(f"{cls} of {package} is no clipper that can be translated: {entry}")
    if not isinstance(config, Mapping):
        raise TypeError(f"parameters must be given by name, as {{'x': 1}}, got {shown(config)}")
    values = checked(package, cls, entry.parameters, config)
    try:
        return entry.build(values)
    except (TypeError, OverflowError) as exc:
        raise ValueError(f"{cls} of {package} takes no such value: {exc}") from exc
