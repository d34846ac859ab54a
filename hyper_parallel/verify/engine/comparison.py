"""Compares a parallel run with its reference, in the order of execution: `compare_runs`."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cached_property

import numpy as np

from hyper_parallel.verify.engine.blind_spots import blind_spots
from hyper_parallel.verify.engine.bounds import Bounds, Key
from hyper_parallel.verify.engine.checks import tensor_checks
from hyper_parallel.verify.engine.decisions import Decision, decisions_of
from hyper_parallel.verify.engine.distance import Distance
from hyper_parallel.verify.engine.evidence import Evidence
from hyper_parallel.verify.engine.hypotheses import find_cause
from hyper_parallel.verify.engine.order import execution_order
from hyper_parallel.verify.engine.pairing import PairedRuns
from hyper_parallel.verify.engine.power import power_of
from hyper_parallel.verify.engine.reduced_later import reduced_later
from hyper_parallel.verify.engine.samples import foreign_samples
from hyper_parallel.verify.engine.scalars import compare_scalars
from hyper_parallel.verify.engine.step_outputs import StepOutputs
from hyper_parallel.verify.engine.store import is_finite, largest, same_values
from hyper_parallel.verify.engine.unions import adds_up, is_union
from hyper_parallel.verify.engine.verdict import Difference, UnequalReplicas, Verdict
from hyper_parallel.verify.engine.wording import ranks_words, summary, value_words
from hyper_parallel.verify.frameworks.contract.records import Run

__all__ = ["compare_paired", "compare_runs"]

_TRAINING = ("gradient", "norm", "rate", "state", "weight")
_REPLICATED = ("weight", "state")
"""Kinds of values whose replicas must be bitwise equal, because ranks would drift apart otherwise."""

_DIVERGES = ("loss", "gradient", "weight", "norm")
"""Kinds of values that stay finite unless the training diverges."""

_EXPLAINED = 3
"""Number of differences, from the first, for which causes are searched."""


def compare_runs(
    reference: Run,
    perturbed: Sequence[Run] | Bounds,
    parallel: Run,
    *,
    mesh: Mapping[str, int] | None = None,
    declared: Mapping[str, str] | None = None,
) -> Verdict:
    """Return the verdict on a parallel run.

    Args:
        reference: the program on one rank.
        perturbed: repeats of the reference with perturbations of one ULP, at least one antithetic pair. Repeats with
            displaced gradients are marked in their settings (:data:`~hyper_parallel.verify.engine.bounds.DISPLACED`).
        parallel: the program on its ranks.
        mesh: sizes of the axes in order, the last one fastest; by default the groups that the ranks made.
        declared: placements of values, by pattern of names (:mod:`hyper_parallel.verify.engine.declared`).

    Raises:
        ValueError: the runs cannot be compared, or a declaration or the mesh does not match them.
    """
    return compare_paired(PairedRuns(reference, perturbed, parallel, mesh, declared))


def compare_paired(runs: PairedRuns, *, listed: bool = False) -> Verdict:
    """Return the verdict on two runs that are already paired.

    Args:
        runs: both runs.
        listed: whether the verdict also lists equal values.
    """
    comparison = _Comparison(runs, listed=listed)
    comparison.run()
    return comparison.verdict


class _Comparison:
    """Builds one verdict."""

    def __init__(self, runs: PairedRuns, *, listed: bool) -> None:
        self.runs, self.listed = runs, listed
        self.measured: dict[Key, dict[int, Distance]] = {}
        self.verdict = Verdict(runs.parallel.world_size, settings=dict(runs.parallel.settings))
        self.wrong: dict[Key, Difference] = {}
        self.ratios: dict[Key, float] = {}
        self.staged: set[tuple[Key, int]] = set()
        self.end = np.inf
        self.joined: set[tuple[str, int]] = set()

    def run(self) -> None:
        """Compare all values, sort the differences by order of execution, and find their causes."""
        self._names()
        self.end = self._first_step_that_diverges()
        for key in self.runs.bounds.reference:
            if key[2] < self.end and self.runs.holders(key):
                self._compare(key)
        self._missing()
        self._extra_masks()
        self._decisions()
        self._unheld()
        self._unrecorded()
        self.verdict.skipped += self.runs.padding
        self._replicas()
        self._unions_of_calls()
        self._unions_of_losses()
        self._reduced_later()
        self._counts_of_rows()
        self._losses_of_right_gradients()
        self._outputs_of_right_gradients()
        self._other_rows()
        self._other_samples()
        ordered = execution_order(self.runs, self.wrong)
        differences = [self.wrong[key] for key in ordered]
        causes = [find_cause(self.runs, key, self.wrong) for key in ordered[:_EXPLAINED]]
        for place, cause in enumerate(causes):
            differences[place] = replace(differences[place], cause=cause)
        self.verdict.differences = differences
        kept = {key: each for key, each in self.measured.items() if key in self.ratios}
        self.verdict.checks = list(
            tensor_checks(self.runs, kept, dict(zip(ordered, differences, strict=True))) if self.listed else ()
        )
        self.verdict.largest = max(self.ratios.values(), default=0.0)
        self.verdict.spots = blind_spots(self.runs)
        self.verdict.power = power_of(self.runs.bounds, self.ratios)
        self._unplaced()

    def _first_step_that_diverges(self) -> float:
        """Return the first step whose numbers are too large to compare; infinity if the training stays finite.

        If a training diverges, rounding errors grow with it: a rank may overflow one step before the single device.
        """
        for key, record in self.runs.bounds.reference.items():
            if key[0] not in _DIVERGES or key[2] < 0 or record.value.dtype.kind != "f":
                continue
            most = np.finfo(record.value.dtype).max ** 0.5 / 16  # squares of larger numbers overflow
            if not is_finite(record.value) or largest(record.value) > most:
                where = f"{value_words(key[0], key[1])} of the single device is infinite, NaN or about to overflow"
                self.verdict.skipped.append(f"step {key[2] + 1} and all after it: {where} (the training diverges)")
                return key[2]
        return np.inf

    # -- values ------------------------------------------------------------------------------------------------------

    def _compare(self, key: Key) -> None:
        scalar = key[0] == "loss" or (key[0] == "output" and not np.shape(self.runs.bounds.reference[key].value))
        if scalar and not any(self.runs.ranks[rank][key].region for rank in self.runs.holders(key)):
            distances = compare_scalars(self.runs, key, self.verdict.notes)
        else:
            distances = self.runs.distances(key)
        for rank in self._stages(key, distances):
            del distances[rank]
        for rank, distance in distances.items():
            if distance is not None:
                self.verdict.counts[key[0]] += 1
                self.verdict.checked += int(np.size(self.runs.ranks[rank][key].value))
                self.ratios[key] = max(self.ratios.get(key, 0.0), distance.ratio)
                if self.listed:
                    self.measured.setdefault(key, {})[rank] = distance
        wrong = {rank: distance for rank, distance in distances.items() if distance is not None and distance.ratio > 1}
        if key[0] == "gradient" and wrong:
            wrong = self._seen_by_optimizers(key, wrong)
        if wrong:
            self._differs(key, wrong)

    def _unrecorded(self) -> None:
        """List the masks that a recorder could not read: those of fused device kernels and of DTensors."""
        for notes in (self.runs.reference_notes, *(rank.notes for rank in self.runs.parallel.ranks)):
            for module in notes.get("masks that were not recorded", ()):
                line = f"mask of {module}: drawn inside a fused attention, which does not give it out"
                self.verdict.skipped += [] if line in self.verdict.skipped else [line]

    def _seen_by_optimizers(self, key: Key, wrong: Mapping[int, Distance]) -> dict[int, Distance]:
        """Return the wrong gradients except those that no optimizer of their rank reads.

        If no optimizer on any rank has the parameter, its weight must also be right after the step. Manually sharded
        optimizers own some of the parameters, or flat copies of them, on each rank: the ``grad`` of all other
        parameters is not used.
        """
        ranks = range(self.runs.parallel.world_size)
        without = [rank for rank in ranks if key[1] in self.runs.noted(rank, "parameters that no optimizer has")]
        owned = len(without) < len(ranks)  # then an error also makes a weight wrong
        unread = [rank for rank in wrong if rank in without and (owned or self._right_after(key, rank))]
        if unread:
            where = f"on ranks {', '.join(map(str, unread))}"
            line = f"gradient of {key[1]} {where}: no optimizer there has the parameter"
            self.verdict.skipped += [] if line in self.verdict.skipped else [line]
            if len(unread) == len(wrong):
                del self.ratios[key]
        return {rank: distance for rank, distance in wrong.items() if rank not in unread}

    def _right_after(self, key: Key, rank: int) -> bool:
        """Return whether the weight of a gradient is right on a rank after the step."""
        weight = ("weight", key[1], key[2], 0)
        if weight not in self.runs.ranks[rank] or weight not in self.runs.bounds.reference:
            return False
        distance = self.runs.distance(weight, rank)
        return distance is not None and distance.ratio <= 1

    def _stages(self, key: Key, distances: Mapping[int, Distance | None]) -> list[int]:
        """Return pipeline stages: ranks that have only some layers of a module while another rank has its right output.

        The stages of a pipeline call the same module, each with its own layers. If no rank has the right output, all
        stages are wrong. A rank that calls a layer which a rank with the right output also calls is not a stage: the
        two share the module, for example with different experts in it.
        """
        right = [rank for rank, distance in distances.items() if distance is not None and distance.ratio <= 1]
        if key[0] != "output" or not right or len(right) == len(distances):
            return []
        module = self.runs.ranks[right[0]][key].module
        weights = self._weights_of(module)
        stages = [
            rank
            for rank, distance in distances.items()
            if (distance is None or distance.ratio > 1)
            and self._lacks_parameters(rank, module)
            and not any(self._share(rank, other, weights) for other in right)
        ]  # fmt: skip
        if stages:
            why = "they have only some of its parameters, as pipeline stages do"
            line = f"{value_words('output', key[1])} on {ranks_words(stages)}: {why}"
            self.verdict.skipped += [] if line in self.verdict.skipped else [line]
        self.staged.update((key, rank) for rank in stages)
        return stages

    def _share(self, rank: int, other: int, weights: set[str]) -> bool:
        """Return whether two ranks both call a module that has one of these parameters."""
        modules = {name.rpartition(".")[0] for name in weights if self._has(rank, name) and self._has(other, name)}
        for each in (rank, other):
            modules &= {record.module for key, record in self.runs.ranks[each].items() if key[0] == "output"}
        return bool(modules)

    def _lacks_parameters(self, rank: int, module: str) -> bool:
        """Return whether a rank has only some of a module's parameters, as pipeline stages do."""
        return not all(self._has(rank, name) for name in self._weights_of(module))

    def _weights_of(self, module: str) -> set[str]:
        """Return the names of a module's parameters and buffers; all names for the model itself."""
        return {name for name in self.runs.parameters.names() if not module or name.startswith(f"{module}.")}

    def _accept(self, keys: Iterable[Key]) -> None:
        """Remove values, which are right if compared in a different way, from the differences and error ratios."""
        for key in keys:
            self.wrong.pop(key, None)
            self.ratios.pop(key, None)

    def _has(self, rank: int, name: str) -> bool:
        """Return whether a rank has a parameter or buffer in any step, because modules may be called late."""
        return name in self.held[rank]

    @cached_property
    def held(self) -> list[set[str]]:
        """Names of the parameters and buffers of each rank."""
        kinds = self.runs.parameters.KINDS
        return [{key[1] for key in records if key[0] in kinds} for records in self.runs.ranks]

    def _differs(self, key: Key, wrong: Mapping[int, Distance]) -> None:
        kind, name, step, call = key
        rank, worst = max(wrong.items(), key=lambda item: (item[1].ratio, -item[0]))
        record = self.runs.ranks[rank][key]
        placement = self.runs.placement(key, rank)
        self.wrong[key] = Difference(
            kind, name, record.module, tuple(sorted(wrong)), step, call, worst.error, worst.bound,
            f"rank {rank} {worst.why}",
            "" if placement is None else placement.words, site=record.site,
        )  # fmt: skip

    def _lacks(self, key: Key, ranks: Sequence[int], why: str) -> None:
        module = key[1].rpartition(".")[0]
        self.wrong[key] = Difference(key[0], key[1], module, tuple(ranks), key[2], key[3], np.inf, 0.0, why)

    # -- values that only one run has ----------------------------------------------------------------------------------

    def _missing(self) -> None:
        """Report gradients that ranks lack, and list other values that no rank has."""
        kinds = {key[0] for key in self.runs.bounds.reference}
        trained = kinds.intersection(_TRAINING) or kinds  # a single rank's later evaluation is not a step
        last = {rank: _last_step(index, trained) for rank, index in enumerate(self.runs.ranks)}
        end = _last_step(self.runs.bounds.reference, trained)
        for rank, step in last.items():
            if step < min(end, self.end - 1):
                does = f"stops after step {step + 1}" if step >= 0 else "makes no optimizer step"
                self.verdict.incomplete.append(f"rank {rank} {does}, the reference makes {end + 1}")
        absent: dict[tuple[str, str], None] = {}
        for key, record in self.runs.bounds.reference.items():
            holders = self.runs.holders(key)
            if key[2] >= self.end:
                continue
            if key[0] == "gradient" and largest(record.value):
                self._missing_gradient(key, [rank for rank in last if rank not in holders and last[rank] >= key[2]])
            elif not holders and key[0] == "norm" and self._clips_otherwise(key[2], last):
                self._lacks(key, tuple(last), "no rank has it, the single device does")
            elif not holders:
                absent.setdefault(key[:2])
        if absent:
            self.verdict.skipped.append(f"{summary(list(absent))}: missing on all ranks in some step")
        shapes = {
            str(shape): None for rank in self.runs.parallel.ranks
            for shape in rank.notes.get("parameters that no model has", ())
        }  # fmt: skip
        if shapes:
            sizes = ", ".join(list(shapes)[:4])
            line = f"gradients and state of parameters that only an optimizer has, of shapes {sizes}: they have no name"
            self.verdict.skipped.append(line)

    def _clips_otherwise(self, step: int, last: Mapping[int, int]) -> bool:
        """Return whether all ranks make a step and a gradient of it is wrong, so that a missing norm is wrong, too."""
        wrong = any(key[0] == "gradient" and key[2] == step for key in self.wrong)
        return wrong and all(end >= step for end in last.values())

    def _missing_gradient(self, key: Key, ranks: Sequence[int]) -> None:
        """Report a gradient that ranks with its parameter lack, if the weight after the step is wrong or unknown."""
        _, name, step, call = key
        lacking = []
        for rank in ranks:
            weight = ("weight", name, step, 0)
            if weight not in self.runs.ranks[rank] or self._trains_nothing(key, rank):
                continue
            after = self.runs.distance(weight, rank) if weight in self.runs.bounds.reference else None
            if after is None or after.ratio > 1:
                lacking.append(rank)
        if lacking:
            self._lacks(
                ("gradient", name, step, call), lacking, "the optimizer sees no gradient, the single device's does"
            )

    def _trains_nothing(self, key: Key, rank: int) -> bool:
        """Return whether a rank's optimizer has no element of a parameter because other ranks have all its shards.

        Such a rank records its empty gradient once per step, and not a second time at clipping.
        """
        calls = self.runs.calls(key[:3])
        found = [record for call in calls if (record := self.runs.ranks[rank].get(call)) is not None]
        return bool(found) and not any(np.size(record.value) for record in found)

    def _extra_masks(self) -> None:
        """Report masks that the reference does not draw at all, and list other values that only ranks have."""
        known = {key[:3] for key in self.runs.bounds.reference}
        extra: dict[Key, list[int]] = {}
        for rank, index in enumerate(self.runs.ranks):
            for key in index:
                if key[:3] not in known or (key[0] == "mask" and key not in self.runs.bounds.reference):
                    extra.setdefault(key, []).append(rank)
        listed: dict[tuple[str, str], None] = {}
        for key, ranks in extra.items():
            if key[0] == "mask":
                self._lacks(key, ranks, f"{ranks_words(ranks)} drop elements, the single device drops none")
            else:
                listed.setdefault(key[:2])
        if listed:
            self.verdict.skipped.append(f"{summary(list(listed))}: missing in the reference")

    def _decisions(self) -> None:
        """Report choices of ranks that are not near ties although their scores are right."""
        outside: dict[Key, list[Decision]] = {}
        for decision in decisions_of(self.runs.bounds, self.runs.parallel, self.runs.names):
            if decision.outside and decision.key[2] < self.end:
                outside.setdefault(decision.key, []).append(decision)
        for key, decisions in outside.items():
            self._lacks(key, [decision.rank for decision in decisions], decisions[0].why)

    def _unheld(self) -> None:
        """Report elements of initial weights that no rank has, and initial values that the reference does not have."""
        parameters = self.runs.parameters
        for name, rank in sorted(parameters.strangers):
            key = next(key for key in self.runs.ranks[rank] if key[0] in parameters.KINDS and key[1] == name)
            if key in self.runs.bounds.reference:
                shape, total = self.runs.value(key, rank).shape, self.runs.bounds.reference[key].value.shape
                known = self.wrong[key].ranks if key in self.wrong else ()
                why = f"{list(shape)} is not a part of the single device's {list(total)}"
                self._lacks(key, (*known, rank), why)
        for name in parameters.names():
            key = ("weight", name, -1, 0)
            holders = self.runs.holders(key)
            missing = parameters.missing(name)
            if key in self.runs.bounds.reference and not holders:
                self.verdict.incomplete.append(f"no rank has a parameter called {name}")
            elif missing.size and key not in self.wrong and key in self.runs.bounds.reference:
                count = int(np.size(self.runs.bounds.reference[key].value))
                self._lacks(key, holders, f"{missing.size} of the single device's {count} elements are on no rank")

    def _unions_of_calls(self) -> None:
        """Compare all calls of a step together, for outputs that differ call by call.

        A rank may split its shard of a batch over several calls, as gradient accumulation and evaluation do. Call k of
        the rank is then not a shard of call k of the single device, but its rows are among those of all calls. Every
        row of a rank must be one of these rows, within the tolerance, and every one of these rows must be on a rank. A
        value with a known placement that is wrong only as a complete tensor stays wrong: all its elements are within
        their tolerances, so this comparison would accept it.
        """
        unplaced = [name for kind, name in self.runs.activations.unplaced if kind == "output"]
        keys = [key for name in unplaced for key, _ in self._without_place("output", name) if key[2] < self.end]
        groups = dict.fromkeys((key[1], key[2]) for key in (*self.wrong, *keys) if key[0] == "output")
        joined: dict[tuple[str, str], None] = {}
        for name, step in groups:
            if is_union(self.runs, name, step, self._lacks_parameters) and not any(
                map(self._wrong_as_a_whole, self._calls(name, step))
            ):
                joined.setdefault(("output", name))
                self.joined.add((name, step))
                self._accept(self._calls(name, step))
        if joined:
            self.verdict.notes.append(f"{summary(list(joined))}: compared as the union of a step's calls")
        self.verdict.replicas = [
            unequal
            for unequal in self.verdict.replicas
            if unequal.kind != "output" or (unequal.name, unequal.step) not in self.joined
        ]

    def _calls(self, name: str, step: int) -> list[Key]:
        return [key for key in self.wrong if key[:3] == ("output", name, step)]

    def _wrong_as_a_whole(self, key: Key) -> bool:
        """Return whether a value has a placement wherever it is wrong, and every element is within its tolerance."""
        evidence = Evidence(self.runs, key, self.wrong[key].ranks)
        return evidence.within_elements and set(self.wrong[key].ranks) <= set(evidence.actual)

    def _unions_of_losses(self) -> None:
        """Compare the sum of a step's losses, if losses differ and outputs of the step were compared over all calls."""
        reference = self.runs.bounds.reference
        for step in sorted({key[2] for key in self.wrong if key[0] == "loss"} & {step for _, step in self.joined}):
            keys = [key for key in reference if key[0] == "loss" and key[2] == step]
            expected = sum(float(reference[key].value) for key in keys)
            allowed = sum(float(np.max(self.runs.bounds.allowed(key))) for key in keys)
            totals = [
                sum(float(record.value) for key, record in index.items() if key[0] == "loss" and key[2] == step)
                for index in self.runs.ranks
            ]
            if any(abs(total - expected) <= allowed for total in (float(np.mean(totals)), float(np.sum(totals)))):
                self._accept([key for key in keys if key in self.wrong])

    def _reduced_later(self) -> None:
        """Compare gradients that the optimizer reduces during its step as their sum or mean over the ranks."""
        names: dict[str, dict[tuple[str, str], None]] = {}
        known: dict[int, set[str]] = {}
        for others in (False, True):  # first the gradients whose weights are right
            for key in [key for key in self.wrong if key[0] == "gradient"]:
                found = reduced_later(self.runs, key, known.get(key[2], ()) if others else ())
                if found is not None:
                    known.setdefault(key[2], set()).add(found[0])
                    names.setdefault(found[0], {}).setdefault(key[:2])
                    self.ratios[key] = found[1]
                    del self.wrong[key]
                    self.verdict.replicas = [
                        each for each in self.verdict.replicas if (each.kind, each.name, each.step) != key[:3]
                    ]
        for words, listed in names.items():
            why = "the optimizer reduces them in its step, and the weights after it are right"
            self.verdict.notes.append(f"{summary(list(listed))}: compared as {words}; {why}")

    def _counts_of_rows(self) -> None:
        """Accept untrained parameters and buffers in which each rank counts its own rows, such as tokens per expert.

        The counts since the start of training must add up to those of the single device, exactly, over the groups of
        one axis.
        """
        reference = self.runs.bounds.reference
        trained = {key[1] for key in reference if key[0] == "gradient"}
        names = dict.fromkeys((key[0], key[1]) for key in self.wrong if key[0] in self.runs.parameters.KINDS)
        counts: dict[tuple[str, str], str] = {}
        for kind, name in names:
            keys = [key for key in reference if key[:2] == (kind, name) and key[2] < self.end]
            if name in trained or (kind, name, -1, 0) not in reference:
                continue
            axes = (
                axis for axis, groups in self.runs.axes.sets() if all(adds_up(self.runs, key, groups) for key in keys)
            )
            axis = next(axes, None)
            if axis is not None:
                counts[kind, name] = axis
                self._accept(keys)
        for (kind, name), axis in counts.items():
            line = f"{value_words(kind, name)}: each rank counts its own rows; over {axis} the counts add up"
            self.verdict.notes.append(line)
        self.verdict.replicas = [each for each in self.verdict.replicas if (each.kind, each.name) not in counts]

    def _losses_of_right_gradients(self) -> None:
        """List losses that are all wrong by one factor, in a step whose gradients are not wrong by that factor.

        The schedule of a pipeline may divide gradients by the number of micro-batches instead of dividing losses. Then
        some gradient of the step is right, which is impossible with a wrong loss, and no gradient is wrong by the
        factor of the losses.
        """
        reference = self.runs.bounds.reference
        for step in sorted({key[2] for key in self.wrong if key[0] == "loss"}):
            losses = [key for key in reference if (key[0], key[2]) == ("loss", step) and self.runs.holders(key)]
            gradients = [key for key in self.ratios if (key[0], key[2]) == ("gradient", step)]
            right = any(key not in self.wrong and largest(reference[key].value) for key in gradients)
            if not right or not all(key in self.wrong for key in losses):
                continue
            factors = self._factors(losses)
            factor = next(iter(factors), None)
            if factor is None or any(other is None or abs(other - factor) > 1e-5 * abs(factor) for other in factors):
                continue
            own = self._factors(key for key in gradients if key in self.wrong)
            if own and not any(other is not None and abs(other - factor) < 1e-3 * abs(factor) for other in own):
                self._accept(losses)
                line = f"the loss: {factor:.6g} times the single device's, but gradients are right, or off otherwise"
                self.verdict.skipped += [] if line in self.verdict.skipped else [line]

    def _factors(self, keys: Iterable[Key]) -> list[float | None]:
        """Return the factors by which the ranks' wrong values are multiples of the single device's."""
        return [self.runs.factor(key, rank) for key in keys for rank in self.wrong[key].ranks]

    def _outputs_of_right_gradients(self) -> None:
        """List outputs and losses that differ in a run whose gradients, norms, states and weights are all right.

        These numbers are local to the ranks: a mean over a rank's shard that is weighted afterwards, micro-batches that
        each rank cuts from its own shard, or padding of a rank's batch. They may have no counterpart in the reference.
        This covers only steps whose gradients were compared, and no outputs of evaluations.
        """
        steps = StepOutputs(self.runs, {key[2] for key in self.ratios if key[0] == "gradient"})
        if self.verdict.incomplete or self.runs.parameters.unplaced or not all(key in steps for key in self.wrong):
            return
        names: dict[tuple[str, str], None] = {}
        for key in list(self.wrong):
            names.setdefault(key[:2])
            self._uncount(key)
            del self.wrong[key]
        if names:
            why = "they differ, but all gradients, norms, optimizer states and weights are equal"
            self.verdict.skipped.append(f"{summary(list(names))}: {why}")
        self._unplaced_outputs(steps)

    def _unplaced_outputs(self, steps: StepOutputs) -> None:
        """List outputs whose placement cannot be determined, in a run whose training is right."""
        for (kind, name), why in list(self.runs.activations.unplaced.items()):
            places = self._unseen(kind, name)
            if kind == "output" and places and all(key in steps for key, _ in places):
                line = f"{value_words(kind, name)}: {why}, but all gradients, optimizer states and weights are equal"
                self.verdict.skipped.append(line)
                del self.runs.activations.unplaced[kind, name]

    def _uncount(self, key: Key) -> None:
        """Remove a value from the counts of compared values, because its difference is not reported."""
        if key in self.ratios:
            del self.ratios[key]
            values = [self.runs.ranks[rank][key].value for rank in self.runs.holders(key)]
            self.verdict.counts[key[0]] -= len(values)
            self.verdict.checked -= sum(int(np.size(value)) for value in values)

    def _other_rows(self) -> None:
        """If something differs, report earlier values whose rows on a rank are not those of the values before."""
        if not self.wrong:
            return
        start = execution_order(self.runs, self.wrong)[0]
        before = list(self.runs.bounds.reference)
        if start not in before:
            return
        for key, ranks in self.runs.activations.other_rows().items():
            if key not in self.wrong and key[2] <= start[2] and before.index(key) < before.index(start):
                placement = self.runs.placement(key, ranks[0])
                rows = "other rows" if placement is None else placement.words
                self._lacks(
                    key, sorted(set(ranks)), f"rank {ranks[0]} has {rows}, other rows than of the values before"
                )

    def _other_samples(self) -> None:
        """If something differs, report the first earlier output that is computed from wrong samples."""
        if not self.wrong:
            return
        start = execution_order(self.runs, self.wrong)[0]
        before = list(self.runs.bounds.reference)
        if start not in before:
            return
        for key in before[: before.index(start)]:
            if key[0] == "output" and key[2] == start[2]:
                foreign = foreign_samples(self.runs, key)
                if foreign:
                    self._lacks(
                        key, list(foreign), "they are computed from samples that the single device does not have"
                    )
                    return

    # -- replicas, names, placements -----------------------------------------------------------------------------------

    def _replicas(self) -> None:
        """Compare ranks that have the same shard with each other."""
        for key in self.runs.bounds.reference:
            if key[0] in {"loss", "value"} or key[2] >= self.end or len(self.runs.holders(key)) < 2:
                continue
            for placement, ranks in self.runs.replicas(key):
                if len(ranks) < 2:
                    continue
                self.verdict.replica_checks += len(ranks) - 1
                if key in self.wrong or key[0] in _REPLICATED:
                    values = [self.runs.ranks[rank][key].value for rank in ranks]
                    unlike = [
                        rank for rank, value in zip(ranks[1:], values[1:], strict=True)
                        if not same_values(values[0], value)
                    ]  # fmt: skip
                    if unlike:
                        holders = (ranks[0], *unlike)
                        self.verdict.replicas.append(UnequalReplicas(*key[:3], holders, placement.words))
                        if key not in self.wrong:
                            self._replicas_differ(key, holders)

    def _replicas_differ(self, key: Key, holders: tuple[int, ...]) -> None:
        """Report ranks that have the same shard of a value with different bits, each within the tolerance."""
        first, other = (self.runs.value(key, rank) for rank in holders[:2])
        count = int((first != other).sum()) if first.shape == other.shape else first.size
        self._lacks(
            key,
            holders,
            f"rank {holders[1]} holds the same part as rank {holders[0]}, and {count} of {first.size} elements have "
            "other bits",
        )

    def _names(self) -> None:
        for rank, modules in enumerate(self.runs.names):
            for own, target in modules.items():
                if own != target:
                    names = [name or "the model" for name in (own, target)]
                    self.verdict.notes.append(f"{names[0]} on rank {rank} is compared with the reference's {names[1]}")

    def _unplaced(self) -> None:
        for name, why in self.runs.parameters.unplaced.items():
            axis = next(iter(self.runs.axes.groups))
            line = f'parameter {name}: {why}; declare it, e.g. {{"{name}": "shard(0) over {axis}"}}'
            self.verdict.unplaced.append(line)
            self.verdict.incomplete.append(f"the placement of {name} cannot be determined")
        for (kind, name), why in self.runs.activations.unplaced.items():
            if not self._unseen(kind, name):
                continue
            axis = next(iter(self.runs.axes.groups))
            self.verdict.unplaced.append(
                f'{value_words(kind, name)}: {why}; declare it, e.g. {{"{kind} {name}": "shard(0) over {axis}"}}'
            )

    def _unseen(self, kind: str, name: str) -> list[tuple[Key, int]]:
        """Return the values of a name, with ranks, that have no placement and were not compared in another way."""
        return [
            place
            for place in self._without_place(kind, name)
            if place not in self.staged and (name, place[0][2]) not in self.joined
        ]

    def _without_place(self, kind: str, name: str) -> Iterator[tuple[Key, int]]:
        """Yield the values of a name, with their ranks, whose placement cannot be determined."""
        for key in self.runs.bounds.reference:
            if key[:2] == (kind, name):
                unplaced = (rank for rank in self.runs.holders(key) if self.runs.activations.of(key, rank) is None)
                yield from ((key, rank) for rank in unplaced)


def _last_step(keys: Iterable[Key], kinds: Collection[str]) -> int:
    """Return the last step with values of these kinds; -1 if there is none."""
    return max((key[2] for key in keys if key[0] in kinds), default=-1)
