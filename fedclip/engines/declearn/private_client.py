# SPDX-License-Identifier: Apache-2.0
"""A client that trains with DP-SGD, and enforces what its owner allows.

::

    Round:
        steps = those that the server asks for, as far as they fit into the budget: all are paid
        for each step:
            batch = Poisson sample of the units                          (sampling, records)
            sum   = Σ factor_i * gradient_i                              (persample, clipping)
            grads = (sum + z C normal) / expected batch size             (noise)
            apply what stands after sample-clip to grads, and step
        no step left: the update is zero

A unit is a record, or a person with several (`fedclip.dpsgd.persons`).
The server's seed and generator are not used: noise and samples come from a computationally secure
generator, keyed by the operating system. Only the update leaves a round. A record that raises
counts as zero, a text that might describe records stays in the client's log, and no step is paid
back.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any, TypeAlias

from declearn import messaging
from declearn.messaging import EvaluationReply, EvaluationRequest, PrivacyRequest
from declearn.training import TrainingManager

from fedclip.core import parameters
from fedclip.core.parameters import Config
from fedclip.dpsgd.calibrate import calibrate, steps_of_a_round, too_few
from fedclip.dpsgd.persample.base import Data, Float64, UnsupportedModelError
from fedclip.dpsgd.persons import Ids, Persons
from fedclip.dpsgd.step import IndependentNoise, PoissonSampler, SampleClipping
from fedclip.engines.declearn import persample
from fedclip.engines.declearn.evaluation import Evaluation
from fedclip.engines.declearn.members import untold
from fedclip.engines.declearn.persample import Records, first_records
from fedclip.engines.declearn.personal_client import PersonalFederatedClient
from fedclip.engines.declearn.sample_clip import place_of
from fedclip.privacy.accounting import Release
from fedclip.privacy.ledger import FILE, Ledger, fingerprint
from fedclip.privacy.noise import Normals, secure_normals

Budget: TypeAlias = tuple[float, float]


def _budget(max_budget: object) -> Budget:
    if not isinstance(max_budget, (list, tuple)) or len(max_budget) != 2:
        raise TypeError(f"max_budget must be (epsilon, delta), got {max_budget!r}")
    epsilon = parameters.positive(**{"epsilon of max_budget": max_budget[0]})
    return epsilon, parameters.unit_interval(**{"delta of max_budget": max_budget[1]})


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
        self.max_budget = parameters.optional(_budget, max_budget=max_budget)
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
        if ledger is None and self.ckptr is not None:
            ledger = Path(self.ckptr.folder, FILE)
        self.ledger = None if ledger is None else Path(ledger)
        if ledger is None:
            why = "neither ledger nor checkpoint is given: each start has the whole budget again"
            if self.require_privacy:
                raise ValueError(f"{why}; give ledger = a file, or a checkpoint folder")
            self.logger.warning("%s.", why)

    @property
    def spent(self) -> tuple[float, float] | None:
        """The (epsilon, delta) spent so far; None before the server has asked for privacy."""
        return None if self._private is None else self._private.get_privacy_spent()

    def make_private(self, message: PrivacyRequest) -> None:
        """Set up DP-SGD as the server asks for it, within what this client allows."""
        if (old := self.trainmanager) is None:
            raise RuntimeError("a client is made private by its server, once it has a model")
        parts = old.model, old.optim, old.aggrg, old.train_data, old.valid_data, old.metrics
        manager = PrivateTrainingManager(*parts, logger=old.logger, verbose=False)
        spent = self._private.ledger.accountant.spent if self._private is not None else ()
        valid, limit = self._valid, self.max_budget
        manager.make_private(message, limit, self.ledger, spent, self.records, valid)
        self.trainmanager = self._private = manager

    async def training_round(self, message: messaging.TrainRequest) -> None:
        """Run a training round, if it is private."""
        if self.require_privacy and not isinstance(self.trainmanager, PrivateTrainingManager):
            why = f"training round {message.round_i} would not be private, and this client has "
            await self._refuse(f"{why}require_privacy: set [run.privacy] on the server")
        else:
            await super().training_round(message)

    async def _collect_and_send_metadata(self, message: messaging.MetadataQuery) -> None:
        """Tell of the validation records what is asked, and of the others how many there are."""
        if missing := [name for name in message.fields if self._specs.get(name) is None]:
            why = f"valid_data does not tell {', '.join(missing)}, which the model needs"
            raise await self._refuse(f"{why}: for classes, build it with expose_classes=True")
        answer = {name: self._specs[name] for name in message.fields}
        await self.netwk.send_message(messaging.MetadataReply(answer))

    async def _initialize_fairness(self) -> None:
        if self.require_privacy:
            text = "fairness publishes losses of training records without noise"
            why = f"{text}, and this client has require_privacy: leave [run.fairness] out"
            raise await self._refuse(why)
        await super()._initialize_fairness()


class PrivateTrainingManager(TrainingManager):
    """Runs DP-SGD; made by `fedclip.PrivateFederatedClient`.

    Attributes
    ----------
    records
        The training records, or persons.
    stage
        What happens to single records, and what to their noisy sum.
    sclip_norm
        The bound on the norm of a record's gradient; the first one, if it is adaptive.
    calibration
        The budget, noise multiplier, sampling rate and steps.
    noise
        What adds noise to each sum; independent Gaussian noise.
    ledger
        What was spent, and the budget: the server's or the client's, whichever is the smaller.
    """

    def make_private(
        self,
        message: PrivacyRequest,
        max_budget: Budget | None = None,
        path: Path | None = None,
        spent: Sequence[Release] = (),
        records: Records | Persons | None = None,
        valid: Persons | None = None,
    ) -> None:
        """Set up DP-SGD; the model is tried on validation records.

        Parameters
        ----------
        message
            The request of the server.
        max_budget
            The client's own (epsilon, delta), which the server's can only be below.
        path
            Where the ledger is kept.
        spent
            By runs before, if no ledger is kept.
        records
            The training records, by person where persons are protected; None to read them here.
        valid
            The validation records by person; None if records are protected.

        Raises
        ------
        TypeError, ValueError
            If what is asked for would not be private, or is impossible.
        RuntimeError
            If the model raises for a record that it is tried on.
        """
        tried = first_records(self.valid_data)
        self.records = records or Records(self.train_data, tried[0])
        self._plan(message, max_budget, valid)
        # What fails for all records fails now, before anything is paid.
        with untold(self.logger, "the trial of the model", UnsupportedModelError):
            persample.try_out(self.model, tried, **self._settings)
            if self._evaluation is not None:
                for record in tried:
                    self._evaluation.of_record(self.model, record)
        self.noise = IndependentNoise()
        plan = self.calibration
        data = fingerprint(self.train_data, plan.records, plan.unit)
        self.ledger = Ledger(plan.epsilon, plan.delta, path, spent, data)
        self.ledger.plan = plan.releases if plan.evaluations else ()
        self._normals: Normals = secure_normals
        self._sampler = PoissonSampler(plan.records, int(plan.expected))
        self._charged, self._evaluated = 0, 0
        self._failed: list[tuple[int, BaseException]] = []
        self.logger.info(
            f"DP-SGD: {plan.records} {plan.unit}s, Poisson samples at rate {plan.rate:.4g}, "
            f"{plan.steps} steps, noise multiplier {plan.noise_multiplier:.4g}; of epsilon "
            f"{plan.epsilon:.4g} at delta {plan.delta:.3g}, {self.ledger.spent:.4g} is spent."
        )
        if why := too_few(plan.records, plan.delta, plan.unit):
            self.logger.warning("%s", why)

    def _plan(self, message: PrivacyRequest, budget: Budget | None, valid: Persons | None) -> None:
        """Refuse what would not be private; find noise and steps for the rest."""
        if message.accountant == "gdp":
            raise ValueError('accountant = "gdp" is no upper bound on epsilon: write "rdp"')
        persample.check(self.model)
        self.sclip_norm = parameters.positive(sclip_norm=message.sclip_norm)
        self.stage = place_of(self.optim.modules, persample.shapes(self.model), self.sclip_norm)
        steps = self._steps(message.batches, message.n_epoch, message.n_steps) * message.rounds
        epsilon, delta = map(min, message.budget, budget or message.budget)
        size, marker, unit = message.batches["batch_size"], self.stage.settings, self.records.unit
        calibration = calibrate(epsilon, delta, len(self.records), size, steps, unit)
        self.calibration = calibration.evaluating(marker.evaluation_share, message.rounds)
        self._evaluation = None
        if marker.loss_bound is not None and self.valid_data is not None:
            self._evaluation = Evaluation(self.metrics, marker.loss_bound)
            if unit == "person" and valid is None:
                text = "evaluation_share protects persons: say whose the validation records are"
                raise ValueError(f"{text}, by valid_persons; in a quickrun, by valid_persons.csv")
            self._valid: Records | Persons = valid or Records(self.valid_data)

    def _steps(self, batches: Config, n_epoch: int | None, n_steps: int | None) -> int:
        if steps := steps_of_a_round(len(self.records), batches, n_epoch, n_steps):
            return steps
        raise ValueError("noise needs a number of steps: set n_epoch or n_steps")

    @property
    def clipping(self) -> SampleClipping:
        """How the gradient of a record, or a person, is clipped."""
        return self.stage.settings.clipping

    def get_privacy_spent(self) -> tuple[float, float]:
        """Return the (epsilon, delta) that all steps so far have cost."""
        return self.ledger.spent, self.ledger.accountant.delta

    def train_under_constraints(
        self,
        batch_cfg: Config,
        n_epoch: int | None = 1,
        n_steps: int | None = None,
        timeout: int | None = None,
    ) -> dict[str, float]:
        """Take the steps of a round, as far as they fit into the budget.

        An epoch is as many steps as there are whole batches in the data. All batches are Poisson
        samples, whatever `batch_cfg` says of shuffling.

        Raises
        ------
        ValueError
            If there is no number of steps, a `timeout`, or another size of batches than was
            announced: noise and budget are accounted for that, and what is chosen anew after a
            release is not covered.
        RuntimeError
            If a step raises; what it raised is in the log only.
        """
        if timeout is not None:
            raise ValueError("timeout tells how long single records take: set n_epoch or n_steps")
        steps, plan = self._steps(batch_cfg, n_epoch, n_steps), self.calibration
        size = min(batch_cfg["batch_size"], plan.records)
        if size != plan.expected:
            text = f"batch_size = {size} is not what was announced before the run, "
            raise ValueError(f"{text}{plan.expected:g}, for which noise is accounted")
        remaining = plan.steps - self._charged
        allowed = self.ledger.reserve(plan.noise_multiplier, plan.rate, steps, remaining)
        self._charged += allowed
        with untold(self.logger, "a private step", UnsupportedModelError):
            for _ in range(allowed):
                self.run_train_step(self.records.take(self._sampler.draw(), self._fail))
        if self._charged >= plan.steps:
            # Before the last round this would be accounted anew, which takes long.
            spent = self.get_privacy_spent()
            self.logger.info("Privacy spent: epsilon %.4g at delta %.3g.", *spent)
        if allowed < steps:
            text = "The privacy budget of epsilon %.4g allows %d of the %d steps of this round%s."
            zero = "" if allowed else ": this client sends an update of zero"
            self.logger.warning(text, self.ledger.epsilon, allowed, steps, zero)
        epochs = allowed * self._sampler.expected // plan.records
        # Without a step there is no average: zero counts as the update of one step. The time
        # would tell how many records were drawn, and how long they are.
        return {"n_epoch": epochs, "n_steps": max(allowed, 1), "t_spent": 0.0}

    def run_train_step(self, batches: Data) -> None:
        """Take one step on a Poisson sample of the records, as `Records.take` returns them.

        Raises
        ------
        StopIteration
            If the budget does not allow it.
        """
        z, expected = self.calibration.noise_multiplier, self.calibration.expected
        self.ledger.charge(z, self._sampler.rate)
        settings = self.stage.settings
        clipping, bound = settings.clipping, settings.bound or self.sclip_norm
        sums, norms = self._clipped(batches, bound)
        self._tell()
        noisy = self.noise.add(sums, clipping.noise_multiplier(z, expected) * bound)
        if clipping.mode == "adaptive":
            # The noise above was for the old bound, as the gradients were clipped to that.
            settings.bound = clipping.next_bound(bound, norms, z, expected, self._normals)
        scale = clipping.scale(bound) / expected
        gradients = persample.vector(self.model, {name: a * scale for name, a in noisy.items()})
        modules = self.optim.modules
        self.optim.modules = self.stage.after
        try:
            self.optim.apply_gradients(self.model, gradients)
        finally:
            self.optim.modules = modules

    def _clipped(self, batches: Data, bound: float) -> tuple[dict[str, Float64], Float64]:
        """Return the sum of clipped gradients, and the norms; records that raise are noted."""
        factors, settings = partial(self.clipping.factors, bound=bound), self._settings
        return persample.clipped_sum(self.model, batches, factors, **settings, failed=self._fail)

    @property
    def _settings(self) -> Config:
        """How gradients are taken, with as many records at once as nearly all batches have."""
        expected = self.calibration.expected * self.records.mean
        # What is padded is padded to that.
        enough = 32 * math.ceil((expected + 3.0 * math.sqrt(expected)) / 32)
        most = min(self.stage.settings.micro_batch, enough)
        return {"groups": self.stage.groups, "micro_batch": most, "each": self.stage.each()}

    def _fail(self, record: int, exc: BaseException) -> None:
        self._failed.append((record, exc))

    def _tell(self) -> None:
        """Log the records of a step that raised."""
        text = "Records that raise count as zero, in an evaluation as the worst: "
        text += "%d of this step, the first is record %d: %r."
        for record, exc in self._failed[:1]:
            self.logger.error(text, len(self._failed), record, exc)
        self._failed = []

    def _evaluation_round(self, message: EvaluationRequest) -> EvaluationReply:
        with untold(self.logger, "the evaluation", UnsupportedModelError):
            if self._evaluation is not None:
                return self._noised(self._evaluation, message)
            reply = super()._evaluation_round(message)
        reply.t_spent = 0.0
        return reply

    def _noised(self, evaluation: Evaluation, message: EvaluationRequest) -> EvaluationReply:
        """Evaluate on all validation records, whatever is asked for, and pay before that."""
        if message.weights is not None:
            self.model.set_weights(message.weights, trainable=True)
        ((z, times, rate),) = self.calibration.evaluations
        means, remaining = evaluation.nothing, times - self._evaluated
        if remaining and self.ledger.reserve(z, rate, 1, remaining, True):
            self._evaluated += 1
            rows = evaluation.values(self.model, self._valid, self._fail)
            self._tell()
            means = evaluation.noised(rows, z, self._normals)
        else:
            self.logger.warning("The privacy budget allows no evaluation: the worst loss is sent.")
        loss = float(means[0] * evaluation.bounds[0])
        return EvaluationReply(loss, 1, 0.0, {**evaluation.states(means)})
