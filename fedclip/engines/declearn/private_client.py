# SPDX-License-Identifier: Apache-2.0
"""A client that trains with DP-SGD, and enforces what its owner allows."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from declearn.messaging import MetadataQuery, MetadataReply, PrivacyRequest, TrainRequest

from fedclip.core import parameters
from fedclip.dpsgd.persons import Ids, Persons
from fedclip.engines.declearn.dataset_records import Records, first_records
from fedclip.engines.declearn.personal_client import PersonalFederatedClient
from fedclip.engines.declearn.private_training import PrivateTrainingManager
from fedclip.privacy.ledger import FILE

__all__ = ["PrivateFederatedClient"]


class PrivateFederatedClient(PersonalFederatedClient):
    """declearn's `FederatedClient` with DP-SGD: each record protected by a budget of the client's.

    The server is declearn's own, with ``[run.privacy]``; `sample-clip` in its ``client_opt`` is
    for settings, and may be left out.

    Parameters
    ----------
    *args, **settings
        As `PersonalFederatedClient` takes them. There must be `valid_data`: evaluation publishes
        losses of what it is done on, with noise only if `sample-clip` has an `evaluation_share`.
    max_budget : (float, float) or None, default=None
        Epsilon (> 0) and delta (in (0, 1)) that this client never goes beyond, whatever the
        server asks for. If the server asks for more, noise is sized for this.
    require_privacy : bool, default=True
        Refuse training rounds, and fairness rounds, which would publish something of the
        training records without noise.
    ledger : path or None, default=None
        File in which what was spent is kept over restarts: one for a set of records, whatever
        they are used for (`fedclip.privacy.ledger`). None: ``privacy_spent.json`` in the folder of
        `checkpoint`, which `require_privacy` demands then; without either, what was spent is
        forgotten when the process ends, and a warning says so.

    persons : sequence, array or path, default=None
        Whose each training record is: a text or a whole number for each, in the order of the
        records; or a CSV file with one column of them and a head. Then persons are protected, each
        with all of its records. None: each record alone.
    max_records : int or None, default=None
        Of a person that is drawn for a step, as many records are taken at most, at random; >= 1.
        None: all.
    valid_persons : sequence, array or path, default=None
        Whose each validation record is, as in `persons`; for evaluations with noise
        (``evaluation_share`` of `sample-clip`), which are refused without it if there are
        `persons`.

    Raises
    ------
    TypeError, ValueError
        If a parameter is not as above, `max_records` has no `persons`, or `require_privacy` has
        neither ledger nor checkpoint.
    Exception
        What `train_data` raises, if it is not readable at all.

    Notes
    -----
    Guarantee: what this client sends in all of its rounds is (epsilon, delta)-differentially
    private for adding or removing one training record, or one person with any number of them if
    `persons` are given, with the epsilon that `spent` returns. The server gets the number of
    persons then, counts of batches are of persons, and the gradient of a person is the mean of
    those of its records. A person with records at several clients is protected at each separately.
    With `evaluation_share` the same is true of a validation record, or person, in what evaluations
    tell: both are charged to one ledger.
    Not protected: the number of training records (or persons), what declearn's server asks about
    data, which is answered from the validation records, their losses without `evaluation_share`,
    and when the client sends.
    A record that is unreadable, or for which the model raises, counts as zero. That is logged
    in this client's log alone, as is what goes wrong otherwise with records.

    Noise, rate and the largest number of steps are those announced before the first one; a round
    with other batches is refused. Several runs on the same records, of which a later one may be
    planned by what the first has released, are counted at one of Rényi's orders, which the first
    plan fixes: some 10 to 20 % more than if all had been planned at first.

    When the budget is spent, the client goes on with updates of zero, and says so in its log.
    """

    measures = False

    def __init__(
        self,
        *args: Any,
        max_budget: Sequence[float] | None = None,
        require_privacy: bool = True,
        ledger: str | Path | None = None,
        persons: Ids | None = None,
        max_records: int | None = None,
        valid_persons: Ids | None = None,
        **settings: Any,
    ) -> None:
        self.max_budget: tuple[float, float] | None = None
        if max_budget is not None:
            if not isinstance(max_budget, (list, tuple)) or len(max_budget) != 2:
                raise TypeError(f"max_budget must be (epsilon, delta), got {max_budget!r}")
            epsilon, delta = max_budget
            self.max_budget = (
                parameters.positive(**{"epsilon of max_budget": epsilon}),
                parameters.unit_interval(**{"delta of max_budget": delta}),
            )
        self.require_privacy = parameters.boolean(require_privacy=require_privacy)
        super().__init__(*args, **settings)
        # Read now, as long as nobody else could see it fail.
        records = Records(self.train_data, *first_records(self.valid_data)[:1])
        assert self.valid_data is not None
        of_persons = {"max_records": max_records, "valid_persons": valid_persons}
        if persons is None and (named := [n for n, v in of_persons.items() if v is not None]):
            raise ValueError(f"{named[0]} is of persons: give persons too, or leave it out")
        self.records = records if persons is None else Persons(records, persons, max_records)
        self._valid = None
        if valid_persons is not None:
            self._valid = Persons(Records(self.valid_data), valid_persons, max_records)
        specs = dataclasses.asdict(self.valid_data.get_data_specs())
        self._specs = {**specs, "n_samples": len(self.records)}
        self._private: PrivateTrainingManager | None = None
        self.ledger = None if ledger is None else Path(ledger)
        if self.ledger is None and self.ckptr is not None:
            self.ledger = Path(self.ckptr.folder) / FILE
        if self.ledger is None:
            why = "neither ledger nor checkpoint is given: at each start of this client, "
            why += "its records would have the whole budget again"
            if self.require_privacy:
                raise ValueError(
                    f"{why}; give ledger = a file of these records, or a checkpoint folder"
                )
            self.logger.warning("%s.", why)

    @property
    def spent(self) -> tuple[float, float] | None:
        """The (epsilon, delta) spent so far; None before the server has asked for privacy."""
        return None if self._private is None else self._private.get_privacy_spent()

    def make_private(self, message: PrivacyRequest) -> None:
        """Set up DP-SGD as the server asks for it, within what this client allows."""
        if (old := self.trainmanager) is None:
            raise RuntimeError("a client is made private by its server, once it has a model")
        names = ("model", "optim", "aggrg", "train_data", "valid_data", "metrics", "logger")
        settings = {name: getattr(old, name) for name in names}
        manager = PrivateTrainingManager(**settings, verbose=False)
        before = self._private.ledger.accountant.spent if self._private is not None else ()
        manager.make_private(
            message, self.max_budget, self.ledger, before, self.records, self._valid
        )
        self.trainmanager = self._private = manager

    async def training_round(self, message: TrainRequest) -> None:
        """Run a training round, if it is private."""
        private = self._private is not None and self.trainmanager is self._private
        if self.require_privacy and not private:
            why = f"training round {message.round_i} would not be private, and this client has "
            await self._refuse(f"{why}require_privacy: set [run.privacy] on the server")
            return
        await super().training_round(message)

    async def _collect_and_send_metadata(self, message: MetadataQuery) -> None:
        """Tell of the validation records what is asked, and of the others how many there are."""
        known = self._specs
        if missing := [name for name in message.fields if known.get(name) is None]:
            why = f"valid_data does not tell {', '.join(missing)}, which the model needs"
            await self._refuse(f"{why}: for classes, build it with expose_classes=True")
            raise RuntimeError(why)
        await self.netwk.send_message(MetadataReply({name: known[name] for name in message.fields}))

    async def _initialize_fairness(self) -> None:
        if self.require_privacy:
            why = "fairness rounds publish losses of the training records without noise, and this "
            why += "client has require_privacy: leave [run.fairness] out"
            await self._refuse(why)
            raise RuntimeError(why)
        await super()._initialize_fairness()

    async def _refuse(self, why: str) -> None:
        await self.netwk.send_message(self._refused(why))
