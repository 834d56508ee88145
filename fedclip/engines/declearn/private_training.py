# SPDX-License-Identifier: Apache-2.0
"""The training of a private client: sample, clip, add noise, divide by what was expected.

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

import math
from collections.abc import Sequence
from functools import partial
from pathlib import Path

from declearn.messaging import EvaluationReply, EvaluationRequest, PrivacyRequest
from declearn.training.dp import DPTrainingManager

from fedclip.core.parameters import Config
from fedclip.dpsgd.calibrate import Calibration, steps_of_a_round, too_few
from fedclip.dpsgd.persample.base import Data, Float64, UnsupportedModelError
from fedclip.dpsgd.persons import Persons
from fedclip.dpsgd.step import IndependentNoise, PoissonSampler, SampleClipping
from fedclip.engines.declearn import persample
from fedclip.engines.declearn.dataset_records import Records
from fedclip.engines.declearn.members import untold
from fedclip.engines.declearn.private_evaluation import Evaluation
from fedclip.engines.declearn.private_plan import Plan, plan_of
from fedclip.privacy.accounting import Release
from fedclip.privacy.ledger import Ledger, fingerprint
from fedclip.privacy.noise import Normals, secure_normals

__all__ = ["PrivateTrainingManager"]


class PrivateTrainingManager(DPTrainingManager):
    """Runs DP-SGD; made by `fedclip.PrivateFederatedClient`.

    Attributes
    ----------
    noise
        What adds noise to each sum; independent Gaussian noise.
    ledger
        What was spent, and the budget: the server's or the client's, whichever is the smaller.
    calibration
        Noise multiplier, sampling rate and steps.
    """

    noise: IndependentNoise
    ledger: Ledger
    calibration: Calibration

    def make_private(
        self,
        message: PrivacyRequest,
        max_budget: tuple[float, float] | None = None,
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
        plan = plan_of(self, message, max_budget, records, valid)
        self._plan, self.records, self.calibration = plan, plan.records, plan.calibration
        # What fails for all records fails now, before anything is paid.
        with untold(self.logger, "the trial of the model", UnsupportedModelError):
            expected = self.calibration.expected
            persample.try_out(self.model, plan.tried, **self._settings(expected))
            if plan.evaluation is not None:
                for record in plan.tried:
                    plan.evaluation.of_record(self.model, record)
        self.noise = IndependentNoise()
        self._start(plan, path, spent)

    def _start(self, plan: Plan, path: Path | None, spent: Sequence[Release]) -> None:
        """Open the ledger, and get ready for the first step."""
        many, unit, steps = len(plan.records), plan.records.unit, plan.calibration.steps
        epsilon, delta = plan.budget
        data = fingerprint(self.train_data, many, unit)
        self.ledger = Ledger(epsilon, delta, path, spent, data)
        self.ledger.plan = plan.calibration.releases if plan.calibration.evaluations else ()
        self._normals: Normals = secure_normals
        self._sampler = PoissonSampler(many, plan.batch_size)
        self._charged, self._evaluations = 0, plan.rounds
        self._failed: list[tuple[int, BaseException]] = []
        self.sclip_norm, self._dp_budget = plan.bound, plan.budget
        self.logger.info(
            "DP-SGD: %d %ss, Poisson samples at rate %.4g, %d steps, noise multiplier %.4g, "
            "budget epsilon %.4g at delta %.3g for zeroing out one %s, of which %.4g "
            "was spent before.",
            many,
            unit,
            self.calibration.rate,
            steps,
            self.calibration.noise_multiplier,
            epsilon,
            delta,
            unit,
            self.ledger.spent,
        )
        if why := too_few(many, delta, unit):
            self.logger.warning("%s", why)

    @property
    def clipping(self) -> SampleClipping:
        """How the gradient of a record, or a person, is clipped."""
        return self._plan.stage.settings.clipping

    def get_noise_multiplier(self) -> float:
        """Return the standard deviation of the noise over the bound."""
        return self.calibration.noise_multiplier

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
            raise ValueError(
                "timeout would let the number of steps tell how long single records take: set "
                "n_epoch or n_steps in [run.training], and no timeout"
            )
        steps = steps_of_a_round(len(self.records), batch_cfg, n_epoch, n_steps)
        if steps is None:
            raise ValueError("a round needs n_epoch or n_steps: its steps are paid for")
        sampler = PoissonSampler(len(self.records), batch_cfg["batch_size"])
        if sampler.rate != self._sampler.rate:
            raise ValueError(
                f"batch_size = {batch_cfg['batch_size']} is not what was announced before the run, "
                f"{self._sampler.expected:g}: noise is accounted for that, in all rounds"
            )
        z, rate = self.calibration.noise_multiplier, self._sampler.rate
        remaining = self.calibration.steps - self._charged
        allowed = self.ledger.reserve(z, rate, steps, remaining)
        self._charged += allowed
        with untold(self.logger, "a private step", UnsupportedModelError):
            for _ in range(allowed):
                self.run_train_step(self.records.take(self._sampler.draw(), self._fail))
        planned = self.calibration.steps
        self.logger.info(
            "Took %d private steps; charged %d of %d that the noise is for.",
            allowed,
            self._charged,
            planned,
        )
        if self._charged >= planned:
            # Before the last round this would be accounted anew, which takes long.
            self.logger.info(
                "Privacy spent: epsilon %.4g at delta %.3g.", *self.get_privacy_spent()
            )
        if allowed < steps:
            self.logger.warning(
                "The privacy budget of epsilon %.4g allows %d of the %d steps of this round%s.",
                self.ledger.epsilon,
                allowed,
                steps,
                "" if allowed else ": this client sends an update of zero",
            )
        epochs = allowed * self._sampler.expected // len(self.records)
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
        z, expected = self.calibration.noise_multiplier, float(self._sampler.expected)
        self.ledger.charge(z, self._sampler.rate)
        settings = self._plan.stage.settings
        clipping, bound = settings.clipping, settings.bound or self._plan.bound
        sums, norms = self._clipped(batches, bound)
        self._tell()
        noisy = self.noise.add(sums, clipping.noise_multiplier(z, expected) * bound)
        if clipping.mode == "adaptive":
            # The noise above was for the old bound, as the gradients were clipped to that.
            settings.bound = clipping.next_bound(bound, norms, z, expected, self._normals)
        scale = clipping.scale(bound) / expected
        gradients = persample.vector(self.model, {name: a * scale for name, a in noisy.items()})
        modules = self.optim.modules
        self.optim.modules = self._plan.stage.after
        try:
            self.optim.apply_gradients(self.model, gradients)
        finally:
            self.optim.modules = modules

    def _clipped(self, batches: Data, bound: float) -> tuple[dict[str, Float64], Float64]:
        """Return the sum of clipped gradients, and the norms; records that raise are noted."""
        factors = partial(self.clipping.factors, bound=bound)
        settings = self._settings(self._sampler.expected)
        return persample.clipped_sum(self.model, batches, factors, **settings, failed=self._fail)

    def _settings(self, expected: float) -> Config:
        """Return how gradients are taken, with as many records at once as batches have."""
        stage = self._plan.stage
        most = min(stage.settings.micro_batch, _enough(expected * self.records.mean))
        return {"groups": stage.groups, "micro_batch": most, "each": stage.each()}

    def _fail(self, record: int, exc: BaseException) -> None:
        self._failed.append((record, exc))

    def _tell(self) -> None:
        """Log the records of a step that raised."""
        if self._failed:
            (record, exc), many = self._failed[0], len(self._failed)
            self.logger.error(
                "Records that raise count as zero, in an evaluation as the worst; %d of this step, "
                "the first is record %d: %r.",
                many,
                record,
                exc,
            )
            self._failed = []

    def _evaluation_round(self, message: EvaluationRequest) -> EvaluationReply:
        if self.valid_data is None:
            raise ValueError(
                "without valid_data an evaluation would publish losses of the training records, "
                "without noise"
            )
        with untold(self.logger, "the evaluation", UnsupportedModelError):
            if self._plan.evaluation is not None and self._plan.valid is not None:
                return self._noised(self._plan.evaluation, self._plan.valid, message)
            reply = super()._evaluation_round(message)
        reply.t_spent = 0.0
        return reply

    def _noised(
        self, evaluation: Evaluation, valid: Records | Persons, message: EvaluationRequest
    ) -> EvaluationReply:
        """Evaluate on all validation records, whatever is asked for, and pay before that."""
        if message.weights is not None:
            self.model.set_weights(message.weights, trainable=True)
        ((z, _, rate),) = self.calibration.evaluations
        means = evaluation.nothing
        if self._evaluations and self.ledger.reserve(z, rate, 1, self._evaluations, True):
            self._evaluations -= 1
            rows = evaluation.values(self.model, valid, self._fail)
            self._tell()
            means = evaluation.noised(rows, z, self._normals)
        else:
            self.logger.warning(
                "The privacy budget allows no more evaluations: the worst loss that counts is "
                "sent, for one record."
            )
        loss = float(means[0] * evaluation.bounds[0])
        return EvaluationReply(loss, 1, 0.0, {**evaluation.states(means)})


def _enough(expected: float) -> int:
    """Return as many records as nearly all batches have: what is padded is padded to that."""
    return 32 * math.ceil((expected + 3.0 * math.sqrt(expected)) / 32)
